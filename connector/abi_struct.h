/* connector/abi_struct.h - structs that cross the ABI, whatever version their other side has.
 *
 * Each begins with uint32_t struct_size, abi_version and grows only at its end. A caller of an
 * older version gives a shorter struct, one of a newer version a longer one. What both sides know
 * is copied. What the caller does not know is taken as zero, which is the default of every field.
 * Threads: pure functions.
 */
#ifndef CG_CONNECTOR_ABI_STRUCT_H
#define CG_CONNECTOR_ABI_STRUCT_H
#include "codec/status.h"
#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Copies min(struct_size, own_bytes) of a caller's struct into out[own_bytes], the rest zero.
 * CG_ERR_INVALID_ARGUMENT: given is NULL, or its struct_size has no room for the two numbers at its
 * head. CG_ERR_UNSUPPORTED_VERSION: its abi_version is another than this library's, so what its
 * fields mean is not known. 0 stands for the first. */
cg_status cg_abi_take(const void *given, void *out, size_t own_bytes);
/* Copies own[own_bytes] into the caller's struct, as much as its struct_size takes; struct_size
 * stays the caller's, and its abi_version is not looked at. False: given is NULL or too small. */
bool cg_abi_give(void *given, const void *own, size_t own_bytes);

#ifdef __cplusplus
}
#endif
#endif
