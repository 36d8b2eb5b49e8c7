#include "tests/fusefs/fsync_hook.h"

#include <errno.h>

#include <mutex>

namespace
{

std::mutex lock;
std::function<int(int)> current;

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

} // namespace cg_test

extern "C" int __real_fsync(int fd);
extern "C" int __wrap_fsync(int fd);

extern "C" int __wrap_fsync(int fd)
{
    std::function<int(int)> hook;
    {
        const std::lock_guard<std::mutex> hold(lock);
        hook = current;
    }
    const int error = hook ? hook(fd) : 0;
    if (error == 0)
        return __real_fsync(fd);
    errno = error;
    return -1;
}
