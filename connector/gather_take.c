#include "connector/gather_state.h"

#include "connector/host_socket.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

/* One that has come. */
typedef struct cg_gather_received {
    struct cg_gather_received *next;
    int connection; /* index; -1: closed */
    uint8_t *map;   /* NULL: a refusal */
    size_t n_bytes;
    cg_gather_head head;
    cg_gather_chunk *chunks; /* [head.n_chunks] */
} part;

static void free_part(part *p)
{
    if (p->map != NULL)
        munmap(p->map, p->n_bytes);
    free(p->chunks);
    free(p);
}

void cg_gather_free_parts(cg_gather *g)
{
    while (g->parts != NULL) {
        part *p = g->parts;
        g->parts = p->next;
        free_part(p);
    }
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
    if (p->map != NULL && p->connection >= 0 &&
        send(g->connections[p->connection], &n_bytes, sizeof n_bytes, MSG_DONTWAIT | MSG_NOSIGNAL) <
            0)
        close_connection(g, (uint32_t)p->connection);
}

/* Whether the memory is as long as its head and chunks say, and of this model. */
static bool is_sound(const cg_gather *g, const part *p)
{
    const cg_gather_head *h = &p->head;
    uint64_t left = p->n_bytes;
    if (left < cg_gather_data_begin(h->n_chunks))
        return false;
    left -= cg_gather_data_begin(h->n_chunks);
    for (uint32_t i = 0; i < h->n_chunks; i++) {
        const uint32_t n_tokens = p->chunks[i].n_tokens;
        if (n_tokens > CG_MAX_CHUNK_TOKENS || cg_gather_chunk_bytes(g, n_tokens, h->n_heads) > left)
            return false;
        left -= cg_gather_chunk_bytes(g, n_tokens, h->n_heads);
    }
    return left == 0;
}

static bool is_of_model(const cg_gather *g, const cg_gather_head *h)
{
    const uint32_t n_kv_heads = g->config.geometry.n_kv_heads;
    /* In this order: what is subtracted was found to be no larger before. */
    return h->magic == CG_GATHER_MAGIC && h->n_heads > 0 && h->n_heads <= n_kv_heads &&
           h->first_head <= n_kv_heads - h->n_heads;
}

static bool read_head(const cg_gather *g, part *p)
{
    const size_t room = p->n_bytes - sizeof p->head; /* the caller saw that there is one */
    memcpy(&p->head, p->map, sizeof p->head);
    if (!is_of_model(g, &p->head) || p->head.n_chunks > room / sizeof *p->chunks)
        return false;
    p->chunks = malloc((p->head.n_chunks + (size_t)1) * sizeof *p->chunks);
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
        (uint64_t)size == n_bytes && n_bytes >= sizeof(cg_gather_head))
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

static void add_refusal(cg_gather *g, uint32_t connection, const cg_gather_head *head)
{
    part *p = is_of_model(g, head) && head->n_chunks == 0 ? calloc(1, sizeof *p) : NULL;
    if (p == NULL)
        return;
    *p = (part){.next = g->parts, .connection = (int)connection, .head = *head};
    g->parts = p;
}

/* One message of a connection. False: there is none; *closed_out: nor will there be. */
static bool receive(cg_gather *g, uint32_t connection, bool *closed_out)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr aligned;
    } control;
    union {
        uint64_t n_bytes;
        cg_gather_head refusal;
    } said = {0};
    struct iovec content = {&said, sizeof said};
    struct msghdr message = {.msg_iov = &content,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    const ssize_t n =
        recvmsg(g->connections[connection], &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    *closed_out = n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
    if (n <= 0)
        return n < 0 && errno == EINTR;
    if (n == sizeof said.refusal && CMSG_FIRSTHDR(&message) == NULL)
        add_refusal(g, connection, &said.refusal);
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
                add_part(g, connection, fd, n == sizeof said.n_bytes ? said.n_bytes : 0);
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
        if (g->n_connections < CG_GATHER_MAX_RANKS && cg_host_socket_is_ours(fd))
            g->connections[g->n_connections++] = fd;
        else
            close(fd);
}

/* Waits for something to come, and takes all that has. */
static void receive_all(cg_gather *g, int timeout_ms)
{
    struct pollfd fds[CG_GATHER_MAX_RANKS + 1] = {{.fd = g->listener, .events = POLLIN}};
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

/* Where the part has that chunk of the save, in its data; NULL: nowhere. */
static const uint8_t *find(const cg_gather *g, const part *p, uint64_t number,
                           const cg_gather_chunk *chunk)
{
    if (p->map == NULL || p->head.number != number)
        return NULL;
    const uint8_t *data = p->map + cg_gather_data_begin(p->head.n_chunks);
    for (uint32_t i = 0; i < p->head.n_chunks; i++) {
        const cg_gather_chunk *c = &p->chunks[i];
        if (cg_key_equal(&c->key, &chunk->key) && c->n_tokens == chunk->n_tokens &&
            c->prefix_level == chunk->prefix_level)
            return data;
        data += cg_gather_chunk_bytes(g, c->n_tokens, p->head.n_heads);
    }
    return NULL;
}

/* CG_OK: every head of the model is this rank's or lies in a part of the save. CG_ERR_CANCELLED: of
 * one the part has another chunk in its place or is a refusal, or its rank is at a later save. */
static cg_status check_heads(const cg_gather *g, uint64_t number, const cg_gather_chunk *chunk)
{
    bool has[CG_MAX_KV_HEADS] = {false}, is_lost[CG_MAX_KV_HEADS] = {false};
    cg_status status = CG_OK;
    memset(has + g->config.first_head, true, g->config.n_heads);
    for (const part *p = g->parts; p != NULL; p = p->next)
        if (p->head.number >= number)
            memset((find(g, p, number, chunk) != NULL ? has : is_lost) + p->head.first_head, true,
                   p->head.n_heads);
    for (uint32_t i = 0; i < g->config.geometry.n_kv_heads; i++)
        if (!has[i] && is_lost[i])
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

cg_status cg_gather_take(cg_gather *g, uint64_t number, const cg_gather_chunk *chunk, uint8_t *raw,
                         int timeout_ms)
{
    if (g->pid != getpid())
        return CG_ERR_CANCELLED; /* the parent's sockets */
    cg_status status = check_heads(g, number, chunk);
    if (status != CG_OK) {
        receive_all(g, status == CG_ERR_AGAIN ? timeout_ms : 0);
        status = check_heads(g, number, chunk);
    }
    for (const part *p = status == CG_OK ? g->parts : NULL; p != NULL; p = p->next) {
        const uint8_t *data = find(g, p, number, chunk);
        if (data != NULL)
            scatter(g, p, data, chunk->n_tokens, raw);
    }
    return status;
}

void cg_gather_drop(cg_gather *g, uint64_t number)
{
    if (g->pid != getpid())
        return;
    receive_all(g, 0);
    for (part **at = &g->parts; *at != NULL;) {
        part *p = *at;
        if (p->head.number > number) {
            at = &p->next;
            continue;
        }
        *at = p->next;
        tell_dropped(g, p);
        free_part(p);
    }
}
