/* connector/host_socket.h - unix sockets with names that the processes of a host see, and locks
 * made of them.
 *
 * Names are in the abstract namespace: they lie in no directory, and end with their sockets. So a
 * process that dies leaves nothing behind. All processes of a network namespace share them; sockets
 * of other users are not talked to.
 *
 * A lock is a socket that listens. Whoever waits for the lock is connected to it, and is woken when
 * the connection ends. A lock saves work and guards nothing: a process that does not get it goes on
 * without. A child that was forked while a lock was held keeps the lock's name until it ends, so
 * nobody else gets the lock. But once the parent has released it, nobody waits for it.
 * Threads: any. Only cg_host_lock_wait() blocks.
 */
#ifndef CG_CONNECTOR_HOST_SOCKET_H
#define CG_CONNECTOR_HOST_SOCKET_H
#include "codec/key.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A SOCK_SEQPACKET socket, non-blocking, that listens under the name; the caller closes it.
 * CG_ERR_EXISTS: another one does. After an error *fd_out is -1. */
cg_status cg_host_socket_listen(const cg_key *name, int backlog, int *fd_out);
/* A socket that is connected to the one that listens under the name; the caller closes it.
 * CG_ERR_NOT_FOUND: nobody listens. CG_ERR_PERMISSION: another user does. CG_ERR_AGAIN: its backlog
 * is full. After an error *fd_out is -1. */
cg_status cg_host_socket_connect(const cg_key *name, int *fd_out);
/* Whether a connection's other end is this user's. */
bool cg_host_socket_is_ours(int fd);

/* The caller gives *lock_out to cg_host_lock_release(). CG_ERR_EXISTS: another one has the lock.
 * After an error *lock_out is -1. */
cg_status cg_host_lock_take(const cg_key *name, int *lock_out);
/* Releases *lock and makes it -1. Does nothing if it is -1. */
void cg_host_lock_release(int *lock);
/* Waits until whoever has the lock releases it. CG_ERR_TIMED_OUT: not until until_ns
 * (CLOCK_MONOTONIC). CG_ERR_CANCELLED: is_over(), which is asked every few milliseconds, said so.
 * Else as cg_host_socket_connect(). */
cg_status cg_host_lock_wait(const cg_key *name, uint64_t until_ns, bool (*is_over)(void *user),
                            void *user);

#ifdef __cplusplus
}
#endif
#endif
