/* connector/fetch_state.h - the state of a plan of reads, which connector/fetch_plan.h makes,
 * fetch_link.h, fetch_items.h and fetch_reads.h work on, and fetch_exit.h judges.
 *
 * Threads: plain data; the owner locks.
 */
#ifndef CG_CONNECTOR_FETCH_STATE_H
#define CG_CONNECTOR_FETCH_STATE_H
#include "connector/extents.h"
#include "connector/fetch.h"
#include "connector/fetch_window.h"
#include "connector/speeds.h"

enum { CG_FETCH_HOPE = 2 }; /* the link may become so many times faster */

typedef struct cg_fetch_read {
    uint64_t id; /* never the same twice; 0: this place is free */
    cg_fetch *fetch;
    uint32_t chunk_index;
    uint8_t file_level; /* the name to read */
    bool is_stale;      /* of a file that turned out not to be the one to read */
    uint64_t from, bytes;
    uint64_t submitted_ns;
    cg_link_mark meter_mark; /* of the link's meter */
    uint64_t give_up_ns;     /* UINT64_MAX: never */
} cg_fetch_read;

typedef struct cg_fetch_ref {
    cg_fetch *fetch;
    uint32_t chunk_index;
} cg_fetch_ref;

typedef struct cg_fetch_plan {
    /* Constant: */
    uint64_t staging_bytes;   /* under way, held and not yet decoded, at most */
    uint64_t read_timeout_ns; /* of a read that has the link to itself */

    cg_fetch *fetches; /* those that are not done, the earliest deadline first */
    cg_fetch_window window;
    uint64_t bytes_held, bytes_decoding, last_id;
    uint64_t quiet_since_ns;    /* no read has ended since */
    uint64_t alive_ns;          /* bytes arrived, or it was idle, and not because reads failed */
    uint64_t patience_ns;       /* for so long nothing may arrive of what is under way */
    bool has_failed;            /* the read that ended last */
    uint64_t check_ns;          /* when to look again at what may be hopeless, */
    uint64_t checked_ns;        /* and when it was looked at last */
    uint64_t must_free_bytes;   /* by decoding what has arrived: the memory is needed */
    uint64_t asked_tokens;      /* of prompts that the owner looks up */
    uint64_t expected_tokens;   /* that others look up, as the owner was told; */
    uint64_t expected_until_ns; /* until then that holds; 0: nothing was told */
    uint64_t engine_until_ns;   /* so long the engine computes what it was given before; */
    uint64_t engine_untold_ns;  /* of that, what fetches lost of whose end nobody has heard yet */
    bool is_engine_told;        /* the owner is told at all */
    uint32_t n_added;           /* fetches, ever */
    cg_fetch_read *reads;       /* [window.depth] */

    /* What was planned last: */
    bool is_stale;
    bool members_changed; /* fetches came or went since: it does not stand */
    bool may_be_apart;    /* cg_fetch_plan_begin() is asked */
    bool is_making;       /* until cg_fetch_plan_end(): items and the plans are the maker's */
    bool is_link_known, any_open;
    cg_extents_input input;
    uint64_t planned_at_ns;
    size_t next_extent, capacity, n_items;
    cg_extents_chunk *items; /* [capacity], with what they stand for; */
    cg_fetch_ref *refs;      /* fetch is NULL: it was removed while the plan was made */
    cg_extents_plan planned, hoped;
} cg_fetch_plan;

#endif
