// tests/fusefs/call_hooks.h - a test is asked at calls of this program to the kernel.
// CMakeLists.txt has the linker wrap them.
#ifndef CG_TESTS_FUSEFS_CALL_HOOKS_H
#define CG_TESTS_FUSEFS_CALL_HOOKS_H
#include <sys/statvfs.h>

#include <functional>

namespace cg_test
{

// While it lives, calls named Name call the hook, too. One of a name at a time, and none of those
// calls may be under way when it comes or goes: so what it guards has no lock that would hide races
// from a sanitizer.
template <typename Function, typename Name> class CallHook
{
  public:
    explicit CallHook(std::function<Function> hook)
    {
        current = std::move(hook);
    }
    ~CallHook()
    {
        current = nullptr;
    }
    CallHook(const CallHook &) = delete;
    CallHook &operator=(const CallHook &) = delete;

    static inline std::function<Function> current;
};

// Those that return an int are asked before the call. An errno value: the call fails with it. 0: it
// goes on.
using OpenHook = CallHook<int(int dir_fd, const char *name), struct Openat>;
// Of mkdirat, symlinkat, mknodat, linkat, renameat2, ftruncate, fallocate, copy_file_range and
// setxattr; call: which of them.
using ChangeHook = CallHook<int(const char *call), struct Change>;
using RenameHook = CallHook<int(const char *from, const char *to), struct Renameat>;
using FchownHook = CallHook<int(int fd), struct Fchown>;
using AttributeHook = CallHook<int(const char *name), struct Fgetxattr>;
using TimesHook = CallHook<int(int flags), struct Utimensat>;
using ReadHook = CallHook<int(), struct Pread>;
// Before the call.
using ChownHook = CallHook<void(int dir_fd, const char *name), struct Fchownat>;
using CloseHook = CallHook<void(), struct Close>;
// When the call has its answer, and before it gives it.
using StatHook = CallHook<void(const char *name), struct Fstatat>;
// It may change what was found.
using StatvfsHook = CallHook<void(struct statvfs *), struct Fstatvfs>;

// While it lives, fsync(fd) and syncfs(fd) call hook(fd) first, as those do that return an int. One
// at a time; calls may be under way when it comes or goes.
class FsyncHook
{
  public:
    explicit FsyncHook(std::function<int(int fd)> hook);
    ~FsyncHook();
    FsyncHook(const FsyncHook &) = delete;
    FsyncHook &operator=(const FsyncHook &) = delete;
};

} // namespace cg_test
#endif
