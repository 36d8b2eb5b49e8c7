#include "fusefs/ops_files.h"

#include "fusefs/open_files.h"
#include "fusefs/persona.h"
#include "fusefs/reach.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static cg_fs_file *file_of(const struct fuse_file_info *fi)
{
    return (cg_fs_file *)(uintptr_t)fi->fh;
}

static cg_fs_directory *directory_of(const struct fuse_file_info *fi)
{
    return (cg_fs_directory *)(uintptr_t)fi->fh;
}

/* Passthrough needs the request, so that it is chosen here and not in the core. */
static void finish_open(cg_mount *mount, fuse_req_t req, cg_fs_file *file,
                        struct fuse_file_info *fi)
{
    cg_passthrough_open(&mount->passthrough, req, file, fi);
    fi->fh = (uintptr_t)file;
}

static void end_open(cg_mount *mount, cg_fs_file *file)
{
    cg_passthrough_release(&mount->passthrough, file);
    cg_fs_release(mount->fs, file);
}

/* The kernel did not get the answer: it came too late (fusefs/overdue.h), or the connection was
 * aborted. So the pages that it has are not what they would be after this open. */
static void undo_open(cg_mount *mount, cg_fs_file *file)
{
    file->note.changed_ns = 0;
    end_open(mount, file);
}

void cg_ops_create(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode,
                   struct fuse_file_info *fi)
{
    cg_mount *mount = cg_ops_mount(req);
    const cg_fs_caller caller = cg_ops_caller(req);
    cg_fs_entry entry;
    cg_fs_file *file;
    const int error = cg_fs_create(mount->fs, &caller, cg_ops_node(mount, parent), name, mode,
                                   fi->flags, &entry, &file);
    if (error != 0) {
        cg_ops_reply_error(req, error);
        return;
    }
    finish_open(mount, req, file, fi);
    const struct fuse_entry_param param = cg_ops_entry(mount, &entry);
    /* -ENOENT: the caller was interrupted. The kernel knows neither the file nor the node, and will
     * send no release. */
    if (fuse_reply_create(req, &param, fi) == -ENOENT) {
        undo_open(mount, file);
        cg_ops_take_back(mount, entry.node);
    }
}

void cg_ops_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    cg_mount *mount = cg_ops_mount(req);
    const cg_fs_caller caller = cg_ops_caller(req);
    cg_fs_file *file;
    const int error = cg_fs_open(mount->fs, &caller, cg_ops_node(mount, ino), fi->flags, &file);
    if (error != 0) {
        cg_ops_reply_error(req, error);
        return;
    }
    finish_open(mount, req, file, fi);
    if (fuse_reply_open(req, fi) == -ENOENT)
        undo_open(mount, file);
}

/* A copy of the text: who has read it may close the file, which frees the text, before the call
 * that wrote the answer returns. Nothing reads it then, but sanitizers look at it once more. */
static void reply_text(fuse_req_t req, const char *text, size_t n_bytes)
{
    char *copy = n_bytes == 0 ? NULL : malloc(n_bytes);
    if (n_bytes > 0 && copy == NULL) {
        cg_ops_reply_error(req, ENOMEM);
        return;
    }
    if (n_bytes > 0)
        memcpy(copy, text, n_bytes);
    fuse_reply_buf(req, copy, n_bytes);
    free(copy);
}

void cg_ops_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset,
                 struct fuse_file_info *fi)
{
    cg_fs_bytes bytes;
    (void)ino;
    cg_fs_read(cg_ops_mount(req)->fs, file_of(fi), offset, size, &bytes);
    if (bytes.text != NULL || bytes.n_bytes == 0) {
        reply_text(req, bytes.text, bytes.n_bytes);
        return;
    }
    struct fuse_bufvec out = FUSE_BUFVEC_INIT(bytes.n_bytes);
    /* A descriptor, not bytes: libfuse can splice them to the kernel without a copy here. RETRY: a
     * short read goes on until the file ends. */
    out.buf[0].flags = FUSE_BUF_IS_FD | FUSE_BUF_FD_SEEK | FUSE_BUF_FD_RETRY;
    out.buf[0].fd = bytes.fd;
    out.buf[0].pos = bytes.offset;
    fuse_reply_data(req, &out, FUSE_BUF_SPLICE_MOVE);
}

/* Blocks of the store are the caller's, not root's. What the kernel writes back of a mapping has no
 * caller. */
static void become_caller(fuse_req_t req)
{
    const cg_fs_caller caller = cg_ops_caller(req);
    cg_persona_enter(caller.uid, caller.gid);
}

typedef struct written {
    struct fuse_bufvec *in;
    bool needs_place; /* the file's descriptor would append it */
} written;

static ssize_t move_buffers(void *source, int fd, off_t offset)
{
    const written *w = source;
    struct fuse_bufvec out = FUSE_BUFVEC_INIT(fuse_buf_size(w->in));
    out.buf[0].flags = FUSE_BUF_IS_FD | FUSE_BUF_FD_SEEK;
    out.buf[0].pos = offset;
    if (!w->needs_place) {
        out.buf[0].fd = fd;
        return fuse_buf_copy(&out, w->in, 0);
    }
    /* By a descriptor of its own. RWF_NOAPPEND is newer than many kernels, and unknown to network
     * file systems, which append by what a file was opened with. */
    const int own_fd = open(cg_reach_proc_path(fd).text, O_WRONLY | O_CLOEXEC);
    if (own_fd < 0)
        return -errno;
    out.buf[0].fd = own_fd;
    const ssize_t n = fuse_buf_copy(&out, w->in, 0);
    close(own_fd);
    return n;
}

void cg_ops_write_buf(fuse_req_t req, fuse_ino_t ino, struct fuse_bufvec *in, off_t offset,
                      struct fuse_file_info *fi)
{
    size_t n_written;
    (void)ino;
    become_caller(req);
    /* What comes from a mapping has its place, whichever open file the kernel sends it by. And who
     * appended may have ended that (F_SETFL). */
    written w = {in, file_of(fi)->appends && (fi->writepage || (fi->flags & O_APPEND) == 0)};
    const int error =
        cg_fs_write(cg_ops_mount(req)->fs, file_of(fi), offset, move_buffers, &w, &n_written);
    cg_persona_leave();
    if (error != 0)
        cg_ops_reply_error(req, error);
    else
        fuse_reply_write(req, n_written);
}

void cg_ops_flush(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    (void)ino;
    cg_ops_reply_error(req, cg_fs_flush(cg_ops_mount(req)->fs, file_of(fi)));
}

void cg_ops_fsync(fuse_req_t req, fuse_ino_t ino, int data_only, struct fuse_file_info *fi)
{
    (void)ino;
    cg_ops_reply_error(req, cg_fs_fsync(cg_ops_mount(req)->fs, file_of(fi), data_only != 0));
}

void cg_ops_release(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    (void)ino;
    end_open(cg_ops_mount(req), file_of(fi));
    fuse_reply_err(req, 0);
}

void cg_ops_fallocate(fuse_req_t req, fuse_ino_t ino, int mode, off_t offset, off_t length,
                      struct fuse_file_info *fi)
{
    (void)ino;
    become_caller(req);
    const int error = cg_fs_fallocate(cg_ops_mount(req)->fs, file_of(fi), mode, offset, length);
    cg_persona_leave();
    cg_ops_reply_error(req, error);
}

void cg_ops_copy_file_range(fuse_req_t req, fuse_ino_t ino_in, off_t off_in,
                            struct fuse_file_info *fi_in, fuse_ino_t ino_out, off_t off_out,
                            struct fuse_file_info *fi_out, size_t len, int flags)
{
    size_t n_copied;
    (void)ino_in, (void)ino_out, (void)flags;
    become_caller(req);
    const int error = cg_fs_copy_range(cg_ops_mount(req)->fs, file_of(fi_in), off_in,
                                       file_of(fi_out), off_out, len, &n_copied);
    cg_persona_leave();
    if (error != 0)
        cg_ops_reply_error(req, error);
    else
        fuse_reply_write(req, n_copied);
}

void cg_ops_lseek(fuse_req_t req, fuse_ino_t ino, off_t offset, int whence,
                  struct fuse_file_info *fi)
{
    off_t result;
    (void)ino;
    const int error = cg_fs_seek(file_of(fi), offset, whence, &result);
    if (error != 0)
        cg_ops_reply_error(req, error);
    else
        fuse_reply_lseek(req, result);
}

void cg_ops_opendir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    const cg_mount *mount = cg_ops_mount(req);
    cg_fs_directory *directory;
    /* From now on the kernel opens no directory here, and keeps each listing for as long as the
     * folder's time of modification stays. So it asks nothing for a folder that it knows. */
    if (mount->may_keep_listings && cg_ops_trusts_names(mount)) {
        fuse_reply_err(req, ENOSYS);
        return;
    }
    const cg_fs_caller caller = cg_ops_caller(req);
    const int error = cg_fs_opendir(mount->fs, &caller, cg_ops_node(mount, ino), &directory);
    if (error != 0) {
        cg_ops_reply_error(req, error);
        return;
    }
    fi->fh = (uintptr_t)directory;
    if (fuse_reply_open(req, fi) == -ENOENT)
        cg_fs_closedir(directory);
}

/* The directory of a request. One that the kernel has not opened is open for this request. */
static int begin_directory(fuse_req_t req, fuse_ino_t ino, const struct fuse_file_info *fi,
                           cg_fs_directory **directory_out)
{
    const cg_mount *mount = cg_ops_mount(req);
    const cg_fs_caller caller = cg_ops_caller(req);
    *directory_out = directory_of(fi);
    return *directory_out != NULL
               ? 0
               : cg_fs_opendir(mount->fs, &caller, cg_ops_node(mount, ino), directory_out);
}

static void end_directory(const struct fuse_file_info *fi, cg_fs_directory *directory)
{
    if (directory != NULL && directory != directory_of(fi))
        cg_fs_closedir(directory);
}

/* Puts one entry into the reply. Returns its bytes; if they are more than left_bytes, it is not in
 * the reply, and *looked_up_out (may be NULL) is to be forgotten. With plus, an entry is a look-up,
 * which the kernel gives back later; "." and ".." are none, and without looks_up
 * no entry is. */
static size_t add_entry(fuse_req_t req, cg_fs_directory *directory, const struct dirent *entry,
                        bool plus, bool looks_up, char *at, size_t left_bytes, off_t next,
                        cg_fs_node **looked_up_out)
{
    const cg_mount *mount = cg_ops_mount(req);
    const cg_fs_caller caller = cg_ops_caller(req);
    struct stat attr = {.st_ino = entry->d_ino, .st_mode = DTTOIF(entry->d_type)};
    cg_fs_entry found;
    *looked_up_out = NULL;
    if (!plus)
        return fuse_add_direntry(req, at, left_bytes, entry->d_name, &attr, next);
    struct fuse_entry_param param = {.attr = attr};
    if (looks_up && strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 &&
        cg_fs_lookup_read(mount->fs, &caller, directory, entry->d_name, &found) == 0) {
        param = cg_ops_entry(mount, &found);
        *looked_up_out = found.node;
    }
    return fuse_add_direntry_plus(req, at, left_bytes, entry->d_name, &param, next);
}

/* The look-ups in a listing. */
static void take_entries_back(cg_fs *fs, const char *bytes, size_t n_bytes)
{
    struct fuse_direntplus entry;
    for (size_t at = 0; at < n_bytes; at += FUSE_DIRENTPLUS_SIZE(&entry)) {
        memcpy(&entry, bytes + at, sizeof entry);
        if (entry.entry_out.nodeid != 0)
            cg_fs_forget(fs, (cg_fs_node *)(uintptr_t)entry.entry_out.nodeid, 1);
    }
}

static void read_directory(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset,
                           struct fuse_file_info *fi, bool plus)
{
    const cg_mount *mount = cg_ops_mount(req);
    cg_fs *fs = mount->fs;
    cg_fs_directory *directory = NULL;
    char *bytes = malloc(size);
    size_t n_bytes = 0;
    int error = bytes == NULL ? ENOMEM : begin_directory(req, ino, fi, &directory);
    const bool looks_up = plus && !cg_fs_is_crowded(fs);
    while (error == 0) {
        const struct dirent *entry;
        cg_fs_node *looked_up;
        off_t next = 0;
        error = cg_fs_readdir(fs, directory, offset, &entry, &next);
        if (error != 0 || entry == NULL)
            break;
        const size_t entry_bytes = add_entry(req, directory, entry, plus, looks_up, bytes + n_bytes,
                                             size - n_bytes, next, &looked_up);
        if (entry_bytes > size - n_bytes) {
            if (looked_up != NULL)
                cg_fs_forget(fs, looked_up, 1);
            break;
        }
        n_bytes += entry_bytes;
        offset = next;
    }
    if (error != 0 && n_bytes == 0)
        cg_ops_reply_error(req, error);
    else if (fuse_reply_buf(req, bytes, n_bytes) != 0 && looks_up)
        take_entries_back(fs, bytes, n_bytes); /* the kernel did not get them */
    end_directory(fi, directory);
    free(bytes);
}

void cg_ops_readdir(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset,
                    struct fuse_file_info *fi)
{
    read_directory(req, ino, size, offset, fi, false);
}

void cg_ops_readdirplus(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset,
                        struct fuse_file_info *fi)
{
    read_directory(req, ino, size, offset, fi, true);
}

void cg_ops_releasedir(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
    (void)ino;
    cg_fs_closedir(directory_of(fi));
    fuse_reply_err(req, 0);
}

void cg_ops_fsyncdir(fuse_req_t req, fuse_ino_t ino, int data_only, struct fuse_file_info *fi)
{
    cg_fs_directory *directory;
    int error = begin_directory(req, ino, fi, &directory);
    (void)data_only;
    if (error == 0)
        error = cg_fs_syncdir(directory);
    end_directory(fi, directory);
    cg_ops_reply_error(req, error);
}
