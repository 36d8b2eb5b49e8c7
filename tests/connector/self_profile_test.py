"""Profiles made from what a store holds at L0: of a real model, as a connector and cgtool lay its chunks.

usage: self_profile_test.py CGTOOL, with CG_MODEL_DIR
"""

import contextlib
import dataclasses
import glob
import io
import json
import math
import os
import shutil
import sys
import tempfile
import types
import unittest
from unittest import mock

import profile_test as tiny  # skips without torch and transformers
import torch
from cachegen import Unsupported, self_profile
from cachegen.fingerprint import model_fingerprint
from cachegen.klt import Matrices, Moments, Planes
from cachegen.kv_model import Context, KvModel
from cachegen.profile_file import N_LEVELS, read_profile
from cachegen.quality import score
from cachegen.rope import NO_ROPE, rope_from_json, rope_of
from cachegen.store_files import write_store
from safetensors.torch import load_file, save_file

MODEL_DIR = os.environ.get("CG_MODEL_DIR", "")
CALIBRATION = os.path.join(tiny.ROOT, "tests", "data", "calibration")
FINGERPRINT = "5a" * 16
GEOMETRY = self_profile.Geometry(2, 2, 32, "fp32", FINGERPRINT)
CHUNK_TOKENS = 64
LEARNT, HELD_OUT = ("wikitext2_valid.txt", "novel_en.txt", "code_python.txt"), "chat_mtbench.txt"


def put(folder, k, v, ids, *options):
    """Chunk files of a context at L0, for a model whose fingerprint is FINGERPRINT unless options say another."""
    with tempfile.TemporaryDirectory() as work:
        path = os.path.join(work, "in.safetensors")
        save_file({"K": k.contiguous(), "V": v.contiguous(), "tokens": ids.int().contiguous()}, path)
        os.makedirs(os.path.dirname(folder))
        tiny.run_cgtool("encode", "--level", "L0", "--chunk-tokens", CHUNK_TOKENS, "--model-fingerprint", FINGERPRINT,
                        *options, path, folder)  # fmt: skip


def context_chunks(store, name):
    return os.path.join(store, "contexts", name, "L0")


def describe(store, **more):
    with open(os.path.join(store, "model.json"), "w") as file:
        json.dump({"version": 1, "model_fingerprint": FINGERPRINT, **more}, file)


def make(store, *options):
    arguments = [store, "--cgtool", tiny.CGTOOL, "--quiet", "--classes", "32", *options]
    with contextlib.redirect_stdout(io.StringIO()):
        return self_profile.run(self_profile.parse_arguments(arguments))


class StoreTest(unittest.TestCase):
    """What counts as a chunk to learn from, and what is refused. The tensors are random: nothing is learnt here."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.store = os.path.join(folder.name, "m")
        os.makedirs(self.store)

    def put(self, name, seed, *options, head_dim=32):
        k, v = torch.randn(2, 2, 256, 2, head_dim, generator=torch.Generator().manual_seed(seed))
        put(context_chunks(self.store, name), k, v, torch.arange(256) + 1000 * seed, *options)

    def refuse(self, text, *options):
        with self.assertRaisesRegex(SystemExit, text):
            make(self.store, *options)
        self.assertFalse(os.path.exists(os.path.join(self.store, "profiles")))

    def test_each_chunk_of_the_model_counts_once(self):
        self.put("one", 1)
        self.put("same", 1)
        self.put("other", 2)
        self.put("foreign", 3, "--model-fingerprint", "77" * 16)
        with open(os.path.join(context_chunks(self.store, "one"), "99999.kv"), "wb") as file:
            file.write(b"short")
        geometry, chunks = self_profile.find_chunks(self.store, {"model_fingerprint": FINGERPRINT})
        self.assertEqual(geometry, GEOMETRY)
        names = [chunk.path.split(os.sep)[-3] for chunk in chunks]
        self.assertEqual((len(chunks), names.count("other")), (8, 4))
        self.assertLessEqual(set(names), {"one", "same", "other"})
        self.assertEqual(sorted({chunk.first_position for chunk in chunks}), [0, 64, 128, 192])

    def test_what_is_missing_is_said(self):
        self.refuse("holds no chunk at L0")
        self.put("one", 1)
        self.refuse("does not say how K is rotated")
        rope = {"kind": "default", "theta": 10000.0, "rotary_dim": 32, "pairing": "neox"}
        describe(self.store, rope=rope)
        self.refuse("192 tokens to learn from.*2048 are needed")
        describe(self.store, rope={**rope, "rotary_dim": 64})
        self.refuse("rotary_dim 64, head_dim is 32")
        layers = [rope, {**rope, "theta": 500.0}, rope]
        describe(self.store, rope={**rope, "kind": "by_layer", "layers": layers})
        self.refuse("of 3 layers, the chunks say 2")
        describe(self.store, rope=rope, n_layers=7)
        self.refuse("n_layers 7, the chunks say 2")
        describe(self.store, rope=rope, model_fingerprint="00" * 16)
        self.refuse("holds no chunk at L0")
        os.unlink(os.path.join(self.store, "model.json"))
        self.put("other", 2, head_dim=64)
        self.refuse("different models")
        with open(os.path.join(self.store, "model.json"), "w") as file:
            file.write("[")
        self.refuse("model.json")

    def test_a_store_that_has_gone_is_not_made_anew(self):
        model, profile = self_profile.StoredModel(GEOMETRY, NO_ROPE), types.SimpleNamespace(fingerprint=bytes(16))
        write_store(self.store, model, FINGERPRINT, profile, b"profile")
        self.assertEqual(sorted(os.listdir(self.store)), ["model.json", "profiles"])
        shutil.rmtree(self.store)
        with self.assertRaises(FileNotFoundError):
            write_store(self.store, model, FINGERPRINT, profile, b"profile")
        self.assertFalse(os.path.exists(self.store))

    def test_a_profile_that_engines_do_not_read_is_not_written(self):
        model, profile = self_profile.StoredModel(GEOMETRY, NO_ROPE), types.SimpleNamespace(fingerprint=bytes(16))
        with mock.patch("cachegen.store_files.MAX_BYTES", 6), self.assertRaisesRegex(ValueError, "7 bytes .* 6 at"):
            write_store(self.store, model, FINGERPRINT, profile, b"profile")
        self.assertEqual(os.listdir(self.store), [])
        self.put("one", 1)
        self.refuse("--max-mib must be 1024 at most, not 1025", "--max-mib", "1025")

    def test_k_that_is_rotated_otherwise_is_refused(self):
        torch.manual_seed(1)
        rope = rope_from_json({"kind": "default", "theta": 10000.0, "rotary_dim": 16, "pairing": "neox"})
        positions, chunks = torch.arange(640), [self_profile.StoredChunk("", b"", at, 64) for at in range(0, 640, 64)]
        plain = torch.randn(2, 1, 2, 64) + torch.randn(2, 640, 2, 64) / 2
        neox = rope.rotate(plain, positions)
        order = torch.cat([torch.arange(16).reshape(2, 8).T.flatten(), torch.arange(16, 64)])  # to side by side

        def check(k):
            def get(chunk):
                at = torch.full((64,), chunk.first_position)
                return rope.rotate(k[:, at[0] : at[0] + 64], at, inverse=True), None

            self_profile.check_rope(types.SimpleNamespace(get=get), chunks, rope)

        check(neox)
        check(torch.stack([neox[0], torch.zeros_like(neox[1])]))
        check(rope.rotate(plain, positions // 200))  # of images many tokens have one position
        with self.assertRaisesRegex(Unsupported, "K of layer 1 .*interleaved"):
            check(torch.stack([neox[0], neox[1][..., order]]))

    def test_the_rope_is_that_of_the_chunks_engine_as_far_as_weights_tell(self):
        def find(described, geometry, length=None):
            """(the Rope, or None, what is said of it)"""
            rope = None
            with contextlib.redirect_stderr(io.StringIO()) as stderr:
                try:
                    rope = self_profile.find_rope(described, self.store, geometry, length)
                except SystemExit as ended:
                    print(ended, file=stderr)
            lines = stderr.getvalue().splitlines()
            return rope, "".join(line for line in lines if line.startswith("self_profile: "))

        long = {"longrope": "long"}
        for kind, deviations, length, told in (
            ("Llama, yarn", None, None, ""),
            ("Llama, yarn", {"config": {"rope_parameters": "plain"}}, None, "warning: .* of another model"),
            ("Phi3, longrope", None, None, ""),
            ("Phi3, longrope", None, 129, "LongRoPE's short factors, not the long ones"),
            ("Phi3, longrope", long, 129, ""),
            ("Phi3, longrope", long, None, "LongRoPE's long factors, not the short ones"),
            ("Phi3, longrope", {"quantization": "fp8"}, None, "warning: .* of another model"),
        ):
            with self.subTest(kind, deviations=deviations, length=length):
                tiny.make_model(self.store, tiny.CODED[kind]())
                fingerprint = model_fingerprint(self.store, deviations)
                geometry = dataclasses.replace(GEOMETRY, head_dim=64, model_fingerprint=fingerprint)
                rope, said = find({}, geometry, length)
                self.assertRegex(said, told or "^$")
        self.assertEqual(find({"rope": rope.as_json()}, geometry)[1], "", "model.json has told")
        os.unlink(os.path.join(self.store, "model.safetensors"))
        self.assertEqual(find({}, geometry)[1], "", "nothing tells")

    def test_a_layer_that_never_varies_changes_no_weight_of_the_others(self):
        geometry = self_profile.Geometry(4, 2, 32, "fp32", FINGERPRINT)
        model = self_profile.StoredModel(geometry, NO_ROPE)

        def weights(x):
            moments = Moments(4, 64, Matrices([4], True), "cpu")
            moments.add(x)
            return self_profile.weights(moments, model)

        x = torch.randn(2, 4, 512, 64, generator=torch.Generator().manual_seed(1))
        plain, others = weights(x), [0, 2, 3]
        for plane in (0, 1):
            for spread in (0.0, 1e-8):
                with self.subTest(plane=plane, spread=spread):
                    flat = x.clone()
                    flat[plane, 1] *= spread
                    found = weights(flat)
                    torch.testing.assert_close(found[others], plain[others], rtol=0.01, atol=0)
                    self.assertLessEqual((found[1] / plain[1]).max().item(), 1e4)

    def varied(self, name, seed, damaged=None):
        """Chunks of 2 layers and 16 dimensions, 1024 tokens. damaged: a token with a NaN in its V."""
        k, v = torch.randn(2, 2, 1024, 1, 16, generator=torch.Generator().manual_seed(seed))
        if damaged is not None:
            v[1, damaged, 0, 3] = math.nan
        put(context_chunks(self.store, name), k, v, torch.arange(1024) + 2000 * seed)

    def test_a_chunk_that_is_not_finite_is_left_out_and_named(self):
        for seed in range(3):
            self.varied(f"c{seed}", seed, damaged=200 if seed == 1 else None)
        describe(self.store, rope=NO_ROPE.as_json())
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            report = make(self.store)
        path = os.path.join(context_chunks(self.store, "c1"), "00003.kv")
        self.assertEqual(stderr.getvalue(), f"self_profile: left out: {path}: K or V is not finite\n")
        self.assertEqual(report["n_tokens"], 42 * CHUNK_TOKENS, "5 of 47 are held out")

    def test_chunks_that_are_evicted_meanwhile_are_left_out(self):
        for seed in range(3):
            self.varied(f"c{seed}", seed)
        describe(self.store, rope=NO_ROPE.as_json())
        count, folder = self_profile.count_symbols, context_chunks(self.store, "c1")

        def evict_and_count(*arguments):
            for name in ("00003.kv", "00004.kv"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, name))
            return count(*arguments)

        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr), mock.patch.object(self_profile, "count_symbols", evict_and_count):
            report = make(self.store)
        self.assertRegex(stderr.getvalue(), f"^self_profile: left out: {folder}/0000[34].kv: evicted since .*\n$")
        self.assertEqual(report["n_tokens"], 41 * CHUNK_TOKENS, "5 of 46 are held out")

    def test_a_store_of_fp8_chunks_alone_is_told_so(self):
        k, v = torch.randn(2, 2, 256, 2, 32).to(torch.float8_e4m3fn)
        put(context_chunks(self.store, "fp8"), k, v, torch.arange(256))
        self.refuse("holds chunks of fp8 caches alone")
        self.put("one", 1)
        self.assertEqual(len(self_profile.find_chunks(self.store, {})[1]), 4)

    def test_ropes_come_back_from_model_json(self):
        for name in ("Llama, GQA, head 64", "Llama, llama3 rope", "Llama, linear rope", "StableLm, partial rotary"):
            with self.subTest(name):
                rope = rope_of(tiny.CODED[name](), 64)
                back = rope_from_json(json.loads(json.dumps(rope.as_json())))
                self.assertEqual(back.as_json(), rope.as_json())
                self.assertTrue(torch.equal(back.inv_freq, rope.inv_freq))
        self.assertEqual(rope_from_json(NO_ROPE.as_json()), NO_ROPE)
        for damaged in ({"kind": "yarn"}, {"kind": "default"}, "default", None):
            with self.subTest(damaged), self.assertRaises(Unsupported):
                rope_from_json(damaged)


@unittest.skipUnless(MODEL_DIR, "no CG_MODEL_DIR: no profile was made from real chunks")
class RealModelTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder, cls.store = folder.name, os.path.join(folder.name, "m")
        os.makedirs(cls.store)
        cls.model = KvModel(MODEL_DIR)
        cls.tokenizer = tiny.transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
        cls.caches = {}
        for name in LEARNT:
            context = cls.context(name, 960, 0)
            cls.caches[name] = cls.model.prefill(context)
            put(context_chunks(cls.store, name), *cls.caches[name], context.ids)
        # The same tree as a connector makes for KV without a name: objects by key.
        for path in glob.glob(os.path.join(context_chunks(cls.store, LEARNT[0]), "*.kv")):
            key = self_profile.read_header(path)[1].key.hex()
            target = os.path.join(cls.store, "objects", key[:2], key)
            os.makedirs(target)
            os.rename(path, os.path.join(target, "L0.kv"))
        describe(cls.store, note="stays")
        _, chunks = self_profile.find_chunks(cls.store, {})
        cls.learnt = {chunk.key for chunk in self_profile.hold_out(self_profile.take(chunks, 0))[0]}
        cls.report = make(cls.store, "--model-dir", MODEL_DIR)
        cls.path = os.path.join(cls.store, "profiles", cls.report["profile"] + ".cgp")

    @classmethod
    def context(cls, name, n, n_continuation):
        with open(os.path.join(CALIBRATION, name), encoding="utf-8") as file:
            ids = torch.tensor(cls.tokenizer(file.read(6 * (n + n_continuation)), verbose=False).input_ids)
        return Context(name, ids[: n + n_continuation], n)

    def test_the_mean_is_that_of_unrotated_k(self):
        x = torch.stack([Planes(self.model).flat(*kv)[:, :, tiny.MOST_SINKS :] for kv in self.caches.values()])
        with open(self.path, "rb") as file:
            mean = torch.tensor(read_profile(file.read()).mean).transpose(0, 1)
        spread = x.std((0, 3))
        # An eighth of the chunks was held out, so not the same to the last digit. K rotated wrongly: off by about 1.
        self.assertLess(((mean - x.mean((0, 3))) / spread).pow(2).mean().sqrt().item(), 0.1)

    def test_levels_fall_in_size_and_quality(self):
        self.assertEqual(self.report["n_tokens"], CHUNK_TOKENS * len(self.learnt))
        self.assertEqual(len(self.report["levels"]), N_LEVELS)
        (bits, k, v) = zip(*self.report["levels"])
        self.assertTrue(3 > bits[0] > 1.5 * bits[1] > 3 * bits[2] > 0.1, bits)
        self.assertAlmostEqual(bits[1], 0.75, delta=0.1)
        for errors in (k, v):
            self.assertTrue(0.01 < errors[0] < errors[1] < errors[2] < 1, errors)

    def test_cgtool_codes_what_the_model_then_understands(self):
        tiny.run_cgtool("verify", self.path)
        context = self.context(HELD_OUT, 960, 64)
        k, v = self.model.prefill(context)
        source, out = os.path.join(self.folder, "in.safetensors"), os.path.join(self.folder, "out.safetensors")
        save_file({"K": k.contiguous(), "V": v.contiguous(), "tokens": context.ids[: context.n].int().contiguous()},
                  source)  # fmt: skip
        sizes, divergences = [], []
        with torch.no_grad():
            reference = self.model.log_probs(context, k, v)
            for level in ("L1", "L2", "L3"):
                coded = os.path.join(self.folder, level)
                tiny.run_cgtool("encode", "--level", level, "--profile", self.path, source, coded)
                tiny.run_cgtool("decode", "--profile", self.path, coded, out)
                tensors = load_file(out)
                sizes.append(8 * sum(entry.stat().st_size for entry in os.scandir(coded)) / (2 * k.numel()))
                log_p = self.model.log_probs(context, tensors["K"], tensors["V"])
                divergences.append(score(log_p, reference, context.ids[context.n :])[0])
                shutil.rmtree(coded)
        print(f"{context.name}: bits {sizes}, KL {divergences}", file=sys.stderr)
        self.assertTrue(3.5 > sizes[0] > 1.5 * sizes[1] > 2 * sizes[2], sizes)
        self.assertTrue(divergences[0] < divergences[1] < divergences[2], divergences)
        self.assertLess(divergences[1], 0.1)

    def test_model_json_is_completed_and_enough_for_the_next_time(self):
        with open(os.path.join(self.store, "model.json")) as file:
            described = json.load(file)
        self.assertEqual(described["note"], "stays")
        self.assertEqual(described["rope"], self.model.rope.as_json())
        with open(os.path.join(self.store, "profiles", "default")) as file:
            self.assertEqual(file.read(), self.report["profile"] + "\n")
        geometry = dataclasses.replace(GEOMETRY, head_dim=self.model.head_dim)
        self.assertEqual(self_profile.find_rope(described, None, geometry).as_json(), described["rope"])


if __name__ == "__main__":
    tiny.main()
