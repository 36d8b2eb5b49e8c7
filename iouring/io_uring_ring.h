/* iouring/io_uring_ring.h - a ring set up for cg_io, and what the kernel lets it do. Internal to
 * iouring.
 *
 * A ring is io_uring's pair of queues: entries go in, completions come out. It is set up without
 * IORING_SETUP_COOP_TASKRUN and DEFER_TASKRUN. With them the kernel would issue the next link of a
 * chain only when the thread enters it again: a thread that decodes meanwhile would stall its own
 * reads.
 * Threads: the queue's.
 */
#ifndef CG_IOURING_IO_URING_RING_H
#define CG_IOURING_IO_URING_RING_H
#include "iouring/io_buffer.h"

#include <liburing.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { CG_IO_FIXED_BUFFERS = 256 };

typedef struct cg_io_ring {
    struct io_uring ring;
    bool has_chains; /* a linked read can use the file slot that the open before it fills: Linux
                        5.19 */
    bool has_fixed_buffers;
    uint64_t fixed_bytes; /* pinned by registered buffers */
    int free_slots[CG_IO_FIXED_BUFFERS];
    uint32_t n_free_slots;
    uint64_t slot_bytes[CG_IO_FIXED_BUFFERS];
} cg_io_ring;

/* n_flights: operations that can be under way at once. False: it cannot be, and reason_out (may be
 * NULL) says why. */
bool cg_io_ring_init(cg_io_ring *ring, uint32_t n_flights, char *reason_out, size_t reason_bytes);
/* Registers the buffer, unless it is registered, so that the kernel need not map its pages for each
 * read. buffer->slot stays CG_IO_NO_SLOT where there is no room or no right to. */
void cg_io_ring_register(cg_io_ring *ring, cg_io_pool_buffer *buffer);
/* Takes a registration back. For cg_io_pool_new(): context is the cg_io_ring. */
void cg_io_ring_evict(void *context, int slot);

#ifdef __cplusplus
}
#endif
#endif
