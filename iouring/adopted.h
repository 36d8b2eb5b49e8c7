/* iouring/adopted.h - what of a store's contexts was adopted already, so that the next daemon need
 * not look at it again.
 *
 * The file .cachegenfs-adopted in the store's root holds one hash for each folder of chunks, and
 * for each other file of a context, that was adopted without an error. It covers path, inode
 * number, size and times and, of a folder, the names in it. What has changed has another hash, and
 * is looked at. A hash that fits nothing any more does no harm. If the file is missing, damaged or
 * old, more is looked at, or all.
 *
 *     "cgadopt1"      8 bytes
 *     hashes          16 bytes each, ascending, each once
 *
 * Threads: one at a time.
 */
#ifndef CG_IOURING_ADOPTED_H
#define CG_IOURING_ADOPTED_H
#include "codec/key.h"
#include "codec/status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CG_ADOPTED_FILE ".cachegenfs-adopted"
enum { CG_ADOPTED_MAX = 1 << 18 }; /* hashes: 4 MiB; what is beyond is looked at each time */

typedef struct cg_adopted {
    int root_fd;
    int64_t now_s; /* by the store's clock, before the first look */
    cg_key *before, *now;
    size_t n_before, n_now, max_now;
} cg_adopted;

/* Reads the file. now_s: the time by the store's clock. Give it to cg_adopted_end(). */
void cg_adopted_begin(int root_fd, int64_t now_s, cg_adopted *adopted_out);
/* The hash of path as it is now and, unless beside is NULL, of the path beside. False: one cannot
 * be read, or has changed in the last seconds: another change might leave it the same time. */
bool cg_adopted_state(const cg_adopted *adopted, const char *path, const char *beside,
                      cg_key *state_out);
/* Whether it was adopted in this state. */
bool cg_adopted_has(const cg_adopted *adopted, const cg_key *state);
/* It is adopted in this state. */
void cg_adopted_add(cg_adopted *adopted, const cg_key *state);
/* Writes the file, unless it is as it was, and frees all. all_seen: the look came to its end. Else
 * the hashes that were known before stay, too. CG_ERR_...: the file cannot be written. */
cg_status cg_adopted_end(cg_adopted *adopted, bool all_seen);

#ifdef __cplusplus
}
#endif
#endif
