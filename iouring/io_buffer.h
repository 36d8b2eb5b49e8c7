/* iouring/io_buffer.h - page-aligned buffers that reads fill, kept for reuse. Internal to iouring.
 *
 * Buffers may outlive the queue they came from: the pool is freed with its last reference. Sizes
 * are rounded to four steps an octave, so that files of about one size share buffers. Buffers are
 * not inherited by forked children (MADV_DONTFORK): a fork would otherwise copy every page that the
 * kernel has pinned.
 * Threads: any thread may get and release; `evict` is called by the thread that gets.
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
    int slot; /* of the ring's registered buffers, or CG_IO_NO_SLOT; of the thread that gets */
} cg_io_pool_buffer;

/* keep_bytes: free buffers past this are unmapped at the next get. evict (may be NULL) is told
 * before a buffer with a slot is unmapped. */
cg_status cg_io_pool_new(size_t keep_bytes, void (*evict)(void *context, int slot), void *context,
                         cg_io_pool **pool_out);
/* Drops the owner's reference and unmaps the free buffers; evict is not called any more. NULL is
 * fine. */
void cg_io_pool_close(cg_io_pool *pool);
/* Another owner, for whom the pool stays valid (not open) until it is dropped. */
void cg_io_pool_hold(cg_io_pool *pool);
void cg_io_pool_drop(cg_io_pool *pool);
/* NULL: no memory. n_bytes of the buffer is 0. Contents are undefined. */
cg_io_pool_buffer *cg_io_pool_get(cg_io_pool *pool, size_t capacity_bytes);
/* Gives the memory of a buffer back to the system without keeping it. */
void cg_io_pool_discard(cg_io_pool_buffer *buffer);

#ifdef __cplusplus
}
#endif
#endif
