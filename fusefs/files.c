/* fusefs/files.c - opening, creating and releasing files: their part of fusefs/core.h. */
#include "fusefs/acls.h"
#include "fusefs/claims.h"
#include "fusefs/closed.h"
#include "fusefs/contents.h"
#include "fusefs/fs.h"
#include "fusefs/open_files.h"
#include "fusefs/pending.h"
#include "fusefs/persona.h"
#include "fusefs/published.h"
#include "fusefs/reach.h"
#include "fusefs/space.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Whether what the node shows is still what path, by which fd was opened, shows of the file: its
 * bytes may have been changed in the store, or could not be read when the node was made. */
static bool shows_what_path_shows(const cg_fs_node *node, int fd, const char *path)
{
    cg_tree_name name;
    struct stat attr;
    if (!cg_view_is_possible(path))
        return true;
    cg_tree_parse(path, &name);
    if (fstat(fd, &attr) != 0)
        return false;
    const cg_view view = cg_view_of_file(&name, fd, &attr);
    return cg_view_equal(&view, &node->view);
}

static void count_chunk(cg_fs *fs, const char *path)
{
    cg_tree_name name;
    cg_tree_parse(path, &name);
    if (name.kind == CG_TREE_OBJECT_CHUNK || name.kind == CG_TREE_CONTEXT_CHUNK)
        cg_metrics_add(&fs->metrics.opens_of_level[name.level], 1);
}

static int open_control(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *node, bool writable,
                        cg_fs_file **file_out)
{
    if (writable)
        return EACCES;
    if (!cg_fs_take_control(fs, caller->uid))
        return ENFILE;
    cg_fs_file *file = calloc(1, sizeof *file);
    char *text = cg_control_text(&fs->control, node->control, &fs->metrics);
    if (file == NULL || text == NULL) {
        cg_fs_give_back_control(fs, caller->uid);
        free(file);
        free(text);
        return ENOMEM;
    }
    file->opener = caller->uid;
    file->node = node;
    file->fd = -1;
    file->text = text;
    file->text_bytes = strlen(text);
    cg_nodes_pin(&fs->nodes, node);
    cg_fs_file_join(&fs->nodes, file);
    *file_out = file;
    return 0;
}

/* Takes the caller's use of pending. A descriptor of its own: each open file closes its own. */
static int open_pending(cg_fs *fs, cg_fs_pending *pending, bool writable, cg_fs_file **file_out)
{
    const int fd = fcntl(pending->fd, F_DUPFD_CLOEXEC, 0);
    if (fd >= 0 && writable)
        cg_claim_to_write(fd); /* the last writer's close may have ended the claim of all of them */
    const int error =
        fd < 0 ? errno : cg_fs_file_new(fs, pending->node, fd, writable, pending, file_out);
    if (error != 0)
        cg_pending_put(fs, pending);
    return error;
}

/* A program that another than root truncates loses the bits by which it runs as its owner. The
 * store's file system sees to that for its own callers, of which we are one with all rights. (For
 * truncate() and write() the kernel has the mode changed.) */
static int drop_set_ids(const cg_fs_caller *caller, int fd)
{
    struct stat attr;
    if (caller->uid == 0)
        return 0;
    if (fstat(fd, &attr) != 0)
        return errno;
    const mode_t gone = S_ISUID | ((attr.st_mode & S_IXGRP) != 0 ? S_ISGID : 0);
    return (attr.st_mode & gone) == 0 || fchmod(fd, attr.st_mode & 07777 & ~gone) == 0 ? 0 : errno;
}

/* Of the caller's flags, those for the store's file. Its O_DIRECT is for its buffers, not for ours;
 * creation and truncation are done apart. To run a program the kernel adds a flag of its own, which
 * openat2() refuses. */
enum { FLAGS_FOR_STORE = O_ACCMODE | O_APPEND | O_SYNC | O_DSYNC | O_LARGEFILE };

static int open_file(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *node, int flags,
                     cg_fs_file **file_out)
{
    const bool writable = (flags & O_ACCMODE) != O_RDONLY || (flags & O_TRUNC) != 0;
    const bool truncates = (flags & O_TRUNC) != 0;
    int error, fd;
    *file_out = NULL;
    if (writable && fs->read_only)
        return EROFS;

    /* A waiting file lies in the staging directory, where no name of the node leads. */
    cg_fs_pending *pending = cg_pending_of(fs, node);
    if (pending != NULL) {
        error = open_pending(fs, pending, writable, file_out);
    } else {
        const bool appends = writable && (flags & O_APPEND) != 0;
        flags &= FLAGS_FOR_STORE;
        if ((flags & O_ACCMODE) == O_RDONLY && writable)
            flags |= O_RDWR; /* O_RDONLY | O_TRUNC */
        char *path;
        /* O_NONBLOCK: a FIFO that was put in the file's place would hold us. */
        error = writable ? cg_published_open_to_change(fs, node, flags, &fd, &path)
                         : cg_reach_open(fs, node, flags | O_NONBLOCK, &fd, &path);
        /* ENOENT: the file has no name any more, which is no news of the name that the caller gave.
         * At ESTALE the kernel looks that up again. So who creates anew what was just refused, and
         * whose look-up met the old file, creates it. */
        if (error != 0)
            return error == ENOENT ? ESTALE : error;
        const bool is_right = shows_what_path_shows(node, fd, path);
        const bool has_acls = !fs->ignores_acls && cg_acls_are_on(fd, false);
        if (!is_right || has_acls) {
            close(fd);
            free(path);
            return has_acls ? EACCES : ESTALE; /* the kernel looks the name up again */
        }
        if ((error = cg_fs_file_new(fs, node, fd, writable, NULL, file_out)) != 0) {
            free(path);
            return error;
        }
        (*file_out)->appends = appends;
        (*file_out)->immutable = !writable && cg_published_for_sure(fs, node, path);
        if ((*file_out)->immutable) {
            count_chunk(fs, path);
        } else if (!writable) {
            cg_fs_file_compare(fs, *file_out);
        }
        free(path);
    }
    /* Not by the open itself: a change of the content passes the gate. */
    if (error == 0 && truncates &&
        ((error = cg_contents_truncate(fs, node, (*file_out)->fd, 0)) != 0 ||
         (error = drop_set_ids(caller, (*file_out)->fd)) != 0)) {
        cg_fs_release(fs, *file_out);
        *file_out = NULL;
    }
    if (error == 0 && writable)
        cg_metrics_add(&fs->metrics.opens_write, 1);
    return error;
}

/* What is done with the user's part after the open that it was taken for. */
static int settle(cg_fs *fs, const cg_fs_caller *caller, int error, cg_fs_file *file)
{
    if (error == 0)
        file->opener = caller->uid;
    else
        cg_fs_give_back_descriptor(fs, caller->uid);
    return error;
}

int cg_fs_open(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *node, int flags,
               cg_fs_file **file_out)
{
    *file_out = NULL;
    if (node->control != CG_CONTROL_NONE)
        return open_control(fs, caller, node, (flags & (O_ACCMODE | O_TRUNC)) != O_RDONLY,
                            file_out);
    if (!cg_fs_take_descriptor(fs, caller->uid))
        return ENFILE;
    const int error = open_file(fs, caller, node, flags, file_out);
    return settle(fs, caller, error, *file_out);
}

/* What is to be created, and where. */
typedef struct creation {
    const cg_fs_caller *caller;
    cg_fs_node *parent;
    int dir_fd; /* of parent */
    const char *name;
    mode_t mode;
    int flags;
} creation;

/* The name was taken between the kernel's look-up and now, by somebody else. Whether the caller may
 * open that file only the kernel can tell, and of what it believes to be new it does not ask. At
 * ESTALE it looks the name up again, and opens what it finds. */
static int name_is_taken(const creation *c)
{
    return (c->flags & O_EXCL) != 0 ? EEXIST : ESTALE;
}

/* A file under a strict name, which it gets when it is published. */
static int create_strict(cg_fs *fs, const creation *c, cg_fs_entry *entry_out,
                         cg_fs_file **file_out)
{
    cg_fs_pending *pending = NULL;
    struct stat attr;
    /* Only a look: if somebody publishes the name after it, publishing this file will meet that
     * one. */
    if (fstatat(c->dir_fd, c->name, &attr, AT_SYMLINK_NOFOLLOW) == 0)
        return name_is_taken(c);
    int error = cg_pending_new(fs, c->caller, c->parent, c->dir_fd, c->name, c->mode, false,
                               entry_out, &pending);
    if (error != 0)
        return error;
    if ((error = open_pending(fs, pending, true, file_out)) != 0)
        cg_fs_forget(fs, entry_out->node, 1);
    else
        cg_metrics_add(&fs->metrics.opens_write, 1);
    return error;
}

/* Creates a file that has its name at once. */
static int create_named(cg_fs *fs, const creation *c, int *fd_out)
{
    /* O_EXCL whatever the caller said: an existing file must pass cg_fs_open() and its rules. */
    const int flags = (c->flags & FLAGS_FOR_STORE) | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    /* The file is the caller's from its first moment: see fusefs/persona.h. */
    cg_persona_enter(c->caller->uid, c->caller->gid);
    *fd_out = openat(c->dir_fd, c->name, flags, c->mode & 07777);
    const int error = *fd_out < 0 ? errno : 0;
    cg_persona_leave();
    cg_space_failed(fs, error);
    if (error == 0)
        cg_nodes_drop_missing(&fs->nodes, c->parent, c->name);
    return error;
}

/* Takes fd, which create_named() gave. */
static int open_created(cg_fs *fs, const creation *c, int fd, cg_fs_entry *entry_out,
                        cg_fs_file **file_out)
{
    cg_claim_to_write(fd); /* granted: nobody else knows the file */
    int error = cg_fs_give_away_fd(fs, c->caller, c->dir_fd, fd, c->mode);
    if (error == 0 && fstat(fd, &entry_out->attr) != 0)
        error = errno;
    if (error == 0 &&
        (entry_out->node = cg_nodes_enter(&fs->nodes, c->parent, c->name, &entry_out->attr,
                                          cg_fs_identity(fs, fd, ""), NULL)) == NULL)
        error = ENOMEM;
    if (error != 0) {
        struct stat ours;
        if (fstat(fd, &ours) == 0)
            cg_fs_take_back(fs, c->dir_fd, c->name, &ours, cg_fs_identity(fs, fd, ""));
        close(fd);
        return error;
    }
    /* The inode number may have been a published file's. */
    cg_gate_unseal(&fs->nodes, entry_out->node);
    if ((error = cg_fs_file_new(fs, entry_out->node, fd, true, NULL, file_out)) != 0) {
        cg_fs_forget(fs, entry_out->node, 1);
        return error;
    }
    (*file_out)->appends = (c->flags & O_APPEND) != 0;
    cg_metrics_add(&fs->metrics.opens_write, 1);
    return 0;
}

int cg_fs_create(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *parent, const char *name,
                 mode_t mode, int flags, cg_fs_entry *entry_out, cg_fs_file **file_out)
{
    creation c = {caller, parent, -1, name, mode, flags};
    cg_tree_name tree;
    char *path;
    int fd = -1, error;
    *file_out = NULL;
    entry_out->may_not_be_cached = entry_out->may_be_old = entry_out->is_lasting = false;
    if (fs->read_only)
        return EROFS;
    if ((error = cg_fs_name_is_free(fs, parent, name)) != 0)
        return error;
    if (!cg_fs_take_descriptor(fs, caller->uid))
        return ENFILE;
    pthread_rwlock_rdlock(&fs->names_lock);
    if ((error = cg_reach_dir(fs, parent, name, &c.dir_fd, &path)) != 0) {
        pthread_rwlock_unlock(&fs->names_lock);
        return settle(fs, caller, error, NULL);
    }
    cg_tree_parse(path, &tree);
    free(path);
    const bool is_strict = cg_fs_is_strict(&tree); /* it has no name until it is published */
    if (!is_strict)
        error = create_named(fs, &c, &fd);
    pthread_rwlock_unlock(&fs->names_lock);
    if (is_strict)
        error = create_strict(fs, &c, entry_out, file_out);
    else if (error == 0)
        error = open_created(fs, &c, fd, entry_out, file_out);
    else if (error == EEXIST)
        error = name_is_taken(&c);
    close(c.dir_fd);
    return settle(fs, caller, error, *file_out);
}

void cg_fs_release(cg_fs *fs, cg_fs_file *file)
{
    if (file->fd < 0) {
        cg_fs_file_part(&fs->nodes, file);
        cg_nodes_unpin(&fs->nodes, file->node);
        cg_fs_give_back_control(fs, file->opener);
        free(file->text);
        free(file);
        return;
    }
    /* Out of the list first: it must not count as one that is still being written. */
    cg_fs_file_leave(fs, file);
    cg_closed_take(fs, file);
}
