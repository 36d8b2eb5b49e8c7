#!/bin/sh
# Builds the kernels and libcachegen_cuda.so, runs their tests on a GPU, under compute-sanitizer too, and measures.
#
# usage: check_gpu.sh OUTDIR
#        check_gpu.sh --without-sanitizer OUTDIR   passes without compute-sanitizer, where there is none
#        check_gpu.sh --build OUTDIR               only compiles, for sm_80, 90 and 100: needs no GPU
#        check_gpu.sh --deps                       fills build-deps/, for a machine without libxxhash and GoogleTest
#
# Needs this tree, a GPU, nvcc of CUDA 12.1 or later (kernels have more than 4 KB of arguments), cmake 3.22 or later,
# ninja or make, a C++ compiler, compute-sanitizer, and no network. The GPU is the first of CUDA_VISIBLE_DEVICES, an
# index as nvidia-smi counts or a UUID; else nvidia-smi's first. CUDA is looked for in the PATH, then in CUDA_HOME, else
# /usr/local/cuda. libxxhash and GoogleTest are the system's (then pkg-config is needed, too), or in the
# tree's build-deps/ where that is: --deps copies them there on a machine that has them (Debian: libxxhash-dev,
# googletest), and git ignores it.
#
# Takes under 8 minutes: each step has a limit of its own, and all of them together are 475 seconds. What a step fails
# at does not keep the next ones from running, but for the build. OUTDIR gets report.json, report.txt and logs.txt, also
# when a step fails or runs past its limit. What was not run is named in the report, as "incomplete": then it has not
# passed. CG_COMMIT names the commit of a tree that has no .git. Exit status: 0 when all was run and passed, 77 when
# there is no GPU or no compiler, else 1.
set -u
tree=$(cd "$(dirname "$0")/.." && pwd)
deps=$tree/build-deps
if [ "${1:-}" = --deps ]; then
    googletest=/usr/src/googletest/googletest
    [ -f /usr/include/xxhash.h ] && [ -d $googletest ] || { echo "libxxhash-dev or googletest is missing"; exit 1; }
    rm -rf "$deps"
    mkdir -p "$deps/googletest" && cp /usr/include/xxhash.h "$deps" &&
        cp -r $googletest/include $googletest/src "$deps/googletest" && echo "filled $deps"
    exit
fi
only_build=false
needs_sanitizer=true
case ${1:-} in
--build) only_build=true && shift ;;
--without-sanitizer) needs_sanitizer=false && shift ;;
esac
if [ $# -ne 1 ] || [ "${1#-}" != "$1" ]; then
    sed -n '4,7p' "$0"
    exit 2
fi
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
export PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
skip() {
    echo "skipped: $1" | tee "$out/report.txt"
    exit 77
}
needed="nvcc cmake"
$only_build || needed="$needed nvidia-smi"
for tool in $needed; do
    command -v "$tool" > /dev/null || skip "no $tool"
done

# The UUID of the card with this index, or with a UUID that begins so: its own, or that of a part of it (MIG).
find_card() {
    nvidia-smi -L | awk -v wanted="$1" '
        /^GPU / { card = $0; sub(/.*UUID: /, "", card); sub(/\).*/, "", card) }
        (/^GPU / && $2 == wanted ":") || (wanted ~ /^[GM]/ && index($0, "UUID: " wanted)) { print card; exit }'
}
query() { # what: of the card
    nvidia-smi -i "$card" --query-gpu="$1" --format=csv,noheader
}
failed=0
incomplete= # steps that were not run
steps=
must_say= # what the output of a step that passes has in it, one extended regular expression a line
has_said() { # file
    while read -r line; do
        [ -z "$line" ] || grep -Eq "$line" "$1" || return 1
    done <<EOF
$must_say
EOF
}
step() { # name, seconds at most, command: its output goes to logs.txt
    name=$1
    limit=$2
    shift 2
    began=$(date +%s)
    timeout -k 5 "$limit" "$@" > "$work/$name.log" 2>&1
    rc=$?
    { echo "==== $name"; cat "$work/$name.log"; } >> "$out/logs.txt"
    took=$(($(date +%s) - began))
    [ $rc -ne 0 ] || has_said "$work/$name.log" || rc=empty
    case $rc in
    0) verdict=passed ;;
    77) verdict="skipped" ;;
    empty) verdict="failed: it has not said what it tested" && rc=1 ;;
    124 | 137) verdict="past its limit of $limit s" ;;
    *) verdict="failed ($rc)" ;;
    esac
    [ $rc -eq 0 ] || failed=1
    echo "$name: $verdict, $took s: $(tail -n 1 "$work/$name.log")" | tee -a "$work/steps.txt"
    steps="$steps${steps:+, }\"$name\": {\"verdict\": \"$verdict\", \"seconds\": $took}"
    return $rc
}
not_run() { # name, why
    echo "$1: not run, $2" | tee -a "$work/steps.txt"
    steps="$steps${steps:+, }\"$1\": {\"verdict\": \"not run: $2\"}"
    incomplete="$incomplete${incomplete:+, }$1"
    ! $needs_sanitizer || failed=1
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
    [ "$(tail -n 1 "$work/benchmarks.log" 2> /dev/null)" = "]" ] && cp "$work/benchmarks.log" "$work/bench.json" ||
        echo "[]" > "$work/bench.json"
    commit=${CG_COMMIT:-$(git -C "$tree" rev-parse HEAD 2> /dev/null || echo unknown)}
    {
        echo "{\"commit\": \"$commit\", \"device\": \"$device\", \"sm\": $sm,"
        echo " \"nvcc\": \"$(nvcc --version | sed -n 's/.*release \([^,]*\).*/\1/p')\","
        echo " \"clocks\": \"$clocks\", \"clocks_are\": \"$clocks_are\","
        echo " \"passed\": $([ $failed -eq 0 ] && echo true || echo false), \"incomplete\": \"$incomplete\","
        echo " \"steps\": {$steps},"
        echo " \"measured\":"
        cat "$work/bench.json"
        echo "}"
    } > "$out/report.json"
    {
        echo "commit $commit on $device, sm_$sm"
        [ -z "$clocks" ] || echo "$clocks_are: $clocks"
        cat "$work/steps.txt"
        [ -z "$incomplete" ] || echo "incomplete: $incomplete"
        cat "$work/benchmarks.log" 2> /dev/null
    } > "$out/report.txt"
    rm -rf "$work"
    echo "report: $out/report.txt"
    exit $failed
}

rm -f "$out/logs.txt"
if $only_build; then
    architectures="80;90;100"
else
    wanted=${CUDA_VISIBLE_DEVICES-0}
    wanted=${wanted%%,*}
    card=$(find_card "$wanted")
    [ -n "$card" ] || skip "nvidia-smi knows no GPU '$wanted'"
    # CUDA counts cards otherwise than nvidia-smi. A part of a card stays as it was named.
    case $wanted in
    MIG-*) CUDA_VISIBLE_DEVICES=$wanted ;;
    *) CUDA_VISIBLE_DEVICES=$card ;;
    esac
    export CUDA_VISIBLE_DEVICES
    capability=$(query compute_cap | tr -d .)
    case $capability in
    '' | *[!0-9]*) skip "nvidia-smi does not know what $card can do" ;;
    esac
    architectures=$capability
fi
work=$(mktemp -d) || exit 2
build=$work/build
trap report EXIT
trap 'failed=1; exit 1' INT TERM
targets=$build/tests/cuda
many=1
$only_build && many=10 # three architectures, and perhaps few processors that have other work
generator="Unix Makefiles"
! command -v ninja > /dev/null || generator=Ninja
from=
[ ! -d "$deps" ] || from=$deps
step configure $((20 * many)) cmake -S "$tree" -B "$build" -G "$generator" -DCG_CUDA_ONLY=ON -DCG_BUILD_DEPS="$from" \
    -DCMAKE_CUDA_COMPILER="$(command -v nvcc)" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CUDA_ARCHITECTURES="$architectures" || exit
step build $((120 * many)) cmake --build "$build" -j "$(nproc)" --target cg_cuda_gpu_tests || exit
step build_benchmark $((40 * many)) cmake --build "$build" -j "$(nproc)" --target cg_cuda_gpu_bench
$only_build && exit

tested='PASSED  ] [1-9]'
must_say=$tested
step tests 80 "$targets/cg_cuda_gpu_tests"
must_say=
# A part of the tests: under a sanitizer each takes many times as long.
some='Profiles/KltDecodeTest.*Joined*:Profiles/JointDecodeTest.*OneBandScaled:PaperDecodeTest.*:LosslessDecodeTest.*'
some="$some:HostileDecodeTest.Blocks*:Kinds/ProjectTest.*/Joint:Coding.LeavesToTheCpu*:Coding.TakesWide*"
# Only memcheck would report calls that return errors: that an event is not ready yet, for one.
# shellcheck disable=SC2086
sanitize() { # tool, seconds at most, tests, the summary of a run without errors, options
    if command -v compute-sanitizer > /dev/null; then
        must_say="$tested
SUMMARY: $4"
        step "$1" "$2" compute-sanitizer --tool "$1" $5 --error-exitcode 9 "$targets/cg_cuda_gpu_tests" \
            --gtest_filter="$3"
        must_say=
    else
        not_run "$1" "there is no compute-sanitizer"
    fi
}
sanitize memcheck 50 "$some:LibraryTest.*" '0 errors' '--report-api-errors no'
sanitize racecheck 50 "$some" '0 hazards' ''
if [ -x "$targets/cg_cuda_gpu_bench" ]; then
    step benchmarks 95 "$targets/cg_cuda_gpu_bench"
else
    not_run benchmarks "it was not built"
fi
# Last, since a kernel's barriers are the same in each of its tests: a test of each kernel.
few='Profiles/JointDecodeTest.Refines*OneBandScaled:PaperDecodeTest.*:LosslessDecodeTest.*'
sanitize synccheck 20 "$few:Kinds/ProjectTest.Makes*/Joint:Profiles/CodingTest.MakesTheCpusBytes/0" '0 errors' ''
