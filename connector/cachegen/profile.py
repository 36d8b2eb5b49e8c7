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
import time

import numpy as np

from . import kl_curve, paper, quality
from .command import MAX_MODEL_LEN, OF_MODELS, Progress, make_main, make_parser, reading
from .compute_type import DTYPES, dtype_name
from .contexts import Caches, context_tokens, pick, text_names, tokenize, windows
from .fingerprint import model_fingerprint, weights_digest
from .klt import Matrices, Planes, split_layers
from .kv_model import KvModel, ModelError
from .make_profile import (
    AUTO,
    JOINT_SHARE,
    LEAST_RATIO,
    MAX_CHANNELS,
    N_CLASSES,
    PLANES,
    PROFILE_SHARE,
    choose_matrices,
    choose_shared,
    make_profile,
    most_shared,
)
from .profile_file import BAND, BLOCK_TOKENS, JOINT, N_LEVELS
from .quality import CHUNK_TOKENS
from .sinks import CHOICES
from .steps import DEFAULT, parse_steps
from .store_files import write_atomically, write_store

NEAR = 1.5  # times what was predicted, or part of it


def read_contexts(tokenizer, paths, held_out_paths, n_tokens, per_text):
    """(calibration contexts, held-out contexts). Without held-out files the last window of each text is held out."""
    def tokens(path):
        with open(path, encoding="utf-8", errors="replace") as file:
            return tokenize(tokenizer, file.read())

    calibration, held_out, names = [], [], text_names([*paths, *(held_out_paths or ())])
    for path in paths:
        (first, ids), name = tokens(path), names[path]
        found = windows(name, ids, n_tokens, first)
        if not held_out_paths:
            if len(found) == 1:
                found = windows(name, ids[: len(ids) // 2], n_tokens, first)
                held_out += windows(f"{name}+{len(ids) // 2}", ids[len(ids) // 2 :], n_tokens, first)
            else:
                held_out += found[-1:]
                found = found[:-1]
        if not found:
            raise SystemExit(f"profile: {path} has only {len(ids)} tokens, too few to calibrate on")
        calibration.append(pick(found, per_text))
    for path in held_out_paths or ():
        first, ids = tokens(path)
        held_out += windows(names[path], ids, n_tokens, first)[:1]
    # Round robin over the texts, so that a stop-gap after a few contexts has seen several domains.
    longest = max(map(len, calibration))
    return [c[i] for i in range(longest) for c in calibration if i < len(c)], held_out


def print_report(report):
    print(f"profile {report['profile']}, preset {report['preset']}: {report['profile_bytes']:,} bytes, "
          f"{100 * report['profile_share']:.1f} % of the weights; {report['n_classes']} classes")  # fmt: skip
    print(f"groups of {', '.join(map(str, report['group_layers']))} layers"
          + (f", K and V {report['planes']}" if "planes" in report else "")
          + (f"; {report['n_shared']} components of each joined" if report["n_shared"] else "")
          + f"; {report['n_sinks']} exact first tokens"
          + ("; a step for each block" if report["block_steps"] else ""))  # fmt: skip
    if report["has_odd_queries"]:
        print("one step for all blocks: the queries of this model are not to be had, or its attention is no plain one")
    if not report["held_out"]:
        print("not measured: the texts are too short to hold a part out")
        return
    print(f"held-out: {report['n_held_out']} contexts of {', '.join(report['held_out'])}")
    has_products = "multiply_adds" in report["levels"][0]
    print(f"sizes are of files of {CHUNK_TOKENS} tokens, estimated within about 1 %"
          + ("; madds: multiply-adds an element, to decode it" if has_products else ""))  # fmt: skip
    print(f"{'level':5s} {'step':>8s} {'bits/el':>8s} {'x ' + report['dtype']:>7s} {'KL':>9s} {'dNLL':>8s} "
          f"{'top-1':>6s}" + f" {'madds':>7s}" * has_products)  # fmt: skip
    width = {"fp32": 32}.get(report["dtype"], 16)
    for row in report["levels"]:
        print(f"L{row['level']:<4d} {row['step'][0]:8.5f} {row['bits_per_element']:8.4f} "
              f"{width / row['bits_per_element']:7.1f} {row['kl']:9.5f} {row['nll_change']:+8.4f} "
              f"{row['top1']:6.3f}" + (f" {row['multiply_adds']:7.0f}" if has_products else ""))  # fmt: skip
    told = [f"L{row['level']} {row['predicted_kl']:.5f}, {row['n_near_prediction']}" for row in report["levels"]]
    print(f"KL that loads are planned by, and contexts within {NEAR} times of it: {'; '.join(told)}")
    for row in report["levels"]:
        far = [(ratio, name) for ratio, name in zip(row["kl_over_predicted"], report["held_out"]) if not is_near(ratio)]
        if far:
            told = ", ".join(f"{name} {ratio:.2f}" for ratio, name in sorted(far))
            print(f"at L{row['level']} not within: {told} times")


def multiply_adds(profile, level):
    """An element's, to decode it."""
    given = profile.joint.n_given[level].astype(int) if profile.joint else np.zeros(BLOCK_TOKENS, int)
    products = elements = 0
    for g, matrices in enumerate(profile.basis):
        for m, basis in enumerate(matrices):
            n_channels = basis.numbers.shape[1]
            products += n_channels * (given + profile.n_active(level, g, m)).sum()
            elements += n_channels * BLOCK_TOKENS
    if profile.joint:
        products += len(profile.group_layers) * (given * profile.n_active(level, *JOINT)).sum()
    return float(products / elements)


def over_predicted(measured, predicted, is_their_mean=False):
    """Each of measured, KL of contexts, over what is predicted of it. Where that is their mean, each is held against
    the mean of the others: a context that is loaded had no part in it."""
    if is_their_mean:
        return [over_predicted([kl], (sum(measured) - kl) / (len(measured) - 1))[0] for kl in measured]
    return [kl / max(predicted, 1e-12) for kl in measured]


def is_near(ratio):
    return 1 / NEAR <= ratio <= NEAR


def make_report(model, profile, data, held_out, scores, curve, is_of_held_out, seconds, asked_for_block_steps):
    levels = []
    for level, result in scores.items():
        row = {"level": level + 1, "step": [float(s) for s in profile.step[level]], **result.as_json()}
        predicted = curve["kl"][level]
        ratios = over_predicted(result.kls, predicted, is_of_held_out)
        row.update(predicted_kl=predicted, kl_over_predicted=ratios, n_near_prediction=sum(map(is_near, ratios)))
        if profile.basis:
            row["multiply_adds"] = multiply_adds(profile, level)
        levels.append(row)
    return {
        "profile": profile.fingerprint.hex(),
        "preset": profile.preset,
        "profile_bytes": len(data),
        "profile_share": len(data) / model.weights_bytes,
        "n_classes": len(profile.classes),
        "n_shared": profile.n_shared,
        "n_joint_components": profile.joint.basis.n_components if profile.joint else 0,
        "n_components": [[b.n_components for b in both] for both in profile.basis or ()],
        "byte_bands": [[float(b.is_bytes.mean()) for b in both] for both in profile.basis or ()],
        "unit_bits": [[b.unit_bits for b in both] for both in profile.basis or ()],
        "group_layers": profile.group_layers,
        **({"planes": "joined" if profile.is_joined else "apart"} if profile.basis else {}),
        "n_sinks": profile.n_sinks,
        "block_steps": profile.class_at is not None,
        "has_odd_queries": asked_for_block_steps and profile.class_at is None,
        "dtype": model.dtype_name,
        "compute_dtype": dtype_name(model.compute_dtype),
        "held_out": [context.name for context in held_out],
        "n_held_out": len(held_out),
        "seconds": seconds,
        "levels": levels,
    }


def layers(text):
    """A number, or a list of them."""
    sizes = [int(n) for n in text.split(",")]
    return sizes if len(sizes) > 1 else sizes[0]


def count(text):
    """A number of things, 0 for all."""
    if int(text) < 0:
        raise ValueError(text)
    return int(text)


def parse_arguments(arguments):
    parser = make_parser("profile", __doc__)
    add = parser.add_argument
    add("model_dir")
    add("--texts", nargs="+", required=True, metavar="FILE", help="calibration text: many domains, much text")
    add("--out", required=True, metavar="STORE/MODEL")
    add("--preset", choices=("klt", "paper"), default="klt", help="of the codec (default %(default)s)")
    add("--no-default", action="store_true", help="the store goes on with the profile that it has")
    add("--held-out", nargs="+", metavar="FILE", help="text for the report (default: the last part of each text)")
    add("--tokens", type=int, default=3072, help="tokens of a context; fewer where the model's prompts are shorter "
        "(default %(default)s)")  # fmt: skip
    add("--report-contexts", type=count, default=9, help="held-out contexts measured, 0 for all (default %(default)s): "
        f"loads are planned by their KL, where {kl_curve.LEAST_HELD_OUT} or more have --tokens")  # fmt: skip
    add("--curve-contexts", type=count, default=kl_curve.N_CONTEXTS,
        help="contexts that show what a chunk costs by its distance to the end, 0 for all "
        "(default %(default)s)")  # fmt: skip
    add("--contexts", type=count, default=1, help="contexts of each text, 0 for all (default %(default)s)")
    add("--prefer", choices=tuple(MAX_CHANNELS), default="bytes", help="fewer bytes, fewer multiply-adds, or fewest "
        f"bytes: a KLT is over {', '.join(map(str, MAX_CHANNELS.values()))} channels at most, a profile "
        f"{', '.join(f'{100 * share:.0f} %%' for share in PROFILE_SHARE.values())} of the weights "
        "(default %(default)s)")  # fmt: skip
    add("--group-layers", type=layers, help="layers that share a section (and a KLT): a number, or a list like 4,4,6 "
        "(default: by --prefer, the profile's size and how much text there is)")  # fmt: skip
    add("--planes", choices=PLANES, help="one KLT for K and V of a group together, or one each (default: "
        "joined where a layer of both is within --prefer's channels)")  # fmt: skip
    add("--join", type=number_or_auto, default=AUTO, metavar="N", help="components of each group that one more KLT "
        f"turns, over all groups: a multiple of {BAND}, 0 for none, or auto: by the model's size and how much text "
        "there is, none with --prefer speed (default %(default)s)")  # fmt: skip
    add("--sinks", type=int, choices=CHOICES, help="first tokens of a context that stay exact (default: the fewest "
        "that lose next to no quality on the calibration texts)")  # fmt: skip
    add("--block-steps", action=argparse.BooleanOptionalAction, default=True, help="a step for each block of 8 tokens, "
        "by how much of what follows depends on it (default: yes)")  # fmt: skip
    add("--steps", help='of L1, L2, L3, or, with klt, "auto": by the KL divergence of L2 '
                        f'(default {DEFAULT}; paper: {paper.STEPS})')  # fmt: skip
    add("--digest-weights", action="store_true", help="engines read all weights once, too, before they use the store")
    add("--device", default="cpu")
    add("--dtype", choices=tuple(DTYPES), help="of weights and caches (default: the model's)")
    add("--compute-dtype", choices=tuple(DTYPES), help="to run the model in: K and V are rounded to --dtype all the "
        "same (default: by a short measurement, fp32 where the CPU is slow in --dtype)")  # fmt: skip
    add("--max-model-len", **MAX_MODEL_LEN)
    add("--memory-gib", type=float, default=4.0, help="for KV caches between the passes (default %(default)s)")
    add("--seed", type=int, default=1)
    add("--json", metavar="FILE", help="write the report there, too")
    return parser.parse_args(arguments)


def number_or_auto(text):
    return text if text == AUTO else int(text)


def shared_of(model, matrices, options, n_tokens):
    """Components of each group for a joint matrix, from --join; n_tokens: to learn it from. ValueError: so many it
    cannot be."""
    if options.join == AUTO:
        return 0 if options.prefer == "speed" else choose_shared(matrices, model.channels, n_tokens)
    most = most_shared(matrices, model.channels)
    if options.join % BAND or not 0 <= options.join <= most:
        raise ValueError(f"--join must be a multiple of {BAND} and {most} at most, not {options.join}")
    return options.join


def matrices_of(model, options, n_tokens, progress):
    """The Matrices that options ask for, learnt from n_tokens. ValueError: groups that are none."""
    most, planes = MAX_CHANNELS[options.prefer], (options.planes,) if options.planes else PLANES
    if options.group_layers is None:
        learnt, least = n_tokens // LEAST_RATIO, model.channels * (2 if planes == ("joined",) else 1)
        if learnt < least:
            print(f"profile: warning: {n_tokens} tokens to learn from, {LEAST_RATIO * least} are needed: the profile "
                  "will lose quality; give more text, or a larger --contexts", file=sys.stderr)  # fmt: skip
        elif learnt < most:
            progress.start(f"at most {learnt} channels a KLT: there are {n_tokens} tokens to learn from")
        most = min(most, learnt)
        return choose_matrices(model, PROFILE_SHARE[options.prefer] * model.weights_bytes, most, planes)
    groups = split_layers(model.n_layers, options.group_layers)
    fits = 2 * max(groups) * model.channels <= most
    return Matrices(groups, fits if len(planes) > 1 else options.planes == "joined")


def make_and_measure(model, fingerprint, contexts, held_out, matrices, steps, n_shared, options, progress):
    """(Profile, scores by level, curve of KL, whether that is of held-out text)"""
    is_paper = options.preset == "paper"
    caches, n_classes = Caches(model, int(options.memory_gib * 2**30), options.seed), options.classes or N_CLASSES
    if is_paper:
        profile = paper.make(
            model, fingerprint, caches, contexts, steps, options.group_layers, n_classes, progress
        )
    else:
        profile = make_profile(
            model, fingerprint, caches, contexts, matrices, steps, n_classes, progress, held_out,
            options.sinks, PROFILE_SHARE[options.prefer] + JOINT_SHARE * (n_shared > 0), n_shared, options.block_steps,
        )  # fmt: skip
    coder, planes = (paper.Coder, paper.Planes) if is_paper else (quality.Coder, Planes)
    coder, planes = coder(profile, model.device), planes(model)
    progress.start("quality on held-out text")
    scores = quality.measure(model, coder, planes, held_out, progress) if held_out else {}
    chosen = pick(contexts, options.curve_contexts)
    whole = max(context.n for context in chosen)
    whole_ones = [i for i, context in enumerate(held_out) if context.n == whole]
    is_of_held_out = len(whole_ones) >= kl_curve.LEAST_HELD_OUT
    of_others = [[scores[level].kls[i] for level in scores] for i in whole_ones] if is_of_held_out else []
    progress.start("KL divergence by distance to the end")
    levels = [kl_curve.CURVE_LEVEL] if is_of_held_out else range(N_LEVELS)
    curve = kl_curve.fit(kl_curve.measure(model, coder, planes, caches, chosen, progress, levels), of_others)
    return profile, scores, curve, is_of_held_out


def run(options):
    progress = Progress(options.quiet)
    from transformers import AutoTokenizer

    progress.start(f"loading {options.model_dir}")
    dtype, compute_dtype = DTYPES.get(options.dtype), DTYPES.get(options.compute_dtype)
    for path in (*options.texts, *(options.held_out or ())):
        with reading("profile", path), open(path, "rb") as file:
            file.read(1)  # before the model is loaded; of a folder this fails, too
    with reading("profile", options.model_dir, OF_MODELS):
        os.listdir(options.model_dir)  # else transformers takes it for a name to download
        model = KvModel(options.model_dir, options.device, dtype, compute_dtype, options.max_model_len)
        fingerprint = model_fingerprint(options.model_dir, model.rope_deviations)
        n_tokens = context_tokens(options.tokens, model.longest_prompt)
    with reading("profile", f"the tokenizer in {options.model_dir}", OF_MODELS):
        tokenizer = AutoTokenizer.from_pretrained(options.model_dir)
        if tokenizer("a").input_ids == tokenizer("b").input_ids:  # of some models one is made without any files
            raise ValueError("it makes the same of every text: its files (tokenizer.json) are missing")
    progress.start(f"a cache of {model.dtype_name}; the model computes in {dtype_name(model.compute_dtype)}")
    if n_tokens < options.tokens:
        progress.start(f"contexts of {n_tokens} tokens: prompts of the model have {model.longest_prompt} at most")
    contexts, held_out = read_contexts(tokenizer, options.texts, options.held_out, n_tokens, options.contexts)
    n_learnt = sum(context.n for context in contexts)
    held_out = pick(held_out, options.report_contexts)
    is_paper = options.preset == "paper"
    try:
        auto = options.steps == "auto" and not is_paper
        steps = None if auto else parse_steps(options.steps or (paper.STEPS if is_paper else DEFAULT))
        matrices = None if is_paper else matrices_of(model, options, n_learnt, progress)
        n_shared = 0 if is_paper else shared_of(model, matrices, options, n_learnt)
    except ValueError as error:
        raise SystemExit(f"profile: {error}") from error

    if steps is None and not held_out:
        raise SystemExit("profile: --steps auto needs held-out text, or texts of more than one context")

    with reading("profile", options.out):
        os.makedirs(options.out, mode=0o700, exist_ok=True)
    with reading("profile", f"running {options.model_dir}", ModelError):
        profile, scores, curve, is_of_held_out = make_and_measure(
            model, fingerprint, contexts, held_out, matrices, steps, n_shared, options, progress
        )
    data = profile.to_bytes()
    digest = weights_digest(options.model_dir) if options.digest_weights else None
    with reading("profile", options.out):
        write_store(options.out, model, fingerprint, profile, data, not options.no_default, curve=curve, digest=digest)
    seconds, asked = time.monotonic() - progress.began, options.block_steps and not is_paper
    report = make_report(model, profile, data, held_out, scores, curve, is_of_held_out, seconds, asked)
    print_report(report)
    if options.json:
        os.makedirs(os.path.dirname(os.path.abspath(options.json)), mode=0o700, exist_ok=True)
        write_atomically(os.path.abspath(options.json), json.dumps(report, indent=1).encode() + b"\n")
    return report


main = make_main("profile", parse_arguments, run, "model_dir")

if __name__ == "__main__":
    main()
