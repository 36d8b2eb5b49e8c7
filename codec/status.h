/* codec/status.h - the one error type of cachegenfs.
 *
 * Numbers are pinned: they cross the ABI of libcachegen.so and appear in logs. Ranges have gaps; a
 * number is never reused. Every layer returns these; a layer that meets an errno maps it with
 * cg_status_from_errno().
 * Threads: pure functions.
 */
#ifndef CG_CODEC_STATUS_H
#define CG_CODEC_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cg_status {
    CG_OK = 0,
    /* The caller's side. */
    CG_ERR_INVALID_ARGUMENT = 1,
    CG_ERR_NO_MEMORY = 2,
    CG_ERR_BUFFER_TOO_SMALL = 3,
    CG_ERR_UNSUPPORTED = 4, /* a geometry, rope kind or dtype that is refused by name */
    CG_ERR_CANCELLED = 5,
    CG_ERR_AGAIN = 6, /* not yet: ask again */
    /* Bytes that we did not write. */
    CG_ERR_TRUNCATED = 20, /* the file ends before its header says it does */
    CG_ERR_CORRUPT = 21,   /* a checksum, count or offset is wrong */
    CG_ERR_UNSUPPORTED_VERSION = 22,
    CG_ERR_BAD_MAGIC = 23,
    /* Good bytes, but not the ones asked for: never deliver them. */
    CG_ERR_FOREIGN_MODEL = 30,
    CG_ERR_FOREIGN_PROFILE = 31,
    CG_ERR_FOREIGN_TOKENS = 32, /* right name, other tokens, position or chain */
    CG_ERR_LOSSY_PREFIX = 33,   /* computed on a prefix that is worse than the request accepts */
    /* Files and devices. */
    CG_ERR_NOT_FOUND = 40,
    CG_ERR_EXISTS = 41,
    CG_ERR_IO = 42,
    CG_ERR_NO_SPACE = 43,
    CG_ERR_PERMISSION = 44,
    CG_ERR_TIMED_OUT = 45, /* late: a deadline passed, or a mount hangs */
    CG_ERR_READ_ONLY = 46,
    CG_ERR_DEVICE = 47, /* a GPU, or what speaks to it, failed */
} cg_status;

/* A short English sentence without a full stop; never NULL, also for unknown numbers. Static
 * storage. */
const char *cg_strerror(cg_status status);

/* The status that an errno value means (ENOENT -> CG_ERR_NOT_FOUND ...); CG_ERR_IO for the rest. 0
 * -> CG_OK. */
cg_status cg_status_from_errno(int errno_value);

#ifdef __cplusplus
}
#endif
#endif
