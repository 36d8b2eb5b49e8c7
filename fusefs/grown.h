/* fusefs/grown.h - arrays that grow by one item after another.
 * Threads: the caller's.
 */
#ifndef CG_FUSEFS_GROWN_H
#define CG_FUSEFS_GROWN_H
#include <stddef.h>
#include <stdlib.h>

/* The malloc'ed array (NULL: none yet) of n items, with room for one more: itself, or a larger one
 * in its place. *max, how many there is room for, doubles then. NULL: no memory; array and *max are
 * as they were. */
static inline void *cg_grown(void *array, size_t n, size_t *max, size_t each_bytes)
{
    if (n < *max)
        return array;
    const size_t wanted = *max > 0 ? 2 * *max : 256;
    void *larger = reallocarray(array, wanted, each_bytes);
    if (larger != NULL)
        *max = wanted;
    return larger;
}
#endif
