/* codec/cgtool_verify.c - `cgtool verify`: are chunks and profiles whole, and in their place. */
#include "codec/cgtool.h"

#include "codec/codec.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static const char *const SUFFIXES[] = {".kv", ".cgp", NULL};

/* The 32 digits of a name in a store that end at end, whether a directory's or a file's: false when
 * it has none there. Outside a store a name may be anything, and is not held against the file. */
static bool hex_before(const char *path, const char *end, cg_key *key_out)
{
    const char *begin = end - (CG_KEY_HEX_BYTES - 1);
    return end - path >= CG_KEY_HEX_BYTES - 1 && (begin == path || begin[-1] == '/') &&
           cg_key_from_hex(begin, key_out);
}

static bool name_agrees(const char *path, const uint8_t bytes[CG_KEY_BYTES], const char *end)
{
    cg_key named;
    return end == NULL || !hex_before(path, end, &named) ||
           memcmp(named.bytes, bytes, sizeof named.bytes) == 0;
}

/* What checksums cannot tell: whether the streams are those of an encoder. */
static cg_status decode(const cg_profile *profile, const cg_tool_file *file,
                        const cg_chunk_header *h, unsigned n_threads)
{
    const size_t n_bytes =
        (size_t)cg_geometry_elements(&h->geometry, h->n_tokens) * cg_dtype_bytes(h->geometry.dtype);
    void *out = malloc(n_bytes);
    if (out == NULL)
        return CG_ERR_NO_MEMORY;
    const cg_status status =
        cg_decode_chunk(profile, file->bytes, file->n_bytes, n_threads, out, n_bytes);
    free(out);
    return status;
}

static int verify_chunk(const cg_tool_options *options, const char *path, const cg_tool_file *file,
                        cg_profile **profile, const char **what_out)
{
    cg_chunk_header header;
    cg_status status = cg_chunk_verify(file->bytes, file->n_bytes);
    *what_out = cg_strerror(status);
    if (status != CG_OK)
        return cg_tool_fail(path, status);
    if ((status = cg_chunk_header_parse(file->bytes, file->n_bytes, &header)) != CG_OK)
        return cg_tool_fail(path, status);
    if (!name_agrees(path, header.key.bytes, strrchr(path, '/'))) {
        *what_out = "lies in the directory of another key";
        cg_tool_complain(path, "%s", *what_out);
        return CG_TOOL_BAD_DATA;
    }
    if (!options->decode)
        return CG_TOOL_OK;
    if (header.level != CG_L0 && header.cache_scales != 0) { /* all that can be checked is */
        *what_out = "not decoded: " CG_TOOL_UNKNOWN_SCALES;
        cg_tool_complain(path, "%s", *what_out);
        return CG_TOOL_OK;
    }
    const int code = cg_tool_profile_for(options, path, &header, profile);
    if (code != CG_TOOL_OK) {
        *what_out = "its profile can't be opened";
        return code;
    }
    status = decode(header.level == CG_L0 ? NULL : *profile, file, &header, options->n_threads);
    *what_out = cg_strerror(status);
    return cg_tool_fail(path, status);
}

static int verify_profile(const char *path, const cg_tool_file *file, const char **what_out)
{
    cg_fingerprint fingerprint;
    const cg_status status = cg_profile_check(file->bytes, file->n_bytes, &fingerprint);
    *what_out = cg_strerror(status);
    if (status != CG_OK)
        return cg_tool_fail(path, status);
    if (name_agrees(path, fingerprint.bytes, strrchr(path, '.')))
        return CG_TOOL_OK;
    *what_out = "has the name of another profile";
    cg_tool_complain(path, "%s", *what_out);
    return CG_TOOL_BAD_DATA;
}

typedef struct verify_run {
    const cg_tool_options *options;
    cg_profile *profile; /* the one used last */
    json_t *results;     /* NULL without --json */
    size_t n_files, n_bad, n_all, n_unread;
    uint64_t n_bytes;
} verify_run;

static int verify_file(verify_run *run, const char *path, bool is_listed)
{
    cg_tool_file file;
    const char *what = "can't be read";
    int code = (is_listed ? cg_tool_read_listed : cg_tool_read)(path, &file);
    if (code == CG_TOOL_OK && file.bytes == NULL) { /* evicted: the store is in use */
        run->n_all--;
        return CG_TOOL_OK;
    }
    const bool is_profile = file.n_bytes >= 4 && memcmp(file.bytes, "CGPF", 4) == 0;
    if (code == CG_TOOL_OK && (is_profile || cg_tool_has_suffix(path, ".cgp")))
        code = verify_profile(path, &file, &what);
    else if (code == CG_TOOL_OK)
        code = verify_chunk(run->options, path, &file, &run->profile, &what);
    run->n_files++;
    run->n_bytes += file.n_bytes;
    run->n_bad += code != CG_TOOL_OK;
    if (run->results != NULL)
        json_array_append_new(run->results,
                              json_pack("{s:o, s:b, s:s, s:I}", "path", cg_tool_json_text(path),
                                        "ok", code == CG_TOOL_OK, "status", what, "bytes",
                                        (json_int_t)file.n_bytes));
    cg_tool_progress("verifying", run->n_files, run->n_all, run->n_bytes);
    free(file.bytes);
    return code;
}

int cg_tool_verify(const cg_tool_options *options)
{
    verify_run run = {.options = options, .n_all = (size_t)options->n_paths};
    if (options->json)
        run.results = json_array();
    int worst = CG_TOOL_OK;
    for (int i = 0; i < options->n_paths; i++) {
        int code;
        if (cg_tool_is_directory(options->paths[i])) {
            cg_tool_paths files = {0};
            code = cg_tool_list(options->paths[i], SUFFIXES, true, &files);
            run.n_all += files.n_paths - 1;
            run.n_unread += files.n_unread;
            for (size_t k = 0; k < files.n_paths; k++) {
                const int file_code = verify_file(&run, files.path[k], true);
                code = file_code > code ? file_code : code;
            }
            cg_tool_paths_free(&files);
        } else {
            code = verify_file(&run, options->paths[i], false);
        }
        worst = code > worst ? code : worst;
    }
    cg_tool_progress_end();
    if (options->json) {
        const int code = cg_tool_print_json(
            json_pack("{s:b, s:I, s:I, s:I, s:I, s:o}", "ok", worst == CG_TOOL_OK, "files",
                      (json_int_t)run.n_files, "bad", (json_int_t)run.n_bad, "unread",
                      (json_int_t)run.n_unread, "bytes", (json_int_t)run.n_bytes, "results",
                      run.results),
            JSON_COMPACT);
        worst = code > worst ? code : worst;
    } else {
        printf("%zu files, %zu bad", run.n_files, run.n_bad);
        if (run.n_unread > 0)
            printf(", %zu that can't be read", run.n_unread);
        putchar('\n');
    }
    cg_profile_free(run.profile);
    return worst;
}
