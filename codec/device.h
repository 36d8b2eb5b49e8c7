/* codec/device.h - a GPU beside the CPU's codec: what a connector finds in libcachegen_cuda.so.
 *
 * A connector must not need CUDA to be built or to run, so it knows no type of CUDA's. It opens
 * that library at run time and works with the table of functions below. A device decodes chunks
 * into an engine's paged blocks, moves what the CPU has decoded there, copies blocks out for the
 * CPU to encode, and makes an encoder's symbols and their sections. It has its own streams, pinned
 * memory and device memory, all taken when it is opened; nothing is allocated afterwards but an
 * event now and then.
 *
 * Work on chunks is done in slots, each with its own pinned memory (host memory that the GPU can
 * reach). A slot's function waits for its own work on the GPU, and never for the engine's streams
 * unless it is given a mark of them. The engine's streams wait for one thing only, and only if they
 * are told to: that blocks are copied out.
 *
 * Every call of CUDA may fail. Then the function returns CG_ERR_DEVICE, nothing it has begun
 * touches the caller's memory any more, and failure() tells whether the GPU can be used again.
 *
 * Threads: any thread may call; a slot is used by one at a time. close(), mark_is_past(), decode(),
 * write(), read_wait() and a projector's project() are for the connector's own threads: they make
 * the device the thread's current one and leave it so. The others are for the engine's, too: these
 * leave its current CUDA device as it was. Only take_projector() and return_projector() are for
 * threads of a low priority: the others take locks of the CUDA driver's, which the engine's
 * launches take, too. After fork() a child must not call anything here.
 */
#ifndef CG_CODEC_DEVICE_H
#define CG_CODEC_DEVICE_H
#include "codec/profile.h"
#include "codec/projection.h"
#include "codec/status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised with any change here, or of the structs of the codec that cross (cg_profile). Both
 * libraries are of one build. */
enum { CG_DEVICE_TABLE_VERSION = 12 };

typedef struct cg_device cg_device;

typedef struct cg_device_config {
    uint32_t ordinal;          /* of CUDA, in this process */
    const cg_profile *profile; /* outlives the device. NULL: only L0 is decoded */
    cg_geometry geometry;      /* of the model, with the blocks' dtype */
    uint32_t chunk_tokens;     /* of a chunk, at most */
    uint32_t n_slots;
    uint32_t n_copies;     /* chunks that are copied out and not released, at most */
    uint32_t n_projectors; /* an encoder's tasks at once, at most; none where memory is short */
} cg_device_config;

/* Paged blocks in the GPU's memory: element (layer, plane, block, head, token in block, dim) lies
 * at base[layer] + offset_bytes[plane] + block * block_stride + head * head_stride[plane] + token *
 * token_stride[plane] + dim * the element's size. All of it is in bytes and a multiple of 16. */
typedef struct cg_device_blocks {
    void *const *base; /* [n_layers of the model]: addresses on the GPU; copied */
    int64_t offset_bytes[2];
    int64_t block_stride;
    int64_t head_stride[2], token_stride[2];
    uint32_t block_tokens;
    uint64_t n_blocks;
    uint32_t first_head, n_heads; /* of the model's: these are the blocks' heads, from 0 on */
} cg_device_blocks;

/* Tokens of a sequence, in its blocks. */
typedef struct cg_device_run {
    uint32_t blocks_id;
    const int64_t *table; /* [n_table] block ids of the sequence, of the host; copied */
    uint32_t n_table;
    uint32_t first_token;          /* the sequence's token that is the chunk's first */
    uint32_t n_tokens;             /* of the chunk */
    uint32_t from_token, to_token; /* of the chunk's tokens: these, from < to */
} cg_device_run;

/* A part of a chunk, [n_planes][n_layers][n_tokens][n_kv_heads][head_dim]. Blocks that have some of
 * the heads take and give these. */
typedef struct cg_device_tiles {
    uint32_t first_layer, n_layers;
    uint32_t first_plane, n_planes;
} cg_device_tiles;

/* Which of the engine's own work on the GPU is to be done first: all that is enqueued on a
 * cudaStream_t so far (NULL is the default stream), or what a cudaEvent_t stands for. Both are of
 * this device. */
typedef enum cg_after_kind {
    CG_AFTER_NONE = 0,
    CG_AFTER_STREAM = 1,
    CG_AFTER_EVENT = 2
} cg_after_kind;
typedef struct cg_after {
    cg_after_kind kind;
    void *handle;
} cg_after;

typedef struct cg_device_mark cg_device_mark; /* a point in the engine's work */

typedef struct cg_device_functions {
    uint32_t table_version;

    /* On failure *device_out is NULL, and reason_out[reason_bytes] holds a sentence: no driver, no
     * such GPU, too little memory, a profile or geometry that there are no kernels for. */
    cg_status (*open)(const cg_device_config *config, cg_device **device_out, char *reason_out,
                      size_t reason_bytes);
    /* Waits for what is under way, then frees the device. NULL is fine. */
    void (*close)(cg_device *device);
    /* NULL: the device works. Otherwise a sentence that says what broke it, valid as long as the
     * device; every call fails from now on. */
    const char *(*failure)(cg_device *device);

    /* The memory must stay until close(). CG_ERR_INVALID_ARGUMENT: not a multiple of 16.
     * CG_ERR_NO_MEMORY, CG_ERR_DEVICE. */
    cg_status (*add_blocks)(cg_device *device, const cg_device_blocks *blocks,
                            uint32_t *blocks_id_out);

    /* Remembers what the engine has enqueued until now; never waits. *mark_out is NULL for
     * CG_AFTER_NONE. The caller frees it, once no call that takes it is under way; an engine's
     * event stays until then. */
    cg_status (*mark)(cg_device *device, cg_after after, cg_device_mark **mark_out);
    void (*mark_free)(cg_device *device, cg_device_mark *mark); /* NULL is fine */
    /* Whether the mark's point is reached, so that nobody would wait for it. NULL: yes. */
    bool (*mark_is_past)(cg_device *device, const cg_device_mark *mark);

    /* Pinned host memory of a slot, page-aligned: for a chunk's bytes, or for tiles. At least the
     * K and V of a chunk. */
    void *(*slot_memory)(cg_device *device, uint32_t slot, size_t *n_bytes_out);

    /* Decodes the chunk in the slot's memory, of n_bytes, at its finest level into the blocks,
     * after the mark (NULL: at once). Returns when it is done. Chunks of several threads may be
     * decoded together; but for CG_ERR_DEVICE none fails with another. CG_ERR_FOREIGN_MODEL: the
     * chunk has another geometry than the configured one, so nothing was written.
     * CG_ERR_UNSUPPORTED_VERSION, CG_ERR_UNSUPPORTED, CG_ERR_BUFFER_TOO_SMALL: there are no kernels
     * for it, or no room; nothing was written, so let the CPU decode it and use write(). Errors of
     * cg_decoder_new() and cg_decoder_run(): the run's tokens hold garbage. CG_ERR_DEVICE. */
    cg_status (*decode)(cg_device *device, uint32_t slot, size_t n_bytes, const cg_device_run *run,
                        const cg_device_mark *mark);
    /* Copies tiles of the run's chunk from the slot's memory into the blocks, after the mark.
     * Returns when it is done. CG_ERR_DEVICE. */
    cg_status (*write)(cg_device *device, uint32_t slot, const cg_device_tiles *tiles,
                       const cg_device_run *run, const cg_device_mark *mark);

    /* Copies whole chunks out of the blocks, runs[n_runs], after what the engine has enqueued: each
     * into pinned memory of its own, [2][n_layers][n_tokens][n_kv_heads][head_dim]; what is there
     * of heads that the blocks don't have is undefined. It only enqueues: until hold(), or until
     * read_wait() has returned for all of them, the engine must not overwrite the blocks.
     * copies_out[n_runs]: numbers for the functions below.
     * CG_ERR_AGAIN: too many are not released yet; nothing was taken. CG_ERR_DEVICE. */
    cg_status (*read)(cg_device *device, const cg_device_run *runs, uint32_t n_runs, cg_after after,
                      uint32_t *copies_out);
    /* Makes the engine wait for a copy and for those that were enqueued before it, also where they
     * have been released. With CG_AFTER_STREAM this only enqueues: that stream waits. Else it
     * returns when they are done. CG_ERR_DEVICE: nothing is known of the copies, and whoever has
     * not got one by read_wait() yet must not use it. */
    cg_status (*hold)(cg_device *device, uint32_t copy, cg_after after);
    /* Waits until a copy is done. *elements_out is its pinned host memory, valid until the copy is
     * released. CG_ERR_DEVICE. */
    cg_status (*read_wait)(cg_device *device, uint32_t copy, void **elements_out);
    /* Never waits, also for a copy that is not there yet. */
    void (*read_release)(cg_device *device, uint32_t copy);

    /* A projector on the GPU, whose n_failed is 0, for encoders of the configured profile and of
     * at most the configured tokens. Its project() returns when the symbols are there, and is
     * CG_ERR_DEVICE where a call of CUDA failed. NULL: all are taken, the device is broken, or
     * there are none: without a profile, or with one of version 1 or of another preset than
     * klt. Never waits. */
    cg_projector *(*take_projector)(cg_device *device);
    void (*return_projector)(cg_device *device, cg_projector *projector);
} cg_device_functions;

/* The one symbol of libcachegen_cuda.so. NULL: it has no such version. */
typedef const cg_device_functions *cg_device_entry(uint32_t table_version);
#define CG_DEVICE_ENTRY_NAME "cachegen_cuda_functions"

#ifdef __cplusplus
}
#endif
#endif
