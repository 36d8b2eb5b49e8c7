#include "connector/gather_state.h"

#include "connector/host_socket.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

/* A part that is or will be ready to be passed on. */
typedef struct cg_gather_turn {
    struct cg_gather_turn *next;
    int fd;
    size_t n_bytes;
    uint64_t number;
    bool is_ready; /* the lock */
} turn;

static void free_turn(turn *t)
{
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
    g->refused = 0; /* the next one that listens may count otherwise */
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

/* With the lock held: n_bytes, and a descriptor with them unless fd is -1. */
static cg_status send_message(cg_gather *g, void *bytes, size_t n_bytes, int fd)
{
    union {
        char bytes[CMSG_SPACE(sizeof fd)];
        struct cmsghdr aligned;
    } control = {0};
    struct iovec content = {bytes, n_bytes};
    struct msghdr message = {.msg_iov = &content, .msg_iovlen = 1};
    if (fd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *attached = CMSG_FIRSTHDR(&message);
        attached->cmsg_level = SOL_SOCKET;
        attached->cmsg_type = SCM_RIGHTS;
        attached->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(attached), &fd, sizeof fd);
    }
    const cg_status status = connect_sender(g);
    if (status != CG_OK)
        return status;
    if (sendmsg(g->sender, &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0)
        return CG_OK;
    /* The socket is full, or too many descriptors are on their way. */
    if (errno == EAGAIN || errno == ETOOMANYREFS)
        return CG_ERR_AGAIN;
    const int reason = errno;
    disconnect(g); /* the next one may find it again */
    return reason == EPIPE || reason == ECONNRESET ? CG_ERR_NOT_FOUND
                                                   : cg_status_from_errno(reason);
}

/* With the lock held. */
static cg_status send_part(cg_gather *g, const turn *t)
{
    uint64_t n_bytes = t->n_bytes;
    const cg_status status = send_message(g, &n_bytes, sizeof n_bytes, t->fd);
    if (status == CG_OK)
        g->passed_bytes += n_bytes;
    return status;
}

/* Takes neither memory nor a descriptor: it is for where there is none. */
static cg_status send_refusal(cg_gather *g, uint64_t number)
{
    cg_gather_head head = cg_gather_head_of(g, number, 0);
    return send_message(g, &head, sizeof head, -1);
}

/* With the lock held: the part of this save does not come. Of several the last is enough, since a
 * later number says that an earlier one will not come. */
static void note_refusal(cg_gather *g, uint64_t number)
{
    if (number > g->refused)
        g->refused = number;
}

/* With the lock held: passes on what is ready and has nothing before it. Status of own's sending;
 * CG_OK: it waits. *over_out: to be freed without the lock, which steps of the engine take: of what
 * nobody has received, all the memory goes with that. */
static cg_status take_turns(cg_gather *g, const turn *own, turn **over_out)
{
    cg_status own_status = CG_OK;
    for (turn *t;;) {
        t = g->first;
        if (g->refused > 0 && (t == NULL || t->number > g->refused) &&
            send_refusal(g, g->refused) != CG_ERR_AGAIN)
            g->refused = 0;
        if (t == NULL || !t->is_ready)
            return own_status;
        /* In one go: no other thread sees it counted twice, as begun and as passed on. */
        const cg_status status = send_part(g, t);
        g->begun_bytes -= t->n_bytes;
        if (status == CG_ERR_AGAIN)
            note_refusal(g, t->number);
        else if (t->number > g->refused)
            g->refused = 0; /* this says so, too */
        if (t == own)
            own_status = status;
        if ((g->first = t->next) == NULL)
            g->last = &g->first;
        t->next = *over_out;
        *over_out = t;
    }
}

/* With the lock held. */
static void take_off_turn(cg_gather *g, const turn *t)
{
    turn **link = &g->first;
    while (*link != t)
        link = &(*link)->next;
    if ((*link = t->next) == NULL)
        g->last = link;
    g->begun_bytes -= t->n_bytes;
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
    /* A child that is forked meanwhile would keep it from being sealed. */
    madvise(map, t->n_bytes, MADV_DONTFORK);
    memcpy(map, head, sizeof *head);
    memcpy((uint8_t *)map + sizeof *head, chunks, head->n_chunks * sizeof *chunks);
    *map_out = map;
    return CG_OK;
}

/* Gives the part to its turn, or takes it off and has the listener told. */
static cg_status end_part(cg_gather *g, cg_gather_part *made, bool is_refusal)
{
    turn *t = made->turn, *over = NULL;
    /* Before the seals: F_SEAL_WRITE is refused while there is a mapping that can be written to. */
    munmap(made->map, t->n_bytes);
    free(made->data);
    *made = (cg_gather_part){0};
    /* Sealed, it stays as it is: the listener may map it and rely on its size. */
    is_refusal = is_refusal || fcntl(t->fd, F_ADD_SEALS,
                                     F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) != 0;
    pthread_mutex_lock(&g->lock);
    hear_dropped(g);
    t->is_ready = true;
    if (is_refusal) {
        take_off_turn(g, t);
        note_refusal(g, t->number);
    }
    const cg_status status = take_turns(g, t, &over);
    pthread_mutex_unlock(&g->lock);
    if (is_refusal)
        free_turn(t);
    free_turns(over);
    return is_refusal ? CG_ERR_CANCELLED : status;
}

void cg_gather_refuse(cg_gather *g, uint64_t number)
{
    turn *over = NULL;
    if (g->pid != getpid())
        return;
    pthread_mutex_lock(&g->lock);
    hear_dropped(g);
    note_refusal(g, number);
    take_turns(g, NULL, &over);
    pthread_mutex_unlock(&g->lock);
    free_turns(over);
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
    cg_status status = CG_ERR_NO_MEMORY;
    const cg_gather_head head = cg_gather_head_of(g, number, n_chunks);
    *out = (cg_gather_part){0};
    if (g->pid != getpid())
        return CG_ERR_UNSUPPORTED;
    for (uint32_t i = 0; i < n_chunks; i++)
        n_bytes += cg_gather_chunk_bytes(g, chunks[i].n_tokens, g->config.n_heads);
    turn *t = malloc(sizeof *t);
    out->data = malloc((n_chunks + (size_t)1) * sizeof *out->data);
    if (t == NULL || out->data == NULL)
        goto failed;
    *t = (turn){.n_bytes = (size_t)n_bytes, .number = number};
    pthread_mutex_lock(&g->lock);
    const bool is_full = !has_room(g, n_bytes);
    if (!is_full)
        g->begun_bytes += n_bytes;
    pthread_mutex_unlock(&g->lock);
    status = is_full ? CG_ERR_AGAIN : make_memory(t, &head, chunks, &out->map);
    if (is_full)
        goto failed;
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
    for (uint32_t i = 0; i < n_chunks; i++) {
        out->data[i] = out->map + at;
        at += cg_gather_chunk_bytes(g, chunks[i].n_tokens, g->config.n_heads);
    }
    return CG_OK;
failed:
    free(t);
    free(out->data);
    *out = (cg_gather_part){0};
    cg_gather_refuse(g, number); /* so that the listener does not wait for what will not come */
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
