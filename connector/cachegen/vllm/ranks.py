"""The ranks of a tensor-parallel engine: which KV heads each one has, and who stores them.

Each rank loads its own heads of a whole chunk. To store, the rank of head 0 gathers the others' heads inside the
library (connector/gather.h), so that chunks and keys are those of an engine with one rank. Where there are more ranks
than KV heads, vLLM gives several ranks the same head: then the first of them stores.
"""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole


class UnsupportedRanks(Exception):
    """What of the parallelism is not supported, in a sentence."""


@dataclass
class Rank:
    index: int  # 0 also for the scheduler's side, which has no KV
    n_ranks: int
    n_kv_heads: int  # the model's
    first_head: int
    n_heads: int  # this rank's
    stores: bool  # False: another rank has the same heads
    group: str | None  # the library's name for the engine's ranks; None: there is one rank
    steps_alone: bool  # False: steps of other data-parallel ranks wait for this engine's


def rank_of(vllm_config, role):
    """UnsupportedRanks."""
    parallel, n_kv_heads = vllm_config.parallel_config, vllm_config.model_config.get_total_num_kv_heads()
    n_ranks = parallel.tensor_parallel_size
    if not n_kv_heads:
        raise UnsupportedRanks("a model without KV heads: only attention is supported, state-space layers are not")
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise UnsupportedRanks(f"{name} {getattr(parallel, name)}: only tensor parallelism is supported")
    if n_ranks > 1 and getattr(parallel, "nnodes", 1) > 1:
        raise UnsupportedRanks(f"tensor-parallel ranks on {parallel.nnodes} hosts: they must be on one")
    # Under "external_launcher" each rank has a scheduler, and ours would not decide alike. Ray's ranks may be on
    # several hosts. Other executors may take a load for ended when one rank says so.
    if n_ranks > 1 and (executor := parallel.distributed_executor_backend) != "mp":
        raise UnsupportedRanks(f"tensor-parallel ranks with distributed_executor_backend {executor!r}: it must be 'mp'")
    if max(n_ranks, n_kv_heads) % min(n_ranks, n_kv_heads):
        raise UnsupportedRanks(f"tensor_parallel_size {n_ranks} with {n_kv_heads} KV heads: one must divide the other")
    index = 0
    if n_ranks > 1 and role == KVConnectorRole.WORKER:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        index = get_tensor_model_parallel_rank()
    # Either a rank has several heads (n_same is 1), or several ranks have the same one (n_heads
    # is 1).
    n_heads, n_same = max(1, n_kv_heads // n_ranks), max(1, n_ranks // n_kv_heads)
    return Rank(
        index=index,
        n_ranks=n_ranks,
        n_kv_heads=n_kv_heads,
        first_head=index // n_same * n_heads,
        n_heads=n_heads,
        stores=index % n_same == 0,
        group=vllm_config.kv_transfer_config.engine_id if n_ranks > 1 else None,
        # vLLM has set it to 1 where they do not compute together, as those of a mixture of experts do.
        steps_alone=parallel.data_parallel_size == 1,
    )
