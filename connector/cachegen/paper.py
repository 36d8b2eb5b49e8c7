"""Preset paper: CacheGen as its paper describes it (Liu et al., SIGCOMM 2024, arXiv:2310.07240, section 5), from
calibration text to a profile, and its levels in torch for measuring quality. codec/FORMAT.md, "Anchors and deltas", is
the contract.

Every tenth token of a chunk is an anchor with 8 bits, the others are differences from it, with steps that grow over
the layer thirds. The unit of a step is the root mean square of a layer and plane's differences: one for all channels,
as the paper's vectorwise quantization has one for a token's whole vector. Tables are static, of each channel, layer
and plane, apart for anchors and differences; channels of alike distribution share one, of which the format has 256.
"""

import numpy as np
import torch

from .klt import K, V, quantize, split_layers
from .profile_file import N_LEVELS, Profile
from .quality import CHUNK_TOKENS, Sizes
from .tables import Histograms, cluster, shift_of

GROUP_TOKENS = 10  # an anchor and the tokens that differ from it
STEPS = "0.4375,0.875,1.3125"  # of L1, L2, L3, in units of the differences' root mean square: 1, 2, 3 times one base
THIRDS = (0.5, 1.0, 1.5)  # factor of the steps in each third of the layers
ANCHOR_STEPS = 255  # in the range that a channel has
SECTION_CHANNELS = 512  # layers share a section until it has so many: below, lane states cost more than 2 % of it


class Planes:
    """A context's K (as the engine holds it) and V as f32 [2][n_layers][n_tokens][C], and back."""

    def __init__(self, model):
        self.model = model

    def flat(self, k, v):
        return torch.stack([k.float().flatten(2), v.float().flatten(2)])

    def heads(self, x):
        shape = (self.model.n_layers, x.shape[2], self.model.n_kv_heads, self.model.head_dim)
        return x[K].reshape(shape).to(self.model.dtype), x[V].reshape(shape).to(self.model.dtype)


def default_group_layers(model):
    return -(-SECTION_CHANNELS // model.channels)


def anchor_of(n_tokens, device="cpu"):
    """Position of each token's anchor, in a context coded in chunks of CHUNK_TOKENS."""
    position = torch.arange(n_tokens, device=device)
    return position - position % CHUNK_TOKENS % GROUP_TOKENS


def split(x):
    """(anchors, the other tokens less their anchors) of x [...][n_tokens][C]."""
    anchor = anchor_of(x.shape[-2], x.device)
    is_anchor = anchor == torch.arange(len(anchor), device=x.device)
    return x[..., is_anchor, :], (x - x[..., anchor, :])[..., ~is_anchor, :]


class Statistics:
    """Mean, range and variance by channel, and the mean square of the differences: [2][n_layers][C].

    Without the first anchor run of a context: where a model parks its attention, elements are a hundred times larger.
    Escapes code them."""

    def __init__(self):
        self.n_tokens = self.n_deltas = 0
        self.sum = self.square = self.delta_square = 0.0
        self.low = self.high = None

    def add(self, x):
        """x: [2][n_layers][n_tokens][C] of a context from position 0."""
        deltas = split(x)[1][:, :, GROUP_TOKENS - 1 :]
        x = x[:, :, GROUP_TOKENS:]
        low, high = x.amin(2), x.amax(2)
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)
        self.sum = self.sum + x.sum(2, dtype=torch.float64)
        self.square = self.square + x.pow(2).sum(2, dtype=torch.float64)
        self.delta_square = self.delta_square + deltas.pow(2).sum(2, dtype=torch.float64)
        self.n_tokens += x.shape[2]
        self.n_deltas += deltas.shape[2]

    def mean(self):
        return (self.sum / self.n_tokens).float()

    def variance(self):
        return (self.square / self.n_tokens - (self.sum / self.n_tokens).pow(2)).float()

    def anchor_step(self):
        step = (self.high - self.low) / ANCHOR_STEPS
        return torch.maximum(step, step.mean((1, 2), keepdim=True) * 1e-3).clamp(min=1e-12)

    def delta_variance(self):
        return (self.delta_square / self.n_deltas).float()

    def weight(self):
        """One over the unit of the steps."""
        n_layers = self.delta_square.shape[1]
        third = torch.tensor([THIRDS[layer * 3 // n_layers] for layer in range(n_layers)], device=self.low.device)
        unit = self.delta_variance().mean(2, keepdim=True).sqrt() * third[None, :, None]
        return 1 / unit.clamp(min=1e-12).expand_as(self.low)


class Quantizer:
    """Symbols of a plane of a context. mean, weight, anchor_step: f32 [2][n_layers][C]."""

    def __init__(self, mean, weight, anchor_step):
        self.mean, self.weight, self.anchor_step = mean, weight, anchor_step

    @classmethod
    def of_profile(cls, profile, device):
        arrays = (profile.mean, profile.weight, profile.anchor_step)
        return cls(*(torch.from_numpy(np.array(a)).to(device).transpose(0, 1) for a in arrays))

    def anchors(self, x, p):
        """(symbols, decoded) [n_layers][n_anchors][C] of x[p]; x: [2][n_layers][n_tokens][C]."""
        mean, step = self.mean[p, :, None], self.anchor_step[p, :, None]
        a = quantize(split(x[p])[0] - mean, step)
        return a, a * step + mean

    def spread(self, decoded, n_tokens):
        """The decoded anchor of each token."""
        position = anchor_of(n_tokens, decoded.device)
        return decoded[:, torch.unique(position, return_inverse=True)[1]]

    def deltas(self, x, p, anchors, step):
        """Symbols [n_layers][n_tokens][C], those of anchors 0; anchors: of spread()."""
        d = quantize(x[p] - anchors, step / self.weight[p, :, None])
        d[:, anchor_of(x.shape[2], x.device) == torch.arange(x.shape[2], device=x.device)] = 0
        return d


@torch.no_grad()
def make(model, fingerprint, caches, contexts, steps, group_layers, n_classes, progress):
    """The Profile. caches.get(context): K, V; steps [3][2]; group_layers: None for the default."""
    groups = split_layers(model.n_layers, group_layers or default_group_layers(model))
    planes, statistics = Planes(model), Statistics()
    progress.start("range of anchors and differences")
    for i, context in enumerate(contexts):
        statistics.add(planes.flat(*caches.get(context)))
        progress(i + 1, len(contexts))
    quantizer = Quantizer(statistics.mean(), statistics.weight(), statistics.anchor_step())

    def histograms(mean_square):
        return [Histograms(shift_of(mean_square[p].flatten()), model.device) for p in (K, V)]

    of_anchors = histograms(statistics.variance() / quantizer.anchor_step.pow(2))
    square = statistics.delta_variance() * quantizer.weight.pow(2)
    of_deltas = [
        histograms(torch.stack([square[p] / steps[level][p] ** 2 for p in (K, V)])) for level in range(N_LEVELS)
    ]
    progress.start("statistics of the symbols")
    for i, context in enumerate(contexts):
        x = planes.flat(*caches.get(context))
        anchor = anchor_of(x.shape[2], x.device)
        is_delta = anchor != torch.arange(len(anchor), device=x.device)
        for p in (K, V):
            a, decoded = quantizer.anchors(x, p)
            of_anchors[p].add(a.int().transpose(0, 1).flatten(1))
            spread = quantizer.spread(decoded, x.shape[2])
            for level in range(N_LEVELS):
                d = quantizer.deltas(x, p, spread, steps[level][p])[:, is_delta]
                of_deltas[level][p].add(d.int().transpose(0, 1).flatten(1))
        progress(i + 1, len(contexts))

    progress.start("classes")
    sets = [of_anchors, *of_deltas]
    rows = np.concatenate([h.rows() for both in sets for h in both])
    shifts = np.concatenate([h.shift.cpu().numpy() for both in sets for h in both])
    classes, of = cluster(rows, shifts, n_classes)
    of = of.astype(np.uint8).reshape(len(sets), 2, model.n_layers, model.channels)
    ends = np.cumsum(groups)
    class_of = [
        [[[part[p, end - n : end].reshape(-1)] for p in (K, V)] for n, end in zip(groups, ends)] for part in of
    ]
    return Profile(
        bytes.fromhex(fingerprint), model.n_layers, model.n_kv_heads, model.head_dim, model.dtype_name,
        np.zeros(0), 0, groups, np.array(steps, np.float32),
        *(a.transpose(0, 1).cpu().numpy() for a in (quantizer.mean, quantizer.weight)), classes,
        None, class_of[1:], "paper", quantizer.anchor_step.transpose(0, 1).cpu().numpy(),
        [[runs[0] for runs in both] for both in class_of[0]],
    )  # fmt: skip


class Coder(Sizes):
    """Symbols, sizes and reconstructions of a profile's levels."""

    def __init__(self, profile, device="cpu"):
        super().__init__(profile, device)
        self.quantizer = Quantizer.of_profile(profile, device)

    def code(self, x, level):
        """(x after coding, bits of its symbols): x [2][n_layers][n_tokens][C] of a context from position 0."""
        profile, n_tokens = self.profile, x.shape[2]
        n_chunks = -(-n_tokens // CHUNK_TOKENS)
        out, bits = torch.empty_like(x), 0.0
        anchor = anchor_of(n_tokens, x.device)
        is_delta = anchor != torch.arange(n_tokens, device=x.device)
        for p in (K, V):
            step = float(profile.step[level][p])
            a, decoded = self.quantizer.anchors(x, p)
            spread = self.quantizer.spread(decoded, n_tokens)
            d = self.quantizer.deltas(x, p, spread, step)
            out[p] = spread + d * (step / self.quantizer.weight[p, :, None])
            first = 0
            for g, n in enumerate(profile.group_layers):
                layers = slice(first, first + n)
                for q, of in ((a[layers], profile.anchor_class[g][p]),
                              (d[layers][:, is_delta], profile.class_of[level][g][p][0])):  # fmt: skip
                    classes = torch.from_numpy(np.array(of, np.int64)).to(x.device)
                    bits += self.symbol_bits(q.transpose(0, 1).flatten(1), classes, n_chunks)
                bits += 8 * 4 * n_chunks  # other_bits() counts one matrix a section
                first += n
        return out, bits
