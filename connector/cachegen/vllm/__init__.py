"""The vLLM connector. An engine finds it by kv_connector="CachegenConnector", kv_connector_module_path="cachegen.vllm".

Read connector.py first: every call of vLLM arrives there. From the top down: connector, then scheduler and worker (the
two sides, which live in different processes), then what they stand on: library, model_key, messages, request_key,
provenance, cpu_layout, metrics and guard.
"""

from cachegen.vllm.connector import CachegenConnector

__all__ = ["CachegenConnector"]
