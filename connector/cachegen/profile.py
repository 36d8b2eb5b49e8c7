"""Makes the codec profile of a model: python -m cachegen.profile MODEL_DIR --texts FILE... --out STORE/MODEL

Runs the model over calibration text and writes STORE/MODEL/model.json, profiles/<fingerprint>.cgp and profiles/default.
Ends with size and quality of each level on text that the calibration did not see. A 135M model takes minutes on two CPU
cores. Needs torch and transformers. --preset paper makes CacheGen's codec as its paper describes it, to compare with.
The new profile is what the store uses from then on (profiles/default); chunks of the one before it stay readable by its
fingerprint, and come back when profiles/default names it again. --no-default leaves that file alone.
"""

import argparse
import json
import os
import sys
import tempfile
import time

import torch

from . import paper, quality
from .assemble import N_SINKS, assemble, plan_columns
from .fingerprint import model_fingerprint
from .klt import Moments, Planes, Transform, quantize, split_layers
from .kv_model import Context, KvModel
from .profile_file import BLOCK_TOKENS, N_LEVELS
from .quality import CHUNK_TOKENS
from .rope import Unsupported
from .steps import DEFAULT, find_steps, parse_steps
from .tables import Histograms, shift_of

CONTINUATION = 256  # tokens after a context: Fisher information and quality come from them
MAX_GROUP_CHANNELS = 5120
PROFILE_SHARE = 0.05  # of the weights' bytes: a profile's largest size
BASIS_BYTES = 0.55  # of an element of a basis, on average: what is cut counts as nothing
LEAST_BUDGET_BYTES = 1 << 20  # the share of a tiny model is no use


class Progress:
    """Lines on stderr: stage, how far, how long to go."""

    def __init__(self, quiet=False):
        self.quiet, self.stage, self.began = quiet, "", time.monotonic()
        self.stage_began = self.began

    def start(self, stage):
        self.stage, self.stage_began = stage, time.monotonic()
        self._print("")

    def __call__(self, done, total):
        spent = time.monotonic() - self.stage_began
        left = spent / done * (total - done)
        self._print(f" {done}/{total}" + (f", {left:.0f} s left" if done < total else f", took {spent:.0f} s"))

    def _print(self, text):
        if not self.quiet:
            print(f"[{time.monotonic() - self.began:5.0f} s] {self.stage}{text}", file=sys.stderr, flush=True)


def windows(name, ids, n_tokens):
    """Contexts that cover ids one after the other, each with its continuation; a short text is one shorter context."""
    size = n_tokens + CONTINUATION
    starts = range(0, max(len(ids) - size, 0) + 1, size)
    found = [Context(f"{name}@{at}", ids[at : at + size], n_tokens) for at in starts if at + size <= len(ids)]
    if not found and len(ids) >= CONTINUATION // 4 + 64:
        follow = min(CONTINUATION, len(ids) // 4)
        found = [Context(f"{name}@0", ids, (len(ids) - follow) // BLOCK_TOKENS * BLOCK_TOKENS)]
    return found


def pick(items, n):
    """n of items, evenly spread; all of them when n is 0 or there are no more."""
    if not n or n >= len(items):
        return items
    return [items[round(i * len(items) / n)] for i in range(n)]


def read_contexts(tokenizer, paths, held_out_paths, n_tokens, per_text):
    """(calibration contexts, held-out contexts). Without held-out files the last window of each text is held out."""
    def tokens(path):
        with open(path, encoding="utf-8", errors="replace") as file:
            return torch.tensor(tokenizer(file.read(), verbose=False).input_ids)

    calibration, held_out = [], []
    for path in paths:
        ids, name = tokens(path), os.path.basename(path)
        found = windows(name, ids, n_tokens)
        if not held_out_paths:
            if len(found) == 1:
                found = windows(name, ids[: len(ids) // 2], n_tokens)
                held_out += windows(f"{name}+{len(ids) // 2}", ids[len(ids) // 2 :], n_tokens)
            else:
                held_out += found[-1:]
                found = found[:-1]
        if not found:
            raise SystemExit(f"profile: {path} has only {len(ids)} tokens, too few to calibrate on")
        calibration.append(pick(found, per_text))
    for path in held_out_paths or ():
        held_out += windows(os.path.basename(path), tokens(path), n_tokens)[:1]
    # Round robin over the texts, so that a stop-gap after a few contexts has seen several domains.
    longest = max(map(len, calibration))
    return [c[i] for i in range(longest) for c in calibration if i < len(c)], held_out


class Caches:
    """KV caches of contexts, kept while they fit in limit_bytes and computed again when they don't; and the Fisher
    information of each, computed once: profiles from other selections of the same contexts share both."""

    def __init__(self, model, limit_bytes, seed=1):
        self.model, self.left_bytes, self.kept = model, limit_bytes, {}
        self.information, self.generator = {}, torch.Generator().manual_seed(seed)

    def get(self, context):
        if context.name in self.kept:
            return self.kept[context.name]
        k, v = self.model.prefill(context)
        n_bytes = 2 * k.numel() * k.element_size()
        if n_bytes <= self.left_bytes:
            self.left_bytes -= n_bytes
            self.kept[context.name] = (k, v)
        return k, v

    def fisher(self, context, k, v):
        """Of the context whose cache is k, v: as KvModel.fisher()."""
        if context.name not in self.information:
            self.information[context.name] = self.model.fisher(context, k, v, N_SINKS, self.generator)
        return self.information[context.name]


def default_group_layers(model, budget_bytes):
    """Layers a group: more are better, but the bases must fit into the profile's bytes."""
    for n in range(10, 1, -1):
        n_bytes = BASIS_BYTES * 2 * model.n_layers * model.channels * n * model.channels
        if n * model.channels <= MAX_GROUP_CHANNELS and n_bytes < budget_bytes:
            return n
    return 1


def calibrate(model, caches, contexts, groups, progress):
    progress.start("mean, covariance and Fisher information")
    planes = Planes(model)
    moments = Moments(model.n_layers, model.channels, groups, model.device)
    for i, context in enumerate(contexts):
        k, v = caches.get(context)
        fisher = caches.fisher(context, k, v)
        with torch.no_grad():
            moments.add(planes.flat(k, v)[:, :, N_SINKS:], fisher)
        progress(i + 1, len(contexts))
    return moments


def fill_transform(moments, groups, device, progress):
    progress.start("eigenvectors")
    weight = moments.weight()
    basis = moments.basis(weight)
    rows = [[component for component, _ in both] for both in basis]
    return Transform(groups, moments.mean(), weight, rows, N_SINKS, device)


@torch.no_grad()
def count_symbols(model, caches, contexts, transform, steps, progress):
    """Histograms [level][group][plane], and mean squares of L1 symbols [group][plane] [8][N]."""
    planes, sizes = Planes(model), [range(2)] * len(transform.groups)
    each = [(g, p) for g, both in enumerate(sizes) for p in both]
    progress.start("scale of the coefficients")
    sample = pick(contexts, max(3, len(contexts) // 4))
    square = {gp: 0.0 for gp in each}
    for i, context in enumerate(sample):
        x = planes.flat(*caches.get(context))
        for g, p in each:
            square[g, p] = square[g, p] + transform.coefficients(x, g, p)[1:].pow(2).mean(0) / len(sample)
        progress(i + 1, len(sample))
    histograms = [
        {(g, p): Histograms(shift_of(square[g, p] / steps[level][p] ** 2), model.device) for g, p in each}
        for level in range(N_LEVELS)
    ]
    progress.start("statistics of the symbols")
    mean_square = {gp: 0.0 for gp in each}
    for i, context in enumerate(contexts):
        x = planes.flat(*caches.get(context))
        for g, p in each:
            z = transform.coefficients(x, g, p)[1:]  # the first block has the sinks
            mean_square[g, p] = mean_square[g, p] + z.pow(2).mean(0) / (len(contexts) * steps[0][p] ** 2)
            for level in range(N_LEVELS):
                histograms[level][g, p].add(quantize(z, steps[level][p]).int())
        progress(i + 1, len(contexts))
    return histograms, mean_square


def make_profile(model, fingerprint, caches, contexts, groups, steps, n_classes, progress, held_out=()):
    """The Profile of model, with fingerprint as its model's, from contexts. steps: as parse_steps() gives them, or
    None, to find them on held_out. Caches serve later profiles, too."""
    moments = calibrate(model, caches, contexts, groups, progress)
    transform = fill_transform(moments, groups, model.device, progress)
    del moments
    if steps is None:
        progress.start("steps")
        steps = find_steps(model, transform, held_out, progress)
    histograms, mean_square = count_symbols(model, caches, contexts, transform, steps, progress)
    progress.start("classes")
    budget_bytes = max(PROFILE_SHARE * model.weights_bytes, LEAST_BUDGET_BYTES)
    plan = plan_columns(transform, histograms, mean_square, budget_bytes)
    return assemble(model, fingerprint, transform, histograms, plan, steps, n_classes)


def write_atomically(path, data):
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".tmp-")  # 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    folder = os.open(folder, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def write_store(out, model, fingerprint, profile, data, make_default=True, described=None):
    """described: what model.json says already, which stays."""
    description = {
        "version": 1,
        "name": os.path.basename(os.path.abspath(out)),
        "n_layers": model.n_layers,
        "n_kv_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "dtype": model.dtype_name,
        "model_fingerprint": fingerprint,
        "rope": model.rope.as_json(),
        **(described or {}),
    }
    text = json.dumps(description, indent=1).encode() + b"\n"
    name = profile.fingerprint.hex()
    write_atomically(os.path.join(out, "model.json"), text)
    write_atomically(os.path.join(out, "profiles", name + ".cgp"), data)
    if make_default:
        write_atomically(os.path.join(out, "profiles", "default"), name.encode() + b"\n")


def print_report(report):
    print(f"profile {report['profile']}, preset {report['preset']}: {report['profile_bytes']:,} bytes, "
          f"{100 * report['profile_share']:.1f} % of the weights; {report['n_classes']} classes")  # fmt: skip
    if not report["held_out"]:
        print("not measured: the texts are too short to hold a part out")
        return
    print(f"held-out: {report['n_held_out']} contexts of {', '.join(report['held_out'])}")
    has_active = "active" in report["levels"][0]
    print(f"sizes are of files of {CHUNK_TOKENS} tokens, estimated within about 1 %"
          + ("; active: multiply-adds an element, as a share of the channels of a group" if has_active else ""))  # fmt: skip
    print(f"{'level':5s} {'step':>8s} {'bits/el':>8s} {'x ' + report['dtype']:>7s} {'KL':>9s} {'dNLL':>8s} "
          f"{'top-1':>6s}" + f" {'active':>7s}" * has_active)  # fmt: skip
    width = {"fp32": 32}.get(report["dtype"], 16)
    for row in report["levels"]:
        print(f"L{row['level']:<4d} {row['step'][0]:8.5f} {row['bits_per_element']:8.4f} "
              f"{width / row['bits_per_element']:7.1f} {row['kl']:9.5f} {row['nll_change']:+8.4f} "
              f"{row['top1']:6.3f}" + (f" {row['active']:7.3f}" if has_active else ""))  # fmt: skip


def make_report(model, profile, data, held_out, scores, seconds):
    channels = [n * model.channels for n in profile.group_layers]
    levels = []
    for level, result in scores.items():
        row = {"level": level + 1, "step": [float(s) for s in profile.step[level]], **result.as_json()}
        if profile.basis:
            n_active = sum(sum(profile.n_active(level, g, p)) for g in range(len(channels)) for p in range(2))
            row["active"] = n_active / (2 * BLOCK_TOKENS * sum(channels))
        levels.append(row)
    return {
        "profile": profile.fingerprint.hex(),
        "preset": profile.preset,
        "profile_bytes": len(data),
        "profile_share": len(data) / model.weights_bytes,
        "n_classes": len(profile.classes),
        "n_components": [[b.n_components for b in both] for both in profile.basis or ()],
        "n_wide": [[len(b.wide) for b in both] for both in profile.basis or ()],
        "group_layers": profile.group_layers,
        "dtype": model.dtype_name,
        "held_out": [context.name for context in held_out],
        "n_held_out": len(held_out),
        "seconds": seconds,
        "levels": levels,
    }


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(prog="python -m cachegen.profile", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model_dir")
    add("--texts", nargs="+", required=True, metavar="FILE", help="calibration text: many domains, much text")
    add("--out", required=True, metavar="STORE/MODEL")
    add("--preset", choices=("klt", "paper"), default="klt", help="of the codec (default %(default)s)")
    add("--no-default", action="store_true", help="the store goes on with the profile that it has")
    add("--held-out", nargs="+", metavar="FILE", help="text for the report (default: the last part of each text)")
    add("--tokens", type=int, default=3072, help="tokens of a context (default %(default)s)")
    add("--report-contexts", type=int, default=5, help="held-out contexts measured, 0 for all (default %(default)s)")
    add("--contexts", type=int, default=1, help="contexts of each text, 0 for all (default %(default)s)")
    add("--group-layers", default=None, help="layers that share a section (and a KLT): a number, or a list like 4,4,6")
    add("--steps", help='of L1, L2, L3, or, with klt, "auto": by the KL divergence of L2 '
                        f'(default {DEFAULT}; paper: {paper.STEPS})')  # fmt: skip
    add("--classes", type=int, help=argparse.SUPPRESS)
    add("--device", default="cpu")
    add("--dtype", choices=("bf16", "fp16", "fp32"), help="of weights and caches (default: the model's)")
    add("--memory-gib", type=float, default=4.0, help="for KV caches between the passes (default %(default)s)")
    add("--seed", type=int, default=1)
    add("--json", metavar="FILE", help="write the report there, too")
    add("--quiet", action="store_true", help="no progress")
    return parser.parse_args(arguments)


def run(options):
    progress = Progress(options.quiet)
    from transformers import AutoTokenizer

    progress.start(f"loading {options.model_dir}")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}.get(options.dtype)
    model = KvModel(options.model_dir, options.device, dtype)
    fingerprint = model_fingerprint(options.model_dir)
    tokenizer = AutoTokenizer.from_pretrained(options.model_dir)
    contexts, held_out = read_contexts(tokenizer, options.texts, options.held_out, options.tokens, options.contexts)
    group_layers = None
    if options.group_layers:
        sizes = [int(n) for n in options.group_layers.split(",")]
        group_layers = sizes if len(sizes) > 1 else sizes[0]
    held_out = pick(held_out, options.report_contexts)
    is_paper = options.preset == "paper"
    try:
        auto = options.steps == "auto" and not is_paper
        steps = None if auto else parse_steps(options.steps or (paper.STEPS if is_paper else DEFAULT))
    except ValueError as error:
        raise SystemExit(f"profile: {error}") from error

    if steps is None and not held_out:
        raise SystemExit("profile: --steps auto needs held-out text, or texts of more than one context")

    caches = Caches(model, int(options.memory_gib * 2**30), options.seed)
    if is_paper:
        profile = paper.make(model, fingerprint, caches, contexts, steps, group_layers, options.classes, progress)
    else:
        group_layers = group_layers or default_group_layers(model, PROFILE_SHARE * model.weights_bytes)
        groups = split_layers(model.n_layers, group_layers)
        profile = make_profile(
            model, fingerprint, caches, contexts, groups, steps, options.classes or 192, progress, held_out
        )  # fmt: skip
    caches.kept.clear()
    data = profile.to_bytes()
    write_store(options.out, model, fingerprint, profile, data, not options.no_default)
    progress.start("quality on held-out text")
    scores = {}
    if held_out:
        coder, planes = (paper.Coder, paper.Planes) if is_paper else (quality.Coder, Planes)
        scores = quality.measure(model, coder(profile, model.device), planes(model), held_out, progress)
    report = make_report(model, profile, data, held_out, scores, time.monotonic() - progress.began)
    print_report(report)
    if options.json:
        write_atomically(os.path.abspath(options.json), json.dumps(report, indent=1).encode() + b"\n")
    return report


def main(arguments=None):
    options = parse_arguments(arguments)
    try:
        run(options)
    except Unsupported as error:
        raise SystemExit(f"profile: {options.model_dir} is not supported: {error}") from error


if __name__ == "__main__":
    main()
