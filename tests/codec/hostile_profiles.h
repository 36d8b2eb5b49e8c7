/* tests/codec/hostile_profiles.h - profiles with a field that somebody has overwritten, sealed:
 * what a reader says of them. */
#ifndef CG_TESTS_CODEC_HOSTILE_PROFILES_H
#define CG_TESTS_CODEC_HOSTILE_PROFILES_H
#include "profile_maker.h"

#include <gtest/gtest.h>

namespace cg_test
{

// What both opening and judging the bytes say. They lie in memory of their own size, so that
// sanitizers see what is read behind them.
inline cg_status read_bytes(void *user, uint64_t offset, uint8_t *bytes_out, size_t n_bytes)
{
    const Bytes &bytes = *static_cast<const Bytes *>(user);
    if (offset > bytes.size() || n_bytes > bytes.size() - offset)
        return CG_ERR_TRUNCATED;
    std::copy_n(bytes.begin() + static_cast<long>(offset), n_bytes, bytes_out);
    return CG_OK;
}

// The first look tells what the head and the checksum do, and never refuses what opens.
inline void expect_head_status(Bytes bytes, cg_status status)
{
    cg_fingerprint fingerprint;
    const cg_status first = cg_profile_check_head(read_bytes, &bytes, bytes.size(), &fingerprint);
    if (first != CG_OK) {
        EXPECT_EQ(first, status);
        return;
    }
    const cg_key whole = cg_key_of_bytes(bytes.data(), bytes.size());
    EXPECT_EQ(0, memcmp(&fingerprint, &whole, sizeof fingerprint));
}

// The status of opening, checking included.
inline cg_status profile_status(const Bytes &bytes)
{
    const std::unique_ptr<uint8_t[]> exact(new uint8_t[bytes.size()]);
    std::copy(bytes.begin(), bytes.end(), exact.get());
    cg_profile *profile;
    const cg_status status = cg_profile_open(exact.get(), bytes.size(), &profile);
    EXPECT_EQ(profile != nullptr, status == CG_OK);
    cg_fingerprint checked;
    EXPECT_EQ(cg_profile_check(exact.get(), bytes.size(), &checked), status);
    if (status == CG_OK) {
        EXPECT_EQ(0, memcmp(&checked, cg_profile_fingerprint(profile), sizeof checked));
    }
    cg_profile_free(profile);
    expect_head_status(bytes, status);
    return status;
}

struct ProfileField {
    const char *what;
    size_t offset, bytes;
    uint64_t value;
    cg_status want;
};

inline void expect_status_with(const Bytes &good, const ProfileField &field)
{
    Bytes hostile = good;
    cg_put_le(hostile.data() + field.offset, field.bytes, field.value);
    seal_profile(&hostile);
    const cg_status status = profile_status(hostile);
    EXPECT_EQ(status, field.want) << field.what << ": " << cg_strerror(status);
}

// Where what follows the table of classes begins.
inline size_t behind_classes(const ProfileSpec &spec)
{
    size_t at = 80 + 8 * spec.rotary_dim / 2u + 2 * spec.group_layers.size() + 24;
    at += size_t{2} * 2 * 4 * spec.n_layers * spec.n_kv_heads * spec.head_dim;
    for (const ClassSpec &c : mixed_classes())
        at += 2 + 2 * c.freq.size() + (spec.nests ? 12 : 0);
    return at;
}

} // namespace cg_test
#endif
