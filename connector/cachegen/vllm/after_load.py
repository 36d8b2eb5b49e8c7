"""What an engine takes from a load's end to the request's first token, which its budget must have time for.

That is the rest of the step at hand, a step for the last tokens of the prompt, and the same for requests whose loads
end at the same time: with budgets alike they all end when these do. Times are in ns, of the monotonic clock.
"""

import bisect
from collections import deque

MEAN_GAIN, DEVIATION_GAIN = 1 / 5, 1 / 4
N_DEVIATIONS = 2  # that something may take longer than usual, as with TCP's time-outs
TOGETHER_NS = 10**6  # what is due within that is due at the same time
N_STEPS = 2  # while nothing is known but steps: the one at hand, and the request's own


class Usual:
    """What something mostly takes at most; 0: not known."""

    def __init__(self):
        self.mean = self.deviation = 0.0

    def note(self, ns):
        if not self.mean:
            self.mean, self.deviation = ns, ns / 4
            return
        self.deviation += DEVIATION_GAIN * (abs(ns - self.mean) - self.deviation)
        self.mean += MEAN_GAIN * (ns - self.mean)

    def most(self):
        return self.mean + N_DEVIATIONS * self.deviation


class AfterLoad:
    def __init__(self):
        self._step, self._alone, self._other = Usual(), Usual(), Usual()
        self._first_tokens = deque(maxlen=64)  # when the last ones of requests that had loaded came

    def note_step(self, ns):
        """A step has computed next to nothing."""
        self._step.note(ns)

    def note(self, load_ended, now, most, n_together):
        """A request that had loaded has its first token; n_together others get theirs of the same step. What takes
        longer than most has waited for something else."""
        n_others = n_together + sum(at > load_ended for at in self._first_tokens)
        after = max(1, min(now - load_ended, most))
        self._first_tokens.append(now)
        if n_others == 0:
            self._alone.note(after)
        elif not self._alone.mean:
            self._alone.note(after / (1 + n_others))
        else:
            self._other.note(max(1, after - self._alone.mean) / n_others)

    def ahead(self, due, others_due, most):
        """How long before `due`, when a request's first token is, its load must end; `most` at most. others_due: of
        requests that are looked up or load, sorted. Those that are due shortly before this one are computed before
        it."""
        ahead = self._alone.most() or N_STEPS * self._step.most()
        other = self._other.most() or ahead
        at = bisect.bisect_right(others_due, due + TOGETHER_NS)
        while at > 0 and others_due[at - 1] >= due - ahead and 0 < ahead < most:
            ahead += other
            at -= 1
        return int(min(ahead, most))
