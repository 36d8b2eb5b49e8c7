"""Quantizer steps of the levels: given, or found for a model.

Steps are in units of the model's own Fisher weights, so that one number means about the same loss for every model, but
only about: find_steps() looks for the L2 step whose KL divergence is what 0.0015 costs on SmolLM2-135M.
"""

import math

import torch

from .block_steps import factors_of
from .klt import Planes
from .profile_file import N_LEVELS
from .quality import score

DEFAULT = "0.0005,0.0015,0.0045"
TARGET_KL = 0.011  # of L2, on calibration domains
_FIRST_GUESS = 0.0015
_KL_EXPONENT = 1.85  # KL grows about as this power of the step
_MAX_TRIALS = 6


def nested_steps(first):
    """[L1, L2, L3][K, V] a factor 3 apart, exactly so in f32: a coarser level then has the same symbols whether it is
    coded directly or from a finer one."""
    mantissa, exponent = math.frexp(first)
    first = math.ldexp(round(mantissa * 2**20), exponent - 20)  # leaves room for 9 times it
    return [[first * 3**level] * 2 for level in range(N_LEVELS)]


def parse_steps(text):
    """[L1, L2, L3][K, V] of "A,B,C"; ValueError."""
    steps = [float(s) for s in text.split(",")]
    if len(steps) != N_LEVELS or not all(0 < step < math.inf for step in steps):
        raise ValueError(f'steps must be three numbers above 0, or "auto", not "{text}"')
    if all(abs(step / steps[0] / 3**level - 1) < 1e-3 for level, step in enumerate(steps)):
        return nested_steps(steps[0])
    return [[step] * 2 for step in steps]


def prepare(model, prefill, contexts):
    """[(context, its K and V as Planes have them, log p of what follows)]; prefill(context): K, V."""
    prepared = []
    for context in contexts:
        k, v = prefill(context)
        prepared.append((context, Planes(model).flat(k, v), model.log_probs(context, k, v)))
    return prepared


def divergence(model, context, x, reference):
    """KL after a context whose K and V are x, as Planes have them."""
    return score(model.log_probs(context, *Planes(model).heads(x)), reference, context.ids[context.n :])[0]


@torch.no_grad()
def _mean_divergence(model, transform, prepared, factors, step):
    coded = (transform.coded(x, [step] * 2, factors=of_blocks) for (_, x, _), of_blocks in zip(prepared, factors))
    return sum(divergence(model, c, y, ref) for (c, _, ref), y in zip(prepared, coded)) / len(prepared)


@torch.no_grad()
def find_steps(model, transform, contexts, progress, importance=None):
    """Steps whose L2 has TARGET_KL over contexts, to two digits; as parse_steps(). importance: that blocks' steps are
    by; None: blocks have one step."""
    prepared = prepare(model, model.prefill, contexts)
    factors = [importance and factors_of(importance.factor_index(x, transform.n_sinks)) for _, x, _ in prepared]
    step = _FIRST_GUESS
    for trial in range(_MAX_TRIALS):
        kl = _mean_divergence(model, transform, prepared, factors, step)
        progress(trial + 1, _MAX_TRIALS)
        ratio = (TARGET_KL / max(kl, 1e-9)) ** (1 / _KL_EXPONENT)
        step *= min(max(ratio, 0.1), 10)
        if 0.85 < ratio < 1.18:
            break
    digits = 1 - math.floor(math.log10(step))
    return nested_steps(round(step, digits) / 3)
