#include "connector/load_state.h"

#include "connector/clock.h"
#include "connector/fetch_exit.h"
#include "connector/prefix.h"
#include "connector/uses.h"
#include "iouring/store.h"

#include <stdlib.h>
#include <string.h>

/* A store that has brought this process nothing for so long is silent. Where reads failed, what was
 * before counts, too: loads that end sooner than that could not tell. */
static const uint64_t SILENT_NS = 1000000000;

cachegen_load *cg_load_of_fetch(cg_fetch *fetch)
{
    return (cachegen_load *)((char *)fetch - offsetof(cachegen_load, fetch));
}

/* ---- what a trace is told, where there is one ---- */

static double estimated_bps(cg_runtime *rt)
{
    const double bps = cg_estimator_bps(&cg_runtime_speeds(rt)->link);
    cg_runtime_speeds_end(rt);
    return bps;
}

static void trace_plan(cachegen_load *load, uint64_t now_ns)
{
    cg_trace_add_plan(load->trace, &load->fetch, estimated_bps(load->op.runtime), now_ns);
}

/* read_ns: its share of the link's time. */
static void trace_read(cachegen_load *load, const cg_fetch_read *read, cg_status status,
                       uint64_t n_bytes, uint64_t read_ns, uint64_t ended_ns, double link_bps)
{
    const cg_trace_event event = {.kind = CG_TRACE_READ,
                                  .status = status,
                                  .chunk_index = read->chunk_index,
                                  .level = read->file_level,
                                  .began_ns = read->submitted_ns,
                                  .ended_ns = ended_ns,
                                  .from = read->from,
                                  .asked_bytes = read->bytes,
                                  .bytes = n_bytes,
                                  .estimated_bps = link_bps,
                                  .actual_bps =
                                      read_ns > 0 ? (double)n_bytes * 8e9 / (double)read_ns : 0};
    cg_trace_add(load->trace, &event);
}

/* What the load did not wait for: of a store that hangs it is all that there is to see. */
static void trace_open_reads(cachegen_load *load, uint64_t now_ns)
{
    const cg_fetch_plan *plan = &load->op.runtime->fetch_plan;
    for (uint32_t i = 0; i < plan->window.depth; i++)
        if (plan->reads[i].id != 0 && plan->reads[i].fetch == &load->fetch)
            trace_read(load, &plan->reads[i], CG_ERR_CANCELLED, 0, 0, now_ns, 0);
}

/* Before the speeds learn of it. */
static void trace_decode(const cg_load_chunk *chunk)
{
    const cachegen_load *load = chunk->load;
    const cg_controller_chunk *sizes = &load->fetch.sizes[chunk->index];
    const uint8_t level = load->fetch.chunks[chunk->index].level;
    const cg_trace_event event = {.kind = CG_TRACE_DECODE,
                                  .status = chunk->status,
                                  .chunk_index = chunk->index,
                                  .level = level,
                                  .began_ns = chunk->decode_began_ns,
                                  .ended_ns = cg_now_ns(),
                                  .estimated_ns =
                                      cg_speeds_decode_chunk(&load->op.runtime->speeds, level,
                                                             sizes->n_tokens, sizes->bytes[level]),
                                  .thread_ns = (double)chunk->thread_ns};
    cg_trace_add(load->trace, &event);
}

/* Nothing is loaded from a chunk on. */
static void trace_cut(cachegen_load *load, uint32_t chunk_index, cg_status status)
{
    const uint64_t now_ns = cg_now_ns();
    const cg_trace_event event = {.kind = CG_TRACE_CUT,
                                  .status = status,
                                  .chunk_index = chunk_index,
                                  .began_ns = now_ns,
                                  .ended_ns = now_ns};
    if (load->trace != NULL)
        cg_trace_add(load->trace, &event);
}

/* ---- the end ---- */

void cg_load_settle(cachegen_load *load)
{
    cg_runtime *rt = load->op.runtime;
    const cg_fetch *fetch = &load->fetch;
    /* Reads may still be under way: they fill buffers of their own, never the blocks. */
    if (load->op.done || load->n_jobs > 0 || !cg_fetch_is_settled(fetch))
        return;
    cachegen_progress *p = &load->progress;
    p->total_ns = cg_now_ns() - load->op.started_ns;
    /* Cancelled when all was there already is no failure. */
    if (p->status == CACHEGEN_OK && fetch->is_cancelled &&
        fetch->first + fetch->n_whole < fetch->end)
        p->status = CG_ERR_CANCELLED;
    rt->stats.loads++;
    rt->stats.loads_cancelled += p->status == CG_ERR_CANCELLED;
    rt->stats.loads_failed += p->status != CACHEGEN_OK && p->status != CG_ERR_CANCELLED;
    rt->stats.tokens_loaded += p->loaded_tokens - load->from_token;
    load->lost_ns = cg_fetch_engine_lost(&rt->fetch_plan, &load->fetch, &rt->speeds, cg_now_ns());
    if (load->trace != NULL)
        trace_open_reads(load, cg_now_ns());
    cg_fetch_plan_remove(&rt->fetch_plan, &load->fetch);
    p->bytes_dropped = load->fetch.dropped_bytes;
    rt->stats.bytes_dropped += p->bytes_dropped;
    rt->stats.predicted_kl_micronats += p->predicted_kl_micronats;
    for (uint32_t i = 0; i < load->plan->n_chunks; i++)
        cg_load_drop_pieces(&load->chunks[i]);
    if (load->trace != NULL)
        cg_trace_end(load->trace, p);
    load->trace = NULL;
    cg_load_drop_mark(load); /* the handle may outlive the GPU */
    cg_operation_finish(&load->op);
}

/* Counts a refusal; whether it means that the file itself is wrong. */
static bool count_refusal(cachegen_stats *stats, cg_status status)
{
    switch (status) {
    case CG_ERR_NOT_FOUND: stats->chunks_missing++; return false;
    case CG_ERR_LOSSY_PREFIX: stats->chunks_lossy_prefix++; return false;
    case CG_ERR_TIMED_OUT: stats->chunks_timed_out++; return false;
    case CG_ERR_DEVICE: stats->gpu_errors++; return false;
    case CG_ERR_IO:
    case CG_ERR_PERMISSION:
    case CG_ERR_NO_MEMORY:
    case CG_ERR_INVALID_ARGUMENT:
        stats->chunks_io_error++;
        return false; /* the last: a folder or link in its place */
    case CG_ERR_TRUNCATED: stats->chunks_truncated++; return true;
    case CG_ERR_FOREIGN_MODEL: stats->chunks_foreign_model++; return true;
    case CG_ERR_FOREIGN_PROFILE: stats->chunks_foreign_profile++; return true;
    case CG_ERR_FOREIGN_TOKENS: stats->chunks_foreign_tokens++; return true;
    default: stats->chunks_corrupt++; return true;
    }
}

/* Whether a failure says nothing of the chunk. */
static bool is_ours(cg_status status)
{
    return status == CG_ERR_NO_MEMORY || status == CG_ERR_DEVICE;
}

/* Nor does it where the whole store is gone. */
static bool is_gone(const cachegen_load *load, cg_status status)
{
    return status == CG_ERR_IO && cg_store_is_gone(load->op.connector->store);
}

/* Says in the load's progress what ended it. */
static void blame(const cg_load_chunk *chunk, uint8_t levels, cg_status status)
{
    cachegen_progress *p = &chunk->load->progress;
    p->status = status;
    p->failed_token = chunk->load->plan->chunks[chunk->index].first_token;
    p->failed_levels = is_ours(status) || is_gone(chunk->load, status) ? 0 : levels;
    p->failed_worst_level = status == CG_ERR_LOSSY_PREFIX ? chunk->worst_level : 0;
}

void cg_load_drop_pieces(cg_load_chunk *chunk)
{
    for (cg_load_piece *piece = chunk->pieces, *next; piece != NULL; piece = next) {
        next = piece->next;
        cg_io_buffer_release(piece->buffer);
        free(piece);
    }
    chunk->pieces = NULL;
}

void cg_load_drop_mark(cachegen_load *load)
{
    if (load->mark == NULL)
        return;
    /* Of the GPU that made it, also if that is off by now. */
    const cg_gpu *gpu = atomic_load(&load->op.connector->gpu);
    gpu->functions->mark_free(gpu->device, load->mark);
    load->mark = NULL;
}

void cg_load_copy_pieces(const cg_load_chunk *chunk, uint64_t n_bytes, uint8_t *bytes_out)
{
    for (const cg_load_piece *piece = chunk->pieces; piece != NULL; piece = piece->next) {
        if (piece->from >= n_bytes)
            continue; /* of a finer level */
        const uint64_t left_bytes = n_bytes - piece->from;
        memcpy(bytes_out + piece->from, piece->buffer->data,
               piece->buffer->n_bytes < left_bytes ? piece->buffer->n_bytes : left_bytes);
    }
}

/* The levels that are in the file that `level` is read from. */
static uint8_t levels_of_file(const cg_load_chunk *chunk, uint8_t level)
{
    const cg_fetch *fetch = &chunk->load->fetch;
    uint8_t levels = 0;
    if (!fetch->chunks[chunk->index].is_nested || level == CG_L0)
        return (uint8_t)(1u << level);
    for (unsigned l = CG_L1; l < CG_N_LEVELS; l++)
        if (fetch->sizes[chunk->index].bytes[l] > 0)
            levels |= (uint8_t)(1u << l);
    return levels;
}

/* Counts that levels could not be had, and remembers it. */
static void refuse(cg_load_chunk *chunk, uint8_t levels, cg_status status)
{
    cachegen_load *load = chunk->load;
    cg_runtime *rt = load->op.runtime;
    const bool damaged = count_refusal(&rt->stats, status);
    const uint64_t now_ns = cg_now_ns(),
                   until_ns = now_ns + cg_handle_retry_ns(load->op.connector, status,
                                                          now_ns - load->op.started_ns);
    const cg_key *key = &load->plan->keys[chunk->index + 1];
    if (is_ours(status))
        return;
    /* Its name may belong to another file than the one that is open, and so may those of the chunks
     * behind it, which nobody asks any more. */
    if (status != CG_ERR_TIMED_OUT)
        cg_reader_files_forget(cg_link_files(rt->link), load->op.connector->root, key,
                               load->plan->n_chunks - chunk->index);
    if (is_gone(load, status))
        return;
    if (status != CG_ERR_TIMED_OUT)
        cg_prefix_doubt(rt, load->plan, chunk->index, until_ns);
    if (status != CG_ERR_LOSSY_PREFIX) {
        cg_chunk_memory_failed(rt->chunk_memory, key, levels, damaged, until_ns);
        return;
    }
    /* Good for others; chunk->worst_level is its provenance. */
    for (uint8_t level = 0; level < CG_N_LEVELS; level++)
        if ((levels >> level & 1) != 0)
            cg_chunk_memory_provenance(rt->chunk_memory, key, level, chunk->worst_level, until_ns);
}

static void fail(cg_load_chunk *chunk, uint8_t levels, cg_status status)
{
    cachegen_load *load = chunk->load;
    if (!cg_fetch_failed(&load->fetch, chunk->index))
        return; /* nobody waits for it */
    refuse(chunk, levels, status);
    blame(chunk, levels, status);
    trace_cut(load, chunk->index, status);
}

void cg_load_read_begun(cachegen_load *load)
{
    load->op.n_refs++;
    if (load->trace != NULL)
        trace_plan(load, cg_now_ns());
}

/* Whether the start of a chunk's file, which was taken for a nested one, lacks a level. */
static bool is_not_nested(const cachegen_load *load, const cg_fetch_read *read,
                          const cg_chunk_header *header)
{
    const cg_fetch_chunk *chunk = &load->fetch.chunks[read->chunk_index];
    const uint64_t *bytes = load->fetch.sizes[read->chunk_index].bytes;
    if (header == NULL || read->from > 0 || read->is_stale || !chunk->is_nested ||
        read->file_level == CG_L0 || chunk->state != CG_FETCH_READING)
        return false;
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++)
        if (bytes[level] > 0 && header->level_bytes[level] == 0)
            return true;
    return false;
}

/* A look-up's plan has no larger sizes either. */
static bool may_be_chunk(const cg_chunk_header *header)
{
    return header != NULL && header->file_bytes <= CG_STORE_MOST_CHUNK_BYTES;
}

/* A chunk's file is not the one whose sizes are known: it is read anew, and the next look-up asks.
 */
static void begin_anew(cg_load_chunk *chunk, const cg_fetch_read *read)
{
    const cachegen_load *load = chunk->load;
    cg_chunk_memory_exists(load->op.runtime->chunk_memory, &load->plan->keys[chunk->index + 1],
                           levels_of_file(chunk, read->file_level));
    cg_load_drop_pieces(chunk);
}

/* The start of a chunk's file says what was guessed before. False: it is not what was thought to be
 * there, and the chunk has failed. */
static bool take_sizes(cg_load_chunk *chunk, const cg_fetch_read *read,
                       const cg_chunk_header *header)
{
    cachegen_load *load = chunk->load;
    const uint8_t levels = levels_of_file(chunk, read->file_level);
    cg_status status = CG_ERR_CORRUPT;
    if (may_be_chunk(header))
        status = cg_fetch_sized(&load->op.runtime->fetch_plan, &load->fetch, chunk->index,
                                header->level_bytes);
    if (status != CG_OK)
        fail(chunk, levels, status);
    return status == CG_OK;
}

/* A read of a chunk failed: of all that it needs, or only of a refinement. */
static void read_failed(cg_load_chunk *chunk, const cg_fetch_read *read, cg_status status,
                        cg_fetch_verdict verdict)
{
    const cg_fetch *fetch = &chunk->load->fetch;
    const cg_fetch_chunk *state = &fetch->chunks[read->chunk_index];
    /* That a name is missing says nothing of the file's other names. */
    uint8_t levels = status == CG_ERR_NOT_FOUND ? (uint8_t)(1u << read->file_level)
                                                : levels_of_file(chunk, read->file_level);
    if (verdict == CG_FETCH_FAIL) {
        fail(chunk, levels, status);
    } else if (status != CG_ERR_CANCELLED && state->is_cut && state->good_bytes == read->from) {
        /* What was read before is good for a level: only finer ones could not be had. */
        const uint8_t good = cg_fetch_level_in(fetch, read->chunk_index, state->good_bytes);
        refuse(chunk, (uint8_t)(levels & ((1u << good) - 1)), status);
    }
}

void cg_load_read_ended(cg_runtime *rt, const cg_fetch_read *ended, cg_status status,
                        cg_load_piece *piece, const cg_chunk_header *header, uint64_t ended_ns)
{
    const cg_fetch_read read = *ended; /* it is gone once it has ended */
    cachegen_load *load = cg_load_of_fetch(read.fetch);
    cg_load_chunk *chunk = &load->chunks[read.chunk_index];
    const size_t n_bytes = piece != NULL ? piece->buffer->n_bytes : 0;
    /* What the end of this read adds to it is the read's share of the link's time. */
    const double link_ns = load->fetch.link_ns;
    const uint64_t memory_bytes = load->fetch.memory_bytes;
    const double link_bps = load->trace != NULL ? estimated_bps(rt) : 0;
    const cg_fetch_verdict verdict =
        cg_fetch_read_ended(&rt->fetch_plan, cg_runtime_speeds(rt), read.id, n_bytes, ended_ns);
    cg_runtime_speeds_end(rt);
    const uint64_t read_ns = (uint64_t)(load->fetch.link_ns - link_ns),
                   from_memory = load->fetch.memory_bytes - memory_bytes;
    rt->stats.bytes_read += n_bytes;
    rt->stats.read_ns += read_ns;
    /* The progress of a load that is done is final: the engine may have it already. */
    if (!load->op.done) {
        load->progress.bytes_read += n_bytes;
        load->progress.read_ns += read_ns;
        load->progress.bytes_from_memory += from_memory;
        load->progress.memory_ns += from_memory > 0 ? read_ns : 0;
    } else {
        rt->stats.bytes_dropped += n_bytes;
    }
    if (load->trace != NULL)
        trace_read(load, &read, status, n_bytes, read_ns, ended_ns, link_bps);
    if (verdict == CG_FETCH_KEEP) {
        cg_uses_add(rt, &load->plan->keys[read.chunk_index + 1], (cg_level)read.file_level);
        piece->next = chunk->pieces;
        chunk->pieces = piece;
        if (load->fetch.chunks[read.chunk_index].is_guessed) {
            const bool is_anew = load->fetch.chunks[read.chunk_index].is_short;
            if (!take_sizes(chunk, &read, header))
                cg_load_settle(load);
            else if (is_anew)
                cg_load_drop_pieces(chunk);
        } else if (is_not_nested(load, &read, header)) {
            cg_fetch_not_nested(&rt->fetch_plan, &load->fetch, read.chunk_index);
            cg_load_drop_pieces(chunk);
        } else if (read.from == 0 && may_be_chunk(header) &&
                   cg_fetch_replaced(&rt->fetch_plan, &load->fetch, read.chunk_index,
                                     header->level_bytes)) {
            begin_anew(chunk, &read);
        }
    } else {
        if (piece != NULL)
            cg_io_buffer_release(piece->buffer);
        free(piece);
        if (status == CG_ERR_TRUNCATED && verdict == CG_FETCH_FAIL &&
            cg_fetch_shorter(&rt->fetch_plan, &load->fetch, read.chunk_index)) {
            begin_anew(chunk, &read);
            cg_runtime_wake_reader(rt);
        } else if (status != CG_OK) {
            read_failed(chunk, &read, status, verdict);
        }
        cg_load_settle(load);
    }
    /* The read's reference. Jobs keep the load undone, and the connector holds it until then. */
    cg_operation_unref(&load->op);
}

cg_load_chunk *cg_load_decode_begun(cg_fetch *fetch, uint32_t chunk_index)
{
    cachegen_load *load = cg_load_of_fetch(fetch);
    load->n_jobs++;
    if (load->trace != NULL) {
        load->chunks[chunk_index].decode_began_ns = cg_now_ns();
        trace_plan(load, load->chunks[chunk_index].decode_began_ns);
    }
    return &load->chunks[chunk_index];
}

bool cg_load_wants(const cg_load_chunk *chunk)
{
    return cg_fetch_wants(&chunk->load->fetch, chunk->index) && chunk->status == CG_OK;
}

/* Counts a chunk that now belongs to the prefix that is whole in the blocks. */
static void add_to_prefix(cachegen_load *load, const cg_load_chunk *chunk)
{
    cachegen_progress *p = &load->progress;
    const cg_plan_chunk *planned = &load->plan->chunks[chunk->index];
    const uint32_t chunk_end = planned->first_token + planned->sizes.n_tokens;
    p->loaded_tokens = chunk_end < load->to_token ? chunk_end : load->to_token;
    if (chunk->worst_level > p->worst_level)
        p->worst_level = chunk->worst_level;
    const uint8_t level = load->fetch.chunks[chunk->index].level;
    p->chunks_at[level]++;
    load->predicted_kl += cg_fetch_kl(&load->fetch, chunk->index, level);
    p->predicted_kl_micronats = (uint64_t)(1e6 * load->predicted_kl + 0.5);
}

void cg_load_decode_ended(cg_load_chunk *chunk)
{
    cachegen_load *load = chunk->load;
    cg_runtime *rt = load->op.runtime;
    cg_fetch *fetch = &load->fetch;
    const uint8_t level = fetch->chunks[chunk->index].level;
    const uint32_t n_whole = fetch->n_whole;
    load->n_jobs--;
    if (load->trace != NULL)
        trace_decode(chunk);
    /* A chunk that is not wanted any more may have skipped tasks: it does not count as loaded. */
    if (cg_fetch_decode_ended(&rt->fetch_plan, fetch, chunk->index, chunk->status == CG_OK)) {
        if (chunk->thread_ns > 0) /* else nobody knows */
            cg_speeds_add_decode(&rt->speeds, level, fetch->sizes[chunk->index].n_tokens,
                                 chunk->thread_ns);
        rt->stats.chunks_loaded[level]++;
        /* A chunk that was decoded before the one in front of it counts only now. */
        for (uint32_t i = n_whole; i < fetch->n_whole; i++)
            add_to_prefix(load, &load->chunks[fetch->first + i]);
    } else if (chunk->status != CG_OK) {
        fail(chunk, levels_of_file(chunk, level), chunk->status);
    }
    cg_runtime_wake_reader(rt); /* there is room for one more */
    cg_load_settle(load);
}

void cg_load_overdue(cachegen_load *load)
{
    cg_fetch *fetch = &load->fetch;
    const uint32_t index = cg_fetch_first_missing(fetch);
    if (index < fetch->end && cg_fetch_failed(fetch, index)) {
        cg_load_chunk *chunk = &load->chunks[index];
        /* The chunk was late for this request, which is nothing to hold against it: others may have
         * more time, or come sooner. Unless the store is silent. */
        const bool is_silent = load->progress.bytes_read == 0 &&
                               cg_now_ns() - load->op.runtime->fetch_plan.alive_ns >= SILENT_NS;
        load->op.runtime->stats.chunks_timed_out++;
        blame(chunk, is_silent ? levels_of_file(chunk, load->plan->chunks[index].level) : 0,
              CG_ERR_TIMED_OUT);
        trace_cut(load, index, CG_ERR_TIMED_OUT);
    }
    cg_load_settle(load);
}

void cg_load_shorten(cachegen_load *load, uint32_t chunk_index)
{
    if (cg_fetch_failed(&load->fetch, chunk_index)) {
        load->op.runtime->stats.chunks_timed_out++;
        load->op.runtime->stats.loads_shortened++;
        /* No chunk is to blame: it would have come, but later than computing it takes. */
        load->progress.status = CG_ERR_TIMED_OUT;
        trace_cut(load, chunk_index, CG_ERR_TIMED_OUT);
    }
    cg_load_settle(load);
}

void cg_load_cancel(cachegen_load *load)
{
    load->fetch.is_cancelled = true;
    cg_runtime_wake_reader(load->op.runtime);
    cg_load_settle(load);
}

void cg_loads_refuse(cg_runtime *rt, cg_status status)
{
    for (cg_fetch *fetch = rt->fetch_plan.fetches, *next; fetch != NULL; fetch = next) {
        next = fetch->next; /* settling takes it off the list */
        cachegen_load *load = cg_load_of_fetch(fetch);
        load->progress.status = status;
        /* What is whole counts, and nothing else is wanted. */
        cg_fetch_shorten(fetch, fetch->first + fetch->n_whole);
        rt->stats.chunks_io_error++;
        cg_load_settle(load);
    }
}
