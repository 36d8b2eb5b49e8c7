/* fusefs/gc.h - `cachegenfs gc STORE [--orphans] [--remove]`: finds what nobody can use any more.
 *
 * Garbage is: files that killed connectors left unfinished; objects of a profile that the
 * model has no more, which nobody can decode; with orphans, all objects that no context names.
 * Objects that a context names are never garbage. A store may be in use meanwhile.
 */
#ifndef CG_FUSEFS_GC_H
#define CG_FUSEFS_GC_H
#include <stdbool.h>
#include <stdio.h>

/* Writes a line to out for each find, and a sum; with remove it goes. Exit status: 0 there is
 * nothing, or it is removed; 1 there is garbage; 2 something could not be read or removed. */
int cg_gc(const char *store, bool orphans, bool remove, FILE *out);
#endif
