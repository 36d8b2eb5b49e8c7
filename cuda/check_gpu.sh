#!/bin/sh
# Builds the kernels, runs their tests on a GPU, under compute-sanitizer too, and measures.
#
# usage: check_gpu.sh OUTDIR
#        check_gpu.sh --build OUTDIR       only compiles, for sm_80, 90 and 100: needs no GPU
#
# Needs this tree, a GPU, nvcc, cmake, a C++ compiler, libxxhash and GoogleTest, and no network. Takes under 8 minutes:
# each step has a limit of its own, and all of them together are 455 seconds. What a step fails at does not keep the
# next ones from running, but for the build. OUTDIR gets report.json, report.txt and logs, also when a step fails or
# runs past its limit; what is not there is named in the report. Exit status: 0 when all that was run passed, 77 when
# there is no GPU or no compiler, else 1.
set -u
only_build=false
[ "${1:-}" != --build ] || { only_build=true; shift; }
[ $# -eq 1 ] || { sed -n '4,5p' "$0"; exit 2; }
tree=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
build=$out/build
export PATH="$PATH:/usr/local/cuda/bin"
needed="nvcc cmake"
$only_build || needed="$needed nvidia-smi"
for tool in $needed; do
    command -v "$tool" > /dev/null || { echo "skipped: no $tool" | tee "$out/report.txt"; exit 77; }
done

query() { # what: of the first GPU
    nvidia-smi --query-gpu="$1" --format=csv,noheader | head -n 1
}
failed=0
steps=
step() { # name, seconds at most, command: its output goes to NAME.log
    name=$1
    limit=$2
    shift 2
    began=$(date +%s)
    timeout -k 5 "$limit" "$@" > "$out/$name.log" 2>&1
    rc=$?
    took=$(($(date +%s) - began))
    case $rc in
    0) verdict=passed ;;
    77) verdict="skipped" ;;
    124 | 137) verdict="past its limit of $limit s" ;;
    *) verdict="failed ($rc)" ;;
    esac
    [ $rc -eq 0 ] || failed=1
    echo "$name: $verdict, $took s: $(tail -n 1 "$out/$name.log")" | tee -a "$out/steps.txt"
    steps="$steps${steps:+, }\"$name\": {\"verdict\": \"$verdict\", \"seconds\": $took}"
    return $rc
}
not_run() { # name, why
    echo "$1: not run, $2" | tee -a "$out/steps.txt"
    steps="$steps${steps:+, }\"$1\": {\"verdict\": \"not run: $2\"}"
}

report() {
    trap - EXIT INT TERM
    device=none sm=0 clocks='' clocks_are=''
    if ! $only_build; then
        device=$(query name,driver_version,memory.total)
        sm=$capability
        clocks_are=clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu
        clocks=$(query "$clocks_are")
    fi
    # An array is whole when its last line ends it; what a benchmark that was stopped had measured stays in its log.
    [ "$(tail -n 1 "$out/benchmarks.log" 2> /dev/null)" = "]" ] && cp "$out/benchmarks.log" "$out/bench.json" ||
        echo "[]" > "$out/bench.json"
    commit=$(git -C "$tree" rev-parse HEAD 2> /dev/null || echo unknown)
    {
        echo "{\"commit\": \"$commit\", \"device\": \"$device\", \"sm\": $sm,"
        echo " \"nvcc\": \"$(nvcc --version | sed -n 's/.*release \([^,]*\).*/\1/p')\","
        echo " \"clocks\": \"$clocks\", \"clocks_are\": \"$clocks_are\","
        echo " \"passed\": $([ $failed -eq 0 ] && echo true || echo false), \"steps\": {$steps},"
        echo " \"measured\":"
        cat "$out/bench.json"
        echo "}"
    } > "$out/report.json"
    {
        echo "commit $commit on $device, sm_$sm"
        [ -z "$clocks" ] || echo "$clocks_are: $clocks"
        cat "$out/steps.txt"
        cat "$out/benchmarks.log" 2> /dev/null
    } > "$out/report.txt"
    rm -rf "$build"
    echo "report: $out/report.txt"
    exit $failed
}

rm -f "$out"/*.log "$out/steps.txt" "$out/bench.json"
if $only_build; then
    architectures="80;90;100"
else
    capability=$(query compute_cap | tr -d .)
    case $capability in
    '' | *[!0-9]*) echo "skipped: nvidia-smi knows no GPU" | tee "$out/report.txt"; exit 77 ;;
    esac
    architectures=$capability
fi
trap report EXIT
trap 'failed=1; exit 1' INT TERM
targets=$build/tests/cuda
many=1
$only_build && many=10 # three architectures, and perhaps few processors that have other work
step configure $((20 * many)) cmake -S "$tree" -B "$build" -DCG_CUDA_ONLY=ON -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_CUDA_ARCHITECTURES="$architectures" || exit
step build $((120 * many)) cmake --build "$build" -j "$(nproc)" --target cg_cuda_gpu_tests || exit
step build_benchmark $((40 * many)) cmake --build "$build" -j "$(nproc)" --target cg_cuda_gpu_bench
$only_build && exit

step tests 80 "$targets/cg_cuda_gpu_tests"
# A part of the tests: under a sanitizer each takes many times as long.
some='Profiles/KltDecodeTest.*Joined*:PaperDecodeTest.*:LosslessDecodeTest.*'
some="$some:HostileDecodeTest.Blocks*:Kinds/ProjectTest.*/Joint:Coding.LeavesToTheCpu*:Coding.TakesWide*"
for check in memcheck racecheck; do
    if command -v compute-sanitizer > /dev/null; then
        step $check 50 compute-sanitizer --tool $check --error-exitcode 9 "$targets/cg_cuda_gpu_tests" \
            --gtest_filter="$some"
    else
        not_run $check "there is no compute-sanitizer"
    fi
done
if [ -x "$targets/cg_cuda_gpu_bench" ]; then
    step benchmarks 95 "$targets/cg_cuda_gpu_bench"
else
    not_run benchmarks "it was not built"
fi
