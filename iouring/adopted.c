#include "iouring/adopted.h"

#include "iouring/beneath.h"
#include "iouring/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    HASH_BYTES = sizeof(cg_key),
    MAGIC_BYTES = 8,
    STATE_NUMBERS = 8,
    YOUNG_S = 3, /* file systems have times of 2 s and finer */
};
static const char MAGIC[MAGIC_BYTES] = {'c', 'g', 'a', 'd', 'o', 'p', 't', '1'};
_Static_assert(sizeof(cg_key) == 16, "as the file has it");

static int compare(const void *a, const void *b)
{
    return memcmp(a, b, HASH_BYTES);
}

void cg_adopted_begin(int root_fd, int64_t now_s, cg_adopted *adopted_out)
{
    uint8_t *bytes;
    size_t n_bytes;
    *adopted_out = (cg_adopted){.root_fd = root_fd, .now_s = now_s};
    if (cg_file_read(root_fd, CG_ADOPTED_FILE, MAGIC_BYTES + (size_t)CG_ADOPTED_MAX * HASH_BYTES,
                     &bytes, &n_bytes) != CG_OK)
        return;
    if (n_bytes >= MAGIC_BYTES && memcmp(bytes, MAGIC, MAGIC_BYTES) == 0 &&
        (adopted_out->before = malloc(n_bytes)) != NULL) {
        adopted_out->n_before = (n_bytes - MAGIC_BYTES) / HASH_BYTES;
        memcpy(adopted_out->before, bytes + MAGIC_BYTES, n_bytes - MAGIC_BYTES);
    }
    free(bytes);
}

/* Hashes of the names in a folder, in whatever order they are listed. Takes fd. */
static bool add_names(int fd, uint64_t sum[2])
{
    uint64_t hash[2];
    DIR *dir = cg_beneath_list(fd);
    if (dir == NULL)
        return false;
    for (const struct dirent *e; (errno = 0, e = readdir(dir)) != NULL;) {
        const cg_key name = cg_key_of_bytes(e->d_name, strlen(e->d_name));
        memcpy(hash, name.bytes, sizeof hash);
        sum[0] += hash[0];
        sum[1] += hash[1];
    }
    const bool is_whole = errno == 0;
    closedir(dir);
    return is_whole;
}

static bool describe(const cg_adopted *adopted, const char *path, uint64_t out[STATE_NUMBERS])
{
    struct stat s;
    int fd = cg_beneath_open(adopted->root_fd, path, O_PATH);
    const bool is_read = fd >= 0 && fstat(fd, &s) == 0;
    if (fd >= 0)
        close(fd);
    if (!is_read || s.st_mtim.tv_sec > adopted->now_s - YOUNG_S ||
        s.st_ctim.tv_sec > adopted->now_s - YOUNG_S)
        return false;
    out[0] = s.st_ino;
    out[1] = (uint64_t)s.st_size;
    out[2] = (uint64_t)s.st_mtim.tv_sec;
    out[3] = (uint64_t)s.st_mtim.tv_nsec;
    out[4] = (uint64_t)s.st_ctim.tv_sec;
    out[5] = (uint64_t)s.st_ctim.tv_nsec;
    out[6] = out[7] = 0;
    if (!S_ISDIR(s.st_mode))
        return true;
    /* Over object stores a folder may keep its time whatever comes into it. */
    fd = cg_beneath_open(adopted->root_fd, path, O_RDONLY | O_DIRECTORY);
    return add_names(fd, out + 6);
}

bool cg_adopted_state(const cg_adopted *adopted, const char *path, const char *beside,
                      cg_key *state_out)
{
    struct {
        cg_key path;
        uint64_t own[STATE_NUMBERS], beside[STATE_NUMBERS];
    } what = {.path = cg_key_of_bytes(path, strlen(path))};
    if (!describe(adopted, path, what.own) ||
        (beside != NULL && !describe(adopted, beside, what.beside)))
        return false;
    *state_out = cg_key_of_bytes(&what, sizeof what);
    return true;
}

bool cg_adopted_has(const cg_adopted *adopted, const cg_key *state)
{
    return adopted->n_before > 0 &&
           bsearch(state, adopted->before, adopted->n_before, HASH_BYTES, compare) != NULL;
}

void cg_adopted_add(cg_adopted *adopted, const cg_key *state)
{
    if (adopted->n_now == adopted->max_now) {
        const size_t max = adopted->max_now > 0 ? 2 * adopted->max_now : 256;
        cg_key *larger = max <= CG_ADOPTED_MAX ? reallocarray(adopted->now, max, HASH_BYTES) : NULL;
        if (larger == NULL)
            return; /* it is looked at again */
        adopted->now = larger;
        adopted->max_now = max;
    }
    adopted->now[adopted->n_now++] = *state;
}

static cg_status write_file(cg_adopted *adopted)
{
    const size_t hash_bytes = adopted->n_now * HASH_BYTES;
    uint8_t *bytes = malloc(MAGIC_BYTES + hash_bytes);
    if (bytes == NULL)
        return CG_ERR_NO_MEMORY;
    /* First what it speaks of: folders of objects were not synced when they were made. */
    cg_status status = syncfs(adopted->root_fd) == 0 ? CG_OK : cg_status_from_errno(errno);
    memcpy(bytes, MAGIC, MAGIC_BYTES);
    if (hash_bytes > 0)
        memcpy(bytes + MAGIC_BYTES, adopted->now, hash_bytes);
    if (status == CG_OK)
        status =
            cg_file_write(adopted->root_fd, CG_ADOPTED_FILE, bytes, MAGIC_BYTES + hash_bytes, true);
    free(bytes);
    return status;
}

cg_status cg_adopted_end(cg_adopted *adopted, bool all_seen)
{
    cg_status status = CG_OK;
    size_t n = 0;
    for (size_t i = 0; i < adopted->n_before && !all_seen; i++)
        cg_adopted_add(adopted, &adopted->before[i]);
    if (adopted->n_now > 0)
        qsort(adopted->now, adopted->n_now, HASH_BYTES, compare);
    for (size_t i = 0; i < adopted->n_now; i++)
        if (n == 0 || compare(&adopted->now[n - 1], &adopted->now[i]) != 0)
            adopted->now[n++] = adopted->now[i];
    adopted->n_now = n;
    if (n != adopted->n_before ||
        (n > 0 && memcmp(adopted->now, adopted->before, n * HASH_BYTES) != 0))
        status = write_file(adopted);
    free(adopted->before);
    free(adopted->now);
    *adopted = (cg_adopted){.root_fd = -1};
    return status;
}
