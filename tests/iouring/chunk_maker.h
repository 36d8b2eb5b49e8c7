// tests/iouring/chunk_maker.h - valid chunk files of arbitrary content, for tests of whatever moves
// chunks about.
//
// cg_chunk_verify() takes what is made here (tokens and one section of arbitrary bytes); a decoder
// does not.
#ifndef CG_TESTS_IOURING_CHUNK_MAKER_H
#define CG_TESTS_IOURING_CHUNK_MAKER_H
#include "codec/chunk.h"
#include "codec/cursor.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

namespace cg_test
{

struct Chunk {
    std::vector<uint8_t> bytes;
    cg_chunk_header header;
    std::vector<uint32_t> tokens;
};

inline cg_fingerprint fingerprint_of(const char *text)
{
    cg_fingerprint fingerprint;
    const cg_key key = cg_key_of_bytes(text, std::strlen(text));
    std::memcpy(fingerprint.bytes, key.bytes, sizeof fingerprint.bytes);
    return fingerprint;
}

inline cg_fingerprint model_fingerprint()
{
    return fingerprint_of("a model");
}

inline std::vector<uint32_t> draw_tokens(size_t n, uint32_t seed)
{
    std::mt19937 random(seed);
    std::vector<uint32_t> tokens(n);
    for (uint32_t &token : tokens)
        token = random() % 50000;
    return tokens;
}

// A chunk of these tokens; before: the chunk that it follows, or nullptr. payload_bytes are drawn
// from seed: same arguments, same file. profile: of levels 1 to 3. coarsest: above level, a nested
// chunk, payload_bytes a level. prefix_level: its provenance. version: CG_CHUNK_VERSION_ALIGNED, or
// older.
inline Chunk make_chunk(const Chunk *before, const std::vector<uint32_t> &tokens, cg_level level,
                        const cg_fingerprint *profile = nullptr, size_t payload_bytes = 1000,
                        uint32_t seed = 1, cg_level coarsest = CG_L0, cg_level prefix_level = CG_L0,
                        uint32_t version = 1)
{
    Chunk chunk;
    chunk.tokens = tokens;
    cg_chunk_header h = {};
    h.version = version;
    h.level = static_cast<uint8_t>(level);
    h.token_bytes = 2;
    h.prefix_level = static_cast<uint8_t>(prefix_level);
    h.n_tokens = static_cast<uint32_t>(tokens.size());
    h.coarsest = static_cast<uint8_t>(std::max(level, coarsest));
    h.n_sections = 2u + h.coarsest - h.level;
    h.geometry = {2, 1, 8, CG_DTYPE_BF16, CG_N_PLANES};
    h.model = model_fingerprint();
    if (level != CG_L0)
        h.profile = *profile;
    h.parent = before != nullptr ? before->header.key : cg_key_root(&h.model, nullptr, 0);
    h.first_position =
        before != nullptr ? before->header.first_position + before->header.n_tokens : 0;
    h.key = cg_key_chunk(&h.parent, &h.extra, tokens.data(), tokens.size());

    cg_section sections[CG_N_LEVELS] = {};
    sections[0].kind = CG_SECTION_TOKENS;
    sections[0].bytes = 2 * h.n_tokens;
    for (uint32_t i = 1; i < h.n_sections; i++) {
        sections[i].kind = level == CG_L0 ? CG_SECTION_LOSSLESS : CG_SECTION_SYMBOLS;
        if (i > 1)
            sections[i].kind = cg_section_to_level(h.coarsest + 1u - i);
        sections[i].bytes = static_cast<uint32_t>(payload_bytes);
    }
    const size_t header_bytes = CG_CHUNK_FIXED_BYTES + h.n_sections * CG_CHUNK_SECTION_BYTES;
    const size_t align = cg_chunk_align(version);
    chunk.bytes.resize(header_bytes);
    for (uint32_t token : tokens) {
        chunk.bytes.push_back(static_cast<uint8_t>(token));
        chunk.bytes.push_back(static_cast<uint8_t>(token >> 8));
    }
    chunk.bytes.resize(cg_padded(chunk.bytes.size(), align));
    std::mt19937 random(seed);
    for (uint32_t section = 1; section < h.n_sections; section++) {
        for (size_t i = 0; i < payload_bytes; i++)
            chunk.bytes.push_back(static_cast<uint8_t>(random()));
        chunk.bytes.resize(cg_padded(chunk.bytes.size(), align));
    }
    if (cg_chunk_finish(&h, sections, chunk.bytes.data(), chunk.bytes.size()) != CG_OK ||
        cg_chunk_verify(chunk.bytes.data(), chunk.bytes.size()) != CG_OK ||
        cg_chunk_header_parse(chunk.bytes.data(), chunk.bytes.size(), &chunk.header) != CG_OK)
        throw std::logic_error("chunk_maker makes no valid chunks");
    return chunk;
}

// n_chunks chunks of 16 tokens, one after another.
inline std::vector<Chunk> make_chain(size_t n_chunks, cg_level level,
                                     const cg_fingerprint *profile = nullptr, uint32_t seed = 1,
                                     size_t payload_bytes = 1000)
{
    std::vector<Chunk> chain;
    for (size_t i = 0; i < n_chunks; i++) {
        const uint32_t chunk_seed = seed * 1000 + static_cast<uint32_t>(i);
        chain.push_back(make_chunk(i == 0 ? nullptr : &chain.back(), draw_tokens(16, chunk_seed),
                                   level, profile, payload_bytes, chunk_seed));
    }
    return chain;
}

} // namespace cg_test
#endif
