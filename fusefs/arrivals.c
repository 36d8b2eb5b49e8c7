#include "fusefs/arrivals.h"

#include "fusefs/adopt.h"
#include "fusefs/claims.h"
#include "fusefs/fs.h"
#include "fusefs/open_files.h"
#include "fusefs/published.h"
#include "fusefs/space.h"
#include "iouring/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { GATE_SECONDS = 10 };

struct cg_arrival {
    char *path;
    cg_tree_name name;
    cg_chunk_header header;
    cg_fs_node *node; /* looked up once, its gate closed; NULL: not held */
    cg_gate before;
    int fd;
};

/* Whether a file that may have one name may have the other, without a second look at its
 * content. */
static bool same_content(const cg_tree_name *a, const cg_tree_name *b)
{
    return a->kind == b->kind && a->level == b->level && cg_key_equal(&a->key, &b->key) &&
           strcmp(a->fp8, b->fp8) == 0;
}

static bool is_adopted(cg_tree_kind kind)
{
    return kind == CG_TREE_CONTEXT_CHUNK || kind == CG_TREE_CONTEXT_PROFILE ||
           kind == CG_TREE_CONTEXT_MODEL;
}

/* Whether a move from one name to the other changes nothing for the file. */
static bool same_rule(const cg_tree_name *a, const cg_tree_name *b)
{
    return same_content(a, b) && (!is_adopted(a->kind) || strcmp(a->model, b->model) == 0);
}

/* A context's profile gets a link among the model's, which is a strict name. */
static bool must_hold(const cg_tree_name *name)
{
    return cg_fs_is_strict(name) || name->kind == CG_TREE_CONTEXT_PROFILE;
}

static const cg_arrival *find_held(const cg_arrivals *list, const struct stat *attr)
{
    for (size_t i = 0; i < list->n_items; i++) {
        const cg_fs_node *node = list->items[i].node;
        if (node != NULL && node->dev == attr->st_dev && node->ino == attr->st_ino)
            return &list->items[i];
    }
    return NULL;
}

static int append(cg_arrivals *list, const char *path, const cg_tree_name *name,
                  cg_arrival **item_out)
{
    cg_arrival *items = realloc(list->items, (list->n_items + 1) * sizeof *items);
    if (items == NULL)
        return ENOMEM;
    list->items = items;
    items[list->n_items] = (cg_arrival){.path = strdup(path), .name = *name, .fd = -1};
    *item_out = &items[list->n_items];
    return (*item_out)->path == NULL ? ENOMEM : (list->n_items++, 0);
}

int cg_arrivals_hold(cg_fs *fs, cg_fs_node *node, int fd, cg_gate *before_out)
{
    const struct timespec deadline = cg_deadline_in(GATE_SECONDS * CG_SECOND_NS);
    if (!cg_gate_check_begin_until(&fs->nodes, node, &deadline, before_out))
        return EBUSY;
    /* A mapping keeps its file open: it would change the pages that readers of the name see. */
    int error =
        *before_out != CG_GATE_SEALED && cg_fs_file_stays_written(&fs->nodes, node) ? EBUSY : 0;
    if (error == 0)
        error = cg_claim_to_publish(fd);
    if (error != 0)
        cg_gate_check_end(&fs->nodes, node, *before_out);
    return error;
}

static int hold(cg_fs *fs, cg_arrivals *list, cg_arrival *item, const struct stat *attr, int fd)
{
    if (find_held(list, attr) != NULL) /* another name of a file that we hold */
        return 0;
    if (list->n_held >= CG_ARRIVALS_MAX_HELD)
        return EXDEV;
    cg_fs_node *node =
        cg_nodes_enter(&fs->nodes, NULL, NULL, attr, cg_fs_identity(fs, fd, ""), NULL);
    if (node == NULL)
        return ENOMEM;
    const int own_fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    const int error = own_fd < 0 ? errno : cg_arrivals_hold(fs, node, own_fd, &item->before);
    if (error != 0) {
        if (own_fd >= 0)
            close(own_fd);
        cg_nodes_forget(&fs->nodes, node, 1);
        return error;
    }
    item->node = node;
    item->fd = own_fd;
    list->n_held++;
    return 0;
}

int cg_arrivals_add(cg_fs *fs, cg_arrivals *list, int dir_fd, const char *leaf,
                    const cg_tree_name *old_name, const char *path, const cg_tree_name *name)
{
    cg_arrival *item = NULL;
    struct stat attr;
    int error;
    if (same_rule(old_name, name))
        return 0;
    if (!cg_view_is_same(dir_fd, leaf, old_name, name))
        return EXDEV;
    if (!must_hold(name))
        return is_adopted(name->kind) ? append(list, path, name, &item) : 0;
    /* A context's chunk that goes to another model. */
    const bool is_published = cg_fs_is_strict(name) && same_content(old_name, name);
    const int fd = openat(dir_fd, leaf, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 && !cg_fs_is_strict(name)) /* a link or the like: nothing is adopted from it */
        return 0;
    if (fd < 0)
        /* A symbolic link or a socket, which no strict name may be. */
        return errno == ELOOP || errno == ENXIO ? EPERM : errno;
    if (fstat(fd, &attr) != 0)
        error = errno;
    else if (!S_ISREG(attr.st_mode))
        error = cg_fs_is_strict(name) ? EPERM : 0;
    else if ((error = append(list, path, name, &item)) == 0 &&
             (error = hold(fs, list, item, &attr, fd)) == 0 && cg_fs_is_strict(name) &&
             (error = is_published ? cg_fs_check_place(fs, fd, path, name, &item->header)
                                   : cg_fs_check(fs, fd, path, name, &item->header)) == 0)
        error = cg_fs_sync_to_publish(fs, find_held(list, &attr)->node, fd);
    close(fd);
    if (is_published && item != NULL)
        item->before = CG_GATE_SEALED;
    if (error == 0 && cg_fs_is_strict(name)) {
        list->n_published++;
        list->n_new += item->node != NULL && item->before != CG_GATE_SEALED &&
                       !cg_published_for_sure(fs, item->node, "");
    }
    return error;
}

bool cg_arrivals_covers(const cg_arrivals *list, int dir_fd, const char *leaf,
                        const cg_tree_name *old_name, const cg_tree_name *name)
{
    struct stat attr;
    if (same_rule(old_name, name) || !must_hold(name))
        return true;
    if (fstatat(dir_fd, leaf, &attr, AT_SYMLINK_NOFOLLOW) != 0)
        return false;
    const cg_arrival *item = find_held(list, &attr);
    return item != NULL ? same_content(&item->name, name) || same_content(old_name, name)
                        : !cg_fs_is_strict(name);
}

/* A list whose move failed may hold an item that is not complete. */
void cg_arrivals_end(cg_fs *fs, cg_arrivals *list, bool moved)
{
    /* All are adopted before any is let go. */
    for (size_t i = 0; i < list->n_items; i++) {
        cg_arrival *item = &list->items[i];
        if (moved && is_adopted(item->name.kind))
            cg_fs_adopt(fs, item->path, &item->name, item->fd,
                        item->name.kind == CG_TREE_CONTEXT_CHUNK ? &item->header : NULL);
    }
    for (size_t i = 0; i < list->n_items; i++) {
        cg_arrival *item = &list->items[i];
        if (item->node != NULL) {
            /* What was sealed before was published, and counted, under another name. */
            if (moved && cg_fs_is_strict(&item->name) && item->before != CG_GATE_SEALED)
                cg_space_arrived(fs, item->fd);
            cg_gate_check_end(&fs->nodes, item->node,
                              moved && cg_fs_is_strict(&item->name) ? CG_GATE_SEALED
                                                                    : item->before);
            close(item->fd);
            cg_nodes_forget(&fs->nodes, item->node, 1);
        }
        free(item->path);
    }
    free(list->items);
    if (moved)
        cg_metrics_add(&fs->metrics.published, list->n_published);
    *list = (cg_arrivals){0};
}
