// tests/cuda/standin.h - what stands for the CUDA runtime where there is no GPU: streams with
// threads of their own, memory that only they may touch, and calls that fail on demand.
//
// It is linked into libcachegen_cuda_standin.so in the place of cuda/calls_runtime.c, together with
// all of the host side. Tests open that library as the connector does, and reach in by one symbol.
// Rules that it enforces, with a message and abort():
//  - device memory is inaccessible but while an operation of a stream runs, one at a time, and ends
//    at a guard page; copies stay within one allocation;
//  - a stream that the host side did not make is neither synchronized nor worked on by it: events
//    may be recorded there, and it may be told to wait;
//  - nothing is freed or destroyed that is still used.
// What a real GPU does and this does not: time, several operations at once, caches.
#ifndef CG_TESTS_CUDA_STANDIN_H
#define CG_TESTS_CUDA_STANDIN_H
#include <cstddef>
#include <cstdint>

struct cg_standin {
    // From now on the n-th call from here on fails with `error` (n from 1; 0: none). sticky: so do
    // all calls after it, and streams drop what they have.
    void (*fail_call)(long n, int error, bool sticky);
    // The n-th piece of pinned memory from here on is refused, as CUDA refuses it: no other call
    // fails.
    void (*refuse_pinned)(long n);
    // The n-th operation that a stream is to run from here on fails, as a kernel would with an
    // illegal address: sticky.
    void (*fail_operation)(long n);
    // From the n-th call from here on that waits for a stream or an event, such calls don't return:
    // the GPU hangs. 0: they return.
    void (*hang_wait)(long n);
    bool (*hangs)();
    // Copies out of blocks begin no more, until it is called with false.
    void (*hold_copies)(bool is_so);
    void (*forget_failures)();
    bool (*has_failed)(); // since forget_failures()

    size_t (*n_live)();      // allocations, streams and events of the host side
    size_t (*n_streams)();   // of these
    size_t (*n_allocated)(); // allocations and streams that the host side ever made
    void (*set_device_count)(int n);

    // Calls of the host side by threads that are less important than the process's first one, since
    // this was asked. CUDA's locks are the engine's, too.
    size_t (*n_nice_calls)();

    // An engine's thread captures a graph, until this is called with false. Calls of threads that
    // have not relaxed their mode fail meanwhile; returns whether there were any.
    bool (*capture)(bool is_so);

    size_t (*n_projected)(); // tasks of encoders, ever
    size_t (*n_coded)();     // of these, tasks whose symbols kernels have coded

    // Bit n: the host side made a context on device n since forget_contexts(), which on a real GPU
    // takes hundreds of MiB for good.
    uint64_t (*contexts)();
    void (*forget_contexts)();

    // The engine's side. Its calls never fail, and its operations run even after an error.
    int (*engine_device)(); // the calling thread's
    void (*engine_set_device)(int ordinal);
    int (*engine_last_error)(); // takes it
    void (*engine_fail)(int error);
    void *(*engine_malloc)(size_t n_bytes);
    void (*engine_free)(void *dev);
    void *(*engine_stream)();
    void (*engine_stream_destroy)(void *stream);
    void *(*engine_event)();
    void (*engine_event_destroy)(void *event);
    void (*engine_record)(void *event, void *stream);
    // Enqueue; src is copied at once. NULL is the default stream.
    void (*engine_write)(void *dev, const void *src, size_t n_bytes, void *stream);
    void (*engine_sleep)(unsigned ms, void *stream); // work that takes so long
    void (*engine_hold)(void *stream);               // the stream runs nothing more
    void (*engine_release)(void *stream);            // until now
    // Until the stream has run what it has, or stands still behind an event: whether it does.
    bool (*engine_waits)(void *stream);
    // Waits for the stream, then copies.
    void (*engine_read)(void *dst, const void *dev, size_t n_bytes, void *stream);

    void (*code_nothing)(bool is_so);         // kernels that code report success and write nothing
    void (*set_shared_bytes)(size_t n_bytes); // that a thread block may take, of devices opened
    size_t (*n_decoded_together)();           // chunks of the largest batch since this was asked
};
extern "C" const cg_standin *cg_standin_control();
#endif
