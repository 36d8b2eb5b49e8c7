#include "fusefs/claims.h"

#include <errno.h>
#include <sys/file.h>
#include <time.h>

enum { RETRY_MS = 5, N_RETRIES = 200 };

int cg_claim_to_write(int fd)
{
    return flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK ? ETXTBSY : 0;
}

int cg_claim_to_publish(int fd)
{
    const struct timespec pause = {.tv_nsec = RETRY_MS * 1000000L};
    for (int i = 0; flock(fd, LOCK_EX | LOCK_NB) != 0; i++) {
        if (errno != EWOULDBLOCK && errno != EINTR)
            return 0; /* no locks here */
        if (i == N_RETRIES)
            return EBUSY;
        /* The kernel tells a daemon of a last close some time after the caller's close(). */
        nanosleep(&pause, NULL);
    }
    return 0;
}

void cg_claim_end(int fd)
{
    flock(fd, LOCK_UN);
}
