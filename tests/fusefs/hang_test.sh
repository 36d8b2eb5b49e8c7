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
mount_store -o passthrough=off

mkdir "$mnt/m"
for i in $(seq 60); do
    echo "$i" > "$mnt/m/$i"
done
cd "$mnt/.cachegenfs" || exit 1
kill -STOP "$below_daemon"
for i in $(seq 60); do
    { echo new > "$mnt/m/new$i"; } 2> /dev/null &
    clients+=($!)
    cat "$mnt/m/$i" > /dev/null 2>&1 &
    clients+=($!)
done
# Until many are under way. No new shell here: it would look for its folder, through the root.
many_threads() {
    set -- "/proc/$daemon/task/"*
    [ $# -ge 20 ]
}
wait_for 10 many_threads
check "metrics answer while the store hangs" timeout 20 grep -q cachegenfs_opens_total ./metrics
check "the version, too" timeout 20 grep -q cachegenfs ./version
cd "$tmp" || exit 1
kill -CONT "$below_daemon"
for client in "${clients[@]}"; do
    wait "$client"
done
clients=()
check "everything that waited was done" equal "$(ls "$mnt/m" | wc -l)" 120
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
kill -TERM "$daemon"
wait "$daemon"
check "SIGTERM is a good end" equal $? 0
daemon=
report
