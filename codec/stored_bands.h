/* codec/stored_bands.h - a basis in bands as a profile's bytes have it.
 *
 * Here bytes are read and checked, a band at a time; codec/bands.h lays out what kernels read. A
 * band points into the bytes and owns nothing.
 *
 * Bytes: codec/FORMAT.md, "Basis in bands". Threads: functions share nothing.
 */
#ifndef CG_CODEC_STORED_BANDS_H
#define CG_CODEC_STORED_BANDS_H
#include "codec/cursor.h"
#include "codec/status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CG_BAND_COMPONENTS = 32,
    CG_MAX_BAND_SHIFT = 16,
    CG_MAX_ELEMENT = 1 << 14, /* of a basis, in magnitude, before the shift */
};

/* A component: a number of few bits for each channel, one after another from the lowest bit of the
 * first byte on. An element is a number times multiple. */
typedef struct cg_stored_row {
    unsigned bits, multiple;
    const uint8_t *bytes;
    size_t n_bytes;
} cg_stored_row;

typedef struct cg_stored_band {
    unsigned shift;
    bool is_wide; /* an element may need more than a byte */
    uint32_t n_rows;
    cg_stored_row rows[CG_BAND_COMPONENTS];
} cg_stored_band;

/* Reads and checks a band of n_rows (at most CG_BAND_COMPONENTS) rows of n_channels; *in moves
 * behind it. CG_ERR_TRUNCATED, CG_ERR_CORRUPT. */
cg_status cg_stored_band_read(cg_cursor *in, uint32_t n_channels, uint32_t n_rows,
                              cg_stored_band *band);
/* A row's elements, to out[n_channels]. */
void cg_stored_row_unpack(const cg_stored_row *row, uint32_t n_channels, int16_t *out);

#ifdef __cplusplus
}
#endif
#endif
