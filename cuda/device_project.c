/* An encoder's projections: K and V up, symbols and what they are coded as down. */
#include "cuda/device_state.h"

#include <string.h>

/* Floats up to the last frequency that has components. One without in between goes along: it costs
 * little. */
static size_t count_rows(const cg_projection *projection)
{
    size_t n_frequencies = 0;
    for (uint32_t f = 0; f < CG_DCT; f++)
        if (projection->n_components[f] > 0)
            n_frequencies = f + 1;
    return n_frequencies * projection->n_rows * projection->row_stride;
}

/* What the rows are made of, or the rows. A failure of later calls is waited for: until then the
 * elements are read. */
static int send(cg_device_projector *j, const cg_projection *what)
{
    const cg_device *d = j->device;
    const cg_cuda_stream stream = d->project_stream;
    if (what->elements == NULL)
        return d->calls->memcpy_async(j->rows_dev, j->base.memory, count_rows(what) * sizeof(float),
                                      stream);
    cg_cuda_projection_places(what, j->places);
    const int error =
        d->calls->memcpy_async(j->places_dev, j->places, what->n_rows * sizeof *j->places, stream);
    return error != 0
               ? error
               : d->calls->memcpy_async(j->elements_dev, what->elements,
                                        cg_cuda_projection_elements_bytes(d->config.profile, what),
                                        stream);
}

/* coding NULL: nothing is to be coded. */
static cg_status run(cg_device_projector *j, const cg_projection *what,
                     const cg_cuda_projection *projection, size_t made_bytes,
                     const cg_cuda_coding *coding)
{
    cg_device *d = j->device;
    const cg_cuda_stream stream = d->project_stream;
    int error;
    if ((error = send(j, what)) != 0)
        return cg_device_error(d, "cudaMemcpyAsync", error, stream);
    if ((error = d->calls->project(projection, stream)) != 0)
        return cg_device_error(d, "a projecting kernel", error, stream);
    if (coding != NULL && (error = d->calls->code(coding, stream)) != 0)
        return cg_device_error(d, "a coding kernel", error, stream);
    if ((error = d->calls->memcpy_async(j->made, j->made_dev, made_bytes, stream)) != 0)
        return cg_device_error(d, "cudaMemcpyAsync", error, stream);
    return cg_device_finish(d, stream, j->done);
}

/* What kernels do not write must not pass for coded: an earlier task's sections still lie there. */
static void forget_coded(const cg_cuda_coding *coding)
{
    for (uint32_t i = 0; i < coding->n_levels; i++)
        *coding->levels[i].n_bytes = 0;
}

/* Where each frequency's lie in pinned memory. */
static void point_at(const uint8_t *memory, const cg_cuda_made *made, const cg_projection *what,
                     cg_projected *out)
{
    const float *residues = (const float *)memory,
                *given = (const float *)(memory + made->given_at);
    const int16_t *cells = (const int16_t *)(memory + made->cells_at);
    for (uint32_t f = 0; f < CG_DCT; f++) {
        const uint32_t n_cells = cg_projection_n_cells(what, f);
        out->residues[f] = residues;
        out->given[f] = given;
        out->cells[f] = cells;
        residues += n_cells;
        given += (size_t)what->n_rows * what->n_given[f];
        cells += (size_t)what->n_rows * n_cells;
    }
}

cg_status cg_device_project(cg_projector *projector, const cg_projection *what,
                            cg_projected *made_out)
{
    cg_device_projector *j = (cg_device_projector *)projector; /* its first member */
    cg_device *d = j->device;
    cg_cuda_projection projection;
    cg_status status = cg_cuda_projection_of(d->config.profile, what, d->bases_dev,
                                             &d->projector_most, &projection);
    if (status != CG_OK)
        return status;
    const cg_cuda_made made = cg_cuda_projection_made(what);
    projection.spectra.elements_dev = what->elements != NULL ? j->elements_dev : NULL;
    projection.spectra.places_dev = (const cg_cuda_place *)j->places_dev;
    projection.rows_dev = j->rows_dev;
    projection.coefs_dev = j->coefs_dev;
    projection.residues_dev = (float *)j->made_dev;
    projection.given_dev = (float *)(j->made_dev + made.given_at);
    projection.cells_dev = (int16_t *)(j->made_dev + made.cells_at);
    point_at(j->made, &made, what, made_out);
    /* What cannot be coded here is coded by the CPU. */
    cg_cuda_coding coding;
    const cg_cuda_coding_memory memory = {d->blob_dev,   projection.cells_dev,
                                          j->coding_dev, d->coding_bytes,
                                          j->coded,      d->coded_bytes};
    const bool codes =
        made.n_bytes > 0 && cg_cuda_coding_of(d->profile, what, &memory, &coding) == CG_OK;
    if (codes)
        forget_coded(&coding);
    if ((status = cg_device_use(d)) == CG_OK && made.n_bytes > 0)
        status = run(j, what, &projection, made.n_bytes, codes ? &coding : NULL);
    memset(made_out->coded, 0, sizeof made_out->coded);
    if (status == CG_OK && codes)
        cg_cuda_coding_result(&coding, what, made_out->coded);
    return status;
}

cg_projector *cg_device_take_projector(cg_device *d)
{
    for (uint32_t i = 0; i < d->n_projectors && !atomic_load(&d->is_broken); i++)
        if (!atomic_exchange(&d->projectors[i].is_taken, true)) {
            d->projectors[i].base.n_failed = 0;
            return &d->projectors[i].base;
        }
    return NULL;
}

void cg_device_return_projector(cg_device *d, cg_projector *projector)
{
    (void)d;
    atomic_store(&((cg_device_projector *)projector)->is_taken, false);
}
