/* fusefs/open_files.h - the open files of a node.
 *
 * A node has no descriptor of its own. While somebody has its file open, that file's descriptor
 * serves for the node, too: also for a file that has no name any more.
 * Threads: any.
 */
#ifndef CG_FUSEFS_OPEN_FILES_H
#define CG_FUSEFS_OPEN_FILES_H
#include "fusefs/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* An open file. */
struct cg_fs_file {
    cg_fs_node *node; /* pinned */
    int fd;           /* -1: text */
    char *text;       /* of a file in .cachegenfs */
    size_t text_bytes;
    cg_fs_pending *pending; /* being written under a strict name */
    bool writable;
    bool appends;      /* fd has O_APPEND: what is written by it goes to the end */
    bool cached;       /* counted in the node's n_cached from its opening on */
    bool was_flushed;  /* closed once, not written to since: its release may be near. Atomic */
    bool immutable;    /* a published file: bytes that were read stay right */
    bool unchanged;    /* so far they are right, too */
    bool backed;       /* fusefs/passthrough.h */
    bool is_use;       /* closed, and its use is to be noted (fusefs/closed.h) */
    uid_t opener;      /* whose part it is (cg_fs_take_descriptor(), cg_fs_take_control()) */
    cg_read_note note; /* of the file when it was opened; changed_ns 0: none */
    cg_fs_file *next;  /* of the node; under the nodes' lock, as is n_users. Then fusefs/closed.h */
    uint32_t n_users;
};

/* Compares an ordinary file, opened for reading only, with the note of its last opening. If it has
 * not changed, pages that the kernel has of it are right, and file->unchanged is set.
 * A file that has just changed is not noted: the clock of files is coarse, so the file can change
 * again and keep its time. A write gives the file the time of the write's beginning, so the watch
 * voids notes at its end. A mapping may write to the file without a new time, so no note is good
 * for longer than attributes are. */
void cg_fs_file_compare(cg_fs *fs, cg_fs_file *file);

/* Puts an open file into the node's list, with one user. It owns fd from now on; after an error fd
 * is closed. pending: the pending file that fd belongs to, or NULL.
 * 0 or an errno value. ENOMEM. ETXTBSY: it is opened for writing, but others read it by
 * passthrough. EPERM: it is opened for writing, but has been published meanwhile. Waits for a check
 * under way. */
int cg_fs_file_new(cg_fs *fs, cg_fs_node *node, int fd, bool writable, cg_fs_pending *pending,
                   cg_fs_file **file_out);
/* Puts a virtual file, which is text, into its node's list, and takes it out. */
void cg_fs_file_join(cg_nodes *nodes, cg_fs_file *file);
void cg_fs_file_part(cg_nodes *nodes, cg_fs_file *file);
/* Takes the file out of the node's list. Its descriptor stays open until the last user is gone. */
void cg_fs_file_leave(cg_fs *fs, cg_fs_file *file);
/* One of the node's open files, with one more user until cg_fs_file_unuse(); or NULL. */
cg_fs_file *cg_fs_file_use_any(cg_nodes *nodes, cg_fs_node *node);
void cg_fs_file_unuse(cg_nodes *nodes, cg_fs_file *file);
/* Whether a node's file is open for writing. */
bool cg_fs_file_is_being_written(cg_nodes *nodes, const cg_fs_node *node);
/* The same, and whether it stays so. Waits up to a second for files that were closed: the
 * kernel tells of the last close some time after the caller's close(), and not before a mapping is
 * gone. */
bool cg_fs_file_stays_written(cg_nodes *nodes, const cg_fs_node *node);

#ifdef __cplusplus
}
#endif
#endif
