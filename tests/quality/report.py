#!/usr/bin/env python3
"""Size, quality and answers of the codec, from real files: report.py MODEL_DIR... --data DIR [options]

Writes quality.json, quality.md (tables) and quality.png (bits per element against KL divergence) to
tests/bench/results.
Parts:
  size     each level's bits per element and what it does to the tokens that follow a context, on text that no profile
           was made from
  domains  the same with each calibration text left out of profile and tables in turn, and tested on it
  tasks    answers to questions about a document whose cache went through the codec
klt and paper are files that cgtool writes, 256 tokens each, all bytes counted; their level "planned" is a level for
each chunk, by the profile's curve of quality, at the KL divergence that it predicts of L2, and "planned-25" to
"planned-80" the same at 25 to 80 % of the way to L3. published (CacheGen's quantizer), int8 and int4 are computed:
cross-entropies and formulas, no files. KL divergence, change of NLL (nats) and top-1 agreement compare, over the 256
tokens after the context, the model after the decoded cache with the model after its own.

DIR holds test_wikitext2.txt (WikiText-2 test), and of LongEval's test cases (github DachengLi1/LongChat)
longchat_topics_5.jsonl, longchat_topics_10.jsonl and longchat_lines_200.jsonl.
Needs torch, transformers and matplotlib.
"""

import argparse
import glob
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "connector"))

import codecs_compared  # noqa: E402
import curves  # noqa: E402
import tasks  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from cachegen.command import Progress  # noqa: E402
from cachegen.compute_type import dtype_name  # noqa: E402
from cachegen.contexts import Caches, context_tokens, text_names, tokenize, windows  # noqa: E402
from cachegen.fingerprint import model_fingerprint  # noqa: E402
from cachegen.klt import Matrices  # noqa: E402
from cachegen.kv_model import KvModel  # noqa: E402
from cachegen.make_profile import PROFILE_SHARE, make_profile  # noqa: E402
from cachegen.profile_file import read_profile  # noqa: E402
from cachegen.quality import CHUNK_TOKENS, score  # noqa: E402
from cachegen.store_files import write_atomically  # noqa: E402

PARTS = ("size", "domains", "tasks")
CODECS = ("lossless", "klt", "paper", "published", "int8", "int4")
LEVELS = ("L0", *codecs_compared.LOSSY, *codecs_compared.PLANS, *codecs_compared.Published.levels, "int8", "int4")
TASKS = ("passkey", "topics-5", "topics-10", "lines-200")
PRESETS = ("klt", "paper")
SOURCES = ("codec", "connector/cachegen", "tests/quality")  # what a result depends on


def say(text):
    print(f"quality: {text}", file=sys.stderr, flush=True)


def commit():
    """The last one that changed SOURCES, with "-dirty" behind it where they have been changed since."""
    def git(*arguments):
        return subprocess.run(["git", "-C", ROOT, *arguments, "--", *SOURCES], capture_output=True, text=True).stdout

    return (git("log", "-1", "--format=%h").strip() or "unknown") + ("-dirty" if git("status", "--porcelain") else "")


def hardware():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, {gib:.0f} GiB"


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def test_texts(data):
    """[(name, domain, text)]"""
    with open(f"{data}/test_wikitext2.txt", encoding="utf-8") as file:
        wiki = file.read()
    with open(f"{data}/longchat_topics_10.jsonl", encoding="utf-8") as lines:
        chats = [json.loads(line)["prompt"] for line in lines]
    found = [(f"wikitext2_test@{at}", "WikiText-2 test", wiki[at : at + 60000]) for at in (0, 150000)]
    return found + [(f"longchat_topics_10#{i}", "LongChat", chats[i]) for i in (10, 11)]


class Result:
    """What is measured, written to a file after every context, and what an earlier run left there."""

    def __init__(self, options):
        self.path, self.began = options.out, time.monotonic()
        os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        texts = options.calibration + sorted(glob.glob(f"{options.data}/*.*"))
        settings = {
            "tokens": options.tokens,
            "contexts": options.contexts,
            "cases": options.cases,
            "chunk_tokens": CHUNK_TOKENS,
            "profile_options": options.profile_options,
            "profiles": {codec: sha256(path) for codec, path in options.profile.items()},
            "data": {os.path.basename(path): sha256(path) for path in texts},
        }
        versions = {m.__name__: m.__version__ for m in (torch, transformers)} | {"python": platform.python_version()}
        self.json = {
            "commits": {}, "hardware": hardware(), "versions": versions, "settings": settings, "models": {},
            "seconds": {}, "notes": [], "rows": [], "tasks": [], "means": [], "ratios": [],
        }  # fmt: skip
        self.commit = commit()
        if options.keep or options.keep_parts:
            self._keep(options.keep, options.keep_parts)
        self.json["commits"] |= {part: self.commit for part in options.parts if part not in self.json["commits"]}

    def _keep(self, keep, keep_parts):
        if not os.path.exists(self.path):
            return
        with open(self.path, encoding="utf-8") as file:
            old = json.load(file)
        if old["settings"] != self.json["settings"]:
            say(f"nothing of {self.path} is kept: it is of other settings")
            return
        is_new = keep and not self.commit.endswith("-dirty")
        kept = {part: of for part, of in old["commits"].items() if part in keep_parts or (is_new and of == self.commit)}
        for part in old["commits"].keys() - kept.keys():
            say(f"nothing of part {part} is kept: it is of another commit, or of changed sources")
        self.json["commits"], self.json["models"], self.json["notes"] = kept, old["models"], old["notes"]
        self.json["seconds"] = {name: s for name, s in old["seconds"].items() if name.split(", ")[-1] in kept}
        self.json["rows"] = [row for row in old["rows"] if row["part"] in kept]
        self.json["tasks"] = old["tasks"] if "tasks" in kept else []
        say(f"{len(self.json['rows'])} rows and {len(self.json['tasks'])} of tasks are kept")

    def model(self, name, about):
        if self.json["models"].get(name, about) != about:
            raise SystemExit(f"quality: {self.path} has rows of another model of the name {name}")
        self.json["models"][name] = about

    def find(self, table, **key):
        return next((row for row in self.json[table] if all(row[n] == value for n, value in key.items())), None)

    def note(self, text):
        say(text)
        if text not in self.json["notes"]:
            self.json["notes"].append(text)

    def write(self):
        self.json["means"], self.json["ratios"] = curves.means(self.json["rows"]), curves.ratios(self.json["rows"])
        stem = os.path.splitext(self.path)[0]
        write_atomically(self.path, json.dumps(self.json, indent=1).encode() + b"\n")
        write_atomically(stem + ".md", curves.markdown(self.json).encode())
        curves.plot(self.json, stem + ".png")


class Study:
    """One model: its parts share the caches of the calibration contexts."""

    def __init__(self, model_dir, options, result, work):
        self.directory, self.options, self.result, self.work = model_dir, options, result, work
        self.model, self.fingerprint = KvModel(model_dir), model_fingerprint(model_dir)
        self.n_tokens = context_tokens(options.tokens, self.model.longest_prompt)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
        self.name = os.path.basename(os.path.abspath(model_dir))
        shape = [self.model.n_layers, self.model.n_kv_heads, self.model.head_dim]
        about = {"fingerprint": self.fingerprint, "shape": shape, "dtype": self.model.dtype_name}
        # What is kept of an earlier run was computed in the same type: bf16 and f32 give other digits.
        result.model(self.name, {**about, "compute_dtype": dtype_name(self.model.compute_dtype)})
        self.caches = Caches(self.model, int(options.memory_gib * 2**30))
        self.published = codecs_compared.Published(self.model)
        self.profiles = dict(options.profile)  # codec: path; None: there is none to be had

    def contexts(self, name, text):
        first, ids = tokenize(self.tokenizer, text)
        return windows(name, ids, self.n_tokens, first)[: self.options.contexts]

    def calibration(self):
        """{name of a text: its contexts}"""
        found = {}
        for path, name in text_names(self.options.calibration).items():
            with open(path, encoding="utf-8", errors="replace") as file:
                found[name] = self.contexts(name, file.read())
        return found

    def profile(self, preset):
        """Path of the profile of a preset, from --profile or made by the profile tool; None if it knows no such."""
        if preset not in self.profiles:
            out, options = os.path.join(self.work, preset), self.options
            command = [
                sys.executable, "-m", "cachegen.profile", self.directory, "--texts", *options.calibration,
                "--out", out, "--tokens", str(self.n_tokens), "--contexts", str(options.contexts),
                "--report-contexts", "1", *options.profile_options.split(),
            ]  # fmt: skip
            command += [] if preset == "klt" else ["--preset", preset]
            say(f"the {preset} profile of {self.name}")
            path = os.pathsep.join([os.path.join(ROOT, "connector"), os.environ.get("PYTHONPATH", "")])
            done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=sys.stderr)
            self.profiles[preset] = None
            if done.returncode == 2 and preset != "klt":
                self.result.note(f"skipped: {preset} of {self.name}: the profile tool knows no such preset")
            elif done.returncode:
                raise SystemExit(f"quality: no {preset} profile of {self.directory}")
            else:
                (self.profiles[preset],) = glob.glob(os.path.join(out, "profiles", "*.cgp"))
        return self.profiles[preset]

    def chunks(self, name, profile=None):
        return codecs_compared.Chunks(name, self.options.cgtool, self.fingerprint, profile)

    def presets(self, is_needed=lambda preset: True):
        """The lossy file codecs of --codecs."""
        wanted = [preset for preset in PRESETS if preset in self.options.codecs and is_needed(preset)]
        return [self.chunks(preset, self.profile(preset)) for preset in wanted if self.profile(preset)]

    def missing(self, part, context, codec, levels):
        """Those of the levels of a codec that are wanted and not yet known."""
        key = {"model": self.name, "part": part, "text": context.name, "codec": codec}
        wanted = [level for level in levels if level in self.options.levels]
        return [level for level in wanted if not self.result.find("rows", **key, level=level)]

    @torch.no_grad()
    def measure(self, part, context, domain, codecs):
        """Adds a row for each missing level."""
        missing = {codec.name: self.missing(part, context, codec.name, codec.levels) for codec in codecs}
        if not any(missing.values()):
            return
        k, v = self.caches.get(context)
        reference, next_ids = self.model.log_probs(context, k, v), context.ids[context.n :]
        for codec in codecs:
            for level, k_out, v_out, bits in codec.code(context, k, v, missing[codec.name]):
                log_p = self.model.log_probs(context, k_out.to(k.device), v_out.to(v.device))
                kl, top1, nll = score(log_p, reference, next_ids)
                self.result.json["rows"].append({
                    "model": self.name, "part": part, "text": context.name, "domain": domain,
                    "left_out": part == "domains", "codec": codec.name, "level": level, "tokens": context.n,
                    "bits_per_element": bits / (2 * k.numel()), "kl": kl, "delta_nll": nll, "top1": top1,
                })  # fmt: skip
        self.result.write()

    def size(self):
        contexts = [(c, domain) for name, domain, text in test_texts(self.options.data)
                    for c in self.contexts(name, text)]  # fmt: skip

        def is_needed(codec, levels=(*codecs_compared.LOSSY, *codecs_compared.PLANS)):
            return any(self.missing("size", context, codec, levels) for context, _ in contexts)

        codecs = [self.chunks("lossless"), *self.presets(is_needed), self.published]
        codecs += [codecs_compared.Integers(n_bits) for n_bits in (8, 4)]
        codecs = [codec for codec in codecs if codec.name in self.options.codecs]
        if self.published in codecs and is_needed("published", self.published.levels):
            self.published.calibrate(sum(self.calibration().values(), []), self.caches)
        progress = Progress()
        progress.start("size and quality")
        for i, (context, domain) in enumerate(contexts):
            self.measure("size", context, domain, codecs)
            progress(i + 1, len(contexts))

    def _profile_without(self, others, path):
        """Writes the klt profile of the contexts, with the steps, matrices, sinks and size of the profile of all."""
        with open(self.profile("klt"), "rb") as file:
            data = file.read()
        whole, share = read_profile(data), max(PROFILE_SHARE["bytes"], len(data) / self.model.weights_bytes)
        made = make_profile(
            self.model, self.fingerprint, self.caches, others, Matrices(whole.group_layers, whole.is_joined),
            whole.step.tolist(), len(whole.classes), Progress(), n_sinks=whole.n_sinks, share=share,
            n_shared=whole.n_shared,
            block_steps=whole.class_at is not None,
        )  # fmt: skip
        write_atomically(path, made.to_bytes())

    def domains(self):
        calibration = self.calibration()
        chosen = [name for name in calibration if name in self.options.left_out or not self.options.left_out]
        path = os.path.join(self.work, "left-out.cgp")
        codecs = [codec for codec in (self.chunks("klt", path), self.published) if codec.name in self.options.codecs]
        for i, domain in enumerate(chosen):
            say(f"without {domain} ({i + 1} of {len(chosen)})")
            tested = calibration[domain]
            others = [c for name, found in calibration.items() if name != domain for c in found]
            for codec in codecs:
                if not any(self.missing("domains", context, codec.name, codec.levels) for context in tested):
                    continue
                if codec is self.published:
                    codec.calibrate(others, self.caches)
                else:
                    self._profile_without(others, path)
            for context in tested:
                self.measure("domains", context, domain, codecs)

    def _task(self, task, contexts):
        about = {"model": self.name, "task": task.name, "n_cases": len(contexts),
                 "n_skipped": len(task.cases) - len(contexts)}  # fmt: skip
        caches = Caches(self.model, int(self.options.memory_gib * 2**30))  # of this task only
        answers, progress = [], Progress()
        progress.start(f"{task.name}, uncompressed")
        for i, (_, context) in enumerate(contexts):
            answers.append(tasks.answer(self.model, self.tokenizer, context, *caches.get(context),
                                        task.max_new_tokens))  # fmt: skip
            progress(i + 1, len(contexts))

        def right(given):
            return sum(task.is_right(a, case.expected) for a, (case, _) in zip(given, contexts)) / len(contexts)

        uncompressed = right(answers)
        reported = uncompressed >= self.options.least_score
        rows = [{**about, "codec": "none", "level": "", "score": uncompressed, "reported": reported}]
        say(f"{task.name}: the uncompressed model answers {uncompressed:.3f} of {len(contexts)}"
            + ("" if reported else ": too few, not reported"))  # fmt: skip
        for codec in self.presets() if reported else []:
            given, bits, elements = {}, {}, 0
            progress.start(f"{task.name}, {codec.name}")
            for i, (_, context) in enumerate(contexts):
                k, v = caches.get(context)
                elements += 2 * k.numel()
                for level, k_out, v_out, n_bits in codec.code(context, k, v, self.options.levels):
                    text = tasks.answer(self.model, self.tokenizer, context, k_out.to(k.device), v_out.to(v.device),
                                        task.max_new_tokens)  # fmt: skip
                    given.setdefault(level, []).append(text)
                    bits[level] = bits.get(level, 0) + n_bits
                progress(i + 1, len(contexts))
            for level, texts in given.items():
                same = sum(a == b for a, b in zip(texts, answers)) / len(answers)
                rows.append({**about, "codec": codec.name, "level": level, "score": right(texts), "reported": True,
                             "uncompressed_score": uncompressed, "same_answer": same,
                             "bits_per_element": bits[level] / elements})  # fmt: skip
        return rows

    def tasks(self):
        positions = self.model.longest_prompt
        for task in tasks.load_tasks(self.options.data, self.tokenizer):
            if task.name not in self.options.tasks or self.result.find("tasks", model=self.name, task=task.name):
                continue
            task.cases = task.cases[: self.options.cases]
            contexts = tasks.contexts_of(task, self.tokenizer, positions)
            if len(contexts) < len(task.cases):
                self.result.note(f"{task.name}: {len(task.cases) - len(contexts)} of {len(task.cases)} documents are "
                                 f"skipped: longer than the {positions} positions of {self.name}")  # fmt: skip
            if contexts:
                self.result.json["tasks"] += self._task(task, contexts)
                self.result.write()


def one_of(names):
    def parse(text):
        wanted = text.split(",")
        if set(wanted) - set(names):
            raise argparse.ArgumentTypeError(f"{text}: expected some of {','.join(names)}")
        return wanted

    return parse


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model_dirs", nargs="+", metavar="MODEL_DIR")
    add("--data", required=True, metavar="DIR", help="test texts")
    add("--calibration", nargs="+", metavar="FILE", help="texts, a domain each (default: tests/data/calibration)")
    add("--out", default=os.path.join(ROOT, "tests/bench/results/quality.json"), metavar="FILE.json")
    add("--keep", action="store_true", help="rows that are in --out, if commit and settings are the same")
    add("--keep-parts", type=one_of(PARTS), default=[], metavar="PARTS",
        help="that are not measured: their rows in --out stay, of whatever commit; the result says which")  # fmt: skip
    add("--cgtool", default=os.path.join(ROOT, "build/codec/cgtool"))
    add("--profile", action="append", default=[], metavar="CODEC=PATH.cgp", help="instead of making it")
    add("--profile-options", default="", help="for the profile tool, in one argument")
    for name, choice in (("parts", PARTS), ("codecs", CODECS), ("levels", LEVELS), ("tasks", TASKS)):
        add(f"--{name}", type=one_of(choice), default=choice, help=f"default: {','.join(choice)}")
    add("--left-out", nargs="+", default=[], metavar="NAME", help="names of calibration texts (default: all)")
    add("--tokens", type=int, default=3072,
        help="of a context; fewer where the model's prompts are shorter (default %(default)s)")  # fmt: skip
    add("--contexts", type=int, default=1, help="of each text (default %(default)s)")
    add("--cases", type=int, help="of each task (default: all)")
    add("--least-score", type=float, default=tasks.LEAST_SCORE,
        help="of the uncompressed model, for a task to be reported (default %(default)s)")  # fmt: skip
    add("--memory-gib", type=float, default=3.0, help="for KV caches (default %(default)s)")
    options = parser.parse_args(arguments)
    options.calibration = options.calibration or sorted(glob.glob(f"{ROOT}/tests/data/calibration/*.txt"))
    options.parts = [part for part in options.parts if part not in options.keep_parts]
    options.profile = dict(given.split("=", 1) for given in options.profile)
    if set(options.profile) - set(PRESETS) or (options.profile and len(options.model_dirs) > 1):
        parser.error("--profile is of klt or paper, and of one model")
    return options


def main(arguments=None):
    options = parse_arguments(arguments)
    transformers.utils.logging.set_verbosity_error()
    result = Result(options)
    for model_dir in options.model_dirs:
        with tempfile.TemporaryDirectory() as work:
            study = Study(model_dir, options, result, work)
            for part in options.parts:
                began, key = time.monotonic(), f"{study.name}, {part}"
                getattr(study, part)()
                result.json["seconds"][key] = result.json["seconds"].get(key, 0) + time.monotonic() - began
                result.write()
    say(f"wrote {options.out} and its .md and .png")


if __name__ == "__main__":
    main()
