#!/usr/bin/env python3
"""What each kernel takes of a GPU, compared with a committed table: registers, stack (spills: none),
shared memory, and the occupancy that follows.

usage: resources_test.py LIBRARY TABLE NVCC_VERSION [--write]

Reads the compiled library with cuobjdump: of the PATH, of the CUDA toolkit, or of Triton's wheel. Skips (77) without
it, without the library, or with another release of nvcc than the table's: each allocates registers as it likes. Shared
memory of kernels that decode or code streams is their classes': here those of 154 classes, as the profile tool makes
for SmolLM2-135M.
"""

import glob
import os
import re
import shutil
import subprocess
import sys

KERNELS = {0: "start", 1: "symbols", 2: "joint", 3: "klt", 4: "anchors", 5: "deltas", 6: "exponents", 7: "project",
           8: "remove", 9: "quantize", 10: "spectra", 11: "estimate", 12: "code", 13: "pack"}
THREADS = {0: 256, 1: 256, 2: 512, 3: 512, 4: 256, 5: 256, 6: 256, 7: 128, 8: 128, 9: 128, 10: 128,
           11: 256, 12: 256, 13: 256}
# One class is that of idle lanes.
CLASS_BYTES, MOST_EXACT_CLASSES, CLASSES, KLT_SHARED = 400, 16 + 1, 154 + 1, 78 << 10
PROJECT_SHARED = 4 * 32 * (32 + 4 + 64 + 4)
CODING_SUMS = 256 * 8
SHARED = {
    0: 0,
    1: CLASSES * CLASS_BYTES,
    2: KLT_SHARED,
    3: KLT_SHARED,
    4: CLASSES * CLASS_BYTES,
    5: CLASSES * CLASS_BYTES,
    6: MOST_EXACT_CLASSES * CLASS_BYTES,
    7: PROJECT_SHARED,
    8: PROJECT_SHARED,
    9: 0,
    10: 0,
    11: CODING_SUMS,
    12: CODING_SUMS + CLASSES * CLASS_BYTES,
    13: CODING_SUMS,
}
# Of a multiprocessor (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
REGISTERS, WARPS, BLOCKS, RESERVED = 65536, 64, 32, 1024
SHARED_OF = {"sm_80": 164 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10}


def find_cuobjdump():
    engines = os.path.expanduser(
        "~/.cache/cachegenfs/engine-*/lib/python3*/site-packages/triton/backends/nvidia/bin/cuobjdump"
    )
    found = [shutil.which("cuobjdump"), *glob.glob("/usr/local/cuda/bin/cuobjdump"), *glob.glob(engines)]
    return next(filter(None, found), None)


def occupancy(arch, kind, registers):
    """Warps at once on a multiprocessor, and what bounds them."""
    warps = THREADS[kind] // 32
    bounds = {
        "warps": WARPS // warps,
        "blocks": BLOCKS,
        "registers": REGISTERS // ((registers * 32 + 255) // 256 * 256 * warps),
        "shared memory": SHARED_OF[arch] // (SHARED[kind] + RESERVED),
    }
    bound = min(bounds, key=bounds.get)
    return bounds[bound] * warps, bound


def lines_of(cuobjdump, library):
    text = subprocess.run([cuobjdump, "--dump-resource-usage", library], capture_output=True, text=True, check=True)
    arch = kind = None
    for line in text.stdout.splitlines():
        if match := re.match(r"arch = (sm_\d+)", line):
            arch = match[1]
        elif match := re.search(r"Function _Z14cg_cuda_kernelILj(\d)E", line):
            kind = int(match[1])
        elif match := re.search(r"Function _Z22cg_cuda_project_kernelILb(\d)E", line):
            kind = 7 + int(match[1])
        elif "cg_cuda_quantize_kernel" in line:
            kind = 9
        elif "cg_cuda_spectra_kernel" in line:
            kind = 10
        elif match := re.search(r"cg_cuda_coding_kernelILj(\d)E", line):
            kind = 11 + int(match[1])
        elif match := re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", line):
            registers, stack = int(match[1]), int(match[2]) + int(match[3])
            warps, bound = occupancy(arch, kind, registers)
            yield f"{arch:7} {KERNELS[kind]:10} {registers:4} {stack:6} {SHARED[kind]:7} {warps:6}  {bound}"


def main(library, table, version, write):
    cuobjdump = find_cuobjdump()
    if cuobjdump is None or not os.path.exists(library):
        print("skipped: no cuobjdump or no kernels, so what they take of a GPU is not checked")
        return 77
    release = "nvcc " + ".".join(version.split(".")[:2])
    now = [release, "arch    kernel     regs spills  shared  warps  bound by", *sorted(lines_of(cuobjdump, library))]
    print("\n".join(now))
    if write:
        with open(table, "w", encoding="utf-8") as file:
            file.write("\n".join(now) + "\n")
        return 0
    with open(table, encoding="utf-8") as file:
        before = file.read().splitlines()
    if before[0] != release:
        print(f"skipped: the table is of {before[0]}, so what these kernels take is not checked")
        return 77
    if len(now) != 2 + len(KERNELS) * len(SHARED_OF):
        print("error: not all kernels for all architectures")
        return 1
    for line in sorted(set(before) ^ set(now)):
        print("error:", "is no more:" if line in before else "is new:", line)
    return int(before != now)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4], "--write" in sys.argv[4:]))
