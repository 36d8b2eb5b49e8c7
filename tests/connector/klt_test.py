"""What profiles are made with, without a model or the C codec: matrices of K and V, bases of integers, the file.

usage: klt_test.py
"""

import math
import os
import sys
import types
import unittest
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "connector"))
sys.path.insert(0, os.path.join(ROOT, "tests", "codec"))
try:
    import numpy as np
    import torch
except ImportError as error:
    print(f"skipped: {error}: matrices, bases and profile files are not checked")
    sys.exit(77)
import reader  # noqa: E402
from cachegen import assemble as assemble_module  # noqa: E402
from cachegen import kl_curve, sinks  # noqa: E402
from cachegen.assemble import (  # noqa: E402
    BYTE_BITS,
    Unit,
    assemble,
    choose_fraction_bits,
    choose_unit,
    of_bytes,
    plan_columns,
    quantize_basis,
)
from cachegen.block_steps import CHUNK_TOKENS, Importance, factors_of  # noqa: E402
from cachegen.klt import LEAST_V, Matrices, Moments, Transform, layer_factors  # noqa: E402
from cachegen.kv_model import Context  # noqa: E402
from cachegen.make_profile import (  # noqa: E402
    MAX_CHANNELS,
    N_CLASSES,
    PROFILE_SHARE,
    choose_matrices,
    choose_shared,
    count_by_factor,
    count_symbols,
    fill_transform,
    join_groups,
    layer_costs,
    most_shared,
)
from cachegen.profile_file import (  # noqa: E402
    BAND,
    JOINT,
    MAX_BITS,
    MAX_ELEMENT,
    N_STEP_FACTORS,
    OWN_STEP_FACTOR,
    STEP_FACTORS,
    Basis,
    read_profile,
)
from cachegen.quality import Coder  # noqa: E402
from cachegen.rope import NO_ROPE, Rope  # noqa: E402
from cachegen.steps import parse_steps  # noqa: E402
from cachegen.tables import N_BINS, class_costs, cluster_by_factor, magnitude_bins  # noqa: E402
from cachegen.xxh3 import xxh3_64  # noqa: E402

GOLDEN = os.path.join(ROOT, "tests", "golden")
GROUPS, C = [2, 1], 12
N_TOKENS = 640


class Quiet:
    def start(self, stage):
        pass

    def __call__(self, done, total):
        pass


def model_of(n_layers, n_kv_heads):
    return types.SimpleNamespace(
        n_layers=n_layers, n_kv_heads=n_kv_heads, head_dim=4, channels=4 * n_kv_heads, dtype_name="fp32",
        dtype=torch.float32, device=torch.device("cpu"), rope=NO_ROPE,
    )  # fmt: skip


MODEL = model_of(sum(GROUPS), 3)
ALIKE, ALIKE_GROUPS, N_SHARED = model_of(5, 5), [2, 2, 1], 32  # whose groups are large enough to be joined


def correlated(seed=1, model=MODEL):
    """K and V [n_layers][n_tokens][n_kv_heads][4], of a few common causes that last for a while."""
    generator, shape = torch.Generator().manual_seed(seed), (2, model.n_layers, model.n_kv_heads, 4)
    causes = torch.randn(N_TOKENS, 10, generator=generator).cumsum(0) / 50
    mix = torch.randn(10, math.prod(shape), generator=torch.Generator().manual_seed(2))
    x = causes @ mix + torch.randn(N_TOKENS, mix.shape[1], generator=generator) / 25
    return x.reshape(N_TOKENS, *shape).permute(1, 2, 0, 3, 4)


def flat(x):
    return x.flatten(3)


def calibrated(is_joined, n_sinks=2, model=MODEL, groups=GROUPS):
    matrices, x = Matrices(groups, is_joined), flat(correlated(model=model))
    moments = Moments(model.n_layers, model.channels, matrices, "cpu")
    moments.add(x, torch.ones(model.n_layers, 2, model.channels))
    weight = torch.rand(model.n_layers, 2, model.channels, generator=torch.Generator().manual_seed(3)) + 0.5
    return Transform(matrices, moments.mean(), weight, moments.basis(weight), n_sinks, "cpu"), x, moments


def queries(model=MODEL, n_heads=2, size=3.0):
    """A mean query of n_heads for each KV head, in bf16's numbers."""
    shape = (model.n_layers, n_heads * model.n_kv_heads, model.head_dim)
    return (size * torch.randn(shape, generator=torch.Generator().manual_seed(4))).bfloat16().float()


def made(is_joined, budget_bytes=1 << 20, model=MODEL, groups=GROUPS, n_shared=0, query_mean=None):
    """(Profile, Transform, x)"""
    transform, x, _ = calibrated(is_joined, 2, model, groups)
    caches = types.SimpleNamespace(get=lambda context: tuple(correlated(model=model)))
    if n_shared:
        join_groups(model, caches, ["one"], transform, n_shared, Quiet())
    steps = parse_steps("0.05,0.15,0.45")
    importance = None if query_mean is None else Importance(query_mean, model.rope)
    statistics = count_symbols(model, caches, ["one"], transform, steps, Quiet())
    plan, by_factor = plan_columns(transform, statistics, budget_bytes), None
    if importance:
        by_factor = count_by_factor(
            model, caches, ["one"], transform, steps, plan, statistics.histograms, importance, Quiet()
        )
    profile = assemble(
        model, "5a" * 16, transform, statistics.histograms, plan, steps, 48 if importance else 12, by_factor, query_mean
    )
    return profile, transform, x


class CurveTest(unittest.TestCase):
    """Of quality by distance to the end."""

    def costs(self, n_tokens=3072, factor=1.0, **last):
        return kl_curve.Costs(n_tokens, [0.002 * factor, 0.008 * factor, 0.05 * factor],
                              {int(n[1:]): 0.05 * factor * share for n, share in last.items()})  # fmt: skip

    def test_shares_and_figures_are_of_the_mean_over_contexts(self):
        curve = kl_curve.fit([self.costs(factor=f, _64=share, _1024=0.9) for f, share in ((1, 0.4), (4, 0.8))])
        np.testing.assert_allclose(curve["kl"], [0.005, 0.02, 0.125])
        np.testing.assert_allclose(curve["last"], [[64, 0.72], [1024, 0.9], [3072, 1]], atol=1e-6)
        self.assertAlmostEqual(curve["beyond"], 0.1 / np.log(3), places=5)

    def test_figures_are_of_held_out_text_where_there_is_some_and_shares_are_not(self):
        measured = [self.costs(_64=0.4, _1024=0.9)]
        curve = kl_curve.fit(measured, [[0.003, 0.01, 0.08], [0.005, 0.02, 0.16]])
        np.testing.assert_allclose(curve["kl"], [0.004, 0.015, 0.12])
        self.assertEqual(curve["last"], kl_curve.fit(measured)["last"])

    def test_whatever_was_measured_the_curve_rises_and_its_slope_falls(self):
        rng = np.random.default_rng(3)
        for _ in range(200):
            n_tokens = int(rng.choice([192, 1024, 3072]))
            points = {n: float(rng.choice([0, 1e-6, rng.random() * 0.02])) for n in kl_curve.LAST if n < n_tokens}
            kl = sorted(float(x) for x in rng.choice([0, 1e-7, 0.004, 0.02, 3.0], 3))
            rng.shuffle(kl)
            curve = kl_curve.fit([kl_curve.Costs(n_tokens, kl, points), kl_curve.Costs(64, [1, 1, 1], {})])
            xs, ys = np.array([[0, 0], *curve["last"]], float).T
            self.assertTrue((np.diff(xs) >= 1).all() and (np.diff(ys) > 0).all(), curve)
            slope = np.diff(ys) / np.diff(xs)
            self.assertTrue((np.diff(slope) <= 1e-6).all(), curve)
            self.assertGreaterEqual(slope[-1] * n_tokens, kl_curve.LEAST_SHARE * 0.99)
            self.assertEqual((xs[-1], ys[-1]), (n_tokens, 1))
            self.assertTrue(1e-12 <= curve["kl"][0] <= curve["kl"][1] <= curve["kl"][2], curve)
            self.assertTrue(1e-3 <= curve["beyond"] <= 1)


class WeightsTest(unittest.TestCase):
    """From the Fisher information of contexts."""

    def squares(self, *information):
        """The squares of the weights, [n_layers][2][3 heads][4]."""
        moments = Moments(sum(GROUPS), C, Matrices(GROUPS, True), "cpu")
        for of_context in information:
            moments.add(flat(correlated()), of_context.flatten(2))
        return moments.weight(4).square().unflatten(2, (3, 4))

    def test_channels_of_v_are_drawn_to_their_heads_mean_and_those_of_k_are_not(self):
        information = torch.ones(sum(GROUPS), 2, 3, 4)
        information[:, :, 1, 2] = 16
        k, v = self.squares(information).unbind(1)
        torch.testing.assert_close(k, information[:, 0])
        torch.testing.assert_close(v[:, 1, 2], torch.full((sum(GROUPS),), 76.0).sqrt())
        torch.testing.assert_close(v[:, 1, :2], torch.full((sum(GROUPS), 2), 4.75).sqrt())
        torch.testing.assert_close(v[:, ::2], information[:, 1, ::2])

    def test_a_context_that_counts_four_times_as_much_counts_twice(self):
        one, other = torch.zeros(2, sum(GROUPS), 2, 3, 4)
        one[0], other[1] = 1, 4
        found = self.squares(one, other, torch.zeros_like(one))
        torch.testing.assert_close(found[1], 2 * found[0])
        same = self.squares(one + other, one + other)
        torch.testing.assert_close(same[:2], (one + other)[:2], msg="of one context's scale")


    def test_v_of_a_layer_that_gradients_call_unimportant_has_a_floor(self):
        matrices, information = Matrices(GROUPS, True), torch.ones(sum(GROUPS), 2, C)
        information[0, 1] = 1e-4
        moments = Moments(sum(GROUPS), C, matrices, "cpu")
        moments.add(flat(correlated()), information)
        one = torch.ones(sum(GROUPS), 2)
        for factors in (one, one - 0.5 * torch.eye(sum(GROUPS), 2).flip(1)):  # the floor is under what factors leave
            weight = moments.weight(4) * factors[:, :, None]
            found = fill_transform(moments, matrices, MODEL, Quiet(), factors).weight
            size, bare = ((w * moments.variance().sqrt())[:, 1].square().mean(1).sqrt() for w in (found, weight))
            self.assertLess(bare[0], 0.02 * bare[1:].min())
            torch.testing.assert_close(size[0], LEAST_V * bare.square().mean().sqrt())
            torch.testing.assert_close(found[0, 1] / weight[0, 1], (found / weight)[0, 1, :1].expand(C), msg="alike")
            self.assertTrue(torch.equal(found[1:], weight[1:]) and torch.equal(found[0, 0], weight[0, 0]))


class LayersTest(unittest.TestCase):
    """Factors of the weights, from what the errors of layers cost."""

    N_CONTEXTS, N_LAYERS = 9, 24

    def factors(self, cost, noise, seed=1):
        """Of contexts that differ in how much they cost, and by noise of their own; the weights say 1 everywhere."""
        rng = torch.Generator().manual_seed(seed)
        shape = (self.N_CONTEXTS, self.N_LAYERS, 2)
        of_context = torch.randn(self.N_CONTEXTS, 1, 1, generator=rng).exp()
        measured = cost * (noise * torch.randn(shape, generator=rng)).exp() * of_context
        return layer_factors(measured, torch.ones(shape))

    def test_a_fourth_root_of_what_layers_cost_that_all_contexts_agree_on(self):
        cost = torch.ones(self.N_LAYERS, 2)
        cost[:12, 0], cost[12:, 1] = 4, 0.25
        found = self.factors(cost, 0.0)
        want = cost**0.25 / cost.log().mean().div(4).exp()
        for layers in (slice(0, 11), slice(13, None)):  # what lies between is averaged
            torch.testing.assert_close(found[layers], want[layers])
        self.assertTrue((found[11:13, 0].diff() < 0).all() and (found[11:13] > want.min()).all())
        noisy = self.factors(cost, 0.5)
        self.assertGreater(torch.corrcoef(torch.stack([noisy.flatten(), want.flatten()]))[0, 1], 0.9)

    def test_noise_changes_next_to_nothing(self):
        cost = torch.ones(self.N_LAYERS, 2)
        spread = [self.factors(cost, 1.0, seed).log().square().mean().sqrt().item() for seed in range(20)]
        self.assertLess(max(spread), 0.1)  # bytes and quality lose about the square of it
        self.assertLess(sum(spread) / len(spread), 0.03)

    def test_whatever_was_measured_factors_are_bounded(self):
        rng, shape = torch.Generator().manual_seed(4), (self.N_CONTEXTS, 3, 2)
        for measured in (torch.zeros(shape), -torch.ones(shape), torch.randn(shape, generator=rng) * 1e30,
                         torch.randn(shape, generator=rng).exp() ** 9):  # fmt: skip
            found = layer_factors(measured, torch.rand(shape, generator=rng))
            self.assertTrue(((0.5 <= found) & (found <= 2)).all(), found)
        one = torch.ones(3, 2)
        measured[0, 1, 1] = float("nan")
        torch.testing.assert_close(layer_factors(measured, torch.ones(shape)), one)
        torch.testing.assert_close(layer_factors(torch.rand(2, 3, 2), torch.ones(2, 3, 2)), one, msg="too few contexts")

    def test_a_context_that_errors_cost_nothing_says_nothing(self):
        measured = torch.rand(6, 5, 2, generator=torch.Generator().manual_seed(2)) + torch.arange(5)[:, None] / 2
        measured[2] = -0.1
        predicted = torch.ones(6, 5, 2)
        kept = [0, 1, 3, 4, 5]
        found = layer_factors(measured, predicted)
        self.assertGreater((found - 1).abs().max(), 0.02)
        torch.testing.assert_close(found, layer_factors(measured[kept], predicted[kept]))

    def test_costs_are_of_other_tokens_than_those_after_the_context(self):
        transform, x, _ = calibrated(True)
        k, v = correlated()
        seen = types.SimpleNamespace(**vars(MODEL))
        seen.kl_by_layer = lambda *asked: setattr(seen, "asked", asked) or torch.ones(sum(GROUPS), 2)
        n_tokens, n = k.shape[1], 424  # two thirds, of whole blocks
        context = Context("", torch.arange(n_tokens + 256), n_tokens)
        _, predicted = layer_costs(seen, context, k, v, transform, 0.45)
        part, own_k, own_v, coded_k, coded_v = seen.asked
        self.assertEqual((part.n, part.ids.tolist()), (n, list(range(n + 256))))
        self.assertTrue(torch.equal(own_k, k[:, :n]) and torch.equal(own_v, v[:, :n]))
        error = torch.stack([coded_k - own_k, coded_v - own_v], 1).flatten(3) * transform.weight[:, :, None]
        torch.testing.assert_close(predicted, error.square().sum((2, 3)), rtol=1e-3, atol=1e-4)
        self.assertGreater(predicted.min(), 0)

    def test_the_weights_are_multiplied_and_the_basis_is_theirs(self):
        matrices, x = Matrices(GROUPS, True), flat(correlated())
        moments = Moments(sum(GROUPS), C, matrices, "cpu")
        moments.add(x, torch.ones(sum(GROUPS), 2, C))
        model, factors = types.SimpleNamespace(**vars(MODEL)), torch.tensor([[1.0, 2.0], [0.5, 1.0], [1.5, 1.0]])
        plain, scaled = (fill_transform(moments, matrices, model, Quiet(), f) for f in (None, factors))
        torch.testing.assert_close(scaled.weight, plain.weight * factors[:, :, None])
        y = (matrices.rows(x, 0, 0) - matrices.columns(scaled.mean, 0, 0)) * matrices.columns(scaled.weight, 0, 0)
        covariance = torch.cov((y @ scaled.rows[0, 0].T).T)
        self.assertLess((covariance - covariance.diag().diag()).abs().max(), 1e-3 * covariance.max())


class MatricesTest(unittest.TestCase):
    def test_channels_stand_by_plane_then_layer(self):
        x = flat(correlated())
        joined, apart = Matrices(GROUPS, True), Matrices(GROUPS, False)
        self.assertEqual((joined.each(), apart.each()), ([(0, 0), (1, 0)], [(0, 0), (0, 1), (1, 0), (1, 1)]))
        token = joined.rows(x, 0, 0)[7].reshape(2, 2, C)
        self.assertTrue(torch.equal(token, x[:, :2, 7]))
        self.assertTrue(torch.equal(apart.rows(x, 0, 1)[7].reshape(2, C), x[1, :2, 7]))
        channel = torch.arange(sum(GROUPS) * 2 * C).reshape(sum(GROUPS), 2, C)
        self.assertTrue(torch.equal(joined.columns(channel, 0, 0).reshape(2, 2, C), channel[:2].transpose(0, 1)))
        for matrices in (joined, apart):
            back = torch.zeros_like(x)
            for gm in matrices.each():
                matrices.put(matrices.rows(x, *gm), back, *gm)
            self.assertTrue(torch.equal(back, x))

    def test_the_transform_loses_nothing(self):
        for is_joined in (False, True):
            transform, x, moments = calibrated(is_joined)
            out = torch.zeros_like(x)
            for g, m in transform.matrices.each():
                transform.synthesize(transform.coefficients(x, g, m), g, m, out)
            torch.testing.assert_close(out[:, :, 2:], x[:, :, 2:], atol=1e-4, rtol=0)
            torch.testing.assert_close(moments.mean().transpose(0, 1), x.mean(2))
            variance = x.double().var(2, correction=0).transpose(0, 1)
            torch.testing.assert_close(moments.variance(), variance, rtol=1e-3, atol=1e-6)

    def test_with_as_many_sinks_as_a_block_has_tokens_the_first_block_is_the_mean(self):
        transform, x, _ = calibrated(True, n_sinks=8)
        self.assertEqual(transform.coefficients(x, 0, 0)[0].abs().max().item(), 0)

    def test_what_k_and_v_have_in_common_is_coded_once(self):
        bits = []
        for is_joined in (False, True):
            transform, x, _ = calibrated(is_joined)
            z = [transform.coefficients(x, *gm).pow(2).mean(0) for gm in transform.matrices.each()]
            bits.append(sum((square / 0.06**2 + 1).log2().sum().item() / 2 for square in z))
        self.assertLess(bits[1], 0.8 * bits[0])

    def test_group_sizes_follow_the_model_the_budget_and_what_is_preferred(self):
        def choose(channels, n_layers, budget=1e12, **more):
            model = types.SimpleNamespace(n_layers=n_layers, channels=channels)
            found = choose_matrices(model, budget, **more)
            self.assertEqual(sum(found.groups), n_layers)
            return found.is_joined, max(found.groups)

        small, speed = PROFILE_SHARE["bytes"] * 269e6, {"most_channels": MAX_CHANNELS["speed"]}
        large, smallest = PROFILE_SHARE["smallest"] * 269e6, {"most_channels": MAX_CHANNELS["smallest"]}
        self.assertEqual(choose(192, 30, small), (True, 5))
        self.assertEqual(choose(192, 30, small, **speed), (True, 3))
        self.assertEqual(choose(192, 30, large, **smallest), (True, 10))
        self.assertEqual(choose(192, 30, small, **smallest), (True, 5), "the profile would be too large")
        self.assertEqual(choose(192, 30, small, planes=("apart",)), (False, 10))
        self.assertEqual(choose(1024, 32), (True, 1))
        self.assertEqual(choose(1024, 32, **speed), (False, 1))
        self.assertEqual(choose(1024, 32, **smallest), (True, 2))
        self.assertEqual(choose(4096, 32), (False, 1), "no group fits: the least")
        self.assertEqual(choose(192, 30, 0.3 * small), (True, 1), "a small budget")
        self.assertEqual(choose(192, 30, 0), (False, 1))

    def test_the_tables_of_all_classes_fit_the_shared_memory_of_a_gpu(self):
        """400 bytes each, one more for lanes without a column, and 2 KiB of a block that codes (codec/FORMAT.md)."""
        self.assertLessEqual(400 * (N_CLASSES + 1) + 2048, 64 << 10)


class BasisTest(unittest.TestCase):
    def setUp(self):
        rng = np.random.default_rng(4)
        self.rows = np.linalg.qr(rng.standard_normal((100, 100)))[0].astype(np.float32)
        self.square = np.geomspace(1e5, 1e-3, 100)

    def quantized(self, bits, unit=None):
        return quantize_basis(self.rows, np.array(bits), self.square, unit or choose_unit(100, 1e3))

    def test_elements_are_integers_within_the_format(self):
        basis = self.quantized([15] * 3 + [12] * 7 + [9] * 12 + [8] * 30 + [5] * 20 + [2] * 28)
        self.assertEqual((basis.unit_bits, len(basis.shift), basis.n_components), (14, 4, 100))
        self.assertTrue((basis.multiple.astype(int) << (basis.bits.astype(int) - 1) <= MAX_ELEMENT).all())
        self.assertTrue((basis.multiple >= 1).all())
        limit = 2 ** (basis.bits.astype(int) - 1)
        self.assertTrue((np.abs(basis.numbers) < limit[:, None]).all())
        self.assertEqual(basis.is_bytes.tolist(), [False, True, True, True])
        self.assertEqual(basis.shift[0], 0)
        self.assertTrue((basis.shift[1:] == basis.shift[1]).all() and basis.shift[1] > 0)
        self.assertTrue((np.abs(basis.rows()) <= basis.largest()[:, None]).all())
        self.assertEqual(basis.n_exact, 32, "22 are fine, in sixteens")
        error = np.sqrt(np.square(basis.rows() - self.rows).sum(1))
        self.assertLess(error[:3].max(), 2e-3)
        self.assertLess(error[22:52].max(), 0.15)  # what is rounded away is put where the data are small

    def test_a_band_has_one_unit(self):
        bits = [12] + [4] * 99
        basis, alone = self.quantized(bits), self.quantized([4] * 100)
        self.assertEqual(basis.shift.tolist(), [0] + [alone.shift[1]] * 3)
        self.assertTrue((basis.multiple[1:BAND] % (1 << alone.shift[1]) == 0).all(), "of the coarse unit")
        self.assertTrue((basis.multiple.astype(int) << (basis.bits.astype(int) - 1) <= MAX_ELEMENT).all())

    def test_a_band_is_not_wide_for_one_bit(self):
        bits = np.array([10, 9] * 16 + [9, 3] * 16 + [9] * 36)
        self.assertEqual(of_bytes(bits).tolist(), [10, 9] * 16 + [8, 3] * 16 + [8] * 36)
        self.assertEqual(self.quantized(of_bytes(bits)).is_bytes.tolist(), [False, True, True, True])

    def test_sums_stay_far_from_32_bits(self):
        self.assertEqual(choose_unit(1920, 1e3), Unit(14, 4))
        self.assertEqual(choose_unit(1152, 1e3), Unit(14, 5))
        for largest_sum in (1e4, 1e5, 3e5):
            self.assertLess(largest_sum * 2.0 ** choose_unit(1920, largest_sum).bits, 2**31 / 8)
        self.assertEqual(choose_unit(1920, 1e12).bits, 8, "what cannot be helped is the encoder's to count")

    def test_the_file_holds_it_and_the_second_reader_reads_the_same(self):
        for is_joined in (False, True):
            profile, _, _ = made(is_joined)
            data = profile.to_bytes()
            back, second = read_profile(data), reader.Profile(data)
            self.assertEqual(back.to_bytes(), data)
            self.assertEqual((back.is_joined, bool(second.joined)), (is_joined, is_joined))
            self.assertGreater(sum(b.n_components for of in profile.basis for b in of), 20)
            for g, m in Matrices(GROUPS, is_joined).each():
                rows, unit_bits = profile.basis[g][m].rows(), profile.basis[g][m].unit_bits
                np.testing.assert_array_equal(back.basis[g][m].rows(), rows)
                np.testing.assert_array_equal(second.basis[g, m], rows.astype(np.float64) * 2**unit_bits)
                self.assertEqual(second.unit_bits[g, m], unit_bits)
                for level in range(3):
                    n_active = profile.n_active(level, g, m)
                    self.assertEqual([len(of) for of in second.columns[level + 1, g, m]], n_active)

    def test_a_profile_codes_as_its_transform(self):
        for is_joined in (False, True):
            profile, _, x = made(is_joined)
            coder, weight = Transform.of_profile(profile), torch.tensor(profile.weight).transpose(0, 1)[:, :, None]
            step, out = float(profile.step[0, 0]), coder.coded(x, profile.step[0].tolist())
            error = ((out - x) * weight)[:, :, 2:].pow(2).mean().sqrt().item() / step
            self.assertLess(abs(error - 12**-0.5), 0.06, "a uniform quantizer's")

    def test_a_small_budget_makes_a_small_profile(self):
        sizes = [len(made(True, budget)[0].to_bytes()) for budget in (1 << 20, 36 << 10)]
        self.assertGreater(sizes[0], 1.1 * sizes[1])

    def test_damaged_fields_are_refused(self):
        profile, _, _ = made(True)
        basis = profile.basis[0][0]

        def refuse(what):
            with self.subTest(what), self.assertRaises(ValueError):
                read_profile(profile.to_bytes())

        for name, value in (("bits", MAX_BITS + 1), ("bits", 1), ("multiple", 0), ("multiple", 1 << 14), ("shift", 17)):
            array = getattr(basis, name)
            kept, array[0] = array[0], value
            refuse(f"{name} {value}")
            array[0] = kept
        for unit_bits in (7, 21):
            kept, basis.unit_bits = basis.unit_bits, unit_bits
            refuse(f"unit_bits {unit_bits}")
            basis.unit_bits = kept
        profile.step[1, 1] *= 2
        refuse("steps of K and V")
        profile.step[1, 1] /= 2
        read_profile(profile.to_bytes())

    def test_version_1_is_read_and_not_written(self):
        for name in ("v1", "v1-packed", "v2-nested"):
            with open(os.path.join(GOLDEN, name, "profile.cgp"), "rb") as file:
                data = file.read()
            old, second = read_profile(data), reader.Profile(data)
            self.assertFalse(old.is_joined or isinstance(old.basis[0][0], Basis))
            for g, of in enumerate(old.basis):
                for m, basis in enumerate(of):
                    np.testing.assert_array_equal(basis.rows(), second.basis[g, m])
            with self.assertRaisesRegex(ValueError, "version 1"):
                old.to_bytes()

    def test_few_bits_are_of_bytes(self):
        self.assertTrue(self.quantized([BYTE_BITS] * 100).is_bytes.all())
        self.assertFalse(self.quantized([BYTE_BITS + 1] * 100).is_bytes.any())


class JointTest(unittest.TestCase):
    """The KLT over all groups."""

    def made(self, n_shared=N_SHARED):
        return made(True, model=ALIKE, groups=ALIKE_GROUPS, n_shared=n_shared)

    def test_what_groups_have_in_common_is_coded_once(self):
        bits, squares = [], []
        for n_shared in (0, N_SHARED):
            profile, _, x = self.made(n_shared)
            weight = torch.tensor(profile.weight).transpose(0, 1)[:, :, None]
            coded = [Coder(profile).code(x, level) for level in range(3)]
            bits.append([n for _, n in coded])
            squares.append([((y - x) * weight).square().mean().item() for y, _ in coded])
        for apart, together, most in zip(*bits, (0.95, 0.88, 0.7)):  # finer levels code more of what is noise
            self.assertLess(together, most * apart)
        self.assertLess(max(b / a for a, b in zip(*squares)), 1.1)

    def test_what_is_given_are_the_integers_of_the_format(self):
        profile, _, x = self.made()
        joint = profile.joint
        shift = np.repeat(joint.basis.shift, BAND)[: joint.basis.n_components].astype(np.int64)
        elements = (joint.basis.multiple.astype(np.int64) << shift)[:, None] * joint.basis.numbers
        transform, seen = Transform.of_profile(profile), {}

        def kept(gm, symbols):
            seen[gm] = symbols
            return symbols

        for level in range(3):
            transform.coded(x, profile.step[level].tolist(), kept, joint, level)
            v, q = transform.given(seen[JOINT], joint, level), joint.fraction_bits[level]
            k = joint.basis.unit_bits - q
            exact = seen[JOINT].numpy().astype(np.int64) @ elements
            exact = ((exact >> k) + ((exact >> (k - 1)) & 1)).reshape(v.shape)
            for f, n in enumerate(joint.n_given[level]):
                exact[:, f, :, n:] = 0
            self.assertGreater(np.abs(exact).max(), 100)
            np.testing.assert_array_equal(v.numpy() * 2**q, exact)

    def test_the_file_holds_it(self):
        profile, transform, _ = self.made()
        data = profile.to_bytes()
        self.assertEqual((data[8], made(True)[0].to_bytes()[8]), (3, 2), "versions")
        back = read_profile(data)
        self.assertEqual(back.to_bytes(), data)
        self.assertEqual((back.n_shared, back.joint.fraction_bits), (N_SHARED, profile.joint.fraction_bits))
        np.testing.assert_array_equal(back.joint.basis.rows(), profile.joint.basis.rows())
        np.testing.assert_array_equal(back.joint.n_given, profile.joint.n_given)
        self.assertLess(np.square(back.joint.basis.rows()[:10] - transform.rows[JOINT][:10].numpy()).sum(1).max(), 1e-4)
        second = reader.Profile(data)
        self.assertEqual((second.n_shared, second.fraction_bits), (N_SHARED, profile.joint.fraction_bits))
        np.testing.assert_array_equal(second.n_given, profile.joint.n_given)
        for gm in transform.coded_matrices():
            basis, at = (profile.joint.basis, reader.JOINT) if gm == JOINT else (profile.basis[gm[0]][0], gm)
            np.testing.assert_array_equal(second.basis[at], basis.rows().astype(np.float64) * 2**basis.unit_bits)
            for level in range(3):
                self.assertEqual(back.n_active(level, *gm), profile.n_active(level, *gm))
                self.assertEqual([len(of) for of in second.columns[(level + 1, *at)]], profile.n_active(level, *gm))

    def test_levels_nest_and_what_is_not_given_has_no_symbols(self):
        profile, _, _ = self.made()
        given = profile.joint.n_given
        active = np.array([profile.n_active(level, *JOINT) for level in range(3)])
        for of in (given.astype(int), active):
            self.assertTrue((np.diff(of, axis=0) <= 0).all() and (np.diff(of, axis=1) <= 0).any(), of)
        self.assertTrue((active[given == 0] == 0).all() and (given > 0).any())
        with mock.patch.object(assemble_module, "LEAST_GIVEN", 1e9):
            nothing = read_profile(self.made()[0].to_bytes())
        self.assertEqual((nothing.joint.n_given.max(), nothing.n_active(0, *JOINT)), (0, [0] * 8))
        for g in range(len(ALIKE_GROUPS)):
            n_own = profile.basis[g][0].n_components - N_SHARED
            self.assertEqual(max(profile.n_active(0, g, 0)), n_own, "counted without the shared ones")

    def test_damaged_fields_are_refused(self):
        profile, _, _ = self.made()
        joint = profile.joint

        def refuse(what, of, name, value):
            kept = getattr(of, name)
            setattr(of, name, value)
            with self.subTest(f"{name} {value}"), self.assertRaisesRegex(ValueError, what):
                read_profile(profile.to_bytes())
            setattr(of, name, kept)

        for n_shared in (0, 31, 64, 32 * 43):
            refuse("profile", joint, "n_shared", n_shared)
        for level in range(3):
            refuse("fraction_bits", joint, "fraction_bits", [9 * (i == level) for i in range(3)])
        for unit_bits in (4, 7, 21):
            refuse("unit_bits", joint.basis, "unit_bits", unit_bits)
        more = joint.n_given.copy()
        more[0, 0] = N_SHARED + 1
        refuse("given", joint, "n_given", more)
        refuse("give nothing", joint, "n_given", joint.n_given * 0)
        refuse("a class that is not there", joint, "class_of", [[of + 12 for of in level] for level in joint.class_of])
        apart = profile.is_joined
        refuse("planes apart", profile, "is_joined", not apart)
        read_profile(profile.to_bytes())

    def test_what_is_given_is_as_fine_as_16_bits_allow(self):
        for largest, bits in (((1900, 640, 210), [2, 3, 4]), ((512, 170, 60), [4, 4, 4]), ((513, 171, 60), [3, 4, 4]),
                              ((8192, 10, 1), [0, 1, 2]), ((1e6, 4e5, 1e5), [0, 0, 0])):  # fmt: skip
            self.assertEqual(choose_fraction_bits(largest), bits)

    def test_as_many_are_shared_as_a_joint_matrix_may_have(self):
        def shared(groups, channels, is_joined=True, n_tokens=10**6):
            return choose_shared(Matrices(groups, is_joined), channels, n_tokens)

        self.assertEqual(shared([5] * 6, 192), 320)
        self.assertEqual(shared([1] * 32, 1024), 128)
        self.assertEqual(shared([1] * 80, 1024), 64)
        self.assertEqual(shared([1] * 30, 192), 64)
        self.assertEqual(shared([5] * 6, 192, n_tokens=14 * 6 * 96), 96, "too little text for more")
        self.assertEqual(shared([5] * 6, 192, n_tokens=14 * 6 * 32 - 1), 0, "too little text")
        self.assertEqual(most_shared(Matrices([1] * 30, True), 192), 256)
        self.assertEqual(shared([2, 1], 20), 32, "the smallest group's")
        self.assertEqual(shared([1] * 300, 1024), 0, "too many groups")
        self.assertEqual((shared([5] * 6, 192, False), shared([30], 32)), (0, 0), "planes apart, one group")


class BlockStepsTest(unittest.TestCase):
    """A step for each block."""

    def made(self, n_shared=0):
        return made(True, model=ALIKE, groups=ALIKE_GROUPS, n_shared=n_shared, query_mean=queries(ALIKE))

    def as_the_format_says(self, query_mean, rope, x, n_sinks):
        """The scale index of each block of one chunk, number by number."""
        n_tokens, head_dim = x.shape[2], query_mean.shape[2]
        if n_sinks >= n_tokens:
            return [3] * -(-n_tokens // 8)
        k, v = x.double().unflatten(3, (-1, head_dim)).numpy()  # [layer][token][head][head_dim]
        first, per_head, shares = n_sinks, query_mean.shape[1] // k.shape[2], []
        for layer in range(len(k)):
            for h in range(query_mean.shape[1]):
                of_k, of_v = k[layer, first:, h // per_head], v[layer, first:, h // per_head]
                distance = ((of_v - of_v.mean(0)) ** 2).sum(1)
                for d in (32, 128, 512, 2048):
                    query, half = query_mean[layer, h].double().numpy().copy(), rope.rotary_dim // 2
                    for i in range(half):
                        c, s = math.cos(d * float(rope.inv_freq[i])), math.sin(d * float(rope.inv_freq[i]))
                        a, b = query[i], query[i + half]
                        query[i], query[i + half] = a * c - b * s, b * c + a * s
                    e = np.exp(2 * (of_k @ query) - (2 * (of_k @ query)).max())
                    shares += [e / e.mean(), e * distance / (e * distance).mean()]
        of_tokens, found = np.mean(shares, 0), {}
        for b in range(-(-n_tokens // 8)):
            of_block = [of_tokens[t - first] for t in range(8 * b, min(8 * b + 8, n_tokens)) if t >= first]
            if of_block:
                found[b] = -0.35 * math.log2(max(np.mean(of_block), 1e-9))
        for _ in range(2):
            mean = np.mean(list(found.values()))
            found = {b: max(-1.5, min(1.5, o - mean)) if _ == 0 else o - mean for b, o in found.items()}
        return [3 + max(-3, min(3, round(2 * found[b]))) if b in found else 3 for b in range(-(-n_tokens // 8))]

    def test_step_factors_are_those_of_the_format(self):
        rope = Rope("", 2, torch.tensor([0.7], dtype=torch.float64))
        for n_tokens, n_sinks, size in (
            (256, 0, 3),
            (250, 2, 3),
            (43, 8, 3),
            (13, 4, 1),
            (256, 4, 40),
            (8, 8, 3),
            (10, 8, 3),
        ):
            query_mean, x = queries(size=size), flat(correlated())[:, :, :n_tokens]
            found = Importance(query_mean, rope).factor_index(x, n_sinks).tolist()
            self.assertEqual(found, self.as_the_format_says(query_mean, rope, x, n_sinks), (n_tokens, n_sinks))
            self.assertTrue(n_tokens < 50 or len(set(found)) > 2, "of several factors")
        self.assertEqual((min(found), len(found)), (OWN_STEP_FACTOR, 2))

    def test_a_chunk_does_not_know_the_others(self):
        importance, x = Importance(queries(), NO_ROPE), flat(correlated())
        whole = importance.factor_index(x, 2)
        parts = [
            importance.factor_index(x[:, :, at : at + CHUNK_TOKENS], max(2 - at, 0))
            for at in range(0, N_TOKENS, CHUNK_TOKENS)
        ]
        self.assertEqual(whole.tolist(), torch.cat(parts).tolist())
        np.testing.assert_array_equal(factors_of(torch.arange(N_STEP_FACTORS)).numpy(), STEP_FACTORS)
        self.assertEqual(
            [float(s).hex()[:10] for s in STEP_FACTORS[::2]], ["0x1.6a09e6", "0x1.6a09e6", "0x1.6a09e6", "0x1.6a09e6"]
        )

    def test_errors_are_those_of_the_blocks_steps(self):
        transform, x, _ = calibrated(True)
        index = torch.randint(0, N_STEP_FACTORS, (N_TOKENS // 8,), generator=torch.Generator().manual_seed(8))
        steps = [0.01, 0.01]
        same = transform.coded(x, steps, factors=torch.ones(N_TOKENS // 8))
        self.assertTrue(torch.equal(same, transform.coded(x, steps)))
        out = transform.coded(x, steps, factors=factors_of(index))
        error = (
            ((out - x) * transform.weight.transpose(0, 1)[:, :, None]).square().mean((0, 1, 3)).unflatten(0, (-1, 8))
        )
        for i in range(N_STEP_FACTORS):
            size = error[1:][index[1:] == i].mean().sqrt().item() / (0.01 * STEP_FACTORS[i])
            self.assertLess(abs(size - 12**-0.5), 0.03, f"scale {i}")

    def test_the_file_holds_them_and_the_second_reader_reads_the_same(self):
        for n_shared in (0, N_SHARED):
            profile, _, _ = self.made(n_shared)
            data = profile.to_bytes()
            self.assertEqual((data[8], data[79]), (4, n_shared > 0))
            back, second = read_profile(data), reader.Profile(data)
            self.assertEqual(back.to_bytes(), data)
            self.assertEqual((back.n_shared, second.n_shared), (n_shared, n_shared))
            np.testing.assert_array_equal(back.class_at, profile.class_at)
            np.testing.assert_array_equal(back.query_mean, queries(ALIKE).numpy())
            self.assertGreater(np.count_nonzero(profile.class_at != np.arange(len(profile.classes))), 5)
            columns, k = profile.columns(0, 0, 0)[0], second.columns[1, 0, 0][0]
            for i in range(N_STEP_FACTORS):
                want = [profile.classes[c].freq.tolist() for c in profile.class_at[i][columns]]
                self.assertEqual([one.at_scale[i].freq for one in k], want)

    def test_damaged_fields_are_refused(self):
        profile, _, _ = self.made()
        read_profile(profile.to_bytes())
        for what, name, cell, value in (
            ("a class", "class_at", (2, 1), len(profile.classes)),
            ("finite", "query_mean", (1, 2, 3), math.inf),
        ):
            array = getattr(profile, name)
            kept, array[cell] = array[cell], value
            with self.subTest(what), self.assertRaisesRegex(ValueError, what):
                read_profile(profile.to_bytes())
            array[cell] = kept
        profile.query_mean = profile.query_mean[:, :-1]
        with self.assertRaisesRegex(ValueError, "multiple of KV heads"):
            read_profile(profile.to_bytes())
        profile.query_mean = profile.query_mean[:, :0]
        self.assertIsNone(Coder(read_profile(profile.to_bytes())).importance, "queries that are not known")
        data = bytearray(made(True)[0].to_bytes())
        data[79] = 1
        data[-8:] = xxh3_64(bytes(data[:-8])).to_bytes(8, "little")
        with self.assertRaisesRegex(ValueError, "reserved"):
            read_profile(bytes(data))

    def test_classes_by_scale_cost_less(self):
        profile, _, x = self.made(N_SHARED)
        coder, bits = Coder(profile), []
        for class_at in (profile.class_at, np.tile(np.arange(len(profile.classes)), (N_STEP_FACTORS, 1))):
            coder.class_at = torch.from_numpy(class_at.astype(np.int64))
            bits.append([coder.code(x, level)[1] for level in range(3)])
        for with_scale, without in zip(*bits):
            self.assertLess(with_scale, 0.97 * without)

    def test_each_scale_has_the_class_of_its_spread(self):
        generator, shift = torch.Generator().manual_seed(6), np.repeat([0, 0, 3], 100)
        sigma = torch.cat([torch.linspace(0.1, 6, 200), torch.linspace(30, 60, 100)])
        counts = []
        for scale in STEP_FACTORS:
            q = (torch.randn(400, 300, generator=generator) * sigma / scale).round().int()
            bins = magnitude_bins(q, torch.from_numpy(shift).int()).long() + N_BINS * torch.arange(300)
            counts.append(torch.bincount(bins.flatten(), minlength=300 * N_BINS).reshape(300, N_BINS).float().numpy())
        counts[0][:, 1:] = 0  # hardly seen
        counts[0][:, :1] = 0
        classes, of, class_at = cluster_by_factor(np.stack(counts), shift, 24)
        self.assertEqual(class_at.shape, (N_STEP_FACTORS, len(classes)))
        used = np.unique(of)
        np.testing.assert_array_equal([classes[c].shift for c in of], shift)
        for i in range(N_STEP_FACTORS):
            np.testing.assert_array_equal([classes[k].shift for k in class_at[i]], [c.shift for c in classes])
        costs = np.stack([class_costs(c) for c in classes])
        for i in range(1, N_STEP_FACTORS):
            n, bits = counts[i].sum(1), (counts[i] * costs[class_at[i][of]]).sum(1)
            entropy = np.log2(2 * math.pi * math.e * ((sigma.numpy() / STEP_FACTORS[i]) ** 2 + 1 / 12)) / 2
            clear = sigma.numpy() / STEP_FACTORS[i] > 0.7  # there a normal distribution's is that of rounded numbers
            self.assertLess((bits / n - entropy)[clear].mean(), 0.1, f"scale {i}")
            if i in (1, 6):
                self.assertGreater(((counts[i] * costs[of]).sum(1) - bits).sum(), 0.1 * n.sum(), "than with one class")
        pooled = np.zeros((len(classes), N_BINS))
        np.add.at(pooled, of, sum(counts))
        own = (pooled @ costs.T + 1e9 * np.array([[c.shift != d.shift for d in classes] for c in classes]))[used]
        np.testing.assert_allclose(
            own[np.arange(len(used)), class_at[0][used]], own.min(1), err_msg="unseen: that of all"
        )


class SinksTest(unittest.TestCase):
    def choose(self, *kl):
        """With a model whose divergence is kl of the choices of sinks."""
        asked = []

        def told(model, transform, caches, contexts, step, progress):
            asked.append((len(contexts), step))
            return kl

        original, sinks.divergences = sinks.divergences, told
        self.addCleanup(setattr, sinks, "divergences", original)
        return sinks.choose_sinks(None, None, None, list(range(9)), 0.5, Quiet()), asked

    def test_the_fewest_are_taken_that_lose_next_to_nothing(self):
        self.assertEqual(self.choose(0.6, 0.0101, 0.0102, 0.01, 0.0101)[0], 1)
        self.assertEqual(self.choose(0.01, 0.0101, 0.0102, 0.0101, 0.0101)[0], 0)
        self.assertEqual(self.choose(0.6, 0.4, 0.2, 0.1, 0.01), (8, [(sinks.N_CONTEXTS, 0.5)]))

    def test_a_token_that_all_depends_on_is_kept(self):
        """The first token is like no other, and the answer is what it says."""
        transform, x, _ = calibrated(True, n_sinks=sinks.MOST_SINKS)
        k, v = correlated()
        k[:, 0] += 1.0  # half a step at most is lost
        model = types.SimpleNamespace(**vars(MODEL))
        model.log_probs = lambda context, k, v: (
            torch.stack([k[:, 0].mean(), k[:, 1:].mean() * 0]).expand(3, 2).log_softmax(-1)
        )
        context = types.SimpleNamespace(ids=torch.zeros(5, dtype=torch.int64), n=2)
        caches = types.SimpleNamespace(get=lambda context: (k, v))
        found = sinks.divergences(model, transform, caches, [context], 5.0, Quiet())
        self.assertLess(max(found[1:]), 1e-6)
        self.assertGreater(found[0], 1e-3)
        self.assertEqual(transform.n_sinks, sinks.MOST_SINKS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main(verbosity=2)
