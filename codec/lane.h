/* codec/lane.h - functions of one lane, which C, C++ and CUDA share.
 *
 * What a lane computes is written once, and both the CPU's codec and the GPU's kernels are made of
 * it. Compile without contraction: what is fused is written so.
 *
 * CG_LANE: before such a function. CG_LANE_METHOD: before a method of C++ and CUDA. CG_LANE_TABLE:
 * before its constants. CG_UNROLL: before a loop whose arrays must be registers. CG_UNROLL_NOT:
 * before one that would take too many of them.
 * Threads: pure functions.
 */
#ifndef CG_CODEC_LANE_H
#define CG_CODEC_LANE_H

#if defined(__CUDACC__)
#define CG_LANE static __device__ __forceinline__
#define CG_LANE_METHOD __device__ __forceinline__
#define CG_LANE_TABLE static __constant__ const
#define CG_UNROLL _Pragma("unroll")
#define CG_UNROLL_NOT _Pragma("unroll 1")
#else
#define CG_LANE static inline __attribute__((always_inline))
#define CG_LANE_METHOD inline __attribute__((always_inline))
#define CG_LANE_TABLE static const
#define CG_UNROLL
#define CG_UNROLL_NOT
#endif
#endif
