// Blocks in a GPU's memory, through the ABI: libcachegen_cuda.so with a stand-in for CUDA is opened
// as a connector opens it. No GPU is needed, and none was ever used.
#include "tests/connector/gpu_engine.h"
#include "tests/connector/watch.h"

#include <unistd.h>

#include <atomic>
#include <thread>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

// Decoders of the CPU's that were made: CMakeLists.txt wraps the function.
static std::atomic<int> n_decoders{0};
extern "C" cg_status __real_cg_decoder_new(const cg_profile *profile, const uint8_t *bytes,
                                           size_t n_bytes, cg_decoder **decoder_out);
extern "C" cg_status __wrap_cg_decoder_new(const cg_profile *profile, const uint8_t *bytes,
                                           size_t n_bytes, cg_decoder **decoder_out)
{
    n_decoders++;
    return __real_cg_decoder_new(profile, bytes, n_bytes, decoder_out);
}

// How many of them run at once, at most. With slow_decoders each takes long enough to meet others.
static std::atomic<int> n_running{0}, most_running{0};
static std::atomic<bool> slow_decoders{false};
extern "C" cg_status __real_cg_decoder_run(const cg_decoder *decoder, uint32_t task_index,
                                           void *scratch, size_t scratch_bytes, void *out);
extern "C" cg_status __wrap_cg_decoder_run(const cg_decoder *decoder, uint32_t task_index,
                                           void *scratch, size_t scratch_bytes, void *out)
{
    const int n = ++n_running;
    for (int most = most_running; most < n && !most_running.compare_exchange_weak(most, n);)
        ;
    if (slow_decoders)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const cg_status status =
        __real_cg_decoder_run(decoder, task_index, scratch, scratch_bytes, out);
    n_running--;
    return status;
}

namespace
{

using namespace cg_test;

class GpuTest : public testing::Test
{
  protected:
    void TearDown() override
    {
        standin().forget_failures();
        EXPECT_EQ(standin().n_live(), 0u) << "of the GPU's memory, streams and events";
        EXPECT_EQ(standin().n_nice_calls(), 0u) << "of encoders: the engine would wait for them";
    }
};

TEST_F(GpuTest, WhatWasSavedComesBackBitForBitAtL0)
{
    const Store store;
    for (auto order : {Placement::TOKENS_FIRST, Placement::HEADS_FIRST}) {
        GpuEngine cold(store, "", order), warm(store, "", order);
        ASSERT_EQ(cold.register_status, CACHEGEN_OK) << cold.info().gpu_reason;
        const Tokens tokens = prompt(32 * 5 + 19, order);
        ASSERT_EQ(cold.save(tokens), CACHEGEN_OK);
        const Load l = warm.load(tokens);
        EXPECT_EQ(l.status, CACHEGEN_OK);
        EXPECT_EQ(l.progress.loaded_tokens, 176u);
        EXPECT_EQ(warm.error_of(tokens, 0, 176), 0);
        EXPECT_TRUE(warm.is_untouched(176, 32 * 5 + 19));
        EXPECT_EQ(warm.stats().chunks_decoded_on_gpu, 6u);
    }
}

TEST_F(GpuTest, EveryLevelIsWhatTheCpuDecodes)
{
    for (unsigned version : {1u, 2u, 3u, 4u}) {
        ProfileSpec spec = nesting_spec();
        const Store store(true, version == 4   ? spec_4(spec, 32)
                                : version == 3 ? spec_3(spec)
                                : version == 2 ? spec_2(true, spec)
                                               : spec);
        const std::string levels = "\"store_levels\": [\"L0\", \"L1\", \"L2\", \"L3\"]";
        const Tokens tokens = prompt(32 + 16);
        {
            Engine cold(store, levels);
            ASSERT_EQ(cold.save(tokens), CACHEGEN_OK);
        }
        for (uint32_t level = 0; level < 4; level++) {
            SCOPED_TRACE(testing::Message() << "L" << level << ", profile of version " << version);
            Engine cpu(store, "", Heads(), {Placement::TOKENS_FIRST});
            GpuEngine gpu(store);
            cpu.level_plus_1 = gpu.level_plus_1 = level + 1;
            ASSERT_EQ(cpu.load(tokens).progress.loaded_tokens, 47u);
            const int before = n_decoders;
            ASSERT_EQ(gpu.load(tokens).progress.loaded_tokens, 47u);
            EXPECT_EQ(gpu.memory, cpu.memory);
            // There are kernels for what new profiles make; the CPU decodes the older.
            const bool has_kernels = level == 0 || version >= 2;
            EXPECT_EQ(gpu.stats().chunks_decoded_on_gpu, has_kernels ? 2u : 0u);
            // A decoder takes memory by the geometry, which a GPU has no use for.
            EXPECT_EQ(n_decoders - before, has_kernels ? 0 : 2);
        }
    }
}

// Slots are many, and their threads mostly wait for the GPU. Where it has no kernels for a profile
// they would take the engine's CPUs, each with a whole chunk.
TEST_F(GpuTest, NoMoreThreadsDecodeInTheGpusPlaceThanAreConfigured)
{
    const Store store(true, nesting_spec()); // of version 1
    const Tokens tokens = prompt(32 * 18);
    {
        Engine cold(store, "\"store_levels\": [\"L2\"]");
        ASSERT_EQ(cold.save(tokens), CACHEGEN_OK);
    }
    GpuEngine engine(store, "\"threads\": 2, \"gpu_slots\": 16");
    slow_decoders = true;
    most_running = 0;
    EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 32u * 18 - 1);
    slow_decoders = false;
    EXPECT_EQ(engine.stats().chunks_decoded_on_gpu, 0u);
    EXPECT_EQ(most_running, 2);
}

TEST_F(GpuTest, ALoadThatWaitsForTheEngineKeepsNobodyElsesChunksFromBeingDecoded)
{
    const Store store(true, nesting_spec()); // of version 1
    const Tokens tokens = prompt(32 * 4);
    GpuEngine engine(store, "\"threads\": 1, \"store_levels\": [\"L2\"]");
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    const cachegen_hit hit = engine.look_up(tokens);
    ASSERT_EQ(hit.hit_tokens, tokens.size() - 1);
    standin().engine_hold(engine.stream);
    engine.put();
    cachegen_load *waiting, *other;
    cachegen_progress p = {};
    p.struct_size = sizeof p;
    const int before = n_decoders;
    ASSERT_EQ(engine.load_start(0, hit.hit_tokens, &waiting), CACHEGEN_OK);
    EXPECT_TRUE(comes_true([&] { return n_decoders > before; })); // one has its turn
    engine.after_kind = CACHEGEN_AFTER_NONE;
    ASSERT_EQ(engine.load_start(0, hit.hit_tokens, &other), CACHEGEN_OK);
    EXPECT_TRUE(comes_true([&] { return cachegen_load_poll(other, &p) == CACHEGEN_OK; }));
    EXPECT_EQ(p.loaded_tokens, hit.hit_tokens);
    EXPECT_EQ(cachegen_load_poll(waiting, &p), CACHEGEN_AGAIN);
    standin().engine_release(engine.stream);
    EXPECT_EQ(wait_for(engine.c, [&] { return cachegen_load_poll(waiting, &p); }), CACHEGEN_OK);
    EXPECT_EQ(p.loaded_tokens, hit.hit_tokens);
    cachegen_load_free(other);
    cachegen_load_free(waiting);
}

// Chunks come together while the engine's work, and then other chunks, hold the GPU. In one of them
// a stream is damaged, which only kernels can find: others' tokens are loaded up to it.
TEST_F(GpuTest, ChunksAreDecodedTogetherAndFailAlone)
{
    const Store store(true, spec_4(nesting_spec(), 32));
    const Tokens tokens = prompt(32 * 18);
    {
        Engine cold(store, "\"store_levels\": [\"L2\"]");
        ASSERT_EQ(cold.save(tokens), CACHEGEN_OK);
    }
    const auto rewrite = [&](const std::string &path, const Bytes &bytes) {
        std::filesystem::remove(store.dir.path + "/" + path); // the file may have links
        store.dir.write(path, bytes);
    };
    const std::vector<std::string> chunks = store.chunks("L2");
    ASSERT_EQ(chunks.size(), 18u);
    standin().n_decoded_together();
    size_t n_together = 0;
    for (const size_t i : SEES_RACES ? std::vector<size_t>{2} : std::vector<size_t>{0, 2, 5}) {
        SCOPED_TRACE(i);
        const Bytes good = store.dir.read(chunks[i]);
        Bytes bad = good;
        size_t last = bad.size() - 1;
        while (bad[last] == 0) // what pads the last stream
            last--;
        bad[last] ^= 0x10;
        seal_chunk(&bad);
        rewrite(chunks[i], bad);
        Engine cpu(store, "", Heads(), {Placement::TOKENS_FIRST});
        const uint32_t n_tokens = cpu.load(tokens).progress.loaded_tokens;
        ASSERT_EQ(n_tokens % 32, 0u);
        ASSERT_EQ(cpu.stats().chunks_corrupt, 1u);

        GpuEngine gpu(store, ""); // small chunks: 32 slots
        gpu.look_up(tokens);
        gpu.poison();
        standin().engine_hold(gpu.stream);
        gpu.put();
        cachegen_load *op;
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        ASSERT_EQ(gpu.load_start(0, 32 * 18 - 1, &op), CACHEGEN_OK);
        standin().engine_release(gpu.stream);
        EXPECT_EQ(wait_for(gpu.c, [&] { return cachegen_load_poll(op, &p); }), CACHEGEN_OK);
        cachegen_load_free(op);
        gpu.get();
        EXPECT_EQ(p.loaded_tokens, n_tokens);
        EXPECT_EQ(gpu.stats().chunks_corrupt, 1u);
        gpu.for_each(0, n_tokens,
                     [&](uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint8_t *at) {
                         const size_t of = static_cast<size_t>(at - gpu.memory.data());
                         ASSERT_EQ(memcmp(at, &cpu.memory[of], 2), 0);
                     });
        n_together = std::max(n_together, standin().n_decoded_together());
        rewrite(chunks[i], good);
    }
    EXPECT_GT(n_together, 2u);
    EXPECT_LE(n_together, 16u); // half of the slots
}

TEST_F(GpuTest, ALoadWritesTheTokensThatWereAskedForAndNoOthers)
{
    const Store store;
    const Tokens tokens = prompt(32 * 4 + 1);
    GpuEngine engine(store);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    for (uint32_t from : {0u, 1u, 16u, 31u, 32u, 45u, 127u}) {
        SCOPED_TRACE(from);
        EXPECT_EQ(engine.load(tokens, from).progress.loaded_tokens, 128u);
        EXPECT_EQ(engine.error_of(tokens, from, 128), 0);
        EXPECT_TRUE(engine.is_untouched(0, from) && engine.is_untouched(128, 129));
    }
}

const char LOSSY[] = "\"store_levels\": [\"L1\", \"L2\", \"L3\"]";

// Between what a CPU loads from two stores at a level, which must be n_tokens.
double difference_at(uint32_t level, const Store &a, const Store &b, const Tokens &tokens,
                     uint32_t n_tokens)
{
    Engine of_a(a, "\"read_only\": true"), of_b(b, "\"read_only\": true");
    of_a.level_plus_1 = of_b.level_plus_1 = level + 1;
    EXPECT_EQ(of_a.load(tokens).progress.loaded_tokens, n_tokens);
    EXPECT_EQ(of_b.load(tokens).progress.loaded_tokens, n_tokens);
    return difference(of_a, of_b);
}

// By an engine with a GPU and by one without. Returns how many projections kernels have made; they
// have coded the symbols of each.
size_t save_by_both(const Store &by_gpu, const Store &by_cpu, const Tokens &tokens)
{
    const size_t before = standin().n_projected(), n_coded = standin().n_coded();
    {
        GpuEngine gpu(by_gpu, LOSSY);
        Engine cpu(by_cpu, LOSSY);
        EXPECT_EQ(gpu.save(tokens), CACHEGEN_OK);
        EXPECT_EQ(cpu.save(tokens), CACHEGEN_OK);
        EXPECT_EQ(gpu.stats().gpu_errors, 0u);
    }
    EXPECT_EQ(standin().n_coded() - n_coded, standin().n_projected() - before);
    return standin().n_projected() - before;
}

TEST_F(GpuTest, SavesAreProjectedByKernelsAndAsGoodAsTheCpus)
{
    const struct {
        ProfileSpec spec;
        size_t n_projections;
    } cases[] = {{spec_2(false, nesting_spec()), 2 * nesting_spec().group_layers.size()},
                 {spec_2(true, nesting_spec()), nesting_spec().group_layers.size()},
                 {spec_3(nesting_spec()), nesting_spec().group_layers.size() + 1},
                 {spec_4(nesting_spec(), 32), nesting_spec().group_layers.size() + 1}};
    for (const auto &c : cases) {
        SCOPED_TRACE(c.n_projections);
        const Store by_gpu(true, c.spec), by_cpu(true, c.spec);
        const Tokens tokens = prompt(32 * 2 + 16);
        // A task that finds no projector free is the CPU's, and there is one a thread.
        EXPECT_EQ(save_by_both(by_gpu, by_cpu, tokens), 3 * c.n_projections);
        for (uint32_t level = CG_L1; level <= CG_L3; level++) {
            EXPECT_LT(difference_at(level, by_gpu, by_cpu, tokens, 79), MOST_DIFFERENCE[level])
                << level;
        }
    }
}

// By any profile, whether projections succeed or fail. Encoders are SCHED_IDLE, if they may be.
TEST_F(GpuTest, EncodersCallNothingOfCuda)
{
    const Tokens tokens = prompt(32 * 2);
    standin().n_nice_calls();
    for (const ProfileSpec &spec : {spec_2(true, nesting_spec()), spec_4(nesting_spec(), 32)}) {
        const Store store(true, spec);
        GpuEngine engine(store, std::string(LOSSY) + ", \"encode_nice\": 19");
        const size_t before = standin().n_projected();
        ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
        EXPECT_GT(standin().n_projected(), before);
        EXPECT_EQ(standin().n_nice_calls(), 0u);
        // A projection, or what it waits for, fails for good.
        engine.prefill(prompt(32, 2));
        standin().engine_hold(engine.stream);
        engine.put();
        cachegen_save *op;
        ASSERT_EQ(engine.save_start(prompt(32, 2), 0, 32, true, nullptr, 0, &op), CACHEGEN_OK);
        standin().fail_call(6, 700, true);
        standin().engine_release(engine.stream);
        engine.finish(op);
        EXPECT_TRUE(standin().has_failed());
        EXPECT_EQ(engine.info().gpu, static_cast<uint32_t>(CACHEGEN_GPU_OFF));
        EXPECT_EQ(standin().n_nice_calls(), 0u);
        standin().forget_failures();
    }
}

// Else a section of the prompt before would be this one's, and decode without an error.
TEST_F(GpuTest, SectionsThatKernelsDidNotWriteAreTheCpus)
{
    const ProfileSpec spec = spec_2(true, nesting_spec());
    const Store store(true, spec), alone(true, spec);
    const Tokens before = prompt(32), tokens = prompt(32, 2);
    const std::string config = std::string(LOSSY) + ", \"threads\": 1"; // one projector for all
    GpuEngine engine(store, config), other(alone, config);
    ASSERT_EQ(engine.save(before), CACHEGEN_OK);
    standin().code_nothing(true);
    EXPECT_EQ(engine.save(tokens), CACHEGEN_OK);
    standin().code_nothing(false);
    EXPECT_EQ(engine.stats().gpu_errors, 0u);
    ASSERT_EQ(other.save(tokens), CACHEGEN_OK);
    const std::vector<std::string> files = alone.dir.files("m/objects");
    ASSERT_FALSE(files.empty());
    for (const std::string &path : files)
        EXPECT_TRUE(store.dir.read(path) == alone.dir.read(path)) << path;
}

// Each call of CUDA from the copy of the blocks on: it costs the save or nothing, and what is
// stored is right.
TEST_F(GpuTest, WhateverFailsInASaveNothingWrongIsStored)
{
    const Tokens tokens = prompt(32);
    bool has_failed = true;
    long n_saved_all_the_same = 0;
    const Store by_cpu(true, spec_2(true, nesting_spec()));
    {
        Engine cpu(by_cpu, LOSSY);
        ASSERT_EQ(cpu.save(tokens), CACHEGEN_OK);
    }
    for (long n = 1; has_failed; n++) {
        SCOPED_TRACE(n);
        const Store store(true, spec_2(true, nesting_spec()));
        cachegen_save *op;
        cachegen_status status;
        {
            GpuEngine engine(store, LOSSY);
            ASSERT_EQ(engine.register_status, CACHEGEN_OK);
            engine.prefill(tokens);
            standin().engine_hold(engine.stream); // until then nothing is encoded
            engine.put();
            ASSERT_EQ(engine.save_start(tokens, 0, 32, true, nullptr, 0, &op), CACHEGEN_OK);
            standin().fail_call(n, n % 3 == 0 ? 700 : 1, n % 3 == 0);
            standin().engine_release(engine.stream);
            status = engine.finish(op).status;
            has_failed = standin().has_failed();
            EXPECT_EQ(engine.stats().gpu_errors > 0 || status != CACHEGEN_OK, has_failed)
                << "of a release, perhaps";
            standin().forget_failures();
        }
        if (status != CACHEGEN_OK) {
            EXPECT_EQ(status, CG_ERR_DEVICE);
            continue;
        }
        n_saved_all_the_same += has_failed;
        EXPECT_LT(difference_at(CG_L1, store, by_cpu, tokens, 31), MOST_DIFFERENCE[CG_L1]);
    }
    EXPECT_GT(n_saved_all_the_same, 5);
}

TEST_F(GpuTest, ASaveTakesWhatTheEngineHasEnqueuedAndHoldsItBackUntilItHasThat)
{
    const Store store;
    const Tokens tokens = prompt(96);
    GpuEngine engine(store);
    ASSERT_EQ(engine.register_status, CACHEGEN_OK);
    cachegen_save *op;
    engine.prefill(tokens);
    standin().engine_hold(engine.stream); // a forward that is not over yet
    engine.put();
    ASSERT_EQ(engine.save_start(tokens, 0, 96, true, nullptr, 0, &op), CACHEGEN_OK);
    engine.poison();
    engine.put(); // the next forward, in the same blocks
    standin().engine_release(engine.stream);
    EXPECT_EQ(engine.finish(op).status, CACHEGEN_OK);
    engine.load(tokens);
    EXPECT_EQ(engine.error_of(tokens, 0, 95), 0);
}

// Else calls of our threads would make its graph invalid, and those themselves fail.
TEST_F(GpuTest, AnEngineCapturesAGraphWhileItsSavesAndLoadsGoOn)
{
    const Store store(true, spec_2(true, nesting_spec()));
    const Tokens tokens = prompt(65);
    {
        GpuEngine engine(store, LOSSY);
        cachegen_save *save;
        cachegen_load *load;
        cachegen_progress p = {};
        p.struct_size = sizeof p;
        engine.prefill(tokens);
        standin().engine_hold(engine.stream);
        engine.put();
        ASSERT_EQ(engine.save_start(tokens, 0, 65, true, nullptr, 0, &save), CACHEGEN_OK);
        standin().capture(true);
        standin().engine_release(engine.stream);
        EXPECT_EQ(engine.finish(save).status, CACHEGEN_OK);
        EXPECT_FALSE(standin().capture(false));
        const cachegen_hit hit = engine.look_up(tokens);
        standin().engine_hold(engine.stream);
        ASSERT_EQ(engine.load_start(0, hit.hit_tokens, &load), CACHEGEN_OK);
        standin().capture(true);
        standin().engine_release(engine.stream);
        EXPECT_EQ(wait_for(engine.c, [&] { return cachegen_load_poll(load, &p); }), CACHEGEN_OK);
        EXPECT_FALSE(standin().capture(false));
        EXPECT_EQ(p.loaded_tokens, 64u);
        cachegen_load_free(load);
        EXPECT_EQ(engine.stats().gpu_errors, 0u);
    }
}

// What it enqueues behind a save runs while the copies are made; only what overwrites their blocks
// must not, and it need not know when they are there.
TEST_F(GpuTest, OnlyWhatOverwritesABlockWaitsForItsCopyWhereThatIsHeldLater)
{
    const Store store;
    for (const bool holds_later : {false, true}) {
        SCOPED_TRACE(holds_later);
        const Tokens tokens = prompt(96, 1 + holds_later);
        GpuEngine engine(store);
        engine.holds_later = holds_later;
        ASSERT_EQ(engine.register_status, CACHEGEN_OK);
        cachegen_save *op;
        engine.prefill(tokens);
        engine.put();
        standin().hold_copies(true);
        ASSERT_EQ(engine.save_start(tokens, 0, 96, true, nullptr, 0, &op), CACHEGEN_OK);
        engine.put(); // what is there already
        EXPECT_NE(standin().engine_waits(engine.stream), holds_later);
        EXPECT_NE(engine.is_copied(op), holds_later);
        EXPECT_EQ(cachegen_save_hold(op, engine.stream), CACHEGEN_OK);
        EXPECT_TRUE(engine.is_copied(op));
        engine.poison();
        engine.put(); // of another request
        EXPECT_TRUE(standin().engine_waits(engine.stream));
        standin().hold_copies(false);
        EXPECT_EQ(engine.finish(op).status, CACHEGEN_OK);
        EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 95u);
        EXPECT_EQ(engine.error_of(tokens, 0, 95), 0);
    }
}

// The engine has its blocks anew, and nothing waits: what was not copied by then is not stored.
TEST_F(GpuTest, WhatIsCutBeforeItIsCopiedIsNotStored)
{
    const Store store;
    const Tokens tokens = prompt(96);
    GpuEngine engine(store);
    engine.holds_later = true;
    cachegen_save *op;
    engine.prefill(tokens);
    engine.put();
    standin().hold_copies(true);
    ASSERT_EQ(engine.save_start(tokens, 0, 96, true, nullptr, 0, &op), CACHEGEN_OK);
    cachegen_save_cut_from(op, 95); // of a GPU's copies all or none
    EXPECT_TRUE(engine.is_copied(op));
    engine.poison();
    engine.put();
    EXPECT_FALSE(standin().engine_waits(engine.stream));
    standin().hold_copies(false);
    EXPECT_EQ(engine.finish(op).status, CG_ERR_CANCELLED);
    EXPECT_EQ(store.chunks("L0").size(), 0u);
    EXPECT_EQ(engine.save(tokens), CACHEGEN_OK); // the copies' memory is free again
}

// Nothing waits for ever, and the blocks are the engine's.
TEST_F(GpuTest, WhereTheStreamCannotBeHeldNothingWrongIsStored)
{
    const Tokens tokens = prompt(96);
    for (const bool sticky : {false, true}) {
        for (long n = 1; n <= 3; n++) { // two calls are made; a third one is the writer's
            SCOPED_TRACE(n);
            const Store store;
            {
                GpuEngine engine(store);
                engine.holds_later = true;
                engine.prefill(tokens);
                engine.put();
                standin().hold_copies(true);
                standin().hang_wait(1); // the writer's, so that it calls nothing meanwhile
                cachegen_save *op;
                ASSERT_EQ(engine.save_start(tokens, 0, 96, true, nullptr, 0, &op), CACHEGEN_OK);
                ASSERT_TRUE(comes_true(standin().hangs));
                standin().fail_call(n, sticky ? 700 : 1, sticky);
                std::atomic<bool> is_held{false};
                std::thread going_on([&] {
                    comes_true([&] { return is_held || standin().has_failed(); });
                    standin().hold_copies(false);
                    standin().hang_wait(0);
                });
                const cachegen_status status = cachegen_save_hold(op, engine.stream);
                is_held = true;
                going_on.join();
                EXPECT_EQ(status, n <= 2 ? CG_ERR_DEVICE : CG_OK);
                EXPECT_TRUE(engine.is_copied(op));
                engine.poison();
                engine.put();
                engine.finish(op);
                standin().forget_failures();
            }
            Engine cpu(store);
            const Load l = cpu.load(tokens);
            EXPECT_EQ(cpu.error_of(tokens, 0, l.progress.loaded_tokens), 0);
        }
    }
}

TEST_F(GpuTest, ALoadWaitsForWhatTheEngineHasEnqueued)
{
    const Store store;
    const Tokens tokens = prompt(97);
    GpuEngine engine(store);
    ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    const cachegen_hit hit = engine.look_up(tokens);
    cachegen_load *op;
    cachegen_progress p = {};
    p.struct_size = sizeof p;
    engine.poison();
    standin().engine_hold(engine.stream);
    engine.put(); // the last forward of who had these blocks
    ASSERT_EQ(engine.load_start(0, hit.hit_tokens, &op), CACHEGEN_OK);
    EXPECT_EQ(cachegen_load_poll(op, &p), CACHEGEN_AGAIN);
    standin().engine_release(engine.stream);
    EXPECT_EQ(wait_for(engine.c, [&] { return cachegen_load_poll(op, &p); }), CACHEGEN_OK);
    cachegen_load_free(op);
    engine.get();
    EXPECT_EQ(p.loaded_tokens, 96u);
    EXPECT_EQ(engine.error_of(tokens, 0, 96), 0);
}

TEST_F(GpuTest, AnEventOrNothingOrdersAsWellAndTheDefaultStreamIsOne)
{
    const Store store;
    void *event = standin().engine_event();
    for (uint32_t kind : {CACHEGEN_AFTER_NONE, CACHEGEN_AFTER_EVENT, CACHEGEN_AFTER_STREAM}) {
        SCOPED_TRACE(kind);
        const Tokens tokens = prompt(97, kind + 1);
        GpuEngine engine(store);
        cachegen_save *op;
        engine.after_kind = kind;
        engine.after = kind == CACHEGEN_AFTER_EVENT ? event : nullptr;
        engine.prefill(tokens);
        engine.put();
        engine.get(); // it is over
        standin().engine_record(event, engine.stream);
        ASSERT_EQ(engine.save_start(tokens, 0, 96, true, nullptr, 0, &op), CACHEGEN_OK);
        if (kind != CACHEGEN_AFTER_STREAM) { // has copied
            engine.poison();
            engine.put();
        }
        EXPECT_EQ(engine.finish(op).status, CACHEGEN_OK);
        EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 96u);
        EXPECT_EQ(engine.error_of(tokens, 0, 96), 0);
    }
    GpuEngine engine(store);
    engine.after_kind = 3;
    EXPECT_EQ(engine.save(prompt(96)), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(engine.load(prompt(97, 1)).status, CG_ERR_INVALID_ARGUMENT);
    standin().engine_event_destroy(event);
}

// A rank of a tensor-parallel engine has another GPU than the first. A context there would cost
// each of the ranks hundreds of MiB of it.
TEST_F(GpuTest, NoOtherGpuThanTheBlocksIsTouched)
{
    const Store store(true, spec_2(true, nesting_spec()));
    const Tokens tokens = prompt(32 * 3 + 16);
    const struct {
        const char *what;
        int engine_device; // of the engine's thread
        uint64_t contexts;
    } cases[] = {{"a worker that has set its device", 1, 1u << 1},
                 {"a thread that works with another", 0, 1u << 0 | 1u << 1}};
    for (const auto &c : cases) {
        SCOPED_TRACE(c.what);
        standin().engine_set_device(c.engine_device);
        standin().forget_contexts();
        {
            GpuEngine engine(store, LOSSY, Placement::TOKENS_FIRST, 2, Heads(), 1);
            ASSERT_EQ(engine.register_status, CACHEGEN_OK) << engine.info().gpu_reason;
            EXPECT_EQ(engine.save(tokens), CACHEGEN_OK);
            EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 32u * 3 + 15);
            EXPECT_EQ(engine.stats().chunks_decoded_on_gpu, 4u);
            EXPECT_EQ(standin().engine_device(), c.engine_device);
        }
        EXPECT_EQ(standin().contexts(), c.contexts);
        EXPECT_EQ(standin().engine_device(), c.engine_device) << "after closing";
    }
    standin().engine_set_device(0);
}

// sm_86, for example, has 99 KiB, which is too little for profiles of very many classes.
TEST_F(GpuTest, WhereAThreadBlockHasTooLittleSharedMemoryTheCpuDoesAllButL0)
{
    const Store store(true, spec_2(true, nesting_spec()));
    for (const bool is_enough : {true, false}) {
        SCOPED_TRACE(is_enough);
        standin().set_shared_bytes(is_enough ? 99 << 10 : 48 << 10);
        const size_t n_projected = standin().n_projected();
        GpuEngine engine(store, "\"store_levels\": [\"L0\", \"L1\", \"L2\", \"L3\"]");
        ASSERT_EQ(engine.register_status, CACHEGEN_OK) << engine.info().gpu_reason;
        const Tokens tokens = prompt(32 * 2, 2 + is_enough);
        ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
        EXPECT_EQ(standin().n_projected() > n_projected, is_enough);
        for (uint32_t level = 0; level < 4; level++) {
            engine.level_plus_1 = level + 1;
            const uint64_t before = engine.stats().chunks_decoded_on_gpu;
            EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 63u);
            EXPECT_EQ(engine.stats().chunks_decoded_on_gpu - before,
                      is_enough || level == 0 ? 2u : 0u);
        }
        EXPECT_EQ(engine.stats().gpu_errors, 0u);
    }
    standin().set_shared_bytes(1 << 20);
}

TEST_F(GpuTest, AnErrorThatTheEngineHasNotLookedAtYetStays)
{
    const Store store(true, spec_2(true, nesting_spec()));
    standin().engine_fail(2);
    {
        GpuEngine engine(store, LOSSY);
        for (uint32_t seed = 1; seed < 3; seed++) {
            const Tokens tokens = prompt(32 * 2, seed);
            ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
            EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 32u * 2 - 1);
        }
    }
    EXPECT_EQ(standin().engine_last_error(), 2);
}

// Ranks of a tensor-parallel engine, each with a GPU's memory of its own.
class GpuRanksTest : public GpuTest
{
  protected:
    static ProfileSpec four_heads()
    {
        ProfileSpec spec = nesting_spec();
        spec.n_kv_heads = 4;
        return spec_2(true, spec);
    }
    static std::vector<std::unique_ptr<GpuEngine>> ranks(const Store &store, Placement::Order order,
                                                         const std::string &more = "")
    {
        static int n = 0;
        const std::string group = "\"group\": \"gpu-test-" + std::to_string(getpid()) + "-" +
                                  std::to_string(n++) + "\"" + (more.empty() ? "" : ", " + more);
        std::vector<std::unique_ptr<GpuEngine>> made;
        for (const Heads heads : {Heads{0, 1}, Heads{1, 3}})
            made.push_back(std::make_unique<GpuEngine>(store, group, order, 2, heads));
        return made;
    }
};

TEST_F(GpuRanksTest, LoadTheirHeadsAtEveryLevelAsRanksOnCpusDo)
{
    const Store store(true, four_heads());
    const Tokens tokens = prompt(32 + 16);
    const std::string levels = "\"store_levels\": [\"L0\", \"L1\", \"L2\", \"L3\"]";
    {
        Engine cold(store, levels);
        ASSERT_EQ(cold.save(tokens), CACHEGEN_OK);
    }
    for (uint32_t level = 0; level < 4; level++) {
        SCOPED_TRACE(level);
        const auto order = level % 2 != 0 ? Placement::TOKENS_FIRST : Placement::HEADS_FIRST;
        auto both = ranks(store, order);
        for (uint32_t i = 0; i < 2; i++) {
            GpuEngine &gpu = *both[i];
            ASSERT_EQ(gpu.register_status, CACHEGEN_OK) << gpu.info().gpu_reason;
            Engine cpu(store, "\"group\": \"none\", \"read_only\": true",
                       i == 0 ? Heads{0, 1} : Heads{1, 3}, {order});
            cpu.level_plus_1 = gpu.level_plus_1 = level + 1;
            ASSERT_EQ(cpu.load(tokens).progress.loaded_tokens, 47u);
            ASSERT_EQ(gpu.load(tokens).progress.loaded_tokens, 47u);
            EXPECT_EQ(gpu.stats().chunks_decoded_on_gpu, 2u);
            EXPECT_EQ(gpu.memory, cpu.memory);
        }
    }
}

TEST_F(GpuRanksTest, StoreTheSameFilesAsASingleEngineAndLoadThem)
{
    for (const bool with_profile : {false, true}) {
        const Store single(with_profile, four_heads()), many(with_profile, four_heads());
        const Tokens tokens = prompt(32 * 3 + 16);
        {
            GpuEngine engine(single); // the CPU's projections are rounded otherwise
            ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
        }
        auto both = ranks(many, with_profile ? Placement::TOKENS_FIRST : Placement::HEADS_FIRST);
        cachegen_save *saves[2];
        for (size_t i = 0; i < 2; i++)
            ASSERT_EQ(both[i]->begin_save(tokens, nullptr, &saves[i]), CACHEGEN_OK) << i;
        for (size_t i = 0; i < 2; i++)
            EXPECT_EQ(both[i]->finish(saves[i]).status, CACHEGEN_OK) << i;
        EXPECT_EQ(many.dir.files("m/objects"), single.dir.files("m/objects"));
        for (const std::string &path : single.dir.files("m/objects"))
            EXPECT_EQ(many.dir.read(path), single.dir.read(path)) << path;
        for (auto &rank : both)
            EXPECT_EQ(rank->load(tokens).progress.loaded_tokens, 32u * 3 + 15);
    }
}

// Both ranks' engines go on while their copies are made, and both save what was there before.
TEST_F(GpuRanksTest, BothHoldTheirStreamsLaterAndStoreTheSameFiles)
{
    const Store single(false, four_heads()), many(false, four_heads());
    const Tokens tokens = prompt(32 * 3 + 16);
    {
        GpuEngine engine(single);
        ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
    }
    auto both = ranks(many, Placement::TOKENS_FIRST);
    cachegen_save *saves[2];
    standin().hold_copies(true);
    for (size_t i = 0; i < 2; i++) {
        GpuEngine &rank = *both[i];
        rank.holds_later = true;
        ASSERT_EQ(rank.begin_save(tokens, nullptr, &saves[i]), CACHEGEN_OK) << i;
        rank.put();
        EXPECT_FALSE(standin().engine_waits(rank.stream)) << i;
        EXPECT_FALSE(rank.is_copied(saves[i])) << i;
        EXPECT_EQ(cachegen_save_hold(saves[i], rank.stream), CACHEGEN_OK);
        rank.poison();
        rank.put();
        EXPECT_TRUE(standin().engine_waits(rank.stream)) << i;
    }
    standin().hold_copies(false);
    for (size_t i = 0; i < 2; i++)
        EXPECT_EQ(both[i]->finish(saves[i]).status, CACHEGEN_OK) << i;
    EXPECT_EQ(many.dir.files("m/objects"), single.dir.files("m/objects"));
    for (const std::string &path : single.dir.files("m/objects"))
        EXPECT_EQ(many.dir.read(path), single.dir.read(path)) << path;
}

// The heads of blocks that others have by now are passed on by no rank.
TEST_F(GpuRanksTest, ARankThatIsCutBeforeItsHeadsAreCopiedCostsTheSave)
{
    const Store store(false, four_heads());
    const Tokens tokens = prompt(64);
    auto both = ranks(store, Placement::TOKENS_FIRST);
    cachegen_save *saves[2];
    both[1]->holds_later = true;
    standin().hold_copies(true);
    for (const size_t i : {1, 0})
        ASSERT_EQ(both[i]->begin_save(tokens, nullptr, &saves[i]), CACHEGEN_OK) << i;
    cachegen_save_cut_from(saves[1], 63);
    both[1]->poison();
    both[1]->put();
    EXPECT_FALSE(standin().engine_waits(both[1]->stream));
    standin().hold_copies(false);
    for (size_t i = 0; i < 2; i++)
        EXPECT_EQ(both[i]->finish(saves[i]).status, CG_ERR_CANCELLED) << i;
    EXPECT_EQ(store.chunks("L0").size(), 0u);
}

// Of a save a GPU's rank passes on as many chunks as it copies at once, stored ones, too. No others
// are waited for, and the memory of all that came is free again.
TEST_F(GpuRanksTest, WaitForNoChunksButThoseThatArePassedOn)
{
    ProfileSpec spec = four_heads();
    spec.head_dim = 256; // two chunks are the GPU's MiB
    const Store store(false, spec);
    // With a day's patience it would wait for what does not come.
    const auto both = ranks(store, Placement::TOKENS_FIRST,
                            "\"positive_ttl_ms\": 86400000, \"save_timeout_ms\": 86400000, "
                            "\"staging_mib\": 2");
    for (uint64_t seed = 1; seed < 5; seed++) {
        const Tokens all = prompt(32 * 4, seed), first(all.begin(), all.begin() + 32);
        for (const Tokens &tokens : {first, all}) {
            SCOPED_TRACE(tokens.size());
            cachegen_save *saves[2];
            for (const size_t i : {1, 0})
                ASSERT_EQ(both[i]->begin_save(tokens, nullptr, &saves[i]), CACHEGEN_OK) << seed;
            EXPECT_EQ(both[1]->finish(saves[1]).status, CACHEGEN_OK);
            const cachegen_progress p = both[0]->finish(saves[0]);
            EXPECT_EQ(p.status, CACHEGEN_OK);
            EXPECT_EQ(p.loaded_tokens, std::min<size_t>(tokens.size(), 64));
        }
        EXPECT_EQ(store.chunks("L0").size(), 2 * seed);
    }
    EXPECT_EQ(both[0]->stats().saves_dropped_staging, 4 * 2u);
}

// Each call of CUDA that a rank makes for its heads: the rank that stores is told, so that it does
// not wait its time out, and nothing stays behind.
TEST_F(GpuRanksTest, ARankWhoseGpuFailsCostsTheSave)
{
    const Store store(false, four_heads());
    const Tokens tokens = prompt(64);
    bool has_failed = true;
    long n_lost = 0, n_told = 0; // what fails when the heads are on their way costs nothing
    for (long n = 1; has_failed; n++) {
        SCOPED_TRACE(n);
        auto both = ranks(store, Placement::TOKENS_FIRST, "\"save_timeout_ms\": 60000");
        cachegen_save *save = nullptr, *heads = nullptr;
        both[1]->prefill(tokens);
        both[1]->put();
        both[1]->get(); // over
        standin().fail_call(n, 1, false);
        if (both[1]->save_start(tokens, 0, 64, true, nullptr, 0, &heads) == CACHEGEN_OK) {
            EXPECT_EQ(both[1]->finish(heads).status, CACHEGEN_OK);
        }
        both.erase(both.begin() + 1); // waits for what it has begun
        has_failed = standin().has_failed();
        standin().forget_failures();
        ASSERT_EQ(both[0]->begin_save(tokens, nullptr, &save), CACHEGEN_OK);
        const cachegen_status status = both[0]->finish(save).status;
        n_lost += status == CG_ERR_TIMED_OUT;
        n_told += status == CG_ERR_CANCELLED;
        EXPECT_TRUE(status == CACHEGEN_OK || has_failed) << status;
        EXPECT_TRUE(status == CACHEGEN_OK || status == CG_ERR_TIMED_OUT ||
                    status == CG_ERR_CANCELLED)
            << status;
    }
    EXPECT_EQ(n_lost, 0) << "a failure of the other rank's is not waited for";
    EXPECT_GT(n_told, 4);
}

// What a GPU that hangs may be waited for, and which of the waits does not return.
struct Hang {
    const char *what;
    long wait;
    bool has_profile;
};
const Hang HANGS[] = {{"a load", 1, false},
                      {"copies off the blocks", 1, false},
                      {"another rank's heads", 1, false},
                      {"a projection", 2, true},
                      {"nothing but the end", 1, false}};

// Begins what the GPU is to hang in; returns its handle, which closing makes invalid.
void *begin_hang(const Hang &hang, GpuEngine *engine, const Tokens &tokens)
{
    cachegen_save *save = nullptr;
    cachegen_load *load = nullptr;
    if (hang.what == HANGS[0].what) {
        EXPECT_EQ(engine->save(tokens), CACHEGEN_OK);
        EXPECT_EQ(engine->look_up(tokens).hit_tokens, tokens.size() - 1);
        standin().hang_wait(hang.wait);
        EXPECT_EQ(engine->load_start(0, static_cast<uint32_t>(tokens.size()) - 1, &load),
                  CACHEGEN_OK);
        return load;
    }
    standin().hang_wait(hang.wait);
    if (hang.what != HANGS[4].what) {
        EXPECT_EQ(engine->begin_save(tokens, nullptr, &save), CACHEGEN_OK);
    }
    return save;
}

TEST_F(GpuRanksTest, AGpuThatHangsIsLeftBehindAndFreedShouldItGoOn)
{
    for (const Hang &hang : HANGS) {
        SCOPED_TRACE(hang.what);
        const Store store(hang.has_profile, four_heads());
        const std::string more = "\"close_timeout_ms\": 300, \"store_levels\": [\"L2\"]";
        const bool is_rank = hang.what == HANGS[2].what;
        auto engine = is_rank ? std::move(ranks(store, Placement::TOKENS_FIRST, more)[1])
                              : std::make_unique<GpuEngine>(store, more);
        ASSERT_EQ(engine->register_status, CACHEGEN_OK) << engine->info().gpu_reason;
        void *handle = begin_hang(hang, engine.get(), prompt(32));
#if defined(__SANITIZE_ADDRESS__)
        __lsan_ignore_object(handle); // never freed, on purpose
#endif
        if (handle != nullptr) {
            EXPECT_TRUE(comes_true(standin().hangs));
        }
        std::atomic<bool> is_closed{false};
        std::thread closing([&] {
            cachegen_close(engine->c);
            is_closed = true;
        });
        EXPECT_TRUE(comes_true([&] { return is_closed.load(); })) << our_threads();
        EXPECT_NE(our_threads(), "") << "nothing hung";
        standin().hang_wait(0);
        closing.join();
        engine->c = nullptr;
        EXPECT_TRUE(comes_true([] { return standin().n_live() == 0; })) << our_threads();
        EXPECT_TRUE(comes_true([&] { return our_threads().empty(); })) << our_threads();
    }
}

TEST_F(GpuTest, NothingIsAllocatedAfterTheFirstLayout)
{
    const Store store(true);
    GpuEngine engine(store);
    const size_t before = standin().n_allocated();
    for (uint32_t seed = 1; seed < 4; seed++) {
        ASSERT_EQ(engine.save(prompt(32 * 6, seed)), CACHEGEN_OK);
        EXPECT_EQ(engine.load(prompt(32 * 6, seed)).status, CACHEGEN_OK);
    }
    EXPECT_EQ(standin().n_allocated(), before);
}

TEST_F(GpuTest, WhereMemoryForProjectionsIsMissingTheCpuMakesThem)
{
    const Store store(true, spec_2(true, nesting_spec()));
    const Tokens tokens = prompt(32 * 2);
    int n_without = 0;
    for (long n = 1; n <= 12 && n_without == 0; n++) { // allocating is among the first calls
        SCOPED_TRACE(n);
        standin().forget_failures();
        standin().fail_call(n, 2, false);
        GpuEngine engine(store);
        const bool has_failed = standin().has_failed();
        standin().forget_failures();
        if (!has_failed || engine.register_status != CACHEGEN_OK)
            continue;
        n_without++;
        const size_t before = standin().n_projected();
        EXPECT_EQ(engine.save(tokens), CACHEGEN_OK);
        EXPECT_EQ(engine.stats().chunks_encoded, 2u);
        EXPECT_EQ(standin().n_projected(), before);
        EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 63u);
        EXPECT_EQ(engine.stats().chunks_decoded_on_gpu, 2u);
        EXPECT_EQ(engine.stats().gpu_errors, 0u);
    }
    EXPECT_EQ(n_without, 1);
}

// Of all pieces that it asks for, one at a time: the CPU projects where the first is refused.
TEST_F(GpuTest, WhicheverPinnedMemoryIsRefusedTheGpuDecodes)
{
    const Store store(true, spec_4(nesting_spec(), 32));
    const Tokens tokens = prompt(32 * 2);
    bool was_refused = true;
    for (long n = 1; was_refused; n++) {
        SCOPED_TRACE(n);
        standin().refuse_pinned(n);
        GpuEngine engine(store, LOSSY);
        was_refused = standin().has_failed();
        standin().forget_failures();
        ASSERT_EQ(engine.register_status, CACHEGEN_OK) << engine.info().gpu_reason;
        const size_t before = standin().n_projected();
        EXPECT_EQ(engine.save(prompt(32 * 2, 1 + static_cast<uint64_t>(n))), CACHEGEN_OK);
        EXPECT_EQ(standin().n_projected() > before, !was_refused);
        ASSERT_EQ(engine.save(tokens), CACHEGEN_OK);
        EXPECT_EQ(engine.load(tokens).progress.loaded_tokens, 63u);
        EXPECT_EQ(engine.stats().chunks_decoded_on_gpu, 2u);
        EXPECT_EQ(engine.stats().gpu_errors, 0u);
    }
}

TEST_F(GpuRanksTest, OnlyTheRankThatEncodesHasProjectors)
{
    const Store store(true, four_heads());
    const std::string group =
        "\"threads\": 3, \"group\": \"gpu-test-" + std::to_string(getpid()) + "-encodes\"";
    const size_t before = standin().n_live();
    const auto n_live = [&](Heads heads) {
        const GpuEngine rank(store, group, Placement::TOKENS_FIRST, 2, heads);
        EXPECT_EQ(rank.register_status, CACHEGEN_OK);
        return standin().n_live() - before;
    };
    const size_t of_first = n_live({0, 2}), of_second = n_live({2, 2});
    EXPECT_EQ(of_first, of_second + 1 + 3) << "a stream, and an event a thread";
}

// What CUDA has for all streams of a process, unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise;
// and an engine has streams, too.
TEST_F(GpuTest, ItsStreamsLeaveAnEngineOneOfTheEightQueues)
{
    const Store store(true, spec_4(nesting_spec(), 32));
    const GpuEngine engine(store, std::string(LOSSY) + ", \"threads\": 8, \"gpu_slots\": 64");
    ASSERT_EQ(engine.register_status, CACHEGEN_OK) << engine.info().gpu_reason;
    EXPECT_LT(standin().n_streams(), 8u);
}

TEST_F(GpuTest, WithoutTheLibraryADriverOrTheGpuTheReasonIsSaid)
{
    const Store store;
    const auto reason = [](const GpuEngine &engine) {
        EXPECT_EQ(engine.register_status, CG_ERR_UNSUPPORTED);
        EXPECT_EQ(engine.info().gpu, static_cast<uint32_t>(CACHEGEN_GPU_OFF));
        return std::string(engine.info().gpu_reason);
    };
    standin().set_device_count(0);
    EXPECT_NE(reason(GpuEngine(store)).find("no CUDA-capable device"), std::string::npos);
    standin().set_device_count(2);
    {
        Gpu gpu(1 << 20);
        Engine engine(store, "\"gpu_library\": \"/nowhere/libcachegen_cuda.so\"", Heads(),
                      {Placement::TOKENS_FIRST, gpu.memory});
        EXPECT_EQ(engine.register_status, CG_ERR_UNSUPPORTED);
        cachegen_info info = {};
        info.struct_size = sizeof info;
        EXPECT_EQ(cachegen_get_info(engine.c, &info), CACHEGEN_OK);
        EXPECT_NE(std::string(info.gpu_reason).find("/nowhere/"), std::string::npos);
    }
    // A host's blocks need none of it.
    Engine cpu(store, "\"gpu_library\": \"/nowhere/libcachegen_cuda.so\"");
    EXPECT_EQ(cpu.save(prompt(96)), CACHEGEN_OK);
    EXPECT_EQ(cpu.load(prompt(97)).status, CACHEGEN_OK);
}

TEST_F(GpuTest, AnyCallThatFailsWhileItOpensIsARefusalThatLeavesNothingBehind)
{
    const Store store(true);
    for (long n = 1;; n++) {
        SCOPED_TRACE(n);
        standin().forget_failures();
        standin().fail_call(n, 2, n % 2 == 0);
        GpuEngine engine(store);
        if (!standin().has_failed()) {
            EXPECT_EQ(engine.register_status, CACHEGEN_OK);
            EXPECT_GT(n, 10);
            break;
        }
        EXPECT_NE(engine.register_status, CACHEGEN_OK);
        standin().forget_failures();
    }
}

} // namespace
