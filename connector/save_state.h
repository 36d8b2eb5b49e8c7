/* connector/save_state.h - a save: whole chunks out of paged blocks, encoded and published in the
 * background.
 *
 * save.c decides what is to be saved and copies it out of the blocks. writer.c has a thread that
 * takes saves in the order they came, so a chunk's prefix is published before it, and a context
 * after its chunks. It encodes by save_encode.c and publishes by save_publish.c. All know this
 * struct.
 *
 * The writer's system calls can hang with the store, and a save has to end all the same. So the
 * writer tells when each of its steps has to be over, and a thread of its own watches that. If a
 * step is not, its save and all that wait behind it end with CG_ERR_TIMED_OUT. Until the writer is
 * back, further saves are refused: nobody would write them. A save that was given up stays the
 * writer's, too; it drops it when it is back.
 *
 * Several engines on a host may save the same chunk. Only one encodes it: the one that holds the
 * chunk's lock, until it is published. The others wait, then ask the store. From then on they ask
 * about each chunk before they encode it, and so does an engine that finds a chunk published which
 * had not been there. So a chunk costs a further question only where another engine is at the same
 * prompt. save_timeout_ms after its first wait a save waits for nobody any more: the writer has
 * other saves to make. A context, too, is published by one engine of a host at a time; who waits
 * for that longer than save_timeout_ms leaves the name to the others, and its save is fine.
 *
 * Memory: staging_mib (configured) bounds the copies of K and V and what is made of them together.
 * The pool may make the copies (copy_later): then nothing of a save is freed or encoded before
 * is_copied, and the copying holds a reference to it. A rank whose heads another rank stores only
 * copies; that is its whole save (connector/save_gather.h). A GPU's copies (holds_later) are waited
 * for by the writer; one that it did not have before a cut is not used. A copy is freed when it is
 * encoded, by the writer: encoders have the lowest priority, and may lose the CPU in whatever they
 * hold. An encoder, its output and the file made of it count as much as the chunk's K and V, from
 * the start of the encoding until the chunk is published. Copies leave room for one encoder, so
 * that there is always one that can begin; others begin ahead of it where there is room for them.
 * Threads: fields are constant once the save is queued, unless they say otherwise. Functions want
 * the runtime's lock held.
 */
#ifndef CG_CONNECTOR_SAVE_STATE_H
#define CG_CONNECTOR_SAVE_STATE_H
#include "codec/codec.h"
#include "connector/operation.h"

#include <semaphore.h>

typedef struct cg_save_chunk {
    cg_job job;
    cachegen_save *save;
    uint32_t index; /* in the prompt */
    uint32_t first_token, n_tokens;
    uint8_t *raw;  /* [2][n_layers][n_tokens][n_kv_heads][head_dim], so that a task of the encoder
                      finds a plane's layers together; the writer's, which frees it when encoded */
    bool has_copy; /* constant: it is a copy off a GPU, and cg_save_take_raw() sets raw */
    uint32_t copy; /* constant: codec/device.h */
    uint64_t raw_bytes;
    uint64_t encoding_bytes; /* the runtime's lock: counted for the encoder */
    uint8_t levels;          /* mask: to make. The writer's */
    uint8_t damaged;         /* of these: whose files are no chunks. The writer's */
    uint8_t outdone;         /* of these: whose files this chunk's replaces. The writer's */
    cg_encoder *encoder;     /* the writer's */
    int lock;                /* the writer's: connector/host_socket.h; -1: none */
    bool is_encoded;         /* the writer's */
    /* Of the tasks, which take no lock: they have the lowest priority. */
    sem_t encoded;                 /* posted by the last one */
    _Atomic cg_status status;      /* the first that failed */
    _Atomic uint64_t encode_ns;    /* until the writer adds it to the counters */
    _Atomic uint32_t n_gpu_failed; /* as encode_ns */
} cg_save_chunk;

struct cachegen_save {
    cg_operation op;
    cachegen_progress progress; /* the runtime's lock */
    uint32_t n_saved;           /* the runtime's lock: chunks [0, n_saved) are published */
    bool is_shared;             /* the writer's: another engine saves chunks of it now */
    bool waits_for_nobody;      /* the writer's: it has waited for another engine long enough */
    uint64_t wait_until_ns;     /* the writer's: for others; 0: it has not begun to */
    bool is_behind_hole;        /* the runtime's lock: what it goes on from is not stored */
    bool is_incomplete;         /* the runtime's lock: other ranks' heads have not come */
    bool is_copied;             /* the runtime's lock: the pool does not read the blocks */
    _Atomic uint32_t cut_index; /* written with the runtime's lock: the first of the copying's tasks
                                   whose blocks are others' by now; UINT32_MAX: none is */
    bool holds_later;           /* constant: a GPU copies, and what the engine does to the blocks
                                   waits from cachegen_save_hold() on, not before */
    bool passes_later;          /* constant: what waits for these copies passes the heads on, and
                                   ends the save */
    uint32_t last_copy;         /* then constant: the last of the GPU's copies */
    uint32_t n_whole;           /* the runtime's lock: of the copying's tasks, those before the
                                   first that ended after a cut */
    atomic_bool is_over;        /* the save is done: tasks that have not begun are not run */
    bool has_some_heads;        /* the chunks lack other ranks' heads: connector/save_gather.h */
    uint64_t number;            /* then: the same on all ranks */
    uint32_t heads_to;          /* then: the ranks pass on those of keys [from_key, heads_to): of a
                                   GPU's no more than it copies at once */
    uint32_t *tokens;
    uint32_t n_tokens;  /* of all keys: the end of the last chunk */
    uint32_t end_token; /* n_tokens, or where what fitted into the staging memory ends */
    cg_key root, extra;
    cg_key *keys;              /* [n_keys]: of the prompt's chunks from the first on */
    uint32_t n_keys, from_key; /* chunks from this key on are to be saved */
    uint8_t prefix_level;
    char *context;         /* NULL: none */
    uint32_t n_chunks;     /* fewer once is_copied, where the copying was cut */
    cg_save_chunk *chunks; /* to be saved, in order */
    cg_job copy_job;       /* a task a chunk */
    const cg_kv_layout *layout;
    int64_t *table;      /* of the blocks; NULL: copied by the caller's thread */
    cg_gather_part part; /* the copying's, where another rank stores: the heads, to be passed on */
};

/* Levels (a mask) that the store has of a chunk and that were computed on a worse prefix than this.
 * L1 counts as good: what is near enough to exact is not written again to be nearer. (A chunk at L0
 * always has an exact prefix: codec/encoder.c.) */
uint8_t cg_save_outdoes(uint8_t prefix_level, const cg_store_entry *there);
/* Without the lock, too: frees the copy of K and V. False: there is none. */
bool cg_save_free_raw(cg_save_chunk *chunk);
/* Waits for a copy off a GPU, without the lock. Nothing to do where the CPU has copied.
 * CG_ERR_CANCELLED: there was a cut before it was there. */
cg_status cg_save_take_raw(cg_save_chunk *chunk);
/* Without the lock, of a GPU's copy that is there: whether it is of what the blocks had before
 * others wrote to them. */
bool cg_save_is_in_time(const cachegen_save *save);
/* Without the lock: makes the engine wait for the GPU's copies. Where this fails the save is cut.
 */
cg_status cg_save_hold(cachegen_save *save, const cg_gpu *gpu, cg_after after);
/* Gives the staging memory of the copy back, and the copy up; not while it is being made. It is
 * freed by cg_save_unlock(): the lock must not be given back otherwise. */
void cg_save_release_raw(cg_save_chunk *chunk);
/* Gives the lock back, then frees the copies that were released: the kernel takes milliseconds for
 * tens of MiB, and steps of the engine take this lock. */
void cg_save_unlock(cg_runtime *runtime);
/* Whether copies of n_bytes more leave the staging memory room for an encoder of encoder_bytes. */
bool cg_save_has_room(const cg_runtime *runtime, uint64_t n_bytes, uint64_t encoder_bytes);
/* Takes staging memory for the chunk's encoder. False: there is too little, and another encoder is
 * under way, after which there will be more. */
bool cg_save_claim_encoder(cg_save_chunk *chunk);
void cg_save_release_encoder(cg_save_chunk *chunk);
/* The most that was staged until now. */
void cg_save_note_peak(cg_runtime *runtime);
/* Without the lock, before the save is queued: what copying later needs of the request. False: no
 * memory. */
bool cg_save_keep_table(cachegen_save *save, const cg_kv_layout *layout,
                        const cachegen_save_request *request);
/* Without the lock: a task of the copying has read what it was to, or seen a cut. If there was one,
 * others may have written to the blocks meanwhile: its chunk is dropped. If there was none until
 * now, the lock orders all that it has read before the cut, and so before what others write. */
void cg_save_end_reading(cachegen_save *save, uint32_t task_index);
/* The copying is over: the blocks are not read any more. */
void cg_save_end_copying(cachegen_save *save);
/* Chunks that are not saved, because of status; CG_OK: what they follow is not stored. */
void cg_save_count_dropped(cg_runtime *runtime, uint32_t n_chunks, cg_status status);

/* The save is done; nothing happens if it was before. It may be gone afterwards. */
void cg_save_finish(cachegen_save *save, cg_status status);
/* The store hangs: ends the save that the writer has, and all that wait. Then cg_save_unlock(). */
void cg_saves_give_up(cg_runtime *runtime);
/* The body of the thread that does so in time; the argument is the cg_runtime. */
void *cg_saves_watch(void *runtime);
#endif
