/* codec/block_order.h - which block of tokens each row of a chunk's symbols is, and its step.
 *
 * From version 5 of a chunk on, each block of 8 tokens has a step of its own: the level's step
 * times one of seven factors. The rows of all matrices of symbols stand sorted by factor. So rows
 * of one factor are neighbours: a run, which has classes of its own (codec/rans.h). In older
 * chunks, row b is block b, all rows are one run, and the step is the level's. Bytes:
 * codec/FORMAT.md, "Steps of blocks". Threads: read-only once made.
 */
#ifndef CG_CODEC_BLOCK_ORDER_H
#define CG_CODEC_BLOCK_ORDER_H
#include "codec/profile.h"
#include "codec/rans.h"
#include "codec/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CG_OWN_STEP_FACTOR = 3 }; /* an index of CG_STEP_FACTORS: the level's own step */

/* By index, 2^((index - 3) / 2), rounded to f32. */
extern const float CG_STEP_FACTORS[CG_N_STEP_FACTORS];

typedef struct cg_block_order {
    uint32_t n_blocks, n_runs;
    cg_rans_run runs[CG_N_STEP_FACTORS]; /* [n_runs]: none of them is empty */
    uint16_t *block;                     /* [n_blocks]: of each row */
    uint8_t *factor_index;               /* [n_blocks]: of each row, an index of CG_STEP_FACTORS */
} cg_block_order;

/* Row b is block b, and all have the level's step and the columns' own classes. The caller destroys
 * *order in any case. n_blocks: at least 1, of CG_MAX_CHUNK_TOKENS tokens at most.
 * CG_ERR_NO_MEMORY. */
cg_status cg_block_order_init(uint32_t n_blocks, cg_block_order *order);
void cg_block_order_destroy(cg_block_order *order); /* zeros are fine */

/* Sorts the rows by factor_index[n_blocks], an index for each block, with the classes of a profile
 * of version 4, which must outlive the order. CG_ERR_CORRUPT: one is no index of a factor; then the
 * order stays as it is. */
cg_status cg_block_order_sort(const cg_profile *profile, const uint8_t *factor_index,
                              cg_block_order *order);

#ifdef __cplusplus
}
#endif
#endif
