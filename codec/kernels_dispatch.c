/* Which table of kernels this CPU gets: of baseline, avx2, avx512, vnni and amx the last that it
 * can run. */
#include "codec/kernels.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#if defined(__x86_64__)
/* Matrix units: the CPU has them, and the kernel lets this process use them. The permission is the
 * process's, is asked for again at no harm, and is refused where a thread's alternate signal stack
 * is too small for the tiles. */
static bool ask_for_amx(void)
{
#if defined(__linux__) && defined(SYS_arch_prctl)
    /* ARCH_REQ_XCOMP_PERM of asm/prctl.h, which older systems lack, for the XSAVE component of
     * tiles; and bits of CPUID's leaf 7: of edx, and of eax of subleaf 1. */
    enum {
        REQUEST_PERMISSION = 0x1023,
        TILE_DATA = 18,
        TILE_BF16_BIT = 1 << 22,
        TILE_BIT = 1 << 24,
        TILE_INT8_BIT = 1 << 25,
        BF16_BIT = 1 << 5
    };
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & TILE_BF16_BIT) == 0 ||
        (d & TILE_BIT) == 0 || (d & TILE_INT8_BIT) == 0)
        return false;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || (a & BF16_BIT) == 0)
        return false;
    return syscall(SYS_arch_prctl, (long)REQUEST_PERMISSION, (long)TILE_DATA) == 0;
#else
    return false;
#endif
}

/* Asked once: in a virtual machine each CPUID is a visit to the host. */
static bool has_amx(void)
{
    static atomic_int known; /* 0: not yet; 1: no; 2: yes */
    int answer = atomic_load_explicit(&known, memory_order_relaxed);
    if (answer == 0) {
        answer = ask_for_amx() ? 2 : 1;
        atomic_store_explicit(&known, answer, memory_order_relaxed);
    }
    return answer == 2;
}
#endif

const cg_kernels *cg_kernels_named(const char *name)
{
#if defined(__x86_64__)
    if (strcmp(name, "amx") == 0)
        return cg_kernels_named("vnni") != NULL && has_amx() ? &cg_kernels_amx : NULL;
    if (strcmp(name, "vnni") == 0)
        return cg_kernels_named("avx512") != NULL && __builtin_cpu_supports("avx512vnni")
                   ? &cg_kernels_vnni
                   : NULL;
    if (strcmp(name, "avx512") == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("fma")
                   ? &cg_kernels_avx512
                   : NULL;
    if (strcmp(name, "avx2") == 0)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &cg_kernels_avx2
                                                                               : NULL;
#endif
    return strcmp(name, "baseline") == 0 ? &cg_kernels_baseline : NULL;
}

/* No lock: only tests write it, while no other thread runs (kernels.h). */
static const cg_kernels *chosen;

void cg_kernels_use(const cg_kernels *kernels)
{
    chosen = kernels;
}

const cg_kernels *cg_kernels_best(void)
{
    static const char *const names[] = {"amx", "vnni", "avx512", "avx2"};
    if (chosen != NULL)
        return chosen;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const cg_kernels *kernels = cg_kernels_named(names[i]);
        if (kernels != NULL)
            return kernels;
    }
    return &cg_kernels_baseline;
}
