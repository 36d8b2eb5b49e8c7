#include "connector/gpu_projector.h"

static cg_gpu_projector *projector_of(cg_job *job)
{
    return (cg_gpu_projector *)((char *)job - offsetof(cg_gpu_projector, job));
}

static void run_project(cg_job *job, uint32_t task_index, cg_scratch *scratch)
{
    (void)task_index;
    (void)scratch;
    cg_gpu_projector *p = projector_of(job);
    p->status = p->of_device->project(p->of_device, p->what, p->made);
}

static void project_done(cg_job *job)
{
    sem_post(&projector_of(job)->is_made);
}

static cg_status project(cg_projector *projector, const cg_projection *what, cg_projected *made_out)
{
    cg_gpu_projector *p = (cg_gpu_projector *)projector; /* its first member */
    p->what = what;
    p->made = made_out;
    p->job = (cg_job){.run = run_project, .done = project_done, .n_tasks = 1};
    const cg_status status = cg_pool_submit(p->gpu->projecting, CG_JOB_ENCODE, &p->job);
    if (status != CG_OK)
        return status;
    while (sem_wait(&p->is_made) != 0)
        ; /* a signal */
    return p->status;
}

cg_projector *cg_gpu_take_projector(cg_gpu *gpu, cg_gpu_projector *room)
{
    if (gpu->projecting == NULL ||
        (room->of_device = gpu->functions->take_projector(gpu->device)) == NULL)
        return NULL;
    room->gpu = gpu;
    room->base = *room->of_device;
    room->base.project = project;
    sem_init(&room->is_made, 0, 0);
    return &room->base;
}

void cg_gpu_return_projector(cg_gpu_projector *taken)
{
    /* What has been counted counts for the next task, too. */
    taken->base.project = taken->of_device->project;
    *taken->of_device = taken->base;
    taken->gpu->functions->return_projector(taken->gpu->device, taken->of_device);
    sem_destroy(&taken->is_made);
}
