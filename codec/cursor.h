/* codec/cursor.h - reading and writing little-endian fields of bytes that we did not write, and
 * sizes that can overflow.
 *
 * A read that does not fit returns false and leaves the cursor where it was. Fields are assembled
 * byte by byte: file bytes are never cast to a struct.
 * Threads: pure functions on the caller's memory.
 */
#ifndef CG_CODEC_CURSOR_H
#define CG_CODEC_CURSOR_H
#include "codec/status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct cg_cursor {
    const uint8_t *at;
    size_t left_bytes;
} cg_cursor;

/* *product_out = a * b; false when that does not fit. */
static inline bool cg_size_mul(size_t a, size_t b, size_t *product_out)
{
    return !__builtin_mul_overflow(a, b, product_out);
}

/* *sum_out = a + b; false when that does not fit. */
static inline bool cg_size_add(size_t a, size_t b, size_t *sum_out)
{
    return !__builtin_add_overflow(a, b, sum_out);
}

/* Moves over n_bytes. */
static inline bool cg_cursor_skip(cg_cursor *in, size_t n_bytes)
{
    if (n_bytes > in->left_bytes)
        return false;
    in->at += n_bytes;
    in->left_bytes -= n_bytes;
    return true;
}

/* *bytes_out points into the cursor's memory: n_bytes bytes of it. */
static inline bool cg_cursor_bytes(cg_cursor *in, size_t n_bytes, const uint8_t **bytes_out)
{
    const uint8_t *at = in->at;
    if (!cg_cursor_skip(in, n_bytes))
        return false;
    *bytes_out = at;
    return true;
}

/* n, rounded up to a multiple of align. */
static inline uint64_t cg_padded(uint64_t n, size_t align)
{
    return (n + align - 1) / align * align;
}

/* Moves over the zeros up to the next multiple of align bytes from start, where the cursor once
 * was. CG_ERR_TRUNCATED: they are not all there. CG_ERR_CORRUPT: they are not zeros. */
static inline cg_status cg_cursor_align(cg_cursor *in, const uint8_t *start, size_t align)
{
    const uint8_t *zeros;
    const size_t past = (size_t)(in->at - start) % align, n = past > 0 ? align - past : 0;
    uint8_t any = 0;
    if (!cg_cursor_bytes(in, n, &zeros))
        return CG_ERR_TRUNCATED;
    for (size_t i = 0; i < n; i++)
        any |= zeros[i];
    return any == 0 ? CG_OK : CG_ERR_CORRUPT;
}

/* Writes those zeros behind out. Returns where they end. */
static inline uint8_t *cg_put_zeros(const uint8_t *start, uint8_t *out, size_t align)
{
    while ((size_t)(out - start) % align != 0)
        *out++ = 0;
    return out;
}

/* The unsigned number in n_bytes bytes, 8 at most. */
static inline uint64_t cg_get_le(const uint8_t *bytes, size_t n_bytes)
{
    uint64_t value = 0;
    for (size_t i = 0; i < n_bytes; i++)
        value |= (uint64_t)bytes[i] << (8 * i);
    return value;
}

/* The low n_bytes bytes of value, 8 at most. */
static inline void cg_put_le(uint8_t *bytes, size_t n_bytes, uint64_t value)
{
    for (size_t i = 0; i < n_bytes; i++)
        bytes[i] = (uint8_t)(value >> (8 * i));
}

static inline bool cg_cursor_u8(cg_cursor *in, uint8_t *value_out)
{
    const uint8_t *bytes;
    if (!cg_cursor_bytes(in, 1, &bytes))
        return false;
    *value_out = bytes[0];
    return true;
}

static inline bool cg_cursor_u16(cg_cursor *in, uint16_t *value_out)
{
    const uint8_t *bytes;
    if (!cg_cursor_bytes(in, 2, &bytes))
        return false;
    *value_out = (uint16_t)cg_get_le(bytes, 2);
    return true;
}

static inline bool cg_cursor_u32(cg_cursor *in, uint32_t *value_out)
{
    const uint8_t *bytes;
    if (!cg_cursor_bytes(in, 4, &bytes))
        return false;
    *value_out = (uint32_t)cg_get_le(bytes, 4);
    return true;
}

static inline bool cg_cursor_u64(cg_cursor *in, uint64_t *value_out)
{
    const uint8_t *bytes;
    if (!cg_cursor_bytes(in, 8, &bytes))
        return false;
    *value_out = cg_get_le(bytes, 8);
    return true;
}

/* An IEEE 754 binary32, as its bits. */
static inline bool cg_cursor_f32(cg_cursor *in, float *value_out)
{
    uint32_t bits;
    if (!cg_cursor_u32(in, &bits))
        return false;
    memcpy(value_out, &bits, sizeof bits);
    return true;
}

static inline bool cg_cursor_f64(cg_cursor *in, double *value_out)
{
    uint64_t bits;
    if (!cg_cursor_u64(in, &bits))
        return false;
    memcpy(value_out, &bits, sizeof bits);
    return true;
}
#endif
