#include "iouring/layout.h"

#include "iouring/beneath.h"
#include "iouring/file.h"
#include "iouring/tree.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

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

static bool has(int root_fd, const char *folder, const char *leaf)
{
    char path[CG_TREE_PATH_BYTES];
    struct stat s;
    snprintf(path, sizeof path, "%.*s/%s", CG_TREE_NAME_BYTES, folder, leaf);
    return fstatat(root_fd, path, &s, AT_SYMLINK_NOFOLLOW) == 0;
}

/* Contexts have a model.json, too: a model's folder of them is no store. */
static bool is_model(int root_fd, const char *name)
{
    return cg_tree_model_is_valid(name) &&
           (has(root_fd, name, "objects/.") || has(root_fd, name, "contexts/.") ||
            has(root_fd, name, "profiles/.") ||
            (has(root_fd, name, "model.json") && !has(root_fd, name, "context.json")));
}

cg_status cg_layout_find(int root_fd)
{
    const cg_status status = cg_layout_check(root_fd);
    if (status != CG_OK || has(root_fd, ".", CG_LAYOUT_FILE) || has(root_fd, ".", CG_LAYOUT_MOUNT))
        return status;
    DIR *dir = cg_beneath_list(openat(root_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (dir == NULL)
        return cg_status_from_errno(errno);
    bool found = false;
    for (const struct dirent *e; !found && (errno = 0, e = readdir(dir)) != NULL;)
        found = is_model(root_fd, e->d_name);
    const int error = errno;
    closedir(dir);
    return found ? CG_OK : error != 0 ? cg_status_from_errno(error) : CG_ERR_NOT_FOUND;
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
