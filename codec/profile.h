/* codec/profile.h - what the lossy levels of one model are coded with: transforms, steps, tables.
 *
 * Bytes: codec/FORMAT.md, "Profile".
 *
 * Made by the profile tool (connector/), immutable, named by its fingerprint: the xxh3-128 of the
 * whole file.
 * Threads: read-only once opened; any number of threads may share it.
 */
#ifndef CG_CODEC_PROFILE_H
#define CG_CODEC_PROFILE_H
#include "codec/chunk.h"
#include "codec/geometry.h"
#include "codec/key.h"
#include "codec/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CG_PROFILE_VERSION_BANDS = 2, /* bases in bands, decoded to the same bits everywhere */
    CG_PROFILE_VERSION_JOINT = 3, /* with a joint matrix over all layer groups */
    CG_PROFILE_VERSION_STEPS = 4, /* with one or without: blocks have steps of their own */
    CG_PROFILE_MAX_BYTES = 1 << 30,
};

typedef struct cg_profile cg_profile;

/* Parses and checks a profile; copies what it needs, so bytes may go afterwards. The caller frees
 * *profile_out with cg_profile_free(). CG_ERR_TRUNCATED, CG_ERR_CORRUPT, CG_ERR_BAD_MAGIC,
 * CG_ERR_UNSUPPORTED_VERSION, CG_ERR_UNSUPPORTED (a transform, rope kind or geometry that this
 * version does not have), CG_ERR_NO_MEMORY.
 *
 * Memory: whatever the bytes are, at most 26 times n_bytes and 8 MiB (of version 1: 42 times).
 * FORMAT.md bounds the padded elements of the bases, which take two bytes each (of version 1 four),
 * and nothing else grows faster. For what our tools make an open profile holds 1.3 to 1.6 times
 * n_bytes, and 2.1 to 2.7 times with the baseline's kernels (4c90b8b). The first encoder adds its
 * own tables, at most 56 times n_bytes and 8 MiB more. Time: tests/bench/results/README.md,
 * "Speed".
 */
cg_status cg_profile_open(const uint8_t *bytes, size_t n_bytes, cg_profile **profile_out);
/* What cg_profile_open() checks, with the same errors, for those who only judge a file: it lays out
 * nothing for kernels, and takes no more memory than about the file's size and 2 MB. */
cg_status cg_profile_check(const uint8_t *bytes, size_t n_bytes, cg_fingerprint *fingerprint_out);
/* What can be told of a file of n_bytes that is read piece by piece, in under 2 MiB of memory:
 * magic and size, which cost one read of 80 bytes; then the checksum, and what else the head says.
 * CG_OK: cg_profile_check() is worth its memory; *fingerprint_out is the file's. Errors of
 * cg_profile_check(), and what read returns. */
cg_status cg_profile_check_head(cg_chunk_source *read, void *user, uint64_t n_bytes,
                                cg_fingerprint *fingerprint_out);
/* Reads path whole, with many reads under way where that is a network away, then cg_profile_open().
 * CG_ERR_NOT_FOUND; CG_ERR_IO: path is no regular file, or cannot be read ... */
cg_status cg_profile_open_file(const char *path, cg_profile **profile_out);
void cg_profile_free(cg_profile *profile); /* NULL is fine */

/* Makes it a profile of an fp8 cache whose elements stand for the stored number times
 * scales[layer][plane], scales[n_layers][2]. What is coded and decoded are still the stored
 * numbers. All 1: no change. To be called once, before anything else has the profile; afterwards it
 * fits only chunks of these scales. CG_ERR_INVALID_ARGUMENT: a scale is not above 0 and finite, or
 * decoded elements or mean queries might not be finite; then the profile can only be freed.
 * CG_ERR_UNSUPPORTED: not all 1, with a profile of version 1. */
cg_status cg_profile_for_cache_scales(cg_profile *profile, const float (*scales)[CG_N_PLANES]);

/* These live as long as the profile. The geometry's dtype is that of the cache the profile was made
 * from. It is informative: other dtypes are coded, too. */
const cg_geometry *cg_profile_geometry(const cg_profile *profile);
const cg_fingerprint *cg_profile_fingerprint(const cg_profile *profile);
const cg_fingerprint *cg_profile_model(const cg_profile *profile);
const char *cg_profile_preset(const cg_profile *profile); /* "klt", "paper" */
uint32_t cg_profile_n_groups(const cg_profile *profile);
/* Whether chunks can be nested (codec/chunk.h). Then each level's step is 3 times that of the next
 * finer one, and there are tables for refined symbols. */
bool cg_profile_nests(const cg_profile *profile);

#ifdef __cplusplus
}
#endif
#endif
