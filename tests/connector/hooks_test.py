"""The connector's hooks, with an engine's classes and without an engine: whatever fails inside, vLLM gets an answer.

usage: hooks_test.py
"""

import os
import sys
import types
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "connector"))
try:
    import vllm  # noqa: F401
except ImportError as error:
    print(f"skipped: {error}: no hook of the connector was called")
    sys.exit(1 if "engine" in os.environ.get("CG_TEST_REQUIRE", "").split(",") else 77)
from cachegen.vllm import guard  # noqa: E402
from cachegen.vllm.connector import CachegenConnector  # noqa: E402
from cachegen.vllm.guard import Failures  # noqa: E402
from cachegen.vllm.messages import LoadPlan, Metadata  # noqa: E402
from cachegen.vllm.metrics import Increments  # noqa: E402
from cachegen.vllm.provenance import Provenance  # noqa: E402
from cachegen.vllm.scheduler import Scheduler  # noqa: E402
from cachegen.vllm.worker import Worker  # noqa: E402


class Broken:
    """Whose every attribute is a failure."""

    def __getattr__(self, name):
        raise RuntimeError(f"no {name} today")


def connector(scheduler=None, worker=None):
    made = CachegenConnector.__new__(CachegenConnector)
    made.failures, made._increments = Failures(), Increments()
    made.scheduler, made.worker, made._connector_metadata = scheduler, worker, Metadata()
    made._vllm_config = None
    return made


SCHEDULER_HOOKS = {  # arguments, and what counts as a miss
    "get_num_new_matched_tokens": ((None, 0), (0, False)),
    "update_state_after_alloc": ((None, None, 8), None),
    "build_connector_meta": ((None,), Metadata()),
    "update_connector_output": ((None,), None),
    "request_finished": ((None, []), (False, None)),
    "get_kv_connector_stats": ((), None),
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
    def check(self, hooks, **sides):
        for name, (arguments, miss) in hooks.items():
            with self.subTest(name):
                self.assertEqual(getattr(connector(**sides), name)(*arguments), miss)

    def test_a_failure_anywhere_is_a_miss(self):
        self.check(SCHEDULER_HOOKS, scheduler=Broken())
        self.check(WORKER_HOOKS, worker=Broken())

    def test_so_is_a_disabled_connector(self):
        self.check(SCHEDULER_HOOKS)
        for name, (arguments, miss) in WORKER_HOOKS.items():
            with self.subTest(name):
                made = connector(worker=Worker(None, Failures(), block_tokens=16))
                self.assertEqual(getattr(made, name)(*arguments), miss)

    def test_a_failure_is_logged_once(self):
        made = connector(scheduler=Broken())
        with self.assertLogs(guard.logger, "ERROR") as log:
            for _ in range(5):
                made.get_num_new_matched_tokens(None, 0)
        self.assertEqual(len(log.output), 1)
        self.assertIn("get_num_new_matched_tokens", log.output[0])

    def test_loads_that_are_planned_reach_the_worker_whatever_else_fails(self):
        scheduler, plan = Scheduler(Broken(), Failures()), LoadPlan("r", 0, 32, [1, 2], b"")
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

    def test_a_load_that_cannot_be_asked_for_is_answered_for(self):
        freed = []

        def broken(_load):
            raise OSError("gone")

        cg = types.SimpleNamespace(load_poll=broken, load_free=freed.append)
        worker = Worker(types.SimpleNamespace(cg=cg), Failures(), block_tokens=16)
        worker.loads["r"] = LoadPlan("r", 0, 32, [5, 6], b""), "handle"
        self.assertEqual(connector(worker=worker).get_finished(set()), (None, {"r"}))
        self.assertEqual(freed, ["handle"])
        self.assertEqual(worker.take_bad_blocks(), {5, 6})


class ProvenanceTest(unittest.TestCase):
    def test_blocks_are_as_bad_as_their_worst_and_new_content_counts(self):
        known = Provenance()
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


if __name__ == "__main__":
    unittest.main(verbosity=2)
