/* iouring/store.h - a model's part of a store: look-up by key, publishing, contexts. Names:
 * iouring/tree.h.
 *
 * Publishing is atomic and the first publisher of a chunk wins; objects are immutable. The store
 * may be a local directory, a cachegenfs mount or a remote mount of either: nothing here relies on
 * link counts, O_TMPFILE, RENAME_NOREPLACE or nanosecond times, and where hard links fail (EPERM,
 * EMLINK, EXDEV, EOPNOTSUPP) copies are made.
 * Threads: a cg_store is read-only after cg_store_open() and may be shared; each call works on the
 * caller's cg_io.
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

/* Opens root/model; with create, makes root/model and its folders (0700), and root itself if only
 * that is missing.
 * CG_ERR_NOT_FOUND without. */
cg_status cg_store_open(const char *root, const char *model, bool create, cg_store **store_out);
void cg_store_free(cg_store *store);
const char *cg_store_model(const cg_store *store);

/* What the store has of one chunk. */
typedef struct cg_store_entry {
    uint8_t levels; /* bit n: level n is there */
    uint64_t level_bytes[CG_N_LEVELS];
} cg_store_entry;

/* Probes keys[n_keys] at the levels of level_mask (profile: whose L1..L3; NULL: L0 only) with one
 * batch of stats kept queue_depth deep. entries_out[n_keys]. A path that errs is "not there";
 * *n_errors_out (may be NULL) counts those errors that are not CG_ERR_NOT_FOUND. Stops at
 * deadline_ns (CLOCK_MONOTONIC, 0 = none): CG_ERR_TIMED_OUT, and what came back until then stands
 * in entries_out. The cg_io must be idle.
 *
 * level_bytes is what a reader of the level has to read. Names of several lossy levels that are as
 * long as one another are one nested file: a second batch reads the fixed headers of such files;
 * where one is no good, those levels are "not there". For this to show, L2 or L3 without the next
 * finer level in level_mask costs one stat more. Where that one's name is missing in the store, or
 * the deadline ends the second batch, the size may be that of the whole file: there a finer level
 * ends, and who reads so far has the chunk at that one. On a cachegenfs mount each name ends with
 * its level, and there is no second batch. */
cg_status cg_store_lookup(const cg_store *store, cg_io *io, const cg_key *keys, size_t n_keys,
                          const cg_fingerprint *profile, uint8_t level_mask, uint64_t deadline_ns,
                          cg_store_entry *entries_out, uint32_t *n_errors_out);

/* Submits a read of an object's first n_bytes: of level_bytes, to have the chunk at that level. It
 * completes in cg_io_wait() as one of cg_io_read_start(), which also says what it can return at
 * once. CG_ERR_INVALID_ARGUMENT also: profile is NULL at L1..L3. Any number may be under way. */
cg_status cg_store_read(const cg_store *store, cg_io *io, const cg_key *key, cg_level level,
                        const cg_fingerprint *profile, uint64_t n_bytes, cg_io_cache cache,
                        uint64_t user);

/* Publishes a chunk under its own key, level and profile, and `tokens` beside it; verifies it first
 * (cg_chunk_verify). A nested one is written under its finest level's name; names of the coarser
 * ones that are not there become links of it, or copies of what they need. CG_OK also when the
 * chunk is there already, at its finest level (*existed_out, may be NULL): then only missing names
 * are added, of the file that is there where it holds their level. The cg_io must be idle. */
cg_status cg_store_publish(const cg_store *store, cg_io *io, const uint8_t *chunk,
                           size_t chunk_bytes, bool *existed_out);

/* Replaces objects that turned out to be damaged; publishing leaves what is there. The bytes are of
 * a chunk that was published, or would be: verified first. Bit n of `damaged`: the object of level
 * n is; levels that the chunk does not hold are passed over. Names of the chunk's other levels that
 * are links of a damaged file get the new one, too, so that the levels stay one file. Objects of
 * other publishers stay. *replaced_out: bit n: level n has the new file.
 * Each name changes atomically. (On a cachegenfs mount the names of coarser levels are gone for a
 * moment.) The cg_io must be idle. */
cg_status cg_store_replace(const cg_store *store, cg_io *io, const uint8_t *chunk,
                           size_t chunk_bytes, uint8_t damaged, uint8_t *replaced_out);

/* Writes <model>/model.json, unless it is there. The cg_io must be idle. */
cg_status cg_store_publish_model(const cg_store *store, cg_io *io, const char *json,
                                 size_t n_bytes);

/* One chunk of a context. */
typedef struct cg_store_link {
    cg_key key;
    uint8_t levels; /* bit n: link level n */
} cg_store_link;

/* Makes contexts/<name> from published chunks: links of them (or copies, of nested ones to the end
 * of the level), tokens, profile.cgp, model.json, and context.json last (its presence makes the
 * context). An existing context of that name is replaced when its chunk list differs; if that
 * changes files that its context.json speaks of, that context.json goes first.
 *
 * context.json, in UTF-8:
 *   {"version":1,"model":"<model>","model_fingerprint":"<32 hex>",
 *    "profile":"<32 hex>" or null,"n_tokens":N,
 *    "chunks":[{"key":"<32 hex>","first_position":P,"n_tokens":n,"levels":["L0","L2"]}, ...]}
 * The chunks are in order, without gaps from position 0 to n_tokens; chunk i at level l is l/<i as
 * 5 digits>.kv. profile is null when no level but L0 is linked.
 *
 * CG_ERR_INVALID_ARGUMENT: the name; no link; a link without levels. CG_ERR_NOT_FOUND: a chunk at a
 * linked level, or with L1..L3 the profile in profiles/. CG_ERR_FOREIGN_TOKENS: the links are no
 * chain of these tokens.
 * CG_ERR_FOREIGN_PROFILE, CG_ERR_FOREIGN_MODEL. The cg_io must be idle. */
cg_status cg_store_context_publish(const cg_store *store, cg_io *io, const char *name,
                                   const cg_store_link *links, size_t n_links,
                                   const cg_fingerprint *profile, const uint32_t *tokens,
                                   size_t n_tokens);

/* What adopting tells of each file and folder that it makes, right after it has made it: leaf in
 * the directory dir_fd, with mode 0600 (a folder: 0700) and the owner that a new file of this
 * process has. A hard link is not made anew. from: the file of a context for whose sake it was
 * made, relative to the root. A status other than CG_OK ends the adopting with it. */
typedef struct cg_store_hook {
    cg_status (*created)(void *user, const char *from, int dir_fd, const char *leaf,
                         bool is_folder);
    void *user;
} cg_store_hook;

/* Adopts a chunk of a context: makes sure that it can be found by its key, at all levels that it
 * holds. cachegenfs calls this when a context is copied in. Object names that are missing become
 * links of the file, or copies. path, relative to the root, is a CG_TREE_CONTEXT_CHUNK that
 * cg_chunk_verify took; header is its fixed header.
 * The levels of a nested chunk may have come as files of their own, in any order. Then their names,
 * in the context and among the objects, become links of the longest file. So a context takes the
 * space of its finest level. A file takes part if it is, byte by byte, the start of the longest,
 * and owner, mode and time of modification are the same (rsync knows by the time what it has
 * brought). CG_ERR_PERMISSION: a folder above the object is a symbolic link. */
cg_status cg_store_adopt(int root_fd, const cg_store_hook *hook, const char *path,
                         const cg_chunk_header *header);

/* The same for contexts/<name>/profile.cgp. Installs it as profiles/<fingerprint>.cgp, and writes
 * `default` if there is none. Refuses what cg_profile_open() refuses. CG_ERR_INVALID_ARGUMENT: path
 * is no such name. */
cg_status cg_store_adopt_profile(int root_fd, const cg_store_hook *hook, const char *path);
/* The same for contexts/<name>/model.json: copies it to <model>/model.json unless that exists.
 * CG_ERR_CORRUPT: it does not start as a JSON object. */
cg_status cg_store_adopt_model(int root_fd, const cg_store_hook *hook, const char *path);
/* Adopts all chunks, profiles and model.json below contexts/ of all models. A mount does this at
 * its start, for contexts that came past it. A chunk that can be found already costs a look at a
 * few headers. Others are verified whole first. Files that are no good are passed over.
 * *n_adopted_out (may be NULL): chunks that could not be found before.
 * CG_ERR_NO_SPACE, CG_ERR_READ_ONLY and CG_ERR_NO_MEMORY end it early. */
cg_status cg_store_adopt_tree(int root_fd, const cg_store_hook *hook, uint32_t *n_adopted_out);

#ifdef __cplusplus
}
#endif
#endif
