// A publisher that is killed at any moment leaves a store in which everything that has a name is
// whole.
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <random>

#include "iouring/store.h"
#include "tests/iouring/chunk_maker.h"
#include "tests/iouring/io_fixture.h"

namespace
{

using cg_test::Chunk;
using cg_test::make_chain;

constexpr unsigned N_KILLS = 30;

class CrashTest : public cg_test::IoFixture
{
};
CG_ON_BOTH_BACKENDS(CrashTest);

// Starts crash_publisher and waits until it is at work.
pid_t start_publisher(const std::string &root, cg_io_backend backend, unsigned round)
{
    int ready[2];
    pid_t child = -1;
    if (pipe2(ready, O_CLOEXEC) != 0)
        return -1;
    const std::string backend_text = std::to_string(backend), round_text = std::to_string(round);
    const char *arguments[] = {CG_CRASH_PUBLISHER, root.c_str(), backend_text.c_str(),
                               round_text.c_str(), nullptr};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ready[1], STDOUT_FILENO);
    if (posix_spawn(&child, CG_CRASH_PUBLISHER, &actions, nullptr, const_cast<char **>(arguments),
                    environ) != 0)
        child = -1;
    posix_spawn_file_actions_destroy(&actions);
    close(ready[1]);
    char byte;
    if (child >= 0 && read(ready[0], &byte, 1) != 1)
        ADD_FAILURE() << "the publisher does not start";
    close(ready[0]);
    return child;
}

// Every chunk named by a context.json is there, under its index, and is that chunk.
void check_context(const cg_test::TempDir &dir, const std::string &json_path)
{
    const std::string json = dir.read_text(json_path),
                      folder = json_path.substr(0, json_path.rfind('/'));
    unsigned index = 0;
    for (size_t at = json.find("\"key\":\""); at != std::string::npos;
         at = json.find("\"key\":\"", at + 1), index++) {
        char leaf[32];
        snprintf(leaf, sizeof leaf, "/L0/%05u.kv", index);
        const std::vector<uint8_t> bytes = dir.read(folder + leaf);
        cg_chunk_header header;
        cg_key key;
        ASSERT_TRUE(cg_key_from_hex(json.c_str() + at + 7, &key)) << json;
        ASSERT_EQ(cg_chunk_header_parse(bytes.data(), bytes.size(), &header), CG_OK)
            << folder << leaf;
        EXPECT_TRUE(cg_key_equal(&key, &header.key))
            << folder << leaf << " is not what context.json says";
    }
    EXPECT_GT(index, 0u);
    EXPECT_EQ(json.substr(json.size() - 3), "]}\n");
    EXPECT_GE(dir.read(folder + "/tokens").size(), index * 16 * 4);
}

TEST_P(CrashTest, LeavesOnlyWholeFilesWhenKilledAtAnyMoment)
{
    const unsigned seed = std::random_device()();
    SCOPED_TRACE(testing::Message() << "seed=" << seed);
    std::mt19937 random(seed);
    unsigned n_killed = 0;
    for (unsigned round = 0; round < N_KILLS || dir.files().empty(); round++) {
        // Before it runs: what is listed must stand still.
        const unsigned most_us = dir.files().empty() ? 40000 * (round + 1) : 40000;
        const pid_t child = start_publisher(dir.path, GetParam(), round);
        ASSERT_GE(child, 0);
        // The moment is random; nothing waits for it. Where a disk is so slow that nothing was
        // written until then, it comes later with each round.
        usleep(1000 + random() % most_us);
        kill(child, SIGKILL);
        int status;
        ASSERT_EQ(waitpid(child, &status, 0), child);
        ASSERT_TRUE(WIFSIGNALED(status))
            << "the publisher failed by itself: " << WEXITSTATUS(status);
        n_killed++;
        for (const std::string &path : dir.files()) {
            cg_tree_name name;
            cg_tree_parse(path.c_str(), &name);
            if (name.kind == CG_TREE_OBJECT_CHUNK || name.kind == CG_TREE_CONTEXT_CHUNK) {
                const std::vector<uint8_t> bytes = dir.read(path);
                cg_chunk_header header;
                ASSERT_EQ(cg_chunk_verify(bytes.data(), bytes.size()), CG_OK) << path;
                ASSERT_EQ(cg_chunk_header_parse(bytes.data(), bytes.size(), &header), CG_OK)
                    << path;
                EXPECT_EQ(cg_tree_check(&name, &header), CG_OK) << path;
            } else if (name.kind == CG_TREE_CONTEXT_JSON) {
                check_context(dir, path);
            } else {
                const bool is_temporary = path.size() > 4 && path.substr(path.size() - 4) == ".tmp";
                EXPECT_TRUE(is_temporary || path.substr(path.rfind('/') + 1) == "tokens") << path;
            }
        }
        if (HasFailure())
            break;
    }
    EXPECT_GE(n_killed, N_KILLS);

    // And the next publisher finds its way.
    cg_store *store;
    ASSERT_EQ(cg_store_open(dir.path.c_str(), "m", true, &store), CG_OK);
    const std::vector<Chunk> chain = make_chain(4, CG_L0, nullptr, 0, 20000);
    for (const Chunk &chunk : chain) {
        EXPECT_EQ(cg_store_publish(store, io, chunk.bytes.data(), chunk.bytes.size(), nullptr),
                  CG_OK);
        cg_store_entry entry;
        EXPECT_EQ(cg_store_lookup(store, io, &chunk.header.key, 1, nullptr, 1, 0, &entry, nullptr),
                  CG_OK);
        EXPECT_EQ(entry.levels, 1);
    }
    const cg_fingerprint profile = cg_test::fingerprint_of("p");
    const Chunk nested =
        cg_test::make_chunk(nullptr, chain[0].tokens, CG_L1, &profile, 20000, 0, CG_L3);
    cg_store_entry entry;
    EXPECT_EQ(cg_store_publish(store, io, nested.bytes.data(), nested.bytes.size(), nullptr),
              CG_OK);
    EXPECT_EQ(cg_store_lookup(store, io, &nested.header.key, 1, &profile, 0xe, 0, &entry, nullptr),
              CG_OK);
    for (unsigned level = CG_L1; level <= CG_L3; level++)
        EXPECT_EQ(entry.level_bytes[level], nested.header.level_bytes[level]) << level;
    cg_store_free(store);
}

} // namespace
