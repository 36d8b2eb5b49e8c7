#include "iouring/io_steps.h"

#include "iouring/io_read.h"
#include "iouring/io_write.h"

void cg_io_op_start(cg_io_op *op)
{
    switch (op->kind) {
    case CG_IO_OP_READ: cg_io_read_begin(op); break;
    case CG_IO_OP_STAT: cg_io_stat_begin(op); break;
    case CG_IO_OP_WRITE: cg_io_write_begin(op); break;
    case CG_IO_OP_CLOSE: cg_io_close_begin(op); break;
    }
}

void cg_io_op_advance(cg_io_op *op, int result)
{
    switch (op->kind) {
    case CG_IO_OP_READ: cg_io_read_advance(op, result); break;
    case CG_IO_OP_STAT: cg_io_stat_advance(op, result); break;
    case CG_IO_OP_WRITE: cg_io_write_advance(op, result); break;
    case CG_IO_OP_CLOSE: cg_io_op_finish(op); break; /* the descriptor is gone, whatever it says */
    }
}

void cg_io_op_run(cg_io_op *op)
{
    cg_io_op_start(op);
    while (op->step.kind != CG_IO_STEP_DONE)
        cg_io_op_advance(op, cg_io_step_run(&op->step));
}
