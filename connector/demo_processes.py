"""What the demo starts and ends: mounts, bind mounts, vLLM servers, tools. Each ends with its context manager, whatever
happens, and nothing outlives the demo.
"""

import contextlib
import glob
import json
import os
import signal
import socket
import subprocess
import sys
import time

from demo_client import Client
from demo_link import stop_group

STARTED = time.monotonic()


def exit_on_signals():
    """From now on signals that end a program raise SystemExit: what was started is undone."""

    def interrupted(number, _frame):
        # Once: cleaning up is not to be interrupted.
        for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    # Explicitly: a shell starts background commands with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)


def say(text):
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


class Waiting:
    """Shows that a long step still runs, and ends it at its deadline."""

    def __init__(self, what, timeout_s):
        self._what, self._started, self._timeout_s = what, time.monotonic(), timeout_s
        self._shown = self._started

    def tick(self, step_s=0.1):
        now = time.monotonic()
        if now - self._started > self._timeout_s:
            raise TimeoutError(f"{self._what}: not done after {self._timeout_s} s")
        if now - self._shown >= 5:
            self._shown = now
            say(f"    ... {self._what}, {now - self._started:.0f} s")
        time.sleep(step_s)


def run_group(command, timeout_s):
    """Runs a command that shows its own progress, as a session of its own, so that none of it outlives the demo."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        if process.wait(timeout_s) != 0:
            raise RuntimeError(f"{' '.join(command[:4])} ...: exit status {process.returncode}")
    finally:
        stop_group(process)


@contextlib.contextmanager
def mounted(arguments, store, mountpoint, log):
    """cachegenfs STORE MOUNTPOINT, in the foreground of a process of ours."""
    os.makedirs(store, exist_ok=True)
    os.makedirs(mountpoint, exist_ok=True)
    program = os.path.join(arguments.build, "fusefs", "cachegenfs")
    with open(log, "w") as output:
        process = subprocess.Popen(
            [program, "-f", store, mountpoint],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        waiting = Waiting("mounting", 20)
        while not os.path.ismount(mountpoint):
            if process.poll() is not None:
                with open(log) as text:
                    raise RuntimeError(f"cachegenfs ended: {text.read()[-500:]}")
            waiting.tick(0.02)
        yield
    finally:
        stop_group(process)  # unmounts on SIGTERM
        if os.path.ismount(mountpoint):
            subprocess.run(["umount", "-l", mountpoint], capture_output=True)


def unmount(mountpoint):
    """Ends a mount that an engine has read from, which closes it a little after it has answered."""
    waiting = Waiting("unmounting what the engine has read", 20)
    # mountpoint(1), since os.path.ismount() misses a folder that is bound on its own file system.
    while subprocess.run(["mountpoint", "-q", mountpoint]).returncode == 0:
        if subprocess.run(["umount", mountpoint], capture_output=True).returncode != 0:
            waiting.tick()  # busy means not yet


class View:
    """A store in which a model's folder can be exchanged under a running engine: a bind mount of another store's."""

    def __init__(self, root, model):
        self.root, self._folder = root, os.path.join(root, model)
        os.makedirs(self._folder)

    def show(self, folder):
        self.close()
        subprocess.run(["mount", "--bind", folder, self._folder], check=True, stdin=subprocess.DEVNULL)

    def close(self):
        unmount(self._folder)


class Server:
    """A fresh vLLM server with a connector. options and environment: more of the command's."""

    def __init__(self, arguments, log, transfer, dtype, options=(), environment=()):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_CI_ENV": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": os.path.join(arguments.checkout, "connector"),
            "CACHEGEN_LIBRARY": os.path.join(arguments.build, "connector", "libcachegen.so"),
            **dict(environment),
        }
        # As users run it, but for: no chunked prefill (the uncompressed connector stores what the first step computes)
        # and no compilation, which would only prolong the start. The same in all runs.
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", arguments.model, "--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", dtype, "--max-model-len", "4096", "--max-num-batched-tokens", "4096"),
            *("--enforce-eager", "--no-enable-prefix-caching", "--enable-prompt-tokens-details"),
            *("--kv-transfer-config", json.dumps(transfer), *options),
        ]
        self._log = log
        with open(log, "w") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.client = Client(port)

    def __enter__(self):
        try:
            waiting = Waiting("starting vLLM", 400)
            while not self.client.healthy():
                if self._process.poll() is not None:
                    raise RuntimeError(
                        f"vLLM ended with {self._process.returncode}; the end of its log:\n{self.tail()}"
                    )
                waiting.tick()
            with open(self._log, errors="replace") as log:
                disabled = [line for line in log if "connector disabled" in line]
            if disabled:
                raise RuntimeError(disabled[0])
        except BaseException:
            self.__exit__()
            raise
        return self.client

    def cpu_s(self):
        """CPU time of all its processes that are there."""
        ticks = 0
        for path in glob.glob("/proc/[0-9]*/stat"):
            with contextlib.suppress(OSError), open(path) as file:
                fields = file.read().rpartition(")")[2].split()  # from the state on; proc(5)
                if int(fields[3]) == self._process.pid:  # the session
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def tail(self):
        with open(self._log, errors="replace") as log:
            return "".join(log.readlines()[-30:])

    def __exit__(self, *_):
        stop_group(self._process)


def cachegen_transfer(root, model, **more):
    return {
        "kv_connector": "CachegenConnector",
        "kv_connector_module_path": "cachegen.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        # The demo forces levels: no budget may cut a hit short.
        "kv_connector_extra_config": {"root": root, "model": model, "ttft_budget_ms": 600000, **more},
    }


def uncompressed_transfer(directory):
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": directory},
    }
