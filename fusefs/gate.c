/* fusefs/gate.c - the gate of fusefs/nodes.h. */
#include "fusefs/nodes.h"

bool cg_gate_enter(cg_nodes *nodes, cg_fs_node *node)
{
    pthread_mutex_lock(&nodes->lock);
    while (node->gate == CG_GATE_CHECKING)
        pthread_cond_wait(&nodes->changed, &nodes->lock);
    const bool may_write = node->gate == CG_GATE_OPEN;
    if (may_write)
        node->n_writes++;
    pthread_mutex_unlock(&nodes->lock);
    return may_write;
}

void cg_gate_leave(cg_nodes *nodes, cg_fs_node *node)
{
    pthread_mutex_lock(&nodes->lock);
    if (--node->n_writes == 0 && node->gate == CG_GATE_CHECKING)
        pthread_cond_broadcast(&nodes->changed);
    pthread_mutex_unlock(&nodes->lock);
}

cg_gate cg_gate_check_begin(cg_nodes *nodes, cg_fs_node *node)
{
    pthread_mutex_lock(&nodes->lock);
    while (node->gate == CG_GATE_CHECKING)
        pthread_cond_wait(&nodes->changed, &nodes->lock);
    const cg_gate before = (cg_gate)node->gate;
    node->gate = CG_GATE_CHECKING;
    while (node->n_writes > 0)
        pthread_cond_wait(&nodes->changed, &nodes->lock);
    pthread_mutex_unlock(&nodes->lock);
    return before;
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
    pthread_mutex_unlock(&nodes->lock);
}
