// Profiles of version 3: what a reader refuses, and what the tasks of a decoder have in common.
#include "codec/kernels.h"
#include "codec/profile_data.h"
#include "codec/section_plan.h"
#include "hostile_profiles.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <thread>

namespace
{

using namespace cg_test;

ProfileSpec nested_spec()
{
    ProfileSpec spec = spec_3();
    spec.nests = true;
    spec.all_active = false;
    return spec;
}

TEST(JointProfile, RefusesHostileFields)
{
    const ProfileSpec spec = nested_spec();
    const Bytes good = make_profile_bytes(spec);
    const size_t at = behind_classes(spec), given_at = at + 10, sizes_at = given_at + 48,
                 columns_at = sizes_at + 8;
    const ProfileField cases[] = {
        {"unchanged", 12, 4, 0, CG_OK},
        {"version 2", 8, 4, 2, CG_ERR_CORRUPT},
        {"narrow components", 67, 1, 1, CG_ERR_CORRUPT},
        {"planes apart", 78, 1, 0, CG_ERR_CORRUPT},
        {"anchors", 64, 2, 0x0200, CG_ERR_UNSUPPORTED}, // with a rope
        {"nothing shared", at, 2, 0, CG_ERR_CORRUPT},
        {"half a band shared", at, 2, 16, CG_ERR_CORRUPT},
        {"a band and a component shared", at, 2, 33, CG_ERR_CORRUPT},
        {"more shared than a group has", at, 2, 64, CG_ERR_CORRUPT},
        {"more shared than 8,192", at, 2, 4128, CG_ERR_CORRUPT},
        {"fraction_bits 8", at + 2, 3, 0x080808, CG_OK},
        {"fraction_bits 9 of L1", at + 2, 1, 9, CG_ERR_CORRUPT},
        {"fraction_bits 9 of L3", at + 2, 3, 0x090808, CG_ERR_CORRUPT},
        {"fraction_bits that are 2 above a finer level's", at + 4, 1, 5, CG_ERR_CORRUPT},
        {"fraction_bits below a finer level's", at + 4, 1, 0, CG_OK},
        {"reserved behind fraction_bits", at + 5, 1, 1, CG_ERR_CORRUPT},
        {"no joint component", at + 6, 2, 0, CG_ERR_CORRUPT},
        {"more joint components than channels", at + 6, 2, 65, CG_ERR_CORRUPT},
        {"unit_bits 7", at + 8, 1, 7, CG_ERR_CORRUPT},
        {"unit_bits 8", at + 8, 1, 8, CG_OK},
        {"unit_bits 20", at + 8, 1, 20, CG_OK},
        {"unit_bits 21", at + 8, 1, 21, CG_ERR_CORRUPT},
        {"nothing to round off", at + 2, 7, 0x08003800040308, CG_ERR_CORRUPT},
        {"nothing to round off at L3", at + 2, 7, 0x08003800080706, CG_ERR_CORRUPT},
        {"reserved behind unit_bits", at + 9, 1, 1, CG_ERR_CORRUPT},
        {"more given than shared", given_at, 2, 33, CG_ERR_CORRUPT},
        {"less given than at a coarser level", given_at, 2, 26, CG_ERR_CORRUPT},
        {"as much given as at a coarser level", given_at, 2, 27, CG_OK},
        {"columns where nothing is given", given_at + 2 * 16 + 2 * 5, 2, 0, CG_ERR_CORRUPT},
        {"a group without its shared components", sizes_at, 2, 31, CG_ERR_CORRUPT},
        {"more columns than joint components", columns_at, 2, 57, CG_ERR_CORRUPT},
        {"a class that is not there", columns_at + 16, 1, 8, CG_ERR_CORRUPT},
    };
    for (const ProfileField &field : cases)
        expect_status_with(good, field);
}

TEST(JointProfile, RefusesWhatItsVersionHasNot)
{
    ProfileSpec one = spec_3();
    one.group_layers = {4};
    EXPECT_EQ(profile_status(make_profile_bytes(one)), CG_ERR_CORRUPT);
    ProfileSpec excess = spec_3(); // a group's own columns, counted with the shared ones
    excess.excess_active = 1;
    EXPECT_EQ(profile_status(make_profile_bytes(excess)), CG_ERR_CORRUPT);
    ProfileSpec rising = spec_3(), flat = spec_3();
    rising.nests = rising.rising_active = flat.nests = true;
    EXPECT_EQ(profile_status(make_profile_bytes(flat)), CG_OK);
    EXPECT_EQ(profile_status(make_profile_bytes(rising)), CG_ERR_CORRUPT);
    rising.nests = false;
    EXPECT_EQ(profile_status(make_profile_bytes(rising)), CG_OK);
}

// 2^(33 - 12 - 3) x 9/16 / weight, at L3, with the least of the fraction_bits: what a step may come
// to is 10^38.
TEST(JointProfile, BoundsWhatIsDecodedByItsFractionBitsToo)
{
    ProfileSpec spec = spec_3();
    spec.step[2][0] = spec.step[2][1] = 9 / 16.f;
    spec.fraction_bits = {5, 3, 4};
    const size_t weight_at = 80 + 8 * 8 + 4 + 24 + 4 * 2 * 32 * 4;
    for (const auto &[weight, want] : {std::pair{5e-33f, CG_OK}, {1e-33f, CG_ERR_CORRUPT}}) {
        Bytes bytes = make_profile_bytes(spec);
        cg_put_le(bytes.data() + weight_at, 4, cg_f32_bits(weight));
        seal_profile(&bytes);
        EXPECT_EQ(profile_status(bytes), want) << weight;
    }
}

TEST(JointProfile, RefusesEveryTruncation)
{
    const Bytes good = make_profile_bytes(nested_spec());
    for (size_t n = 0; n < good.size(); n += n < 8000 ? 1 : 53) {
        Bytes cut(good.begin(), good.begin() + static_cast<long>(n));
        EXPECT_EQ(profile_status(cut), CG_ERR_TRUNCATED) << n;
        if (n < 96)
            continue;
        seal_profile(&cut);
        EXPECT_NE(profile_status(cut), CG_OK) << n;
    }
}

// ---- decoding ----

struct Decoder {
    cg_decoder *decoder = nullptr;
    size_t scratch_bytes;
    Decoder(const Profile &profile, const Bytes &chunk)
    {
        EXPECT_EQ(cg_decoder_new(profile.get(), chunk.data(), chunk.size(), &decoder), CG_OK);
        scratch_bytes = cg_decoder_scratch_bytes(decoder);
    }
    ~Decoder()
    {
        cg_decoder_free(decoder);
    }
    cg_status run(uint32_t task, Bytes *out) const
    {
        const std::unique_ptr<void, MallocFree> scratch(
            aligned_alloc(64, (scratch_bytes + 63) / 64 * 64));
        out->assign(cg_decoder_task_shape(decoder, task).elements_bytes, 0xcc);
        return cg_decoder_run(decoder, task, scratch.get(), scratch_bytes, out->data());
    }
    cg_status prepare() const
    {
        const std::unique_ptr<void, MallocFree> scratch(
            aligned_alloc(64, (scratch_bytes + 63) / 64 * 64));
        EXPECT_EQ(cg_decoder_prepare(decoder, scratch.get(), scratch_bytes - 1),
                  CG_ERR_INVALID_ARGUMENT);
        return cg_decoder_prepare(decoder, scratch.get(), scratch_bytes);
    }
};

class JointDecoder : public testing::Test
{
  protected:
    JointDecoder()
    {
        spec.n_layers = 8;
        spec.group_layers.assign(8, 1);
        profile = make_profile(spec);
        header = make_header(spec, CG_DTYPE_BF16, 0, 43);
        EXPECT_EQ(encode(profile.get(), header, make_tokens(43, 1), make_elements(header, 3), CG_L1,
                         &chunk, 1, CG_L3),
                  CG_OK);
    }
    // The chunk with damage to a section that only decoding it shows; or with a wrong checksum of
    // it, and no other damage.
    Bytes damaged(uint32_t section_index, bool is_sealed) const
    {
        cg_chunk opened;
        EXPECT_EQ(cg_chunk_open(chunk.data(), chunk.size(), &opened), CG_OK);
        const cg_section section = cg_chunk_section(&opened, section_index);
        Bytes bytes = chunk;
        if (is_sealed) {
            // All of its second half: a single byte may make other symbols that are as good.
            const auto begin = bytes.begin() + static_cast<ptrdiff_t>(section.offset);
            const auto half = static_cast<ptrdiff_t>(section.bytes / 2);
            std::fill(begin + half, begin + static_cast<ptrdiff_t>(section.bytes), 0x55);
            seal_chunk(&bytes);
            return bytes;
        }
        bytes[CG_CHUNK_FIXED_BYTES + section_index * CG_CHUNK_SECTION_BYTES + 8] ^= 1;
        Bytes hashed(bytes.begin(), bytes.begin() + 152);
        hashed.insert(hashed.end(), bytes.begin() + CG_CHUNK_FIXED_BYTES,
                      bytes.begin() + opened.header.header_bytes);
        cg_put_le(bytes.data() + 152, 8, XXH3_64bits(hashed.data(), hashed.size()));
        return bytes;
    }

    ProfileSpec spec = nested_spec();
    Profile profile;
    cg_chunk_header header;
    Bytes chunk;
};

TEST_F(JointDecoder, TasksOfSeveralThreadsFindOneJointMatrix)
{
    // ThreadSanitizer doesn't see all that vector instructions read.
    cg_kernels_use(cg_kernels_named("baseline"));
    profile = make_profile(spec);
    cg_kernels_use(nullptr);
    std::vector<Bytes> want(8);
    for (uint32_t task = 0; task < 8; task++) // a decoder each
        ASSERT_EQ(Decoder(profile, chunk).run(task, &want[task]), CG_OK);
    for (int round = 0; round < 8; round++) {
        const Decoder decoder(profile, chunk);
        std::vector<Bytes> got(8);
        std::vector<cg_status> status(8);
        std::vector<std::thread> threads;
        for (uint32_t thread = 0; thread < 4; thread++) {
            threads.emplace_back([&, thread] {
                for (uint32_t task = thread; task < 8; task += 4)
                    status[task] = decoder.run(task, &got[task]);
            });
        }
        for (std::thread &thread : threads)
            thread.join();
        EXPECT_EQ(status, std::vector<cg_status>(8, CG_OK));
        EXPECT_EQ(got, want);
    }
}

TEST_F(JointDecoder, TasksFindWhatWasPrepared)
{
    cg_chunk opened;
    ASSERT_EQ(cg_chunk_open(chunk.data(), chunk.size(), &opened), CG_OK);
    std::vector<Bytes> want(8);
    for (uint32_t task = 0; task < 8; task++)
        ASSERT_EQ(Decoder(profile, chunk).run(task, &want[task]), CG_OK);
    const cg_section joint = cg_chunk_section(
        &opened, cg_section_plan_joint_index(profile.get(), &opened.header, CG_L1));
    Bytes bytes = chunk, out;
    const Decoder decoder(profile, bytes);
    ASSERT_EQ(decoder.prepare(), CG_OK);
    bytes[joint.offset] ^= 1; // nobody decodes it again
    for (uint32_t task = 0; task < 8; task++) {
        EXPECT_EQ(decoder.run(task, &out), CG_OK);
        EXPECT_EQ(out, want[task]);
    }
    const Decoder corrupt(profile, bytes);
    EXPECT_EQ(corrupt.prepare(), CG_ERR_CORRUPT);
    EXPECT_EQ(corrupt.run(0, &out), CG_ERR_CORRUPT);
}

TEST_F(JointDecoder, DamageToTheJointMatrixIsEveryTasksError)
{
    cg_chunk opened;
    ASSERT_EQ(cg_chunk_open(chunk.data(), chunk.size(), &opened), CG_OK);
    Bytes out;
    for (const bool is_sealed : {false, true}) {
        for (unsigned level = CG_L1; level <= CG_L3; level++) { // a finer level needs all of them
            const uint32_t index =
                cg_section_plan_joint_index(profile.get(), &opened.header, level);
            ASSERT_TRUE(cg_section_is_joint(cg_chunk_section(&opened, index).kind));
            const Bytes bytes = damaged(index, is_sealed);
            const Decoder decoder(profile, bytes);
            for (uint32_t task = 8; task-- > 0;)
                EXPECT_TRUE(decoder.run(task, &out) == CG_ERR_CORRUPT ||
                            (is_sealed && decoder.run(task, &out) == CG_ERR_TRUNCATED))
                    << task;
        }
        const Bytes bytes =
            damaged(cg_section_plan_index(profile.get(), &opened.header, 2, CG_L2), is_sealed);
        const Decoder decoder(profile, bytes);
        for (uint32_t task = 0; task < 8; task++)
            EXPECT_EQ(decoder.run(task, &out) == CG_OK, task != 2);
    }
}

TEST_F(JointDecoder, AChunkAndItsProfileAreOfOneVersion)
{
    ProfileSpec plain = spec_2(true, spec);
    plain.n_shared = 0;
    const Profile other = make_profile(plain);
    Bytes foreign = chunk, out;
    memcpy(foreign.data() + 72, cg_profile_fingerprint(other.get())->bytes, 16);
    seal_chunk(&foreign);
    EXPECT_EQ(decode(other.get(), foreign, &out), CG_ERR_CORRUPT);
    Bytes older = chunk;
    cg_put_le(older.data() + 8, 4, 3);
    seal_chunk(&older);
    EXPECT_EQ(decode(profile.get(), older, &out), CG_ERR_CORRUPT);
}

} // namespace
