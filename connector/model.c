/* A model.json, the configuration's geometry and the default profile become one cg_model. Each
 * refusal is a sentence that names the file or the key. */
#include "connector/model.h"

#include "connector/quality_read.h"
#include "iouring/tree.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_JSON_BYTES = 1 << 20, PATH_BYTES = 4096 };

/* A small file as a string, the caller's. */
static cg_status read_text(const char *path, char **text_out)
{
    *text_out = NULL;
    /* O_NONBLOCK: opening a FIFO must not wait for its writer. */
    const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY);
    if (fd < 0)
        return cg_status_from_errno(errno);
    char *text = malloc(MAX_JSON_BYTES + 1);
    size_t used = 0;
    cg_status status = text != NULL ? CG_OK : CG_ERR_NO_MEMORY;
    /* A longer file is cut here, and then is no JSON. */
    while (status == CG_OK && used < MAX_JSON_BYTES) {
        const ssize_t n = read(fd, text + used, MAX_JSON_BYTES - used);
        if (n == 0)
            break;
        if (n < 0 && errno != EINTR)
            status = cg_status_from_errno(errno);
        else if (n > 0)
            used += (size_t)n;
    }
    close(fd);
    if (status != CG_OK) {
        free(text);
        return status;
    }
    text[used] = '\0';
    *text_out = text;
    return CG_OK;
}

static cg_status take_count(const json_t *object, const char *name, uint32_t most,
                            uint32_t configured, const char *path, uint16_t *count_out,
                            const cg_sentence *error)
{
    const json_t *item = json_object_get(object, name);
    const json_int_t count = json_is_integer(item) ? json_integer_value(item) : 0;
    if (count < 1 || count > most)
        return cg_sentence_say(error, CG_ERR_CORRUPT, "%s: \"%s\" must be an integer from 1 to %u",
                               path, name, most);
    if (configured != 0 && configured != count)
        return cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT,
                               "\"geometry.%s\" is %u, but %s says %lld", name, configured, path,
                               (long long)count);
    *count_out = (uint16_t)count;
    return CG_OK;
}

static cg_status take_json(cg_model *model, const char *text, const cg_config_geometry *given,
                           const char *path, const cg_sentence *error)
{
    json_error_t json_error;
    json_t *object = json_loads(text, JSON_REJECT_DUPLICATES, &json_error);
    cg_status status = CG_ERR_CORRUPT;
    cg_key key;
    if (!json_is_object(object)) {
        status = cg_sentence_say(error, CG_ERR_CORRUPT, "%s is no JSON object", path);
        goto done;
    }
    if (json_integer_value(json_object_get(object, "version")) != 1) {
        status =
            cg_sentence_say(error, CG_ERR_UNSUPPORTED_VERSION, "%s: \"version\" is not 1", path);
        goto done;
    }
    /* What the file says must agree with the configuration: one of them is of another model. */
    if ((status = take_count(object, "n_layers", CG_MAX_LAYERS, given->n_layers, path,
                             &model->geometry.n_layers, error)) != CG_OK ||
        (status = take_count(object, "n_kv_heads", CG_MAX_KV_HEADS, given->n_kv_heads, path,
                             &model->geometry.n_kv_heads, error)) != CG_OK ||
        (status = take_count(object, "head_dim", CG_MAX_HEAD_DIM, given->head_dim, path,
                             &model->geometry.head_dim, error)) != CG_OK)
        goto done;
    const char *dtype = json_string_value(json_object_get(object, "dtype"));
    model->geometry.dtype = (uint8_t)(dtype != NULL ? cg_dtype_from_name(dtype) : 0);
    if (model->geometry.dtype == 0) {
        status = cg_sentence_say(error, CG_ERR_CORRUPT,
                                 "%s: \"dtype\" must be one of \"bf16\", \"fp16\", \"fp32\", "
                                 "\"fp8_e4m3\", \"fp8_e5m2\"",
                                 path);
        goto done;
    }
    const char *hex = json_string_value(json_object_get(object, "model_fingerprint"));
    if (hex == NULL || strlen(hex) != CG_KEY_HEX_BYTES - 1 || !cg_key_from_hex(hex, &key)) {
        status = cg_sentence_say(error, CG_ERR_CORRUPT,
                                 "%s: \"model_fingerprint\" must be 32 hexadecimal digits", path);
        goto done;
    }
    memcpy(model->fingerprint.bytes, key.bytes, sizeof key.bytes);
    if (given->has_fingerprint &&
        memcmp(&given->model_fingerprint, &model->fingerprint, sizeof key.bytes) != 0) {
        char given_hex[CG_KEY_HEX_BYTES];
        memcpy(key.bytes, given->model_fingerprint.bytes, sizeof key.bytes);
        cg_key_to_hex(&key, given_hex);
        status = cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT,
                                 "\"geometry.model_fingerprint\" is %s, but %s says %s", given_hex,
                                 path, hex);
        goto done;
    }
    status = CG_OK;
done:
    json_decref(object);
    return status;
}

static cg_status take_configured(cg_model *model, const cg_config *config, const char *path,
                                 const cg_sentence *error)
{
    const cg_config_geometry *given = &config->geometry;
    if (given->n_layers == 0 || given->n_kv_heads == 0 || given->head_dim == 0 ||
        given->dtype == 0 || !given->has_fingerprint)
        return cg_sentence_say(
            error, CG_ERR_NOT_FOUND,
            "%s does not exist and \"geometry\" does not give n_layers, n_kv_heads, head_dim, "
            "dtype and model_fingerprint",
            path);
    model->geometry = (cg_geometry){.n_layers = (uint16_t)given->n_layers,
                                    .n_kv_heads = (uint16_t)given->n_kv_heads,
                                    .head_dim = (uint16_t)given->head_dim};
    model->fingerprint = given->model_fingerprint;
    return CG_OK;
}

/* *scales_out: [n_layers][2], malloc'ed, the caller's. */
static cg_status collect_scales(const cg_config_geometry *given, const cg_geometry *geometry,
                                float (**scales_out)[CG_N_PLANES], const cg_sentence *error)
{
    float(*scales)[CG_N_PLANES] = malloc(geometry->n_layers * sizeof *scales);
    if (scales == NULL)
        return CG_ERR_NO_MEMORY;
    *scales_out = scales;
    for (unsigned plane = 0; plane < CG_N_PLANES; plane++) {
        const uint32_t n = given->n_scales[plane];
        const char *name = plane == CG_K ? "k_scales" : "v_scales";
        if (n != 0 && !cg_dtype_has_cache_scales(geometry->dtype))
            return cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT,
                                   "\"geometry.%s\": %s has no scales, fp8 has", name,
                                   cg_dtype_name(geometry->dtype));
        if (n != 0 && n != geometry->n_layers)
            return cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT,
                                   "\"geometry.%s\" has %u numbers for %u layers", name, n,
                                   geometry->n_layers);
        for (uint32_t layer = 0; layer < geometry->n_layers; layer++)
            scales[layer][plane] = n != 0 ? given->scales[plane][layer] : 1;
    }
    return CG_OK;
}

/* path_out[PATH_BYTES]: of a file of the model's. Below the root there is room for any. */
static cg_status path_of(const cg_config *config, const char *leaf, char *path_out,
                         const cg_sentence *error)
{
    char relative[CG_TREE_PATH_BYTES];
    const cg_status status =
        cg_tree_model_file_path(config->model, leaf, relative, sizeof relative);
    if (status != CG_OK)
        return cg_sentence_say(error, status, "\"model\": %s", cg_strerror(status));
    if (strlen(config->root) + 1 + CG_TREE_PATH_BYTES > PATH_BYTES)
        return cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT, "\"root\" is too long");
    snprintf(path_out, PATH_BYTES, "%s/%s", config->root, relative);
    return CG_OK;
}

static cg_status open_profile(cg_model *model, const cg_config *config,
                              const float (*scales)[CG_N_PLANES], const cg_sentence *error)
{
    char path[PATH_BYTES], relative[CG_TREE_PATH_BYTES], *text;
    cg_key key;
    cg_fingerprint fingerprint;
    cg_status status = path_of(config, "profiles/default", path, error);
    if (status != CG_OK)
        return status;
    status = read_text(path, &text);
    if (status == CG_ERR_NOT_FOUND)
        return CG_OK; /* L0 only */
    if (status != CG_OK)
        return cg_sentence_say(error, status, "%s: %s", path, cg_strerror(status));
    /* Of the text only the first line, which ends behind the digits. */
    const bool is_hex = cg_key_from_hex(text, &key) && (text[32] == '\n' || text[32] == '\0');
    free(text);
    if (!is_hex)
        return cg_sentence_say(error, CG_ERR_CORRUPT,
                               "%s must hold the 32 hexadecimal digits of a profile", path);
    memcpy(fingerprint.bytes, key.bytes, sizeof key.bytes);
    if ((status = cg_tree_profile_path(config->model, &fingerprint, relative, sizeof relative)) !=
        CG_OK)
        return cg_sentence_say(error, status, "\"model\": %s", cg_strerror(status));
    snprintf(path, sizeof path, "%s/%s", config->root, relative);
    if ((status = cg_profile_open_file(path, &model->profile)) != CG_OK)
        return cg_sentence_say(error, status, "%s: %s", path, cg_strerror(status));

    cg_geometry geometry = *cg_profile_geometry(model->profile);
    geometry.dtype = model->geometry.dtype; /* any dtype is coded */
    if (memcmp(cg_profile_fingerprint(model->profile), &fingerprint, sizeof fingerprint) != 0)
        return cg_sentence_say(error, CG_ERR_FOREIGN_PROFILE,
                               "%s is another profile than its name says", path);
    if (memcmp(cg_profile_model(model->profile), &model->fingerprint, sizeof fingerprint) != 0 ||
        !cg_geometry_equal(&geometry, &model->geometry))
        return cg_sentence_say(error, CG_ERR_FOREIGN_MODEL, "%s is of another model", path);
    if ((status = cg_profile_for_cache_scales(model->profile, scales)) != CG_OK)
        return cg_sentence_say(error, status, "%s cannot code a cache of these scales: %s", path,
                               cg_strerror(status));
    model->profile_fingerprint = fingerprint;
    return CG_OK;
}

/* A bad curve must not cost the cache: the built-in one is used, and the sentence says so. text: of
 * model.json; NULL: there is none. */
static void take_quality(cg_model *model, const char *text, const char *path,
                         const cg_sentence *error)
{
    char why[256] = "";
    const cg_sentence reason = {why, sizeof why};
    cg_sentence_say(error, CG_OK, "%s", "");
    model->quality = cg_quality_built_in;
    if (text != NULL && model->profile != NULL &&
        cg_quality_read(&model->quality, text, &model->profile_fingerprint, &reason) ==
            CG_ERR_CORRUPT)
        cg_sentence_say(error, CG_OK, "%s: %s; the built-in curve is used", path, why);
}

cg_status cg_model_init(cg_model *model, const cg_config *config, const cg_sentence *error)
{
    char path[PATH_BYTES], *text = NULL;
    float(*scales)[CG_N_PLANES] = NULL;
    memset(model, 0, sizeof *model);

    cg_status status = path_of(config, "model.json", path, error);
    if (status != CG_OK)
        return status;
    status = read_text(path, &text);
    if (status == CG_ERR_NOT_FOUND)
        status = take_configured(model, config, path, error);
    else if (status != CG_OK)
        return cg_sentence_say(error, status, "%s: %s", path, cg_strerror(status));
    else if ((status = take_json(model, text, &config->geometry, path, error)) == CG_OK)
        model->has_json = true;
    if (status != CG_OK)
        goto done;
    /* The type of the engine's cache: the one thing in which the two sources may differ. */
    if (config->geometry.dtype != 0)
        model->geometry.dtype = (uint8_t)config->geometry.dtype;
    model->geometry.n_planes = CG_N_PLANES;
    if ((status = cg_geometry_check(&model->geometry)) != CG_OK) {
        cg_sentence_say(error, status, "\"geometry\": %s", cg_strerror(status));
        goto done;
    }

    if ((status = collect_scales(&config->geometry, &model->geometry, &scales, error)) != CG_OK)
        goto done;
    model->scales = cg_cache_scales_hash(scales, model->geometry.n_layers);

    model->key_fingerprint = cg_key_model(&model->fingerprint, model->geometry.dtype);
    if ((status = open_profile(model, config, scales, error)) == CG_OK)
        take_quality(model, text, path, error);
    else
        cg_model_destroy(model);
done:
    free(text);
    free(scales);
    return status;
}

const cg_fingerprint *cg_model_profile(const cg_model *model)
{
    return model->profile != NULL ? &model->profile_fingerprint : NULL;
}

void cg_model_destroy(cg_model *model)
{
    cg_profile_free(model->profile);
    model->profile = NULL;
}

char *cg_model_json(const cg_model *model)
{
    char hex[CG_KEY_HEX_BYTES], *text;
    cg_key key;
    memcpy(key.bytes, model->fingerprint.bytes, sizeof key.bytes);
    cg_key_to_hex(&key, hex);
    if (asprintf(&text,
                 "{\"version\": 1, \"n_layers\": %u, \"n_kv_heads\": %u, \"head_dim\": %u, "
                 "\"dtype\": \"%s\", \"model_fingerprint\": \"%s\"}\n",
                 model->geometry.n_layers, model->geometry.n_kv_heads, model->geometry.head_dim,
                 cg_dtype_name(model->geometry.dtype), hex) < 0)
        return NULL;
    return text;
}
