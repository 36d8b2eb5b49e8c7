/* fusefs/persona.h - as whom a thread works on the store.
 *
 * A daemon that runs as root makes and writes files as their owner to be: with that user's and
 * group's id for file access (setfsuid(2), which counts for one thread). So what is made belongs to
 * its owner from the start, there is nothing to be given away by name, and the store's file system
 * counts its blocks for the owner: against a quota, and not from what is reserved for root. The
 * capabilities that let root into every directory stay: whether a caller may do something was the
 * kernel's question before (default_permissions).
 * Where that cannot be had (no CAP_SETPCAP) the thread stays who it is.
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
