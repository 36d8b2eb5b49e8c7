#include "iouring/folders.h"

#include "iouring/beneath.h"
#include "iouring/clock.h"
#include "iouring/io_op.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { MAX_SLOW = 8, DESCRIPTORS_SHARE = 8 };

void cg_folders_init(cg_folders *folders)
{
    *folders = (cg_folders){0};
    for (size_t i = 0; i < CG_N_FOLDERS; i++)
        folders->fds[i] = -1;
}

void cg_folders_destroy(cg_folders *folders)
{
    for (size_t i = 0; i < CG_N_FOLDERS; i++)
        if (folders->fds[i] >= 0)
            close(folders->fds[i]);
}

int cg_folders_get(const cg_folders *folders, uint8_t index)
{
    const int fd = __atomic_load_n(&folders->fds[index], __ATOMIC_ACQUIRE);
    return __atomic_load_n(&folders->is_lost[index], __ATOMIC_ACQUIRE) ? -1 : fd;
}

void cg_folders_lose(cg_folders *folders, uint8_t index)
{
    __atomic_store_n(&folders->is_lost[index], true, __ATOMIC_RELEASE);
}

static uint32_t most_open(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return 0;
    return limit.rlim_cur < CG_N_FOLDERS * DESCRIPTORS_SHARE
               ? (uint32_t)limit.rlim_cur / DESCRIPTORS_SHARE
               : CG_N_FOLDERS;
}

/* Another name than an object's folder has is left alone. */
static void note(const char *name, bool is_there[CG_N_FOLDERS])
{
    static const char digits[] = "0123456789abcdef";
    if (strlen(name) == 2 && strspn(name, digits) == 2)
        is_there[strtoul(name, NULL, 16)] = true;
}

/* A kept number must go on to mean a folder while others open below it, so it is never closed. */
static void keep(cg_folders *folders, uint32_t index, int fd)
{
    if (folders->fds[index] >= 0) {
        dup3(fd, folders->fds[index], O_CLOEXEC);
        close(fd);
        __atomic_store_n(&folders->is_lost[index], false, __ATOMIC_RELEASE);
    } else {
        __atomic_store_n(&folders->fds[index], fd, __ATOMIC_RELEASE);
        folders->n_open++;
    }
}

static void open_one(cg_folders *folders, int dir_fd, uint32_t index)
{
    static const char digits[] = "0123456789abcdef";
    const char name[] = {digits[index / 16], digits[index % 16], '\0'};
    const int fd = openat(dir_fd, name, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0)
        keep(folders, index, fd);
}

cg_status cg_folders_open(cg_folders *folders, int dir_fd, const char *path, uint64_t round_trip_ns)
{
    bool is_there[CG_N_FOLDERS] = {false};
    const uint32_t most = most_open();
    const int fd = openat(dir_fd, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = cg_beneath_list(fd);
    if (dir == NULL)
        return cg_status_from_errno(errno);
    for (const struct dirent *entry; (entry = readdir(dir)) != NULL;)
        note(entry->d_name, is_there);
    /* One slow answer may have waited for a processor; so many in a row were asked for. */
    uint32_t n_slow = 0;
    for (uint32_t i = 0; i < CG_N_FOLDERS && n_slow < MAX_SLOW; i++) {
        const uint32_t index = folders->next;
        folders->next = (index + 1) % CG_N_FOLDERS;
        if (!is_there[index] || (folders->fds[index] < 0 && folders->n_open >= most))
            continue;
        const uint64_t began_ns = cg_now_ns();
        open_one(folders, fd, index);
        n_slow = cg_now_ns() - began_ns > round_trip_ns / 2 ? n_slow + 1 : 0;
    }
    closedir(dir);
    return CG_OK;
}
