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
"$chunk_files" objects "$store/m" 20 20000 1
"$chunk_files" objects "$store/unseen" 1 20000 1
find "$store/m/objects" -name '*.kv' -exec touch -d '10 days ago' {} +
# With a limit who waits has an error, and with a quota being read is noted.
mount_store -o passthrough=off,quota=1G,store_timeout=5,allow_other
chmod 755 "$tmp"
find "$mnt/m/objects" -name '*-L1.kv' | sort > "$tmp/names"
mkdir "$mnt/side"
touch "$mnt/side/a"
mkdir "$mnt/emptied"
for i in $(seq 20); do
    for uid in 1001 1002; do
        echo content > "$mnt/emptied/$uid.$i"
        chown $uid "$mnt/emptied/$uid.$i"
    done
done
# By number 316, renameat2(2), of x86-64.
one_moves() { grep -q '^316 ' "/proc/$daemon/task/"*/syscall; }
fsfreeze -f "$store"
# In another folder: of its own one the kernel holds the lock.
mv "$mnt/side/a" "$mnt/side/b" &
mover=$!
check "a file is moved" wait_for 20 one_moves
# Opening to empty a file is a change. More of them than reading requests may be under way.
emptiers=()
for uid in 1001 1002; do
    python3 -c '
import os, sys, threading
folder, uid = sys.argv[1:]
os.setgroups([]), os.setgid(int(uid)), os.setuid(int(uid))
for i in range(1, 21):
    threading.Thread(target=open, args=(f"{folder}/{uid}.{i}", "w")).start()' "$mnt/emptied" $uid &
    emptiers+=($!)
done
# By number 257, openat(2).
all_open() {
    local process
    for process in "${emptiers[@]}"; do
        [ "$(cat "/proc/$process/task/"*/syscall | grep -c '^257 ')" = 20 ] || return 1
    done
}
check "files are opened to be emptied" wait_for 60 all_open
# More of them than the kernel has requests under way in the background, to which last closes belong.
check "chunks can be read" timeout 120 xargs -a "$tmp/names" -n 1 "$chunk_files" verify
check "all of them" equal "$(wc -l < "$tmp/names")" 20
check "names can be listed" ls -lR "$mnt/m"
check "names that the kernel does not know, too" ls -lR "$mnt/unseen"
check "the space can be asked for" stat -f "$mnt"
mkdir "$mnt/new" &
maker=$!
check "metrics answer" grep -q cachegenfs_opens_total "$mnt/.cachegenfs/metrics"
check "nobody had an error for it" equal "$(metric given_up_total)" 0
check "what changes it is not done" [ ! -e "$store/new" ]
check "nothing is emptied" equal "$(find "$store/emptied" -type f -size +0 | wc -l)" 40
fsfreeze -u "$store"
wait "$maker" "$mover" "${emptiers[@]}"
check "until it can be" equal "$(find "$store/emptied" -type f -size +0 | wc -l)" 0
check "and then it is" test -d "$mnt/new"
check "the move, too" test -e "$store/side/b"
all_used() { [ -z "$(find "$store/m/objects" -name '*-L1.kv' -atime +1)" ]; }
check "what was read counts as used" wait_for 20 all_used
unmount
# Uploads that are given up, without a quota: each is to be removed.
mount_store -o passthrough=off,store_timeout=5
mkdir -p "$mnt/n/contexts/c/L1"
mkfifo "$tmp/go"
python3 -c '
import os, sys
folder, go = sys.argv[1:]
files = [os.open(f"{folder}/{i:05}.kv", os.O_WRONLY | os.O_CREAT, 0o644) for i in range(20)]
for file in files:
    os.write(file, b"x" * 1000)
with open(go, "w") as ready:
    ready.write("open\n")
with open(go) as wait:
    wait.read()
' "$mnt/n/contexts/c/L1" "$tmp/go" &
uploader=$!
read -r _ < "$tmp/go"
fsfreeze -f "$store"
echo go > "$tmp/go"
check "an upload is given up" timeout 60 tail --pid=$uploader -f /dev/null
check "and nobody had to wait for it" timeout 60 xargs -a "$tmp/names" -n 1 "$chunk_files" verify
fsfreeze -u "$store"
wait "$uploader"
check "what was not complete is gone" wait_for 20 staged_are 0
unmount
report
