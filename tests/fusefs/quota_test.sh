#!/bin/bash
# A mount with a quota makes room, also when it is killed meanwhile. usage: quota_test.sh CACHEGENFS CHUNK_FILES
# shellcheck source=tests/fusefs/mount.sh
. "$(dirname "$0")/mount.sh" "$@"

for bad in "" 5 1000 -1M 10X 99999999999T 1.5G; do
    check "quota=$bad is refused" sh -c '! "$1" "$2" "$3" -f -o "quota=$4" 2>&1 | grep -q "a size of 1M" && exit 1; exit 0' \
        sh "$cachegenfs" "$store" "$mnt" "$bad"
done

for bad in keep=7d keep=L4:7d keep=L0:7d keep=L2 keep=L2:0 keep=L2:7d,L3:soon model_quota=5G model_quota=m:5 model_quota=.m:5G model_quota=quarantine:5G; do
    check "$bad is refused" sh -c '! "$1" "$2" "$3" -f -o "$4" 2>&1 | grep -q "wanted, such as\|a size of 1M" && exit 1; exit 0' \
        sh "$cachegenfs" "$store" "$mnt" "$bad"
done

for bad in keep=L2:599s keep=L1:7d,L3:9m; do
    check "$bad is refused" sh -c 'timeout 20 "$1" "$2" "$3" -f -o "$4" 2>&1 | grep -q "10 minutes and more"' \
        sh "$cachegenfs" "$store" "$mnt" "$bad"
done

# Pins and times to live, which copies carry.
attribute() { python3 -c 'import os, sys; print(os.getxattr(sys.argv[1], "user.cachegen." + sys.argv[2]).decode())' "$@"; }
set_attribute() { python3 -c 'import os, sys; os.setxattr(sys.argv[1], "user.cachegen." + sys.argv[2], sys.argv[3].encode())' "$@"; }
if set_attribute "$store" test 1 2> /dev/null; then
    mount_store -o keep=L2:7d,L3:90d,model_quota=m:1G
    mkdir -p "$mnt/m/contexts/a"
    check "a pin" set_attribute "$mnt/m/contexts/a" pin ""
    check "a time to live" set_attribute "$mnt/m/contexts/a" ttl 30d
    check "that is no time is refused" fails set_attribute "$mnt/m/contexts/a" ttl soon
    check "cp carries it" cp -a "$mnt/m/contexts/a" "$mnt/m/contexts/b"
    check "unchanged" equal "$(attribute "$mnt/m/contexts/b" ttl)" 30d
    check "rsync carries it" rsync -aX "$mnt/m/contexts/a/" "$mnt/m/contexts/d"
    check "with the pin" equal "$(attribute "$mnt/m/contexts/d" pin)" ""
    check "the configuration names the rules" grep -q '^keep = L2:604800s L3:7776000s$' "$mnt/.cachegenfs/config"
    check "and the model's quota" grep -q '^model_quota = m:1073741824$' "$mnt/.cachegenfs/config"
    unmount
fi

# Eight prompts of ten chunks, 150 kB a level, that nobody has used for a while, the older the smaller their number.
n_files() { find "$store/m/objects" -name "$1" | wc -l; }
kib_used() { du -sk "$store/m" | cut -f1; }
in_quota() { [ "$(metric used_bytes)" -gt 0 ] && [ "$(kib_used)" -le $((quota_mib * 1024 * 95 / 100)) ]; }
fill() {
    rm -rf "$store/m" "$tmp/source"
    mount_store
    for i in 1 2 3 4 5 6 7 8; do
        "$chunk_files" nest "$tmp/source" 10 150000 "$i"
        mkdir -p "$mnt/m/contexts/c"
        cp -r "$tmp/source/." "$mnt/m/contexts/c/"
        rm -rf "$mnt/m/contexts/c" "$tmp/source"
        find "$store/m/objects" -name '*.kv' -newer "$tmp/mark" -exec touch -d "$((60 - 5 * i)) days ago" {} +
    done
    unmount
}
touch -d '5 days ago' "$tmp/mark"
fill
check "the store is filled" equal "$(n_files '*-L1.kv') $(n_files '*-L3.kv')" "80 80"
before=$(kib_used)
check "it takes what its finest levels take" [ "$before" -gt 34000 ]

# Room is made at the start, and by what is published later.
mount_store -o quota=16M
quota_mib=16
check "room is made" wait_for 60 in_quota
check "chunks stay at coarser levels" [ "$(n_files '*-L3.kv')" -gt "$(n_files '*-L1.kv')" ]
check "df tells the quota" equal "$(df -k --output=size "$mnt" | tail -n 1 | tr -d ' ')" 16384
evicted() { [ "$(metric 'evictions_total{what="finest_levels"}')" -gt 0 ]; }
check "metrics tell of it" wait_for 20 evicted
"$chunk_files" nest "$tmp/source" 10 150000 9
mkdir -p "$mnt/m/contexts/kept"
check "a context is copied in" cp -r "$tmp/source/." "$mnt/m/contexts/kept/"
check "room is made again" wait_for 60 in_quota
check "a context keeps all that it has" same_tree "$tmp/source/L1" "$mnt/m/contexts/kept/L1"
check "at all levels" equal "$(ls "$mnt"/m/contexts/kept/L[123]/*.kv | wc -l)" 30
unmount
check "what is left is whole" sh -c 'find "$2/m" -name "*.kv" -print0 | xargs -0 "$1" verify' sh "$chunk_files" "$store"

# Killed in the middle: every file that is left is whole, and the next daemon goes on.
quota_mib=8
for round in 1 2 3 4 5 6; do
    fill
    mount_store -o quota=8M
    some_gone() { [ "$(n_files '*-L1.kv')" -le $((80 - 10 * round)) ]; }
    check "round $round: room is being made" wait_for 60 some_gone
    kill_daemon
    check "round $round: every chunk is whole" \
        sh -c 'find "$2/m" -name "*.kv" -print0 | xargs -0 "$1" verify' sh "$chunk_files" "$store"
    mount_store -o quota=8M
    check "round $round: room is made in the end" wait_for 60 in_quota
    check "round $round: nothing is left of the first daemon" wait_for 60 staged_are 0
    unmount
done
report
