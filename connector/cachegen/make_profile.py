"""From a model and contexts to a profile: statistics of K and V, a KLT, quantizer steps, tables.

The library behind cachegen.profile; cachegen.self_profile takes of it what needs no running model. What a profile is:
codec/FORMAT.md, "Profile".
"""

import math
from dataclasses import dataclass

import torch

from .assemble import assemble, plan_columns
from .block_steps import Importance, factors_of
from .contexts import CONTINUATION, pick
from .klt import (
    LEAST_CONTEXTS,
    Matrices,
    Moments,
    Planes,
    Transform,
    layer_factors,
    principal_components,
    quantize,
    split_layers,
)
from .kv_model import Context
from .profile_file import BAND, BLOCK_TOKENS, JOINT, MAX_JOINT, N_LEVELS, N_STEP_FACTORS
from .sinks import MOST_SINKS, choose_sinks
from .steps import DEFAULT, find_steps, parse_steps
from .tables import N_BINS, Histograms, magnitude_bins, shift_of

# Of a profile's 256 at most. A GPU's kernels hold all of them in shared memory, 400 bytes each: so many take at most 64
# KiB (codec/FORMAT.md, "Matrix of symbols").
N_CLASSES = 156
# Channels of a matrix at most. More code better; multiply-adds an element, the profile and what a GPU holds of it grow
# with them.
MAX_CHANNELS = {"bytes": 2048, "speed": 1280, "smallest": 4096}
LEAST_RATIO = 3  # tokens to learn from, a channel of a matrix: fewer make a KLT of noise
PLANES = ("joined", "apart")
PROFILE_SHARE = {"bytes": 0.05, "speed": 0.05, "smallest": 0.1}  # of the weights' bytes: a profile's largest size
JOINT_SHARE = 0.01  # more, with a joint matrix
BASIS_BYTES = 0.55  # of an element of a basis, on average: what is cut counts as nothing
LAYERS_LEVEL = 2  # L3: what its errors cost differs most from what the Fisher information says
N_LAYERS_CONTEXTS = 9
LEAST_BUDGET_BYTES = 1 << 20  # the share of a tiny model is no use
AUTO = "auto"
JOINT_PRODUCTS = 320  # multiply-adds of a joint matrix, an element of K and V
LEAST_JOINT_RATIO = 14  # calibration tokens a channel of a joint matrix: with 3 it learns noise


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
    """With MOST_SINKS. factors: of the weights, as weigh_layers(); V's floor is put under what they leave. None: those
    of the information alone, by which weigh_layers() predicts."""
    progress.start("eigenvectors")
    weight = moments.weight(model.head_dim)
    if factors is not None:
        weight = moments.floor_v(weight * factors[:, :, None].to(weight.device))
    return Transform(matrices, moments.mean(), weight, moments.basis(weight), MOST_SINKS, model.device)


@torch.no_grad()
def layer_costs(model, context, k, v, transform, step):
    """[n_layers][2], measured and as the weights say: what errors of a step cost after the first part of a context.
    What follows that is other text than what the Fisher information is of."""
    n = context.n * 2 // 3 // BLOCK_TOKENS * BLOCK_TOKENS
    part, k, v = Context(context.name, context.ids[: n + CONTINUATION], n), k[:, :n], v[:, :n]
    planes = Planes(model)
    x = planes.flat(k, v)
    out = transform.coded(x, [step] * 2)
    predicted = ((out - x) * transform.weight.transpose(0, 1)[:, :, None]).square().sum((2, 3)).T
    return model.kl_by_layer(part, k, v, *planes.heads(out)).cpu(), predicted.cpu()


def weigh_layers(model, caches, contexts, transform, step, progress):
    """Factors of the weights by layer_costs() of contexts; 1 of too few."""
    if len(contexts) < LEAST_CONTEXTS:
        return torch.ones(model.n_layers, 2)
    progress.start("what errors of each layer cost")
    costs = []
    for i, context in enumerate(contexts):
        costs.append(layer_costs(model, context, *caches.get(context), transform, step))
        progress(i + 1, len(contexts))
    return layer_factors(*map(torch.stack, zip(*costs)))


def most_shared(matrices, channels, most=MAX_JOINT):
    """Components of each group that a joint matrix may have, of most of all groups together; 0 where there can be none.
    channels: of a plane of a layer."""
    if not matrices.is_joined or matrices.n_groups < 2:
        return 0
    return min(most // matrices.n_groups, 2 * min(matrices.groups) * channels) // BAND * BAND


def choose_shared(matrices, channels, n_tokens):
    """Those that pay, learnt from n_tokens."""
    of_products = math.isqrt(JOINT_PRODUCTS * 2 * sum(matrices.groups) * channels)
    return most_shared(matrices, channels, min(MAX_JOINT, of_products, n_tokens // LEAST_JOINT_RATIO))


@torch.no_grad()
def join_groups(model, caches, contexts, transform, n_shared, progress):
    """Gives transform a joint matrix: the KLT of the first n_shared components of all groups."""
    progress.start("what the layer groups have in common")
    planes, moments = Planes(model), 0.0
    for i, context in enumerate(contexts):
        x = planes.flat(*caches.get(context))
        shared = [transform.coefficients(x, *gm)[1:, :, :n_shared] for gm in transform.matrices.each()]
        shared = torch.cat(shared, 2).flatten(0, 1)
        moments = moments + shared.T @ shared
        progress(i + 1, len(contexts))
    transform.join(principal_components(moments), n_shared)


@dataclass
class Statistics:
    """Of symbols; by (group, matrix), JOINT included."""

    histograms: list  # [level]{Histograms} of what has symbols
    mean_square: dict  # of coefficients in steps of L1 [8][N]
    largest_sum: dict  # of |coefficient|, in steps of L1, times its component's largest element, over those of a row
    joint_square: list  # [level] mean square of the symbols of JOINT, [8][n_components]
    largest_shared: list  # [level] of |shared coefficient|, in its steps


@torch.no_grad()
def count_symbols(model, caches, contexts, transform, steps, progress):
    """The Statistics of contexts, of symbols in the level's own step, whatever blocks' steps are: columns and
    components are chosen by these. By blocks' own, the finest blocks would keep columns that cost a decoder more time
    than they save."""
    planes, each = Planes(model), transform.coded_matrices()
    progress.start("scale of the coefficients")
    sample = pick(contexts, max(3, len(contexts) // 4))
    square = dict.fromkeys(each, 0.0)
    for i, context in enumerate(sample):
        x = planes.flat(*caches.get(context))
        for gm, z in transform.all_coefficients(x):
            square[gm] = square[gm] + transform.own(gm, z)[1:].pow(2).mean(0) / len(sample)
        progress(i + 1, len(sample))
    histograms = [
        {(g, m): Histograms(shift_of(square[g, m] / steps[level][m] ** 2), model.device) for g, m in each}
        for level in range(N_LEVELS)
    ]
    progress.start("statistics of the symbols")
    mean_square, largest_sum, joint_square = dict.fromkeys(each, 0.0), dict.fromkeys(each, 0.0), [0.0] * N_LEVELS
    largest_shared = [0.0] * N_LEVELS
    largest = {gm: rows.abs().amax(1) for gm, rows in transform.rows.items()}
    for i, context in enumerate(contexts):
        x = planes.flat(*caches.get(context))
        for (g, m), z in transform.all_coefficients(x):
            most = float((z.abs() @ largest[g, m]).max()) / steps[0][m]
            largest_sum[g, m] = max(largest_sum[g, m], most)
            if transform.n_shared and (g, m) != JOINT:
                most = float(z[..., : transform.n_shared].abs().max())
                largest_shared = [max(old, most / step[m]) for old, step in zip(largest_shared, steps)]
            z = z[1:]  # the first block has the sinks
            mean_square[g, m] = mean_square[g, m] + z.pow(2).mean(0) / (len(contexts) * steps[0][m] ** 2)
            for level in range(N_LEVELS):
                symbols = quantize(transform.own((g, m), z), steps[level][m])
                histograms[level][g, m].add(symbols.int())
                if (g, m) == JOINT:
                    joint_square[level] += symbols.square().mean(0) / len(contexts)
        progress(i + 1, len(contexts))
    return Statistics(histograms, mean_square, largest_sum, joint_square, largest_shared)


@torch.no_grad()
def count_by_factor(model, caches, contexts, transform, steps, plan, histograms, importance, progress):
    """{(level, group, matrix): f32 [N_STEP_FACTORS][n_columns][N_BINS]}: the histograms of a plan's active columns, one
    frequency's behind the other's, by the step factor of the block that symbols are in."""
    progress.start("statistics of the symbols by their blocks' steps")
    planes, counts = Planes(model), {}
    for i, context in enumerate(contexts):
        x = planes.flat(*caches.get(context))
        index = importance.factor_index(x, transform.n_sinks)
        for gm, z in transform.all_coefficients(x, factors_of(index)):
            z = transform.own(gm, z)[1:]  # the first block has the sinks
            for level in range(N_LEVELS):
                n_active, shift = plan.active[(level, *gm)], histograms[level][gm].shift
                symbols = quantize(torch.cat([z[:, f, :n] for f, n in enumerate(n_active)], 1), steps[level][gm[1]])
                shift = torch.cat([shift[f, :n] for f, n in enumerate(n_active)])
                n = len(shift)
                cell = index[1:, None] * n + torch.arange(n, device=index.device)
                cell = cell * N_BINS + magnitude_bins(symbols.int(), shift)
                found = torch.bincount(cell.flatten(), minlength=N_STEP_FACTORS * n * N_BINS).float().cpu()
                found = found.reshape(N_STEP_FACTORS, n, N_BINS).numpy()
                counts[(level, *gm)] = counts.get((level, *gm), 0.0) + found
        progress(i + 1, len(contexts))
    return counts


def make_profile(model, fingerprint, caches, contexts, matrices, steps, n_classes, progress, held_out=(), n_sinks=None,
                 share=PROFILE_SHARE["bytes"], n_shared=0, block_steps=False):  # fmt: skip
    """The Profile of model, with fingerprint as its model's, from contexts. matrices: Matrices; steps: as parse_steps()
    gives them, or None, to find them on held_out; n_sinks: None to find them; share: of the weights' bytes, the file's
    at most; n_shared: components of each group for a joint matrix, as most_shared() allows, 0: none;
    block_steps: blocks have steps of their own, where the model's queries can be had. Caches serve later profiles,
    too."""
    moments = calibrate(model, caches, contexts, matrices, progress)
    query_mean = caches.query_mean(contexts) if block_steps else None
    importance = None if query_mean is None else Importance(query_mean.to(model.device), model.rope)
    transform = fill_transform(moments, matrices, model, progress)
    step = (steps or parse_steps(DEFAULT))[LAYERS_LEVEL][0]
    factors = weigh_layers(model, caches, pick(contexts, N_LAYERS_CONTEXTS), transform, step, progress)
    del transform  # one basis at a time
    transform = fill_transform(moments, matrices, model, progress, factors)
    del moments
    if n_shared:
        join_groups(model, caches, contexts, transform, n_shared, progress)
    if n_sinks is not None:
        transform.n_sinks = n_sinks
    if steps is None:
        progress.start("steps")
        steps = find_steps(model, transform, held_out, progress, importance)
    if n_sinks is None:
        progress.start("exact first tokens")
        transform.n_sinks = choose_sinks(model, transform, caches, contexts, steps[1][0], progress)
    statistics = count_symbols(model, caches, contexts, transform, steps, progress)
    progress.start("columns and components")
    budget_bytes = max(share * model.weights_bytes, LEAST_BUDGET_BYTES)
    plan, histograms, by_factor = plan_columns(transform, statistics, budget_bytes), statistics.histograms, None
    if importance:
        by_factor = count_by_factor(model, caches, contexts, transform, steps, plan, histograms, importance, progress)
    progress.start("classes")
    return assemble(model, fingerprint, transform, histograms, plan, steps, n_classes, by_factor, query_mean)
