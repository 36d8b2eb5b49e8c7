/* tests/cuda/encoder_kernels.h - an encoder whose projector is the kernels. */
#ifndef CG_TESTS_CUDA_ENCODER_KERNELS_H
#define CG_TESTS_CUDA_ENCODER_KERNELS_H
#include "device.h"
#include "projection_reference.h"

#include <gtest/gtest.h>

namespace cg_test
{

// A profile, and what kernels read of it.
struct EncoderCase {
    Profile profile;
    Bytes bases;
    Laid laid;

    explicit EncoderCase(const ProfileSpec &spec) : profile(make_profile(spec)), laid(profile.get())
    {
        bases.resize(cg_cuda_bases_bytes(profile.get()));
        cg_cuda_bases_fill(profile.get(), bases.data());
    }
    const cg_bands &bands(uint32_t basis) const
    {
        return profile->groups[basis / profile->n_matrices].bands[basis % profile->n_matrices];
    }
};

// An order of blocks by random scales, where the profile has such.
struct DrawnOrder {
    cg_block_order order = {};

    DrawnOrder(const cg_profile *profile, uint32_t n_tokens, uint64_t seed)
    {
        EXPECT_EQ(cg_block_order_init(cg_count_blocks(n_tokens), &order), CG_OK);
        if (profile->version >= CG_PROFILE_VERSION_STEPS) {
            EXPECT_EQ(cg_block_order_sort(profile, draw_scales(n_tokens, seed).data(), &order),
                      CG_OK);
        }
    }
    ~DrawnOrder()
    {
        cg_block_order_destroy(&order);
    }
    DrawnOrder(const DrawnOrder &) = delete;
    DrawnOrder &operator=(const DrawnOrder &) = delete;
};

// An encoder's projector that the kernels are.
class KernelProjector
{
  public:
    cg_projector base = {};
    bool codes = false;            // the sections, too
    uint32_t n_right = UINT32_MAX; // so many sections; in those behind a bit is another one
    uint32_t n_asked = 0;          // tasks that sections were wanted of

    explicit KernelProjector(const EncoderCase &c) : case_(c)
    {
        base.memory_bytes = size_t{1} << 20;
        memory_.reset(aligned_alloc(64, base.memory_bytes));
        base.memory = memory_.get();
        base.n_tokens = CG_MAX_CHUNK_TOKENS;
        base.project = [](cg_projector *projector, const cg_projection *what, cg_projected *out) {
            return reinterpret_cast<KernelProjector *>(projector)->project(*what, out);
        };
    }
    size_t n_made() const
    {
        return n_made_;
    }

  private:
    cg_status project(const cg_projection &what, cg_projected *out)
    {
        const auto *given = static_cast<const float *>(base.memory);
        std::vector<float> rows(size_t{CG_DCT} * what.n_rows * what.row_stride, NAN);
        if (what.elements == nullptr)
            std::copy_n(given, rows.size(), rows.begin());
        const Projected made = run_project(case_.profile.get(), case_.bases, what, rows, ++n_made_);
        made_.cells = made.cells;
        made_.residues = made.residues;
        made_.given = made.given;
        *out = made_.of(what);
        sections_ = {};
        n_asked += what.level_mask != 0;
        if (codes && what.level_mask != 0)
            sections_ = run_code(case_.laid, what, made.cells, n_made_);
        for (unsigned level = CG_L1; level < CG_N_LEVELS; level++)
            if (!sections_[level].empty()) {
                if (n_coded_++ >= n_right)
                    sections_[level][sections_[level].size() / 2] ^= 1;
                out->coded[level] = {sections_[level].data(), sections_[level].size()};
            }
        return CG_OK;
    }
    const EncoderCase &case_;
    std::unique_ptr<void, MallocFree> memory_;
    Quantized made_;
    Sections sections_;
    uint32_t n_coded_ = 0;
    size_t n_made_ = 0;
};

} // namespace cg_test
#endif
