/* tests/cuda/emulated_decode.h - cg_cuda_decode(), cg_cuda_project() and cg_cuda_code() on the CPU:
 * the kernels' own bodies. */
#ifndef CG_TESTS_CUDA_EMULATED_DECODE_H
#define CG_TESTS_CUDA_EMULATED_DECODE_H
#include "cuda/coding.h"
#include "cuda/decode.h"
#include "cuda/project.h"

namespace cg_test
{

/* Runs the plan's passes on host memory that stands for the device's. seed: the order of threads.
 * Returns whether the kernels can take the blocks; throws std::logic_error where a GPU would hang.
 */
bool emulate_decode(const cg_cuda_plan &plan, const cg_cuda_decode_params &params, uint64_t seed);
void emulate_project(const cg_cuda_projection &projection, uint64_t seed);
void emulate_code(const cg_cuda_coding &coding, uint64_t seed);

} // namespace cg_test
#endif
