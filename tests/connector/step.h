// tests/connector/step.h - a thread that stands for an engine's: what it calls may compute, but not
// wait. The kernel reports its system calls that could (seccomp), so that no clock is needed.
#ifndef CG_TESTS_CONNECTOR_STEP_H
#define CG_TESTS_CONNECTOR_STEP_H
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/seccomp.h>
#include <malloc.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <functional>
#include <future>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace cg_test
{

// Questions to a file system, and waits for time, events or other threads. A lock is none of them:
// the library holds none across a system call.
inline bool may_wait(int call)
{
    static const std::vector<int> waiting = {
        SYS_open,        SYS_openat,     SYS_openat2,         SYS_stat,          SYS_lstat,
        SYS_fstat,       SYS_newfstatat, SYS_statx,           SYS_access,        SYS_faccessat,
        SYS_readv,       SYS_pread64,    SYS_preadv,          SYS_preadv2,       SYS_pwrite64,
        SYS_pwritev,     SYS_pwritev2,   SYS_fsync,           SYS_fdatasync,     SYS_getdents64,
        SYS_rename,      SYS_renameat,   SYS_renameat2,       SYS_link,          SYS_linkat,
        SYS_unlink,      SYS_unlinkat,   SYS_mkdir,           SYS_mkdirat,       SYS_flock,
        SYS_poll,        SYS_ppoll,      SYS_select,          SYS_pselect6,      SYS_epoll_wait,
        SYS_epoll_pwait, SYS_nanosleep,  SYS_clock_nanosleep, SYS_io_uring_enter};
    for (const int number : waiting)
        if (call == number)
            return true;
    return false;
}

// Threads that it begins must end before it.
class StepThread
{
  public:
    StepThread()
    {
        mallopt(M_ARENA_MAX, 1); // else malloc asks /proc how many to make
        std::promise<int> filtered;
        std::future<int> listener = filtered.get_future();
        thread_ = std::thread([this, ready = std::move(filtered)]() mutable {
            id_ = gettid();
            ready.set_value(filter());
            work();
        });
        listener_ = listener.get();
        if (listener_ >= 0) // before the thread waits for anything: that is reported, too
            watcher_ = std::thread([this] { watch(); });
    }
    ~StepThread()
    {
        run(nullptr);
        thread_.join();
        ends_ = true;
        if (watcher_.joinable())
            watcher_.join();
        if (listener_ >= 0)
            close(listener_);
    }
    StepThread(const StepThread &) = delete;
    StepThread &operator=(const StepThread &) = delete;

    // Not empty: this kernel or container reports no system calls.
    const std::string &why() const
    {
        return why_;
    }
    // Calls it on the thread, and waits for its end.
    void run(std::function<void()> call)
    {
        std::unique_lock<std::mutex> lock(mutex_);
        call_ = std::move(call);
        has_call_ = true;
        changed_.notify_all();
        changed_.wait(lock, [&] { return !has_call_; });
    }
    // Numbers of the system calls of run() until now that could have waited; usually none.
    std::string waits()
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        return waits_;
    }

  private:
    void work()
    {
        std::unique_lock<std::mutex> lock(mutex_);
        for (bool goes_on = true; goes_on;) {
            changed_.wait(lock, [&] { return has_call_; });
            lock.unlock();
            inside_ = true;
            goes_on = call_ != nullptr;
            if (goes_on)
                call_();
            inside_ = false;
            lock.lock();
            has_call_ = false;
            changed_.notify_all();
        }
    }
    // From here on this thread's calls of may_wait() are reported, and waits for conditions.
    int filter()
    {
        utsname kernel = {};
        int major = 0, minor = 0;
        uname(&kernel);
        if (sscanf(kernel.release, "%d.%d", &major, &minor) != 2 || major * 100 + minor < 505) {
            why_ =
                std::string("no seccomp that lets reported calls go on: Linux ") + kernel.release;
            return -1;
        }
        std::vector<sock_filter> program = {
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
        for (int number = 0; number < 512; number++) {
            if (!may_wait(number))
                continue;
            program.push_back(
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(number), 0, 1));
            program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF));
        }
        const sock_filter futex[] = {
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_futex, 0, 4),
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])),
            BPF_STMT(BPF_ALU | BPF_AND | BPF_K, static_cast<uint32_t>(FUTEX_CMD_MASK)),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, FUTEX_WAIT_BITSET, 0, 1), // pthread_cond_wait()
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
        program.insert(program.end(), std::begin(futex), std::end(futex));
        sock_fprog given = {static_cast<unsigned short>(program.size()), program.data()};
        int made = -1;
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0)
            made = static_cast<int>(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER,
                                            SECCOMP_FILTER_FLAG_NEW_LISTENER, &given));
        if (made < 0)
            why_ = std::string("no seccomp that reports system calls: ") + strerror(errno);
        return made;
    }
    // Each call goes on as it would; only those of run() are noted, not those of threads that a
    // call of run() has begun. Until it is answered the thread stands still, so that inside_ is
    // true of that call.
    void watch()
    {
        while (!ends_) {
            pollfd ready = {listener_, POLLIN, 0};
            seccomp_notif call = {};
            if (poll(&ready, 1, 10) <= 0 || (ready.revents & POLLIN) == 0 ||
                ioctl(listener_, SECCOMP_IOCTL_NOTIF_RECV, &call) != 0)
                continue;
            if (inside_ && static_cast<pid_t>(call.pid) == id_)
                note(call.data);
            seccomp_notif_resp answer = {};
            answer.id = call.id;
            answer.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
            ioctl(listener_, SECCOMP_IOCTL_NOTIF_SEND, &answer);
        }
    }
    // The first letters of a path. The thread stands still, so that it stays; read by the kernel,
    // since ThreadSanitizer does not know that.
    static std::string path_of(uint64_t address)
    {
        char path[sizeof "/proc/"] = "";
        const int memory = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
        if (pread(memory, path, sizeof path - 1, static_cast<off_t>(address)) < 0)
            path[0] = '\0';
        close(memory);
        return path;
    }
    void note(const seccomp_data &call)
    {
        if (call.nr == SYS_openat && path_of(call.args[1]) == "/proc/")
            return; // is memory: names of threads
        const std::lock_guard<std::mutex> lock(mutex_);
        waits_ += (waits_.empty() ? "" : " ") + std::to_string(call.nr);
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::function<void()> call_;
    bool has_call_ = false;
    std::atomic<bool> inside_{false}, ends_{false};
    pid_t id_ = 0;
    std::string why_, waits_;
    int listener_ = -1;
    std::thread thread_, watcher_;
};

} // namespace cg_test
#endif
