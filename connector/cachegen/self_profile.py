"""Makes a codec profile from what a store already holds: python -m cachegen.self_profile STORE/MODEL

For a model that was served without a profile: its chunks at L0 are decoded by cgtool, and their statistics give the
mean, the KLT and the tables. The model does not run, so there are no gradients to weigh channels with: a channel's
weight comes from how much it varies. That loses some quality at equal bytes against cachegen.profile, and needs
neither the weights nor calibration text. Completes model.json and writes
profiles/<fingerprint>.cgp and profiles/default. Needs torch, and transformers for --model-dir.

One chunk is in memory at a time, besides sums by channel and a few hundred tokens of others. Chunks are those of
objects/ and contexts/, each once.
"""

import contextlib
import glob
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass

import torch
from safetensors.torch import load_file

from . import Unsupported
from .assemble import assemble, plan_columns
from .command import MAX_MODEL_LEN, OF_MODELS, Progress, make_main, make_parser, reading
from .contexts import pick
from .fingerprint import model_fingerprint
from .klt import K, Moments, Planes, Transform, V, quantize
from .make_profile import (
    LEAST_RATIO,
    MAX_CHANNELS,
    N_CLASSES,
    choose_matrices,
    choose_shared,
    count_symbols,
    join_groups,
)
from .profile_file import DTYPES, MAX_BYTES, N_LEVELS
from .quality import Coder
from .rope import Rope, fix_rope, longrope_factors, rope_deviations, rope_from_json, rope_of, text_config
from .sinks import DEFAULT_SINKS, MOST_SINKS
from .steps import nested_steps
from .store_files import read_description, write_store
from .tables import N_BINS, class_costs, magnitude_bins, make_class, shift_of

LEAST_TOKENS = 2048
LEAST_CHUNK_TOKENS = 64
HELD_OUT = 8  # one chunk of so many is measured, not learnt from
_ROPE_CHUNKS = 16
_SAMPLE_CHUNKS, _SAMPLE_TOKENS = 6, 256  # of the held-out ones, kept in memory to find the steps on
_BUCKETS, _LEAST_BUCKET = 256, -64  # half octaves of the columns' mean squares, in the estimate of sizes
_SEARCH_OCTAVES, _SEARCH_ROUNDS = 20, 11  # steps are found within 1 %
_CHUNK_HEADER = struct.Struct("<8sIIQBBBBHHHBBIIIQ16s16s16s16s16s")  # codec/FORMAT.md, "Chunk", to the key
_MAGIC = b"CGKV\r\n\x1a\n"
_L0_VERSIONS = (1, 3)  # 2 is nested levels
FP8, _FP8_DTYPES = "fp8", (4, 5)  # e4m3 and e5m2: caches that no profile is made of


@dataclass(frozen=True)
class Geometry:
    n_layers: int
    n_kv_heads: int
    head_dim: int
    dtype: str
    model_fingerprint: str  # 32 hex digits


@dataclass(frozen=True)
class StoredChunk:
    path: str
    key: bytes
    first_position: int
    n_tokens: int


class StoredModel:
    """What the calibration asks of a model, from a store: all but running it."""

    def __init__(self, geometry, rope):
        self.n_layers, self.n_kv_heads, self.head_dim = geometry.n_layers, geometry.n_kv_heads, geometry.head_dim
        self.dtype_name, self.rope, self.device = geometry.dtype, rope, torch.device("cpu")
        self.channels = geometry.n_kv_heads * geometry.head_dim


class Unusable(Exception):
    """A chunk that there is nothing to learn from."""

    def __init__(self, chunk, why):
        super().__init__(f"{chunk.path}: {why}")
        self.chunk = chunk


class Chunks:
    """KV of stored chunks, decoded each time it is asked for."""

    def __init__(self, cgtool, rope: Rope):
        self.cgtool, self.rope = cgtool, rope

    def get(self, chunk):
        """K, V [n_layers][n_tokens][n_kv_heads][head_dim], K rotated as if the chunk began at position 0. Unusable:
        they are not finite, or the chunk is gone."""
        with tempfile.TemporaryDirectory(prefix="cachegen-") as folder:
            out = os.path.join(folder, "kv.safetensors")
            done = subprocess.run([self.cgtool, "decode", chunk.path, out], capture_output=True, text=True)
            if done.returncode and not os.path.exists(chunk.path):
                raise Unusable(chunk, "evicted since it was listed")
            if done.returncode:
                raise SystemExit(f"self_profile: {done.stderr.strip()}")
            tensors = load_file(out)
        if not all(tensors[name].isfinite().all() for name in ("K", "V")):
            raise Unusable(chunk, "K or V is not finite")
        back = torch.full((chunk.n_tokens,), chunk.first_position)
        return self.rope.rotate(tensors["K"].float(), back, inverse=True), tensors["V"]


def read_header(path):
    """(Geometry, StoredChunk) of a chunk at L0, which is one of an exact prefix, too; None for other files."""
    with open(path, "rb") as file:
        head = file.read(_CHUNK_HEADER.size)
    if len(head) < _CHUNK_HEADER.size:
        return None
    (magic, version, _, _, level, _, _, dtype, n_layers, n_kv_heads, head_dim, n_planes, _,
     first_position, n_tokens, _, _, model, _, _, _, key) = _CHUNK_HEADER.unpack(head)  # fmt: skip
    names = {number: name for name, number in DTYPES.items()} | dict.fromkeys(_FP8_DTYPES, FP8)
    if magic != _MAGIC or version not in _L0_VERSIONS or level or n_planes != 2 or dtype not in names:
        return None
    geometry = Geometry(n_layers, n_kv_heads, head_dim, names[dtype], model.hex())
    return geometry, StoredChunk(path, key, first_position, n_tokens)


def find_chunks(folder, described):
    """(Geometry, chunks in the order of their keys) of the L0 chunks in a model's folder, each chunk once.

    described: what model.json says; chunks of another model are left out. Without a fingerprint there, all chunks must
    be of one model. SystemExit: there are none, they differ, or model.json says another geometry.
    """
    found, fingerprint, has_fp8 = {}, described.get("model_fingerprint"), False
    for pattern in ("objects/*/*/L0.kv", "contexts/*/L0/*.kv"):
        for path in glob.iglob(os.path.join(glob.escape(folder), pattern)):
            with contextlib.suppress(FileNotFoundError):  # others may delete while this runs
                header = read_header(path)
                if not header or fingerprint not in (None, header[0].model_fingerprint):
                    continue
                if header[0].dtype == FP8:
                    has_fp8 = True
                else:
                    found.setdefault(header[1].key, header)
    if not found and has_fp8:
        raise SystemExit(f"self_profile: {folder} holds chunks of fp8 caches alone: serve prompts with a cache of 16 "
                         "or 32 bits; the profile serves fp8 caches, too")  # fmt: skip
    if not found:
        raise SystemExit(f"self_profile: {folder} holds no chunk at L0 of the model in its model.json: serve "
                         "prompts without a profile first, or with level L0")  # fmt: skip
    geometries = {geometry for geometry, _ in found.values()}
    if len(geometries) > 1:
        texts = "; ".join(sorted(map(str, geometries)))
        raise SystemExit(f"self_profile: chunks of different models in {folder}: {texts}")
    geometry = geometries.pop()
    for name, value in vars(geometry).items():
        if described.get(name, value) != value:
            raise SystemExit(f"self_profile: model.json says {name} {described[name]}, the chunks say {value}")
    # Keys are hashes: their order mixes the contexts.
    return geometry, [found[key][1] for key in sorted(found)]


def check_model(model_dir, config, max_model_len, fingerprint):
    """Whether fingerprint is that of the model in model_dir as an engine of max_model_len runs it, where weights are
    there to tell. SystemExit: such an engine takes other factors of LongRoPE. A warning: the engine does something else
    otherwise than the files say, which need not be the rotation."""
    deviations, factors = rope_deviations(config, max_model_len), longrope_factors(config, max_model_len)
    try:
        if model_fingerprint(model_dir, deviations) == fingerprint:
            return
    except FileNotFoundError:  # config.json alone
        return
    other = {"short": "long", "long": "short"}.get(factors)
    if other and model_fingerprint(model_dir, {} if deviations else {"longrope": other}) == fingerprint:
        raise SystemExit(f"self_profile: the chunks' engine took LongRoPE's {other} factors, not the {factors} ones: "
                         "give its --max-model-len, or none if it has none")  # fmt: skip
    print(f"self_profile: warning: the chunks are of another model than {model_dir}, or of an engine that runs it "
          "otherwise (hf_overrides, quantization): if that turns K otherwise than config.json says, the profile codes "
          "badly", file=sys.stderr)  # fmt: skip


def find_rope(described, model_dir, geometry, max_model_len=None):
    """The Rope of model.json, or of model_dir's config.json. SystemExit: neither tells, or they differ."""
    if not model_dir and "rope" not in described:
        raise SystemExit("self_profile: model.json does not say how K is rotated: give --model-dir (its config.json "
                         "is enough)")  # fmt: skip
    rope = rope_from_json(described["rope"]) if "rope" in described else None
    if rope and rope.rotary_dim > geometry.head_dim:
        raise SystemExit(f"self_profile: model.json says rotary_dim {rope.rotary_dim}, head_dim is {geometry.head_dim}")
    if not model_dir:
        return rope
    from transformers import AutoConfig

    with reading("self_profile", model_dir, OF_MODELS):
        config = text_config(AutoConfig.from_pretrained(model_dir))
        if not rope:
            check_model(model_dir, config, max_model_len, geometry.model_fingerprint)
        fix_rope(config, max_model_len)
        found = rope_of(config, geometry.head_dim)
    if rope and rope.as_json() != found.as_json():
        raise SystemExit(f"self_profile: model.json says rope {rope.as_json()}, {model_dir} {found.as_json()}")
    return found


@torch.no_grad()
def check_rope(source, chunks, rope):
    """Unsupported: in some layer stored K is rotated by pairs that lie side by side, which no configuration tells. Most
    channels of K have a mean once its rotation is taken away. A wrong one that is taken away spreads that over all
    angles, so that K varies more."""
    if not rope.rotary_dim:
        return
    pairs = torch.arange(rope.rotary_dim).reshape(-1, 2).T.flatten()
    n_tokens, total, square = 0, [0.0, 0.0], [0.0, 0.0]
    for chunk in pick(chunks, _ROPE_CHUNKS):
        positions = chunk.first_position + torch.arange(chunk.n_tokens)
        k = rope.rotate(source.get(chunk)[0], torch.full_like(positions, chunk.first_position))[..., : rope.rotary_dim]
        n_exact = min(max(0, MOST_SINKS - chunk.first_position), chunk.n_tokens)
        n_tokens += chunk.n_tokens - n_exact
        for i, rotated in enumerate((k, k[..., pairs])):
            plain = rope.rotate(rotated, positions, inverse=True)[:, n_exact:]
            total[i] = total[i] + plain.sum(1, dtype=torch.float64)
            square[i] = square[i] + plain.square().sum((1, 2, 3), dtype=torch.float64)
    neox, side_by_side = (s / n_tokens - (t / n_tokens).square().sum((1, 2)) for s, t in zip(square, total))  # by layer
    ratio = torch.where(neox > 0, side_by_side / neox, 1.0)
    layer = int(ratio.argmin())
    if ratio[layer] < 0.8:  # of NeoX pairs it is 1 at least, of others that were looked at 0.4 at most
        raise Unsupported(
            f"K of layer {layer} is not rotated as its configuration says (kind {rope.kind}, {rope.rotary_dim} "
            "dimensions, NeoX pairing), but by pairs that lie side by side: interleaved rope"
        )


def take(chunks, n_tokens):
    """Chunks of about n_tokens together (0: all), spread over all."""
    chunks = [chunk for chunk in chunks if chunk.n_tokens >= LEAST_CHUNK_TOKENS]
    if n_tokens and chunks:
        mean_tokens = sum(chunk.n_tokens for chunk in chunks) / len(chunks)
        chunks = pick(chunks, max(1, int(n_tokens / mean_tokens)))
    return chunks


def hold_out(chunks):
    """(to learn from, held out: one at least)"""
    held_out = chunks[HELD_OUT - 1 :: HELD_OUT] or chunks[-1:]
    left = set(held_out)
    return [chunk for chunk in chunks if chunk not in left], held_out


def choose(model, n_tokens, most_bytes):
    """The Matrices: as large as their bytes and the tokens to learn from allow. SystemExit: too few tokens."""
    least = max(LEAST_TOKENS, LEAST_RATIO * model.channels)
    if n_tokens < least:
        raise SystemExit(f"self_profile: {n_tokens} tokens to learn from, in chunks of {LEAST_CHUNK_TOKENS} or more; "
                         f"{least} are needed: store more prompts, or give a larger --max-tokens")  # fmt: skip
    return choose_matrices(model, most_bytes, min(MAX_CHANNELS["bytes"], n_tokens // LEAST_RATIO))


def weights(moments, model):
    """f32 [n_layers][2][C], in place of Moments.weight(), from the channels' variances."""
    square = moments.variance().reshape(model.n_layers, 2, model.n_kv_heads, model.head_dim)
    least = 1e-6 * square.mean((0, 2, 3), keepdim=True).clamp(min=1e-24)  # for heads and layers that never vary
    layer = square.mean((2, 3), keepdim=True).clamp(min=least)
    head = square.mean(3, keepdim=True).clamp(min=least)
    of_k = model.rope.pair_mean(square[:, K]).sqrt() / head[:, K]
    of_k = of_k.clamp(min=1e-3 * of_k.mean())  # channels that never vary
    of_v = layer[:, V].rsqrt().expand_as(of_k)
    return torch.stack([of_k, of_v], 1).flatten(2).clamp(min=1e-12).float()


@torch.no_grad()
def learn(model, source, chunks, matrices, progress):
    """The Transform of the chunks' statistics."""
    progress.start("mean and covariance")
    planes, moments = Planes(model), Moments(model.n_layers, model.channels, matrices, model.device)
    for i, chunk in enumerate(chunks):
        n_sinks = max(0, MOST_SINKS - chunk.first_position)
        moments.add(planes.flat(*source.get(chunk))[:, :, n_sinks:])
        progress(i + 1, len(chunks))
    progress.start("eigenvectors")
    weight = weights(moments, model)
    return Transform(matrices, moments.mean(), weight, moments.basis(weight), DEFAULT_SINKS, model.device)


@torch.no_grad()
def sample_coefficients(model, source, transform, chunks):
    """Coefficients of the first tokens of some chunks: f32 [n_blocks][8][n_components] of each that has symbols."""
    parts = []
    for chunk in pick(chunks, _SAMPLE_CHUNKS):
        x = Planes(model).flat(*source.get(chunk))[:, :, :_SAMPLE_TOKENS]
        parts.append([transform.own(gm, z) for gm, z in transform.all_coefficients(x)])
    return [torch.cat(of_chunks) for of_chunks in zip(*parts)]


def estimate_bits(sample, step):
    """Bits an element of the symbols of sample_coefficients() at a step. The tables are not known yet: columns whose
    spread is alike share one, as they will."""
    counts = torch.zeros(_BUCKETS * N_BINS, dtype=torch.int64)
    for z in sample:
        square = (z.pow(2).mean(0) / step**2).clamp(min=2.0 ** (_LEAST_BUCKET / 2))
        bucket = ((2 * square.log2()).round().int() - _LEAST_BUCKET).clamp(max=_BUCKETS - 1)
        bins = magnitude_bins(quantize(z, step).int(), _bucket_shift(bucket))
        counts += torch.bincount((bucket * N_BINS + bins).flatten(), minlength=len(counts))
    shifts, bits = _bucket_shift(torch.arange(_BUCKETS)), 0.0
    for shift, row in zip(shifts.tolist(), counts.reshape(_BUCKETS, N_BINS).double().numpy()):
        if row.any():
            bits += float(row @ class_costs(make_class(row, shift)))
    return bits / sum(z.numel() for z in sample)


def _bucket_shift(bucket):
    return shift_of(torch.exp2((bucket + _LEAST_BUCKET) / 2))


def steps_of_bits(sample, bits, progress):
    """Steps as nested_steps() gives them; L2's symbols take about so many bits an element."""
    middle = sum(z.pow(2).sum().item() for z in sample) / sum(z.numel() for z in sample)
    middle, width = math.log2(middle) / 2, _SEARCH_OCTAVES / 2
    for done in range(_SEARCH_ROUNDS):
        width /= 2
        middle += width if estimate_bits(sample, 2**middle) > bits else -width
        progress(done + 1, _SEARCH_ROUNDS)
    return nested_steps(2**middle / 3)


@torch.no_grad()
def measure_sizes(model, source, profile, chunks, progress):
    """[(bits an element of the symbols, relative error of K, of V)] of L1, L2, L3 over chunks. The error is that of the
    reconstruction, root mean square, as a share of the deviation from the mean."""
    coder, planes = Coder(profile), Planes(model)
    mean = coder.transform.mean.transpose(0, 1)[:, :, None]
    bits, elements, error = [0.0] * N_LEVELS, 0, torch.zeros(N_LEVELS, 2, dtype=torch.float64)
    for i, chunk in enumerate(chunks):
        x = planes.flat(*source.get(chunk))
        scale = (x - mean).pow(2).mean((2, 3), keepdim=True).clamp(min=1e-30)  # layers differ: each counts alike
        for level in range(N_LEVELS):
            coded, n_bits = coder.code(x, level)
            bits[level] += n_bits
            error[level] += ((coded - x).pow(2) / scale).mean((1, 2, 3))
        elements += x.numel()
        progress(i + 1, len(chunks))
    relative = (error / len(chunks)).sqrt().tolist()
    return [(n_bits / elements, *relative[level]) for level, n_bits in enumerate(bits)]


def parse_arguments(arguments):
    parser = make_parser("self_profile", __doc__)
    add = parser.add_argument
    add("store", metavar="STORE/MODEL")
    add("--model-dir", metavar="DIR", help="where config.json is, when model.json does not say how K is rotated")
    add("--max-tokens", type=int, default=32768, help="read about so many, 0 for all (default %(default)s)")
    add("--max-mib", type=float, default=256, help="size of the profile at most (default %(default)s)")
    add("--bits", type=float, default=0.75, help="of L2 an element; L1's step is a third, L3's three times as large "
        "(default %(default)s)")  # fmt: skip
    add("--max-model-len", **MAX_MODEL_LEN)
    add("--cgtool", default=shutil.which("cgtool"), help="path of cgtool (default: the one on PATH)")
    return parser.parse_args(arguments)


@dataclass(frozen=True)
class Made:
    profile: object
    data: bytes
    matrices: object
    n_tokens: int  # that it was learnt from
    n_held_out: int  # chunks
    sizes: list  # as measure_sizes()


def make(model, fingerprint, source, chunks, options, progress):
    """The Made of chunks. Unusable: one of them is to be left out."""
    most_bytes, (chunks, held_out) = options.max_mib * 2**20, hold_out(chunks)
    n_tokens = sum(chunk.n_tokens for chunk in chunks)
    matrices = choose(model, n_tokens, most_bytes)
    check_rope(source, chunks, model.rope)
    transform = learn(model, source, chunks, matrices, progress)
    n_shared = choose_shared(matrices, model.channels, n_tokens)
    if n_shared:
        join_groups(model, source, chunks, transform, n_shared, progress)
    progress.start("steps")
    steps = steps_of_bits(sample_coefficients(model, source, transform, held_out), options.bits, progress)
    statistics = count_symbols(model, source, chunks, transform, steps, progress)
    progress.start("classes")
    plan = plan_columns(transform, statistics, most_bytes)
    profile = assemble(model, fingerprint, transform, statistics.histograms, plan, steps, options.classes or N_CLASSES)
    progress.start("sizes of chunks that were held out")
    sizes = measure_sizes(model, source, profile, held_out, progress)
    return Made(profile, profile.to_bytes(), matrices, n_tokens, len(held_out), sizes)


def make_of_usable(model, fingerprint, source, chunks, options, progress):
    """make() of some of chunks, without those that are Unusable, each of which is told of."""
    while True:
        try:
            return make(model, fingerprint, source, take(chunks, options.max_tokens), options, progress)
        except Unusable as error:
            print(f"self_profile: left out: {error}", file=sys.stderr)
            # One that was evicted seldom was alone.
            chunks = [chunk for chunk in chunks if chunk != error.chunk and os.path.exists(chunk.path)]


def run(options):
    """Makes the profile; a report as a dict."""
    if not options.cgtool:
        raise SystemExit("self_profile: no cgtool on PATH: give --cgtool")
    if options.max_mib * 2**20 > MAX_BYTES:
        raise SystemExit(f"self_profile: --max-mib must be {MAX_BYTES >> 20} at most, not {options.max_mib:g}")
    if not 0.01 <= options.bits <= 8:
        raise SystemExit(f"self_profile: --bits must be from 0.01 to 8, not {options.bits}")
    try:
        described = read_description(options.store)
    except ValueError as error:
        raise SystemExit(f"self_profile: {error}") from error
    geometry, chunks = find_chunks(options.store, described)
    rope = find_rope(described, options.model_dir, geometry, options.max_model_len)
    if rope.kind == "by_layer" and len(rope.inv_freq) != geometry.n_layers:  # as where layers share K and V
        raise SystemExit(f"self_profile: a rope for each of {len(rope.inv_freq)} layers, the chunks say "
                         f"{geometry.n_layers}: layers that share the K and V of others are not supported")  # fmt: skip
    model, fingerprint = StoredModel(geometry, rope), geometry.model_fingerprint
    source = Chunks(options.cgtool, rope)
    made = make_of_usable(model, fingerprint, source, chunks, options, Progress(options.quiet))
    with reading("self_profile", options.store):
        write_store(options.store, model, fingerprint, made.profile, made.data, described=described)
    report = {"profile": made.profile.fingerprint.hex(), "profile_bytes": len(made.data), "n_tokens": made.n_tokens,
              "group_layers": made.matrices.groups, "planes": "joined" if made.matrices.is_joined else "apart",
              "levels": made.sizes}  # fmt: skip
    print(f"profile {report['profile']}: {len(made.data):,} bytes, from {made.n_tokens} tokens; of {made.n_held_out} "
          "other chunks:")  # fmt: skip
    for level, (bits, error_k, error_v) in enumerate(made.sizes, 1):
        print(f"L{level} {bits:8.4f} bits/element of symbols, relative error of K {error_k:.3f}, of V {error_v:.3f}")
    return report


main = make_main("self_profile", parse_arguments, run, "store")

if __name__ == "__main__":
    main()
