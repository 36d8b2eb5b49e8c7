#include "codec/safetensors.h"

#include "profile_maker.h"

#include <gtest/gtest.h>

namespace
{

using cg_test::Bytes;

Bytes file_of(const std::string &json, size_t n_data_bytes)
{
    Bytes file;
    cg_test::put(&file, json.size(), 8);
    file.insert(file.end(), json.begin(), json.end());
    file.resize(file.size() + n_data_bytes, 0x11);
    return file;
}

cg_status open(const Bytes &file)
{
    const std::unique_ptr<uint8_t[]> exact(new uint8_t[file.size()]);
    std::copy(file.begin(), file.end(), exact.get());
    cg_safetensors *tensors;
    const char *what;
    const cg_status status = cg_safetensors_open(exact.get(), file.size(), &tensors, &what);
    EXPECT_EQ(what == nullptr, status == CG_OK);
    EXPECT_EQ(tensors != nullptr, status == CG_OK);
    cg_safetensors_free(tensors);
    return status;
}

TEST(Safetensors, FindsTensors)
{
    // As written by the reference implementation: metadata, padding, tensors of several dtypes, one
    // without elements.
    const Bytes file = file_of(
        R"({"__metadata__":{"format":"pt"},"K":{"dtype":"BF16","shape":[2,3],)"
        R"("data_offsets":[8,20]},"tokens":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},)"
        R"("none":{"dtype":"F32","shape":[0,7],"data_offsets":[20,20]},)"
        R"("scalar":{"dtype":"U8","shape":[],"data_offsets":[20,21]}}   )",
        21);
    cg_safetensors *tensors;
    ASSERT_EQ(cg_safetensors_open(file.data(), file.size(), &tensors, nullptr), CG_OK);
    EXPECT_EQ(cg_safetensors_count(tensors), 4u);
    EXPECT_STREQ(cg_safetensors_at(tensors, 0)->name, "tokens");
    const cg_safetensor *k = cg_safetensors_find(tensors, "K");
    ASSERT_NE(k, nullptr);
    EXPECT_STREQ(k->dtype, "BF16");
    EXPECT_EQ(k->rank, 2u);
    EXPECT_EQ(k->shape[0], 2u);
    EXPECT_EQ(k->shape[1], 3u);
    EXPECT_EQ(k->data_bytes, 12u);
    EXPECT_EQ(k->data, file.data() + file.size() - 13);
    EXPECT_EQ(cg_safetensors_find(tensors, "V"), nullptr);
    EXPECT_EQ(cg_safetensors_find(tensors, "__metadata__"), nullptr);
    cg_safetensors_free(tensors);
    cg_safetensors_free(nullptr);
}

TEST(Safetensors, RefusesHostileHeaders)
{
    const auto k = [](const char *rest) { return std::string("{\"K\":{") + rest + "}}"; };
    const struct {
        const char *what;
        std::string json;
        size_t n_data_bytes;
        cg_status want;
    } cases[] = {
        {"good", k(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"), 8, CG_OK},
        {"empty", "{}", 0, CG_OK},
        {"data but no tensor", "{}", 1, CG_ERR_CORRUPT},
        {"no JSON", "{", 0, CG_ERR_CORRUPT},
        {"an array", "[]", 0, CG_ERR_CORRUPT},
        {"a number as tensor", R"({"K":1})", 0, CG_ERR_CORRUPT},
        {"no dtype", k(R"("shape":[2],"data_offsets":[0,8])"), 8, CG_ERR_CORRUPT},
        {"no shape", k(R"("dtype":"F32","data_offsets":[0,8])"), 8, CG_ERR_CORRUPT},
        {"no offsets", k(R"("dtype":"F32","shape":[2])"), 8, CG_ERR_CORRUPT},
        {"three offsets", k(R"("dtype":"F32","shape":[2],"data_offsets":[0,8,8])"), 8,
         CG_ERR_CORRUPT},
        {"unknown dtype", k(R"("dtype":"F33","shape":[2],"data_offsets":[0,8])"), 8,
         CG_ERR_UNSUPPORTED},
        {"rank 9", k(R"("dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1])"), 1,
         CG_ERR_UNSUPPORTED},
        {"past the end", k(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"), 7,
         CG_ERR_TRUNCATED},
        {"bytes behind", k(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"), 9, CG_ERR_CORRUPT},
        {"a hole in front", k(R"("dtype":"F32","shape":[2],"data_offsets":[1,9])"), 9,
         CG_ERR_CORRUPT},
        {"backwards", k(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), 8, CG_ERR_CORRUPT},
        {"shape too small", k(R"("dtype":"F32","shape":[1],"data_offsets":[0,8])"), 8,
         CG_ERR_CORRUPT},
        {"shape negative", k(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"), 8,
         CG_ERR_CORRUPT},
        {"shape fractional", k(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])"), 8,
         CG_ERR_CORRUPT},
        {"shape overflows",
         k(R"("dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0])"), 0,
         CG_ERR_CORRUPT},
        {"offset past 2^63",
         k(R"("dtype":"U8","shape":[1],"data_offsets":[9223372036854775808,1])"), 1,
         CG_ERR_CORRUPT},
        {"names twice",
         R"({"K":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)"
         R"("K":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
         0, CG_ERR_CORRUPT},
        {"overlap",
         R"({"K":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
         R"("V":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
         3, CG_ERR_CORRUPT},
        {"the same bytes twice",
         R"({"K":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
         R"("V":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})",
         2, CG_ERR_CORRUPT},
    };
    for (const auto &c : cases)
        EXPECT_EQ(open(file_of(c.json, c.n_data_bytes)), c.want) << c.what;

    Bytes file = file_of("{}", 0);
    for (size_t n = 0; n < file.size(); n++)
        EXPECT_EQ(open(Bytes(file.begin(), file.begin() + static_cast<long>(n))), CG_ERR_TRUNCATED)
            << n;
    cg_put_le(file.data(), 8, ~0ull);
    EXPECT_EQ(open(file), CG_ERR_CORRUPT);
    cg_put_le(file.data(), 8, CG_SAFETENSORS_MAX_HEADER_BYTES);
    EXPECT_EQ(open(file), CG_ERR_TRUNCATED);
    EXPECT_EQ(open(file_of(std::string(100000, '['), 0)), CG_ERR_CORRUPT); // deep nesting
}

TEST(Safetensors, ReadsItsOwnHeader)
{
    cg_safetensor tensors[2] = {};
    strcpy(tensors[0].name, "K");
    strcpy(tensors[0].dtype, "F16");
    tensors[0].rank = 3;
    tensors[0].shape[0] = tensors[0].shape[1] = tensors[0].shape[2] = 2;
    tensors[0].data_bytes = 16;
    strcpy(tensors[1].name, "a \"quoted\" name");
    strcpy(tensors[1].dtype, "I32");
    tensors[1].rank = 1;
    tensors[1].shape[0] = 1;
    tensors[1].data_bytes = 4;
    const cg_safetensors_text text = {"a name", "a \"text\""};
    uint8_t *bytes;
    size_t n_bytes;
    ASSERT_EQ(cg_safetensors_header(tensors, 2, &text, 1, &bytes, &n_bytes), CG_OK);
    EXPECT_EQ(n_bytes % 8, 0u);
    Bytes file(bytes, bytes + n_bytes);
    free(bytes);
    file.resize(n_bytes + 20);
    cg_safetensors *read;
    ASSERT_EQ(cg_safetensors_open(file.data(), file.size(), &read, nullptr), CG_OK);
    const cg_safetensor *second = cg_safetensors_find(read, "a \"quoted\" name");
    ASSERT_NE(second, nullptr);
    EXPECT_EQ(second->data, file.data() + n_bytes + 16);
    EXPECT_EQ(cg_safetensors_count(read), 2u);
    EXPECT_STREQ(cg_safetensors_metadata(read, "a name"), text.text);
    EXPECT_EQ(cg_safetensors_metadata(read, "another"), nullptr);
    cg_safetensors_free(read);
    tensors[1].data_bytes = 5;
    EXPECT_EQ(cg_safetensors_header(tensors, 2, &text, 1, &bytes, &n_bytes),
              CG_ERR_INVALID_ARGUMENT);
}

} // namespace
