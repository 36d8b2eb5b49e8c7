/* Two hash tables, of files by their number and of names by their parent and text, which grow
 * together. A name belongs to both its node's list and the table. It pins its parent, so that the
 * way up from it stays. */
#include "fusefs/nodes.h"

#include "fusefs/nodes_table.h"
#include "iouring/clock.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { FIRST_BUCKETS = 1024 };

_Static_assert(sizeof(cg_fs_node) <= 104, "a node has grown");

static const cg_view WHOLE = {.level = 0};

/* With the folder's generation, which no other folder ever has. */
static uint64_t missing_hash(const cg_fs_node *parent, const char *text)
{
    const uint64_t h = cg_node_mix(parent->generation, cg_node_text_hash(text));
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
            cg_fs_node **bucket = cg_node_home(&larger, node);
            next = node->hash_next;
            node->hash_next = *bucket;
            *bucket = node;
        }
        for (cg_node_name *name = nodes->name_buckets[i], *next; name != NULL; name = next) {
            cg_node_name **bucket = cg_node_name_bucket(&larger, name->parent, name->text);
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
    cg_node_name *name = *cg_node_name_bucket(nodes, parent, text);
    while (name != NULL && (name->parent != parent || strcmp(name->text, text) != 0))
        name = name->hash_next;
    return name;
}

static void remove_node_if_unused(cg_nodes *nodes, cg_fs_node *node);

/* The name that this link of its node's list leads to. */
static void remove_name_at(cg_nodes *nodes, cg_node_name **at)
{
    cg_node_name *name = *at;
    cg_node_name **link = cg_node_name_bucket(nodes, name->parent, name->text);
    *at = name->next;
    while (*link != name)
        link = &(*link)->hash_next;
    *link = name->hash_next;
    nodes->n_names--;

    cg_fs_node *parent = name->parent;
    free(name);
    parent->n_pins--;
    remove_node_if_unused(nodes, parent); /* and so on upwards: the depth is that of a path */
}

void cg_nodes_remove_name(cg_nodes *nodes, cg_node_name *name)
{
    cg_node_name **at = &name->node->names;
    while (*at != name)
        at = &(*at)->next;
    remove_name_at(nodes, at);
}

static void take_out(cg_nodes *nodes, cg_fs_node *node)
{
    cg_fs_node **link = cg_node_home(nodes, node);
    while (*link != node)
        link = &(*link)->hash_next;
    *link = node->hash_next;
}

static void put_in(cg_nodes *nodes, cg_fs_node *node)
{
    cg_fs_node **bucket = cg_node_home(nodes, node);
    node->hash_next = *bucket;
    *bucket = node;
}

static void remove_node_if_unused(cg_nodes *nodes, cg_fs_node *node)
{
    if (node->n_lookups > 0 || node->n_pins > 0)
        return;
    take_out(nodes, node);
    nodes->n_nodes--;
    node->n_pins = 1; /* its own names are going: no second visit */
    while (node->names != NULL)
        cg_nodes_remove_name(nodes, node->names);
    free(node);
}

/* A folder is about to lie in parent: what says that parent lies below the folder is stale, by one
 * name or more. The folder and parent are pinned. */
static void drop_circle(cg_nodes *nodes, const cg_fs_node *folder, cg_fs_node *parent)
{
    cg_node_climb c = {0};
    for (cg_fs_node *at = parent; at->names != NULL && !cg_node_climb_goes_round(&c, at);) {
        cg_node_name *name = at->names;
        if (name->parent != folder) {
            at = name->parent;
            continue;
        }
        cg_nodes_remove_name(nodes, name);
        at = parent; /* again: an older name may lead there as well */
        c = (cg_node_climb){0};
    }
}

static void drop_missing(cg_nodes *nodes, const cg_fs_node *parent, const char *text)
{
    const uint64_t hash = missing_hash(parent, text);
    cg_missing_note *note = missing_note(nodes, hash);
    if (note->name == hash)
        *note = (cg_missing_note){0};
}

/* Drops old names of a file that has too many. Of a folder that the kernel has forgotten it knows
 * no name, so that it need not be told when that one changes; it looks the name up again. */
static void drop_old_names(cg_nodes *nodes, cg_fs_node *node)
{
    uint32_t n_kept = 0;
    for (cg_node_name **at = &node->names; *at != NULL;) {
        const cg_fs_node *parent = (*at)->parent;
        if (n_kept < CG_NODES_MAX_TRIED || parent->n_lookups > 0 || parent == nodes->root) {
            (*at)->n_until_drop = CG_NODES_MAX_TRIED / 2; /* should it become the first */
            n_kept++;
            at = &(*at)->next;
        } else {
            remove_name_at(nodes, at);
            node->has_dropped_names = true;
        }
    }
    /* The longer the list, the rarer it is gone through. */
    node->names->n_until_drop = n_kept / 2;
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
        cg_nodes_remove_name(nodes, name);
    const size_t n_bytes = strlen(text) + 1;
    name = malloc(offsetof(cg_node_name, text) + n_bytes);
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
    name->n_until_drop = name->next == NULL             ? CG_NODES_MAX_TRIED
                         : name->next->n_until_drop > 0 ? name->next->n_until_drop - 1
                                                        : 0;
    cg_node_name **bucket = cg_node_name_bucket(nodes, parent, text);
    name->hash_next = *bucket;
    *bucket = name;
    nodes->n_names++;
    if (name->n_until_drop == 0 && !S_ISDIR(node->type))
        drop_old_names(nodes, node);
}

static cg_fs_node *new_node(cg_nodes *nodes, const struct stat *attr, uint64_t identity,
                            const cg_view *view)
{
    cg_fs_node *node = calloc(1, sizeof *node);
    if (node == NULL)
        return NULL;
    node->dev = attr->st_dev;
    node->ino = attr->st_ino;
    node->view = *view;
    node->identity = identity;
    node->type = (uint16_t)(attr->st_mode & S_IFMT);
    node->generation = nodes->next_generation++;
    nodes->n_nodes++;
    return node;
}

static cg_fs_node *insert_node(cg_nodes *nodes, const struct stat *attr, uint64_t identity,
                               const cg_view *view)
{
    grow(nodes);
    cg_fs_node *node = new_node(nodes, attr, identity, view);
    if (node != NULL)
        put_in(nodes, node);
    return node;
}

/* A file of this number and identity is there: those that had the number before are gone. What is
 * open here keeps its number, so that such a node is none of them. */
static void bury_others(cg_nodes *nodes, const struct stat *attr, uint64_t identity)
{
    for (cg_fs_node *node = *cg_node_bucket(nodes, attr->st_dev, attr->st_ino), *next; node != NULL;
         node = next) {
        next = node->hash_next;
        if (!cg_node_is_of(node, attr->st_dev, attr->st_ino) || node->identity == identity ||
            node->identity == 0 || identity == 0 || node->files != NULL || node->pending != NULL)
            continue;
        take_out(nodes, node);
        node->is_dead = true;
        put_in(nodes, node);
    }
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
        nodes->root = insert_node(nodes, root, 0, &WHOLE); /* nobody looks it up by a name */
    if (nodes->root == NULL) {
        free(nodes->missing);
        free(nodes->read_notes);
        free(nodes->node_buckets);
        free(nodes->name_buckets);
        return ENOMEM;
    }
    nodes->root->n_pins = 1;
    pthread_mutex_init(&nodes->lock, NULL);
    cg_cond_init(&nodes->changed);
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

/* makes: the node, where there is none. */
static cg_fs_node *enter(cg_nodes *nodes, cg_fs_node *parent, const char *name,
                         const struct stat *attr, uint64_t identity, const cg_view *view,
                         bool makes)
{
    if (view == NULL)
        view = &WHOLE;
    pthread_mutex_lock(&nodes->lock);
    cg_fs_node *node = *cg_node_bucket(nodes, attr->st_dev, attr->st_ino);
    /* An inode number that came back with another identity or type, or after its folder was
     * removed, is another file; a stale node of that number stays until the kernel forgets it, and
     * is found stale by its names. */
    while (node != NULL && (!cg_node_is_of(node, attr->st_dev, attr->st_ino) ||
                            node->type != (attr->st_mode & S_IFMT) || node->is_removed ||
                            node->identity != identity || !cg_view_equal(&node->view, view)))
        node = node->hash_next;
    if (node == NULL && makes) {
        bury_others(nodes, attr, identity);
        node = insert_node(nodes, attr, identity, view);
    }
    if (node != NULL) {
        node->n_lookups++;
        if (name != NULL)
            set_name(nodes, node, parent, name);
    }
    pthread_mutex_unlock(&nodes->lock);
    return node;
}

cg_fs_node *cg_nodes_enter(cg_nodes *nodes, cg_fs_node *parent, const char *name,
                           const struct stat *attr, uint64_t identity, const cg_view *view)
{
    return enter(nodes, parent, name, attr, identity, view, true);
}

cg_fs_node *cg_nodes_enter_known(cg_nodes *nodes, cg_fs_node *parent, const char *name,
                                 const struct stat *attr, uint64_t identity, const cg_view *view)
{
    return enter(nodes, parent, name, attr, identity, view, false);
}

cg_fs_node *cg_nodes_enter_control(cg_nodes *nodes, int control, mode_t type)
{
    const struct stat attr = {.st_mode = type};
    pthread_mutex_lock(&nodes->lock);
    cg_fs_node *node = nodes->controls[control];
    if (node == NULL && (node = new_node(nodes, &attr, 0, &WHOLE)) != NULL) {
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
        cg_nodes_remove_name(nodes, name);
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
            cg_nodes_remove_name(nodes, from);
        if (to != NULL)
            cg_nodes_remove_name(nodes, to);
        if (node != NULL)
            set_name(nodes, node, new_parent, new_text);
        if (exchange && other != NULL)
            set_name(nodes, other, parent, text);
        else if (other != NULL)
            note_removed(other);
    }
    pthread_mutex_unlock(&nodes->lock);
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
    for (cg_fs_node *node = *cg_node_bucket(nodes, dev, ino);
         node != NULL && n < CG_NODES_MAX_OF_FILE; node = node->hash_next)
        if (cg_node_is_of(node, dev, ino))
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
    for (cg_fs_node *node = *cg_node_bucket(nodes, dev, ino); node != NULL; node = node->hash_next)
        if (cg_node_is_of(node, dev, ino))
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
    for (cg_fs_node *node = *cg_node_bucket(nodes, dev, folder); node != NULL && name == NULL;
         node = node->hash_next)
        if (cg_node_is_of(node, dev, folder) && S_ISDIR(node->type))
            name = find_name(nodes, node, text);
    if (name != NULL)
        *ino_out = name->node->ino;
    pthread_mutex_unlock(&nodes->lock);
    return name != NULL;
}

bool cg_nodes_note_missing(cg_nodes *nodes, const cg_fs_node *parent, const char *text)
{
    const uint64_t hash = missing_hash(parent, text);
    const uint32_t now_s = (uint32_t)cg_now_s();
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
    for (cg_fs_node *node = *cg_node_bucket(nodes, dev, folder); node != NULL && !is;
         node = node->hash_next)
        if (cg_node_is_of(node, dev, folder)) {
            const uint64_t hash = missing_hash(node, text);
            is = missing_note(nodes, hash)->name == hash;
        }
    pthread_mutex_unlock(&nodes->lock);
    return is;
}
