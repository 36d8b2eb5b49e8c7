/* fusefs/fsck.h - reads everything that a strict name shows, finds what is not whole, and repairs
 * it: for `cachegenfs fsck STORE [--repair]`, and for the scrubber of a mount.
 *
 * With repair, a damaged file gives its strict name up: no reader finds it any more. A nested chunk
 * that is whole up to the end of a level keeps that level and the coarser ones; their names become
 * copies of that part. The rest goes to STORE/quarantine, where `list` says what it was. Files that
 * killed connectors left unfinished are removed (fusefs/left.h).
 * A file that is not whole and was written to in the last five minutes by the store's clock, or
 * while it was read, or that somebody on this host has open for writing, is left alone: somebody
 * may be restoring a backup past the mounts. A store may be in use meanwhile: each name changes
 * atomically. Two repairs at once do no harm. Threads: each call stands alone.
 */
#ifndef CG_FUSEFS_FSCK_H
#define CG_FUSEFS_FSCK_H
#include "codec/status.h"
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_staging cg_staging; /* fusefs/staging.h */
struct cg_fsck_result;

typedef struct cg_fsck_config {
    int root_fd;
    cg_staging *staging;  /* NULL: nothing is repaired */
    uint64_t bytes_per_s; /* of files that are read, at most; 0: as fast as it goes */
    /* Called before each name. Waits at most ns (0: not at all); true ends the check. NULL: nothing
     * waits and nothing ends it. */
    bool (*wait)(void *user, uint64_t ns, const struct cg_fsck_result *so_far);
    /* Called for each finding, with what was done about it. */
    void (*report)(void *user, const char *path, const char *what);
    void *user;
} cg_fsck_config;

/* Counts names of files. A whole file with several names is read once. */
typedef struct cg_fsck_result {
    uint64_t n_whole, n_damaged, n_left; /* n_left: files left unfinished */
    uint64_t n_cut, n_quarantined;       /* of the damaged: repaired */
    uint64_t n_being_written;            /* not whole, and left alone */
    uint64_t n_failed;                   /* not read, or not repaired */
    uint64_t read_bytes;
} cg_fsck_result;

/* CG_ERR_CANCELLED: wait said so. CG_ERR_...: the root cannot be read. */
cg_status cg_fsck_run(const cg_fsck_config *config, cg_fsck_result *result_out);

/* How long to wait until read_bytes are no more than bytes_per_s allows since *start_ns. Where less
 * was read than that, as on a busy disk, *start_ns moves on: at most a second of it can be made up
 * for, so that the rate is a limit and not an average. */
uint64_t cg_fsck_wait_ns(uint64_t *start_ns, uint64_t now_ns, uint64_t read_bytes,
                         uint64_t bytes_per_s);

/* The command. Writes a line to out for each finding, and a sum. Exit status: 0 all is whole, 1
 * something was not (and is repaired, if asked for), 2 something could not be read or repaired, or
 * is being written, or there is no store. */
int cg_fsck(const char *store, bool repair, FILE *out);

#ifdef __cplusplus
}
#endif
#endif
