"""How vLLM's CPU attention lays out the KV cache in memory, in the words of the library's register_kv()."""

from cachegen import abi
from cachegen.vllm.library import DTYPES, Unsupported


def cpu_attn_layout(kv_caches, vllm_config, first_head):
    """register_kv()'s arguments for CPU_ATTN, of KV heads from first_head on; Unsupported. A layer is [n_blocks][n_kv_heads][block_tokens][2 x head_dim],
    but the last two dimensions only count: the region of a (block, head) is the K area, then the V area, and how these
    are packed depends on what vLLM calls the isa."""
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    names = sorted(kv_caches, key=extract_layer_index)
    if [extract_layer_index(name) for name in names] != list(range(len(names))):
        raise Unsupported(f"layers {', '.join(names)}: one attention a layer is supported")
    first = kv_caches[names[0]]
    n_blocks, n_kv_heads, block_tokens, twice_dim = first.shape
    head_dim, size = twice_dim // 2, first.element_size()
    for name in names:
        tensor = kv_caches[name]
        if tensor.shape != first.shape or tensor.stride() != first.stride() or tensor.dtype != first.dtype:
            raise Unsupported(f"layer {name} lies in memory unlike layer {names[0]}")
    if first.stride()[2:] != (twice_dim, 1):
        raise Unsupported(f"KV-cache strides {first.stride()}: blocks must be dense")
    dtype = DTYPES.get(str(first.dtype))
    if dtype is None:
        raise Unsupported(f"KV cache of {first.dtype}")
    isa = _get_attn_isa(first.dtype, block_tokens, head_dim, vllm_config.cache_config.cache_dtype)
    fields = dict(
        bases=[kv_caches[name].data_ptr() for name in names],
        memory=abi.MEMORY_HOST,
        n_kv_heads=n_kv_heads,
        first_head=first_head,
        head_dim=head_dim,
        dtype=abi.DTYPES[dtype],
        block_tokens=block_tokens,
        n_blocks=n_blocks,
        block_stride=first.stride(0) * size,  # all strides in bytes
        head_stride=(first.stride(1) * size,) * 2,  # (of K, of V), as the others
    )
    if isa in ("vec", "vec16"):  # K: head_dim rows of block_tokens; V: block_tokens rows of head_dim
        fields.update(
            layout=abi.LAYOUT_STRIDED,
            offset_bytes=(0, block_tokens * head_dim * size),
            token_stride=(size, head_dim * size),
            dim_stride=(block_tokens * size, size),
        )
    elif isa == "amx" and dtype == "bf16":
        fields.update(layout=abi.LAYOUT_VLLM_CPU_AMX)
    else:
        raise Unsupported(f"CPU attention of isa {isa} with {dtype}: vec, vec16 and amx with bf16 are supported")
    return fields
