/* tests/cuda/device.h - where a test's kernels run: emulated_device.cc on the CPU, gpu_device.cc on
 * a GPU. The tests are the same.
 */
#ifndef CG_TESTS_CUDA_DEVICE_H
#define CG_TESTS_CUDA_DEVICE_H
#include "cuda/coding.h"
#include "cuda/project.h"
#include "decode_cases.h"

#include <array>
#include <functional>
#include <memory>
#include <stdexcept>

namespace cg_test
{

/* A chunk that is decoded by its plan into blocks. */
struct Decoding {
    const Bytes &blob; /* empty at L0 */
    const Bytes &chunk;
    const cg_cuda_plan &plan;
    const Bytes &plan_bytes;
    const Blocks &blocks;
    Bytes piece; /* what the blocks hold: before, and then after */
    uint32_t status = 0;
    Bytes scratch = {}; /* what is there afterwards */
};

/* Its memory, of a type that owns such: exactly as much as it takes. */
template <class Memory> struct DecodingMemory {
    const size_t scratch_bytes;
    const Memory blob, chunk, plan, scratch, piece, table, bases, status;

    explicit DecodingMemory(const Decoding &d)
        : scratch_bytes(d.plan.scratch_bytes), blob(d.blob.data(), d.blob.size()),
          chunk(d.chunk.data(), d.chunk.size()), plan(d.plan_bytes.data(), d.plan.plan_bytes),
          scratch(scratch_bytes), piece(d.piece.data(), d.piece.size()),
          table(d.blocks.table.data(), d.blocks.table.size() * sizeof(int64_t)),
          bases(bases_of(d).data(), d.blocks.base.size() * sizeof(void *)),
          status(&d.status, sizeof d.status)
    {
    }
    cg_cuda_decode_job job(const Decoding &d) const
    {
        cg_cuda_decode_job out = {&d.plan, {}};
        out.params.blob_dev = blob.data();
        out.params.plan_dev = plan.data();
        out.params.chunk_dev = chunk.data();
        out.params.scratch_dev = scratch.data();
        out.params.status_dev = reinterpret_cast<uint32_t *>(status.data());
        out.params.blocks = d.blocks.layout;
        out.params.blocks.base_dev = reinterpret_cast<void *const *>(bases.data());
        out.params.blocks.table_dev = reinterpret_cast<const int64_t *>(table.data());
        return out;
    }

  private:
    std::vector<void *> bases_of(const Decoding &d) const
    {
        std::vector<void *> out;
        for (const size_t at : d.blocks.base)
            out.push_back(piece.data() + at);
        return out;
    }
};

/* Decodes chunks together. seed: of the emulator. */
void run_decode(std::vector<Decoding> *batch, uint64_t seed);
/* A batch of one: piece becomes what the blocks hold. Returns the kernels' status. */
inline uint32_t run_decode(const Bytes &blob, const Bytes &chunk, const cg_cuda_plan &plan,
                           const Bytes &plan_bytes, const Blocks &blocks, uint64_t seed,
                           Bytes *piece)
{
    std::vector<Decoding> batch = {{blob, chunk, plan, plan_bytes, blocks, std::move(*piece)}};
    run_decode(&batch, seed);
    *piece = std::move(batch[0].piece);
    return batch[0].status;
}

/* What a task's rows became. */
struct Projected {
    std::vector<float> coefs, given, residues;
    std::vector<int16_t> cells;

    explicit Projected(const cg_projection &what)
        : coefs(cg_cuda_projection_n_coefs(&what)), given(cg_cuda_projection_made(&what).n_given),
          residues(cg_cuda_projection_made(&what).n_residues),
          cells(cg_cuda_projection_made(&what).n_cells)
    {
    }
    bool operator==(const Projected &other) const
    {
        return coefs == other.coefs && given == other.given && residues == other.residues &&
               cells == other.cells;
    }
};

/* As much as the projection takes. */
inline cg_cuda_projection_most most_of(const cg_profile *profile, const cg_projection &what)
{
    cg_cuda_projection_most most = {};
    most.n_rows = most.given_rows = size_t{CG_DCT} * what.n_rows * what.row_stride;
    most.n_coefs = cg_cuda_projection_n_coefs(&what);
    most.elements_bytes = cg_cuda_projection_elements_bytes(profile, &what);
    most.n_places = what.n_rows;
    return most;
}

/* A task's memory, of a type that owns such: exactly as much as it takes. */
template <class Memory> struct ProjectMemory {
    const size_t rows_bytes, coefs_bytes, cells_bytes, residues_bytes, given_bytes;
    const Memory bases, elements, places, rows, coefs, cells, residues, given;

    ProjectMemory(const cg_profile *profile, const Bytes &bases_bytes, const cg_projection &what,
                  const std::vector<float> &given_rows, const Projected &made)
        : rows_bytes(given_rows.size() * sizeof(float)),
          coefs_bytes(made.coefs.size() * sizeof(float)),
          cells_bytes(made.cells.size() * sizeof(int16_t)),
          residues_bytes(made.residues.size() * sizeof(float)),
          given_bytes(made.given.size() * sizeof(float)),
          bases(bases_bytes.data(), bases_bytes.size()),
          elements(what.elements, cg_cuda_projection_elements_bytes(profile, &what)),
          places(places_of(what).data(), places_of(what).size() * sizeof(cg_cuda_place)),
          rows(given_rows.data(), rows_bytes), coefs(coefs_bytes), cells(cells_bytes),
          residues(residues_bytes), given(given_bytes)
    {
    }
    cg_cuda_projection placed(const cg_profile *profile, const cg_projection &what) const
    {
        const cg_cuda_projection_most most = most_of(profile, what);
        cg_cuda_projection p;
        if (cg_cuda_projection_of(profile, &what, bases.data(), &most, &p) != CG_OK)
            throw std::logic_error("not a projection of this profile");
        p.spectra.elements_dev = what.elements != nullptr ? elements.data() : nullptr;
        p.spectra.places_dev = reinterpret_cast<const cg_cuda_place *>(places.data());
        p.rows_dev = reinterpret_cast<float *>(rows.data());
        p.coefs_dev = reinterpret_cast<float *>(coefs.data());
        p.cells_dev = reinterpret_cast<int16_t *>(cells.data());
        p.residues_dev = reinterpret_cast<float *>(residues.data());
        p.given_dev = reinterpret_cast<float *>(given.data());
        return p;
    }

  private:
    static std::vector<cg_cuda_place> places_of(const cg_projection &what)
    {
        std::vector<cg_cuda_place> places(what.elements != nullptr ? what.n_rows : 0);
        if (!places.empty())
            cg_cuda_projection_places(&what, places.data());
        return places;
    }
};

/* A profile's blob, and what kernels know of it. */
struct Laid {
    cg_cuda_profile *profile = nullptr;
    Bytes blob;

    explicit Laid(const cg_profile *of)
    {
        if (cg_cuda_profile_new(of, &profile) != CG_OK)
            throw std::logic_error("no kernels for this profile");
        blob.resize(cg_cuda_profile_bytes(profile));
        if (cg_cuda_profile_fill(profile, blob.data()) != CG_OK)
            throw std::bad_alloc();
    }
    ~Laid()
    {
        cg_cuda_profile_free(profile);
    }
    Laid(const Laid &) = delete;
    Laid &operator=(const Laid &) = delete;
};

/* The least bytes with which a task can be coded: of scratch and of what goes to the host. */
inline std::pair<size_t, size_t> coding_bytes(const cg_cuda_profile *profile,
                                              const cg_projection &what)
{
    size_t most[2], least[2] = {};
    cg_cuda_coding_bound(profile, 8 * what.n_rows, &most[0], &most[1]);
    for (int i = 0; i < 2; i++)
        for (size_t end = most[i]; least[i] < end;) {
            cg_cuda_coding_memory memory = {};
            cg_cuda_coding coding;
            const size_t middle = (least[i] + end) / 2;
            memory.scratch_bytes = i == 0 ? middle : most[0];
            memory.out_bytes = i == 1 ? middle : most[1];
            if (cg_cuda_coding_of(profile, &what, &memory, &coding) == CG_OK)
                end = middle;
            else
                least[i] = middle + 1;
        }
    return {least[0], least[1]};
}

/* A task's sections, by level; none of levels that are not coded. cells: of the finest level. */
using Sections = std::array<Bytes, CG_N_LEVELS>;
Sections run_code(const Laid &laid, const cg_projection &projection,
                  const std::vector<int16_t> &cells, uint64_t seed);

/* Codes in memory of a type that owns such. code: of a cg_cuda_coding; host_bytes: of memory that
 * kernels and host share. */
template <class Memory, class Code>
Sections code_in(const Laid &laid, const cg_projection &what, const std::vector<int16_t> &cells,
                 const std::function<uint8_t *(size_t)> &host_bytes, const Code &code)
{
    const auto [scratch_bytes, out_bytes] = coding_bytes(laid.profile, what);
    const Memory blob(laid.blob.data(), laid.blob.size()),
        cells_dev(cells.data(), cells.size() * sizeof(int16_t)), scratch(scratch_bytes);
    const cg_cuda_coding_memory memory = {
        blob.data(),           reinterpret_cast<const int16_t *>(cells_dev.data()),
        scratch.data(),        scratch_bytes,
        host_bytes(out_bytes), out_bytes};
    cg_cuda_coding coding;
    if (cg_cuda_coding_of(laid.profile, &what, &memory, &coding) != CG_OK)
        throw std::logic_error("not a task of this profile");
    code(coding);
    cg_coded coded[CG_N_LEVELS];
    cg_cuda_coding_result(&coding, &what, coded);
    Sections out;
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++)
        if (coded[level].n_bytes > 0)
            out[level].assign(coded[level].bytes, coded[level].bytes + coded[level].n_bytes);
    return out;
}

/* Projects a task's elements, or without any these rows, on the profile's bases. What rows hold
 * must not matter with elements. */
Projected run_project(const cg_profile *profile, const Bytes &bases,
                      const cg_projection &projection, const std::vector<float> &rows,
                      uint64_t seed);

} // namespace cg_test
#endif
