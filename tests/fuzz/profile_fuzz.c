/* tests/fuzz/profile_fuzz.c - profiles of hostile bytes: open, then code a small chunk with what
 * opens.
 *
 * An input is tried as it is, and with magic, size and checksum put right, as each of the versions.
 * The model's fingerprint, bytes 24 to 39, is of no other use: its first byte tells with which
 * instruction set, the others what is coded. A profile that opens holds no more memory than is
 * said.
 */
#include "codec/codec.h"
#include "codec/cursor.h"
#include "codec/kernels.h"

#include <malloc.h>
#include <stdlib.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes);
size_t __sanitizer_get_current_allocated_bytes(void) __attribute__((weak)); /* where there is one */

enum {
    MAX_ELEMENTS = 1 << 15,
    N_TOKENS = 11,
    FIXED_BYTES = 80,
    SEED_AT = 24,
    SEED_BYTES = CG_FINGERPRINT_BYTES
};

static const char *const table_names[] = {NULL, "baseline", "avx2", "avx512"}; /* NULL: the best */
enum { N_TABLES = sizeof table_names / sizeof *table_names };

/* The table of which the CPU has no kernels is the best one. */
static void use_table(unsigned table)
{
    cg_kernels_use(table_names[table] != NULL ? cg_kernels_named(table_names[table]) : NULL);
}

/* What we write, we read. */
static void expect_decodes(const cg_profile *profile, const uint8_t *chunk, size_t n_chunk,
                           uint8_t *decoded, size_t n_bytes)
{
    if (cg_decode_chunk(profile, chunk, n_chunk, 1, decoded, n_bytes) != CG_OK)
        abort();
}

/* A chunk, all levels that it holds, and what transcoding makes of it. */
static void use_chunk(const cg_profile *profile, const uint8_t *chunk, size_t n_chunk,
                      uint8_t *decoded, size_t n_bytes)
{
    cg_chunk_header header;
    if (cg_chunk_header_parse(chunk, n_chunk, &header) != CG_OK)
        abort();
    for (unsigned level = header.level; level <= header.coarsest; level++)
        expect_decodes(profile, chunk, header.level_bytes[level], decoded, n_bytes);
    for (unsigned level = header.level + 1u; level < CG_N_LEVELS; level++) {
        uint8_t *coarse;
        size_t n_coarse;
        if (cg_transcode(profile, chunk, n_chunk, (cg_level)level, &coarse, &n_coarse) == CG_OK)
            expect_decodes(profile, coarse, n_coarse, decoded, n_bytes);
        free(coarse);
    }
}

/* Finite in every dtype: no byte has all bits of an exponent. Signs and sizes go by the seed. */
static void draw_elements(const uint8_t seed[SEED_BYTES], uint8_t *elements, size_t n_bytes)
{
    const unsigned most = 1 + seed[1] % 0x77, sign_mask = seed[2];
    for (size_t i = 0; i < n_bytes; i++) {
        const unsigned key = (unsigned)i * 37u + seed[3 + i % (SEED_BYTES - 3)];
        elements[i] = (uint8_t)(key % most | (key & sign_mask) << 7);
    }
}

/* Codes a cache at every level, and all of them in one file where the profile nests. */
static void use(const cg_profile *profile, const uint8_t seed[SEED_BYTES])
{
    cg_chunk_header header = {.geometry = *cg_profile_geometry(profile),
                              .n_tokens = N_TOKENS,
                              .model = *cg_profile_model(profile)};
    const uint64_t n_elements = cg_geometry_elements(&header.geometry, N_TOKENS);
    if (n_elements > MAX_ELEMENTS)
        return;
    const uint32_t tokens[N_TOKENS] = {1, 2, 3};
    const size_t n_bytes = (size_t)n_elements * cg_dtype_bytes(header.geometry.dtype);
    uint8_t *elements = malloc(n_bytes), *decoded = malloc(n_bytes);
    if (elements != NULL && decoded != NULL) {
        draw_elements(seed, elements, n_bytes);
        for (unsigned i = CG_L1; i <= CG_N_LEVELS; i++) {
            const bool is_nested = i == CG_N_LEVELS;
            uint8_t *chunk;
            size_t n_chunk;
            if (is_nested && !cg_profile_nests(profile))
                continue;
            const cg_level level = is_nested ? CG_L1 : (cg_level)i,
                           coarsest = is_nested ? CG_L3 : level;
            if (cg_encode_chunk(profile, &header, tokens, elements, n_bytes, level, coarsest, 1,
                                &chunk, &n_chunk, NULL) != CG_OK)
                continue;
            use_chunk(profile, chunk, n_chunk, decoded, n_bytes);
            free(chunk);
        }
    }
    free(elements);
    free(decoded);
}

typedef struct file {
    const uint8_t *bytes;
    size_t n_bytes;
} file;

static cg_status read_file(void *user, uint64_t offset, uint8_t *bytes_out, size_t n_bytes)
{
    const file *f = user;
    if (offset > f->n_bytes || n_bytes > f->n_bytes - offset)
        return CG_ERR_TRUNCATED;
    memcpy(bytes_out, f->bytes + offset, n_bytes);
    return CG_OK;
}

static size_t allocated_bytes(void)
{
    if (__sanitizer_get_current_allocated_bytes != NULL)
        return __sanitizer_get_current_allocated_bytes();
    const struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
}

static void exercise(const uint8_t *bytes, size_t n_bytes)
{
    cg_profile *profile;
    cg_fingerprint checked;
    use_table(n_bytes > SEED_AT ? bytes[SEED_AT] % N_TABLES : 0);
    const size_t before = allocated_bytes();
    const cg_status status = cg_profile_open(bytes, n_bytes, &profile);
    if (status == CG_OK &&
        allocated_bytes() - before > (bytes[8] == 1 ? 42 : 26) * n_bytes + (8 << 20))
        abort(); /* the bound of codec/profile.h */
    if (cg_profile_check(bytes, n_bytes, &checked) != status && status != CG_ERR_NO_MEMORY)
        abort(); /* what a validator lets through, a decoder opens */
    file f = {bytes, n_bytes};
    const cg_status first = cg_profile_check_head(read_file, &f, n_bytes, &checked);
    if (first != CG_OK && first != status && status != CG_ERR_NO_MEMORY)
        abort(); /* and its first look refuses nothing else */
    if (status == CG_OK)
        use(profile, bytes + SEED_AT);
    cg_profile_free(profile);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    exercise(bytes, n_bytes);
    if (n_bytes < FIXED_BYTES + 8)
        return 0;
    uint8_t *repaired = malloc(n_bytes);
    if (repaired == NULL)
        return 0;
    memcpy(repaired, bytes, n_bytes);
    memcpy(repaired, "CGPF\r\n\x1a\n", 8);
    cg_put_le(repaired + 16, 8, n_bytes);
    for (uint64_t version = 1; version <= CG_PROFILE_VERSION_STEPS; version++) {
        cg_put_le(repaired + 8, 8, version);
        cg_put_le(repaired + n_bytes - 8, 8, XXH3_64bits(repaired, n_bytes - 8));
        exercise(repaired, n_bytes);
    }
    free(repaired);
    return 0;
}
