/* fusefs/mountpoint.h - what an earlier daemon left at the mount point.
 * Threads: any.
 */
#ifndef CG_FUSEFS_MOUNTPOINT_H
#define CG_FUSEFS_MOUNTPOINT_H
#include <stdbool.h>

/* Unmounts the mount of a daemon that was killed. False, with a message on stderr: a daemon that
 * lives serves it. Mounts of other programs are left alone. */
bool cg_mountpoint_clear(const char *path);
#endif
