#!/usr/bin/env python3
"""Predicts how fast the GPU kernels decode, project and code, from their compiled code: not a measurement.

usage: gpu_model.py LIBRARY PROFILE.cgp --bits L1 L2 L3 [--rests L1 L2 L3 --rest-steps L1 L2 L3] [--runs N]
                    --out gpu_model.json

Counts the instructions of the hot loops in the sm_90 code (cuobjdump), and what a thread block moves and multiplies by
the profile's tables, and takes the slowest of what an H100 SXM's units need. Everything else is taken to hide behind
it: latencies, barriers' waits, uneven ends, blocks that find no room beside others. So the truth is below. A loop's
instructions are those of its shortest path that does the work; rows with an escape, or whose class has a shift, are
counted with theirs, as often as the classes' frequencies say. bits: coded bits an element at each level, as measured on
the CPU.
Left out, so that the truth is below for these, too: bank conflicts of shared memory; what stores to blocks take of L1
and L2 (a warp's are halves of sectors); and with preset paper and at L0 what finds each row's slot (cuda/sinks.cuh).
One chunk alone is bound by latencies instead, which are assumptions, too: each instruction of a row waits for the one
before, a stream is a warp of its own, and kernels follow one another.
The 8B geometry is Llama-3.1-8B's, a layer a group: matrices of 2,048 channels, whose components, digits, active columns
and classes have the shares that the profile's have. There is no such profile here; and none of it with a joint
matrix: which share of its components layers would share is not known (a profile may have 256 for each of 32 groups).
rests: with a joint matrix, what a given number has beyond 8 bits is multiplied by itself, and left out where a tile has
none (cuda/joint.cuh): the share of such tiles that are there by level, and of steps that have one.
runs: of rows that are coded with the same classes, of a chunk of 256 tokens: as many as its blocks have different
steps. Classes are counted as those of the level's own step.
"""

import argparse
import bisect
import collections
import glob
import itertools
import json
import math
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
    # Of one chunk alone. Clocks until what depends on an instruction can issue: arXiv:2402.13499 and microbenchmarks of
    # others; a launch that waits for the kernel before it.
    "clocks": {"instruction": 4, "shared": 29, "L1": 33, "L2": 260},
    "launch_us": 2,
}
STREAM_BYTES = 132  # codec/rans.h: what a stream adds
STREAM_PERCENT, SHORT_STREAM_PERCENT = 2, 8  # of a section, at most: as they are, and as short ones
STREAM_ROWS = 4096  # codec/rans.h: of a stream, over the percent
EXACT_BITS = 9  # codec/bands.c: components that are taken off before the others
# cuda/layout.h: of a row of tiles of a thread block of the sums, which has so many rows. A warp has half of the
# frequencies (pairs of them) of two columns.
TILE_TOKENS, TILE_CHANNELS, WARPS, COLUMNS, BAND, ROWS = 128, 128, 8, 8, 32, 2
HALVES = ((0, 3), (1, 2))
EXCHANGE = 8 * 4 + 2 * 8 * 4 + 2 * 8  # a warp's instructions: sums chosen, stored and loaded
CHUNK_TOKENS, FREQUENCIES = 256, 8
BACKWARD = re.compile(r"0x([0-9a-f]+)")
PASSES = ("start", "symbols", "joint", "klt", "anchors", "deltas", "exponents")  # cuda/layout.h


def find_cuobjdump():
    engines = "~/.cache/cachegenfs/engine-*/lib/python3*/site-packages/triton/backends/nvidia/bin/cuobjdump"
    return shutil.which("cuobjdump") or glob.glob(os.path.expanduser(engines))[0]


def functions(library):
    """{a pass, or project_ and whether it takes off, quantize_, spectra_, or coding_ and its step: [(address, opcode,
    rest, has a predicate)]} of sm_90."""
    text = subprocess.run([find_cuobjdump(), "--dump-sass", library], capture_output=True, text=True, check=True).stdout
    found, arch, kind = {}, None, None
    for line in text.splitlines():
        if match := re.match(r"\s*arch = (sm_\d+)", line):
            arch = match[1]
        elif match := re.search(
            r"Function : (?:_Z\d+cg_cuda_(project_|quantize_|spectra_|coding_)?kernel(?:IL[jb](\d)E)?)?", line
        ):
            kind = (match[1] or "") + (match[2] or "") or None
            kind = PASSES[int(kind)] if (kind or "").isdigit() else kind
        elif arch != "sm_90" or kind is None:
            continue
        elif match := re.match(r"\s+/\*([0-9a-f]+)\*/\s+(@!?U?P\w+ )?\s*([A-Z0-9_.]+)(.*);", line):
            found.setdefault(kind, []).append((int(match[1], 16), match[3], match[4], bool(match[2])))
    return found


def loops(code):
    """(first, last instruction) between a backward branch and where it goes, as indices."""
    index = {address: i for i, (address, *_) in enumerate(code)}
    for i, (address, opcode, rest, _) in enumerate(code):
        target = BACKWARD.search(rest) if opcode.split(".")[0] == "BRA" else None
        if target and int(target[1], 16) < address:
            yield index[int(target[1], 16)], i


def shortest(code, first, last, needed):
    """Instructions of the shortest way through a loop with so many of the needed opcodes; None: there is none."""
    names = list(needed)
    index = {code[i][0]: i for i in range(first, last + 1)}
    best = {first: {(0,) * len(names): 0}}
    done = None
    for i in range(first, last + 1):
        _, opcode, rest, predicated = code[i]
        for counts, n in best.get(i, {}).items():
            counts = tuple(
                min(needed[k], c + opcode.startswith(k)) for k, c in zip(names, counts, strict=True)
            )
            if i == last:
                if all(c == needed[k] for k, c in zip(names, counts, strict=True)):
                    done = n + 1 if done is None else min(done, n + 1)
                continue
            is_branch = opcode.split(".")[0] == "BRA" and not opcode.startswith("BRA.DIV")
            target = index.get(int(BACKWARD.search(rest)[1], 16)) if is_branch else None
            ways = ([i + 1] if predicated or not is_branch else []) + ([target] if target and target > i else [])
            for way in ways:
                if way <= last:
                    known = best.setdefault(way, {})
                    known[counts] = min(known.get(counts, n + 1), n + 1)
    return done


def quickest(code, **needed):
    """Those of the loops that can do it, the shortest first."""
    found = {}
    for first, last in loops(code):
        n = shortest(code, first, last, needed)
        if n is not None:
            found[first] = min(n, found.get(first, n))
    return sorted((n, first) for first, n in found.items())


def behind_sums(code, **needed):
    """Instructions of the shortest way from the last tensor instruction to the end that does the work. What stands
    behind that end belongs to loops before it."""
    last_of = lambda name: max(i for i, (_, opcode, *_) in enumerate(code) if opcode.startswith(name))  # noqa: E731
    return shortest(code, last_of("IMMA") + 1, last_of("EXIT"), needed)


def hot_loops(library):
    """Instructions of a step and of a lane's block of the inverse KLT, and of a row of a strip."""
    code = functions(library)
    symbols = code["symbols"]
    plain, shifts = quickest(symbols, VOTE=4, LDS=4, ST=4)[:2]
    coding = code["coding_1"]
    coded, coded_shifts, a_coded_run = quickest(coding, VOTE=2, LDS=1, LDG=1, STG=1)[:3]
    a_run_of_two_rows = quickest(symbols, VOTE=5, LDS=6, ST=4)[0][0]
    return {
        "klt_step": quickest(code["klt"], IMMA=16)[0][0],
        "klt_block": quickest(code["klt"], I2FP=32, ST=16)[0][0],
        "joint_step": quickest(code["joint"], IMMA=16)[0][0],
        "joint_block": behind_sums(code["joint"], STG=32) / 2,
        "row": plain[0] / 2,
        "run": a_run_of_two_rows - plain[0],
        "row_with_escape": next(n for n, first in quickest(symbols, VOTE=8, LDS=4, ST=4) if first == plain[1]) / 2,
        "row_with_shift": shifts[0] / 2,
        "row_refined": quickest(symbols, VOTE=2, LDG=4, ST=4)[0][0] / 2,
        "row_of_anchors": quickest(code["anchors"], VOTE=4, LDS=4, ST=4)[0][0] / 2,
        "row_of_deltas": quickest(code["deltas"], VOTE=4, LDS=4, ST=2)[0][0] / 2,
        "row_of_exponents": quickest(code["exponents"], VOTE=4, LDS=4, ST=2)[0][0] / 2,
        # A thread makes 16; it has no loop, and no element takes all ways through it: at most.
        "spectrum": len(code["spectra_"]) / 16,
        "project_piece": quickest(code["project_0"], FFMA=512)[0][0],
        "remove_piece": quickest(code["project_1"], FFMA=512)[0][0],
        "symbol": quickest(code["quantize_"], F2I=8, LDG=8, STG=8)[0][0] / 8,
        # A row of a lane's class, an entry and a word.
        "code_row": coded[0],
        "code_row_with_shift": coded_shifts[0],
        "code_row_with_escape": next(n for n, at in quickest(coding, VOTE=4, LDS=1, STG=3) if at == coded[1]),
        "code_row_refined": quickest(coding, VOTE=1, LDG=1, STG=1)[0][0],
        "code_run": a_coded_run[0] - coded[0],
        "estimate_row": quickest(code["coding_0"], LDG=3)[0][0],
    }


def rare(frequencies):
    """How likely a class's symbol is its escape, or not found at once: cuda/profile_blob.c's buckets."""
    ends = list(itertools.accumulate(frequencies))
    total = frequencies[-1]
    for bucket in range((14 << 3) + 1):
        low, high = (math.ceil((8 + b % 8) * 2 ** (b // 8) / 8) for b in (bucket, bucket + 1))
        first, last = max(0, 16385 - high), 16384 - low
        if first <= last:
            i, j = bisect.bisect_right(ends, first), bisect.bisect_right(ends, last)
            total += (min(last + 1, ends[-2]) - first) if j > i + 1 and first < ends[-2] else 0
    return total / 16384


def read_profile(path):
    """Per matrix: channels, by level the active columns by frequency and their classes; how many digits a band has."""
    with open(path, "rb") as file:
        b = file.read()
    number = lambda at, n: int.from_bytes(b[at : at + n], "little")  # noqa: E731
    layers, channels = number(40, 2), number(42, 2) * number(44, 2)
    at = 80 + 8 * max(1, b[76]) * (number(68, 2) // 2) + (layers if b[66] == 2 else 0)
    groups = [number(at + 2 * i, 2) for i in range(number(72, 2))]
    at += 2 * len(groups) + 24 + layers * 2 * channels * 8
    classes = []
    for _ in range(number(74, 2)):
        classes.append((b[at] > 0, rare([number(at + 2 + 2 * i, 2) for i in range(b[at + 1])])))
        at += 2 + 2 * b[at + 1]
    at += 12 * len(classes) if b[77] else 0
    version = number(8, 4)
    if version == 4:  # classes by scale, and what encoders weigh blocks by
        at += 7 * len(classes)
        at += 2 + 2 * layers * number(at, 2) * number(44, 2)
    matrices, n_shared, given = [], 0, [[0] * FREQUENCIES] * 3
    if version == 3 or (version == 4 and b[79]):  # the joint matrix comes first
        n_shared = number(at, 2)
        matrices.append({"channels": n_shared * len(groups), "components": number(at + 6, 2)})
        given = [[number(at + 10 + 16 * level + 2 * f, 2) for f in range(FREQUENCIES)] for level in range(3)]
        at += 58
    for n_layers in groups:
        for _ in range(1 if b[78] else 2):
            m = {"channels": n_layers * channels * (2 if b[78] else 1), "components": number(at, 2)}
            matrices.append({**m, "n_shared": n_shared, "given": given})
            at += 4
    for m in matrices:
        m.update({"active": [], "classes": []})
    for _ in range(3):
        for m in matrices:
            m["active"].append([number(at + 2 * f, 2) for f in range(8)])
            at += 16
            m["classes"].append([])
            for n in m["active"][-1]:
                m["classes"][-1].append([classes[c] for c in b[at : at + n]])
                at += n
    for m in matrices:
        m["digits"], m["exact"] = [], 0
        for c in range(m["components"]):
            at += c % BAND == 0
            bits, multiple = b[at], number(at + 1, 2)
            m["exact"] += m["exact"] == c and bits >= EXACT_BITS
            at += 3 + (m["channels"] * bits + 7) // 8
            digits = 2 if multiple << (bits - 1) > 128 else 1
            m["digits"][c // BAND :] = [max(digits, *m["digits"][c // BAND :])] if c % BAND else [digits]
        m["exact"] = min(math.ceil(m["exact"] / 16) * 16, m["components"])
    if at != len(b) - 8:  # a checksum is left
        raise ValueError(f"{path}: its layout is not the one of codec/FORMAT.md that is read here")
    joint = [matrices.pop(0)] if n_shared > 0 else []
    return matrices, joint, b[48:64].rstrip(b"\0").decode(), len(classes)


def stretched(items, n):
    return [items[i * len(items) // n] for i in range(n)]


def as_wide_as(matrices, channels):
    """The matrices with so many channels, and everything else in proportion."""
    wide = []
    for m in matrices:
        by = channels / m["channels"]
        active = [[round(n * by) for n in level] for level in m["active"]]
        digits = stretched(m["digits"], math.ceil(m["components"] * by / BAND))
        classes = [
            [stretched(cs, n) if cs else [] for cs, n in zip(level, ns, strict=True)]
            for level, ns in zip(m["classes"], active, strict=True)
        ]
        shares = {"components": round(m["components"] * by), "exact": round(m["exact"] * by)}
        wide.append({"channels": channels, "active": active, "classes": classes, "digits": digits, **shares})
    return wide


def columns(m, level, rests):
    """Bands of columns of symbols by frequency, and for each band the digits of the basis that multiply it: how many,
    and of which share of the tiles and of the steps. rests: these of rests. cuda/profile_blob.c: a band that the joint
    matrix gives has two columns, one of rests."""
    n_shared = math.ceil(m.get("n_shared", 0) / BAND)
    bands = []
    for f, n in enumerate(m["active"][level]):
        given = n_shared if n > 0 or n_shared == 0 else math.ceil(m["given"][level][f] / BAND)
        bands.append(math.ceil(n / BAND) + 2 * given)
    digits = []
    for band, n in enumerate(m["digits"]):
        digits += [(n, 1, 1), (n, *rests[level])] if band < n_shared else [(n, 1, 1)]
    return bands, digits[: max(bands)]


def klt(matrices, level, code, fits_L2, rests, joint=False):
    """Clocks of a multiprocessor for a tile, by unit, averaged over matrices by their channels. A basis that does not
    fit the L2 cache comes from memory for each chunk of 256 tokens. joint: of the joint matrix, whose sums stay on the
    GPU, as digits and cells."""
    clock, n_sm = H100["clock_GHz"], H100["multiprocessors"]
    total = collections.Counter()
    rows = TILE_TOKENS // 8
    step, block = (code["joint_step"], code["joint_block"]) if joint else (code["klt_step"], code["klt_block"])
    written = 4 if joint else 2
    for m in matrices:
        bands, digits = columns(m, level, rests)
        pairs = [max(bands[f : f + 2]) for f in range(0, FREQUENCIES, 2)]
        steps = sum(n * share for n, _, share in digits)
        multiplied = sum(  # by each half
            n * share
            for band, (n, _, share) in enumerate(digits)
            for half in HALVES
            if band < max(pairs[pair] for pair in half)
        )
        there = 2 * sum(n * share for band, (n, share, _) in enumerate(digits) for pair in pairs if band < pair)
        fetched = rows * BAND * sum(n * share for band, (n, share, _) in enumerate(digits) for b in bands if band < b)
        basis = sum(n * min(1, ROWS * share) for n, _, share in digits) * COLUMNS * 512 / ROWS
        exchanged = 0 if joint else WARPS * 2 * 8 * 512
        stored = written * TILE_TOKENS * TILE_CHANNELS
        unit = {
            "tensor": there * WARPS * 2 * 4096 / (H100["int8_macs_per_clock"] * H100["share_of_mma_sync"]),
            "issue": WARPS * (steps * step + 2 * block + (not joint) * EXCHANGE) / H100["issue_per_clock"],
            # A warp loads digits once for two columns, and the basis of both; what is fetched is stored first.
            "shared memory": (COLUMNS * (there / 2 + multiplied) * 512 + exchanged + fetched + basis)
            / H100["shared_bytes_per_clock"],
            "HBM": (stored + (1 - fits_L2) * steps * COLUMNS * 512 * TILE_TOKENS / CHUNK_TOKENS)
            / (H100["hbm_GBps"] / n_sm / clock),
            "L2": (fetched + basis) / (H100["l2_GBps"] / n_sm / clock),
        }
        tiles = m["channels"] / TILE_CHANNELS
        total.update({name: clocks * tiles for name, clocks in unit.items()})
        total["tiles"] += tiles
        total["MACs"] += there / FREQUENCIES * BAND * m["channels"]
    units = ("tensor", "issue", "shared memory", "L2", "HBM")
    bound = max(units, key=total.get)
    seconds = total[bound] / total["tiles"] / clock / 1e9
    return {
        "bound": bound,
        "GBps": round(2 * TILE_TOKENS * TILE_CHANNELS * n_sm / seconds / 1e9),
        "macs_per_element_in_digits": round(total["MACs"] / sum(m["channels"] for m in matrices)),
        "clocks_per_tile": {k: round(total[k] / total["tiles"]) for k in units},
    }


def joint_pass(joint, level, code, rests, n_channels):
    """The joint matrix's pass; GB/s of the elements that follow from it."""
    report = klt(joint, level, code, True, rests, joint=True)
    report["GBps"] = round(report["GBps"] * n_channels / sum(m["channels"] for m in joint))
    return report


def strips(matrix, level, nested):
    """(whether it is refined, classes of its columns) of each strip, as cg_symbols_lay() cuts them."""
    for f, n in enumerate(matrix["active"][level]):
        coarse = matrix["active"][level + 1][f] if nested and level < 2 else 0
        for begin, end in ((0, coarse), (coarse, n)):
            for c in range(begin, end, 32):
                yield end == coarse and coarse > 0, matrix["classes"][level][f][c : min(c + 32, end)]


def instructions_of(matrices, level, code, nested, n_runs):
    """Of a warp, for a row of all strips: issued, and strips."""
    total, n = 0.0, 0
    for m in matrices:
        for refined, classes in strips(m, level, nested):
            n += 1
            total += n_runs * code["run"] / (CHUNK_TOKENS / 8)
            if refined:
                total += code["row_refined"]
                continue
            shifted = any(shift for shift, _ in classes)
            likely = 1 - math.prod(1 - p for _, p in classes)
            total += code["row_with_shift"] if shifted else code["row"]
            total += likely * (code["row_with_escape"] - code["row"])
    return total, n


def symbols(matrices, level, code, bits, nested, n_channels, n_runs):
    """Streams to symbols. n_channels: of K and V."""
    passes = range(2, level - 1, -1) if nested else (level,)
    counted = [instructions_of(matrices, i, code, nested and i < 2, n_runs) for i in passes]
    issued, n_strips = sum(c[0] for c in counted), sum(c[1] for c in counted)
    cells = sum(sum(m["active"][level]) for m in matrices) / 8 / n_channels
    rows_per_second = H100["multiprocessors"] * H100["issue_per_clock"] * H100["clock_GHz"] * 1e9
    by_issue = 2 * 8 * n_channels * rows_per_second / issued / 1e9
    by_HBM = 2 * H100["hbm_GBps"] / (bits / 8 + 3 * cells)  # cells and digits are written
    return {
        "cells_per_element": round(cells, 3),
        "instructions_a_row": round(issued / n_strips, 1),
        "GBps_by_issue": round(by_issue),
        "GBps_by_HBM": round(by_HBM),
        "GBps": round(min(by_issue, by_HBM)),
    }


def streams(matrix, level, bits, nested, percent):
    """(strips, streams) of a level's section, as cg_rans_choose_streams() cuts it. bits: an element, of this level."""
    n_strips = sum(1 for _ in strips(matrix, level, nested))
    affordable = bits / 8 * CHUNK_TOKENS * matrix["channels"] * percent / 100 / STREAM_BYTES
    even = math.ceil(n_strips * CHUNK_TOKENS // FREQUENCIES * percent / STREAM_ROWS)
    return n_strips, max(1, min(n_strips, max(int(affordable), min(even, int(2 * affordable)))))


def row_clocks(instructions, lookups, bits, columns):
    """Of a warp alone. lookups: loads of shared memory, one after another; a stream's words come in sectors of 32."""
    c = H100["clocks"]
    sectors = bits * columns / 8 / 32  # new ones of a row
    return (instructions - lookups - 1) * c["instruction"] + lookups * c["shared"] + c["L1"] + sectors * c["L2"]


def section_bits(m, matrices, joint, level, bits):
    """Of the level's bits an element, those of a channel of a matrix. With a joint matrix, by the symbols it has."""
    if not joint:
        return bits
    symbols_of = [sum(of["active"][level]) for of in matrices + joint]
    return bits * sum(of["channels"] for of in matrices) * sum(m["active"][level]) / sum(symbols_of) / m["channels"]


def passing(channels, clocks_per_tile):
    """Microseconds of a pass that multiplies, over so many channels of 256 tokens."""
    blocks = CHUNK_TOKENS / TILE_TOKENS / ROWS * channels / TILE_CHANNELS
    waves = math.ceil(blocks / H100["multiprocessors"])
    return waves * ROWS * clocks_per_tile / H100["clock_GHz"] / 1e3


def run_clocks(instructions):
    """Of a warp alone: a run's bounds are loaded, then two numbers of its class."""
    c = H100["clocks"]
    return (instructions - 3) * c["instruction"] + c["L1"] + 2 * c["shared"]


def one_chunk(matrices, joint, n_matrices, code, bits, levels_of, percent, n_runs):
    """Microseconds from bytes in device memory to blocks written, of a chunk of 256 tokens that is alone, by its finest
    level: passes of streams (coarsest first), what the joint matrix gives, and the inverse KLT of n_matrices. Nested
    where it has coarser levels. levels_of: levels(), by level. percent: what streams may cost."""
    report = {}
    passes_of = ("joint", "inverse_klt")
    clocks_of = [{k: max(of[k]["clocks_per_tile"].values()) for k in passes_of if k in of} for of in levels_of]
    for finest in range(3):
        passes = {}
        for level in range(2, finest - 1, -1):
            of_level = bits[level] - (bits[level + 1] if level < 2 else 0)
            longest = 0
            for m in matrices + joint:
                own = section_bits(m, matrices, joint, level, of_level)
                n_strips, n_streams = streams(m, level, own, True, percent)
                a_row = own * 8 * m["channels"] / n_strips / 32  # bits of a column of a row
                refined = level < 2
                clocks = row_clocks(code["row_refined" if refined else "row"], 0 if refined else 2, a_row, 32)
                a_strip = CHUNK_TOKENS / 8 * clocks + n_runs * run_clocks(code["run"])
                longest = max(longest, math.ceil(n_strips / n_streams) * a_strip)
            passes[f"L{level + 1}"] = round(longest / H100["clock_GHz"] / 1e3)
        n_channels = sum(m["channels"] for m in matrices) / len(matrices) * n_matrices
        multiplying = {"inverse_klt_us": round(passing(n_channels, clocks_of[finest]["inverse_klt"]))}
        if joint:
            multiplying["joint_us"] = round(passing(joint[0]["channels"], clocks_of[finest]["joint"]))
        launches = (1 + len(passes) + len(multiplying)) * H100["launch_us"]  # zeros and rotations first
        report[f"L{finest + 1}"] = {
            "streams_us": passes,
            **multiplying,
            "launches_us": launches,
            "us": sum(passes.values()) + sum(multiplying.values()) + launches,
        }
    return report


def projected(m):
    """Of each frequency at L1: the components that an encoder projects on; and how many of them it wants as they are,
    for the joint matrix."""
    n_shared = m.get("n_shared", 0)
    given = [max(of[f] for of in m["given"]) if n_shared > 0 else 0 for f in range(FREQUENCIES)]
    return [n_shared + n if n > 0 else g for n, g in zip(m["active"][0], given, strict=True)], given


def projection(matrices, joint, code):
    """An encoder's spectra, projections and symbols at L1, by issue: 4 warps make 32 x 64 sums, a piece of 32 channels
    at a time. What the link moves: K and V up, and rows of the joint matrix; down the K and V that the CPU checks it
    by, symbols and their residues, and what the joint matrix is made of."""
    elements = CHUNK_TOKENS * sum(m["channels"] for m in matrices)
    clocks = elements / 32 * code["spectrum"] / H100["issue_per_clock"]
    up, given_bytes = 2 * elements, 0
    for m in matrices + joint:
        pieces = {"project_piece": 0, "remove_piece": 0}
        components, given = projected(m)
        for n in components:
            exact = min(n, m["exact"])
            columns = math.ceil(exact / 64) + math.ceil((n - exact) / 64)
            pieces["project_piece"] += columns * m["channels"] / 32
            pieces["remove_piece"] += math.ceil(m["channels"] / 64) * math.ceil(exact / 32) if n > exact else 0
        made = sum(math.ceil(n / 32) for n in m["active"][0] + given) * CHUNK_TOKENS / 8 * code["symbol"]
        clocks += (4 * sum(n * code[kind] for kind, n in pieces.items()) + made) / H100["issue_per_clock"]
        if m in joint:
            n_frequencies = max((f + 1 for f, n in enumerate(components) if n > 0), default=0)
            up += 4 * CHUNK_TOKENS / 8 * m["channels"] * n_frequencies
        given_bytes += 4 * CHUNK_TOKENS / 8 * sum(given)
    cells = CHUNK_TOKENS / 8 * sum(sum(m["active"][0]) for m in matrices + joint)
    return {
        "GBps": round(2 * elements * H100["multiprocessors"] * H100["clock_GHz"] / clocks),
        "bytes_up_an_element": round(up / elements, 2),
        "bytes_down_an_element": round(2 + ((2 + 4 / (CHUNK_TOKENS / 8)) * cells + given_bytes) / elements, 2),
    }


def coding(matrices, joint, code, bits, n_runs):
    """An encoder's streams of L1 to L3, nested, from symbols in device memory: by issue. A warp takes a strip in the
    estimate, which looks at every eighth row, and a stream in the coding; copies to the host are the link's. An escape
    is counted where a decoder has one or searches. alone_us: one task after another, the largest stream of each, where
    latencies bound."""
    rows, c = CHUNK_TOKENS / 8, H100["clocks"]
    elements = CHUNK_TOKENS * sum(m["channels"] for m in matrices)
    issued = alone = 0.0
    for m in matrices + joint:
        longest = 0.0
        for level in range(3):
            of_level = bits[level] - (bits[level + 1] if level < 2 else 0)
            own = section_bits(m, matrices, joint, level, of_level)
            n_strips, n_streams = streams(m, level, own, True, STREAM_PERCENT)
            coded = 0.0
            for refined, classes in strips(m, level, level < 2):
                likely = 0 if refined else 1 - math.prod(1 - p for _, p in classes)
                shifted = any(shift for shift, _ in classes)
                row = code["code_row_refined" if refined else "code_row_with_shift" if shifted else "code_row"]
                row += likely * (code["code_row_with_escape"] - code["code_row"])
                coded += rows * row + n_runs * code["code_run"]
            issued += coded + n_strips * rows / 8 * code["estimate_row"]
            a_strip = coded / max(1, n_strips) * c["instruction"] + rows * (c["shared"] - c["instruction"])
            longest = max(longest, math.ceil(n_strips / max(1, n_streams)) * a_strip)
        alone += longest / H100["clock_GHz"] / 1e3 + 3 * H100["launch_us"]
    seconds = issued / (H100["multiprocessors"] * H100["issue_per_clock"] * H100["clock_GHz"] * 1e9)
    return {"GBps": round(2 * elements / seconds / 1e9), "alone_us": round(alone)}


def together(*rates):
    return round(1 / sum(1 / rate for rate in rates))


def levels(matrices, joint, code, bits, rests, fits_L2, n_runs):
    report = {}
    n_channels = sum(m["channels"] for m in matrices)
    for level in range(3):
        stream, nested = (
            symbols(matrices + joint, level, code, bits[level], n, n_channels, n_runs) for n in (False, True)
        )
        inverse = klt(matrices, level, code, fits_L2, rests)
        of_joint = {"joint": joint_pass(joint, level, code, rests, n_channels)} if joint else {}
        rates = [inverse["GBps"], *(of["GBps"] for of in of_joint.values())]
        report[f"L{level + 1}"] = {
            "symbols": stream,
            "nested_symbols_GBps": nested["GBps"],
            **of_joint,
            "inverse_klt": inverse,
            "one_after_the_other_GBps": together(stream["GBps"], *rates),
            "nested_one_after_the_other_GBps": together(nested["GBps"], *rates),
        }
    return report


def rows_GBps(instructions):
    """A row of 32 elements of 2 bytes."""
    return round(64 * H100["multiprocessors"] * H100["issue_per_clock"] * H100["clock_GHz"] / instructions)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("profile")
    parser.add_argument("--bits", nargs=3, type=float, required=True)
    parser.add_argument("--rests", nargs=3, type=float, default=[1, 1, 1])
    parser.add_argument("--rest-steps", nargs=3, type=float, default=[1, 1, 1])
    parser.add_argument("--runs", type=float, default=1)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    code = hot_loops(arguments.library)
    matrices, joint, preset, n_classes = read_profile(arguments.profile)
    rests = list(zip(arguments.rests, arguments.rest_steps, strict=True))
    wide = [] if joint else as_wide_as(matrices, 2048)
    report = {
        "is": "a prediction from compiled code, not a measurement; see tests/bench/gpu_model.py",
        "device": "H100 SXM",
        "assumed": H100,
        "profile": os.path.basename(arguments.profile),
        "preset": preset,
        "classes": n_classes,
        "matrices": [(m["channels"], m["components"]) for m in joint + matrices],
        "instructions": code,
        "runs": arguments.runs,
    }
    if joint:
        report["rests"], report["rest_steps"] = arguments.rests, arguments.rest_steps
    for name, of, n, fits_L2 in (("", matrices, len(matrices), True), ("_of_8B_geometry", wide, 32, False)):
        if not of:
            continue
        by_level = levels(of, joint, code, arguments.bits, rests, fits_L2, arguments.runs)
        report["levels" + name] = by_level
        for more, percent in (("", STREAM_PERCENT), ("_short_streams", SHORT_STREAM_PERCENT)):
            alone = one_chunk(of, joint, n, code, arguments.bits, list(by_level.values()), percent, arguments.runs)
            report["one_chunk_alone" + more + name] = alone
            print("one chunk alone" + more + name, alone)
        report["projection_L1" + name] = projection(of, joint, code)
        report["coding_L1_to_L3" + name] = coding(of, joint, code, arguments.bits, arguments.runs)
        print("projection" + name, report["projection_L1" + name], "coding", report["coding_L1_to_L3" + name])
    report["paper_GBps"] = rows_GBps(0.1 * code["row_of_anchors"] + 0.9 * code["row_of_deltas"])
    report["L0_GBps"] = rows_GBps(code["row_of_exponents"])
    print("geometry  level  symbols  nested  joint  inverse KLT  bound          both  nested  int8 MACs an element")
    for name in filter(lambda key: key.startswith("levels"), report):
        for level, of in report[name].items():
            inverse = of["inverse_klt"]
            print(
                f"{'8B' if '8B' in name else 'profile':8}  {level:5}  {of['symbols']['GBps']:7}"
                f"  {of['nested_symbols_GBps']:6}  {of.get('joint', {}).get('GBps', ''):5}"
                f"  {inverse['GBps']:11}  {inverse['bound']:13}"
                f"  {of['one_after_the_other_GBps']:4}  {of['nested_one_after_the_other_GBps']:6}"
                f"  {inverse['macs_per_element_in_digits']}"
            )
    print("paper", report["paper_GBps"], "GB/s, L0", report["L0_GBps"], "GB/s (without escapes)")
    with open(arguments.out, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
