#include "fusefs/published.h"

#include "fusefs/claims.h"
#include "fusefs/fs.h"
#include "fusefs/open_files.h"
#include "fusefs/reach.h"
#include "iouring/beneath.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* UNTRIED: no name that was tried says yes, and there are more of them. */
typedef enum answer { NO, YES, UNKNOWN, UNTRIED } answer;

/* Whether path still leads to the node's file. "": it has no name. */
static answer leads_to(cg_fs *fs, const char *path, const cg_fs_node *node)
{
    if (path[0] == '\0')
        return YES;
    const int fd = cg_beneath_open(fs->root_fd, path, O_PATH);
    if (fd < 0)
        return errno == ENOENT || errno == ELOOP || errno == ENOTDIR || errno == ESTALE ? NO
                                                                                        : UNKNOWN;
    const bool same = cg_reach_is_node(fs, fd, node);
    close(fd);
    return same ? YES : NO;
}

static bool is_strict(const char *path)
{
    cg_tree_name name = {0};
    cg_tree_parse(path, &name);
    return cg_fs_is_strict(&name);
}

/* Whether a name of the file is strict. is_now: only names that lead there count. What was
 * published may have gone past us, and its inode number come back with another file, or the file
 * have been changed since. */
static answer has_strict_name(cg_fs *fs, const cg_fs_node *node, bool is_now)
{
    answer found = NO;
    unsigned index = 0;
    char *path;
    int error = 0;
    while (found != YES &&
           (error = cg_nodes_path_of_file(&fs->nodes, node, is_strict, &index, &path)) == 0) {
        const answer leads = is_now ? leads_to(fs, path, node) : YES;
        found = leads == NO ? found : leads;
        free(path);
    }
    if (found != NO || error == ENOENT)
        return found;
    return error == EMLINK ? UNTRIED : UNKNOWN;
}

bool cg_published_by_name(cg_fs *fs, cg_fs_node *node)
{
    return has_strict_name(fs, node, false) == YES;
}

bool cg_published_for_sure(cg_fs *fs, cg_fs_node *node, const char *path)
{
    return is_strict(path) || has_strict_name(fs, node, true) == YES;
}

static answer is_published_now(cg_fs *fs, cg_fs_node *node)
{
    answer found;
    uint64_t epoch;
    do { /* during a rename a name can lead nowhere and be right */
        epoch = cg_nodes_epoch(&fs->nodes);
        found = has_strict_name(fs, node, true);
    } while ((found == NO || found == UNTRIED) && cg_nodes_changed_since(&fs->nodes, epoch));
    return found;
}

/* A chunk or a profile with so many names or more. Chunks in contexts are links of objects,
 * profile.cgp is one of a profile; one of its names may be one that we have not tried, or never
 * seen. */
static bool is_content(cg_fs *fs, cg_fs_node *node, nlink_t least_links)
{
    uint8_t first[CG_CHUNK_FIXED_BYTES];
    cg_chunk_header header;
    struct stat attr;
    cg_reached reached;
    if (cg_reach(fs, node, &reached) != 0)
        return false;
    const bool has_links = fstat(reached.fd, &attr) == 0 && attr.st_nlink >= least_links;
    cg_reach_end(fs, &reached);
    int fd;
    /* What has links and cannot be read counts as published: the answer that harms nobody. */
    if (!has_links || cg_reach_open(fs, node, O_RDONLY | O_NONBLOCK, &fd, NULL) != 0)
        return has_links;
    const ssize_t n = pread(fd, first, sizeof first, 0);
    close(fd);
    return n >= 4 &&
           (memcmp(first, "CGPF", 4) == 0 ||
            (n == sizeof first && cg_chunk_header_parse(first, sizeof first, &header) == CG_OK));
}

/* 0 if the file may be changed; its gate is open from now on. */
static int allow_change(cg_fs *fs, cg_fs_node *node)
{
    if (node->view.level != 0)
        return EPERM;
    /* Names and links are looked at behind a closed gate: a file that is published at this moment
     * must not be opened again. */
    const cg_gate before = cg_gate_check_begin(&fs->nodes, node);
    const answer published = is_published_now(fs, node);
    const nlink_t least_links = published == UNTRIED ? 1 : 2;
    /* What cannot be known is yes. */
    int error =
        published == YES || published == UNKNOWN || is_content(fs, node, least_links) ? EPERM : 0;
    /* Who had it open for writing when it was published holds no claim. Were it open for him again,
     * another daemon could publish it beside him. */
    if (error == 0 && before == CG_GATE_SEALED && cg_fs_file_stays_written(&fs->nodes, node))
        error = ETXTBSY;
    cg_gate_check_end(&fs->nodes, node, error == 0 ? CG_GATE_OPEN : before);
    return error;
}

int cg_published_open_to_change(cg_fs *fs, cg_fs_node *node, int flags, int *fd_out,
                                char **path_out)
{
    char *path;
    int fd;
    int error = allow_change(fs, node);
    if (error != 0)
        return error;
    if ((error = cg_reach_open(fs, node, flags | O_NONBLOCK, &fd, &path)) != 0)
        return error;
    error = cg_claim_to_write(fd);
    /* Looked at again behind the claim: another daemon may have published it before. */
    if (error == 0 && leads_to(fs, path, node) != YES)
        error = ESTALE;
    /* Or its right name is known again (fusefs/nodes.h). */
    if (error == 0 && (is_strict(path) || is_content(fs, node, 2)))
        error = EPERM;
    if (error != 0) {
        close(fd);
        free(path);
        return error;
    }
    *fd_out = fd;
    if (path_out != NULL)
        *path_out = path;
    else
        free(path);
    return 0;
}
