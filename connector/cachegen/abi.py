"""ctypes binding of connector/cachegen.h. No logic: every function here is one of the header's, under its name without
the prefix, with buffers copied and a status turned into CachegenError. The header says what they do.

Structs carry their size and the ABI version by themselves. A handle is used by one thread at a time.
"""

import array
import ctypes
import json
import os
from math import ceil
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p, sizeof

ABI_VERSION = 1
OK = 0
NO_MEMORY, CANCELLED = 2, 5
AGAIN = 6
NOT_FOUND, IO, PERMISSION, TIMED_OUT, DEVICE = 40, 42, 44, 45, 47
LAYOUT_STRIDED = 0
LAYOUT_VLLM_CPU_AMX = 1
MEMORY_HOST = 0
MEMORY_CUDA = 1
AFTER_NONE = 0
AFTER_STREAM = 1
GPU_OFF = 2
DTYPES = {"bf16": 1, "fp16": 2, "fp32": 3, "fp8_e4m3": 4, "fp8_e5m2": 5}
N_LEVELS = 4


class CachegenError(Exception):
    """A status other than CACHEGEN_OK and CACHEGEN_AGAIN."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class LibraryError(OSError):
    """libcachegen.so cannot be opened, or is not of this package's ABI."""


class _Struct(ctypes.Structure):
    def __init__(self, **fields):
        super().__init__(struct_size=sizeof(type(self)), abi_version=ABI_VERSION, **fields)


_HEAD = [("struct_size", c_uint32), ("abi_version", c_uint32)]


def _u32(*names):
    return [(name, c_uint32) for name in names]


def _u64(*names):
    return [(name, c_uint64) for name in names]


_AFTER = [("after_kind", c_uint32), ("reserved", c_uint32), ("after", c_void_p)]


class Info(_Struct):
    _fields_ = (
        _HEAD
        + _u32(
            "n_layers", "n_kv_heads", "head_dim", "dtype", "chunk_tokens", "has_profile", "store_levels", "io_backend"
        )
        + [("model", c_char_p), ("model_fingerprint_hex", c_char_p), ("profile_fingerprint_hex", c_char_p)]
        + _u32("gpu", "reserved")
        + [("gpu_reason", c_char_p)]
    )


class KvLayout(_Struct):
    _fields_ = (
        _HEAD
        + _u32("layout", "memory", "n_layers", "n_kv_heads", "head_dim", "dtype", "block_tokens", "first_layer")
        + _u64("n_blocks")
        + [
            ("base", POINTER(c_void_p)),
            ("offset_bytes", c_int64 * 2),
            ("block_stride", c_int64),
            ("head_stride", c_int64 * 2),
            ("token_stride", c_int64 * 2),
            ("dim_stride", c_int64 * 2),
        ]
        + _u32("first_head", "device")
    )


class Request(_Struct):
    _fields_ = (
        _HEAD
        + [("tokens", c_void_p)]
        + _u32("n_tokens", "salt_bytes")
        + [("salt", c_char_p), ("extra", c_char_p)]
        + _u32("extra_bytes", "worst_level_plus_1", "level_plus_1")
        + _u64("ttft_budget_ns")
    )


class LookupOptions(_Struct):
    _fields_ = _HEAD + _u64("spent_ns", "max_kl_micronats") + _u32("no_tail_at_hole", "reserved")


class Hit(_Struct):
    _fields_ = _HEAD + _u32("hit_tokens", "stored_tokens", "n_chunks", "worst_level") + _u64("bytes", "predicted_ns")


class LoadRequest(_Struct):
    _fields_ = (
        _HEAD
        + _u32("kv_id", "from_token", "to_token", "n_blocks")
        + [("block_table", c_void_p), ("plan", c_char_p), ("plan_bytes", c_size_t)]
        + _AFTER
        + [("request_id", c_char_p)]
    )


class Progress(_Struct):
    _fields_ = (
        _HEAD
        + [("done", c_uint32), ("status", c_int32)]
        + _u32("loaded_tokens", "worst_level")
        + _u64("bytes_read", "read_ns", "decode_ns", "copy_ns", "total_ns")
        + _u32("failed_token", "failed_levels", "failed_worst_level", "copied")
        + [("chunks_at", c_uint32 * N_LEVELS)]
        + _u64("bytes_dropped", "predicted_kl_micronats", "bytes_from_memory", "memory_ns")
    )


class SaveRequest(_Struct):
    _fields_ = (
        _HEAD
        + [("request", Request)]
        + _u32("kv_id", "from_token", "to_token", "prefix_level", "is_last", "n_blocks")
        + [("block_table", c_void_p), ("context", c_char_p)]
        + _u32("copy_later", "after_kind")
        + [("after", c_void_p)]
        + _u64("number")
        + _u32("hold_later", "reserved")
    )


class Stats(_Struct):
    _fields_ = (
        _HEAD
        + _u64("lookups", "lookup_hits", "lookup_errors", "lookup_ns", "loads", "loads_failed", "loads_cancelled")
        + [("chunks_loaded", c_uint64 * N_LEVELS)]
        + _u64("tokens_loaded", "bytes_read", "read_ns", "decode_ns", "copy_ns")
        + _u64("chunks_missing", "chunks_truncated", "chunks_corrupt", "chunks_foreign_model", "chunks_foreign_profile")
        + _u64("chunks_foreign_tokens", "chunks_lossy_prefix", "chunks_timed_out", "chunks_io_error")
        + [("chunks_saved", c_uint64 * N_LEVELS)]
        + _u64("chunks_existed", "save_errors", "saves_dropped", "bytes_written", "encode_ns")
        + _u64("abandoned_reads", "throughput_bps")
        + _u64("saves_dropped_staging", "saves_dropped_lossy", "saves_dropped_unreachable", "saves_dropped_timed_out")
        + _u64("saves_dropped_failed", "staging_peak_bytes", "loads_shortened", "bytes_dropped")
        + _u64("predicted_kl_micronats", "lookups_skipped", "staging_bytes", "saves_dropped_incomplete")
        + _u64(
            "symbols_saturated", "chunks_decoded_on_gpu", "gpu_errors", "chunks_encoded", "saves_dropped_overwritten"
        )
    )

    def as_dict(self):
        """The counters under the header's names; those with a number a level as name_l0 ... name_l3."""
        counters = {}
        for name, kind in self._fields_[2:]:
            value = getattr(self, name)
            if kind is c_uint64:
                counters[name] = value
            else:
                counters.update({f"{name}_l{level}": count for level, count in enumerate(value)})
        return counters


_FUNCTIONS = {  # result type, argument types
    "open": (c_int32, [c_char_p, c_size_t, POINTER(c_void_p), c_char_p, c_size_t]),
    "close": (None, [c_void_p]),
    "strerror": (c_char_p, [c_int32]),
    "abi_version": (c_uint32, []),
    "get_info": (c_int32, [c_void_p, POINTER(Info)]),
    "register_kv": (c_int32, [c_void_p, POINTER(KvLayout), POINTER(c_uint32)]),
    "lookup_start_with": (
        c_int32,
        [c_void_p, POINTER(Request), c_uint32, POINTER(LookupOptions), POINTER(c_void_p)],
    ),
    "lookup_poll": (c_int32, [c_void_p, POINTER(Hit)]),
    "lookup_plan": (c_int32, [c_void_p, c_void_p, POINTER(c_size_t)]),
    "lookup_free": (None, [c_void_p]),
    "forget_failed": (c_int32, [c_void_p, c_char_p, c_size_t, POINTER(Progress)]),
    "load_start": (c_int32, [c_void_p, POINTER(LoadRequest), POINTER(c_void_p)]),
    "load_poll": (c_int32, [c_void_p, POINTER(Progress)]),
    "load_cancel": (None, [c_void_p]),
    "load_free": (None, [c_void_p]),
    "eventfd": (ctypes.c_int, [c_void_p]),
    "save_start": (c_int32, [c_void_p, POINTER(SaveRequest), POINTER(c_void_p)]),
    "save_poll": (c_int32, [c_void_p, POINTER(Progress)]),
    "save_hold": (c_int32, [c_void_p, c_void_p]),
    "save_cut_from": (None, [c_void_p, c_uint32]),
    "save_refuse": (None, [c_void_p, c_uint64]),
    "load_levels": (c_uint32, [c_void_p, c_void_p, c_uint32]),
    "save_free": (None, [c_void_p]),
    "report_load": (None, [c_void_p, c_uint32, c_void_p]),
    "expect": (None, [c_void_p, c_uint64]),
    "report_prefill_at": (None, [c_void_p, c_uint32, c_uint64, c_uint64]),
    "report_queue": (None, [c_void_p, c_uint64, c_uint64]),
    "get_stats": (c_int32, [c_void_p, POINTER(Stats)]),
}


def find_library():
    """The path of libcachegen.so: $CACHEGEN_LIBRARY, beside this package, or in the checkout's build directory."""
    package = os.path.dirname(os.path.abspath(__file__))
    checkout = os.path.dirname(os.path.dirname(package))
    candidates = [
        os.environ.get("CACHEGEN_LIBRARY"),
        os.path.join(package, "libcachegen.so"),
        os.path.join(checkout, "build", "connector", "libcachegen.so"),
        os.path.join(checkout, "build", "libcachegen.so"),
    ]
    for path in candidates:
        if path and os.path.exists(path):
            return path
    return "libcachegen.so"  # the dynamic linker's search path


def _address(numbers):
    return numbers.buffer_info()[0] if len(numbers) else None


def make_request(tokens, salt=b"", extra=b"", worst_level=None, level=None, ttft_budget_ns=0):
    """A Request over tokens, an array.array('I') that must stay alive as long as the result is used."""
    return Request(
        tokens=_address(tokens),
        n_tokens=len(tokens),
        salt=salt,
        salt_bytes=len(salt),
        extra=extra,
        extra_bytes=len(extra),
        worst_level_plus_1=0 if worst_level is None else worst_level + 1,
        level_plus_1=0 if level is None else level + 1,
        ttft_budget_ns=ttft_budget_ns,
    )


class Connector:
    """A cachegen handle."""

    def __init__(self, config, library=None):
        self._handle = c_void_p()
        try:
            self._c = ctypes.CDLL(library or find_library())
        except OSError as e:
            raise LibraryError(str(e)) from e
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self._c, f"cachegen_{name}", None)
            if function is None:
                raise LibraryError(f"{self._c._name} is older than this package: it has no cachegen_{name}")
            function.restype, function.argtypes = result, arguments
        if (version := self._c.cachegen_abi_version()) != ABI_VERSION:
            raise LibraryError(f"{self._c._name} has version {version} of the ABI, this package version {ABI_VERSION}")
        text = json.dumps(config).encode()
        error = ctypes.create_string_buffer(512)
        status = self._c.cachegen_open(text, len(text), byref(self._handle), error, len(error))
        if status != OK:
            self._handle = c_void_p()
            raise CachegenError(status, f"{self.strerror(status)}: {error.value.decode(errors='replace')}")
        self.warning = error.value.decode(errors="replace")  # "" almost always

    def close(self):
        handle, self._handle = self._handle, c_void_p()
        self._c.cachegen_close(handle)

    def strerror(self, status):
        return self._c.cachegen_strerror(status).decode()

    def _check(self, status):
        if status not in (OK, AGAIN):
            raise CachegenError(status, self.strerror(status))
        return status

    def get_info(self):
        info = Info()
        self._check(self._c.cachegen_get_info(self._handle, byref(info)))
        return info

    def register_kv(self, bases, **fields):
        layout = KvLayout(base=(c_void_p * len(bases))(*bases), n_layers=len(bases), **fields)
        kv_id = c_uint32()
        self._check(self._c.cachegen_register_kv(self._handle, byref(layout), byref(kv_id)))
        return kv_id.value

    def lookup_start(self, request, from_token, spent_ns=0, max_kl=0, no_tail_at_hole=False):
        """spent_ns: how long ago the request arrived. max_kl: the largest predicted KL of what is loaded, in nats."""
        lookup = c_void_p()
        options = LookupOptions(
            spent_ns=spent_ns, max_kl_micronats=ceil(max_kl * 1e6), no_tail_at_hole=no_tail_at_hole
        )
        self._check(
            self._c.cachegen_lookup_start_with(self._handle, byref(request), from_token, byref(options), byref(lookup))
        )
        return lookup

    def lookup_poll(self, lookup):
        """A Hit, or None: not yet."""
        hit = Hit()
        return hit if self._check(self._c.cachegen_lookup_poll(lookup, byref(hit))) == OK else None

    def lookup_plan(self, lookup):
        n_bytes = c_size_t()
        self._check(self._c.cachegen_lookup_plan(lookup, None, byref(n_bytes)))
        plan = ctypes.create_string_buffer(n_bytes.value)
        self._check(self._c.cachegen_lookup_plan(lookup, plan, byref(n_bytes)))
        return plan.raw[: n_bytes.value]

    def lookup_free(self, lookup):
        self._c.cachegen_lookup_free(lookup)

    def forget_failed(self, plan, load):
        """load: as report_load() has it."""
        progress = Progress(
            status=load.status,
            bytes_read=load.bytes_read,
            total_ns=load.total_ns,
            failed_token=load.failed_token,
            failed_levels=load.failed_levels,
            failed_worst_level=load.failed_worst_level,
        )
        self._check(self._c.cachegen_forget_failed(self._handle, plan, len(plan), byref(progress)))

    def load_start(self, kv_id, from_token, to_token, block_ids, plan, after=None, request_id=None):
        """after: what of a GPU's engine comes first, as (AFTER_..., cudaStream_t). request_id: for the load's trace."""
        after_kind, handle = after or (AFTER_NONE, None)
        table = array.array("q", block_ids)
        request = LoadRequest(
            kv_id=kv_id,
            from_token=from_token,
            to_token=to_token,
            n_blocks=len(table),
            block_table=_address(table),
            plan=plan,
            plan_bytes=len(plan),
            after_kind=after_kind,
            after=handle,
            request_id=None if request_id is None else request_id.encode(errors="replace"),
        )
        load = c_void_p()
        self._check(self._c.cachegen_load_start(self._handle, byref(request), byref(load)))
        return load

    def load_poll(self, load):
        """A Progress; its done says whether it is the last one."""
        progress = Progress()
        self._c.cachegen_load_poll(load, byref(progress))
        return progress

    def load_levels(self, load, n_levels):
        """Of the chunks that a load has delivered, as bytes, n_levels at most."""
        levels = (c_uint8 * n_levels)()
        n = self._c.cachegen_load_levels(load, levels, n_levels)
        return bytes(levels[: min(n, n_levels)])

    def load_cancel(self, load):
        self._c.cachegen_load_cancel(load)

    def load_free(self, load):
        self._c.cachegen_load_free(load)

    def eventfd(self):
        return self._c.cachegen_eventfd(self._handle)

    def save_start(
        self,
        request,
        kv_id,
        from_token,
        to_token,
        prefix_level,
        is_last,
        block_ids,
        context=None,
        copy_later=False,
        after=None,
        number=0,
        hold_later=False,
    ):
        """A save, or None: the staging memory is full and nothing was taken. after: as load_start() has it. number: the
        same on all ranks, and larger than those before; 0: counted, and all ranks make the same calls."""
        after_kind, handle = after or (AFTER_NONE, None)
        table = array.array("q", block_ids)
        save_request = SaveRequest(
            request=request,
            kv_id=kv_id,
            from_token=from_token,
            to_token=to_token,
            prefix_level=prefix_level,
            is_last=is_last,
            n_blocks=len(table),
            block_table=_address(table),
            context=None if context is None else context.encode(),
            copy_later=copy_later,
            after_kind=after_kind,
            after=handle,
            number=number,
            hold_later=hold_later,
        )
        save = c_void_p()
        status = self._check(self._c.cachegen_save_start(self._handle, byref(save_request), byref(save)))
        return save if status == OK else None

    def save_refuse(self, number):
        """Of a rank: the save of this number is not started here, and the rank that stores need not wait for it."""
        self._c.cachegen_save_refuse(self._handle, number)

    def save_poll(self, save):
        progress = Progress()
        self._c.cachegen_save_poll(save, byref(progress))
        return progress

    def save_hold(self, save, after):
        """after: as load_start() has it, of a stream. Where the GPU fails the blocks may be overwritten, too."""
        _, stream = after
        self._c.cachegen_save_hold(save, stream)

    def save_cut_from(self, save, token):
        self._c.cachegen_save_cut_from(save, token)

    def save_free(self, save):
        self._c.cachegen_save_free(save)

    def report_load(self, from_token, load):
        """load: what a worker reported of it (cachegen.vllm.messages.LoadReport)."""
        progress = Progress(
            loaded_tokens=load.loaded_tokens,
            worst_level=load.worst_level,
            bytes_read=load.bytes_read,
            read_ns=load.read_ns,
            decode_ns=load.decode_ns,
            copy_ns=load.copy_ns,
            chunks_at=tuple(load.levels.count(level) for level in range(N_LEVELS)),
            bytes_from_memory=load.bytes_from_memory,
            memory_ns=load.memory_ns,
        )
        self._c.cachegen_report_load(self._handle, from_token, byref(progress))

    def expect(self, n_tokens):
        """Prompts of so many tokens are being looked up elsewhere."""
        self._c.cachegen_expect(self._handle, n_tokens)

    def report_prefill(self, n_tokens, n_pairs, duration_ns):
        """n_pairs: the sum of the tokens' positions."""
        self._c.cachegen_report_prefill_at(self._handle, n_tokens, n_pairs, duration_ns)

    def report_queue(self, n_tokens, n_pairs):
        """What the engine is to compute before anything that comes now; n_pairs: the sum of the tokens' positions."""
        self._c.cachegen_report_queue(self._handle, n_tokens, n_pairs)

    def get_stats(self):
        stats = Stats()
        self._check(self._c.cachegen_get_stats(self._handle, byref(stats)))
        return stats
