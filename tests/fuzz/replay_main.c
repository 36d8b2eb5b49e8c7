/* tests/fuzz/replay_main.c - runs a fuzz target over its committed corpus, without a fuzzing
 * engine.
 *
 * usage: TARGET PATH...     files, or directories whose files are taken, in the order of their
 * names
 * A target that crashes or aborts fails the test; the file it was given last is on stdout.
 * No file at all is a failure, too: an empty corpus would pass unnoticed.
 */
#include <dirent.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes);
/* Optional in a target, as in libFuzzer. */
__attribute__((weak)) int LLVMFuzzerInitialize(int *argc, char ***argv);

static unsigned n_inputs;

static void fail(const char *path, const char *what)
{
    fprintf(stderr, "replay: %s: %s\n", path, what);
    exit(1);
}

static void replay_file(const char *path, size_t n_bytes)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL)
        fail(path, strerror(errno));
    /* Of exactly its size, so that AddressSanitizer sees the first byte read too far. */
    uint8_t *bytes = malloc(n_bytes > 0 ? n_bytes : 1);
    if (bytes == NULL)
        fail(path, "out of memory");
    if (fread(bytes, 1, n_bytes, file) != n_bytes)
        fail(path, "short read");
    fclose(file);

    printf("%s\n", path);
    fflush(stdout); /* a crash must not swallow the name */
    LLVMFuzzerTestOneInput(bytes, n_bytes);
    n_inputs++;
    free(bytes);
}

static int not_hidden(const struct dirent *entry)
{
    return entry->d_name[0] != '.';
}

static void replay(const char *path)
{
    struct stat about;
    if (stat(path, &about) != 0)
        fail(path, strerror(errno));
    if (!S_ISDIR(about.st_mode)) {
        replay_file(path, (size_t)about.st_size);
        return;
    }
    struct dirent **entries;
    const int n_entries = scandir(path, &entries, not_hidden, alphasort);
    if (n_entries < 0)
        fail(path, strerror(errno));
    for (int i = 0; i < n_entries; i++) {
        char *child;
        if (asprintf(&child, "%s/%s", path, entries[i]->d_name) < 0)
            fail(path, "out of memory");
        replay(child);
        free(child);
        free(entries[i]);
    }
    free(entries);
}

int main(int argc, char **argv)
{
    if (LLVMFuzzerInitialize != NULL)
        LLVMFuzzerInitialize(&argc, &argv);
    for (int i = 1; i < argc; i++)
        replay(argv[i]);
    printf("%u inputs replayed\n", n_inputs);
    if (n_inputs == 0)
        fail(argc > 1 ? argv[1] : "(no path)", "no input: is the corpus there?");
    return 0;
}
