/* fusefs/staging.h - where files lie while they are written under strict names:
 * <root>/.cachegenfs-tmp/<daemon>/.
 *
 * Each daemon has a folder there. Its name is random digits, which say nothing of the host. The
 * file in it by which others know that the daemon lives is that of fusefs/life.h. Folders of dead
 * daemons are removed: at the start, and then for as long as cg_staging_live() has a thread. The
 * mount hides .cachegenfs-tmp. All that a daemon needs to make room on a disk that is full by then
 * is written when its folder is made.
 * Threads: cg_staging_open(), _live() and _close() from one; the rest from any.
 */
#ifndef CG_FUSEFS_STAGING_H
#define CG_FUSEFS_STAGING_H
#include "fusefs/life.h"
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CG_STAGING_DIRECTORY ".cachegenfs-tmp"
#define CG_STAGING_NAME_FILE "name" /* in each folder: its name and a newline, for leases */
enum {
    CG_STAGING_NAME_BYTES = 24,
    CG_STAGING_OWN_BYTES = 33,
    CG_STAGING_SILENT_S = 60, /* a daemon of another host that was silent for so long is dead */
};

/* Tells what was found while we lived: folders of dead daemons were removed, with n_removed files;
 * or others took us for dead, and our folder is gone. */
typedef void cg_staging_told(void *user, uint64_t n_removed, bool was_taken_for_dead);

typedef struct cg_staging {
    int dir_fd; /* ours; -1: none */
    int all_fd; /* .cachegenfs-tmp */
    int lock_fd;
    int root_fd;        /* the store's, not ours */
    dev_t dev;          /* of all this: files can be renamed only within it */
    uint64_t n_created; /* atomic; a C++ test includes this header */
    cg_life_watch watch;
    unsigned silent_s;
    pthread_mutex_t remaking; /* of the next three */
    char own[CG_STAGING_OWN_BYTES];
    cg_life life;
    uint64_t n_made_again;
    pthread_t living;
    bool is_living;
    pthread_mutex_t ending_lock; /* of is_ending */
    pthread_cond_t ending;
    bool is_ending;
    cg_staging_told *told;
    void *told_user;
} cg_staging;

/* Removes what dead daemons left (*n_removed_out files), and makes our own folder. silent_s: as
 * CG_STAGING_SILENT_S; all daemons of a store should have the same. 0 or an errno value. If
 * cg_staging_has_no_room(): the store is full, and what needs no folder can still be done; the
 * caller closes the staging. */
int cg_staging_open(cg_staging *staging, int root_fd, unsigned silent_s, uint64_t *n_removed_out);
/* Starts a thread that shows that we live and looks after the others, until cg_staging_close().
 * Call it after any fork(). Without it other hosts take us for dead sooner or later. told (may be
 * NULL) is called in that thread. 0 or an errno value. */
int cg_staging_live(cg_staging *staging, cg_staging_told *told, void *told_user);
void cg_staging_close(cg_staging *staging);
/* Both, for a command that mostly takes away: a store that has no room for our folder is no error.
 * What would be staged is ENOSPC then. The caller closes it, also after an error. */
int cg_staging_open_to_remove(cg_staging *staging, int root_fd);
/* Opens a folder of ours in the store's root, and makes it if it is missing. 0 or an errno value;
 * *fd_out is the caller's to close, or -1. */
int cg_staging_folder(int root_fd, const char *name, int flags, int *fd_out);
/* If we are root: gives what we have just made to the owner of the store's root, whose daemon is to
 * write there, too. */
void cg_staging_give(int root_fd, int fd);
/* A new file in dir_fd, open for reading and writing, mode 0600. 0 or an errno value. ENOENT:
 * somebody has removed the directory. */
int cg_staging_create(cg_staging *staging, char name_out[CG_STAGING_NAME_BYTES], int *fd_out);
/* A new name in dir_fd for CG_STAGING_NAME_FILE: takes no space. 0 or an errno value. */
int cg_staging_link_name(cg_staging *staging, char name_out[CG_STAGING_NAME_BYTES]);
/* A new file in dir_fd: the first n_bytes of `from`, with its owner, mode and times, on disk. 0 or
 * an errno value; EIO: from has fewer bytes. */
int cg_staging_copy(cg_staging *staging, int from, uint64_t n_bytes,
                    char name_out[CG_STAGING_NAME_BYTES]);
/* Whether the errno value says that the store, or our part of it, is full. */
static inline bool cg_staging_has_no_room(int error)
{
    return error == ENOSPC || error == EDQUOT;
}
/* The store's clock, in seconds: the time that the store gave our last beat, or gives
 * .cachegenfs-tmp now if it has no room for our folder. Without a staging (NULL) it is our own
 * clock. */
int64_t cg_staging_now_s(const cg_staging *staging);
/* The name of our own folder. */
void cg_staging_own(cg_staging *staging, char own_out[CG_STAGING_OWN_BYTES]);
/* Whether the daemon that has or had this folder is dead. One whose folder is gone is. */
bool cg_staging_is_dead(cg_staging *staging, const char *name);
/* Removes a folder of dir_fd with all that is in it. Returns how many files were in it, not
 * counting those that each daemon's folder has. */
uint64_t cg_staging_remove(int dir_fd, const char *name);
/* Makes the directory again if it is gone, as the daemon and not as a caller. 0 or an errno value.
 */
int cg_staging_make_again(cg_staging *staging);

#ifdef __cplusplus
}
#endif
#endif
