/* The tables of an encoder: a basis's rows as project() and its like read them, and the leaks,
 * which are what the coarsely stored rows pick up of the finely stored ones (analysis.h). Leaks are
 * found by the encoder's own kernel, which projects the coarse rows on the fine ones. Where numbers
 * of 16 bits cost no more than coarse ones, they are taken out of the coarse rows here, once. */
#include "codec/analysis.h"

#include "codec/bf16.h"
#include "codec/profile_floats.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct cg_analyses {
    pthread_mutex_t lock; /* of is_ready, and of each[] until then */
    bool is_ready;
    uint32_t n_bases;
    cg_analysis each[]; /* [n_groups][n_matrices], and of the joint matrix */
} cg_analyses;

cg_status cg_analyses_new(uint32_t n_bases, cg_analyses **out)
{
    *out = calloc(1, sizeof **out + n_bases * sizeof *(*out)->each);
    if (*out == NULL)
        return CG_ERR_NO_MEMORY;
    (*out)->n_bases = n_bases;
    if (pthread_mutex_init(&(*out)->lock, NULL) == 0)
        return CG_OK;
    free(*out);
    *out = NULL;
    return CG_ERR_NO_MEMORY;
}

static void destroy(cg_analysis *a)
{
    free(a->pairs);
    free(a->leaks);
    free(a->scale);
    free(a->leak_scale);
    free(a->n_digits);
    free(a->leak_digits);
    free(a->band_reach);
    *a = (cg_analysis){0};
}

void cg_analyses_free(cg_analyses *analyses)
{
    if (analyses == NULL)
        return;
    for (uint32_t i = 0; i < analyses->n_bases; i++)
        destroy(&analyses->each[i]);
    pthread_mutex_destroy(&analyses->lock);
    free(analyses);
}

static void *take_zeros(size_t n, size_t each_bytes)
{
    size_t n_bytes;
    if (!cg_size_mul(n, each_bytes, &n_bytes))
        return NULL;
    void *memory = aligned_alloc(64, n_bytes > 0 ? n_bytes : 64); /* a multiple of 64 */
    if (memory != NULL)
        memset(memory, 0, n_bytes);
    return memory;
}

/* A table of n_rows rows, in sixteens; still zeros. */
static bool take_table(size_t n_rows, size_t n_pairs, uint32_t **pairs_out, float **scale_out,
                       uint8_t **n_digits_out)
{
    /* One more than there are: of digits, matrix units read whole 64s of channels, and so past the
     * end of the last. */
    const size_t n_sixteens = (n_rows + 15) / 16 + 1;
    *pairs_out = take_zeros(n_sixteens, n_pairs * 16 * sizeof **pairs_out);
    *scale_out = calloc(n_sixteens, 16 * sizeof **scale_out);
    *n_digits_out = malloc(n_sixteens);
    if (*n_digits_out != NULL)
        memset(*n_digits_out, 1, n_sixteens);
    return *pairs_out != NULL && *scale_out != NULL && *n_digits_out != NULL;
}

static bool take_tables(cg_analysis *a)
{
    return take_table(a->n_components, cg_analysis_pairs(a->n_channels), &a->pairs, &a->scale,
                      &a->n_digits);
}

/* Row c of n elements of 16 bits. Neighbouring elements stand side by side, since matrix units and
 * integer products add up two of them at once. */
static void pack_row(uint32_t *table, size_t n_pairs, uint32_t c, const uint16_t *row, uint32_t n)
{
    uint32_t *out = table + c / 16 * n_pairs * 16 + c % 16;
    for (uint32_t i = 0; i < n; i++)
        out[i / 2 * 16] |= (uint32_t)row[i] << (i % 2 * 16);
}

/* The same as digits. */
static void pack_row_digits(uint32_t *table, uint8_t *n_digits, size_t n_pairs, uint32_t c,
                            const int16_t *row, uint32_t n)
{
    uint8_t *out = (uint8_t *)(table + c / 16 * n_pairs * 16) + c % 16 * 4;
    for (uint32_t i = 0; i < n; i++) {
        uint8_t *low = out + i / 4 * 64 + i % 4;
        const int high = (row[i] + 128) >> 8; /* the low digit is signed */
        low[0] = (uint8_t)row[i];
        low[n_pairs * 32] = (uint8_t)high;
        if (high != 0)
            n_digits[c / 16] = 2;
    }
}

static void pack_integers(const cg_profile *p, uint32_t *table, uint8_t *n_digits, size_t n_pairs,
                          uint32_t c, const int16_t *row, uint32_t n)
{
    if (p->kernels->forward->takes_digits)
        pack_row_digits(table, n_digits, n_pairs, c, row, n);
    else
        pack_row(table, n_pairs, c, (const uint16_t *)row, n);
}

/* To an integer; |x| is below 2^22. Added to 1.5 * 2^23, a float has no bits left for a fraction.
 */
static float nearest(float x)
{
    return x + 0x1.8p23f - 0x1.8p23f;
}

static float norm_of(const int16_t *row, uint32_t n)
{
    float square = 0;
    for (uint32_t i = 0; i < n; i++)
        square += (float)row[i] * (float)row[i];
    return sqrtf(square);
}

/* ---- what the others pick up of the exact components ---- */

/* Of component n_exact + c: the scalar products of its row with each exact one, to leaks. row: room
 * for n_exact. */
static void pack_leaks(const cg_profile *p, cg_analysis *a, uint32_t c, const float *products,
                       uint16_t *row)
{
    const size_t n_pairs = cg_analysis_exact_pairs(a);
    float most = 0;
    for (uint32_t i = 0; i < a->n_exact; i++) {
        most = fmaxf(most, fabsf(products[i]));
        row[i] = cg_bf16_from_f32(products[i]);
    }
    if (p->version == 1) {
        pack_row(a->leaks, n_pairs, c, row, a->n_exact);
        return;
    }
    /* Numbers as large as a basis's. */
    const float unit = most > 0 ? most / CG_MAX_ELEMENT : 1;
    int16_t *numbers = (int16_t *)row;
    for (uint32_t i = 0; i < a->n_exact; i++)
        numbers[i] = (int16_t)nearest(products[i] / unit);
    /* The row was projected without its scale. */
    a->leak_scale[c] = unit * a->scale[a->n_exact + c];
    a->leak_norm = fmaxf(a->leak_norm, norm_of(numbers, a->n_exact));
    pack_integers(p, a->leaks, a->leak_digits, n_pairs, c, numbers, a->n_exact);
}

static size_t n_others(const cg_analysis *a)
{
    return a->n_exact > 0 ? a->n_components - a->n_exact : 0;
}

/* Room for the others' rows: [n_others][2 * cg_analysis_pairs()], zeros. */
static float *take_others(const cg_analysis *a)
{
    return take_zeros(n_others(a), 2 * cg_analysis_pairs(a->n_channels) * sizeof(float));
}

/* The others' rows, before their scales, projected on the exact components as an encoder's data
 * are: [n_others, in tiles][2 * cg_analysis_exact_pairs()]. The other tables are there. NULL
 * without memory. */
static float *find_products(const cg_profile *p, const cg_analysis *a, const float *others)
{
    enum { ROWS_AT_ONCE = 64 };
    const cg_klt_forward *forward = p->kernels->forward;
    const size_t n = n_others(a), n_pairs = cg_analysis_pairs(a->n_channels),
                 stride = 2 * cg_analysis_exact_pairs(a);
    float *products = take_zeros(cg_padded(n, CG_TILE), stride * sizeof *products);
    uint16_t *split = take_zeros(ROWS_AT_ONCE, 2 * n_pairs * sizeof *split);
    if (products == NULL || split == NULL) {
        free(products);
        products = NULL;
    } else if (p->version == 1) {
        forward->project(others, 2 * n_pairs, n, a->pairs, n_pairs, a->n_exact / 16, split,
                         products, stride);
    } else {
        forward->project_integers(others, 2 * n_pairs, n, a->pairs, a->n_digits, a->scale, a->norm,
                                  n_pairs, a->n_exact / 16, split, products, stride);
    }
    free(split);
    return products;
}

static cg_status make_leaks(const cg_profile *p, cg_analysis *a, const float *others)
{
    const size_t n = n_others(a), stride = 2 * cg_analysis_exact_pairs(a);
    if (n == 0)
        return CG_OK;
    float *products = find_products(p, a, others);
    uint16_t *row = malloc(a->n_exact * sizeof *row);
    const bool is_room = take_table(n, stride / 2, &a->leaks, &a->leak_scale, &a->leak_digits) &&
                         products != NULL && row != NULL;
    for (uint32_t c = 0; c < n && is_room; c++)
        pack_leaks(p, a, c, products + c * stride, row);
    free(products);
    free(row);
    return is_room ? CG_OK : CG_ERR_NO_MEMORY;
}

/* ---- version 1 ---- */

/* Of the components behind the first n_exact, in place: bf16 to the numbers that they are scales
 * of. */
static void find_numbers(const cg_basis_rows *in, cg_analysis *a)
{
    for (uint32_t c = a->n_exact; c < a->n_components; c++) {
        uint16_t *row = in->rows + (size_t)c * in->n_channels;
        const float scale = a->scale[c], most = 1 << CG_MAX_NARROW_BITS;
        float square = 0;
        for (size_t ch = 0; ch < in->n_channels; ch++) {
            float number = scale != 0 ? cg_bf16_to_f32(row[ch]) / scale : 0;
            number = nearest(number > most ? most : number < -most ? -most : number);
            square += number * number;
            row[ch] = (uint16_t)(int16_t)number;
        }
        a->norm = fmaxf(a->norm, sqrtf(square));
    }
}

/* Rows come anew from the kept bytes of the file. Where the kernels have project_narrow(), rows
 * behind the exact ones are packed as numbers, else as the bf16 that decoders have. */
static cg_status make_from_rows(const cg_profile *p, const cg_group *group, unsigned plane,
                                cg_analysis *a)
{
    cg_basis_rows rows = {.n_channels = group->n_channels,
                          .n_components = group->n_components[plane]};
    const size_t n_elements = (size_t)rows.n_components * rows.n_channels;
    rows.rows = malloc((n_elements + 1) * sizeof *rows.rows);
    rows.scale = calloc((rows.n_components + 15) / 16 + 1, 16 * sizeof *rows.scale);
    float *others = NULL;
    cg_status status = rows.rows != NULL && rows.scale != NULL ? CG_OK : CG_ERR_NO_MEMORY;
    if (status == CG_OK)
        status = cg_profile_read_rows(p, group, plane, &rows);
    if (status != CG_OK)
        goto done;
    *a = (cg_analysis){
        .n_channels = rows.n_channels, .n_components = rows.n_components, .n_exact = rows.n_exact};
    status = CG_ERR_NO_MEMORY;
    others = take_others(a);
    if (!take_tables(a) || others == NULL)
        goto done;
    memcpy(a->scale, rows.scale, rows.n_components * sizeof *a->scale);
    const bool are_numbers = p->kernels->forward->project_narrow != NULL;
    if (are_numbers)
        find_numbers(&rows, a);
    for (uint32_t c = 0; c < rows.n_components; c++) {
        const size_t n_pairs = cg_analysis_pairs(a->n_channels);
        const uint16_t *row = rows.rows + (size_t)c * rows.n_channels;
        pack_row(a->pairs, n_pairs, c, row, rows.n_channels);
        for (uint32_t ch = 0; ch < rows.n_channels && c >= a->n_exact && a->n_exact > 0; ch++)
            others[(c - a->n_exact) * 2 * n_pairs + ch] =
                are_numbers ? (float)(int16_t)row[ch] * a->scale[c] : cg_bf16_to_f32(row[ch]);
    }
    status = make_leaks(p, a, others);
done:
    free(others);
    free(rows.rows);
    free(rows.scale);
    return status;
}

/* ---- from version 2 on ---- */

/* Component c's row of n, times a->scale[c], as integers whose norm is about that of the exact
 * ones, and which reach as far: packed, with their scale. row: room for n. */
static void pack_folded(const cg_profile *p, cg_analysis *a, uint32_t c, const float *folded,
                        float exact_norm, int16_t *row)
{
    const uint32_t n = a->n_channels;
    float most = 0, square = 0;
    for (uint32_t ch = 0; ch < n; ch++) {
        most = fmaxf(most, fabsf(folded[ch]));
        square += folded[ch] * folded[ch];
    }
    const float unit = fmaxf(most / CG_MAX_ELEMENT, sqrtf(square) / exact_norm);
    memset(row, 0, n * sizeof *row);
    /* A file's rows may be zeros, or so far from orthonormal that floats don't hold this. */
    if (unit > 0 && unit < INFINITY) {
        for (uint32_t ch = 0; ch < n; ch++)
            row[ch] = (int16_t)nearest(folded[ch] / unit);
        a->scale[c] *= unit;
    }
    a->norm = fmaxf(a->norm, norm_of(row, n));
    pack_integers(p, a->pairs, a->n_digits, cg_analysis_pairs(n), c, row, n);
}

/* Takes out of the others' rows, before their scales, what lies along the exact ones, and packs
 * them. That is linear, so an encoder then has nothing to take out of coefficients. */
static cg_status fold_leaks(const cg_profile *p, const cg_bands *bands, cg_analysis *a,
                            float *others, int16_t *row)
{
    const uint32_t n_exact = a->n_exact, n_channels = a->n_channels;
    const size_t n = n_others(a), stride = 2 * cg_analysis_pairs(n_channels),
                 products_stride = 2 * cg_analysis_exact_pairs(a);
    const float exact_norm = a->norm;
    float *products = find_products(p, a, others),
          *exact = malloc(n_exact * stride * sizeof *exact);
    const bool is_room = products != NULL && exact != NULL;
    for (uint32_t e = 0; e < n_exact && is_room; e++) {
        cg_bands_row(&p->layout, bands, e, row);
        for (uint32_t ch = 0; ch < n_channels; ch++)
            exact[e * stride + ch] = (float)row[ch] * a->scale[e];
    }
    for (uint32_t c = 0; c < n && is_room; c++) {
        float squares[CG_SQUARES] = {0}; /* not asked for */
        for (uint32_t e = 0; e < n_exact; e++)
            p->kernels->add_row(exact + e * stride, n_channels, -products[c * products_stride + e],
                                others + c * stride, squares);
        pack_folded(p, a, n_exact + c, others + c * stride, exact_norm, row);
    }
    a->n_exact = 0;
    free(exact);
    free(products);
    return is_room ? CG_OK : CG_ERR_NO_MEMORY;
}

/* Rows come from what decoders read. All are integers, and scales are powers of two. */
static cg_status make_from_bands(const cg_profile *p, const cg_bands *bands, cg_analysis *a)
{
    *a = (cg_analysis){.n_channels = bands->n_channels,
                       .n_components = bands->n_components,
                       .n_exact = bands->n_exact};
    const size_t n_pairs = cg_analysis_pairs(a->n_channels);
    int16_t *row = malloc(((size_t)bands->n_channels + 1) * sizeof *row);
    float *others = take_others(a);
    cg_status status = CG_ERR_NO_MEMORY;
    if (row == NULL || others == NULL || !take_tables(a))
        goto done;
    /* Digits would be twice as many. */
    const bool is_folded = n_others(a) > 0 && !p->kernels->forward->takes_digits;
    for (uint32_t c = 0; c < bands->n_components; c++) {
        const unsigned shift = cg_bands_row(&p->layout, bands, c, row);
        const bool is_other = c >= a->n_exact && a->n_exact > 0;
        a->scale[c] = ldexpf(1, (int)shift - (int)bands->unit_bits);
        for (uint32_t ch = 0; ch < bands->n_channels && is_other; ch++)
            others[(c - a->n_exact) * 2 * n_pairs + ch] = (float)row[ch];
        if (is_other && is_folded)
            continue;
        a->norm = fmaxf(a->norm, norm_of(row, bands->n_channels));
        pack_integers(p, a->pairs, a->n_digits, n_pairs, c, row, bands->n_channels);
    }
    status = is_folded ? fold_leaks(p, bands, a, others, row) : make_leaks(p, a, others);
done:
    free(others);
    free(row);
    return status;
}

/* A bound on the operator norm of n_rows rows, one a column of columns[n][CG_BAND_COMPONENTS]: its
 * square is at most the largest row sum of the magnitudes of their scalar products. */
static float bound_norm(const float (*columns)[CG_BAND_COMPONENTS], uint32_t n)
{
    /* Sums of products of integers of 15 bits: exact. Of f32, n additions could lose as much of 32
     * products that cancel as what is added below. */
    double products[CG_BAND_COMPONENTS][CG_BAND_COMPONENTS] = {{0}}, most = 0;
    for (uint32_t ch = 0; ch < n; ch++) {
        for (unsigned i = 0; i < CG_BAND_COMPONENTS; i++) {
            for (unsigned k = 0; k < CG_BAND_COMPONENTS; k++)
                products[i][k] += (double)columns[ch][i] * (double)columns[ch][k];
        }
    }
    for (unsigned i = 0; i < CG_BAND_COMPONENTS; i++) {
        double sum = 0;
        for (unsigned k = 0; k < CG_BAND_COMPONENTS; k++)
            sum += fabs(products[i][k]);
        most = fmax(most, sum);
    }
    return 1.001f * (float)sqrt(most); /* more than the roundings to f32 lose */
}

/* The Euclidean norm of the largest elements, shifted, of a group's shared components: their sums
 * are no more than this times the norm of what is given. */
static double shared_norm(const cg_bands *bands)
{
    double square = 0;
    for (uint32_t c = 0; c < bands->n_shared; c++) {
        const double most = (double)(bands->most_before[c + 1] - bands->most_before[c]);
        square += most * most;
    }
    return sqrt(square);
}

/* The bounds hold for any basis, orthonormal or not. */
static cg_status make_reach(const cg_profile *p, cg_analysis *a)
{
    const cg_bands *bands = &p->joint->bands[0];
    const uint32_t n = bands->n_channels, in_band = CG_BAND_COMPONENTS;
    int16_t *row = malloc(n * sizeof *row);
    float(*columns)[CG_BAND_COMPONENTS] = malloc(n * sizeof *columns);
    a->band_reach = calloc((bands->n_components + in_band - 1) / in_band, sizeof *a->band_reach);
    const bool is_room = row != NULL && columns != NULL && a->band_reach != NULL;
    for (uint32_t first = 0; first < bands->n_components && is_room; first += in_band) {
        unsigned shift = 0; /* the band's */
        for (uint32_t i = 0; i < in_band; i++) {
            const bool is_there = first + i < bands->n_components;
            if (is_there)
                shift = cg_bands_row(&p->layout, bands, first + i, row);
            for (uint32_t ch = 0; ch < n; ch++)
                columns[ch][i] = is_there ? row[ch] : 0;
        }
        a->band_reach[first / in_band] =
            ldexpf(bound_norm((const float(*)[CG_BAND_COMPONENTS])columns, n),
                   (int)shift - (int)bands->unit_bits);
    }
    double most = INT16_MAX - 1; /* so that none is at the ends */
    for (uint32_t g = 0; g < p->n_groups; g++) {
        const double norm = shared_norm(&p->groups[g].bands[0]);
        /* Half of the 32 bits, less what rounding to integers may add. */
        most = fmin(most, 0x1p30 / fmax(norm, 1) - sqrt(p->n_shared) / 2);
    }
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++)
        a->most_reach[level] = (float)ldexp(fmax(most, 0), -(int)p->fraction_bits[level]);
    free(row);
    free(columns);
    return is_room ? CG_OK : CG_ERR_NO_MEMORY;
}

/* ---- both ---- */

/* Without the lock: the caller has been in cg_analysis_ready(), and behind that nobody writes
 * tables. */
const cg_analysis *cg_analysis_of(const cg_profile *p, const cg_group *group, unsigned matrix)
{
    return &p->analyses->each[(size_t)(group - p->groups) * p->n_matrices + matrix];
}

cg_status cg_analysis_ready(const cg_profile *p)
{
    cg_analyses *all = p->analyses;
    cg_status status = CG_OK;
    if (all == NULL) /* with anchors */
        return CG_OK;
    pthread_mutex_lock(&all->lock);
    for (uint32_t i = 0; i < all->n_bases && !all->is_ready && status == CG_OK; i++) {
        const cg_group *group = &p->groups[i / p->n_matrices];
        const unsigned matrix = i % p->n_matrices;
        status = p->version == 1 ? make_from_rows(p, group, matrix, &all->each[i])
                                 : make_from_bands(p, &group->bands[matrix], &all->each[i]);
        if (status == CG_OK && group == p->joint)
            status = make_reach(p, &all->each[i]);
    }
    /* All or none: a later call starts from nothing. */
    for (uint32_t i = 0; i < all->n_bases && status != CG_OK; i++)
        destroy(&all->each[i]);
    all->is_ready = status == CG_OK;
    pthread_mutex_unlock(&all->lock);
    return status;
}
