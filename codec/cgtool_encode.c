/* codec/cgtool_encode.c - `cgtool encode`: tensors to chunks. */
#include "codec/cgtool.h"

#include "codec/codec.h"
#include "codec/cursor.h"
#include "codec/preset.h"
#include "codec/safetensors.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static unsigned dtype_of(const char *name)
{
    if (strcmp(name, "BF16") == 0)
        return CG_DTYPE_BF16;
    if (strcmp(name, "F16") == 0)
        return CG_DTYPE_FP16;
    if (strcmp(name, "F8_E4M3") == 0)
        return CG_DTYPE_FP8_E4M3;
    if (strcmp(name, "F8_E5M2") == 0)
        return CG_DTYPE_FP8_E5M2;
    return strcmp(name, "F32") == 0 ? CG_DTYPE_FP32 : 0;
}

/* K and V of an input file, [n_layers][n_tokens][n_kv_heads][head_dim]. */
typedef struct kv_tensors {
    const uint8_t *data[CG_N_PLANES];
    cg_geometry geometry;
    size_t n_tokens;
} kv_tensors;

static int read_kv(const char *path, const cg_safetensors *tensors, kv_tensors *kv)
{
    const cg_safetensor *k = cg_safetensors_find(tensors, "K"),
                        *v = cg_safetensors_find(tensors, "V");
    if (k == NULL || v == NULL || k->rank != 4 || v->rank != 4 || strcmp(k->dtype, v->dtype) != 0 ||
        memcmp(k->shape, v->shape, sizeof k->shape) != 0 || dtype_of(k->dtype) == 0) {
        cg_tool_complain(path,
                         "needs tensors \"K\" and \"V\" of one shape [n_layers, n_tokens, "
                         "n_kv_heads, head_dim] and one dtype, BF16, F16, F32, F8_E4M3 or F8_E5M2");
        return CG_TOOL_BAD_DATA;
    }
    if (k->shape[0] > CG_MAX_LAYERS || k->shape[2] > CG_MAX_KV_HEADS ||
        k->shape[3] > CG_MAX_HEAD_DIM || k->shape[1] == 0 || k->shape[1] > UINT32_MAX) {
        cg_tool_complain(path, "a dimension of \"K\" is out of range");
        return CG_TOOL_BAD_DATA;
    }
    *kv = (kv_tensors){
        .data = {k->data, v->data},
        .geometry = {(uint16_t)k->shape[0], (uint16_t)k->shape[2], (uint16_t)k->shape[3],
                     (uint8_t)dtype_of(k->dtype), CG_N_PLANES},
        .n_tokens = k->shape[1],
    };
    return cg_tool_fail(path, cg_geometry_check(&kv->geometry));
}

/* Decimal text or u32 little-endian: the high byte of an id below 9 << 24 is no text. */
static bool is_text(const cg_tool_file *file)
{
    static const char characters[] = "0123456789 ,\t\r\n[]";
    for (size_t i = 0; i < file->n_bytes; i++) {
        if (memchr(characters, file->bytes[i], sizeof characters - 1) == NULL)
            return false;
    }
    return true;
}

static int parse_ids(const char *path, const cg_tool_file *file, size_t n_tokens, uint32_t *tokens)
{
    size_t n = 0;
    if (!is_text(file)) {
        n = file->n_bytes % 4 == 0 ? file->n_bytes / 4 : SIZE_MAX;
        for (size_t i = 0; n == n_tokens && i < n; i++)
            tokens[i] = (uint32_t)cg_get_le(file->bytes + 4 * i, 4);
    } else {
        for (size_t at = 0; at < file->n_bytes;) {
            uint64_t id = 0;
            const size_t begin = at;
            while (at < file->n_bytes && file->bytes[at] >= '0' && file->bytes[at] <= '9') {
                id = id * 10 + (file->bytes[at++] - '0');
                if (id > UINT32_MAX) {
                    cg_tool_complain(path, "a token id above 2^32");
                    return CG_TOOL_BAD_DATA;
                }
            }
            if (at == begin) {
                at++;
                continue;
            }
            if (n < n_tokens)
                tokens[n] = (uint32_t)id;
            n++;
        }
    }
    if (n != n_tokens) {
        cg_tool_complain(path, "does not hold as many token ids as K has tokens, %zu", n_tokens);
        return CG_TOOL_BAD_DATA;
    }
    return CG_TOOL_OK;
}

static int tensor_ids(const char *path, const cg_safetensors *tensors, size_t n_tokens,
                      uint32_t *tokens)
{
    const cg_safetensor *ids = cg_safetensors_find(tensors, "tokens");
    if (ids == NULL || ids->rank != 1 || ids->shape[0] != n_tokens ||
        (strcmp(ids->dtype, "I32") != 0 && strcmp(ids->dtype, "U32") != 0 &&
         strcmp(ids->dtype, "I64") != 0)) {
        cg_tool_complain(path,
                         "needs a tensor \"tokens\" [n_tokens] of I32, I64 or U32, or --tokens");
        return CG_TOOL_BAD_DATA;
    }
    const size_t id_bytes = cg_safetensors_dtype_bytes(ids->dtype);
    for (size_t i = 0; i < n_tokens; i++) { /* negative ids are large without their sign */
        const uint64_t id = cg_get_le(ids->data + i * id_bytes, id_bytes);
        if (id > UINT32_MAX || (ids->dtype[0] == 'I' && id > INT32_MAX)) {
            cg_tool_complain(path, "token %zu is negative or too large", i);
            return CG_TOOL_BAD_DATA;
        }
        tokens[i] = (uint32_t)id;
    }
    return CG_TOOL_OK;
}

static int read_ids(const cg_tool_options *options, const cg_safetensors *tensors, size_t n_tokens,
                    uint32_t *tokens)
{
    if (options->tokens_path == NULL)
        return tensor_ids(options->paths[0], tensors, n_tokens, tokens);
    cg_tool_file file;
    int code = cg_tool_read(options->tokens_path, &file);
    if (code == CG_TOOL_OK)
        code = parse_ids(options->tokens_path, &file, n_tokens, tokens);
    free(file.bytes);
    return code;
}

/* Tokens first..first+n of K and V to [n_layers][2][n][n_kv_heads][head_dim]. */
static void gather(const kv_tensors *kv, size_t first, size_t n, uint8_t *chunk)
{
    const size_t token_bytes =
        cg_geometry_channels(&kv->geometry) * cg_dtype_bytes(kv->geometry.dtype);
    for (size_t layer = 0; layer < kv->geometry.n_layers; layer++) {
        for (size_t plane = 0; plane < CG_N_PLANES; plane++, chunk += n * token_bytes)
            memcpy(chunk, kv->data[plane] + (layer * kv->n_tokens + first) * token_bytes,
                   n * token_bytes);
    }
}

/* Where tensors are from. */
typedef struct origin {
    uint8_t worst_level; /* their own, or of what they were computed on */
    uint32_t first_position;
    cg_key parent;
} origin;

static int read_decoded(const cg_tool_options *options, const cg_safetensors *tensors,
                        const char *level, origin *from)
{
    const char *path = options->paths[0],
               *position = cg_safetensors_metadata(tensors, CG_TOOL_FIRST_POSITION),
               *parent = cg_safetensors_metadata(tensors, CG_TOOL_PARENT);
    char *end = NULL;
    const unsigned long first = position != NULL ? strtoul(position, &end, 10) : 0;
    cg_key key;
    if (level[0] != 'L' || level[1] < '0' || level[1] >= '0' + CG_N_LEVELS || level[2] != 0 ||
        position == NULL || *position < '0' || *position > '9' || *end != 0 || first > UINT32_MAX ||
        parent == NULL || strlen(parent) != CG_KEY_HEX_BYTES - 1 ||
        !cg_key_from_hex(parent, &key)) {
        cg_tool_complain(path, "its __metadata__ is not as decode writes it");
        return CG_TOOL_BAD_DATA;
    }
    if (cg_safetensors_metadata(tensors, CG_TOOL_EXTRA) != NULL) {
        cg_tool_complain(path, "was decoded from chunks that depend on more than their tokens "
                               "(images, adapters, scales of the cache)");
        return CG_TOOL_BAD_DATA;
    }
    if (first > 0 && options->salt != NULL) {
        cg_tool_complain(path,
                         "begins at position %lu, behind a key: --salt is for a prompt's "
                         "start",
                         first);
        return CG_TOOL_BAD_DATA;
    }
    if (from->worst_level < level[1] - '0')
        from->worst_level = (uint8_t)(level[1] - '0');
    from->first_position = (uint32_t)first;
    if (options->salt == NULL)
        from->parent = key;
    return CG_TOOL_OK;
}

/* By the options; of what decode wrote, by its "__metadata__", too. */
static int read_origin(const cg_tool_options *options, const cg_safetensors *tensors,
                       const kv_tensors *kv, const cg_fingerprint *model, origin *origin_out)
{
    const char *path = options->paths[0], *salt = options->salt != NULL ? options->salt : "",
               *level = cg_safetensors_metadata(tensors, CG_TOOL_WORST_LEVEL),
               *decoded = cg_safetensors_metadata(tensors, CG_TOOL_MODEL);
    /* As connectors do: they find what is encoded here. */
    const cg_fingerprint of_cache = cg_key_model(model, kv->geometry.dtype);
    *origin_out = (origin){.worst_level = (uint8_t)options->prefix_level,
                           .parent = cg_key_root(&of_cache, salt, strlen(salt))};
    if (level != NULL &&
        (decoded == NULL || strcmp(decoded, cg_tool_hex(model->bytes).text) != 0)) {
        cg_tool_complain(path, "was decoded from chunks of another model");
        return CG_TOOL_BAD_DATA;
    }
    const int code = level != NULL ? read_decoded(options, tensors, level, origin_out) : CG_TOOL_OK;
    if (code != CG_TOOL_OK)
        return code;
    if (kv->n_tokens > UINT32_MAX - origin_out->first_position) {
        cg_tool_complain(path, "ends past the last position that there is");
        return CG_TOOL_BAD_DATA;
    }
    if (options->level <= CG_L1 && origin_out->worst_level > options->level) {
        cg_tool_complain(path, "is of a cache that was at %s: no %s can be made of it",
                         cg_tool_level_name(origin_out->worst_level),
                         cg_tool_level_name((unsigned)options->level));
        return CG_TOOL_BAD_DATA;
    }
    return CG_TOOL_OK;
}

/* Whether K and V are what the profile is for, of any dtype. */
static bool is_for_profile(const char *path, const cg_profile *profile, const cg_geometry *is)
{
    cg_geometry wanted = *cg_profile_geometry(profile);
    wanted.dtype = is->dtype;
    if (cg_geometry_equal(&wanted, is))
        return true;
    cg_tool_complain(path, "K is %u layers x %u KV heads x %u, the profile is for %u x %u x %u",
                     is->n_layers, is->n_kv_heads, is->head_dim, wanted.n_layers, wanted.n_kv_heads,
                     wanted.head_dim);
    return false;
}

int cg_tool_encode_chunk(const cg_tool_options *options, const char *path,
                         const cg_profile *profile, const cg_chunk_header *header,
                         const uint32_t *tokens, const cg_tool_file *elements, cg_level coarsest,
                         cg_tool_file *coded_out, uint64_t *n_saturated)
{
    const cg_level level = (cg_level)options->level;
    const uint32_t multiple = level == CG_L0 ? 1 : profile->preset->start_multiple;
    uint64_t n_here = 0;
    if (profile != NULL && !is_for_profile(path, profile, &header->geometry))
        return CG_TOOL_BAD_DATA;
    if (header->first_position % multiple != 0) {
        cg_tool_complain(path,
                         "begins at position %" PRIu32 ": with this profile chunks begin at "
                         "multiples of %" PRIu32,
                         header->first_position, multiple);
        return CG_TOOL_BAD_DATA;
    }
    const cg_status status = cg_encode_chunk(
        level == CG_L0 ? NULL : profile, header, tokens, elements->bytes, elements->n_bytes, level,
        coarsest, options->n_threads, &coded_out->bytes, &coded_out->n_bytes, &n_here);
    *n_saturated += n_here;
    if (status != CG_ERR_INVALID_ARGUMENT)
        return cg_tool_fail(path, status);
    cg_tool_complain(path, "K or V holds infinities or NaNs, which only L0 can code");
    return CG_TOOL_BAD_DATA;
}

void cg_tool_warn_of_saturated(const char *path, uint64_t n_saturated)
{
    if (n_saturated > 0)
        cg_tool_complain(path,
                         "%" PRIu64 " symbols did not fit: K or V is far beyond what the profile "
                         "was made from, and is coded coarser",
                         n_saturated);
}

static int encode_chunks(const cg_tool_options *options, const cg_profile *profile,
                         const kv_tensors *kv, const uint32_t *tokens, const cg_fingerprint *model,
                         const origin *from)
{
    const size_t step = options->chunk_tokens, element_bytes = cg_dtype_bytes(kv->geometry.dtype);
    const size_t max_tokens = kv->n_tokens < step ? kv->n_tokens : step;
    const size_t max_bytes =
        (size_t)cg_geometry_elements(&kv->geometry, (uint32_t)max_tokens) * element_bytes;
    uint8_t *elements = malloc(max_bytes);
    if (elements == NULL)
        return cg_tool_fail(options->paths[0], CG_ERR_NO_MEMORY);

    cg_tool_output out;
    uint64_t written_bytes = 0, n_saturated = 0;
    cg_key parent = from->parent;
    int code = cg_tool_output_open(&out, options, options->paths[1], kv->n_tokens > step);
    for (size_t first = 0; code == CG_TOOL_OK && first < kv->n_tokens; first += step) {
        const size_t n = kv->n_tokens - first < step ? kv->n_tokens - first : step;
        const cg_chunk_header header = {
            .prefix_level = from->worst_level,
            .first_position = from->first_position + (uint32_t)first,
            .n_tokens = (uint32_t)n,
            .geometry = kv->geometry,
            .model = *model,
            .parent = parent,
        };
        cg_tool_file coded = {0};
        gather(kv, first, n, elements);
        const cg_tool_file gathered = {
            elements, (size_t)cg_geometry_elements(&kv->geometry, (uint32_t)n) * element_bytes};
        code = cg_tool_encode_chunk(options, options->paths[0], profile, &header, tokens + first,
                                    &gathered, options->nested ? CG_L3 : (cg_level)options->level,
                                    &coded, &n_saturated);
        if (code == CG_TOOL_OK) {
            code = cg_tool_output_chunk(&out, coded.bytes, coded.n_bytes);
            /* The next chunk hangs on this one: FORMAT.md, "Keys". */
            parent = cg_key_chunk(&parent, &header.extra, tokens + first, n);
            written_bytes += coded.n_bytes;
            cg_tool_progress("encoding", out.n_chunks, (kv->n_tokens + step - 1) / step,
                             written_bytes);
        }
        free(coded.bytes);
    }
    free(elements);
    cg_tool_warn_of_saturated(options->paths[0], n_saturated);
    return cg_tool_output_close(&out, code);
}

static int model_fingerprint(const cg_tool_options *options, const cg_profile *profile,
                             cg_fingerprint *model_out)
{
    cg_key key;
    if (options->model_hex == NULL && profile == NULL) {
        cg_tool_complain("encode", "needs --profile or --model-fingerprint");
        return CG_TOOL_USAGE;
    }
    if (options->model_hex == NULL) {
        *model_out = *cg_profile_model(profile);
        return CG_TOOL_OK;
    }
    cg_key_from_hex(options->model_hex, &key); /* main() has checked it */
    memcpy(model_out->bytes, key.bytes, sizeof key.bytes);
    return CG_TOOL_OK;
}

int cg_tool_encode(const cg_tool_options *options)
{
    const char *in_path = options->paths[0], *what;
    cg_profile *profile = NULL;
    cg_safetensors *tensors = NULL;
    uint32_t *tokens = NULL;
    cg_tool_file in = {0};
    kv_tensors kv;
    origin from;
    cg_fingerprint model;
    int code = CG_TOOL_OK;
    if (options->level != CG_L0 && options->profile_path == NULL) {
        cg_tool_complain("encode", "a lossy level needs --profile");
        return CG_TOOL_USAGE;
    }
    if (options->nested && options->level == CG_L0) {
        cg_tool_complain("encode", "lossless chunks do not nest");
        return CG_TOOL_USAGE;
    }
    if (options->profile_path != NULL)
        code = cg_tool_fail(options->profile_path,
                            cg_profile_open_file(options->profile_path, &profile));
    if (code == CG_TOOL_OK && options->nested && !cg_profile_nests(profile)) {
        cg_tool_complain(options->profile_path, "its levels do not nest");
        code = CG_TOOL_BAD_DATA;
    }
    if (code == CG_TOOL_OK)
        code = model_fingerprint(options, profile, &model);
    if (code == CG_TOOL_OK)
        code = cg_tool_read(in_path, &in);
    if (code != CG_TOOL_OK)
        goto done;
    const cg_status status = cg_safetensors_open(in.bytes, in.n_bytes, &tensors, &what);
    if (status != CG_OK) {
        cg_tool_complain(in_path, "%s", what);
        code = status == CG_ERR_NO_MEMORY ? CG_TOOL_IO : CG_TOOL_BAD_DATA;
        goto done;
    }
    if ((code = read_kv(in_path, tensors, &kv)) != CG_TOOL_OK)
        goto done;
    tokens = malloc(kv.n_tokens * sizeof *tokens);
    if (tokens == NULL) {
        code = cg_tool_fail(in_path, CG_ERR_NO_MEMORY);
        goto done;
    }
    if ((code = read_ids(options, tensors, kv.n_tokens, tokens)) != CG_TOOL_OK)
        goto done;
    if ((code = read_origin(options, tensors, &kv, &model, &from)) == CG_TOOL_OK)
        code = encode_chunks(options, profile, &kv, tokens, &model, &from);
done:
    free(tokens);
    cg_safetensors_free(tensors);
    free(in.bytes);
    cg_profile_free(profile);
    return code;
}
