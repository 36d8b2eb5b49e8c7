#include "fusefs/at_hand.h"

/* Of two threads at once one may shorten the other's pause: that costs others a look or two. */
static void hold_off(cg_at_hand *at_hand, uint64_t until_ns)
{
    if (until_ns > __atomic_load_n(&at_hand->not_before_ns, __ATOMIC_RELAXED))
        __atomic_store_n(&at_hand->not_before_ns, until_ns, __ATOMIC_RELAXED);
}

static bool step(cg_at_hand *at_hand, uint64_t from)
{
    return __atomic_compare_exchange_n(&at_hand->turn, &from, from + 1, false, __ATOMIC_SEQ_CST,
                                       __ATOMIC_SEQ_CST);
}

bool cg_at_hand_is_on(const cg_at_hand *at_hand, uint64_t now_ns)
{
    return now_ns >= __atomic_load_n(&at_hand->not_before_ns, __ATOMIC_RELAXED);
}

bool cg_at_hand_is_guarded(const cg_at_hand *at_hand)
{
    return __atomic_load_n(&at_hand->is_guarded, __ATOMIC_SEQ_CST);
}

bool cg_at_hand_begin(cg_at_hand *at_hand, bool may_be_short, uint64_t now_ns, uint64_t *turn_out,
                      bool *wakes_out)
{
    const uint64_t turn = __atomic_load_n(&at_hand->turn, __ATOMIC_SEQ_CST);
    const uint64_t last_ns = __atomic_exchange_n(&at_hand->last_ns, now_ns, __ATOMIC_RELAXED);
    /* Another thread's request may have come after it. */
    if (!may_be_short)
        hold_off(at_hand, now_ns + CG_AT_HAND_PAUSE_NS);
    else if ((int64_t)(now_ns - last_ns) >= CG_AT_HAND_CLOSE_NS)
        hold_off(at_hand, now_ns + CG_AT_HAND_APART_NS);
    if (!cg_at_hand_is_on(at_hand, now_ns) || turn % 2 == 1 || !step(at_hand, turn))
        return false;
    *turn_out = turn + 1;
    /* After the step, and the guard looks for a step after it has gone to sleep: one of both sees
     * the other. */
    *wakes_out = !cg_at_hand_is_guarded(at_hand) &&
                 !__atomic_exchange_n(&at_hand->is_guarded, true, __ATOMIC_SEQ_CST);
    return true;
}

bool cg_at_hand_end(cg_at_hand *at_hand, uint64_t turn, uint64_t begun_ns, uint64_t now_ns)
{
    if (now_ns - begun_ns > CG_AT_HAND_SHORT_NS)
        hold_off(at_hand, now_ns + CG_AT_HAND_PAUSE_NS);
    return step(at_hand, turn);
}

bool cg_at_hand_look(cg_at_hand *at_hand, uint64_t now_ns)
{
    const uint64_t turn = __atomic_load_n(&at_hand->turn, __ATOMIC_SEQ_CST);
    const bool is_same = turn == at_hand->seen_turn;
    at_hand->seen_turn = turn;
    if (is_same && turn % 2 == 1) {
        hold_off(at_hand, now_ns + CG_AT_HAND_PAUSE_NS);
        return step(at_hand, turn);
    }
    at_hand->n_idle_looks = is_same ? at_hand->n_idle_looks + 1 : 0;
    if (at_hand->n_idle_looks >= CG_AT_HAND_IDLE_LOOKS) {
        at_hand->n_idle_looks = 0;
        __atomic_store_n(&at_hand->is_guarded, false, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&at_hand->turn, __ATOMIC_SEQ_CST) != turn)
            __atomic_store_n(&at_hand->is_guarded, true, __ATOMIC_SEQ_CST);
    }
    return false;
}
