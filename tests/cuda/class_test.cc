/* A class as kernels hold it finds of every slot what the CPU's does. */
#include "cuda/coding.h"
#include "cuda/profile_blob.h"
#include "cuda/streams.cuh"
#include "device_memory.h"

#include <cmath>
#include <gtest/gtest.h>
#include <random>
#include <vector>

namespace
{

/* Frequencies of every shape: even, falling steeply, and of many indices in one bucket. */
std::vector<uint16_t> frequencies(unsigned n_symbols, double power, std::mt19937 &random)
{
    std::vector<uint32_t> counts(n_symbols);
    for (unsigned i = 0; i < n_symbols; i++)
        counts[i] = static_cast<uint32_t>(1e6 * std::pow(1.0 + random() % n_symbols, -power));
    std::vector<uint16_t> freq(n_symbols);
    cg_rans_normalize(counts.data(), n_symbols, freq.data());
    return freq;
}

/* As cg_cuda_take_row() looks a slot up. */
uint32_t find(const cg_cuda_class &cls, uint32_t x, uint32_t *entry_out)
{
    const uint32_t slot = x << CG_CUDA_CUM_SHIFT | (CG_CUDA_CUM_ONE - 2);
    uint32_t i = cls.first[cg_cuda_bucket(x)];
    if (slot >= cls.entry[i + 1])
        i++;
    if (i > cls.n_symbols - 1u) {
        for (i = 0; slot >= cls.entry[i + 1];)
            i++;
    }
    *entry_out = cls.entry[i];
    return i;
}

TEST(ClassTest, FindsEverySlot)
{
    std::mt19937 random(1);
    for (unsigned c = 0; c < 60; c++) {
        cg_rans_class cls;
        cg_cuda_class made;
        const unsigned n_symbols = c == 0 ? 2 : c == 1 ? 64 : 2 + 2 * (random() % 32);
        const auto freq = frequencies(n_symbols, c % 6, random);
        ASSERT_EQ(cg_rans_class_init_signed(&cls, 0, n_symbols, freq.data()), CG_OK);
        cg_cuda_class_fill(&cls, &made);
        for (uint32_t slot = 0; slot < CG_RANS_TOTAL; slot++) {
            const uint32_t x = (4 + random() % 1000) << CG_RANS_TOTAL_BITS | slot;
            uint32_t entry;
            const uint32_t i = find(made, x, &entry);
            ASSERT_EQ(i, cg_lane_find(cls.cum, 0, slot)) << "class " << c << ", slot " << slot;
            ASSERT_EQ(entry >> CG_CUDA_CUM_SHIFT, cls.cum[i]);
            ASSERT_EQ((entry & (CG_RANS_TOTAL - 1)) + 1, cls.freq[i]);
        }
    }
}

TEST(ClassTest, OneOfIdleLanesLeavesEveryState)
{
    cg_cuda_class idle;
    cg_cuda_class_fill_idle(&idle);
    for (uint32_t x : {1u << 16, 0x12345678u, UINT32_MAX}) {
        uint32_t entry;
        EXPECT_EQ(find(idle, x, &entry), 0u);
        EXPECT_EQ(entry >> CG_CUDA_CUM_SHIFT, 0u);
        EXPECT_EQ((entry & (CG_RANS_TOTAL - 1)) + 1, static_cast<uint32_t>(CG_RANS_TOTAL));
        const cg_lane_refined r = cg_lane_refine(idle.refine[0], 0, cg_lane_slot(x));
        EXPECT_EQ(r.value, 0);
        EXPECT_EQ(cg_lane_advance(x, r.freq, r.cum), x);
    }
}

/* FORMAT.md, "Matrix of symbols": for the profile tool's 156 classes, and for as many as a profile
 * may have. */
TEST(ClassTest, SoManyAsTheProfileToolMakesTakeLessThan64KiB)
{
    EXPECT_EQ(sizeof(cg_cuda_class), 400u);
    EXPECT_EQ(cg_cuda_coding_classes_bytes(156), 64848u);
    EXPECT_LE(cg_cuda_coding_classes_bytes(256), size_t{CG_CUDA_SHARED_BYTES});
}

/* What the tests of kernels rely on to see a byte too many on either side. */
TEST(DeviceMemoryDeathTest, LiesBetweenPagesThatNobodyMayTouch)
{
    for (const bool at_front : {false, true}) {
        cg_test::DeviceMemory::at_front() = at_front;
        const cg_test::DeviceMemory memory(48);
        volatile uint8_t *const bytes = memory.data();
        bytes[0] = bytes[47] = 1;
        EXPECT_DEATH(bytes[at_front ? -1 : 48] = 1, "");
        EXPECT_DEATH(bytes[at_front ? 4096 : -4096] = 1, "");
    }
    cg_test::DeviceMemory::at_front() = false;
}

} // namespace
