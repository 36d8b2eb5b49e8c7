#include "fusefs/metrics.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static const char *const REFUSAL_NAMES[CG_N_REFUSALS] = {"incomplete", "damaged", "misplaced",
                                                         "unsupported"};
static const char *const SCRUBBED_NAMES[CG_N_SCRUBBED] = {"whole", "cut",    "quarantined",
                                                          "left",  "failed", "being_written"};

static const char *const REQUEST_NAMES[CG_N_REQUESTS] = {"name",  "open",  "read",
                                                         "write", "close", "change"};
static const char *const LATENCY_NAMES[CG_N_LATENCIES] = {"0.0001", "0.001", "0.01", "0.1",
                                                          "1",      "10",    "+Inf"};

void cg_metrics_observe(cg_metrics *metrics, cg_request request, uint64_t ns)
{
    uint64_t bound_ns = 100000;
    int i = 0;
    /* Each bucket reaches ten times as far as the one before, and the last one without end. */
    for (; i < CG_N_LATENCIES - 1 && ns > bound_ns; i++)
        bound_ns *= 10;
    cg_metrics_add(&metrics->latencies[request].n[i], 1);
    cg_metrics_add(&metrics->latencies[request].sum_ns, ns);
}

static void histogram(FILE *out, const char *request, const cg_latencies *l)
{
    uint64_t n = 0;
    /* Counted by bucket, printed as sums: Prometheus wants each bucket to hold all that is no
     * longer. */
    for (int i = 0; i < CG_N_LATENCIES; i++)
        fprintf(out, "cachegenfs_request_seconds_bucket{request=\"%s\",le=\"%s\"} %" PRIu64 "\n",
                request, LATENCY_NAMES[i], n += l->n[i]);
    fprintf(out, "cachegenfs_request_seconds_sum{request=\"%s\"} %.6f\n", request,
            (double)l->sum_ns / 1e9);
    fprintf(out, "cachegenfs_request_seconds_count{request=\"%s\"} %" PRIu64 "\n", request, n);
}

void cg_metrics_error(cg_metrics *metrics, int error)
{
    if (error == EIO || error == ENOSPC || error == ESTALE || error == EDQUOT)
        cg_metrics_add(&metrics->errors, 1);
}

static void family(FILE *out, const char *name, const char *type, const char *help)
{
    fprintf(out, "# HELP cachegenfs_%s %s\n# TYPE cachegenfs_%s %s\n", name, help, name, type);
}

static void single(FILE *out, const char *name, const char *type, const char *help, uint64_t value)
{
    family(out, name, type, help);
    fprintf(out, "cachegenfs_%s %" PRIu64 "\n", name, value);
}

char *cg_metrics_text(const cg_metrics *m)
{
    char *text = NULL;
    size_t n_bytes = 0;
    FILE *out = open_memstream(&text, &n_bytes);
    if (out == NULL)
        return NULL;
    family(out, "opens_total", "counter", "Files opened, by the way their bytes take.");
    fprintf(out, "cachegenfs_opens_total{way=\"passthrough\"} %" PRIu64 "\n", m->opens_passthrough);
    fprintf(out, "cachegenfs_opens_total{way=\"daemon\"} %" PRIu64 "\n", m->opens_plain);
    fprintf(out, "cachegenfs_opens_total{way=\"write\"} %" PRIu64 "\n", m->opens_write);
    family(out, "chunk_opens_total", "counter", "Published chunks opened to be read, by level.");
    for (int level = 0; level < CG_N_LEVELS; level++)
        fprintf(out, "cachegenfs_chunk_opens_total{level=\"L%d\"} %" PRIu64 "\n", level,
                m->opens_of_level[level]);
    single(out, "read_bytes_total", "counter",
           "Bytes asked of the daemon (passthrough reads are not seen).", m->read_bytes);
    single(out, "written_bytes_total", "counter", "Bytes written through the daemon.",
           m->written_bytes);
    single(out, "published_total", "counter", "Chunks and profiles that became visible.",
           m->published);
    single(out, "published_bytes_total", "counter", "Bytes of them.", m->published_bytes);
    family(out, "refused_total", "counter", "Validations that failed, by reason.");
    for (int i = 0; i < CG_N_REFUSALS; i++)
        fprintf(out, "cachegenfs_refused_total{reason=\"%s\"} %" PRIu64 "\n", REFUSAL_NAMES[i],
                m->refused[i]);
    single(out, "discarded_total", "counter",
           "Files that never became valid, thrown away at their last close.", m->discarded);
    single(out, "adopted_total", "counter",
           "Chunks, profiles and model files made findable by key.", m->adopted);
    single(out, "adopt_errors_total", "counter", "Published files that could not be made findable.",
           m->adopt_errors);
    family(out, "evictions_total", "counter", "Files of chunks that made room, by what went.");
    fprintf(out, "cachegenfs_evictions_total{what=\"file\"} %" PRIu64 "\n", m->evicted);
    fprintf(out, "cachegenfs_evictions_total{what=\"finest_levels\"} %" PRIu64 "\n", m->cut);
    single(out, "evicted_bytes_total", "counter", "Bytes that they freed.", m->evicted_bytes);
    single(out, "evict_errors_total", "counter", "Files that could not make room.",
           m->evict_errors);
    single(out, "expired_contexts_total", "counter",
           "Contexts that were removed after their time to live.", m->expired);
    family(out, "scrubbed_total", "counter",
           "Names that the scrubber looked at, by what came of it.");
    for (int i = 0; i < CG_N_SCRUBBED; i++)
        fprintf(out, "cachegenfs_scrubbed_total{result=\"%s\"} %" PRIu64 "\n", SCRUBBED_NAMES[i],
                m->scrubbed[i]);
    single(out, "scrubbed_bytes_total", "counter", "Bytes that the scrubber read.",
           m->scrubbed_bytes);
    single(out, "scrub_passes_total", "counter", "Times that it read the whole store.",
           m->scrub_passes);
    single(out, "watched", "gauge",
           "1 when the kernel is told of changes that others make in the store.", m->watched);
    single(out, "watch_doubts_total", "counter",
           "Times that such a change made the kernel look up all names again.", m->watch_doubts);
    single(out, "watch_overflows_total", "counter", "Times that changes came too fast to be told.",
           m->watch_overflows);
    single(out, "quota_bytes", "gauge", "What the store may take; 0 without a quota.",
           m->quota_bytes);
    single(out, "used_bytes", "gauge", "What it took when it was last looked through.",
           m->used_bytes);
    family(out, "request_seconds", "histogram",
           "From a request's arrival to its answer (passthrough reads are not seen).");
    for (int i = 0; i < CG_N_REQUESTS; i++)
        histogram(out, REQUEST_NAMES[i], &m->latencies[i]);
    single(out, "given_up_total", "counter",
           "Requests that were answered with ETIMEDOUT because the store did not answer.",
           m->given_up);
    single(out, "errors_total", "counter", "Replies of EIO, ENOSPC, EDQUOT or ESTALE.", m->errors);
    single(out, "files_open", "gauge", "Files open now.", m->files_open);
    single(out, "files_pending", "gauge", "Files being written under strict names now.",
           m->files_pending);
    single(out, "passthrough_in_use", "gauge",
           "1 when reads of published files go past the daemon.", m->passthrough_in_use);
    /* Here it shows whether all of the text found memory. */
    if (fclose(out) != 0) {
        free(text);
        return NULL;
    }
    return text;
}
