/* tests/cuda/device.h - where a test's kernels run: emulated_device.cc on the CPU, gpu_device.cc on
 * a GPU. The tests are the same.
 */
#ifndef CG_TESTS_CUDA_DEVICE_H
#define CG_TESTS_CUDA_DEVICE_H
#include "cuda/project.h"
#include "decode_cases.h"

#include <stdexcept>

namespace cg_test
{

/* Decodes chunk by the plan into blocks that are filled with piece before; piece becomes what they
 * hold then. blob: empty at L0. seed: of the emulator. Returns the kernels' status. */
uint32_t run_decode(const Bytes &blob, const Bytes &chunk, const cg_cuda_plan &plan,
                    const Bytes &plan_bytes, const Blocks &blocks, uint64_t seed, Bytes *piece);

/* What a task's rows became. */
struct Projected {
    std::vector<float> coefs, given, residues;
    std::vector<int16_t> cells;

    explicit Projected(const cg_projection &what)
        : coefs(cg_cuda_projection_n_coefs(&what)), given(cg_cuda_projection_made(&what).n_given),
          residues(cg_cuda_projection_made(&what).n_residues),
          cells(cg_cuda_projection_made(&what).n_cells)
    {
    }
    bool operator==(const Projected &other) const
    {
        return coefs == other.coefs && given == other.given && residues == other.residues &&
               cells == other.cells;
    }
};

/* Where it is to work; the rows and what they become are as many as it says. */
inline cg_cuda_projection place_projection(const cg_profile *profile, const cg_projection &what,
                                           const void *bases_dev, void *rows_dev, void *coefs_dev,
                                           void *cells_dev, void *residues_dev, void *given_dev)
{
    cg_cuda_projection p;
    if (cg_cuda_projection_of(profile, &what, bases_dev,
                              size_t{CG_DCT} * what.n_rows * what.row_stride,
                              cg_cuda_projection_n_coefs(&what), &p) != CG_OK)
        throw std::logic_error("not a projection of this profile");
    p.rows_dev = static_cast<float *>(rows_dev);
    p.coefs_dev = static_cast<float *>(coefs_dev);
    p.cells_dev = static_cast<int16_t *>(cells_dev);
    p.residues_dev = static_cast<float *>(residues_dev);
    p.given_dev = static_cast<float *>(given_dev);
    return p;
}

/* Projects a task's rows on the profile's bases. */
Projected run_project(const cg_profile *profile, const Bytes &bases,
                      const cg_projection &projection, const std::vector<float> &rows,
                      uint64_t seed);

} // namespace cg_test
#endif
