#!/usr/bin/env python3
"""Size against quality, from real chunk files: size_quality.py MODEL_DIR PROFILE.cgp --cgtool PATH TEXT...

Each TEXT is one context of --tokens tokens and the 256 that follow: FILE, FILE@CHARACTER (where to begin), or
FILE.jsonl#LINE (its "prompt"). The caches are coded by cgtool in chunks of 256 tokens; size is that of the files, all
counted; KL divergence and top-1 agreement compare what the model says of the 256 tokens after the decoded cache with
what it says after its own. Needs torch and transformers, and connector/ on PYTHONPATH.
"""

import argparse
import json
import os
import subprocess
import tempfile

import torch
from cachegen.kv_model import Context, KvModel
from cachegen.quality import score
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

CONTINUATION = 256


def read_text(name):
    if "#" in name:
        path, line = name.rsplit("#", 1)
        with open(path, encoding="utf-8") as lines:
            return json.loads(lines.readlines()[int(line)])["prompt"]
    path, _, begin = name.partition("@")
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()[int(begin or 0) :]


def folder_bytes(folder):
    return sum(entry.stat().st_size for entry in os.scandir(folder))


def cgtool(options, *arguments):
    subprocess.run([options.cgtool, *arguments], check=True, stdout=subprocess.DEVNULL)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model_dir")
    ap.add_argument("profile")
    ap.add_argument("texts", nargs="+")
    ap.add_argument("--cgtool", default="build/codec/cgtool")
    ap.add_argument("--tokens", type=int, default=3072)
    a = ap.parse_args()
    torch.set_grad_enabled(False)
    model, tokenizer = KvModel(a.model_dir), AutoTokenizer.from_pretrained(a.model_dir)
    sums = {level: [0.0] * 4 for level in ("L1", "L2", "L3")}  # bits, elements, KL, top-1
    for name in a.texts:
        ids = tokenizer(read_text(name), return_tensors="pt").input_ids[0, : a.tokens + CONTINUATION]
        context = Context(name, ids, len(ids) - CONTINUATION)
        k, v = model.prefill(context)
        reference, next_ids = model.log_probs(context, k, v), ids[context.n :]
        with tempfile.TemporaryDirectory() as work:
            tokens = ids[: context.n].to(torch.int32)
            save_file({"K": k.contiguous(), "V": v.contiguous(), "tokens": tokens}, f"{work}/kv.st")
            for level, row in sums.items():
                coded, decoded = f"{work}/{level}", f"{work}/{level}.st"
                cgtool(a, "encode", "--level", level, "--profile", a.profile, f"{work}/kv.st", coded)
                cgtool(a, "decode", "--profile", a.profile, coded, decoded)
                tensors = load_file(decoded)
                log_probs = model.log_probs(context, tensors["K"], tensors["V"])
                kl, top1 = score(log_probs, reference, next_ids)[:2]
                row[0] += 8 * folder_bytes(coded)
                row[1] += 2 * tensors["K"].numel()
                row[2] += kl / len(a.texts)
                row[3] += top1 / len(a.texts)
    print(f"{'level':5s} {'bits/el':>8s} {'KL':>9s} {'top-1':>6s}")
    for level, (bits, elements, kl, top1) in sums.items():
        print(f"{level:5s} {bits / elements:8.4f} {kl:9.5f} {top1:6.3f}")


if __name__ == "__main__":
    main()
