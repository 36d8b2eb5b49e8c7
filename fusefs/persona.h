/* fusefs/persona.h - as whom a thread works on the store.
 *
 * A daemon that runs as root takes the ids of a file's future owner before it makes or writes the
 * file (setfsuid(2), for one thread). So the file belongs to its owner from the start and needs no
 * chown by name. Its blocks count for the owner's quota, not for root's reserve. The capabilities
 * that let root into every directory stay: whether a caller may do something was the kernel's
 * question before (default_permissions). Where that cannot be had (no CAP_SETPCAP) the thread stays
 * who it is.
 * Threads: each for itself. Not nested.
 */
#ifndef CG_FUSEFS_PERSONA_H
#define CG_FUSEFS_PERSONA_H
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

void cg_persona_enter(uid_t uid, gid_t gid);
void cg_persona_leave(void);
/* Gives up the capabilities that a daemon does not need, among them the use of the blocks that a
 * file system reserves for root. For the calling thread and those that it starts. */
void cg_persona_drop_capabilities(void);

#ifdef __cplusplus
}
#endif
#endif
