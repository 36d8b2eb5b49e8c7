#include "codec/paper.h"

#include "codec/arena.h"
#include "codec/kernels.h"
#include "codec/profile_columns.h"
#include "codec/profile_finite.h"

#include <stdlib.h>

/* Rows of the matrices are tokens, columns the channels of the layer group; the work below is a
 * layer at a time: its elements lie together, and its columns of a row are in the cache. */
typedef struct work {
    cg_symbols anchors, deltas; /* deltas: of the level at hand */
    cg_rans_run *runs;          /* [2]: theirs */
    float *anchor;              /* [n_anchors][n_channels], decoded; decoding: [channels] */
    float *step;                /* [channels]: of the deltas; encoding: its inverse */
    float *token;               /* [channels] */
} work;

/* All planes and levels take the same memory. n_kept_anchors: rows of anchor. An encoder keeps all,
 * since it comes back to them for each level; a decoder has the one at hand. */
static work take_work(cg_arena *arena, const cg_profile *profile, const cg_group *group,
                      unsigned matrix, unsigned level, uint32_t n_tokens, size_t n_kept_anchors)
{
    const size_t channels = cg_geometry_channels(&profile->geometry),
                 n_anchors = cg_paper_n_anchors(n_tokens);
    const cg_level_columns *columns = &group->columns[level - 1][matrix];
    work w = {0};
    void *anchors = cg_arena_take(arena, cg_symbols_bytes(&group->anchors[matrix], n_anchors));
    void *deltas = cg_arena_take(arena, cg_symbols_bytes(columns, n_tokens - n_anchors));
    w.anchor = cg_arena_take(arena, n_kept_anchors * channels * sizeof *w.anchor);
    w.step = cg_arena_take(arena, channels * sizeof *w.step);
    w.token = cg_arena_take(arena, channels * sizeof *w.token);
    w.runs = cg_arena_take(arena, 2 * sizeof *w.runs);
    if (arena->base != NULL) {
        w.runs[0] = (cg_rans_run){n_anchors, 0};
        w.runs[1] = (cg_rans_run){n_tokens - n_anchors, 0};
        w.anchors = cg_symbols_lay(&group->anchors[matrix], NULL, &w.runs[0], 1, anchors);
        w.deltas = cg_symbols_lay(columns, NULL, &w.runs[1], 1, deltas);
    }
    return w;
}

typedef void dequantize_channels(const int16_t *cells, const float *step, const float *base,
                                 size_t n_channels, float *x);

/* With version 2 to the bit, with version 1 as fast as it goes. */
static dequantize_channels *dequantize(const cg_profile *p)
{
    return p->version > 1 ? p->kernels->exact->dequantize_channels
                          : p->kernels->dequantize_channels;
}

/* ---- its profiles ---- */

/* The classes of all channels: of the anchors, then of each level's deltas. */
static cg_status read_profile(cg_cursor *in, cg_profile *p)
{
    const uint8_t *start = in->at;
    cg_status status = CG_OK;
    for (unsigned level = 0; level <= CG_N_LOSSY && status == CG_OK; level++) {
        for (uint32_t i = 0; i < p->n_groups * CG_N_PLANES && status == CG_OK; i++) {
            cg_group *group = &p->groups[i / CG_N_PLANES];
            cg_level_columns *columns = level == 0 ? &group->anchors[i % CG_N_PLANES]
                                                   : &group->columns[level - 1][i % CG_N_PLANES];
            /* All channels are columns of frequency 0, and n_active has 16 bits. */
            if (group->n_channels > UINT16_MAX)
                return CG_ERR_UNSUPPORTED;
            columns->n_active[0] = (uint16_t)group->n_channels;
            status = cg_profile_stays_finite(p, group, i % CG_N_PLANES, CG_MOST_SYMBOL)
                         ? cg_profile_read_column_classes(in, p, 0, columns)
                         : CG_ERR_CORRUPT;
        }
    }
    return status == CG_OK ? cg_profile_keep_column_classes(p, start, in->at) : status;
}

/* ---- decoding ---- */

static size_t decode_scratch_bytes(const cg_profile *profile, unsigned level, unsigned coarsest,
                                   const cg_group *group, unsigned matrix, uint32_t n_tokens)
{
    cg_arena arena = {0};
    (void)coarsest; /* paper is never nested */
    (void)take_work(&arena, profile, group, matrix, level, n_tokens, 1);
    return arena.used_bytes;
}

static cg_status decode_symbols(const cg_profile *p, const work *w, cg_coded section)
{
    cg_cursor in = {section.bytes, section.n_bytes};
    const cg_status status = cg_symbols_take(p, &w->anchors, &in);
    return status == CG_OK ? cg_symbols_decode(p, &w->deltas, (cg_coded){in.at, in.left_bytes})
                           : status;
}

static cg_status decode(const cg_heads *heads, const cg_block_order *order, unsigned level,
                        unsigned coarsest, const cg_group *group, unsigned matrix,
                        const cg_coded sections[CG_N_LEVELS], const int16_t *given, void *scratch,
                        void *out)
{
    (void)order; /* rows are tokens */
    (void)coarsest;
    (void)given;
    const cg_profile *p = heads->profile;
    const size_t channels = cg_geometry_channels(&p->geometry), n_columns = group->n_channels;
    const uint32_t n_tokens = heads->n_tokens;
    cg_arena arena = {scratch, 0};
    work w = take_work(&arena, p, group, matrix, level, n_tokens, 1);
    const cg_status status = decode_symbols(p, &w, sections[level]);
    if (status != CG_OK)
        return status;

    for (uint32_t layer = 0; layer < group->n_layers; layer++) {
        const float *weight = cg_profile_row(p, p->weight, cg_group_slice(group, matrix, layer));
        const float *mean = cg_profile_row(p, p->mean, cg_group_slice(group, matrix, layer));
        const float *anchor_step =
            cg_profile_row(p, p->anchor_step, cg_group_slice(group, matrix, layer));
        const int16_t *anchor_cells = w.anchors.cells[0] + layer * channels;
        const int16_t *delta_cells = w.deltas.cells[0] + layer * channels;
        for (size_t ch = 0; ch < channels; ch++)
            w.step[ch] = p->step[level - 1][matrix] / weight[ch];
        for (uint32_t t = 0; t < n_tokens; t++) {
            const size_t element = ((size_t)layer * n_tokens + t) * channels;
            /* Each matrix is walked down for itself: a row of anchors each tenth token, a row of
             * deltas at the others. */
            if (t % CG_ANCHOR_TOKENS == 0) {
                dequantize(p)(anchor_cells, anchor_step, mean, channels, w.anchor);
                cg_heads_store(heads, w.anchor, p->geometry.n_kv_heads, out, element);
                anchor_cells += n_columns;
            } else {
                dequantize(p)(delta_cells, w.step, w.anchor, channels, w.token);
                cg_heads_store(heads, w.token, p->geometry.n_kv_heads, out, element);
                delta_cells += n_columns;
            }
        }
    }
    return CG_OK;
}

/* ---- encoding ---- */

static size_t encode_scratch_bytes(const cg_profile *profile, const cg_group *group,
                                   unsigned matrix, uint32_t n_tokens)
{
    cg_arena arena = {0};
    const size_t n_kept_anchors = (size_t)cg_paper_n_anchors(n_tokens) * group->n_layers;
    (void)take_work(&arena, profile, group, matrix, CG_L1, n_tokens, n_kept_anchors);
    return arena.used_bytes;
}

/* Symbols of the anchors, and the anchors as a decoder has them. */
static bool quantize_anchors(const cg_heads *heads, const cg_group *group, unsigned matrix,
                             const void *in, work *w, uint64_t *n_saturated)
{
    const cg_profile *p = heads->profile;
    const size_t channels = cg_geometry_channels(&p->geometry),
                 n_anchors = cg_paper_n_anchors(heads->n_tokens);
    bool finite = true;
    for (uint32_t layer = 0; layer < group->n_layers; layer++) {
        const float *mean = cg_profile_row(p, p->mean, cg_group_slice(group, matrix, layer));
        const float *anchor_step =
            cg_profile_row(p, p->anchor_step, cg_group_slice(group, matrix, layer));
        for (size_t ch = 0; ch < channels; ch++)
            w->step[ch] = 1.0f / anchor_step[ch];
        for (size_t i = 0; i < n_anchors; i++) {
            const size_t element =
                ((size_t)layer * heads->n_tokens + i * CG_ANCHOR_TOKENS) * channels;
            int16_t *cells = w->anchors.cells[0] + i * group->n_channels + layer * channels;
            finite &=
                cg_heads_load(heads, in, element, heads->profile->geometry.n_kv_heads, w->token);
            heads->profile->kernels->quantize_channels(w->token, mean, w->step, channels, cells);
            *n_saturated += cg_symbols_n_saturated(cells, channels);
            /* What a decoder will have: deltas are taken from that, so errors do not add up. */
            dequantize(p)(cells, anchor_step, mean, channels,
                          w->anchor + (layer * n_anchors + i) * channels);
        }
    }
    return finite;
}

/* What is left of tokens without the decoded anchor of their run. Rows of deltas skip the
 * anchors. */
static bool quantize_deltas(const cg_heads *heads, unsigned level, const cg_group *group,
                            unsigned matrix, const void *in, work *w, uint64_t *n_saturated)
{
    const cg_profile *p = heads->profile;
    const size_t channels = cg_geometry_channels(&p->geometry),
                 n_anchors = cg_paper_n_anchors(heads->n_tokens);
    bool finite = true;
    for (uint32_t layer = 0; layer < group->n_layers; layer++) {
        const float *weight = cg_profile_row(p, p->weight, cg_group_slice(group, matrix, layer));
        int16_t *cells = w->deltas.cells[0] + layer * channels;
        for (size_t ch = 0; ch < channels; ch++)
            w->step[ch] = weight[ch] / p->step[level - 1][matrix];
        for (uint32_t t = 0; t < heads->n_tokens; t++) {
            if (t % CG_ANCHOR_TOKENS == 0)
                continue;
            const float *anchor = w->anchor + (layer * n_anchors + t / CG_ANCHOR_TOKENS) * channels;
            finite &= cg_heads_load(heads, in, ((size_t)layer * heads->n_tokens + t) * channels,
                                    heads->profile->geometry.n_kv_heads, w->token);
            heads->profile->kernels->quantize_channels(w->token, anchor, w->step, channels, cells);
            *n_saturated += cg_symbols_n_saturated(cells, channels);
            cells += group->n_channels;
        }
    }
    return finite;
}

static cg_status encode(const cg_encoding *encoding, const cg_group *group, unsigned matrix,
                        const void *in, void *scratch, cg_projector *projector,
                        cg_piece sections_out[CG_N_LEVELS], uint64_t *n_saturated)
{
    const cg_heads *heads = encoding->heads;
    const cg_profile *p = heads->profile;
    const size_t n_anchors = cg_paper_n_anchors(heads->n_tokens);
    cg_status status = CG_OK;
    cg_piece anchors = {0}; /* coded once: they are the same at every level */
    (void)projector;        /* there is nothing to project on */
    for (unsigned level = CG_L1; level < CG_N_LEVELS && status == CG_OK; level++) {
        if (!cg_encoding_has(encoding, level))
            continue;
        cg_arena arena = {scratch, 0}; /* the anchors lie where they lay at the level before */
        work w = take_work(&arena, p, group, matrix, level, heads->n_tokens,
                           n_anchors * group->n_layers);
        bool finite =
            anchors.bytes != NULL || quantize_anchors(heads, group, matrix, in, &w, n_saturated);
        finite &= quantize_deltas(heads, level, group, matrix, in, &w, n_saturated);
        if (!finite) {
            status = CG_ERR_INVALID_ARGUMENT;
            break;
        }
        if (anchors.bytes == NULL)
            anchors.bytes = cg_symbols_code(p, &w.anchors, (cg_coded){0}, encoding->stream_percent,
                                            &anchors.n_bytes);
        if (anchors.bytes != NULL)
            sections_out[level].bytes =
                cg_symbols_code(p, &w.deltas, (cg_coded){anchors.bytes, anchors.n_bytes},
                                encoding->stream_percent, &sections_out[level].n_bytes);
        if (sections_out[level].bytes == NULL)
            status = CG_ERR_NO_MEMORY;
    }
    free(anchors.bytes);
    return status;
}

/* ---- transcoding ---- */

/* The anchors' bytes stay as they are, and must only be decoded to see where they end. */
static cg_status transcode(const cg_profile *profile, const cg_block_order *order, unsigned from,
                           unsigned to, const cg_group *group, unsigned matrix, uint32_t n_tokens,
                           cg_coded section, cg_piece *section_out)
{
    (void)order;
    const size_t n_anchors = cg_paper_n_anchors(n_tokens);
    const float ratio = profile->step[from - 1][matrix] / profile->step[to - 1][matrix];
    void *memory = aligned_alloc(
        CG_ARENA_ALIGN, cg_symbols_bytes(&group->anchors[matrix], n_anchors) + CG_ARENA_ALIGN);
    if (memory == NULL)
        return CG_ERR_NO_MEMORY;
    const cg_rans_run of_anchors = {n_anchors, 0}, of_deltas = {n_tokens - n_anchors, 0};
    const cg_symbols anchors =
        cg_symbols_lay(&group->anchors[matrix], NULL, &of_anchors, 1, memory);
    cg_cursor in = {section.bytes, section.n_bytes};
    cg_status status = cg_symbols_take(profile, &anchors, &in);
    free(memory);
    if (status != CG_OK)
        return status;
    return cg_symbols_transcode(
        profile, &group->columns[from - 1][matrix], &group->columns[to - 1][matrix], &of_deltas, 1,
        ratio, (cg_coded){section.bytes, section.n_bytes - in.left_bytes},
        (cg_coded){in.at, in.left_bytes}, &section_out->bytes, &section_out->n_bytes);
}

_Static_assert(CG_ANCHOR_TOKENS == 10, "what cgtool says");

const cg_preset cg_paper_preset = {
    .transforms = CG_PAPER_TRANSFORMS,
    .start_multiple = 1,
    .has_anchor_step = true,
    .about = "anchors and deltas in anchor runs of 10",
    .read_profile = read_profile,
    .decode_scratch_bytes = decode_scratch_bytes,
    .decode = decode,
    .encode_scratch_bytes = encode_scratch_bytes,
    .encode = encode,
    .transcode = transcode,
};
