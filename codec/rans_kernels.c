/* Compiled once per instruction set, with CG_RANS_KERNELS the name of the table: see
 * rans_kernels.h. A stream is its strips one after another, and a strip its runs; what a strip is,
 * is in rans_strips*.c.
 */
#include "codec/rans_kernels.h"

#include "codec/cursor.h"
#include "codec/rans_strips.h"

static cg_status decode_stream(const cg_rans_matrix *m, size_t stream, const uint8_t *src,
                               size_t src_bytes)
{
    uint32_t states[CG_RANS_LANES];
    if (src_bytes < 4 * CG_RANS_LANES || src_bytes % 2 != 0)
        return CG_ERR_CORRUPT;
    for (unsigned lane = 0; lane < CG_RANS_LANES; lane++) {
        states[lane] = (uint32_t)cg_get_le(src + 4 * lane, 4);
        if (states[lane] < CG_RANS_STATE_LOW)
            return CG_ERR_CORRUPT;
    }
    cg_word_reader words = {src + 4 * CG_RANS_LANES, src + src_bytes, false};
    for (size_t s = stream; s < m->n_strips; s += m->n_streams) {
        cg_status status = CG_OK;
        size_t row = 0;
        for (size_t i = 0; i < m->n_runs && status == CG_OK; row += m->runs[i++].n_rows) {
            const cg_rans_strip part = cg_rans_part(&m->strips[s], row, &m->runs[i]);
            status = (part.coarse != NULL ? CG_RANS_STRIPS.decode_refined : CG_RANS_STRIPS.decode)(
                m->classes, &part, m->runs[i].n_rows, states, &words);
        }
        if (status != CG_OK)
            return status;
        /* Asked once a strip. Until then a missing word makes garbage of cells, and nothing worse:
         * slots are below 2^14 in any state, and cells have their room. */
        if (words.ended)
            return CG_ERR_TRUNCATED;
    }
    /* rANS ends where the encoder began: a cheap check of the whole stream. */
    if (words.at != words.end)
        return CG_ERR_CORRUPT;
    for (unsigned lane = 0; lane < CG_RANS_LANES; lane++) {
        if (states[lane] != CG_RANS_STATE_LOW)
            return CG_ERR_CORRUPT;
    }
    return CG_OK;
}

/* The decoder's way backwards: from states that it must end in to those that it starts from. */
static uint8_t *encode_stream(const cg_rans_matrix *m, size_t stream, uint8_t *words_end,
                              uint32_t states_out[CG_RANS_LANES])
{
    uint8_t *at = words_end;
    const size_t n_rows = cg_rans_n_rows(m->runs, m->n_runs);
    for (unsigned lane = 0; lane < CG_RANS_LANES; lane++)
        states_out[lane] = CG_RANS_STATE_LOW;
    /* From the stream's last strip to its first, and so its runs: what is decoded first is coded
     * last. */
    for (size_t s = stream + (m->n_strips - 1 - stream) / m->n_streams * m->n_streams;;
         s -= m->n_streams) {
        for (size_t i = m->n_runs, row = n_rows; i-- > 0;) {
            row -= m->runs[i].n_rows;
            const cg_rans_strip part = cg_rans_part(&m->strips[s], row, &m->runs[i]);
            (part.coarse != NULL ? CG_RANS_STRIPS.encode_refined : CG_RANS_STRIPS.encode)(
                m->classes, &part, m->runs[i].n_rows, states_out, &at);
        }
        if (s == stream)
            return at;
    }
}

static uint64_t estimate(const cg_rans_class *classes, const cg_rans_strip *strip, size_t n_rows)
{
    return (strip->coarse != NULL ? CG_RANS_STRIPS.estimate_refined
                                  : CG_RANS_STRIPS.estimate)(classes, strip, n_rows);
}

const cg_rans_kernels CG_RANS_KERNELS = {decode_stream, encode_stream, estimate};
