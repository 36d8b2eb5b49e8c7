#include "fusefs/adopt.h"

#include "fusefs/claims.h"
#include "fusefs/fs.h"
#include "fusefs/persona.h"
#include "fusefs/space.h"
#include "iouring/beneath.h"
#include "iouring/store.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* What the store makes should not belong to the daemon. A folder gets owner and mode of the folder
 * above it, a file those of the context's file. If we are not root, everything stays ours. */
static bool owner_to_be(const cg_fs *fs, const char *from, int dir_fd, bool is_folder,
                        struct stat *like_out)
{
    const int from_fd = is_folder ? -1 : cg_beneath_open(fs->root_fd, from, O_PATH);
    const bool is_known = fstat(is_folder ? dir_fd : from_fd, like_out) == 0;
    if (from_fd >= 0)
        close(from_fd);
    return is_known;
}

static void become_owner(void *user, const char *from, int dir_fd, bool is_folder)
{
    const cg_fs *fs = user;
    struct stat like;
    if (fs->is_root && owner_to_be(fs, from, dir_fd, is_folder, &like))
        cg_persona_enter(like.st_uid, like.st_gid);
}

static cg_status set_mode(void *user, const char *from, int dir_fd, const char *leaf,
                          bool is_folder)
{
    const cg_fs *fs = user;
    struct stat like, attr;
    cg_persona_leave();
    if (leaf == NULL || (!is_folder && !fs->is_root) ||
        !owner_to_be(fs, from, dir_fd, is_folder, &like))
        return CG_OK;
    const int flags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    const int fd = openat(dir_fd, leaf, is_folder ? flags | O_DIRECTORY : flags);
    if (fd < 0)
        return CG_OK;
    /* Another's, or one with more names, is not what was made: somebody was faster. */
    if (fstat(fd, &attr) == 0 && attr.st_uid == like.st_uid &&
        (is_folder || (S_ISREG(attr.st_mode) && attr.st_nlink == 1)))
        /* A chunk is not executable, and set-id bits are not handed on. */
        fchmod(fd, like.st_mode & (is_folder ? 07777 : 0666));
    close(fd);
    return CG_OK;
}

static cg_status check_profile(void *user, int fd, cg_fingerprint *fingerprint_out)
{
    cg_fs *fs = user;
    return cg_strict_check_profile(fd, &fs->budget, fingerprint_out);
}

/* In a look at the tree nobody holds the file: it is claimed until it has its second name, when its
 * descriptor is closed. */
static cg_status claim_and_check_profile(void *user, int fd, cg_fingerprint *fingerprint_out)
{
    return cg_claim_to_publish(fd) == 0 ? check_profile(user, fd, fingerprint_out) : CG_ERR_AGAIN;
}

static void tell_not_default(void *user, const char *path, int fd)
{
    cg_fs_log_of_file(user, fd, "not served, as profiles/default names another profile:", path,
                      CG_ERR_FOREIGN_PROFILE);
}

void cg_fs_adopt(cg_fs *fs, const char *path, const cg_tree_name *name, int fd,
                 const cg_chunk_header *header)
{
    struct stat held;
    const cg_store_hook hook = {.creating = become_owner,
                                .created = set_mode,
                                .check_profile = check_profile,
                                .not_default = tell_not_default,
                                .user = fs};
    cg_status status;
    if (header != NULL && name->kind == CG_TREE_CONTEXT_CHUNK)
        status = cg_store_adopt(fs->root_fd, &hook, path, header);
    else if (name->kind == CG_TREE_CONTEXT_PROFILE)
        /* On a store that is not local a file may have another number by each of its names, as over
         * sshfs. */
        status = cg_store_adopt_profile(
            fs->root_fd, &hook, path,
            fs->has_identities && fd >= 0 && fstat(fd, &held) == 0 ? &held : NULL);
    else if (name->kind == CG_TREE_CONTEXT_MODEL)
        status = cg_store_adopt_model(fs->root_fd, &hook, path);
    else
        return;
    cg_metrics_add(status == CG_OK ? &fs->metrics.adopted : &fs->metrics.adopt_errors, 1);
    cg_space_failed(fs, status == CG_ERR_NO_SPACE ? ENOSPC : 0);
    if (status != CG_OK)
        cg_fs_log_of_file(fs, fd, "not adopted:", path, status);
}

bool cg_fs_is_misplaced(const char *path)
{
    static const char LEAF[] = "/context.json";
    const char *leaf = strrchr(path, '/'), *slash = strchr(path, '/');
    return leaf != NULL && strcmp(leaf, LEAF) == 0 &&
           (slash == leaf || strchr(slash + 1, '/') == leaf);
}

void cg_fs_tell_misplaced(cg_fs *fs, const char *path, int fd)
{
    const cg_key name = cg_key_of_bytes(path, strlen(path));
    bool is_told = false;
    pthread_mutex_lock(&fs->log_lock);
    for (size_t i = 0; i < CG_N_MISPLACED; i++)
        is_told |= cg_key_equal(&fs->misplaced[i], &name);
    pthread_mutex_unlock(&fs->log_lock);
    if (is_told || !cg_fs_log_of_file(fs, fd, "not served, contexts lie in MODEL/contexts/NAME:",
                                      path, CG_ERR_INVALID_ARGUMENT))
        return;
    pthread_mutex_lock(&fs->log_lock); /* only now: what the log left out is told another time */
    fs->misplaced[fs->n_misplaced++ % CG_N_MISPLACED] = name;
    pthread_mutex_unlock(&fs->log_lock);
}

void cg_fs_adopt_tree(cg_fs *fs)
{
    const cg_store_hook hook = {.creating = become_owner,
                                .created = set_mode,
                                .is_over = cg_fs_is_stopping,
                                .check_profile = claim_and_check_profile,
                                .not_default = tell_not_default,
                                .user = fs};
    uint32_t n_adopted = 0;
    if (fs->read_only)
        return;
    const cg_status status =
        cg_store_adopt_new(fs->root_fd, &hook, cg_staging_now_s(&fs->staging), &n_adopted);
    cg_metrics_add(&fs->metrics.adopted, n_adopted);
    if (status != CG_OK && status != CG_ERR_CANCELLED)
        cg_fs_log(fs, CG_LOG_WARNING, "looking for new contexts: %s", cg_strerror(status));
    else if (n_adopted > 0)
        cg_fs_log(fs, CG_LOG_INFO, "%u chunks of contexts are now found by their keys", n_adopted);
}
