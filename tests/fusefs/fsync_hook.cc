#include "tests/fusefs/fsync_hook.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/types.h>

#include <mutex>

namespace
{

std::mutex lock;
std::function<int(int)> current;
std::function<int(int, const char *)> current_open;
std::function<void(int, const char *)> current_chown;
std::function<int(const char *, const char *)> current_rename;
std::function<void(const char *)> current_stat;
std::function<void()> current_close;
std::function<int(const char *)> current_attribute;
std::function<int()> current_read;
std::function<void(struct statvfs *)> current_statvfs;

} // namespace

namespace cg_test
{

FsyncHook::FsyncHook(std::function<int(int fd)> hook)
{
    const std::lock_guard<std::mutex> hold(lock);
    current = std::move(hook);
}

FsyncHook::~FsyncHook()
{
    const std::lock_guard<std::mutex> hold(lock);
    current = nullptr;
}

ChownHook::ChownHook(std::function<void(int dir_fd, const char *name)> hook)
{
    current_chown = std::move(hook);
}

ChownHook::~ChownHook()
{
    current_chown = nullptr;
}

OpenHook::OpenHook(std::function<int(int dir_fd, const char *name)> hook)
{
    current_open = std::move(hook);
}

OpenHook::~OpenHook()
{
    current_open = nullptr;
}

RenameHook::RenameHook(std::function<int(const char *from, const char *to)> hook)
{
    current_rename = std::move(hook);
}

RenameHook::~RenameHook()
{
    current_rename = nullptr;
}

StatHook::StatHook(std::function<void(const char *name)> hook)
{
    current_stat = std::move(hook);
}

StatHook::~StatHook()
{
    current_stat = nullptr;
}

CloseHook::CloseHook(std::function<void()> hook)
{
    current_close = std::move(hook);
}

CloseHook::~CloseHook()
{
    current_close = nullptr;
}

AttributeHook::AttributeHook(std::function<int(const char *name)> hook)
{
    current_attribute = std::move(hook);
}

AttributeHook::~AttributeHook()
{
    current_attribute = nullptr;
}

ReadHook::ReadHook(std::function<int()> hook)
{
    current_read = std::move(hook);
}

ReadHook::~ReadHook()
{
    current_read = nullptr;
}

StatvfsHook::StatvfsHook(std::function<void(struct statvfs *)> hook)
{
    current_statvfs = std::move(hook);
}

StatvfsHook::~StatvfsHook()
{
    current_statvfs = nullptr;
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
    const int error = current_open ? current_open(dir_fd, name) : 0;
    if (error != 0) {
        errno = error;
        return -1;
    }
    return __real_openat(dir_fd, name, flags, mode);
}

extern "C" int __real_renameat(int from_fd, const char *from, int to_fd, const char *to);
extern "C" int __wrap_renameat(int from_fd, const char *from, int to_fd, const char *to);

extern "C" int __wrap_renameat(int from_fd, const char *from, int to_fd, const char *to)
{
    const int error = current_rename ? current_rename(from, to) : 0;
    if (error != 0) {
        errno = error;
        return -1;
    }
    return __real_renameat(from_fd, from, to_fd, to);
}

extern "C" int __real_fstatat(int dir_fd, const char *name, struct stat *attr, int flags);
extern "C" int __wrap_fstatat(int dir_fd, const char *name, struct stat *attr, int flags);

extern "C" int __wrap_fstatat(int dir_fd, const char *name, struct stat *attr, int flags)
{
    const int result = __real_fstatat(dir_fd, name, attr, flags), error = errno;
    if (current_stat)
        current_stat(name);
    errno = error;
    return result;
}

extern "C" int __real_close(int fd);
extern "C" int __wrap_close(int fd);

extern "C" int __wrap_close(int fd)
{
    if (current_close)
        current_close();
    return __real_close(fd);
}

extern "C" ssize_t __real_fgetxattr(int fd, const char *name, void *value, size_t size);
extern "C" ssize_t __wrap_fgetxattr(int fd, const char *name, void *value, size_t size);

extern "C" ssize_t __wrap_fgetxattr(int fd, const char *name, void *value, size_t size)
{
    const int error = current_attribute ? current_attribute(name) : 0;
    if (error != 0) {
        errno = error;
        return -1;
    }
    return __real_fgetxattr(fd, name, value, size);
}

extern "C" ssize_t __real_pread(int fd, void *bytes, size_t n_bytes, off_t offset);
extern "C" ssize_t __wrap_pread(int fd, void *bytes, size_t n_bytes, off_t offset);

extern "C" ssize_t __wrap_pread(int fd, void *bytes, size_t n_bytes, off_t offset)
{
    const int error = current_read ? current_read() : 0;
    if (error != 0) {
        errno = error;
        return -1;
    }
    return __real_pread(fd, bytes, n_bytes, offset);
}

extern "C" int __real_fstatvfs(int fd, struct statvfs *disk);
extern "C" int __wrap_fstatvfs(int fd, struct statvfs *disk);

extern "C" int __wrap_fstatvfs(int fd, struct statvfs *disk)
{
    const int result = __real_fstatvfs(fd, disk);
    if (result == 0 && current_statvfs)
        current_statvfs(disk);
    return result;
}

extern "C" int __real_fchownat(int dir_fd, const char *name, uid_t uid, gid_t gid, int flags);
extern "C" int __wrap_fchownat(int dir_fd, const char *name, uid_t uid, gid_t gid, int flags);

extern "C" int __wrap_fchownat(int dir_fd, const char *name, uid_t uid, gid_t gid, int flags)
{
    if (current_chown)
        current_chown(dir_fd, name);
    return __real_fchownat(dir_fd, name, uid, gid, flags);
}

// Whether the hook lets the call with this descriptor go on; else errno is set.
static bool may_sync(int fd)
{
    std::function<int(int)> hook;
    {
        const std::lock_guard<std::mutex> hold(lock);
        hook = current;
    }
    const int error = hook ? hook(fd) : 0;
    errno = error != 0 ? error : errno;
    return error == 0;
}

extern "C" int __real_fsync(int fd);
extern "C" int __wrap_fsync(int fd);

extern "C" int __wrap_fsync(int fd)
{
    return may_sync(fd) ? __real_fsync(fd) : -1;
}

extern "C" int __real_syncfs(int fd);
extern "C" int __wrap_syncfs(int fd);

extern "C" int __wrap_syncfs(int fd)
{
    return may_sync(fd) ? __real_syncfs(fd) : -1;
}
