"""The library's counters as vLLM wants them: increments for its log lines, and Prometheus metrics."""

import os
import time

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from cachegen import abi
from cachegen.vllm.guard import Failures, guarded, nothing

OWN_COUNTERS = ("load_ns", "parts_dropped", "budget_met", "budget_missed", "loads_shared")  # beside the library's
THROUGHPUT = "throughput_bps"  # the newest counts; all others are sums
STATE = "state"  # side -> why it is down, or UP
UP, NO_STEP = "up", "no step yet"  # NO_STEP: the engine tells with its steps how things are, and has made none
# vLLM tells each step's statistics to one of its front ends, and all of them are asked for metrics: so some one is told
# now and then how things are.
REPEAT_SECONDS = 5
GAUGES = "gauges"  # side -> name -> how much of it there is now
GAUGE_TEXTS = {
    "lookups_running": "look-ups that the store has not answered yet",
    "loads_running": "loads under way",
    "saves_running": "saves that are encoded or written, or wait for that",
    "staging_bytes": "memory that saves hold now, of `staging_mib`",
}
REFUSED, DROPPED = "chunks that a load refused: ", "chunks that were taken to be saved and dropped: "
# What Prometheus shows of them. README.md begins with the same words ("What is counted"), and has more of some.
COUNTER_TEXTS = {
    "lookups": "look-ups that ended, misses counted",
    "lookup_hits": "look-ups that found something to load",
    "lookup_seconds": "time of look-ups from start to answer, the store's part and the library's",
    "lookup_errors": "questions to the store that failed",
    "lookups_skipped": "look-ups that were misses at once, while the store does not answer, and those that waited too "
    "long for others",
    "loads": "loads that have ended",
    "loads_failed": "loads of which a part must be recomputed",
    "loads_cancelled": "loads that were not wanted any more",
    "loads_shared": "requests that waited for another one's load of the same",
    "loads_shortened": "loads that were given up from some chunk on, since recomputing is faster",
    "load_seconds": "from a load's start to its end, on each rank",
    "read_seconds": "time of the link for loads",
    "decode_seconds": "time of threads that decode loaded chunks",
    "copy_seconds": "time of threads that write loaded chunks into blocks",
    "tokens_loaded": "tokens that came whole",
    "bytes_read": "bytes that were read for loads",
    "bytes_dropped": "bytes that were read and came too late to be used",
    "chunks_loaded": "chunks that were loaded, by the level that they came at",
    "predicted_kl_micronats": "KL divergence of the chunks that were loaded, as predicted",
    "budget_met": "requests that loaded and whose first token came within the budget",
    "budget_missed": "requests that loaded and whose first token came later than the budget",
    "throughput_bps": "bits a second of the link, as estimated now",
    "abandoned_reads": "reads that were given up",
    "chunks_missing": REFUSED + "gone since the look-up",
    "chunks_truncated": REFUSED + "shorter than they should be",
    "chunks_corrupt": REFUSED + "damaged",
    "chunks_foreign_model": REFUSED + "of another model",
    "chunks_foreign_profile": REFUSED + "of another profile",
    "chunks_foreign_tokens": REFUSED + "of other tokens than their name says",
    "chunks_lossy_prefix": REFUSED + "computed on a prefix that is worse than the request accepts",
    "chunks_timed_out": REFUSED + "late",
    "chunks_io_error": REFUSED + "the store's own error",
    "chunks_saved": "chunks that were stored, by level",
    "chunks_encoded": "chunks that were encoded",
    "encode_seconds": "time of threads that encode chunks to be saved",
    "chunks_existed": "chunks that were to be saved and that the store had",
    "bytes_written": "bytes that were written to the store",
    "save_errors": "saves that failed",
    "parts_dropped": "steps of prompts that were not taken to be saved",
    "saves_dropped": "all chunks that the library did not store, though they were taken",
    "saves_dropped_staging": DROPPED + "staging memory was full",
    "saves_dropped_lossy": DROPPED + "they were computed on a prefix that is too coarse for any of `store_levels`",
    "saves_dropped_unreachable": DROPPED + "what they follow is not stored, so no look-up could find them",
    "saves_dropped_timed_out": DROPPED + "the store hung",
    "saves_dropped_incomplete": DROPPED + "another rank's heads did not come",
    "saves_dropped_overwritten": DROPPED + "the engine needed the blocks first",
    "saves_dropped_failed": DROPPED + "other errors",
    "staging_peak_bytes": "the most memory that saves held",
    "symbols_saturated": "symbols of saved chunks that did not fit",
    "chunks_decoded_on_gpu": "chunks that were loaded and that a GPU decoded",
    "gpu_errors": "what a GPU failed at",
}
UP_TEXT = "1: KV is loaded and saved; 0: why not"
OBSERVED = "observed"  # name -> values for a histogram
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_RATIOS = (0.1, 0.2, 0.5, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10)
HISTOGRAMS = {
    "lookup_latency_seconds": ("from a look-up's start until the plugin sees the answer", _SECONDS),
    "load_wait_seconds": (
        "from the look-up's answer to the load's start: the engine's blocks are waited for",
        _SECONDS,
    ),
    "load_latency_seconds": ("from a load's start to its end, on each rank", _SECONDS),
    "load_time_ratio": ("a whole load's time, over what the look-up predicted", _RATIOS),
    "budget_ratio": ("of requests that loaded, time from arrival to the first token, over the budget", _RATIOS),
}


def all_counters(stats, **own):
    """A side's counters by name. stats: the library's (abi.Stats.as_dict()), of which some are gauges; own: those of
    OWN_COUNTERS that the side counts."""
    counters = {**stats, **dict.fromkeys(OWN_COUNTERS, 0), **own}
    for name in GAUGE_TEXTS:
        counters.pop(name, None)
    return counters


class Stats(KVConnectorStats):
    """Increments of the library's counters and of OWN_COUNTERS since the last report, the newest throughput_bps, STATE
    and GAUGES, and what was OBSERVED."""

    def reset(self):
        self.data = {}

    def aggregate(self, other):
        for name, value in other.data.items():
            if name == THROUGHPUT:
                self.data[name] = value or self.data.get(name, 0)
            elif name in (STATE, GAUGES):
                self.data[name] = {**self.data.get(name, {}), **value}
            elif name == OBSERVED:
                known = self.data.get(name, {})
                self.data[name] = {key: known.get(key, []) + value.get(key, []) for key in {**known, **value}}
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self):
        numbers = {name: value for name, value in self.data.items() if value and name not in (STATE, GAUGES, OBSERVED)}
        down = {f"{side}_down": why for side, why in self.data.get(STATE, {}).items() if why != UP}
        return {**numbers, **down}

    def is_empty(self):
        return not any(self.data.values())


class LoggedStats(Stats):
    """For vLLM's log, which prints a line unless they are empty: how things are is no event."""

    def is_empty(self):
        return not any(value for name, value in self.data.items() if name not in (STATE, GAUGES, OBSERVED))


class Increments:
    """Of counters, from report to report, and what has changed of a side's state and gauges."""

    def __init__(self):
        self._reported, self._state, self._gauges = {}, None, {}
        self._period = None

    def repeat(self):
        """Every REPEAT_SECONDS state and gauges count as changed: on all sides of a host with the same step, mostly, so
        that one front end is told of all."""
        period = time.monotonic() // REPEAT_SECONDS
        if period != self._period:
            self._period, self._state, self._gauges = period, None, {}

    def with_state(self, stats, side, state):
        """stats, which may be None, and the side's state where it is another than at the last call."""
        if state == self._state:
            return stats
        self._state = state
        stats = stats or Stats()
        stats.data[STATE] = {side: state}
        return stats

    def with_measures(self, stats, side, gauges, observed):
        """stats, which may be None, with the side's gauges where they have changed, and what it has observed."""
        if gauges == self._gauges and not observed:
            return stats
        stats = stats or Stats()
        if gauges != self._gauges:
            self._gauges = stats.data.setdefault(GAUGES, {})[side] = gauges
        if observed:
            stats.data[OBSERVED] = observed
        return stats

    def since_last(self, counters):
        """Stats of what was added to counters since the last call; None if nothing was."""
        if counters == self._reported:
            return None
        increments = {name: value - self._reported.get(name, 0) for name, value in counters.items()}
        increments[THROUGHPUT] = counters[THROUGHPUT]
        self._reported = counters
        return Stats(data=increments)


class Observed:
    """What a side observes for HISTOGRAMS, until it is taken."""

    def __init__(self):
        self._values = {}

    def note(self, name, value):
        self._values.setdefault(name, []).append(value)

    def take(self):
        values, self._values = self._values, {}
        return values


class PromMetrics(KVConnectorPromMetrics):
    """The counters as vllm:cachegen_<name>; nanoseconds as seconds, a number a level with the label level. And the
    gauge vllm:cachegen_up: 1 with the reason "up", or 0 with what is wrong. Lives in an API server's process. There
    may be several, which share their metrics by files: then a gauge is what the last one of them said, any of the
    reasons may be another one's, and none can be taken back: one that has passed is NaN."""

    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues, reasons=()):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        has_files = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        self._reasons = reasons if has_files else ()
        self.failures = Failures()
        self._metrics = {}  # counter -> (metric by engine, factor)
        made = {}
        for counter in all_counters(abi.Stats().as_dict()):
            name, level = (counter[:-3], counter[-1]) if counter[-3:-1] == "_l" else (counter, None)
            factor = 1
            if name.endswith("_ns"):
                name, factor = name[:-3] + "_seconds", 1e-9
            if name not in made:
                kind = self._make_gauge if counter == THROUGHPUT else self._counter_cls
                names = labelnames + ([] if level is None else ["level"])
                made[name] = kind(
                    name=f"vllm:cachegen_{name}", documentation=COUNTER_TEXTS[name], labelnames=names
                )
            by_engine = {
                engine: made[name].labels(*values, *([] if level is None else [f"L{level}"]))
                for engine, values in per_engine_labelvalues.items()
            }
            self._metrics[counter] = by_engine, factor

        def by_engine_of(metric):
            return {engine: metric.labels(*values) for engine, values in per_engine_labelvalues.items()}

        self._histograms = {
            name: by_engine_of(
                self._histogram_cls(
                    name=f"vllm:cachegen_{name}", documentation=what, labelnames=labelnames, buckets=buckets
                )
            )
            for name, (what, buckets) in HISTOGRAMS.items()
        }
        self._gauges = {
            name: by_engine_of(
                self._make_gauge(name=f"vllm:cachegen_{name}", documentation=what, labelnames=labelnames)
            )
            for name, what in GAUGE_TEXTS.items()
        }
        self._known_gauges = {}  # engine -> side -> name -> how much
        self._up = self._make_gauge(
            name="vllm:cachegen_up",
            documentation=UP_TEXT,
            labelnames=[*labelnames, "reason"],
        )
        self._can_take_back = not has_files and hasattr(self._up, "remove")  # Ray's cannot
        self._labels = per_engine_labelvalues
        self._states = {}  # engine -> side -> state
        self._shown = {}  # engine -> reasons so far
        for engine, values in per_engine_labelvalues.items():
            # So that an alert has something to look at also before the first request.
            self._up.labels(*values, NO_STEP).set(0)
            self._shown[engine] = {*self._reasons, NO_STEP}

    def _make_gauge(self, **description):
        return self._gauge_cls(multiprocess_mode="mostrecent", **description)

    def _show_state(self, states, engine_idx):
        known = self._states.setdefault(engine_idx, {})
        known.update(states)
        reason = next((state for _, state in sorted(known.items()) if state != UP), UP)
        shown = self._shown[engine_idx]
        self._up.labels(*self._labels[engine_idx], reason).set(reason == UP)
        for passed in shown - {reason}:
            if self._can_take_back:
                self._up.remove(*self._labels[engine_idx], passed)
                shown.remove(passed)
            else:
                self._up.labels(*self._labels[engine_idx], passed).set(float("nan"))
        shown.add(reason)

    def _show_gauges(self, gauges, engine_idx):
        """The sums over sides: each rank has its own."""
        known = self._known_gauges.setdefault(engine_idx, {})
        known.update(gauges)
        for name, by_engine in self._gauges.items():
            found = [side[name] for side in known.values() if name in side]
            if found:
                by_engine[engine_idx].set(sum(found))

    @guarded(nothing)  # vLLM calls it where it hands answers to clients
    def observe(self, transfer_stats_data, engine_idx=0):
        if states := transfer_stats_data.get(STATE):
            self._show_state(states, engine_idx)
        if gauges := transfer_stats_data.get(GAUGES):
            self._show_gauges(gauges, engine_idx)
        for name, values in transfer_stats_data.get(OBSERVED, {}).items():
            for value in values:
                self._histograms[name][engine_idx].observe(value)
        for counter, value in transfer_stats_data.items():
            if counter not in self._metrics:
                continue
            by_engine, factor = self._metrics[counter]
            if counter == THROUGHPUT:
                by_engine[engine_idx].set(value)
            elif value:
                by_engine[engine_idx].inc(value * factor)
