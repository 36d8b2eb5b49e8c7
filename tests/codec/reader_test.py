#!/usr/bin/env python3
"""The second reader's arithmetic, which numpy has no fused multiply-add for, and what it refuses.

usage: reader_test.py
"""

import ctypes
import glob
import os
import unittest

import reader  # skips without numpy
from reader import np

GOLDEN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "golden")
N = 20000


def c_function(name, kind):
    function = getattr(ctypes.CDLL("libm.so.6"), name)
    function.restype, function.argtypes = kind, [kind] * 3
    return lambda *of: np.array([function(*map(float, one)) for one in zip(*of)])


def wide(rng, octaves):
    return rng.standard_normal(N) * 2.0 ** rng.integers(-octaves, octaves, N)


def operands(rng):
    """Sums of any size, those that nearly vanish, and those where one part is lost but for a sticky bit."""
    for of_c in (
        lambda product: wide(rng, 90),
        lambda product: -product * (1 + rng.integers(-3, 4, N) * 2.0 ** -rng.integers(20, 54, N)),
        lambda product: product * 2.0 ** rng.integers(-60, 60, N),
    ):
        a, b = wide(rng, 30), wide(rng, 30)
        yield a, b, of_c(a * b)


class ArithmeticTest(unittest.TestCase):
    def same(self, got, want, kind):
        np.testing.assert_array_equal(got.view(kind), want.astype(got.dtype).view(kind))

    def test_f64_is_rounded_once(self):
        fma = c_function("fma", ctypes.c_double)
        for a, b, c in operands(np.random.default_rng(1)):
            self.same(reader.fma(a, b, c), fma(a, b, c), np.int64)
        tiny = (
            np.array([1e-200, 3e-300, 5e-324, 0.0]),
            np.array([1e-120, -1e-10, 0.5, 1.0]),
            np.array([1.0, 1e-310, 0.0, 0.0]),
        )
        self.same(reader.fma(*tiny), fma(*tiny), np.int64)

    def test_f32_is_rounded_once(self):
        rng, fmaf = np.random.default_rng(2), c_function("fmaf", ctypes.c_float)
        for of in operands(rng):
            of = [x.astype(np.float32) for x in of]
            self.same(reader.fmaf(*of), fmaf(*of), np.int32)
        # Products between two f32, and a part that is far below: f64 alone would find a tie.
        a, b = (rng.integers(1 << bits, 2 << bits, N) * 2 + 1 for bits in (11, 10))
        c = rng.choice([-1, 1], N) * 2.0 ** rng.integers(-40, 30, N)
        of = [x.astype(np.float32) for x in (a, b, c)]
        self.same(reader.fmaf(*of), fmaf(*of), np.int32)
        self.assertGreater(
            np.count_nonzero((of[0].astype(float) * of[1] + of[2]).astype(np.float32) != reader.fmaf(*of)), 0
        )

    def test_angles_are_turned_as_far_as_f32_goes(self):
        angle = np.random.default_rng(3).random(50000) * np.repeat([1e-3, 1.0, 100.0, 65536 * 16.0, -7.0], 10000)
        for got, exact in zip(reader.cos_sin(angle), (np.cos(angle), np.sin(angle))):
            np.testing.assert_allclose(got, exact, rtol=2**-23.9, atol=1e-15)
        c, s = reader.cos_sin(np.array([0.0, 1e-300]))
        self.assertEqual((c.tolist(), s.tolist()), ([1, 1], [0, 0]))

    def test_sums_of_integers_wrap(self):
        symbols, elements = np.array([[32767, -32768, 1]]), np.array([[1 << 30], [-(1 << 30)], [5]])
        want = (32767 * (1 << 30) + 32768 * (1 << 30) + 5 + 2**31) % 2**32 - 2**31
        self.assertEqual(reader.integer_product(symbols, elements).tolist(), [[want]])
        rng = np.random.default_rng(4)
        symbols, elements = rng.integers(-500, 500, (7, 90)), rng.integers(-128, 128, (90, 5))
        np.testing.assert_array_equal(reader.integer_product(symbols, elements), symbols @ elements)


class ScaleTest(unittest.TestCase):
    def test_scales_are_held_to_the_largest_sums_that_any_group_may_have(self):
        data = reader.read(os.path.join(GOLDEN, "v3-fp8", "profile.cgp"))
        profile = reader.Profile(data)
        # A channel's step over a scale s is step / s: at most 1e38 / 2^25.
        least = float((profile.step[-1][:, None] / profile.weight.min(axis=0)).max()) * 2.0**25 / 1e38
        for share, is_refused in ((0.9, True), (2.0, False)):
            profile = reader.Profile(data)
            scales = np.full((profile.n_layers, 2), least * share, "<f4").tobytes()
            if is_refused:
                self.assertRaises(reader.Corrupt, profile.scale, scales)
            else:
                profile.scale(scales)


class PaddingTest(unittest.TestCase):
    def test_padding_that_is_not_zero_is_corrupt(self):
        n_found = 0
        for path in glob.glob(os.path.join(GOLDEN, "v3*", "*.kv")):
            data = reader.read(path)
            chunk = reader.Chunk(data)
            for section in chunk.sections.values():
                end = data.index(section, 160) + len(section)
                for at in range(end, end + -end % 16):
                    n_found += 1
                    with self.assertRaises(reader.Corrupt):
                        reader.Chunk(data[:at] + b"\1" + data[at + 1 :])
        self.assertTrue(n_found or not glob.glob(os.path.join(GOLDEN, "v3*")))


if __name__ == "__main__":
    unittest.main(verbosity=2)
