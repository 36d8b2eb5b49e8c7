/* Where the bases of a profile lie on a GPU, and what a projection of one is there: checked, since
 * kernels believe it. */
#include "cuda/project.h"

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
    return &p->groups[basis / p->n_matrices].bands[basis % p->n_matrices];
}

static place place_of(const cg_bands *bands, size_t at)
{
    const size_t n = bands->n_components;
    const size_t elements_bytes = n * cg_projection_stride(bands->n_channels) * sizeof(int16_t),
                 scale_bytes = cg_padded(n * sizeof(float), BASE_ALIGN);
    return (place){at, at + elements_bytes, at + elements_bytes + scale_bytes};
}

static uint32_t count_bases(const cg_profile *p)
{
    return p->n_groups * p->n_matrices;
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
    return begin_of(p, count_bases(p));
}

void cg_cuda_bases_fill(const cg_profile *p, void *bases)
{
    uint8_t *bytes = bases;
    size_t at = 0;
    for (uint32_t basis = 0; basis < count_bases(p); basis++) {
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
    const size_t n_blocks = (n_tokens + CG_DCT - 1u) / CG_DCT;
    size_t most = 0;
    *n_rows_out = *n_coefs_out = 0;
    for (uint32_t basis = 0; basis < count_bases(p); basis++) {
        const cg_bands *bands = bands_of(p, basis);
        const size_t n_rows = CG_DCT * n_blocks * cg_projection_stride(bands->n_channels),
                     n_coefs = CG_DCT * n_blocks * bands->n_components;
        *n_rows_out = n_rows > *n_rows_out ? n_rows : *n_rows_out;
        *n_coefs_out = n_coefs > *n_coefs_out ? n_coefs : *n_coefs_out;
        most = bands->n_components > most ? bands->n_components : most;
    }
    *made_bytes_out = cg_cuda_projection_cells_at(CG_DCT * most) + *n_coefs_out * sizeof(int16_t);
}

size_t cg_cuda_projection_n_columns(const cg_projection *projection)
{
    size_t n = 0;
    for (uint32_t f = 0; f < CG_DCT; f++)
        n += projection->n_components[f];
    return n;
}

size_t cg_cuda_projection_n_coefs(const cg_projection *projection)
{
    return projection->n_rows * cg_cuda_projection_n_columns(projection);
}

cg_status cg_cuda_projection_of(const cg_profile *p, const cg_projection *projection,
                                const void *bases_dev, size_t max_rows, size_t max_coefs,
                                cg_cuda_projection *out)
{
    if (projection->basis >= count_bases(p))
        return CG_ERR_INVALID_ARGUMENT;
    const cg_bands *bands = bands_of(p, projection->basis);
    const size_t n_rows = (size_t)CG_DCT * projection->n_rows * projection->row_stride;
    if (projection->row_stride != cg_projection_stride(bands->n_channels) || n_rows > max_rows ||
        cg_cuda_projection_n_coefs(projection) > max_coefs)
        return CG_ERR_INVALID_ARGUMENT;
    for (uint32_t f = 0; f < CG_DCT; f++)
        if (projection->n_components[f] > bands->n_components)
            return CG_ERR_INVALID_ARGUMENT;
    const place at = place_of(bands, begin_of(p, projection->basis));
    *out = (cg_cuda_projection){
        .elements_dev = (const int16_t *)((const uint8_t *)bases_dev + at.elements_at),
        .scale_dev = (const float *)((const uint8_t *)bases_dev + at.scale_at),
        .step = projection->step,
        .n_rows = projection->n_rows,
        .row_stride = projection->row_stride,
        .n_exact = bands->n_exact};
    memcpy(out->n_components, projection->n_components, sizeof out->n_components);
    return CG_OK;
}
