#include "fusefs/requests.h"

#include "fusefs/control.h"
#include "fusefs/nodes.h"

#include <fcntl.h>
#include <stddef.h>
#include <string.h>

/* A node's number is its address (fusefs/ops_reply.c), and `control` never changes: no lock is
 * needed. */
static bool is_control(uint64_t node_id)
{
    return node_id != FUSE_ROOT_ID &&
           ((const cg_fs_node *)(uintptr_t)node_id)->control != CG_CONTROL_NONE;
}

static bool is_open_for_writing(const struct fuse_in_header *header)
{
    struct fuse_open_in open_in;
    if (header->len < sizeof *header + sizeof open_in)
        return false;
    memcpy(&open_in, header + 1, sizeof open_in);
    return (open_in.flags & (O_ACCMODE | O_TRUNC)) != O_RDONLY;
}

/* Requests that headers of older systems do not have. */
enum { OPCODE_STATX = 52, OPCODE_COPY_FILE_RANGE_64 = 53 };

cg_lane cg_request_lane(const struct fuse_in_header *header)
{
    switch (header->opcode) {
    case FUSE_INIT:
    case FUSE_DESTROY:
    case FUSE_FORGET:
    case FUSE_BATCH_FORGET:
    case FUSE_INTERRUPT:
    /* Waits for nothing (fusefs/closed.h). */
    case FUSE_RELEASE:
    /* libfuse answers these, which we do not have: ENOSYS. */
    case FUSE_IOCTL:
    case FUSE_POLL:
    case OPCODE_STATX: return CG_LANE_FREE;
    case FUSE_LOOKUP:
        /* The one name of the root that is not the store's. */
        if (header->nodeid == FUSE_ROOT_ID &&
            header->len == sizeof *header + sizeof CG_CONTROL_DIRECTORY &&
            strcmp((const char *)(header + 1), CG_CONTROL_DIRECTORY) == 0)
            return CG_LANE_FREE;
        return is_control(header->nodeid) ? CG_LANE_FREE : CG_LANE_READ;
    case FUSE_OPEN:
        return is_control(header->nodeid)    ? CG_LANE_FREE
               : is_open_for_writing(header) ? CG_LANE_CHANGE
                                             : CG_LANE_READ;
    case FUSE_GETATTR:
        /* Does not wait for the store for long, nor for others at all (fusefs/root_stat.h). */
        return header->nodeid == FUSE_ROOT_ID || is_control(header->nodeid) ? CG_LANE_FREE
                                                                            : CG_LANE_READ;
    case FUSE_READLINK:
    case FUSE_READ:
    case FUSE_OPENDIR:
    case FUSE_READDIR:
    case FUSE_READDIRPLUS:
    case FUSE_RELEASEDIR:
    case FUSE_GETXATTR:
    case FUSE_LISTXATTR:
    case FUSE_LSEEK: return is_control(header->nodeid) ? CG_LANE_FREE : CG_LANE_READ;
    case FUSE_STATFS: return CG_LANE_READ;
    case FUSE_SETATTR:
    case FUSE_SYMLINK:
    case FUSE_MKNOD:
    case FUSE_MKDIR:
    case FUSE_UNLINK:
    case FUSE_RMDIR:
    case FUSE_RENAME:
    case FUSE_RENAME2:
    case FUSE_LINK:
    case FUSE_CREATE:
    case FUSE_WRITE:
    case FUSE_FLUSH:
    case FUSE_FSYNC:
    case FUSE_FSYNCDIR:
    case FUSE_FALLOCATE:
    case FUSE_COPY_FILE_RANGE:
    case FUSE_SETXATTR:
    case FUSE_REMOVEXATTR: return is_control(header->nodeid) ? CG_LANE_FREE : CG_LANE_CHANGE;
    /* FUSE_COPY_FILE_RANGE_64, and what later kernels send: it may take as long as anything. */
    default: return CG_LANE_CHANGE;
    }
}

/* What a request counts as; CG_N_REQUESTS: as none. */
cg_request cg_request_counts_as(const struct fuse_in_header *header)
{
    switch (header->opcode) {
    case FUSE_LOOKUP:
    case FUSE_GETATTR:
    case FUSE_READLINK:
    case FUSE_OPENDIR:
    case FUSE_READDIR:
    case FUSE_READDIRPLUS:
    case FUSE_GETXATTR:
    case FUSE_LISTXATTR: return CG_REQUEST_NAME;
    case FUSE_OPEN:
    case FUSE_CREATE: return CG_REQUEST_OPEN;
    case FUSE_READ: return CG_REQUEST_READ;
    case FUSE_WRITE:
    case FUSE_COPY_FILE_RANGE:
    case OPCODE_COPY_FILE_RANGE_64: return CG_REQUEST_WRITE;
    case FUSE_FLUSH:
    case FUSE_FSYNC: return CG_REQUEST_CLOSE;
    case FUSE_SETATTR:
    case FUSE_SYMLINK:
    case FUSE_MKNOD:
    case FUSE_MKDIR:
    case FUSE_UNLINK:
    case FUSE_RMDIR:
    case FUSE_RENAME:
    case FUSE_RENAME2:
    case FUSE_LINK:
    case FUSE_SETXATTR:
    case FUSE_REMOVEXATTR: return CG_REQUEST_CHANGE;
    default: return CG_N_REQUESTS;
    }
}

bool cg_request_lists(const struct fuse_in_header *header)
{
    return header->opcode == FUSE_READDIR || header->opcode == FUSE_READDIRPLUS;
}

/* Of the requests that only ask the end of a listing has to be done. */
bool cg_request_only_asks(const struct fuse_in_header *header)
{
    return cg_request_lane(header) == CG_LANE_READ && header->opcode != FUSE_RELEASEDIR;
}

bool cg_request_may_give_back(const struct fuse_in_header *header)
{
    return header->opcode == FUSE_FORGET || header->opcode == FUSE_BATCH_FORGET ||
           header->opcode == FUSE_RELEASE || header->opcode == FUSE_RELEASEDIR;
}

bool cg_request_takes_no_time(const struct fuse_in_header *header)
{
    return cg_request_may_give_back(header) && cg_request_lane(header) == CG_LANE_FREE;
}

bool cg_request_may_be_short(const struct fuse_in_header *header)
{
    return (header->opcode == FUSE_LOOKUP || header->opcode == FUSE_GETATTR ||
            header->opcode == FUSE_OPEN) &&
           cg_request_lane(header) == CG_LANE_READ;
}

bool cg_request_gives_back(const struct fuse_in_header *header, uint64_t node_id)
{
    struct fuse_forget_one one;
    if (header->opcode != FUSE_BATCH_FORGET)
        return cg_request_may_give_back(header) && header->nodeid == node_id;
    const char *at = (const char *)(header + 1) + sizeof(struct fuse_batch_forget_in),
               *end = (const char *)header + header->len;
    for (; end - at >= (ptrdiff_t)sizeof one; at += sizeof one) {
        memcpy(&one, at, sizeof one);
        if (one.nodeid == node_id)
            return true;
    }
    return false;
}
