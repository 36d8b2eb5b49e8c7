/* cuda/calls.h - the CUDA functions that the host side calls, in a table, so that tests can put
 * others in their place on machines without a GPU.
 *
 * Names, arguments and results are those of the CUDA runtime, without its prefix; results are
 * cudaError_t, 0 is success. Streams have the lowest priority. That is 0, which the default stream
 * and most streams of engines have, too: a GPU prefers neither them nor ours. They do not
 * synchronize with the default stream. Events let a waiting thread sleep, and keep no time. Pinned
 * memory is host memory that a GPU can reach.
 *
 * Threads: the table is constant; its functions may be called by any thread.
 */
#ifndef CG_CUDA_CALLS_H
#define CG_CUDA_CALLS_H
#include "cuda/blocks_copy.h"
#include "cuda/coding.h"
#include "cuda/decode.h"
#include "cuda/project.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *cg_cuda_stream;
typedef struct CUevent_st *cg_cuda_event;

enum { CG_CUDA_NOT_READY = 600 }; /* cudaErrorNotReady */

typedef struct cg_cuda_calls {
    int (*get_device_count)(int *n_out);
    int (*get_device)(int *ordinal_out);
    int (*set_device)(int ordinal);
    /* cudaThreadExchangeStreamCaptureMode(): the thread's calls disturb no stream that another
     * thread captures. */
    int (*relax_capture)(void);
    const char *(*get_error_string)(int error);
    int (*get_last_error)(
        void); /* returns the last error and clears it: the engine must not meet ours */

    int (*malloc)(void **dev_out, size_t n_bytes);
    int (*free)(void *dev);
    int (*host_alloc)(void **out, size_t n_bytes); /* pinned; kernels may use the address */
    int (*host_free)(void *host);

    int (*stream_create)(cg_cuda_stream *out);
    int (*stream_destroy)(cg_cuda_stream stream);
    int (*stream_synchronize)(cg_cuda_stream stream);
    int (*stream_wait_event)(cg_cuda_stream stream, cg_cuda_event event);
    int (*event_create)(cg_cuda_event *out);
    int (*event_destroy)(cg_cuda_event event);
    int (*event_record)(cg_cuda_event event, cg_cuda_stream stream);
    int (*event_query)(cg_cuda_event event);
    int (*event_synchronize)(cg_cuda_event event);

    int (*memcpy_async)(void *dst, const void *src, size_t n_bytes, cg_cuda_stream stream);
    int (*memset_async)(void *dev, int value, size_t n_bytes, cg_cuda_stream stream);

    /* Kernels: cuda/decode.h, cuda/blocks_copy.h, cuda/project.h and cuda/coding.h. */
    int (*prepare)(size_t *shared_bytes_out); /* cg_cuda_shared_limit()'s */
    int (*decode)(const cg_cuda_decode_job *jobs, uint32_t n_jobs, cg_cuda_stream stream);
    int (*blocks_copy)(const cg_cuda_blocks_copy *copy, cg_cuda_stream stream);
    int (*project)(const cg_cuda_projection *projection, cg_cuda_stream stream);
    int (*code)(const cg_cuda_coding *coding, cg_cuda_stream stream);
} cg_cuda_calls;

/* The CUDA runtime's, or the tests'. */
extern const cg_cuda_calls cg_cuda_runtime;

#ifdef __cplusplus
}
#endif
#endif
