// A publisher that is killed at any moment leaves a store in which everything that has a name is whole.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <random>

#include "iouring/store.h"
#include "tests/iouring/chunk_maker.h"
#include "tests/iouring/io_fixture.h"

namespace {

using cg_test::Chunk;
using cg_test::make_chain;

constexpr unsigned N_CHAINS = 40, N_CHUNKS = 4, N_KILLS = 30;

class CrashTest : public cg_test::IoFixture {};
CG_ON_BOTH_BACKENDS(CrashTest);

// In the child: publishes chains, and contexts of them that replace one another, until it is killed.
[[noreturn]] void publish_for_ever(const std::string &root, cg_io_backend backend, unsigned round) {
    cg_io_config config = {};
    config.backend = backend;
    cg_io *io;
    cg_store *store;
    if (cg_io_new(&config, &io) != CG_OK || cg_store_open(root.c_str(), "m", true, &store) != CG_OK) _exit(1);
    for (unsigned i = round;; i++) {
        const std::vector<Chunk> chain = make_chain(N_CHUNKS, CG_L0, nullptr, i % N_CHAINS, 20000);
        std::vector<cg_store_link> links;
        std::vector<uint32_t> tokens;
        for (const Chunk &chunk : chain) {
            if (cg_store_publish(store, io, chunk.bytes.data(), chunk.bytes.size(), nullptr) != CG_OK) _exit(2);
            links.push_back({chunk.header.key, 1});
            tokens.insert(tokens.end(), chunk.tokens.begin(), chunk.tokens.end());
            if (cg_store_context_publish(store, io, ("c" + std::to_string(i % 3)).c_str(), links.data(), links.size(),
                                         nullptr, tokens.data(), tokens.size()) != CG_OK)
                _exit(3);
        }
        if (i % 5 == 0) std::filesystem::remove_all(root + "/m/objects"); // so that there is more to do
    }
}

// Every chunk named by a context.json is there, under its index, and is that chunk.
void check_context(const cg_test::TempDir &dir, const std::string &json_path) {
    const std::string json = dir.read_text(json_path), folder = json_path.substr(0, json_path.rfind('/'));
    unsigned index = 0;
    for (size_t at = json.find("\"key\":\""); at != std::string::npos; at = json.find("\"key\":\"", at + 1), index++) {
        char leaf[32];
        snprintf(leaf, sizeof leaf, "/L0/%05u.kv", index);
        const std::vector<uint8_t> bytes = dir.read(folder + leaf);
        cg_chunk_header header;
        cg_key key;
        ASSERT_TRUE(cg_key_from_hex(json.c_str() + at + 7, &key)) << json;
        ASSERT_EQ(cg_chunk_header_parse(bytes.data(), bytes.size(), &header), CG_OK) << folder << leaf;
        EXPECT_TRUE(cg_key_equal(&key, &header.key)) << folder << leaf << " is not what context.json says";
    }
    EXPECT_GT(index, 0u);
    EXPECT_EQ(json.substr(json.size() - 3), "]}\n");
    EXPECT_GE(dir.read(folder + "/tokens").size(), index * 16 * 4);
}

TEST_P(CrashTest, LeavesOnlyWholeFilesWhenKilledAtAnyMoment) {
    std::mt19937 random(testing::UnitTest::GetInstance()->random_seed());
    cg_io_free(io, 0); // no thread of ours across fork
    io = nullptr;
    unsigned n_killed = 0;
    for (unsigned round = 0; round < N_KILLS; round++) {
        const pid_t child = fork();
        ASSERT_GE(child, 0);
        if (child == 0) publish_for_ever(dir.path, GetParam(), round);
        usleep(1000 + random() % 40000); // the moment is random; nothing waits for it
        kill(child, SIGKILL);
        int status;
        ASSERT_EQ(waitpid(child, &status, 0), child);
        ASSERT_TRUE(WIFSIGNALED(status)) << "the publisher failed by itself: " << WEXITSTATUS(status);
        n_killed++;
        for (const std::string &path : dir.files()) {
            cg_tree_name name;
            cg_tree_parse(path.c_str(), &name);
            if (name.kind == CG_TREE_OBJECT_CHUNK || name.kind == CG_TREE_CONTEXT_CHUNK) {
                const std::vector<uint8_t> bytes = dir.read(path);
                EXPECT_EQ(cg_chunk_verify(bytes.data(), bytes.size()), CG_OK) << path;
            } else if (name.kind == CG_TREE_CONTEXT_JSON) {
                check_context(dir, path);
            } else {
                const bool is_temporary = path.size() > 4 && path.substr(path.size() - 4) == ".tmp";
                EXPECT_TRUE(is_temporary || path.substr(path.rfind('/') + 1) == "tokens") << path;
            }
        }
        if (HasFailure()) break;
    }
    EXPECT_EQ(n_killed, N_KILLS);
    EXPECT_FALSE(dir.files().empty()) << "killed too early to test anything";

    // And the next publisher finds its way.
    cg_store *store;
    restart({});
    ASSERT_EQ(cg_store_open(dir.path.c_str(), "m", true, &store), CG_OK);
    const std::vector<Chunk> chain = make_chain(N_CHUNKS, CG_L0, nullptr, 0, 20000);
    for (const Chunk &chunk : chain) {
        EXPECT_EQ(cg_store_publish(store, io, chunk.bytes.data(), chunk.bytes.size(), nullptr), CG_OK);
        cg_store_entry entry;
        EXPECT_EQ(cg_store_lookup(store, io, &chunk.header.key, 1, nullptr, 1, 0, &entry, nullptr), CG_OK);
        EXPECT_EQ(entry.levels, 1);
    }
    cg_store_free(store);
}

} // namespace
