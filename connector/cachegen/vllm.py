"""CachegenConnector: maps vLLM's KV-connector calls (V1) to libcachegen.so.

Loaded with kv_connector="CachegenConnector", kv_connector_module_path="cachegen.vllm" and, so that a failed load costs
time and never an answer, kv_load_failure_policy="recompute". kv_connector_extra_config is the library's configuration
(README.md, "Configuration"); two keys are this module's own: "library", the path of libcachegen.so, and "lookup_wait_ms",
how long the scheduler waits for a look-up before it asks again in its next step (default 5).

Per request, in kv_transfer_params: "cachegen.context" (a name to publish the prompt under), "cachegen.worst_level"
("L0" ... "L3", the worst quality accepted), "cachegen.level" (the one level to use), "cachegen.ttft_budget_ms". The
answer's kv_transfer_params say what came from the store.

Surprises:
 1. Loads are asynchronous and start in handle_preemptions(), before the step's forward: vLLM calls start_load_kv()
    after it unless a synchronous load waits, and a prefill beside it would hold the load up for seconds.
 2. A request whose load fails is never looked up again: when the first block of a load is bad, vLLM frees all and asks
    anew, and would do so for ever.
 3. vLLM's own prefix cache holds KV that was loaded lossily or computed after such KV. The scheduler side remembers
    these blocks by number, so that a save records them as what they are, and a request that demands better recomputes.
 4. Nothing here raises into the engine: a failure is a log line and a miss.
"""

import array
import functools
import json
import os
import select
import time
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from cachegen import abi
from cachegen.fingerprint import adapter_fingerprint, model_fingerprint

logger = init_logger("vllm.cachegen")  # below "vllm", whose handlers print

PREFIX = "cachegen."
OWN_KEYS = ("library", "lookup_wait_ms")
SAMPLE_MIN_TOKENS = 64  # a step with fewer prefill tokens says little about the speed of prefilling
SAVE_RETRY_S = 0.2
IDLE_WAIT_S = 0.01  # a new request waits that long at most


class Unsupported(Exception):
    """Why this engine's KV can be neither stored nor served."""


# ---- what crosses between the two sides; plain data, pickled ----


@dataclass
class LoadPlan:
    req_id: str
    from_token: int
    to_token: int
    block_ids: list[int]
    plan: bytes


@dataclass
class SavePlan:
    req_id: str
    tokens: array.array
    salt: bytes
    extra: bytes
    from_token: int
    to_token: int
    prefix_level: int
    is_last: bool
    block_ids: list[int]
    context: str | None


@dataclass
class Metadata(KVConnectorMetadata):
    loads: list[LoadPlan] = field(default_factory=list)
    saves: list[SavePlan] = field(default_factory=list)
    prefill_tokens: int = 0  # 0: this step says nothing about the speed of prefilling
    is_idle: bool = False  # nothing is scheduled in this step


@dataclass
class LoadReport:
    loaded_tokens: int
    worst_level: int
    bytes_read: int = 0
    read_ns: int = 0
    decode_ns: int = 0
    copy_ns: int = 0
    total_ns: int = 0


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    loads: dict[str, LoadReport] = field(default_factory=dict)
    prefills: list[tuple[int, int]] = field(default_factory=list)  # (n_tokens, duration_ns)

    def aggregate(self, other):
        self.loads.update(other.loads)
        self.prefills += other.prefills
        return self


# ---- statistics ----


class Stats(KVConnectorStats):
    """Increments of the library's counters since the last report, and load_ns, the wall time of loads; throughput_bps is
    the newest value."""

    def reset(self):
        self.data = {}

    def aggregate(self, other):
        for name, value in other.data.items():
            if name == "throughput_bps":
                self.data[name] = value or self.data.get(name, 0)
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self):
        return {name: value for name, value in self.data.items() if value}

    def is_empty(self):
        return not any(self.data.values())


class PromMetrics(KVConnectorPromMetrics):
    """The counters as vllm:cachegen_<name>; nanoseconds as seconds, a number a level with the label level."""

    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {}  # counter -> (metric by engine, factor)
        made = {}
        for counter in (*abi.Stats().as_dict(), "load_ns"):
            name, level = (counter[:-3], counter[-1]) if counter[-3:-1] == "_l" else (counter, None)
            factor = 1
            if name.endswith("_ns"):
                name, factor = name[:-3] + "_seconds", 1e-9
            if name not in made:
                kind = self._gauge_cls if counter == "throughput_bps" else self._counter_cls
                names = labelnames + ([] if level is None else ["level"])
                made[name] = kind(
                    name=f"vllm:cachegen_{name}", documentation=f"libcachegen: {name}", labelnames=names
                )
            by_engine = {
                engine: made[name].labels(*values, *([] if level is None else [f"L{level}"]))
                for engine, values in per_engine_labelvalues.items()
            }
            self._metrics[counter] = by_engine, factor

    def observe(self, transfer_stats_data, engine_idx=0):
        for counter, value in transfer_stats_data.items():
            if counter not in self._metrics:
                continue
            by_engine, factor = self._metrics[counter]
            if counter == "throughput_bps":
                by_engine[engine_idx].set(value)
            elif value:
                by_engine[engine_idx].inc(value * factor)


# ---- what a request is and wants ----


@dataclass
class Options:
    context: str | None = None
    worst_level: int | None = None
    level: int | None = None
    ttft_budget_ns: int = 0


def _parse_level(value):
    if isinstance(value, str) and len(value) == 2 and value[0] in "Ll" and value[1] in "0123":
        return int(value[1])
    raise ValueError(f"{value!r} is no level: L0 ... L3")


def parse_options(params):
    params = params or {}
    options = Options()
    if (context := params.get(PREFIX + "context")) is not None:
        options.context = str(context)
    if (level := params.get(PREFIX + "worst_level")) is not None:
        options.worst_level = _parse_level(level)
    if (level := params.get(PREFIX + "level")) is not None:
        options.level = _parse_level(level)
    if (budget := params.get(PREFIX + "ttft_budget_ms")) is not None:
        options.ttft_budget_ns = max(0, int(float(budget) * 1e6))
    return options


@functools.lru_cache(maxsize=64)
def _adapter_identity(path, _newest_mtime_ns):
    return adapter_fingerprint(path)


def extra_key(request):
    """What makes the request's KV differ besides tokens and salt, as bytes; None if that cannot be told."""
    if request.prompt_embeds is not None or request.prompt_is_token_ids is not None or not request.prompt_token_ids:
        return None
    key = {}
    if (lora := request.lora_request) is not None:
        # By content: a name or a path may hold another adapter tomorrow. An adapter that is no readable directory
        # cannot be told from another of its name.
        if not os.path.isdir(lora.lora_path):
            return None
        newest = max(entry.stat().st_mtime_ns for entry in os.scandir(lora.lora_path))
        key["lora"] = [lora.lora_name, _adapter_identity(lora.lora_path, newest)]
    if request.mm_features:
        key["mm"] = [[f.identifier, f.mm_position.offset, f.mm_position.length] for f in request.mm_features]
    return json.dumps(key, sort_keys=True, separators=(",", ":")).encode() if key else b""


@dataclass
class RequestState:
    """What the scheduler side knows of one request."""

    tokens: array.array  # the prompt
    salt: bytes
    extra: bytes | None  # None: neither stored nor served
    options: Options
    lookup: object = None  # the handle, while it is under way
    lookup_from: int = 0
    lookup_started_ns: int = 0
    hit_tokens: int | None = None  # the look-up's answer
    plan: bytes = b""
    failed: bool = False  # a load failed: recompute, don't ask again
    allocated: bool = False
    local_tokens: int = 0  # what vLLM's own prefix cache has
    level: int = 0  # worst level of anything that the KV so far was loaded with or computed after
    load: LoadPlan | None = None
    saved_to: int | None = None  # None: not scheduled since it was admitted
    saved_last: bool = False
    report: dict = field(default_factory=dict)


# ---- the connector ----


def _guarded(default):
    """A failure in the method is a log line and default(); so is every call of a disabled connector."""

    def decorate(method):
        @functools.wraps(method)
        def call(self, *args, **kwargs):
            if self._cg is None:
                return default()
            try:
                return method(self, *args, **kwargs)
            except Exception:
                self._log_failure(method.__name__)
                return default()

        return call

    return decorate


def _nothing():
    return None


class CachegenConnector(KVConnectorBase_V1):
    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._cg = None
        self._n_failures = 0
        self._reported = {}  # the counters as of the last report
        extra = dict(self._kv_transfer_config.kv_connector_extra_config or {})
        own = {key: extra.pop(key) for key in OWN_KEYS if key in extra}
        self._lookup_wait_s = float(own.get("lookup_wait_ms", 5)) / 1e3
        self._block_tokens = vllm_config.cache_config.block_size
        self._worst_level = _parse_level(extra.get("worst_level", "L3"))
        self._tail_tokens = int(extra.get("tail_multiple", 32))
        self._loads_allowed = self._kv_transfer_config.is_kv_consumer
        self._saves_allowed = self._kv_transfer_config.is_kv_producer
        # scheduler side
        self._states: dict[str, RequestState] = {}
        self._planned_loads: list[LoadPlan] = []
        self._recomputed: list = []  # requests that are not to use vLLM's own prefix cache
        self._block_level: dict[int, int] = {}  # block -> provenance, where it is not lossless
        self._lossy_blocks: set[int] = set()  # of these, the ones that hold loaded tokens: never encoded again
        # worker side
        self._kv_id = None
        self._loads: dict[str, tuple[LoadPlan, object]] = {}
        self._failed_loads: list[LoadPlan] = []
        self._bad_blocks: set[int] = set()
        self._saves: list = []
        self._waiting_saves: list[SavePlan] = []
        self._unsaved: set[str] = set()  # requests with a chunk that was dropped: what follows could not be reached
        self._worker_report = WorkerReport()
        self._load_ns = 0
        self._submitted = None
        self._step_started_ns = 0
        try:
            config = self._configuration(extra, vllm_config, kv_cache_config)
            self._cg = abi.Connector(config, own.get("library"))
            info = self._cg.get_info()
            fingerprint, stored = config["geometry"]["model_fingerprint"], info.model_fingerprint_hex.decode()
            if stored != fingerprint:
                raise Unsupported(f"the store's model {info.model.decode()} is {stored}, the engine's is {fingerprint}")
            self._chunk_tokens = info.chunk_tokens
            self._eventfd = self._cg.eventfd()
        except Exception as e:
            self._disable(e)
            return
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            logger.warning('cachegen: set kv_load_failure_policy to "recompute": now a failed load fails its request')
        logger.info(
            "cachegen: model %s, %d tokens a chunk, levels %s, %s",
            info.model.decode(),
            info.chunk_tokens,
            " ".join(f"L{level}" for level in range(abi.N_LEVELS) if info.store_levels >> level & 1),
            "profile " + info.profile_fingerprint_hex.decode() if info.has_profile else "no profile: L0 only",
        )

    def _disable(self, reason):
        cg, self._cg = self._cg, None
        if cg is not None:
            cg.close()
        if isinstance(reason, (Unsupported, abi.CachegenError, OSError)):
            logger.error("cachegen: connector disabled: every look-up is a miss, nothing is stored: %s", reason)
        else:
            logger.exception("cachegen: connector disabled: every look-up is a miss, nothing is stored")

    def _log_failure(self, where):
        self._n_failures += 1
        if self._n_failures <= 5 or self._n_failures % 1000 == 0:
            logger.exception("cachegen: %s failed (%d failures so far); it counts as a miss", where, self._n_failures)

    @staticmethod
    def _configuration(extra, vllm_config, kv_cache_config):
        model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
        if not current_platform.is_cpu():
            raise Unsupported(f"KV layouts of platform {current_platform.device_name} are not known, only CPU_ATTN is")
        if parallel.world_size != 1:
            raise Unsupported(
                f"tensor_parallel_size {parallel.tensor_parallel_size} x pipeline_parallel_size "
                f"{parallel.pipeline_parallel_size}: one worker is supported"
            )
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise Unsupported(f"{len(groups)} KV-cache groups (hybrid attention): one is supported")
        spec = groups[0].kv_cache_spec
        if type(spec) is not FullAttentionSpec:
            raise Unsupported(f"{type(spec).__name__}: FullAttentionSpec is supported")
        dtypes = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
        if str(spec.dtype) not in dtypes:
            raise Unsupported(f"KV cache of {spec.dtype}: bf16, fp16 and fp32 are supported")
        model_dir = _model_dir(model_config)
        config = {"model": os.path.basename(os.path.normpath(model_dir)), **extra}
        config["geometry"] = {
            "n_layers": len(groups[0].layer_names),
            "n_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_size,
            "dtype": dtypes[str(spec.dtype)],
            "model_fingerprint": model_fingerprint(model_dir, _variant(vllm_config)),
        }
        return config

    @property
    def requires_kv_delivery(self):
        return False  # a save that is dropped is a later miss

    # ---- scheduler side ----

    def _state(self, request):
        state = self._states.get(request.request_id)
        if state is None:
            try:
                options = parse_options(request.kv_transfer_params)
                extra = extra_key(request)
            except Exception as e:
                logger.warning("cachegen: request %s is neither stored nor served: %s", request.request_id, e)
                options, extra = Options(), None
            tokens = array.array("I", request.prompt_token_ids if extra is not None else ())
            salt = (request.cache_salt or "").encode()
            state = self._states[request.request_id] = RequestState(tokens, salt, extra, options)
        return state

    @_guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        state = self._state(request)
        if state.allocated:  # preempted, or its load failed: the blocks are gone
            self._drop_lookup(state)
            state.allocated, state.load, state.saved_to, state.level = False, None, None, 0
        state.local_tokens = num_computed_tokens
        if (
            not self._loads_allowed
            or state.extra is None
            or state.failed
            or request.skip_reading_prefix_cache
            or len(state.tokens) - num_computed_tokens < self._block_tokens
        ):
            return self._local_hit_only(request, state)
        try:
            if not self._looked_up(state):
                return None, False
        except Exception:
            state.failed = True
            raise
        n_external = self._usable_tokens(state) - num_computed_tokens
        if n_external <= 0:
            return self._local_hit_only(request, state)
        refused = self._refuse_local_hit(request, state)
        return refused or (n_external, True)

    def _local_hit_only(self, request, state):
        return self._refuse_local_hit(request, state) or (0, False)

    def _refuse_local_hit(self, request, state):
        """Recomputes all of a request that demands better KV than vLLM's own prefix cache has for it."""
        worst = self._worst_level if state.options.worst_level is None else state.options.worst_level
        if not state.local_tokens or not self._block_level or request.skip_reading_prefix_cache:
            return None
        blocks = self._kv_cache_manager.get_computed_blocks(request)[0].get_block_ids()[0]
        if max((self._block_level.get(block, 0) for block in blocks), default=0) <= worst:
            return None
        # Asked again in the next step, without the local hit: set now, the flag would let this step's hit pass.
        self._recomputed.append(request)
        return None, False

    def _looked_up(self, state):
        """Whether the look-up has answered; starts it. Waits a little: a further step costs the engine more."""
        if state.hit_tokens is not None and state.lookup_from <= state.local_tokens:
            return True
        if state.lookup is None or state.lookup_from > state.local_tokens:
            self._drop_lookup(state)
            options = state.options
            request = abi.make_request(
                state.tokens, state.salt, state.extra, options.worst_level, options.level, options.ttft_budget_ns
            )
            state.lookup_from = state.local_tokens
            state.lookup_started_ns = time.monotonic_ns()
            state.lookup = self._cg.lookup_start(request, state.local_tokens)
        deadline = time.monotonic() + self._lookup_wait_s
        while (hit := self._cg.lookup_poll(state.lookup)) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._wait(left)
        state.hit_tokens = hit.hit_tokens
        state.plan = self._cg.lookup_plan(state.lookup) if hit.hit_tokens else b""
        self._cg.lookup_free(state.lookup)
        state.lookup = None
        state.report["lookup_ms"] = (time.monotonic_ns() - state.lookup_started_ns) / 1e6
        return True

    def _wait(self, seconds):
        """Until an operation of the connector completes. Nobody else reads this connector's eventfd."""
        if self._eventfd < 0:
            time.sleep(min(seconds, 1e-3))
        elif select.select([self._eventfd], [], [], seconds)[0]:
            os.read(self._eventfd, 8)

    def _usable_tokens(self, state):
        """The hit, less a short last chunk that the prompt goes beyond: the full chunk can only be stored if all of
        it is computed, and without it nothing behind it would ever be found."""
        n_tail = state.hit_tokens % self._chunk_tokens
        whole = state.hit_tokens - n_tail
        return whole if n_tail and len(state.tokens) >= whole + self._chunk_tokens else state.hit_tokens

    def _drop_lookup(self, state):
        if state.lookup is not None:
            self._cg.lookup_free(state.lookup)
        state.lookup, state.hit_tokens, state.plan = None, None, b""

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if self._cg is None:
            return
        try:
            state = self._state(request)
            block_ids = blocks.get_block_ids()[0]
            state.allocated = True
            if num_external_tokens > 0:
                to_token = state.local_tokens + num_external_tokens
                n_blocks = -(-to_token // self._block_tokens)
                state.load = LoadPlan(
                    request.request_id, state.local_tokens, to_token, block_ids[:n_blocks], state.plan
                )
                # From here on the worker answers for the request: without an answer it would wait for ever.
                self._planned_loads.append(state.load)
                self._inherit_level(state, block_ids)
            else:
                self._inherit_level(state, block_ids)
                n_kept = state.local_tokens // self._block_tokens if state.load is None else len(state.load.block_ids)
                self._mark(block_ids[n_kept:], state.level, loaded=False)
        except Exception:
            self._log_failure("update_state_after_alloc")

    def _inherit_level(self, state, block_ids):
        if self._block_level:
            local = block_ids[: state.local_tokens // self._block_tokens]
            state.level = max(state.level, max((self._block_level.get(b, 0) for b in local), default=0))

    def _mark(self, block_ids, level, loaded):
        if level:
            self._block_level.update(dict.fromkeys(block_ids, level))
        elif self._block_level:
            for block in block_ids:
                self._block_level.pop(block, None)
        if level and loaded:
            self._lossy_blocks.update(block_ids)
        elif self._lossy_blocks:
            self._lossy_blocks.difference_update(block_ids)

    def build_connector_meta(self, scheduler_output):
        metadata = Metadata(loads=self._planned_loads)
        self._planned_loads = []
        for request in self._recomputed:
            request.skip_reading_prefix_cache = True
        self._recomputed = []
        if self._cg is None:
            return metadata
        try:
            self._plan_step(scheduler_output, metadata)
        except Exception:
            self._log_failure("build_connector_meta")
        return metadata

    def _plan_step(self, scheduler_output, metadata):
        n_prefill = 0
        metadata.is_idle = scheduler_output.total_num_scheduled_tokens == 0
        cached = scheduler_output.scheduled_cached_reqs
        new = ((r.req_id, r.num_computed_tokens, None) for r in scheduler_output.scheduled_new_reqs)
        old = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids)
        for req_id, n_computed, new_blocks in (*new, *old):
            state = self._states.get(req_id)
            if state is None:
                continue
            # A resumed request's blocks are all in new_blocks, and update_state_after_alloc() has seen them.
            if new_blocks and req_id not in cached.resumed_req_ids:
                self._mark(new_blocks[0], state.level, loaded=False)
            n_scheduled = scheduler_output.num_scheduled_tokens[req_id]
            if n_computed < len(state.tokens):
                n_prefill += n_scheduled
            if state.extra is not None and self._saves_allowed and not state.saved_last:
                save = self._plan_save(scheduler_output, req_id, state, n_computed, n_computed + n_scheduled)
                if save is not None:
                    metadata.saves.append(save)
        n_total = scheduler_output.total_num_scheduled_tokens
        if n_prefill >= SAMPLE_MIN_TOKENS and n_prefill >= 0.9 * n_total:
            metadata.prefill_tokens = n_prefill

    def _plan_save(self, scheduler_output, req_id, state, n_computed, n_after):
        """What this step completes of the prompt: whole chunks, and at the end a short one."""
        n_prompt = len(state.tokens)
        block_ids = None
        if state.saved_to is None:
            block_ids = scheduler_output.kv_connector_block_state.get_block_ids(req_id)[0]
            state.saved_to = n_computed // self._chunk_tokens * self._chunk_tokens
            first = state.saved_to // self._block_tokens
            if any(block in self._lossy_blocks for block in block_ids[first : -(-n_computed // self._block_tokens)]):
                # The chunk at hand is partly loaded at a lossy level: not encoded again, nor what follows it.
                state.saved_to = n_prompt
        is_last = n_after >= n_prompt
        unit = self._tail_tokens if is_last else self._chunk_tokens
        to_token = max(state.saved_to, min(n_after, n_prompt) // unit * unit)
        state.saved_last = is_last
        from_token, state.saved_to = state.saved_to, to_token
        if is_last and from_token >= to_token:  # only the name is left to publish
            from_token = to_token = n_prompt // unit * unit
            if state.options.context is None:
                return None
        elif from_token >= to_token:
            return None
        if block_ids is None:
            block_ids = scheduler_output.kv_connector_block_state.get_block_ids(req_id)[0]
        return SavePlan(
            req_id,
            state.tokens,
            state.salt,
            state.extra,
            from_token,
            to_token,
            state.level,
            is_last,
            block_ids[: -(-to_token // self._block_tokens)],
            state.options.context,
        )

    @_guarded(_nothing)
    def update_connector_output(self, connector_output):
        report = connector_output.kv_connector_worker_meta
        if report is None:
            return
        for n_tokens, duration_ns in report.prefills:
            self._cg.report_prefill(n_tokens, duration_ns)
        for req_id, load in report.loads.items():
            state = self._states.get(req_id)
            if state is None or state.load is None:  # aborted meanwhile
                continue
            plan = state.load
            self._cg.report_load(
                plan.from_token, load.loaded_tokens, load.worst_level, load.bytes_read, load.read_ns, load.decode_ns
            )
            if load.loaded_tokens < plan.to_token:
                state.failed = True
                try:
                    self._cg.forget(plan.plan)
                except abi.CachegenError:
                    pass  # bytes that are no plan; state.failed is what keeps us from looping
            n_loaded = max(0, load.loaded_tokens - plan.from_token)
            if n_loaded:
                first, end = plan.from_token // self._block_tokens, -(-load.loaded_tokens // self._block_tokens)
                state.level = max(state.level, load.worst_level)
                # The level of the prefix counts for what was loaded after it, too.
                self._mark(plan.block_ids[first:end], state.level, loaded=load.worst_level > 0)
                self._mark(plan.block_ids[end:], state.level, loaded=False)
                state.report["level"] = f"L{load.worst_level}"
            state.report.update(
                hit_tokens=n_loaded,
                bytes=load.bytes_read,
                load_ms=load.total_ns / 1e6,
                read_ms=load.read_ns / 1e6,
                decode_ms=load.decode_ns / 1e6,
                copy_ms=load.copy_ns / 1e6,
            )

    @_guarded(lambda: (False, None))
    def request_finished(self, request, block_ids):
        state = self._states.pop(request.request_id, None)
        if state is None:
            return False, None
        self._drop_lookup(state)
        report = {"hit_tokens": 0, **state.report}
        if state.level:
            report["provenance"] = f"L{state.level}"
        return False, {PREFIX + key: value for key, value in report.items()}

    # ---- worker side ----

    def register_kv_caches(self, kv_caches):
        if self._cg is None:
            return
        try:
            self._kv_id = self._cg.register_kv(**_cpu_attn_layout(kv_caches, self._vllm_config))
        except Exception as e:
            self._disable(e)

    def handle_preemptions(self, kv_connector_metadata):
        self._submit(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata):
        super().bind_connector_metadata(connector_metadata)
        self._submit(connector_metadata)

    def _submit(self, metadata):
        """Once a step, before its forward and before anything overwrites a block that the last step freed."""
        if self._submitted is metadata:
            return
        self._submitted = metadata
        self._retry_saves()
        for plan in metadata.loads:
            try:
                if self._cg is None:
                    raise Unsupported("the worker's connector is disabled")
                load = self._cg.load_start(self._kv_id, plan.from_token, plan.to_token, plan.block_ids, plan.plan)
                self._loads[plan.req_id] = plan, load
            except Exception:
                self._log_failure("load")
                self._failed_loads.append(plan)
        self._step_started_ns = time.monotonic_ns()

    def start_load_kv(self, forward_context, **kwargs):
        pass  # _submit() has

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass  # wait_for_save() takes all layers

    @_guarded(_nothing)
    def wait_for_save(self):
        metadata = self._get_connector_metadata()
        if metadata.prefill_tokens:
            duration_ns = time.monotonic_ns() - self._step_started_ns
            self._worker_report.prefills.append((metadata.prefill_tokens, duration_ns))
        for plan in metadata.saves:
            if not self._save(plan):
                self._waiting_saves.append(plan)

    def _save(self, plan):
        """False: no staging memory."""
        if plan.req_id in self._unsaved:
            return True
        try:
            request = abi.make_request(plan.tokens, plan.salt, plan.extra)
            save = self._cg.save_start(
                request,
                self._kv_id,
                plan.from_token,
                plan.to_token,
                plan.prefix_level,
                plan.is_last,
                plan.block_ids,
                plan.context,
            )
        except Exception:
            self._log_failure("save")
            return True
        if save is not None:
            self._saves.append(save)
        return save is not None

    def _retry_saves(self):
        """The blocks of the last step are still as they were, the next forward may overwrite them: now or never."""
        plans, self._waiting_saves = self._waiting_saves, []
        deadline = time.monotonic() + SAVE_RETRY_S
        for plan in plans:
            while self._cg is not None and not self._save(plan):
                if time.monotonic() >= deadline:
                    logger.warning("cachegen: no staging memory: request %s is stored in part", plan.req_id)
                    self._unsaved.add(plan.req_id)
                    break
                self._wait(1e-3)

    def get_finished(self, finished_req_ids):
        finished = set()
        self._unsaved -= finished_req_ids
        failed, self._failed_loads = self._failed_loads, []
        for plan in failed:
            self._finish_load(plan, LoadReport(plan.from_token, 0))
            finished.add(plan.req_id)
        self._poll_loads(finished_req_ids, finished)
        # vLLM asks again at once, in a busy loop that takes the CPU from our decoding threads.
        if self._loads and not finished and self.has_connector_metadata() and self._get_connector_metadata().is_idle:
            self._wait(IDLE_WAIT_S)
            self._poll_loads(finished_req_ids, finished)
        if self._cg is not None:
            self._collect_saves()
        return None, finished or None

    def _poll_loads(self, cancelled, finished):
        for req_id, (plan, load) in list(self._loads.items()):
            report = self._poll_load(plan, load, cancel=req_id in cancelled)
            if report is not None:
                del self._loads[req_id]
                self._finish_load(plan, report)
                finished.add(req_id)

    def _poll_load(self, plan, load, cancel):
        """A LoadReport once nothing is written to the blocks any more."""
        try:
            if cancel:
                self._cg.load_cancel(load)
            progress = self._cg.load_poll(load)
            if not progress.done:
                return None
            self._cg.load_free(load)
            loaded = min(max(progress.loaded_tokens, plan.from_token), plan.to_token)
            if progress.status != abi.OK and not cancel:
                logger.warning(
                    "cachegen: request %s: %d of %d tokens loaded: %s; the rest is recomputed",
                    plan.req_id,
                    loaded - plan.from_token,
                    plan.to_token - plan.from_token,
                    self._cg.strerror(progress.status),
                )
            return LoadReport(
                loaded,
                progress.worst_level,
                progress.bytes_read,
                progress.read_ns,
                progress.decode_ns,
                progress.copy_ns,
                progress.total_ns,
            )
        except Exception:
            self._log_failure("load")
            self._cg.load_free(load)
            return LoadReport(plan.from_token, 0)

    def _finish_load(self, plan, report):
        first_bad = report.loaded_tokens // self._block_tokens
        if report.loaded_tokens < plan.to_token:
            self._bad_blocks.update(plan.block_ids[first_bad:])
        self._worker_report.loads[plan.req_id] = report
        self._load_ns += report.total_ns

    def _collect_saves(self):
        under_way = []
        for save in self._saves:
            try:
                progress = self._cg.save_poll(save)
                if not progress.done:
                    under_way.append(save)
                    continue
                self._cg.save_free(save)
                if progress.status != abi.OK:
                    logger.warning("cachegen: a save failed: %s", self._cg.strerror(progress.status))
            except Exception:
                self._log_failure("save")
        self._saves = under_way

    def get_block_ids_with_load_errors(self):
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def build_connector_worker_meta(self):
        report, self._worker_report = self._worker_report, WorkerReport()
        return report if report.loads or report.prefills else None

    # ---- both sides ----

    @_guarded(_nothing)
    def get_kv_connector_stats(self):
        counters = {**self._cg.get_stats().as_dict(), "load_ns": self._load_ns}
        if counters == self._reported:
            return None
        increments = {name: value - self._reported.get(name, 0) for name, value in counters.items()}
        increments["throughput_bps"] = counters["throughput_bps"]
        self._reported = counters
        return Stats(data=increments)

    @classmethod
    def build_kv_connector_stats(cls, data=None):
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @_guarded(_nothing)
    def shutdown(self):
        for state in self._states.values():
            self._drop_lookup(state)
        for _, load in self._loads.values():
            self._cg.load_free(load)
        for save in self._saves:
            self._cg.save_free(save)
        self._states, self._loads, self._saves = {}, {}, []
        cg, self._cg = self._cg, None
        cg.close()


def _model_dir(model_config):
    """The directory of the weights; a name on the hub as the snapshot that vLLM has fetched."""
    if os.path.isdir(model_config.model):
        return model_config.model
    from huggingface_hub import snapshot_download

    return snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True)


def _variant(vllm_config):
    """What vLLM computes differently from what the model's directory says."""
    model_config = vllm_config.model_config
    variant = {}
    if overrides := getattr(model_config, "hf_overrides", None):
        variant["hf_overrides"] = overrides if isinstance(overrides, dict) else repr(overrides)
    if model_config.quantization and not getattr(model_config.hf_config, "quantization_config", None):
        variant["quantization"] = str(model_config.quantization)
    if getattr(vllm_config.load_config, "load_format", "auto") == "dummy":
        variant["load_format"] = f"dummy, seed {model_config.seed}"
    return json.dumps(variant, sort_keys=True, default=repr) if variant else ""


def _cpu_attn_layout(kv_caches, vllm_config):
    """register_kv()'s arguments for CPU_ATTN. A layer is [n_blocks][n_kv_heads][block_tokens][2 x head_dim], but the
    last two dimensions only count: the region of a (block, head) is the K area, then the V area, and how these are
    packed depends on what vLLM calls the isa."""
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
    dtype = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}.get(str(first.dtype))
    if dtype is None:
        raise Unsupported(f"KV cache of {first.dtype}")
    isa = _get_attn_isa(first.dtype, block_tokens, head_dim, vllm_config.cache_config.cache_dtype)
    fields = dict(
        bases=[kv_caches[name].data_ptr() for name in names],
        memory=abi.MEMORY_HOST,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        dtype=abi.DTYPES[dtype],
        block_tokens=block_tokens,
        n_blocks=n_blocks,
        block_stride=first.stride(0) * size,
        head_stride=(first.stride(1) * size,) * 2,
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
