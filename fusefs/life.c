#include "fusefs/life.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

/* A folder without a text is of a daemon that was killed while it made it. An empty text is of a
 * version that did not beat, which we cannot tell from a dead one. Seen so long ago, a folder is
 * not there any more. */
enum { NO_TEXT_S = 60, EMPTY_TEXT_S = 24 * 3600, FORGET_S = 3600 };

typedef struct look {
    char text[CG_LIFE_TEXT_BYTES + 1];
    unsigned silent_s;
    bool is_near; /* its lock reaches us */
    bool is_locked, is_free;
} look;

static void read_boot(char boot_out[CG_LIFE_BOOT_BYTES])
{
    uint64_t random[2];
    const int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    const ssize_t n = fd < 0 ? -1 : read(fd, boot_out, CG_LIFE_BOOT_BYTES - 1);
    if (fd >= 0)
        close(fd);
    boot_out[CG_LIFE_BOOT_BYTES - 1] = '\0';
    if (n == CG_LIFE_BOOT_BYTES - 1 || getrandom(random, sizeof random, 0) < 0)
        return;
    snprintf(boot_out, CG_LIFE_BOOT_BYTES, "%016" PRIx64 "%016" PRIx64, random[0], random[1]);
}

/* pid and host are for who reads it. */
static void print(const cg_life *life, char text_out[CG_LIFE_TEXT_BYTES])
{
    char host[65] = "", line[CG_LIFE_TEXT_BYTES];
    gethostname(host, sizeof host - 1);
    const int n = snprintf(
        line, sizeof line,
        "cachegenfs %020" PRIu64 " silent %010u boot %36s dev %016" PRIx64 " pid %d host %.64s",
        life->n_beats, life->silent_s, life->boot, life->dev, (int)getpid(), host);
    memset(text_out, ' ', CG_LIFE_TEXT_BYTES);
    memcpy(text_out, line, (size_t)n);
    text_out[CG_LIFE_TEXT_BYTES - 1] = '\n';
}

static int write_text(cg_life *life, int fd)
{
    char text[CG_LIFE_TEXT_BYTES];
    life->n_beats++;
    print(life, text);
    const ssize_t n = pwrite(fd, text, sizeof text, 0);
    return n == (ssize_t)sizeof text ? 0 : n < 0 ? errno : EIO;
}

int cg_life_init(cg_life *life, int dir_fd, unsigned silent_s)
{
    struct stat attr;
    read_boot(life->boot);
    life->silent_s = silent_s;
    if (fstat(dir_fd, &attr) != 0)
        return errno;
    life->dev = attr.st_dev;
    return 0;
}

int cg_life_begin(cg_life *life, int dir_fd, unsigned silent_s, int *lock_fd_out)
{
    const int error = cg_life_init(life, dir_fd, silent_s);
    if (error != 0)
        return error;
    *lock_fd_out =
        openat(dir_fd, CG_LIFE_FILE, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (*lock_fd_out < 0)
        return errno;
    /* Before the text, which says that there is a lock. Without locks the beats must do. */
    if (flock(*lock_fd_out, LOCK_EX | LOCK_NB) != 0)
        snprintf(life->boot, sizeof life->boot, "none");
    return write_text(life, *lock_fd_out);
}

/* By its name, which shows that it is still there; and closing sends it on where clients keep what
 * was written. */
int cg_life_beat(cg_life *life, int dir_fd)
{
    const int fd = openat(dir_fd, CG_LIFE_FILE, O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return errno == ESTALE ? ENOENT : errno;
    const int error = write_text(life, fd);
    return close(fd) != 0 && error == 0 ? errno : error;
}

static void parse(const cg_life *own, size_t n_bytes, look *l)
{
    char boot[CG_LIFE_BOOT_BYTES];
    uint64_t dev;
    unsigned silent_s;
    l->silent_s = n_bytes == 0 ? EMPTY_TEXT_S : NO_TEXT_S;
    /* A text of another length or form is another version's. Then the time that it names is not
     * known. */
    if (n_bytes == CG_LIFE_TEXT_BYTES &&
        sscanf(l->text, "cachegenfs %*20[0-9] silent %10u boot %36s dev %16" SCNx64, &silent_s,
               boot, &dev) == 3) {
        l->silent_s = silent_s;
        l->is_near = dev == own->dev && strcmp(boot, own->boot) == 0 && strcmp(boot, "none") != 0;
    }
}

/* False: it cannot be read now. */
static bool take_look(const cg_life *own, int all_fd, const char *name, look *l)
{
    char path[CG_LIFE_NAME_BYTES + sizeof CG_LIFE_FILE + 1];
    *l = (look){.silent_s = NO_TEXT_S};
    if (snprintf(path, sizeof path, "%s/" CG_LIFE_FILE, name) >= (int)sizeof path)
        return false;
    const int fd = openat(all_fd, path, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT;
    const ssize_t n = pread(fd, l->text, CG_LIFE_TEXT_BYTES, 0);
    if (n >= 0) {
        parse(own, (size_t)n, l);
        /* Our own lock goes with the close below. Until then another watcher takes the daemon for
         * living, and looks again later. */
        const int result = flock(fd, LOCK_EX | LOCK_NB);
        l->is_free = result == 0;
        l->is_locked = result != 0 && errno == EWOULDBLOCK;
    }
    close(fd);
    return n >= 0;
}

static cg_life_seen *find(cg_life_watch *watch, const char *name)
{
    for (size_t i = 0; i < watch->n_seen; i++)
        if (strcmp(watch->seen[i].name, name) == 0)
            return &watch->seen[i];
    return NULL;
}

static void forget_old(cg_life_watch *watch, int64_t now_s)
{
    for (size_t i = 0; i < watch->n_seen;)
        if (now_s - watch->seen[i].looked_at_s > FORGET_S)
            watch->seen[i] = watch->seen[--watch->n_seen];
        else
            i++;
}

/* NULL: no memory. */
static cg_life_seen *add(cg_life_watch *watch, const char *name, int64_t now_s)
{
    forget_old(watch, now_s);
    cg_life_seen *seen = reallocarray(watch->seen, watch->n_seen + 1, sizeof *seen);
    if (seen == NULL)
        return NULL;
    watch->seen = seen;
    seen = &watch->seen[watch->n_seen++];
    *seen = (cg_life_seen){.same_since_s = now_s, .looked_at_s = now_s};
    snprintf(seen->name, sizeof seen->name, "%s", name);
    return seen;
}

/* The seconds for which it has stayed the same. */
static int64_t note(cg_life_watch *watch, const char *name, const look *l, int64_t now_s)
{
    int64_t silent_s = 0;
    pthread_mutex_lock(&watch->lock);
    cg_life_seen *seen = find(watch, name);
    if (seen == NULL)
        seen = add(watch, name, now_s);
    if (seen != NULL) {
        /* After a gap its beats may be late for the reason for which our looks were. */
        if (l->is_locked || memcmp(seen->text, l->text, sizeof seen->text) != 0 ||
            now_s - seen->looked_at_s > (int64_t)(l->silent_s / 2))
            seen->same_since_s = now_s;
        memcpy(seen->text, l->text, sizeof seen->text);
        seen->looked_at_s = now_s;
        silent_s = now_s - seen->same_since_s;
    }
    pthread_mutex_unlock(&watch->lock);
    return silent_s;
}

bool cg_life_is_dead(cg_life_watch *watch, const cg_life *own, int all_fd, const char *name,
                     int64_t now_s)
{
    look l;
    if (!take_look(own, all_fd, name, &l))
        return false;
    /* Only on this host is a lock that is free a proof. From elsewhere it may not be seen at
     * all. */
    if (l.is_near && l.is_free)
        return true;
    const int64_t silent_s = note(watch, name, &l, now_s);
    return !l.is_locked && silent_s > 0 && silent_s >= (int64_t)l.silent_s;
}

void cg_life_watch_init(cg_life_watch *watch)
{
    *watch = (cg_life_watch){.seen = NULL};
    pthread_mutex_init(&watch->lock, NULL);
}

void cg_life_watch_destroy(cg_life_watch *watch)
{
    pthread_mutex_destroy(&watch->lock);
    free(watch->seen);
    *watch = (cg_life_watch){.seen = NULL};
}
