// libcachegen_cuda.so, opened as a connector opens it: what it reads out of an engine's blocks,
// writes and decodes there, and projects. On a GPU it is the library that is shipped.
#include "codec/device.h"
#include "codec/preset.h"
#include "decode_cases.h"
#include "engine_blocks.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <thread>

namespace
{

using namespace cg_test;

const uint32_t N_TOKENS = 32, FIRST = 5; // a chunk, and where it begins in its sequence
// Blocks of so many chunks that are decoded at once; and as many copies, so that the last of them
// are still to be made when the engine's stream has come to its next write.
const uint32_t N_AT_ONCE = 8, N_COPIES = 64;

const cg_device_functions *functions()
{
    void *library = dlopen(CG_TEST_CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
        throw std::runtime_error(dlerror());
    const auto entry = reinterpret_cast<cg_device_entry *>(dlsym(library, CG_DEVICE_ENTRY_NAME));
    return entry != nullptr ? entry(CG_DEVICE_TABLE_VERSION) : nullptr;
}

class LibraryTest : public testing::Test
{
  protected:
    LibraryTest()
        : spec(spec_4(nested(), 32)), profile(make_profile(spec)),
          header(make_header(spec, CG_DTYPE_BF16, 0, N_TOKENS)), tokens(make_tokens(N_TOKENS, 1)),
          elements(make_elements(header, 1)),
          blocks(make_blocks(block_spec(), header.geometry, N_TOKENS)),
          engine(N_AT_ONCE * blocks.n_bytes), piece(N_AT_ONCE * blocks.n_bytes, 0x5a)
    {
    }
    void SetUp() override
    {
        ASSERT_NE(f, nullptr);
        char reason[256];
        cg_device_config config = {};
        config.profile = profile.get();
        config.geometry = header.geometry;
        config.chunk_tokens = N_TOKENS;
        config.n_slots = N_AT_ONCE;
        config.n_copies = N_COPIES;
        config.n_projectors = 1;
        ASSERT_EQ(f->open(&config, &device, reason, sizeof reason), CG_OK) << reason;
        const cg_cuda_blocks &b = blocks.layout;
        cg_device_blocks given = {};
        for (int plane = 0; plane < 2; plane++) {
            given.offset_bytes[plane] = b.offset_bytes[plane];
            given.head_stride[plane] = b.head_stride[plane];
            given.token_stride[plane] = b.token_stride[plane];
        }
        given.block_stride = b.block_stride;
        given.block_tokens = b.block_tokens;
        given.n_blocks = b.n_blocks;
        given.n_heads = header.geometry.n_kv_heads;
        for (uint32_t i = 0; i < N_AT_ONCE; i++) {
            std::vector<void *> base;
            for (const size_t at : blocks.base)
                base.push_back(engine.data() + i * blocks.n_bytes + at);
            given.base = base.data();
            cg_device_run run = {};
            ASSERT_EQ(f->add_blocks(device, &given, &run.blocks_id), CG_OK);
            run.table = blocks.table.data();
            run.n_table = static_cast<uint32_t>(blocks.table.size());
            run.first_token = FIRST;
            run.n_tokens = run.to_token = N_TOKENS;
            runs.push_back(run);
        }
        engine.write(piece);
    }
    void TearDown() override
    {
        if (device != nullptr) {
            EXPECT_EQ(f->failure(device), nullptr);
            f->close(device);
        }
    }
    static ProfileSpec nested()
    {
        ProfileSpec spec;
        spec.nests = true;
        return spec;
    }
    static BlockSpec block_spec()
    {
        BlockSpec out;
        out.first_token = FIRST;
        return out;
    }
    // The piece, were these elements in the blocks of the first chunks.
    Bytes with(const std::vector<Bytes> &of_chunks) const
    {
        Bytes out = piece;
        cg_cuda_request all = {};
        all.token_to = N_TOKENS;
        all.head_to = header.geometry.n_kv_heads;
        for (size_t i = 0; i < of_chunks.size(); i++)
            place(of_chunks[i], header.geometry, N_TOKENS, 0, header.geometry.n_layers, all, blocks,
                  out.data() + i * blocks.n_bytes);
        return out;
    }
    Bytes tiles() const // the elements plane by plane, as the device copies them
    {
        const size_t n_layers = header.geometry.n_layers,
                     layer_bytes = elements.size() / n_layers / CG_N_PLANES;
        Bytes out;
        for (size_t i = 0; i < CG_N_PLANES * n_layers; i++) {
            const size_t from = (i % n_layers * CG_N_PLANES + i / n_layers) * layer_bytes;
            out.insert(out.end(), elements.begin() + static_cast<long>(from),
                       elements.begin() + static_cast<long>(from + layer_bytes));
        }
        return out;
    }
    cg_after after() const
    {
        return {CG_AFTER_STREAM, engine.stream()};
    }

    const cg_device_functions *const f = functions();
    const ProfileSpec spec;
    const Profile profile;
    const cg_chunk_header header;
    const std::vector<uint32_t> tokens;
    const Bytes elements;
    const Blocks blocks;
    EngineBlocks engine;
    Bytes piece; // what the engine has put into its blocks
    cg_device *device = nullptr;
    std::vector<cg_device_run> runs; // each in blocks of its own
};

TEST_F(LibraryTest, ReadsWhatTheEnginesStreamHasWrittenBeforeItWritesMore)
{
    const std::vector<cg_device_run> many(N_COPIES, runs[0]);
    const Bytes wanted = tiles();
    engine.write(with({elements}));
    uint32_t copies[N_COPIES];
    ASSERT_EQ(f->read(device, many.data(), N_COPIES, after(), copies), CG_OK);
    ASSERT_EQ(f->hold(device, copies[N_COPIES - 1], after()), CG_OK);
    engine.write(piece);
    for (const uint32_t copy : copies) {
        void *read;
        ASSERT_EQ(f->read_wait(device, copy, &read), CG_OK);
        EXPECT_EQ(memcmp(read, wanted.data(), wanted.size()), 0) << copy;
        f->read_release(device, copy);
    }
    EXPECT_TRUE(engine.read() == piece);
}

TEST_F(LibraryTest, WritesTilesAndNothingElse)
{
    const Bytes all = tiles();
    size_t room;
    void *memory = f->slot_memory(device, 1, &room);
    ASSERT_GE(room, all.size());
    memcpy(memory, all.data(), all.size());
    engine.write(piece); // which must come before
    cg_device_mark *mark;
    ASSERT_EQ(f->mark(device, after(), &mark), CG_OK);
    cg_device_tiles whole = {};
    whole.n_layers = header.geometry.n_layers;
    whole.n_planes = CG_N_PLANES;
    EXPECT_EQ(f->write(device, 1, &whole, &runs[0], mark), CG_OK);
    f->mark_free(device, mark);
    EXPECT_TRUE(engine.read() == with({elements}));
}

// By as many threads at once: chunks at all levels, which come together while the engine's stream
// is busy.
TEST_F(LibraryTest, DecodesWhatTheCpuDecodes)
{
    std::vector<Bytes> chunks(N_AT_ONCE), decoded(N_AT_ONCE);
    for (uint32_t i = 0; i < N_AT_ONCE; i++) {
        const auto level = static_cast<cg_level>(i % 4);
        ASSERT_EQ(encode(profile.get(), header, tokens, make_elements(header, 1 + i), level,
                         &chunks[i], 1, level == CG_L0 ? CG_L0 : CG_L3),
                  CG_OK);
        ASSERT_EQ(decode(profile.get(), chunks[i], &decoded[i]), CG_OK);
    }
    engine.write(piece); // which must come before
    cg_device_mark *mark;
    ASSERT_EQ(f->mark(device, after(), &mark), CG_OK);
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < N_AT_ONCE; i++)
        threads.emplace_back([&, i] {
            size_t room;
            void *memory = f->slot_memory(device, i, &room);
            EXPECT_GE(room, chunks[i].size());
            memcpy(memory, chunks[i].data(), chunks[i].size());
            EXPECT_EQ(f->decode(device, i, chunks[i].size(), &runs[i], mark), CG_OK) << i;
        });
    for (std::thread &thread : threads)
        thread.join();
    f->mark_free(device, mark);
    EXPECT_TRUE(engine.read() == with(decoded));
}

// A preset like klt, under a number that there are no kernels for.
class OtherPresetTest : public LibraryTest
{
  protected:
    OtherPresetTest() : preset(*profile->preset)
    {
        preset.transforms = 0x7f7f;
        profile->preset = &preset;
    }
    cg_status decode_on_device(cg_level level, Bytes *decoded)
    {
        Bytes chunk;
        size_t room;
        EXPECT_EQ(encode(profile.get(), header, tokens, elements, level, &chunk), CG_OK);
        EXPECT_EQ(decode(profile.get(), chunk, decoded), CG_OK);
        memcpy(f->slot_memory(device, 0, &room), chunk.data(), chunk.size());
        return f->decode(device, 0, chunk.size(), &runs[0], nullptr);
    }
    cg_preset preset;
};

TEST_F(OtherPresetTest, IsLeftToTheCpu)
{
    Bytes decoded;
    EXPECT_EQ(f->take_projector(device), nullptr);
    EXPECT_EQ(decode_on_device(CG_L2, &decoded), CG_ERR_UNSUPPORTED_VERSION);
    EXPECT_TRUE(engine.read() == piece);
    EXPECT_EQ(decode_on_device(CG_L0, &decoded), CG_OK);
    EXPECT_TRUE(engine.read() == with({decoded}));
}

// The encoder checks each projection, and counts those that are wrong.
TEST_F(LibraryTest, ProjectsAndCodesForAnEncoder)
{
    cg_projector *projector = f->take_projector(device);
    ASSERT_NE(projector, nullptr);
    EXPECT_EQ(f->take_projector(device), nullptr) << "there is one";
    Bytes chunk, decoded;
    EXPECT_EQ(encode_scaled(profile.get(), header, tokens, elements, draw_scales(N_TOKENS, 1),
                            CG_L1, &chunk, CG_L3, projector),
              CG_OK);
    EXPECT_EQ(projector->n_failed, 0u);
    EXPECT_GT(projector->n_coded, 0u);
    f->return_projector(device, projector);
    EXPECT_EQ(decode(profile.get(), chunk, &decoded), CG_OK);
}

} // namespace
