#include "fusefs/stamp.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BEAT_SECONDS = 60 };

void cg_stamp_set(int root_fd, const char *name, int64_t at_s)
{
    const struct timespec at[] = {{.tv_sec = at_s}, {.tv_sec = at_s}};
    const int fd =
        openat(root_fd, name, O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
    if (fd < 0)
        return;
    futimens(fd, at_s != 0 ? at : NULL);
    close(fd);
}

int64_t cg_stamp_due_s(int root_fd, const char *name, int64_t now_s)
{
    struct stat attr;
    if (fstatat(root_fd, name, &attr, AT_SYMLINK_NOFOLLOW) != 0)
        return 0;
    const int64_t age_s = now_s - attr.st_mtim.tv_sec;
    return age_s >= -BEAT_SECONDS && age_s < CG_STAMP_EVERY_S ? CG_STAMP_EVERY_S - age_s : 0;
}
