#include "codec/heads.h"

#include "codec/bf16.h"
#include "codec/exact_lane.h"
#include "codec/kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* For profiles of version 1: as libm has them. */
static void rotation_1(uint32_t first_position, size_t n_tokens, const double *inv_freq,
                       size_t half, float *cosine, float *sine)
{
    for (size_t t = 0; t < n_tokens; t++, cosine += half, sine += half) {
        for (size_t i = 0; i < half; i++) {
            /* In f64: at position 100,000 an f32 angle is off by 2^-8. */
            const double angle = (double)(first_position + t) * inv_freq[i];
            cosine[i] = (float)cos(angle);
            sine[i] = (float)sin(angle);
        }
    }
}

cg_status cg_heads_init(const cg_profile *profile, const cg_chunk_header *header, cg_heads *heads)
{
    const size_t half = profile->rotary_dim / 2, n_tokens = header->n_tokens,
                 n_rows = profile->n_ropes * n_tokens;
    /* By tokens, not by layers: layers of one table turn alike, so that cosines are computed once a
     * token and not once a head. */
    float *memory = malloc((2 * n_rows * half + 1) * sizeof *memory); /* not 0 bytes */
    if (memory == NULL)
        return CG_ERR_NO_MEMORY;
    *heads = (cg_heads){.profile = profile,
                        .first_position = header->first_position,
                        .n_tokens = header->n_tokens,
                        .dtype = header->geometry.dtype,
                        .cosine = memory,
                        .sine = memory + n_rows * half};
    for (uint32_t rope = 0; rope < profile->n_ropes; rope++) {
        const size_t at = rope * n_tokens * half;
        (profile->version > 1 ? profile->kernels->exact->rotation : rotation_1)(
            header->first_position, n_tokens, profile->inv_freq + rope * half, half,
            heads->cosine + at, heads->sine + at);
    }
    return CG_OK;
}

void cg_heads_destroy(cg_heads *heads)
{
    free(heads->cosine);
}

void cg_heads_store(const cg_heads *heads, const float *values, size_t n_heads, void *out,
                    size_t element)
{
    const size_t n = n_heads * heads->profile->geometry.head_dim;
    if (heads->dtype == CG_DTYPE_BF16) {
        heads->profile->kernels->to_bf16(values, n, (uint16_t *)out + element);
    } else if (heads->dtype == CG_DTYPE_FP16) {
        for (size_t i = 0; i < n; i++)
            ((uint16_t *)out)[element + i] = cg_fp16_from_f32(values[i]);
    } else if (heads->dtype == CG_DTYPE_FP32) {
        memcpy((float *)out + element, values, n * sizeof *values);
    } else {
        uint8_t *bytes = (uint8_t *)out + element;
        for (size_t i = 0; i < n; i++)
            bytes[i] = heads->dtype == CG_DTYPE_FP8_E4M3 ? cg_e4m3_from_f32(values[i])
                                                         : cg_e5m2_from_f32(values[i]);
    }
}

bool cg_heads_load(const cg_heads *heads, const void *in, size_t element, size_t n_heads,
                   float *values)
{
    const cg_profile *p = heads->profile;
    return p->kernels->load(heads->dtype,
                            (const uint8_t *)in + element * cg_dtype_bytes(heads->dtype),
                            n_heads * p->geometry.head_dim, values);
}

size_t cg_heads_rotation(const cg_heads *heads, uint32_t layer, size_t t)
{
    const cg_profile *p = heads->profile;
    return ((size_t)p->layer_rope[layer] * heads->n_tokens + t) * (p->rotary_dim / 2);
}

void cg_heads_rotate(const cg_heads *heads, uint32_t layer, size_t t, float *values)
{
    const uint32_t half = heads->profile->rotary_dim / 2;
    const size_t at = cg_heads_rotation(heads, layer, t);
    const cg_kernels *kernels = heads->profile->kernels;
    if (half > 0)
        (heads->profile->version > 1 ? kernels->exact->rotate : kernels->rotate)(
            values, heads->cosine + at, heads->sine + at, half);
}

void cg_heads_unrotate(const cg_heads *heads, uint32_t layer, size_t t, float *values)
{
    const uint32_t half = heads->profile->rotary_dim / 2;
    const size_t at = cg_heads_rotation(heads, layer, t);
    const float *cosine = heads->cosine + at, *sine = heads->sine + at;
    for (uint32_t i = 0; i < half; i++)
        cg_lane_unrotate(&values[i], &values[i + half], cosine[i], sine[i]);
}
