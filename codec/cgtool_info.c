/* codec/cgtool_info.c - `cgtool info`: what a chunk or a profile holds. */
#include "codec/cgtool.h"

#include "codec/block_order.h"
#include "codec/preset.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { HEAD_TOKENS = 16 }; /* token ids that are shown */

static const char *section_name(unsigned kind)
{
    switch (kind) {
    case CG_SECTION_TOKENS: return "tokens";
    case CG_SECTION_LOSSLESS: return "lossless";
    case CG_SECTION_SYMBOLS: return "symbols";
    case CG_SECTION_SINKS: return "sinks";
    case CG_SECTION_TO_L2: return "to L2";
    case CG_SECTION_TO_L1: return "to L1";
    case CG_SECTION_JOINT: return "joint";
    case CG_SECTION_JOINT_TO_L2: return "joint to L2";
    case CG_SECTION_JOINT_TO_L1: return "joint to L1";
    case CG_SECTION_STEPS: return "steps";
    default: return "unknown";
    }
}

static json_t *geometry_json(const cg_geometry *g)
{
    return json_pack("{s:i, s:i, s:i, s:s, s:i}", "n_layers", g->n_layers, "n_kv_heads",
                     g->n_kv_heads, "head_dim", g->head_dim, "dtype", cg_dtype_name(g->dtype),
                     "n_planes", g->n_planes);
}

static void print_geometry(const cg_geometry *g)
{
    printf("  geometry     %u layers x %u KV heads x %u, %s\n", g->n_layers, g->n_kv_heads,
           g->head_dim, cg_dtype_name(g->dtype));
}

/* ---- chunks ---- */

/* What is whole of a chunk. A damaged one is shown as far as its header goes. */
typedef struct chunk_view {
    cg_chunk chunk;
    cg_status status; /* of cg_chunk_verify() */
    bool has_sections;
    bool is_joined;                       /* K and V have one matrix: no section is a matrix of V */
    uint32_t n_tokens_shown;              /* 0 when the tokens are damaged */
    uint32_t *tokens;                     /* free() */
    bool has_steps;                       /* and they are whole */
    uint32_t n_blocks[CG_N_STEP_FACTORS]; /* of each step factor */
    double bits_per_element, ratio;
} chunk_view;

static const char *plane_name(const chunk_view *view, unsigned kind, unsigned plane)
{
    const bool is_matrix = kind != CG_SECTION_LOSSLESS && kind != CG_SECTION_SINKS;
    if (kind == CG_SECTION_TOKENS || kind == CG_SECTION_STEPS || cg_section_is_joint((uint8_t)kind))
        return "";
    return is_matrix && view->is_joined ? "K+V" : plane == CG_K ? "K" : "V";
}

/* How many blocks have each step factor. */
static void count_step_factors(const cg_tool_file *file, const cg_section *steps, chunk_view *view)
{
    view->has_steps = cg_chunk_section_check(&view->chunk, steps) == CG_OK;
    for (uint32_t b = 0; b < steps->bytes && view->has_steps; b++) {
        const uint8_t index = file->bytes[steps->offset + b];
        view->has_steps = index < CG_N_STEP_FACTORS;
        view->n_blocks[view->has_steps ? index : 0]++;
    }
}

static cg_status view_chunk(const cg_tool_file *file, chunk_view *view)
{
    *view = (chunk_view){0};
    view->status = cg_chunk_verify(file->bytes, file->n_bytes);
    view->has_sections = cg_chunk_open(file->bytes, file->n_bytes, &view->chunk) == CG_OK;
    cg_chunk_header *h = &view->chunk.header;
    if (!view->has_sections) {
        const cg_status status = cg_chunk_header_parse(file->bytes, file->n_bytes, h);
        if (status != CG_OK)
            return status;
    }
    const double n_elements = (double)cg_geometry_elements(&h->geometry, h->n_tokens);
    view->bits_per_element = 8.0 * (double)h->file_bytes / n_elements;
    view->ratio = 8.0 * (double)cg_dtype_bytes(h->geometry.dtype) / view->bits_per_element;
    if (!view->has_sections)
        return CG_OK;
    view->is_joined = true;
    for (uint32_t i = 0; i < h->n_sections; i++) {
        const cg_section s = cg_chunk_section(&view->chunk, i);
        view->is_joined &= s.kind != CG_SECTION_SYMBOLS || s.plane == CG_K;
        if (s.kind == CG_SECTION_STEPS)
            count_step_factors(file, &s, view);
    }
    view->tokens = malloc(h->n_tokens * sizeof *view->tokens);
    if (view->tokens == NULL)
        return CG_ERR_NO_MEMORY;
    if (cg_chunk_tokens(&view->chunk, view->tokens) == CG_OK)
        view->n_tokens_shown = h->n_tokens < HEAD_TOKENS ? h->n_tokens : HEAD_TOKENS;
    return CG_OK;
}

static json_t *chunk_json(const char *path, const chunk_view *view)
{
    const cg_chunk_header *h = &view->chunk.header;
    json_t *tokens = json_array(), *sections = json_array(), *level_bytes = json_object();
    for (unsigned level = h->level; level <= h->coarsest; level++)
        json_object_set_new(level_bytes, cg_tool_level_name(level),
                            json_integer((json_int_t)h->level_bytes[level]));
    for (uint32_t i = 0; i < view->n_tokens_shown; i++)
        json_array_append_new(tokens, json_integer(view->tokens[i]));
    for (uint32_t i = 0; view->has_sections && i < h->n_sections; i++) {
        const cg_section s = cg_chunk_section(&view->chunk, i);
        json_array_append_new(
            sections, json_pack("{s:s, s:s, s:i, s:I, s:I, s:f}", "kind", section_name(s.kind),
                                "plane", plane_name(view, s.kind, s.plane), "group", s.group,
                                "offset", (json_int_t)s.offset, "bytes", (json_int_t)s.bytes,
                                "share", (double)s.bytes / (double)h->file_bytes));
    }
    json_t *blocks = json_array(); /* empty without steps */
    for (unsigned i = 0; i < CG_N_STEP_FACTORS && view->has_steps; i++)
        json_array_append_new(blocks, json_integer((json_int_t)view->n_blocks[i]));
    char scales[17] = ""; /* without */
    if (h->cache_scales != 0)
        snprintf(scales, sizeof scales, "%016" PRIx64, h->cache_scales);
    return json_pack(
        "{s:o, s:s, s:s, s:b, s:i, s:s, s:s, s:o, s:s, s:I, s:I, s:i, s:s, s:s, s:s, s:s, s:s, "
        "s:I, s:I, s:I, s:f, s:f, s:o, s:o, s:o, s:o}",
        "path", cg_tool_json_text(path), "type", "chunk", "status", cg_strerror(view->status), "ok",
        view->status == CG_OK, "version", (int)h->version, "level", cg_tool_level_name(h->level),
        "prefix_level", cg_tool_level_name(h->prefix_level), "geometry",
        geometry_json(&h->geometry), "cache_scales", scales, "first_position",
        (json_int_t)h->first_position, "n_tokens", (json_int_t)h->n_tokens, "token_bytes",
        h->token_bytes, "model", cg_tool_hex(h->model.bytes).text, "profile",
        cg_tool_hex(h->profile.bytes).text, "parent", cg_tool_hex(h->parent.bytes).text, "extra",
        cg_tool_hex(h->extra.bytes).text, "key", cg_tool_hex(h->key.bytes).text, "file_bytes",
        (json_int_t)h->file_bytes, "header_bytes", (json_int_t)h->header_bytes, "elements",
        (json_int_t)cg_geometry_elements(&h->geometry, h->n_tokens), "bits_per_element",
        view->bits_per_element, "ratio", view->ratio, "tokens_head", tokens, "sections", sections,
        "level_bytes", level_bytes, "blocks_by_step_factor", blocks);
}

static void print_row(const char *kind, const char *where, uint64_t bytes, const cg_chunk_header *h)
{
    printf("  %-11s %-12s %12" PRIu64 "  %6.2f %%\n", kind, where, bytes,
           100.0 * (double)bytes / (double)h->file_bytes);
}

static void print_sections(const chunk_view *view)
{
    const cg_chunk_header *h = &view->chunk.header;
    uint64_t total[CG_SECTION_STEPS + 1][CG_N_PLANES] = {{0}};
    printf("\n  %-11s %-12s %12s  %8s\n", "section", "", "bytes", "share");
    print_row("header", "", h->header_bytes, h);
    for (uint32_t i = 0; i < h->n_sections; i++) {
        const cg_section s = cg_chunk_section(&view->chunk, i);
        char where[32] = "";
        if (*plane_name(view, s.kind, s.plane) != '\0')
            snprintf(where, sizeof where, "%s %s %u",
                     s.kind == CG_SECTION_LOSSLESS ? "layer" : "group",
                     plane_name(view, s.kind, s.plane), s.group);
        print_row(section_name(s.kind), where, s.bytes, h);
        total[s.kind][s.plane] += s.bytes;
    }
    for (unsigned kind = CG_SECTION_LOSSLESS; kind <= CG_SECTION_TO_L1; kind++) {
        for (unsigned plane = 0; plane < CG_N_PLANES; plane++) {
            char where[32];
            snprintf(where, sizeof where, "all %s", plane_name(view, kind, plane));
            if (total[kind][plane] > 0)
                print_row(section_name(kind), where, total[kind][plane], h);
        }
    }
}

static void print_chunk(const char *path, const chunk_view *view)
{
    const cg_chunk_header *h = &view->chunk.header;
    printf("%s\n", path);
    printf("  chunk        version %" PRIu32 ", level %s, %s\n", h->version,
           cg_tool_level_name(h->level),
           view->status == CG_OK ? "whole" : cg_strerror(view->status));
    printf("  tokens       %" PRIu32 ", positions %" PRIu32 " to %" PRIu32 "\n", h->n_tokens,
           h->first_position, h->first_position + h->n_tokens - 1);
    print_geometry(&h->geometry);
    printf("  prefix       %s%s\n", cg_tool_level_name(h->prefix_level),
           h->prefix_level == CG_L0 ? ": exact" : ": this KV was computed on a lossy prefix");
    printf("  model        %s\n", cg_tool_hex(h->model.bytes).text);
    if (h->level != CG_L0)
        printf("  profile      %s\n", cg_tool_hex(h->profile.bytes).text);
    if (h->cache_scales != 0)
        printf("  scales       %016" PRIx64
               ": elements are stored divided by scales of their own\n",
               h->cache_scales);
    printf("  parent       %s\n", cg_tool_hex(h->parent.bytes).text);
    if (!cg_key_is_zero(&h->extra))
        printf("  extra        %s\n", cg_tool_hex(h->extra.bytes).text);
    printf("  key          %s\n", cg_tool_hex(h->key.bytes).text);
    printf("  size         %" PRIu64 " bytes, %.4f bits per element, 1/%.1f of %s\n", h->file_bytes,
           view->bits_per_element, view->ratio, cg_dtype_name(h->geometry.dtype));
    for (unsigned level = h->level + 1u; level <= h->coarsest; level++)
        printf("  holds        %s, in its first %" PRIu64 " bytes\n", cg_tool_level_name(level),
               h->level_bytes[level]);
    if (view->n_tokens_shown > 0) {
        printf("  token ids   ");
        for (uint32_t i = 0; i < view->n_tokens_shown; i++)
            printf(" %" PRIu32, view->tokens[i]);
        printf("%s\n", view->n_tokens_shown < h->n_tokens ? " ..." : "");
    }
    if (view->has_steps) {
        printf("  blocks      ");
        for (unsigned i = 0; i < CG_N_STEP_FACTORS; i++)
            printf(" %" PRIu32 " at %.2f%s", view->n_blocks[i], (double)CG_STEP_FACTORS[i],
                   i + 1 < CG_N_STEP_FACTORS ? "," : " times the level's step\n");
    }
    if (view->has_sections)
        print_sections(view);
}

static int chunk_info(const cg_tool_options *options, const char *path, const cg_tool_file *file)
{
    chunk_view view;
    int code = CG_TOOL_OK;
    const cg_status status = view_chunk(file, &view);
    if (status != CG_OK) {
        code = cg_tool_fail(path, status);
        goto done;
    }
    if (options->json)
        code = cg_tool_print_json(chunk_json(path, &view), JSON_COMPACT);
    else
        print_chunk(path, &view);
    /* Shown as far as it goes, but the exit code says that it is damaged. */
    if (code == CG_TOOL_OK && view.status != CG_OK)
        code = cg_tool_fail(path, view.status);
done:
    free(view.tokens);
    return code;
}

/* ---- profiles ---- */

static const char *matrix_name(const cg_profile *p, unsigned matrix)
{
    return p->n_matrices == 1 ? "K+V" : matrix == CG_K ? "K" : "V";
}

static json_t *counts_json(const uint16_t counts[CG_DCT])
{
    json_t *all = json_array();
    for (unsigned f = 0; f < CG_DCT; f++)
        json_array_append_new(all, json_integer(counts[f]));
    return all;
}

/* n_active by level and frequency. */
static json_t *active_json(const cg_group *group, unsigned matrix)
{
    json_t *active = json_object();
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++)
        json_object_set_new(active, cg_tool_level_name(level),
                            counts_json(group->columns[level - 1][matrix].n_active));
    return active;
}

static json_t *joint_json(const cg_profile *p)
{
    if (p->joint == NULL)
        return json_null();
    json_t *given = json_object(), *fractions = json_object();
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
        json_object_set_new(given, cg_tool_level_name(level), counts_json(p->n_given[level - 1]));
        json_object_set_new(fractions, cg_tool_level_name(level),
                            json_integer((json_int_t)p->fraction_bits[level]));
    }
    return json_pack("{s:I, s:o, s:I, s:o, s:o}", "n_shared", (json_int_t)p->n_shared,
                     "fraction_bits", fractions, "n_components",
                     (json_int_t)p->joint->n_components[0], "n_given", given, "n_active",
                     active_json(p->joint, 0));
}

static json_t *profile_json(const char *path, const cg_profile *p, size_t n_bytes)
{
    json_t *steps = json_object(), *classes = json_array(), *groups = json_array();
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++)
        json_object_set_new(steps, cg_tool_level_name(level),
                            json_pack("{s:f, s:f}", "K", (double)p->step[level - 1][CG_K], "V",
                                      (double)p->step[level - 1][CG_V]));
    for (uint32_t i = 0; i < p->n_classes; i++)
        json_array_append_new(classes, json_pack("{s:i, s:i}", "shift", p->classes[i].shift,
                                                 "n_symbols", p->classes[i].n_symbols));
    for (uint32_t g = 0; g < p->n_groups; g++) {
        const cg_group *group = &p->groups[g];
        json_t *planes = json_object(); /* empty without bases: columns are the channels */
        for (unsigned plane = 0; plane < p->n_matrices && p->preset->has_bases; plane++)
            json_object_set_new(planes, matrix_name(p, plane),
                                json_pack("{s:I, s:o}", "n_components",
                                          (json_int_t)group->n_components[plane], "n_active",
                                          active_json(group, plane)));
        json_array_append_new(groups, json_pack("{s:I, s:I, s:I, s:o}", "first_layer",
                                                (json_int_t)group->first_layer, "n_layers",
                                                (json_int_t)group->n_layers, "n_channels",
                                                (json_int_t)group->n_channels, "planes", planes));
    }
    return json_pack(
        "{s:o, s:s, s:s, s:b, s:i, s:s, s:s, s:o, s:o, s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:o}",
        "path", cg_tool_json_text(path), "type", "profile", "status", cg_strerror(CG_OK), "ok", 1,
        "version", (int)p->version, "fingerprint", cg_tool_hex(p->fingerprint.bytes).text, "model",
        cg_tool_hex(p->model.bytes).text, "preset", cg_tool_json_text(p->preset_name), "geometry",
        geometry_json(&p->geometry), "rotary_dim", (json_int_t)p->rotary_dim, "n_sinks",
        (json_int_t)p->n_sinks, "n_query_heads", (json_int_t)p->n_query_heads, "file_bytes",
        (json_int_t)n_bytes, "steps", steps, "classes", classes, "joint", joint_json(p), "groups",
        groups);
}

/* Of a file's bytes only printable ASCII reaches a terminal; the others are escaped. */
static void print_text(const char *text)
{
    for (const char *at = text; *at != '\0'; at++) {
        if (*at >= ' ' && *at <= '~' && *at != '\\')
            putchar(*at);
        else
            printf("\\x%02x", (unsigned char)*at);
    }
}

static void print_counts(const uint16_t counts[CG_DCT])
{
    for (unsigned f = 0; f < CG_DCT; f++)
        printf(" %5u", counts[f]);
    putchar('\n');
}

/* The rest of the row of a matrix, and its further rows. */
static void print_active(const cg_group *group, unsigned matrix)
{
    printf(" %10u", group->n_components[matrix]);
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
        if (level > CG_L1)
            printf("  %35s", "");
        printf("   %s", cg_tool_level_name(level));
        print_counts(group->columns[level - 1][matrix].n_active);
    }
}

static void print_profile(const char *path, const cg_profile *p, size_t n_bytes)
{
    printf("%s\n", path);
    printf("  profile      version %" PRIu32 ", preset ", p->version);
    print_text(p->preset_name);
    printf(", whole\n");
    printf("  fingerprint  %s\n", cg_tool_hex(p->fingerprint.bytes).text);
    printf("  model        %s\n", cg_tool_hex(p->model.bytes).text);
    print_geometry(&p->geometry);
    printf("  rope         %s", p->rotary_dim > 0 ? "" : "none\n");
    if (p->rotary_dim > 0)
        printf("NeoX pairing, %" PRIu32 " of %u dimensions%s\n", p->rotary_dim,
               p->geometry.head_dim, p->n_ropes > 1 ? ", not alike in all layers" : "");
    printf("  sinks        the first %" PRIu32 " tokens of a context are exact\n", p->n_sinks);
    printf("  classes      %" PRIu32, p->n_classes);
    unsigned max_symbols = 0, max_shift = 0;
    for (uint32_t i = 0; i < p->n_classes; i++) {
        max_symbols = p->classes[i].n_symbols > max_symbols ? p->classes[i].n_symbols : max_symbols;
        max_shift = p->classes[i].shift > max_shift ? p->classes[i].shift : max_shift;
    }
    printf(", of up to %u symbols and shifts up to %u\n", max_symbols, max_shift);
    if (p->version == CG_PROFILE_VERSION_STEPS)
        printf("  blocks       have steps of their own%s\n",
               p->n_query_heads > 0 ? "" : ", but the profile does not tell an encoder which");
    printf("  size         %zu bytes\n", n_bytes);
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++)
        printf("  steps of %s  K %g, V %g\n", cg_tool_level_name(level),
               (double)p->step[level - 1][CG_K], (double)p->step[level - 1][CG_V]);

    if (!p->preset->has_bases) {
        printf("  tokens       %s\n", p->preset->about);
        for (uint32_t g = 0; g < p->n_groups; g++)
            printf("  group %-6" PRIu32 " layers %" PRIu32 "-%" PRIu32 "\n", g,
                   p->groups[g].first_layer, p->groups[g].first_layer + p->groups[g].n_layers - 1);
        return;
    }
    printf("\n  %-8s %-9s %-5s %10s   %s\n", "group", "layers", "plane", "components",
           "active by level and DCT frequency");
    for (uint32_t g = 0; g < p->n_groups; g++) {
        const cg_group *group = &p->groups[g];
        for (unsigned plane = 0; plane < p->n_matrices; plane++) {
            printf("  %-8" PRIu32 " %3" PRIu32 "-%-5" PRIu32 " %-5s", g, group->first_layer,
                   group->first_layer + group->n_layers - 1, matrix_name(p, plane));
            print_active(group, plane);
        }
    }
    if (p->joint == NULL)
        return;
    /* Groups' active components above are their own ones, without these. */
    printf("  %-8s %-9s %-5s", "joint", "all", "");
    print_active(p->joint, 0);
    printf("  shared       the first %" PRIu32
           " components of each group, given to 1/%u, 1/%u, 1/%u of a step\n",
           p->n_shared, 1u << p->fraction_bits[CG_L1], 1u << p->fraction_bits[CG_L2],
           1u << p->fraction_bits[CG_L3]);
    for (unsigned level = CG_L1; level < CG_N_LEVELS; level++) {
        printf("  given at %s %26s", cg_tool_level_name(level), "");
        print_counts(p->n_given[level - 1]);
    }
}

static int profile_info(const cg_tool_options *options, const char *path, const cg_tool_file *file)
{
    cg_profile *profile;
    int code = cg_tool_fail(path, cg_profile_open(file->bytes, file->n_bytes, &profile));
    if (code != CG_TOOL_OK)
        return code;
    if (options->json)
        code = cg_tool_print_json(profile_json(path, profile, file->n_bytes), JSON_COMPACT);
    else
        print_profile(path, profile, file->n_bytes);
    cg_profile_free(profile);
    return code;
}

int cg_tool_info(const cg_tool_options *options)
{
    int worst = CG_TOOL_OK;
    for (int i = 0; i < options->n_paths; i++) {
        const char *path = options->paths[i];
        cg_tool_file file;
        int code = cg_tool_read(path, &file);
        if (code == CG_TOOL_OK) {
            const bool is_profile = file.n_bytes >= 4 && memcmp(file.bytes, "CGPF", 4) == 0;
            code = (is_profile ? profile_info : chunk_info)(options, path, &file);
        }
        worst = code > worst ? code : worst;
        free(file.bytes);
    }
    return worst;
}
