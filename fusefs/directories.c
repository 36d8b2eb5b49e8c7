/* fusefs/directories.c - names and directories: their part of fusefs/core.h. */
#include "fusefs/acls.h"
#include "fusefs/fs.h"
#include "fusefs/pending.h"
#include "fusefs/persona.h"
#include "fusefs/reach.h"
#include "fusefs/space.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct cg_fs_directory {
    cg_fs *fs;
    cg_fs_directory *next, *previous; /* of fs->directories */
    cg_fs_node *node;
    int fd;         /* -1: .cachegenfs */
    uid_t opener;   /* whose part it is */
    DIR *dir;       /* of fd, from the first read on */
    char *path;     /* by which it was opened; "" of the root, and of one without a name */
    uint64_t epoch; /* of renames, from before that */
    bool is_root, is_control;
    off_t offset;        /* where dir stands */
    struct dirent entry; /* that we made up */
};

/* Of the entry after .cachegenfs, which comes last in the root. No real one: ext4 ends at
 * INT64_MAX. */
static const off_t CONTROL_OFFSET = INT64_MAX - 0x1e;

static int enter_control(cg_fs *fs, int control, cg_fs_entry *entry_out)
{
    entry_out->may_be_old = entry_out->is_lasting = false;
    cg_control_attr(&fs->control, control, &entry_out->attr);
    entry_out->node = cg_nodes_enter_control(&fs->nodes, control, cg_control_mode(control));
    entry_out->may_not_be_cached = false;
    return entry_out->node == NULL ? ENOMEM : 0;
}

/* Of an entry whose directory is open; path: cg_fs_enter(). */
static int look_up_in(cg_fs *fs, cg_fs_node *parent, int dir_fd, const char *name, const char *path,
                      cg_fs_entry *entry_out)
{
    const int error = cg_fs_enter(fs, parent, dir_fd, name, path, entry_out);
    if (error == ENOENT)
        cg_nodes_drop_name(&fs->nodes, parent, name, false);
    return error;
}

/* Of a name that was missing in the store, asked for when the watch had seen so many changes. Only
 * levels of a chunk are worth it: connectors ask for L0 again and again, and mostly there is none.
 * When such a name comes, all names become doubtful; of others, as new chunks' folders, too many
 * come. A file that is being written is there for its creator, and the kernel has one answer for
 * all. */
static bool may_be_remembered(cg_fs *fs, cg_fs_node *parent, const char *name, uint64_t seen)
{
    return cg_fs_is_watched_file(fs, parent) && cg_view_is_possible(name) &&
           !cg_pending_is_waiting(fs, parent, name) &&
           cg_nodes_note_missing(&fs->nodes, parent, name) &&
           /* Noted first: who makes the name from now on finds the note, or is counted here. */
           fs->watch.n_seen == seen;
}

int cg_fs_lookup(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *parent, const char *name,
                 cg_fs_entry *entry_out)
{
    char *path = NULL;
    int dir_fd, error;
    const uint64_t seen = fs->watch.n_seen;
    entry_out->may_not_be_cached = true;
    if (parent->control != CG_CONTROL_NONE) {
        const int control = cg_control_find(name);
        return control == CG_CONTROL_NONE ? ENOENT : enter_control(fs, control, entry_out);
    }
    if (strlen(name) > NAME_MAX)
        return ENAMETOOLONG;
    /* Before the store is asked, so that .cachegenfs can be reached while the store hangs. */
    if (parent == fs->nodes.root && strcmp(name, CG_CONTROL_DIRECTORY) == 0)
        return enter_control(fs, CG_CONTROL_DIR, entry_out);
    if (parent == fs->nodes.root && cg_fs_is_hidden(name))
        return ENOENT;

    cg_fs_pending *pending = cg_pending_find(fs, caller, parent, name);
    if (pending != NULL) {
        error = fstat(pending->fd, &entry_out->attr) != 0 ? errno : 0;
        entry_out->node = error == 0 ? cg_nodes_enter(&fs->nodes, NULL, NULL, &entry_out->attr,
                                                      cg_fs_identity(fs, pending->fd, ""), NULL)
                                     : NULL;
        entry_out->may_not_be_cached = true;
        entry_out->may_be_old = entry_out->is_lasting = false;
        cg_pending_put(fs, pending);
        return error == 0 && entry_out->node == NULL ? ENOMEM : error;
    }

    /* The path says what the name shows of its file. Most names can only show all of it. */
    error = cg_reach_dir(fs, parent, name, &dir_fd, cg_view_is_possible(name) ? &path : NULL);
    if (error != 0)
        return error;
    error = look_up_in(fs, parent, dir_fd, name, path, entry_out);
    free(path);
    close(dir_fd);
    if (error == ENOENT)
        entry_out->may_not_be_cached = !may_be_remembered(fs, parent, name, seen);
    return error;
}

void cg_fs_forget(cg_fs *fs, cg_fs_node *node, uint64_t n_lookups)
{
    if (node == fs->nodes.root)
        return;
    cg_pending_forget(fs, node, n_lookups);
    cg_nodes_forget(&fs->nodes, node, n_lookups);
}

/* Before something is made: where, and whether a rule speaks of the name. type: of a folder of
 * rules, links are kept away. Takes the lock of names, if it succeeds: the path must stay what it
 * is until the name is there. */
static int prepare(cg_fs *fs, cg_fs_node *parent, const char *name, mode_t type,
                   bool *is_strict_out, int *dir_fd_out)
{
    cg_tree_name tree;
    char *path;
    if (fs->read_only)
        return EROFS;
    int error = cg_fs_name_is_free(fs, parent, name);
    if (error != 0)
        return error;
    pthread_rwlock_rdlock(&fs->names_lock);
    if ((error = cg_reach_dir(fs, parent, name, dir_fd_out, &path)) != 0) {
        pthread_rwlock_unlock(&fs->names_lock);
        return error;
    }
    cg_tree_parse(path, &tree);
    *is_strict_out = cg_fs_is_strict(&tree) || (S_ISLNK(type) && cg_tree_is_folder(path));
    free(path);
    return 0;
}

/* Makes a folder, a link to target, or a node of rdev, as the caller's. No rule speaks of it. */
static int make(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *parent, int dir_fd,
                const char *name, mode_t mode, dev_t rdev, const char *target,
                cg_fs_entry *entry_out)
{
    struct stat ours;
    cg_persona_enter(caller->uid, caller->gid);
    const int made = S_ISDIR(mode)   ? mkdirat(dir_fd, name, mode & 07777)
                     : S_ISLNK(mode) ? symlinkat(target, dir_fd, name)
                                     : mknodat(dir_fd, name, mode, rdev);
    int error = made == 0 ? 0 : errno;
    cg_persona_leave();
    cg_space_failed(fs, error);
    if (error == 0 && fstatat(dir_fd, name, &ours, AT_SYMLINK_NOFOLLOW) != 0)
        error = errno;
    if (error != 0)
        return error;
    const uint64_t identity = cg_fs_identity(fs, dir_fd, name);
    if ((error = cg_fs_enter(fs, parent, dir_fd, name, NULL, entry_out)) != 0) {
        cg_fs_take_back(fs, dir_fd, name, &ours, identity);
    } else if ((entry_out->attr.st_mode & S_IFMT) != (mode & S_IFMT)) {
        /* Another daemon has put something in its place, which the kernel would not take for the
         * answer (EIO). It looks the name up. */
        cg_fs_forget(fs, entry_out->node, 1);
        error = ESTALE;
    } else if (entry_out->attr.st_nlink == 1 && entry_out->attr.st_size == 0) {
        /* Its inode number may have been a published file's. Not of what another daemon has put in
         * its place: that may be published. */
        cg_gate_unseal(&fs->nodes, entry_out->node);
    }
    return error;
}

/* cg_fs_mknod(), of any kind of file. target: of a symbolic link. */
static int make_entry(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *parent, const char *name,
                      mode_t mode, dev_t rdev, const char *target, cg_fs_entry *entry_out)
{
    struct stat attr;
    bool is_strict;
    int dir_fd;
    int error = prepare(fs, parent, name, mode & S_IFMT, &is_strict, &dir_fd);
    if (error != 0)
        return error;
    if (!is_strict) {
        error = make(fs, caller, parent, dir_fd, name, mode, rdev, target, entry_out);
    } else if (!S_ISREG(mode)) {
        error = EPERM;
    } else if (fstatat(dir_fd, name, &attr, AT_SYMLINK_NOFOLLOW) == 0) {
        error = EEXIST;
    } else {
        cg_fs_pending *pending;
        error = cg_pending_new(fs, caller, parent, dir_fd, name, mode, true, entry_out, &pending);
        if (error == 0)
            cg_pending_put(fs, pending); /* it stays for the sake of the node */
    }
    pthread_rwlock_unlock(&fs->names_lock);
    close(dir_fd);
    return error;
}

int cg_fs_mkdir(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *parent, const char *name,
                mode_t mode, cg_fs_entry *entry_out)
{
    return make_entry(fs, caller, parent, name, S_IFDIR | (mode & 07777), 0, NULL, entry_out);
}

int cg_fs_mknod(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *parent, const char *name,
                mode_t mode, dev_t rdev, cg_fs_entry *entry_out)
{
    return make_entry(fs, caller, parent, name, mode, rdev, NULL, entry_out);
}

int cg_fs_symlink(cg_fs *fs, const cg_fs_caller *caller, const char *target, cg_fs_node *parent,
                  const char *name, cg_fs_entry *entry_out)
{
    return make_entry(fs, caller, parent, name, S_IFLNK, 0, target, entry_out);
}

int cg_fs_readlink(cg_fs *fs, cg_fs_node *node, char *target_out, size_t target_bytes)
{
    cg_reached reached;
    int error = cg_reach(fs, node, &reached);
    if (error != 0)
        return error;
    const ssize_t n = readlinkat(reached.fd, "", target_out, target_bytes);
    error = n < 0 ? errno : (size_t)n >= target_bytes ? ENAMETOOLONG : 0;
    if (error == 0)
        target_out[n] = '\0';
    cg_reach_end(fs, &reached);
    return error;
}

/* With the lock of names, so that whoever takes it knows that the table of nodes is right. */
static int remove_entry(cg_fs *fs, cg_fs_node *parent, const char *name, int flags)
{
    int dir_fd;
    if (fs->read_only)
        return EROFS;
    int error = cg_fs_name_is_free(fs, parent, name);
    if (error == 0)
        error = cg_reach_dir(fs, parent, NULL, &dir_fd, NULL);
    if (error != 0)
        return error;
    pthread_rwlock_rdlock(&fs->names_lock);
    error = unlinkat(dir_fd, name, flags) == 0 ? 0 : errno;
    if (error == 0)
        cg_nodes_drop_name(&fs->nodes, parent, name, (flags & AT_REMOVEDIR) != 0);
    pthread_rwlock_unlock(&fs->names_lock);
    close(dir_fd);
    return error;
}

int cg_fs_unlink(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *parent, const char *name)
{
    cg_fs_pending *pending = cg_pending_find(fs, caller, parent, name);
    if (pending == NULL)
        return remove_entry(fs, parent, name, 0);
    cg_pending_cancel(fs, pending);
    cg_pending_put(fs, pending);
    return 0;
}

int cg_fs_rmdir(cg_fs *fs, cg_fs_node *parent, const char *name)
{
    return remove_entry(fs, parent, name, AT_REMOVEDIR);
}

static bool take_part(cg_fs *fs, const cg_fs_node *node, uid_t uid)
{
    return node->control == CG_CONTROL_NONE ? cg_fs_take_descriptor(fs, uid)
                                            : cg_fs_take_control(fs, uid);
}

static void give_back_part(cg_fs *fs, bool is_control, uid_t uid)
{
    if (is_control)
        cg_fs_give_back_control(fs, uid);
    else
        cg_fs_give_back_descriptor(fs, uid);
}

int cg_fs_opendir(cg_fs *fs, const cg_fs_caller *caller, cg_fs_node *node,
                  cg_fs_directory **directory_out)
{
    *directory_out = NULL;
    if (!take_part(fs, node, caller->uid))
        return ENFILE;
    cg_fs_directory *directory = calloc(1, sizeof *directory);
    int error = 0, fd;
    if (directory == NULL) {
        give_back_part(fs, node->control != CG_CONTROL_NONE, caller->uid);
        return ENOMEM;
    }
    directory->fs = fs;
    directory->opener = caller->uid;
    directory->fd = -1;
    directory->node = node;
    directory->is_control = node->control != CG_CONTROL_NONE;
    directory->is_root = node == fs->nodes.root;
    /* Before it is opened by its path: a rename from now on makes that path doubtful
     * (cg_fs_lookup_read()). */
    directory->epoch = cg_nodes_epoch(&fs->nodes);
    if (node->control == CG_CONTROL_NONE &&
        (error = cg_reach_open(fs, node, O_RDONLY | O_DIRECTORY, &fd, &directory->path)) == 0) {
        directory->fd = fd;
        error = !fs->ignores_acls && cg_acls_are_on(fd, true) ? EACCES : 0;
    }
    pthread_mutex_lock(&fs->nodes.lock);
    if ((directory->next = fs->directories) != NULL)
        directory->next->previous = directory;
    fs->directories = directory;
    pthread_mutex_unlock(&fs->nodes.lock);
    if (error != 0)
        cg_fs_closedir(directory);
    else
        *directory_out = directory;
    return error;
}

static const struct dirent *control_entry(cg_fs *fs, cg_fs_directory *directory, int control,
                                          const char *name)
{
    struct stat attr;
    cg_control_attr(&fs->control, control, &attr);
    directory->entry.d_ino = attr.st_ino;
    directory->entry.d_type = (unsigned char)IFTODT(attr.st_mode);
    strcpy(directory->entry.d_name, name);
    return &directory->entry;
}

/* 0 ".", 1 "..", then the files. */
static const struct dirent *read_control(cg_fs *fs, cg_fs_directory *directory, off_t offset)
{
    if (offset < 2)
        return control_entry(fs, directory, CG_CONTROL_DIR, offset == 0 ? "." : "..");
    const off_t control = offset - 2 + CG_CONTROL_VERSION;
    return control < CG_N_CONTROLS
               ? control_entry(fs, directory, (int)control, cg_control_name((int)control))
               : NULL;
}

int cg_fs_readdir(cg_fs *fs, cg_fs_directory *directory, off_t offset,
                  const struct dirent **entry_out, off_t *next_out)
{
    *entry_out = NULL;
    if (directory->fd < 0) {
        *entry_out = read_control(fs, directory, offset);
        *next_out = offset + 1;
        return 0;
    }
    if (offset == CONTROL_OFFSET)
        return 0;
    if (directory->dir == NULL && (directory->dir = fdopendir(directory->fd)) == NULL)
        return errno;
    /* The kernel may go back, or begin again: a reply had less room than we had read. */
    if (offset != directory->offset) {
        seekdir(directory->dir, offset);
        directory->offset = offset;
    }
    for (;;) {
        errno = 0;
        const struct dirent *entry = readdir(directory->dir);
        if (entry == NULL && errno != 0)
            return errno;
        if (entry == NULL) {
            if (directory->is_root) {
                *entry_out = control_entry(fs, directory, CG_CONTROL_DIR, CG_CONTROL_DIRECTORY);
                *next_out = CONTROL_OFFSET;
            }
            return 0;
        }
        directory->offset = entry->d_off;
        if (directory->is_root &&
            (strcmp(entry->d_name, CG_CONTROL_DIRECTORY) == 0 || cg_fs_is_hidden(entry->d_name)))
            continue;
        *entry_out = entry;
        *next_out = entry->d_off;
        return 0;
    }
}

int cg_fs_lookup_read(cg_fs *fs, const cg_fs_caller *caller, cg_fs_directory *directory,
                      const char *name, cg_fs_entry *entry_out)
{
    char path[CG_TREE_PATH_BYTES];
    /* The root has names that are not the store's. The path must still be right when we have looked
     * at the entry by it: it decides what the entry shows. */
    const bool may_be_view = cg_view_is_possible(name);
    if (directory->fd < 0 || directory->is_root || directory->path[0] == '\0' ||
        snprintf(path, sizeof path, "%s/%s", directory->path, name) >= (int)sizeof path)
        return cg_fs_lookup(fs, caller, directory->node, name, entry_out);
    cg_fs_pending *pending = cg_pending_find(fs, caller, directory->node, name);
    if (pending != NULL) { /* the caller's own, while somebody else's has the name */
        cg_pending_put(fs, pending);
        return cg_fs_lookup(fs, caller, directory->node, name, entry_out);
    }
    const int error =
        look_up_in(fs, directory->node, directory->fd, name, may_be_view ? path : NULL, entry_out);
    /* Without waiting for a rename: on a frozen store it takes as long as that lasts, and each name
     * of each listing would wait. By the folder's path of now, which leads to it, nobody has to. */
    if (error != 0 || !may_be_view ||
        !cg_nodes_may_have_changed_since(&fs->nodes, directory->epoch))
        return error;
    cg_fs_forget(fs, entry_out->node, 1);
    return cg_fs_lookup(fs, caller, directory->node, name, entry_out);
}

bool cg_fs_is_crowded(cg_fs *fs)
{
    return cg_nodes_count(&fs->nodes) > fs->max_listed_files;
}

int cg_fs_syncdir(cg_fs_directory *directory)
{
    return directory->fd < 0 || fsync(directory->fd) == 0 ? 0 : errno;
}

void cg_fs_closedir(cg_fs_directory *directory)
{
    pthread_mutex_lock(&directory->fs->nodes.lock);
    if (directory->next != NULL)
        directory->next->previous = directory->previous;
    if (directory->previous != NULL)
        directory->previous->next = directory->next;
    else
        directory->fs->directories = directory->next;
    pthread_mutex_unlock(&directory->fs->nodes.lock);
    if (directory->dir != NULL)
        closedir(directory->dir);
    else if (directory->fd >= 0)
        close(directory->fd);
    give_back_part(directory->fs, directory->is_control, directory->opener);
    free(directory->path);
    free(directory);
}
