/* codec/lossless_lane.h - how an element's bits are cut for lossless coding, and joined again:
 * FORMAT.md's "Lossless payload".
 *
 * Threads: pure functions. Shared with CUDA code.
 */
#ifndef CG_CODEC_LOSSLESS_LANE_H
#define CG_CODEC_LOSSLESS_LANE_H
#include "codec/geometry.h"
#include "codec/lane.h"

/* How a dtype is cut. The rest of an element is its sign above its mantissa. The exponent, with the
 * rest's high `shift` bits below it, is a cell for rANS; the rest's low_bytes low bytes are stored.
 */
typedef struct cg_lossless_split {
    unsigned element_bytes, mantissa_bits, exponent_bits, shift, low_bytes;
} cg_lossless_split;

CG_LANE cg_lossless_split cg_lane_split(unsigned dtype)
{
    /* 3 bits of fp16's rest go through rANS with its exponent, so that whole bytes are left; of
     * fp8 all of it. */
    const cg_lossless_split bf16 = {2, 7, 8, 0, 1}, fp16 = {2, 10, 5, 3, 1},
                            fp32 = {4, 23, 8, 0, 3}, e4m3 = {1, 3, 4, 4, 0}, e5m2 = {1, 2, 5, 3, 0};
    return dtype == CG_DTYPE_BF16       ? bf16
           : dtype == CG_DTYPE_FP16     ? fp16
           : dtype == CG_DTYPE_FP8_E4M3 ? e4m3
           : dtype == CG_DTYPE_FP8_E5M2 ? e5m2
                                        : fp32;
}

/* An element's rest. */
CG_LANE uint32_t cg_lane_rest(cg_lossless_split s, uint32_t bits)
{
    const uint32_t sign = bits >> (8 * s.element_bytes - 1);
    return sign << s.mantissa_bits | (bits & ((1u << s.mantissa_bits) - 1));
}

/* An element's cell. */
CG_LANE uint32_t cg_lane_cut(cg_lossless_split s, uint32_t bits)
{
    const uint32_t exponent = bits >> s.mantissa_bits & ((1u << s.exponent_bits) - 1);
    return exponent << s.shift | cg_lane_rest(s, bits) >> 8 * s.low_bytes;
}

/* A cell's exponent. A damaged stream may give one that the dtype does not have: check it against 1
 * << exponent_bits. */
CG_LANE uint32_t cg_lane_exponent(cg_lossless_split s, uint32_t cell)
{
    return cell >> s.shift;
}

/* The element, from its cell and the low bytes of its rest. */
CG_LANE uint32_t cg_lane_join(cg_lossless_split s, uint32_t cell, uint32_t low)
{
    const uint32_t rest = (cell & ((1u << s.shift) - 1)) << 8 * s.low_bytes | low;
    return rest >> s.mantissa_bits << (8 * s.element_bytes - 1) |
           cg_lane_exponent(s, cell) << s.mantissa_bits | (rest & ((1u << s.mantissa_bits) - 1));
}
#endif
