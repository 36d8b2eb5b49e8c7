/* fusefs/fs.h - the inside of a cg_fs, and what the modules of the core share.
 *
 * The modules lie in layers. CMakeLists.txt lists them from the lowest to the highest, and each
 * calls only what is listed above it; tests/layers.py checks that. They share two locks: that of
 * the nodes (fusefs/nodes.h), under which no system call is made, and names_lock.
 * Threads: any, under these locks.
 */
#ifndef CG_FUSEFS_FS_H
#define CG_FUSEFS_FS_H
#include "fusefs/acls.h"
#include "fusefs/control.h"
#include "fusefs/core.h"
#include "fusefs/metrics.h"
#include "fusefs/root_stat.h"
#include "fusefs/staging.h"
#include "fusefs/strict.h"
#include "fusefs/users.h"
#include "iouring/tree.h"
#include <stdatomic.h>

/* How many lines a user's files may still cost in the log. */
typedef struct cg_log_quota {
    uint64_t since_s; /* CLOCK_MONOTONIC; 0: unused */
    uint32_t n_lines;
    uint64_t n_left_out;
} cg_log_quota;
enum { CG_N_LOG_QUOTAS = 64, CG_LOG_LINES = 10, CG_LOG_SECONDS = 10 };
enum { CG_N_MISPLACED = 64 }; /* names that are remembered */

/* fusefs/space.h; one thread writes, any reads. */
typedef struct cg_space {
    uint64_t quota_bytes; /* 0: none */
    /* The quota, or what the disk could hold of the store at the last survey if that was less. */
    _Atomic uint64_t limit_bytes;
    /* What went for the disk's sake and was not seen to come back to it, and what was free then. */
    uint64_t gone_bytes, free_before_bytes;
    bool is_in_vain; /* it does not come back: only the quota makes room */
    cg_model_quota *model_quotas;
    size_t n_model_quotas;
    int64_t keep_s[CG_N_LEVELS];
    _Atomic uint64_t
        surveyed_bytes; /* what the store took at the last survey, less what went since */
    /* The metrics of these names at the last survey. */
    _Atomic uint64_t published_bytes, written_bytes;
    _Atomic int64_t surveyed_at_s; /* CLOCK_MONOTONIC; 0: never */
    _Atomic int64_t survey_ms;     /* how long it took */
    cg_status survey_status;       /* how the last one ended */
    _Atomic bool is_known;         /* one has ended well: surveyed_bytes says something */
    _Atomic bool is_full;          /* there was no room to be made */
    _Atomic bool is_kept;          /* the same above the high mark, and below the quota, too */
    _Atomic bool lacks_room;       /* something found none since the last survey began */
    bool is_unfinished;            /* what was to go was in use, or seemed to be */
    bool has_forbidden;            /* of the last survey, which the log has told */
    bool has_crowded;              /* the same */
    bool is_waiting;               /* for another daemon, which has the lease */
    int64_t waits_since_s;         /* CLOCK_MONOTONIC */
    int64_t lease_seen_s;          /* when it was ours the last time */
} cg_space;

/* fusefs/watch.h; its thread writes, any reads. */
typedef struct cg_watch {
    int fd, stop_fd;           /* of fanotify, and an eventfd; -1: there is no watch */
    bool handles_have_numbers; /* a file's handle begins with its inode number */
    bool has_fine_times;       /* see cg_fs_has_fine_times() */
    _Atomic bool is_trusted;   /* until it breaks */
    _Atomic uint64_t n_seen;   /* grows before what changed is looked up in the table of nodes */
    const cg_fs_kernel *kernel;
} cg_watch;

/* fusefs/closed.h; files in the order in which they came. */
typedef struct cg_closed_queue {
    cg_fs_file *first, *last;
    bool has_thread;
    pthread_cond_t changed;
} cg_closed_queue;

typedef struct cg_closed {
    pthread_mutex_t lock; /* of all; nothing is called under it */
    cg_closed_queue ending, adopting;
    size_t n_uses; /* that wait */
    uid_t last_adopted;
    bool is_stopping;
} cg_closed;

struct cg_fs {
    int root_fd;
    int proc_fd; /* /proc/self/fd: that there is none shows at the start */
    /* Asked for, or the store is. Until it is not, nobody uses staging. */
    _Atomic bool read_only;
    _Atomic bool awaits_room; /* it is so only until the disk has room for our folder */
    unsigned dead_after_s;
    bool ignores_acls;
    cg_acl_notes acl_notes;
    bool is_root;        /* what is created is given to its caller */
    bool has_identities; /* the store is local: a file has one number, and an identity */
    uint64_t max_file_bytes;
    size_t max_listed_files;
    uint64_t scrub_bytes_per_s;
    void (*log)(void *log_user, cg_log_level level, const char *line);
    void *log_user;
    cg_control control;
    cg_root_stat root_stat;
    cg_nodes nodes;
    cg_staging staging;
    /* Held to read while a name is made or moved, from the moment at which its path decides which
     * rules hold; to write while a directory moves. Before the nodes' lock; never by a reader. */
    pthread_rwlock_t names_lock;
    cg_strict_budget budget;
    _Atomic bool is_stopping;
    pthread_mutex_t keep_lock; /* of keep_stop, which cg_fs_stop() signals */
    pthread_cond_t keep_stop;  /* also: of left */
    cg_space space;
    cg_watch watch;
    cg_users pending_users;       /* each waiting file costs a descriptor */
    cg_users open_users;          /* and each open file */
    cg_users control_users;       /* each open one of .cachegenfs costs memory */
    cg_fs_pending *pendings;      /* under the nodes' lock, as is the next */
    cg_fs_directory *directories; /* open now, the latest first */
    cg_fs_pending *left;          /* by all, for cg_fs_discard(); under keep_lock */
    bool has_discarder;           /* so is this */
    cg_closed closed;
    cg_metrics metrics;
    cg_log_quota log_quotas[CG_N_LOG_QUOTAS]; /* by uid; several share one if they must */
    cg_key misplaced[CG_N_MISPLACED]; /* hashes of names that were told, see fusefs/adopt.h */
    size_t n_misplaced;
    pthread_mutex_t log_lock; /* of log_quotas and misplaced; nothing is called under it */
};

/* One line to the log; control characters, as in file names, become '?'. */
void cg_fs_log(cg_fs *fs, cg_log_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Whether the mount is ending. Work on the whole store asks now and then. fs: a cg_fs. */
bool cg_fs_is_stopping(void *fs);

/* Lowers this thread's priority for good: what reads the whole store while nobody waits for it
 * comes after requests. */
void cg_fs_stand_back(void);

/* Waits until ns have passed (false) or the mount is ending (true). */
bool cg_fs_wait(cg_fs *fs, uint64_t ns);

/* Before something is opened for a user. False: the user has as many open as may be
 * (max_user_files). */
bool cg_fs_take_descriptor(cg_fs *fs, uid_t uid);
void cg_fs_give_back_descriptor(cg_fs *fs, uid_t uid);

/* The same before one of .cachegenfs is opened: its text is kept. The limit is CG_MAX_CONTROLS. */
bool cg_fs_take_control(cg_fs *fs, uid_t uid);
void cg_fs_give_back_control(cg_fs *fs, uid_t uid);
enum { CG_MAX_CONTROLS = 64 };

/* Whether this name in the root belongs to cachegenfs and is not shown. */
bool cg_fs_is_hidden(const char *name);

/* Whether a name can be made or removed here; it need not exist. EPERM: cachegenfs keeps it for
 * itself. EACCES: parent is .cachegenfs. ENAMETOOLONG. */
int cg_fs_name_is_free(cg_fs *fs, const cg_fs_node *parent, const char *name);

/* Whether only this host changes the file system of fd, and all of its files have numbers of their
 * own. */
bool cg_fs_is_local(int fd);

/* Tells a file from those that had its inode number before, as ext4 gives it to the next file at
 * once. While somebody still has the old one in the kernel he would have the new one, past the
 * folders that keep him from it. leaf in dir_fd; "": dir_fd itself. 0: unknown, as on a store that
 * is not local. */
uint64_t cg_fs_identity(const cg_fs *fs, int dir_fd, const char *leaf);

/* Removes a name that was just made for the file of these attributes and this identity. If another
 * daemon has put a file of its own in its place, that stays. */
void cg_fs_take_back(const cg_fs *fs, int dir_fd, const char *name, const struct stat *attr,
                     uint64_t identity);

/* Stats name in dir_fd, which is parent's, and enters its node into the table. path: of the same
 * file, relative to the store. NULL: no rule speaks of it, so that it is no view. */
int cg_fs_enter(cg_fs *fs, cg_fs_node *parent, int dir_fd, const char *name, const char *path,
                cg_fs_entry *entry_out);

/* Makes caller the owner of the new file fd, if we run as root and it is not the caller's yet. The
 * file is or will be seen in dir_fd, whose rules for the group hold. chown clears set-id bits;
 * those of mode are set again. 0 or an errno value. */
int cg_fs_give_away_fd(cg_fs *fs, const cg_fs_caller *caller, int dir_fd, int fd, mode_t mode);

/* Whether a strict rule speaks of this path. */
static inline bool cg_fs_is_strict(const cg_tree_name *name)
{
    return name->kind == CG_TREE_OBJECT_CHUNK || name->kind == CG_TREE_CONTEXT_CHUNK ||
           name->kind == CG_TREE_PROFILE;
}

/* Logs what became of a user's file, which stands or was to stand at path, and is open as fd (-1:
 * its owner is not known): CG_LOG_LINES lines in CG_LOG_SECONDS for each owner, then how many were
 * left out. False: this one was. */
bool cg_fs_log_of_file(cg_fs *fs, int fd, const char *what, const char *path, cg_status status);

/* fsync() of the node's file, open as fd. 0 or an errno value.
 * A kernel that could not write a page tells of it once, and keeps the page as if it were on disk.
 * So after an error the file gets no strict name until all of its content is given up. */
int cg_fs_sync(cg_fs *fs, cg_fs_node *node, int fd, bool data_only);
/* The same before the file gets a strict name. EIO: there was such an error before. */
int cg_fs_sync_to_publish(cg_fs *fs, cg_fs_node *node, int fd);

/* Checks whether the content of fd may stand under the name. 0 or an errno value
 * (cg_strict_errno()). A refusal is counted, and logged as a line about a user's file. */
int cg_fs_check(cg_fs *fs, int fd, const char *path, const cg_tree_name *name,
                cg_chunk_header *header_out);
/* The same of a chunk that has a strict name now: by its header alone. */
int cg_fs_check_place(cg_fs *fs, int fd, const char *path, const cg_tree_name *name,
                      cg_chunk_header *header_out);
#endif
