/* codec/cgtool.c - the command line of cgtool. */
#include "codec/cgtool.h"

#include <errno.h>
#include <getopt.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

static const char USAGE[] =
    "usage: cgtool info FILE... [--json]\n"
    "       cgtool verify PATH... [--decode] [--profile P.cgp] [--json]\n"
    "       cgtool encode --level L2 --profile P.cgp [--nested] [--tokens FILE] IN.safetensors "
    "OUT\n"
    "       cgtool decode [--level L3] [--profile P.cgp] IN OUT.safetensors\n"
    "       cgtool transcode --level L3 [--profile P.cgp] IN OUT\n";

static const char HELP[] =
    "\n"
    "Looks into, checks and converts the chunk files (*.kv) and profiles (*.cgp) of cachegenfs.\n"
    "\n"
    "  info       what a chunk or a profile holds: header, sections, sizes, bits per element\n"
    "  verify     checks files; of directories, all *.kv and *.cgp below them. Every bad file is\n"
    "             named on stderr.\n"
    "  encode     tensors \"K\" and \"V\" [n_layers, n_tokens, n_kv_heads, head_dim], BF16, F16,\n"
    "             F32, F8_E4M3 or F8_E5M2 (without scales), K rotated as the engine holds it, and\n"
    "             \"tokens\" [n_tokens], I32, I64 or U32, to a chunk file. More tokens than a\n"
    "             chunk holds: OUT is a new directory with 00000.kv, 00001.kv ...\n"
    "  decode     a chunk file, or a directory of consecutive ones, to K, V and tokens, with\n"
    "             their worst level, first position and parent in __metadata__. encode asks it:\n"
    "             what was at L3 makes no L0, and a chunk stays in its place.\n"
    "  transcode  a chunk file, or a directory of them, to a coarser level; from a lossy level\n"
    "             without decoding\n"
    "\n"
    "      --json                   machine-readable output; info prints one object a FILE\n"
    "      --level L0|L1|L2|L3      quality to encode to: L0 lossless, L1 finest, L3 smallest;\n"
    "                               decode: which level of nested chunks (default: the finest)\n"
    "      --nested                 encode: the coarser levels in the same file; cut where one\n"
    "                               ends it is the chunk at that level\n"
    "      --profile P.cgp          the profile of lossy levels. verify, decode and transcode\n"
    "                               also look beside the chunk (profile.cgp) and in its store.\n"
    "      --tokens FILE            token ids: u32 little-endian, like a store's `tokens`, or\n"
    "                               decimal text (default: the tensor \"tokens\")\n"
    "      --chunk-tokens N         tokens a chunk, a multiple of 8 (default 256)\n"
    "      --model-fingerprint HEX  32 digits (default: the profile's model)\n"
    "      --salt TEXT              the cache_salt that the keys start from (default: none)\n"
    "      --prefix-level L         worst level of the prefix that this KV was computed on\n"
    "                               (default L0: exact)\n"
    "      --decode                 verify: decode every chunk, too, but lossy ones of a cache\n"
    "                               with scales, which no file holds\n"
    "      --threads N              threads that code a chunk (default: the CPUs at hand)\n"
    "  -h, --help\n"
    "  -V, --version\n"
    "\n"
    "Exit codes: 0 all is well; 1 bad data: a file is damaged, foreign or can't be coded as "
    "asked;\n"
    "2 wrong usage; 3 a file can't be read or written, or no memory. Of several, the largest.\n"
    "Files are written under a temporary name and renamed. Progress is shown on a terminal only.\n";

enum {
    OPTION_JSON = 256,
    OPTION_LEVEL,
    OPTION_PROFILE,
    OPTION_TOKENS,
    OPTION_CHUNK_TOKENS,
    OPTION_MODEL,
    OPTION_SALT,
    OPTION_PREFIX_LEVEL,
    OPTION_DECODE,
    OPTION_THREADS,
    OPTION_NESTED,
};

static const struct option OPTIONS[] = {
    {"json", no_argument, NULL, OPTION_JSON},
    {"level", required_argument, NULL, OPTION_LEVEL},
    {"profile", required_argument, NULL, OPTION_PROFILE},
    {"tokens", required_argument, NULL, OPTION_TOKENS},
    {"chunk-tokens", required_argument, NULL, OPTION_CHUNK_TOKENS},
    {"model-fingerprint", required_argument, NULL, OPTION_MODEL},
    {"salt", required_argument, NULL, OPTION_SALT},
    {"prefix-level", required_argument, NULL, OPTION_PREFIX_LEVEL},
    {"decode", no_argument, NULL, OPTION_DECODE},
    {"threads", required_argument, NULL, OPTION_THREADS},
    {"nested", no_argument, NULL, OPTION_NESTED},
    {"help", no_argument, NULL, 'h'},
    {"version", no_argument, NULL, 'V'},
    {NULL, 0, NULL, 0},
};

static const struct command {
    const char *name;
    int (*run)(const cg_tool_options *options);
    int min_paths, max_paths;
    bool needs_level;
    unsigned takes; /* bits of the options past --json that it takes, by OPTION_ - 256 */
} COMMANDS[] = {
#define TAKES(option) (1u << (option - 256))
    {"info", cg_tool_info, 1, INT32_MAX, false, TAKES(OPTION_JSON)},
    {"verify", cg_tool_verify, 1, INT32_MAX, false,
     TAKES(OPTION_JSON) | TAKES(OPTION_PROFILE) | TAKES(OPTION_DECODE) | TAKES(OPTION_THREADS)},
    {"encode", cg_tool_encode, 2, 2, true, ~TAKES(OPTION_DECODE)},
    {"decode", cg_tool_decode, 2, 2, false,
     TAKES(OPTION_JSON) | TAKES(OPTION_PROFILE) | TAKES(OPTION_LEVEL) | TAKES(OPTION_THREADS)},
    {"transcode", cg_tool_transcode, 2, 2, true,
     TAKES(OPTION_JSON) | TAKES(OPTION_PROFILE) | TAKES(OPTION_LEVEL) | TAKES(OPTION_THREADS)},
#undef TAKES
};

static int usage(const char *about, const char *what)
{
    fprintf(stderr, "cgtool: %s%s%s\n%s", about, what != NULL ? ": " : "", what != NULL ? what : "",
            USAGE);
    return CG_TOOL_USAGE;
}

static bool parse_level(const char *text, int *level_out)
{
    if ((text[0] != 'L' && text[0] != 'l') || text[1] < '0' || text[1] > '3' || text[2] != '\0')
        return false;
    *level_out = text[1] - '0';
    return true;
}

static bool parse_count(const char *text, unsigned max, unsigned *count_out)
{
    char *end;
    errno = 0;
    const unsigned long value = strtoul(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || value == 0 || value > max)
        return false;
    *count_out = (unsigned)value;
    return true;
}

static unsigned n_cpus(void)
{
    cpu_set_t cpus;
    if (sched_getaffinity(0, sizeof cpus, &cpus) != 0)
        return 1;
    return (unsigned)CPU_COUNT(&cpus);
}

static const char *option_name(int option)
{
    for (const struct option *o = OPTIONS; o->name != NULL; o++) {
        if (o->val == option)
            return o->name;
    }
    return "";
}

static bool take_option(int option, const char *value, cg_tool_options *options)
{
    cg_key key;
    switch (option) {
    case OPTION_JSON: options->json = true; return true;
    case OPTION_DECODE: options->decode = true; return true;
    case OPTION_NESTED: options->nested = true; return true;
    case OPTION_PROFILE: options->profile_path = value; return true;
    case OPTION_TOKENS: options->tokens_path = value; return true;
    case OPTION_SALT: options->salt = value; return true;
    case OPTION_LEVEL: return parse_level(value, &options->level);
    case OPTION_PREFIX_LEVEL: return parse_level(value, &options->prefix_level);
    case OPTION_THREADS: return parse_count(value, 1024, &options->n_threads);
    case OPTION_CHUNK_TOKENS:
        return parse_count(value, CG_MAX_CHUNK_TOKENS, &options->chunk_tokens) &&
               options->chunk_tokens % 8 == 0;
    case OPTION_MODEL:
        options->model_hex = value;
        return strlen(value) == CG_KEY_HEX_BYTES - 1 && cg_key_from_hex(value, &key);
    default: return false;
    }
}

int main(int argc, char **argv)
{
    cg_tool_options options = {.n_threads = n_cpus(), .chunk_tokens = 256, .level = -1};
    unsigned given = 0;
    for (int option; (option = getopt_long(argc, argv, "hV", OPTIONS, NULL)) != -1;) {
        switch (option) {
        case 'h': printf("%s%s", USAGE, HELP); return CG_TOOL_OK;
        case 'V':
            printf("cgtool %s (chunk version %d, profile version %d)\n", CG_VERSION,
                   CG_CHUNK_VERSION_STEPS, CG_PROFILE_VERSION_STEPS);
            return CG_TOOL_OK;
        case '?': fputs(USAGE, stderr); return CG_TOOL_USAGE; /* getopt has said what */
        default:
            if (!take_option(option, optarg, &options))
                return usage(option_name(option), "the value makes no sense");
            given |= 1u << (option - 256);
        }
    }
    if (optind == argc)
        return usage("no command", NULL);
    const char *name = argv[optind++];
    const struct command *command = NULL;
    for (size_t i = 0; i < sizeof COMMANDS / sizeof *COMMANDS; i++) {
        if (strcmp(name, COMMANDS[i].name) == 0)
            command = &COMMANDS[i];
    }
    if (command == NULL)
        return usage(name, "no such command");
    options.paths = argv + optind;
    options.n_paths = argc - optind;
    if (options.n_paths < command->min_paths || options.n_paths > command->max_paths)
        return usage(name, "wrong number of paths");
    if (command->needs_level && options.level < 0)
        return usage(name, "needs --level");
    /* An option that does nothing is a mistake that the user should hear of. */
    for (int option = OPTION_JSON; option <= OPTION_NESTED; option++) {
        if ((given & ~command->takes) >> (option - 256) & 1)
            return usage(option_name(option), "not an option of this command");
    }
    const int code = command->run(&options);
    /* A full disk under a redirected output must not end in 0. */
    if (fflush(stdout) != 0 || ferror(stdout)) {
        cg_tool_complain("standard output", "%s", strerror(errno));
        return CG_TOOL_IO;
    }
    return code;
}
