/* fusefs/gc.h - `cachegenfs gc STORE [--orphans] [--remove]`: finds what nobody can use any more.
 *
 * Garbage is: files that killed connectors left unfinished; objects of a profile that the model no
 * longer has, which nobody can decode; and with orphans all objects that no context names. Objects
 * that a context names, by its context.json or by a link, are never garbage (fusefs/survey.h). A
 * profile that is a model's default, or in quarantine, may come back: its objects stay. A line
 * tells of how many files of a model are of another profile than the default one, and are not
 * served. The store may be in use meanwhile, and full.
 * Threads: each call stands alone.
 */
#ifndef CG_FUSEFS_GC_H
#define CG_FUSEFS_GC_H
#include <stdbool.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Writes a line to out for each find, and a sum; with remove the finds are removed. Returns the
 * exit status: 0: there is no garbage, or it is removed; 1: there is some; 2: something could not
 * be read or removed, or there is no store. */
int cg_gc(const char *store, bool orphans, bool remove, FILE *out);

#ifdef __cplusplus
}
#endif
#endif
