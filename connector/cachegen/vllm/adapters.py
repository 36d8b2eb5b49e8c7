"""Which adapter (LoRA) a request runs with, by its content.

vLLM reads an adapter when a request with its number first runs, keeps it, and may drop it and read it anew. So the
content is taken once, when the number is first seen, and requests wait for it meanwhile. Afterwards only names, sizes and
times of the files are looked at: where they have changed, nobody knows which content the engine holds, and requests with
that number are neither stored nor served until the engine starts anew. The same holds for an adapter that is loaded "in
place", which vLLM reads again and again.

Surprise: what is loaded through /v1/load_lora_adapter and overwritten before its first request is taken for the new
content. Load changed weights from a new path, as vLLM asks for too.
Threads: files are read by a thread of this module's own, since a directory may be far away; the scheduler's thread asks.
"""

import os
import queue
import threading

from cachegen.fingerprint import adapter_fingerprint
from cachegen.vllm.guard import logger


class Check:
    """Of one adapter for one request. Once done is set, identity holds 32 hex digits, or None: it cannot be told."""

    def __init__(self, adapter):
        self.adapter = adapter  # a LoRARequest
        self.done = threading.Event()
        self.identity = None


class Adapters:
    def __init__(self):
        self._known = {}  # number -> (path, signature, identity or None); the thread's
        self._checks = queue.SimpleQueue()
        self._thread = None

    def start(self, adapter):
        """A Check of adapter, a LoRARequest, under way."""
        check = Check(adapter)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="cachegen-adapters", daemon=True)
            self._thread.start()
        self._checks.put(check)
        return check

    def close(self):
        self._checks.put(None)

    def _run(self):
        while (check := self._checks.get()) is not None:
            try:
                check.identity = self._identity(check.adapter)
            except Exception as e:
                self._forget(check.adapter, e)
            check.done.set()

    def _identity(self, adapter):
        number, path = adapter.lora_int_id, adapter.lora_path
        if getattr(adapter, "load_inplace", False):
            self._forget(adapter, "it is loaded in place")
            return None
        # Before reading and after it: of files that change meanwhile nobody knows what was read.
        signature = _signature(path)
        if number not in self._known:
            identity = adapter_fingerprint(path)
            if _signature(path) != signature:
                raise ValueError("its files change while they are read")
            self._known[number] = path, signature, identity
        known_path, known_signature, identity = self._known[number]
        if identity is not None and (known_path, known_signature) != (path, signature):
            self._forget(adapter, "its files have changed since it was first used")
            return None
        return identity

    def _forget(self, adapter, reason):
        # Said once: from then on the identity that is known is None.
        if self._known.get(adapter.lora_int_id, (None, None, ""))[2] is not None:
            logger.warning(
                "cachegen: requests with adapter %s are neither stored nor served: %s", adapter.lora_name, reason
            )
        self._known[adapter.lora_int_id] = adapter.lora_path, None, None


def _signature(path):
    with os.scandir(path) as entries:
        found = [(entry.name, entry.stat()) for entry in entries]
    return sorted((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found)
