#include "codec/status.h"

#include <errno.h>

const char *cg_strerror(cg_status status)
{
    switch (status) {
    case CG_OK: return "ok";
    case CG_ERR_INVALID_ARGUMENT: return "invalid argument";
    case CG_ERR_NO_MEMORY: return "out of memory";
    case CG_ERR_BUFFER_TOO_SMALL: return "buffer too small";
    case CG_ERR_UNSUPPORTED: return "not supported";
    case CG_ERR_CANCELLED: return "cancelled";
    case CG_ERR_AGAIN: return "not yet";
    case CG_ERR_TRUNCATED: return "file is truncated";
    case CG_ERR_CORRUPT: return "file is corrupt";
    case CG_ERR_UNSUPPORTED_VERSION: return "unsupported format version";
    case CG_ERR_BAD_MAGIC: return "not a file of this kind";
    case CG_ERR_FOREIGN_MODEL: return "belongs to another model";
    case CG_ERR_FOREIGN_PROFILE: return "coded with another profile";
    case CG_ERR_FOREIGN_TOKENS: return "holds other tokens";
    case CG_ERR_LOSSY_PREFIX: return "computed on a prefix that is too lossy";
    case CG_ERR_NOT_FOUND: return "not found";
    case CG_ERR_EXISTS: return "exists already";
    case CG_ERR_IO: return "input/output error";
    case CG_ERR_NO_SPACE: return "no space left";
    case CG_ERR_PERMISSION: return "permission denied";
    case CG_ERR_TIMED_OUT: return "timed out";
    case CG_ERR_READ_ONLY: return "read-only";
    case CG_ERR_DEVICE: return "GPU error";
    }
    return "unknown status";
}

cg_status cg_status_from_errno(int errno_value)
{
    switch (errno_value) {
    case 0: return CG_OK;
    case ENOENT:
    case ENOTDIR: return CG_ERR_NOT_FOUND;
    case EEXIST: return CG_ERR_EXISTS;
    case ENOMEM: return CG_ERR_NO_MEMORY;
    case ENOSPC:
    case EDQUOT: return CG_ERR_NO_SPACE;
    case EACCES:
    case EPERM: return CG_ERR_PERMISSION;
    case EINVAL: return CG_ERR_INVALID_ARGUMENT;
    case EROFS: return CG_ERR_READ_ONLY;
    case ETIMEDOUT: return CG_ERR_TIMED_OUT;
    case ECANCELED: return CG_ERR_CANCELLED;
    case EAGAIN: return CG_ERR_AGAIN;
    case EOPNOTSUPP:
    case ENOSYS: return CG_ERR_UNSUPPORTED;
    default: return CG_ERR_IO;
    }
}
