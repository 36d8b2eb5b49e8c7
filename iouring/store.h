/* iouring/store.h - a model's part of a store: look-up by key, reading, publishing, contexts.
 *
 * An object is a chunk under the name of its key and of a level that it holds (names:
 * iouring/tree.h). Publishing an object is atomic, the first publisher wins, and an object never
 * changes; only one that turns out to be damaged is replaced.
 *
 * The store may be a local directory, a cachegenfs mount or a remote mount of either. So nothing
 * here relies on link counts, O_TMPFILE, RENAME_NOREPLACE or nanosecond times. Where hard links
 * fail (EPERM, EMLINK, EXDEV, EOPNOTSUPP, ENOSYS) copies are made.
 *
 * Only cg_store_open() makes root/model. Where it is missing later, what is to be written is
 * CG_ERR_NOT_FOUND: on the host that exports the root, the store may not be mounted just now.
 * Threads: a cg_store is read-only after cg_store_open() and may be shared, also while a thread is
 * in cg_store_open_folders() or cg_store_reopen(). Each call works on the caller's cg_io. Most want
 * it idle: with nothing under way.
 */
#ifndef CG_IOURING_STORE_H
#define CG_IOURING_STORE_H
#include "codec/chunk.h"
#include "iouring/io.h"
#include "iouring/tree.h"
#include <sys/stat.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_store cg_store;

/* Opens root/model. With create it makes root/model and its folders (0700), and root itself if its
 * parent is there.
 * CG_ERR_NOT_FOUND: there is no root, or without create no root/model. CG_ERR_UNSUPPORTED_VERSION,
 * CG_ERR_CORRUPT: the store has another layout (iouring/layout.h). */
cg_status cg_store_open(const char *root, const char *model, bool create, cg_store **store_out);
void cg_store_free(cg_store *store); /* NULL is fine */
/* Whether cg_store_open() has made the model's folder where nothing said that there is a store
 * (cg_layout_find()): it is a new one, or its disk is not mounted. */
bool cg_store_is_begun(const cg_store *store);

/* Most bytes of a chunk's file: a header that says more is damaged. Keeps sums of sizes finite. */
#define CG_STORE_MOST_CHUNK_BYTES (UINT64_C(1) << 40)

/* What the store has of one chunk. */
typedef struct cg_store_entry {
    uint8_t levels;                    /* bit n: level n is there */
    uint64_t level_bytes[CG_N_LEVELS]; /* what has to be read of its object, from the start on */
    uint8_t prefix_level[CG_N_LEVELS]; /* its provenance: cg_chunk_header.prefix_level */
    uint8_t damaged;                   /* bit n: what has level n's name is no chunk of it */
} cg_store_entry;

/* Looks up keys[n_keys] at the levels of level_mask, as many at once as the queue is deep. profile:
 * whose L1..L3 are looked up; NULL: L0 only. entries_out[n_keys].
 * A name that cannot be read counts as "not there". *n_errors_out (may be NULL) is the number of
 * errors other than CG_ERR_NOT_FOUND; a file that is no chunk is not an error. The call stops at
 * deadline_ns (CLOCK_MONOTONIC, 0 = none) with CG_ERR_TIMED_OUT; entries_out then has the answers
 * that came in time. The cg_io must be idle.
 *
 * The answer goes by fixed headers alone. Whether a file is as long as its header says, and all
 * else, is found out when it is read. For each chunk two names are opened first: that of the finest
 * lossy level that is wanted, and L0's. A nested file answers for its coarser levels, too; their
 * names are taken to be there. Names of other levels are opened in a second batch, only where the
 * first left them open. */
cg_status cg_store_lookup(const cg_store *store, cg_io *io, const cg_key *keys, size_t n_keys,
                          const cg_fingerprint *profile, uint8_t level_mask, uint64_t deadline_ns,
                          cg_store_entry *entries_out, uint32_t *n_errors_out);

/* Takes over a file whose start a look-up has read: the file with the name of keys[index] at this
 * level. */
typedef struct cg_store_keeper {
    void (*keep)(void *user, size_t index, cg_level level, int file);
    void *user;
    size_t n_most; /* of the first so many keys only: descriptors are few */
} cg_store_keeper;

/* A deadline that depends on how the store answers. until_ns() is asked for it whenever an answer
 * is waited for, and told when the last one came, or when the call began. */
typedef struct cg_store_patience {
    uint64_t (*until_ns)(void *user, uint64_t answered_ns); /* CLOCK_MONOTONIC */
    void *user;
} cg_store_patience;

/* The same, with patience (NULL: without end). Files that hold what was asked for stay open: each
 * is given to keeper, which closes it; NULL: none does. */
cg_status cg_store_lookup_open(const cg_store *store, cg_io *io, const cg_key *keys, size_t n_keys,
                               const cg_fingerprint *profile, uint8_t level_mask,
                               const cg_store_patience *patience, const cg_store_keeper *keeper,
                               cg_store_entry *entries_out, uint32_t *n_errors_out);

/* A coarse first look: whether the store has a folder for each of the chunks keys[n_keys]. A chunk
 * of which it has any level has one. Patience and errors as above. there_out[n_keys]. */
cg_status cg_store_probe(const cg_store *store, cg_io *io, const cg_key *keys, size_t n_keys,
                         const cg_store_patience *patience, bool *there_out,
                         uint32_t *n_errors_out);

/* Submits a read of n_bytes of an object, from offset on. The first level_bytes of a look-up are
 * the chunk at that level, whichever of a nested file's names is read. The read completes in
 * cg_io_wait() as one of cg_io_read_range() does, and the call returns what that one returns.
 * CG_ERR_INVALID_ARGUMENT also: profile is NULL at L1..L3. Other operations may be under way. */
cg_status cg_store_read(const cg_store *store, cg_io *io, const cg_key *key, cg_level level,
                        const cg_fingerprint *profile, uint64_t offset, uint64_t n_bytes,
                        cg_io_cache cache, uint64_t user);
/* The same with cg_io_read_open(): the file stays open, and later ranges are read with
 * cg_io_read_file(). */
cg_status cg_store_read_open(const cg_store *store, cg_io *io, const cg_key *key, cg_level level,
                             const cg_fingerprint *profile, uint64_t offset, uint64_t n_bytes,
                             uint64_t user);
/* How long the file system takes to answer a question that no cache on this host can answer. Where
 * the store is a network away, that is about a round trip. It blocks for at most two such
 * answers. */
uint64_t cg_store_latency_ns(const cg_store *store);
/* Submits such a question, as cg_io_stat(): any answer says that the store lives. */
cg_status cg_store_ask(const cg_store *store, cg_io *io, uint64_t user);

/* Whether the store's file system on this host is of a type, "fuse.sshfs", as /proc/self/mountinfo
 * says. False where that cannot be read. */
bool cg_store_is_of_type(const cg_store *store, const char *type);

/* Whether a reader of objects should tell that it used them (cg_store_touch()): not where a mount
 * of cachegenfs, on this host or further away, sees each file that is opened. */
bool cg_store_wants_touches(const cg_store *store);
enum { CG_STORE_TOUCH_SECONDS = 300 };
/* Notes that an object was used: what is not used goes first when a daemon makes room. The note is
 * its file's time of access, which all hosts and later daemons see. So it has one size for ever,
 * takes no room of its own, and goes with the file. It is set about every CG_STORE_TOUCH_SECONDS:
 * not while it is younger, or less than an hour ahead. The time of modification stays. Blocks for
 * two questions to the store. CG_ERR_PERMISSION: the file is another user's, and this is not root.
 * CG_ERR_INVALID_ARGUMENT: it is no regular file. */
cg_status cg_store_touch(const cg_store *store, const cg_key *key, cg_level level,
                         const cg_fingerprint *profile);
/* The same for the file path below the directory dir_fd, or with "" for the open file dir_fd
 * (not O_PATH). */
cg_status cg_store_touch_file(int dir_fd, const char *path);
/* Whether they would set the time of a file with these attributes. */
bool cg_store_touch_is_due(const struct stat *attr);

/* For a store that is a network away (round_trip_ns): opens the folders of its chunks and keeps
 * them open, so that look-ups and reads need not wait for folders (iouring/folders.h). Folders that
 * are open are opened anew. Blocks for some round trips. One thread at a time. CG_ERR_NOT_FOUND:
 * there are no objects yet. */
cg_status cg_store_open_folders(cg_store *store, uint64_t round_trip_ns);

/* Looks whether an answer to a read of the caller's says that the root's file system is gone: its
 * FUSE daemon has ended, or an NFS server has forgotten it. Look-ups do it themselves. */
void cg_store_note(const cg_store *store, const cg_io_completion *answer);
bool cg_store_is_gone(const cg_store *store);
/* Opens the root anew, by its path: it may be mounted again. Who uses the store goes on with the
 * new one. Blocks as long as the file system does. One thread at a time, and none in
 * cg_store_open_folders(). What was found out at the first open counts on. CG_ERR_NOT_FOUND: no
 * file system of the same type is there, or no root/model in it. */
cg_status cg_store_reopen(cg_store *store);

/* Verifies a chunk (cg_chunk_verify) and publishes it under its own key, level and profile. A
 * nested chunk is one file with a name for each level, links or, where links fail, copies of what
 * the level needs; names that are there stay. The finest level's name comes last, so that it does
 * not come to be there without the others, whenever this ends. The cg_io must be idle.
 *
 * If the chunk's finest level is there already, that is CG_OK, too, and *existed_out (may be NULL)
 * is true. Then only missing names are added: links of the file that is there if it holds the
 * level, else a copy of this chunk.
 *
 * Each file is on disk before it has a name. The names themselves are not synced: a power failure
 * may take those of the last seconds, as if nothing had been saved. Over a network publishing three
 * levels takes six questions besides the bytes: folder, temporary file, its sync, and a name for
 * each level, the last of which takes the temporary one away. Two more where the folder is there:
 * whether the chunk is, and the temporary name's end. The kernel asks more: it looks up each of the
 * five names before it makes it. */
cg_status cg_store_publish(const cg_store *store, cg_io *io, const uint8_t *chunk,
                           size_t chunk_bytes, bool *existed_out);

/* Replaces objects that turned out to be damaged; cg_store_publish() would leave them. Verifies the
 * chunk first. Bit n of `damaged`: the object of level n is damaged; levels that the chunk does not
 * hold are passed over. If names of other levels are links of a damaged file, they get the new
 * file, too, so that the levels stay one file. Names of any other file keep it. *replaced_out: bit
 * n: level n has the new file; valid after an error, too. Each name changes atomically. A
 * cachegenfs mount cannot rename a nested file to the name of a coarser level; there such a name is
 * gone for a moment. The cg_io must be idle. */
cg_status cg_store_replace(const cg_store *store, cg_io *io, const uint8_t *chunk,
                           size_t chunk_bytes, uint8_t damaged, uint8_t *replaced_out);

/* Writes <model>/model.json, unless it is there. The cg_io must be idle. */
cg_status cg_store_publish_model(const cg_store *store, cg_io *io, const char *json,
                                 size_t n_bytes);

/* One chunk of a context. */
typedef struct cg_store_link {
    cg_key key;
    uint8_t levels; /* bit n: link level n */
} cg_store_link;

/* Makes contexts/<name> from published chunks. The folder gets links of the chunks, and tokens,
 * profile.cgp and model.json. Where links fail it gets copies, of nested chunks up to the end of
 * the level. context.json comes last: its presence makes the context. A context of that name with
 * another list of chunks is replaced; if the old context.json names files that change by that, it
 * is removed first. Of chunks that it names with the same levels, and of its profile, only the
 * names are looked at: what it says of their content is believed. So a context that grows costs
 * what is new. A nested chunk is linked from the name of the finest level, which implies the
 * others.
 *
 * What context.json says: codec/FORMAT.md, "The tree of a store".
 *
 * CG_ERR_INVALID_ARGUMENT: a name that cg_tree_name_is_valid() refuses; no links; a link without
 * levels. CG_ERR_NOT_FOUND: the store lacks a chunk at a linked level or, with L1..L3, the profile.
 * CG_ERR_FOREIGN_TOKENS: the links are no chain of these tokens. CG_ERR_FOREIGN_PROFILE and
 * CG_ERR_FOREIGN_MODEL: a chunk is of another one. CG_ERR_EXISTS: another publisher of the name was
 * met, of a context with other files; neither's may be there now. Two should not publish one name
 * at once: in between they may still leave a context.json without its files. The cg_io must be
 * idle. */
cg_status cg_store_context_publish(const cg_store *store, cg_io *io, const char *name,
                                   const cg_store_link *links, size_t n_links,
                                   const cg_fingerprint *profile, const uint32_t *tokens,
                                   size_t n_tokens);

/* What adopting (below) tells its caller, so that the caller can give new files an owner.
 * creating (may be NULL): called just before a file or folder is made in the directory dir_fd, for
 * the sake of the context's file `from` (relative to the root). One call of created follows, in the
 * same thread.
 * created: the file or folder `leaf` was made in the directory dir_fd. It has mode 0600 (a folder:
 * 0700) and the owner that a new file of this thread has. leaf is NULL if nothing was made anew; a
 * hard link is not new. A status other than CG_OK ends the adopting with that status.
 * is_over (may be NULL): asked before each file of a tree; true ends the look at the tree.
 * check_profile (may be NULL): cg_profile_check() of the open file fd, a profile.cgp that anybody
 * may have written, in as much memory as the caller has for it. fd stays open until the profile has
 * its second name: who claims it here keeps writers out. NULL: it is read whole.
 * not_default (may be NULL): the profile of the context, path and open as fd, was adopted, but the
 * model's profiles/default names another one: what is coded with it is not served. */
typedef struct cg_store_hook {
    cg_status (*created)(void *user, const char *from, int dir_fd, const char *leaf,
                         bool is_folder);
    void *user;
    void (*creating)(void *user, const char *from, int dir_fd, bool is_folder);
    bool (*is_over)(void *user);
    cg_status (*check_profile)(void *user, int fd, cg_fingerprint *fingerprint_out);
    void (*not_default)(void *user, const char *path, int fd);
} cg_store_hook;

/* Adopts a chunk of a context: makes sure that it can be found by its key, at all levels that it
 * holds. cachegenfs calls this when a context is copied in. Object names that are missing become
 * links of the file, or copies. path, relative to the root, is a CG_TREE_CONTEXT_CHUNK that
 * cg_chunk_verify took; header is its fixed header.
 * The levels of a nested chunk may have come as files of their own, in any order. Then their names,
 * in the context and among the objects, become links of the longest file: a context takes the space
 * of its finest level. A file takes part if it is, byte by byte, the start of the longest, and if
 * owner, mode and time of modification are the same (rsync knows by the time what it has brought).
 * CG_ERR_PERMISSION: a folder above the chunk or the object is a symbolic link. No link is
 * followed, even if it takes a folder's place meanwhile. */
cg_status cg_store_adopt(int root_fd, const cg_store_hook *hook, const char *path,
                         const cg_chunk_header *header);

/* The same for contexts/<name>/profile.cgp. Installs it as profiles/<fingerprint>.cgp, and writes
 * `default` if there is none. If it is installed already, path becomes a link of that file, as
 * cg_file_share() has it. Refuses what cg_profile_open() refuses. held: that file, which nobody
 * writes to meanwhile; NULL: whatever is there. CG_ERR_INVALID_ARGUMENT: path is no such name.
 * CG_ERR_NOT_FOUND: it leads to another file by now. */
cg_status cg_store_adopt_profile(int root_fd, const cg_store_hook *hook, const char *path,
                                 const struct stat *held);
/* The same for contexts/<name>/model.json: copies it to <model>/model.json unless that exists.
 * CG_ERR_CORRUPT: it does not start as a JSON object. */
cg_status cg_store_adopt_model(int root_fd, const cg_store_hook *hook, const char *path);
/* Adopts all chunks, profiles and model.json below contexts/ of all models that are new since the
 * last call, as a mount does at its start, for contexts that came into the store without it. A
 * chunk that can be found already costs a look at a few headers. Others are verified whole first.
 * Invalid files are passed over.
 * Unchanged folders and files are skipped: those that have the inode number, size and times that
 * they had and, of a folder, the names. Of each folder one chunk is looked at all the same; if it
 * cannot be found, the whole folder is adopted anew. What could not be adopted, or is younger than
 * some seconds, is looked at again the next time. now_s: the time by the store's clock; 0: nothing
 * counts as unchanged. The state is kept in the root (iouring/adopted.h); where that cannot be
 * written, each call looks at all.
 * *n_adopted_out (may be NULL): chunks that could not be found before.
 * CG_ERR_NO_SPACE, CG_ERR_READ_ONLY and CG_ERR_NO_MEMORY end it early. CG_ERR_CANCELLED: is_over
 * said so. */
cg_status cg_store_adopt_new(int root_fd, const cg_store_hook *hook, int64_t now_s,
                             uint32_t *n_adopted_out);

#ifdef __cplusplus
}
#endif
#endif
