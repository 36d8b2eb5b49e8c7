/* fusefs/places.h - the directories in which the rules of iouring/tree.h look for files.
 *
 * What the store does on its own account (adopting) walks these by name. A symbolic link in place
 * of one of them could lead a daemon that runs as root anywhere, so the mount lets nobody put one
 * there.
 * Threads: pure functions.
 */
#ifndef CG_FUSEFS_PLACES_H
#define CG_FUSEFS_PLACES_H
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Whether path (relative to the store) is where <model>, objects, objects/ab, objects/ab/<key>,
 * contexts, contexts/<name>, contexts/<name>/L0 ... or profiles are. */
bool cg_place_is_folder_of_rules(const char *path);

#ifdef __cplusplus
}
#endif
#endif
