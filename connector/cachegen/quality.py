"""Size and quality of a profile on text: what the levels cost, and what the model still says after a coded context.

Sizes are estimates from the class tables (rANS reaches them within a fraction of a percent) plus every byte that a file
of CHUNK_TOKENS tokens has besides. Quality is what the model does next: KL divergence over the tokens that follow the
context, and how often the most likely token stays the same.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from .block_steps import CHUNK_TOKENS, Importance, factors_of
from .klt import Transform
from .profile_file import BLOCK_TOKENS, N_LEVELS
from .rope import Rope
from .tables import N_BINS, class_costs, magnitude_bins

_STREAM_BYTES = 132  # lane states and the stream's size; the codec makes so many that they cost 2 %
_STREAM_PADDING = 7  # zeros to the next multiple of 16, about
_MATRIX_BYTES = 12  # the number of streams, and zeros behind their sizes, about
_STREAM_SHARE = 50
_SINK_BITS = 11.5  # an exact element of the first tokens, about


@dataclass
class Score:
    bits: float = 0.0  # of the files, all told
    elements: float = 0.0
    kl: float = 0.0
    top1: float = 0.0
    nll: float = 0.0  # its change
    n_contexts: int = 0
    kls: list = field(default_factory=list)  # of each context

    def add(self, other):
        for name in ("bits", "elements", "kl", "top1", "nll", "n_contexts", "kls"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def as_json(self):
        n = max(self.n_contexts, 1)
        return {
            "bits_per_element": self.bits / max(self.elements, 1),
            "kl": self.kl / n,
            "top1": self.top1 / n,
            "nll_change": self.nll / n,
        }


class Sizes:
    """What a profile's symbols cost; what the symbols are is a subclass's, of a preset."""

    def __init__(self, profile, device="cpu"):
        self.profile = profile
        self.costs = torch.from_numpy(np.stack([class_costs(c) for c in profile.classes])).float().to(device)
        self.shifts = torch.tensor([c.shift for c in profile.classes], dtype=torch.int32, device=device)
        self.device = device

    def symbol_bits(self, q, classes, n_chunks, active=1.0):
        """Of a matrix a chunk: q integers [n_rows][...], of all chunks; classes and active (1 or 0) of its columns, or
        of each row's."""
        bins = magnitude_bins(q.int(), self.shifts[classes]).long()
        cost = self.costs.flatten()[classes * N_BINS + bins]
        bits = float((cost * active).sum(dtype=torch.float64))
        n_streams = max(1, int(bits / n_chunks / 8 / (_STREAM_SHARE * _STREAM_BYTES)))
        # 8 of the 32 bits of a lane state are entropy that is already counted.
        return bits + 8 * n_chunks * n_streams * (_STREAM_BYTES - 32 + _STREAM_PADDING)

    def other_bits(self, n_tokens, token_bytes):
        """Of the files of a context: headers, section tables, token ids and exact first tokens."""
        n_sections = self.profile.n_matrices * len(self.profile.group_layers) + bool(self.profile.joint)
        n_sinks_sections = 2 * len(self.profile.group_layers)
        bits = _SINK_BITS * 2 * self.profile.mean[:, 0].size * self.profile.n_sinks
        for at in range(0, n_tokens, CHUNK_TOKENS):
            rows = 1 + n_sections + (n_sinks_sections if at == 0 and self.profile.n_sinks else 0)
            bits += 8 * (160 + 16 * rows + _MATRIX_BYTES * n_sections)
            if self.profile.class_at is not None:  # a byte for each block, in a section
                n_blocks = -(-min(CHUNK_TOKENS, n_tokens - at) // BLOCK_TOKENS)
                bits += 8 * (16 + n_blocks + -n_blocks % 16)
            bits += 8 * token_bytes * min(CHUNK_TOKENS, n_tokens - at)
        return bits


class Coder(Sizes):
    """Symbols, sizes and reconstructions of a profile's lossy levels: preset klt."""

    def __init__(self, profile, device="cpu"):
        super().__init__(profile, device)
        self.transform = Transform.of_profile(profile, device)
        self.importance = self.class_at = None
        if profile.class_at is not None:
            self.class_at = torch.from_numpy(np.array(profile.class_at, np.int64)).to(device)
            if profile.query_mean.size:
                rope = Rope("profile's", 2 * profile.inv_freq.shape[-1], torch.from_numpy(np.array(profile.inv_freq)))
                self.importance = Importance(torch.from_numpy(np.array(profile.query_mean)).to(device), rope)

    def _columns(self, level, gm, n_components):
        """Mask and class [8][n_components] of the active columns."""
        active = torch.zeros(BLOCK_TOKENS, n_components, dtype=torch.bool)
        classes = torch.zeros(active.shape, dtype=torch.int64)
        for f, row in enumerate(self.profile.columns(level, *gm)):
            active[f, : len(row)] = True
            classes[f, : len(row)] = torch.from_numpy(np.array(row, np.int64))
        return active.to(self.device), classes.to(self.device)

    def code(self, x, level):
        """(x after coding, bits of its symbols): x [2][n_layers][n_tokens][C] of a context from position 0."""
        bits, index, factors = 0.0, None, None
        if self.importance:
            index = self.importance.factor_index(x, self.transform.n_sinks)
            factors = factors_of(index)

        def kept(gm, symbols):
            nonlocal bits
            active, classes = self._columns(level, gm, symbols.shape[2])
            if index is not None:
                classes = self.class_at[index[:, None, None], classes]
            symbols = symbols * active
            bits += self.symbol_bits(symbols, classes, -(-len(symbols) * BLOCK_TOKENS // CHUNK_TOKENS), active)
            return symbols

        out = self.transform.coded(x, self.profile.step[level].tolist(), kept, self.profile.joint, level, factors)
        return out, bits


def score(log_p, reference, ids):
    """(KL, agreement of the most likely token, change of NLL) of log_p; ids are the tokens that were predicted from."""
    kl = (reference.exp() * (reference - log_p)).sum(-1).mean().item()
    top1 = (reference.argmax(-1) == log_p.argmax(-1)).float().mean().item()
    nll = (reference - log_p)[:-1].gather(1, ids[1:, None].to(log_p.device)).mean().item()
    return kl, top1, nll


@torch.no_grad()
def measure(model, coder, planes, contexts, progress=lambda done, total: None, levels=range(N_LEVELS)):
    """A Score for each level over contexts; coder and planes are of one preset."""
    scores = {level: Score() for level in levels}
    token_bytes = 2 if model.model.get_input_embeddings().num_embeddings <= 65536 else 3
    for i, context in enumerate(contexts):
        k, v = model.prefill(context)
        reference = model.log_probs(context, k, v)
        x = planes.flat(k, v)
        for level in levels:
            coded, bits = coder.code(x, level)
            bits += coder.other_bits(context.n, token_bytes)
            log_p = model.log_probs(context, *planes.heads(coded))
            kl, top1, nll = score(log_p, reference, context.ids[context.n :])
            scores[level].add(Score(bits, x.numel(), kl, top1, nll, 1, [kl]))
        progress(i + 1, len(contexts))
    return scores
