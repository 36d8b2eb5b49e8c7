/* iouring/io_read.h - the steps of reads and stats; see cg_io_read(). Internal to iouring.
 *
 * A read: open - size, unless the caller expects one - read until all is there - close.
 */
#ifndef CG_IOURING_IO_READ_H
#define CG_IOURING_IO_READ_H
#include "iouring/io_op.h"

void cg_io_read_begin(cg_io_op *op);
void cg_io_read_advance(cg_io_op *op, int result);
void cg_io_stat_begin(cg_io_op *op);
void cg_io_stat_advance(cg_io_op *op, int result);

/* Parts that io_uring's chain of open, read and close shares. */
/* Ends a read or stat: CG_OK for a regular file, else the refusal. Fills status and error of op. */
cg_status cg_io_read_check_regular(cg_io_op *op, const struct statx *statx);
/* A buffer for a file of file_bytes and at least one byte more, which shows that a file has grown.
 * False: op->status says why. */
bool cg_io_read_reserve(cg_io_op *op, uint64_t file_bytes);
/* Where reading for a start ends: it may be behind it, for O_DIRECT wants whole pages. */
static inline size_t cg_io_read_start_end(const cg_io_op *op)
{
    const size_t n_pages = ((size_t)op->size_bytes + CG_IO_PAGE_BYTES - 1) / CG_IO_PAGE_BYTES;
    return op->direct ? n_pages * CG_IO_PAGE_BYTES : (size_t)op->size_bytes;
}
#endif
