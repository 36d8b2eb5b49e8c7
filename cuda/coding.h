/* cuda/coding.h - symbols on a GPU to the bytes of sections: rANS streams of a task's levels.
 *
 * Three kernels run one after another, each for all levels at once. The first estimates what strips
 * take, and the second finds from it how many streams a level has, and codes these, a warp each.
 * The third lays table and streams one behind the other, in memory of the host, since how long they
 * are is known nowhere before. A level's bytes are those of cg_symbols_code() for the same symbols,
 * bit for bit (codec/symbols.h, codec/rans.h).
 *
 * Surprises: (1) Symbols are those of the finest level alone. A lane makes the coarser ones, which
 * are a third, where it codes them. (2) There is room for 16 bits a symbol, and for 8 in what goes
 * to the host: symbols take 1 to 5. What does not fit is not coded, and its length is 0.
 *
 * Threads: functions are pure on the caller's memory.
 */
#ifndef CG_CUDA_CODING_H
#define CG_CUDA_CODING_H
#include "codec/projection.h"
#include "cuda/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CG_CUDA_CODING_WARPS = 8, /* of a thread block: a strip each, then a stream each */
    CG_CUDA_CODING_THREADS = CG_CUDA_CODING_WARPS * CG_RANS_LANES,
    CG_CUDA_ROW_WORDS = CG_RANS_LANES * CG_RANS_CELL_BYTES / 2, /* of a row, at most */
};

typedef struct cg_cuda_coded_level {
    /* In the blob: cg_cuda_strip [n_strips], and the classes that they count from. */
    uint64_t strips_at, classes_at;
    uint32_t n_strips;
    uint32_t n_thirds;    /* how often the finest level's cells are made a third */
    uint32_t first_block; /* of each kernel's thread blocks: from here on they are this level's */
    /* Where kernels work. There are at most as many streams as strips. */
    uint32_t *n_streams_dev;
    uint64_t *costs_dev;  /* [n_strips]: 1/256 bits */
    uint32_t *sizes_dev;  /* [n_strips]: bytes of each stream; 0: it does not fit */
    uint32_t *states_dev; /* [n_strips][CG_RANS_LANES]: of each stream */
    uint16_t *words_dev;  /* [n_strips][strip_words]; a stream has those of its strips */
    /* Host memory that kernels can reach. */
    uint32_t *n_bytes; /* one number, which the last kernel writes: 0 where it does not fit */
    uint8_t *out;      /* [out_bytes], 16-byte aligned */
    uint64_t out_bytes;
} cg_cuda_coded_level;

typedef struct cg_cuda_coding {
    const uint8_t *blob_dev;
    const int16_t *cells_dev; /* of the finest level: each frequency's [n_rows][n_active[f]] */
    /* In the blob: cg_cuda_class [n_classes], behind them that of lanes without a column; the
     * classes that they have in rows of each factor; and cg_cuda_class_cost [n_classes]. */
    uint64_t classes_at, class_of_at, costs_at;
    uint32_t n_classes, n_rows, n_active[CG_DCT];
    uint32_t first_column; /* that strips count their columns from */
    uint32_t strip_words, stream_percent;
    uint32_t n_runs, n_levels, n_ctas; /* n_ctas: thread blocks of each kernel */
    cg_cuda_row_run runs[CG_N_STEP_FACTORS];
    cg_cuda_coded_level levels[CG_N_LEVELS - 1]; /* [n_levels], the finest first */
} cg_cuda_coding;

/* Memory of a task. */
typedef struct cg_cuda_coding_memory {
    const void *blob_dev; /* of cg_cuda_profile_fill() */
    const int16_t *cells_dev;
    void *scratch_dev; /* 16-byte aligned, as out is */
    size_t scratch_bytes;
    void *out; /* of the host; kernels can reach it */
    size_t out_bytes;
} cg_cuda_coding_memory;

/* What the largest task of a chunk of so many tokens takes. Preset klt. */
void cg_cuda_coding_bound(const cg_cuda_profile *profile, uint32_t n_tokens,
                          size_t *scratch_bytes_out, size_t *out_bytes_out);
/* Fills *out for the levels that the projection wants coded. Kernels believe it, so the projection
 * is checked. CG_ERR_INVALID_ARGUMENT: the profile is not of preset klt, or has no such basis; the
 * levels are none, or several that do not nest; the finest has other columns than the projection
 * has symbols; the order has other rows; or it takes more memory than that. */
cg_status cg_cuda_coding_of(const cg_cuda_profile *profile, const cg_projection *projection,
                            const cg_cuda_coding_memory *memory, cg_cuda_coding *out);
/* When the kernels are done: each level's bytes, in the coding's host memory; none of levels that
 * are not coded. */
void cg_cuda_coding_result(const cg_cuda_coding *coding, const cg_projection *projection,
                           cg_coded coded_out[CG_N_LEVELS]);

/* The kernels, in the order in which they run; and what a thread block has of shared memory. */
enum { CG_CUDA_CODING_ESTIMATE, CG_CUDA_CODING_CODE, CG_CUDA_CODING_PACK, CG_CUDA_N_CODING_STEPS };
size_t cg_cuda_coding_shared_bytes(const cg_cuda_coding *coding, uint32_t step);
/* The most of a step, for a profile of so many classes. */
size_t cg_cuda_coding_classes_bytes(uint32_t n_classes);

/* Loads the kernels into the thread's current device, and allows them their shared memory. Returns
 * a cudaError_t, 0 is success. */
int cg_cuda_code_prepare(void);
/* Enqueues the kernels on the stream, behind what makes the cells; neither allocates nor waits.
 * Returns a cudaError_t, 0 is success. */
int cg_cuda_code(const cg_cuda_coding *coding, struct CUstream_st *stream);

#ifdef __cplusplus
}
#endif
#endif
