"""What the connector's calls add to an engine's steps: milliseconds of each hook, by prompts of 131,072 tokens.

usage: CACHEGEN_LIBRARY=libcachegen.so python hooks_bench.py [DIR] [--tokens 131072] [--rounds 20]

DIR: where the store is made, and looked up; a temporary directory if not given. Both sides run here, on one thread as
in an engine in one process, with the library and without vLLM's own work. A round is a request of which nothing is
stored, whose prompt is computed and saved 2,048 tokens a step, and one of which all is, that is looked up and loaded
while empty steps go on. Metadata is pickled, as it is on its way to the worker's process. K and V are few: copies and
decoding are the library's threads', and not in these times. Printed are calls, median and most of each hook, and of all
hooks of a step together: the first steps of each kind, which begin threads and take memory, do not count. Needs the
engine's Python (vLLM).
"""

import argparse
import collections
import ctypes
import os
import pickle
import random
import statistics
import sys
import tempfile
import time
import types

CHECKOUT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [os.path.join(CHECKOUT, "connector"), os.path.join(CHECKOUT, "tests", "connector")]

import scheduler_test as doubles  # noqa: E402
from cachegen import abi  # noqa: E402
from cachegen.vllm import library  # noqa: E402
from cachegen.vllm.guard import Failures  # noqa: E402
from cachegen.vllm.scheduler import Scheduler  # noqa: E402
from cachegen.vllm.worker import Worker  # noqa: E402

CHUNK, BLOCK, STEP = 256, 16, 2048
HEAD_DIM, SIZE = 8, 2  # of one head in one layer, bf16


class Library(doubles.Library):
    chunk_tokens, tail_tokens, block_tokens = CHUNK, 32, BLOCK
    rank = types.SimpleNamespace(n_ranks=1, index=0, stores=True, first_head=0)
    wait, close = library.Library.wait, library.Library.close

    def __init__(self, root):
        geometry = dict(n_layers=1, n_kv_heads=1, head_dim=HEAD_DIM, dtype="bf16", model_fingerprint="5a" * 16)
        # What is missing is stored and looked up again at once.
        config = {"root": root, "model": "m", "geometry": geometry, "negative_ttl_ms": 0}
        super().__init__(abi.Connector(config))
        self._eventfd = self.cg.eventfd()


class Engine:
    def __init__(self, root, n_tokens):
        self.n_tokens, self.n_blocks = n_tokens, n_tokens // BLOCK
        self.scheduler = Scheduler(Library(root), Failures())
        self.scheduler.local_cache.manager = doubles.Manager()
        self.worker = Worker(Library(root), Failures(), BLOCK)
        plane = BLOCK * HEAD_DIM * SIZE
        self._kv = ctypes.create_string_buffer(2 * plane * (self.n_blocks + 1))
        self.worker._kv_id = self.worker.library.cg.register_kv(
            [ctypes.addressof(self._kv)], layout=abi.LAYOUT_STRIDED, memory=abi.MEMORY_HOST, n_kv_heads=1,
            head_dim=HEAD_DIM, dtype=abi.DTYPES["bf16"], block_tokens=BLOCK, n_blocks=self.n_blocks + 1,
            offset_bytes=(0, plane), block_stride=2 * plane, head_stride=(2 * plane,) * 2,
            token_stride=(HEAD_DIM * SIZE,) * 2, dim_stride=(SIZE,) * 2,
        )  # fmt: skip
        self.forget()

    def forget(self):
        self.times = collections.defaultdict(list)  # hook -> seconds by the clock, and of this thread on a CPU
        self._step = 0.0, 0.0

    def timed(self, name, hook, *arguments):
        began, cpu_began = time.perf_counter(), time.thread_time()
        result = hook(*arguments)
        took = time.perf_counter() - began, time.thread_time() - cpu_began
        self.times[name].append(took)
        self._step = tuple(map(sum, zip(self._step, took, strict=True)))
        return result

    def end_step(self, kind):
        self.times[f"all of a step: {kind}"].append(self._step)
        self._step = 0.0, 0.0

    def step(self, kind, scheduler_output, finished=()):
        """The hooks of a step, in vLLM's order. Returns the requests whose loads have ended."""
        metadata = self.timed("build_connector_meta", self.scheduler.step, scheduler_output)
        metadata = pickle.loads(self.timed("pickling it", pickle.dumps, metadata))
        self.timed("bind_connector_metadata", self.worker.submit, metadata)
        self.timed("wait_for_save", self.worker.start_saves, metadata)
        metadata.is_idle = False  # such a step would wait, on purpose
        loaded = self.timed("get_finished", self.worker.finished_loads, set(finished), metadata.is_idle)
        report = self.timed("build_connector_worker_meta", self.worker.take_report)
        self.timed("update_connector_output", self.scheduler.take_report, report)
        self.timed("get_kv_connector_stats", lambda: (self.scheduler.counters(), self.worker.counters()))
        self.end_step(kind)
        return loaded

    def compute(self, request):
        """Looks a request up that nothing is stored of, computes and saves it."""
        self.ask(request, "a look-up, nothing found")
        self.timed("update_state_after_alloc", self.scheduler.update_after_alloc, request, self.blocks(), 0)
        for n_computed in range(0, self.n_tokens, STEP):
            output = doubles.step_of(request.request_id, n_computed, STEP, self.n_blocks, is_new=n_computed == 0)
            self.step("computing and saving" if n_computed else "a prompt's first", output)
        self.finish(request)
        while self.worker.saves:
            self.worker.library.wait(0.1)
            self.worker.collect_saves()

    def load(self, request):
        n_tokens = self.ask(request, "a look-up, all found")
        if n_tokens < self.n_tokens - CHUNK:
            sys.exit(f"hooks_bench: {n_tokens} of {self.n_tokens} tokens were found")
        self.timed("update_state_after_alloc", self.scheduler.update_after_alloc, request, self.blocks(), n_tokens)
        empty = doubles.step_of(None, 0, 0)
        kind = "beginning a load"
        while not self.step(kind, empty):
            kind = "while it goes on"
        output = doubles.step_of(request.request_id, n_tokens, self.n_tokens - n_tokens, self.n_blocks)
        self.step("after a load", output)
        self.finish(request)

    def ask(self, request, kind):
        while True:
            n_tokens, _ = self.timed(f"get_num_new_matched_tokens: {kind}", self.scheduler.matched_tokens, request, 0)
            if n_tokens is not None:
                return n_tokens
            self.step(kind, doubles.step_of(None, 0, 0))

    def finish(self, request):
        self.timed("request_finished", self.scheduler.finish, request, self.blocks().get_block_ids()[0])

    def blocks(self):
        return doubles.blocks(self.n_blocks)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", nargs="?")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.tokens % STEP or arguments.rounds < 1:
        parser.error(f"tokens are a multiple of {STEP}, rounds at least 1")
    with tempfile.TemporaryDirectory(prefix="cg-hooks-bench.") as temporary:
        root = arguments.dir or temporary
        try:
            os.makedirs(os.path.join(root, "m"), exist_ok=True)
        except OSError as error:
            parser.error(f"{root}: {error.strerror}")
        engine = Engine(root, arguments.tokens)
        run = random.randrange(1 << 40)  # a store that is used again has other prompts
        for n in range(arguments.rounds + 1):
            tokens = [run >> 20, run & (1 << 20) - 1, n, *range(arguments.tokens - 3)]
            engine.compute(doubles.request(f"computed {n}", prompt_token_ids=tokens))
            engine.load(doubles.request(f"loaded {n}", prompt_token_ids=tokens))
            if n == 0:
                engine.forget()
        print(f"{arguments.rounds} rounds of {arguments.tokens} tokens, load {os.getloadavg()[0]:.1f}; milliseconds")
        print(f"{'':52} {'calls':>6} {'median':>7} {'most':>7} {'CPU':>7} {'most':>7}")
        for name, took in sorted(engine.times.items()):
            figures = (of(column) for column in zip(*took, strict=True) for of in (statistics.median, max))
            print(f"{name:52} {len(took):6}", *(f"{1e3 * seconds:7.2f}" for seconds in figures))
        engine.scheduler.close()
        engine.worker.close()


if __name__ == "__main__":
    main()
