/* Where the bases of a profile lie on a GPU, what is behind them, and what a projection is there.
 */
#include "cuda/project.h"

#include "codec/block_order.h"
#include "codec/profile_data.h"

#include <math.h>
#include <string.h>

enum { BASE_ALIGN = 16 };

/* A basis: its elements, then its scales. */
typedef struct place {
    size_t elements_at, scale_at, end;
} place;

static const cg_bands *bands_of(const cg_profile *p, uint32_t basis)
{
    return &p->groups[basis / p->n_matrices].bands[basis % p->n_matrices]; /* or the joint one's */
}

static bool is_joint(const cg_profile *p, uint32_t basis)
{
    return basis == p->n_groups * p->n_matrices; /* behind those of all layer groups */
}

static place place_of(const cg_bands *bands, size_t at)
{
    const size_t n = bands->n_components;
    const size_t elements_bytes = n * cg_projection_stride(bands->n_channels) * sizeof(int16_t),
                 scale_bytes = cg_padded(n * sizeof(float), BASE_ALIGN);
    return (place){at, at + elements_bytes, at + elements_bytes + scale_bytes};
}

/* Of basis n; n may be how many there are: then .elements_at is the end of all. */
static size_t begin_of(const cg_profile *p, uint32_t n)
{
    size_t at = 0;
    for (uint32_t basis = 0; basis < n; basis++)
        at = place_of(bands_of(p, basis), at).end;
    return at;
}

/* Behind the bases: what spectra are made with. */
typedef struct tables {
    size_t mean_at, weight_at, inv_freq_at, layer_rope_at, end;
    size_t channels_bytes, inv_freq_bytes;
} tables;

static tables tables_of(const cg_profile *p)
{
    const cg_geometry *g = &p->geometry;
    tables t = {.channels_bytes =
                    (size_t)g->n_layers * CG_N_PLANES * cg_geometry_channels(g) * sizeof(float),
                .inv_freq_bytes = p->n_ropes * (size_t)(p->rotary_dim / 2) * sizeof(double),
                .mean_at = begin_of(p, cg_profile_n_bases(p))};
    t.weight_at = t.mean_at + cg_padded(t.channels_bytes, BASE_ALIGN);
    t.inv_freq_at = t.weight_at + cg_padded(t.channels_bytes, BASE_ALIGN);
    t.layer_rope_at = t.inv_freq_at + cg_padded(t.inv_freq_bytes, BASE_ALIGN);
    t.end = t.layer_rope_at + cg_padded(g->n_layers, BASE_ALIGN);
    return t;
}

size_t cg_cuda_bases_bytes(const cg_profile *p)
{
    return tables_of(p).end;
}

void cg_cuda_bases_fill(const cg_profile *p, void *bases)
{
    uint8_t *bytes = bases;
    const tables t = tables_of(p);
    size_t at = 0;
    for (uint32_t basis = 0; basis < cg_profile_n_bases(p); basis++) {
        const cg_bands *bands = bands_of(p, basis);
        const place to = place_of(bands, at);
        const size_t stride = cg_projection_stride(bands->n_channels);
        int16_t *row = (int16_t *)(bytes + to.elements_at);
        float *scale = (float *)(bytes + to.scale_at);
        memset(bytes + at, 0, to.end - at);
        for (uint32_t c = 0; c < bands->n_components; c++, row += stride)
            scale[c] =
                ldexpf(1, (int)cg_bands_row(&p->layout, bands, c, row) - (int)bands->unit_bits);
        at = to.end;
    }
    memset(bytes + at, 0, t.end - at); /* padding goes to the GPU, too: no old memory with it */
    memcpy(bytes + t.mean_at, p->mean, t.channels_bytes);
    memcpy(bytes + t.weight_at, p->weight, t.channels_bytes);
    if (t.inv_freq_bytes > 0)
        memcpy(bytes + t.inv_freq_at, p->inv_freq, t.inv_freq_bytes);
    memcpy(bytes + t.layer_rope_at, p->layer_rope, p->geometry.n_layers);
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Floats of the rows of all frequencies. */
static size_t n_floats_of(const cg_projection *projection)
{
    return CG_DCT * (size_t)projection->n_rows * projection->row_stride;
}

/* The most of each alone: no task needs all of them, and each has memory of its own. */
cg_cuda_projection_most cg_cuda_projection_bound(const cg_profile *p, uint32_t dtype,
                                                 uint32_t n_tokens)
{
    cg_projection task = {
        .n_rows = cg_count_blocks(n_tokens), .n_tokens = n_tokens, .dtype = dtype};
    cg_cuda_projection_most most = {.n_places = task.n_rows};
    for (; task.basis < cg_profile_n_bases(p); task.basis++) {
        const cg_bands *bands = bands_of(p, task.basis);
        task.row_stride = cg_projection_stride(bands->n_channels);
        task.n_shared = bands->n_shared;
        for (uint32_t f = 0; f < CG_DCT; f++) {
            task.n_components[f] = bands->n_components;
            task.n_given[f] = bands->n_shared;
        }
        most.n_rows = larger(most.n_rows, n_floats_of(&task));
        most.n_coefs = larger(most.n_coefs, cg_cuda_projection_n_coefs(&task));
        most.made_bytes = larger(most.made_bytes, cg_cuda_projection_made(&task).n_bytes);
        most.elements_bytes =
            larger(most.elements_bytes, cg_cuda_projection_elements_bytes(p, &task));
        if (is_joint(p, task.basis))
            most.given_rows = n_floats_of(&task);
    }
    return most;
}

size_t cg_cuda_projection_n_coefs(const cg_projection *projection)
{
    size_t n = 0;
    for (uint32_t f = 0; f < CG_DCT; f++)
        n += projection->n_components[f];
    return projection->n_rows * n;
}

cg_cuda_made cg_cuda_projection_made(const cg_projection *projection)
{
    cg_cuda_made made = {0};
    for (uint32_t f = 0; f < CG_DCT; f++) {
        made.n_residues += cg_projection_n_cells(projection, f);
        made.n_given += (size_t)projection->n_rows * projection->n_given[f];
    }
    made.n_cells = projection->n_rows * made.n_residues;
    made.given_at = cg_padded(made.n_residues * sizeof(float), BASE_ALIGN);
    made.cells_at = made.given_at + cg_padded(made.n_given * sizeof(float), BASE_ALIGN);
    made.n_bytes = made.cells_at + made.n_cells * sizeof(int16_t);
    return made;
}

size_t cg_cuda_projection_elements_bytes(const cg_profile *p, const cg_projection *projection)
{
    return is_joint(p, projection->basis)
               ? 0
               : (size_t)projection->n_tokens * bands_of(p, projection->basis)->n_channels *
                     cg_dtype_bytes(projection->dtype);
}

void cg_cuda_projection_places(const cg_projection *projection, cg_cuda_place *places_out)
{
    for (uint32_t row = 0; row < projection->n_rows; row++)
        places_out[row] =
            (cg_cuda_place){projection->order->block[row],
                            1 / CG_STEP_FACTORS[projection->order->factor_index[row]]};
}

static cg_cuda_spectra spectra_of(const cg_profile *p, const cg_projection *projection,
                                  const uint8_t *bases_dev)
{
    const cg_group *group = &p->groups[projection->basis / p->n_matrices];
    const cg_slice first = cg_group_slice(group, projection->basis % p->n_matrices, 0);
    const tables t = tables_of(p);
    return (cg_cuda_spectra){.elements_dev = projection->elements,
                             .mean_dev = (const float *)(bases_dev + t.mean_at),
                             .weight_dev = (const float *)(bases_dev + t.weight_at),
                             .inv_freq_dev = (const double *)(bases_dev + t.inv_freq_at),
                             .layer_rope_dev = bases_dev + t.layer_rope_at,
                             .n_slices = group->n_slices,
                             .n_layers = group->n_layers,
                             .first_layer = first.layer,
                             .first_plane = first.plane,
                             .n_kv_heads = p->geometry.n_kv_heads,
                             .head_dim = p->geometry.head_dim,
                             .half = p->rotary_dim / 2,
                             .n_tokens = projection->n_tokens,
                             .n_sinks = p->n_sinks,
                             .first_position = projection->first_position,
                             .dtype = projection->dtype};
}

/* Whether there is room for what rows are made of, and it is as many tokens as rows. */
static bool are_elements_right(const cg_profile *p, const cg_projection *projection,
                               const cg_cuda_projection_most *most)
{
    if (projection->elements == NULL)
        return n_floats_of(projection) <= most->given_rows;
    return !is_joint(p, projection->basis) && projection->n_tokens > 0 &&
           projection->n_tokens <= CG_MAX_CHUNK_TOKENS &&
           projection->n_rows == cg_count_blocks(projection->n_tokens) &&
           projection->n_rows <= most->n_places &&
           projection->order->n_blocks == projection->n_rows &&
           cg_dtype_bytes(projection->dtype) > 0 &&
           cg_cuda_projection_elements_bytes(p, projection) <= most->elements_bytes;
}

cg_status cg_cuda_projection_of(const cg_profile *p, const cg_projection *projection,
                                const void *bases_dev, const cg_cuda_projection_most *most,
                                cg_cuda_projection *out)
{
    if (projection->basis >= cg_profile_n_bases(p))
        return CG_ERR_INVALID_ARGUMENT;
    /* Kernels check nothing. The codec made these numbers, but what is written by them must stay in
     * the memory that was taken for the largest task. */
    const cg_bands *bands = bands_of(p, projection->basis);
    if (projection->row_stride != cg_projection_stride(bands->n_channels) ||
        n_floats_of(projection) > most->n_rows ||
        cg_cuda_projection_n_coefs(projection) > most->n_coefs ||
        !are_elements_right(p, projection, most) || projection->n_shared != bands->n_shared)
        return CG_ERR_INVALID_ARGUMENT;
    for (uint32_t f = 0; f < CG_DCT; f++)
        if (projection->n_components[f] > bands->n_components ||
            projection->n_given[f] > projection->n_components[f] ||
            projection->n_given[f] > projection->n_shared)
            return CG_ERR_INVALID_ARGUMENT;
    const place at = place_of(bands, begin_of(p, projection->basis));
    *out = (cg_cuda_projection){
        .spectra = projection->elements != NULL ? spectra_of(p, projection, bases_dev)
                                                : (cg_cuda_spectra){0},
        .elements_dev = (const int16_t *)((const uint8_t *)bases_dev + at.elements_at),
        .scale_dev = (const float *)((const uint8_t *)bases_dev + at.scale_at),
        .step = projection->step,
        .n_rows = projection->n_rows,
        .row_stride = projection->row_stride,
        .n_exact = bands->n_exact,
        .n_shared = bands->n_shared};
    memcpy(out->n_components, projection->n_components, sizeof out->n_components);
    memcpy(out->n_given, projection->n_given, sizeof out->n_given);
    return CG_OK;
}
