"""Kinds of models, tiny and random: their KV through the codec and back, and what they say from it.

usage: models_test.py CGTOOL
Random weights show structure only: rotation, order of layers and heads, means, windows. Not quality.
"""

import os
import shutil
import tempfile
import unittest

import profile_test as tiny  # skips without torch and transformers
import torch
import transformers
from cachegen.command import Progress
from cachegen.contexts import Caches
from cachegen.klt import Matrices, Planes
from cachegen.kv_model import Context, KvModel
from cachegen.make_profile import calibrate, make_profile
from safetensors.torch import load_file, save_file

N_TOKENS, N_CONTINUATION = 1024, 48  # tokens: more than channels in a group, which its basis is made from
WINDOW = 40  # tokens, less than the context has
MATRICES = Matrices([2, 1], True)
STEPS = (0.02, 0.06, 0.18)  # of the levels, as shares of the typical weighted channel
LARGEST_KL = 5e-2  # at L1; random weights answer loudly
LEAST_MISTAKE = 3  # in units of the divergence at L1

MODELS = {
    "Llama, GQA, head 64": lambda: tiny.config("Llama", num_key_value_heads=2, head_dim=64),
    "Llama, GQA, head 128": lambda: tiny.config("Llama", num_key_value_heads=2, head_dim=128),
    "Llama, MQA, head 256": lambda: tiny.config("Llama", num_key_value_heads=1, head_dim=256),
    "Qwen2, biased keys": lambda: tiny.config("Qwen2", num_key_value_heads=2, hidden_size=256),
    "Qwen2, windows in the last layers": lambda: tiny.config(
        "Qwen2", num_key_value_heads=2, hidden_size=256, use_sliding_window=True, sliding_window=WINDOW,
        max_window_layers=1),
    "Qwen3, normed keys": lambda: tiny.config("Qwen3", num_key_value_heads=2, head_dim=64),
    "Mistral, windows in all layers": lambda: tiny.config(
        "Mistral", num_key_value_heads=2, head_dim=64, sliding_window=WINDOW),
    "Gemma2, windows in every other layer": lambda: tiny.config(
        "Gemma2", num_key_value_heads=2, head_dim=64, query_pre_attn_scalar=64, sliding_window=WINDOW),
    "Gemma3, windows with a rope of their own": lambda: tiny.config(
        "Gemma3Text", num_key_value_heads=2, head_dim=64, query_pre_attn_scalar=64, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "SmolLM3, layers without rope": lambda: tiny.config(
        "SmolLM3", num_key_value_heads=2, hidden_size=256, no_rope_layers=[1, 0, 1], pad_token_id=None),
    "Qwen2-VL, which sees images": lambda: transformers.Qwen2VLConfig(
        text_config={
            **tiny.SMALL, "num_key_value_heads": 2, "hidden_size": 256, "initializer_range": 0.1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}},
        vision_config=dict(depth=1, embed_dim=32, hidden_size=256, num_heads=2)),
}  # fmt: skip


class ModelsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name):
        return os.path.join(self.folder, name)

    def write_profile(self, model, context, x):
        """The mean [2][n_layers][1][C] of the Profile that is written, made of the context itself."""
        caches, progress = Caches(model, 1 << 30), Progress(quiet=True)
        moments = calibrate(model, caches, [context], MATRICES, progress)
        mean, weight = (a.transpose(0, 1)[:, :, None] for a in (moments.mean(), moments.weight(model.head_dim)))
        size = ((x - mean) * weight).pow(2).mean().sqrt().item()
        steps = [(size * share, size * share) for share in STEPS]
        made = make_profile(model, "00" * 16, caches, [context], MATRICES, steps, 8, progress, block_steps=True)
        with open(self.path("cgp"), "wb") as file:
            file.write(made.to_bytes())
        return mean

    def coded(self, level):
        shutil.rmtree(self.path("kv"), ignore_errors=True)
        tiny.run_cgtool("encode", "--level", level, "--profile", self.path("cgp"), self.path("in.safetensors"),
                        self.path("kv"))  # fmt: skip
        tiny.run_cgtool("decode", "--profile", self.path("cgp"), self.path("kv"), self.path("out.safetensors"))
        out = load_file(self.path("out.safetensors"))
        return out["K"], out["V"]

    def mistakes(self, model, mean, k, v):
        """K and V as a codec would give them that errs in one thing."""
        yield "no rotation", model.rope.rotate(k, torch.arange(k.shape[1]), inverse=True), v
        yield "layers of K swapped", k.roll(1, 0), v
        yield "layers of V swapped", k, v.roll(1, 0)
        if model.n_kv_heads > 1:
            yield "heads of K swapped", k.roll(1, 2), v
            yield "heads of V swapped", k, v.roll(1, 2)
        planes = Planes(model)
        k_without, v_without = planes.heads(planes.flat(k, v) - mean)
        yield "mean of K missing", k_without, v
        yield "mean of V missing", k, v_without

    def check(self, make_config):
        tiny.make_model(self.path("model"), make_config())
        model = KvModel(self.path("model"), dtype=torch.float32)
        ids = torch.randint(256, (N_TOKENS + N_CONTINUATION,), generator=torch.Generator().manual_seed(11))
        context = Context("random", ids, N_TOKENS)
        k, v = model.prefill(context)
        mean = self.write_profile(model, context, Planes(model).flat(k, v))
        save_file({"K": k.contiguous(), "V": v.contiguous(), "tokens": ids[:N_TOKENS].int()},
                  self.path("in.safetensors"))  # fmt: skip
        with torch.no_grad():
            reference = model.log_probs(context, k, v)
            at_once = model.model(ids[None]).logits[0, N_TOKENS:].float().log_softmax(-1)
            torch.testing.assert_close(reference, at_once, atol=2e-3, rtol=0)  # the cache is all that the model needs

            def divergence(k, v):
                return (reference.exp() * (reference - model.log_probs(context, k, v))).sum(-1).mean().item()

            exact = self.coded("L0")
            self.assertTrue(torch.equal(exact[0], k) and torch.equal(exact[1], v), "L0 is exact")
            self.assertTrue(torch.equal(model.log_probs(context, *exact), reference))
            found = divergence(*self.coded("L1"))
            self.assertLess(found, LARGEST_KL)
            for what, wrong_k, wrong_v in self.mistakes(model, mean, k, v):
                self.assertGreater(divergence(wrong_k, wrong_v), LEAST_MISTAKE * found, what)

    def test_models_go_on_from_decoded_caches_as_from_their_own(self):
        for name, make_config in MODELS.items():
            with self.subTest(name):
                self.check(make_config)


if __name__ == "__main__":
    tiny.main()
