/* iouring/io_write.h - the steps of an atomic, durable write; see cg_io_write(). Internal to
 * iouring.
 *
 * Without `replace`: stat (is it there?) - temporary file, write, fsync, close - link - unlink of
 * the temporary name - fsync of the directory. link() never overwrites, so the first writer wins,
 * also against other hosts. The stat only saves writing a file that would lose.
 * Where a file system refuses links, the temporary file is renamed after another stat. Then two
 * writers may both believe that they won; the later one's file stays.
 * With `replace` there is no stat, and a rename in place of link and unlink.
 * With `is_temp` path is the temporary file's own, and the steps end with its close.
 * A write that fails or is abandoned removes its temporary file: nothing half-written ever has the
 * final name.
 * Threads: as iouring/io_op.h.
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
