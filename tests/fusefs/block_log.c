/* block_log - a disk whose writes are kept, to cut the power between any two of them.
 *   block_log serve DIRECTORY DISK LOG   mounts DIRECTORY until it is unmounted: `image` there has
 *                                        the bytes of the file DISK, for a loop device; all that is
 *                                        written to it, each flush, and each line that is written
 *                                        to `marks` goes to LOG, in the order in which it came
 *   block_log count LOG                  how many records the log has
 *   block_log cut LOG IMAGE N SEED       IMAGE, a copy of DISK from before, becomes what a disk may
 *                                        have when its power fails after N records; the marks until
 *                                        then go to stdout
 * What was written before the last flush is there. Of what came after it each write is there, or
 * not, or its first sectors are, by SEED: a disk with a cache may reorder and tear. Its sectors are
 * of 4 KiB, as those of disks are: a block of XFS's directories of which less is new is not written
 * again from its log (it is as new as that, by its first bytes), and then such a disk is not
 * mounted. A loop device hands over one request after the other, so that a flush covers all records
 * before it.
 */
#define FUSE_USE_VERSION 314
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SECTOR_BYTES = 4096, MAX_RECORD_BYTES = 1 << 24 };

typedef struct record {
    char kind[8]; /* "write", "flush" or "mark" */
    uint64_t offset, n_bytes;
} record;

typedef struct disk {
    int fd;
    FILE *log;
    struct stat attr;
} disk;

static void die(const char *what)
{
    fprintf(stderr, "block_log: %s: %s\n", what, strerror(errno));
    exit(1);
}

static disk *served(void)
{
    return fuse_get_context()->private_data;
}

static bool is_image(const char *path)
{
    return strcmp(path, "/image") == 0;
}

static int append(const char *kind, off_t offset, const char *bytes, size_t n_bytes)
{
    record r = {.offset = (uint64_t)offset, .n_bytes = n_bytes};
    strcpy(r.kind, kind);
    const bool is_done = fwrite(&r, sizeof r, 1, served()->log) == 1 &&
                         fwrite(bytes, 1, n_bytes, served()->log) == n_bytes;
    return is_done ? 0 : -EIO;
}

static int op_getattr(const char *path, struct stat *attr, struct fuse_file_info *fi)
{
    (void)fi;
    *attr = served()->attr;
    attr->st_nlink = 1;
    attr->st_mode = S_IFREG | 0600;
    if (strcmp(path, "/") == 0)
        attr->st_mode = S_IFDIR | 0700;
    else if (strcmp(path, "/marks") == 0)
        attr->st_size = 0;
    else if (!is_image(path))
        return -ENOENT;
    return 0;
}

static int op_read(const char *path, char *bytes, size_t n_bytes, off_t offset,
                   struct fuse_file_info *fi)
{
    (void)fi;
    const ssize_t n = is_image(path) ? pread(served()->fd, bytes, n_bytes, offset) : 0;
    return n < 0 ? -errno : (int)n;
}

static int op_write(const char *path, const char *bytes, size_t n_bytes, off_t offset,
                    struct fuse_file_info *fi)
{
    (void)fi;
    const bool to_image = is_image(path);
    int error = append(to_image ? "write" : "mark", offset, bytes, n_bytes);
    if (error == 0 && to_image && pwrite(served()->fd, bytes, n_bytes, offset) != (ssize_t)n_bytes)
        error = -EIO;
    return error != 0 ? error : (int)n_bytes;
}

static int op_fsync(const char *path, int data_only, struct fuse_file_info *fi)
{
    (void)data_only, (void)fi;
    return is_image(path) ? append("flush", 0, "", 0) : 0;
}

static void *op_init(struct fuse_conn_info *conn, struct fuse_config *config)
{
    (void)conn;
    config->direct_io = 1; /* each request of the loop device is one of ours */
    return served();
}

static int serve(char *program, char *directory, const char *disk_path, const char *log_path)
{
    static const struct fuse_operations operations = {
        .init = op_init,
        .getattr = op_getattr,
        .read = op_read,
        .write = op_write,
        .fsync = op_fsync,
    };
    char one_thread[] = "-s", in_foreground[] = "-f";
    char *argv[] = {program, one_thread, in_foreground, directory, NULL};
    disk d = {.fd = open(disk_path, O_RDWR | O_CLOEXEC), .log = fopen(log_path, "we")};
    if (d.fd < 0 || fstat(d.fd, &d.attr) != 0)
        die(disk_path);
    if (d.log == NULL)
        die(log_path);
    const int status = fuse_main(4, argv, &operations, &d);
    if (fclose(d.log) != 0)
        die(log_path);
    return status;
}

/* The next record and its bytes, which stay until the next call. */
static bool next_record(FILE *log, record *r, char *bytes)
{
    if (fread(r, sizeof *r, 1, log) != 1)
        return false;
    if (r->n_bytes > MAX_RECORD_BYTES || fread(bytes, 1, r->n_bytes, log) != r->n_bytes) {
        errno = EBADMSG;
        die("the log");
    }
    return true;
}

/* How many bytes of a write the disk has that it was not told to flush. */
static size_t kept_bytes(uint64_t offset, size_t n_bytes)
{
    const size_t before = offset % SECTOR_BYTES; /* of the sector in which it begins */
    size_t end;
    switch (random() % 3) {
    case 0: return 0;
    case 1: return n_bytes;
    default:
        end = (size_t)random() % ((before + n_bytes) / SECTOR_BYTES + 1) * SECTOR_BYTES;
        return end > before ? end - before : 0;
    }
}

static int count_or_cut(const char *log_path, const char *image_path, uint64_t n_records)
{
    FILE *log = fopen(log_path, "re");
    char *bytes = malloc(MAX_RECORD_BYTES);
    uint64_t n = 0, n_flushed = 0;
    record r;
    if (log == NULL || bytes == NULL)
        die(log_path);
    while (n < n_records && next_record(log, &r, bytes)) {
        n++;
        if (strcmp(r.kind, "flush") == 0)
            n_flushed = n;
    }
    if (image_path == NULL) {
        printf("%" PRIu64 "\n", n);
    } else {
        const int fd = open(image_path, O_WRONLY | O_CLOEXEC);
        if (fd < 0)
            die(image_path);
        rewind(log);
        for (uint64_t i = 0; i < n && next_record(log, &r, bytes); i++) {
            const size_t kept = i < n_flushed ? r.n_bytes : kept_bytes(r.offset, r.n_bytes);
            if (strcmp(r.kind, "mark") == 0)
                fwrite(bytes, 1, r.n_bytes, stdout);
            else if (pwrite(fd, bytes, kept, (off_t)r.offset) != (ssize_t)kept)
                die(image_path);
        }
        close(fd);
    }
    free(bytes);
    fclose(log);
    return fflush(stdout) == 0 ? 0 : 1;
}

int main(int argc, char **argv)
{
    if (argc == 5 && strcmp(argv[1], "serve") == 0)
        return serve(argv[0], argv[2], argv[3], argv[4]);
    if (argc == 3 && strcmp(argv[1], "count") == 0)
        return count_or_cut(argv[2], NULL, UINT64_MAX);
    if (argc == 6 && strcmp(argv[1], "cut") == 0) {
        srandom((unsigned)strtoul(argv[5], NULL, 10));
        return count_or_cut(argv[2], argv[3], strtoull(argv[4], NULL, 10));
    }
    fprintf(stderr,
            "usage: block_log serve DIRECTORY DISK LOG | count LOG | cut LOG IMAGE N SEED\n");
    return 2;
}
