"""What the demo measures: requests of one kind, repeated, and the row of the table that comes of them."""

import os
import statistics
import time

from demo_processes import say

REPEATS = 3
ENOUGH_S = 10  # of one kind: no further repeat after so long
STEPS = ("lookup", "load", "read", "decode", "copy")


def median_of(samples, name):
    return statistics.median(sample[name] for sample in samples)


class Measurement:
    """REPEATS requests of one kind, fewer where they take long: samples of ttft_s, text, cached_tokens, bytes and, with
    counters, the split."""

    def __init__(self, client, prompt, label, counters=False, link=None, **fields):
        self.samples, began = [], time.monotonic()
        for n in range(REPEATS):
            if n and time.monotonic() - began > ENOUGH_S:
                break
            before = client.counters() if counters else {}
            received = link.received_bytes() if link else 0
            sample = client.ask(
                prompt, **{key: value(n) if callable(value) else value for key, value in fields.items()}
            )
            if counters:
                loads = client.counters_since(before, lambda since: since.get("loads", 0) >= 1)
                sample["bytes"] = int(loads.get("bytes_read", 0))
                for step in STEPS:
                    sample[f"{step}_s"] = loads.get(f"{step}_seconds", 0)
            if link:
                sample["bytes"] = link.received_bytes() - received
            self.samples.append(sample)
            say(f"    {label}: first token after {sample['ttft_s']:.3f} s, {sample['cached_tokens']} tokens loaded")

    @property
    def ttft_s(self):
        return median_of(self.samples, "ttft_s")

    @property
    def hit_tokens(self):
        return min(sample["cached_tokens"] for sample in self.samples)

    def same_output(self, text):
        return all(sample["text"] == text for sample in self.samples)

    def bytes_moved(self):
        return int(median_of(self.samples, "bytes"))


def run_row(connector, level, link_mbps, measurement, bytes_moved, bits_per_element, cold_text):
    return {
        "connector": connector,
        "level": level,
        "link_mbps": link_mbps,
        "n_requests": len(measurement.samples),
        "ttft_s": round(measurement.ttft_s, 4),
        "hit_tokens": measurement.hit_tokens,
        "bytes_moved": bytes_moved,
        "bits_per_element": round(bits_per_element, 3),
        "same_output": measurement.same_output(cold_text),
    }


def tree_bytes(directory):
    return sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(directory) for name in names)


def print_table(heading, rows):
    widths = [max(len(row[column]) for row in (heading, *rows)) for column in range(len(heading))]
    for row in (heading, *rows):
        cells = (c.ljust(w) if n == 0 else c.rjust(w) for n, (c, w) in enumerate(zip(row, widths)))
        print("  ".join(cells), flush=True)
