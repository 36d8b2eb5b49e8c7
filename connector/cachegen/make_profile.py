"""From a model and contexts to a profile: statistics of K and V, a KLT, quantizer steps, tables.

The library behind cachegen.profile; cachegen.self_profile takes of it what needs no running model. What a profile is:
codec/FORMAT.md, "Profile".
"""

from dataclasses import dataclass

import torch

from .assemble import assemble, plan_columns
from .contexts import CONTINUATION, pick
from .klt import LEAST_CONTEXTS, Matrices, Moments, Planes, Transform, layer_factors, quantize, split_layers
from .kv_model import Context
from .profile_file import BLOCK_TOKENS, N_LEVELS
from .sinks import MOST_SINKS, choose_sinks
from .steps import DEFAULT, find_steps, parse_steps
from .tables import Histograms, shift_of

N_CLASSES = 192  # of a profile's 256 at most
# Channels of a matrix at most. More code better; multiply-adds an element, the profile and what a GPU holds of it grow
# with them.
MAX_CHANNELS = {"bytes": 2048, "speed": 1280, "smallest": 4096}
PLANES = ("joined", "apart")
PROFILE_SHARE = {"bytes": 0.05, "speed": 0.05, "smallest": 0.1}  # of the weights' bytes: a profile's largest size
BASIS_BYTES = 0.55  # of an element of a basis, on average: what is cut counts as nothing
LAYERS_LEVEL = 2  # L3: what its errors cost differs most from what the Fisher information says
N_LAYERS_CONTEXTS = 9
LEAST_BUDGET_BYTES = 1 << 20  # the share of a tiny model is no use


def choose_matrices(model, budget_bytes, most_channels=MAX_CHANNELS["bytes"], planes=PLANES):
    """The Matrices of a model: as many layers a group as have most_channels and bases of budget_bytes at most; K and V
    joined where one layer of both is within that, else apart. planes: which of the two may be."""
    for is_joined in (is_joined for is_joined, name in zip((True, False), PLANES) if name in planes):
        for n in range(model.n_layers, 0, -1):
            n_channels = (1 + is_joined) * n * model.channels
            n_bytes = BASIS_BYTES * 2 * model.n_layers * model.channels * n_channels
            if n_channels <= most_channels and n_bytes < budget_bytes:
                return Matrices(split_layers(model.n_layers, n), is_joined)
    return Matrices(split_layers(model.n_layers, 1), is_joined)


def calibrate(model, caches, contexts, matrices, progress):
    progress.start("mean, covariance and Fisher information")
    planes = Planes(model)
    moments = Moments(model.n_layers, model.channels, matrices, model.device)
    for i, context in enumerate(contexts):
        k, v = caches.get(context)
        fisher = caches.fisher(context, k, v)
        with torch.no_grad():
            moments.add(planes.flat(k, v)[:, :, MOST_SINKS:], fisher)
        progress(i + 1, len(contexts))
    return moments


def fill_transform(moments, matrices, model, progress, factors=None):
    """With MOST_SINKS. factors: of the weights, as weigh_layers()."""
    progress.start("eigenvectors")
    weight = moments.weight(model.head_dim)
    if factors is not None:
        weight = weight * factors[:, :, None].to(weight.device)
    return Transform(matrices, moments.mean(), weight, moments.basis(weight), MOST_SINKS, model.device)


@torch.no_grad()
def layer_costs(model, context, k, v, transform, step):
    """[n_layers][2], measured and as the weights say: what errors of a step cost after the first part of a context. What
    follows that is other text than what the Fisher information is of."""
    n = context.n * 2 // 3 // BLOCK_TOKENS * BLOCK_TOKENS
    part, k, v = Context(context.name, context.ids[: n + CONTINUATION], n), k[:, :n], v[:, :n]
    planes = Planes(model)
    x = planes.flat(k, v)
    out = transform.coded(x, [step] * 2)
    predicted = ((out - x) * transform.weight.transpose(0, 1)[:, :, None]).square().sum((2, 3)).T
    return model.kl_by_layer(part, k, v, *planes.heads(out)).cpu(), predicted.cpu()


def weigh_layers(model, caches, contexts, transform, step, progress):
    """Factors of the weights by layer_costs() of contexts; None of too few."""
    if len(contexts) < LEAST_CONTEXTS:
        return None
    progress.start("what errors of each layer cost")
    costs = []
    for i, context in enumerate(contexts):
        costs.append(layer_costs(model, context, *caches.get(context), transform, step))
        progress(i + 1, len(contexts))
    return layer_factors(*map(torch.stack, zip(*costs)))


@dataclass
class Statistics:
    """Of symbols; by (group, matrix)."""

    histograms: list  # [level]{Histograms}
    mean_square: dict  # of L1 symbols [8][N]
    largest_sum: dict  # of |L1 symbol| times its component's largest element, over the components of a row


@torch.no_grad()
def count_symbols(model, caches, contexts, transform, steps, progress):
    """The Statistics of contexts."""
    planes, each = Planes(model), transform.matrices.each()
    progress.start("scale of the coefficients")
    sample = pick(contexts, max(3, len(contexts) // 4))
    square = dict.fromkeys(each, 0.0)
    for i, context in enumerate(sample):
        x = planes.flat(*caches.get(context))
        for gm in each:
            square[gm] = square[gm] + transform.coefficients(x, *gm)[1:].pow(2).mean(0) / len(sample)
        progress(i + 1, len(sample))
    histograms = [
        {(g, m): Histograms(shift_of(square[g, m] / steps[level][m] ** 2), model.device) for g, m in each}
        for level in range(N_LEVELS)
    ]
    progress.start("statistics of the symbols")
    mean_square, largest_sum = dict.fromkeys(each, 0.0), dict.fromkeys(each, 0.0)
    largest = {gm: rows.abs().amax(1) for gm, rows in transform.rows.items()}
    for i, context in enumerate(contexts):
        x = planes.flat(*caches.get(context))
        for g, m in each:
            z = transform.coefficients(x, g, m)
            most = float((z.abs() @ largest[g, m]).max()) / steps[0][m]
            largest_sum[g, m] = max(largest_sum[g, m], most)
            z = z[1:]  # the first block has the sinks
            mean_square[g, m] = mean_square[g, m] + z.pow(2).mean(0) / (len(contexts) * steps[0][m] ** 2)
            for level in range(N_LEVELS):
                histograms[level][g, m].add(quantize(z, steps[level][m]).int())
        progress(i + 1, len(contexts))
    return Statistics(histograms, mean_square, largest_sum)


def make_profile(model, fingerprint, caches, contexts, matrices, steps, n_classes, progress, held_out=(), n_sinks=None,
                 share=PROFILE_SHARE["bytes"]):  # fmt: skip
    """The Profile of model, with fingerprint as its model's, from contexts. matrices: Matrices; steps: as parse_steps()
    gives them, or None, to find them on held_out; n_sinks: None to find them; share: of the weights' bytes, the file's
    at most. Caches serve later profiles, too."""
    moments = calibrate(model, caches, contexts, matrices, progress)
    transform = fill_transform(moments, matrices, model, progress)
    step = (steps or parse_steps(DEFAULT))[LAYERS_LEVEL][0]
    factors = weigh_layers(model, caches, pick(contexts, N_LAYERS_CONTEXTS), transform, step, progress)
    if factors is not None:
        del transform  # one basis at a time
        transform = fill_transform(moments, matrices, model, progress, factors)
    del moments
    if n_sinks is not None:
        transform.n_sinks = n_sinks
    if steps is None:
        progress.start("steps")
        steps = find_steps(model, transform, held_out, progress)
    if n_sinks is None:
        progress.start("exact first tokens")
        transform.n_sinks = choose_sinks(model, transform, caches, contexts, steps[1][0], progress)
    statistics = count_symbols(model, caches, contexts, transform, steps, progress)
    progress.start("classes")
    budget_bytes = max(share * model.weights_bytes, LEAST_BUDGET_BYTES)
    plan = plan_columns(transform, statistics, budget_bytes)
    return assemble(model, fingerprint, transform, statistics.histograms, plan, steps, n_classes)
