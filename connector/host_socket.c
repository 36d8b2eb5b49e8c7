#include "connector/host_socket.h"

#include "connector/clock.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { MOST_WAITING = 64, SLICE_MS = 20 };

/* A name that begins with a zero lies in no directory. */
static socklen_t address_of(const cg_key *name, struct sockaddr_un *address_out)
{
    char hex[CG_KEY_HEX_BYTES];
    cg_key_to_hex(name, hex);
    *address_out = (struct sockaddr_un){.sun_family = AF_UNIX};
    const int n =
        snprintf(address_out->sun_path + 1, sizeof address_out->sun_path - 1, "cachegenfs-%s", hex);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static cg_status open_socket(int *fd_out)
{
    *fd_out = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    return *fd_out >= 0 ? CG_OK : cg_status_from_errno(errno);
}

static cg_status close_after(cg_status status, int *fd)
{
    close(*fd);
    *fd = -1;
    return status;
}

bool cg_host_socket_is_ours(int fd)
{
    struct ucred peer;
    socklen_t n_bytes = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n_bytes) == 0 && peer.uid == geteuid();
}

cg_status cg_host_socket_listen(const cg_key *name, int backlog, int *fd_out)
{
    struct sockaddr_un address;
    const socklen_t n_bytes = address_of(name, &address);
    const cg_status status = open_socket(fd_out);
    if (status != CG_OK)
        return status;
    if (bind(*fd_out, (const struct sockaddr *)&address, n_bytes) == 0 &&
        listen(*fd_out, backlog) == 0)
        return CG_OK;
    return close_after(errno == EADDRINUSE ? CG_ERR_EXISTS : cg_status_from_errno(errno), fd_out);
}

cg_status cg_host_socket_connect(const cg_key *name, int *fd_out)
{
    struct sockaddr_un address;
    const socklen_t n_bytes = address_of(name, &address);
    const cg_status status = open_socket(fd_out);
    if (status != CG_OK)
        return status;
    if (connect(*fd_out, (const struct sockaddr *)&address, n_bytes) != 0)
        return close_after(errno == ECONNREFUSED ? CG_ERR_NOT_FOUND : cg_status_from_errno(errno),
                           fd_out);
    return cg_host_socket_is_ours(*fd_out) ? CG_OK : close_after(CG_ERR_PERMISSION, fd_out);
}

cg_status cg_host_lock_take(const cg_key *name, int *lock_out)
{
    return cg_host_socket_listen(name, MOST_WAITING, lock_out);
}

void cg_host_lock_release(int *lock)
{
    int waiting;
    if (*lock < 0)
        return;
    /* Closing alone would not do: a forked child may have the socket, too. From here on nobody can
     * connect, and who has is woken. */
    shutdown(*lock, SHUT_RDWR);
    while ((waiting = accept4(*lock, NULL, NULL, SOCK_CLOEXEC)) >= 0)
        close(waiting);
    close(*lock);
    *lock = -1;
}

cg_status cg_host_lock_wait(const cg_key *name, uint64_t until_ns, bool (*is_over)(void *user),
                            void *user)
{
    int fd;
    cg_status status = cg_host_socket_connect(name, &fd);
    if (status != CG_OK)
        return status == CG_ERR_NOT_FOUND ? CG_OK : status;
    struct pollfd connection = {.fd = fd};
    /* Nothing is ever sent: what wakes is that the holder ends, or its process does. */
    while (poll(&connection, 1, SLICE_MS) <= 0 && status == CG_OK)
        if (is_over(user))
            status = CG_ERR_CANCELLED;
        else if (cg_now_ns() >= until_ns)
            status = CG_ERR_TIMED_OUT;
    close(fd);
    return status;
}
