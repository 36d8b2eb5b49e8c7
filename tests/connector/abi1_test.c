/* A program of ABI 1: compiled against the frozen header abi1/cachegen.h, linked with today's
 * library. It also behaves as a caller whose structs were smaller, and one whose structs are larger
 * than the library's. */
#include "tests/connector/abi1/cachegen.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int n_failed;
#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);                                 \
            n_failed++;                                                                            \
        }                                                                                          \
    } while (0)

/* Sizes that are part of ABI 1: 64-bit. */
_Static_assert(sizeof(cachegen_info) == 64, "cachegen_info");
_Static_assert(sizeof(cachegen_kv_layout) == 128, "cachegen_kv_layout");
_Static_assert(sizeof(cachegen_request) == 64, "cachegen_request");
_Static_assert(sizeof(cachegen_hit) == 40, "cachegen_hit");
_Static_assert(sizeof(cachegen_load_request) == 48, "cachegen_load_request");
_Static_assert(sizeof(cachegen_progress) == 64, "cachegen_progress");
_Static_assert(sizeof(cachegen_save_request) == 112, "cachegen_save_request");
_Static_assert(sizeof(cachegen_stats) == 296, "cachegen_stats");

int main(void)
{
    char root[] = "/tmp/cg_abi1_XXXXXX", json[512], error[256];
    if (mkdtemp(root) == NULL)
        return 1;
    snprintf(
        json, sizeof json,
        "{\"root\": \"%s\", \"model\": \"m\", \"geometry\": {\"n_layers\": 1, \"n_kv_heads\": 1, "
        "\"head_dim\": 2, \"dtype\": \"bf16\", "
        "\"model_fingerprint\": \"00112233445566778899aabbccddeeff\"}}",
        root);
    cachegen *c = NULL;
    CHECK(cachegen_abi_version() >= CACHEGEN_ABI_VERSION);
    CHECK(cachegen_open(json, strlen(json), &c, error, sizeof error) == CACHEGEN_OK);
    if (c == NULL) {
        puts(error);
        return 1;
    }

    /* A smaller caller: nothing behind its struct_size is written. */
    struct {
        cachegen_info info;
    } small;
    memset(&small, 0x5a, sizeof small);
    small.info.struct_size = offsetof(cachegen_info, head_dim);
    CHECK(cachegen_get_info(c, &small.info) == CACHEGEN_OK);
    CHECK(small.info.struct_size == offsetof(cachegen_info, head_dim));
    CHECK(small.info.n_kv_heads == 1 && small.info.head_dim == 0x5a5a5a5a);

    /* A larger caller, from the future: what the library does not know stays as it was. */
    struct {
        cachegen_stats stats;
        uint64_t newer[64]; /* more than the library's own struct has grown since */
    } large;
    memset(&large, 0, sizeof large);
    large.stats.struct_size = sizeof large;
    large.newer[63] = 7;
    CHECK(cachegen_get_stats(c, &large.stats) == CACHEGEN_OK);
    CHECK(large.stats.struct_size == sizeof large && large.newer[63] == 7 &&
          large.stats.lookups == 0);

    /* A request whose levels and budget were not there yet: they are zero, whatever lies behind. */
    struct {
        cachegen_request request;
    } old;
    const uint32_t tokens[4] = {1, 2, 3, 4};
    memset(&old, 0xff, sizeof old);
    old.request.struct_size = offsetof(cachegen_request, worst_level_plus_1);
    old.request.abi_version = CACHEGEN_ABI_VERSION;
    old.request.tokens = tokens;
    old.request.n_tokens = 4;
    old.request.salt_bytes = old.request.extra_bytes = 0;
    cachegen_lookup *lookup = NULL;
    CHECK(cachegen_lookup_start(c, &old.request, 0, &lookup) == CACHEGEN_OK);
    cachegen_hit hit = {.struct_size = sizeof hit};
    while (lookup != NULL && cachegen_lookup_poll(lookup, &hit) == CACHEGEN_AGAIN)
        usleep(1000);
    CHECK(hit.hit_tokens == 0);
    cachegen_lookup_free(lookup);

    /* What another ABI means by its fields is not known. */
    old.request.abi_version = CACHEGEN_ABI_VERSION + 1;
    CHECK(cachegen_lookup_start(c, &old.request, 0, &lookup) == 22 && lookup == NULL);

    /* No head, no call. */
    old.request.struct_size = 4;
    CHECK(cachegen_lookup_start(c, &old.request, 0, &lookup) == 1 && lookup == NULL);
    CHECK(strlen(cachegen_strerror(1)) > 0 && strlen(cachegen_strerror(-12345)) > 0);
    cachegen_close(c);

    char command[600];
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    return system(command) != 0 || n_failed > 0;
}
