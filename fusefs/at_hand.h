/* fusefs/at_hand.h - whether the thread that waits for requests answers one itself.
 *
 * A request may take long, so a thread that takes one leaves another to wait for the next. To wake
 * that one takes longer than most requests do. So while short requests follow one another closely,
 * a single thread waits, and answers them itself: the request is at hand. A guard looks now and
 * then. If it finds the request at hand that it found before, another thread waits from then on.
 * Threads: any; cg_at_hand_look() is for one.
 */
#ifndef CG_FUSEFS_AT_HAND_H
#define CG_FUSEFS_AT_HAND_H
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    /* After the one before. */
    CG_AT_HAND_CLOSE_NS = 200000,
    /* A request that takes longer is not short. */
    CG_AT_HAND_SHORT_NS = 100000,
    /* After a request that was not short none is at hand for so long. So in each such pause others
     * are held up for two looks at most. */
    CG_AT_HAND_PAUSE_NS = 20000000,
    /* The same after one that was not close: a program that reads large files sends more of them,
     * but any program may have been kept from its processor once. */
    CG_AT_HAND_APART_NS = 5000000,
    CG_AT_HAND_LOOK_NS = 1000000,
    /* In which nothing was at hand: then the guard sleeps. */
    CG_AT_HAND_IDLE_LOOKS = 10
};

/* All zeros: nothing is at hand. */
typedef struct cg_at_hand {
    uint64_t turn;    /* odd: a request is at hand. Atomic, as are the next three */
    uint64_t last_ns; /* when the last request that may take long arrived */
    uint64_t not_before_ns;
    bool is_guarded;
    uint64_t seen_turn; /* the guard's, as is the next */
    uint32_t n_idle_looks;
} cg_at_hand;

/* Each request that may take long, when it arrives. may_be_short: it is a question that mostly is.
 * True: it is at hand until cg_at_hand_end(), which is told the turn. *wakes_out: the guard sleeps,
 * and has to be woken. */
bool cg_at_hand_begin(cg_at_hand *at_hand, bool may_be_short, uint64_t now_ns, uint64_t *turn_out,
                      bool *wakes_out);
/* False: another thread waits for requests meanwhile. */
bool cg_at_hand_end(cg_at_hand *at_hand, uint64_t turn, uint64_t begun_ns, uint64_t now_ns);
/* Whether one thread that waits is enough. */
bool cg_at_hand_is_on(const cg_at_hand *at_hand, uint64_t now_ns);
/* Whether the guard has to look. */
bool cg_at_hand_is_guarded(const cg_at_hand *at_hand);
/* It looks. True: another thread is to wait for requests. */
bool cg_at_hand_look(cg_at_hand *at_hand, uint64_t now_ns);

#ifdef __cplusplus
}
#endif
#endif
