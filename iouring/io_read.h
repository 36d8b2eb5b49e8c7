/* iouring/io_read.h - the steps of reads and stats; see cg_io_read(). Internal to iouring.
 *
 * A read: open - stat, unless the caller knows the size - read until all is there - close. A file
 * that was the caller's before is not opened; one that the caller gets is not closed.
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
/* CG_OK for a regular file. Else the refusal, also in status and error of op. */
cg_status cg_io_read_check_regular(cg_io_op *op, const struct statx *statx);
/* Gets a buffer for a file of file_bytes and one byte more: if that byte can be read, the file has
 * grown. False: op->status says why. */
bool cg_io_read_reserve(cg_io_op *op, uint64_t file_bytes);
/* How many bytes of the buffer a read of a file's start may fill. O_DIRECT moves whole pages, so
 * there it ends on the page behind the start. */
static inline size_t cg_io_read_start_end(const cg_io_op *op)
{
    const size_t n_pages = ((size_t)op->size_bytes + CG_IO_PAGE_BYTES - 1) / CG_IO_PAGE_BYTES;
    return op->direct ? n_pages * CG_IO_PAGE_BYTES : (size_t)op->size_bytes;
}
#endif
