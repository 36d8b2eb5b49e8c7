/* fusefs/mountpoint.h - what an earlier daemon left at the mount point.
 */
#ifndef CG_FUSEFS_MOUNTPOINT_H
#define CG_FUSEFS_MOUNTPOINT_H
#include <stdbool.h>

/* Unmounts what a daemon left there that was killed. False, with a message on stderr: a living one
 * serves it. Mounts of others are left alone. */
bool cg_mountpoint_clear(const char *path);
#endif
