// Random loads and saves of blocks in a GPU's memory, with calls and kernels that fail at random.
// After each, every byte of every block is looked at: what a load says is there is what the CPU
// would have put there, and nothing else has changed but the tokens that it was still to write.
#include "tests/connector/gpu_engine.h"

#include <random>

namespace
{

using namespace cg_test;

// 1,000 in all, with AddressSanitizer 300; ThreadSanitizer makes the emulator some hundred times
// slower. CG_FAULT_CASES=n asks for n of each seed.
#if defined(__SANITIZE_THREAD__)
enum { N_SEEDS = 10, N_CASES = 10 };
#elif defined(__SANITIZE_ADDRESS__)
enum { N_SEEDS = 3, N_CASES = 100 };
#else
enum { N_SEEDS = 10, N_CASES = 100 };
#endif
enum { MOST_TOKENS = 200, OP_BLOCKS = 13, N_PROMPTS = 6 };
const char LEVELS[] = "\"store_levels\": [\"L0\", \"L1\", \"L2\", \"L3\"]";

ProfileSpec chosen_spec()
{
    return spec_4(spec_2(true, nesting_spec()));
}

class GpuRandomTest : public testing::TestWithParam<uint64_t>
{
  protected:
    GpuRandomTest()
        : order(GetParam() % 2 == 0 ? Placement::HEADS_FIRST : Placement::TOKENS_FIRST),
          store(true, chosen_spec()), by_cpu(true, chosen_spec()),
          cpu(store, LEVELS, Heads(), {order}), reference(by_cpu, LEVELS, Heads(), {order})
    {
        for (uint64_t i = 0; i < N_PROMPTS; i++)
            prompts.push_back(prompt(33 + draw(MOST_TOKENS - 33), i));
    }
    uint32_t draw(size_t n)
    {
        return static_cast<uint32_t>(random() % n);
    }
    void open()
    {
        engine = std::make_unique<GpuEngine>(
            store,
            std::string(LEVELS) + ", \"gpu_slots\": " + std::to_string(1 + draw(16)) +
                ", \"retry_ms\": 0, \"threads\": " + std::to_string(1 + draw(2)),
            order);
        ASSERT_EQ(engine->register_status, CACHEGEN_OK) << engine->info().gpu_reason;
    }
    // Blocks for the n-th operation at once: no two share one.
    void take_table(uint32_t n)
    {
        engine->table.assign(blocks.begin() + n * OP_BLOCKS, blocks.begin() + (n + 1) * OP_BLOCKS);
    }
    void maybe_fail()
    {
        switch (draw(6)) {
        case 0: standin().fail_call(1 + draw(40), 1 + draw(600), false); break;
        case 1: standin().fail_call(1 + draw(40), 700, true); break;
        case 2: standin().fail_operation(1 + draw(12)); break;
        default: break; // nothing fails
        }
    }
    // What failed is over, and the next case begins with a GPU that works.
    void recover()
    {
        const bool failed = standin().has_failed();
        const bool is_off = engine->info().gpu == static_cast<uint32_t>(CACHEGEN_GPU_OFF);
        n_failed += failed;
        EXPECT_TRUE(failed || !is_off);
        standin().forget_failures();
        if (is_off || draw(40) == 0) {
            n_off += is_off;
            engine.reset();
            open();
        }
    }

    struct Case {
        Tokens tokens;
        uint32_t level, from, to;
        std::vector<int64_t> table;
        cachegen_load *op = nullptr;
        cachegen_progress progress = {};
    };

    void start_load(Case *c, uint32_t n)
    {
        c->tokens = prompts[draw(N_PROMPTS)];
        c->level = draw(4);
        engine->level_plus_1 = c->level + 1;
        take_table(n);
        c->table = engine->table;
        const cachegen_hit hit = engine->look_up(c->tokens);
        c->from = draw(2) == 0 ? 0 : draw(hit.hit_tokens + 1);
        c->to = c->from + draw(hit.hit_tokens - c->from + 1);
        const cachegen_status status = engine->load_start(c->from, c->to, &c->op);
        EXPECT_TRUE(status == CACHEGEN_OK || status == CG_ERR_DEVICE) << cachegen_strerror(status);
        if (c->op != nullptr && draw(10) == 0)
            cachegen_load_cancel(c->op);
    }
    void end_load(Case *c)
    {
        c->progress.struct_size = sizeof c->progress;
        c->progress.loaded_tokens = c->from;
        if (c->op == nullptr)
            return;
        EXPECT_EQ(wait_for(engine->c, [&] { return cachegen_load_poll(c->op, &c->progress); }),
                  CACHEGEN_OK);
        cachegen_load_free(c->op);
        EXPECT_GE(c->progress.loaded_tokens, c->from);
        EXPECT_LE(c->progress.loaded_tokens, c->to);
        n_loaded += c->progress.loaded_tokens > c->from;
    }
    // Puts what the case may have changed into `wanted`: what the CPU decodes, and, where nothing
    // is promised, what is there.
    void apply(const Case &c, std::vector<uint8_t> *wanted)
    {
        cpu.level_plus_1 = c.level + 1;
        cpu.table = engine->table = c.table;
        if (c.progress.loaded_tokens > c.from)
            cpu.load(c.tokens);
        engine->for_each(c.from, c.to,
                         [&](uint32_t token, uint32_t, uint32_t, uint32_t, uint32_t, uint8_t *at) {
                             const size_t i = static_cast<size_t>(at - engine->memory.data());
                             const bool is_loaded = token < c.progress.loaded_tokens;
                             memcpy(&(*wanted)[i], is_loaded ? &cpu.memory[i] : at, 2);
                         });
    }
    void load_some()
    {
        std::vector<Case> cases(1 + draw(3));
        for (uint8_t &byte : engine->memory)
            byte = static_cast<uint8_t>(random());
        std::vector<uint8_t> wanted = engine->memory;
        engine->put();
        maybe_fail();
        for (size_t i = 0; i < cases.size(); i++)
            start_load(&cases[i], static_cast<uint32_t>(i));
        for (Case &c : cases)
            end_load(&c);
        engine->get();
        for (const Case &c : cases)
            apply(c, &wanted);
        ASSERT_TRUE(wanted == engine->memory);
    }
    static uint32_t load_at(Engine *from, uint32_t level, const Tokens &tokens,
                            const std::vector<int64_t> &table)
    {
        from->level_plus_1 = level + 1;
        from->table = table;
        return from->load(tokens).progress.loaded_tokens;
    }
    void save_some()
    {
        Tokens &tokens = prompts[draw(N_PROMPTS)];
        tokens = prompt(33 + draw(MOST_TOKENS - 33), 1000 + random() % 100000);
        take_table(0);
        engine->level_plus_1 = 0;
        engine->prefill(tokens);
        engine->put();
        maybe_fail();
        engine->holds_later = draw(2) == 0;
        cachegen_save *op;
        const cachegen_status status = engine->save_start(
            tokens, 0, static_cast<uint32_t>(tokens.size()), true, nullptr, 0, &op);
        EXPECT_TRUE(status == CACHEGEN_OK || status == CG_ERR_DEVICE || status == CG_ERR_AGAIN);
        if (status == CACHEGEN_OK && engine->holds_later)
            cachegen_save_hold(op, engine->stream);
        engine->poison();
        engine->put(); // at once: the engine's stream waits
        if (status == CACHEGEN_OK)
            engine->finish(op);
        // What of it was stored is right.
        cpu.level_plus_1 = 1;
        cpu.table = engine->table;
        const Load l = cpu.load(tokens);
        ASSERT_EQ(cpu.error_of(tokens, 0, l.progress.loaded_tokens), 0);
        n_saved += l.progress.loaded_tokens > 0;
        // So are symbols of coefficients that the GPU or, where that failed, the CPU has made.
        const uint32_t n_lossy = load_at(&cpu, CG_L1, tokens, engine->table);
        reference.table = engine->table;
        ASSERT_EQ(reference.save(tokens), CACHEGEN_OK);
        ASSERT_GE(load_at(&reference, CG_L1, tokens, engine->table), n_lossy);
        reference.for_each(n_lossy, static_cast<uint32_t>(tokens.size()),
                           [](uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint8_t *at) {
                               memset(at, 0xcd, 2); // as poison() has left it there
                           });
        ASSERT_LT(difference(cpu, reference), MOST_DIFFERENCE[CG_L1]);
    }

    std::mt19937_64 random{GetParam()};
    const Placement::Order order;
    const Store store, by_cpu;
    Engine cpu, reference; // reference: of the store that only CPUs save to
    std::unique_ptr<GpuEngine> engine;
    std::vector<Tokens> prompts;
    std::vector<int64_t> blocks;
    uint32_t n_loaded = 0, n_saved = 0, n_failed = 0, n_off = 0;
};

TEST_P(GpuRandomTest, WhateverFailsBlocksHoldWhatIsPromisedAndNothingElseIsTouched)
{
    const char *asked = getenv("CG_FAULT_CASES");
    const unsigned long n_cases = asked != nullptr ? strtoul(asked, nullptr, 10) : +N_CASES;
    open();
    for (int i = 0; i < Engine::N_BLOCKS; i++)
        blocks.push_back(i);
    for (unsigned long i = 0; i < n_cases && !HasFailure(); i++) {
        SCOPED_TRACE(i);
        std::shuffle(blocks.begin(), blocks.end(), random);
        draw(4) == 0 ? save_some() : load_some();
        recover();
    }
    // Else the test looks at nothing. Ten cases may all be of one kind.
    if (n_cases >= 100) {
        EXPECT_GE(n_loaded, n_cases / 5);
        EXPECT_GE(n_saved, n_cases / 20);
        EXPECT_GE(n_failed, n_cases / 20);
        EXPECT_GE(n_off, n_cases / 50);
    }
    engine.reset();
    EXPECT_EQ(standin().n_live(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Seeds, GpuRandomTest, testing::Range<uint64_t>(1, N_SEEDS + 1));

} // namespace
