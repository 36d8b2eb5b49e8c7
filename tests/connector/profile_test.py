"""Profiles of tiny random models: the C codec opens them and round-trips every level; unsupported kinds are refused.

usage: profile_test.py CGTOOL
Random weights show structure only: geometry, rope kinds, sinks, errors that follow the step. Not quality.
"""

import contextlib
import io
import json
import math
import os
import subprocess
import sys
import tempfile
import types
import unittest
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "connector"))
sys.path.insert(0, os.path.join(ROOT, "tests", "codec"))
CGTOOL = os.path.join(ROOT, "build", "codec", "cgtool")
LIBRARY = os.environ.get("CACHEGEN_LIBRARY", os.path.join(ROOT, "build", "connector", "libcachegen.so"))
try:
    import numpy as np
    import reader
    import tokenizers
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    from cachegen import abi, make_profile, paper, profile
    from cachegen.compute_type import faster_dtype, product_seconds
    from cachegen.contexts import CONTINUATION, Caches
    from cachegen.fingerprint import model_fingerprint, weights_digest
    from cachegen.klt import Planes
    from cachegen.kv_model import FISHER_DRAWS, Context, KvModel, ModelError, auto_class
    from cachegen.profile_file import read_profile, to_bf16_bits
    from cachegen.quality import Coder, score
    from cachegen.rope import NO_ROPE, Unsupported
    from cachegen.sinks import CHOICES, MOST_SINKS, choose_sinks
    from cachegen.store_files import read_description
    from cachegen.tables import Histograms, class_costs, cluster, shift_of
except ImportError as error:
    print(f"skipped: {error}: no profile was made, nothing of the tool is checked")
    sys.exit(1 if "engine" in os.environ.get("CG_TEST_REQUIRE", "").split(",") else 77)

N_TOKENS = 192
LAYERS = 3
SMALL = dict(
    vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
    initializer_range=0.15, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip

LONGROPE = dict(
    kind="Phi3", num_key_value_heads=2, hidden_size=256, pad_token_id=None, max_position_embeddings=512,
    original_max_position_embeddings=128,
    rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 32,
                     "long_factor": [1.0 + i / 8 for i in range(32)]},
)  # fmt: skip

GRANITE = dict(
    kind="GraniteMoeHybrid", num_key_value_heads=2, num_local_experts=0, shared_intermediate_size=128, mamba_n_heads=8,
    position_embedding_type="rope", pad_token_id=None,
)  # fmt: skip


def config(kind, **changes):
    return getattr(transformers, kind + "Config")(**{**SMALL, **changes})


CODED = {
    "Llama, GQA, head 64": lambda: config("Llama", num_key_value_heads=2, head_dim=64),
    "Llama, MQA, head 256": lambda: config("Llama", num_key_value_heads=1, head_dim=256),
    "Llama, llama3 rope": lambda: config("Llama", num_key_value_heads=2, head_dim=64, rope_parameters=LLAMA3),
    "Llama, linear rope": lambda: config(
        "Llama", num_key_value_heads=2, head_dim=64,
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "Llama, yarn": lambda: config(
        "Llama", num_key_value_heads=2, head_dim=64, rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}),
    "Llama, dynamic rope": lambda: config(  # as vLLM has it: of one length, whatever a prompt's is
        "Llama", num_key_value_heads=2, head_dim=64, max_position_embeddings=128, rope_parameters={
            "rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "max_trained_positions": 64}),
    "Phi3, longrope": lambda: config(**LONGROPE),
    "Qwen2, biased keys, head 64": lambda: config("Qwen2", num_key_value_heads=2, hidden_size=256),
    "Qwen3, normed keys, head 128": lambda: config("Qwen3", num_key_value_heads=2, head_dim=128),
    "StableLm, partial rotary": lambda: config(
        "StableLm", num_key_value_heads=2, hidden_size=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}),
    "Exaone4, rope only in windows": lambda: config(
        "Exaone4", num_key_value_heads=2, sliding_window=40, pad_token_id=None,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"]),
    "Afmoe, rope only in windows": lambda: config(
        "Afmoe", num_key_value_heads=2, head_dim=32, sliding_window=40, num_dense_layers=1, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=64, pad_token_id=None,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"]),
    "GraniteMoeHybrid, attention in all layers": lambda: config(**GRANITE, layer_types=["attention"] * 3),
    "Falcon, alibi": lambda: config("Falcon", multi_query=False, alibi=True),
    "GptOss, attention with sinks": lambda: config(
        "GptOss", num_key_value_heads=2, head_dim=64, num_local_experts=4, num_experts_per_tok=2, pad_token_id=None,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        initializer_range=0.6),  # so that what the sinks take from attention is much of a layer's output
}  # fmt: skip

REFUSED = {
    "proportional": lambda: config("Llama", num_key_value_heads=2, rope_parameters={
        "rope_type": "proportional", "rope_theta": 10000.0}),
    "not rotated as its configuration says .*[Ii]nterleaved rope": lambda: config("Cohere", num_key_value_heads=2),
    "interleaved rope of 16 dimensions": lambda: transformers.GPTJConfig(
        vocab_size=256, n_positions=512, n_embd=128, n_layer=3, n_head=4, rotary_dim=16, bos_token_id=None,
        eos_token_id=None),
    "K of layer 0 is not rotated": lambda: transformers.RoFormerConfig(
        vocab_size=256, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128,
        is_decoder=True),
    "once a query head": lambda: config("Falcon", num_kv_heads=2, new_decoder_architecture=True),
    "layers of the kind .*(mamba|linear_attention)": lambda: config(
        **GRANITE, layer_types=["attention", "mamba", "attention"]),
    "MLA": lambda: config("DeepseekV3", num_key_value_heads=4),
    "layers that share the K and V of others": lambda: config(
        "Gemma3nText", num_hidden_layers=5, num_kv_shared_layers=2, num_key_value_heads=2, head_dim=32,
        vocab_size_per_layer_input=256, hidden_size_per_layer_input=16, laurel_rank=16,
        activation_sparsity_pattern=[0.0] * 5,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] + ["full_attention"] * 2),
    "layers that differ in head_dim": lambda: config(
        "Gemma4Text", num_key_value_heads=2, head_dim=32, global_head_dim=64, pad_token_id=None,
        vocab_size_per_layer_input=256, hidden_size_per_layer_input=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"]),
}  # fmt: skip


def make_tokenizer():
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def make_model(folder, model_config):
    torch.manual_seed(3)
    model = auto_class(model_config).from_config(model_config)
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):
            torch.nn.init.normal_(parameter, std=20.0)  # trained Qwen2 has such keys
    model.to(torch.float32).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=make_tokenizer()).save_pretrained(folder)


def run_cgtool(*arguments):
    done = subprocess.run([CGTOOL, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(f"cgtool {arguments[0]}: {done.stderr}")
    return done.stdout


class ProfileTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.text = os.path.join(self.folder, "text")
        rng = np.random.default_rng(5)
        words = ["".join(rng.choice(list("etaoinshrdlu"), rng.integers(2, 8))) for _ in range(60)]
        with open(self.text, "w") as file:
            file.write(" ".join(rng.choice(words, 400)))

    def path(self, *parts):
        return os.path.join(self.folder, *parts)

    def profile(self, *options):
        with contextlib.redirect_stdout(io.StringIO()):
            report = profile.run(profile.parse_arguments(
                [self.path("model"), "--texts", self.text, "--out", self.path("store", "tiny"),
                 "--tokens", str(N_TOKENS), "--group-layers", "2,1", "--classes", "24", "--quiet",
                 *options]))  # fmt: skip
        return report, self.path("store", "tiny", "profiles", report["profile"] + ".cgp")

    def prefilled(self):
        """(model, context of the text, its K, V)"""
        model = KvModel(self.path("model"), dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.path("model"))
        with open(self.text) as file:
            ids = torch.tensor(tokenizer(file.read(N_TOKENS + 8)).input_ids)
        context = Context("text", ids, N_TOKENS)
        k, v = model.prefill(context)
        return model, context, k, v

    def typical_weighted_size(self, path, x):
        """Root mean square of K and V as the transform sees them: what steps are small against."""
        with open(path, "rb") as file:
            made = read_profile(file.read())
        weighted = (x - torch.tensor(made.mean).transpose(0, 1)[:, :, None])
        weighted = weighted * torch.tensor(made.weight).transpose(0, 1)[:, :, None]
        return made, weighted.pow(2).mean().sqrt().item()

    def check_levels(self, made, path, model, context, x, k, v):
        save_file({"K": k.contiguous(), "V": v.contiguous(), "tokens": context.ids[: context.n].int().contiguous()},
                  self.path("in.safetensors"))  # fmt: skip
        weight = torch.tensor(made.weight).transpose(0, 1)[:, :, None]
        errors, sizes, coder = [], [], Coder(made)
        for level in (1, 2, 3):
            run_cgtool("encode", "--level", f"L{level}", "--profile", path, self.path("in.safetensors"),
                       self.path("chunk.kv"))  # fmt: skip
            run_cgtool("decode", "--profile", path, self.path("chunk.kv"), self.path("out.safetensors"))
            out = load_file(self.path("out.safetensors"))
            y = Planes(model).flat(out["K"], out["V"])
            self.assertTrue(torch.equal(out["K"][:, : made.n_sinks], k[:, : made.n_sinks]), "sinks are exact")
            step = float(made.step[level - 1, 0])
            errors.append(((y - x) * weight)[:, :, MOST_SINKS :].pow(2).mean().sqrt().item() / step)
            info = json.loads(run_cgtool("info", "--json", self.path("chunk.kv")))
            sizes.append(sum(s["bytes"] for s in info["sections"] if s["kind"] not in ("tokens", "sinks")))
            estimate = coder.code(x, level - 1)[1] / 8
            self.assertLess(
                abs(sizes[-1] / estimate - 1),
                (0.01, 0.02, 0.1)[level - 1],
                f"L{level}: {sizes[-1]} bytes, not {estimate}",
            )
        # A uniform quantizer errs by step / sqrt(12); components that are cut, or smaller than a step, by less or more.
        for level, error in enumerate(errors, 1):
            self.assertLess(error, 0.4, f"L{level}: {errors}")
        self.assertGreater(errors[0], 0.05, f"{errors}")  # 192 tokens span few of the channels
        self.assertGreater(sizes[0], sizes[1])
        self.assertGreater(sizes[1], sizes[2])

    def test_each_context_begins_as_a_prompt_does(self):
        with open(self.text) as file:
            text = file.read()
        n_tokens, bare = 64, make_tokenizer()
        own, size = torch.tensor(bare.encode(text).ids), n_tokens + CONTINUATION
        template = make_tokenizer()
        template.add_special_tokens(["<bos>", "<eos>"])
        first = template.token_to_id("<bos>")
        template.post_processor = tokenizers.processors.TemplateProcessing(
            single="<bos> $A <eos>", special_tokens=[(name, template.token_to_id(name)) for name in ("<bos>", "<eos>")]
        )
        short = self.path("short")
        with open(short, "w") as file:
            file.write(text[:size])
        for tokenizer, before in ((bare, []), (template, [first])):
            def cut(paths, held_out, tokenizer=tokenizer):
                fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
                calibration, held_out = profile.read_contexts(fast, paths, held_out, n_tokens, 0)
                return [context.ids.tolist() for context in calibration + held_out]

            n_own = size - len(before)
            want = [before + own[at : at + n_own].tolist() for at in range(0, len(own) - n_own + 1, n_own)]
            self.assertGreater(len(want), 3)
            with self.subTest(before=before):
                self.assertTrue(cut([self.text], None) == want, "the last one is held out")
                self.assertTrue(cut([self.text], [self.text]) == want + want[:1])
                halves = [before + half.tolist() for half in (own[: size // 2], own[size // 2 : size])]
                self.assertTrue(cut([short], None) == halves)

    def test_files_of_one_name_are_different_texts(self):
        make_model(self.path("model"), CODED["Llama, GQA, head 64"]())
        model, paths = KvModel(self.path("model"), dtype=torch.float32), []
        with open(self.text) as file:
            text = file.read()
        for folder, words in (("a", text), ("b", text[::-1])):
            os.mkdir(self.path(folder))
            paths.append(self.path(folder, "t.txt"))
            with open(paths[-1], "w") as file:
                file.write(words)
        fast = transformers.AutoTokenizer.from_pretrained(self.path("model"))
        contexts, held_out = profile.read_contexts(fast, paths, None, N_TOKENS, 1)
        self.assertEqual([context.name for context in contexts], ["a/t.txt@0", "b/t.txt@0"])
        self.assertEqual(len({context.name for context in contexts + held_out}), 4)
        caches = Caches(model, 1 << 30)
        with mock.patch.object(model, "fisher", wraps=model.fisher) as fisher:
            for context in contexts:
                k, v = caches.get(context)
                own_k, own_v = model.prefill(context)
                self.assertTrue(torch.equal(k, own_k) and torch.equal(v, own_v), context.name)
                caches.fisher(context, k, v)
            self.assertEqual(fisher.call_count, 2)
        names = profile.text_names([*paths, self.text, os.path.join(self.folder, "b", "..", "a", "t.txt")])
        self.assertEqual(list(names.values()), ["a/t.txt", "b/t.txt", "text", "a/t.txt"])

    def test_no_context_is_longer_than_a_prompt_of_the_model(self):
        gpt2 = dict(vocab_size=256, n_embd=128, n_layer=3, n_head=4, bos_token_id=None, eos_token_id=None)
        mpt = dict(vocab_size=256, d_model=128, n_layers=3, n_heads=4)
        linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
        llama = dict(num_key_value_heads=2, head_dim=64, max_position_embeddings=512)
        for name, model_config, longest in (
            ("learnt positions", transformers.GPT2Config(**gpt2, n_positions=340), 336),
            ("alibi", transformers.MptConfig(**mpt, max_seq_len=400), 400),
            ("rope", config("Llama", **llama), 512),
            ("stretched rope", config("Llama", **llama, rope_parameters=linear), 1024),
        ):
            with self.subTest(name):
                make_model(self.path("model"), model_config)
                with mock.patch.object(profile, "make_and_measure", wraps=profile.make_and_measure) as make:
                    self.profile("--dtype", "fp32", "--tokens", "3072")
                sizes = {(context.n, len(context.ids)) for part in make.call_args.args[2:4] for context in part}
                self.assertEqual(sizes, {(longest - CONTINUATION, longest)})
        make_model(self.path("model"), transformers.GPT2Config(**gpt2, n_positions=300))
        with contextlib.redirect_stderr(io.StringIO()) as stderr, self.assertRaises(SystemExit) as ended:
            self.profile()
        self.assertEqual(ended.exception.code, 2)
        self.assertIn(f"profile: {self.path('model')}: its prompts have 300 tokens at most: too few", stderr.getvalue())

    def test_as_many_contexts_as_asked_for_make_the_curve(self):
        make_model(self.path("model"), CODED["Llama, GQA, head 64"]())
        with mock.patch.object(profile.kl_curve, "measure", wraps=profile.kl_curve.measure) as measure:
            self.profile("--dtype", "fp32", "--contexts", "2", "--curve-contexts", "1")
        self.assertEqual(len(measure.call_args.args[4]), 1)
        with contextlib.redirect_stderr(io.StringIO()), self.assertRaises(SystemExit):
            profile.parse_arguments([self.path("model"), "--texts", self.text, "--out", "m", "--curve-contexts", "-1"])

    def test_what_cannot_be_read_is_one_line_and_status_2(self):
        def ends(model, text, wanted):
            stderr = io.StringIO()
            with self.subTest(wanted):
                with contextlib.redirect_stderr(stderr), self.assertRaises(SystemExit) as ended:
                    profile.main([model, "--texts", text, "--out", self.path("m"), "--quiet"])
                self.assertEqual(ended.exception.code, 2)
                lines = [line for line in stderr.getvalue().splitlines() if line and "Loading weights" not in line]
                self.assertEqual(len(lines), 1, stderr.getvalue())
                self.assertIn(wanted, lines[0])

        missing, empty, broken = self.path("missing"), self.path("empty"), self.path("broken")
        os.mkdir(empty)
        os.mkdir(broken)
        with open(os.path.join(broken, "config.json"), "w") as file:
            file.write('{"model_type": "llama"')
        ends(empty, missing, f"profile: {missing}: No such file")
        ends(empty, empty, f"profile: {empty}: Is a directory")
        ends(missing, self.text, f"profile: {missing}: No such file")
        ends(empty, self.text, f"profile: {empty}: ")
        ends(broken, self.text, f"profile: {broken}: ")

        model, own = self.path("model"), CODED["Qwen2, biased keys, head 64"]().to_dict()
        make_model(model, CODED["Qwen2, biased keys, head 64"]())
        for wanted, more in {
            "ImportError: ": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "KeyError: ": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
        }.items():
            with open(os.path.join(model, "config.json"), "w") as file:
                json.dump({**own, **more}, file)
            ends(model, self.text, f"profile: {model}: {wanted}")
        with mock.patch.dict(os.environ, CACHEGEN_TRACEBACK="1"), self.assertRaises(KeyError):
            profile.main([model, "--texts", self.text, "--out", self.path("m"), "--quiet"])
        with open(os.path.join(model, "config.json"), "w") as file:
            json.dump(own, file)
        for name in os.listdir(model):
            if name.startswith("tokenizer"):
                os.remove(os.path.join(model, name))
        ends(model, self.text, f"profile: the tokenizer in {model}: ")

    def test_nothing_is_written_where_the_models_folder_has_gone_meanwhile(self):
        make_model(self.path("model"), CODED["Llama, GQA, head 64"]())
        out, make, stderr = self.path("store", "tiny"), profile.make_profile, io.StringIO()

        def unmount_and_make(*arguments, **options):
            os.rename(out, self.path("away"))
            return make(*arguments, **options)

        with mock.patch("cachegen.profile.make_profile", unmount_and_make), contextlib.redirect_stderr(stderr):
            with self.assertRaises(SystemExit) as ended:
                self.profile("--dtype", "fp32")
        self.assertEqual(ended.exception.code, 2)
        self.assertIn(f"profile: {out}: No such file or directory\n", stderr.getvalue())
        self.assertEqual((os.listdir(self.path("store")), os.listdir(self.path("away"))), ([], []))

    def test_what_the_model_ends_with_is_one_line_and_status_2(self):
        make_model(self.path("model"), config("Llama", num_key_value_heads=2, vocab_size=70))  # the tokenizer knows 256
        with contextlib.redirect_stderr(io.StringIO()) as stderr, self.assertRaises(SystemExit) as ended:
            self.profile("--dtype", "fp32")
        self.assertEqual(ended.exception.code, 2)
        wanted = f"profile: running {self.path('model')}: IndexError: index out of range in self"
        self.assertEqual([line for line in stderr.getvalue().splitlines() if line.startswith("profile: ")], [wanted])
        with mock.patch.dict(os.environ, CACHEGEN_TRACEBACK="1"), self.assertRaises(ModelError) as ended:
            self.profile("--dtype", "fp32")
        self.assertIsInstance(ended.exception.__cause__, IndexError)
        make_model(self.path("model"), CODED["Llama, GQA, head 64"]())
        weights = load_file(self.path("model", "model.safetensors"))
        weights["model.layers.1.self_attn.v_proj.weight"][5, 5] = math.nan
        save_file(weights, self.path("model", "model.safetensors"), {"format": "pt"})
        with contextlib.redirect_stderr(io.StringIO()) as stderr, self.assertRaises(SystemExit) as ended:
            self.profile("--dtype", "fp32")
        self.assertEqual(ended.exception.code, 2)
        wanted = f"profile: running {self.path('model')}: K or V of text@0 is not finite in fp32"
        self.assertEqual([line for line in stderr.getvalue().splitlines() if line.startswith("profile: ")], [wanted])
        make_model(self.path("model"), CODED["Llama, GQA, head 64"]())
        full, told = RuntimeError("out of memory\nwhere"), "^RuntimeError: out of memory$"
        for name in ("torch.autograd.grad", "transformers.cache_utils.DynamicCache.get_seq_length"):
            model, context, k, v = self.prefilled()
            with mock.patch(name, side_effect=full), self.assertRaisesRegex(ModelError, told):
                model.fisher(context, k, v, MOST_SINKS, torch.Generator())

    def test_codec_opens_profiles_and_errs_by_the_step(self):
        for name, make_config in CODED.items():
            with self.subTest(name):
                make_model(self.path("model"), make_config())
                model, context, k, v = self.prefilled()
                x = Planes(model).flat(k, v)
                _, path = self.profile("--dtype", "fp32")
                _, size = self.typical_weighted_size(path, x)
                steps = ",".join(repr(size * ratio) for ratio in (0.25, 0.75, 2.25))
                report, path = self.profile("--dtype", "fp32", "--steps", steps)
                made, _ = self.typical_weighted_size(path, x)
                np.testing.assert_array_equal(made.inv_freq, model.rope.inv_freq.numpy())
                self.assertTrue(made.is_joined, "K and V of two layers are few channels")
                self.assertIn(made.n_sinks, CHOICES)
                self.assertEqual((report["planes"], report["n_sinks"]), ("joined", made.n_sinks))
                self.assertEqual((made.step / made.step[0]).astype(float).tolist(), [[1, 1], [3, 3], [9, 9]])
                self.assertEqual(float(made.step[2, 0]), 9 * float(made.step[0, 0]), "levels nest exactly")
                run_cgtool("verify", path)
                for b in (b for planes in made.basis for b in planes):
                    product, n = b.rows() @ b.rows().T - np.eye(b.n_components), b.n_exact
                    self.assertLess(np.abs(product[:n, :n]).max(initial=0), 0.03)
                    self.assertLess(np.abs(product).max(), 0.5, "rows of few bits are nearly orthonormal, too")
                self.check_levels(made, path, model, context, x, k, v)
                with open(self.path("store", "tiny", "profiles", "default")) as file:
                    self.assertEqual(file.read(), report["profile"] + "\n")
                with open(self.path("store", "tiny", "model.json")) as file:
                    self.assertEqual(json.load(file)["model_fingerprint"], made.model_fingerprint.hex())
                self.assertEqual(os.stat(path).st_mode & 0o777, 0o600)

    def test_a_model_that_no_error_changes_needs_no_exact_tokens(self):
        for kl, wanted in (([-1e-9] * 5, 0), ([1e-9, -1e-9, 0, 0, 0], 1), ([0.0] * 5, 0), ([5, 2.05, 2, 2, 2], 1)):
            with mock.patch("cachegen.sinks.divergences", lambda *_, kl=kl: kl):
                self.assertEqual(choose_sinks(None, None, None, [], 1, None), wanted)

    def test_a_profile_can_be_made_of_steps_that_leave_no_symbols(self):
        make_model(self.path("model"), CODED["Llama, GQA, head 64"]())
        report, path = self.profile("--steps", "1e6,3e6,9e6", "--sinks", "2")
        self.assertEqual(report["n_components"], [[1], [1]])
        run_cgtool("verify", path)

    def check_joined(self, *options):
        make_model(self.path("model"), CODED["Llama, GQA, head 64"]())
        model, context, k, v = self.prefilled()
        x = Planes(model).flat(k, v)
        _, size = self.typical_weighted_size(self.profile("--dtype", "fp32")[1], x)
        steps = ",".join(repr(size * ratio) for ratio in (0.25, 0.75, 2.25))
        report, path = self.profile("--dtype", "fp32", "--steps", steps, "--join", "64", *options)
        made, _ = self.typical_weighted_size(path, x)
        self.assertEqual((report["n_shared"], made.n_shared, made.joint.basis.numbers.shape[1]), (64, 64, 128))
        run_cgtool("verify", path)
        self.check_levels(made, path, model, context, x, k, v)
        for level in (1, 2, 3):
            run_cgtool("encode", "--level", f"L{level}", "--profile", path, self.path("in.safetensors"),
                       self.path("chunk.kv"))  # fmt: skip
            run_cgtool("decode", "--profile", path, self.path("chunk.kv"), self.path("out.safetensors"))
            out, coded = load_file(self.path("out.safetensors")), Coder(made).code(x, level - 1)[0]
            weight = torch.tensor(made.weight).transpose(0, 1)[:, :, None]
            error = (Planes(model).flat(out["K"], out["V"]) - coded) * weight
            # The coder's sums are rounded otherwise, so that a symbol here and there is the next one.
            self.assertLess(error.square().mean().sqrt().item(), 0.02 * float(made.step[level - 1, 0]))
        return report, made, x

    def test_groups_that_are_joined_come_back_as_the_profiles_coder_says(self):
        report, made, _ = self.check_joined("--no-block-steps")
        self.assertEqual((report["block_steps"], made.class_at), (False, None))

    def test_blocks_have_the_steps_that_the_profiles_coder_says(self):
        report, made, x = self.check_joined()
        self.assertEqual((report["block_steps"], made.query_mean.shape), (True, (LAYERS, 4, 64)))
        index = Coder(made).importance.factor_index(x, made.n_sinks).tolist()
        self.assertGreater(len(set(index)), 1, "random weights look at all tokens alike, nearly")
        with open(self.path("chunk.kv"), "rb") as file:
            steps = reader.Chunk(file.read()).sections[10, 0, 0]
        n_other = sum(a != b for a, b in zip(steps, index, strict=True))
        self.assertLessEqual(n_other, 1, "sums may be rounded otherwise")

    def test_preset_paper_errs_by_half_a_step_and_as_its_coder_says(self):
        make_model(self.path("model"), CODED["StableLm, partial rotary"]())
        model, context, k, v = self.prefilled()
        x = paper.Planes(model).flat(k, v)
        default = self.path("store", "tiny", "profiles", "default")
        with mock.patch.object(profile, "N_CLASSES", 40):  # what a GPU's shared memory has room for
            options = ("--dtype", "fp32", "--preset", "paper", "--classes", "0")
            report, path = self.profile(*options, "--no-default")
            self.assertFalse(os.path.exists(default))
            self.assertEqual(report["preset"], "paper")
            self.profile(*options)
        with open(default) as file:
            self.assertEqual(file.read(), report["profile"] + "\n")
        run_cgtool("verify", path)
        with open(path, "rb") as file:
            data = file.read()
        made = read_profile(data)
        self.assertEqual(made.to_bytes(), data)
        self.assertEqual((made.preset, made.n_sinks, len(made.inv_freq), made.group_layers), ("paper", 0, 0, [2, 1]))
        self.assertLessEqual(len(made.classes), 40)
        np.testing.assert_allclose(made.step, [[1, 1], [2, 2], [3, 3]] * made.step[0])
        unit = 1 / made.weight  # one a layer and plane, over the thirds
        np.testing.assert_array_equal(unit, unit[:, :, :1].repeat(unit.shape[2], 2))
        anchors, deltas = paper.split(x[:, :, : N_TOKENS])
        self.assertEqual(anchors.shape[2] + deltas.shape[2], N_TOKENS)
        np.testing.assert_allclose(unit[:, :, 0].T / paper.THIRDS, deltas.pow(2).mean((2, 3)).sqrt().numpy(), rtol=0.3)

        save_file({"K": k.contiguous(), "V": v.contiguous(), "tokens": context.ids[:N_TOKENS].int().contiguous()},
                  self.path("in.safetensors"))  # fmt: skip
        is_anchor = torch.arange(N_TOKENS) % 10 == 0
        anchor_step = torch.tensor(made.anchor_step).transpose(0, 1)[:, :, None]
        for level in (1, 2, 3):
            run_cgtool("encode", "--level", f"L{level}", "--profile", path, self.path("in.safetensors"),
                       self.path("chunk.kv"))  # fmt: skip
            run_cgtool("decode", "--profile", path, self.path("chunk.kv"), self.path("out.safetensors"))
            out = load_file(self.path("out.safetensors"))
            y = paper.Planes(model).flat(out["K"], out["V"])
            weight = torch.tensor(made.weight).transpose(0, 1)[:, :, None]
            step = torch.tensor(made.step[level - 1])[:, None, None, None] / weight
            bound = torch.where(is_anchor[:, None], anchor_step, step) * 0.5001 + 1e-5
            self.assertTrue(((y - x).abs() <= bound).all(), f"L{level}")
            coded, bits = paper.Coder(made).code(x, level - 1)
            self.assertLess((coded - y).abs().max().item(), 1.01 * step.max().item())  # a tie may fall either way
            self.assertLess(((coded - y).abs() > 1e-4).float().mean().item(), 1e-3)
            info = json.loads(run_cgtool("info", "--json", self.path("chunk.kv")))
            size = sum(s["bytes"] for s in info["sections"] if s["kind"] == "symbols")
            self.assertLess(abs(8 * size / bits - 1), 0.03, f"L{level}: {size} bytes, not {bits / 8}")

    def test_longrope_is_profiled_for_the_length_of_the_engine(self):
        make_model(self.path("model"), config(**LONGROPE))
        files, made = model_fingerprint(self.path("model")), {}
        for length in (None, 129):
            options = [] if length is None else ["--max-model-len", str(length)]
            path = self.profile("--dtype", "fp32", *options)[1]
            with open(path, "rb") as file:
                made[length] = read_profile(file.read())
        self.assertEqual(made[None].model_fingerprint.hex(), files)
        self.assertEqual(made[129].model_fingerprint.hex(), model_fingerprint(self.path("model"), {"longrope": "long"}))
        factors = LONGROPE["rope_parameters"]["long_factor"]
        np.testing.assert_allclose(made[None].inv_freq / made[129].inv_freq, factors, rtol=1e-6)

    def test_the_same_input_gives_the_same_profile_and_a_digest_of_the_weights_stays(self):
        make_model(self.path("model"), CODED["Llama, GQA, head 64"]())
        made, digests = [], []
        for options in ([], ["--digest-weights"], []):
            made.append(self.profile(*options)[0]["profile"])
            digests.append(read_description(self.path("store", "tiny")).get("weights_digest"))
        self.assertEqual(made[1:], made[:-1])
        self.assertEqual(digests, [None, *[weights_digest(self.path("model"))] * 2])

    def test_caches_are_of_their_own_type_whatever_the_model_computes_in(self):
        make_model(self.path("model"), CODED["Llama, GQA, head 64"]())
        models = {name: KvModel(self.path("model"), dtype=torch.bfloat16, compute_dtype=dtype)
                  for name, dtype in (("slow", torch.bfloat16), ("fast", torch.float32))}  # fmt: skip
        ids = torch.randint(256, (N_TOKENS + 64,), generator=torch.Generator().manual_seed(11))
        context = Context("random", ids, N_TOKENS)
        found = {}
        for name, model in models.items():
            k, v = model.prefill(context)
            self.assertEqual((k.dtype, v.dtype, model.dtype_name), (torch.bfloat16, torch.bfloat16, "bf16"))
            with torch.no_grad():
                log_p = model.log_probs(context, k, v)
            fisher = model.fisher(context, k, v, MOST_SINKS, torch.Generator().manual_seed(1))
            self.assertTrue(fisher.isfinite().all() and (fisher >= 0).all())
            found[name] = model.weights_bytes, fisher.shape, k, v, log_p
        self.assertEqual(models["fast"].model.dtype, torch.float32)
        slow, fast = found["slow"], found["fast"]
        self.assertEqual(slow[:2], fast[:2], "size of the weights, shape of the information")
        for a, b in zip(slow[2:4], fast[2:4]):  # bf16 has 8 bits: roundings on the way to the last layer add up
            self.assertLess(((a - b).float().norm() / b.float().norm()).item(), 0.03)
        self.assertLess((fast[4].exp() * (fast[4] - slow[4])).sum(-1).mean().item(), 0.05)
        self.assertEqual(self.profile("--dtype", "bf16", "--compute-dtype", "fp32")[0]["compute_dtype"], "fp32")

    def test_the_information_is_the_mean_of_several_continuations(self):
        make_model(self.path("model"), CODED["Llama, GQA, head 64"]())
        model = KvModel(self.path("model"))
        context = Context("random", torch.randint(256, (N_TOKENS + 64,), generator=torch.Generator().manual_seed(11)),
                          N_TOKENS)  # fmt: skip
        k, v = model.prefill(context)
        generator = torch.Generator().manual_seed(1)
        with mock.patch("cachegen.kv_model.FISHER_DRAWS", 1):
            single = [model.fisher(context, k, v, MOST_SINKS, generator) for _ in range(FISHER_DRAWS)]
        found = model.fisher(context, k, v, MOST_SINKS, torch.Generator().manual_seed(1))
        self.assertFalse(torch.equal(single[0], single[1]))
        torch.testing.assert_close(found, sum(single) / FISHER_DRAWS, rtol=1e-3, atol=1e-3 * found.max().item())
        of_pairs = found[:, 0].unflatten(1, (model.n_kv_heads, 2, -1))
        self.assertFalse(torch.allclose(of_pairs[:, :, 0], of_pairs[:, :, 1], rtol=0.01), "each dimension has its own")

    def test_the_mean_query_is_that_before_rotation_times_what_scores_are_multiplied_by(self):
        plain = ("Llama, GQA, head 64", "Llama, yarn", "StableLm, partial rotary", "Qwen2, biased keys, head 64",
                 "Qwen3, normed keys, head 128")  # fmt: skip
        no_rope = dict(num_key_value_heads=2, hidden_size=256, no_rope_layers=[1, 0, 1], pad_token_id=None)
        for name, make_config in {
            **{name: CODED[name] for name in plain},
            "SmolLM3": lambda: config("SmolLM3", **no_rope),
        }.items():
            with self.subTest(name):
                make_model(self.path("model"), make_config())
                model, context, k, v = self.prefilled()
                asked = []
                for layer in model.model.model.layers:
                    module = getattr(layer.self_attn, "q_norm", layer.self_attn.q_proj)
                    module.register_forward_hook(lambda _, __, out: asked.append(out[0].flatten(1)))
                again = model.prefill_with_queries(context)
                self.assertTrue(torch.equal(again[0], k) and torch.equal(again[1], v))
                want = torch.stack([q[64:].mean(0).unflatten(0, (-1, model.head_dim)) for q in asked])
                want *= model.head_dim**-0.5 * getattr(model.model.model.rotary_emb, "attention_scaling", 1)
                torch.testing.assert_close(again[2], want, rtol=1e-3, atol=1e-4 * want.abs().max().item())
                attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
                self.assertEqual(attend.__name__, "sdpa_attention_forward", "transformers' own function is back")
        windows = dict(num_key_value_heads=2, head_dim=64, sliding_window=40)
        for name, odd in (
            ("windows", config("Mistral", **windows)),
            ("capped scores", config("Gemma2", query_pre_attn_scalar=64, **{**windows, "sliding_window": 4096})),
        ):
            with self.subTest(name):
                make_model(self.path("model"), odd)
                model, context, _, _ = self.prefilled()
                self.assertIsNone(model.prefill_with_queries(context)[2])
                if name == "windows":  # of 40 tokens, which an engine's prompts may have, or one more
                    for length in (40, 41):
                        model = KvModel(self.path("model"), dtype=torch.float32, max_model_len=length)
                        context = Context("short", context.ids[:40], 32)
                        self.assertEqual(model.prefill_with_queries(context)[2] is None, length > 40)
        report, path = self.profile("--dtype", "fp32")
        with open(path, "rb") as file:
            self.assertIsNone(read_profile(file.read()).class_at)
        self.assertEqual((report["block_steps"], report["has_odd_queries"]), (False, True))

    def test_what_errors_cost_is_told_by_layer(self):
        make_model(self.path("model"), CODED["Llama, GQA, head 64"]())
        model, rng = KvModel(self.path("model"), dtype=torch.float32), torch.Generator().manual_seed(11)
        context = Context("random", torch.randint(256, (N_TOKENS + 64,), generator=rng), N_TOKENS)
        own = model.prefill(context)
        reference = model.log_probs(context, *own)
        errors = [x.std() * torch.randn(x.shape, generator=rng) * 0.02 for x in own]

        def cost(layers, plane):
            """(KL, what is told by layer) of errors of a plane in layers."""
            coded = [x.clone() for x in own]
            coded[plane][layers] += errors[plane][layers]
            kl = score(model.log_probs(context, *coded), reference, context.ids[context.n :])[0]
            return kl, model.kl_by_layer(context, *own, *coded)

        for plane in range(2):
            kl, found = cost(slice(1, 2), plane)
            self.assertAlmostEqual(found[1, plane].item() / kl, 1, delta=0.1)
            found[1, plane] = 0
            self.assertFalse(found.any(), "of layers without errors")
            kl, found = cost(slice(None), plane)
            self.assertAlmostEqual(found.sum().item() / kl, 1, delta=0.1)

    def test_the_faster_type_is_taken_where_it_is_clearly_faster(self):
        bf16, f32, asked = torch.bfloat16, torch.float32, []

        def choose(bf16_s, f32_s, dtype=bf16, **options):
            def measure(dtypes, *shape):
                asked.append(shape)
                return {bf16: bf16_s, f32: f32_s}

            return faster_dtype(dtype, config("Llama"), measure=measure, **options)

        self.assertEqual([choose(4, 1), choose(1.1, 1), choose(1, 4)], [f32, bf16, bf16])
        self.assertEqual(asked, [(128, 128)] * 3, "the model's shapes")
        by_layer = types.SimpleNamespace(hidden_size=128, intermediate_size=[64, 192])  # as Gemma 3n has it
        faster_dtype(bf16, by_layer, measure=lambda dtypes, *shape: asked.append(shape) or dict.fromkeys(dtypes, 1))
        self.assertEqual(asked.pop(), (128, 192))
        self.assertEqual([choose(4, 1, dtype=f32), choose(4, 1, device="cuda")], [f32, bf16])
        self.assertEqual(len(asked), 3, "nothing to choose, nothing to measure")
        seconds = product_seconds((bf16, f32), 1 << 20, 64)
        self.assertEqual(set(seconds), {bf16, f32})
        self.assertTrue(all(math.isfinite(s) and s > 0 for s in seconds.values()), seconds)

    def test_contexts_near_their_prediction_are_counted_and_others_named(self):
        self.assertEqual([profile.is_near(r) for r in (0.66, 0.67, 1.0, 1.5, 1.51)], [False, True, True, True, False])
        make_model(self.path("model"), CODED["Llama, GQA, head 64"]())
        report, _ = self.profile("--report-contexts", "0")
        self.assertEqual(report["n_held_out"], 1, "so that the mean is the context's own")
        for row in report["levels"]:
            ratio = row["kl"] / row["predicted_kl"]
            self.assertAlmostEqual(row["kl_over_predicted"][0], ratio)
            self.assertEqual(row["n_near_prediction"], int(profile.is_near(ratio)))
        report["levels"][0]["kl_over_predicted"], report["levels"][1]["kl_over_predicted"] = [2.5], [1.0]
        with contextlib.redirect_stdout(io.StringIO()) as output:
            profile.print_report(report)
        self.assertIn(f"at L1 not within: {report['held_out'][0]} 2.50 times", output.getvalue())
        self.assertNotIn("at L2 not within", output.getvalue())
        self.assertEqual(profile.over_predicted([1, 3], 2), [0.5, 1.5])
        self.assertEqual(profile.over_predicted([1, 1, 1, 4], 1.75, is_their_mean=True), [0.5, 0.5, 0.5, 4])
        near = [profile.is_near(ratio) for ratio in profile.over_predicted([1, 1, 1, 2], 1.25, is_their_mean=True)]
        self.assertEqual(near, [True, True, True, False], "1 against 1.33, and 2 against 1")

    def test_loads_are_planned_by_text_that_the_profile_was_not_made_from(self):
        make_model(self.path("model"), CODED["Llama, GQA, head 64"]())
        with open(self.text) as text, open(self.path("other"), "w") as other:
            other.write(text.read()[::-1])
        with mock.patch.object(profile.kl_curve, "measure", wraps=profile.kl_curve.measure) as measure:
            for n_texts in (2, 3):
                report, _ = self.profile("--held-out", *[self.path("other")] * n_texts)
                levels = list(measure.call_args.args[6])
                of_held_out = [row["predicted_kl"] == row["kl"] for row in report["levels"]]
                self.assertEqual(report["n_held_out"], n_texts)
                if n_texts < profile.kl_curve.LEAST_HELD_OUT:
                    self.assertEqual((levels, of_held_out), ([0, 1, 2], [False] * 3))
                else:
                    self.assertEqual((levels, of_held_out), ([profile.kl_curve.CURVE_LEVEL], [True] * 3))

    def test_the_library_takes_the_curve_of_quality_that_the_tool_wrote(self):
        make_model(self.path("model"), CODED["Llama, GQA, head 64"]())
        reports = [self.profile("--planes", planes)[0] for planes in ("apart", "joined")]
        first, second = (report["profile"] for report in reports)
        about = self.path("store", "tiny", "model.json")
        with open(about) as file:
            described = json.load(file)
        self.assertEqual(set(described["quality"]), {first, second}, "those of other profiles stay")
        last = described["quality"][second]["last"]
        self.assertEqual(last[-1], [N_TOKENS, 1])
        told = [row["predicted_kl"] for row in reports[1]["levels"]]
        self.assertEqual(told, described["quality"][second]["kl"], "what loads are planned by")
        if not os.path.exists(LIBRARY):
            self.skipTest(f"no libcachegen.so at {LIBRARY}: nobody read the curve")
        config = {"root": self.path("store"), "model": "tiny"}
        for beyond, warning in ((described["quality"][second]["beyond"], ""), (-1, "quality.beyond")):
            described["quality"][second]["beyond"] = beyond
            with open(about, "w") as file:
                json.dump(described, file)
            connector = abi.Connector(config, LIBRARY)
            self.assertIn(warning, connector.warning)
            self.assertEqual(bool(connector.warning), bool(warning))
            connector.close()

    def test_unsupported_kinds_are_refused_by_name(self):
        for name, make_config in REFUSED.items():
            with self.subTest(name):
                make_model(self.path("model"), make_config())
                with self.assertRaisesRegex(Unsupported, name):
                    KvModel(self.path("model"), dtype=torch.float32)
        positions = dict(vocab_size=256, n_positions=512, n_embd=128, n_layer=3, n_head=4)
        make_model(self.path("model"), transformers.GPT2Config(**positions, bos_token_id=None, eos_token_id=None))
        self.assertEqual(KvModel(self.path("model")).rope.kind, "none")
        bloom = dict(vocab_size=256, hidden_size=128, n_layer=3, n_head=4, bos_token_id=None, eos_token_id=None)
        make_model(self.path("model"), transformers.BloomConfig(**bloom))
        self.assertEqual(KvModel(self.path("model")).rope.kind, "none", "a model that cannot be told positions")
        make_model(self.path("model"), CODED["Llama, GQA, head 64"]())
        with mock.patch("cachegen.kv_model.rope_of", lambda *_: NO_ROPE):
            with self.assertRaisesRegex(Unsupported, "not rotated as its configuration says .kind none"):
                KvModel(self.path("model"))

    def test_what_is_transformed_together_can_be_asked_for(self):
        make_model(self.path("model"), CODED["Llama, GQA, head 64"]())
        for options, want in (
            (("--planes", "apart"), ("apart", [2, 1])),
            (("--group-layers", "3"), ("joined", [3])),
            (("--group-layers", "1", "--sinks", "2", "--planes", "joined"), ("joined", [1, 1, 1])),
        ):
            report, path = self.profile(*options)
            self.assertEqual((report["planes"], report["group_layers"]), want)
            run_cgtool("verify", path)
        self.assertEqual(report["n_sinks"], 2)

    def test_no_matrix_has_more_channels_than_the_text_can_tell_of(self):
        def chosen(head_dim, *options):
            """(the Matrices, what was said), of two heads: a context of 296 tokens tells of 98 channels."""
            make_model(self.path("model"), config("Llama", num_key_value_heads=2, head_dim=head_dim))
            arguments = [self.path("model"), "--texts", self.text, "--out", self.path("m"), "--tokens", "296"]
            make = mock.patch.object(profile, "make_and_measure", side_effect=ModelError)  # the choice is made
            with make as made, contextlib.redirect_stderr(io.StringIO()) as stderr, self.assertRaises(SystemExit):
                profile.run(profile.parse_arguments([*arguments, *options]))
            return made.call_args.args[4], stderr.getvalue()

        matrices, said = chosen(16)
        self.assertEqual((matrices.groups, matrices.is_joined), ([1, 1, 1], True))
        self.assertIn("at most 98 channels a KLT: there are 296 tokens", said)
        matrices, said = chosen(32)
        self.assertEqual((matrices.groups, matrices.is_joined), ([1, 1, 1], False))
        self.assertNotIn("warning", said)
        matrices, said = chosen(64)
        self.assertEqual((matrices.groups, matrices.is_joined), ([1, 1, 1], False))
        self.assertIn("profile: warning: 296 tokens to learn from, 384 are needed", said)
        matrices, said = chosen(64, "--group-layers", "3")
        self.assertEqual((matrices.groups, matrices.is_joined), ([3], True))
        self.assertNotIn("296 tokens to learn from", said)

    def test_what_is_preferred_sets_the_size_of_a_profile(self):
        make_model(self.path("model"), CODED["Llama, GQA, head 64"]())
        plan_columns, budgets = make_profile.plan_columns, []

        def plan(transform, statistics, budget_bytes):  # the model is too tiny for any share of it
            budgets.append(budget_bytes)
            return plan_columns(transform, statistics, 1 << 20)

        for prefer, share in make_profile.PROFILE_SHARE.items():
            with mock.patch.multiple(make_profile, plan_columns=plan, LEAST_BUDGET_BYTES=0):
                report, _ = self.profile("--prefer", prefer, "--sinks", "2")
            self.assertAlmostEqual(budgets[-1] * report["profile_share"] / report["profile_bytes"], share)

    def test_a_profile_stays_below_what_engines_read(self):
        make_model(self.path("model"), CODED["Llama, GQA, head 64"]())
        most = self.profile()[0]["profile_bytes"] * 9 // 10
        with mock.patch("cachegen.assemble.MAX_BYTES", most), mock.patch("cachegen.store_files.MAX_BYTES", most):
            path = self.profile()[1]
        self.assertLessEqual(os.path.getsize(path), most)
        run_cgtool("verify", path)

    def test_damaged_profiles_are_refused(self):
        make_model(self.path("model"), CODED["Llama, GQA, head 64"]())
        with open(self.profile()[1], "rb") as file:
            data = file.read()
        read_profile(data)
        for what, damaged in (("short", data[:-1]), ("long", data + b"\0"), ("bit", data[:200] + b"\1" + data[201:])):
            with self.subTest(what), self.assertRaises(ValueError):
                read_profile(damaged)

    def test_classes_cost_the_entropy(self):
        generator = torch.Generator().manual_seed(7)
        for sigma in (2.0, 6.0, 40.0, 700.0):  # without a shift, at its edge, with a small and a large one
            with self.subTest(sigma=sigma):
                q = (torch.randn(20000, 8, 4, generator=generator) * sigma).round().int()
                shift = shift_of(torch.full((8, 4), sigma**2))
                histogram = Histograms(shift, "cpu")
                histogram.add(q)
                classes, of = cluster(histogram.rows(), shift.flatten().numpy(), 1)
                costs = np.stack([class_costs(c) for c in classes])[of]
                bits = (histogram.rows() * costs).sum() / q.numel()
                entropy = math.log2(2 * math.pi * math.e * (sigma**2 + 1 / 12)) / 2  # of rounded numbers
                self.assertAlmostEqual(bits, entropy, delta=0.006)

    def test_bf16_is_rounded_to_nearest_even(self):
        x = torch.randn(10000, generator=torch.Generator().manual_seed(1))
        x[:3] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -0.0])  # two ties
        want = x.bfloat16().view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(to_bf16_bits(x.numpy()), want)


def main():
    global CGTOOL
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        CGTOOL = sys.argv.pop(1)
    if not os.access(CGTOOL, os.X_OK):
        print(f"skipped: no cgtool at {CGTOOL}: profiles were not compared with the C codec")
        sys.exit(77)
    torch.set_num_threads(1)  # tiny models: a second thread is waited for longer than it helps
    unittest.main(verbosity=2)


if __name__ == "__main__":
    main()
