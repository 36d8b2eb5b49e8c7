"""How vLLM lays out the KV cache in memory, in the words of the library's register_kv().

Since vLLM 0.30 a layer is [n_blocks][n_kv_heads][block_tokens][2 x head_dim] for every backend, in one of six orders in
memory (vllm.v1.kv_cache_layout; "NHD" and "HND" are older names of two). On GPUs K is the first head_dim of the last
dimension and V the others, so strides say all. On CPUs only the first two dimensions count.
Surprise: where a backend's kernels want smaller blocks than the scheduler's, n_blocks and block_tokens are those of the
kernels, and a block of the scheduler is several consecutive ones (kernel_blocks()).
"""

import torch

from cachegen import abi
from cachegen.vllm.library import Unsupported, kv_dtype
from cachegen.vllm.model_key import FP8_DTYPES

GPU_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
ROW_ALIGNMENT = 16  # bytes; kernels move so many at once


def kv_layout(kv_caches, vllm_config, first_head=0):
    """register_kv()'s arguments for what vLLM gives a connector: layers' names -> tensors. first_head: of the rank's KV
    heads. Unsupported."""
    names = _in_order(name for name in kv_caches if not _is_alias(name, vllm_config))
    first = kv_caches[names[0]]
    if first.dim() != 4 or first.shape[3] % 2 != 0:
        raise Unsupported(
            f"KV cache of shape {tuple(first.shape)} a layer: blocks, heads, tokens and K with V are known"
        )
    for name in names:
        tensor = kv_caches[name]
        if (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) != (
            first.shape, first.stride(), first.dtype, first.device,
        ):  # fmt: skip
            raise Unsupported(f"layer {name} lies in memory unlike layer {names[0]}")
    dtype = kv_dtype(first.dtype, vllm_config)
    n_blocks, n_kv_heads, block_tokens, twice_dim = first.shape
    size = first.element_size()
    fields = dict(
        bases=[kv_caches[name].data_ptr() for name in names],
        n_kv_heads=n_kv_heads,
        first_head=first_head,
        head_dim=twice_dim // 2,
        dtype=abi.DTYPES[dtype],
        block_tokens=block_tokens,
        n_blocks=n_blocks,
        block_stride=first.stride(0) * size,  # all strides in bytes
        head_stride=(first.stride(1) * size,) * 2,  # (of K, of V), as the others
    )
    if first.device.type == "cpu":
        return {**fields, **_cpu_attn(first, dtype, vllm_config)}
    if first.device.type == "cuda":
        for name in names:
            _check_backend(name, vllm_config, dtype)
            rows = split_rows(kv_caches[name])
        return {**fields, **rows, "memory": abi.MEMORY_CUDA, "device": first.device.index or 0}
    raise Unsupported(f"KV cache on device {first.device}: cpu and cuda are supported")


def kernel_blocks(block_ids, n_each):
    """The ids of the kernels' blocks in a table of the scheduler's, each of which is n_each of them."""
    if n_each == 1:
        return block_ids
    return [block * n_each + i for block in block_ids for i in range(n_each)]


def _is_alias(layer_name, vllm_config):
    """Whether a layer reads the K and V of another one and has none of its own (KV sharing, as in Gemma 3n)."""
    layer = vllm_config.compilation_config.static_forward_context.get(layer_name)
    return getattr(layer, "kv_sharing_target_layer_name", None) is not None


def _in_order(layer_names):
    from vllm.model_executor.models.utils import extract_layer_index

    names = sorted(layer_names, key=extract_layer_index)
    if [extract_layer_index(name) for name in names] != list(range(len(names))):
        raise Unsupported(f"layers {', '.join(names)}: one attention a layer is supported")
    return names


def _check_backend(layer_name, vllm_config, dtype):
    """Other backends on GPUs may pack what they keep in a layer: only those whose source was read are taken."""
    layer = vllm_config.compilation_config.static_forward_context.get(layer_name)
    backend = layer.get_attn_backend().get_name() if layer is not None else None
    if backend not in GPU_BACKENDS:
        raise Unsupported(f"attention backend {backend} of layer {layer_name}: {', '.join(GPU_BACKENDS)} are supported")
    if dtype == "fp8_e5m2" and backend == "TRITON_ATTN":  # its kernels read and write every fp8 as e4m3
        raise Unsupported(f"{dtype} with attention backend {backend}: fp8_e4m3 is supported")


def split_rows(layer):
    """Where K and V of a token and head lie in a row together: what the GPU backends do with
    kv_cache.split(head_size, dim=-1)."""
    size, head_dim = layer.element_size(), layer.shape[3] // 2
    steps = [stride * size for n, stride in zip(layer.shape[:3], layer.stride(), strict=False) if n > 1]
    if layer.stride(3) != 1 or any(step % ROW_ALIGNMENT for step in (layer.data_ptr(), head_dim * size, *steps)):
        raise Unsupported(
            f"KV-cache strides {layer.stride()} of {layer.dtype}: rows of K and V must be dense and begin at "
            f"multiples of {ROW_ALIGNMENT} bytes"
        )
    return dict(
        layout=abi.LAYOUT_STRIDED,
        offset_bytes=(0, head_dim * size),
        token_stride=(layer.stride(2) * size,) * 2,
        dim_stride=(size, size),
    )


def _cpu_attn(layer, dtype, vllm_config):
    """CPU_ATTN: the region of a (block, head) is the K area, then the V area, and how these are packed depends on what
    vLLM calls the isa."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    block_tokens, twice_dim = layer.shape[2:]
    head_dim, size = twice_dim // 2, layer.element_size()
    if layer.stride()[2:] != (twice_dim, 1):
        raise Unsupported(f"KV-cache strides {layer.stride()}: blocks must be dense")
    # Of fp8, too, vLLM chooses by the type that the model computes in.
    model_dtype = vllm_config.model_config.dtype if layer.dtype == torch.uint8 else layer.dtype
    isa = _get_attn_isa(model_dtype, block_tokens, head_dim, vllm_config.cache_config.cache_dtype)
    if isa in ("vec", "vec16"):  # K: head_dim rows of block_tokens; V: block_tokens rows of head_dim
        return dict(
            memory=abi.MEMORY_HOST,
            layout=abi.LAYOUT_STRIDED,
            offset_bytes=(0, block_tokens * head_dim * size),
            token_stride=(size, head_dim * size),
            dim_stride=(block_tokens * size, size),
        )
    if isa == "amx" and dtype in ("bf16", *FP8_DTYPES.values()):
        return dict(memory=abi.MEMORY_HOST, layout=abi.LAYOUT_VLLM_CPU_AMX)
    raise Unsupported(f"CPU attention of isa {isa} with {dtype}: vec, vec16 and amx with bf16 and fp8 are supported")
