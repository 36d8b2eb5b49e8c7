#!/usr/bin/env python3
"""What cuda/check_gpu.sh makes of a machine's GPUs and tools, all of them played by scripts.

usage: check_gpu_test.py CHECK_GPU_SH
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest

SCRIPT = ""
SMI = """#!/bin/sh
case "$*" in
-L) echo 'GPU 0: Small (UUID: GPU-aaaa-1)'
    echo 'GPU 1: Large (UUID: GPU-bbbb-2)'
    echo '  MIG 1g.18gb     Device  0: (UUID: MIG-cccc-3)' ;;
*"-i GPU-aaaa-1"*compute_cap*) echo 8.6 ;;
*"-i GPU-bbbb-2"*compute_cap*) echo 9.0 ;;
*"-i GPU-aaaa-1"*) echo small ;;
*"-i GPU-bbbb-2"*) echo large ;;
*compute_cap*) printf '8.6\\n9.0\\n' ;;
*) printf 'small\\nlarge\\n' ;;
esac
"""
CMAKE = """#!/bin/sh
echo "$*" >> FOLDER/cmake.txt
while [ $# -gt 0 ]; do
    [ "$1" != -B ] || { mkdir -p "$2/tests/cuda" && cp FOLDER/built/* "$2/tests/cuda"; }
    shift
done
"""
TESTS = """#!/bin/sh
echo "$CUDA_VISIBLE_DEVICES" > FOLDER/visible.txt
echo '[  PASSED  ] 12 tests.'
exit STATUS
"""
BENCH = """#!/bin/sh
echo '['
echo '{"status": STATUS}'
echo ']'
exit STATUS
"""
SANITIZER = """#!/bin/sh
echo "$*" >> FOLDER/sanitizer.txt
echo '[  PASSED  ] 3 tests.'
case "$*" in
*racecheck*) echo '========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)' ;;
*) echo '========= ERROR SUMMARY: 0 errors' ;;
esac
"""


class CheckGpuTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        for name, text in {
            "bin/nvidia-smi": SMI,
            "bin/nvcc": "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.1'\n",
            "bin/cmake": CMAKE,
            "bin/compute-sanitizer": SANITIZER,
            "built/cg_cuda_gpu_tests": TESTS,
            "built/cg_cuda_gpu_bench": BENCH,
        }.items():
            self.put(name, text)

    def put(self, name, text, status=0):
        path = os.path.join(self.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text.replace("FOLDER", self.folder).replace("STATUS", str(status)))
        os.chmod(path, 0o755)

    def get(self, name):
        with open(os.path.join(self.folder, name), encoding="utf-8") as file:
            return file.read()

    def check(self, *options, visible=None):
        """The script's exit status, its report and the report's text."""
        # Not the machine's own CUDA, which may be where the script looks for one.
        environment = {"PATH": f"{self.folder}/bin:/usr/bin:/bin", "CUDA_HOME": "/nowhere", "CG_COMMIT": "x"}
        if visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = visible
        ran = subprocess.run(["sh", SCRIPT, *options, f"{self.folder}/out"], env=environment, capture_output=True,
                             check=False, text=True, timeout=60)
        if ran.returncode == 77:
            return ran.returncode, {}, self.get("out/report.txt")
        return ran.returncode, json.loads(self.get("out/report.json")), self.get("out/report.txt")

    def test_all_that_is_there_passes(self):
        status, report, text = self.check()
        self.assertEqual((status, report["passed"], report["incomplete"]), (0, True, ""), text)
        self.assertEqual(report["measured"], [{"status": 0}])
        self.assertNotIn("incomplete", text)

    def test_the_card_is_the_one_that_cuda_shows(self):
        cards = {None: "small", "0": "small", "1": "large", "1,0": "large", "GPU-bbbb-2": "large", "GPU-bb": "large",
                 "MIG-cccc-3": "large"}
        for visible, device in cards.items():
            with self.subTest(visible=visible):
                status, report, text = self.check(visible=visible)
                self.assertEqual((status, report["device"]), (0, device), text)
                self.assertEqual(report["sm"], 86 if device == "small" else 90)
                self.assertIn(f"-DCMAKE_CUDA_ARCHITECTURES={report['sm']}", self.get("cmake.txt").splitlines()[-3])
                uuid = "MIG-cccc-3" if visible == "MIG-cccc-3" else "GPU-aaaa-1" if device == "small" else "GPU-bbbb-2"
                self.assertEqual(self.get("visible.txt").strip(), uuid)
        for visible in ("", "2", "GPU-dd", "-1", "NoDevFiles"):
            with self.subTest(visible=visible):
                status, _, text = self.check(visible=visible)
                self.assertEqual(status, 77, text)

    def test_without_a_sanitizer_it_passes_only_if_that_was_asked_for(self):
        os.remove(f"{self.folder}/bin/compute-sanitizer")
        for options, passes in (([], False), (["--without-sanitizer"], True)):
            with self.subTest(options=options):
                status, report, text = self.check(*options)
                self.assertEqual((status == 0, report["passed"]), (passes, passes), text)
                self.assertEqual(report["incomplete"], "memcheck, racecheck, synccheck")
                self.assertIn("incomplete: memcheck, racecheck, synccheck\n", text)
                self.assertEqual(report["measured"], [{"status": 0}])

    def test_what_fails_fails_all_and_the_rest_is_run(self):
        for name, program, text in (("tests", "cg_cuda_gpu_tests", TESTS), ("benchmarks", "cg_cuda_gpu_bench", BENCH)):
            with self.subTest(name):
                self.put(f"built/{program}", text, 1)
                status, report, out = self.check("--without-sanitizer")
                self.put(f"built/{program}", text)
                self.assertEqual((status, report["passed"], report["incomplete"]), (1, False, ""), out)
                self.assertEqual(report["steps"][name]["verdict"], "failed (1)")
                self.assertEqual(len(report["measured"]), 1)

    def test_what_has_tested_nothing_has_not_passed(self):
        nothing = "echo '[  PASSED  ] 0 tests.'"
        quiet = "#!/bin/sh\nexit 0\n"
        for program, text, steps in (
            ("built/cg_cuda_gpu_tests", quiet, ["tests"]),
            ("built/cg_cuda_gpu_tests", f"#!/bin/sh\n{nothing}\n", ["tests"]),
            ("bin/compute-sanitizer", quiet, ["memcheck", "racecheck", "synccheck"]),
            ("bin/compute-sanitizer", SANITIZER.replace("3 tests", "0 tests"), ["memcheck", "racecheck", "synccheck"]),
            ("bin/compute-sanitizer", SANITIZER.replace("ERROR SUMMARY: 0", "ERROR SUMMARY: 10"),
             ["memcheck", "synccheck"]),
            ("bin/compute-sanitizer", SANITIZER.replace("0 hazards", "2 hazards"), ["racecheck"]),
        ):
            with self.subTest(program, text=text):
                self.put(program, text)
                status, report, out = self.check()
                self.put(program, TESTS if "tests" in program else SANITIZER)
                self.assertEqual((status, report["passed"], report["incomplete"]), (1, False, ""), out)
                failed = [name for name, step in report["steps"].items() if step["verdict"] != "passed"]
                self.assertEqual(failed, steps)
                self.assertEqual(report["measured"], [{"status": 0}])

    def test_errors_of_calls_are_none_to_the_only_tool_that_would_report_them(self):
        self.check()
        options = [line for line in self.get("sanitizer.txt").splitlines() if "--report-api-errors no" in line]
        self.assertEqual([line.split()[1] for line in options], ["memcheck"])

    def test_only_building_needs_no_card(self):
        os.remove(f"{self.folder}/bin/nvidia-smi")
        status, report, text = self.check("--build")
        self.assertEqual((status, report["passed"]), (0, True), text)
        self.assertIn("-DCMAKE_CUDA_ARCHITECTURES=80;90;100", self.get("cmake.txt"))

    def test_what_it_does_not_know_is_refused(self):
        for arguments in ((), ("--what",), ("a", "b"), ("--build",), ("--build", "--what")):
            with self.subTest(arguments=arguments):
                ran = subprocess.run(["sh", SCRIPT, *arguments], cwd=self.folder, capture_output=True, check=False,
                                     text=True)
                self.assertEqual(ran.returncode, 2, ran.stdout)
                self.assertIn("usage: check_gpu.sh OUTDIR", ran.stdout)


if __name__ == "__main__":
    SCRIPT = os.path.abspath(sys.argv.pop())
    unittest.main()
