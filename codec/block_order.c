#include "codec/block_order.h"

#include "codec/profile_data.h"

#include <stdlib.h>
#include <string.h>

/* Written out, not computed: every compiler and processor has the same bits. */
const float CG_STEP_FACTORS[CG_N_STEP_FACTORS] = {0x1.6a09e6p-2f, 0x1p-1f, 0x1.6a09e6p-1f, 0x1p+0f,
                                                  0x1.6a09e6p+0f, 0x1p+1f, 0x1.6a09e6p+1f};

cg_status cg_block_order_init(uint32_t n_blocks, cg_block_order *order)
{
    *order = (cg_block_order){.n_blocks = n_blocks, .n_runs = 1};
    order->runs[0].n_rows = n_blocks;
    order->block = malloc(n_blocks * sizeof *order->block);
    order->factor_index = malloc(n_blocks);
    if (order->block == NULL || order->factor_index == NULL)
        return CG_ERR_NO_MEMORY;
    for (uint32_t b = 0; b < n_blocks; b++)
        order->block[b] = (uint16_t)b; /* CG_MAX_CHUNK_TOKENS are 8,192 blocks */
    memset(order->factor_index, CG_OWN_STEP_FACTOR, n_blocks);
    return CG_OK;
}

void cg_block_order_destroy(cg_block_order *order)
{
    free(order->block);
    free(order->factor_index);
}

cg_status cg_block_order_sort(const cg_profile *p, const uint8_t *factor_index,
                              cg_block_order *order)
{
    uint32_t row = 0;
    for (uint32_t b = 0; b < order->n_blocks; b++) {
        if (factor_index[b] >= CG_N_STEP_FACTORS)
            return CG_ERR_CORRUPT;
    }
    /* Within a run rows stay in the order of their blocks: encoder and decoder both sort. */
    order->n_runs = 0;
    for (uint8_t i = 0; i < CG_N_STEP_FACTORS; i++) {
        const uint32_t first = row;
        for (uint32_t b = 0; b < order->n_blocks; b++) {
            if (factor_index[b] != i)
                continue;
            order->block[row] = (uint16_t)b;
            order->factor_index[row++] = i;
        }
        /* The columns' own classes come first, then a table of them for each factor. */
        if (row > first)
            order->runs[order->n_runs++] =
                (cg_rans_run){row - first, (1 + (size_t)i) * p->column_classes_bytes};
    }
    return CG_OK;
}
