// decode_with KERNELS PROFILE CHUNK OUT.raw: what exactness_test.py decodes with, one instruction
// set at a time. Exits 77 where this CPU has no such kernels.
#include "codec/codec.h"
#include "codec/kernels.h"

#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

int main(int n_arguments, char **arguments)
{
    if (n_arguments != 5) {
        fprintf(stderr, "usage: decode_with KERNELS PROFILE CHUNK OUT.raw\n");
        return 2;
    }
    const cg_kernels *kernels = cg_kernels_named(arguments[1]);
    if (kernels == nullptr)
        return 77;
    cg_kernels_use(kernels);
    std::ifstream in(arguments[3], std::ios::binary);
    const std::string chunk{std::istreambuf_iterator<char>(in), {}};
    const auto *bytes = reinterpret_cast<const uint8_t *>(chunk.data());
    cg_profile *profile = nullptr;
    cg_chunk_header header;
    std::vector<char> elements;
    cg_status status = cg_profile_open_file(arguments[2], &profile);
    if (status == CG_OK)
        status = cg_chunk_header_parse(bytes, chunk.size(), &header);
    if (status == CG_OK) {
        elements.resize(cg_geometry_elements(&header.geometry, header.n_tokens) *
                        cg_dtype_bytes(header.geometry.dtype));
        status = cg_decode_chunk(profile, bytes, chunk.size(), 1, elements.data(), elements.size());
    }
    cg_profile_free(profile);
    if (status != CG_OK) {
        fprintf(stderr, "decode_with: %s: %s\n", arguments[3], cg_strerror(status));
        return 1;
    }
    std::ofstream out(arguments[4], std::ios::binary);
    out.write(elements.data(), static_cast<std::streamsize>(elements.size()));
    return out.flush() ? 0 : 1;
}
