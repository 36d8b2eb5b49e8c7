"""In which type this machine runs a model fast: its own, or f32.

A CPU without matrix instructions for bf16 (AVX-512 BF16, AMX; Arm BF16) multiplies bf16 several times slower than f32:
the framework then converts element by element. What a CPU has says little about which products its libraries are fast
at, so a product of the model's shapes is timed, for a fraction of a second.
"""

import argparse
import time

import torch

N_TOKENS = 256
MAX_DIM = 2048  # of the matrices: a large model's product would take seconds, and says the same
N_RUNS = 5  # the first one also makes kernels and touches memory
LEAST_GAIN = 1.3  # f32 takes twice the memory: it is to be this much faster
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def dtype_name(dtype):
    return next(name for name, known in DTYPES.items() if known == dtype)


def product_seconds(dtypes, hidden_size, intermediate_size):
    """{dtype: seconds of a product of N_TOKENS tokens with weights [intermediate_size][hidden_size]}: the shortest of
    N_RUNS. Of one thread, and of its own CPU time: other processes on the machine don't count."""
    rows, columns = min(intermediate_size, MAX_DIM), min(hidden_size, MAX_DIM)
    best, n_threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            for dtype in dtypes:
                x, weights = torch.ones(N_TOKENS, columns, dtype=dtype), torch.ones(rows, columns, dtype=dtype)
                best[dtype] = min(_product_seconds(x, weights) for _ in range(N_RUNS))
    finally:
        torch.set_num_threads(n_threads)
    return best


def _product_seconds(x, weights):
    began = time.thread_time()
    torch.nn.functional.linear(x, weights)
    return time.thread_time() - began


def faster_dtype(dtype, config, device="cpu", measure=product_seconds):
    """dtype, or torch.float32 where a model runs clearly faster in it. config: the model's transformers
    configuration."""
    if torch.device(device).type != "cpu" or dtype == torch.float32:
        return dtype
    intermediate_size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if isinstance(intermediate_size, (list, tuple)):  # by layer, as Gemma 3n has it
        intermediate_size = max(intermediate_size)
    seconds = measure((dtype, torch.float32), config.hidden_size, intermediate_size)
    return torch.float32 if seconds[dtype] > LEAST_GAIN * seconds[torch.float32] else dtype


def main():
    """Prints the type of the model in the directory that is given, as --dtype of cachegen.profile takes it."""
    from transformers import AutoConfig

    from cachegen.command import OF_MODELS, reading

    parser = argparse.ArgumentParser(prog="python -m cachegen.compute_type", description=main.__doc__)
    parser.add_argument("model_dir", metavar="MODEL_DIR")
    options = parser.parse_args()
    with reading("compute_type", options.model_dir, OF_MODELS):
        config = AutoConfig.from_pretrained(options.model_dir)
    dtype = faster_dtype(getattr(config, "dtype", None) or torch.bfloat16, config)
    print(dtype_name(dtype))


if __name__ == "__main__":
    main()
