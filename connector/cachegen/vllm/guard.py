"""What happens when something goes wrong inside a hook: a log line, and an answer that costs time and nothing else.

vLLM catches nothing that a connector raises: an exception in a hook ends the engine, or the step of every request in
it. So each hook is guarded, and so is each part of a hook whose failure must not take the other parts with it.
"""

import functools
import time

from vllm.logger import init_logger

logger = init_logger("vllm.cachegen")  # below "vllm", whose handlers print

REPEAT_EVERY = 1000
QUIET_S = 60  # between two log lines about the same kind of outage


class Failures:
    """Counts failures by the place where they happen. The first one of a place is logged with its traceback, then every
    REPEAT_EVERY-th: a store that is gone fails in every step. Used by one thread."""

    def __init__(self):
        self._counts = {}

    def log(self, where):
        """Called in an except clause."""
        count = self._counts[where] = self._counts.get(where, 0) + 1
        if count == 1 or count % REPEAT_EVERY == 0:
            logger.exception("cachegen: failure %d in %s; it counts as a miss", count, where)


class Outages:
    """What fails for a while, by kind: one log line when it begins, one when it works again, none for each request that
    it hits. Used by one thread."""

    def __init__(self):
        self._begun = {}  # kind -> [when, failures so far, whether it was logged]
        self._logged = {}  # kind -> when last

    def failed(self, kind, what):
        """what: a sentence about this failure."""
        now = time.monotonic()
        outage = self._begun.setdefault(kind, [now, 0, False])
        outage[1] += 1
        # One that begins soon after another is logged once it has lasted.
        if not outage[2] and now - self._logged.get(kind, -QUIET_S) >= QUIET_S:
            outage[2], self._logged[kind] = True, now
            logger.warning("cachegen: %s: %s; further ones are not logged", kind, what)

    def worked(self, kind):
        if (outage := self._begun.pop(kind, None)) is not None and outage[2]:
            seconds = time.monotonic() - outage[0]
            logger.info("cachegen: %s: over, after %d failures in %.0f s", kind, outage[1], seconds)

    def under_way(self):
        return sorted(self._begun)


def guarded(fallback, tell=None):
    """Decorates a method of an object with `failures`, a Failures: what it raises is logged, and the answer is then
    fallback(self, *arguments), which must not raise. tell(self, exception): told in place of the log; what it raises
    goes to the caller."""

    def decorate(method):
        @functools.wraps(method)
        def call(self, *args, **kwargs):
            try:
                return method(self, *args, **kwargs)
            except Exception as e:
                if tell is None:
                    self.failures.log(method.__name__.strip("_"))
                else:
                    tell(self, e)
                return fallback(self, *args, **kwargs)

        return call

    return decorate


def nothing(*_args, **_kwargs):
    """The fallback of what has no answer."""
    return None
