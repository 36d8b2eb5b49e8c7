/* iouring/io_write.h - the steps of an atomic, durable write; see cg_io_write(). Internal to
 * iouring.
 *
 * With `replace` false: is it there? - temporary file, write, fsync, close - link - unlink - fsync
 * of the directory. link() never overwrites, so the first writer wins also against other hosts.
 * Where a file system refuses links the temporary file is renamed; then two writers may both win,
 * with equal rights to the name.
 * A failure, or being abandoned, removes the temporary file: nothing half-written ever has the
 * final name.
 */
#ifndef CG_IOURING_IO_WRITE_H
#define CG_IOURING_IO_WRITE_H
#include "iouring/io_op.h"

/* "dir/.<name>.<16 random digits>.tmp" for "dir/name", into strlen(path) + CG_IO_TEMP_SUFFIX_BYTES
 * bytes. */
void cg_io_temp_path(const char *path, char *temp_out);

void cg_io_write_begin(cg_io_op *op);
void cg_io_write_advance(cg_io_op *op, int result);
#endif
