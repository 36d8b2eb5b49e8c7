#include "fusefs/strict.h"

#include "codec/chunk.h"
#include "codec/profile.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const uint64_t CHUNK_MEMORY_BYTES = 2 << 20; /* cg_chunk_verify_source() */

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

static cg_status check_profile(const uint8_t *bytes, size_t n_bytes, const cg_tree_name *name)
{
    cg_fingerprint fingerprint;
    const cg_status status = cg_profile_check(bytes, n_bytes, &fingerprint);
    if (status != CG_OK)
        return status;
    return memcmp(fingerprint.bytes, name->key.bytes, sizeof fingerprint.bytes) == 0
               ? CG_OK
               : CG_ERR_FOREIGN_PROFILE;
}

cg_status cg_strict_read(void *user, uint64_t offset, uint8_t *bytes_out, size_t n_bytes)
{
    return read_at(*(const int *)user, bytes_out, n_bytes, (size_t)offset);
}

cg_status cg_strict_check(int fd, const cg_tree_name *name, cg_strict_budget *budget,
                          uint64_t max_bytes, cg_chunk_header *header_out)
{
    const bool is_profile = name->kind == CG_TREE_PROFILE;
    struct stat attr;
    if (fstat(fd, &attr) != 0)
        return cg_status_from_errno(errno);
    if (!S_ISREG(attr.st_mode))
        return CG_ERR_INVALID_ARGUMENT;
    const uint64_t n_bytes = (uint64_t)attr.st_size;
    if (n_bytes == 0)
        return CG_ERR_TRUNCATED;

    if (!is_profile) { /* the usual refusal, a file that is not complete, costs one small read */
        uint8_t first[CG_CHUNK_FIXED_BYTES];
        cg_chunk_header header;
        const size_t n_first = n_bytes < sizeof first ? (size_t)n_bytes : sizeof first;
        cg_status status = read_at(fd, first, n_first, 0);
        if (status == CG_OK)
            status = cg_chunk_header_parse(first, n_first, &header);
        if (status == CG_OK) /* a nested one may end where any of its levels does */
            status = cg_chunk_header_cut(&header, n_bytes);
        if (status != CG_OK)
            return status;
    }
    /* The size was looked up before: a file that grows meanwhile is checked as it was, and one that
     * shrinks is truncated. */
    if (n_bytes > max_bytes || (is_profile && n_bytes > CG_PROFILE_MAX_BYTES))
        return CG_ERR_NO_MEMORY;

    const uint64_t memory_bytes = is_profile ? n_bytes : CHUNK_MEMORY_BYTES;
    cg_status status;
    /* Waits for its turn before it allocates: many checks at once take longer, not more. */
    take(budget, memory_bytes);
    if (is_profile) {
        uint8_t *bytes = malloc(n_bytes);
        status = bytes == NULL ? CG_ERR_NO_MEMORY : read_at(fd, bytes, n_bytes, 0);
        if (status == CG_OK)
            status = check_profile(bytes, n_bytes, name);
        free(bytes);
    } else {
        status = cg_chunk_verify_source(cg_strict_read, &fd, n_bytes, header_out);
        if (status == CG_OK)
            status = cg_tree_check(name, header_out);
    }
    give_back(budget, memory_bytes);
    return status;
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
