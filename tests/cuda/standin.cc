#include "tests/cuda/standin.h"

#include "cuda/calls.h"
#include "tests/cuda/emulated_decode.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

namespace
{

[[noreturn]] void misused(const char *what)
{
    fprintf(stderr, "stand-in of CUDA: %s\n", what);
    abort();
}

enum { PAGE = 4096, ALIGN = 256 };
enum { INVALID_VALUE = 1, NO_MEMORY = 2, NO_DEVICE = 100, ILLEGAL_ADDRESS = 700, CAPTURED = 900 };

struct Piece { // of memory: its pages, and what lies in them
    char *pages;
    size_t pages_bytes;
    bool is_device, is_engine;
};

struct World {
    std::mutex lock; // of all below but the atomics
    std::map<char *, std::pair<size_t, Piece>> pieces;
    std::set<CUstream_st *> streams;
    std::set<CUevent_st *> events;
    std::vector<std::shared_ptr<CUevent_st>> destroyed; // kept: a stream may yet wait for one
    size_t n_allocated = 0;
    int n_devices = 2;
    long call_countdown = 0, operation_countdown = 0, pinned_countdown = 0;
    int call_error = 0;
    bool call_is_sticky = false, has_failed = false;
    uint64_t contexts = 0; // bit n: device n
    long wait_countdown = 0;
    bool is_captured = false, is_disturbed = false;
    bool is_hung = false, copies_are_held = false;
    std::condition_variable goes_on;
    std::atomic<int> sticky{0};
    std::mutex running; // the GPU: one operation at a time
};
World &world()
{
    static World w;
    return w;
}
thread_local int current_device = 0, last_error = 0;
thread_local bool is_relaxed = false;

std::atomic<size_t> nice_calls{0};
bool is_nice()
{
    const pid_t first = getpid();
    return (sched_getscheduler(0) == SCHED_IDLE && sched_getscheduler(first) != SCHED_IDLE) ||
           getpriority(PRIO_PROCESS, 0) > getpriority(PRIO_PROCESS, static_cast<id_t>(first));
}

// What a call returns. Every call of the host side comes here first. A call that works on the
// current device makes that device's context, if there is none.
int called(int result = 0, bool needs_context = true)
{
    World &w = world();
    nice_calls += is_nice();
    std::lock_guard<std::mutex> guard(w.lock);
    if (needs_context)
        w.contexts |= uint64_t{1} << current_device;
    if (w.sticky != 0)
        return last_error = w.sticky;
    if (w.is_captured && !is_relaxed) {
        w.is_disturbed = true;
        return last_error = CAPTURED;
    }
    if (w.call_countdown > 0 && --w.call_countdown == 0) {
        w.has_failed = true;
        if (w.call_is_sticky)
            w.sticky = w.call_error;
        return last_error = w.call_error;
    }
    return result;
}

// Every call that waits comes here.
void may_hang()
{
    World &w = world();
    std::unique_lock<std::mutex> guard(w.lock);
    if (w.wait_countdown > 0 && --w.wait_countdown == 0)
        w.is_hung = true;
    w.goes_on.wait(guard, [&] { return !w.is_hung; });
}

// Finds the allocation that all of [at, at + n_bytes) lies in.
const Piece *piece_of(const void *at, size_t n_bytes)
{
    World &w = world();
    char *begin = static_cast<char *>(const_cast<void *>(at));
    auto after = w.pieces.upper_bound(begin);
    if (after == w.pieces.begin())
        return nullptr;
    const auto &[address, sized] = *std::prev(after);
    return begin + n_bytes <= address + sized.first ? &sized.second : nullptr;
}

void protect_device(int protection)
{
    World &w = world();
    std::lock_guard<std::mutex> guard(w.lock);
    for (const auto &[address, sized] : w.pieces)
        if (sized.second.is_device &&
            mprotect(sized.second.pages, sized.second.pages_bytes, protection) != 0)
            misused("mprotect");
}

} // namespace

struct CUevent_st {
    std::mutex lock;
    std::condition_variable changed;
    uint64_t n_recorded = 0, n_reached = 0;
    bool is_engine = false;
    bool is_of_engine_stream = false; // recorded last in one
    std::atomic<bool> is_destroyed{false};
};

struct CUstream_st {
    using Operation = std::function<void()>;
    struct Entry {
        Operation run;
        bool on_gpu;    // touches memory
        bool is_engine; // runs also after an error
        CUevent_st *waits_for = nullptr;
        uint64_t until = 0;
        CUevent_st *reaches = nullptr;
        uint64_t ticket = 0;
        bool copies_out = false;
        unsigned sleep_ms = 0;
    };
    explicit CUstream_st(bool engine) : is_engine(engine), thread([this] { work(); })
    {
    }
    ~CUstream_st()
    {
        {
            std::lock_guard<std::mutex> guard(lock);
            stop = true;
        }
        changed.notify_all();
        thread.join();
    }
    void put(Entry entry)
    {
        {
            std::lock_guard<std::mutex> guard(lock);
            queue.push_back(std::move(entry));
        }
        changed.notify_all();
    }
    void drain()
    {
        std::unique_lock<std::mutex> guard(lock);
        changed.wait(guard, [this] { return queue.empty() && !is_busy; });
    }
    bool waits()
    {
        std::unique_lock<std::mutex> guard(lock);
        changed.wait(guard, [this] { return is_waiting || (queue.empty() && !is_busy); });
        return is_waiting;
    }
    void hold(bool held)
    {
        {
            std::lock_guard<std::mutex> guard(lock);
            is_held = held;
        }
        changed.notify_all();
    }

    const bool is_engine;

  private:
    void work()
    {
        std::unique_lock<std::mutex> guard(lock);
        for (;;) {
            changed.wait(guard, [this] { return (stop && queue.empty()) || can_begin(); });
            if (queue.empty())
                return;
            Entry entry = std::move(queue.front());
            queue.pop_front();
            is_busy = true;
            is_waiting = waits_for_event(entry);
            changed.notify_all();
            guard.unlock();
            run(entry);
            guard.lock();
            is_busy = is_waiting = false;
            changed.notify_all();
        }
    }
    bool can_begin() const
    {
        return !queue.empty() && (!is_held || stop);
    }
    static bool waits_for_event(const Entry &entry)
    {
        if (entry.waits_for == nullptr)
            return false;
        std::lock_guard<std::mutex> guard(entry.waits_for->lock);
        return entry.waits_for->n_reached < entry.until;
    }
    static void run(const Entry &entry)
    {
        World &w = world();
        if (entry.sleep_ms > 0)
            std::this_thread::sleep_for(std::chrono::milliseconds(entry.sleep_ms));
        if (entry.copies_out) {
            std::unique_lock<std::mutex> guard(w.lock);
            w.goes_on.wait(guard, [&] { return !w.copies_are_held; });
        }
        if (entry.waits_for != nullptr) {
            CUevent_st *event = entry.waits_for;
            std::unique_lock<std::mutex> guard(event->lock);
            event->changed.wait(guard, [&] { return event->n_reached >= entry.until; });
        }
        if (entry.run) {
            if (entry.on_gpu && !entry.is_engine && next_fails())
                w.sticky = ILLEGAL_ADDRESS;
            if (entry.is_engine || w.sticky == 0) {
                std::lock_guard<std::mutex> guard(w.running);
                protect_device(PROT_READ | PROT_WRITE);
                entry.run();
                protect_device(PROT_NONE);
            }
        }
        if (entry.reaches != nullptr) {
            // Notified with the lock: who waits may free the event as soon as it has the lock.
            std::lock_guard<std::mutex> guard(entry.reaches->lock);
            entry.reaches->n_reached = std::max(entry.reaches->n_reached, entry.ticket);
            entry.reaches->changed.notify_all();
        }
    }
    static bool next_fails()
    {
        World &w = world();
        std::lock_guard<std::mutex> guard(w.lock);
        const bool fails = w.operation_countdown > 0 && --w.operation_countdown == 0;
        w.has_failed = w.has_failed || fails;
        return fails;
    }

    std::mutex lock;
    std::condition_variable changed;
    std::deque<Entry> queue;
    bool stop = false, is_busy = false, is_held = false, is_waiting = false;
    std::thread thread;
};

namespace
{

CUstream_st *default_stream()
{
    static CUstream_st stream(true);
    return &stream;
}
CUstream_st *stream_of(void *stream)
{
    return stream != nullptr ? static_cast<CUstream_st *>(stream) : default_stream();
}
CUstream_st *own(CUstream_st *stream)
{
    if (stream == nullptr || stream->is_engine)
        misused("the host side works on a stream of the engine, or on the default stream");
    return stream;
}

// Memory that ends at a guard page.
void *allocate(size_t n_bytes, bool is_device, bool is_engine)
{
    World &w = world();
    const size_t in_use = (n_bytes + ALIGN - 1) / ALIGN * ALIGN,
                 pages_bytes = (in_use + PAGE - 1) / PAGE * PAGE;
    char *pages = static_cast<char *>(
        mmap(nullptr, pages_bytes + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (pages == MAP_FAILED)
        misused("mmap");
    if (!is_device && mprotect(pages, pages_bytes, PROT_READ | PROT_WRITE) != 0)
        misused("mprotect");
    // Pinned memory begins on a page, as CUDA's does; device memory ends on one.
    char *begin = is_device ? pages + pages_bytes - in_use : pages;
    std::lock_guard<std::mutex> running(w.running); // nobody toggles protections meanwhile
    std::lock_guard<std::mutex> guard(w.lock);
    w.pieces[begin] = {n_bytes, {pages, pages_bytes, is_device, is_engine}};
    w.n_allocated += !is_engine;
    return begin;
}

void release(void *memory, bool is_device, bool is_engine)
{
    World &w = world();
    std::lock_guard<std::mutex> running(w.running);
    std::lock_guard<std::mutex> guard(w.lock);
    const auto at = w.pieces.find(static_cast<char *>(memory));
    if (at == w.pieces.end() || at->second.second.is_device != is_device ||
        at->second.second.is_engine != is_engine)
        misused("frees what it did not allocate");
    munmap(at->second.second.pages, at->second.second.pages_bytes + PAGE);
    w.pieces.erase(at);
}

// ---- the calls ----

int get_device_count(int *n_out)
{
    *n_out = world().n_devices;
    return called(*n_out > 0 ? 0 : NO_DEVICE, false);
}
int get_device(int *ordinal_out)
{
    *ordinal_out = current_device;
    return called(0, false);
}
// As from CUDA 12 on, this alone makes the device's context.
int set_device(int ordinal)
{
    const int error =
        called(ordinal >= 0 && ordinal < world().n_devices ? 0 : INVALID_VALUE, false);
    if (error != 0)
        return error;
    current_device = ordinal;
    std::lock_guard<std::mutex> guard(world().lock);
    world().contexts |= uint64_t{1} << ordinal;
    return 0;
}
int relax_capture()
{
    is_relaxed = true;
    return 0;
}
const char *get_error_string(int error)
{
    switch (error) {
    case 0: return "no error";
    case NO_MEMORY: return "out of memory";
    case NO_DEVICE: return "no CUDA-capable device is detected";
    case ILLEGAL_ADDRESS: return "an illegal memory access was encountered";
    default: return "an error that the stand-in was told to make";
    }
}
int get_last_error()
{
    const int error = last_error;
    last_error = 0;
    return error;
}
int device_malloc(void **dev_out, size_t n_bytes)
{
    const int error = called();
    if (error == 0)
        *dev_out = allocate(n_bytes, true, false);
    return error;
}
int device_free(void *dev)
{
    release(dev, true, false); // after a sticky error, too: tests count
    return called();
}
int host_alloc(void **out, size_t n_bytes)
{
    const int error = called();
    if (error != 0)
        return error;
    {
        std::lock_guard<std::mutex> guard(world().lock);
        if (world().pinned_countdown > 0 && --world().pinned_countdown == 0) {
            world().has_failed = true;
            return last_error = NO_MEMORY;
        }
    }
    *out = allocate(n_bytes, false, false);
    return 0;
}
int host_free(void *host)
{
    release(host, false, false);
    return called();
}
int stream_create(cg_cuda_stream *out)
{
    const int error = called();
    if (error != 0)
        return error;
    *out = new CUstream_st(false);
    std::lock_guard<std::mutex> guard(world().lock);
    world().streams.insert(*out);
    world().n_allocated++;
    return 0;
}
int stream_destroy(cg_cuda_stream stream)
{
    {
        std::lock_guard<std::mutex> guard(world().lock);
        if (world().streams.erase(own(stream)) == 0)
            misused("destroys a stream twice");
    }
    delete stream;
    return called();
}
int stream_synchronize(cg_cuda_stream stream)
{
    may_hang();
    own(stream)->drain(); // operations end after a sticky error, too
    return called();
}
CUevent_st *alive(cg_cuda_event event)
{
    if (event->is_destroyed)
        misused("uses an event that it has destroyed");
    return event;
}
int stream_wait_event(cg_cuda_stream stream, cg_cuda_event event)
{
    alive(event);
    const int error = called();
    if (error != 0)
        return error;
    CUstream_st::Entry entry{};
    entry.waits_for = event;
    {
        std::lock_guard<std::mutex> guard(event->lock);
        entry.until = event->n_recorded;
    }
    stream_of(stream)->put(std::move(entry));
    return 0;
}
int event_create(cg_cuda_event *out)
{
    const int error = called();
    if (error != 0)
        return error;
    *out = new CUevent_st;
    std::lock_guard<std::mutex> guard(world().lock);
    world().events.insert(*out);
    return 0;
}
// As CUDA has it, an event may be destroyed before it is reached: what an engine's stream has
// before it may take long. In a stream of ours nothing may be under way any more: its memory goes,
// too. And an engine's stream that is to wait for an event of ours may come to that later.
int event_destroy(cg_cuda_event event)
{
    World &w = world();
    {
        std::lock_guard<std::mutex> guard(alive(event)->lock);
        if (event->n_reached != event->n_recorded && !event->is_of_engine_stream)
            misused("destroys an event that is not reached");
        event->is_destroyed = true;
    }
    {
        std::lock_guard<std::mutex> guard(w.lock);
        if (w.events.erase(event) == 0)
            misused("destroys an event of the engine");
        w.destroyed.emplace_back(event);
    }
    return called();
}
void record(cg_cuda_event event, CUstream_st *stream)
{
    CUstream_st::Entry entry{};
    {
        std::lock_guard<std::mutex> guard(event->lock);
        event->is_of_engine_stream = stream->is_engine;
        entry.ticket = ++event->n_recorded;
    }
    entry.reaches = event;
    stream->put(std::move(entry));
}
int event_record(cg_cuda_event event, cg_cuda_stream stream)
{
    alive(event);
    const int error = called();
    if (error == 0)
        record(event, stream_of(stream));
    return error;
}
int event_query(cg_cuda_event event)
{
    const int error = called();
    std::lock_guard<std::mutex> guard(alive(event)->lock);
    if (error != 0 || event->n_reached == event->n_recorded)
        return error;
    return last_error = CG_CUDA_NOT_READY;
}
int event_synchronize(cg_cuda_event event)
{
    {
        std::lock_guard<std::mutex> guard(world().lock);
        if (world().events.count(event) == 0)
            misused("waits for an event of the engine");
    }
    may_hang();
    {
        std::unique_lock<std::mutex> guard(event->lock);
        event->changed.wait(guard, [&] { return event->n_reached == event->n_recorded; });
    }
    return called();
}

int enqueue(cg_cuda_stream stream, std::function<void()> run, bool copies_out = false)
{
    const int error = called();
    if (error != 0)
        return error;
    CUstream_st::Entry entry{};
    entry.run = std::move(run);
    entry.on_gpu = true;
    entry.copies_out = copies_out;
    own(stream)->put(std::move(entry));
    return 0;
}
int memcpy_async(void *dst, const void *src, size_t n_bytes, cg_cuda_stream stream)
{
    bool from_pageable;
    {
        std::lock_guard<std::mutex> guard(world().lock);
        const Piece *to = piece_of(dst, n_bytes), *from = piece_of(src, n_bytes);
        from_pageable = from == nullptr;
        if (to == nullptr)
            misused("copies to what is neither pinned nor the device's, or beyond its end");
        if (from_pageable && !to->is_device)
            misused("copies between host memory");
    }
    if (!from_pageable)
        return enqueue(stream, [=] { memcpy(dst, src, n_bytes); });
    // Pageable memory is copied aside before the call returns.
    const char *bytes = static_cast<const char *>(src);
    auto aside = std::make_shared<std::vector<char>>(bytes, bytes + n_bytes);
    return enqueue(stream, [=] { memcpy(dst, aside->data(), n_bytes); });
}
int memset_async(void *dev, int value, size_t n_bytes, cg_cuda_stream stream)
{
    return enqueue(stream, [=] { memset(dev, value, n_bytes); });
}
int blocks_copy(const cg_cuda_blocks_copy *given, cg_cuda_stream stream)
{
    const cg_cuda_blocks_copy copy = *given;
    const auto run = [copy] {
        for (uint64_t unit = cg_cuda_blocks_copy_n_units(&copy);
             unit-- > 0;) // no order is promised
            cg_cuda_blocks_copy_unit(&copy, unit);
    };
    return enqueue(stream, run, !copy.is_write);
}
std::atomic<size_t> projected{0}, coded{0};
std::atomic<bool> codes_nothing{false};
int project(const cg_cuda_projection *given, cg_cuda_stream stream)
{
    const cg_cuda_projection projection = *given;
    return enqueue(stream, [projection] { cg_test::emulate_project(projection, ++projected); });
}
int code(const cg_cuda_coding *given, cg_cuda_stream stream)
{
    const cg_cuda_coding coding = *given;
    if (codes_nothing)
        return called();
    return enqueue(stream, [coding] { cg_test::emulate_code(coding, ++coded); });
}
std::atomic<size_t> most_shared{CG_CUDA_SHARED_BYTES};
int prepare(size_t *shared_bytes_out)
{
    *shared_bytes_out = most_shared;
    return called();
}
void set_shared_bytes(size_t n_bytes)
{
    most_shared = n_bytes;
}
std::atomic<size_t> most_jobs{0};
int decode(const cg_cuda_decode_job *given, uint32_t n_jobs, cg_cuda_stream stream)
{
    static std::atomic<uint64_t> seed{1};
    std::vector<cg_cuda_decode_job> jobs(given, given + n_jobs);
    std::vector<cg_cuda_plan> plans;
    for (const cg_cuda_decode_job &job : jobs)
        plans.push_back(*job.plan);
    for (size_t most = most_jobs; most < n_jobs && !most_jobs.compare_exchange_weak(most, n_jobs);)
        ;
    return enqueue(stream, [jobs, plans]() mutable {
        for (size_t i = 0; i < jobs.size(); i++)
            jobs[i].plan = &plans[i];
        cg_test::emulate_decode(jobs, seed++);
    });
}

// ---- control ----

void fail_call(long n, int error, bool sticky)
{
    std::lock_guard<std::mutex> guard(world().lock);
    world().call_countdown = n;
    world().call_error = error;
    world().call_is_sticky = sticky;
}
void refuse_pinned(long n)
{
    std::lock_guard<std::mutex> guard(world().lock);
    world().pinned_countdown = n;
}
void fail_operation(long n)
{
    std::lock_guard<std::mutex> guard(world().lock);
    world().operation_countdown = n;
}
void hang_wait(long n)
{
    World &w = world();
    {
        std::lock_guard<std::mutex> guard(w.lock);
        w.wait_countdown = n;
        w.is_hung = false;
    }
    w.goes_on.notify_all();
}
void hold_copies(bool is_so)
{
    World &w = world();
    {
        std::lock_guard<std::mutex> guard(w.lock);
        w.copies_are_held = is_so;
    }
    w.goes_on.notify_all();
}
bool capture(bool is_so)
{
    std::lock_guard<std::mutex> guard(world().lock);
    world().is_captured = is_so;
    return std::exchange(world().is_disturbed, false);
}
bool hangs()
{
    std::lock_guard<std::mutex> guard(world().lock);
    return world().is_hung;
}
void forget_failures()
{
    World &w = world();
    std::lock_guard<std::mutex> guard(w.lock);
    w.call_countdown = w.operation_countdown = w.pinned_countdown = 0;
    w.sticky = 0;
    w.has_failed = false;
}
bool has_failed()
{
    std::lock_guard<std::mutex> guard(world().lock);
    return world().has_failed;
}
size_t n_live()
{
    World &w = world();
    std::lock_guard<std::mutex> guard(w.lock);
    size_t n = w.streams.size() + w.events.size();
    for (const auto &[address, sized] : w.pieces)
        n += !sized.second.is_engine;
    return n;
}
size_t n_streams()
{
    std::lock_guard<std::mutex> guard(world().lock);
    return world().streams.size();
}
size_t n_allocated()
{
    std::lock_guard<std::mutex> guard(world().lock);
    return world().n_allocated;
}
size_t n_nice_calls()
{
    return nice_calls.exchange(0);
}
size_t n_projected()
{
    return projected;
}
size_t n_coded()
{
    return coded;
}
size_t n_decoded_together()
{
    return most_jobs.exchange(0);
}
void code_nothing(bool is_so)
{
    codes_nothing = is_so;
}
void set_device_count(int n)
{
    world().n_devices = n;
}
uint64_t contexts()
{
    std::lock_guard<std::mutex> guard(world().lock);
    return world().contexts;
}
void forget_contexts()
{
    std::lock_guard<std::mutex> guard(world().lock);
    world().contexts = 0;
}
int engine_device()
{
    return current_device;
}
void engine_set_device(int ordinal)
{
    current_device = ordinal;
}
int engine_last_error()
{
    return get_last_error();
}
void engine_fail(int error)
{
    last_error = error;
}
void *engine_malloc(size_t n_bytes)
{
    return allocate(n_bytes, true, true);
}
void engine_free(void *dev)
{
    release(dev, true, true);
}
void *engine_stream()
{
    return new CUstream_st(true);
}
void engine_stream_destroy(void *stream)
{
    delete static_cast<CUstream_st *>(stream);
}
void *engine_event()
{
    return new CUevent_st;
}
void engine_event_destroy(void *event)
{
    delete static_cast<CUevent_st *>(event);
}
void engine_record(void *event, void *stream)
{
    record(static_cast<CUevent_st *>(event), stream_of(stream));
}
void engine_put(void *stream, std::function<void()> run)
{
    CUstream_st::Entry entry{};
    entry.run = std::move(run);
    entry.on_gpu = entry.is_engine = true;
    stream_of(stream)->put(std::move(entry));
}
void engine_sleep(unsigned ms, void *stream)
{
    CUstream_st::Entry entry{};
    entry.is_engine = true;
    entry.sleep_ms = ms;
    stream_of(stream)->put(std::move(entry));
}
void engine_write(void *dev, const void *src, size_t n_bytes, void *stream)
{
    const char *bytes = static_cast<const char *>(src);
    auto aside = std::make_shared<std::vector<char>>(bytes, bytes + n_bytes);
    engine_put(stream, [=] { memcpy(dev, aside->data(), n_bytes); });
}
void engine_hold(void *stream)
{
    stream_of(stream)->hold(true);
}
void engine_release(void *stream)
{
    stream_of(stream)->hold(false);
}
bool engine_waits(void *stream)
{
    return stream_of(stream)->waits();
}
void engine_read(void *dst, const void *dev, size_t n_bytes, void *stream)
{
    engine_put(stream, [=] { memcpy(dst, dev, n_bytes); });
    stream_of(stream)->drain();
}

const cg_standin CONTROL = {fail_call,
                            refuse_pinned,
                            fail_operation,
                            hang_wait,
                            hangs,
                            hold_copies,
                            forget_failures,
                            has_failed,
                            n_live,
                            n_streams,
                            n_allocated,
                            set_device_count,
                            n_nice_calls,
                            capture,
                            n_projected,
                            n_coded,
                            contexts,
                            forget_contexts,
                            engine_device,
                            engine_set_device,
                            engine_last_error,
                            engine_fail,
                            engine_malloc,
                            engine_free,
                            engine_stream,
                            engine_stream_destroy,
                            engine_event,
                            engine_event_destroy,
                            engine_record,
                            engine_write,
                            engine_sleep,
                            engine_hold,
                            engine_release,
                            engine_waits,
                            engine_read,
                            code_nothing,
                            set_shared_bytes,
                            n_decoded_together};

} // namespace

extern "C" {

const cg_standin *cg_standin_control()
{
    return &CONTROL;
}

const cg_cuda_calls cg_cuda_runtime = {get_device_count,
                                       get_device,
                                       set_device,
                                       relax_capture,
                                       get_error_string,
                                       get_last_error,
                                       device_malloc,
                                       device_free,
                                       host_alloc,
                                       host_free,
                                       stream_create,
                                       stream_destroy,
                                       stream_synchronize,
                                       stream_wait_event,
                                       event_create,
                                       event_destroy,
                                       event_record,
                                       event_query,
                                       event_synchronize,
                                       memcpy_async,
                                       memset_async,
                                       prepare,
                                       decode,
                                       blocks_copy,
                                       project,
                                       code};
}
