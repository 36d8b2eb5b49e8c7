/* connector/config.h - the connector's configuration: one JSON object, every key checked.
 *
 * An unknown key, a wrong type and a value out of range are errors that name the key. The table of
 * keys with types, defaults and ranges is in config.c; the README has it in words.
 * Threads: a cg_config is read-only once parsed.
 */
#ifndef CG_CONNECTOR_CONFIG_H
#define CG_CONNECTOR_CONFIG_H
#include "codec/key.h"
#include "connector/controller.h"
#include "connector/estimator.h"
#include "connector/sentence.h"
#include "iouring/io.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CG_CONFIG_MAX_CPUS = 1024 };

/* The key `geometry`: what is not given stands as 0 or false. */
typedef struct cg_config_geometry {
    uint32_t n_layers, n_kv_heads, head_dim;
    uint32_t dtype; /* cg_dtype */
    bool has_fingerprint;
    cg_fingerprint model_fingerprint;
    float *scales[2]; /* [n_scales[plane]]: of K and V, a layer each; NULL: all are 1 */
    uint32_t n_scales[2];
} cg_config_geometry;

typedef enum cg_streams_choice { CG_STREAMS_BYTES = 0, CG_STREAMS_LATENCY = 1 } cg_streams_choice;

typedef struct cg_config {
    char *root, *model, *group; /* group: NULL: none */
    char *trace_dir;            /* NULL: no traces */
    uint32_t chunk_tokens, tail_multiple;
    uint32_t store_levels; /* bit n: level n */
    uint32_t streams;      /* cg_streams_choice */
    uint32_t level_plus_1; /* 0: the controller chooses */
    uint32_t worst_level;
    uint32_t policy; /* cg_policy */
    uint32_t ttft_budget_ms;
    double prior_mbps;
    uint32_t estimator; /* cg_estimator_kind */
    double recompute_tokens_per_s, recompute_doubling_tokens;
    uint32_t threads, encode_nice;
    uint32_t cpus[CG_CONFIG_MAX_CPUS], n_cpus;
    uint32_t io_backend; /* cg_io_backend */
    uint32_t io_cache;   /* cg_io_cache */
    uint32_t queue_depth, staging_mib, max_abandoned_reads;
    uint32_t open_timeout_ms, read_timeout_ms, lookup_timeout_ms, save_timeout_ms;
    uint32_t close_timeout_ms;
    uint32_t negative_ttl_ms, positive_ttl_ms, retry_ms;
    char *gpu_library; /* NULL: beside this one, or where the linker looks */
    uint32_t gpu_slots, gpu_staging_mib;
    bool read_only;
    bool has_geometry;
    cg_config_geometry geometry;
} cg_config;

/* The caller frees *config_out with cg_config_free(). CG_ERR_INVALID_ARGUMENT with one sentence in
 * error; CG_ERR_NO_MEMORY. */
cg_status cg_config_parse(const char *json, size_t json_bytes, cg_config **config_out,
                          const cg_sentence *error);
void cg_config_free(cg_config *config); /* NULL is fine */

/* "bf16" -> CG_DTYPE_BF16; 0 for an unknown name. */
unsigned cg_dtype_from_name(const char *name);

#ifdef __cplusplus
}
#endif
#endif
