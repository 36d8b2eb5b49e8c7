#include "fusefs/lease.h"
#include "iouring/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* The holder's name and a newline: always as many, for clients that have cached the size. */
enum { TEXT_BYTES = CG_STAGING_OWN_BYTES };
typedef enum holder { NOBODY, WE, ANOTHER, UNKNOWN } holder;

static holder read_holder_in(int dir_fd, cg_staging *staging, const char *name,
                             char holder_out[TEXT_BYTES])
{
    char own[CG_STAGING_OWN_BYTES];
    const int fd = openat(dir_fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT ? NOBODY : UNKNOWN;
    const ssize_t n = pread(fd, holder_out, TEXT_BYTES, 0);
    close(fd);
    if (n < 0)
        return UNKNOWN;
    holder_out[TEXT_BYTES - 1] = '\0';
    /* Not ours to write: a lock file of an earlier version, which is empty. */
    if (n != TEXT_BYTES || strspn(holder_out, "0123456789abcdef") != TEXT_BYTES - 1)
        return NOBODY;
    cg_staging_own(staging, own);
    return strcmp(holder_out, own) == 0 ? WE : ANOTHER;
}

static holder read_holder(cg_staging *staging, const char *name, char holder_out[TEXT_BYTES])
{
    return read_holder_in(staging->all_fd, staging, name, holder_out);
}

/* A file with our name, in our folder. On a full disk nothing can be written, and the lease is
 * there to make room: so it is a link to what was written before, if that is as it was. */
static bool stage(cg_staging *staging, char staged_out[CG_STAGING_NAME_BYTES])
{
    char text[TEXT_BYTES];
    int fd;
    if (cg_staging_link_name(staging, staged_out) == 0) {
        if (read_holder_in(staging->dir_fd, staging, staged_out, text) == WE)
            return true;
        unlinkat(staging->dir_fd, staged_out, 0);
    }
    cg_staging_own(staging, text);
    text[TEXT_BYTES - 1] = '\n';
    if (cg_staging_create(staging, staged_out, &fd) != 0)
        return false;
    const bool is_written = write(fd, text, sizeof text) == (ssize_t)sizeof text;
    if (close(fd) == 0 && is_written)
        return true;
    unlinkat(staging->dir_fd, staged_out, 0);
    return false;
}

bool cg_lease_take(cg_staging *staging, const char *name)
{
    char text[TEXT_BYTES], staged[CG_STAGING_NAME_BYTES];
    holder before = read_holder(staging, name, text);
    /* What cannot be read is not taken: better no work than twice the work. */
    if (before == WE || before == UNKNOWN)
        return before == WE;
    if ((before == ANOTHER && !cg_staging_is_dead(staging, text)) || !stage(staging, staged))
        return false;
    if (before == NOBODY) {
        /* Without links, or over something that is no lease, the rename must do. What a link says
         * differs: to sshfs everything is EPERM. */
        const bool is_ours = linkat(staging->dir_fd, staged, staging->all_fd, name, 0) == 0;
        if (is_ours || read_holder(staging, name, text) != NOBODY) {
            unlinkat(staging->dir_fd, staged, 0);
            return is_ours;
        }
    }
    if (renameat(staging->dir_fd, staged, staging->all_fd, name) != 0) {
        unlinkat(staging->dir_fd, staged, 0);
        return false;
    }
    /* Asked again, since another may have renamed over it at the same moment. */
    return cg_lease_holds(staging, name);
}

bool cg_lease_holds(cg_staging *staging, const char *name)
{
    char text[TEXT_BYTES];
    return read_holder(staging, name, text) == WE;
}

bool cg_lease_still_holds(cg_staging *staging, const char *name, int64_t *seen_s)
{
    const int64_t now_s = cg_now_s();
    if (now_s - *seen_s <= 1)
        return true;
    *seen_s = now_s;
    return cg_lease_holds(staging, name);
}

void cg_lease_give_back(cg_staging *staging, const char *name)
{
    if (cg_lease_holds(staging, name))
        unlinkat(staging->all_fd, name, 0);
}
