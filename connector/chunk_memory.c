#include "connector/chunk_memory.h"

#include <stdlib.h>
#include <string.h>

enum { N_BUCKETS = 2048, BUCKET_PLACES = 8 };

struct cg_chunk_memory {
    uint64_t positive_ttl_ns, negative_ttl_ns;
    cg_chunk_memory_entry places[N_BUCKETS][BUCKET_PLACES];
};

cg_status cg_chunk_memory_new(uint64_t positive_ttl_ns, uint64_t negative_ttl_ns,
                              cg_chunk_memory **memory_out)
{
    cg_chunk_memory *memory =
        calloc(1, sizeof *memory); /* 1.5 MiB of zero pages: touched as it fills */
    *memory_out = memory;
    if (memory == NULL)
        return CG_ERR_NO_MEMORY;
    memory->positive_ttl_ns = positive_ttl_ns;
    memory->negative_ttl_ns = negative_ttl_ns;
    return CG_OK;
}

void cg_chunk_memory_free(cg_chunk_memory *memory)
{
    free(memory);
}

/* Keys are hashes already: any of their bits choose a bucket. With `make`, the place that matters
 * least is emptied. */
static cg_chunk_memory_entry *place_of(cg_chunk_memory *memory, const cg_key *key, bool make)
{
    cg_chunk_memory_entry *bucket =
        memory->places[(key->bytes[0] | key->bytes[1] << 8) % N_BUCKETS];
    cg_chunk_memory_entry *oldest = bucket;
    for (int i = 0; i < BUCKET_PLACES; i++) {
        if (cg_key_equal(&bucket[i].key, key))
            return &bucket[i];
        /* Until when it matters: 0 for a free place, which so is taken first. */
        const uint64_t age = bucket[i].probed_ns > bucket[i].bad_until_ns ? bucket[i].probed_ns
                                                                          : bucket[i].bad_until_ns;
        const uint64_t oldest_age =
            oldest->probed_ns > oldest->bad_until_ns ? oldest->probed_ns : oldest->bad_until_ns;
        if (age < oldest_age)
            oldest = &bucket[i];
    }
    if (!make)
        return NULL;
    memset(oldest, 0, sizeof *oldest);
    oldest->key = *key;
    return oldest;
}

bool cg_chunk_memory_find(cg_chunk_memory *memory, const cg_key *key, uint8_t needed,
                          uint64_t now_ns, cg_chunk_memory_entry *entry_out)
{
    cg_chunk_memory_entry *place = place_of(memory, key, false);
    if (place == NULL) {
        memset(entry_out, 0, sizeof *entry_out);
        entry_out->key = *key;
        return false;
    }
    /* One time for all levels of the chunk, the latest: a level may be held back for longer than
     * its own failure asks for. */
    if (now_ns >= place->bad_until_ns) {
        memset(place->prefix_level, 0, sizeof place->prefix_level);
        place->bad = place->damaged = 0;
        place->is_doubted = false;
    }
    *entry_out = *place;
    /* What is missing may be saved by another engine at any time; what is there rarely goes. So the
     * two have times to live of their own. */
    const uint64_t ttl_ns =
        (place->entry.levels & needed) != 0 ? memory->positive_ttl_ns : memory->negative_ttl_ns;
    return (needed & ~place->probed) == 0 && place->probed != 0 &&
           now_ns - place->probed_ns < ttl_ns;
}

void cg_chunk_memory_put(cg_chunk_memory *memory, const cg_key *key, uint8_t probed,
                         const cg_store_entry *entry, uint64_t now_ns)
{
    cg_chunk_memory_entry *place = place_of(memory, key, true);
    place->probed = probed;
    place->probed_ns = now_ns;
    place->entry = *entry;
}

void cg_chunk_memory_saved(cg_chunk_memory *memory, const cg_key *key, uint8_t level,
                           uint64_t level_bytes, uint8_t prefix_level, uint64_t now_ns)
{
    cg_chunk_memory_entry *place = place_of(memory, key, true);
    place->probed |= (uint8_t)(1u << level);
    place->probed_ns = now_ns;
    place->entry.levels |= (uint8_t)(1u << level);
    place->entry.level_bytes[level] = level_bytes;
    place->entry.prefix_level[level] = prefix_level;
    place->prefix_level[level] = 0;
    place->bad &= (uint8_t) ~(1u << level);
    place->damaged &= (uint8_t) ~(1u << level);
}

void cg_chunk_memory_exists(cg_chunk_memory *memory, const cg_key *key, uint8_t levels)
{
    cg_chunk_memory_entry *place = place_of(memory, key, true);
    place->probed &= (uint8_t)~levels;
    place->bad &= (uint8_t)~levels;
    place->damaged &= (uint8_t)~levels;
}

void cg_chunk_memory_failed(cg_chunk_memory *memory, const cg_key *key, uint8_t levels,
                            bool damaged, uint64_t until_ns)
{
    cg_chunk_memory_entry *place = place_of(memory, key, true);
    place->bad |= levels;
    if (damaged)
        place->damaged |= levels;
    if (until_ns > place->bad_until_ns)
        place->bad_until_ns = until_ns;
}

void cg_chunk_memory_doubt(cg_chunk_memory *memory, const cg_key *key, uint64_t until_ns)
{
    cg_chunk_memory_entry *place = place_of(memory, key, true);
    place->is_doubted = true;
    if (until_ns > place->bad_until_ns)
        place->bad_until_ns = until_ns;
}

void cg_chunk_memory_provenance(cg_chunk_memory *memory, const cg_key *key, uint8_t level,
                                uint8_t prefix_level, uint64_t until_ns)
{
    cg_chunk_memory_entry *place = place_of(memory, key, true);
    place->prefix_level[level] = prefix_level;
    if (until_ns > place->bad_until_ns)
        place->bad_until_ns = until_ns;
}
