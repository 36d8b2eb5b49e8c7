"""What of an engine enters the key of its KV: the fingerprint of the model as this engine runs it.

An engine that runs a model as the model's files say has the fingerprint that the profile tool gives these files. What
it does otherwise is found by comparing, not by listing options: the configuration that vLLM ended up with stands
against the one that vLLM reads from the model's own directory. In the fingerprint are

 - the weights, config.json but for what says nothing of K and V, and what vLLM may read in its place or beside it
   (cachegen/fingerprint.py): that is in both of the configurations that are compared; of large weights samples, but
   where the store's model.json has a digest of all, WeightsCheck compares that, too;
 - each entry of the resolved configuration (hf_config) that is not as in the files, whoever changed it: hf_overrides,
   also a function, hf_config_path, another revision, a patch of vLLM's; but for what _as_built() knows, and a window
   that was taken away (--disable-sliding-window) and is as long as any prompt may be;
 - LongRoPE's factors, where max_model_len makes vLLM take others than it takes by itself; max_model_len, for kinds of
   RoPE of which nobody knows whether they depend on it: all but ROPE_BY_CONFIG;
 - quantization that the files don't have, and how it is done (quantization_config); the type that the model computes in
   and that of the KV cache, where they differ; the KV cache's cache_dtype, where it is neither "auto" nor fp8;
 - dummy weights and their seed; a load_format that leaves aside Mistral's files, which "auto" takes where they lie
   beside others.

In a chunk's key, beside the fingerprint and the tokens: the type of the KV (fp8 rounds more than the type that the
model computes in, which does not count then; its scales are among the weights, of which small ones are read whole), the
root since the last reset (scheduler.py) and the tenant's salt (new_request.py), adapter and images (request_key.py),
and with each image what the engine makes of images (image_key()). Not in it, for they only round differently:
parallelism, attention backends, batch sizes, compilation. Not known to it: code of a model that trusts remote code, and
plugins that replace a model's class.
"""

import contextlib
import hashlib
import json
import os
import threading

from cachegen.fingerprint import IRRELEVANT, as_text, model_fingerprint, weights_are_sampled, weights_digest
from cachegen.rope import rope_deviations, text_config
from cachegen.vllm.guard import logger

# Rotations that follow from the configuration, and longrope, of which rope_deviations() knows.
ROPE_BY_CONFIG = {"default", "linear", "dynamic", "ntk", "llama3", "yarn", "mrope", "proportional", "longrope", "su"}
# vLLM's cache_dtype -> the library's name. All are kept as torch.uint8.
FP8_DTYPES = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
# Of vLLM's MultiModalConfig, what changes more than the rounding. A request's own mm_processor_kwargs and
# media_io_kwargs are in the image's hash.
IMAGE_SETTINGS = ("mm_processor_kwargs", "media_io_kwargs", "mm_encoder_attn_dtype", "video_pruning_rate")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
# Of a configuration, beside IRRELEVANT, which is in all fingerprints. vLLM takes it back where the weights have an
# lm_head, and these are in the fingerprint.
SAYS_NOTHING = {"tie_word_embeddings"}
_ABSENT = "(absent)"
UNCHECKED, OTHER = "unchecked weights", "other weights"  # why the store is not used


def model_dir(model_config):
    """The directory of the weights; a name on the hub as the snapshot that vLLM has fetched."""
    if os.path.isdir(model_config.model):
        return model_config.model
    from huggingface_hub import snapshot_download

    return snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True)


def fingerprint(vllm_config, kv_dtype):
    """(the 32 hex digits, the deviations): the model as the engine runs it, with KV of kv_dtype, a torch.dtype."""
    found = deviations(vllm_config, kv_dtype)
    return model_fingerprint(model_dir(vllm_config.model_config), found), found


def deviations(vllm_config, kv_dtype):
    """What the engine computes otherwise than the model's files say, as plain data; empty: nothing."""
    model_config, cache_config = vllm_config.model_config, vllm_config.cache_config
    found = {}
    resolved, said = model_config.hf_config.to_dict(), _said(model_config)
    if changed := _changes(said, resolved, model_config.max_model_len):
        found["config"] = changed
    found |= rope_deviations(text_config(model_config.hf_config), model_config.max_model_len)
    if kinds := sorted(set(_rope_kinds(resolved)) - ROPE_BY_CONFIG):
        found["max_model_len"] = [model_config.max_model_len, kinds]
    if model_config.quantization and not said.get("quantization_config"):
        found["quantization"] = str(model_config.quantization)
    # Said to the engine alone, also beside the files'.
    if on_the_fly := getattr(model_config, "quantization_config", None):
        found["quantization_config"] = on_the_fly
    is_fp8 = str(kv_dtype) == "torch.uint8" and cache_config.cache_dtype in FP8_DTYPES
    if not is_fp8 and str(model_config.dtype) != str(kv_dtype):
        found["dtype"] = [str(model_config.dtype), str(kv_dtype)]
    if not is_fp8 and cache_config.cache_dtype not in ("auto", str(kv_dtype).removeprefix("torch.")):
        scales = bool(getattr(cache_config, "calculate_kv_scales", False))
        found["cache_dtype"] = [str(cache_config.cache_dtype), scales]
    load_format = getattr(vllm_config.load_config, "load_format", "auto")
    if load_format == "dummy":
        found["load_format"] = f"dummy, seed {model_config.seed}"
    elif load_format not in ("auto", "mistral") and _has_mistral_files(model_dir(model_config)):
        found["load_format"] = load_format
    return found


def _has_mistral_files(directory):
    return any(name.startswith("consolidated") and name.endswith(".safetensors") for name in os.listdir(directory))


def image_key(vllm_config):
    """What makes the K and V of an image differ besides the image and the model, as text. None: no image can be keyed,
    since vLLM numbers them (renderers/base.py, _process_mm_uuids()). It hashes such numbers where a request says how
    images are to be processed, and they look like hashes of images then. OSError, ValueError: the processor's files."""
    images = getattr(vllm_config.model_config, "multimodal_config", None)
    if images is None:
        return ""
    if images.mm_processor_cache_gb == 0 and not vllm_config.cache_config.enable_prefix_caching:
        return None
    found = {name: getattr(images, name, None) for name in IMAGE_SETTINGS}
    found["mm_processor_kwargs"] = {k: v for k, v in (found["mm_processor_kwargs"] or {}).items() if k != "device"}
    if found["video_pruning_rate"]:
        found["video_pruning_method"] = getattr(images, "video_pruning_method", None)
    directory = model_dir(vllm_config.model_config)
    paths = [(name, os.path.join(directory, name)) for name in PROCESSOR_FILES]
    paths.append(("scales", getattr(images, "mm_encoder_fp8_scale_path", None)))
    for name, path in paths:
        if path is not None and os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                found[name] = json.load(file)
    found = {name: value for name, value in found.items() if value}
    return hashlib.blake2b(as_text(found).encode(), digest_size=16).hexdigest() if found else ""


def _said(model_config):
    """The configuration that vLLM reads from the model's own directory when nobody overrides anything."""
    from vllm.transformers_utils.config import get_config

    directory = model_dir(model_config)
    if not os.path.exists(os.path.join(directory, "config.json")):
        return {}
    config = get_config(
        directory,
        model_config.trust_remote_code,
        code_revision=model_config.code_revision,
        config_format=model_config.config_format,
    )
    return config.to_dict()


def _as_built(config, max_model_len):
    """A configuration with what vLLM writes into those of some models, which says nothing new. Most is written while a
    model is built: with tensor parallelism only workers see that, as the scheduler is in another process."""
    kind, written = config.get("model_type"), {}
    if kind == "minimax_m2":
        # A longer one than the model's may count for RoPE.
        if max_model_len <= config.get("max_position_embeddings", 0):
            written["max_model_len"] = max_model_len
    elif kind == "falcon":
        if config.get("new_decoder_architecture") and config.get("num_ln_in_parallel_attn") is None:
            written["num_ln_in_parallel_attn"] = 2
    elif kind == "bailing_moe":
        if isinstance(rope := config.get("rope_parameters"), dict):
            written["rope_parameters"] = {"partial_rotary_factor": 1.0, **rope}
    elif kind == "gpt_oss":
        quantization = config.get("quantization_config")
        if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
            written["quantization_config"] = quantization | {"quant_method": "gpt_oss_mxfp4"}
    elif kind == "mistral":  # inside of Pixtral
        if config.get("architectures") is None:
            written["architectures"] = ["MistralForCausalLM"]
    return config | written


def _changes(said, resolved, max_model_len):
    """The entries of resolved that said has not, also inside of entries; what is IRRELEVANT or SAYS_NOTHING is left
    out, a window whose absence changes nothing, and what vLLM writes by itself."""
    said, resolved = _as_built(said, max_model_len), _as_built(resolved, max_model_len)
    changed = {}
    for name in sorted((said.keys() | resolved.keys()) - IRRELEVANT - SAYS_NOTHING):
        old, new = said.get(name), resolved.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            if inner := _changes(old, new, max_model_len):
                changed[name] = inner
        elif name == "sliding_window" and new is None and _sees_all(said, max_model_len):
            pass
        elif as_text(old) != as_text(new):
            changed[name] = resolved.get(name, _ABSENT)
    return changed


def _sees_all(said, max_model_len):
    """Whether the window that a configuration has is as long as any prompt (0: none), and nothing else hangs on it:
    where it names kinds of layers, a model may rotate K only where it has a window (EXAONE 4)."""
    window = said.get("sliding_window")
    return isinstance(window, int) and (window == 0 or window >= max_model_len) and not said.get("layer_types")


def _rope_kinds(config):
    """The kinds of RoPE that a configuration names, at any depth."""
    for name, value in config.items():
        if isinstance(value, dict):
            if name.startswith("rope"):
                yield from _kinds_in(value)
            else:
                yield from _rope_kinds(value)


def _kinds_in(rope):
    kind = rope.get("rope_type", rope.get("type"))
    if kind is not None:
        yield str(kind)
    for value in rope.values():  # one a kind of layer
        if isinstance(value, dict):
            yield from _kinds_in(value)


class WeightsCheck:
    """Whether all bytes of large weights are those of which the store's model.json has a digest, where it has one.

    doubt: UNCHECKED or OTHER, and nothing may be loaded or stored; None: the weights are the store's. They are read by
    a thread of this object's own, which the engine does not wait for.
    """

    def __init__(self, directory, digest):
        """directory: of the weights; digest: the weights_digest() of model.json, or None."""
        self.doubt = None
        if digest is None or not weights_are_sampled(directory):  # model_fingerprint() has read them all
            return
        self.doubt = UNCHECKED
        logger.info("cachegen: model.json asks for it: all weights are read; until then nothing is loaded or stored")
        threading.Thread(target=self._run, args=(directory, digest), name="cachegen-weights", daemon=True).start()

    def _run(self, directory, digest):
        try:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # of this thread alone
            found = weights_digest(directory)
        except Exception as e:
            logger.error("cachegen: nothing is loaded or stored: the weights cannot be checked: %s", e)
            return
        if found == digest:
            logger.info("cachegen: all weights are the store's")
            self.doubt = None
        else:
            logger.error("cachegen: nothing is loaded or stored: the weights are %s, model.json has %s", found, digest)
            self.doubt = OTHER
