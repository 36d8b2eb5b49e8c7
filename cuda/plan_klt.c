/* Preset klt. Its passes: zeros, cosines and sines; a pass of streams for each level, from the
 * coarsest to the finest; where the profile has a joint matrix, what that gives to the layer
 * groups; the inverse KLT.
 */
#include "codec/block_order.h"
#include "cuda/planner.h"

/* Those and the joint one, which all groups need. */
static size_t count_products(const cg_planner *p)
{
    return cg_planner_n_wanted(p) + (p->profile->joint != NULL);
}

static const cg_section *section_of(const cg_planner *p, cg_wanted_matrix w, unsigned level)
{
    const cg_chunk_header *h = &p->chunk->header;
    return &p->sections[w.group == p->profile->joint
                            ? cg_section_plan_joint_index(p->profile, h, level)
                            : cg_section_plan_index(p->profile, h, w.task, level)];
}

/* Rows begin where tiles of symbols do. */
static void find_parts(cg_planner *p, const cg_cuda_row *rows, uint32_t n_rows)
{
    const uint32_t from = p->request->token_from / CG_DCT,
                   to = cg_count_blocks(p->request->token_to);
    uint32_t end = 0; /* of the parts so far */
    for (uint32_t row = 0; row < n_rows; row++) {
        if (row < end || rows[row].block < from || rows[row].block >= to)
            continue;
        const uint32_t first = row / CG_CUDA_TILE_BLOCKS * CG_CUDA_TILE_BLOCKS;
        p->rows.first[p->rows.n_parts++] = first;
        end = first + CG_CUDA_TILE_BLOCKS;
    }
}

/* The rows' blocks and scales, and their runs. */
static cg_status lay_rows(cg_planner *p)
{
    const uint32_t n_rows = cg_count_blocks(p->chunk->header.n_tokens);
    cg_block_order order;
    cg_cuda_row *rows = cg_planner_take(p, n_rows * sizeof *rows);
    cg_cuda_row_run *runs = cg_planner_take(p, CG_PLANNER_MOST_RUNS * sizeof *runs);
    if (rows == NULL || runs == NULL)
        return CG_ERR_BUFFER_TOO_SMALL;
    const cg_status status = cg_section_plan_block_order(p->profile, p->chunk, p->sections, &order);
    if (status == CG_OK) {
        for (uint32_t row = 0; row < n_rows; row++)
            rows[row] = (cg_cuda_row){order.block[row], CG_STEP_FACTORS[order.factor_index[row]]};
        for (uint32_t r = 0, end = 0; r < order.n_runs; r++) {
            end += (uint32_t)order.runs[r].n_rows;
            runs[r] = (cg_cuda_row_run){end, 8u * order.factor_index[end - 1]};
        }
        p->rows.at = cg_planner_at(p, rows);
        p->rows.runs_at = cg_planner_at(p, runs);
        p->rows.n_runs = order.n_runs;
        find_parts(p, rows, n_rows);
    }
    cg_block_order_destroy(&order);
    return status;
}

/* Where a matrix's symbols lie, for all passes, and what multiplies them. */
static void lay_product(cg_planner *p, cg_wanted_matrix w, cg_cuda_product *m)
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
    m->large_at = cg_planner_take_scratch(p, n_tiles); /* all marks come first: they are cleared */
    m->rest_at = w.group->bands[w.matrix].n_shared > 0 ? cg_planner_take_scratch(p, n_tiles) : 0;
    m->n_tiles = n_tiles;
    m->basis_at = w.laid->basis_at;
    m->steps_at = w.laid->steps_at[h->level - 1];
    m->n_steps = w.laid->n_steps[h->level - 1];
    m->n_all_steps = w.laid->n_all_steps;
}

static void lay_cells(cg_planner *p, cg_cuda_product *m)
{
    const uint64_t n_cells = (uint64_t)m->n_tiles * CG_CUDA_TILE_BYTES;
    m->cells_at = cg_planner_take_scratch(p, n_cells * sizeof(int16_t));
    m->digits_at = cg_planner_take_scratch(p, n_cells);
}

/* A pass of streams: those of one level of all products. */
static cg_status plan_klt_level(cg_planner *p, unsigned level, const cg_cuda_product *products)
{
    const cg_chunk_header *h = &p->chunk->header;
    const size_t n = count_products(p);
    const bool is_refined = level < h->coarsest;
    cg_cuda_product *of_level = cg_planner_take(p, n * sizeof *of_level);
    size_t n_room = 0;
    cg_stream_jobs jobs;
    for (size_t i = 0; i < n; i++)
        n_room += cg_planner_wanted(p, i).laid->strips[level - 1][is_refined].n;
    if (of_level == NULL || !cg_planner_take_jobs(p, n_room, &jobs))
        return CG_ERR_BUFFER_TOO_SMALL;
    cg_cuda_pass *pass = cg_planner_add_lossy(p, CG_CUDA_SYMBOLS);
    cg_status status = CG_OK;
    for (size_t i = 0; i < n && status == CG_OK; i++) {
        const cg_wanted_matrix w = cg_planner_wanted(p, i);
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
        cg_cursor in = cg_planner_section(p, section_of(p, w, level));
        const cg_cuda_stream_job none = {0};
        status = cg_planner_add_streams(p, &in, cg_planner_at(p, m), &m->streams, &none, &jobs);
        if (status == CG_OK && in.left_bytes > 0)
            status = CG_ERR_CORRUPT;
    }
    cg_planner_end_streams(p, pass, &jobs);
    return status;
}

/* How a matrix's sums become elements. */
static cg_cuda_klt klt_of(const cg_planner *p, cg_wanted_matrix w, const cg_cuda_product *product,
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
                         .target = cg_planner_target(p, w.group->first_layer, w.matrix)};
}

/* Tiles of the wanted heads. */
static uint32_t count_tiles(const cg_planner *p, const cg_group *group)
{
    return group->n_slices * (p->request->head_to - p->request->head_from) * p->laid->head_tiles;
}

/* Jobs of a pass that multiplies, one behind another. */
typedef struct klt_jobs {
    cg_cuda_klt_job *jobs;
    size_t n;
} klt_jobs;

static size_t count_jobs(const cg_planner *p, uint32_t n_tiles)
{
    return cg_klt_row_pairs(p->rows.n_parts) * cg_klt_thread_blocks(n_tiles);
}

/* Of a matrix's tiles from first_tile to n_tiles. */
static void add_jobs(const cg_planner *p, uint64_t matrix_at, uint32_t first_tile, uint32_t n_tiles,
                     klt_jobs *jobs)
{
    for (uint32_t part = 0; part < p->rows.n_parts; part += CG_CUDA_KLT_ROWS) {
        for (uint32_t b = 0; b < cg_klt_thread_blocks(n_tiles - first_tile); b++) {
            cg_cuda_klt_job *const job = &jobs->jobs[jobs->n++];
            *job = (cg_cuda_klt_job){.matrix_at = matrix_at,
                                     .first_tile = first_tile + b * CG_CUDA_KLT_COLUMNS,
                                     .n_tiles = n_tiles};
            for (uint32_t i = 0; i < CG_CUDA_KLT_ROWS; i++)
                job->first_row[i] =
                    part + i < p->rows.n_parts ? p->rows.first[part + i] : CG_CUDA_NO_ROW;
        }
    }
}

static void end_jobs(cg_planner *p, uint32_t kind, const klt_jobs *jobs)
{
    cg_cuda_pass *pass = cg_planner_add_pass(p, kind);
    pass->n_blocks = (uint32_t)jobs->n;
    pass->jobs_at = cg_planner_at(p, jobs->jobs);
    pass->shared_bytes = CG_CUDA_KLT_SHARED_BYTES;
}

/* product: of the joint matrix; matrices: of the wanted groups. */
static cg_status plan_joint(cg_planner *p, const cg_cuda_product *product,
                            const cg_cuda_klt *matrices)
{
    const cg_profile *profile = p->profile;
    const cg_cuda_request *r = p->request;
    const uint32_t group_tiles = profile->n_shared / CG_CUDA_JOINT_CHANNELS,
                   n_wanted = r->n_groups * group_tiles, first = r->first_group * group_tiles;
    cg_cuda_joint *joint = cg_planner_take(p, sizeof *joint);
    klt_jobs jobs = {cg_planner_take(p, count_jobs(p, n_wanted) * sizeof *jobs.jobs), 0};
    if (joint == NULL || jobs.jobs == NULL)
        return CG_ERR_BUFFER_TOO_SMALL;
    *joint = (cg_cuda_joint){.product = *product,
                             .groups_at = cg_planner_at(p, matrices),
                             .first_group = r->first_group,
                             .n_shared = profile->n_shared,
                             .n_bits = profile->joint->bands[0].unit_bits -
                                       profile->fraction_bits[p->chunk->header.level]};
    for (unsigned f = 0; f < CG_DCT; f++)
        joint->n_given[f] = profile->n_given[p->chunk->header.level - 1][f];
    add_jobs(p, cg_planner_at(p, joint), first, first + n_wanted, &jobs);
    end_jobs(p, CG_CUDA_JOINT, &jobs);
    return CG_OK;
}

/* Thread blocks of 8 tiles of channels each, of the wanted heads. */
static cg_status plan_synthesis(cg_planner *p, const cg_cuda_klt *matrices)
{
    size_t n_jobs = 0;
    for (size_t i = 0; i < cg_planner_n_wanted(p); i++)
        n_jobs += count_jobs(p, count_tiles(p, cg_planner_wanted(p, i).group));
    klt_jobs jobs = {cg_planner_take(p, n_jobs * sizeof *jobs.jobs), 0};
    if (jobs.jobs == NULL)
        return CG_ERR_BUFFER_TOO_SMALL;
    for (size_t i = 0; i < cg_planner_n_wanted(p); i++)
        add_jobs(p, cg_planner_at(p, &matrices[i]), 0,
                 count_tiles(p, cg_planner_wanted(p, i).group), &jobs);
    end_jobs(p, CG_CUDA_KLT, &jobs);
    return CG_OK;
}

/* Once for all matrices of a chunk: zeros, which are all of scratch that is taken so far, and a
 * table for each rope. */
static cg_status plan_start(cg_planner *p, uint64_t *rotation_at_out)
{
    const uint32_t n_tokens = p->chunk->header.n_tokens, half = p->profile->rotary_dim / 2;
    const uint64_t n_zeros = p->scratch_bytes / 16,
                   n_turns = (uint64_t)p->profile->n_ropes * n_tokens * half,
                   n = n_turns > n_zeros ? n_turns : n_zeros;
    cg_cuda_start *r = cg_planner_take(p, sizeof *r);
    if (r == NULL)
        return CG_ERR_BUFFER_TOO_SMALL;
    *rotation_at_out = cg_planner_take_scratch(p, n_turns * 2 * sizeof(float));
    *r = (cg_cuda_start){.inv_freq_at = p->laid->inv_freq_at,
                         .rotation_at = *rotation_at_out,
                         .n_ropes = p->profile->n_ropes,
                         .n_tokens = n_tokens,
                         .half = half,
                         .first_position = p->request->first_position,
                         .n_zeros = n_zeros};
    if (n == 0)
        return CG_OK;
    cg_cuda_pass *pass = cg_planner_add_pass(p, CG_CUDA_START);
    pass->n_blocks = (uint32_t)((n + CG_CUDA_START_THREADS - 1) / CG_CUDA_START_THREADS);
    pass->jobs_at = cg_planner_at(p, r);
    return CG_OK;
}

cg_status cg_cuda_plan_klt(cg_planner *p)
{
    const cg_chunk_header *h = &p->chunk->header;
    /* What the passes' products have in common. No kernel reads it; it lies in the plan because
     * that is the memory there is. */
    const size_t n = count_products(p);
    cg_cuda_product *products = cg_planner_take(p, n * sizeof *products);
    cg_cuda_klt *matrices = cg_planner_take(p, cg_planner_n_wanted(p) * sizeof *matrices);
    uint64_t rotation_at = 0;
    if (products == NULL || matrices == NULL)
        return CG_ERR_BUFFER_TOO_SMALL;
    cg_status status = lay_rows(p);
    if (status != CG_OK)
        return status;
    for (size_t i = 0; i < n; i++)
        lay_product(p, cg_planner_wanted(p, i), &products[i]);
    /* Scratch holds the marks of tiles so far. */
    status = plan_start(p, &rotation_at);
    for (size_t i = 0; i < n; i++)
        lay_cells(p, &products[i]);
    /* A pass each, since a finer level reads the cells of the coarser one: kernels of a stream run
     * one after another. level is at least 1 and does not wrap. */
    for (unsigned level = h->coarsest; level >= h->level && status == CG_OK; level--)
        status = plan_klt_level(p, level, products);
    for (size_t i = 0; i < cg_planner_n_wanted(p); i++)
        matrices[i] = klt_of(p, cg_planner_wanted(p, i), &products[i], rotation_at);
    if (status == CG_OK && p->profile->joint != NULL)
        status = plan_joint(p, &products[n - 1], matrices);
    return status == CG_OK ? plan_synthesis(p, matrices) : status;
}
