"""The worker's side: moves KV between the engine's blocks and the store, as the scheduler's side has planned.

Runs on the thread of the engine's worker. The library's own threads read, decode and copy; here loads and saves are
started and asked for. Copying out of blocks goes on beside the next forwards; a step that gives such a block to
somebody else waits COPY_WAIT_S for the copy at most. Then what is not copied is not saved. On a GPU such a step's work
waits for the copy, on the engine's stream, and nothing waits here.

Surprises:
 1. Loads are asynchronous and start in submit(), before the step's forward: vLLM calls start_load_kv() after it unless
    a synchronous load waits, and a prefill beside it would hold the load up for seconds.
 2. Each load that the scheduler's side has planned must be answered for, even by a worker that is disabled: without an
    answer the request waits for ever. A failed load names its bad blocks, and vLLM recomputes these.
 3. vLLM's second model runner zeroes new blocks, and copies blocks that requests share in part, before it calls
    submit(). It does neither with one group of plain attention, and others are refused.
"""

import time

from cachegen import abi
from cachegen.vllm.adapters import HeldAdapters, is_outdated
from cachegen.vllm.gpu import GpuSteps, HostSteps
from cachegen.vllm.guard import Outages, guarded, logger, nothing
from cachegen.vllm.kv_layout import kernel_blocks, kv_layout
from cachegen.vllm.library import Unsupported
from cachegen.vllm.messages import LoadPlan, LoadReport, WorkerReport
from cachegen.vllm.metrics import all_counters
from cachegen.vllm.saves import n_blocks
from cachegen.vllm.versions import refusal

# Kinds of outages.
LOADS, SAVES, STAGING, GPU = "failing loads", "failing saves", "staging memory is full", "GPU error"
FAULTS = (abi.IO, abi.PERMISSION, abi.NO_MEMORY, abi.DEVICE)  # of the store or this host, not of a chunk
STEP_WAIT_S = 0.01  # all waits of a step; in one that computes nothing a new request waits for them
COPY_WAIT_S = 0.005  # for copies that are in the way of a step


def _is_outage(progress):
    """Whether a load says that the store, or this host, does not work. Other failures are a chunk's (damaged, evicted
    since the look-up, computed on too lossy a prefix), or a choice: late chunks are computed where that is faster."""
    # Where a load was given up for being slower no chunk is to blame.
    is_silent = progress.status == abi.TIMED_OUT and progress.bytes_read == 0 and progress.failed_levels != 0
    return progress.status in FAULTS or is_silent


def _may_be_freed(save_progress):
    """Without waiting: a save may be given up while its blocks are still being read."""
    return save_progress.done and save_progress.copied


def _is_alone():
    """Whether no other connector loads into the engine's blocks: those of a MultiConnector would."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return not has_kv_transfer_group() or type(get_kv_transfer_group()).__module__.split(".")[0] == "cachegen"


def _void(plan):
    """The report of a load of which nothing is to be used."""
    return LoadReport(plan.from_token, 0)


class Copying:
    """The handle of a save, and the blocks that it reads, which begin at a token."""

    def __init__(self, save, from_token, block_ids):
        self.save, self.from_token = save, from_token
        self.block_ids, self._blocks = block_ids, frozenset(block_ids)

    def needs_any(self, blocks):
        return not self._blocks.isdisjoint(blocks)

    def n_before(self, blocks):
        """Of its blocks, those before the first that is in a set, which has one."""
        return next(n for n, block in enumerate(self.block_ids) if block in blocks)

    def keep(self, n):
        self.block_ids = self.block_ids[:n]
        self._blocks = frozenset(self.block_ids)


class Worker:
    def __init__(self, library, failures, block_tokens):
        self.library, self.failures = library, failures  # library: None where the connector is disabled
        self.outages = Outages()
        self._block_tokens = block_tokens
        self.loads: dict[str, tuple[LoadPlan, object]] = {}  # request -> plan, handle
        self.saves: list[tuple[str, int, object]] = []  # request, the token that it saves to, handle
        self._copying: list[Copying] = []
        self._copies_until = 0.0  # on the monotonic clock: how long this step may wait for them
        self._kv_id = None
        self._n_kernel_blocks = 1  # of the KV cache, in each of the scheduler's
        self._failed_loads: list[LoadPlan] = []  # never started
        self._void_loads: set[str] = set()  # requests: what is loaded is not to be used
        self._bad_blocks: set[int] = set()
        self._saving: set[str] = set()  # requests that something is saved of and that are not over
        # Of these, those with a chunk that was dropped: what follows could not be reached, as far as this rank knows.
        self._unsaved: set[str] = set()
        self._n_dropped = 0  # parts of prompts
        self._report = WorkerReport()
        self._load_ns = self._staging_bytes = 0
        self._submitted = None
        self._left_s = STEP_WAIT_S  # that the step may still wait
        self._steps = HostSteps()
        self._on_gpu = self._holds_later = self._is_off = False
        self._expects = False  # loads, for prompts that are being looked up
        self._has_queue = False  # the engine: prompts to compute
        self._adapters = None  # HeldAdapters, where the engine has any and they can be told apart
        self._asked_adapters: list = []  # that nothing can be told of
        # With an adapter, of requests that are not over; and of its blocks those that hold what was loaded.
        self._adapted_loads: dict[str, tuple[LoadPlan, set[int]]] = {}

    def register(self, kv_caches, vllm_config):
        """Unsupported, abi.CachegenError."""
        layout = kv_layout(kv_caches, vllm_config, self.library.rank.first_head)
        self._n_kernel_blocks, rest = divmod(self._block_tokens, layout["block_tokens"])
        if rest != 0 or self._n_kernel_blocks == 0:
            raise Unsupported(
                f"blocks of {self._block_tokens} tokens in a KV cache of {layout['block_tokens']} a block"
            )
        self._on_gpu = layout["memory"] == abi.MEMORY_CUDA
        try:
            self._kv_id = self.library.cg.register_kv(**layout)
        except abi.CachegenError as e:
            if self._on_gpu and (reason := self._gpu_reason()):
                raise Unsupported(f"KV cache on a GPU: {reason}") from e
            raise
        self._report.fingerprints.add(self.library.fingerprint)
        self._report.profiles.add(self.library.profile)
        if self._on_gpu:
            self._steps = GpuSteps(layout["device"])
            # Of another release it is not known whether it calls submit() before it overwrites anything, and another
            # connector may write into blocks on streams of its own: there each save holds the engine's stream until it
            # is copied.
            self._holds_later = refusal() is None and _is_alone()
        if getattr(vllm_config, "lora_config", None) is not None:
            try:
                self._adapters = HeldAdapters(vllm_config.lora_config)
            except (AttributeError, ImportError, LookupError) as e:
                logger.warning("cachegen: requests with adapters are neither stored nor served: %s", e)

    def _gpu_reason(self):
        """Why there is no GPU any more; None: there is one, or none is needed."""
        info = self.library.cg.get_info()
        return info.gpu_reason.decode(errors="replace") if info.gpu == abi.GPU_OFF else None

    # ---- within a step ----

    def submit(self, metadata):
        """Once a step, before its forward and before anything overwrites a block that the last step freed."""
        # Once: a step that preempts brings the same metadata twice, with handle_preemptions()
        # first.
        if self._submitted is metadata:
            return
        self._submitted = metadata
        self._left_s = STEP_WAIT_S
        self._await_copies(None if metadata.is_recomputing else metadata.overwritten)
        self._forget_adapted(metadata.overwritten or set())
        self._report_queue(metadata.queued_tokens, metadata.queued_pairs)
        for plan in metadata.loads:
            if plan.req_id in metadata.cancelled_loads:
                self._never_started(plan)
            else:
                self._start_load(plan)
        self._expect(metadata.asked_tokens)  # less than before, where one of these loads was expected
        self._void_loads |= metadata.cancelled_loads & self.loads.keys()
        for adapter in metadata.adapters:
            self._ask_adapter(adapter)
        self._begin_step()

    @guarded(nothing)
    def _expect(self, n_tokens):
        if self.library is not None and (n_tokens or self._expects):
            self.library.cg.expect(n_tokens)
            self._expects = n_tokens > 0

    @guarded(nothing)
    def _report_queue(self, n_tokens, n_pairs):
        if self.library is not None and (n_tokens or self._has_queue):
            self.library.cg.report_queue(n_tokens, n_pairs)
            self._has_queue = n_tokens > 0

    @guarded(nothing)
    def _begin_step(self):
        self._steps.begin()

    @guarded(lambda self, seconds: time.sleep(min(seconds, 1e-3)))
    def _pause(self, seconds):
        self.library.wait(seconds)

    def _cut(self, copying, overwritten):
        """Whatever it reads from now on of chunks that have blocks of a set (None: any), or behind them, is thrown
        away: somebody else may have them. Returns whether it needs no block any more."""
        if overwritten is not None and not copying.needs_any(overwritten):
            return False
        n_before = 0 if overwritten is None else copying.n_before(overwritten)
        token = copying.from_token + n_before * self._block_tokens
        token -= token % self.library.chunk_tokens
        n_kept = max(0, n_blocks(token - copying.from_token, self._block_tokens))
        self.library.cg.save_cut_from(copying.save, token if n_kept else 0)
        copying.keep(n_kept)
        return n_kept == 0

    def _is_copied(self, save):
        return bool(self.library.cg.save_poll(save).copied)

    @guarded(_cut)
    def _await_copy(self, copying, overwritten):
        """Whether a save needs no block any more; one that is in the way is waited for, and cut when time is up."""
        save, is_in_the_way = copying.save, overwritten is None or copying.needs_any(overwritten)
        if self._on_gpu and is_in_the_way:
            self.library.cg.save_hold(save, self._steps.after)
            return True
        is_copied = self._is_copied(save)
        while not is_copied and is_in_the_way and (left_s := self._copies_until - time.monotonic()) > 0:
            began = time.monotonic()
            self._pause(left_s)
            self._left_s = max(0, self._left_s - (time.monotonic() - began))
            is_copied = self._is_copied(save)
        return is_copied or (is_in_the_way and self._cut(copying, overwritten))

    def _await_copies(self, overwritten):
        """Until no save needs a block of a set (None: any block); COPY_WAIT_S at most. On a GPU what is enqueued from
        here on waits."""
        self._copies_until = time.monotonic() + min(COPY_WAIT_S, self._left_s)
        self._copying = [copying for copying in self._copying if not self._await_copy(copying, overwritten)]

    def _never_started(self, plan):
        self._failed_loads.append(plan)

    @guarded(_never_started)
    def _start_load(self, plan):
        if self.library is None:
            raise Unsupported("the worker's connector is disabled")
        if plan.adapter is not None:
            if not self._adapters.holds(plan.adapter):
                self._never_started(plan)
                return
            self._adapted_loads[plan.req_id] = plan, set(plan.block_ids[plan.from_token // self._block_tokens :])
        block_ids = kernel_blocks(plan.block_ids, self._n_kernel_blocks)
        try:
            load = self.library.cg.load_start(
                self._kv_id, plan.from_token, plan.to_token, block_ids, plan.plan, self._steps.after, plan.req_id
            )
        except Exception as e:
            self.outages.failed(LOADS, f"request {plan.req_id}, from {self.library.root}: {e}")
            raise
        self.loads[plan.req_id] = plan, load

    @guarded(nothing)
    def _forget_adapted(self, overwritten):
        """Blocks that a preempted request had are others' by now: nothing that was loaded for it is in them."""
        for req_id, (plan, held) in list(self._adapted_loads.items()):
            # To a last block that was loaded in part its own request writes, too: alone it says nothing.
            if plan.to_token // self._block_tokens > plan.from_token // self._block_tokens:
                held -= overwritten
                if not held:
                    del self._adapted_loads[req_id]

    def _nothing_is_held(self, adapter):
        self._asked_adapters.append(adapter.lora_int_id)

    @guarded(_nothing_is_held)
    def _ask_adapter(self, adapter):
        if self._adapters is None:
            self._nothing_is_held(adapter)
        else:
            self._adapters.ask(adapter)

    @guarded(nothing)
    def _give_up_adapted(self):
        """What was loaded for an adapter's content is void where vLLM has read another one since: it may be in the
        forward of this very step, or in a later one."""
        if self._adapters is None:
            return
        taken = [(lora.lora_int_id, lora.lora_name, identity) for lora, identity in self._adapters.take_taken()]
        self._report.taken += taken
        n_bad = len(self._bad_blocks)
        for req_id, (plan, held) in list(self._adapted_loads.items()):
            if not any(is_outdated(plan.adapter, number, identity) for number, _, identity in taken):
                continue
            del self._adapted_loads[req_id]
            if req_id in self.loads:
                self._void_loads.add(req_id)
            else:
                self._bad_blocks.update(held)
        if len(self._bad_blocks) > n_bad:
            # vLLM recomputes them, and what follows them, in their place; of saves that still read there half would be
            # new.
            self._await_copies(None)

    def start_saves(self, metadata):
        """After the step's forward."""
        if self.library is None:
            return
        self._end_step(metadata.prefill_tokens, metadata.prefill_pairs)
        for plan in metadata.saves if self.library.rank.stores else ():
            self._saving.add(plan.req_id)
            # Of a rank that passes its heads on the one that stores waits for each part, where the store has what was
            # dropped here from somebody else: so that one decides.
            is_of_no_use = plan.req_id in self._unsaved and self.library.rank.first_head == 0
            if is_of_no_use or not self._start_save(plan):
                self._unsaved.add(plan.req_id)
                self._n_dropped += 1

    @guarded(nothing)
    def _end_step(self, n_tokens, n_pairs):
        for prefill in self._steps.end(n_tokens, n_pairs):
            if self.library.rank.index == 0:  # the ranks prefill together
                self._report.prefills.append(prefill)
            # Loads that run here weigh what is late against computing it.
            self.library.cg.report_prefill(*prefill)

    @guarded(lambda self, plan: False)
    def _refuse_save(self, plan):
        """The rank that stores need not wait for this one's heads."""
        self.library.cg.save_refuse(plan.number)
        return False

    @guarded(_refuse_save)
    def _start_save(self, plan):
        """False: not taken, for want of staging memory (waiting for some would hold up the step), because the store
        hangs, or because the engine has computed it with another content of its adapter."""
        if plan.adapter is not None and not self._adapters.holds(plan.adapter):
            return self._refuse_save(plan)
        request = abi.make_request(plan.tokens, plan.salt, plan.extra)
        try:
            save = self.library.cg.save_start(
                request,
                self._kv_id,
                plan.from_token,
                plan.to_token,
                plan.prefix_level,
                plan.is_last,
                kernel_blocks(plan.block_ids, self._n_kernel_blocks),
                plan.context,
                copy_later=not self._on_gpu,
                hold_later=self._holds_later,  # _await_copies() makes the engine's stream wait
                after=self._steps.after,
                number=plan.number,
            )
        except abi.CachegenError as e:
            is_hung = e.status == abi.TIMED_OUT  # the store, and so the thread that writes
            self._note_failed_save(plan.req_id, "the store hangs" if is_hung else e)
            if not is_hung:
                raise
            return False
        if save is not None:
            n_before = plan.from_token // self._block_tokens
            self._copying.append(Copying(save, n_before * self._block_tokens, plan.block_ids[n_before:]))
            self.saves.append((plan.req_id, plan.to_token, save))
            self.outages.worked(STAGING)
        else:
            self.outages.failed(STAGING, f"request {plan.req_id} is stored in part")
        return save is not None

    def _note_failed_save(self, req_id, why):
        self.outages.failed(SAVES, f"request {req_id}, to {self.library.root}: {why}")

    # ---- what is done ----

    def finished_loads(self, finished_req_ids, is_idle):
        """Ids of the requests whose loads have ended, well or not. finished_req_ids: requests that are over; is_idle:
        the step computes nothing, and may wait, unless steps of other data-parallel ranks wait for it."""
        finished = set()
        may_wait = is_idle and self.library is not None and self.library.rank.steps_alone
        self._saving -= finished_req_ids
        self._unsaved -= finished_req_ids
        for req_id in finished_req_ids & self._adapted_loads.keys():
            del self._adapted_loads[req_id]
        self._give_up_adapted()
        failed, self._failed_loads = self._failed_loads, []
        for plan in failed:
            self._end_load(plan, _void(plan))
            finished.add(plan.req_id)
        self._poll_loads(finished_req_ids, finished)
        # vLLM asks again at once, in a busy loop that takes the CPU from our decoding threads.
        if self.loads and not finished and may_wait:
            self._wait_for_loads()
            self._poll_loads(finished_req_ids, finished)
        elif self._adapters is not None and not finished and may_wait:
            # The same loop takes Python's lock from the thread that reads and hashes adapters.
            self._adapters.wait(self._left_s)
        if self.library is not None:
            self.collect_saves()
        return finished

    @guarded(nothing)
    def _wait_for_loads(self):
        self.library.wait(self._left_s)

    def _poll_loads(self, cancelled, finished):
        for req_id, (plan, load) in list(self.loads.items()):
            is_void = req_id in self._void_loads
            report = self._poll_load(plan, load, is_void or req_id in cancelled)
            if report is not None:
                if is_void:
                    self._void_loads.discard(req_id)
                    report = _void(plan)
                del self.loads[req_id]
                self._end_load(plan, report)
                finished.add(req_id)

    @guarded(lambda *_: False)
    def _is_cancelled_by_now(self, load):
        self.library.cg.load_cancel(load)
        return bool(self.library.cg.load_poll(load).done)

    def _give_load_up(self, plan, load, _is_cancelled):
        # Freeing waits, and a GPU that hangs ends no wait: there the next step asks again.
        if self._on_gpu and not self._is_cancelled_by_now(load):
            self._void_loads.add(plan.req_id)
            return None
        self.library.cg.load_free(load)
        return _void(plan)

    @guarded(_give_load_up)
    def _poll_load(self, plan, load, is_cancelled):
        """A LoadReport once nothing is written to the blocks any more; None before."""
        cg = self.library.cg
        if is_cancelled:
            cg.load_cancel(load)
        progress = cg.load_poll(load)
        if not progress.done:
            return None
        loaded = min(max(progress.loaded_tokens, plan.from_token), plan.to_token)
        if is_cancelled:
            pass
        elif _is_outage(progress):
            self.outages.failed(
                LOADS,
                f"request {plan.req_id}: {loaded - plan.from_token} of {plan.to_token - plan.from_token} tokens loaded"
                f" from {self.library.root}, the rest is recomputed: {cg.strerror(progress.status)}",
            )
        elif progress.status == abi.OK or progress.bytes_read:
            self.outages.worked(LOADS)
        report = LoadReport(
            loaded,
            progress.worst_level,
            progress.bytes_read,
            progress.read_ns,
            progress.decode_ns,
            progress.copy_ns,
            progress.total_ns,
            progress.status,
            progress.failed_token,
            progress.failed_levels,
            progress.failed_worst_level,
            cg.load_levels(load, sum(progress.chunks_at)),
            progress.predicted_kl_micronats / 1e6,
            progress.bytes_dropped,
            progress.bytes_from_memory,
            progress.memory_ns,
        )
        cg.load_free(load)
        return report

    def _end_load(self, plan, report):
        first_bad = report.loaded_tokens // self._block_tokens
        if report.loaded_tokens < plan.to_token:
            self._bad_blocks.update(plan.block_ids[first_bad:])
        self._report.loads[plan.req_id] = report
        self._load_ns += report.total_ns

    def collect_saves(self):
        """Frees the saves that have ended."""
        self.saves = [save for save in self.saves if not self._save_ended(*save)]

    def _keep_save(self, req_id, _to_token, _save):
        """Freeing would wait for it. The next step asks again, and closing ends it."""
        self._unsaved |= {req_id} & self._saving
        return False

    @guarded(_keep_save)
    def _save_ended(self, req_id, to_token, save):
        cg = self.library.cg
        progress = cg.save_poll(save)
        if not _may_be_freed(progress):
            return False
        if progress.status == abi.OK and progress.loaded_tokens >= to_token:
            self.outages.worked(SAVES)
        else:
            self._unsaved |= {req_id} & self._saving
            # Short, but OK: cut, or behind a chunk that is not stored. The store did not fail then, nor did it work.
            # Cancelled: another rank's step needed the blocks, or had no memory.
            if progress.status not in (abi.OK, abi.CANCELLED):
                self._note_failed_save(req_id, cg.strerror(progress.status))
        self._copying = [copying for copying in self._copying if copying.save is not save]
        cg.save_free(save)  # at once. Last: what raises before is asked again
        return True

    def take_bad_blocks(self):
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self):
        """The WorkerReport of what ended since the last call; None: nothing did."""
        self._look_at_gpu()
        # The scheduler's side then plans nothing more for a worker that can do nothing.
        if self.library is None and not self._is_off:
            self._is_off = self._report.is_off = True
        self._tell_adapters()
        report, self._report = self._report, WorkerReport()
        return report if report != WorkerReport() else None

    @guarded(nothing)
    def _tell_adapters(self):
        rank = None if self.library is None else self.library.rank.index
        answers = dict.fromkeys(self._asked_adapters)
        self._asked_adapters = []
        if self._adapters is not None:
            answers |= self._adapters.take_answers()
            # Behind the answers: what one of them says of vLLM's own is told with it.
            self._report.told += [(lora.lora_name, identity) for lora, identity in self._adapters.take_told()]
        self._report.adapters = {number: {rank: identity} for number, identity in answers.items()}

    @guarded(nothing)
    def _look_at_gpu(self):
        """An error of the GPU that stays: nothing can be loaded or saved from now on."""
        if not self._on_gpu or self._is_off or self.library is None or (reason := self._gpu_reason()) is None:
            return
        self._is_off = self._report.is_off = True
        self.outages.failed(GPU, f"{reason}: nothing is loaded or stored any more until the engine starts anew")

    def counters(self):
        stats = self.library.cg.get_stats().as_dict()
        self._staging_bytes = stats["staging_bytes"]
        return all_counters(stats, load_ns=self._load_ns, parts_dropped=self._n_dropped)

    def gauges(self):
        """As counters() has last seen them."""
        n_loads, n_saves = len(self.loads), len(self.saves)
        return {"loads_running": n_loads, "saves_running": n_saves, "staging_bytes": self._staging_bytes}

    def take_observed(self):
        return {}

    def close(self):
        cg = self.library.cg
        # Freeing waits for what is under way, as long as that takes. Closing ends it, too, and knows a limit.
        for _, load in self.loads.values():
            if cg.load_poll(load).done:
                cg.load_free(load)
        for *_, save in self.saves:
            if _may_be_freed(cg.save_poll(save)):
                cg.save_free(save)
        self.loads, self.saves, self._copying = {}, [], []
        if self._adapters is not None:
            self._adapters.close()
        library, self.library = self.library, None
        library.close()
