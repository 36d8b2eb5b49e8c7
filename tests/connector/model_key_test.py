"""What of an engine's configuration changes the key of its KV, with vLLM's own reading of config.json.

usage: model_key_test.py
"""

import json
import os
import sys
import tempfile
import types
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "connector"))
try:
    import torch
    from vllm.transformers_utils.config import get_config
    from vllm.v1.kv_cache_interface import FullAttentionSpec
except ImportError as error:
    print(f"skipped: {error}: no key was made")
    sys.exit(1 if "engine" in os.environ.get("CG_TEST_REQUIRE", "").split(",") else 77)
from cachegen.fingerprint import model_fingerprint  # noqa: E402
from cachegen.vllm.library import Unsupported, check_attention  # noqa: E402
from cachegen.vllm.model_key import as_text, deviations, fingerprint  # noqa: E402

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "intermediate_size": 128,
    "max_position_embeddings": 512, "rope_theta": 10000.0,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 128,
}  # fmt: skip


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
            "float32 model, bf16 cache": self.key(path, dtype=torch.float32),
            "KV dtype": self.key(path, cache=dict(cache_dtype="fp8", calculate_kv_scales=False)),
            "KV scales": self.key(path, cache=dict(cache_dtype="fp8", calculate_kv_scales=True)),
            "dummy": self.key(path, load_format="dummy"),
            "another dummy": self.key(path, load_format="dummy", seed=1),
        }
        self.assertEqual(len(set(variants.values())), len(variants), variants)

    def test_what_an_override_function_does_counts_and_not_where_it_lies(self):
        path = self.directory()

        def made():
            def change(config):
                config.rms_norm_eps = 0.5
                return config

            return change

        self.assertEqual(self.key(path, function=made()), self.key(path, function=made()))
        self.assertEqual(self.key(path, function=made()), self.key(path, overrides={"rms_norm_eps": 0.5}))

    def test_longrope_depends_on_the_models_length(self):
        path = self.directory("long", rope_scaling=LONGROPE)
        short, long = (self.key(path, max_model_len=length) for length in (128, 512))
        self.assertNotEqual(short, long)
        nested = self.directory("nested", rope_parameters={"full_attention": {**LONGROPE, "rope_theta": 1e4}})
        self.assertIn("max_model_len", deviations(self.engine(nested), torch.bfloat16))

    def test_text_of_a_value_holds_no_address(self):
        self.assertEqual(as_text([object(), len]), as_text([object(), len]))
        self.assertNotIn("0x", as_text([object(), lambda: 0, torch.bfloat16]))

    def test_text_of_a_value_tells_all_of_it(self):
        values = [{1, 2}, {1, 3}, b"a", b"b", torch.bfloat16, torch.float16, *(types.SimpleNamespace(x=x) for x in (1, 2))]
        self.assertEqual(len({as_text(value) for value in values}), len(values))


class AttentionTest(unittest.TestCase):
    def spec(self, **fields):
        return FullAttentionSpec(**{**dict(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16), **fields})

    def test_full_causal_attention_is_taken(self):
        check_attention(self.spec())
        check_attention(self.spec(head_size_v=64))

    def test_every_other_kind_is_refused_by_name(self):
        for name, value in {
            "non_causal": True, "sliding_window": 128, "attention_chunk_size": 64, "head_size_v": 32,
            "page_size_padded": 1 << 20, "num_head_slots": 1, "state_content_bytes": 8, "tokens_per_state": 2,
        }.items():  # fmt: skip
            if name not in FullAttentionSpec.__dataclass_fields__:
                continue
            with self.subTest(name), self.assertRaisesRegex(Unsupported, name):
                check_attention(self.spec(**{name: value}))

    def test_kinds_that_are_not_known_yet_are_refused(self):
        class Other(FullAttentionSpec):
            pass

        with self.assertRaisesRegex(Unsupported, "Other"):
            check_attention(Other(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16))
        with self.assertRaisesRegex(Unsupported, "float8"):
            check_attention(self.spec(dtype=torch.float8_e4m3fn))


if __name__ == "__main__":
    unittest.main(verbosity=2)
