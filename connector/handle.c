#include "connector/handle.h"

#include <stdlib.h>

void cg_handle_free(cachegen *c)
{
    for (int i = 0; i < CG_MAX_KV_LAYOUTS; i++)
        free(atomic_load(&c->layouts[i]));
    cg_gather_free(atomic_load(&c->gather));
    cg_store_free(c->store);
    cg_model_destroy(&c->model);
    cg_config_free(c->config);
    free(c);
}
