// Encoders whose projections somebody else makes: what they store is as good as the CPU's, and
// whatever goes wrong there is never stored.
#include "projection_reference.h"

#include "codec/section_plan.h"

#include <gtest/gtest.h>

namespace
{

using namespace cg_test;

// A projector of f64, which can be told to go wrong.
struct Projector {
    cg_projector base = {};
    const cg_profile *profile;
    std::unique_ptr<void, MallocFree> memory;
    Quantized quantized;
    double factor = 1;   // of all coefficients
    int wrong_row = -1;  // of one frequency, another one for each row
    int wrong_cell = -1; // of frequency 0: off by as much as changes something
    bool loses_residues = false, loses_given = false;
    int only_basis = -1; // all of this goes wrong there alone
    void (*spoil)(const cg_projection &, std::vector<float> *) = nullptr; // the spectra
    int32_t (*round)(float) = [](float q) { return cg_lane_quantize(q); };
    cg_status status = CG_OK;
    uint32_t n_calls = 0;

    Projector(const cg_profile *p, size_t n_bytes)
        : profile(p), memory(aligned_alloc(64, (n_bytes + 63) / 64 * 64))
    {
        base.memory = memory.get();
        base.memory_bytes = n_bytes;
        base.n_tokens = CG_MAX_CHUNK_TOKENS;
        base.project = project;
    }
    static cg_status project(cg_projector *projector, const cg_projection *what,
                             cg_projected *made_out)
    {
        auto *self = reinterpret_cast<Projector *>(projector); // its first member
        self->n_calls++;
        auto rows = rows_by_the_book(self->profile, *projector, *what);
        if (self->spoil != nullptr && what->elements != nullptr)
            self->spoil(*what, &rows);
        auto coefs = project_by_the_book(self->profile, *what, rows.data());
        if (self->only_basis >= 0 && what->basis != static_cast<uint32_t>(self->only_basis)) {
            self->quantized.make(*what, coefs);
            *made_out = self->quantized.of(*what);
            return CG_OK;
        }
        for (float &coef : coefs)
            coef = static_cast<float>(coef * self->factor);
        if (self->wrong_row >= 0) {
            const uint32_t last = static_cast<uint32_t>(self->wrong_row) % CG_DCT,
                           f = what->n_components[last] > 0 ? last : 0, n = what->n_components[f];
            size_t first = static_cast<size_t>(self->wrong_row) * n;
            for (uint32_t before = 0; before < f; before++)
                first += size_t{what->n_rows} * what->n_components[before];
            for (size_t i = first; i < first + n; i++)
                coefs[i] = -coefs[i];
        }
        self->quantized.make(*what, coefs, self->round);
        if (self->wrong_cell >= 0)
            self->quantized.cells[static_cast<size_t>(self->wrong_cell)] ^= 1 << 8;
        if (self->loses_residues)
            std::fill(self->quantized.residues.begin(), self->quantized.residues.end(), 0.0f);
        if (self->loses_given)
            std::fill(self->quantized.given.begin(), self->quantized.given.end(), 0.0f);
        *made_out = self->quantized.of(*what);
        return self->status;
    }
};

struct Case {
    Profile profile;
    cg_chunk_header header;
    Bytes elements;
    size_t rows_bytes; // of the joint matrix

    explicit Case(const ProfileSpec &spec, uint32_t n_tokens = 45, uint32_t position = 0,
                  uint8_t dtype = CG_DTYPE_BF16)
        : profile(make_profile(spec)), header(make_header(spec, dtype, position, n_tokens)),
          elements(make_elements(header, 7)),
          rows_bytes(profile->joint == nullptr
                         ? 64
                         : size_t{8} * ((n_tokens + 7) / 8) * sizeof(float) *
                               cg_projection_stride(profile->joint->n_channels))
    {
    }
    uint32_t n_projections() const
    {
        return cg_profile_n_bases(profile.get());
    }
    // L1, with the others nested in it where the profile can. No projector: the CPU.
    Bytes encode(Projector *projector) const
    {
        const uint8_t all = 1 << CG_L1 | 1 << CG_L2 | 1 << CG_L3;
        return encode(projector,
                      cg_encoder_can_nest(profile.get(), all) ? all | CG_NESTED : 1 << CG_L1);
    }
    Bytes encode(Projector *projector, uint8_t levels, cg_status expected = CG_OK) const
    {
        cg_encoder *encoder;
        const auto tokens = make_tokens(header.n_tokens, 1);
        EXPECT_EQ(cg_encoder_new(profile.get(), &header, tokens.data(), levels, &encoder), CG_OK);
        const Bytes factor_index = draw_scales(header.n_tokens, 1);
        EXPECT_EQ(cg_encoder_set_step_factors(encoder, factor_index.data()), CG_OK);
        const size_t n_scratch = cg_encoder_scratch_bytes(encoder);
        const std::unique_ptr<void, MallocFree> scratch(
            aligned_alloc(64, (n_scratch + 63) / 64 * 64));
        for (uint32_t task = 0; task < cg_encoder_n_tasks(encoder); task++) {
            const cg_task_shape s = cg_encoder_task_shape(encoder, task);
            const size_t slice_bytes = s.elements_bytes / (s.n_planes * s.n_layers);
            Bytes in;
            for (uint32_t i = 0; i < s.n_planes * s.n_layers; i++) {
                const size_t slice =
                    (s.first_layer + i % s.n_layers) * 2 + s.plane + i / s.n_layers;
                const auto at = elements.begin() + static_cast<long>(slice * slice_bytes);
                in.insert(in.end(), at, at + static_cast<long>(slice_bytes));
            }
            EXPECT_EQ(cg_encoder_run_with(encoder, task, scratch.get(), n_scratch, in.data(),
                                          projector != nullptr ? &projector->base : nullptr),
                      expected);
        }
        if (expected != CG_OK) {
            cg_encoder_free(encoder);
            return {};
        }
        uint8_t *bytes = nullptr;
        size_t n_bytes = 0;
        EXPECT_EQ(cg_encoder_finish(encoder, CG_L1, &bytes, &n_bytes), CG_OK);
        cg_encoder_free(encoder);
        const Bytes out(bytes, bytes + n_bytes);
        free(bytes);
        return out;
    }
    double error_of(const Bytes &chunk) const
    {
        Bytes decoded;
        EXPECT_EQ(decode(profile.get(), chunk, &decoded), CG_OK);
        const unsigned dtype = header.geometry.dtype;
        const auto is = to_floats(decoded, dtype), was = to_floats(elements, dtype);
        double sum = 0;
        for (size_t i = 0; i < is.size(); i++)
            sum += (is[i] - was[i]) * (is[i] - was[i]);
        return sum;
    }
};

// K and V apart, joined, and with a joint matrix; and blocks with steps of their own.
std::vector<ProfileSpec> nesting()
{
    ProfileSpec spec;
    spec.nests = true;
    return {spec_2(false, spec), spec_2(true, spec), spec_3(spec), spec_4(spec, 32)};
}

TEST(Projection, OfSomebodyElseIsWhatIsStoredAndAsGoodAsTheCpus)
{
    for (const ProfileSpec &spec : nesting()) {
        for (const uint32_t n_tokens : {1u, 8u, 45u, 300u}) {
            SCOPED_TRACE(testing::Message() << spec.version << ' ' << n_tokens);
            const Case c(spec, n_tokens, 32);
            Projector projector(c.profile.get(), c.rows_bytes);
            const Bytes cpu = c.encode(nullptr), other = c.encode(&projector);
            EXPECT_EQ(projector.n_calls, c.n_projections());
            EXPECT_EQ(projector.base.n_failed, 0u);
            EXPECT_NEAR(c.error_of(other), c.error_of(cpu), 0.02 * c.error_of(cpu));
            // Off by less than is noticed: what is stored then shows whose coefficients they were.
            projector.factor = 1.004;
            const Bytes off = c.encode(&projector);
            EXPECT_EQ(projector.base.n_failed, 0u);
            if (n_tokens > 8) {
                EXPECT_NE(off, cpu);
            }
        }
    }
}

TEST(Projection, ThatFailsOrIsWrongIsMadeByTheCpu)
{
    for (const ProfileSpec &spec : nesting()) {
        const Case c(spec);
        const uint32_t n = c.n_projections();
        const Bytes cpu = c.encode(nullptr);
        for (const double factor : {0.0, 0.95, -1.0, 1e30, double{NAN}}) {
            SCOPED_TRACE(factor);
            Projector projector(c.profile.get(), c.rows_bytes);
            projector.factor = factor;
            EXPECT_EQ(c.encode(&projector), cpu);
            EXPECT_EQ(projector.base.n_failed, n);
        }
        Projector failing(c.profile.get(), c.rows_bytes), small(c.profile.get(), c.rows_bytes);
        failing.status = CG_ERR_DEVICE;
        EXPECT_EQ(c.encode(&failing), cpu);
        EXPECT_EQ(failing.base.n_failed, n);
        small.base.n_tokens = c.header.n_tokens - 1;
        EXPECT_EQ(c.encode(&small), cpu);
        EXPECT_EQ(small.n_calls, 0u);
        EXPECT_EQ(small.base.n_failed, 0u);
    }
}

// Whatever K and V are: with sinks and blocks of them alone, tails, a rotation of a part of the
// head, or another one for each layer, and every type of numbers.
TEST(Projection, IsCheckedByTheSumOfAllBlocksWhateverTheyAre)
{
    ProfileSpec spec = nesting()[3], partly = spec, many = spec, none = spec;
    partly.rotary_dim = 6;
    many.theta = {10000.0, 100.0};
    many.layer_rope = {1, 0, 1, 1};
    none.rotary_dim = 0;
    none.n_sinks = 8;
    for (const ProfileSpec &of : {spec, partly, many, none}) {
        for (const uint8_t dtype :
             {CG_DTYPE_BF16, CG_DTYPE_FP16, CG_DTYPE_FP32, CG_DTYPE_FP8_E4M3, CG_DTYPE_FP8_E5M2}) {
            for (const auto &[n_tokens, position] :
                 {std::pair{3u, 0u}, {8u, 0u}, {77u, 0u}, {64u, 80000u}}) {
                SCOPED_TRACE(testing::Message() << of.rotary_dim << ' ' << of.theta.size() << ' '
                                                << int{dtype} << ' ' << n_tokens);
                const Case c(of, n_tokens, position, dtype);
                Projector projector(c.profile.get(), c.rows_bytes);
                const double error = c.error_of(c.encode(nullptr));
                EXPECT_NEAR(c.error_of(c.encode(&projector)), error, 0.02 * error);
                EXPECT_EQ(projector.n_calls, c.n_projections());
                EXPECT_EQ(projector.base.n_failed, 0u);
            }
        }
    }
}

TEST(Projection, OfWrongSpectraIsMadeByTheCpu)
{
    const Case c(nesting()[3], 256);
    const Bytes cpu = c.encode(nullptr);
    const auto wrongs = {
        +[](const cg_projection &, std::vector<float> *rows) { (*rows)[0] += 1000; },
        // Blocks in the order of the tokens.
        +[](const cg_projection &what, std::vector<float> *rows) {
            const auto row = [&](std::vector<float> *of, size_t f, size_t r) {
                return of->begin() + static_cast<long>((f * what.n_rows + r) * what.row_stride);
            };
            std::vector<float> moved = *rows;
            for (size_t f = 0; f < CG_DCT; f++)
                for (size_t r = 0; r < what.n_rows; r++)
                    std::copy_n(row(rows, f, r), what.row_stride,
                                row(&moved, f, what.order->block[r]));
            *rows = moved;
        },
        // Without the blocks' scales.
        +[](const cg_projection &what, std::vector<float> *rows) {
            for (size_t i = 0; i < rows->size(); i++)
                (*rows)[i] *=
                    CG_STEP_FACTORS[what.order->factor_index[i / what.row_stride % what.n_rows]];
        },
        // A channel is lost.
        +[](const cg_projection &what, std::vector<float> *rows) {
            for (size_t i = 3; i < rows->size(); i += what.row_stride)
                (*rows)[i] = 0;
        }};
    for (const auto wrong : wrongs) {
        Projector projector(c.profile.get(), c.rows_bytes);
        projector.spoil = wrong;
        const Bytes chunk = c.encode(&projector);
        EXPECT_EQ(projector.base.n_failed, c.n_projections() - 1); // the joint matrix has rows
        EXPECT_NEAR(c.error_of(chunk), c.error_of(cpu), 0.02 * c.error_of(cpu));
    }
}

TEST(Projection, OfWhatIsNotFiniteIsNotAskedFor)
{
    for (const uint32_t token : {0u, 20u, 44u}) { // a sink, and the last of a tail
        Case c(nesting()[3]);
        const size_t channels = cg_geometry_channels(&c.header.geometry);
        for (size_t slice = 0; slice < 2u * c.header.geometry.n_layers; slice++)
            for (size_t i = 0; i < 2; i++) // an infinity
                c.elements[((slice * c.header.n_tokens + token) * channels + 5) * 2 + i] =
                    i == 0 ? 0x80 : 0x7f;
        Projector projector(c.profile.get(), c.rows_bytes);
        c.encode(&projector, 1 << CG_L1, CG_ERR_INVALID_ARGUMENT);
        EXPECT_EQ(projector.n_calls, 0u);
        EXPECT_EQ(projector.base.n_failed, 0u);
    }
}

// Of the joint matrix alone, of a group's shared components alone, of one group alone.
TEST(Projection, ThatIsWrongInAPartIsMadeByTheCpuInThatPart)
{
    const Case c(nesting()[2], 256);
    const Bytes cpu = c.encode(nullptr);
    const uint32_t n = c.n_projections();
    for (uint32_t basis = 0; basis < n; basis++) {
        SCOPED_TRACE(basis);
        Projector wrong(c.profile.get(), c.rows_bytes), lost(c.profile.get(), c.rows_bytes);
        wrong.only_basis = lost.only_basis = static_cast<int>(basis);
        wrong.factor = -1;
        lost.loses_given = true;
        for (Projector *projector : {&wrong, &lost}) {
            const Bytes chunk = c.encode(projector);
            EXPECT_NEAR(c.error_of(chunk), c.error_of(cpu), 0.02 * c.error_of(cpu));
            EXPECT_EQ(projector->n_calls, n);
        }
        EXPECT_EQ(wrong.base.n_failed, 1u);
        EXPECT_EQ(lost.base.n_failed, basis + 1 < n ? 1u : 0u); // the joint matrix shares nothing
    }
}

TEST(Projection, ThatIsWrongInOneRowIsMadeByTheCpu)
{
    for (const ProfileSpec &spec : nesting()) {
        for (const uint32_t n_tokens : {45u, 256u}) {
            const Case c(spec, n_tokens);
            const uint32_t n = c.n_projections();
            const Bytes cpu = c.encode(nullptr);
            for (uint32_t row = 0; row < (n_tokens + 7) / 8; row++) {
                SCOPED_TRACE(testing::Message() << spec.version << ' ' << n_tokens << ' ' << row);
                Projector projector(c.profile.get(), c.rows_bytes);
                projector.wrong_row = static_cast<int>(row);
                EXPECT_EQ(c.encode(&projector), cpu);
                EXPECT_EQ(projector.base.n_failed, n);
            }
        }
    }
}

TEST(Projection, WhoseSymbolsAreNotWhatTheCoefficientsSayIsMadeByTheCpu)
{
    for (const ProfileSpec &spec : nesting()) {
        const Case c(spec, 256);
        const uint32_t n = c.n_projections();
        const Bytes cpu = c.encode(nullptr);
        const auto expect_refused = [&](const Projector &projector, const Bytes &chunk) {
            EXPECT_EQ(chunk, cpu);
            EXPECT_EQ(projector.base.n_failed, n);
        };
        for (int cell = 0; cell < 200; cell += 40) {
            SCOPED_TRACE(cell);
            Projector flipped(c.profile.get(), c.rows_bytes);
            flipped.wrong_cell = cell;
            expect_refused(flipped, c.encode(&flipped));
        }
        Projector lost(c.profile.get(), c.rows_bytes);
        lost.loses_residues = true;
        expect_refused(lost, c.encode(&lost));
        // What it leaves is in accord with its symbols, and too much.
        for (const auto round :
             {+[](float) { return 0; }, +[](float q) { return cg_lane_quantize(q) / 2; }}) {
            Projector cut(c.profile.get(), c.rows_bytes);
            cut.round = round;
            expect_refused(cut, c.encode(&cut));
        }
    }
}

// Levels that are not nested are made of coefficients, which a projector does not give.
TEST(Projection, IsNotAskedForLevelsThatOneDoesNotTell)
{
    const Case c(nesting()[1]);
    Projector projector(c.profile.get(), c.rows_bytes);
    c.encode(&projector, 1 << CG_L1 | 1 << CG_L3);
    EXPECT_EQ(projector.n_calls, 0u);
    const Bytes one = c.encode(&projector, 1 << CG_L1);
    EXPECT_EQ(projector.n_calls, c.n_projections());
    EXPECT_EQ(projector.base.n_failed, 0u);
    EXPECT_NEAR(c.error_of(one), c.error_of(c.encode(nullptr, 1 << CG_L1)), 0.02 * c.error_of(one));
}

TEST(Projection, IsNotAskedForWhereThereIsNone)
{
    for (const ProfileSpec &spec : {ProfileSpec(), paper_spec()}) {
        const Case c(spec);
        Projector projector(c.profile.get(), 1 << 20);
        EXPECT_EQ(c.encode(&projector), c.encode(nullptr));
        EXPECT_EQ(projector.n_calls, 0u);
    }
}

} // namespace
