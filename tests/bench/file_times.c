/* file_times - how long it takes to read many files, for fs_bench.sh.
 *   file_times read BYTES < list     opens each file of the list, reads its first BYTES (0: all) by
 *                                    1 MiB, closes it; prints seconds and bytes of all together
 *   file_times drop < list           their pages leave the cache of the file system that they are
 *                                    named by; the store below a mount has pages of its own
 */
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { READ_BYTES = 1 << 20 };

static void die(const char *path)
{
    fprintf(stderr, "file_times: %s: %s\n", path, strerror(errno));
    exit(1);
}

static uint64_t read_file(const char *path, uint64_t max_bytes, char *buffer)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    uint64_t sum = 0;
    if (fd < 0)
        die(path);
    while (sum < max_bytes) {
        const uint64_t left = max_bytes - sum;
        const ssize_t n = read(fd, buffer, left < READ_BYTES ? (size_t)left : READ_BYTES);
        if (n < 0)
            die(path);
        if (n == 0)
            break;
        sum += (uint64_t)n;
    }
    close(fd);
    return sum;
}

static void drop_file(const char *path)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || (errno = posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED)) != 0)
        die(path);
    close(fd);
}

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
    const bool drops = argc == 2 && strcmp(argv[1], "drop") == 0;
    if (!drops && !(argc == 3 && strcmp(argv[1], "read") == 0)) {
        fprintf(stderr, "usage: file_times read BYTES | drop < list of files\n");
        return 2;
    }
    char **paths = NULL, *line = NULL, *buffer = malloc(READ_BYTES);
    size_t n_paths = 0, line_bytes = 0;
    for (ssize_t n; (n = getline(&line, &line_bytes, stdin)) > 0;) {
        line[n - (line[n - 1] == '\n')] = '\0';
        paths = realloc(paths, (n_paths + 1) * sizeof *paths);
        if (paths == NULL || (paths[n_paths++] = strdup(line)) == NULL)
            die("memory");
    }
    if (buffer == NULL)
        die("memory");
    const uint64_t max_bytes = drops ? 0 : strtoull(argv[2], NULL, 10);
    uint64_t sum = 0;
    const double start_s = now_s();
    for (size_t i = 0; i < n_paths; i++) {
        if (drops)
            drop_file(paths[i]);
        else
            sum += read_file(paths[i], max_bytes > 0 ? max_bytes : UINT64_MAX, buffer);
    }
    if (!drops)
        printf("%.6f %llu\n", now_s() - start_s, (unsigned long long)sum);
    for (size_t i = 0; i < n_paths; i++)
        free(paths[i]);
    free(paths);
    free(line);
    free(buffer);
    return 0;
}
