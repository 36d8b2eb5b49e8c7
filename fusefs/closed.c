#include "fusefs/closed.h"

#include "fusefs/adopt.h"
#include "fusefs/claims.h"
#include "fusefs/open_files.h"
#include "fusefs/pending.h"
#include "fusefs/space.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

void cg_closed_init(cg_closed *closed)
{
    *closed = (cg_closed){.n_uses = 0};
    pthread_mutex_init(&closed->lock, NULL);
    pthread_cond_init(&closed->ending.changed, NULL);
    pthread_cond_init(&closed->adopting.changed, NULL);
}

void cg_closed_destroy(cg_closed *closed)
{
    pthread_cond_destroy(&closed->adopting.changed);
    pthread_cond_destroy(&closed->ending.changed);
    pthread_mutex_destroy(&closed->lock);
}

void cg_closed_stop(cg_closed *closed)
{
    pthread_mutex_lock(&closed->lock);
    closed->is_stopping = true;
    pthread_cond_broadcast(&closed->ending.changed); /* which has several threads */
    pthread_cond_signal(&closed->adopting.changed);
    pthread_mutex_unlock(&closed->lock);
}

/* Whether the queue has taken the file; false: it has no thread. */
static bool put_in(cg_closed *closed, cg_closed_queue *queue, cg_fs_file *file)
{
    pthread_mutex_lock(&closed->lock);
    const bool takes = queue->has_thread;
    if (takes) {
        file->next = NULL;
        if (queue->first == NULL)
            queue->first = file;
        else
            queue->last->next = file;
        queue->last = file;
        pthread_cond_signal(&queue->changed);
    }
    pthread_mutex_unlock(&closed->lock);
    return takes;
}

/* Of the opener that comes next, in the order of their numbers and round, the first file. */
static cg_fs_file *before_next(const cg_closed *closed, const cg_closed_queue *queue)
{
    cg_fs_file *before = NULL, *found = NULL;
    uid_t least = (uid_t)-1;
    if (queue != &closed->adopting)
        return NULL;
    for (cg_fs_file *file = queue->first; file != NULL; before = file, file = file->next) {
        const uid_t distance = file->opener - closed->last_adopted - 1;
        if (distance < least) {
            least = distance;
            found = before;
        }
    }
    return found;
}

/* The next file for the queue's thread; NULL: the mount ends, and nothing is left. */
static cg_fs_file *take_next(cg_closed *closed, cg_closed_queue *queue)
{
    pthread_mutex_lock(&closed->lock);
    queue->has_thread = true;
    while (queue->first == NULL && !closed->is_stopping)
        pthread_cond_wait(&queue->changed, &closed->lock);
    cg_fs_file *before = before_next(closed, queue);
    cg_fs_file **link = before == NULL ? &queue->first : &before->next, *file = *link;
    if (file != NULL) {
        *link = file->next;
        if (queue->last == file)
            queue->last = before;
        if (queue == &closed->adopting)
            closed->last_adopted = file->opener;
    }
    queue->has_thread = file != NULL;
    pthread_mutex_unlock(&closed->lock);
    return file;
}

static void end(cg_fs *fs, cg_fs_file *file)
{
    const uid_t opener = file->opener;
    cg_fs_file_unuse(&fs->nodes, file);
    cg_fs_give_back_descriptor(fs, opener);
}

/* profile.cgp and model.json of a context are ordinary files, and of use to others once they are
 * written. So is a line in the log of a context that lies where nobody looks. The caller frees the
 * path. */
static bool is_to_be_adopted(cg_fs *fs, const cg_fs_file *file, cg_tree_name *name_out,
                             char **path_out)
{
    if (cg_nodes_path(&fs->nodes, file->node, 0, NULL, path_out) != 0)
        return false;
    cg_tree_parse(*path_out, name_out);
    if (name_out->kind == CG_TREE_CONTEXT_PROFILE || name_out->kind == CG_TREE_CONTEXT_MODEL ||
        cg_fs_is_misplaced(*path_out))
        return true;
    free(*path_out);
    return false;
}

static void adopt(cg_fs *fs, cg_fs_file *file)
{
    struct stat attr;
    cg_tree_name name;
    char *path;
    /* By its name of now, which may have changed while it waited. */
    if (fstat(file->fd, &attr) != 0 || attr.st_size == 0 ||
        !is_to_be_adopted(fs, file, &name, &path))
        return;
    if (cg_fs_is_misplaced(path)) {
        cg_fs_tell_misplaced(fs, path, file->fd);
    } else if (!cg_fs_file_is_being_written(&fs->nodes, file->node)) {
        /* A profile is linked: nobody may begin to write to it until its second name is there. */
        const cg_gate before = cg_gate_check_begin(&fs->nodes, file->node);
        if (cg_claim_to_publish(file->fd) == 0)
            cg_fs_adopt(fs, path, &name, file->fd, NULL);
        cg_claim_end(file->fd); /* of one that was pending, readers may share the claim */
        /* An open of what was pending may come too late to be seen, and does not ask the gate. */
        const bool is_shared = name.kind == CG_TREE_CONTEXT_PROFILE &&
                               fstat(file->fd, &attr) == 0 && attr.st_nlink > 1;
        cg_gate_check_end(&fs->nodes, file->node, is_shared ? CG_GATE_SEALED : before);
    }
    free(path);
}

/* Whether one more use may wait. */
static bool take_use(cg_closed *closed)
{
    pthread_mutex_lock(&closed->lock);
    const bool may = closed->n_uses < CG_CLOSED_MAX_USES;
    closed->n_uses += may;
    pthread_mutex_unlock(&closed->lock);
    return may;
}

static void give_back_use(cg_closed *closed)
{
    pthread_mutex_lock(&closed->lock);
    closed->n_uses--;
    pthread_mutex_unlock(&closed->lock);
}

/* Nobody writes by it while it waits. Handles of one that was pending share its claim. */
static void end_claim(cg_fs *fs, const cg_fs_file *file)
{
    if (!cg_fs_file_is_being_written(&fs->nodes, file->node))
        cg_claim_end(file->fd);
}

static void adopt_and_end(cg_fs *fs, cg_fs_file *file)
{
    adopt(fs, file);
    end(fs, file);
}

/* What may take long. */
static void finish(cg_fs *fs, cg_fs_file *file)
{
    if (file->is_use) {
        cg_space_touch(fs, file->fd);
        give_back_use(&fs->closed);
    }
    end(fs, file);
}

void cg_closed_take(cg_fs *fs, cg_fs_file *file)
{
    struct stat attr;
    cg_tree_name name;
    char *path;
    if (file->pending != NULL) {
        cg_fs_pending *pending = file->pending;
        file->pending = NULL;
        cg_pending_put(fs, pending);
    }
    /* Who renames what was just closed to a strict name need not wait for the queue. (Locks of
     * other file systems may wait for a network.) */
    if (file->writable && fs->has_identities)
        end_claim(fs, file);
    if (file->writable && is_to_be_adopted(fs, file, &name, &path)) {
        free(path);
        if (!put_in(&fs->closed, &fs->closed.adopting, file))
            adopt_and_end(fs, file);
        return;
    }
    /* Of an open file of this host's file system attributes are in memory. Closing it waits for
     * nothing if it was only read and keeps a name. */
    const bool is_quick =
        !file->writable && fs->has_identities && fstat(file->fd, &attr) == 0 && attr.st_nlink > 0;
    /* Being read counts as use, by which room is made (fusefs/space.h). */
    file->is_use =
        file->immutable && (!is_quick || cg_space_wants_touch(fs, &attr)) && take_use(&fs->closed);
    if (is_quick && !file->is_use)
        end(fs, file);
    else if (!put_in(&fs->closed, &fs->closed.ending, file))
        finish(fs, file);
}

void cg_fs_end_closed(cg_fs *fs)
{
    for (cg_fs_file *file; (file = take_next(&fs->closed, &fs->closed.ending)) != NULL;)
        finish(fs, file);
}

void cg_fs_adopt_closed(cg_fs *fs)
{
    for (cg_fs_file *file; (file = take_next(&fs->closed, &fs->closed.adopting)) != NULL;)
        adopt_and_end(fs, file);
}
