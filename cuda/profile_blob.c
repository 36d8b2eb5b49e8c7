/* A profile as kernels read it: the blob. The same code runs twice, first to count where parts lie,
 * then to write them. What is laid out otherwise than on the CPU: classes (buckets by how rare a
 * slot is), channels (in pairs that are rotated together), the basis (fragments of tensor
 * instructions) and shared components (two columns of symbols: cuda/joint.cuh). */
#include "cuda/profile_blob.h"

#include "codec/block_order.h"
#include "codec/klt.h"
#include "codec/paper.h"

#include <stdlib.h>
#include <string.h>

/* Parts of a blob, one after another. blob NULL: they are only counted. */
typedef struct writer {
    uint8_t *blob;
    uint64_t at;
} writer;

static void *take(writer *w, uint64_t n_bytes, uint64_t *at_out)
{
    const uint64_t at = cg_padded(w->at, 16);
    w->at = at + n_bytes;
    *at_out = at;
    return w->blob != NULL ? w->blob + at : NULL;
}

static uint32_t entry_of(uint32_t cum, uint32_t freq)
{
    return cum << CG_CUDA_CUM_SHIFT | (CG_CUDA_CUM_ONE - CG_RANS_TOTAL + freq - 1);
}

/* The smallest number v = 2^14 - slot of a bucket or of those behind it: its inverse is
 * cg_cuda_bucket() (cuda/streams.cuh). Where exponents are small, some buckets have no number of
 * their own. */
static uint32_t bucket_start(unsigned bucket)
{
    const unsigned exponent = bucket >> CG_CUDA_BUCKET_BITS,
                   eighths = (1U << CG_CUDA_BUCKET_BITS) + bucket % (1U << CG_CUDA_BUCKET_BITS);
    return ((eighths << exponent) + (1U << CG_CUDA_BUCKET_BITS) - 1) >> CG_CUDA_BUCKET_BITS;
}

void cg_cuda_class_fill(const cg_rans_class *cls, cg_cuda_class *out)
{
    const unsigned n = cls->n_symbols;
    memset(out, 0, sizeof *out);
    out->shift = cls->shift;
    out->n_symbols = cls->n_symbols;
    out->escape_bits = cls->escape_bits;
    out->top = cls->top;
    memcpy(out->refine, cls->refine, sizeof out->refine);
    for (unsigned i = 0; i < n; i++)
        out->entry[i] = entry_of(cls->cum[i], cls->freq[i]);
    out->entry[n] = out->entry[n + 2] = CG_CUDA_NO_ENTRY;
    uint8_t i = 0;
    for (unsigned bucket = CG_CUDA_BUCKETS; bucket-- > 0;) { /* so slots rise */
        const uint32_t end = CG_RANS_TOTAL + 1 - bucket_start(bucket),
                       slot = CG_RANS_TOTAL + 1 - bucket_start(bucket + 1);
        if (end <= slot)
            continue; /* of no slot */
        while (slot >= cls->cum[i + 1])
            i++;
        /* A kernel looks at two indices, i and the next. A bucket with more has number n + 1,
         * behind the escape: then the kernel searches from the start. */
        out->first[bucket] = (uint8_t)(i + 2U <= n - 1U && end > cls->cum[i + 2] ? n + 1 : i);
    }
}

void cg_cuda_class_fill_idle(cg_cuda_class *out)
{
    memset(out, 0, sizeof *out);
    out->n_symbols = UINT8_MAX; /* nothing is its escape */
    out->escape_bits = 5;
    /* One index of all slots: x = 2^14 * (x >> 14) + slot, which is x. */
    out->entry[0] = entry_of(0, CG_RANS_TOTAL);
    out->entry[1] = CG_CUDA_NO_ENTRY;
    for (unsigned i = 0; i < CG_RANS_REFINE_CONTEXTS; i++)
        out->refine[i] = CG_RANS_TOTAL;
}

static void lay_classes(writer *w, const cg_profile *p, uint64_t *at_out)
{
    cg_cuda_class *out = take(w, (p->n_classes + (size_t)1) * sizeof *out, at_out);
    if (out == NULL)
        return;
    for (uint32_t i = 0; i < p->n_classes; i++)
        cg_cuda_class_fill(&p->classes[i], &out[i]);
    cg_cuda_class_fill_idle(&out[p->n_classes]);
}

/* Before version 4 a class is the same in all rows. */
static void lay_class_of(writer *w, const cg_profile *p, uint64_t *at_out)
{
    const size_t n = p->n_classes;
    uint8_t(*out)[CG_CUDA_CLASS_FACTORS] = take(w, n * sizeof *out, at_out);
    if (out == NULL)
        return;
    memset(out, 0, n * sizeof *out);
    for (size_t c = 0; c < n; c++)
        for (size_t i = 0; i < CG_N_STEP_FACTORS; i++)
            out[c][i] = p->class_of != NULL ? p->class_of[i * n + c] : (uint8_t)c;
}

static void lay_costs(writer *w, const cg_profile *p, uint64_t *at_out)
{
    cg_cuda_class_cost *out = take(w, p->n_classes * sizeof *out, at_out);
    for (uint32_t i = 0; out != NULL && i < p->n_classes; i++) {
        memcpy(out[i].index, p->classes[i].cost, sizeof out[i].index);
        memcpy(out[i].refine, p->classes[i].refine_cost, sizeof out[i].refine);
    }
}

/* ---- strips ---- */

/* The strips of a level's columns, as cg_symbols_lay() cuts them; coarse: NULL, or the next coarser
 * level's. first_column: what stands before them in each frequency. classes_at: of the columns, one
 * frequency after another. */
static cg_cuda_strips lay_strips(writer *w, const cg_level_columns *columns,
                                 const cg_level_columns *coarse, uint32_t first_column,
                                 uint64_t classes_at)
{
    cg_cuda_strips strips = {.classes_at = classes_at,
                             .n = columns->n_strips + (coarse != NULL ? (uint32_t)CG_DCT : 0)};
    uint32_t before = 0; /* columns of the frequencies so far */
    cg_cuda_strip *out = take(w, strips.n * sizeof *out, &strips.at);
    strips.n = 0;
    for (unsigned f = 0; f < CG_DCT; f++) {
        const uint32_t n_active = columns->n_active[f],
                       n_coarse = coarse != NULL ? coarse->n_active[f] : 0;
        for (uint32_t c = 0, n; c < n_active; c += n) {
            const uint32_t end = c < n_coarse ? n_coarse : n_active;
            n = end - c < CG_RANS_LANES ? end - c : CG_RANS_LANES;
            if (out != NULL)
                out[strips.n] = (cg_cuda_strip){
                    .column = first_column + c,
                    .class_at = before + c,
                    .frequency = (uint8_t)f,
                    .n_lanes = (uint8_t)n,
                    .is_refined = c < n_coarse,
                    .n_zeros =
                        (uint8_t)(c + n == n_active
                                      ? cg_cuda_n_bands(n_active) * CG_BAND_COMPONENTS - n_active
                                      : 0)};
            strips.n++;
        }
        before += n_active;
    }
    return strips;
}

static uint64_t lay_column_classes(writer *w, const cg_level_columns *columns)
{
    uint64_t at;
    uint8_t *out = take(w, columns->n_columns, &at);
    for (unsigned f = 0; f < CG_DCT && out != NULL; f++) {
        if (columns->n_active[f] > 0)
            memcpy(out, columns->column_class[f], columns->n_active[f]);
        out += columns->n_active[f];
    }
    return at;
}

/* ---- channels ---- */

/* Where a channel of a matrix stands among the tensor instructions' columns: tile, and in it low or
 * high, and the pair. */
typedef struct column {
    uint64_t tile;
    uint32_t is_high, pair;
} column;

/* Channels that are rotated together become the low and the high one of a pair; those behind
 * rotary_dim pair up as neighbours. */
static column column_of(const cg_cuda_profile *l, uint32_t channel)
{
    const uint32_t head_dim = l->profile->geometry.head_dim, half = l->profile->rotary_dim / 2,
                   dim = channel % head_dim;
    const bool is_rotated = dim < 2 * half;
    const uint32_t pair = is_rotated ? dim % half : dim / 2;
    return (column){.tile =
                        (uint64_t)(channel / head_dim) * l->head_tiles + pair / CG_CUDA_TILE_PAIRS,
                    .is_high = is_rotated ? dim / half : dim % 2,
                    .pair = pair % CG_CUDA_TILE_PAIRS};
}

/* A lane's four sums of a row are neighbours: cg_cuda_store_given() stores them together. */
static column column_of_joint(uint32_t channel)
{
    const uint32_t in_tile = channel % CG_CUDA_JOINT_CHANNELS;
    return (column){.tile = channel / CG_CUDA_JOINT_CHANNELS,
                    .is_high = in_tile % 4 / 2,
                    .pair = in_tile / 4 * 2 + in_tile % 2};
}

static uint64_t n_tiles(const cg_cuda_profile *l, const cg_group *group)
{
    if (group == l->profile->joint)
        return group->n_channels / CG_CUDA_JOINT_CHANNELS;
    return (uint64_t)group->n_slices * l->profile->geometry.n_kv_heads * l->head_tiles;
}

/* Means, weights or anchor steps of a matrix: by tile, or with anchors by channel. step: NULL, or
 * by plane what is divided by the table. */
static uint64_t lay_channels(writer *w, const cg_cuda_profile *l, const cg_group *group,
                             unsigned matrix, const float *table, const float *step,
                             float elsewhere)
{
    const cg_profile *p = l->profile;
    const uint32_t channels = (uint32_t)cg_geometry_channels(&p->geometry);
    const bool is_tiled = l->preset == CG_CUDA_PRESET_KLT;
    const uint64_t n =
        is_tiled ? n_tiles(l, group) * 2 * CG_CUDA_TILE_PAIRS : (uint64_t)group->n_channels;
    uint64_t at;
    float *out = take(w, n * sizeof *out, &at);
    if (out == NULL)
        return at;
    for (uint64_t i = 0; i < n; i++)
        out[i] = elsewhere;
    for (uint32_t ch = 0; ch < group->n_channels; ch++) {
        const cg_slice slice = cg_group_slice(group, matrix, ch / channels);
        const column c = is_tiled ? column_of(l, ch) : (column){0};
        const float value = cg_profile_row(p, table, slice)[ch % channels];
        out[is_tiled ? (c.tile * 2 + c.is_high) * CG_CUDA_TILE_PAIRS + c.pair : ch] =
            step != NULL ? step[slice.plane] / value : value;
    }
    return at;
}

/* ---- bases ---- */

static const cg_band_slab *slab_of(const cg_bands *bands, uint32_t band)
{
    const cg_band_slab *slab = bands->slabs;
    while (band * CG_BAND_COMPONENTS >= slab->first_component + slab->n_components)
        slab++;
    return slab;
}

static uint32_t count_bands(const cg_bands *bands)
{
    return (bands->n_components + CG_BAND_COMPONENTS - 1u) / CG_BAND_COMPONENTS;
}

static uint32_t count_digits(const cg_bands *bands, uint32_t band)
{
    return slab_of(bands, band)->is_wide ? 2 : 1;
}

/* What the basis has of the first bands: the number of a band's low digits, or of all behind the
 * last band. High digits stand behind the low ones. */
static uint32_t step_number(const cg_bands *bands, uint32_t band)
{
    uint32_t n = 0;
    for (uint32_t before = 0; before < band; before++)
        n += count_digits(bands, before);
    return n;
}

/* The columns of symbols that a band is multiplied by: the first, and how many. */
static uint32_t first_column_of(const cg_bands *bands, uint32_t band)
{
    const uint32_t n_shared = bands->n_shared / CG_BAND_COMPONENTS;
    return band + (band < n_shared ? band * (CG_CUDA_GIVEN_COLUMNS - 1)
                                   : n_shared * (CG_CUDA_GIVEN_COLUMNS - 1));
}

static uint32_t count_columns_of(const cg_bands *bands, uint32_t band)
{
    return band * CG_BAND_COMPONENTS < bands->n_shared ? CG_CUDA_GIVEN_COLUMNS : 1;
}

/* A step for each digit of a basis and column that it is multiplied by, of the first bands of
 * columns; by falling shift: how often sums are shifted is at most the number of different shifts.
 * Nothing is left of what is shifted by 32 bits. Returns how many. */
static uint32_t lay_steps(const cg_bands *bands, unsigned level, uint32_t n_bands,
                          cg_cuda_step *steps_out)
{
    uint32_t n = 0;
    for (uint32_t shift = 32; shift-- > 0;) {
        uint32_t number = 0;
        for (uint32_t band = 0; band < count_bands(bands); band++) {
            const uint32_t of_band = cg_bands_shift(bands, slab_of(bands, band), level),
                           first = first_column_of(bands, band),
                           n_digits = count_digits(bands, band);
            for (uint32_t i = 0; i < n_digits * count_columns_of(bands, band); i++) {
                const uint32_t digit = i % n_digits, part = i / n_digits;
                if (first >= n_bands || of_band + 8 * (digit + part) != shift)
                    continue;
                if (steps_out != NULL)
                    steps_out[n] = (cg_cuda_step){.band = (uint16_t)(first + part),
                                                  .shift = (uint8_t)shift,
                                                  .is_rest = part > 0,
                                                  .number = number + digit};
                n++;
            }
            number += n_digits;
        }
    }
    return n;
}

/* Where component c of a channel stands in a tile's fragments of a step: the layout of the tensor
 * instruction's B (PTX, mma.m16n8k32): lane 4 * column + k % 16 / 4, register k / 16, byte k % 4.
 * In which order components are summed up is ours to choose, if symbols have the same: a lane's 8
 * are neighbours.
 */
static uint64_t fragment_offset(column col, uint64_t n_steps, uint64_t step, uint32_t c)
{
    const uint32_t k = c % CG_BAND_COMPONENTS, lane = 4 * col.pair + k / 8;
    return ((col.tile * n_steps + step) * CG_RANS_LANES + lane) * 16 + 8 * col.is_high + k % 8;
}

static void fill_component(const cg_cuda_profile *l, const cg_group *group, const cg_bands *bands,
                           uint32_t n_steps, uint32_t c, const int16_t *row, uint8_t *out)
{
    const uint32_t band = c / CG_BAND_COMPONENTS, step = step_number(bands, band);
    const bool is_joint = group == l->profile->joint;
    for (uint32_t ch = 0; ch < bands->n_channels; ch++) {
        const column col = is_joint ? column_of_joint(ch) : column_of(l, ch);
        const int8_t low = (int8_t)row[ch];
        out[fragment_offset(col, n_steps, step, c)] = (uint8_t)low;
        if (count_digits(bands, band) > 1)
            out[fragment_offset(col, n_steps, step + 1, c)] = (uint8_t)((row[ch] - low) / 256);
    }
}

/* Every channel, component and step has its byte; what there is none of stays 0. */
static cg_status fill_basis(const cg_cuda_profile *l, const cg_group *group, unsigned matrix,
                            uint32_t n_steps, uint8_t *out)
{
    const cg_bands *bands = &group->bands[matrix];
    int16_t *row = malloc((bands->n_channels + (size_t)1) * sizeof *row);
    if (row == NULL)
        return CG_ERR_NO_MEMORY;
    memset(out, 0, n_tiles(l, group) * n_steps * CG_RANS_LANES * 16);
    for (uint32_t c = 0; c < bands->n_components; c++) {
        (void)cg_bands_row(&l->profile->layout, bands, c, row);
        fill_component(l, group, bands, n_steps, c, row, out);
    }
    free(row);
    return CG_OK;
}

/* Bands of a level's columns of symbols: of a group with shared components these come first, all of
 * them where others follow. n_bands_out: by frequency. Returns the most. */
static uint32_t count_level_bands(const cg_profile *p, const cg_group *group, unsigned matrix,
                                  unsigned level, uint32_t *n_bands_out)
{
    uint32_t most = 0;
    for (unsigned f = 0; f < CG_DCT; f++) {
        const uint32_t n_own = cg_cuda_n_bands(group->columns[level][matrix].n_active[f]),
                       n_shared = group->bands[matrix].n_shared;
        n_bands_out[f] = n_own;
        if (n_shared > 0)
            n_bands_out[f] += CG_CUDA_GIVEN_COLUMNS *
                              cg_cuda_n_bands(n_own > 0 ? n_shared : p->n_given[level][f]);
        most = n_bands_out[f] > most ? n_bands_out[f] : most;
    }
    return most;
}

/* A level has the steps of its own bands. All levels read one basis, by the numbers of its steps.
 */
static cg_status lay_basis(writer *w, const cg_cuda_profile *l, const cg_group *group,
                           unsigned matrix, cg_cuda_matrix *m)
{
    const cg_bands *bands = &group->bands[matrix];
    for (unsigned level = 0; level < CG_N_LOSSY; level++) {
        const uint32_t n_bands =
            count_level_bands(l->profile, group, matrix, level, m->n_bands[level]);
        m->n_steps[level] = lay_steps(bands, CG_L1 + level, n_bands, NULL);
        cg_cuda_step *steps = take(w, m->n_steps[level] * sizeof *steps, &m->steps_at[level]);
        if (steps != NULL)
            (void)lay_steps(bands, CG_L1 + level, n_bands, steps);
    }
    m->n_all_steps = step_number(bands, count_bands(bands));
    uint8_t *basis = take(w, n_tiles(l, group) * m->n_all_steps * CG_RANS_LANES * 16, &m->basis_at);
    return w->blob != NULL ? fill_basis(l, group, matrix, m->n_all_steps, basis) : CG_OK;
}

/* ---- all of it ---- */

static void lay_columns(writer *w, const cg_profile *p, const cg_group *group, unsigned matrix,
                        cg_cuda_matrix *m)
{
    const uint32_t first_column = CG_CUDA_GIVEN_COLUMNS * group->bands[matrix].n_shared;
    for (unsigned level = 0; level < CG_N_LOSSY; level++) {
        const cg_level_columns *columns = &group->columns[level][matrix];
        const uint64_t classes_at = lay_column_classes(w, columns);
        m->strips[level][0] = lay_strips(w, columns, NULL, first_column, classes_at);
        if (p->nests && level + 1 < CG_N_LOSSY)
            m->strips[level][1] = lay_strips(w, columns, &group->columns[level + 1][matrix],
                                             first_column, classes_at);
    }
}

static cg_status lay_matrix(writer *w, const cg_cuda_profile *l, const cg_group *group,
                            unsigned matrix, cg_cuda_matrix *m)
{
    const cg_profile *p = l->profile;
    lay_columns(w, p, group, matrix, m);
    if (group == p->joint)
        return lay_basis(w, l, group, matrix, m);
    m->mean_at = lay_channels(w, l, group, matrix, p->mean, NULL, 0);
    if (l->preset == CG_CUDA_PRESET_KLT) {
        for (unsigned level = 0; level < CG_N_LOSSY; level++)
            m->scale_at[level] = lay_channels(w, l, group, matrix, p->weight, p->step[level], 1);
        return lay_basis(w, l, group, matrix, m);
    }
    const uint64_t classes_at = lay_column_classes(w, &group->anchors[matrix]);
    m->anchors = lay_strips(w, &group->anchors[matrix], NULL, 0, classes_at);
    m->weight_at = lay_channels(w, l, group, matrix, p->weight, NULL, 1);
    m->anchor_step_at = lay_channels(w, l, group, matrix, p->anchor_step, NULL, 1);
    return CG_OK;
}

static cg_status lay_out(writer *w, cg_cuda_profile *l)
{
    const cg_profile *p = l->profile;
    const size_t n_freq = (size_t)p->n_ropes * (p->rotary_dim / 2);
    cg_status status = CG_OK;
    lay_classes(w, p, &l->classes_at);
    lay_class_of(w, p, &l->class_of_at);
    lay_costs(w, p, &l->costs_at);
    double *inv_freq = take(w, n_freq * sizeof *inv_freq, &l->inv_freq_at);
    uint8_t *layer_rope = take(w, p->geometry.n_layers, &l->layer_rope_at);
    if (w->blob != NULL) {
        memcpy(inv_freq, p->inv_freq, n_freq * sizeof *inv_freq);
        memcpy(layer_rope, p->layer_rope, p->geometry.n_layers);
    }
    for (uint32_t i = 0; i < cg_profile_n_bases(p) && status == CG_OK; i++)
        status =
            lay_matrix(w, l, &p->groups[i / p->n_matrices], i % p->n_matrices, &l->matrices[i]);
    return status;
}

/* By numbers: the profile's preset is of a library that has a table of its own. */
static cg_status find_kernels(const cg_profile *profile, cg_cuda_preset *preset_out)
{
    if (profile->version < CG_PROFILE_VERSION_BANDS)
        return CG_ERR_UNSUPPORTED_VERSION;
    switch (profile->preset->transforms) {
    case CG_KLT_TRANSFORMS: *preset_out = CG_CUDA_PRESET_KLT; return CG_OK;
    case CG_PAPER_TRANSFORMS: *preset_out = CG_CUDA_PRESET_PAPER; return CG_OK;
    default: return CG_ERR_UNSUPPORTED;
    }
}

cg_status cg_cuda_profile_new(const cg_profile *profile, cg_cuda_profile **laid_out)
{
    cg_cuda_preset preset;
    *laid_out = NULL;
    const cg_status status = find_kernels(profile, &preset);
    if (status != CG_OK)
        return status;
    const size_t n_matrices = cg_profile_n_bases(profile);
    cg_cuda_profile *l = calloc(1, sizeof *l + n_matrices * sizeof *l->matrices);
    if (l == NULL)
        return CG_ERR_NO_MEMORY;
    l->profile = profile;
    l->preset = preset;
    const uint32_t pairs = profile->geometry.head_dim / 2u;
    l->head_tiles = (pairs + CG_CUDA_TILE_PAIRS - 1) / CG_CUDA_TILE_PAIRS;
    writer counts = {0};
    (void)lay_out(&counts, l); /* counting cannot fail */
    l->n_bytes = cg_padded(counts.at, CG_CUDA_ALIGN);
    *laid_out = l;
    return CG_OK;
}

void cg_cuda_profile_free(cg_cuda_profile *laid_out)
{
    free(laid_out);
}

size_t cg_cuda_profile_bytes(const cg_cuda_profile *laid_out)
{
    return laid_out->n_bytes;
}

cg_status cg_cuda_profile_fill(const cg_cuda_profile *laid_out, void *blob)
{
    const size_t n_matrices = cg_profile_n_bases(laid_out->profile);
    const size_t n_bytes = sizeof *laid_out + n_matrices * sizeof *laid_out->matrices;
    /* Laying out writes offsets, the same ones again. What is laid out stays read-only. */
    cg_cuda_profile *again = malloc(n_bytes);
    if (again == NULL)
        return CG_ERR_NO_MEMORY;
    memcpy(again, laid_out, n_bytes);
    writer w = {.blob = blob};
    const cg_status status = lay_out(&w, again);
    free(again);
    return status;
}
