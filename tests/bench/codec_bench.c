/* codec_bench - decoding and encoding of chunk files, per instruction set and number of threads, as
 * JSON.
 *
 * usage: codec_bench [-p PROFILE.cgp] [-r ROUNDS] [-k KERNELS,...] [-t THREADS,...] FILE.kv...
 *
 * Files of real KV: random tensors code to a different size and speed. Each is decoded once, and
 * what comes out is encoded again at the file's own level. A round runs every variant once, one
 * after another. Timed: everything from the file's bytes in memory to its elements in tiles of
 * memory (checksums, decoder, tables, rotation), and from elements to a file's bytes in memory,
 * REPEATS times as for as many chunks; threads are started within. Not timed: the first touch of
 * tiles and scratch, which are the threads' own and are reused. Rates count the elements as bf16,
 * whatever their dtype: MB = 10^6 bytes; a second of _mb_s is the wall's, of _mb_cpu_s all threads'
 * CPU time: what a core does. encoded_bytes: of what is encoded again, to the end of each level,
 * the coarsest first; and the same with short streams (codec/codec.h).
 *
 * Roofline of klt: symbols an element; multiply_adds an element of the inverse KLT with all active
 * components, those of a joint matrix and what it gives included, and nonzero_multiply_adds, with
 * the symbols that are not zero only: matrix units do the first, the baseline the second, the
 * others something between. peak_gmac_s is what the same kernel does with operands in the first
 * cache.
 *
 * profile_open: CPU time of opening the profile's file, of the first variant from the disk or the
 * page cache, and again; and what the profile holds of memory then.
 */
#include "codec/arena.h"
#include "codec/codec.h"
#include "codec/cursor.h"
#include "codec/kernels.h"
#include "codec/klt.h"
#include "codec/section_plan.h"

#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_ROUNDS = 1000, MAX_THREADS = 64, MAX_VARIANTS = 32, REPEATS = 8 };

typedef struct chunk_file {
    const char *path;
    uint8_t *bytes;
    size_t n_bytes;
    cg_chunk_header header;
    uint32_t *tokens;
    uint8_t **tiles;             /* [n_tasks]: the elements that an encoder's tasks read */
    const uint8_t *factor_index; /* of its blocks, in bytes; NULL: none */
} chunk_file;

/* Of the wall clock, and of all threads' CPU time: a machine with other work to do tells less by
 * the first. */
typedef struct seconds {
    double wall, cpu;
} seconds;

/* What a profile costs who opens it. */
typedef struct opening {
    double cpu_s[2]; /* the first time, and again */
    size_t held_bytes;
} opening;

typedef struct variant {
    const cg_kernels *kernels;
    cg_profile *profile; /* opened for the kernels; NULL when none is given */
    unsigned n_threads;
    seconds decode[MAX_ROUNDS], encode[MAX_ROUNDS];
    opening opening;
} variant;

/* One thread's memory. */
typedef struct worker {
    struct pool *pool;
    uint8_t *scratch, *tile;
} worker;

typedef struct pool {
    const chunk_file *file;
    cg_decoder *decoders[REPEATS]; /* one of the two */
    cg_encoder *encoders[REPEATS];
    size_t scratch_bytes;
    uint32_t n_tasks;
    uint32_t n_weighings; /* layers that are weighed now; 0: tasks are run */
    atomic_uint next_task;
    worker workers[MAX_THREADS];
} pool;

static double clock_s(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static seconds since(seconds begin)
{
    return (seconds){clock_s(CLOCK_MONOTONIC) - begin.wall,
                     clock_s(CLOCK_PROCESS_CPUTIME_ID) - begin.cpu};
}

static void check(cg_status status, const char *what)
{
    if (status == CG_OK)
        return;
    fprintf(stderr, "codec_bench: %s: %s\n", what, cg_strerror(status));
    exit(1);
}

static void *take(size_t n_bytes)
{
    const size_t rounded = (n_bytes + CG_ARENA_ALIGN) / CG_ARENA_ALIGN * CG_ARENA_ALIGN;
    void *memory = aligned_alloc(CG_ARENA_ALIGN, rounded);
    check(memory != NULL ? CG_OK : CG_ERR_NO_MEMORY, "memory");
    memset(memory, 0, rounded); /* touched */
    return memory;
}

/* A plane of a layer, in the tile of its task. */
static const uint8_t *layer_of(const pool *p, const cg_encoder *encoder, uint32_t layer,
                               uint32_t plane)
{
    for (uint32_t task = 0;; task++) {
        const cg_task_shape s = cg_encoder_task_shape(encoder, task);
        const size_t layer_bytes = s.elements_bytes / s.n_planes / s.n_layers;
        if (layer - s.first_layer < s.n_layers && plane - s.plane < s.n_planes)
            return p->file->tiles[task] +
                   ((plane - s.plane) * s.n_layers + layer - s.first_layer) * layer_bytes;
    }
}

static void weigh(const pool *p, cg_encoder *encoder, uint32_t layer, void *scratch)
{
    check(cg_encoder_weigh(encoder, layer, scratch, p->scratch_bytes,
                           layer_of(p, encoder, layer, CG_K), layer_of(p, encoder, layer, CG_V)),
          p->file->path);
}

static void *work(void *arg)
{
    const worker *w = arg;
    pool *p = w->pool;
    const uint32_t n_tasks = p->n_weighings > 0 ? p->n_weighings : p->n_tasks;
    for (;;) {
        const uint32_t next = atomic_fetch_add(&p->next_task, 1), chunk = next / n_tasks,
                       task = next % n_tasks;
        if (chunk >= REPEATS)
            return NULL;
        if (p->n_weighings > 0) {
            weigh(p, p->encoders[chunk], task, w->scratch);
            continue;
        }
        check(p->decoders[0] != NULL
                  ? cg_decoder_run(p->decoders[chunk], task, w->scratch, p->scratch_bytes, w->tile)
                  : cg_encoder_run(p->encoders[chunk], task, w->scratch, p->scratch_bytes,
                                   p->file->tiles[task]),
              p->file->path);
    }
}

static void run_tasks(pool *p, unsigned n_threads)
{
    pthread_t threads[MAX_THREADS];
    atomic_store(&p->next_task, 0);
    for (unsigned i = 1; i < n_threads; i++)
        check(pthread_create(&threads[i], NULL, work, &p->workers[i]) == 0 ? CG_OK
                                                                           : CG_ERR_NO_MEMORY,
              "a thread");
    (void)work(&p->workers[0]);
    for (unsigned i = 1; i < n_threads; i++)
        (void)pthread_join(threads[i], NULL);
}

static cg_decoder *new_decoder(const chunk_file *file, const cg_profile *profile)
{
    cg_decoder *decoder;
    check(cg_decoder_new(profile, file->bytes, file->n_bytes, &decoder), file->path);
    return decoder;
}

/* more: CG_SHORT_STREAMS, or 0. */
static cg_encoder *new_encoder(const chunk_file *file, const cg_profile *profile, unsigned more)
{
    cg_encoder *encoder;
    const cg_chunk_header *h = &file->header;
    const unsigned levels = (2u << h->coarsest) - (1u << h->level);
    check(cg_encoder_new(h->level == CG_L0 ? NULL : profile, h, file->tokens,
                         (uint8_t)(levels | (h->coarsest > h->level ? CG_NESTED : 0u) | more),
                         &encoder),
          file->path);
    if (file->factor_index != NULL)
        check(cg_encoder_set_step_factors(encoder, file->factor_index), file->path);
    return encoder;
}

static seconds decode(pool *p, const variant *v)
{
    const seconds begin = since((seconds){0});
    for (unsigned i = 0; i < REPEATS; i++)
        p->decoders[i] = new_decoder(p->file, v->profile);
    run_tasks(p, v->n_threads);
    for (unsigned i = 0; i < REPEATS; i++) {
        cg_decoder_free(p->decoders[i]);
        p->decoders[i] = NULL;
    }
    return since(begin);
}

static seconds encode(pool *p, const variant *v)
{
    const seconds begin = since((seconds){0});
    for (unsigned i = 0; i < REPEATS; i++)
        p->encoders[i] = new_encoder(p->file, v->profile, 0);
    p->n_weighings = cg_encoder_n_weighings(p->encoders[0]);
    if (p->n_weighings > 0)
        run_tasks(p, v->n_threads);
    p->n_weighings = 0;
    run_tasks(p, v->n_threads);
    for (unsigned i = 0; i < REPEATS; i++) {
        uint8_t *bytes;
        size_t n_bytes;
        check(cg_encoder_finish(p->encoders[i], (cg_level)p->file->header.level, &bytes, &n_bytes),
              p->file->path);
        free(bytes);
        cg_encoder_free(p->encoders[i]);
        p->encoders[i] = NULL;
    }
    return since(begin);
}

/* What the file's elements take when they are encoded again. */
static void print_encoded(const char *name, pool *p, const cg_profile *profile, unsigned more)
{
    uint8_t *bytes;
    size_t n_bytes;
    cg_chunk_header header;
    cg_encoder *e = new_encoder(p->file, profile, more);
    for (uint32_t layer = 0; layer < cg_encoder_n_weighings(e); layer++)
        weigh(p, e, layer, p->workers[0].scratch);
    for (uint32_t task = 0; task < p->n_tasks; task++)
        check(
            cg_encoder_run(e, task, p->workers[0].scratch, p->scratch_bytes, p->file->tiles[task]),
            p->file->path);
    check(cg_encoder_finish(e, (cg_level)p->file->header.level, &bytes, &n_bytes), p->file->path);
    check(cg_chunk_header_parse(bytes, n_bytes, &header), p->file->path);
    printf(", \"%s\": [", name);
    for (unsigned level = header.coarsest; level > header.level; level--)
        printf("%llu, ", (unsigned long long)header.level_bytes[level]);
    printf("%zu]", n_bytes);
    free(bytes);
    cg_encoder_free(e);
}

static void read_file(const char *path, chunk_file *file)
{
    cg_chunk chunk;
    FILE *stream = fopen(path, "rb");
    *file = (chunk_file){.path = path};
    if (stream == NULL || fseek(stream, 0, SEEK_END) != 0) {
        fprintf(stderr, "codec_bench: %s: %s\n", path, strerror(errno));
        exit(2);
    }
    const long n_bytes = ftell(stream);
    rewind(stream);
    file->n_bytes = n_bytes > 0 ? (size_t)n_bytes : 0;
    file->bytes = take(file->n_bytes);
    check(fread(file->bytes, 1, file->n_bytes, stream) == file->n_bytes ? CG_OK : CG_ERR_IO, path);
    (void)fclose(stream);
    check(cg_chunk_open(file->bytes, file->n_bytes, &chunk), path);
    file->header = chunk.header;
    const cg_section second = cg_chunk_section(&chunk, 1);
    if (second.kind == CG_SECTION_STEPS)
        file->factor_index = file->bytes + second.offset;
    file->tokens = take(chunk.header.n_tokens * sizeof *file->tokens);
    check(cg_chunk_tokens(&chunk, file->tokens), path);
}

/* Decodes the file into its tiles and readies the workers' memory. */
static void prepare(chunk_file *file, const variant *variants, unsigned n_variants,
                    unsigned most_threads, pool *p)
{
    cg_decoder *decoder = new_decoder(file, variants[0].profile);
    size_t tile_bytes = 0;
    *p = (pool){.file = file, .n_tasks = cg_decoder_n_tasks(decoder)};
    for (unsigned i = 0; i < n_variants; i++) {
        cg_decoder *d = new_decoder(file, variants[i].profile);
        cg_encoder *e = new_encoder(file, variants[i].profile, 0);
        const size_t bytes[2] = {cg_decoder_scratch_bytes(d), cg_encoder_scratch_bytes(e)};
        for (unsigned k = 0; k < 2; k++)
            p->scratch_bytes = bytes[k] > p->scratch_bytes ? bytes[k] : p->scratch_bytes;
        cg_encoder_free(e);
        cg_decoder_free(d);
    }
    void *scratch = take(p->scratch_bytes);
    file->tiles = take(p->n_tasks * sizeof *file->tiles);
    for (uint32_t task = 0; task < p->n_tasks; task++) {
        const size_t bytes = cg_decoder_task_shape(decoder, task).elements_bytes;
        tile_bytes = bytes > tile_bytes ? bytes : tile_bytes;
        file->tiles[task] = take(bytes);
        check(cg_decoder_run(decoder, task, scratch, p->scratch_bytes, file->tiles[task]),
              file->path);
    }
    for (unsigned i = 0; i < most_threads; i++)
        p->workers[i] = (worker){p, take(p->scratch_bytes), take(tile_bytes)};
    free(scratch);
    cg_decoder_free(decoder);
}

static void release(chunk_file *file, unsigned most_threads, pool *p)
{
    for (unsigned i = 0; i < most_threads; i++) {
        free(p->workers[i].scratch);
        free(p->workers[i].tile);
    }
    for (uint32_t task = 0; task < p->n_tasks; task++)
        free(file->tiles[task]);
    free(file->tiles);
    free(file->tokens);
    free(file->bytes);
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_rates(const char *name, const seconds *rounds, bool cpu, unsigned n_rounds,
                        double mb)
{
    double sorted[MAX_ROUNDS];
    for (unsigned i = 0; i < n_rounds; i++)
        sorted[i] = cpu ? rounds[i].cpu : rounds[i].wall;
    qsort(sorted, n_rounds, sizeof *sorted, by_value);
    printf(", \"%s\": {\"min\": %.1f, \"median\": %.1f, \"max\": %.1f}", name,
           mb / sorted[n_rounds - 1], mb / sorted[n_rounds / 2], mb / sorted[0]);
}

/* 10^9 multiply-adds a second of the kernel's inverse KLT, its operands in the first cache: the
 * best of many runs. */
static double peak_gmac_s(const cg_kernels *kernels)
{
    enum { DEEP = 6 * CG_TILE, N_LIST = 64, N_ROWS = 16 };
    uint16_t *panel = take(DEEP * CG_TILE * sizeof *panel),
             *tiles = take(DEEP * CG_TILE * sizeof *tiles);
    float *y = take((size_t)CG_DCT * CG_TILE * CG_TILE * sizeof *y);
    uint32_t *basis = take((size_t)N_LIST * CG_PANEL_CHANNELS / 2 * sizeof *basis);
    uint16_t components[DEEP / CG_TILE] = {0};
    cg_nonzero list[N_LIST];
    cg_quad quads[CG_SLAB_QUADS];
    cg_quad_row rows[N_ROWS];
    cg_tiled_symbols symbols[CG_DCT];
    double best = 0;
    for (unsigned f = 0; f < CG_DCT; f++)
        symbols[f] = (cg_tiled_symbols){tiles, components, DEEP / CG_TILE};
    for (unsigned i = 0; i < N_LIST; i++)
        list[i] = (cg_nonzero){i, 1};
    for (unsigned i = 0; i < CG_SLAB_QUADS; i++)
        quads[i] = (cg_quad){i, {1, 1, 1, 1}};
    for (unsigned i = 0; i < N_ROWS; i++)
        rows[i] = (cg_quad_row){.quads = quads, .n_quads = CG_SLAB_QUADS};
    for (unsigned run = 0; run < 200; run++) {
        double n = 0;
        const double begin = clock_s(CLOCK_MONOTONIC);
        for (unsigned i = 0; i < 50; i++) {
            if (kernels->inverse->synthesize != NULL) {
                kernels->inverse->synthesize(symbols, CG_TILE, panel, y, (size_t)CG_TILE * CG_TILE,
                                             CG_TILE);
                n += (double)CG_DCT * DEEP * CG_TILE * CG_TILE;
            } else if (kernels->inverse->accumulate_quads != NULL) {
                kernels->inverse->accumulate_quads((const uint8_t *)basis, rows, N_ROWS,
                                                   CG_PANEL_CHANNELS / 16, 1, true, y,
                                                   CG_PANEL_CHANNELS);
                n += (double)N_ROWS * CG_SLAB_QUADS * CG_QUAD_COMPONENTS * CG_PANEL_CHANNELS;
            } else {
                kernels->inverse->accumulate(basis, list, N_LIST, CG_PANEL_CHANNELS / 32, y);
                n += (double)N_LIST * CG_PANEL_CHANNELS;
            }
        }
        const double rate = n / (clock_s(CLOCK_MONOTONIC) - begin);
        best = rate > best ? rate : best;
    }
    free(panel);
    free(tiles);
    free(y);
    free(basis);
    return 1e-9 * best;
}

/* The section of a level and basis: of a task, or the joint matrix. */
static const cg_section *section_of(const cg_profile *profile, const cg_chunk *chunk,
                                    const cg_section *sections, uint32_t basis, unsigned level)
{
    const cg_chunk_header *h = &chunk->header;
    return &sections[basis < profile->n_groups * profile->n_matrices
                         ? cg_section_plan_index(profile, h, basis, level)
                         : cg_section_plan_joint_index(profile, h, level)];
}

/* Of one basis: the symbols that are decoded, at all levels that the chunk holds, and those of its
 * own level that are not zero. */
static void count_symbols(const cg_profile *profile, const cg_chunk *chunk,
                          const cg_section *sections, const cg_block_order *order, uint32_t basis,
                          double *coded, double *nonzero)
{
    const cg_chunk_header *h = &chunk->header;
    const cg_group *group = &profile->groups[basis / profile->n_matrices];
    const size_t n_blocks = order->n_blocks;
    cg_symbols symbols = {0}, coarse;
    void *memory[CG_N_LEVELS] = {0};
    for (unsigned level = h->coarsest; level >= h->level; level--) {
        const cg_level_columns *columns = &group->columns[level - 1][basis % profile->n_matrices];
        const cg_section *section = section_of(profile, chunk, sections, basis, level);
        size_t used_bytes;
        memory[level] = take(cg_symbols_bytes(columns, n_blocks));
        coarse = symbols;
        symbols = cg_symbols_lay(columns, level < h->coarsest ? &coarse : NULL, order->runs,
                                 order->n_runs, memory[level]);
        check(cg_rans_decode(profile->classes, symbols.strips, symbols.n_strips, order->runs,
                             order->n_runs, cg_profile_align(profile),
                             chunk->bytes + section->offset, section->bytes, &used_bytes),
              "symbols");
        *coded += (double)columns->n_columns * (double)n_blocks;
    }
    for (size_t i = 0; i < symbols.columns->n_columns * n_blocks; i++)
        *nonzero += symbols.cells[0][i] != 0;
    for (unsigned level = 0; level < CG_N_LEVELS; level++)
        free(memory[level]);
}

/* What the joint matrix gives: the products of it, and those with numbers that are not zero. */
static void count_given(const cg_profile *profile, const cg_chunk *chunk,
                        const cg_section *sections, const cg_block_order *order, double *products,
                        double *nonzero_products)
{
    const cg_chunk_header *h = &chunk->header;
    const size_t n_blocks = cg_count_blocks(h->n_tokens), n_channels = profile->joint->n_channels;
    void *scratch =
        take(cg_klt_decode_joint_scratch_bytes(profile, h->level, h->coarsest, h->n_tokens));
    int16_t *given = take(cg_klt_given_bytes(profile, h->n_tokens));
    cg_coded coded[CG_N_LEVELS] = {0};
    for (unsigned level = h->level; level <= h->coarsest; level++) {
        const cg_section *section =
            section_of(profile, chunk, sections, cg_profile_n_bases(profile) - 1, level);
        coded[level] = (cg_coded){chunk->bytes + section->offset, section->bytes};
    }
    check(cg_klt_decode_joint(profile, order, h->level, h->coarsest, coded, scratch, given),
          "joint matrix");
    for (size_t i = 0; i < CG_DCT * n_blocks * n_channels; i++) {
        const cg_group *group = &profile->groups[i % n_channels / profile->n_shared];
        if (i % profile->n_shared >= profile->n_given[h->level - 1][i / (n_blocks * n_channels)])
            continue;
        *products += group->n_channels;
        *nonzero_products += given[i] != 0 ? group->n_channels : 0;
    }
    free(given);
    free(scratch);
}

static void print_roofline(const chunk_file *file, const cg_profile *profile)
{
    cg_chunk chunk;
    check(cg_chunk_open(file->bytes, file->n_bytes, &chunk), file->path);
    cg_section *sections = take(chunk.header.n_sections * sizeof *sections);
    cg_block_order order;
    cg_chunk_sections(&chunk, sections);
    check(cg_section_plan_block_order(profile, &chunk, sections, &order), file->path);
    const size_t n_blocks = order.n_blocks;
    double symbols = 0, products = 0, nonzero_products = 0;
    for (uint32_t i = 0; i < cg_profile_n_bases(profile); i++) {
        const cg_group *group = &profile->groups[i / profile->n_matrices];
        double nonzero = 0;
        count_symbols(profile, &chunk, sections, &order, i, &symbols, &nonzero);
        products +=
            (double)group->columns[chunk.header.level - 1][i % profile->n_matrices].n_columns *
            (double)n_blocks * group->n_channels;
        nonzero_products += nonzero * group->n_channels;
    }
    if (profile->joint != NULL)
        count_given(profile, &chunk, sections, &order, &products, &nonzero_products);
    const double n = (double)cg_geometry_elements(&chunk.header.geometry, chunk.header.n_tokens);
    printf(", \"coarsest\": %u, \"symbols\": %.3f, \"multiply_adds\": %.1f, "
           "\"nonzero_multiply_adds\": %.1f",
           chunk.header.coarsest, symbols / n, products / n, nonzero_products / n);
    cg_block_order_destroy(&order);
    free(sections);
}

static void bench_file(const char *path, variant *variants, unsigned n_variants, unsigned n_rounds,
                       unsigned most_threads, bool is_first)
{
    chunk_file file;
    pool *p = take(sizeof *p);
    read_file(path, &file);
    if (file.header.level != CG_L0 && variants[0].profile == NULL) {
        fprintf(stderr, "codec_bench: %s: its level is lossy: -p PROFILE.cgp is wanted\n", path);
        exit(2);
    }
    prepare(&file, variants, n_variants, most_threads, p);
    for (unsigned round = 0; round < n_rounds + 1; round++) { /* the first warms up */
        for (unsigned i = 0; i < n_variants; i++) {
            variant *v = &variants[i];
            cg_kernels_use(v->kernels);
            v->decode[round > 0 ? round - 1 : 0] = decode(p, v);
            v->encode[round > 0 ? round - 1 : 0] = encode(p, v);
        }
    }
    const size_t n_elements = cg_geometry_elements(&file.header.geometry, file.header.n_tokens);
    for (unsigned i = 0; i < n_variants; i++) {
        const variant *v = &variants[i];
        const bool is_lossy = file.header.level != CG_L0;
        printf("%s\n  {\"codec\": \"%s\", \"level\": %u, \"dtype\": \"%s\", \"kernels\": \"%s\", "
               "\"threads\": %u",
               is_first && i == 0 ? "" : ",", is_lossy ? cg_profile_preset(v->profile) : "lossless",
               file.header.level, cg_dtype_name(file.header.geometry.dtype), v->kernels->name,
               v->n_threads);
        printf(", \"chunk_tokens\": %u, \"chunk_bytes\": %zu, \"bits_per_element\": %.3f",
               file.header.n_tokens, file.n_bytes, 8 * (double)file.n_bytes / (double)n_elements);
        if (is_lossy && v->profile->preset->has_bases)
            print_roofline(&file, v->profile);
        print_encoded("encoded_bytes", p, v->profile, 0);
        print_encoded("encoded_bytes_short_streams", p, v->profile, CG_SHORT_STREAMS);
        const double mb = REPEATS * 2e-6 * (double)n_elements;
        print_rates("decode_mb_s", v->decode, false, n_rounds, mb);
        print_rates("encode_mb_s", v->encode, false, n_rounds, mb);
        print_rates("decode_mb_cpu_s", v->decode, true, n_rounds, mb);
        print_rates("encode_mb_cpu_s", v->encode, true, n_rounds, mb);
        printf("}");
    }
    release(&file, most_threads, p);
    free(p);
}

static void print_cpu(void)
{
    char line[256];
    FILE *cpuinfo = fopen("/proc/cpuinfo", "r");
    while (cpuinfo != NULL && fgets(line, sizeof line, cpuinfo) != NULL) {
        if (strncmp(line, "model name", 10) == 0 && strchr(line, ':') != NULL) {
            line[strcspn(line, "\n")] = 0;
            printf("\"cpu\": \"%s\", ", strchr(line, ':') + 2);
            break;
        }
    }
    if (cpuinfo != NULL)
        (void)fclose(cpuinfo);
}

static size_t held_bytes(void)
{
    const struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
}

static void open_profile(variant *v, const char *path)
{
    for (unsigned i = 0; i < 2; i++) {
        cg_profile_free(v->profile);
        const size_t held_before = held_bytes();
        const seconds begin = since((seconds){0});
        check(cg_profile_open_file(path, &v->profile), path);
        v->opening.cpu_s[i] = since(begin).cpu;
        v->opening.held_bytes = held_bytes() - held_before;
    }
}

static void print_openings(const variant *variants, unsigned n_variants)
{
    printf("}, \"profile_open\": {");
    for (unsigned i = 0; i < n_variants && variants[i].n_threads == variants[0].n_threads; i++) {
        const opening *o = &variants[i].opening;
        printf("%s\"%s\": {\"first_cpu_s\": %.4f, \"again_cpu_s\": %.4f, \"held_bytes\": %zu}",
               i > 0 ? ", " : "", variants[i].kernels->name, o->cpu_s[0], o->cpu_s[1],
               o->held_bytes);
    }
}

int main(int argc, char **argv)
{
    static variant variants[MAX_VARIANTS];
    const char *profile_path = NULL;
    char kernels[] = "baseline,avx2,avx512,vnni,amx", *kernel_list = kernels, threads[] = "1,2",
         *thread_list = threads;
    unsigned n_rounds = 21, n_variants = 0, most_threads = 1;
    bool is_usage_wanted = false; /* by -h, too */
    opterr = 0;
    for (int option; (option = getopt(argc, argv, "p:r:k:t:")) != -1;) {
        switch (option) {
        case 'p': profile_path = optarg; break;
        case 'r': n_rounds = (unsigned)atoi(optarg); break;
        case 'k': kernel_list = optarg; break;
        case 't': thread_list = optarg; break;
        default: is_usage_wanted = true;
        }
    }
    if (is_usage_wanted || optind == argc || n_rounds < 1 || n_rounds > MAX_ROUNDS) {
        fprintf(stderr,
                "usage: codec_bench [-p PROFILE.cgp] [-r ROUNDS] [-k KERNELS,...] [-t THREADS,...] "
                "FILE.kv...\n");
        return 2;
    }
    char *kernel_at, *thread_at;
    for (char *t = strtok_r(thread_list, ",", &thread_at); t != NULL;
         t = strtok_r(NULL, ",", &thread_at)) {
        const int n = atoi(t);
        const unsigned n_threads = n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : (unsigned)n;
        char copy[64];
        snprintf(copy, sizeof copy, "%s", kernel_list);
        for (char *k = strtok_r(copy, ",", &kernel_at); k != NULL;
             k = strtok_r(NULL, ",", &kernel_at)) {
            const cg_kernels *named = cg_kernels_named(k);
            if (named == NULL || n_variants == MAX_VARIANTS)
                continue;
            variant *v = &variants[n_variants++];
            *v = (variant){.kernels = named, .n_threads = n_threads};
            cg_kernels_use(named);
            if (profile_path != NULL)
                open_profile(v, profile_path);
        }
        most_threads = n_threads > most_threads ? n_threads : most_threads;
    }
    if (n_variants == 0) {
        fprintf(stderr, "codec_bench: -k %s -t %s: none of them runs here\n", kernel_list,
                thread_list);
        return 2;
    }
    printf("{");
    print_cpu();
    printf("\"rounds\": %u, \"peak_gmac_s\": {", n_rounds);
    for (unsigned i = 0; i < n_variants && variants[i].n_threads == variants[0].n_threads; i++)
        printf("%s\"%s\": %.1f", i > 0 ? ", " : "", variants[i].kernels->name,
               peak_gmac_s(variants[i].kernels));
    if (profile_path != NULL)
        print_openings(variants, n_variants);
    printf("}, \"rows\": [");
    for (int i = optind; i < argc; i++)
        bench_file(argv[i], variants, n_variants, n_rounds, most_threads, i == optind);
    printf("\n]}\n");
    for (unsigned i = 0; i < n_variants; i++)
        cg_profile_free(variants[i].profile);
    return 0;
}
