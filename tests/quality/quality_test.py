"""The quality report over a tiny model with random weights: structure, and what holds whatever the weights are.

usage: quality_test.py CGTOOL
"""

import contextlib
import io
import json
import math
import os
import sys
import tempfile
import unittest
from unittest import mock

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(TESTS, "connector"))
CGTOOL = os.path.join(TESTS, "..", "build", "codec", "cgtool")
import profile_test  # noqa: E402  (skips without torch and transformers)

try:
    import matplotlib  # noqa: F401
except ImportError as error:
    print(f"skipped: {error}: the quality report is not checked")
    sys.exit(77)
import codecs_compared  # noqa: E402
import curves  # noqa: E402
import numpy as np  # noqa: E402
import report  # noqa: E402
import tasks  # noqa: E402

N_TOKENS = 320  # two chunks
PLANNED = ("planned", "planned-25", "planned-50", "planned-80")
KLT_LEVELS = ("L1", "L2", "L3", *PLANNED)
ROWS = {("lossless", "L0"), *(("klt", level) for level in KLT_LEVELS), ("published", "finest"),
        ("published", "default"), ("published", "smallest"), ("int8", "int8"), ("int4", "int4")}  # fmt: skip


def words(seed, n_bytes):
    rng = np.random.default_rng(seed)
    known = ["".join(rng.choice(list("etaoinshrdlu"), rng.integers(2, 8))) for _ in range(60)]
    text = " ".join(" ".join(rng.choice(known, 12)) + "." for _ in range(n_bytes // 50))
    return (text * (n_bytes // len(text) + 1))[:n_bytes]


def write_data(folder):
    for name, n_bytes in (("test_wikitext2.txt", 152000), ("one.txt", 1500), ("two.txt", 1500), ("three.txt", 1500)):
        with open(os.path.join(folder, name), "w") as file:
            file.write(words(len(name), n_bytes))
    line = {"prompt": words(1, 6000) + " Now the record is over. Which number?", "expected_number": 17}
    chat = {"prompt": words(2, 700) + " Now the record ends. Which topic?", "topics": ["The one topic"]}
    for name, record in (("lines_200", line), ("topics_5", chat), ("topics_10", chat)):
        with open(os.path.join(folder, f"longchat_{name}.jsonl"), "w") as file:
            file.write((json.dumps(record) + "\n") * 12)


class QualityTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.work = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.work.cleanup)
        os.mkdir(cls.path("data"))
        write_data(cls.path("data"))
        config = profile_test.config("Llama", num_hidden_layers=2, num_key_value_heads=2, head_dim=64)
        profile_test.make_model(cls.path("tiny"), config)

    def made_profile(self):
        """As --profile wants it."""
        options = ["--texts", self.path("data/one.txt"), "--out", self.path("store"), "--tokens", str(N_TOKENS),
                   "--classes", "24", "--quiet"]  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):
            made = profile_test.profile.run(profile_test.profile.parse_arguments([self.path("tiny"), *options]))
        return f"--profile=klt={self.path('store')}/profiles/{made['profile']}.cgp"

    @classmethod
    def path(cls, name):
        return os.path.join(cls.work.name, name)

    def run_report(self, out, *options):
        texts = [self.path(f"data/{name}.txt") for name in ("one", "two", "three")]
        with mock.patch.object(report, "commit", lambda: "abc"):
            report.main([
                self.path("tiny"), "--data", self.path("data"), "--calibration", *texts, "--cgtool", CGTOOL,
                "--out", self.path(out), "--tokens", str(N_TOKENS), "--cases", "2", "--least-score", "0",
                "--tasks", "passkey,lines-200", "--profile-options=--classes 24 --quiet", *options])  # fmt: skip
        with open(self.path(out)) as file:
            return json.load(file)

    def test_rows_hold_what_any_weights_give(self):
        result = self.run_report("all.json", "--parts", "size,tasks")
        texts = {row["text"] for row in result["rows"]}
        self.assertEqual(len(texts), 4)
        for text in texts:
            rows = {(r["codec"], r["level"]): r for r in result["rows"] if r["text"] == text}
            paper = {key for key in rows if key[0] == "paper"}
            self.assertEqual(set(rows) - paper, ROWS)
            self.assertTrue(len(paper) == len(KLT_LEVELS) or any("paper" in note for note in result["notes"]))
            for row in rows.values():
                numbers = [row[name] for name in ("bits_per_element", "kl", "delta_nll", "top1")]
                self.assertTrue(all(map(math.isfinite, numbers)), row)
                self.assertEqual((row["tokens"], row["left_out"]), (N_TOKENS, False))
            exact = rows["lossless", "L0"]
            self.assertEqual((exact["kl"], exact["delta_nll"], exact["top1"]), (0, 0, 1))
            bits = [rows["klt", level]["bits_per_element"] for level in ("L1", "L2", "L3")]
            self.assertTrue(exact["bits_per_element"] > bits[0] > bits[1] > bits[2] > 0, bits)
            planned = [rows["klt", level]["bits_per_element"] for level in PLANNED]
            self.assertEqual(planned, sorted(planned, reverse=True))
            self.assertTrue(bits[0] >= planned[0] and planned[-1] >= bits[2], (planned, bits))
            self.assertGreater(rows["klt", "L3"]["kl"], 0)
            self.assertGreater(rows["published", "finest"]["bits_per_element"],
                               rows["published", "smallest"]["bits_per_element"])  # fmt: skip
            self.assertEqual(rows["int8", "int8"]["bits_per_element"], 8 + 16 / 64)
            self.assertLess(rows["int8", "int8"]["kl"], rows["int4", "int4"]["kl"])
        self.assertEqual(len(result["means"]), len(result["rows"]) / 4)
        found = {(t["task"], t["codec"], t["level"]): t for t in result["tasks"]}
        wanted = {("passkey", "none", ""), *(("passkey", "klt", level) for level in KLT_LEVELS)}
        self.assertEqual({key for key in found if key[1] != "paper"}, wanted)
        self.assertTrue(all(t["n_cases"] == 2 and 0 <= t["score"] <= 1 for t in found.values()))
        self.assertTrue(any("lines-200: 2 of 2 documents are skipped" in note for note in result["notes"]))
        with open(self.path("all.md")) as file:
            self.assertIn("| tiny | published | default | 4 |", file.read())
        with open(self.path("all.png"), "rb") as file:
            self.assertEqual(file.read(4), b"\x89PNG")
        again = mock.Mock(side_effect=AssertionError("measured again"))
        with mock.patch.object(report.Study, "_task", again), mock.patch.object(report.KvModel, "log_probs", again):
            keep = ("all.json", "--keep", "--codecs", "lossless,klt,published,int8,int4", "--parts")
            self.assertEqual(self.run_report(*keep, "size,tasks")["rows"], result["rows"])
            result["rows"] = [row for row in result["rows"] if row["level"] != "planned"]
            with open(self.path("all.json"), "w") as file:
                json.dump(result, file)
            with self.assertRaisesRegex(AssertionError, "measured again"):  # what is missing
                self.run_report(*keep, "size")

    def test_a_part_of_another_commit_is_kept_only_by_name(self):
        old = self.run_report("kept.json", "--parts", "size", "--codecs", "int4")
        old["commits"]["size"] = "older"
        with open(self.path("kept.json"), "w") as file:
            json.dump(old, file)
        kept = self.run_report("kept.json", "--parts", "size,tasks", "--codecs", "int4", "--keep-parts", "size")
        self.assertEqual(kept["commits"], {"size": "older", "tasks": "abc"})
        self.assertEqual(kept["rows"], old["rows"])
        with open(self.path("kept.md")) as file:
            self.assertIn("size older, tasks abc", file.read())
        dropped = self.run_report("kept.json", "--parts", "size", "--codecs", "int8", "--keep")
        self.assertEqual(dropped["commits"], {"tasks": "abc", "size": "abc"})
        self.assertEqual({row["codec"] for row in dropped["rows"]}, {"int8"})
        self.assertEqual(dropped["tasks"], kept["tasks"])

    def test_a_left_out_domain_is_in_no_table_and_no_profile(self):
        seen, make_profile, calibrate = [], report.make_profile, report.codecs_compared.Published.calibrate

        profile = self.made_profile()

        def recorded_profile(model, fingerprint, caches, contexts, *others, **named):
            seen.append({c.name for c in contexts})
            return make_profile(model, fingerprint, caches, contexts, *others, **named)

        def recorded_tables(published, contexts, caches):
            seen.append({c.name for c in contexts})
            calibrate(published, contexts, caches)

        with mock.patch.object(report, "make_profile", recorded_profile), \
             mock.patch.object(report.codecs_compared.Published, "calibrate", recorded_tables):  # fmt: skip
            result = self.run_report("domains.json", "--parts", "domains", "--left-out", "two.txt", profile)
        self.assertEqual(seen, [{"one.txt@0", "three.txt@0"}] * 2)
        keys = {(r["text"], r["domain"], r["codec"], r["left_out"]) for r in result["rows"]}
        self.assertEqual(keys, {("two.txt@0", "two.txt", codec, True) for codec in ("klt", "published")})
        self.assertEqual({r["texts"] for r in result["ratios"]}, {"all texts", "two.txt"})

    def test_the_answer_is_that_of_the_model_without_a_codec(self):
        model, rng = report.KvModel(self.path("tiny")), report.torch.Generator().manual_seed(9)
        tokenizer = report.transformers.AutoTokenizer.from_pretrained(self.path("tiny"))
        context = profile_test.Context("", report.torch.randint(0, 256, (60,), generator=rng), 40)
        whole = model.model.generate(context.ids[None], do_sample=False, max_new_tokens=9)[0, 60:]
        told = tasks.answer(model, tokenizer, context, *model.prefill(context), 9)
        self.assertEqual(told, tokenizer.decode(whole, skip_special_tokens=True))

    def test_a_task_that_the_model_cannot_do_is_not_reported(self):
        result = self.run_report("task.json", "--parts", "tasks", "--tasks", "passkey", "--least-score", "0.8",
                                 "--codecs", "klt")  # fmt: skip
        (row,) = result["tasks"]
        self.assertEqual((row["codec"], row["score"], row["reported"]), ("none", 0, False))


class CurvesTest(unittest.TestCase):
    def test_bits_are_interpolated_on_a_power_law_and_never_beyond_it(self):
        points = [(2.0, 0.0025), (1.0, 0.01), (0.25, 0.16)]  # KL = 0.01 / bits^2
        for bits in (0.3, 0.5, 1.0, 1.7):
            found, outside = curves.bits_at(points, 0.01 / bits**2)
            self.assertAlmostEqual(found, bits)
            self.assertIsNone(outside)
        self.assertEqual(curves.bits_at(points, 0.2), (0.25, "above"))
        self.assertEqual(curves.bits_at(points, 0.001), (2.0, "below"))

    def rows(self, *points):
        return [{"model": "m", "part": "size", "text": "t", "domain": "d", "codec": codec, "level": level,
                 "tokens": 10, "bits_per_element": bits, "kl": kl, "delta_nll": 0, "top1": 1}
                for codec, level, bits, kl in points]  # fmt: skip

    def test_times_fewer_bytes_at_equal_kl(self):
        klt = [("klt", "L1", 1.0, 0.01), ("klt", "L2", 0.5, 0.04), ("lossless", "L0", 10.0, 0.0)]
        told = curves.ratios(self.rows(*klt, ("published", "default", 3.0, 0.02), ("published", "finest", 4.0, 0.005)))
        default, finest = told
        self.assertAlmostEqual(default["times_fewer"], 3 * 2**0.5)
        self.assertNotIn("times_fewer", finest)
        self.assertIn("no level as good", finest["note"])
        (above,) = curves.ratios(self.rows(*klt, ("published", "default", 3.0, 0.05)))
        self.assertEqual(above["at_least"], 6)

    def test_plans_are_a_series_of_their_own_between_the_finest_and_the_coarsest_level(self):
        rows = self.rows(("klt", "L1", 1.0, 0.01), ("klt", "L2", 0.5, 0.04), ("klt", "L3", 0.25, 0.16),
                         ("klt", "planned", 0.25, 0.04), ("published", "default", 3.0, 0.04))  # fmt: skip
        found = {r["codec"]: r["times_fewer"] for r in curves.ratios(rows)}
        self.assertEqual({codec: round(times, 6) for codec, times in found.items()}, {"klt": 6, "klt, planned": 12})

    def test_means_weigh_bits_by_elements(self):
        rows = self.rows(("klt", "L1", 1.0, 0.1), ("klt", "L1", 2.0, 0.3))
        rows[1]["tokens"] = 30
        (mean,) = curves.means(rows)
        self.assertAlmostEqual(mean["bits_per_element"], 1.75)
        self.assertAlmostEqual(mean["kl"], 0.2)


class PlanTest(unittest.TestCase):
    CURVE = {"kl": [0.002, 0.008, 0.05], "last": [[64, 0.4], [512, 0.75], [3072, 1]], "beyond": 0.1}

    def test_a_plan_takes_fewer_bytes_at_the_same_predicted_kl(self):
        n_tokens, sizes = [256] * 11 + [100], [[4000] * 12, [2000] * 12, [700] * 12]
        share = lambda n: codecs_compared.share_of_last(self.CURVE, n)  # noqa: E731
        n_bytes = []
        for coarseness, bound in ((0, 0.008), (0.25, 0.01265), (0.5, 0.02), (0.8, 0.03466), (1, 0.05)):
            levels = codecs_compared.planned_levels(self.CURVE, n_tokens, sizes, coarseness)
            ends = [sum(n_tokens[i:]) for i in range(13)]
            predicted = sum((share(a) - share(b)) * self.CURVE["kl"][lv] for a, b, lv in zip(ends, ends[1:], levels))
            self.assertLessEqual(predicted, bound * share(ends[0]) * (1 + 1e-6))
            n_bytes.append(sum(sizes[level][i] for i, level in enumerate(levels)))
        self.assertLess(n_bytes[0], 12 * 2000)
        self.assertEqual(n_bytes, sorted(n_bytes, reverse=True))
        self.assertEqual(len(set(n_bytes)), len(n_bytes))
        self.assertEqual(n_bytes[-1], 12 * 700)

    def test_shares_are_those_of_the_format(self):
        for n_tokens, share in ((0, 0), (32, 0.2), (64, 0.4), (288, 0.575), (3072, 1), (6144, 1 + 0.1 * math.log(2))):
            self.assertAlmostEqual(codecs_compared.share_of_last(self.CURVE, n_tokens), share)


class JudgeTest(unittest.TestCase):
    def test_answers(self):
        self.assertTrue(tasks.names_topic("It was the Psychology of creativity.", "The psychology of creativity"))
        self.assertFalse(tasks.names_topic("The psychology of addiction", "The psychology of creativity"))
        self.assertTrue(tasks.first_number_is("<2416>, not 3", "2416"))
        self.assertFalse(tasks.first_number_is("24160", "2416"))
        self.assertFalse(tasks.first_number_is("none", "2416"))


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        CGTOOL = sys.argv.pop(1)
    if not os.access(CGTOOL, os.X_OK):
        print(f"skipped: no cgtool at {CGTOOL}: no quality was measured")
        sys.exit(77)
    report.torch.set_num_threads(1)  # a tiny model
    unittest.main(verbosity=2)
