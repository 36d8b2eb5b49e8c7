#!/usr/bin/env python3
"""Every instruction set of this CPU decodes as FORMAT.md says, with profiles made from a real model.

usage: exactness_test.py DECODE_WITH CGTOOL          CG_MODEL_DIR: the model

The bases of golden files are synthetic. Those of a real model have rows whose elements differ much in size, and large
symbols in them. Its first layers have that, too (elements above 100 times the median, symbols up to 616), in two groups
of as many channels each as with all layers. What each instruction set decodes is to be, bit by bit, what the second
reader decodes.
"""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "connector"))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
try:
    import numpy as np
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer
except ImportError as error:
    print(f"skipped: {error}: instruction sets were not compared on a real profile")
    sys.exit(77)
import reader  # noqa: E402
from cachegen import profile  # noqa: E402
from cachegen.kv_model import Context, KvModel  # noqa: E402

CALIBRATION = os.path.join(ROOT, "tests", "data", "calibration", "novel_en.txt")
OTHER_TEXT = os.path.join(ROOT, "tests", "data", "calibration", "wikitext2_valid.txt")
N_LAYERS = 10
PROFILE_TOKENS = 512
N_TOKENS, CHUNK_TOKENS = 125, 72  # two chunks, of which one begins later and ends within a block
GROUPS = ("--group-layers", "5")  # as for more text than PROFILE_TOKENS
CASES = {  # options of the profile tool: what cgtool encodes
    GROUPS: (("--level", "L1"), ("--level", "L2"), ("--level", "L3")),
    (*GROUPS, "--join", "64"): (("--level", "L1", "--nested"),),  # by default none: too little text
    (*GROUPS, "--no-block-steps"): (("--level", "L2"),),
    ("--planes", "apart", "--group-layers", "3"): (("--level", "L2"),),
    ("--preset", "paper"): (("--level", "L2"),),
}
KERNELS = ("baseline", "avx2", "avx512", "vnni", "amx")


def first_layers(model_dir, folder):
    """The model without its other layers."""
    out = os.path.join(folder, "model")
    os.mkdir(out)
    for name in os.listdir(model_dir):
        if name != "config.json":
            os.symlink(os.path.join(os.path.abspath(model_dir), name), os.path.join(out, name))
    with open(os.path.join(model_dir, "config.json")) as file:
        config = json.load(file)
    with open(os.path.join(out, "config.json"), "w") as file:
        json.dump({**config, "num_hidden_layers": min(N_LAYERS, config["num_hidden_layers"])}, file)
    return out


def make_profile(model_dir, folder, options):
    text = os.path.join(folder, "text")
    with open(CALIBRATION) as whole, open(text, "w") as file:
        file.write(whole.read(6 * PROFILE_TOKENS))  # too little for held-out text, which would only be measured
    with contextlib.redirect_stdout(io.StringIO()):
        report = profile.run(profile.parse_arguments([
            model_dir, "--texts", text, "--out", os.path.join(folder, "store"), "--tokens", str(PROFILE_TOKENS),
            "--quiet", *options]))  # fmt: skip
    return os.path.join(folder, "store", "profiles", report["profile"] + ".cgp")


def save_cache(model_dir, path):
    with open(OTHER_TEXT) as file:
        ids = AutoTokenizer.from_pretrained(model_dir)(file.read(8 * N_TOKENS), return_tensors="pt").input_ids[0]
    k, v = KvModel(model_dir).prefill(Context("text", ids, N_TOKENS))
    tokens = ids[:N_TOKENS].int()
    save_file({"K": k.contiguous(), "V": v.contiguous(), "tokens": tokens.contiguous()}, path)


def cut(data):
    """The chunk, and each coarser level that it holds."""
    ends = [int.from_bytes(data[at : at + 8], "little") for at in (144, 136)]
    return [data] + [data[:end] for end in ends if end]


def compare(decode_with, profile_path, data, folder):
    """Returns how many instruction sets decode other bits."""
    chunk, n_bad = reader.Chunk(data), 0
    path, out = os.path.join(folder, "one.kv"), os.path.join(folder, "out.raw")
    with open(path, "wb") as file:
        file.write(data)
    want = chunk.decode(reader.Profile(reader.read(profile_path))).reshape(-1)
    for name in KERNELS:
        done = subprocess.run([decode_with, name, profile_path, path, out])
        if done.returncode == 77:
            print(f"L{chunk.level} {name}: not on this CPU: not compared")
            continue
        done.check_returncode()
        got = np.fromfile(out, f"<u{reader.ELEMENT_BYTES[chunk.dtype]}")
        n_other = np.count_nonzero(got != want)
        print(f"L{chunk.level} {name}: {n_other or 'none'} of {want.size} elements are other bits")
        n_bad += n_other > 0
    return n_bad


def main(decode_with, cgtool):
    model_dir = os.environ.get("CG_MODEL_DIR")
    if not model_dir:
        print("skipped: no CG_MODEL_DIR: instruction sets were not compared on a real profile")
        return 77
    torch.manual_seed(1)
    n_bad = 0
    with tempfile.TemporaryDirectory() as folder:
        tensors, chunks = os.path.join(folder, "in.safetensors"), os.path.join(folder, "chunks")
        model_dir = first_layers(model_dir, folder)
        save_cache(model_dir, tensors)
        for options, encodings in CASES.items():
            profile_path = make_profile(model_dir, folder, options)
            for encoding in encodings:
                print(f"profile {' '.join(options)}, {' '.join(encoding)}")
                subprocess.run([cgtool, "encode", *encoding, "--chunk-tokens", str(CHUNK_TOKENS), "--profile",
                                profile_path, tensors, chunks], check=True)  # fmt: skip
                for name in sorted(os.listdir(chunks)):
                    for data in cut(reader.read(os.path.join(chunks, name))):
                        n_bad += compare(decode_with, profile_path, data, folder)
                shutil.rmtree(chunks)
    return 1 if n_bad else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
