"""Writes a GGUF model as bf16 safetensors with its tokenizer, as vLLM and transformers load it.

usage: convert_gguf.py MODEL.gguf OUTPUT_DIRECTORY

The weights are the dequantized ones: a Q4_1 file gives the quality of Q4_1, in bf16.
"""
import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, output = sys.argv[1:]
    where = {"pretrained_model_name_or_path": os.path.dirname(os.path.abspath(source)),
             "gguf_file": os.path.basename(source)}
    AutoTokenizer.from_pretrained(**where).save_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True))
    model.save_pretrained(output)


if __name__ == "__main__":
    main()
