#!/usr/bin/env python3
"""A second, slow reader of chunks and profiles, written from codec/FORMAT.md alone: a check on that document.

usage: reader.py DIRECTORY    decodes every *.kv of it (with its profile.cgp) and compares with the *.raw beside it:
                              within the tolerance of versions 1 and 2, bit by bit from version 3 on
                              (with its scales.f32, [n_layers][2], if there is one)
       reader.py --profile P.cgp CHUNK.kv OUT.raw

Needs numpy; exits 77 without (ctest: skipped). Checksums and keys are checked where the package xxhash is installed.
"""

import math
import os
import struct
import sys
from fractions import Fraction

try:
    import numpy as np
except ImportError:
    print("SKIP: no numpy: golden files not read by the second reader")
    sys.exit(77)
try:
    import xxhash
except ImportError:
    xxhash = None

BF16, FP16, FP32, E4M3, E5M2 = 1, 2, 3, 4, 5
ELEMENT_BYTES = {BF16: 2, FP16: 2, FP32: 4, E4M3: 1, E5M2: 1}
SPLITS = {BF16: (8, 7, 1, 0), FP16: (5, 10, 1, 3), FP32: (8, 23, 3, 0), E4M3: (4, 3, 0, 4), E5M2: (5, 2, 0, 3)}
LANES = 32
JOINT = ("joint", 0)  # in the place of a group and matrix
STEP_FACTORS = np.array([2.0 ** ((i - 3) / 2) for i in range(7)], np.float32)  # of a block's step


class Corrupt(Exception):
    pass


def require(condition, what):
    if not condition:
        raise Corrupt(what)


class Fields:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, layout):
        values = struct.unpack_from("<" + layout, self.data, self.at)
        self.at += struct.calcsize("<" + layout)
        return values if len(values) > 1 else values[0]

    def array(self, dtype, count):
        values = np.frombuffer(self.data, dtype, count, self.at)
        self.at += values.nbytes
        return values

    def left(self):
        return len(self.data) - self.at


# --- matrix of symbols ------------------------------------------------------------------------------------------------


class Class:
    def __init__(self, shift, freq):
        require(2 <= len(freq) <= 64 and min(freq) >= 1 and sum(freq) == 1 << 14, "frequencies")
        self.shift, self.freq = shift, freq
        self.cum = np.concatenate(([0], np.cumsum(freq))).tolist()
        self.refine = None  # by context: a Class of 0, away and back
        self.at_scale = [self] * 7  # the class that its columns have in blocks of a scale

    def find(self, slot):
        for i in range(len(self.freq)):
            if self.cum[i] <= slot < self.cum[i + 1]:
                return i
        raise AssertionError


class Stream:
    def __init__(self, data):
        require(len(data) >= 4 * LANES and len(data) % 2 == 0, "stream size")
        self.state = list(struct.unpack_from("<32I", data))
        require(all(x >= 1 << 16 for x in self.state), "lane state")
        self.words = np.frombuffer(data, "<u2", -1, 4 * LANES).tolist()
        self.next = 0

    def renormalize(self, lane):
        if self.state[lane] < 1 << 16:
            require(self.next < len(self.words), "stream ends early")
            self.state[lane] = (self.state[lane] << 16) + self.words[self.next]
            self.next += 1

    def symbol(self, lane, cls):
        x = self.state[lane]
        slot = x % (1 << 14)
        i = cls.find(slot)
        self.state[lane] = cls.freq[i] * (x >> 14) + slot - cls.cum[i]
        self.renormalize(lane)
        return i

    def raw(self, lane, n):
        value = self.state[lane] & ((1 << n) - 1)
        self.state[lane] >>= n
        self.renormalize(lane)
        return value

    def finish(self):
        require(self.next == len(self.words), "words left over")
        require(all(x == 1 << 16 for x in self.state), "final state")


def signed_value(i):
    return (i + 1) // 2 if i % 2 else -i // 2


def decode_row(stream, classes, top):
    """One row of one strip: the values of its lanes. top: None for symbols, else each class's top exponent."""
    lanes = range(len(classes))
    index = [stream.symbol(lane, classes[lane]) for lane in lanes]
    escaped = [lane for lane in lanes if index[lane] == len(classes[lane].freq) - 1]
    value = [signed_value(index[lane]) if top is None else top[lane] - index[lane] for lane in lanes]
    if top is None:
        head = {lane: stream.raw(lane, 5) for lane in escaped}
        for lane in escaped:
            n = head[lane] & 15
            m = (1 << n) + (stream.raw(lane, n) if n > 0 else 0)
            v = (len(classes[lane].freq) - 2) // 2 + m
            value[lane] = -v if head[lane] & 16 else v
    else:
        for lane in escaped:
            value[lane] = stream.raw(lane, 8)
        require(min(value) >= 0, "exponent")
    for lane in lanes:
        shift = classes[lane].shift
        if shift > 0:
            value[lane] = (value[lane] << shift) + stream.raw(lane, shift)
        require(-32768 <= value[lane] <= 32767, "symbol")
    return value


def refine_row(stream, classes, coarse):
    value = []
    for lane, s in enumerate(coarse):
        i = stream.symbol(lane, classes[lane].refine[min(abs(s), 2)])
        value.append(3 * s + (0, 1, -1)[i] * (1 if s >= 0 else -1))
    require(all(-32768 <= v <= 32767 for v in value), "symbol")
    return value


def skip_zeros(data, at, align):
    """The next multiple of align from at on; what lies between is zeros."""
    end = at + -at % align
    require(end <= len(data) and not any(data[at:end]), "padding")
    return end


def decode_matrix(data, runs, n_rows, top=None, coarse=(), align=1, scales=None):
    """runs: for each run of columns, the class of each; coarse[run], where there is one: the symbols that it refines;
    scales: of each row, the index of its block's step; None: none of them has classes of its own.
    align: 16 from version 3 on; the matrix begins at a multiple of it in its section, and so does data.
    Returns an array [n_rows][n_columns] a run, bytes used."""
    strips = [(run, first) for run in range(len(runs)) for first in range(0, len(runs[run]), LANES)]
    out = [np.zeros((n_rows, len(run)), np.int32) for run in runs]
    fields = Fields(data)
    n_streams, reserved = fields.take("HH")
    require(reserved == 0 and n_streams <= len(strips) and (n_streams > 0) == (len(strips) > 0), "stream count")
    sizes = [fields.take("I") for _ in range(n_streams)]
    fields.at = skip_zeros(data, fields.at, align)
    for s, size in enumerate(sizes):
        require(size <= fields.left(), "stream past the end")
        stream = Stream(data[fields.at : fields.at + size])
        fields.at = skip_zeros(data, fields.at + size, align)
        for run, first in strips[s::n_streams]:
            classes = runs[run][first : first + LANES]
            tops = None if top is None else top[first : first + LANES]
            for row in range(n_rows):
                if scales is not None:
                    classes = [cls.at_scale[scales[row]] for cls in runs[run][first : first + LANES]]
                known = coarse[run] if run < len(coarse) else None
                if known is None:
                    values = decode_row(stream, classes, tops)
                else:
                    values = refine_row(stream, classes, known[row, first : first + len(classes)].tolist())
                out[run][row, first : first + len(classes)] = values
        stream.finish()
    return out, fields.at


# --- lossless payload -------------------------------------------------------------------------------------------------


def decode_lossless(data, dtype, n_rows, n_columns, align):
    """Bits of the elements, [n_rows][n_columns]."""
    exponent_bits, mantissa_bits, low_bytes, shift = SPLITS[dtype]
    fields = Fields(data)
    n_classes, reserved = fields.take("BB")
    require(1 <= n_classes <= 16 and reserved == 0, "class count")
    classes, tops = [], []
    for _ in range(n_classes):
        top, n_symbols = fields.take("BB")
        require(top - (n_symbols - 2) >= 0, "class reaches below exponent 0")
        classes.append(Class(shift, fields.array("<u2", n_symbols).tolist()))
        tops.append(top)
    column_class = fields.array("u1", n_columns) if n_classes > 1 else np.zeros(n_columns, np.uint8)
    require(int(column_class.max()) < n_classes, "class of a column")
    fields.at = skip_zeros(data, fields.at, align)
    runs, tops = [[classes[k] for k in column_class]], [tops[k] for k in column_class]
    (cells,), used = decode_matrix(data[fields.at :], runs, n_rows, tops, align=align)
    fields.at += used
    low = fields.array("u1", n_rows * n_columns * low_bytes).reshape(n_rows, n_columns, low_bytes).astype(np.uint64)
    require(fields.left() == 0, "bytes behind the rest")
    rest = sum((low[..., i] << np.uint64(8 * i) for i in range(low_bytes)), np.zeros(cells.shape, np.uint64))
    exponent = (cells >> shift).astype(np.uint64)
    require(int(exponent.max()) < 1 << exponent_bits, "exponent")
    rest |= (cells & ((1 << shift) - 1)).astype(np.uint64) << np.uint64(8 * low_bytes)
    sign = rest >> np.uint64(mantissa_bits)
    mantissa = rest & np.uint64((1 << mantissa_bits) - 1)
    return (sign << np.uint64(exponent_bits + mantissa_bits)) | (exponent << np.uint64(mantissa_bits)) | mantissa


# --- numbers ----------------------------------------------------------------------------------------------------------


def bf16_from_f32(values):
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_to_f32(bits):
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def fp8_numbers(dtype):
    """The finite numbers of fp8 that are not below 0, in the order of their bits."""
    bias, mantissa_bits, n = (7, 3, 127) if dtype == E4M3 else (15, 2, 124)
    fields = [(i >> mantissa_bits, i % (1 << mantissa_bits)) for i in range(n)]
    return np.array(
        [((e > 0) + m / (1 << mantissa_bits)) * 2.0 ** (max(e, 1) - bias) for e, m in fields]
    )


def fp8_from_f32(values, dtype):
    numbers, values = fp8_numbers(dtype), values.astype(np.float64)
    magnitude = np.minimum(np.abs(values), numbers[-1])
    above = np.searchsorted(numbers, magnitude)  # the first that is not smaller
    below = np.maximum(above - 1, 0)
    up, down = numbers[above] - magnitude, magnitude - numbers[below]
    nearest = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return np.where(np.signbit(values), 128, 0).astype(np.uint8) | nearest.astype(np.uint8)


def to_dtype(values, dtype):
    if dtype in (E4M3, E5M2):
        return fp8_from_f32(values, dtype)
    if dtype == BF16:
        return bf16_from_f32(values)
    if dtype == FP16:
        return np.clip(values, -65504, 65504).astype(np.float16).view(np.uint16)
    return values.astype(np.float32).view(np.uint32)


def from_bits(bits, dtype):
    if dtype == BF16:
        return bf16_to_f32(bits)
    return bits.astype("<u2" if dtype == FP16 else "<u4").view(np.float16 if dtype == FP16 else np.float32)


# --- exact arithmetic: what version 3 fixes bit by bit
# ------------------------------------------------------------------


def two_sum(a, b):
    """(f64 sum, what it lacks): together exactly a + b (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def sum_to_odd(a, b):
    """a + b in f64, rounded to odd: rounding that once more, to fewer bits or added to something larger, then errs as
    rounding once does (Boldo and Melquiond, IEEE Transactions on Computers 57(4), 2008)."""
    s, lost = two_sum(a, b)
    bits = np.ascontiguousarray(s).view(np.int64)
    away = np.where((lost > 0) == (s > 0), 1, -1)
    return np.where((lost != 0) & (bits % 2 == 0), bits + away, bits).view(np.float64)


def fmaf(a, b, c):
    """f32, rounded once: a product of two f32 is exact in f64."""
    a, b, c = (np.asarray(x, np.float32).astype(np.float64) for x in (a, b, c))
    return sum_to_odd(a * b, c).astype(np.float32)


def halves(a):
    """a as a sum of two f64 of 26 bits each (Veltkamp)."""
    t = a * 134217729.0
    high = t - (t - a)
    return high, a - high


def two_product(a, b):
    """(f64 product, what it lacks): together exactly a x b (Dekker)."""
    product = a * b
    (a1, a2), (b1, b2) = halves(a), halves(b)
    return product, ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2


def fma(a, b, c):
    """f64, rounded once."""
    a, b, c = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (a, b, c)))
    product, low = two_product(a, b)
    s, low_s = two_sum(c, low)
    high, rest = two_sum(product, s)
    result = np.array(high + sum_to_odd(rest, low_s))
    for i in zip(*np.nonzero((np.abs(product) < 2.0**-900) & (a != 0) & (b != 0))):  # the low part may be no f64
        result[i] = float(Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i])))
    return result


SIN = (
    -1.66666666666666324348e-01, 8.33333333332248946124e-03, -1.98412698298579493134e-04, 2.75573137070700676789e-06,
    -2.50507602534068634195e-08, 1.58969099521155010221e-10,
)  # fmt: skip
COS = (
    4.16666666666666019037e-02, -1.38888888888741095749e-03, 2.48015872894767294178e-05, -2.75573143513906633035e-07,
    2.08757232129817482790e-09, -1.13596475577881948265e-11,
)  # fmt: skip


def horner(coefficients, z):
    result = np.full_like(z, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result = fma(z, result, coefficient)
    return result


def cos_sin(angle):
    """f32 cosine and sine of f64 angles."""
    k = np.rint(angle * float.fromhex("0x1.45f306dc9c883p-1"))
    r = fma(-k, float.fromhex("0x1.921fb54442d18p+0"), angle)
    r = fma(-k, float.fromhex("0x1.1a62633145c07p-54"), r)
    z = r * r
    sin = fma(r * z, horner(SIN, z), r)
    cos = fma(z * z, horner(COS, z), fma(z, -0.5, 1.0))
    quadrant = k.astype(np.int64) % 4
    c = np.choose(quadrant, [cos, -sin, -cos, sin])
    s = np.choose(quadrant, [sin, cos, -sin, -cos])
    return c.astype(np.float32), s.astype(np.float32)


def integer_product(symbols, elements):
    """symbols @ elements modulo 2^32, in two's complement."""
    largest = np.abs(symbols).sum(1).max(initial=0) * np.abs(elements).max(initial=0)
    kind = np.float64 if largest < 2**53 else np.int64  # exact in both; int64 is slow
    total = (symbols.astype(kind) @ elements.astype(kind)).astype(np.int64)
    return ((total + 2**31) % 2**32 - 2**31).astype(np.int32)


# D[f][t], t = 0..3, to 8 significant digits; D[f][7 - t] is D[f][t] for even f, -D[f][t] for odd f.
DCT = np.array([
    [0.353553391, 0.353553391, 0.353553391, 0.353553391],
    [0.49039264, 0.415734806, 0.277785117, 0.097545161],
    [0.461939766, 0.191341716, -0.191341716, -0.461939766],
    [0.415734806, -0.097545161, -0.49039264, -0.277785117],
    [0.353553391, -0.353553391, -0.353553391, 0.353553391],
    [0.277785117, -0.49039264, 0.097545161, 0.415734806],
    [0.191341716, -0.461939766, 0.461939766, -0.191341716],
    [0.097545161, -0.277785117, 0.415734806, -0.49039264],
], np.float32)  # fmt: skip


# --- profile ----------------------------------------------------------------------------------------------------------


class Profile:
    def __init__(self, data):
        fields = Fields(data)
        require(bytes(fields.take("8s")) == b"CGPF\r\n\x1a\n", "magic")
        self.version, reserved, size = fields.take("IIQ")
        require(self.version in (1, 2, 3, 4) and reserved == 0 and size == len(data), "profile header")
        self.model = fields.take("16s")
        self.n_layers, self.n_kv_heads, self.head_dim, _, n_planes = fields.take("HHHBB")
        self.preset = fields.take("16s").rstrip(b"\0")
        channel, token, rope, self.is_packed = fields.take("BBBB")
        self.rotary_dim, self.n_sinks, n_groups, n_classes, n_ropes, self.nests, self.joined, has_joint = fields.take(
            "HHHHBBBB"
        )
        require(n_planes == 2 and has_joint <= (self.version == 4), "profile header")
        require(self.is_packed <= (channel == 1 and self.version == 1), "narrow components")
        require(self.joined <= (channel == 1 and self.version >= 2), "planes")
        self.has_steps = self.version == 4
        require(not self.has_steps or (channel, token) == (1, 1), "steps by block of another preset than klt")
        self.has_joint = self.version == 3 or has_joint == 1
        require(not self.has_joint or (self.joined and n_groups >= 2), "planes or groups")
        self.matrices = range(1 if self.joined else 2)  # of a group
        require(self.nests <= (channel == 1), "nests")
        self.has_anchors = (channel, token) == (0, 2)
        require(self.has_anchors or (channel, token) == (1, 1), "transforms")
        require(rope in ((0,) if self.has_anchors else (0, 1, 2)) and (rope > 0) == (self.rotary_dim > 0), "rope")
        require(2 <= n_ropes <= 4 if rope == 2 else n_ropes == 0, "rope tables")
        channels = self.n_kv_heads * self.head_dim
        ropes = fields.array("<f8", max(n_ropes, 1) * (self.rotary_dim // 2)).reshape(max(n_ropes, 1), -1)
        layer_rope = fields.array("u1", self.n_layers) if rope == 2 else np.zeros(self.n_layers, np.int64)
        require((layer_rope < len(ropes)).all(), "a layer's rope table")
        require(self.version == 1 or bool((np.abs(ropes) <= 16).all()), "inv_freq")
        self.inv_freq = ropes[layer_rope]  # [n_layers][rotary_dim / 2]
        self.group_layers = fields.array("<u2", n_groups).tolist()
        require(sum(self.group_layers) == self.n_layers, "groups")
        self.step = fields.array("<f4", 6).reshape(3, 2)
        require(bool(np.isfinite(self.step).all() and np.isfinite(ropes).all()), "not finite")
        require(not self.joined or bool((self.step[:, 0] == self.step[:, 1]).all()), "steps of K and V")
        self.mean = fields.array("<f4", self.n_layers * 2 * channels).reshape(self.n_layers, 2, channels)
        self.weight = fields.array("<f4", self.n_layers * 2 * channels).reshape(self.n_layers, 2, channels)
        if self.has_anchors:
            self.anchor_step = fields.array("<f4", self.mean.size).reshape(self.mean.shape)
        require(bool(np.isfinite(self.mean).all() and np.isfinite(self.weight).all()), "not finite")
        classes = []
        for _ in range(n_classes):
            shift, n_symbols = fields.take("BB")
            classes.append(Class(shift, fields.array("<u2", n_symbols).tolist()))
        for one in classes if self.nests else ():
            contexts = fields.array("<u2", 6).reshape(3, 2).tolist()
            one.refine = [Class(0, [same, away, (1 << 14) - same - away]) for same, away in contexts]
        if self.has_steps:
            self.read_steps(fields, classes)
        if self.has_anchors:
            self.read_anchors(fields, classes, channels)
        else:
            self.read_klt(fields, classes, channels, n_groups)
        require(fields.left() == 8, "profile size")
        self.fingerprint, self.scales = None, 0
        if xxhash is not None:
            require(fields.take("Q") == xxhash.xxh3_64_intdigest(data[:-8]), "profile checksum")
            self.fingerprint = xxhash.xxh3_128_digest(data)

    def scale(self, data):
        """data: the scales of an fp8 cache."""
        scales = np.frombuffer(data, "<f4", 2 * self.n_layers).reshape(self.n_layers, 2, 1)
        self.scales = None if xxhash is None else xxhash.xxh3_64_intdigest(data)
        self.mean, self.weight = self.mean / scales, self.weight * scales
        if self.has_anchors:
            self.anchor_step = self.anchor_step / scales
        if (scales != 1).any():
            self.check_range(2.0**25)

    def read_steps(self, fields, classes):
        class_of = fields.array("u1", 7 * len(classes)).reshape(7, -1)
        require((class_of < len(classes)).all(), "a class that is not there")
        for one, of in zip(classes, class_of.T):
            one.at_scale = [classes[k] for k in of]
        n_query_heads = fields.take("H")
        require(n_query_heads % self.n_kv_heads == 0, "query heads")
        query_mean = bf16_to_f32(fields.array("<u2", self.n_layers * n_query_heads * self.head_dim))
        require(bool(np.isfinite(query_mean).all()), "not finite")

    def read_anchors(self, fields, classes, channels):
        self.columns = {}  # [level, group, plane]: the classes of its columns; level 0: of the anchors
        for level in range(4):
            for group, n_layers in enumerate(self.group_layers):
                for plane in range(2):
                    of = fields.array("u1", n_layers * channels).tolist()
                    self.columns[level, group, plane] = [classes[k] for k in of]

    def read_klt(self, fields, classes, channels, n_groups):
        matrices = [(group, matrix) for group in range(n_groups) for matrix in self.matrices]
        counts, sizes = {}, {at: channels * self.group_layers[at[0]] * (2 if self.joined else 1) for at in matrices}
        self.n_shared, self.fraction_bits = 0, (0, 0, 0)
        if self.has_joint:
            self.read_shared(fields, n_groups)
            counts[JOINT], sizes[JOINT] = self.joint_counts, n_groups * self.n_shared
        counts |= {at: fields.take("HH" if self.version == 1 else "HBB") for at in matrices}
        require(all(counts[at][0] >= self.n_shared for at in matrices), "components that are not there to share")
        matrices = list(counts)  # the joint one first
        self.columns = {}  # [level, group, matrix]: for each frequency, the classes of its columns
        for level in (1, 2, 3):
            for at in matrices:
                n_active = fields.array("<u2", 8).tolist()
                most = [counts[at][0] - (at != JOINT and self.n_shared)] * 8
                if at == JOINT:
                    most = [n if given > 0 else 0 for n, given in zip(most, self.n_given[level - 1])]
                require(all(n <= m for n, m in zip(n_active, most)), "active columns")
                self.columns[(level, *at)] = [[classes[k] for k in fields.array("u1", n).tolist()] for n in n_active]
        self.basis, self.unit_bits = {}, {}
        panel = 256
        if self.version == 1:
            whole, d = 256 // self.head_dim * self.head_dim, self.head_dim
            panel = whole or max(n for n in range(1, 257) if d % n == 0)
        elements = sum(-(-counts[at][0] // 32) * 32 * (-(-n // panel) * 256) for at, n in sizes.items())
        require(elements <= 8 * len(fields.data) + (1 << 20), "bases that are too large for the file")
        for at in matrices:
            n = sizes[at]
            require(counts[at][0] <= n, "components")
            if self.version == 1:
                self.basis[at] = self.read_floats(fields, n, *counts[at])
            else:
                n_components, self.unit_bits[at], reserved = counts[at]
                require(8 <= self.unit_bits[at] <= 20 and reserved == 0, "unit_bits")
                self.basis[at] = self.read_integers(fields, n, n_components)
        if self.version >= 2:
            self.check_range()

    def read_shared(self, fields, n_groups):
        self.n_shared, *self.fraction_bits, reserved = fields.take("H4B")
        require(self.n_shared > 0 and self.n_shared % 32 == 0 and n_groups * self.n_shared <= 8192, "shared components")
        require(max(self.fraction_bits) <= 8 and reserved == 0, "fraction_bits")
        self.joint_counts = fields.take("HBB")
        require(self.joint_counts[0] > 0 and self.joint_counts[1] > max(self.fraction_bits), "joint matrix")
        self.n_given = fields.array("<u2", 24).reshape(3, 8).tolist()
        require(max(map(max, self.n_given)) <= self.n_shared, "given components")

    def check_range(self, largest_scaled=None):
        """What is decoded is finite. largest_scaled: what sums are at most, of every group, with scales."""
        channels, first = self.n_kv_heads * self.head_dim, 0
        for group, n_layers in enumerate(self.group_layers):
            layers = slice(first, first + n_layers)
            for plane in range(2):
                largest = largest_scaled
                if largest is None:
                    largest = 2.0 ** (33 - self.unit_bits[group, 0 if self.joined else plane] - min(self.fraction_bits))
                mean, weight = (x[layers, plane].reshape(n_layers * channels) for x in (self.mean, self.weight))
                for step in self.step[:, plane]:
                    step = step * (STEP_FACTORS[-1] if self.has_steps else np.float32(1))
                    sums = np.abs(mean) + largest * (step / weight).astype(np.float64)
                    if self.has_anchors:
                        sums += 32768.0 * self.anchor_step[layers, plane].reshape(n_layers * channels)
                    require((sums <= 1e38).all(), "not finite")
            first += n_layers

    def read_floats(self, fields, n, n_components, n_wide):
        """Version 1: f32 [n_components][n]."""
        rows = np.zeros((n_components, n), np.float32)
        for c in range(n_components):
            if c < n_wide:
                rows[c] = bf16_to_f32(fields.array("<u2", n))
            else:
                bits = fields.take("B") if self.is_packed else 8
                require(2 <= bits <= 12, "bits of a component")
                scale = fields.array("<f4", 1)
                numbers = self.read_numbers(fields, bits, n)
                rows[c] = bf16_to_f32(bf16_from_f32(scale * numbers.astype(np.float32)))
        return rows

    def read_integers(self, fields, n, n_components):
        """Version 2: elements, shifted, s64 [n_components][n]."""
        rows = np.zeros((n_components, n), np.int64)
        for c in range(n_components):
            if c % 32 == 0:
                shift = fields.take("B")
                require(shift <= 16, "shift of a band")
            bits, multiple = fields.take("BH")
            require(2 <= bits <= 15 and 1 <= multiple and multiple << bits - 1 <= 1 << 14, "bits or multiple")
            rows[c] = multiple * self.read_numbers(fields, bits, n) << shift
        return rows

    def read_numbers(self, fields, bits, n):
        string = int.from_bytes(fields.array("u1", (n * bits + 7) // 8).tobytes(), "little")
        require(string >> n * bits == 0, "bits behind a component")
        numbers = [string >> i * bits & (1 << bits) - 1 for i in range(n)]
        return np.array([x - (x >> bits - 1 << bits) for x in numbers], np.int64)


# --- chunk ------------------------------------------------------------------------------------------------------------


class Chunk:
    def __init__(self, data):
        fields = Fields(data)
        require(bytes(fields.take("8s")) == b"CGKV\r\n\x1a\n", "magic")
        self.version, header_bytes, file_bytes = fields.take("IIQ")
        require(self.version in (1, 2, 3, 4, 5), "header")
        self.align = 16 if self.version >= 3 else 1
        finest, self.prefix_level, token_bytes, self.dtype = fields.take("BBBB")
        self.n_layers, self.n_kv_heads, self.head_dim, n_planes, reserved = fields.take("HHHBB")
        self.first_position, self.n_tokens, n_sections = fields.take("III")
        self.scales = fields.take("Q")
        self.model, self.profile, parent, extra, key = fields.take("16s16s16s16s16s")
        ends = dict(zip((3, 2), fields.take("QQ")))
        require((n_planes, reserved) == (2, 0) and (self.scales == 0 or self.dtype in (E4M3, E5M2)), "header")
        is_nested = ends[3] > 0 or ends[2] > 0
        require(self.version >= 3 or (self.version == 2) == is_nested, "header")
        require(self.version < 4 or finest > 0, "a lossless chunk of version 4 or 5")
        self.coarsest = 3 if ends[3] else 2 if ends[2] else finest
        require(not is_nested or 0 < finest < self.coarsest and ends.get(finest, 0) == 0, "header")
        ends[finest] = file_bytes
        held = [level for level in range(finest, self.coarsest + 1) if ends[level] == len(data)]
        require(len(held) == 1, "the file ends where no level does")
        self.level = held[0]
        require(header_bytes == 160 + 16 * n_sections, "header")
        checksum = fields.take("Q")
        table = [fields.take("BBHIQ") for _ in range(n_sections)]
        self.sections = {}
        most = {4: 9, 5: 10}.get(self.version, 6)
        require(all(1 <= kind <= most for kind, *_ in table), "kind of a section")
        finer = {5: 2, 6: 1, 8: 2, 9: 1}
        level_of = [finer.get(kind, self.coarsest) for kind, *_ in table]
        for (kind, plane, group, size, hash64), level, following in zip(table, level_of, [*level_of[1:], finest - 1]):
            if level < self.level:
                continue
            section = data[fields.at : fields.at + size]
            require(len(section) == size, "section past the end")
            if xxhash is not None:
                require(xxhash.xxh3_64_intdigest(section) == hash64, "section checksum")
            self.sections[kind, plane, group] = section
            fields.at = skip_zeros(data, fields.at + size, self.align)
            require(following >= level or fields.at == ends[level], "where a level ends")
        require(fields.left() == 0, "bytes behind the last section")
        # The blocks' steps first, then the joint matrix.
        keys = [(kind != 10, kind < 7, group, plane, kind) for kind, plane, group, _, _ in table]
        order = [(-level, *key) for key, level in zip(keys, level_of)][1:]
        require(table[0][:3] == (1, 0, 0) and order == sorted(set(order)), "order of the sections")
        tokens = self.sections[1, 0, 0]
        require(len(tokens) == token_bytes * self.n_tokens, "tokens")
        self.tokens = [
            int.from_bytes(tokens[i : i + token_bytes], "little") for i in range(0, len(tokens), token_bytes)
        ]
        if xxhash is not None:
            require(xxhash.xxh3_64_intdigest(data[:152] + data[160:header_bytes]) == checksum, "header checksum")
            ids = struct.pack(f"<{self.n_tokens}I", *self.tokens)
            require(xxhash.xxh3_128_digest(parent + extra + ids) == key, "key")

    def expect_sections(self, expected):
        require(set(self.sections) == set(expected) | {(1, 0, 0)}, "missing or additional sections")

    def decode(self, profile):
        """Bits of the elements [n_layers][2][n_tokens][n_kv_heads * head_dim]."""
        channels = self.n_kv_heads * self.head_dim
        out = np.zeros((self.n_layers, 2, self.n_tokens, channels), np.uint64)
        if self.level == 0:
            require(self.profile == bytes(16), "a profile at L0")
            self.expect_sections([(2, plane, layer) for layer in range(self.n_layers) for plane in range(2)])
            for layer in range(self.n_layers):
                for plane in range(2):
                    out[layer, plane] = decode_lossless(
                        self.sections[2, plane, layer], self.dtype, self.n_tokens, channels, self.align
                    )
            return out
        require(profile.fingerprint in (None, self.profile) and profile.model == self.model, "foreign profile")
        require(profile.scales in (None, self.scales), "other scales")
        require({3: 2, 4: 3, 5: 4}.get(self.version, 1) == profile.version, "versions of chunk and profile")
        shape = (self.n_layers, self.n_kv_heads, self.head_dim)
        require(shape == (profile.n_layers, profile.n_kv_heads, profile.head_dim), "geometry")
        require(profile.has_anchors or self.first_position % 8 == 0, "position")
        n_sinks = max(0, min(profile.n_sinks - self.first_position, self.n_tokens))
        groups = range(len(profile.group_layers))
        require(self.level == self.coarsest or profile.nests, "nested")
        kinds = (3, *(7 - level for level in range(self.level, self.coarsest)))
        expected = [(kind, matrix, group) for group in groups for matrix in profile.matrices for kind in kinds]
        expected += [(4, plane, group) for group in groups for plane in range(2) if n_sinks > 0]
        if profile.has_joint:
            expected += [({3: 7, 5: 8, 6: 9}[kind], 0, 0) for kind in kinds]
        if profile.has_steps:
            expected.append((10, 0, 0))
        self.expect_sections(expected)
        self.order_blocks(profile)
        if profile.has_joint:
            self.given = self.give(profile)
        first_layer = 0
        for group in groups:
            layers = slice(first_layer, first_layer + profile.group_layers[group])
            for matrix in profile.matrices:
                planes = slice(0, 2) if profile.joined else slice(matrix, matrix + 1)
                decode = self.decode_anchors if profile.has_anchors else self.decode_symbols
                out[layers, planes] = to_dtype(decode(profile, group, matrix, layers, planes), self.dtype)
            for plane in range(2 if n_sinks > 0 else 0):
                n = profile.group_layers[group] * channels
                sinks = decode_lossless(self.sections[4, plane, group], self.dtype, n_sinks, n, self.align)
                out[layers, plane, :n_sinks] = sinks.reshape(n_sinks, -1, channels).swapaxes(0, 1)
            first_layer += profile.group_layers[group]
        return out

    def order_blocks(self, profile):
        """Sets block, that of each row of a matrix of symbols, and factor_index, of its step."""
        n_blocks = (self.n_tokens + 7) // 8
        self.block, self.factor_index = np.arange(n_blocks), np.full(n_blocks, 3)
        if profile.has_steps:
            of_blocks = np.frombuffer(self.sections[10, 0, 0], np.uint8)
            require(len(of_blocks) == n_blocks and (of_blocks <= 6).all(), "steps")
            self.block = np.array(sorted(range(n_blocks), key=lambda b: (of_blocks[b], b)))
            self.factor_index = of_blocks[self.block]

    def tables(self, profile, group, matrix, layers, planes, *more):
        """step / weight, mean and more such tables of a matrix: f32, channels as [plane][layer][head][dim]."""
        step = profile.step[self.level - 1, planes]
        scale = step[None, :, None] / profile.weight[layers, planes]
        tables = (scale, profile.mean[layers, planes], *(x[layers, planes] for x in more))
        return [x.swapaxes(0, 1).reshape(-1) for x in tables]

    def shaped(self, x, profile, group, planes):
        """[layer][plane][token][channel] of x [token][channel of the matrix]."""
        n_planes, n_layers = planes.stop - planes.start, profile.group_layers[group]
        return x.reshape(self.n_tokens, n_planes, n_layers, -1).transpose(2, 1, 0, 3)

    def decode_anchors(self, profile, group, plane, layers, planes):
        section = self.sections[3, plane, group]
        n_anchors = -(-self.n_tokens // 10)
        runs = [profile.columns[0, group, plane]], [profile.columns[self.level, group, plane]]
        a, used = decode_matrix(section, runs[0], n_anchors, align=self.align)
        d, used_by_deltas = decode_matrix(section[used:], runs[1], self.n_tokens - n_anchors, align=self.align)
        require(used + used_by_deltas == len(section), "bytes behind the matrices")
        scale, mean, anchor_step = self.tables(profile, group, plane, layers, planes, profile.anchor_step)
        x, deltas = np.zeros((self.n_tokens, len(mean)), np.float32), iter(d[0])
        for t in range(self.n_tokens):
            if t % 10 == 0:
                x[t] = anchor = fmaf(a[0][t // 10], anchor_step, mean)
            else:
                x[t] = fmaf(next(deltas), scale, anchor)
        return self.shaped(x, profile, group, planes)

    def symbols(self, profile, group, plane, level):
        """Of each frequency, [row][column]."""
        columns, n_blocks = profile.columns[level, group, plane], (self.n_tokens + 7) // 8
        kind = 3 if level == self.coarsest else 7 - level
        at = ({3: 7, 5: 8, 6: 9}[kind], 0, 0) if (group, plane) == JOINT else (kind, plane, group)
        if level == self.coarsest:
            section, runs, coarse = self.sections[at], columns, ()
        else:  # what the coarser level has, and the rest
            section, runs, coarse = self.sections[at], [], []
            for of, known in zip(columns, self.symbols(profile, group, plane, level + 1)):
                n = known.shape[1]
                require(n <= len(of), "active columns")
                runs += [of[:n], of[n:]]
                coarse += [known, None]
        symbols, used = decode_matrix(section, runs, n_blocks, None, coarse, self.align, self.factor_index)
        require(used == len(section), "bytes behind the matrix")
        return symbols if level == self.coarsest else [np.hstack(symbols[2 * f : 2 * f + 2]) for f in range(8)]

    def give(self, profile):
        """With a joint matrix: V of each frequency, [row][group][component]."""
        symbols, basis = self.symbols(profile, *JOINT, self.level), profile.basis[JOINT]
        k, out = profile.unit_bits[JOINT] - profile.fraction_bits[self.level - 1], []
        for s, n_given in zip(symbols, profile.n_given[self.level - 1]):
            u = integer_product(s, basis[: s.shape[1]]).astype(np.int64)
            v = np.clip((u >> k) + (u >> k - 1 & 1), -32768, 32767)
            v = v.reshape(len(s), len(profile.group_layers), profile.n_shared)
            v[:, :, n_given:] = 0
            out.append(v)
        return out

    def decode_symbols(self, profile, group, matrix, layers, planes):
        symbols = self.symbols(profile, group, matrix, self.level)
        scale, mean = self.tables(profile, group, matrix, layers, planes)
        if self.version >= 3:
            x = self.exact_transform(profile, group, matrix, symbols, scale, mean)
        else:
            x = self.transform(profile, group, matrix, symbols, scale, mean)
        x = self.shaped(x[: self.n_tokens], profile, group, planes)
        if planes.start == 0 and profile.rotary_dim > 0:
            x = np.array(x)
            x[:, 0] = (self.rotate_exactly if self.version >= 3 else self.rotate)(profile, layers, x[:, 0])
        return x.astype(np.float32)

    def exact_transform(self, profile, group, matrix, symbols, scale, mean):
        """From version 3 on: f32 [token][channel]. Rows of symbols become blocks here."""
        basis, q = profile.basis[group, matrix], profile.fraction_bits[self.level - 1]
        if profile.has_joint:
            symbols = [np.hstack((v[:, group], s << q)) for v, s in zip(self.given, symbols)]
        y = [integer_product(s, basis[: s.shape[1]]).astype(np.float32) for s in symbols]  # [f][row][channel]
        unit = np.float32(2.0 ** -(profile.unit_bits[group, matrix] + q))
        dct = (DCT[:, :, None] * STEP_FACTORS[self.factor_index]) * unit
        dct = dct[..., None]  # [f][t][row][1]
        z = np.zeros((len(y[0]), 8, len(mean)), np.float32)
        for t in range(4):
            even, odd = dct[0, t] * y[0], dct[1, t] * y[1]
            for f in (2, 4, 6):
                even, odd = fmaf(dct[f, t], y[f], even), fmaf(dct[f + 1, t], y[f + 1], odd)
            z[self.block, t], z[self.block, 7 - t] = even + odd, even - odd
        return fmaf(z, scale, mean).reshape(-1, len(mean))

    def transform(self, profile, group, matrix, symbols, scale, mean):
        """Before version 3: in f64, of which a decoder's f32 sums are within the tolerance."""
        basis = profile.basis[group, matrix].astype(np.float64)
        dct = np.array(
            [
                [np.float32(math.sqrt((2 if f else 1) / 8) * math.cos(math.pi * (t + 0.5) * f / 8)) for t in range(8)]
                for f in range(8)
            ],
            np.float64,
        )
        y = np.stack([symbols[f] @ basis[: symbols[f].shape[1]] for f in range(8)])  # [f][block][channel]
        z = np.einsum("ft,fbc->btc", dct, y).reshape(-1, len(mean))
        return z * scale.astype(np.float64) + mean

    def angles(self, profile, layers):
        """[layer][token][1][rotary_dim / 2]"""
        position = self.first_position + np.arange(self.n_tokens, dtype=np.float64)
        return (position[:, None] * profile.inv_freq[layers][:, None])[:, :, None]

    def rotate_exactly(self, profile, layers, x):
        """From version 3 on: K f32 [layer][token][channel]."""
        (c, s), half = cos_sin(self.angles(profile, layers)), profile.rotary_dim // 2
        heads = x.reshape(*x.shape[:2], self.n_kv_heads, self.head_dim).copy()
        low, high = heads[..., :half].copy(), heads[..., half : 2 * half].copy()
        heads[..., :half] = fmaf(-high, s, low * c)
        heads[..., half : 2 * half] = fmaf(low, s, high * c)
        return heads.reshape(x.shape)

    def rotate(self, profile, layers, x):
        angle, half = self.angles(profile, layers), profile.rotary_dim // 2
        c, s = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        heads = x.reshape(*x.shape[:2], self.n_kv_heads, self.head_dim).copy()
        low, high = heads[..., :half].copy(), heads[..., half : 2 * half].copy()
        heads[..., :half] = low * c - high * s
        heads[..., half : 2 * half] = high * c + low * s
        return heads.reshape(x.shape)


def within_tolerance(got, want, head_dim):
    """One unit in the last place of bf16 in 99.9 % of the elements, two elsewhere."""
    got, want = got.astype(np.float64).reshape(-1, head_dim), want.astype(np.float64).reshape(-1, head_dim)

    def unit(values):
        return np.ldexp(1.0, np.frexp(values)[1] - 8)

    units = np.maximum(unit(want), unit(np.abs(want).max(axis=1, keepdims=True) / 256))
    error = np.abs(got - want) / units
    return error.max() <= 2 and np.count_nonzero(error > 1) <= error.size / 1000


def read(path):
    with open(path, "rb") as file:
        return file.read()


def compare(directory):
    profile = Profile(read(os.path.join(directory, "profile.cgp")))
    path = os.path.join(directory, "scales.f32")
    if os.path.exists(path):
        profile.scale(read(path))
    names = sorted(name[:-3] for name in os.listdir(directory) if name.endswith(".kv"))
    n_bad = 0
    for name in names:
        chunk = Chunk(read(os.path.join(directory, name + ".kv")))
        got = chunk.decode(profile).reshape(-1)
        want = np.frombuffer(read(os.path.join(directory, name + ".raw")), f"<u{ELEMENT_BYTES[chunk.dtype]}")
        if chunk.level == 0 or chunk.version >= 3:
            same = np.array_equal(got, want)
        else:
            same = within_tolerance(from_bits(got, chunk.dtype), from_bits(want, chunk.dtype), chunk.head_dim)
        n_bad += not same
        equal = np.count_nonzero(got == want)
        print(f"{name}: {'ok' if same else 'DIFFERS'}, {equal} of {got.size} elements bit-identical")
    print(f"{len(names)} chunks, {n_bad} differ, checksums {'' if xxhash else 'not '}checked")
    return 1 if n_bad or not names else 0


def main(arguments):
    if len(arguments) == 1:
        return compare(arguments[0])
    if len(arguments) == 4 and arguments[0] == "--profile":
        chunk = Chunk(read(arguments[2]))
        bits = chunk.decode(Profile(read(arguments[1])))
        with open(arguments[3], "wb") as file:
            file.write(bits.astype(f"<u{ELEMENT_BYTES[chunk.dtype]}").tobytes())
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
