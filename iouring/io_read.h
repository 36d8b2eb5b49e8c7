/* iouring/io_read.h - the steps of reads and stats. Internal to iouring.
 *
 * A read: open - stat, if the type is to be looked at first - read until all is there - close. What
 * was not looked at and cannot be read, or falls short, is looked at then: a regular file is read
 * anew. A file that was the caller's before is not opened; one that the caller gets is not closed.
 * Threads: as iouring/io_op.h.
 */
#ifndef CG_IOURING_IO_READ_H
#define CG_IOURING_IO_READ_H
#include "iouring/io_op.h"

void cg_io_read_begin(cg_io_op *op);
void cg_io_read_advance(cg_io_op *op, int result);
void cg_io_stat_begin(cg_io_op *op);
void cg_io_stat_advance(cg_io_op *op, int result);

void cg_io_close_begin(cg_io_op *op);

/* What follows is used by io_uring's chain, too (iouring/io_uring_flight.h). */
/* Gets a buffer for the range, unless there is one. False: op->status says why. */
bool cg_io_read_reserve(cg_io_op *op);
/* How many bytes of the buffer a read may fill. O_DIRECT moves whole pages, so there it ends on the
 * page behind the range. */
static inline size_t cg_io_read_end(const cg_io_op *op)
{
    const size_t n_pages = (op->range_bytes + CG_IO_PAGE_BYTES - 1) / CG_IO_PAGE_BYTES;
    return op->direct ? n_pages * CG_IO_PAGE_BYTES : op->range_bytes;
}
#endif
