"""Requests that the engine is to compute, and that are put off while others may begin to load.

vLLM asks for requests in turn, until those that it schedules fill the step. So one that is computed would keep the
loads of those behind it from starting for as long as the step takes: it lets them go first.
"""

import time

from cachegen.vllm.guard import guarded, nothing
from cachegen.vllm.prefill import SAMPLE_MIN_TOKENS

DEFER_NS = 10**8  # what is computed waits so long at most, until loads of others have started


class Deferrals:
    """Requests are RequestStates. Used by the scheduler's thread only."""

    def __init__(self, failures, lookups, shared_loads):
        self.failures, self._lookups, self._shared_loads = failures, lookups, shared_loads
        self._to_load = None  # requests that were about to load in this step; None: not asked since the last one

    @guarded(nothing)
    def defers(self, state, requests):
        """Whether a request that the engine is to compute is put off, for others have found what they can load.
        requests: all that there are."""
        now_ns = time.monotonic_ns()
        is_short = state.prompt_tokens - state.local_tokens <= SAMPLE_MIN_TOKENS
        has_waited = state.deferred_ns and now_ns - state.deferred_ns >= DEFER_NS
        if is_short or has_waited or state.failed:
            return False
        if self._to_load is None:
            self._lookups.take_answers(requests)
            self._to_load = [other for other in requests if self._is_about_to_load(other)]
        while self._to_load and not self._is_about_to_load(self._to_load[-1]):
            self._to_load.pop()  # none that has been asked for, and no more is, comes back in this step
        if not self._to_load:
            return False
        state.deferred_ns = state.deferred_ns or now_ns
        return True

    def _is_about_to_load(self, state):
        """Whether a request has found something, and begins to load it once vLLM has asked for it and has blocks."""
        waits = self._shared_loads.is_loading(state.follows)
        is_open = not (state.allocated or state.failed or state.is_declined or waits)
        return is_open and state.hit_tokens is not None and state.hit_tokens > state.local_tokens

    def end_step(self):
        self._to_load = None
