"""From a model and contexts to a profile: statistics of K and V, a KLT, quantizer steps, tables.

The library behind cachegen.profile; cachegen.self_profile takes of it what needs no running model. What a profile is:
codec/FORMAT.md, "Profile".
"""

import torch

from .assemble import N_SINKS, assemble, plan_columns
from .contexts import pick
from .klt import Moments, Planes, Transform, quantize
from .profile_file import N_LEVELS
from .steps import find_steps
from .tables import Histograms, shift_of

N_CLASSES = 192  # of a profile's 256 at most
MAX_GROUP_CHANNELS = 5120
PROFILE_SHARE = 0.05  # of the weights' bytes: a profile's largest size
BASIS_BYTES = 0.55  # of an element of a basis, on average: what is cut counts as nothing
LEAST_BUDGET_BYTES = 1 << 20  # the share of a tiny model is no use


def default_group_layers(model, budget_bytes):
    """Layers a group: more are better, but the bases must fit into the profile's bytes."""
    for n in range(10, 1, -1):
        n_bytes = BASIS_BYTES * 2 * model.n_layers * model.channels * n * model.channels
        if n * model.channels <= MAX_GROUP_CHANNELS and n_bytes < budget_bytes:
            return n
    return 1


def calibrate(model, caches, contexts, groups, progress):
    progress.start("mean, covariance and Fisher information")
    planes = Planes(model)
    moments = Moments(model.n_layers, model.channels, groups, model.device)
    for i, context in enumerate(contexts):
        k, v = caches.get(context)
        fisher = caches.fisher(context, k, v)
        with torch.no_grad():
            moments.add(planes.flat(k, v)[:, :, N_SINKS:], fisher)
        progress(i + 1, len(contexts))
    return moments


def fill_transform(moments, groups, device, progress):
    progress.start("eigenvectors")
    weight = moments.weight()
    basis = moments.basis(weight)
    rows = [[component for component, _ in both] for both in basis]
    return Transform(groups, moments.mean(), weight, rows, N_SINKS, device)


@torch.no_grad()
def count_symbols(model, caches, contexts, transform, steps, progress):
    """Histograms [level][group][plane], and mean squares of L1 symbols [group][plane] [8][N]."""
    planes, sizes = Planes(model), [range(2)] * len(transform.groups)
    each = [(g, p) for g, both in enumerate(sizes) for p in both]
    progress.start("scale of the coefficients")
    sample = pick(contexts, max(3, len(contexts) // 4))
    square = {gp: 0.0 for gp in each}
    for i, context in enumerate(sample):
        x = planes.flat(*caches.get(context))
        for g, p in each:
            square[g, p] = square[g, p] + transform.coefficients(x, g, p)[1:].pow(2).mean(0) / len(sample)
        progress(i + 1, len(sample))
    histograms = [
        {(g, p): Histograms(shift_of(square[g, p] / steps[level][p] ** 2), model.device) for g, p in each}
        for level in range(N_LEVELS)
    ]
    progress.start("statistics of the symbols")
    mean_square = {gp: 0.0 for gp in each}
    for i, context in enumerate(contexts):
        x = planes.flat(*caches.get(context))
        for g, p in each:
            z = transform.coefficients(x, g, p)[1:]  # the first block has the sinks
            mean_square[g, p] = mean_square[g, p] + z.pow(2).mean(0) / (len(contexts) * steps[0][p] ** 2)
            for level in range(N_LEVELS):
                histograms[level][g, p].add(quantize(z, steps[level][p]).int())
        progress(i + 1, len(contexts))
    return histograms, mean_square


def make_profile(model, fingerprint, caches, contexts, groups, steps, n_classes, progress, held_out=()):
    """The Profile of model, with fingerprint as its model's, from contexts. steps: as parse_steps() gives them, or
    None, to find them on held_out. Caches serve later profiles, too."""
    moments = calibrate(model, caches, contexts, groups, progress)
    transform = fill_transform(moments, groups, model.device, progress)
    del moments
    if steps is None:
        progress.start("steps")
        steps = find_steps(model, transform, held_out, progress)
    histograms, mean_square = count_symbols(model, caches, contexts, transform, steps, progress)
    progress.start("classes")
    budget_bytes = max(PROFILE_SHARE * model.weights_bytes, LEAST_BUDGET_BYTES)
    plan = plan_columns(transform, histograms, mean_square, budget_bytes)
    return assemble(model, fingerprint, transform, histograms, plan, steps, n_classes)
