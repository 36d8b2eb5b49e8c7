/* Who waits for whom: renames under way, and the gate between writing and checking. */
#include "fusefs/nodes.h"

#include <errno.h>

uint64_t cg_nodes_epoch(cg_nodes *nodes)
{
    pthread_mutex_lock(&nodes->lock);
    const uint64_t epoch = nodes->rename_epoch;
    pthread_mutex_unlock(&nodes->lock);
    return epoch;
}

bool cg_nodes_changed_since(cg_nodes *nodes, uint64_t epoch)
{
    pthread_mutex_lock(&nodes->lock);
    /* A rename under way may have moved the file already, and not yet its name here: a new path
     * would be as wrong as the old one. */
    while (nodes->rename_epoch == epoch && nodes->n_renames > 0)
        pthread_cond_wait(&nodes->changed, &nodes->lock);
    const bool changed = nodes->rename_epoch != epoch;
    pthread_mutex_unlock(&nodes->lock);
    return changed;
}

bool cg_nodes_may_have_changed_since(cg_nodes *nodes, uint64_t epoch)
{
    pthread_mutex_lock(&nodes->lock);
    const bool may = nodes->rename_epoch != epoch || nodes->n_renames > 0;
    pthread_mutex_unlock(&nodes->lock);
    return may;
}

void cg_nodes_rename_begin(cg_nodes *nodes)
{
    pthread_mutex_lock(&nodes->lock);
    nodes->n_renames++;
    pthread_mutex_unlock(&nodes->lock);
}

void cg_nodes_rename_end(cg_nodes *nodes)
{
    pthread_mutex_lock(&nodes->lock);
    nodes->n_renames--;
    nodes->rename_epoch++;
    pthread_cond_broadcast(&nodes->changed);
    pthread_mutex_unlock(&nodes->lock);
}

bool cg_gate_enter(cg_nodes *nodes, cg_fs_node *node)
{
    pthread_mutex_lock(&nodes->lock);
    while (node->gate == CG_GATE_CHECKING)
        pthread_cond_wait(&nodes->changed, &nodes->lock);
    /* Under one lock with the question, so that a check cannot begin between the two. */
    const bool may_write = node->gate == CG_GATE_OPEN;
    if (may_write)
        node->n_writes++;
    pthread_mutex_unlock(&nodes->lock);
    return may_write;
}

void cg_gate_leave(cg_nodes *nodes, cg_fs_node *node)
{
    pthread_mutex_lock(&nodes->lock);
    /* Only a check waits for writers. All who wait share one condition, so waking them costs. */
    if (--node->n_writes == 0 && node->gate == CG_GATE_CHECKING)
        pthread_cond_broadcast(&nodes->changed);
    pthread_mutex_unlock(&nodes->lock);
}

/* Closes the gate; the lock is held. Writers that are inside still are. */
static cg_gate close_gate(cg_nodes *nodes, cg_fs_node *node)
{
    const cg_gate before = (cg_gate)node->gate;
    node->gate = CG_GATE_CHECKING; /* before the wait: with new writers it might never end */
    while (node->n_writes > 0)
        pthread_cond_wait(&nodes->changed, &nodes->lock);
    return before;
}

cg_gate cg_gate_check_begin(cg_nodes *nodes, cg_fs_node *node)
{
    pthread_mutex_lock(&nodes->lock);
    while (node->gate == CG_GATE_CHECKING)
        pthread_cond_wait(&nodes->changed, &nodes->lock);
    const cg_gate before = close_gate(nodes, node);
    pthread_mutex_unlock(&nodes->lock);
    return before;
}

bool cg_gate_check_begin_until(cg_nodes *nodes, cg_fs_node *node, const struct timespec *deadline,
                               cg_gate *before_out)
{
    int error = 0;
    pthread_mutex_lock(&nodes->lock);
    while (node->gate == CG_GATE_CHECKING && error != ETIMEDOUT)
        error = pthread_cond_timedwait(&nodes->changed, &nodes->lock, deadline);
    const bool is_ours = node->gate != CG_GATE_CHECKING;
    if (is_ours)
        *before_out = close_gate(nodes, node);
    pthread_mutex_unlock(&nodes->lock);
    return is_ours;
}

void cg_gate_check_end(cg_nodes *nodes, cg_fs_node *node, cg_gate gate)
{
    pthread_mutex_lock(&nodes->lock);
    node->gate = (uint8_t)gate;
    pthread_cond_broadcast(&nodes->changed);
    pthread_mutex_unlock(&nodes->lock);
}

void cg_gate_unseal(cg_nodes *nodes, cg_fs_node *node)
{
    pthread_mutex_lock(&nodes->lock);
    if (node->gate == CG_GATE_SEALED)
        node->gate = CG_GATE_OPEN;
    node->has_lost = 0;
    pthread_mutex_unlock(&nodes->lock);
}
