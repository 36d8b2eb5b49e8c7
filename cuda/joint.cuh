/* cuda/joint.cuh - a kernel's body: from joint symbols to layer groups' shared components;
 * FORMAT.md's "Decoding, version 3", stage 1a.
 *
 * The sums are those of the inverse KLT (cuda/klt.cuh): a joint matrix is one more basis, whose
 * channels are the groups' shared components. Each sum gives a G of 16 bits, and the tensor
 * instruction takes 8. So V becomes two columns of the group's symbols: its low digit, signed, and
 * the rest over 256. Both are multiplied by the same elements, the second with 8 bits more of shift
 * (the steps of cuda/profile_blob.c). The second lies in -128 to 128, and a tile that has a 128 is
 * marked as large. Many tiles of second digits are all zeros, and are skipped.
 */
#ifndef CG_CUDA_JOINT_CUH
#define CG_CUDA_JOINT_CUH
#include "cuda/klt.cuh"

/* Two neighbouring rows and four neighbouring components, as a lane has them: bytes of a tile. */
struct cg_cuda_given_cells {
    uint64_t low, high;     /* digits: [row][component] */
    uint64_t high_cells[2]; /* [row][component] */
    bool is_large;
};

/* sums: a frequency's. n_given: of the four, those that the joint matrix gives. */
CG_LANE cg_cuda_given_cells cg_cuda_find_given(const uint32_t sums[2][4], uint32_t n_bits,
                                               uint32_t n_rows, uint32_t n_given)
{
    cg_cuda_given_cells out = {};
    CG_UNROLL
    for (uint32_t row = 0; row < 2; row++) {
        CG_UNROLL
        for (uint32_t i = 0; i < 4; i++) {
            const int32_t v = row < n_rows && i < n_given
                                  ? cg_lane_given((int32_t)sums[i / 2][2 * row + i % 2], n_bits)
                                  : 0;
            const int32_t high = (v - (int8_t)v) >> 8;
            out.low |= (uint64_t)(uint8_t)v << (32 * row + 8 * i);
            out.high |= (uint64_t)(uint8_t)high << (32 * row + 8 * i);
            out.high_cells[row] |= (uint64_t)(uint16_t)high << (16 * i);
            out.is_large |= high != (int8_t)high;
        }
    }
    return out;
}

/* A warp's sums of one frequency into the symbols of the group that they belong to. component: of
 * the group, a lane's first. */
CG_LANE void cg_cuda_store_given(const cg_cuda_product &to, uint8_t *scratch, uint32_t f,
                                 uint32_t row, uint32_t component, const cg_cuda_given_cells &cells)
{
    const uint32_t band = component / CG_CUDA_BAND * CG_CUDA_GIVEN_COLUMNS;
    if (band >= to.n_bands[f]) /* neither given nor followed by others */
        return;
    const uint64_t low_tile = to.tile_at[f] + band * to.n_tile_rows + row / CG_CUDA_TILE_BLOCKS,
                   high_tile = low_tile + to.n_tile_rows;
    const uint32_t at = cg_cuda_cell(row % CG_CUDA_TILE_BLOCKS, component);
    uint8_t *const digits = scratch + to.digits_at;
    int16_t *const high_cells =
        (int16_t *)(scratch + to.cells_at) + high_tile * CG_CUDA_TILE_BYTES + at;
    *(uint64_t *)(digits + low_tile * CG_CUDA_TILE_BYTES + at) = cells.low;
    *(uint64_t *)(digits + high_tile * CG_CUDA_TILE_BYTES + at) = cells.high;
    ((uint64_t *)high_cells)[0] = cells.high_cells[0];
    ((uint64_t *)high_cells)[1] = cells.high_cells[1];
    if (cells.high != 0)
        scratch[to.rest_at + high_tile] = 1;
    if (cells.is_large)
        scratch[to.large_at + high_tile] = 1;
}

template <class Cta>
CG_LANE void cg_cuda_invert_joint(Cta &cta, const cg_cuda_pass &pass,
                                  const cg_cuda_decode_params &params)
{
    const uint8_t *const plan = (const uint8_t *)params.plan_dev;
    const cg_cuda_klt_job job = ((const cg_cuda_klt_job *)(plan + pass.jobs_at))[cta.block()];
    const cg_cuda_joint &m = *(const cg_cuda_joint *)(plan + job.matrix_at);
    const cg_cuda_warp warp = cg_cuda_find_warp(cta.thread());
    cg_cuda_sums sums = {};
    cg_cuda_sum(cta, m.product, params, job, job.first_tile + warp.column,
                (cg_cuda_klt_shared *)cta.shared(), &sums, [] {});
    const uint32_t first_row = cg_cuda_first_row(job, warp.row),
                   row = first_row + cta.lane() / 4 * 2;
    if (first_row == CG_CUDA_NO_ROW || row >= m.product.n_rows)
        return;
    CG_UNROLL
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t tile = job.first_tile + warp.first + i * CG_CUDA_NEXT_COLUMN;
        if (tile >= job.n_tiles)
            continue;
        const uint32_t channel = tile * CG_CUDA_JOINT_CHANNELS + cta.lane() % 4 * 4,
                       component = channel % m.n_shared;
        const cg_cuda_product &to =
            ((const cg_cuda_klt *)(plan + m.groups_at))[channel / m.n_shared - m.first_group]
                .product;
        CG_UNROLL
        for (uint32_t k = 0; k < CG_CUDA_HALF; k++) {
            const uint32_t f = cg_cuda_frequency(warp.half * CG_CUDA_HALF + k),
                           n_given = m.n_given[f] > component ? m.n_given[f] - component : 0;
            cg_cuda_store_given(
                to, (uint8_t *)params.scratch_dev, f, row, component,
                cg_cuda_find_given(sums.of[k][i], m.n_bits, m.product.n_rows - row, n_given));
        }
    }
}
#endif
