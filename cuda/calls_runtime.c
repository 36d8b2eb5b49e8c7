/* cuda/calls.h by the CUDA runtime. */
#include "cuda/calls.h"

#include <cuda_runtime_api.h>

static int get_device_count(int *n_out)
{
    return (int)cudaGetDeviceCount(n_out);
}
static int get_device(int *ordinal_out)
{
    return (int)cudaGetDevice(ordinal_out);
}
static int set_device(int ordinal)
{
    return (int)cudaSetDevice(ordinal);
}
static int relax_capture(void)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    return (int)cudaThreadExchangeStreamCaptureMode(&mode);
}
static const char *get_error_string(int error)
{
    return cudaGetErrorString((cudaError_t)error);
}
static int get_last_error(void)
{
    return (int)cudaGetLastError();
}
static int device_malloc(void **dev_out, size_t n_bytes)
{
    return (int)cudaMalloc(dev_out, n_bytes);
}
static int device_free(void *dev)
{
    return (int)cudaFree(dev);
}
static int host_alloc(void **out, size_t n_bytes)
{
    return (int)cudaHostAlloc(out, n_bytes, cudaHostAllocPortable);
}
static int host_free(void *host)
{
    return (int)cudaFreeHost(host);
}
static int stream_create(cg_cuda_stream *out)
{
    int lowest, highest; /* lowest: 0, a default stream's */
    const cudaError_t error = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
    return (int)(error != cudaSuccess
                     ? error
                     : cudaStreamCreateWithPriority(out, cudaStreamNonBlocking, lowest));
}
static int stream_destroy(cg_cuda_stream stream)
{
    return (int)cudaStreamDestroy(stream);
}
static int stream_synchronize(cg_cuda_stream stream)
{
    return (int)cudaStreamSynchronize(stream);
}
static int stream_wait_event(cg_cuda_stream stream, cg_cuda_event event)
{
    return (int)cudaStreamWaitEvent(stream, event, 0);
}
static int event_create(cg_cuda_event *out)
{
    return (int)cudaEventCreateWithFlags(out, cudaEventDisableTiming | cudaEventBlockingSync);
}
static int event_destroy(cg_cuda_event event)
{
    return (int)cudaEventDestroy(event);
}
static int event_record(cg_cuda_event event, cg_cuda_stream stream)
{
    return (int)cudaEventRecord(event, stream);
}
static int event_query(cg_cuda_event event)
{
    return (int)cudaEventQuery(event);
}
static int event_synchronize(cg_cuda_event event)
{
    return (int)cudaEventSynchronize(event);
}
static int memcpy_async(void *dst, const void *src, size_t n_bytes, cg_cuda_stream stream)
{
    return (int)cudaMemcpyAsync(dst, src, n_bytes, cudaMemcpyDefault, stream);
}
static int memset_async(void *dev, int value, size_t n_bytes, cg_cuda_stream stream)
{
    return (int)cudaMemsetAsync(dev, value, n_bytes, stream);
}

static int prepare(size_t *shared_bytes_out)
{
    int error = cg_cuda_shared_limit(shared_bytes_out);
    if (error == 0)
        error = cg_cuda_decode_prepare();
    if (error == 0)
        error = cg_cuda_project_prepare();
    if (error == 0)
        error = cg_cuda_code_prepare();
    return error != 0 ? error : cg_cuda_blocks_copy_prepare();
}

const cg_cuda_calls cg_cuda_runtime = {.get_device_count = get_device_count,
                                       .get_device = get_device,
                                       .set_device = set_device,
                                       .relax_capture = relax_capture,
                                       .get_error_string = get_error_string,
                                       .get_last_error = get_last_error,
                                       .malloc = device_malloc,
                                       .free = device_free,
                                       .host_alloc = host_alloc,
                                       .host_free = host_free,
                                       .stream_create = stream_create,
                                       .stream_destroy = stream_destroy,
                                       .stream_synchronize = stream_synchronize,
                                       .stream_wait_event = stream_wait_event,
                                       .event_create = event_create,
                                       .event_destroy = event_destroy,
                                       .event_record = event_record,
                                       .event_query = event_query,
                                       .event_synchronize = event_synchronize,
                                       .memcpy_async = memcpy_async,
                                       .memset_async = memset_async,
                                       .prepare = prepare,
                                       .decode = cg_cuda_decode,
                                       .blocks_copy = cg_cuda_blocks_copy_launch,
                                       .project = cg_cuda_project,
                                       .code = cg_cuda_code};
