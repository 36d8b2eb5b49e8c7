"""What is compared: cgtool's levels from real files, CacheGen's published quantizer and plain integers from estimates.

A codec's code(context, k, v, levels) yields (level, k, v, bits) for each of its levels that is in levels: K and V
[n_layers][n_tokens][n_kv_heads][head_dim] of the model's dtype, K rotated, as a reader of the bits would get them.
"""

import os
import subprocess
import tempfile

import torch
from safetensors.torch import load_file, save_file

SCALE_BITS = 16
LOSSY = ("L1", "L2", "L3")


class Chunks:
    """Files of cgtool in chunks of 256 tokens; every byte of them counts. Without a profile: L0."""

    def __init__(self, name, cgtool, fingerprint, profile=None):
        self.name, self.cgtool, self.profile = name, cgtool, profile
        self.levels = LOSSY if profile else ("L0",)
        self.about = ["--profile", profile] if profile else []
        self.about_encode = self.about or ["--model-fingerprint", fingerprint]

    def _run(self, *arguments):
        done = subprocess.run([self.cgtool, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise RuntimeError(f"cgtool {' '.join(arguments)}: {done.stderr}")

    def code(self, context, k, v, levels):
        with tempfile.TemporaryDirectory() as work:
            tokens = context.ids[: context.n].to(torch.int32).contiguous()
            save_file({"K": k.contiguous(), "V": v.contiguous(), "tokens": tokens}, f"{work}/kv.st")
            for level in self.levels:
                if level not in levels:
                    continue
                coded, decoded = f"{work}/{level}", f"{work}/{level}.st"
                self._run("encode", "--level", level, *self.about_encode, f"{work}/kv.st", coded)
                self._run("decode", *self.about, coded, decoded)
                files = [entry.path for entry in os.scandir(coded)] if os.path.isdir(coded) else [coded]
                tensors = load_file(decoded)
                yield level, tensors["K"], tensors["V"], 8 * sum(map(os.path.getsize, files))


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
