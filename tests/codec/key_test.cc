#include "codec/key.h"

#include <cstring>
#include <gtest/gtest.h>
#include <string>
#include <vector>

namespace
{

std::string hex(const cg_key &key)
{
    char text[CG_KEY_HEX_BYTES];
    cg_key_to_hex(&key, text);
    return text;
}

cg_fingerprint model_0_to_15()
{
    cg_fingerprint model;
    for (size_t i = 0; i < sizeof model.bytes; i++)
        model.bytes[i] = static_cast<uint8_t>(i);
    return model;
}

// The expected values come from Python, package xxhash 3.6:
//   x = xxhash.xxh3_128_digest;  model = bytes(range(16));  zero = bytes(16)
//   root  = x(b"cachegenfs.key.1" + model + struct.pack("<I", 0))
//   other = x(b"cachegenfs.key.1" + model + struct.pack("<I", 6) + b"tenant")
//   bf16  = x(model + b"bf16");  fp8 = x(model + b"fp8_e5m2")
//   first = x(root + zero + struct.pack("<4I", 1, 2, 3, 70000))
//   lora  = x(b"lora-7")
//   next  = x(first + lora + struct.pack("<1000I", *[i * 2654435761 % 49152 for i in range(1000)]))
TEST(Key, ChainEqualsThatOfAnotherImplementation)
{
    const cg_fingerprint model = model_0_to_15();
    const cg_key zero = {};
    const cg_key root = cg_key_root(&model, nullptr, 0);
    EXPECT_EQ(hex(root), "7da30048352d3126d207d925afd222de");
    const cg_key other = cg_key_root(&model, "tenant", 6);
    EXPECT_EQ(hex(other), "9d27419cf8c35fd0e322a89a17bcd15e");

    cg_key of_cache;
    memcpy(of_cache.bytes, cg_key_model(&model, CG_DTYPE_BF16).bytes, sizeof of_cache.bytes);
    EXPECT_EQ(hex(of_cache), "7f85aed8b27a45284f7a570bd5dd81a0");
    memcpy(of_cache.bytes, cg_key_model(&model, CG_DTYPE_FP8_E5M2).bytes, sizeof of_cache.bytes);
    EXPECT_EQ(hex(of_cache), "a012e16c22edc9ea1ed150db3507f2ed");

    const uint32_t four[] = {1, 2, 3, 70000};
    const cg_key first = cg_key_chunk(&root, &zero, four, 4);
    EXPECT_EQ(hex(first), "88a681fb84f935a7e6155fa72c4f4b59");

    const cg_key lora = cg_key_of_bytes("lora-7", 6);
    EXPECT_EQ(hex(lora), "cb7ebf0081bd028986598e291d3eab4e");
    EXPECT_EQ(hex(cg_key_of_bytes(nullptr, 0)), "99aa06d3014798d86001c324468d497f");
    std::vector<uint32_t> thousand(1000); // more than the block that cg_key_chunk() hashes at once
    for (uint64_t i = 0; i < thousand.size(); i++)
        thousand[i] = static_cast<uint32_t>(i * 2654435761u % 49152);
    const cg_key next = cg_key_chunk(&first, &lora, thousand.data(), thousand.size());
    EXPECT_EQ(hex(next), "e1d1bb58b732c68d7cc9d35baed1078b");
}

TEST(Key, AChainIsTheKeysOfItsChunks)
{
    const cg_key root = cg_key_of_bytes("root", 4), extra = cg_key_of_bytes("extra", 5);
    std::vector<uint32_t> tokens(21);
    for (size_t i = 0; i < tokens.size(); i++)
        tokens[i] = static_cast<uint32_t>(70000 * i);
    for (size_t n : {0, 1, 7, 8, 9, 16, 21}) {
        SCOPED_TRACE(n);
        const size_t n_keys = (n + 7) / 8;
        std::vector<cg_key> keys(n_keys + 1, root); // one more: nothing may be written behind
        cg_key_chain(&root, &extra, tokens.data(), n, 8, keys.data());
        cg_key parent = root;
        for (size_t i = 0; i < n_keys; i++) {
            const size_t left = n - 8 * i;
            parent = cg_key_chunk(&parent, &extra, &tokens[8 * i], left < 8 ? left : 8);
            EXPECT_EQ(hex(keys[i]), hex(parent)) << i;
        }
        EXPECT_TRUE(cg_key_equal(&keys[n_keys], &root));
    }
}

TEST(Key, EveryInputMakesAnotherKey)
{
    const cg_fingerprint model = model_0_to_15();
    cg_fingerprint other_model = model;
    other_model.bytes[15] ^= 1;
    const cg_key zero = {}, root = cg_key_root(&model, nullptr, 0), lora = cg_key_of_bytes("a", 1);
    const uint32_t tokens[] = {5, 6, 7, 8}, other_tokens[] = {5, 6, 8, 7};
    const cg_key keys[] = {
        root,
        cg_key_root(&other_model, nullptr, 0),
        cg_key_root(&model, "", 1), // a salt of one zero byte is not no salt
        cg_key_chunk(&root, &zero, tokens, 4),
        cg_key_chunk(&root, &zero, tokens, 3),
        cg_key_chunk(&root, &zero, other_tokens, 4),
        cg_key_chunk(&root, &lora, tokens, 4),
        cg_key_chunk(&lora, &zero, tokens, 4),
    };
    for (size_t i = 0; i < std::size(keys); i++) {
        for (size_t j = 0; j < i; j++)
            EXPECT_FALSE(cg_key_equal(&keys[i], &keys[j])) << i << " and " << j;
    }
}

TEST(Key, HexIsThirtyTwoLowerCaseDigits)
{
    const std::string good = "0123456789abcdef00ff10e0a5b6c7d8";
    cg_key key;
    ASSERT_TRUE(cg_key_from_hex(good.c_str(), &key));
    EXPECT_EQ(hex(key), good);
    EXPECT_TRUE(cg_key_from_hex((good + ".cgp").c_str(), &key));

    const cg_key before = key;
    for (size_t i = 0; i < good.size(); i++) {
        for (const char bad : {'\0', 'A', 'g', '/', ':', '`', ' ', '\xb0'}) {
            std::string text = good;
            text[i] = bad;
            // Of exactly its size: digits after a bad one must not be read.
            const std::vector<char> exact(text.c_str(), text.c_str() + strlen(text.c_str()) + 1);
            EXPECT_FALSE(cg_key_from_hex(exact.data(), &key)) << i << " " << int(bad);
        }
    }
    EXPECT_TRUE(cg_key_equal(&key, &before));
}

TEST(Key, KnowsZero)
{
    cg_key key = {};
    EXPECT_TRUE(cg_key_is_zero(&key));
    key.bytes[15] = 1;
    EXPECT_FALSE(cg_key_is_zero(&key));
}

} // namespace
