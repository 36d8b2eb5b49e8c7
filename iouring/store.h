/* iouring/store.h - a model's part of a store: look-up by key, publishing, contexts. Names: iouring/tree.h.
 *
 * Publishing is atomic and the first publisher of a chunk wins; objects are immutable. The store may be a local
 * directory, a cachegenfs mount or a remote mount of either: nothing here relies on link counts, O_TMPFILE,
 * RENAME_NOREPLACE or nanosecond times, and where hard links fail (EPERM, EMLINK, EXDEV, EOPNOTSUPP) copies are made.
 * Threads: a cg_store is read-only after cg_store_open() and may be shared; each call works on the caller's cg_io.
 */
#ifndef CG_IOURING_STORE_H
#define CG_IOURING_STORE_H
#include "codec/chunk.h"
#include "iouring/io.h"
#include "iouring/tree.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_store cg_store;

/* Opens root/model; with create, makes root/model and its folders (0700). CG_ERR_NOT_FOUND without. */
cg_status cg_store_open(const char *root, const char *model, bool create, cg_store **store_out);
void cg_store_free(cg_store *store);
int cg_store_root_fd(const cg_store *store);       /* for cg_io calls with paths of tree.h; the store's */
const char *cg_store_model(const cg_store *store);

/* What the store has of one chunk. */
typedef struct cg_store_entry {
    uint8_t levels;                       /* bit n: level n is there */
    uint64_t level_bytes[CG_N_LEVELS];
} cg_store_entry;

/* Probes keys[n_keys] at the levels of level_mask (profile: whose L1..L3; NULL: L0 only) with one batch of stats kept
 * queue_depth deep. entries_out[n_keys]. A path that errs is "not there"; *n_errors_out (may be NULL) counts those
 * errors that are not CG_ERR_NOT_FOUND. Stops at deadline_ns (CLOCK_MONOTONIC, 0 = none): CG_ERR_TIMED_OUT, and
 * what came back until then stands in entries_out. The cg_io must be idle. */
cg_status cg_store_lookup(const cg_store *store, cg_io *io, const cg_key *keys, size_t n_keys,
                          const cg_fingerprint *profile, uint8_t level_mask, uint64_t deadline_ns,
                          cg_store_entry *entries_out, uint32_t *n_errors_out);

/* Publishes a chunk under its own key, level and profile, and `tokens` beside it; verifies it first
 * (cg_chunk_verify). CG_OK also when the chunk is there already (*existed_out, may be NULL). The cg_io must be idle. */
cg_status cg_store_publish(const cg_store *store, cg_io *io, const uint8_t *chunk, size_t chunk_bytes,
                           bool *existed_out);

/* One chunk of a context. */
typedef struct cg_store_link {
    cg_key key;
    uint8_t levels;    /* bit n: link level n */
} cg_store_link;

/* Makes contexts/<name> from published chunks: links (or copies) of them, tokens, profile.cgp, model.json, and
 * context.json last (its presence makes the context). An existing context of that name is replaced when its chunk
 * list differs. json_text: see FORMAT.md, "context.json". */
cg_status cg_store_context_publish(const cg_store *store, cg_io *io, const char *name, const cg_store_link *links,
                                   size_t n_links, const cg_fingerprint *profile, const uint32_t *tokens,
                                   size_t n_tokens);

/* Makes sure that the chunk file at path (relative to the root, a CG_TREE_CONTEXT_CHUNK that cg_chunk_verify took)
 * can be found by its key: links or copies it to its object path unless that exists. What cachegenfs calls when a
 * context is copied in. */
cg_status cg_store_adopt(int root_fd, const char *path, const cg_chunk_header *header);

#ifdef __cplusplus
}
#endif
#endif
