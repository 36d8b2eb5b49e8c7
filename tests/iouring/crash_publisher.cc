// crash_publisher ROOT BACKEND ROUND: publishes chains, nested chunks, and contexts that replace
// one another, until it is killed. A program of its own, so that the test that kills it need not
// fork with threads. Says "r" on stdout when it starts.
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "iouring/store.h"
#include "tests/iouring/chunk_maker.h"

int main(int argc, char **argv)
{
    constexpr unsigned N_CHAINS = 40, N_CHUNKS = 4;
    if (argc != 4)
        return 64;
    const std::string root = argv[1];
    cg_io_config config = {};
    config.backend = static_cast<cg_io_backend>(atoi(argv[2]));
    cg_io *io;
    cg_store *store;
    if (cg_io_new(&config, &io) != CG_OK || cg_store_open(root.c_str(), "m", true, &store) != CG_OK)
        return 1;
    if (write(STDOUT_FILENO, "r", 1) != 1)
        return 2;
    for (unsigned i = static_cast<unsigned>(atoi(argv[3]));; i++) {
        const std::vector<cg_test::Chunk> chain =
            cg_test::make_chain(N_CHUNKS, CG_L0, nullptr, i % N_CHAINS, /*payload_bytes=*/20000);
        const cg_fingerprint profile = cg_test::fingerprint_of("p");
        const cg_test::Chunk nested =
            cg_test::make_chunk(nullptr, chain[0].tokens, CG_L1, &profile, 20000, i, CG_L3);
        if (cg_store_publish(store, io, nested.bytes.data(), nested.bytes.size(), nullptr) != CG_OK)
            return 5;
        const std::string context = "c" + std::to_string(i % 3);
        std::vector<cg_store_link> links;
        std::vector<uint32_t> tokens;
        for (const cg_test::Chunk &chunk : chain) {
            if (cg_store_publish(store, io, chunk.bytes.data(), chunk.bytes.size(), nullptr) !=
                CG_OK)
                return 3;
            links.push_back({chunk.header.key, 1});
            tokens.insert(tokens.end(), chunk.tokens.begin(), chunk.tokens.end());
            if (cg_store_context_publish(store, io, context.c_str(), links.data(), links.size(),
                                         nullptr, tokens.data(), tokens.size()) != CG_OK)
                return 4;
        }
        if (i % 5 == 0)
            std::filesystem::remove_all(root + "/m/objects"); // so that there is more to do
    }
}
