/* fusefs/nodes_table.h - what the sources of fusefs/nodes.h share: names, buckets, and the way up.
 *
 * Threads: the table's lock is held.
 */
#ifndef CG_FUSEFS_NODES_TABLE_H
#define CG_FUSEFS_NODES_TABLE_H
#include "fusefs/nodes.h"

struct cg_node_name {
    cg_fs_node *parent; /* pinned */
    cg_fs_node *node;
    cg_node_name *next; /* of the same node */
    cg_node_name *hash_next;
    uint32_t n_until_drop; /* new names of the node until old ones may be dropped */
    char text[];
};

/* 2^64 over the golden ratio, and the first multiplier of MurmurHash3's finalizer. */
static inline size_t cg_node_mix(uint64_t a, uint64_t b)
{
    uint64_t h = (a ^ (b + 0x9e3779b97f4a7c15u + (a << 6))) * 0xff51afd7ed558ccdu;
    return (size_t)(h ^ (h >> 32));
}

static inline size_t cg_node_hash(dev_t dev, ino_t ino)
{
    return cg_node_mix(dev, ino);
}

static inline uint64_t cg_node_text_hash(const char *text)
{
    uint64_t h = 0xcbf29ce484222325u; /* FNV-1a: names are short */
    for (; *text != '\0'; text++)
        h = (h ^ (unsigned char)*text) * 0x100000001b3u;
    return h;
}

static inline size_t cg_node_name_hash(const cg_fs_node *parent, const char *text)
{
    return cg_node_mix((uint64_t)(uintptr_t)parent, cg_node_text_hash(text));
}

static inline cg_fs_node **cg_node_bucket(const cg_nodes *nodes, dev_t dev, ino_t ino)
{
    return &nodes->node_buckets[cg_node_hash(dev, ino) & (nodes->n_buckets - 1)];
}

/* Where a node is. Dead ones are scattered: a user can have any number of them of one file number,
 * and who looks for the living one must not walk past them all. */
static inline cg_fs_node **cg_node_home(const cg_nodes *nodes, const cg_fs_node *node)
{
    return node->is_dead
               ? &nodes->node_buckets[cg_node_mix(node->generation, 0) & (nodes->n_buckets - 1)]
               : cg_node_bucket(nodes, node->dev, node->ino);
}

static inline bool cg_node_is_of(const cg_fs_node *node, dev_t dev, ino_t ino)
{
    return node->dev == dev && node->ino == ino && !node->is_dead;
}

static inline cg_node_name **cg_node_name_bucket(const cg_nodes *nodes, const cg_fs_node *parent,
                                                 const char *text)
{
    return &nodes->name_buckets[cg_node_name_hash(parent, text) & (nodes->n_buckets - 1)];
}

/* A walk up the tree by each node's latest name. Folders that were moved past us can leave names
 * that lie under each other, and then it would never end. Method: Brent's, to find a circle. */
typedef struct cg_node_climb {
    const cg_fs_node *mark; /* a node that the walk came by */
    size_t n_steps, n_until_mark;
} cg_node_climb;

/* Whether the walk, now at this node, goes round. */
static inline bool cg_node_climb_goes_round(cg_node_climb *c, const cg_fs_node *at)
{
    if (at == c->mark)
        return true;
    if (c->n_steps++ == c->n_until_mark) {
        c->n_until_mark = 2 * c->n_until_mark + 1;
        c->n_steps = 0;
        c->mark = at;
    }
    return false;
}

/* Its parent may be gone after that, and so on upwards. */
void cg_nodes_remove_name(cg_nodes *nodes, cg_node_name *name);
#endif
