#include "device.h"

#include "device_memory.h"
#include "emulated_decode.h"

namespace cg_test
{

void run_decode(std::vector<Decoding> *batch, uint64_t seed)
{
    std::vector<std::unique_ptr<DecodingMemory<DeviceMemory>>> memory;
    std::vector<cg_cuda_decode_job> jobs;
    DeviceMemory::at_front() = seed % 2 != 0;
    for (const Decoding &d : *batch) {
        memory.push_back(std::make_unique<DecodingMemory<DeviceMemory>>(d));
        jobs.push_back(memory.back()->job(d));
    }
    emulate_decode(jobs, seed);
    for (size_t i = 0; i < batch->size(); i++) {
        Decoding &d = (*batch)[i];
        memcpy(&d.status, memory[i]->status.data(), sizeof d.status);
        memcpy(d.piece.data(), memory[i]->piece.data(), d.piece.size());
        const uint8_t *const scratch = memory[i]->scratch.data();
        d.scratch.assign(scratch, scratch + memory[i]->scratch_bytes);
    }
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
