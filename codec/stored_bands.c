#include "codec/stored_bands.h"

enum { MIN_BITS = 2, MAX_BITS = 15 };

static cg_status read_row(cg_cursor *in, uint32_t n_channels, cg_stored_row *row)
{
    uint8_t bits;
    uint16_t multiple;
    if (!cg_cursor_u8(in, &bits) || !cg_cursor_u16(in, &multiple))
        return CG_ERR_TRUNCATED;
    if (bits < MIN_BITS || bits > MAX_BITS || multiple == 0 ||
        (uint32_t)multiple << (bits - 1) > CG_MAX_ELEMENT)
        return CG_ERR_CORRUPT;
    *row = (cg_stored_row){.bits = bits, .multiple = multiple};
    row->n_bytes = ((size_t)n_channels * bits + 7) / 8;
    if (!cg_cursor_bytes(in, row->n_bytes, &row->bytes))
        return CG_ERR_TRUNCATED;
    const unsigned n_used = (unsigned)((size_t)n_channels * bits % 8);
    return n_used != 0 && row->bytes[row->n_bytes - 1] >> n_used != 0 ? CG_ERR_CORRUPT : CG_OK;
}

cg_status cg_stored_band_read(cg_cursor *in, uint32_t n_channels, uint32_t n_rows,
                              cg_stored_band *band)
{
    uint8_t shift;
    if (!cg_cursor_u8(in, &shift))
        return CG_ERR_TRUNCATED;
    if (shift > CG_MAX_BAND_SHIFT)
        return CG_ERR_CORRUPT;
    band->shift = shift;
    band->n_rows = n_rows;
    /* A band is wide as a whole: its components share lines. */
    band->is_wide = false;
    for (uint32_t i = 0; i < n_rows; i++) {
        const cg_status status = read_row(in, n_channels, &band->rows[i]);
        if (status != CG_OK)
            return status;
        /* By what the bits could hold, not by what they do: this is known without unpacking. */
        band->is_wide |= band->rows[i].multiple << (band->rows[i].bits - 1) > 128;
    }
    return CG_OK;
}

void cg_stored_row_unpack(const cg_stored_row *row, uint32_t n_channels, int16_t *out)
{
    uint64_t pending = 0;
    unsigned n_pending = 0;
    const uint8_t *at = row->bytes;
    const unsigned sign = 1u << (row->bits - 1), mask = 2 * sign - 1;
    for (uint32_t ch = 0; ch < n_channels; ch++) {
        while (n_pending < row->bits) {
            pending |= (uint64_t)*at++ << n_pending;
            n_pending += 8;
        }
        /* Two's complement of so many bits: flip the sign bit and take its weight off. */
        const int number = (int)(((unsigned)pending & mask) ^ sign) - (int)sign;
        out[ch] = (int16_t)(number * (int)row->multiple);
        pending >>= row->bits;
        n_pending -= row->bits;
    }
}
