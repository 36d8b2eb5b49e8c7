"""Loads over real links: a store host and a serving host in two network namespaces, the store mounted through sshfs or
Gluster, the link between them shaped by tbf at a constant rate or after a trace; the connector loads a real context
from there.

usage: link_bench.py --kv KV --profile PROFILE_DIR --driver [NAME=]DRIVER...
           [--mbps 20,100,1000] [--trace FILE... --trace-scale 1] [--levels 1,2]
           [--policies ttft_budget,paper] [--budget-ms 2000] [--at-once 1] [--rounds 5] [--delay-ms 0]
           [--warm] [--config JSON] [--over sshfs|gluster] [--json OUT]

KV is capture_kv.py's; PROFILE_DIR a model's folder with model.json and profiles/. With several drivers (of builds that
are to be compared) each round runs all of them, one after the other. Every load has a mount of its own, so nothing is
in the client's page cache; the server's files are in the server's. Each has a connector of its own, too, which knows
nothing of the link; with --warm it has loaded another context before. Needs root, sshd and sshfs; over Gluster, a
volume of one brick on the store host, also glusterd (Debian's glusterfs-server).

A row: medians with the least and the most of the rounds. Bytes are those that the client's end of the link received
from before the look-up until shortly after the load's end, headers of all protocols included.
"""

import argparse
import contextlib
import json
import os
import queue
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

AFTER_S = 0.3  # in which comes what was asked for and is not wanted any more

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "connector"))

from demo_link import ShapedLink  # noqa: E402
from demo_processes import unmount  # noqa: E402


class Link(ShapedLink):
    """With a rate that changes, and a delay in each direction, which a relay between ssh and the link adds."""

    def __init__(self, directory, delay_ms):
        super().__init__(directory, 1000)
        self._delay_s = delay_ms / 2e3

    def mount_options(self):
        if not self._delay_s:
            return []
        return ["-o", f"ProxyCommand={sys.executable} {os.path.abspath(__file__)} --relay %h %p {self._delay_s}"]

    def shape(self, mbps, namespace=None):
        # A burst of at least 32 KiB and a millisecond.
        rate = f"tbf rate {max(mbps, 0.008):.3f}mbit burst {max(32, mbps / 8):.0f}kb latency 50ms".split()
        for name in [namespace] if namespace else [self._server_ns, self._client_ns]:
            subprocess.run(self._in(name, "tc", "qdisc", "replace", "dev", "cgv0", "root", *rate), check=True)

    def share(self, directory):
        """From here on what lies in this directory, a new one, can be mounted over the link."""
        os.makedirs(directory)

    def unmount(self, mountpoint):
        unmount(mountpoint)
        self._mounts.remove(mountpoint)


class GlusterLink(Link):
    """The same with Gluster in place of sshfs. What is shared is a volume of one brick, mounted on the store host."""

    VOLUME = "cgv"

    def __init__(self, directory, delay_ms):
        if delay_ms:
            raise ValueError("the relay that delays is ssh's")
        super().__init__(directory, delay_ms)

    def _gluster(self, *command):
        tool = ["nsenter", "--mount", "--net", "--target", str(self._glusterd.pid), "gluster", "--mode=script"]
        return subprocess.run([*tool, *command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)

    def _mount_volume(self, namespace, subfolder, mountpoint):
        os.makedirs(mountpoint, exist_ok=True)
        log = os.path.join(self._directory, f"client{len(self._mounts)}.log")
        command = ["glusterfs", f"--volfile-server={self.SERVER}", f"--volfile-id={self.VOLUME}", "-l", log]
        command += [f"--subdir-mount=/{subfolder}"] if subfolder else []
        self._mounts.append(mountpoint)
        subprocess.run(self._in(namespace, *command, mountpoint), check=True, stdin=subprocess.DEVNULL, timeout=60)
        subprocess.run(["mountpoint", "-q", mountpoint], check=True)

    def share(self, directory):
        self._shared = directory
        path = lambda name: os.path.join(self._directory, name)  # noqa: E731
        os.makedirs(path("brick"))
        # All of a daemon's places are its own.
        own = (
            "for at in /run /var/lib/glusterd /var/log/glusterfs; do mount -t tmpfs none $at; done; mkdir /run/gluster"
        )
        command = self._in(self._server_ns, "unshare", "-m", "sh", "-c", f'{own}; exec glusterd -N -l "$1"', "sh")
        with open(path("glusterd.out"), "w") as output:
            self._glusterd = subprocess.Popen(
                [*command, path("glusterd.log")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + 60
        while self._gluster("pool", "list").returncode != 0:
            if time.monotonic() > deadline or self._glusterd.poll() is not None:
                raise RuntimeError("glusterd does not answer")
            time.sleep(0.2)
        for command in (["create", self.VOLUME, f"{self.SERVER}:{path('brick')}", "force"], ["start", self.VOLUME]):
            result = self._gluster("volume", *command)
            if result.returncode != 0:
                raise RuntimeError(f"gluster volume {command[0]}: {result.stdout}{result.stderr}")
        self._mount_volume(self._server_ns, "", directory)

    def mount(self, remote, mountpoint):
        subfolder = os.path.relpath(remote, self._shared)
        self._mount_volume(self._client_ns, "" if subfolder == "." else subfolder, mountpoint)

    def close(self):
        for mountpoint in reversed(self._mounts):  # before their servers go
            subprocess.run(["umount", "-l", mountpoint], capture_output=True)
        self._mounts = []
        # Bricks and clients are daemons; what runs in these namespaces was started here.
        for namespace in self._namespaces:
            pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split()
            for pid in map(int, pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        super().close()


LINKS = {"sshfs": Link, "gluster": GlusterLink}


def read_trace(path, start_s, scale):
    """(s, Mbit/s) of a file of time_s,bandwidth_mbps, from start_s of it on, times scale."""
    with open(path, encoding="ascii") as file:
        lines = [line for line in file if line.strip() and not line.startswith("#")]
    steps = [tuple(map(float, line.split(","))) for line in lines[1:]]
    steps = [(t, mbps * scale) for t, mbps in steps]
    before = [mbps for t, mbps in steps if t <= start_s][-1:]
    return [(0.0, mbps) for mbps in before] + [(t - start_s, mbps) for t, mbps in steps if t > start_s]


class Follow:
    """Shapes the link by steps of (s, Mbit/s) while it is entered."""

    def __init__(self, link, steps):
        self._steps, self._link, self._over = steps, link, threading.Event()

    def __enter__(self):
        self._link.shape(self._steps[0][1])
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        began = time.monotonic()
        for at_s, mbps in self._steps[1:]:
            if self._over.wait(max(0, began + at_s - time.monotonic())):
                return
            self._link.shape(mbps, self._link._server_ns)

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


def wait_until_ready(process):
    if process.stdout.readline() != "ready\n":
        raise RuntimeError(f"{process.args[0]} is not ready")


def go_on(process):
    process.stdin.write("\n")
    process.stdin.flush()


class Driver:
    def __init__(self, name, path, arguments):
        self.name, self.path, self.arguments = name, path, arguments

    def save(self, root, config, n_contexts):
        config = json.dumps({**config, "root": root})
        subprocess.run([self.path, "save", self.arguments.kv, config, str(n_contexts)], check=True)

    def load(self, root, config, budget_ms, level, shaped, received_bytes, warm=False):
        config = json.dumps({**config, "root": root})
        numbers = [str(n) for n in (self.arguments.at_once, 1, budget_ms, level)]
        command = [self.path, "load", self.arguments.kv, config, *numbers]
        if warm:
            command.append("warm")
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            wait_until_ready(process)
            with shaped():
                if warm:
                    go_on(process)
                    wait_until_ready(process)
                before = received_bytes()
                go_on(process)
                loads = [json.loads(process.stdout.readline()) for _ in range(self.arguments.at_once)]
                time.sleep(AFTER_S)
                wire_bytes = received_bytes() - before
        return {"loads": loads, "wire_bytes": wire_bytes}


def spread(values, digits=3):
    return [round(f(values), digits) for f in (statistics.median, min, max)]


def row_of(samples):
    loads = [load for sample in samples for load in sample["loads"]]
    return {
        "rounds": len(samples),
        "total_s": spread([load["total_s"] for load in loads]),
        "lookup_s": spread([load["lookup_s"] for load in loads]),
        "wire_mb": spread([sample["wire_bytes"] / 1e6 for sample in samples]),
        "read_mb": spread([sum(load["bytes"] for load in sample["loads"]) / 1e6 for sample in samples]),
        "loaded_tokens": spread([load["loaded_tokens"] for load in loads], 0),
        "predicted_kl": spread([load["predicted_kl"] for load in loads], 5),
    }


def run(link, drivers, arguments, directory, out):
    store, mount = os.path.join(directory, "store"), os.path.join(directory, "mount")
    model = os.path.basename(os.path.normpath(arguments.profile))
    config = {"model": model, **arguments.config}
    link.share(store)
    shutil.copytree(arguments.profile, os.path.join(store, model))
    drivers[0].save(store, config, arguments.at_once + arguments.warm)

    def measure(driver, case, n):
        kind, place, policy, level = case
        link.shape(1000)
        link.mount(store, mount)
        try:
            options = {**config, "policy": policy, "recompute_tokens_per_s": arguments.recompute_tokens_per_s}
            start_s = arguments.trace_start_s + n * arguments.trace_step_s
            shaped = Follow(link, [(0, place)] if kind == "mbps" else read_trace(place, start_s, arguments.trace_scale))
            choice = (arguments.budget_ms, level)
            return driver.load(mount, options, *choice, lambda: shaped, link.received_bytes, arguments.warm)
        finally:
            link.shape(1000)
            link.unmount(mount)

    places = [("mbps", mbps) for mbps in arguments.mbps] + [("trace", path) for path in arguments.trace]
    choices = [(policy, -1) for policy in arguments.policies] + [("ttft_budget", level) for level in arguments.levels]
    for kind, place in places:
        samples = {}
        for n in range(arguments.rounds):
            for policy, level in choices:
                for driver in drivers:
                    sample = measure(driver, (kind, place, policy, level), n)
                    samples.setdefault((driver.name, policy, level), []).append(sample)
        for (name, policy, level), list_of in samples.items():
            place_name = place if kind == "mbps" else os.path.splitext(os.path.basename(place))[0]
            row = {
                "driver": name,
                "over": arguments.over,
                kind: place_name,
                "delay_ms": arguments.delay_ms,
                "at_once": arguments.at_once,
                "budget_ms": arguments.budget_ms,
                "policy": policy if level < 0 else f"L{level}",
                **row_of(list_of),
            }
            print(json.dumps(row), flush=True)
            out.append(row)


def relay(host, port, delay_s):
    """ssh's ProxyCommand: standard input and output to host, each byte delay_s later."""
    server = socket.create_connection((host, int(port)))
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    directions = ((lambda: os.read(0, 1 << 18), server.sendall), (lambda: server.recv(1 << 18), write_all))
    for read, write in directions:
        late = queue.SimpleQueue()
        threading.Thread(target=delay_in, args=(read, late, delay_s), daemon=True).start()
        last = threading.Thread(target=delay_out, args=(late, write), daemon=True)
        last.start()
    last.join()


def write_all(data):
    while data:
        data = data[os.write(1, data) :]


def delay_in(read, late, delay_s):
    while data := read():
        late.put((time.monotonic() + delay_s, data))
    late.put((time.monotonic() + delay_s, b""))


def delay_out(late, write):
    while True:
        at_s, data = late.get()
        time.sleep(max(0, at_s - time.monotonic()))
        if not data:
            return
        write(data)


def main():
    if sys.argv[1:2] == ["--relay"]:
        return relay(sys.argv[2], sys.argv[3], float(sys.argv[4]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [float(x) for x in text.split(",") if x]  # noqa: E731
    words = lambda text: [x for x in text.split(",") if x]  # noqa: E731
    parser.add_argument("--kv", required=True)
    parser.add_argument("--profile", required=True)
    parser.add_argument("--driver", action="append", required=True)
    parser.add_argument("--mbps", type=numbers, default=[])
    parser.add_argument("--trace", nargs="*", default=[])
    parser.add_argument("--trace-scale", type=float, default=1)
    parser.add_argument("--trace-start-s", type=float, default=0)
    parser.add_argument("--trace-step-s", type=float, default=10)
    parser.add_argument("--levels", type=lambda text: [int(x) for x in words(text)], default=[])
    parser.add_argument("--policies", type=words, default=[])
    parser.add_argument("--budget-ms", type=float, default=2000)
    parser.add_argument("--recompute-tokens-per-s", type=float, default=0)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delay-ms", type=float, default=0)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--config", type=json.loads, default={}, help="more keys of the connector's")
    parser.add_argument("--over", choices=LINKS, default="sshfs")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    for path in (arguments.kv, arguments.profile, *(text.rpartition("=")[2] for text in arguments.driver)):
        if not os.path.exists(path):
            parser.error(f"{path}: No such file or directory")
    drivers = []
    for text in arguments.driver:
        name, _, path = text.rpartition("=")
        drivers.append(Driver(name, os.path.abspath(path), arguments))
    directory = tempfile.mkdtemp(prefix="cg-link-")
    link = LINKS[arguments.over](os.path.join(directory, "link"), arguments.delay_ms)
    out = []
    try:
        link.open()
        run(link, drivers, arguments, directory, out)
    finally:
        link.close()
        shutil.rmtree(directory, ignore_errors=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="ascii") as file:
            json.dump(out, file, indent=1)


if __name__ == "__main__":
    main()
