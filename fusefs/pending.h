/* fusefs/pending.h - pending files: those that are being written under strict names.
 *
 *            create, mknod                  flush or fsync of a valid file
 *   (nothing) ------------->  WAITING  ------------------------------------->  PUBLISHED
 *                              |    \  unlink by its creator
 *      last release            |     ---------------------->  CANCELLED
 *      (forget, after mknod)   v
 *                          discarded
 *
 * While WAITING the file lies in the staging directory. Its name exists for the process that
 * created it, and for nobody else. (That process may need it: sftp-server asks for attributes by
 * name between open and write.)
 * Threads: the list and n_users are under the nodes' lock. state, parent and name change only under
 * that lock and with the node's gate in CHECKING. So either of the two is enough to read them.
 */
#ifndef CG_FUSEFS_PENDING_H
#define CG_FUSEFS_PENDING_H
#include "fusefs/core.h"
#include "fusefs/staging.h"

typedef enum cg_pending_state {
    CG_PENDING_WAITING = 0,
    CG_PENDING_PUBLISHED = 1,
    CG_PENDING_CANCELLED = 2,
    CG_PENDING_LEFT = 3, /* its last user is gone, and it is to be discarded */
} cg_pending_state;

enum { CG_PENDING_IDLE_S = 60 };

struct cg_fs_pending {
    cg_fs_node *node, *parent; /* pinned */
    char *name;
    char temporary[CG_STAGING_NAME_BYTES];
    int fd;
    pid_t creator; /* a process */
    uid_t uid;     /* whose it is: users may have so many (fusefs/users.h) */
    cg_pending_state state;
    bool stays; /* made by mknod: one user more, until the kernel forgets it (NFS has no close) */
    uint32_t n_users;
    int64_t used_s;      /* CLOCK_MONOTONIC: when it was last made or used; under the nodes' lock */
    cg_fs_pending *next; /* of those that wait, or of those that are left for cg_fs_discard() */
};

/* Makes a new file that will be `name` in parent (dir_fd), with one look-up of its node and one
 * user. 0 or an errno value; EDQUOT: the caller has too many waiting files. Of those the one goes
 * that was not used for longest, if that is CG_PENDING_IDLE_S, mknod made it, and nobody has it
 * open. */
int cg_pending_new(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *parent, int dir_fd,
                   const char *name, mode_t mode, bool stays, cg_fs_entry *entry_out,
                   cg_fs_pending **pending_out);
/* The waiting file of this name that the caller's process created, with one more user; or NULL. */
cg_fs_pending *cg_pending_find(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *parent,
                               const char *name);
/* Whether any process has one of this name. */
bool cg_pending_is_waiting(cg_fs *fs, const cg_fs_node *parent, const char *name);
/* The node's waiting file, or NULL; with one more user. */
cg_fs_pending *cg_pending_of(cg_fs *fs, cg_fs_node *node);
/* Takes a user away. With the last one a file that is still waiting is gone for all; if
 * cg_fs_discard() runs, that removes it from the store. */
void cg_pending_put(cg_fs *fs, cg_fs_pending *pending);
/* The kernel forgets the node. */
void cg_pending_forget(cg_fs *fs, cg_fs_node *node, uint64_t n_lookups);

/* Ends the waiting: the file is of this state from now on. The gate must be in CHECKING. Returns
 * the user that mknod left, which the caller puts when the gate is open again; or NULL. */
cg_fs_pending *cg_pending_end(cg_fs *fs, cg_fs_pending *pending, cg_pending_state state);
/* For unlink() by the creator: the file will be discarded at its last release. */
void cg_pending_cancel(cg_fs *fs, cg_fs_pending *pending);
/* For the end of a mount: discards all waiting files. */
void cg_pending_discard_all(cg_fs *fs);
#endif
