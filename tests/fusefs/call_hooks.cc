#include "tests/fusefs/call_hooks.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/types.h>

#include <mutex>

namespace
{

std::mutex fsync_lock;
std::function<int(int)> fsync_hook;

// Whether the call may go on; else errno is set.
bool may_go_on(int error)
{
    if (error != 0)
        errno = error;
    return error == 0;
}

template <typename Hook, typename... Arguments> bool lets(Arguments... arguments)
{
    return may_go_on(Hook::current ? Hook::current(arguments...) : 0);
}

template <typename Hook, typename... Arguments> void tell(Arguments... arguments)
{
    const int error = errno;
    if (Hook::current)
        Hook::current(arguments...);
    errno = error;
}

bool fsync_hook_lets(int fd)
{
    std::function<int(int)> hook;
    {
        const std::lock_guard<std::mutex> hold(fsync_lock);
        hook = fsync_hook;
    }
    return may_go_on(hook ? hook(fd) : 0);
}

} // namespace

namespace cg_test
{

FsyncHook::FsyncHook(std::function<int(int fd)> hook)
{
    const std::lock_guard<std::mutex> hold(fsync_lock);
    fsync_hook = std::move(hook);
}

FsyncHook::~FsyncHook()
{
    const std::lock_guard<std::mutex> hold(fsync_lock);
    fsync_hook = nullptr;
}

} // namespace cg_test

extern "C" int __real_openat(int dir_fd, const char *name, int flags, ...);
extern "C" int __wrap_openat(int dir_fd, const char *name, int flags, ...);

extern "C" int __wrap_openat(int dir_fd, const char *name, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    return lets<cg_test::OpenHook>(dir_fd, name) ? __real_openat(dir_fd, name, flags, mode) : -1;
}

extern "C" int __real_renameat(int from_fd, const char *from, int to_fd, const char *to);
extern "C" int __wrap_renameat(int from_fd, const char *from, int to_fd, const char *to);

extern "C" int __wrap_renameat(int from_fd, const char *from, int to_fd, const char *to)
{
    return lets<cg_test::RenameHook>(from, to) ? __real_renameat(from_fd, from, to_fd, to) : -1;
}

// ---- those that make, move or change something ----

#define CG_WRAP_CHANGE(result, name, parameters, ...)                                              \
    extern "C" result __real_##name parameters;                                                    \
    extern "C" result __wrap_##name parameters;                                                    \
    extern "C" result __wrap_##name parameters                                                     \
    {                                                                                              \
        return lets<cg_test::ChangeHook>(#name) ? __real_##name(__VA_ARGS__) : -1;                 \
    }

CG_WRAP_CHANGE(int, mkdirat, (int dir_fd, const char *name, mode_t mode), dir_fd, name, mode)
CG_WRAP_CHANGE(int, symlinkat, (const char *target, int dir_fd, const char *name), target, dir_fd,
               name)
CG_WRAP_CHANGE(int, mknodat, (int dir_fd, const char *name, mode_t mode, dev_t device), dir_fd,
               name, mode, device)
CG_WRAP_CHANGE(int, linkat, (int from_fd, const char *from, int to_fd, const char *to, int flags),
               from_fd, from, to_fd, to, flags)
CG_WRAP_CHANGE(int, renameat2,
               (int from_fd, const char *from, int to_fd, const char *to, unsigned flags), from_fd,
               from, to_fd, to, flags)
CG_WRAP_CHANGE(int, ftruncate, (int fd, off_t size), fd, size)
CG_WRAP_CHANGE(int, fallocate, (int fd, int mode, off_t at, off_t n_bytes), fd, mode, at, n_bytes)
CG_WRAP_CHANGE(ssize_t, copy_file_range,
               (int from, off_t *from_at, int to, off_t *to_at, size_t n_bytes, unsigned flags),
               from, from_at, to, to_at, n_bytes, flags)
CG_WRAP_CHANGE(int, setxattr,
               (const char *path, const char *name, const void *value, size_t n_bytes, int flags),
               path, name, value, n_bytes, flags)

extern "C" int __real_fstatat(int dir_fd, const char *name, struct stat *attr, int flags);
extern "C" int __wrap_fstatat(int dir_fd, const char *name, struct stat *attr, int flags);

extern "C" int __wrap_fstatat(int dir_fd, const char *name, struct stat *attr, int flags)
{
    const int result = __real_fstatat(dir_fd, name, attr, flags);
    tell<cg_test::StatHook>(name);
    return result;
}

extern "C" int __real_close(int fd);
extern "C" int __wrap_close(int fd);

extern "C" int __wrap_close(int fd)
{
    tell<cg_test::CloseHook>();
    return __real_close(fd);
}

extern "C" ssize_t __real_fgetxattr(int fd, const char *name, void *value, size_t size);
extern "C" ssize_t __wrap_fgetxattr(int fd, const char *name, void *value, size_t size);

extern "C" ssize_t __wrap_fgetxattr(int fd, const char *name, void *value, size_t size)
{
    return lets<cg_test::AttributeHook>(name) ? __real_fgetxattr(fd, name, value, size) : -1;
}

extern "C" int __real_utimensat(int dir_fd, const char *name, const timespec *times, int flags);
extern "C" int __wrap_utimensat(int dir_fd, const char *name, const timespec *times, int flags);

extern "C" int __wrap_utimensat(int dir_fd, const char *name, const timespec *times, int flags)
{
    return lets<cg_test::TimesHook>(flags) ? __real_utimensat(dir_fd, name, times, flags) : -1;
}

extern "C" ssize_t __real_pread(int fd, void *bytes, size_t n_bytes, off_t offset);
extern "C" ssize_t __wrap_pread(int fd, void *bytes, size_t n_bytes, off_t offset);

extern "C" ssize_t __wrap_pread(int fd, void *bytes, size_t n_bytes, off_t offset)
{
    return lets<cg_test::ReadHook>() ? __real_pread(fd, bytes, n_bytes, offset) : -1;
}

extern "C" int __real_fstatvfs(int fd, struct statvfs *disk);
extern "C" int __wrap_fstatvfs(int fd, struct statvfs *disk);

extern "C" int __wrap_fstatvfs(int fd, struct statvfs *disk)
{
    const int result = __real_fstatvfs(fd, disk);
    if (result == 0)
        tell<cg_test::StatvfsHook>(disk);
    return result;
}

extern "C" int __real_fchownat(int dir_fd, const char *name, uid_t uid, gid_t gid, int flags);
extern "C" int __wrap_fchownat(int dir_fd, const char *name, uid_t uid, gid_t gid, int flags);

extern "C" int __wrap_fchownat(int dir_fd, const char *name, uid_t uid, gid_t gid, int flags)
{
    tell<cg_test::ChownHook>(dir_fd, name);
    return __real_fchownat(dir_fd, name, uid, gid, flags);
}

extern "C" int __real_fchown(int fd, uid_t uid, gid_t gid);
extern "C" int __wrap_fchown(int fd, uid_t uid, gid_t gid);

extern "C" int __wrap_fchown(int fd, uid_t uid, gid_t gid)
{
    return lets<cg_test::FchownHook>(fd) ? __real_fchown(fd, uid, gid) : -1;
}

extern "C" int __real_fsync(int fd);
extern "C" int __wrap_fsync(int fd);

extern "C" int __wrap_fsync(int fd)
{
    return fsync_hook_lets(fd) ? __real_fsync(fd) : -1;
}

extern "C" int __real_syncfs(int fd);
extern "C" int __wrap_syncfs(int fd);

extern "C" int __wrap_syncfs(int fd)
{
    return fsync_hook_lets(fd) ? __real_syncfs(fd) : -1;
}
