"""Real K and V through the connector, with blocks in a GPU's memory against blocks in the host's; prints JSON.

usage: PYTHONPATH=connector CACHEGEN_LIBRARY=... python roundtrip.py MODEL_STORE KV [--contexts N] [--repeats N]
           [--root DIR] [--config JSON]

MODEL_STORE: a store with one model, of which model.json and the profile are taken. KV: capture_kv.py's file
(tests/bench). The same K and V, as bf16, under different salts are the contexts: in a store they are different files.

Saves them off the GPU and off the host, into a store each, at L0 and nested at L1 to L3. Checks that L0 gives back
every bit either way; that at each level the GPU's blocks are those of the CPU, bit for bit, and no others are touched;
and by how much the lossy levels of both saves are off. Then loads all contexts at once, by turns with and without the
GPU, from the page cache. Exit status 1: something differs. Needs torch, and for the GPU's part one with CUDA.
"""

import argparse
import array
import json
import os
import select
import shutil
import statistics
import sys
import tempfile
import time

import torch
from cachegen import abi

BLOCK = 16  # tokens
LEVELS = range(abi.N_LEVELS)


def read_context(path, info):
    with open(path, "rb") as file:
        data = bytearray(file.read())
    n = int.from_bytes(data[:4], "little")
    tokens = array.array("I", bytes(data[4 : 4 + 4 * n]))
    n_elements = info["n_layers"] * 2 * n * info["n_kv_heads"] * info["head_dim"]
    n_bytes = (len(data) - 4 - 4 * n) // n_elements
    kv = torch.frombuffer(data, dtype={2: torch.bfloat16, 4: torch.float32}[n_bytes], offset=4 + 4 * n)
    return tokens, kv.to(torch.bfloat16).reshape(info["n_layers"], 2, n, info["n_kv_heads"], info["head_dim"])


class Engine:
    """A connector with blocks [layer][plane][block][token][head][dim] on a torch device, for n contexts."""

    def __init__(self, root, info, kv, tokens, n_contexts, device, config):
        self.tokens, self.device, self.kv_shape = tokens, device, kv.shape
        n_layers, _, n_tokens, n_heads, dim = kv.shape
        self.n_blocks = -(-n_tokens // BLOCK)
        self.blocks = torch.full(
            (n_layers, 2, n_contexts * self.n_blocks + 1, BLOCK, n_heads, dim), float("nan"), dtype=torch.bfloat16
        ).to(device)
        order = torch.randperm(n_contexts * self.n_blocks, generator=torch.Generator().manual_seed(1)) + 1
        self.tables = order.reshape(n_contexts, self.n_blocks).tolist()  # block 0 is nobody's
        self.connector = abi.Connector({"root": root, "model": info["name"], "ttft_budget_ms": 600000, **config})
        stride = [s * 2 for s in self.blocks.stride()]
        cuda = self.blocks.is_cuda
        self.kv_id = self.connector.register_kv(
            [layer.data_ptr() for layer in self.blocks],
            layout=abi.LAYOUT_STRIDED,
            memory=abi.MEMORY_CUDA if cuda else abi.MEMORY_HOST,
            n_kv_heads=n_heads,
            head_dim=dim,
            dtype=abi.DTYPES["bf16"],
            block_tokens=BLOCK,
            n_blocks=self.blocks.shape[2],
            offset_bytes=(0, stride[1]),
            block_stride=stride[2],
            token_stride=(stride[3], stride[3]),
            head_stride=(stride[4], stride[4]),
            dim_stride=(2, 2),
        )
        self.after = (abi.AFTER_STREAM, torch.cuda.current_stream().cuda_stream) if cuda else None

    def request(self, context, level=None):
        return abi.make_request(self.tokens, salt=b"context %d" % context, level=level)

    def put(self, kv, context):
        n_tokens = kv.shape[2]
        padded = torch.zeros((*kv.shape[:2], self.n_blocks * BLOCK, *kv.shape[3:]), dtype=kv.dtype)
        padded[:, :, :n_tokens] = kv
        table = torch.tensor(self.tables[context], device=self.device)
        self.blocks[:, :, table] = padded.reshape(*kv.shape[:2], self.n_blocks, BLOCK, *kv.shape[3:]).to(self.device)

    def get(self, context):
        table = torch.tensor(self.tables[context], device=self.device)
        rows = self.blocks[:, :, table].cpu()
        return rows.reshape(*rows.shape[:2], -1, *rows.shape[4:])[:, :, : self.kv_shape[2]]

    def wait(self):
        if select.select([self.connector.eventfd()], [], [], 1)[0]:
            os.read(self.connector.eventfd(), 8)

    def save(self, context):
        n_tokens = len(self.tokens)
        while True:
            save = self.connector.save_start(
                self.request(context), self.kv_id, 0, n_tokens, 0, True, self.tables[context], after=self.after
            )
            if save is not None:
                break
            self.wait()
        while not (progress := self.connector.save_poll(save)).done:
            self.wait()
        self.connector.save_free(save)
        if progress.status != abi.OK or progress.loaded_tokens != n_tokens:
            sys.exit(f"a save ended with {progress.status} after {progress.loaded_tokens} tokens")

    def plan(self, context, level):
        lookup = self.connector.lookup_start(self.request(context, level), 0)
        while (hit := self.connector.lookup_poll(lookup)) is None:
            self.wait()
        plan = self.connector.lookup_plan(lookup) if hit.hit_tokens > 0 else b""
        self.connector.lookup_free(lookup)
        return hit.hit_tokens, plan

    def load(self, contexts, level):
        """Seconds from the first load's start to the last one's end, of all at once; and the tokens of each."""
        plans = [self.plan(context, level) for context in contexts]
        began = time.monotonic()
        loads = [
            self.connector.load_start(self.kv_id, 0, n, self.tables[context], plan, after=self.after)
            for context, (n, plan) in zip(contexts, plans, strict=True)
        ]
        for load, (n, _) in zip(loads, plans, strict=True):
            while not (progress := self.connector.load_poll(load)).done:
                self.wait()
            if progress.status != abi.OK or progress.loaded_tokens != n:
                sys.exit(f"a load of {n} tokens ended with {progress.status} after {progress.loaded_tokens}")
        seconds = time.monotonic() - began
        for load in loads:
            self.connector.load_free(load)
        return seconds, plans[0][0]

    def spoil(self):
        self.blocks.fill_(float("nan"))
        if self.blocks.is_cuda:
            torch.cuda.synchronize()


def bits(kv):
    return kv.contiguous().view(torch.int16)


def spread(values, digits=4):
    functions = {"median": statistics.median, "least": min, "most": max}
    return {name: float(f"{function(values):.{digits}g}") for name, function in functions.items()}


class Check:
    def __init__(self, root, arguments):
        model = next(entry for entry in os.scandir(arguments.store) if entry.is_dir())
        with open(os.path.join(model.path, "model.json"), encoding="utf-8") as file:
            self.info = json.load(file)
        self.info["dtype"] = "bf16"
        self.tokens, self.kv = read_context(arguments.kv, self.info)
        self.roots = {}
        self.n_contexts = arguments.contexts
        self.repeats = arguments.repeats
        self.config = arguments.config
        for name in ("host", "gpu"):
            self.roots[name] = os.path.join(root, name)
            to = os.path.join(self.roots[name], self.info["name"])
            os.makedirs(to)
            shutil.copytree(os.path.join(model.path, "profiles"), os.path.join(to, "profiles"))
            with open(os.path.join(to, "model.json"), "w", encoding="utf-8") as file:
                json.dump(self.info, file)
        self.failures = []

    def engine(self, store, device):
        config = {"store_levels": [f"L{level}" for level in LEVELS], **self.config}
        return Engine(self.roots[store], self.info, self.kv, self.tokens, self.n_contexts, device, config)

    def expect(self, is_so, what):
        if not is_so:
            self.failures.append(what)
            print(f"FAILED: {what}", file=sys.stderr)

    def save(self, engine):
        began = time.monotonic()
        for context in range(self.n_contexts):
            engine.put(self.kv, context)
            engine.save(context)
        stats = engine.connector.get_stats()
        n_bytes = self.n_contexts * self.kv.numel() * 2
        seconds = time.monotonic() - began
        self.expect(stats.gpu_errors == 0, f"{stats.gpu_errors} errors of the GPU in saves")
        return {"seconds": seconds, "encode_thread_s": stats.encode_ns * 1e-9, "MB": n_bytes * 1e-6}

    def compare(self, host, other, gpu, level):
        """At a level: the host's blocks of both saves, and the GPU's of the host's save."""
        n = [e.load([0], level)[1] for e in (host, other)]
        ours = host.get(0)[:, :, : n[0]].float()
        theirs = other.get(0)[:, :, : n[1]].float()
        kv = self.kv[:, :, : n[0]].float()
        self.expect(n[0] == n[1] > 0, f"L{level}: {n} tokens")
        off = [((x - kv).norm() / kv.norm()).item() for x in (ours, theirs)]
        result = {"tokens": n[0], "relative_error_saved_by_cpu": off[0], "relative_error_saved_by_gpu": off[1]}
        if level == 0:
            self.expect(off == [0, 0], "L0 does not give back what was saved")
        else:
            self.expect(off[1] < off[0] * 1.01, f"L{level}: the GPU's save is off by {off[1]}, the CPU's by {off[0]}")
        if gpu is None:
            return result
        before = gpu.connector.get_stats().chunks_decoded_on_gpu
        gpu.spoil()
        gpu.load([0], level)
        decoded = gpu.connector.get_stats().chunks_decoded_on_gpu - before
        same = torch.equal(bits(gpu.get(0)[:, :, : n[0]]), bits(host.get(0)[:, :, : n[0]]))
        self.expect(same, f"L{level}: the GPU's blocks are not the CPU's")
        self.expect(decoded > 0, f"L{level}: the GPU decoded nothing")
        untouched = torch.ones(gpu.blocks.shape[2], dtype=torch.bool)
        untouched[gpu.tables[0][: -(-n[0] // BLOCK)]] = False
        others = gpu.blocks[:, :, untouched.to(gpu.device)]
        self.expect(bool(others.isnan().all()), f"L{level}: other blocks were touched")
        return {**result, "chunks_decoded_on_gpu": decoded, "blocks_are_the_cpus": same}

    def time_loads(self, engines, level):
        contexts = list(range(self.n_contexts))
        seconds = {name: [] for name in engines}
        for i in range(self.repeats + 2):  # the first two warm up
            for name, engine in engines.items():
                s, n = engine.load(contexts, level)
                if i >= 2:
                    seconds[name].append(s)
        n_bytes = self.n_contexts * n * self.kv[:, :, 0].numel() * 2
        return {name: {"GBps": spread([n_bytes / s * 1e-9 for s in of])} for name, of in seconds.items()}

    def time_one(self, engines, level):
        return {
            name: {"ms": spread([1e3 * engine.load([0], level)[0] for _ in range(self.repeats + 2)][2:])}
            for name, engine in engines.items()
        }

    def run(self):
        has_gpu = torch.cuda.is_available()
        report = {
            "tokens": len(self.tokens),
            "contexts": self.n_contexts,
            "repeats": self.repeats,
            "threads": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if has_gpu else None,
        }
        host = self.engine("host", "cpu")
        gpu = self.engine("gpu", "cuda") if has_gpu else None
        other = self.engine("gpu", "cpu")
        info = (gpu or host).connector.get_info()
        report["gpu_state"], report["gpu_reason"] = info.gpu, info.gpu_reason.decode()
        report["saves_by_cpu"] = self.save(host)
        report["saves_by_gpu"] = self.save(gpu or other)
        reader = self.engine("host", "cuda") if has_gpu else None
        report["levels"] = {f"L{level}": self.compare(host, other, reader, level) for level in LEVELS}
        engines = {"cpu": host} if reader is None else {"cpu": host, "gpu": reader}
        report["loads"] = {f"L{level}": self.time_loads(engines, level) for level in LEVELS}
        report["one_load"] = {f"L{level}": self.time_one(engines, level) for level in LEVELS}
        if reader is not None:
            stats = reader.connector.get_stats()
            self.expect(stats.gpu_errors == 0, f"{stats.gpu_errors} errors of the GPU in loads")
        for engine in (host, other, gpu, reader):
            if engine is not None:
                engine.connector.close()
        report["failures"] = self.failures
        print(json.dumps(report, indent=1))
        return 1 if self.failures else 0


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("\n\n")[1])
    parser.add_argument("store")
    parser.add_argument("kv")
    parser.add_argument("--contexts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--config", type=json.loads, default={}, help="more keys of the connector's")
    parser.add_argument("--root", help="a folder for the two stores, which stay there")
    arguments = parser.parse_args()
    if arguments.root:
        sys.exit(Check(arguments.root, arguments).run())
    with tempfile.TemporaryDirectory() as root:
        sys.exit(Check(root, arguments).run())


if __name__ == "__main__":
    main()
