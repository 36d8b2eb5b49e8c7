"""Looking prompts up in the store: nobody waits for an answer. Requests that run, or whose loads have ended, may be
scheduled in a step, and where there are none, vLLM asks again within milliseconds.
"""

import bisect
import time

from cachegen import abi
from cachegen.vllm.arrivals import Arrivals
from cachegen.vllm.budgets import due_ns
from cachegen.vllm.guard import guarded
from cachegen.vllm.request_state import RequestState

LOOKUPS = "failing look-ups"  # a kind of outage
ASKED_NS = 10**9  # a look-up that takes longer is not expected to lead to a load soon


def _may_load(state):
    """Whether a request's first token is made behind a load, as far as is known."""
    return state.lookup is not None or state.is_loading or state.awaits_first_token


class Lookups:
    """Requests are RequestStates. Used by the scheduler's thread only."""

    def __init__(self, library, failures, outages, budgets, observed):
        """outages: hear of the store's errors; budgets: the Budgets; observed: the Observed."""
        self._library, self.failures, self._outages = library, failures, outages
        self._budgets, self._observed = budgets, observed
        self._arrivals = Arrivals()
        self._polled: set[RequestState] = set()  # whose look-ups were, since the last step
        self._others_due = None  # sorted: when first tokens behind loads are due; None: not asked since the last step
        self._counted = 0, 0  # look-ups that were not skipped, errors of look-ups

    def _fail(self, state, *_arguments):
        state.failed = True
        return True

    @guarded(_fail)
    def has_answered(self, state, requests):
        """Whether the look-up has answered; starts it. It may have failed, too. requests: all that there are."""
        if state.hit_tokens is not None and state.lookup_from <= state.local_tokens:
            return True
        if state.lookup is None or state.lookup_from > state.local_tokens:
            self.drop(state)
            options = state.options
            request = abi.make_request(
                state.tokens, state.salt, state.extra, options.worst_level, options.level, options.ttft_budget_ns
            )
            state.lookup_from = state.local_tokens
            state.lookup_started_ns = time.monotonic_ns()
            state.spent_ns = self._spent_ns(state)
            spent_ns = state.spent_ns + self._ahead_ns(state, requests)
            # A full chunk can only be stored if all of it is computed, and without it nothing behind it would ever be
            # found: of one that the store lacks no part is loaded.
            state.lookup = self._library.cg.lookup_start(
                request, state.local_tokens, spent_ns, options.max_kl, no_tail_at_hole=True
            )
            self._polled.discard(state)
        return state not in self._polled and self._take_answer(state)

    def _spent_ns(self, state):
        """How much of its budget a request has used."""
        if state.resumed_ns:
            return time.monotonic_ns() - state.resumed_ns
        return int(self._arrivals.seconds_since(state.arrival_time) * 1e9)

    def _ahead_ns(self, state, requests):
        """How long before a request's first token is due its load must end."""
        if self._others_due is None:
            others = (other for other in requests if other is not state and _may_load(other))
            self._others_due = sorted(map(due_ns, others))
        ahead_ns = self._budgets.ahead_ns(state, self._others_due)
        bisect.insort(self._others_due, due_ns(state))
        return ahead_ns

    @guarded(_fail)
    def _take_answer(self, state):
        """Whether the look-up that is under way has answered. It is asked once a step: its request is, too."""
        self._polled.add(state)
        cg = self._library.cg
        hit = cg.lookup_poll(state.lookup)
        if hit is None:
            return False
        state.plan = cg.lookup_plan(state.lookup) if hit.hit_tokens else b""
        state.hit_tokens = hit.hit_tokens
        cg.lookup_free(state.lookup)
        state.lookup = None
        state.predicted_ns, state.answered_ns = hit.predicted_ns, time.monotonic_ns()
        lookup_ns = state.answered_ns - state.lookup_started_ns
        self._observed.note("lookup_latency_seconds", lookup_ns / 1e9)
        state.report["lookup_ms"] = lookup_ns / 1e6
        return True

    def take_answers(self, requests):
        """Those that there are by now, also to requests that vLLM has not asked for in this step."""
        for state in requests:
            if state.lookup is not None and not state.failed and state not in self._polled:
                self._take_answer(state)

    def asked_tokens(self, requests):
        """Of prompts that are being looked up, less what the engine has of them. One that vLLM does not ask for any
        more, while it has no room for more requests, loads nothing soon."""
        now_ns = time.monotonic_ns()
        return sum(
            len(state.tokens) - state.lookup_from
            for state in requests
            if state.lookup is not None and now_ns - state.lookup_started_ns < ASKED_NS
        )

    def drop(self, state):
        """The look-up, or its answer."""
        if state.lookup is not None:
            self._library.cg.lookup_free(state.lookup)
        state.lookup, state.hit_tokens, state.plan = None, None, b""

    def end_step(self):
        """vLLM has asked for all that it asks for in a step."""
        self._polled, self._others_due = set(), None

    def note_errors(self, stats):
        """stats: the library's counters."""
        # A look-up that is skipped says nothing: the store does not answer, which is known from errors, or others were
        # first.
        n_answers, n_errors = stats["lookups"] - stats["lookups_skipped"], stats["lookup_errors"]
        if n_errors > self._counted[1]:
            self._outages.failed(LOOKUPS, f"{n_errors - self._counted[1]} questions to {self._library.root} failed")
        elif n_answers > self._counted[0]:
            self._outages.worked(LOOKUPS)
        self._counted = n_answers, n_errors
