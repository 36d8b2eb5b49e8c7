/* iouring/folders.h - the folders objects/00 to objects/ff of a far store, kept open.
 *
 * The way to an object leads through one of 256 folders, so to almost each chunk of a prompt
 * through another one. A FUSE file system may look up only one name of a folder at a time (sshfs
 * does): then the folders of a prompt's chunks cost a round trip each, one after the other. Below
 * an open folder that way is over. Opening them all costs few round trips, since network file
 * systems remember the status of what they have just listed. Descriptors stay good when that memory
 * has ended.
 * A folder that was removed and made anew is seen when the folders are opened again; until then
 * what lies in it is not found. Where the file system says that a folder is gone (ESTALE, as NFS
 * does) it counts as not open from then on, so that the way through its name is taken.
 * Threads: cg_folders_get() and cg_folders_lose() any, cg_folders_open() one at a time.
 */
#ifndef CG_IOURING_FOLDERS_H
#define CG_IOURING_FOLDERS_H
#include "codec/status.h"
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { CG_N_FOLDERS = 256 };

typedef struct cg_folders {
    int fds[CG_N_FOLDERS]; /* atomic; O_PATH; -1: not open. Once open a number stays what it is */
    bool is_lost[CG_N_FOLDERS]; /* atomic: what the number means is gone */
    uint32_t n_open, next;      /* next: where opening goes on */
} cg_folders;

void cg_folders_init(cg_folders *folders);
/* Nobody opens below them any more. */
void cg_folders_destroy(cg_folders *folders);

/* The descriptor of folder `index`; -1: it is not open. */
int cg_folders_get(const cg_folders *folders, uint8_t index);
/* Folder `index` is gone. It is not open until it is opened again. */
void cg_folders_lose(cg_folders *folders, uint8_t index);

/* Lists the directory path, relative to dir_fd, and opens its folders with names of two hexadecimal
 * digits, those that are open again. Blocks for the listing, and until 8 answers in a row
 * took more than half of round_trip_ns: then opening still takes round trips, and so many are
 * enough for one call. Where fast answers come between slow ones it goes on to the last folder.
 * Takes an eighth of the descriptors that this process may have, at most. */
cg_status cg_folders_open(cg_folders *folders, int dir_fd, const char *path,
                          uint64_t round_trip_ns);

#ifdef __cplusplus
}
#endif
#endif
