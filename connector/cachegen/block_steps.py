"""A step for each block of 8 tokens: finer ones where more of what follows depends on the block.

What the C encoder chooses, for statistics and for measuring quality: the same but for the last bits of
sums. All layers and levels have the same scales. What they are worth: tests/bench/results/README.md.

How much depends on a token is guessed from the mean query of each head, which text that a head has not seen yet will be
like: its share of the attention at a few distances, and for K times how far its V is from the others'.
"""

import torch

from .profile_file import BLOCK_TOKENS, N_STEP_FACTORS, OWN_STEP_FACTOR, STEP_FACTORS

CHUNK_TOKENS = 256  # of the files that are measured: scales are relative to a chunk's mean
EXPONENT = 0.7  # a step is importance^(-EXPONENT / 2)
DISTANCES = (32, 128, 512, 2048)  # tokens from a block to what asks for it
MOST_OCTAVES = 1.5  # from the chunk's mean
_LEAST = 1e-9  # of a block's importance, whose mean is about 1


class Importance:
    def __init__(self, query_mean, rope):
        """query_mean: f32 [n_layers][n_query_heads][head_dim], as a Profile has it; rope: the model's."""
        turned = [rope.rotate(query_mean[:, None], torch.tensor([d], device=query_mean.device)) for d in DISTANCES]
        # Twice: how much a token's error costs grows with the square of the attention.
        self.queries = 2 * torch.stack([query[:, 0] for query in turned])

    def _of_tokens(self, x):
        """f32 [n_tokens], with a mean of 1: x [2][n_layers][n_tokens][C] of a chunk's coded tokens."""
        k, v = x.unflatten(3, (-1, self.queries.shape[3]))
        queries = self.queries.unflatten(2, (k.shape[2], -1))
        distance = (v - v.mean(1, keepdim=True)).square().sum(3, keepdim=True)
        total = 0.0
        for query in queries:
            attention = torch.einsum("lhqd,lnhd->lnhq", query, k)
            attention = (attention - attention.amax(1, keepdim=True)).exp()
            for share in (attention, attention * distance):
                total = total + (share / share.mean(1, keepdim=True).clamp(min=1e-30)).mean((0, 2, 3))
        return total / (2 * len(queries))

    def _of_chunk(self, x, n_sinks):
        n_tokens = x.shape[2]
        n_blocks = -(-n_tokens // BLOCK_TOKENS)
        if n_sinks >= n_tokens:
            return torch.full((n_blocks,), OWN_STEP_FACTOR, device=x.device)
        blocks = torch.arange(n_sinks, n_tokens, device=x.device) // BLOCK_TOKENS
        sums, counts = torch.zeros(2, n_blocks, device=x.device)
        sums.index_add_(0, blocks, self._of_tokens(x[:, :, n_sinks:]))
        counts.index_add_(0, blocks, torch.ones(len(blocks), device=x.device))
        octaves = -EXPONENT / 2 * (sums / counts.clamp(min=1)).clamp(min=_LEAST).log2()
        is_coded = counts > 0
        octaves = (octaves - octaves[is_coded].mean()).clamp(-MOST_OCTAVES, MOST_OCTAVES)
        octaves = torch.where(is_coded, octaves - octaves[is_coded].mean(), 0.0)
        return (OWN_STEP_FACTOR + (2 * octaves).round().long()).clamp(0, N_STEP_FACTORS - 1)

    @torch.no_grad()
    def factor_index(self, x, n_sinks):
        """s64 [n_blocks]: which of STEP_FACTORS each block's step is times. x: [2][n_layers][n_tokens][C] from
        position 0, K without rotation, all finite; n_sinks: first tokens that are exact."""
        starts = range(0, x.shape[2], CHUNK_TOKENS)
        return torch.cat([self._of_chunk(x[:, :, at : at + CHUNK_TOKENS], max(n_sinks - at, 0)) for at in starts])


def factors_of(index):
    """f32 [n_blocks] of a factor_index()."""
    return torch.from_numpy(STEP_FACTORS).to(index.device)[index]
