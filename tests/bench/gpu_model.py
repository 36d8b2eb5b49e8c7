#!/usr/bin/env python3
"""Predicts how fast the GPU kernels decode, from their compiled code: not a measurement.

usage: gpu_model.py LIBRARY PROFILE.cgp --bits L1 L2 L3 --out gpu_model.json

Counts the instructions of the hot loops in the sm_90 code (cuobjdump), and what a thread block moves and multiplies by
the profile's tables, and takes the slowest of what an H100 SXM's units need. Everything else is taken to hide behind
it: latencies, barriers' waits, uneven ends. So the truth is below; where branches cannot be told apart, all of them
are counted, which is above. bits: coded bits an element at each level, as measured on the CPU.
"""

import argparse
import collections
import glob
import json
import os
import re
import shutil
import subprocess

H100 = {
    "multiprocessors": 132,
    "clock_GHz": 1.83,  # that of the data sheet's 1,979 TOPS of int8
    "issue_per_clock": 4,
    "int8_macs_per_clock": 4096,
    "share_of_mma_sync": 0.63,  # arXiv:2402.13499: mma.sync reaches 63 % of the data sheet, wgmma all of it
    "shared_bytes_per_clock": 128,
    "l2_GBps": 5500,  # measured by others, e.g. chipsandcheese.com's microbenchmarks
    "hbm_GBps": 3350,
}
TILE_TOKENS, TILE_CHANNELS, WARPS, BAND, FREQUENCIES = 256, 128, 16, 32, 8
BACKWARD = re.compile(r"0x([0-9a-f]+)")


def find_cuobjdump():
    engines = "~/.cache/cachegenfs/engine-*/lib/python3*/site-packages/triton/backends/nvidia/bin/cuobjdump"
    return shutil.which("cuobjdump") or glob.glob(os.path.expanduser(engines))[0]


def functions(library):
    """{kind of pass: [(address, opcode, rest)]} of sm_90."""
    text = subprocess.run([find_cuobjdump(), "--dump-sass", library], capture_output=True, text=True, check=True).stdout
    found, arch, kind = {}, None, None
    for line in text.splitlines():
        if match := re.match(r"\s*arch = (sm_\d+)", line):
            arch = match[1]
        elif match := re.search(r"Function : _Z14cg_cuda_kernelILj(\d)E", line):
            kind = int(match[1])
        elif arch == "sm_90" and (match := re.match(r"\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+ )?\s*([A-Z0-9_.]+)(.*);", line)):
            found.setdefault(kind, []).append((int(match[1], 16), match[2], match[3]))
    return found


def loops(code):
    """Bodies between a backward branch and where it goes, as counters of opcodes; the smallest first."""
    for address, opcode, rest in code:
        target = BACKWARD.search(rest) if opcode.startswith("BRA") else None
        if target and int(target[1], 16) < address:
            begin = int(target[1], 16)
            yield collections.Counter(op.split(".")[0] for at, op, _ in code if begin <= at <= address)


def hot_loops(library):
    code = functions(library)
    klt = list(loops(code[5]))
    step = min((c for c in klt if c["IMMA"] >= 16), key=lambda c: c.total())
    rare = min((c for c in klt if c["IMMA"] == 4), key=lambda c: c.total())
    finish = min((c for c in klt if c["I2FP"] >= 32), key=lambda c: c.total())
    # A row is a backward loop without bars and with one renormalization (refined), or five (plain).
    refined = min((c for c in loops(code[0]) if c["SHFL"] == 2), key=lambda c: c.total())
    plain = min((c for c in loops(code[0]) if c["SHFL"] == 8), key=lambda c: c.total())
    return {
        # The sums' shift, 64 instructions, happens a few times a matrix.
        "klt_step": step.total() - rare.total() - 64,
        "klt_finish": finish.total(),
        "refined_row": refined.total(),
        "plain_row_with_escapes_and_shifts": plain.total(),
    }


def read_profile(path):
    """Per matrix: channels, by level the active columns by frequency; bands: is each of two digits."""
    with open(path, "rb") as file:
        b = file.read()
    number = lambda at, n: int.from_bytes(b[at : at + n], "little")  # noqa: E731
    layers, channels = number(40, 2), number(42, 2) * number(44, 2)
    at = 80 + 8 * max(1, b[76]) * (number(68, 2) // 2) + (layers if b[66] == 2 else 0)
    groups = [number(at + 2 * i, 2) for i in range(number(72, 2))]
    at += 2 * len(groups) + 24 + layers * 2 * channels * 8
    n_classes = number(74, 2)
    for _ in range(n_classes):
        at += 2 + 2 * b[at + 1]
    at += 12 * n_classes if b[77] else 0
    matrices = []
    for n_layers in groups:
        for _ in range(1 if b[78] else 2):
            matrices.append({"channels": n_layers * channels * (2 if b[78] else 1), "components": number(at, 2), "active": []})
            at += 4
    for _ in range(3):
        for m in matrices:
            m["active"].append([number(at + 2 * f, 2) for f in range(8)])
            at += 16 + sum(m["active"][-1])
    for m in matrices:
        m["digits"] = []
        for c in range(m["components"]):
            at += c % BAND == 0
            bits, multiple = b[at], number(at + 1, 2)
            at += 3 + (m["channels"] * bits + 7) // 8
            digits = 2 if multiple << (bits - 1) > 128 else 1
            m["digits"][c // BAND :] = [max(digits, *m["digits"][c // BAND :])] if c % BAND else [digits]
    return matrices, b[48:64].rstrip(b"\0").decode(), n_classes


def klt(matrices, level, code):
    """Clocks of a multiprocessor for a tile, by unit, averaged over matrices by their channels."""
    clock, n_sm = H100["clock_GHz"], H100["multiprocessors"]
    total = collections.Counter()
    for m in matrices:
        most = max(m["active"][level])
        steps = sum(digits for band, digits in enumerate(m["digits"]) if band * BAND < most)
        rows = FREQUENCIES * TILE_TOKENS // 8
        unit = {
            "tensor": steps * WARPS * 16 * 4096 / (H100["int8_macs_per_clock"] * H100["share_of_mma_sync"]),
            "issue": WARPS * (steps * code["klt_step"] + 2 * code["klt_finish"]) / H100["issue_per_clock"],
            "shared memory": steps * (WARPS * FREQUENCIES * 512 + rows * BAND) / H100["shared_bytes_per_clock"],
            "L2": steps * (rows * BAND + WARPS / 2 * 512) / (H100["l2_GBps"] / n_sm / clock),
        }
        tiles = m["channels"] / TILE_CHANNELS
        total.update({name: clocks * tiles for name, clocks in unit.items()})
        total["tiles"] += tiles
        total["MACs"] += steps * BAND * m["channels"]
    bound = max(("tensor", "issue", "shared memory", "L2"), key=total.get)
    seconds = total[bound] / total["tiles"] / clock / 1e9
    return {
        "bound": bound,
        "GBps": round(2 * TILE_TOKENS * TILE_CHANNELS * n_sm / seconds / 1e9),
        "macs_per_element_in_digits": round(total["MACs"] / sum(m["channels"] for m in matrices)),
        "clocks_per_tile": {k: round(total[k] / total["tiles"]) for k in ("tensor", "issue", "shared memory", "L2")},
    }


def symbols(matrices, level, rows_code, bits):
    """Streams to symbols, bound by issue; and the words' bytes by HBM, far below."""
    cells = sum(sum(m["active"][level]) / 8 for m in matrices) / sum(m["channels"] for m in matrices)
    rows_per_second = H100["multiprocessors"] * H100["issue_per_clock"] * H100["clock_GHz"] * 1e9 / rows_code
    return {
        "cells_per_element": round(cells, 3),
        "bound": "issue",
        "GBps": round(2 * rows_per_second * 32 / cells / 1e9),
        "GBps_by_HBM": round(2 * H100["hbm_GBps"] / (bits / 8 + 3 * cells + 2)),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("profile")
    parser.add_argument("--bits", nargs=3, type=float, required=True)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    code = hot_loops(arguments.library)
    matrices, preset, n_classes = read_profile(arguments.profile)
    report = {
        "is": "a prediction from compiled code, not a measurement; see tests/bench/gpu_model.py",
        "device": "H100 SXM",
        "assumed": H100,
        "profile": os.path.basename(arguments.profile),
        "preset": preset,
        "classes": n_classes,
        "matrices": [(m["channels"], m["components"]) for m in matrices],
        "instructions": code,
        "levels": {},
    }
    print("level  symbols GB/s  inverse KLT GB/s  bound          both GB/s  int8 MACs an element")
    for level in range(3):
        stream = symbols(matrices, level, code["plain_row_with_escapes_and_shifts"], arguments.bits[level])
        inverse = klt(matrices, level, code)
        both = round(1 / (1 / stream["GBps"] + 1 / inverse["GBps"]))
        report["levels"][f"L{level + 1}"] = {"symbols": stream, "inverse_klt": inverse, "one_after_the_other_GBps": both}
        print(
            f"L{level + 1}     {stream['GBps']:12}  {inverse['GBps']:16}  {inverse['bound']:13}  {both:9}"
            f"  {inverse['macs_per_element_in_digits']}"
        )
    with open(arguments.out, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
