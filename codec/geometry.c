#include "codec/geometry.h"

#include <string.h>

size_t cg_dtype_bytes(unsigned dtype)
{
    switch (dtype) {
    case CG_DTYPE_BF16:
    case CG_DTYPE_FP16: return 2;
    case CG_DTYPE_FP32: return 4;
    case CG_DTYPE_FP8_E4M3:
    case CG_DTYPE_FP8_E5M2: return 1;
    default: return 0; /* a file's byte may be any */
    }
}

const char *cg_dtype_name(unsigned dtype)
{
    switch (dtype) {
    case CG_DTYPE_BF16: return "bf16";
    case CG_DTYPE_FP16: return "fp16";
    case CG_DTYPE_FP32: return "fp32";
    case CG_DTYPE_FP8_E4M3: return "fp8_e4m3";
    case CG_DTYPE_FP8_E5M2: return "fp8_e5m2";
    default: return "unknown";
    }
}

cg_status cg_geometry_check(const cg_geometry *g)
{
    if (g->n_layers == 0 || g->n_layers > CG_MAX_LAYERS || g->n_kv_heads == 0 ||
        g->n_kv_heads > CG_MAX_KV_HEADS || g->head_dim == 0 || g->head_dim > CG_MAX_HEAD_DIM)
        return CG_ERR_INVALID_ARGUMENT;
    /* An odd head_dim has no halves for a rotation to turn. */
    if (cg_dtype_bytes(g->dtype) == 0 || g->n_planes != CG_N_PLANES || g->head_dim % 2 != 0)
        return CG_ERR_UNSUPPORTED;
    return CG_OK;
}

/* Not memcmp(): structs have padding. */
bool cg_geometry_equal(const cg_geometry *a, const cg_geometry *b)
{
    return a->n_layers == b->n_layers && a->n_kv_heads == b->n_kv_heads &&
           a->head_dim == b->head_dim && a->dtype == b->dtype && a->n_planes == b->n_planes;
}
