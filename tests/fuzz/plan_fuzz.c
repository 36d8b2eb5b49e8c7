/* A look-up's plan comes from another process: any bytes parse safely, and what parses keeps its
 * own promises. */
#include "connector/plan.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(int holds)
{
    if (!holds)
        abort();
}

static void use(const uint8_t *data, size_t size)
{
    cg_plan *plan;
    if (cg_plan_parse(data, size, &plan) != CG_OK) {
        check(plan == NULL);
        return;
    }
    uint32_t at = plan->first_position;
    for (uint32_t i = 0; i < plan->n_chunks; i++) {
        const cg_plan_chunk *chunk = &plan->chunks[i];
        check(chunk->first_token == at && chunk->level < CG_N_LEVELS &&
              chunk->sizes.bytes[chunk->level] > 0);
        at += chunk->sizes.n_tokens;
    }
    check(at == plan->first_position + plan->n_tokens && plan->hit_tokens <= at &&
          at <= plan->prompt_tokens);
    uint8_t *again =
        malloc(cg_plan_bytes(plan)); /* writing it gives the same bytes: nothing was ignored */
    check(again != NULL && cg_plan_bytes(plan) == size);
    cg_plan_write(plan, again);
    check(memcmp(again, data, size) == 0);
    free(again);
    cg_plan_free(plan);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    use(data, size);
    /* Past the checksum, too: sealed as who wrote the bytes could have. */
    if (size < CG_KEY_BYTES)
        return 0;
    uint8_t *sealed = malloc(size);
    if (sealed == NULL)
        return 0;
    memcpy(sealed, data, size);
    const cg_key check_key = cg_key_of_bytes(sealed, size - CG_KEY_BYTES);
    memcpy(sealed + size - CG_KEY_BYTES, check_key.bytes, CG_KEY_BYTES);
    use(sealed, size);
    free(sealed);
    return 0;
}
