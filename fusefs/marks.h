/* fusefs/marks.h - which chunks the contexts of a store name: what a sweep of its objects must
 * leave.
 *
 * Link counts do not tell it everywhere: over sshfs each is 1, and what was adopted without links
 * is a copy. So the contexts are read. A context.json names chunks by their keys, in order, with
 * their levels (codec/FORMAT.md). So does a chunk's file in a context, by its header and its
 * folder.
 * Threads: one at a time. 24 bytes for each mark. How many contexts there are, and what they name,
 * is up to their owners. So marks that are there several times become one now and then, and a model
 * with millions of them is marked as a whole.
 */
#ifndef CG_FUSEFS_MARKS_H
#define CG_FUSEFS_MARKS_H
#include "codec/key.h"
#include "codec/status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_mark {
    uint32_t model; /* index in cg_survey.models */
    uint8_t levels; /* bit n: level n */
    cg_key key;
} cg_mark;

/* Zeros are none. */
typedef struct cg_marks {
    cg_mark *items;
    size_t n_items, max_items;
    size_t n_sorted;    /* so many at the start are in order, each once */
    bool has_unknown;   /* of some model all is marked */
    bool has_forbidden; /* so it is since we may not read a context, now or later */
    bool has_leased;    /* so it is since somebody has a lease on a file, which ends */
    bool has_crowded;   /* so it is since contexts name too many chunks */
    uint32_t crowded;   /* such a model */
} cg_marks;

/* CG_ERR_NO_MEMORY. */
cg_status cg_marks_add(cg_marks *marks, uint32_t model, const cg_key *key, uint8_t levels);
/* Marks all of the model: for this error nobody knows what one of its contexts names. */
cg_status cg_marks_add_all(cg_marks *marks, uint32_t model, int error);
/* Whether it says that a file is not ours to read. */
bool cg_marks_is_forbidden(int error);
/* What a file of a context names that cannot be opened or read, for this error; 0: it could. A file
 * that is gone names nothing. All of the model is marked where it is not ours to read, and where
 * somebody past the mount has a lease on it (F_SETLEASE, or a client of NFS): he is told to give it
 * up, but not waited for. CG_ERR_...: it cannot be read now, so nobody knows what it names. */
cg_status cg_marks_add_unread(cg_marks *marks, uint32_t model, int error);
/* Marks what the file leaf in dir_fd, a context.json, names; nothing more where all of the model is
 * marked. Every string in it that can be a key is taken for one: too many marks keep what could go,
 * too few would lose something. A key behind which no level is named is marked at all levels. One
 * that cannot be read: as above. */
cg_status cg_marks_add_json(cg_marks *marks, uint32_t model, int dir_fd, const char *leaf);
/* Before the first cg_marks_of(), and after the last addition. */
void cg_marks_sort(cg_marks *marks);
/* The levels at which the chunk is named. */
uint8_t cg_marks_of(const cg_marks *marks, uint32_t model, const cg_key *key);
void cg_marks_free(cg_marks *marks);

#ifdef __cplusplus
}
#endif
#endif
