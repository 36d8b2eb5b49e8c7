#include "fusefs/publish.h"

#include "fusefs/adopt.h"
#include "fusefs/claims.h"
#include "fusefs/fs.h"
#include "fusefs/reach.h"
#include "fusefs/space.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Whether one view shows of a what the other shows of b. */
static bool same_content(int a, const cg_view *view_a, int b, const cg_view *view_b)
{
    enum { PIECE_BYTES = 1 << 16 };
    char *pieces = malloc(2 * PIECE_BYTES);
    off_t offset = 0;
    bool same = pieces != NULL;
    while (same) {
        const ssize_t n = pread(a, pieces, cg_view_clamp(view_a, offset, PIECE_BYTES), offset);
        const ssize_t m = n < 0 ? -1
                                : pread(b, pieces + PIECE_BYTES,
                                        cg_view_clamp(view_b, offset, PIECE_BYTES), offset);
        same = n >= 0 && n == m && memcmp(pieces, pieces + PIECE_BYTES, (size_t)n) == 0;
        if (n <= 0)
            break;
        offset += n;
    }
    free(pieces);
    return same;
}

/* The name is taken. A valid file there stays: for us as good as ours if it is equal, or is an
 * object (an encoder may choose its symbols, and the first publisher wins). One that was damaged
 * in the store, or cannot be brought to disk, makes room. */
static int meet_existing(cg_fs *fs, const cg_fs_pending *pending, const cg_view *pending_view,
                         int dir_fd, const cg_tree_name *name, bool *replace_out)
{
    cg_chunk_header header;
    struct stat attr = {0};
    *replace_out = false;
    const int fd = openat(dir_fd, pending->name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return EEXIST;
    int error = fstat(fd, &attr) == 0 ? EEXIST : errno;
    const cg_view view = cg_view_of_file(name, fd, &attr);
    if (error == EEXIST && same_content(fd, &view, pending->fd, pending_view)) {
        error = 0;
    } else if (error == EEXIST && cg_fs_is_strict(name)) {
        const cg_status status =
            cg_strict_check(fd, name, &fs->budget, fs->max_file_bytes, &header);
        *replace_out = cg_strict_errno(status) == EBADMSG;
        if (status == CG_OK && name->kind != CG_TREE_CONTEXT_CHUNK)
            error = 0;
    }
    if (error == 0 && fsync(fd) != 0) {
        *replace_out = errno == EIO || errno == ENOSPC || errno == EDQUOT;
        error = *replace_out ? EEXIST : errno;
    }
    close(fd);
    return error;
}

/* Gives the staged file its name without replacing another, whatever the store can do. */
static int move_without_replacing(int staging_fd, const char *temporary, int dir_fd,
                                  const char *name)
{
    struct stat attr;
    /* Three ways, the best first: a rename that cannot replace; a link, which cannot either; and
     * where the store has neither, a look before a rename. */
    if (renameat2(staging_fd, temporary, dir_fd, name, RENAME_NOREPLACE) == 0)
        return 0;
    if (errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP)
        return errno;
    if (linkat(staging_fd, temporary, dir_fd, name, 0) == 0) {
        unlinkat(staging_fd, temporary, 0);
        return 0;
    }
    if (errno != EPERM && errno != ENOSYS && errno != EOPNOTSUPP && errno != EMLINK)
        return errno;
    if (fstatat(dir_fd, name, &attr, AT_SYMLINK_NOFOLLOW) == 0)
        return EEXIST;
    return renameat(staging_fd, temporary, dir_fd, name) == 0 ? 0 : errno;
}

int cg_publish_sync_directory(int dir_fd)
{
    const int fd = openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return 0; /* we may search it but not read it: no way to ask */
    const int error = fsync(fd) == 0 || errno == EINVAL ? 0 : errno;
    close(fd);
    return error;
}

/* A nested chunk under a name of a coarser level: what the name would not show goes, so that the
 * file is what it shows. */
static int cut_to_view(int fd, const cg_view *view, cg_chunk_header *header)
{
    if (ftruncate(fd, (off_t)view->bytes) != 0)
        return errno;
    return cg_strict_errno(cg_chunk_header_cut(header, view->bytes));
}

/* cp -a and tar set the times of what they bring before they close it, and then link the other
 * levels' names to it, in any order: it must hold them. */
static bool may_get_links(int fd)
{
    struct stat attr;
    return fstat(fd, &attr) == 0 && (attr.st_mtim.tv_sec != attr.st_ctim.tv_sec ||
                                     attr.st_mtim.tv_nsec != attr.st_ctim.tv_nsec);
}

enum { MOVED = -1 }; /* its directory was moved meanwhile, to where other rules may hold */

static int name_it(cg_fs *fs, const cg_fs_pending *pending, const char *path, int dir_fd,
                   bool replace)
{
    const int staging_fd = fs->staging.dir_fd;
    char *now;
    int error = MOVED;
    pthread_rwlock_rdlock(&fs->names_lock);
    if (cg_nodes_path(&fs->nodes, pending->parent, 0, pending->name, &now) == 0) {
        if (strcmp(path, now) != 0)
            error = MOVED;
        else if (!replace)
            error = move_without_replacing(staging_fd, pending->temporary, dir_fd, pending->name);
        else
            error =
                renameat(staging_fd, pending->temporary, dir_fd, pending->name) == 0 ? 0 : errno;
        free(now);
    }
    pthread_rwlock_unlock(&fs->names_lock);
    return error;
}

/* The gate is in CHECKING. renames: this is a rename, which leaves the bytes as they are.
 * *named_out: the file has its name, also after an error. MOVED. */
static int publish_checked(cg_fs *fs, cg_fs_pending *pending, bool renames, bool replace,
                           bool *is_strict_out, bool *named_out)
{
    cg_tree_name name;
    cg_chunk_header header = {0};
    struct stat attr;
    char *path;
    int dir_fd;
    *named_out = false;
    /* The path of now, not of its creation: the directory may have been renamed to where other
     * rules hold. */
    int error = cg_reach_dir(fs, pending->parent, pending->name, &dir_fd, &path);
    if (error != 0)
        return error;
    cg_tree_parse(path, &name);
    /* By now it need not be: then the file becomes an ordinary one, unchecked. */
    *is_strict_out = cg_fs_is_strict(&name);
    if (*is_strict_out && (error = cg_fs_check(fs, pending->fd, path, &name, &header)) != 0)
        goto done;
    const cg_view view = cg_view_of_header(&name, &header);
    /* A rename to a name that would show a part of the file: mv copies then. */
    if (view.level != 0 && renames)
        error = EXDEV;
    else if (view.level != 0 && !may_get_links(pending->fd))
        error = cut_to_view(pending->fd, &view, &header);
    if (error != 0)
        goto done;
    error = *is_strict_out ? cg_fs_sync_to_publish(fs, pending->node, pending->fd)
                           : cg_fs_sync(fs, pending->node, pending->fd, false);
    if (error == 0 && fstat(pending->fd, &attr) != 0)
        error = errno;
    if (error != 0)
        goto done;
    bool is_ours = true;
    error = replace ? EEXIST : name_it(fs, pending, path, dir_fd, false);
    if (error == EEXIST && !replace) {
        error = meet_existing(fs, pending, &view, dir_fd, &name, &replace);
        is_ours = replace;
        if (error == 0)
            unlinkat(fs->staging.dir_fd, pending->temporary, 0);
    }
    if (replace)
        error = name_it(fs, pending, path, dir_fd, true);
    if (error != 0)
        goto done;
    *named_out = true;
    if (*is_strict_out)
        cg_claim_end(pending->fd); /* whoever still has it open cannot write to it any more */
    /* The name is there, whatever the disk says now. */
    error = cg_publish_sync_directory(dir_fd);
    if (is_ours) /* else the name is that of the file that was there */
        cg_nodes_add_name(&fs->nodes, pending->node, pending->parent, pending->name);
    if (*is_strict_out) {
        cg_metrics_add(&fs->metrics.published, 1);
        cg_metrics_add(&fs->metrics.published_bytes, (uint64_t)attr.st_size);
    }
    /* What has an ordinary name now can still be written to: it is adopted at its last release. */
    if (*is_strict_out)
        cg_fs_adopt(fs, path, &name, pending->fd,
                    name.kind == CG_TREE_CONTEXT_CHUNK ? &header : NULL);
done:
    free(path);
    close(dir_fd);
    return error;
}

/* The gate is in CHECKING. *stay_out: a user to put after the gate is open, or NULL. */
static int publish(cg_fs *fs, cg_fs_pending *pending, bool renames, bool replace, cg_gate *gate_out,
                   cg_fs_pending **stay_out)
{
    bool is_strict = false, named = false;
    int error;
    do
        error = publish_checked(fs, pending, renames, replace, &is_strict, &named);
    /* Each time for another path: it ends when directories stay where they are for a moment. */
    while (error == MOVED);
    *stay_out = NULL;
    *gate_out = named && is_strict ? CG_GATE_SEALED : CG_GATE_OPEN;
    if (named)
        *stay_out = cg_pending_end(fs, pending, CG_PENDING_PUBLISHED);
    return error;
}

int cg_publish(cg_fs *fs, cg_fs_pending *pending)
{
    struct stat attr;
    cg_gate gate;
    cg_fs_pending *stay;
    const cg_gate before = cg_gate_check_begin(&fs->nodes, pending->node);
    /* Size 0 comes before any write: the shell's redirection opens, duplicates and closes. */
    if (pending->state != CG_PENDING_WAITING ||
        (fstat(pending->fd, &attr) == 0 && attr.st_size == 0)) {
        cg_gate_check_end(&fs->nodes, pending->node, before);
        return 0;
    }
    const int error = publish(fs, pending, false, false, &gate, &stay);
    cg_space_failed(fs, error);
    cg_gate_check_end(&fs->nodes, pending->node, gate);
    if (stay != NULL)
        cg_pending_put(fs, stay);
    return error;
}

static void set_target(cg_fs *fs, cg_fs_pending *pending, cg_fs_node *parent, char *name)
{
    pthread_mutex_lock(&fs->nodes.lock);
    pending->parent = parent;
    pending->name = name;
    pthread_mutex_unlock(&fs->nodes.lock);
}

int cg_publish_as(cg_fs *fs, cg_fs_pending *pending, cg_fs_node *parent, const char *name,
                  bool replace)
{
    cg_gate gate;
    cg_fs_pending *stay;
    char *new_name = strdup(name);
    if (new_name == NULL)
        return ENOMEM;
    cg_nodes_pin(&fs->nodes, parent);
    const cg_gate before = cg_gate_check_begin(&fs->nodes, pending->node);
    if (pending->state != CG_PENDING_WAITING) {
        cg_gate_check_end(&fs->nodes, pending->node, before);
        cg_nodes_unpin(&fs->nodes, parent);
        free(new_name);
        return ENOENT; /* it was published or taken away since the look-up */
    }
    cg_fs_node *old_parent = pending->parent;
    char *old_name = pending->name;
    /* publish() goes by what the file says of itself: so it has the new name first, and gets the
     * old one back below if that fails. */
    set_target(fs, pending, parent, new_name);
    const int error = publish(fs, pending, true, replace, &gate, &stay);
    cg_space_failed(fs, error);
    if (pending->state == CG_PENDING_WAITING) { /* it kept its name */
        set_target(fs, pending, old_parent, old_name);
        old_parent = parent;
        old_name = new_name;
    }
    cg_gate_check_end(&fs->nodes, pending->node, gate);
    if (stay != NULL)
        cg_pending_put(fs, stay);
    cg_nodes_unpin(&fs->nodes, old_parent);
    free(old_name);
    return error;
}
