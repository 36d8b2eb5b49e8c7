#!/bin/bash
# A frozen store, as a snapshot of its disk makes one for a moment: whoever reads does not notice, changes wait.
# usage: frozen_test.sh CACHEGENFS CHUNK_FILES
# shellcheck source=tests/fusefs/mount.sh
. "$(dirname "$0")/mount.sh" "$@"
[ "$(id -u)" = 0 ] || skip root "only root freezes a file system: reading of a frozen one is not checked"
losetup -f > /dev/null 2>&1 && command -v mkfs.ext4 > /dev/null || skip loop "no loop device, or no mkfs.ext4"
at_end() {
    fsfreeze -u "$store"
    unmount
    umount -l "$store"
} 2> /dev/null
truncate -s 64M "$tmp/image"
mkfs.ext4 -q "$tmp/image" && mount -o loop "$tmp/image" "$store" || skip loop "an image of ext4 cannot be mounted"
"$chunk_files" objects "$store/m" 4 20000 1
"$chunk_files" objects "$store/unseen" 1 20000 1
find "$store/m/objects" -name '*.kv' -exec touch -d '10 days ago' {} +
# With a limit who waits has an error, and with a quota being read is noted.
mount_store -o passthrough=off,quota=1G,store_timeout=5
find "$mnt/m/objects" -name '*-L1.kv' | sort > "$tmp/names"
mkdir "$mnt/side"
touch "$mnt/side/a"
# By number 316, renameat2(2), of x86-64.
one_moves() { grep -q '^316 ' "/proc/$daemon/task/"*/syscall; }
fsfreeze -f "$store"
# In another folder: of its own one the kernel holds the lock.
mv "$mnt/side/a" "$mnt/side/b" &
mover=$!
check "a file is moved" wait_for 20 one_moves
while read -r name; do
    check "a chunk can be read" "$chunk_files" verify "$name"
done < "$tmp/names"
check "all four" equal "$(wc -l < "$tmp/names")" 4
check "names can be listed" ls -lR "$mnt/m"
check "names that the kernel does not know, too" ls -lR "$mnt/unseen"
check "the space can be asked for" stat -f "$mnt"
mkdir "$mnt/new" &
maker=$!
check "metrics answer" grep -q cachegenfs_opens_total "$mnt/.cachegenfs/metrics"
check "nobody had an error for it" equal "$(metric given_up_total)" 0
check "what changes it is not done" [ ! -e "$store/new" ]
fsfreeze -u "$store"
wait "$maker" "$mover"
check "and then it is" test -d "$mnt/new"
check "the move, too" test -e "$store/side/b"
all_used() { [ -z "$(find "$store/m/objects" -name '*-L1.kv' -atime +1)" ]; }
check "what was read counts as used" wait_for 20 all_used
unmount
report
