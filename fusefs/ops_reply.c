/* What both halves of the FUSE edge reply with. How long the kernel may trust an answer is decided
 * here, and that a look-up which did not reach it is taken back. */
#include "fusefs/ops_reply.h"

static const double UNTRUSTED_SECONDS = 1;

cg_mount *cg_ops_mount(fuse_req_t req)
{
    return fuse_req_userdata(req);
}

/* A node's number is its address; the kernel gives back only what it got, and until it forgets
 * it. */
cg_fs_node *cg_ops_node(const cg_mount *mount, fuse_ino_t ino)
{
    return ino == FUSE_ROOT_ID ? cg_fs_root(mount->fs) : (cg_fs_node *)(uintptr_t)ino;
}

cg_fs_caller cg_ops_caller(fuse_req_t req)
{
    const struct fuse_ctx *context = fuse_req_ctx(req);
    return (cg_fs_caller){.uid = context->uid, .gid = context->gid, .pid = context->pid};
}

void cg_ops_reply_error(fuse_req_t req, int error)
{
    cg_metrics_error(cg_fs_metrics(cg_ops_mount(req)->fs), error);
    fuse_reply_err(req, error);
}

void cg_ops_forget(void *user, const cg_node_ref *ref)
{
    const cg_mount *mount = user;
    const bool is_root = ref->node == cg_fs_root(mount->fs);
    /* From which byte on its pages are dropped: a folder's are its listing. None (-1) of a file's:
     * that would wait for those that are being read. */
    const off_t from = ref->is_folder ? 0 : -1;
    /* An error says that the kernel does not know the file, or not yet: a look-up that is under way
     * is told apart by cg_fs_entry.may_be_old. */
    fuse_lowlevel_notify_inval_inode(
        mount->session, is_root ? FUSE_ROOT_ID : (fuse_ino_t)(uintptr_t)ref->node, from, 0);
}

void cg_ops_doubt_names(void *user)
{
    const cg_mount *mount = user;
#if CG_FUSE_HAS_EPOCHS
    if (mount->knows_epochs)
        fuse_lowlevel_notify_increment_epoch(mount->session);
#else
    (void)mount;
#endif
}

bool cg_ops_trusts_names(const cg_mount *mount)
{
    return mount->entry_timeout_s < 0 && mount->knows_epochs && cg_fs_is_watched(mount->fs);
}

/* What the command line says counts. Else trust depends on whether changes past the mount are seen,
 * and on whether all changes are. */
static double timeout(double option_s, bool is_trusted, bool is_lasting)
{
    if (option_s >= 0)
        return option_s;
    return !is_trusted  ? UNTRUSTED_SECONDS
           : is_lasting ? CG_FS_LASTING_SECONDS
                        : CG_FS_TRUST_SECONDS;
}

struct fuse_entry_param cg_ops_entry(const cg_mount *mount, const cg_fs_entry *entry)
{
    const bool is_watched = !entry->may_be_old && cg_fs_is_watched_file(mount->fs, entry->node);
    return (struct fuse_entry_param){
        .ino = (fuse_ino_t)(uintptr_t)entry->node,
        .generation = entry->node->generation,
        .attr = entry->attr,
        .attr_timeout = timeout(mount->attr_timeout_s, is_watched, entry->is_lasting),
        .entry_timeout = entry->may_not_be_cached
                             ? 0
                             : timeout(mount->entry_timeout_s,
                                       is_watched && cg_ops_trusts_names(mount), entry->is_lasting),
    };
}

void cg_ops_take_back(cg_mount *mount, cg_fs_node *node)
{
    cg_fs_forget(mount->fs, node, 1);
    cg_ops_doubt_names(mount); /* it may remember that the name is missing */
}

void cg_ops_reply_entry(fuse_req_t req, int error, const cg_fs_entry *entry)
{
    cg_mount *mount = cg_ops_mount(req);
    if (error != 0) {
        cg_ops_reply_error(req, error);
        return;
    }
    const struct fuse_entry_param param = cg_ops_entry(mount, entry);
    cg_fs_node *node = entry->node;
    /* From here on another thread may get the kernel's forget: the node can be gone. */
    if (fuse_reply_entry(req, &param) != 0) /* interrupted: the kernel did not get it */
        cg_ops_take_back(mount, node);
}

void cg_ops_reply_attr(fuse_req_t req, int error, cg_fs_node *node, const struct stat *attr)
{
    const cg_mount *mount = cg_ops_mount(req);
    if (error != 0)
        cg_ops_reply_error(req, error);
    else
        fuse_reply_attr(req, attr,
                        timeout(mount->attr_timeout_s, cg_fs_is_watched_file(mount->fs, node),
                                cg_fs_is_lasting(mount->fs, node)));
}
