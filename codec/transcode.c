/* A chunk to a coarser lossy level without its elements: symbols are decoded, scaled by the
 * quotient of the steps, and coded again. Tokens, sinks and the steps of blocks are copied.
 * FORMAT.md, "Levels". */
#include "codec/codec.h"
#include "codec/preset.h"
#include "codec/section_plan.h"

#include <stdlib.h>
#include <string.h>

/* A copy, its sections checked: a transcoder must not pass damage on under the name of a new file.
 */
static cg_status copy_chunk(const cg_chunk *chunk, const cg_section *sections, uint8_t **bytes_out,
                            size_t *n_bytes_out)
{
    for (uint32_t i = 0; i < chunk->header.n_sections; i++) {
        const cg_status status = cg_chunk_section_check(chunk, &sections[i]);
        if (status != CG_OK)
            return status;
    }
    if ((*bytes_out = malloc(chunk->n_bytes)) == NULL)
        return CG_ERR_NO_MEMORY;
    memcpy(*bytes_out, chunk->bytes, chunk->n_bytes);
    *n_bytes_out = chunk->n_bytes;
    return CG_OK;
}

cg_status cg_transcode(const cg_profile *profile, const uint8_t *bytes, size_t n_bytes,
                       cg_level level, uint8_t **bytes_out, size_t *n_bytes_out)
{
    cg_chunk chunk;
    *bytes_out = NULL;
    cg_status status = cg_chunk_open(bytes, n_bytes, &chunk);
    if (status != CG_OK)
        return status;
    if (chunk.header.level == CG_L0 || level <= (cg_level)chunk.header.level ||
        level >= CG_N_LEVELS)
        return CG_ERR_INVALID_ARGUMENT;
    if (chunk.header.coarsest >
        chunk.header.level) { /* cut: to that level, or to the coarsest to start from */
        const unsigned held =
            level < (cg_level)chunk.header.coarsest ? (unsigned)level : chunk.header.coarsest;
        if ((status = cg_chunk_open(bytes, chunk.header.level_bytes[held], &chunk)) != CG_OK)
            return status;
    }
    cg_chunk_header header = chunk.header;
    if ((status = cg_section_plan_profile_check(profile, &header)) != CG_OK)
        return status;

    const cg_preset *preset = profile->preset;
    cg_section *sections = calloc(header.n_sections, sizeof *sections);
    cg_piece *pieces = calloc(header.n_sections, sizeof *pieces);
    cg_block_order order = {0};
    status = CG_ERR_NO_MEMORY;
    if (sections == NULL || pieces == NULL)
        goto done;
    if ((status = cg_section_plan_check(profile, &chunk, sections)) != CG_OK ||
        (status = cg_section_plan_block_order(profile, &chunk, sections, &order)) != CG_OK)
        goto done;
    /* The cut was all there is to do. */
    if (header.level == level) {
        status = copy_chunk(&chunk, sections, bytes_out, n_bytes_out);
        goto done;
    }
    for (uint32_t i = 0; i < header.n_sections; i++) {
        const uint8_t *src = bytes + sections[i].offset;
        if ((status = cg_chunk_section_check(&chunk, &sections[i])) != CG_OK)
            goto done;
        if (sections[i].kind == CG_SECTION_SYMBOLS || sections[i].kind == CG_SECTION_JOINT) {
            const cg_group *group = sections[i].kind == CG_SECTION_JOINT
                                        ? profile->joint
                                        : &profile->groups[sections[i].group];
            status =
                preset->transcode(profile, &order, header.level, level, group, sections[i].plane,
                                  header.n_tokens, (cg_coded){src, sections[i].bytes}, &pieces[i]);
        } else {
            pieces[i].n_bytes = sections[i].bytes;
            pieces[i].bytes = malloc(sections[i].bytes + (size_t)1); /* not 0 bytes */
            status = pieces[i].bytes != NULL ? CG_OK : CG_ERR_NO_MEMORY;
            if (status == CG_OK)
                memcpy(pieces[i].bytes, src, sections[i].bytes);
        }
        if (status == CG_OK && pieces[i].n_bytes > UINT32_MAX)
            status = CG_ERR_INVALID_ARGUMENT;
        if (status != CG_OK)
            goto done;
        sections[i].bytes = (uint32_t)pieces[i].n_bytes;
    }
    header.level = header.coarsest = (uint8_t)level;
    status = cg_chunk_assemble(&header, sections, pieces, bytes_out, n_bytes_out);
done:
    for (uint32_t i = 0; pieces != NULL && i < header.n_sections; i++)
        free(pieces[i].bytes);
    free(pieces);
    free(sections);
    cg_block_order_destroy(&order);
    return status;
}
