// chunk_files - makes contexts of chunks that cg_chunk_verify() takes, and verifies chunk files.
//   chunk_files make DIRECTORY N_CHUNKS PAYLOAD_BYTES SEED    one context, levels L0 and L1
//   chunk_files nest DIRECTORY N_CHUNKS PAYLOAD_BYTES SEED    the same of nested ones, L1 to L3
//   chunk_files objects MODEL N_CHUNKS PAYLOAD_BYTES SEED     as objects of a store's model
//   chunk_files cut FILE LEVEL     the level's part of a nested chunk, on stdout
//   chunk_files verify FILE...     1, and a line for each that is no valid chunk
//   chunk_files key FILE           the chunk's key
//   chunk_files profile FILE       its profile's fingerprint
#include "iouring/tree.h"
#include "tests/iouring/chunk_maker.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace
{

std::vector<uint8_t> read_file(const std::string &path)
{
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

void write_file(const std::string &path, const std::vector<uint8_t> &bytes)
{
    std::ofstream out(path, std::ios::binary);
    out.write(reinterpret_cast<const char *>(bytes.data()),
              static_cast<std::streamsize>(bytes.size()));
    if (!out.flush())
        throw std::runtime_error("cannot write " + path);
}

int make(const std::string &directory, size_t n_chunks, size_t payload_bytes, uint32_t seed)
{
    const cg_fingerprint profile = cg_test::fingerprint_of("a profile");
    for (cg_level level : {CG_L0, CG_L1}) {
        const std::string folder = directory + "/L" + std::to_string(level);
        std::filesystem::create_directories(folder);
        const auto chain = cg_test::make_chain(n_chunks, level, &profile, seed, payload_bytes);
        for (size_t i = 0; i < chain.size(); i++) {
            char name[32];
            snprintf(name, sizeof name, "/%05zu.kv", i);
            write_file(folder + name, chain[i].bytes);
        }
    }
    write_file(directory + "/context.json", {'{', '}', '\n'});
    write_file(directory + "/tokens", std::vector<uint8_t>(4 * 16 * n_chunks, 7));
    return 0;
}

// As it lies in a store: PAYLOAD_BYTES more for each finer level.
int nest(const std::string &directory, size_t n_chunks, size_t payload_bytes, uint32_t seed)
{
    const cg_fingerprint profile = cg_test::fingerprint_of("a profile");
    std::vector<cg_test::Chunk> chain;
    for (int level = 1; level <= 3; level++)
        std::filesystem::create_directories(directory + "/L" + std::to_string(level));
    for (size_t i = 0; i < n_chunks; i++) {
        const uint32_t chunk_seed = seed * 1000 + static_cast<uint32_t>(i);
        chain.push_back(cg_test::make_chunk(i == 0 ? nullptr : &chain.back(),
                                            cg_test::draw_tokens(16, chunk_seed), CG_L1, &profile,
                                            payload_bytes, chunk_seed, CG_L3));
        char name[32];
        snprintf(name, sizeof name, "/%05zu.kv", i);
        write_file(directory + "/L1" + name, chain[i].bytes);
        for (const char *folder : {"/L2", "/L3"})
            std::filesystem::create_hard_link(directory + "/L1" + name, directory + folder + name);
    }
    write_file(directory + "/context.json", {'{', '}', '\n'});
    return 0;
}

// One prompt, without what a store adds to make it survive a power cut.
int objects(const std::string &model, size_t n_chunks, size_t payload_bytes, uint32_t seed)
{
    const cg_fingerprint profile = cg_test::fingerprint_of("a profile");
    cg_test::Chunk chunk;
    for (size_t i = 0; i < n_chunks; i++) {
        const uint32_t chunk_seed = seed * 1000 + static_cast<uint32_t>(i);
        const cg_test::Chunk parent = chunk;
        chunk =
            cg_test::make_chunk(i == 0 ? nullptr : &parent, cg_test::draw_tokens(16, chunk_seed),
                                CG_L1, &profile, payload_bytes, chunk_seed, CG_L3);
        std::string first;
        for (cg_level level : {CG_L1, CG_L2, CG_L3}) {
            char path[CG_TREE_PATH_BYTES];
            if (cg_tree_object_path("m", &chunk.header.key, level, &profile, path, sizeof path) !=
                CG_OK)
                return 1;
            const std::string file = model + (path + 1); // behind "m"
            if (level == CG_L1) {
                first = file;
                std::filesystem::create_directories(file.substr(0, file.rfind('/')));
                write_file(file, chunk.bytes);
            } else {
                std::filesystem::create_hard_link(first, file);
            }
        }
    }
    return 0;
}

int cut(const std::string &file, unsigned long level)
{
    const std::vector<uint8_t> bytes = read_file(file);
    cg_chunk_header header;
    if (cg_chunk_header_parse(bytes.data(), bytes.size(), &header) != CG_OK ||
        level >= CG_N_LEVELS || header.level_bytes[level] == 0)
        return 1;
    return fwrite(bytes.data(), 1, header.level_bytes[level], stdout) == header.level_bytes[level]
               ? 0
               : 1;
}

int verify(int n_files, char **files)
{
    int n_bad = 0;
    for (int i = 0; i < n_files; i++) {
        const std::vector<uint8_t> bytes = read_file(files[i]);
        const cg_status status = cg_chunk_verify(bytes.data(), bytes.size());
        if (status == CG_OK)
            continue;
        printf("%s: %s\n", files[i],
               std::filesystem::exists(files[i]) ? cg_strerror(status) : "it is not there");
        n_bad++;
    }
    return n_bad == 0 ? 0 : 1;
}

// Of the chunk's key, or of its profile.
int print_hash(const std::string &file, bool of_profile)
{
    const std::vector<uint8_t> bytes = read_file(file);
    cg_chunk_header header;
    char hex[CG_KEY_HEX_BYTES];
    if (cg_chunk_header_parse(bytes.data(), bytes.size(), &header) != CG_OK)
        return 1;
    if (of_profile)
        memcpy(header.key.bytes, header.profile.bytes, sizeof header.key.bytes);
    cg_key_to_hex(&header.key, hex);
    puts(hex);
    return 0;
}

} // namespace

int main(int argc, char **argv)
{
    const std::string what = argc > 1 ? argv[1] : "";
    if (what == "make" && argc == 6)
        return make(argv[2], strtoul(argv[3], nullptr, 10), strtoul(argv[4], nullptr, 10),
                    static_cast<uint32_t>(strtoul(argv[5], nullptr, 10)));
    if (what == "nest" && argc == 6)
        return nest(argv[2], strtoul(argv[3], nullptr, 10), strtoul(argv[4], nullptr, 10),
                    static_cast<uint32_t>(strtoul(argv[5], nullptr, 10)));
    if (what == "objects" && argc == 6)
        return objects(argv[2], strtoul(argv[3], nullptr, 10), strtoul(argv[4], nullptr, 10),
                       static_cast<uint32_t>(strtoul(argv[5], nullptr, 10)));
    if (what == "cut" && argc == 4)
        return cut(argv[2], strtoul(argv[3], nullptr, 10));
    if (what == "verify" && argc > 2)
        return verify(argc - 2, argv + 2);
    if ((what == "key" || what == "profile") && argc == 3)
        return print_hash(argv[2], what == "profile");
    fprintf(stderr,
            "usage: chunk_files make|nest|objects DIRECTORY N_CHUNKS PAYLOAD_BYTES SEED | cut FILE "
            "LEVEL | verify FILE... | key FILE | profile FILE\n");
    return 2;
}
