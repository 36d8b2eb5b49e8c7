#include "connector/link.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PROMISES = 64 };

struct cg_link {
    cg_link *next; /* these three: the registry's lock */
    uint64_t device;
    uint32_t n_users;
    cg_reader_files *files; /* constant; may be NULL */
    pthread_mutex_t lock;   /* of the rest */
    cg_estimator estimator;
    cg_link_meter meter;
    cg_wanted wanted;                   /* of all connectors */
    cg_link_promise promises[PROMISES]; /* until_ns 0: none */
};

/* The links of this process. A child's is its own. */
typedef struct registry {
    pid_t pid;
    pthread_mutex_t lock;
    cg_link *links;
} registry;

static _Atomic(registry *) the_registry;

static registry *get_registry(void)
{
    registry *r = atomic_load_explicit(&the_registry, memory_order_acquire);
    if (r != NULL && r->pid == getpid())
        return r;
    registry *made = calloc(1, sizeof *made);
    if (made == NULL)
        return NULL;
    made->pid = getpid();
    pthread_mutex_init(&made->lock, NULL);
    if (atomic_compare_exchange_strong(&the_registry, &r, made))
        return made;
    /* Another thread was faster, and r is what it made. */
    pthread_mutex_destroy(&made->lock);
    free(made);
    return r;
}

cg_link *cg_link_get(uint64_t device)
{
    registry *r = get_registry();
    if (r == NULL)
        return NULL;
    pthread_mutex_lock(&r->lock);
    cg_link *link = r->links;
    while (link != NULL && link->device != device)
        link = link->next;
    if (link == NULL && (link = calloc(1, sizeof *link)) != NULL) {
        link->device = device;
        link->next = r->links;
        link->files = cg_reader_files_new();
        pthread_mutex_init(&link->lock, NULL);
        r->links = link;
    }
    if (link != NULL)
        link->n_users++;
    pthread_mutex_unlock(&r->lock);
    return link;
}

/* The sum changes by as much as one part of it did. */
static void change(cg_wanted *sum, cg_wanted from, cg_wanted to)
{
    sum->bytes += to.bytes - from.bytes;
    sum->n_loads += to.n_loads - from.n_loads;
}

void cg_link_put(cg_link *link, cg_wanted wanted)
{
    registry *r = link != NULL ? get_registry() : NULL;
    if (r == NULL)
        return;
    pthread_mutex_lock(&link->lock);
    change(&link->wanted, wanted, (cg_wanted){0});
    pthread_mutex_unlock(&link->lock);
    pthread_mutex_lock(&r->lock);
    /* Under the registry's lock: whoever finds a link there also counts as its user. */
    const bool is_last = --link->n_users == 0;
    for (cg_link **at = &r->links; is_last && *at != NULL; at = &(*at)->next)
        if (*at == link) {
            *at = link->next;
            break;
        }
    pthread_mutex_unlock(&r->lock);
    if (!is_last)
        return;
    pthread_mutex_destroy(&link->lock);
    cg_reader_files_free(link->files);
    free(link);
}

static bool is_key(const cg_key *a, const cg_key *b)
{
    return memcmp(a->bytes, b->bytes, sizeof a->bytes) == 0;
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

void cg_link_promise_add(cg_link *link, const cg_link_promise *promise, uint64_t now_ns)
{
    if (link == NULL)
        return;
    pthread_mutex_lock(&link->lock);
    cg_link_promise *place = &link->promises[0];
    bool is_kept = false;
    for (int i = 0; i < PROMISES && !is_kept; i++) {
        cg_link_promise *p = &link->promises[i];
        is_kept = p->until_ns > now_ns && is_key(&p->prefix, &promise->prefix);
        if (is_kept || p->until_ns < place->until_ns)
            place = p;
    }
    if (is_kept) {
        place->bytes = larger(place->bytes, promise->bytes);
        place->decode_ns = larger(place->decode_ns, promise->decode_ns);
    } else {
        *place = *promise;
    }
    pthread_mutex_unlock(&link->lock);
}

void cg_link_promise_end(cg_link *link, const cg_key *plan)
{
    if (link == NULL)
        return;
    pthread_mutex_lock(&link->lock);
    for (int i = 0; i < PROMISES; i++)
        if (is_key(&link->promises[i].plan, plan))
            link->promises[i].until_ns = 0;
    pthread_mutex_unlock(&link->lock);
}

cg_wanted cg_link_promised(cg_link *link, const cg_key *prefix, uint64_t now_ns,
                           double *decode_ns_out)
{
    cg_wanted sum = {0};
    *decode_ns_out = 0;
    if (link == NULL)
        return sum;
    pthread_mutex_lock(&link->lock);
    for (int i = 0; i < PROMISES; i++) {
        const cg_link_promise *p = &link->promises[i];
        if (p->until_ns <= now_ns || is_key(&p->prefix, prefix))
            continue;
        sum.bytes += p->bytes;
        sum.n_loads++;
        *decode_ns_out += p->decode_ns;
    }
    pthread_mutex_unlock(&link->lock);
    return sum;
}

cg_reader_files *cg_link_files(const cg_link *link)
{
    return link != NULL ? link->files : NULL;
}

/* The samples are the link's; which estimator, and what was believed before, are the connector's.
 */
static void copy_estimator(cg_estimator *to, const cg_estimator *from)
{
    const cg_estimator_kind kind = to->kind;
    const double prior_bps = to->prior_bps;
    *to = *from;
    to->kind = kind;
    to->prior_bps = prior_bps;
}

void cg_link_borrow(cg_link *link, cg_speeds *speeds)
{
    if (link == NULL)
        return;
    /* Until cg_link_return(), so that what is borrowed has one borrower. */
    pthread_mutex_lock(&link->lock);
    copy_estimator(&speeds->link, &link->estimator);
    speeds->meter = link->meter;
    speeds->told = speeds->wanted;
    /* The link's sum has this connector's own part in it, as it was told last. */
    speeds->others = link->wanted;
    change(&speeds->others, speeds->told, (cg_wanted){0});
}

void cg_link_return(cg_link *link, cg_speeds *speeds)
{
    if (link == NULL)
        return;
    copy_estimator(&link->estimator, &speeds->link);
    link->meter = speeds->meter;
    change(&link->wanted, speeds->told, speeds->wanted);
    pthread_mutex_unlock(&link->lock);
}
