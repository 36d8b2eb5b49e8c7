"""Layouts of vLLM's KV caches: the library's strides lead to the elements that the engine's attention reads.

usage: kv_layout_test.py

The tensors are made by vLLM itself, on the CPU, for every order that it has; what stands for a GPU is only the name of
the device.
"""

import collections
import itertools
import os
import sys
import types
import unittest
import unittest.mock

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "connector"))
try:
    import torch
    import vllm  # noqa: F401
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheGroupSpec,
        KVCacheTensor,
        KVQuantMode,
        compute_layout_strides,
        create_kv_cache_views,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout
except ImportError as error:
    print(f"skipped: {error}: no layout was compared")
    sys.exit(1 if "engine" in os.environ.get("CG_TEST_REQUIRE", "").split(",") else 77)
from cachegen import abi  # noqa: E402
from cachegen.vllm.connector import CachegenConnector  # noqa: E402
from cachegen.vllm.gpu import GpuSteps, HostSteps  # noqa: E402
from cachegen.vllm.guard import Failures  # noqa: E402
from cachegen.vllm.kv_layout import GPU_BACKENDS, kernel_blocks, kv_layout  # noqa: E402
from cachegen.vllm.library import Unsupported, check_attention, kv_scales  # noqa: E402
from cachegen.vllm.messages import LoadPlan, Metadata, WorkerReport  # noqa: E402
from cachegen.vllm.worker import GPU, Worker  # noqa: E402

N_LAYERS, N_BLOCKS = 2, 3
RANK = types.SimpleNamespace(index=0, first_head=0, stores=True)


class OnGpu:
    """A tensor in all but where it lies."""

    def __init__(self, tensor, device="cuda:0"):
        self.tensor, self.device = tensor, torch.device(device)

    def __getattr__(self, name):
        return getattr(self.tensor, name)


def make_cache(order, block_tokens, kernel_tokens, dtype, n_kv_heads=2, head_dim=64):
    """(the whole memory, what vLLM gives a connector): every element is another number, as far as dtype has so many."""
    spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=n_kv_heads, head_size=head_dim, dtype=dtype)
    strides = compute_layout_strides(spec, N_BLOCKS, N_LAYERS, order)
    memory = torch.empty(N_LAYERS * N_BLOCKS * spec.page_size_bytes, dtype=torch.int8)
    memory.random_(generator=torch.Generator().manual_seed(7))
    names = [f"model.layers.{i}.self_attn.attn" for i in range(N_LAYERS)]
    tensor = KVCacheTensor(memory.numel(), names, layer_stride=strides[0], block_stride=strides[1])
    kernel_tokens = None if kernel_tokens == block_tokens else kernel_tokens
    views = create_kv_cache_views(memory, spec, N_BLOCKS, order, tensor, kernel_tokens)
    return memory, dict(zip(names, views, strict=True))


def engine(names, backend="FLASH_ATTN", cache_dtype="auto", **scales):
    layer = types.SimpleNamespace(get_attn_backend=lambda: types.SimpleNamespace(get_name=lambda: backend), **scales)
    return types.SimpleNamespace(
        compilation_config=types.SimpleNamespace(static_forward_context=dict.fromkeys(names, layer)),
        cache_config=types.SimpleNamespace(cache_dtype=cache_dtype),
    )


def on_gpu(caches):
    return {name: OnGpu(cache) for name, cache in caches.items()}


def k_and_v(backend, cache, order):
    """[n_blocks][block_tokens][n_kv_heads][head_dim] of each, in the words of the backend's forward()."""
    head_dim = cache.shape[3] // 2
    if backend == "FLASHINFER":
        kernels = cache.permute(*order.layer_view_order)
        back = [order.layer_view_order.index(i) for i in range(4)]
        return [plane.permute(*back).transpose(1, 2) for plane in kernels.split(head_dim, dim=-1)]
    return cache.transpose(1, 2).split(head_dim, dim=-1)


def by_strides(memory, cache, layout, layer, plane):
    """The same by cachegen.h's formula."""
    size = cache.element_size()
    at = layout["bases"][layer] + layout["offset_bytes"][plane] - memory.data_ptr()
    strides = (
        layout["block_stride"],
        layout["token_stride"][plane],
        layout["head_stride"][plane],
        layout["dim_stride"][plane],
    )
    shape = (layout["n_blocks"], layout["block_tokens"], layout["n_kv_heads"], layout["head_dim"])
    return torch.as_strided(memory.view(cache.dtype), shape, [s // size for s in strides], at // size)


def amx_packing(plane, n, d):
    """[block_tokens n][head_dim d]: an element's place in its (block, head), as connector/blocks.c has it."""
    token, dim = torch.arange(n)[:, None], torch.arange(d)[None]
    if plane == 0:
        return token // 16 * 16 * d + dim // 2 * 32 + token % 16 * 2 + dim % 2
    return n * d + dim // 16 * 16 * n + token // 2 * 32 + dim % 16 * 2 + token % 2


class Recorder:
    """What stands for the library: keeps what it was given."""

    def __init__(self):
        self.layouts, self.tables, self.gpu_reason = [], [], None

    def register_kv(self, **layout):
        if self.gpu_reason is not None:
            raise abi.CachegenError(4, "not supported")
        self.layouts.append(layout)
        return 5

    def load_start(self, _kv_id, _from, _to, block_ids, _plan, _after, _request_id):
        self.tables.append(block_ids)
        return 1

    def get_info(self):
        Info = collections.namedtuple("Info", "gpu gpu_reason")
        return Info(abi.GPU_OFF, self.gpu_reason) if self.gpu_reason is not None else Info(1, b"")


def library_of(cg):
    """What stands for a Library. cg: for the library."""
    return types.SimpleNamespace(cg=cg, rank=RANK, fingerprint="f", profile="", root="/store")


class FakeCuda:
    """torch.cuda with one stream. Its n-th event is recorded at n ms, and the first `reached` are over."""

    def __init__(self):
        self.made = self.reached = 0

    def current_stream(self, _device):
        return types.SimpleNamespace(cuda_stream=77)

    def Event(self, enable_timing):  # noqa: N802
        self.made += 1
        at_ms = self.made
        return types.SimpleNamespace(
            at_ms=at_ms,
            record=lambda _stream: None,
            query=lambda: at_ms <= self.reached,
            elapsed_time=lambda last: last.at_ms - at_ms,
        )


def bits(tensor):
    return tensor.contiguous().view(torch.int8)


class KvLayoutTest(unittest.TestCase):
    def check(self, backend, order, block_tokens, kernel_tokens, dtype, cache_dtype="auto", **geometry):
        memory, caches = make_cache(order, block_tokens, kernel_tokens, dtype, **geometry)
        layout = kv_layout(on_gpu(caches), engine(caches, backend, cache_dtype))
        self.assertEqual((layout["memory"], layout["device"]), (abi.MEMORY_CUDA, 0))
        self.assertEqual(layout["block_tokens"], kernel_tokens)
        self.assertEqual(layout["n_blocks"], N_BLOCKS * block_tokens // kernel_tokens)
        for layer, cache in enumerate(caches.values()):
            for plane, wanted in enumerate(k_and_v(backend, cache, order)):
                found = by_strides(memory, cache, layout, layer, plane)
                self.assertTrue(torch.equal(bits(found), bits(wanted)))
        return layout

    def test_strides_lead_to_what_each_backend_reads(self):
        dtypes = (torch.bfloat16, torch.float16, torch.float32)
        for case in itertools.product(GPU_BACKENDS, KVCacheLayout, (16, 32, 64, 128), dtypes):
            backend, order, block_tokens, dtype = case
            with self.subTest(backend=backend, order=order.name, block_tokens=block_tokens, dtype=dtype):
                self.check(backend, order, block_tokens, block_tokens, dtype)

    def test_fp8_is_kept_in_bytes_and_named_by_the_engine(self):
        for case in itertools.product(GPU_BACKENDS, KVCacheLayout, (16, 64), ("fp8", "fp8_e4m3", "fp8_e5m2")):
            backend, order, block_tokens, cache_dtype = case
            if (backend, cache_dtype) == ("TRITON_ATTN", "fp8_e5m2"):
                continue
            with self.subTest(backend=backend, order=order.name, block_tokens=block_tokens, cache_dtype=cache_dtype):
                layout = self.check(backend, order, block_tokens, block_tokens, torch.uint8, cache_dtype)
                self.assertEqual(layout["dtype"], 5 if "e5m2" in cache_dtype else 4)

    def test_on_cpus_amx_packs_fp8_as_the_library_takes_it_to(self):
        """Packing runs without AMX. What it makes of the same K and V as the isa vec must be the same numbers."""
        if not torch.cpu._is_avx512_bf16_supported():
            self.skipTest("no AVX-512 with bf16, so the kernels that vLLM has for this CPU don't pack for AMX")
        from vllm import _custom_ops as ops
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        isa_of = "vllm.v1.attention.backends.cpu_attn._get_attn_isa"
        for cache_dtype, n, d in itertools.product(("fp8_e4m3", "fp8_e5m2"), (32, 128), (32, 64, 128)):
            with self.subTest(cache_dtype=cache_dtype, block_tokens=n, head_dim=d):
                k, v = torch.randn(2, N_BLOCKS * n, 2, d, generator=torch.Generator().manual_seed(7)).bfloat16()
                made = {}
                for isa in ("vec", "amx"):
                    memory, caches = make_cache(KVCacheLayout.LBHNC, n, n, torch.uint8, head_dim=d)
                    cache = next(iter(caches.values()))
                    areas = cache.view(N_BLOCKS, 2, 2 * n, d).chunk(2, dim=2)
                    slots = torch.arange(N_BLOCKS * n)
                    ops.cpu_attn_reshape_and_cache(k, v, *areas, slots, isa, 1.0, 1.0, cache_dtype)
                    config = engine(caches, cache_dtype=cache_dtype)
                    config.model_config = types.SimpleNamespace(dtype=torch.bfloat16)
                    with unittest.mock.patch(isa_of, return_value=isa):
                        made[isa] = (memory, cache, kv_layout(caches, config))
                self.assertEqual(made["amx"][2]["layout"], abi.LAYOUT_VLLM_CPU_AMX)
                regions = made["amx"][1].reshape(N_BLOCKS, 2, 2 * n * d)
                for plane in (0, 1):
                    wanted = by_strides(*made["vec"], 0, plane)
                    self.assertGreater(len(wanted.unique()), 64)  # many numbers: none is taken for another
                    found = regions[:, :, amx_packing(plane, n, d)].transpose(1, 2)
                    self.assertTrue(torch.equal(found, wanted))

    def test_scales_of_fp8_are_those_of_the_layers_in_their_order(self):
        names = [f"model.layers.{i}.self_attn.attn" for i in range(11)]
        layers = {
            name: types.SimpleNamespace(_k_scale=torch.tensor(0.1 * (i + 1)), _v_scale=torch.tensor([2.0**-i]))
            for i, name in enumerate(names)
        }
        config = types.SimpleNamespace(compilation_config=types.SimpleNamespace(static_forward_context=layers))
        scales = kv_scales(sorted(names), config)
        k_scales = torch.tensor([0.1 * (i + 1) for i in range(11)])
        self.assertEqual(scales, {"k_scales": k_scales.tolist(), "v_scales": [2.0**-i for i in range(11)]})
        layers[names[3]]._v_scale = torch.ones(2)  # one a head
        with self.assertRaisesRegex(Unsupported, f"v_scale of layer {names[3]}"):
            kv_scales(names, config)
        del layers[names[2]]
        with self.assertRaisesRegex(Unsupported, f"k_scale of layer {names[2]}"):
            kv_scales(names, config)

    def test_one_head_of_any_size_has_strides_too(self):
        for order, head_dim in itertools.product(KVCacheLayout, (64, 128, 256)):
            with self.subTest(order=order.name, head_dim=head_dim):
                self.check("FLASH_ATTN", order, 16, 16, torch.bfloat16, n_kv_heads=1, head_dim=head_dim)

    def test_blocks_that_kernels_split_are_consecutive_ones(self):
        for order in (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC):
            with self.subTest(order=order.name):
                self.check("FLASHINFER", order, 128, 64, torch.bfloat16)
        self.assertEqual(kernel_blocks([3, 0], 1), [3, 0])
        self.assertEqual(kernel_blocks([3, 0], 2), [6, 7, 0, 1])

    def test_the_worker_names_the_blocks_of_kernels_to_the_library_and_the_scheduler_s_to_the_engine(self):
        library = Recorder()
        worker = Worker(library_of(library), Failures(), block_tokens=128)
        _, caches = make_cache(KVCacheLayout.LBNHC, 128, 64, torch.bfloat16)
        worker.register(on_gpu(caches), engine(caches))
        worker._steps = HostSteps()
        worker._start_load(LoadPlan("r", 0, 256, [4, 1], b""))
        self.assertEqual((library.layouts[0]["block_tokens"], library.tables), (64, [[8, 9, 2, 3]]))
        worker = Worker(library_of(library), Failures(), block_tokens=96)
        self.assertRaisesRegex(Unsupported, "blocks of 96", worker.register, on_gpu(caches), engine(caches))

    def test_a_worker_counts_in_the_blocks_that_its_layers_have(self):
        """Its cache_config says what was asked for, where a layer with a window has chosen smaller blocks."""
        library = Recorder()
        _, caches = make_cache(KVCacheLayout.LBNHC, 64, 64, torch.bfloat16)
        config = engine(caches)
        config.cache_config.block_size = 128
        config.kv_transfer_config = types.SimpleNamespace(
            kv_load_failure_policy="recompute", kv_connector_extra_config={}
        )
        spec = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
        groups = types.SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(list(caches), spec)])
        with unittest.mock.patch("cachegen.vllm.connector.Library", return_value=library_of(library)):
            made = CachegenConnector(config, KVConnectorRole.WORKER, groups)
        made.register_kv_caches(on_gpu(caches))
        made.worker._steps = HostSteps()
        made.bind_connector_metadata(Metadata(loads=[LoadPlan("r", 0, 128, [4, 1], b"")]))
        self.assertEqual(library.tables, [[4, 1]])

    def test_layers_that_read_another_one_s_k_and_v_are_left_out(self):
        _, caches = make_cache(KVCacheLayout.LBNHC, 16, 16, torch.bfloat16)
        own, last = list(caches), list(caches)[-1]
        shared = {f"model.layers.{N_LAYERS + i}.self_attn.attn": caches[last] for i in range(2)}
        config = engine(caches)
        alias = types.SimpleNamespace(kv_sharing_target_layer_name=last)
        config.compilation_config.static_forward_context |= dict.fromkeys(shared, alias)
        layout = kv_layout(on_gpu(caches | shared), config)
        self.assertEqual(layout["bases"], [caches[name].data_ptr() for name in own])

    def test_without_a_gpu_the_worker_says_why(self):
        library = Recorder()
        library.gpu_reason = b"no CUDA-capable device"
        worker = Worker(library_of(library), Failures(), block_tokens=16)
        _, caches = make_cache(KVCacheLayout.LBNHC, 16, 16, torch.bfloat16)
        self.assertRaisesRegex(Unsupported, "no CUDA-capable", worker.register, on_gpu(caches), engine(caches))

    def test_of_a_release_that_is_not_known_saves_hold_the_stream_at_once(self):
        _, caches = make_cache(KVCacheLayout.LBNHC, 16, 16, torch.bfloat16)
        for unknown in (None, "vLLM 1.0"):
            worker = Worker(library_of(Recorder()), Failures(), block_tokens=16)
            with unittest.mock.patch("cachegen.vllm.worker.refusal", lambda why=unknown: why):
                worker.register(on_gpu(caches), engine(caches))
            self.assertEqual(worker._holds_later, unknown is None)

    def test_beside_another_connector_too(self):
        _, caches = make_cache(KVCacheLayout.LBNHC, 16, 16, torch.bfloat16)
        own = type("CachegenConnector", (), {"__module__": "cachegen.vllm"})
        for group, is_alone in ((own(), True), (object(), False)):  # as MultiConnector, which has it as one of several
            worker = Worker(library_of(Recorder()), Failures(), block_tokens=16)
            with unittest.mock.patch("vllm.distributed.kv_transfer.kv_transfer_state._KV_CONNECTOR_AGENT", group):
                worker.register(on_gpu(caches), engine(caches))
            self.assertEqual(worker._holds_later, is_alone)

    def test_a_gpu_that_is_off_is_told_once_and_for_good(self):
        library = Recorder()
        worker = Worker(library_of(library), Failures(), block_tokens=16)
        _, caches = make_cache(KVCacheLayout.LBNHC, 16, 16, torch.bfloat16)
        worker.register(on_gpu(caches), engine(caches))
        self.assertEqual(worker.take_report(), WorkerReport(fingerprints={"f"}, profiles={""}))
        self.assertIsNone(worker.take_report())
        library.gpu_reason = b"an illegal memory access"
        with self.assertLogs("vllm.cachegen", "WARNING") as log:
            self.assertTrue(worker.take_report().is_off)
            self.assertIsNone(worker.take_report())
        self.assertEqual(len(log.output), 1)
        self.assertIn("an illegal memory access", log.output[0])
        self.assertEqual(worker.outages.under_way(), [GPU])

    def test_a_step_on_a_gpu_takes_as_long_as_its_stream_and_is_not_waited_for(self):
        cuda = FakeCuda()
        steps = GpuSteps(0, cuda)
        self.assertEqual(steps.after, (abi.AFTER_STREAM, 77))
        steps.begin()
        self.assertEqual(steps.end(100, 5000), [])  # enqueued, and no more
        steps.begin()
        self.assertEqual(steps.end(0, 0), [])  # not a prefill
        cuda.reached = 2
        self.assertEqual(steps.end(0, 0), [(100, 5000, 1_000_000)])
        for _ in range(3 * GpuSteps.MOST_PENDING):
            steps.begin()
            steps.end(1, 0)
        self.assertEqual(cuda.made, 3 + 2 * GpuSteps.MOST_PENDING)  # a stream that hangs costs no more

    def test_a_worker_s_steps_tell_the_library_how_fast_prefills_are(self):
        told = []
        cg = types.SimpleNamespace(report_prefill=lambda *prefill: told.append(prefill))
        worker = Worker(library_of(cg), Failures(), block_tokens=16)
        worker.submit(Metadata(prefill_tokens=64, prefill_pairs=2048))
        worker.start_saves(Metadata(prefill_tokens=64, prefill_pairs=2048))
        self.assertEqual([prefill[:2] for prefill in told], [(64, 2048)])
        self.assertEqual(worker.take_report().prefills, told)

    def refuse(self, reason, caches, backend="FLASH_ATTN"):
        self.assertRaisesRegex(Unsupported, reason, kv_layout, caches, engine(caches, backend))

    def test_what_is_not_understood_is_refused_by_name(self):
        _, caches = make_cache(KVCacheLayout.LBNHC, 16, 16, torch.bfloat16)
        names = list(caches)
        self.refuse("backend ROCM_ATTN", on_gpu(caches), "ROCM_ATTN")
        self.assertRaisesRegex(Unsupported, "backend None", kv_layout, on_gpu(caches), engine([]))
        self.refuse("device xpu:0", {name: OnGpu(cache, "xpu:0") for name, cache in caches.items()})
        self.refuse("one attention a layer", {names[1]: OnGpu(caches[names[1]])})
        other = make_cache(KVCacheLayout.LBHNC, 16, 16, torch.bfloat16)[1]
        self.refuse("unlike layer", on_gpu({**caches, names[1]: other[names[1]]}))
        self.refuse("unlike layer", {**on_gpu(caches), names[1]: OnGpu(caches[names[1]], "cuda:1")})
        self.refuse("shape", on_gpu({name: cache.flatten(2) for name, cache in caches.items()}))
        self.refuse("strides", on_gpu({name: cache.transpose(2, 3) for name, cache in caches.items()}))
        self.refuse("strides", on_gpu({name: cache[..., 1:-1] for name, cache in caches.items()}))
        for dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
            with self.subTest(dtype=dtype):
                quantized = {name: torch.zeros(N_BLOCKS, 2, 16, 128, dtype=dtype) for name in names}
                self.refuse(f"KV cache of {dtype}", on_gpu(quantized))
                spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=dtype)
                self.assertRaisesRegex(Unsupported, f"KV cache of {dtype}", check_attention, spec, 4096)
        fp8 = {name: OnGpu(torch.zeros(N_BLOCKS, 2, 16, 128, dtype=torch.uint8)) for name in names}
        for cache_dtype, backend in (
            ("nvfp4", "FLASHINFER"),
            ("fp8_per_token_head", "TRITON_ATTN"),
            ("fp8_e5m2", "TRITON_ATTN"),
        ):
            with self.subTest(cache_dtype=cache_dtype), self.assertRaisesRegex(Unsupported, cache_dtype):
                kv_layout(fp8, engine(fp8, backend, cache_dtype))
        computed = engine(fp8, cache_dtype="fp8")
        computed.cache_config.calculate_kv_scales = True
        self.assertRaisesRegex(Unsupported, "calculate_kv_scales", kv_layout, fp8, computed)

    def test_of_quantized_caches_fp8_by_tensors_is_taken(self):
        sizes = dict(block_size=16, num_kv_heads=2, head_size=64)
        check_attention(FullAttentionSpec(**sizes, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR), 4096)
        for mode in KVQuantMode:
            for dtype in (torch.uint8, torch.bfloat16):
                if (mode, dtype) in ((KVQuantMode.FP8_PER_TENSOR, torch.uint8), (KVQuantMode.NONE, torch.bfloat16)):
                    continue
                with self.subTest(mode=mode, dtype=dtype), self.assertRaises(Unsupported):
                    check_attention(FullAttentionSpec(**sizes, dtype=dtype, kv_quant_mode=mode), 4096)


if __name__ == "__main__":
    unittest.main()
