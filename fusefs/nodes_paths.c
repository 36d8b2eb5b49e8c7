/* Paths of nodes, by the names that lead up from them. */
#include "fusefs/nodes_table.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* A file may have tens of thousands of names: after so many the lock is let go for a moment. */
enum { NAMES_A_TURN = 256 };

static const cg_node_name *name_at(const cg_fs_node *node, unsigned name_index)
{
    const cg_node_name *name = node->names;
    while (name != NULL && name_index-- > 0)
        name = name->next;
    return name;
}

/* cg_nodes_path() with the lock held, by the node's name first. */
static int make_path(const cg_nodes *nodes, const cg_fs_node *node, const cg_node_name *first,
                     const char *leaf, char **path_out)
{
    size_t n_bytes = leaf == NULL ? 1 : strlen(leaf) + 2;
    const cg_node_name *name;
    cg_node_climb c = {0};
    *path_out = NULL;
    for (const cg_fs_node *at = node; at != nodes->root; at = name->parent) {
        name = at == node ? first : at->names;
        if (name == NULL) /* only the node's own name says that there are no more of them */
            return at == node ? ENOENT : ESTALE;
        if (cg_node_climb_goes_round(&c, at))
            return ESTALE;
        n_bytes += strlen(name->text) + 1;
    }
    char *path = malloc(n_bytes);
    if (path == NULL)
        return ENOMEM;
    /* Written from its end to its start, as the names are found. Names above the first are each
     * node's latest. */
    char *end = path + n_bytes - 1;
    *end = '\0';
    if (leaf != NULL)
        end = memcpy(end - strlen(leaf), leaf, strlen(leaf));
    for (const cg_fs_node *at = node; at != nodes->root; at = name->parent) {
        name = at == node ? first : at->names;
        if (*end != '\0')
            *--end = '/';
        end = memcpy(end - strlen(name->text), name->text, strlen(name->text));
    }
    memmove(path, end, strlen(end) + 1);
    *path_out = path;
    return 0;
}

int cg_nodes_path(cg_nodes *nodes, const cg_fs_node *node, unsigned name_index, const char *leaf,
                  char **path_out)
{
    pthread_mutex_lock(&nodes->lock);
    *path_out = NULL;
    /* What a dead node's names lead to is another file. The root has one path, the empty one, and
     * no names. */
    const bool is_none = node->is_dead || (node == nodes->root && name_index > 0);
    const int error =
        is_none ? ENOENT : make_path(nodes, node, name_at(node, name_index), leaf, path_out);
    pthread_mutex_unlock(&nodes->lock);
    return error;
}

void cg_nodes_drop_stale(cg_nodes *nodes, cg_fs_node *node, const char *path, uint64_t epoch)
{
    char *first;
    pthread_mutex_lock(&nodes->lock);
    /* The last name stays, right or wrong. */
    while (nodes->rename_epoch == epoch && nodes->n_renames == 0 && node->names != NULL &&
           node->names->next != NULL) {
        const int error = make_path(nodes, node, node->names, NULL, &first);
        const bool is_right = error == 0 && strcmp(first, path) == 0;
        free(first);
        if (is_right || (error != 0 && error != ESTALE))
            break;
        cg_nodes_remove_name(nodes, node->names);
    }
    pthread_mutex_unlock(&nodes->lock);
}

/* cg_nodes_path_of_file() with the lock held. EAGAIN: from *index on there may be more. */
static int find_path(cg_nodes *nodes, const cg_fs_node *node, bool (*is)(const char *path),
                     unsigned *index, char **path_out)
{
    unsigned number = 0, n_seen = 0;
    bool are_all_known = true;
    const cg_fs_node *at = *cg_node_bucket(nodes, node->dev, node->ino);
    for (; at != NULL; at = at->hash_next) {
        if (!cg_node_is_of(at, node->dev, node->ino) || at->type != node->type)
            continue;
        are_all_known = are_all_known && !at->has_dropped_names;
        for (const cg_node_name *name = at->names; name != NULL; name = name->next, number++) {
            if (number < *index)
                continue;
            if (number == CG_NODES_MAX_TRIED)
                return EMLINK;
            if (n_seen++ == NAMES_A_TURN)
                return EAGAIN;
            *index = number + 1;
            const int error = make_path(nodes, at, name, NULL, path_out);
            if (error == ESTALE) /* which says nothing of the others */
                continue;
            if (error != 0 || is(*path_out))
                return error;
            free(*path_out);
            *path_out = NULL;
        }
    }
    return are_all_known ? ENOENT : EMLINK;
}

int cg_nodes_path_of_file(cg_nodes *nodes, const cg_fs_node *node, bool (*is)(const char *path),
                          unsigned *index, char **path_out)
{
    int error = EAGAIN;
    *path_out = NULL;
    while (error == EAGAIN) {
        pthread_mutex_lock(&nodes->lock);
        error = find_path(nodes, node, is, index, path_out);
        pthread_mutex_unlock(&nodes->lock);
    }
    return error;
}
