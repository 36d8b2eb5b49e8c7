#include "codec/key.h"

#include "codec/cursor.h"

#include <string.h>
#include <xxhash.h>

/* XXH128_hash_t is two words in the machine's byte order: as it is, a key would not be the same
 * everywhere. */
static cg_key canonical(XXH128_hash_t hash)
{
    XXH128_canonical_t bytes;
    cg_key key;
    XXH128_canonicalFromHash(&bytes, hash);
    memcpy(key.bytes, bytes.digest, sizeof key.bytes);
    return key;
}

cg_fingerprint cg_key_model(const cg_fingerprint *model, unsigned dtype)
{
    const char *name = cg_dtype_name(dtype);
    cg_fingerprint of_cache;
    XXH3_state_t state; /* on the stack: no allocation that could fail */
    XXH3_INITSTATE(&state);
    XXH3_128bits_reset(&state);
    XXH3_128bits_update(&state, model->bytes, sizeof model->bytes);
    XXH3_128bits_update(&state, name, strlen(name));
    const cg_key key = canonical(XXH3_128bits_digest(&state));
    memcpy(of_cache.bytes, key.bytes, sizeof of_cache.bytes);
    return of_cache;
}

cg_key cg_key_root(const cg_fingerprint *model, const void *salt, size_t salt_bytes)
{
    static const char domain[] = "cachegenfs.key.1";
    uint8_t length[4];
    XXH3_state_t state;
    XXH3_INITSTATE(&state);
    XXH3_128bits_reset(&state);
    XXH3_128bits_update(&state, domain, sizeof domain - 1);
    XXH3_128bits_update(&state, model->bytes, sizeof model->bytes);
    cg_put_le(length, sizeof length, (uint32_t)salt_bytes);
    XXH3_128bits_update(&state, length, sizeof length);
    if (salt_bytes > 0)
        XXH3_128bits_update(&state, salt, salt_bytes);
    return canonical(XXH3_128bits_digest(&state));
}

cg_key cg_key_chunk(const cg_key *parent, const cg_key *extra, const uint32_t *tokens,
                    size_t n_tokens)
{
    /* Tokens are hashed as little-endian bytes, a piece at a time: the same key on every machine.
     */
    uint8_t bytes[4 * 256];
    XXH3_state_t state;
    XXH3_INITSTATE(&state);
    XXH3_128bits_reset(&state);
    XXH3_128bits_update(&state, parent->bytes, sizeof parent->bytes);
    XXH3_128bits_update(&state, extra->bytes, sizeof extra->bytes);
    while (n_tokens > 0) {
        const size_t n = n_tokens < 256 ? n_tokens : 256;
        for (size_t i = 0; i < n; i++)
            cg_put_le(bytes + 4 * i, 4, tokens[i]);
        XXH3_128bits_update(&state, bytes, 4 * n);
        tokens += n;
        n_tokens -= n;
    }
    return canonical(XXH3_128bits_digest(&state));
}

void cg_key_chain(const cg_key *parent, const cg_key *extra, const uint32_t *tokens,
                  size_t n_tokens, size_t chunk_tokens, cg_key *keys_out)
{
    for (size_t at = 0; at < n_tokens; at += chunk_tokens) {
        const size_t left = n_tokens - at;
        *keys_out =
            cg_key_chunk(parent, extra, tokens + at, left < chunk_tokens ? left : chunk_tokens);
        parent = keys_out++;
    }
}

cg_key cg_key_of_bytes(const void *bytes, size_t n_bytes)
{
    return canonical(XXH3_128bits(bytes, n_bytes));
}

bool cg_key_equal(const cg_key *a, const cg_key *b)
{
    return memcmp(a->bytes, b->bytes, sizeof a->bytes) == 0;
}

bool cg_key_is_zero(const cg_key *key)
{
    static const cg_key zero;
    return cg_key_equal(key, &zero);
}

void cg_key_to_hex(const cg_key *key, char hex_out[CG_KEY_HEX_BYTES])
{
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < sizeof key->bytes; i++) {
        hex_out[2 * i] = digits[key->bytes[i] >> 4];
        hex_out[2 * i + 1] = digits[key->bytes[i] & 15];
    }
    hex_out[CG_KEY_HEX_BYTES - 1] = '\0';
}

static int digit_value(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return -1;
}

bool cg_key_from_hex(const char *hex, cg_key *key_out)
{
    cg_key key;
    for (size_t i = 0; i < sizeof key.bytes; i++) {
        const int high = digit_value(hex[2 * i]);
        const int low =
            high < 0 ? -1 : digit_value(hex[2 * i + 1]); /* hex may end at the first bad digit */
        if (low < 0)
            return false;
        key.bytes[i] = (uint8_t)(high << 4 | low);
    }
    *key_out = key;
    return true;
}
