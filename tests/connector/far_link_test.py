"""A store over a real network: sshfs between two network namespaces, shaped to 20 Mbit/s with 10 ms of round trip. What
is loaded from there is, byte by byte, what is loaded from the store itself, for one request and for several at once.

The short form of tests/bench/link_bench.py, whose parts it uses. No time is asserted on.

usage: far_link_test.py LINK_DRIVER CGTOOL; needs root, sshd, sshfs and network namespaces, else it skips (77)
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
PROFILE = os.path.join(HERE, "..", "golden", "v3-joined", "profile.cgp")
sys.path.insert(0, os.path.join(HERE, "..", "bench"))

import link_bench  # noqa: E402

LINK_DRIVER, CGTOOL = (os.path.abspath(path) for path in sys.argv[1:3])
N_TOKENS, CHUNK_TOKENS, AT_ONCE = 512, 32, 4
PATIENCE_MS = 600_000  # nothing may be given up because this machine is busy
CONFIG = {"model": "m", "chunk_tokens": CHUNK_TOKENS}
CONFIG.update({f"{what}_timeout_ms": PATIENCE_MS for what in ("lookup", "read", "save")})


def skip(reason):
    print(f"skipped: {reason}: nothing is loaded over a real network")
    sys.exit(1 if "link" in os.environ.get("CG_TEST_REQUIRE", "").split(",") else 77)


def make_store(root):
    """A model's folder with a profile, and no chunks."""
    text = subprocess.run([CGTOOL, "info", "--json", PROFILE], check=True, capture_output=True).stdout
    info = json.loads(text)
    geometry = {name: info["geometry"][name] for name in ("n_layers", "n_kv_heads", "head_dim", "dtype")}
    os.makedirs(os.path.join(root, "m", "profiles"))
    shutil.copy(PROFILE, os.path.join(root, "m", "profiles", info["fingerprint"] + ".cgp"))
    with open(os.path.join(root, "m", "profiles", "default"), "w") as file:
        file.write(info["fingerprint"] + "\n")
    with open(os.path.join(root, "m", "model.json"), "w") as file:
        json.dump({"version": 1, **geometry, "model_fingerprint": info["model"], "rope": None}, file)
    return geometry


def make_kv(path, geometry):
    """A context as capture_kv.py writes it, of noise in bf16."""
    noise = random.Random(1)
    n_elements = 2 * geometry["n_layers"] * N_TOKENS * geometry["n_kv_heads"] * geometry["head_dim"]
    with open(path, "wb") as file:
        file.write(struct.pack(f"<{N_TOKENS + 1}I", N_TOKENS, *range(N_TOKENS)))
        for _ in range(n_elements):
            file.write(struct.pack("<f", noise.gauss(0, 1))[2:])


class FarLinkTest(unittest.TestCase):
    def load(self, root, level):
        """What link_driver says of AT_ONCE requests; level -1: as the policy wants it."""
        driver = link_bench.Driver("", LINK_DRIVER, argparse.Namespace(kv=KV, at_once=AT_ONCE))
        shaped = contextlib.nullcontext  # it is already
        loads = driver.load(root, CONFIG, PATIENCE_MS, level, shaped, LINK.received_bytes)["loads"]
        for load in loads:
            self.assertEqual((load["status"], load["hit_tokens"]), (0, N_TOKENS - 1))
            self.assertEqual(load["loaded_tokens"], N_TOKENS - 1)
            self.assertEqual(sum(load["chunks_at"]), -(-N_TOKENS // CHUNK_TOKENS))
        return loads

    def test_a_level_is_the_same_from_afar(self):
        for level in (1, 3):
            near, far = self.load(STORE, level), self.load(MOUNT, level)
            self.assertEqual(len({load["kv_hash"] for load in near + far}), 1)
            for load in near + far:
                self.assertEqual(load["chunks_at"][level], sum(load["chunks_at"]))

    def test_with_time_enough_all_comes_at_the_finest_level(self):
        finest = self.load(STORE, 1)[0]
        for load in self.load(MOUNT, -1):
            self.assertEqual(load["chunks_at"], finest["chunks_at"])
            self.assertEqual(load["kv_hash"], finest["kv_hash"])


if __name__ == "__main__":
    if os.geteuid() != 0:
        skip("not root")
    missing = [
        name for name in ("ip", "tc", "nsenter", "sshfs", "ssh-keygen", "ssh-keyscan") if shutil.which(name) is None
    ]
    if missing or shutil.which("sshd", path="/usr/sbin:/usr/bin") is None:
        skip(f"no {' '.join(missing) or 'sshd'}")
    with tempfile.TemporaryDirectory(prefix="cg-far-link-") as directory:
        STORE, MOUNT, KV = (os.path.join(directory, name) for name in ("store", "mount", "kv"))
        LINK = link_bench.Link(os.path.join(directory, "link"), 10)
        make_kv(KV, make_store(STORE))
        driver = link_bench.Driver("", LINK_DRIVER, argparse.Namespace(kv=KV, at_once=AT_ONCE))
        driver.save(STORE, CONFIG, AT_ONCE)
        try:
            try:
                LINK.open()
                LINK.shape(20)
                LINK.mount(STORE, MOUNT)
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                skip(f"no link ({error})")
            result = unittest.main(argv=sys.argv[:1], exit=False).result
        finally:
            LINK.close()
    sys.exit(0 if result.wasSuccessful() else 1)
