"""The time to the first token over a link, with vLLM: cachegenfs (policies ttft_budget and
min_delay, levels L1, L2 and L3), vLLM's own uncompressed file connector, and recomputing, in turns,
at each bandwidth or after each trace. Writes rows and, of bandwidths, a plot.

usage: ttft_bench.py --build BUILD --model MODEL_DIR --profile PROFILE_DIR --json OUT [--plot PNG]
           [--mbps 10,30,...] [--trace FILE... --trace-scale 1] [--at-once 1,4,16] [--rounds 3]
           [--budget-ms 2000] [--kinds ttft_budget,L2,...] [--uncompressed-from-mbps 30]
           [--answer-tokens 32] [--prompts FILE...] [--prompt-tokens N] [--over sshfs|gluster]
       ttft_bench.py --json ROWS --plot PNG      only plots

The demo's prompt, link, servers and client (connector/demo.py); PROFILE_DIR is a model's folder
with model.json and profiles/. Needs root, sshd, sshfs, vLLM, and matplotlib for the plot; over
Gluster what link_bench.py says.

Three engines are up all the time: one that loads by ttft_budget, and that recomputes under a salt
that nothing is stored under; one that loads by min_delay, or the one level that a request asks for,
and has stored all before; and the uncompressed one. Only one has requests at a time. State of caches:
vLLM's prefix cache is off, and the connector remembers no chunk (ttl 0); each load has a new sshfs
mount, so the client's page cache has nothing; the server's files are in the server's. At each
bandwidth and number of requests a load that is not counted comes first for each policy, so that the
link's speed is known; after a trace it is what the loads before have seen. Every second round goes
backwards: what came just before, from the same engine or over the link, changes up to a tenth of a
second. The prompts of requests at once, and of the rounds, differ in their first words, and are of
the texts in turn (--prompts; the demo's alone by default), each cut to --prompt-tokens, or to as
many tokens as the demo's.

A row: medians with the least and the most of all requests of all rounds. moved_mb is what the
client's end of the link received in a round, all headers included. measured_kl: what the engine
thinks of each token of the cold answer, which is forced on it, against what the cold run thought
(mean KL divergence over an answer's tokens, in nats; over the 20 likeliest of both, and all others
as one: no more than that over the vocabulary), spread over the answers. It has the engine's own
rounding in it: uncompressed says how much.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
CHECKOUT = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [HERE, os.path.join(CHECKOUT, "connector")]

from demo import PROMPT, faster_dtype  # noqa: E402
from demo_processes import Server, View, Waiting, cachegen_transfer  # noqa: E402
from demo_processes import exit_on_signals, mounted, say, uncompressed_transfer  # noqa: E402
from link_bench import AFTER_S, LINKS, Follow, read_trace, spread  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

POLICIES = ("ttft_budget", "min_delay")
ENGINES = (*POLICIES, "uncompressed")
KINDS = (*POLICIES, "L1", "L2", "L3", "uncompressed", "recomputed")
LIKELIEST = 20  # tokens, as many as vLLM gives
FREE_MBPS = 10000  # of the link, where nothing is measured
QUIET_S = 0.02  # CPU time of all engines between two looks
NO_BUDGET_MS = 600000  # a level that is asked for comes whole


def kl_of(cold, warm):
    """Mean KL divergence over the tokens of two answers' logprobs; see above."""
    total = 0.0
    for p, q in zip(cold, warm, strict=True):
        if p["token"] != q["token"]:
            raise RuntimeError(f"the answer was not forced: {q['token']}, not {p['token']}")
        p, q = ({t["token"]: math.exp(t["logprob"]) for t in of["top_logprobs"]} for of in (p, q))
        both = p.keys() & q.keys()
        rest_p, rest_q = (max(1e-9, 1 - sum(of[token] for token in both)) for of in (p, q))
        total += sum(p[token] * math.log(p[token] / q[token]) for token in both)
        total += rest_p * math.log(rest_p / rest_q)
    return total / len(cold)


def prompt_texts(arguments):
    """The demo's text, or others, each cut to as many tokens, or to those that are wanted."""
    tokenizer = Tokenizer.from_file(os.path.join(arguments.model, "tokenizer.json"))
    with open(os.path.join(CHECKOUT, PROMPT), encoding="utf-8") as file:
        texts = [file.read()]
    n_tokens = arguments.prompt_tokens or len(tokenizer.encode(texts[0]).ids)
    for path in arguments.prompts:
        with open(path, encoding="utf-8") as file:
            ids = tokenizer.encode(file.read()).ids
        if len(ids) < n_tokens:
            sys.exit(f"{path}: {len(ids)} tokens, fewer than {n_tokens}")
        texts.append(tokenizer.decode(ids[:n_tokens]))
    return texts[1:] or texts


class Bench:
    def __init__(self, arguments, work, stack):
        self.arguments, self.work, self.stack = arguments, work, stack
        self.model = os.path.basename(os.path.normpath(arguments.profile))
        texts = prompt_texts(arguments)
        n_prompts = max(*arguments.at_once, arguments.rounds)
        self.prompts = [f"Copy {n}.\n{texts[n % len(texts)]}" for n in range(n_prompts)]
        self.cold = {}  # prompt -> the cold answer's logprobs
        self.n_cold = 0

    def path(self, *names):
        return os.path.join(self.work, *names)

    # ---- what is prepared ----

    def wants(self, engine):
        """One stores all and takes levels, another one recomputes: they are always there."""
        return engine in POLICIES or engine in self.arguments.kinds

    def start(self):
        """The engines, and what they load: self.clients, self.views and self.stores by name."""
        shared = self.path("shared")
        self.far, self.link = self.path("far"), LINKS[self.arguments.over](self.path("link"), 0)
        self.stack.callback(self.link.close)  # at last: views show its mounts, engines read them
        self.link.open()
        self.link.share(shared)
        store, mount = os.path.join(shared, "store"), self.path("mount")
        shutil.copytree(self.arguments.profile, os.path.join(store, self.model), symlinks=True)
        self.stack.enter_context(mounted(self.arguments, store, mount, self.path("mount.log")))
        raw = os.path.join(shared, "raw")
        os.makedirs(raw)
        # sshfs reads what the storage host mounts, Gluster its volume's files.
        served = mount if self.arguments.over == "sshfs" else store
        self.stores, self.views = {}, {}
        transfers = {}
        for name in ENGINES:
            if not self.wants(name):
                continue
            # Stores themselves, until they are behind the link. The mount of one, on a busy
            # machine, might pass for a store that is far already, of which the connector keeps
            # folders open: then a view never ends.
            folder = "files" if name == "uncompressed" else self.model
            here, self.stores[name] = os.path.join(store, folder), os.path.join(served, folder)
            if name == "uncompressed":
                here = self.stores[name] = raw
            view = self.views[name] = View(self.path(f"view-{name}"), folder)
            self.stack.callback(view.close)
            view.show(here)
            if name == "uncompressed":
                transfers[name] = uncompressed_transfer(os.path.join(view.root, folder))
                continue
            config = {"policy": name, "ttft_budget_ms": self.arguments.budget_ms}
            config.update(positive_ttl_ms=0, negative_ttl_ms=0, encode_nice=0)
            config["read_only"] = name == "ttft_budget"
            transfers[name] = cachegen_transfer(view.root, self.model, **config)
        dtype = {"bf16": "bfloat16", "fp32": "float32"}[faster_dtype(self.arguments.model)]
        options = ["--logits-processors", "forced_answer:ForcedAnswer"]
        environment = {
            "PYTHONPATH": os.pathsep.join([os.path.join(CHECKOUT, "connector"), HERE]),
            "TMPDIR": self.work,
            # In GiB; 70 MB a prompt, of SmolLM2-135M.
            "VLLM_CPU_KVCACHE_SPACE": str(1 + max(self.arguments.at_once) // 8),
        }
        say(f"starting {len(transfers)} engines, {dtype}")
        servers = {}
        for name, transfer in transfers.items():
            log = self.path(f"vllm-{name}.log")
            server = Server(self.arguments, log, transfer, dtype, options, environment)
            self.stack.push(server.__exit__)
            servers[name] = server
        self.servers = servers.values()
        self.clients = {name: server.__enter__() for name, server in servers.items()}

    def store(self):
        for n, prompt in enumerate(self.prompts):
            say(f"storing prompt {n + 1} of {len(self.prompts)}, compressed and uncompressed")
            name = f"copy-{n}"
            context = {"cachegen.context": name}
            self.clients["min_delay"].ask(prompt, max_tokens=1, kv_transfer_params=context)
            if "uncompressed" in self.clients:
                self.clients["uncompressed"].ask(prompt, max_tokens=1)
            waiting = Waiting("encoding and publishing", 600)
            published = os.path.join(self.stores["min_delay"], "contexts", name, "context.json")
            while not os.path.exists(published):
                waiting.tick()
        for view in self.views.values():
            view.close()

    # ---- what is measured ----

    def ask(self, client, prompt, n_tokens, **fields):
        """An answer and what was thought of its tokens: the cold one, where there is one yet."""
        if prompt in self.cold:
            tokens = [int(token["token"].removeprefix("token_id:")) for token in self.cold[prompt]]
            fields["vllm_xargs"] = {"forced_answer": tokens}
        fields.update(logprobs=True, top_logprobs=LIKELIEST, return_tokens_as_token_ids=True)
        return client.ask(prompt, max_tokens=n_tokens, ignore_eos=True, **fields)

    def ask_all(self, client, prompts, fields, n_tokens):
        """Answers of n_tokens to the prompts, asked at once."""
        answers, threads = [None] * len(prompts), []

        def ask(n):
            answers[n] = self.ask(client, prompts[n], n_tokens, **fields(n))

        for n in range(len(prompts)):
            threads.append(threading.Thread(target=ask, args=(n,)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if None in answers:
            raise RuntimeError("a request failed")
        return answers

    def wait_until_quiet(self):
        """No engine computes: behind its last request vLLM's worker still spins for a second, and
        would take a CPU from the next one's engine."""
        waiting, used = Waiting("for the engines to rest", 60), None
        while True:
            now = sum(server.cpu_s() for server in self.servers)
            if used is not None and now - used < QUIET_S:
                return
            used = now
            waiting.tick()

    def recompute(self, prompts):
        self.wait_until_quiet()
        self.n_cold += 1
        salt = f"cold {self.n_cold}"
        client, n_tokens = self.clients["ttft_budget"], self.arguments.answer_tokens
        salted = lambda n: {"cache_salt": f"{salt} {n}"}  # noqa: E731
        answers = self.ask_all(client, prompts, salted, n_tokens)
        for prompt, answer in zip(prompts, answers):
            self.cold.setdefault(prompt, answer["logprobs"])
        return {"prompts": prompts, "answers": answers, "moved_mb": 0.0, "counted": {}}

    def load(self, kind, prompts, steps, n_tokens=1):
        """steps: (s, Mbit/s) of the link, from when it is asked."""
        name = kind if kind in self.clients else "min_delay"
        client, view = self.clients[name], self.views[name]
        wishes = {}
        if kind.startswith("L"):
            wishes = {"cachegen.level": kind, "cachegen.ttft_budget_ms": NO_BUDGET_MS}
        self.link.mount(self.stores[name], self.far)
        try:
            view.show(self.far)
            self.wait_until_quiet()
            before = client.counters()
            with Follow(self.link, steps):
                moved = self.link.received_bytes()
                wish = lambda n: {"kv_transfer_params": wishes}  # noqa: E731
                answers = self.ask_all(client, prompts, wish, n_tokens)
                time.sleep(AFTER_S)
                moved = self.link.received_bytes() - moved
            hits = sum(answer["cached_tokens"] > 0 for answer in answers)
            if name == "uncompressed":
                hits = 0  # it counts nothing
            counted = client.counters_since(before, lambda since: since.get("loads", 0) >= hits)
            moved_mb = moved / 1e6
            return {"prompts": prompts, "answers": answers, "moved_mb": moved_mb, "counted": counted}
        finally:
            self.link.shape(FREE_MBPS)
            view.close()
            self.link.unmount(self.far)

    def row_of(self, kind, samples):
        answers = [answer for sample in samples for answer in sample["answers"]]
        per_round = len(samples[0]["answers"])
        pairs = [pair for sample in samples for pair in zip(sample["prompts"], sample["answers"])]
        kl = [kl_of(self.cold[prompt], answer["logprobs"]) for prompt, answer in pairs]
        row = {
            "requests": len(answers),
            "ttft_s": spread([answer["ttft_s"] for answer in answers]),
            "hit_tokens": spread([answer["cached_tokens"] for answer in answers], 0),
            "moved_mb": spread([sample["moved_mb"] for sample in samples], 2),
            "measured_kl": spread(kl, 5),
        }
        if kind not in ("uncompressed", "recomputed"):
            counted = [sample["counted"] for sample in samples]
            of = lambda key: [c.get(key, 0) / per_round for c in counted]  # noqa: E731
            row["loaded_tokens"] = spread(of("tokens_loaded"), 0)
            by_level = [of(f"chunks_loaded_l{level}") for level in range(4)]
            row["chunks_at"] = [round(sum(chunks) / len(samples), 2) for chunks in by_level]
            row["predicted_kl"] = spread([kl / 1e6 for kl in of("predicted_kl_micronats")], 5)
        return row

    def warm_up(self):
        """An engine's first answer with logprobs, and its first forced one, take seconds more."""
        prompt = "The first answer."
        for client in self.clients.values():
            for _ in range(2):
                answer = self.ask(client, prompt, self.arguments.answer_tokens)
                self.cold[prompt] = answer["logprobs"]
            del self.cold[prompt]

    def measure(self, out):
        wanted = self.arguments
        self.warm_up()
        places = [("mbps", mbps) for mbps in wanted.mbps]
        places += [("trace", path) for path in wanted.trace]
        for prompt in self.prompts:  # one by one: the answers that others are compared with
            self.recompute([prompt])
        for n_requests in wanted.at_once:
            for kind, place in places:
                self.measure_at(kind, place, n_requests, out)

    def measure_at(self, how, place, n_requests, out):
        wanted = self.arguments
        name = place if how == "mbps" else os.path.splitext(os.path.basename(place))[0]
        kinds = list(wanted.kinds)
        if how == "mbps" and place < wanted.uncompressed_from_mbps and "uncompressed" in kinds:
            kinds.remove("uncompressed")
        if how == "mbps":
            for kind in POLICIES:
                if kind in kinds:
                    self.load(kind, self.prompts[:n_requests], [(0, place)])
        samples = {kind: [] for kind in kinds}
        for n in range(wanted.rounds):
            steps = [(0, place)]
            if how == "trace":
                steps = read_trace(place, n * wanted.trace_step_s, wanted.trace_scale)
            at = [(n * n_requests + i) % len(self.prompts) for i in range(n_requests)]
            prompts = [self.prompts[i] for i in at]
            for kind in kinds if n % 2 == 0 else reversed(kinds):
                if kind == "recomputed":
                    sample = self.recompute(prompts)
                else:
                    sample = self.load(kind, prompts, steps, wanted.answer_tokens)
                samples[kind].append(sample)
                ttft_s = spread([answer["ttft_s"] for answer in sample["answers"]])
                what = f"{name} x{n_requests} {kind}: {ttft_s} s, {sample['moved_mb']:.2f} MB"
                say(f"    {what}, load {os.getloadavg()[0]:.0f}")
        for kind in kinds:
            row = {"over": wanted.over, how: name, "at_once": n_requests}
            row.update(budget_ms=wanted.budget_ms, kind=kind)
            if how == "trace":
                row["scale"] = wanted.trace_scale
            row.update(self.row_of(kind, samples[kind]), load_average=round(os.getloadavg()[1], 1))
            print(json.dumps(row), flush=True)
            out.append(row)
            write_rows(wanted.json, out)


def write_rows(path, rows):
    with open(path, "w", encoding="ascii") as file:
        file.write("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def plot(rows, path):
    """TTFT, measured KL and MB of single requests against bandwidth, from the least to the most."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(18, 5))
    panels = {"ttft_s": "TTFT, s", "measured_kl": "measured KL, nats", "moved_mb": "MB moved"}
    rows = [row for row in rows if row["at_once"] == 1 and "mbps" in row]
    for kind in KINDS:
        of_kind = [row for row in rows if row["kind"] == kind]
        for axis, (key, label) in zip(axes, panels.items()):
            points = sorted((row["mbps"], *row[key]) for row in of_kind if row[key][0] > 0)
            if not points:
                continue
            x, y, low, high = zip(*points)
            bars = [[b - a for a, b in zip(low, y)], [b - a for a, b in zip(y, high)]]
            axis.errorbar(x, y, bars, label=kind, marker="o", markersize=4, capsize=2, linewidth=1)
            axis.set(xscale="log", yscale="log", xlabel="link, Mbit/s", ylabel=label)
    for axis in axes:
        axis.grid(True, alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def parse():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    numbers = lambda kind: lambda text: [kind(x) for x in text.split(",") if x]  # noqa: E731
    parser.add_argument("--build", type=os.path.abspath)
    parser.add_argument("--model")
    parser.add_argument("--profile")
    parser.add_argument("--json", required=True)
    parser.add_argument("--plot")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbps", type=numbers(float), default=[])
    parser.add_argument("--trace", nargs="*", default=[])
    parser.add_argument("--trace-scale", type=float, default=1)
    parser.add_argument("--trace-step-s", type=float, default=10)
    parser.add_argument("--at-once", type=numbers(int), default=[1])
    parser.add_argument("--budget-ms", type=float, default=2000)
    parser.add_argument("--kinds", type=numbers(str), default=KINDS)
    parser.add_argument("--uncompressed-from-mbps", type=float, default=30)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--prompts", nargs="*", default=[])
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--over", choices=LINKS, default="sshfs")
    arguments = parser.parse_args()
    arguments.checkout = CHECKOUT  # the demo's parts want it
    return arguments


def main():
    arguments = parse()
    if arguments.mbps or arguments.trace:
        exit_on_signals()
        os.environ["PYTHONPATH"] = os.path.join(CHECKOUT, "connector")  # of the demo's tools
        rows, work = [], tempfile.mkdtemp(prefix="cg-ttft-")
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, work, ignore_errors=True)
            bench = Bench(arguments, work, stack)
            bench.start()
            try:
                bench.store()
                bench.measure(rows)
            except BaseException:
                for server in bench.servers:
                    print(server.tail(), file=sys.stderr)
                raise
    if arguments.plot:
        with open(arguments.json, encoding="ascii") as file:
            plot(json.load(file), arguments.plot)


if __name__ == "__main__":
    main()
