#!/bin/bash
# A daemon that is killed at any moment, in any of its tasks, loses nothing that was confirmed, damages nothing, and the
# next one goes on. usage: faults_test.sh CACHEGENFS CHUNK_FILES     CG_FAULT_ROUNDS (5): kills; CG_FAULT_SEED
# shellcheck source=tests/fusefs/mount.sh
. "$(dirname "$0")/mount.sh" "$@"
rounds=${CG_FAULT_ROUNDS:-5}
RANDOM=${CG_FAULT_SEED:-$$}
echo "seed ${CG_FAULT_SEED:-$$}, $rounds rounds"

second=
mnt2=$tmp/mnt2
mkdir "$mnt2"
at_end() {
    [ -z "$second" ] || kill -KILL "$second" 2> /dev/null
    mountpoint -q "$mnt2" && umount -l "$mnt2"
}
flip() {
    local byte
    byte=$(od -An -tu1 -j "$2" -N 1 "$1")
    printf "\\$(printf %o $((byte ^ 255)))" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none
    touch -m -d '1 hour ago' "$1" # nobody is writing it
}
all_whole() { find "$store/m" -name '*.kv' -print0 | xargs -0 -r "$chunk_files" verify; }
used_kib() { du -sk "$store/m" | cut -f1; }
# Ten prompts of eight chunks, 40 kB a level, 9.6 MB in all, used some days ago.
fill() {
    rm -rf "$store/m"
    for i in 0 1 2 3 4 5 6 7 8 9; do "$chunk_files" objects "$store/m" 8 40000 "$i"; done
    find "$store/m/objects" -name '*.kv' -exec touch -d "$((RANDOM % 30 + 8)) days ago" {} +
}
in_quota() { [ "$(metric used_bytes)" -gt 0 ] && [ "$(used_kib)" -le 4864 ]; }
l1_gone() { [ "$(find "$store/m/objects" -name '*-L1.kv' | wc -l)" = 0 ]; }
pass_ended() { [ "$(metric scrub_passes_total)" -ge 1 ]; }

import() {
    rm -rf "$store/m" "$tmp/source"
    "$chunk_files" nest "$tmp/source" 40 60000 "$1"
    mount_store
    mkdir -p "$mnt"/m/contexts/{a,b}/L1
    begin_imports
    some_time
    kill_daemon
    wait
    check_imports "round $1" "$tmp/confirmed"
    check "round $1: every chunk is whole" all_whole
    mount_store
    check "round $1: nothing is staged" wait_for 60 staged_are 0 # but what the new one is at
}

evict() {
    fill
    mount_store -o quota=5M
    some_time
    kill_daemon
    check "round $1: every chunk is whole" all_whole
    mount_store -o quota=5M
    check "round $1: the next daemon makes room" wait_for 60 in_quota
    check "round $1: no more than is wanted" [ "$(used_kib)" -gt 3500 ]
}

coarsen() {
    fill
    mount_store -o keep=L2:7d
    some_time
    kill_daemon
    check "round $1: every chunk is whole" all_whole
    find "$store/m/objects" -name '*.kv' -exec touch -d '9 days ago' {} + # the check has read them
    mount_store -o keep=L2:7d
    check "round $1: the next daemon goes on" wait_for 60 l1_gone
    check "round $1: L2 and L3 are all there" equal "$(find "$store/m/objects" -name '*-L[23].kv' | wc -l)" 160
}

scrub() {
    fill
    find "$store/m/objects" -name '*-L1.kv' | sort > "$tmp/all"
    awk 'NR % 3 == 0' "$tmp/all" > "$tmp/tail_damaged"
    awk 'NR % 7 == 1' "$tmp/all" > "$tmp/head_damaged"
    while read -r file; do flip "$file" $(($(stat -c %s "$file") - 50)); done < "$tmp/tail_damaged"
    while read -r file; do flip "$file" 5000; done < "$tmp/head_damaged"
    rm -f "$store/.cachegenfs-scrubbed" # of the round before
    mount_store -o scrub=1G
    some_time
    kill_daemon
    rm -f "$store/.cachegenfs-scrubbed"
    mount_store -o scrub=1G
    check "round $1: the next pass ends" wait_for 60 pass_ended
    check "round $1: every chunk is whole" all_whole
    check "round $1: what was whole is there" equal \
        "$(grep -vxF -f "$tmp/tail_damaged" "$tmp/all" | grep -vxF -f "$tmp/head_damaged" | xargs ls | wc -l)" \
        "$(grep -vxF -f "$tmp/tail_damaged" "$tmp/all" | grep -cvxF -f "$tmp/head_damaged")"
    check "round $1: coarser levels of what was damaged at its end" equal \
        "$(grep -vxF -f "$tmp/head_damaged" "$tmp/tail_damaged" | sed 's/-L1.kv$/-L2.kv/' | xargs ls | wc -l)" \
        "$(grep -cvxF -f "$tmp/head_damaged" "$tmp/tail_damaged")"
    rm -rf "$store/quarantine"
}

# Both make room at once: the lock's file is taken away, so that each has a lock of its own.
two_evictors() {
    fill
    mount_store -o quota=5M
    "$cachegenfs" "$store" "$mnt2" -f -o quota=5M 2>> "$tmp/log" &
    second=$!
    for _ in $(seq 200); do rm -f "$store/.cachegenfs-tmp/evicting"; done
    some_time
    kill_daemon
    check "round $1: the other one makes room" wait_for 60 sh -c '[ "$(du -sk "$1/m" | cut -f1)" -le 4864 ]' sh "$store"
    kill "$second" # it may be at it still, and names would go while they are looked at
    wait "$second" 2> /dev/null
    second=
    check "round $1: every chunk is whole" all_whole
    check "round $1: some is left" [ "$(used_kib)" -gt 1000 ]
    mount_store
}

tasks=(import evict coarsen scrub two_evictors)
for round in $(seq "$rounds"); do
    ${tasks[round % 5]} "$round"
    unmount
    [ $((round % 20)) != 0 ] || echo "$round rounds, $n_failed of $n_checks checks failed"
done
report
