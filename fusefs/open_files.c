#include "fusefs/open_files.h"

#include "fusefs/fs.h"

#include <stdlib.h>
#include <unistd.h>

cg_fs_file *cg_open_file_new(cg_fs *fs, cg_fs_node *node, int fd, bool writable)
{
    cg_fs_file *file = calloc(1, sizeof *file);
    if (file == NULL) {
        close(fd);
        return NULL;
    }
    file->node = node;
    file->fd = fd;
    file->writable = writable;
    file->n_users = 1;
    pthread_mutex_lock(&fs->nodes.lock);
    node->n_pins++;
    file->next = node->files;
    node->files = file;
    pthread_mutex_unlock(&fs->nodes.lock);
    cg_metrics_add(&fs->metrics.files_open, 1);
    return file;
}

cg_fs_file *cg_open_file_use_any(cg_nodes *nodes, cg_fs_node *node)
{
    pthread_mutex_lock(&nodes->lock);
    cg_fs_file *file = node->files;
    if (file != NULL)
        file->n_users++;
    pthread_mutex_unlock(&nodes->lock);
    return file;
}

void cg_open_file_unuse(cg_nodes *nodes, cg_fs_file *file)
{
    cg_fs_node *node = file->node;
    pthread_mutex_lock(&nodes->lock);
    const bool is_last = --file->n_users == 0;
    pthread_mutex_unlock(&nodes->lock);
    if (!is_last)
        return;
    close(file->fd); /* not under the lock: on a network file system it can take long */
    free(file);
    cg_nodes_unpin(nodes, node);
}

bool cg_open_file_is_being_written(cg_nodes *nodes, const struct stat *attr)
{
    bool found = false;
    cg_fs_node *node = cg_nodes_enter(nodes, NULL, NULL, attr, NULL); /* no view is */
    if (node == NULL) /* no memory to know: the answer that harms nobody */
        return true;
    pthread_mutex_lock(&nodes->lock);
    for (const cg_fs_file *file = node->files; file != NULL && !found; file = file->next)
        found = file->writable;
    pthread_mutex_unlock(&nodes->lock);
    cg_nodes_forget(nodes, node, 1);
    return found;
}

void cg_open_file_leave(cg_fs *fs, cg_fs_file *file)
{
    pthread_mutex_lock(&fs->nodes.lock);
    cg_fs_file **link = &file->node->files;
    while (*link != file)
        link = &(*link)->next;
    *link = file->next;
    pthread_mutex_unlock(&fs->nodes.lock);
    cg_metrics_sub(&fs->metrics.files_open, 1);
}
