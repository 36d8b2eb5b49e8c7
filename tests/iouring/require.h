// tests/iouring/require.h - whether a missing thing may be skipped: CG_TEST_REQUIRE=fuse,uring
// turns skips into failures.
#ifndef CG_TESTS_IOURING_REQUIRE_H
#define CG_TESTS_IOURING_REQUIRE_H
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace cg_test
{

inline bool is_required(const std::string &thing)
{
    const char *list = getenv("CG_TEST_REQUIRE");
    return list != nullptr &&
           ("," + std::string(list) + ",").find("," + thing + ",") != std::string::npos;
}

} // namespace cg_test

#define CG_SKIP_OR_FAIL(thing, why)                                                                \
    do {                                                                                           \
        if (cg_test::is_required(thing))                                                           \
            FAIL() << "required: " thing ": " << why;                                              \
        GTEST_SKIP() << why;                                                                       \
    } while (0)
#endif
