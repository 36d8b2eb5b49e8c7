/* codec/kernel_vectors.h - the registers of the instruction set that a kernel file is compiled for.
 *
 * Included by the files that CMake compiles once per instruction set, and by no other.
 * Threads: pure functions.
 */
#ifndef CG_CODEC_KERNEL_VECTORS_H
#define CG_CODEC_KERNEL_VECTORS_H
#include <stdint.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

/* LANES floats are one register: gcc keeps longer vectors in memory. ROWS_A_PASS: rows whose sums
 * fit in the registers beside what is multiplied. */
#if defined(__AVX512F__)
enum { LANES = 16, ROWS_A_PASS = 8 };
#elif defined(__AVX2__)
enum { LANES = 8, ROWS_A_PASS = 4 };
#else
enum { LANES = 4, ROWS_A_PASS = 2 };
#endif
typedef float vector_f32 __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t vector_u32 __attribute__((vector_size(4 * LANES), aligned(4)));
/* Vectors of 16 channels. A part is 32 channels in 16 words: their low halves, then their high
 * ones.
 */
enum { VECTORS_A_PART = 16 / LANES };

#if defined(__AVX2__)
/* Vectors of integers, and what is done with them. */
#if defined(__AVX512BW__)
typedef __m512i vector_i;
typedef __m512 vector_ps;
#define V(name) _mm512_##name
#define V_SI(name) _mm512_##name##_si512
#else
typedef __m256i vector_i;
typedef __m256 vector_ps;
#define V(name) _mm256_##name
#define V_SI(name) _mm256_##name##_si256
#endif
#endif

#if defined(__AMX_BF16__)
/* Eight tiles of 16 rows of 64 bytes: 0 to 3 are sums, 4 and 5 left factors, 6 and 7 right ones. */
static inline void configure_tiles(void)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t n_rows[16];
    } config = {.palette = 1};
    for (unsigned i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.n_rows[i] = 16;
    }
    _tile_loadconfig(&config);
}
#endif
#endif
