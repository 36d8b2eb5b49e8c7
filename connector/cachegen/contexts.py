"""Contexts to calibrate on and to measure with: cut from texts, and their KV caches.

A context is n tokens whose KV is coded, and the tokens that follow, from which Fisher information and quality come.
"""

import os

import torch

from .kv_model import Context
from .profile_file import BLOCK_TOKENS

CONTINUATION = 256  # tokens after a context
LEAST_TOKENS = 64  # of a context, where the model's length bounds it


def tokenize(tokenizer, text):
    """(what the tokenizer puts before any text, the text's own tokens): a beginning of sentence, or nothing."""
    def ids(text, **options):
        return torch.tensor(tokenizer(text, verbose=False, **options).input_ids, dtype=torch.long)

    own, whole = (ids("a", add_special_tokens=special) for special in (False, True))
    before = [n for n in range(len(whole) - len(own) + 1) if torch.equal(whole[n : n + len(own)], own)]
    return whole[: before[0] if before else 0], ids(text, add_special_tokens=False)


def text_names(paths):
    """{path: name}: a file's own name, with as many folders before it as tell it from the other files."""
    parts = {path: os.path.abspath(path).split(os.sep) for path in paths}

    def name(own):
        others, n = [other for other in parts.values() if other != own], 1
        while any(other[-n:] == own[-n:] for other in others):
            n += 1
        return "/".join(own[-n:])

    return {path: name(own) for path, own in parts.items()}


def context_tokens(n_tokens, longest_prompt):
    """Tokens of a context: n_tokens, or fewer, so that with its continuation it is no longer than a model's
    longest_prompt: beyond, K and V are none that an engine has. ValueError: that leaves too few."""
    if n_tokens + CONTINUATION <= longest_prompt:
        return n_tokens
    n_tokens = (longest_prompt - CONTINUATION) // BLOCK_TOKENS * BLOCK_TOKENS
    if n_tokens < LEAST_TOKENS:
        raise ValueError(f"its prompts have {longest_prompt} tokens at most: too few for a context of {LEAST_TOKENS} "
                         f"and the {CONTINUATION} that follow it")  # fmt: skip
    return n_tokens


def windows(name, ids, n_tokens, first=()):
    """Contexts that cover ids one after the other, each with its continuation; a short text is one shorter context.

    first: the tokens that each begins with, as each prompt of an engine does; they are of its n_tokens."""
    first = torch.as_tensor(first, dtype=ids.dtype)
    size = n_tokens + CONTINUATION - len(first)
    starts = range(0, len(ids) - size + 1, size)
    found = [Context(f"{name}@{at}", torch.cat([first, ids[at : at + size]]), n_tokens) for at in starts]
    if not found and len(first) + len(ids) >= CONTINUATION // 4 + 64:
        ids = torch.cat([first, ids])
        follow = min(CONTINUATION, len(ids) // 4)
        found = [Context(f"{name}@0", ids, (len(ids) - follow) // BLOCK_TOKENS * BLOCK_TOKENS)]
    return found


def pick(items, n):
    """n of items, evenly spread; all of them when n is 0 or there are no more."""
    if not n or n >= len(items):
        return items
    return [items[round(i * len(items) / n)] for i in range(n)]


class Caches:
    """KV caches of contexts, kept while they fit in limit_bytes and computed again when they don't; and the Fisher
    information of each, computed once: profiles from other selections of the same contexts share both."""

    def __init__(self, model, limit_bytes, seed=1):
        self.model, self.left_bytes, self.kept = model, limit_bytes, {}
        self.information, self.generator = {}, torch.Generator().manual_seed(seed)
        self.queries = {}

    def get(self, context):
        if context.name in self.kept:
            return self.kept[context.name]
        k, v, self.queries[context.name] = self.model.prefill_with_queries(context)
        n_bytes = 2 * k.numel() * k.element_size()
        if n_bytes <= self.left_bytes:
            self.left_bytes -= n_bytes
            self.kept[context.name] = (k, v)
        return k, v

    def query_mean(self, contexts):
        """f32 [n_layers][n_query_heads][head_dim] on the CPU, the mean of prefill_with_queries() over contexts that
        get() has seen, in bf16's numbers as a profile keeps it; None: not to be had."""
        means = [self.queries[context.name] for context in contexts]
        return None if any(mean is None for mean in means) else torch.stack(means).mean(0).bfloat16().float()

    def fisher(self, context, k, v):
        """Of the context whose cache is k, v: as KvModel.fisher()."""
        if context.name not in self.information:
            self.information[context.name] = self.model.fisher(context, k, v, BLOCK_TOKENS, self.generator)
        return self.information[context.name]
