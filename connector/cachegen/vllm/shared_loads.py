"""Whether a request waits for another one's load, which brings what it would load itself, or half of that at least.

When the other one is scheduled, its blocks are in vLLM's own prefix cache: what many ask for at once is read, decoded
and held in memory once. The request is asked again then, and loads what it still lacks.

When many come at once, vLLM asks for each of them in one step. So loads are kept by key and wishes, and sorted by their
prompts: those that begin alike stand side by side, and a request looks at no others.
"""

import bisect
import time

from cachegen.vllm.saves import n_blocks


def _wishes(state):
    """What must be the same of two requests, besides their tokens, so that one may have what the other loads."""
    options = state.options
    return state.salt, state.extra, options.level, options.worst_level, options.max_kl


def _tokens(state):
    return state.tokens


class SharedLoads:
    """Requests are RequestStates. Used by the scheduler's thread only."""

    def __init__(self, library):
        self._library = library
        self._loading = {}  # a request's id -> the request, and its wishes as they were
        self._sorted = {}  # wishes -> those that load, by their tokens
        self.n_waiting = 0  # requests that have waited so far

    def begin(self, state):
        """Its load is planned."""
        wishes = _wishes(state)
        self._loading[state.load.req_id] = state, wishes
        bisect.insort(self._sorted.setdefault(wishes, []), state, key=_tokens)

    def end(self, state):
        """It is scheduled, asked for anew, or finished, whether it has loaded or not."""
        if state.load is None or state.load.req_id not in self._loading:
            return
        _, wishes = self._loading.pop(state.load.req_id)
        self._sorted[wishes].remove(state)
        if not self._sorted[wishes]:
            del self._sorted[wishes]

    def is_loading(self, req_id):
        return req_id in self._loading and self._loading[req_id][0].is_loading

    def waits(self, state, n_tokens):
        """Whether a request that may load its first n_tokens waits for another one that loads them, or half of what it
        lacks at least, as this one wishes it, and in this one's time."""
        if self.is_loading(state.follows):
            return self._has_time_for(self._loading[state.follows][0], state, state.follows_rest_ns)
        n_tokens, block_tokens = self._in_blocks(n_tokens), self._library.block_tokens
        n_wanted = n_tokens - state.local_tokens
        if n_wanted <= 0:
            return False
        # With less than half of what is lacking the rest would begin late for little.
        least = n_blocks(state.local_tokens + (n_wanted + 1) // 2, block_tokens) * block_tokens
        best, best_rest_ns, n_most = None, 0, 0
        for other in sorted(self._alike(state, least), key=lambda other: other.lookup_started_ns):
            if min(n_tokens, other.load.to_token) <= n_most or not other.is_loading:
                continue
            if not self._has_time_for(other, state, 0):
                continue
            n_shared = self._n_serves(other, state, least, n_tokens)
            rest_ns = (state.predicted_ns or 0) * (n_tokens - n_shared) // n_wanted
            if n_shared > n_most and self._has_time_for(other, state, rest_ns):
                best, best_rest_ns, n_most = other.load.req_id, rest_ns, n_shared
        if best is None:
            return False
        self.n_waiting += state.follows is None
        state.follows, state.follows_rest_ns = best, best_rest_ns
        return True

    def _alike(self, state, n_tokens):
        """Those that load, have its wishes and begin with its first n_tokens."""
        prefix, same = state.tokens[:n_tokens], self._sorted.get(_wishes(state), ())
        for i in range(bisect.bisect_left(same, prefix, key=_tokens), len(same)):
            if same[i].tokens[:n_tokens] != prefix:
                return
            yield same[i]

    def _in_blocks(self, n_tokens):
        return n_tokens // self._library.block_tokens * self._library.block_tokens

    @staticmethod
    def _has_time_for(other, state, rest_ns):
        """Whether to wait for another one's load (still). By the prediction it ends within this one's budget, less
        rest_ns for what it does not bring. If it does not, or nothing is predicted, or it takes a quarter longer, time
        must be left for a load of this one's own; and who would wait for a part does not."""
        now_ns, budget_ns = time.monotonic_ns(), state.budget_ns
        left_ns = budget_ns - (state.spent_ns + now_ns - state.lookup_started_ns)
        other_ns = other.answered_ns + other.predicted_ns - now_ns  # to its end; negative: it is late
        is_on_time = other.predicted_ns and -other.predicted_ns // 4 < other_ns <= left_ns - rest_ns
        if other.loaded is not None or is_on_time:
            return left_ns > rest_ns
        if rest_ns > 0:
            return False
        # A prediction is of what the budget has time for: it may be all of it.
        own_ns = min(state.predicted_ns or budget_ns, budget_ns // 2)
        return left_ns > own_ns

    def _n_serves(self, other, state, least, n_tokens):
        """How many of this request's first n_tokens another one brings, in whole blocks; 0: not the first `least`,
        which both begin with, or later than this one may wait."""

        def has(n):
            # Most others differ in the last token.
            return other.tokens[n - 1] == state.tokens[n - 1] and other.tokens[:n] == state.tokens[:n]

        most = min(n_tokens, self._in_blocks(other.load.to_token))
        if other.budget_ns > state.budget_ns or most < least:
            return 0
        if has(most):
            return most
        while most - least > self._library.block_tokens:  # has(least), not has(most)
            middle = self._in_blocks((least + most) // 2)
            least, most = (middle, most) if has(middle) else (least, middle)
        return least
