/* The life of a gather. Sending is in gather_send.c, taking in gather_take.c. */
#include "connector/gather.h"

#include "connector/gather_state.h"
#include "connector/host_socket.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

cg_status cg_gather_new(const cg_gather_config *config, cg_gather **gather_out)
{
    cg_status status = CG_OK;
    *gather_out = NULL;
    cg_gather *g = calloc(1, sizeof *g);
    if (g == NULL)
        return CG_ERR_NO_MEMORY;
    g->config = *config;
    g->config.rank_set = NULL;
    g->pid = getpid();
    g->listener = g->sender = -1;
    g->last = &g->first;
    g->name = cg_key_of_bytes(config->rank_set, strlen(config->rank_set));
    pthread_mutex_init(&g->lock, NULL);
    if (config->first_head == 0) /* the rank that takes what the others send, and stores it */
        status = cg_host_socket_listen(&g->name, CG_GATHER_MAX_RANKS, &g->listener);
    if (status != CG_OK) {
        cg_gather_free(g);
        return status;
    }
    *gather_out = g;
    return CG_OK;
}

void cg_gather_free(cg_gather *g)
{
    if (g == NULL)
        return;
    cg_gather_free_parts(g);
    cg_gather_free_turns(g);
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

bool cg_gather_is_of(const cg_gather *g, uint32_t first_head, uint32_t n_heads)
{
    return g->config.first_head == first_head && g->config.n_heads == n_heads;
}
