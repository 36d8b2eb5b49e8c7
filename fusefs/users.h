/* fusefs/users.h - what each user has of something that all share, and how much anyone may have.
 *
 * Threads: any. A table has its own lock.
 */
#ifndef CG_FUSEFS_USERS_H
#define CG_FUSEFS_USERS_H
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cg_user_count {
    uid_t uid;
    uint64_t n;
} cg_user_count;

typedef struct cg_users {
    pthread_mutex_t lock;
    uint64_t limit;       /* of each user */
    cg_user_count *items; /* of users that have some */
    size_t n_items, n_room;
} cg_users;

void cg_users_init(cg_users *users, uint64_t limit);
void cg_users_destroy(cg_users *users);
/* One more for the user; false: it has as many as it may, or there is no memory. */
bool cg_users_take(cg_users *users, uid_t uid);
void cg_users_give_back(cg_users *users, uid_t uid);
/* The same with n of them; n > 0. */
bool cg_users_take_n(cg_users *users, uid_t uid, uint64_t n);
void cg_users_give_back_n(cg_users *users, uid_t uid, uint64_t n);

#ifdef __cplusplus
}
#endif
#endif
