#!/bin/bash
# A store that hangs, as a frozen file system or a dead server does: what does not need it answers. The store is a
# second mount, whose daemon is stopped. usage: hang_test.sh CACHEGENFS CHUNK_FILES
# shellcheck source=tests/fusefs/mount.sh
. "$(dirname "$0")/mount.sh" "$@"

below=$tmp/below
below_mnt=$tmp/below_mnt
mkdir "$below" "$below_mnt"
clients=()
# The kernel keeps nothing of it, so that whoever asks the store waits.
"$cachegenfs" "$below" "$below_mnt" -f -o passthrough=off,attr_timeout=0,entry_timeout=0 2>> "$tmp/log" &
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
# A process that was told to stop goes on until one of its threads has looked, and then tells the others.
is_stopped() {
    ! grep -h '^State:' /proc/"$below_daemon"/task/*/status | grep -qv 'T (stopped)'
}
stop_below() {
    kill -STOP "$below_daemon"
    wait_for 20 is_stopped
}
wait_for 20 test -e "$below_mnt/.cachegenfs/version" || skip fuse "no mount over a mount"
mkdir "$below_mnt/store"
store=$below_mnt/store
as_root=
[ "$(id -u)" != 0 ] || as_root=,allow_other
mount_store -o passthrough=off,store_timeout=0$as_root

mkdir "$mnt/m"
for i in $(seq 60); do
    echo "$i" > "$mnt/m/$i"
done
# For programs that open their files before it hangs, and go on when they are told: through the FIFO go.
at_once='
import errno, os, sys, threading
folder, go = sys.argv[1:3]
def at_once(work, calls):
    threads = [threading.Thread(target=work, args=call) for call in calls]
    with open(go, "w") as ready:
        ready.write("open\n")
    with open(go) as wait:
        wait.read()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
'
# Sixty copies within the mount, as cp makes them.
copy_all=$at_once'
def copy(source, target):
    assert os.copy_file_range(source, target, 100) > 0
at_once(copy, [(os.open(f"{folder}/{i}", os.O_RDONLY), os.open(f"{folder}/copy{i}", os.O_WRONLY | os.O_CREAT, 0o644))
               for i in range(1, 61)])
'
# A hundred writes of 1 MiB each, by a user who has the files open before it hangs: 8 are under way, and 64 MiB wait.
# Under strict names: before a write to others the kernel asks for attributes, and would wait for those.
write_all=$at_once'
files = [os.open(f"{folder}/{i:05}.kv", os.O_WRONLY | os.O_CREAT, 0o644) for i in range(100)]
refusals = []
tell = os.open(sys.argv[3], os.O_RDWR)
def fill(file):
    try:
        os.write(file, b"x" * (1 << 20))
    except OSError as error:
        refusals.append(error.errno)
        os.write(tell, b"refused\n")
os.setgroups([])
os.setgid(23456)
os.setuid(12345)
at_once(fill, [(file,) for file in files])
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
stop_below
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
stop_below
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

# With a limit who only asks has an error after it, and no more: the daemon's threads still wait. A listing, a read and
# their open files end before their threads come back.
mount_store -o passthrough=off,store_timeout=1,attr_timeout=0,entry_timeout=0
check "what was there is there" equal "$(cat "$mnt/m/1")" 1
head -c 1000000 /dev/zero > "$mnt/m/large"
python3 -c "$at_once"'
file, listed = os.open(f"{folder}/large", os.O_RDONLY), os.open(folder, os.O_RDONLY)
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
results = {}
def ask(name, call):
    try:
        results[name] = call()
    except OSError as error:
        results[name] = error.errno
at_once(ask, [("stat", lambda: os.fstat(file)),
              ("list", lambda: os.listdir(listed)),
              ("read", lambda: os.pread(file, 4096, 500000)),
              ("statfs", lambda: os.statvfs(folder))]
             + [(f"open {i}", lambda i=i: os.open(f"{folder}/{i}", os.O_RDONLY)) for i in range(1, 41)])
print({name: result for name, result in results.items()
       if result != errno.ETIMEDOUT and (name, result) != ("read", errno.EIO)})
' "$mnt/m" "$tmp/go" > "$tmp/answers" &
asker=$!
clients+=($!)
read -r _ < "$tmp/go"
stop_below
echo go > "$tmp/go"
check "all who ask are answered while the store hangs" timeout 120 tail --pid=$asker -f /dev/null
check "with an error" equal "$(cat "$tmp/answers")" "{}"
given_up=$(metric given_up_total)
check "which is counted" [ "${given_up:-0}" -ge 44 ]
kill -CONT "$below_daemon"
check "then the store is as it was" equal "$(ls "$mnt/m" | wc -l)" 181
check "and can be read" equal "$(cat "$mnt/m/large" | cksum)" "$(head -c 1000000 /dev/zero | cksum)"
closed() { [ "$(metric files_open)" = 0 ]; }
check "what was opened too late is closed" wait_for 20 closed
stop_below
check "another one has an error" fails timeout 120 ls "$mnt/m"
check "the mount can be taken away as ever" timeout 120 umount "$mnt"
kill -CONT "$below_daemon"
wait "$daemon"
check "its daemon ends, well or by its limit of a second" test $? -le 1
daemon=
mount_store -o passthrough=off
check "and what was there is there" equal "$(cat "$mnt/m/1")" 1
# SIGTERM while the store hangs: the mount goes all the same, and who waits has an error.
unmount
mount_store -o passthrough=off,store_timeout=1
python3 -c "$at_once"'
file = os.open(f"{folder}/late", os.O_WRONLY | os.O_CREAT, 0o644)
refusals = []
def write():
    try:
        os.write(file, b"more")
    except OSError as error:
        refusals.append(error.errno)
at_once(write, [()])
sys.exit(len(refusals) != 1)
' "$mnt/m" "$tmp/go" &
writer=$!
clients+=($!)
read -r _ < "$tmp/go"
stop_below
echo go > "$tmp/go"
check "one thread waits" fails timeout 120 ls "$mnt/m"
kill -TERM "$daemon"
is_mounted() { grep -qF " $mnt " /proc/self/mounts; }
check "SIGTERM ends a mount whose store hangs" wait_for 120 fails is_mounted
check "who waits is told" timeout 120 tail --pid=$writer -f /dev/null
kill -CONT "$below_daemon"
wait "$writer"
check "by an error" equal $? 0
clients=()
wait "$daemon"
check "that was no good end" equal $? 1
daemon=
mount_store -o passthrough=off
check "the next mount is as ever" equal "$(cat "$mnt/m/1")" 1
umount "$tmp/other_mnt"
wait "$other_daemon"
check "the other ends well" equal $? 0
kill -TERM "$daemon"
wait "$daemon"
check "SIGTERM is a good end" equal $? 0
daemon=
report
