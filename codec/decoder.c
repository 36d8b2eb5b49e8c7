/* One chunk file to elements, task by task. The work itself is elsewhere: a preset (preset.h)
 * decodes the lossy levels, lossless.c L0 and the sinks, and section_plan.c knows which sections a
 * task has. Here they are put together, and what can be checked without decoding is checked first.
 */
#include "codec/codec.h"

#include "codec/arena.h"
#include "codec/lossless.h"
#include "codec/preset.h"
#include "codec/section_plan.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* What the joint matrix gives to all tasks: made by the first one that needs it. */
typedef struct joint_stage {
    pthread_mutex_t lock;
    bool is_done;     /* under lock, as are the others until then; afterwards they are read-only */
    cg_status status; /* every task's */
    int16_t *given;   /* codec/klt.h */
} joint_stage;

struct cg_decoder {
    cg_chunk chunk;
    cg_heads heads;          /* profile NULL at L0 */
    const cg_preset *preset; /* NULL at L0 */
    cg_block_order order;    /* empty at L0 */
    uint32_t n_sink_tokens;
    cg_section *sections; /* [chunk.header.n_sections] */
    joint_stage *joint;   /* NULL without a joint matrix */
};

static void free_joint(joint_stage *joint)
{
    if (joint == NULL)
        return;
    pthread_mutex_destroy(&joint->lock);
    free(joint->given);
    free(joint);
}

/* Its memory is taken here, so that tasks take none. */
static joint_stage *new_joint(size_t given_bytes)
{
    joint_stage *joint = calloc(1, sizeof *joint);
    if (joint == NULL)
        return NULL;
    if (pthread_mutex_init(&joint->lock, NULL) != 0) {
        free(joint);
        return NULL;
    }
    joint->given = malloc(given_bytes);
    if (joint->given != NULL)
        return joint;
    free_joint(joint);
    return NULL;
}

cg_status cg_decoder_new(const cg_profile *profile, const uint8_t *bytes, size_t n_bytes,
                         cg_decoder **decoder_out)
{
    *decoder_out = NULL;
    cg_decoder *d = calloc(1, sizeof *d);
    if (d == NULL)
        return CG_ERR_NO_MEMORY;
    cg_status status = cg_chunk_open(bytes, n_bytes, &d->chunk);
    if (status != CG_OK)
        goto done;
    const cg_chunk_header *h = &d->chunk.header;
    if (h->level == CG_L0)
        profile = NULL; /* callers may have one at hand: lossless chunks do not use it */
    else if ((status = cg_section_plan_profile_check(profile, h)) != CG_OK)
        goto done;

    status = CG_ERR_NO_MEMORY;
    /* At most CG_CHUNK_MAX_SECTIONS of them: cg_chunk_open() has checked the count. */
    d->sections = malloc(h->n_sections * sizeof *d->sections);
    if (d->sections == NULL)
        goto done;
    if ((status = cg_section_plan_check(profile, &d->chunk, d->sections)) != CG_OK)
        goto done;
    if (profile != NULL) {
        d->preset = profile->preset;
        d->n_sink_tokens = cg_section_plan_n_sinks(profile, h);
        if ((status = cg_section_plan_block_order(profile, &d->chunk, d->sections, &d->order)) !=
                CG_OK ||
            (status = cg_heads_init(profile, h, &d->heads)) != CG_OK)
            goto done;
        if (profile->joint != NULL &&
            (d->joint = new_joint(d->preset->given_bytes(profile, h->n_tokens))) == NULL) {
            status = CG_ERR_NO_MEMORY;
            goto done;
        }
    }
    *decoder_out = d;
    d = NULL;
done:
    cg_decoder_free(d);
    return status;
}

void cg_decoder_free(cg_decoder *d)
{
    if (d == NULL)
        return;
    free_joint(d->joint);
    free(d->sections);
    cg_block_order_destroy(&d->order);
    cg_heads_destroy(&d->heads);
    free(d);
}

const cg_chunk *cg_decoder_chunk(const cg_decoder *d)
{
    return &d->chunk;
}

uint32_t cg_decoder_n_tasks(const cg_decoder *d)
{
    return cg_section_plan_n_tasks(d->heads.profile, &d->chunk.header);
}

cg_task_shape cg_decoder_task_shape(const cg_decoder *d, uint32_t task_index)
{
    return cg_section_plan_task(d->heads.profile, &d->chunk.header, task_index);
}

static size_t sinks_bytes(const cg_decoder *d, const cg_group *group)
{
    return (size_t)d->n_sink_tokens * cg_group_plane_channels(d->heads.profile, group) *
           cg_dtype_bytes(d->chunk.header.geometry.dtype);
}

size_t cg_decoder_scratch_bytes(const cg_decoder *d)
{
    const cg_chunk_header *h = &d->chunk.header;
    const cg_profile *p = d->heads.profile;
    /* The largest of all tasks, so that a thread keeps one piece. Symbols and sinks of a task are
     * decoded one after the other, in the same memory. */
    size_t most = 0;
    if (p == NULL)
        return cg_lossless_decode_scratch_bytes(cg_geometry_channels(&h->geometry), h->n_tokens);
    for (uint32_t g = 0; g < p->n_groups; g++) {
        for (unsigned matrix = 0; matrix < p->n_matrices; matrix++) {
            const size_t bytes = d->preset->decode_scratch_bytes(
                p, h->level, h->coarsest, &p->groups[g], matrix, h->n_tokens);
            most = bytes > most ? bytes : most;
        }
        cg_arena arena = {0};
        (void)cg_arena_take(&arena, sinks_bytes(d, &p->groups[g]));
        (void)cg_arena_take(
            &arena, cg_lossless_decode_scratch_bytes(cg_group_plane_channels(p, &p->groups[g]),
                                                     d->n_sink_tokens));
        most = arena.used_bytes > most ? arena.used_bytes : most;
    }
    if (d->joint != NULL) {
        const size_t bytes =
            d->preset->decode_joint_scratch_bytes(p, h->level, h->coarsest, h->n_tokens);
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* A level's section, whose checksum is checked: damage costs no decoding. */
static cg_status take_section(const cg_decoder *d, uint32_t section_index, cg_coded *coded_out)
{
    const cg_section *section = &d->sections[section_index];
    *coded_out = (cg_coded){d->chunk.bytes + section->offset, section->bytes};
    return cg_chunk_section_check(&d->chunk, section);
}

/* The joint matrix, unless it is decoded already. Other tasks wait here: they can't go on without.
 */
static cg_status ready_joint(const cg_decoder *d, void *scratch)
{
    const cg_chunk_header *h = &d->chunk.header;
    const cg_profile *p = d->heads.profile;
    joint_stage *joint = d->joint;
    cg_coded coded[CG_N_LEVELS] = {0};
    pthread_mutex_lock(&joint->lock);
    for (unsigned level = h->level;
         level <= h->coarsest && !joint->is_done && joint->status == CG_OK; level++)
        joint->status = take_section(d, cg_section_plan_joint_index(p, h, level), &coded[level]);
    if (!joint->is_done && joint->status == CG_OK)
        joint->status = d->preset->decode_joint(p, &d->order, h->level, h->coarsest, coded, scratch,
                                                joint->given);
    joint->is_done = true; /* after an error, too: damage does not go away */
    const cg_status status = joint->status;
    pthread_mutex_unlock(&joint->lock);
    return status;
}

static bool is_scratch(const cg_decoder *d, const void *scratch, size_t scratch_bytes)
{
    return scratch_bytes >= cg_decoder_scratch_bytes(d) && (uintptr_t)scratch % CG_ARENA_ALIGN == 0;
}

cg_status cg_decoder_prepare(const cg_decoder *d, void *scratch, size_t scratch_bytes)
{
    if (!is_scratch(d, scratch, scratch_bytes))
        return CG_ERR_INVALID_ARGUMENT;
    return d->joint != NULL ? ready_joint(d, scratch) : CG_OK;
}

/* Lays the exact first tokens of a plane on top of what was decoded: FORMAT.md, stage 6. A sinks
 * section is [token][layer][head][dim], and out, of that plane, has the layers outside. */
static cg_status decode_sinks(const cg_decoder *d, const cg_group *group, const cg_section *section,
                              void *scratch, uint8_t *out)
{
    const cg_geometry *g = &d->chunk.header.geometry;
    const size_t row_bytes = cg_geometry_channels(g) * cg_dtype_bytes(g->dtype);
    cg_arena arena = {scratch, 0};
    uint8_t *sinks = cg_arena_take(&arena, sinks_bytes(d, group));
    /* Where the rest of the scratch begins: cg_decoder_scratch_bytes() has counted what is used. */
    void *work = cg_arena_take(&arena, 0);
    const cg_status status =
        cg_lossless_decode(g->dtype, d->chunk.bytes + section->offset, section->bytes,
                           cg_group_plane_channels(d->heads.profile, group), d->n_sink_tokens,
                           cg_chunk_align(d->chunk.header.version), work, sinks);
    if (status != CG_OK)
        return status;
    for (uint32_t t = 0; t < d->n_sink_tokens; t++) {
        for (uint32_t layer = 0; layer < group->n_layers; layer++)
            memcpy(out + ((size_t)layer * d->chunk.header.n_tokens + t) * row_bytes,
                   sinks + ((size_t)t * group->n_layers + layer) * row_bytes, row_bytes);
    }
    return CG_OK;
}

cg_status cg_decoder_run(const cg_decoder *d, uint32_t task_index, void *scratch,
                         size_t scratch_bytes, void *out)
{
    const cg_chunk_header *h = &d->chunk.header;
    const cg_profile *p = d->heads.profile;
    if (task_index >= cg_decoder_n_tasks(d) || !is_scratch(d, scratch, scratch_bytes))
        return CG_ERR_INVALID_ARGUMENT;
    cg_coded coded[CG_N_LEVELS] = {0};
    cg_status status = CG_OK;
    /* All checksums come first. A nested chunk needs its coarser levels, too: finer symbols are
     * coded given theirs. */
    for (unsigned level = h->level; level <= h->coarsest && status == CG_OK; level++)
        status = take_section(d, cg_section_plan_index(p, h, task_index, level), &coded[level]);
    const cg_section *sinks[CG_N_PLANES];
    const cg_task_shape shape = cg_decoder_task_shape(d, task_index);
    const uint32_t n_planes = d->n_sink_tokens > 0 ? shape.n_planes : 0;
    for (uint32_t i = 0; i < n_planes && status == CG_OK; i++) {
        sinks[i] = &d->sections[cg_section_plan_sinks_index(p, h, task_index / p->n_matrices,
                                                            shape.plane + i)];
        status = cg_chunk_section_check(&d->chunk, sinks[i]);
    }
    if (status == CG_OK && d->joint != NULL)
        status = ready_joint(d, scratch);
    if (status != CG_OK)
        return status;
    if (p == NULL)
        return cg_lossless_decode(h->geometry.dtype, coded[CG_L0].bytes, coded[CG_L0].n_bytes,
                                  cg_geometry_channels(&h->geometry), h->n_tokens,
                                  cg_chunk_align(h->version), scratch, out);
    const cg_group *group = &p->groups[task_index / p->n_matrices];
    status = d->preset->decode(&d->heads, &d->order, h->level, h->coarsest, group,
                               task_index % p->n_matrices, coded,
                               d->joint != NULL ? d->joint->given : NULL, scratch, out);
    /* Last: the preset has written all tokens, these too, and is done with the scratch. */
    for (uint32_t i = 0; i < n_planes && status == CG_OK; i++)
        status = decode_sinks(d, group, sinks[i], scratch,
                              (uint8_t *)out + i * (shape.elements_bytes / shape.n_planes));
    return status;
}
