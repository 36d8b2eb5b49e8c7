"""The scheduler's side with a library that answers as the test says, and without an engine.

usage: scheduler_test.py
"""

import array
import ctypes
import functools
import hashlib
import json
import math
import os
import sys
import threading
import time
import types
import unittest
import unittest.mock
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "connector"))
try:
    import vllm  # noqa: F401
except ImportError as error:
    print(f"skipped: {error}: no step of a scheduler was planned")
    sys.exit(1 if "engine" in os.environ.get("CG_TEST_REQUIRE", "").split(",") else 77)
from cachegen import abi  # noqa: E402
from cachegen.vllm.after_load import AfterLoad  # noqa: E402
from cachegen.vllm.arrivals import Arrivals  # noqa: E402
from cachegen.vllm.guard import Failures  # noqa: E402
from cachegen.vllm.messages import LoadReport, WorkerReport  # noqa: E402
from cachegen.vllm.request_key import key_tokens, parse_options  # noqa: E402
from cachegen.vllm.scheduler import Scheduler  # noqa: E402
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

CHUNK, BLOCK = 64, 16


class Store:
    """What stands for libcachegen: keeps the last question and all salts, and finds the first `hit` tokens of any
    prompt."""

    def __init__(self, hit=0, answers=True):
        self.hit, self.answers = hit, answers
        self.salts, self.freed, self.forgotten, self.n_polls, self.predicted_ns = [], [], [], 0, 0

    def lookup_start(self, request, from_token, spent_ns, max_kl, no_tail_at_hole):
        self.request, self.spent_ns, self.max_kl, self.no_tail_at_hole = request, spent_ns, max_kl, no_tail_at_hole
        address = ctypes.c_void_p.from_buffer(request, type(request).salt.offset).value  # a salt may hold zeros
        self.salts.append(ctypes.string_at(address, request.salt_bytes))
        return len(self.salts)

    def lookup_poll(self, lookup):
        self.n_polls += 1
        return types.SimpleNamespace(hit_tokens=self.hit, predicted_ns=self.predicted_ns) if self.answers else None

    def lookup_plan(self, lookup):
        return b"plan"

    def lookup_free(self, lookup):
        self.freed.append(lookup)

    def report_load(self, *_numbers):
        pass

    def report_prefill(self, *_numbers):
        pass

    def report_queue(self, *queued):
        self.queued = queued

    def forget_failed(self, plan, load):
        self.forgotten.append((plan, load))


class Library:
    chunk_tokens, tail_tokens, block_tokens = CHUNK, 32, BLOCK
    root, min_tokens, save_on_use = "/store", 0, 1
    keep_level, ttft_budget_ns = 2, 10**9
    worst_level, unknown_level, may_load, may_save = 3, 3, True, True
    needs_plain_positions, image_key = False, ""
    weights = types.SimpleNamespace(doubt=None)
    rank = types.SimpleNamespace(n_ranks=1)

    def __init__(self, cg):
        self.cg, self.waited = cg, []

    def wait(self, seconds):
        self.waited.append(seconds)
        threading.Event().wait(seconds)  # nothing comes


class Manager:
    """vLLM's: how much of its blocks is held."""

    usage, enable_caching = 0.0, True

    def __init__(self):
        self.evicted = set()

    def evict_blocks(self, block_ids):
        self.evicted |= block_ids


def scheduler(store, **fields):
    library = Library(store)
    for name, value in fields.items():
        setattr(library, name, value)
    made = Scheduler(library, Failures())
    made.local_cache.manager = Manager()
    return made


def request(name="r", n_tokens=200, **fields):
    defaults = dict(
        request_id=name, prompt_token_ids=list(range(n_tokens)), prompt_embeds=None, prompt_is_token_ids=None,
        lora_request=None, mm_features=[], cache_salt=None, kv_transfer_params=None,
        skip_reading_prefix_cache=False, arrival_time=time.time(), num_output_tokens=0,
    )  # fmt: skip
    return types.SimpleNamespace(**{**defaults, **fields})


def blocks(n):
    ids = list(range(1, n + 1))
    return types.SimpleNamespace(get_block_ids=lambda: (ids,))


def step_of(name, n_computed, n_scheduled, n_blocks=13, is_new=True):
    """A SchedulerOutput with one request in it; name None: an empty step."""
    new = types.SimpleNamespace(
        req_id=name, num_computed_tokens=n_computed, block_ids=blocks(n_blocks).get_block_ids()
    )
    cached = types.SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set())
    if name is not None and not is_new:
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids = [name], [n_computed], [None]
    return types.SimpleNamespace(
        total_num_scheduled_tokens=n_scheduled if name is not None else 0,
        num_scheduled_tokens={name: n_scheduled},
        scheduled_new_reqs=[new] if name is not None and is_new else [],
        scheduled_cached_reqs=cached,
        kv_connector_block_state=types.SimpleNamespace(get_block_ids=lambda _: blocks(n_blocks).get_block_ids()),
    )


def joined(first, *others):
    """A SchedulerOutput of the requests of several."""
    for other in others:
        first.total_num_scheduled_tokens += other.total_num_scheduled_tokens
        first.num_scheduled_tokens.update(other.num_scheduled_tokens)
        first.scheduled_new_reqs.extend(other.scheduled_new_reqs)
        cached, also = first.scheduled_cached_reqs, other.scheduled_cached_reqs
        cached.req_ids += also.req_ids
        cached.num_computed_tokens += also.num_computed_tokens
        cached.new_block_ids += also.new_block_ids
    return first


class PrefillTest(unittest.TestCase):
    def test_a_step_says_where_its_tokens_stand(self):
        made = scheduler(Store())
        made.matched_tokens(request(n_tokens=400), 0)
        for n_computed, n, want in ((0, 100, 5000), (100, 200, 40000), (300, 100, 35000)):
            metadata = made.step(step_of("r", n_computed, n, 26, n_computed == 0))
            self.assertEqual((metadata.prefill_tokens, metadata.prefill_pairs), (n, want))


class QueueTest(unittest.TestCase):
    """What the engine has to compute, and in which order requests come to it."""

    def queued(self, made, *step):
        metadata = made.step(step_of(*step))
        self.assertEqual(made.library.cg.queued, (metadata.queued_tokens, metadata.queued_pairs))
        return metadata.queued_tokens, metadata.queued_pairs

    def test_steps_tell_what_the_engine_is_to_compute(self):
        made = scheduler(Store(hit=128))
        self.assertEqual(self.queued(made, None, 0, 0), (0, 0))
        made.matched_tokens(request("r", 300), 0)  # the store has 128
        self.assertEqual(self.queued(made, None, 0, 0), (172, 172 * 214))
        made.update_after_alloc(request("r", 300), blocks(19), 128)
        self.assertEqual(self.queued(made, None, 0, 0)[0], 172, "it loads")
        made.take_report(WorkerReport(loads={"r": LoadReport(64, 1)}))
        self.assertEqual(self.queued(made, None, 0, 0)[0], 236, "it loaded half of that")
        self.assertEqual(self.queued(made, "r", 64, 100)[0], 236, "with what this step computes")
        self.assertEqual(self.queued(made, "r", 164, 136, 19, False), (136, 136 * 232))
        self.assertEqual(self.queued(made, "r", 300, 1, 19, False), (0, 0))
        made.matched_tokens(request("without a key", 80, prompt_embeds=object()), 0)
        self.assertEqual(self.queued(made, None, 0, 0)[0], 80)
        made.finish(request("without a key"), ((),))
        self.assertEqual(self.queued(made, None, 0, 0)[0], 0)

    def test_what_is_preempted_is_to_be_computed_and_what_others_load_is_not(self):
        made = scheduler(Store(hit=0))
        made.matched_tokens(request("r", 300), 0)
        made.update_after_alloc(request("r", 300), blocks(19), 0)
        self.assertEqual(self.queued(made, None, 0, 0)[0], 0, "another connector loads it, or it had begun")
        self.assertEqual(self.queued(made, "r", 0, 300)[0], 300)
        self.assertEqual(self.queued(made, "r", 300, 1, 19, False)[0], 0)
        preempted = step_of(None, 0, 0)
        preempted.preempted_req_ids = {"r", "another one"}
        self.assertEqual(made.step(preempted).queued_tokens, 300)

    def test_a_look_up_that_fails_leaves_all_to_the_engine(self):
        made = scheduler(Store(hit=128, answers=False))
        made.matched_tokens(request("r", 300), 0)
        self.assertEqual(self.queued(made, None, 0, 0)[0], 0)
        made.library.cg.answers = True
        made.library.cg.lookup_plan = None  # not to be called
        self.assertEqual(self.queued(made, None, 0, 0)[0], 300)
        self.assertEqual(made.matched_tokens(request("r", 300), 0), (0, False))

    def test_a_look_up_without_an_answer_leaves_nothing_to_the_engine_yet(self):
        store = Store(hit=64, answers=False)
        made = scheduler(store)
        made.matched_tokens(request("r", 300), 0)
        self.assertEqual(self.queued(made, None, 0, 0)[0], 0)
        store.answers = True
        self.assertEqual(self.queued(made, None, 0, 0)[0], 236, "answered since vLLM asked")
        self.assertEqual(made.matched_tokens(request("r", 300), 0), (64, True))

    def test_what_is_computed_lets_loads_of_others_start(self):
        store = Store(hit=0, answers=False)
        made = scheduler(store)
        asked = [request(name, 300) for name in ("first", "second")]
        for one in asked:
            self.assertEqual(made.matched_tokens(one, 0), (None, False))
        made.step(step_of(None, 0, 0))
        store.answers = True
        self.assertTrue(made._lookups._take_answer(made.states["first"]))
        store.hit = 128  # of the second one, which vLLM asks for later
        self.assertEqual(made.matched_tokens(asked[0], 0), (None, False))
        self.assertEqual(made.matched_tokens(asked[1], 0), (128, True))
        self.assertEqual(made.matched_tokens(asked[0], 0), (None, False), "vLLM may have no blocks for the second")
        made.states["first"].deferred_ns -= 10**8
        self.assertEqual(made.matched_tokens(asked[0], 0), (0, False), "not for ever")
        made.states["first"].deferred_ns = 0
        made.update_after_alloc(asked[1], blocks(19), 128)
        self.assertEqual(made.matched_tokens(asked[0], 0), (0, False), "it has started")
        store.hit = 0
        made.step(step_of(None, 0, 0))
        made.matched_tokens(request("third", 300), 0)
        self.assertEqual(made.states["third"].deferred_ns, 0, "nobody is about to load")


class WishesTest(unittest.TestCase):
    def test_the_budget_begins_with_the_arrival_and_a_bound_of_kl_is_passed_on(self):
        store = Store()
        made = scheduler(store)
        asked = request(arrival_time=time.time() - 1000, kv_transfer_params={"cachegen.quality": 0.02})
        made.matched_tokens(asked, 0)
        self.assertGreaterEqual(store.spent_ns, 1000 * 10**9)
        self.assertEqual(store.max_kl, 0.02)
        made.matched_tokens(request("later", arrival_time=time.time() + 1000), 0)
        self.assertEqual(store.spent_ns, 0)  # a clock that was set back
        self.assertEqual(store.max_kl, 0)

    def test_what_is_found_ends_before_a_chunk_that_is_to_be_stored(self):
        store = Store(hit=CHUNK)
        made = scheduler(store)
        self.assertEqual(made.matched_tokens(request(n_tokens=2 * CHUNK), 0), (CHUNK, True))
        self.assertTrue(store.no_tail_at_hole, "the plan's budget and levels count what is loaded alone")
        store.hit = 2 * CHUNK - 1  # the engine computes the last token itself
        self.assertEqual(made.matched_tokens(request("all", n_tokens=2 * CHUNK), 0), (2 * CHUNK - 1, True))

    def test_what_a_request_wishes_reaches_the_look_up(self):
        store = Store()
        made = scheduler(store)
        for name, wishes, passed_on in (
            ("worst level", {"cachegen.worst_level": "L2"}, (3, 0, 0)),
            ("level", {"cachegen.level": "l0"}, (0, 1, 0)),
            ("budget", {"cachegen.ttft_budget_ms": 500}, (0, 0, 500 * 10**6)),
            ("all", {f"cachegen.{key}": "L1" for key in ("worst_level", "level")}, (2, 2, 0)),
            ("none", None, (0, 0, 0)),
        ):
            with self.subTest(name):
                made.matched_tokens(request(name, kv_transfer_params=wishes), 0)
                asked = store.request
                self.assertEqual((asked.worst_level_plus_1, asked.level_plus_1, asked.ttft_budget_ns), passed_on)

    def test_a_wish_that_cannot_be_followed_is_told_why(self):
        made = scheduler(Store(hit=128))
        for wishes, named in (
            ({"cachegen.level": "L5"}, "cachegen.level: 'L5'"),
            ({"cachegen.worst_level": 1}, "cachegen.worst_level: 1"),
            ({"cachegen.ttft_budget_ms": "fast"}, "cachegen.ttft_budget_ms: 'fast'"),
            ({"cachegen.ttft_budget_ms": math.nan}, "cachegen.ttft_budget_ms"),
            ({"cachegen.ttft_budget_ms": 0}, "cachegen.ttft_budget_ms: 0"),
            ({"cachegen.ttft_budget_ms": -5}, "cachegen.ttft_budget_ms: -5"),
            ({"cachegen.ttft_budget_ms": True}, "cachegen.ttft_budget_ms: True"),
            ({"cachegen.quality": [1]}, "cachegen.quality: [1]"),
            ({"cachegen.quality": 0}, "cachegen.quality: 0"),
            ({"cachegen.quality": True}, "cachegen.quality: True"),
            ({"cachegen.quality": 0.1, "cachegen.level": "L1"}, "cachegen.level"),
            ({"cachegen.level": "L3", "cachegen.worst_level": "L1"}, "cachegen.level L3"),
            ({"cachegen.contex": "name"}, "'cachegen.contex' is unknown"),
        ):
            with self.subTest(wishes):
                asked = request(kv_transfer_params=wishes)
                self.assertEqual(made.matched_tokens(asked, 0), (0, False))
                made.update_after_alloc(asked, blocks(13), 0)
                self.assertEqual(made.step(step_of("r", 0, 200)).saves, [])
                answer = made.finish(asked, [])
                self.assertEqual(answer.keys(), {"cachegen.hit_tokens", "cachegen.refused"})
                self.assertIn(named, answer["cachegen.refused"])
                self.assertLess(len(answer["cachegen.refused"]), 200)

    def test_what_others_wish_and_what_an_answer_tells_is_passed_over(self):
        made = scheduler(Store(hit=128))
        asked = request(kv_transfer_params={"do_remote_prefill": True})
        self.assertEqual(made.matched_tokens(asked, 0), (128, True))
        made.update_after_alloc(asked, blocks(13), 128)
        made.take_report(WorkerReport(loads={"r": LoadReport(128, 1)}))
        self.assertNotIn("cachegen.refused", answer := made.finish(asked, []))
        answer["cachegen.context"] = "report@0123456789abcdef"  # as it is in the store, where requests have a salt
        self.assertEqual(answer["cachegen.level"], "L1")
        for name, wishes, max_kl in (("next", {}, 0), ("merged", {"cachegen.quality": 0.02}, 0.02)):
            with self.subTest(name):
                asked = request(name, kv_transfer_params={**wishes, **answer}, cache_salt="tenant")
                self.assertEqual(made.matched_tokens(asked, 0), (128, True))
                self.assertEqual((made.library.cg.request.level_plus_1, made.library.cg.max_kl), (0, max_kl))
                self.assertIsNone(made.states[name].options.context)

    def test_a_budget_without_end_is_a_long_one_and_one_next_to_nothing_is_not_the_configured_one(self):
        # The library takes 64 bits of ns: 18446744073710 ms would come around to half a millisecond. 0 ns are the
        # configuration's to it.
        day_ns = 86400 * 10**9
        for budget_ms, want_ns in (
            (1.5, 1_500_000), (18446744073710, day_ns), (float("inf"), day_ns), (1e-7, 1), (5e-324, 1),
        ):  # fmt: skip
            with self.subTest(budget_ms):
                options = parse_options({"cachegen.ttft_budget_ms": budget_ms})
                passed_on = abi.make_request(array.array("I", [1]), ttft_budget_ns=options.ttft_budget_ns)
                self.assertEqual(passed_on.ttft_budget_ns, want_ns)


class AfterLoadTest(unittest.TestCase):
    MS = 10**6

    def ahead_ms(self, after, others_due=()):
        return after.ahead(1000 * self.MS, sorted(ms * self.MS for ms in others_due), 500 * self.MS) / self.MS

    def test_what_the_engine_took_is_left_and_of_what_varies_more(self):
        after = AfterLoad()
        self.assertEqual(self.ahead_ms(after, [900, 1000]), 0)
        after.note_step(20 * self.MS)
        self.assertGreaterEqual(self.ahead_ms(after), 40)
        for i in range(50):
            after.note(i * 10**9, i * 10**9 + 80 * self.MS, 500 * self.MS, 0)
        self.assertAlmostEqual(self.ahead_ms(after), 80, delta=1)
        for i in range(50, 100):
            after.note(i * 10**9, i * 10**9 + (60, 100)[i % 2] * self.MS, 500 * self.MS, 0)
        self.assertGreater(self.ahead_ms(after), 100)

    def test_others_that_are_due_shortly_before_are_computed_before(self):
        after = AfterLoad()
        for i in range(50):
            after.note(i * 10**9, i * 10**9 + 80 * self.MS, 500 * self.MS, 0)
        self.assertAlmostEqual(self.ahead_ms(after, [999, 1002]), 160, delta=2)  # each as long, until that is known
        at = 100 * 10**9
        for _ in range(50):  # three in a step, and a fourth in the next one
            at += 10**9
            for n_left in (2, 1, 0):
                after.note(at, at + 140 * self.MS, 500 * self.MS, n_left)
            after.note(at, at + 170 * self.MS, 500 * self.MS, 0)
        self.assertAlmostEqual(self.ahead_ms(after), 80, delta=1)
        self.assertAlmostEqual(self.ahead_ms(after, [999, 998, 997, 1002]), 80 + 3 * 30, delta=5)
        self.assertAlmostEqual(self.ahead_ms(after, [999, 600]), 80 + 30, delta=2)
        self.assertAlmostEqual(self.ahead_ms(after, [999, 895, 600]), 80 + 2 * 30, delta=4)

    def test_a_request_that_comes_with_others_leaves_them_time(self):
        store = Store(hit=128, answers=False)
        made = scheduler(store)
        now = time.time()
        made._budgets._after_load.note(0, 50 * self.MS, 10**9, 0)
        spent_ms = []
        for i in range(3):
            made.matched_tokens(request(f"r{i}", arrival_time=now), 0)
            spent_ms.append(store.spent_ns / self.MS)
        self.assertGreaterEqual(spent_ms[0], 50)
        self.assertGreaterEqual(spent_ms[1], 2 * 50)
        self.assertGreaterEqual(spent_ms[2], 3 * 50)
        made.finish(request("r0"), ((),))
        made.finish(request("r1"), ((),))
        made.step(step_of(None, 0, 0))
        made.matched_tokens(request("r3", arrival_time=now), 0)
        self.assertLess(store.spent_ns / self.MS, spent_ms[2])

    def test_steps_tell_how_much_is_being_looked_up(self):
        made = scheduler(Store(hit=128, answers=False))
        for name, n_tokens in (("r", 200), ("s", 300)):
            made.matched_tokens(request(name, n_tokens), 64 if name == "s" else 0)
        self.assertEqual(made.step(step_of(None, 0, 0)).asked_tokens, 200 + 300 - 64)
        made.library.cg.answers = True
        made.matched_tokens(request("s", 300), 64)
        self.assertEqual(made.step(step_of(None, 0, 0)).asked_tokens, 200)
        made.states["r"].lookup_started_ns -= 10**9
        self.assertEqual(made.step(step_of(None, 0, 0)).asked_tokens, 0)


class ArrivalsTest(unittest.TestCase):
    """A request waits 2 s; the wall clock is set an hour on or back before it comes, meanwhile, or long before."""

    def setUp(self):
        self.wall, self.now = 1e9, 5000.0
        clock = types.SimpleNamespace(time=lambda: self.wall, monotonic=lambda: self.now)
        patch = mock.patch("cachegen.vllm.arrivals.time", clock)
        patch.start()
        self.addCleanup(patch.stop)

    def passes(self, seconds):
        self.wall, self.now = self.wall + seconds, self.now + seconds

    def test_steps_of_the_wall_clock_change_no_wait(self):
        for step in (0, 3600, -3600):
            for when in ("before", "meanwhile", "long before"):
                with self.subTest(f"{step} s {when}"):
                    arrivals = Arrivals()
                    self.passes(100)
                    arrivals.seconds_since(self.wall)
                    self.wall += step if when != "meanwhile" else 0
                    if when == "long before":
                        arrivals.seconds_since(self.wall)
                        self.passes(100)
                    arrived = self.wall
                    self.passes(2)
                    self.wall += step if when == "meanwhile" else 0
                    self.assertAlmostEqual(arrivals.seconds_since(arrived), 2)

    def test_a_setting_from_long_ago_shortens_no_wait(self):
        arrivals = Arrivals()
        self.wall += 10
        for _ in range(2):
            arrivals.seconds_since(self.wall)
            self.passes(100)
        self.assertAlmostEqual(arrivals.seconds_since(self.wall - 12), 12)


class ResetTest(unittest.TestCase):
    """After reset() nothing that was stored before is found, and nothing computed before is stored."""

    def admit(self, made, asked, n_external=0):
        self.assertEqual(made.matched_tokens(asked, 0), (n_external, n_external > 0))
        made.update_after_alloc(asked, blocks(13), n_external)

    def test_the_keys_of_what_comes_later_have_another_root(self):
        store = Store()
        made = scheduler(store)
        for name, salt in (("a", None), ("b", "tenant")):
            made.matched_tokens(request(name, cache_salt=salt), 0)
        self.assertTrue(made.reset())
        self.admit(made, request("c"))
        self.admit(made, request("d", cache_salt="tenant"))
        saves = made.step(step_of("c", 0, 200)).saves
        self.assertEqual(store.salts[:2], [b"", b"tenant"])
        root = store.salts[2]
        self.assertGreaterEqual(len(root), 16)
        self.assertEqual(store.salts[3], root + b"tenant")
        self.assertEqual([save.salt for save in saves], [root])
        made.reset()
        self.admit(made, request("e"))
        self.assertNotIn(store.salts[4], (b"", root))

    def test_a_request_that_waits_asks_again(self):
        store = Store(hit=192, answers=False)
        made = scheduler(store)
        self.assertEqual(made.matched_tokens(request(), 0), (None, False))
        made.reset()
        self.assertEqual(store.freed, [1])
        store.answers, store.hit = True, 0
        self.admit(made, request())
        self.assertNotEqual(store.salts[1], store.salts[0])

    def test_a_request_that_is_over_leaves_no_look_up(self):
        store = Store(answers=False)
        made = scheduler(store)
        made.matched_tokens(request(), 0)
        made.finish(request(), [])
        self.assertEqual(store.freed, [1])
        made.step(step_of(None, 0, 0))
        self.assertEqual(store.n_polls, 1)

    def test_an_answer_that_was_not_used_is_none_any_more(self):
        store = Store(hit=192)
        made = scheduler(store)
        self.assertEqual(made.matched_tokens(request(), 0), (192, True))  # vLLM had no blocks for it
        made.reset()
        store.hit = 0
        self.admit(made, request())

    def test_a_load_under_way_is_given_up(self):
        for is_planned_only in (True, False):
            with self.subTest(is_planned_only):
                made = scheduler(Store(hit=192))
                self.admit(made, request(), n_external=192)
                if not is_planned_only:
                    self.assertEqual(len(made.step(step_of(None, 0, 0)).loads), 1)
                made.reset()
                metadata = made.step(step_of(None, 0, 0))
                self.assertEqual(len(metadata.loads), is_planned_only)
                self.assertEqual(metadata.cancelled_loads, {"r"})

    def test_a_request_that_runs_on_is_not_stored_under_any_root(self):
        made = scheduler(Store())
        self.admit(made, request())
        (save,) = made.step(step_of("r", 0, 128)).saves
        made.reset()
        self.assertEqual(made.step(step_of("r", 128, 72, is_new=False)).saves, [])
        self.admit(made, request("s"))
        (later,) = made.step(step_of("s", 0, 200)).saves
        self.assertEqual((save.number, later.number), (1, 2))  # ranks tell by it what belongs together

    def test_a_preempted_request_is_stored_under_the_new_root(self):
        store = Store()
        made = scheduler(store)
        self.admit(made, request())
        made.step(step_of("r", 0, 128))
        made.reset()
        self.admit(made, request())
        saves = made.step(step_of("r", 0, 200)).saves
        self.assertEqual([(save.salt, save.from_token) for save in saves], [(store.salts[-1], 0)])
        self.assertNotEqual(store.salts[-1], b"")

    def test_nothing_is_stored_while_vllm_keeps_its_own_blocks(self):
        made = scheduler(Store())
        made.local_cache.manager.usage = 0.5
        self.assertFalse(made.reset())
        self.admit(made, request())
        self.assertEqual(made.step(step_of("r", 0, 200)).saves, [])
        made.local_cache.manager.usage = 0.0
        self.assertTrue(made.reset())
        self.admit(made, request("s"))
        self.assertEqual(len(made.step(step_of("s", 0, 200)).saves), 1)


class SharedLoadTest(unittest.TestCase):
    """Request "a" loads 192 tokens. "b" wants them, too."""

    def setUp(self):
        self.store = Store(hit=192)
        self.made = scheduler(self.store)
        self.leads()

    def leads(self, **fields):
        leader = request("a", **fields)
        self.assertEqual(self.made.matched_tokens(leader, 0), (192, True))
        self.made.update_after_alloc(leader, blocks(13), 192)
        self.made.step(step_of(None, 0, 0))

    def ends(self, loaded_tokens=192):
        self.made.take_report(WorkerReport(loads={"a": LoadReport(loaded_tokens, worst_level=2)}))

    def follows(self, **fields):
        return self.made.matched_tokens(request("b", **fields), 0) == (None, False)

    def n_shared(self):
        self.store.get_stats = lambda: types.SimpleNamespace(
            as_dict=lambda: dict(lookups=0, lookup_errors=0, lookups_skipped=0, staging_bytes=0)
        )
        return self.made.counters()["loads_shared"]

    def test_it_waits_and_takes_the_blocks(self):
        self.assertTrue(self.follows())
        self.ends()
        self.assertTrue(self.follows())  # vLLM knows the blocks when it schedules "a"
        self.made.step(step_of("a", 192, 8))
        self.made.local_cache.manager.get_computed_blocks = lambda _request: (blocks(12), 192)
        self.assertEqual(self.made.matched_tokens(request("b"), 192), (0, False))
        self.assertEqual(self.n_shared(), 1)

    def test_what_comes_behind_may_differ(self):
        self.assertTrue(self.follows(prompt_token_ids=[*range(195), *range(1000, 1100)]))

    def test_it_waits_for_half_of_what_it_lacks_and_loads_the_rest(self):
        for n_common, n_shared in ((192, 192), (191, 176), (128, 128), (127, None), (0, None)):
            with self.subTest(n_common):
                self.setUp()
                self.store.hit = 256
                asked = request("b", prompt_token_ids=[*range(n_common), *range(1000, 1300 - n_common)])
                if n_shared is None:
                    self.assertEqual(self.made.matched_tokens(asked, 0), (256, True))
                    continue
                self.assertEqual(self.made.matched_tokens(asked, 0), (None, False))
                self.ends()
                self.made.step(step_of("a", 192, 8))
                self.made.local_cache.manager.get_computed_blocks = lambda _, n=n_shared: (blocks(n // BLOCK), n)
                self.assertEqual(self.made.matched_tokens(asked, n_shared), (256 - n_shared, True))
                self.made.update_after_alloc(asked, blocks(17), 256 - n_shared)
                load = self.made.step(step_of(None, 0, 0)).loads[0]
                self.assertEqual((load.from_token, load.to_token), (n_shared, 256))
                self.assertEqual(self.n_shared(), 1)

    def test_of_several_it_waits_for_the_one_that_brings_most(self):
        self.made.update_after_alloc(request("c"), blocks(13), 0)
        self.store.hit = 256
        asked = request("d", n_tokens=300)
        longer = request("e", n_tokens=300, kv_transfer_params={"cachegen.level": "L1"})  # so it waits for nobody
        self.assertEqual(self.made.matched_tokens(longer, 0), (256, True))
        self.made.states["e"].options.level = None
        self.made.update_after_alloc(longer, blocks(17), 256)
        self.assertEqual(self.made.matched_tokens(asked, 0), (None, False))
        self.assertEqual(self.made.states["d"].follows, "e")

    def test_the_rest_takes_its_time_too(self):
        budget_ns = self.made.library.ttft_budget_ns
        for other, own, spent, waits in (
            (0.3, 0.2, 0, True), (0.3, 0.9, 0, True), (0.8, 0.6, 0, True),  # a quarter of its own is left to load
            (0.3, 0.9, 0.55, False),  # there is time for the other one's, and not for the rest
            (0.9, 0.9, 0, False),
            (0, 0.2, 0, False),  # nothing is known of the other one
        ):  # fmt: skip
            with self.subTest(f"{other} {own} {spent}"), mock.patch("time.monotonic_ns", lambda: 10**15):
                self.setUp()
                self.store.hit = 256
                self.made.states["a"].predicted_ns = int(other * budget_ns)
                self.made.states["a"].answered_ns = 10**15
                self.store.predicted_ns = int(own * budget_ns)
                asked = request("b", n_tokens=300, arrival_time=time.time() + 1000 - spent * budget_ns / 1e9)
                arrivals = self.made._lookups._arrivals
                with mock.patch.object(arrivals, "seconds_since", lambda _: spent * budget_ns / 1e9):
                    self.assertEqual(self.made.matched_tokens(asked, 0) == (None, False), waits)

    def test_it_loads_itself_what_is_not_what_the_other_loads(self):
        for what in (
            {"prompt_token_ids": [*range(90), 7, *range(91, 200)]},
            {"prompt_token_ids": [7, *range(1, 200)]},
            {"cache_salt": "tenant"},
            {"kv_transfer_params": {"cachegen.worst_level": "L2"}},
            {"kv_transfer_params": {"cachegen.level": "L1"}},
            {"kv_transfer_params": {"cachegen.quality": 0.01}},
            {"kv_transfer_params": {"cachegen.ttft_budget_ms": 500}},
            {"arrival_time": time.time() - 1000},  # its time is over
        ):
            with self.subTest(what):
                self.assertFalse(self.follows(**what))
                self.made.finish(request("b"), [])
        self.store.hit = 448
        self.assertFalse(self.follows(n_tokens=500))  # less than half of it
        self.assertEqual(self.n_shared(), 0)

    def test_without_a_cache_of_vllms_it_loads_itself(self):
        self.made.local_cache.manager.enable_caching = False
        self.assertFalse(self.follows())

    def test_a_load_that_fails_is_waited_for_no_more(self):
        self.assertTrue(self.follows())
        self.ends(loaded_tokens=64)
        self.assertFalse(self.follows())

    def test_an_aborted_request_is_waited_for_no_more(self):
        self.assertTrue(self.follows())
        self.made.finish(request("a"), [])
        self.assertFalse(self.follows())

    def test_a_preempted_request_is_waited_for_no_more(self):
        self.assertTrue(self.follows())
        self.store.hit = 0
        self.made.matched_tokens(request("a"), 0)
        self.store.hit = 192
        self.assertFalse(self.follows())

    def test_it_waits_for_no_longer_than_its_budget(self):
        self.assertTrue(self.follows())
        self.made.states["b"].spent_ns += self.made.library.ttft_budget_ns
        self.assertFalse(self.follows())


    def follows_until(self, predicted_ns=0, own_ns=0):
        """Up to what share of its budget "b" waits for "a", which never ends, in steps of a tenth."""
        now_ns, budget_ns = 10**15, self.made.library.ttft_budget_ns
        with mock.patch("time.monotonic_ns", lambda: now_ns):
            self.setUp()
            self.made.states["a"].predicted_ns, self.store.predicted_ns = predicted_ns, own_ns
            asked = request("b", arrival_time=time.time() + 1000)
            n = 0
            while self.made.matched_tokens(asked, 0) == (None, False):
                now_ns += budget_ns // 10
                n += 1
                self.assertLess(n, 20)
        return n / 10

    def test_a_load_that_is_late_is_waited_for_while_there_is_time_for_one_of_its_own(self):
        budget_ns = self.made.library.ttft_budget_ns
        for predicted, own, until in (
            (0, 0, 0.5), (0, 0.2, 0.8), (0, 0.9, 0.5),  # nothing is known of the other one
            (0.3, 0.2, 0.8), (0.6, 0.5, 0.8),  # late from 0.375 and 0.75 on
            (0.9, 0.2, 1), (0.9, 0.9, 1),  # on time, as on a link that is slow for all
            (1.5, 0.2, 0.8),  # it will be late
        ):  # fmt: skip
            with self.subTest(f"{predicted} {own}"):
                self.assertEqual(self.follows_until(int(predicted * budget_ns), int(own * budget_ns)), until)

    def test_a_load_that_has_ended_is_waited_for_until_vllm_knows_its_blocks(self):
        self.assertTrue(self.follows())
        self.ends()
        self.made.states["b"].spent_ns += self.made.library.ttft_budget_ns * 8 // 10
        self.assertTrue(self.follows())


class BurstTest(unittest.TestCase):
    """Many requests that come at once cost a step no more than so many times what one does."""

    N = 300

    def counted(self, made, name):
        """A method of an object; its call_count grows from now on."""
        method = mock.patch.object(made, name, wraps=getattr(made, name)).start()
        self.addCleanup(mock.patch.stopall)
        return method

    def asked(self, n_common):
        """Of 300 tokens each."""
        first_own = range(1000, 1000 * (self.N + 1), 1000)
        prompts = ([*range(n_common), *range(own, own + 300 - n_common)] for own in first_own)
        return [request(f"r{i}", prompt_token_ids=prompt) for i, prompt in enumerate(prompts)]

    def test_each_looks_only_at_loads_that_begin_as_it_does(self):
        for n_common, n_loads in ((96, self.N), (192, 1)):  # of 256 that are found
            with self.subTest(n_common):
                made = scheduler(Store(hit=256), ttft_budget_ns=10**15)
                n_serves = self.counted(made._shared_loads, "_n_serves")
                has_time_for = self.counted(made._shared_loads, "_has_time_for")
                n_loading = 0
                for one in self.asked(n_common):
                    if made.matched_tokens(one, 0) == (256, True):
                        made.update_after_alloc(one, blocks(17), 256)
                        n_loading += 1
                self.assertEqual(n_loading, n_loads)
                self.assertEqual(len(made.step(step_of(None, 0, 0)).loads), n_loads)
                self.assertLessEqual(n_serves.call_count, self.N)
                self.assertLessEqual(has_time_for.call_count, 2 * self.N)
                made.take_report(WorkerReport(loads={f"r{i}": LoadReport(256, 2) for i in range(n_loads)}))
                made.step(step_of("r0", 256, 44, 19))
                for one in self.asked(n_common)[:n_loads]:
                    made.finish(one, [])
                self.assertEqual((made._shared_loads._loading, made._shared_loads._sorted), ({}, {}))

    def test_each_that_is_computed_looks_at_few_that_may_load(self):
        store = Store(hit=256)
        made = scheduler(store)
        first, *others = self.asked(0)
        may_load, computed = others[: self.N // 2], others[self.N // 2 :]
        for one in may_load:
            self.assertEqual(made.matched_tokens(one, 0), (256, True))  # vLLM has no blocks for it
        made.step(step_of(None, 0, 0))
        store.hit = 0
        is_about_to_load = self.counted(made._deferrals, "_is_about_to_load")
        self.assertEqual(made.matched_tokens(first, 0), (None, False))
        for one in may_load:
            self.assertEqual(made.matched_tokens(one, 0), (256, True))
            made.update_after_alloc(one, blocks(17), 256)
        for one in computed:
            self.assertEqual(made.matched_tokens(one, 0), (0, False))
        self.assertLessEqual(is_about_to_load.call_count, 2 * self.N)

    def test_a_step_asks_each_look_up_once(self):
        made = scheduler(Store(answers=False))
        for n_steps in range(1, 4):
            for one in self.asked(96):
                made.matched_tokens(one, 0)
            made.step(step_of(None, 0, 0))
            self.assertEqual(made.library.cg.n_polls, n_steps * self.N)


def adapter(name="a", number=1, **fields):
    return types.SimpleNamespace(lora_name=name, lora_path="/nowhere", lora_int_id=number, **fields)


class AdapterTest(unittest.TestCase):
    """An adapter is what the workers say."""

    def setUp(self):
        self.n_asked = 0
        self.store = Store()
        self.made = scheduler(self.store)

    def told(self, asked, identity, rank=0):
        """The workers' report of what they were asked for in the next step."""
        found = [lora.lora_int_id for lora in self.made.step(step_of(None, 0, 0)).adapters]
        self.assertEqual(found, asked)
        self.made.take_report(WorkerReport(adapters={number: {rank: identity} for number in asked}))

    def save(self, lora, identity, n_local=0):
        """What is saved of a request with an adapter of which the worker says identity; None: nothing."""
        self.n_asked += 1
        asked = request(f"r{self.n_asked}", lora_request=lora)
        if self.made.matched_tokens(asked, n_local) == (None, False):
            self.told([lora.lora_int_id], identity)
        self.assertEqual(self.made.matched_tokens(asked, n_local), (0, False))
        self.made.update_after_alloc(asked, blocks(13), 0)
        saves = self.made.step(step_of(asked.request_id, 0, 200)).saves
        return saves[0] if saves else None

    def test_adapters_are_told_apart_by_content_and_name(self):
        found = []
        for which in (("a", 1), ("b", 2), ("c", 3)):
            found.append(self.save(adapter(*which), which[-1]).extra)
            self.assertEqual(self.store.request.extra, found[-1], "looked up as it is stored")
        self.assertEqual(len(set(found)), 3)
        self.assertEqual(self.save(adapter("d", 4), "x").extra, self.save(adapter("d", 5), "x").extra)

    def test_what_is_planned_is_for_that_content_alone(self):
        self.assertEqual(self.save(adapter(number=7), "x").adapter, (7, "x"))
        self.made = scheduler(Store(hit=CHUNK))
        asked = request("loads", lora_request=adapter(number=7))
        self.assertEqual(self.made.matched_tokens(asked, 0), (None, False))
        self.told([7], "x")
        self.assertEqual(self.made.matched_tokens(asked, 0), (CHUNK, True))
        self.made.update_after_alloc(asked, blocks(13), CHUNK)
        self.assertEqual(self.made.step(step_of(None, 0, 0)).loads[0].adapter, (7, "x"))

    def test_what_no_worker_can_tell_is_neither_stored_nor_served(self):
        self.assertIsNone(self.save(adapter(), None))
        self.assertIsNone(self.save(adapter(number=2, load_inplace=True), "never asked"))
        self.assertEqual(self.store.salts, [])

    def test_each_request_asks_once_and_all_that_wait_get_the_answer(self):
        first, second = (request(name, lora_request=adapter()) for name in "ab")
        for asked in (first, second, first):
            self.assertEqual(self.made.matched_tokens(asked, 0), (None, False))
        self.told([1], "x")
        for asked in (first, second):
            self.assertEqual(self.made.matched_tokens(asked, 0), (0, False))
        self.assertEqual(len(self.store.salts), 2)
        third = request("c", lora_request=adapter())  # vLLM may have dropped the adapter meanwhile
        self.assertEqual(self.made.matched_tokens(third, 0), (None, False))
        self.told([1], "y")

    def test_ranks_that_hold_different_contents_cannot_tell(self):
        for number, identities, is_known in ((1, "xx", True), (2, "xy", False)):
            self.made.library.rank = types.SimpleNamespace(n_ranks=2)
            self.made._adapters._n_ranks = 2
            asked = request(f"r{number}", lora_request=adapter(identities, number))
            self.assertEqual(self.made.matched_tokens(asked, 0), (None, False))
            self.told([number], identities[0])
            self.assertEqual(self.made.matched_tokens(asked, 0), (None, False))  # the other rank has yet to answer
            self.made.take_report(WorkerReport(adapters={number: {1: identities[1]}}))
            self.assertEqual(self.made.matched_tokens(asked, 0), (0, False))
            self.assertEqual(self.made.states[asked.request_id].extra is not None, is_known)

    def test_a_rank_that_cannot_tell_is_answer_enough(self):
        for number, who in ((1, 1), (2, None)):  # None: one that is disabled
            with self.subTest(who):
                self.made._adapters._n_ranks = 2
                asked = request(f"r{number}", lora_request=adapter(number=number))
                self.assertEqual(self.made.matched_tokens(asked, 0), (None, False))
                self.told([number], None, rank=who)
                self.assertEqual(self.made.matched_tokens(asked, 0), (0, False))
                self.assertIsNone(self.made.states[asked.request_id].extra)

    def test_an_answer_that_does_not_come_costs_its_request_the_cache_and_no_more(self):
        with mock.patch("cachegen.vllm.scheduler.ADAPTER_WAIT_S", 0):
            asked = request(lora_request=adapter())
            self.assertEqual(self.made.matched_tokens(asked, 0), (0, False))
        self.told([1], "too late")
        self.assertIsNone(self.made.states["r"].extra)

    def ask(self, name, number, identity, n_local=4 * BLOCK):
        """What matched_tokens() says to a request of which vLLM has n_local tokens, in blocks 1, 2 ..."""
        n_blocks = n_local // BLOCK
        self.made.local_cache.manager.get_computed_blocks = lambda _request: (blocks(n_blocks), n_local)
        asked = request(name, lora_request=adapter(number=number))
        self.assertEqual(self.made.matched_tokens(asked, n_local), (None, False))
        self.told([number], identity)
        return self.made.matched_tokens(asked, n_local)

    def test_where_a_name_has_had_two_contents_vllm_keeps_blocks_of_the_asked_one_alone(self):
        self.save(adapter(), "x")
        self.assertEqual(self.ask("same", 1, "x"), (0, False))
        self.assertEqual(self.ask("other", 2, "y"), (None, False))  # asked again, without the blocks
        self.assertEqual(self.made.local_cache.manager.evicted, {1, 2, 3, 4})
        other = request("other", lora_request=adapter(number=2))
        self.assertEqual(self.made.matched_tokens(other, 0), (0, False))
        self.made.update_after_alloc(other, blocks(2), 0)
        self.made.local_cache.manager.evicted = set()
        self.assertEqual(self.ask("again", 2, "y", n_local=2 * BLOCK), (0, False))
        self.assertEqual(self.ask("partly", 2, "y"), (None, False))
        self.assertEqual(self.made.local_cache.manager.evicted, {3, 4})
        self.assertEqual(self.made.matched_tokens(request("plain"), 4 * BLOCK), (0, False))

    def test_a_request_whose_content_is_not_told_computes_anew_and_leaves_the_blocks_to_others(self):
        self.save(adapter(), "x")
        self.assertEqual(self.ask("other", 2, "y", n_local=0), (0, False))
        self.assertEqual(self.ask("untold", 3, None), (None, False))
        self.assertEqual(self.made.local_cache.manager.evicted, set())

    def test_blocks_that_others_have_had_meanwhile_are_of_no_adapter(self):
        self.ask("y", 2, "y", n_local=0)
        self.save(adapter(), "x")
        plain, untold = request("plain"), request("untold", lora_request=adapter(number=3))
        self.made.matched_tokens(plain, 0)
        self.made.update_after_alloc(plain, blocks(1), 0)
        self.assertEqual(self.ask("x", 1, "x"), (None, False))
        self.assertEqual(self.made.local_cache.manager.evicted, {1})
        self.made.local_cache.manager.evicted = set()
        self.made.matched_tokens(untold, 0)
        self.told([3], None)
        self.made.matched_tokens(untold, 0)
        self.made.update_after_alloc(untold, blocks(2), 0)
        self.assertEqual(self.ask("again", 1, "x"), (None, False))
        self.assertEqual(self.made.local_cache.manager.evicted, {1, 2})

    def test_also_where_the_first_content_was_that_of_a_request_that_nothing_is_stored_of(self):
        self.made.library.min_tokens = 100
        self.assertEqual(self.made.matched_tokens(request("short", 64, lora_request=adapter()), 0), (0, False))
        self.told([1], "x")
        self.assertEqual(self.ask("long", 2, "y"), (None, False))
        self.assertEqual(self.made.local_cache.manager.evicted, {1, 2, 3, 4})

    def test_and_where_such_a_request_is_the_first_of_an_adapter_that_was_loaded_anew(self):
        for identity in ("x", "y"):
            with self.subTest(identity):
                self.setUp()
                self.save(adapter(), "x")
                self.made.library.min_tokens = 100
                short = request("short", 64, lora_request=adapter(number=2))  # nobody waits for what it is
                self.assertEqual(self.made.matched_tokens(short, 2 * BLOCK), (None, False))
                self.told([2], identity)
                self.assertTrue(short.skip_reading_prefix_cache)
                self.assertEqual(self.made.matched_tokens(short, 0), (0, False))
                for number in (1, 2):  # told to be the same, they may use each other's
                    later = request(f"later{number}", 64, lora_request=adapter(number=number))
                    want = (0, False) if identity == "x" else (None, False)
                    self.assertEqual(self.made.matched_tokens(later, 2 * BLOCK), want)

    def test_a_content_that_vllm_has_read_between_two_requests_counts_though_nobody_asked_for_it(self):
        self.save(adapter(), "x")
        running = self.made.states["r1"]
        self.assertEqual(running.adapter_key, (1, "x"))
        self.made.take_report(WorkerReport(taken=[(1, "a", "y"), (1, "a", "x")]))
        self.assertEqual((running.adapter_key, running.saved_last), (None, True))
        # Its blocks were computed with either.
        self.assertEqual(self.ask("back", 1, "x"), (None, False))
        self.assertEqual(self.made.local_cache.manager.evicted, {1, 2, 3, 4})

    def wait_for_lookup(self):
        """A request whose look-up, for content x of its adapter, is under way."""
        self.store.answers, self.store.hit = False, 2 * CHUNK
        asked = request("waits", lora_request=adapter())
        self.made.matched_tokens(asked, 0)
        self.told([1], "x")
        self.assertEqual(self.made.matched_tokens(asked, 0), (None, False))
        return asked

    def test_a_request_that_waits_while_vllm_reads_another_content_gets_nothing_of_the_first(self):
        for identity in ("y", None):
            with self.subTest(identity):
                self.setUp()
                asked = self.wait_for_lookup()
                self.made.take_report(WorkerReport(taken=[(1, "a", identity)]))
                self.assertEqual(self.store.freed, [1])
                self.store.answers = True
                self.assertEqual(self.made.matched_tokens(asked, 0), (0, False))

    def test_nor_does_it_store_anything_for_the_first_after_a_reset(self):
        asked = self.wait_for_lookup()
        self.made.take_report(WorkerReport(taken=[(1, "a", "y")]))
        self.made.reset()
        self.store.answers, self.store.hit = True, 0
        self.assertEqual(self.made.matched_tokens(asked, 0), (0, False))
        self.made.update_after_alloc(asked, blocks(13), 0)
        self.assertEqual(self.made.step(step_of("waits", 0, 200)).saves, [])

    def test_nor_does_one_that_has_not_fetched_its_answer_yet(self):
        for taken, key in (("y", None), (None, None), ("x", (1, "x"))):
            with self.subTest(taken):
                self.setUp()
                asked = request(lora_request=adapter())
                self.made.matched_tokens(asked, 0)
                self.told([1], "x")
                self.made.take_report(WorkerReport(taken=[(1, "a", taken)]))
                self.assertEqual(self.made.matched_tokens(asked, 0), (0, False))
                self.assertEqual(self.made.states["r"].adapter_key, key)
                self.made.update_after_alloc(asked, blocks(2), 0)
                # What it computes is not sure to be of content x.
                others = self.made.local_cache.adapter_blocks.others([1, 2], (2, "x"))
                self.assertEqual(others, {1, 2} if key is None else set())

    def test_no_plan_for_an_adapter_goes_without_one(self):
        asked = self.wait_for_lookup()
        self.made.step(step_of(None, 0, 0))
        self.store.answers, state = True, self.made.states["waits"]
        self.assertEqual(self.made.matched_tokens(asked, 0), (2 * CHUNK, True))
        state.adapter_key = None
        self.made.update_after_alloc(asked, blocks(13), 2 * CHUNK)
        self.assertEqual(self.made.step(step_of(None, 0, 0)).loads[0].adapter, (1, ""))
        self.assertEqual(self.made.step(step_of("waits", 2 * CHUNK, 72)).saves[0].adapter, (1, ""))

    def test_what_vllm_reads_as_it_was_said_to_be_is_no_other_content(self):
        self.save(adapter(), "x")
        self.made.take_report(WorkerReport(taken=[(1, "a", "x"), (2, "b", None)]))
        self.assertEqual(self.ask("again", 1, "x"), (0, False))
        self.assertEqual(self.made.states["r1"].adapter_key, (1, "x"))

    # As an adapter that vLLM's server has loaded by itself.
    def test_what_vllm_had_read_before_anybody_asked_is_one_content_once_it_is_told(self):
        self.made.take_report(WorkerReport(taken=[(1, "a", None)]))
        self.made.take_report(WorkerReport(told=[("a", "x")]))
        self.save(adapter(), "x")
        self.assertEqual(self.ask("again", 1, "x"), (0, False))
        self.made.library.min_tokens = 100
        short = request("short", 64, lora_request=adapter())  # nobody waits for what its adapter is
        self.assertEqual(self.made.matched_tokens(short, 2 * BLOCK), (0, False))
        # Read anew, and not told yet: it may be another one.
        self.made.take_report(WorkerReport(taken=[(1, "a", None)]))
        self.assertEqual(self.ask("meanwhile", 1, "x"), (None, False))
        self.made.local_cache.manager.evicted = set()
        self.made.take_report(WorkerReport(told=[("a", "x")]))
        self.assertEqual(self.ask("later", 1, "x"), (0, False))
        self.assertEqual(self.made.local_cache.manager.evicted, set())

    def test_what_turns_out_to_be_another_content_is_one_more(self):
        for identity in ("y", None):
            with self.subTest(identity):
                self.setUp()
                self.save(adapter(), "x")
                self.made.take_report(WorkerReport(taken=[(2, "a", None)]))
                self.made.take_report(WorkerReport(told=[("a", identity)]))
                self.assertEqual(self.ask("other", 2, "y"), (None, False))
                self.assertEqual(self.made.local_cache.manager.evicted, {1, 2, 3, 4})

    def test_of_two_that_are_not_told_yet_one_tells_nothing_of_the_other(self):
        self.made.take_report(WorkerReport(taken=[(1, "a", None), (1, "a", None)], told=[("a", "x")]))
        self.assertEqual(self.ask("asked", 1, "x"), (None, False))

    def test_blocks_that_cannot_be_asked_for_are_not_taken(self):
        self.save(adapter(), "x")
        self.ask("other", 2, "y", n_local=0)
        self.made.local_cache.manager = None
        asked = request("asked", lora_request=adapter())
        self.made.matched_tokens(asked, 4 * BLOCK)
        self.told([1], "x")
        with self.assertLogs("vllm.cachegen", "ERROR"):
            self.assertEqual(self.made.matched_tokens(asked, 4 * BLOCK), (None, False))
        self.made.step(step_of(None, 0, 0))
        self.assertTrue(asked.skip_reading_prefix_cache)


def named(name, offset, length, adapter=""):
    """An image as vLLM's front end gives it to its scheduler, under a name of somebody's."""
    place = PlaceholderRange(offset=offset, length=length)
    fields = dict(identifier=adapter + (name or ""), mm_position=place, mm_hash=name)
    return MultiModalFeatureSpec(data=None, modality="image", **fields)


def image(content, offset, length, algorithm="sha256", adapter=""):
    """One under its hash."""
    return named(hashlib.new(algorithm, content.encode()).hexdigest(), offset, length, adapter)


class ImageTest(unittest.TestCase):
    """Chunks are told apart by the images that begin before their ends, and by no others."""

    IMAGE_TOKEN = 7

    def prompt(self, *images, n_tokens=200):
        """A request as vLLM makes it: all images look alike in its tokens."""
        tokens = list(range(100, 100 + n_tokens))
        for feature in images:
            end = feature.mm_position.offset + feature.mm_position.length
            tokens[feature.mm_position.offset : end] = [self.IMAGE_TOKEN] * feature.mm_position.length
        return Request("r", tokens, SamplingParams(), None, mm_features=list(images))

    def tokens(self, *images, unit=32, **options):
        return list(key_tokens(self.prompt(*images, **options), unit))

    def shared(self, one, other):
        """How many tokens both begin with."""
        return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), len(one))

    def test_text_stays_as_it_is(self):
        self.assertEqual(self.tokens(), list(range(100, 300)))

    def test_what_is_before_the_first_difference_is_shared(self):
        a, b = image("a", 70, 40), image("b", 70, 40)
        self.assertEqual(self.shared(self.tokens(a), self.tokens()), 70)
        self.assertEqual(self.shared(self.tokens(a), self.tokens(b)), 70)
        # A second turn with a further image: all of the first is found again.
        self.assertEqual(self.shared(self.tokens(a, image("c", 150, 20)), self.tokens(a, image("d", 150, 20))), 150)
        self.assertEqual(self.tokens(a), self.tokens(image("a", 70, 40)))

    def test_wherever_a_chunk_ends_in_an_image_it_holds_128_bits_of_it(self):
        for offset in range(64, 97):
            for length in (1, 2, 3, 4, 5, 31, 32, 33, 64):
                a, b = (self.tokens(image(name, offset, length)) for name in "ab")
                for end in range(32, 200, 32):
                    unit = range(end - 32, end)
                    n_different = sum(a[i] != b[i] for i in unit)
                    reaches_in = offset < end and offset + length > end - 32
                    self.assertEqual(n_different >= 4, reaches_in, f"{offset} {length} {end}")
                    self.assertTrue(all(a[i] >= 1 << 31 for i in unit if a[i] != b[i]))

    def test_images_side_by_side_both_count(self):
        for which in (0, 1):
            names = ["a", "b"]
            same = self.tokens(*(image(name, 95 + i, 1) for i, name in enumerate(names)))
            names[which] = "c"
            other = self.tokens(*(image(name, 95 + i, 1) for i, name in enumerate(names)))
            self.assertGreaterEqual(sum(x != y for x, y in zip(same, other)), 4)

    def test_place_and_size_count(self):
        found = [self.tokens(image("a", *place)) for place in ((70, 20), (71, 20), (70, 21))]
        self.assertEqual(len({tuple(tokens[64:96]) for tokens in found}), 3)

    def test_text_that_stand_ins_replace_counts(self):
        prompts = [self.prompt(image("a", 95, 1)) for _ in range(2)]
        prompts[1].prompt_token_ids[94] += 1
        self.assertNotEqual(*(list(key_tokens(prompt, 32)) for prompt in prompts))

    def test_an_image_at_the_end_of_the_prompt(self):
        self.assertEqual(len(self.tokens(image("a", 199, 1))), 200)
        self.assertEqual(len(self.tokens(image("a", 0, 1), n_tokens=2)), 2)

    def test_what_cannot_be_keyed_is_neither_stored_nor_served(self):
        made = scheduler(Store(hit=64), tail_tokens=2)
        asked = self.prompt(image("a", 70, 20))
        self.assertEqual(made.matched_tokens(asked, 0), (0, False))
        made.update_after_alloc(asked, blocks(13), 0)
        self.assertEqual(made.step(step_of("r", 0, 200)).saves, [])

    def stored_to(self, *images, **fields):
        made = scheduler(Store(), **fields)
        asked = self.prompt(*images)
        made.matched_tokens(asked, 0)
        made.update_after_alloc(asked, blocks(13), 0)
        return [save.to_token for save in made.step(step_of("r", 0, 200)).saves]

    def test_of_an_image_without_a_hash_only_what_comes_before_is_stored_and_found(self):
        sha256 = hashlib.sha256(b"a").hexdigest()
        for name in (
            "renderer0-mm-1-image-0",
            "my-photo",
            None,
            "",
            sha256[:-1],
            sha256 + "0",
            sha256.upper(),
            sha256 + "\n",
        ):
            with self.subTest(name):
                feature = named(name, 70, 40)
                self.assertEqual(self.shared(self.tokens(feature), self.tokens(feature)), 70)
                self.assertEqual(self.stored_to(image("b", 10, 20), feature), [CHUNK])
                self.assertEqual(self.stored_to(feature, image("b", 150, 20)), [CHUNK])

    def test_hashes_of_all_of_vllms_algorithms_are_hashes_also_with_an_adapter(self):
        for options in ({}, {"algorithm": "sha512"}, {"adapter": "name:"}):
            with self.subTest(options):
                feature = image("a", 70, 40, **options)
                self.assertEqual(self.tokens(feature), self.tokens(feature))
                self.assertEqual(self.stored_to(feature), [192])
        self.assertNotEqual(
            self.tokens(image("a", 70, 40, adapter="a:")), self.tokens(image("a", 70, 40, adapter="b:"))
        )

    def test_where_vllm_numbers_images_no_name_is_a_hash(self):
        prompt = self.prompt(image("a", 70, 40))  # the number and what was asked of the processor, hashed
        self.assertEqual(self.shared(*(key_tokens(prompt, 32, None) for _ in range(2))), 70)
        self.assertEqual(self.stored_to(image("a", 70, 40), image_key=None), [CHUNK])

    def test_what_the_engine_makes_of_images_counts_from_an_image_on(self):
        prompt = self.prompt(image("a", 70, 40))
        plain, one, other = (list(key_tokens(prompt, 32, key)) for key in ("", "one", "other"))
        self.assertEqual([self.shared(plain, one), self.shared(one, other)], [70, 70])
        self.assertEqual(one, list(key_tokens(prompt, 32, "one")))
        made = scheduler(Store(), image_key="one")
        made.matched_tokens(prompt, 0)
        self.assertEqual(list(made.states["r"].tokens), one)

    def test_requests_with_images_are_stored_by_such_tokens(self):
        made = scheduler(Store())
        asked = self.prompt(image("a", 70, 40))
        made.matched_tokens(asked, 0)
        made.update_after_alloc(asked, blocks(13), 0)
        (save,) = made.step(step_of("r", 0, 200)).saves
        self.assertEqual((list(save.tokens), save.extra), (self.tokens(image("a", 70, 40)), b""))

    def test_where_images_move_positions_a_profile_stores_the_chunks_before_the_first(self):
        for plain, stored_to in ((False, [192]), (True, [CHUNK])):
            made = scheduler(Store(), needs_plain_positions=plain)
            asked = self.prompt(image("b", 150, 20), image("a", 70, 40))
            made.matched_tokens(asked, 0)
            made.update_after_alloc(asked, blocks(13), 0)
            self.assertEqual([save.to_token for save in made.step(step_of("r", 0, 200)).saves], stored_to)
        made = scheduler(Store(), needs_plain_positions=True)
        made.matched_tokens(request(), 0)
        made.update_after_alloc(request(), blocks(13), 0)
        self.assertEqual([save.to_token for save in made.step(step_of("r", 0, 200)).saves], [192], "without images")


class ContextTest(unittest.TestCase):
    def saved_as(self, name, salt=None):
        """(the name in the store, what the answer says of it)"""
        made = scheduler(Store())
        asked = request(cache_salt=salt, kv_transfer_params={"cachegen.context": name})
        made.matched_tokens(asked, 0)
        made.update_after_alloc(asked, blocks(13), 0)
        saves = made.step(step_of("r", 0, 200)).saves
        self.assertEqual([(save.from_token, save.to_token) for save in saves], [(0, 192)])
        return saves[0].context, made.finish(asked, [])

    def test_each_salt_has_names_of_its_own(self):
        plain, a, b = (self.saved_as("report", salt)[0] for salt in (None, "tenant a", "tenant b"))
        self.assertEqual(plain, "report")
        self.assertEqual(len({plain, a, b}), 3)
        self.assertEqual(self.saved_as("report", "tenant a")[1]["cachegen.context"], a)
        self.assertIsNone(self.saved_as(a)[0], "a client without a salt replaces a tenant's context")
        self.assertNotEqual(self.saved_as(a, "tenant b")[0], a)

    def test_a_name_that_cannot_be_used_costs_only_the_name(self):
        for name in ("a/b", "", ".hidden", "../x", "line\n", "x" * 256, 7, ["a"], "\ud800"):
            with self.subTest(name):
                found, answer = self.saved_as(name)
                self.assertIsNone(found)
                self.assertIn("cachegen.context_refused", answer)
        self.assertEqual(self.saved_as("Résumé 1.pdf")[0], "Résumé 1.pdf")


    def test_a_named_prompt_that_is_shorter_than_any_chunk_is_not_saved(self):
        for n_tokens, saved in ((31, []), (32, [(0, 32)])):
            made = scheduler(Store())
            asked = request(n_tokens=n_tokens, kv_transfer_params={"cachegen.context": "greeting"})
            made.matched_tokens(asked, 0)
            made.update_after_alloc(asked, blocks(2), 0)
            saves = made.step(step_of("r", 0, n_tokens, 2)).saves  # which the library refused: an outage
            self.assertEqual([(save.from_token, save.to_token) for save in saves], saved)
            self.assertEqual("cachegen.context" in made.finish(asked, []), bool(saved))

    def test_a_name_is_confirmed_where_it_is_to_be_published_only(self):
        named = dict(kv_transfer_params={"cachegen.context": "report"})
        for limits, n_computed, key in (
            ({}, 200, "context"), ({}, 100, "context_refused"), ({"may_save": False}, 200, "context_refused"),
            ({"min_tokens": 201}, 200, "context_refused"), ({"save_on_use": 2}, 200, "context_refused"),
        ):  # fmt: skip
            with self.subTest(limits=limits, n_computed=n_computed):
                made, asked = scheduler(Store(), **limits), request(**named)
                made.matched_tokens(asked, 0)
                made.update_after_alloc(asked, blocks(13), 0)
                made.step(step_of("r", 0, n_computed))
                told = made.finish(asked, []).keys() - {"cachegen.lookup_ms"}
                self.assertEqual(told, {"cachegen.hit_tokens", "cachegen." + key})


class SameStepTest(unittest.TestCase):
    """Request "a" computes the end of its prompt in blocks that once held a lossy load. In the same step vLLM's own
    prefix cache has some of them for "b"."""

    N_LOCAL = 336  # of "b": 13 blocks that "a" has computed before, and 8 that it is about to

    def setUp(self):
        self.made = scheduler(Store(hit=0))
        self.tables = {"a": list(range(1, 14)), "b": [*range(1, 22), *range(30, 38)]}
        self.made.local_cache.provenance.mark(range(14, 26), 3, loaded=True)
        first = request("a", 400)
        self.made.matched_tokens(first, 0)
        self.made.update_after_alloc(first, self.blocks_of("a"), 0)
        self.step(step_of("a", 0, 208))
        self.tables["a"] = list(range(1, 26))
        self.asked = request("b", prompt_token_ids=[*range(self.N_LOCAL), *range(1000, 1120)])
        cached = self.blocks_of("b", self.N_LOCAL // BLOCK)
        self.made.local_cache.manager.get_computed_blocks = lambda _request: (cached, self.N_LOCAL)

    def blocks_of(self, name, n=None):
        return types.SimpleNamespace(get_block_ids=lambda: (self.tables[name][:n],))

    def step(self, planned):
        planned.kv_connector_block_state = types.SimpleNamespace(get_block_ids=lambda name: (self.tables[name],))
        return self.made.step(planned)

    def end_of_a(self):
        ends = step_of("a", 208, 192, is_new=False)
        ends.scheduled_cached_reqs.new_block_ids = [(list(range(14, 26)),)]
        return ends

    def evicted(self):
        self.made.finish(self.asked, self.tables["b"])
        return self.made.local_cache.manager.evicted

    def test_what_is_computed_after_such_blocks_is_stored_and_stays(self):
        self.assertEqual(self.made.matched_tokens(self.asked, self.N_LOCAL), (0, False))
        self.made.update_after_alloc(self.asked, self.blocks_of("b"), 0)
        saves = self.step(joined(self.end_of_a(), step_of("b", self.N_LOCAL, 120))).saves
        of_b = [(save.from_token, save.to_token, save.prefix_level) for save in saves if save.req_id == "b"]
        self.assertEqual(of_b, [(320, 448, 0)])
        self.assertEqual(self.evicted(), set())

    def test_so_is_what_is_computed_after_an_exact_load_behind_them(self):
        self.made.library.cg.hit = 384
        self.assertEqual(self.made.matched_tokens(self.asked, self.N_LOCAL), (48, True))
        self.made.update_after_alloc(self.asked, self.blocks_of("b"), 48)
        self.step(self.end_of_a())
        self.made.take_report(WorkerReport(loads={"b": LoadReport(384, 0)}))
        self.made.update_after_alloc(self.asked, self.blocks_of("b"), 0)
        (save,) = self.step(step_of("b", 384, 72)).saves
        self.assertEqual((save.from_token, save.to_token, save.prefix_level), (384, 448, 0))
        self.assertEqual(self.evicted(), set())

    def test_who_demands_exact_kv_waits_for_such_blocks_and_recomputes_none_that_are_exact(self):
        for level, n_local in ((0, self.N_LOCAL), (3, 0)):
            with self.subTest(level):
                self.setUp()
                self.made.states["a"].level = level
                self.asked.kv_transfer_params = {"cachegen.worst_level": "L0"}
                self.assertEqual(self.made.matched_tokens(self.asked, self.N_LOCAL), (None, False))
                self.step(self.end_of_a())
                self.assertEqual(self.asked.skip_reading_prefix_cache, level > 0)
                self.assertEqual(self.made.matched_tokens(self.asked, n_local), (0, False))

    def test_also_for_those_of_a_new_request(self):
        made = scheduler(Store(hit=0))
        asked = request("b", kv_transfer_params={"cachegen.worst_level": "L0"})
        made.local_cache.manager.get_computed_blocks = lambda _request: (blocks(12), 192)
        made.matched_tokens(request("a"), 0)
        made.update_after_alloc(request("a"), blocks(13), 0)
        self.assertEqual(made.matched_tokens(asked, 192), (None, False))
        made.step(step_of("a", 0, 200))
        self.assertFalse(asked.skip_reading_prefix_cache)
        self.assertEqual(made.matched_tokens(asked, 192), (0, False))


class OtherTierTest(unittest.TestCase):
    """Another connector beside this one moves blocks: what it brings is as bad as anything that this engine loads."""

    def saves(self, made, name, n_local=0, n_foreign=0, n_scheduled=None):
        """A request of which vLLM's prefix cache has n_local tokens, and then another tier n_foreign."""
        asked = request(name)
        made.local_cache.manager.get_computed_blocks = lambda _request: (blocks(n_local // BLOCK), n_local)
        self.assertEqual(made.matched_tokens(asked, n_local), (0, False))
        made.update_after_alloc(asked, blocks(13), 0)
        n_computed = n_local + n_foreign
        return made.step(step_of(name, n_computed, n_scheduled or 200 - n_computed)).saves

    # vLLM asks whether the other one's load has failed only when saves have begun.
    def test_of_a_request_that_it_brings_tokens_for_nothing_is_stored(self):
        for unknown_level in (0, 3):
            for n_foreign in (64, 80):
                made = scheduler(Store(), unknown_level=unknown_level)
                self.assertEqual(self.saves(made, "r", n_foreign=n_foreign, n_scheduled=64), [])
                again = made.step(step_of("r", 0, 200, is_new=False))  # the load had failed
                self.assertEqual(again.saves, [])

    def test_what_is_computed_after_what_it_has_left_in_vllms_cache_is_stored_as_lossy(self):
        for unknown_level in (3, 0):  # 0: nothing lossy is ever loaded
            made = scheduler(Store(), unknown_level=unknown_level)
            self.saves(made, "r", n_foreign=64)
            (save,) = self.saves(made, "s", n_local=128)
            self.assertEqual((save.from_token, save.prefix_level), (128, unknown_level))

    def test_nor_is_anything_where_it_brings_more_than_this_connector_loads(self):
        for n_foreign, n_saves in ((0, 1), (16, 0)):
            made = scheduler(Store(hit=64))
            self.assertEqual(made.matched_tokens(request(), 0), (64, True))
            made.update_after_alloc(request(), blocks(13), 64)
            made.step(step_of(None, 0, 0))
            made.take_report(WorkerReport(loads={"r": LoadReport(64, 0)}))
            made.update_after_alloc(request(), blocks(13), 0)
            self.assertEqual(len(made.step(step_of("r", 64 + n_foreign, 100)).saves), n_saves)

    def test_what_this_engine_computes_is_exact(self):
        made = scheduler(Store())
        (save,) = self.saves(made, "r")
        self.assertEqual((save.from_token, save.to_token, save.prefix_level), (0, 192, 0))
        (save,) = self.saves(made, "s", n_local=128)
        self.assertEqual((save.from_token, save.prefix_level), (128, 0))

    def test_what_a_session_has_computed_stays_as_good_when_its_next_input_comes(self):
        for hit, level in ((0, 0), (64, 2)):
            with self.subTest(hit=hit):
                made = scheduler(Store(hit=hit), unknown_level=3)
                asked = request()
                self.assertEqual(made.matched_tokens(asked, 0), (hit, hit > 0))
                made.update_after_alloc(asked, blocks(13), hit)
                if hit:
                    made.step(step_of(None, 0, 0))
                    made.take_report(WorkerReport(loads={"r": LoadReport(hit, level)}))
                    made.update_after_alloc(asked, blocks(13), 0)
                made.step(step_of("r", hit, 200 - hit))
                asked.num_computed_tokens = 201  # with a token of the answer
                made.update_after_alloc(asked, blocks(20), 0)
                step = made.step(step_of("r", 201, 100, n_blocks=20))
                provenance = made.local_cache.provenance
                self.assertEqual([provenance.worst_of([block]) for block in range(1, 21)], 20 * [level])
                self.assertFalse(provenance.any_unknown(range(1, 21)))
                self.assertEqual(step.overwritten, set(range(13, 21)))

    def test_of_a_chunk_that_is_partly_loaded_at_a_lossy_level_nothing_is_stored_nor_of_what_follows(self):
        for n_local, saved_from in ((64, 64), (80, None)):
            with self.subTest(n_local):
                made = scheduler(Store())
                made.local_cache.provenance.mark([1, 2, 3, 4, 5], 2, loaded=True)  # vLLM has kept it of another request
                saves = self.saves(made, "r", n_local=n_local)
                self.assertEqual([save.from_token for save in saves], [] if saved_from is None else [saved_from])

    def test_what_this_connector_has_loaded_is_of_its_level(self):
        made = scheduler(Store(hit=128))
        self.assertEqual(made.matched_tokens(request(), 0), (128, True))
        made.update_after_alloc(request(), blocks(8), 128)
        made.step(step_of(None, 0, 0))
        made.take_report(WorkerReport(loads={"r": LoadReport(128, 0)}))
        made.update_after_alloc(request(), blocks(13), 0)
        (save,) = made.step(step_of("r", 128, 72)).saves
        self.assertEqual((save.from_token, save.prefix_level), (128, 0))


class AdmissionTest(unittest.TestCase):
    def saves(self, made, name, tokens, n_first=None, **fields):
        """[from, to) of what is saved of a prompt, in one step or, with n_first, in two."""
        asked = request(name, prompt_token_ids=tokens, **fields)
        made.matched_tokens(asked, 0)
        made.update_after_alloc(asked, blocks(13), 0)
        saves = made.step(step_of(name, 0, n_first or len(tokens))).saves
        if n_first:
            saves += made.step(step_of(name, n_first, len(tokens) - n_first, is_new=False)).saves
        return [(save.from_token, save.to_token, save.context) for save in saves]

    def test_short_prompts_are_neither_looked_up_nor_stored(self):
        store = Store(hit=64)
        made = scheduler(store, min_tokens=128)
        self.assertEqual(self.saves(made, "a", list(range(127))), [])
        self.assertEqual(store.salts, [])
        store.hit = 0
        self.assertEqual(self.saves(made, "b", list(range(128))), [(0, 128, None)])

    def test_a_prefix_is_stored_when_it_is_used_again(self):
        made = scheduler(Store(), save_on_use=2)
        shared, own = list(range(130)), list(range(1000, 1070))
        self.assertEqual(self.saves(made, "a", shared + own), [])
        self.assertEqual(self.saves(made, "b", shared + own[::-1], n_first=100), [(0, 64, None), (64, 128, None)])
        self.assertEqual(self.saves(made, "c", shared + own, cache_salt="another"), [])
        self.assertEqual(self.saves(made, "d", shared + own), [(0, 192, None)])

    def test_a_name_is_published_with_the_whole_prompt_only(self):
        made = scheduler(Store(), save_on_use=2)
        named = dict(kv_transfer_params={"cachegen.context": "name"})
        first, second = list(range(200)), list(range(128)) + list(range(500, 572))
        self.assertEqual(self.saves(made, "a", first, **named), [])
        self.assertEqual([to for _, to, _ in self.saves(made, "b", second, **named)], [128])
        self.assertEqual(self.saves(made, "c", second, **named), [(0, 192, "name")])

    def test_a_request_counts_once_however_often_it_is_preempted(self):
        made = scheduler(Store(), save_on_use=2)
        for _ in range(3):
            self.assertEqual(self.saves(made, "a", list(range(200))), [])


class DoubtTest(unittest.TestCase):
    def test_weights_in_doubt_are_waited_for_by_nobody_and_use_nothing_of_the_store(self):
        store, weights = Store(hit=128), types.SimpleNamespace(doubt="unchecked weights")
        made = scheduler(store, weights=weights)
        for name, doubt, n_external in (("a", "unchecked weights", 0), ("b", "other weights", 0), ("c", None, 128)):
            with self.subTest(doubt):
                weights.doubt = doubt
                self.assertEqual(made.matched_tokens(request(name), 0), (n_external, n_external > 0))
                self.assertEqual(len(store.salts), n_external > 0, "look-ups")
                made.update_after_alloc(request(name), blocks(13), n_external)
                saves = made.step(step_of(name, n_external, 200 - n_external)).saves
                self.assertEqual(len(saves), 0 if doubt else 1)


class OverwriteTest(unittest.TestCase):
    """The worker is told which blocks get new content, so that it ends copying out of them before."""

    def test_blocks_of_new_requests_of_growing_ones_and_of_loads(self):
        made = scheduler(Store(hit=192))
        self.assertEqual(made.step(step_of("r", 0, 200, n_blocks=3)).overwritten, {1, 2, 3})
        grows = step_of("r", 200, 1, is_new=False)
        grows.scheduled_cached_reqs.new_block_ids = [([7, 8],)]
        self.assertEqual(made.step(grows).overwritten, {7, 8})
        self.assertEqual(made.step(step_of("r", 201, 1, is_new=False)).overwritten, set())
        made.matched_tokens(request("s"), 0)
        made.update_after_alloc(request("s"), blocks(12), 192)
        self.assertEqual(made.step(step_of(None, 0, 0)).overwritten, set(range(1, 13)))

    def test_blocks_that_keep_their_content_are_none_of_them(self):
        made = scheduler(Store(hit=0))
        made.local_cache.manager.get_computed_blocks = lambda _request: (blocks(4), 4 * BLOCK)
        shares = request("shares")  # the first 4 blocks of another request, which is being stored
        self.assertEqual(made.matched_tokens(shares, 4 * BLOCK), (0, False))
        made.update_after_alloc(shares, blocks(13), 0)
        self.assertEqual(made.step(step_of("shares", 4 * BLOCK, 136)).overwritten, set(range(5, 14)))
        resumed = step_of("shares", 4 * BLOCK, 136, is_new=False)
        resumed.scheduled_cached_reqs.new_block_ids = [(list(range(1, 14)),)]
        resumed.scheduled_cached_reqs.resumed_req_ids = {"shares"}
        self.assertEqual(made.step(resumed).overwritten, set(range(5, 14)))
        made.library.cg.hit = 2 * CHUNK
        self.assertEqual(made.matched_tokens(request("loads"), CHUNK), (CHUNK, True))
        made.update_after_alloc(request("loads"), blocks(8), CHUNK)
        self.assertEqual(made.step(step_of(None, 0, 0)).overwritten, {5, 6, 7, 8})

    def test_so_are_those_that_another_connector_loads_into(self):
        made = scheduler(Store())
        made.matched_tokens(request(), 0)
        made.update_after_alloc(request(), blocks(4), 0)  # as vLLM's MultiConnector has it
        self.assertEqual(made.step(step_of(None, 0, 0)).overwritten, {1, 2, 3, 4})
        self.assertEqual(made.step(step_of(None, 0, 0)).overwritten, set())

    def test_any_may_be_where_a_request_computes_anew_what_it_had(self):
        made = scheduler(Store(hit=0))  # as vLLM does where what it had was loaded, and that failed
        made.matched_tokens(request(), 0)
        for n_computed, overwritten in ((0, {1, 2, 3}), (64, set()), (128, set()), (32, set()), (96, set())):
            step = made.step(step_of("r", n_computed, 64, n_blocks=3, is_new=n_computed == 0))
            self.assertEqual((step.overwritten, step.is_recomputing), (overwritten, n_computed == 32))

    def test_any_may_be_where_planning_fails(self):
        self.assertIsNone(scheduler(Store()).step(None).overwritten)


class MeasureTest(unittest.TestCase):
    """What operators see: how long things took, and whether budgets were met."""

    def loaded(self, predicted_ns=0, loads=((192, 0),), params=None):
        made = scheduler(Store(hit=192))
        made.library.cg.predicted_ns = predicted_ns
        self.asked = request(kv_transfer_params=params)
        made.matched_tokens(self.asked, 0)
        made.update_after_alloc(request(), blocks(13), 192)
        made.step(step_of(None, 0, 0))
        for load in loads:
            made.take_report(WorkerReport(loads={"r": LoadReport(*load, total_ns=3 * 10**9)}))
        made.update_after_alloc(request(), blocks(13), 0)
        return made

    def budgets(self, made):
        return made._budgets.n_met, made._budgets.n_missed

    def test_a_budget_counts_once_its_first_token_is_there(self):
        for budget_ms, met_and_missed in ((10**6, (1, 0)), (10**-6, (0, 1))):
            for is_over_at_once in (False, True):
                with self.subTest(f"{budget_ms} {is_over_at_once}"):
                    made = self.loaded(params={"cachegen.ttft_budget_ms": budget_ms})
                    made.step(step_of("r", 192, 4))
                    self.assertEqual(self.budgets(made), (0, 0), "the prompt has more tokens")
                    made.step(step_of("r", 196, 4, is_new=False))
                    self.assertEqual(self.budgets(made), (0, 0), "the step goes on")
                    self.asked.num_output_tokens = 1
                    if is_over_at_once:
                        made.finish(request(), [])
                    else:
                        made.step(step_of("r", 200, 1, is_new=False))
                    self.assertEqual(self.budgets(made), met_and_missed)
                    made.step(step_of(None, 0, 0))
                    self.assertEqual(self.budgets(made), met_and_missed)
                    self.assertEqual(len(made.take_observed()["budget_ratio"]), 1)
                    self.assertEqual(made.take_observed(), {})

    def plan_ahead(self, first_token_ms, budget_ms=500):
        """As vLLM's asynchronous scheduling does: the step behind the prompt's last one is planned after 1 ms, and the
        first token comes when that runs."""
        now_ms = mock.patch("time.monotonic_ns", lambda: 10**12 + self.now_ms * 10**6)
        self.now_ms = 0
        now_ms.start()
        self.addCleanup(now_ms.stop)
        made = self.loaded(params={"cachegen.ttft_budget_ms": budget_ms})
        made.states["r"].spent_ns = 0
        made.step(step_of("r", 192, 8))
        self.now_ms = 1
        made.step(step_of("r", 200, 1, is_new=False))
        self.assertEqual(self.budgets(made), (0, 0), "there is none yet")
        self.now_ms, self.asked.num_output_tokens = first_token_ms, 1
        return made

    def test_a_budget_counts_until_the_first_token_also_where_steps_are_planned_ahead(self):
        for first_token_ms, budget_ms, met_and_missed in ((801, 500, (0, 1)), (499, 500, (1, 0)), (40, 1, (0, 1))):
            with self.subTest(first_token_ms):
                made = self.plan_ahead(first_token_ms, budget_ms)
                for n_computed in (201, 202):
                    made.step(step_of("r", n_computed, 1, is_new=False))
                    self.assertEqual(self.budgets(made), met_and_missed)
                self.assertEqual(made._budgets._after_load._alone.mean, min(first_token_ms, 1000 / 4) * 10**6)
                self.assertEqual(made._budgets._first_tokens, {})

    def test_so_it_does_where_the_request_is_preempted_by_the_step_that_was_planned_ahead(self):
        made = self.plan_ahead(801)
        made.matched_tokens(self.asked, 0)  # before the next step is told
        self.assertEqual(self.budgets(made), (0, 1))
        made.step(step_of(None, 0, 0))
        self.assertEqual(self.budgets(made), (0, 1))

    def test_a_request_that_is_over_without_a_token_is_waited_for_no_more(self):
        made = self.loaded()
        made.step(step_of("r", 192, 8))
        made.finish(self.asked, [])
        self.assertEqual(self.budgets(made), (0, 0))
        self.assertEqual(made._budgets._after_load._alone.mean, 0)
        self.assertEqual(made._budgets._first_tokens, {})

    def test_of_a_session_no_first_token_is_counted_by_a_later_input(self):
        made = self.loaded()
        made.step(step_of("r", 192, 8))
        self.asked.num_computed_tokens = 200  # and its token is out, but no step has counted it yet
        made.update_after_alloc(self.asked, blocks(20), 0)
        made.step(step_of("r", 200, 100, n_blocks=20))
        self.asked.num_output_tokens = 1  # of the next input
        made.step(step_of("r", 300, 1, n_blocks=20, is_new=False))
        self.assertEqual(self.budgets(made), (0, 0))
        self.assertEqual(made._budgets._after_load._alone.mean, 0)
        self.assertEqual(made._budgets._first_tokens, {})

    def test_only_first_tokens_of_one_step_come_together(self):
        for is_over_at_once in (False, True):
            with self.subTest(is_over_at_once):
                made, asked = scheduler(Store(hit=192)), {name: request(name) for name in "abc"}
                for one in asked.values():
                    made.matched_tokens(one, 0)
                    made.update_after_alloc(one, blocks(13), 192)
                made.take_report(WorkerReport(loads={name: LoadReport(192, 0) for name in asked}))
                made.step(joined(step_of("a", 192, 8), step_of("b", 192, 8)))
                behind = step_of("a", 200, 1, is_new=False), step_of("b", 200, 1, is_new=False)
                made.step(joined(step_of("c", 192, 8), *behind))  # planned ahead
                with mock.patch.object(made._budgets._after_load, "note") as note:
                    for names in ("ab", "c"):
                        for name in names:  # vLLM hands out a step's tokens one by one, and ends requests meanwhile
                            asked[name].num_output_tokens = 1
                            if is_over_at_once:
                                made.finish(asked[name], [])
                        made.step(step_of(None, 0, 0))
                self.assertEqual([call.args[3] for call in note.call_args_list], [1, 0, 0])
                self.assertEqual(self.budgets(made), (3, 0))
                self.assertEqual(made._budgets._first_tokens, {})

    def test_the_time_that_a_request_has_waited_counts(self):
        made = scheduler(Store(hit=192))
        asked = request(arrival_time=time.time() - 1000, kv_transfer_params={"cachegen.ttft_budget_ms": 500000})
        made.matched_tokens(asked, 0)
        made.update_after_alloc(asked, blocks(13), 192)
        made.take_report(WorkerReport(loads={"r": LoadReport(192, 0)}))
        made.step(step_of("r", 192, 8))
        asked.num_output_tokens = 1
        made.finish(asked, [])
        self.assertEqual(self.budgets(made), (0, 1))

    def test_of_a_preempted_request_only_the_first_token_has_a_budget_from_the_arrival_on(self):
        ms = 10**6
        for n_output, want_spent_ns in ((0, [1000 * 10**9] * 2), (5, [0, 300 * ms])):
            with self.subTest(n_output), mock.patch("time.monotonic_ns", lambda: now_ns):
                now_ns = 10**15
                made = self.loaded(params={"cachegen.ttft_budget_ms": 500000})
                made.step(step_of("r", 192, 8 if n_output else 4))
                self.asked.num_output_tokens = n_output
                made.step(step_of("r", 200, 1, is_new=False) if n_output else step_of(None, 0, 0))
                counted = self.budgets(made)
                self.assertEqual(counted, (1, 0) if n_output else (0, 0))
                mock.patch.object(made._lookups._arrivals, "seconds_since", lambda _: 1000).start()
                mock.patch.object(made._budgets._after_load, "ahead", lambda *_: 0).start()
                self.addCleanup(mock.patch.stopall)
                resumed, spent_ns = request(num_output_tokens=n_output), []
                now_ns += 10**12
                for n_local in (64, 0):  # that vLLM still has, and soon has no more
                    made.local_cache.manager.get_computed_blocks = lambda _, n=n_local: (blocks(n // BLOCK), n)
                    self.assertEqual(made.matched_tokens(resumed, n_local), (192 - n_local, True))
                    spent_ns.append(made.library.cg.spent_ns)
                    now_ns += 300 * ms
                self.assertEqual(spent_ns, want_spent_ns)
                made.update_after_alloc(resumed, blocks(13), 192)
                made.take_report(WorkerReport(loads={"r": LoadReport(192, 0)}))
                made.step(step_of("r", 192, 8 + n_output))
                self.asked.num_output_tokens = n_output + 1
                made.finish(resumed, [])
                self.assertEqual(self.budgets(made), counted if n_output else (0, 1))

    def test_what_the_engine_takes_after_a_load_is_left_of_the_next_budget(self):
        ms, now_ns = 10**6, 10**12
        for n_loaded, after_ns, want_ns in ((192, 40 * ms, 60 * ms), (192, 10**10, 375 * ms), (64, 40 * ms, 0)):
            with self.subTest(f"{n_loaded} {after_ns}"):
                with unittest.mock.patch("time.monotonic_ns", lambda: now_ns):
                    made = self.loaded(loads=((n_loaded, 0),))
                    made.step(step_of("r", n_loaded, 200 - n_loaded))
                self.asked.num_output_tokens = 1
                with unittest.mock.patch("time.monotonic_ns", lambda: now_ns + after_ns):
                    made.finish(request(), [])
                made.matched_tokens(request("next", arrival_time=time.time() + 1000), 0)
                self.assertEqual(made.library.cg.spent_ns, want_ns)

    def test_a_load_that_failed_at_its_first_block_counts_and_harms_no_step(self):
        for is_over_at_once in (False, True):
            with self.subTest(is_over_at_once):
                made = self.loaded(loads=((0, 0),))
                self.assertEqual(made.matched_tokens(request(), 0), (0, False))  # as vLLM does
                made.update_after_alloc(request(), blocks(13), 0)
                made.step(step_of("r", 0, 200))
                self.asked.num_output_tokens = 1
                if is_over_at_once:
                    self.assertIsNotNone(made.finish(request(), []))
                else:
                    self.assertIsNotNone(made.step(step_of("r", 200, 1, is_new=False)).overwritten)
                self.assertEqual(sum(self.budgets(made)), 1)
                self.assertEqual(made.failures._counts, {})

    def test_a_budget_that_cannot_be_counted_costs_no_answer(self):
        made = self.loaded()
        made.step(step_of("r", 192, 8))
        self.asked.num_output_tokens, made.states["r"].spent_ns = 1, None
        with self.assertLogs("vllm.cachegen", "ERROR"):
            self.assertIsNotNone(made.finish(request(), []))

    def test_requests_that_load_nothing_have_no_budget_to_meet(self):
        made = scheduler(Store())
        made.matched_tokens(request(), 0)
        made.update_after_alloc(request(), blocks(13), 0)
        made.step(step_of("r", 0, 200))
        made.step(step_of("r", 200, 1, is_new=False))
        self.assertEqual(self.budgets(made), (0, 0))
        self.assertEqual(set(made.take_observed()), {"lookup_latency_seconds"})

    def test_a_load_is_compared_with_its_prediction_if_it_did_all_of_it(self):
        observed = self.loaded(predicted_ns=2 * 10**9).take_observed()
        self.assertEqual(observed["load_time_ratio"], [1.5])
        self.assertEqual(observed["load_latency_seconds"], [3.0])
        self.assertEqual(len(observed["load_wait_seconds"]), 1)
        self.assertNotIn("load_time_ratio", self.loaded().take_observed())
        self.assertNotIn("load_time_ratio", self.loaded(2 * 10**9, loads=((64, 0),)).take_observed())

    def test_lookups_under_way_are_counted(self):
        made = scheduler(Store(answers=False))
        for name in "ab":
            made.matched_tokens(request(name), 0)
        self.assertEqual(made.gauges(), {"lookups_running": 2})


class LogTest(unittest.TestCase):
    def test_clients_that_ask_for_what_there_is_not_fill_no_log(self):
        made = scheduler(Store())
        with self.assertLogs("vllm.cachegen", "INFO") as log:
            for n in range(20):
                for wish in ({"cachegen.level": "L9"}, {"cachegen.context": "a/b"}, None):
                    made.matched_tokens(request(f"{n} {wish}", kv_transfer_params=wish), 0)
        self.assertLessEqual(len(log.output), 4, log.output)  # each begins and is over, once a minute

    def test_one_clients_mistake_hides_no_other_one_in_the_log(self):
        made = scheduler(Store())
        wishes = {"level": "L9"}, {"ttft_budget_ms": "fast"}, {"quality": -1}, {"qality": 1}
        with self.assertLogs("vllm.cachegen", "WARNING") as log:
            for n in range(20):
                for wish in wishes:
                    params = {"cachegen." + key: value for key, value in wish.items()}
                    made.matched_tokens(request(f"{n} {wish}", kv_transfer_params=params), 0)
        self.assertEqual(len(log.output), len(wishes), log.output)
        made.matched_tokens(request("of use"), 0)
        self.assertEqual(made.outages.under_way(), [])

    def test_a_store_that_is_gone_is_an_outage(self):
        made = scheduler(Store())
        seen = []
        with self.assertLogs("vllm.cachegen", "INFO") as log:
            # Errors, then a store that is not asked any more.
            # At last one that has waited too long for others.
            for n_lookups, n_errors, n_skipped in ((1, 0, 0), (2, 3, 0), (3, 3, 1), (3, 3, 1), (4, 3, 1), (5, 3, 2)):
                stats = {
                    "lookups": n_lookups,
                    "lookup_errors": n_errors,
                    "lookups_skipped": n_skipped,
                    "staging_bytes": 0,
                }
                made.library.cg.get_stats = lambda stats=stats: types.SimpleNamespace(as_dict=lambda: stats)
                made.counters()
                seen.append(bool(made.outages.under_way()))
        self.assertEqual(seen, [False, True, True, True, False, False])
        self.assertEqual(len(log.output), 2)
        self.assertIn("3 questions to /store failed", log.output[0])


class WaitTest(unittest.TestCase):
    def test_no_step_waits_for_its_lookups_whether_it_has_work_or_not(self):
        made = scheduler(Store(hit=192, answers=False))
        for last_step in (step_of(None, 0, 0), step_of("runs", 0, 200), step_of(None, 0, 0)):
            for n in range(40):
                self.assertEqual(made.matched_tokens(request(f"r{n}"), 0), (None, False))
            made.step(last_step)
        self.assertEqual(made.library.waited, [])
        self.assertEqual(made.library.cg.n_polls, 3 * 40)  # by what vLLM asks
        made.matched_tokens(request("r0"), 0)
        made.step(step_of(None, 0, 0))
        self.assertEqual(made.library.cg.n_polls, 4 * 40)  # by the step, where vLLM does not
        made.library.cg.answers = True
        self.assertEqual(made.matched_tokens(request("r0"), 0), (192, True))

    def test_the_worker_may_wait_only_where_the_last_step_had_nothing_to_compute_either(self):
        made = scheduler(Store())
        empty, full = step_of(None, 0, 0), step_of("runs", 0, 200)
        steps = ((full, False), (empty, False), (empty, True), (empty, True), (full, False), (empty, False))
        self.assertEqual([made.step(output).is_idle for output, _ in steps], [is_idle for _, is_idle in steps])


class FailureTest(unittest.TestCase):
    """Whatever fails, vLLM computes; nothing hangs, and nothing of which little is known is stored."""

    def loading(self, hit=192):
        made = scheduler(Store(hit=hit))
        self.assertEqual(made.matched_tokens(request(), 0), (hit, True))
        return made

    def take_away(self, made, path):
        """path: of what the scheduler stands on, which is None from now on, until the test ends."""
        *owners, name = path.split(".")
        mock.patch.object(functools.reduce(getattr, owners, made), name, None).start()
        self.addCleanup(mock.patch.stopall)

    def test_a_load_that_cannot_be_planned_ends_as_failed(self):
        for what in ("_shared_loads", "_state"):
            with self.subTest(what):
                made = self.loading()
                self.take_away(made, what)
                made.update_after_alloc(request(), blocks(13), 192)
                metadata = made.step(step_of(None, 0, 0))
                self.assertEqual([plan.req_id for plan in metadata.loads], ["r"])
                self.assertEqual(metadata.loads[0].block_ids[:12], list(range(1, 13)))
                self.assertEqual(metadata.cancelled_loads, {"r"})
                mock.patch.stopall()
                made.take_report(WorkerReport(loads={"r": LoadReport(0, 0)}))
                self.assertEqual(made.matched_tokens(request(), 0), (0, False))  # not asked again

    def test_a_local_hit_that_may_be_too_bad_is_recomputed(self):
        for broken in ("local_cache.manager", "library.cg.lookup_start"):
            with self.subTest(broken):
                made = scheduler(Store())
                made.local_cache.provenance.mark([1], 3, loaded=True)
                made.local_cache.manager.get_computed_blocks = lambda _request: (blocks(4), 64)
                self.take_away(made, broken)
                asked = request(kv_transfer_params={"cachegen.worst_level": "L0"})
                with self.assertLogs("vllm.cachegen", "ERROR"):
                    self.assertEqual(made.matched_tokens(asked, 64), (None, False))
                made.step(step_of(None, 0, 0))
                self.assertTrue(asked.skip_reading_prefix_cache)
                self.assertEqual(made.matched_tokens(asked, 0), (0, False))

    def test_a_part_that_fails_leaves_the_request_to_the_engine(self):
        for what in ("_lookups._budgets", "_lookups._observed", "_deferrals._lookups"):
            with self.subTest(what):
                made = scheduler(Store(hit=0))
                self.take_away(made, what)
                with self.assertLogs("vllm.cachegen", "ERROR"):
                    self.assertEqual(made.matched_tokens(request(), 0), (0, False))
                made.update_after_alloc(request(), blocks(13), 0)
                self.assertEqual(len(made.step(step_of("r", 0, 200)).saves), 1)

    def test_loads_reach_the_worker_whatever_else_fails_in_a_step(self):
        made = self.loading()
        made.update_after_alloc(request(), blocks(13), 192)
        made.local_cache._refused = [None]
        metadata = made.step(None)
        self.assertEqual([plan.req_id for plan in metadata.loads], ["r"])
        self.assertEqual(made.step(step_of(None, 0, 0)).loads, [])

    def test_a_request_that_cannot_be_planned_harms_no_other(self):
        made = scheduler(Store())
        for name in ("bad", "good"):
            made.matched_tokens(request(name), 0)
            made.update_after_alloc(request(name), blocks(13), 0)
        both = step_of("good", 0, 200)
        both.scheduled_new_reqs.insert(0, types.SimpleNamespace(req_id="bad", num_computed_tokens=0, block_ids=([],)))
        both.num_scheduled_tokens["bad"] = 200
        made.states["bad"].admitted_tokens = "broken"
        with self.assertLogs("vllm.cachegen", "ERROR"):
            saves = made.step(both).saves
        self.assertEqual([save.req_id for save in saves], ["good"])

    def test_a_failed_load_is_not_looked_up_again_whatever_fails_beside(self):
        of_library = ("library.cg.report_prefill", "library.cg.report_load", "library.cg.forget_failed")
        for what in (*of_library, "local_cache.provenance"):
            with self.subTest(what):
                made = self.loading()
                made.update_after_alloc(request(), blocks(13), 192)
                made.step(step_of(None, 0, 0))
                self.take_away(made, what)
                with self.assertLogs("vllm.cachegen", "ERROR"):
                    made.take_report(WorkerReport(loads={"r": LoadReport(64, 0)}, prefills=[(64, 2048, 1)]))
                self.assertEqual(made.matched_tokens(request(), 0), (0, False))

    def connector(self, **functions):
        cg = abi.Connector.__new__(abi.Connector)
        cg._handle, cg._c = ctypes.c_void_p(), types.SimpleNamespace(**functions)
        return cg

    def test_the_library_is_told_what_ended_a_load(self):
        told = []

        def forget_failed(_handle, plan, n_bytes, progress):
            told.append((plan, n_bytes, progress._obj))
            return abi.OK

        failed = {"status": 24, "failed_token": 128, "failed_levels": 1 << 2, "failed_worst_level": 3}
        self.connector(cachegen_forget_failed=forget_failed).forget_failed(
            b"plan", LoadReport(128, 2, bytes_read=7, total_ns=9, **failed)
        )
        ((plan, n_bytes, progress),) = told
        self.assertEqual((plan, n_bytes, progress.bytes_read, progress.total_ns), (b"plan", 4, 7, 9))
        self.assertEqual({name: getattr(progress, name) for name in failed}, failed)

    def test_the_library_is_told_which_levels_a_load_had(self):
        told = []
        cg = self.connector(
            cachegen_report_load=lambda _handle, from_token, progress: told.append((from_token, progress._obj))
        )
        cg.report_load(64, LoadReport(320, 2, decode_ns=5, copy_ns=3, levels=bytes([0, 1, 1, 0])))
        ((from_token, progress),) = told
        self.assertEqual((from_token, progress.loaded_tokens, progress.worst_level), (64, 320, 2))
        self.assertEqual((progress.decode_ns, progress.copy_ns, list(progress.chunks_at)), (5, 3, [2, 2, 0, 0]))


class RanksTest(unittest.TestCase):
    """Several ranks load one request, each its heads; how far and how well each one comes is its own affair."""

    def loaded(self, *reports, together=False):
        made = scheduler(Store(hit=192))
        made.matched_tokens(request(), 0)
        made.update_after_alloc(request(), blocks(13), 192)
        made.step(step_of(None, 0, 0))
        reports = [WorkerReport(loads={"r": LoadReport(*report)}) for report in reports]
        if together:  # as vLLM joins what comes from the ranks in one step
            reports = [functools.reduce(WorkerReport.aggregate, reports)]
        for report in reports:
            made.take_report(report)
        return made

    def test_only_what_every_rank_has_is_loaded_and_it_is_as_bad_as_the_worst(self):
        for together in (True, False):
            for reports in (((192, 1), (128, 2)), ((128, 2), (192, 1)), ((128, 1), (192, 2))):
                with self.subTest(f"{together} {reports}"):
                    made = self.loaded(*reports, together=together)
                    self.assertEqual(made.matched_tokens(request(), 0), (0, False), "asks again after a failure")
                    answer = made.finish(request(), [])
                    self.assertEqual((answer["cachegen.hit_tokens"], answer["cachegen.level"]), (128, "L2"))
                    self.assertEqual(made.local_cache.provenance.worst_of([1]), 2)

    def test_what_is_whole_on_one_rank_only_is_not_taken_for_loaded(self):
        made = self.loaded((192, 1), (0, 0))
        made.update_after_alloc(request(), blocks(13), 0)
        (save,) = made.step(step_of("r", 0, 200)).saves
        self.assertEqual((save.from_token, save.to_token), (0, 192))


class CongestionTest(unittest.TestCase):
    """What a congested load brought does not outlive its request in vLLM's own prefix cache."""

    def evicted(self, level, keep_level=2, preempted=None):
        """Of a request that loads 8 blocks and computes the other 5. preempted: it is when it ends, and has asked again
        or not."""
        made = scheduler(Store(hit=128), keep_level=keep_level)
        made.matched_tokens(request(), 0)
        made.update_after_alloc(request(), blocks(8), 128)
        made.step(step_of(None, 0, 0))
        made.take_report(WorkerReport(loads={"r": LoadReport(128, level)}))
        made.update_after_alloc(request(), blocks(13), 0)
        made.step(step_of("r", 128, 72))
        grows = step_of("r", 200, 1, n_blocks=14, is_new=False)
        grows.scheduled_cached_reqs.new_block_ids = [([14],)]
        made.step(grows)
        if preempted == "asks again":
            made.library.cg.hit = 0
            made.matched_tokens(request(), 0)
        made.finish(request(), list(range(1, 15)) if preempted is None else [])
        return made.local_cache.manager.evicted

    def test_what_is_worse_than_the_floor_goes_with_all_that_was_computed_after_it(self):
        self.assertEqual(self.evicted(level=3), set(range(1, 15)))

    def test_also_where_the_request_is_aborted_while_it_is_preempted(self):
        for preempted in ("waits", "asks again"):
            self.assertEqual(self.evicted(level=3, preempted=preempted), set(range(1, 15)), preempted)
            self.assertEqual(self.evicted(level=2, preempted=preempted), set())

    def test_blocks_that_others_have_had_meanwhile_stay(self):
        made = scheduler(Store(hit=128))
        made.matched_tokens(request(), 0)
        made.update_after_alloc(request(), blocks(8), 128)
        made.step(step_of(None, 0, 0))
        made.take_report(WorkerReport(loads={"r": LoadReport(128, 3)}))
        made.update_after_alloc(request(), blocks(13), 0)
        made.step(step_of("r", 128, 72))
        made.library.cg.hit = 0
        made.matched_tokens(request("s"), 0)  # gets the first 4 of the blocks, as "r" is preempted
        made.update_after_alloc(request("s"), blocks(4), 0)
        made.step(step_of("s", 0, 64, n_blocks=4))
        made.finish(request(), [])
        self.assertEqual(made.local_cache.manager.evicted, set(range(5, 14)))

    def test_what_is_good_enough_stays(self):
        self.assertEqual([self.evicted(2), self.evicted(0), self.evicted(3, keep_level=3)], [set()] * 3)

    def test_requests_that_share_such_blocks_leave_nothing_of_it_either(self):
        made = scheduler(Store())
        made.local_cache.provenance.mark([1, 2, 3, 4], 3, loaded=True)  # of a request that still runs
        made.local_cache.manager.get_computed_blocks = lambda _request: (blocks(4), 64)
        made.matched_tokens(request("s"), 64)
        made.update_after_alloc(request("s"), blocks(13), 0)
        made.step(step_of("s", 64, 136))
        made.finish(request("s"), list(range(1, 14)))
        self.assertEqual(made.local_cache.manager.evicted, set(range(1, 14)))

    def test_what_another_tier_brought_stays(self):
        made = scheduler(Store())
        made.matched_tokens(request(), 0)
        made.update_after_alloc(request(), blocks(13), 0)
        made.step(step_of("r", 64, 136))
        made.finish(request(), list(range(1, 14)))
        self.assertEqual(made.local_cache.manager.evicted, set())

    def test_a_manager_that_cannot_is_no_failure_of_the_request(self):
        made = scheduler(Store())
        made.local_cache.manager = None
        made.matched_tokens(request(), 0)
        made.states["r"].level = 3
        made.local_cache.provenance.mark([1], 3, loaded=True)
        with self.assertLogs("vllm.cachegen", "ERROR"):
            self.assertIsNotNone(made.finish(request(), [1]))


class ReportTest(unittest.TestCase):
    def test_what_ended_a_load_is_held_against_that_chunk_alone(self):
        made = scheduler(Store(hit=192))
        made.matched_tokens(request(), 0)
        made.update_after_alloc(request(), blocks(13), 192)
        failed = {"status": 24, "failed_token": 128, "failed_levels": 1 << 2, "failed_worst_level": 3}
        load = LoadReport(128, 2, bytes_read=7, **failed)
        made.take_report(WorkerReport(loads={"r": load}))
        self.assertEqual(made.library.cg.forgotten, [(b"plan", load)])

    def test_a_worker_that_is_off_is_asked_for_nothing(self):
        made = scheduler(Store(hit=192))
        self.assertEqual(made.matched_tokens(request("a"), 0), (192, True))
        with self.assertLogs("vllm.cachegen", "ERROR") as log:
            made.take_report(WorkerReport(is_off=True))
            made.take_report(WorkerReport(is_off=True))  # of another rank
            made.take_report(WorkerReport())
        self.assertEqual(len(log.output), 1)
        self.assertEqual(made.matched_tokens(request("b"), 0), (0, False))
        self.assertEqual(len(made.library.cg.salts), 1, "looked up")
        made.update_after_alloc(request("b"), blocks(13), 0)
        self.assertEqual(made.step(step_of("b", 0, 200)).saves, [])

    def test_the_reports_of_a_load_reach_the_answer(self):
        made = scheduler(Store(hit=192))
        made.matched_tokens(request(), 0)
        made.update_after_alloc(request(), blocks(13), 192)
        delivered = {"levels": bytes([3, 3, 2]), "predicted_kl": 0.25, "bytes_dropped": 5}
        made.take_report(WorkerReport(loads={"r": LoadReport(192, 3, bytes_read=7, **delivered)}))
        answer = made.finish(request(), [])
        told = {"hit_tokens": 192, "level": "L3", "levels": ["L3", "L3", "L2"], "predicted_kl": 0.25, "bytes": 7}
        for name, value in {**told, "bytes_dropped": 5, "provenance": "L3"}.items():
            self.assertEqual(answer["cachegen." + name], value)
        json.dumps(answer)  # it goes through HTTP

    def test_of_what_ranks_delivered_the_worse_is_told(self):
        one = LoadReport(128, 3, bytes_read=1, total_ns=1, levels=bytes([3, 1]), predicted_kl=0.25, bytes_dropped=3)
        other = LoadReport(192, 2, bytes_read=2, total_ns=2, levels=bytes([2, 2, 2]), predicted_kl=0.5, bytes_dropped=4)
        for joined in (one.joined(other), other.joined(one)):
            self.assertEqual((joined.levels, joined.predicted_kl), (bytes([3, 2]), 0.5))
            self.assertEqual((joined.bytes_read, joined.bytes_dropped), (2, 4))


if __name__ == "__main__":
    unittest.main(verbosity=2)
