#include "connector/blocks.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>
#include <vector>

namespace
{

// A paged cache of two layers; every test writes tokens through a shuffled block table and looks at
// the raw memory.
class BlocksTest : public testing::Test
{
  protected:
    enum { LAYERS = 2, HEADS = 3, BLOCKS = 9 };
    uint32_t D = 0, N = 0;
    size_t e = 2;
    cg_geometry model = {LAYERS, HEADS, 64, CG_DTYPE_BF16, 2};
    cachegen_kv_layout given = {};
    std::vector<std::vector<uint8_t>> memory;
    std::vector<void *> base;
    std::vector<int64_t> table;
    cg_kv_layout *layout = nullptr;

    void TearDown() override
    {
        free(layout);
    }

    void start(uint32_t head_dim, uint32_t block_tokens, cg_dtype dtype = CG_DTYPE_BF16)
    {
        D = head_dim;
        N = block_tokens;
        e = cg_dtype_bytes(dtype);
        model.head_dim = static_cast<uint16_t>(D);
        model.dtype = dtype;
        memory.assign(LAYERS, std::vector<uint8_t>(BLOCKS * HEADS * 2 * N * D * e, 0xcd));
        base.clear();
        for (auto &layer : memory)
            base.push_back(layer.data());
        given = {};
        given.struct_size = sizeof given;
        given.abi_version = CACHEGEN_ABI_VERSION;
        given.n_layers = LAYERS;
        given.n_kv_heads = HEADS;
        given.head_dim = D;
        given.dtype = dtype;
        given.block_tokens = N;
        given.n_blocks = BLOCKS;
        given.base = base.data();
        table.resize(BLOCKS);
        std::iota(table.begin(), table.end(), 0);
        std::shuffle(table.begin(), table.end(), std::mt19937(3));
    }
    // vLLM's CPU tensor: (blocks, heads, N, 2 D), each (block, head) a K area and a V area.
    void use_vec()
    {
        use_vec(N * static_cast<int64_t>(e));
    }
    void use_vec(int64_t k_dim_stride, int64_t shift = 0)
    {
        const int64_t E = static_cast<int64_t>(e), n = N, d = D;
        given.block_stride = HEADS * 2 * n * d * E;
        given.head_stride[0] = given.head_stride[1] = 2 * n * d * E;
        given.offset_bytes[1] = n * d * E + shift;
        given.token_stride[0] = E; // K is transposed
        given.dim_stride[0] = k_dim_stride;
        given.token_stride[1] = d * E;
        given.dim_stride[1] = E;
        make();
    }
    // [plane][block][token][head][dim]: GPU engines' flash layout.
    void use_flash()
    {
        const int64_t E = static_cast<int64_t>(e), n = N, d = D;
        given.offset_bytes[1] = BLOCKS * n * HEADS * d * E;
        given.block_stride = n * HEADS * d * E;
        for (int plane = 0; plane < 2; plane++) {
            given.token_stride[plane] = HEADS * d * E;
            given.head_stride[plane] = d * E;
            given.dim_stride[plane] = E;
        }
        make();
    }
    // As vec, with K's dims from the last to the first.
    void use_backward()
    {
        const int64_t E = static_cast<int64_t>(e), n = N, d = D;
        given.offset_bytes[0] = (d - 1) * n * E;
        use_vec(-n * E);
    }
    // As vec, at odd addresses.
    void use_unaligned()
    {
        for (size_t i = 0; i < memory.size(); i++) {
            memory[i].push_back(0xcd);
            base[i] = memory[i].data();
        }
        given.offset_bytes[0] = 1;
        use_vec(N * static_cast<int64_t>(e), 1);
    }
    // Neither tokens nor dims are contiguous: [block][dim][plane][token][head].
    void use_odd()
    {
        const int64_t E = static_cast<int64_t>(e), n = N, d = D;
        given.block_stride = d * 2 * n * HEADS * E;
        given.offset_bytes[1] = n * HEADS * E;
        for (int plane = 0; plane < 2; plane++) {
            given.dim_stride[plane] = 2 * n * HEADS * E;
            given.token_stride[plane] = HEADS * E;
            given.head_stride[plane] = E;
        }
        make();
    }
    void use_amx()
    {
        const int64_t n = N, d = D;
        given.layout = CACHEGEN_LAYOUT_VLLM_CPU_AMX;
        given.block_stride = HEADS * 2 * n * d * static_cast<int64_t>(e);
        given.head_stride[0] = 2 * n * d * static_cast<int64_t>(e);
        make();
    }
    void make()
    {
        ASSERT_EQ(cg_kv_layout_new(&given, &model, &layout), CG_OK);
    }

    // An element's own bytes: of one byte, neighbours differ; of more, no two are alike.
    void mark(uint8_t *at, uint32_t layer, uint32_t plane, uint32_t token, uint32_t head,
              uint32_t dim) const
    {
        const uint32_t value = (((layer * 2 + plane) * 4096 + token) * HEADS + head) * D + dim;
        const uint32_t mixed = value * 2654435761u;
        memcpy(at, reinterpret_cast<const uint8_t *>(&mixed) + (4 - e), e);
    }
    std::vector<uint8_t> tile(uint32_t layer, uint32_t plane, uint32_t first, uint32_t n) const
    {
        std::vector<uint8_t> t(n * HEADS * D * e);
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t h = 0; h < HEADS; h++)
                for (uint32_t d = 0; d < D; d++)
                    mark(&t[((i * HEADS + h) * D + d) * e], layer, plane, first + i, h, d);
        return t;
    }
    // By the formulas of cachegen.h and, for AMX, of the notes on vLLM.
    const uint8_t *element(uint32_t layer, uint32_t plane, uint32_t token, uint32_t h,
                           uint32_t d) const
    {
        const uint8_t *block = memory[layer].data() + table[token / N] * given.block_stride;
        const uint32_t t = token % N;
        if (given.layout == CACHEGEN_LAYOUT_VLLM_CPU_AMX) {
            const uint32_t at =
                plane == 0 ? (t / 16) * 16 * D + (d / 2) * 32 + (t % 16) * 2 + d % 2
                           : N * D + (d / 16) * 16 * N + (t / 2) * 32 + (d % 16) * 2 + t % 2;
            return block + h * given.head_stride[0] + e * at;
        }
        return block + given.offset_bytes[plane] + h * given.head_stride[plane] +
               t * given.token_stride[plane] + d * given.dim_stride[plane];
    }
    void write(uint32_t first, uint32_t n)
    {
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            for (uint32_t plane = 0; plane < 2; plane++)
                cg_blocks_write(layout, table.data(), layer, plane, first, n,
                                tile(layer, plane, first, n).data());
    }
    // Tokens [first, first + n) are in place and nothing else of the memory was touched.
    void expect_written(uint32_t first, uint32_t n)
    {
        std::vector<std::vector<uint8_t>> rest = memory;
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            for (uint32_t plane = 0; plane < 2; plane++)
                for (uint32_t t = first; t < first + n; t++)
                    for (uint32_t h = 0; h < HEADS; h++)
                        for (uint32_t d = 0; d < D; d++) {
                            uint8_t want[4];
                            mark(want, layer, plane, t, h, d);
                            const uint8_t *at = element(layer, plane, t, h, d);
                            ASSERT_EQ(memcmp(at, want, e), 0)
                                << "layer " << layer << " plane " << plane << " token " << t
                                << " head " << h << " dim " << d;
                            memset(&rest[layer][static_cast<size_t>(at - memory[layer].data())],
                                   0xcd, e);
                        }
        for (const auto &layer : rest)
            for (uint8_t byte : layer)
                ASSERT_EQ(byte, 0xcd);
    }
    void expect_read(uint32_t first, uint32_t n)
    {
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            for (uint32_t plane = 0; plane < 2; plane++) {
                std::vector<uint8_t> back(n * HEADS * D * e, 0xee);
                cg_blocks_read(layout, table.data(), layer, plane, first, n, back.data());
                ASSERT_EQ(back, tile(layer, plane, first, n));
            }
    }
    void round_trip(uint32_t first, uint32_t n)
    {
        write(first, n);
        expect_written(first, n);
        expect_read(first, n);
    }
};

struct Range {
    uint32_t first, n;
};
std::vector<Range> ranges(uint32_t N)
{
    return {{0, 1}, {0, N}, {N - 1, 2}, {3, 2 * N + 5}, {N, N}, {5, 1}, {2 * N + 1, N - 2}};
}

#define FOR_SHAPES_AND_RANGES(setup)                                                               \
    for (uint32_t head_dim : {64u, 80u, 128u})                                                     \
        for (uint32_t block_tokens : {16u, 32u, 128u})                                             \
            for (cg_dtype dtype : {CG_DTYPE_BF16, CG_DTYPE_FP32, CG_DTYPE_FP8_E4M3})               \
                for (const Range &r : ranges(block_tokens)) {                                      \
                    SCOPED_TRACE(testing::Message()                                                \
                                 << "D " << head_dim << " N " << block_tokens << " dtype "         \
                                 << dtype << " tokens " << r.first << "+" << r.n);                 \
                    start(head_dim, block_tokens, dtype);                                          \
                    setup();                                                                       \
                    round_trip(r.first, r.n);                                                      \
                    free(layout);                                                                  \
                    layout = nullptr;                                                              \
                    if (HasFatalFailure())                                                         \
                        return;                                                                    \
                }

TEST_F(BlocksTest, VllmsTransposedKeysComeBack){
    FOR_SHAPES_AND_RANGES(use_vec)} TEST_F(BlocksTest, FlashLayoutComesBack){
    FOR_SHAPES_AND_RANGES(use_flash)} TEST_F(BlocksTest, AnyStridesComeBack){
    FOR_SHAPES_AND_RANGES(use_odd)} TEST_F(BlocksTest, DimsThatRunBackwardComeBack){
    FOR_SHAPES_AND_RANGES(use_backward)} TEST_F(BlocksTest, BlocksAtOddAddressesComeBack){
    FOR_SHAPES_AND_RANGES(use_unaligned)}

TEST_F(BlocksTest, VllmsAmxPackingComesBack)
{
    for (uint32_t head_dim : {64u, 96u, 128u})
        for (uint32_t block_tokens : {32u, 128u})
            for (const Range &r : ranges(block_tokens)) {
                SCOPED_TRACE(testing::Message() << "D " << head_dim << " N " << block_tokens
                                                << " tokens " << r.first << "+" << r.n);
                for (cg_dtype dtype : {CG_DTYPE_BF16, CG_DTYPE_FP8_E4M3, CG_DTYPE_FP8_E5M2}) {
                    start(head_dim, block_tokens, dtype);
                    use_amx();
                    round_trip(r.first, r.n);
                    free(layout);
                    layout = nullptr;
                    if (HasFatalFailure())
                        return;
                }
            }
}

TEST_F(BlocksTest, RefusesLayoutsThatAreNotTheModels)
{
    const struct {
        const char *what;
        void (*change)(cachegen_kv_layout *);
        cg_status want;
    } cases[] = {
        {"heads", [](cachegen_kv_layout *g) { g->n_kv_heads = 4; }, CG_ERR_INVALID_ARGUMENT},
        {"dims", [](cachegen_kv_layout *g) { g->head_dim = 32; }, CG_ERR_INVALID_ARGUMENT},
        {"dtype", [](cachegen_kv_layout *g) { g->dtype = CG_DTYPE_FP32; }, CG_ERR_INVALID_ARGUMENT},
        {"no layers", [](cachegen_kv_layout *g) { g->n_layers = 0; }, CG_ERR_INVALID_ARGUMENT},
        {"too many layers", [](cachegen_kv_layout *g) { g->n_layers = 3; },
         CG_ERR_INVALID_ARGUMENT},
        {"layers beyond the model", [](cachegen_kv_layout *g) { g->first_layer = 1; },
         CG_ERR_INVALID_ARGUMENT},
        {"no blocks", [](cachegen_kv_layout *g) { g->n_blocks = 0; }, CG_ERR_INVALID_ARGUMENT},
        {"no tokens a block", [](cachegen_kv_layout *g) { g->block_tokens = 0; },
         CG_ERR_INVALID_ARGUMENT},
        {"no base", [](cachegen_kv_layout *g) { g->base = nullptr; }, CG_ERR_INVALID_ARGUMENT},
        {"CUDA memory", [](cachegen_kv_layout *g) { g->memory = CACHEGEN_MEMORY_CUDA; },
         CG_ERR_UNSUPPORTED},
        {"unknown layout", [](cachegen_kv_layout *g) { g->layout = 2; }, CG_ERR_UNSUPPORTED},
        {"AMX of 16 tokens",
         [](cachegen_kv_layout *g) {
             g->layout = 1;
             g->block_tokens = 16;
         },
         CG_ERR_UNSUPPORTED},
    };
    for (const auto &c : cases) {
        start(64, 32);
        c.change(&given);
        EXPECT_EQ(cg_kv_layout_new(&given, &model, &layout), c.want) << c.what;
        EXPECT_EQ(layout, nullptr);
    }
}

TEST_F(BlocksTest, ATableMustCoverItsTokensWithBlocksThatExist)
{
    start(64, 32);
    use_vec();
    EXPECT_TRUE(cg_kv_layout_covers(layout, table.data(), 2, 64));
    EXPECT_FALSE(cg_kv_layout_covers(layout, table.data(), 2, 65));
    EXPECT_TRUE(cg_kv_layout_covers(layout, nullptr, 0, 0));
    // Of 2^32 tokens; only the blocks that are needed are looked at.
    EXPECT_TRUE(cg_kv_layout_covers(layout, table.data(), 1u << 27, 64));
    for (int64_t bad : {int64_t{-1}, int64_t{BLOCKS}, INT64_MAX, INT64_MIN}) {
        table[1] = bad;
        EXPECT_FALSE(cg_kv_layout_covers(layout, table.data(), 2, 33)) << bad;
        EXPECT_TRUE(cg_kv_layout_covers(layout, table.data(), 2, 32))
            << "a block that is not needed";
    }
}

} // namespace
