"""What of an engine's configuration changes the key of its KV, with vLLM's own reading of config.json.

usage: model_key_test.py
"""

import json
import os
import struct
import sys
import tempfile
import threading
import types
import unittest
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "connector"))
try:
    import torch
    import transformers
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.config.load import LoadConfig
    from vllm.config.multimodal import MultiModalConfig
    from vllm.config.quantization import QuantizationConfigArgs
    from vllm.config.speculative import SpeculativeConfig
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT, get_rope, phi3_long_rope_scaled_rope
    from vllm.model_executor.models.config import GptOssForCausalLMConfig
    from vllm.transformers_utils.config import get_config, patch_legacy_rope_type
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    try:
        from vllm.v1.core.kv_cache_planning import unify_hybrid_kv_cache_specs
    except ImportError:  # before 0.33
        from vllm.v1.core.kv_cache_utils import unify_hybrid_kv_cache_specs
except ImportError as error:
    print(f"skipped: {error}: no key was made")
    sys.exit(1 if "engine" in os.environ.get("CG_TEST_REQUIRE", "").split(",") else 77)
from cachegen import Unsupported as UnsupportedModel  # noqa: E402
from cachegen.fingerprint import as_text, model_fingerprint, weights_digest  # noqa: E402
from cachegen.rope import fix_rope, longrope_factors, rope_from_json, rope_of  # noqa: E402
from cachegen.vllm import guard  # noqa: E402
from cachegen.vllm.library import (  # noqa: E402
    Unsupported,
    _configuration,
    check_attention,
    check_speculation,
    check_weights,
    digest_of,
)
from cachegen.vllm.model_key import OTHER, UNCHECKED, WeightsCheck, deviations, fingerprint, image_key  # noqa: E402

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "intermediate_size": 128,
    "max_position_embeddings": 512, "rope_theta": 10000.0,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 128,
}  # fmt: skip


class BailingMoeConfig(transformers.PretrainedConfig):
    """The model's own code has it."""

    model_type = "bailing_moe"


transformers.AutoConfig.register("bailing_moe", BailingMoeConfig)


class ModelKeyTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def directory(self, name="model", **config):
        path = os.path.join(self.folder, name)
        os.makedirs(path, exist_ok=True)
        with open(os.path.join(path, "model.safetensors"), "wb") as file:
            file.write(b"weights")
        with open(os.path.join(path, "config.json"), "w") as file:
            json.dump({**CONFIG, **config}, file)
        return path

    def engine(self, path, config_path=None, overrides=None, function=None, cache=None, load_format="auto", **fields):
        hf_config = get_config(config_path or path, False, hf_overrides_kw=overrides or {}, hf_overrides_fn=function)
        model = dict(
            model=path, revision=None, hf_config=hf_config, trust_remote_code=False, code_revision=None,
            config_format="auto", max_model_len=512, quantization=None, dtype=torch.bfloat16, seed=0,
        )  # fmt: skip
        return types.SimpleNamespace(
            model_config=types.SimpleNamespace(**{**model, **fields}),
            cache_config=types.SimpleNamespace(**(cache or {"cache_dtype": "auto"})),
            load_config=types.SimpleNamespace(load_format=load_format),
        )

    def key(self, *arguments, **fields):
        return fingerprint(self.engine(*arguments, **fields), torch.bfloat16)[0]

    def test_a_model_as_its_files_say_has_the_fingerprint_of_its_files(self):
        path = self.directory()
        self.assertEqual(deviations(self.engine(path), torch.bfloat16), {})
        self.assertEqual(self.key(path), model_fingerprint(path))
        for same in (dict(max_model_len=64), dict(overrides={"use_cache": False})):
            self.assertEqual(self.key(path, **same), model_fingerprint(path), same)

    def test_whatever_changes_the_computation_changes_the_key(self):
        path = self.directory()
        other = self.directory("other", rope_theta=5000.0)

        def change(config):
            config.rms_norm_eps = 0.5
            return config

        variants = {
            "as it is": self.key(path),
            "override": self.key(path, overrides={"rope_theta": 20000.0}),
            "another config": self.key(path, config_path=other),
            "function": self.key(path, function=change),
            "quantized on the fly": self.key(path, quantization="fp8"),
            "by a name that says little": self.key(
                path, quantization="online", quantization_config=QuantizationConfigArgs()
            ),
            **{
                f"{kind} {method}": self.key(
                    path, quantization="online", quantization_config=QuantizationConfigArgs(**{kind: method})
                )
                for kind in ("linear", "moe")
                for method in ("fp8_per_tensor", "mxfp8")
            },
            "float32 model, bf16 cache": self.key(path, dtype=torch.float32),
            "KV dtype": self.key(path, cache=dict(cache_dtype="fp8", calculate_kv_scales=False)),
            "KV scales": self.key(path, cache=dict(cache_dtype="fp8", calculate_kv_scales=True)),
            "dummy": self.key(path, load_format="dummy"),
            "another dummy": self.key(path, load_format="dummy", seed=1),
        }
        self.assertEqual(len(set(variants.values())), len(variants), variants)

    def test_what_is_quantized_on_the_fly_beside_what_the_files_quantize_counts(self):
        path = self.directory(quantization_config={"quant_method": "awq", "bits": 4})
        as_it_is = dict(quantization="awq", quantization_config=None)
        self.assertEqual(self.key(path, **as_it_is), model_fingerprint(path))
        found = {
            self.key(path, **as_it_is | {"quantization_config": {"moe": moe}}) for moe in ("mxfp8", "fp8_per_tensor")
        }
        self.assertEqual(len(found | {model_fingerprint(path)}), 3)

    def test_of_two_sets_of_weights_in_a_directory_it_counts_which_one_is_loaded(self):
        path = self.directory()
        for load_format in ("auto", "hf", "safetensors", "mistral"):
            self.assertEqual(self.key(path, load_format=load_format), model_fingerprint(path))
        with open(os.path.join(path, "consolidated.safetensors"), "wb") as file:
            file.write(b"other weights")
        found = [self.key(path, load_format=load_format) for load_format in ("auto", "mistral", "hf")]
        self.assertEqual([one == model_fingerprint(path) for one in found], [True, True, False])

    def test_what_may_be_read_in_place_of_config_json_counts(self):
        path = self.directory()
        found = [self.key(path)]
        names = ("params.json", "hf_quant_config.json", "my_quant_config.json", "quantization_config.json")
        for name in names:
            for theta in (1, 2):
                with open(os.path.join(path, name), "w") as file:
                    json.dump({"rope_theta": theta}, file)
                found.append(self.key(path))
            os.remove(os.path.join(path, name))
        self.assertEqual(len(set(found)), 9)
        self.assertEqual(self.key(path), found[0])

    def test_an_fp8_cache_is_no_other_model(self):
        path = self.directory()
        for cache_dtype in ("fp8", "fp8_e4m3", "fp8_e5m2"):
            for dtype in (torch.bfloat16, torch.float16):
                engine = self.engine(path, cache=dict(cache_dtype=cache_dtype), dtype=dtype)
                self.assertEqual(deviations(engine, torch.uint8), {})
        for cache_dtype in ("nvfp4", "fp8_per_token_head"):
            self.assertIn(
                "cache_dtype", deviations(self.engine(path, cache=dict(cache_dtype=cache_dtype)), torch.uint8)
            )

    def test_what_an_override_function_does_counts_and_not_where_it_lies(self):
        path = self.directory()

        def made():
            def change(config):
                config.rms_norm_eps = 0.5
                return config

            return change

        self.assertEqual(self.key(path, function=made()), self.key(path, function=made()))
        self.assertEqual(self.key(path, function=made()), self.key(path, overrides={"rms_norm_eps": 0.5}))

    def test_longrope_depends_on_which_factors_the_models_length_chooses(self):
        path = self.directory("long", rope_scaling=LONGROPE, original_max_position_embeddings=128)
        of = {length: self.key(path, max_model_len=length) for length in (64, 128, 129, 512)}
        self.assertEqual((of[64], of[128], of[129]), (model_fingerprint(path), of[64], of[512]))
        self.assertEqual(of[512], model_fingerprint(path, {"longrope": "long"}))
        self.assertNotEqual(of[128], of[129])
        nested = self.directory(
            "nested",
            rope_parameters={"full_attention": {**LONGROPE, "rope_theta": 1e4}},
            original_max_position_embeddings=128,
        )
        self.assertIn("longrope", deviations(self.engine(nested), torch.bfloat16))

    def test_a_window_as_long_as_any_prompt_may_be_taken_away(self):
        def disable(config):  # as vLLM does with --disable-sliding-window
            config.get_text_config().sliding_window = None
            return config

        plain = dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=128)
        nested = dict(
            architectures=["LlavaForConditionalGeneration"], model_type="llava", text_config={**CONFIG, **plain}
        )
        by_kind = {**plain, "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4"}
        for name, config, is_same in (("plain", plain, True), ("nested", nested, True), ("by kind", by_kind, False)):
            path = self.directory(name, **config)
            for length in (128, 129):
                with self.subTest(name, max_model_len=length):
                    self.assertEqual(self.key(path, max_model_len=length), model_fingerprint(path))
                    found = deviations(self.engine(path, function=disable, max_model_len=length), torch.bfloat16)
                    self.assertEqual(found == {}, is_same and length == 128, found)

    def test_what_vllm_s_code_of_a_model_writes_while_it_builds_it_is_no_deviation(self):
        """With tensor parallelism the scheduler's configuration is not written to: both must have one fingerprint."""

        def write_max_model_len(config):  # minimax_m2.py
            config.max_model_len = 512

        def write_falcon(config):
            config.num_ln_in_parallel_attn = 2

        def write_bailing(config):
            config.rope_parameters["partial_rotary_factor"] = 1.0

        def write_llava(config):
            config.text_config.architectures = ["MistralForCausalLM"]

        images = dict(text_config={"model_type": "mistral"}, vision_config={"model_type": "clip_vision_model"})
        for kind, write, fields in (
            ("minimax_m2", write_max_model_len, {}),
            ("falcon", write_falcon, {"new_decoder_architecture": True}),
            ("bailing_moe", write_bailing, {}),
            ("llava", write_llava, images),
        ):
            with self.subTest(kind):
                path = self.directory(kind, model_type=kind, **fields)
                engine = self.engine(path)
                self.assertEqual(deviations(engine, torch.bfloat16), {})
                before = json.dumps(engine.model_config.hf_config.to_dict(), default=str)
                write(engine.model_config.hf_config)
                self.assertNotEqual(json.dumps(engine.model_config.hf_config.to_dict(), default=str), before)
                self.assertEqual(deviations(engine, torch.bfloat16), {})

    def test_what_vllm_s_start_writes_is_no_deviation(self):
        path = self.directory(tie_word_embeddings=True, sliding_window=0)
        header = json.dumps({"lm_head.weight": {"dtype": "BF16", "shape": [128, 64], "data_offsets": [0, 16384]}})
        with open(os.path.join(path, "model.safetensors"), "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header.encode() + bytes(16384))
        made = ModelConfig(model=path, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64)
        engine = VllmConfig(model_config=made)
        self.assertEqual((made.hf_config.tie_word_embeddings, made.hf_config.sliding_window), (False, None))
        self.assertEqual(deviations(engine, torch.bfloat16), {})

    def test_so_is_another_name_of_how_the_files_quantize(self):
        def rename(config):
            GptOssForCausalLMConfig.verify_and_update_model_config(
                types.SimpleNamespace(hf_config=config, hf_text_config=config)
            )
            return config

        quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        path = self.directory(architectures=["GptOssForCausalLM"], model_type="gpt_oss", quantization_config=quantized)
        for fields in ({}, {"function": rename}):
            engine = self.engine(path, quantization="gpt_oss_mxfp4", **fields)
            self.assertNotIn("config", deviations(engine, torch.bfloat16))
        self.assertEqual(engine.model_config.hf_config.quantization_config["quant_method"], "gpt_oss_mxfp4")

    def test_the_same_by_somebody_else_is_one(self):
        for kind, overrides in (
            ("llama", {"max_model_len": 512}),
            ("falcon", {"num_ln_in_parallel_attn": 2}),  # of the old architecture
            ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
            ("bailing_moe", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        ):
            with self.subTest(kind, **overrides):
                path = self.directory(kind, model_type=kind)
                self.assertIn("config", deviations(self.engine(path, overrides=overrides), torch.bfloat16))
        path = self.directory("minimax_m2", model_type="minimax_m2")
        long = self.engine(path, overrides={"max_model_len": 513}, max_model_len=513)
        self.assertEqual(deviations(long, torch.bfloat16), {"config": {"max_model_len": 513}})

    def test_kinds_of_rope_that_nobody_knows_may_depend_on_the_models_length(self):
        path = self.directory("unknown", rope_parameters={"rope_type": "openpangu", "rope_theta": 1e4})
        self.assertIn("max_model_len", deviations(self.engine(path), torch.bfloat16))

    def test_text_of_a_value_holds_no_address(self):
        self.assertEqual(as_text([object(), len]), as_text([object(), len]))
        self.assertNotIn("0x", as_text([object(), lambda: 0, torch.bfloat16]))

    def test_text_of_a_value_tells_all_of_it(self):
        values = [
            {1, 2},
            {1, 3},
            b"a",
            b"b",
            torch.bfloat16,
            torch.float16,
            *(types.SimpleNamespace(x=x) for x in (1, 2)),
        ]
        self.assertEqual(len({as_text(value) for value in values}), len(values))


class ImageKeyTest(unittest.TestCase):
    """What an engine makes of images."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def key(self, prefix_caching=True, **settings):
        images = MultiModalConfig(**settings)
        return image_key(
            types.SimpleNamespace(
                model_config=types.SimpleNamespace(model=self.folder, multimodal_config=images),
                cache_config=types.SimpleNamespace(enable_prefix_caching=prefix_caching),
            )
        )

    def write(self, name, content):
        with open(os.path.join(self.folder, name), "w") as file:
            json.dump(content, file)

    def test_settings_and_files_of_the_processor_count(self):
        scales = os.path.join(self.folder, "scales.json")
        self.write("scales.json", {"layer": 1})
        fp8 = dict(mm_encoder_attn_dtype="fp8")
        found = [
            self.key(), self.key(mm_processor_kwargs={"num_crops": 4}), self.key(mm_processor_kwargs={"num_crops": 8}),
            self.key(media_io_kwargs={"video": {"num_frames": 40}}), self.key(video_pruning_rate=0.5),
            self.key(video_pruning_rate=0.5, video_pruning_method="vidcom2"), self.key(**fp8),
            self.key(mm_encoder_fp8_scale_path=scales, **fp8),
        ]  # fmt: skip
        self.write("scales.json", {"layer": 2})
        found.append(self.key(mm_encoder_fp8_scale_path=scales, **fp8))
        for name in ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"):
            for size in (336, 448):
                self.write(name, {"size": size})
                found.append(self.key())
        self.assertEqual(len(set(found)), len(found), found)

    def test_what_only_rounds_or_says_where_is_not_in_it(self):
        self.assertEqual(self.key(), "")
        for name, value in (
            ("mm_processor_kwargs", {"device": "cuda"}), ("mm_device_do_normalize", False),
            ("mm_processor_cache_gb", 1),
        ):  # fmt: skip
            self.assertEqual(self.key(**{name: value}), "", name)

    def test_an_engine_that_caches_no_images_numbers_them(self):
        for cache_gb, prefix_caching, is_keyed in (
            (0, False, False),
            (0, None, False),
            (0, True, True),
            (4, False, True),
        ):
            self.assertEqual(self.key(prefix_caching, mm_processor_cache_gb=cache_gb) is not None, is_keyed)
        text = types.SimpleNamespace(model_config=types.SimpleNamespace(multimodal_config=None))
        self.assertEqual(image_key(text), "")


class WeightsCheckTest(unittest.TestCase):
    """Weights that are too large for the fingerprint to hold all of them."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        with open(os.path.join(self.folder, "model.safetensors"), "wb") as file:
            file.write(b"weights")
        self.digest = weights_digest(self.folder)

    def checked(self, digest, expected_log, read=weights_digest, whole_bytes=0):
        """The doubts while the weights are read, and afterwards; what is logged at the end."""
        may_read = threading.Event()

        def read_when_told(directory):
            may_read.wait()
            return read(directory)

        with (
            mock.patch("cachegen.fingerprint.WHOLE_BYTES", whole_bytes),
            mock.patch("cachegen.vllm.model_key.weights_digest", read_when_told),
            self.assertLogs(guard.logger, "INFO") as log,
        ):
            guard.logger.info("so that there is a line")
            check = WeightsCheck(self.folder, digest)
            before = check.doubt
            may_read.set()
            for thread in threading.enumerate():
                if thread.name == "cachegen-weights":
                    thread.join()
        self.assertIn(expected_log, log.output[-1])
        return before, check.doubt

    def test_there_is_doubt_until_all_is_read_and_then_where_it_differs(self):
        self.assertEqual(self.checked(self.digest, "are the store's"), (UNCHECKED, None))
        self.assertEqual(
            self.checked("0" * 32, f"the weights are {self.digest}, model.json has 0000"), (UNCHECKED, OTHER)
        )

    def test_weights_that_cannot_be_read_stay_in_doubt(self):
        def broken(_directory):
            raise OSError("a bad disk")

        self.assertEqual(self.checked(self.digest, "a bad disk", broken), (UNCHECKED, UNCHECKED))

    def test_nothing_is_read_that_nobody_asks_for_or_the_fingerprint_has(self):
        self.assertEqual(self.checked(None, "so that there is a line"), (None, None))
        self.assertEqual(self.checked("0" * 32, "so that there is a line", whole_bytes=1 << 20), (None, None))

    def test_a_store_asks_with_a_digest_in_its_model_json(self):
        self.assertIsNone(digest_of(self.folder, 60))
        for text, found in ((json.dumps({"weights_digest": self.digest}), self.digest), ("{}", None)):
            with open(os.path.join(self.folder, "model.json"), "w") as file:
                file.write(text)
            self.assertEqual(digest_of(self.folder, 60), found)
        for text in ('{"weights_digest": 7}', '{"weights_digest": "ABC"}', "[]", "{"):
            with open(os.path.join(self.folder, "model.json"), "w") as file:
                file.write(text)
            with self.subTest(text), self.assertRaisesRegex(Unsupported, "model.json"):
                digest_of(self.folder, 60)

    def test_a_store_that_hangs_does_not_hold_up_the_start(self):
        path = os.path.join(self.folder, "model.json")
        os.mkfifo(path)  # to open one waits for its other end
        self.assertRaisesRegex(Unsupported, "does not answer", digest_of, self.folder, 0.01)
        with open(path, "w"):  # lets go who waits
            pass


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
ROPES = {
    "plain": {"rope_type": "default"},
    "plain, part of a head": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 128},
    "yarn": YARN,
    "yarn, with all that it can be given":
        {**YARN, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.5},
    "yarn, with fractions of dimensions, scaled by hand": {**YARN, "truncate": False, "attention_factor": 1.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "dynamic, of a shorter training": {"rope_type": "dynamic", "factor": 4.0, "max_trained_positions": 100},
    "dynamic by alpha": {"rope_type": "dynamic", "alpha": 1000.0},
    "mrope": {"rope_type": "mrope", "mrope_section": [4, 2, 2]},
    "longrope": LONGROPE | {"long_factor": [1.5 + i for i in range(8)]},
    "longrope, each with a scale": LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3},
}  # fmt: skip


class RopeTest(unittest.TestCase):
    """cachegen.rope against vLLM's own modules. HEAD_DIM and lengths are those of CONFIG."""

    HEAD_DIM, LENGTH = 16, 512

    def config(self, rope):
        config = transformers.LlamaConfig(**{key: CONFIG[key] for key in CONFIG if key != "rope_theta"})
        config.rope_parameters = {"rope_theta": 1e4, **rope}
        if rope["rope_type"] == "longrope":
            config.original_max_position_embeddings = 128
        return config

    def of_vllm(self, rope, max_model_len, positions, k):
        """k, as vLLM's module turns it."""
        parameters = {"rope_theta": 1e4, **rope}
        patch_legacy_rope_type(parameters)
        length = types.SimpleNamespace(model_config=types.SimpleNamespace(max_model_len=max_model_len))
        with (
            set_current_vllm_config(VllmConfig()),
            mock.patch.object(phi3_long_rope_scaled_rope, "get_current_vllm_config", lambda: length),
        ):
            _ROPE_DICT.clear()
            module = get_rope(self.HEAD_DIM, self.LENGTH, True, parameters, dtype=torch.float32)
            if rope["rope_type"] == "mrope":
                positions = positions[None].expand(3, -1)  # as all tokens of text have
            forward = getattr(module, "forward_native", module.forward)
            return forward(positions, k.flatten(1).clone(), k.flatten(1).clone())[1].view(k.shape)

    def test_k_is_turned_as_vllm_turns_it(self):
        for name, parameters in ROPES.items():
            for length in (128, self.LENGTH):
                k = torch.randn(length, 2, self.HEAD_DIM, generator=torch.Generator().manual_seed(2))
                positions = torch.arange(length)
                with self.subTest(name, max_model_len=length):
                    config = self.config(parameters)
                    fix_rope(config, length)
                    rope = rope_of(config, self.HEAD_DIM)
                    self.assertEqual(rope_from_json(json.loads(json.dumps(rope.as_json()))).as_json(), rope.as_json())
                    turned = self.of_vllm(parameters, length, positions, k)
                    back = rope.rotate(turned, positions, inverse=True)
                    scale = turned[0] / k[0]  # YaRN and LongRoPE have one
                    torch.testing.assert_close(back, k * scale, atol=2e-3, rtol=0)

    def test_longrope_takes_other_factors_for_longer_models(self):
        config, turns = self.config(ROPES["longrope"]), []
        self.assertEqual([longrope_factors(config, n) for n in (None, 128, 129)], ["short", "short", "long"])
        for length in (128, 129):
            config = self.config(ROPES["longrope"])
            fix_rope(config, length)
            turns.append(rope_of(config, self.HEAD_DIM).inv_freq)
        self.assertFalse(torch.equal(*turns))
        with self.assertRaisesRegex(UnsupportedModel, "not chosen"):
            rope_of(self.config(ROPES["longrope"]), self.HEAD_DIM)

    def test_what_is_no_fixed_rotation_is_refused_by_name(self):
        for refused, parameters in {
            "openpangu": {"rope_type": "openpangu"},
            "proportional": {"rope_type": "proportional"},
            "yarn": {"rope_type": "yarn"},  # without a factor
            "longrope": LONGROPE | {"long_factor": [2.0] * 3},
        }.items():
            with self.subTest(refused), self.assertRaisesRegex(UnsupportedModel, refused):
                config = self.config(parameters)
                fix_rope(config, self.LENGTH)
                rope_of(config, self.HEAD_DIM)


class AttentionTest(unittest.TestCase):
    def spec(self, **fields):
        return FullAttentionSpec(
            **{**dict(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16), **fields}
        )

    def test_full_causal_attention_is_taken(self):
        check_attention(self.spec(), 4096)
        check_attention(self.spec(head_size_v=64), 4096)

    def test_windows_are_taken_where_all_tokens_are_kept(self):
        check_attention(self.spec(sliding_window=128), 4096)
        sizes = dict(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
        # What vLLM makes of a model that has both, for a connector that does not ask for the hybrid manager.
        layers = {"full": self.spec(), "window": SlidingWindowSpec(sliding_window=128, **sizes)}
        unify_hybrid_kv_cache_specs(layers)
        check_attention(FullAttentionSpec.merge(list(layers.values())), 4096)

    def test_windows_of_all_layers_are_taken_where_no_prompt_is_longer(self):
        sizes = dict(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
        spec = SlidingWindowSpec(sliding_window=4096, **sizes)
        check_attention(spec, 4096)
        with self.assertRaisesRegex(Unsupported, "window of 4096 tokens in all layers, and a max_model_len of 4097"):
            check_attention(spec, 4097)
        with self.assertRaisesRegex(Unsupported, "head_size_v"):
            check_attention(SlidingWindowSpec(sliding_window=4096, head_size_v=32, **sizes), 4096)

    def test_every_other_kind_is_refused_by_name(self):
        for name, value in {
            "non_causal": True, "attention_chunk_size": 64, "head_size_v": 32,
            "page_size_padded": 1 << 20, "num_head_slots": 1, "state_content_bytes": 8, "tokens_per_state": 2,
            "is_draft": True,
        }.items():  # fmt: skip
            if name not in FullAttentionSpec.__dataclass_fields__:
                continue
            with self.subTest(name), self.assertRaisesRegex(Unsupported, name):
                check_attention(self.spec(**{name: value}), 4096)

    def test_what_a_later_vllm_says_of_each_layer_is_taken_where_it_changes_nothing(self):
        later = types.SimpleNamespace(**{**vars(self.spec()), "is_draft": False})
        with mock.patch("cachegen.vllm.library.FullAttentionSpec", types.SimpleNamespace):
            check_attention(later, 4096)
            later.is_draft = True
            with self.assertRaisesRegex(Unsupported, "is_draft"):
                check_attention(later, 4096)

    def test_weights_that_lie_elsewhere_are_refused_by_name(self):
        def check(load_format="auto", extra=None, elsewhere=""):
            check_weights(
                types.SimpleNamespace(
                    load_config=LoadConfig(load_format=load_format, model_loader_extra_config=extra or {}),
                    model_config=types.SimpleNamespace(model_weights=elsewhere),
                )
            )

        for load_format in ("auto", "hf", "safetensors", "mistral", "dummy"):
            check(load_format)
        check(extra={"enable_multithread_load": True, "num_threads": 4})
        for load_format in ("pt", "npcache", "tensorizer", "sharded_state", "ipc_cache", "modelexpress", "of_a_plugin"):
            with self.subTest(load_format), self.assertRaisesRegex(Unsupported, f"load_format '{load_format}'"):
                check(load_format)
        with self.assertRaisesRegex(Unsupported, "tensorizer_uri"):
            check(extra={"tensorizer_uri": "s3://bucket"})
        with self.assertRaisesRegex(Unsupported, "s3://bucket"):
            check(elsewhere="s3://bucket")

    def test_drafts_with_a_kv_cache_of_their_own_are_refused(self):
        def check(method):
            speculative = SpeculativeConfig.__new__(SpeculativeConfig)
            speculative.method = method
            check_speculation(types.SimpleNamespace(speculative_config=speculative))

        check_speculation(types.SimpleNamespace(speculative_config=None))
        for method in ("ngram", "suffix"):
            check(method)
        for method in ("eagle", "eagle3", "mtp", "draft_model", "custom_class"):
            with self.subTest(method), self.assertRaisesRegex(Unsupported, f"speculative decoding by '{method}'"):
                check(method)
        model_config = types.SimpleNamespace(enable_sleep_mode=False, model_weights=None, runner_type="generate")
        load_config = types.SimpleNamespace(load_format="auto", model_loader_extra_config=None)
        speculative = types.SimpleNamespace(method="eagle", uses_draft_kv_cache=lambda: True)
        engine = types.SimpleNamespace(
            model_config=model_config, load_config=load_config, speculative_config=speculative
        )
        with self.assertRaisesRegex(Unsupported, "'eagle'"):
            _configuration({}, engine, None, None)

    def test_engines_that_sleep_are_refused(self):
        engine = types.SimpleNamespace(model_config=types.SimpleNamespace(enable_sleep_mode=True))
        with self.assertRaisesRegex(Unsupported, "enable_sleep_mode"):
            _configuration({}, engine, None, None)

    def test_pooling_models_whose_prompts_vllm_computes_in_one_step_are_refused(self):
        def check(runner_type, is_prefix_caching_supported):
            model_config = types.SimpleNamespace(enable_sleep_mode=False, runner_type=runner_type)
            model_config.is_prefix_caching_supported = is_prefix_caching_supported
            load_config = types.SimpleNamespace(load_format="pt", model_loader_extra_config=None)
            _configuration({}, types.SimpleNamespace(model_config=model_config, load_config=load_config), None, None)

        with self.assertRaisesRegex(Unsupported, "a pooling model"):
            check("pooling", False)
        for taken in (("pooling", True), ("generate", False)):
            with self.subTest(taken), self.assertRaisesRegex(Unsupported, "pt"):  # the next that is looked at
                check(*taken)

    def test_kinds_that_are_not_known_yet_are_refused(self):
        class Other(FullAttentionSpec):
            pass

        with self.assertRaisesRegex(Unsupported, "Other"):
            check_attention(Other(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16), 4096)
        with self.assertRaisesRegex(Unsupported, "float8"):
            check_attention(self.spec(dtype=torch.float8_e4m3fn), 4096)


if __name__ == "__main__":
    unittest.main(verbosity=2)
