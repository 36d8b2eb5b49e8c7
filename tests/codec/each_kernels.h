// tests/codec/each_kernels.h - tests that run once for each instruction set.
#ifndef CG_TESTS_CODEC_EACH_KERNELS_H
#define CG_TESTS_CODEC_EACH_KERNELS_H
#include "codec/kernels.h"

#include <gtest/gtest.h>

namespace cg_test
{

// The parameter is the name of the table that the codec uses during the test.
class EachKernels : public testing::TestWithParam<const char *>
{
  protected:
    void SetUp() override
    {
        kernels = cg_kernels_named(GetParam());
        if (kernels == nullptr)
            GTEST_SKIP() << "this CPU or build has no " << GetParam()
                         << ": its kernels are not checked";
        cg_kernels_use(kernels);
    }
    void TearDown() override
    {
        cg_kernels_use(nullptr);
    }
    const cg_kernels *kernels = nullptr;
};

} // namespace cg_test
#endif
