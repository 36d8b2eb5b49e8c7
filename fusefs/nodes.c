/* Two hash tables, of files by their number and of names by their parent and text, which grow
 * together. A name belongs to both its node's list and the table. It pins its parent, so that the
 * way up from it stays. */
#include "fusefs/nodes.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { FIRST_BUCKETS = 1024 };

_Static_assert(sizeof(cg_fs_node) <= 104, "a node has grown");

static const cg_view WHOLE = {.level = 0};

struct cg_node_name {
    cg_fs_node *parent; /* pinned */
    cg_fs_node *node;
    cg_node_name *next; /* of the same node */
    cg_node_name *hash_next;
    char text[];
};

/* 2^64 over the golden ratio, and the first multiplier of MurmurHash3's finalizer. */
static size_t mix(uint64_t a, uint64_t b)
{
    uint64_t h = (a ^ (b + 0x9e3779b97f4a7c15u + (a << 6))) * 0xff51afd7ed558ccdu;
    return (size_t)(h ^ (h >> 32));
}

static size_t node_hash(dev_t dev, ino_t ino)
{
    return mix(dev, ino);
}

static uint64_t text_hash(const char *text)
{
    uint64_t h = 0xcbf29ce484222325u; /* FNV-1a: names are short */
    for (; *text != '\0'; text++)
        h = (h ^ (unsigned char)*text) * 0x100000001b3u;
    return h;
}

static size_t name_hash(const cg_fs_node *parent, const char *text)
{
    return mix((uint64_t)(uintptr_t)parent, text_hash(text));
}

static cg_fs_node **node_bucket(const cg_nodes *nodes, dev_t dev, ino_t ino)
{
    return &nodes->node_buckets[node_hash(dev, ino) & (nodes->n_buckets - 1)];
}

static cg_node_name **name_bucket(const cg_nodes *nodes, const cg_fs_node *parent, const char *text)
{
    return &nodes->name_buckets[name_hash(parent, text) & (nodes->n_buckets - 1)];
}

/* With the folder's generation, which no other folder ever has. */
static uint64_t missing_hash(const cg_fs_node *parent, const char *text)
{
    const uint64_t h = mix(parent->generation, text_hash(text));
    return h != 0 ? h : 1;
}

static cg_missing_note *missing_note(const cg_nodes *nodes, uint64_t hash)
{
    return &nodes->missing[hash % CG_N_MISSING_NOTES];
}

/* Without memory the tables stay as they are: slower, not wrong. Four times as many buckets at
 * once: growing under the lock is rare. */
static void grow(cg_nodes *nodes)
{
    if (nodes->n_nodes + nodes->n_names < 2 * nodes->n_buckets)
        return;
    cg_nodes larger = *nodes;
    larger.n_buckets *= 4;
    larger.node_buckets = calloc(larger.n_buckets, sizeof *larger.node_buckets);
    larger.name_buckets = calloc(larger.n_buckets, sizeof *larger.name_buckets);
    if (larger.node_buckets == NULL || larger.name_buckets == NULL) {
        free(larger.node_buckets);
        free(larger.name_buckets);
        return;
    }
    for (size_t i = 0; i < nodes->n_buckets; i++) {
        for (cg_fs_node *node = nodes->node_buckets[i], *next; node != NULL; node = next) {
            cg_fs_node **bucket = node_bucket(&larger, node->dev, node->ino);
            next = node->hash_next;
            node->hash_next = *bucket;
            *bucket = node;
        }
        for (cg_node_name *name = nodes->name_buckets[i], *next; name != NULL; name = next) {
            cg_node_name **bucket = name_bucket(&larger, name->parent, name->text);
            next = name->hash_next;
            name->hash_next = *bucket;
            *bucket = name;
        }
    }
    free(nodes->node_buckets);
    free(nodes->name_buckets);
    nodes->n_buckets = larger.n_buckets;
    nodes->node_buckets = larger.node_buckets;
    nodes->name_buckets = larger.name_buckets;
}

static cg_node_name *find_name(const cg_nodes *nodes, const cg_fs_node *parent, const char *text)
{
    cg_node_name *name = *name_bucket(nodes, parent, text);
    while (name != NULL && (name->parent != parent || strcmp(name->text, text) != 0))
        name = name->hash_next;
    return name;
}

/* A walk up the tree by each node's latest name. Folders that were moved past us can leave names
 * that lie under each other, and then it would never end. Method: Brent's, to find a circle. */
typedef struct climb {
    const cg_fs_node *mark; /* a node that the walk came by */
    size_t n_steps, n_until_mark;
} climb;

/* Whether the walk, now at this node, goes round. */
static bool goes_round(climb *c, const cg_fs_node *at)
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

static void remove_node_if_unused(cg_nodes *nodes, cg_fs_node *node);

static void remove_name(cg_nodes *nodes, cg_node_name *name)
{
    cg_node_name **link = name_bucket(nodes, name->parent, name->text);
    while (*link != name)
        link = &(*link)->hash_next;
    *link = name->hash_next;
    for (link = &name->node->names; *link != name; link = &(*link)->next)
        ;
    *link = name->next;
    nodes->n_names--;

    cg_fs_node *parent = name->parent;
    free(name);
    parent->n_pins--;
    remove_node_if_unused(nodes, parent); /* and so on upwards: the depth is that of a path */
}

static void remove_node_if_unused(cg_nodes *nodes, cg_fs_node *node)
{
    if (node->n_lookups > 0 || node->n_pins > 0)
        return;
    cg_fs_node **link = node_bucket(nodes, node->dev, node->ino);
    while (*link != node)
        link = &(*link)->hash_next;
    *link = node->hash_next;
    nodes->n_nodes--;
    node->n_pins = 1; /* its own names are going: no second visit */
    while (node->names != NULL)
        remove_name(nodes, node->names);
    free(node);
}

/* A folder is about to lie in parent: what says that parent lies below the folder is stale, by one
 * name or more. The folder and parent are pinned. */
static void drop_circle(cg_nodes *nodes, const cg_fs_node *folder, cg_fs_node *parent)
{
    climb c = {0};
    for (cg_fs_node *at = parent; at->names != NULL && !goes_round(&c, at);) {
        cg_node_name *name = at->names;
        if (name->parent != folder) {
            at = name->parent;
            continue;
        }
        remove_name(nodes, name);
        at = parent; /* again: an older name may lead there as well */
        c = (climb){0};
    }
}

static void drop_missing(cg_nodes *nodes, const cg_fs_node *parent, const char *text)
{
    const uint64_t hash = missing_hash(parent, text);
    cg_missing_note *note = missing_note(nodes, hash);
    if (note->name == hash)
        *note = (cg_missing_note){0};
}

static void set_name(cg_nodes *nodes, cg_fs_node *node, cg_fs_node *parent, const char *text)
{
    drop_missing(nodes, parent, text);
    cg_node_name *name = find_name(nodes, parent, text);
    /* Nothing changes, so that a look-up of what is known allocates nothing. The order of the
     * node's names stays, too. */
    if (name != NULL && name->node == node)
        return;
    if (name != NULL)
        remove_name(nodes, name);
    const size_t n_bytes = strlen(text) + 1;
    name = malloc(sizeof *name + n_bytes);
    if (name == NULL)
        return;
    memcpy(name->text, text, n_bytes);
    name->parent = parent;
    parent->n_pins++;
    name->node = node;
    if (S_ISDIR(node->type)) {
        node->n_pins++;
        drop_circle(nodes, node, parent);
        node->n_pins--;
    }
    /* The latest first: it is the likeliest to be right still. */
    name->next = node->names;
    node->names = name;
    cg_node_name **bucket = name_bucket(nodes, parent, text);
    name->hash_next = *bucket;
    *bucket = name;
    nodes->n_names++;
}

static cg_fs_node *new_node(cg_nodes *nodes, const struct stat *attr, const cg_view *view)
{
    cg_fs_node *node = calloc(1, sizeof *node);
    if (node == NULL)
        return NULL;
    node->dev = attr->st_dev;
    node->ino = attr->st_ino;
    node->view = *view;
    node->type = (uint16_t)(attr->st_mode & S_IFMT);
    node->generation = nodes->next_generation++;
    nodes->n_nodes++;
    return node;
}

static cg_fs_node *insert_node(cg_nodes *nodes, const struct stat *attr, const cg_view *view)
{
    grow(nodes);
    cg_fs_node *node = new_node(nodes, attr, view);
    if (node == NULL)
        return NULL;
    cg_fs_node **bucket = node_bucket(nodes, node->dev, node->ino);
    node->hash_next = *bucket;
    *bucket = node;
    return node;
}

int cg_nodes_init(cg_nodes *nodes, const struct stat *root)
{
    struct timespec now;
    memset(nodes, 0, sizeof *nodes);
    clock_gettime(CLOCK_REALTIME, &now);
    nodes->next_generation = (uint64_t)now.tv_sec
                             << 30; /* an NFS handle of an earlier mount must not fit */
    nodes->n_buckets = FIRST_BUCKETS;
    nodes->node_buckets = calloc(FIRST_BUCKETS, sizeof *nodes->node_buckets);
    nodes->name_buckets = calloc(FIRST_BUCKETS, sizeof *nodes->name_buckets);
    nodes->read_notes = calloc(CG_N_READ_NOTES, sizeof *nodes->read_notes);
    nodes->missing = calloc(CG_N_MISSING_NOTES, sizeof *nodes->missing);
    if (nodes->node_buckets != NULL && nodes->name_buckets != NULL && nodes->read_notes != NULL &&
        nodes->missing != NULL)
        nodes->root = insert_node(nodes, root, &WHOLE);
    if (nodes->root == NULL) {
        free(nodes->missing);
        free(nodes->read_notes);
        free(nodes->node_buckets);
        free(nodes->name_buckets);
        return ENOMEM;
    }
    nodes->root->n_pins = 1;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&nodes->lock, NULL);
    pthread_cond_init(&nodes->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return 0;
}

void cg_nodes_destroy(cg_nodes *nodes)
{
    for (size_t i = 0; i < nodes->n_buckets; i++) {
        for (cg_node_name *name = nodes->name_buckets[i], *next; name != NULL; name = next) {
            next = name->hash_next;
            free(name);
        }
        for (cg_fs_node *node = nodes->node_buckets[i], *next; node != NULL; node = next) {
            next = node->hash_next;
            free(node);
        }
    }
    for (int control = 0; control < CG_NODES_N_CONTROLS; control++)
        free(nodes->controls[control]);
    free(nodes->missing);
    free(nodes->read_notes);
    free(nodes->node_buckets);
    free(nodes->name_buckets);
    pthread_mutex_destroy(&nodes->lock);
    pthread_cond_destroy(&nodes->changed);
}

size_t cg_nodes_count(cg_nodes *nodes)
{
    pthread_mutex_lock(&nodes->lock);
    const size_t n = nodes->n_nodes;
    pthread_mutex_unlock(&nodes->lock);
    return n;
}

cg_fs_node *cg_nodes_enter(cg_nodes *nodes, cg_fs_node *parent, const char *name,
                           const struct stat *attr, const cg_view *view)
{
    if (view == NULL)
        view = &WHOLE;
    pthread_mutex_lock(&nodes->lock);
    cg_fs_node *node = *node_bucket(nodes, attr->st_dev, attr->st_ino);
    /* An inode number that came back as another type, or after its folder was removed, is another
     * file; a stale node of that number stays until the kernel forgets it, and is found stale by
     * its names. */
    while (node != NULL && (node->dev != attr->st_dev || node->ino != attr->st_ino ||
                            node->type != (attr->st_mode & S_IFMT) || node->is_removed ||
                            !cg_view_equal(&node->view, view)))
        node = node->hash_next;
    if (node == NULL)
        node = insert_node(nodes, attr, view);
    if (node != NULL) {
        node->n_lookups++;
        if (name != NULL)
            set_name(nodes, node, parent, name);
    }
    pthread_mutex_unlock(&nodes->lock);
    return node;
}

cg_fs_node *cg_nodes_enter_control(cg_nodes *nodes, int control, mode_t type)
{
    const struct stat attr = {.st_mode = type};
    pthread_mutex_lock(&nodes->lock);
    cg_fs_node *node = nodes->controls[control];
    if (node == NULL && (node = new_node(nodes, &attr, &WHOLE)) != NULL) {
        node->control = (uint8_t)control;
        node->n_pins = 1;
        nodes->controls[control] = node;
    }
    if (node != NULL)
        node->n_lookups++;
    pthread_mutex_unlock(&nodes->lock);
    return node;
}

void cg_nodes_forget(cg_nodes *nodes, cg_fs_node *node, uint64_t n_lookups)
{
    pthread_mutex_lock(&nodes->lock);
    /* More than we gave: not to be believed, but no reason to keep the node for ever. */
    node->n_lookups -= n_lookups < node->n_lookups ? n_lookups : node->n_lookups;
    remove_node_if_unused(nodes, node);
    pthread_mutex_unlock(&nodes->lock);
}

void cg_nodes_pin(cg_nodes *nodes, cg_fs_node *node)
{
    pthread_mutex_lock(&nodes->lock);
    node->n_pins++;
    pthread_mutex_unlock(&nodes->lock);
}

void cg_nodes_unpin(cg_nodes *nodes, cg_fs_node *node)
{
    pthread_mutex_lock(&nodes->lock);
    node->n_pins--;
    remove_node_if_unused(nodes, node);
    pthread_mutex_unlock(&nodes->lock);
}

void cg_nodes_add_name(cg_nodes *nodes, cg_fs_node *node, cg_fs_node *parent, const char *name)
{
    pthread_mutex_lock(&nodes->lock);
    set_name(nodes, node, parent, name);
    pthread_mutex_unlock(&nodes->lock);
}

/* Its last name is gone, and with it the folder: a folder has one link. Where a name is left, that
 * one may be right and the one that went a stale one. */
static void note_removed(cg_fs_node *node)
{
    if (S_ISDIR(node->type) && node->names == NULL)
        node->is_removed = true;
}

void cg_nodes_drop_name(cg_nodes *nodes, cg_fs_node *parent, const char *text, bool is_removed)
{
    pthread_mutex_lock(&nodes->lock);
    cg_node_name *name = find_name(nodes, parent, text);
    if (name != NULL) {
        cg_fs_node *node = name->node;
        remove_name(nodes, name);
        if (is_removed)
            note_removed(node);
    }
    pthread_mutex_unlock(&nodes->lock);
}

void cg_nodes_move_name(cg_nodes *nodes, cg_fs_node *parent, const char *text,
                        cg_fs_node *new_parent, const char *new_text, bool exchange)
{
    pthread_mutex_lock(&nodes->lock);
    cg_node_name *from = find_name(nodes, parent, text),
                 *to = find_name(nodes, new_parent, new_text);
    drop_missing(nodes, new_parent, new_text);
    if (from != NULL && to != NULL && from->node == to->node) {
        /* POSIX: rename() of one link over another of the same file leaves both. */
    } else {
        cg_fs_node *node = from == NULL ? NULL : from->node, *other = to == NULL ? NULL : to->node;
        if (from != NULL)
            remove_name(nodes, from);
        if (to != NULL)
            remove_name(nodes, to);
        if (node != NULL)
            set_name(nodes, node, new_parent, new_text);
        if (exchange && other != NULL)
            set_name(nodes, other, parent, text);
        else if (other != NULL)
            note_removed(other);
    }
    pthread_mutex_unlock(&nodes->lock);
}

cg_fs_node *cg_nodes_find(cg_nodes *nodes, cg_fs_node *parent, const char *text)
{
    pthread_mutex_lock(&nodes->lock);
    const cg_node_name *name = find_name(nodes, parent, text);
    cg_fs_node *node = name == NULL ? NULL : name->node;
    if (node != NULL)
        node->n_pins++;
    pthread_mutex_unlock(&nodes->lock);
    return node;
}

static cg_node_ref ref_to(cg_fs_node *node)
{
    return (cg_node_ref){node, S_ISDIR(node->type)};
}

size_t cg_nodes_of_file(cg_nodes *nodes, dev_t dev, ino_t ino,
                        cg_node_ref refs_out[CG_NODES_MAX_OF_FILE])
{
    size_t n = 0;
    pthread_mutex_lock(&nodes->lock);
    for (cg_fs_node *node = *node_bucket(nodes, dev, ino); node != NULL && n < CG_NODES_MAX_OF_FILE;
         node = node->hash_next)
        if (node->dev == dev && node->ino == ino)
            refs_out[n++] = ref_to(node);
    pthread_mutex_unlock(&nodes->lock);
    return n;
}

/* *at is a bucket. If the table grows meanwhile, nodes move to buckets of higher numbers only. */
size_t cg_nodes_each(cg_nodes *nodes, size_t *at, cg_node_ref *refs_out, size_t max)
{
    size_t n = 0;
    pthread_mutex_lock(&nodes->lock);
    while (*at < nodes->n_buckets && n == 0) /* a longer chain than max: tables don't have them */
        for (cg_fs_node *node = nodes->node_buckets[(*at)++]; node != NULL && n < max;
             node = node->hash_next)
            refs_out[n++] = ref_to(node);
    pthread_mutex_unlock(&nodes->lock);
    return n;
}

/* The lock is held. */
static void void_note(cg_read_note *note)
{
    *note = (cg_read_note){.n_changes = note->n_changes + 1};
}

void cg_nodes_void_notes(cg_nodes *nodes, dev_t dev, ino_t ino)
{
    pthread_mutex_lock(&nodes->lock);
    for (cg_fs_node *node = *node_bucket(nodes, dev, ino); node != NULL; node = node->hash_next)
        if (node->dev == dev && node->ino == ino)
            void_note(&nodes->read_notes[node->generation % CG_N_READ_NOTES]);
    pthread_mutex_unlock(&nodes->lock);
}

void cg_nodes_void_all_notes(cg_nodes *nodes)
{
    pthread_mutex_lock(&nodes->lock);
    for (size_t i = 0; i < CG_N_READ_NOTES; i++)
        void_note(&nodes->read_notes[i]);
    pthread_mutex_unlock(&nodes->lock);
}

bool cg_nodes_name_of(cg_nodes *nodes, dev_t dev, ino_t folder, const char *text, ino_t *ino_out)
{
    const cg_node_name *name = NULL;
    pthread_mutex_lock(&nodes->lock);
    for (cg_fs_node *node = *node_bucket(nodes, dev, folder); node != NULL && name == NULL;
         node = node->hash_next)
        if (node->dev == dev && node->ino == folder && S_ISDIR(node->type))
            name = find_name(nodes, node, text);
    if (name != NULL)
        *ino_out = name->node->ino;
    pthread_mutex_unlock(&nodes->lock);
    return name != NULL;
}

bool cg_nodes_note_missing(cg_nodes *nodes, const cg_fs_node *parent, const char *text)
{
    const uint64_t hash = missing_hash(parent, text);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const uint32_t now_s = (uint32_t)now.tv_sec;
    pthread_mutex_lock(&nodes->lock);
    cg_missing_note *note = missing_note(nodes, hash);
    const bool is_free =
        note->name == 0 || note->name == hash || now_s - note->told_at_s > 2 * CG_MISSING_SECONDS;
    if (is_free)
        *note = (cg_missing_note){hash, now_s};
    pthread_mutex_unlock(&nodes->lock);
    return is_free;
}

void cg_nodes_drop_missing(cg_nodes *nodes, const cg_fs_node *parent, const char *text)
{
    pthread_mutex_lock(&nodes->lock);
    drop_missing(nodes, parent, text);
    pthread_mutex_unlock(&nodes->lock);
}

bool cg_nodes_is_missing(cg_nodes *nodes, dev_t dev, ino_t folder, const char *text)
{
    bool is = false;
    pthread_mutex_lock(&nodes->lock);
    for (cg_fs_node *node = *node_bucket(nodes, dev, folder); node != NULL && !is;
         node = node->hash_next)
        if (node->dev == dev && node->ino == folder) {
            const uint64_t hash = missing_hash(node, text);
            is = missing_note(nodes, hash)->name == hash;
        }
    pthread_mutex_unlock(&nodes->lock);
    return is;
}

static const cg_node_name *name_at(const cg_fs_node *node, unsigned name_index)
{
    const cg_node_name *name = node->names;
    while (name != NULL && name_index-- > 0)
        name = name->next;
    return name;
}

/* cg_nodes_path() with the lock held. */
static int make_path(const cg_nodes *nodes, const cg_fs_node *node, unsigned name_index,
                     const char *leaf, char **path_out)
{
    size_t n_bytes = leaf == NULL ? 1 : strlen(leaf) + 2;
    unsigned index = name_index;
    climb c = {0};
    *path_out = NULL;
    /* The root has one path, the empty one, and no names. */
    if (node == nodes->root && name_index > 0)
        return ENOENT;
    for (const cg_fs_node *at = node; at != nodes->root; index = 0) {
        const cg_node_name *name = name_at(at, index);
        if (name == NULL) /* only the node's own name says that there are no more of them */
            return at == node ? ENOENT : ESTALE;
        if (goes_round(&c, at))
            return ESTALE;
        n_bytes += strlen(name->text) + 1;
        at = name->parent;
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
    index = name_index;
    for (const cg_fs_node *at = node; at != nodes->root; index = 0) {
        const cg_node_name *name = name_at(at, index);
        if (*end != '\0')
            *--end = '/';
        end = memcpy(end - strlen(name->text), name->text, strlen(name->text));
        at = name->parent;
    }
    memmove(path, end, strlen(end) + 1);
    *path_out = path;
    return 0;
}

int cg_nodes_path(cg_nodes *nodes, const cg_fs_node *node, unsigned name_index, const char *leaf,
                  char **path_out)
{
    pthread_mutex_lock(&nodes->lock);
    const int error = make_path(nodes, node, name_index, leaf, path_out);
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
        const int error = make_path(nodes, node, 0, NULL, &first);
        const bool is_right = error == 0 && strcmp(first, path) == 0;
        free(first);
        if (is_right || (error != 0 && error != ESTALE))
            break;
        remove_name(nodes, node->names);
    }
    pthread_mutex_unlock(&nodes->lock);
}

int cg_nodes_path_of_file(cg_nodes *nodes, const cg_fs_node *node, unsigned name_index,
                          char **path_out)
{
    int error = ENOENT;
    *path_out = NULL;
    pthread_mutex_lock(&nodes->lock);
    const cg_fs_node *at = *node_bucket(nodes, node->dev, node->ino);
    for (; at != NULL; at = at->hash_next) {
        if (at->dev != node->dev || at->ino != node->ino || at->type != node->type)
            continue;
        unsigned n_names = 0;
        for (const cg_node_name *name = at->names; name != NULL; name = name->next)
            n_names++;
        if (name_index < n_names) {
            error = make_path(nodes, at, name_index, NULL, path_out);
            break;
        }
        name_index -= n_names;
    }
    pthread_mutex_unlock(&nodes->lock);
    return error;
}

uint64_t cg_nodes_epoch(cg_nodes *nodes)
{
    pthread_mutex_lock(&nodes->lock);
    const uint64_t epoch = nodes->rename_epoch;
    pthread_mutex_unlock(&nodes->lock);
    return epoch;
}

bool cg_nodes_changed_since(cg_nodes *nodes, uint64_t epoch)
{
    pthread_mutex_lock(&nodes->lock);
    /* A rename under way may have moved the file already, and not yet its name here: a new path
     * would be as wrong as the old one. */
    while (nodes->rename_epoch == epoch && nodes->n_renames > 0)
        pthread_cond_wait(&nodes->changed, &nodes->lock);
    const bool changed = nodes->rename_epoch != epoch;
    pthread_mutex_unlock(&nodes->lock);
    return changed;
}

void cg_nodes_rename_begin(cg_nodes *nodes)
{
    pthread_mutex_lock(&nodes->lock);
    nodes->n_renames++;
    pthread_mutex_unlock(&nodes->lock);
}

void cg_nodes_rename_end(cg_nodes *nodes)
{
    pthread_mutex_lock(&nodes->lock);
    nodes->n_renames--;
    nodes->rename_epoch++;
    pthread_cond_broadcast(&nodes->changed);
    pthread_mutex_unlock(&nodes->lock);
}

bool cg_gate_enter(cg_nodes *nodes, cg_fs_node *node)
{
    pthread_mutex_lock(&nodes->lock);
    while (node->gate == CG_GATE_CHECKING)
        pthread_cond_wait(&nodes->changed, &nodes->lock);
    /* Under one lock with the question, so that a check cannot begin between the two. */
    const bool may_write = node->gate == CG_GATE_OPEN;
    if (may_write)
        node->n_writes++;
    pthread_mutex_unlock(&nodes->lock);
    return may_write;
}

void cg_gate_leave(cg_nodes *nodes, cg_fs_node *node)
{
    pthread_mutex_lock(&nodes->lock);
    /* Only a check waits for writers. All who wait share one condition, so waking them costs. */
    if (--node->n_writes == 0 && node->gate == CG_GATE_CHECKING)
        pthread_cond_broadcast(&nodes->changed);
    pthread_mutex_unlock(&nodes->lock);
}

struct timespec cg_nodes_deadline(unsigned seconds)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    at.tv_sec += seconds;
    return at;
}

/* Closes the gate; the lock is held. Writers that are inside still are. */
static cg_gate close_gate(cg_nodes *nodes, cg_fs_node *node)
{
    const cg_gate before = (cg_gate)node->gate;
    node->gate = CG_GATE_CHECKING; /* before the wait: with new writers it might never end */
    while (node->n_writes > 0)
        pthread_cond_wait(&nodes->changed, &nodes->lock);
    return before;
}

cg_gate cg_gate_check_begin(cg_nodes *nodes, cg_fs_node *node)
{
    pthread_mutex_lock(&nodes->lock);
    while (node->gate == CG_GATE_CHECKING)
        pthread_cond_wait(&nodes->changed, &nodes->lock);
    const cg_gate before = close_gate(nodes, node);
    pthread_mutex_unlock(&nodes->lock);
    return before;
}

bool cg_gate_check_begin_until(cg_nodes *nodes, cg_fs_node *node, const struct timespec *deadline,
                               cg_gate *before_out)
{
    int error = 0;
    pthread_mutex_lock(&nodes->lock);
    while (node->gate == CG_GATE_CHECKING && error != ETIMEDOUT)
        error = pthread_cond_timedwait(&nodes->changed, &nodes->lock, deadline);
    const bool is_ours = node->gate != CG_GATE_CHECKING;
    if (is_ours)
        *before_out = close_gate(nodes, node);
    pthread_mutex_unlock(&nodes->lock);
    return is_ours;
}

void cg_gate_check_end(cg_nodes *nodes, cg_fs_node *node, cg_gate gate)
{
    pthread_mutex_lock(&nodes->lock);
    node->gate = (uint8_t)gate;
    pthread_cond_broadcast(&nodes->changed);
    pthread_mutex_unlock(&nodes->lock);
}

void cg_gate_unseal(cg_nodes *nodes, cg_fs_node *node)
{
    pthread_mutex_lock(&nodes->lock);
    if (node->gate == CG_GATE_SEALED)
        node->gate = CG_GATE_OPEN;
    pthread_mutex_unlock(&nodes->lock);
}
