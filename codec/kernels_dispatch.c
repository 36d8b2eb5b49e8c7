#include "codec/kernels.h"

#include <string.h>

const float cg_dct8[CG_DCT][CG_DCT] = {
    {0.353553391f, 0.353553391f, 0.353553391f, 0.353553391f, 0.353553391f, 0.353553391f, 0.353553391f, 0.353553391f},
    {0.49039264f, 0.415734806f, 0.277785117f, 0.097545161f, -0.097545161f, -0.277785117f, -0.415734806f, -0.49039264f},
    {0.461939766f, 0.191341716f, -0.191341716f, -0.461939766f, -0.461939766f, -0.191341716f, 0.191341716f, 0.461939766f},
    {0.415734806f, -0.097545161f, -0.49039264f, -0.277785117f, 0.277785117f, 0.49039264f, 0.097545161f, -0.415734806f},
    {0.353553391f, -0.353553391f, -0.353553391f, 0.353553391f, 0.353553391f, -0.353553391f, -0.353553391f, 0.353553391f},
    {0.277785117f, -0.49039264f, 0.097545161f, 0.415734806f, -0.415734806f, -0.097545161f, 0.49039264f, -0.277785117f},
    {0.191341716f, -0.461939766f, 0.461939766f, -0.191341716f, -0.191341716f, 0.461939766f, -0.461939766f, 0.191341716f},
    {0.097545161f, -0.277785117f, 0.415734806f, -0.49039264f, 0.49039264f, -0.415734806f, 0.277785117f, -0.097545161f},
};

const cg_kernels *cg_kernels_named(const char *name)
{
#if defined(__x86_64__)
    if (strcmp(name, "avx512") == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("fma")
                   ? &cg_kernels_avx512
                   : NULL;
    if (strcmp(name, "avx2") == 0)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &cg_kernels_avx2 : NULL;
#endif
    return strcmp(name, "baseline") == 0 ? &cg_kernels_baseline : NULL;
}

static const cg_kernels *chosen;

void cg_kernels_use(const cg_kernels *kernels) { chosen = kernels; }

const cg_kernels *cg_kernels_best(void)
{
    if (chosen != NULL)
        return chosen;
    const cg_kernels *kernels = cg_kernels_named("avx512");
    if (kernels == NULL)
        kernels = cg_kernels_named("avx2");
    return kernels != NULL ? kernels : &cg_kernels_baseline;
}
