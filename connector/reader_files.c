#include "connector/reader_files.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static const uint64_t KEEP_NS = UINT64_C(5000000000); /* after the last use */
/* Places that are free for what is opened next, as long as others have been read to their end. */
enum { SPARE = CG_READER_FILES / 3 };

typedef struct place {
    bool is_taken;
    bool is_forgotten; /* it has no name any more */
    bool is_read;      /* to its end, by the last who did */
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

/* With the lock held. */
static size_t n_free(const cg_reader_files *files)
{
    size_t n = 0;
    for (const place *p = files->places; p < files->places + CG_READER_FILES; p++)
        n += !p->is_taken;
    return n;
}

size_t cg_reader_files_room(cg_reader_files *files)
{
    pthread_mutex_lock(&files->lock);
    const size_t n = files->n_readers > 0 ? n_free(files) : 0;
    pthread_mutex_unlock(&files->lock);
    return n;
}

bool cg_reader_files_put(cg_reader_files *files, const cg_reader_name *name, int file, bool is_read,
                         uint64_t now_ns)
{
    pthread_mutex_lock(&files->lock);
    place *p = files->places, *end = files->places + CG_READER_FILES;
    while (p < end && p->is_taken)
        p++;
    /* Without a reader nobody would close it. */
    cg_open_file *kept = NULL;
    if (p < end && files->n_readers > 0)
        kept = cg_open_file_new(file);
    if (kept != NULL)
        *p = (place){.is_taken = true,
                     /* Two look-ups may have opened the same file: one is enough. */
                     .is_forgotten = find(files, name) != NULL,
                     .is_read = is_read,
                     .name = *name,
                     .file = kept,
                     .used_ns = now_ns};
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
        p->is_read = false;
        file = p->file;
    }
    pthread_mutex_unlock(&files->lock);
    return file;
}

void cg_reader_files_give(cg_reader_files *files, const cg_open_file *file, bool is_read,
                          uint64_t now_ns)
{
    pthread_mutex_lock(&files->lock);
    for (place *p = files->places; p < files->places + CG_READER_FILES; p++)
        if (p->is_taken && p->file == file) {
            p->n_users--;
            p->is_read = p->is_read || is_read;
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

/* With the lock held: from when on it need not stay open. */
static uint64_t kept_until_ns(const cg_reader_files *files, const place *p, bool are_few_free)
{
    if (!p->is_taken || p->n_users > 0)
        return UINT64_MAX;
    if (files->n_readers == 0 || p->is_forgotten || (p->is_read && are_few_free))
        return 0;
    return p->used_ns + KEEP_NS;
}

/* With the lock held: of those that need not stay open the one that was used first. */
static place *next_to_drop(cg_reader_files *files, uint64_t now_ns)
{
    const bool are_few_free = n_free(files) < SPARE;
    place *next = NULL;
    for (place *p = files->places; p < files->places + CG_READER_FILES; p++)
        if (kept_until_ns(files, p, are_few_free) <= now_ns &&
            (next == NULL || p->used_ns < next->used_ns))
            next = p;
    return next;
}

int cg_reader_files_drop(cg_reader_files *files, uint64_t now_ns)
{
    int file = -1;
    place *p;
    pthread_mutex_lock(&files->lock);
    while (file < 0 && (p = next_to_drop(files, now_ns)) != NULL) {
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
    const bool are_few_free = n_free(files) < SPARE;
    for (const place *p = files->places; p < files->places + CG_READER_FILES; p++) {
        const uint64_t until_ns = kept_until_ns(files, p, are_few_free);
        if (until_ns < wake_ns)
            wake_ns = until_ns;
    }
    pthread_mutex_unlock(&files->lock);
    return wake_ns;
}
