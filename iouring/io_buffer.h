/* iouring/io_buffer.h - page-aligned buffers that reads fill, kept for reuse. Internal to iouring.
 *
 * A buffer may outlive the queue that it came from, so the pool is counted: it is freed with its
 * last reference. Capacities are a page, or rounded up, in four steps to each doubling, so that
 * ranges of about one size share buffers. Forked children do not inherit buffers (MADV_DONTFORK): a
 * fork would otherwise copy every page that the kernel has pinned. Threads: any thread may get and
 * release. `evict` is called by the thread that gets.
 */
#ifndef CG_IOURING_IO_BUFFER_H
#define CG_IOURING_IO_BUFFER_H
#include "iouring/io.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CG_IO_PAGE_BYTES = 4096, CG_IO_NO_SLOT = -1 };

typedef struct cg_io_pool cg_io_pool;

typedef struct cg_io_pool_buffer {
    cg_io_buffer buffer;            /* first: what callers see */
    cg_io_pool *pool;               /* holds a reference while the buffer is out */
    struct cg_io_pool_buffer *next; /* free list, under the pool's lock */
    int slot; /* its place among the ring's registered buffers, or CG_IO_NO_SLOT. Only the thread
                 that gets may look */
} cg_io_pool_buffer;

/* keep_bytes: what free buffers have beyond this is unmapped at the next get. evict (may be NULL)
 * is called before a buffer with a slot is unmapped. */
cg_status cg_io_pool_new(size_t keep_bytes, void (*evict)(void *context, int slot), void *context,
                         cg_io_pool **pool_out);
/* Drops the owner's reference and unmaps the free buffers. evict is not called any more. NULL is
 * fine. */
void cg_io_pool_close(cg_io_pool *pool);
/* Another owner: until it drops the pool, the pool is not freed. It may be closed meanwhile. */
void cg_io_pool_hold(cg_io_pool *pool);
void cg_io_pool_drop(cg_io_pool *pool);
/* A buffer of at least so many bytes, in whole pages, as O_DIRECT wants. NULL: no memory. n_bytes
 * of the buffer is 0. Contents are undefined. */
cg_io_pool_buffer *cg_io_pool_get(cg_io_pool *pool, size_t capacity_bytes);
/* Gives the memory of a buffer back to the system without keeping it. */
void cg_io_pool_discard(cg_io_pool_buffer *buffer);

#ifdef __cplusplus
}
#endif
#endif
