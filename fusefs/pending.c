#include "fusefs/pending.h"

#include "fusefs/claims.h"
#include "fusefs/fs.h"
#include "fusefs/persona.h"
#include "fusefs/space.h"
#include "iouring/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The process of a thread. FUSE names the thread that made a call, and a program may create in one
 * and close in another. */
static pid_t process_of(pid_t thread)
{
    char path[64], line[128];
    long process = thread;
    snprintf(path, sizeof path, "/proc/%ld/status", (long)thread);
    FILE *status = thread > 0 ? fopen(path, "re") : NULL;
    if (status == NULL)
        return thread;
    while (fgets(line, sizeof line, status) != NULL)
        if (sscanf(line, "Tgid: %ld", &process) == 1)
            break;
    fclose(status);
    return (pid_t)process;
}

static int create_staged(cg_fs *fs, const cg_fs_caller *caller, cg_fs_pending *pending)
{
    cg_persona_enter(caller->uid, caller->gid);
    const int error = cg_staging_create(&fs->staging, pending->temporary, &pending->fd);
    cg_persona_leave();
    return error;
}

/* Whether a file can be made that is to get a name in dir_fd. */
static int check_place(cg_fs *fs, int dir_fd)
{
    struct stat dir;
    if (fs->staging.dir_fd < 0)
        return EROFS;
    const int error = cg_space_check(fs);
    if (error != 0)
        return error;
    if (fstat(dir_fd, &dir) != 0)
        return errno;
    /* It could not be moved there: say so before it is written. */
    if (dir.st_dev != fs->staging.dev)
        return EXDEV;
    /* A folder that was removed, and is still open: nothing could ever get a name in it. */
    return dir.st_nlink == 0 ? ENOENT : 0;
}

/* The file is there: from here on others find it. */
static void link_pending(cg_fs *fs, cg_fs_pending *pending, cg_fs_node *node, cg_fs_node *parent)
{
    pthread_mutex_lock(&fs->nodes.lock);
    pending->node = node;
    node->n_pins++;
    node->pending = pending;
    node->gate = CG_GATE_OPEN; /* the inode number may have been a published file's */
    node->has_lost = 0;
    pending->parent = parent;
    parent->n_pins++;
    pending->used_s = cg_now_s();
    pending->next = fs->pendings;
    fs->pendings = pending;
    pthread_mutex_unlock(&fs->nodes.lock);
}

/* Ends the waiting; the nodes' lock is held. */
static void leave_list(cg_fs *fs, cg_fs_pending *pending, cg_pending_state state)
{
    cg_fs_pending **link = &fs->pendings;
    while (*link != NULL && *link != pending)
        link = &(*link)->next;
    /* It was published or cancelled before: its last user only frees it. */
    if (*link == NULL)
        return;
    *link = pending->next;
    if (pending->node->pending == pending)
        pending->node->pending = NULL;
    pending->state = state;
    cg_metrics_sub(&fs->metrics.files_pending, 1);
}

static void discard(cg_fs *fs, cg_fs_pending *pending)
{
    struct stat attr;
    if (fstat(pending->fd, &attr) == 0 && attr.st_size > 0)
        cg_metrics_add(&fs->metrics.discarded, 1);
    unlinkat(fs->staging.dir_fd, pending->temporary, 0);
}

/* Of one that nobody uses, and nobody finds any more. */
static void destroy(cg_fs *fs, cg_fs_pending *pending)
{
    if (pending->state == CG_PENDING_LEFT)
        discard(fs, pending);
    close(pending->fd);
    cg_users_give_back(&fs->pending_users, pending->uid);
    cg_nodes_unpin(&fs->nodes, pending->node);
    cg_nodes_unpin(&fs->nodes, pending->parent);
    free(pending->name);
    free(pending);
}

/* Of the user's files that mknod made. Nobody may ever come back to one: its maker has ended, or is
 * a client of NFS that has. The kernel forgets its node when it wants memory, and until then the
 * user could make no others. */
static bool drop_idle(cg_fs *fs, uid_t uid)
{
    const int64_t now_s = cg_now_s();
    cg_fs_pending *idle = NULL;
    pthread_mutex_lock(&fs->nodes.lock);
    for (cg_fs_pending *p = fs->pendings; p != NULL; p = p->next)
        if (p->uid == uid && p->stays && p->n_users == 1 &&
            now_s - p->used_s >= CG_PENDING_IDLE_S && (idle == NULL || p->used_s <= idle->used_s))
            idle = p;
    if (idle != NULL) {
        idle->stays = false;
        idle->n_users = 0;
        leave_list(fs, idle, CG_PENDING_LEFT);
    }
    pthread_mutex_unlock(&fs->nodes.lock);
    if (idle != NULL)
        destroy(fs, idle);
    return idle != NULL;
}

int cg_pending_new(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *parent, int dir_fd,
                   const char *name, mode_t mode, bool stays, cg_fs_entry *entry_out,
                   cg_fs_pending **pending_out)
{
    int error = check_place(fs, dir_fd);
    if (error != 0)
        return error;
    while (!cg_users_take(&fs->pending_users, caller->uid))
        if (!drop_idle(fs, caller->uid))
            return EDQUOT;
    cg_fs_pending *pending = calloc(1, sizeof *pending);
    if (pending == NULL || (pending->name = strdup(name)) == NULL) {
        cg_users_give_back(&fs->pending_users, caller->uid);
        free(pending);
        return ENOMEM;
    }
    pending->fd = -1;
    pending->uid = caller->uid;
    /* Others took this daemon for dead and removed its folder. */
    if ((error = create_staged(fs, caller, pending)) == ENOENT &&
        (error = cg_staging_make_again(&fs->staging)) == 0)
        error = create_staged(fs, caller, pending);
    cg_space_failed(fs, error);
    if (error != 0)
        goto fail;
    cg_claim_to_write(pending->fd); /* for when it gets an ordinary name */
    if ((error = cg_fs_give_away_fd(fs, caller, dir_fd, pending->fd, mode)) != 0)
        goto fail_created;
    if (fstat(pending->fd, &entry_out->attr) != 0) {
        error = errno;
        goto fail_created;
    }
    pending->creator = process_of(caller->pid);
    pending->stays = stays;
    /* With mknod nothing is open afterwards: the second user keeps the file until the kernel
     * forgets the node. */
    pending->n_users = stays ? 2 : 1;
    if ((entry_out->node = cg_nodes_enter(&fs->nodes, NULL, NULL, &entry_out->attr,
                                          cg_fs_identity(fs, pending->fd, ""), NULL)) == NULL) {
        error = ENOMEM;
        goto fail_created;
    }
    /* The name is only for its creator, so the kernel must ask at each look-up. */
    entry_out->may_not_be_cached = true;
    entry_out->may_be_old = entry_out->is_lasting = false;
    link_pending(fs, pending, entry_out->node, parent);
    cg_nodes_drop_missing(&fs->nodes, parent, name); /* the kernel asks from now on */
    cg_metrics_add(&fs->metrics.files_pending, 1);
    *pending_out = pending;
    return 0;

fail_created:
    unlinkat(fs->staging.dir_fd, pending->temporary, 0);
fail:
    cg_users_give_back(&fs->pending_users, caller->uid);
    if (pending->fd >= 0)
        close(pending->fd);
    free(pending->name);
    free(pending);
    return error;
}

bool cg_pending_is_waiting(cg_fs *fs, const cg_fs_node *parent, const char *name)
{
    bool is = false;
    pthread_mutex_lock(&fs->nodes.lock);
    for (const cg_fs_pending *p = fs->pendings; p != NULL && !is; p = p->next)
        is = p->parent == parent && strcmp(p->name, name) == 0;
    pthread_mutex_unlock(&fs->nodes.lock);
    return is;
}

cg_fs_pending *cg_pending_find(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *parent,
                               const char *name)
{
    if (!cg_pending_is_waiting(fs, parent, name)) /* nearly always: without a look into /proc */
        return NULL;
    if (caller->pid <= 0) /* of another PID namespace: it could be anybody */
        return NULL;

    const pid_t process = process_of(caller->pid);
    pthread_mutex_lock(&fs->nodes.lock);
    cg_fs_pending *found = fs->pendings;
    /* Without users it is on its way out. */
    while (found != NULL && (found->parent != parent || found->creator != process ||
                             found->n_users == 0 || strcmp(found->name, name) != 0))
        found = found->next;
    if (found != NULL)
        found->n_users++;
    pthread_mutex_unlock(&fs->nodes.lock);
    return found;
}

cg_fs_pending *cg_pending_of(cg_fs *fs, cg_fs_node *node)
{
    pthread_mutex_lock(&fs->nodes.lock);
    cg_fs_pending *pending = node->pending;
    if (pending != NULL && (pending->state != CG_PENDING_WAITING || pending->n_users == 0))
        pending = NULL;
    if (pending != NULL)
        pending->n_users++;
    pthread_mutex_unlock(&fs->nodes.lock);
    return pending;
}

/* Leaves the rest to cg_fs_discard(). False: that does not run. */
static bool leave(cg_fs *fs, cg_fs_pending *pending)
{
    pthread_mutex_lock(&fs->keep_lock);
    const bool is_left = fs->has_discarder;
    if (is_left) {
        pending->next = fs->left;
        fs->left = pending;
        pthread_cond_broadcast(&fs->keep_stop);
    }
    pthread_mutex_unlock(&fs->keep_lock);
    return is_left;
}

void cg_pending_put(cg_fs *fs, cg_fs_pending *pending)
{
    const int64_t now_s = cg_now_s();
    pthread_mutex_lock(&fs->nodes.lock);
    pending->used_s = now_s;
    const bool is_last = --pending->n_users == 0;
    if (is_last)
        leave_list(fs, pending, CG_PENDING_LEFT);
    pthread_mutex_unlock(&fs->nodes.lock);
    if (!is_last)
        return;
    /* On another host's file system closing may wait as well. */
    if ((pending->state != CG_PENDING_LEFT && fs->has_identities) || !leave(fs, pending))
        destroy(fs, pending);
}

/* The user that mknod left, if it is still there: the caller has to put it. The nodes' lock is
 * held. */
static cg_fs_pending *take_stay(cg_fs_pending *pending)
{
    if (pending == NULL || !pending->stays)
        return NULL;
    pending->stays = false;
    return pending;
}

cg_fs_pending *cg_pending_end(cg_fs *fs, cg_fs_pending *pending, cg_pending_state state)
{
    pthread_mutex_lock(&fs->nodes.lock);
    leave_list(fs, pending, state);
    cg_fs_pending *stay = take_stay(pending);
    pthread_mutex_unlock(&fs->nodes.lock);
    return stay;
}

void cg_pending_forget(cg_fs *fs, cg_fs_node *node, uint64_t n_lookups)
{
    pthread_mutex_lock(&fs->nodes.lock);
    /* Only with the last look-up: until then an NFS client may still write to the file. */
    cg_fs_pending *pending = node->n_lookups <= n_lookups ? take_stay(node->pending) : NULL;
    pthread_mutex_unlock(&fs->nodes.lock);
    if (pending != NULL)
        cg_pending_put(fs, pending);
}

/* keep_lock is held; not while a file is discarded. */
static void destroy_left(cg_fs *fs)
{
    cg_fs_pending *first = fs->left;
    fs->left = NULL;
    pthread_mutex_unlock(&fs->keep_lock);
    for (cg_fs_pending *next; first != NULL; first = next) {
        next = first->next;
        destroy(fs, first);
    }
    pthread_mutex_lock(&fs->keep_lock);
}

void cg_fs_discard(cg_fs *fs)
{
    pthread_mutex_lock(&fs->keep_lock);
    fs->has_discarder = true;
    while (!fs->is_stopping) {
        if (fs->left == NULL)
            pthread_cond_wait(&fs->keep_stop, &fs->keep_lock);
        destroy_left(fs);
    }
    fs->has_discarder = false;
    destroy_left(fs);
    pthread_mutex_unlock(&fs->keep_lock);
}

void cg_pending_cancel(cg_fs *fs, cg_fs_pending *pending)
{
    cg_fs_pending *stay = NULL;
    const cg_gate before = cg_gate_check_begin(&fs->nodes, pending->node);
    if (pending->state == CG_PENDING_WAITING) {
        discard(fs, pending);
        stay = cg_pending_end(fs, pending, CG_PENDING_CANCELLED);
    }
    cg_gate_check_end(&fs->nodes, pending->node, before);
    if (stay != NULL)
        cg_pending_put(fs, stay);
}

void cg_pending_discard_all(cg_fs *fs)
{
    while (fs->pendings != NULL) { /* at the end: nobody else has one */
        cg_fs_pending *pending = fs->pendings;
        pending->n_users = 1;
        cg_pending_put(fs, pending);
    }
}
