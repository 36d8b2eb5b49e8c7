/* tests/fuzz/profile_fuzz.c - profiles of hostile bytes: open, then code a small chunk with what
 * opens.
 *
 * An input is tried as it is, and with magic, size and checksum put right, as each of the versions.
 */
#include "codec/codec.h"
#include "codec/cursor.h"

#include <stdlib.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes);

enum { MAX_ELEMENTS = 1 << 15, N_TOKENS = 11, FIXED_BYTES = 80 };

/* Codes a cache at every level, back, and from finer to coarser. */
static void use(const cg_profile *profile)
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
    for (size_t i = 0; elements != NULL && i < n_bytes; i++)
        elements[i] = (uint8_t)(i * 37 % 61); /* finite in every dtype */
    for (int level = CG_L1; elements != NULL && decoded != NULL && level < CG_N_LEVELS; level++) {
        uint8_t *chunk, *coarse = NULL;
        size_t n_chunk, n_coarse;
        const cg_status status =
            cg_encode_chunk(profile, &header, tokens, elements, n_bytes, (cg_level)level,
                            (cg_level)level, 1, &chunk, &n_chunk, NULL);
        if (status != CG_OK)
            continue;
        if (cg_decode_chunk(profile, chunk, n_chunk, 1, decoded, n_bytes) != CG_OK)
            abort(); /* what we write, we read */
        if (level < CG_L3 &&
            cg_transcode(profile, chunk, n_chunk, CG_L3, &coarse, &n_coarse) == CG_OK &&
            cg_decode_chunk(profile, coarse, n_coarse, 1, decoded, n_bytes) != CG_OK)
            abort();
        free(coarse);
        free(chunk);
    }
    free(elements);
    free(decoded);
}

static void exercise(const uint8_t *bytes, size_t n_bytes)
{
    cg_profile *profile;
    cg_fingerprint checked;
    const cg_status status = cg_profile_open(bytes, n_bytes, &profile);
    if (cg_profile_check(bytes, n_bytes, &checked) != status && status != CG_ERR_NO_MEMORY)
        abort(); /* what a validator lets through, a decoder opens */
    if (status == CG_OK)
        use(profile);
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
