"""The scheduler's side: looks requests up, and plans what each step loads and saves. No KV passes here.

Runs on the thread of the engine's scheduler, between steps: what waits here would hold up every request, so nothing
does. The worker's side does what is planned, and its report comes back with the step's output.

Surprises:
 1. A request whose load fails is never looked up again: when the first block of a load is bad, vLLM frees all and asks
    anew, and would do so for ever.
 2. vLLM calls update_after_alloc() twice for a request that loads: before the load and, with 0 tokens, after it. And
    once more for each further input of a session (streaming input), with all blocks that it has: no look-up comes
    before that, and the step at hand has it as a new request.
 3. A preempted request comes back through matched_tokens(), with its blocks gone. Once its first token is out it has
    no time to that left to keep: its budget begins anew, and is not counted.
 4. A reset changes the root of all keys: a random one begins the salt of every later look-up and save. The worker takes
    salts from the plans, so it needs to be told of loads under way only. The root lives as long as the engine does: an
    engine that is started anew has the weights that the model's fingerprint names.
"""

import contextlib
import os
import time

from cachegen import abi
from cachegen.vllm.adapters import AskedAdapters, is_outdated
from cachegen.vllm.budgets import Budgets
from cachegen.vllm.deferrals import Deferrals
from cachegen.vllm.guard import Outages, guarded, logger, nothing
from cachegen.vllm.local_cache import LocalCache
from cachegen.vllm.lookups import Lookups
from cachegen.vllm.messages import LoadPlan, Metadata
from cachegen.vllm.metrics import Observed, all_counters
from cachegen.vllm.new_request import new_request, salt_of
from cachegen.vllm.prefill import queued, sample
from cachegen.vllm.request_key import PREFIX, extra_key
from cachegen.vllm.request_state import RequestState
from cachegen.vllm.saves import SavePlanner, n_blocks
from cachegen.vllm.scheduler_output import new_blocks, preempted, scheduled
from cachegen.vllm.shared_loads import SharedLoads

NO_MATCH = (0, False)  # to vLLM: nothing to load
ASK_AGAIN = (None, False)  # to vLLM: in the next step
OTHER_MODEL, OTHER_PROFILE = "other model", "other profile"  # kinds of outages
NOT_STORED = "this engine does not store the prompt to its end"
ADAPTER_WAIT_S = 10  # for the worker to read an adapter; then its request is neither stored nor served
RESET_TAG = b"\0cachegen-reset\0"  # then 16 random bytes: the root of all keys after a reset


class Scheduler:
    def __init__(self, library, failures):
        self.library, self.failures = library, failures
        self.outages = Outages()
        self.states: dict[str, RequestState] = {}
        self._shared_loads = SharedLoads(library)
        self._planned_loads: list[LoadPlan] = []
        self._cancelled_loads: set[str] = set()  # requests
        self._loaded_blocks: set[int] = set()  # that the loads get which the next step starts, also another connector's
        self._root = b""  # begins every salt since the last reset
        self._worker_is_off = False  # for good
        self._has_mixed_blocks = False  # a reset left blocks in vLLM's own prefix cache
        self._had_nothing = False  # the last step: to compute
        self._observed = Observed()
        self._budgets = Budgets(library, failures, self._observed)
        self._lookups = Lookups(library, failures, self.outages, self._budgets, self._observed)
        self._deferrals = Deferrals(failures, self._lookups, self._shared_loads)
        self._adapters = AskedAdapters(library.rank.n_ranks)
        self.local_cache = LocalCache(library, failures, self._adapters)
        self._saves = SavePlanner(library, self.local_cache.provenance)

    # ---- looking up ----

    def matched_tokens(self, request, num_computed_tokens):
        """vLLM's get_num_new_matched_tokens(): (tokens beyond num_computed_tokens, asynchronously)."""
        state = self._state(request)
        matched = self._match(request, state, num_computed_tokens)
        state.is_declined = matched == NO_MATCH
        may_wait = state.is_declined and not self._is_off()
        return ASK_AGAIN if may_wait and self._deferrals.defers(state, self.states.values()) else matched

    def _match(self, request, state, num_computed_tokens):
        if state.allocated:  # preempted, or its load failed: the blocks are gone
            self._budgets.count_first_tokens()  # its own may be there only now, and what it is counted by goes
            self._lookups.drop(state)
            self._shared_loads.end(state)
            state.allocated, state.has_begun = False, False
            state.load, state.loaded, state.saved_to = None, None, None
            state.level, state.has_unknown = 0, False
            state.computed_tokens = 0
            if request.num_output_tokens > 0:
                state.resumed_ns = time.monotonic_ns()
            if request.lora_request is not None:  # vLLM may have dropped it meanwhile, and read it again
                self._check_adapter(request, state)
        if state.root != self._root:
            state.root, state.salt, state.saved_last = self._root, salt_of(request, self._root), False
        state.local_tokens = num_computed_tokens
        if state.adapter is not None and not self._adapter_is_known(request, state):
            return ASK_AGAIN
        if (
            not self.library.may_load
            or self._is_off()
            or state.extra is None
            or state.failed
            or request.skip_reading_prefix_cache
            or len(state.tokens) - num_computed_tokens <= self.library.block_tokens
        ):
            return self._local_hit_only(request, state)
        if not self._lookups.has_answered(state, self.states.values()):
            return ASK_AGAIN
        if state.failed:
            return self._local_hit_only(request, state)
        n_external = state.hit_tokens - num_computed_tokens
        if n_external <= 0:
            return self._local_hit_only(request, state)
        if self.local_cache.refuses(request, state) or self._is_loaded_for_another(state):
            return ASK_AGAIN
        return n_external, True

    def _state(self, request):
        state = self.states.get(request.request_id)
        if state is None:
            state = new_request(request, self.library, self._root, self.outages)
            self.states[request.request_id] = state
            if state.extra is not None and request.lora_request is not None:
                self._check_adapter(request, state)
            elif request.lora_request is not None:  # its blocks stay in vLLM's own prefix cache all the same
                self._adapters.start(request.lora_request)
        return state

    def _check_adapter(self, request, state):
        state.extra, state.adapter_key, state.adapter = None, None, self._adapters.start(request.lora_request)
        state.adapter_until = time.monotonic() + ADAPTER_WAIT_S

    def _adapter_is_known(self, request, state):
        """Whether waiting for the adapter's identity is over."""
        if not state.adapter.is_done and time.monotonic() < state.adapter_until:
            return False
        self._adapters.give_up(state.adapter)  # unless it is done
        state.adapter_key, state.adapter = state.adapter.key, None
        if state.adapter_key is not None and len(state.tokens):
            state.extra = extra_key(request, state.adapter_key[1])
        return True

    def _local_hit_only(self, request, state):
        return ASK_AGAIN if self.local_cache.refuses(request, state) else NO_MATCH

    @guarded(nothing)
    def _is_loaded_for_another(self, state):
        is_caching = self.local_cache.manager.enable_caching
        return is_caching and self._shared_loads.waits(state, state.hit_tokens)

    # ---- planning steps ----

    def _recompute(self, request, blocks, num_external_tokens):
        """What update_after_alloc() could not plan becomes a load that fails: vLLM recomputes its tokens, and without
        an answer of the worker the request would wait for ever."""
        req_id = request.request_id
        state = self.states.get(req_id)
        from_token = 0
        if state is not None:
            state.failed = state.allocated = state.saved_last = True
            from_token = state.local_tokens
        block_ids = blocks.get_block_ids()[0]
        if num_external_tokens > 0:
            self._cancelled_loads.add(req_id)
            if not any(plan.req_id == req_id for plan in self._planned_loads):
                to_token = from_token + num_external_tokens
                self._planned_loads.append(LoadPlan(req_id, from_token, to_token, block_ids, b""))
        self.local_cache.allocate(block_ids[from_token // self.library.block_tokens :], None)

    @guarded(_recompute)
    def update_after_alloc(self, request, blocks, num_external_tokens):
        """Of every request, also where another connector loads for it (then with 0 tokens)."""
        state = self._state(request)
        block_ids = blocks.get_block_ids()[0]
        block_tokens = self.library.block_tokens
        state.allocated = True
        if state.has_begun:
            self._budgets.forget(state)
            self.local_cache.grow(state, block_ids[n_blocks(request.num_computed_tokens, block_tokens) :])
            return
        n_local = n_kept = state.local_tokens // block_tokens
        self._loaded_blocks.update(block_ids[n_local:])
        if num_external_tokens > 0:
            to_token = state.local_tokens + num_external_tokens
            own = block_ids[: n_blocks(to_token, block_tokens)]
            state.load = LoadPlan(
                request.request_id, state.local_tokens, to_token, own, state.plan, state.planned_adapter
            )
            # From here on the worker answers for the request: without an answer it would wait for ever.
            self._planned_loads.append(state.load)
            self._shared_loads.begin(state)
        elif state.load is not None:
            n_kept = len(state.load.block_ids)
        self.local_cache.allocate(block_ids[n_kept:], state.adapter_key)

    def _begin(self, state, block_ids, n_computed):
        """A request is scheduled for the first time since its blocks were allocated: what it has, and what it
        computes."""
        state.has_begun = True
        self._shared_loads.end(state)
        n_own = state.local_tokens if state.load is None else state.load.to_token
        if n_computed > n_own:
            # Another connector has brought the rest. Whether that failed, vLLM asks after wait_for_save() only: by then
            # this step has computed on garbage, and would have stored it.
            state.saved_last = True
        self.local_cache.begin(state, block_ids, n_computed)

    def step(self, scheduler_output):
        """The Metadata of the step at hand. Loads that are planned are in it whatever else fails."""
        metadata = Metadata(loads=self._planned_loads, cancelled_loads=self._cancelled_loads)
        self._planned_loads, self._cancelled_loads = [], set()
        metadata.adapters = self._adapters.take_new()
        self._end_step(scheduler_output, metadata)
        self.local_cache.skip_refused()
        self._lookups.end_step()
        self._deferrals.end_step()
        return metadata

    @guarded(nothing)
    def _end_step(self, scheduler_output, metadata):
        now_ns, n_tokens = time.monotonic_ns(), scheduler_output.total_num_scheduled_tokens
        self._budgets.begin_step(n_tokens)
        for plan in metadata.loads:
            if (state := self.states.get(plan.req_id)) is not None:
                self._observed.note("load_wait_seconds", (now_ns - state.answered_ns) / 1e9)
        metadata.asked_tokens = self._lookups.asked_tokens(self.states.values())
        loaded_blocks, self._loaded_blocks = self._loaded_blocks, set()
        # vLLM may give out the last step's tokens only after this step, so that a wait in it would hold them up.
        metadata.is_idle, self._had_nothing = self._had_nothing and n_tokens == 0, n_tokens == 0
        requests = list(scheduled(scheduler_output))
        metadata.is_recomputing = self._plan_requests(requests, scheduler_output, metadata)
        metadata.prefill_tokens, metadata.prefill_pairs = sample(requests, scheduler_output, self.states)
        self._count_queue(metadata)
        metadata.overwritten = loaded_blocks | new_blocks(scheduler_output, self.library.block_tokens)

    def _plan_requests(self, requests, scheduler_output, metadata):
        """Plans what the step saves, and notes how far requests are and what their new blocks hold. requests: as
        scheduled() has them. Returns whether one computes anew, in its blocks, what it had: what vLLM makes of a load
        that failed."""
        is_recomputing = False
        for req_id in preempted(scheduler_output):
            if (state := self.states.get(req_id)) is not None:
                state.computed_tokens = 0
        for req_id, n_computed, blocks in requests:
            state = self.states.get(req_id)
            if state is None:
                self.local_cache.allocate(blocks[0] if blocks else (), None)
                continue
            is_recomputing |= n_computed < state.computed_tokens
            state.computed_tokens = n_computed
            self._plan_request(state, req_id, n_computed, blocks, scheduler_output, metadata)
        return is_recomputing

    @guarded(nothing)
    def _count_queue(self, metadata):
        """For the library on both sides, with what look-ups have found that vLLM did not ask for in this step."""
        self._lookups.take_answers(self.states.values())
        n_tokens, n_pairs = queued(self.states.values())
        metadata.queued_tokens, metadata.queued_pairs = n_tokens, n_pairs
        self.library.cg.report_queue(n_tokens, n_pairs)

    def _give_request_up(self, state, _req_id, _n_computed, blocks, *_arguments):
        state.saved_last = True
        self.local_cache.adapter_blocks.mark(blocks[0] if blocks else (), None)

    @guarded(_give_request_up)
    def _plan_request(self, state, req_id, n_computed, blocks, scheduler_output, metadata):
        """blocks: new ones, as scheduled() has them."""
        if not state.has_begun:
            self._begin(state, scheduler_output.kv_connector_block_state.get_block_ids(req_id)[0], n_computed)
        elif blocks:
            self.local_cache.grow(state, blocks[0])
        n_after = n_computed + scheduler_output.num_scheduled_tokens[req_id]
        if n_after >= len(state.tokens):
            self._budgets.complete(state)
        if self._may_save(state):
            save = self._saves.plan(scheduler_output, req_id, state, n_computed, n_after)
            if save is not None:
                metadata.saves.append(save)

    def _is_off(self):
        return self._worker_is_off or self.library.weights.doubt is not None

    def _may_save(self, state):
        # A request that a reset has overtaken is of the weights before and of those after: of neither root.
        is_of_one_root = state.root == self._root and not self._has_mixed_blocks
        may_save = self.library.may_save and not self._is_off()
        return state.extra is not None and may_save and is_of_one_root and not state.saved_last

    # ---- what came of it ----

    def take_report(self, report):
        """report: the workers', a WorkerReport, or None."""
        if report is None:
            return
        for req_id, load in report.loads.items():
            state = self.states.get(req_id)
            if state is not None and state.load is not None:  # else: aborted meanwhile
                self._take_load(state, load)
                self._tell_library(state.load, load)
        for prefill in report.prefills:
            self._tell_prefill(*prefill)
        if report.is_off and not self._worker_is_off:
            self._worker_is_off = True
            logger.error("cachegen: a worker can neither load nor store: nothing is looked up or stored any more")
        for other in report.fingerprints - {self.library.fingerprint} if report.fingerprints else ():
            what = f"{self.library.fingerprint}, a worker's is {other}: vLLM changes this model's configuration there"
            self._part(OTHER_MODEL, f"{what}; nothing is looked up or stored")
        for other in report.profiles - {self.library.profile} if report.profiles else ():
            what = f"{self.library.profile or 'none'}, a worker's is {other or 'none'}: profiles/default has changed"
            self._part(OTHER_PROFILE, f"{what}; nothing is looked up or stored until the engine starts anew")
        self._take_taken(report.taken)
        for name, identity in report.told:
            self._adapters.note_told(name, identity)
        self._adapters.take_answers(report.adapters)

    def _part(self, kind, what):
        """From a worker that makes other keys: what it stores is not found, and what is found it cannot load."""
        self.outages.failed(kind, what)
        self._worker_is_off = True

    def _take_taken(self, taken):
        """Adapters that vLLM has read: what was to run with another content of theirs may have run with this one."""
        for number, name, identity in taken:
            self._adapters.note_taken(name, identity)
            self.local_cache.adapter_blocks.doubt(number, identity)
            for state in self.states.values():
                check = state.adapter
                if check is not None and is_outdated(check.key, number, identity):  # answered, and not yet fetched
                    check.key = None
                if is_outdated(state.adapter_key, number, identity):
                    state.extra, state.adapter_key, state.saved_last = None, None, True
                    self._lookups.drop(state)  # it may wait for blocks: what was found is of the other content

    # Ranks may end a load in different steps. vLLM schedules the request after the last of them.
    def _distrust(self, state, _load):
        # What it loaded is not known, so nothing of it is stored; asked again, it might fail for ever. Its blocks stay
        # as they were when they were allocated: unknown.
        state.failed = state.saved_last = True

    @guarded(_distrust)
    def _take_load(self, state, load):
        plan = state.load
        self._observed.note("load_latency_seconds", load.total_ns / 1e9)
        if state.predicted_ns and load.loaded_tokens == plan.to_token:
            self._observed.note("load_time_ratio", load.total_ns / state.predicted_ns)
        state.awaits_first_token, state.load_ended_ns = not state.resumed_ns, time.monotonic_ns()
        load = state.loaded = load if state.loaded is None else state.loaded.joined(load)
        state.failed = state.failed or load.loaded_tokens < plan.to_token
        n_loaded = max(0, load.loaded_tokens - plan.from_token)
        if n_loaded:
            self.local_cache.load(state, plan, load)
            state.report["level"] = f"L{load.worst_level}"
        state.report.update(
            hit_tokens=n_loaded,
            levels=[f"L{level}" for level in load.levels],
            predicted_kl=load.predicted_kl,
            bytes=load.bytes_read,
            bytes_dropped=load.bytes_dropped,
            load_ms=load.total_ns / 1e6,
            read_ms=load.read_ns / 1e6,
            decode_ms=load.decode_ns / 1e6,
            copy_ms=load.copy_ns / 1e6,
        )

    @guarded(nothing)
    def _tell_library(self, plan, load):
        cg = self.library.cg
        cg.report_load(plan.from_token, load)
        if load.loaded_tokens < plan.to_token and plan.plan:
            with contextlib.suppress(abi.CachegenError):  # bytes that are no plan
                cg.forget_failed(plan.plan, load)

    @guarded(nothing)
    def _tell_prefill(self, n_tokens, n_pairs, duration_ns):
        self.library.cg.report_prefill(n_tokens, n_pairs, duration_ns)

    def finish(self, request, block_ids):
        """The kv_transfer_params of the request's answer; None: it was never seen here. block_ids: the request's,
        still."""
        state = self.states.pop(request.request_id, None)
        if state is None:
            return None
        self._lookups.drop(state)
        self._shared_loads.end(state)
        self._budgets.finish(state)
        self.local_cache.leave_no_worse(state, block_ids)
        report = {"hit_tokens": 0, **state.report}
        if "context" in report and not state.is_named:
            del report["context"]
            report["context_refused"] = NOT_STORED
        if state.level:
            report["provenance"] = f"L{state.level}"
        return {PREFIX + key: value for key, value in report.items()}

    def reset(self):
        """vLLM's reset_cache(), called when weights were replaced: from here on nothing that was stored or computed
        before is found. False: vLLM holds blocks from before, so that nothing is stored either, until the next
        reset."""
        self._root = RESET_TAG + os.urandom(16)
        for req_id, state in self.states.items():
            self._lookups.drop(state)
            if state.load is not None:
                self._cancelled_loads.add(req_id)
        # vLLM empties its own prefix cache only when no block is held.
        self._has_mixed_blocks = self.local_cache.manager.usage > 0
        logger.info("cachegen: reset: nothing that was stored until now is loaded")
        if self._has_mixed_blocks:
            logger.error("cachegen: vLLM keeps blocks from before the reset: nothing is stored until another reset")
        return not self._has_mixed_blocks

    def counters(self):
        stats = self.library.cg.get_stats().as_dict()
        self._lookups.note_errors(stats)
        return all_counters(
            stats,
            budget_met=self._budgets.n_met,
            budget_missed=self._budgets.n_missed,
            loads_shared=self._shared_loads.n_waiting,
        )

    def gauges(self):
        return {"lookups_running": sum(state.lookup is not None for state in self.states.values())}

    def take_observed(self):
        return self._observed.take()

    def close(self):
        for state in self.states.values():
            self._lookups.drop(state)
        self.states = {}
        self.library.close()
