/* fusefs/strict.h - whether the bytes of a file may stand under a strict name.
 *
 * A chunk must pass cg_chunk_verify() and cg_tree_check(). A profile must open, and its fingerprint
 * must be its name. A chunk is read piece by piece, in 2 MiB of memory whatever its size. So is a
 * profile at first; then, if its checksum and its name are right, whole, and its check takes twice
 * its size and 2 MiB. Neither is mapped: a device error, or a truncation from elsewhere, must not
 * be a SIGBUS. Threads: any. The budget has its own lock.
 */
#ifndef CG_FUSEFS_STRICT_H
#define CG_FUSEFS_STRICT_H
#include "iouring/tree.h"
#include <pthread.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Limits the memory of checks that run at once. A check waits until there is enough. A profile
 * that takes more than the limit is checked when nothing else is. */
typedef struct cg_strict_budget {
    pthread_mutex_t lock;
    pthread_cond_t freed;
    uint64_t used_bytes, limit_bytes;
} cg_strict_budget;

void cg_strict_budget_init(cg_strict_budget *budget, uint64_t limit_bytes);
void cg_strict_budget_destroy(cg_strict_budget *budget);

/* Whether the file of fd may have this name, which is of a CHUNK kind or PROFILE. A nested chunk
 * may hold finer levels than the name says. *header_out: of a chunk, what its file holds.
 * CG_ERR_TRUNCATED: incomplete. CG_ERR_CORRUPT, CG_ERR_BAD_MAGIC: damaged. CG_ERR_FOREIGN_TOKENS,
 * CG_ERR_FOREIGN_PROFILE, CG_ERR_INVALID_ARGUMENT: whole, but not what the name says.
 * CG_ERR_NO_MEMORY: also of a file larger than max_bytes. CG_ERR_UNSUPPORTED..., CG_ERR_IO. */
cg_status cg_strict_check(int fd, const cg_tree_name *name, cg_strict_budget *budget,
                          uint64_t max_bytes, cg_chunk_header *header_out);

/* The same of a profile under an ordinary name, whatever its fingerprint is. */
cg_status cg_strict_check_profile(int fd, cg_strict_budget *budget,
                                  cg_fingerprint *fingerprint_out);

/* A cg_chunk_source: exactly n_bytes of the file whose descriptor *(const int *)fd is.
 * CG_ERR_TRUNCATED; CG_ERR_...: of errno. */
cg_status cg_strict_read(void *fd, uint64_t offset, uint8_t *bytes_out, size_t n_bytes);

/* What the caller of an operation sees. EBADMSG: incomplete or damaged. EINVAL: not what the name
 * says. EOPNOTSUPP: this version does not know it. ENOMEM. EACCES. EIO: all else. */
int cg_strict_errno(cg_status status);

#ifdef __cplusplus
}
#endif
#endif
