"""What a chunk costs at a level: KL divergence of the tokens that follow, by its distance to the end of the prefix.

The library plans loads by it (connector/quality.h); model.json holds it for each profile (codec/FORMAT.md, "The tree of
a store"). It is measured: a context is coded, whole or its last tokens only, and the model is asked what comes next.
What a whole context costs at a level is measured on text that the profile was not made from, where there is enough of
it: a profile fits its own texts, and at L3 most, so that theirs costs less than other text. Calibration text tells the
shape alone then.
"""

import math
from dataclasses import dataclass

import torch

from .profile_file import N_LEVELS
from .quality import score

LAST = (64, 256, 512, 1024, 2048)  # tokens at the end that are coded while all before them are exact
# L3. A model that computes in bf16 answers a little otherwise after any change, however small: at finer levels that is
# a large part of what so few coded tokens seem to cost.
CURVE_LEVEL = 2
N_CONTEXTS = 9
LEAST_HELD_OUT = 3  # contexts; fewer say less of other text than calibration text does
LEAST_SHARE = 0.1  # of the mean sensitivity, of every token: what lies far back may yet be asked for
LEAST_KL = 1e-9
BEYOND = (1e-3, 1)


@dataclass
class Costs:
    """Of a context of n_tokens: KL by level, and at CURVE_LEVEL where only so many last tokens are coded."""

    n_tokens: int
    kl: dict
    last: dict


@torch.no_grad()
def measure(model, coder, planes, caches, contexts, progress, levels=range(N_LEVELS)):
    """[Costs] of contexts at levels, CURVE_LEVEL among them; coder and planes are of one preset."""
    found = []
    for context in contexts:
        k, v = caches.get(context)
        x, reference = planes.flat(k, v), model.log_probs(context, k, v)

        def kl(coded):
            return score(model.log_probs(context, *planes.heads(coded)), reference, context.ids[context.n :])[0]

        costs = Costs(context.n, {}, {})
        for level in levels:
            coded = coder.code(x, level)[0]
            costs.kl[level] = kl(coded)
            for n in LAST if level == CURVE_LEVEL else ():
                if n < context.n:
                    costs.last[n] = kl(torch.cat([x[:, :, :-n], coded[:, :, -n:]], 2))
        found.append(costs)
        progress(len(found), len(contexts))
    return found


def _mean(values):
    return max(sum(values) / len(values), LEAST_KL)


def _concave(points):
    """The least concave curve from (0, 0) above points, which rise to the last one: what is noise would otherwise make
    a token further from the end worth more than a nearer one."""
    hull = [(0, 0.0)]
    for x, y in points:
        while len(hull) > 1 and (y - hull[-1][1]) * (hull[-1][0] - hull[-2][0]) >= (hull[-1][1] - hull[-2][1]) * (
            x - hull[-1][0]
        ):
            hull.pop()
        hull.append((x, y))
    return hull[1:]


def fit(measured, held_out=()):
    """The curve for model.json, of Costs; those of the longest contexts among them count. held_out: [KL by level] of
    other text, at least LEAST_HELD_OUT of them, or none."""
    whole = max(costs.n_tokens for costs in measured)
    measured = [costs for costs in measured if costs.n_tokens == whole]
    # Means: what a bound promises holds over many requests.
    kl = [_mean([costs[level] for costs in held_out or [c.kl for c in measured]]) for level in range(N_LEVELS)]
    all_of_it = _mean([costs.kl[CURVE_LEVEL] for costs in measured])
    points = []
    for n in measured[0].last:
        share = _mean([costs.last[n] for costs in measured]) / all_of_it
        points.append((n, min(share, 1 - LEAST_SHARE * (1 - n / whole))))
    points = _concave([*points, (whole, 1.0)])
    before, share = points[-2] if len(points) > 1 else (whole / math.e, 0.0)
    beyond = (1 - share) / math.log(whole / before)
    return {
        "kl": [max(kl[: level + 1]) for level in range(N_LEVELS)],  # a level is no better than a finer one
        "last": [[n, round(share, 6)] for n, share in points],
        "beyond": round(min(max(beyond, BEYOND[0]), BEYOND[1]), 6),
    }
