#!/bin/sh
# Benchmarks end with a line on stderr, and status 2, where there is nothing to measure. usage: arguments_test.sh BUILD_DIR
set -u
bench=$(dirname "$0")
built=$1/tests/bench
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
: > "$tmp/empty"
n_failed=0

# refuses PROGRAM ARGUMENT...
refuses() {
    if [ ! -e "$1" ] && [ "$1" != bash ]; then
        echo "SKIPPED: this build does not have $1"
        return
    fi
    "$@" > /dev/null 2> "$tmp/said" < /dev/null
    status=$?
    [ $status = 2 ] && [ "$(wc -l < "$tmp/said")" = 1 ] && return
    echo "FAILED: status $status of $*"
    cat "$tmp/said"
    n_failed=$((n_failed + 1))
}
for arguments in "" "$tmp/missing" "$tmp/empty"; do
    # shellcheck disable=SC2086 # none, or one
    refuses "$built/evict_sim" $arguments
    # shellcheck disable=SC2086
    refuses "$built/lookup_bench" $arguments
done
refuses "$built/codec_bench"
refuses "$built/codec_bench" -h
refuses "$built/codec_bench" -k none "$tmp/empty"
refuses "$built/codec_bench" -k baseline "$tmp/missing"
refuses "$built/codec_bench" -k baseline "$bench/../golden/v1/bf16-0-L1.kv"
refuses bash "$bench/many_objects.sh"
refuses bash "$bench/fs_bench.sh"
exit $n_failed
