/* connector/silence.h - how long to wait for a store that owes an answer.
 *
 * A store behind a slow link answers late; one that hangs never does. It is silent once it has
 * brought neither an answer nor bytes of a load of this process for silence_ns. A question may wait
 * behind all that loads have under way, and each of its round trips for no more than that. So bytes
 * count until a few times as many have come since the last answer: a question that is open then
 * hangs.
 * Threads: one at a time has a cg_silence.
 */
#ifndef CG_CONNECTOR_SILENCE_H
#define CG_CONNECTOR_SILENCE_H
#include <stdint.h>

typedef struct cg_runtime cg_runtime; /* connector/runtime.h */

/* How many round trips the questions about a chunk take: folder, name, opening, reading, and what
 * else was not there. Those about many chunks take no more, where the store answers them side by
 * side. */
enum { CG_FEW_ROUND_TRIPS = 8 };

/* Of one question to the store, in one call or several. Begun with the first two fields, all others
 * 0. */
typedef struct cg_silence {
    cg_runtime *runtime;
    uint64_t silence_ns;
    uint64_t alive_ns;                /* when an answer came last, or bytes that it may wait for */
    uint64_t answered_ns;             /* what follows is of since then */
    double came_bytes, largest_bytes; /* what loads had had, and the most that they had under way */
} cg_silence;

/* With the runtime's lock held. The last answer came at answered_ns, or the call began then.
 * Returns when the store is silent, unless it brings something before. */
uint64_t cg_silence_ns(cg_silence *silence, uint64_t answered_ns);

/* Until when to wait before cg_silence_ns() is asked again, for what is over at end_ns. Any thread.
 */
uint64_t cg_silence_look_ns(const cg_silence *silence, uint64_t end_ns);

#endif
