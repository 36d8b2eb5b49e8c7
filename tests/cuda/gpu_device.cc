#include "device.h"

#include "engine_blocks.h"
#include "gpu_memory.h"

#include <chrono>
#include <cstring>
#include <thread>

namespace cg_test
{

namespace
{

void fetch(void *to, const GpuMemory &from, size_t n_bytes)
{
    require(cudaMemcpy(to, from.data(), n_bytes, cudaMemcpyDeviceToHost), "copy");
}

} // namespace

void run_decode(std::vector<Decoding> *batch, uint64_t)
{
    std::vector<std::unique_ptr<DecodingMemory<GpuMemory>>> memory;
    std::vector<cg_cuda_decode_job> jobs;
    for (const Decoding &d : *batch) {
        memory.push_back(std::make_unique<DecodingMemory<GpuMemory>>(d));
        jobs.push_back(memory.back()->job(d));
        /* What scratch holds before must not matter. */
        require(cudaMemset(memory.back()->scratch.data(), 0xee, memory.back()->scratch_bytes),
                "fill");
    }
    require(cg_cuda_decode_prepare(), "prepare");
    require(cg_cuda_decode(jobs.data(), static_cast<uint32_t>(jobs.size()), nullptr), "decode");
    require(cudaDeviceSynchronize(), "kernels");
    for (size_t i = 0; i < batch->size(); i++) {
        Decoding &d = (*batch)[i];
        fetch(&d.status, memory[i]->status, sizeof d.status);
        fetch(d.piece.data(), memory[i]->piece, d.piece.size());
        d.scratch.resize(memory[i]->scratch_bytes);
        fetch(d.scratch.data(), memory[i]->scratch, d.scratch.size());
    }
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

namespace
{

// For a stream to do: it takes its time, then fills the pinned memory.
struct Writing {
    void *pinned;
    std::vector<uint8_t> bytes;
};

void CUDART_CB be_busy(void *bytes)
{
    const auto *writing = static_cast<Writing *>(bytes);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    memcpy(writing->pinned, writing->bytes.data(), writing->bytes.size());
    delete writing;
}

} // namespace

EngineBlocks::EngineBlocks(size_t n_bytes) : n_bytes_(n_bytes)
{
    cudaStream_t stream;
    void *data;
    require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    require(cudaMalloc(&data, n_bytes), "cudaMalloc");
    require(cudaHostAlloc(&pinned_, n_bytes, cudaHostAllocDefault), "cudaHostAlloc");
    stream_ = stream;
    data_ = static_cast<char *>(data);
}
EngineBlocks::~EngineBlocks()
{
    (void)cudaStreamSynchronize(static_cast<cudaStream_t>(stream_));
    (void)cudaStreamDestroy(static_cast<cudaStream_t>(stream_));
    (void)cudaFree(data_);
    (void)cudaFreeHost(pinned_);
}
void EngineBlocks::write(const std::vector<uint8_t> &bytes)
{
    // Out of pinned memory, or the call would return when the stream has come to it. What was
    // written before lies there until the stream is at the next.
    const auto stream = static_cast<cudaStream_t>(stream_);
    require(cudaLaunchHostFunc(stream, be_busy, new Writing{pinned_, bytes}), "sleep");
    require(cudaMemcpyAsync(data_, pinned_, n_bytes_, cudaMemcpyHostToDevice, stream), "copy");
}
std::vector<uint8_t> EngineBlocks::read() const
{
    std::vector<uint8_t> bytes(n_bytes_);
    const auto stream = static_cast<cudaStream_t>(stream_);
    require(cudaMemcpyAsync(bytes.data(), data_, n_bytes_, cudaMemcpyDeviceToHost, stream), "copy");
    require(cudaStreamSynchronize(stream), "copy");
    return bytes;
}

} // namespace cg_test
