/* Which levels of a task are coded with what of a profile's blob, and where in memory. */
#include "cuda/coding.h"

#include "codec/arena.h"
#include "codec/block_order.h"
#include "codec/symbols.h"
#include "cuda/profile_blob.h"

#include <string.h>

static void *take(cg_arena *arena, size_t n_bytes)
{
    return cg_arena_take_aligned(arena, n_bytes, CG_CUDA_ALIGN);
}

/* A row that takes all it may is coded where a row's words are still free. So each strip has those
 * words more than its share. */
static uint32_t strip_words(uint32_t n_rows)
{
    return CG_RANS_LANES * n_rows + CG_CUDA_ROW_WORDS;
}

static void place_level(cg_arena *scratch, cg_arena *out, uint32_t n_rows,
                        cg_cuda_coded_level *level)
{
    const size_t n = level->n_strips;
    level->n_streams_dev = take(scratch, sizeof *level->n_streams_dev);
    level->costs_dev = take(scratch, n * sizeof *level->costs_dev);
    level->sizes_dev = take(scratch, n * sizeof *level->sizes_dev);
    level->states_dev = take(scratch, n * CG_RANS_LANES * sizeof *level->states_dev);
    level->words_dev = take(scratch, n * strip_words(n_rows) * sizeof *level->words_dev);
    /* A byte a symbol, and what n streams cost. */
    level->out_bytes = 2 * CG_RANS_ALIGNED + n * ((size_t)CG_RANS_LANES * n_rows +
                                                  CG_RANS_STREAM_BYTES + CG_RANS_ALIGNED);
    level->n_bytes = take(out, sizeof *level->n_bytes);
    level->out = take(out, level->out_bytes);
}

static const cg_cuda_strips *strips_of(const cg_cuda_matrix *m, unsigned level, bool is_refined)
{
    return &m->strips[level - CG_L1][is_refined];
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

void cg_cuda_coding_bound(const cg_cuda_profile *laid, uint32_t n_tokens, size_t *scratch_bytes_out,
                          size_t *out_bytes_out)
{
    *scratch_bytes_out = *out_bytes_out = 0;
    for (uint32_t basis = 0; basis < cg_profile_n_bases(laid->profile); basis++) {
        cg_arena scratch = {0}, out = {0};
        for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
            const cg_cuda_matrix *m = &laid->matrices[basis];
            cg_cuda_coded_level most = {.n_strips = (uint32_t)larger(strips_of(m, level, false)->n,
                                                                     strips_of(m, level, true)->n)};
            place_level(&scratch, &out, cg_count_blocks(n_tokens), &most);
        }
        *scratch_bytes_out = larger(*scratch_bytes_out, scratch.used_bytes);
        *out_bytes_out = larger(*out_bytes_out, out.used_bytes);
    }
}

/* Whether the levels are some, neighbours, and nest where they are several. */
static bool are_levels_right(const cg_profile *p, unsigned level_mask)
{
    const unsigned lossy = level_mask >> CG_L1, lowest = lossy & -lossy;
    return lossy != 0 && level_mask >> CG_N_LEVELS == 0 && (level_mask & 1u << CG_L0) == 0 &&
           (lossy & (lossy + lowest)) == 0 && (lossy == lowest || p->nests);
}

static bool are_rows_right(const cg_projection *what)
{
    return what->order != NULL && what->order->n_blocks == what->n_rows &&
           what->order->n_runs <= CG_N_STEP_FACTORS &&
           cg_rans_n_rows(what->order->runs, what->order->n_runs) == what->n_rows;
}

static void fill_runs(const cg_block_order *order, cg_cuda_coding *c)
{
    uint32_t end = 0;
    c->n_runs = order->n_runs;
    for (uint32_t i = 0; i < order->n_runs; i++) {
        end += (uint32_t)order->runs[i].n_rows;
        c->runs[i] = (cg_cuda_row_run){end, 8u * order->factor_index[end - 1]};
    }
}

static void add_level(cg_cuda_coding *c, const cg_cuda_strips *strips, cg_arena *scratch,
                      cg_arena *out)
{
    cg_cuda_coded_level *level = &c->levels[c->n_levels];
    *level = (cg_cuda_coded_level){.strips_at = strips->at,
                                   .classes_at = strips->classes_at,
                                   .n_strips = strips->n,
                                   .n_thirds = c->n_levels++,
                                   .first_block = c->n_ctas};
    place_level(scratch, out, c->n_rows, level);
    /* One at least: a section without strips has a table, too. */
    c->n_ctas += strips->n > 0 ? (strips->n + CG_CUDA_CODING_WARPS - 1) / CG_CUDA_CODING_WARPS : 1;
}

cg_status cg_cuda_coding_of(const cg_cuda_profile *laid, const cg_projection *what,
                            const cg_cuda_coding_memory *memory, cg_cuda_coding *out)
{
    const cg_profile *p = laid->profile;
    if (laid->preset != CG_CUDA_PRESET_KLT || what->basis >= cg_profile_n_bases(p) ||
        !are_levels_right(p, what->level_mask) || !are_rows_right(what) ||
        what->stream_percent > 100)
        return CG_ERR_INVALID_ARGUMENT;
    const uint32_t matrix = what->basis % p->n_matrices;
    const cg_group *group = &p->groups[what->basis / p->n_matrices];
    const cg_cuda_matrix *m = &laid->matrices[what->basis];
    cg_arena scratch = {memory->scratch_dev, 0}, host = {memory->out, 0};
    *out = (cg_cuda_coding){.blob_dev = memory->blob_dev,
                            .cells_dev = memory->cells_dev,
                            .classes_at = laid->classes_at,
                            .class_of_at = laid->class_of_at,
                            .costs_at = laid->costs_at,
                            .n_classes = p->n_classes,
                            .n_rows = what->n_rows,
                            .first_column = CG_CUDA_GIVEN_COLUMNS * group->bands[matrix].n_shared,
                            .strip_words = strip_words(what->n_rows),
                            .stream_percent = what->stream_percent};
    fill_runs(what->order, out);
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
        if ((what->level_mask >> level & 1) == 0)
            continue;
        for (uint32_t f = 0; f < CG_DCT && out->n_levels == 0; f++) {
            out->n_active[f] = group->columns[level - CG_L1][matrix].n_active[f];
            if (cg_projection_n_cells(what, f) != out->n_active[f])
                return CG_ERR_INVALID_ARGUMENT;
        }
        add_level(out, strips_of(m, level, (what->level_mask >> level & 2) != 0), &scratch, &host);
    }
    /* Kernels count words in 32 bits. */
    return scratch.used_bytes <= UINT32_MAX && scratch.used_bytes <= memory->scratch_bytes &&
                   host.used_bytes <= memory->out_bytes
               ? CG_OK
               : CG_ERR_INVALID_ARGUMENT;
}

void cg_cuda_coding_result(const cg_cuda_coding *c, const cg_projection *what,
                           cg_coded coded_out[CG_N_LEVELS])
{
    const cg_cuda_coded_level *level = c->levels;
    memset(coded_out, 0, CG_N_LEVELS * sizeof *coded_out);
    for (unsigned i = CG_L1; i < CG_N_LEVELS; i++) {
        if ((what->level_mask >> i & 1) == 0)
            continue;
        /* More than there is room for would be a kernel's mistake. */
        if (*level->n_bytes > 0 && *level->n_bytes <= level->out_bytes)
            coded_out[i] = (cg_coded){level->out, *level->n_bytes};
        level++;
    }
}

static const size_t SUMS_BYTES = CG_CUDA_CODING_THREADS * sizeof(uint64_t);

size_t cg_cuda_coding_classes_bytes(uint32_t n_classes)
{
    return SUMS_BYTES + (n_classes + (size_t)1) * sizeof(cg_cuda_class);
}

/* The passes that multiply, or a coder's classes, with its sums. */
size_t cg_cuda_profile_shared_bytes(const cg_cuda_profile *l)
{
    const size_t coding_bytes = cg_cuda_coding_classes_bytes(l->profile->n_classes);
    return coding_bytes > CG_CUDA_KLT_SHARED_BYTES ? coding_bytes : CG_CUDA_KLT_SHARED_BYTES;
}

size_t cg_cuda_coding_shared_bytes(const cg_cuda_coding *c, uint32_t step)
{
    return step == CG_CUDA_CODING_CODE ? cg_cuda_coding_classes_bytes(c->n_classes) : SUMS_BYTES;
}
