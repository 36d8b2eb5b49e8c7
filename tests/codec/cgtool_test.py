#!/usr/bin/env python3
"""cgtool from outside: exit codes, --json, atomic writes, and round trips of safetensors.

usage: cgtool_test.py CGTOOL GOLDEN_V1 GOLDEN_V1_PAPER        standard library only
"""

import contextlib
import ctypes
import itertools
import json
import os
import pty
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import unittest

CGTOOL, GOLDEN, PAPER = sys.argv.pop(1), sys.argv.pop(1), sys.argv.pop(1)
LAYERS, HEADS, DIM = 3, 2, 8  # of the golden profile
PROFILE = os.path.join(GOLDEN, "profile.cgp")


def write(path, data):
    with open(path, "wb") as file:
        file.write(data)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def write_safetensors(path, tensors):
    """tensors: {name: (dtype, shape, bytes)}"""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    write(path, struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def read_safetensors(path):
    data = read(path)
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    data = data[8 + size :]
    return {
        name: (about["dtype"], about["shape"], data[slice(*about["data_offsets"])])
        for name, about in header.items()
        if name != "__metadata__"
    }


def make_kv(n_tokens, dtype="BF16", seed=1):
    rng = random.Random(seed)
    n = LAYERS * n_tokens * HEADS * DIM
    values = [[rng.gauss(0, 1) for _ in range(n)] for _ in range(2)]
    shape = [LAYERS, n_tokens, HEADS, DIM]

    def pack(plane):
        if dtype == "F32":
            return struct.pack(f"<{n}f", *plane)
        if dtype.startswith("F8"):
            return bytes(int(8 * abs(x)) % 124 for x in plane)  # no NaN, no infinity
        if dtype == "F16":
            return struct.pack(f"<{n}e", *plane)
        return b"".join(struct.pack("<f", x)[2:] for x in plane)

    tokens = [rng.randrange(49152) for _ in range(n_tokens)]
    return {
        "K": (dtype, shape, pack(values[0])),
        "V": (dtype, shape, pack(values[1])),
        "tokens": ("I64", [n_tokens], struct.pack(f"<{n_tokens}q", *tokens)),
    }, tokens


class CgtoolTest(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.mkdtemp(prefix="cgtool_test.")
        self.addCleanup(shutil.rmtree, self.directory)

    def path(self, name):
        return os.path.join(self.directory, name)

    def run_tool(self, *arguments, want=0):
        done = subprocess.run([CGTOOL, *arguments], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, want, f"{arguments}\n{done.stdout}{done.stderr}")
        return done

    def encode(self, tensors, out, *options, level="L2", want=0):
        write_safetensors(self.path("in.safetensors"), tensors)
        return self.run_tool(
            "encode", "--profile", PROFILE, "--level", level, *options, self.path("in.safetensors"), out, want=want
        )

    def assert_no_leftovers(self, *names):
        self.assertEqual(sorted(os.listdir(self.directory)), sorted(["in.safetensors", *names]))

    def test_help_and_version_say_what_they_should(self):
        text = self.run_tool("--help").stdout
        for word in ("info", "verify", "encode", "decode", "transcode", "Exit codes", "--json", "--threads", "--salt"):
            self.assertIn(word, text)
        version = self.run_tool("--version").stdout
        self.assertRegex(version, r"^cgtool \d+\.\d+\.\d+ ")
        # The newest that there are.
        folder = os.path.join(os.path.dirname(GOLDEN), "v5")
        chunk, profile = [
            json.loads(self.run_tool("info", "--json", os.path.join(folder, name)).stdout)["version"]
            for name in ("bf16-0-L1.kv", "profile.cgp")
        ]
        self.assertTrue(version.endswith(f"(chunk version {chunk}, profile version {profile})\n"), version)

    def test_wrong_usage_is_2(self):
        for arguments in (
            [],
            ["fly"],
            ["info"],
            ["decode", "a"],
            ["decode", "a", "b", "c"],
            ["--bad"],
            ["encode", "a", "b"],
            ["encode", "--level", "L4", "a", "b"],
            ["encode", "--level", "L2", "a", "b"],
            ["encode", "--level", "L0", "a", "b"],
            ["encode", "--level", "L0", "--model-fingerprint", "123", "a", "b"],
            ["encode", "--level", "L0", "--chunk-tokens", "12", "a", "b"],
            ["verify", "--threads", "0", "a"],
            ["verify", "--threads", "-1", "a"],
            ["info", "--level", "L1", "a"],
        ):
            done = self.run_tool(*arguments, want=2)
            self.assertTrue(done.stderr.startswith(("cgtool: ", "usage: ")) or "option" in done.stderr, done.stderr)
            self.assertEqual(done.stdout, "")

    def test_missing_files_are_3(self):
        missing = self.path("missing")
        for arguments in (
            ["info", missing],
            ["verify", missing],
            ["decode", missing, "x"],
            ["transcode", "--level", "L3", missing, "x"],
            ["encode", "--level", "L2", "--profile", missing, "x", "y"],
            ["encode", "--level", "L2", "--profile", PROFILE, missing, "y"],
        ):
            done = self.run_tool(*arguments, want=3)
            self.assertEqual(done.stderr, f"cgtool: {missing}: " + done.stderr.split(": ", 2)[2])
            self.assertEqual(done.stderr.count("\n"), 1)

    def test_info_says_whose_matrices_a_chunk_has(self):
        # Joined profiles have one matrix for K and V; their sinks are apart all the same.
        for folder, planes, rows in ((f"{GOLDEN}/../v3-joined", {"K+V"}, "all K+V"), (GOLDEN, {"K", "V"}, "all K ")):
            chunk = os.path.join(folder, "bf16-0-L2.kv")
            sections = json.loads(self.run_tool("info", "--json", chunk).stdout)["sections"]
            self.assertEqual({s["plane"] for s in sections if s["kind"] == "symbols"}, planes)
            self.assertEqual({s["plane"] for s in sections if s["kind"] == "sinks"}, {"K", "V"})
            self.assertIn(f"symbols     {rows}", self.run_tool("info", chunk).stdout)

    def test_info_shows_the_joint_matrix(self):
        folder = os.path.join(os.path.dirname(GOLDEN), "v4")
        self.run_tool("verify", "--decode", folder)
        profile, chunk = os.path.join(folder, "profile.cgp"), os.path.join(folder, "bf16-0-L1.kv")
        joint = json.loads(self.run_tool("info", "--json", profile).stdout)["joint"]
        self.assertEqual(
            (joint["n_shared"], joint["fraction_bits"], joint["n_components"]), (32, {"L1": 2, "L2": 3, "L3": 4}, 56)
        )
        self.assertEqual(joint["n_given"]["L3"], [22, 19, 16, 14, 11, 8, 0, 0])
        self.assertEqual(len(joint["n_active"]["L2"]), 8)
        self.assertIn("given to 1/4, 1/8, 1/16 of a step", self.run_tool("info", profile).stdout)
        self.assertIn("joint to L2 ", self.run_tool("info", chunk).stdout)
        sections = json.loads(self.run_tool("info", "--json", chunk).stdout)["sections"]
        kinds = [s["kind"] for s in sections if s["kind"].startswith("joint")]
        self.assertEqual(kinds, ["joint", "joint to L2", "joint to L1"])
        profile = json.loads(self.run_tool("info", "--json", PROFILE).stdout)
        self.assertIsNone(profile["joint"])

    def test_info_shows_the_steps_of_blocks(self):
        folder = os.path.join(os.path.dirname(GOLDEN), "v5")
        self.run_tool("verify", "--decode", folder)
        chunk = os.path.join(folder, "bf16-0-L1.kv")
        about = json.loads(self.run_tool("info", "--json", chunk).stdout)
        self.assertEqual((about["version"], about["blocks_by_step_factor"]), (5, [1, 0, 1, 0, 0, 1, 0]))
        self.assertEqual([s["kind"] for s in about["sections"][:3]], ["tokens", "steps", "joint"])
        text = self.run_tool("info", chunk, os.path.join(folder, "profile.cgp")).stdout
        self.assertIn("1 at 0.35, 0 at 0.50, 1 at 0.71, 0 at 1.00, 0 at 1.41, 1 at 2.00, 0 at 2.83 times", text)
        self.assertIn("steps of their own", text)
        profile = json.loads(self.run_tool("info", "--json", os.path.join(folder, "profile.cgp")).stdout)
        self.assertEqual((profile["version"], profile["n_query_heads"]), (4, 2))
        about = json.loads(self.run_tool("info", "--json", os.path.join(GOLDEN, "bf16-0-L2.kv")).stdout)
        self.assertEqual(about["blocks_by_step_factor"], [])

    def test_info_of_chunks_and_profiles(self):
        chunk = os.path.join(GOLDEN, "bf16-0-L2.kv")
        about = json.loads(self.run_tool("info", "--json", chunk).stdout)
        self.assertEqual((about["type"], about["level"], about["ok"]), ("chunk", "L2", True))
        self.assertEqual(about["geometry"]["n_layers"], LAYERS)
        self.assertEqual(about["file_bytes"], os.path.getsize(chunk))
        self.assertEqual(about["elements"], LAYERS * 2 * 24 * HEADS * DIM)
        self.assertAlmostEqual(about["bits_per_element"], 8 * about["file_bytes"] / about["elements"])
        self.assertEqual(sum(s["bytes"] for s in about["sections"]) + about["header_bytes"], about["file_bytes"])
        self.assertEqual(len(about["tokens_head"]), 16)
        profile = json.loads(self.run_tool("info", "--json", PROFILE).stdout)
        self.assertEqual((profile["type"], profile["preset"], profile["n_sinks"]), ("profile", "klt", 4))
        self.assertEqual(profile["fingerprint"], about["profile"])
        self.assertEqual([g["n_layers"] for g in profile["groups"]], [2, 1])
        self.assertEqual(len(profile["groups"][0]["planes"]["K"]["n_active"]["L3"]), 8)
        text = self.run_tool("info", chunk, PROFILE).stdout
        self.assertIn("level L2, whole", text)
        self.assertIn("bits per element", text)
        self.assertIn("preset klt", text)

    def test_info_shows_a_damaged_chunk_and_fails(self):
        data = bytearray(read(os.path.join(GOLDEN, "bf16-0-L2.kv")))
        data[-1] ^= 1
        write(self.path("bad.kv"), data)
        done = self.run_tool("info", "--json", self.path("bad.kv"), want=1)
        self.assertFalse(json.loads(done.stdout)["ok"])
        write(self.path("cut.kv"), data[:200])
        self.assertIn("truncated", self.run_tool("info", self.path("cut.kv"), want=1).stderr)
        self.assertIn(
            "not a file of this kind", self.run_tool("info", os.path.join(GOLDEN, "..", "README"), want=1).stderr
        )

    def test_info_escapes_what_does_not_print(self):
        data = bytearray(read(PROFILE))
        data[48:64] = b"\x1b]0;a\\\x07\x7f\xff".ljust(16, b"\0")  # preset
        xxh3 = ctypes.CDLL("libxxhash.so.0").XXH3_64bits  # cgtool needs it, too
        xxh3.restype, xxh3.argtypes = ctypes.c_uint64, (ctypes.c_char_p, ctypes.c_size_t)
        data[-8:] = struct.pack("<Q", xxh3(bytes(data), len(data) - 8))
        write(self.path("odd.cgp"), data)
        text = subprocess.run([CGTOOL, "info", self.path("odd.cgp")], capture_output=True, check=True).stdout
        self.assertIn(rb"preset \x1b]0;a\x5c\x07\x7f\xff, whole", text)
        self.assertEqual([byte for byte in text if not 32 <= byte < 127 and byte != 10], [])
        about = json.loads(self.run_tool("info", "--json", self.path("odd.cgp")).stdout)
        self.assertEqual(about["preset"], "\x1b]0;a\\\x07\x7f?")

    def test_verify_walks_directories_and_names_the_bad(self):
        shutil.copytree(GOLDEN, self.path("store/deep/er"))
        good = json.loads(self.run_tool("verify", "--json", "--decode", self.path("store")).stdout)
        n_files = len([name for name in os.listdir(GOLDEN) if name.endswith((".kv", ".cgp"))])
        self.assertEqual((good["ok"], good["files"], good["bad"]), (True, n_files, 0))
        for name in ("bf16-0-L0.kv", "profile.cgp"):
            bad = self.path("store/deep/er/" + name)
            data = bytearray(read(bad))
            data[len(data) // 2] ^= 4
            write(bad, data)
        done = self.run_tool("verify", "--json", self.path("store"), want=1)
        result = json.loads(done.stdout)
        self.assertEqual((result["ok"], result["files"], result["bad"]), (False, n_files, 2))
        self.assertEqual(
            sorted(os.path.basename(r["path"]) for r in result["results"] if not r["ok"]),
            ["bf16-0-L0.kv", "profile.cgp"],
        )
        self.assertEqual(done.stderr.count("\n"), 2)
        self.assertIn("2 bad", self.run_tool("verify", self.path("store"), want=1).stdout)

    def test_verify_goes_on_after_what_it_cannot_read(self):
        os.makedirs(self.path("store/a"))
        os.makedirs(self.path("store/b"))
        write(self.path("store/b/bad.kv"), b"not a chunk")
        folder = os.open(self.path("store/a"), os.O_RDONLY)
        for _ in range(17):  # of 255 bytes each: a path that no call takes, root's neither
            os.mkdir("x" * 255, dir_fd=folder)
            below = os.open("x" * 255, os.O_RDONLY, dir_fd=folder)
            os.close(folder)
            folder = below
        os.close(folder)
        done = self.run_tool("verify", self.path("store"), want=3)
        self.assertEqual(done.stdout, "1 files, 1 bad, 1 that can't be read\n")
        result = json.loads(self.run_tool("verify", "--json", self.path("store"), want=3).stdout)
        self.assertEqual((result["ok"], result["files"], result["bad"], result["unread"]), (False, 1, 1, 1))

    def test_verify_leaves_out_what_vanishes(self):
        os.mkdir(self.path("store"))
        for name in ("a.kv", "b.kv"):  # it waits at each, and says that it is no file
            os.mkfifo(self.path("store/" + name))
        shutil.copy(PROFILE, self.path("store/z.cgp"))
        tool = subprocess.Popen([CGTOOL, "verify", self.path("store")], stdout=-1, stderr=-1, text=True)
        os.close(os.open(self.path("store/a.kv"), os.O_WRONLY))
        os.remove(self.path("store/z.cgp"))  # all is listed, and b.kv comes before it
        os.close(os.open(self.path("store/b.kv"), os.O_WRONLY))
        stdout, stderr = tool.communicate()
        self.assertEqual((stdout, tool.returncode), ("2 files, 2 bad\n", 3))
        self.assertEqual((stderr.count("not a regular file"), stderr.count("\n")), (2, 2))

    def test_verify_sees_files_in_the_wrong_place(self):
        about = json.loads(self.run_tool("info", "--json", os.path.join(GOLDEN, "bf16-0-L0.kv")).stdout)
        for key, want in ((about["key"], 0), ("0" * 32, 1)):
            os.makedirs(self.path(f"objects/{key}"))
            shutil.copy(os.path.join(GOLDEN, "bf16-0-L0.kv"), self.path(f"objects/{key}/L0.kv"))
            self.run_tool("verify", self.path(f"objects/{key}"), want=want)
        fingerprint = json.loads(self.run_tool("info", "--json", PROFILE).stdout)["fingerprint"]
        for name, want in ((fingerprint, 0), ("f" * 32, 1)):
            shutil.copy(PROFILE, self.path(name + ".cgp"))
            self.run_tool("verify", self.path(name + ".cgp"), want=want)

    def test_names_that_are_not_utf8(self):
        path = os.fsencode(self.directory) + b"/\xff.kv"
        shutil.copy(os.path.join(GOLDEN, "bf16-0-L0.kv"), path)
        done = subprocess.run([os.fsencode(CGTOOL), b"verify", b"--json", path], capture_output=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(json.loads(done.stdout)["results"][0]["path"].endswith("/?.kv"))

    def test_l0_round_trip_is_bit_exact(self):
        for dtype in ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2"):
            tensors, tokens = make_kv(20, dtype)
            out = self.path(dtype + ".kv")
            result = json.loads(self.encode(tensors, out, "--json", level="L0").stdout)
            self.assertEqual([c["path"] for c in result["chunks"]], [out])
            self.run_tool("decode", out, self.path(dtype + ".safetensors"))
            got = read_safetensors(self.path(dtype + ".safetensors"))
            self.assertEqual(got, tensors)

    def test_what_was_decoded_is_encoded_in_its_place_and_no_better(self):
        tensors, _ = make_kv(600)
        for level in ("L1", "L3"):
            self.encode(tensors, self.path(level), "--salt", "tenant", level=level)
        chunk, st = self.path("L3/00001.kv"), self.path("one.safetensors")

        def info(path):
            return json.loads(self.run_tool("info", "--json", path).stdout)

        def encode(level, *options, want=0):
            out = self.path("again.kv")
            done = self.run_tool("encode", "--profile", PROFILE, "--level", level, *options, st, out, want=want)
            return info(out) if want == 0 else done.stderr

        self.run_tool("decode", "--profile", PROFILE, chunk, st)
        first, again = info(chunk), encode("L2")
        for field in ("first_position", "n_tokens", "parent", "key", "model"):
            self.assertEqual(again[field], first[field], field)
        self.assertEqual((first["prefix_level"], again["prefix_level"]), ("L0", "L3"))
        for level in ("L0", "L1"):
            self.assertIn("at L3", encode(level, want=1))
        self.assertIn("--salt", encode("L2", "--salt", "x", want=1))
        self.assertIn("another model", encode("L2", "--model-fingerprint", "0" * 32, want=1))
        chunk = self.path("L1/00001.kv")
        self.run_tool("decode", "--profile", PROFILE, chunk, st)
        self.assertEqual(encode("L1")["prefix_level"], "L1")
        self.run_tool("decode", "--profile", PROFILE, self.path("L1"), st)  # from the start: the salt is kept
        self.run_tool("encode", "--profile", PROFILE, "--level", "L2", st, self.path("all"))
        self.assertEqual(info(self.path("all/00002.kv"))["key"], info(self.path("L1/00002.kv"))["key"])
        # Somebody else's words.
        for word in ("L1", "256", info(chunk)["parent"]):
            self.run_tool("decode", "--profile", PROFILE, chunk, st)
            self.assertIn(b'"%s"' % word.encode(), read(st))
            write(st, read(st).replace(b'"%s"' % word.encode(), b'"%s"' % (b"x" * len(word))))
            self.assertIn("__metadata__", encode("L2", want=1))

    def test_long_inputs_become_a_directory_of_chained_chunks(self):
        tensors, tokens = make_kv(600)
        for level in ("L0", "L1", "L2", "L3"):
            out = self.path(level)
            result = json.loads(self.encode(tensors, out, "--json", "--salt", "tenant", level=level).stdout)
            self.assertEqual(sorted(os.listdir(out)), ["00000.kv", "00001.kv", "00002.kv"])
            self.assertEqual(
                [(c["first_position"], c["n_tokens"]) for c in result["chunks"]], [(0, 256), (256, 256), (512, 88)]
            )
            about = [
                json.loads(line)
                for line in self.run_tool("info", "--json", *(c["path"] for c in result["chunks"])).stdout.splitlines()
            ]
            self.assertEqual(about[1]["parent"], about[0]["key"])
            self.assertEqual(about[2]["parent"], about[1]["key"])
            self.run_tool("decode", "--profile", PROFILE, "--json", out, self.path("out.safetensors"))
            got = read_safetensors(self.path("out.safetensors"))
            self.assertEqual(got["tokens"], tensors["tokens"])
            self.assertEqual(got["K"][:2], tensors["K"][:2])
            if level == "L0":
                self.assertEqual(got, tensors)
        self.assert_no_leftovers("L0", "L1", "L2", "L3", "out.safetensors")
        self.assertEqual(os.stat(self.path("L0")).st_mode & 0o777, 0o777 & ~self.umask())
        # Out of order, or one missing: refused.
        os.remove(self.path("L0/00001.kv"))
        self.assertIn("does not follow", self.run_tool("decode", self.path("L0"), self.path("x"), want=1).stderr)
        # Never into a directory that holds something.
        self.encode(tensors, self.path("L1"), level="L1", want=3)
        self.assertEqual(sorted(os.listdir(self.path("L1"))), ["00000.kv", "00001.kv", "00002.kv"])

    @staticmethod
    def umask():
        mask = os.umask(0)
        os.umask(mask)
        return mask

    def test_decode_refuses_a_chunk_that_gets_shorter_meanwhile(self):
        context = self.path("a/b/context")
        for n_tokens, out in ((290, self.path("shorter")), (300, context)):
            os.makedirs(os.path.dirname(out), exist_ok=True)
            self.encode(make_kv(n_tokens)[0], out)
        about = json.loads(self.run_tool("info", "--json", PROFILE).stdout)
        os.mkdir(self.path("profiles"))
        shutil.copy(PROFILE, self.path(f"profiles/{about['fingerprint']}.cgp"))
        # Exchanged without a pause, the second chunk is sooner or later another one when it is decoded than when all
        # chunks were checked. A run that sees one of the two only is a good one.
        is_over = threading.Event()

        def exchange():
            new, chunk = self.path("new.kv"), os.path.join(context, "00001.kv")
            for source in itertools.cycle((self.path("shorter/00001.kv"), self.path("longer.kv"))):
                os.link(source, new)
                os.replace(new, chunk)
                if is_over.is_set():
                    return

        shutil.copy(os.path.join(context, "00001.kv"), self.path("longer.kv"))
        thread = threading.Thread(target=exchange)
        thread.start()
        try:
            for run in range(1000):
                out = self.path(f"out{run}")
                tool = subprocess.run([CGTOOL, "decode", context, out], stderr=-1, text=True)
                self.assertIn(tool.returncode, (0, 1), tool.stderr)
                self.assertEqual(os.path.exists(out), tool.returncode == 0)
                if "changed while it was read" in tool.stderr:
                    break
        finally:
            is_over.set()
            thread.join()
        self.assertIn("changed while it was read", tool.stderr)

    def test_keys_are_those_that_connectors_ask_for(self):
        # Keys begin with model, dtype of the cache, and salt. With x = xxh3-128 of libxxhash:
        #   x(b"cachegenfs.key.1" + x(PROFILE[24:40] + b"bf16") + struct.pack("<I", 0))
        for dtype, options, want in (
            ("BF16", [], "7a4db1d2dc1937ff89f2d713f457a9bc"),
            ("BF16", ["--salt", "tenant"], "3ae6472cc61621212edf5ba70da0f016"),
            ("F8_E4M3", [], "2b8b054c958a00307b559821e61acc3d"),
        ):
            self.encode(make_kv(9, dtype)[0], self.path("x.kv"), *options, level="L0")
            about = json.loads(self.run_tool("info", "--json", self.path("x.kv")).stdout)
            self.assertEqual(about["parent"], want, f"{dtype} {options}")

    def test_chunk_size_and_keys_are_chosen(self):
        tensors, tokens = make_kv(32)
        keys = set()
        for options in ([], ["--salt", "a"], ["--salt", "b"], ["--model-fingerprint", "0123456789abcdef" * 2]):
            result = json.loads(self.encode(tensors, self.path("x.kv"), "--json", *options, level="L0").stdout)
            keys.add(result["chunks"][0]["key"])
        self.assertEqual(len(keys), 4)
        self.encode(tensors, self.path("d"), "--chunk-tokens", "16", "--threads", "3")
        self.assertEqual(sorted(os.listdir(self.path("d"))), ["00000.kv", "00001.kv"])

    def test_tokens_from_a_file(self):
        tensors, tokens = make_kv(9)
        self.encode(tensors, self.path("a.kv"))
        del tensors["tokens"]
        self.encode(tensors, self.path("b.kv"), want=1)
        write(self.path("ids"), struct.pack("<9I", *tokens))
        write(self.path("ids.txt"), str(tokens).encode())
        for name in ("ids", "ids.txt"):
            self.encode(tensors, self.path("b.kv"), "--tokens", self.path(name))
            self.assertEqual(read(self.path("a.kv")), read(self.path("b.kv")))
            os.remove(self.path("b.kv"))
        # Ids whose bytes are the characters of numbers: a file of these is no text all the same.
        digits = [0x31, 0x3039, 0x2C, 0x0A, 0x30, 0x39, 0x20, 0x5B, 0x3231]
        tensors["tokens"] = ("I64", [9], struct.pack("<9q", *digits))
        self.encode(tensors, self.path("a.kv"))
        del tensors["tokens"]
        write(self.path("digits"), struct.pack("<9I", *digits))
        self.encode(tensors, self.path("b.kv"), "--tokens", self.path("digits"))
        self.assertEqual(read(self.path("b.kv")), read(self.path("a.kv")))
        os.remove(self.path("b.kv"))
        for bad in (b"1 2 3", struct.pack("<8I", *tokens[:8]), b"1 2 3 4 5 6 7 8 99999999999", b"\0\1\2", b""):
            write(self.path("bad"), bad)
            self.encode(tensors, self.path("b.kv"), "--tokens", self.path("bad"), want=1)
        self.assert_no_leftovers("a.kv", "ids", "ids.txt", "digits", "bad")

    def test_bad_inputs_are_1_and_write_nothing(self):
        tensors, tokens = make_kv(9)
        other_shape = dict(tensors, V=("BF16", [LAYERS, 9, HEADS * DIM], tensors["V"][2]))
        nan = dict(tensors, K=("BF16", tensors["K"][1], b"\xc0\x7f" + tensors["K"][2][2:]))
        negative = dict(tensors, tokens=("I32", [9], struct.pack("<9i", *([-1] * 9))))
        wide = dict(
            tensors, K=("BF16", [LAYERS, 9, 1, 16], tensors["K"][2]), V=("BF16", [LAYERS, 9, 1, 16], tensors["V"][2])
        )
        no_v = {"K": tensors["K"], "tokens": tensors["tokens"]}
        for bad in (other_shape, nan, negative, wide, no_v):
            done = self.encode(bad, self.path("out.kv"), want=1)
            self.assertEqual(done.stderr.count("\n"), 1)
            self.assertIn("in.safetensors", done.stderr)
        self.encode(nan, self.path("out.kv"), level="L0")
        os.remove(self.path("out.kv"))
        self.encode(tensors, self.path("out.kv"), "--prefix-level", "L2", level="L1", want=1)
        self.encode(tensors, self.path("out.kv"), "--model-fingerprint", "0" * 32, want=1)
        self.assert_no_leftovers()
        write(self.path("in.safetensors"), read(self.path("in.safetensors"))[:-1])
        self.run_tool("encode", "--level", "L2", "--profile", PROFILE, self.path("in.safetensors"), "x", want=1)

    def test_output_that_cannot_be_written_is_3(self):
        tensors, tokens = make_kv(9)
        self.encode(tensors, self.path("no/such/directory.kv"), want=3)
        os.mkdir(self.path("full"))
        write(self.path("full/x"), b"")
        self.encode(tensors, self.path("full"), want=3)
        self.assert_no_leftovers("full")

    def test_foreign_and_missing_profiles(self):
        shutil.copy(os.path.join(GOLDEN, "bf16-0-L1.kv"), self.path("a.kv"))
        done = self.run_tool("decode", self.path("a.kv"), self.path("out"), want=1)
        self.assertIn("--profile", done.stderr)
        os.makedirs(self.path("context/L1"))
        shutil.copy(self.path("a.kv"), self.path("context/L1/00000.kv"))
        shutil.copy(PROFILE, self.path("context/profile.cgp"))
        self.run_tool("decode", self.path("context/L1/00000.kv"), self.path("out"))
        self.run_tool("verify", "--decode", self.path("context"))

    def test_transcode(self):
        tensors, tokens = make_kv(300)
        for level in ("L0", "L1", "L3"):
            self.encode(tensors, self.path(level), level=level)
        self.run_tool("transcode", "--profile", PROFILE, "--level", "L3", self.path("L1"), self.path("from-L1"))
        self.run_tool("transcode", "--profile", PROFILE, "--level", "L3", self.path("L0"), self.path("from-L0"))
        for source in ("from-L1", "from-L0"):
            for name in ("00000.kv", "00001.kv"):
                self.assertEqual(read(self.path(f"{source}/{name}")), read(self.path(f"L3/{name}")))
        one = self.path("one.kv")
        self.run_tool("transcode", "--profile", PROFILE, "--level", "L2", self.path("L1/00000.kv"), one)
        self.assertEqual(json.loads(self.run_tool("info", "--json", one).stdout)["level"], "L2")
        done = self.run_tool("transcode", "--profile", PROFILE, "--level", "L1", one, self.path("x"), want=1)
        self.assertIn("coarser", done.stderr)
        self.run_tool("transcode", "--level", "L1", self.path("L0"), self.path("x"), want=2)
        self.assertFalse(os.path.exists(self.path("x")))

    def test_what_cannot_be_coded_as_asked_is_said_alike_by_encode_and_transcode(self):
        tensors, _ = make_kv(300)
        k = tensors["K"][2]
        far, nan = (dict(tensors, K=("BF16", tensors["K"][1], k[:-2] + x)) for x in (b"\x80\x4e", b"\xc0\x7f"))
        transcode = ("transcode", "--level", "L2", "--profile", PROFILE)
        for bad, wanted in ((far, "symbols did not fit"), (nan, "infinities or NaNs, which only L0 can code")):
            self.encode(bad, self.path("L0"), level="L0")
            want = int(bad is nan)
            said = self.encode(bad, self.path("encoded"), want=want).stderr
            self.assertRegex(said, f"^cgtool: {self.path('in.safetensors')}: .*{wanted}.*\n$")
            done = self.run_tool(*transcode, self.path("L0"), self.path("transcoded"), want=want)
            named = self.path("L0/00001.kv" if bad is nan else "L0")
            self.assertEqual(done.stderr, said.replace(self.path("in.safetensors"), named))
            for name in os.listdir(self.directory):
                shutil.rmtree(self.path(name), ignore_errors=True)

        self.encode(tensors, self.path("L0"), level="L0")
        st, chunk, out = self.path("one.safetensors"), self.path("one.kv"), self.path("out.kv")
        self.run_tool("decode", self.path("L0/00001.kv"), st)
        write(st, read(st).replace(b'"256"', b'"250"'))
        encode = ("encode", "--profile", PROFILE, st)
        self.run_tool(*encode, chunk, "--level", "L0")
        for *command, path in ((*encode[:-1], "--level", "L2", st), (*transcode, chunk)):
            said = self.run_tool(*command, path, out, want=1).stderr
            wanted = "begins at position 250: with this profile chunks begin at multiples of 8"
            self.assertEqual(said, f"cgtool: {path}: {wanted}\n")

        model = json.loads(self.run_tool("info", "--json", chunk).stdout)["model"]
        k, v = (tensors[name] for name in "KV")
        other = [LAYERS, k[1][1], HEADS * 2, DIM // 2]
        write_safetensors(st, {**tensors, "K": (k[0], other, k[2]), "V": (v[0], other, v[2])})
        self.run_tool("encode", "--level", "L0", "--model-fingerprint", model, st, self.path("other"))
        for *command, path in ((*encode[:-1], "--level", "L2", st), (*transcode, self.path("other/00000.kv"))):
            said = self.run_tool(*command, path, out, want=1).stderr
            wanted = f"K is {LAYERS} layers x {HEADS * 2} KV heads x {DIM // 2}, the profile is for"
            self.assertIn(f"cgtool: {path}: {wanted}", said)
        self.assertFalse(os.path.exists(out))

    def test_version_3(self):
        folders = {name: os.path.join(os.path.dirname(GOLDEN), name) for name in ("v3", "v3-joined", "v3-paper")}
        for folder in folders.values():
            self.run_tool("verify", "--decode", folder)
        self.assertIn("version 2", self.run_tool("info", os.path.join(folders["v3"], "profile.cgp")).stdout)
        profile = os.path.join(folders["v3"], "profile.cgp")
        tensors, tokens = make_kv(300)
        write_safetensors(self.path("in.safetensors"), tensors)
        for level in ("L0", "L1", "L3"):
            options = ("--profile", profile, "--level", level)
            self.run_tool("encode", *options, self.path("in.safetensors"), self.path(level))
        for source in ("L0", "L1"):
            out = self.path(f"from-{source}")
            self.run_tool("transcode", "--profile", profile, "--level", "L3", self.path(source), out)
            for name in ("00000.kv", "00001.kv"):
                data = read(self.path(f"L3/{name}"))
                self.assertEqual(read(os.path.join(out, name)), data)
                self.assertEqual((data[8], len(data) % 16), (3, 0))
        self.run_tool("decode", "--profile", profile, self.path("L1"), self.path("out.safetensors"))
        self.assertEqual(
            struct.unpack("<300q", read_safetensors(self.path("out.safetensors"))["tokens"][2]), tuple(tokens)
        )
        damaged = bytearray(read(self.path("L3/00001.kv")))
        header_bytes, token_bytes, n_tokens = struct.unpack_from("<12xI10xB13xI", damaged)
        end = header_bytes + token_bytes * n_tokens  # of the first section
        self.assertEqual((n_tokens, damaged[end], end % 16 > 0), (44, 0, True))
        damaged[end] = 1
        write(self.path("damaged.kv"), bytes(damaged))
        self.run_tool("verify", self.path("damaged.kv"), want=1)

    def test_lossy_chunks_of_a_cache_with_scales_are_whole_and_not_decoded(self):
        folder, unknown = os.path.join(os.path.dirname(GOLDEN), "v3-fp8"), "its cache's scales are not known"
        done = self.run_tool("verify", "--decode", folder)
        self.assertEqual(done.stdout, "10 files, 0 bad\n")
        lines = done.stderr.splitlines()
        self.assertEqual((len(lines), {line.split(": ", 2)[2] for line in lines}), (7, {f"not decoded: {unknown}"}))
        results = json.loads(self.run_tool("verify", "--decode", "--json", folder).stdout)["results"]
        self.assertEqual(sum(result["status"] == f"not decoded: {unknown}" for result in results), 7)
        lossless, lossy = os.path.join(folder, "e4m3-0-L0.kv"), os.path.join(folder, "e4m3-0-L1.kv")
        self.run_tool("decode", lossless, self.path("out"))
        transcode = ("transcode", "--level", "L2", "--profile", os.path.join(folder, "profile.cgp"))
        for command in (("decode", lossy), (*transcode, lossy), (*transcode, lossless)):
            done = self.run_tool(*command, self.path("x"), want=1)
            self.assertEqual(done.stderr, f"cgtool: {command[-1]}: {unknown}\n")
        self.assertFalse(os.path.exists(self.path("x")))

    def test_preset_paper(self):
        profile = os.path.join(PAPER, "profile.cgp")
        self.run_tool("verify", "--decode", PAPER)
        about = json.loads(self.run_tool("info", "--json", profile).stdout)
        self.assertEqual((about["preset"], about["n_sinks"], about["rotary_dim"]), ("paper", 0, 0))
        text = self.run_tool("info", profile).stdout
        self.assertIn("preset paper", text)
        self.assertIn("anchors and deltas in anchor runs of 10", text)
        tensors, tokens = make_kv(300)
        write_safetensors(self.path("in.safetensors"), tensors)
        for level in ("L1", "L3"):
            options = ("--profile", profile, "--level", level)
            self.run_tool("encode", *options, self.path("in.safetensors"), self.path(level))
        self.run_tool("transcode", "--profile", profile, "--level", "L3", self.path("L1"), self.path("from-L1"))
        for name in ("00000.kv", "00001.kv"):
            self.assertEqual(read(self.path(f"from-L1/{name}")), read(self.path(f"L3/{name}")))
        self.run_tool("decode", "--profile", profile, self.path("L1"), self.path("out.safetensors"))
        out = read_safetensors(self.path("out.safetensors"))
        self.assertEqual(struct.unpack("<300q", out["tokens"][2]), tuple(tokens))
        for name in ("K", "V"):
            pairs = zip(*(struct.unpack(f"<{len(t[name][2]) // 2}H", t[name][2]) for t in (tensors, out)))
            pairs = [struct.unpack("<2f", struct.pack("<2I", a << 16, b << 16)) for a, b in pairs]
            self.assertLess(max(abs(a - b) for a, b in pairs), 0.16)  # half a step by a weight of at least 1/2

    def test_progress_only_on_a_terminal(self):
        done = self.run_tool("verify", GOLDEN)
        self.assertEqual(done.stderr, "")
        leader, follower = pty.openpty()
        subprocess.run([CGTOOL, "verify", GOLDEN], stderr=follower, stdout=subprocess.DEVNULL, check=True)
        os.close(follower)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: everything was read; one read may bring a part
            while piece := os.read(leader, 65536):
                shown += piece
        os.close(leader)
        self.assertIn(b"verifying: 1 of ", shown)
        self.assertTrue(shown.endswith(b"\r\x1b[K"), shown)


if __name__ == "__main__":
    unittest.main()
