#include "codec/chunk.h"

#include "codec/bf16.h"
#include "codec/cursor.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* As PNG's: a transfer that changes line ends, or stops at ^Z, damages it. */
static const uint8_t MAGIC[8] = {'C', 'G', 'K', 'V', '\r', '\n', 0x1a, '\n'};

enum { HASH_OFFSET = CG_CHUNK_FIXED_BYTES - 8, LEVEL_END_OFFSET = 136 };

/* Which levels a file holds, from fields 136 and 144. level_bytes has what those say of L3 and L2;
 * the finest level ends with the file, and has no field. From here on ends rise from the coarsest
 * level to the finest, and the first lies behind the table. */
static bool check_levels(cg_chunk_header *h)
{
    const bool has_ends = h->level_bytes[CG_L3] != 0 || h->level_bytes[CG_L2] != 0;
    const bool nested =
        h->version >= CG_CHUNK_VERSION_ALIGNED ? has_ends : h->version == CG_CHUNK_VERSION_NESTED;
    h->is_nested = nested;
    h->coarsest = h->level_bytes[CG_L3] != 0   ? CG_L3
                  : h->level_bytes[CG_L2] != 0 ? CG_L2
                                               : h->level;
    if (nested != has_ends || (nested && (h->level == CG_L0 || h->level >= h->coarsest)) ||
        h->level_bytes[h->level] != 0)
        return false;
    h->level_bytes[h->level] = h->file_bytes;
    for (unsigned level = h->level; level < h->coarsest; level++) {
        if (h->level_bytes[level] <= h->level_bytes[level + 1])
            return false;
    }
    return h->level_bytes[h->coarsest] >= h->header_bytes;
}

uint64_t cg_cache_scales_hash(const float (*scales)[CG_N_PLANES], uint32_t n_layers)
{
    uint8_t bytes[CG_MAX_LAYERS * CG_N_PLANES * 4];
    uint32_t n_other = 0;
    for (uint32_t i = 0; i < n_layers * CG_N_PLANES && i < sizeof bytes / 4; i++) {
        const float scale = scales[i / CG_N_PLANES][i % CG_N_PLANES];
        n_other += scale != 1;
        cg_put_le(bytes + 4 * (size_t)i, 4, cg_f32_bits(scale));
    }
    return n_other > 0 ? XXH3_64bits(bytes, n_layers * CG_N_PLANES * 4) : 0;
}

cg_status cg_chunk_header_parse(const uint8_t *bytes, size_t n_bytes, cg_chunk_header *header_out)
{
    if (n_bytes < sizeof MAGIC)
        return CG_ERR_TRUNCATED;
    if (memcmp(bytes, MAGIC, sizeof MAGIC) != 0)
        return CG_ERR_BAD_MAGIC;
    if (n_bytes < CG_CHUNK_FIXED_BYTES)
        return CG_ERR_TRUNCATED;

    const uint8_t *at = bytes + sizeof MAGIC;
    cg_chunk_header h = {0};
    h.version = (uint32_t)cg_get_le(at, 4); /* another one may mean anything by the other fields */
    if (h.version < CG_CHUNK_VERSION_SINGLE || h.version > CG_CHUNK_VERSION_STEPS)
        return CG_ERR_UNSUPPORTED_VERSION;
    h.header_bytes = (uint32_t)cg_get_le(at + 4, 4);
    h.file_bytes = cg_get_le(at + 8, 8);
    at = bytes + 24;
    h.level = at[0];
    h.prefix_level = at[1];
    h.token_bytes = at[2];
    h.geometry.dtype = at[3];
    h.geometry.n_layers = (uint16_t)cg_get_le(at + 4, 2);
    h.geometry.n_kv_heads = (uint16_t)cg_get_le(at + 6, 2);
    h.geometry.head_dim = (uint16_t)cg_get_le(at + 8, 2);
    h.geometry.n_planes = at[10];
    const bool reserved_is_zero = at[11] == 0;
    h.cache_scales = cg_get_le(bytes + 48, 8);
    h.first_position = (uint32_t)cg_get_le(bytes + 36, 4);
    h.n_tokens = (uint32_t)cg_get_le(bytes + 40, 4);
    h.n_sections = (uint32_t)cg_get_le(bytes + 44, 4);
    at = bytes + 56;
    memcpy(h.model.bytes, at, 16);
    memcpy(h.profile.bytes, at + 16, 16);
    memcpy(h.parent.bytes, at + 32, 16);
    memcpy(h.extra.bytes, at + 48, 16);
    memcpy(h.key.bytes, at + 64, 16);
    for (unsigned level = CG_L2; level <= CG_L3; level++)
        h.level_bytes[level] = cg_get_le(bytes + LEVEL_END_OFFSET + 8 * (size_t)(CG_L3 - level), 8);
    if (!reserved_is_zero)
        return CG_ERR_CORRUPT;

    const cg_status status = cg_geometry_check(&h.geometry);
    if (status != CG_OK)
        return status == CG_ERR_UNSUPPORTED ? status : CG_ERR_CORRUPT;
    if (h.cache_scales != 0 && !cg_dtype_has_cache_scales(h.geometry.dtype))
        return CG_ERR_CORRUPT;
    if (h.level >= CG_N_LEVELS || h.prefix_level >= CG_N_LEVELS || h.token_bytes < 2 ||
        h.token_bytes > 4 || h.n_tokens == 0 || h.n_tokens > CG_MAX_CHUNK_TOKENS ||
        h.first_position > UINT32_MAX - h.n_tokens || h.n_sections > CG_CHUNK_MAX_SECTIONS ||
        h.header_bytes != CG_CHUNK_FIXED_BYTES + h.n_sections * CG_CHUNK_SECTION_BYTES ||
        h.file_bytes < h.header_bytes)
        return CG_ERR_CORRUPT;
    static const cg_fingerprint none;
    if (h.level == CG_L0 &&
        (memcmp(&h.profile, &none, sizeof none) != 0 || h.version > CG_CHUNK_VERSION_ALIGNED))
        return CG_ERR_CORRUPT;
    if (h.level <= CG_L1 && h.prefix_level > h.level) /* a quality that this KV cannot have */
        return CG_ERR_CORRUPT;
    if (!check_levels(&h))
        return CG_ERR_CORRUPT;
    *header_out = h;
    return CG_OK;
}

cg_status cg_chunk_header_cut(cg_chunk_header *h, uint64_t n_bytes)
{
    if (n_bytes > h->file_bytes)
        return CG_ERR_CORRUPT;
    for (unsigned level = h->level; level <= h->coarsest; level++) {
        if (h->level_bytes[level] == n_bytes) {
            h->level = (uint8_t)level;
            h->file_bytes = n_bytes;
            return CG_OK;
        }
        h->level_bytes[level] = 0; /* finer than what is there */
    }
    return CG_ERR_TRUNCATED;
}

/* A row of the section table; where its section begins is known from the rows before it. */
static cg_section table_row(const uint8_t *bytes, uint32_t section_index, uint64_t offset)
{
    const uint8_t *row =
        bytes + CG_CHUNK_FIXED_BYTES + (size_t)section_index * CG_CHUNK_SECTION_BYTES;
    return (cg_section){.kind = row[0],
                        .plane = row[1],
                        .group = (uint16_t)cg_get_le(row + 2, 2),
                        .offset = offset,
                        .bytes = (uint32_t)cg_get_le(row + 4, 4),
                        .hash = cg_get_le(row + 8, 8)};
}

/* Of the fixed header but for the hash itself, and of the section table. */
static uint64_t header_hash(const uint8_t *bytes, uint32_t header_bytes)
{
    XXH3_state_t state;
    XXH3_INITSTATE(&state);
    XXH3_64bits_reset(&state);
    XXH3_64bits_update(&state, bytes, HASH_OFFSET);
    XXH3_64bits_update(&state, bytes + CG_CHUNK_FIXED_BYTES, header_bytes - CG_CHUNK_FIXED_BYTES);
    return XXH3_64bits_digest(&state);
}

/* The level that a section refines the next coarser one to; 0: none. */
static unsigned refined_level(const cg_section *section)
{
    switch (section->kind) {
    case CG_SECTION_TO_L2:
    case CG_SECTION_JOINT_TO_L2: return CG_L2;
    case CG_SECTION_TO_L1:
    case CG_SECTION_JOINT_TO_L1: return CG_L1;
    default: return 0;
    }
}

/* The level that a section is part of: the coarsest's come first, then what refines it. */
static unsigned section_level(const cg_chunk_header *h, const cg_section *section)
{
    const unsigned refined = refined_level(section);
    return refined > 0 ? refined : h->coarsest;
}

/* Sections lie in the order of their table, without gaps: first the tokens, then the steps, then
 * level by level, then the joint matrix, then by layer group. Whether a chunk of version 5 has a
 * joint matrix, only its profile says. */
static bool section_follows(const cg_chunk_header *h, const cg_section *before,
                            const cg_section *section)
{
    const bool has_steps = h->version == CG_CHUNK_VERSION_STEPS,
               is_steps = section->kind == CG_SECTION_STEPS,
               is_joint = cg_section_is_joint(section->kind), is_of_all = is_steps || is_joint;
    const uint8_t last_kind = has_steps                              ? CG_SECTION_STEPS
                              : h->version == CG_CHUNK_VERSION_JOINT ? CG_SECTION_JOINT_TO_L1
                                                                     : CG_SECTION_TO_L1;
    if (section->kind < CG_SECTION_LOSSLESS || section->kind > last_kind ||
        section->plane >= (is_of_all ? 1 : CG_N_PLANES) || (is_of_all && section->group > 0))
        return false;
    if (is_steps || (has_steps && before->kind == CG_SECTION_TOKENS))
        return is_steps && before->kind == CG_SECTION_TOKENS &&
               section->bytes == cg_count_blocks(h->n_tokens);
    const unsigned level = section_level(h, section), level_before = section_level(h, before);
    /* Levels come from the coarsest to the finest, and the coarsest refines nothing. */
    if (level < h->level || level > level_before ||
        (level == h->coarsest && refined_level(section) > 0))
        return false;
    if (before->kind == CG_SECTION_TOKENS || before->kind == CG_SECTION_STEPS ||
        level < level_before)
        return is_joint || h->version != CG_CHUNK_VERSION_JOINT;
    if (is_joint || cg_section_is_joint(before->kind))
        return !is_joint;
    return section->group > before->group ||
           (section->group == before->group &&
            (section->plane > before->plane ||
             (section->plane == before->plane && section->kind > before->kind)));
}

cg_status cg_chunk_open(const uint8_t *bytes, size_t n_bytes, cg_chunk *chunk_out)
{
    cg_chunk chunk = {.bytes = bytes, .n_bytes = n_bytes};
    const cg_status status = cg_chunk_header_parse(bytes, n_bytes, &chunk.header);
    if (status != CG_OK)
        return status;
    cg_chunk_header *h = &chunk.header;
    cg_chunk_header held = *h;
    /* This must come before the checksum: where n_bytes is a level's end, header and table are
     * there. h stays that of the whole file, as its table is. */
    const cg_status cut = cg_chunk_header_cut(&held, n_bytes);
    if (cut != CG_OK)
        return cut;
    if (header_hash(bytes, h->header_bytes) != cg_get_le(bytes + HASH_OFFSET, 8))
        return CG_ERR_CORRUPT;

    cg_section before = {0};
    const size_t align = cg_chunk_align(h->version);
    uint64_t end = h->header_bytes;
    held.n_sections = 0;
    for (uint32_t i = 0; i < h->n_sections; i++) {
        const cg_section section = table_row(bytes, i, end);
        if (i == 0 ? section.kind != CG_SECTION_TOKENS || section.plane != 0 || section.group != 0
                   : !section_follows(h, &before, &section))
            return CG_ERR_CORRUPT;
        /* The first section of a finer level: the one before must end where the header says. */
        for (unsigned level = section_level(h, &before);
             i > 0 && level > section_level(h, &section); level--) {
            if (end != h->level_bytes[level])
                return CG_ERR_CORRUPT;
        }
        before = section;
        /* Rows behind the cut are checked, too. Their sections are not there, and not counted. */
        held.n_sections += section_level(h, &section) >= held.level;
        end += cg_padded(section.bytes, align); /* at most 8192 * 4 GiB: cannot overflow */
    }
    if (h->n_sections == 0 || section_level(h, &before) != h->level || end != h->file_bytes)
        return CG_ERR_CORRUPT;
    *h = held;
    *chunk_out = chunk;
    return CG_OK;
}

/* The table has no offsets, so this adds up all rows before. Who wants all rows takes
 * cg_chunk_sections(). */
cg_section cg_chunk_section(const cg_chunk *chunk, uint32_t section_index)
{
    const size_t align = cg_chunk_align(chunk->header.version);
    uint64_t offset = chunk->header.header_bytes;
    for (uint32_t i = 0; i < section_index; i++)
        offset += cg_padded(table_row(chunk->bytes, i, 0).bytes, align);
    return table_row(chunk->bytes, section_index, offset);
}

void cg_chunk_sections(const cg_chunk *chunk, cg_section *sections_out)
{
    const size_t align = cg_chunk_align(chunk->header.version);
    uint64_t offset = chunk->header.header_bytes;
    for (uint32_t i = 0; i < chunk->header.n_sections; i++) {
        sections_out[i] = table_row(chunk->bytes, i, offset);
        offset += cg_padded(sections_out[i].bytes, align);
    }
}

/* Of what pads a section, which ends at bytes + from. */
static bool is_zero(const uint8_t *bytes, uint64_t from, uint64_t to)
{
    uint8_t any = 0;
    for (uint64_t i = from; i < to; i++)
        any |= bytes[i];
    return any == 0;
}

cg_status cg_chunk_section_check(const cg_chunk *chunk, const cg_section *section)
{
    const uint8_t *bytes = chunk->bytes + section->offset;
    const uint64_t padded = cg_padded(section->bytes, cg_chunk_align(chunk->header.version));
    return is_zero(bytes, section->bytes, padded) &&
                   XXH3_64bits(bytes, section->bytes) == section->hash
               ? CG_OK
               : CG_ERR_CORRUPT;
}

/* Of a section of steps. */
static bool are_scales(const uint8_t *factor_index, size_t n_blocks)
{
    for (size_t b = 0; b < n_blocks; b++) {
        if (factor_index[b] >= CG_N_STEP_FACTORS)
            return false;
    }
    return true;
}

cg_status cg_chunk_tokens(const cg_chunk *chunk, uint32_t *tokens_out)
{
    const cg_section section = cg_chunk_section(chunk, 0);
    const size_t token_bytes = chunk->header.token_bytes, n_tokens = chunk->header.n_tokens;
    /* The table and the header each say how many there are. */
    if (section.bytes != token_bytes * n_tokens || cg_chunk_section_check(chunk, &section) != CG_OK)
        return CG_ERR_CORRUPT;
    for (size_t i = 0; i < n_tokens; i++)
        tokens_out[i] =
            (uint32_t)cg_get_le(chunk->bytes + section.offset + i * token_bytes, token_bytes);
    return CG_OK;
}

cg_status cg_chunk_verify(const uint8_t *bytes, size_t n_bytes)
{
    cg_chunk chunk;
    cg_status status = cg_chunk_open(bytes, n_bytes, &chunk);
    if (status != CG_OK)
        return status;
    const size_t align = cg_chunk_align(chunk.header.version);
    uint64_t offset = chunk.header.header_bytes;
    for (uint32_t i = 0; i < chunk.header.n_sections; i++) {
        const cg_section section = table_row(bytes, i, offset);
        offset += cg_padded(section.bytes, align);
        if ((status = cg_chunk_section_check(&chunk, &section)) != CG_OK)
            return status;
        if (section.kind == CG_SECTION_STEPS && !are_scales(bytes + section.offset, section.bytes))
            return CG_ERR_CORRUPT;
    }
    uint32_t *tokens = malloc(chunk.header.n_tokens * sizeof *tokens);
    if (tokens == NULL)
        return CG_ERR_NO_MEMORY;
    if ((status = cg_chunk_tokens(&chunk, tokens)) == CG_OK) {
        const cg_key key =
            cg_key_chunk(&chunk.header.parent, &chunk.header.extra, tokens, chunk.header.n_tokens);
        if (!cg_key_equal(&key, &chunk.header.key))
            status = CG_ERR_CORRUPT;
    }
    free(tokens);
    return status;
}

/* The section's checksum, by pieces, and the zeros up to padded. */
static cg_status check_source(cg_chunk_source *read, void *user, const cg_section *section,
                              uint64_t padded, uint8_t *piece, size_t piece_bytes)
{
    uint8_t zeros[CG_CHUNK_ALIGN] = {0}; /* padding is shorter */
    XXH3_state_t state;
    XXH3_INITSTATE(&state);
    XXH3_64bits_reset(&state);
    for (uint64_t done = 0; done < section->bytes;) {
        const uint64_t left = section->bytes - done;
        const size_t n = left < piece_bytes ? (size_t)left : piece_bytes;
        const cg_status status = read(user, section->offset + done, piece, n);
        if (status != CG_OK)
            return status;
        XXH3_64bits_update(&state, piece, n);
        done += n;
    }
    const size_t n_zeros = (size_t)(padded - section->bytes);
    const cg_status status =
        n_zeros > 0 ? read(user, section->offset + section->bytes, zeros, n_zeros) : CG_OK;
    if (status != CG_OK)
        return status;
    return XXH3_64bits_digest(&state) == section->hash && is_zero(zeros, 0, n_zeros)
               ? CG_OK
               : CG_ERR_CORRUPT;
}

cg_status cg_chunk_verify_source(cg_chunk_source *read, void *user, uint64_t n_bytes,
                                 cg_chunk_header *header_out)
{
    enum { PIECE_BYTES = 1 << 20 };
    uint8_t fixed[CG_CHUNK_FIXED_BYTES];
    uint8_t *head = NULL, *piece = NULL;
    uint32_t *tokens = NULL;
    cg_chunk chunk;
    const size_t n_fixed = n_bytes < sizeof fixed ? (size_t)n_bytes : sizeof fixed;
    cg_status status = read(user, 0, fixed, n_fixed);
    if (status == CG_OK)
        status = cg_chunk_header_parse(fixed, n_fixed, header_out);
    if (status != CG_OK)
        return status;
    if (n_bytes < header_out->header_bytes)
        return CG_ERR_TRUNCATED;
    const size_t token_bytes = header_out->token_bytes, n_tokens = header_out->n_tokens;
    head = malloc(header_out->header_bytes);
    piece = malloc(PIECE_BYTES); /* all tokens fit: CG_MAX_CHUNK_TOKENS */
    tokens = malloc(n_tokens * sizeof *tokens);
    status = CG_ERR_NO_MEMORY;
    if (head == NULL || piece == NULL || tokens == NULL)
        goto done;
    if ((status = read(user, 0, head, header_out->header_bytes)) != CG_OK)
        goto done;
    /* Somebody may be writing, and memory was taken by what was read first. */
    if (memcmp(head, fixed, sizeof fixed) != 0) {
        status = CG_ERR_CORRUPT;
        goto done;
    }
    /* It looks at the header and the table only. From here on the table is not read again. */
    if ((status = cg_chunk_open(head, n_bytes, &chunk)) != CG_OK)
        goto done;
    const size_t align = cg_chunk_align(chunk.header.version);
    uint64_t offset = chunk.header.header_bytes;
    for (uint32_t i = 0; i < chunk.header.n_sections; i++) {
        const cg_section section = table_row(head, i, offset);
        const uint64_t padded = cg_padded(section.bytes, align);
        offset += padded;
        if (i == 0 && section.bytes != token_bytes * n_tokens) {
            status = CG_ERR_CORRUPT;
            goto done;
        }
        if ((status = check_source(read, user, &section, padded, piece, PIECE_BYTES)) != CG_OK)
            goto done;
        /* They are in piece now: so many bytes as there are blocks. */
        if (section.kind == CG_SECTION_STEPS && !are_scales(piece, section.bytes)) {
            status = CG_ERR_CORRUPT;
            goto done;
        }
        for (size_t at = 0; i == 0 && at < n_tokens; at++) /* and so are they */
            tokens[at] = (uint32_t)cg_get_le(piece + at * token_bytes, token_bytes);
    }
    *header_out = chunk.header;
    const cg_key key = cg_key_chunk(&header_out->parent, &header_out->extra, tokens, n_tokens);
    status = cg_key_equal(&key, &header_out->key) ? CG_OK : CG_ERR_CORRUPT;
done:
    free(head);
    free(piece);
    free(tokens);
    return status;
}

cg_status cg_chunk_finish(const cg_chunk_header *h, const cg_section *sections, uint8_t *bytes,
                          size_t n_bytes)
{
    if (h->n_sections > CG_CHUNK_MAX_SECTIONS || n_bytes < CG_CHUNK_FIXED_BYTES)
        return CG_ERR_INVALID_ARGUMENT;
    const uint32_t header_bytes = CG_CHUNK_FIXED_BYTES + h->n_sections * CG_CHUNK_SECTION_BYTES;
    const bool is_nested = h->coarsest > h->level;
    const bool is_aligned =
        h->version >= CG_CHUNK_VERSION_ALIGNED && h->version <= CG_CHUNK_VERSION_STEPS;
    const uint32_t version = is_aligned  ? h->version
                             : is_nested ? CG_CHUNK_VERSION_NESTED
                                         : CG_CHUNK_VERSION_SINGLE;
    const size_t align = cg_chunk_align(version);
    uint64_t end = header_bytes;
    for (uint32_t i = 0; i < h->n_sections; i++)
        end += cg_padded(sections[i].bytes, align);
    if (end != n_bytes)
        return CG_ERR_INVALID_ARGUMENT;

    memset(bytes, 0, header_bytes);
    memcpy(bytes, MAGIC, sizeof MAGIC);
    cg_put_le(bytes + 8, 4, version);
    cg_put_le(bytes + 12, 4, header_bytes);
    cg_put_le(bytes + 16, 8, n_bytes);
    bytes[24] = h->level;
    bytes[25] = h->prefix_level;
    bytes[26] = h->token_bytes;
    bytes[27] = h->geometry.dtype;
    cg_put_le(bytes + 28, 2, h->geometry.n_layers);
    cg_put_le(bytes + 30, 2, h->geometry.n_kv_heads);
    cg_put_le(bytes + 32, 2, h->geometry.head_dim);
    bytes[34] = h->geometry.n_planes;
    cg_put_le(bytes + 36, 4, h->first_position);
    cg_put_le(bytes + 40, 4, h->n_tokens);
    cg_put_le(bytes + 44, 4, h->n_sections);
    cg_put_le(bytes + 48, 8, h->cache_scales);
    memcpy(bytes + 56, h->model.bytes, 16);
    memcpy(bytes + 72, h->profile.bytes, 16);
    memcpy(bytes + 88, h->parent.bytes, 16);
    memcpy(bytes + 104, h->extra.bytes, 16);
    memcpy(bytes + 120, h->key.bytes, 16);

    const uint8_t *payload = bytes + header_bytes;
    for (uint32_t i = 0; i < h->n_sections; i++) {
        uint8_t *row = bytes + CG_CHUNK_FIXED_BYTES + (size_t)i * CG_CHUNK_SECTION_BYTES;
        row[0] = sections[i].kind;
        row[1] = sections[i].plane;
        cg_put_le(row + 2, 2, sections[i].group);
        cg_put_le(row + 4, 4, sections[i].bytes);
        cg_put_le(row + 8, 8, XXH3_64bits(payload, sections[i].bytes));
        payload += cg_padded(sections[i].bytes, align);
        /* The finest level ends with the file, and has no field. */
        const unsigned level = section_level(h, &sections[i]);
        if (level > h->level && level <= h->coarsest) /* the last of the level decides */
            cg_put_le(bytes + LEVEL_END_OFFSET + 8 * (size_t)(CG_L3 - level), 8,
                      (uint64_t)(payload - bytes));
    }
    cg_put_le(bytes + HASH_OFFSET, 8, header_hash(bytes, header_bytes));
    return CG_OK;
}

cg_status cg_chunk_assemble(const cg_chunk_header *header, const cg_section *sections,
                            const cg_piece *pieces, uint8_t **bytes_out, size_t *n_bytes_out)
{
    const size_t align = cg_chunk_align(header->version);
    size_t n_bytes = CG_CHUNK_FIXED_BYTES + (size_t)header->n_sections * CG_CHUNK_SECTION_BYTES;
    size_t at = n_bytes;
    for (uint32_t i = 0; i < header->n_sections; i++)
        n_bytes += cg_padded(pieces[i].n_bytes, align);
    uint8_t *bytes = malloc(n_bytes);
    if (bytes == NULL)
        return CG_ERR_NO_MEMORY;
    for (uint32_t i = 0; i < header->n_sections; i++) {
        if (pieces[i].n_bytes > 0) /* memcpy's pointer must not be NULL */
            memcpy(bytes + at, pieces[i].bytes, pieces[i].n_bytes);
        const size_t end = at + pieces[i].n_bytes;
        at += cg_padded(pieces[i].n_bytes, align);
        memset(bytes + end, 0, at - end);
    }
    const cg_status status = cg_chunk_finish(header, sections, bytes, n_bytes);
    if (status != CG_OK) {
        free(bytes);
        return status;
    }
    *bytes_out = bytes;
    *n_bytes_out = n_bytes;
    return CG_OK;
}
