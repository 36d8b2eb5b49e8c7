"""The files that the profile tools write into a model's folder of a store: model.json, profiles/<fingerprint>.cgp and
profiles/default, the name of the one that is used. Each appears whole or not at all, readable by its owner only.

A model's folder is never made to write into it. It is there when a tool begins to work, for minutes or hours. Where it
is missing then, the store's mount has ended meanwhile, and what is written in the bare mount point is in no store.
"""

import contextlib
import json
import os
import tempfile

from .profile_file import MAX_BYTES


def write_atomically(path, data):
    """In a folder that is there."""
    folder = os.path.dirname(path)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".tmp-")  # 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    folder = os.open(folder, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def read_description(folder):
    """model.json of a model's folder as a dict; empty without one. ValueError: it is no JSON object; OSError."""
    path = os.path.join(folder, "model.json")
    try:
        with open(path, encoding="utf-8") as file:
            described = json.load(file)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(described, dict):
        raise ValueError(f"{path} is no JSON object")
    return described


def _described(folder):
    """The same; empty where it cannot be read, since it is replaced anyway."""
    try:
        return read_description(folder)
    except (OSError, ValueError):
        return {}


def write_store(out, model, fingerprint, profile, data, make_default=True, described=None, curve=None, digest=None):
    """out: the model's folder, which is there. described: what model.json says already, which stays. curve: of the
    profile's quality, as kl_curve.fit() has it; those of the store's other profiles stay. digest: weights_digest() of
    the model, where engines are to compare all of their weights; one that is there for the same fingerprint stays.
    ValueError: data is more than engines open, and nothing is written."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"a profile of {len(data)} bytes is none that engines read: they read {MAX_BYTES} at most")
    name, there = profile.fingerprint.hex(), _described(out)
    curves = there.get("quality")
    curves = {**(curves if isinstance(curves, dict) else {}), **({name: curve} if curve else {})}
    if digest is None and there.get("model_fingerprint") == fingerprint:
        digest = there.get("weights_digest")
    description = {
        "version": 1,
        "name": os.path.basename(os.path.abspath(out)),
        "n_layers": model.n_layers,
        "n_kv_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "dtype": model.dtype_name,
        "model_fingerprint": fingerprint,
        **({"weights_digest": digest} if digest is not None else {}),
        "rope": model.rope.as_json(),
        **({"quality": curves} if curves else {}),
        **(described or {}),
    }
    text = json.dumps(description, indent=1).encode() + b"\n"
    write_atomically(os.path.join(out, "model.json"), text)
    with contextlib.suppress(FileExistsError):
        os.mkdir(os.path.join(out, "profiles"), mode=0o700)
    write_atomically(os.path.join(out, "profiles", name + ".cgp"), data)
    if make_default:
        write_atomically(os.path.join(out, "profiles", "default"), name.encode() + b"\n")
