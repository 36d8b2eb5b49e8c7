/* cuda/planner.h - how a plan (cuda/decode.h) is written, and what its parts share.
 *
 * A plan is written front to back into the caller's memory. plan.c checks a chunk and a request and
 * calls the planner of what the chunk holds: plan_klt.c, plan_paper.c, or plan_exact.c for L0 and
 * sinks. Scratch is only counted here; kernels take it from the caller, too.
 * Threads: functions share nothing but the planner.
 */
#ifndef CG_CUDA_PLANNER_H
#define CG_CUDA_PLANNER_H
#include "codec/section_plan.h"
#include "cuda/profile_blob.h"

enum {
    CG_PLANNER_MOST_ROWS = (CG_MAX_CHUNK_TOKENS + CG_DCT - 1) / CG_DCT,
    /* One more than there are: kernels load the run behind the last one, and leave it. */
    CG_PLANNER_MOST_RUNS = CG_N_STEP_FACTORS + 1,
};

/* The rows of all matrices of symbols of preset klt. */
typedef struct cg_row_plan {
    uint64_t at, runs_at; /* in the plan */
    uint32_t n_runs;
    /* Rows of thread blocks that multiply: CG_CUDA_TILE_BLOCKS each, from these on. Together they
     * hold all wanted blocks of tokens. */
    uint32_t n_parts;
    uint32_t first[(CG_PLANNER_MOST_ROWS + CG_CUDA_TILE_BLOCKS - 1) / CG_CUDA_TILE_BLOCKS];
} cg_row_plan;

/* What is at hand while a plan is written. */
typedef struct cg_planner {
    const cg_cuda_profile *laid; /* NULL at L0 */
    const cg_profile *profile;   /* NULL at L0 */
    const cg_chunk *chunk;
    const cg_section *sections;
    const cg_cuda_request *request;
    uint8_t *bytes;
    size_t n_bytes, left_bytes;
    uint64_t scratch_bytes;
    cg_row_plan rows;
    cg_cuda_plan *plan;
} cg_planner;

/* Thread blocks of jobs that stand one after another. */
typedef struct cg_stream_jobs {
    cg_cuda_stream_job *jobs;
    size_t n, n_room;
} cg_stream_jobs;

/* The n-th wanted matrix; behind them the joint one, which is no task. */
typedef struct cg_wanted_matrix {
    const cg_group *group;
    const cg_cuda_matrix *laid;
    uint32_t matrix, task;
} cg_wanted_matrix;

/* Zeros, 16-byte aligned; NULL: the plan is full. */
void *cg_planner_take(cg_planner *p, size_t n_bytes);
/* Where a part of the plan lies in it. */
uint64_t cg_planner_at(const cg_planner *p, const void *part);
/* Where n_bytes of scratch begin. */
uint64_t cg_planner_take_scratch(cg_planner *p, uint64_t n_bytes);
cg_cuda_pass *cg_planner_add_pass(cg_planner *p, uint32_t kind);
/* A pass of streams with the profile's classes. */
cg_cuda_pass *cg_planner_add_lossy(cg_planner *p, uint32_t kind);

/* Room for jobs of streams. False: the plan is full. */
bool cg_planner_take_jobs(cg_planner *p, size_t n_room, cg_stream_jobs *out);
/* The next job begins a thread block. */
void cg_stream_jobs_end_block(cg_stream_jobs *jobs);
/* A job for each stream of a matrix, as many as strips at most; *in moves behind it.
 * CG_ERR_CORRUPT, CG_ERR_TRUNCATED. */
cg_status cg_planner_add_streams(const cg_planner *p, cg_cursor *in, uint64_t matrix_at,
                                 cg_cuda_streams *m, const cg_cuda_stream_job *like,
                                 cg_stream_jobs *jobs);
/* The pass has these jobs. Without any it is taken back. */
void cg_planner_end_streams(const cg_planner *p, cg_cuda_pass *pass, cg_stream_jobs *jobs);

cg_cursor cg_planner_section(const cg_planner *p, const cg_section *section);
cg_cuda_target cg_planner_target(const cg_planner *p, uint32_t first_layer, uint32_t plane);
/* How many matrices the request wants, and the n-th of them. Behind the last one stands the joint
 * matrix. */
size_t cg_planner_n_wanted(const cg_planner *p);
cg_wanted_matrix cg_planner_wanted(const cg_planner *p, size_t n);

/* The passes of a lossless chunk, of a lossy one by preset, and of the sinks of a lossy one, which
 * come last. CG_ERR_BUFFER_TOO_SMALL: the plan is full. CG_ERR_CORRUPT, CG_ERR_TRUNCATED. */
cg_status cg_cuda_plan_lossless(cg_planner *p);
cg_status cg_cuda_plan_sinks(cg_planner *p);
cg_status cg_cuda_plan_klt(cg_planner *p);
cg_status cg_cuda_plan_paper(cg_planner *p);

/* Bytes that sections of exact elements take in a plan, at most. */
size_t cg_cuda_plan_exact_bound(size_t n_sections, size_t n_columns);
/* Thread blocks that n_tiles tiles of channels take. */
static inline uint32_t cg_klt_thread_blocks(uint32_t n_tiles)
{
    return (n_tiles + CG_CUDA_KLT_COLUMNS - 1) / CG_CUDA_KLT_COLUMNS;
}
/* And of so many tiles of rows. */
static inline size_t cg_klt_row_pairs(uint32_t n_tile_rows)
{
    return (n_tile_rows + CG_CUDA_KLT_ROWS - (size_t)1) / CG_CUDA_KLT_ROWS;
}
#endif
