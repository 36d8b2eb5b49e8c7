#include "engine_blocks.h"
#include "standin.h"

#include <dlfcn.h>

#include <stdexcept>

namespace cg_test
{

namespace
{

const cg_standin &standin()
{
    static const cg_standin *control = [] {
        void *library = dlopen(CG_TEST_CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr)
            throw std::runtime_error(dlerror());
        using Entry = const cg_standin *();
        return reinterpret_cast<Entry *>(dlsym(library, "cg_standin_control"))();
    }();
    return *control;
}

} // namespace

EngineBlocks::EngineBlocks(size_t n_bytes)
    : n_bytes_(n_bytes), data_(static_cast<char *>(standin().engine_malloc(n_bytes))),
      stream_(standin().engine_stream())
{
}
EngineBlocks::~EngineBlocks()
{
    standin().engine_stream_destroy(stream_);
    standin().engine_free(data_);
}
void EngineBlocks::write(const std::vector<uint8_t> &bytes)
{
    standin().engine_sleep(20, stream_);
    standin().engine_write(data_, bytes.data(), n_bytes_, stream_);
}
std::vector<uint8_t> EngineBlocks::read() const
{
    std::vector<uint8_t> bytes(n_bytes_);
    standin().engine_read(bytes.data(), data_, n_bytes_, stream_);
    return bytes;
}

} // namespace cg_test
