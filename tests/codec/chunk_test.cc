#include "codec/chunk.h"

#include "codec/block_order.h"
#include "codec/cursor.h"

#include <algorithm>
#include <functional>
#include <gtest/gtest.h>
#include <string>
#include <vector>
#include <xxhash.h>

namespace
{

using Bytes = std::vector<uint8_t>;

constexpr size_t kHashOffset = 152;

// Header and table hash, as FORMAT.md says: over bytes 0..151 and the section table.
void rehash(Bytes *file)
{
    const size_t header_bytes = std::min<size_t>(cg_get_le(file->data() + 12, 4), file->size());
    Bytes hashed(file->begin(), file->begin() + kHashOffset);
    if (header_bytes > CG_CHUNK_FIXED_BYTES)
        hashed.insert(hashed.end(), file->begin() + CG_CHUNK_FIXED_BYTES,
                      file->begin() + header_bytes);
    cg_put_le(file->data() + kHashOffset, 8, XXH3_64bits(hashed.data(), hashed.size()));
}

cg_section section(uint8_t kind, uint8_t plane, uint16_t group, uint32_t bytes)
{
    return {kind, plane, group, 0, bytes, 0};
}

class ChunkTest : public testing::Test
{
  protected:
    ChunkTest()
    {
        header.level = CG_L2;
        header.token_bytes = 3;
        header.first_position = 256;
        header.n_tokens = 5;
        header.geometry = {4, 2, 8, CG_DTYPE_BF16, 2};
        for (uint8_t i = 0; i < 16; i++) {
            header.model.bytes[i] = i;
            header.profile.bytes[i] = 16 + i;
        }
        header.parent = cg_key_root(&header.model, nullptr, 0);
        header.key = cg_key_chunk(&header.parent, &header.extra, tokens.data(), tokens.size());
        sections = {
            section(CG_SECTION_TOKENS, 0, 0, 15),    section(CG_SECTION_SYMBOLS, CG_K, 0, 40),
            section(CG_SECTION_SINKS, CG_K, 0, 7),   section(CG_SECTION_SYMBOLS, CG_V, 0, 0),
            section(CG_SECTION_SYMBOLS, CG_K, 1, 1), section(CG_SECTION_SYMBOLS, CG_V, 1, 33),
        };
    }

    // The file that the sections make; their payload counts up, but for the tokens.
    Bytes make(cg_status want = CG_OK)
    {
        header.n_sections = static_cast<uint32_t>(sections.size());
        size_t at = CG_CHUNK_FIXED_BYTES + sections.size() * CG_CHUNK_SECTION_BYTES;
        const size_t tokens_at = at;
        Bytes file(at);
        for (const cg_section &s : sections) {
            for (size_t i = at; i < at + s.bytes; i++)
                file.push_back(s.kind == CG_SECTION_STEPS ? factor_index : static_cast<uint8_t>(i));
            at += cg_padded(s.bytes, cg_chunk_align(header.version));
            file.resize(at);
        }
        for (size_t i = 0; i < tokens.size(); i++)
            cg_put_le(file.data() + tokens_at + i * header.token_bytes, header.token_bytes,
                      tokens[i]);
        EXPECT_EQ(cg_chunk_finish(&header, sections.data(), file.data(), file.size()), want);
        return file;
    }

    static cg_status open(const Bytes &file)
    {
        // Of exactly its size on the heap: ASan sees an over-read.
        Bytes exact(file);
        exact.shrink_to_fit();
        cg_chunk chunk;
        return cg_chunk_open(exact.data(), exact.size(), &chunk);
    }
    static cg_status verify(const Bytes &file)
    {
        Bytes exact(file);
        exact.shrink_to_fit();
        const auto read = [](void *user, uint64_t offset, uint8_t *bytes_out, size_t n_bytes) {
            std::copy_n(static_cast<const Bytes *>(user)->begin() + static_cast<ptrdiff_t>(offset),
                        n_bytes, bytes_out);
            return CG_OK;
        };
        cg_chunk_header header_out;
        const cg_status status = cg_chunk_verify(exact.data(), exact.size());
        EXPECT_EQ(cg_chunk_verify_source(read, &exact, exact.size(), &header_out), status);
        return status;
    }

    const std::vector<uint32_t> tokens = {1, 0xffffff, 3, 70000, 5};
    cg_chunk_header header = {};
    std::vector<cg_section> sections;
    uint8_t factor_index = 3; // of each block, with steps
};

TEST_F(ChunkTest, OpensWhatWasFinished)
{
    const Bytes file = make();
    ASSERT_EQ(verify(file), CG_OK);
    cg_chunk chunk;
    ASSERT_EQ(cg_chunk_open(file.data(), file.size(), &chunk), CG_OK);
    const cg_chunk_header &h = chunk.header;
    EXPECT_EQ(h.version, 1u);
    EXPECT_EQ(h.header_bytes, 160u + 16 * 6);
    EXPECT_EQ(h.file_bytes, file.size());
    EXPECT_EQ(h.level, CG_L2);
    EXPECT_EQ(h.prefix_level, 0);
    EXPECT_EQ(h.token_bytes, 3);
    EXPECT_EQ(h.first_position, 256u);
    EXPECT_EQ(h.n_tokens, 5u);
    EXPECT_EQ(h.n_sections, 6u);
    EXPECT_TRUE(cg_geometry_equal(&h.geometry, &header.geometry));
    EXPECT_EQ(0, memcmp(h.model.bytes, header.model.bytes, 16));
    EXPECT_EQ(0, memcmp(h.profile.bytes, header.profile.bytes, 16));
    EXPECT_TRUE(cg_key_equal(&h.parent, &header.parent));
    EXPECT_TRUE(cg_key_is_zero(&h.extra));
    EXPECT_TRUE(cg_key_equal(&h.key, &header.key));

    uint64_t offset = h.header_bytes;
    for (uint32_t i = 0; i < h.n_sections; i++) {
        SCOPED_TRACE(i);
        const cg_section s = cg_chunk_section(&chunk, i);
        EXPECT_EQ(s.kind, sections[i].kind);
        EXPECT_EQ(s.plane, sections[i].plane);
        EXPECT_EQ(s.group, sections[i].group);
        EXPECT_EQ(s.bytes, sections[i].bytes);
        EXPECT_EQ(s.offset, offset);
        EXPECT_EQ(s.hash, XXH3_64bits(file.data() + offset, s.bytes));
        EXPECT_EQ(cg_chunk_section_check(&chunk, &s), CG_OK);
        offset += s.bytes;
    }
    std::vector<uint32_t> ids(h.n_tokens);
    ASSERT_EQ(cg_chunk_tokens(&chunk, ids.data()), CG_OK);
    EXPECT_EQ(ids, tokens);
}

TEST_F(ChunkTest, PutsFieldsWhereTheFormatSays)
{
    header.prefix_level = CG_L1;
    const Bytes file = make();
    const uint8_t magic[] = {0x43, 0x47, 0x4b, 0x56, 0x0d, 0x0a, 0x1a, 0x0a};
    EXPECT_TRUE(std::equal(magic, magic + 8, file.begin()));
    const struct {
        size_t offset, bytes;
        uint64_t want;
    } fields[] = {
        {8, 4, 1},    {12, 4, 256}, {16, 8, file.size()}, {24, 1, 2},   {25, 1, 1},  {26, 1, 3},
        {27, 1, 1},   {28, 2, 4},   {30, 2, 2},           {32, 2, 8},   {34, 1, 2},  {35, 1, 0},
        {36, 4, 256}, {40, 4, 5},   {44, 4, 6},           {48, 8, 0},   {56, 1, 0},  {72, 1, 16},
        {136, 8, 0},  {144, 8, 0},  {160, 1, 1},          {164, 4, 15}, {176, 1, 3}, {177, 1, 0},
        {178, 2, 0},  {180, 4, 40},
    };
    for (const auto &f : fields)
        EXPECT_EQ(cg_get_le(file.data() + f.offset, f.bytes), f.want) << "offset " << f.offset;
    Bytes again = file;
    rehash(&again);
    EXPECT_EQ(again, file);
}

TEST_F(ChunkTest, RefusesEveryTruncation)
{
    const Bytes file = make();
    for (size_t n = 0; n < file.size(); n++)
        EXPECT_EQ(open(Bytes(file.begin(), file.begin() + n)), CG_ERR_TRUNCATED) << n;
    Bytes longer = file;
    longer.push_back(0);
    EXPECT_EQ(open(longer), CG_ERR_CORRUPT);
}

TEST_F(ChunkTest, RefusesEveryFlippedBit)
{
    const Bytes file = make();
    const size_t header_bytes = 160 + 16 * sections.size();
    for (size_t bit = 0; bit < 8 * file.size(); bit++) {
        Bytes damaged = file;
        damaged[bit / 8] ^= 1 << bit % 8;
        if (bit / 8 < header_bytes) {
            EXPECT_NE(open(damaged), CG_OK) << "bit " << bit;
        }
        EXPECT_NE(verify(damaged), CG_OK) << "bit " << bit;
    }
}

// What an attacker can do, who writes the checksum as well.
TEST_F(ChunkTest, RefusesHostileHeaders)
{
    const struct {
        const char *what;
        size_t offset, bytes;
        uint64_t value;
        cg_status want;
    } cases[] = {
        {"unchanged", 24, 1, 2, CG_OK},
        {"magic", 0, 1, 'X', CG_ERR_BAD_MAGIC},
        {"magic, line end converted", 4, 1, '\n', CG_ERR_BAD_MAGIC},
        {"version 0", 8, 4, 0, CG_ERR_UNSUPPORTED_VERSION},
        {"version 6", 8, 4, 6, CG_ERR_UNSUPPORTED_VERSION},
        {"version 4, whose sections are aligned", 8, 4, 4, CG_ERR_CORRUPT},
        {"version 5, which has steps", 8, 4, 5, CG_ERR_CORRUPT},
        {"header_bytes too small", 12, 4, 240, CG_ERR_CORRUPT},
        {"header_bytes too large", 12, 4, 272, CG_ERR_CORRUPT},
        {"header_bytes huge", 12, 4, 0xffffffff, CG_ERR_CORRUPT},
        {"file_bytes smaller", 16, 8, 351, CG_ERR_CORRUPT},
        {"file_bytes larger", 16, 8, 353, CG_ERR_TRUNCATED},
        {"file_bytes huge", 16, 8, ~0ull, CG_ERR_TRUNCATED},
        {"file_bytes 0", 16, 8, 0, CG_ERR_CORRUPT},
        {"level 4", 24, 1, 4, CG_ERR_CORRUPT},
        {"prefix_level 4", 25, 1, 4, CG_ERR_CORRUPT},
        {"token_bytes 1", 26, 1, 1, CG_ERR_CORRUPT},
        {"token_bytes 5", 26, 1, 5, CG_ERR_CORRUPT},
        {"dtype 0", 27, 1, 0, CG_ERR_UNSUPPORTED},
        {"dtype 6", 27, 1, 6, CG_ERR_UNSUPPORTED},
        {"no layers", 28, 2, 0, CG_ERR_CORRUPT},
        {"too many layers", 28, 2, 1025, CG_ERR_CORRUPT},
        {"no heads", 30, 2, 0, CG_ERR_CORRUPT},
        {"too many heads", 30, 2, 1025, CG_ERR_CORRUPT},
        {"no head_dim", 32, 2, 0, CG_ERR_CORRUPT},
        {"head_dim too large", 32, 2, 1026, CG_ERR_CORRUPT},
        {"odd head_dim", 32, 2, 7, CG_ERR_UNSUPPORTED},
        {"one plane", 34, 1, 1, CG_ERR_UNSUPPORTED},
        {"reserved byte", 35, 1, 1, CG_ERR_CORRUPT},
        {"position past 2^32", 36, 4, 0xfffffffe, CG_ERR_CORRUPT},
        {"no tokens", 40, 4, 0, CG_ERR_CORRUPT},
        {"too many tokens", 40, 4, 65537, CG_ERR_CORRUPT},
        {"no sections", 44, 4, 0, CG_ERR_CORRUPT},
        {"fewer sections", 44, 4, 5, CG_ERR_CORRUPT},
        {"too many sections", 44, 4, 8193, CG_ERR_CORRUPT},
        {"sections whose header_bytes wraps", 44, 4, 0x10000006, CG_ERR_CORRUPT},
        {"scales of bf16", 48, 8, 1, CG_ERR_CORRUPT},
        {"reserved at 136", 136, 8, 1, CG_ERR_CORRUPT},
        {"reserved at 144", 144, 8, 1ull << 63, CG_ERR_CORRUPT},
        {"tokens not first", 160, 1, CG_SECTION_SYMBOLS, CG_ERR_CORRUPT},
        {"tokens of plane 1", 161, 1, 1, CG_ERR_CORRUPT},
        {"tokens of group 1", 162, 2, 1, CG_ERR_CORRUPT},
        {"tokens twice", 176, 1, CG_SECTION_TOKENS, CG_ERR_CORRUPT},
        {"kind 0", 176, 1, 0, CG_ERR_CORRUPT},
        {"kind 5", 176, 1, 5, CG_ERR_CORRUPT},
        {"plane 2", 177, 1, 2, CG_ERR_CORRUPT},
        {"symbols twice", 192, 1, CG_SECTION_SYMBOLS, CG_ERR_CORRUPT},
        {"kinds out of order", 176, 1, CG_SECTION_SINKS, CG_ERR_CORRUPT},
        {"planes out of order", 225, 1, 1, CG_ERR_CORRUPT},
        {"groups out of order", 178, 2, 2, CG_ERR_CORRUPT},
        {"section shorter", 180, 4, 39, CG_ERR_CORRUPT},
        {"section longer", 180, 4, 41, CG_ERR_CORRUPT},
        {"section huge", 180, 4, 0xffffffff, CG_ERR_CORRUPT},
    };
    const Bytes file = make();
    ASSERT_EQ(file.size(), 352u);
    for (const auto &c : cases) {
        Bytes hostile = file;
        cg_put_le(hostile.data() + c.offset, c.bytes, c.value);
        rehash(&hostile);
        EXPECT_EQ(open(hostile), c.want) << c.what << ": " << cg_strerror(open(hostile));
    }
}

TEST_F(ChunkTest, RefusesTokensOfAnotherSize)
{
    sections[0].bytes = 14;
    const Bytes shorter = make();
    EXPECT_EQ(open(shorter), CG_OK); // the container is whole
    EXPECT_EQ(verify(shorter), CG_ERR_CORRUPT);
    cg_chunk chunk;
    std::vector<uint32_t> ids(tokens.size());
    ASSERT_EQ(cg_chunk_open(shorter.data(), shorter.size(), &chunk), CG_OK);
    EXPECT_EQ(cg_chunk_tokens(&chunk, ids.data()), CG_ERR_CORRUPT);
    sections[0].bytes = 18;
    EXPECT_EQ(verify(make()), CG_ERR_CORRUPT);
}

TEST_F(ChunkTest, RefusesAKeyThatIsNotTheHashOfItsTokens)
{
    header.key.bytes[3] ^= 1;
    EXPECT_EQ(open(make()), CG_OK);
    EXPECT_EQ(verify(make()), CG_ERR_CORRUPT);
    header.key.bytes[3] ^= 1;
    header.extra.bytes[0] ^= 1;
    EXPECT_EQ(verify(make()), CG_ERR_CORRUPT);
}

TEST_F(ChunkTest, FinishRefusesSectionsThatDoNotAddUp)
{
    make();
    Bytes file(352);
    EXPECT_EQ(cg_chunk_finish(&header, sections.data(), file.data(), 351), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(cg_chunk_finish(&header, sections.data(), file.data(), 159), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(cg_chunk_finish(&header, sections.data(), file.data(), 0), CG_ERR_INVALID_ARGUMENT);
    header.n_sections = CG_CHUNK_MAX_SECTIONS + 1;
    EXPECT_EQ(cg_chunk_finish(&header, sections.data(), file.data(), 352), CG_ERR_INVALID_ARGUMENT);
    EXPECT_EQ(file, Bytes(352)); // nothing was written
}

TEST_F(ChunkTest, TokensTakeTwoToFourBytes)
{
    for (const uint8_t token_bytes : {2, 3, 4}) {
        SCOPED_TRACE(int(token_bytes));
        const std::vector<uint32_t> ids = {0, 1, 0xffff, 0xffffffffu >> (32 - 8 * token_bytes), 7};
        header.token_bytes = token_bytes;
        sections[0].bytes = token_bytes * 5;
        header.key = cg_key_chunk(&header.parent, &header.extra, ids.data(), ids.size());
        Bytes file = make();
        for (size_t i = 0; i < ids.size(); i++)
            cg_put_le(file.data() + 256 + i * token_bytes, token_bytes, ids[i]);
        ASSERT_EQ(cg_chunk_finish(&header, sections.data(), file.data(), file.size()), CG_OK);
        EXPECT_EQ(verify(file), CG_OK);
        cg_chunk chunk;
        std::vector<uint32_t> got(5);
        ASSERT_EQ(cg_chunk_open(file.data(), file.size(), &chunk), CG_OK);
        ASSERT_EQ(cg_chunk_tokens(&chunk, got.data()), CG_OK);
        EXPECT_EQ(got, ids);
    }
}

TEST_F(ChunkTest, TheFixedHeaderAloneTellsSizeAndKey)
{
    const Bytes file = make();
    const Bytes head(file.begin(), file.begin() + CG_CHUNK_FIXED_BYTES);
    cg_chunk_header h;
    ASSERT_EQ(cg_chunk_header_parse(head.data(), head.size(), &h), CG_OK);
    EXPECT_EQ(h.file_bytes, file.size());
    EXPECT_TRUE(cg_key_equal(&h.key, &header.key));
    EXPECT_EQ(cg_chunk_header_parse(head.data(), head.size() - 1, &h), CG_ERR_TRUNCATED);
}

// A writer is at work: what is read first is one file, and all that is read later another.
struct ChangingFile {
    Bytes first, later;
    size_t n_reads = 0;

    static cg_status read(void *user, uint64_t offset, uint8_t *bytes_out, size_t n_bytes)
    {
        auto *self = static_cast<ChangingFile *>(user);
        const Bytes &bytes = self->n_reads++ == 0 ? self->first : self->later;
        std::copy_n(bytes.begin() + static_cast<ptrdiff_t>(offset), n_bytes, bytes_out);
        return CG_OK;
    }
};

TEST_F(ChunkTest, AHeaderThatChangesWhileItIsVerifiedIsCorrupt)
{
    // A long table, so that who reads all of it where memory is for none is far outside.
    for (uint16_t group = 2; group < 300; group++)
        sections.push_back(section(CG_SECTION_SYMBOLS, CG_K, group, 1));
    const Bytes file = make();
    Bytes shorter = file, other = file;
    cg_put_le(shorter.data() + 12, 4, CG_CHUNK_FIXED_BYTES);
    cg_put_le(shorter.data() + 44, 4, 0);
    cg_put_le(other.data() + 36, 4, 512); // first_position
    rehash(&other);
    for (const auto &[first, want] :
         {std::pair{file, CG_OK}, {shorter, CG_ERR_CORRUPT}, {other, CG_ERR_CORRUPT}}) {
        ChangingFile changing{first, file};
        cg_chunk_header out;
        EXPECT_EQ(cg_chunk_verify_source(ChangingFile::read, &changing, file.size(), &out), want);
    }
}

TEST_F(ChunkTest, AlignsTheSectionsOfVersion3)
{
    header.version = CG_CHUNK_VERSION_ALIGNED;
    const Bytes file = make();
    EXPECT_EQ(cg_get_le(file.data() + 8, 4), 3u);
    EXPECT_EQ(file.size(), 256u + 16 + 48 + 16 + 0 + 16 + 48);
    EXPECT_EQ(verify(file), CG_OK);
    cg_chunk chunk;
    ASSERT_EQ(cg_chunk_open(file.data(), file.size(), &chunk), CG_OK);
    std::vector<cg_section> all(chunk.header.n_sections);
    cg_chunk_sections(&chunk, all.data());
    for (uint32_t i = 0; i < all.size(); i++) {
        EXPECT_EQ(all[i].bytes, sections[i].bytes);
        EXPECT_EQ(all[i].offset % 16, 0u);
        EXPECT_EQ(cg_chunk_section(&chunk, i).offset, all[i].offset);
    }
    for (size_t i = 0; i < all.size(); i++) { // what pads a section is zeros
        const size_t end = all[i].offset + all[i].bytes,
                     next = i + 1 < all.size() ? all[i + 1].offset : file.size();
        for (size_t at = end; at < next; at++) {
            Bytes damaged = file;
            damaged[at] = 1;
            EXPECT_EQ(verify(damaged), CG_ERR_CORRUPT) << at;
            cg_chunk opened;
            ASSERT_EQ(cg_chunk_open(damaged.data(), damaged.size(), &opened), CG_OK);
            EXPECT_EQ(cg_chunk_section_check(&opened, &all[i]), CG_ERR_CORRUPT) << at;
        }
    }
    for (size_t n = 0; n < file.size(); n++)
        EXPECT_EQ(verify(Bytes(file.begin(), file.begin() + static_cast<long>(n))),
                  CG_ERR_TRUNCATED)
            << n;
}

// Tokens, two groups of L3, then what makes L2 and L1 of them.
class NestedChunkTest : public ChunkTest
{
  protected:
    NestedChunkTest()
    {
        header.level = CG_L1;
        header.coarsest = CG_L3;
        sections = {
            section(CG_SECTION_TOKENS, 0, 0, 15),   section(CG_SECTION_SYMBOLS, CG_K, 0, 40),
            section(CG_SECTION_SINKS, CG_K, 0, 7),  section(CG_SECTION_SYMBOLS, CG_V, 0, 9),
            section(CG_SECTION_TO_L2, CG_K, 0, 20), section(CG_SECTION_TO_L2, CG_V, 0, 21),
            section(CG_SECTION_TO_L1, CG_K, 0, 30), section(CG_SECTION_TO_L1, CG_V, 0, 31)};
    }
    static Bytes cut(const Bytes &file, size_t n_bytes)
    {
        return Bytes(file.begin(), file.begin() + n_bytes);
    }
};

TEST_F(NestedChunkTest, IsAChunkAtEveryLevelWhereThatLevelEnds)
{
    const Bytes file = make();
    EXPECT_EQ(cg_get_le(file.data() + 8, 4), 2u);
    const size_t ends[] = {0, file.size(), file.size() - 61, file.size() - 61 - 41};
    EXPECT_EQ(cg_get_le(file.data() + 136, 8), ends[CG_L3]);
    EXPECT_EQ(cg_get_le(file.data() + 144, 8), ends[CG_L2]);
    for (unsigned level = CG_L1; level <= CG_L3; level++) {
        SCOPED_TRACE(level);
        const Bytes held = cut(file, ends[level]);
        EXPECT_EQ(verify(held), CG_OK);
        cg_chunk chunk;
        ASSERT_EQ(cg_chunk_open(held.data(), held.size(), &chunk), CG_OK);
        EXPECT_EQ(chunk.header.level, level);
        EXPECT_EQ(chunk.header.coarsest, CG_L3);
        EXPECT_EQ(chunk.header.file_bytes, held.size());
        EXPECT_EQ(chunk.header.n_sections, 8 - 2 * (level - 1));
        for (unsigned other = 0; other < CG_N_LEVELS; other++) {
            EXPECT_EQ(chunk.header.level_bytes[other], other >= level ? ends[other] : 0);
            EXPECT_EQ(cg_chunk_holds(&chunk.header, other), other >= level);
        }
    }
}

TEST_F(NestedChunkTest, CutElsewhereIsTruncated)
{
    const Bytes file = make();
    for (size_t n = 0; n < file.size(); n++) {
        const bool is_level = n == file.size() - 61 || n == file.size() - 102;
        EXPECT_EQ(verify(cut(file, n)), is_level ? CG_OK : CG_ERR_TRUNCATED) << n;
    }
    Bytes longer = file;
    longer.push_back(0);
    EXPECT_EQ(verify(longer), CG_ERR_CORRUPT);
}

TEST_F(NestedChunkTest, RefusesLevelsThatDoNotEndWhereTheHeaderSays)
{
    const Bytes good = make();
    const size_t l3 = good.size() - 102;
    const struct {
        const char *what;
        size_t offset, bytes;
        uint64_t value;
    } cases[] = {
        {"L3 ends earlier", 136, 8, l3 - 1},
        {"L3 ends later", 136, 8, l3 + 1},
        {"L3 ends nowhere", 136, 8, 0},
        {"L2 ends nowhere", 144, 8, 0},
        {"L2 ends before L3", 144, 8, l3 - 1},
        {"L2 ends with the file", 144, 8, good.size()},
        {"L2 ends past the file", 144, 8, ~0ull},
        {"version 1", 8, 4, 1},
        {"level 0", 24, 1, 0},
        {"level 2", 24, 1, 2},
        {"level 3", 24, 1, 3},
        {"kind of L1 where L2 belongs", 160 + 4 * 16, 1, 6},
        {"kind of L2 where L1 belongs", 160 + 6 * 16, 1, 5},
        {"symbols where L1 belongs", 160 + 6 * 16, 1, 3},
        {"a kind that there is not", 160 + 7 * 16, 1, 7},
    };
    for (const auto &c : cases) {
        SCOPED_TRACE(c.what);
        Bytes bad = good;
        cg_put_le(bad.data() + c.offset, c.bytes, c.value);
        rehash(&bad);
        EXPECT_EQ(verify(bad), CG_ERR_CORRUPT);
    }
    Bytes single = good;
    cg_put_le(single.data() + 136, 8, 0);
    cg_put_le(single.data() + 144, 8, 0);
    rehash(&single);
    EXPECT_EQ(verify(single), CG_ERR_CORRUPT);
}

TEST_F(NestedChunkTest, HoldsTwoLevelsToo)
{
    header.level = CG_L2;
    sections.resize(6);
    const Bytes file = make();
    EXPECT_EQ(verify(file), CG_OK);
    EXPECT_EQ(verify(cut(file, file.size() - 41)), CG_OK);
    header.level = CG_L1;
    header.coarsest = CG_L2;
    for (size_t i = 4; i < 6; i++)
        sections[i].kind = CG_SECTION_TO_L1;
    const Bytes finer = make();
    EXPECT_EQ(verify(finer), CG_OK);
    EXPECT_EQ(cg_get_le(finer.data() + 136, 8), 0u);
    EXPECT_EQ(cg_get_le(finer.data() + 144, 8), finer.size() - 41);
}

TEST_F(NestedChunkTest, LevelsOfVersion3EndBehindTheirPadding)
{
    header.version = CG_CHUNK_VERSION_ALIGNED;
    const Bytes file = make();
    EXPECT_EQ(cg_get_le(file.data() + 8, 4), 3u);
    const size_t ends[] = {0, file.size(), file.size() - 64, file.size() - 64 - 64};
    EXPECT_EQ(cg_get_le(file.data() + 136, 8), ends[CG_L3]);
    EXPECT_EQ(cg_get_le(file.data() + 144, 8), ends[CG_L2]);
    for (size_t n = 0; n <= file.size(); n++)
        EXPECT_EQ(verify(cut(file, n)),
                  std::find(ends + 1, ends + 4, n) != ends + 4 ? CG_OK : CG_ERR_TRUNCATED)
            << n;
    header.level = CG_L1; // L1 and L2: L3 ends nowhere
    header.coarsest = CG_L2;
    sections.resize(6);
    for (size_t i = 4; i < 6; i++)
        sections[i].kind = CG_SECTION_TO_L1;
    const Bytes two = make();
    EXPECT_EQ(verify(two), CG_OK);
    EXPECT_EQ(cg_get_le(two.data() + 136, 8), 0u);
    EXPECT_EQ(cg_get_le(two.data() + 144, 8), two.size() - 64);
    Bytes lie = two;
    cg_put_le(lie.data() + 144, 8, 0);
    rehash(&lie);
    EXPECT_EQ(verify(lie), CG_ERR_CORRUPT);
}

TEST_F(NestedChunkTest, TheJointMatrixStandsFirstInALevel)
{
    header.version = CG_CHUNK_VERSION_JOINT;
    EXPECT_EQ(verify(make()), CG_ERR_CORRUPT); // none
    sections.insert(sections.begin() + 1, section(CG_SECTION_JOINT, 0, 0, 5));
    sections.insert(sections.begin() + 5, section(CG_SECTION_JOINT_TO_L2, 0, 0, 17));
    sections.insert(sections.begin() + 8, section(CG_SECTION_JOINT_TO_L1, 0, 0, 16));
    const auto good = sections;
    const Bytes file = make();
    EXPECT_EQ(cg_get_le(file.data() + 8, 4), 4u);
    const size_t ends[] = {0, file.size(), file.size() - 80, file.size() - 80 - 96};
    for (size_t n = 0; n <= file.size(); n++)
        EXPECT_EQ(verify(cut(file, n)),
                  std::find(ends + 1, ends + 4, n) != ends + 4 ? CG_OK : CG_ERR_TRUNCATED)
            << n;
    const struct {
        const char *what;
        size_t at;
        cg_section section;
    } cases[] = {
        {"of V", 1, section(CG_SECTION_JOINT, CG_V, 0, 5)},
        {"of a group", 1, section(CG_SECTION_JOINT, 0, 1, 5)},
        {"twice", 2, section(CG_SECTION_JOINT, 0, 0, 40)},
        {"behind a group", 3, section(CG_SECTION_JOINT, 0, 0, 7)},
        {"to L2 at the coarsest level", 1, section(CG_SECTION_JOINT_TO_L2, 0, 0, 5)},
        {"to L2, of V", 5, section(CG_SECTION_JOINT_TO_L2, CG_V, 0, 17)},
        {"to L2, behind a group", 6, section(CG_SECTION_JOINT_TO_L2, 0, 0, 20)},
        {"to L1 at L2", 5, section(CG_SECTION_JOINT_TO_L1, 0, 0, 17)},
        {"of no kind", 9, section(CG_SECTION_JOINT_TO_L1 + 1, 0, 0, 30)},
    };
    for (const size_t missing : {1u, 5u, 8u}) {
        sections = good;
        sections.erase(sections.begin() + static_cast<long>(missing));
        EXPECT_EQ(verify(make()), CG_ERR_CORRUPT) << "section " << missing;
    }
    for (const auto &c : cases) {
        sections = good;
        sections[c.at] = c.section;
        EXPECT_EQ(verify(make()), CG_ERR_CORRUPT) << c.what;
    }
    sections = good;
    header.version = CG_CHUNK_VERSION_ALIGNED;
    EXPECT_EQ(verify(make()), CG_ERR_CORRUPT);
}

TEST_F(NestedChunkTest, TheStepsStandBehindTheTokens)
{
    const auto without = sections;
    header.version = CG_CHUNK_VERSION_STEPS;
    EXPECT_EQ(verify(make()), CG_ERR_CORRUPT); // none
    const auto good = [&] {
        auto with = without;
        with.insert(with.begin() + 1, section(CG_SECTION_STEPS, 0, 0, 1)); // five tokens, a block
        return with;
    }();
    const struct {
        const char *what;
        size_t at;
        cg_section section;
    } cases[] = {
        {"of V", 1, section(CG_SECTION_STEPS, CG_V, 0, 1)},
        {"of a group", 1, section(CG_SECTION_STEPS, 0, 1, 1)},
        {"of no block", 1, section(CG_SECTION_STEPS, 0, 0, 0)},
        {"of two blocks", 1, section(CG_SECTION_STEPS, 0, 0, 2)},
        {"twice", 2, section(CG_SECTION_STEPS, 0, 0, 1)},
        {"of the finest level", 8, section(CG_SECTION_STEPS, 0, 0, 1)},
    };
    sections = good;
    for (const uint8_t index : {0, 6, 7, 255}) {
        factor_index = index;
        EXPECT_EQ(verify(make()), index < CG_N_STEP_FACTORS ? CG_OK : CG_ERR_CORRUPT) << int{index};
    }
    factor_index = 0;
    EXPECT_EQ(cg_get_le(make().data() + 8, 4), 5u);
    for (const uint32_t version : {1u, 3u, 4u}) {
        header.version = version;
        EXPECT_EQ(verify(make()), CG_ERR_CORRUPT) << version;
    }
    header.version = CG_CHUNK_VERSION_STEPS;
    for (const auto &c : cases) {
        sections = good;
        sections[c.at] = c.section;
        EXPECT_EQ(verify(make()), CG_ERR_CORRUPT) << c.what;
    }
    sections = without; // behind a group
    sections.insert(sections.begin() + 2, section(CG_SECTION_STEPS, 0, 0, 1));
    EXPECT_EQ(verify(make()), CG_ERR_CORRUPT);
    // With a joint matrix behind it, or without one: that is for the profile to say.
    sections = good;
    sections.insert(sections.begin() + 2, section(CG_SECTION_JOINT, 0, 0, 5));
    sections.insert(sections.begin() + 6, section(CG_SECTION_JOINT_TO_L2, 0, 0, 17));
    sections.insert(sections.begin() + 9, section(CG_SECTION_JOINT_TO_L1, 0, 0, 16));
    EXPECT_EQ(verify(make()), CG_OK);
    std::swap(sections[1], sections[2]);
    EXPECT_EQ(verify(make()), CG_ERR_CORRUPT);
}

} // namespace
