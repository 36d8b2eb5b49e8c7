/* fusefs/staging.h - where files live while they are written under strict names:
 * <root>/.cachegenfs-tmp/<daemon>/.
 *
 * Each daemon has a directory, and in it a lock file that it locks while it lives. A free lock
 * means that the daemon was killed. The next one that mounts removes such a directory. A network
 * file system may not carry locks between hosts; so directories of other hosts are left alone for a
 * day. The mount hides .cachegenfs-tmp. Threads: cg_staging_open() and _close() from one; the rest
 * from any.
 */
#ifndef CG_FUSEFS_STAGING_H
#define CG_FUSEFS_STAGING_H
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define CG_STAGING_DIRECTORY ".cachegenfs-tmp"
enum { CG_STAGING_NAME_BYTES = 24, CG_STAGING_OWN_BYTES = 128 };

typedef struct cg_staging {
    int dir_fd; /* ours; -1: none */
    int all_fd; /* .cachegenfs-tmp */
    int lock_fd;
    int root_fd; /* the store's, not ours */
    pthread_mutex_t remaking;
    dev_t dev; /* of all this: files can be renamed only within it */
    char own[CG_STAGING_OWN_BYTES];
    _Atomic uint64_t n_created;
} cg_staging;

/* Removes what killed daemons left (*n_removed_out files), and makes our own directory. 0 or an
 * errno value. */
int cg_staging_open(cg_staging *staging, int root_fd, uint64_t *n_removed_out);
void cg_staging_close(cg_staging *staging);
/* A new file in dir_fd, open for reading and writing, mode 0600. 0 or an errno value. ENOENT:
 * somebody has removed the directory. */
int cg_staging_create(cg_staging *staging, char name_out[CG_STAGING_NAME_BYTES], int *fd_out);
/* A new file in dir_fd: the first n_bytes of `from`, with its owner, mode and times, on disk. 0 or
 * an errno value; EIO: from has fewer bytes. */
int cg_staging_copy(cg_staging *staging, int from, uint64_t n_bytes,
                    char name_out[CG_STAGING_NAME_BYTES]);
/* A lock of the whole store, for work that one daemon at a time should do. The file stays, so that
 * all lock the same one. The lock ends with the descriptor. -1: another daemon has it, or it cannot
 * be made. Where the store has no locks each gets it. */
int cg_staging_lock_store(const cg_staging *staging, const char *name);
/* Removes a folder of dir_fd with all that is in it. The files that were in it, but for `lock`. */
uint64_t cg_staging_remove(int dir_fd, const char *name);
/* Makes the directory again, as the daemon and not as a caller. */
int cg_staging_make_again(cg_staging *staging);

#endif
