#include "fusefs/views.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

/* Where a level goes into an inode number. No two files share a level's numbers, and a whole file
 * has such a number only on a store of more than 2^60 inodes. */
enum { INO_LEVEL_SHIFT = 60 };

bool cg_view_is_possible(const char *name)
{
    const size_t n_bytes = strlen(name);
    return n_bytes > 3 && strcmp(name + n_bytes - 3, ".kv") == 0;
}

/* L0 and L1 are never coarser than what else a file holds. */
static bool is_coarse_name(const cg_tree_name *name)
{
    return (name->kind == CG_TREE_OBJECT_CHUNK || name->kind == CG_TREE_CONTEXT_CHUNK) &&
           name->level >= CG_L2;
}

cg_view cg_view_of_header(const cg_tree_name *name, const cg_chunk_header *header)
{
    /* The name of the finest level shows the whole file. So does one of a level that is not in
     * it. */
    if (!is_coarse_name(name) || name->level == header->level ||
        !cg_chunk_holds(header, name->level))
        return (cg_view){.level = 0};
    return (cg_view){.bytes = header->level_bytes[name->level], .level = name->level};
}

cg_view cg_view_of_file(const cg_tree_name *name, int fd, const struct stat *attr)
{
    uint8_t first[CG_CHUNK_FIXED_BYTES];
    cg_chunk_header header;
    const cg_view whole = {.level = 0};
    if (!is_coarse_name(name) || !S_ISREG(attr->st_mode))
        return whole;
    const ssize_t n = pread(fd, first, sizeof first, 0);
    if (n < 0 || cg_chunk_header_parse(first, (size_t)n, &header) != CG_OK ||
        cg_chunk_header_cut(&header, (uint64_t)attr->st_size) != CG_OK)
        return whole;
    return cg_view_of_header(name, &header);
}

int cg_view_open_unnoticed(int dir_fd, const char *leaf)
{
    const int flags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    const int fd = openat(dir_fd, leaf, flags | O_NOATIME);
    return fd < 0 && errno == EPERM ? openat(dir_fd, leaf, flags) : fd;
}

int cg_view_stat(int dir_fd, const char *leaf, const char *path, struct stat *attr_out,
                 cg_view *view_out)
{
    cg_tree_name name = {.kind = CG_TREE_ORDINARY};
    struct stat attr;
    *view_out = (cg_view){.level = 0};
    if (fstatat(dir_fd, leaf, attr_out, AT_SYMLINK_NOFOLLOW) != 0)
        return errno;
    if (path != NULL)
        cg_tree_parse(path, &name);
    if (!is_coarse_name(&name) || !S_ISREG(attr_out->st_mode))
        return 0;
    const int fd = cg_view_open_unnoticed(dir_fd, leaf);
    if (fd < 0) /* without its levels it would be another file for the kernel */
        return errno == EACCES || errno == EPERM ? 0 : errno == ELOOP ? ESTALE : errno;
    const int error = fstat(fd, &attr) == 0 ? 0 : errno;
    if (error == 0) { /* of the file that is read: the name may be another's by now */
        *attr_out = attr;
        *view_out = cg_view_of_file(&name, fd, &attr);
    }
    close(fd);
    return error;
}

bool cg_view_is_same(int dir_fd, const char *leaf, const cg_tree_name *a, const cg_tree_name *b)
{
    struct stat attr;
    if (!is_coarse_name(a) && !is_coarse_name(b))
        return true;
    const int fd = cg_view_open_unnoticed(dir_fd, leaf);
    if (fd < 0 || fstat(fd, &attr) != 0)
        attr.st_mode = 0; /* shown whole */
    const cg_view view_a = cg_view_of_file(a, fd, &attr), view_b = cg_view_of_file(b, fd, &attr);
    if (fd >= 0)
        close(fd);
    return cg_view_equal(&view_a, &view_b);
}

void cg_view_attr(const cg_view *view, struct stat *attr)
{
    if (view->level == 0)
        return;
    const off_t bytes = (off_t)view->bytes;
    if (attr->st_size > bytes)
        attr->st_size = bytes;
    if (attr->st_blocks > (bytes + 511) / 512) /* fewer where the store compresses */
        attr->st_blocks = (bytes + 511) / 512;
    attr->st_ino ^= (ino_t)view->level << INO_LEVEL_SHIFT;
}

size_t cg_view_clamp(const cg_view *view, off_t offset, size_t n_bytes)
{
    if (view->level == 0)
        return n_bytes;
    if (offset < 0 || (uint64_t)offset >= view->bytes)
        return 0;
    const uint64_t left_bytes = view->bytes - (uint64_t)offset;
    return n_bytes < left_bytes ? n_bytes : (size_t)left_bytes;
}
