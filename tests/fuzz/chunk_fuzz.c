/* tests/fuzz/chunk_fuzz.c - chunks of hostile bytes: open, verify, decode, transcode.
 *
 * An input is tried twice: as it is, and after repair, with a golden profile's fingerprints, a
 * small geometry and all checksums put right, since no mutation would get past those. Bit 0 of byte
 * 48, which is of no use without scales, tells whether the section table is repaired, too; the low
 * bits of byte 49, another, whose profile it is, those of byte 50 how many levels are nested, where
 * the profile lets them, and those of byte 51 with which instruction set it is decoded.
 */
#include "codec/codec.h"
#include "codec/cursor.h"
#include "codec/kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes);

enum {
    MAX_ELEMENTS = 1 << 20
}; /* decoders take memory by what the header says: their callers decide how much */

enum { KLT, PAPER, NESTED, KLT_2, PAPER_2, JOINED_2, JOINT_3, STEPS_4, N_PROFILES };
static const char *const table_names[] = {NULL, "baseline", "avx2", "avx512"}; /* NULL: the best */
enum { N_TABLES = sizeof table_names / sizeof *table_names };
static cg_profile *opened[N_TABLES][N_PROFILES], **profiles = opened[0];

/* The table of which the CPU has no kernels is the best one. */
static void use_table(unsigned table)
{
    cg_kernels_use(table_names[table] != NULL ? cg_kernels_named(table_names[table]) : NULL);
    profiles = opened[table];
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    const char *const paths[N_PROFILES] = {
        CG_GOLDEN_DIR "/v1/profile.cgp",        CG_GOLDEN_DIR "/v1-paper/profile.cgp",
        CG_GOLDEN_DIR "/v2-nested/profile.cgp", CG_GOLDEN_DIR "/v3/profile.cgp",
        CG_GOLDEN_DIR "/v3-paper/profile.cgp",  CG_GOLDEN_DIR "/v3-joined/profile.cgp",
        CG_GOLDEN_DIR "/v4/profile.cgp",        CG_GOLDEN_DIR "/v5/profile.cgp"};
    for (unsigned i = 0; i < N_TABLES * N_PROFILES; i++) {
        use_table(i / N_PROFILES);
        const char *path = paths[i % N_PROFILES];
        const cg_status status = cg_profile_open_file(path, &profiles[i % N_PROFILES]);
        if (status != CG_OK) {
            fprintf(stderr, "%s: %s\n", path, cg_strerror(status));
            abort();
        }
    }
    return 0;
}

static void decode(const cg_profile *profile, const uint8_t *bytes, size_t n_bytes)
{
    cg_decoder *decoder;
    if (cg_decoder_new(profile, bytes, n_bytes, &decoder) != CG_OK)
        return;
    const size_t scratch_bytes = cg_decoder_scratch_bytes(decoder);
    /* As codec/codec.h bounds it. */
    const cg_chunk_header *header = &cg_decoder_chunk(decoder)->header;
    const uint32_t n_padded = (uint32_t)cg_padded(header->n_tokens, 256);
    if (scratch_bytes > 24 * cg_geometry_elements(&header->geometry, n_padded) + (1 << 20))
        abort();
    void *scratch = aligned_alloc(64, (scratch_bytes + 63) / 64 * 64);
    for (uint32_t task = 0; scratch != NULL && task < cg_decoder_n_tasks(decoder); task++) {
        void *out = malloc(cg_decoder_task_shape(decoder, task).elements_bytes);
        if (out != NULL)
            (void)cg_decoder_run(decoder, task, scratch, scratch_bytes, out);
        free(out);
    }
    free(scratch);
    cg_decoder_free(decoder);
}

static void exercise(const cg_profile *profile, const uint8_t *bytes, size_t n_bytes)
{
    cg_chunk_header header;
    (void)cg_chunk_verify(bytes, n_bytes);
    if (cg_chunk_header_parse(bytes, n_bytes, &header) != CG_OK ||
        cg_geometry_elements(&header.geometry, header.n_tokens) > MAX_ELEMENTS)
        return;
    decode(profile, bytes, n_bytes);
    for (int level = CG_L1; level < CG_N_LEVELS; level++) {
        uint8_t *coarse;
        size_t n_coarse;
        if (cg_transcode(profile, bytes, n_bytes, (cg_level)level, &coarse, &n_coarse) == CG_OK) {
            if (cg_chunk_verify(coarse, n_coarse) == CG_ERR_TRUNCATED)
                abort(); /* what we write, we read */
            decode(profile, coarse, n_coarse);
            free(coarse);
        }
    }
}

/* The sections that a chunk of this header must have. Returns their number. */
static uint32_t plan_sections(const cg_profile *profile, const cg_chunk_header *h,
                              cg_section *sections)
{
    const bool is_lossy = h->level != CG_L0, has_steps = is_lossy && profile == profiles[STEPS_4],
               has_joint = has_steps || (is_lossy && profile == profiles[JOINT_3]),
               is_joined = has_joint || (is_lossy && profile == profiles[JOINED_2]);
    const uint32_t n_groups = is_lossy ? cg_profile_n_groups(profile) : h->geometry.n_layers,
                   n_matrices = is_joined ? 1 : CG_N_PLANES;
    const bool has_sinks = is_lossy && h->first_position == 0 && profile != profiles[PAPER] &&
                           profile != profiles[PAPER_2];
    uint32_t n = 0;
    sections[n++] = (cg_section){.kind = CG_SECTION_TOKENS, .bytes = h->token_bytes * h->n_tokens};
    if (has_steps)
        sections[n++] = (cg_section){.kind = CG_SECTION_STEPS, .bytes = (h->n_tokens + 7) / 8};
    if (has_joint)
        sections[n++] = (cg_section){.kind = CG_SECTION_JOINT};
    for (uint16_t group = 0; group < n_groups; group++) {
        for (uint8_t plane = 0; plane < CG_N_PLANES; plane++) {
            const uint8_t kind = is_lossy ? CG_SECTION_SYMBOLS : CG_SECTION_LOSSLESS;
            if (plane < n_matrices)
                sections[n++] = (cg_section){.kind = kind, .plane = plane, .group = group};
            if (has_sinks)
                sections[n++] =
                    (cg_section){.kind = CG_SECTION_SINKS, .plane = plane, .group = group};
        }
    }
    for (unsigned level = h->coarsest; level-- > h->level;) {
        if (has_joint)
            sections[n++] = (cg_section){.kind = cg_section_joint_to_level(level)};
        for (uint16_t task = 0; task < n_matrices * n_groups; task++)
            sections[n++] = (cg_section){.kind = cg_section_to_level(level),
                                         .plane = (uint8_t)(task % n_matrices),
                                         .group = (uint16_t)(task / n_matrices)};
    }
    return n;
}

/* Exercises a chunk of these sections, whose bytes stand one after another in payload. */
static void exercise_sections(const cg_profile *profile, const cg_chunk_header *h,
                              const cg_section *sections, const uint8_t *payload)
{
    const size_t align = cg_chunk_align(h->version);
    size_t n_repaired = CG_CHUNK_FIXED_BYTES + (size_t)h->n_sections * CG_CHUNK_SECTION_BYTES;
    size_t at = n_repaired;
    for (uint32_t i = 0; i < h->n_sections; i++)
        n_repaired += cg_padded(sections[i].bytes, align);
    uint8_t *repaired = calloc(n_repaired, 1);
    if (repaired == NULL)
        return;
    for (uint32_t i = 0; i < h->n_sections; i++) {
        memcpy(repaired + at, payload, sections[i].bytes);
        for (uint32_t b = 0; sections[i].kind == CG_SECTION_STEPS && b < sections[i].bytes; b++)
            repaired[at + b] &= 7; /* now and then no scale */
        payload += sections[i].bytes;
        at += cg_padded(sections[i].bytes, align);
    }
    if (cg_chunk_finish(h, sections, repaired, n_repaired) == CG_OK)
        exercise(profile, repaired, n_repaired);
    free(repaired);
}

static void exercise_repaired(const uint8_t *bytes, size_t n_bytes)
{
    enum { MAX_SECTIONS = 64 };
    cg_section sections[MAX_SECTIONS];
    if (n_bytes < CG_CHUNK_FIXED_BYTES)
        return;
    const bool repair_table = (bytes[48] & 1) == 0;
    const cg_profile *profile = profiles[(bytes[49] & 7) % N_PROFILES];
    const bool is_1 =
        profile == profiles[KLT] || profile == profiles[PAPER] || profile == profiles[NESTED];
    const uint8_t level = bytes[24] % CG_N_LEVELS;
    cg_chunk_header h = {
        .version = is_1                                             ? CG_CHUNK_VERSION_SINGLE
                   : profile == profiles[STEPS_4] && level != CG_L0 ? CG_CHUNK_VERSION_STEPS
                   : profile == profiles[JOINT_3] && level != CG_L0 ? CG_CHUNK_VERSION_JOINT
                                                                    : CG_CHUNK_VERSION_ALIGNED,
        .level = level,
        .token_bytes = (uint8_t)(2 + bytes[26] % 3),
        .first_position = (uint32_t)(bytes[36] / 8 % 8 * 8),
        .n_tokens = 1 + (uint32_t)cg_get_le(bytes + 40, 4) % 64,
        .n_sections = (uint32_t)cg_get_le(bytes + 44, 4) % MAX_SECTIONS,
        .geometry = *cg_profile_geometry(profile),
        .model = *cg_profile_model(profile),
    };
    h.geometry.dtype = (uint8_t)(1 + bytes[27] % (CG_N_DTYPES - 1));
    h.coarsest = h.level;
    if (h.level != CG_L0 && cg_profile_nests(profile))
        h.coarsest = (uint8_t)(h.level + (bytes[50] & 3) % (CG_N_LEVELS - h.level));
    if (h.level == CG_L0)
        h.geometry =
            (cg_geometry){(uint16_t)(1 + bytes[28] % 4), (uint16_t)(1 + bytes[30] % 3),
                          (uint16_t)(2 + bytes[32] % 32 * 2), h.geometry.dtype, CG_N_PLANES};
    else
        h.profile = *cg_profile_fingerprint(profile);
    const uint8_t *row = bytes + CG_CHUNK_FIXED_BYTES;
    const uint32_t n_rows = h.n_sections;
    if (repair_table)
        h.n_sections = plan_sections(profile, &h, sections);
    const size_t header_bytes = CG_CHUNK_FIXED_BYTES + (size_t)n_rows * CG_CHUNK_SECTION_BYTES;
    if (n_bytes < header_bytes || h.n_sections == 0)
        return;
    size_t left = n_bytes - header_bytes;
    for (uint32_t i = 0; i < h.n_sections; i++, row += CG_CHUNK_SECTION_BYTES) {
        if (!repair_table)
            sections[i] = (cg_section){
                .kind = row[0], .plane = row[1], .group = (uint16_t)cg_get_le(row + 2, 2)};
        uint32_t claimed = i < n_rows ? (uint32_t)cg_get_le(row + 4, 4) : 0;
        if (repair_table &&
            (sections[i].kind == CG_SECTION_TOKENS || sections[i].kind == CG_SECTION_STEPS))
            claimed = sections[i].bytes;
        sections[i].bytes = (uint32_t)(claimed < left && i + 1 < h.n_sections ? claimed : left);
        left -= sections[i].bytes;
    }
    exercise_sections(profile, &h, sections, bytes + header_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    use_table(n_bytes > 51 ? bytes[51] % N_TABLES : 0);
    for (int i = 0; i < N_PROFILES; i++)
        exercise(profiles[i], bytes, n_bytes);
    exercise_repaired(bytes, n_bytes);
    return 0;
}
