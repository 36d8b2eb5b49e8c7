"""What saves cost the engine: tokens that vLLM decodes a second, alternately with saves in the background and without.

usage: PYTHONPATH=connector CG_MODEL_DIR=DIR CG_BUILD_DIR=DIR "$CG_ENGINE_PYTHON" tests/bench/save_cost.py
           [--profile PROFILE_DIR] [--store DIR] [--rounds 20] [--minutes 6] [--prompts 4] [--tokens 48]
           [--threads CPUS] [--encode-nice 19]

PROFILE_DIR is a model's folder with model.json and profiles/, made in bf16 (python -m cachegen.profile; the demo leaves
one). Without it a hasty one is made first, which takes about a minute.
A measurement: prompts of 1,000 tokens come at once, none of which is stored. From the step on in which the last of them
is computed, until the first answer is complete, tokens and time count: there all answers are decoded together, and with
saves on the library encodes and writes the prompts' K and V meanwhile. With saves off the same engine looks up as
before, and stores nothing. --tokens should be so many that saves are under way in most of the steps, as "of steps"
shows.

A round is both, in turns of which comes first. Printed are tokens a second by round, then the median of the rounds'
ratios with quartiles and extremes; the same of tokens by CPU second of the engine's own threads, which are all but the
library's: that is what caches and memory cost, where the first is also what CPUs cost that encode; and how much of one
CPU the encoders had. The first round, in which everything is cold, does not count. No round begins after --minutes. The
store is in the page cache. On a machine that does other things the figures say nothing: the load is printed.
"""

import argparse
import contextlib
import glob
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import types

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "connector"))

from cachegen.vllm.admission import Admission  # noqa: E402
from vllm_test import CHECKOUT, CHUNK, MODEL, NAME, Engine, read_prompts  # noqa: E402

PROMPT_TOKENS = 1000
NUMBERS = itertools.count()


def cpu_seconds():
    """CPU time of this process's threads: (the engine's, the library's)."""
    ns = {False: 0, True: 0}
    for task in glob.glob("/proc/self/task/*"):
        with contextlib.suppress(OSError):  # the thread may have ended
            with open(f"{task}/comm") as comm, open(f"{task}/schedstat") as schedstat:
                ns[comm.read().startswith("cachegen")] += int(schedstat.read().split()[0])
    return [ns[of_library] / 1e9 for of_library in (False, True)]


def decode(engine, prompt, arguments, saves):
    """Of the steps that count: tokens, seconds, CPU seconds of the engine and of the library, and the share of them in
    which saves were under way."""
    engine.settle()
    # What is stored at its second use is not stored here: each measurement has a salt of its own.
    engine.scheduler._saves.admission = Admission(CHUNK, 1 if saves else 2)
    core, salt, n_got = engine.llm.llm_engine, f"measurement {next(NUMBERS)}", {}
    for n in range(arguments.prompts):
        request = {"prompt_token_ids": prompt[n:] + prompt[:n], "cache_salt": salt}
        core.add_request(f"{salt}, {n}", request, engine.params(arguments.tokens))
    began, n_at_first, n_steps, n_with_saves, result = None, 0, 0, 0, None
    while core.has_unfinished_requests():
        for output in core.step():
            n_got[output.request_id] = len(output.outputs[0].token_ids)
        if result is not None or len(n_got) < arguments.prompts:
            continue
        if began is None:
            began, cpu_began, n_at_first = time.perf_counter(), cpu_seconds(), sum(n_got.values())
            continue
        n_steps += 1
        n_with_saves += bool(engine.worker.saves)
        if max(n_got.values()) == arguments.tokens:
            seconds, cpu = time.perf_counter() - began, cpu_seconds()
            result = types.SimpleNamespace(
                n_tokens=sum(n_got.values()) - n_at_first,
                seconds=seconds,
                engine_cpu=cpu[0] - cpu_began[0],
                library_cpu=cpu[1] - cpu_began[1],
                share=n_with_saves / n_steps,
            )
    return result


def spread(ratios):
    low, median, high = statistics.quantiles(ratios, n=4)
    return f"median {median:.3f}, quartiles {low:.3f} to {high:.3f}, all {min(ratios):.3f} to {max(ratios):.3f}"


def make_profile(folder):
    text = os.path.join(CHECKOUT, "tests/data/calibration/chat_mtbench.txt")
    command = [sys.executable, "-m", "cachegen.profile", MODEL, "--texts", text, "--tokens", "256",
               "--group-layers", "5", "--quiet"]  # fmt: skip
    subprocess.run([*command, "--out", folder], check=True, stdout=subprocess.DEVNULL)
    return folder


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", help="made if not given")
    parser.add_argument("--store", help="an empty folder in which a store is made; a temporary one if not given")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=6)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--encode-nice", type=int, default=19, help="niceness of the threads that encode")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the engine")
    arguments = parser.parse_args()
    os.environ["CG_ENGINE_THREADS"] = str(arguments.threads)
    with tempfile.TemporaryDirectory(prefix="cg-save-cost.") as temporary:
        store = arguments.store or temporary
        profile = arguments.profile or make_profile(os.path.join(temporary, "profile", NAME))
        shutil.copytree(profile, os.path.join(store, NAME), symlinks=True)
        engine = Engine(store, "bfloat16", n_blocks=128, encode_nice=arguments.encode_nice)
        prompt, by_wall, by_cpu, encoders = read_prompts()["long"][:PROMPT_TOKENS], [], [], []
        until = time.monotonic() + arguments.minutes * 60
        for n in range(arguments.rounds + 1):
            if time.monotonic() > until:
                break
            of = {saves: decode(engine, prompt, arguments, saves) for saves in ((True, False), (False, True))[n % 2]}
            on, off = of[True], of[False]
            if off.share:
                sys.exit("save_cost: saves were under way with saves off")
            rates = [of_one.n_tokens / of_one.seconds for of_one in (on, off)]
            text = (
                f"round {n}: {rates[1]:7.1f} tokens/s without saves, {rates[0]:7.1f} with, in {on.share:4.0%} of steps"
            )
            text += f": {rates[0] / rates[1]:.3f}; load {os.getloadavg()[0]:.1f}"
            print(text if n else f"{text} (does not count)", flush=True)
            if n:
                by_wall.append(rates[0] / rates[1])
                by_cpu.append(on.n_tokens / on.engine_cpu / (off.n_tokens / off.engine_cpu))
                encoders.append(on.library_cpu / on.seconds)
        engine.settle()
        stats = engine.stats()
    if len(by_wall) < 2:
        sys.exit("save_cost: fewer than two rounds were measured")
    print(f"{len(by_wall)} rounds, {arguments.threads} threads of the engine, {len(os.sched_getaffinity(0))} CPUs")
    print(f"tokens a second, with saves over without:     {spread(by_wall)}")
    print(f"tokens by CPU second of the engine, the same: {spread(by_cpu)}")
    print(f"CPUs that the library had meanwhile:          {spread(encoders)}")
    saved = {
        name: value for name, value in stats.items() if value and name.startswith(("chunks_saved", "saves_dropped"))
    }
    print(f"saved: {saved}", flush=True)


if __name__ == "__main__":
    main()
