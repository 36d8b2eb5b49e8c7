"""A causal language model as the profile tool sees it: KV caches out, log-likelihoods given a cache, their gradients.

Needs torch and transformers. K and V are [n_layers][n_tokens][n_kv_heads][head_dim], K rotated, as engines hold it.
They are of the cache's type (dtype) even where the model computes in another one (compute_dtype), which only is faster:
K and V are rounded on their way out, as an engine's cache would round them.
Layers with a sliding window keep the K and V of all tokens, like the others: the window is the attention mask's. So a
DynamicCache is made without the configuration, with which it would cut these layers to their window.
"""

import contextlib
from dataclasses import dataclass, replace
from inspect import signature

import torch

from . import Unsupported
from .compute_type import dtype_name, faster_dtype
from .rope import Rope, fix_rope, longest_prompt, rope_deviations, rope_of, text_config

REFERENCE_TOKENS = 3072  # Fisher information is scaled to a context of this length
_FIRST_QUERIES = 64  # are left out of their mean: those tokens have little to attend to
# Arguments of what is no plain softmax of scores.
_ODD_ATTENTION = ("sliding_window", "softcap", "s_aux", "position_bias")
FISHER_DRAWS = 4  # continuations of a context: one is noisy, and the weights come from few contexts


class ModelError(ValueError):
    """What a model that runs has ended with, in a line: out of memory, for example."""


@contextlib.contextmanager
def _running():
    try:
        yield
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        raise ModelError(": ".join(filter(None, (type(error).__name__, text)))) from error


@dataclass
class Context:
    """A stretch of text: n tokens whose KV is coded, and what follows them. Its name is its own among them."""

    name: str
    ids: torch.Tensor
    n: int


def _refuse_by_config(config):
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported("an encoder-decoder model")
    if getattr(config, "kv_lora_rank", None):
        raise Unsupported("multi-head latent attention (MLA)")
    layer_types = getattr(config, "layer_types", None) or []
    kinds = set(layer_types) - {"full_attention", "attention", "sliding_attention"}
    if kinds:
        raise Unsupported(f"layers of the kind {', '.join(sorted(kinds))}")
    if getattr(config, "new_decoder_architecture", False) and config.num_kv_heads != config.num_attention_heads:
        raise Unsupported("Falcon's new decoder architecture, whose K and V transformers keeps once a query head")
    if getattr(config, "num_kv_shared_layers", 0):
        raise Unsupported("layers that share the K and V of others (num_kv_shared_layers in its configuration)")
    for name in ("head_dim", "num_key_value_heads"):
        try:
            getattr(config, name, None)
        except RuntimeError as e:  # of Gemma 4's configuration, which has one for each layer
            raise Unsupported(f"layers that differ in {name}") from e
    if layer_types:  # all attention: the rest of a configuration is no layer's, as in Granite 4.0's dense models
        return
    for name in ("mamba_d_state", "ssm_state_size", "linear_num_key_heads", "attn_layer_period"):
        if getattr(config, name, None):
            raise Unsupported(f"a hybrid model ({name} in its configuration)")


def auto_class(config):
    """The class of transformers that loads a model of this configuration as one that answers with text. Some that see
    images, too, are not among the causal language models there."""
    import transformers as t

    is_other = type(config) in t.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    is_other = is_other and type(config) not in t.MODEL_FOR_CAUSAL_LM_MAPPING
    return t.AutoModelForImageTextToText if is_other else t.AutoModelForCausalLM


class _MeanQueries:
    """Of a forward pass that runs while this is entered: the mean of what each head asks with.

    The functions that transformers computes attention with are given the queries, rotated, whatever the model does to
    get them. One is replaced, for the whole process."""

    def __init__(self, model):
        config = text_config(model.model.config)
        self.model, self.means, self.is_plain = model, {}, True
        self.name = getattr(config, "_attn_implementation", None)

    def __enter__(self):
        try:
            from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

            self.attend = functions[self.name]
        except (ImportError, KeyError):  # an older one, or the model's own code
            self.functions = None
            return self
        self.functions = functions
        functions[self.name] = self._attend
        return self

    def __exit__(self, *_):
        if self.functions is not None:
            self.functions[self.name] = self.attend

    def _attend(self, module, query, key, value, attention_mask, scaling=None, **more):
        layer, rope = getattr(module, "layer_idx", None), self.model.rope
        n_heads, n_tokens, head_dim = query.shape[1:]
        is_plain = layer is not None and layer not in self.means and query.shape[0] == 1
        is_plain = is_plain and head_dim == self.model.head_dim and n_heads % self.model.n_kv_heads == 0
        odd = [name for name in _ODD_ATTENTION if more.get(name) is not None]
        sees_all = (more.get("sliding_window") or 0) >= self.model.most_tokens
        self.is_plain = self.is_plain and is_plain and odd in ([], ["sliding_window"] * sees_all)
        if self.is_plain:
            if rope.inv_freq.dim() > 1:
                rope = replace(rope, inv_freq=rope.inv_freq[layer])
            positions = torch.arange(n_tokens, device=query.device)
            found = rope.rotate(query[0].transpose(0, 1).float(), positions, inverse=True)
            found = found[min(_FIRST_QUERIES, n_tokens // 2) :].mean(0)
            self.means[layer] = (found * (head_dim**-0.5 if scaling is None else scaling)).cpu()
        return self.attend(module, query, key, value, attention_mask, scaling=scaling, **more)

    def mean(self):
        """f32 [n_layers][n_query_heads][head_dim] before rotation, times what scores are multiplied by; None: the model
        does not say, or its attention is no plain one."""
        if not self.is_plain or sorted(self.means) != list(range(self.model.n_layers)):
            return None
        found = torch.stack([self.means[layer] for layer in range(self.model.n_layers)])
        return found if found.isfinite().all() else None


class KvModel:
    def __init__(self, model_dir, device="cpu", dtype=None, compute_dtype=None, max_model_len=None):
        """dtype: of the cache, and of the weights, which are rounded to it; None: the model's. compute_dtype: None for
        what is faster here. max_model_len: the engine's, where its rotation or its windows depend on it; None: it is
        not told one.
        Unsupported: the model's cache is none that version 1 codes; the message names what it is."""
        from transformers import AutoConfig, DynamicCache

        whole_config = AutoConfig.from_pretrained(model_dir)
        config = text_config(whole_config)
        _refuse_by_config(config)
        self.rope_deviations = rope_deviations(config, max_model_len)
        self.longest_prompt = longest_prompt(config)
        fix_rope(config, max_model_len)
        heads = config.num_attention_heads
        self.n_layers = config.num_hidden_layers
        self.n_kv_heads = getattr(config, "num_key_value_heads", None) or heads
        if getattr(config, "multi_query", False) and not hasattr(config, "num_key_value_heads"):
            self.n_kv_heads = 1
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.rope: Rope = rope_of(config, self.head_dim)
        self.most_tokens = max_model_len or self.longest_prompt  # of an engine's prompt
        dtype = dtype or getattr(config, "dtype", None) or torch.bfloat16
        self.device, self.dtype, self.new_cache = torch.device(device), dtype, DynamicCache
        self.compute_dtype = compute_dtype or faster_dtype(dtype, config, device)
        load = auto_class(whole_config).from_pretrained
        self.model = load(model_dir, config=whole_config, dtype=dtype).eval().to(self.device)
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        self.weights_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        if self.compute_dtype != dtype:
            self.model.to(self.compute_dtype)
        self._check_rope()

    @property
    def channels(self):
        return self.n_kv_heads * self.head_dim

    @property
    def dtype_name(self):
        return dtype_name(self.dtype)

    def _stack(self, cache, n_sequences=1):
        """K, V of all sequences, one behind the other."""
        layers = getattr(cache, "layers", None)
        if layers is None or len(layers) != self.n_layers:
            raise Unsupported("a KV cache that is not one pair of K and V a layer")
        shape = (n_sequences, self.n_kv_heads, self.head_dim)
        for layer in layers:
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is None or values is None:
                raise Unsupported("a layer without K and V (hybrid model)")
            for x in (keys, values):
                if (x.shape[0], x.shape[1], x.shape[3]) != shape:
                    raise Unsupported(f"a layer whose cache is {tuple(x.shape)}, not {shape} by tokens")
        return tuple(
            torch.stack([getattr(x, name).transpose(1, 2).flatten(0, 1) for x in layers]) for name in ("keys", "values")
        )

    @torch.no_grad()
    def _check_rope(self):
        """A token alone has the same K at every position but for the rotation, in every layer: so this finds rope kinds
        and pairings that the configuration does not tell, and layers without rotation. (Not so the same token many
        times over: it attends to all that came before, and where attention has sinks it learns how many there are.)
        Where the configuration names no rotation, the same V with another K is one; positions that are added to tokens
        change both. A model that cannot be told positions (RoFormer) has the same token many times over, and only the
        first layer is looked at: its K and V attend to nothing."""
        is_told = self.rope.rotary_dim > 0 or "position_ids" in signature(self.model.forward).parameters
        positions = [at for at in (0, 1, 2, 7, 60, 300, 1000) if at < self.most_tokens and (is_told or at < 100)]
        positions = torch.tensor(positions, device=self.device)
        token = min(100, self.model.get_input_embeddings().num_embeddings - 1)
        if is_told:
            given = {"input_ids": torch.full_like(positions, token)[:, None], "position_ids": positions[:, None]}
        else:
            given = {"input_ids": torch.full((1, int(positions[-1]) + 1), token, device=self.device)}
        out = self.model(**given, past_key_values=self.new_cache(), use_cache=True)
        k, v = (x.float() for x in self._stack(out.past_key_values, len(given["input_ids"])))
        if not is_told:
            k, v = k[:1, positions], v[:1, positions]
        k = self.rope.rotate(k, positions, inverse=True)
        error, of_v = ((x - x[:, :1]).flatten(1).norm(dim=1) / (x.flatten(1).norm(dim=1) + 1e-9) for x in (k, v))
        if not self.rope.rotary_dim and of_v.max() > 0.01:
            return
        worst = int(error.argmax())
        self.rope_error = error.max().item()
        if error[worst] > 0.1:  # bf16: about 0.01; a wrong rotation: about 1
            raise Unsupported(
                f"K of layer {worst} is not rotated as its configuration says (kind {self.rope.kind}, "
                f"{self.rope.rotary_dim} dimensions, NeoX pairing): {error[worst]:.2f} off. Interleaved rope, as of "
                "Cohere and GLM-4, is not told by a configuration and is not supported"
            )

    def prefill_with_queries(self, context):
        """prefill(), and the mean query of each head, as _MeanQueries has it."""
        with _MeanQueries(self) as queries:
            k, v = self.prefill(context)
        return k, v, queries.mean()

    @torch.no_grad()
    def prefill(self, context):
        """K, V of the first n tokens, rounded to dtype. ModelError: they are not finite."""
        ids = context.ids[: context.n].to(self.device)
        with _running():
            out = self.model(ids[None], past_key_values=self.new_cache(), use_cache=True, logits_to_keep=1)
        k, v = (x.to(self.dtype) for x in self._stack(out.past_key_values))
        if not (k.isfinite().all() and v.isfinite().all()):
            raise ModelError(f"K or V of {context.name} is not finite in {self.dtype_name}")
        return k, v

    def cache(self, k, v):
        """A transformers cache that holds k and v, for the model to go on from."""
        cache, k, v = self.new_cache(), k.to(self.compute_dtype), v.to(self.compute_dtype)
        for layer in range(self.n_layers):
            cache.update(k[layer].transpose(0, 1)[None], v[layer].transpose(0, 1)[None], layer)
        return cache

    def log_probs(self, context, k, v):
        """log p of the tokens after the context, f32 [n_continuation][vocabulary]."""
        ids = context.ids[context.n :].to(self.device)
        cache = self.cache(k, v)
        with _running():
            return self.model(ids[None], past_key_values=cache).logits[0].float().log_softmax(-1)

    @torch.enable_grad()
    def fisher(self, context, k, v, n_sinks, generator):
        """Diagonal Fisher information of K and V by channel: f32 [n_layers][2][C].

        Mean over the tokens of the squared gradient of the log-likelihood of FISHER_DRAWS sampled continuations. One
        backward pass of each serves all positions: their gradients are added with random signs, so that cross terms
        vanish on average. All share the forward pass, which takes most of the memory. The two dimensions of a rotated
        pair are not alike: slow pairs hardly turn between a token and those that attend to it.
        """
        k, v = (x.to(self.compute_dtype, copy=True).requires_grad_(True) for x in (k, v))
        log_p = self.log_probs(context, k, v)
        p, total = log_p.detach().exp().cpu(), 0
        positions = torch.arange(k.shape[1], device=self.device)
        for draw in range(FISHER_DRAWS):
            sampled = torch.multinomial(p, 1, generator=generator).to(self.device)
            sign = torch.randint(0, 2, sampled.shape, generator=generator).to(self.device) * 2.0 - 1
            objective = (log_p.gather(1, sampled) * sign).sum()
            with _running():
                gradient_k, gradient_v = torch.autograd.grad(objective, (k, v), retain_graph=draw + 1 < FISHER_DRAWS)
            gradient_k = self.rope.rotate(gradient_k.float(), positions, inverse=True)[:, n_sinks:]
            gradients = torch.stack([gradient_k, gradient_v.float()[:, n_sinks:]], 1)
            total = total + gradients.pow(2).mean(2).flatten(2)
        scale = (k.shape[1] - n_sinks) / REFERENCE_TOKENS * 256 / len(log_p)
        return total * scale / FISHER_DRAWS

    @torch.enable_grad()
    def kl_by_layer(self, context, k, v, coded_k, coded_v):
        """What the errors of coded_k and coded_v cost: KL divergence over the tokens after the context, by layer and
        plane, f32 [n_layers][2].

        Half its derivative by a factor of the errors of a layer's K or V, at 1: where KL grows with the square of an
        error, these are shares that sum to it. One backward pass gives all.
        """
        with torch.no_grad():
            reference = self.log_probs(context, k, v)
        coded = [x.to(self.compute_dtype, copy=True).requires_grad_(True) for x in (coded_k, coded_v)]
        log_p = self.log_probs(context, *coded)
        kl = (reference.exp() * (reference - log_p)).sum(-1).mean()
        with _running():
            gradients = torch.autograd.grad(kl, coded)
        with torch.no_grad():
            shares = [gradient.float() * (y.float() - x.float()) for gradient, y, x in zip(gradients, coded, (k, v))]
            return torch.stack([share.sum((1, 2, 3)) / 2 for share in shares], 1)
