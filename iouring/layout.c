#include "iouring/layout.h"

#include "iouring/file.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_BYTES = 64 };

cg_status cg_layout_check(int root_fd)
{
    uint8_t *bytes;
    size_t n_bytes, i = 0;
    uint64_t version = 0;
    const cg_status status = cg_file_read(root_fd, CG_LAYOUT_FILE, MAX_BYTES, &bytes, &n_bytes);
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
    return version == CG_LAYOUT_VERSION ? CG_OK : CG_ERR_UNSUPPORTED_VERSION;
}

cg_status cg_layout_mark(int root_fd)
{
    char text[MAX_BYTES];
    const int n = snprintf(text, sizeof text, "%d\n", CG_LAYOUT_VERSION);
    const cg_status status = cg_file_write(root_fd, CG_LAYOUT_FILE, text, (size_t)n, false);
    return status == CG_ERR_EXISTS ? CG_OK : status;
}
