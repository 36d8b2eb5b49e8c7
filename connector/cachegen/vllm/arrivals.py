"""How long ago requests have arrived: vLLM notes that by the wall clock, which may be set while they wait."""

import time

STEP_S = 0.05  # clocks that are slewed move less between two questions
FORGOTTEN_AFTER_S = 60


class Arrivals:
    def __init__(self):
        self._offset = self._before = time.time() - time.monotonic()
        self._set_at = 0.0  # on the monotonic clock

    def seconds_since(self, arrival_time):
        """arrival_time: of the wall clock as it was then. Of a request from the time around a step of that clock the
        shortest wait that both the old and the new setting allow; 0 where it would have come in the future."""
        now = time.monotonic()
        offset = time.time() - now
        if abs(offset - self._offset) > STEP_S:
            self._before, self._set_at = self._offset, now
        elif now - self._set_at > FORGOTTEN_AFTER_S:
            self._before = offset
        self._offset = offset
        waits = (now + setting - arrival_time for setting in (offset, self._before))
        return min((wait for wait in waits if wait >= 0), default=0.0)
