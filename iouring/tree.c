#include "iouring/tree.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { MAX_COMPONENTS = 5, KEY_DIGITS = CG_KEY_HEX_BYTES - 1, INDEX_DIGITS = 5 };

typedef struct component {
    const char *text;
    size_t n_bytes;
} component;

static bool equals(const component *c, const char *text)
{
    return c->n_bytes == strlen(text) && memcmp(c->text, text, c->n_bytes) == 0;
}

static bool name_is_valid(const char *text, size_t n_bytes)
{
    if (n_bytes == 0 || n_bytes >= CG_TREE_NAME_BYTES || text[0] == '.')
        return false;
    for (size_t i = 0; i < n_bytes; i++)
        if ((unsigned char)text[i] < 0x20 || text[i] == 0x7f || text[i] == '/')
            return false;
    return true;
}

bool cg_tree_name_is_valid(const char *text)
{
    return name_is_valid(text, strnlen(text, CG_TREE_NAME_BYTES));
}

bool cg_tree_model_is_valid(const char *text)
{
    return cg_tree_name_is_valid(text) && strcmp(text, CG_TREE_QUARANTINE) != 0;
}

/* False when the path has an empty, "." or ".." component, or more components than any rule speaks
 * of. */
static bool split(const char *path, component components[MAX_COMPONENTS], size_t *n_components_out)
{
    size_t n = 0;
    for (;;) {
        const size_t n_bytes = strcspn(path, "/");
        const component c = {path, n_bytes};
        if (n == MAX_COMPONENTS || n_bytes == 0 || equals(&c, ".") || equals(&c, ".."))
            return false;
        components[n++] = c;
        if (path[n_bytes] == '\0')
            break;
        path += n_bytes + 1;
    }
    *n_components_out = n;
    return true;
}

static bool is_hex(const char *text, size_t n_digits)
{
    return strspn(text, "0123456789abcdef") >= n_digits;
}

static bool parse_level(char digit, uint8_t *level_out)
{
    if (digit < '0' || digit >= '0' + CG_N_LEVELS)
        return false;
    *level_out = (uint8_t)(digit - '0');
    return true;
}

/* "L0.kv" or "<fp8>-L1.kv" */
static bool parse_object_leaf(const component *leaf, cg_tree_name *name)
{
    const char *at = leaf->text;
    if (equals(leaf, "L0.kv")) {
        name->level = CG_L0;
        return true;
    }
    if (leaf->n_bytes != CG_TREE_FP8_DIGITS + strlen("-L1.kv") || !is_hex(at, CG_TREE_FP8_DIGITS))
        return false;
    memcpy(name->fp8, at, CG_TREE_FP8_DIGITS);
    at += CG_TREE_FP8_DIGITS;
    return at[0] == '-' && at[1] == 'L' && memcmp(at + 3, ".kv", 3) == 0 &&
           parse_level(at[2], &name->level) && name->level != CG_L0;
}

/* objects/ab/<key>/<leaf> The two digits must be the key's own: a key has one path, or a look-up
 * would miss the other. */
static bool parse_object(const component *c, cg_tree_name *name)
{
    return c[1].n_bytes == 2 && c[2].n_bytes == KEY_DIGITS &&
           memcmp(c[1].text, c[2].text, 2) == 0 && cg_key_from_hex(c[2].text, &name->key) &&
           parse_object_leaf(&c[3], name);
}

/* profiles/<fp>.cgp */
static bool parse_profile(const component *c, cg_tree_name *name)
{
    return c[1].n_bytes == KEY_DIGITS + strlen(".cgp") && cg_key_from_hex(c[1].text, &name->key) &&
           memcmp(c[1].text + KEY_DIGITS, ".cgp", 4) == 0;
}

/* L2/00012.kv */
static bool parse_context_chunk(const component *c, cg_tree_name *name)
{
    if (c[0].n_bytes != 2 || c[0].text[0] != 'L' || !parse_level(c[0].text[1], &name->level) ||
        c[1].n_bytes != INDEX_DIGITS + strlen(".kv") ||
        memcmp(c[1].text + INDEX_DIGITS, ".kv", 3) != 0)
        return false;
    for (size_t i = 0; i < INDEX_DIGITS; i++) {
        if (c[1].text[i] < '0' || c[1].text[i] > '9')
            return false;
        name->index = name->index * 10 + (uint32_t)(c[1].text[i] - '0');
    }
    return true;
}

static cg_tree_kind kind_of_context_leaf(const component *leaf)
{
    if (equals(leaf, "context.json"))
        return CG_TREE_CONTEXT_JSON;
    if (equals(leaf, "profile.cgp"))
        return CG_TREE_CONTEXT_PROFILE;
    if (equals(leaf, "model.json"))
        return CG_TREE_CONTEXT_MODEL;
    return CG_TREE_ORDINARY;
}

static cg_tree_kind classify(const component *c, size_t n, cg_tree_name *name)
{
    /* All rules are about what lies at least two folders deep, in a model with a valid name. */
    if (n < 3 || !name_is_valid(c[0].text, c[0].n_bytes) || equals(&c[0], CG_TREE_QUARANTINE))
        return CG_TREE_ORDINARY;
    if (n == 5 && equals(&c[1], "objects") && parse_object(c + 1, name))
        return CG_TREE_OBJECT_CHUNK;
    if (n == 3 && equals(&c[1], "profiles") && parse_profile(c + 1, name))
        return CG_TREE_PROFILE;
    if (!equals(&c[1], "contexts") || !name_is_valid(c[2].text, c[2].n_bytes))
        return CG_TREE_ORDINARY;
    if (n == 5 && parse_context_chunk(c + 3, name))
        return CG_TREE_CONTEXT_CHUNK;
    return n == 4 ? kind_of_context_leaf(&c[3]) : CG_TREE_ORDINARY;
}

void cg_tree_parse(const char *path, cg_tree_name *name_out)
{
    component c[MAX_COMPONENTS];
    size_t n;
    cg_tree_name name = {0};
    memset(name_out, 0, sizeof *name_out);
    if (strnlen(path, CG_TREE_PATH_BYTES) == CG_TREE_PATH_BYTES || !split(path, c, &n))
        return;
    /* Into a local: a rule that fails half-way has written parts of the name, and an ORDINARY name
     * has none. */
    name.kind = classify(c, n, &name);
    if (name.kind == CG_TREE_ORDINARY)
        return;
    memcpy(name.model, c[0].text, c[0].n_bytes);
    if (name.kind != CG_TREE_OBJECT_CHUNK && name.kind != CG_TREE_PROFILE)
        memcpy(name.context, c[2].text, c[2].n_bytes);
    *name_out = name;
}

bool cg_tree_is_folder(const char *path)
{
    component c[MAX_COMPONENTS];
    size_t n;
    if (!split(path, c, &n) || n == MAX_COMPONENTS || c[0].text[0] == '.')
        return false;
    /* More names than the rules need. That does no harm: it only forbids a link at a name that
     * nothing reads. */
    if (n == 1 || equals(&c[1], "objects"))
        return true;
    if (equals(&c[1], "profiles"))
        return n == 2;
    return equals(&c[1], "contexts") && (n < 4 || (c[3].n_bytes == 2 && c[3].text[0] == 'L'));
}

static void fp8_of(const cg_fingerprint *profile, char fp8_out[CG_TREE_FP8_DIGITS + 1])
{
    char hex[CG_KEY_HEX_BYTES];
    cg_key key;
    memcpy(key.bytes, profile->bytes, sizeof key.bytes);
    cg_key_to_hex(&key, hex);
    memcpy(fp8_out, hex, CG_TREE_FP8_DIGITS);
    fp8_out[CG_TREE_FP8_DIGITS] = '\0';
}

cg_status cg_tree_check(const cg_tree_name *name, const cg_chunk_header *header)
{
    char fp8[CG_TREE_FP8_DIGITS + 1];
    if ((name->kind != CG_TREE_OBJECT_CHUNK && name->kind != CG_TREE_CONTEXT_CHUNK) ||
        !cg_chunk_holds(header, name->level))
        return CG_ERR_INVALID_ARGUMENT;
    if (name->kind == CG_TREE_CONTEXT_CHUNK)
        return CG_OK;
    if (!cg_key_equal(&name->key, &header->key))
        return CG_ERR_FOREIGN_TOKENS;
    if (name->level == CG_L0)
        return CG_OK;
    fp8_of(&header->profile, fp8);
    return strcmp(name->fp8, fp8) == 0 ? CG_OK : CG_ERR_FOREIGN_PROFILE;
}

__attribute__((format(printf, 3, 4))) static cg_status print(char *path_out, size_t path_bytes,
                                                             const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const int n = vsnprintf(path_out, path_bytes, format, arguments);
    va_end(arguments);
    return n >= 0 && (size_t)n < path_bytes ? CG_OK : CG_ERR_BUFFER_TOO_SMALL;
}

cg_status cg_tree_object_path(const char *model, const cg_key *key, cg_level level,
                              const cg_fingerprint *profile, char *path_out, size_t path_bytes)
{
    char hex[CG_KEY_HEX_BYTES], fp8[CG_TREE_FP8_DIGITS + 1];
    if (!cg_tree_model_is_valid(model) || (unsigned)level >= CG_N_LEVELS ||
        (level != CG_L0 && profile == NULL))
        return CG_ERR_INVALID_ARGUMENT;
    cg_key_to_hex(key, hex);
    if (level == CG_L0)
        return print(path_out, path_bytes, "%s/objects/%.2s/%s/L0.kv", model, hex, hex);
    fp8_of(profile, fp8);
    return print(path_out, path_bytes, "%s/objects/%.2s/%s/%s-L%u.kv", model, hex, hex, fp8,
                 (unsigned)level);
}

cg_status cg_tree_context_path(const char *model, const char *context, cg_level level,
                               uint32_t index, char *path_out, size_t path_bytes)
{
    if (!cg_tree_model_is_valid(model) || !cg_tree_name_is_valid(context) ||
        (unsigned)level >= CG_N_LEVELS || index >= CG_TREE_MAX_CHUNKS)
        return CG_ERR_INVALID_ARGUMENT;
    return print(path_out, path_bytes, "%s/contexts/%s/L%u/%05u.kv", model, context,
                 (unsigned)level, (unsigned)index);
}

cg_status cg_tree_context_file_path(const char *model, const char *context, const char *leaf,
                                    char *path_out, size_t path_bytes)
{
    if (!cg_tree_model_is_valid(model) || !cg_tree_name_is_valid(context))
        return CG_ERR_INVALID_ARGUMENT;
    return print(path_out, path_bytes, "%s/contexts/%s/%s", model, context, leaf);
}

cg_status cg_tree_profile_path(const char *model, const cg_fingerprint *profile, char *path_out,
                               size_t path_bytes)
{
    char hex[CG_KEY_HEX_BYTES];
    cg_key key;
    if (!cg_tree_model_is_valid(model))
        return CG_ERR_INVALID_ARGUMENT;
    memcpy(key.bytes, profile->bytes, sizeof key.bytes);
    cg_key_to_hex(&key, hex);
    return print(path_out, path_bytes, "%s/profiles/%s.cgp", model, hex);
}

cg_status cg_tree_model_file_path(const char *model, const char *leaf, char *path_out,
                                  size_t path_bytes)
{
    if (!cg_tree_model_is_valid(model))
        return CG_ERR_INVALID_ARGUMENT;
    return print(path_out, path_bytes, "%s/%s", model, leaf);
}
