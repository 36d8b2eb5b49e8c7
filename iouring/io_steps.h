/* iouring/io_steps.h - runs an operation from step to step, whatever its kind. Internal to iouring.
 *
 * The steps of reads and stats are in io_read.c, those of writes in io_write.c.
 * Threads: as iouring/io_op.h.
 */
#ifndef CG_IOURING_IO_STEPS_H
#define CG_IOURING_IO_STEPS_H
#include "iouring/io_op.h"

/* Sets the first step. */
void cg_io_op_start(cg_io_op *op);
/* result: what op->step returned, or -errno. Sets the next step. CG_IO_STEP_DONE: status, error and
 * the other results are final. */
void cg_io_op_advance(cg_io_op *op, int result);
/* Starts the op and runs it to its end in this thread. */
void cg_io_op_run(cg_io_op *op);
#endif
