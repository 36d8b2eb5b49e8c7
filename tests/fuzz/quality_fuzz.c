/* tests/fuzz/quality_fuzz.c - a model.json of any bytes: a curve of quality that is taken predicts
 * finite figures that rise with the tokens and with the level. */
#include "connector/quality_read.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 1), why[64];
    const cg_sentence error = {why, sizeof why};
    cg_fingerprint profile;
    cg_quality quality;
    double before = 0;
    if (text == NULL)
        return 0;
    memcpy(text, data, size);
    text[size] = '\0';
    memset(profile.bytes, 0xaa, sizeof profile.bytes); /* as the corpus has it */
    cg_quality_read(&quality, text, &profile, &error);
    free(text);
    for (uint32_t n_tokens = 1; n_tokens < 1u << 31; n_tokens *= 2) {
        const double sum = cg_quality_sensitivity(&quality, 0, n_tokens);
        if (!isfinite(sum) || !(sum > before))
            abort();
        before = sum;
    }
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++)
        if (!(quality.errors[level] >= quality.errors[level - 1]))
            abort();
    return 0;
}
