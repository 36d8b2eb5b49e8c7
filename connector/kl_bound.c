#include "connector/kl_bound.h"

#include <string.h>

/* What is asked, and where the answer goes. */
typedef struct question {
    const cg_controller_input *input;
    const cg_quality *quality;
    double max_kl;
    cg_controller_chunk *sizes;
    uint8_t *levels;
    uint32_t n_asked;
} question;

/* The answer for the first n chunks; those behind them are recomputed. False: no levels keep the
 * bound. */
static bool ask(question *q, size_t n, cg_controller_decision *decision_out)
{
    cg_controller_input input = *q->input;
    memcpy(q->sizes, input.chunks, n * sizeof *q->sizes);
    if (!cg_quality_bound(q->quality, q->sizes, n, q->max_kl))
        return false;
    for (size_t i = n; i < input.n_chunks; i++)
        input.other_tokens += input.chunks[i].n_tokens;
    input.chunks = q->sizes;
    input.n_chunks = n;
    q->n_asked++;
    *decision_out = cg_controller_decide(&input, q->levels);
    return true;
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

cg_controller_decision cg_kl_bound_decide(const cg_controller_input *input,
                                          const cg_quality *quality, double max_kl,
                                          cg_controller_chunk *sizes_out, uint8_t *levels_out,
                                          uint32_t *n_asked_out)
{
    question q = {input, quality, max_kl, sizes_out, levels_out, 0};
    const cg_controller_decision none = {0};
    cg_controller_decision decision = none;
    size_t n = input->n_chunks, too_many = n + 1, least_cut = 1;
    bool is_bounded = true;
    while (n > 0 && (is_bounded = ask(&q, n, &decision)) && decision.n_load < n) {
        too_many = n;
        n = smaller(decision.n_load, n - smaller(n, least_cut));
        least_cut *= 2;
    }
    bool is_of_n = is_bounded && n > 0; /* decision, sizes and levels are those of n chunks */
    while (is_bounded && too_many - n > 1) {
        const size_t middle = n + (too_many - n) / 2;
        is_of_n = ask(&q, middle, &decision) && decision.n_load == middle;
        if (is_of_n)
            n = middle;
        else
            too_many = middle;
    }
    if (is_bounded && n > 0 && !is_of_n)
        is_bounded = ask(&q, n, &decision);
    *n_asked_out = q.n_asked;
    return is_bounded && n > 0 ? decision : none;
}
