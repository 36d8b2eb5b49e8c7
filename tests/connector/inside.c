/* What happens inside a connector, for tests in C++, which cannot read all of its headers. */
#include "tests/connector/inside.h"

#include "connector/clock.h"
#include "connector/handle.h"
#include "connector/load_verify.h"
#include "connector/prefix.h"
#include "connector/runtime.h"
#include <stdatomic.h>
#include <stdlib.h>

static void measure(cachegen *connector, uint64_t n_bytes, bool ends)
{
    cg_runtime *runtime = cg_runtime_get(connector);
    pthread_mutex_lock(&runtime->lock);
    cg_speeds *speeds = cg_runtime_speeds(runtime);
    const uint64_t ended_ns = cg_now_ns(), begun_ns = ended_ns - 50000000;
    const cg_link_mark mark = cg_link_meter_begin(&speeds->meter, n_bytes, begun_ns);
    if (ends)
        cg_link_meter_end(&speeds->meter, mark, n_bytes, begun_ns, ended_ns, 0, &speeds->link);
    cg_runtime_speeds_end(runtime);
    pthread_mutex_unlock(&runtime->lock);
}

void cg_test_bytes_begin(cachegen *connector, uint64_t n_bytes)
{
    measure(connector, n_bytes, false);
}

void cg_test_bytes_came(cachegen *connector, uint64_t n_bytes)
{
    measure(connector, n_bytes, true);
}

static atomic_int n_verified;

/* The linker has the library's calls come here (--wrap). */
cg_status __real_cg_load_verify(const cg_model *model, const cg_plan *plan, uint32_t chunk_index,
                                uint8_t level, const uint8_t *bytes, size_t n_bytes,
                                uint8_t *worst_level_out, cg_chunk *chunk_out);
cg_status __wrap_cg_load_verify(const cg_model *model, const cg_plan *plan, uint32_t chunk_index,
                                uint8_t level, const uint8_t *bytes, size_t n_bytes,
                                uint8_t *worst_level_out, cg_chunk *chunk_out);
cg_status __wrap_cg_load_verify(const cg_model *model, const cg_plan *plan, uint32_t chunk_index,
                                uint8_t level, const uint8_t *bytes, size_t n_bytes,
                                uint8_t *worst_level_out, cg_chunk *chunk_out)
{
    atomic_fetch_add(&n_verified, 1);
    return __real_cg_load_verify(model, plan, chunk_index, level, bytes, n_bytes, worst_level_out,
                                 chunk_out);
}

int cg_test_n_verified(void)
{
    return atomic_load(&n_verified);
}

struct cg_test_asking {
    cachegen *connector;
    cg_prefix prefixes[2];
    cg_asking_width width;
    cg_io *io;
};

cg_test_asking *cg_test_asking_new(cachegen *connector, const cachegen_request *request,
                                   uint64_t patience_ns, uint64_t other_ns)
{
    cg_runtime *runtime = cg_runtime_get(connector);
    cg_test_asking *a = calloc(1, sizeof *a);
    if (a == NULL)
        return NULL;
    a->connector = connector;
    a->width.n_chunks = CG_ASKING_LEAST;
    cg_status status = CG_OK;
    for (int i = 0; i < 2; i++) {
        if (status == CG_OK)
            status = cg_prefix_init(&a->prefixes[i], runtime, request, 0);
        a->prefixes[i].accepted = 0xf;
        a->prefixes[i].worst_level = CG_L3;
        a->prefixes[i].patience_ns = i == 0 ? patience_ns : other_ns;
    }
    if (status == CG_OK)
        return a;
    cg_test_asking_free(a);
    return NULL;
}

cg_asked cg_test_asking_ask(cg_test_asking *a, uint64_t silence_ns, bool keeps_queue)
{
    const cg_io_config config = cg_runtime_io_config(a->connector);
    cg_prefix *open[2];
    size_t n = 0;
    for (int i = 0; i < 2; i++)
        if (a->prefixes[i].stage != CG_PREFIX_DONE)
            open[n++] = &a->prefixes[i];
    if (n == 0 || (a->io == NULL && cg_io_new(&config, &a->io) != CG_OK))
        return CG_ASKED_BROKEN;
    const cg_asked asked = cg_asking_ask(&a->width, a->io, open, n, silence_ns);
    if (asked != CG_ASKED && !keeps_queue) {
        cg_io_free(a->io, 0);
        a->io = NULL;
    }
    return asked;
}

int cg_test_asking_found(const cg_test_asking *a, int which)
{
    const cg_prefix *prefix = &a->prefixes[which];
    return prefix->stage == CG_PREFIX_DONE ? (int)prefix->n_chunks : -1;
}

void cg_test_asking_free(cg_test_asking *a)
{
    for (int i = 0; i < 2; i++)
        cg_prefix_destroy(&a->prefixes[i]);
    cg_io_free(a->io, 0);
    free(a);
}
