#include "codec/paper.h"

#include "codec/arena.h"

#include <stdlib.h>
#include <string.h>

/* Rows of the matrices are tokens, columns the channels of the group's layers; the work below is a
 * layer at a time: its elements lie together, and its columns of a row are in the cache. */
typedef struct work {
    cg_symbols anchors, deltas; /* deltas: of the level at hand */
    float *anchor;              /* [n_anchors][n_channels], decoded; decoding: [channels] */
    float *step;                /* [channels]: of the deltas; encoding: its inverse */
    float *token;               /* [channels] */
} work;

/* All planes and levels take the same memory. n_kept_anchors: rows of anchor. */
static work take_work(cg_arena *arena, const cg_profile *profile, const cg_group *group,
                      unsigned plane, unsigned level, uint32_t n_tokens, size_t n_kept_anchors)
{
    const size_t channels = cg_geometry_channels(&profile->geometry),
                 n_anchors = cg_paper_n_anchors(n_tokens);
    const cg_level_columns *columns = &group->columns[level - 1][plane];
    work w = {0};
    void *anchors = cg_arena_take(arena, cg_lossy_symbols_bytes(&group->anchors[plane], n_anchors));
    void *deltas = cg_arena_take(arena, cg_lossy_symbols_bytes(columns, n_tokens - n_anchors));
    w.anchor = cg_arena_take(arena, n_kept_anchors * channels * sizeof *w.anchor);
    w.step = cg_arena_take(arena, channels * sizeof *w.step);
    w.token = cg_arena_take(arena, channels * sizeof *w.token);
    if (arena->base != NULL) {
        w.anchors = cg_lossy_lay_symbols(&group->anchors[plane], NULL, n_anchors, anchors);
        w.deltas = cg_lossy_lay_symbols(columns, NULL, n_tokens - n_anchors, deltas);
    }
    return w;
}

/* ---- decoding ---- */

size_t cg_paper_decode_scratch_bytes(const cg_profile *profile, const cg_group *group,
                                     uint32_t n_tokens)
{
    cg_arena arena = {0};
    (void)take_work(&arena, profile, group, CG_K, CG_L1, n_tokens, 1);
    return arena.used_bytes;
}

static cg_status decode_symbols(const cg_profile *p, uint32_t n_tokens, const work *w,
                                const uint8_t *section, size_t section_bytes)
{
    const size_t n_anchors = cg_paper_n_anchors(n_tokens);
    size_t anchors_bytes, deltas_bytes;
    cg_status status = cg_rans_decode(p->classes, w->anchors.strips, w->anchors.n_strips, n_anchors,
                                      section, section_bytes, &anchors_bytes);
    if (status == CG_OK)
        status =
            cg_rans_decode(p->classes, w->deltas.strips, w->deltas.n_strips, n_tokens - n_anchors,
                           section + anchors_bytes, section_bytes - anchors_bytes, &deltas_bytes);
    return status == CG_OK && anchors_bytes + deltas_bytes != section_bytes ? CG_ERR_CORRUPT
                                                                            : status;
}

static void store_token(const cg_lossy_context *context, const float *values, void *out,
                        size_t element)
{
    const cg_geometry *g = &context->profile->geometry;
    for (uint32_t head = 0; head < g->n_kv_heads; head++)
        cg_lossy_store_head(context, values + (size_t)head * g->head_dim, out,
                            element + (size_t)head * g->head_dim);
}

cg_status cg_paper_decode(const cg_lossy_context *context, unsigned level, const cg_group *group,
                          unsigned plane, const uint8_t *section, size_t section_bytes,
                          void *scratch, void *out)
{
    const cg_profile *p = context->profile;
    const size_t channels = cg_geometry_channels(&p->geometry), n_columns = group->n_channels;
    const uint32_t n_tokens = context->n_tokens;
    cg_arena arena = {scratch, 0};
    work w = take_work(&arena, p, group, plane, level, n_tokens, 1);
    const cg_status status = decode_symbols(p, n_tokens, &w, section, section_bytes);
    if (status != CG_OK)
        return status;

    for (uint32_t layer = 0; layer < group->n_layers; layer++) {
        const float *weight = cg_profile_row(p, p->weight, group->first_layer + layer, plane);
        const float *mean = cg_profile_row(p, p->mean, group->first_layer + layer, plane);
        const float *anchor_step =
            cg_profile_row(p, p->anchor_step, group->first_layer + layer, plane);
        const int16_t *anchor_cells = w.anchors.cells[0] + layer * channels;
        const int16_t *delta_cells = w.deltas.cells[0] + layer * channels;
        for (size_t ch = 0; ch < channels; ch++)
            w.step[ch] = p->step[level - 1][plane] / weight[ch];
        for (uint32_t t = 0; t < n_tokens; t++) {
            const size_t element = ((size_t)layer * n_tokens + t) * channels;
            if (t % CG_ANCHOR_TOKENS == 0) {
                context->kernels->dequantize_channels(anchor_cells, anchor_step, mean, channels,
                                                      w.anchor);
                store_token(context, w.anchor, out, element);
                anchor_cells += n_columns;
            } else {
                context->kernels->dequantize_channels(delta_cells, w.step, w.anchor, channels,
                                                      w.token);
                store_token(context, w.token, out, element);
                delta_cells += n_columns;
            }
        }
    }
    return CG_OK;
}

/* ---- encoding ---- */

size_t cg_paper_encode_scratch_bytes(const cg_profile *profile, const cg_group *group,
                                     uint32_t n_tokens)
{
    cg_arena arena = {0};
    const size_t n_kept_anchors = (size_t)cg_paper_n_anchors(n_tokens) * group->n_layers;
    (void)take_work(&arena, profile, group, CG_K, CG_L1, n_tokens, n_kept_anchors);
    return arena.used_bytes;
}

static bool load_token(const cg_lossy_context *context, const void *in, size_t element,
                       float *values)
{
    const cg_geometry *g = &context->profile->geometry;
    bool finite = true;
    for (uint32_t head = 0; head < g->n_kv_heads; head++)
        finite &= cg_lossy_load_head(context, in, element + (size_t)head * g->head_dim,
                                     values + (size_t)head * g->head_dim);
    return finite;
}

/* Symbols of the anchors, and the anchors as a decoder has them. */
static bool quantize_anchors(const cg_lossy_context *context, const cg_group *group, unsigned plane,
                             const void *in, work *w)
{
    const cg_profile *p = context->profile;
    const size_t channels = cg_geometry_channels(&p->geometry),
                 n_anchors = cg_paper_n_anchors(context->n_tokens);
    bool finite = true;
    for (uint32_t layer = 0; layer < group->n_layers; layer++) {
        const float *mean = cg_profile_row(p, p->mean, group->first_layer + layer, plane);
        const float *anchor_step =
            cg_profile_row(p, p->anchor_step, group->first_layer + layer, plane);
        for (size_t ch = 0; ch < channels; ch++)
            w->step[ch] = 1.0f / anchor_step[ch];
        for (size_t i = 0; i < n_anchors; i++) {
            const size_t element =
                ((size_t)layer * context->n_tokens + i * CG_ANCHOR_TOKENS) * channels;
            int16_t *cells = w->anchors.cells[0] + i * group->n_channels + layer * channels;
            finite &= load_token(context, in, element, w->token);
            context->kernels->quantize_channels(w->token, mean, w->step, channels, cells);
            context->kernels->dequantize_channels(cells, anchor_step, mean, channels,
                                                  w->anchor + (layer * n_anchors + i) * channels);
        }
    }
    return finite;
}

static bool quantize_deltas(const cg_lossy_context *context, unsigned level, const cg_group *group,
                            unsigned plane, const void *in, work *w)
{
    const cg_profile *p = context->profile;
    const size_t channels = cg_geometry_channels(&p->geometry),
                 n_anchors = cg_paper_n_anchors(context->n_tokens);
    bool finite = true;
    for (uint32_t layer = 0; layer < group->n_layers; layer++) {
        const float *weight = cg_profile_row(p, p->weight, group->first_layer + layer, plane);
        int16_t *cells = w->deltas.cells[0] + layer * channels;
        for (size_t ch = 0; ch < channels; ch++)
            w->step[ch] = weight[ch] / p->step[level - 1][plane];
        for (uint32_t t = 0; t < context->n_tokens; t++) {
            if (t % CG_ANCHOR_TOKENS == 0)
                continue;
            const float *anchor = w->anchor + (layer * n_anchors + t / CG_ANCHOR_TOKENS) * channels;
            finite &= load_token(context, in, ((size_t)layer * context->n_tokens + t) * channels,
                                 w->token);
            context->kernels->quantize_channels(w->token, anchor, w->step, channels, cells);
            cells += group->n_channels;
        }
    }
    return finite;
}

uint8_t *cg_paper_join(const uint8_t *anchors, size_t anchors_bytes, uint8_t *deltas,
                       size_t *n_bytes)
{
    uint8_t *section = malloc(anchors_bytes + *n_bytes);
    if (section != NULL) {
        memcpy(section, anchors, anchors_bytes);
        memcpy(section + anchors_bytes, deltas, *n_bytes);
        *n_bytes += anchors_bytes;
    }
    free(deltas);
    return section;
}

cg_status cg_paper_encode(const cg_lossy_context *context, unsigned level_mask,
                          const cg_group *group, unsigned plane, const void *in, void *scratch,
                          uint8_t *sections_out[CG_N_LEVELS], size_t section_bytes_out[CG_N_LEVELS])
{
    const cg_profile *p = context->profile;
    const size_t n_anchors = cg_paper_n_anchors(context->n_tokens);
    cg_status status = CG_OK;
    uint8_t *anchors = NULL;
    size_t anchors_bytes = 0;
    for (unsigned level = CG_L1; level < CG_N_LEVELS && status == CG_OK; level++) {
        if ((level_mask >> level & 1) == 0)
            continue;
        cg_arena arena = {scratch, 0}; /* the anchors lie where they lay at the level before */
        work w = take_work(&arena, p, group, plane, level, context->n_tokens,
                           n_anchors * group->n_layers);
        bool finite = anchors != NULL || quantize_anchors(context, group, plane, in, &w);
        finite &= quantize_deltas(context, level, group, plane, in, &w);
        if (!finite) {
            status = CG_ERR_INVALID_ARGUMENT;
            break;
        }
        status = CG_ERR_NO_MEMORY;
        if (anchors == NULL)
            anchors = cg_lossy_code_symbols(p, &w.anchors, n_anchors, &anchors_bytes);
        if (anchors == NULL)
            break;
        uint8_t *deltas = cg_lossy_code_symbols(p, &w.deltas, context->n_tokens - n_anchors,
                                                &section_bytes_out[level]);
        if (deltas != NULL)
            sections_out[level] =
                cg_paper_join(anchors, anchors_bytes, deltas, &section_bytes_out[level]);
        if (sections_out[level] != NULL)
            status = CG_OK;
    }
    free(anchors);
    return status;
}
