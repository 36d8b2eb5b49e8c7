/* connector/link.h - what all connectors of a process know of the link to one storage target.
 *
 * An engine's scheduler and its workers may be connectors of one process, and so may two engines.
 * If their stores lie on one device (st_dev), they share a link, and what one of them measures
 * holds for all. So the estimate and the meter belong to the link. A connector borrows them into
 * its cg_speeds for the time of a call, and tells what its loads still want of the link.
 *
 * Links are the only state of the whole process. A link lives as long as a connector uses it. After
 * fork() the child begins anew, as with runtimes: the parent's lock may be held by a thread that
 * the child does not have.
 * Threads: any. The link's lock is taken inside a runtime's lock and never outside it, and only for
 * pure computing.
 */
#ifndef CG_CONNECTOR_LINK_H
#define CG_CONNECTOR_LINK_H
#include "codec/key.h"
#include "connector/reader_files.h"
#include "connector/speeds.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_link cg_link;

/* The link of a device, made if need be; NULL without memory. Give it back with cg_link_put(). */
cg_link *cg_link_get(uint64_t device);
/* Gives the link back. wanted: what the caller last told cg_link_return(). NULL is fine. */
void cg_link_put(cg_link *link, cg_wanted wanted);

/* What a look-up has said that a load will have of the link, until that load begins. */
typedef struct cg_link_promise {
    cg_key plan;   /* that says so: cg_plan_id() */
    cg_key prefix; /* what the look-up found, without a tail: requests that find the same share the
                      load */
    double bytes, decode_ns;
    uint64_t until_ns; /* then nobody keeps it any more */
} cg_link_promise;

/* Remembers a promise. Of several of one prefix the first stands, for what the largest of them
 * takes: requests that want the same share its load. Of more than a few dozen the oldest is lost.
 * NULL is fine. */
void cg_link_promise_add(cg_link *link, const cg_link_promise *promise, uint64_t now_ns);
/* The load of that plan begins, or it never will. NULL is fine. */
void cg_link_promise_end(cg_link *link, const cg_key *plan);
/* The sum of what is promised for other prefixes than this one; *decode_ns_out: what decoding that
 * takes. NULL: nothing is. */
cg_wanted cg_link_promised(cg_link *link, const cg_key *prefix, uint64_t now_ns,
                           double *decode_ns_out);

/* The files that its readers share, as long as the link is held; NULL: there are none, or link is
 * NULL. */
cg_reader_files *cg_link_files(const cg_link *link);

/* Locks the link and copies what is known of it to *speeds: all of .link but its kind and its
 * prior, which are the connector's own, .meter and .others. NULL is fine. */
void cg_link_borrow(cg_link *link, cg_speeds *speeds);
/* Takes back what was borrowed, and unlocks. speeds->wanted: what the connector's loads still must
 * have. */
void cg_link_return(cg_link *link, cg_speeds *speeds);

#ifdef __cplusplus
}
#endif
#endif
