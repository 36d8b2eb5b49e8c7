#include "connector/reader_files.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static const uint64_t KEEP_NS = UINT64_C(5000000000); /* after the last use */

typedef struct place {
    bool is_taken;
    bool is_forgotten; /* it has no name any more */
    cg_reader_name name;
    cg_open_file *file;
    uint32_t n_users;
    uint64_t used_ns;
} place;

struct cg_reader_files {
    pthread_mutex_t lock; /* of all below */
    uint32_t n_readers;
    place places[CG_READER_FILES];
};

cg_reader_files *cg_reader_files_new(void)
{
    cg_reader_files *files = calloc(1, sizeof *files);
    if (files != NULL)
        pthread_mutex_init(&files->lock, NULL);
    return files;
}

void cg_reader_files_free(cg_reader_files *files)
{
    if (files == NULL)
        return;
    pthread_mutex_destroy(&files->lock);
    free(files);
}

void cg_reader_files_begin(cg_reader_files *files)
{
    pthread_mutex_lock(&files->lock);
    files->n_readers++;
    pthread_mutex_unlock(&files->lock);
}

void cg_reader_files_end(cg_reader_files *files)
{
    pthread_mutex_lock(&files->lock);
    files->n_readers--;
    pthread_mutex_unlock(&files->lock);
}

static bool is_named(const place *p, const cg_reader_name *name)
{
    return p->is_taken && !p->is_forgotten && p->name.load_ns == name->load_ns &&
           p->name.store == name->store && p->name.level == name->level &&
           cg_key_equal(&p->name.key, &name->key) &&
           memcmp(&p->name.profile, &name->profile, sizeof name->profile) == 0;
}

static place *find(cg_reader_files *files, const cg_reader_name *name)
{
    for (place *p = files->places; p < files->places + CG_READER_FILES; p++)
        if (is_named(p, name))
            return p;
    return NULL;
}

size_t cg_reader_files_room(cg_reader_files *files)
{
    size_t n = 0;
    pthread_mutex_lock(&files->lock);
    for (const place *p = files->places; p < files->places + CG_READER_FILES; p++)
        n += !p->is_taken;
    if (files->n_readers == 0)
        n = 0;
    pthread_mutex_unlock(&files->lock);
    return n;
}

bool cg_reader_files_put(cg_reader_files *files, const cg_reader_name *name, int file,
                         uint64_t now_ns)
{
    pthread_mutex_lock(&files->lock);
    place *p = files->places, *end = files->places + CG_READER_FILES;
    while (p < end && p->is_taken)
        p++;
    /* Two look-ups may have opened the same file: one is enough. Without a reader nobody would
     * close it. */
    cg_open_file *kept = NULL;
    if (p < end && files->n_readers > 0 && find(files, name) == NULL)
        kept = cg_open_file_new(file);
    if (kept != NULL)
        *p = (place){.is_taken = true, .name = *name, .file = kept, .used_ns = now_ns};
    pthread_mutex_unlock(&files->lock);
    return kept != NULL;
}

cg_open_file *cg_reader_files_take(cg_reader_files *files, const cg_reader_name *name)
{
    cg_open_file *file = NULL;
    pthread_mutex_lock(&files->lock);
    place *p = find(files, name);
    if (p != NULL) {
        p->n_users++;
        file = p->file;
    }
    pthread_mutex_unlock(&files->lock);
    return file;
}

void cg_reader_files_give(cg_reader_files *files, const cg_open_file *file, uint64_t now_ns)
{
    pthread_mutex_lock(&files->lock);
    for (place *p = files->places; p < files->places + CG_READER_FILES; p++)
        if (p->is_taken && p->file == file) {
            p->n_users--;
            p->used_ns = now_ns;
        }
    pthread_mutex_unlock(&files->lock);
}

void cg_reader_files_forget(cg_reader_files *files, uint64_t store, const cg_key *keys,
                            size_t n_keys)
{
    if (files == NULL)
        return;
    pthread_mutex_lock(&files->lock);
    for (place *p = files->places; p < files->places + CG_READER_FILES; p++)
        for (size_t i = 0; i < n_keys && p->is_taken && p->name.store == store; i++)
            if (cg_key_equal(&p->name.key, &keys[i]))
                p->is_forgotten = true;
    pthread_mutex_unlock(&files->lock);
}

int cg_reader_files_drop(cg_reader_files *files, uint64_t now_ns)
{
    int file = -1;
    pthread_mutex_lock(&files->lock);
    for (place *p = files->places; p < files->places + CG_READER_FILES && file < 0; p++)
        if (p->is_taken && p->n_users == 0 &&
            (files->n_readers == 0 || p->is_forgotten || now_ns >= p->used_ns + KEEP_NS)) {
            /* The caller closes it, not under the lock: a FUSE daemon may have to be waited for. */
            p->is_taken = false;
            file = cg_open_file_drop(p->file);
        }
    pthread_mutex_unlock(&files->lock);
    return file;
}

uint64_t cg_reader_files_wake_ns(cg_reader_files *files)
{
    uint64_t wake_ns = UINT64_MAX;
    pthread_mutex_lock(&files->lock);
    for (const place *p = files->places; p < files->places + CG_READER_FILES; p++)
        if (p->is_taken && p->n_users == 0 && (p->is_forgotten || p->used_ns + KEEP_NS < wake_ns))
            wake_ns = p->is_forgotten ? 0 : p->used_ns + KEEP_NS;
    pthread_mutex_unlock(&files->lock);
    return wake_ns;
}
