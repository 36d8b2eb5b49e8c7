#include "connector/abi_struct.h"

#include "connector/cachegen.h"

#include <stdint.h>
#include <string.h>

enum { ABI_HEAD_BYTES = 8 };

static bool has_head(const void *given, uint32_t *struct_size_out)
{
    if (given == NULL)
        return false;
    memcpy(struct_size_out, given, sizeof *struct_size_out);
    return *struct_size_out >= ABI_HEAD_BYTES;
}

cg_status cg_abi_take(const void *given, void *out, size_t own_bytes)
{
    uint32_t struct_size, abi_version;
    if (!has_head(given, &struct_size))
        return CG_ERR_INVALID_ARGUMENT;
    memcpy(&abi_version, (const char *)given + sizeof struct_size, sizeof abi_version);
    /* 0: of a caller who has set nothing but the size, as with a zeroed struct. */
    if (abi_version != 0 && abi_version != CACHEGEN_ABI_VERSION)
        return CG_ERR_UNSUPPORTED_VERSION;
    memset(out, 0, own_bytes);
    memcpy(out, given, struct_size < own_bytes ? struct_size : own_bytes);
    return CG_OK;
}

bool cg_abi_give(void *given, const void *own, size_t own_bytes)
{
    uint32_t struct_size;
    if (!has_head(given, &struct_size))
        return false;
    memcpy(given, own, struct_size < own_bytes ? struct_size : own_bytes);
    memcpy(given, &struct_size, sizeof struct_size); /* own's stood there for a moment */
    return true;
}
