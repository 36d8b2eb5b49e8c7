"""Fingerprints of weights: small ones are read whole, of large ones every tensor is sampled.

usage: fingerprint_test.py
"""

import io
import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest
import zipfile
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "connector"))
from cachegen.fingerprint import SPACING_BYTES, WHOLE_BYTES, model_fingerprint, weights_digest  # noqa: E402

GIB = 1 << 30
SMALL = "6763049c415d9e3943a7334238d339f8"  # of the model in test_small_models_keep_their_fingerprints


class FingerprintTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def write(self, name, n_bytes, tensors=None, at=None, byte=b"\1"):
        """A model with one sparse file of weights, whose bytes are 0 but for one; its fingerprint. tensors: name ->
        (begin, end); without it the file is no safetensors."""
        directory = os.path.join(self.folder, name)
        os.makedirs(directory, exist_ok=True)
        head = b""
        if tensors is not None:
            text = json.dumps({
                "__metadata__": {"format": "pt"},
                **{n: {"dtype": "U8", "shape": [e - b], "data_offsets": [b, e]} for n, (b, e) in tensors.items()},
            }).encode()  # fmt: skip
            head = struct.pack("<Q", len(text)) + text
        suffix = "bin" if tensors is None else "safetensors"
        with open(os.path.join(directory, f"model.{suffix}"), "wb") as file:
            file.write(head)
            file.truncate(len(head) + n_bytes)
            if at is not None:
                file.seek(len(head) + at)
                file.write(byte)
        with open(os.path.join(directory, "config.json"), "w") as file:
            json.dump({"hidden_size": 8}, file)
        return model_fingerprint(directory)

    def test_small_models_keep_their_fingerprints(self):
        self.assertEqual(self.write("small", 4096, {"a": (0, 1000), "b": (1000, 4096)}, at=5), SMALL)

    def test_every_tensor_of_a_large_model_counts(self):
        n_bytes = WHOLE_BYTES + GIB
        tensors = {"first": (0, 2 * GIB), "small": (2 * GIB, 2 * GIB + 100), "last": (2 * GIB + 100, n_bytes)}
        begin, end = tensors["last"]
        places = {
            "nowhere": None, "start": 0, "middle": GIB, "end": 2 * GIB - 1, "small tensor": 2 * GIB + 50, "next": begin,
            "middle of the next": (begin + end) // 2, "a sample between": SPACING_BYTES * 3 + 7, "last byte": end - 1,
        }  # fmt: skip
        found = {what: self.write("large", n_bytes, tensors, at) for what, at in places.items()}
        self.assertEqual(len(set(found.values())), len(found), found)

    def same_bytes_changed(self, name, data, places):
        """Fingerprints of a file as it is, and with one of its bytes changed; all weights count as large."""
        directory = os.path.join(self.folder, "changed")
        os.makedirs(directory, exist_ok=True)
        found = []
        with mock.patch("cachegen.fingerprint.WHOLE_BYTES", 0):
            for place in (None, *places):
                changed = bytearray(data)
                if place is not None:
                    changed[place] ^= 1
                with open(os.path.join(directory, name), "wb") as file:
                    file.write(changed)
                found.append(model_fingerprint(directory))
        os.remove(os.path.join(directory, name))
        return found

    def test_so_does_every_tensor_of_a_gguf_file(self):
        string = lambda text: struct.pack("<Q", len(text)) + text  # noqa: E731
        values = {
            b"general.alignment": struct.pack("<II", 4, 64),
            b"an.array": struct.pack("<IIQ", 9, 8, 2) + string(b"one") + string(b"two"),
            b"numbers": struct.pack("<IIQ3H", 9, 2, 3, 1, 2, 3),
            b"a.name": struct.pack("<I", 8) + string(b"x"),
            b"a.double": struct.pack("<Id", 12, 0.5),
        }
        sizes = {b"big": 1 << 20, b"small": 64, b"other": 3 << 20}  # samples of a whole lie far from the small one
        head, at = b"GGUF" + struct.pack("<IQQ", 3, len(sizes), len(values)), 0
        head += b"".join(string(name) + value for name, value in values.items())
        starts = {}
        for name, n_bytes in sizes.items():
            head += string(name) + struct.pack("<IQIQ", 1, n_bytes, 24, at)
            starts[name], at = at, at + n_bytes
        head += bytes(-len(head) % 64)
        data = head + bytes(at)
        places = [*(len(head) + start + 10 for start in starts.values()), head.index(b"two"), len(head) + (100 << 10)]
        found = self.same_bytes_changed("model.gguf", data, places)
        self.assertEqual(len(set(found[:-1])), len(found) - 1, found)
        self.assertEqual(found[-1], found[0], "a byte between samples: else the case tests nothing")
        # None of the lengths in it is believed.
        for n in range(0, len(head), 3):
            lies = bytearray(data[: len(head) + 200])
            lies[n : n + 8] = b"\xff" * 8
            self.assertEqual(len(self.same_bytes_changed("model.gguf", lies, [])[0]), 32)

    def test_so_does_every_tensor_of_what_torch_saves(self):
        sizes = {"big": 1 << 20, "small": 64, "other": 3 << 20}
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as members:
            for name, n_bytes in sizes.items():
                members.writestr(f"archive/data/{name}", bytes(n_bytes))
            starts = {m.filename: m.header_offset + 30 + len(m.filename) for m in members.infolist()}
        places = [*(start + 10 for start in starts.values()), starts["archive/data/big"] + (100 << 10)]
        found = self.same_bytes_changed("model.bin", file.getvalue(), places)
        self.assertEqual(len(set(found[:-1])), len(found) - 1, found)
        self.assertEqual(found[-1], found[0], "a byte between samples: else the case tests nothing")

    def test_large_files_of_other_formats_are_sampled_all_over(self):
        n_bytes = WHOLE_BYTES + GIB
        places = [None, 0, SPACING_BYTES * 100, n_bytes - 1]
        self.assertEqual(len({self.write("other", n_bytes, at=at) for at in places}), len(places))

    def test_where_there_are_no_safetensors_all_that_may_be_loaded_counts(self):
        found = [self.write("both", 100)]
        for name in ("model.gguf", "model.bin"):
            with open(os.path.join(self.folder, "both", name), "wb") as file:
                file.write(b"other weights")
            found.append(model_fingerprint(os.path.join(self.folder, "both")))
        self.assertEqual(len(set(found)), 3)
        with open(os.path.join(self.folder, "both", "a.safetensors"), "wb") as file:
            file.write(b"weights")
        found.append(model_fingerprint(os.path.join(self.folder, "both")))
        os.remove(os.path.join(self.folder, "both", "model.bin"))
        self.assertEqual(model_fingerprint(os.path.join(self.folder, "both")), found[-1])

    def test_a_byte_between_the_samples_is_in_the_digest_of_all_weights(self):
        with mock.patch("cachegen.fingerprint.WHOLE_BYTES", 0):
            made = [self.write(name, 1 << 16, {"a": (0, 1 << 16)}, at) for name, at in (("a", None), ("b", 10000))]
        self.assertEqual(made[0], made[1], "the byte is in a sample: the case tests nothing")
        digests = [weights_digest(os.path.join(self.folder, name)) for name in "ab"]
        self.assertNotEqual(digests[0], digests[1])
        with open(os.path.join(self.folder, "a", "config.json"), "w") as file:
            json.dump({"hidden_size": 9}, file)
        self.assertEqual(weights_digest(os.path.join(self.folder, "a")), digests[0], "of the weights alone")

    def test_a_header_that_lies_ends_in_a_fingerprint_too(self):
        n_bytes = WHOLE_BYTES + 1
        for tensors in ({"a": (5, 1 << 62)}, {"a": (-5, 3)}, {"a": (9, 3)}, {"a": (0.5, 1.5)}):
            with self.subTest(tensors):
                self.assertEqual(len(self.write("lies", n_bytes, tensors)), 32)

    def run_command(self, *arguments):
        return subprocess.run(
            [sys.executable, "-m", "cachegen.fingerprint", *arguments],
            env={**os.environ, "PYTHONPATH": os.path.join(ROOT, "connector")}, capture_output=True, text=True,
        )  # fmt: skip

    def test_the_command_prints_one_and_says_in_a_line_what_it_cannot_read(self):
        made = self.write("model", 100)
        folder, missing = os.path.join(self.folder, "model"), os.path.join(self.folder, "missing")
        self.assertEqual(self.run_command(folder).stdout, made + "\n")
        self.assertEqual(self.run_command("--weights", folder).stdout, weights_digest(folder) + "\n")
        self.assertEqual(self.run_command("--help").returncode, 0)
        without = self.run_command()
        self.assertEqual((without.returncode, without.stderr.split()[0]), (2, "usage:"))
        failed = self.run_command("--weights", missing)
        self.assertEqual((failed.returncode, failed.stderr.count("\n")), (2, 1), failed.stderr)
        self.assertIn(missing, failed.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
