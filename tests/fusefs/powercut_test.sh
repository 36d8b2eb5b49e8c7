#!/bin/bash
# Power cuts: the store's file system stops at any moment, without what it has not written yet. After the next mount what
# close confirmed is there, and every strict name is whole. usage: powercut_test.sh CACHEGENFS CHUNK_FILES
# CG_CUT_ROUNDS (3): cuts of each kind on each file system; CG_CUT_SEED. ext4, and xfs where mkfs.xfs is there, on a loop
# device. Two kinds: the file systems' own shutdown without a flush of their log, beside a daemon that goes on for a
# moment; and CG_CUT_POINTS (10) disks of what one run wrote, each cut at a random place in the log of all writes, where
# a disk with a cache may have reordered and torn what it was not told to flush (block_log.c).

# Our mounts are nobody else's. A process elsewhere that takes a mount namespace of its own, as mount_test.sh's daemon does
# at the same time, would keep what is mounted at that moment: our umount then writes nothing back, and XFS does not
# mount the copy of what is still mounted. Nor do we keep what other tests have mounted.
if [ -z "${CG_OWN_MOUNTS:-}" ] && unshare --mount true 2> /dev/null; then
    CG_OWN_MOUNTS=1 exec unshare --mount bash "$0" "$@"
fi
[ -z "${CG_OWN_MOUNTS:-}" ] || awk '$5 ~ "/cg_[a-z]*_[^/]*/" { print $5 }' /proc/self/mountinfo | tac | xargs -r umount -l
# shellcheck source=tests/fusefs/mount.sh
. "$(dirname "$0")/mount.sh" "$@"
rounds=${CG_CUT_ROUNDS:-3}
points=${CG_CUT_POINTS:-10}
block_log=$(dirname "$chunk_files")/cg_block_log
RANDOM=${CG_CUT_SEED:-$$}
[ "$(id -u)" = 0 ] || skip root "only root mounts images: power cuts are not checked"
truncate -s 512M "$tmp/image"
losetup -f > /dev/null 2>&1 || skip loop "no loop device: power cuts are not checked"
echo "seed ${CG_CUT_SEED:-$$}, $rounds cuts a file system"

disk=
at_end() {
    local job
    # After a check that failed: whoever still writes would keep the loop device, and so the disk below it.
    for job in $(jobs -p | grep -vx -e "$daemon" -e "$disk"); do kill "$job" 2> /dev/null; done
    unmount
    ! mountpoint -q "$store" || take_away "$store" || umount -l "$store"
    ! mountpoint -q "$tmp/disk" || take_away "$tmp/disk" || { kill -KILL "$disk"; umount -l "$tmp/disk"; }
    [ -z "$disk" ] || wait "$disk"
}
mount_image() { mount -o loop "$tmp/image" "$store"; }
# take_away MOUNT: whoever looks at all mounts, or at all loop devices as each `mount -o loop` does, may have it open.
take_away() { wait_for 20 umount "$1" || umount "$1"; }
# The ioctl of both file systems (EXT4_IOC_SHUTDOWN, XFS_IOC_GOINGDOWN), without a flush of the log. What was confirmed is
# noted right before: on xfs a directory's fsync that comes after is 0, although the name is lost.
cut_power() {
    python3 -c 'import fcntl, os, struct, sys
store, confirmed, before_cut = os.open(sys.argv[1], os.O_RDONLY), open(sys.argv[2], "rb"), open(sys.argv[3], "wb")
lines = confirmed.read()
fcntl.ioctl(store, 0x8004587d, struct.pack("I", 2))
before_cut.write(lines[:lines.rfind(b"\n") + 1])' "$store" "$tmp/confirmed" "$tmp/before_cut"
}
# Ends the daemon on a store that is gone, and mounts the store again, which replays its log.
replay() {
    kill_daemon
    take_away "$store" && mount_image
}
whole() { "$cachegenfs" fsck "$store"; }

"$chunk_files" nest "$tmp/source" 40 60000 1
import() {
    rm -rf "$store"/* 2> /dev/null
    mount_store
    mkdir -p "$mnt"/m/contexts/{a,b}/L1
    sync -f "$store"
    begin_imports
    some_time
    check "$1: the power is cut" cut_power
    wait $(jobs -p | grep -vx "$daemon") 2> /dev/null
    check "$1: the store comes back" replay
    check_imports "$1" "$tmp/before_cut"
    check "$1: every name is whole" whole
    n_confirmed=$((n_confirmed + $(wc -l < "$tmp/before_cut")))
}

evict() {
    rm -rf "$store"/* 2> /dev/null
    for i in 0 1 2 3 4 5; do "$chunk_files" objects "$store/m" 8 40000 "$i"; done
    find "$store/m/objects" -name '*.kv' -exec touch -d '10 days ago' {} +
    sync -f "$store"
    mount_store -o quota=3M
    some_time
    check "$1: the power is cut" cut_power
    check "$1: the store comes back" replay
    check "$1: every name is whole" whole
    check "$1: chunks are left" [ "$(find "$store/m/objects" -name '*-L3.kv' | wc -l)" -gt 8 ]
}

has_evicted() { [ "$(metric 'evictions_total{what="finest_levels"}')" -gt 0 ] && [ ! -e "$store/.cachegenfs-tmp/evicting" ]; }
# One run on a disk whose writes are kept: old objects lose their finest levels, while two contexts and ordinary files come.
make_log() {
    local to from
    mkdir -p "$tmp/disk"
    rm -f "$tmp/log.disk" "$tmp/empty"
    mount_image || return 1
    for i in 0 1 2 3 4 5; do "$chunk_files" objects "$store/m" 8 40000 "$i"; done
    find "$store/m/objects" -name '*.kv' -exec touch -d '10 days ago' {} +
    mkdir -p "$store"/m/contexts/{a,b}/L1 "$store/m/ordinary"
    take_away "$store" && cp --sparse=always "$tmp/image" "$tmp/before" || return 1
    "$block_log" serve "$tmp/disk" "$tmp/image" "$tmp/log.disk" &
    disk=$!
    wait_for 20 test -e "$tmp/disk/image" && mount -o loop "$tmp/disk/image" "$store" || return 1
    mount_store -o quota=13M # 6 MB of objects are there, and 8 MB come
    for to in a b; do
        for from in "$tmp"/source/L1/000[01]?.kv; do
            cp "$from" "$mnt/m/contexts/$to/L1/" && echo "contexts/$to/L1/${from##*/}" >> "$tmp/disk/marks"
        done &
    done
    for from in "$tmp"/source/L1/0000[0-4].kv; do
        to=ordinary/${from##*/}
        cp "$from" "$mnt/m/$to" && sync "$mnt/m/$to" "$mnt/m/ordinary" && echo "$to" >> "$tmp/disk/marks"
    done
    wait $(jobs -p | grep -vx -e "$daemon" -e "$disk")
    wait_for 120 has_evicted || { grep -E '(used|quota|published|evict).* [0-9]' "$mnt/.cachegenfs/metrics"; return 1; }
    unmount
    take_away "$store" && take_away "$tmp/disk" || return 1
    wait "$disk" || { echo "block_log ended with $?"; return 1; }
    disk=
}
as_confirmed() {
    local name
    while read -r name; do cmp "$tmp/source/L1/${name##*/}" "$store/m/$name" || return 1; done < "$tmp/marks"
}
enough_objects() { [ "$(find "$store/m/objects" -name '*-L3.kv' | wc -l)" -ge 48 ]; }
# The same disk, cut at random places.
cut_log() {
    local n at seed n_marks=0
    check "$1: a run on a disk that keeps its writes" make_log
    [ $n_failed = 0 ] || report
    n=$("$block_log" count "$tmp/log.disk" || echo 0)
    check "$1: it wrote" [ "$n" -gt 100 ]
    [ "$n" -gt 0 ] || return
    for seed in $(seq "$points"); do
        at=$(((RANDOM * 32768 + RANDOM) % n + 1))
        cp --sparse=always "$tmp/before" "$tmp/image"
        "$block_log" cut "$tmp/log.disk" "$tmp/image" $at "$seed" > "$tmp/marks"
        check "$1, cut $seed after $at of $n: it mounts" mount_image
        check "$1, cut $seed after $at of $n: every name is whole" whole
        check "$1, cut $seed after $at of $n: what was confirmed is there" as_confirmed
        check "$1, cut $seed after $at of $n: each chunk has a level left" enough_objects
        n_marks=$((n_marks + $(wc -l < "$tmp/marks")))
        check "$1, cut $seed after $at of $n: it goes" take_away "$store"
    done
    echo "$1: $points cuts of $n records; $n_marks files were confirmed before them"
    check "$1: some were" [ $n_marks -gt 0 ]
}

: > "$tmp/confirmed"
n_confirmed=0
for kind in ext4 xfs; do
    command -v "mkfs.$kind" > /dev/null || { echo "no mkfs.$kind: not checked on it"; continue; }
    rm -f "$tmp/image"
    truncate -s 512M "$tmp/image"
    "mkfs.$kind" -q "$tmp/image" && mount_image || skip loop "an image of $kind cannot be mounted"
    for round in $(seq "$rounds"); do
        if [ $((round % 3)) = 0 ]; then evict "$kind, cut $round"; else import "$kind, cut $round"; fi
    done
    check "$kind: it goes" take_away "$store"
    rm "$tmp/image"
    truncate -s 512M "$tmp/image"
    check "an empty $kind" "mkfs.$kind" -q "$tmp/image"
    cut_log "$kind"
done
echo "$n_confirmed files were confirmed before a cut"
check "some were" [ $n_confirmed -gt 0 ]
report
