/* fusefs/left.h - files that killed connectors left unfinished, whatever host they ran on.
 *
 * A connector writes into a hidden file next to the place of the final one: NAME begins as
 * .NAME.<16 hexadecimal digits>.tmp (iouring/io_write.h). It names it when it is complete, seconds
 * later. Only names that cachegenfs itself writes count: strict ones, and those of a model's and a
 * context's other files. All other files are users' own, whatever they are called.
 * Such a file is left over when nobody has written to it for an hour, by the store's clock, nor, if
 * it has other names, linked it. Nobody on this host may have it open for writing, as far as leases
 * of fcntl tell. A connector of another host that hangs for an hour loses the chunk that it was
 * saving, and no more.
 * Threads: each call stands alone.
 */
#ifndef CG_FUSEFS_LEFT_H
#define CG_FUSEFS_LEFT_H
#include "codec/status.h"
#include "fusefs/stamp.h"
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CG_LEFT_SWEPT_FILE                                                                         \
    ".cachegenfs-swept" /* in the root; its time: of the last sweep's end                          \
                         */
enum { CG_LEFT_EVERY_S = CG_STAMP_EVERY_S };

/* Whether somebody on this host has dir_fd's entry leaf open for writing, as far as leases tell. */
bool cg_left_is_being_written(int dir_fd, const char *leaf);
/* Whether path, dir_fd's entry of its last component, described by attr, was left before now_s, of
 * the store's clock (cg_staging_now_s()). */
bool cg_left_is(int dir_fd, const char *path, const struct stat *attr, int64_t now_s);
/* Removes all such files of a store, and notes in the root that it did. is_over is asked at each
 * name; true ends it with CG_ERR_CANCELLED. CG_ERR_...: the root cannot be read. *n_removed_out is
 * valid after an error, too. */
cg_status cg_left_remove(int root_fd, int64_t now_s, bool (*is_over)(void *user), void *user,
                         uint64_t *n_removed_out);
/* In how many seconds that is to be done again, since it lists every folder: a day after any daemon
 * did it (fusefs/stamp.h); 0: now. now_s as above. */
int64_t cg_left_due_s(int root_fd, int64_t now_s);

#ifdef __cplusplus
}
#endif
#endif
