"""The transform of the lossy levels, and its calibration: un-RoPE, mean, Fisher weights, KLT over the channels of a
matrix (K and V of a layer group, together or apart), DCT over 8 tokens. codec/FORMAT.md, "What the lossy levels mean",
is the contract; this is its f32 twin in torch, for statistics and for measuring quality. Nothing here is kept per
token: memory does not grow with the text.
"""

import math

import numpy as np
import torch

from .profile_file import BLOCK_TOKENS, JOINT

K, V = 0, 1
# How far the information of a channel of V is drawn to its head's mean, in logarithms. Channels of V count about alike,
# so that what few continuations say of one is mostly noise; those of K don't.
V_SMOOTHING = 0.5
# Information is a second derivative; what errors of a level's size cost is another thing, and is known less well. So
# weights take half of the way from the one to the other, in logarithms.
LAYER_EXPONENT = 0.5
LEAST_V = 0.35  # of a layer's V, weight times deviation, next to that of all layers
MOST_RAISED = 1e3  # times for that: V that hardly varies is of its bias, and not to be coded finely
_MOST_RATIO = 8.0  # of a layer's cost to what its information says
_MOST_FACTOR = 2.0  # of a layer's weights
LEAST_CONTEXTS = 3  # whose agreement says something


def dct_matrix(device="cpu"):
    """D[f][t], orthonormal."""
    n = BLOCK_TOKENS
    t = torch.arange(n, dtype=torch.float64)
    d = torch.cos(math.pi * (t[None] + 0.5) * t[:, None] / n) * math.sqrt(2 / n)
    d[0] /= math.sqrt(2)
    return d.float().to(device)


def split_layers(n_layers, group_layers):
    """Layers of each group, from one number (as even as possible) or a list."""
    if isinstance(group_layers, (list, tuple)):
        if sum(group_layers) != n_layers or min(group_layers) < 1:
            raise ValueError(f"group sizes {group_layers} do not sum to {n_layers} layers")
        return list(group_layers)
    n_groups = -(-n_layers // group_layers)
    edges = [round(i * n_layers / n_groups) for i in range(n_groups + 1)]
    return [b - a for a, b in zip(edges, edges[1:])]


class Matrices:
    """What is transformed together: K and V of a layer group, joined, or a matrix each. Channels stand in the order
    [plane][layer of the group][C]."""

    def __init__(self, groups, is_joined):
        self.groups, self.is_joined = list(groups), is_joined
        self.first = np.concatenate([[0], np.cumsum(groups)]).tolist()

    @property
    def n_groups(self):
        return len(self.groups)

    @property
    def n_matrices(self):
        """Of a group."""
        return 1 if self.is_joined else 2

    def each(self):
        """All (group, matrix)."""
        return [(g, m) for g in range(self.n_groups) for m in range(self.n_matrices)]

    def nested(self, of):
        """[group][matrix] of of(group, matrix)."""
        return [[of(g, m) for m in range(self.n_matrices)] for g in range(self.n_groups)]

    def where(self, g, m):
        """Slices (planes, layers)."""
        planes = slice(0, 2) if self.is_joined else slice(m, m + 1)
        return planes, slice(self.first[g], self.first[g + 1])

    def rows(self, x, g, m):
        """[n_tokens][N] of x [2][n_layers][n_tokens][C]."""
        return x[self.where(g, m)].permute(2, 0, 1, 3).flatten(1)

    def put(self, y, x, g, m):
        """The inverse of rows(), into x; y may have fewer tokens than x has."""
        part = x[self.where(g, m)]
        part[:, :, : len(y)] = y.reshape(len(y), *part.shape[:2], -1).permute(1, 2, 0, 3)

    def columns(self, of_channels, g, m):
        """[N] of [n_layers][2][C], such as a mean."""
        planes, layers = self.where(g, m)
        return of_channels[layers, planes].transpose(0, 1).flatten()


class Planes:
    """A context's K (without rotation) and V as f32 [2][n_layers][n_tokens][C], and back."""

    def __init__(self, model):
        self.model = model

    def flat(self, k, v):
        positions = torch.arange(k.shape[1], device=k.device)
        k = self.model.rope.rotate(k.float(), positions, inverse=True)
        return torch.stack([k.flatten(2), v.float().flatten(2)])

    def heads(self, x):
        shape = (self.model.n_layers, x.shape[2], self.model.n_kv_heads, self.model.head_dim)
        positions = torch.arange(x.shape[2], device=x.device)
        k = self.model.rope.rotate(x[K].reshape(shape), positions)
        return k.to(self.model.dtype), x[V].reshape(shape).to(self.model.dtype)


class Moments:
    """Mean, covariance by matrix, and Fisher information, added up context by context."""

    def __init__(self, n_layers, channels, matrices, device):
        self.matrices, self.channels = matrices, channels
        self.n_tokens = self.n_contexts = 0
        self.center = None  # of the first context: keeps f32 sums of squares small where K has a large bias
        self.sum = torch.zeros(2, n_layers, channels, dtype=torch.float64, device=device)
        self.fisher_sum = torch.zeros(n_layers, 2, channels, dtype=torch.float64, device=device)
        self.sensitivity = 0.0  # sum of the information of all
        self.products = {}

    def add(self, x, fisher=None):
        """x: [2][n_layers][n_tokens][C] without the sinks. fisher: [n_layers][2][C], as KvModel.fisher(). A context
        whose continuation depends on it four times as much counts twice as much: one text is not to decide all
        weights."""
        if self.center is None:
            self.center = x.mean(2, keepdim=True)
        x = x - self.center
        self.sum += x.sum(2, dtype=torch.float64)
        if fisher is not None:
            total = fisher.sum(dtype=torch.float64)
            self.fisher_sum += fisher / total.sqrt().clamp(min=1e-30)
            self.sensitivity += float(total)
        self.n_tokens += x.shape[2]
        self.n_contexts += 1
        for gm in self.matrices.each():
            y = self.matrices.rows(x, *gm)
            product = y.T @ y
            self.products[gm] = self.products[gm].add_(product) if gm in self.products else product

    def mean(self):
        """f32 [n_layers][2][C]"""
        return (self.center[:, :, 0] + self.sum / self.n_tokens).transpose(0, 1).float()

    def variance(self):
        """f64 [n_layers][2][C], of each channel about its mean."""
        square = torch.zeros_like(self.sum)
        for (g, m), product in self.products.items():
            where = self.matrices.where(g, m)
            square[where] = product.diagonal().double().reshape(square[where].shape)
        return (square / self.n_tokens - (self.sum / self.n_tokens) ** 2).transpose(0, 1).clamp(min=0)

    def weight(self, head_dim):
        """f32 [n_layers][2][C]: square root of the Fisher information, smoothed. Channels that nothing depends on get a
        floor: their error would otherwise be unbounded."""
        scale = math.sqrt(self.sensitivity / self.n_contexts) / self.n_contexts
        weight = (self.fisher_sum * scale).sqrt()
        of_heads = weight[:, V].unflatten(1, (-1, head_dim))
        mean = of_heads.square().mean(2, keepdim=True).sqrt()
        weight[:, V] = (of_heads ** (1 - V_SMOOTHING) * mean**V_SMOOTHING).flatten(1)
        floor = weight.mean((0, 2), keepdim=True) * 1e-3
        return torch.maximum(weight, floor).clamp(min=1e-12).float()

    def floor_v(self, weight):
        """weight, with each layer's V raised until the root mean square of weight times deviation is LEAST_V of that of
        all layers.

        What a text's gradients call unimportant another language may depend on: English ones say so of V of the first
        layer, of which a level's step then codes next to nothing. With SmolLM2-135M and an English calibration this
        costs 0.8 % more bits at L2 and changes KL divergence of English by no more than noise; Chinese and Japanese
        have 6 to 30 % less at L2, 27 to 37 % less at L1. Higher floors cost more: 0.5 some 5 % of bits."""
        size = (weight * self.variance().sqrt())[:, V].square().mean(1).sqrt()
        least = LEAST_V * size.square().mean().sqrt()
        raised = weight.clone()
        raised[:, V] *= (least / size.clamp(min=1e-30)).clamp(1, MOST_RAISED).float()[:, None]
        return raised

    def basis(self, weight):
        """{(group, matrix): f32 [N][N] with components as rows, most variance first}"""
        mean, result = (self.sum / self.n_tokens).transpose(0, 1), {}
        for gm in self.matrices.each():
            center, w = self.matrices.columns(mean, *gm), self.matrices.columns(weight, *gm).double()
            covariance = self.products[gm].double() / self.n_tokens - torch.outer(center, center)
            result[gm] = principal_components((covariance * torch.outer(w, w)).float())
        return result


def principal_components(moments):
    """f32 [N][N] of the second moments f32 [N][N]: components as rows, most variance first."""
    rows = torch.linalg.eigh(moments)[1].flip(1).T.contiguous()
    # The sign of a component means nothing: fixed, so that the same input gives the same profile.
    return rows * rows.gather(1, rows.abs().argmax(1, keepdim=True)).sign()


def _layer_logarithms(measured, predicted):
    """[n_layers][2] logarithms of the ratios of sums over contexts, each layer averaged with its neighbours; 0 is the
    mean. Contexts count by the root of what they cost, as in Moments."""
    of_context = measured.sum((1, 2), keepdim=True).clamp(min=1e-30).sqrt()
    ratio = (measured / of_context).sum(0) / predicted.sum(0).clamp(min=1e-30)
    total = (measured / of_context).sum() / predicted.sum().clamp(min=1e-30)
    ratio = (ratio / total.clamp(min=1e-30)).clamp(1 / _MOST_RATIO, _MOST_RATIO).log()
    padded = torch.cat([ratio[:1], ratio, ratio[-1:]])
    ratio = (padded[:-2] + 2 * padded[1:-1] + padded[2:]) / 4
    return ratio - ratio.mean()


def layer_factors(measured, predicted):
    """f32 [n_layers][2]: factors of the weights of each layer's K and V, from what their errors cost in contexts,
    measured and as the weights say, [n_contexts][n_layers][2] both.

    Drawn to 1 where the contexts do not agree: what the ratios have of noise (by leaving out each context in turn) is
    compared with all that they differ by."""
    one = torch.ones(measured.shape[1:])
    if not (measured.isfinite().all() and predicted.isfinite().all()):
        return one
    has_cost = measured.sum((1, 2)) > 0  # where errors make nothing worse, only noise was measured
    measured, predicted = measured[has_cost].double(), predicted[has_cost].double()
    n = len(measured)
    if n < LEAST_CONTEXTS:
        return one
    found = _layer_logarithms(measured, predicted)
    without = [[i for i in range(n) if i != left_out] for left_out in range(n)]
    without = torch.stack([_layer_logarithms(measured[kept], predicted[kept]) for kept in without])
    noise = (n - 1) / n * (without - without.mean(0)).square().sum(0).mean()
    trust = (1 - noise / found.square().mean().clamp(min=1e-30)).clamp(min=0)
    return (found * trust.clamp(max=LAYER_EXPONENT) / 2).exp().clamp(1 / _MOST_FACTOR, _MOST_FACTOR).float()


def _prefixes(n_first, n):
    """f32 [frequency][n]: 1 for the first n_first[frequency], else 0."""
    return (torch.arange(n) < torch.tensor([int(first) for first in n_first])[:, None]).float()


class Transform:
    """Coefficients of a context and back, with the bases of a calibration or of a profile.

    With a joint matrix the first n_shared components of all groups are no more than its input; what is coded of a group
    are the others, its own."""

    def __init__(self, matrices, mean, weight, rows, n_sinks, device, n_exact=None):
        self.matrices, self.n_sinks, self.device = matrices, n_sinks, device
        self.n_shared = 0
        self.n_exact = n_exact or dict.fromkeys(rows, 0)  # as Basis has it; 0 where no row is rounded
        self.mean, self.weight = mean.to(device), weight.to(device)
        self.rows = {gm: of.to(device) for gm, of in rows.items()}
        self.dct = dct_matrix(device)

    @classmethod
    def of_profile(cls, profile, device="cpu"):
        matrices = Matrices(profile.group_layers, profile.is_joined)
        rows = {(g, m): torch.from_numpy(profile.basis[g][m].rows()) for g, m in matrices.each()}
        mean, weight = (torch.from_numpy(np.array(a)) for a in (profile.mean, profile.weight))
        n_exact = {(g, m): profile.basis[g][m].n_exact for g, m in matrices.each()}
        transform = cls(matrices, mean, weight, rows, profile.n_sinks, device, n_exact)
        if profile.joint:
            joint, basis = profile.joint, profile.joint.basis
            transform.join(torch.from_numpy(basis.rows()), joint.n_shared, basis.n_exact, joint.n_given.max(0))
        return transform

    def join(self, rows, n_shared, n_exact=0, n_given=None):
        """Sets the joint matrix. rows: f32 [n_components][n_groups x n_shared]; n_given: of each frequency, components
        of a group that are given at any level, so that an encoder looks at no others; None: all."""
        self.rows[JOINT], self.n_exact[JOINT] = rows.to(self.device), n_exact
        self.n_shared = n_shared
        self.is_given = torch.ones(BLOCK_TOKENS, n_shared, device=self.device)
        if n_given is not None:
            self.is_given = _prefixes(n_given, n_shared).to(self.device)

    def coded_matrices(self):
        """All (group, matrix) that have symbols."""
        return [JOINT] * bool(self.n_shared) + self.matrices.each()

    def _project(self, y, gm):
        rows, n_exact = self.rows[gm], self.n_exact[gm]
        exact = y @ rows[:n_exact].T
        return torch.cat([exact, (y - exact @ rows[:n_exact]) @ rows[n_exact:].T], -1)

    def coefficients(self, x, g, m):
        """f32 [n_blocks][8][n_components] of matrix m of group g. x: [2][n_layers][n_tokens][C], from position 0.
        Tokens that are not coded (sinks, and what is missing from a last partial block) are made up, and a decoder
        drops them: they are to cost little. Sinks become the mean of the rest of their block. A last partial block is
        filled with its last token here; the C encoder fills it with the mean of its tokens, which costs a little less.
        Only contexts that end within a block see the difference, in their last block's symbols."""
        mean, weight = (self.matrices.columns(a, g, m) for a in (self.mean, self.weight))
        y = self._project((self.matrices.rows(x, g, m) - mean) * weight, (g, m))
        rest = -len(y) % BLOCK_TOKENS
        if rest:
            y = torch.cat([y, y[-1:].expand(rest, -1)])
        y[: self.n_sinks] = y[self.n_sinks : BLOCK_TOKENS].sum(0) / max(BLOCK_TOKENS - self.n_sinks, 1)
        return torch.einsum("ft,btc->bfc", self.dct, y.reshape(-1, BLOCK_TOKENS, y.shape[1]))

    def all_coefficients(self, x, factors=None):
        """Yields ((g, m), coefficients()) of each matrix of a group, then those of JOINT. factors: f32 [n_blocks], of
        blocks' steps, by which coefficients are divided; None: 1."""
        shared = []
        for gm in self.matrices.each():
            z = self.coefficients(x, *gm)
            if factors is not None:
                z = z / factors[:, None, None]
            if self.n_shared:
                shared.append(z[..., : self.n_shared] * self.is_given)
            yield gm, z
        if shared:
            yield JOINT, self._project(torch.cat(shared, 2), JOINT)

    def own(self, gm, z):
        """Those of the coefficients z of a matrix that have symbols."""
        return z if gm == JOINT else z[..., self.n_shared :]

    def given(self, symbols, joint=None, level=None):
        """Shared components [n_blocks][8][n_groups][n_shared] from the symbols of JOINT, in steps, as a decoder rounds
        them with the Joint of a profile; without: all of them, not rounded."""
        v = symbols @ self.rows[JOINT]
        if joint is None:
            return v.unflatten(2, (-1, self.n_shared))
        unit = 2.0 ** -joint.fraction_bits[level]
        v = ((v / unit + 0.5).floor().clamp(-32768, 32767) * unit).unflatten(2, (-1, self.n_shared))
        return v * _prefixes(joint.n_given[level], self.n_shared).to(self.device)[:, None]

    def synthesize(self, z, g, m, out):
        """Writes matrix m of group g into out [2][n_layers][n_tokens][C], from dequantized coefficients."""
        mean, weight = (self.matrices.columns(a, g, m) for a in (self.mean, self.weight))
        y = torch.einsum("ft,bfc->btc", self.dct, z).flatten(0, 1)[: out.shape[2]] @ self.rows[g, m]
        self.matrices.put(y / weight + mean, out, g, m)

    def coded(self, x, steps, kept=lambda gm, symbols: symbols, joint=None, level=None, factors=None):
        """x after a level with steps [K, V], as far as a file keeps its symbols. x: [2][n_layers][n_tokens][C] from
        position 0. joint, level: as given() has them. factors: as all_coefficients() has them."""
        every = self.all_coefficients(x, factors)
        symbols = {gm: kept(gm, quantize(self.own(gm, z), steps[gm[1]])) for gm, z in every}
        given = self.given(symbols[JOINT], joint, level) if self.n_shared else None
        out = torch.empty_like(x)
        for g, m in self.matrices.each():
            z = symbols.pop((g, m))
            if given is not None:
                z = torch.cat([given[:, :, g], z], 2)
            self.synthesize(z * (steps[m] if factors is None else steps[m] * factors[:, None, None]), g, m, out)
        out[:, :, : self.n_sinks] = x[:, :, : self.n_sinks]
        return out


def quantize(z, step):
    """Symbols of the uniform mid-tread quantizer, ties away from zero."""
    q = z / step
    return torch.trunc(q + torch.where(q < 0, -0.5, 0.5))
