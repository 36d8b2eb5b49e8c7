/* codec/importance.h - which blocks of tokens deserve finer steps: those that queries look at.
 *
 * What an error in K or V costs grows with the square of the attention that its token gets. An
 * encoder does not know the queries that will come. It has a guess: the mean query of each head,
 * from the profile. Attention to the chunk's tokens is computed as if that query stood 32, 128, 512
 * and 2,048 positions behind each. For V a token counts by the square of its attention. For K it
 * also counts by how far its V lies from the mean V, since that is what an error of the attention
 * moves. A block's step follows from what its tokens count, the mean over all heads and layers: the
 * more, the finer. Formula: codec/FORMAT.md, "Which steps an encoder takes".
 *
 * For profiles with queries (n_query_heads above 0). Work is cut by layers.
 * Threads: pure functions on the caller's memory, a shared profile and shared heads.
 */
#ifndef CG_CODEC_IMPORTANCE_H
#define CG_CODEC_IMPORTANCE_H
#include "codec/heads.h"

#ifdef __cplusplus
extern "C" {
#endif

/* 4 bytes for each token and element of a head, and about 132 more for each token. */
size_t cg_importance_scratch_bytes(const cg_profile *profile, uint32_t n_tokens);

/* How much the blocks count to one layer, to counts_out[n_blocks]: the mean of a block's coded
 * tokens (neither sinks nor past the end), in units of the mean of all coded tokens. 0 where a
 * block has none. k, v: [n_tokens][n_kv_heads][head_dim] of the heads' dtype, K as the engine holds
 * it (rotated). scratch: 64-byte aligned, of cg_importance_scratch_bytes().
 * CG_ERR_INVALID_ARGUMENT: an element of a coded token is not finite. */
cg_status cg_importance_of_layer(const cg_heads *heads, uint32_t layer, const void *k,
                                 const void *v, void *scratch, float *counts_out);

/* The blocks' step factors, factor_index_out[n_blocks], from what they count to each layer,
 * counts[n_layers][n_blocks], which is garbage afterwards. */
void cg_importance_step_factors(const cg_heads *heads, float *counts, uint8_t *factor_index_out);

#ifdef __cplusplus
}
#endif
#endif
