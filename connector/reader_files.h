/* connector/reader_files.h - chunk files that stay open: of a far store between the look-up and the
 * load's last range, of a near one between the ranges of a file that is read in several.
 *
 * Where the store is a network away, opening a file costs a round trip or more. It may also make a
 * network's file system forget what it holds of the file. So a look-up, which has read a file's
 * start, leaves the file open here, and the reader reads all its ranges from there. The files are
 * few, and are closed some seconds after their last use: what nobody loads must not stay open. Of a
 * prompt of more chunks than that, those that were read make room for the next.
 * Of a near store another load opens the file anew, and sees what its look-up saw.
 * One whose name may belong to another file by now is not read any more: a save has replaced it, or
 * a load found that it is not the chunk that it was taken for.
 * A set is shared by all connectors of a process that read from one device (connector/link.h).
 * Closing may have to wait for a FUSE daemon, so only readers close, through their queues; without
 * a reader the set takes no file.
 * Threads: any. The set has a lock of its own, under which there are no system calls.
 */
#ifndef CG_CONNECTOR_READER_FILES_H
#define CG_CONNECTOR_READER_FILES_H
#include "codec/codec.h"
#include "iouring/open_file.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CG_READER_FILES = 96 };

/* Whose bytes a file has: of which store (st_ino of its root), and under which name there; and who
 * may read it. */
typedef struct cg_reader_name {
    uint64_t load_ns; /* of a near store, the load that began then, alone; 0: any */
    uint64_t store;
    cg_key key;
    cg_fingerprint profile;
    cg_level level;
} cg_reader_name;

typedef struct cg_reader_files cg_reader_files;

cg_reader_files *cg_reader_files_new(void); /* NULL without memory */
/* No reader has it any more. NULL is fine. */
void cg_reader_files_free(cg_reader_files *files);

/* A reader begins. It calls cg_reader_files_drop() from time to time, and after the end until
 * nothing is left. */
void cg_reader_files_begin(cg_reader_files *files);
void cg_reader_files_end(cg_reader_files *files);

/* How many more files it would take now; 0 also where there is no reader. */
size_t cg_reader_files_room(cg_reader_files *files);
/* Takes over an open file. Where there is one of that name this one is only there for a reader to
 * close. False: no room; it is the caller's.
 * is_read: to its end. Where places are few, such files go first, until somebody takes them again.
 */
bool cg_reader_files_put(cg_reader_files *files, const cg_reader_name *name, int file, bool is_read,
                         uint64_t now_ns);
/* The open file of that name, to read from until cg_reader_files_give(); NULL: there is none.
 */
cg_open_file *cg_reader_files_take(cg_reader_files *files, const cg_reader_name *name);
/* is_read: as above. now_ns 0: nobody will need it again. A read of it may be under way still, that
 * nobody waits for any more. */
void cg_reader_files_give(cg_reader_files *files, const cg_open_file *file, bool is_read,
                          uint64_t now_ns);
/* The files of the chunks keys[n_keys] are not taken any more, whatever their level; who reads one
 * goes on. files NULL is fine. */
void cg_reader_files_forget(cg_reader_files *files, uint64_t store, const cg_key *keys,
                            size_t n_keys);
/* Takes out files that are forgotten, have not been used for long, have no reader or, where places
 * are few, have been read, until there is one that the caller must close; -1: none. Files that are
 * still read, in vain, close with that. */
int cg_reader_files_drop(cg_reader_files *files, uint64_t now_ns);
/* When cg_reader_files_drop() will have a file; UINT64_MAX: never. */
uint64_t cg_reader_files_wake_ns(cg_reader_files *files);

#ifdef __cplusplus
}
#endif
#endif
