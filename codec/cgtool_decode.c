/* codec/cgtool_decode.c - `cgtool decode` and `transcode`: chunks to tensors, and to coarser
 * chunks. */
#include "codec/cgtool.h"

#include "codec/codec.h"
#include "codec/cursor.h"
#include "codec/safetensors.h"

#include <stdlib.h>
#include <string.h>

static const char *const CHUNK_SUFFIXES[] = {".kv", NULL};

static const char *dtype_name(unsigned dtype)
{
    return dtype == CG_DTYPE_BF16       ? "BF16"
           : dtype == CG_DTYPE_FP16     ? "F16"
           : dtype == CG_DTYPE_FP8_E4M3 ? "F8_E4M3"
           : dtype == CG_DTYPE_FP8_E5M2 ? "F8_E5M2"
                                        : "F32";
}

/* A chunk file, or a directory's *.kv in the order of their names. */
static int input_paths(const char *path, cg_tool_paths *paths)
{
    *paths = (cg_tool_paths){0};
    if (cg_tool_is_directory(path)) {
        const int code = cg_tool_list(path, CHUNK_SUFFIXES, false, paths);
        if (code == CG_TOOL_OK && paths->n_paths == 0) {
            cg_tool_complain(path, "holds no *.kv. Of a context, name the folder of a level");
            return CG_TOOL_BAD_DATA;
        }
        return code;
    }
    paths->path = malloc(sizeof *paths->path);
    if (paths->path == NULL || (paths->path[0] = strdup(path)) == NULL)
        return cg_tool_fail(path, CG_ERR_NO_MEMORY);
    paths->n_paths = 1;
    return CG_TOOL_OK;
}

static int open_chunk(const char *path, cg_tool_file *file, cg_chunk_header *header)
{
    int code = cg_tool_read(path, file);
    if (code != CG_TOOL_OK)
        return code;
    if ((code = cg_tool_fail(path, cg_chunk_verify(file->bytes, file->n_bytes))) != CG_TOOL_OK)
        return code;
    cg_chunk_header_parse(file->bytes, file->n_bytes, header);
    return cg_tool_fail(path, cg_chunk_header_cut(header, file->n_bytes));
}

static bool follows(const cg_chunk_header *before, const cg_chunk_header *header)
{
    return cg_geometry_equal(&before->geometry, &header->geometry) &&
           header->first_position == before->first_position + before->n_tokens &&
           cg_key_equal(&before->key, &header->parent);
}

/* Decodes a whole chunk to memory that the caller frees. */
static int decode_chunk(const cg_tool_options *options, const char *path, const cg_tool_file *file,
                        const cg_chunk_header *h, cg_profile **profile, cg_tool_file *elements_out)
{
    *elements_out = (cg_tool_file){0};
    const int code = cg_tool_profile_for(options, path, h, profile);
    if (code != CG_TOOL_OK)
        return code;
    const size_t n_bytes =
        (size_t)cg_geometry_elements(&h->geometry, h->n_tokens) * cg_dtype_bytes(h->geometry.dtype);
    uint8_t *elements = malloc(n_bytes);
    if (elements == NULL)
        return cg_tool_fail(path, CG_ERR_NO_MEMORY);
    const cg_status status = cg_decode_chunk(h->level == CG_L0 ? NULL : *profile, file->bytes,
                                             file->n_bytes, options->n_threads, elements, n_bytes);
    *elements_out = (cg_tool_file){elements, n_bytes};
    return cg_tool_fail(path, status);
}

/* What decode collects: K and V as in the output file. */
typedef struct collection {
    uint8_t *plane[CG_N_PLANES];
    uint8_t *ids; /* I64 */
    size_t n_tokens;
    cg_geometry geometry;
    cg_chunk_header first; /* the first chunk's */
    unsigned worst_level;  /* of all, and of what they were computed on */
    bool has_extra;        /* some depend on more than their tokens */
} collection;

static size_t row_bytes(const cg_geometry *g)
{
    return cg_geometry_channels(g) * cg_dtype_bytes(g->dtype);
}

static cg_status collection_new(const cg_chunk_header *first, size_t n_tokens, collection *all)
{
    const cg_geometry *geometry = &first->geometry;
    *all = (collection){.n_tokens = n_tokens, .geometry = *geometry, .first = *first};
    size_t n_bytes;
    if (!cg_size_mul(row_bytes(geometry) * geometry->n_layers, n_tokens, &n_bytes))
        return CG_ERR_NO_MEMORY;
    all->plane[CG_K] = malloc(n_bytes);
    all->plane[CG_V] = malloc(n_bytes);
    all->ids = malloc(8 * n_tokens);
    return all->plane[CG_K] == NULL || all->plane[CG_V] == NULL || all->ids == NULL
               ? CG_ERR_NO_MEMORY
               : CG_OK;
}

static void collection_free(collection *all)
{
    free(all->plane[CG_K]);
    free(all->plane[CG_V]);
    free(all->ids);
}

/* Puts a chunk's elements and token ids at token at. */
static cg_status collect(collection *all, size_t at, const cg_tool_file *file,
                         const uint8_t *elements)
{
    cg_chunk chunk;
    cg_status status = cg_chunk_open(file->bytes, file->n_bytes, &chunk);
    if (status != CG_OK)
        return status;
    static const cg_key none;
    const cg_chunk_header *h = &chunk.header;
    const size_t n = h->n_tokens, n_row = row_bytes(&all->geometry);
    const unsigned worst = h->prefix_level > h->level ? h->prefix_level : h->level;
    if (all->worst_level < worst)
        all->worst_level = worst;
    all->has_extra |= !cg_key_equal(&h->extra, &none) || h->cache_scales != 0;
    uint32_t *tokens = malloc(n * sizeof *tokens);
    if (tokens == NULL)
        return CG_ERR_NO_MEMORY;
    if ((status = cg_chunk_tokens(&chunk, tokens)) == CG_OK) {
        for (size_t i = 0; i < n; i++)
            cg_put_le(all->ids + 8 * (at + i), 8, tokens[i]);
        for (size_t layer = 0; layer < all->geometry.n_layers; layer++) {
            for (size_t plane = 0; plane < CG_N_PLANES; plane++, elements += n * n_row)
                memcpy(all->plane[plane] + (layer * all->n_tokens + at) * n_row, elements,
                       n * n_row);
        }
    }
    free(tokens);
    return status;
}

static int write_tensors(const char *path, const collection *all)
{
    const cg_geometry *g = &all->geometry;
    const uint64_t plane_bytes = (uint64_t)row_bytes(g) * g->n_layers * all->n_tokens;
    cg_safetensor tensors[3] = {
        {.name = "K", .rank = 4, .data_bytes = plane_bytes},
        {.name = "V", .rank = 4, .data_bytes = plane_bytes},
        {.name = "tokens",
         .dtype = "I64",
         .rank = 1,
         .shape = {all->n_tokens},
         .data_bytes = 8 * all->n_tokens},
    };
    for (unsigned plane = 0; plane < CG_N_PLANES; plane++) {
        const uint64_t shape[4] = {g->n_layers, all->n_tokens, g->n_kv_heads, g->head_dim};
        memcpy(tensors[plane].shape, shape, sizeof shape);
        strcpy(tensors[plane].dtype, dtype_name(g->dtype));
    }
    cg_tool_file pieces[4] = {{0},
                              {all->plane[CG_K], plane_bytes},
                              {all->plane[CG_V], plane_bytes},
                              {all->ids, 8 * all->n_tokens}};
    char position[16];
    const cg_tool_hex_text parent = cg_tool_hex(all->first.parent.bytes),
                           model = cg_tool_hex(all->first.model.bytes);
    snprintf(position, sizeof position, "%u", all->first.first_position);
    const cg_safetensors_text metadata[] = {
        {CG_TOOL_WORST_LEVEL, cg_tool_level_name(all->worst_level)},
        {CG_TOOL_FIRST_POSITION, position},
        {CG_TOOL_PARENT, parent.text},
        {CG_TOOL_MODEL, model.text},
        {CG_TOOL_EXTRA, "images, adapters or scales of the cache"}};
    const size_t n_metadata = sizeof metadata / sizeof *metadata - !all->has_extra;
    const cg_status status = cg_safetensors_header(tensors, 3, metadata, n_metadata,
                                                   &pieces[0].bytes, &pieces[0].n_bytes);
    if (status != CG_OK)
        return cg_tool_fail(path, status);
    const int code = cg_tool_write(path, pieces, 4);
    free(pieces[0].bytes);
    return code;
}

/* Checks every chunk, and that each follows the one before it. Only behind that is it known how
 * large the output is. */
static int check_chain(const cg_tool_paths *paths, cg_chunk_header *first_out, size_t *n_tokens_out)
{
    cg_chunk_header before = {0};
    *n_tokens_out = 0;
    for (size_t i = 0; i < paths->n_paths; i++) {
        cg_tool_file file;
        cg_chunk_header header;
        const int code = open_chunk(paths->path[i], &file, &header);
        free(file.bytes);
        if (code != CG_TOOL_OK)
            return code;
        if (i > 0 && !follows(&before, &header)) {
            cg_tool_complain(paths->path[i], "does not follow the chunk before it");
            return CG_TOOL_BAD_DATA;
        }
        if (i == 0)
            *first_out = header;
        before = header;
        *n_tokens_out += header.n_tokens;
    }
    return CG_TOOL_OK;
}

int cg_tool_decode(const cg_tool_options *options)
{
    cg_tool_paths paths;
    cg_profile *profile = NULL;
    collection all = {.n_tokens = 0};
    cg_chunk_header header;
    size_t n_tokens, at = 0;
    uint64_t read_bytes = 0;
    int code = input_paths(options->paths[0], &paths);
    if (code == CG_TOOL_OK)
        code = check_chain(&paths, &header, &n_tokens);
    if (code == CG_TOOL_OK)
        code = cg_tool_fail(options->paths[0], collection_new(&header, n_tokens, &all));
    for (size_t i = 0; code == CG_TOOL_OK && i < paths.n_paths; i++) {
        cg_tool_file file, elements = {0};
        code = open_chunk(paths.path[i], &file, &header);
        /* Memory was taken by what check_chain() has seen. */
        if (code == CG_TOOL_OK && (!cg_geometry_equal(&header.geometry, &all.geometry) ||
                                   header.n_tokens > n_tokens - at)) {
            cg_tool_complain(paths.path[i], "changed while it was read");
            code = CG_TOOL_BAD_DATA;
        }
        if (code == CG_TOOL_OK && options->level >= 0) {
            file.n_bytes = cg_chunk_holds(&header, (unsigned)options->level)
                               ? header.level_bytes[options->level]
                               : 0;
            if (file.n_bytes == 0) {
                cg_tool_complain(paths.path[i], "does not hold %s",
                                 cg_tool_level_name((unsigned)options->level));
                code = CG_TOOL_BAD_DATA;
            }
        }
        if (code == CG_TOOL_OK)
            code = decode_chunk(options, paths.path[i], &file, &header, &profile, &elements);
        if (code == CG_TOOL_OK)
            code = cg_tool_fail(paths.path[i], collect(&all, at, &file, elements.bytes));
        at += header.n_tokens;
        read_bytes += file.n_bytes;
        free(elements.bytes);
        free(file.bytes);
        cg_tool_progress("decoding", i + 1, paths.n_paths, read_bytes);
    }
    cg_tool_progress_end();
    if (code == CG_TOOL_OK && at != n_tokens) { /* what is behind at was never written */
        cg_tool_complain(options->paths[0], "changed while it was read");
        code = CG_TOOL_BAD_DATA;
    }
    if (code == CG_TOOL_OK)
        code = write_tensors(options->paths[1], &all);
    if (code == CG_TOOL_OK && options->json)
        code = cg_tool_print_json(
            json_pack("{s:b, s:o, s:I, s:I, s:I}", "ok", 1, "path",
                      cg_tool_json_text(options->paths[1]), "n_chunks", (json_int_t)paths.n_paths,
                      "n_tokens", (json_int_t)n_tokens, "chunk_bytes", (json_int_t)read_bytes),
            JSON_COMPACT);
    collection_free(&all);
    cg_profile_free(profile);
    cg_tool_paths_free(&paths);
    return code;
}

/* The chunk at options->level, malloc'ed. *n_saturated counts on. */
static int transcode_chunk(const cg_tool_options *options, const char *path,
                           const cg_tool_file *file, cg_profile **profile, cg_tool_file *coded_out,
                           uint64_t *n_saturated)
{
    cg_chunk chunk;
    cg_tool_file elements = {0};
    uint32_t *tokens = NULL;
    int code = cg_tool_fail(path, cg_chunk_open(file->bytes, file->n_bytes, &chunk));
    if (code != CG_TOOL_OK)
        return code;
    if (options->level <= chunk.header.level) {
        cg_tool_complain(path, "is at %s already: transcode makes coarser levels only",
                         cg_tool_level_name(chunk.header.level));
        return CG_TOOL_BAD_DATA;
    }
    if (chunk.header.level != CG_L0) {
        if ((code = cg_tool_profile_for(options, path, &chunk.header, profile)) != CG_TOOL_OK)
            return code;
        return cg_tool_fail(path, cg_transcode(*profile, file->bytes, file->n_bytes,
                                               (cg_level)options->level, &coded_out->bytes,
                                               &coded_out->n_bytes));
    }
    if (chunk.header.cache_scales != 0) {
        cg_tool_complain(path, "%s", CG_TOOL_UNKNOWN_SCALES);
        return CG_TOOL_BAD_DATA;
    }
    if (options->profile_path == NULL) {
        cg_tool_complain(path, "is at L0, which names no profile: use --profile");
        return CG_TOOL_USAGE;
    }
    if (*profile == NULL)
        code = cg_tool_fail(options->profile_path,
                            cg_profile_open_file(options->profile_path, profile));
    tokens = malloc(chunk.header.n_tokens * sizeof *tokens);
    if (code == CG_TOOL_OK && tokens == NULL)
        code = cg_tool_fail(path, CG_ERR_NO_MEMORY);
    if (code == CG_TOOL_OK)
        code = cg_tool_fail(path, cg_chunk_tokens(&chunk, tokens));
    if (code == CG_TOOL_OK)
        code = decode_chunk(options, path, file, &chunk.header, profile, &elements);
    if (code == CG_TOOL_OK)
        code = cg_tool_encode_chunk(options, path, *profile, &chunk.header, tokens, &elements,
                                    (cg_level)options->level, coded_out, n_saturated);
    free(elements.bytes);
    free(tokens);
    return code;
}

int cg_tool_transcode(const cg_tool_options *options)
{
    cg_tool_paths paths;
    cg_profile *profile = NULL;
    cg_tool_output out;
    uint64_t written_bytes = 0, n_saturated = 0;
    int code = input_paths(options->paths[0], &paths);
    if (code != CG_TOOL_OK)
        goto done;
    code = cg_tool_output_open(&out, options, options->paths[1],
                               cg_tool_is_directory(options->paths[0]));
    for (size_t i = 0; code == CG_TOOL_OK && i < paths.n_paths; i++) {
        cg_tool_file file, coded = {0};
        cg_chunk_header header;
        code = open_chunk(paths.path[i], &file, &header);
        if (code == CG_TOOL_OK)
            code = transcode_chunk(options, paths.path[i], &file, &profile, &coded, &n_saturated);
        if (code == CG_TOOL_OK)
            code = cg_tool_output_chunk(&out, coded.bytes, coded.n_bytes);
        written_bytes += coded.n_bytes;
        free(coded.bytes);
        free(file.bytes);
        cg_tool_progress("transcoding", i + 1, paths.n_paths, written_bytes);
    }
    cg_tool_warn_of_saturated(options->paths[0], n_saturated);
    code = cg_tool_output_close(&out, code);
done:
    cg_profile_free(profile);
    cg_tool_paths_free(&paths);
    return code;
}
