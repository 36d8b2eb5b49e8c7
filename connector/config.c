/* A table of rules, one for each key, and a setter for each type of value. What several keys must
 * agree in is checked last (check_together()). */
#include "connector/config.h"

#include "iouring/tree.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum value_type {
    STRING,
    INTEGER,
    NUMBER,
    BOOLEAN,
    CHOICE,
    LEVELS,
    CPUS,
    GEOMETRY
} value_type;

static const char *const LEVEL_NAMES[] = {"L0", "L1", "L2", "L3", NULL};
static const char *const LEVEL_OR_AUTO[] = {"auto", "L0", "L1", "L2", "L3", NULL};
static const char *const POLICIES[] = {"ttft_budget", "min_delay", "fixed", "paper", NULL};
static const char *const ESTIMATORS[] = {"harmonic", "last", NULL};
static const char *const BACKENDS[] = {"auto", "io_uring", "threads", NULL};
static const char *const CACHES[] = {"cached", "direct", NULL};
static const char *const STREAMS[] = {"bytes", "latency", NULL};

typedef struct key_rule {
    const char *name;
    value_type type;
    size_t offset; /* in cg_config */
    double initial, least,
        most; /* numbers; initial also of choices (an index) and level sets (a mask) */
    const char *const *choices;
} key_rule;

#define AT(field) offsetof(cg_config, field)
/* clang-format off: a row a line, with what it means above it */
/* key, type, where, default, least, most, choices */
static const key_rule RULES[] = {
    /* required: the store's directory or mount */
    {"root", STRING, AT(root), 0, 0, 0, NULL},
    /* required: the model's folder in it */
    {"model", STRING, AT(model), 0, 0, 0, NULL},
    /* of the ranks of a tensor-parallel engine: how they find each other */
    {"group", STRING, AT(group), 0, 0, 0, NULL},
    /* tokens a chunk */
    {"chunk_tokens", INTEGER, AT(chunk_tokens), 256, 8, 65536, NULL},
    /* tails are stored at multiples of it; divides chunk_tokens */
    {"tail_multiple", INTEGER, AT(tail_multiple), 32, 1, 65536, NULL},
    /* levels that a save makes (L0 alone without a profile) */
    {"store_levels", LEVELS, AT(store_levels), 0xe, 0, 0, NULL},
    /* of what a save makes: few, or for a GPU that loads one chunk */
    {"streams", CHOICE, AT(streams), 0, 0, 0, STREAMS},
    /* the one level to load, or the controller's choice */
    {"level", CHOICE, AT(level_plus_1), 0, 0, 0, LEVEL_OR_AUTO},
    /* nothing worse is loaded, provenance counted */
    {"worst_level", CHOICE, AT(worst_level), 3, 0, 0, LEVEL_NAMES},
    {"policy", CHOICE, AT(policy), 0, 0, 0, POLICIES},
    {"ttft_budget_ms", INTEGER, AT(ttft_budget_ms), 2000, 1, 86400000, NULL},
    /* the link's Mbit/s before the first sample; 0 = unknown */
    {"prior_mbps", NUMBER, AT(prior_mbps), 0, 0, 1e9, NULL},
    {"estimator", CHOICE, AT(estimator), 0, 0, 0, ESTIMATORS},
    /* prefill speed; 0 = measured */
    {"recompute_tokens_per_s", NUMBER, AT(recompute_tokens_per_s), 0, 0, 1e12, NULL},
    /* behind so many tokens one takes twice as long; 0 = measured, or never */
    {"recompute_doubling_tokens", NUMBER, AT(recompute_doubling_tokens), 0, 0, 1e12, NULL},
    /* that decode; 0 = as many as CPUs, 8 at most; encoders: README.md */
    {"threads", INTEGER, AT(threads), 0, 0, 1024, NULL},
    /* niceness of those that encode */
    {"encode_nice", INTEGER, AT(encode_nice), 19, 0, 19, NULL},
    /* CPUs of all of the connector's threads; [] = all of the process */
    {"cpu_affinity", CPUS, AT(cpus), 0, 0, 0, NULL},
    {"io_backend", CHOICE, AT(io_backend), 0, 0, 0, BACKENDS},
    /* page cache or O_DIRECT */
    {"io_cache", CHOICE, AT(io_cache), 0, 0, 0, CACHES},
    /* reads under way at most */
    {"queue_depth", INTEGER, AT(queue_depth), 16, 1, 1024, NULL},
    /* then opening fails, and leaves what hangs behind */
    {"open_timeout_ms", INTEGER, AT(open_timeout_ms), 120000, 1, 86400000, NULL},
    /* then a read is abandoned */
    {"read_timeout_ms", INTEGER, AT(read_timeout_ms), 10000, 1, 86400000, NULL},
    /* then a look-up ends with what it knows */
    {"lookup_timeout_ms", INTEGER, AT(lookup_timeout_ms), 2000, 1, 86400000, NULL},
    /* a store that takes longer for a chunk hangs: saves end */
    {"save_timeout_ms", INTEGER, AT(save_timeout_ms), 10000, 1, 86400000, NULL},
    /* then closing leaves what hangs behind */
    {"close_timeout_ms", INTEGER, AT(close_timeout_ms), 10000, 1, 86400000, NULL},
    /* copied KV that waits to be saved; also chunks read and not yet decoded */
    {"staging_mib", INTEGER, AT(staging_mib), 1024, 1, 16777216, NULL},
    {"max_abandoned_reads", INTEGER, AT(max_abandoned_reads), 64, 1, 65536, NULL},
    /* how long a missing chunk is remembered */
    {"negative_ttl_ms", INTEGER, AT(negative_ttl_ms), 1000, 0, 86400000, NULL},
    /* how long a found chunk is remembered */
    {"positive_ttl_ms", INTEGER, AT(positive_ttl_ms), 10000, 0, 86400000, NULL},
    /* how long a chunk that failed is not offered */
    {"retry_ms", INTEGER, AT(retry_ms), 30000, 0, 86400000, NULL},
    {"gpu_library", STRING, AT(gpu_library), 0, 0, 0, NULL},
    /* chunks that a GPU has at once; 0 = by their size: cg_gpu_open() */
    {"gpu_slots", INTEGER, AT(gpu_slots), 0, 0, 64, NULL},
    /* pinned memory for KV that is copied off a GPU */
    {"gpu_staging_mib", INTEGER, AT(gpu_staging_mib), 512, 1, 16777216, NULL},
    /* where each load leaves a trace */
    {"trace_dir", STRING, AT(trace_dir), 0, 0, 0, NULL},
    {"read_only", BOOLEAN, AT(read_only), 0, 0, 0, NULL},
    /* for a model without model.json; dtype: also overrides it */
    {"geometry", GEOMETRY, AT(geometry), 0, 0, 0, NULL},
};
/* clang-format on */
enum { N_RULES = sizeof RULES / sizeof RULES[0] };

unsigned cg_dtype_from_name(const char *name)
{
    for (unsigned dtype = CG_DTYPE_BF16; dtype < CG_N_DTYPES; dtype++)
        if (strcmp(name, cg_dtype_name(dtype)) == 0)
            return dtype;
    return 0;
}

static int choice_index(const char *const *choices, const json_t *value)
{
    for (int i = 0; json_is_string(value) && choices[i] != NULL; i++)
        if (strcmp(choices[i], json_string_value(value)) == 0)
            return i;
    return -1;
}

static cg_status refuse_choice(const cg_sentence *error, const char *name,
                               const char *const *choices)
{
    char list[128] = "";
    for (int i = 0; choices[i] != NULL; i++) {
        const size_t used = strlen(list);
        snprintf(list + used, sizeof list - used, "%s\"%s\"", i > 0 ? ", " : "", choices[i]);
    }
    return cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT, "\"%s\" must be one of %s", name, list);
}

static cg_status set_levels(const char *name, const json_t *value, uint32_t *mask_out,
                            const cg_sentence *error)
{
    uint32_t mask = 0;
    for (size_t i = 0; i < json_array_size(value); i++) {
        const int level = choice_index(LEVEL_NAMES, json_array_get(value, i));
        if (level < 0)
            return refuse_choice(error, name, LEVEL_NAMES);
        mask |= 1u << level;
    }
    /* An empty list, or no list at all, whose size is 0. */
    if (mask == 0)
        return cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT,
                               "\"%s\" must be a list of at least one level", name);
    *mask_out = mask;
    return CG_OK;
}

static cg_status set_cpus(const char *name, const json_t *value, cg_config *config,
                          const cg_sentence *error)
{
    if (!json_is_array(value) || json_array_size(value) > CG_CONFIG_MAX_CPUS)
        return cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT,
                               "\"%s\" must be a list of CPU numbers", name);
    for (size_t i = 0; i < json_array_size(value); i++) {
        const json_t *cpu = json_array_get(value, i);
        if (!json_is_integer(cpu) || json_integer_value(cpu) < 0 ||
            json_integer_value(cpu) >= CG_CONFIG_MAX_CPUS)
            return cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT,
                                   "\"%s\" must be a list of CPU numbers from 0 to %d", name,
                                   CG_CONFIG_MAX_CPUS - 1);
        config->cpus[config->n_cpus++] = (uint32_t)json_integer_value(cpu);
    }
    return CG_OK;
}

static cg_status set_scales(const char *name, const json_t *value, cg_config_geometry *geometry,
                            unsigned plane, const cg_sentence *error)
{
    const size_t n = json_array_size(value); /* 0: no list */
    float *scales = n > 0 && n <= CG_MAX_LAYERS ? malloc(n * sizeof *scales) : NULL;
    if (n > 0 && n <= CG_MAX_LAYERS && scales == NULL)
        return CG_ERR_NO_MEMORY;
    geometry->scales[plane] = scales;
    geometry->n_scales[plane] = (uint32_t)n;
    for (size_t i = 0; i < n && scales != NULL; i++) {
        scales[i] = (float)json_number_value(json_array_get(value, i)); /* 0: no number */
        if (!isnormal(scales[i]) || scales[i] < 0)
            scales = NULL; /* geometry frees it */
    }
    return scales != NULL
               ? CG_OK
               : cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT,
                                 "\"geometry.%s\" must be a list of numbers above 0, one "
                                 "for each layer",
                                 name);
}

static cg_status set_geometry(json_t *value, cg_config *config, const cg_sentence *error)
{
    static const struct {
        const char *name;
        size_t offset;
        uint32_t most;
    } counts[] = {
        {"n_layers", offsetof(cg_config_geometry, n_layers), CG_MAX_LAYERS},
        {"n_kv_heads", offsetof(cg_config_geometry, n_kv_heads), CG_MAX_KV_HEADS},
        {"head_dim", offsetof(cg_config_geometry, head_dim), CG_MAX_HEAD_DIM},
    };
    cg_config_geometry *geometry = &config->geometry;
    if (!json_is_object(value))
        return cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT, "\"geometry\" must be an object");
    config->has_geometry = true;

    const char *name;
    json_t *item;
    json_object_foreach(value, name, item)
    {
        const char *text = json_string_value(item); /* NULL: no string */
        size_t i = 0;
        while (i < 3 && strcmp(name, counts[i].name) != 0)
            i++;
        if (i < 3) {
            const json_int_t count = json_is_integer(item) ? json_integer_value(item) : 0;
            if (count < 1 || count > counts[i].most)
                return cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT,
                                       "\"geometry.%s\" must be an integer from 1 to %u", name,
                                       counts[i].most);
            *(uint32_t *)((char *)geometry + counts[i].offset) = (uint32_t)count;
        } else if (strcmp(name, "dtype") == 0) {
            if (text == NULL || (geometry->dtype = cg_dtype_from_name(text)) == 0)
                return cg_sentence_say(
                    error, CG_ERR_INVALID_ARGUMENT,
                    "\"geometry.dtype\" must be one of \"bf16\", \"fp16\", \"fp32\", \"fp8_e4m3\", "
                    "\"fp8_e5m2\"");
        } else if (strcmp(name, "k_scales") == 0 || strcmp(name, "v_scales") == 0) {
            const cg_status status =
                set_scales(name, item, geometry, *name == 'k' ? CG_K : CG_V, error);
            if (status != CG_OK)
                return status;
        } else if (strcmp(name, "model_fingerprint") == 0) {
            cg_key key;
            if (text == NULL || strlen(text) != CG_KEY_HEX_BYTES - 1 ||
                !cg_key_from_hex(text, &key))
                return cg_sentence_say(
                    error, CG_ERR_INVALID_ARGUMENT,
                    "\"geometry.model_fingerprint\" must be 32 lower-case hexadecimal digits");
            memcpy(geometry->model_fingerprint.bytes, key.bytes, sizeof key.bytes);
            geometry->has_fingerprint = true;
        } else {
            return cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT, "unknown key \"geometry.%s\"",
                                   name);
        }
    }
    return CG_OK;
}

static cg_status set_value(const key_rule *rule, json_t *value, cg_config *config,
                           const cg_sentence *error)
{
    void *field = (char *)config + rule->offset;
    switch (rule->type) {
    case STRING:
        if (!json_is_string(value) || json_string_length(value) == 0)
            return cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT,
                                   "\"%s\" must be a string that is not empty", rule->name);
        return (*(char **)field = strdup(json_string_value(value))) != NULL ? CG_OK
                                                                            : CG_ERR_NO_MEMORY;
    case INTEGER:
        /* As doubles, in which the limits and all that lies between them are exact. */
        if (!json_is_integer(value) || (double)json_integer_value(value) < rule->least ||
            (double)json_integer_value(value) > rule->most)
            return cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT,
                                   "\"%s\" must be an integer from %.0f to %.0f", rule->name,
                                   rule->least, rule->most);
        *(uint32_t *)field = (uint32_t)json_integer_value(value);
        return CG_OK;
    case NUMBER:
        if (!json_is_number(value) || !(json_number_value(value) >= rule->least) ||
            json_number_value(value) > rule->most)
            return cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT,
                                   "\"%s\" must be a number from %.0f to %.0f", rule->name,
                                   rule->least, rule->most);
        *(double *)field = json_number_value(value);
        return CG_OK;
    case BOOLEAN:
        if (!json_is_boolean(value))
            return cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT, "\"%s\" must be true or false",
                                   rule->name);
        *(bool *)field = json_is_true(value);
        return CG_OK;
    case CHOICE: {
        const int index = choice_index(rule->choices, value);
        if (index < 0)
            return refuse_choice(error, rule->name, rule->choices);
        *(uint32_t *)field = (uint32_t)index;
        return CG_OK;
    }
    case LEVELS: return set_levels(rule->name, value, field, error);
    case CPUS: return set_cpus(rule->name, value, config, error);
    case GEOMETRY: return set_geometry(value, config, error);
    }
    return CG_ERR_INVALID_ARGUMENT;
}

static void set_defaults(cg_config *config)
{
    for (size_t i = 0; i < N_RULES; i++) {
        void *field = (char *)config + RULES[i].offset;
        /* Fields of these types are uint32_t, all of them. */
        if (RULES[i].type == INTEGER || RULES[i].type == CHOICE || RULES[i].type == LEVELS)
            *(uint32_t *)field = (uint32_t)RULES[i].initial;
        else if (RULES[i].type == NUMBER)
            *(double *)field = RULES[i].initial;
    }
}

static cg_status check_together(const cg_config *config, const cg_sentence *error)
{
    if (config->root == NULL)
        return cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT,
                               "\"root\" is missing: the directory of the store");
    if (config->model == NULL)
        return cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT,
                               "\"model\" is missing: the name of the model's folder in the store");
    if (!cg_tree_model_is_valid(config->model))
        return cg_sentence_say(
            error, CG_ERR_INVALID_ARGUMENT,
            "\"model\" must be a folder's name without '/', and not \"" CG_TREE_QUARANTINE "\"");
    if (config->chunk_tokens % config->tail_multiple != 0)
        return cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT,
                               "\"tail_multiple\" must divide \"chunk_tokens\"");
    if (config->level_plus_1 > 0 && config->level_plus_1 - 1 > config->worst_level)
        return cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT,
                               "\"level\" is worse than \"worst_level\"");
    return CG_OK;
}

cg_status cg_config_parse(const char *json, size_t json_bytes, cg_config **config_out,
                          const cg_sentence *error)
{
    cg_status status = CG_ERR_NO_MEMORY;
    json_error_t json_error;
    json_t *object = NULL;
    *config_out = NULL;

    cg_config *config = calloc(1, sizeof *config);
    if (config == NULL)
        goto done;
    set_defaults(config);
    /* Without duplicates each key is set once: a string that was set before would be lost. */
    object = json_loadb(json != NULL ? json : "", json_bytes, JSON_REJECT_DUPLICATES, &json_error);
    if (object == NULL) {
        status = cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT,
                                 "the configuration is no JSON: %s at line %d", json_error.text,
                                 json_error.line);
        goto done;
    }
    if (!json_is_object(object)) {
        status = cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT,
                                 "the configuration must be a JSON object");
        goto done;
    }
    const char *name;
    json_t *value;
    json_object_foreach(object, name, value)
    {
        size_t i = 0;
        while (i < N_RULES && strcmp(RULES[i].name, name) != 0)
            i++;
        status = i < N_RULES
                     ? set_value(&RULES[i], value, config, error)
                     : cg_sentence_say(error, CG_ERR_INVALID_ARGUMENT, "unknown key \"%s\"", name);
        if (status != CG_OK)
            goto done;
    }
    if ((status = check_together(config, error)) != CG_OK)
        goto done;
    *config_out = config;
    config = NULL;
done:
    json_decref(object);
    cg_config_free(config);
    return status;
}

void cg_config_free(cg_config *config)
{
    if (config == NULL)
        return;
    free(config->root);
    free(config->model);
    free(config->gpu_library);
    free(config->trace_dir);
    free(config->group);
    free(config->geometry.scales[CG_K]);
    free(config->geometry.scales[CG_V]);
    free(config);
}
