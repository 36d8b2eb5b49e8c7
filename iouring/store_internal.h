/* iouring/store_internal.h - a store's insides, for the files store*.c and context_*.c.
 *
 * Threads: as iouring/store.h.
 */
#ifndef CG_IOURING_STORE_INTERNAL_H
#define CG_IOURING_STORE_INTERNAL_H
#include "iouring/folders.h"
#include "iouring/store.h"

struct cg_store {
    int root_fd;   /* the number stays; what it means may be opened anew */
    char *root;    /* its path from / on */
    long type;     /* of its file system, as statfs() has it */
    bool is_mount; /* of cachegenfs, here or further away */
    bool is_begun; /* by this opening: root had no sign of a store */
    char model[CG_TREE_NAME_BYTES];
    cg_folders *folders; /* of objects, as far as they are open; look-ups find out which are gone */
};

/* Where an object is asked for: path lies in `whole`, and is relative to dir_fd. */
typedef struct cg_store_place {
    int dir_fd;
    const char *path;
    char whole[CG_TREE_PATH_BYTES];
} cg_store_place;

/* Whether an answer says that its folder, or the file system, is gone. */
bool cg_store_is_of_the_gone(const cg_io_completion *answer);

/* By the shortest way that is open. Errors as cg_tree_object_path(). */
cg_status cg_store_object_place(const cg_store *store, const cg_key *key, cg_level level,
                                const cg_fingerprint *profile, cg_store_place *place_out);

/* cg_file_chunk_header() of a chunk that must have this key, hold the level and, unless that is L0,
 * be of this profile.
 * CG_ERR_FOREIGN_TOKENS: another key, or without the level. CG_ERR_FOREIGN_PROFILE. */
cg_status cg_store_chunk_header(int root_fd, const char *path, cg_level level, const cg_key *key,
                                const cg_fingerprint *profile, cg_chunk_header *header_out);
/* cg_file_install() with replace, also where a cachegenfs mount refuses the rename since path shows
 * a part of the file: then path is gone for a moment. CG_ERR_EXISTS: somebody gave it to another
 * file in that moment. */
cg_status cg_store_replace_by_link(const cg_store *store, const char *from, const char *path,
                                   uint64_t copy_bytes);
/* Each submits one operation to an idle cg_io and waits for it. */
cg_status cg_store_stat(const cg_store *store, cg_io *io, const char *path);
cg_status cg_store_write(const cg_store *store, cg_io *io, const char *path, const void *bytes,
                         size_t n_bytes, bool replace);
cg_status cg_store_write_temp(const cg_store *store, cg_io *io, const char *path, const void *bytes,
                              size_t n_bytes);
#endif
