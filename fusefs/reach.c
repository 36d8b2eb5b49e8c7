#include "fusefs/reach.h"

#include "fusefs/fs.h"
#include "fusefs/open_files.h"
#include "iouring/beneath.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

cg_proc_path cg_reach_proc_path(int fd)
{
    cg_proc_path path;
    snprintf(path.text, sizeof path.text, "/proc/self/fd/%d", fd);
    return path;
}

bool cg_reach_is_node(const cg_fs *fs, int fd, const cg_fs_node *node)
{
    struct stat attr;
    return fstat(fd, &attr) == 0 && attr.st_dev == node->dev && attr.st_ino == node->ino &&
           (node->identity == 0 || cg_fs_identity(fs, fd, "") == node->identity);
}

/* ENOENT: no such name. */
static int open_by_name(cg_fs *fs, cg_fs_node *node, unsigned name_index, int flags, int *fd_out,
                        char **path_out)
{
    int error = cg_nodes_path(&fs->nodes, node, name_index, NULL, path_out);
    if (error != 0)
        return error;
    const int fd = cg_beneath_open(fs->root_fd, *path_out, flags);
    if (fd >= 0 && cg_reach_is_node(fs, fd, node)) {
        *fd_out = fd;
        return 0;
    }
    /* Another file, nothing, a link or a file in a folder's place: the name is stale, and another
     * one may lead there. */
    error = fd >= 0 || errno == ENOENT || errno == ELOOP || errno == ENOTDIR ? ESTALE : errno;
    if (fd >= 0)
        close(fd);
    free(*path_out);
    *path_out = NULL;
    return error;
}

int cg_reach_open(cg_fs *fs, cg_fs_node *node, int flags, int *fd_out, char **path_out)
{
    char *path = NULL;
    int error;
    /* All names are tried, since any may be stale. If all fail, a rename may have been between
     * making a path and opening it. */
    for (;;) {
        const uint64_t epoch = cg_nodes_epoch(&fs->nodes);
        error = open_by_name(fs, node, 0, flags, fd_out, &path);
        /* ENOENT says that there are no more names. The error of those that were tried is the
         * answer. */
        for (unsigned i = 1; error == ESTALE; i++) {
            const int next = open_by_name(fs, node, i, flags, fd_out, &path);
            if (next == ENOENT)
                break;
            error = next;
            if (error == 0) /* contexts came and went past us: those names would fail for ever */
                cg_nodes_drop_stale(&fs->nodes, node, path, epoch);
        }
        if ((error != ESTALE && error != ENOENT) || !cg_nodes_changed_since(&fs->nodes, epoch))
            break;
    }
    if (error == ESTALE || error == ENOENT) { /* unlinked, but perhaps open */
        cg_fs_file *file = cg_fs_file_use_any(&fs->nodes, node);
        if (file != NULL) {
            /* Not dup(): the flags may differ. */
            const cg_proc_path proc = cg_reach_proc_path(file->fd);
            *fd_out = open(proc.text, flags | O_CLOEXEC);
            error = *fd_out < 0 ? errno : 0;
            cg_fs_file_unuse(&fs->nodes, file);
        }
    }
    if (error == 0 && path_out != NULL) {
        *path_out = path != NULL ? path : calloc(1, 1);
        if (*path_out == NULL) {
            close(*fd_out);
            return ENOMEM;
        }
        return 0;
    }
    free(path);
    return error;
}

int cg_reach_dir(cg_fs *fs, cg_fs_node *node, const char *leaf, int *fd_out, char **path_out)
{
    char *dir = NULL;
    int error = cg_reach_open(fs, node, O_PATH | O_DIRECTORY, fd_out, &dir);
    if (error == 0 && !fs->ignores_acls &&
        cg_acls_are_on_folder(&fs->acl_notes, *fd_out, node->generation)) {
        close(*fd_out);
        error = EACCES;
    }
    if (error != 0 || path_out == NULL) {
        free(dir);
        return error;
    }
    const size_t n_bytes = strlen(dir) + strlen(leaf) + 2;
    if ((*path_out = malloc(n_bytes)) == NULL) {
        close(*fd_out);
        error = ENOMEM;
    } else {
        snprintf(*path_out, n_bytes, "%s%s%s", dir, dir[0] == '\0' ? "" : "/", leaf);
    }
    free(dir);
    return error;
}

int cg_reach(cg_fs *fs, cg_fs_node *node, cg_reached *reached_out)
{
    if (node == fs->nodes.root) {
        *reached_out = (cg_reached){.fd = fs->root_fd, .file = NULL};
        return 0;
    }
    cg_fs_file *file = cg_fs_file_use_any(&fs->nodes, node);
    *reached_out = (cg_reached){.fd = file == NULL ? -1 : file->fd, .file = file};
    return file != NULL ? 0 : cg_reach_open(fs, node, O_PATH, &reached_out->fd, NULL);
}

void cg_reach_end(cg_fs *fs, cg_reached *reached)
{
    if (reached->file != NULL)
        cg_fs_file_unuse(&fs->nodes, reached->file);
    else if (reached->fd != fs->root_fd)
        close(reached->fd);
}
