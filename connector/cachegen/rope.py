"""The rotation that a model applies to K, and its inverse. Kinds that are no fixed rotation of NeoX pairing are
refused.

The codec stores K without rotation: neighbouring tokens are alike there. inv_freq is what the engines compute (in f32),
widened; the profile carries it, so that a decoder knows nothing of rope kinds.

Surprises:
 1. YaRN and LongRoPE scale cos and sin, too. A factor passes through a rotation, so K without rotation has it, and the
    profile's means and weights are those of scaled K: nothing else needs to know it.
 2. Where transformers lets the length of a prompt choose the rotation (LongRoPE, dynamic NTK), vLLM chooses once, for
    all prompts. fix_rope() makes a configuration say what vLLM chooses, so that both compute the same.
 3. The positions of an image are no plain ones under mrope. K comes back all the same, since the rotation that was
    undone is done again, but it codes worse; so with a profile the vLLM plugin stores such prompts up to their first
    image.
"""

import json
import math
from dataclasses import dataclass, field

import torch

from . import Unsupported
from .profile_file import MAX_ROPES

KINDS = ("default", "linear", "llama3", "longrope", "yarn")
ROPE_IN_WINDOWS = ("exaone4", "exaone_moe", "afmoe")  # where some layers have a window, the others have no rope
OLDER_NAMES = {"mrope": "default", "su": "longrope"}  # mrope turns by plain positions where all tokens are text


@dataclass
class Rope:
    kind: str  # none, one of KINDS, by_layer
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


def text_config(config):
    """The part of a configuration that is of the language model."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _parameters(config):
    """The (name of the attribute, rope parameters) of a configuration: transformers 5 and 4 call it otherwise."""
    for name in ("rope_parameters", "rope_scaling"):
        if found := getattr(config, name, None):
            return name, found
    return "rope_parameters", {}


def _by_layer_type(found):
    """The parameters of each type of layer, as Gemma 3 has them; empty: one set is all layers'."""
    return {of: one for of, one in found.items() if isinstance(one, dict)}


def _kind(found):
    kind = found.get("rope_type") or found.get("type") or "default"
    return OLDER_NAMES.get(kind, kind)


def _original_length(config, found):
    """The length that a model was trained for before its rotation was stretched; None: not said."""
    name = "original_max_position_embeddings"
    return found.get(name) or getattr(config, name, None)


def longest_prompt(config):
    """Tokens of the longest prompt that vLLM takes for a model as its configuration is; inf: it does not say."""
    rope = _parameters(config)[1]
    factor = rope.get("factor") if _kind(rope) in ("linear", "dynamic") else None  # other kinds have counted it in
    names = ("max_position_embeddings", "max_seq_len")  # the other one is MPT's
    n_tokens = next((found for name in names if (found := getattr(config, name, None))), None)
    return int(n_tokens * (factor or 1)) if n_tokens else math.inf


def longrope_factors(config, max_model_len=None):
    """"long" or "short": which of LongRoPE's factors vLLM takes for a model of this length (None: for the length that
    it takes when it is not told one); None: no layer has LongRoPE."""
    found = _parameters(config)[1]
    for one in [*_by_layer_type(found).values()] or [found]:
        if _kind(one) == "longrope":
            by_default = getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
            original = _original_length(config, one) or config.max_position_embeddings
            return "long" if (max_model_len or by_default) > original else "short"
    return None


def rope_deviations(config, max_model_len):
    """What the length of an engine's prompts changes in the rotation, compared to an engine that is not told any; a
    part of what model_fingerprint() takes. Empty: nothing."""
    factors = longrope_factors(config, max_model_len)
    return {"longrope": factors} if factors != longrope_factors(config) else {}


def fix_rope(config, max_model_len=None):
    """Makes a transformers configuration turn K as vLLM does, the same way whatever the length of a prompt."""
    name, found = _parameters(config)
    which = longrope_factors(config, max_model_len)
    if by_type := _by_layer_type(found):
        setattr(config, name, {of: _fixed(config, one, which) for of, one in by_type.items()})
    elif found:
        setattr(config, name, _fixed(config, found, which))


def _fixed(config, found, which):
    kind, found = _kind(found), dict(found)
    if kind == "longrope":
        found["short_factor"] = found["long_factor"] = found[f"{which}_factor"]
        if (scale := found.get(f"{which}_mscale")) is not None:  # vLLM's name for it
            found["attention_factor"] = scale
    elif kind == "dynamic":  # vLLM takes the longest prompt for every prompt's length
        theta, head_dim = _theta(config, found), _head_dim(config)
        rotary_dim = int(head_dim * _partial(config, found))
        stretch = found.get("alpha")
        if stretch is None:
            longest = config.max_position_embeddings
            stretch = found["factor"] * longest / found.get("max_trained_positions", longest) - (found["factor"] - 1)
        theta *= stretch ** (rotary_dim / (rotary_dim - 2))
        found = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": _partial(config, found)}
    return found


def _head_dim(config):
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _theta(config, found):
    return found.get("rope_theta") or getattr(config, "rope_theta", None)


def _partial(config, found):
    return found.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0


def rope_of(config, head_dim):
    """The Rope of a transformers configuration that fix_rope() has seen. Unsupported: a kind that this version
    refuses."""
    if getattr(config, "alibi", False):  # Falcon's has rope parameters all the same
        return NO_ROPE
    found = _parameters(config)[1]
    if by_type := _by_layer_type(found):
        if missing := set(config.layer_types) - by_type.keys():
            raise Unsupported(f"layers of the kind {', '.join(sorted(missing))}, without rope parameters")
        return _by_layer([_rope_of_parameters(config, by_type[kind], head_dim) for kind in config.layer_types])
    rope = _rope_of_parameters(config, found, head_dim)
    rotated = getattr(config, "no_rope_layers", None)  # SmolLM3's: 1 for layers that have one
    if getattr(config, "model_type", None) in ROPE_IN_WINDOWS and config.sliding_window:
        rotated = [kind == "sliding_attention" for kind in config.layer_types]
    return _by_layer([rope if has else NO_ROPE for has in rotated]) if rotated else rope


def _rope_of_parameters(config, found, head_dim):
    """From the spellings of transformers 4 and 5."""
    kind, theta = _kind(found), _theta(config, found)
    if theta is None:
        if getattr(config, "rotary_dim", None):
            raise Unsupported(f"interleaved rope of {config.rotary_dim} dimensions (GPT-J, CodeGen): only NeoX pairing")
        return NO_ROPE
    if kind not in KINDS:
        raise Unsupported(f'rope kind "{kind}" (supported: {", ".join(KINDS)}, dynamic, mrope)')
    rotary_dim = int(head_dim * _partial(config, found))
    if rotary_dim % 2:
        raise Unsupported(f"an odd rotary dimension ({rotary_dim})")
    rest = {**found, "original_max_position_embeddings": _original_length(config, found)}
    if kind == "longrope":
        if found["short_factor"] != found["long_factor"]:
            raise Unsupported("LongRoPE whose factors are not chosen yet")
        rest["factors"] = list(found["short_factor"])
    if kind == "yarn":  # without it, as transformers has it
        rest["original_max_position_embeddings"] = _original_length(config, found) or config.max_position_embeddings
    try:
        return _rope(kind, rotary_dim, float(theta), rest)
    except (KeyError, TypeError, ValueError) as e:
        raise Unsupported(f'the parameters of rope kind "{kind}" ({type(e).__name__}: {e})') from e


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
    elif kind == "longrope":
        scaling = {"factors": [float(factor) for factor in rest["factors"]]}
        if len(scaling["factors"]) != len(inv):
            raise ValueError(f"{len(scaling['factors'])} factors for {len(inv)} rotations")
        inv = inv / torch.tensor(scaling["factors"])
    elif kind == "yarn":
        scaling = {name: rest[name] for name in ("factor", "original_max_position_embeddings")}
        scaling |= {name: default if rest.get(name) is None else rest[name] for name, default in YARN_DEFAULTS.items()}
        inv = _yarn(inv, rotary_dim, theta, *scaling.values())
    elif kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        scaling = {name: rest[name] for name in names}
        inv = _llama3(inv, *scaling.values())
    return Rope(kind, rotary_dim, inv.double(), theta, scaling)


YARN_DEFAULTS = {"beta_fast": 32, "beta_slow": 1, "truncate": True}


def _yarn(inv, rotary_dim, theta, factor, length, beta_fast, beta_slow, truncate):
    """Fast rotations stay, slow ones are slowed by factor, those between go over linearly (arXiv:2309.00071)."""
    def dim_of(n_turns):  # that turns so often within length
        return rotary_dim * math.log(length / (n_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(beta_fast), dim_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    high += 0.001 if low == high else 0
    slowed = ((torch.arange(len(inv)).float() - low) / (high - low)).clamp(0, 1)
    return inv / factor * slowed + inv * (1 - slowed)


def _llama3(inv, factor, low, high, length):
    wave = 2 * math.pi / inv
    smooth = (length / wave - low) / (high - low)
    middle = (1 - smooth) * inv / factor + smooth * inv
    return torch.where(wave > length / low, inv / factor, torch.where(wave < length / high, inv, middle))
