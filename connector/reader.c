/* One thread reads for all loads of a connector. What to read next and what to give up is the
 * plan's to say (connector/fetch_plan.h): it is asked under the lock, and its answers are carried
 * out without it. */
#include "connector/reader.h"

#include "connector/clock.h"
#include "connector/fetch_exit.h"
#include "connector/load_deliver.h"

#include <stdlib.h>
#include <unistd.h>

enum {
    LOCKED_MS = 2, /* for ending loads, and what one more of them takes */
    MAX_COMPLETIONS = 32,
    GRACE_MS = 200, /* for reads under way when the connector closes */
    MAX_CLOSING = 8,
    REFUSED_MS =
        1000,    /* until a file is tried again that the queue does not close: too much hangs */
    NO_READ = 0, /* what is closed; reads have other numbers */
};

/* A read of a file that stays open. */
typedef struct held_file {
    uint64_t id; /* of the read; 0: none */
    cg_open_file *file;
} held_file;

typedef struct reader {
    cg_runtime *rt;
    cg_io *io;
    cg_reader_files *files; /* NULL: each read opens and closes its file */
    bool is_far;            /* constant: all files stay open, not only those read in parts */
    held_file *held;        /* [depth] */
    int *unclosed;          /* [2 * depth + MAX_CLOSING], files to close when there is a place */
    uint32_t n_closing, n_unclosed;
} reader;

static cg_reader_name name_of(const reader *r, const cg_fetch_read *read)
{
    const cachegen_load *load = cg_load_of_fetch(read->fetch);
    const cachegen *c = load->op.connector;
    return (cg_reader_name){.load_ns = r->is_far ? 0 : load->op.started_ns,
                            .store = c->root,
                            .key = load->plan->keys[read->chunk_index + 1],
                            .profile = c->model.profile_fingerprint,
                            .level = (cg_level)read->file_level};
}

static bool is_to_end(const cg_fetch_read *read)
{
    return read->from + read->bytes >=
           cg_fetch_file_bytes(read->fetch, read->chunk_index, read->file_level);
}

/* Begins a read of a file that is open, or opens it to stay so. */
static cg_status submit_open(reader *r, const cg_fetch_read *read)
{
    const cachegen *c = r->rt->connector;
    const cg_reader_name name = name_of(r, read);
    cg_open_file *file = cg_reader_files_take(r->files, &name);
    held_file *held = r->held;
    if (file == NULL)
        return cg_store_read_open(c->store, r->io, &name.key, name.level, &name.profile, read->from,
                                  read->bytes, read->id);
    /* There is a place for each read that can be under way. */
    while (held->id != 0)
        held++;
    *held = (held_file){read->id, file};
    return cg_io_read_file(r->io, file, read->from, read->bytes, read->id);
}

/* A read has ended, or was given up: the file need not stay open for it. is_read: to its end; of a
 * near store nobody reads it again. */
static void let_go(reader *r, uint64_t id, bool is_read)
{
    for (uint32_t i = 0; r->files != NULL && i < r->rt->fetch_plan.window.depth; i++)
        if (r->held[i].id == id) {
            cg_reader_files_give(r->files, r->held[i].file, is_read,
                                 is_read && !r->is_far ? 0 : cg_now_ns());
            r->held[i].id = 0;
        }
}

static bool begin_close(reader *r, int file)
{
    const bool is_begun = r->n_closing < MAX_CLOSING && cg_io_close(r->io, file, NO_READ) == CG_OK;
    r->n_closing += is_begun;
    return is_begun;
}

/* In the queue, now or later, since a FUSE daemon may have to be waited for. */
static void close_file(reader *r, int file)
{
    if (!begin_close(r, file))
        r->unclosed[r->n_unclosed++] = file;
}

/* Closes what is not needed any more. */
static void close_files(reader *r)
{
    int file;
    while (r->n_unclosed > 0 && begin_close(r, r->unclosed[r->n_unclosed - 1]))
        r->n_unclosed--;
    while (r->files != NULL && r->n_unclosed == 0 && r->n_closing < MAX_CLOSING &&
           (file = cg_reader_files_drop(r->files, cg_now_ns())) >= 0)
        close_file(r, file);
}

/* When close_files() has something to do; with all places for closing taken the next one that is
 * free completes something. */
static uint64_t close_ns(const reader *r)
{
    if (r->files == NULL || r->n_closing == MAX_CLOSING)
        return UINT64_MAX;
    return r->n_unclosed > 0 ? cg_now_ns() + cg_ms(REFUSED_MS) : cg_reader_files_wake_ns(r->files);
}

/* Whether a read may leave its file open. Each operation that is under way may leave one that has
 * to wait to be closed: what waits already must leave room for these. */
static bool may_open(const reader *r)
{
    return r->files != NULL && r->n_unclosed < r->rt->fetch_plan.window.depth;
}

/* Without the lock; read is a copy of what the plan entered. */
static void submit_read(reader *r, const cg_fetch_read *read)
{
    const cachegen_load *load = cg_load_of_fetch(read->fetch); /* kept by the read's reference */
    const cachegen *c = load->op.connector;
    const cg_geometry *g = &c->model.geometry;
    const uint64_t raw_bytes =
        cg_geometry_elements(g, load->fetch.sizes[read->chunk_index].n_tokens) *
        cg_dtype_bytes(g->dtype);
    cg_status status;
    /* Sizes come from files and plans, which may lie: no memory for more than any chunk can
     * take. */
    if (read->from + read->bytes > 2 * raw_bytes + (1 << 20))
        status = CG_ERR_BUFFER_TOO_SMALL; /* no chunk is that large */
    else if (may_open(r) && (r->is_far || read->from > 0 || !is_to_end(read)))
        status = submit_open(r, read);
    else
        status = cg_store_read(c->store, r->io, &load->plan->keys[read->chunk_index + 1],
                               (cg_level)read->file_level, &c->model.profile_fingerprint,
                               read->from, read->bytes, (cg_io_cache)c->config->io_cache, read->id);
    if (status == CG_OK)
        return;
    let_go(r, read->id, /*is_read=*/false);
    pthread_mutex_lock(&r->rt->lock);
    cg_load_read_ended(r->rt, read, status, NULL, NULL, cg_now_ns());
    pthread_mutex_unlock(&r->rt->lock);
}

/* A plan for many chunks is made without the lock: steps of the engine take it. True: one was. */
static bool plan_many(cg_runtime *rt)
{
    pthread_mutex_lock(&rt->lock);
    const bool is_many = cg_fetch_plan_begin(&rt->fetch_plan, cg_runtime_speeds(rt), cg_now_ns());
    cg_runtime_speeds_end(rt);
    pthread_mutex_unlock(&rt->lock);
    if (!is_many)
        return false;
    cg_fetch_plan_make(&rt->fetch_plan);
    pthread_mutex_lock(&rt->lock);
    cg_fetch_plan_end(&rt->fetch_plan);
    pthread_mutex_unlock(&rt->lock);
    return true;
}

/* Hands chunks that are as fine as they will be to the pool; false: there was none. */
static bool decode_all(reader *r)
{
    cg_runtime *rt = r->rt;
    cg_load_chunk *chunk;
    bool any = false;
    do {
        uint32_t index;
        plan_many(rt);
        pthread_mutex_lock(&rt->lock);
        cg_fetch *fetch =
            cg_fetch_next_decode(&rt->fetch_plan, cg_runtime_speeds(rt), cg_now_ns(), &index);
        cg_runtime_speeds_end(rt);
        chunk = fetch != NULL ? cg_load_decode_begun(fetch, index) : NULL;
        pthread_mutex_unlock(&rt->lock);
        if (chunk != NULL)
            cg_load_submit(chunk);
        any = any || chunk != NULL;
    } while (chunk != NULL);
    return any;
}

static void submit_all(reader *r)
{
    cg_runtime *rt = r->rt;
    const cg_fetch_read *read;
    bool is_due;
    do {
        cg_fetch_read begun;
        /* Before each read, since decoding makes room for what is read. */
        decode_all(r);
        const bool is_new = plan_many(rt);
        pthread_mutex_lock(&rt->lock);
        read = cg_fetch_next_read(&rt->fetch_plan, cg_runtime_speeds(rt), cg_now_ns());
        cg_runtime_speeds_end(rt);
        if (read != NULL) {
            cg_load_read_begun(cg_load_of_fetch(read->fetch));
            /* Without the lock the plan's own may change. */
            begun = *read;
        }
        /* What has changed since a plan that is new wakes the reader. */
        is_due = read == NULL && !is_new && cg_fetch_plan_is_due(&rt->fetch_plan);
        pthread_mutex_unlock(&rt->lock);
        if (read != NULL)
            submit_read(r, &begun);
        /* Where only decoding makes room, or what is decoded now is not read any further, there may
         * be something else to read. */
    } while (read != NULL || is_due || decode_all(r));
}

/* With the lock held: the file of a read that opened it stays open, unless that is refused. */
static bool keep_file(const reader *r, const cg_fetch_read *read, int file)
{
    if (read == NULL || file < 0)
        return file < 0;
    const cg_reader_name name = name_of(r, read);
    return cg_reader_files_put(r->files, &name, file, is_to_end(read), cg_now_ns());
}

static void take_completion(reader *r, const cg_io_completion *done)
{
    cg_runtime *rt = r->rt;
    cg_status status = done->status;
    cg_load_piece *piece = done->buffer != NULL ? calloc(1, sizeof *piece) : NULL;
    cg_chunk_header header;
    if (piece != NULL)
        piece->buffer = done->buffer;
    else if (done->buffer != NULL)
        status = CG_ERR_NO_MEMORY;
    if (piece == NULL)
        cg_io_buffer_release(done->buffer);
    const bool has_header =
        piece != NULL &&
        cg_chunk_header_parse(done->buffer->data, done->buffer->n_bytes, &header) == CG_OK;
    if (done->user == NO_READ)
        r->n_closing--;
    cg_store_note(rt->connector->store, done);
    pthread_mutex_lock(&rt->lock);
    const cg_fetch_read *read = cg_fetch_find_read(&rt->fetch_plan, done->user);
    if (done->user != NO_READ)
        let_go(r, done->user, read != NULL && is_to_end(read));
    const bool is_kept = keep_file(r, read, done->file);
    if (read != NULL) {
        if (piece != NULL)
            piece->from = read->from;
        cg_load_read_ended(rt, read, status, piece, has_header ? &header : NULL,
                           done->completed_ns);
    }
    cg_runtime_reopen_store(rt);
    pthread_mutex_unlock(&rt->lock);
    if (!is_kept)
        close_file(r, done->file);
    /* Of a read that the plan does not know any more. */
    if (read == NULL && piece != NULL) {
        cg_io_buffer_release(piece->buffer);
        free(piece);
    }
}

/* With the lock held. */
static cg_fetch *next_overdue(cg_runtime *rt, uint64_t now_ns)
{
    cg_fetch *overdue = cg_fetch_overdue(&rt->fetch_plan, cg_runtime_speeds(rt), now_ns);
    cg_runtime_speeds_end(rt);
    return overdue;
}

/* With the lock held. */
static cg_fetch *next_hopeless(cg_runtime *rt, uint64_t now_ns, uint32_t *index_out)
{
    cg_fetch *hopeless =
        cg_fetch_hopeless(&rt->fetch_plan, cg_runtime_speeds(rt), now_ns, index_out);
    cg_runtime_speeds_end(rt);
    return hopeless;
}

/* With the lock held: other connectors' plans count on it. */
static void tell_what_is_wanted(cg_runtime *rt)
{
    cg_runtime_speeds(rt)->wanted = cg_fetch_wanted(&rt->fetch_plan);
    cg_runtime_speeds_end(rt);
}

/* Ends loads and gives up reads whose time is over; returns how long to wait for the next
 * completion. */
static uint64_t watch(reader *r)
{
    cg_runtime *rt = r->rt;
    const uint64_t now_ns = cg_now_ns();
    const cg_fetch_read *late;
    uint64_t wake_ns = UINT64_MAX;
    cg_fetch *overdue, *hopeless;
    uint32_t index;
    pthread_mutex_lock(&rt->lock);
    /* Each time all loads are looked at. The engine's steps want the lock, too: what is left is for
     * the next round, which is at once. */
    const uint64_t until_ns = cg_now_ns() + cg_ms(LOCKED_MS);
    while ((overdue = next_overdue(rt, now_ns)) != NULL) {
        cg_load_overdue(cg_load_of_fetch(overdue)); /* its reads are given up next */
        wake_ns = now_ns;                           /* for what others may read now */
        if (cg_now_ns() >= until_ns)
            break;
    }
    while ((hopeless = next_hopeless(rt, now_ns, &index)) != NULL) {
        cg_load_shorten(cg_load_of_fetch(hopeless), index);
        wake_ns = now_ns;
        if (cg_now_ns() >= until_ns)
            break;
    }
    while ((late = cg_fetch_give_up(&rt->fetch_plan, now_ns)) != NULL) {
        const uint64_t id = late->id;
        rt->stats.abandoned_reads++;
        pthread_mutex_unlock(&rt->lock);
        cg_io_abandon(r->io, id); /* completes at the next wait, which is at once */
        wake_ns = now_ns;
        pthread_mutex_lock(&rt->lock);
    }
    tell_what_is_wanted(rt);
    if (wake_ns == UINT64_MAX)
        wake_ns = cg_fetch_wake_ns(&rt->fetch_plan);
    pthread_mutex_unlock(&rt->lock);
    const uint64_t closing_ns = close_ns(r);
    if (closing_ns < wake_ns)
        wake_ns = closing_ns;
    if (wake_ns == UINT64_MAX)
        return UINT64_MAX;
    return wake_ns > now_ns ? wake_ns - now_ns : 0;
}

/* Files stay open where that spares round trips, or a network's file system would forget with each
 * opening what it holds of the file; not with O_DIRECT, which is of no use there. */
static void begin_files(reader *r)
{
    const cachegen *c = r->rt->connector;
    cg_reader_files *files = cg_link_files(r->rt->link);
    if (files == NULL || c->config->io_cache != CG_IO_CACHED)
        return;
    r->is_far = cg_handle_is_far(c);
    r->held = calloc(r->rt->fetch_plan.window.depth, sizeof *r->held);
    r->unclosed =
        calloc(2 * (size_t)r->rt->fetch_plan.window.depth + MAX_CLOSING, sizeof *r->unclosed);
    if (r->held == NULL || r->unclosed == NULL) {
        free(r->held);
        free(r->unclosed);
        return;
    }
    r->files = files;
    cg_reader_files_begin(files);
}

/* Its reads have ended, or have been given up. */
static void end_files(reader *r)
{
    int file;
    if (r->files == NULL)
        return;
    for (uint32_t i = 0; i < r->rt->fetch_plan.window.depth; i++)
        if (r->held[i].id != 0)
            cg_reader_files_give(r->files, r->held[i].file, /*is_read=*/false, cg_now_ns());
    cg_reader_files_end(r->files);
    /* Nobody's deadline depends on this thread any more. */
    while (r->n_unclosed > 0)
        close(r->unclosed[--r->n_unclosed]);
    while ((file = cg_reader_files_drop(r->files, cg_now_ns())) >= 0)
        if (r->io == NULL || !begin_close(r, file))
            close(file);
    free(r->held);
    free(r->unclosed);
}

void *cg_load_reader(void *argument)
{
    cg_runtime *rt = argument;
    cg_io_config io_config = cg_runtime_io_config(rt->connector);
    reader r = {.rt = rt};
    /* Closing has places of its own: a close that hangs takes none from reads. */
    io_config.queue_depth += MAX_CLOSING;
    io_config.n_threads += MAX_CLOSING;
    begin_files(&r);
    cg_io_completion completions[MAX_COMPLETIONS];
    cg_status status;
    uint32_t n_added;

    pthread_mutex_lock(&rt->lock);
    do { /* loads that came meanwhile are not to end for what those before them lacked */
        n_added = rt->fetch_plan.n_added;
        pthread_mutex_unlock(&rt->lock);
        status = cg_io_new(&io_config, &r.io);
        pthread_mutex_lock(&rt->lock);
    } while (status != CG_OK && !rt->stop && rt->fetch_plan.n_added != n_added);
    cg_status queue_status = status;
    if (status == CG_OK) {
        rt->reader_io = r.io;
    } else {
        cg_loads_refuse(rt, status);
        cg_runtime_resign(rt, &rt->reader);
    }
    while (queue_status == CG_OK && !rt->stop) {
        pthread_mutex_unlock(&rt->lock);
        submit_all(&r);
        close_files(&r);
        const uint64_t timeout_ns = watch(&r);
        size_t n = 0;
        queue_status = cg_io_wait(r.io, timeout_ns, completions, MAX_COMPLETIONS, &n);
        for (size_t i = 0; i < n; i++)
            take_completion(&r, &completions[i]);
        pthread_mutex_lock(&rt->lock);
    }
    if (status == CG_OK) {
        rt->reader_io = NULL;
        if (queue_status != CG_OK) /* nothing will ever come out of this queue */
            cg_loads_refuse(rt, queue_status);
        for (uint32_t i = 0; i < rt->fetch_plan.window.depth; i++) {
            const cg_fetch_read *read = &rt->fetch_plan.reads[i];
            if (read->id != 0) /* of a load that is done already; cg_io_free() cancels it */
                cg_load_read_ended(rt, read, CG_ERR_CANCELLED, NULL, NULL, cg_now_ns());
        }
        tell_what_is_wanted(rt);
        if (queue_status != CG_OK)
            cg_runtime_resign(rt, &rt->reader);
    }
    pthread_mutex_unlock(&rt->lock);
    end_files(&r);
    cg_io_free(r.io, cg_ms(GRACE_MS));
    pthread_mutex_lock(&rt->lock);
    cg_runtime_leave(rt);
    return NULL;
}
