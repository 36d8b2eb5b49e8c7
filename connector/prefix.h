/* connector/prefix.h - the longest prefix of a prompt that a store has.
 *
 * A prompt is cut into full chunks, and may end in a tail: a shorter chunk, whose end is at a
 * multiple of tail_multiple tokens. A chunk's key names all tokens before it, too, so the first
 * chunk that is missing ends the prefix. Only a tail may still follow, left by a prompt that ended
 * there.
 * A search has at most three stages, since the store may be a network away. The first, of long
 * prompts only, is a coarse look at how far the prefix can reach. The second wants all chunks, the
 * third tails at a hole. What the runtime remembers of chunks answers at once; what it does not is
 * the store's to answer (connector/asking.h).
 *
 * A far store that answers few questions at a time is asked for a few chunks of a long prefix only.
 * A store mostly has what lies between two chunks of a chain that it has. The others are taken to
 * have the levels and sizes of the one before them that was asked for, and are marked as guessed.
 * The load finds out, from the start of each file. A load that fails at a guessed chunk makes those
 * behind it doubted for a while. Chunks with L0 are all asked for: its name is another one, so that
 * the load would not find out.
 * Threads: a cg_prefix is used by one thread at a time. Functions take the runtime's lock
 * themselves, for moments.
 */
#ifndef CG_CONNECTOR_PREFIX_H
#define CG_CONNECTOR_PREFIX_H
#include "connector/plan.h"
#include "connector/runtime.h"

typedef enum cg_prefix_stage {
    CG_PREFIX_END,    /* how far does it reach */
    CG_PREFIX_CHUNKS, /* wanted are chunks, and the tails that may follow the last */
    CG_PREFIX_TAILS,  /* wanted are tails at a hole */
    CG_PREFIX_DONE
} cg_prefix_stage;

enum { CG_PREFIX_MAX_PROBES = 34 }; /* of a coarse look */

typedef struct cg_prefix {
    cg_runtime *runtime;
    uint32_t *tokens; /* the whole prompt */
    uint32_t n_tokens;
    cg_key root, extra;
    uint8_t worst_level;          /* provenance worse than this is not accepted */
    uint8_t accepted;             /* mask of levels that may be loaded */
    bool no_tail_at_hole;         /* a tail is taken at the prompt's end only */
    uint32_t first_chunk, n_full; /* chunks before first_chunk are not looked for */
    cg_key *keys;                 /* [n_full] */

    cg_prefix_stage stage;
    bool is_sparse;               /* few chunks are asked for */
    uint32_t reach;               /* in the first stage: chunks before it seem to be there */
    uint32_t end;                 /* chunks from here on are of no use */
    uint32_t stride;              /* of those that are asked for; 1: all are */
    cg_key *wanted;               /* [n_wanted] */
    cg_chunk_memory_entry *known; /* [n_wanted]: of wanted; probed 0: not known yet */
    uint32_t n_wanted;
    uint64_t asked_ns;    /* how long the store was asked for this prompt, */
    uint64_t patience_ns; /* and may be at most; the caller sets it */
    bool is_cancelled;    /* nobody wants it; the runtime's lock */
    bool is_given_up;     /* nothing more is asked */

    /* Found so far: chunks [first_chunk, first_chunk + n_chunks) with their accepted levels. */
    cg_plan_chunk *chunks; /* room for [n_full - first_chunk + 1] */
    uint32_t n_chunks;
} cg_prefix;

/* Copies what it needs of a request that was checked. The caller sets worst_level, accepted and
 * no_tail_at_hole, and calls cg_prefix_destroy() also after an error. CG_ERR_NO_MEMORY. */
cg_status cg_prefix_init(cg_prefix *prefix_out, cg_runtime *runtime,
                         const cachegen_request *request, uint32_t from_token);
void cg_prefix_destroy(cg_prefix *prefix);

/* Goes on as far as the runtime remembers chunks. CG_OK: the search is done. CG_ERR_AGAIN: the
 * store must be asked, for the chunks of cg_prefix_probes() in the first stage, else for those of
 * wanted that are not known. CG_ERR_NO_MEMORY: it is done, with what was found until then. */
cg_status cg_prefix_recall(cg_prefix *prefix);

/* Ends the search with what is known. */
void cg_prefix_give_up(cg_prefix *prefix);

/* In the first stage, after CG_ERR_AGAIN: which chunks show how far the prefix can reach.
 * indices_out[CG_PREFIX_MAX_PROBES]; returns how many, in rising order. */
uint32_t cg_prefix_probes(cg_prefix *prefix, uint32_t *indices_out);
/* The answer: chunks from end on are of no use; those before reach seem to be there. is_sparse: the
 * store answers few questions at a time. CG_ERR_NO_MEMORY: the search is done. */
cg_status cg_prefix_reaches(cg_prefix *prefix, uint32_t reach, uint32_t end, bool is_sparse);
/* Whether wanted[index] is asked for; else it is guessed. */
bool cg_prefix_asks(const cg_prefix *prefix, uint32_t index);

/* With the runtime's lock held: a load has failed at a chunk of a plan. If the chunk was guessed,
 * each chunk of a prefix that reaches beyond it is asked for, up to until_ns. What else was guessed
 * may be as wrong, and each wrong guess would fail a load of its own. */
void cg_prefix_doubt(cg_runtime *runtime, const cg_plan *plan, uint32_t chunk_index,
                     uint64_t until_ns);
#endif
