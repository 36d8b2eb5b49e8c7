"""Codec profiles (*.cgp) as bytes: codec/FORMAT.md, "Profile". Writer and reader, numpy only.

The reader is for tools and tests: it checks structure and checksum and raises ValueError. What a server trusts is
read by codec/profile.c.
"""

import struct
from dataclasses import dataclass, field

import numpy as np

from .xxh3 import xxh3_64, xxh3_128

MAGIC = b"CGPF\r\n\x1a\n"
VERSIONS = (1, 2, 3, 4)  # that are read; 4 is written with a step for each block, else 3 with a joint matrix, else 2
HEADER_BYTES = 80
MAX_BYTES = 1 << 30  # of a file; readers refuse larger ones
N_LEVELS = 3  # the lossy ones
BLOCK_TOKENS = 8  # of the DCT
SCALE = 1 << 14  # frequencies of a class sum to it
MAX_SYMBOLS = 64
MAX_CLASSES = 256
MAX_SHIFT = 12
MAX_BITS = 15  # of a component's numbers
MAX_ELEMENT = 1 << 14  # of a basis, in magnitude
BAND = 32  # components that share a shift
MAX_BAND_SHIFT = 16
UNIT_BITS = range(8, 21)
EXACT_BITS = 9
MAX_ROPES = 4
MAX_INV_FREQ = 16.0
KLT_DCT, ANCHORS = (1, 1), (0, 2)  # transforms of channels and tokens
MAX_JOINT = 8192  # components of all groups together that a joint matrix may turn
MAX_FRACTION_BITS = 8
N_STEP_FACTORS = 7  # of a level's step, that blocks may have, in half octaves
OWN_STEP_FACTOR = N_STEP_FACTORS // 2  # the level's own step
STEP_FACTORS = (2.0 ** ((np.arange(N_STEP_FACTORS) - OWN_STEP_FACTOR) / 2)).astype(np.float32)
JOINT = (-1, 0)  # the joint matrix, where (group, matrix) is asked for
_HEADER = "<8sIIQ16sHHHBB16sBBBBHHHHBBBB"
DTYPES = {"bf16": 1, "fp16": 2, "fp32": 3}


def to_bf16_bits(x):
    """The bf16 numbers nearest to x, ties to even, as u16."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16_bits(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _n_exact(n_fine, n_components):
    """Components that an encoder takes out of its data before it projects on the others (codec/basis.h); n_fine: before
    the first of less than EXACT_BITS."""
    return min(-(-n_fine // 16) * 16, n_components)


def n_fine(bits):
    """Components before the first of less than EXACT_BITS."""
    coarse = np.flatnonzero(bits < EXACT_BITS)
    return int(coarse[0]) if len(coarse) else len(bits)


@dataclass
class Basis:
    """Components as rows of integers over the channels of a matrix: element = multiple * number * 2^(shift -
    unit_bits)."""

    unit_bits: int
    shift: np.ndarray  # u8 [n_bands], a band is BAND components
    bits: np.ndarray  # u8 [n_components], 2 to MAX_BITS
    multiple: np.ndarray  # u16 [n_components]
    numbers: np.ndarray  # s16 [n_components][N]

    @property
    def n_components(self):
        return len(self.numbers)

    @property
    def n_exact(self):
        return _n_exact(n_fine(self.bits), self.n_components)

    @property
    def is_bytes(self):
        """[n_bands]: the elements of a band are one byte each, which is cheaper to multiply with."""
        peak = self.multiple.astype(int) << (self.bits.astype(int) - 1)
        return np.array([peak[i : i + BAND].max() <= 128 for i in range(0, len(peak), BAND)], bool)

    def largest(self):
        """f64 [n_components]: what no element of a component exceeds."""
        peak = self.multiple * 2.0 ** (self.bits - 1.0)
        return peak * 2.0 ** (self._shifts() - float(self.unit_bits))

    def rows(self):
        """f32 [n_components][N], the elements: exact."""
        scale = self.multiple * 2.0 ** (self._shifts() - float(self.unit_bits))
        return (scale[:, None] * self.numbers).astype(np.float32)

    def _shifts(self):
        return np.repeat(self.shift, BAND)[: self.n_components].astype(int)

    def to_arrays(self):
        """The parts of the file."""
        parts = []
        for i, (bits, multiple, row) in enumerate(zip(self.bits, self.multiple, self.numbers)):
            if i % BAND == 0:
                parts.append(np.array([self.shift[i // BAND]], "u1"))
            one = (row.view(np.uint16)[:, None] >> np.arange(bits)) & 1
            parts += [np.array([bits], "u1"), np.array([multiple], "<u2"), np.packbits(one, bitorder="little")]
        return parts

    @classmethod
    def take(cls, cursor, n_components, unit_bits, n_channels):
        """From the file."""
        _require(unit_bits in UNIT_BITS, "unit_bits, or reserved bytes are set")
        shift, bits, multiple, numbers = [], [], [], np.zeros((n_components, n_channels), np.int16)
        for i in range(n_components):
            if i % BAND == 0:
                shift.append(cursor.number("u1"))
                _require(shift[-1] <= MAX_BAND_SHIFT, "shift of a band")
            bits.append(cursor.number("u1"))
            _require(2 <= bits[-1] <= MAX_BITS, "bits of a component")
            multiple.append(cursor.number("<u2"))
            _require(multiple[-1] >= 1 and multiple[-1] << (bits[-1] - 1) <= MAX_ELEMENT, "multiple of a component")
            numbers[i] = _take_numbers(cursor, bits[-1], n_channels)
        return cls(
            unit_bits, np.array(shift, np.uint8), np.array(bits, np.uint8), np.array(multiple, np.uint16), numbers
        )


@dataclass
class FloatBasis:
    """That of a file of version 1: the first components bf16, the others of few bits and a scale. It is only read."""

    wide: np.ndarray  # u16 [n_wide][N]
    bits: np.ndarray  # u8 [n_narrow], 2 to 12
    scale: np.ndarray  # f32 [n_narrow]
    narrow: np.ndarray  # s16 [n_narrow][N]

    @property
    def n_components(self):
        return len(self.wide) + len(self.narrow)

    @property
    def n_exact(self):
        return _n_exact(len(self.wide) + n_fine(self.bits), self.n_components)

    def rows(self):
        """f32 [n_components][N], the numbers that a decoder multiplies with."""
        narrow = self.scale[:, None] * self.narrow.astype(np.float32)
        return np.concatenate([from_bf16_bits(self.wide), from_bf16_bits(to_bf16_bits(narrow))])

    @classmethod
    def take(cls, cursor, n_components, n_wide, n_channels, is_packed):
        """From the file."""
        _require(n_wide <= n_components, "component counts")
        wide = cursor.take("<u2", n_wide, n_channels)
        bits, scale, narrow = [], [], np.zeros((n_components - n_wide, n_channels), np.int16)
        for i in range(n_components - n_wide):
            bits.append(cursor.number("u1") if is_packed else 8)
            _require(2 <= bits[-1] <= 12, "bits of a component")
            scale.append(cursor.take("<f4", 1)[0])
            narrow[i] = _take_numbers(cursor, bits[-1], n_channels)
        return cls(wide, np.array(bits, np.uint8), np.array(scale, np.float32), narrow)


def _take_numbers(cursor, bits, n):
    """s16 [n], of bits bits in two's complement, packed."""
    packed = cursor.take("u1", -(-n * bits // 8))
    one = np.unpackbits(packed, count=n * bits, bitorder="little").reshape(n, bits)
    return ((one.astype(np.int32) << np.arange(bits)).sum(1) - (one[:, -1].astype(np.int32) << bits)).astype(np.int16)


@dataclass
class Joint:
    """The KLT over the first components of all groups, which stand in the order [group][component]."""

    n_shared: int  # components of each group
    fraction_bits: list  # [level]
    basis: Basis  # [n_components][n_groups x n_shared]
    n_given: np.ndarray  # u16 [level][frequency]: components of each group that come from it
    class_of: list  # [level][frequency] u8 [n_active]


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
    basis: list  # [group][matrix] Basis; None: preset paper
    class_of: list  # [level][group][matrix][frequency] u8 [n_active] of own components; paper: of deltas, one frequency
    preset: str = "klt"
    anchor_step: np.ndarray = None  # f32 [n_layers][2][C]; with the next one: paper only
    anchor_class: list = None  # [group][matrix] u8 [N]
    refine: np.ndarray = None  # u16 [n_classes][3][2]: a level given the next coarser one; None: levels don't nest
    is_joined: bool = False  # a group's K and V are one matrix; otherwise one each
    joint: Joint = None  # without it all components of a group are its own
    # u8 [N_STEP_FACTORS][n_classes]: a column's class in blocks of a step factor; None: no steps by block
    class_at: np.ndarray = None
    query_mean: np.ndarray = None  # f32 [n_layers][n_query_heads][head_dim], of bf16 numbers; no heads: not known
    fingerprint: bytes = field(default=b"", compare=False)

    @property
    def n_matrices(self):
        """Of a group."""
        return 1 if self.is_joined else 2

    @property
    def n_shared(self):
        return self.joint.n_shared if self.joint else 0

    def columns(self, level, group, matrix):
        """[frequency] u8 [n_active] classes of a group's matrix, or of JOINT."""
        return self.joint.class_of[level] if (group, matrix) == JOINT else self.class_of[level][group][matrix]

    def n_active(self, level, group, matrix):
        return [len(c) for c in self.columns(level, group, matrix)]

    def to_bytes(self):
        """The file. Sets fingerprint. ValueError: it was read from a file of version 1, whose basis is none
        of integers."""
        if any(isinstance(b, FloatBasis) for matrices in self.basis or () for b in matrices):
            raise ValueError("profile: version 1 is not written")
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
        if self.class_at is not None:
            body += [np.asarray(self.class_at, "u1"), np.array([self.query_mean.shape[1]], "<u2")]
            body.append(to_bf16_bits(self.query_mean))
        body += self._klt_body() if self.anchor_step is None else self._paper_body()
        payload = b"".join(a if isinstance(a, bytes) else np.ascontiguousarray(a).tobytes() for a in body)
        n_bytes = HEADER_BYTES + len(payload) + 8
        rotary_dim, has_steps = 2 * self.inv_freq.shape[-1], self.class_at is not None
        rope = 0 if rotary_dim == 0 else 1 if n_ropes == 1 else 2
        head = struct.pack(
            _HEADER,
            MAGIC, 4 if has_steps else 3 if self.joint else 2, 0, n_bytes, self.model_fingerprint,
            self.n_layers, self.n_kv_heads, self.head_dim, DTYPES[self.dtype], 2,
            self.preset.encode(), *self._transforms(), rope, 0,
            rotary_dim, self.n_sinks, len(self.group_layers), len(self.classes), n_ropes if rope == 2 else 0,
            self.refine is not None, self.is_joined, has_steps and self.joint is not None,
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
        joint, body = self.joint, []
        bases = [b for matrices in self.basis for b in matrices]
        if joint:
            bases.insert(0, joint.basis)
            body.append(struct.pack("<H4B", joint.n_shared, *joint.fraction_bits, 0))
        counts = [struct.pack("<HBB", b.n_components, b.unit_bits, 0) for b in bases]
        if joint:
            counts.insert(1, np.asarray(joint.n_given, "<u2"))
        body += counts
        for level, of_groups in enumerate(self.class_of):
            for columns in ([joint.class_of[level]] if joint else []) + [c for matrices in of_groups for c in matrices]:
                body.append(np.array([len(c) for c in columns], "<u2"))
                body += [np.asarray(c, "u1") for c in columns]
        for b in bases:
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
     channel, token, rope, is_packed, rotary_dim, n_sinks, n_groups, n_classes, n_ropes, nests, is_joined, has_joint,
     ) = struct.unpack(_HEADER, data[:HEADER_BYTES])  # fmt: skip
    _require(version in VERSIONS, f"version {version} is not supported")
    _require(n_bytes == len(data), "its size is not the file's")
    _require(xxh3_64(data[:-8]) == struct.unpack("<Q", data[-8:])[0], "checksum is wrong")
    has_anchors = (channel, token) == ANCHORS
    _require(not reserved and nests <= (not has_anchors), "reserved bytes are set")
    _require(has_joint <= (version > 3), "reserved bytes are set")
    has_joint = bool(has_joint) or version == 3
    _require(is_packed <= (version == 1 and not has_anchors), "reserved bytes are set")
    _require(is_joined <= (version > 1 and not has_anchors), "reserved bytes are set")
    _require(version < 3 or not has_anchors, "this version is of preset klt alone")
    _require(not has_joint or (is_joined and n_groups > 1), "a joint matrix of one group, or planes apart")
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
    _require(not is_joined or (step[:, 0] == step[:, 1]).all(), "steps of K and V differ")
    _require(version == 1 or (np.abs(ropes) <= MAX_INV_FREQ).all(), "a rotation is too fast")
    classes = []
    for _ in range(n_classes):
        shift, n_symbols = cursor.take("u1", 2)
        freq = cursor.take("<u2", int(n_symbols))
        _require(shift <= MAX_SHIFT and 2 <= n_symbols <= MAX_SYMBOLS and n_symbols % 2 == 0, "a class")
        _require(freq.min() >= 1 and int(freq.astype(int).sum()) == SCALE, "frequencies of a class")
        classes.append(SymbolClass(int(shift), freq))
    refine = cursor.take("<u2", n_classes, 3, 2) if nests else None
    _require(
        not nests or (refine.min() >= 1 and refine.astype(int).sum(2).max() < SCALE), "frequencies of a refinement"
    )
    class_at = query_mean = None
    if version > 3:
        class_at = cursor.take("u1", N_STEP_FACTORS, n_classes)
        _require((class_at < n_classes).all(), "a class that is not there")
        n_heads = cursor.number("<u2")
        _require(n_heads % n_kv_heads == 0, "query heads are no multiple of KV heads")
        query_mean = from_bf16_bits(cursor.take("<u2", n_layers, n_heads, head_dim))
        _require(np.isfinite(query_mean).all(), "a mean query is not finite")
    anchor_class = joint = None
    if has_anchors:
        basis, (anchor_class, *class_of) = None, [
            [[cursor.take("u1", n * channels) for _ in range(2)] for n in group_layers] for _ in range(1 + N_LEVELS)
        ]  # fmt: skip
        _require(all((c < n_classes).all() for part in (anchor_class, *class_of) for both in part for c in both),
                 "a class that is not there")  # fmt: skip
        class_of = [[[[c] for c in both] for both in part] for part in class_of]
    else:
        sizes = [n * channels * (1 + is_joined) for n in group_layers]
        basis, class_of, joint = _read_klt(cursor, sizes, 2 - is_joined, n_classes, version, is_packed, has_joint)
    _require(cursor.at == len(cursor.data), "bytes are left over")
    return Profile(
        model, n_layers, n_kv_heads, head_dim, names[dtype], inv_freq, n_sinks, group_layers, step, mean, weight,
        classes, basis, class_of, preset.rstrip(b"\0").decode(), anchor_step, anchor_class, refine,
        bool(is_joined), joint, class_at, query_mean, xxh3_128(data),
    )  # fmt: skip


def _read_klt(cursor, sizes, n_matrices, n_classes, version, is_packed, has_joint):
    """sizes: channels of a matrix of each group."""
    joint, n_shared = None, 0
    if has_joint:
        joint, (n_joint, unit_bits) = _read_joint(cursor, len(sizes))
        n_shared = joint.n_shared
    counts = [[cursor.take("<u2", 2).tolist() for _ in range(n_matrices)] for _ in sizes]
    _require(all(n_shared <= one[0] <= size for of, size in zip(counts, sizes) for one in of), "component counts")
    class_of = []
    for level in range(N_LEVELS):
        if joint:
            columns = _read_columns(cursor, n_joint, n_classes)
            _require(
                not any(len(c) for c, n in zip(columns, joint.n_given[level]) if n == 0),
                "joint columns that give nothing",
            )
            joint.class_of.append(columns)
        class_of.append([[_read_columns(cursor, n - n_shared, n_classes) for n, _ in of] for of in counts])
    if joint:
        joint.basis = Basis.take(cursor, n_joint, unit_bits, len(sizes) * n_shared)
    if version == 1:
        basis = [[FloatBasis.take(cursor, *one, n, is_packed) for one in of] for of, n in zip(counts, sizes)]
    else:
        basis = [[Basis.take(cursor, *one, n) for one in of] for of, n in zip(counts, sizes)]
    return basis, class_of, joint


def _read_joint(cursor, n_groups):
    """(Joint without its basis and classes, its [n_components, unit_bits])"""
    n_shared, fraction_bits = cursor.number("<u2"), cursor.take("u1", N_LEVELS).tolist()
    _require(cursor.number("u1") == 0, "reserved bytes are set")
    _require(n_shared >= BAND and n_shared % BAND == 0 and n_groups * n_shared <= MAX_JOINT, "shared components")
    _require(max(fraction_bits) <= MAX_FRACTION_BITS, "fraction_bits")
    n_components, unit_bits = cursor.take("<u2", 2).tolist()
    _require(1 <= n_components <= n_groups * n_shared, "component counts")
    _require(unit_bits > max(fraction_bits), "unit_bits of the joint matrix")
    n_given = cursor.take("<u2", N_LEVELS, BLOCK_TOKENS)
    _require((n_given <= n_shared).all(), "more components are given than are shared")
    return Joint(n_shared, fraction_bits, None, n_given, []), (n_components, unit_bits)


def _read_columns(cursor, n_components, n_classes):
    """[frequency] u8 [n_active]"""
    n_active = cursor.take("<u2", BLOCK_TOKENS)
    _require((n_active <= n_components).all(), "more active components than there are")
    columns = [cursor.take("u1", int(n)) for n in n_active]
    _require(all((c < n_classes).all() for c in columns), "a class that is not there")
    return columns
