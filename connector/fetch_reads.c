#include "connector/fetch_reads.h"

#include "codec/chunk.h"

enum { SILENT_MS = 500 }; /* a load that is late may wait so long for the next bytes */
static const double MOST_QUEUED_NS = 3600e9; /* an hour: keeps the sum below within its type */

void cg_fetch_let_go(cg_fetch_plan *plan, cg_fetch *fetch, const cg_fetch_chunk *chunk)
{
    plan->bytes_held -= chunk->held_bytes;
    fetch->bytes_held -= chunk->held_bytes;
}

void cg_fetch_end_reads(cg_fetch_plan *plan, const cg_fetch *fetch, uint64_t until_ns)
{
    for (uint32_t i = 0; i < plan->window.depth; i++) {
        cg_fetch_read *read = &plan->reads[i];
        const bool waits = read->give_up_ns > until_ns && read->give_up_ns < UINT64_MAX;
        if (read->id != 0 && read->fetch == fetch && waits)
            read->give_up_ns = until_ns;
    }
}

bool cg_fetch_is_reading(const cg_fetch_plan *plan, const cg_fetch *fetch)
{
    for (uint32_t i = 0; i < plan->window.depth; i++)
        if (plan->reads[i].id != 0 && plan->reads[i].fetch == fetch)
            return true;
    return false;
}

static bool any_decodable(const cg_fetch_plan *plan)
{
    for (const cg_fetch *fetch = plan->fetches; fetch != NULL; fetch = fetch->next)
        for (uint32_t i = cg_fetch_first_held(fetch); i < fetch->wanted_end; i++)
            if (cg_fetch_is_decodable(fetch, i))
                return true;
    return false;
}

/* Whether there is memory for n_bytes more. Where only decoding makes room, it is asked for. */
static bool has_memory(cg_fetch_plan *plan, uint64_t n_bytes)
{
    if (plan->window.bytes_reading + plan->bytes_held + plan->bytes_decoding + n_bytes <=
        plan->staging_bytes)
        return true;
    /* Something ends by itself and makes room. */
    if (plan->window.n_reading > 0 || plan->bytes_decoding > 0)
        return false;
    if (any_decodable(plan))
        plan->must_free_bytes = plan->bytes_held + n_bytes - plan->staging_bytes;
    /* Nothing that is held could be decoded: one read is begun all the same, or all would wait for
     * ever. */
    return plan->must_free_bytes == 0;
}

/* Whether one more read of n_bytes is wise now. */
static bool has_room(cg_fetch_plan *plan, const cg_fetch *fetch, uint32_t index,
                     const cg_speeds *speeds, double link_bps, uint64_t n_bytes)
{
    if (plan->window.n_reading >= plan->window.depth || !has_memory(plan, n_bytes))
        return false;
    /* What is behind it in the plan waits, too, so that loads by the paper's policy have one read
     * together. With one each more of them were late (tests/bench/results, "Streaming"). */
    if (cg_fetch_is_papers(fetch) && cg_fetch_is_reading(plan, fetch))
        return false;
    return cg_fetch_window_has_room(&plan->window, fetch, index, speeds, link_bps, n_bytes);
}

/* Twice what the link takes for all that is under way: a read is not to blame for what a slow link
 * moves before it. */
static uint64_t queued_ns(const cg_fetch_plan *plan, double link_bps)
{
    const double ns = link_bps > 0 ? 2 * (double)plan->window.bytes_reading * 8e9 / link_bps : 0;
    return (uint64_t)(ns < MOST_QUEUED_NS ? ns : MOST_QUEUED_NS);
}

/* Enters a read of a chunk's file up to end_bytes into a free place. */
static const cg_fetch_read *enter_read(cg_fetch_plan *plan, cg_fetch_ref ref, uint8_t file_level,
                                       uint64_t end_bytes, cg_speeds *speeds, uint64_t now_ns)
{
    cg_fetch_chunk *chunk = &ref.fetch->chunks[ref.chunk_index];
    cg_fetch_read *read = plan->reads;
    while (read->id != 0)
        read++;
    *read = (cg_fetch_read){
        .id = ++plan->last_id,
        .fetch = ref.fetch,
        .chunk_index = ref.chunk_index,
        .file_level = file_level,
        .from = chunk->asked_bytes,
        .bytes = end_bytes - chunk->asked_bytes,
        .submitted_ns = now_ns,
        .meter_mark = cg_link_meter_begin(&speeds->meter, end_bytes - chunk->asked_bytes, now_ns)};
    if (chunk->state == CG_FETCH_WAITING) {
        chunk->state = CG_FETCH_READING;
        chunk->file_level = file_level;
        chunk->good_bytes = UINT64_MAX;
    }
    chunk->asked_bytes = end_bytes;
    chunk->n_reads++;
    ref.fetch->todo.is_counted = false;
    if (plan->window.n_reading++ == 0) {
        plan->quiet_since_ns = now_ns;
        if (!plan->has_failed)
            plan->alive_ns = now_ns;
    }
    plan->window.bytes_reading += read->bytes;
    const uint64_t least_ns = SILENT_MS * UINT64_C(1000000);
    plan->patience_ns = queued_ns(plan, cg_fetch_measured_bps(speeds));
    if (plan->patience_ns < least_ns)
        plan->patience_ns = least_ns;
    /* Or when its fetch ends (connector/fetch_exit.h). */
    read->give_up_ns = cg_fetch_add_ns(
        now_ns, plan->read_timeout_ns + queued_ns(plan, cg_estimator_bps(&speeds->link)));
    return read;
}

/* The name to read of a chunk, for it to have a level: of a nested file the finest. */
static uint8_t file_of(const cg_fetch *fetch, uint32_t index, uint8_t level)
{
    if (!cg_fetch_is_anytime(fetch) || !fetch->chunks[index].is_nested || level == CG_L0)
        return level;
    uint8_t finest = CG_L1;
    while (fetch->sizes[index].bytes[finest] == 0)
        finest++;
    return finest;
}

/* What a chunk whose sizes are guessed has in any case: half of what its coarsest level is thought
 * to have, or the header where a file has not even that. It is read alone. */
static uint64_t sure_bytes(const cg_fetch *fetch, uint32_t index)
{
    const uint64_t half = fetch->sizes[index].bytes[cg_fetch_floor(fetch, index)] / 2;
    if (fetch->chunks[index].is_short)
        return CG_CHUNK_FIXED_BYTES;
    return half < CG_FETCH_PAGE_BYTES ? CG_FETCH_PAGE_BYTES
                                      : half / CG_FETCH_PAGE_BYTES * CG_FETCH_PAGE_BYTES;
}

/* Whether a range of a chunk's file waits until another one of it has ended: the first, which opens
 * the file and says how long it is, or while the link is unknown each: what is under way then is of
 * different files. Opening it again would cost what is under way. Over a fast link that is over
 * soon, and of a far store the look-up has opened the file. */
static bool waits_for_file(const cg_fetch_chunk *chunk, const cg_speeds *speeds, double link_bps)
{
    return chunk->n_reads > 0 &&
           (chunk->is_guessed || !(link_bps > 0) ||
            (chunk->arrived_bytes == 0 && cg_fetch_opens_alone(speeds, link_bps)));
}

cg_fetch_extent cg_fetch_next_extent(cg_fetch_plan *plan, const cg_speeds *speeds, double link_bps)
{
    for (; plan->next_extent < plan->planned.n_extents; plan->next_extent++) {
        const cg_extent *planned = &plan->planned.extents[plan->next_extent];
        const cg_fetch_ref ref = plan->refs[planned->chunk];
        if (ref.fetch == NULL)
            continue;
        const cg_fetch_chunk *chunk = &ref.fetch->chunks[ref.chunk_index];
        const uint64_t to = ref.fetch->sizes[ref.chunk_index].bytes[planned->level];
        const uint8_t file_level = file_of(ref.fetch, ref.chunk_index, planned->level);
        /* A plan that stands may be of a chunk whose file was found not to be nested since. */
        const bool is_planned = file_level != planned->level || planned->level == chunk->planned;
        if (cg_fetch_wants(ref.fetch, ref.chunk_index) && chunk->state <= CG_FETCH_READING &&
            !chunk->is_cut && chunk->asked_bytes < to && !waits_for_file(chunk, speeds, link_bps) &&
            (chunk->state == CG_FETCH_WAITING ? is_planned : chunk->file_level == file_level))
            return (cg_fetch_extent){ref, file_level, to};
    }
    return (cg_fetch_extent){0};
}

const cg_fetch_read *cg_fetch_begin_read(cg_fetch_plan *plan, const cg_fetch_extent *extent,
                                         cg_speeds *speeds, double link_bps, uint64_t now_ns)
{
    const cg_fetch *fetch = extent->ref.fetch;
    const uint32_t index = extent->ref.chunk_index;
    const uint64_t file_bytes = extent->file_level == CG_L0 || !cg_fetch_is_anytime(fetch)
                                    ? extent->to
                                    : cg_fetch_file_bytes(fetch, index, extent->file_level);
    const uint64_t range_bytes = cg_fetch_range_bytes(&plan->window, fetch, index, speeds, link_bps,
                                                      plan->planned.has_slack);
    uint64_t end_bytes = cg_fetch_range_end(fetch, index, extent->to, file_bytes, range_bytes);
    if (fetch->chunks[index].is_guessed && end_bytes > sure_bytes(fetch, index))
        end_bytes = sure_bytes(fetch, index);
    if (!has_room(plan, fetch, index, speeds, link_bps,
                  end_bytes - fetch->chunks[index].asked_bytes))
        return NULL;
    return enter_read(plan, extent->ref, extent->file_level, end_bytes, speeds, now_ns);
}

static cg_fetch_read *find(const cg_fetch_plan *plan, uint64_t id)
{
    for (uint32_t i = 0; i < plan->window.depth; i++)
        if (plan->reads[i].id == id && id != 0)
            return &plan->reads[i];
    return NULL;
}

const cg_fetch_read *cg_fetch_find_read(const cg_fetch_plan *plan, uint64_t id)
{
    return find(plan, id);
}

/* What has arrived without a gap: up to the first range that is under way or could not be had. */
static void count_arrived(const cg_fetch_plan *plan, const cg_fetch *fetch, uint32_t index)
{
    cg_fetch_chunk *chunk = &fetch->chunks[index];
    chunk->arrived_bytes =
        chunk->asked_bytes < chunk->good_bytes ? chunk->asked_bytes : chunk->good_bytes;
    for (uint32_t i = 0; i < plan->window.depth; i++) {
        const cg_fetch_read *read = &plan->reads[i];
        if (read->id != 0 && read->fetch == fetch && read->chunk_index == index &&
            !read->is_stale && read->from < chunk->arrived_bytes)
            chunk->arrived_bytes = read->from;
    }
}

cg_fetch_verdict cg_fetch_read_ended(cg_fetch_plan *plan, cg_speeds *speeds, uint64_t id,
                                     uint64_t n_bytes, uint64_t ended_ns)
{
    cg_fetch_read *place = find(plan, id);
    if (place == NULL)
        return CG_FETCH_DROP;
    const cg_fetch_read read = *place;
    cg_fetch *fetch = read.fetch;
    cg_fetch_chunk *chunk = &fetch->chunks[read.chunk_index];
    place->id = 0;
    plan->window.n_reading--;
    plan->window.bytes_reading -= read.bytes;
    plan->quiet_since_ns = ended_ns;
    plan->has_failed = n_bytes == 0;
    if (n_bytes > 0)
        plan->alive_ns = ended_ns;
    plan->is_stale = true;
    if (cg_link_is_from_memory(n_bytes, cg_fetch_left_ns(ended_ns, read.submitted_ns),
                               speeds->latency_ns))
        fetch->memory_bytes += n_bytes;
    fetch->link_ns += cg_fetch_window_read_ended(&plan->window, speeds, read.meter_mark, n_bytes,
                                                 read.submitted_ns, ended_ns);
    if (!read.is_stale)
        chunk->n_reads--;
    if (read.is_stale || chunk->state != CG_FETCH_READING ||
        !cg_fetch_wants(fetch, read.chunk_index)) {
        fetch->dropped_bytes += n_bytes;
        return CG_FETCH_DROP;
    }
    /* A range that failed ends the chunk where it began. The levels before it are good, so the
     * fetch fails only if there is none. */
    if (n_bytes == 0) {
        chunk->is_cut = true;
        if (read.from < chunk->good_bytes)
            chunk->good_bytes = read.from;
    }
    fetch->todo.is_counted = false;
    chunk->held_bytes += n_bytes;
    fetch->bytes_held += n_bytes;
    plan->bytes_held += n_bytes;
    count_arrived(plan, fetch, read.chunk_index);
    if (n_bytes > 0)
        return CG_FETCH_KEEP;
    return cg_fetch_level_in(fetch, read.chunk_index, chunk->good_bytes) < CG_N_LEVELS
               ? CG_FETCH_DROP
               : CG_FETCH_FAIL;
}

/* Nothing of a chunk counts that has arrived or is under way: it is read from the start again. */
static void start_anew(cg_fetch_plan *plan, cg_fetch *fetch, uint32_t chunk_index,
                       cg_fetch_chunk anew)
{
    for (uint32_t i = 0; i < plan->window.depth; i++) {
        cg_fetch_read *read = &plan->reads[i];
        if (read->id != 0 && read->fetch == fetch && read->chunk_index == chunk_index)
            read->is_stale = true;
    }
    fetch->dropped_bytes += fetch->chunks[chunk_index].held_bytes;
    cg_fetch_let_go(plan, fetch, &fetch->chunks[chunk_index]);
    fetch->chunks[chunk_index] = anew;
    fetch->todo.is_counted = false;
    plan->is_stale = true;
}

void cg_fetch_not_nested(cg_fetch_plan *plan, cg_fetch *fetch, uint32_t chunk_index)
{
    start_anew(plan, fetch, chunk_index, (cg_fetch_chunk){0});
}

bool cg_fetch_shorter(cg_fetch_plan *plan, cg_fetch *fetch, uint32_t chunk_index)
{
    const cg_fetch_chunk *chunk = &fetch->chunks[chunk_index];
    if (chunk->is_sized || chunk->is_short)
        return false;
    start_anew(
        plan, fetch, chunk_index,
        (cg_fetch_chunk){.is_nested = chunk->is_nested, .is_guessed = true, .is_short = true});
    return true;
}

/* Whether a level ends in the file that is read of a chunk. */
static bool is_in_file(const cg_fetch_chunk *chunk, uint8_t level)
{
    return level == chunk->file_level ||
           (chunk->is_nested && chunk->file_level != CG_L0 && level != CG_L0);
}

/* Whether the start of a chunk's file says other sizes than are known of what is read of it. */
static bool has_other_sizes(const cg_fetch *fetch, uint32_t chunk_index,
                            const uint64_t level_bytes[CG_N_LEVELS])
{
    const uint64_t *bytes = fetch->sizes[chunk_index].bytes;
    for (uint8_t level = CG_L0; level < CG_N_LEVELS; level++)
        if (bytes[level] > 0 && is_in_file(&fetch->chunks[chunk_index], level) &&
            bytes[level] != level_bytes[level])
            return true;
    return false;
}

cg_status cg_fetch_sized(cg_fetch_plan *plan, cg_fetch *fetch, uint32_t chunk_index,
                         const uint64_t level_bytes[CG_N_LEVELS])
{
    cg_fetch_chunk *chunk = &fetch->chunks[chunk_index];
    cg_controller_chunk *sizes = &fetch->sizes[chunk_index];
    chunk->is_guessed = false;
    chunk->is_sized = true;
    fetch->todo.is_counted = false;
    plan->is_stale = true;
    if (level_bytes[chunk->file_level] == 0)
        return CG_ERR_NOT_FOUND; /* with its sizes as they are: a chunk of no level cannot be
                                    planned */
    if (chunk->is_short && !has_other_sizes(fetch, chunk_index, level_bytes))
        return CG_ERR_TRUNCATED;
    for (uint8_t level = CG_L0; level < CG_N_LEVELS; level++)
        if (sizes->bytes[level] > 0 && is_in_file(chunk, level))
            sizes->bytes[level] = level_bytes[level];
    fetch->levels[chunk_index] = cg_controller_nearest(sizes, fetch->levels[chunk_index]);
    if (chunk->is_short) /* ranges begin on pages */
        start_anew(plan, fetch, chunk_index,
                   (cg_fetch_chunk){.is_nested = chunk->is_nested, .is_sized = true});
    return CG_OK;
}

bool cg_fetch_replaced(cg_fetch_plan *plan, cg_fetch *fetch, uint32_t chunk_index,
                       const uint64_t level_bytes[CG_N_LEVELS])
{
    cg_fetch_chunk *chunk = &fetch->chunks[chunk_index];
    const bool was_sized = chunk->is_sized;
    chunk->is_sized = true;
    if (was_sized || !has_other_sizes(fetch, chunk_index, level_bytes) ||
        level_bytes[chunk->file_level] == 0)
        return false;
    chunk->is_short = true; /* what was asked for ends where the file before it did */
    return cg_fetch_sized(plan, fetch, chunk_index, level_bytes) == CG_OK;
}
