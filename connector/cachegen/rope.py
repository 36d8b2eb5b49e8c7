"""The rotation that a model applies to K, and its inverse. Kinds that are no fixed rotation of NeoX pairing are
refused.

The codec stores K without rotation: neighbouring tokens are alike there. inv_freq is what the engines compute (in f32),
widened; the profile carries it, so that a decoder knows nothing of rope kinds.
"""

import math
from dataclasses import dataclass, field

import torch

KINDS = ("default", "linear", "llama3")


class Unsupported(Exception):
    """A model that this version refuses; the text names what it has."""


@dataclass
class Rope:
    kind: str  # none, default, linear, llama3
    rotary_dim: int
    inv_freq: torch.Tensor  # f64 [rotary_dim / 2]
    theta: float = 0.0
    scaling: dict = field(default_factory=dict)

    def as_json(self):
        kind = {"kind": self.kind, "theta": self.theta, "rotary_dim": self.rotary_dim, "pairing": "neox"}
        return {**kind, **self.scaling}

    def rotate(self, k, positions, inverse=False):
        """k f32 [...][n_tokens][n_kv_heads][head_dim], rotated; positions [n_tokens]."""
        if not self.rotary_dim:
            return k
        angle = torch.outer(positions.double(), self.inv_freq.to(positions.device))
        cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
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


def _parameters(config):
    """kind, theta, partial factor and the rest, from the spellings of transformers 4 and 5."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if found and all(isinstance(value, dict) for value in found.values()):
        raise Unsupported(f"rope parameters by layer type ({', '.join(sorted(found))})")
    found = dict(found)
    kind = found.pop("rope_type", None) or found.pop("type", None) or "default"
    found.pop("type", None)
    theta = found.pop("rope_theta", None) or getattr(config, "rope_theta", None)
    partial = found.pop("partial_rotary_factor", None) or getattr(config, "partial_rotary_factor", None) or 1.0
    return kind, theta, partial, found


def rope_of(config, head_dim):
    """The Rope of a transformers configuration. Unsupported: a kind that this version refuses."""
    kind, theta, partial, rest = _parameters(config)
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
    if found == NO_ROPE.as_json():
        return NO_ROPE
    try:
        if found["kind"] in KINDS and found["pairing"] == "neox":
            return _rope(found["kind"], found["rotary_dim"], found["theta"], found)
    except (KeyError, TypeError):
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
