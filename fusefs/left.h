/* fusefs/left.h - files that killed connectors left unfinished, whatever host they ran on.
 *
 * A connector writes into a hidden file that ends in .tmp, next to the place of the chunk
 * (iouring/io_write.h), and names it when it is complete, seconds later. Such a file is left over
 * when nobody has written to it for an hour, by the store's clock. Nobody on this host may have it
 * open for writing, as far as leases of fcntl tell. A connector of another host that hangs for an
 * hour loses the chunk that it was saving, and no more.
 * Threads: each call stands alone.
 */
#ifndef CG_FUSEFS_LEFT_H
#define CG_FUSEFS_LEFT_H
#include "codec/status.h"
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Whether path, dir_fd's entry of its last component, described by attr, was left before now_s, of
 * the store's clock (cg_staging_now_s()). */
bool cg_left_is(int dir_fd, const char *path, const struct stat *attr, int64_t now_s);
/* Removes all such files of a store. is_over is asked at each name; true ends it with
 * CG_ERR_CANCELLED. CG_ERR_...: the root cannot be read. *n_removed_out is valid after an error,
 * too. */
cg_status cg_left_remove(int root_fd, int64_t now_s, bool (*is_over)(void *user), void *user,
                         uint64_t *n_removed_out);

#ifdef __cplusplus
}
#endif
#endif
