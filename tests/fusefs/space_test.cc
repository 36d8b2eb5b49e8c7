// A store with a quota: what is given up first, and that nothing is damaged on the way.
#include "fusefs/contexts.h"
#include "fusefs/drop.h"
#include "fusefs/evict.h"
#include "fusefs/fsck.h"
#include "fusefs/gc.h"
#include "fusefs/lease.h"
#include "fusefs/marks.h"
#include "fusefs/scrub.h"
#include "fusefs/space.h"
#include "fusefs/staging.h"
#include "fusefs/stamp.h"
#include "fusefs/survey.h"
#include "iouring/store.h"
#include "tests/fusefs/call_hooks.h"
#include "tests/fusefs/fs_fixture.h"

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/xattr.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <tuple>

namespace
{

constexpr int64_t NOW_S = 1'800'000'000, DAY_S = 24 * 3600;

// A survey that is made up: files of chunks in one model.
class Store
{
  public:
    // A nested file L1 to L3 of a chunk behind parent (0: none), used so many days ago.
    size_t add(uint32_t key, uint32_t parent, uint32_t position, int64_t days,
               uint32_t n_elsewhere = 0)
    {
        cg_object_file file = {};
        memcpy(file.key.bytes, &key, sizeof key);
        memcpy(file.parent.bytes, &parent, sizeof parent);
        file.first_position = position;
        file.n_tokens = 256;
        file.levels = 2 | 4 | 8;
        file.finest = CG_L1;
        file.n_names_elsewhere = n_elsewhere;
        file.ino = files.size() + 1;
        file.used_bytes = 1'000'000;
        file.level_bytes[CG_L1] = 1'000'000;
        file.level_bytes[CG_L2] = 400'000;
        file.level_bytes[CG_L3] = 100'000;
        file.used_at_s = NOW_S - days * DAY_S;
        files.push_back(file);
        return files.size() - 1;
    }
    std::vector<cg_eviction> choose(uint64_t wanted_bytes)
    {
        policy.wanted_bytes = wanted_bytes;
        cg_survey survey = {};
        survey.files = files.data();
        survey.n_files = files.size();
        cg_eviction *steps;
        size_t n_steps;
        EXPECT_EQ(cg_evict_choose(&survey, &policy, &steps, &n_steps), CG_OK);
        std::vector<cg_eviction> result(steps, steps + n_steps);
        free(steps);
        return result;
    }
    std::vector<cg_object_file> files;
    cg_evict_policy policy = {NOW_S, 0, CG_EVICT_ALL_MODELS, {}, false};
};

TEST(EvictTest, TakesFineLevelsOfColdChunksFirst)
{
    Store store;
    const size_t hot = store.add(1, 0, 0, 0), cold = store.add(2, 0, 0, 30);
    struct {
        uint64_t wanted_bytes;
        unsigned cold_left, hot_left;
    } cases[] = {{0, CG_L1, CG_L1},
                 {600'000, CG_L2, CG_L1},
                 {600'001, CG_L3, CG_L1},
                 {1'000'000, CG_N_LEVELS, CG_L1},
                 {1'600'000, CG_N_LEVELS, CG_L2},
                 {UINT64_MAX, CG_N_LEVELS, CG_N_LEVELS}};
    for (const auto &[wanted_bytes, cold_left, hot_left] : cases) {
        std::map<size_t, unsigned> left = {{cold, CG_L1}, {hot, CG_L1}};
        uint64_t freed = 0;
        for (const cg_eviction &step : store.choose(wanted_bytes)) {
            left[step.file] = step.finest_left;
            freed += step.freed_bytes;
        }
        EXPECT_EQ(left[cold], cold_left) << wanted_bytes;
        EXPECT_EQ(left[hot], hot_left) << wanted_bytes;
        EXPECT_GE(freed, std::min<uint64_t>(wanted_bytes, 2'000'000));
    }
}

TEST(EvictTest, LooksAtNoFileWhenNothingIsWanted)
{
    cg_survey survey = {};
    survey.n_files = SIZE_MAX / 1024; /* to look at one would crash, to take memory for all fail */
    const Store store;
    cg_eviction *steps;
    size_t n_steps = 1;
    EXPECT_EQ(cg_evict_choose(&survey, &store.policy, &steps, &n_steps), CG_OK);
    EXPECT_EQ(n_steps, 0u);
    free(steps);
}

TEST(EvictTest, ACutThatFreesNoBlockIsNoStep)
{
    struct {
        uint64_t l1, l2, l3, used, freed_first;
        unsigned left_first;
    } cases[] = {
        {4'000, 1'500, 400, 4'096, 4'096, CG_N_LEVELS},           // one block
        {6'000, 5'000, 3'000, 8'192, 4'096, CG_L3},               // two, the second up to L2
        {6'000, 4'096, 3'000, 8'192, 4'096, CG_L2},               // L2 just fits into the first
        {4'097, 4'000, 100, 8'192, 4'096, CG_L2},                 // by blocks, not in proportion
        {8'000, 8'000, 8'000, 8'192, 8'192, CG_N_LEVELS},         // where levels end is not known
        {1'000'000, 400'000, 100'000, 500'000, 300'000, CG_L2},   // compressed
        {1'000'000, 1'000'000, 100'000, 500'000, 450'000, CG_L3}, // the same, L2 as long as L1
    };
    for (const auto &[l1, l2, l3, used, freed_first, left_first] : cases) {
        Store store;
        cg_object_file &file = store.files[store.add(1, 0, 0, 1)];
        file.level_bytes[CG_L1] = l1;
        file.level_bytes[CG_L2] = l2;
        file.level_bytes[CG_L3] = l3;
        file.used_bytes = used;
        const std::vector<cg_eviction> first = store.choose(1), all = store.choose(UINT64_MAX);
        ASSERT_EQ(first.size(), 1u) << l1;
        EXPECT_EQ(first[0].finest_left, left_first) << l1;
        EXPECT_EQ(first[0].freed_bytes, freed_first) << l1;
        ASSERT_EQ(all.size(), 1u) << l1;
        EXPECT_EQ(all[0].finest_left, CG_N_LEVELS) << l1;
        EXPECT_EQ(all[0].freed_bytes, used) << l1;
    }
}

TEST(EvictTest, KeepsWhatContextsNameAndWhatLiesBeforeIt)
{
    Store store;
    store.add(1, 0, 0, 100);
    store.add(2, 1, 256, 100, 1);
    store.add(3, 2, 512, 0);
    std::set<size_t> gone;
    for (const cg_eviction &step : store.choose(UINT64_MAX)) {
        EXPECT_NE(step.file, 1u);
        if (step.finest_left == CG_N_LEVELS)
            gone.insert(step.file);
    }
    EXPECT_EQ(gone, std::set<size_t>{2}) << "the first chunk leads to the kept one";
}

TEST(EvictTest, WhatLeadsToAUsedChunkIsUsed)
{
    Store store;
    store.add(1, 0, 0, 100);
    store.add(2, 1, 256, 0);
    const size_t other = store.add(3, 0, 0, 20);
    EXPECT_EQ(store.choose(1)[0].file, other);
}

TEST(EvictTest, WhatWasUsedSinceItWasWrittenIsTwiceAsHot)
{
    Store store;
    const size_t head = store.add(1, 0, 0, 15), tail = store.add(2, 1, 256, 15),
                 other = store.add(3, 0, 0, 10);
    for (cg_object_file &file : store.files) // read when they were closed, to check them
        file.modified_ns = (file.used_at_s - 5) * 1'000'000'000;
    EXPECT_EQ(store.choose(1)[0].file, head) << "all were only written";
    store.files[tail].modified_ns -= 60'000'000'000; // the head was used, too: it leads here
    EXPECT_EQ(store.choose(1)[0].file, other);
    store.files[head].used_at_s = store.files[tail].used_at_s = NOW_S - 25 * DAY_S;
    EXPECT_EQ(store.choose(1)[0].file, head) << "twice, not for ever";
}

TEST(EvictTest, AUseThatIsToComeIsNone)
{
    Store store;
    const size_t to_come = store.add(1, 0, 0, -365 * 70), other = store.add(2, 0, 0, 10);
    store.files[to_come].changed_ns = (NOW_S - 20 * DAY_S) * 1'000'000'000; // of that `touch`
    EXPECT_EQ(store.choose(1)[0].file, to_come);
    store.files[to_come].used_at_s = NOW_S + 60; // clocks differ a little
    EXPECT_EQ(store.choose(1)[0].file, other);
    store.files[to_come].used_at_s = NOW_S + 20 * DAY_S; // and the store's was set back
    store.files[to_come].changed_ns = store.files[to_come].used_at_s * 1'000'000'000;
    EXPECT_EQ(store.choose(1)[0].file, other);
}

TEST(EvictTest, TakesACopyOfALevelThatIsThereTwiceFirst)
{
    Store store;
    store.add(1, 0, 0, 100);
    const size_t copy = store.add(1, 0, 0, 0);
    store.files[copy].levels = 8;
    store.files[copy].finest = CG_L3;
    const std::vector<cg_eviction> steps = store.choose(1);
    ASSERT_EQ(steps.size(), 1u);
    EXPECT_EQ(steps[0].file, copy);
    EXPECT_EQ(steps[0].finest_left, CG_N_LEVELS);
}

// Files of one chunk, by the levels that they have names for; each holds the coarser ones, too.
struct Layout {
    const char *what;
    std::vector<std::set<unsigned>> files;
    std::vector<std::pair<size_t, unsigned>> order; // files and what is left of them
};

const Layout LAYOUTS[] = {
    {"L0 beside a nested file",
     {{CG_L0}, {CG_L1, CG_L2, CG_L3}},
     {{0, CG_N_LEVELS}, {1, CG_L2}, {1, CG_L3}, {1, CG_N_LEVELS}}},
    {"a file each",
     {{CG_L3}, {CG_L2}, {CG_L1}},
     {{2, CG_N_LEVELS}, {1, CG_N_LEVELS}, {0, CG_N_LEVELS}}},
    {"L1 computed again beside what was cut",
     {{CG_L1}, {CG_L2, CG_L3}},
     {{0, CG_N_LEVELS}, {1, CG_L3}, {1, CG_N_LEVELS}}},
};

// Adds the files of a chunk that was used so many days ago.
void add_layout(Store *store, uint32_t key, const Layout &layout, int64_t days)
{
    for (const std::set<unsigned> &levels : layout.files) {
        cg_object_file &file = store->files[store->add(key, 0, 0, days)];
        file.finest = static_cast<uint8_t>(*levels.begin());
        file.levels = 0;
        for (unsigned level : levels)
            file.levels |= static_cast<uint8_t>(1u << level);
        file.level_bytes[CG_L0] = file.finest == CG_L0 ? 8'000'000 : 0;
        file.used_bytes = file.level_bytes[file.finest];
    }
}

TEST(EvictTest, AFineFileDoesNotMakeCoarserOnesFreeToTake)
{
    for (const Layout &layout : LAYOUTS) {
        Store store;
        for (uint32_t key = 1; key <= 4; key++)
            add_layout(&store, key, layout, 0);
        const size_t cold = store.add(5, 0, 0, 30);
        const std::vector<cg_eviction> steps = store.choose(1);
        ASSERT_EQ(steps.size(), 1u) << layout.what;
        EXPECT_EQ(steps[0].file, cold) << layout.what;
    }
}

TEST(EvictTest, TakesFineFilesOfAChunkFirst)
{
    for (const Layout &layout : LAYOUTS) {
        Store store;
        add_layout(&store, 1, layout, 0);
        uint64_t wanted_bytes = 0;
        for (size_t n = 1; n <= layout.order.size(); n++) { // a step more each time
            std::map<size_t, unsigned> left, expected;
            for (size_t i = 0; i < n; i++)
                expected[layout.order[i].first] = layout.order[i].second;
            const std::vector<cg_eviction> steps = store.choose(wanted_bytes + 1);
            wanted_bytes = 0;
            for (const cg_eviction &step : steps) {
                left[step.file] = step.finest_left;
                wanted_bytes += step.freed_bytes;
            }
            EXPECT_EQ(left, expected) << layout.what << ", step " << n;
        }
    }
}

// After a new profile was made, say.
TEST(EvictTest, WhatIsThereAtTwoProfilesIsAsOldAsItsOwnUse)
{
    Store store;
    const size_t old = store.add(1, 0, 0, 20), now = store.add(1, 0, 0, 1);
    store.add(2, 1, 256, 1); // goes on from it
    store.files[old].profile.bytes[0] = 1;
    const size_t cold = store.add(3, 0, 0, 30);
    EXPECT_EQ(store.choose(1)[0].file, cold);
    store.files[cold].used_at_s = NOW_S - 10 * DAY_S;
    EXPECT_EQ(store.choose(1)[0].file, old) << "nobody has used it since";
    store.policy.keep_s[CG_L2] = 15 * DAY_S;
    const std::vector<cg_eviction> due = store.choose(0);
    ASSERT_EQ(due.size(), 1u);
    EXPECT_EQ(due[0].file, old);
    EXPECT_EQ(due[0].finest_left, unsigned{CG_L2});
    store.policy.keep_s[CG_L2] = 0;
    store.files[old].used_at_s = store.files[now].used_at_s;
    EXPECT_EQ(store.choose(1)[0].file, cold) << "both are in use";
}

TEST(EvictTest, LevelsFinerThanTheirAgeAllowsGo)
{
    Store store;
    const size_t young = store.add(1, 0, 0, 6), week = store.add(2, 0, 0, 7),
                 old = store.add(3, 0, 0, 100), kept = store.add(4, 0, 0, 100, 1),
                 lead = store.add(5, 0, 0, 100), only_l1 = store.add(7, 0, 0, 100);
    store.add(6, 5, 256, 0);
    store.files[only_l1].levels = 1 << CG_L1;
    const size_t exact = store.add(2, 0, 0, 7); // L0 beside the nested file
    store.files[exact].levels = 1 << CG_L0;
    store.files[exact].finest = CG_L0;
    store.files[exact].level_bytes[CG_L0] = 1'000'000;
    store.policy.keep_s[CG_L2] = 7 * DAY_S;
    store.policy.keep_s[CG_L3] = 90 * DAY_S;
    std::map<size_t, unsigned> left;
    for (const cg_eviction &step : store.choose(0))
        left[step.file] = step.finest_left;
    EXPECT_EQ(left, (std::map<size_t, unsigned>{{week, CG_L2}, {old, CG_L3}, {exact, CG_N_LEVELS}}))
        << young << kept << lead;
    // What the rules free counts as freed.
    uint64_t freed = 0;
    for (const cg_eviction &step : store.choose(2'500'000))
        freed += step.freed_bytes;
    EXPECT_EQ(freed, 2'500'000u);
}

TEST(EvictTest, MakesRoomInOneModel)
{
    Store store;
    store.add(1, 0, 0, 100);
    const size_t other = store.add(1, 0, 0, 1);
    store.files[other].model = 1;
    store.policy.model = 1;
    const std::vector<cg_eviction> steps = store.choose(UINT64_MAX);
    ASSERT_EQ(steps.size(), 1u);
    EXPECT_EQ(steps[0].file, other);
}

// Whatever the headers say: no parent goes before its child, each file has one step at most, and
// what contexts name stays.
TEST(EvictTest, EndsChainsFromTheirTails)
{
    for (uint32_t seed = 0; seed < 200; seed++) {
        std::mt19937 random(seed);
        Store store;
        std::map<uint32_t, std::vector<size_t>> files_of;
        std::map<uint32_t, uint32_t> parent_of;
        const uint32_t n = 1 + random() % 60;
        for (uint32_t key = 1; key <= n; key++) {
            const uint32_t parent = random() % (n + 1), n_files = 1 + random() % 2;
            parent_of[key] = parent;
            for (uint32_t i = 0; i < n_files; i++)
                files_of[key].push_back(store.add(key, parent, key * (random() % 8 ? 256 : 0),
                                                  random() % 50, random() % 10 == 0));
            for (size_t file : files_of[key])
                store.files[file].first_position = store.files[files_of[key][0]].first_position;
        }
        std::map<size_t, unsigned> level;
        std::set<uint32_t> gone;
        uint64_t freed = 0;
        for (const cg_eviction &step : store.choose(UINT64_MAX)) {
            const cg_object_file &file = store.files[step.file];
            ASSERT_EQ(file.n_names_elsewhere, 0u);
            unsigned &now = level.emplace(step.file, CG_L1).first->second;
            ASSERT_EQ(now, static_cast<unsigned>(CG_L1)) << "one step a file";
            now = step.finest_left;
            freed += step.freed_bytes;
            uint32_t key;
            memcpy(&key, file.key.bytes, sizeof key);
            const auto is_gone = [&](size_t f) {
                return level.count(f) > 0 && level[f] == CG_N_LEVELS;
            };
            if (now < CG_N_LEVELS ||
                !std::all_of(files_of[key].begin(), files_of[key].end(), is_gone))
                continue;
            gone.insert(key);
            for (const auto &[child, parent] : parent_of)
                if (parent == key && store.files[files_of[child][0]].first_position >
                                         store.files[files_of[key][0]].first_position) {
                    ASSERT_TRUE(gone.count(child)) << "seed " << seed << ": " << child;
                }
        }
        EXPECT_LE(freed, store.files.size() * 1'000'000u);
    }
}

// ---- on a store ----

// A check that goes through the whole store. staging NULL: nothing is repaired.
cg_fsck_result check(int root_fd, cg_staging *staging)
{
    cg_fsck_result result;
    cg_fsck_config config = {};
    config.root_fd = root_fd;
    config.staging = staging;
    config.report = [](void *, const char *, const char *) {};
    EXPECT_EQ(cg_fsck_run(&config, &result), CG_OK);
    return result;
}

// A daemon's folder in a store, and what it is for.
class OwnStaging
{
  public:
    explicit OwnStaging(const cg_test::TempDir &dir) : root_fd_(dir.fd)
    {
        uint64_t n_left;
        EXPECT_EQ(cg_staging_open(&staging, root_fd_, CG_STAGING_SILENT_S, &n_left), 0);
    }
    ~OwnStaging()
    {
        cg_staging_close(&staging);
    }
    OwnStaging(const OwnStaging &) = delete;
    OwnStaging &operator=(const OwnStaging &) = delete;

    // Contexts that expired.
    size_t expire()
    {
        cg_expired_file *files;
        size_t n_files, n_removed;
        cg_contexts_expire(root_fd_, &staging, nullptr, nullptr, nullptr, &files, &n_files,
                           &n_removed);
        free(files);
        return n_removed;
    }
    cg_fsck_result repair()
    {
        return check(root_fd_, &staging);
    }
    cg_staging staging;

  private:
    int root_fd_;
};

// What a daemon has in its folder while it lives.
bool is_of_each_daemon(const std::string &name)
{
    const std::string leaf = name.substr(name.rfind('/') + 1);
    return leaf == CG_LIFE_FILE || leaf == CG_STAGING_NAME_FILE;
}

class SpaceTest : public testing::Test
{
  protected:
    static constexpr size_t PAYLOAD = 200'000; // of each level
    static constexpr uint64_t QUOTA = 4 << 20;

    void open(uint64_t quota = QUOTA)
    {
        fs = std::make_unique<cg_test::Fs>(dir.path, false, quota);
    }
    // Publishes a chain of chunks with L1 to L3 past the mount, used so many days ago.
    std::vector<cg_test::Chunk> publish(uint32_t seed, size_t n, int64_t days)
    {
        std::vector<cg_test::Chunk> chain;
        cg_io *io = nullptr;
        cg_store *store = nullptr;
        EXPECT_EQ(cg_io_new(nullptr, &io), CG_OK);
        EXPECT_EQ(cg_store_open(dir.path.c_str(), "m", true, &store), CG_OK);
        for (size_t i = 0; i < n; i++) {
            const uint32_t chunk_seed = seed * 100 + static_cast<uint32_t>(i);
            chain.push_back(cg_test::make_chunk(i == 0 ? nullptr : &chain.back(),
                                                cg_test::draw_tokens(16, chunk_seed), CG_L1,
                                                &profile, PAYLOAD, chunk_seed, CG_L3));
            EXPECT_EQ(cg_store_publish(store, io, chain.back().bytes.data(),
                                       chain.back().bytes.size(), nullptr),
                      CG_OK);
            use(path_of(chain.back(), CG_L1), days);
        }
        cg_store_free(store);
        cg_io_free(io, 0);
        return chain;
    }
    std::string path_of(const cg_test::Chunk &chunk, unsigned level) const
    {
        char path[CG_TREE_PATH_BYTES];
        EXPECT_EQ(cg_tree_object_path("m", &chunk.header.key, static_cast<cg_level>(level),
                                      &profile, path, sizeof path),
                  CG_OK);
        return path;
    }
    void use(const std::string &path, int64_t days)
    {
        struct timespec times[2] = {};
        times[0].tv_sec = times[1].tv_sec = time(nullptr) - days * DAY_S;
        EXPECT_EQ(utimensat(dir.fd, path.c_str(), times, 0), 0) << path;
    }
    // Bit n: level n is there, and whole.
    unsigned levels_of(const cg_test::Chunk &chunk)
    {
        unsigned levels = 0;
        for (unsigned level = CG_L1; level <= CG_L3; level++) {
            if (!dir.has(path_of(chunk, level)))
                continue;
            cg_test::Bytes bytes = dir.read(path_of(chunk, level));
            EXPECT_EQ(cg_chunk_verify(bytes.data(), bytes.size()), CG_OK);
            EXPECT_GE(bytes.size(), chunk.header.level_bytes[level]);
            EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), chunk.bytes.begin()));
            levels |= 1u << level;
        }
        return levels;
    }
    uint64_t used()
    {
        cg_survey survey;
        EXPECT_EQ(cg_survey_make(dir.fd, nullptr, nullptr, &survey), CG_OK);
        const uint64_t bytes = survey.used_bytes;
        cg_survey_free(&survey);
        return bytes;
    }
    uint64_t metric(const std::string &name)
    {
        return fs->metric(name);
    }
    // Sets the store's clock to so many days ago, as the daemons that are open now see it.
    void set_clock_back(int64_t days)
    {
        for (const std::string &name : dir.files(CG_STAGING_DIRECTORY))
            use(name, days);
    }
    static int64_t now_s()
    {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return now.tv_sec;
    }
    // A file of so many bytes, as by a rename through this mount.
    void publish_here(cg_fs *mount, off_t n_bytes)
    {
        dir.write("m/some", cg_test::Bytes());
        const int fd = openat(dir.fd, "m/some", O_RDWR | O_CLOEXEC);
        EXPECT_EQ(ftruncate(fd, n_bytes), 0);
        cg_space_arrived(mount, fd);
        ::close(fd);
    }
    void make_context(const char *name, const std::vector<cg_test::Chunk> &chain, int64_t days)
    {
        const std::string at = std::string("m/contexts/") + name;
        ASSERT_TRUE(std::filesystem::create_directories(dir.path + "/" + at + "/L1"));
        for (size_t i = 0; i < chain.size(); i++)
            ASSERT_EQ(linkat(dir.fd, path_of(chain[i], CG_L1).c_str(), dir.fd,
                             (at + "/L1/0000" + std::to_string(i) + ".kv").c_str(), 0),
                      0);
        dir.write(at + "/context.json", cg_test::Bytes{'{', '}'});
        use(at + "/context.json", days);
    }
    bool set_ttl(const char *name, const char *ttl)
    {
        const std::string at = dir.path + "/m/contexts/" + name;
        return setxattr(at.c_str(), CG_CONTEXT_TTL, ttl, strlen(ttl), 0) == 0;
    }

    const cg_fingerprint profile = cg_test::fingerprint_of("p");
    cg_test::TempDir dir;
    std::unique_ptr<cg_test::Fs> fs;
};

TEST_F(SpaceTest, ASurveySeesEachFileOnce)
{
    const std::vector<cg_test::Chunk> chain = publish(1, 2, 0);
    cg_survey survey;
    ASSERT_EQ(cg_survey_make(dir.fd, nullptr, nullptr, &survey), CG_OK);
    ASSERT_EQ(survey.n_files, 2u);
    ASSERT_EQ(survey.n_models, 1u);
    EXPECT_STREQ(survey.models[0], "m");
    uint64_t all = 0;
    for (size_t i = 0; i < 2; i++) {
        const cg_object_file &file = survey.files[i];
        EXPECT_EQ(file.levels, 2 | 4 | 8);
        EXPECT_EQ(file.finest, CG_L1);
        EXPECT_EQ(file.n_names_elsewhere, 0u);
        EXPECT_EQ(file.level_bytes[CG_L2], chain[0].header.level_bytes[CG_L2]);
        EXPECT_GE(file.used_bytes, chain[0].bytes.size());
        all += file.used_bytes;
    }
    EXPECT_GE(survey.used_bytes, all);
    EXPECT_LT(survey.used_bytes, all + 65536) << "and tokens";
    cg_survey_free(&survey);
}

// An object's file loses its other names while the store is looked through.
TEST_F(SpaceTest, ASurveyCountsAFileOnceThatLosesItsNames)
{
    struct names {
        int root_fd;
        size_t n_until;
        static std::string of(size_t i)
        {
            return "m/folder" + std::to_string(i) + "/name";
        }
        static bool take_away(void *user)
        {
            auto *self = static_cast<names *>(user);
            for (size_t i = 0; i < N && self->n_until == 0; i++)
                unlinkat(self->root_fd, of(i).c_str(), 0);
            self->n_until--;
            return false;
        }
        enum { N = 30 }; // folders come in any order: some before the object's
    };
    const cg_test::Chunk chunk = publish(1, 1, 0)[0];
    const std::string object = path_of(chunk, CG_L1);
    for (const unsigned level : {CG_L2, CG_L3})
        ASSERT_EQ(unlinkat(dir.fd, path_of(chunk, level).c_str(), 0), 0);
    for (size_t i = 0; i < names::N; i++)
        ASSERT_EQ(mkdirat(dir.fd, ("m/folder" + std::to_string(i)).c_str(), 0700), 0);
    const uint64_t alone = used();
    for (size_t n_until = 0; n_until < 2 * names::N; n_until++) {
        for (size_t i = 0; i < names::N; i++)
            linkat(dir.fd, object.c_str(), dir.fd, names::of(i).c_str(), 0);
        names user = {dir.fd, n_until};
        cg_survey survey;
        ASSERT_EQ(cg_survey_make(dir.fd, names::take_away, &user, &survey), CG_OK);
        EXPECT_EQ(survey.used_bytes, alone) << n_until;
        cg_survey_free(&survey);
    }
}

// As `cp -al` makes it.
TEST_F(SpaceTest, ACopyOfAModelByLinksTakesItsFoldersOnly)
{
    namespace fs = std::filesystem;
    make_context("c", publish(1, 2, 0), 0);
    const uint64_t alone = used();
    uint64_t folders = 0;
    for (const fs::directory_entry &entry : fs::recursive_directory_iterator(dir.path + "/m"))
        if (entry.is_directory())
            fs::create_directories(dir.path + "/m.bak" +
                                   entry.path().string().substr(dir.path.size() + 2));
        else
            fs::create_hard_link(entry.path(),
                                 dir.path + "/m.bak" +
                                     entry.path().string().substr(dir.path.size() + 2));
    const auto count = [&](const fs::path &folder) {
        struct stat attr;
        ASSERT_EQ(stat(folder.c_str(), &attr), 0);
        folders += static_cast<uint64_t>(attr.st_blocks) * 512;
    };
    count(dir.path + "/m.bak");
    for (const fs::directory_entry &entry : fs::recursive_directory_iterator(dir.path + "/m.bak"))
        if (entry.is_directory())
            count(entry.path());
    cg_survey survey;
    ASSERT_EQ(cg_survey_make(dir.fd, nullptr, nullptr, &survey), CG_OK);
    EXPECT_EQ(survey.n_files, 4u);
    EXPECT_EQ(survey.used_bytes, alone + folders);
    ASSERT_EQ(survey.n_models, 2u);
    EXPECT_EQ(survey.model_bytes[0] + survey.model_bytes[1], survey.used_bytes);
    EXPECT_EQ(std::min(survey.model_bytes[0], survey.model_bytes[1]), folders)
        << "all files count for one of the two";
    cg_survey_free(&survey);
}

TEST_F(SpaceTest, MakesRoomFromWhatIsCold)
{
    const std::vector<cg_test::Chunk> hot = publish(1, 3, 0), cold = publish(2, 6, 20);
    open();
    ASSERT_GT(used(), QUOTA / 100 * 95);
    cg_space_tend(fs->fs);
    EXPECT_LE(used(), QUOTA / 100 * 90);
    EXPECT_GT(used(), QUOTA / 100 * 60) << "no more than was wanted";
    for (const cg_test::Chunk &chunk : hot)
        EXPECT_EQ(levels_of(chunk), 2u | 4u | 8u);
    size_t n_cut = 0;
    for (const cg_test::Chunk &chunk : cold) {
        const unsigned levels = levels_of(chunk);
        EXPECT_TRUE(levels & 8u) << "levels go before chunks";
        n_cut += levels != (2u | 4u | 8u);
    }
    EXPECT_GT(n_cut, 0u);
    EXPECT_GT(metric("evictions_total{what=\"finest_levels\"}"), 0u);
    EXPECT_EQ(metric("evict_errors_total"), 0u);
    struct statvfs s;
    ASSERT_EQ(cg_fs_statfs(fs->fs, &s), 0);
    EXPECT_EQ(s.f_blocks * s.f_frsize, QUOTA);
    EXPECT_LE(s.f_bfree * s.f_frsize, QUOTA - used() + 65536);
    for (const std::string &name : dir.files(".cachegenfs-tmp"))
        EXPECT_TRUE(is_of_each_daemon(name) || name.find("evicting") != std::string::npos) << name;
}

TEST_F(SpaceTest, LevelsThatStayAreOneFile)
{
    const std::vector<cg_test::Chunk> cold = publish(1, 6, 20);
    open(2 << 20);
    cg_space_tend(fs->fs);
    size_t n_l2 = 0;
    for (const cg_test::Chunk &chunk : cold) {
        struct stat l2 = {}, l3 = {};
        if (levels_of(chunk) != (4u | 8u))
            continue;
        n_l2++;
        EXPECT_EQ(fstatat(dir.fd, path_of(chunk, CG_L2).c_str(), &l2, 0), 0);
        EXPECT_EQ(fstatat(dir.fd, path_of(chunk, CG_L3).c_str(), &l3, 0), 0);
        EXPECT_EQ(l2.st_ino, l3.st_ino);
        EXPECT_EQ(static_cast<uint64_t>(l2.st_size), chunk.header.level_bytes[CG_L2]);
        EXPECT_LT(l2.st_mtim.tv_sec, time(nullptr) - 19 * DAY_S) << "it is as cold as it was";
    }
    EXPECT_GT(n_l2, 0u);
}

TEST_F(SpaceTest, AReaderKeepsWhatItHasOpen)
{
    const std::vector<cg_test::Chunk> cold = publish(1, 2, 20);
    open(1 << 20);
    cg_fs_file *file;
    ASSERT_EQ(fs->open(path_of(cold[1], CG_L1), O_RDONLY, &file), 0);
    use(path_of(cold[1], CG_L1), 20); // opening it has made it warm
    cg_space_tend(fs->fs);
    EXPECT_NE(levels_of(cold[1]), 2u | 4u | 8u);
    cg_test::Bytes bytes(cold[1].bytes.size());
    size_t n;
    ASSERT_EQ(fs->read(file, bytes.data(), bytes.size(), 0, &n), 0);
    EXPECT_EQ(n, bytes.size());
    EXPECT_TRUE(bytes == cold[1].bytes);
    EXPECT_EQ(fs->close(file), 0);
}

TEST_F(SpaceTest, OpeningAChunkKeepsIt)
{
    const std::vector<cg_test::Chunk> one = publish(1, 1, 20), other = publish(2, 1, 19);
    open(1 << 20);
    cg_fs_file *file;
    ASSERT_EQ(fs->open(path_of(one[0], CG_L1), O_RDONLY, &file), 0);
    EXPECT_EQ(fs->close(file), 0);
    cg_space_tend(fs->fs);
    EXPECT_EQ(levels_of(one[0]), 2u | 4u | 8u);
    EXPECT_NE(levels_of(other[0]), 2u | 4u | 8u);
}

TEST_F(SpaceTest, OpeningAChunkKeepsItOnAnOldKernel)
{
    const std::vector<cg_test::Chunk> one = publish(1, 1, 20), other = publish(2, 1, 19);
    open(1 << 20);
    cg_fs_file *file;
    {
        const cg_test::TimesHook linux_5_7(
            [](int flags) { return (flags & AT_EMPTY_PATH) != 0 ? EINVAL : 0; });
        ASSERT_EQ(fs->open(path_of(one[0], CG_L1), O_RDONLY, &file), 0);
        EXPECT_EQ(fs->close(file), 0);
    }
    cg_space_tend(fs->fs);
    EXPECT_EQ(levels_of(one[0]), 2u | 4u | 8u);
    EXPECT_NE(levels_of(other[0]), 2u | 4u | 8u);
}

TEST_F(SpaceTest, WhatIsUsedPastTheMountStays)
{
    const std::vector<cg_test::Chunk> one = publish(1, 1, 20), other = publish(2, 1, 19);
    cg_store *store = nullptr;
    ASSERT_EQ(cg_store_open(dir.path.c_str(), "m", false, &store), CG_OK);
    EXPECT_TRUE(cg_store_wants_touches(store));
    EXPECT_EQ(cg_store_touch(store, &one[0].header.key, CG_L2, &profile), CG_OK);
    cg_store_free(store);
    open(1 << 20);
    cg_space_tend(fs->fs);
    EXPECT_EQ(levels_of(one[0]), 2u | 4u | 8u);
    EXPECT_NE(levels_of(other[0]), 2u | 4u | 8u);
}

TEST_F(SpaceTest, AFullStoreOfContextsTakesNoMore)
{
    const std::vector<cg_test::Chunk> chain = publish(1, 3, 20);
    cg_test::Chunk next =
        cg_test::make_chunk(nullptr, cg_test::draw_tokens(16, 9), CG_L3, &profile);
    ASSERT_TRUE(std::filesystem::create_directories(dir.path + "/m/contexts/c/L1"));
    for (size_t i = 0; i < chain.size(); i++)
        ASSERT_EQ(linkat(dir.fd, path_of(chain[i], CG_L1).c_str(), dir.fd,
                         ("m/contexts/c/L1/0000" + std::to_string(i) + ".kv").c_str(), 0),
                  0);
    open(1 << 20);
    cg_space_tend(fs->fs);
    for (const cg_test::Chunk &chunk : chain)
        EXPECT_EQ(levels_of(chunk), 2u | 4u | 8u);
    fs->mkdirs("m/contexts/d/L3");
    cg_fs_file *file;
    EXPECT_EQ(fs->create("m/contexts/d/L3/00000.kv", &file), ENOSPC);
    EXPECT_NE(fs->log().find("all of its quota"), std::string::npos);
    ASSERT_EQ(fs->put("m/part", next.bytes), 0);
    EXPECT_EQ(fs->rename("m/part", "m/contexts/d/L3/00000.kv"), ENOSPC);
    EXPECT_EQ(fs->link("m/part", "m/contexts/d/L3/00000.kv"), ENOSPC);
    EXPECT_EQ(fs->link(path_of(chain[0], CG_L3), "m/contexts/d/L3/00000.kv"), 0)
        << "it was published past this mount, and takes no more";
    EXPECT_EQ(fs->unlink("m/contexts/d/L3/00000.kv"), 0);
    fs->mkdirs("m/upload/L3");
    ASSERT_EQ(fs->rename("m/part", "m/upload/L3/00000.kv"), 0);
    EXPECT_EQ(fs->rename("m/upload", "m/contexts/e"), ENOSPC);
    EXPECT_EQ(fs->rename("m/contexts/c", "m/contexts/f"), 0) << "which takes no more";
    EXPECT_EQ(fs->rename("m/contexts/f", "m/contexts/c"), 0);

    std::filesystem::remove_all(dir.path + "/m/contexts/c");
    EXPECT_FALSE(cg_space_is_due(fs->fs, now_s()));
    EXPECT_TRUE(cg_space_is_due(fs->fs, now_s() + 61)) << "though nothing was published";
    cg_space_tend(fs->fs);
    EXPECT_FALSE(cg_space_is_due(fs->fs, now_s() + 61));
    ASSERT_EQ(fs->create("m/contexts/d/L3/00000.kv", &file), 0);
    EXPECT_EQ(fs->write(file, next.bytes), 0);
    EXPECT_EQ(fs->close(file), 0);
}

// As over sshfs, where each link count is 1, and where a chunk was adopted by copying it.
TEST_F(SpaceTest, WhatAContextNamesWithoutALinkStays)
{
    const std::vector<cg_test::Chunk> in_json = publish(1, 2, 20), in_files = publish(2, 2, 20),
                                      neither = publish(3, 2, 20);
    std::string json = "{\"version\":1,\"profile\":null,\n\"chunks\":[";
    for (const cg_test::Chunk &chunk : in_json) {
        char hex[CG_KEY_HEX_BYTES];
        cg_key_to_hex(&chunk.header.key, hex);
        json += std::string(&chunk == &in_json[0] ? "" : ", ") + "{\"key\" : \"" + hex +
                "\", \"x\\\"\":1, \"levels\":[\"L3\"]}";
    }
    ASSERT_TRUE(std::filesystem::create_directories(dir.path + "/m/contexts/named"));
    ASSERT_TRUE(std::filesystem::create_directories(dir.path + "/m/contexts/copied/L2"));
    dir.write("m/contexts/named/context.json", json + "]}");
    for (size_t i = 0; i < in_files.size(); i++) {
        const cg_test::Chunk &chunk = in_files[i];
        cg_test::Bytes l2 = chunk.bytes;
        l2.resize(chunk.header.level_bytes[CG_L2]);
        dir.write("m/contexts/copied/L2/0000" + std::to_string(i) + ".kv", l2);
    }
    open(1 << 20);
    cg_space_tend(fs->fs);
    for (const auto &kept : {in_json, in_files})
        for (const cg_test::Chunk &chunk : kept)
            EXPECT_EQ(levels_of(chunk), 2u | 4u | 8u);
    for (const cg_test::Chunk &chunk : neither)
        EXPECT_EQ(levels_of(chunk), 0u);

    // Other levels than a context names are nobody's.
    cg_survey survey;
    std::string other = json + "]}";
    for (size_t at = 0; (at = other.find("L3", at)) != std::string::npos;)
        other.replace(at, 2, "L0");
    dir.write("m/contexts/named/context.json", other);
    ASSERT_EQ(cg_survey_make(dir.fd, nullptr, nullptr, &survey), CG_OK);
    for (size_t i = 0; i < survey.n_files; i++) {
        const bool is_copied = std::any_of(in_files.begin(), in_files.end(), [&](const auto &c) {
            return cg_key_equal(&c.header.key, &survey.files[i].key);
        });
        EXPECT_EQ(survey.files[i].n_names_elsewhere, is_copied ? 1u : 0u);
    }
    cg_survey_free(&survey);
}

// A sparse one costs whoever made it nothing.
TEST_F(SpaceTest, OfAContextJsonOnlySoMuchIsRead)
{
    const cg_test::Chunk chunk = publish(1, 1, 20)[0];
    char hex[CG_KEY_HEX_BYTES];
    cg_key_to_hex(&chunk.header.key, hex);
    const std::string key = std::string("\"") + hex + "\"";
    for (const bool is_behind : {false, true}) {
        const off_t at = CG_TREE_MOST_TEXT_BYTES - (is_behind ? 1 : static_cast<off_t>(key.size()));
        cg_survey survey;
        dir.write("m/contexts/c/context.json", cg_test::Bytes());
        const int fd = openat(dir.fd, "m/contexts/c/context.json", O_WRONLY | O_CLOEXEC);
        EXPECT_EQ(pwrite(fd, key.data(), key.size(), at), static_cast<ssize_t>(key.size()));
        ::close(fd);
        ASSERT_EQ(cg_survey_make(dir.fd, nullptr, nullptr, &survey), CG_OK);
        ASSERT_EQ(survey.n_files, 1u);
        EXPECT_EQ(survey.files[0].n_names_elsewhere, is_behind ? 0u : 1u);
        cg_survey_free(&survey);
    }
}

cg_key numbered_key(uint32_t i)
{
    cg_key key = {};
    memcpy(key.bytes, &i, sizeof i);
    return key;
}

// A file may have any number of names, and costs whoever made it one.
TEST_F(SpaceTest, WhatManyContextsNameIsKeptOnce)
{
    constexpr uint32_t N_KEYS = 10'000, N_CONTEXTS = 20;
    std::string json = "[";
    for (uint32_t i = 1; i <= N_KEYS; i++) {
        char hex[CG_KEY_HEX_BYTES];
        const cg_key key = numbered_key(i);
        cg_key_to_hex(&key, hex);
        json += std::string(i == 1 ? "\"" : ",\"") + hex + "\",\"L2\"";
    }
    dir.write("context.json", json + "]");
    cg_marks marks = {};
    for (uint32_t i = 0; i < N_CONTEXTS; i++) {
        ASSERT_EQ(cg_marks_add_json(&marks, i / 10, dir.fd, "context.json"), CG_OK);
        EXPECT_LE(marks.n_items, 4 * N_KEYS);
    }
    cg_marks_sort(&marks);
    EXPECT_EQ(marks.n_items, 2 * N_KEYS) << "of two models";
    for (uint32_t i = 0; i <= N_KEYS + 1; i++) {
        const cg_key key = numbered_key(i);
        for (uint32_t model = 0; model < 2; model++)
            ASSERT_EQ(cg_marks_of(&marks, model, &key), i > 0 && i <= N_KEYS ? 1u << CG_L2 : 0u);
    }
    EXPECT_FALSE(marks.has_unknown);
    cg_marks_free(&marks);
}

TEST_F(SpaceTest, OfAModelWhoseContextsNameTooManyChunksAllIsMarked)
{
    constexpr uint32_t SMALL = 0, LARGE = 1, LATER = 2, N = 4'000'001;
    dir.write("context.json", "[\"" + std::string(CG_KEY_HEX_BYTES - 1, 'f') + "\"]");
    const cg_key one = numbered_key(1), none = numbered_key(N + 1);
    cg_key in_json;
    memset(&in_json, 0xff, sizeof in_json);
    cg_marks marks = {};
    ASSERT_EQ(cg_marks_add(&marks, SMALL, &one, 1 << CG_L2), CG_OK);
    for (uint32_t i = 0; i < N; i++) {
        const cg_key key = numbered_key(i);
        ASSERT_EQ(cg_marks_add(&marks, LARGE, &key, 1 << CG_L2), CG_OK);
    }
    for (const uint32_t model : {LARGE, LARGE, LATER})
        ASSERT_EQ(cg_marks_add_json(&marks, model, dir.fd, "context.json"), CG_OK);
    EXPECT_EQ(marks.n_items, 3u) << "one each";
    EXPECT_TRUE(marks.has_unknown && marks.has_crowded);
    EXPECT_FALSE(marks.has_leased || marks.has_forbidden);
    EXPECT_EQ(marks.crowded, LARGE);
    cg_marks_sort(&marks);
    EXPECT_EQ(cg_marks_of(&marks, LARGE, &none), 15u);
    EXPECT_EQ(cg_marks_of(&marks, SMALL, &one), 1u << CG_L2);
    EXPECT_EQ(cg_marks_of(&marks, SMALL, &none), 0u);
    EXPECT_EQ(cg_marks_of(&marks, LATER, &in_json), 15u);
    EXPECT_EQ(cg_marks_of(&marks, LATER, &none), 0u);
    cg_marks_free(&marks);
}

TEST_F(SpaceTest, AContextThatNamesNoLevelsNamesAll)
{
    const cg_test::Chunk chunk = publish(1, 1, 20)[0];
    char hex[CG_KEY_HEX_BYTES];
    cg_key_to_hex(&chunk.header.key, hex);
    ASSERT_TRUE(std::filesystem::create_directories(dir.path + "/m/contexts/c"));
    const struct {
        std::string text;
        bool names;
    } cases[] = {{std::string("[\"") + hex + "\"]", true},
                 {std::string("[\"L0\", \"") + hex + "\"]", true},
                 {std::string("{\"chunks\":[{\"key\":\"") + hex, false}, // it ends there
                 {std::string("[\"") + hex + "0\"]", false},
                 {std::string("[\"\\") + hex + "\"]", false},
                 {std::string("[") + hex + "]", false},
                 {"", false}};
    for (const auto &c : cases) {
        cg_survey survey;
        dir.write("m/contexts/c/context.json", c.text);
        ASSERT_EQ(cg_survey_make(dir.fd, nullptr, nullptr, &survey), CG_OK);
        ASSERT_EQ(survey.n_files, 1u);
        EXPECT_EQ(survey.files[0].n_names_elsewhere, c.names ? 1u : 0u) << c.text;
        cg_survey_free(&survey);
    }
}

// As of a disk that is about to fail, or when the daemon has no descriptor left.
TEST_F(SpaceTest, NothingGoesWhileAFolderOfContextsCannotBeRead)
{
    const std::vector<cg_test::Chunk> chain = publish(1, 2, 20);
    dir.write("m/contexts/c/L1/00000.kv", chain[0].bytes);
    open(1 << 20);
    const auto is_all_there = [&] {
        return levels_of(chain[0]) == (2u | 4u | 8u) && levels_of(chain[1]) == (2u | 4u | 8u);
    };
    const auto count_failures = [this] {
        const cg_fsck_result result = check(dir.fd, nullptr);
        EXPECT_GE(result.n_whole, 1u) << "it goes on with the rest";
        return result.n_failed;
    };
    FILE *null = fopen("/dev/null", "we");
    ASSERT_NE(null, nullptr);
    for (const std::string folder : {"contexts", "c", "L1"}) {
        SCOPED_TRACE(folder);
        const cg_test::OpenHook hook(
            [&](int, const char *name) { return name == folder ? EIO : 0; });
        cg_survey survey;
        EXPECT_EQ(cg_survey_make(dir.fd, nullptr, nullptr, &survey), CG_ERR_IO);
        cg_survey_free(&survey);
        cg_space_tend(fs->fs);
        EXPECT_EQ(cg_gc(dir.path.c_str(), true, true, null), 2);
        EXPECT_TRUE(is_all_there());
        EXPECT_EQ(count_failures(), 1u);
    }
    {
        const cg_test::OpenHook hook(
            [&](int, const char *name) { return strcmp(name, "contexts") == 0 ? ENOENT : 0; });
        EXPECT_EQ(count_failures(), 0u) << "it has just gone";
    }
    {
        const cg_test::OpenHook hook(
            [&](int, const char *name) { return strcmp(name, "other") == 0 ? EIO : 0; });
        ASSERT_EQ(mkdirat(dir.fd, "m/other", 0700), 0);
        cg_space_tend(fs->fs);
        EXPECT_EQ(count_failures(), 1u);
    }
    EXPECT_FALSE(is_all_there()) << "no context can be there";
    fclose(null);
}

// It may be all that names its chunk.
TEST_F(SpaceTest, NothingGoesWhileAContextsChunkCannotBeRead)
{
    const std::vector<cg_test::Chunk> chain = publish(1, 3, 20);
    for (size_t i = 0; i < chain.size(); i++) {
        cg_test::Bytes l2 = chain[i].bytes;
        l2.resize(chain[i].header.level_bytes[CG_L2]);
        dir.write("m/contexts/c/L2/0000" + std::to_string(i) + ".kv", l2);
    }
    open(1 << 20);
    const auto check_kept = [&](cg_status wanted) {
        cg_survey survey;
        EXPECT_EQ(cg_survey_make(dir.fd, nullptr, nullptr, &survey), wanted);
        EXPECT_EQ(survey.has_unknown, wanted == CG_OK);
        cg_survey_free(&survey);
        cg_space_tend(fs->fs);
        for (const cg_test::Chunk &chunk : chain)
            EXPECT_EQ(levels_of(chunk), 2u | 4u | 8u);
    };
    const auto is_of_context = [](const char *name) { return strcmp(name, "00000.kv") == 0; };
    for (const int error : {EAGAIN, EIO, EMFILE}) {
        SCOPED_TRACE(error);
        const cg_test::OpenHook hook(
            [&](int, const char *name) { return is_of_context(name) ? error : 0; });
        check_kept(error == EAGAIN ? CG_OK : cg_status_from_errno(error));
    }
    { // it opens, and then the disk fails
        bool is_it = false;
        const cg_test::OpenHook hook([&](int, const char *name) {
            is_it = is_of_context(name);
            return 0;
        });
        const cg_test::ReadHook read([&] { return is_it ? EIO : 0; });
        check_kept(CG_ERR_IO);
    }
    {
        const cg_test::OpenHook hook(
            [&](int, const char *name) { return is_of_context(name) ? ENOENT : 0; });
        cg_space_tend(fs->fs);
        EXPECT_EQ(levels_of(chain[2]), 2u | 4u | 8u) << "others are there";
    }
}

// As for a daemon that is not root, where a context's folder has mode 0700.
TEST_F(SpaceTest, OfAModelWithAContextThatMayNotBeReadNothingGoes)
{
    const std::vector<cg_test::Chunk> chain = publish(1, 3, 20);
    cg_test::Bytes l2 = chain[0].bytes;
    l2.resize(chain[0].header.level_bytes[CG_L2]);
    dir.write("m/contexts/c/L2/00000.kv", l2);
    dir.write("m/contexts/c/context.json", std::string("{}"));
    ASSERT_EQ(mkdirat(dir.fd, "m/other", 0700), 0);
    open(1 << 20);
    fs->mkdirs("m/contexts/d/L3");
    FILE *null = fopen("/dev/null", "we");
    ASSERT_NE(null, nullptr);
    for (const int error : {EACCES, EPERM})
        for (const char *leaf : {"contexts", "c", "L2", "00000.kv", "context.json"}) {
            SCOPED_TRACE(leaf);
            const cg_test::OpenHook hook(
                [&](int, const char *name) { return strcmp(name, leaf) == 0 ? error : 0; });
            cg_survey survey;
            ASSERT_EQ(cg_survey_make(dir.fd, nullptr, nullptr, &survey), CG_OK);
            EXPECT_TRUE(survey.has_unknown);
            cg_survey_free(&survey);
            cg_space_tend(fs->fs);
            EXPECT_EQ(cg_gc(dir.path.c_str(), true, true, null), 2);
            for (const cg_test::Chunk &chunk : chain)
                ASSERT_EQ(levels_of(chunk), 2u | 4u | 8u);
        }
    fclose(null);
    const std::string log = fs->log(), told = "may not read all contexts";
    EXPECT_NE(log.find(told), std::string::npos);
    EXPECT_EQ(log.find(told), log.rfind(told)) << "once";
    EXPECT_NE(log.find("nothing of their models goes: m/contexts"), std::string::npos) << log;
    cg_fs_file *file;
    EXPECT_EQ(fs->create("m/contexts/d/L3/00000.kv", &file), ENOSPC) << "nothing may go";
    const cg_test::OpenHook hook(
        [&](int, const char *name) { return strcmp(name, "other") == 0 ? EACCES : 0; });
    cg_space_tend(fs->fs);
    EXPECT_NE(levels_of(chain[2]), 2u | 4u | 8u) << "no context can be there";
}

TEST_F(SpaceTest, ASurveyThatFailsRestsAndIsToldOnce)
{
    make_context("c", publish(1, 2, 20), 20);
    open(1 << 20);
    fs->mkdirs("m/contexts/d/L3");
    const cg_test::Chunk large =
        cg_test::make_chunk(nullptr, cg_test::draw_tokens(16, 5), CG_L3, &profile, 2 << 20);
    ASSERT_EQ(fs->put("m/contexts/d/L3/00000.kv", large.bytes), 0);
    const auto n_told = [this] {
        const std::string log = fs->log();
        size_t n = 0, at = 0;
        for (; (at = log.find("looking for what takes", at)) != std::string::npos; at++)
            n++;
        return n;
    };
    {
        const cg_test::OpenHook hook(
            [&](int, const char *name) { return strcmp(name, "context.json") == 0 ? EIO : 0; });
        for (int i = 0; i < 3; i++) {
            cg_space_tend(fs->fs);
            EXPECT_FALSE(cg_space_is_due(fs->fs, now_s())) << "the quota may be reached";
            EXPECT_TRUE(cg_space_is_due(fs->fs, now_s() + 61));
        }
        EXPECT_EQ(n_told(), 1u);
    }
    cg_space_tend(fs->fs);
    EXPECT_EQ(n_told(), 2u) << "it works again";
    cg_space_tend(fs->fs);
    EXPECT_EQ(n_told(), 2u);
}

// As when somebody past the mount has a lease on it: who opens it would wait.
TEST_F(SpaceTest, AContextJsonWithALeaseKeepsItsModel)
{
    const std::vector<cg_test::Chunk> chain = publish(1, 3, 20);
    dir.write("m/contexts/c/context.json", std::string("{}"));
    open(1 << 20);
    FILE *null = fopen("/dev/null", "we");
    ASSERT_NE(null, nullptr);
    {
        const cg_test::OpenHook hook(
            [&](int, const char *name) { return strcmp(name, "context.json") == 0 ? EAGAIN : 0; });
        cg_survey survey;
        ASSERT_EQ(cg_survey_make(dir.fd, nullptr, nullptr, &survey), CG_OK);
        EXPECT_TRUE(survey.has_unknown);
        cg_survey_free(&survey);
        cg_space_tend(fs->fs);
        EXPECT_EQ(cg_gc(dir.path.c_str(), true, true, null), 2);
        for (const cg_test::Chunk &chunk : chain)
            EXPECT_EQ(levels_of(chunk), 2u | 4u | 8u);
        fs->mkdirs("m/contexts/d/L3");
        cg_fs_file *file;
        ASSERT_EQ(fs->create("m/contexts/d/L3/00000.kv", &file), 0) << "something may go";
        fs->close(file);
        EXPECT_TRUE(cg_space_is_due(fs->fs, now_s() + 11));
    }
    fclose(null);
    cg_space_tend(fs->fs);
    EXPECT_LE(used(), (1u << 20) / 100 * 90);
}

// A context that may not be read keeps its own model, and the lease the other.
TEST_F(SpaceTest, ALeaseIsWaitedForBesideAContextThatMayNotBeRead)
{
    publish(1, 3, 20);
    dir.write("m/contexts/c/context.json", std::string("{}"));
    dir.write("other/contexts/secret/context.json", std::string("{}"));
    open(1 << 20);
    bool is_leased = true;
    const cg_test::OpenHook hook([&](int, const char *name) {
        return strcmp(name, "secret") == 0                      ? EACCES
               : is_leased && strcmp(name, "context.json") == 0 ? EAGAIN
                                                                : 0;
    });
    cg_space_tend(fs->fs);
    EXPECT_EQ(metric("evicted_bytes_total"), 0u);
    fs->mkdirs("m/contexts/d/L3");
    cg_fs_file *file;
    ASSERT_EQ(fs->create("m/contexts/d/L3/00000.kv", &file), 0) << "something may go";
    fs->close(file);
    EXPECT_TRUE(cg_space_is_due(fs->fs, now_s() + 11));
    is_leased = false;
    cg_space_tend(fs->fs);
    EXPECT_LE(used(), (1u << 20) / 100 * 90);
}

TEST_F(SpaceTest, WhatComesWhileRoomIsMadeIsNoFullStore)
{
    publish(1, 3, 0);
    publish(2, 6, 20);
    open();
    fs->mkdirs("m/contexts/c/L3");
    const cg_test::Chunk large =
        cg_test::make_chunk(nullptr, cg_test::draw_tokens(16, 5), CG_L3, &profile, QUOTA / 10 * 4);
    cg_fs_file *file;
    bool has_come = false;
    {
        const cg_test::FsyncHook hook(
            [&](int) { /* of a chunk that loses its fine levels */
                       if (has_come)
                           return 0;
                       has_come = true;
                       EXPECT_EQ(fs->create("m/contexts/c/L3/00000.kv", &file), 0);
                       EXPECT_EQ(fs->write(file, large.bytes), 0);
                       EXPECT_EQ(fs->close(file), 0);
                       return 0;
            });
        cg_space_tend(fs->fs);
    }
    ASSERT_TRUE(has_come);
    ASSERT_GT(used(), QUOTA);
    ASSERT_EQ(fs->create("m/contexts/c/L3/00001.kv", &file), 0) << "there is something that may go";
    fs->close(file);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    EXPECT_TRUE(cg_space_is_due(fs->fs, now.tv_sec));
    cg_space_tend(fs->fs);
    EXPECT_LE(used(), QUOTA / 100 * 90);
}

// As where another daemon looks through the store at the same time, and reading counts as use.
TEST_F(SpaceTest, WhatIsUsedWhileRoomIsMadeIsLookedAtAgainSoon)
{
    publish(1, 3, 0);
    publish(2, 6, 20);
    open();
    bool is_used = false;
    {
        const cg_test::FsyncHook hook([&](int) { // of a chunk that loses its fine levels
            if (!is_used)
                for (const std::string &name : dir.files("m/objects"))
                    use(name, 0);
            is_used = true;
            return 0;
        });
        cg_space_tend(fs->fs);
    }
    ASSERT_TRUE(is_used);
    ASSERT_GT(used(), QUOTA);
    fs->mkdirs("m/contexts/c/L3");
    cg_fs_file *file;
    ASSERT_EQ(fs->create("m/contexts/c/L3/00000.kv", &file), 0) << "there is something that may go";
    fs->close(file);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    EXPECT_FALSE(cg_space_is_due(fs->fs, now.tv_sec));
    EXPECT_TRUE(cg_space_is_due(fs->fs, now.tv_sec + 60));
    cg_space_tend(fs->fs);
    EXPECT_LE(used(), QUOTA / 100 * 90);
    EXPECT_FALSE(cg_space_is_due(fs->fs, now.tv_sec + 60));
}

TEST_F(SpaceTest, AnErrorOfTheDiskLosesNothing)
{
    const std::vector<cg_test::Chunk> cold = publish(1, 4, 20);
    open(2 << 20);
    {
        const cg_test::FsyncHook hook([](int) { return EIO; });
        cg_space_tend(fs->fs);
    }
    for (const cg_test::Chunk &chunk : cold)
        EXPECT_TRUE(levels_of(chunk) & 8u || !dir.has(path_of(chunk, CG_L1)));
    EXPECT_GT(metric("evict_errors_total"), 0u);
    cg_space_tend(fs->fs);
    EXPECT_LE(used(), (2u << 20) / 100 * 90);
}

// A store that is a small file system of its own. Its objects take 3.6 MB.
class FullDiskTest : public SpaceTest
{
  protected:
    void SetUp() override
    {
        if (mount("tmpfs", dir.path.c_str(), "tmpfs", MS_NOSUID | MS_NODEV, "size=4m") != 0)
            GTEST_SKIP() << "cannot mount a small tmpfs: a full disk is not tested";
        ::close(dir.fd);
        dir.fd = ::open(dir.path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        chain = publish(1, 6, 20);
    }
    void TearDown() override
    {
        fs.reset();
        if (!chain.empty()) {
            ::close(dir.fd);
            dir.fd = -1;
            EXPECT_EQ(umount2(dir.path.c_str(), MNT_DETACH), 0);
        }
    }
    // To the last block.
    void fill(const std::string &name)
    {
        const int fd = openat(dir.fd, name.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
        const cg_test::Bytes block(4096, 1);
        while (::write(fd, block.data(), block.size()) > 0) {
        }
        EXPECT_EQ(errno, ENOSPC);
        ::close(fd);
        EXPECT_EQ(left(), 0u);
    }
    uint64_t left()
    {
        struct statvfs disk = {};
        EXPECT_EQ(fstatvfs(dir.fd, &disk), 0);
        return disk.f_bavail * disk.f_frsize;
    }
    std::vector<cg_test::Chunk> chain;
};

TEST_F(FullDiskTest, ADaemonThatRunsTakesTheLease)
{
    OwnStaging own(dir), other(dir);
    fill("rest");
    EXPECT_TRUE(cg_lease_take(&own.staging, "evicting"));
    EXPECT_FALSE(cg_lease_take(&other.staging, "evicting"));
    ::close(own.staging.lock_fd); // as by a kill
    own.staging.lock_fd = -1;
    EXPECT_TRUE(cg_lease_take(&other.staging, "evicting"));
    EXPECT_FALSE(cg_lease_holds(&own.staging, "evicting"));
}

TEST_F(FullDiskTest, MakingRoomBeginsWithWholeChunksWhereACutHasNoRoom)
{
    open(3 << 20);
    fill("rest");
    cg_space_tend(fs->fs);
    EXPECT_LE(used(), (3u << 20) / 100 * 90);
    EXPECT_EQ(metric("evict_errors_total"), 0u);
    EXPECT_EQ(metric("evictions_total{what=\"file\"}"), 1u) << "then there is room for copies";
    EXPECT_GT(metric("evictions_total{what=\"finest_levels\"}"), 1u);
    EXPECT_EQ(levels_of(chain.back()), 0u) << "from the tail";
    for (size_t i = 0; i + 1 < chain.size(); i++)
        EXPECT_TRUE(levels_of(chain[i]) & 8u) << i;
}

TEST_F(FullDiskTest, AQuotaBeyondTheDiskMakesRoomOnTheDisk)
{
    open(uint64_t{1} << 40);
    fill("rest"); // of somebody who shares the disk
    const cg_test::Bytes one(1 << 16);
    EXPECT_EQ(fs->put("m/part", one), ENOSPC);
    cg_space_tend(fs->fs);
    EXPECT_GT(left(), (4u << 20) / 100 * 8);
    EXPECT_LT(left(), (4u << 20) / 100 * 25) << "no more than was wanted";
    EXPECT_GT(metric("evicted_bytes_total"), 0u);
    EXPECT_EQ(fs->put("m/part", one), 0);
    struct statvfs disk, shown;
    ASSERT_EQ(fstatvfs(dir.fd, &disk), 0);
    ASSERT_EQ(cg_fs_statfs(fs->fs, &shown), 0);
    EXPECT_EQ(shown.f_blocks, disk.f_blocks);
    EXPECT_EQ(shown.f_bavail, disk.f_bavail);
    EXPECT_EQ(metric("quota_bytes"), uint64_t{1} << 40) << "as it was given";
    // What comes through the mount counts at once.
    EXPECT_FALSE(cg_space_is_due(fs->fs, now_s()));
    fill("m/more");
    publish_here(fs->fs, 1 << 20);
    EXPECT_TRUE(cg_space_is_due(fs->fs, now_s()));
}

// As where a snapshot has it, another file shares its extents, or somebody has it open.
TEST_F(FullDiskTest, WhatGivesTheDiskNoRoomStays)
{
    static const char TOLD[] = "gave its disk no room";
    open(uint64_t{1} << 40);
    fill("rest");
    const auto n_left = [this] {
        size_t n = 0;
        for (const cg_test::Chunk &chunk : chain)
            n += levels_of(chunk) != 0;
        return n;
    };
    std::vector<int> held;
    for (const cg_test::Chunk &chunk : chain) {
        held.push_back(openat(dir.fd, path_of(chunk, CG_L1).c_str(), O_RDONLY | O_CLOEXEC));
        ASSERT_GE(held.back(), 0);
    }
    cg_space_tend(fs->fs);
    const size_t n = n_left();
    EXPECT_LT(n, chain.size());
    EXPECT_EQ(fs->log().find(TOLD), std::string::npos);
    for (int i = 0; i < 5; i++)
        cg_space_tend(fs->fs);
    ASSERT_GT(n, 0u);
    EXPECT_EQ(n_left(), n);
    EXPECT_EQ(left(), 0u);
    const std::string log = fs->log();
    ASSERT_NE(log.find(TOLD), std::string::npos) << log;
    EXPECT_EQ(log.find(TOLD), log.rfind(TOLD)) << "once";
    cg_fs_file *file;
    fs->mkdirs("m/contexts/d/L3");
    EXPECT_EQ(fs->create("m/contexts/d/L3/00000.kv", &file), ENOSPC) << "the disk is full";
    // They let go: the disk has the room, and when it is full again, room is made again.
    for (const int fd : held)
        ::close(fd);
    EXPECT_GT(left(), 0u);
    cg_space_tend(fs->fs);
    EXPECT_EQ(n_left(), n) << "there is room";
    fill("more");
    cg_space_tend(fs->fs);
    EXPECT_LT(n_left(), n);
    EXPECT_GT(left(), 0u);
}

TEST_F(FullDiskTest, WhatOthersTakeAtOnceWasNotInVain)
{
    if (mount(nullptr, dir.path.c_str(), nullptr, MS_REMOUNT | MS_NOSUID | MS_NODEV, "size=32m") !=
        0)
        GTEST_SKIP() << "cannot change a tmpfs's limit";
    publish(2, 30, 20);
    open(uint64_t{1} << 40);
    fill("rest");
    // They have all that came before the step that is under way, and what somebody has seen.
    fsblkcnt_t n_taken = 0;
    const auto n_free = [this] {
        struct statfs disk = {};
        EXPECT_EQ(fstatfs(dir.fd, &disk), 0);
        return static_cast<fsblkcnt_t>(disk.f_bavail);
    };
    const cg_test::StatHook step([&](const char *) { n_taken = n_free(); });
    const cg_test::StatvfsHook hook([&](struct statvfs *disk) {
        const fsblkcnt_t n = n_free();
        disk->f_bfree = disk->f_bavail = n > n_taken ? n - n_taken : 0;
        n_taken = n;
    });
    uint64_t evicted = 0;
    for (int i = 0; i < 3; i++) {
        cg_space_tend(fs->fs);
        const uint64_t now = metric("evicted_bytes_total");
        EXPECT_GT(now, evicted) << i;
        evicted = now;
    }
    EXPECT_EQ(fs->log().find("gave its disk no room"), std::string::npos) << fs->log();
}

// As on ext4, where root has filled what is kept for it.
TEST_F(FullDiskTest, RoomThatTheDiskKeepsForRootWasNotInVain)
{
    const fsblkcnt_t n_kept = (1 << 20) / 4096;
    const cg_test::StatvfsHook hook([&](struct statvfs *disk) {
        disk->f_bavail = disk->f_bfree > n_kept ? disk->f_bfree - n_kept : 0;
    });
    open(uint64_t{1} << 40);
    fill("rest");
    for (int i = 0; i < 8; i++)
        cg_space_tend(fs->fs);
    EXPECT_GT(left(), 0u);
    EXPECT_NE(levels_of(chain[0]), 0u) << "no more than was wanted";
    EXPECT_EQ(fs->log().find("gave its disk no room"), std::string::npos) << fs->log();
}

// Its own quota is met all the same.
TEST_F(FullDiskTest, WhatGivesTheDiskNoRoomStillGoesForTheQuota)
{
    // The disk says that it is full, whatever goes.
    const cg_test::StatvfsHook hook(
        [](struct statvfs *disk) { disk->f_bfree = disk->f_bavail = 0; });
    const uint64_t quota = used() + 100'000;
    open(quota);
    for (int i = 0; i < 4; i++)
        cg_space_tend(fs->fs);
    const uint64_t kept = used();
    cg_space_tend(fs->fs);
    ASSERT_EQ(used(), kept) << "nothing more for the disk";
    publish(2, 1, 20);
    cg_space_tend(fs->fs);
    EXPECT_LE(used(), quota / 100 * 90);
}

// Nothing of what others write comes through the mount.
TEST_F(FullDiskTest, WhoFindsTheDiskFullMakesALookDue)
{
    const cg_test::Bytes one(1 << 16);
    open(uint64_t{1} << 40);
    fill("rest");
    cg_space_tend(fs->fs);
    ASSERT_GT(left(), 0u);
    fill("more");
    EXPECT_FALSE(cg_space_is_due(fs->fs, now_s() + 500));
    EXPECT_EQ(fs->put("m/part", one), ENOSPC);
    EXPECT_FALSE(cg_space_is_due(fs->fs, now_s())) << "not at each write";
    EXPECT_TRUE(cg_space_is_due(fs->fs, now_s() + 11));
    cg_space_tend(fs->fs);
    EXPECT_EQ(fs->put("m/part", one), 0);
    EXPECT_FALSE(cg_space_is_due(fs->fs, now_s() + 500));
    // A chunk that finds no room when it is published.
    fs->mkdirs("m/contexts/d/L3");
    const cg_test::Chunk next =
        cg_test::make_chunk(nullptr, cg_test::draw_tokens(16, 9), CG_L3, &profile);
    const cg_test::FsyncHook hook([](int) { return EDQUOT; });
    EXPECT_EQ(fs->put("m/contexts/d/L3/00000.kv", next.bytes), EDQUOT);
    EXPECT_TRUE(cg_space_is_due(fs->fs, now_s() + 11));
}

TEST_F(SpaceTest, WhateverFindsTheDiskFullMakesALookDue)
{
    static const char VALUE[] = "v";
    open(uint64_t{1} << 40);
    fs->mkdirs("m/contexts/d/L3");
    const cg_test::Bytes one(1 << 16);
    ASSERT_EQ(fs->put("m/from", one), 0);
    ASSERT_EQ(fs->put("m/part", one), 0);
    const cg_test::Chunk next =
        cg_test::make_chunk(nullptr, cg_test::draw_tokens(16, 9), CG_L3, &profile);
    cg_fs_file *from, *part;
    ASSERT_EQ(fs->open("m/from", O_RDONLY, &from), 0);
    ASSERT_EQ(fs->open("m/part", O_WRONLY, &part), 0);
    const auto finds_no_room = [this](const char *what, auto call) {
        SCOPED_TRACE(what);
        cg_space_tend(fs->fs);
        EXPECT_FALSE(cg_space_is_due(fs->fs, now_s() + 500));
        EXPECT_EQ(call(), ENOSPC);
        EXPECT_TRUE(cg_space_is_due(fs->fs, now_s() + 11));
    };
    {
        const cg_test::OpenHook hook(
            [](int, const char *name) { return strcmp(name, "new") == 0 ? ENOSPC : 0; });
        cg_fs_file *file;
        finds_no_room("create", [&] { return fs->create("m/new", &file); });
    }
    {
        const cg_test::FsyncHook hook([](int) { return ENOSPC; });
        finds_no_room("fsync", [&] { return cg_fs_fsync(fs->fs, part, false); });
    }
    const char *failing = "";
    const cg_test::ChangeHook hook(
        [&](const char *call) { return strcmp(call, failing) == 0 ? ENOSPC : 0; });
    const auto is_told = [&](const char *call, auto operation) {
        finds_no_room(call, [&] {
            failing = call;
            const int error = operation();
            failing = "";
            return error;
        });
    };
    cg_fs_entry entry;
    size_t n;
    is_told("mkdirat", [&] { return fs->mkdir("m/new"); });
    is_told("symlinkat", [&] { return fs->symlink("m", "m/new"); });
    is_told("mknodat", [&] {
        return cg_fs_mknod(fs->fs, &fs->caller, fs->find("m"), "new", S_IFREG | 0600, 0, &entry);
    });
    is_told("linkat", [&] { return fs->link("m/part", "m/new"); });
    is_told("renameat2", [&] { return fs->rename("m/part", "m/new"); });
    is_told("ftruncate", [&] { return fs->truncate("m/part", 1); });
    is_told("ftruncate", [&] { return cg_fs_ftruncate(fs->fs, part, 1); });
    is_told("fallocate", [&] { return cg_fs_fallocate(fs->fs, part, 0, 0, 1); });
    is_told("copy_file_range", [&] { return cg_fs_copy_range(fs->fs, from, 0, part, 0, 1, &n); });
    is_told("setxattr", [&] {
        return cg_fs_setxattr(fs->fs, fs->find("m/part"), "user.v", VALUE, sizeof VALUE, 0);
    });
    is_told("mkdirat", [&] { // of an object's folder: the chunk is published, and not adopted
        EXPECT_EQ(fs->put("m/contexts/d/L3/00000.kv", next.bytes), 0);
        return metric("adopt_errors_total") == 1 ? ENOSPC : 0;
    });
    fs->close(from);
    fs->close(part);
}

TEST_F(FullDiskTest, ADiskThatContextsFillIsToldOf)
{
    make_context("c", chain, 0);
    open(uint64_t{1} << 40);
    fill("rest");
    cg_space_tend(fs->fs);
    EXPECT_NE(fs->log().find("all of what its disk has for it"), std::string::npos) << fs->log();
    cg_fs_file *file;
    fs->mkdirs("m/contexts/d/L3");
    EXPECT_EQ(fs->create("m/contexts/d/L3/00000.kv", &file), ENOSPC);
    EXPECT_EQ(unlinkat(dir.fd, "rest", 0), 0);
    cg_space_tend(fs->fs);
    ASSERT_EQ(fs->create("m/contexts/d/L3/00000.kv", &file), 0);
    fs->close(file);
}

TEST_F(FullDiskTest, ADiskWithoutAnEndIsNotFull)
{
    if (mount(nullptr, dir.path.c_str(), nullptr, MS_REMOUNT | MS_NOSUID | MS_NODEV, "size=0") != 0)
        GTEST_SKIP() << "cannot take away a tmpfs's limit";
    open(uint64_t{1} << 40);
    cg_space_tend(fs->fs);
    EXPECT_EQ(metric("evicted_bytes_total"), 0u);
    for (const cg_test::Chunk &chunk : chain)
        EXPECT_EQ(levels_of(chunk), 2u | 4u | 8u);
}

// As of a network's file system that says what it likes.
TEST_F(SpaceTest, ADiskWithoutAnEndOrABlockIsNotFull)
{
    const std::vector<cg_test::Chunk> chain = publish(1, 6, 20);
    const struct {
        uint64_t blocks, block_bytes;
    } cases[] = {{UINT64_MAX, 4096}, {UINT64_MAX / 4096, 4096}, {UINT64_MAX, 1}, {1000, 0}};
    for (const auto &c : cases) {
        SCOPED_TRACE(c.blocks);
        const cg_test::StatvfsHook hook([&](struct statvfs *disk) {
            disk->f_blocks = disk->f_bfree = disk->f_bavail = c.blocks;
            disk->f_frsize = c.block_bytes;
        });
        open(uint64_t{1} << 40);
        cg_space_tend(fs->fs);
        EXPECT_EQ(metric("evicted_bytes_total"), 0u);
        for (const cg_test::Chunk &chunk : chain)
            EXPECT_EQ(levels_of(chunk), 2u | 4u | 8u);
    }
}

TEST_F(FullDiskTest, AStartRemovesFirstWhatAKilledDaemonLeft)
{
    OwnStaging killed(dir);
    fill(std::string(CG_STAGING_DIRECTORY "/") + killed.staging.own + "/0");
    ::close(killed.staging.lock_fd);
    killed.staging.lock_fd = -1;
    open();
    EXPECT_GT(left(), 100'000u);
    EXPECT_EQ(fs->mkdir("m/other"), 0);
    EXPECT_NE(fs->log().find("removed 1 unfinished"), std::string::npos);
}

TEST_F(FullDiskTest, WithoutRoomForADaemonItIsReadOnlyUntilGcMakesRoom)
{
    fill("rest");
    open();
    EXPECT_NE(fs->log().find("read-only"), std::string::npos);
    EXPECT_EQ(fs->mkdir("m/other"), EROFS);
    EXPECT_FALSE(fs->get(path_of(chain[0], CG_L3)).empty());
    fs.reset();
    EXPECT_TRUE(std::filesystem::is_empty(dir.path + "/" CG_STAGING_DIRECTORY));
    FILE *null = fopen("/dev/null", "we");
    ASSERT_NE(null, nullptr);
    EXPECT_EQ(cg_gc(dir.path.c_str(), true, true, null), 0);
    fclose(null);
    EXPECT_EQ(levels_of(chain[0]), 0u);
    EXPECT_GT(left(), 3'000'000u);
    open();
    EXPECT_EQ(fs->mkdir("m/other"), 0);
}

TEST_F(FullDiskTest, ADaemonWithoutRoomIsReadOnlyNoLongerThanThat)
{
    fill("rest");
    open(2 << 20);
    ASSERT_EQ(fs->mkdir("m/other"), EROFS);
    EXPECT_EQ(unlinkat(dir.fd, "rest", 0), 0);
    std::thread keeper([this] { cg_fs_keep(fs->fs); });
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (fs->mkdir("m/other") == EROFS && std::chrono::steady_clock::now() < end)
        std::this_thread::yield();
    EXPECT_EQ(fs->mkdir("m/other"), EEXIST);
    while (metric("evictions_total") == 0 && std::chrono::steady_clock::now() < end)
        std::this_thread::yield();
    EXPECT_GT(metric("evictions_total"), 0u) << "and room is made";
    cg_fs_stop(fs->fs);
    keeper.join();
    EXPECT_NE(fs->log().find("read-only until there is room"), std::string::npos);
    EXPECT_NE(fs->log().find("it can be written"), std::string::npos);
}

TEST_F(FullDiskTest, ADaemonWithoutRoomMakesSomeByItsQuota)
{
    fill("rest");
    open(uint64_t{1} << 40);
    ASSERT_EQ(fs->mkdir("m/other"), EROFS);
    std::thread keeper([this] { cg_fs_keep(fs->fs); });
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (fs->mkdir("m/other") == EROFS && std::chrono::steady_clock::now() < end)
        std::this_thread::yield();
    EXPECT_EQ(fs->mkdir("m/other"), EEXIST);
    cg_fs_stop(fs->fs);
    keeper.join();
    EXPECT_EQ(levels_of(chain.back()), 0u) << "from the tail";
    for (size_t i = 0; i < 3; i++)
        EXPECT_EQ(levels_of(chain[i]), 2u | 4u | 8u) << "no more than was needed";
    EXPECT_EQ(fs->put("m/part", cg_test::Bytes(1 << 14)), 0);
}

TEST_F(FullDiskTest, TheFirstRoomIsOnlyWhatMayGo)
{
    static const char TOLD[] = "nothing is left that may go";
    fill("rest");
    const auto evicted_at = [this](int64_t at_s) {
        const uint64_t before = metric("evicted_bytes_total");
        cg_space_make_first_room(
            fs->fs, now_s() + at_s, [](void *) { return false; }, nullptr);
        return metric("evicted_bytes_total") - before;
    };
    open(0);
    EXPECT_EQ(evicted_at(0), 0u) << "without a quota";
    open(uint64_t{1} << 40);
    make_context("c", chain, 0);
    EXPECT_EQ(evicted_at(0), 0u);
    EXPECT_EQ(evicted_at(60), 0u);
    const std::string log = fs->log();
    ASSERT_NE(log.find(TOLD), std::string::npos) << log;
    EXPECT_EQ(log.find(TOLD), log.rfind(TOLD)) << "once";
    for (const cg_test::Chunk &chunk : chain)
        EXPECT_EQ(levels_of(chunk), 2u | 4u | 8u);
    // Now it may, but somebody has it all open.
    std::filesystem::remove_all(dir.path + "/m/contexts");
    fill("more");
    std::vector<int> held;
    for (const cg_test::Chunk &chunk : chain)
        held.push_back(openat(dir.fd, path_of(chunk, CG_L1).c_str(), O_RDONLY | O_CLOEXEC));
    EXPECT_GT(evicted_at(120), 0u);
    EXPECT_EQ(evicted_at(121), 0u) << "too soon";
    EXPECT_EQ(left(), 0u);
    for (int i = 3; i < 9; i++)
        EXPECT_EQ(evicted_at(60 * i), 0u) << "in vain";
    EXPECT_EQ(levels_of(chain[3]), 2u | 4u | 8u);
    for (const int fd : held)
        ::close(fd);
}

// As for a daemon that is not root, where root has filled what the disk keeps for it.
TEST_F(FullDiskTest, TheFirstRoomIsMadeUntilItIsEnough)
{
    if (mount(nullptr, dir.path.c_str(), nullptr, MS_REMOUNT | MS_NOSUID | MS_NODEV, "size=64m") !=
        0)
        GTEST_SKIP() << "cannot change a tmpfs's limit";
    publish(2, 60, 20);
    fill("rest");
    open(uint64_t{1} << 40);
    int n_asked = 0;
    cg_space_make_first_room(
        fs->fs, now_s(), [](void *n) { return ++*static_cast<int *>(n) == 3; }, &n_asked);
    EXPECT_EQ(n_asked, 3);
    EXPECT_GE(left(), 3u << 20);
    EXPECT_LT(left(), 4u << 20);
}

// No look tells of it, since none ends well.
TEST_F(FullDiskTest, AStoreIsNotFullAnyMoreOnceOthersMadeTheFirstRoom)
{
    make_context("c", chain, 0);
    fill("rest");
    open(uint64_t{1} << 40);
    cg_space_make_first_room(
        fs->fs, now_s(), [](void *) { return false; }, nullptr);
    EXPECT_NE(fs->log().find("nothing is left that may go"), std::string::npos);
    std::atomic<int> n_failed = 0;
    const cg_test::OpenHook hook([&](int, const char *name) {
        if (strcmp(name, "contexts") != 0)
            return 0;
        n_failed++;
        return EIO;
    });
    EXPECT_EQ(unlinkat(dir.fd, "rest", 0), 0);
    std::thread keeper([this] { cg_fs_keep(fs->fs); });
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while ((fs->mkdir("m/other") == EROFS || n_failed == 0) &&
           std::chrono::steady_clock::now() < end)
        std::this_thread::yield();
    EXPECT_EQ(fs->put(path_of(chain[0], CG_L0), cg_test::Bytes(10)), EBADMSG) << "not ENOSPC";
    cg_fs_stop(fs->fs);
    keeper.join();
    fs.reset(); // it has threads that open files, and the hook goes first
}

TEST_F(FullDiskTest, AnErrorWhileItWaitsForRoomDoesNotEndTheWait)
{
    fill("rest");
    open();
    ASSERT_EQ(fs->mkdir("m/other"), EROFS);
    EXPECT_EQ(unlinkat(dir.fd, "rest", 0), 0);
    std::atomic<int> n_failed = 0;
    std::atomic<bool> fails = true;
    const cg_test::OpenHook hook([&](int, const char *name) {
        if (strcmp(name, CG_STAGING_DIRECTORY) != 0 || !fails)
            return 0;
        n_failed++;
        return EMFILE;
    });
    std::thread keeper([this] { cg_fs_keep(fs->fs); });
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (n_failed < 2 && std::chrono::steady_clock::now() < end)
        std::this_thread::yield();
    EXPECT_GE(n_failed, 2);
    fails = false;
    while (fs->mkdir("m/other") == EROFS && std::chrono::steady_clock::now() < end)
        std::this_thread::yield();
    EXPECT_EQ(fs->mkdir("m/other"), EEXIST);
    cg_fs_stop(fs->fs);
    keeper.join();
    const std::string log = fs->log(), told = strerror(EMFILE);
    fs.reset(); // it has threads that open files, and the hook goes first
    ASSERT_NE(log.find(told), std::string::npos) << log;
    EXPECT_EQ(log.find(told), log.rfind(told)) << "once";
}

TEST_F(FullDiskTest, ARepairRemovesWhatItCan)
{
    const std::string unfinished = "m/contexts/c/L1/.00000.kv.0123456789abcdef.tmp";
    cg_test::Bytes bad = chain[1].bytes;
    bad[bad.size() - 50] ^= 1; // the coarser levels are whole
    dir.write(path_of(chain[1], CG_L1), bad);
    use(path_of(chain[1], CG_L1), 20); // or it passes for one that is being written
    dir.write(unfinished, cg_test::Bytes(4096));
    use(unfinished, 20);
    fill("rest");
    char *text = nullptr;
    size_t n_bytes = 0;
    FILE *out = open_memstream(&text, &n_bytes);
    EXPECT_EQ(cg_fsck(dir.path.c_str(), true, out), 2);
    fclose(out);
    EXPECT_NE(std::string(text).find("1 files left unfinished"), std::string::npos) << text;
    EXPECT_NE(std::string(text).find("cannot be cut: No space"), std::string::npos) << text;
    free(text);
    EXPECT_FALSE(dir.has(unfinished));
    EXPECT_EQ(levels_of(chain[0]), 2u | 4u | 8u);
}

TEST_F(SpaceTest, GoesAwayWithItsFolder)
{
    const std::vector<cg_test::Chunk> cold = publish(1, 8, 40), hot = publish(2, 2, 0);
    for (size_t i = 0; i < cold.size(); i += 2) // as older stores have it
        dir.write(std::filesystem::path(path_of(cold[i], CG_L1)).replace_filename("tokens"), "ids");
    open((1 << 20) + (200 << 10));
    cg_space_tend(fs->fs);
    size_t n_gone = 0;
    for (size_t i = 0; i < cold.size(); i++) {
        const std::string folder = std::filesystem::path(path_of(cold[i], CG_L1)).parent_path();
        const bool is_gone = levels_of(cold[i]) == 0;
        n_gone += is_gone;
        EXPECT_EQ(dir.has(folder), !is_gone) << "with all that is in it";
        if (is_gone && i + 1 < cold.size()) {
            EXPECT_EQ(levels_of(cold[i + 1]), 0u) << "a chain goes from its tail";
        }
    }
    EXPECT_GT(n_gone, 0u);
    EXPECT_EQ(metric("evictions_total{what=\"file\"}"), n_gone);
    EXPECT_NE(levels_of(hot[0]), 0u);
}

TEST(ContextsTest, ReadsTimes)
{
    const struct {
        const char *text;
        int64_t seconds; // 0: refused
    } cases[] = {{"1", 1},
                 {"90s", 90},
                 {"2m", 120},
                 {"3h", 10800},
                 {"7d", 7 * DAY_S},
                 {"2w", 14 * DAY_S},
                 {"", 0},
                 {"0", 0},
                 {"0d", 0},
                 {"d", 0},
                 {"-1d", 0},
                 {"1.5d", 0},
                 {"7dd", 0},
                 {"7x", 0},
                 {" 7", 0},
                 {"99999999999999999999", 0},
                 {"9999999999999w", 0}};
    for (const auto &c : cases) {
        int64_t seconds = 0;
        EXPECT_EQ(cg_context_parse_time(c.text, strlen(c.text), &seconds), c.seconds > 0) << c.text;
        EXPECT_EQ(seconds, c.seconds) << c.text;
    }
}

TEST_F(SpaceTest, ExpiredContextsGoFirstAndPinnedOnesStay)
{
    const std::vector<cg_test::Chunk> kept = publish(1, 4, 20), pinned = publish(2, 4, 20),
                                      expired = publish(3, 4, 20), cold = publish(4, 1, 20);
    make_context("kept", kept, 10);
    make_context("pinned", pinned, 10);
    make_context("expired", expired, 10);
    if (setxattr((dir.path + "/m/contexts/pinned").c_str(), CG_CONTEXT_PIN, "", 0, 0) != 0)
        GTEST_SKIP() << "no extended attributes here: expiry is not checked";
    ASSERT_TRUE(set_ttl("kept", "11d") && set_ttl("pinned", "1d") && set_ttl("expired", "1d"));
    open(1 << 30);
    cg_space_tend(fs->fs);
    EXPECT_TRUE(dir.has("m/contexts/expired")) << "there is room";
    open(used());
    cg_space_tend(fs->fs);
    EXPECT_FALSE(dir.has("m/contexts/expired"));
    EXPECT_TRUE(dir.has("m/contexts/pinned/L1/00003.kv"));
    EXPECT_TRUE(dir.has("m/contexts/kept/L1/00003.kv"));
    EXPECT_EQ(metric("expired_contexts_total"), 1u);
    for (const cg_test::Chunk &chunk : kept)
        EXPECT_EQ(levels_of(chunk), 2u | 4u | 8u);
    for (const cg_test::Chunk &chunk : pinned)
        EXPECT_EQ(levels_of(chunk), 2u | 4u | 8u);
    EXPECT_EQ(levels_of(cold[0]), 2u | 4u | 8u) << "what expired goes first";
    EXPECT_EQ(levels_of(expired[0]) & 2u, 0u);
}

TEST_F(SpaceTest, WhatWasUsedSinceItsContextExpiredGoesInItsTurn)
{
    const std::vector<cg_test::Chunk> expired = publish(1, 1, 1), shared = publish(2, 1, 4),
                                      cold = publish(3, 4, 40);
    make_context("long ago", {expired[0], shared[0]}, 10);
    make_context("yesterday", shared, 10);
    if (!set_ttl("long ago", "1d"))
        GTEST_SKIP() << "no extended attributes here: expiry is not checked";
    ASSERT_TRUE(set_ttl("yesterday", "9d"));
    open(used() / 10 * 7);
    cg_space_tend(fs->fs);
    EXPECT_EQ(metric("expired_contexts_total"), 2u);
    EXPECT_EQ(levels_of(expired[0]), 2u | 4u | 8u) << "used since";
    EXPECT_EQ(levels_of(shared[0]), 0u) << "not since the later one's time was over";
    EXPECT_NE(levels_of(cold[3]), 2u | 4u | 8u);
}

// The second quota is looked after by another survey, and what lost levels for the first is in
// other files by then.
TEST_F(SpaceTest, WhatExpiredGoesFirstForEachQuota)
{
    const std::vector<cg_test::Chunk> expired = publish(1, 8, 15), cold = publish(2, 4, 20);
    make_context("c", expired, 10);
    if (!set_ttl("c", "1d"))
        GTEST_SKIP() << "no extended attributes here: expiry is not checked";
    const uint64_t used_bytes = used();
    cg_fs_config config = {};
    cg_model_quota quotas[] = {{"m", 0}};
    quotas[0].bytes = used_bytes / 10 * 9;
    config.model_quotas = quotas;
    config.n_model_quotas = 1;
    config.quota_bytes = used_bytes / 10 * 6;
    fs = std::make_unique<cg_test::Fs>(dir.path, config);
    cg_space_tend(fs->fs);
    EXPECT_LE(used(), config.quota_bytes / 100 * 90);
    EXPECT_EQ(metric("expired_contexts_total"), 1u);
    for (const cg_test::Chunk &chunk : cold)
        EXPECT_EQ(levels_of(chunk), 2u | 4u | 8u);
}

// Those of another model would give this one no room.
TEST_F(SpaceTest, ForAModelsQuotaContextsOfTheModelExpire)
{
    make_context("c", publish(1, 2, 20), 10);
    publish(2, 4, 20);
    dir.write("other/contexts/c/context.json", std::string("{}"));
    use("other/contexts/c/context.json", 10);
    const std::string other = dir.path + "/other/contexts/c";
    if (!set_ttl("c", "1d"))
        GTEST_SKIP() << "no extended attributes here: expiry is not checked";
    ASSERT_EQ(setxattr(other.c_str(), CG_CONTEXT_TTL, "1d", 2, 0), 0);
    cg_fs_config config = {};
    cg_model_quota quotas[] = {{"other", 1 << 20}, {"m", 0}};
    quotas[1].bytes = used() / 10 * 9;
    config.model_quotas = quotas;
    config.n_model_quotas = 2;
    config.quota_bytes = 1 << 30;
    fs = std::make_unique<cg_test::Fs>(dir.path, config);
    cg_space_tend(fs->fs);
    EXPECT_FALSE(dir.has("m/contexts/c"));
    EXPECT_TRUE(dir.has("other/contexts/c"));
    config.quota_bytes = 1 << 20;
    fs = std::make_unique<cg_test::Fs>(dir.path, config);
    cg_space_tend(fs->fs);
    EXPECT_FALSE(dir.has("other/contexts/c")) << "for all models it goes";
}

// What had expired of one model was removed for its own quota, and not that of the others.
TEST_F(SpaceTest, AfterAModelsQuotaContextsOfAllExpireForAll)
{
    publish(1, 4, 20);
    dir.write("other/contexts/c/context.json", std::string("{}"));
    use("other/contexts/c/context.json", 10);
    if (setxattr((dir.path + "/other/contexts/c").c_str(), CG_CONTEXT_TTL, "1d", 2, 0) != 0)
        GTEST_SKIP() << "no extended attributes here: expiry is not checked";
    const uint64_t used_bytes = used();
    cg_fs_config config = {};
    cg_model_quota quotas[] = {{"m", used_bytes / 10 * 9}};
    config.model_quotas = quotas;
    config.n_model_quotas = 1;
    config.quota_bytes = used_bytes / 10 * 6;
    fs = std::make_unique<cg_test::Fs>(dir.path, config);
    cg_space_tend(fs->fs);
    EXPECT_FALSE(dir.has("other/contexts/c"));
    EXPECT_EQ(metric("expired_contexts_total"), 1u);
}

// Here the daemon's clock is 31 days ahead of the store's.
TEST_F(SpaceTest, AgesAreOfTheStoresClock)
{
    const std::vector<cg_test::Chunk> kept = publish(1, 4, 31), cold = publish(2, 4, 60);
    make_context("kept", kept, 31);
    const bool has_ttl = set_ttl("kept", "30d");
    open(used());
    const cg_test::OpenHook hook([&](int, const char *name) { // after the beat before a survey
        if (strcmp(name, "objects") == 0)
            set_clock_back(31);
        return 0;
    });
    cg_space_tend(fs->fs);
    EXPECT_TRUE(dir.has("m/contexts/kept"));
    EXPECT_TRUE(std::any_of(cold.begin(), cold.end(), [this](const cg_test::Chunk &chunk) {
        return levels_of(chunk) != (2u | 4u | 8u);
    })) << "room was made";

    const std::vector<cg_test::Chunk> young = publish(3, 2, 31), old = publish(4, 2, 39);
    cg_fs_config config = {};
    config.store = dir.path.c_str();
    config.keep_s[CG_L2] = 7 * DAY_S;
    cg_fs *keeping = nullptr;
    ASSERT_EQ(cg_fs_new(&config, &keeping), 0);
    cg_space_tend(keeping);
    for (const cg_test::Chunk &chunk : young)
        EXPECT_EQ(levels_of(chunk), 2u | 4u | 8u);
    for (const cg_test::Chunk &chunk : old)
        EXPECT_EQ(levels_of(chunk), 4u | 8u);
    cg_fs_free(keeping);
    if (!has_ttl)
        GTEST_SKIP() << "no extended attributes here: expiry is not checked";
}

// With a long dead_after the last beat may be hours old.
TEST_F(SpaceTest, TheClockIsReadAnewForEachSurvey)
{
    const cg_test::Chunk chunk = publish(1, 1, 8)[0];
    cg_fs_config config = {};
    config.store = dir.path.c_str();
    config.keep_s[CG_L2] = 7 * DAY_S;
    cg_fs *keeping = nullptr;
    ASSERT_EQ(cg_fs_new(&config, &keeping), 0);
    set_clock_back(2);
    cg_space_tend(keeping);
    EXPECT_EQ(levels_of(chunk), 4u | 8u);
    cg_fs_free(keeping);
}

// A step that was chosen by a survey that is no longer true.
TEST_F(SpaceTest, WhatWasUsedOrChangedSinceTheSurveyStays)
{
    const std::vector<cg_test::Chunk> as_it_was = publish(1, 2, 20), used = publish(2, 2, 20),
                                      linked = publish(3, 2, 20), saved = publish(4, 2, 20);
    std::map<std::string, cg_test::Bytes> now;
    OwnStaging own(dir);
    cg_survey survey;
    ASSERT_EQ(cg_survey_make(dir.fd, nullptr, nullptr, &survey), CG_OK);
    for (size_t i = 0; i < 2; i++) {
        use(path_of(used[i], CG_L3), 0);
        ASSERT_EQ(linkat(dir.fd, path_of(linked[i], CG_L2).c_str(), dir.fd,
                         ("m/name" + std::to_string(i)).c_str(), 0),
                  0);
        // Other symbols, so that its levels end elsewhere, under the same inode number.
        const cg_test::Chunk again = cg_test::make_chunk(
            i == 0 ? nullptr : &saved[0], cg_test::draw_tokens(16, 400 + static_cast<uint32_t>(i)),
            CG_L1, &profile, PAYLOAD + 4321, 77, CG_L3);
        ASSERT_TRUE(cg_key_equal(&again.header.key, &saved[i].header.key));
        now[path_of(saved[i], CG_L1)] = again.bytes;
        dir.write(path_of(saved[i], CG_L1), again.bytes);
    }
    for (size_t i = 0; i < survey.n_files; i++) {
        const cg_object_file &file = survey.files[i];
        const bool is_second = file.first_position > 0;
        const auto is_one_of = [&](const std::vector<cg_test::Chunk> &chain) {
            return cg_key_equal(&chain[is_second].header.key, &file.key);
        };
        EXPECT_EQ(cg_drop(&own.staging, dir.fd, &survey, &file, is_second ? CG_N_LEVELS : CG_L2),
                  is_one_of(as_it_was) ? 0 : ESTALE);
    }
    EXPECT_EQ(levels_of(as_it_was[0]), 4u | 8u);
    EXPECT_EQ(levels_of(as_it_was[1]), 0u);
    for (const auto &chain : {used, linked})
        for (const cg_test::Chunk &chunk : chain)
            EXPECT_EQ(levels_of(chunk), 2u | 4u | 8u);
    for (const cg_test::Chunk &chunk : saved)
        for (const unsigned level : {CG_L1, CG_L2, CG_L3})
            EXPECT_TRUE(dir.has(path_of(chunk, level)) &&
                        dir.read(path_of(chunk, level)) == now[path_of(chunk, CG_L1)])
                << level;
    cg_survey_free(&survey);
}

// Of one chain the tail is used after the survey, and another is gone by then.
TEST_F(SpaceTest, WhatLeadsToAChunkThatWasUsedStaysAndWhatIsGoneDoesNotCount)
{
    const std::vector<cg_test::Chunk> chain = publish(1, 3, 20), other = publish(2, 2, 20);
    open(1 << 10);
    int n_looks = 0;
    {
        // The first look at the lease is to take it, the second comes after the survey.
        const cg_test::OpenHook hook([&](int, const char *name) {
            if (strcmp(name, "evicting") == 0 && ++n_looks == 2) {
                use(path_of(chain[2], CG_L3), 0);
                std::filesystem::remove_all(
                    std::filesystem::path(dir.path + "/" + path_of(other[1], CG_L1)).parent_path());
            }
            return 0;
        });
        cg_space_tend(fs->fs);
    }
    ASSERT_GE(n_looks, 2);
    for (const cg_test::Chunk &chunk : chain)
        EXPECT_EQ(levels_of(chunk), 2u | 4u | 8u) << "a chain has no hole";
    EXPECT_EQ(metric("evictions_total{what=\"file\"}"), levels_of(other[0]) == 0 ? 1u : 0u);
    EXPECT_TRUE(cg_space_is_due(fs->fs, now_s() + 11)) << "too little went";
}

// The lease of one was taken away while it works. The other makes the room, and then what was cut
// is published anew: the first still has the steps before it that were right for the old files.
TEST_F(SpaceTest, TwoWhoMakeRoomAtOnceLoseNothingThatIsToStay)
{
    const std::vector<cg_test::Chunk> hot = publish(1, 3, 0), cold = publish(2, 6, 20);
    open();
    cg_test::Fs second(dir.path, false, QUOTA);
    std::vector<const cg_test::Chunk *> anew;
    bool has_begun = false;
    {
        const cg_test::FsyncHook hook([&](int) { // of the first one's first copy
            if (has_begun)
                return 0;
            has_begun = true;
            EXPECT_EQ(unlinkat(dir.fd, CG_STAGING_DIRECTORY "/evicting", 0), 0);
            cg_space_tend(second.fs);
            EXPECT_LE(used(), QUOTA / 100 * 90) << "the first one's copy, too";
            for (const cg_test::Chunk &chunk : cold) {
                if (levels_of(chunk) == (2u | 4u | 8u))
                    continue;
                anew.push_back(&chunk);
                dir.write("m/new", chunk.bytes);
                for (const unsigned level : {CG_L1, CG_L2, CG_L3}) {
                    EXPECT_EQ(linkat(dir.fd, "m/new", dir.fd, "m/link", 0), 0);
                    EXPECT_EQ(renameat(dir.fd, "m/link", dir.fd, path_of(chunk, level).c_str()), 0);
                }
                EXPECT_EQ(unlinkat(dir.fd, "m/new", 0), 0);
            }
            return 0;
        });
        cg_space_tend(fs->fs);
    }
    EXPECT_GT(anew.size(), 0u) << "both wanted the same to go";
    for (const cg_test::Chunk *chunk : anew)
        EXPECT_EQ(levels_of(*chunk), 2u | 4u | 8u);
    for (const cg_test::Chunk &chunk : hot)
        EXPECT_EQ(levels_of(chunk), 2u | 4u | 8u);
    for (const cg_test::Chunk &chunk : cold)
        EXPECT_TRUE(levels_of(chunk) & 8u) << "levels go before chunks";
    EXPECT_EQ(second.metric("evict_errors_total") + metric("evict_errors_total"), 0u);
    for (const std::string &name : dir.files(CG_STAGING_DIRECTORY))
        EXPECT_TRUE(is_of_each_daemon(name)) << name;
}

TEST_F(SpaceTest, RoomIsMadeWhileTheStoreIsLookedThrough)
{
    const int own_nice = getpriority(PRIO_PROCESS, 0);
    std::atomic<bool> is_held{false}, may_go_on{false};
    if (own_nice >= 19)
        GTEST_SKIP() << "no thread could stand back";
    publish(1, 8, 40);
    open();
    const cg_test::OpenHook hook([&](int, const char *) {
        if (getpriority(PRIO_PROCESS, 0) == own_nice) /* on Linux: of this thread */
            return 0;
        is_held = true;
        while (!may_go_on)
            std::this_thread::yield();
        return 0;
    });
    std::thread keeper([this] { cg_fs_keep(fs->fs); });
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while ((!is_held || metric("evictions_total") == 0) && std::chrono::steady_clock::now() < end)
        std::this_thread::yield();
    EXPECT_TRUE(is_held);
    EXPECT_GT(metric("evictions_total"), 0u);
    may_go_on = true;
    cg_fs_stop(fs->fs);
    keeper.join();
}

// One that was used long ago. False: there are no extended attributes.
bool make_context(const cg_test::TempDir &dir, const std::string &name, const char *ttl)
{
    const std::string at = dir.path + "/m/contexts/" + name;
    const struct timespec long_ago[2] = {};
    std::filesystem::create_directories(at + "/L1");
    return setxattr(at.c_str(), CG_CONTEXT_TTL, ttl, strlen(ttl), 0) == 0 &&
           utimensat(dir.fd, at.c_str(), long_ago, 0) == 0;
}

// Between the last look at an expired context and its move another one gets its name; and by the
// time that is found a third one has it, over which a rename is what the file system says.
TEST(ContextsTest, ThatTookTheNameOfAnExpiredOneIsBesideIt)
{
    for (const int taken : {ENOTEMPTY, EEXIST, ENOTDIR, EPERM}) {
        SCOPED_TRACE(strerror(taken));
        const cg_test::TempDir dir;
        const std::string contexts = dir.path + "/m/contexts/";
        if (!make_context(dir, "a", "1d"))
            GTEST_SKIP() << "no extended attributes here: expiry is not checked";
        std::filesystem::create_directories(contexts + "b/mine");
        OwnStaging staging(dir);
        const cg_test::RenameHook hook([&](const char *from, const char *to) {
            if (std::string(from) == "a") {
                std::filesystem::rename(contexts + "a", contexts + "away");
                std::filesystem::rename(contexts + "b", contexts + "a");
            }
            return std::string(to) == "a" ? taken : 0;
        });
        EXPECT_EQ(staging.expire(), 0u);
        EXPECT_TRUE(dir.has("m/contexts/a.1/mine"));
    }
}

// A rename may also be refused for good.
TEST(ContextsTest, ThatMayNotBePutBackDoesNotHoldUsForEver)
{
    const cg_test::TempDir dir;
    const std::string contexts = dir.path + "/m/contexts/";
    if (!make_context(dir, "a", "1d"))
        GTEST_SKIP() << "no extended attributes here: expiry is not checked";
    OwnStaging staging(dir);
    const cg_test::RenameHook hook([&](const char *from, const char *) {
        if (std::string(from) != "a")
            return EPERM;
        std::filesystem::rename(contexts + "a", contexts + "away");
        std::filesystem::create_directories(contexts + "a/mine");
        return 0;
    });
    EXPECT_EQ(staging.expire(), 0u);
}

// What cannot be removed here lies deeper than cg_staging_remove() goes.
TEST(ContextsTest, ExpireAlsoWhereAnEarlierOneCouldNotBeRemoved)
{
    const cg_test::TempDir dir;
    const auto make_stuck = [&] {
        std::string deep = dir.path + "/m/contexts/stuck";
        for (int i = 0; i < 40; i++)
            deep += "/d";
        std::filesystem::create_directories(deep);
        return make_context(dir, "stuck", "1d");
    };
    if (!make_stuck())
        GTEST_SKIP() << "no extended attributes here: expiry is not checked";
    OwnStaging staging(dir);
    const std::string own = dir.path + "/" CG_STAGING_DIRECTORY "/" + staging.staging.own;
    const auto left = [&own] {
        std::vector<std::filesystem::path> paths;
        for (const auto &entry : std::filesystem::directory_iterator(own))
            if (entry.is_directory())
                paths.push_back(entry.path());
        return paths;
    };
    EXPECT_EQ(staging.expire(), 1u);
    ASSERT_EQ(left().size(), 1u);

    ASSERT_TRUE(make_context(dir, "next", "1d"));
    EXPECT_EQ(staging.expire(), 1u);
    EXPECT_FALSE(dir.has("m/contexts/next"));
    ASSERT_EQ(left().size(), 1u);

    std::filesystem::remove_all(left()[0] / "d/d");
    EXPECT_EQ(staging.expire(), 0u);
    EXPECT_TRUE(left().empty()) << "it is tried again";

    ASSERT_TRUE(make_stuck());
    EXPECT_EQ(staging.expire(), 1u);
    ASSERT_EQ(left().size(), 1u);
    std::filesystem::rename(left()[0], own + "/expired-7");
    ASSERT_TRUE(make_stuck());
    EXPECT_EQ(staging.expire(), 1u);
    EXPECT_TRUE(std::filesystem::exists(own + "/expired-8")) << "not over what is left";
    std::filesystem::remove_all(own + "/expired-7");
    std::filesystem::remove_all(own + "/expired-8");
}

TEST(ContextsTest, DoNotExpireWhereAPinCannotBeRead)
{
    const cg_test::TempDir dir;
    if (!make_context(dir, "a", "1d"))
        GTEST_SKIP() << "no extended attributes here: expiry is not checked";
    OwnStaging own(dir);
    for (const int error : {EIO, EACCES}) {
        const cg_test::AttributeHook hook(
            [&](const char *name) { return strcmp(name, CG_CONTEXT_PIN) == 0 ? error : 0; });
        EXPECT_EQ(own.expire(), 0u) << strerror(error);
    }
    EXPECT_EQ(own.expire(), 1u);
}

// Between the look at a context and its removal another one may be moved to its name.
TEST(ContextsTest, ExpiryTakesNoOtherContextThatGetsTheName)
{
    for (const char *moment : {"context.json", "old"}) {
        SCOPED_TRACE(moment);
        const cg_test::TempDir dir;
        const std::string contexts = dir.path + "/m/contexts/";
        if (!make_context(dir, "old", "1d"))
            GTEST_SKIP() << "no extended attributes here: expiry is not checked";
        dir.write("m/contexts/kept/context.json", std::string("{}"));
        OwnStaging own(dir);
        bool is_moved = false;
        {
            const cg_test::StatHook hook([&](const char *name) {
                if (is_moved || strcmp(name, moment) != 0)
                    return;
                is_moved = true;
                std::filesystem::rename(contexts + "old", contexts + "moved");
                std::filesystem::rename(contexts + "kept", contexts + "old");
            });
            EXPECT_EQ(own.expire(), 0u);
        }
        EXPECT_TRUE(is_moved);
        EXPECT_TRUE(dir.has("m/contexts/old/context.json"));
        EXPECT_TRUE(dir.has("m/contexts/moved"));
        EXPECT_EQ(own.expire(), 1u) << "it goes by its own name";
        EXPECT_FALSE(dir.has("m/contexts/moved"));
    }
}

// A store has many more objects, and looking through them takes minutes.
TEST_F(SpaceTest, ExpiryLooksAtContextsOnlyAndEndsWithTheMount)
{
    publish(1, 2, 20);
    make_context("c", publish(2, 2, 20), 20);
    if (!set_ttl("c", "1d"))
        GTEST_SKIP() << "no extended attributes here: expiry is not checked";
    OwnStaging own(dir);
    cg_expired_file *files;
    size_t n_files, n_removed;
    std::set<std::string> looked_at;
    const auto is_over = [](void *) { return true; };
    EXPECT_EQ(cg_contexts_expire(dir.fd, &own.staging, nullptr, is_over, nullptr, &files, &n_files,
                                 &n_removed),
              CG_ERR_CANCELLED);
    EXPECT_EQ(n_removed, 0u);
    free(files);
    {
        const cg_test::OpenHook hook([&](int, const char *path) {
            looked_at.insert(path);
            return 0;
        });
        EXPECT_EQ(cg_contexts_expire(dir.fd, &own.staging, nullptr, nullptr, nullptr, &files,
                                     &n_files, &n_removed),
                  CG_OK);
    }
    EXPECT_EQ(n_removed, 1u);
    EXPECT_EQ(n_files, 3u) << "two chunks and context.json";
    EXPECT_EQ(looked_at.count("c"), 1u);
    EXPECT_EQ(looked_at.count("objects"), 0u);
    free(files);
}

TEST_F(SpaceTest, AModelHasAQuotaOfItsOwn)
{
    const std::vector<cg_test::Chunk> cold = publish(1, 8, 40);
    cg_fs_config config = {};
    cg_model_quota quotas[] = {{"other", 1 << 20}, {"m", 2 << 20}};
    config.store = dir.path.c_str();
    config.model_quotas = quotas;
    config.n_model_quotas = 2;
    cg_fs *small = nullptr;
    ASSERT_EQ(cg_fs_new(&config, &small), 0);
    EXPECT_TRUE(cg_space_is_due(small, 1000));
    cg_space_tend(small);
    EXPECT_LE(used(), (2u << 20) / 100 * 95);
    EXPECT_GT(used(), 1u << 20) << "not for the other model's sake";
    EXPECT_FALSE(cg_space_is_due(small, now_s()));
    publish_here(small, 1 << 20); // of the third model, say
    EXPECT_FALSE(cg_space_is_due(small, now_s()));
    EXPECT_TRUE(cg_space_is_due(small, now_s() + 61));
    cg_fs_free(small);
}

TEST_F(SpaceTest, LevelsGoByAgeWithoutAQuota)
{
    const std::vector<cg_test::Chunk> cold = publish(1, 2, 8), hot = publish(2, 2, 0);
    cg_fs_config config = {};
    config.store = dir.path.c_str();
    config.keep_s[CG_L2] = 7 * DAY_S;
    cg_fs *keeping = nullptr;
    ASSERT_EQ(cg_fs_new(&config, &keeping), 0);
    ASSERT_TRUE(cg_space_is_due(keeping, 1000));
    cg_space_tend(keeping);
    for (const cg_test::Chunk &chunk : cold)
        EXPECT_EQ(levels_of(chunk), 4u | 8u);
    for (const cg_test::Chunk &chunk : hot)
        EXPECT_EQ(levels_of(chunk), 2u | 4u | 8u);
    cg_fs_free(keeping);
}

TEST_F(SpaceTest, WhatIsUsedAllTheTimeOutlivesAShortTimeToKeep)
{
    const cg_test::Chunk used = publish(1, 1, 0)[0], unused = publish(2, 1, 0)[0];
    for (const cg_test::Chunk &chunk : {used, unused}) {
        struct timespec times[2] = {};
        times[0].tv_sec = times[1].tv_sec = time(nullptr) - 40 * 60;
        ASSERT_EQ(utimensat(dir.fd, path_of(chunk, CG_L1).c_str(), times, 0), 0);
    }
    cg_fs_config config = {};
    config.keep_s[CG_L2] = 30 * 60;
    fs = std::make_unique<cg_test::Fs>(dir.path, config);
    cg_fs_file *file;
    ASSERT_EQ(fs->open(path_of(used, CG_L1), O_RDONLY, &file), 0);
    EXPECT_EQ(fs->close(file), 0);
    cg_space_tend(fs->fs);
    EXPECT_EQ(levels_of(used), 2u | 4u | 8u);
    EXPECT_EQ(levels_of(unused), 4u | 8u);
}

TEST_F(SpaceTest, AScrubberKeepsItsRateAndEndsWithTheMount)
{
    publish(1, 3, 0);
    struct {
        uint64_t asked_ns = 0, left = 3;
    } waits;
    cg_fsck_config config = {};
    config.root_fd = dir.fd;
    config.bytes_per_s = 1000;
    config.report = [](void *, const char *path, const char *what) { FAIL() << path << what; };
    config.wait = [](void *user, uint64_t ns, const cg_fsck_result *so_far) {
        auto *w = static_cast<decltype(waits) *>(user);
        if (so_far->read_bytes > 0)
            w->asked_ns = ns;
        return so_far->read_bytes > 0 && --w->left == 0;
    };
    config.user = &waits;
    cg_fsck_result result;
    EXPECT_EQ(cg_fsck_run(&config, &result), CG_ERR_CANCELLED);
    EXPECT_LT(result.n_whole, 9u);
    // Nobody waited, so that of the seconds for what was read nearly all are still to come.
    EXPECT_GT(waits.asked_ns, PAYLOAD / 1000 * 1'000'000'000ull);
}

TEST_F(SpaceTest, OneOfAllDaemonsScrubsOnceADay)
{
    publish(1, 1, 0);
    cg_fs_config config = {};
    config.scrub_bytes_per_s = uint64_t{1} << 40;
    cg_test::Fs one(dir.path, config), other(dir.path, config);
    EXPECT_EQ(cg_scrub_tend(one.fs), DAY_S);
    EXPECT_EQ(one.metric("scrub_passes_total"), 1u);
    const int64_t wait_s = cg_scrub_tend(other.fs);
    EXPECT_EQ(other.metric("scrub_passes_total"), 0u);
    EXPECT_GT(wait_s, DAY_S / 2);
    EXPECT_LE(wait_s, DAY_S + 60);
    cg_test::Fs restarted(dir.path, config);
    EXPECT_GT(cg_scrub_tend(restarted.fs), DAY_S / 2);
    EXPECT_EQ(restarted.metric("scrub_passes_total"), 0u);
    use(CG_STAMP_SCRUBBED, 2);
    EXPECT_EQ(cg_scrub_tend(other.fs), DAY_S);
    EXPECT_EQ(other.metric("scrub_passes_total"), 1u);
    EXPECT_EQ(one.look(CG_STAMP_SCRUBBED), ENOENT) << "hidden";
}

TEST(FsckTest, ARateIsALimitAndNoAverage)
{
    constexpr uint64_t S = 1'000'000'000;
    uint64_t start_ns = 5 * S;
    EXPECT_EQ(cg_fsck_wait_ns(&start_ns, 5 * S, 3000, 1000), 3 * S);
    EXPECT_EQ(cg_fsck_wait_ns(&start_ns, 8 * S + S / 2, 3000, 1000), 0u);
    EXPECT_EQ(cg_fsck_wait_ns(&start_ns, 8 * S + S / 2, 5000, 1000), S + S / 2) << "a little late";
    // Hours in which a busy disk gave less than that.
    EXPECT_EQ(cg_fsck_wait_ns(&start_ns, 7200 * S, 6000, 1000), 0u);
    EXPECT_EQ(cg_fsck_wait_ns(&start_ns, 7200 * S, 10000, 1000), 3 * S);
    EXPECT_EQ(cg_fsck_wait_ns(&start_ns, 7203 * S, 10000, 1000), 0u);
}

// As the next file may be whole that gets the number of one that was damaged and is gone.
TEST_F(SpaceTest, ADamagedFileSaysNothingOfTheNextOfItsNumber)
{
    const cg_test::Chunk chunk = publish(1, 1, 0)[0];
    struct {
        int fd, n_told;
        uint8_t right;
    } file = {openat(dir.fd, path_of(chunk, CG_L1).c_str(), O_RDWR | O_CLOEXEC), 0,
              chunk.bytes[5000]};
    const uint8_t wrong = file.right ^ 1;
    ASSERT_EQ(pwrite(file.fd, &wrong, 1, 5000), 1);
    cg_fsck_config config = {};
    config.root_fd = dir.fd;
    config.user = &file;
    config.report = [](void *user, const char *, const char *) {
        auto *f = static_cast<decltype(file) *>(user);
        f->n_told++;
        EXPECT_EQ(pwrite(f->fd, &f->right, 1, 5000), 1);
    };
    cg_fsck_result result;
    EXPECT_EQ(cg_fsck_run(&config, &result), CG_OK);
    EXPECT_EQ(file.n_told, 1);
    EXPECT_EQ(result.n_being_written, 1u) << "we have it open";
    EXPECT_EQ(result.n_whole, 2u);
    ::close(file.fd);
}

// As a daemon's adopting makes it for a moment.
TEST_F(SpaceTest, ATemporaryLinkOfAnOldFileIsNotLeft)
{
    const std::string path = path_of(publish(1, 1, 2)[0], CG_L1);
    const size_t leaf = path.rfind('/') + 1;
    const std::string temp =
        path.substr(0, leaf) + "." + path.substr(leaf) + ".0123456789abcdef.tmp";
    ASSERT_EQ(linkat(dir.fd, path.c_str(), dir.fd, temp.c_str(), 0), 0);
    EXPECT_EQ(OwnStaging(dir).repair().n_left, 0u);
    EXPECT_TRUE(dir.has(temp));
}

// As `cp` and `tar` do that restore a backup past the mount.
TEST_F(SpaceTest, ARepairLeavesWhatIsBeingWrittenInPlace)
{
    const std::vector<cg_test::Chunk> chain = publish(1, 3, 0);
    OwnStaging own(dir);
    for (const auto &[chunk, n_bytes, is_open, days] :
         {std::tuple{&chain[0], size_t{0}, false, 0},                     // only just made
          std::tuple{&chain[1], chain[1].bytes.size() / 2, true, 2},      // its writer waits
          std::tuple{&chain[2], chain[2].bytes.size() - 10, false, 0}}) { // of another host
        const std::string path = path_of(*chunk, CG_L1);
        const int fd = openat(dir.fd, path.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC);
        ASSERT_GE(fd, 0);
        ASSERT_EQ(write(fd, chunk->bytes.data(), n_bytes), static_cast<ssize_t>(n_bytes));
        use(path, days);
        if (!is_open)
            ::close(fd);
        for (cg_staging *staging : {static_cast<cg_staging *>(nullptr), &own.staging}) {
            const cg_fsck_result result = check(dir.fd, staging);
            EXPECT_EQ(result.n_being_written, 3u) << n_bytes;
            EXPECT_EQ(result.n_damaged, 0u) << n_bytes;
        }
        const int writer = is_open ? fd : openat(dir.fd, path.c_str(), O_WRONLY | O_CLOEXEC);
        EXPECT_EQ(pwrite(writer, chunk->bytes.data(), chunk->bytes.size(), 0),
                  static_cast<ssize_t>(chunk->bytes.size()));
        ::close(writer);
        EXPECT_EQ(levels_of(*chunk), 2u | 4u | 8u) << n_bytes;
        EXPECT_EQ(own.repair().n_whole, 9u);
    }
    // An old file that is short is damaged.
    const std::string path = path_of(chain[0], CG_L1);
    ASSERT_EQ(truncate((dir.path + "/" + path).c_str(), 5000), 0);
    use(path, 1);
    EXPECT_EQ(own.repair().n_damaged, 3u);
}

TEST_F(SpaceTest, ARepairLeavesWhatWasPublishedMeanwhile)
{
    const std::vector<cg_test::Chunk> chain = publish(1, 2, 0);
    for (size_t i = 0; i < 2; i++) { // the first keeps its coarser levels, the second nothing
        cg_test::Bytes bad = chain[i].bytes;
        bad[i == 0 ? bad.size() - 50 : 5000] ^= 1;
        dir.write(path_of(chain[i], CG_L1), bad);
        use(path_of(chain[i], CG_L1), 1);
    }
    OwnStaging own(dir);
    cg_fsck_result result;
    {
        const cg_test::FsyncHook hook([&](int) { // of the copy of a level that is whole
            for (const unsigned level : {CG_L1, CG_L2, CG_L3}) {
                dir.write("m/new", chain[0].bytes);
                EXPECT_EQ(renameat(dir.fd, "m/new", dir.fd, path_of(chain[0], level).c_str()), 0);
            }
            return 0;
        });
        result = own.repair();
    }
    EXPECT_EQ(levels_of(chain[0]), 2u | 4u | 8u);
    EXPECT_TRUE(dir.read(path_of(chain[0], CG_L3)) == chain[0].bytes);
    EXPECT_EQ(levels_of(chain[1]), 0u);
    EXPECT_EQ(result.n_cut, 0u);
}

// As two of a script can, or those of two hosts.
TEST_F(SpaceTest, RepairsInTheSameSecondKeepEachOthersQuarantine)
{
    const std::vector<cg_test::Chunk> chain = publish(1, 2, 0);
    OwnStaging own(dir);
    for (const cg_test::Chunk &chunk :
         chain) { // the store's clock stands between the daemon's beats
        cg_test::Bytes bad = chunk.bytes;
        bad[5000] ^= 1;
        dir.write(path_of(chunk, CG_L1), bad);
        use(path_of(chunk, CG_L1), 1);
        EXPECT_EQ(own.repair().n_quarantined, 3u);
    }
    EXPECT_EQ(dir.files("quarantine").size(), 7u) << "three names of each chunk, and the list";
}

TEST_F(SpaceTest, UntilASurveyHasToldTheDiskIsShown)
{
    struct statvfs disk, shown;
    publish(1, 2, 0);
    open(100 << 20);
    ASSERT_EQ(fstatvfs(dir.fd, &disk), 0);
    ASSERT_EQ(cg_fs_statfs(fs->fs, &shown), 0);
    EXPECT_EQ(shown.f_blocks, disk.f_blocks) << "nobody knows what is used of the quota";
    cg_space_tend(fs->fs);
    ASSERT_EQ(cg_fs_statfs(fs->fs, &shown), 0);
    EXPECT_EQ(shown.f_blocks * shown.f_frsize, 100u << 20);
    EXPECT_LE(shown.f_bfree * shown.f_frsize, (100u << 20) - used());
}

TEST_F(SpaceTest, AQuotaBeyondTheDiskShowsTheDisk)
{
    struct statvfs disk, shown;
    open(uint64_t{1} << 60);
    cg_space_tend(fs->fs);
    ASSERT_EQ(fstatvfs(dir.fd, &disk), 0);
    ASSERT_EQ(cg_fs_statfs(fs->fs, &shown), 0);
    EXPECT_EQ(shown.f_blocks, disk.f_blocks);
}

// As copies of a profile, which are larger than the chunks of a short context.
TEST_F(SpaceTest, OrdinaryFilesCountWhenTheyAreWritten)
{
    make_context("c", publish(1, 4, 20), 0);
    open();
    cg_space_tend(fs->fs);
    const int64_t now = now_s();
    EXPECT_FALSE(cg_space_is_due(fs->fs, now));
    ASSERT_EQ(fs->put("m/contexts/c/profile.cgp", cg_test::Bytes(QUOTA / 100 * 96)), 0);
    EXPECT_FALSE(cg_space_is_due(fs->fs, now)) << "it may be written anew, again and again";
    EXPECT_TRUE(cg_space_is_due(fs->fs, now + 11)) << "the quota may be reached";
    cg_space_tend(fs->fs);
    cg_fs_file *file;
    EXPECT_EQ(fs->create("m/contexts/c/L1/00009.kv", &file), ENOSPC);
}

// Surveys rest then, and a store of contexts would take all that comes in that time.
TEST_F(SpaceTest, WhatContextsLeaveOfTheQuotaIsAllThatMayCome)
{
    const std::vector<cg_test::Chunk> chain = publish(1, 6, 20);
    make_context("c", chain, 0);
    const uint64_t quota = used() / 97 * 100;
    open(quota);
    cg_space_tend(fs->fs);
    fs->mkdirs("m/contexts/d/L3");
    cg_fs_file *file;
    ASSERT_EQ(fs->create("m/contexts/d/L3/00000.kv", &file), 0) << "there is some";
    fs->close(file);
    ASSERT_EQ(fs->put("m/contexts/d/tokens", cg_test::Bytes(quota / 20)), 0);
    EXPECT_EQ(fs->create("m/contexts/d/L3/00000.kv", &file), ENOSPC);
    EXPECT_EQ(fs->unlink("m/contexts/d/tokens"), 0);
    cg_space_tend(fs->fs);
    ASSERT_EQ(fs->create("m/contexts/d/L3/00000.kv", &file), 0) << "and again";
    fs->close(file);
}

TEST_F(SpaceTest, WhatARenameOrALinkPublishesCounts)
{
    const cg_test::Chunk large =
        cg_test::make_chunk(nullptr, cg_test::draw_tokens(16, 5), CG_L3, &profile, QUOTA);
    for (const bool links : {false, true}) {
        open();
        cg_space_tend(fs->fs);
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        fs->mkdirs("m/contexts/c/L3");
        dir.write("m/contexts/c/L3/.00000.kv.AbCdEf", large.bytes); // past the mount
        EXPECT_FALSE(cg_space_is_due(fs->fs, now.tv_sec));
        const auto name = [&] {
            return links
                       ? fs->link("m/contexts/c/L3/.00000.kv.AbCdEf", "m/contexts/c/L3/00000.kv")
                       : fs->rename("m/contexts/c/L3/.00000.kv.AbCdEf", "m/contexts/c/L3/00000.kv");
        };
        ASSERT_EQ(name(), 0);
        EXPECT_TRUE(cg_space_is_due(fs->fs, now.tv_sec)) << links;
        const uint64_t n_bytes = metric("published_bytes_total");
        ASSERT_EQ(fs->link("m/contexts/c/L3/00000.kv", "m/contexts/c/L3/00001.kv"), 0);
        EXPECT_EQ(metric("published_bytes_total"), n_bytes) << "it is no more for another name";
        fs.reset();
        std::filesystem::remove_all(dir.path + "/m");
    }
}

TEST_F(SpaceTest, RestsWhereNothingMoreMayGo)
{
    make_context("c", publish(1, 6, 20), 0);
    open(used() / 97 * 100);
    cg_space_tend(fs->fs);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    fs->mkdirs("m/contexts/d/L3");
    const cg_test::Chunk next =
        cg_test::make_chunk(nullptr, cg_test::draw_tokens(16, 9), CG_L3, &profile);
    ASSERT_EQ(fs->put("m/contexts/d/L3/00000.kv", next.bytes), 0);
    EXPECT_FALSE(cg_space_is_due(fs->fs, now.tv_sec));
    EXPECT_TRUE(cg_space_is_due(fs->fs, now.tv_sec + 599));
}

TEST_F(SpaceTest, IsDueWhenMuchWasPublished)
{
    publish(1, 1, 0);
    open();
    EXPECT_TRUE(cg_space_is_due(fs->fs, 1000));
    cg_space_tend(fs->fs);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    EXPECT_FALSE(cg_space_is_due(fs->fs, now.tv_sec));
    EXPECT_TRUE(cg_space_is_due(fs->fs, now.tv_sec + 601));
    const cg_test::Chunk large =
        cg_test::make_chunk(nullptr, cg_test::draw_tokens(16, 5), CG_L3, &profile, QUOTA);
    cg_fs_file *file;
    fs->mkdirs("m/contexts/c/L3");
    ASSERT_EQ(fs->create("m/contexts/c/L3/00000.kv", &file), 0);
    EXPECT_EQ(fs->write(file, large.bytes), 0);
    EXPECT_EQ(fs->close(file), 0);
    EXPECT_TRUE(cg_space_is_due(fs->fs, now.tv_sec));
    fs.reset();
    open(0);
    EXPECT_FALSE(cg_space_is_due(fs->fs, 1000)) << "no quota";
}

} // namespace
