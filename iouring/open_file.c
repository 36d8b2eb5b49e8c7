#include "iouring/open_file.h"

#include <stdatomic.h>
#include <stdlib.h>

struct cg_open_file {
    int fd;
    atomic_uint n_users;
};

cg_open_file *cg_open_file_new(int fd)
{
    cg_open_file *file = malloc(sizeof *file);
    if (file == NULL)
        return NULL;
    file->fd = fd;
    atomic_init(&file->n_users, 1);
    return file;
}

int cg_open_file_fd(const cg_open_file *file)
{
    return file->fd;
}

void cg_open_file_hold(cg_open_file *file)
{
    atomic_fetch_add_explicit(&file->n_users, 1, memory_order_relaxed);
}

int cg_open_file_drop(cg_open_file *file)
{
    const int fd = file->fd;
    /* What others did with the descriptor comes before the close. */
    if (atomic_fetch_sub_explicit(&file->n_users, 1, memory_order_acq_rel) > 1)
        return -1;
    free(file);
    return fd;
}
