/* The head of a .cgp file, its first 80 bytes, and the checksum over all of it: what can be said of
 * a profile without memory for it. The rest is read in profile_read.c. */
#include "codec/profile_data.h"

#include "codec/cursor.h"
#include "codec/lossy.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

static const uint8_t MAGIC[8] = {'C', 'G', 'P', 'F', '\r', '\n', 0x1a, '\n'};

enum {
    FIXED_BYTES = 80,
    CHECKSUM_BYTES = 8, /* at the end of the file */
    ROPE_NONE = 0,
    ROPE_BY_LAYER = 2
};

/* Whether the file, of whose n_bytes the first n_head are at hand, is as long as a profile of a
 * known version says that it is. n_head: FIXED_BYTES, or all that there are. */
static cg_status read_start(const uint8_t *at, size_t n_head, uint64_t n_bytes, cg_profile *p)
{
    if (n_head < sizeof MAGIC)
        return CG_ERR_TRUNCATED;
    if (memcmp(at, MAGIC, sizeof MAGIC) != 0)
        return CG_ERR_BAD_MAGIC;
    if (n_bytes < FIXED_BYTES + CHECKSUM_BYTES)
        return CG_ERR_TRUNCATED;
    p->version = (uint32_t)cg_get_le(at + 8, 4);
    if (p->version < 1 || p->version > CG_PROFILE_VERSION_STEPS)
        return CG_ERR_UNSUPPORTED_VERSION;
    /* The version is known: length and checksum are where it has them. */
    p->file_bytes = cg_get_le(at + 16, 8);
    return p->file_bytes > n_bytes                                           ? CG_ERR_TRUNCATED
           : p->file_bytes < n_bytes || p->file_bytes > CG_PROFILE_MAX_BYTES ? CG_ERR_CORRUPT
                                                                             : CG_OK;
}

/* What else the head says, of a file whose checksum is right: what is found here, somebody has made
 * wrong. */
static cg_status read_fields(const uint8_t *at, cg_profile *p)
{
    /* Field 67 is reserved from version 2 on, field 78 in version 1, field 79 up to version 3. */
    const unsigned most_packed = p->version == 1, most_joined = p->version > 1,
                   most_joint = p->version == CG_PROFILE_VERSION_STEPS;
    if (cg_get_le(at + 12, 4) != 0 || at[67] > most_packed || at[77] > 1 || at[78] > most_joined ||
        at[79] > most_joint)
        return CG_ERR_CORRUPT;
    p->has_joint = p->version == CG_PROFILE_VERSION_JOINT || at[79] == 1;
    p->n_matrices = at[78] == 1 ? 1 : CG_N_PLANES;
    memcpy(p->model.bytes, at + 24, sizeof p->model.bytes);
    p->geometry.n_layers = (uint16_t)cg_get_le(at + 40, 2);
    p->geometry.n_kv_heads = (uint16_t)cg_get_le(at + 42, 2);
    p->geometry.head_dim = (uint16_t)cg_get_le(at + 44, 2);
    p->geometry.dtype = at[46];
    p->geometry.n_planes = at[47];
    memcpy(p->preset_name, at + 48, 16);
    const unsigned rope = at[66];
    const cg_preset *preset = cg_lossy_preset((uint32_t)cg_get_le(at + 64, 2));
    if (preset == NULL || rope > (preset->has_bases ? ROPE_BY_LAYER : ROPE_NONE))
        return CG_ERR_UNSUPPORTED;
    p->preset = preset;
    p->is_packed = at[67] == 1;
    p->nests = at[77] == 1;
    if ((p->has_joint && at[78] != 1) ||
        (!preset->has_bases &&
         (p->version >= CG_PROFILE_VERSION_JOINT || p->is_packed || p->nests || at[78] == 1)))
        return CG_ERR_CORRUPT;
    if (rope == ROPE_BY_LAYER ? at[76] < 2 || at[76] > CG_MAX_ROPES : at[76] != 0)
        return CG_ERR_CORRUPT;
    p->n_ropes = rope == ROPE_BY_LAYER ? at[76] : 1;
    p->rotary_dim = (uint32_t)cg_get_le(at + 68, 2);
    p->n_sinks = (uint32_t)cg_get_le(at + 70, 2);
    p->n_groups = (uint32_t)cg_get_le(at + 72, 2);
    p->n_classes = (uint32_t)cg_get_le(at + 74, 2);
    const cg_status status = cg_geometry_check(&p->geometry);
    if (status != CG_OK)
        return status == CG_ERR_UNSUPPORTED ? status : CG_ERR_CORRUPT;
    if (p->rotary_dim % 2 != 0 || p->rotary_dim > p->geometry.head_dim ||
        (rope == ROPE_NONE) != (p->rotary_dim == 0) || p->n_sinks > CG_MAX_SINKS ||
        p->n_groups == 0 || p->n_groups > p->geometry.n_layers || p->n_classes == 0 ||
        p->n_classes > 256)
        return CG_ERR_CORRUPT;
    return CG_OK;
}

cg_status cg_profile_read_head(cg_cursor *in, cg_profile *p)
{
    const uint8_t *at = in->at;
    cg_status status = read_start(at, in->left_bytes, in->left_bytes, p);
    if (status != CG_OK)
        return status;
    const size_t hashed = in->left_bytes - CHECKSUM_BYTES;
    /* Damage anywhere is found here. */
    if (XXH3_64bits(at, hashed) != cg_get_le(at + hashed, CHECKSUM_BYTES))
        return CG_ERR_CORRUPT;
    const cg_key fingerprint = cg_key_of_bytes(at, in->left_bytes);
    memcpy(p->fingerprint.bytes, fingerprint.bytes, sizeof p->fingerprint.bytes);
    if ((status = read_fields(at, p)) != CG_OK)
        return status;
    in->left_bytes = hashed;
    (void)cg_cursor_skip(in, FIXED_BYTES);
    return CG_OK;
}

/* The hashes of n_bytes, by pieces: the checksum without itself, and the fingerprint. */
static cg_status hash_source(cg_chunk_source *read, void *user, uint64_t n_bytes,
                             uint64_t *checksum_out, cg_fingerprint *fingerprint_out)
{
    enum { PIECE_BYTES = 1 << 20 };
    XXH3_state_t checksum, whole;
    XXH128_canonical_t canonical;
    cg_status status = CG_OK;
    uint8_t *piece = malloc(PIECE_BYTES);
    if (piece == NULL)
        return CG_ERR_NO_MEMORY;
    XXH3_INITSTATE(&checksum);
    XXH3_INITSTATE(&whole);
    XXH3_64bits_reset(&checksum);
    XXH3_128bits_reset(&whole);
    for (uint64_t done = 0, n; done < n_bytes; done += n) {
        const uint64_t left = n_bytes - done;
        n = left < PIECE_BYTES ? left : PIECE_BYTES;
        if ((status = read(user, done, piece, (size_t)n)) != CG_OK)
            break;
        const uint64_t hashed = n_bytes - CHECKSUM_BYTES - done;
        if (done < n_bytes - CHECKSUM_BYTES)
            XXH3_64bits_update(&checksum, piece, (size_t)(hashed < n ? hashed : n));
        XXH3_128bits_update(&whole, piece, (size_t)n);
    }
    free(piece);
    *checksum_out = XXH3_64bits_digest(&checksum);
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&whole));
    memcpy(fingerprint_out->bytes, canonical.digest, sizeof fingerprint_out->bytes);
    return status;
}

cg_status cg_profile_check_head(cg_chunk_source *read, void *user, uint64_t n_bytes,
                                cg_fingerprint *fingerprint_out)
{
    uint8_t head[FIXED_BYTES], last[CHECKSUM_BYTES];
    uint64_t checksum;
    cg_profile claimed = {0};
    const size_t n_head = n_bytes < sizeof head ? (size_t)n_bytes : sizeof head;
    cg_status status = read(user, 0, head, n_head);
    if (status == CG_OK)
        status = read_start(head, n_head, n_bytes, &claimed);
    if (status == CG_OK)
        status = hash_source(read, user, n_bytes, &checksum, fingerprint_out);
    if (status == CG_OK)
        status = read(user, n_bytes - sizeof last, last, sizeof last);
    if (status == CG_OK && checksum != cg_get_le(last, sizeof last))
        status = CG_ERR_CORRUPT;
    return status == CG_OK ? read_fields(head, &claimed) : status;
}
