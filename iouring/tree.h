/* iouring/tree.h - the names in a store: which paths hold chunks, and what a chunk at a path must
 * be.
 *
 *   <model>/model.json
 *   <model>/profiles/<fingerprint>.cgp
 *   <model>/profiles/default                    a text file: a fingerprint and a newline
 *   <model>/objects/ab/<key>/L0.kv              ab: the first two digits of the key
 *   <model>/objects/ab/<key>/<fp8>-L1.kv        to <fp8>-L3.kv; fp8: the first 8 digits of the
 *                                               profile's fingerprint
 *   <model>/contexts/<name>/context.json        also tokens, model.json, profile.cgp
 *   <model>/contexts/<name>/L0/00000.kv         to L3/99999.kv
 *
 * Keys and fingerprints are 32 lower-case hexadecimal digits. A nested chunk has a name for each of
 * its levels: hard links of one file. The name of a coarser level may also be a file of its own,
 * which ends where the level does.
 *
 * Names of *.kv and *.cgp at these places are strict, except profile.cgp: such a name holds one
 * whole, valid chunk or profile that agrees with it, or it cannot be found. Everything else is
 * ordinary. So is all that lies in the folder quarantine/, where what was damaged is put
 * (fusefs/fsck.h): no model has this name.
 * Threads: pure functions.
 */
#ifndef CG_IOURING_TREE_H
#define CG_IOURING_TREE_H
#include "codec/chunk.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CG_TREE_NAME_BYTES = 256,
    CG_TREE_PATH_BYTES = 1024,
    CG_TREE_FP8_DIGITS = 8,
    CG_TREE_MAX_CHUNKS = 100000
};

#define CG_TREE_QUARANTINE "quarantine"

/* No text of a store is read further (context.json, model.json, profiles/default, the quarantine's
 * list): a context.json of all the chunks that a context can have is smaller. */
enum { CG_TREE_MOST_TEXT_BYTES = 64 << 20 };

typedef enum cg_tree_kind {
    CG_TREE_ORDINARY = 0, /* no rule speaks of it */
    CG_TREE_OBJECT_CHUNK = 1,
    CG_TREE_CONTEXT_CHUNK = 2,
    CG_TREE_PROFILE = 3, /* profiles/<fp>.cgp: strict too, a valid profile of that fingerprint */
    CG_TREE_CONTEXT_PROFILE = 4, /* contexts/<name>/profile.cgp */
    CG_TREE_CONTEXT_JSON = 5,
    CG_TREE_CONTEXT_MODEL = 6, /* contexts/<name>/model.json */
} cg_tree_kind;

typedef struct cg_tree_name {
    cg_tree_kind kind;
    char model[CG_TREE_NAME_BYTES];
    char context[CG_TREE_NAME_BYTES]; /* of the CONTEXT kinds */
    cg_key key;                       /* OBJECT_CHUNK; PROFILE: the fingerprint */
    char fp8[CG_TREE_FP8_DIGITS + 1]; /* OBJECT_CHUNK at L1..L3, else "" */
    uint8_t level;                    /* the CHUNK kinds */
    uint32_t index;                   /* CONTEXT_CHUNK: the chunk's place in the context */
} cg_tree_name;

/* Reads a path, which is relative to the store's root and has no leading slash. Never fails: a path
 * that follows no rule is ORDINARY. So is one that is too long, or has an empty, "." or ".."
 * component. */
void cg_tree_parse(const char *path, cg_tree_name *name_out);

/* Whether a chunk with this header may be published under this name. It must hold the level; a
 * nested one holds several, and may have a name for each. For an object, key and fp8 must agree.
 * CG_ERR_FOREIGN_TOKENS: another key. CG_ERR_FOREIGN_PROFILE: another fp8. CG_ERR_INVALID_ARGUMENT:
 * not this level. */
cg_status cg_tree_check(const cg_tree_name *name, const cg_chunk_header *header);

/* Whether path, relative to the store, is a folder in which these rules look for files: <model>,
 * objects, objects/ab, objects/ab/<key>, contexts, contexts/<name>, contexts/<name>/L0 ...,
 * profiles. Adopting (iouring/store.h) walks these folders by name. A symbolic link in place of one
 * could lead a daemon that runs as root anywhere. So a mount lets nobody put one there. */
bool cg_tree_is_folder(const char *path);

/* Whether text can name a context: 1..255 bytes, no '/', not starting with '.', no control
 * characters. */
bool cg_tree_name_is_valid(const char *text);
/* Whether text can name a model: as above, and not the quarantine. */
bool cg_tree_model_is_valid(const char *text);

/* "<model>/objects/ab/<key>/<fp8>-L2.kv" (or ".../L0.kv"; profile may be NULL at L0).
 * CG_ERR_INVALID_ARGUMENT: bad model name or level. CG_ERR_BUFFER_TOO_SMALL. */
cg_status cg_tree_object_path(const char *model, const cg_key *key, cg_level level,
                              const cg_fingerprint *profile, char *path_out, size_t path_bytes);
/* "<model>/contexts/<context>/L2/00012.kv". CG_ERR_INVALID_ARGUMENT also for index >=
 * CG_TREE_MAX_CHUNKS. */
cg_status cg_tree_context_path(const char *model, const char *context, cg_level level,
                               uint32_t index, char *path_out, size_t path_bytes);
/* "<model>/contexts/<context>/<leaf>"; leaf is not checked: "context.json", "tokens",
 * "profile.cgp", "model.json". */
cg_status cg_tree_context_file_path(const char *model, const char *context, const char *leaf,
                                    char *path_out, size_t path_bytes);
/* "<model>/profiles/<fp32 hex>.cgp" */
cg_status cg_tree_profile_path(const char *model, const cg_fingerprint *profile, char *path_out,
                               size_t path_bytes);
/* "<model>/<leaf>"; leaf is not checked: "model.json", "profiles/default". */
cg_status cg_tree_model_file_path(const char *model, const char *leaf, char *path_out,
                                  size_t path_bytes);

#ifdef __cplusplus
}
#endif
#endif
