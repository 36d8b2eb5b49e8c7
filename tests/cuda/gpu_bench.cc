// How fast the kernels are, from bytes in device memory to blocks written, and from K and V there
// to symbols; prints JSON.
//
// usage: gpu_bench [quick]
//
// Caches and profiles are synthetic (tests/codec/profile_maker.h): what decoding takes depends on
// how many components a level holds and how many symbols are not zero, so both are printed, and no
// figure here is one of a real model. Of each figure: the median, least and most of the
// repetitions; baseline and candidate in turn.
#include "codec/profile_data.h"
#include "cuda/project.h"
#include "device.h"
#include "gpu_memory.h"

#ifdef CG_HAS_CUBLAS
#include <cublas_v2.h>
#endif

namespace
{

using namespace cg_test;

const int REPETITIONS = 15;

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
    Product()
    {
        require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
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
    void multiply() const
    {
    }
    cudaStream_t stream = nullptr;
#endif
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
    cg_cuda_plan planned = {};
    cg_cuda_decode_params params = {};
};

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
    BlockSpec spec;
    spec.order = Order::PLANE_BLOCK_TOKEN_HEAD;
    const Blocks blocks = make_blocks(spec, header.geometry, header.n_tokens);
    const uint32_t none = 0;
    out.chunk = std::make_unique<GpuMemory>(chunk.data(), chunk.size());
    out.plan = std::make_unique<GpuMemory>(plan.data(), out.planned.plan_bytes);
    out.scratch = std::make_unique<GpuMemory>(out.planned.scratch_bytes);
    out.status = std::make_unique<GpuMemory>(&none, sizeof none);
    out.piece = std::make_unique<GpuMemory>(blocks.n_bytes);
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

// All chunks, dealt out to streams; begins and ends on the first.
void decode_all(const std::vector<Loaded> &chunks, const std::vector<cudaStream_t> &streams,
                cudaEvent_t event)
{
    require(cudaEventRecord(event, streams[0]), "record");
    for (const cudaStream_t stream : streams)
        require(cudaStreamWaitEvent(stream, event, 0), "wait");
    for (size_t i = 0; i < chunks.size(); i++)
        require(cg_cuda_decode(&chunks[i].planned, &chunks[i].params, streams[i % streams.size()]),
                "decode");
    for (const cudaStream_t stream : streams) {
        require(cudaEventRecord(event, stream), "record");
        require(cudaStreamWaitEvent(streams[0], event, 0), "wait");
    }
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

const char *const KINDS[] = {"symbols",  "anchors", "deltas", "exponents",
                             "rotation", "klt",     "joint"};

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

void measure(const Case &c, const Product &product, const std::vector<cudaStream_t> &streams)
{
    const ProfileSpec spec = spec_of(c);
    const Profile profile = make_profile(spec);
    cg_cuda_profile *laid = nullptr;
    if (cg_cuda_profile_new(profile.get(), &laid) != CG_OK)
        throw std::runtime_error("profile");
    Bytes blob_bytes(cg_cuda_profile_bytes(laid));
    if (cg_cuda_profile_fill(laid, blob_bytes.data()) != CG_OK)
        throw std::runtime_error("blob");
    const GpuMemory blob(blob_bytes.data(), blob_bytes.size());
    const uint32_t n_tokens = 256;
    const cg_chunk_header header = make_header(spec, CG_DTYPE_BF16, 0, n_tokens);
    Bytes chunk;
    const auto tokens = make_tokens(n_tokens, 1);
    const Bytes elements = make_elements(header, 1);
    const cg_status status_of_encoder =
        c.is_scaled
            ? encode_scaled(profile.get(), header, tokens, elements, draw_scales(n_tokens, 1),
                            c.level, &chunk, c.coarsest)
            : encode(profile.get(), header, tokens, elements, c.level, &chunk, 8, c.coarsest);
    if (status_of_encoder != CG_OK)
        throw std::runtime_error("encode");
    std::vector<Loaded> chunks;
    for (size_t i = 0; i < c.n_chunks; i++)
        chunks.push_back(load(c.level != CG_L0 ? laid : nullptr, &blob, chunk));
    const double out_bytes =
        2.0 * static_cast<double>(cg_geometry_elements(&header.geometry, n_tokens));
    const double all_bytes = out_bytes * static_cast<double>(c.n_chunks);
    const GpuMemory copy(static_cast<size_t>(out_bytes)), copied(static_cast<size_t>(out_bytes));

    Timer timer;
    cudaEvent_t event;
    require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
    std::vector<double> one, many, memcpys, alone, beside;
    std::vector<std::vector<double>> passes(chunks[0].planned.n_passes);
    for (int i = 0; i < REPETITIONS + 3; i++) { /* the first three warm up */
        const double t_one = timer.seconds(streams[0], [&] {
            require(cg_cuda_decode(&chunks[0].planned, &chunks[0].params, streams[0]), "decode");
        });
        const double t_many =
            timer.seconds(streams[0], [&] { decode_all(chunks, streams, event); });
        const double t_copy = timer.seconds(streams[0], [&] {
            require(cudaMemcpyAsync(copied.data(), copy.data(), static_cast<size_t>(out_bytes),
                                    cudaMemcpyDeviceToDevice, streams[0]),
                    "copy");
        });
        double t_alone = 0, t_beside = 0;
        if (Product::IS_THERE) {
            t_alone = timer.seconds(product.stream, [&] { product.multiply(); });
            t_beside = timer.seconds(product.stream, [&] {
                product.multiply();
                decode_all(chunks, streams, event);
            });
        }
        require(cudaDeviceSynchronize(), "kernels");
        if (i < 3)
            continue;
        one.push_back(t_one * 1e6);
        many.push_back(all_bytes / t_many * 1e-9);
        memcpys.push_back(out_bytes / t_copy * 1e-9);
        alone.push_back(t_alone * 1e3);
        beside.push_back(t_beside / t_alone);
        for (uint32_t k = 0; k < chunks[0].planned.n_passes; k++) {
            cg_cuda_plan plan = chunks[0].planned;
            plan.n_passes = 1;
            plan.zeroed_bytes = 0;
            plan.passes[0] = chunks[0].planned.passes[k];
            passes[k].push_back(1e6 * timer.seconds(streams[0], [&] {
                require(cg_cuda_decode(&plan, &chunks[0].params, streams[0]), "pass");
            }));
        }
    }
    uint32_t status;
    require(cudaMemcpy(&status, chunks[0].params.status_dev, sizeof status, cudaMemcpyDeviceToHost),
            "copy");
    printf("   {\"case\": \"%s\", \"layers\": %d, \"kv_heads\": %d, \"head_dim\": %d, "
           "\"tokens\": %u, \"chunk_bytes\": %zu, \"bits_per_element\": %.3f, \"chunks\": %zu, "
           "\"streams\": %zu, \"status\": %u,\n",
           c.name, c.n_layers, c.n_kv_heads, c.head_dim, n_tokens, chunk.size(),
           16.0 * static_cast<double>(chunk.size()) / out_bytes, c.n_chunks, streams.size(),
           status);
    print_spread("one_chunk_us", one, ",");
    print_spread("decode_GBps", many, ",");
    print_spread("memcpy_device_GBps", memcpys, ",");
    for (size_t k = 0; k < passes.size(); k++)
        print_spread((std::string("pass_") + std::to_string(k) + "_" +
                      KINDS[chunks[0].planned.passes[k].kind] + "_us")
                         .c_str(),
                     passes[k], ",");
    if (Product::IS_THERE) {
        print_spread("matrix_product_8192_ms", alone, ",");
        print_spread("matrix_product_beside_decoding_over_alone", beside, "");
    } else {
        printf("    \"matrix_product\": \"not run: built without cuBLAS\"\n");
    }
    printf("   },\n");
    (void)cudaEventDestroy(event);
    cg_cuda_profile_free(laid);
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
    const bool is_quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    const std::vector<Case> cases = {
        {"klt L2, SmolLM2-135M", false, CG_L2, CG_L2, 30, 3, 64, 5, 20},
        {"klt L1 nested, SmolLM2-135M", false, CG_L1, CG_L3, 30, 3, 64, 5, 20},
        {"klt L2 with a joint matrix, SmolLM2-135M", false, CG_L2, CG_L2, 30, 3, 64, 5, 20, 320},
        {"klt L2 with a joint matrix and steps of blocks, SmolLM2-135M", false, CG_L2, CG_L2, 30, 3,
         64, 5, 20, 320, true},
        {"klt L2, Llama-3.1-8B, groups of 1", false, CG_L2, CG_L2, 32, 8, 128, 1, 4},
        {"paper L2, Llama-3.1-8B", true, CG_L2, CG_L2, 32, 8, 128, 4, 4},
        {"L0, Llama-3.1-8B", true, CG_L0, CG_L0, 32, 8, 128, 4, 4},
    };
    const std::vector<Case> projected = {
        {"SmolLM2-135M", false, CG_L1, CG_L3, 30, 3, 64, 5, 1},
        {"SmolLM2-135M with a joint matrix", false, CG_L1, CG_L3, 30, 3, 64, 5, 1, 320},
        {"Llama-3.1-8B, groups of 1", false, CG_L1, CG_L3, 32, 8, 128, 1, 1},
    };
    try {
        require(cg_cuda_decode_prepare(), "prepare");
        const Product product;
        std::vector<cudaStream_t> streams(8);
        for (cudaStream_t &stream : streams)
            require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
        setvbuf(stdout, nullptr, _IOLBF, 0); /* what is measured stays when this is stopped */
        printf("[\n");
        const size_t n = is_quick ? 1 : cases.size();
        for (size_t i = 0; i < n; i++)
            measure(cases[i], product, streams);
        const size_t n_projected = is_quick ? 1 : projected.size();
        for (size_t i = 0; i < n_projected; i++)
            measure_projection(projected[i], streams[0], i + 1 == n_projected);
        printf("]\n");
    } catch (const std::exception &error) {
        fprintf(stderr, "gpu_bench: %s\n", error.what());
        return 1;
    }
    return 0;
}
