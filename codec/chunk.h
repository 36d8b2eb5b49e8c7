/* codec/chunk.h - the chunk file: header, section table, checksums. Bytes: codec/FORMAT.md,
 * "Chunk".
 *
 * A chunk holds K and V of consecutive tokens of a context. It is coded at one level; a nested
 * chunk holds several lossy levels. A nested file begins with its coarsest level, and what follows
 * refines it, one level at a time. So its first bytes, cut where a level ends, are the same chunk
 * at that level. This module knows where things are and whether they are whole. What the sections
 * hold is decoded by codec/codec.h. Threads: a cg_chunk is plain data that points into the caller's
 * bytes; share it read-only.
 */
#ifndef CG_CODEC_CHUNK_H
#define CG_CODEC_CHUNK_H
#include "codec/geometry.h"
#include "codec/key.h"
#include "codec/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CG_CHUNK_VERSION_ALIGNED = 3, /* of new chunks, nested or not: sections are aligned */
    CG_CHUNK_VERSION_JOINT = 4,   /* the same, of profiles with a joint matrix */
    CG_CHUNK_VERSION_STEPS = 5,   /* of profiles of version 4: each block has a step of its own */
    CG_CHUNK_VERSION_SINGLE = 1,  /* one level; of profiles of version 1 */
    CG_CHUNK_VERSION_NESTED = 2,  /* the same, nested */
    CG_CHUNK_ALIGN = 16, /* from version 3 on: of sections in the file, of streams in a section */
    CG_CHUNK_FIXED_BYTES =
        160, /* the fixed header; enough of a file to read header_bytes and file_bytes */
    CG_CHUNK_SECTION_BYTES = 16, /* one row of the section table */
    CG_CHUNK_MAX_SECTIONS = 8192,
};

typedef enum cg_section_kind {
    CG_SECTION_TOKENS = 1,   /* the token ids */
    CG_SECTION_LOSSLESS = 2, /* one layer and plane, exact */
    CG_SECTION_SYMBOLS = 3,  /* one matrix of a layer group, transformed and quantized */
    CG_SECTION_SINKS = 4,    /* one layer group and plane, the exact first tokens of a context */
    CG_SECTION_TO_L2 = 5,    /* one matrix: L2's symbols, for a reader who knows those of L3 */
    CG_SECTION_TO_L1 = 6,    /* ... and L1's, for a reader who knows those of L2 */
    /* From version 4 on: the same of the joint matrix, in front of a level's other matrices. */
    CG_SECTION_JOINT = 7,
    CG_SECTION_JOINT_TO_L2 = 8,
    CG_SECTION_JOINT_TO_L1 = 9,
    CG_SECTION_STEPS = 10, /* version 5: the factor of each block's step (codec/block_order.h) */
} cg_section_kind;

/* The kind of the sections that make the next coarser level into this one, L1 or L2. */
static inline uint8_t cg_section_to_level(unsigned level)
{
    return (uint8_t)(CG_SECTION_TO_L1 + CG_L1 - level);
}

/* The same of the joint matrix. */
static inline uint8_t cg_section_joint_to_level(unsigned level)
{
    return (uint8_t)(CG_SECTION_JOINT_TO_L1 + CG_L1 - level);
}

/* Whether a kind is the joint matrix's, of some level. */
static inline bool cg_section_is_joint(uint8_t kind)
{
    return kind >= CG_SECTION_JOINT && kind <= CG_SECTION_JOINT_TO_L1;
}

typedef struct cg_section {
    uint8_t kind;   /* cg_section_kind */
    uint8_t plane;  /* CG_K or CG_V; 0 for tokens, steps, and a matrix that joins K and V */
    uint16_t group; /* layer group; 0 for tokens, steps, and the joint matrix */
    uint64_t offset;
    uint32_t bytes;
    uint64_t hash; /* xxh3-64 of the section's bytes */
} cg_section;

typedef struct cg_chunk_header {
    uint32_t version;
    uint32_t header_bytes; /* fixed header and section table */
    uint64_t file_bytes;
    uint8_t level;    /* cg_level: the finest held */
    uint8_t coarsest; /* cg_level: level itself, unless nested */
    bool is_nested;   /* the file was written with several levels; it may be cut to one */
    /* Of a level that is held: bytes from the start of the file to the level's end. Else 0. */
    uint64_t level_bytes[CG_N_LEVELS];
    /* Provenance: the worst level of the prefix that this KV was computed on; 0: exact. */
    uint8_t prefix_level;
    uint8_t token_bytes; /* 2, 3 or 4 bytes a token id */
    uint32_t first_position;
    uint32_t n_tokens;
    uint32_t n_sections;
    cg_geometry geometry;
    cg_fingerprint model;
    cg_fingerprint profile; /* zeros at L0 */
    cg_key parent, extra, key;
    uint64_t cache_scales; /* cg_cache_scales_hash() of an fp8 cache's; 0: none, or all are 1 */
} cg_chunk_header;

/* Whether the level can be read from the file alone. */
static inline bool cg_chunk_holds(const cg_chunk_header *header, unsigned level)
{
    return level == header->level || (level > header->level && level <= header->coarsest);
}

typedef struct cg_chunk {
    cg_chunk_header header;
    const uint8_t *bytes; /* the whole file, the caller's */
    size_t n_bytes;
} cg_chunk;

/* At multiples of how many bytes sections begin and, in them, matrices and streams. */
static inline size_t cg_chunk_align(uint32_t version)
{
    return version >= CG_CHUNK_VERSION_ALIGNED ? CG_CHUNK_ALIGN : 1;
}

/* Tells the scales [n_layers][2] of an fp8 cache (codec/profile.h) from others. 0: all are 1. */
uint64_t cg_cache_scales_hash(const float (*scales)[CG_N_PLANES], uint32_t n_layers);

/* Parses the fixed header from the first bytes of a file (at least CG_CHUNK_FIXED_BYTES). The
 * header's checksum covers the section table, too, so it is not checked here. For readers like `ls`
 * that want sizes and keys.
 * CG_ERR_TRUNCATED, CG_ERR_BAD_MAGIC, CG_ERR_UNSUPPORTED_VERSION, CG_ERR_UNSUPPORTED,
 * CG_ERR_CORRUPT. */
cg_status cg_chunk_header_parse(const uint8_t *bytes, size_t n_bytes, cg_chunk_header *header_out);

/* For a file of which only the first n_bytes are there: the header's level, file_bytes and
 * level_bytes become those of what is there. CG_ERR_TRUNCATED: no level ends there. CG_ERR_CORRUPT:
 * there are more than the file has. */
cg_status cg_chunk_header_cut(cg_chunk_header *header, uint64_t n_bytes);

/* Parses a whole chunk, or a nested one that is cut where a level ends. Checks the header, the
 * section table (order, bounds, no gap, no overlap, nothing after the last section) and the
 * header's checksum. The sections' own checksums are checked by cg_chunk_verify(), or as they are
 * decoded. *chunk_out points into bytes. Its header is that of what is there (n_sections, too).
 * Errors of cg_chunk_header_parse() and cg_chunk_header_cut(). */
cg_status cg_chunk_open(const uint8_t *bytes, size_t n_bytes, cg_chunk *chunk_out);

/* Row section_index of the table. The index must be below header.n_sections. */
cg_section cg_chunk_section(const cg_chunk *chunk, uint32_t section_index);

/* Checks everything that can be checked without a profile: what cg_chunk_open() checks, and the
 * checksum of each section. Indices of steps must be below CG_N_STEP_FACTORS. The key must be the
 * hash of parent, extra and tokens. A store runs this before it publishes. Errors of
 * cg_chunk_open(); CG_ERR_CORRUPT; CG_ERR_NO_MEMORY. */
cg_status cg_chunk_verify(const uint8_t *bytes, size_t n_bytes);

/* Reads exactly n_bytes from offset on, or returns an error. */
typedef cg_status cg_chunk_source(void *user, uint64_t offset, uint8_t *bytes_out, size_t n_bytes);
/* cg_chunk_verify() of n_bytes that are read piece by piece, in under 2 MiB of memory, and with the
 * same results. *header_out: of what is there. The bytes may change meanwhile: where the header
 * does, CG_ERR_CORRUPT. CG_ERR_NO_MEMORY; and what read returns. */
cg_status cg_chunk_verify_source(cg_chunk_source *read, void *user, uint64_t n_bytes,
                                 cg_chunk_header *header_out);

/* All rows: sections_out[header.n_sections]. */
void cg_chunk_sections(const cg_chunk *chunk, cg_section *sections_out);

/* CG_ERR_CORRUPT unless the section's bytes have its checksum, and what pads them is zeros.
 * section: from cg_chunk_section(). */
cg_status cg_chunk_section_check(const cg_chunk *chunk, const cg_section *section);

/* The token ids, to tokens_out[n_tokens]. Checks the section's checksum: CG_ERR_CORRUPT. */
cg_status cg_chunk_tokens(const cg_chunk *chunk, uint32_t *tokens_out);

/* Writes header and section table into the first bytes of bytes[n_bytes], and fills all checksums.
 * The caller has laid the sections out behind them, in table order, each padded with zeros to
 * cg_chunk_align() of the version. Of sections, kind, plane, group and bytes are used. The file is
 * nested when coarsest is above level. version: CG_CHUNK_VERSION_ALIGNED or a later one; any other
 * means that of profiles of version 1. header_bytes, file_bytes, level_bytes and is_nested of
 * header are ignored. CG_ERR_INVALID_ARGUMENT: the sections do not add up to n_bytes. */
cg_status cg_chunk_finish(const cg_chunk_header *header, const cg_section *sections, uint8_t *bytes,
                          size_t n_bytes);

/* Bytes on their way into a file: a section's, malloc'ed, or NULL. */
typedef struct cg_piece {
    uint8_t *bytes;
    size_t n_bytes;
} cg_piece;

/* A section's bytes, or a part of them. */
typedef struct cg_coded {
    const uint8_t *bytes;
    size_t n_bytes;
} cg_coded;

/* Makes a whole file: header, table, and the sections' pieces[header->n_sections]. *bytes_out is
 * malloc'ed, the caller's. Errors of cg_chunk_finish(), CG_ERR_NO_MEMORY. */
cg_status cg_chunk_assemble(const cg_chunk_header *header, const cg_section *sections,
                            const cg_piece *pieces, uint8_t **bytes_out, size_t *n_bytes_out);

#ifdef __cplusplus
}
#endif
#endif
