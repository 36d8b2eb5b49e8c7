#include "connector/gather.h"

#include "connector/clock.h"
#include "connector/host_socket.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_RANKS = 256, DATA_ALIGNMENT = 64 };
static const uint32_t MAGIC = 0x31706763; /* of this version's parts */

/* A part's memory: the head, the chunks, then their data. Sender and listener are of one machine.
 */
typedef struct part_head {
    uint32_t magic, n_chunks;
    uint32_t first_head, n_heads;
    uint32_t is_refusal; /* no data: the sender had no memory for it */
    uint32_t reserved;
    uint64_t made_ns; /* CLOCK_MONOTONIC */
} part_head;

/* One that has come. */
typedef struct part {
    struct part *next;
    int connection; /* index; -1: closed */
    uint8_t *map;
    size_t n_bytes;
    part_head head;
    cg_gather_chunk *chunks; /* [head.n_chunks] */
} part;

struct cg_gather {
    cg_gather_config config; /* constant; group is not kept */
    pid_t pid;               /* constant: of the process that it works in */
    cg_key name;             /* constant: of its socket */
    int listener;            /* constant; -1: this one sends */

    /* What listens: one thread at a time. */
    int connections[MAX_RANKS];
    uint32_t n_connections;
    part *parts;

    /* What sends. */
    pthread_mutex_t lock;
    int sender;            /* the lock; -1: not connected */
    uint64_t passed_bytes; /* the lock: that the listener has not dropped yet */
    uint64_t begun_bytes;  /* the lock: of parts that are being made */
};

static uint64_t chunk_bytes(const cg_gather *g, uint32_t n_tokens, uint32_t n_heads)
{
    const cg_geometry *m = &g->config.geometry;
    return (uint64_t)CG_N_PLANES * m->n_layers * n_tokens * n_heads * m->head_dim *
           cg_dtype_bytes(m->dtype);
}

static uint64_t data_begin(uint32_t n_chunks)
{
    const uint64_t end = sizeof(part_head) + n_chunks * sizeof(cg_gather_chunk);
    return (end + DATA_ALIGNMENT - 1) / DATA_ALIGNMENT * DATA_ALIGNMENT;
}

cg_status cg_gather_new(const cg_gather_config *config, cg_gather **gather_out)
{
    cg_status status = CG_OK;
    *gather_out = NULL;
    cg_gather *g = calloc(1, sizeof *g);
    if (g == NULL)
        return CG_ERR_NO_MEMORY;
    g->config = *config;
    g->config.group = NULL;
    g->pid = getpid();
    g->listener = g->sender = -1;
    g->name = cg_key_of_bytes(config->group, strlen(config->group));
    pthread_mutex_init(&g->lock, NULL);
    if (config->first_head == 0)
        status = cg_host_socket_listen(&g->name, MAX_RANKS, &g->listener);
    if (status != CG_OK) {
        cg_gather_free(g);
        return status;
    }
    *gather_out = g;
    return CG_OK;
}

static void close_connection(cg_gather *g, uint32_t index)
{
    close(g->connections[index]);
    /* The last connection takes its place, and its parts are told. */
    const uint32_t last = --g->n_connections;
    g->connections[index] = g->connections[last];
    for (part *p = g->parts; p != NULL; p = p->next)
        if (p->connection == (int)index)
            p->connection = -1;
        else if (p->connection == (int)last)
            p->connection = (int)index;
}

/* The sender may use that memory again. One that does not read its messages is left: then it
 * forgets what it has passed on. */
static void tell_dropped(cg_gather *g, const part *p)
{
    const uint64_t n_bytes = p->n_bytes;
    if (p->connection >= 0 && send(g->connections[p->connection], &n_bytes, sizeof n_bytes,
                                   MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
        close_connection(g, (uint32_t)p->connection);
}

static void free_part(part *p)
{
    munmap(p->map, p->n_bytes);
    free(p->chunks);
    free(p);
}

void cg_gather_free(cg_gather *g)
{
    if (g == NULL)
        return;
    while (g->parts != NULL) {
        part *p = g->parts;
        g->parts = p->next;
        free_part(p);
    }
    for (uint32_t i = 0; i < g->n_connections; i++)
        close(g->connections[i]);
    if (g->listener >= 0)
        close(g->listener);
    if (g->sender >= 0)
        close(g->sender);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

bool cg_gather_listens(const cg_gather *g)
{
    return g->listener >= 0;
}

/* ---- sending ---- */

/* With the lock held. */
static void disconnect(cg_gather *g)
{
    if (g->sender >= 0)
        close(g->sender);
    g->sender = -1;
    g->passed_bytes = 0;
}

/* With the lock held: what the listener has dropped since the last call. */
static void hear_dropped(cg_gather *g)
{
    uint64_t n_bytes;
    /* Each message of the listener is the size of a part that it has dropped. */
    ssize_t n = -1;
    while (g->sender >= 0 && (n = recv(g->sender, &n_bytes, sizeof n_bytes, MSG_DONTWAIT)) > 0)
        if (n == sizeof n_bytes)
            g->passed_bytes -= n_bytes < g->passed_bytes ? n_bytes : g->passed_bytes;
    if (n == 0 || (n < 0 && g->sender >= 0 && errno != EAGAIN && errno != EINTR))
        disconnect(g);
}

/* With the lock held. */
static cg_status connect_sender(cg_gather *g)
{
    return g->sender >= 0 ? CG_OK : cg_host_socket_connect(&g->name, &g->sender);
}

/* With the lock held. */
static cg_status send_fd(cg_gather *g, int fd, uint64_t n_bytes)
{
    union {
        char bytes[CMSG_SPACE(sizeof fd)];
        struct cmsghdr aligned;
    } control = {0};
    struct iovec content = {&n_bytes, sizeof n_bytes};
    struct msghdr message = {.msg_iov = &content,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    struct cmsghdr *attached = CMSG_FIRSTHDR(&message);
    attached->cmsg_level = SOL_SOCKET;
    attached->cmsg_type = SCM_RIGHTS;
    attached->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(attached), &fd, sizeof fd);
    const cg_status status = connect_sender(g);
    if (status != CG_OK)
        return status;
    if (sendmsg(g->sender, &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) {
        g->passed_bytes += n_bytes;
        return CG_OK;
    }
    /* The socket is full, or too many descriptors are on their way. */
    if (errno == EAGAIN || errno == ETOOMANYREFS)
        return CG_ERR_AGAIN;
    const int reason = errno;
    disconnect(g); /* the next one may find it again */
    return reason == EPIPE || reason == ECONNRESET ? CG_ERR_NOT_FOUND
                                                   : cg_status_from_errno(reason);
}

/* Memory of n_bytes with head and chunks in it. */
static cg_status make_part(cg_gather *g, const cg_gather_chunk *chunks, uint32_t n_chunks,
                           uint64_t n_bytes, bool is_refusal, cg_gather_part *out)
{
    const part_head head = {.magic = MAGIC,
                            .n_chunks = n_chunks,
                            .first_head = g->config.first_head,
                            .n_heads = g->config.n_heads,
                            .is_refusal = is_refusal,
                            .made_ns = cg_now_ns()};
    *out = (cg_gather_part){.fd = -1, .n_bytes = (size_t)n_bytes};
    out->fd = memfd_create("cachegenfs-part", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (out->fd < 0 || ftruncate(out->fd, (off_t)n_bytes) != 0)
        goto failed;
    out->map = mmap(NULL, out->n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, out->fd, 0);
    if (out->map == MAP_FAILED)
        goto failed;
    memcpy(out->map, &head, sizeof head);
    memcpy(out->map + sizeof head, chunks, n_chunks * sizeof *chunks);
    return CG_OK;
failed:
    if (out->fd >= 0)
        close(out->fd);
    *out = (cg_gather_part){.fd = -1};
    return CG_ERR_NO_MEMORY;
}

/* Frees the sender's side of it, after passing it on if `send`. */
static cg_status pass_on(cg_gather *g, cg_gather_part *made, bool send)
{
    cg_status status = CG_ERR_CANCELLED;
    /* Before the seals: F_SEAL_WRITE is refused while there is a mapping that can be written to. */
    munmap(made->map, made->n_bytes);
    free(made->data);
    /* Sealed, it stays as it is: the listener may map it and rely on its size. */
    if (send && fcntl(made->fd, F_ADD_SEALS,
                      F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) == 0) {
        pthread_mutex_lock(&g->lock);
        hear_dropped(g);
        status = send_fd(g, made->fd, made->n_bytes);
        pthread_mutex_unlock(&g->lock);
    }
    close(made->fd);
    *made = (cg_gather_part){.fd = -1};
    return status;
}

/* It was passed on, or there is none. */
static void end_part(cg_gather *g, uint64_t n_bytes)
{
    pthread_mutex_lock(&g->lock);
    g->begun_bytes -= n_bytes;
    pthread_mutex_unlock(&g->lock);
}

cg_status cg_gather_begin(cg_gather *g, const cg_gather_chunk *chunks, uint32_t n_chunks,
                          cg_gather_part *out)
{
    uint64_t n_bytes = data_begin(n_chunks), at = n_bytes;
    *out = (cg_gather_part){.fd = -1};
    if (g->pid != getpid())
        return CG_ERR_UNSUPPORTED;
    for (uint32_t i = 0; i < n_chunks; i++)
        n_bytes += chunk_bytes(g, chunks[i].n_tokens, g->config.n_heads);
    pthread_mutex_lock(&g->lock);
    hear_dropped(g);
    const uint64_t held_bytes = g->passed_bytes + g->begun_bytes;
    const bool is_full = held_bytes > 0 && held_bytes + n_bytes > g->config.limit_bytes;
    g->begun_bytes += is_full ? 0 : n_bytes;
    pthread_mutex_unlock(&g->lock);
    if (is_full) {
        /* A refusal, so that the listener does not wait for what will not come. */
        if (make_part(g, chunks, n_chunks, data_begin(n_chunks), true, out) == CG_OK)
            pass_on(g, out, true);
        return CG_ERR_AGAIN;
    }
    cg_status status = make_part(g, chunks, n_chunks, n_bytes, false, out);
    if (status == CG_OK &&
        (out->data = malloc((n_chunks + (size_t)1) * sizeof *out->data)) == NULL) {
        pass_on(g, out, false);
        status = CG_ERR_NO_MEMORY;
    }
    if (status != CG_OK) {
        end_part(g, n_bytes);
        return status;
    }
    for (uint32_t i = 0; i < n_chunks; i++) {
        out->data[i] = out->map + at;
        at += chunk_bytes(g, chunks[i].n_tokens, g->config.n_heads);
    }
    return CG_OK;
}

cg_status cg_gather_send(cg_gather *g, cg_gather_part *made)
{
    const uint64_t n_bytes = made->n_bytes;
    const cg_status status = pass_on(g, made, true);
    end_part(g, n_bytes);
    return status;
}

void cg_gather_abandon(cg_gather *g, cg_gather_part *made)
{
    const uint64_t n_bytes = made->n_bytes;
    pass_on(g, made, false);
    end_part(g, n_bytes);
}

/* ---- listening ---- */

/* Whether the memory is as long as its head and chunks say, and of this model. */
static bool is_sound(const cg_gather *g, const part *p)
{
    const part_head *h = &p->head;
    uint64_t left = p->n_bytes;
    if (left < data_begin(h->n_chunks))
        return false;
    left -= data_begin(h->n_chunks);
    for (uint32_t i = 0; i < h->n_chunks && !h->is_refusal; i++) {
        const uint32_t n_tokens = p->chunks[i].n_tokens;
        if (n_tokens > CG_MAX_CHUNK_TOKENS || chunk_bytes(g, n_tokens, h->n_heads) > left)
            return false;
        left -= chunk_bytes(g, n_tokens, h->n_heads);
    }
    return left == 0;
}

static bool read_head(const cg_gather *g, part *p)
{
    const uint32_t n_kv_heads = g->config.geometry.n_kv_heads;
    const size_t room = p->n_bytes - sizeof p->head; /* the caller saw that there is one */
    memcpy(&p->head, p->map, sizeof p->head);
    /* In this order: what is subtracted was found to be no larger before. */
    if (p->head.magic != MAGIC || p->head.n_heads == 0 || p->head.n_heads > n_kv_heads ||
        p->head.first_head > n_kv_heads - p->head.n_heads || p->head.n_chunks == 0 ||
        p->head.n_chunks > room / sizeof *p->chunks)
        return false;
    p->chunks = malloc(p->head.n_chunks * sizeof *p->chunks);
    if (p->chunks == NULL)
        return false;
    memcpy(p->chunks, p->map + sizeof p->head, p->head.n_chunks * sizeof *p->chunks);
    return is_sound(g, p);
}

/* Takes over the memory behind fd, which it closes. What is no part of this model is dropped. */
static void add_part(cg_gather *g, uint32_t connection, int fd, uint64_t n_bytes)
{
    const int seals = fcntl(fd, F_GET_SEALS);
    const off_t size = lseek(fd, 0, SEEK_END);
    part *p = calloc(1, sizeof *p);
    void *map = MAP_FAILED;
    /* Without the seal it could be cut while it is mapped, and reading it would be a SIGBUS. */
    if (p != NULL && seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && size >= 0 &&
        (uint64_t)size == n_bytes && n_bytes >= sizeof(part_head))
        /* Private: kernels before 6.7 refuse to share what is sealed against writing, though it is
         * only read. */
        map = mmap(NULL, (size_t)n_bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (map == MAP_FAILED) {
        free(p);
        return;
    }
    *p = (part){.connection = (int)connection, .map = map, .n_bytes = (size_t)n_bytes};
    if (!read_head(g, p)) {
        free_part(p);
        return;
    }
    p->next = g->parts;
    g->parts = p;
}

/* One message of a connection. False: there is none; *closed_out: nor will there be. */
static bool receive(cg_gather *g, uint32_t connection, bool *closed_out)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr aligned;
    } control;
    uint64_t n_bytes = 0;
    struct iovec content = {&n_bytes, sizeof n_bytes};
    struct msghdr message = {.msg_iov = &content,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    const ssize_t n =
        recvmsg(g->connections[connection], &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    *closed_out = n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
    if (n <= 0)
        return n < 0 && errno == EINTR;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c != NULL; c = CMSG_NXTHDR(&message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        /* A part is one descriptor. With padding the buffer has room for two, and all that came
         * are ours to close. */
        const size_t n_fds = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n_fds; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            if (n_fds == 1)
                add_part(g, connection, fd, n == sizeof n_bytes ? n_bytes : 0);
            else
                close(fd);
        }
    }
    return true;
}

static void accept_ranks(cg_gather *g)
{
    int fd;
    while ((fd = accept4(g->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0)
        if (g->n_connections < MAX_RANKS && cg_host_socket_is_ours(fd))
            g->connections[g->n_connections++] = fd;
        else
            close(fd);
}

/* Drops the parts that are_of(p, argument). */
static void drop_parts(cg_gather *g, bool (*are_of)(const part *, const void *),
                       const void *argument)
{
    for (part **at = &g->parts; *at != NULL;) {
        part *p = *at;
        if (!are_of(p, argument)) {
            at = &p->next;
            continue;
        }
        *at = p->next;
        tell_dropped(g, p);
        free_part(p);
    }
}

static bool is_older(const part *p, const void *made_ns)
{
    return p->head.made_ns < *(const uint64_t *)made_ns;
}

static bool ends_with(const part *p, const void *key)
{
    return cg_key_equal(&p->chunks[p->head.n_chunks - 1].key, key);
}

/* Parts lie in the list as they came, the last one in front. */
static bool is_oldest_that_ends_with(const part *p, const void *key)
{
    if (!ends_with(p, key))
        return false;
    for (const part *older = p->next; older != NULL; older = older->next)
        if (older->head.first_head == p->head.first_head && ends_with(older, key))
            return false;
    return true;
}

/* Waits for something to come, and takes all that has. */
static void receive_all(cg_gather *g, int timeout_ms)
{
    struct pollfd fds[MAX_RANKS + 1] = {{.fd = g->listener, .events = POLLIN}};
    for (uint32_t i = 0; i < g->n_connections; i++)
        fds[i + 1] = (struct pollfd){.fd = g->connections[i], .events = POLLIN};
    if (poll(fds, g->n_connections + 1, timeout_ms) <= 0)
        return;
    accept_ranks(g);
    /* Downwards: closing one puts the last in its place, which has had its turn. */
    for (uint32_t i = g->n_connections; i-- > 0;) {
        bool is_closed = false;
        while (receive(g, i, &is_closed))
            ;
        if (is_closed)
            close_connection(g, i);
    }
}

/* Where the part has that chunk, in its data; NULL: nowhere. */
static const uint8_t *find(const cg_gather *g, const part *p, const cg_gather_chunk *chunk)
{
    const uint8_t *data = p->map + data_begin(p->head.n_chunks);
    for (uint32_t i = 0; i < p->head.n_chunks; i++) {
        const cg_gather_chunk *c = &p->chunks[i];
        if (cg_key_equal(&c->key, &chunk->key) && c->n_tokens == chunk->n_tokens &&
            c->prefix_level == chunk->prefix_level)
            return data;
        data += chunk_bytes(g, c->n_tokens, p->head.n_heads);
    }
    return NULL;
}

/* CG_OK: every head of the model is this rank's or lies in a part. CG_ERR_CANCELLED: of one there
 * is a refusal and nothing else. A refusal lists its chunks, and has no data of them. It may be of
 * a save that this rank did not make, so what has come besides it counts. */
static cg_status check_heads(const cg_gather *g, const cg_gather_chunk *chunk)
{
    bool has[CG_MAX_KV_HEADS] = {false}, is_refused[CG_MAX_KV_HEADS] = {false};
    cg_status status = CG_OK;
    memset(has + g->config.first_head, true, g->config.n_heads);
    for (const part *p = g->parts; p != NULL; p = p->next)
        if (find(g, p, chunk) != NULL)
            memset((p->head.is_refusal ? is_refused : has) + p->head.first_head, true,
                   p->head.n_heads);
    for (uint32_t i = 0; i < g->config.geometry.n_kv_heads; i++)
        if (!has[i] && is_refused[i])
            return CG_ERR_CANCELLED;
        else if (!has[i])
            status = CG_ERR_AGAIN;
    return status;
}

static void scatter(const cg_gather *g, const part *p, const uint8_t *data, uint32_t n_tokens,
                    uint8_t *raw)
{
    const cg_geometry *m = &g->config.geometry;
    const size_t head_bytes = m->head_dim * cg_dtype_bytes(m->dtype),
                 from_bytes = p->head.n_heads * head_bytes, row_bytes = m->n_kv_heads * head_bytes,
                 n_rows = (size_t)CG_N_PLANES * m->n_layers * n_tokens;
    raw += p->head.first_head * head_bytes;
    for (size_t i = 0; i < n_rows; i++)
        memcpy(raw + i * row_bytes, data + i * from_bytes, from_bytes);
}

cg_status cg_gather_take(cg_gather *g, const cg_gather_chunk *chunk, uint8_t *raw, int timeout_ms)
{
    if (g->pid != getpid())
        return CG_ERR_CANCELLED; /* the parent's sockets */
    cg_status status = check_heads(g, chunk);
    if (status != CG_OK) {
        receive_all(g, status == CG_ERR_AGAIN ? timeout_ms : 0);
        status = check_heads(g, chunk);
    }
    for (const part *p = status == CG_OK ? g->parts : NULL; p != NULL; p = p->next) {
        const uint8_t *data = p->head.is_refusal ? NULL : find(g, p, chunk);
        if (data != NULL)
            scatter(g, p, data, chunk->n_tokens, raw);
    }
    return status;
}

void cg_gather_drop(cg_gather *g, const cg_key *last, uint64_t began_ns)
{
    const uint64_t age_ns = g->config.max_age_ns,
                   oldest_ns = began_ns > age_ns ? began_ns - age_ns : 0;
    if (g->pid != getpid())
        return;
    receive_all(g, 0);
    drop_parts(g, is_oldest_that_ends_with, last);
    drop_parts(g, is_older, &oldest_ns);
}
