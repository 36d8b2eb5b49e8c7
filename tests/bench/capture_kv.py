"""Writes a context for link_driver: the tokens of a text and the K and V that a model computes of them.

usage: PYTHONPATH=connector python capture_kv.py MODEL_DIR TEXT N_TOKENS OUT

OUT: n_tokens and the tokens as little-endian u32, then K and V as [n_layers][2][n_tokens][n_kv_heads][head_dim], in the
model's type. Needs torch and transformers.
"""

import struct
import sys

import torch
from cachegen.kv_model import Context, KvModel
from transformers import AutoTokenizer


def main(model_dir, text_path, n_tokens, out):
    with open(text_path, encoding="utf-8") as text:
        ids = AutoTokenizer.from_pretrained(model_dir)(text.read(), return_tensors="pt").input_ids[0, : int(n_tokens)]
    k, v = KvModel(model_dir).prefill(Context(text_path, ids, len(ids)))
    kv = torch.stack((k, v), dim=1).contiguous()
    with open(out, "wb") as file:
        file.write(struct.pack(f"<{len(ids) + 1}I", len(ids), *ids.tolist()))
        file.write(kv.view(torch.uint8).numpy().tobytes())


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
