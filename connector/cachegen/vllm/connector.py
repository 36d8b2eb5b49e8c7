"""CachegenConnector: vLLM's KV-connector calls (V1), each guarded and handed to the side that it is for.

Loaded with kv_connector="CachegenConnector", kv_connector_module_path="cachegen.vllm" and, so that a failed load costs
time and never an answer, kv_load_failure_policy="recompute". kv_connector_extra_config is the library's configuration
and this package's own keys; connector/README.md has both ("Configuration"), and what a request may ask for in its
kv_transfer_params ("What a request may ask for"). The answer's kv_transfer_params say what came from the store.

vLLM makes two of these objects: one for its scheduler, one for its worker, in the server in two processes. Nothing here
raises into the engine: a failure is a log line and a miss.
"""

import weakref

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from cachegen import abi
from cachegen.vllm.guard import Failures, guarded, logger, nothing
from cachegen.vllm.library import Library, Unsupported, block_tokens
from cachegen.vllm.lookups import LOOKUPS
from cachegen.vllm.messages import Metadata
from cachegen.vllm.metrics import UP, Increments, LoggedStats, PromMetrics
from cachegen.vllm.model_key import OTHER, UNCHECKED
from cachegen.vllm.scheduler import NO_MATCH, OTHER_MODEL, OTHER_PROFILE, Scheduler
from cachegen.vllm.versions import HIT_SOURCE
from cachegen.vllm.worker import GPU, LOADS, SAVES, Worker


# Why a connector is down, as the gauge vllm:cachegen_up says it.
DOWN = {
    "unsupported": Unsupported, "configuration": abi.CachegenError, "library": abi.LibraryError, "model files": OSError,
}  # fmt: skip
FAILING = (GPU, OTHER_MODEL, OTHER_PROFILE, LOOKUPS, LOADS, SAVES)  # the same, of outages: the first one under way
REASONS = (UP, *DOWN, "error", UNCHECKED, OTHER, *FAILING)


class StartFailure(Exception):
    """What ends the start of an engine: one whose connector is strict, or that would end at its first request."""


class CachegenConnector(KVConnectorBase_V1):
    _cache_hit_source = HIT_SOURCE
    failures = Failures()  # of calls of the class; an object has its own
    _opened = weakref.WeakSet()  # all objects of this process that have had a library

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.failures = Failures()
        self._increments = Increments()
        self._down = None  # the reason's kind
        n_groups = len(kv_cache_config.kv_cache_groups)
        if n_groups != 1:  # vLLM asserts one when a request ends, also in front of a connector that is disabled
            what = f"vLLM ends at its first request with this connector and {n_groups} KV-cache groups"
            raise StartFailure(f"cachegen: {what}; serve without --kv-transfer-config")
        library = self._open_library(vllm_config, role, kv_cache_config)
        if library is not None and self._kv_transfer_config.kv_load_failure_policy != "recompute":
            logger.warning('cachegen: set kv_load_failure_policy to "recompute": now a failed load fails its request')
        # One of the two is set. Without a library there is nothing to schedule, but a worker must still answer.
        self.scheduler = self.worker = None
        self._make_side(library, role, kv_cache_config)
        if self._is_open:
            self._opened.add(self)

    def _disable(self, reason):
        """reason: the exception. With "strict" the engine does not start; else it runs without a cache, and says so
        once. The traceback is printed where it is none that users can bring about."""
        strict = (self._kv_transfer_config.kv_connector_extra_config or {}).get("strict", False)
        if strict is not False:
            raise StartFailure(f"cachegen: strict is set, and: {reason}") from reason
        self._down = next((kind for kind, of in DOWN.items() if isinstance(reason, of)), "error")
        logger.error(
            "cachegen: connector disabled: every look-up is a miss, nothing is stored: %s",
            reason,
            exc_info=reason if self._down == "error" else None,
        )

    @guarded(nothing, tell=_disable)
    def _open_library(self, vllm_config, role, kv_cache_config):
        # vLLM ends at the first answer for which two connectors have results of one name.
        others = (other for other in self._opened if other._is_open)
        if any(other.role == role and other._kv_cache_config is kv_cache_config for other in others):
            raise Unsupported("a second CachegenConnector in a MultiConnector: one is supported")
        return Library(self._kv_transfer_config, vllm_config, kv_cache_config, role)

    @guarded(nothing, tell=_disable)
    def _make_side(self, library, role, kv_cache_config):
        if role == KVConnectorRole.WORKER:
            self.worker = Worker(library, self.failures, block_tokens(kv_cache_config))
        elif library is not None:
            self.scheduler = Scheduler(library, self.failures)

    @property
    def requires_kv_delivery(self):
        return False  # a save that is dropped is a later miss

    # ---- scheduler side ----

    @guarded(nothing)
    def bind_kv_cache_manager(self, kv_cache_manager):
        super().bind_kv_cache_manager(kv_cache_manager)
        if self.scheduler is not None:
            self.scheduler.local_cache.manager = kv_cache_manager

    @guarded(lambda *_: NO_MATCH)
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if self.scheduler is None:
            return NO_MATCH
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    @guarded(nothing)
    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if self.scheduler is not None:
            self.scheduler.update_after_alloc(request, blocks, num_external_tokens)

    @guarded(lambda *_: Metadata())
    def build_connector_meta(self, scheduler_output):
        return Metadata() if self.scheduler is None else self.scheduler.step(scheduler_output)

    @guarded(nothing)
    def update_connector_output(self, connector_output):
        if self.scheduler is not None:
            self.scheduler.take_report(connector_output.kv_connector_worker_meta)

    @guarded(lambda *_: (False, None))
    def request_finished(self, request, block_ids):
        # False: vLLM may free the blocks at once.
        return False, None if self.scheduler is None else self.scheduler.finish(request, block_ids)

    @guarded(lambda *_: False)
    def reset_cache(self):
        return True if self.scheduler is None else self.scheduler.reset()

    # ---- worker side ----

    @guarded(nothing)
    def _close_worker(self, *_args, **_kwargs):
        self.worker.close()

    @guarded(_close_worker, tell=_disable)
    def register_kv_caches(self, kv_caches):
        if self.worker.library is not None:
            self.worker.register(kv_caches, self._vllm_config)

    @guarded(nothing)
    def handle_preemptions(self, kv_connector_metadata):
        self.worker.submit(kv_connector_metadata)

    @guarded(nothing)
    def bind_connector_metadata(self, connector_metadata):
        super().bind_connector_metadata(connector_metadata)
        self.worker.submit(connector_metadata)

    def start_load_kv(self, forward_context, **kwargs):
        pass  # submit() has

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass  # wait_for_save() takes all layers

    @guarded(nothing)
    def wait_for_save(self):
        self.worker.start_saves(self._get_connector_metadata())

    @guarded(lambda *_: (None, None))
    def get_finished(self, finished_req_ids):
        is_idle = self.has_connector_metadata() and self._get_connector_metadata().is_idle
        return None, self.worker.finished_loads(finished_req_ids, is_idle) or None

    @guarded(lambda *_: set())
    def get_block_ids_with_load_errors(self):
        return self.worker.take_bad_blocks()

    @guarded(nothing)
    def build_connector_worker_meta(self):
        return self.worker.take_report()

    # ---- both sides ----

    @property
    def _side(self):
        return self.scheduler or self.worker

    @property
    def _is_open(self):
        return self._side is not None and self._side.library is not None

    @guarded(nothing)
    def get_kv_connector_stats(self):
        """Stats; None: nothing has changed."""
        stats = None
        self._increments.repeat()
        if self._is_open:
            stats = self._increments.since_last(self._side.counters())
            measures = self._side.gauges(), self._side.take_observed()
            stats = self._increments.with_measures(stats, self._side_name(), *measures)
        return self._increments.with_state(stats, self._side_name(), self._state())

    def _side_name(self):
        """Of this object among all of the engine, in its statistics."""
        name, rank = self.role.name.lower(), getattr(getattr(self._side, "library", None), "rank", None)
        return f"{name}{rank.index}" if self.worker is not None and rank is not None and rank.n_ranks > 1 else name

    def _state(self):
        """UP, or the kind of what is wrong."""
        if self._down is not None:
            return self._down
        if self.scheduler is not None and self.scheduler.library.weights.doubt is not None:
            return self.scheduler.library.weights.doubt
        failing = self._side.outages.under_way() if self._side is not None else ()
        return next((kind for kind in FAILING if kind in failing), UP)

    @classmethod
    @guarded(nothing)
    def build_kv_connector_stats(cls, data=None):
        return LoggedStats(data=data or {})

    @classmethod
    @guarded(nothing)
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues, REASONS)

    @guarded(nothing)
    def shutdown(self):
        if self._is_open:
            self._side.close()
        self.scheduler = None
