/* codec/codec.h - K and V of a chunk to bytes and back.
 *
 * Work is cut into tasks, in the order of the layers: one for each layer group and plane, K before
 * V. Where the profile joins K and V, a task has both. At L0 a group is one layer. The caller runs
 * the tasks on its own threads, in any order, each at most once. Only the functions under
 * "convenience" start threads. Tasks are independent, unless the profile has a joint matrix. Then
 * the first task that is decoded makes what all of them need, while the others wait for it. In
 * encoding, the last task codes the joint matrix.
 *
 * Scratch memory comes from the caller: one piece for each thread, 64-byte aligned, of
 * cg_..._scratch_bytes() bytes. A decoding task allocates nothing else. An encoding task also
 * allocates the bytes that it codes, whose size nobody knows before.
 *
 * Canonical layout of a task's elements: [n_planes][n_layers][n_tokens][n_kv_heads][head_dim] of
 * the task's shape, of the chunk's dtype, K as the engine holds it (rotated). Bytes and arithmetic:
 * codec/FORMAT.md. How a lossy level is made: codec/preset.h.
 * Threads: tasks of one decoder or encoder may run at once, each once. The rest of an object is
 * used by one thread at a time; profiles are read-only once made.
 */
#ifndef CG_CODEC_CODEC_H
#define CG_CODEC_CODEC_H
#include "codec/chunk.h"
#include "codec/profile.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_task_shape {
    uint32_t first_layer, n_layers;
    uint32_t plane;        /* CG_K or CG_V; of a task with both it is CG_K, which comes first */
    uint32_t n_planes;     /* 1 or 2 */
    size_t elements_bytes; /* of the canonical layout */
} cg_task_shape;

/* ---- decoding ---- */

typedef struct cg_decoder cg_decoder;

/* Prepares bytes[n_bytes], a whole chunk file, for decoding. bytes and profile must outlive the
 * decoder, which the caller frees. profile: NULL for L0. A nested file is decoded at its finest
 * level; to decode it at a coarser one, let n_bytes be that level's header.level_bytes.
 *
 * Checked here: the header and the section table. The chunk must name this profile and its model,
 * and have its geometry and cache scales. The steps of blocks must be whole. Exact elements must
 * have at least a third of their own size in bytes, which is the least that they can take. The
 * other sections' checksums are left to cg_decoder_run().
 *
 * What it costs: a lossless chunk takes memory in proportion to its file, a lossy one in proportion
 * to its geometry, however small the file is. The decoder holds at most 4 bytes an element and 1
 * MiB: tables of the rotation, no more of them than layers, and with a joint matrix two bytes for
 * each shared component of a token. The scratch memory of a thread is at most 24 bytes an element,
 * as if the tokens were a multiple of 256, and 1 MiB: symbols of up to three levels take 2 bytes
 * each, and the lists or tiles of 32 blocks the rest. Time goes by the geometry, too, whatever the
 * bytes are: a symbol takes at most four words of its stream. From profile version 2 on it has at
 * most three digits, so that the largest symbols take three times the products of small ones, with
 * version 1 at most six times.
 *
 * CG_ERR_FOREIGN_PROFILE, CG_ERR_FOREIGN_MODEL, errors of cg_chunk_open(), CG_ERR_NO_MEMORY.
 */
cg_status cg_decoder_new(const cg_profile *profile, const uint8_t *bytes, size_t n_bytes,
                         cg_decoder **decoder_out);
void cg_decoder_free(cg_decoder *decoder); /* NULL is fine */
/* The chunk that is decoded. Lives as long as the decoder. */
const cg_chunk *cg_decoder_chunk(const cg_decoder *decoder);
uint32_t cg_decoder_n_tasks(const cg_decoder *decoder);
/* task_index: below cg_decoder_n_tasks(). */
cg_task_shape cg_decoder_task_shape(const cg_decoder *decoder, uint32_t task_index);
/* The most that any task takes. */
size_t cg_decoder_scratch_bytes(const cg_decoder *decoder);
/* Decodes what all tasks of a chunk share: the joint matrix, if there is one. Need not be called:
 * otherwise the first task does it, and those that run at the same time wait for that one. Errors
 * of cg_decoder_run(), which are then every task's, too. Any thread. */
cg_status cg_decoder_prepare(const cg_decoder *decoder, void *scratch, size_t scratch_bytes);
/* Checks the checksums of a task's sections, then decodes it into out: elements_bytes of the task's
 * shape, canonical layout. Never reads outside the chunk, whatever its bytes are. CG_ERR_CORRUPT,
 * CG_ERR_TRUNCATED: out is garbage then. What is wrong with the joint matrix's sections is every
 * task's error. CG_ERR_INVALID_ARGUMENT: there is no such task, or scratch is too small or not
 * aligned. Any thread. */
cg_status cg_decoder_run(const cg_decoder *decoder, uint32_t task_index, void *scratch,
                         size_t scratch_bytes, void *out);

/* ---- encoding ---- */

typedef struct cg_encoder cg_encoder;

/* Beside levels in a mask. */
enum { CG_SHORT_STREAMS = 1 << 6, CG_NESTED = 1 << 7 };

/* Whether the lossy levels of the mask can be nested. They must be neighbours, and the profile (may
 * be NULL: then not) must have what nesting needs. */
bool cg_encoder_can_nest(const cg_profile *profile, uint8_t level_mask);

/* Prepares the encoding of one chunk at all levels of level_mask (bit n: level n). The levels share
 * one transform, so several cost little more than one. The caller frees the encoder.
 *
 * With CG_NESTED in the mask its lossy levels are nested: cg_encoder_finish() of one makes a file
 * that holds the coarser ones of the mask, too. That needs cg_encoder_can_nest(). With
 * CG_SHORT_STREAMS the lossy levels are cut into about four times as many streams, which adds
 * at most 16 % to a section. A GPU decodes streams side by side, so it has a chunk that
 * comes alone in a fraction of the time.
 *
 * header: geometry, cache_scales, first_position, n_tokens, prefix_level, model, parent and extra
 * are used; the rest is computed. tokens[n_tokens] are copied. profile may be NULL when level_mask
 * is only L0; otherwise it must outlive the encoder. Its model must be header->model, and its
 * scales the header's. With a joint matrix the encoder takes 4 bytes for each channel of that
 * matrix and each token, until it is freed; with queries, 4 bytes for each layer and block of 8
 * tokens.
 *
 * CG_ERR_LOSSY_PREFIX: L0 or L1 on a prefix lossier than that level. KV that was computed on a
 * lossy prefix has its errors already, and a fine level would pass them on as exact.
 * CG_ERR_FOREIGN_PROFILE: a lossy level without a profile. CG_ERR_FOREIGN_MODEL: another model, or
 * other scales. CG_ERR_INVALID_ARGUMENT: the mask, a count or a position is not possible, or not
 * with this profile. Errors of cg_geometry_check(), CG_ERR_NO_MEMORY.
 */
cg_status cg_encoder_new(const cg_profile *profile, const cg_chunk_header *header,
                         const uint32_t *tokens, uint8_t level_mask, cg_encoder **encoder_out);
void cg_encoder_free(cg_encoder *encoder); /* NULL is fine */
uint32_t cg_encoder_n_tasks(const cg_encoder *encoder);
cg_task_shape cg_encoder_task_shape(const cg_encoder *encoder, uint32_t task_index);
/* The most that any task or weighing takes. */
size_t cg_encoder_scratch_bytes(const cg_encoder *encoder);
/* Sets the step of each block of 8 tokens, at all levels: the level's times
 * CG_STEP_FACTORS[factor_index[b]] (codec/block_order.h); factor_index has ceil(n_tokens / 8)
 * bytes, and is copied. To be called before any task runs; not called, all blocks have the level's
 * own step. Without lossy levels, and with a profile before version 4, it does nothing.
 * CG_ERR_INVALID_ARGUMENT: one is no index of a factor; nothing is set then. */
cg_status cg_encoder_set_step_factors(cg_encoder *encoder, const uint8_t *factor_index);
/* How many layers can tell which blocks deserve finer steps: all, with a profile that has queries,
 * else 0. See codec/importance.h. */
uint32_t cg_encoder_n_weighings(const cg_encoder *encoder);
/* Weighs a layer below cg_encoder_n_weighings(). The last one gives each block its step, so all are
 * to be weighed, each once, before any task is run. Blocks of an encoder that weighs none have the
 * level's own step. All layers together take a few per cent of the time of the tasks.
 * k, v: [n_tokens][n_kv_heads][head_dim] of the chunk's dtype, K as the engine holds it. Any
 * thread; they may run concurrently. CG_ERR_INVALID_ARGUMENT: as cg_encoder_run(). Then the layer
 * may be weighed again. */
cg_status cg_encoder_weigh(cg_encoder *encoder, uint32_t layer, void *scratch, size_t scratch_bytes,
                           const void *k, const void *v);
/* Encodes one task from in, elements_bytes of its shape in the canonical layout, at every level.
 * Any thread; tasks may run concurrently. With a joint matrix each task leaves a part for it in the
 * encoder, and the one that ends last also codes the joint matrix, in its own scratch. A task that
 * failed may run again. CG_ERR_NO_MEMORY: for the coded bytes. CG_ERR_INVALID_ARGUMENT: an element
 * is not finite and there is a lossy level; or there is no such task; or scratch is too small or
 * not aligned. */
cg_status cg_encoder_run(cg_encoder *encoder, uint32_t task_index, void *scratch,
                         size_t scratch_bytes, const void *in);
/* How many symbols the tasks so far had to make smaller, since they were beyond 16 bits or would
 * have made sums beyond 32; plus the numbers that a joint matrix gives beyond 16 bits. Where it is
 * not 0, what is decoded is further off than the level means. A task that ran twice counts twice.
 * Any thread. */
uint64_t cg_encoder_n_saturated(const cg_encoder *encoder);
/* After all tasks, for each level that is wanted: makes the chunk file of a level of the mask. With
 * CG_NESTED it also holds the mask's coarser levels. *bytes_out is malloc'ed: the caller frees it
 * with free(). The file's version is 3; at a lossy level it is 4 with a joint matrix, 5 with a
 * profile of version 4, and with one of version 1 it is 1, or 2 when nested.
 * CG_ERR_INVALID_ARGUMENT: the mask has no such level, or a task has not run, or has failed.
 * CG_ERR_NO_MEMORY. One thread. */
cg_status cg_encoder_finish(cg_encoder *encoder, cg_level level, uint8_t **bytes_out,
                            size_t *n_bytes_out);

/* ---- transcoding ---- */

/* Makes the same chunk at a coarser lossy level. Its symbols are scaled and coded again, without
 * KLT or rotation. A nested chunk that holds the level is cut instead. From L0 use a decoder and an
 * encoder. *bytes_out is malloc'ed, the caller's. CG_ERR_INVALID_ARGUMENT: level is not coarser, or
 * the chunk is L0, or a section would have 4 GiB. Errors of cg_decoder_new(). One thread. */
cg_status cg_transcode(const cg_profile *profile, const uint8_t *bytes, size_t n_bytes,
                       cg_level level, uint8_t **bytes_out, size_t *n_bytes_out);

/* ---- convenience: whole chunks on n_threads threads of their own, for tools ---- */

/* Elements are [n_layers][2][n_tokens][n_kv_heads][head_dim]. Encoding is nested when coarsest is
 * above level. *bytes_out is malloc'ed, the caller's. n_saturated_out: NULL, or receives
 * cg_encoder_n_saturated(). Errors of the functions above; CG_ERR_BUFFER_TOO_SMALL: out_bytes or
 * in_bytes is below the elements' size. CG_ERR_INVALID_ARGUMENT: coarsest is below level. */
cg_status cg_decode_chunk(const cg_profile *profile, const uint8_t *bytes, size_t n_bytes,
                          unsigned n_threads, void *out, size_t out_bytes);
cg_status cg_encode_chunk(const cg_profile *profile, const cg_chunk_header *header,
                          const uint32_t *tokens, const void *in, size_t in_bytes, cg_level level,
                          cg_level coarsest, unsigned n_threads, uint8_t **bytes_out,
                          size_t *n_bytes_out, uint64_t *n_saturated_out);

#ifdef __cplusplus
}
#endif
#endif
