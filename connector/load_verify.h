/* connector/load_verify.h - whether the bytes that were read are the chunk that was asked for.
 *
 * A store is shared and its files were written by others. So everything that a chunk says of itself
 * is compared with the model, the plan and the plan's token ids before a byte of it is decoded. A
 * hash alone would not do: xxh3 is not collision-proof.
 * Threads: a pure function; no lock.
 */
#ifndef CG_CONNECTOR_LOAD_VERIFY_H
#define CG_CONNECTOR_LOAD_VERIFY_H
#include "codec/codec.h"
#include "connector/model.h"
#include "connector/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* bytes[n_bytes]: what was read of the plan's chunk chunk_index at this level. They may go on to
 * finer levels. *chunk_out points into them, and ends where the level does.
 * *worst_level_out is the chunk's level, or that of the prefix that it was computed on if worse.
 * It is set once the bytes are known to be the chunk, so also with CG_ERR_LOSSY_PREFIX.
 * CG_ERR_FOREIGN_MODEL, CG_ERR_FOREIGN_PROFILE, CG_ERR_FOREIGN_TOKENS: of another model, profile or
 * prompt. CG_ERR_LOSSY_PREFIX: worse than the plan accepts. CG_ERR_CORRUPT, CG_ERR_TRUNCATED and
 * others: no chunk of that level. CG_ERR_NO_MEMORY. */
cg_status cg_load_verify(const cg_model *model, const cg_plan *plan, uint32_t chunk_index,
                         uint8_t level, const uint8_t *bytes, size_t n_bytes,
                         uint8_t *worst_level_out, cg_chunk *chunk_out);

/* A decoder of the chunk, which cg_load_verify() took, on the CPU. The chunk's bytes stay valid as
 * long as the decoder, which the caller frees. Errors of cg_decoder_new(). */
cg_status cg_load_decoder_new(const cg_model *model, const cg_chunk *chunk,
                              cg_decoder **decoder_out);

#ifdef __cplusplus
}
#endif
#endif
