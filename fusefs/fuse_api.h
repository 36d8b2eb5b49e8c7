/* fusefs/fuse_api.h - libfuse, and what this build of it can do. Debian 12 has 3.14; passthrough
 * came with 3.17.
 * Threads: none.
 */
#ifndef CG_FUSEFS_FUSE_API_H
#define CG_FUSEFS_FUSE_API_H
#define FUSE_USE_VERSION 314
#include <fuse_lowlevel.h>

#if FUSE_VERSION >= FUSE_MAKE_VERSION(3, 17) && defined(FUSE_CAP_PASSTHROUGH)
#define CG_FUSE_HAS_PASSTHROUGH 1
#else
#define CG_FUSE_HAS_PASSTHROUGH 0
#endif

/* Epochs of names. Kernels know them from protocol 7.44 (Linux 6.16) on. */
#if FUSE_VERSION >= FUSE_MAKE_VERSION(3, 18)
#define CG_FUSE_HAS_EPOCHS 1
#else
#define CG_FUSE_HAS_EPOCHS 0
#endif
enum { CG_FUSE_EPOCHS_MINOR = 44 };

/* The option -o io_uring of libfuse; the transport is right from 3.18.3 on. */
#if FUSE_VERSION >= FUSE_MAKE_VERSION(3, 18)
#define CG_FUSE_HAS_IO_URING 1
#else
#define CG_FUSE_HAS_IO_URING 0
#endif

/* Whether answers may be spliced to the kernel. It sends the last close of a file after the answers
 * to all reads of it. ThreadSanitizer sees this order by writev(2) and read(2) of the device, and
 * knows no splice(2): it would take a close for a race with an earlier read. */
#if defined(__SANITIZE_THREAD__)
#define CG_FUSE_MAY_SPLICE 0
#else
#define CG_FUSE_MAY_SPLICE 1
#endif
#endif
