/* fusefs/life.h - which daemons of a store live, whatever hosts they run on, without a server of
 * our own.
 *
 * A daemon has a folder, and in it a file `lock`. It locks the file while it lives. Every few
 * seconds it writes the file's text anew with a higher number: a beat.
 * On one host the lock tells at once that a daemon was killed. Locks may not reach between hosts.
 * There a daemon is dead when its text has stayed the same for the time that the text itself names
 * (silent_s), by the watcher's own monotonic clock and in looks without a gap. So no two clocks are
 * ever compared, and a daemon that was cut off from the store takes nobody for dead when it comes
 * back.
 * The text tells whether its lock reaches us: it was made in the same run of the same kernel, on
 * the same mounted file system.
 * Threads: any, but one thread at a time beats.
 */
#ifndef CG_FUSEFS_LIFE_H
#define CG_FUSEFS_LIFE_H
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CG_LIFE_FILE "lock"
enum {
    CG_LIFE_NAME_BYTES = 256, /* of a folder, with its end */
    CG_LIFE_TEXT_BYTES = 224, /* always: a reader that has cached the size reads all of it */
    CG_LIFE_BOOT_BYTES = 37,
    CG_LIFE_BEATS = 6, /* in silent_s */
};

/* Of our own daemon. */
typedef struct cg_life {
    char boot[CG_LIFE_BOOT_BYTES]; /* of this run of the kernel */
    uint64_t dev;                  /* that our folder is on */
    unsigned silent_s;
    uint64_t n_beats;
} cg_life;

/* What was seen of another one. */
typedef struct cg_life_seen {
    char name[CG_LIFE_NAME_BYTES], text[CG_LIFE_TEXT_BYTES];
    int64_t same_since_s, looked_at_s;
} cg_life_seen;

typedef struct cg_life_watch {
    pthread_mutex_t lock; /* of the rest */
    cg_life_seen *seen;
    size_t n_seen;
} cg_life_watch;

/* What cg_life_is_dead() asks of our own daemon: enough to judge others before we have a folder.
 * dir_fd: a folder on the same file system. 0 or an errno value. */
int cg_life_init(cg_life *life, int dir_fd, unsigned silent_s);
/* Makes the file in dir_fd, our new folder, and locks it where the store has locks. The lock holds
 * while *lock_fd_out, the caller's, is open. 0 or an errno value. */
int cg_life_begin(cg_life *life, int dir_fd, unsigned silent_s, int *lock_fd_out);
/* 0 or an errno value. ENOENT: others took us for dead, and our folder is gone. */
int cg_life_beat(cg_life *life, int dir_fd);

void cg_life_watch_init(cg_life_watch *watch);
void cg_life_watch_destroy(cg_life_watch *watch);
/* Whether the daemon whose folder in all_fd is `name` is dead. A daemon whose text cannot be read
 * now does not count as dead. now_s: CLOCK_MONOTONIC, taken before the call. own: our own daemon's,
 * which tells which locks reach us. */
bool cg_life_is_dead(cg_life_watch *watch, const cg_life *own, int all_fd, const char *name,
                     int64_t now_s);

#ifdef __cplusplus
}
#endif
#endif
