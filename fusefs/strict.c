#include "fusefs/strict.h"

#include "codec/chunk.h"
#include "codec/profile.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const uint64_t PIECE_MEMORY_BYTES =
    2 << 20; /* cg_chunk_verify_source(), cg_profile_check_head() */

void cg_strict_budget_init(cg_strict_budget *budget, uint64_t limit_bytes)
{
    pthread_mutex_init(&budget->lock, NULL);
    pthread_cond_init(&budget->freed, NULL);
    budget->used_bytes = 0;
    budget->limit_bytes = limit_bytes;
}

void cg_strict_budget_destroy(cg_strict_budget *budget)
{
    pthread_mutex_destroy(&budget->lock);
    pthread_cond_destroy(&budget->freed);
}

static void take(cg_strict_budget *budget, uint64_t n_bytes)
{
    pthread_mutex_lock(&budget->lock);
    /* Alone, any size goes: else a file larger than the limit would wait for ever. */
    while (budget->used_bytes > 0 && budget->used_bytes + n_bytes > budget->limit_bytes)
        pthread_cond_wait(&budget->freed, &budget->lock);
    budget->used_bytes += n_bytes;
    pthread_mutex_unlock(&budget->lock);
}

static void give_back(cg_strict_budget *budget, uint64_t n_bytes)
{
    pthread_mutex_lock(&budget->lock);
    budget->used_bytes -= n_bytes;
    pthread_cond_broadcast(&budget->freed);
    pthread_mutex_unlock(&budget->lock);
}

static cg_status read_at(int fd, uint8_t *bytes, size_t n_bytes, size_t offset)
{
    while (n_bytes > 0) {
        const ssize_t n = pread(fd, bytes, n_bytes, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return cg_status_from_errno(errno);
        if (n == 0)
            return CG_ERR_TRUNCATED;
        bytes += n;
        offset += (size_t)n;
        n_bytes -= (size_t)n;
    }
    return CG_OK;
}

cg_status cg_strict_read(void *user, uint64_t offset, uint8_t *bytes_out, size_t n_bytes)
{
    return read_at(*(const int *)user, bytes_out, n_bytes, (size_t)offset);
}

static cg_status check_fingerprint(const cg_fingerprint *fingerprint, const cg_key *wanted)
{
    return memcmp(fingerprint->bytes, wanted->bytes, sizeof fingerprint->bytes) == 0
               ? CG_OK
               : CG_ERR_FOREIGN_PROFILE;
}

/* A profile is parsed in memory, whole. So that nobody can have memory for the asking, with a hole
 * of a gigabyte that costs a call, there is some only for a file whose hashes have been found right
 * piece by piece. wanted: the fingerprint that it must have, or NULL. */
static cg_status check_profile(int fd, uint64_t n_bytes, const cg_key *wanted,
                               cg_strict_budget *budget, cg_fingerprint *fingerprint_out)
{
    cg_fingerprint fingerprint;
    take(budget, PIECE_MEMORY_BYTES);
    cg_status status = cg_profile_check_head(cg_strict_read, &fd, n_bytes, &fingerprint);
    give_back(budget, PIECE_MEMORY_BYTES);
    if (status == CG_OK && wanted != NULL)
        status = check_fingerprint(&fingerprint, wanted);
    if (status != CG_OK)
        return status;

    /* The file, and what cg_profile_check() takes for it. */
    const uint64_t memory_bytes = 2 * n_bytes + (2 << 20);
    take(budget, memory_bytes);
    uint8_t *bytes = malloc(n_bytes);
    status = bytes == NULL ? CG_ERR_NO_MEMORY : read_at(fd, bytes, n_bytes, 0);
    if (status == CG_OK)
        status = cg_profile_check(bytes, n_bytes, fingerprint_out);
    if (status == CG_OK && wanted != NULL) /* others may write between the two reads */
        status = check_fingerprint(fingerprint_out, wanted);
    free(bytes);
    give_back(budget, memory_bytes);
    return status;
}

static cg_status check_chunk(int fd, uint64_t n_bytes, const cg_tree_name *name,
                             cg_strict_budget *budget, cg_chunk_header *header_out)
{
    take(budget, PIECE_MEMORY_BYTES);
    cg_status status = cg_chunk_verify_source(cg_strict_read, &fd, n_bytes, header_out);
    if (status == CG_OK)
        status = cg_tree_check(name, header_out);
    give_back(budget, PIECE_MEMORY_BYTES);
    return status;
}

/* The usual refusal, of a file that is not complete, costs one small read, and waits for nobody. */
static cg_status look_at_chunk(int fd, uint64_t n_bytes)
{
    uint8_t first[CG_CHUNK_FIXED_BYTES];
    cg_chunk_header header;
    const size_t n_first = n_bytes < sizeof first ? (size_t)n_bytes : sizeof first;
    cg_status status = read_at(fd, first, n_first, 0);
    if (status == CG_OK)
        status = cg_chunk_header_parse(first, n_first, &header);
    /* A nested one may end where any of its levels does. */
    return status == CG_OK ? cg_chunk_header_cut(&header, n_bytes) : status;
}

/* The size is looked up once: a file that grows meanwhile is checked as it was, and one that
 * shrinks is truncated. */
static cg_status size_of(int fd, uint64_t *n_bytes_out)
{
    struct stat attr;
    if (fstat(fd, &attr) != 0)
        return cg_status_from_errno(errno);
    *n_bytes_out = (uint64_t)attr.st_size;
    return !S_ISREG(attr.st_mode) ? CG_ERR_INVALID_ARGUMENT
           : attr.st_size == 0    ? CG_ERR_TRUNCATED
                                  : CG_OK;
}

cg_status cg_strict_check(int fd, const cg_tree_name *name, cg_strict_budget *budget,
                          uint64_t max_bytes, cg_chunk_header *header_out)
{
    const bool is_profile = name->kind == CG_TREE_PROFILE;
    cg_fingerprint fingerprint;
    uint64_t n_bytes;
    cg_status status = size_of(fd, &n_bytes);
    if (status == CG_OK && !is_profile)
        status = look_at_chunk(fd, n_bytes);
    if (status != CG_OK)
        return status;
    if (n_bytes > max_bytes || (is_profile && n_bytes > CG_PROFILE_MAX_BYTES))
        return CG_ERR_NO_MEMORY;
    /* Each waits for its turn before it allocates: many checks at once take longer, not more. */
    return is_profile ? check_profile(fd, n_bytes, &name->key, budget, &fingerprint)
                      : check_chunk(fd, n_bytes, name, budget, header_out);
}

cg_status cg_strict_check_profile(int fd, cg_strict_budget *budget, cg_fingerprint *fingerprint_out)
{
    uint64_t n_bytes;
    const cg_status status = size_of(fd, &n_bytes);
    if (status != CG_OK)
        return status;
    return n_bytes > CG_PROFILE_MAX_BYTES
               ? CG_ERR_NO_MEMORY
               : check_profile(fd, n_bytes, NULL, budget, fingerprint_out);
}

int cg_strict_errno(cg_status status)
{
    switch (status) {
    case CG_OK: return 0;
    case CG_ERR_TRUNCATED:
    case CG_ERR_CORRUPT:
    case CG_ERR_BAD_MAGIC: return EBADMSG;
    case CG_ERR_INVALID_ARGUMENT:
    case CG_ERR_FOREIGN_MODEL:
    case CG_ERR_FOREIGN_PROFILE:
    case CG_ERR_FOREIGN_TOKENS: return EINVAL;
    case CG_ERR_UNSUPPORTED:
    case CG_ERR_UNSUPPORTED_VERSION: return EOPNOTSUPP;
    case CG_ERR_NO_MEMORY: return ENOMEM;
    case CG_ERR_PERMISSION: return EACCES;
    default: return EIO;
    }
}
