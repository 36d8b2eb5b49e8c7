#include "fusefs/passthrough.h"

#include "fusefs/open_files.h"

#include <errno.h>
#include <stdint.h>
#include <sys/ioctl.h>

/* FUSE_DEV_IOC_BACKING_CLOSE, which headers of older systems do not have. */
#define BACKING_CLOSE _IOW(229, 2, uint32_t)

static int backing_open(fuse_req_t req, int fd)
{
#if CG_FUSE_HAS_PASSTHROUGH
    return fuse_passthrough_open(req, fd);
#else
    (void)req, (void)fd;
    return 0;
#endif
}

/* As fuse_passthrough_close(), but without a request: that of an open is gone when its answer came
 * too late. */
static void backing_close(const cg_passthrough *p, int backing_id)
{
    const uint32_t id = (uint32_t)backing_id;
    if (CG_FUSE_HAS_PASSTHROUGH && backing_id > 0)
        ioctl(fuse_session_fd(p->session), BACKING_CLOSE, &id);
}

/* Counts the file as backed, if that agrees with the others of the node. *backing_id_out: of the
 * node; 0: none yet. */
static bool join_backed(cg_nodes *nodes, cg_fs_node *node, bool wanted, int *backing_id_out)
{
    pthread_mutex_lock(&nodes->lock);
    const bool backed = node->n_backed > 0 || (wanted && node->n_cached == 0);
    if (backed)
        node->n_backed++;
    else
        node->n_cached++;
    *backing_id_out = node->backing_id;
    pthread_mutex_unlock(&nodes->lock);
    return backed;
}

/* Takes the id that was made for a file, unless another file was faster: then *backing_id is the
 * one not to use. */
static int settle(cg_nodes *nodes, cg_fs_node *node, int *backing_id)
{
    pthread_mutex_lock(&nodes->lock);
    if (node->backing_id <= 0 && *backing_id > 0) {
        node->backing_id = *backing_id;
        *backing_id = 0;
    }
    const int settled = node->backing_id;
    if (settled <= 0) { /* the kernel refused */
        node->n_backed--;
        node->n_cached++;
    }
    pthread_mutex_unlock(&nodes->lock);
    return settled;
}

void cg_passthrough_open(cg_passthrough *p, fuse_req_t req, cg_fs_file *file,
                         struct fuse_file_info *fi)
{
    int backing_id = 0;
    if (file->fd < 0 || file->pending != NULL) {
        fi->direct_io = 1; /* not cached, no shared mappings: nothing to keep apart */
        return;
    }
    /* Of a view the kernel would read on behind its end. */
    const bool is_view = file->node->view.level != 0;
    const bool wanted = CG_FUSE_HAS_PASSTHROUGH && p->enabled && file->immutable && !is_view;
    if (!file->cached) /* else the core has counted it when it was opened */
        file->backed = join_backed(p->nodes, file->node, wanted, &backing_id);
    /* Without the lock, since it asks the kernel. Two at once may make one each: settle() keeps the
     * first. */
    if (file->backed && backing_id <= 0) {
        int made = backing_open(req, file->fd);
        if (made <= 0) /* EPERM, without CAP_SYS_ADMIN, stays: no further tries */
            p->enabled = p->enabled && made != -EPERM;
        backing_id = settle(p->nodes, file->node, &made);
        backing_close(p, made);
        file->backed = backing_id > 0;
    }
#if CG_FUSE_HAS_PASSTHROUGH
    if (file->backed)
        fi->backing_id = backing_id;
#endif
    if (!file->backed) /* pages of an earlier open are good if the content did not change */
        fi->keep_cache = file->immutable || file->unchanged;
    if (!file->writable) {
        fi->noflush = 1; /* nothing can be published by this close: spare the daemon the call */
        cg_metrics_add(file->backed ? &p->metrics->opens_passthrough : &p->metrics->opens_plain, 1);
    }
    if (file->immutable && !is_view)
        p->metrics->passthrough_in_use = file->backed;
}

void cg_passthrough_release(cg_passthrough *p, cg_fs_file *file)
{
    cg_fs_node *node = file->node;
    int backing_id = 0;
    if (file->fd < 0 || file->pending != NULL || file->cached)
        return;
    pthread_mutex_lock(&p->nodes->lock);
    if (!file->backed) {
        node->n_cached--;
    } else if (--node->n_backed == 0) {
        backing_id = node->backing_id;
        node->backing_id = 0;
    }
    pthread_mutex_unlock(&p->nodes->lock);
    backing_close(p, backing_id);
}
