#!/bin/sh
# Installs what is missing, builds, runs all tests; ends with ctest's summary and exit status.
# usage: sh tests/run.sh
# The sanitizers run first, and the script ends when they fail; CG_SANITIZERS= (empty) skips them.
# A test that fails runs a second time, so that a machine's bad moment does not void an hour of
# tests. Its first failure stays in the output, with "***Failed" in its line: look for that.
# Not so those that draw something else each time (stress, and killing at random moments): what one
# of them finds, the second time would hide.
set -eu
cd "$(dirname "$0")/.."
sanitizers=${CG_SANITIZERS-asan tsan}

# Where something can't be installed, the tests that need it skip and say so.
for part in build libfuse engine model ruff; do
    echo "== dependencies: $part"
    found=$(sh configs/dependencies.sh "$part") ||
        echo "== $part is not complete here; going on with what there is"
    eval "$found"
done

# What was compiled before, in any checkout, is not compiled again. Paths are relative, and times of
# headers do not count: a new checkout has new ones.
if command -v ccache > /dev/null; then
    export CCACHE_DIR="${CACHEGENFS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/cachegenfs}/ccache"
    export CCACHE_BASEDIR="$PWD" CCACHE_NOHASHDIR=1 CCACHE_MAXSIZE=2G
    export CCACHE_SLOPPINESS=include_file_mtime,include_file_ctime
    export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
fi

build() {
    echo "== build: $1 in $2"
    # Fresh: a cached result of pkg-config may point to a libfuse that is gone.
    cmake --fresh -C "configs/$1.cmake" -B "$2" -G Ninja -DCG_WERROR=ON \
        -DCMAKE_PREFIX_PATH="${CG_LIBFUSE_PREFIX:-}" \
        -DCG_ENGINE_PYTHON="${CG_ENGINE_PYTHON:-}" -DCG_MODEL_DIR="${CG_MODEL_DIR:-}" \
        -DCG_RUFF="${CG_RUFF:-}"
    cmake --build "$2"
}

# Under some kernels' address randomization ThreadSanitizer finds its memory taken; some containers
# forbid the cure.
fixed_addresses=
setarch -R true 2> /dev/null && fixed_addresses="setarch -R"

# One more than CPUs: some tests mostly wait.
once="--output-on-failure -j$(($(nproc) + 1)) --timeout 900"
how="$once --repeat until-pass:2"
random='Crash|Stress|faults_test|powercut_test'
for sanitizer in $sanitizers; do
    build "$sanitizer" "build-$sanitizer"
    echo "== unit tests, fuzz corpus, stress and mounts with $sanitizer"
    $fixed_addresses ctest --test-dir "build-$sanitizer" $once -R "$random" -L 'unit|stress'
    $fixed_addresses ctest --test-dir "build-$sanitizer" $how -E "$random" \
        -L 'unit|emulated|fuzz|mount'
done

build release build
echo "== tests that draw something else each time"
ctest --test-dir build $once -R "$random" -L 'unit|stress|e2e'
echo "== all other tests"
left_out=bench
case " $sanitizers " in
*" asan "*) left_out='bench|emulated' ;; # they have passed: tests/CMakeLists.txt
esac
exec ctest --test-dir build $how -E "$random" -LE "$left_out"
