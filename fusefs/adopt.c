#include "fusefs/adopt.h"

#include "fusefs/beneath.h"
#include "fusefs/fs.h"
#include "iouring/store.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The folders above an object belong to whom the model's folder belongs to, not to the daemon:
 * mode and owner are handed down from it. CG_ERR_PERMISSION: a symbolic link is among them, and
 * may lead out of the store. */
static cg_status make_folders(cg_fs *fs, const char *object_path)
{
    char path[CG_TREE_PATH_BYTES];
    struct stat above;
    cg_status status = CG_OK;
    int above_fd = -1;
    for (const char *at = object_path; status == CG_OK && (at = strchr(at, '/')) != NULL; at++) {
        const size_t n_bytes = (size_t)(at - object_path);
        if (n_bytes >= sizeof path)
            return CG_ERR_BUFFER_TOO_SMALL;
        memcpy(path, object_path, n_bytes);
        path[n_bytes] = '\0';
        int fd = cg_beneath_open(fs->root_fd, path, O_PATH | O_DIRECTORY);
        if (fd < 0 && errno == ENOENT && above_fd >= 0) {
            const char *leaf = strrchr(path, '/') + 1;
            if (mkdirat(above_fd, leaf, above.st_mode & 07777) == 0 && fs->is_root &&
                fchownat(above_fd, leaf, above.st_uid, above.st_gid, AT_SYMLINK_NOFOLLOW) != 0)
                status = cg_status_from_errno(errno);
            fd = cg_beneath_open(fs->root_fd, path, O_PATH | O_DIRECTORY);
        }
        if (above_fd >= 0)
            close(above_fd);
        above_fd = fd;
        if (fd < 0 || fstat(fd, &above) != 0)
            status = errno == ELOOP ? CG_ERR_PERMISSION : cg_status_from_errno(errno);
    }
    if (above_fd >= 0)
        close(above_fd);
    return status;
}

/* A file that adopting may make beside what it links, and would make as ours. */
typedef struct companion {
    char path[CG_TREE_PATH_BYTES];
    bool is_new;
} companion;

static companion companion_at(const cg_fs *fs, const char *folder, size_t folder_bytes,
                              const char *leaf)
{
    companion c = {.is_new = false};
    struct stat attr;
    if (snprintf(c.path, sizeof c.path, "%.*s%s", (int)folder_bytes, folder, leaf) <
        (int)sizeof c.path)
        c.is_new = fs->is_root && fstatat(fs->root_fd, c.path, &attr, AT_SYMLINK_NOFOLLOW) != 0;
    return c;
}

/* Gives it the owner and mode of the file in the context. One that was there before keeps its
 * own: it may be an administrator's. */
static void hand_down(const cg_fs *fs, const companion *c, const char *path)
{
    struct stat from, attr;
    const int from_fd = c->is_new ? cg_beneath_open(fs->root_fd, path, O_PATH) : -1;
    const int fd = from_fd < 0 ? -1 : cg_beneath_open(fs->root_fd, c->path, O_RDONLY | O_NONBLOCK);
    if (fd >= 0 && fstat(from_fd, &from) == 0 && fstat(fd, &attr) == 0 && S_ISREG(attr.st_mode) &&
        attr.st_nlink == 1 && fchown(fd, from.st_uid, from.st_gid) == 0)
        fchmod(fd, from.st_mode & 0666);
    if (fd >= 0)
        close(fd);
    if (from_fd >= 0)
        close(from_fd);
}

static cg_status adopt_chunk(cg_fs *fs, const char *path, const cg_tree_name *name,
                             const cg_chunk_header *header)
{
    char object[CG_TREE_PATH_BYTES];
    companion copies[CG_N_LEVELS]; /* where there are no hard links */
    size_t n_copies = 0;
    cg_status status = CG_OK;
    for (unsigned level = header->level; level <= header->coarsest && status == CG_OK; level++) {
        status = cg_tree_object_path(name->model, &header->key, (cg_level)level, &header->profile,
                                     object, sizeof object);
        if (status == CG_OK)
            copies[n_copies++] = companion_at(fs, object, strlen(object), "");
    }
    if (status == CG_OK)
        status = make_folders(fs, object);
    if (status != CG_OK)
        return status;
    const size_t folder_bytes = (size_t)(strrchr(object, '/') + 1 - object);
    const companion tokens = companion_at(fs, object, folder_bytes, "tokens");
    status = cg_store_adopt(fs->root_fd, path, header);
    hand_down(fs, &tokens, path);
    for (size_t i = 0; i < n_copies; i++)
        hand_down(fs, &copies[i], path);
    return status;
}

static cg_status adopt_profile(cg_fs *fs, const char *path, const cg_tree_name *name)
{
    const companion current =
        companion_at(fs, name->model, strlen(name->model), "/profiles/default");
    cg_status status = make_folders(fs, current.path);
    if (status == CG_OK)
        status = cg_store_adopt_profile(fs->root_fd, path);
    hand_down(fs, &current, path);
    return status;
}

static cg_status adopt_model(cg_fs *fs, const char *path, const cg_tree_name *name)
{
    const companion model = companion_at(fs, name->model, strlen(name->model), "/model.json");
    cg_status status = make_folders(fs, model.path);
    if (status == CG_OK)
        status = cg_store_adopt_model(fs->root_fd, path);
    hand_down(fs, &model, path);
    return status;
}

void cg_fs_adopt(cg_fs *fs, const char *path, const cg_tree_name *name,
                 const cg_chunk_header *header)
{
    cg_status status;
    if (header != NULL && name->kind == CG_TREE_CONTEXT_CHUNK)
        status = adopt_chunk(fs, path, name, header);
    else if (name->kind == CG_TREE_CONTEXT_PROFILE)
        status = adopt_profile(fs, path, name);
    else if (name->kind == CG_TREE_CONTEXT_MODEL)
        status = adopt_model(fs, path, name);
    else
        return;
    cg_metrics_add(status == CG_OK ? &fs->metrics.adopted : &fs->metrics.adopt_errors, 1);
    if (status != CG_OK)
        cg_fs_log(fs, CG_LOG_WARNING, "%s cannot be found by its key: %s", path,
                  cg_strerror(status));
}

void cg_fs_adopt_tree(cg_fs *fs)
{
    uint32_t n_adopted = 0;
    if (fs->read_only)
        return;
    const cg_status status = cg_store_adopt_tree(fs->root_fd, &n_adopted);
    cg_metrics_add(&fs->metrics.adopted, n_adopted);
    if (status != CG_OK)
        cg_fs_log(fs, CG_LOG_WARNING, "looking for new contexts: %s", cg_strerror(status));
    else if (n_adopted > 0)
        cg_fs_log(fs, CG_LOG_INFO, "%u chunks of contexts are now found by their keys", n_adopted);
}
