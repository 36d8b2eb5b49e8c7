#!/bin/bash
# A store that hangs, as a frozen file system or a dead server does: what does not need it answers. The store is a
# second mount, whose daemon is stopped. usage: hang_test.sh CACHEGENFS CHUNK_FILES
# shellcheck source=tests/fusefs/mount.sh
. "$(dirname "$0")/mount.sh" "$@"

below=$tmp/below
below_mnt=$tmp/below_mnt
mkdir "$below" "$below_mnt"
clients=()
"$cachegenfs" "$below" "$below_mnt" -f -o passthrough=off 2>> "$tmp/log" &
below_daemon=$!
at_end() {
    kill -CONT "$below_daemon" 2> /dev/null
    local client
    for client in "${clients[@]}"; do
        wait "$client" 2> /dev/null
    done
    unmount
    umount "$below_mnt" 2> /dev/null || fusermount3 -u "$below_mnt" 2> /dev/null
    wait "$below_daemon" 2> /dev/null
}
wait_for 20 test -e "$below_mnt/.cachegenfs/version" || skip fuse "no mount over a mount"
mkdir "$below_mnt/store"
store=$below_mnt/store
as_root=
[ "$(id -u)" != 0 ] || as_root=,allow_other
mount_store -o passthrough=off$as_root

mkdir "$mnt/m"
for i in $(seq 60); do
    echo "$i" > "$mnt/m/$i"
done
# Sixty copies within the mount, as cp makes them: with both files open before it hangs.
copy_all='
import os, sys, threading
folder, go = sys.argv[1:]
pairs = [(os.open(f"{folder}/{i}", os.O_RDONLY), os.open(f"{folder}/copy{i}", os.O_WRONLY | os.O_CREAT, 0o644))
         for i in range(1, 61)]
def copy(source, target):
    assert os.copy_file_range(source, target, 100) > 0
threads = [threading.Thread(target=copy, args=pair) for pair in pairs]
with open(go, "w") as ready:
    ready.write("open\n")
with open(go) as wait:
    wait.read()
for thread in threads:
    thread.start()
'
# A hundred writes of 1 MiB each, by a user who has the files open before it hangs: 8 are under way, and 64 MiB wait.
# Under strict names: before a write to others the kernel asks for attributes, and would wait for those.
write_all='
import errno, os, sys, threading
folder, go, refused = sys.argv[1:]
files = [os.open(f"{folder}/{i:05}.kv", os.O_WRONLY | os.O_CREAT, 0o644) for i in range(100)]
refusals = []
tell = os.open(refused, os.O_RDWR)
def fill(file):
    try:
        os.write(file, b"x" * (1 << 20))
    except OSError as error:
        refusals.append(error.errno)
        os.write(tell, b"refused\n")
os.setgroups([])
os.setgid(23456)
os.setuid(12345)
threads = [threading.Thread(target=fill, args=(file,)) for file in files]
with open(go, "w") as ready:
    ready.write("open\n")
with open(go) as wait:
    wait.read()
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(set(refusals) != {errno.ENOMEM} or len(refusals) > 60)
'
mkfifo "$tmp/go"
python3 -c "$copy_all" "$mnt/m" "$tmp/go" &
clients+=($!)
read -r _ < "$tmp/go"
waiting=/sys/fs/fuse/connections/$(mountpoint -d "$mnt" | cut -d: -f2)/waiting
so_many_wait() { [ "$(cat "$waiting")" -ge "$1" ]; }
if [ -n "$as_root" ]; then
    mkdir -p "$mnt/large/contexts/c/L1"
    mkfifo -m 666 "$tmp/go_write" "$tmp/refused"
    chmod 755 "$tmp"
    python3 -c "$write_all" "$mnt/large/contexts/c/L1" "$tmp/go_write" "$tmp/refused" &
    writer=$!
    clients+=($!)
    read -r _ < "$tmp/go_write"
fi
kill -STOP "$below_daemon"
echo go > "$tmp/go"
[ ! -e "$waiting" ] || check "sixty copies wait" wait_for 20 so_many_wait 60
for i in $(seq 60); do
    { echo new > "$mnt/m/new$i"; } 2> /dev/null &
    clients+=($!)
    cat "$mnt/m/$i" > /dev/null 2>&1 &
    clients+=($!)
done
# Until many are under way.
many_threads() {
    set -- "/proc/$daemon/task/"*
    [ $# -ge 20 ]
}
wait_for 10 many_threads
[ ! -e "$waiting" ] || check "and all others" wait_for 20 so_many_wait 180
check "metrics answer while the store hangs" timeout 20 grep -q cachegenfs_opens_total "$mnt/.cachegenfs/metrics"
check "the version, too" timeout 20 cat "$mnt/.cachegenfs/version"
check "the root has attributes" timeout 20 stat "$mnt"
if [ -n "$as_root" ]; then
    echo go > "$tmp/go_write"
    check "what waits of a user has a limit" timeout 20 head -n 1 "$tmp/refused"
    check "and metrics still answer" timeout 20 grep -q cachegenfs_opens_total "$mnt/.cachegenfs/metrics"
fi
kill -CONT "$below_daemon"
if [ -n "$as_root" ]; then
    wait "$writer"
    check "what is refused is ENOMEM, and the rest is written" equal $? 0
fi
for client in "${clients[@]}"; do
    wait "$client"
done
clients=()
check "everything that waited was done" equal "$(ls "$mnt/m" | wc -l)" 180
check "copies, too" equal "$(cat "$mnt"/m/copy* | sort -n | tr '\n' ' ')" "$(seq 60 | tr '\n' ' ')"
check "the root is as it is now" equal "$(mkdir "$mnt/new" && stat -c %h "$mnt")" "$(stat -c %h "$store")"
check "and is right" equal "$(cat "$mnt"/m/new* | sort | uniq -c | tr -s ' ')" " 60 new"
# By number 0, read(2), of x86-64. Two are enough: one works, and one waits meanwhile.
few_read() {
    local n
    n=$(cat "/proc/$daemon/task/"*/syscall | grep -c '^0 ')
    [ "$n" -ge 1 ] && [ "$n" -le 2 ]
}
check "the threads are still there" many_threads
check "but the kernel has few of them to wake" wait_for 20 few_read
check "which answer" equal "$(cat "$mnt/m/1")" 1
# It hangs for good. An administrator ends it: who waits gets an error, and other stores never noticed.
mkdir "$tmp/other" "$tmp/other_mnt"
"$cachegenfs" "$tmp/other" "$tmp/other_mnt" -f 2>> "$tmp/log" &
other_daemon=$!
wait_for 20 test -e "$tmp/other_mnt/.cachegenfs/version"
kill -STOP "$below_daemon"
for i in $(seq 8); do
    { ! echo more > "$mnt/m/more$i"; } 2> /dev/null &
    clients+=($!)
done
[ ! -e "$waiting" ] || check "eight wait" wait_for 20 so_many_wait 8
check "another store's mount works meanwhile" timeout 20 sh -c 'echo 1 > "$1/x" && [ "$(cat "$1/x")" = 1 ]' sh "$tmp/other_mnt"
check "the mount whose store hangs is taken away" timeout 20 umount -f -l "$mnt"
failed=0
for client in "${clients[@]}"; do
    wait "$client" && failed=$((failed + 1))
done
clients=()
check "who waited has an error" equal $failed 8
kill -CONT "$below_daemon"
wait "$daemon"
daemon=
mount_store -o passthrough=off
check "what was there is there" equal "$(cat "$mnt/m/1")" 1
umount "$tmp/other_mnt"
wait "$other_daemon"
check "the other ends well" equal $? 0
kill -TERM "$daemon"
wait "$daemon"
check "SIGTERM is a good end" equal $? 0
daemon=
report
