#include "connector/gather_state.h"

#include "connector/host_socket.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

/* A part, or a refusal, that is or will be ready to be passed on. */
typedef struct cg_gather_turn {
    struct cg_gather_turn *next;
    int fd;
    size_t n_bytes;
    bool is_ready;   /* the lock */
    bool is_refusal; /* the lock; if it is ready, it stays one */
} turn;

static void free_turn(turn *t)
{
    if (t->fd >= 0)
        close(t->fd);
    free(t);
}

static void free_turns(turn *first)
{
    while (first != NULL) {
        turn *t = first;
        first = t->next;
        free_turn(t);
    }
}

void cg_gather_free_turns(cg_gather *g)
{
    free_turns(g->first);
}

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
 * CG_OK: it waits. *over_out: to be freed without the lock, which steps of the engine take: of what
 * nobody has received, all the memory goes with that. */
static cg_status take_turns(cg_gather *g, const turn *own, turn **over_out)
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
        t->next = *over_out;
        *over_out = t;
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
static cg_status make_memory(turn *t, const cg_gather_head *head, const cg_gather_chunk *chunks,
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
    turn *t = made->turn, *over = NULL;
    const uint64_t begun_bytes = t->n_bytes;
    if (is_refusal)
        ((cg_gather_head *)made->map)->n_chunks = 0;
    /* Before the seals: F_SEAL_WRITE is refused while there is a mapping that can be written to. */
    munmap(made->map, t->n_bytes);
    free(made->data);
    *made = (cg_gather_part){0};
    if (is_refusal)
        t->n_bytes = (size_t)cg_gather_data_begin(0);
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
    const cg_status status = take_turns(g, t, &over);
    drop_repeated_refusals(g);
    pthread_mutex_unlock(&g->lock);
    free_turns(over);
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
    uint64_t n_bytes = cg_gather_data_begin(n_chunks), at = n_bytes;
    cg_status status;
    cg_gather_head head = {.magic = CG_GATHER_MAGIC,
                           .n_chunks = n_chunks,
                           .first_head = g->config.first_head,
                           .n_heads = g->config.n_heads,
                           .number = number};
    *out = (cg_gather_part){0};
    if (g->pid != getpid())
        return CG_ERR_UNSUPPORTED;
    for (uint32_t i = 0; i < n_chunks; i++)
        n_bytes += cg_gather_chunk_bytes(g, chunks[i].n_tokens, g->config.n_heads);
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
        n_bytes = cg_gather_data_begin(0);
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
        at += cg_gather_chunk_bytes(g, chunks[i].n_tokens, g->config.n_heads);
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

void cg_gather_refuse(cg_gather *g, uint64_t number)
{
    const cg_gather_chunk none = {.n_tokens = 0};
    cg_gather_part part;
    /* Where there is no room, that is told the same way. */
    if (cg_gather_begin(g, number, &none, 0, &part) == CG_OK)
        cg_gather_abandon(g, &part);
}
