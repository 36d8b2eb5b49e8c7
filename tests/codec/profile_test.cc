#include "codec/profile.h"

#include "codec/profile_data.h"

#include "hostile_profiles.h"

#include <functional>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

namespace
{

using namespace cg_test;

TEST(Profile, TellsWhatItIsFor)
{
    ProfileSpec spec;
    const Bytes bytes = make_profile_bytes(spec);
    const Profile profile = open_profile(bytes);
    const cg_geometry geometry = {4, 2, 16, CG_DTYPE_BF16, 2};
    EXPECT_TRUE(cg_geometry_equal(cg_profile_geometry(profile.get()), &geometry));
    EXPECT_STREQ(cg_profile_preset(profile.get()), "klt");
    EXPECT_EQ(cg_profile_n_groups(profile.get()), 2u);
    const cg_fingerprint model = model_of(spec);
    EXPECT_EQ(0, memcmp(cg_profile_model(profile.get())->bytes, model.bytes, 16));
    const cg_key fingerprint = cg_key_of_bytes(bytes.data(), bytes.size());
    EXPECT_EQ(0, memcmp(cg_profile_fingerprint(profile.get())->bytes, fingerprint.bytes, 16));
}

TEST(Profile, OpensManyShapes)
{
    for (ProfileSpec spec : {ProfileSpec{1, 1, 2, CG_DTYPE_FP16, {1}, 0, 0},
                             ProfileSpec{2, 1, 66, CG_DTYPE_FP32, {1, 1}, 64, 8},
                             ProfileSpec{1, 1, 256, CG_DTYPE_BF16, {1}, 128, 1},
                             ProfileSpec{1, 2, 258, CG_DTYPE_BF16, {1}, 258, 1}}) {
        EXPECT_EQ(profile_status(make_profile_bytes(spec)), CG_OK);
        spec.all_active = false;
        EXPECT_EQ(profile_status(make_profile_bytes(spec)), CG_OK);
    }
}

// Of few channels: one of each preset.
std::vector<Bytes> small_profiles()
{
    ProfileSpec klt, paper = paper_spec();
    klt.head_dim = klt.rotary_dim = paper.head_dim = 4;
    return {make_profile_bytes(klt), make_profile_bytes(paper)};
}

void expect_truncations_refused(const Bytes &good)
{
    for (size_t n = 0; n < good.size(); n++) {
        Bytes bytes(good.begin(), good.begin() + n);
        EXPECT_EQ(profile_status(bytes), CG_ERR_TRUNCATED) << n;
        if (n >= 96) { // and with size and checksum put right
            seal_profile(&bytes);
            EXPECT_NE(profile_status(bytes), CG_OK) << n;
        }
    }
    Bytes longer = good;
    longer.push_back(0);
    EXPECT_EQ(profile_status(longer), CG_ERR_CORRUPT);
    seal_profile(&longer);
    EXPECT_NE(profile_status(longer), CG_OK);
}

// What is refused by its size or checksum is refused by the first look, too.
TEST(Profile, FirstLookNeedsNoMemoryForTheFile)
{
    for (Bytes bytes : small_profiles()) {
        bytes.back() ^= 1;
        cg_fingerprint fingerprint;
        EXPECT_EQ(cg_profile_check_head(read_bytes, &bytes, bytes.size(), &fingerprint),
                  CG_ERR_CORRUPT);
        // The head, of which there is no more to be read, has another size.
        EXPECT_EQ(cg_profile_check_head(read_bytes, &bytes, UINT64_C(1) << 40, &fingerprint),
                  CG_ERR_CORRUPT);
        bytes[0] ^= 1;
        EXPECT_EQ(cg_profile_check_head(read_bytes, &bytes, UINT64_C(1) << 40, &fingerprint),
                  CG_ERR_BAD_MAGIC);
    }
    // Larger than a profile may be: nothing behind the head is read.
    Bytes head = small_profiles()[0];
    head.resize(80);
    for (const uint64_t n_bytes : {UINT64_C(1) << 30, (UINT64_C(1) << 30) + 1}) {
        cg_fingerprint fingerprint;
        cg_put_le(head.data() + 16, 8, n_bytes);
        EXPECT_EQ(cg_profile_check_head(read_bytes, &head, n_bytes, &fingerprint),
                  n_bytes > UINT64_C(1) << 30 ? CG_ERR_CORRUPT : CG_ERR_TRUNCATED);
    }
    // Of more than one piece.
    ProfileSpec spec = spec_2(true);
    spec.n_kv_heads = 8;
    spec.head_dim = 128;
    const Bytes large = make_profile_bytes(spec);
    ASSERT_GT(large.size(), 3u << 20);
    expect_head_status(large, CG_OK);
    Bytes cut(large.begin(), large.end() - 1);
    expect_head_status(cut, CG_ERR_TRUNCATED);
}

TEST(Profile, RefusesEveryTruncation)
{
    for (const Bytes &good : small_profiles())
        expect_truncations_refused(good);
}

TEST(Profile, RefusesEveryFlippedBit)
{
    for (const Bytes &good : small_profiles()) {
        for (size_t bit = 0; bit < 8 * good.size(); bit++) {
            Bytes damaged = good;
            damaged[bit / 8] ^= 1 << bit % 8;
            EXPECT_NE(profile_status(damaged), CG_OK) << bit;
        }
    }
}

TEST(Profile, RefusesHostileFields)
{
    ProfileSpec spec; // C = 32, groups of 3 and 1 layers
    const Bytes good = make_profile_bytes(spec);
    const size_t groups_at = 80 + 8 * 8, steps_at = groups_at + 4, mean_at = steps_at + 24;
    const size_t weight_at = mean_at + 4 * 2 * 32 * 4, classes_at = weight_at + 4 * 2 * 32 * 4;
    size_t components_at = classes_at;
    for (const ClassSpec &c : mixed_classes())
        components_at += 2 + 2 * c.freq.size();
    const size_t columns_at = components_at + 16;
    size_t basis_at = columns_at;
    for (unsigned level = 0; level < 3; level++)
        basis_at += 4 * 16 + 8 * 2 * (96 + 32);
    const size_t scale_at = basis_at + 48 * 96 * 2;
    const uint64_t nan = 0x7fc00000, infinity = 0x7f800000;

    const ProfileField cases[] = {
        {"unchanged", 12, 4, 0, CG_OK},
        {"magic", 0, 1, 'X', CG_ERR_BAD_MAGIC},
        {"version", 8, 4, 5, CG_ERR_UNSUPPORTED_VERSION},
        {"version 3 with planes apart", 8, 4, 3, CG_ERR_CORRUPT},
        {"reserved at 12", 12, 4, 1, CG_ERR_CORRUPT},
        {"narrow components of a kind that is none", 67, 1, 2, CG_ERR_CORRUPT},
        {"tables without a rope by layer", 76, 4, 1, CG_ERR_CORRUPT},
        {"nests by something unknown", 77, 1, 2, CG_ERR_CORRUPT},
        {"reserved at 78", 78, 1, 1, CG_ERR_CORRUPT},
        {"reserved at 79", 79, 1, 1, CG_ERR_CORRUPT},
        {"no layers", 40, 2, 0, CG_ERR_CORRUPT},
        {"more layers than the groups have", 40, 2, 5, CG_ERR_CORRUPT},
        {"fewer layers than the groups have", 40, 2, 3, CG_ERR_CORRUPT},
        {"too many layers", 40, 2, 0xffff, CG_ERR_CORRUPT},
        {"heads that the file can't hold", 42, 2, 1024, CG_ERR_TRUNCATED},
        {"head_dim that the file can't hold", 44, 2, 1024, CG_ERR_TRUNCATED},
        {"odd head_dim", 44, 2, 15, CG_ERR_UNSUPPORTED},
        {"dtype", 46, 1, 9, CG_ERR_UNSUPPORTED},
        {"one plane", 47, 1, 1, CG_ERR_UNSUPPORTED},
        {"channel transform", 64, 1, 2, CG_ERR_UNSUPPORTED},
        {"token transform", 65, 1, 2, CG_ERR_UNSUPPORTED},
        {"rope kind", 66, 1, 3, CG_ERR_UNSUPPORTED},
        {"ropes by layer without a number of tables", 66, 1, 2, CG_ERR_CORRUPT},
        {"rotary_dim without rope", 66, 1, 0, CG_ERR_CORRUPT},
        {"odd rotary_dim", 68, 2, 15, CG_ERR_CORRUPT},
        {"rotary_dim above head_dim", 68, 2, 18, CG_ERR_CORRUPT},
        {"rope without rotary_dim", 68, 2, 0, CG_ERR_CORRUPT},
        {"n_sinks", 70, 2, 9, CG_ERR_CORRUPT},
        {"no groups", 72, 2, 0, CG_ERR_CORRUPT},
        {"more groups than layers", 72, 2, 5, CG_ERR_CORRUPT},
        {"no classes", 74, 2, 0, CG_ERR_CORRUPT},
        {"257 classes", 74, 2, 257, CG_ERR_CORRUPT},
        {"inv_freq is NaN", 80, 8, 0x7ff8000000000000, CG_ERR_CORRUPT},
        {"inv_freq whose angles overflow", 80, 8, 0x7f40000000000000, CG_ERR_CORRUPT}, // 2^1013
        {"an empty group", groups_at, 2, 0, CG_ERR_CORRUPT},
        {"a group past the last layer", groups_at, 2, 4, CG_ERR_CORRUPT},
        {"step 0", steps_at, 4, 0, CG_ERR_CORRUPT},
        {"step negative", steps_at, 4, 0xbf800000, CG_ERR_CORRUPT},
        {"step NaN", steps_at + 20, 4, nan, CG_ERR_CORRUPT},
        {"mean infinite", mean_at, 4, infinity, CG_ERR_CORRUPT},
        {"weight 0", weight_at, 4, 0, CG_ERR_CORRUPT},
        {"weight NaN", classes_at - 4, 4, nan, CG_ERR_CORRUPT},
        {"weight by which a step overflows", weight_at, 4, cg_f32_bits(1e-42f), CG_ERR_CORRUPT},
        {"weight by which an element overflows", weight_at, 4, cg_f32_bits(1e-36f), CG_ERR_CORRUPT},
        {"mean that a step takes beyond bf16", mean_at, 4, 0x7f7fffff, CG_ERR_CORRUPT},
        {"shift 13", classes_at, 1, 13, CG_ERR_CORRUPT},
        {"alphabet of 0", classes_at + 1, 1, 0, CG_ERR_CORRUPT},
        {"alphabet of 15", classes_at + 1, 1, 15, CG_ERR_CORRUPT},
        {"alphabet of 65", classes_at + 1, 1, 65, CG_ERR_CORRUPT},
        {"frequency 0", classes_at + 2, 2, 0, CG_ERR_CORRUPT},
        {"frequencies that don't add up", classes_at + 2, 2, 1, CG_ERR_CORRUPT},
        {"more components than channels", components_at, 2, 97, CG_ERR_CORRUPT},
        {"more wide rows than components", components_at + 2, 2, 97, CG_ERR_CORRUPT},
        {"more active columns than components", columns_at, 2, 97, CG_ERR_CORRUPT},
        {"a class that is none", columns_at + 16, 1, 8, CG_ERR_CORRUPT},
        {"basis infinite", basis_at, 2, 0x7f80, CG_ERR_CORRUPT},
        {"basis NaN", basis_at, 2, 0x7fc0, CG_ERR_CORRUPT},
        {"basis huge", basis_at, 2, 0xff7f, CG_ERR_CORRUPT},
        {"basis of 10^30", basis_at, 2, cg_bf16_from_f32(0.99e30f), CG_OK},
        {"scale NaN", scale_at, 4, nan, CG_ERR_CORRUPT},
        {"scale infinite", scale_at, 4, infinity, CG_ERR_CORRUPT},
    };
    for (const ProfileField &field : cases)
        expect_status_with(good, field);
    Bytes smaller = good;
    cg_put_le(smaller.data() + 16, 8, good.size() - 1);
    EXPECT_EQ(profile_status(smaller), CG_ERR_CORRUPT);
    for (const uint64_t size :
         {uint64_t{0}, uint64_t{1}, uint64_t{7}, uint64_t{80}, uint64_t{87}}) {
        cg_put_le(smaller.data() + 16, 8, size);
        EXPECT_EQ(profile_status(smaller), CG_ERR_CORRUPT) << size;
    }
    cg_put_le(smaller.data() + 16, 8, ~0ull);
    EXPECT_EQ(profile_status(smaller), CG_ERR_TRUNCATED);
}

TEST(Profile, NestsOnlyWithStepsAFactorThreeApartAndColumnsThatTheFinerLevelHas)
{
    ProfileSpec spec; // C = 32, groups of 3 and 1 layers
    spec.nests = true;
    const Bytes good = make_profile_bytes(spec);
    const Profile profile = open_profile(good);
    EXPECT_TRUE(cg_profile_nests(profile.get()));
    const size_t steps_at = 80 + 8 * 8 + 4;
    size_t refine_at = steps_at + 24 + 2 * 4 * 2 * 32 * 4;
    for (const ClassSpec &c : mixed_classes())
        refine_at += 2 + 2 * c.freq.size();
    EXPECT_EQ(profile->classes[0].refine[0], cg_get_le(good.data() + refine_at, 4));
    const struct {
        const char *what;
        size_t offset, bytes;
        uint64_t value;
    } cases[] = {
        {"no zeros", refine_at, 2, 0},
        {"nothing away", refine_at + 2, 2, 0},
        {"nothing back", refine_at + 4, 4, 8192u | 8192u << 16},
        {"step of L2's V", steps_at + 12, 4, cg_f32_bits(9 / 64.f * 1.001f)},
        {"step of L3's K", steps_at + 16, 4, cg_f32_bits(9 / 16.f * 0.999f)},
        {"paper", 64, 2, 0x200},
    };
    for (const auto &c : cases) {
        Bytes hostile = good;
        cg_put_le(hostile.data() + c.offset, c.bytes, c.value);
        if (c.offset == 64)
            hostile[66] = hostile[68] = 0;
        seal_profile(&hostile);
        EXPECT_EQ(profile_status(hostile), CG_ERR_CORRUPT) << c.what;
    }
    Bytes unsaid = good; // the tables are then taken for columns
    unsaid[77] = 0;
    seal_profile(&unsaid);
    EXPECT_NE(profile_status(unsaid), CG_OK);
    spec.rising_active = true;
    EXPECT_EQ(profile_status(make_profile_bytes(spec)), CG_ERR_CORRUPT);
    spec.nests = false;
    EXPECT_EQ(profile_status(make_profile_bytes(spec)), CG_OK);
}

TEST(Profile, RefusesRopeTablesThatAreNotThere)
{
    ProfileSpec spec;
    spec.theta = {10000.0, 1e6};
    spec.layer_rope = {0, 1, 1, 0};
    const Bytes good = make_profile_bytes(spec);
    const size_t layer_rope_at = 80 + 2 * 8 * 8;
    const struct {
        const char *what;
        size_t offset;
        uint8_t value;
        cg_status want;
    } cases[] = {
        {"unchanged", 12, 0, CG_OK},
        {"no table", 76, 0, CG_ERR_CORRUPT},
        {"one table", 76, 1, CG_ERR_CORRUPT},
        {"too many tables", 76, 5, CG_ERR_CORRUPT},
        {"tables of a rope that is one for all layers", 66, 1, CG_ERR_CORRUPT},
        {"reserved", 77, 1, CG_ERR_CORRUPT},
        {"reserved", 79, 1, CG_ERR_CORRUPT},
        {"by layer without rotary_dim", 68, 0, CG_ERR_CORRUPT},
        {"a table that is not there", layer_rope_at + 3, 2, CG_ERR_CORRUPT},
    };
    for (const auto &c : cases) {
        Bytes hostile = good;
        hostile[c.offset] = c.value;
        seal_profile(&hostile);
        EXPECT_EQ(profile_status(hostile), c.want) << c.what;
    }
}

TEST(Profile, RefusesHostileNarrowComponents)
{
    ProfileSpec spec;
    spec.packed = true;
    spec.wide_share = 0;
    spec.n_kv_heads = 1;
    spec.head_dim = 18; // 18 numbers of 11 bits end inside a byte
    spec.group_layers = {1, 1, 1, 1};
    const Bytes good = make_profile_bytes(spec);
    EXPECT_EQ(profile_status(good), CG_OK);
    size_t group = 0; // bytes of a group's plane: 18 components of 12, 11, 10 ... bits
    for (size_t c = 0; c < 18; c++)
        group += 5 + (18 * (12 - c % 11) + 7) / 8;
    const size_t first = good.size() - 8 - 8 * group, second = first + 5 + 27;
    const struct {
        const char *what;
        size_t offset;
        uint8_t value;
        cg_status want;
    } cases[] = {
        {"unchanged", first, 12, CG_OK},
        {"1 bit", first, 1, CG_ERR_CORRUPT},
        {"13 bits", first, 13, CG_ERR_CORRUPT},
        {"a scale that is no number", first + 4, 0x7f, CG_ERR_CORRUPT},
        {"a bit behind the last number", second + 5 + 24, 0x80, CG_ERR_CORRUPT},
    };
    for (const auto &c : cases) {
        Bytes hostile = good;
        hostile[c.offset] = c.value;
        seal_profile(&hostile);
        EXPECT_EQ(profile_status(hostile), c.want)
            << c.what << ": " << cg_strerror(profile_status(hostile));
    }
}

TEST(Profile, RefusesHostileFieldsOfAnchors)
{
    const Bytes good = make_profile_bytes(paper_spec()); // C = 32, 4 layers: tables of 256 channels
    const size_t steps_at = 80 + 4, anchor_step_at = steps_at + 24 + 2 * 1024,
                 classes_at = anchor_step_at + 1024;
    const size_t columns_at = good.size() - 8 - 4 * 256;
    const uint64_t nan = 0x7fc00000;
    const ProfileField cases[] = {
        {"unchanged", 12, 4, 0, CG_OK},
        {"channel transform", 64, 1, 1, CG_ERR_UNSUPPORTED},
        {"token transform 1 without a KLT", 65, 1, 1, CG_ERR_UNSUPPORTED},
        {"token transform 3", 65, 1, 3, CG_ERR_UNSUPPORTED},
        {"rope", 66, 1, 1, CG_ERR_UNSUPPORTED},
        {"narrow components", 67, 1, 1, CG_ERR_CORRUPT},
        {"rotary_dim", 68, 2, 16, CG_ERR_CORRUPT},
        {"heads that the file can't hold", 42, 2, 1024, CG_ERR_TRUNCATED},
        {"step of anchors 0", anchor_step_at, 4, 0, CG_ERR_CORRUPT},
        {"step of anchors negative", classes_at - 4, 4, 0xbf800000, CG_ERR_CORRUPT},
        {"step of anchors NaN", classes_at - 4, 4, nan, CG_ERR_CORRUPT},
        {"a class of anchors that is none", columns_at, 1, 8, CG_ERR_CORRUPT},
        {"a class of deltas that is none", good.size() - 9, 1, 8, CG_ERR_CORRUPT},
    };
    for (const ProfileField &field : cases)
        expect_status_with(good, field);
    ProfileSpec wide = paper_spec();
    wide.n_layers = 2;
    wide.group_layers = {2};
    wide.n_kv_heads = wide.head_dim = 182; // 66,248 columns a section
    EXPECT_EQ(profile_status(make_profile_bytes(wide)), CG_ERR_UNSUPPORTED);
    wide.group_layers = {1, 1};
    EXPECT_EQ(profile_status(make_profile_bytes(wide)), CG_OK);
}

TEST(Profile, RefusesColumnsWithoutAComponent)
{
    ProfileSpec spec;
    spec.excess_active = 1; // nothing else is wrong: the decoder would read past the basis
    EXPECT_EQ(profile_status(make_profile_bytes(spec)), CG_ERR_CORRUPT);
}

TEST(Profile, OpensAFile)
{
    char path[] = "/tmp/cg_profile_test.XXXXXX";
    const int fd = mkstemp(path);
    ASSERT_GE(fd, 0);
    const Bytes bytes = make_profile_bytes({});
    ASSERT_EQ(write(fd, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
    cg_profile *profile;
    EXPECT_EQ(cg_profile_open_file(path, &profile), CG_OK);
    cg_profile_free(profile);
    ASSERT_EQ(ftruncate(fd, static_cast<off_t>(bytes.size() - 1)), 0);
    EXPECT_EQ(cg_profile_open_file(path, &profile), CG_ERR_TRUNCATED);
    close(fd);
    unlink(path);
    EXPECT_EQ(cg_profile_open_file(path, &profile), CG_ERR_NOT_FOUND);
    EXPECT_EQ(profile, nullptr);
    EXPECT_NE(cg_profile_open_file("/tmp", &profile), CG_OK);
    ASSERT_EQ(mkfifo(path, 0600), 0); // without a writer: nobody waits for one
    EXPECT_EQ(cg_profile_open_file(path, &profile), CG_ERR_IO);
    unlink(path);
    cg_profile_free(nullptr);
}

} // namespace
