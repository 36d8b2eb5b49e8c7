// tests/fusefs/fsync_hook.h - a test is asked at each fsync() of this program, syncfs(),
// fchownat(), openat(), renameat(), fstatat(), close(), fgetxattr(), pread() and
// fstatvfs().
#ifndef CG_TESTS_FUSEFS_FSYNC_HOOK_H
#define CG_TESTS_FUSEFS_FSYNC_HOOK_H
#include <sys/statvfs.h>

#include <functional>

namespace cg_test
{

// While it lives, fsync(fd) and syncfs(fd) call hook(fd) first. An errno value: they fail with it.
// 0: they go on. One at a time.
class FsyncHook
{
  public:
    explicit FsyncHook(std::function<int(int fd)> hook);
    ~FsyncHook();
    FsyncHook(const FsyncHook &) = delete;
    FsyncHook &operator=(const FsyncHook &) = delete;
};

// While it lives, fchownat(dir_fd, name, ...) calls hook(dir_fd, name) first. One at a time.
class ChownHook
{
  public:
    explicit ChownHook(std::function<void(int dir_fd, const char *name)> hook);
    ~ChownHook();
    ChownHook(const ChownHook &) = delete;
    ChownHook &operator=(const ChownHook &) = delete;
};

// While it lives, openat(dir_fd, name, ...) calls hook(dir_fd, name) first. An errno value: it
// fails with it. 0: it goes on. One at a time.
class OpenHook
{
  public:
    explicit OpenHook(std::function<int(int dir_fd, const char *name)> hook);
    ~OpenHook();
    OpenHook(const OpenHook &) = delete;
    OpenHook &operator=(const OpenHook &) = delete;
};

// While it lives, renameat(from_fd, from, to_fd, to) calls hook(from, to) first. An errno value: it
// fails with it. 0: it goes on. One at a time.
class RenameHook
{
  public:
    explicit RenameHook(std::function<int(const char *from, const char *to)> hook);
    ~RenameHook();
    RenameHook(const RenameHook &) = delete;
    RenameHook &operator=(const RenameHook &) = delete;
};

// While it lives, fstatat(dir_fd, name, ...) calls hook(name) when it has its answer, and before it
// gives it. One at a time.
class StatHook
{
  public:
    explicit StatHook(std::function<void(const char *name)> hook);
    ~StatHook();
    StatHook(const StatHook &) = delete;
    StatHook &operator=(const StatHook &) = delete;
};

// While it lives, close() calls hook() first. One at a time.
class CloseHook
{
  public:
    explicit CloseHook(std::function<void()> hook);
    ~CloseHook();
    CloseHook(const CloseHook &) = delete;
    CloseHook &operator=(const CloseHook &) = delete;
};

// While it lives, fgetxattr(fd, name, ...) calls hook(name) first. An errno value: it fails with
// it. 0: it goes on. One at a time.
class AttributeHook
{
  public:
    explicit AttributeHook(std::function<int(const char *name)> hook);
    ~AttributeHook();
    AttributeHook(const AttributeHook &) = delete;
    AttributeHook &operator=(const AttributeHook &) = delete;
};

// While it lives, pread() calls hook() first. An errno value: it fails with it. 0: it goes on. One
// at a time.
class ReadHook
{
  public:
    explicit ReadHook(std::function<int()> hook);
    ~ReadHook();
    ReadHook(const ReadHook &) = delete;
    ReadHook &operator=(const ReadHook &) = delete;
};

// While it lives, hook may change what fstatvfs() has found. One at a time.
class StatvfsHook
{
  public:
    explicit StatvfsHook(std::function<void(struct statvfs *)> hook);
    ~StatvfsHook();
    StatvfsHook(const StatvfsHook &) = delete;
    StatvfsHook &operator=(const StatvfsHook &) = delete;
};

} // namespace cg_test
#endif
