/* fusefs/claims.h - keeps writing a file and publishing it apart, between daemons.
 *
 * In one daemon a gate does that (fusefs/nodes.h). A store may have several daemons. So whoever
 * opens an ordinary file for writing claims it shared, and whoever checks it in order to publish it
 * claims it alone. A claim is a flock(2) on the store's file. It ends with its descriptor at the
 * latest, also when a daemon is killed.
 * Limits: a claim reaches as far as the locks of the store's file system do. Where there are none,
 * it is always granted. Programs that write to the store without a daemon make no claims.
 * Threads: pure functions on descriptors.
 */
#ifndef CG_FUSEFS_CLAIMS_H
#define CG_FUSEFS_CLAIMS_H

#ifdef __cplusplus
extern "C" {
#endif

/* 0, or ETXTBSY: somebody is about to publish the file. */
int cg_claim_to_write(int fd);
/* 0, or EBUSY: it is open for writing. Waits a moment for descriptors that are being closed. */
int cg_claim_to_publish(int fd);
void cg_claim_end(int fd);

#ifdef __cplusplus
}
#endif
#endif
