#include "iouring/store.h"

#include "iouring/clock.h"
#include "iouring/file.h"
#include "iouring/io_op.h"
#include "iouring/layout.h"
#include "iouring/store_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

/* Who touches every CG_STORE_TOUCH_SECONDS may come a little early, by the clock of the file. A
 * time a little ahead is another host's, whose clock differs; were it set back, the two would take
 * turns. */
enum { TOUCH_SECONDS = CG_STORE_TOUCH_SECONDS - 15, AHEAD_SECONDS = 3600 };
static const uint64_t NEAR_NS = 1000000; /* sooner than this no network answers */

static cg_status make_folders(int root_fd, const char *model)
{
    static const char *const folders[] = {"", "/objects", "/contexts", "/profiles"};
    char path[CG_TREE_PATH_BYTES];
    for (size_t i = 0; i < sizeof folders / sizeof folders[0]; i++) {
        snprintf(path, sizeof path, "%s%s", model, folders[i]);
        if (mkdirat(root_fd, path, 0700) != 0 && errno != EEXIST)
            return cg_status_from_errno(errno);
    }
    return CG_OK;
}

static cg_status find_model(int root_fd, const char *model)
{
    struct stat s;
    if (fstatat(root_fd, model, &s, 0) != 0)
        return cg_status_from_errno(errno);
    return S_ISDIR(s.st_mode) ? CG_OK : CG_ERR_NOT_FOUND;
}

cg_status cg_store_open(const char *root, const char *model, bool create, cg_store **store_out)
{
    struct statfs fs;
    cg_status status = CG_ERR_NO_MEMORY;
    *store_out = NULL;
    if (!cg_tree_model_is_valid(model))
        return CG_ERR_INVALID_ARGUMENT;
    cg_store *store = calloc(1, sizeof *store);
    if (store == NULL)
        return status;
    store->root_fd = -1;
    if ((store->folders = malloc(sizeof *store->folders)) == NULL)
        goto failed;
    cg_folders_init(store->folders);
    strcpy(store->model, model); /* a valid name fits */
    store->root_fd = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    /* Only the last folder of it: where its parent is missing, too, the root is more likely
     * misspelt. */
    if (store->root_fd < 0 && errno == ENOENT && create && mkdir(root, 0700) == 0)
        store->root_fd = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (store->root_fd < 0) {
        status = cg_status_from_errno(errno);
        goto failed;
    }
    if ((store->root = realpath(root, NULL)) == NULL || fstatfs(store->root_fd, &fs) != 0) {
        status = cg_status_from_errno(errno);
        goto failed;
    }
    store->type = fs.f_type;
    if ((status = cg_layout_check(store->root_fd)) != CG_OK)
        goto failed;
    /* Not by the type of the file system: between this host and the mount may be sshfs or NFS. */
    store->is_mount = faccessat(store->root_fd, CG_LAYOUT_MOUNT, F_OK, 0) == 0;
    if (create && find_model(store->root_fd, model) == CG_ERR_NOT_FOUND)
        store->is_begun = cg_layout_find(store->root_fd) == CG_ERR_NOT_FOUND;
    if (create && (status = make_folders(store->root_fd, model)) != CG_OK)
        goto failed;
    if ((status = find_model(store->root_fd, model)) != CG_OK)
        goto failed;
    *store_out = store;
    return CG_OK;
failed:
    cg_store_free(store);
    return status;
}

bool cg_store_is_begun(const cg_store *store)
{
    return store->is_begun;
}

bool cg_store_is_of_the_gone(const cg_io_completion *answer)
{
    return answer->status != CG_OK && (answer->error == ESTALE || answer->error == ENOTCONN);
}

void cg_store_note(const cg_store *store, const cg_io_completion *answer)
{
    if (cg_store_is_of_the_gone(answer))
        __atomic_store_n(&store->folders->is_gone, true, __ATOMIC_RELEASE);
}

bool cg_store_is_gone(const cg_store *store)
{
    return __atomic_load_n(&store->folders->is_gone, __ATOMIC_ACQUIRE);
}

/* Whether a directory lies in a file system as the store's was. A bare mount point does not, even
 * where an engine that started too early has made a store in it. */
static cg_status check_again(const cg_store *store, int fd)
{
    struct statfs fs;
    if (fstatfs(fd, &fs) != 0)
        return cg_status_from_errno(errno);
    if (fs.f_type != store->type ||
        (store->is_mount && faccessat(fd, CG_LAYOUT_MOUNT, F_OK, 0) != 0))
        return CG_ERR_NOT_FOUND;
    const cg_status status = cg_layout_check(fd);
    return status == CG_OK ? find_model(fd, store->model) : status;
}

cg_status cg_store_reopen(cg_store *store)
{
    struct statx root;
    cg_status status = CG_OK;
    /* The answer may have been about a file alone, or of before the last time. */
    if (statx(store->root_fd, "", AT_EMPTY_PATH | AT_STATX_FORCE_SYNC, STATX_TYPE, &root) != 0) {
        const int fd = open(store->root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0)
            return cg_status_from_errno(errno);
        status = check_again(store, fd);
        if (status == CG_OK && dup3(fd, store->root_fd, O_CLOEXEC) < 0)
            status = cg_status_from_errno(errno);
        close(fd);
        for (unsigned i = 0; i < CG_N_FOLDERS && status == CG_OK; i++)
            cg_folders_lose(store->folders, (uint8_t)i);
    }
    if (status == CG_OK)
        __atomic_store_n(&store->folders->is_gone, false, __ATOMIC_RELEASE);
    return status;
}

void cg_store_free(cg_store *store)
{
    if (store == NULL)
        return;
    if (store->root_fd >= 0)
        close(store->root_fd);
    if (store->folders != NULL)
        cg_folders_destroy(store->folders);
    free(store->folders);
    free(store->root);
    free(store);
}

cg_status cg_store_chunk_header(int root_fd, const char *path, cg_level level, const cg_key *key,
                                const cg_fingerprint *profile, cg_chunk_header *header_out)
{
    const cg_status status = cg_file_chunk_header(root_fd, path, header_out);
    if (status != CG_OK)
        return status;
    if (!cg_chunk_holds(header_out, level) || !cg_key_equal(&header_out->key, key))
        return CG_ERR_FOREIGN_TOKENS;
    return level == CG_L0 ||
                   memcmp(header_out->profile.bytes, profile->bytes, sizeof profile->bytes) == 0
               ? CG_OK
               : CG_ERR_FOREIGN_PROFILE;
}

cg_status cg_store_object_place(const cg_store *store, const cg_key *key, cg_level level,
                                const cg_fingerprint *profile, cg_store_place *place)
{
    const int folder = cg_folders_get(store->folders, key->bytes[0]);
    const cg_status status =
        cg_tree_object_path(store->model, key, level, profile, place->whole, sizeof place->whole);
    /* Below a folder that is kept open only "<key>/<leaf>" of the path is left to walk. */
    place->dir_fd = folder < 0 ? store->root_fd : folder;
    place->path =
        folder < 0 ? place->whole : place->whole + strlen(store->model) + strlen("/objects/ab/");
    return status;
}

cg_status cg_store_open_folders(cg_store *store, uint64_t round_trip_ns)
{
    char path[CG_TREE_PATH_BYTES];
    snprintf(path, sizeof path, "%s/objects", store->model);
    return cg_folders_open(store->folders, store->root_fd, path, round_trip_ns);
}

cg_status cg_store_read(const cg_store *store, cg_io *io, const cg_key *key, cg_level level,
                        const cg_fingerprint *profile, uint64_t offset, uint64_t n_bytes,
                        cg_io_cache cache, uint64_t user)
{
    cg_store_place place;
    const cg_status status = cg_store_object_place(store, key, level, profile, &place);
    return status == CG_OK
               ? cg_io_read_range(io, place.dir_fd, place.path, offset, n_bytes, cache, user)
               : status;
}

cg_status cg_store_read_open(const cg_store *store, cg_io *io, const cg_key *key, cg_level level,
                             const cg_fingerprint *profile, uint64_t offset, uint64_t n_bytes,
                             uint64_t user)
{
    cg_store_place place;
    const cg_status status = cg_store_object_place(store, key, level, profile, &place);
    return status == CG_OK ? cg_io_read_open(io, place.dir_fd, place.path, offset, n_bytes, user)
                           : status;
}

bool cg_store_is_of_type(const cg_store *store, const char *type)
{
    char field[64];
    struct stat root;
    char *line = NULL;
    size_t line_bytes = 0;
    bool is = false;
    FILE *mounts = fstat(store->root_fd, &root) == 0 ? fopen("/proc/self/mountinfo", "re") : NULL;
    if (mounts == NULL)
        return false;
    snprintf(field, sizeof field, " - %s ", type);
    /* Spaces in names are \040 there, so that no name can look like the type. */
    while (!is && getline(&line, &line_bytes, mounts) > 0) {
        unsigned major_id, minor_id;
        is = sscanf(line, "%*s %*s %u:%u ", &major_id, &minor_id) == 2 &&
             makedev(major_id, minor_id) == root.st_dev && strstr(line, field) != NULL;
    }
    free(line);
    fclose(mounts);
    return is;
}

bool cg_store_wants_touches(const cg_store *store)
{
    return !store->is_mount;
}

bool cg_store_touch_is_due(const struct stat *attr)
{
    /* A time to come, of a clock that was wrong, would keep the file until then. */
    const int64_t age_s = time(NULL) - attr->st_atim.tv_sec;
    return age_s < -AHEAD_SECONDS || age_s >= TOUCH_SECONDS;
}

cg_status cg_store_touch_file(int dir_fd, const char *path)
{
    const int flags = AT_SYMLINK_NOFOLLOW | (path[0] == '\0' ? AT_EMPTY_PATH : 0);
    struct stat s;
    if (fstatat(dir_fd, path, &s, flags) != 0)
        return cg_status_from_errno(errno);
    if (!S_ISREG(s.st_mode))
        return CG_ERR_INVALID_ARGUMENT;
    if (!cg_store_touch_is_due(&s))
        return CG_OK;
    /* The other time as it was, and not UTIME_OMIT, which sshfs takes for now. */
    const struct timespec times[] = {{.tv_nsec = UTIME_NOW}, s.st_mtim};
    /* utimensat() takes no empty path before Linux 5.8. */
    const int result =
        path[0] == '\0' ? futimens(dir_fd, times) : utimensat(dir_fd, path, times, flags);
    return result == 0 ? CG_OK : cg_status_from_errno(errno);
}

cg_status cg_store_touch(const cg_store *store, const cg_key *key, cg_level level,
                         const cg_fingerprint *profile)
{
    cg_store_place place;
    const cg_status status = cg_store_object_place(store, key, level, profile, &place);
    return status == CG_OK ? cg_store_touch_file(place.dir_fd, place.path) : status;
}

/* A name that nobody has asked for before, so that no cache on this host answers, and that is not
 * there. now_ns: the time. */
static void new_name(const cg_store *store, uint64_t now_ns, char path_out[CG_TREE_PATH_BYTES])
{
    snprintf(path_out, CG_TREE_PATH_BYTES, "%s/objects/%016llx", store->model,
             (unsigned long long)now_ns);
}

cg_status cg_store_ask(const cg_store *store, cg_io *io, uint64_t user)
{
    char path[CG_TREE_PATH_BYTES];
    new_name(store, cg_now_ns(), path);
    return cg_io_stat(io, store->root_fd, path, user);
}

uint64_t cg_store_latency_ns(const cg_store *store)
{
    /* Twice, since this thread may have had to wait for a processor. */
    char path[CG_TREE_PATH_BYTES];
    struct stat s;
    uint64_t least_ns = UINT64_MAX;
    for (int i = 0; i < 2 && least_ns > NEAR_NS; i++) {
        const uint64_t began_ns = cg_now_ns();
        new_name(store, began_ns, path);
        /* Any other answer says nothing about the way: 0 passes for a store that is near. */
        if (fstatat(store->root_fd, path, &s, AT_SYMLINK_NOFOLLOW) == 0 || errno != ENOENT)
            return 0;
        const uint64_t ns = cg_now_ns() - began_ns;
        least_ns = ns < least_ns ? ns : least_ns;
    }
    return least_ns;
}

/* CG_OK without a completion is a wake-up (cg_io_wake()): not ours. */
static cg_status wait_for_one(cg_io *io, cg_io_completion *completion_out)
{
    size_t n = 0;
    while (n == 0) {
        const cg_status status = cg_io_wait(io, UINT64_MAX, completion_out, 1, &n);
        if (status != CG_OK)
            return status;
    }
    return completion_out->status;
}

cg_status cg_store_write(const cg_store *store, cg_io *io, const char *path, const void *bytes,
                         size_t n_bytes, bool replace)
{
    cg_io_completion completion;
    const cg_status status = cg_io_write(io, store->root_fd, path, bytes, n_bytes, replace, 0);
    return status == CG_OK ? wait_for_one(io, &completion) : status;
}

cg_status cg_store_write_temp(const cg_store *store, cg_io *io, const char *path, const void *bytes,
                              size_t n_bytes)
{
    cg_io_completion completion;
    const cg_status status = cg_io_write_temp(io, store->root_fd, path, bytes, n_bytes, 0);
    return status == CG_OK ? wait_for_one(io, &completion) : status;
}

cg_status cg_store_stat(const cg_store *store, cg_io *io, const char *path)
{
    cg_io_completion completion;
    const cg_status status = cg_io_stat(io, store->root_fd, path, 0);
    return status == CG_OK ? wait_for_one(io, &completion) : status;
}
