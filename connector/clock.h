/* connector/clock.h - the clock by which processes agree; within one it is iouring/clock.h.
 *
 * A plan crosses processes, so it carries by CLOCK_BOOTTIME when its look-up began. Only processes
 * that share that clock can compare such times; so an identity of the clock goes with them.
 * Threads: any.
 */
#ifndef CG_CONNECTOR_CLOCK_H
#define CG_CONNECTOR_CLOCK_H
#include "codec/key.h"
#include "iouring/clock.h" /* cg_now_ns() */

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

uint64_t cg_boot_ns(void); /* CLOCK_BOOTTIME: goes on while the machine sleeps */

/* Milliseconds, as they are configured, in ns. */
static inline uint64_t cg_ms(uint64_t ms)
{
    return ms * UINT64_C(1000000);
}

/* The identity of this process's CLOCK_BOOTTIME, made of the boot's identity and the time
 * namespace. All zeros: it is not known (no /proc). It reads files: ask once. */
cg_key cg_boot_clock_id(void);
/* How long ago started_ns was, by the clock clock_id. here, now_ns: this process's clock and its
 * time. 0 if that cannot be told: the clock is another machine's or of before a restart, or the
 * time is still to come. */
uint64_t cg_boot_elapsed_ns(const cg_key *clock_id, uint64_t started_ns, const cg_key *here,
                            uint64_t now_ns);

#ifdef __cplusplus
}
#endif
#endif
