/* iouring/context_state.h - a context while it is published, for the files that do that.
 *
 * store_context.c says what is done in which order, checks the chunks and installs the files.
 * context_json.c writes the context.json and compares it with the one that is there;
 * context_there.c knows what the context's folder has. All know this struct.
 *
 * Threads: a publication is one thread's.
 */
#ifndef CG_IOURING_CONTEXT_STATE_H
#define CG_IOURING_CONTEXT_STATE_H
#include "iouring/store_internal.h"

/* Which name among the objects a level is linked from: the finest that is of its file. */
typedef struct cg_context_source {
    cg_level from;
    uint64_t bytes; /* that the level needs of it; 0: it is not known yet */
    bool is_synced; /* the file is on disk, as the name `from` of this context told */
} cg_context_source;

typedef struct cg_context {
    const cg_store *store;
    const char *name;
    const cg_store_link *links;
    size_t n_links;
    const cg_fingerprint *profile;
    cg_chunk_header *headers; /* [n_links], of the finest level linked. Of a chunk that is kept only
                                 what context.json says: model, key, first_position, n_tokens */
    cg_context_source (*sources)[CG_N_LEVELS]; /* [n_links] */
    uint8_t *tokens;                           /* as the file has them */
    size_t tokens_bytes;
    bool has_lossy_level;
    char *json;
    size_t json_bytes;
    /* Of the context that is there: */
    char *old_json; /* NULL: none, or it cannot be read */
    bool has_old_json;
    bool tokens_continue, tokens_are_same; /* its tokens go on in ours, or are ours */
    uint64_t n_old_tokens;                 /* which ours begin with */
    bool keeps_profile;                    /* its context.json speaks of the same */
    bool is_listed;                        /* there[] is known */
    bool *kept;                            /* [n_links]: its context.json says the same of it */
    uint8_t *there;                        /* [n_links]: levels whose names it has */
} cg_context;

/* --- context_json.c --- */

/* Makes json, of the headers. */
cg_status cg_context_make_json(cg_context *c);
/* Which chunks old_json names as ours will: then their headers are made of what it says. Sets kept
 * and keeps_profile. Whether it keeps a chunk. */
bool cg_context_keep_chunks(cg_context *c);

/* --- context_there.c --- */

typedef enum cg_presence { CG_ABSENT, CG_SAME, CG_OTHER } cg_presence;

/* Reads what of the context that is there need not be asked for. */
cg_status cg_context_look_at_old(cg_context *c);
/* What the context.json that is there says is not believed, after all. */
void cg_context_forget_old(cg_context *c);
/* Whether publishing changes a file of the context that is there, not only adds some. */
cg_status cg_context_find_conflict(const cg_context *c, bool *conflict_out);

/* path: that of chunk index in the context. */
cg_presence cg_context_chunk_presence(const cg_context *c, const char *path, size_t index,
                                      cg_level level);
/* The same, without a question where what is there is known. */
cg_presence cg_context_known_presence(const cg_context *c, const char *path, size_t index,
                                      cg_level level);
/* Both: [CG_TREE_PATH_BYTES]. */
cg_status cg_context_profile_paths(const cg_context *c, char *installed_out, char *in_context_out);
/* A profile of many MiB is not read, twice over a network, to see that it is what context.json
 * says. */
cg_presence cg_context_profile_presence(const cg_context *c, const char *in_context,
                                        const char *installed);
/* Equal when they are one file, or have the same bytes. */
cg_presence cg_context_file_presence(int dir_fd, const char *path, const char *wanted);
/* Whether the context.json that is there now is this text; NULL: whether there is none. */
bool cg_context_json_is(const cg_context *c, const char *json);
/* Visits the files of chunks that the context's folder of this level has, until a visit says
 * false. */
void cg_context_list_chunks(const cg_context *c, unsigned level,
                            bool (*visit)(void *user, int dir_fd, const char *leaf, uint32_t index),
                            void *user);
#endif
