#include "codec/bands.h"

#include <stdlib.h>
#include <string.h>

enum { EXACT_BITS = 9, MIN_BITS = 2, MAX_BITS = 15 };

/* A component's numbers in a file. */
typedef struct stored_row {
    unsigned bits, multiple;
    const uint8_t *bytes;
    size_t n_bytes;
} stored_row;

static cg_status read_row(cg_cursor *in, uint32_t n_channels, stored_row *row)
{
    uint8_t bits;
    uint16_t multiple;
    if (!cg_cursor_u8(in, &bits) || !cg_cursor_u16(in, &multiple))
        return CG_ERR_TRUNCATED;
    if (bits < MIN_BITS || bits > MAX_BITS || multiple == 0 ||
        (uint32_t)multiple << (bits - 1) > CG_MAX_ELEMENT)
        return CG_ERR_CORRUPT;
    *row = (stored_row){.bits = bits, .multiple = multiple};
    row->n_bytes = ((size_t)n_channels * bits + 7) / 8;
    if (!cg_cursor_bytes(in, row->n_bytes, &row->bytes))
        return CG_ERR_TRUNCATED;
    const unsigned n_used = (unsigned)((size_t)n_channels * bits % 8);
    return n_used != 0 && row->bytes[row->n_bytes - 1] >> n_used != 0 ? CG_ERR_CORRUPT : CG_OK;
}

/* Elements from numbers that stand one after another from the lowest bit of the first byte on. */
static void unpack_row(const stored_row *row, uint32_t n_channels, int16_t *out)
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
        const int number = (int)(((unsigned)pending & mask) ^ sign) - (int)sign;
        out[ch] = (int16_t)(number * (int)row->multiple);
        pending >>= row->bits;
        n_pending -= row->bits;
    }
}

/* A band's rows of at most CG_BAND_COMPONENTS components. */
typedef struct stored_band {
    unsigned shift;
    bool is_wide;
    uint32_t n_rows;
    stored_row rows[CG_BAND_COMPONENTS];
} stored_band;

static cg_status read_band(cg_cursor *in, uint32_t n_channels, uint32_t n_rows, stored_band *band)
{
    uint8_t shift;
    if (!cg_cursor_u8(in, &shift))
        return CG_ERR_TRUNCATED;
    if (shift > CG_MAX_BAND_SHIFT)
        return CG_ERR_CORRUPT;
    band->shift = shift;
    band->n_rows = n_rows;
    band->is_wide = false;
    for (uint32_t i = 0; i < n_rows; i++) {
        const cg_status status = read_row(in, n_channels, &band->rows[i]);
        if (status != CG_OK)
            return status;
        band->is_wide |= band->rows[i].multiple << (band->rows[i].bits - 1) > 128;
    }
    return CG_OK;
}

static uint32_t rows_of_band(uint32_t n_components, uint32_t first)
{
    return n_components - first < CG_BAND_COMPONENTS ? n_components - first : CG_BAND_COMPONENTS;
}

/* Checks the bytes of all bands. */
static cg_status check_bands(cg_cursor *in, uint32_t n_channels, uint32_t n_components)
{
    stored_band band;
    cg_status status = CG_OK;
    for (uint32_t c = 0; c < n_components && status == CG_OK; c += CG_BAND_COMPONENTS)
        status = read_band(in, n_channels, rows_of_band(n_components, c), &band);
    return status;
}

/* Appends a band to the last slab, or begins one. */
static void lay_band(const stored_band *band, uint32_t first, cg_bands *bands)
{
    cg_band_slab *slab = bands->n_slabs > 0 ? &bands->slabs[bands->n_slabs - 1] : NULL;
    const uint32_t a_line = band->is_wide ? 2 : CG_QUAD_COMPONENTS,
                   n_lines = (band->n_rows + a_line - 1) / a_line;
    if (slab == NULL || slab->shift != band->shift || slab->is_wide != band->is_wide ||
        slab->n_lines + n_lines > CG_SLAB_LINES) {
        slab = &bands->slabs[bands->n_slabs++];
        *slab = (cg_band_slab){.first_component = first,
                               .first_line = bands->n_lines,
                               .shift = band->shift,
                               .is_wide = band->is_wide};
    }
    slab->n_components += band->n_rows;
    slab->n_lines += n_lines;
    bands->n_lines += n_lines;
    for (uint32_t i = 0; i < band->n_rows; i++) {
        const uint32_t most = band->rows[i].multiple << (band->rows[i].bits - 1);
        bands->most_before[first + i + 1] =
            bands->most_before[first + i] + ((uint64_t)most << band->shift);
        bands->n_exact += bands->n_exact == first + i && band->rows[i].bits >= EXACT_BITS;
    }
}

static void *take_aligned(size_t n, size_t each_bytes)
{
    size_t n_bytes;
    if (!cg_size_mul(n, each_bytes, &n_bytes) || n_bytes > SIZE_MAX - 64)
        return NULL;
    return aligned_alloc(64, (n_bytes + 64) / 64 * 64); /* not 0 bytes */
}

/* Component i of a slab. */
static void store_lines(const cg_basis_layout *layout, const cg_bands *bands,
                        const cg_band_slab *slab, uint32_t i, const int16_t *row)
{
    const size_t line = slab->first_line + i / (slab->is_wide ? 2 : CG_QUAD_COMPONENTS);
    for (uint32_t first = 0; first < bands->n_channels; first += layout->unit_channels) {
        const size_t left = bands->n_channels - first,
                     n_unit = left < layout->unit_channels ? left : layout->unit_channels;
        for (size_t at = 0; at < n_unit; at += CG_BAND_CHANNELS) {
            const size_t n = n_unit - at < CG_BAND_CHANNELS ? n_unit - at : CG_BAND_CHANNELS;
            const int16_t *in = row + first + at;
            uint8_t *out = cg_bands_panel(layout, bands, first / layout->unit_channels, at) +
                           line * 4 * cg_bands_panel_channels(layout, at);
            for (size_t ch = 0; ch < n && slab->is_wide; ch++)
                memcpy(out + 4 * ch + i % 2 * 2, &in[ch], sizeof *in);
            for (size_t ch = 0; ch < n && !slab->is_wide; ch++)
                out[4 * ch + i % 4] = (uint8_t)(in[ch] + 128);
        }
    }
}

/* Zeros: what is stored of channels and components that there are not. */
static void clear_lines(const cg_basis_layout *layout, const cg_bands *bands, size_t n_units)
{
    for (size_t unit = 0; unit < n_units; unit++) {
        for (size_t at = 0; at < cg_bands_unit_channels(layout); at += CG_BAND_CHANNELS) {
            const size_t line_bytes = 4 * cg_bands_panel_channels(layout, at);
            uint8_t *panel = cg_bands_panel(layout, bands, unit, at);
            for (const cg_band_slab *s = bands->slabs; s < bands->slabs + bands->n_slabs; s++)
                memset(panel + s->first_line * line_bytes, s->is_wide ? 0 : 128,
                       s->n_lines * line_bytes);
        }
    }
}

static int16_t *elements_at(const cg_basis_layout *layout, const cg_bands *bands, size_t unit,
                            uint32_t c)
{
    return bands->elements + (unit * bands->n_components + c) * cg_bands_unit_channels(layout);
}

static void store_elements(const cg_basis_layout *layout, const cg_bands *bands, uint32_t c,
                           const int16_t *row)
{
    for (uint32_t first = 0; first < bands->n_channels; first += layout->unit_channels) {
        const size_t left = bands->n_channels - first,
                     n = left < layout->unit_channels ? left : layout->unit_channels;
        memcpy(elements_at(layout, bands, first / layout->unit_channels, c), row + first,
               n * sizeof *row);
    }
}

/* What the kernels read, from bytes that are checked. row: room for a component. */
static void fill(const cg_basis_layout *layout, cg_cursor *in, const cg_bands *bands, int16_t *row)
{
    stored_band band;
    const cg_band_slab *slab = bands->slabs;
    for (uint32_t c = 0; c < bands->n_components; c += band.n_rows) {
        (void)read_band(in, bands->n_channels, rows_of_band(bands->n_components, c), &band);
        slab += c == slab->first_component + slab->n_components;
        for (uint32_t i = 0; i < band.n_rows; i++) {
            unpack_row(&band.rows[i], bands->n_channels, row);
            if (layout->has_quads)
                store_lines(layout, bands, slab, c + i - slab->first_component, row);
            else
                store_elements(layout, bands, c + i, row);
        }
    }
}

static cg_status lay_out(const cg_basis_layout *layout, cg_cursor in, cg_bands *bands)
{
    const size_t n_units =
        (bands->n_channels + (size_t)layout->unit_channels - 1) / layout->unit_channels;
    const size_t n_bands = (bands->n_components + CG_BAND_COMPONENTS - 1u) / CG_BAND_COMPONENTS;
    cg_cursor again = in;
    stored_band band;
    bands->slabs = calloc(n_bands + 1, sizeof *bands->slabs);
    bands->most_before = calloc((size_t)bands->n_components + 1, sizeof *bands->most_before);
    int16_t *row = malloc((bands->n_channels + (size_t)1) * sizeof *row);
    cg_status status = CG_ERR_NO_MEMORY;
    if (bands->slabs == NULL || bands->most_before == NULL || row == NULL)
        goto done;
    for (uint32_t c = 0; c < bands->n_components; c += CG_BAND_COMPONENTS) {
        (void)read_band(&in, bands->n_channels, rows_of_band(bands->n_components, c), &band);
        lay_band(&band, c, bands);
    }
    /* Kernels walk components in sixteens, exact ones and others apart. */
    const uint32_t sixteens = (bands->n_exact + 15) / 16 * 16;
    bands->n_exact = sixteens < bands->n_components ? sixteens : bands->n_components;
    const size_t n_stored = n_units * cg_bands_unit_channels(layout); /* channels */
    if (layout->has_quads) {
        bands->lines = take_aligned(n_stored, (size_t)bands->n_lines * 4);
        if (bands->lines == NULL)
            goto done;
        clear_lines(layout, bands, n_units);
    } else {
        const size_t n = n_stored * bands->n_components;
        bands->elements = take_aligned(n, sizeof *bands->elements);
        if (bands->elements == NULL)
            goto done;
        memset(bands->elements, 0, n * sizeof *bands->elements);
    }
    fill(layout, &again, bands, row);
    status = CG_OK;
done:
    free(row);
    return status;
}

cg_status cg_bands_read(const cg_basis_layout *layout, uint32_t n_channels, uint32_t n_components,
                        unsigned unit_bits, bool is_only_checked, cg_cursor *in, cg_bands *bands)
{
    const cg_cursor start = *in;
    const cg_status status = check_bands(in, n_channels, n_components);
    if (status != CG_OK || is_only_checked)
        return status;
    bands->n_channels = n_channels;
    bands->n_components = n_components;
    bands->unit_bits = unit_bits;
    return lay_out(layout, start, bands);
}

void cg_bands_destroy(cg_bands *bands)
{
    free(bands->slabs);
    free(bands->most_before);
    free(bands->lines);
    free(bands->elements);
}

unsigned cg_bands_row(const cg_basis_layout *layout, const cg_bands *bands, uint32_t c,
                      int16_t *row_out)
{
    const cg_band_slab *slab = bands->slabs;
    while (c >= slab->first_component + slab->n_components)
        slab++;
    const uint32_t i = c - slab->first_component;
    const size_t line = slab->first_line + i / (slab->is_wide ? 2 : CG_QUAD_COMPONENTS);
    for (uint32_t ch = 0; ch < bands->n_channels; ch++) {
        const size_t unit = ch / layout->unit_channels, in_unit = ch % layout->unit_channels,
                     lane = in_unit % CG_BAND_CHANNELS, at = in_unit - lane;
        if (bands->elements != NULL) {
            row_out[ch] = elements_at(layout, bands, unit, c)[in_unit];
            continue;
        }
        const uint8_t *four = cg_bands_panel(layout, bands, unit, at) +
                              (line * cg_bands_panel_channels(layout, at) + lane) * 4;
        if (slab->is_wide)
            memcpy(&row_out[ch], four + i % 2 * 2, sizeof *row_out);
        else
            row_out[ch] = (int16_t)(four[i % 4] - 128);
    }
    return slab->shift;
}
