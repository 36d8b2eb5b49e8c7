/* fusefs/nodes.h - the kernel's inodes: which files of the store they are, and by which names we
 * reach them.
 *
 * A node is one file, known by its device and inode number, or a view of it (fusefs/views.h). The
 * number of a removed file comes back with another one, which is told from it by its identity
 * (cg_fs_identity()). A node has no descriptor of its own: a million O_PATH descriptors would hit
 * the kernel's limit. It has names: places (parent node, text) where it was last seen. Hard links
 * that show the same bytes are one node with several names. Another daemon, or someone at work on
 * the store itself, can make a name wrong at any time. So fusefs/reach.h compares what it opens by
 * name with the node. Of a file with more than CG_NODES_MAX_TRIED names old ones are dropped, right
 * or wrong, when the kernel has forgotten their folders: a prompt that all share would have one in
 * each context that there ever was.
 *
 * A node stays as long as somebody refers to it: the kernel (n_lookups), or the daemon (n_pins).
 *
 * A node has a gate, which keeps writing and checking apart. Writers pass it. A check closes it
 * first. When a check publishes the file, the gate is sealed: it stays closed.
 *
 * A node also knows through which backing file it is read (fusefs/passthrough.h). Views are neither
 * written nor read by passthrough. So gate and backing file matter only for nodes of whole files.
 *
 * Threads: every function takes the table's lock. Nothing is called back under it, and no system
 * call is made. The fields of a node are under that lock, too, except the first seven.
 */
#ifndef CG_FUSEFS_NODES_H
#define CG_FUSEFS_NODES_H
#include "fusefs/views.h"
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_fs_node cg_fs_node;
typedef struct cg_fs_file cg_fs_file;       /* fusefs/open_files.h */
typedef struct cg_fs_pending cg_fs_pending; /* fusefs/pending.h */
typedef struct cg_node_name cg_node_name;

typedef enum cg_gate { CG_GATE_OPEN = 0, CG_GATE_CHECKING = 1, CG_GATE_SEALED = 2 } cg_gate;

/* A store has millions of files, so that the order and size of these matter: 104 bytes. */
struct cg_fs_node {
    dev_t dev; /* these seven never change */
    ino_t ino;
    cg_view view;
    uint64_t identity;   /* 0: unknown */
    uint64_t generation; /* the node's address is its number, and can be used again: they differ */
    uint16_t type;       /* S_IFMT bits */
    uint8_t control;     /* fusefs/control.h: CG_CONTROL_NONE for files of the store */

    uint8_t gate : 2;       /* cg_gate */
    uint8_t is_removed : 1; /* a folder that is gone, which somebody still has open */
    uint8_t is_dead : 1;    /* another file has its number; nobody finds it by that */
    uint8_t has_lost : 1;   /* what was written may not be on disk, though it reads well (fs.h) */
    uint8_t has_dropped_names : 1; /* some that may be right */
    uint32_t n_pins;               /* ours: names below it, open files, pending files */

    uint64_t n_lookups;  /* the kernel's references */
    cg_node_name *names; /* the latest first */
    cg_fs_file *files;   /* open now, the latest first */
    cg_fs_pending *pending;

    uint32_t n_writes; /* that passed the gate and have not left */
    int backing_id;    /* of fuse_passthrough_open(); 0: none */
    uint32_t n_backed; /* files open through it */
    uint32_t n_cached; /* files open through the page cache of this inode */

    cg_fs_node *hash_next;
};

/* What an ordinary file was like when it was opened to be read through the page cache. As long as
 * the file's time of change is this, what the kernel has of its content is right. */
typedef struct cg_read_note {
    uint64_t generation;  /* of the node; 0: unused */
    int64_t changed_ns;   /* the file's time of change */
    uint32_t opened_at_s; /* CLOCK_MONOTONIC */
    uint32_t n_changes;   /* how often the watch told of a change: not of this note's place alone */
} cg_read_note;
enum { CG_N_READ_NOTES = 4096 }; /* by generation: those who share one take it from each other */

/* A name that a folder does not have. The kernel may remember that it is missing. */
typedef struct cg_missing_note {
    uint64_t name;      /* a hash of the folder's generation and the name; 0: unused */
    uint32_t told_at_s; /* CLOCK_MONOTONIC */
} cg_missing_note;
/* By hash; a name whose place is taken is not noted. A note is good for twice the time for which
 * the kernel trusts it, since an answer may be a while on its way. */
enum { CG_N_MISSING_NOTES = 65536, CG_MISSING_SECONDS = 60 };

enum { CG_NODES_N_CONTROLS = 8 };

typedef struct cg_nodes {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a gate, n_renames, or a node's open files; CLOCK_MONOTONIC */
    cg_fs_node *root;
    cg_fs_node *controls[CG_NODES_N_CONTROLS]; /* once looked up, they stay */
    uint64_t next_generation;
    uint64_t rename_epoch; /* renames that ended */
    uint32_t n_renames;    /* under way */
    size_t n_nodes, n_names;
    size_t n_buckets; /* a power of 2, of both tables */
    cg_fs_node **node_buckets;
    cg_node_name **name_buckets;
    cg_read_note *read_notes; /* [CG_N_READ_NOTES] */
    cg_missing_note *missing; /* [CG_N_MISSING_NOTES] */
} cg_nodes;

/* 0 or an errno value. */
int cg_nodes_init(cg_nodes *nodes, const struct stat *root);
size_t cg_nodes_count(cg_nodes *nodes);
/* Frees all nodes; no file may be open. */
void cg_nodes_destroy(cg_nodes *nodes);

/* The node of the file that attr (the store's) and identity describe, and of this view of it (NULL:
 * the whole).
 * It gets one more look-up, and the name in parent (name NULL: no name). A node that had this name
 * before loses it. With an identity, the caller has the file open: while he has, its number is no
 * other's, and nodes of that number with another identity are dead. NULL without memory. */
cg_fs_node *cg_nodes_enter(cg_nodes *nodes, cg_fs_node *parent, const char *name,
                           const struct stat *attr, uint64_t identity, const cg_view *view);
/* The same of a file that need not be open, if its node is there; else NULL. */
cg_fs_node *cg_nodes_enter_known(cg_nodes *nodes, cg_fs_node *parent, const char *name,
                                 const struct stat *attr, uint64_t identity, const cg_view *view);
/* The node of a virtual file (fusefs/control.h), by its number; with one more look-up. */
cg_fs_node *cg_nodes_enter_control(cg_nodes *nodes, int control, mode_t type);
/* Takes n look-ups away; the node may be gone after that. */
void cg_nodes_forget(cg_nodes *nodes, cg_fs_node *node, uint64_t n_lookups);
void cg_nodes_pin(cg_nodes *nodes, cg_fs_node *node);
void cg_nodes_unpin(cg_nodes *nodes, cg_fs_node *node);

/* Notes that a node which the kernel knows got this name, by a link or by publishing. Without
 * memory the name is not noted; the next look-up does it. */
void cg_nodes_add_name(cg_nodes *nodes, cg_fs_node *node, cg_fs_node *parent, const char *name);
/* is_removed: what had the name was a folder, and was removed. Its inode number may come back at
 * once, as another folder's, while the kernel still refers to this node: they must not be taken for
 * one. */
void cg_nodes_drop_name(cg_nodes *nodes, cg_fs_node *parent, const char *name, bool is_removed);
/* Drops the names of the node that come before the one of this path: they were tried first, and led
 * nowhere or to other files. If there was a rename since the epoch, or one is under way, it drops
 * none: the names may be right then. */
void cg_nodes_drop_stale(cg_nodes *nodes, cg_fs_node *node, const char *path, uint64_t epoch);
void cg_nodes_move_name(cg_nodes *nodes, cg_fs_node *parent, const char *name,
                        cg_fs_node *new_parent, const char *new_name, bool exchange);

/* A node that may be gone at any time, and what it was when it was seen. */
typedef struct cg_node_ref {
    cg_fs_node *node;
    bool is_folder;
} cg_node_ref;

/* Puts up to max nodes of a file into refs_out: of the whole, of its views, and of files that had
 * its number before. Returns how many. */
enum { CG_NODES_MAX_OF_FILE = 8 };
size_t cg_nodes_of_file(cg_nodes *nodes, dev_t dev, ino_t ino,
                        cg_node_ref refs_out[CG_NODES_MAX_OF_FILE]);
/* The same for all nodes, a part at a time: *at begins with 0. 0: there are no more. */
size_t cg_nodes_each(cg_nodes *nodes, size_t *at, cg_node_ref *refs_out, size_t max);
/* The file has changed: voids what was noted of reading it, also the notes of its open files. */
void cg_nodes_void_notes(cg_nodes *nodes, dev_t dev, ino_t ino);
void cg_nodes_void_all_notes(cg_nodes *nodes);
/* Whether a file is known by this name, of the folder with this number, and which. */
bool cg_nodes_name_of(cg_nodes *nodes, dev_t dev, ino_t folder, const char *name, ino_t *ino_out);

/* Notes that parent has no such name, for CG_MISSING_SECONDS from the answer to the kernel on.
 * False: there is no room to note it, and the kernel must not remember it. The note goes when a
 * node gets this name, since the kernel knows then. */
bool cg_nodes_note_missing(cg_nodes *nodes, const cg_fs_node *parent, const char *name);
/* The same for a name that was made without a node. */
void cg_nodes_drop_missing(cg_nodes *nodes, const cg_fs_node *parent, const char *name);
/* Whether it is noted that the folder with this number lacks the name. */
bool cg_nodes_is_missing(cg_nodes *nodes, dev_t dev, ino_t folder, const char *name);

/* A path of the node by its name number name_index, with leaf (may be NULL) behind it. The caller
 * frees it. ENOENT: it has no such name, or another file has its number now. ESTALE: the name leads
 * nowhere, since a folder above has no name left or would lie in itself. ENOMEM. */
int cg_nodes_path(cg_nodes *nodes, const cg_fs_node *node, unsigned name_index, const char *leaf,
                  char **path_out);
/* Of the names of the node's file, its own and those of all nodes that show the file: the path by
 * the first of them, from number *index on, that is(path) takes. *index is the number behind it
 * then. is() is called with the table's lock held. ENOENT: there is none. EMLINK: there is none
 * among the first CG_NODES_MAX_TRIED, the latest of a node first, and there are more, or were. (A
 * file may have tens of thousands, and each question for its attributes tries them.) ENOMEM. */
enum { CG_NODES_MAX_TRIED = 1024 };
int cg_nodes_path_of_file(cg_nodes *nodes, const cg_fs_node *node, bool (*is)(const char *path),
                          unsigned *index, char **path_out);

/* Renames. A path that was made before a rename may lead nowhere after it. So a caller that opens
 * by path notes the epoch before it makes the path. If the path fails, the caller asks whether
 * there was a rename since, and tries again. */
uint64_t cg_nodes_epoch(cg_nodes *nodes);
bool cg_nodes_changed_since(cg_nodes *nodes, uint64_t epoch); /* waits for renames under way */
/* The same without waiting: a rename that is under way counts. */
bool cg_nodes_may_have_changed_since(cg_nodes *nodes, uint64_t epoch);
void cg_nodes_rename_begin(cg_nodes *nodes);
void cg_nodes_rename_end(cg_nodes *nodes);

/* The gate. Any number of writers can be inside. A check waits until they have left, and keeps
 * others out while it lasts. If it publishes the file, the gate is sealed after it. */
bool cg_gate_enter(cg_nodes *nodes, cg_fs_node *node); /* waits for a check; false: sealed */
void cg_gate_leave(cg_nodes *nodes, cg_fs_node *node);
/* Returns the state before, OPEN or SEALED. */
cg_gate cg_gate_check_begin(cg_nodes *nodes, cg_fs_node *node);
/* The same for a caller that holds other gates already. False: another check was not over by the
 * deadline. (Two callers that wait for each other's gates would otherwise wait for ever.) */
bool cg_gate_check_begin_until(cg_nodes *nodes, cg_fs_node *node, const struct timespec *deadline,
                               cg_gate *before_out);
void cg_gate_check_end(cg_nodes *nodes, cg_fs_node *node, cg_gate gate);
/* Opens a sealed gate again, and has_lost ends: the inode number has come back with another file.
 */
void cg_gate_unseal(cg_nodes *nodes, cg_fs_node *node);

#ifdef __cplusplus
}
#endif
#endif
