/* iouring/same_file.h - whether two looks were at one file.
 *
 * A number alone does not say it: other file systems may be mounted in a store, and each numbers
 * its files for itself.
 * Threads: any.
 */
#ifndef CG_IOURING_SAME_FILE_H
#define CG_IOURING_SAME_FILE_H
#include <stdbool.h>
#include <sys/stat.h>

static inline bool cg_same_file(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}
#endif
