"""How many first tokens of a context a profile keeps exact: many models park attention on the first one, whose K and V
are like no other token's, and which all that follows depends on. Exact tokens cost a multiple of coded ones, so as few
as quality allows.
"""

import torch

from .contexts import pick
from .profile_file import BLOCK_TOKENS
from .steps import divergence, prepare

CHOICES = (0, 1, 2, 4, 8)
MOST_SINKS = CHOICES[-1]
DEFAULT_SINKS = 4  # where the model cannot be asked
SLACK = 1.03  # times the divergence of the best choice is as good
N_CONTEXTS = 4


@torch.no_grad()
def divergences(model, transform, caches, contexts, step, progress):
    """[choice] mean KL after contexts, coded with a step, of CHOICES. transform has MOST_SINKS, which is a block."""
    total = [0.0] * len(CHOICES)
    for done, context in enumerate(contexts):
        ((_, x, reference),) = prepare(model, caches.get, [context])
        out = transform.coded(x, [step] * 2)
        for i, transform.n_sinks in enumerate(CHOICES):
            out[:, :, :BLOCK_TOKENS] = transform.coded(x[:, :, :BLOCK_TOKENS], [step] * 2)
            total[i] += divergence(model, context, out, reference)
        transform.n_sinks = MOST_SINKS
        progress(done + 1, len(contexts))
    return [kl / len(contexts) for kl in total]


def choose_sinks(model, transform, caches, contexts, step, progress):
    """The fewest of CHOICES that lose next to nothing at a step; transform as divergences() wants it."""
    kl = divergences(model, transform, caches, pick(contexts, N_CONTEXTS), step, progress)
    best = max(min(kl), 0)  # rounding makes less than none of none
    return next(n for n, one in zip(CHOICES, kl) if one <= SLACK * best)
