/* Whole chunks on threads of their own: for tools. An engine's connector runs the tasks on its own
 * threads instead. */
#include "codec/arena.h"
#include "codec/codec.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_THREADS = 64 };

typedef struct job {
    const cg_decoder *decoder; /* one of the two */
    cg_encoder *encoder;
    bool weighs;       /* layers, in place of running tasks */
    uint8_t *elements; /* [n_layers][2][n_tokens][n_kv_heads][head_dim]; only read by an encoder */
    size_t scratch_bytes, plane_bytes;
    uint32_t n_tasks;
    atomic_uint next_task;
    atomic_int status; /* CG_OK, or the error of a task */
} job;

/* Where the i-th of a task's layers and planes lies in the caller's array. In the canonical layout
 * they are next to each other. */
static uint8_t *slice_of(const job *j, const cg_task_shape *shape, uint32_t i)
{
    const size_t layer = shape->first_layer + i % shape->n_layers,
                 plane = shape->plane + i / shape->n_layers;
    return j->elements + (layer * CG_N_PLANES + plane) * j->plane_bytes;
}

/* Through a tile: a task has its layers side by side in it, the caller's array has K and V of a
 * layer side by side. */
static cg_status run_task(const job *j, uint32_t task, void *scratch, uint8_t *tile)
{
    if (j->weighs) {
        const uint8_t *k = j->elements + task * CG_N_PLANES * j->plane_bytes;
        return cg_encoder_weigh(j->encoder, task, scratch, j->scratch_bytes, k, k + j->plane_bytes);
    }
    const cg_task_shape shape = j->decoder != NULL ? cg_decoder_task_shape(j->decoder, task)
                                                   : cg_encoder_task_shape(j->encoder, task);
    cg_status status;
    if (j->decoder != NULL) {
        status = cg_decoder_run(j->decoder, task, scratch, j->scratch_bytes, tile);
        for (uint32_t i = 0; i < shape.n_planes * shape.n_layers && status == CG_OK; i++)
            memcpy(slice_of(j, &shape, i), tile + i * j->plane_bytes, j->plane_bytes);
        return status;
    }
    for (uint32_t i = 0; i < shape.n_planes * shape.n_layers; i++)
        memcpy(tile + i * j->plane_bytes, slice_of(j, &shape, i), j->plane_bytes);
    return cg_encoder_run(j->encoder, task, scratch, j->scratch_bytes, tile);
}

static void *work(void *arg)
{
    job *j = arg;
    size_t tile_bytes = 0;
    for (uint32_t i = 0; i < j->n_tasks && !j->weighs; i++) {
        const size_t bytes = j->decoder != NULL
                                 ? cg_decoder_task_shape(j->decoder, i).elements_bytes
                                 : cg_encoder_task_shape(j->encoder, i).elements_bytes;
        tile_bytes = bytes > tile_bytes ? bytes : tile_bytes;
    }
    cg_arena arena = {0};
    (void)cg_arena_take(&arena, j->scratch_bytes);
    (void)cg_arena_take(&arena, tile_bytes);
    arena = (cg_arena){aligned_alloc(CG_ARENA_ALIGN, arena.used_bytes), 0};
    if (arena.base == NULL) {
        atomic_store(&j->status, CG_ERR_NO_MEMORY);
        return NULL;
    }
    void *scratch = cg_arena_take(&arena, j->scratch_bytes);
    uint8_t *tile = cg_arena_take(&arena, tile_bytes);
    for (;;) {
        /* One at a time: tasks take different times, and so do threads. */
        const uint32_t task = atomic_fetch_add(&j->next_task, 1);
        if (task >= j->n_tasks || atomic_load(&j->status) != CG_OK)
            break;
        const cg_status status = run_task(j, task, scratch, tile);
        if (status != CG_OK)
            atomic_store(&j->status, (int)status);
    }
    free(arena.base);
    return NULL;
}

static cg_status run(job *j, unsigned n_threads)
{
    pthread_t threads[MAX_THREADS];
    unsigned n_started = 0;
    n_threads = n_threads < 1 ? 1 : n_threads > MAX_THREADS ? MAX_THREADS : n_threads;
    while (n_started + 1 < n_threads && pthread_create(&threads[n_started], NULL, work, j) == 0)
        n_started++;
    (void)work(j); /* this thread works too: it goes on when no other could be started */
    for (unsigned i = 0; i < n_started; i++)
        (void)pthread_join(threads[i], NULL);
    return (cg_status)atomic_load(&j->status);
}

static size_t plane_bytes(const cg_geometry *g, uint32_t n_tokens)
{
    return (size_t)n_tokens * cg_geometry_channels(g) * cg_dtype_bytes(g->dtype);
}

cg_status cg_decode_chunk(const cg_profile *profile, const uint8_t *bytes, size_t n_bytes,
                          unsigned n_threads, void *out, size_t out_bytes)
{
    cg_decoder *decoder;
    cg_status status = cg_decoder_new(profile, bytes, n_bytes, &decoder);
    if (status != CG_OK)
        return status;
    const cg_chunk_header *h = &cg_decoder_chunk(decoder)->header;
    job j = {.decoder = decoder,
             .elements = out,
             .scratch_bytes = cg_decoder_scratch_bytes(decoder),
             .plane_bytes = plane_bytes(&h->geometry, h->n_tokens),
             .n_tasks = cg_decoder_n_tasks(decoder)};
    status = out_bytes >= j.plane_bytes * h->geometry.n_layers * CG_N_PLANES
                 ? run(&j, n_threads)
                 : CG_ERR_BUFFER_TOO_SMALL;
    cg_decoder_free(decoder);
    return status;
}

cg_status cg_encode_chunk(const cg_profile *profile, const cg_chunk_header *header,
                          const uint32_t *tokens, const void *in, size_t in_bytes, cg_level level,
                          cg_level coarsest, unsigned n_threads, uint8_t **bytes_out,
                          size_t *n_bytes_out, uint64_t *n_saturated_out)
{
    cg_encoder *encoder;
    *bytes_out = NULL;
    if ((unsigned)level >= CG_N_LEVELS || (unsigned)coarsest >= CG_N_LEVELS || coarsest < level)
        return CG_ERR_INVALID_ARGUMENT;
    const unsigned levels = (2u << coarsest) - (1u << level),
                   nested = coarsest > level ? CG_NESTED : 0;
    cg_status status =
        cg_encoder_new(profile, header, tokens, (uint8_t)(levels | nested), &encoder);
    if (status != CG_OK)
        return status;
    /* Tasks of an encoder only read elements. */
    job j = {.encoder = encoder,
             .elements = (uint8_t *)(uintptr_t)in,
             .scratch_bytes = cg_encoder_scratch_bytes(encoder),
             .plane_bytes = plane_bytes(&header->geometry, header->n_tokens),
             .n_tasks = cg_encoder_n_weighings(encoder),
             .weighs = true};
    status = in_bytes >= j.plane_bytes * header->geometry.n_layers * CG_N_PLANES
                 ? CG_OK
                 : CG_ERR_BUFFER_TOO_SMALL;
    if (status == CG_OK && j.n_tasks > 0)
        status = run(&j, n_threads);
    j.weighs = false;
    j.n_tasks = cg_encoder_n_tasks(encoder);
    atomic_store(&j.next_task, 0);
    if (status == CG_OK)
        status = run(&j, n_threads);
    if (status == CG_OK)
        status = cg_encoder_finish(encoder, level, bytes_out, n_bytes_out);
    if (n_saturated_out != NULL)
        *n_saturated_out = cg_encoder_n_saturated(encoder);
    cg_encoder_free(encoder);
    return status;
}
