"""A slow link on one machine: two network namespaces joined by a veth pair, shaped in both directions, with an sshd of
our own at one end and sshfs mounts through it at the other.

Only the network is in the namespaces. The sshd's and the mounts' files are the machine's, so a mount made here is seen
by every process. Needs root. close() undoes everything; it may be called at any point.
"""

import os
import shutil
import subprocess
import time


def _run(*command, **options):
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, **options)


class ShapedLink:
    SERVER, CLIENT, PORT = "198.18.77.1", "198.18.77.2", 2222  # RFC 2544's addresses: for benchmarks, never routed

    def __init__(self, directory, mbps):
        self._directory = directory
        self._mbps = mbps
        self._pid = os.getpid()
        self._server_ns = f"cgdemo-s{self._pid}"
        self._client_ns = f"cgdemo-c{self._pid}"
        self._namespaces = []
        self._mounts = []
        self._sshd = None

    def _in(self, namespace, *command):
        # Not "ip netns exec": that has a mount namespace of its own, and nobody else would see the sshfs mount.
        return ["nsenter", f"--net=/run/netns/{namespace}", *command]

    def open(self):
        os.makedirs(self._directory, mode=0o700)
        for namespace in (self._server_ns, self._client_ns):
            _run("ip", "netns", "add", namespace)
            self._namespaces.append(namespace)
        _run(
            *("ip", "link", "add", "cgv0", "netns", self._server_ns, "type", "veth"),
            *("peer", "name", "cgv0", "netns", self._client_ns),
        )
        for namespace, address in ((self._server_ns, self.SERVER), (self._client_ns, self.CLIENT)):
            _run(*self._in(namespace, "ip", "addr", "add", f"{address}/30", "dev", "cgv0"))
            _run(*self._in(namespace, "ip", "link", "set", "cgv0", "up"))
            _run(*self._in(namespace, "ip", "link", "set", "lo", "up"))
            # A burst of 32 KiB is 2.6 ms of the link: no transfer that matters fits into it.
            shape = f"rate {self._mbps}mbit burst 32kb latency 50ms".split()
            _run(*self._in(namespace, "tc", "qdisc", "add", "dev", "cgv0", "root", "tbf", *shape))
        self._start_sshd()

    def _start_sshd(self):
        path = lambda name: os.path.join(self._directory, name)  # noqa: E731
        for key in ("host_key", "user_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path(key))
        shutil.copy(path("user_key.pub"), path("authorized_keys"))
        os.makedirs("/run/sshd", 0o755, exist_ok=True)  # sshd's own, not configurable; it stays for others
        with open(path("sshd_config"), "w") as config:
            config.write(
                f"ListenAddress {self.SERVER}\nPort {self.PORT}\nHostKey {path('host_key')}\n"
                f"AuthorizedKeysFile {path('authorized_keys')}\nPidFile none\nUsePAM no\nStrictModes no\n"
                "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n"
                "UseDNS no\nSubsystem sftp internal-sftp\nForceCommand internal-sftp\n"
            )
        with open(path("known_hosts"), "w") as known, open(path("host_key.pub")) as key:
            known.write(f"[{self.SERVER}]:{self.PORT} {key.read()}")
        sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin")
        with open(path("sshd.log"), "w") as log:
            self._sshd = subprocess.Popen(
                self._in(self._server_ns, sshd, "-D", "-e", "-f", path("sshd_config")),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 10
        probe = self._in(self._client_ns, "ssh-keyscan", "-T", "1", "-p", str(self.PORT), self.SERVER)
        while not subprocess.run(probe, capture_output=True).stdout:
            if time.monotonic() > deadline or self._sshd.poll() is not None:
                with open(path("sshd.log")) as log:
                    raise RuntimeError(f"sshd does not answer: {log.read()[-500:]}")

    def mount_options(self):
        return []  # more of them, for who shapes the link in another way

    def mount(self, remote, mountpoint):
        """Mounts the directory remote at mountpoint, over the link."""
        path = lambda name: os.path.join(self._directory, name)  # noqa: E731
        os.makedirs(mountpoint, exist_ok=True)
        options = [
            *("-o", f"port={self.PORT}", "-o", f"IdentityFile={path('user_key')}", "-o", "IdentitiesOnly=yes"),
            *("-o", f"UserKnownHostsFile={path('known_hosts')}", "-o", "StrictHostKeyChecking=yes", "-F", "/dev/null"),
        ]
        options += self.mount_options()
        self._mounts.append(mountpoint)
        _run(*self._in(self._client_ns, "sshfs", f"root@{self.SERVER}:{remote}", mountpoint, *options), timeout=30)

    def received_bytes(self):
        """What the client's end has received so far, headers included."""
        text = subprocess.run(
            self._in(self._client_ns, "cat", "/proc/net/dev"), check=True, capture_output=True, text=True
        ).stdout
        return next(
            int(line.split(":")[1].split()[0]) for line in text.splitlines() if line.strip().startswith("cgv0:")
        )

    def close(self):
        for mountpoint in reversed(self._mounts):
            for command in (["umount", mountpoint], ["umount", "-l", mountpoint]):
                try:
                    if subprocess.run(command, capture_output=True, timeout=30).returncode == 0:
                        break
                except subprocess.TimeoutExpired:
                    pass  # the server may have gone: then without it
        self._mounts = []
        if self._sshd is not None:
            stop_group(self._sshd)
            self._sshd = None
        for namespace in self._namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, timeout=30)
        self._namespaces = []


def stop_group(process, patience_s=15):
    """Ends a process that was started as leader of its own session, and what it has started: it alone is asked first,
    what is left of the group after patience_s is killed."""
    import signal

    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
