"""From statistics to a profile: which columns and components are worth their bytes, and the file's parts."""

from dataclasses import dataclass

import numpy as np

from .profile_file import BLOCK_TOKENS, MAX_NARROW_BITS, N_LEVELS, Basis, Profile, n_fine, to_bf16_bits
from .tables import cluster, refinement

N_SINKS = 4
LEAST_NONZERO = 2e-3  # columns with fewer symbols other than 0 are cut
BASIS_NOISE = 1e-3  # what rounding a component of the basis may add to an L1 symbol's variance (its own is 1/12)
MOST_BASIS_NOISE = 2e-2
LEAST_LEAK = 0.02  # of the data into a rounded component, as a mean square of L1 symbols
INT8_BITS = 8  # components of that many and fewer: multiples of one unit, within 127 of it
_FINER = 16  # the others' unit
EXACT_SQUARE = 300.0  # components above it are stored in EXACT_BITS and more, about
_NEIGHBOURS = 9
_BLOCK = 64  # columns between updates of the whole matrix


def _nearest(rows, scale, bits):
    limit = 2 ** (int(bits) - 1) - 1
    return np.clip(np.rint(rows / scale[:, None]), -limit, limit)


def _unit(n_channels):
    """A power of two: 127 times it is five to ten times the root mean square of a component's elements."""
    return 2.0 ** np.ceil(np.log2(5 / 127 / np.sqrt(n_channels)))


def _best_scales(rows, bits):
    """(scale, squared error) f32 [n] of each of rows [n][N] in signed numbers of bits: the largest ones may be cut.

    Scales are multiples of a unit that all components have in common: scale times number is the unit times an integer, of
    8 bits where INT8_BITS says so, and a decoder can add up integers (codec/basis.h, cg_slab)."""
    limit = 2 ** (int(bits) - 1) - 1
    unit = _unit(rows.shape[1]) / (1 if bits <= INT8_BITS else _FINER)
    peak = np.abs(rows).max(1, initial=0) / (limit * unit)
    best, least = np.zeros(len(rows), np.float32), np.full(len(rows), np.inf, np.float32)
    for cut in (1.0, 0.85, 0.7, 0.6, 0.5, 0.4):
        multiple = np.maximum(np.ceil(peak * cut), 1)
        if bits <= INT8_BITS:
            multiple = np.minimum(multiple, 127 // limit)
        scale = (multiple * unit).astype(np.float32)
        error = np.square(rows - scale[:, None] * _nearest(rows, scale, bits)).sum(1)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    return best, least


def _round_rows(rows, scale, bits, inverse):
    """s16 [n][N]: rows [n][N] over scale, rounded so that what is rounded away is small where the data are large.

    An encoder projects on rounded rows: d = row - rounded adds d' M d to a coefficient's variance, M the second moment of
    the data; inverse [N][N] is that of M. Element by element, the error of one is made up for by the next ones (GPTQ:
    Frantar et al., ICLR 2023, arXiv:2210.17323, algorithm 1)."""
    left, result = rows.astype(np.float64), np.zeros(rows.shape, np.int16)
    upper = np.linalg.cholesky(inverse).T
    for at in range(0, rows.shape[1], _BLOCK):
        end = min(at + _BLOCK, rows.shape[1])
        errors = np.zeros((len(rows), end - at))
        for i in range(at, end):
            result[:, i] = _nearest(left[:, i : i + 1], scale, bits)[:, 0]
            errors[:, i - at] = (left[:, i] - scale * result[:, i]) / upper[i, i]
            left[:, i + 1 : end] -= errors[:, i - at, None] * upper[i, i + 1 : end]
        left[:, end:] -= errors @ upper[at:end, end:]
    return result


def quantize_basis(rows, n_wide, bits, mean_square):
    """The Basis of rows f32 [N][N], all components: n_wide as bf16, len(bits) in that many bits, the rest cut.
    mean_square [N]: of the components' coefficients, in steps of L1."""
    n_components = n_wide + len(bits)
    rest, bits = rows[n_wide:n_components].astype(np.float32), np.asarray(bits, np.uint8)
    scale, narrow = np.zeros(len(rest), np.float32), np.zeros(rest.shape, np.int16)
    full, squares = rows.astype(np.float64), mean_square.astype(np.float64)
    squares[: n_fine(n_wide, bits)] = 0  # taken out before
    for n in np.unique(bits):
        at = np.flatnonzero(bits == n)
        scale[at] = _best_scales(rest[at], n)[0]
        # A decoder multiplies d with the component's own coefficient, in all directions alike.
        own = max(mean_square[n_wide + at].mean(), LEAST_LEAK)
        narrow[at] = _round_rows(rest[at], scale[at], n, (full.T / (squares + own)) @ full)
    return Basis(to_bf16_bits(rows[:n_wide]), bits, scale, narrow)


@dataclass
class Plan:
    active: dict  # (level, group, plane): components of each frequency
    n_components: dict  # (group, plane)
    n_wide: dict
    bits: dict  # (group, plane): of the components behind the wide ones
    squares: dict  # (group, plane): mean square of the components' L1 symbols


def _nonzero_share(histogram):
    """[8][n_components]: how often the symbol is not 0. Averaged over neighbours: it falls along the components but for
    noise, and what is kept is a prefix."""
    counts = histogram.rows().reshape(*histogram.shift.shape, -1)
    share = 1 - counts[..., 0] / counts.sum(-1)
    share[histogram.shift.cpu().numpy() > 0] = 1
    pad = _NEIGHBOURS // 2
    padded = np.pad(share, ((0, 0), (pad, pad)), mode="edge")
    return np.lib.stride_tricks.sliding_window_view(padded, _NEIGHBOURS, axis=1).mean(-1)


def _prefix(above):
    """Length of the shortest prefix that holds every True."""
    found = np.flatnonzero(above)
    return int(found[-1]) + 1 if len(found) else 0


def _fewest_bits(rows):
    """Squared error of rows f32 [n][N] in 2 to MAX_NARROW_BITS bits: [bits][n]."""
    return np.stack([_best_scales(rows, bits)[1] for bits in range(2, MAX_NARROW_BITS + 1)])


def _plan(shares, squares, errors, least, noise):
    active, n_components, n_wide, bits_of = {}, {}, {}, {}
    for level, group, plane in sorted(shares):  # levels ascend
        n = [_prefix(row >= least) for row in shares[level, group, plane]]
        if level:  # no coarser level holds what the finer one does not: transcoding needs it
            n = [min(a, b) for a, b in zip(n, active[level - 1, group, plane])]
        else:
            most = max(n)
            square = squares[group, plane][:most]
            # What _round_rows() leaves: the data's geometric mean over all directions.
            leak = np.exp(np.log(np.where(square < EXACT_SQUARE, square, 0) + LEAST_LEAK).mean())
            fits = errors[group, plane][:, :most] * (square + leak) <= noise
            wide = _prefix(~fits[-1])
            n_components[group, plane], n_wide[group, plane] = most, wide
            bits_of[group, plane] = 2 + fits[:, wide:].argmax(0)
        active[level, group, plane] = n
    return Plan(active, n_components, n_wide, bits_of, squares)


def plan_columns(transform, histograms, mean_square, budget_bytes):
    """The Plan whose profile fits in budget_bytes: first components get fewer bits, then more are cut."""
    shares = {
        (level, *gp): _nonzero_share(h) for level in range(N_LEVELS) for gp, h in histograms[level].items()
    }  # fmt: skip
    squares = {gp: square.mean(0).cpu().numpy() for gp, square in mean_square.items()}
    errors = {(g, p): _fewest_bits(transform.rows[g][p].cpu().numpy()) for g, p in squares}
    channels = [rows[0].shape[1] for rows in transform.rows]
    fixed_bytes = 2 * 2 * 4 * transform.mean.shape[0] * transform.mean.shape[2] + (32 << 10)
    least, noise = LEAST_NONZERO, BASIS_NOISE
    while True:
        plan = _plan(shares, squares, errors, least, noise)
        n_bytes = fixed_bytes + sum(map(sum, plan.active.values()))
        for (g, p), bits in plan.bits.items():
            n_bytes += 2 * plan.n_wide[g, p] * channels[g] + int((channels[g] * bits // 8 + 6).sum())
        if n_bytes <= budget_bytes or least > 0.5:
            return plan
        if noise < MOST_BASIS_NOISE:
            noise *= 1.02
        else:
            least *= 1.25


def assemble(model, fingerprint, transform, histograms, plan, steps, n_classes):
    """The Profile of a plan."""
    n_groups = len(transform.groups)
    rows, shifts, refines = [], [], []
    for level in range(N_LEVELS):
        for g in range(n_groups):
            for p in range(2):
                h = histograms[level][g, p]
                counts, shift = h.rows().reshape(*h.shift.shape, -1), h.shift.cpu().numpy()
                for f, n in enumerate(plan.active[level, g, p]):
                    rows.append(counts[f, :n])
                    shifts.append(shift[f, :n])
                    refines.append(np.arange(n) < (plan.active[level + 1, g, p][f] if level + 1 < N_LEVELS else 0))
    every = np.concatenate(rows)
    classes, of = cluster(every, np.concatenate(shifts), n_classes)
    steps, refine = np.array(steps, np.float32), None
    if np.allclose(steps[1:] / steps[:-1], 3, rtol=0, atol=1e-6):
        at = np.flatnonzero(np.concatenate(refines))
        refine = refinement(every[at], of[at], classes)
    columns = iter(np.split(of.astype(np.uint8), np.cumsum([len(r) for r in rows])[:-1]))
    class_of = [
        [[[next(columns) for _ in range(BLOCK_TOKENS)] for _ in range(2)] for _ in range(n_groups)]
        for _ in range(N_LEVELS)
    ]
    basis = [
        [
            quantize_basis(
                transform.rows[g][p].cpu().numpy(), plan.n_wide[g, p], plan.bits[g, p], plan.squares[g, p]
            )
            for p in range(2)
        ]
        for g in range(n_groups)
    ]
    return Profile(
        bytes.fromhex(fingerprint), model.n_layers, model.n_kv_heads, model.head_dim, model.dtype_name,
        model.rope.inv_freq.numpy(), N_SINKS, transform.groups, steps,
        transform.mean.cpu().numpy(), transform.weight.cpu().numpy(), classes, basis, class_of, refine=refine,
    )  # fmt: skip
