/* A profile's life: from a file or bytes, to be used or only judged, until it is freed. What the
 * bytes mean is read in profile_read.c. */
#include "codec/profile.h"

#include "codec/analysis.h"
#include "codec/profile_data.h"
#include "codec/profile_finite.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { AHEAD_BYTES = 128 << 10 }; /* the usual read_ahead_kb */

/* Bases are laid out for the kernels that are the best now: they are the profile's for its life. */
static cg_status make_profile(const uint8_t *bytes, size_t n_bytes, bool is_only_checked,
                              cg_profile **profile_out)
{
    *profile_out = NULL;
    cg_profile *p = calloc(1, sizeof *p);
    if (p == NULL)
        return CG_ERR_NO_MEMORY;
    p->kernels = cg_kernels_best();
    p->is_only_checked = is_only_checked;
    const cg_status status = cg_profile_read(bytes, n_bytes, p);
    if (status != CG_OK) {
        cg_profile_free(p);
        return status;
    }
    *profile_out = p;
    return CG_OK;
}

cg_status cg_profile_open(const uint8_t *bytes, size_t n_bytes, cg_profile **profile_out)
{
    return make_profile(bytes, n_bytes, false, profile_out);
}

cg_status cg_profile_check(const uint8_t *bytes, size_t n_bytes, cg_fingerprint *fingerprint_out)
{
    cg_profile *p;
    const cg_status status = make_profile(bytes, n_bytes, true, &p);
    if (status == CG_OK)
        *fingerprint_out = p->fingerprint;
    cg_profile_free(p);
    return status;
}

/* A reader of a file has two requests of read-ahead under way, and over a network waits a round
 * trip for each two. So all of it is asked for before, in steps that the kernel takes whole. */
static void ask_for_all(int fd, off_t n_bytes)
{
    for (off_t at = 0; at < n_bytes; at += AHEAD_BYTES)
        posix_fadvise(fd, at, AHEAD_BYTES, POSIX_FADV_WILLNEED);
}

cg_status cg_profile_open_file(const char *path, cg_profile **profile_out)
{
    cg_status status = CG_ERR_NO_MEMORY;
    uint8_t *bytes = NULL;
    size_t n_read = 0;
    struct stat attr;
    *profile_out = NULL;
    /* O_NONBLOCK: opening a FIFO must not wait for its writer. */
    const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    if (fd < 0)
        return cg_status_from_errno(errno);
    if (fstat(fd, &attr) != 0 || !S_ISREG(attr.st_mode)) {
        status = CG_ERR_IO;
        goto done;
    }
    if (attr.st_size > CG_PROFILE_MAX_BYTES) {
        status = CG_ERR_CORRUPT;
        goto done;
    }
    const size_t n_bytes = (size_t)attr.st_size;
    bytes = malloc(n_bytes + 1);
    if (bytes == NULL)
        goto done;
    ask_for_all(fd, attr.st_size);
    while (n_read < n_bytes) {
        const ssize_t n = read(fd, bytes + n_read, n_bytes - n_read);
        if (n == 0 || (n < 0 && errno != EINTR)) {
            status = CG_ERR_IO;
            goto done;
        }
        n_read += n > 0 ? (size_t)n : 0;
    }
    status = cg_profile_open(bytes, n_bytes, profile_out);
done:
    free(bytes);
    close(fd);
    return status;
}

cg_status cg_profile_for_cache_scales(cg_profile *p, const float (*scales)[CG_N_PLANES])
{
    /* FORMAT.md, "Basis in bands": the least of unit_bits bounds all layer groups' sums. */
    const double most_sum = ldexp(1, 33 - CG_LEAST_UNIT_BITS);
    const uint64_t hash = cg_cache_scales_hash(scales, p->geometry.n_layers);
    const size_t channels = cg_geometry_channels(&p->geometry);
    if (hash == 0) /* all scales are 1 */
        return CG_OK;
    if (p->version == 1)
        return CG_ERR_UNSUPPORTED;
    for (uint32_t i = 0; i < (uint32_t)p->geometry.n_layers * CG_N_PLANES; i++) {
        const float scale = scales[i / CG_N_PLANES][i % CG_N_PLANES];
        if (!isnormal(scale) || scale < 0)
            return CG_ERR_INVALID_ARGUMENT;
        /* What is stored is the true element over its scale: so is its mean, and an error in it
         * weighs as much more. */
        for (size_t at = i * channels; at < (i + 1) * channels; at++) {
            p->mean[at] /= scale;
            p->weight[at] *= scale;
            if (p->anchor_step != NULL)
                p->anchor_step[at] /= scale;
            if (!isnormal(p->weight[at]) || (p->anchor_step != NULL && !(p->anchor_step[at] > 0)))
                return CG_ERR_INVALID_ARGUMENT;
        }
    }
    /* A query's product with the stored K, which is the true one over its scale, stays what it is.
     */
    const size_t n_query = (size_t)p->n_query_heads * p->geometry.head_dim;
    for (size_t i = 0; i < p->geometry.n_layers * n_query; i++) {
        p->query_mean[i] *= scales[i / n_query][CG_K];
        if (!isfinite(p->query_mean[i]))
            return CG_ERR_INVALID_ARGUMENT;
    }
    for (uint32_t i = 0; i < p->n_groups * p->n_matrices; i++)
        if (!cg_profile_stays_finite(p, &p->groups[i / p->n_matrices], i % p->n_matrices, most_sum))
            return CG_ERR_INVALID_ARGUMENT;
    p->cache_scales = hash;
    return CG_OK;
}

void cg_profile_free(cg_profile *p)
{
    if (p == NULL)
        return;
    for (uint32_t g = 0; p->groups != NULL && g <= p->n_groups; g++) { /* the joint one, too */
        for (unsigned matrix = 0; matrix < CG_N_PLANES; matrix++) {
            cg_basis_destroy(&p->groups[g].basis[matrix]);
            cg_bands_destroy(&p->groups[g].bands[matrix]);
        }
    }
    cg_analyses_free(p->analyses);
    free(p->basis_bytes);
    free(p->inv_freq);
    free(p->layer_rope);
    free(p->groups);
    free(p->mean);
    free(p->weight);
    free(p->anchor_step);
    free(p->classes);
    free(p->class_of);
    free(p->query_mean);
    free(p->column_classes);
    free(p);
}

const cg_geometry *cg_profile_geometry(const cg_profile *p)
{
    return &p->geometry;
}
const cg_fingerprint *cg_profile_fingerprint(const cg_profile *p)
{
    return &p->fingerprint;
}
const cg_fingerprint *cg_profile_model(const cg_profile *p)
{
    return &p->model;
}
const char *cg_profile_preset(const cg_profile *p)
{
    return p->preset_name;
}
uint32_t cg_profile_n_groups(const cg_profile *p)
{
    return p->n_groups;
}
bool cg_profile_nests(const cg_profile *p)
{
    return p->nests;
}
