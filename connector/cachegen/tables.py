"""Frequency tables of the lossy levels: statistics of symbols by column, grouped into few classes.

A column is one DCT frequency and component of one layer group, plane and level. Columns of alike distribution share a
class: k-means whose distance is bits. Classes are few (they all fit in a GPU's shared memory) and, pooled over hundreds
of columns, fit unseen text better than a table a column would.

Distributions are taken to be symmetric (the sign of a component means nothing). With shift s a symbol is
v * 2^s + raw(s); mirror images are then v and -v - 1. Both cases are counted by a magnitude m: |v|, or v and -v - 1.
"""

import numpy as np
import torch

from .profile_file import MAX_SHIFT, MAX_SYMBOLS, OWN_STEP_FACTOR, SCALE, SymbolClass

N_EXACT = 48  # magnitudes that have their own bin; then a bin an octave
N_BINS = N_EXACT + 12
LARGEST = (MAX_SYMBOLS - 2) // 2  # largest value with an index of its own
SIGMA = 6.0  # of v: columns that are wider get a shift
_PRIOR_SYMBOLS = 200.0  # of a class's own distribution, where a scale has few symbols of it
_FACTOR_ROUNDS = 6
_ALPHABETS = [0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 25, LARGEST]  # largest values that a class may have
_BIN_MIDDLE = np.concatenate([np.arange(N_EXACT), LARGEST + 1.5 * 2.0 ** np.arange(4, 16)])


def shift_of(mean_square):
    """Shift of columns by the mean square of their symbols."""
    sigma = mean_square.clamp(min=1e-30).sqrt()
    return (sigma / SIGMA).log2().ceil().clamp(0, MAX_SHIFT).to(torch.int32)


def magnitude_bins(q, shift):
    """Bin of each symbol; q integers, shift broadcastable."""
    v = q >> shift
    m = torch.where(v < 0, -v - (shift > 0).to(q.dtype), v)
    octave = (m - LARGEST).clamp(min=1).float().log2().floor().to(q.dtype) + (N_EXACT - 4)
    return torch.where(m < N_EXACT, m, octave.clamp(max=N_BINS - 1))


class Histograms:
    """Counts [column][bin] of one level, plane and group; columns are [8][n_components]."""

    def __init__(self, shift, device):
        self.shift = shift.to(device)
        self.counts = torch.zeros(shift.numel() * N_BINS, dtype=torch.int64, device=device)
        self.column = torch.arange(shift.numel(), device=device).reshape(shift.shape) * N_BINS

    def add(self, q):
        """q: integer [n_blocks][8][n_components]"""
        index = magnitude_bins(q, self.shift) + self.column
        self.counts += torch.bincount(index.flatten(), minlength=len(self.counts))

    def rows(self):
        return self.counts.reshape(-1, N_BINS).float().cpu().numpy()


def _escape_bits(m, largest):
    return 5 + np.floor(np.log2(np.maximum(m - largest, 1)))


def _frequencies(pooled, shift, largest):
    """freq u16 in index order, for pooled counts by magnitude."""
    h = pooled[: largest + 1]
    raw = np.zeros(2 * largest + 2)
    if shift == 0:
        raw[0] = h[0]
        raw[1 : 2 * largest : 2] = raw[2 : 2 * largest + 1 : 2] = h[1:] / 2
        raw[-1] = pooled[largest + 1 :].sum()
    else:
        raw[0] = h[0] / 2
        raw[1 : 2 * largest : 2] = h[1:] / 2
        raw[2 : 2 * largest + 1 : 2] = h[:-1] / 2
        raw[-1] = pooled[largest + 1 :].sum() + h[largest] / 2
    total = max(raw.sum(), 1e-9)
    freq = np.maximum(np.rint(raw / total * SCALE), 1).astype(np.int64)
    while (excess := freq.sum() - SCALE) != 0:  # taken from the largest, never below 1
        largest_index = int(freq.argmax())
        freq[largest_index] -= excess if freq[largest_index] > excess else freq[largest_index] - 1
    return freq.astype(np.uint16)


def class_costs(c):
    """Bits of a symbol of each magnitude bin under class c, escapes included."""
    bits = -np.log2(c.freq.astype(np.float64) / SCALE)
    largest = (len(c.freq) - 2) // 2
    escape = bits[-1] + _escape_bits(_BIN_MIDDLE, largest)
    cost = escape.copy()
    plus, minus = np.full(largest + 2, np.inf), np.full(largest + 2, np.inf)  # of v = m and v = -m
    plus[0] = minus[0] = bits[0]
    plus[1 : largest + 1] = bits[1 : 2 * largest : 2]
    minus[1 : largest + 1] = bits[2 : 2 * largest + 1 : 2]
    m = np.arange(largest + 1)
    if c.shift == 0:
        cost[: largest + 1] = np.where(m == 0, bits[0], (plus[m] + minus[m]) / 2)
    else:
        mirror = np.where(m + 1 <= largest, minus[m + 1], bits[-1] + 5)
        cost[: largest + 1] = (plus[m] + mirror) / 2
    return cost + c.shift


def make_class(pooled, shift):
    """The cheapest class for pooled counts: how far its alphabet reaches is part of the choice."""
    best, best_bits = None, np.inf
    for largest in _ALPHABETS:
        candidate = SymbolClass(int(shift), _frequencies(pooled, shift, largest))
        bits = float(pooled @ class_costs(candidate))
        if bits < best_bits:
            best, best_bits = candidate, bits
    return best


def _k_means(rows, shift, n_classes, n_rounds):
    """Classes for rows [column][bin] of one shift, and each row's class."""
    m = np.minimum(_BIN_MIDDLE, 1e4)
    spread = np.log2((rows @ m + 0.02) / (rows.sum(1) + 1.0))
    edges = np.linspace(spread.min(), spread.max() + 1e-6, n_classes + 1)
    of = np.clip(np.searchsorted(edges, spread, side="right") - 1, 0, n_classes - 1)
    for _ in range(n_rounds):
        used, of = np.unique(of, return_inverse=True)
        order = np.argsort(of, kind="stable")
        firsts = np.searchsorted(of[order], np.arange(len(used)))
        pooled = np.add.reduceat(rows[order].astype(np.float64), firsts)
        classes = [make_class(row, shift) for row in pooled]
        costs = np.stack([class_costs(c) for c in classes]).astype(np.float32)
        of = _cheapest(rows, costs)
    return classes, of


def _cheapest(rows, costs):
    parts = [(rows[i : i + 65536] @ costs.T).argmin(1) for i in range(0, len(rows), 65536)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def pool(rows, of, n_classes):
    """f64 [n_classes][N_BINS]: rows f32 [column][N_BINS], added up by their columns' classes."""
    pooled = torch.zeros(n_classes, N_BINS, dtype=torch.float64)
    return pooled.index_add_(0, torch.from_numpy(of.astype(np.int64)), torch.from_numpy(rows).double()).numpy()


def refinement(pooled, classes):
    """u16 [n_classes][3][2]: how each class's symbols refine those of a step three times as large (FORMAT.md, "A level
    given the next coarser one"). pooled: of the columns that refine others, as pool() gives it."""
    m = np.arange(N_EXACT)
    coarse = (m + 1) // 3
    index = np.choose(m - 3 * coarse + 1, [2, 0, 1])
    counts = np.ones((len(classes), 3, 3))  # by class, context and index
    for row, c, count in zip(pooled, classes, counts):
        if c.shift > 0:  # wide, and raw bits are even
            count[2] += row.sum() / 3
            continue
        np.add.at(count, (np.minimum(coarse, 2), index), row[:N_EXACT])
        count[2] += row[N_EXACT:].sum() / 3
    counts[:, 0, 1:] = counts[:, 0, 1:].mean(1, keepdims=True)  # +1 and -1 alike
    freq = np.clip(np.rint(counts / counts.sum(2, keepdims=True) * SCALE), 1, SCALE - 2).astype(np.int64)
    largest = freq.argmax(2)[..., None]
    np.put_along_axis(freq, largest, np.take_along_axis(freq, largest, 2) - (freq.sum(2) - SCALE)[..., None], 2)
    return freq[..., :2].astype(np.uint16)


def cluster(rows, shift, n_classes=192, n_rounds=12):
    """(classes, class of each column): rows f32 [column][N_BINS], shift [column].

    Shifted columns are few and wide, their distributions alike: they get up to 8 classes a shift; the others the rest.
    """
    shifts = [int(s) for s in np.unique(shift)]
    share = {s: min(8, (shift == s).sum()) for s in shifts if s}
    share[0] = max(1, n_classes - sum(share.values()))
    classes, of = [], np.zeros(len(rows), np.int64)
    for s in shifts:
        at = np.flatnonzero(shift == s)
        found, found_of = _k_means(rows[at], s, int(min(share[s], len(at))), n_rounds)
        of[at] = found_of + len(classes)
        classes += found
    if not classes:  # a format's must: every column is cut
        classes = [make_class(np.eye(N_BINS)[0], 0)]
    return classes, of


def cluster_by_factor(counts, shift, n_classes=192):
    """(classes, class of each column, class_at u8 [N_STEP_FACTORS][n_classes]): counts f32
    [N_STEP_FACTORS][column][N_BINS] by the step factor of the block that symbols are in, shift [column].

    What cluster() finds of all factors together, then in turns the class at each factor, the classes' frequencies, and
    the columns' classes, each the cheapest that the others allow. Classes at a factor have the column's own shift: wide
    columns are few, and their low bits cost as much whatever the shift."""
    classes, of = cluster(counts.sum(0), shift, n_classes)
    n = len(classes)
    shifts = np.array([c.shift for c in classes])
    is_other = shifts[:, None] != shifts
    for turn in range(_FACTOR_ROUNDS):
        pooled = np.stack([pool(rows, of, n) for rows in counts])
        own = pooled.sum(0)
        prior = _PRIOR_SYMBOLS * own / np.maximum(own.sum(1, keepdims=True), 1)
        costs = np.stack([class_costs(c) for c in classes])
        bits = (pooled + prior) @ costs.T
        bits[:, is_other] = np.inf
        bits[OWN_STEP_FACTOR] -= 1e-9 * np.eye(n)  # where all cost alike, a class is itself
        class_at = bits.argmin(2)
        if turn == _FACTOR_ROUNDS - 1:
            break
        of_class = np.zeros((n, N_BINS))
        for rows, at in zip(pooled, class_at):
            np.add.at(of_class, at, rows)
        classes = [make_class(row, c.shift) if row.any() else c for row, c in zip(of_class, classes)]
        costs = np.stack([class_costs(c) for c in classes]).astype(np.float32)
        for s in np.unique(shifts):
            column, some = np.flatnonzero(shift == s), np.flatnonzero(shifts == s)
            every = sum(rows[column] @ costs[at[some]].T for rows, at in zip(counts, class_at))
            of[column] = some[every.argmin(1)]
    return classes, of, class_at.astype(np.uint8)
