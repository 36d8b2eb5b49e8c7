/* codec/cgtool_file.c - files, directories, messages and progress of cgtool. */
#include "codec/cgtool.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static bool progress_shown;

void cg_tool_complain(const char *path, const char *format, ...)
{
    va_list arguments;
    cg_tool_progress_end();
    fprintf(stderr, "cgtool: %s: ", path);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
}

int cg_tool_fail(const char *path, cg_status status)
{
    if (status == CG_OK)
        return CG_TOOL_OK;
    cg_tool_complain(path, "%s", cg_strerror(status));
    switch (status) {
    case CG_ERR_NO_MEMORY:
    case CG_ERR_NOT_FOUND:
    case CG_ERR_EXISTS:
    case CG_ERR_IO:
    case CG_ERR_NO_SPACE:
    case CG_ERR_PERMISSION:
    case CG_ERR_READ_ONLY: return CG_TOOL_IO;
    default: return CG_TOOL_BAD_DATA;
    }
}

static int fail_errno(const char *path)
{
    cg_tool_complain(path, "%s", strerror(errno));
    return CG_TOOL_IO;
}

/* may_be_gone: then it is CG_TOOL_OK, and *file_out is empty. */
static int read_file(const char *path, bool may_be_gone, cg_tool_file *file_out)
{
    *file_out = (cg_tool_file){0};
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return may_be_gone && errno == ENOENT ? CG_TOOL_OK : fail_errno(path);
    struct stat about;
    int code = CG_TOOL_IO;
    uint8_t *bytes = NULL;
    if (fstat(fd, &about) != 0) {
        fail_errno(path);
        goto done;
    }
    if (!S_ISREG(about.st_mode)) {
        cg_tool_complain(path, "not a regular file");
        goto done;
    }
    const size_t n_bytes = (size_t)about.st_size;
    bytes = malloc(n_bytes > 0 ? n_bytes : 1);
    if (bytes == NULL) {
        fail_errno(path);
        goto done;
    }
    for (size_t at = 0; at < n_bytes;) {
        const ssize_t n = read(fd, bytes + at, n_bytes - at);
        if (n == 0) {
            cg_tool_complain(path, "became shorter while it was read");
            goto done;
        }
        if (n < 0 && errno != EINTR) {
            fail_errno(path);
            goto done;
        }
        if (n > 0)
            at += (size_t)n;
    }
    *file_out = (cg_tool_file){bytes, n_bytes};
    bytes = NULL;
    code = CG_TOOL_OK;
done:
    free(bytes);
    close(fd);
    return code;
}

int cg_tool_read(const char *path, cg_tool_file *file_out)
{
    return read_file(path, false, file_out);
}

int cg_tool_read_listed(const char *path, cg_tool_file *file_out)
{
    return read_file(path, true, file_out);
}

static bool write_all(int fd, const cg_tool_file *piece)
{
    for (size_t at = 0; at < piece->n_bytes;) {
        const ssize_t n = write(fd, piece->bytes + at, piece->n_bytes - at);
        if (n < 0 && errno != EINTR)
            return false;
        if (n > 0)
            at += (size_t)n;
    }
    return true;
}

int cg_tool_write(const char *path, const cg_tool_file *pieces, size_t n_pieces)
{
    char *temporary;
    /* Not *.kv: a mounted store checks such names, and would refuse the half-written file. */
    if (asprintf(&temporary, "%s.XXXXXX", path) < 0)
        return fail_errno(path);
    int code = CG_TOOL_IO;
    const int fd = mkostemp(temporary, O_CLOEXEC);
    if (fd < 0) {
        fail_errno(path);
        free(temporary);
        return code;
    }
    /* mkostemp() has made it 0600. The mask can only be read by setting it. */
    const mode_t mask = umask(0);
    umask(mask);
    bool ok = fchmod(fd, 0666 & ~mask) == 0;
    for (size_t i = 0; ok && i < n_pieces; i++)
        ok = write_all(fd, &pieces[i]);
    ok = ok && fsync(fd) == 0;
    ok = close(fd) == 0 && ok; /* network file systems report a full disk here */
    if (ok && rename(temporary, path) == 0) {
        code = CG_TOOL_OK;
    } else {
        fail_errno(path);
        unlink(temporary);
    }
    free(temporary);
    return code;
}

bool cg_tool_is_directory(const char *path)
{
    struct stat about;
    return stat(path, &about) == 0 && S_ISDIR(about.st_mode);
}

bool cg_tool_has_suffix(const char *path, const char *suffix)
{
    const size_t n = strlen(path), n_suffix = strlen(suffix);
    return n > n_suffix && strcmp(path + n - n_suffix, suffix) == 0;
}

static bool add_path(cg_tool_paths *paths, char *path)
{
    if ((paths->n_paths & (paths->n_paths - 1)) == 0) { /* full at the powers of two */
        const size_t room = paths->n_paths > 0 ? 2 * paths->n_paths : 1;
        char **more = realloc(paths->path, room * sizeof *more);
        if (more == NULL)
            return false;
        paths->path = more;
    }
    paths->path[paths->n_paths++] = path;
    return true;
}

int cg_tool_list(const char *directory, const char *const *suffixes, bool recursive,
                 cg_tool_paths *paths_out)
{
    struct dirent **entries;
    const int n_entries = scandir(directory, &entries, NULL, alphasort);
    if (n_entries < 0 && errno == ENOENT) /* evicted since it was seen */
        return CG_TOOL_OK;
    if (n_entries < 0) {
        paths_out->n_unread++;
        return fail_errno(directory);
    }
    int code = CG_TOOL_OK;
    for (int i = 0; i < n_entries; i++) {
        const char *name = entries[i]->d_name;
        struct stat about;
        char *path = NULL;
        if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
            goto next;
        if (asprintf(&path, "%s/%s", directory, name) < 0) {
            path = NULL;
            code = fail_errno(directory);
            paths_out->n_unread++;
            goto next;
        }
        if (lstat(path, &about) != 0) {
            if (errno != ENOENT) {
                code = fail_errno(path);
                paths_out->n_unread++;
            }
            goto next;
        }
        if (S_ISDIR(about.st_mode) && recursive) {
            const int below = cg_tool_list(path, suffixes, true, paths_out);
            code = below > code ? below : code;
            goto next;
        }
        const char *const *suffix = suffixes;
        while (*suffix != NULL && !cg_tool_has_suffix(name, *suffix))
            suffix++;
        if (S_ISDIR(about.st_mode) || *suffix == NULL)
            goto next;
        if (add_path(paths_out, path)) {
            path = NULL;
        } else {
            code = fail_errno(path);
            paths_out->n_unread++;
        }
    next:
        free(path);
        free(entries[i]);
    }
    free(entries);
    return code;
}

void cg_tool_paths_free(cg_tool_paths *paths)
{
    for (size_t i = 0; i < paths->n_paths; i++)
        free(paths->path[i]);
    free(paths->path);
    *paths = (cg_tool_paths){0};
}

cg_tool_hex_text cg_tool_hex(const uint8_t bytes[16])
{
    cg_tool_hex_text result;
    cg_key key;
    memcpy(key.bytes, bytes, sizeof key.bytes);
    cg_key_to_hex(&key, result.text);
    return result;
}

static bool profile_is(const cg_profile *profile, const cg_fingerprint *fingerprint)
{
    return profile != NULL && memcmp(cg_profile_fingerprint(profile)->bytes, fingerprint->bytes,
                                     sizeof fingerprint->bytes) == 0;
}

int cg_tool_profile_for(const cg_tool_options *options, const char *chunk_path,
                        const cg_chunk_header *header, cg_profile **profile_inout)
{
    if (header->level == CG_L0)
        return CG_TOOL_OK;
    if (header->cache_scales != 0) {
        cg_tool_complain(chunk_path, "%s", CG_TOOL_UNKNOWN_SCALES);
        return CG_TOOL_BAD_DATA;
    }
    if (profile_is(*profile_inout, &header->profile))
        return CG_TOOL_OK;
    if (options->profile_path != NULL && *profile_inout != NULL)
        return CG_TOOL_OK; /* given, opened and foreign: the decoder says so */
    cg_profile_free(*profile_inout);
    *profile_inout = NULL;
    if (options->profile_path != NULL)
        return cg_tool_fail(options->profile_path,
                            cg_profile_open_file(options->profile_path, profile_inout));

    const char *slash = strrchr(chunk_path, '/');
    const int n_directory = slash != NULL ? (int)(slash - chunk_path) + 1 : 0;
    /* Beside the chunk or one directory up, as in a context; or three up, in the folder of a model.
     */
    const char *places[] = {"profile.cgp", "../profile.cgp", "../../../profiles/"};
    const cg_tool_hex_text hex = cg_tool_hex(header->profile.bytes);
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        char *path;
        const bool in_store = cg_tool_has_suffix(places[i], "/");
        if (asprintf(&path, "%.*s%s%s%s", n_directory, chunk_path, places[i],
                     in_store ? hex.text : "", in_store ? ".cgp" : "") < 0)
            return fail_errno(chunk_path);
        const cg_status status = cg_profile_open_file(path, profile_inout);
        free(path);
        if (status == CG_OK && profile_is(*profile_inout, &header->profile))
            return CG_TOOL_OK;
        cg_profile_free(*profile_inout);
        *profile_inout = NULL;
    }
    cg_tool_complain(chunk_path, "its profile, %s, is not beside it: use --profile", hex.text);
    return CG_TOOL_BAD_DATA;
}

const char *cg_tool_level_name(unsigned level)
{
    static const char *const names[] = {"L0", "L1", "L2", "L3"};
    return level < CG_N_LEVELS ? names[level] : "unknown";
}

void cg_tool_progress(const char *verb, size_t n_done, size_t n_all, uint64_t n_bytes)
{
    static int is_terminal = -1;
    static uint64_t shown_ms;
    if (is_terminal < 0)
        is_terminal = isatty(STDERR_FILENO);
    if (!is_terminal)
        return;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const uint64_t now_ms = (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
    if (now_ms - shown_ms < 100)
        return;
    shown_ms = now_ms;
    progress_shown = true;
    fprintf(stderr, "\r%s: %zu of %zu, %.1f MB\033[K", verb, n_done, n_all, (double)n_bytes / 1e6);
    fflush(stderr);
}

void cg_tool_progress_end(void)
{
    if (progress_shown)
        fputs("\r\033[K", stderr);
    progress_shown = false;
}

json_t *cg_tool_json_text(const char *text)
{
    json_t *value = json_string(text);
    char *ascii = value == NULL ? strdup(text) : NULL;
    if (ascii == NULL)
        return value;
    for (char *at = ascii; *at != '\0'; at++) {
        if ((unsigned char)*at >= 0x80)
            *at = '?';
    }
    value = json_string(ascii);
    free(ascii);
    return value;
}

int cg_tool_print_json(json_t *value, size_t flags)
{
    char *text = value != NULL ? json_dumps(value, flags) : NULL;
    json_decref(value);
    if (text == NULL)
        return cg_tool_fail("output", CG_ERR_NO_MEMORY);
    puts(text);
    free(text);
    return CG_TOOL_OK;
}
