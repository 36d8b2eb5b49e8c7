#include "connector/clock.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

uint64_t cg_boot_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

cg_key cg_boot_clock_id(void)
{
    char text[160] = "";
    struct stat time_namespace;
    const cg_key unknown = {{0}};
    const int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return unknown;
    const ssize_t n = read(fd, text, 64);
    close(fd);
    if (n <= 0)
        return unknown;
    /* Containers may have a time namespace, in which the clock is another one. */
    if (stat("/proc/self/ns/time", &time_namespace) != 0)
        time_namespace.st_ino = 0; /* a kernel without them */
    const int rest =
        snprintf(text + n, sizeof text - (size_t)n, "%ju", (uintmax_t)time_namespace.st_ino);
    return cg_key_of_bytes(text, (size_t)n + (size_t)rest);
}

uint64_t cg_boot_elapsed_ns(const cg_key *clock_id, uint64_t started_ns, const cg_key *here,
                            uint64_t now_ns)
{
    return cg_key_equal(clock_id, here) && !cg_key_is_zero(here) && now_ns > started_ns
               ? now_ns - started_ns
               : 0;
}
