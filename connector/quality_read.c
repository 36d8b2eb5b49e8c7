/* What is read of a curve counts only when all of it is good: each function says false at the first
 * number that is not. */
#include "connector/quality_read.h"

#include <jansson.h>
#include <math.h>
#include <string.h>

enum { MOST_TOKENS = 1 << 30 };
static const double MOST_KL = 1e3, LEAST_KL = 1e-12, LEAST_BEYOND = 1e-3; /* never nothing */

static bool take_number(const json_t *item, double least, double most, double *number_out)
{
    const double number = json_number_value(item);
    *number_out = number;
    return json_is_number(item) && number >= least && number <= most;
}

static bool take_errors(cg_quality *quality, const json_t *kl)
{
    if (!json_is_array(kl) || json_array_size(kl) != CG_N_LEVELS - 1)
        return false;
    double least = LEAST_KL; /* a level is no better than the next finer one */
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
        if (!take_number(json_array_get(kl, level - 1), least, MOST_KL, &quality->errors[level]))
            return false;
        least = quality->errors[level];
    }
    return true;
}

static bool take_points(cg_quality *quality, const json_t *last)
{
    const size_t n = json_array_size(last); /* 0: no array */
    cg_quality_point before = {0, 0};
    if (n < 1 || n > CG_QUALITY_MAX_POINTS)
        return false;
    for (size_t i = 0; i < n; i++) {
        const json_t *pair = json_array_get(last, i);
        cg_quality_point point;
        /* Each point at least a token behind the one before: a curve between two at the same place
         * would divide by 0. */
        if (json_array_size(pair) != 2 ||
            !take_number(json_array_get(pair, 0), before.tokens + 1, MOST_TOKENS, &point.tokens) ||
            !take_number(json_array_get(pair, 1), 0, 1, &point.sum) || !(point.sum > before.sum))
            return false;
        quality->points[i] = before = point;
    }
    quality->n_points = (uint32_t)n;
    return before.sum == 1;
}

static cg_status take_curve(cg_quality *quality, const json_t *curve, const cg_sentence *error)
{
    if (!take_errors(quality, json_object_get(curve, "kl")))
        return cg_sentence_say(
            error, CG_ERR_CORRUPT,
            "\"quality.kl\" must be %u numbers from 1e-12 to 1000 that do not fall",
            CG_N_LEVELS - 1);
    if (!take_points(quality, json_object_get(curve, "last")))
        return cg_sentence_say(error, CG_ERR_CORRUPT,
                               "\"quality.last\" must be 1 to %d pairs of tokens and sums, both "
                               "rising, and 1 the last sum",
                               CG_QUALITY_MAX_POINTS);
    if (!take_number(json_object_get(curve, "beyond"), LEAST_BEYOND, 1, &quality->beyond))
        return cg_sentence_say(error, CG_ERR_CORRUPT, "\"quality.beyond\" must be from 0.001 to 1");
    return CG_OK;
}

cg_status cg_quality_read(cg_quality *quality_out, const char *model_json,
                          const cg_fingerprint *profile, const cg_sentence *error)
{
    json_error_t json_error;
    cg_quality read = {0};
    char hex[CG_KEY_HEX_BYTES];
    cg_key key;
    *quality_out = cg_quality_built_in;
    json_t *object = json_loads(model_json, JSON_REJECT_DUPLICATES, &json_error);
    /* What is no JSON was refused before (connector/model.c). */
    if (object == NULL && json_error_code(&json_error) == json_error_out_of_memory)
        return CG_ERR_NO_MEMORY;
    const json_t *curves = json_object_get(object, "quality");
    memcpy(key.bytes, profile->bytes, sizeof key.bytes);
    cg_key_to_hex(&key, hex);
    const json_t *curve = json_object_get(curves, hex);
    cg_status status = CG_ERR_NOT_FOUND;
    if (curves != NULL && !json_is_object(curves))
        status = cg_sentence_say(error, CG_ERR_CORRUPT, "\"quality\" is no JSON object");
    else if (curve != NULL)
        status = take_curve(&read, curve, error);
    json_decref(object);
    if (status == CG_OK)
        *quality_out = read;
    return status;
}
