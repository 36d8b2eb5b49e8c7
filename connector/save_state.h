/* connector/save_state.h - a save: whole chunks out of paged blocks, encoded and published in the
 * background.
 *
 * save.c decides what is to be saved and copies it out of the blocks; writer.c encodes and
 * publishes. Both know this struct. Saves run in the order they came: a chunk's prefix is published
 * before it, and a context after its chunks.
 *
 * The writer's system calls can hang with the store, and a save has to end all the same. So the
 * writer tells when each of its steps has to be over, and a thread of its own watches that. If a
 * step is not, its save and all that wait behind it end with CG_ERR_TIMED_OUT. Until the writer is
 * back, further saves are refused: nobody would write them. A save that was given up stays the
 * writer's, too; it drops it when it is back.
 * Threads: fields are constant once the save is queued, unless they say otherwise. Functions want
 * the runtime's lock held.
 */
#ifndef CG_CONNECTOR_SAVE_STATE_H
#define CG_CONNECTOR_SAVE_STATE_H
#include "codec/codec.h"
#include "connector/operation.h"

typedef struct cg_save_chunk {
    cg_job job;
    cachegen_save *save;
    uint32_t index; /* in the prompt */
    uint32_t first_token, n_tokens;
    uint8_t *raw; /* [2][n_layers][n_tokens][n_kv_heads][head_dim], so that a task of the encoder
                     finds a plane's layers together; freed when encoded. The writer's */
    uint64_t raw_bytes;
    uint8_t levels;      /* mask: to make. The writer's */
    cg_encoder *encoder; /* the writer's */
    bool encoded;        /* the runtime's lock */
    cg_status status;    /* the runtime's lock */
} cg_save_chunk;

struct cachegen_save {
    cg_operation op;
    cachegen_progress progress; /* the runtime's lock */
    uint32_t n_saved;           /* the runtime's lock: chunks [0, n_saved) are published */
    uint32_t *tokens;
    uint32_t n_tokens; /* of all keys: the end of the last chunk */
    cg_key root, extra;
    cg_key *keys; /* [n_keys]: of the prompt's chunks from the first on */
    uint32_t n_keys;
    uint8_t prefix_level;
    char *context; /* NULL: none */
    uint32_t n_chunks;
    cg_save_chunk *chunks; /* to be saved, in order */
};

/* Frees the copy of K and V and gives its staging memory back. */
void cg_save_release_raw(cg_save_chunk *chunk);
/* The save is done; nothing happens if it was before. It may be gone afterwards. */
void cg_save_finish(cachegen_save *save, cg_status status);
/* Ends all saves that wait. */
void cg_saves_drop(cg_runtime *runtime, cg_status status);
/* The store hangs: ends the save that the writer has, and all that wait. */
void cg_saves_give_up(cg_runtime *runtime);
/* The body of the thread that does so in time; the argument is the cg_runtime. */
void *cg_saves_watch(void *runtime);
#endif
