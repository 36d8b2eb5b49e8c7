#!/bin/bash
# A daemon that is killed in the middle of copies leaves whole chunks or none. usage: kill_test.sh CACHEGENFS CHUNK_FILES
# shellcheck source=tests/fusefs/mount.sh
. "$(dirname "$0")/mount.sh" "$@"

for i in 1 2 3 4; do
    "$chunk_files" make "$tmp/source/$i" 20 300000 "$i"
done
mkdir -p "$store/m/contexts"
some_published() { [ "$(find "$store/m/contexts" -name '*.kv' | wc -l)" -ge "$1" ]; }

for round in 1 2 3 4; do
    mount_store
    rm -rf "$mnt"/m/contexts/*
    copies=()
    for i in 1 2 3 4; do
        cp -r "$tmp/source/$i" "$mnt/m/contexts/" 2> /dev/null &
        copies+=($!)
    done
    check "round $round: copies are under way" wait_for 30 some_published $((round * 7))
    kill -KILL "$daemon"
    wait "$daemon" 2> /dev/null
    daemon=
    for copy in "${copies[@]}"; do
        wait "$copy"
    done
    umount -l "$mnt"
    check "round $round: every chunk in the store is whole" \
        sh -c 'find "$2/m" -name "*.kv" -print0 | xargs -0 "$1" verify' sh "$chunk_files" "$store"
    mount_store
    check "round $round: what was being written is gone" wait_for 60 staged_are 0 # but what the new one is at
    check "round $round: one daemon's folder" equal "$(find "$store/.cachegenfs-tmp" -mindepth 1 -type d | wc -l)" 1
    check "round $round: the rest can be copied" rsync -a "$tmp/source/" "$mnt/m/contexts/"
    check "round $round: everything is there" same_tree "$tmp/source" "$mnt/m/contexts"
    unmount
done

# As SEMANTICS.md says under "Stop and start", with a daemon in the background and somebody who keeps the mount busy.
pid_told() { sed -n 's/^pid = //p' "$mnt/.cachegenfs/config"; }
# The test's own folder may be left when a check fails.
at_end() { kill "$(pid_told)" 2> /dev/null; }
check "a daemon starts" "$cachegenfs" -o dead_after=7200 "$store" "$mnt" # the second beat comes much later
exec 8< "$mnt/m"
check "the mount is busy" fails umount "$mnt"
pid=$(pid_told)
check "it tells its process" grep -qa cachegenfs "/proc/$pid/cmdline"
check "and others, too" wait_for 60 grep -q " pid $pid " "$store/.cachegenfs-tmp/"*/lock
check "which ends" kill "$pid"
check "soon" timeout 60 tail --pid="$pid" -f /dev/null
check "the next one starts" timeout 60 "$cachegenfs" "$store" "$mnt"
check "another process" fails equal "$(pid_told)" "$pid"
check "everything is there" same_tree "$tmp/source" "$mnt/m/contexts"
exec 8<&-
pid=$(pid_told)
check "nobody is in the way" umount "$mnt"
check "it has ended" timeout 60 tail --pid="$pid" -f /dev/null
at_end() { :; }
report
