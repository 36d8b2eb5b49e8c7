/* connector/uses.h - which objects a connector has read, told to who makes room in the store.
 *
 * A daemon gives up first what was not used for long, and goes by each file's time of access. It
 * sees what is opened through its mount. Of a connector that reads the store itself it sees only
 * what the kernel notes: once a day, nothing on a store that is mounted noatime, and little on most
 * network file systems. So such a connector sets the time itself (cg_store_touch()), of a file
 * every five minutes at most. A thread of its own does that, some time after the reads, so that no
 * load waits for it; whatever is left is written when the connector closes. It is a hint: what
 * cannot be told is left out. The memory is bounded: places of a hash table, of which a new object
 * may take an older one's. Threads: the runtime's lock guards it all.
 */
#ifndef CG_CONNECTOR_USES_H
#define CG_CONNECTOR_USES_H
#include "codec/codec.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CG_USES = 4096, CG_USES_WAITING = 1024 };

typedef struct cg_runtime cg_runtime;

typedef struct cg_use {
    cg_key key;
    uint64_t noted_ns; /* 0: the place is free */
    uint8_t level;
    bool waits; /* to be told */
} cg_use;

typedef struct cg_uses {
    cg_use places[CG_USES];
    uint16_t waiting[CG_USES_WAITING]; /* indices of places, the oldest first */
    uint32_t n_waiting, first_waiting; /* a ring */
} cg_uses;

/* Notes that the file with the name of this key and level was read, unless that was noted in the
 * last five minutes, or too many wait. True: it is the first that waits. */
bool cg_uses_note(cg_uses *uses, const cg_key *key, cg_level level, uint64_t now_ns);
/* Takes the oldest that waits. False: none does. */
bool cg_uses_take(cg_uses *uses, cg_use *use_out);

/* With the runtime's lock held: begins to note uses, if the store wants to be told of them. Without
 * memory or a thread nothing is told. */
void cg_uses_begin(cg_runtime *runtime);
/* With the runtime's lock held: notes a read. */
void cg_uses_add(cg_runtime *runtime, const cg_key *key, cg_level level);

#ifdef __cplusplus
}
#endif
#endif
