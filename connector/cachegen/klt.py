"""The transform of the lossy levels, and its calibration: un-RoPE, mean, Fisher weights, KLT over the channels of a
layer group, DCT over 8 tokens. codec/FORMAT.md, "What the lossy levels mean", is the contract; this is its f32 twin in
torch, for statistics and for measuring quality. Nothing here is kept per token: memory does not grow with the text.
"""

import math

import numpy as np
import torch

from .profile_file import BLOCK_TOKENS

K, V = 0, 1


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
    """Mean, covariance by layer group, and Fisher information, added up context by context."""

    def __init__(self, n_layers, channels, groups, device):
        self.groups, self.channels = groups, channels
        self.n_tokens = self.n_contexts = 0
        self.center = None  # of the first context: keeps f32 sums of squares small where K has a large bias
        self.sum = torch.zeros(2, n_layers, channels, dtype=torch.float64, device=device)
        self.fisher_sum = torch.zeros(n_layers, 2, channels, dtype=torch.float64, device=device)
        self.products = [[None, None] for _ in groups]

    def add(self, x, fisher):
        """x: [2][n_layers][n_tokens][C] without the sinks."""
        if self.center is None:
            self.center = x.mean(2, keepdim=True)
        x = x - self.center
        self.sum += x.sum(2, dtype=torch.float64)
        self.fisher_sum += fisher
        self.n_tokens += x.shape[2]
        self.n_contexts += 1
        first = 0
        for g, n in enumerate(self.groups):
            for p in (K, V):
                y = x[p, first : first + n].transpose(0, 1).flatten(1)
                product = y.T @ y
                old = self.products[g][p]
                self.products[g][p] = product if old is None else old.add_(product)
            first += n

    def mean(self):
        """f32 [n_layers][2][C]"""
        return (self.center[:, :, 0] + self.sum / self.n_tokens).transpose(0, 1).float()

    def variance(self):
        """f64 [n_layers][2][C], of each channel about its mean."""
        result = []
        for p in (K, V):
            square = torch.cat([both[p].diagonal() for both in self.products]).double().reshape(self.sum[p].shape)
            result.append(square / self.n_tokens - (self.sum[p] / self.n_tokens) ** 2)
        return torch.stack(result, 1).clamp(min=0)

    def weight(self):
        """f32 [n_layers][2][C]: square root of the Fisher information. Channels that nothing depends on get a floor:
        their error would otherwise be unbounded."""
        weight = (self.fisher_sum / self.n_contexts).sqrt()
        floor = weight.mean((0, 2), keepdim=True) * 1e-3
        return torch.maximum(weight, floor).clamp(min=1e-12).float()

    def basis(self, weight):
        """[group][plane] (f32 [N][N] with components as rows, their variances), most variance first."""
        result, first = [], 0
        for g, n in enumerate(self.groups):
            planes = []
            for p in (K, V):
                mean = (self.sum[p, first : first + n] / self.n_tokens).flatten()
                w = weight[first : first + n, p].flatten().double()
                covariance = self.products[g][p].double() / self.n_tokens - torch.outer(mean, mean)
                variance, vectors = torch.linalg.eigh((covariance * torch.outer(w, w)).float())
                rows = vectors.flip(1).T.contiguous()
                # The sign of a component means nothing: fixed, so that the same input gives the same profile.
                sign = rows.gather(1, rows.abs().argmax(1, keepdim=True)).sign()
                planes.append((rows * sign, variance.flip(0)))
            result.append(planes)
            first += n
        return result


class Transform:
    """Coefficients of a context and back, with the bases of a calibration or of a profile."""

    def __init__(self, groups, mean, weight, rows, n_sinks, device, n_exact=None):
        self.groups, self.n_sinks, self.device = groups, n_sinks, device
        self.n_exact = n_exact or [[0, 0] for _ in groups]  # as Basis has it; 0 where no row is rounded
        self.mean, self.weight = mean.to(device), weight.to(device)
        self.rows = [[r.to(device) for r in planes] for planes in rows]
        self.dct = dct_matrix(device)
        self.first = np.concatenate([[0], np.cumsum(groups)]).tolist()

    @classmethod
    def of_profile(cls, profile, device="cpu"):
        rows = [[torch.from_numpy(b.rows()) for b in planes] for planes in profile.basis]
        mean, weight = (torch.from_numpy(np.array(a)) for a in (profile.mean, profile.weight))
        n_exact = [[b.n_exact for b in planes] for planes in profile.basis]
        return cls(profile.group_layers, mean, weight, rows, profile.n_sinks, device, n_exact)

    def coefficients(self, x, g, p):
        """f32 [n_blocks][8][n_components] of plane p of group g. x: [2][n_layers][n_tokens][C], from position 0.
        Tokens that are not coded (sinks, and what is missing from a last partial block) are made up, and a decoder
        drops them: they are to cost little. Sinks become the mean of the rest of their block. A last partial block is filled
        with its last token here; the C encoder fills it with the mean of its tokens, which costs a little less. Only
        contexts that end within a block see the difference, in their last block's symbols."""
        layers = slice(self.first[g], self.first[g + 1])
        y = (x[p, layers] - self.mean[layers, p, None]) * self.weight[layers, p, None]
        y, rows, n_exact = y.transpose(0, 1).flatten(1), self.rows[g][p], self.n_exact[g][p]
        exact = y @ rows[:n_exact].T
        y = torch.cat([exact, (y - exact @ rows[:n_exact]) @ rows[n_exact:].T], 1)
        rest = -len(y) % BLOCK_TOKENS
        if rest:
            y = torch.cat([y, y[-1:].expand(rest, -1)])
        y[: self.n_sinks] = y[self.n_sinks : BLOCK_TOKENS].mean(0)
        return torch.einsum("ft,btc->bfc", self.dct, y.reshape(-1, BLOCK_TOKENS, y.shape[1]))

    def synthesize(self, z, g, p, n_tokens):
        """f32 [layers of the group][n_tokens][C] from dequantized coefficients."""
        layers = slice(self.first[g], self.first[g + 1])
        y = torch.einsum("ft,bfc->btc", self.dct, z).flatten(0, 1)[:n_tokens] @ self.rows[g][p]
        y = y.reshape(n_tokens, self.groups[g], -1).transpose(0, 1)
        return y / self.weight[layers, p, None] + self.mean[layers, p, None]


def quantize(z, step):
    """Symbols of the uniform mid-tread quantizer, ties away from zero."""
    q = z / step
    return torch.trunc(q + torch.where(q < 0, -0.5, 0.5))
