/* fusefs/moves.c - rename and link: their part of fusefs/core.h.
 *
 * What comes under a strict name is checked first, with writers kept out until it has the name
 * (fusefs/arrivals.h). A directory is walked only when its new place has other rules than the old
 * one: contexts/a -> contexts/b has not, unless b is another model's, which adopts what comes. It
 * is walked twice. The checks of the first walk can take long, and meanwhile others may put files
 * into it. The second walk, while no name is made or moved, finds that nothing is there but what
 * was checked.
 *
 * A rename does not change what a file shows: where its old name shows another part of a nested
 * chunk than the new one would (fusefs/views.h) it is EXDEV, and mv copies. A link to a chunk's
 * name may show another part of the file; that is how a nested chunk gets its names.
 */
#include "fusefs/adopt.h"
#include "fusefs/arrivals.h"
#include "fusefs/fs.h"
#include "fusefs/pending.h"
#include "fusefs/publish.h"
#include "fusefs/published.h"
#include "fusefs/reach.h"
#include "fusefs/space.h"
#include "iouring/beneath.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_SEEN = 4 * CG_ARRIVALS_MAX_HELD }; /* names in a folder that comes under the rules */

typedef struct place {
    cg_fs_node *parent;
    const char *leaf;
    int dir_fd;
    char *path;
    cg_tree_name name;
} place;

static int place_open(cg_fs *fs, cg_fs_node *parent, const char *leaf, place *place_out)
{
    *place_out = (place){.parent = parent, .leaf = leaf, .dir_fd = -1};
    int error = cg_fs_name_is_free(fs, parent, leaf);
    if (error == 0)
        error = cg_reach_dir(fs, parent, leaf, &place_out->dir_fd, &place_out->path);
    if (error == 0)
        cg_tree_parse(place_out->path, &place_out->name);
    return error;
}

static void place_close(place *at)
{
    if (at->dir_fd >= 0 && at->path != NULL)
        close(at->dir_fd);
    free(at->path);
}

/* Whether the place is still where it was found to be: directories above it can be moved meanwhile,
 * to where other rules hold. Under the lock of names. */
static bool place_stays(cg_fs *fs, const place *at)
{
    char *path;
    if (cg_nodes_path(&fs->nodes, at->parent, 0, at->leaf, &path) != 0)
        return false;
    const bool same = strcmp(path, at->path) == 0;
    free(path);
    return same;
}

static int depth_of(const char *path)
{
    int depth = 1;
    for (; *path != '\0'; path++)
        depth += *path == '/';
    return depth;
}

/* What is done with each file below a directory that moves from old_path to path. */
typedef int visitor(cg_fs *fs, cg_arrivals *list, int dir_fd, const char *leaf,
                    const cg_tree_name *old_name, const char *path, const cg_tree_name *name);

/* Something came into the directory after it was walked. mv copies then. */
static int find_covered(cg_fs *fs, cg_arrivals *list, int dir_fd, const char *leaf,
                        const cg_tree_name *old_name, const char *path, const cg_tree_name *name)
{
    (void)fs, (void)path;
    return cg_arrivals_covers(list, dir_fd, leaf, old_name, name) ? 0 : EXDEV;
}

static int walk_directory(cg_fs *fs, int parent_fd, const char *leaf, const char *old_path,
                          const char *path, visitor *visit, cg_arrivals *list)
{
    /* No rule reaches below: neither where it comes from nor where it goes to. What leaves the
     * rules is not walked again: nothing in it gets a strict name. */
    const bool leaves = !cg_tree_is_folder(path);
    if (leaves && (visit == find_covered || !cg_tree_is_folder(old_path)))
        return 0;
    const int fd = openat(parent_fd, leaf, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *dir = cg_beneath_list(fd);
    if (dir == NULL)
        return errno;
    const size_t name_bytes = NAME_MAX + 2;
    char *old_below = malloc(strlen(old_path) + name_bytes),
         *below = malloc(strlen(path) + name_bytes);
    int error = old_below == NULL || below == NULL ? ENOMEM : 0;
    while (error == 0) {
        errno = 0;
        const struct dirent *entry = readdir(dir);
        if (entry == NULL) {
            error = errno; /* 0: the end */
            break;
        }
        cg_tree_name old_name, name;
        struct stat attr;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        /* While it is walked again, nobody can change a name. With more names mv makes copies. */
        if (!leaves && list->n_seen++ >= MOST_SEEN) {
            error = EXDEV;
            break;
        }
        sprintf(old_below, "%s/%s", old_path, entry->d_name);
        sprintf(below, "%s/%s", path, entry->d_name);
        cg_tree_parse(old_below, &old_name);
        cg_tree_parse(below, &name);
        if (fstatat(fd, entry->d_name, &attr, AT_SYMLINK_NOFOLLOW) != 0)
            /* Removed since it was listed. */
            error = errno == ENOENT ? 0 : errno;
        else if (S_ISLNK(attr.st_mode) && cg_tree_is_folder(below))
            error = EPERM;
        else if (S_ISDIR(attr.st_mode) && !cg_fs_is_strict(&name))
            error = walk_directory(fs, fd, entry->d_name, old_below, below, visit, list);
        else
            error = visit(fs, list, fd, entry->d_name, &old_name, below, &name);
    }
    free(old_below);
    free(below);
    closedir(dir);
    return error;
}

static bool same_rules_below(const char *old_path, const char *path);

/* Whether both are the objects, say, of a model. */
static bool same_folder_of_models(const char *old_path, const char *path)
{
    const char *old_leaf = strchr(old_path, '/'), *leaf = strchr(path, '/');
    if (strcmp(old_leaf, leaf) != 0 || strcmp(leaf, "/contexts") == 0 || !cg_tree_is_folder(path))
        return false;
    char *old_model = strndup(old_path, (size_t)(old_leaf - old_path)),
         *model = strndup(path, (size_t)(leaf - path));
    const bool same = old_model != NULL && model != NULL && same_rules_below(old_model, model);
    free(old_model);
    free(model);
    return same;
}

/* Whether what lies below the two directories obeys the same rules: a model and a model, two
 * contexts of one model, the objects of two models. */
static bool same_rules_below(const char *old_path, const char *path)
{
    cg_tree_name old_name, name;
    char *old_probe = NULL, *probe = NULL;
    bool same = false;
    const int depth = depth_of(path);
    if (depth == 2 && depth_of(old_path) == 2)
        return same_folder_of_models(old_path, path);
    /* A model lies at depth 1, a context at 3. One strict name below tells for all. */
    if (depth != depth_of(old_path) || (depth != 1 && depth != 3))
        return false;
    const char *rest = depth == 1 ? "contexts/probe/L1/00000.kv" : "L1/00000.kv";
    if (asprintf(&old_probe, "%s/%s", old_path, rest) < 0)
        old_probe = NULL;
    if (asprintf(&probe, "%s/%s", path, rest) < 0)
        probe = NULL;
    if (old_probe != NULL && probe != NULL) {
        cg_tree_parse(old_probe, &old_name);
        cg_tree_parse(probe, &name);
        same = old_name.kind == CG_TREE_CONTEXT_CHUNK && name.kind == CG_TREE_CONTEXT_CHUNK &&
               (depth == 1 || strcmp(old_name.model, name.model) == 0);
    }
    free(old_probe);
    free(probe);
    return same;
}

/* One direction of a move. visit: cg_arrivals_add, and find_covered once more before it is made. */
static int check_move(cg_fs *fs, const place *from, const place *to, mode_t type, visitor *visit,
                      cg_arrivals *list)
{
    if (S_ISLNK(type) && cg_tree_is_folder(to->path))
        return EPERM;
    if (S_ISDIR(type) && !cg_fs_is_strict(&to->name))
        return same_rules_below(from->path, to->path)
                   ? 0
                   : walk_directory(fs, from->dir_fd, from->leaf, from->path, to->path, visit,
                                    list);
    return visit(fs, list, from->dir_fd, from->leaf, &from->name, to->path, &to->name);
}

/* renameat2(), also without overwriting where the store has no RENAME_NOREPLACE. */
static int move(const place *from, const place *to, unsigned flags)
{
    struct stat attr;
    if (renameat2(from->dir_fd, from->leaf, to->dir_fd, to->leaf, flags) == 0)
        return 0;
    if (flags != RENAME_NOREPLACE || (errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP))
        return errno;
    if (fstatat(from->dir_fd, from->leaf, &attr, AT_SYMLINK_NOFOLLOW) != 0)
        return errno;
    if (S_ISDIR(attr.st_mode)) { /* only an empty directory can be overwritten */
        if (fstatat(to->dir_fd, to->leaf, &attr, AT_SYMLINK_NOFOLLOW) == 0)
            return EEXIST;
        return renameat(from->dir_fd, from->leaf, to->dir_fd, to->leaf) == 0 ? 0 : errno;
    }
    if (linkat(from->dir_fd, from->leaf, to->dir_fd, to->leaf, 0) != 0)
        /* EINVAL is what a kernel says of a flag that the file system lacks. */
        return errno == EEXIST ? EEXIST : EINVAL;
    return unlinkat(from->dir_fd, from->leaf, 0) == 0 ? 0 : errno;
}

/* Of what has its new name: the log says if it is a context that nobody finds there. */
static void tell_of_context(cg_fs *fs, const place *at, mode_t type)
{
    char path[CG_TREE_PATH_BYTES];
    const char *rest = S_ISDIR(type) ? "/context.json" : "";
    if (snprintf(path, sizeof path, "%s%s", at->path, rest) >= (int)sizeof path ||
        !cg_fs_is_misplaced(path))
        return;
    const int fd = cg_beneath_open(fs->root_fd, path, O_PATH);
    if (fd < 0)
        return;
    cg_fs_tell_misplaced(fs, path, fd);
    close(fd);
}

static int rename_waiting(cg_fs *fs, cg_fs_pending *pending, cg_fs_node *new_parent,
                          const char *new_name, unsigned flags)
{
    int error = cg_fs_name_is_free(fs, new_parent, new_name);
    if (error == 0 && (flags & ~(unsigned)RENAME_NOREPLACE) != 0)
        error = EINVAL;
    if (error == 0)
        error = cg_publish_as(fs, pending, new_parent, new_name, flags == 0);
    cg_pending_put(fs, pending);
    return error;
}

int cg_fs_rename(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *parent, const char *name,
                 cg_fs_node *new_parent, const char *new_name, unsigned flags)
{
    struct stat attr, other = {0};
    cg_arrivals list = {0};
    place from = {.dir_fd = -1}, to = {.dir_fd = -1};
    const bool exchange = (flags & RENAME_EXCHANGE) != 0;
    if (fs->read_only)
        return EROFS;
    if ((flags & ~(unsigned)(RENAME_NOREPLACE | RENAME_EXCHANGE)) != 0)
        return EINVAL;
    cg_fs_pending *pending = cg_pending_find(fs, caller, parent, name);
    if (pending != NULL)
        return rename_waiting(fs, pending, new_parent, new_name, flags);

    int error = place_open(fs, parent, name, &from);
    if (error == 0)
        error = place_open(fs, new_parent, new_name, &to);
    if (error == 0 && fstatat(from.dir_fd, name, &attr, AT_SYMLINK_NOFOLLOW) != 0)
        error = errno;
    if (error == 0 && exchange && fstatat(to.dir_fd, new_name, &other, AT_SYMLINK_NOFOLLOW) != 0)
        error = errno;
    if (error == 0)
        error = check_move(fs, &from, &to, attr.st_mode, cg_arrivals_add, &list);
    if (error == 0 && exchange)
        error = check_move(fs, &to, &from, other.st_mode, cg_arrivals_add, &list);
    if (error == 0 && list.n_new > 0)
        error = cg_space_check(fs);
    if (error == 0) {
        if (S_ISDIR(attr.st_mode) || S_ISDIR(other.st_mode))
            /* A directory takes all names below it along: nobody may make one meanwhile. A file
             * moves alone. */
            pthread_rwlock_wrlock(&fs->names_lock);
        else
            pthread_rwlock_rdlock(&fs->names_lock);
        error = place_stays(fs, &from) && place_stays(fs, &to) ? 0 : EBUSY;
        list.n_seen = 0;
        if (error == 0)
            error = check_move(fs, &from, &to, attr.st_mode, find_covered, &list);
        if (error == 0 && exchange)
            error = check_move(fs, &to, &from, other.st_mode, find_covered, &list);
        if (error == 0) {
            /* Between these two a path may be right in the store and wrong in the table, or the
             * other way round: who meets that waits for the end and tries again. */
            cg_nodes_rename_begin(&fs->nodes);
            error = move(&from, &to, flags);
            if (error == 0)
                cg_nodes_move_name(&fs->nodes, parent, name, new_parent, new_name, exchange);
            cg_nodes_rename_end(&fs->nodes);
        }
        pthread_rwlock_unlock(&fs->names_lock);
        cg_space_failed(fs, error);
    }
    /* The names are there already; an error here could not take them back. */
    if (error == 0 && list.n_published > 0) {
        cg_publish_sync_directory(to.dir_fd);
        if (exchange) /* which publishes there, too */
            cg_publish_sync_directory(from.dir_fd);
    }
    cg_arrivals_end(fs, &list, error == 0);
    if (error == 0)
        tell_of_context(fs, &to, attr.st_mode);
    if (error == 0 && exchange)
        tell_of_context(fs, &from, other.st_mode);
    place_close(&from);
    place_close(&to);
    return error;
}

/* Whether the name to may be given to the file of fd, which is held. What has a strict name now
 * needs no second look at its content. */
static int check_link(cg_fs *fs, int fd, bool is_published, const place *to,
                      cg_chunk_header *header_out)
{
    /* A profile's name is its fingerprint, which only reading all of it tells. */
    return to->name.kind == CG_TREE_PROFILE || !is_published
               ? cg_fs_check(fs, fd, to->path, &to->name, header_out)
               : cg_fs_check_place(fs, fd, to->path, &to->name, header_out);
}

/* A strict name shows its level of the file, whichever name it is linked to. An ordinary one would
 * show more than the view that was linked. */
static bool may_link_view(const cg_fs_node *node, const place *to)
{
    return node->view.level == 0 || cg_fs_is_strict(&to->name);
}

int cg_fs_link(cg_fs *fs, cg_fs_node *node, cg_fs_node *new_parent, const char *new_name,
               cg_fs_entry *entry_out)
{
    cg_chunk_header header = {0};
    place to = {.dir_fd = -1};
    cg_gate before = CG_GATE_OPEN;
    bool is_published = false;
    int fd = -1, error;
    if (fs->read_only)
        return EROFS;
    if (node->control != CG_CONTROL_NONE)
        return EPERM;
    cg_fs_pending *pending = cg_pending_of(fs, node);
    if (pending != NULL) { /* it has no name to be linked from yet */
        cg_pending_put(fs, pending);
        return EBUSY;
    }
    if ((error = place_open(fs, new_parent, new_name, &to)) != 0)
        goto done;
    const bool is_strict = cg_fs_is_strict(&to.name);
    if ((is_strict && !S_ISREG(node->type)) ||
        (S_ISLNK(node->type) && cg_tree_is_folder(to.path))) {
        error = EPERM;
        goto done;
    }
    /* A profile of a context becomes one of the model's. */
    const bool is_checked =
        is_strict || (S_ISREG(node->type) && to.name.kind == CG_TREE_CONTEXT_PROFILE);
    error = cg_reach_open(fs, node, is_checked ? O_RDONLY | O_NONBLOCK : O_PATH, &fd, NULL);
    /* Held until the name is there: what was checked must be what is published. A view's file is
     * published already. */
    const bool holds = error == 0 && is_checked && node->view.level == 0;
    if (holds && (error = cg_arrivals_hold(fs, node, fd, &before)) != 0)
        goto done;
    if (error == 0 && is_strict) {
        is_published = cg_published_for_sure(fs, node, "");
        error = check_link(fs, fd, is_published, &to, &header);
    }
    if (error == 0 && !may_link_view(node, &to))
        error = EXDEV;
    const bool is_new = holds && is_strict && !is_published && before != CG_GATE_SEALED;
    if (error == 0 && is_new)
        error = cg_space_check(fs);
    if (error == 0 && is_strict)
        error = cg_fs_sync_to_publish(fs, node, fd);
    if (error == 0) {
        pthread_rwlock_rdlock(&fs->names_lock);
        if (!place_stays(fs, &to))
            error = EBUSY;
        /* By the descriptor: the file that was checked, whatever its names are now. */
        else if (linkat(AT_FDCWD, cg_reach_proc_path(fd).text, to.dir_fd, new_name,
                        AT_SYMLINK_FOLLOW) != 0)
            error = errno;
        else
            cg_nodes_drop_missing(&fs->nodes, new_parent, new_name);
        pthread_rwlock_unlock(&fs->names_lock);
        cg_space_failed(fs, error);
    }
    const bool is_linked = error == 0;
    if (is_linked && is_strict)
        cg_publish_sync_directory(to.dir_fd); /* no error takes the name back */
    if (is_linked)
        error = cg_fs_enter(fs, new_parent, to.dir_fd, new_name, to.path, entry_out);
    if (is_linked) {
        cg_fs_adopt(fs, to.path, &to.name, fd,
                    to.name.kind == CG_TREE_CONTEXT_CHUNK ? &header : NULL);
        cg_metrics_add(&fs->metrics.published, is_strict);
        if (is_new)
            cg_space_arrived(fs, fd);
    }
    if (holds)
        cg_gate_check_end(&fs->nodes, node, is_linked && is_strict ? CG_GATE_SEALED : before);
done:
    if (fd >= 0)
        close(fd);
    place_close(&to);
    return error;
}
