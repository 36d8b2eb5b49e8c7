#include "fusefs/options.h"

#include "fusefs/contexts.h"
#include "fusefs/mountpoint.h"
#include "fusefs/staging.h"
#include "iouring/store.h"

#include <errno.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#ifndef CG_VERSION
#define CG_VERSION "unknown"
#endif

typedef struct parsed {
    cg_options *options;
    char *store, *mountpoint;
    char *passthrough;
    int foreground, debug, read_only, ignores_acls, io_uring, help, version, single_thread;
    bool failed;
} parsed;

enum {
    KEY_IGNORED = 1,
    KEY_REFUSED,
    KEY_ATTR_TIMEOUT,
    KEY_ENTRY_TIMEOUT,
    KEY_QUOTA,
    KEY_MODEL_QUOTA,
    KEY_KEEP,
    KEY_SCRUB,
    KEY_DEAD_AFTER,
    KEY_STORE_TIMEOUT
};

enum { MIN_QUOTA_BYTES = 1 << 20, MIN_DEAD_AFTER_S = 6, STORE_TIMEOUT_S = 120, DAY_S = 24 * 3600 };
/* What is used all the time must never seem older. */
enum { MIN_KEEP_S = 2 * CG_STORE_TOUCH_SECONDS };

/* clang-format off */
#define FLAG(text, member) {text, offsetof(parsed, member), 1}
static const struct fuse_opt SPEC[] = {
    FLAG("-h", help),
    FLAG("--help", help),
    FLAG("-V", version),
    FLAG("--version", version),
    FLAG("-f", foreground),
    FLAG("-s", single_thread),
    FLAG("-d", debug),
    FLAG("debug", debug),
    FLAG("ro", read_only),
    FLAG("io_uring", io_uring),
    FLAG("ignore_acls", ignores_acls),
    {"passthrough=%s", offsetof(parsed, passthrough), 0},
    FUSE_OPT_KEY("attr_timeout=", KEY_ATTR_TIMEOUT),
    FUSE_OPT_KEY("entry_timeout=", KEY_ENTRY_TIMEOUT),
    FUSE_OPT_KEY("quota=", KEY_QUOTA),
    FUSE_OPT_KEY("model_quota=", KEY_MODEL_QUOTA),
    FUSE_OPT_KEY("keep=", KEY_KEEP),
    FUSE_OPT_KEY("scrub=", KEY_SCRUB),
    FUSE_OPT_KEY("dead_after=", KEY_DEAD_AFTER),
    FUSE_OPT_KEY("store_timeout=", KEY_STORE_TIMEOUT),
    /* libfuse would end a mount with it at the kernel's first request. */
    FUSE_OPT_KEY("max_read=", KEY_REFUSED),
    /* Always on. */
    FUSE_OPT_KEY("default_permissions", KEY_IGNORED),
    /* Never: mount.fuse3 asks for both when root mounts and has not named nosuid and nodev. */
    FUSE_OPT_KEY("suid", KEY_IGNORED),
    FUSE_OPT_KEY("dev", KEY_IGNORED),
    /* What mount(8) and fstab may leave for us. */
    FUSE_OPT_KEY("rw", KEY_IGNORED),
    FUSE_OPT_KEY("defaults", KEY_IGNORED),
    FUSE_OPT_KEY("_netdev", KEY_IGNORED),
    FUSE_OPT_KEY("nofail", KEY_IGNORED),
    FUSE_OPT_KEY("auto", KEY_IGNORED),
    FUSE_OPT_KEY("noauto", KEY_IGNORED),
    FUSE_OPT_KEY("user", KEY_IGNORED),
    /* What /proc/mounts shows of a mount, and other times of access: the store's rules hold. */
    FUSE_OPT_KEY("user_id=", KEY_IGNORED),
    FUSE_OPT_KEY("group_id=", KEY_IGNORED),
    FUSE_OPT_KEY("relatime", KEY_IGNORED),
    FUSE_OPT_KEY("strictatime", KEY_IGNORED),
    FUSE_OPT_KEY("lazytime", KEY_IGNORED),
    FUSE_OPT_END,
};
/* clang-format on */

static void usage(void)
{
    printf(
        "usage: cachegenfs STORE MOUNTPOINT [options]\n"
        "       cachegenfs fsck STORE [--repair]      reads all chunks; damaged ones lose their "
        "names\n"
        "       cachegenfs gc STORE [--orphans] [--remove]   finds what nobody can use\n\n"
        "Shows the store (a directory of KV caches) at MOUNTPOINT. Chunks that are copied in\n"
        "are checked when they are closed; a damaged one is refused and never seen.\n\n"
        "    -f                      stay in the foreground, messages to stderr\n"
        "    -d                      as -f, and show every request\n"
        "    -s                      one thread\n"
        "    -V, --version           print versions\n"
        "    -h, --help              print this\n"
        "    -o ro                   read-only\n"
        "    -o allow_other          let other users in (file modes decide what they may do)\n"
        "    -o default_permissions  the kernel checks file modes; always on\n"
        "    -o nosuid,nodev         set-id bits and devices have no effect; always on\n"
        "    -o attr_timeout=S       seconds for which the kernel trusts attributes (where the\n"
        "                            store's changes can be watched an hour, or 60 of files\n"
        "                            that are no chunks; else 1)\n"
        "    -o entry_timeout=S      the same for names\n"
        "    -o quota=SIZE           what the store may take (as 500G); cold chunks make room\n"
        "    -o model_quota=MODEL:SIZE what one model may take\n"
        "    -o keep=LEVEL:TIME      chunks not used for TIME (as 7d) keep LEVEL and coarser\n"
        "    -o scrub=RATE           read all chunks again at RATE a second (as 20M); repair them\n"
        "    -o dead_after=TIME      a daemon of another host is dead when silent so long (60s)\n"
        "    -o store_timeout=TIME   what only asks gets an error when the store is silent so "
        "long\n"
        "                            (120s; 0: it waits)\n"
        "    -o ignore_acls          mount a store that has access control lists, and go by modes\n"
        "    -o passthrough=auto|off read published chunks past the daemon (auto)\n"
        "    -o io_uring             talk to the kernel over io_uring%s\n"
        "    -o OPT[,OPT...]         other mount options (noexec, noatime, fsname=...)\n",
        CG_FUSE_HAS_IO_URING ? "" : " (this build has not)");
}

static void version(void)
{
    printf("cachegenfs %s, built with libfuse %d.%d (passthrough: %s), running with libfuse %s\n",
           CG_VERSION, FUSE_MAJOR_VERSION, FUSE_MINOR_VERSION,
           CG_FUSE_HAS_PASSTHROUGH ? "yes" : "no", fuse_pkgversion());
}

static bool parse_seconds(const char *text, double *seconds_out)
{
    char *end;
    const char *value = strchr(text, '=') + 1;
    const double seconds = strtod(value, &end);
    if (*value == '\0' || *end != '\0' || !(seconds >= 0 && seconds <= 1e6)) {
        fprintf(stderr, "cachegenfs: %s: seconds from 0 to 1000000 are wanted\n", text);
        return false;
    }
    *seconds_out = seconds;
    return true;
}

/* "500G": bytes with a suffix of K, M, G, T or none, times 1,024. */
static bool parse_size(const char *text, const char *value, uint64_t *bytes_out)
{
    static const char SUFFIXES[] = "KMGT";
    char *end;
    errno = 0;
    uint64_t bytes = strtoull(value, &end, 10);
    const char *suffix = *end != '\0' ? strchr(SUFFIXES, *end) : NULL;
    const unsigned shift = suffix != NULL ? 10 * (unsigned)(suffix - SUFFIXES + 1) : 0;
    if (*value < '0' || *value > '9' || errno != 0 || bytes > UINT64_MAX >> shift ||
        end[suffix != NULL] != '\0' || bytes << shift < MIN_QUOTA_BYTES) {
        fprintf(stderr, "cachegenfs: %s: a size of 1M and more is wanted, such as 500G\n", text);
        return false;
    }
    *bytes_out = bytes << shift;
    return true;
}

/* "model_quota=llama:100G" */
static bool parse_model_quota(const char *text, cg_options *options)
{
    const char *name = strchr(text, '=') + 1, *colon = strrchr(name, ':');
    cg_model_quota quota = {.bytes = 0};
    const size_t n = colon != NULL ? (size_t)(colon - name) : 0;
    if (n < sizeof quota.model)
        memcpy(quota.model, name, n);
    if (n >= sizeof quota.model || !cg_tree_model_is_valid(quota.model)) {
        fprintf(stderr, "cachegenfs: %s: a model and a size are wanted, such as llama:100G\n",
                text);
        return false;
    }
    if (!parse_size(text, colon + 1, &quota.bytes))
        return false;
    cg_model_quota *quotas =
        reallocarray(options->model_quotas, options->n_model_quotas + 1, sizeof *quotas);
    if (quotas == NULL)
        return false;
    quotas[options->n_model_quotas++] = quota;
    options->model_quotas = quotas;
    return true;
}

static bool is_rule(const char *text)
{
    return text[0] == 'L' && text[1] >= '1' && text[1] < '0' + CG_N_LEVELS && text[2] == ':';
}

/* "L2:7d". A comma begins the next option: of keep=L2:7d,L3:90d the second rule comes alone. */
static bool parse_keep(const char *text, const char *rule, int64_t keep_s[CG_N_LEVELS])
{
    int64_t time_s;
    if (!is_rule(rule) || !cg_context_parse_time(rule + 3, strlen(rule + 3), &time_s)) {
        fprintf(stderr, "cachegenfs: %s: a level and a time are wanted, such as L2:7d\n", text);
        return false;
    }
    if (time_s < MIN_KEEP_S) {
        fprintf(stderr,
                "cachegenfs: %s: a time of %d minutes and more is wanted: uses are noted "
                "every %d minutes\n",
                text, MIN_KEEP_S / 60, CG_STORE_TOUCH_SECONDS / 60);
        return false;
    }
    keep_s[rule[1] - '0'] = time_s;
    return true;
}

/* Below a few seconds a busy host would be dead. */
static bool parse_dead_after(const char *text, cg_options *options)
{
    const char *value = strchr(text, '=') + 1;
    int64_t time_s;
    if (cg_context_parse_time(value, strlen(value), &time_s) && time_s >= MIN_DEAD_AFTER_S &&
        time_s <= DAY_S) {
        options->dead_after_s = (unsigned)time_s;
        return true;
    }
    fprintf(stderr, "cachegenfs: %s: a time from 6s to 1d is wanted\n", text);
    return false;
}

static bool parse_store_timeout(const char *text, cg_options *options)
{
    const char *value = strchr(text, '=') + 1;
    int64_t time_s = 0;
    if (strcmp(value, "0") == 0 ||
        (cg_context_parse_time(value, strlen(value), &time_s) && time_s <= DAY_S)) {
        options->store_timeout_s = (unsigned)time_s;
        return true;
    }
    fprintf(stderr, "cachegenfs: %s: a time from 1s to 1d is wanted, or 0\n", text);
    return false;
}

static int take_argument(void *data, const char *argument, int key, struct fuse_args *out)
{
    parsed *p = data;
    (void)out;
    switch (key) {
    case KEY_IGNORED: return 0;
    case KEY_REFUSED:
        fprintf(stderr, "cachegenfs: %s: a mount cannot have this option\n", argument);
        p->failed = true;
        return 0;
    case KEY_ATTR_TIMEOUT:
        p->failed |= !parse_seconds(argument, &p->options->attr_timeout_s);
        return 0;
    case KEY_ENTRY_TIMEOUT:
        p->failed |= !parse_seconds(argument, &p->options->entry_timeout_s);
        return 0;
    case KEY_QUOTA:
        p->failed |= !parse_size(argument, strchr(argument, '=') + 1, &p->options->quota_bytes);
        return 0;
    case KEY_SCRUB:
        p->failed |=
            !parse_size(argument, strchr(argument, '=') + 1, &p->options->scrub_bytes_per_s);
        return 0;
    case KEY_DEAD_AFTER: p->failed |= !parse_dead_after(argument, p->options); return 0;
    case KEY_STORE_TIMEOUT: p->failed |= !parse_store_timeout(argument, p->options); return 0;
    case KEY_MODEL_QUOTA: p->failed |= !parse_model_quota(argument, p->options); return 0;
    case KEY_KEEP:
        p->failed |= !parse_keep(argument, strchr(argument, '=') + 1, p->options->keep_s);
        return 0;
    case FUSE_OPT_KEY_NONOPT:
        if (p->store == NULL) {
            p->store = strdup(argument);
        } else if (p->mountpoint == NULL) {
            p->mountpoint = strdup(argument);
        } else {
            fprintf(stderr, "cachegenfs: one argument too many: %s\n", argument);
            p->failed = true;
        }
        return 0;
    default:
        if (key == FUSE_OPT_KEY_OPT && is_rule(argument)) {
            p->failed |= !parse_keep(argument, argument, p->options->keep_s);
            return 0;
        }
        if (key == FUSE_OPT_KEY_OPT && strncmp(argument, "x-", 2) == 0)
            return 0; /* of fstab, for others */
        return 1;     /* libfuse knows it, or refuses it by name */
    }
}

static bool is_directory(const char *path)
{
    struct stat attr;
    return stat(path, &attr) == 0 && S_ISDIR(attr.st_mode);
}

static char *resolve(const char *what, const char *path)
{
    char *real = realpath(path, NULL);
    if (real != NULL && !is_directory(real)) {
        free(real);
        real = NULL;
        errno = ENOTDIR;
    }
    if (real == NULL)
        fprintf(stderr, "cachegenfs: %s %s: %s\n", what, path, strerror(errno));
    return real;
}

/* Mounted over its store, the store could not be reached again; inside it, the mount would show
 * itself. */
static bool is_apart(const char *store, const char *mountpoint)
{
    const size_t n_bytes = strlen(store);
    /* A common beginning counts only where a component ends: /srv/kv2 is not inside /srv/kv. */
    if (strncmp(store, mountpoint, n_bytes) != 0 ||
        (mountpoint[n_bytes] != '\0' && mountpoint[n_bytes] != '/' && strcmp(store, "/") != 0))
        return true;
    fprintf(stderr, "cachegenfs: the mount point %s is %s the store %s; choose one outside it\n",
            mountpoint, mountpoint[n_bytes] == '\0' ? "also" : "inside", store);
    return false;
}

static bool add_option(struct fuse_args *fuse, const char *format, const char *value)
{
    char *option;
    if (asprintf(&option, format, value) < 0)
        return false;
    const bool added = fuse_opt_add_arg(fuse, "-o") == 0 && fuse_opt_add_arg(fuse, option) == 0;
    free(option);
    return added;
}

/* A comma in an option of libfuse would begin the next one. */
static char *escaped(const char *text)
{
    char *out = malloc(2 * strlen(text) + 1), *at = out;
    for (; out != NULL && *text != '\0'; *at++ = *text++)
        if (*text == ',' || *text == '\\')
            *at++ = '\\';
    if (out != NULL)
        *at = '\0';
    return out;
}

enum { TIMEOUT_BYTES = 32 };

static void describe_timeout(double seconds, char text_out[TIMEOUT_BYTES])
{
    if (seconds < 0)
        strcpy(text_out, "auto");
    else
        snprintf(text_out, TIMEOUT_BYTES, "%g", seconds);
}

/* What .cachegenfs/config says; NULL without memory. */
static char *config_text(const cg_options *options)
{
    char *text = NULL;
    size_t n_bytes;
    FILE *out = open_memstream(&text, &n_bytes);
    if (out == NULL)
        return NULL;
    char attr_s[TIMEOUT_BYTES], entry_s[TIMEOUT_BYTES];
    describe_timeout(options->attr_timeout_s, attr_s);
    describe_timeout(options->entry_timeout_s, entry_s);
    fprintf(out,
            "store = %s\nmountpoint = %s\nread_only = %s\npassthrough = %s\nio_uring = %s\n"
            "attr_timeout = %s\nentry_timeout = %s\nquota = %llu\nscrub = %llu\ndead_after = %u\n"
            "store_timeout = %u\nlibfuse = %s\n",
            options->store, options->mountpoint, options->read_only ? "yes" : "no",
            options->passthrough && CG_FUSE_HAS_PASSTHROUGH ? "auto" : "off",
            options->io_uring ? "yes" : "no", attr_s, entry_s,
            (unsigned long long)options->quota_bytes,
            (unsigned long long)options->scrub_bytes_per_s, options->dead_after_s,
            options->store_timeout_s, fuse_pkgversion());
    for (size_t i = 0; i < options->n_model_quotas; i++)
        fprintf(out, "model_quota = %s:%llu\n", options->model_quotas[i].model,
                (unsigned long long)options->model_quotas[i].bytes);
    fprintf(out, "keep =");
    for (unsigned level = 0; level < CG_N_LEVELS; level++)
        if (options->keep_s[level] > 0)
            fprintf(out, " L%u:%llds", level, (long long)options->keep_s[level]);
    fprintf(out, "\n");
    if (fclose(out) != 0) {
        free(text);
        return NULL;
    }
    return text;
}

static bool complete(cg_options *options, const parsed *p)
{
    options->foreground = p->foreground || p->debug;
    options->debug = p->debug;
    options->single_thread = p->single_thread;
    options->read_only = p->read_only;
    options->io_uring = p->io_uring;
    options->ignores_acls = p->ignores_acls;
    options->passthrough = p->passthrough == NULL || strcmp(p->passthrough, "auto") == 0;
    if (!options->passthrough && strcmp(p->passthrough, "off") != 0) {
        fprintf(stderr, "cachegenfs: passthrough=%s: auto or off is wanted\n", p->passthrough);
        return false;
    }
    if (options->io_uring && !CG_FUSE_HAS_IO_URING) {
        fprintf(stderr, "cachegenfs: this build's libfuse (%d.%d) has no io_uring transport\n",
                FUSE_MAJOR_VERSION, FUSE_MINOR_VERSION);
        return false;
    }
    if (p->store == NULL || p->mountpoint == NULL) {
        fprintf(stderr,
                "cachegenfs: a store and a mount point are wanted; cachegenfs --help says more\n");
        return false;
    }
    /* What a killed daemon left at the mount point goes first: nothing there could be resolved. */
    if ((options->store = resolve("store", p->store)) == NULL ||
        !cg_mountpoint_clear(p->mountpoint) ||
        (options->mountpoint = resolve("mount point", p->mountpoint)) == NULL ||
        !is_apart(options->store, options->mountpoint))
        return false;

    char *name = escaped(options->store);
    const bool added = name != NULL &&
                       add_option(&options->fuse, "default_permissions,nosuid,nodev", "") &&
                       add_option(&options->fuse, "subtype=cachegenfs", "") &&
                       add_option(&options->fuse, "fsname=%s", name) &&
                       (!options->read_only || add_option(&options->fuse, "ro", "")) &&
                       (!options->io_uring || add_option(&options->fuse, "io_uring", "")) &&
                       (!options->debug || fuse_opt_add_arg(&options->fuse, "-d") == 0);
    free(name);
    return added && (options->config_text = config_text(options)) != NULL;
}
cg_options_result cg_options_parse(int argc, char **argv, cg_options *options_out)
{
    cg_options options = {.attr_timeout_s = -1,
                          .entry_timeout_s = -1,
                          .dead_after_s = CG_STAGING_SILENT_S,
                          .store_timeout_s = STORE_TIMEOUT_S};
    parsed p = {.options = &options};
    cg_options_result result = CG_OPTIONS_ERROR;
    const struct fuse_args arguments = FUSE_ARGS_INIT(argc, argv);
    options.fuse = arguments;
    if (fuse_opt_parse(&options.fuse, &p, SPEC, take_argument) != 0) {
        p.failed = true;
    } else if (p.help || p.version) {
        if (p.help)
            usage();
        else
            version();
        result = CG_OPTIONS_DONE;
    }
    if (result == CG_OPTIONS_ERROR && !p.failed && complete(&options, &p))
        result = CG_OPTIONS_RUN;
    free(p.store);
    free(p.mountpoint);
    free(p.passthrough);
    if (result != CG_OPTIONS_RUN)
        cg_options_destroy(&options);
    else
        *options_out = options;
    return result;
}

void cg_options_destroy(cg_options *options)
{
    free(options->store);
    free(options->mountpoint);
    free(options->config_text);
    free(options->model_quotas);
    fuse_opt_free_args(&options->fuse);
}
