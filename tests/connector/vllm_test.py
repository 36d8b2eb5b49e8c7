"""End to end with vLLM: what the connector loads is what the engine would have computed, and nothing else.

usage: vllm_test.py [PHASE...]    (environment: CG_ENGINE_PYTHON, CG_MODEL_DIR, CG_BUILD_DIR; CG_TEST_REQUIRE=engine)
CG_ENGINE_ARGS: what each engine is made with besides, as JSON; with a vLLM for GPUs
{"block_size": 128, "gpu_memory_utilization": 0.2}, since two engines are up at once. There vLLM 0.32 has no float32
with adapters (brief, changed), and no fp8_e5m2; and with fp8 the answers after its own prefix cache differ, too.
Phases: cold (and warm after it), lossy, changed, windows, fp8, ranks, brief; without any all but brief.
Exits with 77 when there is no engine. Each phase is a fresh process with its engine inside; an engine start takes most
of its time, so a phase holds many cases. Exactness is tested in float32: in bf16 vLLM's rounding depends on the batch.
"""

import concurrent.futures
import contextlib
import ctypes
import glob
import json
import os
import platform
import queue
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from unittest import mock

CHECKOUT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("CG_BUILD_DIR", os.path.join(CHECKOUT, "build"))
MODEL = os.environ.get("CG_MODEL_DIR", "")
NAME = "model"  # its folder in the store
CHUNK, BLOCK = 256, 128
STEP_TOKENS = 1024  # longer prompts are computed in several steps
HARMLESS = {"chunks_loaded_l0", "chunks_saved_l0", "chunks_existed", "chunks_encoded", "chunks_decoded_on_gpu"}
PHASE_TIMEOUT_S = 900  # most of it for machines that are busy with other tests

# ---- inside a phase ----


class Cases:
    """Runs cases one after the other and remembers which failed."""

    def __init__(self):
        self.failed = []

    @contextlib.contextmanager
    def __call__(self, sentence):
        started = time.monotonic()
        try:
            yield
            verdict = "ok    "
        except Exception as e:
            self.failed.append(sentence)
            verdict = "FAILED"
            print(f"    {type(e).__name__}: {e}", flush=True)
        print(f"{verdict} {sentence} ({time.monotonic() - started:.1f} s)", flush=True)


def equal(got, want, what):
    if got != want:
        raise AssertionError(f"{what}: {got!r}, not {want!r}")


def holds(condition, what):
    if not condition:
        raise AssertionError(what)


def ours(connector):
    """The CachegenConnector that is connector, or is one of MultiConnector's."""
    return getattr(connector, "_connectors", [connector])[-1]


IDLE = {"kv_connector": "IdleConnector", "kv_connector_module_path": "idle_connector", "kv_role": "kv_both"}


def beside_another(connector, other):
    """The configuration of MultiConnector, with another connector before ours."""
    policy = {"kv_load_failure_policy": connector["kv_load_failure_policy"]}
    return {
        "kv_connector": "MultiConnector", "kv_role": "kv_both", **policy,
        "kv_connector_extra_config": {"connectors": [other, connector]},
    }  # fmt: skip


class Engine:
    def __init__(self, root, dtype, n_blocks=64, engine_args=None, model=MODEL, other=None, **config):
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE="1",
            HF_HUB_OFFLINE="1",
            VLLM_CPU_CI_ENV="1",
            VLLM_NO_USAGE_STATS="1",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            # vLLM pins its threads: on a busy machine one waits for the other.
            OMP_NUM_THREADS=os.environ.get("CG_ENGINE_THREADS", "1"),
            CACHEGEN_LIBRARY=os.path.join(BUILD, "connector", "libcachegen.so"),
        )
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        extra = {
            **{"root": root, "model": NAME, "ttft_budget_ms": 600000},
            # Every look-up sees the store as it is: the cases change it behind the connector's back.
            **{"positive_ttl_ms": 0, "negative_ttl_ms": 0, "retry_ms": 0},
            "encode_nice": 0,  # saves are waited for, also where the machine is busy
            **config,
        }
        connector = {
            "kv_connector": "CachegenConnector",
            "kv_connector_module_path": "cachegen.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
        self.llm = LLM(
            model=model,
            dtype=dtype,
            num_gpu_blocks_override=n_blocks,
            kv_transfer_config=beside_another(connector, other) if other else connector,
            **{
                "max_model_len": 3072,
                "max_num_batched_tokens": STEP_TOKENS,
                "enforce_eager": True,
                "disable_log_stats": False,
                **json.loads(os.environ.get("CG_ENGINE_ARGS", "{}")),
                **(engine_args or {}),
            },
        )
        self.scheduler = ours(self.llm.llm_engine.engine_core.engine_core.scheduler.connector).scheduler

    def params(self, max_tokens=12, **transfer):
        named = {f"cachegen.{key}": value for key, value in transfer.items()}
        return self._params(
            max_tokens=max_tokens, temperature=0, ignore_eos=True, extra_args={"kv_transfer_params": named}
        )

    def ask_all(self, prompts, salt=None, fresh=True, max_tokens=12, lora=None, **transfer):
        """The answers to prompts that come at the same time. fresh: vLLM's own prefix cache is emptied before."""
        if fresh:
            self.settle()
            holds(self.llm.reset_prefix_cache(), "blocks are still held before the request")
        requests = [{"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})} for prompt in prompts]
        outputs = self.llm.generate(requests, self.params(max_tokens, **transfer), use_tqdm=False, lora_request=lora)
        return [
            types.SimpleNamespace(
                tokens=list(output.outputs[0].token_ids),
                hit=output.kv_transfer_params["cachegen.hit_tokens"],
                level=output.kv_transfer_params.get("cachegen.level"),
                told={name.removeprefix("cachegen."): value for name, value in output.kv_transfer_params.items()},
                cached=output.num_cached_tokens,
                preempted=output.metrics.num_preemptions,
                request_id=output.request_id,
            )
            for output in outputs
        ]

    def ask(self, prompt, **options):
        return self.ask_all([prompt], **options)[0]

    @property
    def worker(self):
        """Where it is in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return ours(get_kv_transfer_group()).worker

    def on_workers(self, function):
        """What function(worker's side) returns, in the process of each rank."""

        def call(_vllm_worker):
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            return function(ours(get_kv_transfer_group()).worker)

        return self.llm.llm_engine.model_executor.collective_rpc(call)

    def settle(self):
        """Waits until what is being saved is saved."""
        deadline = time.monotonic() + 120

        def n_saves(worker):
            worker.collect_saves()
            return len(worker.saves)

        while sum(self.on_workers(n_saves)):
            holds(time.monotonic() < deadline, "saves do not end")
            time.sleep(0.005)

    def model(self):
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model

    def stats(self):
        return self.worker.library.cg.get_stats().as_dict()


def read_prompts():
    """Token ids: long; forked, which shares its first 900; other; killed."""
    from transformers import AutoTokenizer

    with open(os.path.join(CHECKOUT, "tests/data/prompt/longchat_topics.txt"), encoding="utf-8") as file:
        ids = AutoTokenizer.from_pretrained(MODEL)(file.read()).input_ids
    return {
        "long": ids[:1530],
        "forked": ids[:900] + ids[1700:2200],
        "other": ids[1000:2536],
        "short": ids[300:930],
        "killed": ids[700:2236],
    }


def cold_phase(work, cases):
    """Stores prompts; ends by being killed where it saves the third chunk of one."""
    engine = Engine(os.path.join(work, "store"), "float32")
    prompts = read_prompts()
    cold = {}
    with cases("prompts that nothing is stored of are computed"):
        for name, prompt in prompts.items():  # a salt each: no prompt finds a part of another
            answer = engine.ask(prompt, salt=f"reference {name}", max_tokens=24)
            equal(answer.hit, 0, "tokens loaded")
            cold[name] = answer.tokens
    for name in ("long", "other"):
        engine.ask(prompts[name], context=name, max_tokens=1)
    engine.settle()
    with open(os.path.join(work, "cold.json"), "w") as file:
        json.dump(cold, file)
    if cases.failed:
        return
    engine.ask(prompts["killed"][: 2 * CHUNK], max_tokens=1)
    engine.settle()
    die_at_linkat()
    engine.ask(prompts["killed"], max_tokens=1)
    engine.settle()


def die_at_linkat():
    """From now on the kernel kills this process where any thread of it makes a link, as a save does that has written a
    chunk, and is about to give it its name."""
    syscalls = {"x86_64": (317, 265), "aarch64": (277, 37)}
    seccomp, linkat = syscalls[platform.machine()]
    load_number, if_equal, answer, kill_process, allow = 0x20, 0x15, 0x06, 0x80000000, 0x7FFF0000
    steps = [(load_number, 0, 0, 0), (if_equal, 0, 1, linkat), (answer, 0, 0, kill_process), (answer, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_filter, all_threads = 38, 1, 1
    holds(libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0, "no_new_privs")
    holds(libc.syscall(seccomp, set_filter, all_threads, program) == 0, f"seccomp: errno {ctypes.get_errno()}")


def warm_phase(work, cases):
    root = os.path.join(work, "store")
    engine = Engine(root, "float32", n_blocks=38)
    prompts = read_prompts()
    with open(os.path.join(work, "cold.json")) as file:
        cold = json.load(file)
    long = prompts["long"]
    whole = len(long) // 32 * 32  # with the short last chunk
    backup = os.path.join(work, "backup")
    shutil.copytree(os.path.join(root, NAME), backup, copy_function=os.link)

    def as_cold(name, answer):
        equal(answer.tokens, cold[name][: len(answer.tokens)], f"answer to {name}")

    with cases("a prompt stored by another process is loaded, and answered as if computed"):
        answer = engine.ask(long, max_tokens=24)
        equal(answer.hit, whole, "tokens loaded")
        equal(answer.level, "L0", "level")
        as_cold("long", answer)
    with cases("what a killed engine has saved is whole"):
        answer = engine.ask(prompts["killed"])
        equal(answer.hit, 2 * CHUNK, "tokens loaded")
        as_cold("killed", answer)
        equal(engine.stats()["chunks_corrupt"] + engine.stats()["chunks_truncated"], 0, "damaged chunks")
    with cases("a prompt that shares a beginning loads the chunks of that beginning"):
        answer = engine.ask(prompts["forked"])
        equal(answer.hit, 900 // CHUNK * CHUNK, "tokens loaded")
        as_cold("forked", answer)
    with cases("of a prompt of whole chunks all but the last token is loaded"):
        computed = engine.ask(long[: 4 * CHUNK], salt="whole chunks")
        answer = engine.ask(long[: 4 * CHUNK])
        equal((computed.hit, answer.hit), (0, 4 * CHUNK - 1), "tokens loaded")
        equal(answer.tokens, computed.tokens, "answer")
    with cases("a load begins inside a chunk, where vLLM's own prefix cache ends"):
        engine.ask(long[:700], max_tokens=1)
        answer = engine.ask(long, fresh=False)
        equal(answer.hit, whole - 700 // BLOCK * BLOCK, "tokens loaded")
        as_cold("long", answer)
    with cases("of requests that come together the same is loaded once, and none disturbs another"):
        names = ["other", "long", "short", "other"]
        engine.settle()
        before = engine.stats()["tokens_loaded"]
        answers = engine.ask_all([prompts[name] for name in names])
        for name, answer in zip(names, answers):
            as_cold(name, answer)
        equal(sum(answer.hit for answer in answers), engine.stats()["tokens_loaded"] - before, "tokens loaded")
        first, second = answers[0], answers[3]
        holds(
            first.hit == 6 * CHUNK - 1 and second.hit == 0,
            f"{first.hit} and {second.hit} tokens loaded of one prompt",
        )
        # For less than a block nothing is loaded.
        equal(second.cached, first.cached // BLOCK * BLOCK, "tokens not computed")
    with cases("a preempted request goes on as if nothing had happened"):
        # 38 blocks, one of them reserved: three prompts of 12 blocks fit, and 24 tokens later they need 39. They are
        # three: vLLM holds what two have in common once.
        names = ["long", "killed", "other"]
        answers = engine.ask_all([prompts[name] for name in names], max_tokens=24)
        for name, answer in zip(names, answers):
            as_cold(name, answer)
        holds(sum(answer.preempted for answer in answers) > 0, "nothing was preempted: the case tests nothing")
    with cases("what a prompt's steps compute is stored step by step, and loaded as one"):
        parts, start_saves = [], engine.worker.start_saves

        def note_and_save(metadata):
            parts.extend((plan.from_token, plan.to_token) for plan in metadata.saves)
            start_saves(metadata)

        engine.worker.start_saves = note_and_save
        as_cold("long", engine.ask(long, salt="in steps"))
        del engine.worker.start_saves
        equal(parts, [(0, STEP_TOKENS), (STEP_TOKENS, whole)], "tokens that steps saved")
        answer = engine.ask(long, salt="in steps")
        equal(answer.hit, whole, "tokens loaded")
        as_cold("long", answer)
    with cases("two salts never share, and one shares with itself"):
        for salt, hit in (("tenant a", 0), ("tenant b", 0), ("tenant a", len(prompts["short"]) // 32 * 32)):
            answer = engine.ask(prompts["short"], salt=salt)
            equal(answer.hit, hit, f"tokens loaded for {salt}")
            as_cold("short", answer)

    def chunk_file(n):
        with open(os.path.join(root, NAME, "contexts", "long", "context.json")) as file:
            key = json.load(file)["chunks"][n]["key"]
        return glob.glob(os.path.join(root, NAME, "objects", key[:2], key, "*L0.kv"))[0]

    def restore():
        engine.settle()
        shutil.rmtree(os.path.join(root, NAME))
        shutil.copytree(backup, os.path.join(root, NAME))

    def flip(path):
        with open(path, "r+b") as file:
            file.seek(os.path.getsize(path) * 2 // 3)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 0x10]))

    damages = {
        "truncated": (lambda path: os.truncate(path, os.path.getsize(path) // 2), "chunks_truncated"),
        "bit-flipped": (flip, "chunks_corrupt"),
        "swapped": (lambda path: shutil.copy(chunk_file(3), path), "chunks_foreign_tokens"),
    }

    def ask_damaged(n):
        """The answer with chunk n unfit, and the counters that counted."""
        before, started = engine.stats(), time.monotonic()
        answer = engine.ask(long)
        as_cold("long", answer)
        holds(answer.hit <= n * CHUNK, f"{answer.hit} tokens loaded")
        holds(time.monotonic() - started < 60, "took as long as a loop")
        after = engine.stats()
        return {name for name in after if after[name] > before[name]}

    for damage, (do, counter) in damages.items():
        for n in (2, 0):
            with cases(f"chunk {n} {damage}: a shorter hit, a counter, and the answer of a recompute"):
                restore()
                do(chunk_file(n))
                counted = ask_damaged(n)
                holds(counter in counted, f"{counter} does not count, but {counted}")
    with cases("a chunk that was never stored, or is gone before the look-up, only shortens the hit"):
        restore()
        os.remove(chunk_file(2))
        equal({name for name in ask_damaged(2) if name.startswith("chunks_")} - HARMLESS, set(), "counted")
    for n in (2, 0):
        with cases(f"chunk {n} gone between look-up and load: a counter, and the answer of a recompute"):
            restore()
            gone, submit = chunk_file(n), engine.worker.submit

            def remove_and_submit(metadata):
                if metadata.loads:
                    with contextlib.suppress(FileNotFoundError):
                        os.remove(gone)
                submit(metadata)

            engine.worker.submit = remove_and_submit
            try:
                counted = ask_damaged(n)
            finally:
                engine.worker.submit = submit
            holds("chunks_missing" in counted, f"only {counted} counted")
    restore()

    with cases("a load that is aborted frees its blocks"):
        engine.llm.reset_prefix_cache()
        core, cg, cancelled = engine.llm.llm_engine, engine.worker.library.cg, []
        poll = cg.load_poll

        def poll_until_cancelled(load):
            progress = poll(load)
            progress.done = progress.done if cancelled else 0  # else it may end before it is aborted
            return progress

        with (
            mock.patch.object(cg, "load_poll", poll_until_cancelled),
            mock.patch.object(cg, "load_cancel", lambda load, cancel=cg.load_cancel: cancelled.append(cancel(load))),
        ):
            core.add_request("aborted", {"prompt_token_ids": long}, engine.params(4))
            deadline = time.monotonic() + 60
            while not engine.worker.loads:
                core.step()
                holds(time.monotonic() < deadline and core.has_unfinished_requests(), "never loaded anything")
            core.abort_request(list(engine.scheduler.states), internal=True)
            while engine.worker.loads:
                core.step()
                holds(time.monotonic() < deadline, "the load never ends")
            holds(cancelled, "the load was not cancelled")
        core.step()
        holds(engine.llm.reset_prefix_cache(), "blocks are still held")
        equal(engine.scheduler.states, {}, "states of requests")
        as_cold("long", engine.ask(long))
    with cases("inputs that cannot be keyed are refused, others are told apart"):
        extra_keys()


def extra_keys():
    from cachegen.vllm.request_key import extra_key, parse_options

    def request(**fields):
        defaults = dict(
            prompt_token_ids=[1], prompt_embeds=None, prompt_is_token_ids=None, lora_request=None, mm_features=[]
        )
        return types.SimpleNamespace(**{**defaults, **fields})

    equal(extra_key(request()), b"", "key of plain tokens")
    equal(extra_key(request(prompt_embeds=object())), None, "key of embeddings")
    equal(extra_key(request(prompt_is_token_ids=[True])), None, "key of mixed input")
    adapter = types.SimpleNamespace(lora_name="a")
    equal(extra_key(request(lora_request=adapter)), None, "key of an adapter that cannot be told")
    keys = [
        extra_key(request()),
        extra_key(request(lora_request=adapter), adapter="1"),
        extra_key(request(lora_request=adapter), adapter="2"),
    ]
    equal(len(set(keys)), len(keys), "different keys")
    equal(parse_options({"cachegen.worst_level": "L1"}).worst_level, 1, "worst level")
    try:
        parse_options({"cachegen.level": "L4"})
    except ValueError:
        return
    raise AssertionError("level L4 was taken")


def lossy_phase(work, cases):
    """bf16, with a profile that was made in haste: that lossy KV is used and remembered as such, not how good it is."""
    root = os.path.join(work, "lossy")
    engine = Engine(root, "bfloat16", store_levels=["L0", "L1", "L2", "L3"])
    prompts = read_prompts()
    longer, start = prompts["long"], prompts["long"][: 3 * CHUNK + 40]
    cold = engine.ask(longer, salt="reference")
    engine.ask(start, max_tokens=1)
    read_bytes = []
    for level in ("L0", "L1", "L2", "L3"):
        with cases(f"{level} is loaded when asked for, and reported"):
            answer = engine.ask(start, level=level)
            equal(answer.hit, len(start) // 32 * 32, "tokens loaded")
            equal(answer.level, level, "level")
            equal(answer.told["levels"], [level] * 4, "levels of three chunks and a short one")
            holds((answer.told["predicted_kl"] > 0) == (level != "L0"), f"{answer.told['predicted_kl']} nats predicted")
            read_bytes.append(answer.told["bytes"])
    with cases("the bytes that answers tell are those that were read, fewer at each level"):
        equal(read_bytes, sorted(read_bytes, reverse=True), "bytes by level")
        equal(engine.stats()["bytes_read"], sum(read_bytes), "bytes read")
    with cases("L0 is in bf16, too, what vLLM's own prefix cache has, which leaves as much to compute"):
        prompt, salt = longer[: 4 * CHUNK + 1], "its own"
        engine.ask(prompt, salt=salt, max_tokens=1)
        own = engine.ask(prompt, salt=salt, max_tokens=24, fresh=False)
        loaded = engine.ask(prompt, salt=salt, max_tokens=24, level="L0")
        equal((own.cached, own.hit, loaded.hit), (4 * CHUNK, 0, 4 * CHUNK), "tokens cached; loaded; loaded alone")
        equal(loaded.tokens, own.tokens, "answer")
    with cases("a bound of quality is kept, as predicted, and told"):
        whole = engine.ask(start, level="L3").told
        answer = engine.ask(start, quality=whole["predicted_kl"] / 2)
        holds(0 < answer.told["predicted_kl"] <= whole["predicted_kl"] / 2, f"{answer.told}, {whole}")
        holds(whole["bytes"] < answer.told["bytes"] < read_bytes[0], f"{answer.told}, {whole}")
    with cases("what is computed after lossy KV is never taken for lossless"):
        answer = engine.ask(longer, level="L2")
        equal(answer.hit, 3 * CHUNK, "tokens loaded")
        answer = engine.ask(longer, worst_level="L0", fresh=False)
        equal(answer.cached, 0, "tokens taken from vLLM's own prefix cache, which holds lossy ones")
        answer = engine.ask(longer)
        equal(answer.hit, len(longer) // 32 * 32, "tokens loaded by a request that takes all levels")
        answer = engine.ask(longer, worst_level="L0", salt="reference")
        equal(answer.hit, len(longer) // 32 * 32, "tokens loaded where all is lossless")
        equal(answer.tokens[0], cold.tokens[0], "first token")
    with cases("what a congested load brought is loaded anew, and better, by the next request"):
        n_loaded = len(start) // 32 * 32
        equal(engine.ask(start, level="L3").level, "L3", "level")
        answer = engine.ask(start, level="L1", fresh=False)
        equal((answer.hit, answer.level), (n_loaded, "L1"), "tokens loaded, level")
        answer = engine.ask(start, fresh=False)
        holds(answer.hit < BLOCK, f"{answer.hit} tokens loaded again though they were good enough")
    with cases("a request that demands lossless KV gets only the lossless beginning"):
        shutil.rmtree(root_objects(root))
        os.makedirs(root_objects(root))
        engine.ask(start, max_tokens=1)
        engine.ask(longer, level="L3")
        answer = engine.ask(longer, worst_level="L0")
        equal(answer.hit, 3 * CHUNK, "tokens loaded")
        equal(answer.level, "L0", "level")
    engine.llm.llm_engine.engine_core.shutdown()

    # vLLM's own connector for files, which knows nothing of levels. (Its offloading connector needs a GPU.)
    files = os.path.join(work, "files")
    tier = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    tier["kv_connector_extra_config"] = {"shared_storage_path": files}
    engine = Engine(root, "bfloat16", store_levels=["L0", "L1", "L2", "L3"], other=tier)
    with cases("lossy KV that another tier has kept is never taken for lossless"):
        whole, after = 3 * CHUNK, prompts["long"][: 3 * CHUNK + 130]

        def ask(prompt, **options):
            answer = engine.ask(prompt, max_tokens=1, **options)
            engine.settle()
            return answer

        shutil.rmtree(root_objects(root), ignore_errors=True)
        os.makedirs(root_objects(root))
        ask(start[: whole + 1])
        shutil.rmtree(files)
        equal(ask(start[: whole + 1], level="L3").hit, whole, "tokens loaded, which the tier keeps")
        answer = ask(start)
        equal((answer.hit, answer.cached), (0, whole), "tokens that we loaded; that the tier loaded")
        answer = ask(after, fresh=False)
        equal((answer.hit, answer.cached), (0, whole), "tokens that we loaded; of vLLM's own prefix cache")
        shutil.rmtree(files)
        equal(ask(after).hit, len(after) // 32 * 32, "tokens loaded by a request that takes all levels")
        shutil.rmtree(files)
        equal(ask(after, worst_level="L0").hit, whole, "tokens loaded as lossless")


def write_adapter(path, engine, seed):
    """A LoRA adapter of random weights; atomically, as a training job would replace one."""
    import torch
    from safetensors.torch import save_file

    config = engine.llm.llm_engine.model_config.hf_config
    kv_dim = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    random_numbers = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config.num_hidden_layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj.lora"
        weights[f"{name}_A.weight"] = torch.randn(8, config.hidden_size, generator=random_numbers)
        weights[f"{name}_B.weight"] = torch.randn(kv_dim, 8, generator=random_numbers)
    os.makedirs(path, exist_ok=True)
    for name, write in {
        "adapter_model.safetensors": lambda file: save_file(weights, file),
        "adapter_config.json": lambda file: write_json(
            file, {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["v_proj"], "bias": "none"}
        ),
    }.items():
        write(os.path.join(path, "new"))
        os.rename(os.path.join(path, "new"), os.path.join(path, name))


def write_json(path, value):
    with open(path, "w") as file:
        json.dump(value, file)


def changed_phase(work, cases):
    """float32: what computes K and V changes while the engine runs."""
    engine = Engine(os.path.join(work, "changed"), "float32", engine_args={"enable_lora": True, "max_lora_rank": 8})
    prompt = read_prompts()["short"]
    whole = len(prompt) // 32 * 32
    from vllm.lora.request import LoRARequest

    path = os.path.join(work, "adapter")
    with cases("an adapter is what the engine has loaded, whatever its files have become"):
        write_adapter(path, engine, seed=1)
        first = LoRARequest("first", 1, path)
        plain, with_first = engine.ask(prompt, salt="no adapter"), engine.ask(prompt, lora=first)
        holds(with_first.tokens != plain.tokens, "the adapter makes no difference: the case tests nothing")
        equal((with_first.hit, engine.ask(prompt, lora=first).hit), (0, whole), "tokens loaded at first, and again")
        write_adapter(path, engine, seed=2)
        answer = engine.ask(prompt, lora=first)
        equal(
            (answer.hit, answer.tokens), (whole, with_first.tokens), "tokens loaded, answer of an overwritten adapter"
        )
        # vLLM knows it by the name "first", as does the store: what is of the old content must not be found.
        second = LoRARequest("first", 2, path)
        with_second = engine.ask(prompt, lora=second)
        equal(with_second.hit, 0, "tokens loaded of the old content")
        holds(with_second.tokens != with_first.tokens, "the adapters make no difference: the case tests nothing")
        again = engine.ask(prompt, lora=second)
        equal((again.hit, again.tokens), (whole, with_second.tokens), "tokens loaded, answer")
        # There is room for one adapter: the first number's is read anew, and has become the second's.
        answer = engine.ask(prompt, lora=first)
        equal((answer.hit, answer.tokens), (whole, with_second.tokens), "tokens loaded, answer of what was read anew")
    with cases("also one that was overwritten between its load and its first request"):
        loaded = LoRARequest("loaded", 3, path)
        holds(engine.llm.llm_engine.add_lora(loaded), "not loaded")
        write_adapter(path, engine, seed=3)
        answer = engine.ask(prompt, lora=loaded)
        equal(
            (answer.hit, answer.tokens), (0, with_second.tokens), "tokens loaded, answer of the content that was loaded"
        )
        with_third = engine.ask(prompt, lora=LoRARequest("loaded", 4, path))
        equal(with_third.hit, 0, "tokens loaded that another content's adapter computed")
        holds(with_third.tokens != with_second.tokens, "the adapters make no difference: the case tests nothing")
        write_adapter(path, engine, seed=2)
        answer = engine.ask(prompt, lora=LoRARequest("loaded", 5, path))
        equal(
            (answer.hit, answer.tokens),
            (whole, with_second.tokens),
            "tokens loaded, answer of the content that is back",
        )
    with cases("nor does vLLM's own prefix cache, which knows names only, mix contents"):
        engine.ask(prompt, lora=LoRARequest("name", 6, path), salt="names")
        write_adapter(path, engine, seed=3)
        other = LoRARequest("name", 7, path)
        answer = engine.ask(prompt, lora=other, salt="names", fresh=False)
        equal((answer.hit, answer.cached, answer.tokens), (0, 0, with_third.tokens), "tokens loaded, cached, answer")
        answer = engine.ask(prompt, lora=other, salt="names", fresh=False)
        local = len(prompt) // BLOCK * BLOCK
        equal((answer.cached - answer.hit, answer.tokens), (local, with_third.tokens), "tokens in vLLM's cache, answer")
        write_adapter(path, engine, seed=2)
        answer = engine.ask(prompt, lora=LoRARequest("name", 8, path), salt="names", fresh=False)
        equal(
            (answer.hit, answer.tokens),
            (whole, with_second.tokens),
            "tokens loaded, answer of the content that is back",
        )

    def replace_weights():
        import torch

        with torch.no_grad():
            for name, weights in engine.model().named_parameters():
                if "layernorm" in name:  # the CPU build keeps packed copies of matrices
                    weights.mul_(1.5)

    with cases("after weights were replaced and the caches reset, nothing old is loaded, and what is new is stored"):
        before = engine.ask(prompt)
        equal(engine.ask(prompt).hit, whole, "tokens loaded before")
        replace_weights()
        holds(engine.llm.reset_prefix_cache(reset_connector=True), "not reset")
        first = engine.ask(prompt)
        equal(first.hit, 0, "tokens loaded that old weights computed")
        holds(first.tokens != before.tokens, "the weights make no difference: the case tests nothing")
        again = engine.ask(prompt)
        equal((again.hit, again.tokens), (whole, first.tokens), "tokens loaded, answer")


def windows_phase(work, cases):
    """float32, small models of random weights: windows in some layers, each kind of layer with a rope of its own; and
    in all layers, as long as any prompt."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

    model, root, window = os.path.join(work, "gemma"), os.path.join(work, "windows"), 64
    torch.manual_seed(1)
    config = Gemma3TextConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=4, head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=2, query_pre_attn_scalar=32, sliding_window=window, max_position_embeddings=1024,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        initializer_range=0.2, torch_dtype="float32",
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(model)
    from cachegen import fingerprint

    fingerprint.WHOLE_BYTES = 0  # the weights count as so large that only samples are in the fingerprint
    sizes = dict(version=1, n_layers=4, n_kv_heads=2, head_dim=32, dtype="fp32")
    identity = dict(
        model_fingerprint=fingerprint.model_fingerprint(model), weights_digest=fingerprint.weights_digest(model)
    )
    os.makedirs(os.path.join(root, NAME))
    write_json(os.path.join(root, NAME, "model.json"), {**sizes, **identity})
    args = dict(skip_tokenizer_init=True, block_size=32, max_model_len=1024, max_num_batched_tokens=128)
    engine = Engine(root, "float32", model=model, engine_args=args, chunk_tokens=64, tail_multiple=32, strict=True)
    prompt = [random.Random(1).randrange(3, 1024) for _ in range(5 * window + 11)]
    whole = len(prompt) // 32 * 32

    def doubt():
        """Once all weights are read."""
        for thread in threading.enumerate():
            if thread.name == "cachegen-weights":
                thread.join()
        return engine.scheduler.library.weights.doubt

    with cases("weights of which the store has a digest are read, and are the store's"):
        equal(doubt(), None, "doubt")
    with cases("a prompt longer than the windows is loaded, and answered as if computed"):
        cold = engine.ask(prompt, max_tokens=24)
        equal(cold.hit, 0, "tokens loaded of nothing")
        answer = engine.ask(prompt, max_tokens=24)
        equal((answer.hit, answer.tokens), (whole, cold.tokens), "tokens loaded, answer")
    with cases("a load begins inside a window, where vLLM's own prefix cache ends"):
        engine.ask(prompt[: window + 40], max_tokens=1)
        answer = engine.ask(prompt, fresh=False, max_tokens=24)
        holds(0 < answer.hit < whole, f"{answer.hit} tokens loaded")
        equal(answer.tokens, cold.tokens, "answer")
    with cases("what is computed after a load is stored, and loaded as computed"):
        longer = prompt[:whole] + prompt[:200]
        cold = engine.ask(longer, salt="cold", max_tokens=24)
        for hit in (whole // 64 * 64, len(longer) // 32 * 32):
            answer = engine.ask(longer, max_tokens=24)
            equal((answer.hit, answer.tokens), (hit, cold.tokens), "tokens loaded, answer")
    with cases("an engine whose weights are not those of the digest goes on without the store"):
        from cachegen.vllm.model_key import OTHER, WeightsCheck

        engine.scheduler.library.weights = WeightsCheck(model, "0" * 32)
        equal(doubt(), OTHER, "doubt")
        answer = engine.ask(longer, max_tokens=24)
        equal((answer.hit, answer.tokens), (0, cold.tokens), "tokens loaded, answer")

    model, root = os.path.join(work, "mistral"), os.path.join(work, "whole_windows")
    config = MistralConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=3, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=256, max_position_embeddings=1024,
        initializer_range=0.2, torch_dtype="float32",
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(model)
    os.makedirs(root)
    args["max_model_len"], answers = 256, []
    for disable in (False, True):
        with cases(f"prompts within a window of all layers are stored and loaded, disable_sliding_window={disable}"):
            engine.llm.llm_engine.engine_core.shutdown()
            engine = Engine(
                root, "float32", model=model, engine_args={**args, "disable_sliding_window": disable},
                chunk_tokens=64, tail_multiple=32, strict=True,
            )  # fmt: skip
            answers += [engine.ask(prompt[:244], max_tokens=12) for _ in range(2 - disable)]
    with cases("and the answers are those that were computed, whether the window is disabled or not"):
        equal([(answer.hit, answer.tokens == answers[0].tokens) for answer in answers],
              [(0, True), (224, True), (224, True)], "tokens loaded, answer as computed")  # fmt: skip


def ranks_phase(work, cases):
    """float32, a small model of random weights: an engine of two ranks, and one of one rank that has another connector
    beside ours, on one store."""
    # On a CPU without AVX-512 torch.compile makes vLLM's get_masked_input_and_mask() wrong, which only ranks use.
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    model, root = os.path.join(work, "llama"), os.path.join(work, "ranks")
    torch.manual_seed(1)
    sizes = dict(vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=2, head_dim=32)
    heads = dict(num_attention_heads=4, num_key_value_heads=4)
    config = LlamaConfig(**sizes, **heads, initializer_range=0.2, torch_dtype="float32")
    LlamaForCausalLM(config).save_pretrained(model)
    args = dict(skip_tokenizer_init=True, block_size=32, max_model_len=512)
    chunk = dict(chunk_tokens=64, tail_multiple=32, strict=True)
    two = Engine(
        root, "float32", model=model,
        engine_args={**args, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        **chunk,
    )  # fmt: skip
    one = Engine(root, "float32", model=model, engine_args=args, other=IDLE, **chunk)
    prompts = [[random.Random(seed).randrange(3, 1024) for _ in range(203)] for seed in (1, 2, 3)]
    whole = 203 // 32 * 32

    def ask(engine, prompt, **options):
        return engine.ask(prompt, max_tokens=4, **options)

    for first, second, prompt in ((two, one, prompts[0]), (one, two, prompts[1])):
        name = "two ranks" if first is two else "one rank"
        with cases(f"what {name} stored, both engines load, and answer as if computed"):
            cold = ask(first, prompt, context=name)
            equal(cold.hit, 0, "tokens loaded of nothing")
            for engine in (first, second):
                first.settle()
                answer = ask(engine, prompt)
                equal((answer.hit, answer.tokens), (whole, cold.tokens), "tokens loaded, answer")
    with cases("each rank has loaded, and one alone has stored"):
        stats = two.on_workers(lambda worker: worker.library.cg.get_stats().as_dict())
        holds(all(rank["chunks_loaded_l0"] > 0 and rank["lookups"] == 0 for rank in stats), f"{stats}")
        equal([rank["chunks_saved_l0"] for rank in stats], [3, 0], "chunks saved by rank")
    with cases("two engines that save the same prompt at the same time leave it whole"):
        answers = [ask(engine, prompts[2]).tokens for engine in (two, one)]  # the first still saves
        equal(answers[0], answers[1], "answers")
        for engine in (one, two):
            engine.settle()
        for engine in (one, two):
            answer = ask(engine, prompts[2])
            equal((answer.hit, answer.tokens), (whole, answers[0]), "tokens loaded, answer")
    with cases("a rank that loses its load makes all recompute, and so does MultiConnector"):
        for path in glob.glob(os.path.join(root, NAME, "objects", "*", "*", "*L0.kv")):
            os.truncate(path, os.path.getsize(path) // 2)
        for engine, other, prompt in ((two, one, prompts[0]), (one, two, prompts[1])):
            answer = ask(engine, prompt)
            equal((answer.hit, answer.tokens), (0, ask(other, prompt, salt="cold").tokens), "tokens loaded, answer")
    with cases("/metrics tells that the connector is up, and what it loaded"):
        from prometheus_client import REGISTRY

        def metric(name, **labels):
            samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
            of_name = [sample for sample in samples if sample.name == f"vllm:cachegen_{name}"]
            return sum(sample.value for sample in of_name if labels.items() <= sample.labels.items())

        equal(metric("up", reason="up"), 1, "up")
        looked_up = one.scheduler.library.cg.get_stats().as_dict()["lookups"]
        for name, n in {**one.stats(), "lookups": looked_up}.items():
            if name in ("lookups", "tokens_loaded", "chunks_truncated"):
                holds(n > 0, f"no {name}: the case tests nothing")
                equal(metric(f"{name}_total"), n, name)
    with cases("an engine that only reads tries no save"):
        one.llm.llm_engine.engine_core.shutdown()
        reader = Engine(root, "float32", model=model, engine_args=args, read_only=True, **chunk)
        equal(ask(reader, prompts[0], salt="read only").hit, 0, "tokens loaded of nothing")
        equal(reader.on_workers(lambda worker: worker.counters()["parts_dropped"]), [0], "parts of prompts dropped")
        reader.llm.llm_engine.engine_core.shutdown()
    with cases("a strict engine that has no store doesn't start, and says why"):
        try:
            Engine(os.path.join(work, "gone"), "float32", model=model, engine_args=args, **chunk)
        except Exception as e:
            said = []
            while e is not None:
                said.append(str(e))
                e = e.__cause__ or e.__context__
            holds(any(os.path.join(work, "gone") in sentence for sentence in said), f"{said}")
        else:
            raise AssertionError("started")


def brief_phase(work, cases):
    """The life of a prompt in one engine, float32: for releases of vLLM that the other phases don't run with."""
    import vllm

    print(f"    vLLM {vllm.__version__}", flush=True)
    root, traces = os.path.join(work, "store"), os.path.join(work, "traces")
    os.mkdir(traces)
    lora = {"enable_lora": True, "max_lora_rank": 8}
    engine = Engine(root, "float32", engine_args=lora, strict=True, trace_dir=traces)
    prompt = read_prompts()["short"]
    whole = len(prompt) // 32 * 32
    from vllm.lora.request import LoRARequest

    with cases("a prompt is computed, stored, loaded and answered alike"):
        cold, warm = engine.ask(prompt, max_tokens=4), engine.ask(prompt, max_tokens=4)
        equal((cold.hit, warm.hit, warm.tokens), (0, whole, cold.tokens), "tokens loaded at first and again, answer")
    with cases("a load leaves a trace that names its request"):
        deadline = time.monotonic() + 120
        while not (found := glob.glob(os.path.join(traces, "*.json"))):
            holds(time.monotonic() < deadline, "no trace")
            time.sleep(0.005)
        with open(found[0]) as file:
            (load,) = (event for event in json.load(file)["traceEvents"] if event["name"] == "load")
        # vLLM's own id of a request begins with the one that it was given.
        holds(load["args"]["request"].startswith(warm.request_id), f"{load['args']} of request {warm.request_id}")
    with cases("a load that fails is recomputed"):
        for path in glob.glob(os.path.join(root, NAME, "objects", "*", "*", "*L0.kv")):
            os.truncate(path, os.path.getsize(path) // 2)
        equal(engine.ask(prompt, max_tokens=4).tokens, cold.tokens, "answer")
    with cases("an adapter is its content"):
        path, hits = os.path.join(work, "adapter"), []
        for seed, number in ((1, 1), (1, 1), (2, 2), (1, 3)):
            write_adapter(path, engine, seed)
            hits.append(engine.ask(prompt, lora=LoRARequest("name", number, path), max_tokens=4).hit)
        equal(hits, [0, whole, 0, whole], "tokens loaded: of nothing, of the same, of another content, of the first")
    with cases("a reset makes what is stored unreachable"):
        holds(engine.llm.reset_prefix_cache(reset_connector=True), "not reset")
        equal(engine.ask(prompt, max_tokens=4).hit, 0, "tokens loaded")


def fp8_phase(work, cases):
    """float32 with fp8 caches of both kinds, which vLLM's CPU backend has with AVX-512 alone."""
    import torch

    if not torch.cpu._is_avx512_supported():
        print("    skipped: no AVX-512, so vLLM has no fp8 cache on this CPU")
        return
    root = os.path.join(work, "fp8")
    prompt = read_prompts()["short"]
    whole = len(prompt) // 32 * 32
    seen = set()
    for cache_dtype, in_store in (("fp8", "fp8_e4m3"), ("fp8_e5m2", "fp8_e5m2")):
        engine = Engine(root, "float32", engine_args={"kv_cache_dtype": cache_dtype})
        with cases(f"a prompt is computed, stored, loaded and answered alike with {cache_dtype}"):
            cold, warm = engine.ask(prompt, max_tokens=24), engine.ask(prompt, max_tokens=24)
            equal((cold.hit, warm.hit, warm.level), (0, whole, "L0"), "tokens loaded at first and again, level")
            equal(warm.tokens, cold.tokens, "answer")
        with cases(f"chunks of {cache_dtype} say so"):
            dtypes = set()
            new = set(glob.glob(os.path.join(root_objects(root), "*", "*", "*L0.kv"))) - seen
            seen |= new
            for path in new:
                tool = [os.path.join(BUILD, "codec", "cgtool"), "info", "--json", path]
                dtypes.add(
                    json.loads(subprocess.run(tool, capture_output=True, check=True).stdout)["geometry"]["dtype"]
                )
            equal(dtypes, {in_store}, "types of the chunks that this engine stored")
        engine.llm.llm_engine.engine_core.shutdown()


def root_objects(root):
    return os.path.join(root, NAME, "objects")


PHASES = {
    "cold": cold_phase, "warm": warm_phase, "lossy": lossy_phase, "changed": changed_phase, "ranks": ranks_phase,
    "windows": windows_phase, "fp8": fp8_phase, "brief": brief_phase,
}  # fmt: skip

# ---- the driver ----


def skip(reason):
    if "engine" in os.environ.get("CG_TEST_REQUIRE", "").split(","):
        sys.exit(f"vllm_test: required, but {reason}")
    print(f"SKIPPED: {reason}: loads into vLLM stay unchecked")
    sys.exit(77)


def run(*command, name, title="", killed=False, cpus=None):
    """Runs a phase in a process group of its own, on cpus; its engine's log is shown if it fails."""
    # CG_VLLM_OVERLAY: a folder with another release of vLLM (versions_test.py).
    python_path = [os.path.join(CHECKOUT, "connector"), *filter(None, [os.environ.get("CG_VLLM_OVERLAY")])]
    if cpus:
        command = ["taskset", "-c", ",".join(map(str, cpus)), *command]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": ":".join(python_path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        try:
            # Only the phase's own lines: vLLM's are in between.
            output, _ = process.communicate(timeout=PHASE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            output = ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        lines = [f"== {name}: {title}"] if title else []
        lines += [line for line in output.splitlines() if line.startswith(("ok  ", "FAILED", "    "))]
        as_meant = process.returncode == (-signal.SIGSYS if killed else 0)
        if not as_meant:
            log.seek(0)
            lines.append(f"== {name}: exit status {process.returncode}; the end of its log:")
            lines += [line[:300] for line in (output + log.read()).splitlines()[-60:]]
        print(*lines, sep="\n", end="\n" * bool(lines), flush=True)
        return as_meant


class Phases:
    """The phases in a directory. Each gives the names of what failed."""

    def __init__(self, python, work):
        self.python, self.work = python, work

    def phase(self, name, title, **options):
        command = [self.python, os.path.abspath(__file__), "--phase", name, self.work]
        return [] if run(*command, name=name, title=title, **options) else [name]

    def cold(self, cpus):
        failed = self.phase("cold", "float32, lossless", killed=True, cpus=cpus)
        if not failed and not all_are_whole(self.work):
            failed = ["cold"]
        return failed + self.phase("warm", "a fresh process", cpus=cpus)

    def lossy(self, cpus):
        text = os.path.join(CHECKOUT, "tests/data/calibration/chat_mtbench.txt")
        profile = ["-m", "cachegen.profile", MODEL, "--texts", text, "--tokens", "256", "--group-layers", "5",
                   "--quiet"]  # fmt: skip
        made = run(self.python, *profile, "--out", os.path.join(self.work, "lossy", NAME), name="profile", cpus=cpus)
        return ([] if made else ["profile"]) + self.phase("lossy", "bf16, with a hasty profile", cpus=cpus)

    def changed(self, cpus):
        return self.phase("changed", "weights and adapters", cpus=cpus)

    def windows(self, cpus):
        return self.phase("windows", "windows in some layers and in all", cpus=cpus)

    def fp8(self, cpus):
        return self.phase("fp8", "fp8 caches, lossless", cpus=cpus)

    def brief(self, cpus):
        return self.phase("brief", "the life of a prompt", cpus=cpus)

    def ranks(self, _cpus):  # on all of them
        return self.phase("ranks", "tensor parallel")

    def run_all(self, wanted):
        """Two at once, each with half of the CPUs: an engine's start is Python's imports, and takes one. What needs all
        CPUs comes last."""
        cpus = sorted(os.sched_getaffinity(0))
        halves = queue.SimpleQueue()
        for half in (cpus[::2], cpus[1::2]):
            if half:
                halves.put(half)

        def with_half(name):
            half = halves.get()
            try:
                return getattr(self, name)(half)
            finally:
                halves.put(half)

        with concurrent.futures.ThreadPoolExecutor(halves.qsize()) as pool:
            failed = list(pool.map(with_half, [name for name in wanted if name != "ranks"]))
        if "ranks" in wanted:
            failed.append(self.ranks(None))
        return sum(failed, [])


def main():
    python = os.environ.get("CG_ENGINE_PYTHON") or sys.executable
    has_vllm = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if not os.access(python, os.X_OK) or subprocess.run([python, "-c", has_vllm]).returncode:
        skip("no Python with vLLM (CG_ENGINE_PYTHON; sh configs/dependencies.sh engine)")
    if not os.path.exists(os.path.join(MODEL, "config.json")):
        skip("no model (CG_MODEL_DIR; sh configs/dependencies.sh model)")
    library = os.path.join(BUILD, "connector", "libcachegen.so")
    if not os.path.exists(library):
        sys.exit(f"vllm_test: {library} is missing (CG_BUILD_DIR)")
    # The longest first.
    wanted = sys.argv[1:] or ["cold", "lossy", "changed", "windows", "fp8", "ranks"]
    with tempfile.TemporaryDirectory(prefix="cg-vllm-test.") as work:
        for name in ("store", "changed", "lossy", "ranks", "windows", "fp8"):
            os.makedirs(os.path.join(work, name))
        failed = Phases(python, work).run_all(wanted)
    if failed:
        sys.exit(f"vllm_test: failed: {', '.join(failed)}")


def all_are_whole(work):
    """Whether each chunk is, that the killed engine has left; beside the one that it was about to name."""
    verify = [os.path.join(BUILD, "codec", "cgtool"), "verify"]
    chunks = glob.glob(os.path.join(work, "store", NAME, "objects", "*", "*", "*.kv"))
    verified = subprocess.run([*verify, *chunks], capture_output=True, text=True)
    if verified.returncode != 0 or not chunks:
        print(f"FAILED every chunk of a killed engine is whole\n{verified.stdout[-1000:]}{verified.stderr[-1000:]}")
        return False
    others = glob.glob(os.path.join(work, "store", NAME, "objects", "*", "*", "*"))
    others += glob.glob(os.path.join(work, "store", NAME, "objects", "*", "*", ".*"))
    if len(set(others) - set(chunks)) != 1:
        print(f"FAILED a chunk was just being named: {sorted(set(others) - set(chunks))}")
        return False
    print(f"ok     every one of {len(chunks)} chunks that a killed engine leaves is whole")
    return True


if __name__ == "__main__":
    if sys.argv[1:2] == ["--phase"]:
        all_cases = Cases()
        PHASES[sys.argv[2]](sys.argv[3], all_cases)
        sys.exit(bool(all_cases.failed))
    main()
