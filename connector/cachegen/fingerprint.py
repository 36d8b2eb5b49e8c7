"""The identity of a model's weights, as chunk keys, model.json and profiles carry it.

Two directories with the same fingerprint compute the same KV for the same tokens (up to rounding of the engine), so the
fingerprint covers the weights, what of config.json enters the computation, and OTHER_CONFIGS. blake2b, because every
Python has it: all programs that make fingerprints must agree. A difference that would not matter (a field added by a
newer transformers, another sharding) gives another fingerprint: that costs a miss, the opposite would cost an answer.

Surprise: above WHOLE_BYTES only samples are read: headers and sizes, and of every tensor SAMPLE_BYTES at its start,
middle and end and once in SPACING_BYTES. A file that does not say where its tensors lie (a .bin of before PyTorch 1.6)
is sampled as if it was one. Other training changes all of a tensor and is seen; an edit of single bytes between samples
is not, except by weights_digest(): a store that wants to be certain has that in its model.json.
"""

import argparse
import hashlib
import json
import os
import struct
import zipfile

from .command import reading

WHOLE_BYTES = 4 << 30  # of all weights together
SAMPLE_BYTES = 4 << 10
SPACING_BYTES = 8 << 20
_MAX_HEADER_BYTES = 256 << 20  # a length in a file is only its claim
_DIGEST_BYTES = 16
_READ_BYTES = 8 << 20
# Bytes of a GGUF file's metadata value, by its type; and the two types that have a length.
_GGUF_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_GGUF_U32, _GGUF_STRING, _GGUF_ARRAY = 4, 8, 9
_LIES = (  # what reading a header ends with that is not what it claims to be
    ValueError, TypeError, KeyError, AttributeError, RecursionError, ArithmeticError, NotImplementedError, OSError,
    struct.error, zipfile.BadZipFile,
)  # fmt: skip

# What config.json says of the file, of generation or of training, but not of K and V. Everything else counts.
IRRELEVANT = {
    "_name_or_path", "_model_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
    "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "output_attentions", "output_hidden_states", "return_dict", "pretraining_tp", "task_specific_params", "id2label",
    "label2id", "finetuning_task", "chunk_size_feed_forward", "problem_type",
}  # fmt: skip


# How files are named that engines read beside config.json, or in its place: with anything before it. All of them count,
# also where an engine reads none.
OTHER_CONFIGS = (
    "params.json", "quant_config.json", "quantize_config.json", "quantization_config.json",
    "sparse_attention_config.json",
)  # fmt: skip


def as_text(value):
    """The same text for the same value in every process."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_name)


def _name(value):
    """What json cannot write, as what it can. Not repr(): it may hold an address."""
    if isinstance(value, (set, frozenset)):
        return sorted(as_text(item) for item in value)
    if isinstance(value, bytes):
        return value.hex()
    if hasattr(value, "__qualname__"):  # a class, a function: its name tells not everything, but is stable
        return f"{value.__module__}.{value.__qualname__}"
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if type(value).__module__.partition(".")[0] in ("torch", "pathlib"):
        return f"{kind} {value}"
    return [kind, vars(value)] if hasattr(value, "__dict__") else kind


def _update(digest, tag, data):
    # Tag and length before the data: no two inputs run together to the same bytes.
    digest.update(struct.pack("<4sQ", tag, len(data)))
    digest.update(data)


def _weight_files(directory):
    names = sorted(os.listdir(directory))
    for suffixes in (".safetensors", (".gguf", ".bin")):  # which of the last two an engine loads is its own affair
        found = [os.path.join(directory, name) for name in names if name.endswith(suffixes)]
        if found:
            return found
    raise FileNotFoundError(f"no *.safetensors, *.gguf or *.bin in {directory}")


def weights_are_sampled(model_dir):
    """Whether model_fingerprint() reads samples of the weights, and not all of them."""
    return sum(os.path.getsize(path) for path in _weight_files(model_dir)) > WHOLE_BYTES


def _hash_file(digest, path, whole):
    size_bytes = os.path.getsize(path)
    digest.update(struct.pack("<4sQ?", b"file", size_bytes, whole))
    with open(path, "rb") as file:
        if whole:
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
            return
        header, tensors = _layout(file, path, size_bytes)
        _update(digest, b"head", header)
        for begin, end in tensors:
            _sample(digest, file, begin, end)


def _layout(file, path, size_bytes):
    """What the file says of its tensors, and their byte ranges in their order in the file; b"" and all of it where that
    cannot be read."""
    read = {".safetensors": _safetensors, ".gguf": _gguf, ".bin": _zip}[os.path.splitext(path)[1]]
    header, data_at, found = b"", 0, []
    try:
        header, data_at, found = read(file, size_bytes)
    except _LIES:
        pass
    is_sound = all(type(begin) is type(end) is int and data_at <= begin <= end <= size_bytes for begin, end in found)
    return header, found if found and is_sound else [(0, size_bytes)]


def _safetensors(file, size_bytes):
    n_bytes = min(struct.unpack("<Q", file.read(8))[0], _MAX_HEADER_BYTES)
    header, data_at = file.read(n_bytes), 8 + n_bytes
    try:
        entries = json.loads(header)
        ranges = sorted(entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__")
        found = [(data_at + begin, data_at + end) for begin, end in ranges]
    except _LIES:
        found = []
    return header, data_at, found


def _between(starts, end):
    starts = sorted(set(starts))
    return list(zip(starts, [*starts[1:], end]))


def _zip(file, size_bytes):
    """Of what torch.save() writes: a member for each tensor, and a directory with their checksums."""
    with zipfile.ZipFile(file) as members:
        starts, end = [member.header_offset for member in members.infolist()], members.start_dir
    file.seek(end)
    return file.read(_MAX_HEADER_BYTES), 0, _between(starts, end)


def _gguf(file, size_bytes):
    """Versions 2 and 3 (ggml's docs/gguf.md)."""

    def number(code):
        return struct.unpack(code, file.read(struct.calcsize(code)))[0]

    def string():
        n_bytes = number("<Q")
        if file.tell() + n_bytes > _MAX_HEADER_BYTES:
            raise ValueError("a header that is longer than any")
        return file.read(n_bytes)

    def skip(kind, n):
        if kind == _GGUF_STRING:
            for _ in range(n):
                string()
        else:
            file.seek(n * _GGUF_BYTES[kind], os.SEEK_CUR)

    if file.read(4) != b"GGUF" or number("<I") not in (2, 3):
        raise ValueError("no GGUF file")
    n_tensors, n_values, alignment, offsets = number("<Q"), number("<Q"), 32, []
    for _ in range(n_values):
        name, kind = string(), number("<I")
        if name == b"general.alignment" and kind == _GGUF_U32:
            alignment = number("<I")
        elif kind == _GGUF_ARRAY:
            skip(number("<I"), number("<Q"))
        else:
            skip(kind, 1)
    for _ in range(n_tensors):
        string()
        file.seek(8 * number("<I") + 4, os.SEEK_CUR)  # its shape and type
        offsets.append(number("<Q"))
    data_at = -(-file.tell() // alignment) * alignment
    if data_at > _MAX_HEADER_BYTES:
        raise ValueError("a header that is longer than any")
    file.seek(0)
    return file.read(data_at), data_at, _between([data_at + offset for offset in offsets], size_bytes)


def _sample(digest, file, begin, end):
    last = max(begin, end - SAMPLE_BYTES)
    places = {*range(begin, last, SPACING_BYTES), (begin + last) // 2, last}
    for place in sorted(places):
        file.seek(place)
        _update(digest, b"part", file.read(min(SAMPLE_BYTES, end - place)))


def model_fingerprint(model_dir, deviations=None):
    """The 32 hex digits that identify the model in model_dir.

    deviations says what an engine changes on top of the directory (rope overrides, quantization on the fly), as data
    that as_text() can write; none is the directory as it is. Reads all weights up to WHOLE_BYTES: about a second a GiB.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"cachegen-model-1")
    whole = not weights_are_sampled(model_dir)
    for path in _weight_files(model_dir):
        _hash_file(digest, path, whole)
    config = {}
    config_path = os.path.join(model_dir, "config.json")
    if os.path.exists(config_path):
        with open(config_path, encoding="utf-8") as file:
            config = json.load(file)
    relevant = {key: value for key, value in config.items() if key not in IRRELEVANT}
    _update(digest, b"conf", json.dumps(relevant, sort_keys=True, separators=(",", ":")).encode())
    for name in sorted(name for name in os.listdir(model_dir) if name.endswith(OTHER_CONFIGS)):
        with open(os.path.join(model_dir, name), "rb") as file:
            _update(digest, b"also", os.fsencode(name) + b"\0" + file.read())
    _update(digest, b"vari", as_text(deviations).encode() if deviations else b"")
    return digest.hexdigest()


def weights_digest(model_dir):
    """32 hex digits of every byte of the weights, whatever their size; config.json is not in it. About a second a
    GiB."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"cachegen-whole-1")
    for path in _weight_files(model_dir):
        _hash_file(digest, path, True)
    return digest.hexdigest()


def main():
    parser = argparse.ArgumentParser(prog="python -m cachegen.fingerprint", description=__doc__.splitlines()[0])
    parser.add_argument("model_dir", metavar="MODEL_DIR")
    parser.add_argument("--weights", action="store_true", help="the digest of all bytes of the weights instead")
    options = parser.parse_args()
    with reading("fingerprint", options.model_dir):
        print((weights_digest if options.weights else model_fingerprint)(options.model_dir))


if __name__ == "__main__":
    main()
