/* fusefs/space.h - a mount's quota: how full its store is, and making room in it.
 *
 * There are two water marks. When the store takes more than 95 % of the quota, cold data go until
 * it takes less than 90 % (fusefs/evict.h says which). Where what the store takes and what is free
 * on its disk is less than the quota, that counts in its place, unless a survey finds that what
 * went for its sake gave the disk no room. What is written through this mount, or published by a
 * rename or a link, counts at once. What came or went without it is seen by a survey, every ten
 * minutes, or soon after something that was written, made or moved found no room on the disk. Where
 * a survey could not make enough room or failed, or a model's quota may be reached, the next one
 * comes after a minute, or after ten times as long as it took if that is longer. Only one daemon of
 * a store makes room at a time (fusefs/lease.h); two at once would do no harm but free too much. A
 * model may have a quota of its own, with the same marks. Levels that are kept for a time only (-o
 * keep) go after each survey, whether the store is full or not.
 * Threads: one tends (cg_fs_keep() of fusefs/core.h); any may ask.
 */
#ifndef CG_FUSEFS_SPACE_H
#define CG_FUSEFS_SPACE_H
#include "fusefs/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Takes what config says of space. 0 or ENOMEM. */
int cg_space_init(cg_fs *fs, const cg_fs_config *config);
/* Makes one survey, and room if needed. Counts and logs what it does. */
void cg_space_tend(cg_fs *fs);
/* Whether it is time for cg_space_tend(). now_s: CLOCK_MONOTONIC. */
bool cg_space_is_due(cg_fs *fs, int64_t now_s);
/* Makes the first room on a full disk, where there is none for our folder. So it takes no lease,
 * and whole files only, as few as may do: another daemon may be making room, too. is_enough is
 * asked now and then. Without a quota, and too soon after the last time, it does nothing. now_s:
 * CLOCK_MONOTONIC. */
void cg_space_make_first_room(cg_fs *fs, int64_t now_s, bool (*is_enough)(void *user), void *user);
/* What the store takes, at most the quota; before a first survey has told, what its disk says. */
void cg_space_statfs(cg_fs *fs, struct statvfs *inout);
/* The error of what writes, makes or moves something. ENOSPC and EDQUOT make a survey due: who
 * filled the disk may be another, of whom nothing came through this mount. */
void cg_space_failed(cg_fs *fs, int error);
/* The file fd was published by a rename or a link. */
void cg_space_arrived(cg_fs *fs, int fd);
/* Notes that a published file was read: that keeps it. The note is the file's time of
 * access, so that all hosts and the next daemon see it. It is set every five minutes at most, and
 * also where the store is mounted noatime. A mount without a quota and without -o keep notes
 * nothing. */
void cg_space_touch(cg_fs *fs, int fd);
/* Whether it would set the time of a file with these attributes. */
bool cg_space_wants_touch(const cg_fs *fs, const struct stat *attr);
/* ENOSPC: the last survey left more than the high mark, since nothing more may go, and with what
 * has come since the store is over its quota. Else 0. */
int cg_space_check(cg_fs *fs);

#ifdef __cplusplus
}
#endif
#endif
