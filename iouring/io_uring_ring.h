/* iouring/io_uring_ring.h - a ring set up for cg_io, and what the kernel lets it do. Internal to
 * iouring.
 *
 * Neither IORING_SETUP_COOP_TASKRUN nor DEFER_TASKRUN: with them the next link of a chain would
 * only be issued when the thread enters the kernel again, and a thread that decodes meanwhile would
 * stall its own reads.
 * Threads: the queue's.
 */
#ifndef CG_IOURING_IO_URING_RING_H
#define CG_IOURING_IO_URING_RING_H
#include "iouring/io_buffer.h"

#include <liburing.h>

enum { CG_IO_FIXED_BUFFERS = 256 };

typedef struct cg_io_ring {
    struct io_uring ring;
    bool has_chains; /* fixed file slots that a linked read can use: Linux 5.19 */
    bool has_fixed_buffers;
    uint64_t fixed_bytes; /* pinned by registered buffers */
    int free_slots[CG_IO_FIXED_BUFFERS];
    uint32_t n_free_slots;
    uint64_t slot_bytes[CG_IO_FIXED_BUFFERS];
} cg_io_ring;

/* n_flights: operations that can be under way at once. False: reason_out (may be NULL) says why
 * not. */
bool cg_io_ring_init(cg_io_ring *ring, uint32_t n_flights, char *reason_out, size_t reason_bytes);
/* Registers the buffer if it is not and may be: buffer->slot is CG_IO_NO_SLOT still when it was
 * refused. */
void cg_io_ring_register(cg_io_ring *ring, cg_io_pool_buffer *buffer);
/* For cg_io_pool_new(): context is the cg_io_ring. */
void cg_io_ring_evict(void *context, int slot);
#endif
