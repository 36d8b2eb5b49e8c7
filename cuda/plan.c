/* A chunk's bytes to a list of kernels and what each of their thread blocks does. All checks are
 * made here, on the host, so that kernels need none but those on the words of streams. A plan is
 * written front to back into the caller's memory; nothing is allocated but the section table. The
 * passes of preset klt: cosines and sines; a pass of streams for each level, from the coarsest to
 * the finest; where the profile has a joint matrix, what that gives to the groups; the inverse KLT;
 * and the sinks on top. */
#include "codec/block_order.h"
#include "codec/lossless.h"
#include "codec/lossless_lane.h"
#include "codec/paper.h"
#include "codec/section_plan.h"
#include "cuda/profile_blob.h"

#include <stdlib.h>
#include <string.h>

/* ---- a plan's bytes ---- */

enum { MOST_ROWS = (CG_MAX_CHUNK_TOKENS + CG_DCT - 1) / CG_DCT };

/* The rows of all matrices of symbols of preset klt. */
typedef struct row_plan {
    uint64_t at, runs_at; /* in the plan */
    uint32_t n_runs;
    /* Rows of thread blocks that multiply: CG_CUDA_KLT_BLOCKS each, from these on. Together they
     * hold all wanted blocks of tokens. */
    uint32_t n_parts;
    uint32_t first[(MOST_ROWS + CG_CUDA_KLT_BLOCKS - 1) / CG_CUDA_KLT_BLOCKS];
} row_plan;

/* What is at hand while a plan is written. */
typedef struct planner {
    const cg_cuda_profile *laid; /* NULL at L0 */
    const cg_profile *profile;   /* NULL at L0 */
    const cg_chunk *chunk;
    const cg_section *sections;
    const cg_cuda_request *request;
    uint8_t *bytes;
    size_t n_bytes, left_bytes;
    uint64_t scratch_bytes;
    row_plan rows;
    cg_cuda_plan *plan;
} planner;

/* Zeros, 16-byte aligned; NULL: the plan is full. */
static void *take(planner *p, size_t n_bytes)
{
    const size_t padded = (size_t)cg_padded(n_bytes, 16);
    if (padded > p->left_bytes)
        return NULL;
    uint8_t *out = p->bytes + p->n_bytes;
    memset(out, 0, padded);
    p->n_bytes += padded;
    p->left_bytes -= padded;
    return out;
}

static uint64_t at_of(const planner *p, const void *part)
{
    return (uint64_t)((const uint8_t *)part - p->bytes);
}

static uint64_t take_scratch(planner *p, uint64_t n_bytes)
{
    const uint64_t at = p->scratch_bytes;
    p->scratch_bytes = cg_padded(at + n_bytes, 16);
    return at;
}

static cg_cuda_pass *add_pass(planner *p, uint32_t kind)
{
    cg_cuda_pass *pass = &p->plan->passes[p->plan->n_passes++];
    *pass = (cg_cuda_pass){.kind = kind};
    return pass;
}

/* Thread blocks of jobs that stand one after another. */
typedef struct stream_jobs {
    cg_cuda_stream_job *jobs;
    size_t n, n_room;
} stream_jobs;

static bool take_jobs(planner *p, size_t n_room, stream_jobs *out)
{
    n_room = (size_t)cg_padded(n_room, CG_CUDA_STREAM_WARPS);
    *out = (stream_jobs){take(p, n_room * sizeof *out->jobs), 0, n_room};
    return out->jobs != NULL;
}

/* The next job begins a thread block. */
static void end_block(stream_jobs *jobs)
{
    jobs->n = (size_t)cg_padded(jobs->n, CG_CUDA_STREAM_WARPS);
}

/* A job for each stream of a matrix; *in moves behind it. */
static cg_status add_streams(const planner *p, cg_cursor *in, uint64_t matrix_at,
                             cg_cuda_streams *m, const cg_cuda_stream_job *like, stream_jobs *jobs)
{
    cg_rans_streams streams;
    cg_status status = cg_rans_streams_open(*in, m->n_strips, CG_RANS_ALIGNED, &streams);
    for (uint32_t s = 0; status == CG_OK && s < streams.n_streams; s++) {
        const uint8_t *bytes;
        size_t n_bytes;
        status = cg_rans_streams_next(&streams, &bytes, &n_bytes);
        if (status != CG_OK)
            break;
        /* The lane states are there, and whole words: kernels read both without looking. */
        if (n_bytes < 4 * CG_RANS_LANES || n_bytes % 2 != 0)
            return CG_ERR_CORRUPT;
        cg_cuda_stream_job job = *like;
        job.matrix_at = matrix_at;
        job.stream_at = (uint64_t)(bytes - p->chunk->bytes);
        job.stream_bytes = (uint32_t)n_bytes;
        job.stream = s;
        jobs->jobs[jobs->n++] = job; /* at most a job a strip */
    }
    m->n_streams = streams.n_streams;
    *in = streams.in;
    return status;
}

static void end_streams(const planner *p, cg_cuda_pass *pass, stream_jobs *jobs)
{
    end_block(jobs);
    pass->jobs_at = at_of(p, jobs->jobs);
    pass->n_blocks = (uint32_t)(jobs->n / CG_CUDA_STREAM_WARPS);
    pass->shared_bytes = pass->tables_bytes;
    if (pass->n_blocks == 0) /* CUDA refuses an empty launch; the pass is the last one so far */
        p->plan->n_passes--;
}

static cg_cursor section_bytes(const planner *p, const cg_section *section)
{
    return (cg_cursor){p->chunk->bytes + section->offset, section->bytes};
}

static cg_cuda_target target_of(const planner *p, uint32_t first_layer, uint32_t plane)
{
    const cg_geometry *g = &p->chunk->header.geometry;
    return (cg_cuda_target){.first_layer = first_layer,
                            .plane = plane,
                            .n_kv_heads = g->n_kv_heads,
                            .head_dim = g->head_dim,
                            .head_from = p->request->head_from,
                            .head_to = p->request->head_to,
                            .token_from = p->request->token_from,
                            .token_to = p->request->token_to,
                            .dtype = g->dtype};
}

static cg_cuda_pass *add_lossy_streams(planner *p, uint32_t kind)
{
    cg_cuda_pass *pass = add_pass(p, kind);
    pass->tables_at = p->laid->classes_at;
    /* One more than there are: that of lanes without a column. */
    pass->tables_bytes = (uint32_t)((p->profile->n_classes + 1U) * sizeof(cg_cuda_class));
    return pass;
}

/* ---- exact elements: L0, and sinks ---- */

enum { MOST_EXACT_TABLES = (CG_LOSSLESS_MAX_CLASSES + 1) * sizeof(cg_cuda_class) };

static uint32_t count_exact_strips(size_t n_columns)
{
    return (uint32_t)((n_columns + CG_RANS_LANES - 1) / CG_RANS_LANES);
}

/* Strips of columns one after another: the same for all sections of a width. */
static uint64_t add_exact_strips(planner *p, size_t n_columns)
{
    const uint32_t n_strips = count_exact_strips(n_columns);
    cg_cuda_strip *strips = take(p, n_strips * sizeof *strips);
    if (strips == NULL)
        return 0;
    for (uint32_t s = 0; s < n_strips; s++) {
        const size_t first = (size_t)s * CG_RANS_LANES, left = n_columns - first;
        strips[s] = (cg_cuda_strip){.column = (uint32_t)first,
                                    .class_at = (uint32_t)first,
                                    .n_lanes = (uint8_t)(left < CG_RANS_LANES ? left : 32)};
    }
    return at_of(p, strips);
}

/* A section of exact elements: its tables into the plan, a job for each of its streams. */
static cg_status add_exact(planner *p, const cg_section *section, uint64_t strips_at,
                           size_t n_columns, uint32_t n_rows, cg_cuda_target target,
                           cg_cuda_pass *pass, stream_jobs *jobs)
{
    cg_rans_class classes[CG_LOSSLESS_MAX_CLASSES];
    cg_lossless_head head;
    cg_cursor in = section_bytes(p, section);
    cg_status status = cg_lossless_read_head(target.dtype, in.at, in.left_bytes, n_columns, n_rows,
                                             CG_RANS_ALIGNED, classes, &head);
    if (status != CG_OK)
        return status;
    cg_cuda_exact *m = take(p, sizeof *m);
    cg_cuda_class *tables = take(p, (head.n_classes + 1U) * sizeof *tables);
    if (m == NULL || tables == NULL)
        return CG_ERR_BUFFER_TOO_SMALL;
    for (unsigned k = 0; k < head.n_classes; k++)
        cg_cuda_class_fill(&classes[k], &tables[k]);
    cg_cuda_class_fill_idle(&tables[head.n_classes]);
    m->streams = (cg_cuda_streams){
        .strips_at = strips_at,
        .classes_at =
            head.column_class != NULL ? (uint64_t)(head.column_class - p->chunk->bytes) : 0,
        .n_strips = count_exact_strips(n_columns),
        .n_rows = n_rows,
        .n_classes = head.n_classes};
    m->n_columns = (uint32_t)n_columns;
    m->target = target;
    const cg_cuda_stream_job like = {.tables_at = at_of(p, tables),
                                     .tables_bytes =
                                         (uint32_t)((head.n_classes + 1U) * sizeof *tables)};
    status = add_streams(p, &head.matrix, at_of(p, m), &m->streams, &like, jobs);
    if (status != CG_OK)
        return status;
    end_block(jobs); /* the next section has other classes */
    const size_t low_bytes = n_columns * n_rows * cg_lane_split(target.dtype).low_bytes;
    if (head.matrix.left_bytes != low_bytes)
        return head.matrix.left_bytes < low_bytes ? CG_ERR_TRUNCATED : CG_ERR_CORRUPT;
    m->low_at = (uint64_t)(head.matrix.at - p->chunk->bytes);
    /* Shared memory is of a launch: the most that one of its thread blocks wants. */
    if (like.tables_bytes > pass->tables_bytes)
        pass->tables_bytes = like.tables_bytes;
    return CG_OK;
}

static size_t room_of_exact(size_t n_columns)
{
    return (size_t)cg_padded(count_exact_strips(n_columns), CG_CUDA_STREAM_WARPS);
}

static cg_status plan_lossless(planner *p)
{
    const cg_chunk_header *h = &p->chunk->header;
    const cg_cuda_request *r = p->request;
    const size_t channels = cg_geometry_channels(&h->geometry);
    const uint64_t strips_at = add_exact_strips(p, channels);
    stream_jobs jobs;
    cg_cuda_pass *pass = add_pass(p, CG_CUDA_EXPONENTS);
    if (strips_at == 0 || !take_jobs(p, r->n_groups * CG_N_PLANES * room_of_exact(channels), &jobs))
        return CG_ERR_BUFFER_TOO_SMALL;
    cg_status status = CG_OK;
    for (uint32_t i = 0; i < r->n_groups * CG_N_PLANES && status == CG_OK; i++) {
        const uint32_t task = r->first_group * CG_N_PLANES + i;
        const cg_section *section = &p->sections[cg_section_plan_index(NULL, h, task, CG_L0)];
        status = add_exact(p, section, strips_at, channels, h->n_tokens,
                           target_of(p, task / CG_N_PLANES, task % CG_N_PLANES), pass, &jobs);
    }
    end_streams(p, pass, &jobs);
    return status;
}

/* On top of what the passes before have written: the last pass, as on the CPU. */
static cg_status plan_sinks(planner *p)
{
    const cg_chunk_header *h = &p->chunk->header;
    const cg_cuda_request *r = p->request;
    const uint32_t n_sinks = cg_section_plan_n_sinks(p->profile, h);
    size_t n_room = 0;
    /* The wanted tokens begin behind them. */
    if (n_sinks <= r->token_from)
        return CG_OK;
    for (uint32_t g = r->first_group; g < r->first_group + r->n_groups; g++)
        n_room += CG_N_PLANES *
                  room_of_exact(cg_group_plane_channels(p->profile, &p->profile->groups[g]));
    stream_jobs jobs;
    cg_cuda_pass *pass = add_pass(p, CG_CUDA_EXPONENTS);
    if (!take_jobs(p, n_room, &jobs))
        return CG_ERR_BUFFER_TOO_SMALL;
    cg_status status = CG_OK;
    for (uint32_t g = r->first_group; g < r->first_group + r->n_groups; g++) {
        const cg_group *group = &p->profile->groups[g];
        const size_t n_columns = cg_group_plane_channels(p->profile, group);
        const uint64_t strips_at = add_exact_strips(p, n_columns);
        for (uint32_t plane = 0; plane < CG_N_PLANES && status == CG_OK; plane++) {
            const uint32_t index = cg_section_plan_sinks_index(p->profile, h, g, plane);
            status = strips_at == 0
                         ? CG_ERR_BUFFER_TOO_SMALL
                         : add_exact(p, &p->sections[index], strips_at, n_columns, n_sinks,
                                     target_of(p, group->first_layer, plane), pass, &jobs);
        }
    }
    end_streams(p, pass, &jobs);
    return status;
}

/* ---- preset klt ---- */

static size_t count_wanted(const planner *p)
{
    return (size_t)p->request->n_groups * p->profile->n_matrices;
}

/* Those and the joint one, which all groups need. */
static size_t count_products(const planner *p)
{
    return count_wanted(p) + (p->profile->joint != NULL);
}

/* The n-th wanted matrix; behind them the joint one, which is no task. */
typedef struct wanted {
    const cg_group *group;
    const cg_cuda_matrix *laid;
    uint32_t matrix, task;
} wanted;

static wanted wanted_matrix(const planner *p, size_t n)
{
    if (n == count_wanted(p))
        return (wanted){.group = p->profile->joint,
                        .laid = &p->laid->matrices[p->profile->n_groups * p->profile->n_matrices]};
    const uint32_t n_matrices = p->profile->n_matrices,
                   task = p->request->first_group * n_matrices + (uint32_t)n;
    return (wanted){&p->profile->groups[task / n_matrices], &p->laid->matrices[task],
                    task % n_matrices, task};
}

static const cg_section *section_of(const planner *p, wanted w, unsigned level)
{
    const cg_chunk_header *h = &p->chunk->header;
    return &p->sections[w.group == p->profile->joint
                            ? cg_section_plan_joint_index(p->profile, h, level)
                            : cg_section_plan_index(p->profile, h, w.task, level)];
}

/* Rows begin where tiles of symbols do. */
static void find_parts(planner *p, const cg_cuda_row *rows, uint32_t n_rows)
{
    const uint32_t from = p->request->token_from / CG_DCT,
                   to = cg_count_blocks(p->request->token_to);
    uint32_t end = 0; /* of the parts so far */
    for (uint32_t row = 0; row < n_rows; row++) {
        if (row < end || rows[row].block < from || rows[row].block >= to)
            continue;
        const uint32_t first = row / CG_CUDA_TILE_BLOCKS * CG_CUDA_TILE_BLOCKS;
        p->rows.first[p->rows.n_parts++] = first;
        end = first + CG_CUDA_KLT_BLOCKS;
    }
}

/* The rows' blocks and scales, and their runs. */
static cg_status lay_rows(planner *p)
{
    const uint32_t n_rows = cg_count_blocks(p->chunk->header.n_tokens);
    cg_block_order order;
    cg_cuda_row *rows = take(p, n_rows * sizeof *rows);
    cg_cuda_row_run *runs = take(p, CG_N_SCALES * sizeof *runs);
    if (rows == NULL || runs == NULL)
        return CG_ERR_BUFFER_TOO_SMALL;
    const cg_status status = cg_section_plan_block_order(p->profile, p->chunk, p->sections, &order);
    if (status == CG_OK) {
        for (uint32_t row = 0; row < n_rows; row++)
            rows[row] = (cg_cuda_row){order.block[row], CG_SCALES[order.scale[row]]};
        for (uint32_t r = 0, end = 0; r < order.n_runs; r++) {
            end += (uint32_t)order.runs[r].n_rows;
            runs[r] = (cg_cuda_row_run){end, order.scale[end - 1]};
        }
        p->rows.at = at_of(p, rows);
        p->rows.runs_at = at_of(p, runs);
        p->rows.n_runs = order.n_runs;
        find_parts(p, rows, n_rows);
    }
    cg_block_order_destroy(&order);
    return status;
}

/* Where a matrix's symbols lie, for all passes, and what multiplies them. */
static void lay_product(planner *p, wanted w, cg_cuda_product *m)
{
    const cg_chunk_header *h = &p->chunk->header;
    m->n_rows = cg_count_blocks(h->n_tokens);
    m->n_tile_rows = (m->n_rows + CG_CUDA_TILE_BLOCKS - 1) / CG_CUDA_TILE_BLOCKS;
    uint32_t n_tiles = 0;
    for (unsigned f = 0; f < CG_DCT; f++) {
        m->n_bands[f] = w.laid->n_bands[h->level - 1][f];
        m->tile_at[f] = n_tiles;
        n_tiles += m->n_bands[f] * m->n_tile_rows;
    }
    m->large_at = take_scratch(p, n_tiles); /* all marks come first: they are cleared */
    m->rest_at = w.group->bands[w.matrix].n_shared > 0 ? take_scratch(p, n_tiles) : 0;
    m->n_tiles = n_tiles;
    m->basis_at = w.laid->basis_at;
    m->steps_at = w.laid->steps_at[h->level - 1];
    m->n_steps = w.laid->n_steps[h->level - 1];
    m->n_all_steps = w.laid->n_all_steps;
}

static void lay_cells(planner *p, cg_cuda_product *m)
{
    const uint64_t n_cells = (uint64_t)m->n_tiles * CG_CUDA_TILE_BYTES;
    m->cells_at = take_scratch(p, n_cells * sizeof(int16_t));
    m->digits_at = take_scratch(p, n_cells);
}

/* A pass of streams: those of one level of all products. */
static cg_status plan_klt_level(planner *p, unsigned level, const cg_cuda_product *products)
{
    const cg_chunk_header *h = &p->chunk->header;
    const size_t n = count_products(p);
    const bool is_refined = level < h->coarsest;
    cg_cuda_product *of_level = take(p, n * sizeof *of_level);
    size_t n_room = 0;
    stream_jobs jobs;
    for (size_t i = 0; i < n; i++)
        n_room += wanted_matrix(p, i).laid->strips[level - 1][is_refined].n;
    if (of_level == NULL || !take_jobs(p, n_room, &jobs))
        return CG_ERR_BUFFER_TOO_SMALL;
    cg_cuda_pass *pass = add_lossy_streams(p, CG_CUDA_SYMBOLS);
    cg_status status = CG_OK;
    for (size_t i = 0; i < n && status == CG_OK; i++) {
        const wanted w = wanted_matrix(p, i);
        const cg_cuda_strips *strips = &w.laid->strips[level - 1][is_refined];
        cg_cuda_product *m = &of_level[i];
        *m = products[i];
        m->streams = (cg_cuda_streams){.strips_at = strips->at,
                                       .classes_at = strips->classes_at,
                                       .runs_at = p->rows.runs_at,
                                       .class_of_at = p->laid->class_of_at,
                                       .n_strips = strips->n,
                                       .n_rows = m->n_rows,
                                       .n_classes = p->profile->n_classes,
                                       .n_runs = p->rows.n_runs};
        m->is_finest = level == h->level;
        cg_cursor in = section_bytes(p, section_of(p, w, level));
        const cg_cuda_stream_job none = {0};
        status = add_streams(p, &in, at_of(p, m), &m->streams, &none, &jobs);
        if (status == CG_OK && in.left_bytes > 0)
            status = CG_ERR_CORRUPT;
    }
    end_streams(p, pass, &jobs);
    return status;
}

/* How a matrix's sums become elements. */
static cg_cuda_klt klt_of(const planner *p, wanted w, const cg_cuda_product *product,
                          uint64_t rotation_at)
{
    const cg_chunk_header *h = &p->chunk->header;
    return (cg_cuda_klt){.product = *product,
                         .rows_at = p->rows.at,
                         .mean_at = w.laid->mean_at,
                         .scale_at = w.laid->scale_at[h->level - 1],
                         .layer_rope_at = p->laid->layer_rope_at,
                         .rotation_at = rotation_at,
                         .head_tiles = p->laid->head_tiles,
                         .half = p->profile->rotary_dim / 2,
                         .n_layers = w.group->n_layers,
                         .n_tokens = h->n_tokens,
                         .unit = cg_bands_unit(&w.group->bands[w.matrix], h->level),
                         .target = target_of(p, w.group->first_layer, w.matrix)};
}

/* Tiles of the wanted heads. */
static uint32_t count_tiles(const planner *p, const cg_group *group)
{
    return group->n_slices * (p->request->head_to - p->request->head_from) * p->laid->head_tiles;
}

static uint32_t count_thread_blocks(uint32_t n_tiles)
{
    return (n_tiles + CG_CUDA_KLT_COLUMNS - 1) / CG_CUDA_KLT_COLUMNS;
}

/* Jobs of a pass that multiplies, one behind another. */
typedef struct klt_jobs {
    cg_cuda_klt_job *jobs;
    size_t n;
} klt_jobs;

static size_t count_jobs(const planner *p, uint32_t n_tiles)
{
    return (size_t)p->rows.n_parts * count_thread_blocks(n_tiles);
}

/* Of a matrix's tiles from first_tile to n_tiles. */
static void add_jobs(const planner *p, uint64_t matrix_at, uint32_t first_tile, uint32_t n_tiles,
                     klt_jobs *jobs)
{
    for (uint32_t part = 0; part < p->rows.n_parts; part++) {
        for (uint32_t b = 0; b < count_thread_blocks(n_tiles - first_tile); b++)
            jobs->jobs[jobs->n++] =
                (cg_cuda_klt_job){.matrix_at = matrix_at,
                                  .first_row = p->rows.first[part],
                                  .first_tile = first_tile + b * CG_CUDA_KLT_COLUMNS,
                                  .n_tiles = n_tiles};
    }
}

static void end_jobs(planner *p, uint32_t kind, const klt_jobs *jobs)
{
    cg_cuda_pass *pass = add_pass(p, kind);
    pass->n_blocks = (uint32_t)jobs->n;
    pass->jobs_at = at_of(p, jobs->jobs);
    pass->shared_bytes = CG_CUDA_KLT_SHARED_BYTES;
}

/* product: of the joint matrix; matrices: of the wanted groups. */
static cg_status plan_joint(planner *p, const cg_cuda_product *product, const cg_cuda_klt *matrices)
{
    const cg_profile *profile = p->profile;
    const cg_cuda_request *r = p->request;
    const uint32_t group_tiles = profile->n_shared / CG_CUDA_JOINT_CHANNELS,
                   n_wanted = r->n_groups * group_tiles, first = r->first_group * group_tiles;
    cg_cuda_joint *joint = take(p, sizeof *joint);
    klt_jobs jobs = {take(p, count_jobs(p, n_wanted) * sizeof *jobs.jobs), 0};
    if (joint == NULL || jobs.jobs == NULL)
        return CG_ERR_BUFFER_TOO_SMALL;
    *joint = (cg_cuda_joint){.product = *product,
                             .groups_at = at_of(p, matrices),
                             .first_group = r->first_group,
                             .n_shared = profile->n_shared,
                             .n_bits = profile->joint->bands[0].unit_bits -
                                       profile->fraction_bits[p->chunk->header.level]};
    for (unsigned f = 0; f < CG_DCT; f++)
        joint->n_given[f] = profile->n_given[p->chunk->header.level - 1][f];
    add_jobs(p, at_of(p, joint), first, first + n_wanted, &jobs);
    end_jobs(p, CG_CUDA_JOINT, &jobs);
    return CG_OK;
}

/* Thread blocks of 8 tiles of channels each, of the wanted heads. */
static cg_status plan_synthesis(planner *p, const cg_cuda_klt *matrices)
{
    size_t n_jobs = 0;
    for (size_t i = 0; i < count_wanted(p); i++)
        n_jobs += count_jobs(p, count_tiles(p, wanted_matrix(p, i).group));
    klt_jobs jobs = {take(p, n_jobs * sizeof *jobs.jobs), 0};
    if (jobs.jobs == NULL)
        return CG_ERR_BUFFER_TOO_SMALL;
    for (size_t i = 0; i < count_wanted(p); i++)
        add_jobs(p, at_of(p, &matrices[i]), 0, count_tiles(p, wanted_matrix(p, i).group), &jobs);
    end_jobs(p, CG_CUDA_KLT, &jobs);
    return CG_OK;
}

/* Once for all matrices of a chunk: a table for each rope. */
static cg_status plan_rotation(planner *p, uint64_t *rotation_at_out)
{
    const uint32_t n_tokens = p->chunk->header.n_tokens, half = p->profile->rotary_dim / 2;
    const uint64_t n = (uint64_t)p->profile->n_ropes * n_tokens * half;
    cg_cuda_rotation *r = take(p, sizeof *r);
    if (r == NULL)
        return CG_ERR_BUFFER_TOO_SMALL;
    *rotation_at_out = take_scratch(p, n * 2 * sizeof(float));
    *r = (cg_cuda_rotation){.inv_freq_at = p->laid->inv_freq_at,
                            .rotation_at = *rotation_at_out,
                            .n_ropes = p->profile->n_ropes,
                            .n_tokens = n_tokens,
                            .half = half,
                            .first_position = p->request->first_position};
    if (n == 0)
        return CG_OK;
    cg_cuda_pass *pass = add_pass(p, CG_CUDA_ROTATION);
    pass->n_blocks = (uint32_t)((n + CG_CUDA_ROTATION_THREADS - 1) / CG_CUDA_ROTATION_THREADS);
    pass->jobs_at = at_of(p, r);
    return CG_OK;
}

static cg_status plan_klt(planner *p)
{
    const cg_chunk_header *h = &p->chunk->header;
    /* What the passes' products have in common. No kernel reads it; it lies in the plan because
     * that is the memory there is. */
    const size_t n = count_products(p);
    cg_cuda_product *products = take(p, n * sizeof *products);
    cg_cuda_klt *matrices = take(p, count_wanted(p) * sizeof *matrices);
    uint64_t rotation_at = 0;
    if (products == NULL || matrices == NULL)
        return CG_ERR_BUFFER_TOO_SMALL;
    cg_status status = lay_rows(p);
    if (status != CG_OK)
        return status;
    for (size_t i = 0; i < n; i++)
        lay_product(p, wanted_matrix(p, i), &products[i]);
    /* Scratch holds the marks of tiles so far: what must be zeros before a kernel runs. */
    p->plan->zeroed_bytes = p->scratch_bytes;
    status = plan_rotation(p, &rotation_at);
    for (size_t i = 0; i < n; i++)
        lay_cells(p, &products[i]);
    /* A pass each, since a finer level reads the cells of the coarser one: kernels of a stream run
     * one after another. level is at least 1 and does not wrap. */
    for (unsigned level = h->coarsest; level >= h->level && status == CG_OK; level--)
        status = plan_klt_level(p, level, products);
    for (size_t i = 0; i < count_wanted(p); i++)
        matrices[i] = klt_of(p, wanted_matrix(p, i), &products[i], rotation_at);
    if (status == CG_OK && p->profile->joint != NULL)
        status = plan_joint(p, &products[n - 1], matrices);
    return status == CG_OK ? plan_synthesis(p, matrices) : status;
}

/* ---- preset paper ---- */

static cg_cuda_paper paper_of(const planner *p, wanted w, uint32_t n_rows,
                              const cg_cuda_strips *strips)
{
    return (cg_cuda_paper){.streams = {.strips_at = strips->at,
                                       .classes_at = strips->classes_at,
                                       .n_strips = strips->n,
                                       .n_rows = n_rows,
                                       .n_classes = p->profile->n_classes},
                           .mean_at = w.laid->mean_at,
                           .weight_at = w.laid->weight_at,
                           .anchor_step_at = w.laid->anchor_step_at,
                           .n_columns = w.group->n_channels,
                           .step = p->profile->step[p->chunk->header.level - 1][w.matrix],
                           .target = target_of(p, w.group->first_layer, w.matrix)};
}

/* Anchors, then what stands on them. */
static cg_status plan_paper(planner *p)
{
    const cg_chunk_header *h = &p->chunk->header;
    const uint32_t n_anchors = cg_paper_n_anchors(h->n_tokens);
    const size_t n = count_wanted(p);
    cg_cuda_paper *matrices[2] = {take(p, n * sizeof **matrices), take(p, n * sizeof **matrices)};
    /* Anchors and deltas have the same columns, and so as many strips: room for one is room for the
     * other. */
    stream_jobs jobs[2];
    size_t n_room = 0;
    for (size_t i = 0; i < n; i++)
        n_room += wanted_matrix(p, i).laid->anchors.n;
    if (matrices[0] == NULL || matrices[1] == NULL || !take_jobs(p, n_room, &jobs[0]) ||
        !take_jobs(p, n_room, &jobs[1]))
        return CG_ERR_BUFFER_TOO_SMALL;
    const cg_cuda_stream_job none = {0};
    for (size_t i = 0; i < n; i++) {
        const wanted w = wanted_matrix(p, i);
        cg_cuda_paper *anchors = &matrices[0][i], *deltas = &matrices[1][i];
        *anchors = paper_of(p, w, n_anchors, &w.laid->anchors);
        *deltas = paper_of(p, w, h->n_tokens - n_anchors, &w.laid->strips[h->level - 1][0]);
        anchors->anchors_at = deltas->anchors_at =
            take_scratch(p, (uint64_t)n_anchors * w.group->n_channels * sizeof(int16_t));
        const uint32_t index = cg_section_plan_index(p->profile, h, w.task, h->level);
        cg_cursor in = section_bytes(p, &p->sections[index]);
        cg_status status =
            add_streams(p, &in, at_of(p, anchors), &anchors->streams, &none, &jobs[0]);
        /* The deltas' matrix counts its padding from its own start, which is as aligned. */
        if (status == CG_OK)
            status = add_streams(p, &in, at_of(p, deltas), &deltas->streams, &none, &jobs[1]);
        if (status == CG_OK && in.left_bytes > 0)
            status = CG_ERR_CORRUPT;
        if (status != CG_OK)
            return status;
    }
    end_streams(p, add_lossy_streams(p, CG_CUDA_ANCHORS), &jobs[0]);
    end_streams(p, add_lossy_streams(p, CG_CUDA_DELTAS), &jobs[1]);
    return CG_OK;
}

/* ---- a chunk ---- */

cg_cuda_request cg_cuda_request_all(const cg_cuda_profile *profile, const cg_chunk_header *header)
{
    return (cg_cuda_request){.n_groups = profile != NULL && header->level != CG_L0
                                             ? profile->profile->n_groups
                                             : header->geometry.n_layers,
                             .token_to = header->n_tokens,
                             .head_to = header->geometry.n_kv_heads,
                             .first_position = header->first_position};
}

/* Kernels believe a request. */
static cg_status check_request(const cg_profile *profile, const cg_chunk_header *h,
                               const cg_cuda_request *r)
{
    const uint32_t n_groups = profile != NULL ? profile->n_groups : h->geometry.n_layers;
    if (r->n_groups == 0 || r->first_group >= n_groups || r->n_groups > n_groups - r->first_group ||
        r->token_from >= r->token_to || r->token_to > h->n_tokens || r->head_from >= r->head_to ||
        r->head_to > h->geometry.n_kv_heads || r->first_position > UINT32_MAX - h->n_tokens)
        return CG_ERR_INVALID_ARGUMENT;
    /* K of the other presets, and exact tokens, are turned to where they were computed. */
    const bool can_move = profile != NULL && profile->token_transform == CG_TOKENS_DCT &&
                          cg_section_plan_n_sinks(profile, h) == 0;
    return r->first_position == h->first_position || can_move ? CG_OK : CG_ERR_UNSUPPORTED;
}

/* Of the wanted groups, and of the joint matrix; that of the steps is checked where they are read.
 */
static cg_status check_sums(const planner *p)
{
    const cg_chunk_header *h = &p->chunk->header;
    for (uint32_t i = 1; i < h->n_sections; i++) {
        const cg_section *section = &p->sections[i];
        if (!cg_section_is_joint(section->kind) &&
            (section->group < p->request->first_group ||
             section->group - p->request->first_group >= p->request->n_groups))
            continue;
        const cg_status status = cg_chunk_section_check(p->chunk, section);
        if (status != CG_OK)
            return status;
    }
    return CG_OK;
}

cg_status cg_cuda_plan_fill(const cg_cuda_profile *laid, const uint8_t *bytes, size_t n_bytes,
                            const cg_cuda_request *request, void *plan, size_t plan_bytes,
                            cg_cuda_plan *plan_out)
{
    cg_chunk chunk;
    cg_status status = cg_chunk_open(bytes, n_bytes, &chunk);
    if (status != CG_OK)
        return status;
    const cg_chunk_header *h = &chunk.header;
    if (h->version < CG_CHUNK_VERSION)
        return CG_ERR_UNSUPPORTED_VERSION;
    const cg_profile *profile = h->level != CG_L0 && laid != NULL ? laid->profile : NULL;
    if (h->level != CG_L0 && (status = cg_section_plan_profile_check(profile, h)) != CG_OK)
        return status;
    if ((status = check_request(profile, h, request)) != CG_OK)
        return status;
    memset(plan_out, 0, sizeof *plan_out);
    plan_out->element_bytes = (uint32_t)cg_dtype_bytes(h->geometry.dtype);
    cg_section *sections = malloc(h->n_sections * sizeof *sections);
    planner p = {.laid = profile != NULL ? laid : NULL,
                 .profile = profile,
                 .chunk = &chunk,
                 .sections = sections,
                 .request = request,
                 .bytes = plan,
                 .left_bytes = plan_bytes,
                 .plan = plan_out};
    status = sections != NULL ? cg_section_plan_check(profile, &chunk, sections) : CG_ERR_NO_MEMORY;
    if (status == CG_OK)
        status = check_sums(&p);
    if (status == CG_OK && take(&p, 16) == NULL) /* no matrix is at 0 */
        status = CG_ERR_BUFFER_TOO_SMALL;
    if (status == CG_OK)
        status = profile == NULL                                 ? plan_lossless(&p)
                 : profile->token_transform == CG_TOKENS_ANCHORS ? plan_paper(&p)
                                                                 : plan_klt(&p);
    if (status == CG_OK && profile != NULL)
        status = plan_sinks(&p);
    free(sections);
    plan_out->plan_bytes = p.n_bytes;
    plan_out->scratch_bytes = (size_t)p.scratch_bytes;
    return status;
}

/* ---- bounds ---- */

static size_t bound_exact(size_t n_sections, size_t n_columns)
{
    return n_sections * (sizeof(cg_cuda_exact) + MOST_EXACT_TABLES + 64 +
                         room_of_exact(n_columns) * sizeof(cg_cuda_stream_job)) +
           count_exact_strips(n_columns) * sizeof(cg_cuda_strip) + 64;
}

static size_t bound_matrix(const cg_cuda_profile *l, uint32_t index, uint32_t n_tokens,
                           size_t *scratch)
{
    const cg_profile *p = l->profile;
    const cg_group *group = &p->groups[index / p->n_matrices];
    const cg_cuda_matrix *m = &l->matrices[index];
    /* Never less than plan_fill() takes, and simple rather than close: whole thread blocks too
     * many, and both presets at once. */
    const uint32_t n_rows = cg_count_blocks(n_tokens) + CG_CUDA_KLT_BLOCKS,
                   n_tiles = group == p->joint
                                 ? group->n_channels / CG_CUDA_JOINT_CHANNELS
                                 : group->n_slices * p->geometry.n_kv_heads * l->head_tiles;
    const size_t n_anchors = cg_paper_n_anchors(n_tokens);
    size_t n_jobs = m->anchors.n, most_cells = 0;
    for (unsigned level = 0; level < CG_N_LOSSY; level++) {
        size_t n_cells = 0;
        for (unsigned f = 0; f < CG_DCT; f++)
            n_cells += (size_t)m->n_bands[level][f] * CG_BAND_COMPONENTS *
                       cg_padded(cg_count_blocks(n_tokens), CG_CUDA_TILE_BLOCKS);
        n_jobs += m->strips[level][0].n + m->strips[level][1].n;
        most_cells = n_cells > most_cells ? n_cells : most_cells;
    }
    *scratch += most_cells * 4 + n_anchors * group->n_channels * sizeof(int16_t) + 64;
    return (n_jobs + 8) * sizeof(cg_cuda_stream_job) +
           4 * (sizeof(cg_cuda_product) + sizeof(cg_cuda_paper)) + sizeof(cg_cuda_klt) +
           sizeof(cg_cuda_joint) +
           (size_t)(n_rows / CG_CUDA_KLT_BLOCKS + 1) * count_thread_blocks(n_tiles) *
               sizeof(cg_cuda_klt_job) +
           bound_exact(CG_N_PLANES, cg_group_plane_channels(p, group));
}

void cg_cuda_plan_bound(const cg_cuda_profile *laid, const cg_geometry *geometry, uint32_t n_tokens,
                        size_t *plan_bytes_out, size_t *scratch_bytes_out)
{
    size_t plan_bytes = 0, scratch_bytes = 0;
    const size_t lossless =
        bound_exact((size_t)geometry->n_layers * CG_N_PLANES, cg_geometry_channels(geometry));
    if (laid != NULL) {
        const cg_profile *p = laid->profile;
        scratch_bytes = (size_t)p->n_ropes * n_tokens * (p->rotary_dim / 2) * 2 * sizeof(float);
        plan_bytes =
            cg_count_blocks(n_tokens) * sizeof(cg_cuda_row) + CG_N_SCALES * sizeof(cg_cuda_row_run);
        for (uint32_t i = 0; i < cg_profile_n_bases(p); i++)
            plan_bytes += bound_matrix(laid, i, n_tokens, &scratch_bytes);
    }
    *plan_bytes_out = (plan_bytes > lossless ? plan_bytes : lossless) + 1024;
    *scratch_bytes_out = scratch_bytes + 1024;
}
