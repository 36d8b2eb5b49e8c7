/* codec/cgtool.h - what the commands of cgtool share: options, files, messages, progress.
 *
 * Functions that return int return an exit code, cg_tool_exit, and have said on stderr why it is
 * not 0.
 * Threads: the program's main thread only.
 */
#ifndef CG_CODEC_CGTOOL_H
#define CG_CODEC_CGTOOL_H
#include "codec/chunk.h"
#include "codec/profile.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Part of cgtool's interface: scripts test them. A run over several files ends with the largest. */
typedef enum cg_tool_exit {
    CG_TOOL_OK = 0,
    CG_TOOL_BAD_DATA = 1, /* a file is damaged, foreign, or can't be coded as asked */
    CG_TOOL_USAGE = 2,
    CG_TOOL_IO = 3, /* a file can't be read or written; no memory */
} cg_tool_exit;

typedef struct cg_tool_options {
    char **paths;
    int n_paths;
    bool json;
    bool decode; /* verify: decode, too */
    bool nested; /* encode: the coarser levels in the same file */
    unsigned n_threads;
    unsigned chunk_tokens;
    int level; /* -1: not given */
    int prefix_level;
    const char *profile_path; /* NULL: not given; so are the strings below */
    const char *tokens_path;
    const char *model_hex;
    const char *salt;
} cg_tool_options;

/* The commands. Files and directories are options->paths; cgtool --help says what each takes. */
int cg_tool_info(const cg_tool_options *options);
int cg_tool_verify(const cg_tool_options *options);
int cg_tool_encode(const cg_tool_options *options);
int cg_tool_decode(const cg_tool_options *options);
int cg_tool_transcode(const cg_tool_options *options);

/* Texts in "__metadata__" of the tensors, which decode writes and encode reads: the best level that
 * they may still be called, the position of the first token, the parent key, the model. */
#define CG_TOOL_WORST_LEVEL "cachegen.worst_level"
#define CG_TOOL_FIRST_POSITION "cachegen.first_position"
#define CG_TOOL_PARENT "cachegen.parent"
#define CG_TOOL_MODEL "cachegen.model"
/* There is such a text where keys depend on more than tokens, or values on scales of the cache. */
#define CG_TOOL_EXTRA "cachegen.extra"

/* "cgtool: PATH: MESSAGE" on stderr, one line. */
void cg_tool_complain(const char *path, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Complains with cg_strerror(); the exit code that belongs to the status. */
int cg_tool_fail(const char *path, cg_status status);

typedef struct cg_tool_hex_text {
    char text[CG_KEY_HEX_BYTES];
} cg_tool_hex_text;

/* A key's or a fingerprint's bytes as text. */
cg_tool_hex_text cg_tool_hex(const uint8_t bytes[16]);

typedef struct cg_tool_file {
    uint8_t *bytes; /* free() */
    size_t n_bytes;
} cg_tool_file;

/* Reads a file whole. After an error *file_out is empty. */
int cg_tool_read(const char *path, cg_tool_file *file_out);
/* The same of a path that cg_tool_list() gave. One that is gone by now is no error: CG_TOOL_OK with
 * bytes NULL. */
int cg_tool_read_listed(const char *path, cg_tool_file *file_out);
/* Writes the pieces to a temporary file beside path, fsyncs it and renames it to path. */
int cg_tool_write(const char *path, const cg_tool_file *pieces, size_t n_pieces);

/* The paths of files below directory whose names end in one of the suffixes (NULL at the end),
 * recursively or not, sorted. Links to directories are not followed. What cannot be read is
 * complained about and counted, and the listing goes on; what vanishes meanwhile is left out. The
 * caller frees the list with cg_tool_paths_free(), also after an error. */
typedef struct cg_tool_paths {
    char **path;
    size_t n_paths;
    size_t n_unread; /* directories and files */
} cg_tool_paths;
int cg_tool_list(const char *directory, const char *const *suffixes, bool recursive,
                 cg_tool_paths *paths_out);
void cg_tool_paths_free(cg_tool_paths *paths);
/* Follows links. False where there is nothing. */
bool cg_tool_is_directory(const char *path);
/* Whether a path ends in the suffix and has something before it. */
bool cg_tool_has_suffix(const char *path, const char *suffix);

/* Of a chunk whose header has cache_scales: lossy levels need the scales, which no file holds. */
#define CG_TOOL_UNKNOWN_SCALES "its cache's scales are not known"

/* Opens the profile that decodes a chunk: options->profile_path, or else profile.cgp beside the
 * chunk or one directory up (a context), or profiles/<fingerprint>.cgp of the chunk's store.
 * *profile_inout is freed and replaced when it is not that profile; it stays NULL for L0. A chunk
 * that needs scales of its cache is refused. */
int cg_tool_profile_for(const cg_tool_options *options, const char *chunk_path,
                        const cg_chunk_header *header, cg_profile **profile_inout);

/* cg_encode_chunk() of what was read from path, at options->level. *n_saturated counts on. */
int cg_tool_encode_chunk(const cg_tool_options *options, const char *path,
                         const cg_profile *profile, const cg_chunk_header *header,
                         const uint32_t *tokens, const cg_tool_file *elements, cg_level coarsest,
                         cg_tool_file *coded_out, uint64_t *n_saturated);
/* Complains if any symbols did not fit: no error, the chunks are what the format can hold. */
void cg_tool_warn_of_saturated(const char *path, uint64_t n_saturated);

/* Where the chunks of a run go: one file, or a directory that appears whole or not at all. */
typedef struct cg_tool_output {
    const char *path;
    char *temporary; /* the directory being filled; NULL for one file */
    size_t n_chunks;
    json_t *chunks; /* for --json; NULL without */
} cg_tool_output;

/* is_directory: path becomes a directory of 00000.kv, 00001.kv ...; until then the files lie in a
 * temporary one beside it. path is kept, not copied. *out ends with cg_tool_output_close(). */
int cg_tool_output_open(cg_tool_output *out, const cg_tool_options *options, const char *path,
                        bool is_directory);
/* Writes the next chunk. */
int cg_tool_output_chunk(cg_tool_output *out, const uint8_t *bytes, size_t n_bytes);
/* Publishes what was put out or, when code is not 0, removes it. Returns code, or what went wrong
 * here. */
int cg_tool_output_close(cg_tool_output *out, int code);

/* "L2", of a cg_level. */
const char *cg_tool_level_name(unsigned level);

/* A line on stderr, only when that is a terminal: "verb: 12 of 340, 1.2 GB". Call it as often as
 * you like. */
void cg_tool_progress(const char *verb, size_t n_done, size_t n_all, uint64_t n_bytes);
void cg_tool_progress_end(void); /* wipes the line */

/* A JSON string of text whose bytes may be anything, as paths' are: what is not UTF-8 becomes
 * '?'. */
json_t *cg_tool_json_text(const char *text);
/* Prints a JSON value on stdout, followed by a newline, and releases it. */
int cg_tool_print_json(json_t *value, size_t flags);

#ifdef __cplusplus
}
#endif
#endif
