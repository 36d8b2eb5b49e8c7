/* connector/asking.h - what several look-ups at once ask a store.
 *
 * A store may be a network away, and mostly answers many questions in the time of one. So look-ups
 * that wait at the same time share rounds: one call asks for what each of them lacks next, and for
 * a chunk that several want once. The oldest go first. How many chunks a call asks for is bounded:
 * some stores answer few questions at a time (sshfs ten). There a larger call would only make the
 * oldest wait longer, and serve nobody sooner. So the bound grows while answers come as fast as a
 * few round trips, and shrinks to what one short prompt needs. One prompt is asked for whole,
 * however long it is; but of a far store that answers few questions at a time, most chunks of a
 * long one are guessed (connector/prefix.h).
 * Threads: one at a time. Functions take the runtime's lock themselves, for moments.
 */
#ifndef CG_CONNECTOR_ASKING_H
#define CG_CONNECTOR_ASKING_H
#include "iouring/io.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CG_ASKING_PROMPTS = 64 };                      /* in a call, at most */
enum { CG_ASKING_LEAST = 32, CG_ASKING_MOST = 1024 }; /* bounds of the width, in chunks */

/* How many chunks are asked for at once, beside those of the first prompt. */
typedef struct cg_asking_width {
    uint32_t n_chunks;      /* CG_ASKING_LEAST at first */
    uint64_t slow_until_ns; /* it has answered slowly, which is believed until then */
    uint64_t slow_for_ns;   /* and for so long; 0: it never has, or not since it was fast again */
} cg_asking_width;

/* n_chunks were asked for at once, which took took_ns until now_ns, of a store that answers one
 * question in latency_ns. That it was slow is believed for a minute, and each further time that it
 * turns out so for twice as long, up to an hour. */
void cg_asking_learn(cg_asking_width *width, uint32_t n_chunks, uint64_t took_ns,
                     uint64_t latency_ns, uint64_t now_ns);

typedef struct cg_prefix cg_prefix;   /* connector/prefix.h */
typedef struct cg_runtime cg_runtime; /* connector/runtime.h */

/* What became of a call. After any but CG_ASKED the cg_io is to be freed. */
typedef enum cg_asked {
    CG_ASKED,
    CG_ASKED_LATE,    /* not all has been answered */
    CG_ASKED_IN_VAIN, /* the store is silent */
    CG_ASKED_BROKEN   /* the cg_io has failed */
} cg_asked;

/* One stage further for prefixes[n], the oldest first, or for as many as the width allows: at least
 * the first. n is at most CG_ASKING_PROMPTS; the cg_io must be idle. Those that are at
 * CG_PREFIX_DONE afterwards have all that is known of them. Errors are misses, and counted.
 * A prompt whose patience_ns are over ends with what is known, a quarter of silence_ns later at the
 * most; the others are asked for further. So are all where those that are asked for are cancelled.
 * The store is silent, and all end, once it has brought neither an answer nor bytes of a load of
 * this process for silence_ns (bytes count as long as a question may be waiting behind them). A
 * call that ends because the time of its prompts is over counts as silence, too, if it has waited
 * half of that and nothing has come. */
cg_asked cg_asking_ask(cg_asking_width *width, cg_io *io, cg_prefix *const *prefixes, size_t n,
                       uint64_t silence_ns);

/* Asks one small question. True: the store is silent; an error is an answer. The cg_io must be
 * idle. The question of a silent store stays under way in it: it may be answered later. */
bool cg_asking_is_silent(cg_runtime *runtime, cg_io *io, uint64_t silence_ns);

#ifdef __cplusplus
}
#endif
#endif
