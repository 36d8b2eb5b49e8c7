#include "iouring/io_buffer.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

/* What a look-up reads is a page. What is larger is of chunks, and ranges of a few pages share
 * buffers. */
enum { SMALLEST_BYTES = 64 << 10 };

struct cg_io_pool {
    pthread_mutex_t lock; /* of everything below */
    cg_io_pool_buffer
        *free_list; /* the last released first: its pages are the likeliest in the CPU's caches */
    size_t free_bytes, keep_bytes;
    size_t n_references; /* the owners', and one for each buffer that is out */
    bool closed;
    void (*evict)(void *context, int slot);
    void *context;
};

/* A page, or the next of 4, 5, 6 or 7 times a power of two; 0 on overflow. */
static size_t round_up_capacity(size_t bytes)
{
    /* The step is a quarter of the power of two below, so less than a quarter of the memory is
     * wasted. */
    size_t octave = SMALLEST_BYTES;
    if (bytes <= CG_IO_PAGE_BYTES) /* a look-up has hundreds of these at once */
        return CG_IO_PAGE_BYTES;
    if (bytes <= SMALLEST_BYTES)
        return SMALLEST_BYTES;
    if (bytes > SIZE_MAX / 4)
        return 0;
    while (octave * 2 < bytes)
        octave *= 2;
    const size_t step = octave / 4;
    return (bytes + step - 1) / step * step;
}

cg_status cg_io_pool_new(size_t keep_bytes, void (*evict)(void *, int), void *context,
                         cg_io_pool **pool_out)
{
    cg_io_pool *pool = calloc(1, sizeof *pool);
    *pool_out = NULL;
    if (pool == NULL)
        return CG_ERR_NO_MEMORY;
    if (pthread_mutex_init(&pool->lock, NULL) != 0) {
        free(pool);
        return CG_ERR_NO_MEMORY;
    }
    pool->keep_bytes = keep_bytes;
    pool->n_references = 1;
    pool->evict = evict;
    pool->context = context;
    *pool_out = pool;
    return CG_OK;
}

static void unmap(cg_io_pool_buffer *buffer)
{
    munmap(buffer->buffer.data, buffer->buffer.capacity_bytes);
    free(buffer);
}

static void unmap_list(cg_io_pool_buffer *list)
{
    while (list != NULL) {
        cg_io_pool_buffer *next = list->next;
        unmap(list);
        list = next;
    }
}

/* Called with the lock, which it releases. */
static void drop_reference(cg_io_pool *pool)
{
    const bool last = --pool->n_references == 0;
    pthread_mutex_unlock(&pool->lock);
    if (last) {
        pthread_mutex_destroy(&pool->lock);
        free(pool);
    }
}

void cg_io_pool_close(cg_io_pool *pool)
{
    if (pool == NULL)
        return;
    pthread_mutex_lock(&pool->lock);
    cg_io_pool_buffer *list = pool->free_list;
    pool->free_list = NULL;
    pool->free_bytes = 0;
    pool->closed = true;
    drop_reference(pool);
    unmap_list(list);
}

void cg_io_pool_hold(cg_io_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->n_references++;
    pthread_mutex_unlock(&pool->lock);
}

void cg_io_pool_drop(cg_io_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    drop_reference(pool);
}

/* Takes the best fit from the free list: at least capacity_bytes, at most twice that. With the
 * lock. At most twice: or many small reads would hold all the large buffers. */
static cg_io_pool_buffer *take_free(cg_io_pool *pool, size_t capacity_bytes)
{
    cg_io_pool_buffer **best = NULL;
    for (cg_io_pool_buffer **at = &pool->free_list; *at != NULL; at = &(*at)->next) {
        const size_t bytes = (*at)->buffer.capacity_bytes;
        if (bytes >= capacity_bytes && bytes / 2 <= capacity_bytes &&
            (best == NULL || bytes < (*best)->buffer.capacity_bytes))
            best = at;
        if (bytes == capacity_bytes) /* as capacities are rounded, mostly one of the first */
            break;
    }
    if (best == NULL)
        return NULL;
    cg_io_pool_buffer *buffer = *best;
    *best = buffer->next;
    pool->free_bytes -= buffer->buffer.capacity_bytes;
    return buffer;
}

/* Cuts what the pool need not keep off the end of the free list, the longest unused. With the
 * lock. */
static cg_io_pool_buffer *take_excess(cg_io_pool *pool)
{
    size_t bytes = 0;
    cg_io_pool_buffer **at = &pool->free_list;
    if (pool->free_bytes <= pool->keep_bytes)
        return NULL;
    while (*at != NULL && bytes + (*at)->buffer.capacity_bytes <= pool->keep_bytes) {
        bytes += (*at)->buffer.capacity_bytes;
        at = &(*at)->next;
    }
    cg_io_pool_buffer *excess = *at;
    *at = NULL;
    pool->free_bytes = bytes;
    return excess;
}

static cg_io_pool_buffer *map_new(cg_io_pool *pool, size_t capacity_bytes)
{
    cg_io_pool_buffer *buffer = calloc(1, sizeof *buffer);
    if (buffer == NULL)
        return NULL;
    void *data =
        mmap(NULL, capacity_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
        free(buffer);
        return NULL;
    }
    madvise(data, capacity_bytes,
            MADV_DONTFORK); /* only saves copies: its failure changes nothing */
    buffer->buffer.data = data;
    buffer->buffer.capacity_bytes = capacity_bytes;
    buffer->pool = pool;
    buffer->slot = CG_IO_NO_SLOT;
    return buffer;
}

cg_io_pool_buffer *cg_io_pool_get(cg_io_pool *pool, size_t capacity_bytes)
{
    capacity_bytes = round_up_capacity(capacity_bytes);
    if (capacity_bytes == 0)
        return NULL;
    pthread_mutex_lock(&pool->lock);
    cg_io_pool_buffer *buffer = take_free(pool, capacity_bytes);
    cg_io_pool_buffer *excess = take_excess(pool);
    pool->n_references++;
    pthread_mutex_unlock(&pool->lock);

    /* Here and not at the release, which may come from any thread: only the thread that gets may
     * speak to the ring. Without the lock, since both calls below enter the kernel. */
    for (const cg_io_pool_buffer *b = excess; b != NULL; b = b->next)
        if (b->slot != CG_IO_NO_SLOT && pool->evict != NULL)
            pool->evict(pool->context, b->slot);
    unmap_list(excess);

    if (buffer == NULL && (buffer = map_new(pool, capacity_bytes)) == NULL) {
        pthread_mutex_lock(&pool->lock);
        drop_reference(pool);
        return NULL;
    }
    buffer->next = NULL;
    buffer->buffer.n_bytes = 0;
    return buffer;
}

void cg_io_pool_discard(cg_io_pool_buffer *buffer)
{
    cg_io_pool *pool = buffer->pool;
    unmap(buffer);
    pthread_mutex_lock(&pool->lock);
    drop_reference(pool);
}

void cg_io_buffer_release(cg_io_buffer *buffer)
{
    if (buffer == NULL)
        return;
    cg_io_pool_buffer *b = (cg_io_pool_buffer *)buffer; /* buffer is its first member */
    cg_io_pool *pool = b->pool;
    pthread_mutex_lock(&pool->lock);
    const bool closed = pool->closed;
    if (!closed) {
        b->next = pool->free_list;
        pool->free_list = b;
        pool->free_bytes += b->buffer.capacity_bytes;
    }
    drop_reference(pool);
    /* The pool may be gone by now. unmap() needs only the buffer. */
    if (closed)
        unmap(b);
}
