/* codec/key.h - the chain of chunk keys: what a chunk is found by.
 *
 *   model   = xxh3-128(model fingerprint | name of the KV cache's dtype)
 *   root    = xxh3-128("cachegenfs.key.1" | model | u32 salt_bytes | salt)
 *   key(i)  = xxh3-128(key(i-1) | extra(i) | token ids as u32 little-endian)      key(-1) = root
 *
 * extra is the xxh3-128 of whatever else makes this KV differ (LoRA, multi-modal hashes), or zeros.
 * Keys are the canonical (big-endian) form of xxh3-128, so that their hexadecimal reads the same
 * everywhere. xxh3 is not collision-proof against an attacker: a load also compares token ids.
 * FORMAT.md, "Keys".
 * Threads: pure functions.
 */
#ifndef CG_CODEC_KEY_H
#define CG_CODEC_KEY_H
#include "codec/geometry.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_key {
    uint8_t bytes[CG_KEY_BYTES];
} cg_key;
typedef struct cg_fingerprint {
    uint8_t bytes[CG_FINGERPRINT_BYTES];
} cg_fingerprint;

enum { CG_KEY_HEX_BYTES = 2 * CG_KEY_BYTES + 1 }; /* with the terminating zero */

/* The model that a root is made from: a model's fingerprint, and the dtype of its cache, of which
 * the fingerprint says nothing. */
cg_fingerprint cg_key_model(const cg_fingerprint *model, unsigned dtype);
/* model: of cg_key_model(). */
cg_key cg_key_root(const cg_fingerprint *model, const void *salt, size_t salt_bytes);
/* key(i) of above. parent: key(i-1), or the root. */
cg_key cg_key_chunk(const cg_key *parent, const cg_key *extra, const uint32_t *tokens,
                    size_t n_tokens);
/* The keys of tokens[n_tokens] cut into chunks of chunk_tokens (at least 1), the last with what is
 * left: keys_out[ceil(n_tokens / chunk_tokens)]. parent is the first chunk's; extra is the same for
 * all. */
void cg_key_chain(const cg_key *parent, const cg_key *extra, const uint32_t *tokens,
                  size_t n_tokens, size_t chunk_tokens, cg_key *keys_out);
/* xxh3-128 of bytes: for extra keys and fingerprints. */
cg_key cg_key_of_bytes(const void *bytes, size_t n_bytes);

bool cg_key_equal(const cg_key *a, const cg_key *b);
bool cg_key_is_zero(const cg_key *key);
/* 32 lower-case hexadecimal digits and a zero. */
void cg_key_to_hex(const cg_key *key, char hex_out[CG_KEY_HEX_BYTES]);
/* Exactly 32 lower-case digits of hex; false leaves *key_out alone. hex need not end after them. */
bool cg_key_from_hex(const char *hex, cg_key *key_out);

#ifdef __cplusplus
}
#endif
#endif
