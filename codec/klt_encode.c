/* Preset klt, encoding: spectra of all blocks, their projection on the basis, and symbols at each
 * level. With a joint matrix the layer groups' first coefficients are projected once more.
 * Projecting is most of the time. Where there is a projector, a GPU does all that, makes the
 * symbols of the finest level, and codes those of all levels. To check it, a sum of all blocks is
 * transformed and projected here, and some sections are decoded. */
#include "codec/klt.h"

#include "codec/analysis.h"
#include "codec/arena.h"
#include "codec/exact_lane.h"
#include "codec/kernels.h"
#include "codec/klt_quantize.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct encode_work {
    size_t row_stride, coef_stride;
    float *block; /* [CG_DCT][n_channels]: the tokens of a block; or [CG_DCT][row_stride] */
    float *token; /* one slice of a token */
    float *rows;  /* [CG_DCT][n_blocks][row_stride]: their spectra; of the joint matrix what tasks
                     have left */
    float *coef;  /* [n_blocks, in whole tiles][coef_stride]: of one frequency */
    float *leaks; /* the same: what the exact components make of the others' */
    uint16_t *split;
    void *symbols[CG_N_LEVELS]; /* of the lossy levels */
    void *limit;                /* of the joint matrix: cg_klt_limit_given()'s scratch */
} encode_work;

static encode_work take_encode_work(cg_arena *arena, const cg_profile *p, const cg_group *group,
                                    unsigned matrix, uint32_t n_tokens)
{
    const size_t n_blocks = cg_count_blocks(n_tokens);
    encode_work w = {.row_stride = 2 * cg_analysis_pairs(group->n_channels),
                     .coef_stride = (group->n_components[matrix] + 31u) / 32 * 32};
    w.block = cg_arena_take(arena, CG_DCT * w.row_stride * sizeof *w.block);
    w.token = cg_arena_take(arena, cg_geometry_channels(&p->geometry) * sizeof *w.token);
    if (group != p->joint)
        w.rows = cg_arena_take(arena, CG_DCT * n_blocks * w.row_stride * sizeof *w.rows);
    else
        w.limit = cg_arena_take(arena, cg_klt_limit_scratch_bytes(p, n_tokens));
    w.coef = cg_arena_take(arena, (n_blocks + CG_TILE - 1) / CG_TILE * CG_TILE * w.coef_stride *
                                      sizeof *w.coef);
    w.leaks = cg_arena_take(arena, (n_blocks + CG_TILE - 1) / CG_TILE * CG_TILE * w.coef_stride *
                                       sizeof *w.leaks);
    w.split = cg_arena_take(arena, 64 * w.row_stride * sizeof *w.split);
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++)
        w.symbols[level] =
            cg_arena_take(arena, cg_symbols_bytes(&group->columns[level - 1][matrix], n_blocks));
    return w;
}

size_t cg_klt_encode_scratch_bytes(const cg_profile *profile, const cg_group *group,
                                   unsigned matrix, uint32_t n_tokens)
{
    cg_arena arena = {0};
    (void)take_encode_work(&arena, profile, group, matrix, n_tokens);
    return arena.used_bytes;
}

/* One token's row [n_channels]: rotated back, centred, weighted. */
static bool load_token(const cg_heads *heads, const cg_group *group, unsigned matrix, size_t t,
                       const void *in, float *row)
{
    const cg_profile *p = heads->profile;
    const cg_geometry *g = &p->geometry;
    bool finite = true;
    const size_t channels = cg_geometry_channels(g);
    for (uint32_t i = 0; i < group->n_slices; i++) {
        const cg_slice slice = cg_group_slice(group, matrix, i);
        const float *weight = cg_profile_row(p, p->weight, slice);
        const float *mean = cg_profile_row(p, p->mean, slice);
        float *slice_row = row + i * channels;
        finite &=
            cg_heads_load(heads, in, cg_heads_element(heads, i, t, 0), g->n_kv_heads, slice_row);
        for (uint32_t head = 0; head < g->n_kv_heads && slice.plane == CG_K; head++)
            cg_heads_unrotate(heads, slice.layer, t, slice_row + (size_t)head * g->head_dim);
        for (size_t ch = 0; ch < channels; ch++)
            slice_row[ch] = (slice_row[ch] - mean[ch]) * weight[ch];
    }
    return finite;
}

/* Rows of a block that are no coded tokens (sinks, which lie exactly on top, and what is past the
 * end) become the mean of those that are: that leaves the fewest coefficients. */
static void fill_rows(float *block, size_t n_channels, unsigned first, unsigned end)
{
    for (size_t ch = 0; ch < n_channels; ch++) {
        float mean = 0;
        for (unsigned t = first; t < end; t++)
            mean += block[t * n_channels + ch];
        mean = end > first ? mean / (float)(end - first) : 0;
        for (unsigned t = 0; t < CG_DCT; t++) {
            if (t < first || t >= end)
                block[t * n_channels + ch] = mean;
        }
    }
}

/* The spectra of all blocks in the order of their rows, frequency by frequency, so that a
 * projection walks neighbouring rows. They are divided by their blocks' step factors: the
 * quantizer's step is then the same for all. Behind the channels a row has zeros up to its stride.
 */
static bool load_rows(const cg_heads *heads, const cg_block_order *order, const cg_group *group,
                      unsigned matrix, const void *in, encode_work *w)
{
    const size_t n = group->n_channels, n_blocks = order->n_blocks,
                 f_stride = n_blocks * w->row_stride;
    bool finite = true;
    for (size_t r = 0; r < CG_DCT * n_blocks; r++)
        memset(w->rows + r * w->row_stride + n, 0, (w->row_stride - n) * sizeof *w->rows);
    for (size_t row = 0; row < n_blocks; row++) {
        const size_t b = order->block[row];
        const float factor = 1 / CG_STEP_FACTORS[order->factor_index[row]];
        const cg_lane_coded_tokens coded = cg_lane_find_coded(
            (uint32_t)b, heads->first_position, heads->n_tokens, heads->profile->n_sinks);
        for (unsigned t = 0; t < coded.end; t++)
            finite &= load_token(heads, group, matrix, b * CG_DCT + t, in, w->block + t * n);
        if (coded.first > 0 || coded.end < CG_DCT)
            fill_rows(w->block, n, coded.first, coded.end);
        for (size_t i = 0; i < CG_DCT * n && factor != 1; i++)
            w->block[i] *= factor;
        heads->profile->kernels->forward_dct(w->block, n, (unsigned)n,
                                             w->rows + row * w->row_stride, f_stride);
    }
    return finite;
}

/* Adds factor times the coded tokens of a slice and a block to sums[CG_DCT][stride], K as it was
 * before its rotation. Tokens that are not coded count as the mean of those that are. */
static bool add_block(const cg_heads *heads, const cg_group *group, unsigned matrix, uint32_t slice,
                      size_t b, cg_lane_coded_tokens coded, const void *in, float factor,
                      const encode_work *w, float *sums, size_t stride)
{
    const cg_profile *p = heads->profile;
    const cg_geometry *g = &p->geometry;
    const cg_slice of = cg_group_slice(group, matrix, slice);
    const size_t half = of.plane == CG_K ? p->rotary_dim / 2 : 0;
    bool finite = true;
    for (size_t t = 0; t < coded.end; t++) {
        const size_t token = b * CG_DCT + t, at = cg_heads_rotation(heads, of.layer, token);
        const float *cosine = heads->cosine + at, *sine = heads->sine + at;
        finite &= cg_heads_load(heads, in, cg_heads_element(heads, slice, token, 0), g->n_kv_heads,
                                w->token);
        if (t < coded.first)
            continue;
        p->kernels->add_heads(w->token, g->n_kv_heads, g->head_dim, cosine, sine, half, factor,
                              sums + t * stride);
        for (size_t other = 0; other < CG_DCT; other++)
            if (other < coded.first || other >= coded.end)
                p->kernels->add_heads(w->token, g->n_kv_heads, g->head_dim, cosine, sine, half,
                                      factor / (float)(coded.end - coded.first),
                                      sums + other * stride);
    }
    return finite;
}

/* What load_rows() would make, summed up with cg_lane_row_sign(), to w->block [CG_DCT][row_stride]:
 * all of it is linear, so that tokens are added up first. False: an element is not finite. */
static bool sum_spectra(const cg_heads *heads, const cg_block_order *order, const cg_group *group,
                        unsigned matrix, const void *in, const encode_work *w)
{
    const cg_profile *p = heads->profile;
    const size_t n = group->n_channels, channels = cg_geometry_channels(&p->geometry);
    float *sums = w->rows; /* [CG_DCT][n]: who has no rows is not asked for them */
    float factors = 0;     /* summed up */
    bool finite = true;
    memset(sums, 0, CG_DCT * n * sizeof *sums);
    for (uint32_t slice = 0; slice < group->n_slices; slice++) {
        const cg_slice of = cg_group_slice(group, matrix, slice);
        const float *weight = cg_profile_row(p, p->weight, of),
                    *mean = cg_profile_row(p, p->mean, of);
        float *own = sums + slice * channels;
        factors = 0;
        for (size_t row = 0; row < order->n_blocks; row++) {
            const size_t b = order->block[row];
            const float factor =
                cg_lane_row_sign((uint32_t)row) * (1 / CG_STEP_FACTORS[order->factor_index[row]]);
            const cg_lane_coded_tokens coded =
                cg_lane_find_coded((uint32_t)b, heads->first_position, heads->n_tokens, p->n_sinks);
            finite &= add_block(heads, group, matrix, slice, b, coded, in, factor, w, own, n);
            /* A block of sinks alone is all zeros. */
            factors += coded.first < coded.end ? factor : 0;
        }
        for (size_t t = 0; t < CG_DCT; t++)
            for (size_t ch = 0; ch < channels; ch++)
                own[t * n + ch] = (own[t * n + ch] - factors * mean[ch]) * weight[ch];
    }
    for (size_t f = 0; f < CG_DCT; f++)
        memset(w->block + f * w->row_stride + n, 0, (w->row_stride - n) * sizeof *w->block);
    p->kernels->forward_dct(sums, n, (unsigned)n, w->block, w->row_stride);
    return finite;
}

/* Coefficients of the first n_sixteens of components, n_exact of them exact, of the rows. */
static void project(const cg_profile *p, const cg_analysis *a, size_t n_blocks, size_t n_exact,
                    size_t n_sixteens, const float *rows, const encode_work *w)
{
    const cg_klt_forward *forward = p->kernels->forward;
    const size_t n_pairs = cg_analysis_pairs(a->n_channels);
    if (p->version > 1) {
        forward->project_integers(rows, w->row_stride, n_blocks, a->pairs, a->n_digits, a->scale,
                                  a->norm, n_pairs, n_sixteens, w->split, w->coef, w->coef_stride);
        return;
    }
    const bool is_narrow = forward->project_narrow != NULL;
    forward->project(rows, w->row_stride, n_blocks, a->pairs, n_pairs,
                     is_narrow ? n_exact : n_sixteens, w->split, w->coef, w->coef_stride);
    if (is_narrow)
        forward->project_narrow(rows, w->row_stride, n_blocks, a->pairs + n_exact * n_pairs * 16,
                                a->scale + 16 * n_exact, a->norm, n_pairs, n_sixteens - n_exact,
                                w->split, w->coef + 16 * n_exact, w->coef_stride);
}

/* Takes out of the coefficients of n_others sixteens what they have picked up of the n_exact
 * before them. Where n_exact is odd, the sixteen behind it meets zeros. */
static void remove_leaks(const cg_profile *p, const cg_analysis *a, size_t n_blocks, size_t n_exact,
                         size_t n_others, const encode_work *w)
{
    const cg_klt_forward *forward = p->kernels->forward;
    const size_t n_pairs = cg_analysis_exact_pairs(a);
    if (p->version > 1)
        forward->project_integers(w->coef, w->coef_stride, n_blocks, a->leaks, a->leak_digits,
                                  a->leak_scale, a->leak_norm, n_pairs, n_others, w->split,
                                  w->leaks, w->coef_stride);
    else
        forward->project(w->coef, w->coef_stride, n_blocks, a->leaks, n_pairs, n_others, w->split,
                         w->leaks, w->coef_stride);
    for (size_t b = 0; b < n_blocks; b++) {
        float *coef = w->coef + b * w->coef_stride + 16 * n_exact;
        for (size_t c = 0; c < 16 * n_others; c++)
            coef[c] -= w->leaks[b * w->coef_stride + c];
    }
}

/* Coefficients of the first n components, in sixteens, of the rows of one frequency. */
static void analyze(const cg_profile *p, const cg_analysis *a, size_t n_blocks, uint32_t n,
                    const float *rows, const encode_work *w)
{
    const size_t n_sixteens = (n + 15u) / 16, all_exact = (a->n_exact + 15u) / 16;
    const size_t n_exact = all_exact < n_sixteens ? all_exact : n_sixteens;
    if (n_sixteens == 0)
        return; /* no level wants this frequency */
    project(p, a, n_blocks, n_exact, n_sixteens, rows, w);
    if (n_exact > 0 && n_exact < n_sixteens)
        remove_leaks(p, a, n_blocks, n_exact, n_sixteens - n_exact, w);
}

static float total(const float squares[CG_SQUARES])
{
    float sum = 0;
    for (size_t i = 0; i < CG_SQUARES; i++)
        sum += squares[i];
    return sum;
}

/* The signed sum of spectra, sums_out[n_columns]. Returns the sum of all squares. */
static float sum_rows(const cg_profile *p, const float *rows, size_t n_rows, size_t n_columns,
                      float *sums_out)
{
    float squares[CG_SQUARES] = {0};
    memset(sums_out, 0, n_columns * sizeof *sums_out);
    for (size_t r = 0; r < n_rows; r++)
        p->kernels->add_row(rows + r * n_columns, n_columns, cg_lane_row_sign((uint32_t)r),
                            sums_out, squares);
    return total(squares);
}

/* The same of symbols. */
static float sum_cells(const cg_profile *p, const int16_t *cells, size_t n_rows, size_t n_columns,
                       float *sums_out)
{
    float squares[CG_SQUARES] = {0};
    memset(sums_out, 0, n_columns * sizeof *sums_out);
    for (size_t r = 0; r < n_rows; r++)
        p->kernels->add_cells(cells + r * n_columns, n_columns, cg_lane_row_sign((uint32_t)r),
                              sums_out, squares);
    return total(squares);
}

/* Columns of frequency f that the levels of the encoding have, at most. */
static uint32_t most_columns(const cg_encoding *encoding, const cg_group *group, unsigned matrix,
                             unsigned f)
{
    uint32_t most = 0;
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
        const uint32_t n_active = group->columns[level - 1][matrix].n_active[f];
        if (cg_encoding_has(encoding, level) && n_active > most)
            most = n_active;
    }
    return most;
}

/* Components of a group that the joint matrix gives, and symbols do not. */
static uint32_t n_shared_of(const cg_profile *p, const cg_group *group)
{
    return group != p->joint ? p->n_shared : 0;
}

/* Components of each group that the joint matrix is fed with: those that it gives at some level. At
 * each level, whatever the others are, so that a level's symbols are the same alone and among
 * others. 0: no level of the encoding has columns there. */
static uint32_t n_fed(const cg_encoding *encoding, unsigned f)
{
    const cg_profile *p = encoding->heads->profile;
    uint32_t most = 0;
    if (p->joint == NULL || most_columns(encoding, p->joint, 0, f) == 0)
        return 0;
    for (unsigned level = 0; level < CG_N_LOSSY; level++)
        most = p->n_given[level][f] > most ? p->n_given[level][f] : most;
    return most;
}

/* The shared ones of a group's coefficients of frequency f, to where the joint matrix finds them.
 */
static void share(const cg_encoding *encoding, const cg_group *group, size_t n_blocks, unsigned f,
                  const float *coef, size_t coef_stride)
{
    const cg_profile *p = encoding->heads->profile;
    if (p->joint == NULL || group == p->joint)
        return;
    const size_t n = n_fed(encoding, f), stride = p->joint->n_channels;
    float *out =
        encoding->shared + f * n_blocks * stride + (size_t)(group - p->groups) * p->n_shared;
    for (size_t b = 0; b < n_blocks && n > 0; b++) {
        memcpy(out + b * stride, coef + b * coef_stride, n * sizeof *out);
        memset(out + b * stride + n, 0, (p->n_shared - n) * sizeof *out);
    }
}

/* Whether what a projector made is the CPU's within a hundredth; rounding stays far below that.
 *
 * Projecting is linear. So the CPU projects a single row for each frequency: the sum of its rows,
 * each with a sign. (Without signs only what all rows have in common would count.) The sum is in
 * w->block, and its square is about that of all rows together. Two mistakes are found: a row that
 * is wrong by more than a hundredth of all rows, and of what a quantizer loses of them; and a
 * symbol that is not what its residue says. A symbol leaves half a step at most. The signed sum of
 * what n_rows symbols leave is on average no more than sqrt(n_rows) halves. */
static bool agrees(const cg_profile *p, const cg_analysis *a, const cg_projection *what,
                   const cg_projected *made, const encode_work *w)
{
    const float step_square = what->step * what->step, n_rows = (float)what->n_rows;
    float row_squares[CG_DCT], left = 0, most_left = 0;
    uint32_t most = 0;
    for (size_t f = 0; f < CG_DCT; f++) {
        row_squares[f] = 0;
        for (size_t ch = 0; ch < w->row_stride; ch++)
            row_squares[f] += w->block[f * w->row_stride + ch] * w->block[f * w->row_stride + ch];
        most = what->n_components[f] > most ? what->n_components[f] : most;
    }
    analyze(p, a, CG_DCT, most, w->block, w);
    for (unsigned f = 0; f < CG_DCT; f++) {
        const uint32_t n = cg_projection_n_cells(what, f), n_given = what->n_given[f];
        const float *given = w->coef + f * w->coef_stride, *expected = given + what->n_shared,
                    *residues = made->residues[f];
        const float given_squares = sum_rows(p, made->given[f], what->n_rows, n_given, w->block);
        float given_error = 0, error = 0;
        for (uint32_t c = 0; c < n_given; c++)
            given_error += (w->block[c] - given[c]) * (w->block[c] - given[c]);
        const float loss = n_rows * (float)n * step_square / 12,
                    given_loss = n_rows * (float)n_given * step_square / 12,
                    squares = step_square * sum_cells(p, made->cells[f], what->n_rows, n, w->block);
        for (uint32_t c = 0; c < n; c++) {
            const float difference = w->block[c] * what->step + residues[c] - expected[c];
            error += difference * difference;
            left += residues[c] * residues[c];
        }
        /* loss is what rounding loses on average, step^2 / 12 a symbol. Three times that is half a
         * step for each. */
        most_left += 3.001f * loss;
        /* So written that a NaN does not agree. */
        if (!isfinite(row_squares[f]) || !isfinite(squares) || !isfinite(given_squares) ||
            !(given_error <= 1e-4f * (given_squares + given_loss) + 1e-6f * row_squares[f]) ||
            !(error <= 1e-4f * (squares + loss) + 1e-6f * row_squares[f]))
            return false;
    }
    return left <= most_left;
}

/* The projector, or NULL where it cannot be of use: it makes symbols of one level, and its memory
 * was sized by a configured number of tokens. A larger chunk is the CPU's. */
static cg_projector *usable(const cg_encoding *encoding, cg_projector *projector)
{
    const unsigned lossy = encoding->level_mask >> CG_L1;
    const bool is_one = lossy != 0 && (encoding->is_nested || (lossy & (lossy - 1)) == 0);
    return projector != NULL && encoding->heads->profile->version > 1 && is_one &&
                   encoding->heads->n_tokens <= projector->n_tokens
               ? projector
               : NULL;
}

/* Symbols of the finest level, made by the projector of a task's elements, or with NULL of the
 * joint matrix's rows; what the task leaves for that; and coded_out, what the projector coded.
 * False: it did not, they are wrong, or an element is not finite. w->block: has the sum of all
 * rows. */
static bool project_elsewhere(const cg_encoding *encoding, const cg_group *group, unsigned matrix,
                              const uint32_t n_components[CG_DCT], const void *in,
                              cg_projector *projector, const encode_work *w,
                              const cg_symbols symbols[CG_N_LEVELS],
                              cg_coded coded_out[CG_N_LEVELS])
{
    const cg_heads *heads = encoding->heads;
    const cg_profile *p = heads->profile;
    const unsigned finest = (unsigned)__builtin_ctz(encoding->level_mask & ~(1u << CG_L0));
    const cg_symbols *own = &symbols[finest];
    cg_projection what = {.basis = (uint32_t)(group - p->groups) * p->n_matrices + matrix,
                          .n_rows = (uint32_t)own->n_rows,
                          .row_stride = (uint32_t)w->row_stride,
                          .n_shared = n_shared_of(p, group),
                          .step = p->step[finest - 1][matrix],
                          .level_mask =
                              projector->miscodes ? 0 : encoding->level_mask & ~(1u << CG_L0),
                          .stream_percent = encoding->stream_percent,
                          .elements = in,
                          .dtype = heads->dtype,
                          .n_tokens = heads->n_tokens,
                          .first_position = heads->first_position,
                          .order = encoding->order};
    cg_projected made = {0};
    for (unsigned f = 0; f < CG_DCT; f++) {
        what.n_components[f] = n_components[f];
        what.n_given[f] = group != p->joint ? n_fed(encoding, f) : 0;
    }
    if (projector->project(projector, &what, &made) != CG_OK ||
        !agrees(p, cg_analysis_of(p, group, matrix), &what, &made, w)) {
        projector->n_failed++;
        return false;
    }
    for (unsigned f = 0; f < CG_DCT; f++) {
        memcpy(own->cells[f], made.cells[f],
               (size_t)what.n_rows * own->columns->n_active[f] * sizeof *made.cells[f]);
        share(encoding, group, own->n_rows, f, made.given[f], what.n_given[f]);
    }
    memcpy(coded_out, made.coded, sizeof made.coded);
    return true;
}

/* The level that another is coded given; NULL: it is coded alone. */
static const cg_symbols *coarser(const cg_encoding *encoding, unsigned level,
                                 const cg_symbols symbols[CG_N_LEVELS])
{
    const bool refines =
        encoding->is_nested && level < CG_N_LEVELS - 1 && cg_encoding_has(encoding, level + 1);
    return refines ? &symbols[level + 1] : NULL;
}

/* The symbols' matrices of all levels. The coarsest first: strips of a finer level point at the
 * cells of the coarser one. */
static void lay_symbols(const cg_encoding *encoding, const cg_group *group, unsigned matrix,
                        const encode_work *w, cg_symbols symbols[CG_N_LEVELS])
{
    const cg_block_order *order = encoding->order;
    for (unsigned level = CG_N_LEVELS - 1; level >= CG_L1; level--)
        symbols[level] =
            cg_symbols_lay(&group->columns[level - 1][matrix], coarser(encoding, level, symbols),
                           order->runs, order->n_runs, w->symbols[level]);
}

/* Where symbols were made smaller, or may have been, a projector has coded others. */
static const cg_coded NONE_CODED[CG_N_LEVELS];

/* Whether a section that a projector coded may be taken. */
static bool is_well_coded(const cg_encoding *encoding, unsigned level,
                          const cg_symbols symbols[CG_N_LEVELS], cg_projector *projector,
                          cg_coded coded)
{
    if (projector->n_coded++ % CG_CODED_SAMPLE != 0 ||
        cg_symbols_are_coded_as(encoding->heads->profile, &symbols[level],
                                coarser(encoding, level, symbols), coded))
        return true;
    projector->miscodes = true;
    projector->n_failed++;
    return false;
}

static uint8_t *copy_of(cg_coded coded, size_t *n_bytes_out)
{
    uint8_t *bytes = malloc(coded.n_bytes);
    *n_bytes_out = coded.n_bytes;
    return bytes != NULL ? memcpy(bytes, coded.bytes, coded.n_bytes) : NULL;
}

/* The sections of all levels: what a projector has coded, by level, if anything; otherwise they are
 * coded here. */
static cg_status code_symbols(const cg_encoding *encoding, const cg_symbols symbols[CG_N_LEVELS],
                              cg_projector *projector, const cg_coded coded[CG_N_LEVELS],
                              cg_piece sections_out[CG_N_LEVELS])
{
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
        if (!cg_encoding_has(encoding, level))
            continue;
        cg_piece *out = &sections_out[level];
        const bool is_coded = coded[level].bytes != NULL && !projector->miscodes &&
                              is_well_coded(encoding, level, symbols, projector, coded[level]);
        out->bytes = is_coded
                         ? copy_of(coded[level], &out->n_bytes)
                         : cg_symbols_code(encoding->heads->profile, &symbols[level], (cg_coded){0},
                                           encoding->stream_percent, &out->n_bytes);
        if (out->bytes == NULL)
            return CG_ERR_NO_MEMORY;
    }
    return CG_OK;
}

/* Makes the symbols of all levels, of the rows or, where it is_projected, of those of the finest
 * level. n_components: of each frequency. Returns how many symbols cg_encoder_n_saturated() counts.
 */
static uint64_t make_symbols(const cg_encoding *encoding, const cg_group *group, unsigned matrix,
                             const uint32_t n_components[CG_DCT], bool is_projected,
                             const encode_work *w, const cg_symbols symbols[CG_N_LEVELS])
{
    const cg_profile *p = encoding->heads->profile;
    const size_t n_blocks = cg_count_blocks(encoding->heads->n_tokens);
    const float *coef = w->coef + n_shared_of(p, group);
    uint64_t n_saturated = 0;
    for (unsigned f = 0; f < CG_DCT; f++) {
        if (!is_projected) {
            analyze(p, cg_analysis_of(p, group, matrix), n_blocks, n_components[f],
                    w->rows + f * n_blocks * w->row_stride, w);
            share(encoding, group, n_blocks, f, w->coef, w->coef_stride);
        }
        n_saturated += cg_klt_quantize(encoding, group, matrix, f, is_projected ? NULL : coef,
                                       w->coef_stride, symbols);
    }
    return n_saturated;
}

cg_status cg_klt_encode(const cg_encoding *encoding, const cg_group *group, unsigned matrix,
                        const void *in, void *scratch, cg_projector *projector,
                        cg_piece sections_out[CG_N_LEVELS], uint64_t *n_saturated)
{
    const cg_heads *heads = encoding->heads;
    const cg_profile *p = heads->profile;
    cg_arena arena = {scratch, 0};
    encode_work w = take_encode_work(&arena, p, group, matrix, heads->n_tokens);
    cg_symbols symbols[CG_N_LEVELS] = {0};
    uint32_t n_components[CG_DCT];
    lay_symbols(encoding, group, matrix, &w, symbols);
    for (unsigned f = 0; f < CG_DCT; f++) {
        const uint32_t n_own = most_columns(encoding, group, matrix, f);
        n_components[f] = n_own > 0 ? p->n_shared + n_own : n_fed(encoding, f);
    }
    cg_coded coded[CG_N_LEVELS] = {0};
    projector = usable(encoding, projector);
    const bool is_projected =
        projector != NULL && sum_spectra(heads, encoding->order, group, matrix, in, &w) &&
        project_elsewhere(encoding, group, matrix, n_components, in, projector, &w, symbols, coded);
    if (!is_projected && !load_rows(heads, encoding->order, group, matrix, in, &w))
        return CG_ERR_INVALID_ARGUMENT;
    const uint64_t n =
        make_symbols(encoding, group, matrix, n_components, is_projected, &w, symbols);
    *n_saturated += n;
    return code_symbols(encoding, symbols, projector, n == 0 ? coded : NONE_CODED, sections_out);
}

size_t cg_klt_shared_bytes(const cg_profile *profile, uint32_t n_tokens)
{
    return (size_t)CG_DCT * cg_count_blocks(n_tokens) * profile->joint->n_channels * sizeof(float);
}

cg_status cg_klt_encode_joint(const cg_encoding *encoding, void *scratch, cg_projector *projector,
                              cg_piece sections_out[CG_N_LEVELS], uint64_t *n_saturated)
{
    const cg_profile *p = encoding->heads->profile;
    const uint32_t n_tokens = encoding->heads->n_tokens;
    const size_t n_blocks = cg_count_blocks(n_tokens);
    cg_arena arena = {scratch, 0};
    encode_work w = take_encode_work(&arena, p, p->joint, 0, n_tokens);
    w.rows = encoding->shared;
    cg_symbols symbols[CG_N_LEVELS] = {0};
    uint32_t n_components[CG_DCT];
    lay_symbols(encoding, p->joint, 0, &w, symbols);
    projector = usable(encoding, projector);
    for (unsigned f = 0; f < CG_DCT; f++) {
        const size_t n = n_blocks * w.row_stride;
        n_components[f] = most_columns(encoding, p->joint, 0, f);
        if (projector == NULL)
            continue;
        /* A frequency that no level wants may hold anything. */
        const bool is_wanted = n_components[f] > 0;
        sum_rows(p, w.rows + f * n, is_wanted ? n_blocks : 0, w.row_stride,
                 w.block + f * w.row_stride);
        if (is_wanted)
            memcpy((float *)projector->memory + f * n, w.rows + f * n, n * sizeof *w.rows);
    }
    cg_coded coded[CG_N_LEVELS] = {0};
    const bool is_projected =
        projector != NULL &&
        project_elsewhere(encoding, p->joint, 0, n_components, NULL, projector, &w, symbols, coded);
    uint64_t n = make_symbols(encoding, p->joint, 0, n_components, is_projected, &w, symbols);
    n += cg_klt_limit_given(encoding, symbols, w.limit);
    *n_saturated += n;
    return code_symbols(encoding, symbols, projector, n == 0 ? coded : NONE_CODED, sections_out);
}

cg_status cg_klt_transcode(const cg_profile *profile, const cg_block_order *order, unsigned from,
                           unsigned to, const cg_group *group, unsigned matrix, uint32_t n_tokens,
                           cg_coded section, cg_piece *section_out)
{
    (void)n_tokens; /* the order has a row for each of their blocks */
    const float ratio = profile->step[from - 1][matrix] / profile->step[to - 1][matrix];
    return cg_symbols_transcode(profile, &group->columns[from - 1][matrix],
                                &group->columns[to - 1][matrix], order->runs, order->n_runs, ratio,
                                (cg_coded){0}, section, &section_out->bytes, &section_out->n_bytes);
}
