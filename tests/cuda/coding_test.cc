// Sections that kernels code are the CPU's, bit for bit, whatever the order of threads.
#include "device.h"

#include "codec/kernels.h"
#include "codec/rans_lane.h"
#include "codec/symbols.h"
#include "encoder_kernels.h"

#include <gtest/gtest.h>

namespace
{

using namespace cg_test;

// What the symbols of a task are like.
enum class Cells { ZERO, SMALL, SOME_ESCAPES, LARGE };

int16_t draw(Cells cells, Random *random)
{
    switch (cells) {
    case Cells::ZERO: return 0;
    case Cells::SMALL: return static_cast<int16_t>(std::lround(2 * random->normal()));
    case Cells::SOME_ESCAPES:
        if (random->below(50) == 0) // those at the ends of 16 bits, too
            return static_cast<int16_t>(static_cast<int>(random->below(65535)) - 32767);
        return static_cast<int16_t>(std::lround(5 * random->normal()));
    case Cells::LARGE: break;
    }
    return static_cast<int16_t>(static_cast<int>(random->below(65535)) - 32767);
}

// A task's symbols of the finest level of a mask, and how the CPU codes its levels.
struct Task {
    cg_projection what = {};
    std::vector<int16_t> cells;
    DrawnOrder order;
    Sections expected;
    std::array<size_t, CG_N_LEVELS> n_cells = {};

    Task(const cg_profile *p, uint32_t basis, uint32_t n_tokens, uint32_t level_mask,
         uint32_t percent, Cells kind)
        : order(p, n_tokens, n_tokens + basis)
    {
        const cg_group &group = p->groups[basis / p->n_matrices];
        const uint32_t matrix = basis % p->n_matrices;
        const auto finest = static_cast<unsigned>(__builtin_ctz(level_mask));
        const cg_level_columns &columns = group.columns[finest - 1][matrix];
        what.basis = basis;
        what.n_rows = cg_count_blocks(n_tokens);
        what.n_shared = group.bands[matrix].n_shared;
        what.level_mask = level_mask;
        what.stream_percent = percent;
        what.order = &order.order;
        for (unsigned f = 0; f < CG_DCT; f++)
            what.n_components[f] =
                columns.n_active[f] > 0 ? what.n_shared + columns.n_active[f] : 0;
        Random random(n_tokens + basis + level_mask);
        for (size_t i = 0; i < size_t{columns.n_columns} * what.n_rows; i++)
            cells.push_back(draw(kind, &random));
        code(p, group, matrix, finest);
    }

  private:
    // The coarsest level first: strips of a finer one point at its cells.
    void code(const cg_profile *p, const cg_group &group, uint32_t matrix, unsigned finest)
    {
        std::array<cg_symbols, CG_N_LEVELS> symbols = {};
        std::array<std::unique_ptr<void, MallocFree>, CG_N_LEVELS> memory;
        for (unsigned level = CG_L3; level >= finest; level--) {
            if ((what.level_mask >> level & 1) == 0)
                continue;
            const cg_level_columns &columns = group.columns[level - 1][matrix];
            n_cells[level] = size_t{columns.n_columns} * what.n_rows;
            memory[level].reset(aligned_alloc(64, cg_symbols_bytes(&columns, what.n_rows) + 64));
            symbols[level] = cg_symbols_lay(
                &columns, (what.level_mask >> level & 2) != 0 ? &symbols[level + 1] : nullptr,
                order.order.runs, order.order.n_runs, memory[level].get());
        }
        std::copy(cells.begin(), cells.end(), symbols[finest].cells[0]);
        for (unsigned level = finest + 1; what.level_mask >> level != 0; level++)
            for (unsigned f = 0; f < CG_DCT; f++) {
                const cg_symbols &own = symbols[level], &finer = symbols[level - 1];
                const size_t n = own.columns->n_active[f], n_finer = finer.columns->n_active[f];
                for (size_t row = 0; row < own.n_rows; row++)
                    cg_kernels_named("baseline")
                        ->coarsen(finer.cells[f] + row * n_finer, n, own.cells[f] + row * n);
            }
        for (unsigned level = finest; what.level_mask >> level != 0; level++) {
            size_t n_bytes;
            uint8_t *bytes = cg_symbols_code(p, &symbols[level], {}, what.stream_percent, &n_bytes);
            expected[level].assign(bytes, bytes + n_bytes);
            free(bytes);
        }
    }
};

ProfileSpec nesting(ProfileSpec spec = ProfileSpec())
{
    spec.nests = true;
    return spec;
}

const uint32_t L1 = 1 << CG_L1, L2 = 1 << CG_L2, L3 = 1 << CG_L3;

// It is the CPU's section, or none where that takes more than 8 bits a symbol.
void expect_coded(const Bytes &made, const Task &task, unsigned level)
{
    if (!made.empty() || task.expected[level].size() <= task.n_cells[level]) {
        ASSERT_EQ(made, task.expected[level]) << level;
    }
}

// Every class of the profile maker has its turn: all alphabets and shifts. Groups, and a joint
// matrix; all components active, or fewer at coarser levels; rows in one run or in seven; from one
// row on; a level alone, and those that refine.
class CodingTest : public testing::TestWithParam<int>
{
  protected:
    static ProfileSpec spec()
    {
        ProfileSpec fewer = nesting();
        fewer.all_active = false;
        const ProfileSpec specs[] = {spec_2(false, nesting()), spec_2(true, fewer), spec_3(fewer),
                                     spec_4(nesting()), spec_4(fewer, 32)};
        return specs[GetParam()];
    }
};

TEST_P(CodingTest, MakesTheCpusBytes)
{
    const Profile profile = make_profile(spec());
    const Laid laid(profile.get());
    size_t n_sections = 0, n_streams = 0;
    for (uint32_t basis = 0; basis < cg_profile_n_bases(profile.get()); basis++)
        for (const uint32_t n_tokens : {5u, 45u, 128u, 256u})
            for (const uint32_t levels : {L1 | L2 | L3, L1 | L2, L2 | L3, L1, L2, L3}) {
                // All of them with the first basis; then as many as the time allows.
                if (basis > 0 && (levels + n_tokens + basis) % 3 != 0)
                    continue;
                const Cells kind = levels % 3 == 0 ? Cells::SOME_ESCAPES : Cells::SMALL;
                const uint32_t percent =
                    n_tokens == 128 ? CG_RANS_SHORT_STREAM_PERCENT : CG_RANS_STREAM_PERCENT;
                SCOPED_TRACE(testing::Message() << basis << ' ' << n_tokens << ' ' << levels);
                const Task task(profile.get(), basis, n_tokens, levels, percent, kind);
                const Sections made = run_code(laid, task.what, task.cells, n_tokens + basis);
                for (unsigned level = CG_L1; level <= CG_L3; level++) {
                    expect_coded(made[level], task, level);
                    n_sections += !made[level].empty();
                    if (!made[level].empty())
                        n_streams = std::max(n_streams, size_t{made[level][0]});
                }
            }
    EXPECT_GT(n_sections, 20u);
    EXPECT_GT(n_streams, 4u); // of one section: their order matters
}

INSTANTIATE_TEST_SUITE_P(Profiles, CodingTest, testing::Range(0, 5));

// Nothing but zeros; and symbols that take more than there is room for, some of them or all.
TEST(Coding, LeavesToTheCpuWhatDoesNotFit)
{
    const Profile profile = make_profile(spec_2(true, nesting()));
    const Laid laid(profile.get());
    for (const Cells kind : {Cells::ZERO, Cells::LARGE}) {
        const Task task(profile.get(), 0, 64, L1 | L2 | L3, CG_RANS_STREAM_PERCENT, kind);
        const Sections made = run_code(laid, task.what, task.cells, 1);
        EXPECT_EQ(made[CG_L3], kind == Cells::LARGE ? Bytes() : task.expected[CG_L3]);
        EXPECT_EQ(made[CG_L2], task.expected[CG_L2]); // cells that only say which of three
        EXPECT_EQ(made[CG_L1], task.expected[CG_L1]);
    }
    // Streams that have no room for their words, not only what goes to the host.
    const Task task(profile.get(), 0, 256, L1, CG_RANS_STREAM_PERCENT, Cells::LARGE);
    ASSERT_GT(task.expected[CG_L1].size(), 5 * task.cells.size() / 2);
    EXPECT_EQ(run_code(laid, task.what, task.cells, 1)[CG_L1], Bytes());
}

// The geometries of SmolLM2-135M's ten layers and of Llama-3.1-8B's one.
TEST(Coding, TakesWideMatrices)
{
    ProfileSpec spec = nesting(ten_layer_spec());
    ProfileSpec llama = nesting(spec_2(true));
    llama.n_layers = 1;
    llama.group_layers = {1};
    llama.n_kv_heads = 8;
    llama.head_dim = llama.rotary_dim = 128;
    llama.most_components = 100;
    for (const ProfileSpec &of : {spec, llama}) {
        const Profile profile = make_profile(of);
        const Laid laid(profile.get());
        const Task task(profile.get(), 0, 256, L1 | L2 | L3, CG_RANS_STREAM_PERCENT, Cells::SMALL);
        EXPECT_EQ(run_code(laid, task.what, task.cells, 1), task.expected);
    }
}

TEST(Coding, TakesNothingThatDoesNotFit)
{
    const Profile profile = make_profile(spec_3(nesting())), apart = make_profile(spec_2(true)),
                  paper = make_profile([] {
                      ProfileSpec spec = paper_spec();
                      spec.version = 2;
                      return spec;
                  }());
    const Laid laid(profile.get()), of_apart(apart.get()), of_paper(paper.get());
    const Task task(profile.get(), 0, 45, L1 | L2 | L3, CG_RANS_STREAM_PERCENT, Cells::SMALL);
    const auto bytes = coding_bytes(laid.profile, task.what);
    const auto status_of = [&](const cg_cuda_profile *of, const cg_projection &what,
                               size_t missing_scratch = 0, size_t missing_out = 0) {
        cg_cuda_coding_memory memory = {};
        cg_cuda_coding coding;
        memory.scratch_bytes = bytes.first - missing_scratch;
        memory.out_bytes = bytes.second - missing_out;
        return cg_cuda_coding_of(of, &what, &memory, &coding);
    };
    EXPECT_EQ(status_of(laid.profile, task.what), CG_OK);
    EXPECT_EQ(status_of(laid.profile, task.what, 1), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(status_of(laid.profile, task.what, 0, 1), CG_ERR_INVALID_ARGUMENT);
    cg_projection bad = task.what;
    for (const uint32_t levels : {0u, 1u, L1 | 1, L1 | L3, 1u << CG_N_LEVELS}) {
        bad.level_mask = levels;
        EXPECT_EQ(status_of(laid.profile, bad), CG_ERR_INVALID_ARGUMENT) << levels;
    }
    bad = task.what;
    bad.basis = cg_profile_n_bases(profile.get());
    EXPECT_EQ(status_of(laid.profile, bad), CG_ERR_INVALID_ARGUMENT);
    bad = task.what;
    bad.n_components[3]--;
    EXPECT_EQ(status_of(laid.profile, bad), CG_ERR_INVALID_ARGUMENT);
    bad = task.what;
    bad.n_rows++;
    EXPECT_EQ(status_of(laid.profile, bad), CG_ERR_INVALID_ARGUMENT);
    bad = task.what;
    bad.order = nullptr;
    EXPECT_EQ(status_of(laid.profile, bad), CG_ERR_INVALID_ARGUMENT);
    bad = task.what;
    bad.stream_percent = 101;
    EXPECT_EQ(status_of(laid.profile, bad), CG_ERR_INVALID_ARGUMENT);
    // Levels that do not nest are coded one at a time.
    const Task one(apart.get(), 0, 45, L1, CG_RANS_STREAM_PERCENT, Cells::SMALL);
    bad = one.what;
    EXPECT_EQ(status_of(of_apart.profile, bad), CG_OK);
    bad.level_mask = L1 | L2;
    EXPECT_EQ(status_of(of_apart.profile, bad), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(status_of(of_paper.profile, one.what), CG_ERR_INVALID_ARGUMENT);
}

// An encoder whose kernels code, too, stores what the CPU makes of the same symbols; and its bytes
// decode to these.
TEST_P(CodingTest, IsWhatAnEncoderStores)
{
    const ProfileSpec of = spec();
    const EncoderCase c(of);
    for (const uint32_t n_tokens : {75u, 256u}) {
        const cg_chunk_header header = make_header(of, CG_DTYPE_BF16, 8, n_tokens);
        const auto tokens = make_tokens(n_tokens, 1);
        const Bytes elements = make_elements(header, 1, 0.2);
        KernelProjector projects(c), codes(c);
        codes.codes = true;
        Bytes by_cpu, by_kernels;
        ASSERT_EQ(encode_scaled(c.profile.get(), header, tokens, elements, draw_scales(n_tokens, 2),
                                CG_L1, &by_cpu, CG_L3, &projects.base),
                  CG_OK);
        ASSERT_EQ(encode_scaled(c.profile.get(), header, tokens, elements, draw_scales(n_tokens, 2),
                                CG_L1, &by_kernels, CG_L3, &codes.base),
                  CG_OK);
        EXPECT_EQ(by_kernels, by_cpu);
        EXPECT_EQ(codes.base.n_failed, 0u);
        // A task with a symbol at the ends of its range is the CPU's; here none is.
        EXPECT_EQ(codes.base.n_coded, 3 * cg_profile_n_bases(c.profile.get()));
    }
}

// Of sections that a projector codes wrongly, the first is found, and later one in 16. Then nothing
// is coded there any more. What was stored before is damage, never other K and V.
TEST(Coding, ThatIsWrongIsFound)
{
    const ProfileSpec of = spec_2(false, nesting());
    const EncoderCase c(of);
    const cg_chunk_header header = make_header(of, CG_DTYPE_BF16, 8, 75);
    const auto tokens = make_tokens(75, 1);
    const Bytes elements = make_elements(header, 1, 0.2);
    const auto encode_with = [&](KernelProjector *projector) {
        Bytes chunk;
        EXPECT_EQ(encode_scaled(c.profile.get(), header, tokens, elements, draw_scales(75, 2),
                                CG_L1, &chunk, CG_L3, &projector->base),
                  CG_OK);
        return chunk;
    };
    const uint32_t n_tasks = cg_profile_n_bases(c.profile.get());
    ASSERT_LT(3 * n_tasks, uint32_t{CG_CODED_SAMPLE}); // so of a chunk the first is looked at
    KernelProjector projects(c), wrong(c), later(c);
    const Bytes right = encode_with(&projects);
    wrong.codes = later.codes = true;
    wrong.n_right = 0;
    for (int i = 0; i < 2; i++)
        EXPECT_EQ(encode_with(&wrong), right);
    EXPECT_TRUE(wrong.base.miscodes);
    EXPECT_EQ(wrong.base.n_failed, 1u);
    EXPECT_EQ(wrong.base.n_coded, 1u);
    EXPECT_EQ(wrong.n_asked, 1u);

    later.n_right = 1;
    const Bytes damaged = encode_with(&later);
    EXPECT_FALSE(later.base.miscodes);
    EXPECT_NE(damaged, right);
    Bytes decoded;
    const cg_status status = decode(c.profile.get(), damaged, &decoded);
    EXPECT_TRUE(status == CG_ERR_CORRUPT || status == CG_ERR_TRUNCATED) << status;
    encode_with(&later);
    EXPECT_TRUE(later.base.miscodes);
    EXPECT_EQ(later.base.n_failed, 1u);
    EXPECT_EQ(later.base.n_coded, CG_CODED_SAMPLE + 1u);
    EXPECT_EQ(encode_with(&later), right);
}

} // namespace
