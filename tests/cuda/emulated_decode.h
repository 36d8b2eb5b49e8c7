/* tests/cuda/emulated_decode.h - cg_cuda_decode(), cg_cuda_project() and cg_cuda_code() on the CPU:
 * the kernels' own bodies. */
#ifndef CG_TESTS_CUDA_EMULATED_DECODE_H
#define CG_TESTS_CUDA_EMULATED_DECODE_H
#include "cuda/coding.h"
#include "cuda/decode.h"
#include "cuda/project.h"

#include <vector>

namespace cg_test
{

/* Runs the launches of a batch on host memory that stands for the device's. seed: the order of
 * threads. Throws std::logic_error where the kernels cannot take the jobs, or a GPU would hang. */
void emulate_decode(const std::vector<cg_cuda_decode_job> &jobs, uint64_t seed);
void emulate_project(const cg_cuda_projection &projection, uint64_t seed);
void emulate_code(const cg_cuda_coding &coding, uint64_t seed);

} // namespace cg_test
#endif
