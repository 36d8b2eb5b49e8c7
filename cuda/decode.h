/* cuda/decode.h - a chunk's bytes in device memory to KV in the engine's paged blocks.
 *
 * The host lays out a profile once, as a blob, and for each chunk what is to be done, as a plan.
 * Both are copied to the device as they are, and so are the chunk's bytes. Then cg_cuda_decode()
 * enqueues the kernels of a batch of chunks: a chunk alone is a batch of one. What they write is
 * what the CPU's codec decodes, bit for bit: from chunk version 3 on each step is fixed
 * (codec/FORMAT.md). Chunks of versions 1 and 2 are CG_ERR_UNSUPPORTED_VERSION here: the CPU
 * decodes them.
 *
 * The host reads and checks everything that says how long something is: headers, section and stream
 * tables, checksums, classes. All that kernels read unchecked are the words of streams, and those
 * may be anything.
 *
 * Threads: functions are pure on the caller's memory; a cg_cuda_profile is read-only once made.
 */
#ifndef CG_CUDA_DECODE_H
#define CG_CUDA_DECODE_H
#include "codec/codec.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st; /* cudaStream_t is a pointer to it */

enum {
    CG_CUDA_ALIGN = 16,     /* least alignment of blob, plan, chunk and scratch in device memory */
    CG_CUDA_MAX_PASSES = 8, /* most kernels that a chunk takes */
    CG_CUDA_MAX_JOBS = 32,  /* most chunks that are decoded together */
    /* Most shared memory of a thread block that kernels take. Some GPUs have less (99 KiB: sm_86,
     * sm_89, sm_120): cg_cuda_shared_limit(). */
    CG_CUDA_SHARED_BYTES = 104 << 10,
};

/* ---- a profile, once ---- */

/* A profile's blob: what kernels need of the profile, and where it lies. */
typedef struct cg_cuda_profile cg_cuda_profile;

/* Plans the blob. profile must outlive *laid_out, which the caller frees.
 * CG_ERR_UNSUPPORTED_VERSION: a profile of version 1. CG_ERR_UNSUPPORTED: of a preset that there
 * are no kernels for. With either the CPU decodes. CG_ERR_NO_MEMORY. */
cg_status cg_cuda_profile_new(const cg_profile *profile, cg_cuda_profile **laid_out);
void cg_cuda_profile_free(cg_cuda_profile *laid_out); /* NULL is fine */
size_t cg_cuda_profile_bytes(const cg_cuda_profile *laid_out);
/* Most shared memory of a thread block that kernels take for chunks of the profile, and for coding
 * them: at most CG_CUDA_SHARED_BYTES. A GPU that has less cannot run them. */
size_t cg_cuda_profile_shared_bytes(const cg_cuda_profile *laid_out);
/* Writes the blob, of cg_cuda_profile_bytes(): to be copied to the device, where it stays for all
 * chunks. CG_ERR_NO_MEMORY. */
cg_status cg_cuda_profile_fill(const cg_cuda_profile *laid_out, void *blob);

/* ---- a chunk's plan ---- */

/* What is wanted of a chunk. A group is a layer group of its profile; at L0 a layer. */
typedef struct cg_cuda_request {
    uint32_t first_group, n_groups;
    uint32_t token_from, token_to; /* of the chunk's tokens */
    uint32_t head_from, head_to;   /* KV heads: of this rank */
    /* The position at which the chunk's first token is placed. Preset klt turns K to it, so there
     * it may be any, also one that is no multiple of 8. It is the chunk's own with preset paper, at
     * L0, and where the chunk has exact first tokens. */
    uint32_t first_position;
} cg_cuda_request;

/* Everything of a chunk. */
cg_cuda_request cg_cuda_request_all(const cg_cuda_profile *profile, const cg_chunk_header *header);

/* One kernel. */
typedef struct cg_cuda_pass {
    uint32_t kind;         /* cuda/layout.h */
    uint32_t n_blocks;     /* thread blocks */
    uint32_t shared_bytes; /* of a thread block */
    uint32_t tables_bytes; /* of a pass that decodes streams: its classes */
    uint64_t jobs_at;      /* in the plan: what each thread block does */
    uint64_t tables_at;    /* in the blob */
} cg_cuda_pass;

/* What launching a plan takes. The plan itself is in the caller's memory. */
typedef struct cg_cuda_plan {
    size_t plan_bytes;      /* of the plan, to be copied to the device */
    size_t scratch_bytes;   /* device memory that kernels work in */
    uint32_t element_bytes; /* strides of the blocks are multiples of it */
    uint32_t n_passes;
    cg_cuda_pass passes[CG_CUDA_MAX_PASSES]; /* of kinds that rise */
} cg_cuda_plan;

/* What to reserve: the most bytes that plan and scratch of a chunk of n_tokens take, at any level.
 * profile NULL: only L0. */
void cg_cuda_plan_bound(const cg_cuda_profile *profile, const cg_geometry *geometry,
                        uint32_t n_tokens, size_t *plan_bytes_out, size_t *scratch_bytes_out);

/* Plans the decoding of chunk[n_bytes] in host memory at its finest level. A nested chunk that is
 * cut where a coarser level ends is one of that level. Checks the chunk as cg_decoder_new() and
 * cg_decoder_run() do, also the checksums of the wanted sections. Writes at most plan_bytes to
 * plan, which is 16-byte aligned. profile: NULL for L0. Allocates the section table and
 * the order of blocks, as cg_decoder_new() does, and nothing else. Errors of cg_decoder_new().
 * CG_ERR_UNSUPPORTED_VERSION: decode on the CPU. CG_ERR_UNSUPPORTED: this chunk cannot be placed at
 * that position. CG_ERR_BUFFER_TOO_SMALL. CG_ERR_INVALID_ARGUMENT: the request does not fit the
 * chunk. */
cg_status cg_cuda_plan_fill(const cg_cuda_profile *profile, const uint8_t *chunk, size_t n_bytes,
                            const cg_cuda_request *request, void *plan, size_t plan_bytes,
                            cg_cuda_plan *plan_out);

/* ---- decoding ---- */

/* The engine's blocks. Element (layer, plane, block, head, token in block, dim) lies at base[layer]
 * + offset_bytes[plane] + block * block_stride + head * head_stride[plane] + token *
 * token_stride[plane] + dim * dim_stride[plane], in bytes. Elements are of the chunk's dtype, and
 * aligned to it: bases, too. */
typedef struct cg_cuda_blocks {
    void *const *base_dev;   /* [layers of the model] device addresses, in device memory */
    int64_t offset_bytes[2]; /* by plane */
    int64_t block_stride;
    int64_t head_stride[2], token_stride[2], dim_stride[2];
    const int64_t *table_dev; /* [n_table] block ids */
    uint32_t n_table;
    uint32_t first_token;  /* where the chunk's first token is, counted in tokens from the start of
                              the table */
    uint32_t block_tokens; /* tokens of a block */
    uint32_t head_from;    /* the chunk's head that is head 0 of the blocks: of this rank */
    uint32_t n_heads;      /* that blocks have */
    uint64_t n_blocks;     /* ids are below it. Tokens of other ids are skipped, and the status
                              becomes CG_ERR_INVALID_ARGUMENT */
} cg_cuda_blocks;

typedef struct cg_cuda_decode_params {
    const void *blob_dev; /* NULL at L0 */
    const void *plan_dev;
    const void *chunk_dev; /* the bytes that were planned */
    void *scratch_dev; /* [scratch_bytes]; nobody else may use it until the stream is past this call
                        */
    /* One number, which the caller sets to 0 before. Where something is wrong, kernels raise it to
     * a cg_status. Then the blocks hold garbage where the chunk's tokens belong. */
    uint32_t *status_dev;
    cg_cuda_blocks blocks;
} cg_cuda_decode_params;

/* Most shared memory that a thread block may take on the thread's current device, or
 * CG_CUDA_SHARED_BYTES where that is less. Returns a cudaError_t, 0 is success. */
int cg_cuda_shared_limit(size_t *n_bytes_out);

/* To be called once for each process and device, before the first decoding: allows the kernels
 * their shared memory. Returns a cudaError_t, 0 is success. */
int cg_cuda_decode_prepare(void);

/* A chunk of a batch. Nothing is shared with the others but the launches: chunks may be of other
 * profiles, geometries and levels, and what is wrong with one is told by its own status. */
typedef struct cg_cuda_decode_job {
    const cg_cuda_plan *plan;
    cg_cuda_decode_params params;
} cg_cuda_decode_job;

/* Enqueues the kernels of the jobs' plans on the stream: one launch for the passes of a kind that
 * jobs are at, so as many as the job with the most of each kind has. n_jobs: at most
 * CG_CUDA_MAX_JOBS. Neither allocates nor waits, nor needs jobs or plans afterwards. Returns a
 * cudaError_t, 0 is success. */
int cg_cuda_decode(const cg_cuda_decode_job *jobs, uint32_t n_jobs, struct CUstream_st *stream);

#ifdef __cplusplus
}
#endif
#endif
