/* fusefs/fsck.h - `cachegenfs fsck STORE [--repair]`: reads everything that a strict name shows,
 * and says what is not whole.
 *
 * With repair, a damaged file gives its strict name up: no reader finds it any more. A nested chunk
 * that is whole up to the end of a level keeps that level and the coarser ones; their names become
 * copies of that part. The rest goes to STORE/quarantine, where `list` says what it was. Files that
 * killed connectors left unfinished a day ago are removed.
 * A store may be in use meanwhile: each name changes atomically.
 */
#ifndef CG_FUSEFS_FSCK_H
#define CG_FUSEFS_FSCK_H
#include <stdbool.h>
#include <stdio.h>

/* Writes a line to out for each finding, and a sum. Exit status: 0 all is whole, 1 something was
 * not (and is repaired, if asked for), 2 something could not be read or repaired. */
int cg_fsck(const char *store, bool repair, FILE *out);
#endif
