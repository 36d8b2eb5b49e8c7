#include "codec/safetensors.h"

#include "codec/cursor.h"

#include <jansson.h>
#include <stdlib.h>

struct cg_safetensors {
    size_t n_tensors;
    cg_safetensor *tensors; /* [n_tensors], in the order of their data */
    json_t *metadata;       /* what it is of, or NULL */
};

size_t cg_safetensors_dtype_bytes(const char *dtype)
{
    static const struct {
        const char *name;
        size_t bytes;
    } known[] = {
        {"BF16", 2}, {"F16", 2}, {"F32", 4},     {"F64", 8},     {"I8", 1},  {"U8", 1},
        {"I16", 2},  {"U16", 2}, {"I32", 4},     {"U32", 4},     {"I64", 8}, {"U64", 8},
        {"BOOL", 1}, {"C64", 8}, {"F8_E5M2", 1}, {"F8_E4M3", 1},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(dtype, known[i].name) == 0)
            return known[i].bytes;
    }
    return 0;
}

/* false when elements or bytes overflow, or the dtype is unknown. */
static bool tensor_bytes(const cg_safetensor *tensor, size_t *n_bytes_out)
{
    size_t n_bytes = cg_safetensors_dtype_bytes(tensor->dtype);
    if (n_bytes == 0)
        return false;
    for (uint32_t i = 0; i < tensor->rank; i++) {
        if (!cg_size_mul(n_bytes, tensor->shape[i], &n_bytes))
            return false;
    }
    *n_bytes_out = n_bytes;
    return true;
}

/* A number of JSON that is neither negative nor a fraction. */
static bool natural(const json_t *value, uint64_t *number_out)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return false;
    *number_out = (uint64_t)json_integer_value(value);
    return true;
}

static cg_status read_tensor(const char *name, const json_t *about, cg_cursor data,
                             cg_safetensor *tensor, const char **what_out)
{
    const json_t *shape = json_object_get(about, "shape");
    const json_t *offsets = json_object_get(about, "data_offsets");
    const char *dtype = json_string_value(json_object_get(about, "dtype"));
    if (!json_is_array(shape) || !json_is_array(offsets) || json_array_size(offsets) != 2 ||
        dtype == NULL) {
        *what_out = "a tensor without dtype, shape or data_offsets";
        return CG_ERR_CORRUPT;
    }
    if (cg_safetensors_dtype_bytes(dtype) == 0 ||
        json_array_size(shape) > CG_SAFETENSORS_MAX_RANK) {
        *what_out = "a tensor of a dtype or rank that is not supported";
        return CG_ERR_UNSUPPORTED;
    }
    /* The tensor is zeros: what is cut still ends with one. */
    strncpy(tensor->name, name, sizeof tensor->name - 1);
    strncpy(tensor->dtype, dtype, sizeof tensor->dtype - 1);
    tensor->rank = (uint32_t)json_array_size(shape);
    for (uint32_t i = 0; i < tensor->rank; i++) {
        if (!natural(json_array_get(shape, i), &tensor->shape[i])) {
            *what_out = "a shape that is not natural numbers";
            return CG_ERR_CORRUPT;
        }
    }
    uint64_t begin, end;
    size_t n_bytes;
    if (!natural(json_array_get(offsets, 0), &begin) ||
        !natural(json_array_get(offsets, 1), &end) || begin > end ||
        !tensor_bytes(tensor, &n_bytes) || n_bytes != end - begin) {
        *what_out = "data_offsets that do not agree with dtype and shape";
        return CG_ERR_CORRUPT;
    }
    if (end > data.left_bytes) {
        *what_out = "data_offsets past the end of the file";
        return CG_ERR_TRUNCATED;
    }
    tensor->data = data.at + begin;
    tensor->data_bytes = n_bytes;
    return CG_OK;
}

static int by_data(const void *a, const void *b)
{
    const cg_safetensor *x = a, *y = b;
    if (x->data != y->data)
        return x->data < y->data ? -1 : 1;
    return (x->data_bytes > y->data_bytes) - (x->data_bytes < y->data_bytes);
}

static cg_status read_tensors(const json_t *root, cg_cursor data, cg_safetensors *tensors,
                              const char **what_out)
{
    const char *name;
    json_t *about;
    json_object_foreach((json_t *)root, name, about)
    {
        if (strcmp(name, "__metadata__") == 0) {
            tensors->metadata = json_incref(about);
            continue;
        }
        const cg_status status =
            read_tensor(name, about, data, &tensors->tensors[tensors->n_tensors], what_out);
        if (status != CG_OK)
            return status;
        tensors->n_tensors++;
    }
    /* In the order of their data each must begin where the one before has ended: no overlap, no
     * hole. */
    qsort(tensors->tensors, tensors->n_tensors, sizeof *tensors->tensors, by_data);
    for (size_t i = 0; i < tensors->n_tensors; i++) {
        const cg_safetensor *tensor = &tensors->tensors[i];
        if (tensor->data != data.at || !cg_cursor_skip(&data, tensor->data_bytes)) {
            *what_out = "tensors that overlap or leave a hole";
            return CG_ERR_CORRUPT;
        }
    }
    if (data.left_bytes != 0) {
        *what_out = "bytes behind the last tensor";
        return CG_ERR_CORRUPT;
    }
    return CG_OK;
}

cg_status cg_safetensors_open(const uint8_t *bytes, size_t n_bytes, cg_safetensors **tensors_out,
                              const char **what_out)
{
    const char *ignored;
    if (what_out == NULL)
        what_out = &ignored;
    *tensors_out = NULL;
    cg_cursor in = {bytes, n_bytes};
    uint64_t header_bytes;
    const uint8_t *header;
    *what_out = "no safetensors header";
    if (!cg_cursor_u64(&in, &header_bytes))
        return CG_ERR_TRUNCATED;
    /* Before the parser, whose memory grows with the text. */
    if (header_bytes > CG_SAFETENSORS_MAX_HEADER_BYTES)
        return CG_ERR_CORRUPT;
    if (!cg_cursor_bytes(&in, header_bytes, &header))
        return CG_ERR_TRUNCATED;

    cg_status status = CG_ERR_CORRUPT;
    cg_safetensors *tensors = NULL;
    /* Of two tensors of one name a reader could take either. */
    json_t *root = json_loadb((const char *)header, header_bytes, JSON_REJECT_DUPLICATES, NULL);
    if (!json_is_object(root)) {
        *what_out = "a header that is not a JSON object";
        goto done;
    }
    status = CG_ERR_NO_MEMORY;
    *what_out = cg_strerror(status);
    tensors = calloc(1, sizeof *tensors);
    if (tensors == NULL)
        goto done;
    tensors->tensors = calloc(json_object_size(root) + 1, sizeof *tensors->tensors);
    if (tensors->tensors == NULL)
        goto done;
    if ((status = read_tensors(root, in, tensors, what_out)) != CG_OK)
        goto done;
    *what_out = NULL;
    *tensors_out = tensors;
    tensors = NULL;
done:
    json_decref(root);
    cg_safetensors_free(tensors);
    return status;
}

void cg_safetensors_free(cg_safetensors *tensors)
{
    if (tensors == NULL)
        return;
    json_decref(tensors->metadata);
    free(tensors->tensors);
    free(tensors);
}

size_t cg_safetensors_count(const cg_safetensors *tensors)
{
    return tensors->n_tensors;
}

const cg_safetensor *cg_safetensors_at(const cg_safetensors *tensors, size_t tensor_index)
{
    return &tensors->tensors[tensor_index];
}

const cg_safetensor *cg_safetensors_find(const cg_safetensors *tensors, const char *name)
{
    for (size_t i = 0; i < tensors->n_tensors; i++) {
        if (strcmp(tensors->tensors[i].name, name) == 0)
            return &tensors->tensors[i];
    }
    return NULL;
}

const char *cg_safetensors_metadata(const cg_safetensors *tensors, const char *name)
{
    return json_string_value(json_object_get(tensors->metadata, name));
}

static json_t *describe(const cg_safetensor *tensor, uint64_t begin)
{
    json_t *shape = json_array();
    for (uint32_t i = 0; i < tensor->rank; i++)
        json_array_append_new(shape, json_integer((json_int_t)tensor->shape[i]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", tensor->dtype, "shape", shape, "data_offsets",
                     (json_int_t)begin, (json_int_t)(begin + tensor->data_bytes));
}

static bool add_metadata(json_t *root, const cg_safetensors_text *metadata, size_t n_metadata)
{
    json_t *texts = n_metadata > 0 ? json_object() : NULL;
    for (size_t i = 0; i < n_metadata; i++)
        if (json_object_set_new(texts, metadata[i].name, json_string(metadata[i].text)) != 0) {
            json_decref(texts);
            return false;
        }
    return n_metadata == 0 || json_object_set_new(root, "__metadata__", texts) == 0;
}

cg_status cg_safetensors_header(const cg_safetensor *tensors, size_t n_tensors,
                                const cg_safetensors_text *metadata, size_t n_metadata,
                                uint8_t **bytes_out, size_t *n_bytes_out)
{
    *bytes_out = NULL;
    cg_status status = CG_ERR_NO_MEMORY;
    char *text = NULL;
    uint64_t begin = 0;
    json_t *root = json_object();
    if (!add_metadata(root, metadata, n_metadata))
        goto done;
    for (size_t i = 0; i < n_tensors; i++) {
        size_t n_bytes;
        if (!tensor_bytes(&tensors[i], &n_bytes) || n_bytes != tensors[i].data_bytes) {
            status = CG_ERR_INVALID_ARGUMENT;
            goto done;
        }
        if (json_object_set_new(root, tensors[i].name, describe(&tensors[i], begin)) != 0)
            goto done;
        begin += n_bytes;
    }
    text = json_dumps(root, JSON_COMPACT);
    if (text == NULL)
        goto done;
    const size_t text_bytes = strlen(text), padded_bytes = (text_bytes + 7) / 8 * 8;
    uint8_t *bytes = malloc(8 + padded_bytes);
    if (bytes == NULL)
        goto done;
    cg_put_le(bytes, 8, padded_bytes);
    memcpy(bytes + 8, text, text_bytes);
    memset(bytes + 8 + text_bytes, ' ', padded_bytes - text_bytes);
    *bytes_out = bytes;
    *n_bytes_out = 8 + padded_bytes;
    status = CG_OK;
done:
    free(text);
    json_decref(root);
    return status;
}
