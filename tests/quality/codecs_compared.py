"""What is compared: cgtool's levels from real files, CacheGen's published quantizer and plain integers from estimates.

A codec's code(context, k, v, levels) yields (level, k, v, bits) for each of its levels that is in levels: K and V
[n_layers][n_tokens][n_kv_heads][head_dim] of the model's dtype, K rotated, as a reader of the bits would get them.
"""

import heapq
import json
import math
import os
import subprocess
import tempfile

import torch
from cachegen.quality import CHUNK_TOKENS
from safetensors.torch import load_file, save_file

SCALE_BITS = 16
LOSSY = ("L1", "L2", "L3")
# A level for each chunk: the fewest bytes at the KL that the profile's curve predicts of L2 of all chunks, or at 25, 50
# and 80 % of the way from there to L3, in logarithms. They lie about the KLs that codecs are compared at: a line
# between two plans further apart would be far above what a plan between them takes.
PLANS = {"planned": 0.0, "planned-25": 0.25, "planned-50": 0.5, "planned-80": 0.8}


def curve_of(profile):
    """The curve of quality that the profile tool wrote beside a profile; None: none."""
    path = os.path.join(os.path.dirname(os.path.dirname(profile)), "model.json")
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as file:
        return json.load(file).get("quality", {}).get(os.path.basename(profile).removesuffix(".cgp"))


def share_of_last(curve, n_tokens):
    """Of the KL divergence of the curve's whole context (FORMAT.md, "The tree of a store")."""
    before = (0, 0.0)
    for point in curve["last"]:
        if n_tokens <= point[0]:
            return before[1] + (point[1] - before[1]) * (n_tokens - before[0]) / (point[0] - before[0])
        before = point
    return 1 + curve["beyond"] * math.log(n_tokens / before[0])


def planned_levels(curve, n_tokens, sizes, coarseness):
    """The level, as an index, of each chunk: the coarsest first, then refined where a byte saves most, until all are
    predicted to cost no more than L2 of all, or something between L2 (coarseness 0) and L3 (1). n_tokens: of each
    chunk; sizes [level][chunk]. It is what connector/quality.c does where a request bounds the KL divergence."""
    ends = [sum(n_tokens[i:]) for i in range(len(n_tokens) + 1)]
    weight = [share_of_last(curve, a) - share_of_last(curve, b) for a, b in zip(ends, ends[1:])]
    kl, coarsest = curve["kl"], len(LOSSY) - 1
    bound = kl[coarsest - 1] ** (1 - coarseness) * kl[coarsest] ** coarseness * sum(weight)
    levels, cost, steps = [coarsest] * len(weight), kl[coarsest] * sum(weight), []

    def add_step(i):
        """The best refinement of chunk i, if there is one."""
        found = [((kl[levels[i]] - kl[to]) * weight[i] / max(sizes[to][i] - sizes[levels[i]][i], 1), -i, to)
                 for to in range(levels[i])]  # fmt: skip
        if found:
            rate, _, to = max(found)
            heapq.heappush(steps, (-rate, -i, to))

    for i in range(len(weight)):
        add_step(i)
    while steps and cost > bound * (1 + 1e-9):
        _, minus_i, to = heapq.heappop(steps)
        cost -= (kl[levels[-minus_i]] - kl[to]) * weight[-minus_i]
        levels[-minus_i] = to
        add_step(-minus_i)
    return levels


class Chunks:
    """Files of cgtool in chunks of 256 tokens; every byte of them counts. Without a profile: L0."""

    def __init__(self, name, cgtool, fingerprint, profile=None):
        self.name, self.cgtool, self.profile = name, cgtool, profile
        self.curve = curve_of(profile) if profile else None
        self.levels = (LOSSY if profile else ("L0",)) + (tuple(PLANS) if self.curve else ())
        self.about = ["--profile", profile] if profile else []
        self.about_encode = self.about or ["--model-fingerprint", fingerprint]

    def _run(self, *arguments):
        done = subprocess.run([self.cgtool, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise RuntimeError(f"cgtool {' '.join(arguments)}: {done.stderr}")

    def code(self, context, k, v, levels):
        plans = [name for name in PLANS if name in self.levels and name in levels]
        sizes, tensors = [], []
        with tempfile.TemporaryDirectory() as work:
            tokens = context.ids[: context.n].to(torch.int32).contiguous()
            save_file({"K": k.contiguous(), "V": v.contiguous(), "tokens": tokens}, f"{work}/kv.st")
            for level in self.levels:
                if level in PLANS or not (plans or level in levels):
                    continue
                coded, decoded = f"{work}/{level}", f"{work}/{level}.st"
                self._run("encode", "--level", level, *self.about_encode, f"{work}/kv.st", coded)
                self._run("decode", *self.about, coded, decoded)
                files = sorted(entry.path for entry in os.scandir(coded)) if os.path.isdir(coded) else [coded]
                sizes.append(list(map(os.path.getsize, files)))
                tensors.append(load_file(decoded))
                if level in levels:
                    yield level, tensors[-1]["K"], tensors[-1]["V"], 8 * sum(sizes[-1])
        for name in plans:
            yield name, *self._planned(PLANS[name], sizes, tensors)

    def _planned(self, coarseness, sizes, tensors):
        """K, V and bits of a plan, from those of each level."""
        n = len(tensors[0]["K"][0])
        n_tokens = [min(CHUNK_TOKENS, n - at) for at in range(0, n, CHUNK_TOKENS)]
        levels = planned_levels(self.curve, n_tokens, sizes, coarseness)
        parts = {
            name: [tensors[level][name].split(CHUNK_TOKENS, 1)[i] for i, level in enumerate(levels)] for name in "KV"
        }
        return torch.cat(parts["K"], 1), torch.cat(parts["V"], 1), 8 * sum(sizes[lv][i] for i, lv in enumerate(levels))


class Published:
    """The quantizer of CacheGen's published code: each token of a layer is divided by one scale, its largest magnitude
    over all heads, K as it is rotated, and rounded to one of `bins` uniform values, fewer in later layers.

    Bits are cross-entropies of the symbols under one table for each layer, plane and channel, counted on calibration
    contexts, and 16 bits for each scale: what an ideal entropy coder would write, without tables and headers.
    """

    name, levels = "published", ("finest", "default", "smallest")
    _MOST_SYMBOLS = 31
    _UNSEEN = 0.05  # count of a symbol that the calibration did not have

    def __init__(self, model):
        self.n_layers = model.n_layers
        self.counted, self.calibration = {}, {}

    def _largest_symbol(self, level, device):
        """f32 [2][n_layers][1][1]"""
        last, rows = self.n_layers * 2 // 3, range(self.n_layers)
        bins = {
            "finest": ([32 for _ in rows], [32 for _ in rows]),
            "default": ([32 if i < 10 else 16 for i in rows], [32 if i < 2 else 16 for i in rows]),
            "smallest": ([16 if i < last else 12 for i in rows], [16 if i < 2 else 12 for i in rows]),
        }[level]
        return (torch.tensor(bins, device=device) // 2 - 1)[:, :, None, None].float()

    def _quantize(self, k, v, level):
        """Symbols, and the size of one: [2][n_layers][n_tokens][C] and [2][n_layers][n_tokens][1]"""
        x = torch.stack([k, v]).float().flatten(3)
        scale = x.abs().amax(-1, keepdim=True).half().float()
        largest = self._largest_symbol(level, x.device)
        return (x / scale * largest).round(), scale / largest

    def _counts(self, symbols):
        """f64 [2][n_layers][C][31]"""
        channels = symbols.shape[3]
        first = self._MOST_SYMBOLS * torch.arange(channels, device=symbols.device) + self._MOST_SYMBOLS // 2
        rows = [
            torch.bincount((x.long() + first).flatten(), minlength=channels * self._MOST_SYMBOLS)
            for x in symbols.flatten(0, 1)
        ]
        return torch.stack(rows).reshape(2, self.n_layers, channels, self._MOST_SYMBOLS).double()

    def calibrate(self, contexts, caches):
        """Tables from contexts. What a context counts is kept: a selection of known contexts costs next to nothing."""
        for context in contexts:
            if context.name not in self.counted:
                k, v = caches.get(context)
                counts = {level: self._counts(self._quantize(k, v, level)[0]) for level in self.levels}
                self.counted[context.name] = counts
        self.calibration = {lv: sum(self.counted[c.name][lv] for c in contexts) for lv in self.levels}

    def code(self, context, k, v, levels):
        for level in (level for level in self.levels if level in levels):
            symbols, size = self._quantize(k, v, level)
            table = self.calibration[level] + self._UNSEEN
            cost = -(table / table.sum(-1, keepdim=True)).log2()
            bits = (self._counts(symbols) * cost).sum().item() + SCALE_BITS * size.numel()
            k_out, v_out = (symbols * size).reshape(2, *k.shape).to(k.dtype)
            yield level, k_out, v_out, bits


class Integers:
    """Symmetric integers with one 16-bit scale for each token and head: their size is known without coding."""

    def __init__(self, n_bits):
        self.name, self.n_bits = f"int{n_bits}", n_bits
        self.levels = (self.name,)

    def _round(self, x):
        scale = x.float().abs().amax(-1, keepdim=True) / (2 ** (self.n_bits - 1) - 1)
        return ((x.float() / scale).round() * scale).to(x.dtype)

    def code(self, context, k, v, levels):
        if self.name in levels:
            bits = (self.n_bits + SCALE_BITS / k.shape[3]) * 2 * k.numel()
            yield self.name, self._round(k), self._round(v), bits
