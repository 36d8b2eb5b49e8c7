"""Tasks whose answer lies in the context: LongEval's topic and line retrieval, and a pass key in filler text.

The document is prefilled, its cache goes through a codec, and the question follows; the answer is greedy. A document
that does not fit into the model's positions, with question and answer, is skipped, and counted.
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from cachegen.kv_model import Context

LEAST_SCORE = 0.8  # of the uncompressed model: below it a task says nothing about a codec
_PASSKEY_TOKENS = (1000, 1500, 2000, 2500, 3000)
_PASSKEY_DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass
class Case:
    """One question: document and question are the user's turn, begin is how the model's answer begins."""

    document: str
    question: str
    begin: str
    expected: str


@dataclass
class Task:
    name: str
    cases: list
    is_right: Callable  # (answer, expected)
    max_new_tokens: int


def _words(text):
    return " ".join(re.findall(r"\w+", text.lower())).removeprefix("the ")


def names_topic(answer, expected):
    """The expected topic is in the answer; case, punctuation and a leading "the" do not count."""
    return _words(expected) in _words(answer)


def first_number_is(answer, expected):
    found = re.search(r"\d+", answer)
    return found is not None and found[0] == expected


def _longeval(path, split_at, expected, is_right, name, max_new_tokens):
    with open(path, encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    cases = []
    for record in records:
        at = record["prompt"].rindex(split_at)
        cases.append(Case(record["prompt"][:at], record["prompt"][at:].strip(), "", expected(record)))
    return Task(name, cases, is_right, max_new_tokens)


def passkey(tokenizer, filler, lengths=_PASSKEY_TOKENS, depths=_PASSKEY_DEPTHS, seed=7):
    """A case for each length in tokens and each depth (share of the filler before the key)."""
    rng = random.Random(seed)
    sentences = re.split(r"(?<=\.)\s+", filler)
    n_tokens = [len(tokenizer(s + " ", add_special_tokens=False).input_ids) for s in sentences]
    cases = []
    for length in lengths:
        for depth in depths:
            key, at, total, taken = str(rng.randrange(10000, 100000)), rng.randrange(len(sentences)), 0, []
            while total < length:
                taken.append(sentences[at % len(sentences)])
                total += n_tokens[at % len(sentences)]
                at += 1
            cut = round(depth * len(taken))
            hidden = f"The pass key is {key}. Remember it. {key} is the pass key."
            document = "\n".join([
                "There is an important piece of information in the text below. Find it and remember it.",
                " ".join(taken[:cut]), hidden, " ".join(taken[cut:]), ""])  # fmt: skip
            cases.append(Case(document, "What is the pass key?", "The pass key is", key))
    return Task("passkey", cases, first_number_is, 12)


def load_tasks(data, tokenizer):
    """All tasks over the folder data, as report.py describes it."""
    topics = lambda record: record["topics"][0]  # noqa: E731
    number = lambda record: str(record["expected_number"])  # noqa: E731
    with open(f"{data}/test_wikitext2.txt", encoding="utf-8") as file:
        filler = file.read()[60000:150000]  # what part "size" does not use
    return [
        passkey(tokenizer, filler),
        _longeval(f"{data}/longchat_topics_5.jsonl", "Now the record ends.", topics, names_topic, "topics-5", 32),
        _longeval(f"{data}/longchat_topics_10.jsonl", "Now the record ends.", topics, names_topic, "topics-10", 32),
        _longeval(f"{data}/longchat_lines_200.jsonl", "Now the record is over.", number, first_number_is,
                  "lines-200", 32),
    ]  # fmt: skip


def encode(tokenizer, case):
    """(ids of the document, ids of the question and of how the answer begins), in the model's chat template if it has
    one."""
    text, plain = f"{case.document}{case.question}", not tokenizer.chat_template
    if not plain:
        turn = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    at = text.rindex(case.question)
    tail = text[at:] + (" " if plain and case.begin else "") + case.begin
    document = tokenizer(text[:at], add_special_tokens=plain, verbose=False).input_ids
    return torch.tensor(document), torch.tensor(tokenizer(tail, add_special_tokens=False).input_ids)


def contexts_of(task, tokenizer, max_positions):
    """[(case, Context: document and question)] of the cases that fit into max_positions."""
    found = []
    for i, case in enumerate(task.cases):
        document, question = encode(tokenizer, case)
        if len(document) + len(question) + task.max_new_tokens <= max_positions:
            found.append((case, Context(f"{task.name}#{i}", torch.cat([document, question]), len(document))))
    return found


@torch.no_grad()
def answer(model, tokenizer, context, k, v, max_new_tokens):
    """What the model says, greedily, after the document's cache k, v and the question."""
    ids = context.ids[None].to(model.device)
    out = model.model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=model.cache(k, v), do_sample=False,
        max_new_tokens=max_new_tokens,
    )  # fmt: skip
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
