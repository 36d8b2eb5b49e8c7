/* Where the bases of a profile lie on a GPU, and what a projection on one is there. */
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

size_t cg_cuda_bases_bytes(const cg_profile *p)
{
    return begin_of(p, cg_profile_n_bases(p));
}

void cg_cuda_bases_fill(const cg_profile *p, void *bases)
{
    uint8_t *bytes = bases;
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
}

void cg_cuda_projection_bound(const cg_profile *p, uint32_t n_tokens, size_t *n_rows_out,
                              size_t *n_coefs_out, size_t *made_bytes_out)
{
    cg_projection most = {.n_rows = cg_count_blocks(n_tokens)};
    *n_rows_out = *n_coefs_out = *made_bytes_out = 0;
    for (uint32_t basis = 0; basis < cg_profile_n_bases(p); basis++) {
        const cg_bands *bands = bands_of(p, basis);
        most.n_shared = bands->n_shared;
        for (uint32_t f = 0; f < CG_DCT; f++) {
            most.n_components[f] = bands->n_components;
            most.n_given[f] = bands->n_shared;
        }
        const size_t n_rows =
                         CG_DCT * (size_t)most.n_rows * cg_projection_stride(bands->n_channels),
                     n_coefs = cg_cuda_projection_n_coefs(&most),
                     made_bytes = cg_cuda_projection_made(&most).n_bytes;
        *n_rows_out = n_rows > *n_rows_out ? n_rows : *n_rows_out;
        *n_coefs_out = n_coefs > *n_coefs_out ? n_coefs : *n_coefs_out;
        *made_bytes_out = made_bytes > *made_bytes_out ? made_bytes : *made_bytes_out;
    }
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

cg_status cg_cuda_projection_of(const cg_profile *p, const cg_projection *projection,
                                const void *bases_dev, size_t max_rows, size_t max_coefs,
                                cg_cuda_projection *out)
{
    if (projection->basis >= cg_profile_n_bases(p))
        return CG_ERR_INVALID_ARGUMENT;
    const cg_bands *bands = bands_of(p, projection->basis);
    const size_t n_rows = (size_t)CG_DCT * projection->n_rows * projection->row_stride;
    if (projection->row_stride != cg_projection_stride(bands->n_channels) || n_rows > max_rows ||
        cg_cuda_projection_n_coefs(projection) > max_coefs ||
        projection->n_shared != bands->n_shared)
        return CG_ERR_INVALID_ARGUMENT;
    for (uint32_t f = 0; f < CG_DCT; f++)
        if (projection->n_components[f] > bands->n_components ||
            projection->n_given[f] > projection->n_components[f] ||
            projection->n_given[f] > projection->n_shared)
            return CG_ERR_INVALID_ARGUMENT;
    const place at = place_of(bands, begin_of(p, projection->basis));
    *out = (cg_cuda_projection){
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
