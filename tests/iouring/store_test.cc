#include "iouring/file.h"
#include "iouring/layout.h"
#include "iouring/store.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <thread>

#include "tests/codec/profile_maker.h"
#include "tests/iouring/chunk_maker.h"
#include "tests/iouring/store_fixture.h"

namespace
{

using cg_test::all_tokens;
using cg_test::Chunk;
using cg_test::fingerprint_of;
using cg_test::hex;
using cg_test::make_chain;
using cg_test::make_chunk;
using cg_test::object_dir;
using cg_test::object_path;
using cg_test::SECOND_NS;
using cg_test::token_bytes;

class StoreTest : public cg_test::StoreFixture
{
};
CG_ON_BOTH_BACKENDS(StoreTest);

TEST_P(StoreTest, OpensWhatIsThereAndMakesWhatIsNot)
{
    cg_store *other;
    EXPECT_EQ(cg_store_open(dir.path.c_str(), "absent", false, &other), CG_ERR_NOT_FOUND);
    EXPECT_EQ(other, nullptr);
    EXPECT_EQ(cg_store_open((dir.path + "/nowhere/further").c_str(), "m", true, &other),
              CG_ERR_NOT_FOUND);
    EXPECT_EQ(cg_store_open(dir.path.c_str(), "../m", true, &other), CG_ERR_INVALID_ARGUMENT);
    dir.write("file", std::string("x"));
    EXPECT_EQ(cg_store_open(dir.path.c_str(), "file", false, &other), CG_ERR_NOT_FOUND);
    ASSERT_EQ(cg_store_open((dir.path + "/fresh").c_str(), "m", true, &other), CG_OK);
    cg_store_free(other);
    cg_store_free(nullptr);
    struct stat s;
    ASSERT_EQ(fstatat(dir.fd, "fresh/m/objects", &s, 0), 0);
    EXPECT_EQ(s.st_mode & 07777, 0700u);
    ASSERT_EQ(cg_store_open((dir.path + "/fresh").c_str(), "m", false, &other), CG_OK);
    cg_store_free(other);
}

TEST_P(StoreTest, FindsWhatWasPublished)
{
    const cg_fingerprint profile = fingerprint_of("p"), other = fingerprint_of("q");
    const std::vector<Chunk> chain = make_chain(40, CG_L0);
    std::vector<Chunk> lossy;
    for (size_t i = 0; i < chain.size(); i++)
        lossy.push_back(make_chunk(i == 0 ? nullptr : &chain[i - 1], chain[i].tokens, CG_L2,
                                   &profile, 100 + i));
    for (size_t i = 0; i < chain.size(); i++) {
        ASSERT_EQ(i % 2 == 0 ? publish(chain[i]) : CG_OK, CG_OK);
        ASSERT_EQ(i % 3 == 0 ? publish(lossy[i]) : CG_OK, CG_OK);
    }
    const auto check = [&](const cg_fingerprint *fp, uint8_t mask, bool sees_lossy) {
        const std::vector<cg_store_entry> entries = look_up(chain, fp, mask);
        EXPECT_EQ(n_errors, 0u);
        for (size_t i = 0; i < chain.size(); i++) {
            const bool l0 = (mask & 1) && i % 2 == 0, l2 = sees_lossy && (mask & 4) && i % 3 == 0;
            EXPECT_EQ(entries[i].levels, (l0 ? 1 : 0) | (l2 ? 4 : 0)) << i;
            EXPECT_EQ(entries[i].level_bytes[0], l0 ? chain[i].bytes.size() : 0);
            EXPECT_EQ(entries[i].level_bytes[2], l2 ? lossy[i].bytes.size() : 0);
            EXPECT_EQ(entries[i].level_bytes[1] + entries[i].level_bytes[3], 0u);
        }
    };
    check(&profile, 0xf, true);
    check(&profile, 1, true);
    check(&profile, 4, true);
    check(&other, 0xf, false);
    check(nullptr, 0xf, false);
}

TEST_P(StoreTest, WritesAChunkWhereTheTreeSays)
{
    const Chunk chunk = make_chain(1, CG_L0)[0];
    bool existed = true;
    ASSERT_EQ(publish(chunk, &existed), CG_OK);
    EXPECT_FALSE(existed);
    EXPECT_TRUE(dir.read(object_path(chunk)) == chunk.bytes);
    EXPECT_EQ(dir.files().size(), 1u) << "a temporary file is left";
}

TEST_P(StoreTest, AUseIsTheTimeOfAccessAndNothingElse)
{
    const Chunk chunk = make_chain(1, CG_L0)[0];
    const std::string path = object_path(chunk);
    const time_t now = time(nullptr);
    publish_all({chunk});
    // The last: of a clock that was wrong. The one before: clocks of two hosts differ.
    for (const time_t age : {4 * 60, 6 * 60, 2 * 3600, -30 * 60, -48 * 3600}) {
        const bool is_set = age > CG_STORE_TOUCH_SECONDS || age < -3600;
        const timespec times[] = {{now - age, 5}, {now - 9000, 7}};
        struct stat s;
        ASSERT_EQ(utimensat(dir.fd, path.c_str(), times, 0), 0);
        EXPECT_EQ(cg_store_touch(store, &chunk.header.key, CG_L0, nullptr), CG_OK);
        ASSERT_EQ(fstatat(dir.fd, path.c_str(), &s, 0), 0);
        EXPECT_EQ(s.st_atim.tv_sec != now - age, is_set) << age;
        EXPECT_TRUE(!is_set || s.st_atim.tv_sec >= now - 60) << age;
        EXPECT_LT(s.st_atim.tv_sec, now + 3600) << age;
        EXPECT_EQ(s.st_mtim.tv_sec, times[1].tv_sec);
        EXPECT_EQ(s.st_mtim.tv_nsec, 7);
    }
    dir.write("m/other", std::string("x"));
    ASSERT_EQ(unlinkat(dir.fd, path.c_str(), 0), 0);
    EXPECT_EQ(cg_store_touch(store, &chunk.header.key, CG_L0, nullptr), CG_ERR_NOT_FOUND);
    ASSERT_EQ(symlinkat("../../../other", dir.fd, path.c_str()), 0);
    EXPECT_EQ(cg_store_touch(store, &chunk.header.key, CG_L0, nullptr), CG_ERR_INVALID_ARGUMENT);
}

TEST_P(StoreTest, WorksWithTheTokensThatOlderStoresHaveBesideChunks)
{
    const std::vector<Chunk> chain = make_chain(2, CG_L0);
    const std::string first = object_dir(chain[0]) + "tokens",
                      second = object_dir(chain[1]) + "tokens";
    dir.write(first, "ids");
    dir.write(second, "ids");
    publish_all(chain);
    for (const cg_store_entry &entry : look_up(chain, nullptr))
        EXPECT_EQ(entry.levels, 1);
    ASSERT_EQ(context("c", chain, 1), CG_OK);
    std::filesystem::remove(dir.path + "/" + object_path(chain[0]));
    ASSERT_EQ(cg_store_adopt(dir.fd, nullptr, "m/contexts/c/L0/00000.kv", &chain[0].header), CG_OK);
    EXPECT_TRUE(dir.read(object_path(chain[0])) == chain[0].bytes);
    EXPECT_EQ(dir.read_text(first) + dir.read_text(second), "idsids");
}

std::set<std::string> folders_of(const std::vector<Chunk> &chain)
{
    std::set<std::string> folders;
    for (const Chunk &chunk : chain)
        folders.insert(hex(chunk.header.key).substr(0, 2));
    return folders;
}

size_t n_found(const std::vector<cg_store_entry> &entries)
{
    return static_cast<size_t>(
        std::count_if(entries.begin(), entries.end(), [](const auto &e) { return e.levels != 0; }));
}

TEST_P(StoreTest, FindsChunksBelowOpenFoldersAndSeesNewFoldersWhenTheyAreOpenedAgain)
{
    const std::vector<Chunk> chain = make_chain(40, CG_L0);
    const std::string objects = dir.path + "/m/objects";
    const size_t n_folders = folders_of(chain).size();
    publish_all(chain);
    dir.write("m/objects/zz/file", std::string("x"));
    ASSERT_EQ(cg_store_open_folders(store, SECOND_NS), CG_OK);
    EXPECT_EQ(dir.n_open("m/objects"), n_folders);
    EXPECT_EQ(n_found(look_up(chain, nullptr)), chain.size());
    // Not by the way from the root:
    std::filesystem::rename(objects, dir.path + "/away");
    EXPECT_EQ(n_found(look_up(chain, nullptr)), chain.size());
    EXPECT_EQ(cg_store_open_folders(store, SECOND_NS), CG_ERR_NOT_FOUND);
    std::filesystem::remove_all(dir.path + "/away");
    publish_all(chain);
    EXPECT_EQ(n_found(look_up(chain, nullptr)), 0u);
    EXPECT_EQ(n_errors, 0u);
    ASSERT_EQ(cg_store_open_folders(store, SECOND_NS), CG_OK);
    EXPECT_EQ(n_found(look_up(chain, nullptr)), chain.size());
    EXPECT_EQ(dir.n_open("m/objects"), n_folders);
}

TEST_P(StoreTest, OpensFewFoldersWhereEachCostsARoundTripOrDescriptorsAreFew)
{
    const std::vector<Chunk> chain = make_chain(40, CG_L0);
    publish_all(chain);
    ASSERT_GT(folders_of(chain).size(), 16u);
    for (const size_t n : {8, 16}) { // what takes longer than no time is slow
        ASSERT_EQ(cg_store_open_folders(store, 0), CG_OK);
        EXPECT_EQ(dir.n_open("m/objects"), n);
    }
    EXPECT_EQ(n_found(look_up(chain, nullptr)), chain.size());
    rlimit limit, few;
    ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    few = limit;
    few.rlim_cur = 17 * 8;
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    EXPECT_EQ(cg_store_open_folders(store, SECOND_NS), CG_OK);
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    EXPECT_EQ(dir.n_open("m/objects"), 17u);
}

TEST_P(StoreTest, LetsTheFirstPublisherWin)
{
    const Chunk first =
        make_chunk(nullptr, cg_test::draw_tokens(16, 1), CG_L0, nullptr, 1000, /*seed=*/1);
    const Chunk second =
        make_chunk(nullptr, cg_test::draw_tokens(16, 1), CG_L0, nullptr, 1000, /*seed=*/2);
    ASSERT_TRUE(cg_key_equal(&first.header.key, &second.header.key));
    bool existed;
    ASSERT_EQ(publish(first), CG_OK);
    ASSERT_EQ(publish(second, &existed), CG_OK);
    EXPECT_TRUE(existed);
    EXPECT_TRUE(dir.read(object_path(first)) == first.bytes);
}

TEST_P(StoreTest, PublishesNothingThatIsNoChunk)
{
    const Chunk good = make_chain(1, CG_L0)[0];
    for (size_t at : {size_t{0}, size_t{20}, size_t{130}, size_t{200}, good.bytes.size() - 1}) {
        Chunk bad = good;
        bad.bytes[at] ^= 1;
        EXPECT_NE(publish(bad), CG_OK) << "flipped a bit of byte " << at;
    }
    Chunk cut = good;
    cut.bytes.pop_back();
    EXPECT_EQ(publish(cut), CG_ERR_TRUNCATED);
    EXPECT_TRUE(dir.files().empty());
}

TEST_P(StoreTest, PublishesFromManyThreadsAtOnce)
{
    constexpr unsigned N_THREADS = 4, N_CHUNKS = 12;
    const std::vector<Chunk> chain = make_chain(N_CHUNKS, CG_L0);
    std::atomic<unsigned> n_first{0};
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < N_THREADS; t++)
        threads.emplace_back([&] {
            cg_io_config config = {};
            config.backend = GetParam();
            cg_io *own;
            ASSERT_EQ(cg_io_new(&config, &own), CG_OK);
            for (const Chunk &chunk : chain) {
                bool existed = false;
                EXPECT_EQ(
                    cg_store_publish(store, own, chunk.bytes.data(), chunk.bytes.size(), &existed),
                    CG_OK);
                n_first += !existed;
            }
            cg_io_free(own, SECOND_NS);
        });
    for (std::thread &thread : threads)
        thread.join();
    EXPECT_EQ(n_first, N_CHUNKS);
    EXPECT_EQ(dir.files().size(), size_t{N_CHUNKS}) << "temporary files are left";
    for (const Chunk &chunk : chain)
        EXPECT_TRUE(dir.read(object_path(chunk)) == chunk.bytes);
}

TEST_P(StoreTest, LooksUpNeitherLeftoversNorStubs)
{
    const std::vector<Chunk> chain = make_chain(3, CG_L0);
    dir.write(object_dir(chain[0]) + ".L0.kv.0123456789abcdef.tmp", chain[0].bytes);
    dir.write(object_path(chain[1]), std::vector<uint8_t>(100));
    dir.write(object_dir(chain[2]) + "L0.kv/file", std::string("a folder in a chunk's place"));
    for (const cg_store_entry &entry : look_up(chain, nullptr))
        EXPECT_EQ(entry.levels, 0);
    EXPECT_EQ(n_errors, 1u) << "the folder";
}

TEST_P(StoreTest, StopsALookUpAtItsDeadline)
{
    const std::vector<Chunk> chain = make_chain(50, CG_L0);
    publish_all(chain);
    std::vector<cg_key> keys;
    for (const Chunk &chunk : chain)
        keys.push_back(chunk.header.key);
    std::vector<cg_store_entry> entries(keys.size());
    EXPECT_EQ(cg_store_lookup(store, io, keys.data(), keys.size(), nullptr, 1, /*deadline_ns=*/1,
                              entries.data(), nullptr),
              CG_ERR_TIMED_OUT);
    EXPECT_EQ(cg_io_n_under_way(io), 0u);
    for (const cg_store_entry &entry : look_up(chain, nullptr))
        EXPECT_EQ(entry.levels, 1) << "the next one is whole";
}

// How often a deadline was asked for, and what it was told.
struct Asked {
    int n = 0;
    uint64_t first_ns = 0, last_ns = 0;
    bool is_rising = true;
};

uint64_t note_answers(void *user, uint64_t answered_ns)
{
    Asked *asked = static_cast<Asked *>(user);
    if (asked->n++ == 0)
        asked->first_ns = answered_ns;
    asked->is_rising = asked->is_rising && answered_ns >= asked->last_ns;
    asked->last_ns = answered_ns;
    return UINT64_MAX;
}

TEST_P(StoreTest, TellsALookUpsPatienceOfEachAnswer)
{
    const cg_fingerprint profile = install_profile("x");
    const std::vector<Chunk> chain = make_chain(1, CG_L0);
    publish_all(chain);
    Asked asked;
    const cg_store_patience patience = {note_answers, &asked};
    cg_store_entry entry = {};
    const auto begun = std::chrono::steady_clock::now().time_since_epoch();
    // Names of other levels are asked for once those of the finest are answered.
    EXPECT_EQ(cg_store_lookup_open(store, io, &chain[0].header.key, 1, &profile, 0xf, &patience,
                                   nullptr, &entry, nullptr),
              CG_OK);
    EXPECT_EQ(entry.levels, 1);
    EXPECT_GE(std::chrono::nanoseconds(asked.first_ns), begun) << "no answer yet";
    EXPECT_GT(asked.last_ns, asked.first_ns);
    EXPECT_TRUE(asked.is_rising);
}

TEST_P(StoreTest, WantsAnIdleQueue)
{
    const Chunk chunk = make_chain(1, CG_L0)[0];
    cg_store_entry entry;
    ASSERT_EQ(cg_io_stat(io, dir.fd, "x", 1), CG_OK);
    EXPECT_EQ(publish(chunk), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(cg_store_lookup(store, io, &chunk.header.key, 1, nullptr, 1, 0, &entry, nullptr),
              CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(context("c", {chunk}, 1), CG_ERR_INVALID_ARGUMENT);
    wait_for_one();
}

TEST_P(StoreTest, MakesContexts)
{
    const cg_fingerprint profile = install_profile("x");
    const std::vector<Chunk> chain = make_chain(3, CG_L0);
    std::vector<Chunk> lossy;
    for (size_t i = 0; i < 3; i++)
        lossy.push_back(
            make_chunk(i == 0 ? nullptr : &chain[i - 1], chain[i].tokens, CG_L2, &profile));
    publish_all(chain);
    publish_all(lossy);
    dir.write("m/model.json", std::string("{\"some\":1}"));
    ASSERT_EQ(context("a \"context\"", chain, 1 | 4, &profile), CG_OK);

    const std::string at = "m/contexts/a \"context\"/";
    for (size_t i = 0; i < 3; i++) {
        EXPECT_TRUE(dir.read(at + "L0/0000" + std::to_string(i) + ".kv") == chain[i].bytes);
        EXPECT_TRUE(dir.read(at + "L2/0000" + std::to_string(i) + ".kv") == lossy[i].bytes);
    }
    EXPECT_TRUE(dir.read(at + "tokens") == token_bytes(all_tokens(chain)));
    EXPECT_EQ(dir.read_text(at + "model.json"), "{\"some\":1}");
    EXPECT_EQ(dir.read_text(at + "profile.cgp").substr(0, 4), "CGPF");
    std::string want = "{\"version\":1,\n\"model\":\"m\",\n\"model_fingerprint\":\"";
    cg_key key;
    memcpy(key.bytes, cg_test::model_fingerprint().bytes, sizeof key.bytes);
    want += hex(key) + "\",\n\"profile\":\"";
    memcpy(key.bytes, profile.bytes, sizeof key.bytes);
    want += hex(key) + "\",\n\"n_tokens\":48,\n\"chunks\":[\n";
    for (size_t i = 0; i < 3; i++)
        want += std::string(i == 0 ? "" : ",\n") + "{\"key\":\"" + hex(chain[i].header.key) +
                "\",\"first_position\":" + std::to_string(16 * i) +
                ",\"n_tokens\":16,\"levels\":[\"L0\",\"L2\"]}";
    EXPECT_EQ(dir.read_text(at + "context.json"), want + "\n]}\n");
    EXPECT_EQ(dir.files(at).size(), 10u) << "a temporary file is left";
}

TEST_P(StoreTest, EscapesNamesInJson)
{
    const std::string model = "a\"b\\c \xc3\xa4 \xff\xc3";
    cg_store *other;
    ASSERT_EQ(cg_store_open(dir.path.c_str(), model.c_str(), true, &other), CG_OK);
    const Chunk chunk = make_chain(1, CG_L0)[0];
    ASSERT_EQ(cg_store_publish(other, io, chunk.bytes.data(), chunk.bytes.size(), nullptr), CG_OK);
    const cg_store_link link = {chunk.header.key, 1};
    ASSERT_EQ(cg_store_context_publish(other, io, "c", &link, 1, nullptr, chunk.tokens.data(), 16),
              CG_OK);
    cg_store_free(other);
    const std::string json = dir.read_text(model + "/contexts/c/context.json");
    EXPECT_NE(json.find("\"model\":\"a\\\"b\\\\c \xc3\xa4 \\ufffd\\ufffd\","), std::string::npos)
        << json;
    EXPECT_NE(json.find("\"profile\":null"), std::string::npos) << json;
}

TEST_P(StoreTest, RepublishesAContextWithoutTouchingIt)
{
    const std::vector<Chunk> chain = make_chain(3, CG_L0);
    publish_all(chain);
    ASSERT_EQ(context("c", chain, 1), CG_OK);
    struct stat before, after;
    ASSERT_EQ(fstatat(dir.fd, "m/contexts/c/context.json", &before, 0), 0);
    ASSERT_EQ(context("c", chain, 1), CG_OK);
    ASSERT_EQ(fstatat(dir.fd, "m/contexts/c/context.json", &after, 0), 0);
    EXPECT_EQ(before.st_ino, after.st_ino);
    unlinkat(dir.fd, "m/contexts/c/L0/00001.kv", 0);
    ASSERT_EQ(context("c", chain, 1), CG_OK);
    EXPECT_TRUE(dir.read("m/contexts/c/L0/00001.kv") == chain[1].bytes)
        << "a lost link is made again";
    dir.write("m/contexts/c/L0/00002.kv.new", std::string("damage"));
    ASSERT_EQ(renameat(dir.fd, "m/contexts/c/L0/00002.kv.new", dir.fd, "m/contexts/c/L0/00002.kv"),
              0);
    ASSERT_EQ(context("c", chain, 1), CG_OK);
    EXPECT_TRUE(dir.read_text("m/contexts/c/L0/00002.kv") == "damage")
        << "what context.json says of a file's content is believed";
    unlinkat(dir.fd, "m/contexts/c/context.json", 0);
    ASSERT_EQ(context("c", chain, 1), CG_OK);
    EXPECT_TRUE(dir.read("m/contexts/c/L0/00002.kv") == chain[2].bytes)
        << "a bad one is replaced where no context.json speaks for it";
}

// What it says is believed as far as it can be, and no error for good.
TEST_P(StoreTest, RepublishesAContextWhoseJsonIsWrong)
{
    const std::vector<Chunk> chain = make_chain(3, CG_L0),
                             shorter(chain.begin(), chain.begin() + 2);
    publish_all(chain);
    ASSERT_EQ(context("c", chain, 1), CG_OK);
    const std::string json = dir.read_text("m/contexts/c/context.json");
    const auto with = [&](const std::string &from, const std::string &to) {
        std::string changed = json;
        changed.replace(changed.find(from), from.size(), to);
        return changed;
    };
    const std::string model = json.substr(json.find("fingerprint") + 14, 32);
    for (const std::string &wrong :
         {with("\"first_position\":16", "\"first_position\":17"),
          with("\"n_tokens\":16", "\"n_tokens\":4294967295"), with(model, std::string(32, '0')),
          with(hex(chain[1].header.key), std::string(32, '0')), json.substr(0, json.size() / 2),
          std::string("{}"), std::string(), std::string("{\0}", 3)}) {
        SCOPED_TRACE(wrong);
        ASSERT_EQ(context("c", shorter, 1), CG_OK);
        dir.write("m/contexts/c/context.json", wrong);
        EXPECT_EQ(context("c", chain, 1), CG_OK);
        EXPECT_EQ(dir.read_text("m/contexts/c/context.json"), json);
        EXPECT_EQ(dir.files("m/contexts/c/L0").size(), 3u);
        EXPECT_TRUE(dir.read("m/contexts/c/tokens") == token_bytes(all_tokens(chain)));
    }
}

TEST_P(StoreTest, ReplacesAContextByAnother)
{
    const std::vector<Chunk> first = make_chain(4, CG_L0, nullptr, 1),
                             second = make_chain(2, CG_L0, nullptr, 2);
    publish_all(first);
    publish_all(second);
    ASSERT_EQ(context("c", first, 1), CG_OK);
    ASSERT_EQ(context("c", second, 1), CG_OK);
    EXPECT_TRUE(dir.read("m/contexts/c/L0/00000.kv") == second[0].bytes);
    EXPECT_TRUE(dir.read("m/contexts/c/L0/00001.kv") == second[1].bytes);
    EXPECT_FALSE(dir.has("m/contexts/c/L0/00002.kv")) << "stale";
    EXPECT_TRUE(dir.read("m/contexts/c/tokens") == token_bytes(all_tokens(second)));
    const std::string json = dir.read_text("m/contexts/c/context.json");
    EXPECT_NE(json.find(hex(second[1].header.key)), std::string::npos);
    EXPECT_EQ(json.find(hex(first[1].header.key)), std::string::npos);
    for (const Chunk &chunk : first)
        EXPECT_TRUE(dir.read(object_path(chunk)) == chunk.bytes)
            << "objects are nobody's, and stay as they are";
}

TEST_P(StoreTest, RefusesContextsThatAreNoChainOfTheirTokens)
{
    const cg_fingerprint profile = install_profile("x"), other_profile = install_profile("y");
    const std::vector<Chunk> chain = make_chain(3, CG_L0), other = make_chain(3, CG_L0, nullptr, 2);
    const Chunk lossy = make_chunk(nullptr, chain[0].tokens, CG_L1, &profile);
    const Chunk elsewhere =
        make_chunk(&other[0], chain[1].tokens, CG_L0); // same tokens and position, other parent
    publish_all(chain);
    publish_all(other);
    ASSERT_EQ(publish(lossy), CG_OK);
    ASSERT_EQ(publish(elsewhere), CG_OK);
    const std::vector<uint32_t> tokens = all_tokens(chain);
    const auto link = [](const Chunk &chunk, uint8_t levels) {
        return cg_store_link{chunk.header.key, levels};
    };
    const struct {
        const char *what;
        const char *name;
        std::vector<cg_store_link> links;
        const cg_fingerprint *profile;
        size_t n_tokens;
        cg_status want;
    } cases[] = {
        {"nothing", "c", {}, nullptr, 0, CG_ERR_INVALID_ARGUMENT},
        {"bad name", "a/b", {link(chain[0], 1)}, nullptr, 16, CG_ERR_INVALID_ARGUMENT},
        {"hidden name", ".c", {link(chain[0], 1)}, nullptr, 16, CG_ERR_INVALID_ARGUMENT},
        {"no level", "c", {link(chain[0], 0)}, nullptr, 16, CG_ERR_INVALID_ARGUMENT},
        {"level 4", "c", {link(chain[0], 1 | 16)}, nullptr, 16, CG_ERR_INVALID_ARGUMENT},
        {"absent level", "c", {link(chain[0], 1 | 8)}, &profile, 16, CG_ERR_NOT_FOUND},
        {"lossy without a profile", "c", {link(lossy, 2)}, nullptr, 16, CG_ERR_INVALID_ARGUMENT},
        {"other profile", "c", {link(lossy, 2)}, &other_profile, 16, CG_ERR_NOT_FOUND},
        {"one left out",
         "c",
         {link(chain[0], 1), link(chain[2], 1)},
         nullptr,
         48,
         CG_ERR_FOREIGN_TOKENS},
        {"not from the start", "c", {link(chain[1], 1)}, nullptr, 48, CG_ERR_FOREIGN_TOKENS},
        {"of two chains",
         "c",
         {link(chain[0], 1), link(other[1], 1)},
         nullptr,
         32,
         CG_ERR_FOREIGN_TOKENS},
        {"other parent",
         "c",
         {link(chain[0], 1), link(elsewhere, 1)},
         nullptr,
         32,
         CG_ERR_FOREIGN_TOKENS},
        {"other tokens", "c", {link(other[0], 1)}, nullptr, 16, CG_ERR_FOREIGN_TOKENS},
        {"too few tokens", "c", {link(chain[0], 1)}, nullptr, 15, CG_ERR_FOREIGN_TOKENS},
        {"too many tokens", "c", {link(chain[0], 1)}, nullptr, 17, CG_ERR_FOREIGN_TOKENS},
        {"the first two", "c", {link(chain[0], 1 | 2), link(chain[1], 1)}, &profile, 32, CG_OK},
    };
    for (const auto &c : cases) {
        EXPECT_EQ(cg_store_context_publish(store, io, c.name, c.links.data(), c.links.size(),
                                           c.profile, tokens.data(), c.n_tokens),
                  c.want)
            << c.what;
        EXPECT_EQ(dir.has("m/contexts/c/context.json"), c.want == CG_OK) << c.what;
    }
}

TEST_P(StoreTest, WantsTheProfileOfALossyContext)
{
    const cg_fingerprint profile = fingerprint_of("nowhere installed");
    const std::vector<Chunk> chain = make_chain(2, CG_L2, &profile);
    publish_all(chain);
    EXPECT_EQ(context("c", chain, 4, &profile), CG_ERR_NOT_FOUND);
    EXPECT_FALSE(dir.has("m/contexts/c/context.json"));
}

// As where the store's host exports a mount that has ended there.
TEST_P(StoreTest, NothingIsWrittenWhereTheModelsFolderIsGone)
{
    const std::vector<Chunk> chain = make_chain(3, CG_L0), longer(chain.begin(), chain.end() - 1);
    const std::string model = dir.path + "/m", away = dir.path + "/away";
    const std::vector<uint8_t> bytes(100, 7);
    const Chunk &unsaved = chain[2];
    uint8_t replaced;
    publish_all(longer);
    ASSERT_EQ(context("c", {chain[0]}, 1), CG_OK);
    std::filesystem::rename(model, away);
    EXPECT_EQ(publish(unsaved), CG_ERR_NOT_FOUND);
    EXPECT_EQ(cg_store_replace(store, io, unsaved.bytes.data(), unsaved.bytes.size(), 1, &replaced),
              CG_ERR_NOT_FOUND);
    EXPECT_EQ(cg_store_publish_model(store, io, "{}", 2), CG_ERR_NOT_FOUND);
    EXPECT_EQ(context("c", longer, 1), CG_ERR_NOT_FOUND);
    // What publishing a context writes, where that ends in the middle of it.
    EXPECT_EQ(cg_file_write(dir.fd, "m/contexts/c/tokens", bytes.data(), bytes.size(), true),
              CG_ERR_NOT_FOUND);
    EXPECT_EQ(cg_file_install(dir.fd, ("away" + object_path(chain[0]).substr(1)).c_str(),
                              "m/contexts/c/L0/00000.kv", false, UINT64_MAX),
              CG_ERR_NOT_FOUND);
    EXPECT_FALSE(dir.has("m"));
    std::filesystem::rename(away, model);
    EXPECT_EQ(publish(unsaved), CG_OK);
    EXPECT_EQ(context("c", chain, 1), CG_OK);
}

// --- adoption ---

TEST_P(StoreTest, AdoptsAContextThatWasCopiedIn)
{
    const std::vector<Chunk> chain = make_chain(3, CG_L0);
    publish_all(chain);
    ASSERT_EQ(context("c", chain, 1), CG_OK);
    ASSERT_EQ(mkdirat(dir.fd, "n", 0700), 0);
    ASSERT_EQ(mkdirat(dir.fd, "n/contexts", 0700), 0);
    std::filesystem::copy(dir.path + "/m/contexts/c", dir.path + "/n/contexts/copy",
                          std::filesystem::copy_options::recursive);
    cg_store *other;
    ASSERT_EQ(cg_store_open(dir.path.c_str(), "n", false, &other), CG_OK);
    std::swap(store, other);
    for (const cg_store_entry &entry : look_up(chain, nullptr))
        EXPECT_EQ(entry.levels, 0);
    ASSERT_EQ(cg_store_adopt(dir.fd, nullptr, "n/contexts/copy/L0/00001.kv", &chain[1].header),
              CG_OK);
    EXPECT_EQ(look_up(chain, nullptr)[1].levels, 1);
    EXPECT_TRUE(dir.read(object_path(chain[1], "n")) == chain[1].bytes);
    ASSERT_EQ(cg_store_adopt(dir.fd, nullptr, "n/contexts/copy/L0/00001.kv", &chain[1].header),
              CG_OK)
        << "again";

    uint32_t n_adopted = 99;
    ASSERT_EQ(cg_store_adopt_new(dir.fd, nullptr, 0, &n_adopted), CG_OK);
    EXPECT_EQ(n_adopted, 2u);
    for (const cg_store_entry &entry : look_up(chain, nullptr))
        EXPECT_EQ(entry.levels, 1);
    ASSERT_EQ(cg_store_adopt_new(dir.fd, nullptr, 0, &n_adopted), CG_OK);
    EXPECT_EQ(n_adopted, 0u);
    std::swap(store, other);
    cg_store_free(other);
}

// The most that this process ever had in memory; begin "5": from now on.
uint64_t peak_kib(const char *begin = nullptr)
{
    uint64_t kib = 0;
    if (begin != nullptr)
        std::ofstream("/proc/self/clear_refs") << begin << std::flush;
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);)
        if (sscanf(line.c_str(), "VmHWM: %" SCNu64, &kib) == 1)
            break;
    return kib;
}

TEST_P(StoreTest, AdoptsALargeChunkInLittleMemory)
{
    const uint64_t CHUNK_BYTES = 64 << 20;
    dir.write("m/contexts/c/L0/00000.kv", make_chain(1, CG_L0, nullptr, 1, CHUNK_BYTES)[0].bytes);
    uint32_t n_adopted = 0;
    const uint64_t before_kib = peak_kib("5"); /* proc(5): the peak is what there is now */
    ASSERT_EQ(cg_store_adopt_new(dir.fd, nullptr, 0, &n_adopted), CG_OK);
    EXPECT_EQ(n_adopted, 1u);
    EXPECT_LT(peak_kib() - before_kib, CHUNK_BYTES / 4 / 1024);
}

TEST_P(StoreTest, TellsWhatAdoptingMakes)
{
    const Chunk chunk = make_chain(1, CG_L0)[0];
    const char *path = "n/contexts/c/L0/00000.kv", *json = "n/contexts/c/model.json";
    dir.write(path, chunk.bytes);
    dir.write(json, "{}");
    struct Told {
        std::vector<std::string> made;
        cg_status answer = CG_OK;
    } told;
    cg_store_hook hook = {};
    hook.created = [](void *user, const char *from, int dir_fd, const char *leaf, bool is_folder) {
        struct stat s = {};
        EXPECT_EQ(fstatat(dir_fd, leaf, &s, AT_SYMLINK_NOFOLLOW), 0) << leaf;
        EXPECT_EQ(S_ISDIR(s.st_mode), is_folder) << leaf;
        EXPECT_EQ(s.st_mode & 07777, is_folder ? 0700u : 0600u) << leaf;
        EXPECT_EQ(std::string(from).find("n/contexts/c/"), 0u);
        static_cast<Told *>(user)->made.push_back(leaf);
        return static_cast<Told *>(user)->answer;
    };
    hook.user = &told;
    char hex[CG_KEY_HEX_BYTES];
    cg_key_to_hex(&chunk.header.key, hex);
    const std::string key = hex;
    ASSERT_EQ(cg_store_adopt(dir.fd, &hook, path, &chunk.header), CG_OK);
    EXPECT_EQ(told.made, (std::vector<std::string>{"objects", key.substr(0, 2), key}))
        << "the chunk is a link";
    ASSERT_EQ(cg_store_adopt(dir.fd, &hook, path, &chunk.header), CG_OK) << "again";
    EXPECT_EQ(told.made.size(), 3u);
    ASSERT_EQ(cg_store_adopt_new(dir.fd, &hook, 0, nullptr), CG_OK);
    ASSERT_EQ(told.made.size(), 4u);
    EXPECT_EQ(told.made.back(), "model.json");

    std::filesystem::remove_all(dir.path + "/n/objects");
    told = {{}, CG_ERR_NO_SPACE};
    EXPECT_EQ(cg_store_adopt(dir.fd, &hook, path, &chunk.header), CG_ERR_NO_SPACE);
    EXPECT_EQ(told.made, std::vector<std::string>{"objects"}) << "its error ends it";
}

// The hook stands for somebody who renames another valid chunk over the one that was checked.
TEST_P(StoreTest, AdoptsWhatWasCheckedAndNotWhatTookItsPlace)
{
    const std::vector<Chunk> chain = make_chain(2, CG_L0);
    const char *path = "n/contexts/c/L0/00000.kv";
    dir.write(path, chain[0].bytes);
    dir.write("n/contexts/other", chain[1].bytes);
    struct User {
        int root_fd;
        const char *path;
    } user{dir.fd, path};
    cg_store_hook hook = {};
    hook.created = [](void *, const char *, int, const char *, bool) { return CG_OK; };
    hook.creating = [](void *told, const char *, int, bool is_folder) {
        const User &u = *static_cast<User *>(told);
        if (!is_folder) {
            EXPECT_EQ(renameat(u.root_fd, "n/contexts/other", u.root_fd, u.path), 0);
        }
    };
    hook.user = &user;
    EXPECT_EQ(cg_store_adopt(dir.fd, &hook, path, &chain[0].header), CG_ERR_FOREIGN_TOKENS);
    EXPECT_FALSE(dir.has(object_path(chain[0], "n")));
    EXPECT_EQ(cg_store_adopt(dir.fd, nullptr, path, &chain[1].header), CG_OK);
    EXPECT_TRUE(dir.read(object_path(chain[1], "n")) == chain[1].bytes);
}

TEST_P(StoreTest, AdoptsNothingThroughASymbolicLink)
{
    const Chunk chunk = make_chain(1, CG_L0)[0];
    dir.write("n/contexts/c/L0/00000.kv", chunk.bytes);
    ASSERT_EQ(mkdirat(dir.fd, "elsewhere", 0700), 0);
    ASSERT_EQ(symlinkat("../elsewhere", dir.fd, "n/objects"), 0);
    EXPECT_EQ(cg_store_adopt(dir.fd, nullptr, "n/contexts/c/L0/00000.kv", &chunk.header),
              CG_ERR_PERMISSION);
    EXPECT_TRUE(std::filesystem::is_empty(dir.path + "/elsewhere"));
}

TEST_P(StoreTest, AdoptsOnlyChunksInContexts)
{
    const Chunk chunk = make_chain(1, CG_L0)[0];
    for (const char *path :
         {"m/contexts/c/L0/00000.kv", "m/contexts/c/L0/0.kv", "m/contexts/c/L1/00000.kv"})
        dir.write(path, chunk.bytes);
    EXPECT_EQ(cg_store_adopt(dir.fd, nullptr, "m/contexts/c/L0/0.kv", &chunk.header),
              CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(cg_store_adopt(dir.fd, nullptr, "m/contexts/c/L1/00000.kv", &chunk.header),
              CG_ERR_INVALID_ARGUMENT)
        << "level";
    EXPECT_EQ(cg_store_adopt(dir.fd, nullptr, "m/contexts/x/L0/00000.kv", &chunk.header),
              CG_ERR_NOT_FOUND);
    EXPECT_FALSE(dir.has(object_path(chunk)));
    EXPECT_EQ(cg_store_adopt(dir.fd, nullptr, "m/contexts/c/L0/00000.kv", &chunk.header), CG_OK);
    EXPECT_TRUE(dir.read(object_path(chunk)) == chunk.bytes);
}

TEST_P(StoreTest, AdoptsNothingBadFromATree)
{
    const std::vector<Chunk> chain = make_chain(6, CG_L0);
    const auto place = [](unsigned i) {
        return "m/contexts/c/L0/0000" + std::to_string(i) + ".kv";
    };
    dir.write(place(0), chain[0].bytes);
    std::vector<uint8_t> bad = chain[1].bytes;
    bad.back() ^= 1; // its section's checksum
    dir.write(place(1), bad);
    dir.write(place(2), std::vector<uint8_t>(chain[2].bytes.begin(), chain[2].bytes.end() - 1));
    dir.write("m/contexts/c/L1/00003.kv", chain[3].bytes); // level
    dir.write("m/contexts/c/L0/.00004.kv.x.tmp", chain[4].bytes);
    dir.write("outside.kv", chain[5].bytes);
    ASSERT_EQ(symlinkat("../../../../outside.kv", dir.fd, place(5).c_str()), 0);
    dir.write("m/contexts/c/context.json", std::string("no JSON"));
    dir.write("m/contexts/c/profile.cgp", std::string("no profile"));
    dir.write("m/contexts/c/model.json", std::string("no JSON"));
    dir.write("m/contexts/file", std::string("x"));
    dir.write("m/contexts/d/L0", std::string("x"));
    dir.write(".hidden/contexts/c/L0/00000.kv", chain[5].bytes);
    ASSERT_EQ(mkdirat(dir.fd, "empty", 0700), 0);
    uint32_t n_adopted;
    ASSERT_EQ(cg_store_adopt_new(dir.fd, nullptr, 0, &n_adopted), CG_OK);
    EXPECT_EQ(n_adopted, 1u);
    const std::vector<cg_store_entry> entries = look_up(chain, nullptr);
    for (size_t i = 0; i < chain.size(); i++)
        EXPECT_EQ(entries[i].levels, i == 0 ? 1 : 0) << i;
    EXPECT_FALSE(dir.has("m/model.json"));
    EXPECT_FALSE(dir.has("m/profiles/default"));
}

TEST_P(StoreTest, HealsADamagedObject)
{
    const Chunk chunk = make_chain(1, CG_L0)[0];
    dir.write(object_path(chunk),
              std::vector<uint8_t>(chunk.bytes.begin(), chunk.bytes.begin() + 170));
    dir.write("m/contexts/c/L0/00000.kv", chunk.bytes);
    uint32_t n_adopted;
    ASSERT_EQ(cg_store_adopt_new(dir.fd, nullptr, 0, &n_adopted), CG_OK);
    EXPECT_EQ(n_adopted, 1u);
    EXPECT_TRUE(dir.read(object_path(chunk)) == chunk.bytes);
    for (const std::string &name : dir.files())
        EXPECT_EQ(name.find(".tmp"), std::string::npos) << name;
}

// The hook stands for somebody who replaces a folder while the daemon works below it.
TEST_P(StoreTest, AdoptsNothingThroughALinkThatTakesAFoldersPlaceMeanwhile)
{
    cg_test::TempDir outside;
    const cg_fingerprint profile = cg_test::fingerprint_of("p");
    const Chunk chunk = cg_test::make_chunk(nullptr, cg_test::draw_tokens(16, 1), CG_L1, &profile);
    const char *path = "m/contexts/c/L1/00000.kv";
    dir.write(path, chunk.bytes);
    struct Swap {
        std::string store, outside;
    } swap{dir.path, outside.path};
    cg_store_hook hook = {};
    hook.created = [](void *user, const char *, int, const char *leaf, bool is_folder) {
        const Swap &s = *static_cast<Swap *>(user);
        if (is_folder && strlen(leaf) == 32) { /* the folder of the key */
            std::filesystem::rename(s.store + "/m/objects", s.store + "/m/aside");
            std::filesystem::create_directory_symlink(s.outside, s.store + "/m/objects");
        }
        return CG_OK;
    };
    hook.user = &swap;
    EXPECT_EQ(cg_store_adopt(dir.fd, &hook, path, &chunk.header), CG_OK);
    EXPECT_TRUE(outside.files().empty());
    EXPECT_EQ(dir.files("m/aside").size(), 1u) << "it is where it was begun";
}

TEST_P(StoreTest, AdoptsNothingOfAModelThatIsALink)
{
    cg_test::TempDir outside;
    const cg_fingerprint profile = cg_test::fingerprint_of("p");
    const Chunk chunk = cg_test::make_chunk(nullptr, cg_test::draw_tokens(16, 1), CG_L1, &profile);
    outside.write("contexts/c/L1/00000.kv", chunk.bytes);
    outside.write("contexts/c/model.json", std::string("{}"));
    std::filesystem::create_directory_symlink(outside.path, dir.path + "/linked");
    uint32_t n_adopted = 9;
    EXPECT_EQ(cg_store_adopt_new(dir.fd, nullptr, 0, &n_adopted), CG_OK);
    EXPECT_EQ(n_adopted, 0u);
    EXPECT_EQ(cg_store_adopt(dir.fd, nullptr, "linked/contexts/c/L1/00000.kv", &chunk.header),
              CG_ERR_PERMISSION);
    EXPECT_EQ(cg_store_adopt_model(dir.fd, nullptr, "linked/contexts/c/model.json"),
              CG_ERR_PERMISSION);
    EXPECT_EQ(outside.files().size(), 2u);
}

TEST_P(StoreTest, AdoptsProfilesByTheirFingerprint)
{
    cg_test::ProfileSpec spec;
    spec.n_layers = 1;
    spec.group_layers = {1};
    const std::vector<uint8_t> first = cg_test::make_profile_bytes(spec);
    spec.seed = 2;
    const std::vector<uint8_t> second = cg_test::make_profile_bytes(spec);
    const auto hex_of = [](const std::vector<uint8_t> &bytes) {
        return hex(cg_key_of_bytes(bytes.data(), bytes.size()));
    };
    std::vector<uint8_t> damaged = second;
    damaged[damaged.size() / 2] ^= 1;
    dir.write("m/contexts/a/profile.cgp", first);
    dir.write("m/contexts/b/profile.cgp", second);
    dir.write("m/contexts/bad/profile.cgp", damaged);
    dir.write("m/contexts/cut/profile.cgp", std::vector<uint8_t>(first.begin(), first.end() - 1));
    dir.write("m/contexts/no/profile.cgp", std::string("no profile at all"));

    EXPECT_EQ(cg_store_adopt_profile(dir.fd, nullptr, "m/contexts/bad/profile.cgp", nullptr),
              CG_ERR_CORRUPT);
    EXPECT_EQ(cg_store_adopt_profile(dir.fd, nullptr, "m/contexts/cut/profile.cgp", nullptr),
              CG_ERR_TRUNCATED);
    EXPECT_EQ(cg_store_adopt_profile(dir.fd, nullptr, "m/contexts/no/profile.cgp", nullptr),
              CG_ERR_BAD_MAGIC);
    EXPECT_EQ(cg_store_adopt_profile(dir.fd, nullptr, "m/contexts/missing/profile.cgp", nullptr),
              CG_ERR_NOT_FOUND);
    EXPECT_EQ(cg_store_adopt_profile(dir.fd, nullptr, "m/contexts/a/tokens", nullptr),
              CG_ERR_INVALID_ARGUMENT);
    EXPECT_TRUE(dir.files("m/profiles").empty());

    ASSERT_EQ(cg_store_adopt_profile(dir.fd, nullptr, "m/contexts/a/profile.cgp", nullptr), CG_OK);
    EXPECT_TRUE(dir.read("m/profiles/" + hex_of(first) + ".cgp") == first);
    EXPECT_EQ(dir.read_text("m/profiles/default"), hex_of(first) + "\n");
    ASSERT_EQ(cg_store_adopt_profile(dir.fd, nullptr, "m/contexts/a/profile.cgp", nullptr), CG_OK)
        << "again";
    ASSERT_EQ(cg_store_adopt_new(dir.fd, nullptr, 0, nullptr), CG_OK);
    EXPECT_TRUE(dir.read("m/profiles/" + hex_of(second) + ".cgp") == second);
    EXPECT_EQ(dir.read_text("m/profiles/default"), hex_of(first) + "\n") << "the default stays";
    EXPECT_EQ(dir.files("m/profiles").size(), 3u);
}

// Each is a copy of its own when it comes, larger than the chunks of a short context.
TEST_P(StoreTest, ProfilesOfContextsAreLinksOfTheInstalledOne)
{
    cg_test::ProfileSpec spec;
    spec.n_layers = 1;
    spec.group_layers = {1};
    const std::vector<uint8_t> bytes = cg_test::make_profile_bytes(spec);
    const auto path_of = [](const std::string &context) {
        return "m/contexts/" + context + "/profile.cgp";
    };
    const auto look = [&](const std::string &path) {
        struct stat s = {};
        EXPECT_EQ(::stat((dir.path + "/" + path).c_str(), &s), 0) << path;
        return s;
    };
    const auto adopt = [&](const std::string &context, const cg_store_hook *hook = nullptr) {
        return cg_store_adopt_profile(dir.fd, hook, path_of(context).c_str(), nullptr);
    };
    dir.write(path_of("first"), bytes);
    ASSERT_EQ(adopt("first"), CG_OK);
    const struct stat first = look(path_of("first"));
    ASSERT_EQ(first.st_nlink, 2u);
    const auto write_at = [&](const std::string &context, time_t time_s) {
        dir.write(path_of(context), bytes);
        const struct timespec times[2] = {{0, UTIME_OMIT}, {time_s, first.st_mtim.tv_nsec}};
        EXPECT_EQ(utimensat(dir.fd, path_of(context).c_str(), times, 0), 0);
    };

    dir.write(path_of("cp"), bytes);
    const int reader = ::open((dir.path + "/" + path_of("cp")).c_str(), O_RDONLY);
    ASSERT_EQ(adopt("cp"), CG_OK);
    EXPECT_EQ(look(path_of("cp")).st_ino, first.st_ino);
    std::vector<uint8_t> read_back(bytes.size());
    EXPECT_EQ(pread(reader, read_back.data(), read_back.size(), 0), ssize_t(bytes.size()));
    EXPECT_TRUE(read_back == bytes) << "who has it open keeps what he has";
    ::close(reader);
    write_at("rsync", first.st_mtim.tv_sec);
    ASSERT_EQ(adopt("rsync"), CG_OK);
    EXPECT_EQ(look(path_of("rsync")).st_ino, first.st_ino);
    EXPECT_EQ(adopt("rsync"), CG_OK) << "again";

    write_at("older", first.st_mtim.tv_sec - 100);
    ASSERT_EQ(adopt("older"), CG_OK);
    EXPECT_EQ(look(path_of("older")).st_nlink, 1u) << "rsync would bring it again";
    dir.write(path_of("private"), bytes);
    ASSERT_EQ(fchmodat(dir.fd, path_of("private").c_str(), 0600, 0), 0);
    ASSERT_EQ(adopt("private"), CG_OK);
    EXPECT_EQ(look(path_of("private")).st_nlink, 1u) << "its mode is its own";

    // It is another file by the time that the first one was checked.
    dir.write(path_of("swapped"), bytes);
    write_at("other", first.st_mtim.tv_sec);
    struct Swap {
        const cg_test::TempDir *dir;
        std::string path;
        const std::vector<uint8_t> *bytes;
    } swap = {&dir, path_of("swapped"), &bytes};
    cg_store_hook hook = {};
    hook.created = [](void *, const char *, int, const char *, bool) { return CG_OK; };
    hook.check_profile = [](void *user, int, cg_fingerprint *fingerprint_out) {
        const auto *s = static_cast<const Swap *>(user);
        EXPECT_EQ(renameat(s->dir->fd, "m/contexts/other/profile.cgp", s->dir->fd, s->path.c_str()),
                  0);
        return cg_profile_check(s->bytes->data(), s->bytes->size(), fingerprint_out);
    };
    hook.user = &swap;
    const ino_t other = look(path_of("other")).st_ino;
    EXPECT_EQ(adopt("swapped", &hook), CG_OK);
    EXPECT_EQ(look(path_of("swapped")).st_ino, other);

    // Somebody has damaged the installed one.
    const cg_key key = cg_key_of_bytes(bytes.data(), bytes.size());
    std::vector<uint8_t> damaged = bytes;
    damaged.back() ^= 1;
    std::filesystem::remove(dir.path + "/m/profiles/" + hex(key) + ".cgp");
    dir.write("m/profiles/" + hex(key) + ".cgp", damaged);
    dir.write(path_of("good"), bytes);
    EXPECT_EQ(adopt("good"), CG_OK);
    EXPECT_TRUE(dir.read(path_of("good")) == bytes);
    EXPECT_EQ(look(path_of("good")).st_nlink, 1u);
    for (const std::string &path : dir.files("m/contexts"))
        EXPECT_EQ(path.find(".tmp"), std::string::npos) << path;
}

TEST_P(StoreTest, AdoptsModelDescriptionsOnlyWhereNoneIs)
{
    dir.write("m/contexts/a/model.json", std::string(" \n{\"a\":1}"));
    dir.write("m/contexts/b/model.json", std::string("{\"b\":1}"));
    dir.write("m/contexts/c/model.json", std::string(" "));
    EXPECT_EQ(cg_store_adopt_model(dir.fd, nullptr, "m/contexts/c/model.json"), CG_ERR_CORRUPT);
    EXPECT_EQ(cg_store_adopt_model(dir.fd, nullptr, "m/contexts/c/tokens"),
              CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(cg_store_adopt_model(dir.fd, nullptr, "m/contexts/d/model.json"), CG_ERR_NOT_FOUND);
    ASSERT_EQ(cg_store_adopt_model(dir.fd, nullptr, "m/contexts/a/model.json"), CG_OK);
    ASSERT_EQ(cg_store_adopt_model(dir.fd, nullptr, "m/contexts/b/model.json"), CG_OK);
    EXPECT_EQ(dir.read_text("m/model.json"), " \n{\"a\":1}");
    dir.write("m/contexts/a/model.json", std::string("{}")); // in place
    EXPECT_EQ(dir.read_text("m/model.json"), " \n{\"a\":1}") << "it is a copy";
}

TEST(StoreLayoutTest, OthersAreRefused)
{
    const cg_test::TempDir dir;
    const struct {
        const char *text;
        cg_status want;
    } cases[] = {{"1\n", CG_OK},
                 {"2\n", CG_ERR_UNSUPPORTED_VERSION},
                 {"99999999999999999999\n", CG_ERR_UNSUPPORTED_VERSION},
                 {"", CG_ERR_CORRUPT},
                 {"1", CG_ERR_CORRUPT},
                 {"1\n\n", CG_ERR_CORRUPT},
                 {"x\n", CG_ERR_CORRUPT}};
    for (const auto &c : cases) {
        dir.write(CG_LAYOUT_FILE, std::string(c.text));
        cg_store *opened = nullptr;
        EXPECT_EQ(cg_store_open(dir.path.c_str(), "m", true, &opened), c.want) << c.text;
        cg_store_free(opened);
    }
}

// A store as it was before there were numbers, with what it has.
TEST_P(StoreTest, AStoreWithoutANumberIsBroughtUpAndKeepsWhatItHas)
{
    const std::vector<Chunk> chain = make_chain(2, CG_L0);
    publish_all(chain);
    ASSERT_EQ(context("c", chain, 1), CG_OK);
    dir.write(object_dir(chain[0]) + "tokens", "ids"); // as stores of then have
    std::map<std::string, std::vector<uint8_t>> before;
    for (const std::string &path : dir.files())
        before[path] = dir.read(path);
    ASSERT_FALSE(dir.has(CG_LAYOUT_FILE));
    EXPECT_EQ(cg_layout_check(dir.fd), CG_OK) << "connectors need not wait for a daemon";
    ASSERT_EQ(cg_layout_upgrade(dir.fd), CG_OK);
    EXPECT_EQ(dir.read_text(CG_LAYOUT_FILE), std::to_string(CG_LAYOUT_VERSION) + "\n");
    const auto written = std::filesystem::last_write_time(dir.path + "/" + CG_LAYOUT_FILE);
    EXPECT_EQ(cg_layout_upgrade(dir.fd), CG_OK);
    EXPECT_EQ(std::filesystem::last_write_time(dir.path + "/" + CG_LAYOUT_FILE), written);
    std::filesystem::remove(dir.path + "/" + CG_LAYOUT_FILE);
    std::map<std::string, std::vector<uint8_t>> after;
    for (const std::string &path : dir.files())
        after[path] = dir.read(path);
    EXPECT_TRUE(after == before) << "its layout is ours: nothing else changes";
    for (const cg_store_entry &entry : look_up(chain, nullptr))
        EXPECT_EQ(entry.levels, 1);
}

// Layouts to come, made up.
class StoreUpgradeTest : public testing::Test
{
  protected:
    cg_status upgrade(uint32_t to)
    {
        static constexpr cg_layout_step STEPS[] = {nullptr, second, third};
        return cg_layout_upgrade_by(dir.fd, STEPS, to);
    }
    static cg_status second(int root_fd)
    {
        done += "2";
        // Another daemon that starts at the same time.
        const bool is_first = done == "2";
        return is_first && has_rival ? cg_layout_upgrade_by(root_fd, RIVAL, 3) : CG_OK;
    }
    static cg_status third(int)
    {
        done += "3";
        return done == "23" ? third_first : CG_OK;
    }
    static constexpr cg_layout_step RIVAL[] = {nullptr, second, third};
    static inline std::string done;
    static inline cg_status third_first;
    static inline bool has_rival;
    void SetUp() override
    {
        done = "";
        third_first = CG_OK;
        has_rival = false;
    }
    std::string number() const
    {
        return dir.read_text(CG_LAYOUT_FILE);
    }
    const cg_test::TempDir dir;
};

TEST_F(StoreUpgradeTest, TakesAStepAfterTheOtherAndEachOnce)
{
    ASSERT_EQ(upgrade(1), CG_OK);
    EXPECT_EQ(number(), "1\n");
    ASSERT_EQ(upgrade(3), CG_OK);
    EXPECT_EQ(number(), "3\n");
    EXPECT_EQ(done, "23");
    ASSERT_EQ(upgrade(3), CG_OK);
    EXPECT_EQ(done, "23");
}

TEST_F(StoreUpgradeTest, GoesOnWhereAStepFailed)
{
    third_first = CG_ERR_NO_SPACE;
    EXPECT_EQ(upgrade(3), CG_ERR_NO_SPACE);
    EXPECT_EQ(number(), "2\n");
    EXPECT_EQ(cg_layout_check(dir.fd), CG_ERR_UNSUPPORTED_VERSION) << "of this version";
    EXPECT_EQ(upgrade(3), CG_OK);
    EXPECT_EQ(number(), "3\n");
    EXPECT_EQ(done, "233");
}

TEST_F(StoreUpgradeTest, TwoDaemonsMayDoItAtOnce)
{
    has_rival = true;
    EXPECT_EQ(upgrade(3), CG_OK);
    EXPECT_EQ(number(), "3\n");
    EXPECT_EQ(done, "223") << "the one that is behind lowers no number, and repeats no later step";
}

TEST_F(StoreUpgradeTest, LeavesALaterStoreAndWhatIsNoNumberAlone)
{
    for (const std::string text : {"4\n", "0\n", "x\n", ""}) {
        dir.write(CG_LAYOUT_FILE, text);
        EXPECT_NE(upgrade(3), CG_OK) << text;
        EXPECT_EQ(number(), text);
    }
    EXPECT_EQ(done, "");
}

} // namespace
