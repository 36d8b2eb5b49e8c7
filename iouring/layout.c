#include "iouring/layout.h"

#include "iouring/file.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_BYTES = 64 };

static const cg_layout_step STEPS[CG_LAYOUT_VERSION] = {NULL};

/* *version_out: 0 where there is no file. */
static cg_status read_version(int root_fd, uint64_t *version_out)
{
    uint8_t *bytes;
    size_t n_bytes, i = 0;
    uint64_t version = 0;
    const cg_status status = cg_file_read(root_fd, CG_LAYOUT_FILE, MAX_BYTES, &bytes, &n_bytes);
    *version_out = 0;
    if (status == CG_ERR_NOT_FOUND)
        return CG_OK;
    if (status != CG_OK)
        return status;
    for (; i < n_bytes && bytes[i] >= '0' && bytes[i] <= '9'; i++)
        version = version < UINT32_MAX ? 10 * version + (uint64_t)(bytes[i] - '0') : version;
    const bool is_number = i > 0 && i + 1 == n_bytes && bytes[i] == '\n';
    free(bytes);
    if (!is_number)
        return CG_ERR_CORRUPT;
    *version_out = version;
    /* A store of layout 0 has no file. */
    return version == 0 ? CG_ERR_UNSUPPORTED_VERSION : CG_OK;
}

cg_status cg_layout_check(int root_fd)
{
    uint64_t version;
    const cg_status status = read_version(root_fd, &version);
    if (status != CG_OK)
        return status;
    return version <= CG_LAYOUT_VERSION ? CG_OK : CG_ERR_UNSUPPORTED_VERSION;
}

cg_status cg_layout_upgrade_by(int root_fd, const cg_layout_step *steps, uint32_t n_steps)
{
    char text[MAX_BYTES];
    uint64_t version, now;
    cg_status status = read_version(root_fd, &version);
    while (status == CG_OK && version < n_steps) {
        if (steps[version] != NULL && (status = steps[version](root_fd)) != CG_OK)
            return status;
        /* Another daemon may have come further meanwhile. */
        status = read_version(root_fd, &now);
        if (status == CG_OK && now == version) {
            const int n = snprintf(text, sizeof text, "%" PRIu64 "\n", ++now);
            status = cg_file_write(root_fd, CG_LAYOUT_FILE, text, (size_t)n, version > 0);
            status = status == CG_ERR_EXISTS ? read_version(root_fd, &now) : status;
            if (status == CG_OK && now == version)
                return CG_ERR_AGAIN; /* a network's file system that shows it later */
        }
        version = now;
    }
    return status == CG_OK && version > n_steps ? CG_ERR_UNSUPPORTED_VERSION : status;
}

cg_status cg_layout_upgrade(int root_fd)
{
    return cg_layout_upgrade_by(root_fd, STEPS, CG_LAYOUT_VERSION);
}
