#include "connector/gather.h"

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
static const uint32_t MAGIC = 0x32706763; /* of this version's parts */

/* A part's memory: the head, the chunks, then their data. Sender and listener are of one machine.
 */
typedef struct part_head {
    uint32_t magic, n_chunks; /* no chunks: a refusal */
    uint32_t first_head, n_heads;
    uint64_t number;
} part_head;

/* A part, or a refusal, that is or will be ready to be passed on. */
typedef struct cg_gather_turn {
    struct cg_gather_turn *next;
    int fd;
    size_t n_bytes;
    bool is_ready;   /* the lock */
    bool is_refusal; /* the lock; if it is ready, it stays one */
} turn;

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
    uint64_t begun_bytes;  /* the lock: of all turns */
    turn *first, **last;   /* the lock: turns, as they were begun */
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
    g->last = &g->first;
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

static void free_turn(turn *t)
{
    if (t->fd >= 0)
        close(t->fd);
    free(t);
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
    while (g->first != NULL) {
        turn *t = g->first;
        g->first = t->next;
        free_turn(t);
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

/* With the lock held: passes on what is ready and has nothing before it. Status of own's sending;
 * CG_OK: it waits. */
static cg_status take_turns(cg_gather *g, const turn *own)
{
    cg_status own_status = CG_OK;
    hear_dropped(g);
    while (g->first != NULL && g->first->is_ready) {
        turn *t = g->first;
        /* In one go: no other thread sees it counted twice, as begun and as passed on. */
        const cg_status status = t->fd >= 0 ? send_fd(g, t->fd, t->n_bytes) : CG_ERR_CANCELLED;
        g->begun_bytes -= t->n_bytes;
        if (t == own)
            own_status = status;
        if ((g->first = t->next) == NULL)
            g->last = &g->first;
        free_turn(t);
    }
    return own_status;
}

/* With the lock held: of refusals that wait in a row the last is enough, since a later number says
 * that an earlier one will not come. So what waits behind a part that hangs stays as little as
 * there is room for parts. */
static void drop_repeated_refusals(cg_gather *g)
{
    for (turn **link = &g->first; *link != NULL && (*link)->next != NULL;) {
        turn *t = *link;
        if (!t->is_refusal || !t->next->is_refusal) {
            link = &t->next;
            continue;
        }
        *link = t->next;
        g->begun_bytes -= t->n_bytes;
        free_turn(t);
    }
}

/* Memory of t->n_bytes with head and chunks in it, mapped. After an error there is none. */
static cg_status make_memory(turn *t, const part_head *head, const cg_gather_chunk *chunks,
                             uint8_t **map_out)
{
    void *map = MAP_FAILED;
    t->fd = memfd_create("cachegenfs-part", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (t->fd >= 0 && ftruncate(t->fd, (off_t)t->n_bytes) == 0)
        map = mmap(NULL, t->n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, t->fd, 0);
    if (map == MAP_FAILED) {
        if (t->fd >= 0)
            close(t->fd);
        return CG_ERR_NO_MEMORY;
    }
    memcpy(map, head, sizeof *head);
    memcpy((uint8_t *)map + sizeof *head, chunks, head->n_chunks * sizeof *chunks);
    *map_out = map;
    return CG_OK;
}

/* Gives the part to its turn: as it is, or with nothing but the head, which says so. */
static cg_status end_part(cg_gather *g, cg_gather_part *made, bool is_refusal)
{
    turn *t = made->turn;
    const uint64_t begun_bytes = t->n_bytes;
    if (is_refusal)
        ((part_head *)made->map)->n_chunks = 0;
    /* Before the seals: F_SEAL_WRITE is refused while there is a mapping that can be written to. */
    munmap(made->map, t->n_bytes);
    free(made->data);
    *made = (cg_gather_part){0};
    if (is_refusal)
        t->n_bytes = (size_t)data_begin(0);
    /* Sealed, it stays as it is: the listener may map it and rely on its size. */
    if ((is_refusal && ftruncate(t->fd, (off_t)t->n_bytes) != 0) ||
        fcntl(t->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) != 0) {
        close(t->fd);
        t->fd = -1;
    }
    pthread_mutex_lock(&g->lock);
    g->begun_bytes -= begun_bytes - t->n_bytes;
    t->is_ready = true;
    t->is_refusal = is_refusal;
    const cg_status status = take_turns(g, t);
    drop_repeated_refusals(g);
    pthread_mutex_unlock(&g->lock);
    return status;
}

/* With the lock held. False: n_bytes are more than there may be. */
static bool has_room(cg_gather *g, uint64_t n_bytes)
{
    hear_dropped(g);
    const uint64_t held_bytes = g->passed_bytes + g->begun_bytes;
    return held_bytes == 0 || held_bytes + n_bytes <= g->config.limit_bytes;
}

cg_status cg_gather_begin(cg_gather *g, uint64_t number, const cg_gather_chunk *chunks,
                          uint32_t n_chunks, cg_gather_part *out)
{
    uint64_t n_bytes = data_begin(n_chunks), at = n_bytes;
    cg_status status;
    part_head head = {.magic = MAGIC,
                      .n_chunks = n_chunks,
                      .first_head = g->config.first_head,
                      .n_heads = g->config.n_heads,
                      .number = number};
    *out = (cg_gather_part){0};
    if (g->pid != getpid())
        return CG_ERR_UNSUPPORTED;
    for (uint32_t i = 0; i < n_chunks; i++)
        n_bytes += chunk_bytes(g, chunks[i].n_tokens, g->config.n_heads);
    turn *t = malloc(sizeof *t);
    out->data = malloc((n_chunks + (size_t)1) * sizeof *out->data);
    if (t == NULL || out->data == NULL) {
        status = CG_ERR_NO_MEMORY;
        goto failed;
    }
    pthread_mutex_lock(&g->lock);
    const bool is_full = !has_room(g, n_bytes);
    if (is_full) { /* a refusal, so that the listener does not wait for what will not come */
        head.n_chunks = 0;
        n_bytes = data_begin(0);
    }
    g->begun_bytes += n_bytes;
    pthread_mutex_unlock(&g->lock);
    *t = (turn){.n_bytes = (size_t)n_bytes};
    status = make_memory(t, &head, chunks, &out->map);
    pthread_mutex_lock(&g->lock);
    if (status == CG_OK) {
        *g->last = out->turn = t;
        g->last = &t->next;
    } else {
        g->begun_bytes -= n_bytes;
    }
    pthread_mutex_unlock(&g->lock);
    if (status != CG_OK)
        goto failed;
    if (is_full) {
        end_part(g, out, true);
        return CG_ERR_AGAIN;
    }
    for (uint32_t i = 0; i < n_chunks; i++) {
        out->data[i] = out->map + at;
        at += chunk_bytes(g, chunks[i].n_tokens, g->config.n_heads);
    }
    return CG_OK;
failed:
    free(t);
    free(out->data);
    *out = (cg_gather_part){0};
    return status;
}

cg_status cg_gather_send(cg_gather *g, cg_gather_part *made)
{
    return end_part(g, made, false);
}

void cg_gather_abandon(cg_gather *g, cg_gather_part *made)
{
    end_part(g, made, true);
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
    for (uint32_t i = 0; i < h->n_chunks; i++) {
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
        p->head.first_head > n_kv_heads - p->head.n_heads ||
        p->head.n_chunks > room / sizeof *p->chunks)
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

/* Where the part has that chunk of the save, in its data; NULL: nowhere. */
static const uint8_t *find(const cg_gather *g, const part *p, uint64_t number,
                           const cg_gather_chunk *chunk)
{
    const uint8_t *data = p->map + data_begin(p->head.n_chunks);
    for (uint32_t i = 0; i < p->head.n_chunks && p->head.number == number; i++) {
        const cg_gather_chunk *c = &p->chunks[i];
        if (cg_key_equal(&c->key, &chunk->key) && c->n_tokens == chunk->n_tokens &&
            c->prefix_level == chunk->prefix_level)
            return data;
        data += chunk_bytes(g, c->n_tokens, p->head.n_heads);
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
