"""The files that the profile tools write into a model's folder of a store: model.json, profiles/<fingerprint>.cgp and
profiles/default, the name of the one that is used. Each appears whole or not at all, readable by its owner only.
"""

import json
import os
import tempfile


def write_atomically(path, data):
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
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


def curves_of(folder):
    """What the folder's model.json says of the quality of its profiles, by fingerprint; empty where it says nothing."""
    try:
        with open(os.path.join(folder, "model.json"), encoding="utf-8") as file:
            curves = json.load(file)["quality"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return curves if isinstance(curves, dict) else {}


def write_store(out, model, fingerprint, profile, data, make_default=True, described=None, curve=None):
    """described: what model.json says already, which stays. curve: of the profile's quality, as kl_curve.fit() has it;
    those of the store's other profiles stay."""
    name = profile.fingerprint.hex()
    curves = {**curves_of(out), **({name: curve} if curve else {})}
    description = {
        "version": 1,
        "name": os.path.basename(os.path.abspath(out)),
        "n_layers": model.n_layers,
        "n_kv_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "dtype": model.dtype_name,
        "model_fingerprint": fingerprint,
        "rope": model.rope.as_json(),
        **({"quality": curves} if curves else {}),
        **(described or {}),
    }
    text = json.dumps(description, indent=1).encode() + b"\n"
    write_atomically(os.path.join(out, "model.json"), text)
    write_atomically(os.path.join(out, "profiles", name + ".cgp"), data)
    if make_default:
        write_atomically(os.path.join(out, "profiles", "default"), name.encode() + b"\n")
