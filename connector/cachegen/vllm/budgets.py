"""The budgets of requests that load: when their first tokens are due, how long before that their loads must end, and
whether they came in time."""

import time

from cachegen.vllm.after_load import AfterLoad
from cachegen.vllm.guard import guarded, nothing
from cachegen.vllm.prefill import SAMPLE_MIN_TOKENS
from cachegen.vllm.request_state import RequestState


def due_ns(state):
    """When the first token of a request is due that was looked up."""
    return state.lookup_started_ns - state.spent_ns + state.budget_ns


class Budgets:
    """Used by the scheduler's thread only."""

    def __init__(self, library, failures, observed):
        """observed: the Observed, which hears of each budget."""
        self._library, self.failures, self._observed = library, failures, observed
        self.n_met = self.n_missed = 0
        self._after_load = AfterLoad()
        self._n_steps = 0
        # By requests that have none yet: the number of the step that makes it, which completes the prompt.
        self._first_tokens: dict[RequestState, int] = {}
        self._small_step_ns = 0  # when the last step began, if it computes next to nothing; else 0

    def ahead_ns(self, state, others_due):
        """How long before a request's first token is due its load must end. others_due: the same of requests that are
        looked up or load, sorted."""
        return self._after_load.ahead(due_ns(state), others_due, state.budget_ns // 2)

    @guarded(nothing)
    def count_first_tokens(self):
        """Those that are there by now. With asynchronous scheduling vLLM plans the next step before it has the tokens
        of the last one."""
        for state in [state for state in self._first_tokens if state.request.num_output_tokens > 0]:
            self._count(state)

    def begin_step(self, n_tokens):
        """Of n_tokens."""
        self.count_first_tokens()
        self._n_steps += 1
        now_ns = time.monotonic_ns()
        if self._small_step_ns:
            self._after_load.note_step(min(now_ns - self._small_step_ns, self._library.ttft_budget_ns // 4))
        self._small_step_ns = now_ns if 0 < n_tokens <= SAMPLE_MIN_TOKENS else 0

    def complete(self, state):
        """The step at hand computes a prompt's end, and so makes its request's first token."""
        if state.awaits_first_token:
            self._first_tokens.setdefault(state, self._n_steps)  # steps planned behind that one say so again

    def forget(self, state):
        """A session's next input has come: vLLM has put the tokens that were there into the prompt, and when the first
        of them came can be told no more."""
        self._first_tokens.pop(state, None)
        state.awaits_first_token = False

    def finish(self, state):
        """A request is over. One that is aborted may have no token, also where a step at hand makes it."""
        if state in self._first_tokens and state.request.num_output_tokens > 0:
            self._count(state)
        self._first_tokens.pop(state, None)

    @guarded(nothing)
    def _count(self, state):
        """The request's first token is there. Others of the same step may not be handed out yet."""
        step = self._first_tokens.pop(state)
        if not state.awaits_first_token:
            return
        state.awaits_first_token = False
        now_ns, budget_ns = time.monotonic_ns(), state.budget_ns
        # What is computed by the token the library counts itself. loaded is None where vLLM has asked anew since.
        if state.loaded is not None and len(state.tokens) - state.loaded.loaded_tokens <= SAMPLE_MIN_TOKENS:
            n_together = list(self._first_tokens.values()).count(step)
            self._after_load.note(state.load_ended_ns, now_ns, self._library.ttft_budget_ns // 4, n_together)
        ratio = (state.spent_ns + now_ns - state.lookup_started_ns) / budget_ns
        self.n_met, self.n_missed = self.n_met + (ratio <= 1), self.n_missed + (ratio > 1)
        self._observed.note("budget_ratio", ratio)
