/* fusefs/contexts.h - how long a context is kept: extended attributes of its folder, which its
 * owner sets.
 *
 *   user.cachegen.pin   (any value) it does not expire
 *   user.cachegen.ttl   "30d": its time to live, from the last change of its context.json on; s, m,
 *                       h, d or w, without a letter seconds
 * A context that has expired is the first to go when room is made. With it go its chunks, but for
 * those that were used since its time was over. Until then it is as any other.
 * Threads: each call stands alone.
 */
#ifndef CG_FUSEFS_CONTEXTS_H
#define CG_FUSEFS_CONTEXTS_H
#include "codec/status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_staging cg_staging; /* fusefs/staging.h */

#define CG_CONTEXT_PIN "user.cachegen.pin"
#define CG_CONTEXT_TTL "user.cachegen.ttl"

/* "7d" of n_bytes as seconds, at least 1. False: no such time. */
bool cg_context_parse_time(const char *text, size_t n_bytes, int64_t *seconds_out);

/* A file of a context that was removed. */
typedef struct cg_expired_file {
    ino_t ino;
    int64_t at_s; /* when the context's time was over; the last of them if there were several */
} cg_expired_file;

/* Removes the contexts of model (NULL: of all) that have expired, by the store's clock. Each
 * disappears at once and as a whole. is_over (may be NULL) is asked before each; true ends it.
 * Nothing is looked at but the folders of contexts. *files_out[*n_files_out], malloc'ed: the files
 * that were in them, each once, in ascending order. *n_removed_out may have contexts also after an
 * error. CG_ERR_NO_MEMORY. CG_ERR_CANCELLED: is_over said so. CG_ERR_...: the root cannot be read.
 */
cg_status cg_contexts_expire(int root_fd, cg_staging *staging, const char *model,
                             bool (*is_over)(void *user), void *user, cg_expired_file **files_out,
                             size_t *n_files_out, size_t *n_removed_out);

#ifdef __cplusplus
}
#endif
#endif
