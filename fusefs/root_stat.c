#include "fusefs/root_stat.h"
#include "iouring/clock.h"

#include <errno.h>
#include <time.h>

void cg_root_stat_init(cg_root_stat *root, const struct stat *attr)
{
    *root = (cg_root_stat){.attr = *attr};
    pthread_mutex_init(&root->lock, NULL);
    cg_cond_init(&root->changed);
}

void cg_root_stat_destroy(cg_root_stat *root)
{
    pthread_cond_destroy(&root->changed);
    pthread_mutex_destroy(&root->lock);
}

void cg_root_stat_run(cg_root_stat *root, int fd)
{
    pthread_mutex_lock(&root->lock);
    root->has_thread = true;
    while (!root->is_over) {
        if (root->n_wanted <= root->n_begun) {
            pthread_cond_wait(&root->changed, &root->lock);
            continue;
        }
        struct stat attr;
        root->n_begun++;
        pthread_mutex_unlock(&root->lock);
        const int error = fstat(fd, &attr) == 0 ? 0 : errno;
        pthread_mutex_lock(&root->lock);
        if (error == 0)
            root->attr = attr;
        root->error = error;
        root->n_ended++;
        root->is_late = false;
        pthread_cond_broadcast(&root->changed);
    }
    root->has_thread = false;
    pthread_cond_broadcast(&root->changed);
    pthread_mutex_unlock(&root->lock);
}

void cg_root_stat_stop(cg_root_stat *root)
{
    pthread_mutex_lock(&root->lock);
    root->is_over = true;
    pthread_cond_broadcast(&root->changed);
    pthread_mutex_unlock(&root->lock);
}

int cg_root_stat_get(cg_root_stat *root, int fd, struct stat *attr_out, bool *is_old_out)
{
    const struct timespec until = cg_deadline_in(CG_ROOT_STAT_SECONDS * CG_SECOND_NS);
    int error = 0;
    *is_old_out = false;
    pthread_mutex_lock(&root->lock);
    if (!root->has_thread) {
        pthread_mutex_unlock(&root->lock);
        return fstat(fd, attr_out) == 0 ? 0 : errno;
    }
    /* A look that is under way may have seen what was before the caller's last change. */
    const uint64_t mine = root->n_begun + 1;
    if (root->n_wanted < mine) {
        root->n_wanted = mine;
        pthread_cond_broadcast(&root->changed);
    }
    while (root->n_ended < mine && root->has_thread && !root->is_late && error != ETIMEDOUT)
        error = pthread_cond_timedwait(&root->changed, &root->lock, &until);
    *is_old_out = root->n_ended < mine;
    if (*is_old_out && root->has_thread && !root->is_late) {
        root->is_late = true;
        pthread_cond_broadcast(&root->changed);
    }
    *attr_out = root->attr;
    error = *is_old_out ? 0 : root->error;
    pthread_mutex_unlock(&root->lock);
    return error;
}
