"""The vLLM connector. An engine finds it by kv_connector="CachegenConnector", kv_connector_module_path="cachegen.vllm".

Read connector.py first: every call of vLLM arrives there. From the top down: connector, then scheduler and worker (the
two sides, which live in different processes). Of the scheduler's side are new_request, request_state, request_key,
local_cache, provenance, lookups, arrivals, deferrals, shared_loads, budgets, after_load, prefill, saves, admission and
scheduler_output; of the worker's side are kv_layout and gpu. Both stand on library, ranks, model_key, messages,
adapters, metrics, versions and guard.
"""

import contextlib

from cachegen.vllm.versions import refusal

try:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from cachegen.vllm.connector import CachegenConnector
except ImportError as e:  # a vLLM from before or after what the connector knows
    raise ImportError(f"cachegen: {refusal() or 'vLLM lacks what the connector needs'}: {e}") from e

# MultiConnector looks for the classes of its connectors by name when their statistics come from another process.
with contextlib.suppress(ValueError):  # is registered
    KVConnectorFactory.register_connector("CachegenConnector", "cachegen.vllm", "CachegenConnector")

__all__ = ["CachegenConnector"]
