"""What the scheduler's side knows of a request, from its first look-up until it is finished."""

import array
from dataclasses import dataclass, field

from cachegen.vllm.messages import LoadPlan, LoadReport
from cachegen.vllm.request_key import Options


@dataclass(eq=False)
class RequestState:
    request: object  # vLLM's
    tokens: array.array  # the prompt, with stand-ins for its images
    salt: bytes  # the reset's root, then the tenant's
    root: bytes  # of the last reset before its KV was begun
    extra: bytes | None  # None: neither stored nor served
    options: Options
    arrival_time: float  # of the wall clock, as vLLM has it
    adapter: object = None  # the Check of its adapter, until that is done
    adapter_until: float = 0.0  # on the monotonic clock
    adapter_key: tuple[int, str] | None = None  # what that found
    adapter_number: int = 0  # of the request's adapter; 0: it has none
    lookup: object = None  # the handle, while it is under way
    lookup_from: int = 0
    lookup_started_ns: int = 0
    budget_ns: int = 0  # for the first token
    spent_ns: int = 0  # of the budget, before the look-up
    resumed_ns: int = 0  # when vLLM asked again for it, having preempted it behind its first token; 0: it never did
    answered_ns: int = 0
    predicted_ns: int = 0  # of the load; 0: not known
    hit_tokens: int | None = None  # the look-up's answer
    plan: bytes = b""
    follows: str | None = None  # the request that loads the same, or half of it, which this one waited for last
    follows_rest_ns: int = 0  # what loading the other half was predicted to take then
    failed: bool = False  # a load failed: recompute, don't ask again
    allocated: bool = False
    has_begun: bool = False  # scheduled since its blocks were allocated
    prompt_tokens: int = 0  # also where nothing is stored or served
    computed_tokens: int = 0  # before the last step that it was scheduled in
    is_declined: bool = False  # when vLLM asked last there was nothing to load, also where it was told to ask again
    deferred_ns: int = 0  # when it was first put off for loads of others; 0: never
    local_tokens: int = 0  # what vLLM's own prefix cache has
    level: int = 0  # worst level of anything that the KV so far was loaded with or computed after
    has_unknown: bool = False  # among that is what another tier may have brought
    # That it had, also before it was preempted, with KV below keep_level.
    worse_blocks: set[int] = field(default_factory=set)
    load: LoadPlan | None = None
    loaded: LoadReport | None = None  # what the ranks that have ended it said of load
    load_ended_ns: int = 0
    saved_to: int | None = None  # None: not scheduled since it was admitted
    saved_last: bool = False
    is_named: bool = False  # the worker was told to publish its context
    storable_tokens: int = 0  # of the prompt, as far as its images go
    admitted_tokens: int | None = None  # that are to be stored; None: not counted yet
    awaits_first_token: bool = False  # since it was looked up, and has loaded
    report: dict = field(default_factory=dict)  # for the request's kv_transfer_params

    @property
    def is_loading(self):
        """Also when that has ended, until it is scheduled."""
        return self.load is not None and not self.has_begun and not self.failed

    @property
    def planned_adapter(self):
        """For a plan. Only a request without an adapter has None there: of a content that cannot be told, "", every
        worker says that it holds another one."""
        return self.adapter_key or ((self.adapter_number, "") if self.adapter_number else None)
