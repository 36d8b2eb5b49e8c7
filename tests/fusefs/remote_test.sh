#!/bin/bash
# The mount through sshfs, over a server of our own on the loopback. usage: remote_test.sh CACHEGENFS CHUNK_FILES
# shellcheck source=tests/fusefs/mount.sh
. "$(dirname "$0")/mount.sh" "$@"

# shellcheck source=tests/fusefs/sshd.sh
. "$(dirname "$0")/sshd.sh"

remote=$tmp/remote
server=
mkdir "$remote"
at_end() {
    unmount
    for mounted in "$remote" "$tmp/far" "$tmp/below"; do
        ! mountpoint -q "$mounted" || umount "$mounted" || umount -l "$mounted"
    done
    [ -z "$server" ] || kill "$server"
}
start_sshd 127.0.0.1
mount_store
mkdir -p "$mnt/m/contexts"
connect() {
    mountpoint -q "$remote" || sshfs "${ssh_options[@]}" "$@" "$(id -un)@127.0.0.1:$mnt" "$remote"
}
wait_for 20 connect || {
    cat "$tmp/ssh/log"
    skip sshfs "sshfs cannot reach a server on the loopback: the mount is not checked through it"
}

"$chunk_files" make "$tmp/source/good" 3 100000 1
good=$tmp/source/good/L1/00000.kv
cp "$good" "$tmp/flipped.kv"
printf 'X' | dd of="$tmp/flipped.kv" bs=1 seek=50000 conv=notrunc status=none

check "cp -r through sshfs" cp -r "$tmp/source/good" "$remote/m/contexts/cp"
check "what it brought" wait_for 10 same_tree "$tmp/source/good" "$mnt/m/contexts/cp" # sshfs waits for no close
check "and how it reads" same_tree "$tmp/source/good" "$remote/m/contexts/cp"
check "rsync -a through sshfs" rsync -a "$tmp/source/good/" "$remote/m/contexts/rsync/"
check "what rsync brought" same_tree "$tmp/source/good" "$mnt/m/contexts/rsync"
check "objects" equal "$(n_objects)" 6
mkdir -p "$remote/m/contexts/bad/L1"
cp "$tmp/flipped.kv" "$remote/m/contexts/bad/L1/00000.kv" # sshfs drops the status of close
check "a damaged chunk stays away, even if sshfs does not say so" wait_for 10 nothing_at "$mnt/m/contexts/bad/L1/00000.kv"
check "fsync says so" fails dd if="$tmp/flipped.kv" of="$remote/m/contexts/bad/L1/00001.kv" bs=4k conv=fsync status=none
check "so does rsync's rename" fails rsync "$tmp/flipped.kv" "$remote/m/contexts/bad/L1/00002.kv"
check "nothing is there" equal "$(find "$store/m/contexts/bad" -type f | wc -l)" 0
check "mv of a context" mv "$remote/m/contexts/rsync" "$remote/m/contexts/moved"
check "what mv brought" same_tree "$tmp/source/good" "$mnt/m/contexts/moved"
"$chunk_files" nest "$tmp/source/nested" 2 100000 3
cp -a "$tmp/source/nested" "$store/m/contexts/nested"
for level in 1 2 3; do
    "$chunk_files" cut "$tmp/source/nested/L1/00001.kv" $level > "$tmp/cut.kv"
    check "L$level of a nested chunk through sshfs" cmp "$remote/m/contexts/nested/L$level/00001.kv" "$tmp/cut.kv"
done
check "cp -r of it through sshfs" cp -r "$remote/m/contexts/nested" "$remote/m/contexts/again"
check "what it brought" wait_for 10 same_tree "$mnt/m/contexts/nested" "$mnt/m/contexts/again"
check "ln makes a view through sshfs" ln "$remote/m/contexts/nested/L1/00001.kv" "$remote/m/contexts/nested/L2/00002.kv"
check "which it is" cmp "$remote/m/contexts/nested/L2/00002.kv" "$remote/m/contexts/nested/L2/00001.kv"
check "rm -r" rm -r "$remote/m/contexts/moved"
check "it is gone" fails test -e "$mnt/m/contexts/moved"
unmount

# A store on sshfs: what is read through the mount counts as used, and that changes no other time.
mkdir "$tmp/below" "$tmp/far"
# Or the kernel notes the server's own reads, and nobody could tell who did it.
if [ "$(id -u)" = 0 ] && mount --bind "$tmp/below" "$tmp/below" 2> /dev/null; then
    check "the server's reads leave no trace" mount -o remount,bind,noatime "$tmp/below"
fi
"$chunk_files" objects "$tmp/below/m" 1 40000 9
object=$(cd "$tmp/below" && find m/objects -name '*-L1.kv')
touch -d '3 days ago' "$tmp/below/$object"
before=$(stat -c %Y "$tmp/below/$object")
check "the store comes by sshfs" sshfs "${ssh_options[@]}" "$(id -un)@127.0.0.1:$tmp/below" "$tmp/far"
store=$tmp/far
mount_store -o quota=1G
check "what a look through it means, the log says" wait_for 20 grep -q "may be another host's" "$tmp/log"
check "a chunk is read" cmp "$mnt/$object" "$tmp/below/$object"
is_used() { [ "$(stat -c %X "$tmp/below/$object")" -gt "$before" ]; }
mountpoint -q "$tmp/below" && check "which is a use, noted behind the close" wait_for 20 is_used
check "and no change" equal "$(stat -c %Y "$tmp/below/$object")" "$before"
# There a file has another number by each of its names.
mkdir -p "$mnt/linked/contexts/c" "$mnt/moved/contexts/c"
cp "$(dirname "$0")/../golden/v1/profile.cgp" "$mnt/profile"
check "ln of a profile" ln "$mnt/profile" "$mnt/linked/contexts/c/profile.cgp"
check "which is adopted" cmp "$mnt/profile" "$mnt"/linked/profiles/*.cgp
check "mv of a profile" mv "$mnt/profile" "$mnt/moved/contexts/c/profile.cgp"
check "which is adopted, too" cmp "$mnt/moved/contexts/c/profile.cgp" "$mnt"/moved/profiles/*.cgp
unmount
report
