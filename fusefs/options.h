/* fusefs/options.h - the command line: cachegenfs STORE MOUNTPOINT [-o ...].
 * Threads: one, at the start.
 */
#ifndef CG_FUSEFS_OPTIONS_H
#define CG_FUSEFS_OPTIONS_H
#include "fusefs/core.h"
#include "fusefs/fuse_api.h"
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_options {
    char *store, *mountpoint; /* absolute, without symbolic links */
    bool foreground, debug, read_only, single_thread;
    bool ignores_acls;
    bool passthrough; /* auto, not off */
    bool io_uring;
    double attr_timeout_s, entry_timeout_s; /* -1: not said */
    uint64_t quota_bytes;                   /* 0: none */
    cg_model_quota *model_quotas;
    size_t n_model_quotas;
    int64_t keep_s[CG_N_LEVELS];
    uint64_t scrub_bytes_per_s; /* 0: no scrubber */
    unsigned dead_after_s;
    unsigned store_timeout_s; /* 0: none */
    struct fuse_args fuse;    /* what libfuse is to know, for fuse_session_new() */
    char *config_text;        /* for .cachegenfs/config */
} cg_options;

typedef enum cg_options_result {
    CG_OPTIONS_RUN = 0,
    CG_OPTIONS_DONE = 1,  /* --help or --version: printed */
    CG_OPTIONS_ERROR = 2, /* printed to stderr */
} cg_options_result;

/* Checks everything before it says RUN. Then *options_out is filled, and the caller destroys it. */
cg_options_result cg_options_parse(int argc, char **argv, cg_options *options_out);
void cg_options_destroy(cg_options *options);

#ifdef __cplusplus
}
#endif
#endif
