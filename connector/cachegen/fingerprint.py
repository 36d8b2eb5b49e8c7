"""The identity of a model's weights, as chunk keys, model.json and profiles carry it.

Two directories with the same fingerprint compute the same KV for the same tokens (up to rounding of the engine), so the
fingerprint covers the weights and what of config.json enters the computation. blake2b, because every Python has it:
all programs that make fingerprints must agree. A difference that would not matter (a field added by a newer
transformers, another sharding) gives another fingerprint: that costs a miss, the opposite would cost an answer.

Surprise: above WHOLE_BYTES only the header and the first and last MiB of every weights file are read, plus its size. An
edit in the middle of such a file that keeps both ends goes unseen: give a hand-edited large model a directory with a
touched config.json.
"""

import hashlib
import json
import os
import struct
import sys

WHOLE_BYTES = 4 << 30  # of all weights together
SAMPLE_BYTES = 1 << 20
_DIGEST_BYTES = 16
_READ_BYTES = 8 << 20

# What config.json says of the file, of generation or of training, but not of K and V. Everything else counts.
IRRELEVANT = {
    "_name_or_path", "_model_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
    "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "output_attentions", "output_hidden_states", "return_dict", "pretraining_tp", "task_specific_params", "id2label",
    "label2id", "finetuning_task", "chunk_size_feed_forward", "problem_type",
}  # fmt: skip


def _update(digest, tag, data):
    # Tag and length before the data: no two inputs run together to the same bytes.
    digest.update(struct.pack("<4sQ", tag, len(data)))
    digest.update(data)


def _weight_files(directory):
    names = sorted(os.listdir(directory))
    for suffix in (".safetensors", ".gguf", ".bin"):
        found = [os.path.join(directory, name) for name in names if name.endswith(suffix)]
        if found:
            return found
    raise FileNotFoundError(f"no *.safetensors, *.gguf or *.bin in {directory}")


def _hash_file(digest, path, whole):
    size_bytes = os.path.getsize(path)
    digest.update(struct.pack("<4sQ?", b"file", size_bytes, whole))
    with open(path, "rb") as file:
        if whole:
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
            return
        header_bytes = 0
        if path.endswith(".safetensors") and size_bytes >= 8:
            # The length is only the file's claim.
            header_bytes = min(8 + struct.unpack("<Q", file.read(8))[0], 256 << 20)
        file.seek(0)
        _update(digest, b"head", file.read(header_bytes + SAMPLE_BYTES))
        file.seek(max(0, size_bytes - SAMPLE_BYTES))
        _update(digest, b"tail", file.read(SAMPLE_BYTES))


def model_fingerprint(model_dir, variant=""):
    """The 32 hex digits that identify the model in model_dir.

    variant names what an engine changes on top of the directory (rope overrides, quantization on the fly); the empty
    one is the directory as it is. Reads all weights up to WHOLE_BYTES: about a second a GiB.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"cachegen-model-1")
    paths = _weight_files(model_dir)
    whole = sum(os.path.getsize(path) for path in paths) <= WHOLE_BYTES
    for path in paths:
        _hash_file(digest, path, whole)
    config = {}
    config_path = os.path.join(model_dir, "config.json")
    if os.path.exists(config_path):
        with open(config_path, encoding="utf-8") as file:
            config = json.load(file)
    relevant = {key: value for key, value in config.items() if key not in IRRELEVANT}
    _update(digest, b"conf", json.dumps(relevant, sort_keys=True, separators=(",", ":")).encode())
    _update(digest, b"vari", variant.encode())
    return digest.hexdigest()


def adapter_fingerprint(adapter_dir):
    """The 32 hex digits of a LoRA adapter's weights and configuration, whatever its size."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"cachegen-lora-1")
    names = sorted(n for n in os.listdir(adapter_dir) if n.endswith((".safetensors", ".bin", ".json", ".pt")))
    if not any(not name.endswith(".json") for name in names):
        raise FileNotFoundError(f"no adapter weights in {adapter_dir}")
    for name in names:
        _update(digest, b"name", name.encode())
        _hash_file(digest, os.path.join(adapter_dir, name), True)
    return digest.hexdigest()


if __name__ == "__main__":
    print(model_fingerprint(sys.argv[1]))
