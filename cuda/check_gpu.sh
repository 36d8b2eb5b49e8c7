#!/bin/sh
# Builds the kernels, runs their tests on a GPU, under compute-sanitizer too, and measures.
#
# usage: check_gpu.sh OUTDIR
#
# Needs this tree, a GPU, nvcc, cmake, a C++ compiler, libxxhash and GoogleTest, and no network. Takes under 8 minutes.
# OUTDIR gets report.json, report.txt and logs; what is not there is named in the report. Exit status: 0 when all tests
# passed, 77 when there is no GPU or no compiler.
set -eu
[ $# -eq 1 ] || { sed -n 4p "$0"; exit 2; }
tree=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
export PATH="$PATH:/usr/local/cuda/bin"
for tool in nvcc cmake nvidia-smi; do
    command -v $tool > /dev/null || { echo "skipped: no $tool" | tee "$out/report.txt"; exit 77; }
done

build=$out/build
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
echo "building for sm_$capability"
cmake -S "$tree" -B "$build" -DCG_CUDA_ONLY=ON -DCMAKE_BUILD_TYPE=Release -DCMAKE_CUDA_ARCHITECTURES="$capability" \
    > "$out/build.log" 2>&1
cmake --build "$build" -j "$(nproc)" --target cg_cuda_gpu_tests >> "$out/build.log" 2>&1
cmake --build "$build" -j "$(nproc)" --target cg_cuda_gpu_bench >> "$out/build.log" 2>&1 ||
    echo "the benchmark was not built: see build.log"

failed=0
verdict() { # name, log: says how a test ended
    echo "$1: $(tail -n 1 "$out/$2")"
}
echo "tests"
timeout 120 "$build/tests/cuda/cg_cuda_gpu_tests" > "$out/tests.log" 2>&1 || failed=1
verdict tests tests.log
sanitized=
for check in memcheck racecheck; do
    if ! command -v compute-sanitizer > /dev/null; then
        sanitized="no compute-sanitizer"
        echo "$check: not run, there is no compute-sanitizer"
        continue
    fi
    timeout 100 compute-sanitizer --tool $check --error-exitcode 9 "$build/tests/cuda/cg_cuda_gpu_tests" \
        --gtest_filter='Profiles/KltDecodeTest.*Joined*:PaperDecodeTest.*:LosslessDecodeTest.*:HostileDecodeTest.Blocks*' \
        > "$out/$check.log" 2>&1 || failed=1
    verdict $check $check.log
    sanitized="$sanitized $check"
done

echo "benchmarks"
nvidia-smi --query-gpu=clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu --format=csv \
    > "$out/clocks.txt"
if [ -x "$build/tests/cuda/cg_cuda_gpu_bench" ]; then
    timeout 150 "$build/tests/cuda/cg_cuda_gpu_bench" > "$out/bench.json" 2> "$out/bench.log" ||
        { failed=1; rm "$out/bench.json"; }
fi
[ -s "$out/bench.json" ] || echo "[]" > "$out/bench.json"
commit=$(git -C "$tree" rev-parse HEAD 2> /dev/null || echo unknown)
device=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | head -n 1)
{
    echo "{\"commit\": \"$commit\", \"device\": \"$device\", \"sm\": $capability,"
    echo " \"nvcc\": \"$(nvcc --version | sed -n 's/.*release \([^,]*\).*/\1/p')\","
    echo " \"clocks\": \"$(tail -n 1 "$out/clocks.txt")\","
    echo " \"clocks_are\": \"$(head -n 1 "$out/clocks.txt")\","
    echo " \"tests_passed\": $([ $failed -eq 0 ] && echo true || echo false), \"sanitized\": \"$sanitized\","
    echo " \"measured\":"
    cat "$out/bench.json"
    echo "}"
} > "$out/report.json"
{
    echo "commit $commit on $device, sm_$capability"
    cat "$out/clocks.txt"
    tail -n 3 "$out/tests.log"
    echo "sanitized: $sanitized"
    cat "$out/bench.json"
} > "$out/report.txt"
rm -rf "$build"
echo "report: $out/report.txt"
exit $failed
