"""What crosses between the two sides. vLLM pickles it from process to process, so it is plain data: no handles.

Down, once a step: Metadata, with the loads to start and the parts of prompts to save. Up, after a step: WorkerReport.
"""

import array
from dataclasses import dataclass, field, replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass
class LoadPlan:
    """Tokens [from_token, to_token) of a request, to be loaded into its blocks."""

    req_id: str
    from_token: int
    to_token: int
    block_ids: list[int]  # of the request, from token 0 on
    plan: bytes  # the look-up's answer, which only the library reads
    # Its number, and the identity of the content that the plan is for; "": that cannot be told, and no worker holds it.
    adapter: tuple[int, str] | None = None


@dataclass
class SavePlan:
    """Tokens [from_token, to_token) of a request, which the step at hand completes."""

    req_id: str
    tokens: array.array
    salt: bytes
    extra: bytes
    from_token: int
    to_token: int
    prefix_level: int  # the worst level in what these tokens were computed after
    is_last: bool  # the prompt ends here: its name may be published
    block_ids: list[int]  # of the request, from token 0 on
    context: str | None  # the name
    adapter: tuple[int, str] | None = None  # as LoadPlan's
    number: int = 0  # of the save, from 1 on: ranks know by it what belongs together


@dataclass
class Metadata(KVConnectorMetadata):
    loads: list[LoadPlan] = field(default_factory=list)
    saves: list[SavePlan] = field(default_factory=list)
    cancelled_loads: set[str] = field(default_factory=set)  # requests whose loads are void, and end as failed
    overwritten: set[int] | None = None  # blocks that get new content from this step on; None: not known
    is_recomputing: bool = False  # a request computes what it had, in blocks of its own, which may be others', too
    prefill_tokens: int = 0  # 0: this step says nothing about the speed of prefilling
    prefill_pairs: int = 0  # the sum of their positions
    asked_tokens: int = 0  # of prompts that are being looked up, less what the engine has of them
    queued_tokens: int = 0  # of prompts, that the engine computes in this step and later, less what loads bring
    queued_pairs: int = 0  # the sum of their positions
    is_idle: bool = False  # nothing is scheduled in this step, nor was in the last one
    adapters: list = field(default_factory=list)  # LoRARequests, of which the worker is to tell what it holds


@dataclass
class LoadReport:
    """How a load ended. The first loaded_tokens of the request are right, what follows is to be recomputed."""

    loaded_tokens: int
    worst_level: int
    bytes_read: int = 0
    read_ns: int = 0
    decode_ns: int = 0
    copy_ns: int = 0
    total_ns: int = 0
    # What ended it, as the library's cachegen_progress has it.
    status: int = 0
    failed_token: int = 0
    failed_levels: int = 0
    failed_worst_level: int = 0
    # What was delivered.
    levels: bytes = b""  # of the chunks of the prefix that is right
    predicted_kl: float = 0.0  # nats, of all of them
    bytes_dropped: int = 0  # read, and of no use
    bytes_from_memory: int = 0  # read, but not over the link
    memory_ns: int = 0  # of read_ns: of these

    def joined(self, other):
        """What both say together, of two ranks that load the same: only what each has is there, and it is as bad as the
        worse. Times and bytes are the slower one's, what ended the load the shorter one's."""
        short = min(self, other, key=lambda report: report.loaded_tokens)
        slow = max(self, other, key=lambda report: report.total_ns)
        return replace(
            slow,
            loaded_tokens=short.loaded_tokens,
            worst_level=max(self.worst_level, other.worst_level),
            status=short.status,
            failed_token=short.failed_token,
            failed_levels=short.failed_levels,
            failed_worst_level=short.failed_worst_level,
            levels=bytes(map(max, self.levels, other.levels)),
            predicted_kl=max(self.predicted_kl, other.predicted_kl),
        )


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    loads: dict[str, LoadReport] = field(default_factory=dict)
    prefills: list[tuple[int, int, int]] = field(default_factory=list)  # (n_tokens, n_pairs, duration_ns)
    is_off: bool = False  # nothing can be loaded or saved any more
    # Of the model and of the profile ("": none) that workers have opened, as 32 hex digits. Told once.
    fingerprints: set[str] = field(default_factory=set)
    profiles: set[str] = field(default_factory=set)
    adapters: dict[int, dict] = field(default_factory=dict)  # number -> rank (None: disabled) -> identity, or None
    # Of adapters that vLLM has read: (number, name, identity, or None: not known yet), and later (name, identity, or
    # None: it cannot be told) of those that were not known yet.
    taken: list[tuple] = field(default_factory=list)
    told: list[tuple] = field(default_factory=list)

    def aggregate(self, other):
        for req_id, load in other.loads.items():
            known = self.loads.get(req_id)
            self.loads[req_id] = load if known is None else known.joined(load)
        self.prefills += other.prefills
        self.is_off |= other.is_off
        self.fingerprints |= other.fingerprints
        self.profiles |= other.profiles
        self.taken += other.taken
        self.told += other.told
        for number, by_rank in other.adapters.items():
            self.adapters.setdefault(number, {}).update(by_rank)
        return self
