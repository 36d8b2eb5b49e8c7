/* What is done with an open file: its part of fusefs/core.h. */
#include "fusefs/contents.h"

#include "fusefs/fs.h"
#include "fusefs/open_files.h"
#include "fusefs/publish.h"
#include "fusefs/space.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/* Whether the file may become end_bytes long. EFBIG: it could not be published. */
static int prepare_change(const cg_fs *fs, cg_fs_file *file, uint64_t end_bytes)
{
    if (!file->writable)
        return EBADF;
    if (file->pending != NULL && end_bytes > fs->max_file_bytes)
        return EFBIG;
    __atomic_store_n(&file->was_flushed, false, __ATOMIC_RELAXED);
    return 0;
}

/* Around each change of the content: EPERM when it is published, and a check of it waits until we
 * are through. */
static int begin_change(cg_fs *fs, cg_fs_file *file, uint64_t end_bytes)
{
    const int error = prepare_change(fs, file, end_bytes);
    if (error != 0)
        return error;
    return cg_gate_enter(&fs->nodes, file->node) ? 0 : EPERM;
}

static void end_change(cg_fs *fs, const cg_fs_file *file, uint64_t written_bytes)
{
    cg_gate_leave(&fs->nodes, file->node);
    cg_metrics_add(&fs->metrics.written_bytes, written_bytes);
}

int cg_fs_write(cg_fs *fs, cg_fs_file *file, off_t offset, cg_fs_move *move, void *source,
                size_t *n_written_out)
{
    *n_written_out = 0;
    /* Only move() knows how many bytes come. They are few. */
    const int error = begin_change(fs, file, (uint64_t)offset + 1);
    if (error != 0)
        return error;
    const ssize_t n = move(source, file->fd, offset);
    if (n > 0)
        *n_written_out = (size_t)n;
    end_change(fs, file, *n_written_out);
    cg_space_failed(fs, n < 0 ? (int)-n : 0);
    return n < 0 ? (int)-n : 0;
}

void cg_fs_read(cg_fs *fs, const cg_fs_file *file, off_t offset, size_t n_bytes,
                cg_fs_bytes *bytes_out)
{
    if (file->fd < 0) {
        const size_t from = (size_t)offset < file->text_bytes ? (size_t)offset : file->text_bytes;
        const size_t left_bytes = file->text_bytes - from;
        *bytes_out = (cg_fs_bytes){.text = file->text + from,
                                   .fd = -1,
                                   .n_bytes = left_bytes < n_bytes ? left_bytes : n_bytes};
        return;
    }
    *bytes_out = (cg_fs_bytes){.fd = file->fd,
                               .offset = offset,
                               .n_bytes = cg_view_clamp(&file->node->view, offset, n_bytes)};
    cg_metrics_add(&fs->metrics.read_bytes, bytes_out->n_bytes);
}

int cg_contents_truncate(cg_fs *fs, cg_fs_node *node, int fd, off_t size)
{
    if (!cg_gate_enter(&fs->nodes, node))
        return EPERM;
    const int error = ftruncate(fd, size) == 0 ? 0 : errno;
    if (error == 0 && size == 0) { /* what an earlier sync could not bring to disk is given up */
        pthread_mutex_lock(&fs->nodes.lock);
        node->has_lost = 0;
        pthread_mutex_unlock(&fs->nodes.lock);
    }
    cg_gate_leave(&fs->nodes, node);
    cg_space_failed(fs, error);
    return error;
}

int cg_fs_ftruncate(cg_fs *fs, cg_fs_file *file, off_t size)
{
    const int error = prepare_change(fs, file, (uint64_t)size);
    return error != 0 ? error : cg_contents_truncate(fs, file->node, file->fd, size);
}

int cg_fs_fallocate(cg_fs *fs, cg_fs_file *file, int mode, off_t offset, off_t n_bytes)
{
    const int error = begin_change(fs, file, (uint64_t)offset + (uint64_t)n_bytes);
    if (error != 0)
        return error;
    const int result = fallocate(file->fd, mode, offset, n_bytes) == 0 ? 0 : errno;
    end_change(fs, file, 0);
    cg_space_failed(fs, result);
    return result;
}

int cg_fs_copy_range(cg_fs *fs, cg_fs_file *from, off_t from_offset, cg_fs_file *to,
                     off_t to_offset, size_t n_bytes, size_t *n_copied_out)
{
    if (from->fd < 0 || to->fd < 0)
        return EOPNOTSUPP; /* the kernel copies by reading and writing */
    n_bytes = cg_view_clamp(&from->node->view, from_offset, n_bytes);
    const int error = begin_change(fs, to, (uint64_t)to_offset + 1);
    if (error != 0)
        return error;
    const uint64_t room_bytes = fs->max_file_bytes - (uint64_t)to_offset;
    if (to->pending != NULL && n_bytes > room_bytes)
        n_bytes = room_bytes;
    const ssize_t n = copy_file_range(from->fd, &from_offset, to->fd, &to_offset, n_bytes, 0);
    /* EOPNOTSUPP makes the kernel read and write instead. Between file systems, and of descriptors
     * that are not open for it (EBADF), that is the way that works. */
    const int result = n >= 0                                                ? 0
                       : errno == ENOSYS || errno == EXDEV || errno == EBADF ? EOPNOTSUPP
                                                                             : errno;
    end_change(fs, to, n > 0 ? (uint64_t)n : 0);
    cg_space_failed(fs, result);
    *n_copied_out = n > 0 ? (size_t)n : 0;
    return result;
}

int cg_fs_seek(cg_fs_file *file, off_t offset, int whence, off_t *offset_out)
{
    if (file->fd < 0)
        return EINVAL;
    const cg_view *view = &file->node->view;
    if (view->level != 0 && (offset < 0 || (uint64_t)offset >= view->bytes))
        return ENXIO;
    /* The offset of our descriptor is not used for anything else. */
    *offset_out = lseek(file->fd, offset, whence);
    if (*offset_out < 0)
        return errno;
    if (view->level != 0 && (uint64_t)*offset_out >= view->bytes) {
        if (whence == SEEK_DATA)
            return ENXIO;
        *offset_out = (off_t)view->bytes; /* every file ends in a hole */
    }
    return 0;
}

int cg_fs_flush(cg_fs *fs, cg_fs_file *file)
{
    if (file->fd < 0 || !file->writable)
        return 0;
    __atomic_store_n(&file->was_flushed, true, __ATOMIC_RELAXED);
    if (file->pending != NULL)
        return cg_publish(fs, file->pending);
    /* A store on NFS reports at close what writing came to. */
    const int fd = fcntl(file->fd, F_DUPFD_CLOEXEC, 0);
    const int error = fd >= 0 && close(fd) != 0 && errno != EINTR ? errno : 0;
    cg_space_failed(fs, error);
    return error;
}

int cg_fs_fsync(cg_fs *fs, cg_fs_file *file, bool data_only)
{
    if (file->fd < 0)
        return 0;
    /* Before it is checked: the data of a file that is not valid yet reaches the disk, too,
     * although the caller gets an error. */
    const int error = cg_fs_sync(fs, file->node, file->fd, data_only);
    cg_space_failed(fs, error);
    if (error != 0)
        return error;
    return file->pending != NULL && file->writable ? cg_publish(fs, file->pending) : 0;
}
