/* tests/cuda/device.h - where a test's kernels run: emulated_device.cc on the CPU, gpu_device.cc on
 * a GPU. The tests are the same.
 */
#ifndef CG_TESTS_CUDA_DEVICE_H
#define CG_TESTS_CUDA_DEVICE_H
#include "decode_cases.h"

namespace cg_test
{

/* Decodes chunk by the plan into blocks that are filled with piece before; piece becomes what they
 * hold then. blob: empty at L0. seed: of the emulator. Returns the kernels' status. */
uint32_t run_decode(const Bytes &blob, const Bytes &chunk, const cg_cuda_plan &plan,
                    const Bytes &plan_bytes, const Blocks &blocks, uint64_t seed, Bytes *piece);

} // namespace cg_test
#endif
