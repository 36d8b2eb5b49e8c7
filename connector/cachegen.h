/* connector/cachegen.h - the C ABI of libcachegen.so: look up, load and save KV caches for a
 * serving engine.
 *
 * An engine keeps the K and V that its model computed in paged blocks. A store keeps them coded, in
 * chunks of some hundred tokens, each at one or more levels: L0 gives back every bit; L1, L2 and L3
 * are lossy, each coarser and smaller than the one before. A look-up finds the prefix of a prompt
 * that the store has, and makes a plan: what to load, at which levels. A load carries a plan out. A
 * save copies K and V out of the blocks, codes them and publishes them.
 * What was computed on a lossy prefix is no better than that prefix, at whatever level it is
 * stored. A chunk carries the worst level that it was computed on: its provenance. Where a comment
 * says "provenance counted", a chunk is as bad as the worse of its level and its provenance.
 *
 * Guarantees. Structs begin with struct_size and abi_version and grow only at their end. The
 * library reads min(struct_size, its own size) and takes the rest as zero; zero is always the
 * default. In a struct that the caller gives, abi_version is CACHEGEN_ABI_VERSION, or 0 for the
 * first; another one is refused (CACHEGEN_ERR_UNSUPPORTED_VERSION). Symbols are versioned
 * (libcachegen.map). Nothing here aborts the host. Every failure of a store is a cache miss.
 * Errors. Any function that returns a status returns CACHEGEN_ERR_INVALID_ARGUMENT for NULL, sizes
 * and numbers that cannot be, and CACHEGEN_ERR_NO_MEMORY; comments name those that a host may want
 * to tell apart. A handle that it would give back is then NULL, and there is nothing to free.
 * Signals of the host reach none of the library's threads, except those that a thread causes itself
 * (SIGSEGV and the like), which are not blocked.
 * Surprises. (1) Look-ups, loads and saves are asynchronous: start one, then poll it or wait on the
 * eventfd. (2) A plan is plain bytes that may cross processes, so that an engine's scheduler and
 * its workers agree. (3) After fork() a handle works in the child, too: the child starts threads of
 * its own. Operations that were under way stay the parent's.
 * Threads: any thread may call any function. An operation's handle is used by one thread at a time.
 */
#ifndef CACHEGEN_H
#define CACHEGEN_H
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CACHEGEN_ABI_VERSION 1u
#ifndef CACHEGEN_API
#define CACHEGEN_API __attribute__((visibility("default")))
#endif

/* How a call or an operation ended. The numbers are pinned, and later versions may add some: what
 * is not listed here is an error, too. */
typedef int32_t cachegen_status;
enum {
    CACHEGEN_OK = 0,
    CACHEGEN_ERR_INVALID_ARGUMENT = 1,
    CACHEGEN_ERR_NO_MEMORY = 2,
    CACHEGEN_ERR_BUFFER_TOO_SMALL = 3,
    CACHEGEN_ERR_UNSUPPORTED = 4, /* a geometry, dtype or device that is refused by name */
    CACHEGEN_ERR_CANCELLED = 5,
    CACHEGEN_AGAIN = 6, /* not yet: ask again */
    /* A chunk, or a plan, that is not what it should be. */
    CACHEGEN_ERR_TRUNCATED = 20,
    CACHEGEN_ERR_CORRUPT = 21,
    CACHEGEN_ERR_UNSUPPORTED_VERSION = 22,
    CACHEGEN_ERR_BAD_MAGIC = 23,
    CACHEGEN_ERR_FOREIGN_MODEL = 30,
    CACHEGEN_ERR_FOREIGN_PROFILE = 31,
    CACHEGEN_ERR_FOREIGN_TOKENS = 32,
    CACHEGEN_ERR_LOSSY_PREFIX =
        33, /* computed on a prefix that is worse than the request accepts */
    /* The store, or a GPU. */
    CACHEGEN_ERR_NOT_FOUND = 40,
    CACHEGEN_ERR_EXISTS = 41,
    CACHEGEN_ERR_IO = 42,
    CACHEGEN_ERR_NO_SPACE = 43,
    CACHEGEN_ERR_PERMISSION = 44,
    CACHEGEN_ERR_TIMED_OUT = 45, /* late: a deadline passed, or a mount hangs */
    CACHEGEN_ERR_READ_ONLY = 46,
    CACHEGEN_ERR_DEVICE = 47,
};

typedef struct cachegen cachegen;               /* a connector: a store, a model, threads */
typedef struct cachegen_lookup cachegen_lookup; /* a look-up under way */
typedef struct cachegen_load cachegen_load;     /* a load under way */
typedef struct cachegen_save cachegen_save;     /* a save under way */

/* ---- a connector ---- */

/* Opens a connector from a JSON object (keys and defaults: connector/README.md). The caller ends
 * *out with cachegen_close(). It reads the store's model.json and the model's profile: the tables
 * that lossy levels are coded with. A store without a profile opens, too, and serves L0. No thread
 * stays before the first operation; where the store is far, one starts with the first layout that
 * is registered.
 * CACHEGEN_ERR_TIMED_OUT: the store has not answered for open_timeout_ms (configured). Then a
 * thread is left behind, which frees what it has when the store answers, if ever. On failure *out
 * is NULL, and error[error_bytes] (may be NULL) holds one sentence that names the key. On success
 * it is empty, or a warning: the curve of quality in model.json is not valid, and the built-in one
 * is used; or there was nothing of a store in root, and one is begun there. */
CACHEGEN_API cachegen_status cachegen_open(const char *json, size_t json_bytes, cachegen **out,
                                           char *error, size_t error_bytes);
/* Cancels look-ups and loads, runs queued saves to their end, and frees. It returns after
 * close_timeout_ms (configured) at the latest, also if the store hangs, or a GPU, or if encoders,
 * at their low priority (encode_nice), get no CPU; but not before threads have copied what they
 * were copying out of the blocks, which the engine may free then. Saves that are late are given up,
 * and what hangs is left behind: its thread and memory stay until it goes on, if ever. Nothing is
 * freed that it may still touch. Should a GPU go on that was left with a load, it still writes that
 * load's blocks. Free the handles of operations that are done before this call: afterwards all
 * handles are invalid. To free a handle waits for its operation: for a save as long as it takes,
 * for an operation of a GPU that hangs for ever. NULL is fine. */
CACHEGEN_API void cachegen_close(cachegen *connector);
/* What a status means, in a few words of English: a constant of the library's, never NULL. */
CACHEGEN_API const char *cachegen_strerror(cachegen_status status);
/* CACHEGEN_ABI_VERSION of the library that was loaded. */
CACHEGEN_API uint32_t cachegen_abi_version(void);

/* Types of elements. FP8_E4M3 is OCP's, without infinities. An fp8 element may stand for the
 * element times a scale of its layer and plane; the configuration's geometry gives scales other
 * than 1. */
enum {
    CACHEGEN_DTYPE_BF16 = 1,
    CACHEGEN_DTYPE_FP16 = 2,
    CACHEGEN_DTYPE_FP32 = 3,
    CACHEGEN_DTYPE_FP8_E4M3 = 4,
    CACHEGEN_DTYPE_FP8_E5M2 = 5,
};

/* What was opened. Strings live as long as the connector. */
typedef struct cachegen_info {
    uint32_t struct_size, abi_version;
    uint32_t n_layers, n_kv_heads, head_dim, dtype; /* CACHEGEN_DTYPE_... */
    uint32_t chunk_tokens;
    uint32_t has_profile;
    uint32_t store_levels; /* bit n: saves make level n */
    uint32_t io_backend;   /* 1 io_uring, 2 threads */
    const char *model;     /* the folder's name in the store */
    const char *model_fingerprint_hex,
        *profile_fingerprint_hex; /* 32 digits; "" without a profile */
    /* CACHEGEN_GPU_...; gpu_reason says in a sentence why it is not ON, or is "". The GPU is opened
     * with the first layout in its memory. */
    uint32_t gpu;
    uint32_t reserved;
    const char *gpu_reason;
} cachegen_info;
/* UNUSED: no layout is in a GPU's memory. OFF: no GPU can be used. Something is missing
 * (libcachegen_cuda.so, a driver, a GPU ...), or the GPU had an error that stays. */
enum { CACHEGEN_GPU_UNUSED = 0, CACHEGEN_GPU_ON = 1, CACHEGEN_GPU_OFF = 2 };
/* Fills *info_out, as far as its struct_size reaches; so does cachegen_get_stats(). */
CACHEGEN_API cachegen_status cachegen_get_info(cachegen *connector, cachegen_info *info_out);

/* ---- paged KV blocks ---- */

enum { CACHEGEN_LAYOUT_STRIDED = 0, CACHEGEN_LAYOUT_VLLM_CPU_AMX = 1 };
enum { CACHEGEN_MEMORY_HOST = 0, CACHEGEN_MEMORY_CUDA = 1 };

/* Where an engine keeps its paged KV blocks. One layout is one KV-cache group: layers that share
 * block tables. A plane is K (0) or V (1); strides are in bytes.
 * STRIDED: element (layer, plane, block, head, token in block, dim) lies at
 *   base[layer] + offset_bytes[plane] + block*block_stride + head*head_stride[plane] +
 *   token*token_stride[plane] + dim*dim_stride[plane]
 * vLLM's CPU "vec" layout is STRIDED with a transposed K.
 * A rank of a tensor-parallel engine has some KV heads of each layer: n_kv_heads of the model's,
 * from first_head on. Each rank has a connector. Those with the same `group` (configured) are a
 * rank set: they load and save the same requests. A load writes the rank's heads. A save of head
 * 0's rank gathers those of the others, on the same host, and stores whole chunks; the others'
 * saves send theirs. VLLM_CPU_AMX: as vLLM's CPU attention packs bf16 and fp8 for AMX. Here base,
 * block_stride and head_stride[0] count; the rest follows from them. CACHEGEN_MEMORY_CUDA: base
 * holds device addresses of the GPU `device`. Such a layout is STRIDED, has all layers of the
 * model, and K, V and strides are multiples of 16 bytes. */
typedef struct cachegen_kv_layout {
    uint32_t struct_size, abi_version;
    uint32_t layout, memory;
    uint32_t n_layers, n_kv_heads, head_dim, dtype;
    uint32_t block_tokens; /* tokens a block */
    uint32_t first_layer;  /* of the model; 0 unless pipeline parallel */
    uint64_t n_blocks;
    void *const *base; /* [n_layers]; copied */
    int64_t offset_bytes[2];
    int64_t block_stride;
    int64_t head_stride[2], token_stride[2], dim_stride[2];
    uint32_t first_head; /* of the model, of those that lie here; 0 unless tensor parallel */
    uint32_t device;     /* CUDA's ordinal, as the process sees it */
    uint32_t reserved;
} cachegen_kv_layout;

/* Registers a layout. The blocks must stay until cachegen_close(). *kv_id_out names the layout in
 * loads and saves. It is refused unless layers, heads, head_dim and dtype agree with the
 * connector's model. Where saves are allowed, all layouts that lack heads have the same ones, or it
 * is CACHEGEN_ERR_INVALID_ARGUMENT. CACHEGEN_ERR_EXISTS: another one of the rank set has head 0 and
 * saves, too. The first layout in a GPU's memory loads libcachegen_cuda.so and takes all memory
 * that loads and saves will need there. CACHEGEN_ERR_UNSUPPORTED: there is no GPU;
 * cachegen_info.gpu_reason says why. All layouts in a GPU's memory must be in that of one GPU. */
CACHEGEN_API cachegen_status cachegen_register_kv(cachegen *connector,
                                                  const cachegen_kv_layout *layout,
                                                  uint32_t *kv_id_out);

/* How an operation waits for the engine's own work on a GPU: `after` is a cudaStream_t or
 * cudaEvent_t of the layout's device. Ignored for layouts in host memory.
 * STREAM: what the engine has enqueued there so far is finished before the operation touches the
 * blocks. A save also makes the stream wait until the blocks are copied, unless hold_later says
 * otherwise. NULL is CUDA's default stream.
 * EVENT: what the event has recorded is finished before. The event must stay until the operation is
 * done. A save returns when the blocks are copied.
 * NONE: the engine knows that its work on the blocks is over. A save returns as with EVENT.
 * What the engine enqueues later must not touch blocks that a load is writing; the engine waits
 * until poll says that the load is done. */
enum { CACHEGEN_AFTER_NONE = 0, CACHEGEN_AFTER_STREAM = 1, CACHEGEN_AFTER_EVENT = 2 };

/* ---- look-up ---- */

/* What identifies KV, and what a request accepts. The call that takes it copies what its pointers
 * point to. This struct never grows: cachegen_save_request holds it by value. */
typedef struct cachegen_request {
    uint32_t struct_size, abi_version;
    const uint32_t *tokens; /* the whole prompt */
    uint32_t n_tokens;
    uint32_t salt_bytes; /* cache_salt of the tenant */
    const void *salt;
    const void *extra; /* whatever else makes the KV differ (LoRA, multi-modal hashes); applies to
                          every chunk */
    uint32_t extra_bytes;
    uint32_t worst_level_plus_1; /* worst level accepted, provenance counted: 1 demands L0 ... 4
                                    takes all; 0 = 4 */
    uint32_t level_plus_1;       /* 1 + the one level to use; 0 = the controller chooses */
    uint64_t ttft_budget_ns;     /* 0: the configuration's */
} cachegen_request;

typedef struct cachegen_hit {
    uint32_t struct_size, abi_version;
    /* Of both: a multiple of the chunk size or a tail's end; or, where that is the whole prompt,
     * one token less, since the engine computes the last token itself: it wants its logits. */
    uint32_t hit_tokens;    /* prefix that will be loaded, from token 0, cut where recomputing fits
                               the budget better */
    uint32_t stored_tokens; /* prefix that the store has at an accepted level */
    uint32_t n_chunks;
    uint32_t worst_level;  /* of the plan, provenance counted */
    uint64_t bytes;        /* to read, by the plan */
    uint64_t predicted_ns; /* read and decode, by the estimator; 0 without a sample or prior */
} cachegen_hit;

/* Starts looking up the prefix of a request. The engine has the first from_token tokens already:
 * chunks that end there or before are neither probed nor loaded. Never blocks on the store. */
CACHEGEN_API cachegen_status cachegen_lookup_start(cachegen *connector,
                                                   const cachegen_request *request,
                                                   uint32_t from_token, cachegen_lookup **out);
/* What a request may wish besides. Zeros: nothing. */
typedef struct cachegen_lookup_options {
    uint32_t struct_size, abi_version;
    uint64_t spent_ns;         /* of the budget: how long ago the request arrived */
    uint64_t max_kl_micronats; /* the hit may cost this KL divergence at most, as predicted, and is
                                  read no finer than that needs; 0: anything. Of a load that ends
                                  early, what is there is as it was chosen for the whole hit. Needs
                                  the choice of levels: an invalid argument with level_plus_1 */
    uint32_t no_tail_at_hole;  /* 1: where the store lacks a full chunk of the prompt, the hit ends
                                  before that chunk, and not at a tail that a shorter prompt has
                                  left in its place: for an engine that computes such chunks whole,
                                  since only then it can save them */
    uint32_t reserved;
} cachegen_lookup_options;
/* cachegen_lookup_start() with options; NULL is fine. */
CACHEGEN_API cachegen_status cachegen_lookup_start_with(cachegen *connector,
                                                        const cachegen_request *request,
                                                        uint32_t from_token,
                                                        const cachegen_lookup_options *options,
                                                        cachegen_lookup **out);
/* CACHEGEN_AGAIN: not yet. A look-up ends at the latest lookup_timeout_ms (configured) after its
 * first question to the store; or when the engine would have computed the prompt, if that is later
 * and the store goes on answering or bringing bytes. Look-ups share rounds: the store is asked for
 * as many as it answers side by side, the oldest first. The others wait for lookup_timeout_ms or
 * for their budget, whichever is shorter; or for as long as the engine would take, if that is
 * longer. Then they are misses. A store that has done neither for lookup_timeout_ms is not asked
 * for further look-ups: they are misses at once, until it answers the connector's own question.
 * CACHEGEN_OK: *hit_out is filled; a hit of 0 tokens is a miss, whatever the reason. */
CACHEGEN_API cachegen_status cachegen_lookup_poll(cachegen_lookup *lookup, cachegen_hit *hit_out);
/* Copies the plan: the bytes that cachegen_load_start() takes, in this process or another.
 * *plan_bytes is the room at plan, then the plan's size; with plan NULL only the size is told.
 * CACHEGEN_ERR_BUFFER_TOO_SMALL: the room is less than that. Only after poll said OK. */
CACHEGEN_API cachegen_status cachegen_lookup_plan(cachegen_lookup *lookup, void *plan,
                                                  size_t *plan_bytes);
CACHEGEN_API void cachegen_lookup_free(cachegen_lookup *lookup); /* cancels; NULL is fine */
/* Tells the connector that all chunks of a plan are bad, at the levels that a load of it may have
 * read: at the one that the request asked for, or at all that it accepts. At these they are not
 * offered again until they are saved anew or retry_ms (configured) has passed. That is for a load
 * of which nothing is known, as when its process is gone. Who has its progress calls
 * cachegen_forget_failed(), which blames only what failed. */
CACHEGEN_API cachegen_status cachegen_forget(cachegen *connector, const void *plan,
                                             size_t plan_bytes);

/* ---- load ---- */

typedef struct cachegen_load_request {
    uint32_t struct_size, abi_version;
    uint32_t kv_id;
    uint32_t from_token, to_token; /* [from, to) of the prompt; to <= the plan's hit_tokens */
    uint32_t n_blocks;
    const int64_t *block_table; /* [n_blocks] block ids from token 0 on; copied */
    const void *plan;           /* from cachegen_lookup_plan(); copied. Any bytes are safe. */
    size_t plan_bytes;
    uint32_t after_kind; /* CACHEGEN_AFTER_... */
    uint32_t reserved;
    void *after;
    const char *request_id; /* NULL, or what the engine calls the request, in UTF-8: its first 128
                               bytes are in the load's trace, unless they are no UTF-8. Copied */
} cachegen_load_request;

typedef struct cachegen_progress {
    uint32_t struct_size, abi_version;
    uint32_t done;          /* 1: complete; nothing is written to the blocks any more */
    cachegen_status status; /* when done: OK, or why it stopped */
    uint32_t loaded_tokens; /* prefix [from, loaded_tokens) of the prompt is whole in the blocks */
    uint32_t worst_level;   /* of what was loaded, provenance counted */
    uint64_t bytes_read;
    uint64_t read_ns;   /* time of the link: of each moment, what falls to this one of all reads of
                           the connector that were under way */
    uint64_t decode_ns; /* thread time in decoding; on a GPU, what it would be of the configured
                           threads, without chunks that waited for the engine */
    uint64_t copy_ns;   /* thread time in writing blocks */
    uint64_t total_ns;  /* since start */
    /* Of a load whose status is not OK: the chunk that ended it. Its first token; its levels that
     * could not be had (bit n: level n; 0 if no chunk is to blame: cancelled, out of memory, or
     * late); and, with CACHEGEN_ERR_LOSSY_PREFIX, its worst level, provenance counted. */
    uint32_t failed_token, failed_levels, failed_worst_level;
    uint32_t copied; /* of a save: 1: the blocks may be overwritten */
    /* Of a load: what was delivered. */
    uint32_t chunks_at[4];           /* of the prefix that is whole, by level */
    uint64_t bytes_dropped;          /* read, and then not decoded: too late, or not wanted */
    uint64_t predicted_kl_micronats; /* KL divergence that they cost, by the curve of quality */
    uint64_t bytes_from_memory;      /* of bytes_read: from the page cache, not over the link */
    uint64_t memory_ns;              /* of read_ns: of these */
} cachegen_progress;

/* Starts carrying a plan out; never waits for the store. The plan's bytes may be no plan, or one of
 * another version (20 to 23), or of another model or profile (30, 31). CACHEGEN_ERR_DEVICE: the GPU
 * failed. After an error nothing is written to the blocks. */
CACHEGEN_API cachegen_status cachegen_load_start(cachegen *connector,
                                                 const cachegen_load_request *request,
                                                 cachegen_load **out);
/* Always fills *progress_out. CACHEGEN_AGAIN until the load is done. A load that is done with
 * loaded_tokens < to_token has left garbage in the blocks from loaded_tokens on: the engine
 * recomputes them.
 * When a load ends by itself, at the latest. What has arrived by then counts.
 * - Half a second after the plan's budget, which began with the request.
 * - If recomputing the rest, queued work included, takes longer than that: when recomputing would
 *   have finished.
 * - Planned to take longer than its budget: after twice the time that the smallest level of its
 *   chunks should take, if bytes go on arriving.
 * - With min_delay: when it is done, if bytes go on arriving.
 * - Of a store that is silent: after read_timeout_ms (configured).
 * Bytes go on arriving if some do twice a second, or, over a link that was measured to be slow, in
 * twice the time that what was asked for takes. */
CACHEGEN_API cachegen_status cachegen_load_poll(cachegen_load *load,
                                                cachegen_progress *progress_out);
/* The levels of the chunks of the prefix that is whole, first to last (chunks_at counts them):
 * writes the first n_levels at most to levels_out[n_levels], unless that is NULL, and returns how
 * many there are. They stay as they are once the load is done. 0: none, or load is NULL, or of
 * another process. */
CACHEGEN_API uint32_t cachegen_load_levels(cachegen_load *load, uint8_t *levels_out,
                                           uint32_t n_levels);
/* Asks to stop; poll until done. */
CACHEGEN_API void cachegen_load_cancel(cachegen_load *load);
/* Cancels, waits until nothing is written any more, frees. NULL is fine. */
CACHEGEN_API void cachegen_load_free(cachegen_load *load);
/* Tells a connector that plans but does not load (an engine's scheduler) what ended a load of this
 * plan in another process (a worker). Only the chunk at failed_token is blamed, and only at the
 * levels that failed. Those are not offered until retry_ms (configured) has passed. After
 * CACHEGEN_ERR_LOSSY_PREFIX they still are, to requests that accept failed_worst_level. A load that
 * ran out of time (CACHEGEN_ERR_TIMED_OUT) blames no chunk, unless it could read nothing, and the
 * store had brought no load of its process anything for a second. Then that counts for twice the
 * time that the load took (total_ns), two seconds at least and retry_ms at most. */
CACHEGEN_API cachegen_status cachegen_forget_failed(cachegen *connector, const void *plan,
                                                    size_t plan_bytes,
                                                    const cachegen_progress *progress);
/* An eventfd that becomes readable when any operation of the connector completes; read it to clear
 * it. It is the connector's: don't close it. -1: there is none. */
CACHEGEN_API int cachegen_eventfd(cachegen *connector);

/* ---- save ---- */

typedef struct cachegen_save_request {
    uint32_t struct_size, abi_version;
    cachegen_request
        request; /* the prompt, salt, extra; its struct_size, levels and budget are ignored */
    uint32_t kv_id;
    uint32_t from_token,
        to_token; /* saves the chunks that lie in [from, to) whole: chunk starts are multiples of
                     chunk_tokens; with is_last also the tail that ends at to */
    uint32_t prefix_level; /* worst level of anything loaded for this request (0: nothing lossy) */
    uint32_t is_last;      /* 1: the prompt's KV ends at to; the context (if named) is published */
    uint32_t n_blocks;
    const int64_t *block_table; /* [n_blocks] from token 0 on */
    const char *context; /* NULL, or the name to publish the prompt's chunks under when is_last */
    uint32_t copy_later; /* 1: the connector's threads copy; until progress.copied says so, what is
                            saved must stay in the blocks. Ignored for blocks in a GPU's memory */
    uint32_t after_kind; /* CACHEGEN_AFTER_... */
    void *after;
    uint64_t number; /* for ranks that have some KV heads each: the save's number, by which heads
                        are brought together. It is the same on all ranks, and larger than those
                        before. Where ranks disagree, saves are lost. 0: each rank counts its calls,
                        so all must make the same calls. A call that says CACHEGEN_AGAIN counts,
                        too: who repeats it must give a number */
    uint32_t hold_later; /* 1, with CACHEGEN_AFTER_STREAM and blocks in a GPU's memory: the stream
                            does not wait for the copies. Until progress.copied says so what is
                            saved must stay in the blocks, or cachegen_save_hold() must come first.
                            Otherwise ignored */
    uint32_t reserved;
} cachegen_save_request;

/* Copies K and V out of the blocks before it returns, so that the engine may reuse them at once
 * (unless copy_later says otherwise); or, with CACHEGEN_AFTER_STREAM and a layout in a GPU's
 * memory, before what the engine enqueues next (unless hold_later says otherwise).
 * The connector's threads then encode and publish. Chunks that the store has are not saved again.
 * Chunks behind one that the store lacks are dropped, since no look-up could find them. Then poll
 * says OK with loaded_tokens < to_token. It says the same where only a part fitted into the staging
 * memory. A context then holds the part of the prompt that is stored; if nothing is, there is no
 * context. Where the store does not say whether it has a chunk, a context of that name stays as it
 * was. So it does, without an error, while another engine publishes the name for long
 * (save_timeout_ms). Errors are counted and reported by poll; they never harm the store.
 * CACHEGEN_AGAIN: the memory for such copies (staging_mib, configured) is full; nothing was taken.
 * CACHEGEN_ERR_TIMED_OUT: the store hangs, and the thread that saves with it; nothing was taken. */
CACHEGEN_API cachegen_status cachegen_save_start(cachegen *connector,
                                                 const cachegen_save_request *request,
                                                 cachegen_save **out);
/* For ranks that have some KV heads each: this one does not start the save with this number
 * (cachegen_save_request; 0: the call counts as one that starts a save), so that the rank which
 * stores does not wait for its heads. A call of cachegen_save_start() that fails counts, and tells
 * so itself, unless its request cannot be read. Never blocks; where there are no such ranks it does
 * nothing. */
CACHEGEN_API void cachegen_save_refuse(cachegen *connector, uint64_t number);
/* Always fills *progress_out: done, status, loaded_tokens (what is stored of the prompt) and
 * copied. CACHEGEN_AGAIN until the save is done. CACHEGEN_ERR_CANCELLED, where heads are brought
 * together: another rank dropped its part, or its saves are others; nothing was stored. */
CACHEGEN_API cachegen_status cachegen_save_poll(cachegen_save *save,
                                                cachegen_progress *progress_out);
/* Of a save with hold_later: what is enqueued on this stream (a cudaStream_t of the layout's
 * device; NULL is CUDA's default stream) from here on waits until the blocks are copied, and so may
 * overwrite them. progress.copied says so, too. To be called before the first work that overwrites
 * a block of the save, and for each stream that does. Waits for nothing, unless a call of CUDA
 * fails: CACHEGEN_ERR_DEVICE. Then, too, the blocks may be overwritten: what was not known to be
 * copied is not stored. Of another save, nothing. */
CACHEGEN_API cachegen_status cachegen_save_hold(cachegen_save *save, void *stream);
/* Of a save with copy_later: nothing more is copied, since the blocks are wanted. From the return
 * on they may be overwritten; progress.copied says so, too. Waits for nothing: what a thread reads
 * at this moment it reads to its end, and it is thrown away. Chunks that were not copied whole
 * before are dropped with those behind them; a rank whose heads another one stores drops the whole
 * save. Of a save with hold_later: as cachegen_save_hold(), but nothing waits, and chunks that are
 * not known to be copied are dropped with those behind them (CACHEGEN_ERR_CANCELLED). Any number of
 * calls; NULL is fine. */
CACHEGEN_API void cachegen_save_cut(cachegen_save *save);
/* The same of the blocks of this token, a prompt's, and of all behind it only: those before it are
 * copied on, and must not be overwritten until progress.copied. A save with hold_later, and a
 * rank's whose heads another one stores, is cut as a whole. */
CACHEGEN_API void cachegen_save_cut_from(cachegen_save *save, uint32_t token);
/* Waits until the save is complete, for a save is never lost half-way, and until the blocks are not
 * read any more, unless it was cut as a whole. Then frees. With a store that hangs that takes
 * save_timeout_ms (configured). NULL is fine. */
CACHEGEN_API void cachegen_save_free(cachegen_save *save);

/* ---- measurement ---- */

/* The engine computed n_tokens of prefill in duration_ns. Look-ups and loads weigh loading against
 * that speed. */
CACHEGEN_API void cachegen_report_prefill(cachegen *connector, uint32_t n_tokens,
                                          uint64_t duration_ns);
/* The same where the tokens did not stand at the start of a prompt, or of several: n_pairs is the
 * sum of their positions, which is how many tokens stood before each, added up. So it is learnt
 * how much longer late tokens take. */
CACHEGEN_API void cachegen_report_prefill_at(cachegen *connector, uint32_t n_tokens,
                                             uint64_t n_pairs, uint64_t duration_ns);

/* Tells what the engine must still compute before it can begin with anything that is given up, or
 * not found, from now on: n_tokens of prompts. n_pairs is the sum of their positions. Look-ups and
 * loads leave less to the engine the more it has to do: what it computes for several requests it
 * computes one after the other. Count what a load lacks once cachegen_load_poll() has said that it
 * is done; before, the connector counts it. Count what a look-up leaves to the engine from the
 * first call on after it has answered. Each call replaces the one before. Call often, such as once
 * a step: what was told wears off as time goes by. More than a day's work counts as a day. Without
 * calls a connector knows only what its own loads have left to the engine. */
CACHEGEN_API void cachegen_report_queue(cachegen *connector, uint64_t n_tokens, uint64_t n_pairs);

/* For a connector that carries loads out and does not look up, such as an engine's worker: prompts
 * of n_tokens in all, less what the engine has of them, are being looked up elsewhere. Loads that
 * are under way leave the link time for them, and keep it free enough for the look-ups' questions.
 * It holds for a second, or until the next call. Look-ups of this connector count by themselves. */
CACHEGEN_API void cachegen_expect(cachegen *connector, uint64_t n_tokens);

/* For a connector that plans loads and does not carry them out, such as an engine's scheduler:
 * tells it how a load in another process went, from which it learns the speeds. bytes_read,
 * less bytes_from_memory, came over the link in read_ns less memory_ns; where this process has
 * read, too, it has measured that itself, and they are left out. loaded_tokens - from_token tokens,
 * of chunks at the levels that chunks_at counts, were decoded in decode_ns and written to blocks in
 * copy_ns. Where chunks_at is all zeros they were of worst_level. */
CACHEGEN_API void cachegen_report_load(cachegen *connector, uint32_t from_token,
                                       const cachegen_progress *progress);

/* Counters since open, or in a child after fork() since its first use. All but throughput_bps and
 * staging_bytes, which tell of now, never fall. Times are in ns, sizes in bytes. */
typedef struct cachegen_stats {
    uint32_t struct_size, abi_version;
    uint64_t lookups, lookup_hits, lookup_errors, lookup_ns;
    uint64_t loads, loads_failed, loads_cancelled;
    uint64_t chunks_loaded[4]; /* by level */
    uint64_t tokens_loaded, bytes_read, read_ns, decode_ns, copy_ns;
    uint64_t chunks_missing, chunks_truncated, chunks_corrupt, chunks_foreign_model,
        chunks_foreign_profile, chunks_foreign_tokens, chunks_lossy_prefix, chunks_timed_out,
        chunks_io_error; /* refused, by reason */
    uint64_t chunks_saved[4], chunks_existed, save_errors, saves_dropped, bytes_written, encode_ns;
    uint64_t abandoned_reads; /* given up: their time was over, or their load's. Most end later */
    uint64_t throughput_bps;  /* the estimator's now, coded bits a second; 0 unknown */
    /* saves_dropped by reason, in chunks: the staging memory is full; they were computed on a
     * prefix that is too coarse for any level to store; what they follow is not stored; the store
     * hung; other errors. */
    uint64_t saves_dropped_staging, saves_dropped_lossy, saves_dropped_unreachable,
        saves_dropped_timed_out, saves_dropped_failed;
    /* The most that saves held of staging_mib: K and V, and encoders. */
    uint64_t staging_peak_bytes;
    uint64_t loads_shortened; /* given up from some chunk on, since recomputing is faster */
    uint64_t bytes_dropped, predicted_kl_micronats; /* sums over loads */
    uint64_t lookups_skipped; /* of lookups: misses at once, while the store does not answer, and
                               * those that have waited too long for others */
    uint64_t staging_bytes;   /* that saves hold now */
    uint64_t saves_dropped_incomplete; /* of saves_dropped: another rank's heads did not come */
    /* Of chunks that were saved: symbols that did not fit, since K or V is far beyond what the
     * profile was made from. Such chunks decode further off than their levels mean. */
    uint64_t symbols_saturated;
    /* chunks_loaded, those that a GPU's kernels decoded; and what a GPU failed at: chunks, saves,
     * and tasks of an encoder, which cost nothing but the CPU's time. */
    uint64_t chunks_decoded_on_gpu, gpu_errors;
    /* By saves. What the store turned out to have all the same when it was published is in
     * chunks_existed, too. */
    uint64_t chunks_encoded;
    uint64_t saves_dropped_overwritten; /* of saves_dropped: by a cut */
} cachegen_stats;
CACHEGEN_API cachegen_status cachegen_get_stats(cachegen *connector, cachegen_stats *stats_out);

#ifdef __cplusplus
}
#endif
#endif
