#!/bin/bash
# A chunk that has all the links that its file system allows, 65,000 on ext4: whole contexts are still copied, moved and
# adopted, and what cannot be linked says so. usage: links_test.sh CACHEGENFS CHUNK_FILES
# shellcheck source=tests/fusefs/mount.sh
. "$(dirname "$0")/mount.sh" "$@"
[ "$(id -u)" = 0 ] || skip root "only root mounts an image: the limit of links is not checked"
losetup -f > /dev/null 2>&1 && command -v mkfs.ext4 > /dev/null || skip loop "no loop device, or no mkfs.ext4"
at_end() {
    unmount
    mountpoint -q "$store" && umount -l "$store"
}
truncate -s 256M "$tmp/image"
mkfs.ext4 -q "$tmp/image" && mount -o loop "$tmp/image" "$store" || skip loop "an image of ext4 cannot be mounted"

# fill_links: the file gets names past the mount until there are no more.
fill_links() {
    python3 -c '
import errno, itertools, os, sys
file, folder = sys.argv[1:]
os.makedirs(folder, exist_ok=True)
try:
    for i in itertools.count(len(os.listdir(folder))):
        os.link(file, f"{folder}/{i}")
except OSError as error:
    sys.exit(error.errno != errno.EMLINK)
' "$1" "$store/links"
}
in_context() { find "$store/m/contexts/$1" -name '*.kv' | wc -l; }
inode() { stat -c %i "$store/m/contexts/$1/L1/00000.kv"; }
n_links() { stat -c %h "$store/m/contexts/$1/L1/00000.kv"; }

"$chunk_files" nest "$tmp/source" 4 20000 1
mount_store
mkdir -p "$mnt/m/contexts"
check "a context comes in" cp -a "$tmp/source" "$mnt/m/contexts/c"
check "as a view of each level" cp -r "$mnt/m/contexts/c" "$tmp/shown"
check "of which the finest is all" same_tree "$tmp/source/L1" "$tmp/shown/L1"
check "its chunks are objects" equal "$(n_objects)" "$(in_context c)"
check "a chunk gets all the links that it can have" fill_links "$store/m/contexts/c/L1/00000.kv"
check "which are many" [ "$(n_links c)" -ge 1000 ]
check "the context can be copied" cp -a "$mnt/m/contexts/c" "$mnt/m/contexts/d"
check "and is the same" same_tree "$tmp/shown" "$mnt/m/contexts/d"
check "the full chunk has a file of its own" fails equal "$(inode d)" "$(inode c)"
check "of all its levels" equal "$(n_links d)" 3
check "as cp -r makes it, too" cp -r "$mnt/m/contexts/c" "$mnt/m/contexts/e"
check "with the same bytes" same_tree "$tmp/shown" "$mnt/m/contexts/e"
LC_ALL=C cp -al "$mnt/m/contexts/c" "$mnt/m/contexts/f" 2> "$tmp/refused"
check "links of it are refused" equal $? 1
check "with the file system's error" grep -q 'L1/00000.kv.*Too many links' "$tmp/refused"
check "those of the others are made" equal "$(in_context f)" $(($(in_context c) - 3))
check "the context can be moved" mv "$mnt/m/contexts/c" "$mnt/m/contexts/g"
check "and is whole" same_tree "$tmp/shown" "$mnt/m/contexts/g"
unmount
# Past the daemon: the objects of the full chunk go, and its links are filled up again.
find "$store/m/objects" -inum "$(inode g)" -delete
check "its objects are gone" equal "$(n_objects)" "$(($(in_context g) - 3))"
check "its links are used up again" fill_links "$store/m/contexts/g/L1/00000.kv"
rm -r "$store/m/contexts/d" "$store/m/contexts/e" "$store/m/contexts/f"
mount_store
all_objects() { [ "$(n_objects)" = "$(in_context g)" ]; }
check "the next daemon makes copies of them" wait_for 60 all_objects
check "and all is whole" "$cachegenfs" fsck "$store"
check "the context is as it was" same_tree "$tmp/shown" "$mnt/m/contexts/g"
rm -r "$store/links"
check "with links to spare it can be linked" cp -al "$mnt/m/contexts/g" "$mnt/m/contexts/h"
check "as a whole" same_tree "$tmp/shown" "$mnt/m/contexts/h"
check "as the same files" equal "$(inode h)" "$(inode g)"
unmount
report
