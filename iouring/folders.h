/* iouring/folders.h - the folders objects/00 to objects/ff of a far store, kept open.
 *
 * The way to an object leads through one of 256 folders, so nearly every chunk of a prompt is in
 * another one. Some FUSE file systems, such as sshfs, look up only one name of a folder at a time.
 * There the folders of a prompt's chunks cost a round trip each, one after the other. A path below
 * an open folder needs no such look-up.
 * Opening all 256 costs few round trips: network file systems remember the attributes of what they
 * have just listed. Descriptors stay good when that memory has ended.
 * A folder that was removed and made anew is noticed when the folders are opened again; until then
 * what lies in it is not found. Where the file system says that a folder is gone (ESTALE, as NFS
 * does; ENOTCONN, of FUSE's daemon), it counts as not open, and the path by its name is taken.
 * Threads: any thread may call cg_folders_get() and cg_folders_lose(); one at a time
 * cg_folders_open().
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
    bool is_gone;               /* atomic: the file system that they lie in is */
    uint32_t n_open, next;      /* next: where opening goes on */
} cg_folders;

void cg_folders_init(cg_folders *folders);
/* Nobody opens below them any more. */
void cg_folders_destroy(cg_folders *folders);

/* The descriptor of folder `index`; -1: it is not open. */
int cg_folders_get(const cg_folders *folders, uint8_t index);
/* Folder `index` is gone. It is not open until it is opened again. */
void cg_folders_lose(cg_folders *folders, uint8_t index);

/* Lists the directory path, relative to dir_fd, and opens its folders whose names are two
 * hexadecimal digits; those that are open are opened again. Blocks for the listing. It stops early
 * when 8 answers in a row took more than half of round_trip_ns: then each folder costs a round
 * trip, and 8 of them are enough for one call. The next call goes on from there. Where fast answers
 * come between slow ones it goes on to the last folder. It takes at most an eighth of the
 * descriptors that this process may have. CG_ERR_...: the directory cannot be listed. */
cg_status cg_folders_open(cg_folders *folders, int dir_fd, const char *path,
                          uint64_t round_trip_ns);

#ifdef __cplusplus
}
#endif
#endif
