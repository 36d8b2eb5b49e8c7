"""What the worker needs of an engine's GPU: the stream that the engine works on, and how long a step took there.

Both only where the KV cache is on a GPU: there a step has hardly begun when its call returns.
"""

import collections
import time

from cachegen import abi


class HostSteps:
    """Steps whose call returns when they are over."""

    after = None  # as abi.Connector.load_start() has it
    _began_ns = 0

    def begin(self):
        self._began_ns = time.monotonic_ns()

    def end(self, n_tokens, n_pairs):
        """Returns the prefills that are over since the last call, as (n_tokens, n_pairs, duration_ns)."""
        return [(n_tokens, n_pairs, time.monotonic_ns() - self._began_ns)] if n_tokens else []


class GpuSteps:
    """Steps that a GPU's stream works off later. Never waits for it."""

    MOST_PENDING = 8  # steps of which it is not known how long they took; further ones are not asked about

    def __init__(self, device, cuda=None):
        import torch

        self._device, self._cuda = device, cuda or torch.cuda
        self._began = None
        self._pending = collections.deque()  # n_tokens, n_pairs, first event, last event

    @property
    def after(self):
        return abi.AFTER_STREAM, self._cuda.current_stream(self._device).cuda_stream

    def _event(self):
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def begin(self):
        self._began = self._event() if len(self._pending) < self.MOST_PENDING else None

    def end(self, n_tokens, n_pairs):
        if n_tokens and self._began is not None:
            self._pending.append((n_tokens, n_pairs, self._began, self._event()))
        self._began = None
        finished = []
        # A stream works in order: behind a step that is not over none is.
        while self._pending and self._pending[0][3].query():
            n_tokens, n_pairs, first, last = self._pending.popleft()
            finished.append((n_tokens, n_pairs, int(first.elapsed_time(last) * 1e6)))  # it says ms
        return finished
