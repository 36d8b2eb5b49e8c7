#include "codec/analysis.h"

#include "codec/bf16.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct cg_analyses {
    pthread_mutex_t lock; /* of is_ready, and of each[] until then */
    bool is_ready;
    uint32_t n_bases;
    cg_analysis each[]; /* [n_groups][n_matrices] */
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
    free(a->exact);
    free(a->pairs);
    free(a->scale);
    free(a->ones);
    free(a->n_digits);
    free(a->channel_digits);
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

/* The tables, still zeros. */
static bool take_tables(cg_analysis *a)
{
    const size_t n_pairs = cg_analysis_pairs(a->n_channels),
                 n_exact_pairs = cg_analysis_exact_pairs(a);
    a->pairs = take_zeros((a->n_components + 15u) / 16 + 1, n_pairs * 16 * sizeof *a->pairs);
    a->exact = take_zeros((a->n_channels + 15u) / 16 + 1, n_exact_pairs * 16 * sizeof *a->exact);
    a->scale = calloc((a->n_components + 15) / 16 + 1, 16 * sizeof *a->scale);
    return a->pairs != NULL && a->exact != NULL && a->scale != NULL;
}

/* Neighbouring channels stand side by side, since matrix units and integer products add up two of
 * them at once. row: of component c, 16 bits an element. */
static void pack_row(cg_analysis *a, uint32_t c, const uint16_t *row)
{
    const size_t n_pairs = cg_analysis_pairs(a->n_channels),
                 n_exact_pairs = cg_analysis_exact_pairs(a);
    uint32_t *out = a->pairs + c / 16 * n_pairs * 16 + c % 16;
    for (uint32_t ch = 0; ch < a->n_channels; ch++)
        out[ch / 2 * 16] |= (uint32_t)row[ch] << (ch % 2 * 16);
    for (uint32_t ch = 0; ch < a->n_channels && c < a->n_exact; ch++)
        a->exact[(ch / 16 * n_exact_pairs + c / 2) * 16 + ch % 16] |= (uint32_t)row[ch]
                                                                      << (c % 2 * 16);
}

/* An element in the n-th sixteen, lane `lane` of it, at place i of n_places that are summed over:
 * as digits. */
static void pack_digits(uint32_t *table, uint8_t *n_digits, size_t n_pairs, uint32_t n,
                        uint32_t lane, uint32_t i, int16_t element)
{
    uint8_t *low = (uint8_t *)(table + n * n_pairs * 16) + i / 4 * 64 + lane * 4 + i % 4;
    const int high = (element + 128) >> 8;
    low[0] = (uint8_t)element;
    low[n_pairs * 32] = (uint8_t)high;
    if (high != 0)
        n_digits[n] = 2;
}

/* pack_row() in digits. */
static void pack_row_digits(cg_analysis *a, uint32_t c, const int16_t *row)
{
    for (uint32_t ch = 0; ch < a->n_channels; ch++) {
        pack_digits(a->pairs, a->n_digits, cg_analysis_pairs(a->n_channels), c / 16, c % 16, ch,
                    row[ch]);
        if (c < a->n_exact)
            pack_digits(a->exact, a->channel_digits, cg_analysis_exact_pairs(a), ch / 16, ch % 16,
                        c, row[ch]);
    }
}

/* ---- version 1 ---- */

/* To an integer; |x| is below 2^22. Added to 1.5 * 2^23, a float has no bits left for a fraction.
 */
static float nearest(float x)
{
    return x + 0x1.8p23f - 0x1.8p23f;
}

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

static cg_status make_from_rows(const cg_profile *p, const cg_group *group, unsigned plane,
                                cg_analysis *a)
{
    cg_basis_rows rows = {.n_channels = group->n_channels,
                          .n_components = group->n_components[plane]};
    const size_t n_elements = (size_t)rows.n_components * rows.n_channels;
    rows.rows = malloc((n_elements + 1) * sizeof *rows.rows);
    rows.scale = calloc((rows.n_components + 15) / 16 + 1, 16 * sizeof *rows.scale);
    cg_status status = rows.rows != NULL && rows.scale != NULL ? CG_OK : CG_ERR_NO_MEMORY;
    if (status == CG_OK)
        status = cg_profile_read_rows(p, group, plane, &rows);
    if (status != CG_OK)
        goto done;
    *a = (cg_analysis){
        .n_channels = rows.n_channels, .n_components = rows.n_components, .n_exact = rows.n_exact};
    status = CG_ERR_NO_MEMORY;
    if (!take_tables(a))
        goto done;
    memcpy(a->scale, rows.scale, rows.n_components * sizeof *a->scale);
    if (p->kernels->forward->project_narrow != NULL)
        find_numbers(&rows, a);
    for (uint32_t c = 0; c < rows.n_components; c++)
        pack_row(a, c, rows.rows + (size_t)c * rows.n_channels);
    status = CG_OK;
done:
    free(rows.rows);
    free(rows.scale);
    return status;
}

/* ---- version 2 ---- */

static cg_status make_from_bands(const cg_profile *p, const cg_bands *bands, cg_analysis *a)
{
    *a = (cg_analysis){.n_channels = bands->n_channels,
                       .n_components = bands->n_components,
                       .n_exact = bands->n_exact};
    int16_t *row = malloc(((size_t)bands->n_channels + 1) * sizeof *row);
    float *channel_square = calloc((size_t)bands->n_channels + 1, sizeof *channel_square);
    cg_status status = CG_ERR_NO_MEMORY;
    if (row == NULL || channel_square == NULL || !take_tables(a))
        goto done;
    const size_t n_ones = cg_padded(a->n_channels, 16);
    const size_t n_sixteens = cg_padded(a->n_components, 16) / 16;
    a->ones = malloc((n_ones + 1) * sizeof *a->ones);
    a->n_digits = malloc(n_sixteens + 1);
    a->channel_digits = malloc(n_ones / 16 + 1);
    if (a->ones == NULL || a->n_digits == NULL || a->channel_digits == NULL)
        goto done;
    for (size_t ch = 0; ch < n_ones; ch++)
        a->ones[ch] = 1;
    memset(a->n_digits, 1, n_sixteens);
    memset(a->channel_digits, 1, n_ones / 16);
    for (uint32_t c = 0; c < bands->n_components; c++) {
        const unsigned shift = cg_bands_row(&p->layout, bands, c, row);
        float *norm = c < a->n_exact ? &a->exact_norm : &a->norm;
        float square = 0;
        for (uint32_t ch = 0; ch < bands->n_channels; ch++) {
            square += (float)row[ch] * (float)row[ch];
            if (c < a->n_exact)
                channel_square[ch] += (float)row[ch] * (float)row[ch];
        }
        *norm = fmaxf(*norm, sqrtf(square));
        a->scale[c] = ldexpf(1, (int)shift - (int)bands->unit_bits);
        if (p->kernels->forward->takes_digits)
            pack_row_digits(a, c, row);
        else
            pack_row(a, c, (const uint16_t *)row);
    }
    for (uint32_t ch = 0; ch < bands->n_channels; ch++)
        a->channel_norm = fmaxf(a->channel_norm, sqrtf(channel_square[ch]));
    status = CG_OK;
done:
    free(channel_square);
    free(row);
    return status;
}

/* ---- both ---- */

const cg_analysis *cg_analysis_of(const cg_profile *p, const cg_group *group, unsigned matrix)
{
    return &p->analyses->each[(size_t)(group - p->groups) * p->n_matrices + matrix];
}

cg_status cg_analysis_ready(const cg_profile *p)
{
    cg_analyses *all = p->analyses;
    cg_status status = CG_OK;
    if (p->token_transform != CG_TOKENS_DCT)
        return CG_OK;
    pthread_mutex_lock(&all->lock);
    for (uint32_t i = 0; i < all->n_bases && !all->is_ready && status == CG_OK; i++) {
        const cg_group *group = &p->groups[i / p->n_matrices];
        const unsigned matrix = i % p->n_matrices;
        status = p->version == 1 ? make_from_rows(p, group, matrix, &all->each[i])
                                 : make_from_bands(p, &group->bands[matrix], &all->each[i]);
    }
    for (uint32_t i = 0; i < all->n_bases && status != CG_OK; i++)
        destroy(&all->each[i]);
    all->is_ready = status == CG_OK;
    pthread_mutex_unlock(&all->lock);
    return status;
}
