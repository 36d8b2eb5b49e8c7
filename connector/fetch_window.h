/* connector/fetch_window.h - how much a plan of reads has under way at once, and how large a range
 * is.
 *
 * No I/O, no clock, no lock. Times are nanoseconds of any one clock.
 * Threads: plain data; the owner locks.
 */
#ifndef CG_CONNECTOR_FETCH_WINDOW_H
#define CG_CONNECTOR_FETCH_WINDOW_H
#include "connector/fetch.h"
#include "connector/speeds.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CG_FETCH_PAGE_BYTES = 4096 }; /* ranges begin on pages */

typedef struct cg_fetch_window {
    uint32_t depth;     /* reads under way, at most; constant */
    uint32_t n_reading; /* under way; the plan's, as the next two */
    uint64_t bytes_reading;
    bool is_expecting;         /* other loads, when a read was asked for last */
    uint64_t bytes_since_idle; /* of its reads, that came since none had come for a while */
    uint32_t idle_added;       /* samples of the link, when it was idle last */
    uint32_t n_from_memory;    /* reads in a row; 0: none had ended for a while */
} cg_fetch_window;

/* The link's speed as far as it was measured, 0: not at all. What was only told may be wrong by any
 * factor, so no reads are staked on it. */
double cg_fetch_measured_bps(const cg_speeds *speeds);
/* How much may be under way of chunks of which chunk_bytes must arrive, over a link that is
 * trusted: what it moves in 30 ms and two round trips. For a far store it may be smaller or larger:
 * three chunks, or what the link moves in two round trips, but no more than in 60 ms and two round
 * trips.
 */
double cg_fetch_full_window(const cg_speeds *speeds, double link_bps, uint64_t chunk_bytes);

/* Forgets what came before the link was idle. alive_ns: when bytes arrived last, or it was idle. */
void cg_fetch_window_note_idle(cg_fetch_window *window, const cg_speeds *speeds, uint64_t alive_ns,
                               uint64_t now_ns);
/* Whether the estimate is of before the link was idle for half a second: it may be wrong by any
 * factor. It is trusted again after a sample that is as fast as before, after two samples of any
 * speed (so few before don't change it), or after two reads from memory: there are no samples then.
 */
bool cg_fetch_window_is_untried(const cg_fetch_window *window, const cg_speeds *speeds);
/* A read has ended with n_bytes, or 0: it failed. The speeds' link learns from it. Returns the
 * read's share of the time in which the link was busy, in ns. */
double cg_fetch_window_read_ended(cg_fetch_window *window, cg_speeds *speeds, cg_link_mark mark,
                                  uint64_t n_bytes, uint64_t begun_ns, uint64_t ended_ns);

/* Whether n_bytes more of a chunk may be under way now; two ranges always may. */
bool cg_fetch_window_has_room(const cg_fetch_window *window, const cg_fetch *fetch,
                              uint32_t chunk_index, const cg_speeds *speeds, double link_bps,
                              uint64_t n_bytes);
/* How large the next range of a chunk may be: 1 MiB at most, and what a slow link moves in 30 ms
 * where the rest of the chunk may have to be done without: not where the plan has slack, for small
 * ones cost round trips. Of a far store ranges are of different size. */
uint64_t cg_fetch_range_bytes(const cg_fetch_window *window, const cg_fetch *fetch,
                              uint32_t chunk_index, const cg_speeds *speeds, double link_bps,
                              bool has_slack);
/* Where the next range of a chunk ends, which is to be read up to `to` at least: on a page, unless
 * the file ends. */
uint64_t cg_fetch_range_end(const cg_fetch *fetch, uint32_t chunk_index, uint64_t to,
                            uint64_t file_bytes, uint64_t range_bytes);
/* Whether the first range of a file is read alone, so that the file is opened once: each opening
 * may make a network file system forget what it has cached of it. Over a fast link the first is
 * there soon, and of a far store the look-up has opened the file. */
bool cg_fetch_opens_alone(const cg_speeds *speeds, double link_bps);

#ifdef __cplusplus
}
#endif
#endif
