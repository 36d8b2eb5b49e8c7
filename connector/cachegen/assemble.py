"""From statistics to a profile: which columns and components are worth their bytes, and the file's parts."""

import contextlib
from dataclasses import dataclass

import numpy as np
import torch

from .profile_file import (
    BAND,
    BLOCK_TOKENS,
    JOINT,
    MAX_BITS,
    MAX_BYTES,
    MAX_ELEMENT,
    N_LEVELS,
    UNIT_BITS,
    Basis,
    Joint,
    Profile,
    n_fine,
)
from .tables import cluster, cluster_by_factor, pool, refinement

LEAST_NONZERO = 2e-3  # columns with fewer symbols other than 0 are cut
LEAST_GIVEN = 2e-3  # mean square, in steps, of a shared component: what is below is not given
BASIS_NOISE = 1e-3  # what rounding a component of the basis may add to an L1 symbol's variance (its own is 1/12)
MOST_BASIS_NOISE = 2e-2
LEAST_LEAK = 0.02  # of the data into a rounded component, as a mean square of L1 symbols
BYTE_BITS = 8  # components of that many and fewer have elements of one byte, in a coarse unit
DEFAULT_UNIT_BITS = 14  # with it a component's elements, which are below 1, have up to MAX_BITS bits
# SUM_MARGIN and GIVEN_MARGIN are of the level's own step; blocks' finest steps take a factor 2.8 of them.
SUM_MARGIN = 16  # between the largest sum of a decoder's integers in calibration and 2^31
FRACTION_BITS = 4  # of what a joint matrix gives, in steps, at most
GIVEN_MARGIN = 4  # between the largest shared component in calibration and what a decoder makes of it, 2^15
EXACT_SQUARE = 300.0  # components above it are stored in EXACT_BITS and more, about
PLANNED_SHARE = 0.98  # of MAX_BYTES: what a plan does not count is less than the rest
_NEIGHBOURS = 9
_BLOCK = 64  # columns between updates of the whole matrix


def _nearest(rows, scale, bits):
    limit = 2 ** (int(bits) - 1) - 1
    return np.clip(np.rint(rows / scale[:, None]), -limit, limit)


@dataclass(frozen=True)
class Unit:
    """What the elements of a matrix's basis are counted in."""

    bits: int  # 2^-bits is 1
    byte_shift: int  # 2^byte_shift of them are the unit of components of BYTE_BITS

    def of(self, bits):
        """(shift, largest multiple) of components of so many bits."""
        limit = 128 if bits <= BYTE_BITS else MAX_ELEMENT
        return self.byte_shift if bits <= BYTE_BITS else 0, limit >> (int(bits) - 1)


def choose_unit(n_channels, largest_sum):
    """The Unit of a matrix of n_channels. largest_sum: the largest sum of magnitudes of symbols times their components'
    largest elements, in calibration: a decoder adds up as many units in 32 bits."""
    # 127 times the coarse unit is five to ten times the root mean square of a component's elements.
    coarse = int(np.ceil(np.log2(5 / 127 / np.sqrt(n_channels))))
    bits = max(DEFAULT_UNIT_BITS, -coarse)
    while bits > UNIT_BITS[0] and largest_sum * 2.0**bits > 2.0**31 / SUM_MARGIN:
        bits -= 1
    return Unit(bits, max(bits + coarse, 0))


def _best_multiples(rows, bits, unit):
    """(multiple, squared error) [n] of each of rows [n][N] in signed numbers of bits: the largest ones may be cut."""
    limit, (shift, most) = 2 ** (int(bits) - 1) - 1, unit.of(bits)
    quantum = 2.0 ** (shift - unit.bits)
    peak = np.abs(rows).max(1, initial=0) / (limit * quantum)
    best, least = np.ones(len(rows), np.int64), np.full(len(rows), np.inf, np.float32)
    for cut in (1.0, 0.85, 0.7, 0.6, 0.5, 0.4):
        multiple = np.clip(np.ceil(peak * cut), 1, most).astype(np.int64)
        scale = (multiple * quantum).astype(np.float32)
        error = np.square(rows - scale[:, None] * _nearest(rows, scale, bits)).sum(1)
        best, least = np.where(error < least, multiple, best), np.minimum(error, least)
    return best, least


@contextlib.contextmanager
def _one_thread():
    """Of torch's. Many small products in a row take ten times as long on a machine that others use, too: their threads
    spin, and wait for one that does not run."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


def _round_rows(rows, scale, bits, inverse):
    """s16 [n][N]: rows [n][N] over scale, rounded so that what is rounded away is small where the data are large.

    An encoder projects on rounded rows: d = row - rounded adds d' M d to a coefficient's variance, M the second moment
    of the data; inverse [N][N] is that of M. Element by element, the error of one is made up for by the next ones
    (GPTQ: Frantar et al., ICLR 2023, arXiv:2210.17323, algorithm 1)."""
    left, result = rows.astype(np.float64), np.zeros(rows.shape, np.int16)
    upper = torch.linalg.cholesky(torch.from_numpy(inverse)).T.contiguous()
    factors = upper.numpy()
    for at in range(0, rows.shape[1], _BLOCK):
        end = min(at + _BLOCK, rows.shape[1])
        errors = np.zeros((len(rows), end - at))
        for i in range(at, end):
            result[:, i] = _nearest(left[:, i : i + 1], scale, bits)[:, 0]
            errors[:, i - at] = (left[:, i] - scale * result[:, i]) / factors[i, i]
            left[:, i + 1 : end] -= errors[:, i - at, None] * factors[i, i + 1 : end]
        left[:, end:] -= (torch.from_numpy(errors) @ upper[at:end, end:]).numpy()
    return result


def quantize_basis(rows, bits, mean_square, unit):
    """The Basis of rows f32 [N][N], all components: len(bits) of them, in that many bits; the rest is cut.
    mean_square [N]: of the components' coefficients, in steps of L1."""
    kept, bits = rows[: len(bits)].astype(np.float32), np.asarray(bits, np.uint8)
    multiple, numbers = np.ones(len(kept), np.int64), np.zeros(kept.shape, np.int16)
    full, squares = rows.astype(np.float64), mean_square.astype(np.float64)
    fine = n_fine(bits)
    squares[:fine] = 0  # taken out before
    for n in np.unique(bits):
        at = np.flatnonzero(bits == n)
        multiple[at] = _best_multiples(kept[at], n, unit)[0]
        scale = (multiple[at] * 2.0 ** (unit.of(n)[0] - unit.bits)).astype(np.float32)
        # A decoder multiplies d with the component's own coefficient, in all directions alike.
        own = max(mean_square[at].mean(), LEAST_LEAK)
        inverse = (torch.from_numpy(full.T / (squares + own)) @ torch.from_numpy(full)).numpy()
        with _one_thread():
            numbers[at] = _round_rows(kept[at], scale, n, inverse)
    # A band has one shift. Where a component needs the fine unit, the others' multiples are in it, too.
    starts = range(0, len(bits), BAND)
    shift = np.array([unit.byte_shift if bits[i : i + BAND].max() <= BYTE_BITS else 0 for i in starts], np.uint8)
    multiple <<= np.where(bits <= BYTE_BITS, unit.byte_shift, 0) - np.repeat(shift, BAND)[: len(bits)]
    return Basis(unit.bits, shift, bits, multiple.astype(np.uint16), numbers)


@dataclass
class Plan:
    active: dict  # (level, group, matrix): components of each frequency, of a group its own
    bits: dict  # (group, matrix): of each component
    squares: dict  # (group, matrix): mean square of the components' L1 symbols
    units: dict  # (group, matrix): Unit
    fraction_bits: list  # [level] of the joint matrix
    n_given: list  # [level][frequency] components of each group that the joint matrix gives; None without


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


def _errors(rows, unit):
    """Squared error of rows f32 [n][N] in 2 to MAX_BITS bits: [bits][n]."""
    return np.stack([_best_multiples(rows, bits, unit)[1] for bits in range(2, MAX_BITS + 1)])


def _bits(errors, square, noise):
    """Of each component: as few as noise allows; no more than what makes it better."""
    # What _round_rows() leaves: the data's geometric mean over all directions.
    leak = np.exp(np.log(np.where(square < EXACT_SQUARE, square, 0) + LEAST_LEAK).mean())
    enough = np.maximum(noise / (square + leak), errors.min(0) * 1.05)
    return 2 + (errors <= enough).argmax(0)


def of_bytes(bits):
    """bits of components, in which bands that would be of bytes but for one bit are: then a decoder multiplies twice as
    fast. What it loses is about 2 % of the error at L1, and 0.2 % at L2, where such components' symbols are small."""
    bits = bits.copy()
    for band in (bits[i : i + BAND] for i in range(0, len(bits), BAND)):
        if band.max() == BYTE_BITS + 1:
            np.minimum(band, BYTE_BITS, out=band)
    return bits


def _n_given(active, joint_square, rows, n_shared):
    """[level][frequency] components of each group that are worth giving. active: of JOINT [level][frequency];
    joint_square [level][frequency][n_components]: of its symbols."""
    given = []
    for n_active, square in zip(active, joint_square):
        is_active = np.arange(len(rows)) < np.array(n_active)[:, None]
        of_groups = ((square * is_active) @ np.square(rows)).reshape(len(square), -1, n_shared)
        n = [_prefix(row >= LEAST_GIVEN) for row in of_groups.mean(1)]
        given.append([min(a, b) for a, b in zip(n, given[-1])] if given else n)
    return given


def choose_fraction_bits(largest_shared):
    """[level] of a joint matrix, each at most one more than the finer level's. largest_shared: [level] the largest
    shared component, in the level's steps."""
    bits, most = [], FRACTION_BITS
    for largest in largest_shared:
        while most and largest * 2.0**most > 2.0**15 / GIVEN_MARGIN:
            most -= 1
        bits.append(most)
        most = min(most + 1, FRACTION_BITS)
    return bits


def _plan(shares, squares, errors, units, least, noise, n_shared, fraction_bits):
    active, bits = {}, {}
    for level, group, matrix in sorted(shares):  # levels ascend
        n = [_prefix(row >= least) for row in shares[level, group, matrix]]
        if level:  # no coarser level holds what the finer one does not: transcoding needs it
            n = [min(a, b) for a, b in zip(n, active[level - 1, group, matrix])]
        else:
            # One at least, of a matrix, too, whose symbols are all 0.
            most = max(*n, 1) if (group, matrix) == JOINT else max(n_shared + max(n), 1)
            enough = _bits(errors[group, matrix][:, :most], squares[group, matrix][:most], noise)
            bits[group, matrix] = of_bytes(enough)
        active[level, group, matrix] = n
    return Plan(active, bits, squares, units, fraction_bits, None)


def plan_columns(transform, statistics, budget_bytes):
    """The Plan whose profile fits in budget_bytes and in MAX_BYTES: first components get fewer bits, then more are
    cut."""
    budget_bytes = min(budget_bytes, PLANNED_SHARE * MAX_BYTES)
    shares = {
        (level, *gm): _nonzero_share(h) for level in range(N_LEVELS) for gm, h in statistics.histograms[level].items()
    }  # fmt: skip
    squares = {gm: square.mean(0).cpu().numpy() for gm, square in statistics.mean_square.items()}
    n_channels = {gm: rows.shape[1] for gm, rows in transform.rows.items()}
    largest_sum = dict(statistics.largest_sum)
    fraction_bits = choose_fraction_bits(statistics.largest_shared)
    if transform.n_shared:  # a decoder's groups add up the fractions
        parts = [2**n * largest for n, largest in zip(fraction_bits, statistics.largest_shared)]
        for gm in transform.matrices.each():
            largest_sum[gm] *= max(parts) / statistics.largest_shared[0]
    units = {gm: choose_unit(n, largest_sum[gm]) for gm, n in n_channels.items()}
    errors = {gm: _errors(rows.cpu().numpy(), units[gm]) for gm, rows in transform.rows.items()}
    fixed_bytes = 2 * 2 * 4 * transform.mean.shape[0] * transform.mean.shape[2] + (32 << 10)
    least, noise = LEAST_NONZERO, BASIS_NOISE
    while True:
        plan = _plan(shares, squares, errors, units, least, noise, transform.n_shared, fraction_bits)
        n_bytes = fixed_bytes + sum(map(sum, plan.active.values()))
        n_bytes += sum(int((n_channels[gm] * bits // 8 + 5).sum()) for gm, bits in plan.bits.items())
        if n_bytes <= budget_bytes or least > 0.5:
            break
        if noise < MOST_BASIS_NOISE:
            noise *= 1.02
        else:
            least *= 1.25
    if transform.n_shared:
        active = [plan.active[(level, *JOINT)] for level in range(N_LEVELS)]
        square = [of.cpu().numpy() for of in statistics.joint_square]
        plan.n_given = _n_given(active, square, transform.rows[JOINT].cpu().numpy(), transform.n_shared)
        for level, given in enumerate(plan.n_given):  # symbols that give nothing are none
            plan.active[(level, *JOINT)] = [n if of_groups else 0 for n, of_groups in zip(active[level], given)]
    return plan


def assemble(model, fingerprint, transform, histograms, plan, steps, n_classes, by_factor=None, query_mean=None):
    """The Profile of a plan. by_factor: as count_by_factor() gives it, and query_mean, as a Profile has it, where
    blocks have steps of their own; None: they don't."""
    matrices, rows, shifts, refines = transform.matrices, [], [], []
    for level in range(N_LEVELS):
        for gm in transform.coded_matrices():
            h = histograms[level][gm]
            counts, shift = h.rows().reshape(*h.shift.shape, -1), h.shift.cpu().numpy()
            for f, n in enumerate(plan.active[(level, *gm)]):
                rows.append(counts[f, :n])
                shifts.append(shift[f, :n])
                refines.append(np.arange(n) < (plan.active[(level + 1, *gm)][f] if level + 1 < N_LEVELS else 0))
    every = np.concatenate(rows)
    counts, class_at = every[None], None
    if by_factor is None:
        classes, of = cluster(every, np.concatenate(shifts), n_classes)
    else:
        order = [(level, *gm) for level in range(N_LEVELS) for gm in transform.coded_matrices()]
        counts = np.concatenate([by_factor[one] for one in order], 1)
        classes, of, class_at = cluster_by_factor(counts, np.concatenate(shifts), n_classes)
    steps, refine = np.array(steps, np.float32), None
    if np.allclose(steps[1:] / steps[:-1], 3, rtol=0, atol=1e-6):
        at = np.flatnonzero(np.concatenate(refines))
        classes_at = class_at if class_at is not None else np.arange(len(classes))[None]
        refine = refinement(sum(pool(c[at], k[of[at]], len(classes)) for c, k in zip(counts, classes_at)), classes)
    columns = iter(np.split(of.astype(np.uint8), np.cumsum([len(r) for r in rows])[:-1]))
    class_of = [
        {gm: [next(columns) for _ in range(BLOCK_TOKENS)] for gm in transform.coded_matrices()} for _ in range(N_LEVELS)
    ]

    def basis(*gm):
        return quantize_basis(transform.rows[gm].cpu().numpy(), plan.bits[gm], plan.squares[gm], plan.units[gm])

    joint = transform.n_shared and Joint(
        transform.n_shared, plan.fraction_bits, basis(*JOINT), np.array(plan.n_given), [of[JOINT] for of in class_of]
    )
    return Profile(
        bytes.fromhex(fingerprint), model.n_layers, model.n_kv_heads, model.head_dim, model.dtype_name,
        model.rope.inv_freq.numpy(), transform.n_sinks, matrices.groups, steps,
        transform.mean.cpu().numpy(), transform.weight.cpu().numpy(), classes, matrices.nested(basis),
        [matrices.nested(lambda *gm: of[gm]) for of in class_of],
        refine=refine, is_joined=matrices.is_joined, joint=joint or None, class_at=class_at,
        query_mean=None if query_mean is None else query_mean.numpy(),
    )  # fmt: skip
