/* fusefs/claims.h - who writes an ordinary file, and who is about to publish it: between daemons.
 *
 * A gate (fusefs/nodes.h) keeps the two apart in one daemon. A store may have several. So whoever
 * opens an ordinary file for writing claims it, shared; whoever checks it in order to publish it
 * claims it alone. A claim is a flock(2) on the store's file. It ends with its descriptor at the
 * latest, also when a daemon is killed.
 * Limits: it reaches as far as the locks of the store's file system do. Where there are none, a
 * claim is always granted. Who writes to the store past all daemons makes none.
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
