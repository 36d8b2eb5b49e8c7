/* fusefs/views.h - what a name shows of its file: all of it or, of a nested chunk, one level.
 *
 * The levels of a nested chunk are one file (codec/FORMAT.md). The file has a name for each level.
 * A name of the finest level shows it whole. A name of a coarser one shows the bytes up to that
 * level's end, which are the chunk at that level. This is called a view. Names that show the same
 * of a file are hard links of each other. Names that show different bytes of it are different
 * files, for whoever looks at the mount. Threads: any.
 */
#ifndef CG_FUSEFS_VIEWS_H
#define CG_FUSEFS_VIEWS_H
#include "iouring/tree.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_view {
    uint64_t bytes : 60; /* shown, from the file's start */
    uint64_t level : 4;  /* cg_level; 0: no view, the whole file */
} cg_view;

static inline bool cg_view_equal(const cg_view *a, const cg_view *b)
{
    return a->level == b->level && a->bytes == b->bytes;
}

/* Whether a file of this name can be a view, so that one has to look into it. name is a path or its
 * last component. */
bool cg_view_is_possible(const char *name);

/* What the name shows of a file. header says what the file holds (cg_chunk_header_cut). */
cg_view cg_view_of_header(const cg_tree_name *name, const cg_chunk_header *header);
/* What the name shows of the open file fd, which attr describes. If the file's header does not fit
 * the file, all of it. */
cg_view cg_view_of_file(const cg_tree_name *name, int fd, const struct stat *attr);
/* Stats leaf in dir_fd, without following a link, and says what path shows of it. path: of the same
 * file, relative to the store's root; NULL: shows all. A file that we may not read is shown whole:
 * nobody can read it through us. 0 or an errno value; ENOENT also for one that goes meanwhile. */
int cg_view_stat(int dir_fd, const char *leaf, const char *path, struct stat *attr_out,
                 cg_view *view_out);

/* Opens a file to look into it. This does not count as a use: the time of access, by which room is
 * made (fusefs/space.h), stays, if we may keep it. The caller closes what it returns; -1 and errno
 * after an error. */
int cg_view_open_unnoticed(int dir_fd, const char *leaf);

/* Whether leaf in dir_fd shows the same by both names, whichever of them it has. */
bool cg_view_is_same(int dir_fd, const char *leaf, const cg_tree_name *a, const cg_tree_name *b);

/* Turns the file's attributes into the view's: size, blocks, and an inode number of its own. The
 * link count stays the file's: from a count above 1, du, tar and rsync -H know that they should
 * look for other names of the view. */
void cg_view_attr(const cg_view *view, struct stat *attr);
/* How many of n_bytes at offset are shown. */
size_t cg_view_clamp(const cg_view *view, off_t offset, size_t n_bytes);

#ifdef __cplusplus
}
#endif
#endif
