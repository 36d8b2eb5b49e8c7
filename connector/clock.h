/* connector/clock.h - the two clocks of the connector, in nanoseconds.
 *
 * Deadlines and durations are CLOCK_MONOTONIC, which nobody sets. Only a plan, which crosses
 * processes, carries CLOCK_REALTIME: when its look-up began.
 */
#ifndef CG_CONNECTOR_CLOCK_H
#define CG_CONNECTOR_CLOCK_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

uint64_t cg_now_ns(void);      /* CLOCK_MONOTONIC */
uint64_t cg_realtime_ns(void); /* CLOCK_REALTIME */

#ifdef __cplusplus
}
#endif
#endif
