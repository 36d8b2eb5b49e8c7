"""What saves cost the engine: tokens that vLLM decodes a second, alternately with saves in the background and without.

usage: PYTHONPATH=connector CG_MODEL_DIR=DIR CG_BUILD_DIR=DIR "$CG_ENGINE_PYTHON" tests/bench/save_cost.py --profile PROFILE_DIR
           [--store DIR] [--rounds 10] [--prompts 4] [--tokens 48] [--threads CPUS]

PROFILE_DIR is a model's folder with model.json and profiles/, made in bf16 (python -m cachegen.profile; the demo leaves one).
A measurement: prompts of 1,000 tokens come at once, none of which is stored. From the step on in which the last of them is
computed, until the first answer is complete, tokens and time count: there all answers are decoded together, and with saves
on the library encodes and writes the prompts' K and V meanwhile. With saves off the same engine looks up as before, and
stores nothing. --tokens should be so many that saves are under way in most of the steps, as "of steps" shows.

A round is both, in turns of which comes first. Printed are tokens a second by round, then the median of the rounds' ratios
with the least and the most. The first round, in which everything is cold, does not count. The store is in the page cache.
"""

import argparse
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "connector"))

from cachegen.vllm.admission import Admission  # noqa: E402
from vllm_test import CHUNK, NAME, Engine, read_prompts  # noqa: E402

PROMPT_TOKENS = 1000
NUMBERS = itertools.count()


def decode(engine, prompt, arguments, saves):
    """(tokens a second, share of the steps in which saves were under way)"""
    engine.settle()
    # What is stored at its second use is not stored here: each measurement has a salt of its own.
    engine.scheduler._admission = Admission(CHUNK, 1 if saves else 2)
    core, salt, n_got = engine.llm.llm_engine, f"measurement {next(NUMBERS)}", {}
    for n in range(arguments.prompts):
        request = {"prompt_token_ids": prompt[n:] + prompt[:n], "cache_salt": salt}
        core.add_request(f"{salt}, {n}", request, engine.params(arguments.tokens))
    began, n_at_first, n_steps, n_with_saves, rate = None, 0, 0, 0, None
    while core.has_unfinished_requests():
        for output in core.step():
            n_got[output.request_id] = len(output.outputs[0].token_ids)
        if rate is not None or len(n_got) < arguments.prompts:
            continue
        if began is None:
            began, n_at_first = time.perf_counter(), sum(n_got.values())
            continue
        n_steps += 1
        n_with_saves += bool(engine.worker.saves)
        if max(n_got.values()) == arguments.tokens:
            rate = (sum(n_got.values()) - n_at_first) / (time.perf_counter() - began)
    return rate, n_with_saves / n_steps


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", required=True)
    parser.add_argument("--store", help="an empty folder in which a store is made; a temporary one if not given")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the engine")
    arguments = parser.parse_args()
    os.environ["CG_ENGINE_THREADS"] = str(arguments.threads)
    with tempfile.TemporaryDirectory(prefix="cg-save-cost.") as temporary:
        store = arguments.store or temporary
        shutil.copytree(arguments.profile, os.path.join(store, NAME), symlinks=True)
        engine = Engine(store, "bfloat16", n_blocks=128)
        prompt, ratios = read_prompts()["long"][:PROMPT_TOKENS], []
        for n in range(arguments.rounds + 1):
            of = {saves: decode(engine, prompt, arguments, saves) for saves in ((True, False), (False, True))[n % 2]}
            (on, share), (off, none) = of[True], of[False]
            if none:
                sys.exit("save_cost: saves were under way with saves off")
            text = f"round {n}: {off:7.1f} tokens/s without saves, {on:7.1f} with, in {share:4.0%} of steps: {on / off:.3f}"
            print(text if n else f"{text} (does not count)", flush=True)
            if n:
                ratios.append(on / off)
        engine.settle()
        stats = engine.stats()
    print(f"ratio: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} rounds")
    saved = {name: value for name, value in stats.items() if value and name.startswith(("chunks_saved", "saves_dropped"))}
    print(f"saved: {saved}", flush=True)


if __name__ == "__main__":
    main()
