#include "fusefs/open_files.h"

#include "fusefs/fs.h"
#include "fusefs/watch.h"
#include "iouring/clock.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

/* The nodes' lock is held. */
static void put_in(cg_fs_file *file)
{
    file->next = file->node->files;
    file->node->files = file;
}

static void take_out(cg_fs_file *file)
{
    cg_fs_file **link = &file->node->files;
    while (*link != file)
        link = &(*link)->next;
    *link = file->next;
}

int cg_fs_file_new(cg_fs *fs, cg_fs_node *node, int fd, bool writable, cg_fs_pending *pending,
                   cg_fs_file **file_out)
{
    cg_nodes *nodes = &fs->nodes;
    *file_out = NULL;
    cg_fs_file *file = calloc(1, sizeof *file);
    if (file == NULL) {
        close(fd);
        return ENOMEM;
    }
    file->node = node;
    file->fd = fd;
    file->writable = writable;
    file->pending = pending;
    file->n_users = 1;
    /* A waiting file is not: no pages of it are kept (fusefs/passthrough.c). */
    file->cached = writable && pending == NULL;
    pthread_mutex_lock(&nodes->lock);
    if (file->cached && node->n_backed > 0) {
        pthread_mutex_unlock(&nodes->lock);
        close(fd);
        free(file);
        return ETXTBSY;
    }
    /* One step under the lock with the question above: the kernel takes no mix of backed and cached
     * files (fusefs/passthrough.h). */
    node->n_cached += file->cached;
    node->n_pins++;
    put_in(file);
    pthread_mutex_unlock(&nodes->lock);
    cg_metrics_add(&fs->metrics.files_open, 1);
    /* In the list first: whoever checks the file from now on sees that it is open for writing. And
     * if somebody did not see it, the gate is closed now. */
    if (file->cached && !cg_gate_enter(nodes, node)) {
        cg_fs_file_leave(fs, file);
        cg_fs_file_unuse(nodes, file);
        return EPERM;
    }
    if (file->cached)
        cg_gate_leave(nodes, node);
    *file_out = file;
    return 0;
}

void cg_fs_file_compare(cg_fs *fs, cg_fs_file *file)
{
    const cg_settled now = cg_watch_settle(fs, file->fd);
    if (now.changed_ns == 0)
        return;
    file->note = (cg_read_note){
        .generation = file->node->generation,
        .changed_ns = now.changed_ns,
        .opened_at_s = now.looked_at_s,
    };
    pthread_mutex_lock(&fs->nodes.lock);
    const cg_read_note *noted = &fs->nodes.read_notes[file->note.generation % CG_N_READ_NOTES];
    const cg_settled before = {noted->changed_ns, noted->opened_at_s};
    file->unchanged =
        noted->generation == file->note.generation && cg_watch_is_as_before(&now, &before);
    file->note.n_changes = noted->n_changes;
    pthread_mutex_unlock(&fs->nodes.lock);
}

cg_fs_file *cg_fs_file_use_any(cg_nodes *nodes, cg_fs_node *node)
{
    pthread_mutex_lock(&nodes->lock);
    cg_fs_file *file = node->files;
    if (file != NULL)
        file->n_users++;
    pthread_mutex_unlock(&nodes->lock);
    return file;
}

void cg_fs_file_unuse(cg_nodes *nodes, cg_fs_file *file)
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

/* The nodes' lock is held. *flushed_out: all of them were closed once. */
static bool has_writers(const cg_fs_node *node, bool *flushed_out)
{
    bool found = false;
    *flushed_out = true;
    for (const cg_fs_file *file = node->files; file != NULL; file = file->next) {
        found |= file->writable;
        if (file->writable && !__atomic_load_n(&file->was_flushed, __ATOMIC_RELAXED))
            *flushed_out = false;
    }
    return found;
}

bool cg_fs_file_stays_written(cg_nodes *nodes, const cg_fs_node *node)
{
    const struct timespec deadline = cg_deadline_in(CG_SECOND_NS);
    bool found, flushed;
    int error = 0;
    pthread_mutex_lock(&nodes->lock);
    while ((found = has_writers(node, &flushed)) && flushed && error != ETIMEDOUT)
        error = pthread_cond_timedwait(&nodes->changed, &nodes->lock, &deadline);
    pthread_mutex_unlock(&nodes->lock);
    return found;
}

bool cg_fs_file_is_being_written(cg_nodes *nodes, const cg_fs_node *node)
{
    bool flushed;
    pthread_mutex_lock(&nodes->lock);
    const bool found = has_writers(node, &flushed);
    pthread_mutex_unlock(&nodes->lock);
    return found;
}

void cg_fs_file_join(cg_nodes *nodes, cg_fs_file *file)
{
    pthread_mutex_lock(&nodes->lock);
    put_in(file);
    pthread_mutex_unlock(&nodes->lock);
}

void cg_fs_file_part(cg_nodes *nodes, cg_fs_file *file)
{
    pthread_mutex_lock(&nodes->lock);
    take_out(file);
    pthread_mutex_unlock(&nodes->lock);
}

void cg_fs_file_leave(cg_fs *fs, cg_fs_file *file)
{
    pthread_mutex_lock(&fs->nodes.lock);
    take_out(file);
    file->node->n_cached -= file->cached;
    /* Not before: until the kernel had the answer to the open, it had older pages. */
    cg_read_note *noted = &fs->nodes.read_notes[file->note.generation % CG_N_READ_NOTES];
    if (file->note.changed_ns != 0 && !file->unchanged && file->note.n_changes == noted->n_changes)
        *noted = file->note;
    /* For cg_fs_file_stays_written(). */
    if (file->writable)
        pthread_cond_broadcast(&fs->nodes.changed);
    pthread_mutex_unlock(&fs->nodes.lock);
    cg_metrics_sub(&fs->metrics.files_open, 1);
}
