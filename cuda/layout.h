/* cuda/layout.h - what host and kernels agree upon: the blob of a profile and the plan of a chunk.
 *
 * Offsets (..._at) are bytes from the start of blob, plan, chunk or scratch; each says which. The
 * host writes blob and plan from what it has checked, and kernels believe them.
 *
 * Words: a pass is one kernel. A band is 32 components (codec/bands.h), here also 32 columns of
 * symbols. A digit is 8 bits of a larger integer, signed. A tile of symbols is 16 rows, each a
 * block of 8 tokens, by a band; it is what a tensor instruction takes. A step is one such
 * instruction's share of a sum: one band of the basis, and one digit of its elements.
 *
 * Threads: plain data.
 */
#ifndef CG_CUDA_LAYOUT_H
#define CG_CUDA_LAYOUT_H
#include "codec/basis.h"
#include "codec/rans.h"
#include "cuda/decode.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    /* A search for a slot's index begins at its bucket. Rare indices stand last and have few slots,
     * so buckets become narrower towards the last slot. A bucket's number is taken from the float
     * 2^14 - slot: its exponent and the first 3 bits of its mantissa, less those of 1. */
    CG_CUDA_BUCKET_BITS = 3,
    CG_CUDA_BUCKETS = (CG_RANS_TOTAL_BITS << CG_CUDA_BUCKET_BITS) + 1,
    CG_CUDA_STREAM_WARPS = 8, /* of a thread block that decodes streams, one each */
    CG_CUDA_STREAM_THREADS = CG_CUDA_STREAM_WARPS * CG_RANS_LANES,
    CG_CUDA_CLASS_FACTORS = 8, /* CG_N_STEP_FACTORS, in a word that a lane loads at once */

    /* A thread block of the inverse KLT has CG_CUDA_KLT_COLUMNS tiles of channels and
     * CG_CUDA_KLT_ROWS tiles of CG_CUDA_TILE_BLOCKS blocks of 8 tokens, which share what is fetched
     * of the basis. A warp sums half of the frequencies of two tiles of channels. */
    CG_CUDA_BAND = 32,        /* components that one tensor instruction takes */
    CG_CUDA_TILE_BLOCKS = 16, /* rows of a tensor instruction */
    CG_CUDA_TILE_PAIRS = 8, /* pairs of channels that are rotated together: two tiles of columns */
    CG_CUDA_KLT_COLUMNS = 8,
    CG_CUDA_KLT_ROWS = 2, /* or 1: then a multiprocessor has room for two thread blocks */
    CG_CUDA_KLT_THREADS = CG_CUDA_KLT_ROWS * CG_CUDA_KLT_COLUMNS * CG_RANS_LANES,
    CG_CUDA_STAGE_STEPS = 2,   /* steps that are fetched together */
    CG_CUDA_STAGES = 3,        /* that are there together: one is multiplied, two are fetched */
    CG_CUDA_WINDOW_STEPS = 32, /* that are looked at together: a whole number of stages */
    CG_CUDA_TILE_BYTES = CG_CUDA_TILE_BLOCKS * CG_CUDA_BAND, /* digits of 16 rows and a band */
    CG_CUDA_JOINT_CHANNELS = 2 * CG_CUDA_TILE_PAIRS,         /* of a tile of the joint matrix */
    CG_CUDA_GIVEN_COLUMNS = 2, /* of symbols that a shared component has: bands side by side */

    /* At least cg_cuda_klt_shared's (cuda/klt.cuh). */
    CG_CUDA_KLT_SHARED_BYTES = 26 * (1 + CG_CUDA_KLT_ROWS) << 10,

    CG_CUDA_START_THREADS = 256,
};

/* Kinds of passes, in the order in which a plan has them: so jobs of a batch that are at different
 * levels come to the same kind together. */
enum {
    CG_CUDA_START,     /* zeros, and cosines and sines of the tokens' positions */
    CG_CUDA_SYMBOLS,   /* streams of a level to symbols; or of a level given the next coarser one */
    CG_CUDA_JOINT,     /* joint symbols to the layer groups' */
    CG_CUDA_KLT,       /* symbols to elements */
    CG_CUDA_ANCHORS,   /* streams of anchors to symbols and elements */
    CG_CUDA_DELTAS,    /* streams of deltas to elements */
    CG_CUDA_EXPONENTS, /* streams of a lossless payload to elements */
    CG_CUDA_N_KINDS
};

/* ---- classes and strips ---- */

/* An entry: an index of a class in one word, cum << 18 | (1 << 18) - (1 << 14) + freq - 1. So
 * entries rise with their index, and their low 18 bits are freq - 1 - 2^14 in two's complement. */
enum {
    CG_CUDA_CUM_SHIFT = 32 - CG_RANS_TOTAL_BITS,
    CG_CUDA_CUM_ONE = 1 << CG_CUDA_CUM_SHIFT,
};
#define CG_CUDA_NO_ENTRY UINT32_MAX /* above those of all slots */

/* A cg_rans_class as kernels hold it in shared memory; copied in words of 16 bytes. Entry n_symbols
 * is CG_CUDA_NO_ENTRY. The next one, n_symbols + 1, stands for all buckets of more than two
 * indices: there the search begins at the first index. */
typedef struct cg_cuda_class {
    uint8_t shift, n_symbols, escape_bits, top;
    uint32_t refine[CG_RANS_REFINE_CONTEXTS];
    uint8_t first[(CG_CUDA_BUCKETS + 3) / 4 * 4]; /* of a bucket's indices */
    uint32_t entry[CG_RANS_MAX_SYMBOLS + 3];
} cg_cuda_class;

/* What a class's cells take, 1/256 bits, for estimates: cg_rans_class's. */
typedef struct cg_cuda_class_cost {
    uint16_t index[CG_RANS_MAX_SYMBOLS];
    uint16_t refine[CG_RANS_REFINE_CONTEXTS][3];
} cg_cuda_class_cost;

typedef struct cg_cuda_strip {
    uint32_t column;   /* in its frequency */
    uint32_t class_at; /* of its first lane: from the matrix's classes_at */
    uint8_t frequency, n_lanes, is_refined;
    uint8_t n_zeros; /* lanes behind n_lanes whose columns pad a row, and get zeros */
} cg_cuda_strip;

/* Rows of neighbours that are coded with the same classes: up to `end`, from the end of the run
 * before. */
typedef struct cg_cuda_row_run {
    uint32_t end, factor_shift; /* 8 times which of CG_STEP_FACTORS: shifts a word at class_of_at */
} cg_cuda_row_run;

/* A matrix of streams, whatever becomes of its cells. */
typedef struct cg_cuda_streams {
    uint64_t strips_at;  /* [n_strips], in the blob, or of exact elements in the plan */
    uint64_t classes_at; /* a byte a column: in the blob, or of exact elements in the chunk */
    /* Of preset klt: cg_cuda_row_run [n_runs] in the plan, and in the blob the classes that a class
     * has in rows of each factor, u8 [n_classes][CG_CUDA_CLASS_FACTORS]. */
    uint64_t runs_at, class_of_at;
    uint32_t n_strips, n_rows, n_streams;
    uint32_t n_classes; /* 1: no bytes */
    uint32_t n_runs, reserved;
} cg_cuda_streams;

/* One stream; a thread block has CG_CUDA_STREAM_WARPS of them. */
typedef struct cg_cuda_stream_job {
    uint64_t matrix_at; /* in the plan; 0: nothing to do */
    uint64_t stream_at; /* in the chunk */
    uint32_t stream_bytes, stream;
    /* Of exact elements, which have classes of their own: cg_cuda_class in the plan, the same for
     * all jobs of a thread block. */
    uint64_t tables_at;
    uint32_t tables_bytes, reserved;
} cg_cuda_stream_job;

/* Where elements go: channels of one matrix of streams, in the order [layer][head][dim]. */
typedef struct cg_cuda_target {
    uint32_t first_layer, plane, n_kv_heads, head_dim;
    uint32_t head_from, head_to, token_from, token_to;
    uint32_t dtype;
} cg_cuda_target;

/* ---- preset klt ---- */

/* A step of the sums: the basis elements of one band, of one of their digits. Steps stand in the
 * order of falling shifts, so that sums can be shifted as they grow. number: in the basis, where
 * bands follow one another. */
typedef struct cg_cuda_step {
    uint16_t band; /* of columns of symbols */
    uint8_t shift;
    uint8_t is_rest; /* multiplies the second digits of given numbers, which often are all 0 */
    uint32_t number;
} cg_cuda_step;

/* A matrix of symbols, and the basis that multiplies it. Symbols lie in scratch twice: as cells (16
 * bits), and as the cells' low digits (8 bits, signed). Both lie in tiles of 16 rows and a band of
 * 32 columns. Tiles stand one frequency after another, in it band by band, in that from the first
 * rows to the last. The last tile is whole, too. A tile is laid out as a warp's lanes take it for
 * tensor instructions, 16 digits each: see cg_cuda_cell(). */
typedef struct cg_cuda_product {
    cg_cuda_streams streams;
    uint64_t cells_at, digits_at;
    uint64_t large_at; /* a byte for each tile: not 0 where some cell is more than its digit */
    uint64_t rest_at;  /* the same: not 0 where some second digit of given numbers is not 0 */
    uint32_t tile_at[CG_DCT]; /* number of a frequency's first tile */
    uint32_t n_bands[CG_DCT];
    uint32_t n_rows;               /* blocks of 8 tokens */
    uint32_t n_tile_rows, n_tiles; /* tiles one below the other; tiles of all frequencies */
    uint32_t is_finest;            /* the pass writes digits, too */
    /* In the blob: elements as the tensor instruction's B fragments, [tile][step][lane][16 bytes];
     * a tile is CG_CUDA_TILE_PAIRS pairs of channels of one head: low ones and high ones. */
    uint64_t basis_at, steps_at;
    uint32_t n_steps;     /* of the level */
    uint32_t n_all_steps; /* of all levels, as the basis has them */
} cg_cuda_product;

/* A row of the matrices of symbols. */
typedef struct cg_cuda_row {
    uint32_t block; /* of 8 tokens */
    float factor;   /* of its step */
} cg_cuda_row;

/* A group's matrix, and how its sums become elements. */
typedef struct cg_cuda_klt {
    cg_cuda_product product;
    uint64_t rows_at; /* in the plan: cg_cuda_row [n_rows] */
    /* In the blob. */
    uint64_t mean_at, scale_at; /* f32 [tile][2][CG_CUDA_TILE_PAIRS]; scale: step / weight */
    uint64_t layer_rope_at;     /* u8 [layers of the model] */
    uint64_t rotation_at;       /* in scratch: f32 [n_ropes][n_tokens][half][cosine, sine] */
    uint32_t head_tiles;        /* tiles of a head */
    uint32_t half;              /* rotary_dim / 2 */
    uint32_t n_layers, n_tokens;
    float unit;            /* of sums, in the level's steps: a power of two */
    cg_cuda_target target; /* plane: of the first slice */
} cg_cuda_klt;

/* The joint matrix. What it gives becomes the first columns of the groups' symbols, in bands by
 * turns: one of low digits, and one of second digits, which are the rest over 256. */
typedef struct cg_cuda_joint {
    cg_cuda_product product;
    uint64_t groups_at;   /* in the plan: cg_cuda_klt of the wanted groups */
    uint32_t first_group; /* of the wanted ones */
    uint32_t n_shared;    /* components that a group shares, in whole bands */
    uint32_t n_given[CG_DCT];
    uint32_t n_bits; /* of each sum that are rounded off: FORMAT.md's k */
} cg_cuda_joint;

/* A thread block's work, in both passes that multiply. */
typedef struct cg_cuda_klt_job {
    uint64_t matrix_at;                   /* in the plan */
    uint32_t first_row[CG_CUDA_KLT_ROWS]; /* of CG_CUDA_TILE_BLOCKS; or CG_CUDA_NO_ROW */
    /* Tiles of channels from first_tile on, up to n_tiles of all: those of the wanted heads,
     * [slice][head][tile]; or of the joint matrix's channels. */
    uint32_t first_tile, n_tiles;
} cg_cuda_klt_job;
#define CG_CUDA_NO_ROW UINT32_MAX

/* What is there before streams are decoded. Of scratch, n_zeros words of 16 bytes from its start on
 * are cleared: tiles' marks. */
typedef struct cg_cuda_start {
    uint64_t inv_freq_at; /* in the blob: f64 [n_ropes][half] */
    uint64_t rotation_at; /* in scratch */
    uint32_t n_ropes, n_tokens, half, first_position;
    uint64_t n_zeros;
} cg_cuda_start;

/* ---- preset paper ---- */

typedef struct cg_cuda_paper {
    cg_cuda_streams streams;
    uint64_t anchors_at; /* in scratch: i16 [n_anchors][n_columns] */
    /* In the blob: f32 [n_columns]. */
    uint64_t mean_at, weight_at, anchor_step_at;
    uint32_t n_columns;
    float step;
    cg_cuda_target target;
} cg_cuda_paper;

/* ---- exact elements ---- */

typedef struct cg_cuda_exact {
    cg_cuda_streams streams;
    uint64_t low_at; /* in the chunk: [n_rows][n_columns][low_bytes] */
    uint32_t n_columns;
    cg_cuda_target target;
} cg_cuda_exact;

#ifdef __cplusplus
}
#endif
#endif
