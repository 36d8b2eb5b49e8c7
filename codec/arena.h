/* codec/arena.h - cuts a caller's scratch memory into aligned pieces.
 *
 * With base NULL it only counts: the same code that lays scratch out tells how much is needed. It
 * checks no bounds: the caller has as much memory as that code has counted. Pieces are not freed;
 * they end with the caller's memory.
 * Threads: an arena is used by one.
 */
#ifndef CG_CODEC_ARENA_H
#define CG_CODEC_ARENA_H
#include <stddef.h>
#include <stdint.h>

enum { CG_ARENA_ALIGN = 64 };

typedef struct cg_arena {
    uint8_t *base; /* aligned as its pieces, or NULL to count */
    size_t used_bytes;
} cg_arena;

/* A piece of n_bytes, aligned to `align`, which is the same for all of an arena; NULL where it only
 * counts. 0 bytes: where the next piece would begin. */
static inline void *cg_arena_take_aligned(cg_arena *arena, size_t n_bytes, size_t align)
{
    uint8_t *piece = arena->base != NULL ? arena->base + arena->used_bytes : NULL;
    arena->used_bytes += (n_bytes + align - 1) / align * align;
    return piece;
}

/* A piece aligned to CG_ARENA_ALIGN. */
static inline void *cg_arena_take(cg_arena *arena, size_t n_bytes)
{
    return cg_arena_take_aligned(arena, n_bytes, CG_ARENA_ALIGN);
}
#endif
