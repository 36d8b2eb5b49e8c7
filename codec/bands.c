/* From a profile's bytes to what the integer kernels read. The bytes are walked three times: to
 * check them, which is all that a validator wants; to cut slabs and learn how much memory they
 * take; and to store the elements. The last two passes believe what the first has checked. */
#include "codec/bands.h"

#include <stdlib.h>
#include <string.h>

enum { EXACT_BITS = 9 };

static uint32_t rows_of_band(uint32_t n_components, uint32_t first)
{
    return n_components - first < CG_BAND_COMPONENTS ? n_components - first : CG_BAND_COMPONENTS;
}

/* Reads bytes alone: all that a validator wants. */
static cg_status check_bands(cg_cursor *in, uint32_t n_channels, uint32_t n_components)
{
    cg_stored_band band;
    cg_status status = CG_OK;
    for (uint32_t c = 0; c < n_components && status == CG_OK; c += CG_BAND_COMPONENTS)
        status = cg_stored_band_read(in, n_channels, rows_of_band(n_components, c), &band);
    return status;
}

/* Appends a band to the last slab, or begins one. */
static void lay_band(const cg_basis_layout *layout, const cg_stored_band *band, uint32_t first,
                     cg_bands *bands)
{
    cg_band_slab *slab = bands->n_slabs > 0 ? &bands->slabs[bands->n_slabs - 1] : NULL;
    const uint32_t n_lines = cg_bands_n_lines(layout, band->is_wide, band->n_rows);
    if (slab == NULL || first == bands->n_shared || slab->shift != band->shift ||
        slab->is_wide != band->is_wide || slab->n_lines + n_lines > CG_SLAB_LINES) {
        slab = &bands->slabs[bands->n_slabs++];
        *slab = (cg_band_slab){.first_component = first,
                               .first_line = bands->n_lines,
                               .shift = band->shift,
                               .is_wide = band->is_wide};
    }
    /* Only the last band of a basis may have fewer components than 32: lines of a slab's bands
     * follow one another without gaps. */
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

static void *take_aligned(size_t n_bytes)
{
    if (n_bytes > SIZE_MAX - 64)
        return NULL;
    return aligned_alloc(64, (n_bytes + 64) / 64 * 64); /* not 0 bytes */
}

/* What a byte of a line is in excess of its element: the vector units' product of bytes takes one
 * factor without a sign (vpdpbusd, vpmaddubsw), matrix units take both with it. */
static int byte_offset(const cg_basis_layout *layout)
{
    return layout->is_tiled ? 0 : 128;
}

/* n elements of component i of a slab, in a panel's lines. */
static void store_in_panel(const cg_basis_layout *layout, bool is_wide, uint32_t i,
                           const int16_t *in, size_t n, size_t line_bytes, uint8_t *lines)
{
    uint8_t *quad = lines + cg_bands_n_lines(layout, is_wide, i / 4 * 4) * line_bytes + i % 4;
    if (!is_wide) {
        for (size_t ch = 0; ch < n; ch++)
            quad[4 * ch] = (uint8_t)(in[ch] + byte_offset(layout));
    } else if (layout->is_tiled) {
        for (size_t ch = 0; ch < n; ch++) {
            /* Low digits are signed, -128 to 127; the high one makes up for that. */
            quad[4 * ch] = (uint8_t)in[ch];
            quad[4 * ch + line_bytes] = (uint8_t)((in[ch] + 128) >> CG_DIGIT_BITS);
        }
    } else {
        uint8_t *pair = lines + i / 2 * line_bytes + i % 2 * 2;
        for (size_t ch = 0; ch < n; ch++)
            memcpy(pair + 4 * ch, &in[ch], sizeof *in);
    }
}

/* The same the other way round, of one channel. */
static int16_t element_in_panel(const cg_basis_layout *layout, bool is_wide, uint32_t i, size_t ch,
                                size_t line_bytes, const uint8_t *lines)
{
    const uint8_t *at =
        lines + cg_bands_n_lines(layout, is_wide, i / 4 * 4) * line_bytes + i % 4 + 4 * ch;
    int16_t element;
    if (!is_wide)
        return (int16_t)(layout->is_tiled ? (int8_t)*at : *at - byte_offset(layout));
    if (layout->is_tiled)
        return (int16_t)((int8_t)at[0] + (int8_t)at[line_bytes] * (1 << CG_DIGIT_BITS));
    memcpy(&element, lines + i / 2 * line_bytes + 4 * ch + i % 2 * 2, sizeof element);
    return element;
}

/* Component i of a slab. */
static void store_lines(const cg_basis_layout *layout, const cg_bands *bands,
                        const cg_band_slab *slab, uint32_t i, const int16_t *row)
{
    for (uint32_t first = 0; first < bands->n_channels; first += layout->unit_channels) {
        const size_t left = bands->n_channels - first,
                     n_unit = left < layout->unit_channels ? left : layout->unit_channels;
        for (size_t at = 0; at < n_unit; at += CG_BAND_CHANNELS) {
            /* Panels are cut anew in each unit: the last one of a unit may be narrower. */
            const size_t n = n_unit - at < CG_BAND_CHANNELS ? n_unit - at : CG_BAND_CHANNELS,
                         line_bytes = 4 * cg_bands_panel_channels(layout, at);
            uint8_t *panel = cg_bands_panel(layout, bands, first / layout->unit_channels, at);
            store_in_panel(layout, slab->is_wide, i, row + first + at, n, line_bytes,
                           panel + slab->first_line * line_bytes);
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
                memset(panel + s->first_line * line_bytes, s->is_wide ? 0 : byte_offset(layout),
                       s->n_lines * line_bytes);
        }
    }
}

/* Component i of a slab, for kernels without lines. */
static void store_elements(const cg_basis_layout *layout, const cg_bands *bands,
                           const cg_band_slab *slab, uint32_t i, const int16_t *row)
{
    for (uint32_t ch = 0; ch < bands->n_channels; ch++) {
        uint8_t *out = cg_bands_elements(layout, bands, ch / layout->unit_channels, slab, i);
        if (slab->is_wide)
            memcpy(out + ch % layout->unit_channels * sizeof *row, &row[ch], sizeof *row);
        else
            out[ch % layout->unit_channels] = (uint8_t)row[ch];
    }
}

/* The same the other way round, of one channel. */
static int16_t element_of(const uint8_t *elements, bool is_wide, size_t ch)
{
    int16_t element = (int8_t)elements[ch];
    if (is_wide)
        memcpy(&element, elements + ch * sizeof element, sizeof element);
    return element;
}

/* What the kernels read, from bytes that are checked. row: room for a component. */
static void fill(const cg_basis_layout *layout, cg_cursor *in, const cg_bands *bands, int16_t *row)
{
    cg_stored_band band;
    const cg_band_slab *slab = bands->slabs;
    for (uint32_t c = 0; c < bands->n_components; c += band.n_rows) {
        (void)cg_stored_band_read(in, bands->n_channels, rows_of_band(bands->n_components, c),
                                  &band);
        /* Slabs end where bands do: none begins within a band. */
        slab += c == slab->first_component + slab->n_components;
        for (uint32_t i = 0; i < band.n_rows; i++) {
            cg_stored_row_unpack(&band.rows[i], bands->n_channels, row);
            (bands->lines != NULL ? store_lines : store_elements)(
                layout, bands, slab, c + i - slab->first_component, row);
        }
    }
}

/* Slabs first: how many lines there are says how much memory the elements take. */
static cg_status lay_out(const cg_basis_layout *layout, cg_cursor in, cg_bands *bands)
{
    const size_t n_units =
        (bands->n_channels + (size_t)layout->unit_channels - 1) / layout->unit_channels;
    const size_t n_bands = (bands->n_components + CG_BAND_COMPONENTS - 1u) / CG_BAND_COMPONENTS;
    cg_cursor again = in;
    cg_stored_band band;
    bands->slabs = calloc(n_bands + 1, sizeof *bands->slabs);
    bands->most_before = calloc((size_t)bands->n_components + 1, sizeof *bands->most_before);
    int16_t *row = malloc((bands->n_channels + (size_t)1) * sizeof *row);
    cg_status status = CG_ERR_NO_MEMORY;
    if (bands->slabs == NULL || bands->most_before == NULL || row == NULL)
        goto done;
    for (uint32_t c = 0; c < bands->n_components; c += CG_BAND_COMPONENTS) {
        (void)cg_stored_band_read(&in, bands->n_channels, rows_of_band(bands->n_components, c),
                                  &band);
        lay_band(layout, &band, c, bands);
    }
    /* Kernels walk components in sixteens, exact ones and others apart. */
    const uint32_t sixteens = (bands->n_exact + 15) / 16 * 16;
    bands->n_exact = sixteens < bands->n_components ? sixteens : bands->n_components;
    const size_t n_stored = n_units * cg_bands_unit_channels(layout); /* channels */
    const size_t n_lines = bands->n_lines,
                 n_slack = layout->is_tiled && n_lines > 0 ? (size_t)CG_LINES_SLACK : 0,
                 slack = n_slack * 4 * CG_BAND_CHANNELS;
    size_t n_bytes;
    if (!cg_size_mul(n_stored, 4 * n_lines, &n_bytes) || n_bytes > SIZE_MAX - slack)
        goto done;
    uint8_t *memory = take_aligned(n_bytes + slack);
    if (memory == NULL)
        goto done;
    if (layout->has_quads || layout->is_tiled) {
        bands->lines = memory;
        memset(bands->lines + n_bytes, 0, slack);
        clear_lines(layout, bands, n_units);
    } else {
        bands->elements = memory;
        memset(bands->elements, 0, n_bytes);
    }
    fill(layout, &again, bands, row);
    status = CG_OK;
done:
    free(row);
    return status;
}

cg_status cg_bands_read(const cg_basis_layout *layout, bool is_only_checked, cg_cursor *in,
                        cg_bands *bands)
{
    const cg_cursor start = *in;
    const cg_status status = check_bands(in, bands->n_channels, bands->n_components);
    return status != CG_OK || is_only_checked ? status : lay_out(layout, start, bands);
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
    for (uint32_t ch = 0; ch < bands->n_channels; ch++) {
        const size_t unit = ch / layout->unit_channels, in_unit = ch % layout->unit_channels,
                     lane = in_unit % CG_BAND_CHANNELS, at = in_unit - lane;
        if (bands->elements != NULL) {
            row_out[ch] =
                element_of(cg_bands_elements(layout, bands, unit, slab, i), slab->is_wide, in_unit);
            continue;
        }
        const size_t line_bytes = 4 * cg_bands_panel_channels(layout, at);
        row_out[ch] = element_in_panel(layout, slab->is_wide, i, lane, line_bytes,
                                       cg_bands_panel(layout, bands, unit, at) +
                                           slab->first_line * line_bytes);
    }
    return slab->shift;
}
