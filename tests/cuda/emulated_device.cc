#include "device.h"

#include "device_memory.h"
#include "emulated_decode.h"

namespace cg_test
{

uint32_t run_decode(const Bytes &blob, const Bytes &chunk, const cg_cuda_plan &plan,
                    const Bytes &plan_bytes, const Blocks &blocks, uint64_t seed, Bytes *piece)
{
    DeviceMemory::at_front() = seed % 2 != 0;
    const DeviceMemory blob_dev(blob.data(), blob.size()), chunk_dev(chunk.data(), chunk.size()),
        plan_dev(plan_bytes.data(), plan.plan_bytes), scratch_dev(plan.scratch_bytes),
        piece_dev(piece->data(), piece->size()),
        table_dev(blocks.table.data(), blocks.table.size() * sizeof(int64_t));
    uint32_t status = 0;
    std::vector<void *> base;
    for (const size_t at : blocks.base)
        base.push_back(piece_dev.data() + at);
    cg_cuda_decode_params params = {};
    params.blob_dev = blob_dev.data();
    params.plan_dev = plan_dev.data();
    params.chunk_dev = chunk_dev.data();
    params.scratch_dev = scratch_dev.data();
    params.status_dev = &status;
    params.blocks = blocks.layout;
    params.blocks.base_dev = base.data();
    params.blocks.table_dev = reinterpret_cast<const int64_t *>(table_dev.data());
    if (!emulate_decode(plan, params, seed))
        throw std::logic_error("the kernels cannot take these blocks");
    piece->assign(piece_dev.data(), piece_dev.data() + piece->size());
    return status;
}

namespace
{

template <class T> std::vector<T> copied(const DeviceMemory &memory, size_t n)
{
    std::vector<T> out(n);
    if (n > 0) // memcpy's pointers must not be NULL
        memcpy(out.data(), memory.data(), n * sizeof(T));
    return out;
}

} // namespace

Projected run_project(const cg_profile *profile, const Bytes &bases,
                      const cg_projection &projection, const std::vector<float> &rows,
                      uint64_t seed)
{
    Projected made(projection);
    DeviceMemory::at_front() = seed % 2 != 0;
    const ProjectMemory<DeviceMemory> memory(profile, bases, projection, rows, made);
    emulate_project(memory.placed(profile, projection), seed);
    made.coefs = copied<float>(memory.coefs, made.coefs.size());
    made.cells = copied<int16_t>(memory.cells, made.cells.size());
    made.residues = copied<float>(memory.residues, made.residues.size());
    made.given = copied<float>(memory.given, made.given.size());
    return made;
}

Sections run_code(const Laid &laid, const cg_projection &projection,
                  const std::vector<int16_t> &cells, uint64_t seed)
{
    std::unique_ptr<DeviceMemory> host;
    DeviceMemory::at_front() = seed % 2 != 0;
    return code_in<DeviceMemory>(
        laid, projection, cells,
        [&](size_t n_bytes) {
            host = std::make_unique<DeviceMemory>(n_bytes);
            return host->data();
        },
        [&](const cg_cuda_coding &coding) { emulate_code(coding, seed); });
}

} // namespace cg_test
