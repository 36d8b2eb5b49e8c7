#include "connector/operation.h"

#include "connector/abi_struct.h"
#include "connector/clock.h"

#include <stdlib.h>
#include <unistd.h>

void *cg_operation_new(cachegen *connector, size_t n_bytes, void (*destroy)(cg_operation *op))
{
    cg_runtime *rt = cg_runtime_get(connector);
    cg_operation *op = rt != NULL ? calloc(1, n_bytes) : NULL;
    if (op == NULL)
        return NULL;
    *op = (cg_operation){.connector = connector,
                         .runtime = rt,
                         .pid = rt->pid,
                         .started_ns = cg_now_ns(),
                         .destroy = destroy,
                         .n_refs = 1};
    return op;
}

bool cg_operation_is_ours(const cg_operation *op)
{
    return op->pid == getpid();
}

void cg_operation_begin(cg_operation *op)
{
    op->n_refs++;
}

void cg_operation_unref(cg_operation *op)
{
    if (--op->n_refs == 0)
        op->destroy(op);
}

void cg_operation_finish(cg_operation *op)
{
    op->done = true;
    cg_runtime_notify(op->runtime);
    /* The connector's reference, which cg_operation_begin() took. */
    cg_operation_unref(op);
}

void cg_operation_wait(const cg_operation *op)
{
    while (!op->done)
        pthread_cond_wait(&op->runtime->changed, &op->runtime->lock);
}

void cg_operation_put(cg_operation_queue *queue, cg_operation *op)
{
    if (queue->tail != NULL)
        queue->tail->next = op;
    else
        queue->head = op;
    queue->tail = op;
    pthread_cond_signal(&queue->filled);
}

cg_operation *cg_operation_take(cg_runtime *rt, cg_operation_queue *queue)
{
    while (queue->head == NULL) {
        if (rt->stop)
            return NULL;
        pthread_cond_wait(&queue->filled, &rt->lock);
    }
    cg_operation *op = queue->head;
    if ((queue->head = op->next) == NULL)
        queue->tail = NULL;
    return op;
}

cachegen_status cg_operation_poll(const cg_operation *op, const cachegen_progress *progress,
                                  uint32_t tokens_before, cachegen_progress *progress_out)
{
    /* What a child process hears of its parent's operation. */
    cachegen_progress p = {.done = 1, .status = CG_ERR_CANCELLED, .loaded_tokens = tokens_before};
    if (cg_operation_is_ours(op)) {
        pthread_mutex_lock(&op->runtime->lock);
        p = *progress;
        p.done = op->done;
        pthread_mutex_unlock(&op->runtime->lock);
        if (!p.done)
            p.total_ns = cg_now_ns() - op->started_ns;
    }
    p.abi_version = CACHEGEN_ABI_VERSION;
    if (!cg_abi_give(progress_out, &p, sizeof p))
        return CG_ERR_INVALID_ARGUMENT;
    return p.done ? CACHEGEN_OK : CACHEGEN_AGAIN;
}
