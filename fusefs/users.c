#include "fusefs/users.h"

#include <stdlib.h>

void cg_users_init(cg_users *users, uint64_t limit)
{
    *users = (cg_users){.limit = limit};
    pthread_mutex_init(&users->lock, NULL);
}

void cg_users_destroy(cg_users *users)
{
    free(users->items);
    pthread_mutex_destroy(&users->lock);
}

static cg_user_count *find(const cg_users *users, uid_t uid)
{
    for (size_t i = 0; i < users->n_items; i++)
        if (users->items[i].uid == uid)
            return &users->items[i];
    return NULL;
}

static cg_user_count *add(cg_users *users, uid_t uid)
{
    if (users->n_items == users->n_room) {
        const size_t n_room = 2 * users->n_room + 8;
        cg_user_count *items = realloc(users->items, n_room * sizeof *items);
        if (items == NULL)
            return NULL;
        users->items = items;
        users->n_room = n_room;
    }
    users->items[users->n_items] = (cg_user_count){.uid = uid};
    return &users->items[users->n_items++];
}

bool cg_users_take(cg_users *users, uid_t uid)
{
    return cg_users_take_n(users, uid, 1);
}

void cg_users_give_back(cg_users *users, uid_t uid)
{
    cg_users_give_back_n(users, uid, 1);
}

bool cg_users_take_n(cg_users *users, uid_t uid, uint64_t n)
{
    pthread_mutex_lock(&users->lock);
    cg_user_count *user = find(users, uid);
    if (user == NULL)
        user = add(users, uid);
    const bool may = user != NULL && n <= users->limit - user->n;
    if (may)
        user->n += n;
    else if (user != NULL && user->n == 0)
        users->n_items--; /* it was just added, as the last one */
    pthread_mutex_unlock(&users->lock);
    return may;
}

void cg_users_give_back_n(cg_users *users, uid_t uid, uint64_t n)
{
    pthread_mutex_lock(&users->lock);
    cg_user_count *user = find(users, uid);
    /* The last one takes its place: the list has only users that have some. */
    if (user != NULL && (user->n -= n) == 0)
        *user = users->items[--users->n_items];
    pthread_mutex_unlock(&users->lock);
}
