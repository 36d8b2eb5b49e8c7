#include "iouring/io_uring_ring.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

/* Pinned memory counts against RLIMIT_MEMLOCK and cannot be swapped: enough for deep queues, not
 * for everything. */
static const uint64_t MAX_FIXED_BYTES = 256ull << 20;

enum { MAX_RING_ENTRIES = 32768, THREADS_SHARE = 8, LEAST_WORKERS = 4 };

static uint32_t power_of_two(uint64_t at_least)
{
    uint32_t n = 64;
    while (n < at_least && n < MAX_RING_ENTRIES)
        n *= 2;
    return n;
}

/* The name of what is missing, or NULL. */
static const char *missing_feature(struct io_uring *ring)
{
    static const struct {
        int opcode;
        const char *name;
    } needed[] = {
        {IORING_OP_OPENAT2, "openat2"},   {IORING_OP_STATX, "statx"},
        {IORING_OP_READ, "read"},         {IORING_OP_WRITE, "write"},
        {IORING_OP_FSYNC, "fsync"},       {IORING_OP_CLOSE, "close"},
        {IORING_OP_LINKAT, "linkat"},     {IORING_OP_RENAMEAT, "renameat"},
        {IORING_OP_UNLINKAT, "unlinkat"}, {IORING_OP_MKDIRAT, "mkdirat"},
        {IORING_OP_POLL_ADD, "poll"},     {IORING_OP_ASYNC_CANCEL, "cancel"},
    };
    if (!(ring->features & IORING_FEAT_EXT_ARG))
        return "waiting with a time-out";
    if (!(ring->features & IORING_FEAT_NODROP))
        return "completions that are never dropped";
    struct io_uring_probe *probe = io_uring_get_probe_ring(ring);
    if (probe == NULL)
        return "probing";
    const char *missing = NULL;
    for (size_t i = 0; i < sizeof needed / sizeof needed[0] && missing == NULL; i++)
        if (!io_uring_opcode_supported(probe, needed[i].opcode))
            missing = needed[i].name;
    io_uring_free_probe(probe);
    return missing;
}

/* How many threads this container may have; 0: not said. */
static uint64_t threads_of_container(void)
{
    static const char *const PATHS[] = {"/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"};
    unsigned long long n = 0;
    for (size_t i = 0; i < sizeof PATHS / sizeof PATHS[0] && n == 0; i++) {
        FILE *file = fopen(PATHS[i], "re");
        if (file == NULL)
            continue;
        if (fscanf(file, "%llu", &n) != 1) /* "max" */
            n = 0;
        fclose(file);
    }
    return n;
}

/* Each operation that hangs holds a worker, which counts as a thread of the process. All threads
 * that it may have are not ours: the host needs some, too. */
static uint32_t most_workers(uint32_t n_flights)
{
    struct rlimit user;
    uint64_t n = threads_of_container();
    if (getrlimit(RLIMIT_NPROC, &user) == 0 && user.rlim_cur != RLIM_INFINITY &&
        (n == 0 || user.rlim_cur < n))
        n = user.rlim_cur > 0 ? user.rlim_cur : 1;
    if (n == 0 || n / THREADS_SHARE >= n_flights)
        return n_flights;
    return n / THREADS_SHARE > LEAST_WORKERS ? (uint32_t)(n / THREADS_SHARE) : LEAST_WORKERS;
}

bool cg_io_ring_init(cg_io_ring *r, uint32_t n_flights, char *reason_out, size_t reason_bytes)
{
    /* A flight has at most four entries, and two cancellations; one more polls for wake-ups. */
    struct io_uring_params params = {
        .flags = IORING_SETUP_CLAMP | IORING_SETUP_CQSIZE,
        .cq_entries = power_of_two(6ull * n_flights + 1),
    };
    memset(r, 0, sizeof *r);
    const int error = -io_uring_queue_init_params(power_of_two(n_flights), &r->ring, &params);
    if (error != 0) {
        if (reason_out != NULL)
            snprintf(reason_out, reason_bytes, "io_uring_setup: %s%s", strerror(error),
                     error == EPERM || error == EACCES
                         ? " (seccomp or kernel.io_uring_disabled forbids it)"
                         : "");
        return false;
    }
    const char *missing = missing_feature(&r->ring);
    if (missing != NULL) {
        if (reason_out != NULL)
            snprintf(reason_out, reason_bytes, "this kernel's io_uring lacks %s", missing);
        io_uring_queue_exit(&r->ring);
        return false;
    }
    io_uring_ring_dontfork(&r->ring);

    /* By default 4 workers a CPU: a few hung reads would hold up all others. Older kernels cannot
     * be told. */
    unsigned workers[2] = {most_workers(n_flights), 0};
    io_uring_register_iowq_max_workers(&r->ring, workers);
    /* Without it a linked read takes its file when it is submitted, before the open has filled the
     * slot. */
    r->has_chains = (r->ring.features & IORING_FEAT_LINKED_FILE) != 0 &&
                    io_uring_register_files_sparse(&r->ring, n_flights) == 0;
    r->has_fixed_buffers = io_uring_register_buffers_sparse(&r->ring, CG_IO_FIXED_BUFFERS) == 0;
    for (int i = 0; i < CG_IO_FIXED_BUFFERS; i++)
        r->free_slots[r->n_free_slots++] = i;
    return true;
}

void cg_io_ring_register(cg_io_ring *r, cg_io_pool_buffer *buffer)
{
    const uint64_t bytes = buffer->buffer.capacity_bytes;
    /* To register a page takes more time than reading into it could save, and a slot. */
    if (bytes <= CG_IO_PAGE_BYTES || buffer->slot != CG_IO_NO_SLOT || !r->has_fixed_buffers ||
        r->n_free_slots == 0 || bytes > MAX_FIXED_BYTES - r->fixed_bytes)
        return;
    const int slot = r->free_slots[r->n_free_slots - 1];
    const struct iovec memory = {buffer->buffer.data, bytes};
    const uint64_t tag = 0;
    if (io_uring_register_buffers_update_tag(&r->ring, (unsigned)slot, &memory, (const __u64 *)&tag,
                                             1) != 1) {
        r->has_fixed_buffers = false; /* RLIMIT_MEMLOCK: plain reads from now on */
        return;
    }
    r->n_free_slots--;
    r->slot_bytes[slot] = bytes;
    r->fixed_bytes += bytes;
    buffer->slot = slot;
}

void cg_io_ring_evict(void *context, int slot)
{
    cg_io_ring *r = context;
    const struct iovec none = {NULL, 0};
    const uint64_t tag = 0;
    io_uring_register_buffers_update_tag(&r->ring, (unsigned)slot, &none, (const __u64 *)&tag, 1);
    r->fixed_bytes -= r->slot_bytes[slot];
    r->free_slots[r->n_free_slots++] = slot;
}

bool cg_io_uring_reason(char *reason_out, size_t reason_bytes)
{
    cg_io_ring *r = malloc(sizeof *r);
    if (reason_bytes > 0)
        reason_out[0] = '\0';
    const bool works = r != NULL && cg_io_ring_init(r, 1, reason_out, reason_bytes);
    if (works)
        io_uring_queue_exit(&r->ring);
    free(r);
    return works;
}
