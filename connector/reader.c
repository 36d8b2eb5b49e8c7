/* The thread that reads the chunks of all loads: it decides what to read next and when to give a
 * read up. */
#include "connector/reader.h"

#include "connector/clock.h"
#include "connector/load.h"

#include <stdlib.h>

enum {
    MAX_COMPLETIONS = 32,
    WINDOW_MS =
        250, /* of the link's throughput is under way: more would only delay a change of level */
    MIN_READS = 2,
    GRACE_MS = 200, /* for reads under way when the connector closes */
};

typedef struct read_slot {
    uint64_t user; /* 0: free */
    cg_load_chunk *chunk;
    uint8_t level;
    uint64_t bytes;                                   /* expected */
    uint64_t submitted_ns, smaller_at_ns, give_up_ns; /* UINT64_MAX: never */
} read_slot;

typedef struct reader {
    cg_runtime *rt;
    cg_io *io;
    read_slot *slots; /* [depth] */
    uint32_t depth, n_reading;
    uint64_t last_user, bytes_reading;
} reader;

static uint64_t add_ns(uint64_t a, uint64_t b)
{
    return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

/* Bytes of chunks that were read and are not decoded: with those under way, bounded by the staging
 * memory. */
static uint64_t bytes_decoding(const cg_runtime *rt)
{
    uint64_t bytes = 0;
    for (const cachegen_load *load = rt->loads; load != NULL; load = load->next)
        for (uint32_t i = load->first; i < load->next_index && load->n_jobs > 0; i++)
            if (load->chunks[i].state == CG_LOAD_DECODING)
                bytes += load->sizes[i].bytes[load->chunks[i].level];
    return bytes;
}

/* With the lock held: whether one more read of n_bytes is wise now. */
static bool has_room(const reader *r, uint64_t n_bytes)
{
    const cg_runtime *rt = r->rt;
    const double bps = cg_estimator_bps(&rt->speeds.link);
    if (r->n_reading == 0)
        return true;
    if (r->n_reading >= r->depth)
        return false;
    if (!(bps > 0)) /* the first chunk tells how fast the link is; until then nothing is staked on a
                       guess */
        return false;
    if (r->n_reading >= MIN_READS &&
        (double)(r->bytes_reading + n_bytes) > bps / 8 * WINDOW_MS / 1000)
        return false;
    return r->bytes_reading + n_bytes + bytes_decoding(rt) <=
           (uint64_t)rt->connector->config->staging_mib << 20;
}

/* With the lock held: the load whose next chunk is read next, the earliest deadline first. */
static cachegen_load *next_load(const cg_runtime *rt)
{
    cachegen_load *best = NULL;
    for (cachegen_load *load = rt->loads; load != NULL; load = load->next)
        if (cg_load_wants(load) && (best == NULL || load->deadline_ns < best->deadline_ns))
            best = load;
    return best;
}

/* With the lock held: enters a read into a free slot. The slot must then be submitted. */
static read_slot *open_slot(reader *r, cg_load_chunk *chunk, uint8_t level)
{
    cachegen_load *load = chunk->load;
    const cg_config *config = load->op.connector->config;
    const double bps = cg_estimator_bps(&r->rt->speeds.link);
    read_slot *slot = r->slots;
    while (slot->user != 0)
        slot++;
    const uint64_t now_ns = cg_now_ns();
    *slot = (read_slot){.user = ++r->last_user,
                        .chunk = chunk,
                        .level = level,
                        .bytes = load->sizes[chunk->index].bytes[level],
                        .submitted_ns = now_ns,
                        .smaller_at_ns = UINT64_MAX};
    r->n_reading++;
    r->bytes_reading += slot->bytes;
    /* What waits before it on a slow link is no fault of the read: twice the time that all of it
     * should take. */
    const double queued_ns = bps > 0 ? 2 * (double)r->bytes_reading * 8e9 / bps : 0;
    slot->give_up_ns =
        add_ns(now_ns, config->read_timeout_ms * UINT64_C(1000000) +
                           (queued_ns < 3600e9 ? (uint64_t)queued_ns : UINT64_C(3600000000000)));
    /* With half of what is left of the budget gone, a smaller level may still be in time. */
    if (load->plan->level_plus_1 == 0 && load->plan->policy == CG_POLICY_TTFT_BUDGET &&
        !chunk->asked_smaller && load->deadline_ns > now_ns)
        slot->smaller_at_ns = now_ns + (load->deadline_ns - now_ns) / 2;
    cg_load_read_begun(chunk, now_ns);
    return slot;
}

/* With the lock held. */
static read_slot *next_read(reader *r)
{
    cachegen_load *load = next_load(r->rt);
    if (load == NULL)
        return NULL;
    const uint8_t level = cg_load_level(load);
    if (!has_room(r, load->sizes[load->next_index].bytes[level]))
        return NULL;
    return open_slot(r, &load->chunks[load->next_index++], level);
}

/* With the lock held: a chunk that is late and has a smaller level. */
static read_slot *late_read(reader *r, uint64_t now_ns)
{
    for (uint32_t i = 0; i < r->depth; i++) {
        read_slot *slot = &r->slots[i];
        if (slot->user == 0 || now_ns < slot->smaller_at_ns)
            continue;
        slot->smaller_at_ns = UINT64_MAX;
        cg_load_chunk *chunk = slot->chunk;
        const cachegen_load *load = chunk->load;
        const uint8_t smallest = cg_controller_nearest(&load->sizes[chunk->index], CG_L3);
        if (chunk->state != CG_LOAD_READING || chunk->asked_smaller || load->cancelled ||
            load->op.done || load->sizes[chunk->index].bytes[smallest] >= slot->bytes ||
            r->n_reading >= r->depth)
            continue;
        chunk->asked_smaller = true;
        return open_slot(r, chunk, smallest);
    }
    return NULL;
}

/* With the lock held: forgets a slot. True: the chunk's job is to be submitted. */
static bool close_slot(reader *r, read_slot *slot, cg_status status, cg_io_buffer *buffer,
                       uint64_t completed_ns)
{
    cg_load_chunk *chunk = slot->chunk;
    const uint8_t level = slot->level;
    r->n_reading--;
    r->bytes_reading -= slot->bytes;
    slot->user = 0;
    return cg_load_read_ended(chunk, level, status, buffer, completed_ns);
}

/* Without the lock. */
static void submit_read(reader *r, const read_slot *entered)
{
    const read_slot slot = *entered;
    const cachegen_load *load = slot.chunk->load; /* kept by the read's reference */
    const cachegen *c = load->op.connector;
    const cg_geometry *g = &c->model.geometry;
    const uint64_t raw_bytes =
        cg_geometry_elements(g, load->sizes[slot.chunk->index].n_tokens) * cg_dtype_bytes(g->dtype);
    cg_status status = CG_ERR_BUFFER_TOO_SMALL;
    if (slot.bytes <= 2 * raw_bytes + (1 << 20)) /* else no chunk is that large */
        status = cg_store_read(c->store, r->io, &load->plan->keys[slot.chunk->index + 1],
                               (cg_level)slot.level, &c->model.profile_fingerprint, slot.bytes,
                               (cg_io_cache)c->config->io_cache, slot.user);
    if (status == CG_OK)
        return;
    pthread_mutex_lock(&r->rt->lock);
    close_slot(r, &r->slots[entered - r->slots], status, NULL, cg_now_ns());
    pthread_mutex_unlock(&r->rt->lock);
}

static void submit_all(reader *r)
{
    read_slot *slot;
    do {
        pthread_mutex_lock(&r->rt->lock);
        if ((slot = late_read(r, cg_now_ns())) == NULL)
            slot = next_read(r);
        pthread_mutex_unlock(&r->rt->lock);
        if (slot != NULL)
            submit_read(r, slot);
    } while (slot != NULL);
}

static void take_completion(reader *r, const cg_io_completion *done)
{
    cg_runtime *rt = r->rt;
    cg_load_chunk *ready = NULL;
    pthread_mutex_lock(&rt->lock);
    for (uint32_t i = 0; i < r->depth; i++) {
        read_slot *slot = &r->slots[i];
        if (slot->user != done->user)
            continue;
        cg_load_chunk *chunk = slot->chunk;
        if (done->status == CG_OK)
            cg_link_meter_add(&rt->speeds.meter, done->file_bytes, slot->submitted_ns,
                              done->completed_ns, r->n_reading > 1, &rt->speeds.link);
        if (close_slot(r, slot, done->status, done->buffer, done->completed_ns))
            ready = chunk;
        break;
    }
    pthread_mutex_unlock(&rt->lock);
    if (ready != NULL)
        cg_load_submit(ready);
}

/* Gives up reads whose time is over; returns how long to wait for the next completion. */
static uint64_t watch(reader *r)
{
    uint64_t wake_ns = UINT64_MAX;
    const uint64_t now_ns = cg_now_ns();
    for (uint32_t i = 0; i < r->depth; i++) {
        read_slot *slot = &r->slots[i];
        if (slot->user == 0)
            continue;
        if (now_ns >= slot->give_up_ns) {
            slot->give_up_ns = UINT64_MAX;
            cg_io_abandon(r->io, slot->user);
            pthread_mutex_lock(&r->rt->lock);
            r->rt->stats.abandoned_reads++;
            pthread_mutex_unlock(&r->rt->lock);
            wake_ns = now_ns;
        }
        wake_ns = slot->give_up_ns < wake_ns ? slot->give_up_ns : wake_ns;
        wake_ns = slot->smaller_at_ns < wake_ns ? slot->smaller_at_ns : wake_ns;
    }
    if (wake_ns == UINT64_MAX)
        return UINT64_MAX;
    return wake_ns > now_ns ? wake_ns - now_ns : 0;
}

/* Without an io there is nothing to wait on: every load fails until the connector closes. */
static void refuse_all(cg_runtime *rt, cg_status status)
{
    for (cachegen_load *load = rt->loads, *next; load != NULL; load = next) {
        next = load->next;
        load->progress.status = status;
        load->fail_index = load->whole_index;
        rt->stats.chunks_io_error++;
        cg_load_settle(load);
    }
}

void *cg_load_reader(void *argument)
{
    cg_runtime *rt = argument;
    const cg_io_config io_config = cg_runtime_io_config(rt->connector);
    reader r = {.rt = rt, .depth = rt->connector->config->queue_depth};
    cg_io_completion completions[MAX_COMPLETIONS];
    cg_status status = cg_io_new(&io_config, &r.io);
    if (status == CG_OK && (r.slots = calloc(r.depth, sizeof *r.slots)) == NULL)
        status = CG_ERR_NO_MEMORY;

    pthread_mutex_lock(&rt->lock);
    if (status == CG_OK) {
        rt->reader_io = r.io;
    } else {
        refuse_all(rt, status);
        if (!rt->stop) { /* the next load tries anew; else somebody joins */
            rt->reader.started = false;
            pthread_detach(pthread_self());
        }
    }
    while (status == CG_OK && !rt->stop) {
        pthread_mutex_unlock(&rt->lock);
        submit_all(&r);
        const uint64_t timeout_ns = watch(&r);
        size_t n = 0;
        cg_io_wait(r.io, timeout_ns, completions, MAX_COMPLETIONS, &n);
        for (size_t i = 0; i < n; i++)
            take_completion(&r, &completions[i]);
        pthread_mutex_lock(&rt->lock);
    }
    if (status == CG_OK) {
        rt->reader_io = NULL;
        for (uint32_t i = 0; i < r.depth; i++)
            if (r.slots[i].user != 0) /* of loads that are done already; cg_io_free() cancels it */
                close_slot(&r, &r.slots[i], CG_ERR_CANCELLED, NULL, cg_now_ns());
    }
    pthread_mutex_unlock(&rt->lock);
    cg_io_free(r.io, GRACE_MS * UINT64_C(1000000));
    free(r.slots);
    return NULL;
}
