/* The FUSE edge: names and attributes, and the table of all operations. */
#include "fusefs/ops.h"

#include "fusefs/ops_files.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* What the kernel may have under way in the background, reading ahead and last closes among it.
 * More than any lane takes (fusefs/lanes.h): by the kernel's own limit, 12, one user's reading
 * would keep others' from the daemon. Small enough for memory: pages that are written back, up to 1
 * MiB each, belong to no user. */
enum { MAX_BACKGROUND = 128 };

static void op_init(void *userdata, struct fuse_conn_info *conn)
{
    cg_mount *mount = userdata;
    conn->max_background = MAX_BACKGROUND;
    mount->knows_epochs = CG_FUSE_HAS_EPOCHS && conn->proto_minor >= CG_FUSE_EPOCHS_MINOR;
    /* Kernels that know epochs (6.16) are newer than fine times (6.13). */
    mount->may_keep_listings = mount->knows_epochs && cg_fs_has_fine_times(mount->fs) &&
                               (conn->capable & FUSE_CAP_NO_OPENDIR_SUPPORT) != 0;
#if CG_FUSE_HAS_PASSTHROUGH
    if (mount->wants_passthrough && fuse_set_feature_flag(conn, FUSE_CAP_PASSTHROUGH)) {
        /* How many file systems lie below the backing file's. With 1, the kernel, which allows two
         * in all, lets nothing be stacked over us. */
        conn->max_backing_stack_depth = mount->store_is_stacked ? 1 : 0;
        mount->passthrough.enabled = true;
    }
    if (CG_FUSE_MAY_SPLICE) {
        fuse_set_feature_flag(conn, FUSE_CAP_SPLICE_WRITE);
        fuse_set_feature_flag(conn, FUSE_CAP_SPLICE_MOVE);
    } else { /* libfuse's default */
        fuse_unset_feature_flag(conn, FUSE_CAP_SPLICE_WRITE);
    }
    /* A pipe for the largest request is larger than CAP_SYS_RESOURCE, which is dropped, may make
     * it: libfuse would make one for each request, try, and close it. */
    fuse_unset_feature_flag(conn, FUSE_CAP_SPLICE_READ);
#else
    (void)mount;
    const unsigned splices = FUSE_CAP_SPLICE_WRITE | FUSE_CAP_SPLICE_MOVE;
    conn->want &= ~(unsigned)(splices | FUSE_CAP_SPLICE_READ); /* as above */
    conn->want |= CG_FUSE_MAY_SPLICE ? conn->capable & splices : 0;
#endif
}

static void op_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    const cg_mount *mount = cg_ops_mount(req);
    const cg_fs_caller caller = cg_ops_caller(req);
    cg_fs_entry entry;
    const int error = cg_fs_lookup(mount->fs, &caller, cg_ops_node(mount, parent), name, &entry);
    if (error == ENOENT && !entry.may_not_be_cached && cg_ops_trusts_names(mount)) {
        const struct fuse_entry_param missing = {.entry_timeout = CG_MISSING_SECONDS};
        fuse_reply_entry(req, &missing);
    } else {
        cg_ops_reply_entry(req, error, &entry);
    }
}

static void op_forget(fuse_req_t req, fuse_ino_t ino, uint64_t n_lookups)
{
    const cg_mount *mount = cg_ops_mount(req);
    cg_fs_forget(mount->fs, cg_ops_node(mount, ino), n_lookups);
    fuse_reply_none(req);
}

static void op_forget_multi(fuse_req_t req, size_t count, struct fuse_forget_data *forgets)
{
    const cg_mount *mount = cg_ops_mount(req);
    for (size_t i = 0; i < count; i++)
        cg_fs_forget(mount->fs, cg_ops_node(mount, forgets[i].ino), forgets[i].nlookup);
    fuse_reply_none(req);
}

static void op_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    const cg_mount *mount = cg_ops_mount(req);
    cg_fs_node *node = cg_ops_node(mount, ino);
    struct stat attr;
    bool is_old = false;
    (void)fi;
    if (ino == FUSE_ROOT_ID) {
        const int error = cg_fs_getattr_root(mount->fs, &attr, &is_old);
        if (is_old)
            fuse_reply_attr(req, &attr, 0);
        else
            cg_ops_reply_attr(req, error, node, &attr);
        return;
    }
    cg_ops_reply_attr(req, cg_fs_getattr(mount->fs, node, &attr), node, &attr);
}

static void op_setattr(fuse_req_t req, fuse_ino_t ino, struct stat *attr, int to_set,
                       struct fuse_file_info *fi)
{
    static const struct {
        int fuse, core;
    } bits[] = {
        {FUSE_SET_ATTR_MODE, CG_SET_MODE},   {FUSE_SET_ATTR_UID, CG_SET_UID},
        {FUSE_SET_ATTR_GID, CG_SET_GID},     {FUSE_SET_ATTR_SIZE, CG_SET_SIZE},
        {FUSE_SET_ATTR_ATIME, CG_SET_ATIME}, {FUSE_SET_ATTR_MTIME, CG_SET_MTIME},
    };
    const cg_mount *mount = cg_ops_mount(req);
    struct stat result;
    int mask = 0;
    for (size_t i = 0; i < sizeof bits / sizeof bits[0]; i++)
        if ((to_set & bits[i].fuse) != 0)
            mask |= bits[i].core;
    if ((to_set & FUSE_SET_ATTR_ATIME_NOW) != 0) {
        mask |= CG_SET_ATIME;
        attr->st_atim.tv_nsec = UTIME_NOW;
    }
    if ((to_set & FUSE_SET_ATTR_MTIME_NOW) != 0) {
        mask |= CG_SET_MTIME;
        attr->st_mtim.tv_nsec = UTIME_NOW;
    }
    cg_fs_node *node = cg_ops_node(mount, ino);
    int error = 0;
    /* ftruncate(): who has a file open for writing need not be able to open it again. */
    if (fi != NULL && (mask & CG_SET_SIZE) != 0) {
        error = cg_fs_ftruncate(mount->fs, (cg_fs_file *)(uintptr_t)fi->fh, attr->st_size);
        mask &= ~CG_SET_SIZE;
    }
    if (error == 0)
        error = cg_fs_setattr(mount->fs, node, attr, mask, &result);
    cg_ops_reply_attr(req, error, node, &result);
}

static void op_readlink(fuse_req_t req, fuse_ino_t ino)
{
    const cg_mount *mount = cg_ops_mount(req);
    char target[PATH_MAX + 1];
    const int error = cg_fs_readlink(mount->fs, cg_ops_node(mount, ino), target, sizeof target);
    if (error != 0)
        cg_ops_reply_error(req, error);
    else
        fuse_reply_readlink(req, target);
}

static void op_mknod(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, dev_t rdev)
{
    const cg_mount *mount = cg_ops_mount(req);
    const cg_fs_caller caller = cg_ops_caller(req);
    cg_fs_entry entry;
    cg_ops_reply_entry(
        req, cg_fs_mknod(mount->fs, &caller, cg_ops_node(mount, parent), name, mode, rdev, &entry),
        &entry);
}

static void op_mkdir(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode)
{
    const cg_mount *mount = cg_ops_mount(req);
    const cg_fs_caller caller = cg_ops_caller(req);
    cg_fs_entry entry;
    cg_ops_reply_entry(
        req, cg_fs_mkdir(mount->fs, &caller, cg_ops_node(mount, parent), name, mode, &entry),
        &entry);
}

static void op_symlink(fuse_req_t req, const char *target, fuse_ino_t parent, const char *name)
{
    const cg_mount *mount = cg_ops_mount(req);
    const cg_fs_caller caller = cg_ops_caller(req);
    cg_fs_entry entry;
    cg_ops_reply_entry(
        req, cg_fs_symlink(mount->fs, &caller, target, cg_ops_node(mount, parent), name, &entry),
        &entry);
}

static void op_link(fuse_req_t req, fuse_ino_t ino, fuse_ino_t new_parent, const char *new_name)
{
    const cg_mount *mount = cg_ops_mount(req);
    cg_fs_entry entry;
    cg_ops_reply_entry(req,
                       cg_fs_link(mount->fs, cg_ops_node(mount, ino),
                                  cg_ops_node(mount, new_parent), new_name, &entry),
                       &entry);
}

static void op_unlink(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    const cg_mount *mount = cg_ops_mount(req);
    const cg_fs_caller caller = cg_ops_caller(req);
    cg_ops_reply_error(req, cg_fs_unlink(mount->fs, &caller, cg_ops_node(mount, parent), name));
}

static void op_rmdir(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    const cg_mount *mount = cg_ops_mount(req);
    cg_ops_reply_error(req, cg_fs_rmdir(mount->fs, cg_ops_node(mount, parent), name));
}

static void op_rename(fuse_req_t req, fuse_ino_t parent, const char *name, fuse_ino_t new_parent,
                      const char *new_name, unsigned flags)
{
    const cg_mount *mount = cg_ops_mount(req);
    const cg_fs_caller caller = cg_ops_caller(req);
    cg_ops_reply_error(req, cg_fs_rename(mount->fs, &caller, cg_ops_node(mount, parent), name,
                                         cg_ops_node(mount, new_parent), new_name, flags));
}

static void op_statfs(fuse_req_t req, fuse_ino_t ino)
{
    struct statvfs attr;
    (void)ino;
    const int error = cg_fs_statfs(cg_ops_mount(req)->fs, &attr);
    if (error != 0)
        cg_ops_reply_error(req, error);
    else
        fuse_reply_statfs(req, &attr);
}

/* The answer of getxattr and listxattr: the size when size is 0, else the bytes. */
static void reply_xattr(fuse_req_t req, int error, const char *bytes, size_t size, size_t n_bytes)
{
    if (error != 0)
        cg_ops_reply_error(req, error);
    else if (size == 0)
        fuse_reply_xattr(req, n_bytes);
    else
        fuse_reply_buf(req, bytes, n_bytes);
}

static void op_getxattr(fuse_req_t req, fuse_ino_t ino, const char *name, size_t size)
{
    const cg_mount *mount = cg_ops_mount(req);
    size_t n_bytes = 0;
    char *value = size == 0 ? NULL : malloc(size);
    const int error = size > 0 && value == NULL ? ENOMEM
                                                : cg_fs_getxattr(mount->fs, cg_ops_node(mount, ino),
                                                                 name, value, size, &n_bytes);
    reply_xattr(req, error, value, size, n_bytes);
    free(value);
}

static void op_listxattr(fuse_req_t req, fuse_ino_t ino, size_t size)
{
    const cg_mount *mount = cg_ops_mount(req);
    const cg_fs_caller caller = cg_ops_caller(req);
    size_t n_bytes = 0;
    char *list = size == 0 ? NULL : malloc(size);
    const int error =
        size > 0 && list == NULL
            ? ENOMEM
            : cg_fs_listxattr(mount->fs, &caller, cg_ops_node(mount, ino), list, size, &n_bytes);
    reply_xattr(req, error, list, size, n_bytes);
    free(list);
}

static void op_setxattr(fuse_req_t req, fuse_ino_t ino, const char *name, const char *value,
                        size_t size, int flags)
{
    const cg_mount *mount = cg_ops_mount(req);
    cg_ops_reply_error(
        req, cg_fs_setxattr(mount->fs, cg_ops_node(mount, ino), name, value, size, flags));
}

static void op_removexattr(fuse_req_t req, fuse_ino_t ino, const char *name)
{
    const cg_mount *mount = cg_ops_mount(req);
    cg_ops_reply_error(req, cg_fs_removexattr(mount->fs, cg_ops_node(mount, ino), name));
}

const struct fuse_lowlevel_ops CG_OPS = {
    .init = op_init,
    .lookup = op_lookup,
    .forget = op_forget,
    .forget_multi = op_forget_multi,
    .getattr = op_getattr,
    .setattr = op_setattr,
    .readlink = op_readlink,
    .mknod = op_mknod,
    .mkdir = op_mkdir,
    .symlink = op_symlink,
    .link = op_link,
    .unlink = op_unlink,
    .rmdir = op_rmdir,
    .rename = op_rename,
    .statfs = op_statfs,
    .getxattr = op_getxattr,
    .listxattr = op_listxattr,
    .setxattr = op_setxattr,
    .removexattr = op_removexattr,
    .create = cg_ops_create,
    .open = cg_ops_open,
    .read = cg_ops_read,
    .write_buf = cg_ops_write_buf,
    .flush = cg_ops_flush,
    .fsync = cg_ops_fsync,
    .release = cg_ops_release,
    .fallocate = cg_ops_fallocate,
    .copy_file_range = cg_ops_copy_file_range,
    .lseek = cg_ops_lseek,
    .opendir = cg_ops_opendir,
    .readdir = cg_ops_readdir,
    .readdirplus = cg_ops_readdirplus,
    .releasedir = cg_ops_releasedir,
    .fsyncdir = cg_ops_fsyncdir,
};
