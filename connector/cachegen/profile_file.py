"""Codec profiles (*.cgp) as bytes: codec/FORMAT.md, "Profile". Writer and reader, numpy only.

The reader is for tools and tests: it checks structure and checksum and raises ValueError. What a server trusts is
read by codec/profile.c.
"""

import struct
from dataclasses import dataclass, field

import numpy as np

from .xxh3 import xxh3_64, xxh3_128

MAGIC = b"CGPF\r\n\x1a\n"
VERSION = 1
HEADER_BYTES = 80
N_LEVELS = 3  # the lossy ones
BLOCK_TOKENS = 8  # of the DCT
SCALE = 1 << 14  # frequencies of a class sum to it
MAX_SYMBOLS = 64
MAX_CLASSES = 256
MAX_SHIFT = 12
MAX_NARROW_BITS = 12
EXACT_BITS = 9
MAX_ROPES = 4
KLT_DCT, ANCHORS = (1, 1), (0, 2)  # transforms of channels and tokens
DTYPES = {"bf16": 1, "fp16": 2, "fp32": 3}


def to_bf16_bits(x):
    """The bf16 numbers nearest to x, ties to even, as u16."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16_bits(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def n_fine(n_wide, bits):
    """Components before the first of less than EXACT_BITS; bits u8: of those behind the wide ones."""
    coarse = np.flatnonzero(bits < EXACT_BITS)
    return n_wide + (int(coarse[0]) if len(coarse) else len(bits))


@dataclass
class Basis:
    """Components as rows over the channels of a layer group: the first ones bf16, the others of few bits and a scale."""

    wide: np.ndarray  # u16 [n_wide][N]
    bits: np.ndarray  # u8 [n_narrow], 2 to MAX_NARROW_BITS
    scale: np.ndarray  # f32 [n_narrow]
    narrow: np.ndarray  # s16 [n_narrow][N]

    @property
    def n_components(self):
        return len(self.wide) + len(self.narrow)

    @property
    def n_exact(self):
        """Components that an encoder takes out of its data before it projects on the others (codec/basis.h)."""
        return min(-(-n_fine(len(self.wide), self.bits) // 16) * 16, self.n_components)

    def rows(self):
        """f32 [n_components][N], the numbers that a decoder multiplies with."""
        narrow = self.scale[:, None] * self.narrow.astype(np.float32)
        return np.concatenate([from_bf16_bits(self.wide), from_bf16_bits(to_bf16_bits(narrow))])

    def to_arrays(self):
        """The parts of the file."""
        parts = [np.asarray(self.wide, "<u2")]
        for bits, scale, row in zip(self.bits, self.scale, self.narrow):
            one = (row.view(np.uint16)[:, None] >> np.arange(bits)) & 1
            parts += [np.array([bits], "u1"), np.array([scale], "<f4"), np.packbits(one, bitorder="little")]
        return parts

    @classmethod
    def take(cls, cursor, n_components, n_wide, n_channels, is_packed):
        """From the file."""
        wide = cursor.take("<u2", n_wide, n_channels)
        bits, scale, narrow = [], [], []
        for _ in range(n_components - n_wide):
            bits.append(cursor.number("u1") if is_packed else 8)
            _require(2 <= bits[-1] <= MAX_NARROW_BITS, "bits of a component")
            scale.append(cursor.take("<f4", 1)[0])
            packed = cursor.take("u1", -(-n_channels * bits[-1] // 8))
            one = np.unpackbits(packed, count=n_channels * bits[-1], bitorder="little").reshape(n_channels, bits[-1])
            value = (one.astype(np.int32) << np.arange(bits[-1])).sum(1) - (one[:, -1].astype(np.int32) << bits[-1])
            narrow.append(value.astype(np.int16))
        shape = (len(narrow), n_channels)
        return cls(wide, np.array(bits, np.uint8), np.array(scale, np.float32), np.array(narrow, np.int16).reshape(shape))


@dataclass
class SymbolClass:
    shift: int
    freq: np.ndarray  # u16 [n_symbols]: values 0, +1, -1, +2, -2 ..., last the escape


@dataclass
class Profile:
    model_fingerprint: bytes
    n_layers: int
    n_kv_heads: int
    head_dim: int
    dtype: str
    inv_freq: np.ndarray  # f64 [rotary_dim / 2]; [n_layers][rotary_dim / 2] where layers differ; empty: no rope
    n_sinks: int
    group_layers: list
    step: np.ndarray  # f32 [3][2]
    mean: np.ndarray  # f32 [n_layers][2][C]
    weight: np.ndarray  # f32 [n_layers][2][C]
    classes: list  # SymbolClass
    basis: list  # [group][plane] Basis; None: preset paper
    class_of: list  # [level][group][plane][frequency] u8 [n_active]; paper: of its deltas, one frequency
    preset: str = "klt"
    anchor_step: np.ndarray = None  # f32 [n_layers][2][C]; with the next one: paper only
    anchor_class: list = None  # [group][plane] u8 [N]
    refine: np.ndarray = None  # u16 [n_classes][3][2]: a level given the next coarser one; None: levels don't nest
    fingerprint: bytes = field(default=b"", compare=False)

    def n_active(self, level, group, plane):
        return [len(c) for c in self.class_of[level][group][plane]]

    def to_bytes(self):
        """The file. Sets fingerprint."""
        ropes, layer_rope = np.asarray(self.inv_freq, "<f8")[None], None
        if self.inv_freq.ndim == 2:
            ropes, layer_rope = np.unique(ropes[0], axis=0, return_inverse=True)
        n_ropes = len(ropes)
        assert n_ropes <= MAX_ROPES
        body = [ropes, np.asarray(layer_rope if n_ropes > 1 else [], "u1"), np.asarray(self.group_layers, "<u2")]
        channels = [a for a in (self.mean, self.weight, self.anchor_step) if a is not None]
        body += [np.asarray(a, "<f4") for a in (self.step, *channels)]
        for c in self.classes:
            body += [np.array([c.shift, len(c.freq)], "u1"), np.asarray(c.freq, "<u2")]
        body += [] if self.refine is None else [np.asarray(self.refine, "<u2")]
        body += self._klt_body() if self.anchor_step is None else self._paper_body()
        payload = b"".join(np.ascontiguousarray(a).tobytes() for a in body)
        n_bytes = HEADER_BYTES + len(payload) + 8
        rotary_dim = 2 * self.inv_freq.shape[-1]
        rope = 0 if rotary_dim == 0 else 1 if n_ropes == 1 else 2
        head = struct.pack(
            "<8sIIQ16sHHHBB16sBBBBHHHHBBH",
            MAGIC, VERSION, 0, n_bytes, self.model_fingerprint,
            self.n_layers, self.n_kv_heads, self.head_dim, DTYPES[self.dtype], 2,
            self.preset.encode(), *self._transforms(), rope, self.anchor_step is None,
            rotary_dim, self.n_sinks, len(self.group_layers), len(self.classes), n_ropes if rope == 2 else 0,
            self.refine is not None, 0,
        )  # fmt: skip
        assert len(head) == HEADER_BYTES
        data = head + payload
        data += struct.pack("<Q", xxh3_64(data))
        self.fingerprint = xxh3_128(data)
        return data

    def _transforms(self):
        """Of channels and of tokens."""
        return KLT_DCT if self.anchor_step is None else ANCHORS

    def _klt_body(self):
        body = []
        for planes in self.basis:
            body += [np.array([b.n_components, len(b.wide)], "<u2") for b in planes]
        for level in self.class_of:
            for planes in level:
                for columns in planes:
                    body.append(np.array([len(c) for c in columns], "<u2"))
                    body += [np.asarray(c, "u1") for c in columns]
        for planes in self.basis:
            for b in planes:
                body += b.to_arrays()
        return body

    def _paper_body(self):
        body = [np.asarray(classes, "u1") for planes in self.anchor_class for classes in planes]
        return body + [np.asarray(runs[0], "u1") for level in self.class_of for planes in level for runs in planes]


class _Cursor:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, kind, *shape):
        kind = np.dtype(kind)
        n_bytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        if n_bytes > len(self.data) - self.at:
            raise ValueError("profile: ends early")
        part = np.frombuffer(self.data, kind, n_bytes // kind.itemsize, self.at).reshape(shape)
        self.at += n_bytes
        return part

    def number(self, kind):
        return int(self.take(kind, 1)[0])


def _require(condition, what):
    if not condition:
        raise ValueError(f"profile: {what}")


def read_profile(data):
    """A Profile from the bytes of a file."""
    _require(data[:8] == MAGIC, "not a profile")
    _require(len(data) >= HEADER_BYTES + 8, "ends early")
    (_, version, reserved, n_bytes, model, n_layers, n_kv_heads, head_dim, dtype, n_planes, preset,
     channel, token, rope, is_packed, rotary_dim, n_sinks, n_groups, n_classes, n_ropes, nests, more) = struct.unpack(
        "<8sIIQ16sHHHBB16sBBBBHHHHBBH", data[:HEADER_BYTES])  # fmt: skip
    _require(version == VERSION, f"version {version} is not supported")
    _require(n_bytes == len(data), "its size is not the file's")
    _require(xxh3_64(data[:-8]) == struct.unpack("<Q", data[-8:])[0], "checksum is wrong")
    has_anchors = (channel, token) == ANCHORS
    _require(not (reserved or more) and nests <= (not has_anchors), "reserved bytes are set")
    _require(is_packed <= (not has_anchors), "reserved bytes are set")
    _require(n_planes == 2 and (has_anchors or (channel, token) == KLT_DCT), "unknown transform")
    _require(rope in (0, 1, 2) and not (has_anchors and rope), "unknown rope")
    _require(2 <= n_ropes <= MAX_ROPES if rope == 2 else n_ropes == 0, "number of rope tables")
    _require(rotary_dim % 2 == 0 and rotary_dim <= head_dim and bool(rotary_dim) == bool(rope), "rotary_dim")
    _require(n_sinks <= 8 and 1 <= n_classes <= MAX_CLASSES, "n_sinks or n_classes")
    names = {number: name for name, number in DTYPES.items()}
    _require(dtype in names, "unknown dtype")
    channels = n_kv_heads * head_dim
    cursor = _Cursor(data[:-8])
    cursor.at = HEADER_BYTES
    ropes = cursor.take("<f8", max(n_ropes, 1), rotary_dim // 2)
    layer_rope = cursor.take("u1", n_layers) if n_ropes else 0
    _require(np.all(layer_rope < len(ropes)), "a rope table that is not there")
    inv_freq = ropes[layer_rope]
    group_layers = [int(n) for n in cursor.take("<u2", n_groups)]
    _require(sum(group_layers) == n_layers and all(group_layers), "groups do not sum to the layers")
    step = cursor.take("<f4", N_LEVELS, 2)
    mean = cursor.take("<f4", n_layers, 2, channels)
    weight = cursor.take("<f4", n_layers, 2, channels)
    anchor_step = cursor.take("<f4", n_layers, 2, channels) if has_anchors else None
    _require(not has_anchors or (anchor_step > 0).all(), "a step of anchors is not positive")
    _require((step > 0).all() and (weight > 0).all(), "a step or weight is not positive")
    classes = []
    for _ in range(n_classes):
        shift, n_symbols = cursor.take("u1", 2)
        freq = cursor.take("<u2", int(n_symbols))
        _require(shift <= MAX_SHIFT and 2 <= n_symbols <= MAX_SYMBOLS and n_symbols % 2 == 0, "a class")
        _require(freq.min() >= 1 and int(freq.astype(int).sum()) == SCALE, "frequencies of a class")
        classes.append(SymbolClass(int(shift), freq))
    refine = cursor.take("<u2", n_classes, 3, 2) if nests else None
    _require(not nests or (refine.min() >= 1 and refine.astype(int).sum(2).max() < SCALE), "frequencies of a refinement")
    anchor_class = None
    if has_anchors:
        basis, (anchor_class, *class_of) = None, [
            [[cursor.take("u1", n * channels) for _ in range(2)] for n in group_layers] for _ in range(1 + N_LEVELS)
        ]  # fmt: skip
        _require(all((c < n_classes).all() for part in (anchor_class, *class_of) for both in part for c in both),
                 "a class that is not there")  # fmt: skip
        class_of = [[[[c] for c in both] for both in part] for part in class_of]
    else:
        basis, class_of = _read_klt(cursor, group_layers, channels, n_classes, is_packed)
    _require(cursor.at == len(cursor.data), "bytes are left over")
    return Profile(
        model, n_layers, n_kv_heads, head_dim, names[dtype], inv_freq, n_sinks, group_layers, step, mean, weight,
        classes, basis, class_of, preset.rstrip(b"\0").decode(), anchor_step, anchor_class, refine, xxh3_128(data),
    )  # fmt: skip


def _read_klt(cursor, group_layers, channels, n_classes, is_packed):
    n_groups = len(group_layers)
    counts = cursor.take("<u2", n_groups, 2, 2)
    class_of = []
    for _ in range(N_LEVELS):
        level = []
        for g in range(n_groups):
            planes = []
            for p in range(2):
                n_active = cursor.take("<u2", BLOCK_TOKENS)
                _require((n_active <= counts[g, p, 0]).all(), "more active components than there are")
                planes.append([cursor.take("u1", int(n)) for n in n_active])
                _require(all((c < n_classes).all() for c in planes[-1]), "a class that is not there")
            level.append(planes)
        class_of.append(level)
    basis = []
    for g in range(n_groups):
        planes = []
        for p in range(2):
            n_components, n_wide = (int(n) for n in counts[g, p])
            n_channels = group_layers[g] * channels
            _require(n_wide <= n_components <= n_channels, "component counts")
            planes.append(Basis.take(cursor, n_components, n_wide, n_channels, is_packed))
        basis.append(planes)
    return basis, class_of
