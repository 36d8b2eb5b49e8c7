/* connector/extents.h - what is read of which chunk, in which order, and where to stop: the planner
 * of loads.
 *
 * As a rule a chunk's lossy levels are one nested file: its first bytes are the coarsest level, and
 * what follows refines it. So a load reads coarse first and refines while there is time. A wrong
 * estimate of the link then costs quality and not the deadline, and no byte is read twice.
 *
 * The floor of a chunk is the level that must arrive. Floors go first, in the order given. Behind
 * them the plan leaves time for the floors of loads that are likely to come; files that are chosen
 * whole (below) leave none. Then come the refinements, by benefit (KL divergence saved) per unit of
 * time (of reading and decoding). A step is planned only if everything planned still ends in time.
 * If a load's floors cannot all be in time, it is not refined. Others may be refined even if that
 * makes it later still. When a step does not fit, the best one that fits is taken and planning
 * ends. More time can make a plan worse, though seldom: a step that fits only now may take the room
 * of several others. It cannot for a single load whose decoding takes no time and whose files are
 * all nested.
 *
 * The prediction: chunks are read in order at the link's speed. Each is decoded, on all threads,
 * when its last byte is there. Where there is slack (has_slack below), chunks are read to their
 * ends one after the other, so that decoding starts early. Levels in files of their own (L0; chunks
 * that don't nest) cannot be cut short. So they are chosen before anything is read of a chunk, by
 * what a slow link can do.
 *
 * The method is the greedy one for the knapsack with increments; for nested increments of falling
 * benefit it is optimal up to the last step. tests/connector/extents_test.cc compares it with an
 * exact solution.
 * Threads: pure functions.
 */
#ifndef CG_CONNECTOR_EXTENTS_H
#define CG_CONNECTOR_EXTENTS_H
#include "codec/geometry.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Of more chunks than that only the first are refined, and the others in later plans, when those
 * are decoded. With it a plan takes a few passes over all chunks, and for each step of these first
 * ones work that grows with the logarithm of their number. Reading waits while a plan is made. */
enum { CG_EXTENTS_MOST_REFINED = 2048 };

typedef struct cg_extents_chunk {
    uint64_t bytes[CG_N_LEVELS];   /* 0: not to be had. Nested levels: from the start of the file */
    double kl[CG_N_LEVELS];        /* what the chunk costs at the level */
    double decode_ns[CG_N_LEVELS]; /* wall time, on all threads */
    double left_ns;                /* until its load's deadline */
    uint32_t load;        /* any number, the same for chunks of one load: they lie together */
    uint64_t asked_bytes; /* of the file: read, or under way */
    uint8_t floor;        /* what must arrive; bytes[floor] > 0 */
    uint8_t asked;        /* the finest level that asked_bytes hold; CG_N_LEVELS: none */
    bool is_nested;       /* L1 to L3, as far as they are there, are one file */
    bool is_closed;       /* it stays at `asked`: no refinement */
} cg_extents_chunk;

typedef struct cg_extents_input {
    const cg_extents_chunk *chunks; /* of all loads, what must arrive first; of one load in order */
    size_t n_chunks;
    double link_bps, low_bps; /* the link's speed, and what it will very likely reach; above 0 */
    bool is_untried;          /* the link may have become any other: no slack */
    double queued_bytes;      /* under way */
    double expected_bytes;    /* what must arrive of loads that are likely to come, and */
    double expected_decode_ns;
    double window_bytes; /* may be under way at most, but for a few small reads */
    double decoding_ns;  /* of what is being decoded, wall time */
} cg_extents_input;

/* Read the chunk's file of this level up to bytes[level] from where it was read to before. */
typedef struct cg_extent {
    uint32_t chunk;
    uint8_t level;
} cg_extent;

typedef struct cg_extents_step {
    double rate; /* KL per ns */
    uint32_t chunk;
    uint16_t before; /* 1 + the index of the chunk's refinement before it, or 0 */
    uint8_t from, to;
} cg_extents_step;

/* A run of reads and decodings; the decoder follows the reader. Let the reader be free at x and the
 * decoder at y. Then reading ends at x + read_ns, and decoding at the later one of y + decode_ns
 * and x + behind_ns. It is in time if x <= read_by_ns and y <= decoded_by_ns. */
typedef struct cg_extents_row {
    double read_ns, decode_ns, behind_ns, read_by_ns, decoded_by_ns;
} cg_extents_row;

typedef struct cg_extents_plan {
    uint8_t *levels;    /* [n_chunks]: that each chunk will have */
    cg_extent *extents; /* [n_chunks * CG_N_LEVELS], in the order of reading */
    size_t n_extents;
    bool in_time;   /* all that must arrive is predicted to */
    bool has_slack; /* at half the speed all is in time, and at a tenth what must arrive, also
                       behind what is expected; and the link is not untried */
    double kl;      /* of all chunks at these levels */
    /* For cg_extents_plan_make(): */
    cg_extents_step *steps; /* [n_chunks * CG_N_LEVELS] */
    uint32_t *last;         /* [n_chunks]: 1 + the index of the last refinement, or 0 */
    bool *late;             /* [n_chunks]: of a load whose floors cannot be in time */
    /* Binary trees, the root at 1, over the link as estimated and over a slow one: the leaves are
     * in the order of reading, and what is above two of them is both. */
    cg_extents_row *rows[2]; /* [2 * n_leaves] */
    cg_extents_row rest[2];  /* the leaf behind theirs: of all other chunks */
    int n_trees;             /* 1: nothing is looked at over a slow link */
    size_t n_own, n_leaves;  /* n_own: chunks with leaves of their own */
    size_t n_joins;          /* of rows, for steps: what this plan took */
    size_t capacity;         /* n_chunks that there is room for */
} cg_extents_plan;

/* Room for plans of n_chunks; plan is zeros, or had room before. False: no memory, and plan is as
 * it was. */
bool cg_extents_plan_reserve(cg_extents_plan *plan, size_t n_chunks);
void cg_extents_plan_destroy(cg_extents_plan *plan);

/* Fills plan, which has room for input->n_chunks. */
void cg_extents_plan_make(cg_extents_plan *plan, const cg_extents_input *input);

#ifdef __cplusplus
}
#endif
#endif
