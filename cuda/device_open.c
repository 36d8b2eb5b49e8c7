/* A device's life: what it takes of the GPU, and how it gives that back. */
#include "cuda/device_state.h"

#include "codec/arena.h"
#include "codec/cursor.h"
#include "cuda/profile_blob.h"

#include <stdio.h>
#include <stdlib.h>

enum { MARGIN_BYTES = 1 << 20 }; /* of a chunk's file beyond its K and V: header, tables */

static void *take(cg_arena *arena, size_t n_bytes)
{
    return cg_arena_take_aligned(arena, n_bytes, CG_CUDA_ALIGN);
}

static size_t whole_pages(size_t n_bytes)
{
    return (n_bytes + 4095) / 4096 * 4096;
}

static void lay_out(cg_device *d, cg_arena *pinned, cg_arena *dev)
{
    const size_t table_bytes = cg_padded(d->table_entries * sizeof(int64_t), CG_CUDA_ALIGN);
    /* Pages first: each is a whole number of them. */
    for (uint32_t i = 0; i < d->config.n_slots; i++)
        d->slots[i].memory = take(pinned, d->memory_bytes);
    for (uint32_t i = 0; i < d->config.n_copies; i++)
        d->copies[i].elements = take(pinned, d->raw_bytes);
    for (uint32_t i = 0; i < d->n_projectors; i++)
        d->projectors[i].base.memory = take(pinned, d->projectors[i].base.memory_bytes);
    for (uint32_t i = 0; i < d->n_projectors; i++) {
        cg_device_projector *j = &d->projectors[i];
        const cg_cuda_projection_most *most = &d->projector_most;
        const size_t places_bytes = most->n_places * sizeof *j->places;
        j->made = take(pinned, most->made_bytes);
        j->places = take(pinned, places_bytes);
        j->coded = take(pinned, d->coded_bytes);
        j->rows_dev = take(dev, most->n_rows * sizeof(float));
        j->coefs_dev = take(dev, most->n_coefs * sizeof(float));
        j->made_dev = take(dev, most->made_bytes);
        j->elements_dev = take(dev, most->elements_bytes);
        j->places_dev = take(dev, places_bytes);
        j->coding_dev = take(dev, d->coding_bytes);
    }
    for (uint32_t i = 0; i < d->config.n_copies; i++)
        d->copies[i].table = take(pinned, table_bytes);
    for (uint32_t i = 0; i < CG_DEVICE_BATCHES; i++) {
        cg_device_batch *b = &d->batches[i];
        const size_t status_bytes = CG_CUDA_MAX_JOBS * sizeof *b->status;
        b->status = take(pinned, status_bytes);
        b->status_dev = take(dev, status_bytes);
    }
    for (uint32_t i = 0; i < d->config.n_slots; i++) {
        cg_device_slot *s = &d->slots[i];
        s->table = take(pinned, table_bytes); /* the plan right behind it: one upload */
        s->plan = take(pinned, d->plan_bytes);
        s->table_dev = take(dev, table_bytes);
        s->plan_dev = take(dev, d->plan_bytes);
        s->chunk_dev = take(dev, d->memory_bytes);
        s->scratch_dev = take(dev, d->scratch_bytes);
    }
    d->blob_dev = take(dev, d->profile != NULL ? cg_cuda_profile_bytes(d->profile) : 0);
    d->bases_dev = take(dev, d->n_projectors > 0 ? cg_cuda_bases_bytes(d->config.profile) : 0);
}

/* How large projectors are, if there can be any: with a profile of preset klt. */
static void size_projectors(cg_device *d, const cg_device_config *config)
{
    if (d->profile == NULL || d->profile->preset != CG_CUDA_PRESET_KLT)
        return;
    d->n_projectors = config->n_projectors;
    d->projector_most =
        cg_cuda_projection_bound(config->profile, config->geometry.dtype, config->chunk_tokens);
    cg_cuda_coding_bound(d->profile, config->chunk_tokens, &d->coding_bytes, &d->coded_bytes);
}

/* What chunks take, and projectors, with the profile that there are kernels for. */
static void size_parts(cg_device *d)
{
    const cg_device_config *config = &d->config;
    size_projectors(d, config);
    const size_t elements_bytes = d->projector_most.elements_bytes,
                 given_bytes = d->projector_most.given_rows * sizeof(float);
    for (uint32_t i = 0; i < d->n_projectors; i++) {
        cg_device_projector *j = &d->projectors[i];
        j->device = d;
        j->base.project = cg_device_project;
        j->base.n_tokens = config->chunk_tokens;
        j->base.memory_bytes =
            whole_pages(elements_bytes > given_bytes ? elements_bytes : given_bytes);
    }
    cg_cuda_plan_bound(d->profile, &config->geometry, config->chunk_tokens, &d->plan_bytes,
                       &d->scratch_bytes);
}

/* Everything that CUDA is not needed for. */
static cg_status prepare(cg_device *d, const cg_device_config *config)
{
    const cg_geometry *g = &config->geometry;
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->changed, NULL);
    d->calls = &cg_cuda_runtime;
    d->config = *config;
    d->slots = calloc(config->n_slots, sizeof *d->slots);
    d->copies = calloc(config->n_copies + (size_t)1, sizeof *d->copies);
    if (d->slots == NULL || d->copies == NULL)
        return CG_ERR_NO_MEMORY;
    cg_status status =
        config->profile != NULL ? cg_cuda_profile_new(config->profile, &d->profile) : CG_OK;
    /* Without kernels for its profile the CPU decodes its chunks. */
    if (status != CG_OK && status != CG_ERR_UNSUPPORTED_VERSION && status != CG_ERR_UNSUPPORTED)
        return status;
    if ((d->projectors = calloc(config->n_projectors + (size_t)1, sizeof *d->projectors)) == NULL)
        return CG_ERR_NO_MEMORY;
    d->raw_bytes =
        whole_pages(cg_geometry_elements(g, config->chunk_tokens) * cg_dtype_bytes(g->dtype));
    d->memory_bytes = d->raw_bytes + MARGIN_BYTES;
    d->table_entries = config->chunk_tokens + 1; /* engine's blocks of one token */
    return CG_OK;
}

static cg_status say(char *reason_out, size_t reason_bytes, const cg_device *d, const char *what,
                     int error)
{
    snprintf(reason_out, reason_bytes, "%s: %s", what, d->calls->get_error_string(error));
    d->calls->get_last_error();
    return CG_ERR_DEVICE;
}

static cg_status check_device(const cg_device *d, char *reason_out, size_t reason_bytes)
{
    int n = 0;
    const int error = d->calls->get_device_count(&n);
    if (error != 0)
        return say(reason_out, reason_bytes, d, "no GPU can be used", error);
    if (d->config.ordinal < (uint32_t)n)
        return CG_OK;
    snprintf(reason_out, reason_bytes, "there is no GPU %u: this process sees %d",
             d->config.ordinal, n);
    return CG_ERR_DEVICE;
}

static int allocate(cg_device *d, size_t pinned_bytes, size_t dev_bytes)
{
    int error = d->calls->host_alloc(&d->pinned, pinned_bytes);
    if (error == 0 && (error = d->calls->malloc(&d->memory_dev, dev_bytes)) != 0) {
        d->calls->host_free(d->pinned);
        d->pinned = NULL;
    }
    return error;
}

/* Allocates all memory. Where there is too little the CPU makes the encoders' projections. */
static cg_status take_memory(cg_device *d, char *reason_out, size_t reason_bytes)
{
    const cg_cuda_calls *calls = d->calls;
    cg_arena pinned = {0}, dev = {0};
    int error;
    /* Twice: to add up, and to cut what was allocated. */
    lay_out(d, &pinned, &dev);
    if ((error = allocate(d, pinned.used_bytes, dev.used_bytes)) != 0 && d->n_projectors > 0) {
        calls->get_last_error();
        d->n_projectors = 0;
        pinned = dev = (cg_arena){0};
        lay_out(d, &pinned, &dev);
        error = allocate(d, pinned.used_bytes, dev.used_bytes);
    }
    if (error != 0) {
        snprintf(reason_out, reason_bytes, "no %zu MiB of pinned memory and %zu MiB on the GPU: %s",
                 (pinned.used_bytes >> 20) + 1, (dev.used_bytes >> 20) + 1,
                 calls->get_error_string(error));
        calls->get_last_error();
        return CG_ERR_DEVICE;
    }
    pinned = (cg_arena){d->pinned, 0};
    dev = (cg_arena){d->memory_dev, 0};
    lay_out(d, &pinned, &dev);
    return CG_OK;
}

/* Allocates and makes all that the device will use. It is current. */
static cg_status start(cg_device *d, char *reason_out, size_t reason_bytes)
{
    const cg_cuda_calls *calls = d->calls;
    size_t shared_bytes;
    int error;
    if ((error = calls->prepare(&shared_bytes)) != 0)
        return say(reason_out, reason_bytes, d, "the kernels do not run on this GPU", error);
    if (d->profile != NULL && cg_cuda_profile_shared_bytes(d->profile) > shared_bytes) {
        /* The CPU decodes and encodes its chunks, as those of profiles that have no kernels. */
        cg_cuda_profile_free(d->profile);
        d->profile = NULL;
    }
    size_parts(d);
    const cg_status status = take_memory(d, reason_out, reason_bytes);
    if (status != CG_OK)
        return status;
    if ((error = calls->stream_create(&d->read_stream)) != 0 ||
        (error = calls->stream_create(&d->upload_stream)) != 0)
        return say(reason_out, reason_bytes, d, "cudaStreamCreate", error);
    for (uint32_t i = 0; i < CG_DEVICE_BATCHES; i++)
        if ((error = calls->stream_create(&d->batches[i].stream)) != 0 ||
            (error = calls->event_create(&d->batches[i].done)) != 0)
            return say(reason_out, reason_bytes, d, "cudaStreamCreate", error);
    for (uint32_t i = 0; i < d->config.n_slots; i++)
        if ((error = calls->event_create(&d->slots[i].uploaded)) != 0)
            return say(reason_out, reason_bytes, d, "cudaEventCreate", error);
    if (d->n_projectors > 0 && (error = calls->stream_create(&d->project_stream)) != 0)
        return say(reason_out, reason_bytes, d, "cudaStreamCreate", error);
    for (uint32_t i = 0; i < d->n_projectors; i++)
        if ((error = calls->event_create(&d->projectors[i].done)) != 0)
            return say(reason_out, reason_bytes, d, "cudaEventCreate", error);
    for (uint32_t i = 0; i < d->config.n_copies; i++)
        if ((error = calls->event_create(&d->copies[i].done)) != 0)
            return say(reason_out, reason_bytes, d, "cudaEventCreate", error);
    return CG_OK;
}

static int send(cg_device *d, void *dev, const void *from, size_t n_bytes)
{
    const int error = d->calls->memcpy_async(dev, from, n_bytes, d->read_stream);
    return error == 0 ? d->calls->stream_synchronize(d->read_stream) : error;
}

/* Out of memory that is not pinned: CUDA copies it aside, piece by piece. Pinned memory is short on
 * some hosts, and this is done once. Blob and bases stay on the GPU. */
static cg_status upload_profile(cg_device *d, char *reason_out, size_t reason_bytes)
{
    if (d->profile == NULL)
        return CG_OK;
    const size_t n_blob = cg_cuda_profile_bytes(d->profile),
                 n_bases = d->n_projectors > 0 ? cg_cuda_bases_bytes(d->config.profile) : 0;
    int error = 0;
    void *memory = malloc(n_blob > n_bases ? n_blob : n_bases);
    if (memory == NULL) {
        snprintf(reason_out, reason_bytes, "%s", cg_strerror(CG_ERR_NO_MEMORY));
        return CG_ERR_NO_MEMORY;
    }
    const cg_status status = cg_cuda_profile_fill(d->profile, memory);
    if (status == CG_OK)
        error = send(d, d->blob_dev, memory, n_blob);
    if (status == CG_OK && error == 0 && n_bases > 0) {
        cg_cuda_bases_fill(d->config.profile, memory);
        error = send(d, d->bases_dev, memory, n_bases);
    }
    free(memory);
    return error == 0 ? status : say(reason_out, reason_bytes, d, "cudaMemcpyAsync", error);
}

/* The result of a call that ends something: of a GPU that is broken, an error. */
static void ended(const cg_device *d, int error)
{
    if (error != 0)
        d->calls->get_last_error();
}

/* NULL: there is none. */
static void end_stream(const cg_device *d, cg_cuda_stream stream, cg_cuda_event done)
{
    if (stream != NULL) {
        ended(d, d->calls->stream_synchronize(stream));
        ended(d, d->calls->stream_destroy(stream));
    }
    if (done != NULL)
        ended(d, d->calls->event_destroy(done));
}

/* What opening has got to: NULL is what it has not. Streams first, so that nothing is under way in
 * memory that is freed. */
static void end_cuda(cg_device *d)
{
    const cg_cuda_calls *calls = d->calls;
    /* Where opening failed before anything was taken, CUDA may not even be there. Not
     * cg_device_use(): a device that is broken is freed, too. */
    if (d->pinned == NULL)
        return;
    ended(d, calls->set_device((int)d->config.ordinal));
    for (uint32_t i = 0; i < CG_DEVICE_BATCHES; i++)
        end_stream(d, d->batches[i].stream, d->batches[i].done);
    end_stream(d, d->project_stream, NULL);
    for (uint32_t i = 0; i < d->n_projectors && d->projectors != NULL; i++)
        end_stream(d, NULL, d->projectors[i].done);
    end_stream(d, d->read_stream, NULL);
    end_stream(d, d->upload_stream, NULL);
    for (uint32_t i = 0; i < d->config.n_slots && d->slots != NULL; i++)
        if (d->slots[i].uploaded != NULL)
            ended(d, calls->event_destroy(d->slots[i].uploaded));
    for (uint32_t i = 0; i < d->config.n_copies && d->copies != NULL; i++)
        if (d->copies[i].done != NULL)
            ended(d, calls->event_destroy(d->copies[i].done));
    for (uint32_t i = 0; i < atomic_load(&d->n_blocks); i++)
        ended(d, calls->free((void *)d->blocks[i].base_dev));
    if (d->memory_dev != NULL)
        ended(d, calls->free(d->memory_dev));
    ended(d, calls->host_free(d->pinned));
    for (cg_device_mark *mark = d->free_marks; mark != NULL; mark = mark->next)
        ended(d, calls->event_destroy(mark->event));
}

/* What is not CUDA's. */
static void free_host(cg_device *d)
{
    for (cg_device_mark *mark = d->free_marks, *next; mark != NULL; mark = next) {
        next = mark->next;
        free(mark);
    }
    cg_cuda_profile_free(d->profile);
    pthread_cond_destroy(&d->changed);
    pthread_mutex_destroy(&d->lock);
    free(d->slots);
    free(d->copies);
    free(d->projectors);
    free(d);
}

void cg_device_close(cg_device *d)
{
    if (d == NULL)
        return;
    cg_device_relax(d);
    end_cuda(d);
    free_host(d);
}

cg_status cg_device_open(const cg_device_config *config, cg_device **device_out, char *reason_out,
                         size_t reason_bytes)
{
    const cg_geometry *g = &config->geometry;
    int before = 0;
    cg_status status = CG_ERR_NO_MEMORY;
    *device_out = NULL;
    snprintf(reason_out, reason_bytes, "out of memory");
    if (g->head_dim * cg_dtype_bytes(g->dtype) % CG_CUDA_COPY_UNIT_BYTES != 0) {
        snprintf(reason_out, reason_bytes, "heads of %u elements: %d bytes must divide them",
                 g->head_dim, CG_CUDA_COPY_UNIT_BYTES);
        return CG_ERR_UNSUPPORTED;
    }
    cg_device *d = calloc(1, sizeof *d);
    if (d == NULL)
        return status;
    if ((status = prepare(d, config)) != CG_OK) {
        snprintf(reason_out, reason_bytes, "%s", cg_strerror(status));
        goto done;
    }
    if ((status = check_device(d, reason_out, reason_bytes)) != CG_OK)
        goto done;
    if ((status = cg_device_enter(d, &before)) != CG_OK) {
        snprintf(reason_out, reason_bytes, "GPU %u cannot be made current", config->ordinal);
        goto done;
    }
    if ((status = start(d, reason_out, reason_bytes)) == CG_OK)
        status = upload_profile(d, reason_out, reason_bytes);
    if (status != CG_OK)
        end_cuda(d);
    cg_device_leave(d, before);
    if (status == CG_OK) {
        *device_out = d;
        return CG_OK;
    }
done:
    free_host(d);
    return status;
}
