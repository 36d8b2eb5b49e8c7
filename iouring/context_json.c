/* The context.json of a context: codec/FORMAT.md, "The tree of a store". Written in lines, one for
 * each chunk, so that what a context that grows says of its chunks can be compared as text. */
#include "iouring/context_state.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Bytes of the UTF-8 character at text; 0 if there is none. */
static size_t utf8_bytes(const unsigned char *text)
{
    static const struct {
        unsigned char mask, lead;
        unsigned least;
    } forms[] = {{0x80, 0x00, 0}, {0xe0, 0xc0, 0x80}, {0xf0, 0xe0, 0x800}, {0xf8, 0xf0, 0x10000}};
    for (size_t i = 0; i < 4; i++) {
        if ((text[0] & forms[i].mask) != forms[i].lead)
            continue;
        unsigned code = text[0] & (unsigned char)~forms[i].mask;
        for (size_t j = 1; j <= i; j++) {
            if ((text[j] & 0xc0) != 0x80)
                return 0;
            code = code << 6 | (text[j] & 0x3fu);
        }
        return code < forms[i].least || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)
                   ? 0
                   : i + 1;
    }
    return 0;
}

/* What is not UTF-8 becomes U+FFFD: JSON has no other way, and a name here only informs. */
static void print_string(FILE *out, const char *text)
{
    fputc('"', out);
    while (*text != '\0') {
        const size_t n_bytes = utf8_bytes((const unsigned char *)text);
        if (n_bytes == 0)
            fputs("\\ufffd", out);
        else if (*text == '"' || *text == '\\')
            fprintf(out, "\\%c", *text);
        else if ((unsigned char)*text < 0x20)
            fprintf(out, "\\u%04x", (unsigned)*text);
        else
            fwrite(text, 1, n_bytes, out);
        text += n_bytes == 0 ? 1 : n_bytes;
    }
    fputc('"', out);
}

static void print_hex(FILE *out, const uint8_t bytes[CG_KEY_BYTES])
{
    char hex[CG_KEY_HEX_BYTES];
    cg_key key;
    memcpy(key.bytes, bytes, sizeof key.bytes);
    cg_key_to_hex(&key, hex);
    fprintf(out, "\"%s\"", hex);
}

static void print_chunk(FILE *out, const cg_chunk_header *h, uint8_t levels)
{
    const char *separator = "";
    fputs("{\"key\":", out);
    print_hex(out, h->key.bytes);
    fprintf(out, ",\"first_position\":%u,\"n_tokens\":%u,\"levels\":[", h->first_position,
            h->n_tokens);
    for (unsigned level = 0; level < CG_N_LEVELS; level++) {
        if ((levels >> level & 1) == 0)
            continue;
        fprintf(out, "%s\"L%u\"", separator, level);
        separator = ",";
    }
    fputs("]}", out);
}

/* What does not change while a context grows. */
static void print_head(FILE *out, const cg_context *c, const cg_fingerprint *model)
{
    fputs("{\"version\":1,\n\"model\":", out);
    print_string(out, c->store->model);
    fputs(",\n\"model_fingerprint\":", out);
    print_hex(out, model->bytes);
    fputs(",\n\"profile\":", out);
    if (c->has_lossy_level)
        print_hex(out, c->profile->bytes);
    else
        fputs("null", out);
    fputs(",\n\"n_tokens\":", out);
}

cg_status cg_context_make_json(cg_context *c)
{
    FILE *out = open_memstream(&c->json, &c->json_bytes);
    if (out == NULL)
        return CG_ERR_NO_MEMORY;
    print_head(out, c, &c->headers[0].model);
    fprintf(out, "%zu,\n\"chunks\":[\n", c->tokens_bytes / 4);
    for (size_t i = 0; i < c->n_links; i++) {
        fputs(i == 0 ? "" : ",\n", out);
        print_chunk(out, &c->headers[i], c->links[i].levels);
    }
    fputs("\n]}\n", out);
    const bool failed = ferror(out) != 0;
    return fclose(out) != 0 || failed ? CG_ERR_NO_MEMORY : CG_OK;
}

/* Whether the line, which lacks its comma, is what our context.json will say of the chunk. */
static bool is_same_line(const cg_context *c, size_t index, const char *line, size_t n_bytes)
{
    char *want = NULL;
    size_t want_bytes = 0;
    FILE *out = open_memstream(&want, &want_bytes);
    if (out == NULL)
        return false;
    print_chunk(out, &c->headers[index], c->links[index].levels);
    const bool is_same =
        fclose(out) == 0 && want_bytes == n_bytes && memcmp(want, line, n_bytes) == 0;
    free(want);
    return is_same;
}

/* Where the chunks begin in the context.json that is there, if it is of our model and profile;
 * else NULL. */
static char *find_chunks(const cg_context *c, cg_fingerprint *model_out)
{
    static const char before[] = "\"model_fingerprint\":\"", chunks[] = "\"chunks\":[\n";
    char *want = NULL;
    size_t want_bytes = 0;
    cg_key model;
    char *at = c->old_json != NULL ? strstr(c->old_json, before) : NULL;
    if (at == NULL || !cg_key_from_hex(at + strlen(before), &model))
        return NULL;
    memcpy(model_out->bytes, model.bytes, sizeof model_out->bytes);
    FILE *out = open_memstream(&want, &want_bytes);
    if (out == NULL)
        return NULL;
    print_head(out, c, model_out);
    const bool is_same = fclose(out) == 0 && strncmp(c->old_json, want, want_bytes) == 0;
    free(want);
    at = is_same ? strstr(c->old_json, chunks) : NULL;
    return at != NULL ? at + strlen(chunks) : NULL;
}

bool cg_context_keep_chunks(cg_context *c)
{
    cg_fingerprint model;
    char *line = find_chunks(c, &model);
    bool keeps_some = false;
    c->keeps_profile = line != NULL && c->has_lossy_level;
    for (size_t i = 0; line != NULL && *line == '{' && i < c->n_links; i++) {
        char *end = strchr(line, '\n');
        cg_chunk_header *h = &c->headers[i];
        if (end == NULL)
            break;
        *h = (cg_chunk_header){.key = c->links[i].key, .model = model};
        *end = '\0'; /* for a moment: sscanf() looks for the end of the text each time */
        if (sscanf(line,
                   "{\"key\":\"%*32[0-9a-f]\",\"first_position\":%" SCNu32 ",\"n_tokens\":%" SCNu32
                   ",",
                   &h->first_position, &h->n_tokens) == 2)
            c->kept[i] = (uint64_t)h->first_position + h->n_tokens <= c->n_old_tokens &&
                         is_same_line(c, i, line, (size_t)(end - line) - (end[-1] == ','));
        keeps_some = keeps_some || c->kept[i];
        *end = '\n';
        line = end + 1;
    }
    return keeps_some;
}
