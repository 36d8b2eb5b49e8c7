/* tests/cuda/decode_cases.h - chunks and block layouts, and what decoding them into blocks must
 * give.
 *
 * Shared by the emulator's tests and the tests on a GPU: both decode the same cases and compare all
 * bytes of the blocks with what the CPU's codec decodes.
 */
#ifndef CG_TESTS_CUDA_DECODE_CASES_H
#define CG_TESTS_CUDA_DECODE_CASES_H
#include "cuda/decode.h"
#include "profile_maker.h"

namespace cg_test
{

/* How an engine lays its blocks out: the order of dimensions, outermost first. */
enum class Order {
    PLANE_BLOCK_TOKEN_HEAD, /* FlashAttention: K and V apart, tokens outside heads */
    BLOCK_PLANE_TOKEN_HEAD, /* FlashInfer, Triton: a block's K and V together */
    BLOCK_PLANE_HEAD_TOKEN, /* FlashInfer's HND */
    BLOCK_HEAD_DIM_TOKEN,   /* dims apart: a transposed K, as CPUs have it; nothing is contiguous */
};

struct BlockSpec {
    Order order = Order::BLOCK_PLANE_TOKEN_HEAD;
    uint32_t block_tokens = 16, n_blocks = 40, first_token = 0;
    uint32_t head_from = 0, head_to = 0; /* 0: all heads */
    uint64_t seed = 1;
};

/* The engine's blocks of all layers in one piece, and the table of a sequence. */
struct Blocks {
    cg_cuda_blocks layout = {};
    std::vector<int64_t> table;
    std::vector<size_t> base; /* [layers], in the piece */
    size_t n_bytes = 0;
};

inline Blocks make_blocks(const BlockSpec &spec, const cg_geometry &g, uint32_t n_tokens)
{
    Blocks out;
    cg_cuda_blocks &b = out.layout;
    const uint32_t head_to = spec.head_to > 0 ? spec.head_to : g.n_kv_heads;
    const int64_t n = static_cast<int64_t>(cg_dtype_bytes(g.dtype)), dims = g.head_dim,
                  heads = head_to - spec.head_from, tokens = spec.block_tokens,
                  plane = tokens * heads * dims * n, all = static_cast<int64_t>(spec.n_blocks);
    const bool is_plane_first = spec.order == Order::PLANE_BLOCK_TOKEN_HEAD;
    b.block_tokens = spec.block_tokens;
    b.n_blocks = spec.n_blocks;
    b.first_token = spec.first_token;
    b.head_from = spec.head_from;
    b.block_stride = is_plane_first ? plane : 2 * plane;
    b.offset_bytes[1] = is_plane_first ? all * plane : plane;
    for (int p = 0; p < 2; p++) {
        switch (spec.order) {
        case Order::PLANE_BLOCK_TOKEN_HEAD:
        case Order::BLOCK_PLANE_TOKEN_HEAD:
            b.token_stride[p] = heads * dims * n;
            b.head_stride[p] = dims * n;
            b.dim_stride[p] = n;
            break;
        case Order::BLOCK_PLANE_HEAD_TOKEN:
            b.head_stride[p] = tokens * dims * n;
            b.token_stride[p] = dims * n;
            b.dim_stride[p] = n;
            break;
        case Order::BLOCK_HEAD_DIM_TOKEN:
            b.head_stride[p] = tokens * dims * n;
            b.dim_stride[p] = tokens * n;
            b.token_stride[p] = n;
            break;
        }
    }
    const size_t layer_bytes = static_cast<size_t>(2 * all * plane);
    for (unsigned layer = 0; layer < g.n_layers; layer++)
        out.base.push_back(layer * layer_bytes);
    out.n_bytes = g.n_layers * layer_bytes;
    Random random(spec.seed);
    std::vector<int64_t> ids(spec.n_blocks);
    for (uint32_t i = 0; i < spec.n_blocks; i++) {
        ids[i] = i;
        std::swap(ids[i], ids[random.below(i + 1)]);
    }
    const uint32_t n_table =
        (spec.first_token + n_tokens + spec.block_tokens - 1) / spec.block_tokens;
    out.table.assign(ids.begin(), ids.begin() + n_table);
    b.n_table = n_table;
    return out;
}

/* Writes what a request wants of elements, in the codec's layout, into the piece of blocks. */
inline void place(const Bytes &elements, const cg_geometry &g, uint32_t n_tokens,
                  uint32_t first_layer, uint32_t n_layers, const cg_cuda_request &r,
                  const Blocks &blocks, uint8_t *piece)
{
    const size_t n = cg_dtype_bytes(g.dtype);
    const cg_cuda_blocks &b = blocks.layout;
    for (uint32_t layer = first_layer; layer < first_layer + n_layers; layer++) {
        for (uint32_t plane = 0; plane < 2; plane++) {
            for (uint32_t t = r.token_from; t < r.token_to; t++) {
                const uint32_t at = b.first_token + t;
                const int64_t id = blocks.table[at / b.block_tokens];
                for (uint32_t head = r.head_from; head < r.head_to; head++) {
                    const size_t from =
                        (((size_t{layer} * 2 + plane) * n_tokens + t) * g.n_kv_heads + head) *
                        g.head_dim * n;
                    for (int64_t dim = 0; dim < g.head_dim; dim++)
                        memcpy(piece + blocks.base[layer] + b.offset_bytes[plane] +
                                   id * b.block_stride +
                                   int64_t{head - b.head_from} * b.head_stride[plane] +
                                   int64_t{at % b.block_tokens} * b.token_stride[plane] +
                                   dim * b.dim_stride[plane],
                               elements.data() + from + static_cast<size_t>(dim) * n, n);
                }
            }
        }
    }
}

} // namespace cg_test
#endif
