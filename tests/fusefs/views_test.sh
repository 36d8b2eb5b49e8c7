#!/bin/bash
# Levels of nested chunks, which are one file in the store, as files of their own. usage: views_test.sh CACHEGENFS CHUNK_FILES
# shellcheck source=tests/fusefs/mount.sh
. "$(dirname "$0")/mount.sh" "$@"

"$chunk_files" nest "$tmp/nested" 3 100000 1
"$chunk_files" nest "$tmp/other" 1 100000 2
cut=$tmp/cut # what the mount has to show
for level in 1 2 3; do
    mkdir -p "$cut/L$level"
    for i in 0 1 2; do
        "$chunk_files" cut "$tmp/nested/L1/0000$i.kv" $level > "$cut/L$level/0000$i.kv"
    done
done
cp "$tmp/nested/context.json" "$cut"
contexts=$mnt/m/contexts
in=$contexts/in
two=$in/L2/00000.kv
# The second mount, into which things are copied.
store_2=$tmp/store_2
mnt_2=$tmp/mnt_2
daemon_2=
mkdir "$store_2" "$mnt_2"
at_end() {
    if mountpoint -q "$mnt_2"; then
        umount "$mnt_2" 2> /dev/null || fusermount3 -u "$mnt_2" 2> /dev/null || umount -l "$mnt_2"
    fi
    [ -z "$daemon_2" ] || wait "$daemon_2" 2> /dev/null
    daemon_2=
}
inode() { stat -c %i "$1"; }
size() { stat -c %s "$1"; }
n_inodes() { find "$@" -type f -name '*.kv' -printf '%i\n' | sort -u | wc -l; }
valid() { find "$@" -name '*.kv' -print0 | xargs -0 "$chunk_files" verify; }

names() {
    cp -a "$tmp/nested" "$store/m/contexts/in" # behind the daemon's back, with its links
    check "each level is what its name says" same_tree "$cut" "$in"
    check "and valid" valid "$in"
    check "one file beneath" equal "$(n_inodes "$store/m/contexts/in/L1" "$store/m/contexts/in/L2" "$store/m/contexts/in/L3")" 3
    check "nine files to see" equal "$(n_inodes "$in")" 9
    check "ls and stat agree" equal "$(ls -l "$two" | awk '{print $5}')" "$(size "$cut/L2/00000.kv")"
    check "du counts what is shown" test "$(du -s --block-size=1 "$in/L3" | cut -f 1)" -lt $((3 * 100000 + 3 * 8192))
    # As a connector publishes.
    mkdir -p "$contexts/out/L1" "$contexts/out/L2" "$contexts/out/L3"
    cp "$tmp/nested/L1/00000.kv" "$contexts/out/L1"
    check "ln" ln "$contexts/out/L1/00000.kv" "$contexts/out/L2/00000.kv"
    check "size right after ln" equal "$(size "$contexts/out/L2/00000.kv")" "$(size "$cut/L2/00000.kv")"
    check "size of what was linked" equal "$(size "$contexts/out/L1/00000.kv")" "$(size "$cut/L1/00000.kv")"
    check "ln of a view is a link" ln "$contexts/out/L2/00000.kv" "$contexts/out/L2/00001.kv"
    check "with one inode" equal "$(inode "$contexts/out/L2/00000.kv")" "$(inode "$contexts/out/L2/00001.kv")"
    check "and its bytes" cmp "$cut/L2/00000.kv" "$contexts/out/L2/00001.kv"
    check "ln of a view to another level" ln "$contexts/out/L2/00000.kv" "$contexts/out/L3/00000.kv"
    check "shows that level" cmp "$cut/L3/00000.kv" "$contexts/out/L3/00000.kv"
    check "ln to a level that is not in it" fails ln "$contexts/out/L3/00000.kv" "$contexts/out/L0/00000.kv"
    check "ln of a view to an ordinary name" fails ln "$contexts/out/L2/00000.kv" "$mnt/m/file"
    check "chmod of a view" chmod 600 "$contexts/out/L2/00000.kv"
    check "is one of the file" equal "$(stat -c %a "$store/m/contexts/out/L1/00000.kv")" 600
    check "seen at once by the name" equal "$(stat -c %a "$contexts/out/L2/00001.kv")" 600
    rm "$contexts/out/L2/00000.kv"
    check "rm leaves the other names" cmp "$tmp/nested/L1/00000.kv" "$contexts/out/L1/00000.kv"
    check "also of the view" cmp "$cut/L2/00000.kv" "$contexts/out/L2/00001.kv"
}

moves() {
    check "mv of a context" mv "$in" "$contexts/moved"
    check "shows the same" same_tree "$cut" "$contexts/moved"
    check "mv back" mv "$contexts/moved" "$in"
    check "rename to an ordinary name is EXDEV" python3 -c '
import errno, os, sys
try:
    os.rename(sys.argv[1], sys.argv[2])
except OSError as e:
    sys.exit(e.errno != errno.EXDEV)
sys.exit(1)' "$two" "$mnt/m/file"
    check "so mv copies" mv "$two" "$mnt/m/file"
    check "what is shown" cmp "$mnt/m/file" "$cut/L2/00000.kv"
    check "and back again" mv "$mnt/m/file" "$two"
    check "the same bytes" cmp "$two" "$cut/L2/00000.kv"
    check "mv of a context to an ordinary place copies" mv "$in" "$mnt/m/away"
    check "what is shown" same_tree "$cut" "$mnt/m/away"
    check "and back" mv "$mnt/m/away" "$in"
    check "the same bytes" same_tree "$cut" "$in"
    rm -r "$in"
    cp -a "$tmp/nested" "$store/m/contexts/in"
    wait_for 5 cmp -s "$two" "$cut/L2/00000.kv"
}

# Ways to read with which one could come past the end.
reads() {
    local level end file
    for level in 2 3; do
        file=$in/L$level/00001.kv
        end=$(size "$cut/L$level/00001.kv")
        check "cat" sh -c 'cat "$1" | cmp - "$2"' sh "$file" "$cut/L$level/00001.kv"
        check "tail" sh -c 'tail -c 5000 "$1" | cmp - "$2"' sh "$file" <(tail -c 5000 "$cut/L$level/00001.kv")
        check "dd beyond the end" equal "$(dd if="$file" bs=1 skip="$end" count=1000 status=none | wc -c)" 0
        check "dd with O_DIRECT" sh -c 'dd if="$1" bs=1M iflag=direct status=none | cmp - "$2"' sh "$file" "$cut/L$level/00001.kv"
        check "pread, mmap, splice, sendfile, copy_file_range, lseek" python3 -c '
import ctypes, errno, mmap, os, sys
file, plain, copy = sys.argv[1:]
want = open(plain, "rb").read()
end = len(want)
fd = os.open(file, os.O_RDONLY)
assert os.fstat(fd).st_size == end
assert os.pread(fd, 1 << 20, 0) == want
assert os.pread(fd, 100, end) == b"" and os.pread(fd, 100, end - 10) == want[-10:]
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + 3 * [ctypes.c_int] + [ctypes.c_long]
page_end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
    at = libc.mmap(None, page_end, mmap.PROT_READ, flags, fd, 0)
    mapped = ctypes.string_at(at, page_end)
    assert mapped[:end] == want and not any(mapped[end:])
def fill(copy_some):
    out = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    at = 0
    while n := copy_some(out, at):
        at += n
    assert at == end and os.pread(out, 1 << 20, 0) == want, at
    os.close(out)
fill(lambda out, at: os.copy_file_range(fd, out, 1 << 20, at, at))
fill(lambda out, at: os.sendfile(out, fd, at, 1 << 20))
r, w = os.pipe()
def through_pipe(out, at):
    n = os.splice(fd, w, 1 << 16, offset_src=at)
    return os.splice(r, out, n, offset_dst=at) if n else 0
if hasattr(os, "splice"):
    fill(through_pipe)
assert os.lseek(fd, 0, os.SEEK_END) == end
assert os.lseek(fd, 0, os.SEEK_HOLE) == end and os.lseek(fd, 3, os.SEEK_DATA) == 3
try:
    os.lseek(fd, end, os.SEEK_DATA)
    assert False
except OSError as e:
    assert e.errno == errno.ENXIO
' "$file" "$cut/L$level/00001.kv" "$mnt/m/copy"
        cp "$file" "$mnt/m/copy"
        check "what cp brought" cmp "$mnt/m/copy" "$cut/L$level/00001.kv"
        rm "$mnt/m/copy"
    done
    check "no writing" fails sh -c 'echo x >> "$1"' sh "$two"
    check "no truncation" fails truncate -s 10 "$two"
    if has_passthrough && [ "$passthrough" = auto ]; then
        local before
        before=$(metric 'opens_total{way="passthrough"}')
        cat "$in/L1/00002.kv" > /dev/null
        check "the whole file is read past the daemon" test "$(metric 'opens_total{way="passthrough"}')" -gt "$before"
        before=$(metric 'opens_total{way="passthrough"}')
        cat "$in/L2/00002.kv" "$in/L3/00002.kv" > /dev/null
        check "a view is not" equal "$(metric 'opens_total{way="passthrough"}')" "$before"
        check "at the same time" sh -c '
            exec 8< "$1/L1/00002.kv" 9< "$1/L3/00002.kv"
            cmp "$2/L3/00002.kv" /proc/self/fd/9 && cmp "$2/L1/00002.kv" /proc/self/fd/8' sh "$in" "$cut"
    fi
}

copies() {
    local to=$mnt_2/m/contexts
    mkdir -p "$to"
    check "cp -r into another mount" cp -r "$in" "$to/cp"
    check "what it brought" same_tree "$cut" "$to/cp"
    check "an object a level" equal "$(find "$store_2/m/objects" -name '*.kv' | wc -l)" 9
    check "all of them valid" valid "$store_2/m"
    check "cp -a" cp -a "$in" "$to/cp_a"
    check "what it brought" same_tree "$cut" "$to/cp_a"
    check "levels of the same time are one file" equal "$(n_inodes "$store_2/m/contexts/cp_a")" 3
    check "rsync -aH" rsync -aH "$in/" "$to/rsync/"
    check "what it brought" same_tree "$cut" "$to/rsync"
    check "rsync has nothing to do then" equal "$(rsync -aHi "$in/" "$to/rsync/" | wc -l)" 0
    check "tar" sh -c 'tar cf - -C "$1" . | (mkdir "$2" && tar xf - -C "$2")' sh "$in" "$to/tar"
    check "what it brought" same_tree "$cut" "$to/tar"
    check "tar to ordinary files" sh -c 'mkdir "$2" && tar cf - -C "$1" . | tar xf - -C "$2"' sh "$in" "$tmp/tar"
    check "what it brought" same_tree "$cut" "$tmp/tar"
    check "all of a store by rsync -aH" rsync -aH "$mnt/m/" "$tmp/all/"
    check "links are links of a level" equal "$(n_inodes "$tmp/all/contexts/in")" 9
    check "shows the same" same_tree "$cut" "$tmp/all/contexts/in"
    check "cp -r of a store that is not mounted" cp -r "$store/m/contexts/in" "$to/plain"
    check "shows the levels" same_tree "$cut" "$to/plain"
    check "rsync -a of one" rsync -a "$store/m/contexts/in/" "$to/plain_rsync/"
    check "shows the levels" same_tree "$cut" "$to/plain_rsync"
    # The same again, with another chunk in the place of one.
    local level
    rm -rf "$tmp/changed" "$tmp/shown"
    cp -a "$tmp/nested" "$tmp/changed"
    cp -a "$cut" "$tmp/shown"
    touch -d '1 hour ago' "$tmp/other/L1/00000.kv"
    for level in 1 2 3; do
        ln -f "$tmp/other/L1/00000.kv" "$tmp/changed/L$level/00000.kv"
        "$chunk_files" cut "$tmp/other/L1/00000.kv" $level > "$tmp/shown/L$level/00000.kv"
    done
    check "rsync -a of what has changed" rsync -a "$tmp/changed/" "$to/plain_rsync/"
    check "shows the levels" same_tree "$tmp/shown" "$to/plain_rsync"
    local order
    for order in "L1 L2 L3" "L3 L2 L1" "L2 L3 L1"; do
        # shellcheck disable=SC2086
        check "cp -a of one, $order" sh -c 'from=$1 to=$2; shift 2; mkdir "$to" && cd "$from" && cp -a context.json "$@" "$to"' \
            sh "$store/m/contexts/in" "$to/a${order// /}" $order
        check "shows the levels" same_tree "$cut" "$to/a${order// /}"
        check "of one file" equal "$(n_inodes "$store_2/m/contexts/a${order// /}")" 3
        # shellcheck disable=SC2086
        check "tar of one, $order" sh -c 'from=$1 to=$2; shift 2; mkdir "$to" && tar cf - -C "$from" context.json "$@" | tar xf - -C "$to"' \
            sh "$store/m/contexts/in" "$to/t${order// /}" $order
        check "shows the levels" same_tree "$cut" "$to/t${order// /}"
        check "of one file" equal "$(n_inodes "$store_2/m/contexts/t${order// /}")" 3
        check "valid" valid "$to/a${order// /}" "$to/t${order// /}"
    done
    rm -rf "$tmp/tar" "$tmp/all"
    check "nothing is left in staging" wait_for 60 staged_are 0 "$store" "$store_2"
}

options=(-o allow_other)
[ "$(id -u)" = 0 ] || options=()
for passthrough in auto off; do
    mkdir -p "$store/m/contexts"
    mount_store -o "passthrough=$passthrough" "${options[@]}"
    "$cachegenfs" "$store_2" "$mnt_2" -f 2>> "$tmp/log" &
    daemon_2=$!
    wait_for 20 test -e "$mnt_2/.cachegenfs/version"
    names
    moves
    reads
    copies
    at_end
    unmount
    find "$store" "$store_2" -mindepth 1 -delete
done
report
