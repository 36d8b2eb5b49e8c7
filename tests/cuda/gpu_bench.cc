// How fast the kernels are, from bytes in device memory to blocks written, and from K and V there
// to symbols; prints JSON.
//
// usage: gpu_bench [quick]
//        gpu_bench PROFILE CHUNK ...
//
// Without files, caches and profiles are synthetic (tests/codec/profile_maker.h): what decoding
// takes depends on how many components a level holds and how many symbols are not zero, so both are
// printed, and no such figure is one of a real model. With files, of a real profile and chunks of
// one geometry, only decoding is measured, at each level that the chunks hold. Of each figure: the
// median, least and most of the repetitions; baseline and candidate in turn. "Beside" a product
// chunks are decoded as fast as can be; "beside 1 GB/s" as many bytes of chunks as that is, for
// each of some products in a row. The product has the greatest priority of streams, and once more
// priority 0, which a connector's streams have, and an engine's unless it asks for another. From
// pinned memory each chunk and its plan are copied first. "One by one" is a batch a chunk, on many
// streams; batches of more are on as many streams as a connector has batches. Exit status: 1 also
// where a chunk was not decoded, or not to what the CPU decodes ("is_right"); "status" says why
// (codec/status.h), and the figures go on.
#include "codec/profile_data.h"
#include "cuda/project.h"
#include "device.h"
#include "gpu_memory.h"

#include <fstream>

#ifdef CG_HAS_CUBLAS
#include <cublas_v2.h>
#endif

namespace
{

using namespace cg_test;

const int REPETITIONS = 15, N_STREAMS = 32, N_PRODUCTS = 16;
const size_t BATCHES[] = {1, 4, 8, 16, 32}; // chunks of a batch
const size_t N_BATCH_STREAMS = 4;           // CG_DEVICE_BATCHES, in a header that C++ cannot read

struct Timer {
    cudaEvent_t begin, end;
    Timer()
    {
        require(cudaEventCreate(&begin), "event");
        require(cudaEventCreate(&end), "event");
    }
    ~Timer()
    {
        (void)cudaEventDestroy(begin);
        (void)cudaEventDestroy(end);
    }
    template <class Work> double seconds(cudaStream_t stream, const Work &work)
    {
        require(cudaEventRecord(begin, stream), "record");
        work();
        require(cudaEventRecord(end, stream), "record");
        require(cudaEventSynchronize(end), "kernels");
        float ms;
        require(cudaEventElapsedTime(&ms, begin, end), "time");
        return ms * 1e-3;
    }
};

// A large matrix product, to be decoded beside. Not where cuBLAS is missing.
class Product
{
  public:
#ifdef CG_HAS_CUBLAS
    static const bool IS_THERE = true;
    explicit Product(bool is_preferred)
    {
        int least, greatest;
        require(cudaDeviceGetStreamPriorityRange(&least, &greatest), "priorities");
        require(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                             is_preferred ? greatest : 0),
                "stream");
        if (cublasCreate(&cublas) != CUBLAS_STATUS_SUCCESS ||
            cublasSetStream(cublas, stream) != CUBLAS_STATUS_SUCCESS)
            throw std::runtime_error("cublas");
    }
    ~Product()
    {
        (void)cublasDestroy(cublas);
        (void)cudaStreamDestroy(stream);
    }
    void multiply() const
    {
        const float unit = 1, zero = 0;
        if (cublasGemmEx(cublas, CUBLAS_OP_N, CUBLAS_OP_N, N, N, N, &unit, a.data(), CUDA_R_16BF, N,
                         b.data(), CUDA_R_16BF, N, &zero, d.data(), CUDA_R_16BF, N,
                         CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT) != CUBLAS_STATUS_SUCCESS)
            throw std::runtime_error("cublas");
    }
    cudaStream_t stream;

  private:
    static const int N = 8192;
    const GpuMemory a{size_t{2} * N * N}, b{size_t{2} * N * N}, d{size_t{2} * N * N};
    cublasHandle_t cublas;
#else
    static const bool IS_THERE = false;
    explicit Product(bool)
    {
    }
    void multiply() const
    {
    }
    cudaStream_t stream = nullptr;
#endif
};

struct Products {
    const Product preferred{true}, equal{false};
};

void print_spread(const char *name, std::vector<double> values, const char *end)
{
    std::sort(values.begin(), values.end());
    printf("    \"%s\": {\"median\": %.4g, \"least\": %.4g, \"most\": %.4g}%s\n", name,
           values[values.size() / 2], values.front(), values.back(), end);
}

// A chunk on the device, as many times as are in flight.
struct Loaded {
    std::unique_ptr<GpuMemory> chunk, plan, scratch, status, piece, base, table;
    std::unique_ptr<PinnedMemory> pinned; // the chunk, then the plan
    size_t chunk_bytes = 0;
    cg_cuda_plan planned = {};
    cg_cuda_decode_params params = {};
};

Blocks blocks_of(const cg_chunk_header &header)
{
    BlockSpec spec;
    spec.order = Order::PLANE_BLOCK_TOKEN_HEAD;
    return make_blocks(spec, header.geometry, header.n_tokens);
}

Loaded load(const cg_cuda_profile *laid, const GpuMemory *blob, const Bytes &chunk)
{
    Loaded out;
    cg_chunk_header header;
    if (cg_chunk_header_parse(chunk.data(), chunk.size(), &header) != CG_OK)
        throw std::runtime_error("header");
    size_t plan_bytes, scratch_bytes;
    cg_cuda_plan_bound(laid, &header.geometry, header.n_tokens, &plan_bytes, &scratch_bytes);
    Bytes plan(plan_bytes);
    const cg_cuda_request request = cg_cuda_request_all(laid, &header);
    if (cg_cuda_plan_fill(laid, chunk.data(), chunk.size(), &request, plan.data(), plan.size(),
                          &out.planned) != CG_OK)
        throw std::runtime_error("plan");
    const Blocks blocks = blocks_of(header);
    const uint32_t none = 0;
    out.chunk = std::make_unique<GpuMemory>(chunk.data(), chunk.size());
    out.plan = std::make_unique<GpuMemory>(plan.data(), out.planned.plan_bytes);
    out.chunk_bytes = chunk.size();
    out.pinned = std::make_unique<PinnedMemory>(chunk.size() + out.planned.plan_bytes);
    memcpy(out.pinned->data(), chunk.data(), chunk.size());
    memcpy(out.pinned->data() + chunk.size(), plan.data(), out.planned.plan_bytes);
    out.scratch = std::make_unique<GpuMemory>(out.planned.scratch_bytes);
    out.status = std::make_unique<GpuMemory>(&none, sizeof none);
    out.piece = std::make_unique<GpuMemory>(blocks.n_bytes);
    require(cudaMemset(out.piece->data(), 0, blocks.n_bytes), "fill");
    std::vector<void *> base;
    for (const size_t at : blocks.base)
        base.push_back(out.piece->data() + at);
    out.base = std::make_unique<GpuMemory>(base.data(), base.size() * sizeof(void *));
    out.table =
        std::make_unique<GpuMemory>(blocks.table.data(), blocks.table.size() * sizeof(int64_t));
    out.params.blob_dev = blob != nullptr ? blob->data() : nullptr;
    out.params.plan_dev = out.plan->data();
    out.params.chunk_dev = out.chunk->data();
    out.params.scratch_dev = out.scratch->data();
    out.params.status_dev = reinterpret_cast<uint32_t *>(out.status->data());
    out.params.blocks = blocks.layout;
    out.params.blocks.base_dev = reinterpret_cast<void *const *>(out.base->data());
    out.params.blocks.table_dev = reinterpret_cast<const int64_t *>(out.table->data());
    return out;
}

void decode_together(const std::vector<Loaded> &chunks, size_t first, size_t n, cudaStream_t stream)
{
    cg_cuda_decode_job jobs[CG_CUDA_MAX_JOBS];
    for (size_t i = 0; i < n; i++)
        jobs[i] = {&chunks[first + i].planned, chunks[first + i].params};
    require(cg_cuda_decode(jobs, static_cast<uint32_t>(n), stream), "decode");
}

void decode(const Loaded &chunk, cudaStream_t stream)
{
    const cg_cuda_decode_job job = {&chunk.planned, chunk.params};
    require(cg_cuda_decode(&job, 1, stream), "decode");
}

void upload(const Loaded &chunk, cudaStream_t stream)
{
    const uint8_t *const from = chunk.pinned->data();
    require(cudaMemcpyAsync(chunk.chunk->data(), from, chunk.chunk_bytes, cudaMemcpyHostToDevice,
                            stream),
            "copy");
    require(cudaMemcpyAsync(chunk.plan->data(), from + chunk.chunk_bytes, chunk.planned.plan_bytes,
                            cudaMemcpyHostToDevice, stream),
            "copy");
}

// work(i, stream) for i below n, dealt out to streams; begins and ends on the first.
template <class Work>
void deal(size_t n, const std::vector<cudaStream_t> &streams, cudaEvent_t event, const Work &work)
{
    require(cudaEventRecord(event, streams[0]), "record");
    for (const cudaStream_t stream : streams)
        require(cudaStreamWaitEvent(stream, event, 0), "wait");
    for (size_t i = 0; i < n; i++)
        work(i, streams[i % streams.size()]);
    for (const cudaStream_t stream : streams) {
        require(cudaEventRecord(event, stream), "record");
        require(cudaStreamWaitEvent(streams[0], event, 0), "wait");
    }
}

// work(chunk, stream) for all chunks.
template <class Work>
void for_all(const std::vector<Loaded> &chunks, const std::vector<cudaStream_t> &streams,
             cudaEvent_t event, const Work &work)
{
    deal(chunks.size(), streams, event,
         [&](size_t i, cudaStream_t stream) { work(chunks[i], stream); });
}

// All chunks in batches of so many.
void decode_in_batches(const std::vector<Loaded> &chunks, size_t n_jobs,
                       const std::vector<cudaStream_t> &streams, cudaEvent_t event)
{
    deal((chunks.size() + n_jobs - 1) / n_jobs, streams, event, [&](size_t i, cudaStream_t stream) {
        const size_t first = i * n_jobs;
        decode_together(chunks, first, std::min(n_jobs, chunks.size() - first), stream);
    });
}

// Products in a row, and with each the decoding of so many chunks, which begins when it begins.
void multiply_beside(const Product &product, double n_chunks, const std::vector<Loaded> &chunks,
                     const std::vector<cudaStream_t> &streams, cudaEvent_t event)
{
    size_t n_begun = 0;
    for (int i = 0; i < N_PRODUCTS; i++) {
        require(cudaEventRecord(event, product.stream), "record");
        product.multiply();
        for (; static_cast<double>(n_begun) < n_chunks * (i + 1); n_begun++) {
            const cudaStream_t stream = streams[n_begun % streams.size()];
            require(cudaStreamWaitEvent(stream, event, 0), "wait");
            decode(chunks[n_begun % chunks.size()], stream);
        }
    }
}

// How long products take beside decoding, as a multiple of their time alone.
struct Beside {
    double flat_out, paced;
};

Beside decode_beside(const Product &product, double n_chunks, const std::vector<Loaded> &chunks,
                     const std::vector<cudaStream_t> &streams, cudaEvent_t event, double alone,
                     Timer *timer)
{
    Beside out = {};
    out.flat_out = timer->seconds(product.stream, [&] {
        product.multiply();
        for_all(chunks, streams, event, decode);
    }) / alone;
    require(cudaDeviceSynchronize(), "kernels");
    const double row = timer->seconds(product.stream,
                                      [&] { multiply_beside(product, 0, chunks, streams, event); });
    out.paced = timer->seconds(product.stream, [&] {
        multiply_beside(product, n_chunks, chunks, streams, event);
    }) / row;
    require(cudaDeviceSynchronize(), "kernels");
    return out;
}

struct Case {
    const char *name;
    bool is_paper;
    cg_level level, coarsest;
    uint16_t n_layers, n_kv_heads, head_dim, group_layers;
    size_t n_chunks;
    size_t n_shared = 0;    // with a joint matrix
    bool is_scaled = false; // blocks with steps of their own: all seven scales, the most runs
};

const char *const KINDS[] = {"start", "symbols", "joint", "klt", "anchors", "deltas", "exponents"};

ProfileSpec spec_of(const Case &c)
{
    ProfileSpec spec = c.is_paper ? paper_spec() : spec_2(true);
    spec.version = 2;
    spec.n_layers = c.n_layers;
    spec.n_kv_heads = c.n_kv_heads;
    spec.head_dim = c.head_dim;
    spec.rotary_dim = c.is_paper ? 0 : c.head_dim;
    spec.group_layers.assign(c.n_layers / c.group_layers, c.group_layers);
    spec.all_active = false;
    spec.nests = !c.is_paper;
    spec.n_sinks = 0;
    if (c.n_shared > 0)
        spec = c.is_scaled ? spec_4(spec, c.n_shared) : spec_3(spec, c.n_shared);
    for (auto &level : spec.step)
        for (float &step : level)
            step *= 16; /* so that most symbols are small, as those of real caches */
    return spec;
}

// What is decoded: chunks of one geometry. More than there are chunks are in flight.
struct Subject {
    std::string name;
    const cg_profile *profile;
    const cg_cuda_profile *laid; // NULL: L0
    const GpuMemory *blob;
    std::vector<Bytes> chunks;
    size_t n_in_flight;
};

// The first status of the chunks' that is not CG_OK.
uint32_t status_of(const std::vector<Loaded> &chunks)
{
    uint32_t status = CG_OK;
    for (size_t i = 0; i < chunks.size() && status == CG_OK; i++)
        require(
            cudaMemcpy(&status, chunks[i].params.status_dev, sizeof status, cudaMemcpyDeviceToHost),
            "copy");
    return status;
}

// Whether in all chunks' blocks there is what the CPU decodes.
bool is_right(const Subject &subject, const std::vector<Loaded> &chunks)
{
    for (size_t k = 0; k < subject.chunks.size(); k++) {
        cg_chunk_header header;
        if (cg_chunk_header_parse(subject.chunks[k].data(), subject.chunks[k].size(), &header) !=
            CG_OK)
            return false;
        const Blocks blocks = blocks_of(header);
        cg_cuda_request all = {};
        all.token_to = header.n_tokens;
        all.head_to = header.geometry.n_kv_heads;
        Bytes elements, found(blocks.n_bytes), wanted(blocks.n_bytes, 0);
        if (cg_test::decode(subject.profile, subject.chunks[k], &elements) != CG_OK)
            return false;
        place(elements, header.geometry, header.n_tokens, 0, header.geometry.n_layers, all, blocks,
              wanted.data());
        for (size_t i = k; i < chunks.size(); i += subject.chunks.size()) {
            require(cudaMemcpy(found.data(), chunks[i].piece->data(), found.size(),
                               cudaMemcpyDeviceToHost),
                    "copy");
            if (found != wanted)
                return false;
        }
    }
    return true;
}

// False: a chunk was not decoded.
bool measure(const Subject &subject, const Products &products,
             const std::vector<cudaStream_t> &streams, bool is_last)
{
    std::vector<Loaded> chunks;
    double coded_bytes = 0;
    for (size_t i = 0; i < subject.n_in_flight; i++) {
        const Bytes &chunk = subject.chunks[i % subject.chunks.size()];
        chunks.push_back(load(subject.laid, subject.blob, chunk));
        coded_bytes += static_cast<double>(chunk.size());
    }
    cg_chunk_header header;
    if (cg_chunk_header_parse(subject.chunks[0].data(), subject.chunks[0].size(), &header) != CG_OK)
        throw std::runtime_error("header");
    const cg_geometry &g = header.geometry;
    const uint32_t n_tokens = header.n_tokens;
    const double out_bytes = static_cast<double>(cg_dtype_bytes(g.dtype)) *
                             static_cast<double>(cg_geometry_elements(&g, n_tokens));
    const double all_bytes = out_bytes * static_cast<double>(chunks.size());
    const GpuMemory copy(static_cast<size_t>(out_bytes)), copied(static_cast<size_t>(out_bytes));

    Timer timer;
    cudaEvent_t event;
    require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
    const std::vector<cudaStream_t> few(streams.begin(), streams.begin() + N_BATCH_STREAMS);
    std::vector<std::vector<double>> batch_us(std::size(BATCHES)), batches(std::size(BATCHES));
    std::vector<double> one, many, memcpys, alone, uploads, pinned;
    std::vector<double> beside, paced, equal_beside, equal_paced;
    std::vector<std::vector<double>> passes(chunks[0].planned.n_passes);
    for (int i = 0; i < REPETITIONS + 3; i++) { /* the first three warm up */
        const double t_one = timer.seconds(streams[0], [&] { decode(chunks[0], streams[0]); });
        const double t_many =
            timer.seconds(streams[0], [&] { for_all(chunks, streams, event, decode); });
        double t_batch[std::size(BATCHES)], t_batches[std::size(BATCHES)];
        for (size_t k = 0; k < std::size(BATCHES); k++) {
            t_batch[k] = timer.seconds(streams[0], [&] {
                decode_together(chunks, 0, std::min(BATCHES[k], chunks.size()), streams[0]);
            });
            t_batches[k] = timer.seconds(
                streams[0], [&] { decode_in_batches(chunks, BATCHES[k], few, event); });
        }
        const double t_uploads =
            timer.seconds(streams[0], [&] { for_all(chunks, streams, event, upload); });
        const double t_pinned = timer.seconds(streams[0], [&] {
            for_all(chunks, streams, event, [](const Loaded &chunk, cudaStream_t stream) {
                upload(chunk, stream);
                decode(chunk, stream);
            });
        });
        const double t_copy = timer.seconds(streams[0], [&] {
            require(cudaMemcpyAsync(copied.data(), copy.data(), static_cast<size_t>(out_bytes),
                                    cudaMemcpyDeviceToDevice, streams[0]),
                    "copy");
        });
        double t_alone = 0;
        Beside preferred = {}, equal = {};
        if (Product::IS_THERE) {
            const Product &product = products.preferred;
            t_alone = timer.seconds(product.stream, [&] { product.multiply(); });
            const double n_chunks =
                1e9 * t_alone / (coded_bytes / static_cast<double>(chunks.size()));
            preferred = decode_beside(product, n_chunks, chunks, streams, event, t_alone, &timer);
            equal =
                decode_beside(products.equal, n_chunks, chunks, streams, event, t_alone, &timer);
        }
        require(cudaDeviceSynchronize(), "kernels");
        if (i < 3)
            continue;
        one.push_back(t_one * 1e6);
        many.push_back(all_bytes / t_many * 1e-9);
        for (size_t k = 0; k < std::size(BATCHES); k++) {
            batch_us[k].push_back(t_batch[k] * 1e6);
            batches[k].push_back(all_bytes / t_batches[k] * 1e-9);
        }
        memcpys.push_back(out_bytes / t_copy * 1e-9);
        alone.push_back(t_alone * 1e3);
        beside.push_back(preferred.flat_out);
        paced.push_back(preferred.paced);
        equal_beside.push_back(equal.flat_out);
        equal_paced.push_back(equal.paced);
        uploads.push_back(coded_bytes / t_uploads * 1e-9);
        pinned.push_back(all_bytes / t_pinned * 1e-9);
        for (uint32_t k = 0; k < chunks[0].planned.n_passes; k++) {
            cg_cuda_plan plan = chunks[0].planned;
            plan.n_passes = 1;
            plan.passes[0] = chunks[0].planned.passes[k];
            passes[k].push_back(1e6 * timer.seconds(streams[0], [&] {
                const cg_cuda_decode_job job = {&plan, chunks[0].params};
                require(cg_cuda_decode(&job, 1, streams[0]), "pass");
            }));
        }
    }
    const uint32_t status = status_of(chunks);
    const bool right = status == CG_OK && is_right(subject, chunks);
    printf("   {\"case\": \"%s\", \"layers\": %d, \"kv_heads\": %d, \"head_dim\": %d, "
           "\"tokens\": %u, \"chunk_bytes\": %.0f, \"bits_per_element\": %.3f, \"chunks\": %zu, "
           "\"streams\": %zu, \"status\": %u, \"is_right\": %s,\n",
           subject.name.c_str(), g.n_layers, g.n_kv_heads, g.head_dim, n_tokens,
           coded_bytes / static_cast<double>(chunks.size()),
           8.0 * static_cast<double>(cg_dtype_bytes(g.dtype)) * coded_bytes / all_bytes,
           chunks.size(), streams.size(), status, right ? "true" : "false");
    print_spread("one_chunk_us", one, ",");
    print_spread("decode_GBps", many, ",");
    for (size_t k = 0; k < std::size(BATCHES); k++) {
        const std::string of = "_of_" + std::to_string(BATCHES[k]) + "_";
        print_spread(("one_batch" + of + "us").c_str(), batch_us[k], ",");
        print_spread(("batches" + of + "GBps").c_str(), batches[k], ",");
    }
    print_spread("from_pinned_memory_GBps", pinned, ",");
    print_spread("copies_of_coded_bytes_GBps", uploads, ",");
    print_spread("memcpy_device_GBps", memcpys, ",");
    for (size_t k = 0; k < passes.size(); k++)
        print_spread((std::string("pass_") + std::to_string(k) + "_" +
                      KINDS[chunks[0].planned.passes[k].kind] + "_us")
                         .c_str(),
                     passes[k], ",");
    if (Product::IS_THERE) {
        print_spread("matrix_product_8192_ms", alone, ",");
        print_spread("matrix_product_beside_decoding_over_alone", beside, ",");
        print_spread("matrix_products_beside_1_GBps_over_alone", paced, ",");
        print_spread("of_priority_0_matrix_product_beside_decoding_over_alone", equal_beside, ",");
        print_spread("of_priority_0_matrix_products_beside_1_GBps_over_alone", equal_paced, "");
    } else {
        printf("    \"matrix_product\": \"not run: built without cuBLAS\"\n");
    }
    printf("   }%s\n", is_last ? "" : ",");
    (void)cudaEventDestroy(event);
    return right;
}

bool measure_case(const Case &c, const Products &products, const std::vector<cudaStream_t> &streams)
{
    const ProfileSpec spec = spec_of(c);
    const Profile profile = make_profile(spec);
    const Laid laid(profile.get());
    const GpuMemory blob(laid.blob.data(), laid.blob.size());
    const uint32_t n_tokens = 256;
    const cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, 0, n_tokens);
    Bytes chunk;
    const auto tokens = make_tokens(n_tokens, 1);
    const Bytes elements = make_elements(header, 1);
    const cg_status status =
        c.is_scaled
            ? encode_scaled(profile.get(), header, tokens, elements, draw_scales(n_tokens, 1),
                            c.level, &chunk, c.coarsest)
            : encode(profile.get(), header, tokens, elements, c.level, &chunk, 8, c.coarsest);
    if (status != CG_OK)
        throw std::runtime_error("encode");
    return measure({c.name,
                    profile.get(),
                    c.level != CG_L0 ? laid.profile : nullptr,
                    &blob,
                    {chunk},
                    c.n_chunks},
                   products, streams, false);
}

Bytes read_file(const std::string &path)
{
    std::ifstream in(path, std::ios::binary);
    Bytes bytes{std::istreambuf_iterator<char>(in), {}};
    if (bytes.empty())
        throw std::runtime_error(path + " cannot be read");
    return bytes;
}

// The files of a profile and of chunks: each level that all chunks hold.
bool measure_files(const std::vector<std::string> &paths, const Products &products,
                   const std::vector<cudaStream_t> &streams)
{
    const Bytes profile_bytes = read_file(paths[0]);
    const Profile profile = open_profile(profile_bytes);
    const Laid laid(profile.get());
    const GpuMemory blob(laid.blob.data(), laid.blob.size());
    std::vector<Subject> subjects;
    for (unsigned level = 0; level < CG_N_LEVELS; level++) {
        Subject subject = {"L" + std::to_string(level),
                           profile.get(),
                           level > 0 ? laid.profile : nullptr,
                           &blob,
                           {},
                           std::max<size_t>(2 * N_STREAMS, paths.size() - 1)};
        for (size_t i = 1; i < paths.size(); i++) {
            Bytes chunk = read_file(paths[i]);
            cg_chunk_header header;
            if (cg_chunk_header_parse(chunk.data(), chunk.size(), &header) != CG_OK)
                throw std::runtime_error(paths[i] + " is no chunk");
            if (!cg_chunk_holds(&header, level))
                continue;
            chunk.resize(header.level_bytes[level]);
            subject.chunks.push_back(chunk);
        }
        if (!subject.chunks.empty())
            subjects.push_back(subject);
    }
    bool is_decoded = true;
    for (size_t i = 0; i < subjects.size(); i++)
        is_decoded &= measure(subjects[i], products, streams, i + 1 == subjects.size());
    return is_decoded;
}

// ---- an encoder's projections ----

// A task at L1, on the GPU: its elements or, of the joint matrix, rows; and what becomes of them.
struct Projecting {
    std::unique_ptr<GpuMemory> elements, places, first, rows, coefs, made, scratch;
    std::unique_ptr<PinnedMemory> sections;
    cg_cuda_projection planned = {};
    cg_cuda_coding coding = {}; // of L1 to L3, nested
};

// Adds what codes the task's symbols, at their place.
void make_coding(const cg_cuda_profile *laid, const GpuMemory &blob, const cg_projection &what,
                 Projecting *task)
{
    size_t scratch_bytes, out_bytes;
    cg_cuda_coding_bound(laid, what.n_tokens, &scratch_bytes, &out_bytes);
    task->scratch = std::make_unique<GpuMemory>(scratch_bytes);
    task->sections = std::make_unique<PinnedMemory>(out_bytes);
    const cg_cuda_coding_memory memory = {
        blob.data(),   task->planned.cells_dev, task->scratch->data(),
        scratch_bytes, task->sections->data(),  out_bytes};
    if (cg_cuda_coding_of(laid, &what, &memory, &task->coding) != CG_OK)
        throw std::runtime_error("coding");
}

Projecting make_projecting(const cg_profile *p, uint32_t basis, uint32_t n_tokens,
                           const cg_block_order &order, const GpuMemory &bases,
                           const cg_cuda_profile *laid, const GpuMemory &blob)
{
    const cg_group &group = p->groups[basis / p->n_matrices];
    const uint32_t matrix = basis % p->n_matrices;
    const cg_bands &bands = group.bands[matrix];
    const uint32_t n_rows = order.n_blocks;
    const bool is_joint = basis == p->n_groups * p->n_matrices;
    Random random(basis + 1);
    std::vector<uint16_t> elements(is_joint ? 0 : size_t{n_tokens} * bands.n_channels);
    for (uint16_t &element : elements)
        element = cg_bf16_from_f32(float(random.normal()));
    cg_projection what = {};
    what.basis = basis;
    what.n_rows = n_rows;
    what.elements = is_joint ? nullptr : elements.data();
    what.dtype = CG_DTYPE_BF16;
    what.n_tokens = n_tokens;
    what.order = &order;
    what.row_stride = cg_projection_stride(bands.n_channels);
    what.n_shared = bands.n_shared;
    what.step = p->step[0][CG_K];
    what.level_mask = 1 << CG_L1 | 1 << CG_L2 | 1 << CG_L3;
    what.stream_percent = CG_RANS_STREAM_PERCENT;
    for (unsigned f = 0; f < CG_DCT; f++) {
        const uint32_t own = group.columns[0][matrix].n_active[f];
        for (unsigned level = 0; level < CG_N_LOSSY && bands.n_shared > 0; level++)
            what.n_given[f] = std::max(what.n_given[f], uint32_t{p->n_given[level][f]});
        what.n_components[f] = own > 0 ? bands.n_shared + own : what.n_given[f];
    }
    const size_t n_floats = size_t{CG_DCT} * n_rows * what.row_stride;
    std::vector<float> rows(n_floats);
    for (size_t i = 0; i < n_floats; i++)
        rows[i] = i % what.row_stride < bands.n_channels ? float(random.normal()) : 0;
    const cg_cuda_made made = cg_cuda_projection_made(&what);
    const size_t n_coefs = cg_cuda_projection_n_coefs(&what);
    Projecting out;
    const cg_cuda_projection_most most = cg_cuda_projection_bound(p, CG_DTYPE_BF16, n_tokens);
    if (cg_cuda_projection_of(p, &what, bases.data(), &most, &out.planned) != CG_OK)
        throw std::runtime_error("projection");
    std::vector<cg_cuda_place> places(n_rows);
    cg_cuda_projection_places(&what, places.data());
    out.elements =
        std::make_unique<GpuMemory>(elements.data(), elements.size() * sizeof elements[0]);
    out.places = std::make_unique<GpuMemory>(places.data(), n_rows * sizeof places[0]);
    out.planned.spectra.elements_dev = is_joint ? nullptr : out.elements->data();
    out.planned.spectra.places_dev = reinterpret_cast<const cg_cuda_place *>(out.places->data());
    out.first = std::make_unique<GpuMemory>(rows.data(), n_floats * sizeof(float));
    out.rows = std::make_unique<GpuMemory>(n_floats * sizeof(float));
    out.coefs = std::make_unique<GpuMemory>(n_coefs * sizeof(float));
    out.made = std::make_unique<GpuMemory>(made.n_bytes);
    out.planned.rows_dev = reinterpret_cast<float *>(out.rows->data());
    out.planned.coefs_dev = reinterpret_cast<float *>(out.coefs->data());
    out.planned.residues_dev = reinterpret_cast<float *>(out.made->data());
    out.planned.given_dev = reinterpret_cast<float *>(out.made->data() + made.given_at);
    out.planned.cells_dev = reinterpret_cast<int16_t *>(out.made->data() + made.cells_at);
    make_coding(laid, blob, what, &out);
    return out;
}

// All of a chunk's, the joint matrix's last, one after another on a stream; from K and V to symbols
// in device memory, without the link. All are noise: what kernels do does not depend on them. Then
// from symbols to sections in pinned memory, with the link: coding takes longer where symbols are
// large, so how large they come out is told.
void measure_projection(const Case &c, cudaStream_t stream, bool is_last)
{
    const uint32_t n_tokens = 256;
    const Profile profile = make_profile(spec_of(c));
    Bytes bases_bytes(cg_cuda_bases_bytes(profile.get()));
    cg_cuda_bases_fill(profile.get(), bases_bytes.data());
    const GpuMemory bases(bases_bytes.data(), bases_bytes.size());
    const Laid laid(profile.get());
    const GpuMemory blob(laid.blob.data(), laid.blob.size());
    cg_block_order order = {};
    if (cg_block_order_init(cg_count_blocks(n_tokens), &order) != CG_OK)
        throw std::runtime_error("order");
    std::vector<Projecting> tasks;
    for (uint32_t basis = 0; basis < cg_profile_n_bases(profile.get()); basis++)
        tasks.push_back(
            make_projecting(profile.get(), basis, n_tokens, order, bases, laid.profile, blob));
    cg_block_order_destroy(&order);
    const double out_bytes =
        2.0 * static_cast<double>(cg_geometry_elements(&profile->geometry, n_tokens));
    Timer timer;
    std::vector<double> us, rates, coding_us, coding_rates;
    require(cg_cuda_project_prepare(), "prepare");
    require(cg_cuda_code_prepare(), "prepare");
    for (int i = 0; i < REPETITIONS + 3; i++) { /* the first three warm up */
        for (const Projecting &task : tasks)    /* kernels take what they project off the rows */
            require(cudaMemcpyAsync(task.rows->data(), task.first->data(),
                                    size_t{CG_DCT} * task.planned.n_rows * task.planned.row_stride *
                                        sizeof(float),
                                    cudaMemcpyDeviceToDevice, stream),
                    "copy");
        const double t = timer.seconds(stream, [&] {
            for (const Projecting &task : tasks)
                require(cg_cuda_project(&task.planned, stream), "project");
        });
        const double t_coding = timer.seconds(stream, [&] {
            for (const Projecting &task : tasks)
                require(cg_cuda_code(&task.coding, stream), "code");
        });
        if (i < 3)
            continue;
        us.push_back(t * 1e6);
        rates.push_back(out_bytes / t * 1e-9);
        coding_us.push_back(t_coding * 1e6);
        coding_rates.push_back(out_bytes / t_coding * 1e-9);
    }
    double coded_bytes = 0;
    int n_left = 0; // sections that do not fit, and are the CPU's
    for (const Projecting &task : tasks)
        for (uint32_t level = 0; level < task.coding.n_levels; level++) {
            coded_bytes += *task.coding.levels[level].n_bytes;
            n_left += *task.coding.levels[level].n_bytes == 0;
        }
    printf("   {\"case\": \"projections at L1, %s\", \"layers\": %d, \"kv_heads\": %d, "
           "\"head_dim\": %d, \"tokens\": %u, \"tasks\": %zu,\n",
           c.name, c.n_layers, c.n_kv_heads, c.head_dim, n_tokens, tasks.size());
    print_spread("one_chunk_us", us, ",");
    print_spread("project_GBps", rates, ",");
    printf("    \"coded_bits_per_element\": %.3f, \"sections_left_to_the_cpu\": %d,\n",
           16 * coded_bytes / out_bytes, n_left);
    print_spread("code_one_chunk_us", coding_us, ",");
    print_spread("code_GBps", coding_rates, "");
    printf("   }%s\n", is_last ? "" : ",");
}

} // namespace

int main(int argc, char **argv)
{
    const std::vector<std::string> paths(argv + 1, argv + argc);
    const bool is_quick = !paths.empty() && paths[0] == "quick";
    const std::vector<Case> cases = {
        {"klt L2, SmolLM2-135M", false, CG_L2, CG_L2, 30, 3, 64, 5, 64},
        {"klt L1 nested, SmolLM2-135M", false, CG_L1, CG_L3, 30, 3, 64, 5, 64},
        {"klt L2 with a joint matrix, SmolLM2-135M", false, CG_L2, CG_L2, 30, 3, 64, 5, 64, 320},
        {"klt L2 with a joint matrix and steps of blocks, SmolLM2-135M", false, CG_L2, CG_L2, 30, 3,
         64, 5, 64, 320, true},
        {"klt L2, Llama-3.1-8B, groups of 1", false, CG_L2, CG_L2, 32, 8, 128, 1, 32},
        {"paper L2, Llama-3.1-8B", true, CG_L2, CG_L2, 32, 8, 128, 4, 32},
        {"L0, Llama-3.1-8B", true, CG_L0, CG_L0, 32, 8, 128, 4, 32},
    };
    const std::vector<Case> projected = {
        {"SmolLM2-135M", false, CG_L1, CG_L3, 30, 3, 64, 5, 1},
        {"SmolLM2-135M with a joint matrix", false, CG_L1, CG_L3, 30, 3, 64, 5, 1, 320},
        {"Llama-3.1-8B, groups of 1", false, CG_L1, CG_L3, 32, 8, 128, 1, 1},
    };
    /* Else streams share eight queues, and wait for each other. */
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", std::to_string(N_STREAMS).c_str(), 1);
    try {
        require(cg_cuda_decode_prepare(), "prepare");
        const Products products;
        std::vector<cudaStream_t> streams(N_STREAMS);
        for (cudaStream_t &stream : streams) /* of the default priority, as a connector's are */
            require(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0), "stream");
        setvbuf(stdout, nullptr, _IOLBF, 0); /* what is measured stays when this is stopped */
        printf("[\n");
        bool is_decoded = paths.size() <= 1 || measure_files(paths, products, streams);
        const size_t n = paths.size() > 1 ? 0 : is_quick ? 1 : cases.size();
        for (size_t i = 0; i < n; i++)
            is_decoded &= measure_case(cases[i], products, streams);
        const size_t n_projected = paths.size() > 1 ? 0 : is_quick ? 1 : projected.size();
        for (size_t i = 0; i < n_projected; i++)
            measure_projection(projected[i], streams[0], i + 1 == n_projected);
        printf("]\n"); // last: check_gpu.sh takes an array that ends
        return is_decoded ? 0 : 1;
    } catch (const std::exception &error) {
        fprintf(stderr, "gpu_bench: %s\n", error.what());
        return 1;
    }
}
