/* codec/bf16.h - conversions between f32 and the cache's types of 16 and 8 bits, to nearest, ties
 * to even.
 *
 * Threads: pure functions. Shared with CUDA code.
 */
#ifndef CG_CODEC_BF16_H
#define CG_CODEC_BF16_H
#include "codec/lane.h"
#include <stdint.h>
#include <string.h>

CG_LANE float cg_f32_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

CG_LANE uint32_t cg_f32_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

CG_LANE float cg_bf16_to_f32(uint16_t value)
{
    return cg_f32_from_bits((uint32_t)value << 16);
}

/* Finite values stay finite where bf16 has them; a NaN stays one. */
CG_LANE uint16_t cg_bf16_from_f32(float value)
{
    const uint32_t bits = cg_f32_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40);
    /* A tie carries only where the lowest bit that stays is 1. */
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

/* The numbers of 16 and 8 bits below: times a power of 2 between the biases a subnormal one becomes
 * a normal f32. Without branches, so that loops vectorize. */
CG_LANE float cg_fp16_to_f32(uint16_t value)
{
    const uint32_t sign = (uint32_t)(value & 0x8000) << 16;
    const uint32_t magnitude = (uint32_t)(value & 0x7fff) << 13;
    const float scaled = cg_f32_from_bits(magnitude) * 0x1p112f; /* exact */
    return cg_f32_from_bits(
        sign | (magnitude >= 31u << 23 ? magnitude | 0x7f800000u : cg_f32_bits(scaled)));
}

/* What exceeds fp16 becomes its largest finite number (FORMAT.md, stage 5); NaN stays NaN. */
CG_LANE uint16_t cg_fp16_from_f32(float value)
{
    const uint32_t bits = cg_f32_bits(value);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000u) /* 65520 and above round past 65504 */
        return (uint16_t)(sign | 0x7bff);
    if (magnitude < 0x38800000u) { /* below 2^-14: subnormal; adding 0.5 rounds at 2^-24 */
        const float rounded = cg_f32_from_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (cg_f32_bits(rounded) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((magnitude + 0xfffu + (magnitude >> 13 & 1) - 0x38000000u) >> 13));
}

/* e4m3 is OCP's, which torch calls float8_e4m3fn: its only NaNs are 0x7f and 0xff. */
CG_LANE float cg_e4m3_to_f32(uint8_t value)
{
    const uint32_t sign = (uint32_t)(value & 0x80) << 24, magnitude = value & 0x7f;
    const float scaled = cg_f32_from_bits(magnitude << 20) * 0x1p120f; /* exact */
    return cg_f32_from_bits(sign | (magnitude == 0x7f ? 0x7fc00000u : cg_f32_bits(scaled)));
}

/* The high byte of an fp16. */
CG_LANE float cg_e5m2_to_f32(uint8_t value)
{
    return cg_fp16_to_f32((uint16_t)(value << 8));
}

/* What exceeds the type becomes most, its largest finite number; NaN stays NaN. bias: of its
 * exponents. */
CG_LANE uint8_t cg_fp8_from_f32(float value, uint32_t mantissa_bits, uint32_t bias, uint32_t most)
{
    const uint32_t bits = cg_f32_bits(value), sign = bits >> 24 & 0x80,
                   magnitude = bits & 0x7fffffffu, shift = 23 - mantissa_bits;
    if (magnitude > 0x7f800000u)
        return (uint8_t)(sign | 0x7f);
    uint32_t rounded;
    if (magnitude < (128 - bias) << 23) {
        /* Subnormal: adding 2^23 times its unit in the last place rounds there. */
        const uint32_t unit = (128 - bias + shift) << 23;
        rounded = cg_f32_bits(cg_f32_from_bits(magnitude) + cg_f32_from_bits(unit)) - unit;
    } else {
        const uint32_t half = (1u << (shift - 1)) - 1 + (magnitude >> shift & 1);
        rounded = (magnitude + half - ((127 - bias) << 23)) >> shift;
    }
    return (uint8_t)(sign | (rounded < most ? rounded : most));
}

CG_LANE uint8_t cg_e4m3_from_f32(float value)
{
    return cg_fp8_from_f32(value, 3, 7, 0x7e); /* 448 */
}

CG_LANE uint8_t cg_e5m2_from_f32(float value)
{
    return cg_fp8_from_f32(value, 2, 15, 0x7b); /* 57344 */
}
#endif
