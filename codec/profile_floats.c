/* Bases of version 1: FORMAT.md, "Basis in floats". */
#include "codec/profile_floats.h"

#include "codec/bf16.h"
#include "codec/cursor.h"
#include "codec/profile_finite.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { EXACT_BITS = 9 /* of a component that an encoder takes for exact */ };

/* Of an element or a scale of a basis, whose rows are about orthonormal: sums and units of elements
 * stay finite. */
static const float MOST_BASIS = 1e30f;

/* A component in bf16. row: NULL, or where its elements go. */
static cg_status read_wide_row(cg_cursor *in, size_t n_channels, uint16_t *row, float *most_out)
{
    const uint8_t *bytes;
    uint16_t most = 0;
    if (!cg_cursor_bytes(in, 2 * n_channels, &bytes))
        return CG_ERR_TRUNCATED;
    for (size_t ch = 0; ch < n_channels; ch++) {
        const uint16_t element = (uint16_t)cg_get_le(bytes + 2 * ch, 2);
        if (!(fabsf(cg_bf16_to_f32(element)) <= MOST_BASIS)) /* so that a NaN fails */
            return CG_ERR_CORRUPT;
        /* Without their signs, floats are ordered as the integers that their bits are. */
        most = (element & 0x7fff) > most ? element & 0x7fff : most;
        if (row != NULL)
            row[ch] = element;
    }
    *most_out = cg_bf16_to_f32(most);
    return CG_OK;
}

/* A component in signed numbers of few bits, one after another from the lowest bit of the first
 * byte, and their scale. row: as above. */
static cg_status read_narrow_row(cg_cursor *in, bool is_packed, size_t n_channels, uint16_t *row,
                                 uint8_t *bits_out, float *scale_out)
{
    uint8_t bits = 8;
    float scale;
    const uint8_t *bytes;
    if (is_packed && (!cg_cursor_u8(in, &bits) || bits < 2 || bits > CG_MAX_NARROW_BITS))
        return CG_ERR_CORRUPT;
    if (!cg_cursor_f32(in, &scale) || !(fabsf(scale) <= MOST_BASIS))
        return CG_ERR_CORRUPT;
    const size_t n_bytes = (n_channels * bits + 7) / 8;
    if (!cg_cursor_bytes(in, n_bytes, &bytes))
        return CG_ERR_TRUNCATED;
    /* A basis has one form: the bits that are left over are zeros. */
    if (n_channels * bits % 8 != 0 && bytes[n_bytes - 1] >> (n_channels * bits % 8) != 0)
        return CG_ERR_CORRUPT;
    for (size_t ch = 0; ch < n_channels && row != NULL; ch++) {
        /* Twelve bits lie in at most three bytes. */
        const size_t at = ch * bits / 8, left = n_bytes - at;
        const unsigned three =
            (unsigned)cg_get_le(bytes + at, left < 3 ? left : 3) >> (ch * bits % 8);
        const int value =
            (int)(three & ((1u << bits) - 1)) - (int)((three >> (bits - 1) & 1) << bits);
        row[ch] = cg_bf16_from_f32(scale * (float)value);
    }
    *bits_out = bits;
    *scale_out = scale;
    return CG_OK;
}

/* The rows of a basis. basis->rows and basis->scale: NULL, and the file's bytes are only checked.
 */
static cg_status read_rows(cg_cursor *in, const cg_profile *p, const cg_group *group,
                           unsigned plane, unsigned n_wide, cg_basis_rows *basis)
{
    const size_t n_channels = basis->n_channels;
    cg_status status = CG_OK;
    double sum = 0; /* of each component's largest element */
    basis->n_exact = n_wide;
    for (unsigned c = 0; c < basis->n_components && status == CG_OK; c++) {
        uint16_t *row = basis->rows != NULL ? basis->rows + c * n_channels : NULL;
        uint8_t bits = 0;
        float scale = 0, most = 0;
        if (c < n_wide) {
            status = read_wide_row(in, n_channels, row, &most);
            sum += most;
            continue;
        }
        status = read_narrow_row(in, p->is_packed, n_channels, row, &bits, &scale);
        sum += ldexp(fabs(scale), bits - 1);
        basis->n_exact += basis->n_exact == c && bits >= EXACT_BITS;
        if (basis->scale != NULL)
            basis->scale[c] = scale;
    }
    /* Kernels walk components in sixteens, exact ones and others apart. */
    const uint32_t sixteens = (basis->n_exact + 15) / 16 * 16;
    basis->n_exact = sixteens < basis->n_components ? sixteens : basis->n_components;
    if (status != CG_OK)
        return status;
    /* No row of the DCT sums to more than 4. Sums before the step is multiplied are f32, too. */
    sum *= 4 * CG_MOST_SYMBOL;
    return sum <= CG_MOST_ELEMENT && cg_profile_stays_finite(p, group, plane, sum) ? CG_OK
                                                                                   : CG_ERR_CORRUPT;
}

cg_status cg_profile_read_rows(const cg_profile *p, const cg_group *group, unsigned plane,
                               cg_basis_rows *rows)
{
    cg_cursor in = {p->basis_bytes + group->basis_offset[plane], SIZE_MAX}; /* checked before */
    return read_rows(&in, p, group, plane, group->n_wide[plane], rows);
}

cg_status cg_profile_read_floats(cg_cursor *in, const cg_profile *p, cg_group *group,
                                 unsigned plane)
{
    cg_basis_rows rows = {.n_channels = group->n_channels,
                          .n_components = group->n_components[plane]};
    const size_t n_elements = (size_t)rows.n_components * rows.n_channels;
    if (n_elements / 4 > in->left_bytes) /* at least two bits an element */
        return CG_ERR_TRUNCATED;
    if (p->is_only_checked)
        return read_rows(in, p, group, plane, group->n_wide[plane], &rows);
    rows.rows = malloc((n_elements + 1) * sizeof *rows.rows);
    cg_status status = rows.rows != NULL ? CG_OK : CG_ERR_NO_MEMORY;
    if (status == CG_OK)
        status = read_rows(in, p, group, plane, group->n_wide[plane], &rows);
    if (status == CG_OK)
        status = cg_basis_init(&p->layout, &rows, &group->basis[plane]);
    free(rows.rows);
    return status;
}

cg_status cg_profile_keep_floats(cg_profile *p, const uint8_t *start, const uint8_t *end)
{
    const size_t n_bytes = (size_t)(end - start);
    if (p->is_only_checked)
        return CG_OK;
    p->basis_bytes = malloc(n_bytes + 1); /* not 0 bytes */
    if (p->basis_bytes == NULL)
        return CG_ERR_NO_MEMORY;
    memcpy(p->basis_bytes, start, n_bytes);
    return CG_OK;
}
