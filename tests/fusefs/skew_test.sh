#!/bin/bash
# Hosts whose clocks differ: two daemons of one store, each in a time namespace (the clocks since boot) and, with faketime,
# at another date, a year apart. Neither takes the other for dead, ages are the store's, and a killed one is found.
# usage: skew_test.sh CACHEGENFS CHUNK_FILES
# shellcheck source=tests/fusefs/mount.sh
. "$(dirname "$0")/mount.sh" "$@"
unshare --time --monotonic 1000 --fork true 2> /dev/null || skip timens "no time namespaces: hosts with other clocks are not checked"
# Each host reaches the store by a mount of its own, which has locks of its own: as hosts do, they know of each other only
# by what is written.
base=$tmp/base
mkdir "$base"
# noatime: the mounts between pass on no O_NOATIME, so that looking through the store would count as use of it.
mount --bind "$base" "$base" && mount -o remount,bind,noatime "$base" || skip timens "no bind mounts"
mkdir "$base/store"
hosts="1 2"
declare -A offset=([1]=0 [2]=31536000) date=([1]=-1d [2]=+365d) daemons below
at_end() {
    local host
    for host in $hosts; do
        umount -l "$tmp/mnt$host"
        [ -z "${daemons[$host]:-}" ] || wait "${daemons[$host]}"
        umount -l "$tmp/below$host"
        # By a signal: a namespace of somebody else's may have the mount still.
        [ -z "${below[$host]:-}" ] || { kill "${below[$host]}"; wait "${below[$host]}"; }
    done
    umount -l "$base"
} 2> /dev/null
# Preloaded, which a sanitizer does not want.
dated=
if faketime -f +1d "$cachegenfs" --version > "$tmp/dated" 2>&1; then
    dated=faketime
    export FAKETIME_DONT_FAKE_MONOTONIC=1 NO_FAKE_STAT=1
else
    echo "no faketime, or not for this build: dates are not checked"
fi
start() {
    # exec: $! is what ends with the daemon, and --kill-child ends the daemon with it.
    # shellcheck disable=SC2086
    exec unshare --time --monotonic "${offset[$1]}" --boottime "${offset[$1]}" --fork --kill-child \
        ${dated:+faketime -f ${date[$1]}} \
        "$cachegenfs" "$tmp/below$1/store" "$tmp/mnt$1" -f -o dead_after=6s,keep=L2:30d,quota=100M 2>> "$tmp/log$1"
}
mount_host() {
    start "$1" &
    daemons[$1]=$!
    wait_for 30 test -e "$tmp/mnt$1/.cachegenfs/version" || { cat "$tmp/log$1"; echo "FAILED: host $1 does not come up"; exit 1; }
}
for host in $hosts; do
    mkdir "$tmp/mnt$host" "$tmp/below$host"
    "$cachegenfs" "$base" "$tmp/below$host" -f -o passthrough=off,attr_timeout=0,entry_timeout=0 2>> "$tmp/log" &
    below[$host]=$!
    wait_for 20 test -e "$tmp/below$host/.cachegenfs/version" || skip fuse "no mount over a mount"
done
store=$base/store
"$chunk_files" objects "$store/m" 4 40000 1
find "$store/m/objects" -name '*-L1.kv' -exec touch -d '40 days ago' {} + -print > "$tmp/old"
"$chunk_files" objects "$store/m" 4 40000 2
find "$store/m/objects" -name '*-L1.kv' | grep -vxF -f "$tmp/old" > "$tmp/young"
there() { local n=0 file; while read -r file; do [ ! -e "$file" ] || n=$((n + 1)); done < "$1"; echo $n; }
for host in $hosts; do mount_host "$host"; done

# What the daemons have written of their lives: "FOLDER BEATS" each.
lives() {
    local file
    for file in "$store"/.cachegenfs-tmp/*/lock; do
        echo "$(basename "$(dirname "$file")") $(cut -d ' ' -f 2 "$file" | sed 's/^0*//')"
    done
}
both_live() { [ "$(lives | wc -l)" = 2 ]; }
check "both have a folder" wait_for 20 both_live
lives > "$tmp/lives"
# Three times the time after which a silent one is dead.
beaten() { [ "$(lives | awk -v n="$1" 'NR == FNR { was[$1] = $2; next } ($1 in was) && $2 >= was[$1] + n' "$tmp/lives" - | wc -l)" = 2 ]; }
check "both go on, and neither took the other for dead" wait_for 120 beaten 18
check "they are the same" both_live
old_gone() { [ "$(there "$tmp/old")" = 0 ]; }
check "what is older by the store's clock loses its level" wait_for 120 old_gone
check "what is not keeps it, also a year ahead" equal "$(there "$tmp/young")" "$(wc -l < "$tmp/young")"
check "nobody's folder was taken away" fails grep -h 'was gone' "$tmp/log1" "$tmp/log2"
mkdir -p "$tmp"/mnt{1,2}/m/contexts/{x,y}/L1
chunk=$(head -n 1 "$tmp/young")
check "both publish" sh -c 'cp "$1" "$2/m/contexts/x/L1/00000.kv" && cp "$1" "$3/m/contexts/y/L1/00000.kv"' sh "$chunk" "$tmp/mnt1" "$tmp/mnt2"
check "the chunk is seen at the other one" wait_for 20 test -e "$tmp/mnt1/m/contexts/y/L1/00000.kv"

# Each is killed in its turn, and the other one finds it by its own clock.
for host in $hosts; do
    other=$((3 - host))
    kill -KILL "${daemons[$host]}"
    wait "${daemons[$host]}" 2> /dev/null
    umount -l "$tmp/mnt$host"
    one_left() { [ "$(lives | wc -l)" = 1 ]; }
    check "the folder of host $host goes after its end" wait_for 120 one_left
    check "and host $other goes on" cmp "$chunk" "$tmp/mnt$other/m/contexts/x/L1/00000.kv"
    mount_host "$host"
    check "host $host comes back" wait_for 20 both_live
done
check "every chunk is whole" "$cachegenfs" fsck "$store"
for host in $hosts; do
    umount "$tmp/mnt$host"
    wait "${daemons[$host]}"
    check "the daemon of host $host ends well" equal $? 0
    daemons[$host]=
done
cat "$tmp/log1" "$tmp/log2" >> "$tmp/log"
report
