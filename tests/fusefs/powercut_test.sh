#!/bin/bash
# Power cuts: the store's file system stops at any moment, without what it has not written yet. After the next mount what
# close confirmed is there, and every strict name is whole. usage: powercut_test.sh CACHEGENFS CHUNK_FILES
# CG_CUT_ROUNDS (3): cuts on each file system; CG_CUT_SEED. ext4, and xfs where mkfs.xfs is there, on a loop device. The
# cut is the file systems' own shutdown without a flush of their log: a disk that reorders writes is not simulated.
# shellcheck source=tests/fusefs/mount.sh
. "$(dirname "$0")/mount.sh" "$@"
rounds=${CG_CUT_ROUNDS:-3}
RANDOM=${CG_CUT_SEED:-$$}
[ "$(id -u)" = 0 ] || skip root "only root mounts images: power cuts are not checked"
truncate -s 512M "$tmp/image"
losetup -f > /dev/null 2>&1 || skip loop "no loop device: power cuts are not checked"
echo "seed ${CG_CUT_SEED:-$$}, $rounds cuts a file system"

at_end() { unmount; mountpoint -q "$store" && umount -l "$store"; }
mount_image() { mount -o loop "$tmp/image" "$store"; }
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
    umount "$store" && mount_image
}
whole() { "$cachegenfs" fsck "$store"; }

"$chunk_files" nest "$tmp/source" 40 60000 1
import() {
    rm -rf "$store"/* 2> /dev/null
    : > "$tmp/confirmed"
    mount_store
    mkdir -p "$mnt"/m/contexts/{a,b}/L1
    sync -f "$store"
    for to in a b; do
        for from in "$tmp"/source/L1/*.kv; do
            cp "$from" "$mnt/m/contexts/$to/L1/" && echo "$to/L1/${from##*/}" >> "$tmp/confirmed"
        done 2> /dev/null &
    done
    some_time
    check "$1: the power is cut" cut_power
    wait $(jobs -p | grep -vx "$daemon") 2> /dev/null
    check "$1: the store comes back" replay
    while read -r name; do
        check "$1: $name was confirmed" cmp "$tmp/source/${name#*/}" "$store/m/contexts/$name"
    done < "$tmp/before_cut"
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
    umount "$store"
done
echo "$n_confirmed files were confirmed before a cut"
check "some were" [ $n_confirmed -gt 0 ]
report
