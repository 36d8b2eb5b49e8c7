"""Requests whose loads are under way, kept so that those that begin like another one are found without a look at all:
when many come at once, vLLM asks for each of them in one step.

Of those with the same key and wishes the ones with a common prefix stand side by side when their prompts are sorted.
"""

import bisect


def _wishes(state):
    """What must be the same of two requests (RequestState) so that one may have what the other loads; besides it their
    tokens."""
    options = state.options
    return state.salt, state.extra, options.level, options.worst_level, options.max_kl


def _tokens(state):
    return state.tokens


class Loading:
    def __init__(self):
        self._sorted = {}  # wishes -> RequestStates, by their tokens
        self._wishes = {}  # RequestState -> its wishes, as they were

    def add(self, state):
        wishes = self._wishes[state] = _wishes(state)
        bisect.insort(self._sorted.setdefault(wishes, []), state, key=_tokens)

    def discard(self, state):
        wishes = self._wishes.pop(state, None)
        if wishes is not None:
            self._sorted[wishes].remove(state)
            if not self._sorted[wishes]:
                del self._sorted[wishes]

    def alike(self, state, n_tokens):
        """Those with its wishes that begin with its first n_tokens."""
        prefix, same = state.tokens[:n_tokens], self._sorted.get(_wishes(state), ())
        for i in range(bisect.bisect_left(same, prefix, key=_tokens), len(same)):
            if same[i].tokens[:n_tokens] != prefix:
                return
            yield same[i]
