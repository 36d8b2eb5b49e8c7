"""The rotation that a model applies to K, and its inverse. Kinds that are no fixed rotation of NeoX pairing are
refused.

The codec stores K without rotation: neighbouring tokens are alike there. inv_freq is what the engines compute (in f32),
widened; the profile carries it, so that a decoder knows nothing of rope kinds.
"""

import json
import math
from dataclasses import dataclass, field

import torch

from .profile_file import MAX_ROPES

KINDS = ("default", "linear", "llama3")


class Unsupported(Exception):
    """A model that this version refuses; the text names what it has."""


@dataclass
class Rope:
    kind: str  # none, default, linear, llama3, by_layer
    rotary_dim: int
    inv_freq: torch.Tensor  # f64 [rotary_dim / 2]; kind by_layer: [n_layers][rotary_dim / 2]
    theta: float = 0.0
    scaling: dict = field(default_factory=dict)

    def as_json(self):
        kind = {"kind": self.kind, "theta": self.theta, "rotary_dim": self.rotary_dim, "pairing": "neox"}
        return {**kind, **self.scaling}

    def rotate(self, k, positions, inverse=False):
        """k f32 [...][n_tokens][n_kv_heads][head_dim] ([n_layers][n_tokens]... where layers differ), rotated; positions
        [n_tokens]."""
        if not self.rotary_dim:
            return k
        angle = positions.double()[:, None] * self.inv_freq.to(positions.device).unsqueeze(-2)
        cos, sin = angle.cos().float().unsqueeze(-2), angle.sin().float().unsqueeze(-2)
        if inverse:
            sin = -sin
        half = self.rotary_dim // 2
        a, b, rest = k[..., :half], k[..., half : 2 * half], k[..., 2 * half :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def pair_mean(self, x):
        """x [...][head_dim], averaged over the two dimensions of each rotated pair."""
        half = self.rotary_dim // 2
        if not half:
            return x
        mean = (x[..., :half] + x[..., half : 2 * half]) / 2
        return torch.cat([mean, mean, x[..., 2 * half :]], -1)


NO_ROPE = Rope("none", 0, torch.zeros(0, dtype=torch.float64))


def _by_layer(ropes):
    """One Rope of each layer's; layers without rotation are turned by no angle."""
    if all(rope.as_json() == ropes[0].as_json() for rope in ropes):
        return ropes[0]
    dims = {rope.rotary_dim for rope in ropes if rope.rotary_dim}
    tables = {json.dumps(rope.as_json()) for rope in ropes}
    if len(dims) > 1 or len(tables) > MAX_ROPES:
        raise Unsupported(f"layers of {len(tables)} ropes with rotary dimensions {sorted(dims)}")
    rotary_dim = dims.pop()
    still = torch.zeros(rotary_dim // 2, dtype=torch.float64)
    inv_freq = torch.stack([rope.inv_freq if rope.rotary_dim else still for rope in ropes])
    return Rope("by_layer", rotary_dim, inv_freq, scaling={"layers": [rope.as_json() for rope in ropes]})


def rope_of(config, head_dim):
    """The Rope of a transformers configuration. Unsupported: a kind that this version refuses."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if found and all(isinstance(value, dict) for value in found.values()):  # by layer type, as Gemma 3
        return _by_layer([_rope_of_parameters(config, found[kind], head_dim) for kind in config.layer_types])
    rope = _rope_of_parameters(config, found, head_dim)
    rotated = getattr(config, "no_rope_layers", None)  # SmolLM3's: 1 for layers that have one
    return _by_layer([rope if has else NO_ROPE for has in rotated]) if rotated else rope


def _rope_of_parameters(config, found, head_dim):
    """From the spellings of transformers 4 and 5."""
    rest = dict(found)
    kind = rest.pop("rope_type", None) or rest.pop("type", None) or "default"
    rest.pop("type", None)
    theta = rest.pop("rope_theta", None) or getattr(config, "rope_theta", None)
    partial = rest.pop("partial_rotary_factor", None) or getattr(config, "partial_rotary_factor", None) or 1.0
    if theta is None:
        return NO_ROPE
    if kind not in KINDS:
        raise Unsupported(f'rope kind "{kind}" (supported: {", ".join(KINDS)})')
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2:
        raise Unsupported(f"an odd rotary dimension ({rotary_dim})")
    return _rope(kind, rotary_dim, float(theta), rest)


def rope_from_json(found):
    """The Rope that as_json() described. Unsupported: it describes none that this version knows."""
    try:
        if found["kind"] == "none":
            return NO_ROPE
        if found["kind"] == "by_layer":
            return _by_layer([rope_from_json(of_layer) for of_layer in found["layers"]])
        if found["kind"] in KINDS and found["pairing"] == "neox":
            return _rope(found["kind"], found["rotary_dim"], found["theta"], found)
    except (KeyError, TypeError, ValueError):
        pass
    raise Unsupported(f"the rope {found}")


def _rope(kind, rotary_dim, theta, rest):
    inv = 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim)
    scaling = {}
    if kind == "linear":
        scaling = {"factor": rest["factor"]}
        inv = inv / rest["factor"]
    elif kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        scaling = {name: rest[name] for name in names}
        factor, low, high, length = (rest[name] for name in names)
        wave = 2 * math.pi / inv
        smooth = (length / wave - low) / (high - low)
        middle = (1 - smooth) * inv / factor + smooth * inv
        inv = torch.where(wave > length / low, inv / factor, torch.where(wave < length / high, inv, middle))
    return Rope(kind, rotary_dim, inv.double(), theta, scaling)
