/* fusefs/core.h - the file system without FUSE: what each operation does to a store.
 *
 * The tree of a store is shown as it is, with one rule on top: a name that must hold a chunk or a
 * profile holds a whole, valid one or nothing. iouring/tree.h says which names these are. We call
 * them strict. fusefs/SEMANTICS.md says for each operation what a user sees.
 *
 * fusefs/ops.c puts these functions behind the kernel. tests/fusefs/core_test.cc calls them
 * directly. Each section below names the file in which its functions are written.
 *
 * Every function returns 0 or an errno value, unless it says otherwise. An entry that comes out of
 * a function holds one look-up of its node, as FUSE's entries do; cg_fs_forget() gives it back.
 * Nobody checks permissions here: the kernel does it (default_permissions). Threads: any thread may
 * call anything at any time, cg_fs_new() and cg_fs_free() excepted.
 */
#ifndef CG_FUSEFS_CORE_H
#define CG_FUSEFS_CORE_H
#include "fusefs/nodes.h"
#include <dirent.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_fs cg_fs;
typedef struct cg_metrics cg_metrics; /* fusefs/metrics.h */

typedef enum cg_log_level {
    CG_LOG_ERROR = 3,
    CG_LOG_WARNING = 4,
    CG_LOG_INFO = 6
} cg_log_level; /* of syslog */

/* What a model's folder may take on disk. */
typedef struct cg_model_quota {
    char model[CG_TREE_NAME_BYTES];
    uint64_t bytes;
} cg_model_quota;

typedef struct cg_fs_config {
    const char *store; /* an existing directory */
    bool read_only;
    bool ignores_acls;                  /* fusefs/acls.h: what has lists goes by its mode */
    const char *config_text;            /* what .cachegenfs/config says; copied; NULL: nothing */
    uint64_t max_file_bytes;            /* of a strict file; 0 = 4 GiB */
    uint64_t quota_bytes;               /* what the store may take on disk; 0: no limit */
    const cg_model_quota *model_quotas; /* [n_model_quotas], copied */
    size_t n_model_quotas;
    int64_t keep_s[CG_N_LEVELS]; /* of fusefs/evict.h */
    uint64_t scrub_bytes_per_s;  /* 0: no scrubber */
    unsigned dead_after_s;   /* other hosts: without a sign of our life; 0 = CG_STAGING_SILENT_S */
    size_t max_listed_files; /* 0: 200,000; cg_fs_is_crowded() */
    /* Files and directories that a user may have open, each a descriptor here: then cg_fs_open(),
     * cg_fs_create() and cg_fs_opendir() are ENFILE. Not root, nor our own user. 0: no limit. */
    uint64_t max_user_files;
    /* One line, without a newline. Any thread; NULL: silence. */
    void (*log)(void *log_user, cg_log_level level, const char *line);
    void *log_user;
} cg_fs_config;

/* Who makes a call. If we run as root, what the call creates belongs to uid and gid. pid is a
 * process or a thread id. */
typedef struct cg_fs_caller {
    uid_t uid;
    gid_t gid;
    pid_t pid;
} cg_fs_caller;

typedef struct cg_fs_entry {
    cg_fs_node *node;
    struct stat attr;
    bool may_not_be_cached; /* a file that is being written: only this caller sees the name */
    bool may_be_old;        /* the store changed meanwhile */
    bool is_lasting;        /* cg_fs_is_lasting(); look-ups tell it of folders and chunks */
} cg_fs_entry;

typedef struct cg_fs_directory cg_fs_directory;

/* Where the bytes of a read are: in memory (text), or in the file fd from offset on. */
typedef struct cg_fs_bytes {
    const char *text; /* NULL: of fd */
    int fd;
    off_t offset;
    size_t n_bytes; /* at most what the node shows of the file, which may end before */
} cg_fs_bytes;

/* Moves the bytes of a write from source to fd, from offset on. The number of bytes, or -errno. */
typedef ssize_t cg_fs_move(void *source, int fd, off_t offset);

/* How cg_fs_watch() makes the kernel forget what it remembers. The functions must not wait for
 * anything. */
typedef struct cg_fs_kernel {
    /* Forget the attributes of the node, and of a folder the listing; it may be gone. */
    void (*forget)(void *user, const cg_node_ref *ref);
    /* Look up all names again before they are used. */
    void (*doubt_names)(void *user);
    void *user;
} cg_fs_kernel;

/* What cg_fs_setattr() changes. */
enum {
    CG_SET_MODE = 1,
    CG_SET_UID = 2,
    CG_SET_GID = 4,
    CG_SET_SIZE = 8,
    CG_SET_ATIME = 16,
    CG_SET_MTIME = 32,
};

/* --- beginning and end, and what goes on in between: start.c --- */

/* ENOENT, ENOTDIR ...: the store cannot be opened. ENOTSUP: it uses access control lists. Removes
 * files that were being written when their daemon was killed. */
int cg_fs_new(const cg_fs_config *config, cg_fs **fs_out);
/* Releases files and directories that are still open, and discards files that never became valid.
 * NULL is fine. */
void cg_fs_free(cg_fs *fs);
/* Tends the store until cg_fs_stop(): where the disk had no room for a daemon, waits until it has,
 * so that the mount is no longer read-only; beats, so that other daemons know that we live; runs
 * cg_fs_adopt_tree() once; then makes room whenever the store comes near its quota. For a thread of
 * its own. */
void cg_fs_keep(cg_fs *fs);
/* Looks at the root for cg_fs_getattr_root(), until cg_fs_stop(). For a thread of its own. */
void cg_fs_look_at_root(cg_fs *fs);

/* Tells the kernel of changes that others make in the store (fusefs/watch.h), until cg_fs_stop().
 * For a thread of its own. Without a watch it returns at once. */
void cg_fs_watch(cg_fs *fs);
/* Before cg_fs_watch() and before anything is served. 0, or why there is no watch. kernel must
 * stay. */
int cg_fs_watch_begin(cg_fs *fs, const cg_fs_kernel *kernel);
/* Whether the kernel is told of changes, so that it may trust what it remembers for
 * CG_FS_TRUST_SECONDS, and what is lasting for CG_FS_LASTING_SECONDS. */
bool cg_fs_is_watched(const cg_fs *fs);
enum { CG_FS_TRUST_SECONDS = 60, CG_FS_LASTING_SECONDS = 3600 };
/* Whether a folder that has changed since its attributes were asked for has another time of
 * modification, however soon that was. Of kernels from 6.13 on, and when changes are watched. */
bool cg_fs_has_fine_times(const cg_fs *fs);
/* Says that the mount ends. cg_fs_keep(), cg_fs_scrub(), cg_fs_watch() and cg_fs_adopt_tree(), in
 * other threads, return soon. The next mount goes on where they stopped. */
void cg_fs_stop(cg_fs *fs);

/* --- what it holds: fs.c --- */

cg_fs_node *cg_fs_root(cg_fs *fs);
cg_nodes *cg_fs_nodes(cg_fs *fs);
cg_metrics *cg_fs_metrics(cg_fs *fs);
int cg_fs_root_fd(const cg_fs *fs);
/* Whether this file is watched, where changes are. What is mounted from elsewhere, and subvolumes,
 * are not. */
bool cg_fs_is_watched_file(const cg_fs *fs, const cg_fs_node *node);

/* --- jobs beside the operations: adopt.c, scrub.c, pending.c and closed.c --- */

/* Contexts may have come into the store past this daemon. Makes their chunks findable by key. Can
 * take long. */
void cg_fs_adopt_tree(cg_fs *fs);
/* Reads all chunks and profiles once a day (fusefs/scrub.h), at the configured rate, and repairs
 * what is damaged (fusefs/fsck.h), until cg_fs_stop(). For a thread of its own. Without a rate it
 * returns at once. */
void cg_fs_scrub(cg_fs *fs);
/* Discards files that never became valid, until cg_fs_stop(). For a thread of its own: without it
 * cg_fs_release() and cg_fs_forget() do so themselves, and may have to wait for the store. */
void cg_fs_discard(cg_fs *fs);
/* The rest of what comes after last closes (fusefs/closed.h), until cg_fs_stop(). For threads of
 * their own, of the first any number: without them cg_fs_release() does it itself. */
void cg_fs_end_closed(cg_fs *fs);
void cg_fs_adopt_closed(cg_fs *fs);

/* --- names: directories.c; cg_fs_rename() and cg_fs_link(): moves.c --- */

/* ENOENT: entry_out has may_not_be_cached only. If that is false, the kernel may remember for
 * CG_MISSING_SECONDS that the name is missing. */
int cg_fs_lookup(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *parent, const char *name,
                 cg_fs_entry *entry_out);
void cg_fs_forget(cg_fs *fs, cg_fs_node *node, uint64_t n_lookups);
int cg_fs_mkdir(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *parent, const char *name,
                mode_t mode, cg_fs_entry *entry_out);
int cg_fs_mknod(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *parent, const char *name,
                mode_t mode, dev_t rdev, cg_fs_entry *entry_out);
int cg_fs_symlink(cg_fs *fs, const cg_fs_caller *caller, const char *target, cg_fs_node *parent,
                  const char *name, cg_fs_entry *entry_out);
int cg_fs_readlink(cg_fs *fs, cg_fs_node *node, char *target_out, size_t target_bytes);
int cg_fs_unlink(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *parent, const char *name);
int cg_fs_rmdir(cg_fs *fs, cg_fs_node *parent, const char *name);
/* flags: RENAME_NOREPLACE, RENAME_EXCHANGE */
int cg_fs_rename(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *parent, const char *name,
                 cg_fs_node *new_parent, const char *new_name, unsigned flags);
int cg_fs_link(cg_fs *fs, cg_fs_node *node, cg_fs_node *new_parent, const char *new_name,
               cg_fs_entry *entry_out);

/* --- attributes: attributes.c --- */

int cg_fs_getattr(cg_fs *fs, cg_fs_node *node, struct stat *attr_out);
/* The same of the root, also while the store hangs (fusefs/root_stat.h). *is_old_out: they are of a
 * time before the call. */
int cg_fs_getattr_root(cg_fs *fs, struct stat *attr_out, bool *is_old_out);
/* mask: CG_SET_...; times: attr->st_atim, st_mtim (tv_nsec may be UTIME_NOW). */
int cg_fs_setattr(cg_fs *fs, cg_fs_node *node, const struct stat *attr, int mask,
                  struct stat *attr_out);
/* Whether the file is a folder or is published. Then the watch tells of every change of its
 * attributes but times of access. (An ordinary file can change by a mapping, of which the watch
 * does not tell.) */
bool cg_fs_is_lasting(cg_fs *fs, cg_fs_node *node);
int cg_fs_statfs(cg_fs *fs, struct statvfs *out);
/* As getxattr(2): *n_bytes_out is the size, also when size is 0. */
int cg_fs_getxattr(cg_fs *fs, cg_fs_node *node, const char *name, void *value, size_t size,
                   size_t *n_bytes_out);
/* Only root sees names of trusted.*. */
int cg_fs_listxattr(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *node, char *list,
                    size_t size, size_t *n_bytes_out);
int cg_fs_setxattr(cg_fs *fs, cg_fs_node *node, const char *name, const void *value, size_t size,
                   int flags);
int cg_fs_removexattr(cg_fs *fs, cg_fs_node *node, const char *name);

/* --- directories: directories.c --- */

/* Entries by offset, as readdir(3) and seekdir(3). "." and ".." included. */
int cg_fs_opendir(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *node,
                  cg_fs_directory **directory_out);
/* The entry at offset; *next_out is the offset of the one after it. At the end *entry_out is NULL.
 * Else it stays valid until the next call. */
int cg_fs_readdir(cg_fs *fs, cg_fs_directory *directory, off_t offset,
                  const struct dirent **entry_out, off_t *next_out);
/* cg_fs_lookup() of an entry that was just read: the directory need not be opened again. */
int cg_fs_lookup_read(cg_fs *fs, const cg_fs_caller *caller, cg_fs_directory *directory,
                      const char *name, cg_fs_entry *entry_out);
/* Whether listings should bring names only, because so many files are known. A listing with
 * attributes looks up each file; that costs 200 bytes a file until the kernel forgets it, and
 * `find` does not need it. */
bool cg_fs_is_crowded(cg_fs *fs);
int cg_fs_syncdir(cg_fs_directory *directory);
void cg_fs_closedir(cg_fs_directory *directory);

/* --- files: files.c opens and creates, contents.c does the rest --- */

/* EEXIST, or without O_EXCL ESTALE: the name is there by now. The kernel looks it up again. */
int cg_fs_create(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *parent, const char *name,
                 mode_t mode, int flags, cg_fs_entry *entry_out, cg_fs_file **file_out);
/* ESTALE: the file has no name any more, or is not what was looked up. The kernel looks again. */
int cg_fs_open(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *node, int flags,
               cg_fs_file **file_out);
/* Says where the bytes of a read are. Nothing is copied, so that the kernel can take them from fd
 * by itself (splice). They count as read. Valid while the file is open. */
void cg_fs_read(cg_fs *fs, const cg_fs_file *file, off_t offset, size_t n_bytes,
                cg_fs_bytes *bytes_out);
/* Calls move, which does the writing. EPERM, without calling it: the file is published, so its
 * content must not change. A check of the content waits until move is done. *n_written_out may be
 * less than move had; after an error it is 0. */
int cg_fs_write(cg_fs *fs, cg_fs_file *file, off_t offset, cg_fs_move *move, void *source,
                size_t *n_written_out);
/* By the open file, whatever its mode says now. */
int cg_fs_ftruncate(cg_fs *fs, cg_fs_file *file, off_t size);
int cg_fs_fallocate(cg_fs *fs, cg_fs_file *file, int mode, off_t offset, off_t n_bytes);
int cg_fs_copy_range(cg_fs *fs, cg_fs_file *from, off_t from_offset, cg_fs_file *to,
                     off_t to_offset, size_t n_bytes, size_t *n_copied_out);
/* whence: SEEK_DATA or SEEK_HOLE; the kernel does the others. */
int cg_fs_seek(cg_fs_file *file, off_t offset, int whence, off_t *offset_out);
/* At each close of a descriptor. Publishes what is valid. EBADMSG, EINVAL or EOPNOTSUPP: it is not
 * (fusefs/strict.h). */
int cg_fs_flush(cg_fs *fs, cg_fs_file *file);
int cg_fs_fsync(cg_fs *fs, cg_fs_file *file, bool data_only);
/* The last close; frees file. Discards what never became valid. In files.c, too. */
void cg_fs_release(cg_fs *fs, cg_fs_file *file);

#ifdef __cplusplus
}
#endif
#endif
