#!/bin/bash
# What a daemon with a quota takes over a store of many objects: time to serve, memory at its peak, memory after each
# `find` over all names. usage: many_objects.sh BUILD_DIR N_THOUSAND [STORE]     on demand; as root
# STORE: where the objects are, or are made if there are none; it stays, less what the last step evicts. Without it they
# are made in a temporary folder. CG_BENCH_ROUNDS (10). Nothing is dropped from caches: a first run is cold.
set -eu
[ $# -ge 2 ] || {
    echo "usage: many_objects.sh BUILD_DIR N_THOUSAND [STORE]" >&2
    exit 2
}
build=$1
n_thousand=$2
rounds=${CG_BENCH_ROUNDS:-10}
# shellcheck source=tests/fusefs/mount.sh
. "$(dirname "$0")/../fusefs/mount.sh" "$build/fusefs/cachegenfs" "$build/tests/fusefs/cg_chunk_files"
store=${3:-$store}

status_mib() { awk -v what="$1:" '$1 == what {printf "%.0f", $2 / 1024}' "/proc/$daemon/status"; }
seconds_since() { awk -v a="$1" -v b="$EPOCHREALTIME" 'BEGIN {printf "%.2f", b - a}'; }
# Once a second: to ask takes a processor from who is asked.
until_true() { until "$@"; do sleep 1; done; }
is_surveyed() { [ "$(metric used_bytes)" -gt 0 ]; }
has_evicted() { [ "$(metric evicted_bytes_total)" -gt 0 ] && [ ! -e "$store/.cachegenfs-tmp/evicting" ]; }
serve() { # QUOTA
    local start=$EPOCHREALTIME
    mount_store -o "quota=$1"
    echo "it serves after $(seconds_since "$start") s"
}

if [ ! -d "$store/m/objects" ]; then
    mkdir -p "$store"
    for i in $(seq "$n_thousand"); do "$chunk_files" objects "$store/m" 1000 300 "$i"; done
fi
serve 1000G
start=$EPOCHREALTIME
until_true is_surveyed
used=$(metric used_bytes)
echo "the survey took $(seconds_since "$start") s and found $used bytes; peak $(status_mib VmHWM) MiB, then $(status_mib VmRSS) MiB"
for round in $(seq "$rounds"); do
    start=$EPOCHREALTIME
    n=$(find "$mnt/m" | wc -l)
    echo "find, round $round: $n names, $(seconds_since "$start") s; $(status_mib VmRSS) MiB, peak $(status_mib VmHWM) MiB"
done
unmount
start=$EPOCHREALTIME
serve "$((used * 100 / 96 / 1048576))M"
until_true has_evicted
echo "making room took $(seconds_since "$start") s: $(metric evicted_bytes_total) bytes went; peak $(status_mib VmHWM) MiB"
