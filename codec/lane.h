/* codec/lane.h - CG_LANE: a function of one lane, shared by C, C++ and CUDA.
 *
 * What a lane computes is written once, and both the CPU's codec and the GPU's kernels are made of
 * it. Compile without contraction: what is fused is written so.
 */
#ifndef CG_CODEC_LANE_H
#define CG_CODEC_LANE_H

#if defined(__CUDACC__)
#define CG_LANE static __device__ __forceinline__
#define CG_LANE_TABLE static __constant__ const
#else
#define CG_LANE static inline __attribute__((always_inline))
#define CG_LANE_TABLE static const
#endif
#endif
