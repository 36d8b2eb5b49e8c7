#include "connector/uses.h"

#include "connector/clock.h"
#include "connector/runtime.h"

#include <stdlib.h>
#include <string.h>

static const uint64_t AGAIN_NS = UINT64_C(1000000000) * CG_STORE_TOUCH_SECONDS;
static const uint64_t LATER_NS = 2000000000; /* loads come in bursts: after this one */
static const uint64_t GRACE_NS = 200000000;  /* for what is left when the connector closes */

bool cg_uses_note(cg_uses *uses, const cg_key *key, cg_level level, uint64_t now_ns)
{
    uint64_t hash;
    memcpy(&hash, key->bytes, sizeof hash);
    const uint16_t index = (uint16_t)((hash + level) % CG_USES);
    cg_use *use = &uses->places[index];
    if (use->noted_ns != 0 && use->level == level && cg_key_equal(&use->key, key) &&
        now_ns - use->noted_ns < AGAIN_NS)
        return false;
    if (uses->n_waiting == CG_USES_WAITING)
        return false;
    *use = (cg_use){.key = *key, .noted_ns = now_ns, .level = (uint8_t)level, .waits = true};
    uses->waiting[(uses->first_waiting + uses->n_waiting++) % CG_USES_WAITING] = index;
    return uses->n_waiting == 1;
}

bool cg_uses_take(cg_uses *uses, cg_use *use_out)
{
    while (uses->n_waiting > 0) {
        cg_use *use = &uses->places[uses->waiting[uses->first_waiting]];
        uses->first_waiting = (uses->first_waiting + 1) % CG_USES_WAITING;
        uses->n_waiting--;
        *use_out = *use;
        use->waits = false;
        if (use_out->waits) /* else it took the place of one that waited, and was told with it */
            return true;
    }
    return false;
}

/* Waits until something is to be told. False: there is nothing, and there will be nothing. */
static bool wait_for_some(cg_runtime *rt)
{
    while (rt->uses->n_waiting == 0 && !rt->stop)
        pthread_cond_wait(&rt->used, &rt->lock);
    const uint64_t until_ns = cg_now_ns() + LATER_NS;
    while (!rt->stop && cg_now_ns() < until_ns)
        cg_runtime_wait(rt, &rt->used, until_ns);
    return rt->uses->n_waiting > 0;
}

/* The body of the thread that tells. */
static void *tell_uses(void *argument)
{
    cg_runtime *rt = argument;
    const cachegen *c = rt->connector;
    uint64_t end_ns = UINT64_MAX;
    cg_use use;
    pthread_mutex_lock(&rt->lock);
    while (cg_now_ns() < end_ns && wait_for_some(rt)) {
        while (cg_now_ns() < end_ns && cg_uses_take(rt->uses, &use)) {
            if (rt->stop && end_ns == UINT64_MAX)
                end_ns = cg_now_ns() + GRACE_NS;
            if (rt->store_is_silent)
                continue; /* closing waits for this thread */
            pthread_mutex_unlock(&rt->lock);
            cg_store_touch(c->store, &use.key, (cg_level)use.level, &c->model.profile_fingerprint);
            pthread_mutex_lock(&rt->lock);
        }
    }
    cg_runtime_leave(rt);
    return NULL;
}

void cg_uses_begin(cg_runtime *rt)
{
    if (rt->uses == NULL && cg_store_wants_touches(rt->connector->store))
        rt->uses = calloc(1, sizeof *rt->uses); /* 168 KiB of zero pages: touched as it fills */
    if (rt->uses != NULL)
        cg_runtime_start(rt, &rt->teller, "cachegen-use", tell_uses);
}

void cg_uses_add(cg_runtime *rt, const cg_key *key, cg_level level)
{
    if (rt->uses != NULL && cg_uses_note(rt->uses, key, level, cg_now_ns()))
        pthread_cond_signal(&rt->used);
}
