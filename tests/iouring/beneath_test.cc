// Paths do not leave the store, with openat2 and without.
#include "iouring/beneath.h"
#include "tests/iouring/temp_dir.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>

namespace
{

TEST(BeneathTest, OpensWhatIsBelowAndNothingElse)
{
    const cg_test::TempDir dir;
    dir.write("a/b/file", std::string("x"));
    ASSERT_EQ(symlink("a", (dir.path + "/link").c_str()), 0);
    ASSERT_EQ(symlink("/etc", (dir.path + "/a/out").c_str()), 0);
    const struct {
        const char *path;
        int flags, want;
    } cases[] = {
        {"", O_PATH | O_DIRECTORY, 0},      {"a/b/file", O_RDONLY, 0},
        {"a/b", O_RDONLY | O_DIRECTORY, 0}, {"a/b/none", O_RDONLY, ENOENT},
        {"none/b", O_RDONLY, ENOENT},       {"a/b/file/x", O_RDONLY, ENOTDIR},
        {"link", O_RDONLY, ELOOP},          {"link", O_PATH, 0},
        {"link/b/file", O_RDONLY, ELOOP},   {"a/out/passwd", O_RDONLY, ELOOP},
        {"../a", O_RDONLY, EXDEV},          {"a/../../x", O_RDONLY, EXDEV},
    };
    for (const auto &c : cases) {
        SCOPED_TRACE(c.path);
        for (auto open : {cg_beneath_open, cg_beneath_open_by_step}) {
            errno = 0;
            const int fd = open(dir.fd, c.path, c.flags);
            const int error = fd < 0 ? errno : 0;
            if (open == cg_beneath_open_by_step && c.want == ELOOP)
                EXPECT_TRUE(error == ELOOP || error == ENOTDIR)
                    << error; /* O_NOFOLLOW says so of a middle one */
            else
                EXPECT_EQ(error, c.want);
            if (fd >= 0)
                close(fd);
        }
    }
}

TEST(BeneathTest, PathsLongerThanPathMaxAreWalked)
{
    const cg_test::TempDir dir;
    std::string path;
    int fd = dup(dir.fd);
    for (int i = 0; i < 30; i++) {
        const std::string name(200, static_cast<char>('a' + i % 26));
        ASSERT_EQ(mkdirat(fd, name.c_str(), 0700), 0);
        const int next = openat(fd, name.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
        close(fd);
        fd = next;
        path += (i == 0 ? "" : "/") + name;
    }
    close(fd);
    ASSERT_GT(path.size(), 4096u);
    fd = cg_beneath_open(dir.fd, path.c_str(), O_PATH);
    EXPECT_GE(fd, 0);
    close(fd);
}

TEST(BeneathTest, FileWithALeaseIsBusyWithoutWaiting)
{
    const cg_test::TempDir dir;
    for (auto open_beneath : {cg_beneath_open, cg_beneath_open_by_step}) {
        dir.write("a/file", std::string("x"));
        const int held = open((dir.path + "/a/file").c_str(), O_RDWR | O_CLOEXEC);
        ASSERT_GE(held, 0);
        fcntl(held, F_SETSIG, SIGURG); // which is ignored
        if (fcntl(held, F_SETLEASE, F_WRLCK) != 0) {
            close(held);
            GTEST_SKIP() << "no leases here: that an open does not wait for one is not checked";
        }
        const int fd = open_beneath(dir.fd, "a/file", O_RDONLY | O_NONBLOCK);
        EXPECT_EQ(fd < 0 ? errno : 0, EAGAIN) << "else it was opened when the lease had run out";
        // What does not open the content breaks no lease.
        const int path_fd = open_beneath(dir.fd, "a/file", O_PATH);
        EXPECT_GE(path_fd, 0);
        for (const int opened : {fd, path_fd, held})
            if (opened >= 0)
                close(opened);
    }
}

} // namespace
