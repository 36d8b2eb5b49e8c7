#include "connector/trace.h"

#include "connector/clock.h"
#include "connector/operation.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Rows of the picture, which Chrome's format calls threads. Reads overlap, and so do decodings, so
 * each kind has as many rows as it needs. */
enum { ROW_LOAD = 1, ROW_PLAN = 2, ROW_READ = 1000, ROW_DECODE = 10000 };

struct cg_trace {
    cg_operation op;                        /* its queue is the writer's */
    uint64_t began_ns, began_unix_ns;       /* constant */
    uint32_t number;                        /* constant: of the connector's traces */
    char request_id[CG_TRACE_ID_BYTES + 1]; /* constant */
    cachegen_progress progress;             /* of the load that is done */
    uint32_t n_lost;                        /* traces of the connector before it */
    uint64_t planned;                       /* a digest of what was planned last */
    uint32_t n_events, n_dropped;
    cg_trace_event events[CG_TRACE_MAX_EVENTS];
};

/* ---- collecting ---- */

static void destroy(cg_operation *op)
{
    free(op);
}

void cg_trace_free(cg_trace *trace)
{
    free(trace);
}

void cg_trace_add(cg_trace *trace, const cg_trace_event *event)
{
    if (trace->n_events == CG_TRACE_MAX_EVENTS) {
        trace->n_dropped++;
        return;
    }
    cg_trace_event *added = &trace->events[trace->n_events++];
    *added = *event;
    if (added->ended_ns < added->began_ns)
        added->ended_ns = added->began_ns;
}

void cg_trace_add_plan(cg_trace *trace, const cg_fetch *fetch, double estimated_bps,
                       uint64_t now_ns)
{
    cg_trace_event event = {.kind = CG_TRACE_PLAN,
                            .began_ns = now_ns,
                            .ended_ns = now_ns,
                            .estimated_bps = estimated_bps};
    uint64_t digest = 14695981039346656037u; /* FNV-1a: no level is 0 in it */
    for (uint32_t i = fetch->first; i < fetch->wanted_end; i++) {
        const cg_fetch_chunk *chunk = &fetch->chunks[i];
        /* What has one level is planned only as far as it is read soon. */
        const uint8_t level = chunk->state > CG_FETCH_READING ? chunk->level
                              : chunk->state == CG_FETCH_WAITING && !cg_fetch_is_anytime(fetch)
                                  ? fetch->levels[i]
                                  : chunk->planned;
        if (level >= CG_N_LEVELS)
            continue;
        event.chunks_at[level]++;
        digest = (digest ^ (level + 1u)) * 1099511628211u;
    }
    if (digest == trace->planned)
        return;
    trace->planned = digest;
    cg_trace_add(trace, &event);
}

/* ---- writing ---- */

/* Decimals by hand: printf's have a comma in some locales. */
static void put_thousandths(FILE *file, const char *name, double thousandths)
{
    const uint64_t n =
        thousandths > 0 ? thousandths < 1e18 ? (uint64_t)thousandths : UINT64_C(1000000000000000000)
                        : 0;
    fprintf(file, "\"%s\": %llu.%03llu", name, (unsigned long long)n / 1000,
            (unsigned long long)n % 1000);
}

static void begin_event(FILE *file, const char *phase, const char *name, unsigned row, uint64_t ns)
{
    /* The event process_name comes before all of these, so each begins with a comma. */
    fprintf(file, ",\n{\"ph\": \"%s\", \"name\": \"%s\", \"pid\": %d, \"tid\": %u, ", phase, name,
            (int)getpid(), row);
    fprintf(file, "\"ts\": %llu.%03llu", (unsigned long long)ns / 1000,
            (unsigned long long)ns % 1000);
}

static void put_duration(FILE *file, const cg_trace_event *event)
{
    fputs(", ", file);
    put_thousandths(file, "dur", (double)(event->ended_ns - event->began_ns));
    fprintf(file, ", \"args\": {\"chunk\": %u, \"level\": \"L%u\", \"status\": \"%s\", ",
            event->chunk_index, event->level, cg_strerror(event->status));
}

static void put_read(FILE *file, const cg_trace_event *event, unsigned row)
{
    begin_event(file, "X", "read", row, event->began_ns);
    put_duration(file, event);
    fprintf(file, "\"from\": %llu, \"asked_bytes\": %llu, \"bytes\": %llu, ",
            (unsigned long long)event->from, (unsigned long long)event->asked_bytes,
            (unsigned long long)event->bytes);
    put_thousandths(file, "estimated_mbps", event->estimated_bps / 1e3);
    fputs(", ", file);
    put_thousandths(file, "actual_mbps", event->actual_bps / 1e3);
    fputs("}}", file);
    if (!(event->actual_bps > 0))
        return;
    begin_event(file, "C", "link, Mbit/s", ROW_PLAN, event->ended_ns);
    fputs(", \"args\": {", file);
    put_thousandths(file, "estimate", event->estimated_bps / 1e3);
    fputs(", ", file);
    put_thousandths(file, "actual", event->actual_bps / 1e3);
    fputs("}}", file);
}

static void put_decode(FILE *file, const cg_trace_event *event, unsigned row)
{
    begin_event(file, "X", "decode", row, event->began_ns);
    put_duration(file, event);
    put_thousandths(file, "estimated_us", event->estimated_ns);
    fputs(", ", file);
    put_thousandths(file, "thread_us", event->thread_ns);
    fputs("}}", file);
}

static void put_levels(FILE *file, const uint32_t chunks_at[CG_N_LEVELS])
{
    for (unsigned level = 0; level < CG_N_LEVELS; level++)
        fprintf(file, "%s\"L%u\": %u", level > 0 ? ", " : "", level, chunks_at[level]);
}

static void put_plan(FILE *file, const cg_trace_event *event)
{
    begin_event(file, "i", "plan", ROW_PLAN, event->began_ns);
    fputs(", \"s\": \"t\", \"args\": {", file);
    put_levels(file, event->chunks_at);
    fputs(", ", file);
    put_thousandths(file, "estimated_mbps", event->estimated_bps / 1e3);
    fputs("}}", file);
    begin_event(file, "C", "chunks planned", ROW_PLAN, event->began_ns);
    fputs(", \"args\": {", file);
    put_levels(file, event->chunks_at);
    fputs("}}", file);
}

static void put_cut(FILE *file, const cg_trace_event *event)
{
    begin_event(file, "i", "cut", ROW_PLAN, event->began_ns);
    fprintf(file, ", \"s\": \"t\", \"args\": {\"chunk\": %u, \"status\": \"%s\"}}",
            event->chunk_index, cg_strerror(event->status));
}

static int by_time(const void *a, const void *b)
{
    const cg_trace_event *x = *(const cg_trace_event *const *)a;
    const cg_trace_event *y = *(const cg_trace_event *const *)b;
    if (x->began_ns != y->began_ns)
        return x->began_ns < y->began_ns ? -1 : 1;
    return x < y ? -1 : x > y;
}

/* The first row that is free when the event begins. */
static unsigned take_row(uint64_t *free_at_ns, const cg_trace_event *event)
{
    /* There are as many rows as events, so that one is free. */
    unsigned row = 0;
    while (free_at_ns[row] > event->began_ns)
        row++;
    free_at_ns[row] = event->ended_ns;
    return row;
}

/* In the order in which they began. order, reads and decodes: room for all events and more. */
static void put_events(FILE *file, const cg_trace *trace, const cg_trace_event **order,
                       uint64_t *reads, uint64_t *decodes)
{
    for (uint32_t i = 0; i < trace->n_events; i++)
        order[i] = &trace->events[i];
    qsort(order, trace->n_events, sizeof *order, by_time);
    for (uint32_t i = 0; i < trace->n_events; i++)
        switch (order[i]->kind) {
        case CG_TRACE_READ: put_read(file, order[i], ROW_READ + take_row(reads, order[i])); break;
        case CG_TRACE_DECODE:
            put_decode(file, order[i], ROW_DECODE + take_row(decodes, order[i]));
            break;
        case CG_TRACE_PLAN: put_plan(file, order[i]); break;
        case CG_TRACE_CUT: put_cut(file, order[i]); break;
        }
}

/* Nothing of one that is no UTF-8: JSON has no way to say it. */
static void put_request(FILE *file, const char *request_id)
{
    json_t *text = request_id[0] != '\0' ? json_string(request_id) : NULL;
    if (text == NULL)
        return;
    fputs("\"request\": ", file);
    json_dumpf(text, file, JSON_ENCODE_ANY | JSON_ENSURE_ASCII);
    fputs(", ", file);
    json_decref(text);
}

static void put_load(FILE *file, const cg_trace *trace)
{
    const cachegen_progress *p = &trace->progress;
    begin_event(file, "X", "load", ROW_LOAD, trace->began_ns);
    fputs(", ", file);
    put_thousandths(file, "dur", (double)p->total_ns);
    fputs(", \"args\": {", file);
    put_request(file, trace->request_id);
    fprintf(file, "\"number\": %u, \"status\": \"%s\", \"loaded_tokens\": %u, ", trace->number,
            cg_strerror((cg_status)p->status), p->loaded_tokens);
    put_levels(file, p->chunks_at);
    fprintf(file,
            ", \"bytes_read\": %llu, \"bytes_dropped\": %llu, \"predicted_kl_micronats\": %llu}}",
            (unsigned long long)p->bytes_read, (unsigned long long)p->bytes_dropped,
            (unsigned long long)p->predicted_kl_micronats);
}

/* The events, and what goes with all of them. */
static cg_status put_trace(FILE *file, const cg_trace *trace)
{
    const size_t n = trace->n_events + (size_t)1;
    const cg_trace_event **order = calloc(n, sizeof *order);
    uint64_t *rows = calloc(2 * n, sizeof *rows);
    if (order != NULL && rows != NULL) {
        fprintf(file,
                "{\"displayTimeUnit\": \"ms\", \"otherData\": {\"began_unix_ns\": \"%llu\", "
                "\"dropped_events\": %u, \"lost_traces\": %u}, \"traceEvents\": [\n",
                (unsigned long long)trace->began_unix_ns, trace->n_dropped, trace->n_lost);
        fprintf(file,
                "{\"ph\": \"M\", \"name\": \"process_name\", \"pid\": %d, \"tid\": 0, "
                "\"args\": {\"name\": \"cachegen\"}}",
                (int)getpid());
        put_load(file, trace);
        put_events(file, trace, order, rows, rows + n);
        fputs("\n]}\n", file);
    }
    const bool has_memory = order != NULL && rows != NULL;
    free(rows);
    free(order);
    return has_memory ? CG_OK : CG_ERR_NO_MEMORY;
}

cg_status cg_trace_write(const cg_trace *trace, const char *directory)
{
    char path[PATH_MAX], temporary[PATH_MAX];
    const int path_bytes =
        snprintf(path, sizeof path, "%s/load-%llu-%d-%u.json", directory,
                 (unsigned long long)trace->began_unix_ns, (int)getpid(), trace->number);
    const int temporary_bytes = snprintf(temporary, sizeof temporary, "%s.tmp", path);
    if (path_bytes < 0 || temporary_bytes < 0 || (size_t)temporary_bytes >= sizeof temporary)
        return CG_ERR_INVALID_ARGUMENT;
    const int descriptor =
        open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (descriptor < 0)
        return cg_status_from_errno(errno);
    FILE *file = fdopen(descriptor, "w");
    cg_status status = CG_ERR_NO_MEMORY;
    if (file == NULL) {
        close(descriptor);
    } else {
        status = put_trace(file, trace);
        if (ferror(file) && status == CG_OK)
            status = CG_ERR_IO;
        if (fclose(file) != 0 && status == CG_OK)
            status = cg_status_from_errno(errno);
    }
    if (status == CG_OK && rename(temporary, path) != 0)
        status = cg_status_from_errno(errno);
    if (status != CG_OK)
        unlink(temporary);
    return status;
}

/* ---- the writer ---- */

/* The body of the thread that writes what loads have left. Each thing that costs traces is said
 * once. */
static void *write_traces(void *argument)
{
    cg_runtime *rt = argument;
    const char *directory = rt->connector->config->trace_dir;
    bool has_failed = false, has_lost = false;
    cg_trace *trace;
    pthread_mutex_lock(&rt->lock);
    while ((trace = (cg_trace *)cg_operation_take(rt, &rt->traces)) != NULL) {
        const uint32_t n_files = rt->n_trace_files; /* only this thread changes it */
        pthread_mutex_unlock(&rt->lock);
        cg_status status = CG_OK;
        if (n_files < CG_TRACE_MAX_FILES)
            status = cg_trace_write(trace, directory);
        const bool is_written = n_files < CG_TRACE_MAX_FILES && status == CG_OK;
        if (is_written && n_files + 1 == CG_TRACE_MAX_FILES)
            fprintf(stderr, "cachegen: trace_dir %s: %d traces: no more are written\n", directory,
                    CG_TRACE_MAX_FILES);
        if (status != CG_OK && !has_failed)
            fprintf(stderr, "cachegen: trace_dir %s: %s: a load's trace is lost\n", directory,
                    cg_strerror(status));
        if (trace->n_lost > 0 && !has_lost)
            fprintf(stderr, "cachegen: trace_dir %s is slow: traces are lost\n", directory);
        has_failed = has_failed || status != CG_OK;
        has_lost = has_lost || trace->n_lost > 0;
        cg_trace_free(trace);
        pthread_mutex_lock(&rt->lock);
        rt->n_traces_waiting--;
        rt->n_trace_files += is_written;
    }
    cg_runtime_leave(rt);
    return NULL;
}

/* Whether one more trace can be written. */
static bool begin(cg_runtime *rt, uint32_t *number_out)
{
    pthread_mutex_lock(&rt->lock);
    const bool can_begin =
        rt->n_trace_files < CG_TRACE_MAX_FILES &&
        cg_runtime_start(rt, &rt->tracer, "cachegen-trace", write_traces) == CG_OK;
    *number_out = ++rt->n_traces;
    pthread_mutex_unlock(&rt->lock);
    return can_begin;
}

static uint64_t unix_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* With the lead of no character whose rest is cut. */
static void keep_id(cg_trace *trace, const char *request_id)
{
    size_t n = request_id != NULL ? strnlen(request_id, CG_TRACE_ID_BYTES + 1) : 0;
    if (n > CG_TRACE_ID_BYTES)
        for (n = CG_TRACE_ID_BYTES; n > 0 && (request_id[n] & 0xc0) == 0x80;)
            n--;
    if (n > 0)
        memcpy(trace->request_id, request_id, n);
}

cg_trace *cg_trace_new(cachegen *connector, uint64_t began_ns, const char *request_id)
{
    if (connector->config->trace_dir == NULL)
        return NULL;
    cg_trace *trace = cg_operation_new(connector, sizeof *trace, destroy);
    if (trace == NULL)
        return NULL;
    trace->began_ns = began_ns;
    trace->began_unix_ns = unix_ns();
    keep_id(trace, request_id);
    if (begin(trace->op.runtime, &trace->number))
        return trace;
    cg_trace_free(trace);
    return NULL;
}

void cg_trace_end(cg_trace *trace, const cachegen_progress *progress)
{
    cg_runtime *rt = trace->op.runtime;
    /* Rather lost than a queue without end behind a slow directory; and nobody writes it any more
     * where a GPU has held the load until after the connector was closed. */
    if (rt->n_traces_waiting == CG_TRACE_MAX_WAITING || rt->stop) {
        rt->n_traces_lost++;
        cg_trace_free(trace);
        return;
    }
    rt->n_traces_waiting++;
    trace->progress = *progress;
    trace->n_lost = rt->n_traces_lost;
    cg_operation_put(&rt->traces, &trace->op);
}
