/* tests/codec/golden.h - which golden files there are: shared by the program that made them and the
 * test. */
#ifndef CG_TESTS_CODEC_GOLDEN_H
#define CG_TESTS_CODEC_GOLDEN_H
#include "profile_maker.h"

namespace cg_test
{

struct GoldenChunk {
    const char *name; // NAME.kv, and NAME.raw with the elements that it decodes to
    unsigned dtype;
    int level;
    int chunk; // 0: 24 tokens at position 0, with sinks; 1: the 13 that follow, a tail
    size_t n_streams = 1;
    int finest = 0; // above 0: nested from there to L3, and cut where level ends
};

inline const std::vector<GoldenChunk> klt_chunks = {
    {"bf16-0-L0", CG_DTYPE_BF16, 0, 0},
    {"bf16-0-L1", CG_DTYPE_BF16, 1, 0},
    {"bf16-0-L2", CG_DTYPE_BF16, 2, 0},
    {"bf16-0-L3", CG_DTYPE_BF16, 3, 0},
    {"bf16-1-L0", CG_DTYPE_BF16, 0, 1},
    {"bf16-1-L1", CG_DTYPE_BF16, 1, 1},
    {"bf16-1-L2", CG_DTYPE_BF16, 2, 1},
    {"bf16-1-L3", CG_DTYPE_BF16, 3, 1},
    {"fp16-0-L0", CG_DTYPE_FP16, 0, 0},
    {"fp16-0-L2", CG_DTYPE_FP16, 2, 0},
    {"fp32-0-L0", CG_DTYPE_FP32, 0, 0},
    {"fp32-0-L2", CG_DTYPE_FP32, 2, 0},
    {"bf16-1-L1-streams", CG_DTYPE_BF16, 1, 1, 3},
};

// Groups of 10, 10 and 4 tokens, and of 10 and 3.
inline const std::vector<GoldenChunk> paper_chunks = {
    {"bf16-0-L1", CG_DTYPE_BF16, 1, 0}, {"bf16-0-L2", CG_DTYPE_BF16, 2, 0},
    {"bf16-0-L3", CG_DTYPE_BF16, 3, 0}, {"bf16-1-L1", CG_DTYPE_BF16, 1, 1},
    {"bf16-1-L2", CG_DTYPE_BF16, 2, 1}, {"bf16-1-L3", CG_DTYPE_BF16, 3, 1},
    {"fp16-1-L2", CG_DTYPE_FP16, 2, 1}, {"fp32-1-L2", CG_DTYPE_FP32, 2, 1},
};

inline ProfileSpec golden_spec(bool paper)
{
    ProfileSpec spec = paper ? paper_spec() : ProfileSpec();
    spec.n_layers = 3;
    spec.n_kv_heads = 2;
    spec.head_dim = 8;
    spec.group_layers = {2, 1};
    spec.rotary_dim = paper ? 0 : 6; // less than head_dim
    spec.all_active = false;
    spec.seed = 2026;
    return spec;
}

inline const std::vector<GoldenChunk> packed_chunks = {
    {"bf16-0-L1", CG_DTYPE_BF16, 1, 0}, {"bf16-0-L2", CG_DTYPE_BF16, 2, 0},
    {"bf16-0-L3", CG_DTYPE_BF16, 3, 0}, {"bf16-1-L1", CG_DTYPE_BF16, 1, 1},
    {"bf16-1-L2", CG_DTYPE_BF16, 2, 1}, {"bf16-1-L3", CG_DTYPE_BF16, 3, 1},
};

// Narrow components of 2 to 12 bits, whose ends lie anywhere in a byte.
inline ProfileSpec packed_spec()
{
    ProfileSpec spec = golden_spec(false);
    spec.packed = true;
    spec.wide_share = 0.2;
    spec.n_kv_heads = 1;
    spec.head_dim = 18;
    return spec;
}

inline const std::vector<GoldenChunk> nested_chunks = {
    {"bf16-0-L1", CG_DTYPE_BF16, 1, 0, 1, 1}, {"bf16-0-L2", CG_DTYPE_BF16, 2, 0, 1, 1},
    {"bf16-0-L3", CG_DTYPE_BF16, 3, 0, 1, 1}, {"bf16-1-L1", CG_DTYPE_BF16, 1, 1, 1, 1},
    {"bf16-1-L2", CG_DTYPE_BF16, 2, 1, 1, 1}, {"bf16-1-L3", CG_DTYPE_BF16, 3, 1, 1, 1},
    {"fp32-1-L2", CG_DTYPE_FP32, 2, 1, 1, 2},
};

// Levels given the next coarser one; and two tables of rotation, which layers use in turn.
inline ProfileSpec nested_spec()
{
    ProfileSpec spec = golden_spec(false);
    spec.nests = true;
    spec.packed = true;
    spec.n_kv_heads = 1;
    spec.head_dim = 40; // more than a strip of columns
    spec.rotary_dim = 40;
    spec.theta = {10000.0, 500.0};
    spec.layer_rope = {0, 1, 0};
    return spec;
}

inline const std::vector<GoldenChunk> joined_chunks = {
    {"bf16-0-L1", CG_DTYPE_BF16, 1, 0, 1, 1}, {"bf16-0-L2", CG_DTYPE_BF16, 2, 0, 1, 1},
    {"bf16-0-L3", CG_DTYPE_BF16, 3, 0, 1, 1}, {"bf16-1-L1", CG_DTYPE_BF16, 1, 1, 1, 1},
    {"bf16-1-L2", CG_DTYPE_BF16, 2, 1, 1, 1}, {"bf16-1-L3", CG_DTYPE_BF16, 3, 1, 1, 1},
    {"fp32-1-L2", CG_DTYPE_FP32, 2, 1, 1, 2}, {"fp16-0-L1", CG_DTYPE_FP16, 1, 0},
    {"fp32-0-L3", CG_DTYPE_FP32, 3, 0},       {"bf16-0-L2-streams", CG_DTYPE_BF16, 2, 0, 3},
};

// Nested; K and V in one matrix; and two tables of rotation.
inline ProfileSpec joined_spec()
{
    ProfileSpec spec = spec_2(true, golden_spec(false));
    spec.nests = true;
    spec.n_kv_heads = 1;
    spec.head_dim = 24;
    spec.rotary_dim = 20;
    spec.n_sinks = 1;
    spec.unit_bits = 14;
    spec.theta = {10000.0, 500.0};
    spec.layer_rope = {0, 1, 0};
    return spec;
}

inline const std::vector<GoldenChunk> fp8_chunks = {
    {"e4m3-0-L0", CG_DTYPE_FP8_E4M3, 0, 0},       {"e5m2-0-L0", CG_DTYPE_FP8_E5M2, 0, 0},
    {"e4m3-0-L1", CG_DTYPE_FP8_E4M3, 1, 0, 1, 1}, {"e4m3-0-L2", CG_DTYPE_FP8_E4M3, 2, 0, 1, 1},
    {"e4m3-0-L3", CG_DTYPE_FP8_E4M3, 3, 0, 1, 1}, {"e4m3-1-L1", CG_DTYPE_FP8_E4M3, 1, 1},
    {"e4m3-1-L2", CG_DTYPE_FP8_E4M3, 2, 1},       {"e4m3-1-L3", CG_DTYPE_FP8_E4M3, 3, 1},
    {"e5m2-1-L2", CG_DTYPE_FP8_E5M2, 2, 1},
};

// Of K and V of golden_spec()'s layers: elements of make_elements() overflow with some, and are
// subnormal with others.
inline const float golden_scales[3][2] = {{1, 0.03f}, {0.003f, 7}, {300, 0.3f}};

// A joint matrix over the first 32 components of both groups, otherwise as joined_spec().
inline ProfileSpec joint_spec()
{
    return spec_3(joined_spec());
}

// Blocks with steps of their own; otherwise as joint_spec(), or with K and V apart.
inline ProfileSpec steps_spec(bool joined)
{
    ProfileSpec spec = joined ? joined_spec() : golden_spec(false);
    spec.nests = true;
    return spec_4(spec, joined ? 32 : 0);
}

// Rows are not in the order of blocks: of chunk 1 the last block, which is no whole one, comes
// first.
inline Bytes golden_steps(int chunk)
{
    return chunk == 0 ? Bytes{5, 0, 2} : Bytes{6, 1};
}

struct GoldenSet {
    const char *directory;
    ProfileSpec spec;
    const std::vector<GoldenChunk> &chunks;
    const char *profile_fingerprint;
    bool has_scales = false; // golden_scales; then there is no bf16, but e4m3
};

// The set's profile as its chunks need it.
inline Profile golden_profile(const GoldenSet &set, const Bytes &bytes)
{
    Profile profile = open_profile(bytes);
    if (set.has_scales && cg_profile_for_cache_scales(profile.get(), golden_scales) != CG_OK)
        profile.reset();
    return profile;
}

inline const GoldenSet golden_sets[] = {
    {"v1", golden_spec(false), klt_chunks, "f26e208904773a2dcc5e063a8f84d734"},
    {"v1-paper", golden_spec(true), paper_chunks, "7bc0ea4292054883eba592ed74ae55a9"},
    {"v1-packed", packed_spec(), packed_chunks, "fb55b41cdccd9486739dda60443444c9"},
    {"v2-nested", nested_spec(), nested_chunks, "7fc1c2a12aa28c0d29162e3fd4ae3d89"},
    {"v3", spec_2(false, golden_spec(false)), klt_chunks, "6db65725533790f93a9b290481a3aafa"},
    {"v3-paper", spec_2(false, golden_spec(true)), paper_chunks,
     "f2838f8a92d5a03e8f017950ae28dabc"},
    {"v3-joined", joined_spec(), joined_chunks, "1f2c8dac21a23171e5c8aac29f886736"},
    {"v3-fp8", joined_spec(), fp8_chunks, "1f2c8dac21a23171e5c8aac29f886736", true},
    {"v4", joint_spec(), joined_chunks, "c57ac8ed74b804f1b609369b021289da"},
    {"v5", steps_spec(true), joined_chunks, "b914f8aa6678becdc1e7c2be0a51021e"},
    {"v5-apart", steps_spec(false), joined_chunks, "f490d94dd67930ee00403f36ba390179"},
};

// The key of chunk 0, which is chunk 1's parent, needs chunk 0's tokens.
inline cg_chunk_header golden_header(const GoldenSet &set, unsigned dtype, int chunk,
                                     std::vector<uint32_t> *tokens_out)
{
    const std::vector<uint32_t> all = make_tokens(37, 2026);
    cg_chunk_header header = make_header(set.spec, static_cast<uint8_t>(dtype), chunk == 0 ? 0 : 24,
                                         chunk == 0 ? 24 : 13);
    header.parent = cg_key_root(&header.model, "golden", 6);
    header.extra = cg_key_of_bytes("lora", 4);
    header.cache_scales = set.has_scales ? cg_cache_scales_hash(golden_scales, 3) : 0;
    if (chunk == 1)
        header.parent = cg_key_chunk(&header.parent, &header.extra, all.data(), 24);
    tokens_out->assign(all.begin() + header.first_position,
                       all.begin() + header.first_position + header.n_tokens);
    return header;
}

} // namespace cg_test
#endif
