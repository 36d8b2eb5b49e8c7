"""The time to the first token in a vLLM on a GPU: loads of each level from the page cache against computing, in turns.

usage: gpu_ttft.py --json OUT --profile PROFILE_DIR --texts FILE... [--tokens 1024,3072,7680] [--rounds 9]
                   [--root DIR] [--config JSON]
       (environment: CG_MODEL_DIR, CG_BUILD_DIR, CG_ENGINE_ARGS as tests/connector/vllm_test.py has them)

PROFILE_DIR is a model's folder with model.json and profiles/; --config, more of the connector's configuration. Writes a
JSON array: of each text and length, for each level and for computing, the milliseconds from the request to its one
token, medians with the least and the most of all rounds, of which each second one goes backwards; and of how many of
the 32 tokens that follow a load the answer is the computed one's, up to the first that is not. The engine runs one
request at a time, without a prefix cache, CUDA graphs or a process of its own. Each prompt begins with a number of its
own. Another engine has saved them before, at all levels; the one that is measured saves nothing, and has answered each
prompt once in each way.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "connector"))

from vllm_test import MODEL, NAME, Engine, holds  # noqa: E402

LEVELS = ("L0", "L1", "L2", "L3")
FOLLOWING = 32


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", required=True)
    parser.add_argument("--profile", required=True)
    parser.add_argument("--texts", nargs="+", required=True)
    parser.add_argument("--tokens", default="1024,3072,7680")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--root")
    parser.add_argument("--config", default="{}")
    parser.add_argument("--save-into", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.save_into:
        save(arguments, arguments.save_into)
        return
    with tempfile.TemporaryDirectory(prefix="cg-gpu-ttft.", dir=arguments.root) as root:
        shutil.copytree(arguments.profile, os.path.join(root, NAME), symlinks=True)
        saved = subprocess.run([sys.executable, *sys.argv, "--save-into", root])
        holds(saved.returncode == 0, "nothing was saved")
        rows = measure(arguments, root)
    with open(arguments.json, "w", encoding="utf-8") as file:
        json.dump(rows, file, indent=1)


def make_engine(arguments, root, **config):
    most = max(read_lengths(arguments)) + FOLLOWING + 1
    args = {"max_model_len": most, "max_num_batched_tokens": most, "enable_prefix_caching": False}
    config = {"store_levels": list(LEVELS), "positive_ttl_ms": 3600000, **config, **json.loads(arguments.config)}
    block_tokens = json.loads(os.environ.get("CG_ENGINE_ARGS", "{}")).get("block_size", 16)
    return Engine(root, "bfloat16", n_blocks=-(-most // block_tokens) + 2, engine_args=args, **config)


def read_lengths(arguments):
    return [int(n) for n in arguments.tokens.split(",")]


def read_prompts(arguments):
    """(text's name, token ids) of each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    lengths = read_lengths(arguments)
    for path in arguments.texts:
        with open(path, encoding="utf-8") as file:
            ids = tokenizer(file.read(8 * max(lengths))).input_ids
        for n_tokens in lengths:
            prompt = (tokenizer(f"{n_tokens}. ").input_ids + ids)[:n_tokens]
            holds(len(prompt) == n_tokens, f"{path} has {len(prompt)} tokens, not {n_tokens}")
            yield os.path.basename(path), prompt


def save(arguments, root):
    engine = make_engine(arguments, root)
    for text, prompt in read_prompts(arguments):
        began = time.monotonic()
        holds(engine.ask(prompt, fresh=False, max_tokens=1).hit == 0, "something was stored")
        engine.settle()
        took = time.monotonic() - began
        print(f"saved {len(prompt)} tokens of {text} in {took:.2f} s", flush=True)


def measure(arguments, root):
    engine = make_engine(arguments, root, read_only=True)
    rows = []
    for text, prompt in read_prompts(arguments):
        rows.append({"text": text, "tokens": len(prompt), **measure_prompt(engine, prompt, arguments.rounds)})
        print(json.dumps(rows[-1]), flush=True)
    stats = engine.stats()
    failed = {name: n for name, n in stats.items() if n and ("failed" in name or "corrupt" in name)}
    holds(not failed, f"{failed}")
    return rows


def measure_prompt(engine, prompt, n_rounds):
    def ask(level, max_tokens):
        options = {"level": level} if level else {"salt": "computed"}  # nothing is stored under that salt
        began = time.monotonic()
        answer = engine.ask(prompt, fresh=False, max_tokens=max_tokens, **options)
        ms = (time.monotonic() - began) * 1e3
        holds((answer.hit > 0) == bool(level) and (not level or answer.level == level), f"{answer} asked of {level}")
        return ms, answer

    kinds = (None, *LEVELS)
    answers = {kind: ask(kind, FOLLOWING)[1] for kind in kinds}
    times = {kind: [] for kind in kinds}
    for i in range(n_rounds):
        for kind in kinds[:: -1 if i % 2 else 1]:
            times[kind].append(ask(kind, 1)[0])
    row = {}
    for kind in kinds:
        tokens, told = answers[kind].tokens, answers[kind].told
        pairs = zip(tokens, answers[None].tokens)
        same = next((i for i, (got, want) in enumerate(pairs) if got != want), len(tokens))
        row[kind or "computed"] = {
            "ms": [round(f(times[kind]), 2) for f in (statistics.median, min, max)],
            "same_tokens": same,
            **({name: told.get(name) for name in ("bytes", "predicted_kl", "lookup_ms", "load_ms")} if kind else {}),
        }
    return row


if __name__ == "__main__":
    main()
