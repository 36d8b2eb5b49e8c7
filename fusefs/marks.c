#include "fusefs/marks.h"

#include "codec/chunk.h"
#include "fusefs/grown.h"
#include "fusefs/views.h"
#include "iouring/tree.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { ALL_LEVELS = (1 << CG_N_LEVELS) - 1, ALL_CHUNKS = 1 << 7 /* with a key of zeros */ };
enum { KEY_DIGITS = CG_KEY_HEX_BYTES - 1 };
/* Strings of a context.json that look like keys: the fingerprints of model and profile. */
enum { N_OTHERS = 2 };
/* So many are kept in order: 96 MB. There may be twice as many before they are sorted again. */
enum { MOST_MARKS = 4000000 };

cg_status cg_marks_add(cg_marks *marks, uint32_t model, const cg_key *key, uint8_t levels)
{
    cg_mark *items = cg_grown(marks->items, marks->n_items, &marks->max_items, sizeof *items);
    if (items == NULL)
        return CG_ERR_NO_MEMORY;
    marks->items = items;
    marks->items[marks->n_items++] = (cg_mark){model, levels, *key};
    return CG_OK;
}

bool cg_marks_is_forbidden(int error)
{
    return error == EACCES || error == EPERM;
}

cg_status cg_marks_add_all(cg_marks *marks, uint32_t model, int error)
{
    marks->has_unknown = true;
    marks->has_forbidden |= cg_marks_is_forbidden(error);
    marks->has_leased |= !cg_marks_is_forbidden(error);
    return cg_marks_add(marks, model, &(cg_key){{0}}, ALL_CHUNKS);
}

cg_status cg_marks_add_unread(cg_marks *marks, uint32_t model, int error)
{
    if (error == EAGAIN || cg_marks_is_forbidden(error))
        return cg_marks_add_all(marks, model, error);
    return error == 0 || error == ENOENT || error == ELOOP ? CG_OK : cg_status_from_errno(error);
}

/* ---- in order ---- */

static int by_key(const void *a, const void *b)
{
    const cg_mark *x = a, *y = b;
    if (x->model != y->model)
        return x->model < y->model ? -1 : 1;
    return memcmp(&x->key, &y->key, sizeof x->key);
}

void cg_marks_sort(cg_marks *marks)
{
    size_t n = 0;
    if (marks->n_items == 0)
        return;
    qsort(marks->items, marks->n_items, sizeof *marks->items, by_key);
    for (size_t i = 1; i < marks->n_items; i++) {
        if (by_key(&marks->items[n], &marks->items[i]) == 0)
            marks->items[n].levels |= marks->items[i].levels;
        else
            marks->items[++n] = marks->items[i];
    }
    marks->n_items = marks->n_sorted = n + 1;
}

static uint8_t find(const cg_marks *marks, uint32_t model, const cg_key *key)
{
    const cg_mark wanted = {model, 0, *key};
    const cg_mark *found = marks->n_sorted == 0 ? NULL
                                                : bsearch(&wanted, marks->items, marks->n_sorted,
                                                          sizeof wanted, by_key);
    return found != NULL ? found->levels : 0;
}

static bool is_all_marked(const cg_marks *marks, uint32_t model)
{
    return marks->has_unknown && (find(marks, model, &(cg_key){{0}}) & ALL_CHUNKS) != 0;
}

/* Of models that have more marks than this all is marked, in their place. */
static void mark_larger(cg_marks *marks, size_t most)
{
    cg_mark *items = marks->items;
    size_t n = 0;
    for (size_t i = 0, end; i < marks->n_items; i = end) {
        const uint32_t model = items[i].model;
        for (end = i; end < marks->n_items && items[end].model == model;)
            end++;
        if (end - i > most) {
            items[n++] = (cg_mark){model, ALL_CHUNKS, {{0}}};
            marks->has_unknown = marks->has_crowded = true;
            marks->crowded = model;
        } else {
            memmove(&items[n], &items[i], (end - i) * sizeof *items);
            n += end - i;
        }
    }
    marks->n_items = marks->n_sorted = n;
}

/* Contexts share most of what they name, and one may be there by many names. */
static void make_few(cg_marks *marks)
{
    if (marks->n_items < 2 * marks->n_sorted)
        return;
    cg_marks_sort(marks);
    /* The largest models, for they need not be those whose contexts come now. */
    for (size_t most = MOST_MARKS / 2; marks->n_items > MOST_MARKS && most > 0; most /= 2)
        mark_larger(marks, most);
}

/* ---- context.json ---- */

/* A JSON text is read string by string; what stands between them does not matter here. */
typedef struct scan {
    cg_marks *marks;
    uint32_t model;
    bool in_string, is_escaped;
    char text[KEY_DIGITS + 1]; /* the string's first bytes; one more than a key has: it is none */
    size_t n_bytes;
    size_t n_before; /* marks of other files */
} scan;

static cg_status take_string(scan *s)
{
    cg_marks *marks = s->marks;
    cg_key key;
    const bool is_level =
        s->n_bytes == 2 && s->text[0] == 'L' && s->text[1] >= '0' && s->text[1] < '0' + CG_N_LEVELS;
    if (is_level && marks->n_items > s->n_before)
        marks->items[marks->n_items - 1].levels |= (uint8_t)(1u << (s->text[1] - '0'));
    /* No context has more chunks: a file that says so does not get our memory for it. */
    if (s->n_bytes != KEY_DIGITS || marks->n_items - s->n_before > CG_TREE_MAX_CHUNKS + N_OTHERS)
        return CG_OK;
    s->text[KEY_DIGITS] = '\0';
    return cg_key_from_hex(s->text, &key) ? cg_marks_add(marks, s->model, &key, 0) : CG_OK;
}

static cg_status take_byte(scan *s, char byte)
{
    if (!s->in_string) {
        s->in_string = byte == '"';
        s->n_bytes = 0;
    } else if (!s->is_escaped && byte == '"') {
        s->in_string = false;
        return take_string(s);
    } else {
        /* No key and no level has an escape in it: the backslash makes it another text. */
        s->is_escaped = !s->is_escaped && byte == '\\';
        if (s->n_bytes < sizeof s->text)
            s->text[s->n_bytes++] = byte;
    }
    return CG_OK;
}

cg_status cg_marks_add_json(cg_marks *marks, uint32_t model, int dir_fd, const char *leaf)
{
    enum { PIECE_BYTES = 1 << 14 };
    char piece[PIECE_BYTES];
    struct stat attr;
    make_few(marks);
    scan s = {.marks = marks, .model = model, .n_before = marks->n_items};
    const int fd = cg_view_open_unnoticed(dir_fd, leaf);
    cg_status status = CG_OK;
    if (fd < 0)
        return cg_marks_add_unread(marks, model, errno);
    const bool is_wanted = !is_all_marked(marks, model);
    ssize_t n = fstat(fd, &attr) != 0 ? -1 : S_ISREG(attr.st_mode) && is_wanted;
    for (size_t left = CG_TREE_MOST_TEXT_BYTES; status == CG_OK && n > 0 && left > 0;
         left -= (size_t)n) {
        n = read(fd, piece, left < sizeof piece ? left : sizeof piece);
        for (ssize_t i = 0; status == CG_OK && i < n; i++)
            status = take_byte(&s, piece[i]);
    }
    if (n < 0)
        status = cg_status_from_errno(errno);
    close(fd);
    for (size_t i = s.n_before; i < marks->n_items; i++)
        if (marks->items[i].levels == 0)
            marks->items[i].levels = ALL_LEVELS;
    return status;
}

uint8_t cg_marks_of(const cg_marks *marks, uint32_t model, const cg_key *key)
{
    if (is_all_marked(marks, model))
        return ALL_LEVELS;
    return find(marks, model, key) & ALL_LEVELS;
}

void cg_marks_free(cg_marks *marks)
{
    free(marks->items);
    *marks = (cg_marks){0};
}
