// tests/connector/touched_pages.h - memory of which it is seen which thread touches it first.
#ifndef CG_TESTS_CONNECTOR_TOUCHED_PAGES_H
#define CG_TESTS_CONNECTOR_TOUCHED_PAGES_H
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstring>

namespace cg_test
{

// The whole pages in a range: the first touch is a SIGSEGV, whose handler notes the thread and
// gives them back; with holds only after release(), and until then the thread stands still. One at
// a time.
class TouchedPages
{
  public:
    TouchedPages(uint8_t *begin, size_t n_bytes, bool holds = false)
    {
        holds_ = holds;
        is_overwritten_ = false;
        const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)),
                        first = (reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page,
                        end = (reinterpret_cast<uintptr_t>(begin) + n_bytes) / page * page;
        begin_ = reinterpret_cast<uint8_t *>(first);
        n_bytes_ = end > first ? end - first : 0;
        toucher_ = 0;
        struct sigaction noting = {};
        noting.sa_sigaction = note;
        noting.sa_flags = SA_SIGINFO;
        sigaction(SIGSEGV, &noting, &before_);
        mprotect(begin_, n_bytes_, PROT_NONE);
    }
    ~TouchedPages()
    {
        mprotect(begin_, n_bytes_, PROT_READ | PROT_WRITE);
        sigaction(SIGSEGV, &before_, nullptr);
    }
    TouchedPages(const TouchedPages &) = delete;
    TouchedPages &operator=(const TouchedPages &) = delete;

    void release()
    {
        holds_ = false;
    }
    // The same; by then somebody else has written to the pages, which their reader has begun to
    // read.
    void release_overwritten()
    {
        is_overwritten_ = true;
        release();
    }
    // 0: none has.
    pid_t first_thread() const
    {
        return toucher_;
    }

  private:
    static void note(int signal, siginfo_t *fault, void *)
    {
        const uint8_t *at = static_cast<const uint8_t *>(fault->si_addr);
        if (at < begin_ || at >= begin_ + n_bytes_)
            std::signal(signal, SIG_DFL); // somebody else's: it comes again
        pid_t nobody = 0;
        toucher_.compare_exchange_strong(nobody, gettid());
        while (holds_)
            sched_yield();
        mprotect(begin_, n_bytes_, PROT_READ | PROT_WRITE);
        if (is_overwritten_.exchange(false))
            std::memset(begin_, 0xcd, n_bytes_);
    }
    static inline uint8_t *begin_;
    static inline size_t n_bytes_;
    static inline std::atomic<pid_t> toucher_;
    static inline std::atomic<bool> holds_, is_overwritten_;
    struct sigaction before_ = {};
};

} // namespace cg_test
#endif
