// tests/codec/make_golden.cc - makes the golden files of a format version: tests/golden/README says
// when. usage: make_golden DIRECTORY    which is named like one of golden.h's sets
#include "codec/klt.h"
#include "golden.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>

using namespace cg_test;

static void require(bool ok, const std::string &what)
{
    if (ok)
        return;
    fprintf(stderr, "make_golden: %s\n", what.c_str());
    exit(1);
}

static void write_file(const std::string &path, const Bytes &bytes)
{
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char *>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    require(file.good(), path);
}

// The same chunk with the symbols of each section in n_streams streams: a small one has only one by
// itself.
static Bytes with_streams(const cg_profile *profile, const Bytes &bytes, size_t n_streams)
{
    cg_chunk chunk;
    require(cg_chunk_open(bytes.data(), bytes.size(), &chunk) == CG_OK, "with_streams");
    const BlockOrder order(profile, chunk);
    const cg_rans_run *runs = order.of.runs;
    const size_t n_blocks = order.of.n_blocks, n_runs = order.of.n_runs;
    std::vector<cg_section> sections(chunk.header.n_sections);
    cg_chunk_sections(&chunk, sections.data());
    Bytes out(chunk.header.header_bytes);
    for (cg_section &s : sections) {
        Bytes section(bytes.begin() + static_cast<long>(s.offset),
                      bytes.begin() + static_cast<long>(s.offset + s.bytes));
        if (s.kind == CG_SECTION_SYMBOLS || s.kind == CG_SECTION_JOINT) {
            const cg_group &group =
                s.kind == CG_SECTION_JOINT ? *profile->joint : profile->groups[s.group];
            const cg_level_columns &columns = group.columns[chunk.header.level - 1][s.plane];
            const std::unique_ptr<void, MallocFree> memory(
                aligned_alloc(64, cg_symbols_bytes(&columns, n_blocks)));
            const cg_symbols symbols =
                cg_symbols_lay(&columns, nullptr, runs, n_runs, memory.get());
            size_t used;
            require(cg_rans_decode(profile->classes, symbols.strips, symbols.n_strips, runs, n_runs,
                                   cg_profile_align(profile), section.data(), section.size(),
                                   &used) == CG_OK,
                    "with_streams");
            section.resize(
                cg_rans_bound_bytes(symbols.strips, symbols.n_strips, n_blocks, n_streams));
            Bytes words(section.size());
            section.resize(cg_rans_encode(profile->classes, symbols.strips, symbols.n_strips, runs,
                                          n_runs, n_streams, cg_profile_align(profile),
                                          section.data(), section.size(), words.data()));
            require(!section.empty(), "with_streams");
        }
        s.bytes = static_cast<uint32_t>(section.size());
        out.insert(out.end(), section.begin(), section.end());
        out.resize(cg_padded(out.size(), cg_chunk_align(chunk.header.version)));
    }
    require(cg_chunk_finish(&chunk.header, sections.data(), out.data(), out.size()) == CG_OK,
            "with_streams");
    return out;
}

// As they are stored.
static Bytes golden_elements(const GoldenSet &set, cg_chunk_header header, uint64_t seed)
{
    if (!set.has_scales)
        return make_elements(header, seed);
    const uint8_t dtype = header.geometry.dtype;
    header.geometry.dtype = CG_DTYPE_FP32;
    const std::vector<float> values = to_floats(make_elements(header, seed), CG_DTYPE_FP32);
    const size_t n_plane = values.size() / 6;
    Bytes out;
    for (size_t i = 0; i < values.size(); i++)
        put_element(&out, dtype, values[i] / golden_scales[i / n_plane / 2][i / n_plane % 2]);
    return out;
}

int main(int argc, char **argv)
{
    require(argc == 2, "usage: make_golden DIRECTORY");
    const std::string directory = std::string(argv[1]) + "/";
    const auto set =
        std::find_if(std::begin(golden_sets), std::end(golden_sets), [&](const GoldenSet &s) {
            return std::string(argv[1]).substr(std::string(argv[1]).find_last_of('/') + 1) ==
                   s.directory;
        });
    require(set != std::end(golden_sets), "no such set");
    const Bytes profile_bytes = make_profile_bytes(set->spec);
    const Profile profile = golden_profile(*set, profile_bytes);
    require(profile != nullptr, "a profile");
    write_file(directory + "profile.cgp", profile_bytes);
    Bytes scales;
    for (size_t i = 0; set->has_scales && i < 6; i++)
        put(&scales, cg_f32_bits(golden_scales[i / 2][i % 2]), 4);
    if (set->has_scales)
        write_file(directory + "scales.f32", scales);
    for (const GoldenChunk &golden : set->chunks) {
        std::vector<uint32_t> tokens;
        const cg_chunk_header header = golden_header(*set, golden.dtype, golden.chunk, &tokens);
        Bytes elements = golden_elements(*set, header, 100 + golden.chunk), chunk, decoded;
        if (golden.level == 0 &&
            golden.chunk == 0) // every exponent and sign, NaNs and infinities too
            for (size_t i = 0; i < elements.size(); i += 7)
                elements[i] = static_cast<uint8_t>(i * 37);
        const int finest = golden.finest > 0 ? golden.finest : golden.level;
        require(encode_scaled(profile.get(), header, tokens, elements, golden_steps(golden.chunk),
                              static_cast<cg_level>(finest), &chunk,
                              golden.finest > 0 ? CG_L3 : CG_L0) == CG_OK,
                golden.name);
        cg_chunk_header made;
        require(cg_chunk_header_parse(chunk.data(), chunk.size(), &made) == CG_OK, golden.name);
        chunk.resize(made.level_bytes[golden.level]);
        if (golden.n_streams > 1)
            chunk = with_streams(profile.get(), chunk, golden.n_streams);
        require(decode(profile.get(), chunk, &decoded) == CG_OK, golden.name);
        require(golden.level > 0 || decoded == elements, golden.name);
        write_file(directory + golden.name + ".kv", chunk);
        write_file(directory + golden.name + ".raw", decoded);
    }
    return 0;
}
