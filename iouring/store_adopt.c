/* Adopting: what was copied into contexts/ becomes findable by its key, and usable. */
#include "codec/profile.h"
#include "iouring/adopted.h"
#include "iouring/beneath.h"
#include "iouring/file.h"
#include "iouring/same_file.h"
#include "iouring/store_internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_MODEL_JSON_BYTES = 1 << 20 };
static const uint64_t MAX_CHUNK_BYTES = 1ull << 32;

/* One look at the store on somebody's behalf. */
typedef struct adoption {
    int root_fd;
    const cg_store_hook *hook; /* NULL: nobody asks */
    uint32_t n_adopted;        /* chunks */
    cg_adopted *adopted;
    /* Of the folder of chunks that is looked at: */
    bool is_known; /* all of it was adopted, as it is */
    bool is_whole; /* nothing in it could not be adopted */
    uint32_t n_looked;
} adoption;

/* Around the making of path for the sake of `from`. dir_fd: its folder. */
static void begin(const adoption *a, const char *from, int dir_fd, bool is_folder)
{
    if (a->hook != NULL && a->hook->creating != NULL)
        a->hook->creating(a->hook->user, from, dir_fd, is_folder);
}

static cg_status end(const adoption *a, const char *from, int dir_fd, const char *path,
                     bool is_folder, bool is_made)
{
    const char *slash = strrchr(path, '/'), *leaf = slash == NULL ? path : slash + 1;
    /* Who was told of a beginning hears of its end, also when nothing was made. */
    if (a->hook == NULL || (!is_made && a->hook->creating == NULL))
        return CG_OK;
    return a->hook->created(a->hook->user, from, dir_fd, is_made ? leaf : NULL, is_folder);
}

/* Opens the folder above path and makes what is missing on the way. They are not synced: what a
 * power failure takes, the next look at the tree makes again.
 * CG_ERR_PERMISSION: one of them is no folder. A symbolic link may lead out of the store. */
static cg_status open_folder(const adoption *a, const char *from, const char *path, int *fd_out)
{
    const int flags = O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    char folder[CG_TREE_PATH_BYTES];
    cg_status status = CG_OK;
    int fd = openat(a->root_fd, ".", flags);
    if (fd < 0)
        return cg_status_from_errno(errno);
    for (const char *at = path, *slash; (slash = strchr(at, '/')) != NULL; at = slash + 1) {
        memcpy(folder, at, (size_t)(slash - at));
        folder[slash - at] = '\0';
        int next = openat(fd, folder, flags);
        if (next < 0 && errno == ENOENT) {
            /* Only where one is missing: the hook may change whose rights this thread has, which is
             * not for nothing. */
            begin(a, from, fd, true);
            const int error = mkdirat(fd, folder, 0700) == 0 ? 0 : errno;
            status = end(a, from, fd, folder, true, error == 0);
            if (error != 0 && error != EEXIST)
                status = cg_status_from_errno(error);
            next = status == CG_OK ? openat(fd, folder, flags) : -1;
        }
        if (next < 0 && status == CG_OK)
            status = errno == ENOTDIR || errno == ELOOP ? CG_ERR_PERMISSION
                                                        : cg_status_from_errno(errno);
        close(fd);
        if (status != CG_OK)
            return status;
        fd = next;
    }
    *fd_out = fd;
    return CG_OK;
}

static bool is_one_file(int root_fd, const char *path, const char *other)
{
    struct stat a, b;
    return fstatat(root_fd, path, &a, AT_SYMLINK_NOFOLLOW) == 0 &&
           fstatat(root_fd, other, &b, AT_SYMLINK_NOFOLLOW) == 0 && cg_same_file(&a, &b);
}

static bool is_file(int root_fd, const char *path, int fd)
{
    struct stat a, b;
    return fstat(fd, &a) == 0 && fstatat(root_fd, path, &b, AT_SYMLINK_NOFOLLOW) == 0 &&
           cg_same_file(&a, &b);
}

/* cg_file_install() into the folder of `to`. A link belongs to the owner of `from`; a copy is new.
 * path: of from, relative to the root. is_synced: from is on disk; each sync after a link costs a
 * commit of the file system's journal. */
static cg_status install(const adoption *a, const char *path, const char *from,
                         const cg_located *to, bool replace, bool is_synced, uint64_t copy_bytes)
{
    begin(a, path, to->dir_fd, false);
    const cg_status status = is_synced && !replace
                                 ? cg_file_link(a->root_fd, from, to->at, copy_bytes)
                                 : cg_file_install(a->root_fd, from, to->at, replace, copy_bytes);
    const bool is_made = status == CG_OK && !is_one_file(a->root_fd, from, to->at);
    const cg_status told = end(a, path, to->dir_fd, to->at, false, is_made);
    return status == CG_OK ? told : status;
}

/* A new file beside others that stay as they are. */
static cg_status write_new(const adoption *a, const char *path, const cg_located *to,
                           const void *bytes, size_t n_bytes)
{
    begin(a, path, to->dir_fd, false);
    const cg_status status = cg_file_write(a->root_fd, to->at, bytes, n_bytes, false);
    const cg_status told = end(a, path, to->dir_fd, to->at, false, status == CG_OK);
    return status == CG_OK ? told : status;
}

static cg_status object_path_of(const cg_tree_name *name, const cg_chunk_header *h, unsigned level,
                                char *path_out)
{
    return cg_tree_object_path(name->model, &h->key, (cg_level)level, &h->profile, path_out,
                               CG_TREE_PATH_BYTES);
}

static bool is_object(int root_fd, const char *object_path, unsigned level,
                      const cg_chunk_header *header)
{
    cg_chunk_header h;
    return cg_store_chunk_header(root_fd, object_path, (cg_level)level, &header->key,
                                 &header->profile, &h) == CG_OK;
}

/* Objects of one chunk and files of one context that are starts of one nested file become links of
 * the longest of them: its levels may have come one by one, in any order, or each with a file of
 * its own. Only space is at stake. */
static void share(int root_fd, const char *path, const cg_tree_name *name, const cg_chunk_header *h)
{
    enum { N_LOSSY = CG_N_LEVELS - CG_L1, N_NAMES = 2 * N_LOSSY };
    char names[N_NAMES][CG_TREE_PATH_BYTES];
    cg_located files[N_NAMES], own;
    uint8_t ours[CG_CHUNK_FIXED_BYTES], start[CG_CHUNK_FIXED_BYTES];
    bool is_ours[N_NAMES];
    uint64_t file_bytes[N_NAMES], longest_bytes = 0;
    if (cg_beneath_locate(root_fd, path, &own) != CG_OK)
        return;
    cg_status status = cg_file_read_start(root_fd, own.at, ours, sizeof ours, NULL);
    close(own.dir_fd);
    if (status != CG_OK)
        return;
    for (size_t i = 0; i < N_NAMES;
         i++) { /* objects first: of equally long ones they stay, and what links to them */
        const unsigned level = CG_L1 + i % N_LOSSY;
        files[i].dir_fd = -1;
        status = i < N_LOSSY ? object_path_of(name, h, level, names[i])
                             : cg_tree_context_path(name->model, name->context, (cg_level)level,
                                                    name->index, names[i], sizeof names[i]);
        if (status == CG_OK)
            status = cg_beneath_locate(root_fd, names[i], &files[i]);
        if (status == CG_OK)
            status = cg_file_read_start(root_fd, files[i].at, start, sizeof start, &file_bytes[i]);
        /* The fixed header has a checksum of itself and of those of all sections. */
        is_ours[i] = status == CG_OK && memcmp(start, ours, sizeof start) == 0;
        if (is_ours[i] && file_bytes[i] > longest_bytes)
            longest_bytes = file_bytes[i];
    }
    for (size_t i = 0; i < N_NAMES; i++) {
        for (size_t from = 0; from < N_NAMES && is_ours[i]; from++)
            if (is_ours[from] && file_bytes[from] == longest_bytes &&
                cg_file_share(root_fd, files[from].at, files[i].at, false) == CG_OK)
                break;
    }
    for (size_t i = 0; i < N_NAMES; i++)
        if (files[i].dir_fd >= 0)
            close(files[i].dir_fd);
}

static cg_status adopt_chunk(const adoption *a, const char *path, const cg_chunk_header *header)
{
    const int root_fd = a->root_fd;
    cg_tree_name name;
    cg_chunk_header h = *header;
    char object[CG_TREE_PATH_BYTES];
    cg_located from, to = {.dir_fd = -1};
    struct stat s;
    bool installed = false;
    cg_tree_parse(path, &name);
    if (name.kind != CG_TREE_CONTEXT_CHUNK)
        return CG_ERR_INVALID_ARGUMENT;
    cg_status status = cg_beneath_locate(root_fd, path, &from);
    if (status != CG_OK)
        return status;
    if (fstatat(root_fd, from.at, &s, AT_SYMLINK_NOFOLLOW) != 0) {
        status = cg_status_from_errno(errno);
        goto done;
    }
    /* The size says which levels the file holds: it may be the start of a nested chunk. */
    if ((status = cg_chunk_header_cut(&h, (uint64_t)s.st_size)) != CG_OK ||
        (status = cg_tree_check(&name, &h)) != CG_OK ||
        (status = object_path_of(&name, &h, h.level, object)) != CG_OK ||
        (status = open_folder(a, path, object, &to.dir_fd)) != CG_OK)
        goto done;
    for (unsigned level = h.level; level <= h.coarsest; level++) {
        if ((status = object_path_of(&name, &h, level, object)) != CG_OK ||
            (status = cg_beneath_locate_in(to.dir_fd, object, &to)) != CG_OK)
            goto done;
        if (is_object(root_fd, to.at, level, &h))
            continue;
        /* What stands there and is no such chunk was damaged behind the daemon's back: this one
         * heals it. */
        const bool replace = fstatat(root_fd, to.at, &s, AT_SYMLINK_NOFOLLOW) == 0;
        status = install(a, path, from.at, &to, replace, installed, h.level_bytes[level]);
        if (status != CG_OK && status != CG_ERR_EXISTS)
            goto done;
        /* The header is that of the file that was checked; the path may lead to another one since,
         * whose content no key of ours names. */
        if (status == CG_OK && !is_object(root_fd, to.at, level, &h)) {
            unlinkat(root_fd, to.at, 0);
            status = CG_ERR_FOREIGN_TOKENS;
            goto done;
        }
        installed = true;
    }
    if (installed && (status = cg_file_sync_dir(root_fd, to.at)) != CG_OK)
        goto done;
    if (h.is_nested)
        share(root_fd, path, &name, &h);
done:
    if (to.dir_fd >= 0)
        close(to.dir_fd);
    close(from.dir_fd);
    return status;
}

cg_status cg_store_adopt(int root_fd, const cg_store_hook *hook, const char *path,
                         const cg_chunk_header *header)
{
    const adoption a = {.root_fd = root_fd, .hook = hook};
    return adopt_chunk(&a, path, header);
}

static cg_status check_profile(const adoption *a, int fd, cg_fingerprint *fingerprint_out)
{
    uint8_t *bytes;
    size_t n_bytes;
    if (a->hook != NULL && a->hook->check_profile != NULL)
        return a->hook->check_profile(a->hook->user, fd, fingerprint_out);
    cg_status status = cg_file_read_open(fd, CG_PROFILE_MAX_BYTES, &bytes, &n_bytes);
    if (status == CG_OK)
        status = cg_profile_check(bytes, n_bytes, fingerprint_out);
    free(bytes);
    return status;
}

/* Whether profiles/default, at this place, names another profile than the first line of `line`. */
static bool is_another(int root_fd, const char *by_default, const char *line)
{
    char digits[CG_KEY_HEX_BYTES - 1];
    return cg_file_read_start(root_fd, by_default, digits, sizeof digits, NULL) == CG_OK &&
           memcmp(digits, line, sizeof digits) != 0;
}

/* Checks the file and installs it by one descriptor: who gives its name to another file meanwhile
 * changes nothing. */
cg_status cg_store_adopt_profile(int root_fd, const cg_store_hook *hook, const char *path,
                                 const struct stat *held)
{
    const adoption a = {.root_fd = root_fd, .hook = hook};
    cg_tree_name name;
    char installed[CG_TREE_PATH_BYTES], line[CG_KEY_HEX_BYTES + 1];
    cg_located from, to = {.dir_fd = -1}, by_default;
    cg_fingerprint fingerprint;
    cg_key key;
    struct stat s;
    cg_tree_parse(path, &name);
    if (name.kind != CG_TREE_CONTEXT_PROFILE)
        return CG_ERR_INVALID_ARGUMENT;
    cg_status status = cg_beneath_locate(root_fd, path, &from);
    if (status != CG_OK)
        return status;
    const int fd = cg_file_open(root_fd, from.at, &status);
    if (fd < 0)
        goto done;
    if (held != NULL && (fstat(fd, &s) != 0 || !cg_same_file(&s, held)))
        status = CG_ERR_NOT_FOUND;
    else
        status = check_profile(&a, fd, &fingerprint);
    if (status != CG_OK)
        goto done;
    memcpy(key.bytes, fingerprint.bytes, sizeof key.bytes);
    if ((status = cg_tree_profile_path(name.model, &fingerprint, installed, sizeof installed)) !=
            CG_OK ||
        (status = open_folder(&a, path, installed, &to.dir_fd)) != CG_OK ||
        (status = cg_beneath_locate_in(to.dir_fd, installed, &to)) != CG_OK ||
        (status = cg_beneath_locate_in(to.dir_fd, "default", &by_default)) != CG_OK)
        goto done;
    begin(&a, path, to.dir_fd, false);
    status = cg_file_install_open(fd, root_fd, to.at, false, UINT64_MAX);
    const bool is_made = status == CG_OK && !is_file(root_fd, to.at, fd);
    const cg_status told = end(&a, path, to.dir_fd, to.at, false, is_made);
    status = status == CG_OK ? told : status;
    if (status != CG_OK && status != CG_ERR_EXISTS)
        goto done;
    /* The model has it, and each context that is copied in brings its own. Only space is at stake.
     * A name that leads to another file by now is not the one that was checked. */
    if (status == CG_ERR_EXISTS && is_file(root_fd, from.at, fd))
        cg_file_share(root_fd, to.at, from.at, true);
    cg_key_to_hex(&key, line);
    strcat(line, "\n");
    /* Which syncs the directory. */
    status = write_new(&a, path, &by_default, line, strlen(line));
    if (status == CG_ERR_EXISTS) {
        if (hook != NULL && hook->not_default != NULL && is_another(root_fd, by_default.at, line))
            hook->not_default(hook->user, path, fd);
        status = cg_file_sync_dir(root_fd, to.at);
    }
done:
    if (to.dir_fd >= 0)
        close(to.dir_fd);
    if (fd >= 0)
        close(fd);
    close(from.dir_fd);
    return status;
}

cg_status cg_store_adopt_model(int root_fd, const cg_store_hook *hook, const char *path)
{
    const adoption a = {.root_fd = root_fd, .hook = hook};
    cg_tree_name name;
    char in_model[CG_TREE_PATH_BYTES];
    cg_located from, to;
    uint8_t *bytes;
    size_t n_bytes, at = 0;
    int dir_fd;
    cg_tree_parse(path, &name);
    if (name.kind != CG_TREE_CONTEXT_MODEL)
        return CG_ERR_INVALID_ARGUMENT;
    cg_status status = cg_beneath_locate(root_fd, path, &from);
    if (status != CG_OK)
        return status;
    status = cg_file_read(root_fd, from.at, MAX_MODEL_JSON_BYTES, &bytes, &n_bytes);
    close(from.dir_fd);
    if (status != CG_OK)
        return status;
    while (at < n_bytes && strchr(" \t\r\n", bytes[at]) != NULL && bytes[at] != '\0')
        at++;
    status = at < n_bytes && bytes[at] == '{'
                 ? cg_tree_model_file_path(name.model, "model.json", in_model, sizeof in_model)
                 : CG_ERR_CORRUPT;
    if (status == CG_OK)
        status = open_folder(&a, path, in_model, &dir_fd);
    if (status == CG_OK) {
        /* A copy: the model's file may be edited in place, and the context's must not change with
         * it. */
        if ((status = cg_beneath_locate_in(dir_fd, in_model, &to)) == CG_OK)
            status = write_new(&a, path, &to, bytes, n_bytes);
        close(dir_fd);
    }
    free(bytes);
    return status == CG_ERR_EXISTS ? CG_OK : status;
}

/* --- the whole tree --- */

/* Whether there are objects of all levels of a chunk; shared_out: of one file with it. */
static bool can_be_found(int root_fd, const char *chunk, const cg_tree_name *name,
                         const cg_chunk_header *h, bool *shared_out)
{
    char object[CG_TREE_PATH_BYTES];
    cg_located at;
    bool found = true;
    *shared_out = true;
    if (object_path_of(name, h, h->level, object) != CG_OK ||
        cg_beneath_locate(root_fd, object, &at) != CG_OK)
        return false;
    for (unsigned level = h->level; found && level <= h->coarsest; level++) {
        found = object_path_of(name, h, level, object) == CG_OK &&
                cg_beneath_locate_in(at.dir_fd, object, &at) == CG_OK;
        if (!found || is_one_file(root_fd, chunk, at.at))
            continue;
        *shared_out = false;
        found = is_object(root_fd, at.at, level, h);
    }
    close(at.dir_fd);
    return found;
}

/* path: a chunk's, which lies at `chunk`. */
static cg_status adopt_chunk_at(adoption *a, const char *path, const char *chunk)
{
    const int root_fd = a->root_fd;
    cg_tree_name name;
    cg_chunk_header header;
    bool shared;
    cg_tree_parse(path, &name);
    cg_status status = cg_file_chunk_header(root_fd, chunk, &header);
    if (status == CG_OK)
        status = cg_tree_check(&name, &header);
    if (status != CG_OK)
        return status;
    /* The usual case at the start of a mount: no bytes of the chunk are read. */
    if (can_be_found(root_fd, chunk, &name, &header, &shared)) {
        if (!shared && header.is_nested)
            share(root_fd, path, &name, &header);
        return CG_OK;
    }
    /* The header again: the file may be another one since it was read. */
    if ((status = cg_file_chunk_verify(root_fd, chunk, MAX_CHUNK_BYTES, &header)) == CG_OK &&
        (status = adopt_chunk(a, path, &header)) == CG_OK)
        a->n_adopted++;
    return status;
}

static cg_status adopt_chunk_file(adoption *a, const char *path)
{
    cg_located located;
    cg_status status = cg_beneath_locate(a->root_fd, path, &located);
    if (status != CG_OK)
        return status;
    status = adopt_chunk_at(a, path, located.at);
    close(located.dir_fd);
    return status;
}

/* Whether the whole look at the store should end; bad files in it are only passed over. */
static bool is_fatal(cg_status status)
{
    return status == CG_ERR_NO_MEMORY || status == CG_ERR_NO_SPACE || status == CG_ERR_READ_ONLY ||
           status == CG_ERR_CANCELLED;
}

typedef cg_status visitor(adoption *a, const char *path);

/* Calls visit for each entry of a directory whose name does not start with '.'. A missing directory
 * has none. */
static cg_status for_each(adoption *a, const char *dir_path, visitor *visit)
{
    char path[CG_TREE_PATH_BYTES];
    cg_status status = CG_OK;
    const int fd = cg_beneath_open(a->root_fd, dir_path, O_RDONLY | O_DIRECTORY);
    DIR *dir = cg_beneath_list(fd);
    if (dir == NULL)
        return errno == ENOTDIR || errno == ELOOP ? CG_ERR_NOT_FOUND : cg_status_from_errno(errno);
    const bool at_root = dir_path[0] == '\0';
    const struct dirent *e;
    while (!is_fatal(status) && (errno = 0, e = readdir(dir)) != NULL) {
        const int n = at_root ? snprintf(path, sizeof path, "%s", e->d_name)
                              : snprintf(path, sizeof path, "%s/%s", dir_path, e->d_name);
        if (a->hook != NULL && a->hook->is_over != NULL && a->hook->is_over(a->hook->user))
            status = CG_ERR_CANCELLED;
        else if (e->d_name[0] != '.' && n < (int)sizeof path)
            status = visit(a, path);
    }
    a->is_whole = a->is_whole && !is_fatal(status) && errno == 0;
    closedir(dir);
    return is_fatal(status) ? status : CG_OK;
}

static cg_status visit_chunk(adoption *a, const char *path)
{
    const uint32_t n_before = a->n_adopted;
    cg_tree_name name;
    cg_tree_parse(path, &name);
    if (name.kind != CG_TREE_CONTEXT_CHUNK || (a->is_known && a->n_looked > 0))
        return CG_OK;
    const cg_status status = adopt_chunk_file(a, path);
    a->n_looked++;
    a->is_whole = a->is_whole && status == CG_OK;
    /* It was adopted once: somebody has removed the objects. */
    a->is_known = a->is_known && a->n_adopted == n_before;
    return status;
}

/* A folder of chunks. Of one that is as it was when all of it was adopted the first chunk alone is
 * looked at. */
static cg_status visit_level(adoption *a, const char *path)
{
    cg_key state;
    const bool has_state = cg_adopted_state(a->adopted, path, NULL, &state);
    a->is_known = has_state && cg_adopted_has(a->adopted, &state);
    a->is_whole = true;
    a->n_looked = 0;
    const cg_status status = for_each(a, path, visit_chunk);
    if (has_state && a->is_whole && status == CG_OK)
        cg_adopted_add(a->adopted, &state);
    return status;
}

/* A context's profile or model.json. place: the folder to which adopting it may add a file. */
static cg_status visit_file(adoption *a, const char *path, const char *place,
                            cg_status (*adopt)(int, const cg_store_hook *, const char *))
{
    cg_key state;
    const bool has_state = cg_adopted_state(a->adopted, path, place, &state);
    const bool is_known = has_state && cg_adopted_has(a->adopted, &state);
    const cg_status status = is_known ? CG_OK : adopt(a->root_fd, a->hook, path);
    if (has_state && status == CG_OK)
        cg_adopted_add(a->adopted, &state);
    return status;
}

static cg_status adopt_any_profile(int root_fd, const cg_store_hook *hook, const char *path)
{
    return cg_store_adopt_profile(root_fd, hook, path, NULL);
}

static cg_status visit_context_entry(adoption *a, const char *path)
{
    cg_tree_name name;
    char profiles[CG_TREE_PATH_BYTES];
    const char *leaf = strrchr(path, '/') + 1;
    cg_tree_parse(path, &name);
    if (name.kind == CG_TREE_CONTEXT_PROFILE) {
        snprintf(profiles, sizeof profiles, "%s/profiles", name.model);
        return visit_file(a, path, profiles, adopt_any_profile);
    }
    if (name.kind == CG_TREE_CONTEXT_MODEL)
        return visit_file(a, path, name.model, cg_store_adopt_model);
    if (leaf[0] == 'L' && leaf[1] >= '0' && leaf[1] < '0' + CG_N_LEVELS && leaf[2] == '\0')
        return visit_level(a, path);
    return CG_OK;
}

static cg_status visit_context(adoption *a, const char *path)
{
    return for_each(a, path, visit_context_entry);
}

static cg_status visit_model(adoption *a, const char *path)
{
    char contexts[CG_TREE_PATH_BYTES];
    snprintf(contexts, sizeof contexts, "%.*s/contexts", CG_TREE_NAME_BYTES, path);
    return cg_tree_model_is_valid(path) ? for_each(a, contexts, visit_context) : CG_OK;
}

cg_status cg_store_adopt_new(int root_fd, const cg_store_hook *hook, int64_t now_s,
                             uint32_t *n_adopted_out)
{
    cg_adopted adopted;
    adoption a = {.root_fd = root_fd, .hook = hook, .adopted = &adopted};
    cg_adopted_begin(root_fd, now_s, &adopted);
    const cg_status status = for_each(&a, "", visit_model);
    cg_adopted_end(&adopted, status == CG_OK); /* or the next look is at more */
    if (n_adopted_out != NULL)
        *n_adopted_out = a.n_adopted;
    return status;
}
