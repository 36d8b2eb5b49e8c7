/* io_bench - reads chunk files with io_uring (O_DIRECT and cached), the thread pool and plain
 * pread(), alternately.
 *
 * usage: io_bench DIRECTORY [FILE_BYTES [N_FILES [N_ROUNDS [DEPTH]]]]
 *
 * Makes N_FILES files in DIRECTORY from the bytes of this program (no disk is known to compress
 * them away), reads all of them with each method in turn, N_ROUNDS times, cold (POSIX_FADV_DONTNEED
 * before) and hot (read once before), and prints the median rate, CPU seconds a GB, and the ratio
 * to pread() of the same round: median, least and most. Timed: submission to the last completion,
 * buffers reused; not timed: setting up the queue. Byte rates count the files' bytes. The first
 * bytes of every read are compared with the file's number.
 */
#include "codec/cursor.h"
#include "iouring/io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MAX_ROUNDS = 101, HEAD_BYTES = 8 };

typedef struct bench {
    int dir_fd;
    size_t file_bytes;
    uint32_t n_files, n_rounds, depth;
    uint8_t *scratch; /* of pread() */
} bench;

typedef struct method {
    const char *name;
    cg_io_backend backend; /* CG_IO_AUTO: pread() */
    cg_io_cache cache;
    cg_io *io;
    double rates[MAX_ROUNDS], ratios[MAX_ROUNDS], cpu_s;
} method;

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double cpu_s(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static void die(const char *what, int error)
{
    fprintf(stderr, "io_bench: %s: %s\n", what, strerror(error));
    exit(1);
}

static void name_of(uint32_t i, char name_out[32])
{
    snprintf(name_out, 32, "io_bench_%05u.kv", i);
}

/* The next n_bytes of source, over and over. */
static void fill(FILE *source, uint8_t *bytes, size_t n_bytes)
{
    while (n_bytes > 0) {
        const size_t n = fread(bytes, 1, n_bytes, source);
        if (n == 0)
            rewind(source);
        bytes += n;
        n_bytes -= n;
    }
}

static void make_files(const bench *b)
{
    char name[32];
    FILE *source = fopen("/proc/self/exe", "rb");
    uint8_t *bytes = malloc(b->file_bytes);
    if (source == NULL || bytes == NULL)
        die("reading this program", errno);
    for (uint32_t i = 0; i < b->n_files; i++) {
        name_of(i, name);
        fill(source, bytes, b->file_bytes);
        cg_put_le(bytes, HEAD_BYTES, i);
        const int fd = openat(b->dir_fd, name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        if (fd < 0 || write(fd, bytes, b->file_bytes) != (ssize_t)b->file_bytes || fsync(fd) != 0)
            die(name, errno);
        close(fd);
    }
    fclose(source);
    free(bytes);
}

static void set_cache(const bench *b, bool hot)
{
    char name[32];
    for (uint32_t i = 0; i < b->n_files; i++) {
        name_of(i, name);
        const int fd = openat(b->dir_fd, name, O_RDONLY);
        if (fd < 0)
            die(name, errno);
        if (!hot)
            posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        else if (pread(fd, b->scratch, b->file_bytes, 0) < 0)
            die(name, errno);
        close(fd);
    }
}

static void check(const uint8_t *bytes, size_t n_bytes, size_t want_bytes, uint64_t i)
{
    if (n_bytes != want_bytes || cg_get_le(bytes, HEAD_BYTES) != i) {
        fprintf(stderr, "io_bench: file %llu came back wrong\n", (unsigned long long)i);
        exit(1);
    }
}

static void read_plainly(const bench *b)
{
    char name[32];
    for (uint32_t i = 0; i < b->n_files; i++) {
        name_of(i, name);
        const int fd = openat(b->dir_fd, name, O_RDONLY);
        const ssize_t n = fd < 0 ? -1 : pread(fd, b->scratch, b->file_bytes, 0);
        if (n < 0)
            die(name, errno);
        check(b->scratch, (size_t)n, b->file_bytes, i);
        close(fd);
    }
}

static void read_queued(const bench *b, const method *m)
{
    char name[32];
    cg_io_completion done[64];
    uint32_t n_submitted = 0, n_done = 0;
    while (n_done < b->n_files) {
        for (; n_submitted < b->n_files; n_submitted++) {
            name_of(n_submitted, name);
            const cg_status status =
                cg_io_read_range(m->io, b->dir_fd, name, 0, b->file_bytes, m->cache, n_submitted);
            if (status == CG_ERR_AGAIN)
                break;
            if (status != CG_OK)
                die(cg_strerror(status), 0);
        }
        size_t n;
        if (cg_io_wait(m->io, UINT64_MAX, done, 64, &n) != CG_OK)
            die("waiting", EIO);
        for (size_t i = 0; i < n; i++) {
            if (done[i].status != CG_OK)
                die(cg_strerror(done[i].status), done[i].error);
            check(done[i].buffer->data, done[i].buffer->n_bytes, b->file_bytes, done[i].user);
            cg_io_buffer_release(done[i].buffer);
        }
        n_done += (uint32_t)n;
    }
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void run(const bench *b, method *methods, size_t n_methods, bool hot)
{
    const double gb = 1e-9 * (double)b->file_bytes * b->n_files;
    for (size_t m = 0; m < n_methods; m++)
        methods[m].cpu_s = 0;
    for (uint32_t round = 0; round < b->n_rounds; round++) {
        for (size_t m = 0; m < n_methods; m++) {
            set_cache(b, hot);
            const double start_s = now_s(), start_cpu_s = cpu_s();
            if (methods[m].backend == CG_IO_AUTO)
                read_plainly(b);
            else
                read_queued(b, &methods[m]);
            methods[m].rates[round] = gb / (now_s() - start_s);
            methods[m].cpu_s += cpu_s() - start_cpu_s;
            methods[m].ratios[round] = methods[m].rates[round] / methods[0].rates[round];
        }
    }
    printf("%s\n  %-16s %8s %10s %24s\n", hot ? "hot" : "cold", "method", "GB/s", "CPU s/GB",
           "x pread (least, most)");
    for (size_t m = 0; m < n_methods; m++) {
        method *at = &methods[m];
        qsort(at->rates, b->n_rounds, sizeof at->rates[0], by_value);
        qsort(at->ratios, b->n_rounds, sizeof at->ratios[0], by_value);
        printf("  %-16s %8.2f %10.3f %8.2f (%.2f, %.2f)\n", at->name, at->rates[b->n_rounds / 2],
               at->cpu_s / (gb * b->n_rounds), at->ratios[b->n_rounds / 2], at->ratios[0],
               at->ratios[b->n_rounds - 1]);
    }
}

static size_t argument(int argc, char **argv, int i, size_t otherwise)
{
    return argc > i ? strtoull(argv[i], NULL, 10) : otherwise;
}

int main(int argc, char **argv)
{
    static method methods[] = {
        {.name = "pread", .backend = CG_IO_AUTO},
        {.name = "io_uring direct", .backend = CG_IO_URING, .cache = CG_IO_DIRECT},
        {.name = "io_uring cached", .backend = CG_IO_URING, .cache = CG_IO_CACHED},
        {.name = "threads direct", .backend = CG_IO_THREADS, .cache = CG_IO_DIRECT},
        {.name = "threads cached", .backend = CG_IO_THREADS, .cache = CG_IO_CACHED},
    };
    size_t n_methods = sizeof methods / sizeof methods[0];
    char reason[256], name[32];
    if (argc < 2) {
        fprintf(stderr, "usage: io_bench DIRECTORY [FILE_BYTES [N_FILES [N_ROUNDS [DEPTH]]]]\n");
        return 64;
    }
    bench b = {.dir_fd = open(argv[1], O_RDONLY | O_DIRECTORY),
               .file_bytes = argument(argc, argv, 2, 1 << 20),
               .n_files = (uint32_t)argument(argc, argv, 3, 200),
               .n_rounds = (uint32_t)argument(argc, argv, 4, 7),
               .depth = (uint32_t)argument(argc, argv, 5, 16)};
    if (b.dir_fd < 0)
        die(argv[1], errno);
    if (b.n_rounds < 1 || b.n_rounds > MAX_ROUNDS || b.file_bytes < HEAD_BYTES || b.n_files < 1)
        die("arguments", EINVAL);
    if (posix_memalign((void **)&b.scratch, 4096, b.file_bytes) != 0)
        die("memory", ENOMEM);
    make_files(&b);
    for (size_t m = 1; m < n_methods; m++) {
        const cg_io_config config = {.backend = methods[m].backend, .queue_depth = b.depth};
        const cg_status status = cg_io_new(&config, &methods[m].io);
        if (status != CG_OK) {
            cg_io_uring_reason(reason, sizeof reason);
            printf("left out: %s (%s)\n", methods[m].name, reason);
            memmove(&methods[m], &methods[m + 1], (--n_methods - m) * sizeof methods[0]);
            m--;
        }
    }
    printf("%u files of %zu bytes in %s, %u rounds, depth %u, 4 threads\n", b.n_files, b.file_bytes,
           argv[1], b.n_rounds, b.depth);
    run(&b, methods, n_methods, false);
    run(&b, methods, n_methods, true);
    for (size_t m = 1; m < n_methods; m++)
        cg_io_free(methods[m].io, 1000000000);
    for (uint32_t i = 0; i < b.n_files; i++) {
        name_of(i, name);
        unlinkat(b.dir_fd, name, 0);
    }
    free(b.scratch);
    return 0;
}
