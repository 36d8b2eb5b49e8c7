#include "device.h"

#include "gpu_memory.h"

namespace cg_test
{

uint32_t run_decode(const Bytes &blob, const Bytes &chunk, const cg_cuda_plan &plan,
                    const Bytes &plan_bytes, const Blocks &blocks, uint64_t, Bytes *piece)
{
    const uint32_t none = 0;
    const GpuMemory blob_dev(blob.data(), blob.size()), chunk_dev(chunk.data(), chunk.size()),
        plan_dev(plan_bytes.data(), plan.plan_bytes), scratch_dev(plan.scratch_bytes),
        piece_dev(piece->data(), piece->size()), status_dev(&none, sizeof none),
        table_dev(blocks.table.data(), blocks.table.size() * sizeof(int64_t));
    std::vector<void *> base;
    for (const size_t at : blocks.base)
        base.push_back(piece_dev.data() + at);
    const GpuMemory base_dev(base.data(), base.size() * sizeof(void *));
    cg_cuda_decode_params params = {};
    params.blob_dev = blob_dev.data();
    params.plan_dev = plan_dev.data();
    params.chunk_dev = chunk_dev.data();
    params.scratch_dev = scratch_dev.data();
    params.status_dev = reinterpret_cast<uint32_t *>(status_dev.data());
    params.blocks = blocks.layout;
    params.blocks.base_dev = reinterpret_cast<void *const *>(base_dev.data());
    params.blocks.table_dev = reinterpret_cast<const int64_t *>(table_dev.data());
    /* What scratch holds before must not matter. */
    require(cudaMemset(scratch_dev.data(), 0xee, plan.scratch_bytes), "fill");
    require(cg_cuda_decode_prepare(), "prepare");
    require(cg_cuda_decode(&plan, &params, nullptr), "decode");
    require(cudaDeviceSynchronize(), "kernels");
    uint32_t status;
    require(cudaMemcpy(&status, status_dev.data(), sizeof status, cudaMemcpyDeviceToHost), "copy");
    require(cudaMemcpy(piece->data(), piece_dev.data(), piece->size(), cudaMemcpyDeviceToHost),
            "copy");
    return status;
}

Projected run_project(const cg_profile *profile, const Bytes &bases,
                      const cg_projection &projection, const std::vector<float> &rows, uint64_t)
{
    Projected made(projection);
    const ProjectMemory<GpuMemory> memory(profile, bases, projection, rows, made);
    const cg_cuda_projection p = memory.placed(profile, projection);
    require(cudaMemset(memory.coefs.data(), 0xee, memory.coefs_bytes), "fill");
    require(cg_cuda_project(&p, nullptr), "project");
    require(cudaDeviceSynchronize(), "kernels");
    const auto fetch = [](void *to, const GpuMemory &from, size_t n_bytes) {
        require(cudaMemcpy(to, from.data(), n_bytes, cudaMemcpyDeviceToHost), "copy");
    };
    fetch(made.coefs.data(), memory.coefs, memory.coefs_bytes);
    fetch(made.cells.data(), memory.cells, memory.cells_bytes);
    fetch(made.residues.data(), memory.residues, memory.residues_bytes);
    fetch(made.given.data(), memory.given, memory.given_bytes);
    return made;
}

Sections run_code(const Laid &laid, const cg_projection &projection,
                  const std::vector<int16_t> &cells, uint64_t)
{
    std::unique_ptr<PinnedMemory> host;
    return code_in<GpuMemory>(
        laid, projection, cells,
        [&](size_t n_bytes) {
            host = std::make_unique<PinnedMemory>(n_bytes);
            return host->data();
        },
        [](const cg_cuda_coding &coding) {
            require(cg_cuda_code_prepare(), "prepare");
            require(cg_cuda_code(&coding, nullptr), "code");
            require(cudaDeviceSynchronize(), "kernels");
        });
}

} // namespace cg_test
