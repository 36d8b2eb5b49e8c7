/* fusefs/mountpoint.h - what is mounted at the mount point.
 * Threads: any.
 */
#ifndef CG_FUSEFS_MOUNTPOINT_H
#define CG_FUSEFS_MOUNTPOINT_H
#include <stdbool.h>

/* Unmounts the mount of a daemon that was killed. False, with a message on stderr: a daemon that
 * lives serves it. Mounts of other programs are left alone. */
bool cg_mountpoint_clear(const char *path);
/* Takes the mount away from its place, whoever uses it. path: absolute. */
void cg_mountpoint_detach(const char *path);
#endif
