#include "connector/stream_plan.h"

#include <stdlib.h>
#include <string.h>

enum { WINDOW_MS = 250, MIN_READS = 2 };
static const double MOST_QUEUED_NS = 3600e9; /* an hour: keeps the sum below within its type */

static uint64_t add_ns(uint64_t a, uint64_t b)
{
    return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

cg_status cg_stream_plan_init(cg_stream_plan *plan, uint32_t depth, uint64_t staging_bytes,
                              uint64_t read_timeout_ns)
{
    *plan = (cg_stream_plan){.depth = depth,
                             .staging_bytes = staging_bytes,
                             .read_timeout_ns = read_timeout_ns,
                             .reads = calloc(depth, sizeof *plan->reads)};
    return plan->reads != NULL ? CG_OK : CG_ERR_NO_MEMORY;
}

void cg_stream_plan_destroy(cg_stream_plan *plan)
{
    free(plan->reads);
    plan->reads = NULL;
}

cg_status cg_stream_init(cg_stream *stream, uint32_t n_chunks)
{
    *stream = (cg_stream){.n_chunks = n_chunks,
                          .ends_at_ns = UINT64_MAX,
                          .levels = calloc(n_chunks + (size_t)1, sizeof *stream->levels),
                          .sizes = calloc(n_chunks + (size_t)1, sizeof *stream->sizes),
                          .chunks = calloc(n_chunks + (size_t)1, sizeof *stream->chunks)};
    cg_stream_cut(stream, 0, n_chunks);
    if (stream->levels != NULL && stream->sizes != NULL && stream->chunks != NULL)
        return CG_OK;
    cg_stream_destroy(stream);
    return CG_ERR_NO_MEMORY;
}

void cg_stream_destroy(cg_stream *stream)
{
    free(stream->levels);
    free(stream->sizes);
    free(stream->chunks);
    stream->levels = NULL;
    stream->sizes = NULL;
    stream->chunks = NULL;
}

void cg_stream_cut(cg_stream *stream, uint32_t first, uint32_t end)
{
    stream->first = stream->next_index = first;
    stream->end = stream->first_failed = end;
}

void cg_stream_plan_add(cg_stream_plan *plan, cg_stream *stream)
{
    stream->next = plan->streams;
    plan->streams = stream;
}

void cg_stream_plan_remove(cg_stream_plan *plan, cg_stream *stream)
{
    for (cg_stream **at = &plan->streams; *at != NULL; at = &(*at)->next)
        if (*at == stream) {
            *at = stream->next;
            return;
        }
}

bool cg_stream_wants(const cg_stream *stream, uint32_t chunk_index)
{
    return !stream->is_cancelled && chunk_index < stream->first_failed;
}

bool cg_stream_is_settled(const cg_stream *stream)
{
    return stream->is_cancelled || stream->first + stream->n_whole >= stream->first_failed;
}

/* The stream whose next chunk is read next. */
static cg_stream *most_urgent(const cg_stream_plan *plan)
{
    cg_stream *best = NULL;
    for (cg_stream *stream = plan->streams; stream != NULL; stream = stream->next)
        if (cg_stream_wants(stream, stream->next_index) &&
            (best == NULL || stream->deadline_ns < best->deadline_ns))
            best = stream;
    return best;
}

/* The level to read the stream's next chunk at. The rest is decided anew when the link was measured
 * since; how much is loaded was decided before, so the controller gets no speed of recomputing. */
static uint8_t next_level(cg_stream *stream, const cg_speeds *speeds, uint64_t now_ns)
{
    const uint32_t i = stream->next_index;
    const double link_bps = cg_estimator_bps(&speeds->link);
    const uint32_t generation = speeds->link.generation;
    if (!stream->has_fixed_level && link_bps > 0 &&
        (!stream->is_decided || stream->decided_generation != generation)) {
        const uint64_t deadline_ns = stream->deadline_ns;
        cg_controller_input input = {.policy = stream->policy,
                                     .chunks = stream->sizes + i,
                                     .n_chunks = stream->end - i,
                                     .budget_ns = deadline_ns > now_ns ? deadline_ns - now_ns : 0,
                                     .link_bps = link_bps};
        cg_speeds_decode(speeds, input.decode_ns_per_token);
        cg_controller_decide(&input, stream->levels + i);
        stream->is_decided = true;
        stream->decided_generation = generation;
    }
    return stream->levels[i];
}

/* Whether one more read of n_bytes is wise now. */
static bool has_room(const cg_stream_plan *plan, double link_bps, uint64_t n_bytes)
{
    if (plan->n_reading == 0)
        return true;
    if (plan->n_reading >= plan->depth)
        return false;
    if (!(link_bps > 0)) /* the first chunk tells how fast the link is; until then nothing is
                            staked on a guess */
        return false;
    if (plan->n_reading >= MIN_READS &&
        (double)(plan->bytes_reading + n_bytes) > link_bps / 8 * WINDOW_MS / 1000)
        return false;
    return plan->bytes_reading + n_bytes + plan->bytes_decoding <= plan->staging_bytes;
}

/* Enters a read into a free place. */
static cg_stream_read *begin_read(cg_stream_plan *plan, cg_stream *stream, uint32_t chunk_index,
                                  uint8_t level, double link_bps, uint64_t now_ns)
{
    cg_stream_chunk *chunk = &stream->chunks[chunk_index];
    cg_stream_read *read = plan->reads;
    while (read->id != 0)
        read++;
    *read = (cg_stream_read){.id = ++plan->last_id,
                             .stream = stream,
                             .chunk_index = chunk_index,
                             .level = level,
                             .bytes = stream->sizes[chunk_index].bytes[level],
                             .submitted_ns = now_ns,
                             .smaller_at_ns = UINT64_MAX};
    plan->n_reading++;
    plan->bytes_reading += read->bytes;
    double queued_ns = link_bps > 0 ? 2 * (double)plan->bytes_reading * 8e9 / link_bps : 0;
    if (queued_ns > MOST_QUEUED_NS)
        queued_ns = MOST_QUEUED_NS;
    read->give_up_ns = add_ns(now_ns, plan->read_timeout_ns + (uint64_t)queued_ns);
    if (read->give_up_ns > stream->ends_at_ns)
        read->give_up_ns = stream->ends_at_ns;
    if (!stream->has_fixed_level && stream->policy == CG_POLICY_TTFT_BUDGET &&
        !chunk->asked_smaller && stream->deadline_ns > now_ns)
        read->smaller_at_ns = now_ns + (stream->deadline_ns - now_ns) / 2;
    chunk->state = CG_STREAM_READING;
    chunk->n_reads++;
    return read;
}

/* A chunk that is late and has a smaller level is asked for again. */
static cg_stream_read *late_read(cg_stream_plan *plan, double link_bps, uint64_t now_ns)
{
    for (uint32_t i = 0; i < plan->depth; i++) {
        cg_stream_read *read = &plan->reads[i];
        if (read->id == 0 || now_ns < read->smaller_at_ns)
            continue;
        read->smaller_at_ns = UINT64_MAX;
        cg_stream *stream = read->stream;
        const uint32_t index = read->chunk_index;
        cg_stream_chunk *chunk = &stream->chunks[index];
        const uint8_t smallest = cg_controller_nearest(&stream->sizes[index], CG_L3);
        if (chunk->state != CG_STREAM_READING || chunk->asked_smaller ||
            !cg_stream_wants(stream, index) ||
            stream->sizes[index].bytes[smallest] >= read->bytes || plan->n_reading >= plan->depth)
            continue;
        chunk->asked_smaller = true;
        return begin_read(plan, stream, index, smallest, link_bps, now_ns);
    }
    return NULL;
}

/* The read begins: the link's meter counts it from here on. */
static const cg_stream_read *metered(cg_stream_read *read, cg_speeds *speeds)
{
    if (read != NULL)
        read->meter_mark = cg_link_meter_begin(&speeds->meter, read->submitted_ns);
    return read;
}

const cg_stream_read *cg_stream_next_read(cg_stream_plan *plan, cg_speeds *speeds, uint64_t now_ns)
{
    const double link_bps = cg_estimator_bps(&speeds->link);
    cg_stream_read *late = late_read(plan, link_bps, now_ns);
    cg_stream *stream = late == NULL ? most_urgent(plan) : NULL;
    if (stream == NULL)
        return metered(late, speeds);
    const uint8_t level = next_level(stream, speeds, now_ns);
    if (!has_room(plan, link_bps, stream->sizes[stream->next_index].bytes[level]))
        return NULL;
    return metered(begin_read(plan, stream, stream->next_index++, level, link_bps, now_ns), speeds);
}

static cg_stream_read *find(const cg_stream_plan *plan, uint64_t id)
{
    for (uint32_t i = 0; i < plan->depth; i++)
        if (plan->reads[i].id == id && id != 0)
            return &plan->reads[i];
    return NULL;
}

const cg_stream_read *cg_stream_find_read(const cg_stream_plan *plan, uint64_t id)
{
    return find(plan, id);
}

const cg_stream_read *cg_stream_give_up(cg_stream_plan *plan, uint64_t now_ns)
{
    for (uint32_t i = 0; i < plan->depth; i++) {
        cg_stream_read *read = &plan->reads[i];
        if (read->id != 0 && now_ns >= read->give_up_ns) {
            read->give_up_ns = UINT64_MAX;
            return read;
        }
    }
    return NULL;
}

cg_stream *cg_stream_overdue(cg_stream_plan *plan, uint64_t now_ns)
{
    for (cg_stream *stream = plan->streams; stream != NULL; stream = stream->next)
        if (now_ns >= stream->ends_at_ns) {
            stream->ends_at_ns = UINT64_MAX;
            return stream;
        }
    return NULL;
}

uint32_t cg_stream_first_missing(const cg_stream *stream)
{
    uint32_t i = stream->first;
    while (i < stream->end && (stream->chunks[i].state == CG_STREAM_DECODING ||
                               stream->chunks[i].state == CG_STREAM_DONE))
        i++;
    return i;
}

uint64_t cg_stream_wake_ns(const cg_stream_plan *plan)
{
    uint64_t wake_ns = UINT64_MAX;
    for (const cg_stream *stream = plan->streams; stream != NULL; stream = stream->next)
        wake_ns = stream->ends_at_ns < wake_ns ? stream->ends_at_ns : wake_ns;
    for (uint32_t i = 0; i < plan->depth; i++) {
        const cg_stream_read *read = &plan->reads[i];
        if (read->id == 0)
            continue;
        wake_ns = read->give_up_ns < wake_ns ? read->give_up_ns : wake_ns;
        wake_ns = read->smaller_at_ns < wake_ns ? read->smaller_at_ns : wake_ns;
    }
    return wake_ns;
}

cg_stream_verdict cg_stream_read_ended(cg_stream_plan *plan, cg_speeds *speeds, uint64_t id,
                                       uint64_t n_bytes, uint64_t ended_ns)
{
    cg_stream_read *read = find(plan, id);
    if (read == NULL)
        return CG_STREAM_DROP;
    cg_stream *stream = read->stream;
    cg_stream_chunk *chunk = &stream->chunks[read->chunk_index];
    plan->n_reading--;
    plan->bytes_reading -= read->bytes;
    stream->link_ns += cg_link_meter_end(&speeds->meter, read->meter_mark, n_bytes,
                                         read->submitted_ns, ended_ns, &speeds->link);
    read->id = 0;
    chunk->n_reads--;
    if (chunk->state != CG_STREAM_READING || !cg_stream_wants(stream, read->chunk_index))
        return CG_STREAM_DROP;
    if (n_bytes == 0)
        return chunk->n_reads == 0 ? CG_STREAM_FAIL : CG_STREAM_DROP;
    chunk->state = CG_STREAM_DECODING;
    chunk->level = read->level;
    plan->bytes_decoding += read->bytes;
    return CG_STREAM_DECODE;
}

bool cg_stream_decode_ended(cg_stream_plan *plan, cg_stream *stream, uint32_t chunk_index,
                            bool has_succeeded)
{
    cg_stream_chunk *chunk = &stream->chunks[chunk_index];
    plan->bytes_decoding -= stream->sizes[chunk_index].bytes[chunk->level];
    chunk->state = CG_STREAM_FAILED;
    if (!has_succeeded || !cg_stream_wants(stream, chunk_index))
        return false;
    chunk->state = CG_STREAM_DONE;
    while (stream->first + stream->n_whole < stream->end &&
           stream->chunks[stream->first + stream->n_whole].state == CG_STREAM_DONE)
        stream->n_whole++;
    return true;
}

bool cg_stream_failed(cg_stream *stream, uint32_t chunk_index)
{
    stream->chunks[chunk_index].state = CG_STREAM_FAILED;
    if (stream->is_cancelled || chunk_index >= stream->first_failed)
        return false;
    stream->first_failed = chunk_index;
    return true;
}
