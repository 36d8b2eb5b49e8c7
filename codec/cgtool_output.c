/* codec/cgtool_output.c - where cgtool puts the chunks that it makes. */
#include "codec/cgtool.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PATH_DIGITS = 5 }; /* 00000.kv, as in a context */

int cg_tool_output_open(cg_tool_output *out, const cg_tool_options *options, const char *path,
                        bool is_directory)
{
    *out = (cg_tool_output){.path = path, .chunks = options->json ? json_array() : NULL};
    if (!is_directory)
        return CG_TOOL_OK;
    if (asprintf(&out->temporary, "%s.XXXXXX", path) < 0) {
        out->temporary = NULL;
        return cg_tool_fail(path, CG_ERR_NO_MEMORY);
    }
    if (mkdtemp(out->temporary) == NULL) {
        cg_tool_complain(path, "%s", strerror(errno));
        free(out->temporary);
        out->temporary = NULL;
        return CG_TOOL_IO;
    }
    return CG_TOOL_OK;
}

static json_t *chunk_json(const char *path, const cg_chunk_header *h)
{
    const double n_elements = (double)cg_geometry_elements(&h->geometry, h->n_tokens);
    return json_pack("{s:o, s:s, s:s, s:I, s:I, s:I, s:f}", "path", cg_tool_json_text(path), "key",
                     cg_tool_hex(h->key.bytes).text, "level", cg_tool_level_name(h->level),
                     "first_position", (json_int_t)h->first_position, "n_tokens",
                     (json_int_t)h->n_tokens, "bytes", (json_int_t)h->file_bytes,
                     "bits_per_element", 8.0 * (double)h->file_bytes / n_elements);
}

int cg_tool_output_chunk(cg_tool_output *out, const uint8_t *bytes, size_t n_bytes)
{
    char *path, *final;
    cg_chunk_header header;
    cg_tool_file piece = {(uint8_t *)bytes, n_bytes};
    if (out->temporary == NULL) {
        path = strdup(out->path);
        final = strdup(out->path);
    } else {
        /* path is where it is written, final where it will be found. */
        if (asprintf(&path, "%s/%0*zu.kv", out->temporary, PATH_DIGITS, out->n_chunks) < 0)
            path = NULL;
        if (asprintf(&final, "%s/%0*zu.kv", out->path, PATH_DIGITS, out->n_chunks) < 0)
            final = NULL;
    }
    int code = CG_TOOL_IO;
    if (path == NULL || final == NULL)
        cg_tool_fail(out->path, CG_ERR_NO_MEMORY);
    else
        code = cg_tool_write(path, &piece, 1);
    if (code == CG_TOOL_OK && out->chunks != NULL &&
        cg_chunk_header_parse(bytes, n_bytes, &header) == CG_OK)
        json_array_append_new(out->chunks, chunk_json(final, &header));
    out->n_chunks++;
    free(path);
    free(final);
    return code;
}

int cg_tool_output_close(cg_tool_output *out, int code)
{
    if (code == CG_TOOL_OK && out->temporary != NULL) {
        const mode_t mask = umask(0);
        umask(mask);
        if (chmod(out->temporary, 0777 & ~mask) != 0 || rename(out->temporary, out->path) != 0) {
            cg_tool_complain(out->path, "%s", strerror(errno));
            code = CG_TOOL_IO;
        }
    }
    /* Only what was written here is removed, by name. */
    if (code != CG_TOOL_OK && out->temporary != NULL) {
        for (size_t i = 0; i < out->n_chunks; i++) {
            char *path;
            if (asprintf(&path, "%s/%0*zu.kv", out->temporary, PATH_DIGITS, i) >= 0) {
                unlink(path);
                free(path);
            }
        }
        rmdir(out->temporary);
    }
    if (code == CG_TOOL_OK && out->chunks != NULL) {
        code = cg_tool_print_json(json_pack("{s:b, s:O}", "ok", 1, "chunks", out->chunks),
                                  JSON_COMPACT);
    }
    cg_tool_progress_end();
    json_decref(out->chunks);
    free(out->temporary);
    return code;
}
