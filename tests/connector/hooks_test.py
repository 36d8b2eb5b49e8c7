"""The connector's hooks, with an engine's classes and without an engine: whatever fails inside, vLLM gets an answer.

usage: hooks_test.py
"""

import array
import dataclasses
import fcntl
import functools
import itertools
import math
import os
import re
import resource
import sys
import tempfile
import threading
import time
import types
import unittest
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "connector"))
try:
    import vllm  # noqa: F401
except ImportError as error:
    print(f"skipped: {error}: no hook of the connector was called")
    sys.exit(1 if "engine" in os.environ.get("CG_TEST_REQUIRE", "").split(",") else 77)
import prometheus_client.multiprocess  # noqa: E402
import torch  # noqa: E402
from cachegen import abi  # noqa: E402
from cachegen.fingerprint import model_fingerprint  # noqa: E402
from cachegen.vllm import guard  # noqa: E402
from cachegen.vllm.adapters import MAX_AHEAD, HeldAdapters, identity_of  # noqa: E402
from cachegen.vllm.connector import CachegenConnector, StartFailure  # noqa: E402
from cachegen.vllm.guard import Failures, Outages  # noqa: E402
from cachegen.vllm.library import Library, Unsupported  # noqa: E402
from cachegen.vllm.lookups import LOOKUPS  # noqa: E402
from cachegen.vllm.messages import LoadPlan, LoadReport, Metadata, SavePlan, WorkerReport  # noqa: E402
from cachegen.vllm.metrics import DROPPED, REFUSED, UP, Increments, Stats  # noqa: E402
from cachegen.vllm.provenance import Provenance  # noqa: E402
from cachegen.vllm.ranks import UnsupportedRanks, rank_of  # noqa: E402
from cachegen.vllm.scheduler import OTHER_MODEL, OTHER_PROFILE, Scheduler  # noqa: E402
from cachegen.vllm.versions import refusal  # noqa: E402
from cachegen.vllm.worker import GPU, LOADS, SAVES, STAGING, STEP_WAIT_S, Worker  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector  # noqa: E402


class Broken:
    """Whose every attribute is a failure."""

    def __getattr__(self, name):
        raise RuntimeError(f"no {name} today")


def connector(scheduler=None, worker=None):
    made = CachegenConnector.__new__(CachegenConnector)
    made.failures, made._increments = Failures(), Increments()
    made.scheduler, made.worker, made._connector_metadata = scheduler, worker, Metadata()
    made._vllm_config, made._down = None, None
    made._role = KVConnectorRole.WORKER if worker is not None else KVConnectorRole.SCHEDULER
    made._kv_transfer_config = types.SimpleNamespace(kv_connector_extra_config={})
    return made


def library_of(cg, **more):
    """What stands for a Library. cg: for the library."""
    return types.SimpleNamespace(root="/store", cg=cg, chunk_tokens=16, **more)


def kv_cache_of(n_groups=1):
    """What stands for a KVCacheConfig."""
    spec = types.SimpleNamespace(block_size=16)
    return types.SimpleNamespace(kv_cache_groups=n_groups * [types.SimpleNamespace(kv_cache_spec=spec)])


SCHEDULER_HOOKS = {  # arguments, and what counts as a miss
    "bind_kv_cache_manager": ((None,), None),
    "get_num_new_matched_tokens": ((None, 0), (0, False)),
    "update_state_after_alloc": ((None, None, 8), None),
    "build_connector_meta": ((None,), Metadata()),
    "update_connector_output": ((None,), None),
    "request_finished": ((None, []), (False, None)),
    "get_kv_connector_stats": ((), None),
    "reset_cache": ((), False),
}
WORKER_HOOKS = {
    "register_kv_caches": (({},), None),
    "handle_preemptions": ((Metadata(),), None),
    "bind_connector_metadata": ((Metadata(),), None),
    "start_load_kv": ((None,), None),
    "wait_for_layer_load": (("layer",), None),
    "save_kv_layer": (("layer", None, None), None),
    "wait_for_save": ((), None),
    "get_finished": ((set(),), (None, None)),
    "get_block_ids_with_load_errors": ((), set()),
    "build_connector_worker_meta": ((), None),
    "get_kv_connector_stats": ((), None),
    "shutdown": ((), None),
}


class HooksTest(unittest.TestCase):
    def check(self, hooks, down=None, **sides):
        for name, (arguments, miss) in hooks.items():
            with self.subTest(name):
                made = connector(**sides)
                made._down = down
                self.assertEqual(getattr(made, name)(*arguments), miss)

    def test_every_hook_that_does_something_is_guarded(self):
        does_nothing = {"start_load_kv", "wait_for_layer_load", "save_kv_layer", "requires_kv_delivery"}
        in_other_processes = {"build_kv_connector_stats", "build_prom_metrics"}
        public = {name for name in vars(CachegenConnector) if not name.startswith("_")}
        tested = {*SCHEDULER_HOOKS, *WORKER_HOOKS}
        self.assertEqual(public - does_nothing - in_other_processes - tested, {"failures"})

    def test_so_is_what_vllm_calls_of_the_class(self):
        for made in ("PromMetrics", "LoggedStats"):
            with mock.patch(f"cachegen.vllm.connector.{made}", side_effect=ValueError):
                self.assertIsNone(CachegenConnector.build_prom_metrics(None, {}, [], {}) if made == "PromMetrics"
                                  else CachegenConnector.build_kv_connector_stats())  # fmt: skip

    def test_so_is_the_making_of_a_side(self):
        made = connector()
        made._kv_transfer_config = types.SimpleNamespace(kv_connector_extra_config={})
        for role, side in ((KVConnectorRole.WORKER, "Worker"), (KVConnectorRole.SCHEDULER, "Scheduler")):
            made._down = None
            with mock.patch(f"cachegen.vllm.connector.{side}", side_effect=ValueError):
                made._make_side(object(), role, kv_cache_of())
            self.assertEqual(made._down, "error")

    def test_a_failure_anywhere_is_a_miss(self):
        self.check(SCHEDULER_HOOKS, scheduler=Broken())
        self.check(WORKER_HOOKS, worker=Broken())

    def test_so_is_a_disabled_connector(self):
        down = {"get_kv_connector_stats": ((), Stats(data={"state": {"scheduler": "unsupported"}}))}
        self.check({**SCHEDULER_HOOKS, **down, "reset_cache": ((), True)}, down="unsupported")
        down = {
            "get_kv_connector_stats": ((), Stats(data={"state": {"worker": "unsupported"}})),
            "build_connector_worker_meta": ((), WorkerReport(is_off=True)),
        }
        for name, (arguments, miss) in {**WORKER_HOOKS, **down}.items():
            with self.subTest(name):
                made = connector(worker=Worker(None, Failures(), block_tokens=16))
                made._down = "unsupported"
                self.assertEqual(getattr(made, name)(*arguments), miss)

    def test_a_worker_that_is_disabled_says_so_once(self):
        made = connector(worker=Worker(None, Failures(), block_tokens=16))
        self.assertTrue(made.build_connector_worker_meta().is_off)
        self.assertIsNone(made.build_connector_worker_meta())

    def test_so_does_one_whose_kv_cache_cannot_be_registered(self):
        worker = Worker(types.SimpleNamespace(cg=None, close=lambda: None), Failures(), block_tokens=16)
        made = connector(worker=worker)
        self.assertIsNone(made.build_connector_worker_meta())
        made.register_kv_caches({})  # fails: there is no engine
        self.assertTrue(made.build_connector_worker_meta().is_off)

    def test_a_failure_is_logged_once(self):
        made = connector(scheduler=Broken())
        with self.assertLogs(guard.logger, "ERROR") as log:
            for _ in range(5):
                made.get_num_new_matched_tokens(None, 0)
        self.assertEqual(len(log.output), 1)
        self.assertIn("get_num_new_matched_tokens", log.output[0])

    def test_loads_that_are_planned_reach_the_worker_whatever_else_fails(self):
        rank = types.SimpleNamespace(n_ranks=1)
        library = types.SimpleNamespace(unknown_level=0, chunk_tokens=64, save_on_use=1, rank=rank)
        scheduler, plan = Scheduler(library, Failures()), LoadPlan("r", 0, 32, [1, 2], b"")
        scheduler._planned_loads.append(plan)
        self.assertEqual(connector(scheduler=scheduler).build_connector_meta(None).loads, [plan])

    def test_a_load_that_cannot_start_is_answered_for(self):
        for library in (None, Broken()):
            with self.subTest(library):
                made = connector(worker=Worker(library, Failures(), block_tokens=16))
                made.bind_connector_metadata(Metadata(loads=[LoadPlan("r", 16, 48, [5, 6, 7], b"")]))
                self.assertEqual(made.get_finished(set()), (None, {"r"}))
                self.assertEqual(made.get_block_ids_with_load_errors(), {6, 7})
                self.assertEqual(made.build_connector_worker_meta().loads["r"].loaded_tokens, 16)
                self.assertEqual(made.get_finished(set()), (None, None))

    def test_of_a_load_that_came_short_the_blocks_are_bad_that_are_not_whole(self):
        progress = abi.Progress(done=1)
        cg = types.SimpleNamespace(load_poll=lambda _: progress, load_free=lambda _: None, load_levels=lambda *_: b"")
        worker = Worker(library_of(cg), Failures(), block_tokens=16)
        for loaded_tokens, bad in ((0, {6, 7, 8}), (16, {6, 7, 8}), (40, {7, 8}), (48, {8}), (63, {8}), (64, set())):
            with self.subTest(loaded_tokens):
                progress.loaded_tokens = loaded_tokens
                worker.loads["r"] = LoadPlan("r", 16, 64, [5, 6, 7, 8], b""), "handle"
                self.assertEqual(connector(worker=worker).get_finished(set()), (None, {"r"}))
                self.assertEqual(worker.take_bad_blocks(), bad)

    def test_a_load_that_cannot_be_asked_for_is_answered_for(self):
        freed = []

        def broken(_load):
            raise OSError("gone")

        cg = types.SimpleNamespace(load_poll=broken, load_free=freed.append)
        worker = Worker(library_of(cg), Failures(), block_tokens=16)
        worker.loads["r"] = LoadPlan("r", 0, 32, [5, 6], b""), "handle"
        self.assertEqual(connector(worker=worker).get_finished(set()), (None, {"r"}))
        self.assertEqual(freed, ["handle"])
        self.assertEqual(worker.take_bad_blocks(), {5, 6})

    def test_what_a_load_brings_after_a_reset_is_not_used(self):
        cancelled = []
        cg = types.SimpleNamespace(
            load_start=lambda *_arguments: "handle", load_cancel=cancelled.append, load_free=lambda _: None,
            load_poll=lambda _: abi.Progress(done=1, loaded_tokens=32), load_levels=lambda *_: b"",
        )  # fmt: skip
        worker = Worker(library_of(cg), Failures(), block_tokens=16)
        made, plan = connector(worker=worker), LoadPlan("r", 0, 32, [5, 6], b"")
        for cancelled_loads, loaded in (({"r"}, 0), (set(), 32)):  # then the same request again
            made.bind_connector_metadata(Metadata(loads=[plan]))
            made.bind_connector_metadata(Metadata(cancelled_loads=cancelled_loads))
            self.assertEqual(made.get_finished(set()), (None, {"r"}))
            self.assertEqual(made.build_connector_worker_meta().loads["r"].loaded_tokens, loaded)
            self.assertEqual(made.get_block_ids_with_load_errors(), set() if loaded else {5, 6})
        self.assertEqual(cancelled, ["handle"])

    def test_on_a_gpu_such_a_load_is_not_waited_for_and_answered_for_once_it_is_done(self):
        answers = [OSError("gone"), OSError("gone"), 0, 1, 1]  # the last ones: done
        freed, cancelled = [], []

        def poll(_load):
            answer = answers.pop(0)
            if isinstance(answer, OSError):
                raise answer
            return abi.Progress(done=answer, loaded_tokens=32)

        def free(load):
            self.assertLessEqual(len(answers), 1, "freeing waits for a GPU that may hang")
            freed.append(load)

        cg = types.SimpleNamespace(load_poll=poll, load_free=free, load_cancel=cancelled.append)
        worker = Worker(library_of(cg), Failures(), block_tokens=16)
        worker._on_gpu = True
        worker.loads["r"] = LoadPlan("r", 0, 32, [5, 6], b""), "handle"
        made = connector(worker=worker)
        self.assertEqual(made.get_finished(set()), (None, None))
        self.assertEqual((made.get_finished(set()), freed), ((None, None), []))
        self.assertEqual(made.get_finished(set()), (None, {"r"}))
        self.assertEqual((freed, set(cancelled), worker._void_loads), (["handle"], {"handle"}, set()))
        self.assertEqual(worker.take_bad_blocks(), {5, 6})  # what it loaded is not known

    def test_closing_waits_for_nothing_that_the_library_ends_in_its_time(self):
        for on_gpu in (False, True):
            with self.subTest(on_gpu=on_gpu):
                freed = []
                cg = types.SimpleNamespace(
                    load_poll=lambda load: abi.Progress(done=load == "done"), load_free=freed.append,
                    save_poll=lambda save: abi.Progress(done=save == "done", copied=1), save_free=freed.append,
                )  # fmt: skip
                library = library_of(cg, close=lambda: freed.append("closed"))
                worker = Worker(library, Failures(), block_tokens=16)
                worker._on_gpu = on_gpu
                for name in ("under way", "done"):
                    worker.loads[name] = LoadPlan(name, 0, 32, [5, 6], b""), name
                    worker.saves.append((name, 32, name))
                connector(worker=worker).shutdown()
                self.assertEqual(freed, ["done", "done", "closed"])


class StartOfLoadsTest(unittest.TestCase):
    def test_what_the_library_refuses_to_start_is_an_outage_until_a_load_works(self):
        foreign_profile = 31
        refusals = [foreign_profile, abi.NO_MEMORY]

        def load_start(*_arguments):
            if refusals:
                raise abi.CachegenError(refusals.pop(), "refused")
            return "handle"

        progress = abi.Progress(done=1, loaded_tokens=32)
        cg = types.SimpleNamespace(
            load_start=load_start, load_poll=lambda _: progress, load_levels=lambda *_: b"", load_free=lambda _: None,
        )  # fmt: skip
        made = connector(worker=Worker(library_of(cg), Failures(), block_tokens=16))
        for state in (LOADS, LOADS, UP):
            made.bind_connector_metadata(Metadata(loads=[LoadPlan("r", 0, 32, [5, 6], b"")]))
            self.assertEqual(made.get_finished(set()), (None, {"r"}))
            self.assertEqual(made._state(), state)


class ProfileTest(unittest.TestCase):
    """The two sides open profiles/default one after the other: another one may have become it meanwhile."""

    def library(self, profile, model="f", **cg):
        made = Library.__new__(Library)
        made.worst_level, made.keep_level, made._has_mrope = 3, 2, False
        made.may_load, made.save_on_use, made.block_tokens = True, 1, 16
        made.rank = types.SimpleNamespace(index=0, n_ranks=1, first_head=0, stores=True)
        made.weights = types.SimpleNamespace(doubt=None)
        info = abi.Info(
            chunk_tokens=64, store_levels=1 if not profile else 14, has_profile=bool(profile), model=b"m",
            model_fingerprint_hex=model.encode(), profile_fingerprint_hex=profile.encode(),
        )  # fmt: skip
        made.cg = types.SimpleNamespace(get_info=lambda: info, **cg)
        made._check_model(model)
        return made

    def worker(self, profile, model="f"):
        made = Worker(self.library(profile, model, register_kv=lambda **_: 1), Failures(), block_tokens=16)
        layout = {"block_tokens": 16, "memory": abi.MEMORY_HOST}
        with mock.patch("cachegen.vllm.worker.kv_layout", return_value=layout):
            connector(worker=made).register_kv_caches({})
        return connector(worker=made)

    def test_an_engine_whose_sides_have_one_each_goes_on_without_the_store_and_says_so(self):
        for profiles, state in ((("a", "a"), UP), (("a", "b"), OTHER_PROFILE), (("", "b"), OTHER_PROFILE)):
            of_worker, of_scheduler = profiles
            with self.subTest(profiles):
                made = connector(scheduler=Scheduler(self.library(of_scheduler), Failures()))
                ranks = [self.worker(of_scheduler), self.worker(of_worker)]
                first, second = (rank.build_connector_worker_meta() for rank in ranks)
                with self.assertLogs("vllm.cachegen") as log:
                    guard.logger.info("at least one line")
                    made.update_connector_output(types.SimpleNamespace(kv_connector_worker_meta=first.aggregate(second)))
                self.assertEqual(len(log.output), 1 + (state != UP), log.output)
                self.assertEqual((made._state(), made.scheduler._is_off()), (state, state != UP))
                self.assertIsNone(ranks[0].build_connector_worker_meta(), "told once")


    def test_so_does_one_whose_worker_names_the_model_by_another_fingerprint(self):
        made = connector(scheduler=Scheduler(self.library("a"), Failures()))
        report = self.worker("a").build_connector_worker_meta()
        report.aggregate(self.worker("a", model="f2").build_connector_worker_meta())
        with self.assertLogs("vllm.cachegen", "WARNING") as log:
            made.update_connector_output(types.SimpleNamespace(kv_connector_worker_meta=report))
        self.assertEqual(len(log.output), 1, log.output)
        self.assertIn("other model: f, a worker's is f2", log.output[0])
        self.assertEqual((made._state(), made.scheduler._is_off()), (OTHER_MODEL, True))


class RanksReportTest(unittest.TestCase):
    def test_nothing_is_lost_of_what_two_ranks_report(self):
        def reports():
            first = dict(
                loads={"r": LoadReport(64, 1)}, prefills=[(64, 2016, 5)], is_off=False,
                fingerprints={"f"}, profiles={"a"}, adapters={7: {0: "x"}}, taken=[(7, "name", "x")],
                told=[("name", "x")],
            )  # fmt: skip
            second = dict(
                loads={"r": LoadReport(32, 2), "s": LoadReport(16, 0)}, prefills=[(65, 2080, 6)], is_off=True,
                fingerprints={"f2"}, profiles={"b"}, adapters={7: {1: "x"}, 8: {1: "y"}}, taken=[(8, "other", None)],
                told=[("other", "y")],
            )  # fmt: skip
            return first, second

        want = dict(
            loads={"r": LoadReport(32, 2), "s": LoadReport(16, 0)}, prefills=[(64, 2016, 5), (65, 2080, 6)],
            is_off=True, fingerprints={"f", "f2"}, profiles={"a", "b"}, adapters={7: {0: "x", 1: "x"}, 8: {1: "y"}},
            taken=[(7, "name", "x"), (8, "other", None)], told=[("name", "x"), ("other", "y")],
        )  # fmt: skip
        fields = {field.name for field in dataclasses.fields(WorkerReport)}
        for order in (0, 1):
            one, other = (WorkerReport(**report) for report in (reports() if order == 0 else reversed(reports())))
            both = one.aggregate(other)
            self.assertEqual(want.keys(), fields)
            for name, value in want.items():
                with self.subTest(f"{name} {order}"):
                    found = getattr(both, name)
                    self.assertEqual(sorted(found) if isinstance(found, list) else found, value)


class QueueTest(unittest.TestCase):
    def test_the_library_is_told_what_the_engine_has_to_compute_until_that_is_nothing(self):
        told = []
        cg = types.SimpleNamespace(report_queue=lambda *queued: told.append(queued))
        worker = Worker(library_of(cg), Failures(), block_tokens=16)
        for queued in (0, 300, 200, 0, 0):
            worker.submit(Metadata(queued_tokens=queued, queued_pairs=7))
        self.assertEqual(told, [(300, 7), (200, 7), (0, 7)])


class SaveTest(unittest.TestCase):
    """What cannot be taken is dropped at once, and what follows it, too: it could not be reached."""

    def setUp(self):
        self.taken, self.numbers, self.is_full, self.status, self.saved_to = [], [], False, 0, 1 << 20
        self.refusal, self.refused = None, []
        cg = types.SimpleNamespace(
            save_start=self.save_start, save_free=lambda _: None, save_cut_from=lambda *_: None, save_poll=self.poll,
            save_refuse=self.refused.append, strerror=str,
        )  # fmt: skip
        self.rank = types.SimpleNamespace(index=0, first_head=0, stores=True)
        self.worker = Worker(library_of(cg, wait=self.fail, rank=self.rank), Failures(), block_tokens=16)

    def save_start(self, _request, _kv_id, from_token, *_rest, copy_later, hold_later, after, number):
        if self.refusal is not None:
            raise abi.CachegenError(self.refusal, "refused")
        self.taken.append(from_token)
        self.numbers.append(number)
        return None if self.is_full else from_token

    def poll(self, _save):
        return types.SimpleNamespace(done=1, copied=1, status=self.status, loaded_tokens=self.saved_to)

    def step(self, *from_tokens, req_id="r"):
        plans = [
            SavePlan(req_id, array.array("I"), b"", b"", at, at + 64, 0, False, [1], None, number=1 + at)
            for at in from_tokens
        ]
        metadata = Metadata(saves=plans)
        self.worker.submit(metadata)
        self.worker.start_saves(metadata)

    def test_a_store_that_hangs_is_one_outage_and_not_a_failure_of_each_save(self):
        self.refusal = abi.TIMED_OUT
        with self.assertLogs("vllm.cachegen", "WARNING") as logged:
            for n in range(3):
                self.step(0, req_id=f"r{n}")
        self.assertEqual(len(logged.records), 1)
        self.assertIn("request r0, to /store: the store hangs", logged.output[0])
        self.assertEqual(self.worker.outages.under_way(), [SAVES])
        self.refusal = None
        self.step(0, req_id="another")
        self.worker.finished_loads(set(), False)
        self.assertEqual(self.worker.outages.under_way(), [])
        self.refusal = abi.IO
        with self.assertLogs("vllm.cachegen", "ERROR"):
            self.step(64, req_id="another")
        self.assertEqual(self.worker.outages.under_way(), [SAVES])

    def test_full_staging_memory_is_not_waited_for(self):
        self.is_full = True
        self.step(0)
        self.is_full = False
        self.step(64)
        self.assertEqual((self.taken, self.numbers), ([0], [1]))
        self.assertEqual(self.worker._n_dropped, 2)
        self.step(0, req_id="s")
        self.assertEqual(self.taken, [0, 0])

    def test_a_rank_that_passes_its_heads_on_goes_on_with_it(self):
        self.rank.first_head = 2  # the one that stores may find what was dropped here, and would wait for the rest
        self.is_full = True
        self.step(0)
        self.is_full = False
        self.step(64)
        self.status, self.saved_to = abi.CANCELLED, 0
        self.worker.finished_loads(set(), False)
        self.step(128)
        self.assertEqual((self.taken, self.worker._n_dropped), ([0, 64, 128], 1))

    def test_the_rank_that_stores_is_told_of_a_save_that_is_not_asked_for(self):
        self.rank.first_head = 2
        self.worker._adapters = types.SimpleNamespace(holds=lambda _: False)
        plan = SavePlan("r", array.array("I"), b"", b"", 0, 64, 0, False, [1], None, ("name", b"old"), number=7)
        self.worker.start_saves(Metadata(saves=[plan]))
        plan = dataclasses.replace(plan, adapter=None, tokens=None, number=8)  # which raises
        with self.assertLogs("vllm.cachegen", "ERROR"):
            self.worker.start_saves(Metadata(saves=[plan]))
        self.assertEqual((self.taken, self.refused), ([], [7, 8]))

    def test_a_failed_save_ends_the_requests_saves(self):
        self.step(0)
        self.status = 5
        self.worker.finished_loads(set(), False)
        self.status = 0
        self.step(64)
        self.assertEqual(self.taken, [0])

    def test_a_save_that_lacks_another_ranks_heads_is_no_outage(self):
        self.step(0)
        self.status, self.saved_to = abi.CANCELLED, 0
        self.worker.finished_loads(set(), False)
        self.assertEqual(self.worker.outages.under_way(), [])
        self.step(64)
        self.assertEqual(self.taken, [0])

    def test_a_save_that_cannot_be_asked_for_is_not_waited_for(self):
        freed, poll = [], self.worker.library.cg.save_poll
        self.worker.library.cg.save_free = freed.append
        self.step(0)
        self.worker.library.cg.save_poll = self.fail  # which raises
        for _ in range(3):
            self.worker.finished_loads(set(), False)
        self.assertEqual(freed, [], "freeing waits until it is done")
        self.step(64)
        self.assertEqual(self.taken, [0])
        self.worker.library.cg.save_poll = poll
        for _ in range(2):
            self.worker.finished_loads(set(), False)
        self.assertEqual((freed, self.worker.saves, self.worker._copying), ([0], [], []))

    def test_a_save_that_is_over_is_not_freed_before_its_copy_has_ended(self):
        freed, poll = [], self.worker.library.cg.save_poll
        self.worker.library.cg.save_free = freed.append
        self.step(0)
        self.status = abi.TIMED_OUT
        self.worker.library.cg.save_poll = lambda save: types.SimpleNamespace(**{**vars(poll(save)), "copied": 0})
        self.worker.finished_loads(set(), False)
        self.assertEqual(freed, [], "freeing waits for the copy")
        self.worker.library.cg.save_poll = poll
        self.worker.finished_loads(set(), False)
        self.assertEqual((freed, self.worker.saves), ([0], []))

    def test_a_save_that_came_short_ends_the_requests_saves(self):
        self.step(0)
        self.saved_to = 32
        self.worker.finished_loads(set(), False)
        self.step(64)
        self.assertEqual(self.taken, [0])
        self.saved_to = 64
        self.step(0, req_id="s")
        self.worker.finished_loads(set(), False)
        self.step(64, req_id="s")
        self.assertEqual(self.taken, [0, 0, 64])

    def test_only_a_save_that_is_stored_whole_ends_an_outage(self):
        # (status, saved to): the store is full; behind what was not stored, nothing is tried; then it has room again.
        with self.assertLogs("vllm.cachegen", "WARNING") as log:
            for n, (status, saved_to, under_way) in enumerate(((abi.IO, 0, [SAVES]), (0, 32, [SAVES]), (0, 64, []))):
                self.status, self.saved_to = status, saved_to
                self.step(0, req_id=f"r{n}")
                self.worker.finished_loads(set(), False)
                self.assertEqual(self.worker.outages.under_way(), under_way)
        self.assertIn(f"request r0, to /store: {abi.IO};", log.output[0])
        self.saved_to = 32  # cut
        self.step(0, req_id="cut")
        self.worker.finished_loads(set(), False)
        self.assertEqual(self.worker.outages.under_way(), [])

    def test_a_rank_whose_heads_another_one_has_saves_nothing(self):
        self.rank.stores = False
        self.step(0)
        self.assertEqual(self.taken, [])

    def test_what_is_over_is_forgotten(self):
        self.is_full = True
        self.step(0)
        self.worker.finished_loads({"r"}, False)
        self.assertEqual((self.worker._saving, self.worker._unsaved), (set(), set()))


class AbiTest(unittest.TestCase):
    def test_a_library_of_another_abi_is_refused_by_name(self):
        library = mock.MagicMock(_name="of_another.so")
        library.cachegen_abi_version.return_value = abi.ABI_VERSION + 1
        says = f"of_another.so has version {abi.ABI_VERSION + 1} of the ABI"
        with mock.patch("ctypes.CDLL", lambda _path: library), self.assertRaisesRegex(OSError, says):
            abi.Connector({}, "of_another.so")

    def test_what_cannot_be_opened_is_the_library_and_a_model_without_weights_is_not(self):
        with tempfile.TemporaryDirectory() as empty:
            self.assertRaises(abi.LibraryError, abi.Connector, {}, os.path.join(empty, "none.so"))
            with self.assertRaises(OSError) as raised:
                model_fingerprint(empty)
        self.assertNotIsInstance(raised.exception, abi.LibraryError)


class CopyTest(unittest.TestCase):
    """A step that gives a block to somebody else begins when no save reads it any more."""

    def setUp(self):
        self.copied, self.n_waits, self.loaded_after, self.cut, self.cut_at = set(), 0, None, [], []
        self.have_time(3600)
        cg = types.SimpleNamespace(
            save_start=self.save_start, save_poll=self.poll, load_start=self.load_start, save_cut_from=self.note_cut
        )
        rank = types.SimpleNamespace(index=0, first_head=0, stores=True, steps_alone=True)
        self.worker = Worker(library_of(cg, wait=self.wait, rank=rank), Failures(), block_tokens=16)
        for name, blocks in (("a", [1, 2]), ("b", [3, 4])):
            plan = SavePlan(name, array.array("I"), b"", b"", 0, 32, 0, False, blocks, None)
            self.worker.start_saves(Metadata(saves=[plan]))

    def have_time(self, seconds):
        for name in ("COPY_WAIT_S", "STEP_WAIT_S"):
            patch = mock.patch(f"cachegen.vllm.worker.{name}", seconds)
            patch.start()
            self.addCleanup(patch.stop)

    def save_start(self, *arguments, copy_later, hold_later, after, number):
        self.assertTrue(copy_later and not hold_later and after is None)  # not on a GPU
        return tuple(arguments[6])  # the blocks

    def poll(self, save):
        return types.SimpleNamespace(done=0, copied=save in self.copied)

    def wait(self, _seconds):
        self.n_waits += 1
        if self.n_waits == 3:
            self.copied.add((1, 2))
        if self.n_waits == 5:
            self.copied.add((3, 4))

    def load_start(self, *_arguments):
        self.loaded_after = self.n_waits

    def note_cut(self, save, token):
        self.cut.append(save)
        self.cut_at.append(token)

    def test_all_that_a_step_waits_for_has_one_time(self):
        mock.patch.stopall()
        clock = mock.Mock(wraps=time, monotonic=lambda: self.now_s)
        self.now_s, began_s = 1000.0, 1000.0

        def wait(seconds):
            self.now_s += seconds
            return 0

        self.worker.library.wait = wait
        self.worker._adapters = mock.Mock(take_taken=lambda: [(mock.Mock(lora_int_id=1), "other")])
        self.worker._adapted_loads["r"] = (mock.Mock(adapter=(1, "own"), to_token=32, from_token=0), {7})
        self.worker.loads["l"] = (mock.Mock(), "load")
        self.worker.library.cg.load_poll = lambda _load: types.SimpleNamespace(done=0)
        with mock.patch("cachegen.vllm.worker.time", clock):
            self.worker.submit(Metadata(overwritten={2, 4}))
            self.worker.finished_loads(set(), is_idle=True)
            self.assertAlmostEqual(self.now_s - began_s, STEP_WAIT_S)
            self.worker.submit(Metadata())
            self.worker.finished_loads(set(), is_idle=True)
            self.assertAlmostEqual(self.now_s - began_s, 2 * STEP_WAIT_S)

    def test_a_step_that_computes_nothing_waits_for_loads_where_no_other_engine_s_step_waits_for_it(self):
        self.worker.loads["l"] = (mock.Mock(), "load")
        self.worker.library.cg.load_poll = lambda _load: types.SimpleNamespace(done=0)
        for steps_alone in (True, False):
            self.worker.library.rank.steps_alone = steps_alone
            n_waits = self.n_waits
            self.worker.finished_loads(set(), is_idle=True)
            self.assertEqual(self.n_waits - n_waits, int(steps_alone))

    def test_other_blocks_are_not_waited_for(self):
        self.worker.submit(Metadata(overwritten={5, 6}))
        self.assertEqual(self.n_waits, 0)

    def test_blocks_before_what_is_saved_are_not_waited_for(self):
        plan = SavePlan("c", array.array("I"), b"", b"", 32, 64, 0, False, [5, 6, 7, 8], None)
        self.worker.start_saves(Metadata(saves=[plan]))
        self.assertEqual(self.worker._copying[-1].block_ids, [7, 8])
        self.worker.submit(Metadata(overwritten={5, 6}))
        self.assertEqual(self.n_waits, 0)
        self.copied.add((5, 6, 7, 8))

    def test_the_copy_in_the_way_is_waited_for_and_no_other(self):
        self.worker.submit(Metadata(overwritten={2, 9}, loads=[LoadPlan("r", 0, 16, [2], b"")]))
        self.assertEqual((self.n_waits, self.loaded_after), (3, 3))
        self.worker.submit(Metadata(overwritten={1, 2}))
        self.assertEqual(self.n_waits, 3)
        self.worker.submit(Metadata(overwritten={4}))
        self.assertEqual(self.n_waits, 5)

    def test_a_copy_in_the_way_for_too_long_is_cut_and_not_waited_for(self):
        self.have_time(0)
        self.worker.submit(Metadata(overwritten={5, 6}))
        self.assertEqual((self.cut, self.n_waits), ([], 0))
        self.worker.submit(Metadata(overwritten={1}, loads=[LoadPlan("r", 0, 16, [1], b"")]))
        self.assertEqual((self.cut, self.n_waits, self.loaded_after), ([(1, 2)], 0, 0))
        self.worker.submit(Metadata(overwritten={1}))
        self.assertEqual(self.cut, [(1, 2)], "the blocks are not its any more")
        self.assertEqual(len(self.worker.saves), 2)  # what was copied is still saved

    # vLLM gives a request's last block, which it could not keep for others, to the next request.
    def test_what_comes_before_the_first_block_that_is_wanted_is_copied_on(self):
        self.have_time(0)
        self.worker.library.chunk_tokens = 32
        plan = SavePlan("c", array.array("I"), b"", b"", 40, 120, 0, False, [0, 0, 5, 6, 7, 8, 9, 10], None)
        self.worker.start_saves(Metadata(saves=[plan]))
        for overwritten, cut_at in (({10}, [96]), ({9}, [96]), ({8, 10}, [96, 64]), ({5, 7}, [96, 64, 0])):
            with self.subTest(overwritten):
                self.worker.submit(Metadata(overwritten=overwritten))
                self.assertEqual(self.cut_at, cut_at, "nobody reads the rest of a chunk that is cut")
        self.assertEqual([copying.save for copying in self.worker._copying], [(1, 2), (3, 4)])

    def test_all_copies_of_a_step_have_one_time(self):
        clock = [100.0]

        def wait(seconds):
            clock[0] += seconds

        self.have_time(0.5)
        self.worker.library.wait = wait
        self.worker.library.cg.save_cut_from = lambda save, _token: (self.cut.append(save), self.copied.add(save))
        with mock.patch("cachegen.vllm.worker.time.monotonic", lambda: clock[0]):
            self.worker.submit(Metadata())
        self.assertEqual((self.cut, clock), ([(1, 2), (3, 4)], [100.5]))

    def test_where_nothing_can_be_waited_for_the_copy_in_the_way_is_asked_for_and_no_save_is_ended(self):
        polled = []

        def gone(_seconds):
            raise OSError("gone")

        def poll(save):
            polled.append(save)
            if len(polled) == 4:
                self.copied.add(save)
            return self.poll(save)

        self.worker.library.wait, self.worker.library.cg.save_poll = gone, poll
        self.worker.library.cg.save_free = self.fail
        self.worker.submit(Metadata(overwritten={1, 2}, loads=[LoadPlan("r", 0, 16, [2], b"")]))
        self.assertEqual((polled, self.loaded_after), ([(1, 2)] * 4 + [(3, 4)], 0))
        self.assertEqual(len(self.worker.saves), 2)
        self.assertEqual([copying.save for copying in self.worker._copying], [(3, 4)])

    def test_a_copy_that_cannot_be_asked_for_is_cut_before_its_blocks_are_anybody_elses(self):
        self.worker.library.cg.save_poll = self.worker.library.cg.save_free = self.fail
        self.worker.submit(Metadata(overwritten={5}))
        self.assertEqual(self.cut, [])
        self.worker.submit(Metadata(overwritten={1}))
        self.assertEqual(self.cut, [(1, 2)])
        self.assertEqual(len(self.worker.saves), 2)

    def test_where_it_is_not_known_which_blocks_all_are(self):
        self.worker.submit(Metadata())
        self.assertEqual(self.n_waits, 5)


class HoldTest(unittest.TestCase):
    """On a GPU a step's work waits for copies out of blocks that it gives to somebody else, and for no others."""

    def setUp(self):
        self.calls, self.copied = [], set()
        cg = types.SimpleNamespace(
            save_start=self.save_start,
            save_poll=lambda save: types.SimpleNamespace(done=save in self.copied, copied=save in self.copied, status=0,
                                                         loaded_tokens=32),
            save_hold=lambda *arguments: self.calls.append(("hold", *arguments)),
            save_cut_from=lambda save, _token: self.calls.append(("cut", save)),
            save_free=lambda save: self.calls.append(("free", save)),
            load_start=lambda *_arguments: self.calls.append("load"),
        )  # fmt: skip
        rank = types.SimpleNamespace(index=0, first_head=0, stores=True)
        self.worker = Worker(library_of(cg, wait=self.fail, rank=rank), Failures(), block_tokens=16)
        self.worker._on_gpu = self.worker._holds_later = True
        self.worker._steps = types.SimpleNamespace(
            after=(abi.AFTER_STREAM, 7), begin=lambda: None, end=lambda *_arguments: []
        )
        for name, blocks in (("a", [1, 2]), ("b", [3, 4])):
            plan = SavePlan(name, array.array("I"), b"", b"", 0, 32, 0, False, blocks, None)
            self.worker.start_saves(Metadata(saves=[plan]))

    def save_start(self, *arguments, copy_later, hold_later, after, number):
        self.assertTrue(hold_later and not copy_later and after == (abi.AFTER_STREAM, 7))
        return tuple(arguments[6])  # the blocks

    def held(self, *saves):
        return [("hold", save, (abi.AFTER_STREAM, 7)) for save in saves]

    def test_the_stream_is_held_for_the_copy_in_the_way_before_a_load_writes_there(self):
        self.worker.submit(Metadata(overwritten={5, 6}))
        self.assertEqual(self.calls, [])
        self.worker.submit(Metadata(overwritten={2, 9}, loads=[LoadPlan("r", 0, 16, [2], b"")]))
        self.assertEqual(self.calls, [*self.held((1, 2)), "load"])
        self.worker.submit(Metadata(overwritten={1, 2}))  # what is enqueued on the stream has been held
        self.assertEqual(self.calls[2:], [])
        self.worker.submit(Metadata(overwritten={4}))
        self.assertEqual(self.calls[2:], self.held((3, 4)))

    def test_where_it_is_not_known_which_blocks_for_all(self):
        self.worker.submit(Metadata())
        self.assertEqual(self.calls, self.held((1, 2), (3, 4)))

    def test_where_a_request_computes_anew_what_it_had_for_all(self):
        self.worker.submit(Metadata(overwritten=set(), is_recomputing=True))
        self.assertEqual(self.calls, self.held((1, 2), (3, 4)))

    def test_what_is_copied_holds_nothing(self):
        self.copied.add((1, 2))
        self.worker.submit(Metadata(overwritten=set()))
        self.worker.submit(Metadata(overwritten={1, 2}))
        self.assertEqual(self.calls, [])

    def test_a_save_that_is_done_is_not_forgotten_before_its_copies_are_there(self):
        self.worker.library.cg.save_poll = lambda _save: types.SimpleNamespace(done=1, copied=0, status=abi.TIMED_OUT)
        self.worker.finished_loads(set(), False)
        self.worker.submit(Metadata(overwritten={1}))
        self.assertEqual(self.calls, self.held((1, 2)))

    def test_where_the_stream_cannot_be_held_the_save_is_cut(self):
        self.worker.library.cg.save_hold = self.fail  # which raises
        self.worker.submit(Metadata(overwritten={1}))
        self.assertEqual(self.calls, [("cut", (1, 2))])


class Weights:
    """As vLLM's LoRAModel: with tensors somewhere inside, and the number that it was read for."""

    def __init__(self, number, content):
        self.id, self.rank = number, 8
        self.loras = {"v_proj": types.SimpleNamespace(lora_a=torch.tensor(content), scaling=1.0)}


class Adapters:
    """What stands for vLLM's manager of adapters: reads `files` by path, and has room for one."""

    def __init__(self):
        self.files, self.loaded, self.readers = {}, {}, []

    def _load_adapter(self, adapter):
        self.readers.append(threading.current_thread())
        return Weights(adapter.lora_int_id, self.files[adapter.lora_path])

    def list_adapters(self):
        return set(self.loaded)

    def add_adapter(self, adapter):
        """As vLLM does before a forward with the adapter."""
        if adapter.lora_int_id not in self.loaded:
            self.loaded = {adapter.lora_int_id: self._load_adapter(adapter)}


class AdapterTest(unittest.TestCase):
    """Nothing is loaded or saved for an adapter but for the content that vLLM has read."""

    def setUp(self):
        self.manager = Adapters()
        self.manager.files["p"] = [1.0, 2.0]
        self.done, self.saved = False, []
        cg = types.SimpleNamespace(
            load_start=lambda *_: "handle", load_free=lambda _: None, load_cancel=lambda _: None,
            load_poll=lambda _: abi.Progress(done=self.done, loaded_tokens=32), load_levels=lambda *_: b"",
            save_start=self.save_start, save_poll=lambda _: abi.Progress(done=1, copied=1, loaded_tokens=64),
        )  # fmt: skip
        rank = types.SimpleNamespace(index=0, first_head=0, stores=True, steps_alone=True)
        self.worker = Worker(library_of(cg, rank=rank), Failures(), block_tokens=16)
        with mock.patch("cachegen.vllm.adapters._manager_of", lambda _config: self.manager):
            self.held = self.worker._adapters = HeldAdapters(None)
        self.addCleanup(self.held.close)

    def save_start(self, *_arguments, **_options):
        self.saved.append(1)

    def lora(self, number=1, path="p", **fields):
        return types.SimpleNamespace(lora_int_id=number, lora_path=path, lora_name="a", **fields)

    def answer(self, lora):
        """What the worker says that it holds; steps are empty ones."""
        self.worker.submit(Metadata(adapters=[lora]))
        deadline = time.monotonic() + 30
        while (report := self.worker.take_report()) is None or not report.adapters:
            self.assertLess(time.monotonic(), deadline)
            self.worker.submit(Metadata())
        self.assertEqual(list(report.adapters), [lora.lora_int_id])
        return report.adapters[lora.lora_int_id][0]

    def load(self, identity, req_id="r"):
        """A load for that content is planned; what is bad of its blocks 5 and 6 when it has ended."""
        self.worker.submit(Metadata(loads=[LoadPlan(req_id, 0, 32, [5, 6], b"", (1, identity))]))

    def end_load(self):
        self.done = True
        self.assertEqual(self.worker.finished_loads(set(), False), {"r"})
        return self.worker.take_bad_blocks()

    def save(self, identity):
        plan = SavePlan("r", array.array("I"), b"", b"", 0, 64, 0, False, [1], None, (1, identity))
        self.worker.start_saves(Metadata(saves=[plan]))
        return len(self.saved)

    def test_what_vllm_has_loaded_counts_whatever_the_files_have_become(self):
        self.manager.add_adapter(self.lora())
        self.manager.files["p"] = [3.0, 4.0]
        first = self.answer(self.lora())
        self.assertNotIn(None, (first, self.answer(self.lora())))
        self.assertEqual(first, self.answer(self.lora()))
        other = self.answer(self.lora(number=2))
        self.assertNotIn(other, (None, first))
        self.manager.files["q"] = [1.0, 2.0]
        self.assertEqual(self.answer(self.lora(number=3, path="q")), first)

    def test_a_step_that_fails_at_adapters_answers_for_its_loads(self):
        self.worker._adapted_loads = Broken()
        self.worker.submit(Metadata(loads=[LoadPlan("r", 0, 32, [5, 6], b"", None)]))
        self.assertIn("r", self.worker.loads)

    def test_an_adapter_that_cannot_be_read_is_told_of_once_until_it_can(self):
        with self.assertLogs(guard.logger, "INFO") as log:
            for number in (1, 2, 3):
                self.assertIsNone(self.answer(self.lora(number, path="gone")))
            self.assertIsNotNone(self.answer(self.lora(4)))
        said = [line for line in log.output if "adapter a cannot be read" in line]
        self.assertEqual(len(said), 2, said)
        self.assertIn("over, after 3 failures", said[1])

    def test_what_is_read_ahead_is_what_vllm_gets(self):
        identity = self.answer(self.lora())
        self.assertIsNot(self.manager.readers[0], threading.current_thread())
        self.manager.files["p"] = [3.0, 4.0]
        self.load(identity)
        self.assertEqual(self.end_load(), set())
        self.manager.add_adapter(self.lora())
        self.assertEqual(self.manager.loaded[1].loras["v_proj"].lora_a.tolist(), [1.0, 2.0])
        self.assertEqual(len(self.manager.readers), 1)
        self.worker.finished_loads(set(), False)
        self.assertEqual(self.worker.take_bad_blocks(), set())
        self.assertEqual(self.save(identity), 1)

    def test_a_step_that_computes_nothing_leaves_python_to_who_reads_an_adapter(self):
        with mock.patch.object(self.held, "_news") as news:
            self.worker.finished_loads(set(), True)  # nobody asks for one
            self.worker.submit(Metadata(adapters=[self.lora()]))
            self.worker.finished_loads(set(), False)
            news.wait.assert_not_called()
            self.worker.finished_loads(set(), True)
            news.wait.assert_called_once_with(STEP_WAIT_S)

    def test_what_is_read_anew_after_a_load_makes_it_void(self):
        for when in ("ended", "under way"):
            with self.subTest(when):
                self.setUp()
                identity = self.answer(self.lora())
                self.load(identity)
                if when == "ended":
                    self.assertEqual(self.end_load(), set())
                self.manager.add_adapter(self.lora())
                self.manager.add_adapter(self.lora(number=2))  # for which the first one goes
                self.manager.add_adapter(self.lora())
                if when == "ended":
                    self.worker.finished_loads(set(), False)
                    self.assertEqual(self.worker.take_bad_blocks(), {5, 6})
                else:
                    self.assertEqual(self.end_load(), {5, 6})
                self.assertEqual(self.save("another"), 0)

    def read_anew(self):
        """vLLM reads the adapter, and reads it again."""
        for number in (1, 2, 1):
            self.manager.add_adapter(self.lora(number=number))
        self.worker.finished_loads(set(), False)
        return self.worker.take_bad_blocks()

    def test_blocks_that_others_have_had_since_a_preemption_are_not_bad(self):
        for overwritten, bad in ((set(), {5, 6}), ({6, 7}, {5}), ({5, 6}, set()), (None, {5, 6})):
            with self.subTest(overwritten):
                self.setUp()
                self.load(self.answer(self.lora()))
                self.end_load()
                self.worker.submit(Metadata(overwritten=overwritten))
                self.assertEqual(self.read_anew(), bad)

    def test_what_the_load_and_its_own_request_write_is_none_of_that(self):
        identity = self.answer(self.lora())
        for to_token, overwritten, bad in ((32, {5, 6}, {5, 6}), (24, {6}, {5}), (8, {5}, {5})):
            with self.subTest(to_token):
                plan = LoadPlan("r", 0, to_token, [5, 6][: -(-to_token // 16)], b"", (1, identity))
                self.worker.submit(Metadata(loads=[plan], overwritten={5, 6}))  # it gets the blocks
                self.end_load()
                if to_token % 16:
                    self.worker.submit(Metadata(overwritten=overwritten))  # computes what follows in the last block
                self.assertEqual(self.read_anew(), bad)
                self.manager.loaded = {}
                identity = self.answer(self.lora())

    def test_what_is_still_copied_when_a_load_becomes_void_is_cut(self):
        identity, cut = self.answer(self.lora()), []
        self.load(identity)
        self.end_load()
        cg = self.worker.library.cg
        cg.save_start, cg.save_cut_from = (lambda *_, **__: "save"), lambda save, _token: cut.append(save)
        cg.save_poll = lambda save: types.SimpleNamespace(done=0, copied=save in cut)
        plan = SavePlan("r", array.array("I"), b"", b"", 32, 64, 0, False, [5, 6, 7, 8], None, (1, identity))
        self.worker.start_saves(Metadata(saves=[plan]))
        with mock.patch("cachegen.vllm.worker.COPY_WAIT_S", 0):
            self.worker.finished_loads(set(), False)
            self.assertEqual(cut, [])
            self.assertEqual(self.read_anew(), {5, 6})
        self.assertEqual(cut, ["save"])

    def test_what_was_read_ahead_anew_and_is_another_content_does_so_too(self):
        identity = self.answer(self.lora())
        self.load(identity)
        self.assertEqual(self.end_load(), set())
        self.manager.add_adapter(self.lora())
        self.manager.add_adapter(self.lora(number=2))
        self.manager.files["p"] = [3.0, 4.0]
        self.assertNotEqual(self.answer(self.lora()), identity)
        self.manager.add_adapter(self.lora())
        self.worker.finished_loads(set(), False)
        self.assertEqual(self.worker.take_bad_blocks(), {5, 6})

    def test_all_that_vllm_reads_is_told_in_its_order(self):
        identity = self.answer(self.lora())
        self.manager.add_adapter(self.lora())
        self.manager.add_adapter(self.lora(number=2))
        self.worker.finished_loads(set(), False)
        report = self.worker.take_report()
        self.assertEqual(report.taken, [(1, "a", identity), (2, "a", None)])
        self.assertEqual(self.told(report), [("a", identity)])
        self.assertIsNone(self.worker.take_report())

    def told(self, report=None):
        """What a worker says, once it is known, of what it did not know when vLLM read it."""
        deadline = time.monotonic() + 30
        while report is None or not report.told:
            self.assertLess(time.monotonic(), deadline)
            report = self.worker.take_report()
        return report.told

    def test_that_it_cannot_be_told_is_told_too(self):
        for failing in ("identity_of", "copy.deepcopy"):
            with self.subTest(failing), self.assertLogs(guard.logger, "WARNING"):
                self.setUp()
                with mock.patch(f"cachegen.vllm.adapters.{failing}", side_effect=ValueError("no content")):
                    self.manager.add_adapter(self.lora())
                    self.assertEqual(self.told(), [("a", None)])
                self.assertIsNone(self.answer(self.lora()))

    def test_a_second_connector_of_an_engine_leaves_adapters_to_the_first(self):
        with mock.patch("cachegen.vllm.adapters._manager_of", lambda _config: self.manager):
            self.assertRaisesRegex(LookupError, "another connector", HeldAdapters, None)
            self.held.close()
            HeldAdapters(None).close()

    def test_of_requests_that_are_over_no_block_is_bad(self):
        self.load(self.answer(self.lora()))
        self.end_load()
        self.worker.finished_loads({"r"}, False)
        self.manager.add_adapter(self.lora())
        self.manager.add_adapter(self.lora(number=2))
        self.manager.add_adapter(self.lora())
        self.worker.finished_loads(set(), False)
        self.assertEqual(self.worker.take_bad_blocks(), set())

    def test_a_load_for_another_content_than_is_held_does_not_start(self):
        self.answer(self.lora())
        for other in ("another", ""):  # "": what the scheduler's side plans where it cannot tell
            self.load(other)
            self.assertEqual(self.end_load(), {5, 6})
            self.assertEqual(self.save(other), 0)

    def test_what_cannot_be_read_cannot_be_told(self):
        with self.assertLogs(guard.logger, "WARNING"):
            self.assertIsNone(self.answer(self.lora(path="gone")))
        self.manager.loaded = {7: "read before there was a connector"}
        self.assertIsNone(self.answer(self.lora(number=7)))
        self.worker._adapters = None
        self.assertIsNone(self.answer(self.lora()))

    def test_nor_can_a_disabled_rank_which_takes_no_other_ones_place(self):
        reports = []
        for worker in (self.worker, Worker(None, Failures(), block_tokens=16)):
            worker._adapters = None
            worker.submit(Metadata(adapters=[self.lora()]))
            reports.append(worker.take_report())
        self.assertEqual(reports[0].aggregate(reports[1]).adapters, {1: {0: None, None: None}})

    def test_few_are_kept_that_were_read_ahead(self):
        found = [self.answer(self.lora(number)) for number in range(1, 8)]
        self.assertEqual(len(set(found)), 1)
        kept = [held for held in self.held._held.values() if held.model is not None]
        self.assertEqual(len(kept), MAX_AHEAD)

    def test_all_that_is_in_an_adapter_is_in_its_identity(self):
        plain = Weights(1, [1.0, 2.0])
        others = [Weights(1, [1.0, 2.0]) for _ in range(4)]
        others[0].rank = 4
        others[1].loras["v_proj"].scaling = 2.0
        others[2].loras["k_proj"] = others[2].loras.pop("v_proj")
        others[3].loras["v_proj"].lora_a = others[3].loras["v_proj"].lora_a.to(torch.float64)
        self.assertEqual(len({identity_of(model) for model in (plain, *others)}), 5)
        self.assertEqual(identity_of(plain), identity_of(Weights(2, [1.0, 2.0])))


class StartTest(unittest.TestCase):
    def start(self, reason, kv_cache=None, role=KVConnectorRole.WORKER, **extra):
        config = types.SimpleNamespace(
            kv_transfer_config=types.SimpleNamespace(
                kv_connector_extra_config=extra, kv_load_failure_policy="recompute"
            ),
        )
        with mock.patch("cachegen.vllm.connector.Library", side_effect=reason):
            return CachegenConnector(config, role, kv_cache or kv_cache_of())

    def test_what_is_wrong_is_told_by_kind(self):
        for reason, kind in (
            (Unsupported("hybrid"), "unsupported"), (abi.CachegenError(1, "root"), "configuration"),
            (abi.LibraryError("no such file"), "library"), (OSError("no weights"), "model files"),
            (RuntimeError("a mistake"), "error"),
        ):  # fmt: skip
            time_of = mock.patch("cachegen.vllm.metrics.time.monotonic", return_value=0.0)
            with self.subTest(kind), self.assertLogs(guard.logger, "ERROR"), time_of:
                made = self.start(reason)
                self.assertEqual(made.get_kv_connector_stats().data, {"state": {"worker": kind}})
                self.assertIsNone(made.get_kv_connector_stats())

    def test_a_strict_connector_ends_the_start_with_the_reason(self):
        for strict in (True, "yes"):
            with self.assertRaisesRegex(StartFailure, "hybrid attention"):
                self.start(Unsupported("hybrid attention"), strict=strict)

    def test_an_engine_that_would_end_at_its_first_request_does_not_start_strict_or_not(self):
        for n_groups, role in itertools.product((0, 2), KVConnectorRole):
            with self.subTest(f"{n_groups} {role}"), self.assertRaisesRegex(StartFailure, f"{n_groups} KV-cache"):
                self.start(Unsupported("a pooling model"), kv_cache_of(n_groups), role)

    def test_also_where_the_kv_cache_lies_in_memory_as_nobody_knows(self):
        made = connector(worker=types.SimpleNamespace(library=object(), register=self.refuse, close=lambda: None))
        made.register_kv_caches({})
        self.assertEqual(made._down, "unsupported")
        made._kv_transfer_config.kv_connector_extra_config["strict"] = True
        self.assertRaises(StartFailure, made.register_kv_caches, {})

    def test_keys_of_the_plugin_are_checked(self):
        for key, value in (
            ("strict", "yes"), ("untested_vllm", 1), ("min_tokens", -1), ("min_tokens", float("nan")),
            ("min_tokens", float("inf")), ("min_tokens", "many"), ("save_on_use", None),
            ("keep_level", "L4"), ("worst_level", "L9"), ("tail_multiple", "many"), ("tail_multiple", None),
        ):  # fmt: skip
            with self.subTest(key), self.assertRaisesRegex(Unsupported, key):
                Library(types.SimpleNamespace(kv_connector_extra_config={key: value}), None, None, None)

    def test_a_release_that_is_not_known_is_refused_unless_it_is_asked_for(self):
        with mock.patch("cachegen.vllm.library.refusal", return_value="vLLM 0.99 is not known"):
            for config, reason in (({}, Unsupported), ({"untested_vllm": True}, AttributeError)):  # there is no engine
                with self.assertRaisesRegex(reason, "0.99" if not config else ""):
                    Library(types.SimpleNamespace(kv_connector_extra_config=config), None, None, None)

    def refuse(self, *_arguments):
        raise Unsupported("strides")


class RankTest(unittest.TestCase):
    """Which heads a rank has, and which engines are refused."""

    def rank(self, index=0, n_ranks=2, n_kv_heads=4, **parallel):
        defaults = {
            "tensor_parallel_size": n_ranks, "pipeline_parallel_size": 1, "prefill_context_parallel_size": 1,
            "decode_context_parallel_size": 1, "nnodes": 1, "distributed_executor_backend": "mp",
            "data_parallel_size": 1,
        }  # fmt: skip
        config = types.SimpleNamespace(
            parallel_config=types.SimpleNamespace(**{**defaults, **parallel}),
            model_config=types.SimpleNamespace(get_total_num_kv_heads=lambda: n_kv_heads),
            kv_transfer_config=types.SimpleNamespace(engine_id="engine"),
        )
        with mock.patch("vllm.distributed.parallel_state.get_tensor_model_parallel_rank", return_value=index):
            return rank_of(config, KVConnectorRole.WORKER)

    def heads(self, n_ranks, n_kv_heads):
        ranks = [self.rank(i, n_ranks, n_kv_heads) for i in range(n_ranks)]
        return [(rank.first_head, rank.n_heads, rank.stores) for rank in ranks]

    def test_a_model_without_kv_heads_is_refused_by_name(self):
        for n_ranks in (1, 2):
            with self.assertRaisesRegex(UnsupportedRanks, "a model without KV heads"):
                self.rank(0, n_ranks, n_kv_heads=0)

    def test_heads_are_where_vllm_has_them(self):
        self.assertEqual(self.heads(1, 4), [(0, 4, True)])
        self.assertEqual(self.heads(2, 4), [(0, 2, True), (2, 2, True)])
        self.assertEqual(self.heads(3, 3), [(0, 1, True), (1, 1, True), (2, 1, True)])
        # Fewer KV heads than ranks: the first of those that have the same one stores.
        self.assertEqual(self.heads(4, 2), [(0, 1, True), (0, 1, False), (1, 1, True), (1, 1, False)])
        self.assertEqual(self.heads(2, 1), [(0, 1, True), (0, 1, False)])

    def test_only_ranks_of_one_engine_find_each_other(self):
        self.assertIsNone(self.rank(n_ranks=1).group)
        self.assertEqual(self.rank(n_ranks=2).group, "engine")

    def test_other_kinds_of_parallelism_are_refused_by_name(self):
        for name, value in (
            ("pipeline_parallel_size", 2), ("prefill_context_parallel_size", 2), ("decode_context_parallel_size", 2),
        ):  # fmt: skip
            with self.assertRaisesRegex(UnsupportedRanks, name):
                self.rank(**{name: value})
        refused = [({"nnodes": 2}, "2 hosts")]
        for executor in ("ray", "external_launcher", "their.Executor", type("TheirExecutor", (), {}), None):
            refused.append(({"distributed_executor_backend": executor}, "distributed_executor_backend"))
        for elsewhere, named in refused:
            with self.subTest(elsewhere), self.assertRaisesRegex(UnsupportedRanks, named):
                self.rank(**elsewhere)
            self.rank(n_ranks=1, **elsewhere)
        with self.assertRaisesRegex(UnsupportedRanks, "3 KV heads"):
            self.rank(n_kv_heads=3)

    def test_data_parallel_ranks_that_compute_together_are_known(self):
        for n, steps_alone in ((1, True), (2, False)):
            self.assertEqual(self.rank(data_parallel_size=n).steps_alone, steps_alone)

    def test_ranks_are_told_apart_in_statistics(self):
        for index, n_ranks, name in ((0, 1, "worker"), (1, 2, "worker1")):
            library = types.SimpleNamespace(rank=self.rank(index, n_ranks))
            made = connector(worker=Worker(library, Failures(), block_tokens=16))
            self.assertEqual(made._side_name(), name)


class VersionTest(unittest.TestCase):
    def test_releases_are_taken_or_refused_by_name(self):
        for version in ("0.30.0", "0.31.4+cpu", "0.32.0+cpu", "0.33.0"):
            self.assertIsNone(refusal(version), version)
        for version in ("0.3.0", "0.29.0", "0.34.0", "0.320.0", "1.0.0"):
            self.assertIn(version, refusal(version))


def prometheus_metrics(registry):
    kinds = {
        kind: functools.partial(kind, registry=registry)
        for kind in (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
    }
    return CachegenConnector.build_prom_metrics(
        types.SimpleNamespace(kv_transfer_config=None), kinds, ["engine"], {0: ["0"]}
    )


class MeasureTest(unittest.TestCase):
    def test_gauges_and_what_was_observed_reach_prometheus(self):
        registry = prometheus_client.CollectorRegistry()
        metrics = prometheus_metrics(registry)

        def shown(name):
            return registry.get_sample_value(f"vllm:cachegen_{name}", {"engine": "0"})

        increments = [Increments(), Increments()]
        reports = [
            increments[0].with_measures(None, "worker0", {"saves_running": 2, "staging_bytes": 5}, {}),
            increments[1].with_measures(None, "worker1", {"saves_running": 1, "staging_bytes": 7}, {}),
            increments[0].with_measures(None, "scheduler", {}, {"budget_ratio": [0.5, 4.0]}),
        ]
        metrics.observe(functools.reduce(Stats.aggregate, reports).data)
        self.assertEqual((shown("saves_running"), shown("staging_bytes")), (3, 12))
        self.assertEqual((shown("budget_ratio_count"), shown("budget_ratio_sum")), (2, 4.5))
        # Only what has changed is reported, and the rest stays.
        self.assertIsNone(increments[1].with_measures(None, "worker1", {"saves_running": 1, "staging_bytes": 7}, {}))
        metrics.observe(increments[0].with_measures(None, "worker0", {"saves_running": 0, "staging_bytes": 0}, {}).data)
        self.assertEqual((shown("saves_running"), shown("staging_bytes")), (1, 7))
        metrics.observe({"budget_met": 3, "loads": 0})
        self.assertEqual(shown("budget_met_total"), 3)

    def test_several_front_ends_show_what_the_last_of_them_was_told(self):
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.dict(os.environ, PROMETHEUS_MULTIPROC_DIR=folder),
            mock.patch("prometheus_client.metrics.time.time", side_effect=itertools.count(1)),
        ):
            kinds = {name: prometheus_client.values.MultiProcessValue(lambda name=name: name) for name in "ab"}
            front_ends = {}
            for name, state, n_loads in (("a", "up", 1), ("b", "failing loads", 7), ("a", "up", 2)):
                with mock.patch("prometheus_client.metrics.values.ValueClass", kinds[name]):
                    if name not in front_ends:
                        front_ends[name] = prometheus_metrics(prometheus_client.CollectorRegistry())
                    told = {"state": {"worker": state}, "gauges": {"worker": {"loads_running": n_loads}}}
                    front_ends[name].observe(told)
            registry = prometheus_client.CollectorRegistry()
            prometheus_client.multiprocess.MultiProcessCollector(registry, folder)
            samples = [s for metric in registry.collect() for s in metric.samples if not math.isnan(s.value)]
        up = {tuple(s.labels.items()): s.value for s in samples if s.name == "vllm:cachegen_up"}
        self.assertEqual(up, {(("engine", "0"), ("reason", "up")): 1})
        running = [(s.labels, s.value) for s in samples if s.name == "vllm:cachegen_loads_running"]
        self.assertEqual(running, [({"engine": "0"}, 2)])

    def test_how_things_are_is_told_again_now_and_then_and_not_logged(self):
        with mock.patch("cachegen.vllm.metrics.time.monotonic", return_value=100.0) as clock:
            increments = Increments()

            def told():
                increments.repeat()
                stats = increments.with_measures(None, "worker", {"saves_running": 1}, {})
                return increments.with_state(stats, "worker", "up")

            every = {"state": {"worker": "up"}, "gauges": {"worker": {"saves_running": 1}}}
            self.assertEqual(told().data, every)
            self.assertIsNone(told())
            clock.return_value += 4.9
            self.assertIsNone(told())
            clock.return_value = 105.0
            again = told().data
        self.assertEqual(again, every)
        self.assertTrue(CachegenConnector.build_kv_connector_stats(again).is_empty())
        down = {"state": {"worker": "unsupported"}}
        self.assertTrue(CachegenConnector.build_kv_connector_stats(down).is_empty())
        self.assertFalse(CachegenConnector.build_kv_connector_stats({**again, "loads": 1}).is_empty())

    def test_statistics_that_are_not_known_stop_no_answers(self):
        registry = prometheus_client.CollectorRegistry()
        metrics = prometheus_metrics(registry)
        with self.assertLogs(guard.logger, "ERROR"):
            metrics.observe({"loads": 1}, engine_idx=7)
            metrics.observe({"observed": {"of a later release": [1]}})
        metrics.observe({"loads": 1})
        self.assertEqual(registry.get_sample_value("vllm:cachegen_loads_total", {"engine": "0"}), 1)

    def test_the_readme_has_every_metric_under_the_name_and_with_the_words_that_prometheus_shows(self):
        registry = prometheus_client.CollectorRegistry()
        prometheus_metrics(registry)
        shown = {}
        for metric in registry.collect():
            words = metric.documentation.removeprefix(REFUSED).removeprefix(DROPPED)
            shown[metric.name + "_total" * (metric.type == "counter")] = metric.type, words
        with open(os.path.join(ROOT, "connector", "README.md"), encoding="utf-8") as file:
            readme = file.read()
        told = {}
        tables = readme.split("\n### What is counted\n")[1].split("\n### ")[0]
        for name, kind, meaning in re.findall(r"^\| `(\w+)(?:{\w+})?` \| (\w+) \| (.*) \|$", tables, re.MULTILINE):
            words = shown.get(f"vllm:cachegen_{name}", ("", ""))[1]
            told[f"vllm:cachegen_{name}"] = kind, words if meaning.startswith(words) else meaning
        self.assertEqual(told, shown)
        self.assertEqual(set(re.findall(r"\bvllm:cachegen_\w+", readme)) - {*told, "vllm:cachegen_"}, set())

    def test_what_was_observed_adds_up_and_stays_out_of_the_log(self):
        both = Stats(data={"observed": {"a": [1], "b": [2]}}).aggregate(
            Stats(data={"loads": 1, "observed": {"a": [3]}})
        )
        self.assertEqual(both.data["observed"], {"a": [1, 3], "b": [2]})
        self.assertEqual(both.reduce(), {"loads": 1})


class OutageTest(unittest.TestCase):
    def test_an_outage_is_two_lines_however_long_it_is(self):
        outages = Outages()
        with self.assertLogs(guard.logger, "INFO") as log:
            for n in range(50):
                outages.failed("saves", f"request {n}")
            self.assertEqual(outages.under_way(), ["saves"])
            outages.worked("saves")
            outages.failed("saves", "again, soon after")
            outages.worked("saves")
        self.assertEqual(len(log.output), 2, log.output)
        self.assertIn("request 0", log.output[0])
        self.assertIn("50 failures", log.output[1])

    def test_a_long_outage_soon_after_a_short_one_is_logged_once_it_has_lasted(self):
        outages, now_s = Outages(), 1000.0
        with (
            mock.patch("cachegen.vllm.guard.time", mock.Mock(monotonic=lambda: now_s)),
            self.assertLogs(guard.logger, "INFO") as log,
        ):
            outages.failed("saves", "first")
            outages.worked("saves")
            for now_s in (1030.0, 1031.0, 1000.0 + guard.QUIET_S, 2000.0, 9000.0):
                outages.failed("saves", f"at {now_s}")
            outages.worked("saves")
        self.assertEqual(len(log.output), 4, log.output)
        self.assertIn("at 1060", log.output[2])
        self.assertIn("5 failures in 7970 s", log.output[3])

    def test_the_gauge_shows_one_reason_at_a_time(self):
        metrics = prometheus_metrics(prometheus_client.CollectorRegistry())

        def shown():
            return {sample.labels["reason"]: sample.value for sample in metrics._up.collect()[0].samples}

        self.assertEqual(shown(), {"no step yet": 0})
        observe = metrics.observe
        observe({"state": {"scheduler": "up"}})
        observe({"state": {"worker": "up"}, "loads": 1})
        self.assertEqual(shown(), {"up": 1})
        observe({"state": {"worker": "failing saves"}})
        observe({"state": {"scheduler": "up"}})
        self.assertEqual(shown(), {"failing saves": 0})
        observe({"state": {"worker": "up"}})
        self.assertEqual(shown(), {"up": 1})

    def test_states_pass_through_vllms_sums(self):
        both = Stats(data={"loads": 1, "state": {"worker": "up"}}).aggregate(
            Stats(data={"state": {"scheduler": "error"}})
        )
        self.assertEqual(both.data["state"], {"worker": "up", "scheduler": "error"})
        self.assertEqual(both.reduce(), {"loads": 1, "scheduler_down": "error"})
        self.assertFalse(Stats(data={"state": {"worker": "up"}}).is_empty())


    def test_what_fails_for_a_while_is_the_reason_until_it_works(self):
        progress = abi.Progress(done=1, copied=1, loaded_tokens=32)
        cg = types.SimpleNamespace(
            load_poll=lambda _: progress, save_poll=lambda _: progress,
            load_free=lambda _: None, save_free=lambda _: None,
            strerror=str, get_stats=lambda: types.SimpleNamespace(as_dict=lambda: {"staging_bytes": 7}),
        )  # fmt: skip
        worker = Worker(library_of(cg), Failures(), block_tokens=16)
        made = connector(worker=worker)

        def state_after(kind, status):
            progress.status = status
            if kind == "failing loads":
                worker.loads["r"] = LoadPlan("r", 0, 32, [5, 6], b""), "handle"
            else:
                worker.saves.append(("r", 32, "handle"))
            worker.counters()
            running = worker.gauges()
            made.get_finished(set())
            return made._state(), running

        for kind in ("failing loads", "failing saves"):
            running = {"loads_running": int(kind == "failing loads"), "saves_running": int(kind == "failing saves")}
            for status, state in ((abi.IO, kind), (0, "up")):
                self.assertEqual(state_after(kind, status), (state, {**running, "staging_bytes": 7}))
        self.assertEqual(worker.gauges(), {"loads_running": 0, "saves_running": 0, "staging_bytes": 7})
        worker.outages.failed(STAGING, "is no reason")
        self.assertEqual(made._state(), "up")
        worker.outages.failed(GPU, "is one")
        self.assertEqual(made._state(), GPU)
        library = types.SimpleNamespace(weights=types.SimpleNamespace(doubt=None))
        made = connector(scheduler=types.SimpleNamespace(library=library, outages=Outages()))
        made.scheduler.outages.failed(LOOKUPS, "are one, too")
        self.assertEqual(made._state(), LOOKUPS)

    def test_loads_that_fail_while_the_store_works_are_no_outage(self):
        progress = abi.Progress(done=1, loaded_tokens=16)
        cg = types.SimpleNamespace(
            load_poll=lambda _: progress, load_free=lambda _: None, load_cancel=lambda _: None, strerror=str,
            load_levels=lambda *_: b"",
        )  # fmt: skip
        worker = Worker(library_of(cg), Failures(), block_tokens=16)

        def after(status, bytes_read=0, failed_levels=1, finished=frozenset()):
            progress.status, progress.bytes_read, progress.failed_levels = status, bytes_read, failed_levels
            worker.loads["r"] = LoadPlan("r", 0, 32, [5, 6], b""), "handle"
            worker.finished_loads(set(finished), False)
            return worker.outages.under_way()

        with self.assertLogs(guard.logger, "WARNING") as log:
            self.assertEqual(after(abi.IO), [LOADS])
        self.assertIn(f"16 of 32 tokens loaded from /store, the rest is recomputed: {abi.IO};", log.output[0])
        self.assertEqual(after(0), [])
        lossy_prefix, corrupt = 33, 21
        for what in (
            (abi.NOT_FOUND,), (lossy_prefix, 100), (corrupt, 100), (abi.TIMED_OUT, 100), (abi.TIMED_OUT, 0, 0),
            (abi.IO, 0, 1, {"r"}),
        ):  # fmt: skip
            self.assertEqual(after(*what), [], what)
        for status in (abi.IO, abi.PERMISSION, abi.DEVICE, abi.TIMED_OUT):
            self.assertEqual(after(status), [LOADS], status)
            self.assertEqual(after(abi.NOT_FOUND), [LOADS], "nothing was read")
            self.assertEqual(after(abi.NOT_FOUND, 100), [])

    def test_weights_in_doubt_are_a_reason(self):
        weights = types.SimpleNamespace(doubt="unchecked weights")
        library = types.SimpleNamespace(weights=weights)
        made = connector(scheduler=types.SimpleNamespace(library=library, outages=Outages()))
        self.assertEqual(made._state(), "unchecked weights")
        weights.doubt = None
        self.assertEqual(made._state(), "up")


class MultiConnectorTest(unittest.TestCase):
    def test_a_second_one_of_ours_is_refused_by_name(self):
        both, other_engine = kv_cache_of(), kv_cache_of()

        def make(kv_cache_config, role=KVConnectorRole.SCHEDULER, **extra):
            transfer = types.SimpleNamespace(kv_load_failure_policy="recompute", kv_connector_extra_config=extra)
            config = types.SimpleNamespace(kv_transfer_config=transfer)
            return CachegenConnector(config, role, kv_cache_config)

        for name in ("Library", "Scheduler", "Worker"):
            patched = mock.patch(f"cachegen.vllm.connector.{name}")
            patched.start()
            self.addCleanup(patched.stop)
        first = make(both)
        with self.assertLogs("vllm.cachegen", "ERROR") as logs:
            second = make(both)
        self.assertIn("a second CachegenConnector in a MultiConnector", logs.output[0])
        self.assertEqual((first._down, second._down), (None, "unsupported"))
        self.assertIsNone(second.request_finished(None, [])[1], "a name that clashes")
        with self.assertRaisesRegex(StartFailure, "a second"):
            make(both, strict=True)
        # Neither another side is one, nor another engine, nor what came before.
        kept = [make(both, KVConnectorRole.WORKER), make(other_engine)]
        first.shutdown()
        kept.append(make(both))
        self.assertEqual([made._down for made in kept], [None] * 3)

    def test_its_statistics_find_ours(self):
        # As they come from another process; without the class by its name the server's log would end with an error.
        found = MultiConnector.build_kv_connector_stats({"CachegenConnector": {"loads": 1}})
        self.assertEqual(found.data["CachegenConnector"].data, {"loads": 1})


class WaitTest(unittest.TestCase):
    def test_descriptors_above_1023_are_waited_for(self):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard < 1100:
            self.skipTest("no descriptor above 1,023 is allowed here")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
        event = os.eventfd(1)
        high = fcntl.fcntl(event, fcntl.F_DUPFD, 1050)
        self.addCleanup(os.close, event)
        self.addCleanup(os.close, high)
        library = Library.__new__(Library)
        library._eventfd = high
        library.wait(10)
        library.wait(0)
        self.assertRaises(BlockingIOError, self.read_now, event)

    def read_now(self, event):
        os.set_blocking(event, False)
        os.read(event, 8)


class ProvenanceTest(unittest.TestCase):
    def test_blocks_are_as_bad_as_their_worst_and_new_content_counts(self):
        known = Provenance(unknown_level=2)
        self.assertTrue(known.is_all_exact())
        known.mark([1, 2], 3, loaded=True)
        known.mark([3], 2, loaded=False)
        self.assertEqual([known.worst_of(blocks) for blocks in ([1, 3], [3, 4], [4], [])], [3, 2, 0, 0])
        self.assertTrue(known.any_lossily_loaded([2, 3]))
        self.assertFalse(known.any_lossily_loaded([3, 4]))
        known.mark([2, 3], 0, loaded=False)
        known.mark([1], 3, loaded=False)
        self.assertFalse(known.any_lossily_loaded([1, 2, 3]))
        self.assertEqual(known.worst_of([2, 3]), 0)
        known.mark([1], 0, loaded=False)
        self.assertTrue(known.is_all_exact())

    def test_a_block_is_of_unknown_content_from_its_allocation_on(self):
        known = Provenance(unknown_level=2)
        known.allocate([1, 2])
        self.assertEqual((known.worst_of([1]), known.any_lossily_loaded([2])), (2, True))
        known.mark([1], 0, loaded=False)
        self.assertEqual(known.worst_of([1]), 0)
        exact = Provenance(unknown_level=0)
        exact.allocate([1])
        self.assertTrue(exact.is_all_exact())


if __name__ == "__main__":
    unittest.main(verbosity=2)
