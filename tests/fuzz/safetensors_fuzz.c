/* tests/fuzz/safetensors_fuzz.c - safetensors files of hostile bytes: every tensor's bytes are
 * read. */
#include "codec/safetensors.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes);

static void exercise(const uint8_t *bytes, size_t n_bytes)
{
    cg_safetensors *tensors;
    const char *what;
    if (cg_safetensors_open(bytes, n_bytes, &tensors, &what) != CG_OK) {
        if (what == NULL)
            abort();
        return;
    }
    uint64_t sum = 0;
    for (size_t i = 0; i < cg_safetensors_count(tensors); i++) {
        const cg_safetensor *tensor = cg_safetensors_at(tensors, i);
        for (uint64_t k = 0; k < tensor->data_bytes; k++)
            sum += tensor->data[k];
        if (cg_safetensors_find(tensors, tensor->name) == NULL)
            abort();
    }
    const char *text = cg_safetensors_metadata(tensors, "a");
    sum += text != NULL ? strlen(text) : 0;
    volatile uint64_t sink = sum;
    (void)sink;
    cg_safetensors_free(tensors);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    exercise(bytes, n_bytes);
    if (n_bytes < 8)
        return 0;
    /* The length in front is what mutations hit least: also try where the JSON's last brace says it
     * ends. */
    const uint8_t *brace = memrchr(bytes + 8, '}', n_bytes - 8);
    uint8_t *repaired = brace != NULL ? malloc(n_bytes) : NULL;
    if (repaired == NULL)
        return 0;
    const uint64_t header_bytes = (uint64_t)(brace + 1 - (bytes + 8));
    memcpy(repaired, bytes, n_bytes);
    for (unsigned i = 0; i < 8; i++)
        repaired[i] = (uint8_t)(header_bytes >> 8 * i);
    exercise(repaired, n_bytes);
    free(repaired);
    return 0;
}
