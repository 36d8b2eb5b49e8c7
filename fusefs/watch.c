#include "fusefs/watch.h"
#include "iouring/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/fanotify.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#ifndef FAN_REPORT_TARGET_FID /* Linux 5.17 */
#define FAN_REPORT_TARGET_FID 0x00001000
#endif

enum { EVENT_BYTES = 1 << 16, PART_NODES = 256 };

static const uint64_t NAME_EVENTS = FAN_CREATE | FAN_DELETE | FAN_MOVED_FROM | FAN_MOVED_TO;
static const uint64_t CONTENT_EVENTS = FAN_MODIFY | FAN_CLOSE_WRITE;

/* A change: name in folder, which is now or was that of file. */
typedef struct change {
    uint64_t mask;
    bool is_own;
    const struct file_handle *folder, *file; /* NULL: it says nothing of one */
    const char *name;
} change;

/* What is done with a buffer of changes. */
typedef struct batch {
    cg_fs *fs;
    dev_t dev;
    bool has_waited;       /* for what we change ourselves */
    bool makes_doubt;      /* a name that somebody knows is not what it was */
    cg_fs_node *forgotten; /* the last, which need not be told twice */
} batch;

void cg_watch_init(cg_watch *watch)
{
    *watch = (cg_watch){.fd = -1, .stop_fd = -1};
}

/* Linux 6.13 gave these file systems times that differ from what was asked for before. On ext4
 * small inodes (128 bytes) have seconds only, which have no nanoseconds. */
static bool has_fine_times(int root_fd, uint32_t type)
{
    struct stat root;
    return (type == EXT4_SUPER_MAGIC || type == XFS_SUPER_MAGIC || type == BTRFS_SUPER_MAGIC ||
            type == TMPFS_MAGIC) &&
           fstat(root_fd, &root) == 0 && root.st_ctim.tv_nsec != 0;
}

int cg_watch_open(cg_watch *watch, int root_fd)
{
    struct statfs attr;
    /* On others, changes of another host come without an event; of what overlayfs and the like have
     * below, changes there. */
    if (!cg_fs_is_local(root_fd) || fstatfs(root_fd, &attr) != 0)
        return ENOTSUP;
    watch->handles_have_numbers = attr.f_type == EXT4_SUPER_MAGIC;
    watch->has_fine_times = has_fine_times(root_fd, (uint32_t)attr.f_type);
    /* TARGET_FID: with a name comes the file that it is or was of. */
    watch->fd = fanotify_init(FAN_CLASS_NOTIF | FAN_CLOEXEC | FAN_NONBLOCK | FAN_REPORT_FID |
                                  FAN_REPORT_DFID_NAME | FAN_REPORT_TARGET_FID,
                              O_RDONLY | O_CLOEXEC);
    watch->stop_fd = watch->fd < 0 ? -1 : eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (watch->stop_fd >= 0 &&
        fanotify_mark(watch->fd, FAN_MARK_ADD | FAN_MARK_FILESYSTEM,
                      NAME_EVENTS | CONTENT_EVENTS | FAN_ATTRIB | FAN_ONDIR, root_fd, NULL) == 0)
        return 0;
    const int error = errno;
    cg_watch_close(watch);
    return error;
}

void cg_watch_close(cg_watch *watch)
{
    if (watch->fd >= 0)
        close(watch->fd);
    if (watch->stop_fd >= 0)
        close(watch->stop_fd);
    cg_watch_init(watch);
}

void cg_watch_stop(cg_watch *watch)
{
    const uint64_t one = 1;
    if (watch->stop_fd >= 0 && write(watch->stop_fd, &one, sizeof one) < 0)
        abort(); /* an eventfd that counts to one takes it */
}

cg_settled cg_watch_settle(const cg_fs *fs, int fd)
{
    struct stat attr;
    struct timespec now;
    cg_settled settled = {.changed_ns = 0};
    if (!fs->watch.is_trusted || fstat(fd, &attr) != 0 || attr.st_dev != fs->nodes.root->dev)
        return settled;
    clock_gettime(CLOCK_REALTIME, &now);
    if (attr.st_ctim.tv_sec + 1 < now.tv_sec)
        settled.changed_ns = attr.st_ctim.tv_sec * INT64_C(1000000000) + attr.st_ctim.tv_nsec;
    settled.looked_at_s = (uint32_t)cg_now_s();
    return settled;
}

bool cg_watch_is_as_before(const cg_settled *now, const cg_settled *before)
{
    return now->changed_ns != 0 && now->changed_ns == before->changed_ns &&
           now->looked_at_s - before->looked_at_s < CG_FS_TRUST_SECONDS;
}

static void doubt_names(cg_fs *fs)
{
    cg_metrics_add(&fs->metrics.watch_doubts, 1);
    fs->watch.kernel->doubt_names(fs->watch.kernel->user);
}

static void doubt_all(cg_fs *fs)
{
    cg_node_ref refs[PART_NODES];
    const cg_fs_kernel *kernel = fs->watch.kernel;
    size_t at = 0, n;
    atomic_fetch_add(&fs->watch.n_seen, 1);
    cg_nodes_void_all_notes(&fs->nodes);
    while ((n = cg_nodes_each(&fs->nodes, &at, refs, PART_NODES)) > 0)
        for (size_t i = 0; i < n; i++)
            kernel->forget(kernel->user, &refs[i]);
    doubt_names(fs);
}

/* The number of the file of a handle. 0: it is gone. The short way is for all that others do in the
 * file system and outside of the store. If the number is another file's by now, one invalidation
 * was for nothing. */
static ino_t number_of(const cg_fs *fs, const struct file_handle *handle)
{
    enum { FILEID_INO32_GEN = 1 };
    struct stat attr = {0};
    if (fs->watch.handles_have_numbers && handle->handle_type == FILEID_INO32_GEN &&
        handle->handle_bytes >= sizeof(uint32_t)) {
        uint32_t number;
        memcpy(&number, handle->f_handle, sizeof number);
        return number;
    }
    const int fd = open_by_handle_at(fs->root_fd, (struct file_handle *)handle, O_PATH | O_CLOEXEC);
    if (fd < 0)
        return 0;
    const bool is_known = fstat(fd, &attr) == 0;
    close(fd);
    return is_known ? attr.st_ino : 0;
}

/* Whether the file is known. */
static bool forget(batch *b, ino_t ino)
{
    cg_node_ref refs[CG_NODES_MAX_OF_FILE];
    const cg_fs_kernel *kernel = b->fs->watch.kernel;
    const size_t n = ino != 0 ? cg_nodes_of_file(&b->fs->nodes, b->dev, ino, refs) : 0;
    /* One node only: of a file with views the others would be missed. */
    if (n == 1 && refs[0].node == b->forgotten)
        return true;
    if (n > 0)
        cg_nodes_void_notes(&b->fs->nodes, b->dev, ino);
    for (size_t i = 0; i < n; i++)
        kernel->forget(kernel->user, &refs[i]);
    if (n > 0)
        b->forgotten = n == 1 ? refs[0].node : NULL;
    return n > 0;
}

/* Whether the kernel may have the name for one that is not there. */
static bool is_new_name(batch *b, const change *c, ino_t folder)
{
    return (c->mask & (FAN_CREATE | FAN_MOVED_TO)) != 0 &&
           cg_nodes_is_missing(&b->fs->nodes, b->dev, folder, c->name);
}

/* Whether the name is of another file by now than the one that we know by it, or of one where there
 * was none. A change that came through the mount the kernel knows; our table may be about to get
 * it. */
static bool is_other_name(batch *b, const change *c, ino_t folder)
{
    struct stat attr;
    ino_t known;
    const bool is_known = cg_nodes_name_of(&b->fs->nodes, b->dev, folder, c->name, &known),
               is_new = is_new_name(b, c, folder);
    if (!is_known && !is_new)
        return false;
    if (c->is_own && !b->has_waited) {
        /* Whoever makes or moves a name of the mount holds it to read. When we had it, all that had
         * begun is in the table. */
        pthread_rwlock_wrlock(&b->fs->names_lock);
        pthread_rwlock_unlock(&b->fs->names_lock);
        b->has_waited = true;
        return is_other_name(b, c, folder);
    }
    /* Also of a name that we know: who looked for it just before it was published may have noted it
     * just afterwards. */
    if (is_new)
        return true;
    const int fd =
        open_by_handle_at(b->fs->root_fd, (struct file_handle *)c->folder, O_PATH | O_CLOEXEC);
    const bool is_same =
        fd >= 0 && fstatat(fd, c->name, &attr, AT_SYMLINK_NOFOLLOW) == 0 && attr.st_ino == known;
    if (fd >= 0)
        close(fd);
    return !is_same;
}

static void take_change(batch *b, const change *c)
{
    cg_node_ref refs[CG_NODES_MAX_OF_FILE];
    const ino_t folder = c->folder != NULL ? number_of(b->fs, c->folder) : 0;
    const bool is_folder_known =
        folder != 0 && cg_nodes_of_file(&b->fs->nodes, b->dev, folder, refs) > 0;
    /* Who looks up the name at this moment, and is not in the table yet, must see that we were. */
    atomic_fetch_add(&b->fs->watch.n_seen, is_folder_known);
    if (c->file != NULL)
        forget(b, number_of(b->fs, c->file));
    if (!is_folder_known || (c->mask & NAME_EVENTS) == 0)
        return;
    forget(b, folder);
    if (!b->makes_doubt)
        b->makes_doubt = is_other_name(b, c, folder);
}

/* The parts of an event. A folder's own changes come as those of "." in it. */
static change parse(const struct fanotify_event_metadata *event, const char *bytes, pid_t own)
{
    change c = {.mask = event->mask, .is_own = event->pid == own};
    const char *at = bytes + event->metadata_len, *end = bytes + event->event_len;
    while (end - at >= (ptrdiff_t)sizeof(struct fanotify_event_info_fid)) {
        const struct fanotify_event_info_fid *info = (const void *)at;
        const struct file_handle *handle = (const void *)info->handle;
        if (info->hdr.info_type == FAN_EVENT_INFO_TYPE_DFID_NAME) {
            c.folder = handle;
            c.name = (const char *)handle->f_handle + handle->handle_bytes;
        } else if (info->hdr.info_type == FAN_EVENT_INFO_TYPE_FID) {
            c.file = handle;
        }
        if (info->hdr.len == 0)
            break;
        at += info->hdr.len;
    }
    if (c.name != NULL && strcmp(c.name, ".") == 0) {
        c.file = c.folder;
        c.folder = NULL;
    }
    return c;
}

/* Events are aligned to four bytes, their first part wants eight. */
static void take_events(cg_fs *fs, dev_t dev, const char *bytes, size_t n_bytes)
{
    batch b = {.fs = fs, .dev = dev};
    const pid_t own = getpid();
    struct fanotify_event_metadata event;
    for (size_t at = 0; n_bytes - at >= sizeof event; at += event.event_len) {
        memcpy(&event, bytes + at, sizeof event);
        /* No kernel writes such an event, but the loop must end. */
        if (event.event_len < sizeof event || event.event_len > n_bytes - at)
            break;
        if ((event.mask & FAN_Q_OVERFLOW) != 0) {
            cg_metrics_add(&fs->metrics.watch_overflows, 1);
            doubt_all(fs);
            continue;
        }
        const change c = parse(&event, bytes + at, own);
        /* What is written through the mount the kernel knows. */
        if (!c.is_own || (c.mask & ~(CONTENT_EVENTS | FAN_ONDIR)) != 0)
            take_change(&b, &c);
    }
    if (b.makes_doubt)
        doubt_names(fs);
}

static void read_events(cg_fs *fs, dev_t dev, char *bytes)
{
    struct pollfd polled[] = {{.fd = fs->watch.fd, .events = POLLIN},
                              {.fd = fs->watch.stop_fd, .events = POLLIN}};
    for (;;) {
        if (poll(polled, 2, -1) < 0 && errno != EINTR)
            return;
        if (polled[1].revents != 0)
            return;
        const ssize_t n = read(fs->watch.fd, bytes, EVENT_BYTES);
        if (n > 0)
            take_events(fs, dev, bytes, (size_t)n);
        else if (n == 0 || (errno != EAGAIN && errno != EINTR))
            return;
    }
}

void cg_watch_run(cg_fs *fs)
{
    struct stat root;
    if (fs->watch.fd < 0)
        return;
    char *bytes = malloc(EVENT_BYTES);
    if (bytes != NULL && fstat(fs->root_fd, &root) == 0) {
        /* Only from now on: what changed before nobody would tell the kernel. */
        fs->watch.is_trusted = true;
        fs->metrics.watched = 1;
        read_events(fs, root.st_dev, bytes);
    }
    free(bytes);
    fs->watch.is_trusted = false;
    fs->metrics.watched = 0;
    if (!fs->is_stopping) {
        cg_fs_log(fs, CG_LOG_WARNING, "the store's changes are not watched any more");
        doubt_all(fs);
    }
}
