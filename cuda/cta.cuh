/* cuda/cta.cuh - a thread block on a GPU, as the kernels' bodies see it.
 *
 * Bodies are templates over this type, so that tests can run them on the CPU with an emulator in
 * its place. All 32 lanes of a warp must call ballot() and multiply() together, and all threads of
 * the thread block barrier().
 */
#ifndef CG_CUDA_CTA_CUH
#define CG_CUDA_CTA_CUH
#include <stdint.h>

struct cg_cuda_cta {
    __device__ __forceinline__ uint32_t block() const
    {
        return blockIdx.x;
    }
    /* Which of a launch's passes the thread block belongs to. */
    __device__ __forceinline__ uint32_t pass() const
    {
        return blockIdx.y;
    }
    /* Volatile, so that what follows from it is computed again rather than kept in registers. */
    __device__ __forceinline__ uint32_t thread() const
    {
        uint32_t number;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
        return number;
    }
    __device__ __forceinline__ uint32_t lane() const
    {
        return thread() % 32;
    }
    __device__ __forceinline__ uint32_t ballot(bool bit)
    {
        return __ballot_sync(0xffffffffu, bit);
    }
    __device__ __forceinline__ uint32_t count(uint32_t bits) const
    {
        return (uint32_t)__popc(bits);
    }
    /* A condition that lanes differ in. The compiler would make branches of it. */
    __device__ __forceinline__ uint32_t choose(bool first, uint32_t a, uint32_t b) const
    {
        uint32_t chosen;
        asm("{.reg .pred p; setp.ne.u32 p, %1, 0; selp.b32 %0, %2, %3, p;}"
            : "=r"(chosen)
            : "r"((uint32_t)first), "r"(a), "r"(b));
        return chosen;
    }
    __device__ __forceinline__ void barrier()
    {
        __syncthreads();
    }
    __device__ __forceinline__ void *shared()
    {
        extern __shared__ __align__(16) uint8_t cg_cuda_shared_memory[];
        return cg_cuda_shared_memory;
    }
    /* From global to shared memory, 16 bytes, aligned; zeros where from is not there. They come
     * with wait_copies(), for this thread. */
    __device__ __forceinline__ void copy16(void *to, const void *from, bool is_there = true)
    {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                         (uint32_t)__cvta_generic_to_shared(to)),
                     "l"(__cvta_generic_to_global(from)), "r"(is_there ? 16 : 0)
                     : "memory");
    }
    __device__ __forceinline__ void clear16(void *to)
    {
        *(uint4 *)to = make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void wait_copies()
    {
        asm volatile("cp.async.wait_all;" ::: "memory");
    }
    /* Copies since the last call of it become a set, a "group" of PTX. */
    __device__ __forceinline__ void end_copies()
    {
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    /* Waits for all such sets but the last. */
    __device__ __forceinline__ void wait_older_copies()
    {
        asm volatile("cp.async.wait_group 1;" ::: "memory");
    }
    /* d += a * b, modulo 2^32: 16 x 32 by 32 x 8 signed numbers of 8 bits. Fragments are those of
     * PTX's mma.m16n8k32. */
    __device__ __forceinline__ void multiply(uint32_t d[4], const uint32_t a[4],
                                             const uint32_t b[2])
    {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
    __device__ __forceinline__ void load16(uint32_t out[4], const void *from) const
    {
        const uint4 v = __ldg((const uint4 *)from);
        out[0] = v.x;
        out[1] = v.y;
        out[2] = v.z;
        out[3] = v.w;
    }
    __device__ __forceinline__ void load_shared16(uint32_t out[4], const void *from) const
    {
        const uint4 v = *(const uint4 *)from;
        out[0] = v.x;
        out[1] = v.y;
        out[2] = v.z;
        out[3] = v.w;
    }
    __device__ __forceinline__ void store_shared16(void *to, const uint32_t from[4]) const
    {
        *(uint4 *)to = make_uint4(from[0], from[1], from[2], from[3]);
    }
    __device__ __forceinline__ void raise(uint32_t *status, uint32_t value)
    {
        atomicMax(status, value);
    }
};
#endif
