"""libcachegen.so, opened for an engine: the engine's configuration in the library's words, and the open handle.

Each side opens its own: they live in different processes. What cannot be supported is found here, before any request.
"""

import math
import os
import queue
import re
import select
import threading
import time

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from cachegen import abi
from cachegen.fingerprint import as_text
from cachegen.store_files import read_description
from cachegen.vllm.guard import logger
from cachegen.vllm.model_key import FP8_DTYPES, WeightsCheck, fingerprint, image_key, model_dir
from cachegen.vllm.ranks import UnsupportedRanks, rank_of
from cachegen.vllm.request_key import parse_level
from cachegen.vllm.versions import refusal

DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
# Fields of vLLM's FullAttentionSpec and SlidingWindowSpec. A field of a later vLLM that is in neither is refused:
# nobody knows what it changes. sliding_window of the former: of some layers, beside others without one. Such layers
# keep the K and V of all tokens in blocks, as the others do, and only look at fewer; how many is in the model's
# configuration, and so in the key.
ANY_ATTENTION = {
    "block_size", "num_kv_heads", "head_size", "dtype", "dcp_sharded", "max_tp_shards", "block_stride_alignment",
    "sliding_window",
}  # fmt: skip
PLAIN_ATTENTION = {
    "attention_chunk_size": None, "non_causal": False,
    "page_size_padded": None, "num_head_slots": None, "state_content_bytes": None, "tokens_per_state": 1,
    "is_draft": False, "extra_retained_tokens": 0,
}  # fmt: skip
# vLLM's load_formats that read the files which the fingerprint is of, and keys of model_loader_extra_config that only
# say how.
LOAD_FORMATS = {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "mistral", "dummy"}
LOAD_HOW = {
    "enable_multithread_load",
    "num_threads",
    "enable_weights_track",
    "distributed",
    "concurrency",
    "memory_limit",
}
OPEN_TIMEOUT_MS = 120000  # the library's default
NOT_QUANTIZED, FP8_PER_TENSOR = 0, 1  # vLLM's KVQuantMode
# Of kv_connector_extra_config, and their defaults: the library knows nothing of them.
OWN_KEYS = {
    "library": None, "strict": False, "untested_vllm": False, "min_tokens": 0, "save_on_use": 1, "keep_level": "L2",
}  # fmt: skip


class Unsupported(Exception):
    """Why this engine's KV can be neither stored nor served."""


class Library:
    """The open handle, and what both sides need of the configuration. Used by one thread."""

    def __init__(self, transfer_config, vllm_config, kv_cache_config, role):
        """Unsupported, abi.CachegenError (the configuration, the store), abi.LibraryError,
        OSError (the model's files)."""
        extra = dict(transfer_config.kv_connector_extra_config or {})
        own = {key: extra.pop(key, default) for key, default in OWN_KEYS.items()}
        for key in ("strict", "untested_vllm"):
            if not isinstance(own[key], bool):
                raise Unsupported(f'"{key}" is {own[key]!r}: true or false')
        for key in ("min_tokens", "save_on_use"):
            is_number = isinstance(own[key], (int, float)) and not isinstance(own[key], bool)
            if not is_number or not 0 <= own[key] < math.inf:  # JSON as Python reads it has NaN, too
                raise Unsupported(f'"{key}" is {own[key]!r}: a number that is not negative')
        if (reason := refusal()) and not own["untested_vllm"]:
            raise Unsupported(reason)
        self.min_tokens, self.save_on_use = own["min_tokens"], own["save_on_use"]
        self.worst_level = _level("worst_level", extra.get("worst_level", "L3"))
        self.keep_level = _level("keep_level", own["keep_level"])
        self.tail_tokens = extra.get("tail_multiple", 32)
        if not isinstance(self.tail_tokens, int):
            raise Unsupported(f'"tail_multiple" is {self.tail_tokens!r}: a number of tokens')
        self.block_tokens = block_tokens(kv_cache_config)
        self._has_mrope = vllm_config.model_config.uses_mrope
        self.image_key = image_key(vllm_config)
        self.may_load = transfer_config.is_kv_consumer
        self.may_save = transfer_config.is_kv_producer and not extra.get("read_only", False)
        try:
            self.rank = rank_of(vllm_config, role)
        except UnsupportedRanks as e:
            raise Unsupported(str(e)) from None
        config, deviations = _configuration(extra, vllm_config, kv_cache_config, self.rank)
        if role == KVConnectorRole.WORKER and config["geometry"]["dtype"] in FP8_DTYPES.values():
            config["geometry"] |= kv_scales(kv_cache_config.kv_cache_groups[0].layer_names, vllm_config)
        try:
            self.cg = abi.Connector(config, own["library"])
        except abi.CachegenError as e:
            raise _explained(e, deviations) from None
        self.root = config["root"]
        if self.cg.warning:
            logger.warning("cachegen: %s", self.cg.warning)
        self.ttft_budget_ns = config.get("ttft_budget_ms", 2000) * 10**6
        try:
            self._check_model(config["geometry"]["model_fingerprint"])
            timeout_s = config.get("open_timeout_ms", OPEN_TIMEOUT_MS) / 1e3
            digest = digest_of(os.path.join(config["root"], config["model"]), timeout_s)
            # The worker does what the scheduler plans.
            is_asked = role == KVConnectorRole.SCHEDULER
            self.weights = WeightsCheck(model_dir(vllm_config.model_config), digest if is_asked else None)
            self._eventfd = self.cg.eventfd()
        except BaseException:
            self.cg.close()
            raise

    def _check_model(self, fingerprint):
        info = self.cg.get_info()
        stored = info.model_fingerprint_hex.decode()
        if stored != fingerprint:
            raise Unsupported(f"the store's model {info.model.decode()} is {stored}, the engine's is {fingerprint}")
        self.fingerprint, self.chunk_tokens = fingerprint, info.chunk_tokens
        self.profile = info.profile_fingerprint_hex.decode()
        # Where nothing better is stored, nothing better can be loaded instead.
        self.keep_level = max(self.keep_level, (info.store_levels & -info.store_levels).bit_length() - 1)
        # L0 keeps K as it is; the lossy levels turn it back by plain positions.
        self.needs_plain_positions = self._has_mrope and info.has_profile
        # Of KV that another tier may have taken from this engine's blocks. Without a profile nothing lossy is loaded.
        self.unknown_level = self.worst_level if info.has_profile else 0
        logger.info(
            "cachegen: model %s, %d tokens a chunk, levels %s, %s",
            info.model.decode(),
            info.chunk_tokens,
            " ".join(f"L{level}" for level in range(abi.N_LEVELS) if info.store_levels >> level & 1),
            "profile " + self.profile if info.has_profile else "no profile: L0 only",
        )

    def wait(self, seconds):
        """Until an operation of this handle completes. Nobody else reads its eventfd."""
        if self._eventfd < 0:
            time.sleep(min(seconds, 1e-3))
            return
        events = select.poll()  # select() takes no descriptor above 1,023
        events.register(self._eventfd, select.POLLIN)
        if events.poll(seconds * 1e3):
            os.read(self._eventfd, 8)

    def close(self):
        self.cg.close()


def _level(key, value):
    try:
        return parse_level(value)
    except ValueError as e:
        raise Unsupported(f'"{key}": {e}') from None


def digest_of(folder, timeout_s):
    """weights_digest of the model.json in a model's folder of the store; None: it has none. Unsupported, also where the
    store does not answer in that time: then a thread still waits for it."""
    answers = queue.SimpleQueue()

    def ask():
        try:
            answers.put(read_description(folder))
        except Exception as e:
            answers.put(e)

    threading.Thread(target=ask, name="cachegen-model", daemon=True).start()
    try:
        description = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise Unsupported(f'{folder}/model.json does not answer: not read after "open_timeout_ms"') from None
    if isinstance(description, Exception):
        raise Unsupported(str(description))
    digest = description.get("weights_digest")
    if digest is not None and not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{32}", digest)):
        raise Unsupported(f'{folder}/model.json: "weights_digest" must be 32 lower-case hexadecimal digits')
    return digest


def _explained(error, deviations):
    """error, or what is to be done about it where the engine does not run the model as its files say."""
    if not deviations or "model_fingerprint" not in str(error):
        return error
    return Unsupported(
        f"{error}; this engine computes otherwise than the model's files say: {as_text(deviations)}: give it a folder "
        'of its own in the store (key "model" of kv_connector_extra_config)'
    )


def block_tokens(kv_cache_config):
    """Tokens of a block, of the scheduler and in block tables. cache_config.block_size is what was asked for: a layer
    may have smaller blocks, and only the scheduler's process corrects its copy."""
    return kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size


def _configuration(extra, vllm_config, kv_cache_config, rank):
    """The library's configuration, as a dict, and how the engine deviates from the model's files; Unsupported."""
    model_config = vllm_config.model_config
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        raise Unsupported(f"KV layouts of platform {current_platform.device_name}: cpu and cuda are supported")
    if getattr(model_config, "enable_sleep_mode", False):  # nobody has seen what becomes of loads and saves under way
        raise Unsupported("enable_sleep_mode: an engine whose KV cache's memory stays where it is is supported")
    if model_config.runner_type == "pooling" and not model_config.is_prefix_caching_supported:
        # vLLM computes such a prompt in one step; without its beginning the step ends the engine.
        raise Unsupported("a pooling model without vLLM's prefix cache: one that pools the last token has it")
    check_weights(vllm_config)
    check_speculation(vllm_config)
    (group,) = kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    check_attention(spec, model_config.max_model_len)
    if spec.num_kv_heads != rank.n_heads:
        raise Unsupported(f"{spec.num_kv_heads} KV heads a rank: {rank.n_heads} of {rank.n_kv_heads} were expected")
    config = {"model": os.path.basename(os.path.normpath(model_dir(model_config))), **extra}
    model_fingerprint, deviations = fingerprint(vllm_config, spec.dtype)
    config["geometry"] = {
        "n_layers": len(group.layer_names),
        "n_kv_heads": rank.n_kv_heads,
        "head_dim": spec.head_size,
        "dtype": kv_dtype(spec.dtype, vllm_config),
        "model_fingerprint": model_fingerprint,
    }
    if rank.group is not None:
        config["group"] = rank.group
    if not rank.stores:
        config["read_only"] = True
    return config, deviations


def kv_dtype(dtype, vllm_config):
    """The library's name of a KV cache's torch.dtype. Unsupported."""
    cache_config = vllm_config.cache_config
    name = DTYPES.get(str(dtype))
    if name is None and str(dtype) == "torch.uint8":
        name = FP8_DTYPES.get(cache_config.cache_dtype)
        if name is not None and getattr(cache_config, "calculate_kv_scales", False):
            raise Unsupported("calculate_kv_scales: scales of an fp8 KV cache must be those of the model's files")
    if name is None:
        raise Unsupported(
            f"KV cache of {dtype}, cache_dtype {cache_config.cache_dtype!r}: {', '.join(abi.DTYPES)} are supported"
        )
    return name


def kv_scales(layer_names, vllm_config):
    """What an element of an fp8 cache is multiplied by, by layer, in the words of the library's configuration; it is
    known to an engine's workers, once the weights are loaded. Unsupported."""
    from vllm.model_executor.models.utils import extract_layer_index

    layers = vllm_config.compilation_config.static_forward_context
    scales = {"k_scales": [], "v_scales": []}
    for name in sorted(layer_names, key=extract_layer_index):
        for plane, found in zip("kv", scales.values(), strict=True):
            of_layer = getattr(layers.get(name), f"_{plane}_scale", None)
            if of_layer is None or of_layer.numel() != 1:
                shape = None if of_layer is None else tuple(of_layer.shape)
                raise Unsupported(f"{plane}_scale of layer {name} of shape {shape}: one scale a layer is supported")
            found.append(float(of_layer))
    return scales


def check_weights(vllm_config):
    """Unsupported, unless the engine loads the weights that lie in the model's directory."""
    load_config = vllm_config.load_config
    if load_config.load_format not in LOAD_FORMATS:
        raise Unsupported(
            f"load_format {load_config.load_format!r}: other weights may be loaded than those that the model's "
            f"fingerprint is of; {', '.join(sorted(LOAD_FORMATS))} are supported"
        )
    extra = load_config.model_loader_extra_config or {}
    if not isinstance(extra, dict) or extra.keys() - LOAD_HOW:
        raise Unsupported(f"model_loader_extra_config {extra!r}: {', '.join(sorted(LOAD_HOW))} are supported")
    if elsewhere := getattr(vllm_config.model_config, "model_weights", None):
        raise Unsupported(f"weights at {elsewhere}: those in the model's directory are supported")


def check_speculation(vllm_config):
    """Unsupported where a draft model keeps a KV cache: in vLLM its layers lie among the model's."""
    speculative = getattr(vllm_config, "speculative_config", None)
    # What a class of the user's keeps nobody knows.
    if speculative is not None and (speculative.uses_draft_kv_cache() or speculative.method == "custom_class"):
        raise Unsupported(
            f"speculative decoding by {speculative.method!r}: its draft's KV would be stored as the model's own; "
            "methods whose drafts have no KV cache (ngram, suffix) are supported"
        )


def check_attention(spec, max_model_len):
    """Unsupported, unless spec, a KVCacheSpec, keeps a plain K and V of each token and head, and attention is
    causal."""
    # A token sees itself and sliding_window - 1 before it, so the last one of max_model_len tokens may see all.
    if type(spec) is SlidingWindowSpec and spec.sliding_window < max_model_len:
        raise Unsupported(
            f"a sliding window of {spec.sliding_window} tokens in all layers, and a max_model_len of {max_model_len}: "
            "K and V before the window are not kept; windows in some layers are supported, and a max_model_len of the "
            "window at most"
        )
    if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):
        raise Unsupported(f"{type(spec).__name__}: FullAttentionSpec is supported")
    is_fp8 = str(spec.dtype) == "torch.uint8" and spec.kv_quant_mode == FP8_PER_TENSOR
    if str(spec.dtype) not in DTYPES and not is_fp8:
        raise Unsupported(f"KV cache of {spec.dtype}, {spec.kv_quant_mode!r}: bf16, fp16, fp32 and fp8 are supported")
    quant_mode = FP8_PER_TENSOR if is_fp8 else NOT_QUANTIZED
    plain = {**PLAIN_ATTENTION, "kv_quant_mode": quant_mode, "head_size_v": spec.head_size}
    for name, value in vars(spec).items():
        if name not in ANY_ATTENTION and (name not in plain or value != plain[name]):
            raise Unsupported(f"attention with {name} = {value!r}: only full causal attention is supported")
