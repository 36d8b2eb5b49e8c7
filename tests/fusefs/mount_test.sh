#!/bin/bash
# The mount as its users see it: cp, mv, rm, rsync, tar, dd, tee, the shell. usage: mount_test.sh CACHEGENFS CHUNK_FILES
# shellcheck source=tests/fusefs/mount.sh
. "$(dirname "$0")/mount.sh" "$@"

source=$tmp/source/good
"$chunk_files" make "$source" 4 100000 1
"$chunk_files" make "$tmp/source/second" 2 100000 2
good=$source/L1/00000.kv
flipped=$tmp/flipped.kv
short=$tmp/short.kv
cp "$good" "$flipped"
printf 'X' | dd of="$flipped" bs=1 seek=50000 conv=notrunc status=none
head -c 60000 "$good" > "$short"
contexts=$mnt/m/contexts

shown() { awk -v at="$mnt" '$2 == at { print $4 }' /proc/mounts; }
# check_flags HOW: whatever a mount is asked for, what a store holds of set-id files and devices has no effect.
check_flags() {
    check "$1: nosuid" grep -qw nosuid <<< "$(shown)"
    check "$1: nodev" grep -qw nodev <<< "$(shown)"
}
# As in fstab, and as /proc/mounts shows them.
mount_store -o relatime,strictatime,lazytime,noauto,suid,dev
check_flags "with -o suid,dev"
before=$(shown)
unmount
mount_store -o "$before"
check "a mount takes the options that it shows" equal "$(shown)" "$before"
check "a file can have its set-id bits" sh -c 'touch "$1" && chmod 6755 "$1"' sh "$mnt/tool"
check "and keeps them" equal "$(stat -c %a "$mnt/tool")" 6755
rm -f "$mnt/tool"
unmount

# mount(8) mounts by mount.fuse3, which runs the program that PATH has, and asks for suid and dev when root mounts.
if command -v mount.fuse3 > /dev/null; then
    mkdir "$tmp/bin"
    printf '#!/bin/sh\nexec "%s" "$@" -f\n' "$cachegenfs" > "$tmp/bin/cachegenfs"
    chmod +x "$tmp/bin/cachegenfs"
    PATH=$tmp/bin:$PATH mount.fuse3 "$store" "$mnt" -t fuse.cachegenfs -o rw 2>> "$tmp/log" &
    daemon=$!
    check "mount.fuse3 mounts" wait_for 20 test -e "$mnt/.cachegenfs/version"
    check_flags "by mount.fuse3"
    unmount
else
    echo "SKIPPED: no mount.fuse3: what mount(8) makes is not checked"
fi

check "an option that libfuse would refuse later is refused at once" \
    sh -c 'timeout 20 "$1" "$2" "$3" -o max_read=131072 2>&1 | grep -q "max_read=131072: a mount cannot have"' \
    sh "$cachegenfs" "$store" "$mnt"

ways_in() {
    mkdir -p "$contexts"
    check "cp -r" cp -r "$source" "$contexts/cp"
    check "what cp -r brought" same_tree "$source" "$contexts/cp"
    check "an object for each chunk" equal "$(n_objects)" 8
    check "cp -a" cp -a "$source" "$contexts/cp_a"
    check "rsync -a" rsync -a "$source/" "$contexts/rsync/"
    check "rsync -a again" rsync -a "$source/" "$contexts/rsync/"
    check "what rsync brought" same_tree "$source" "$contexts/rsync"
    check "rsync -a --inplace" rsync -a --inplace "$source/" "$contexts/inplace/"
    check "rsync -a --inplace again" rsync -a --inplace "$source/" "$contexts/inplace/"
    check "what rsync --inplace brought" same_tree "$source" "$contexts/inplace"
    check "rsync keeps times" equal "$(stat -c %Y "$contexts/rsync/L1/00000.kv")" "$(stat -c %Y "$good")"
    check "tar x" sh -c 'tar cf - -C "$1" . | (mkdir "$2" && tar xf - -C "$2")' sh "$source" "$contexts/tar"
    check "what tar brought" same_tree "$source" "$contexts/tar"
    mkdir -p "$contexts/one/L1"
    check "dd" dd if="$good" of="$contexts/one/L1/00000.kv" bs=4k conv=fsync status=none
    check "tee" sh -c 'tee "$2" < "$1" > /dev/null' sh "$good" "$contexts/one/L1/00001.kv"
    check "cat >" sh -c 'cat "$1" > "$2"' sh "$good" "$contexts/one/L1/00002.kv"
    check "python" python3 -c '
import sys
with open(sys.argv[2], "wb") as out:
    out.write(open(sys.argv[1], "rb").read())' "$good" "$contexts/one/L1/00003.kv"
    check "ln" ln "$contexts/one/L1/00000.kv" "$contexts/one/L1/00004.kv"
    for i in 0 1 2 3 4; do
        check "way $i" cmp "$good" "$contexts/one/L1/0000$i.kv"
    done
    check "mv of a context" mv "$contexts/tar" "$contexts/moved"
    check "what mv brought" same_tree "$source" "$contexts/moved"
    mkdir "$mnt/m/upload"
    check "cp -r to an ordinary place" cp -r "$tmp/source/second" "$mnt/m/upload/second"
    check "mv from an ordinary place" mv "$mnt/m/upload/second" "$contexts/second"
    check "objects of the second" equal "$(n_objects)" 12
    check "rm -r of a context" rm -r "$contexts/moved"
    check "it is gone" fails test -e "$contexts/moved"
    check "its objects are not" equal "$(n_objects)" 12
    check "nothing is left in staging" wait_for 60 staged_are 0
    check "every chunk is valid" sh -c 'find "$2" -name "*.kv" -print0 | xargs -0 "$1" verify' sh "$chunk_files" "$store"
}

damaged_chunks() {
    local bad n_before
    n_before=$(n_objects)
    mkdir -p "$contexts/bad/L1"
    for bad in "$flipped" "$short"; do
        local to=$contexts/bad/L1/00000.kv
        check "cp refuses $bad" fails cp "$bad" "$to"
        check "cp leaves nothing" nothing_at "$to"
        check "dd refuses $bad" fails dd if="$bad" of="$to" bs=4k status=none
        check "dd with fsync refuses $bad" fails dd if="$bad" of="$to" bs=4k conv=fsync status=none
        check "tee refuses $bad" fails sh -c 'tee "$2" < "$1" > /dev/null' sh "$bad" "$to"
        check "cat refuses $bad" fails sh -c 'cat "$1" > "$2"' sh "$bad" "$to"
        check "rsync refuses $bad" fails rsync "$bad" "$to"
        check "rsync --inplace refuses $bad" fails rsync --inplace "$bad" "$to"
        check "python refuses $bad" fails python3 -c '
import sys
with open(sys.argv[2], "wb") as out:
    out.write(open(sys.argv[1], "rb").read())' "$bad" "$to"
        cp "$bad" "$mnt/m/ordinary"
        check "mv refuses $bad" fails mv -T "$mnt/m/ordinary" "$to"
        check "ln refuses $bad" fails ln "$mnt/m/ordinary" "$to"
        check "nothing is left" nothing_at "$to"
        rm -f "$mnt/m/ordinary"
    done
    check "the message is telling" sh -c 'LC_ALL=C cp "$1" "$2" 2>&1 | grep "Bad message"' sh "$flipped" "$contexts/bad/L1/00000.kv"
    check "L1 is no L0" fails cp "$good" "$contexts/bad/L0.kv/00000.kv"
    mkdir -p "$contexts/bad/L0"
    check "L1 is no L0" fails cp "$good" "$contexts/bad/L0/00000.kv"
    check "tar refuses" fails sh -c 'cp "$1" "$3/00001.kv" && tar cf - -C "$3" 00001.kv | tar xf - -C "$2"' sh "$flipped" "$contexts/bad/L1" "$tmp"
    check "no object appeared" equal "$(n_objects)" "$n_before"
    check "nothing is there" equal "$(ls -A "$contexts/bad/L1" "$contexts/bad/L0" | grep -c kv)" 0
    check "refusals are counted" test "$(metric 'refused_total{reason="damaged"}')" -gt 5
    check "a good one is still welcome" cp "$good" "$contexts/bad/L1/00000.kv"
}

immutability() {
    local chunk=$contexts/cp/L1/00000.kv
    check "no writing" fails sh -c 'echo x >> "$1"' sh "$chunk"
    check "no truncation" fails truncate -s 10 "$chunk"
    check "no overwriting" fails cp "$good" "$chunk"
    check "chmod" chmod 600 "$chunk"
    check "touch" touch -d 2001-02-03 "$chunk"
    check "mode and time are set" equal "$(stat -c '%a %y' "$chunk" | cut -c 1-14)" "600 2001-02-03"
    check "replacing by rename" sh -c 'cp "$1" "$2.new" && mv -f "$2.new" "$2"' sh "$source/L1/00001.kv" "$chunk"
    check "what replaced it" cmp "$source/L1/00001.kv" "$chunk"
    check "symbolic links for ordinary names" ln -s chunk "$contexts/cp/link"
    check "not for strict ones" fails ln -s chunk "$contexts/cp/L1/00099.kv"
    check "not for folders" fails ln -s /etc "$mnt/m/profiles"
}

# A shared mapping outlives its descriptor, and changes the pages that readers see.
mapped_writers() {
    mkdir -p "$contexts/map/L1"
    check "a mapped file is busy, until it is unmapped" python3 -c '
import errno, mmap, os, sys
good, part, strict = sys.argv[1:]
with open(part, "w+b") as file:
    file.write(open(good, "rb").read())
    file.flush()
    mapping = mmap.mmap(file.fileno(), 0)
for call in (os.link, os.rename):
    try:
        call(part, strict)
        sys.exit("it got the name")
    except OSError as error:
        assert error.errno == errno.EBUSY, error
assert not os.path.exists(strict)
mapping.close()
os.rename(part, strict)' "$good" "$mnt/m/mapped" "$contexts/map/L1/00000.kv"
    check "what was mapped" cmp "$good" "$contexts/map/L1/00000.kv"
}

# By the descriptor of one who appends the kernel also sends what a mapping changed, elsewhere in the file.
appending() {
    check "a mapping of a file that is appended to" python3 -c '
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_APPEND)
os.write(fd, b"a" * 8192)
mapping = mmap.mmap(fd, 0)
mapping[100:104] = b"here"
mapping.flush()
mapping.close()
with open(sys.argv[2], "ab") as past_the_mount:
    past_the_mount.write(b"past")
os.write(fd, b"end")
os.close(fd)
wanted = b"a" * 100 + b"here" + b"a" * 8088 + b"pastend"
assert open(sys.argv[2], "rb").read() == wanted, os.path.getsize(sys.argv[2])' "$mnt/m/appended" "$store/m/appended"
    check "a file that is appended to no more" python3 -c '
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_APPEND)
os.write(fd, b"abc")
fcntl.fcntl(fd, fcntl.F_SETFL, 0)
os.pwrite(fd, b"X", 0)
fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
os.write(fd, b"end")
os.close(fd)
found = open(sys.argv[2], "rb").read()
assert found == b"Xbcend", found' "$mnt/m/appended_once" "$store/m/appended_once"
}

# ext4 gives a new folder the number of the one that was just removed.
removed_folders() {
    check "a folder with the number of one that somebody stands in" python3 -c '
import os, sys
os.chdir(sys.argv[1])
os.makedirs("from/old"), os.makedirs("to")
top = os.open(".", os.O_RDONLY)
os.chdir("from/old")
os.rmdir("../old")
os.mkdir("to/new", dir_fd=top)
os.close(os.open("to/new/file", os.O_WRONLY | os.O_CREAT, dir_fd=top))
try:
    assert os.listdir(".") == [], "where nothing is any more, the new folder shows"
except FileNotFoundError:  # as good an answer: the daemon has no descriptor of it
    pass' "$mnt/m"
}

reading_while_writing() {
    mkdir -p "$contexts/rw/L1"
    local to=$contexts/rw/L1/00000.kv
    exec 9> "$to"
    head -c 60000 "$good" >&9
    check "not seen while it is written" fails cat "$to"
    check "not listed while it is written" equal "$(ls -A "$contexts/rw/L1" | wc -l)" 0
    tail -c +60001 "$good" >&9
    exec 9>&-
    check "seen when it is closed" cmp "$good" "$to"
    local readers=() i
    for i in 1 2 3 4 5 6; do
        sh -c 'for i in 1 2 3 4 5 6 7 8 9 10; do cmp "$1" "$2" || exit 1; done' sh "$good" "$to" &
        readers+=($!)
    done
    for i in "${readers[@]}"; do
        check "reader $i" wait "$i"
    done
    check "df tells the store's size" equal "$(df -P "$mnt" | awk 'END{print $2}')" "$(df -P "$store" | awk 'END{print $2}')"
    check "the metrics name published files" test "$(metric published_total)" -gt 10
    check "nothing is pending" equal "$(metric files_pending)" 0
    check "the version is told" grep -q '^cachegenfs [0-9]' "$mnt/.cachegenfs/version"
    check "the configuration is told" grep -q "^store = $store" "$mnt/.cachegenfs/config"
}

# A file is read past the daemon only where nobody reads it through the daemon: the kernel takes no mix.
published_while_read() {
    mkdir -p "$contexts/read/L1"
    cp "$good" "$mnt/m/read"
    check "what is published while it is read can be read" python3 -c '
import os, sys
good, part, strict = sys.argv[1:]
wanted = open(good, "rb").read()
with open(part, "rb") as reader:
    assert reader.read(100) == wanted[:100]
    os.rename(part, strict)
    assert open(strict, "rb").read() == wanted
    assert reader.read() == wanted[100:]' "$good" "$mnt/m/read" "$contexts/read/L1/00000.kv"
}

# Of each the kernel has one more, until the daemon lets it go.
backing_files() {
    local before
    before=$(cut -f 1 /proc/sys/fs/file-nr)
    check "a chunk can be opened again and again" python3 -c '
import sys
for _ in range(2000):
    open(sys.argv[1], "rb").close()' "$contexts/cp/L1/00001.kv"
    are_closed() { [ $(($(cut -f 1 /proc/sys/fs/file-nr) - before)) -lt 1000 ]; }
    check "and nothing of it stays open" wait_for 20 are_closed
}

# Names that a shell or a terminal takes for something else, and the longest.
odd_names='
import os, sys
names = [b"new\nline", b" ", b"-rf", b"*", b"\xff\xfe", "\u00e4\U0001f600".encode(), b"trailing. ", b"n" * 255]
os.mkdir(sys.argv[1])
os.chdir(sys.argv[1])
for name in names:
    with open(name, "wb") as file:
        file.write(name)
assert sorted(os.listdir(b".")) == sorted(names)
for name in names:
    assert open(name, "rb").read() == name
    os.rename(name, b"moved")
    os.remove(b"moved")
assert not os.listdir(b".")
try:
    open(b"n" * 256, "wb")
except OSError as error:
    assert error.errno == 36, error # ENAMETOOLONG
else:
    sys.exit(1)'
# Locks, a journal, and shared memory.
database='
import sqlite3, sys
for mode in "delete", "wal":
    for _ in range(2):
        with sqlite3.connect(sys.argv[1] + mode) as base:
            assert base.execute("pragma journal_mode = " + mode).fetchone()[0] == mode
            base.execute("create table if not exists t (a integer primary key, b blob)")
            base.executemany("insert into t (b) values (zeroblob(?))", [(n,) for n in range(200)])
        base.close()
    base = sqlite3.connect(sys.argv[1] + mode)
    assert base.execute("select count(*), sum(length(b)) from t").fetchone() == (400, 39800)
    assert base.execute("pragma integrity_check").fetchone()[0] == "ok"'
repository() (
    git init -q "$1" && cd "$1" && git config user.email a@b && git config user.name a && cp -r "$source" . &&
        git add . && git commit -qm 1 && git mv good better && git commit -qm 2 && git gc -q && git fsck --strict &&
        git clone -q . ../clone && same_tree better ../clone/better
)
# can_run [COMMAND...]: by it, programs of the mount can be run.
can_run() {
    check "a script runs" equal "$("$@" "$mnt/m/run.sh" it)" "ran it"
    check "a program runs" "$@" "$mnt/m/true"
}
programs_of_others() {
    printf '#!/bin/sh\necho ran "$1"\n' > "$mnt/m/run.sh"
    cp "$(type -P true)" "$mnt/m/true"
    chmod 755 "$mnt/m/run.sh" "$mnt/m/true"
    can_run
    mkdir "$mnt/m/others"
    check "odd names" python3 -c "$odd_names" "$mnt/m/others/names"
    check "sqlite" python3 -c "$database" "$mnt/m/others/base-"
    ! command -v git > /dev/null || check "git" repository "$mnt/m/others/repository"
}

# group::---, user:1234:rwx, mask::rwx
set_list='
import os, struct, sys
entries = [(1, 7, -1), (2, 7, 1234), (4, 0, -1), (16, 7, -1), (32, 0, -1)]
packed = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
os.setxattr(sys.argv[1], "system.posix_acl_access", packed)
'
others_work() {
    [ "$(id -u)" = 0 ] || return 0
    mkdir -m 777 "$mnt/m/open"
    chmod 755 "$tmp"
    can_run setpriv --reuid 12345 --regid 23456 --clear-groups
    check "files belong to who makes them" setpriv --reuid 12345 --regid 23456 --clear-groups \
        sh -c 'umask 027; : > "$1/f"; mkdir "$1/d"; ln -s x "$1/l"' sh "$mnt/m/open"
    check "file" equal "$(stat -c '%u %g %a' "$store/m/open/f")" "12345 23456 640"
    check "directory" equal "$(stat -c '%u %g %a' "$store/m/open/d")" "12345 23456 750"
    check "link" equal "$(stat -c '%u %g' "$store/m/open/l")" "12345 23456"
    mkdir -m 777 "$contexts/open" "$contexts/open/L1"
    chown 12345:23456 "$store/m"
    rm -rf "$store/m/objects"
    check "a user's chunk" setpriv --reuid 12345 --regid 23456 --clear-groups cp "$good" "$contexts/open/L1/00000.kv"
    check "belongs to the user" equal "$(stat -c '%u %g' "$store/m/contexts/open/L1/00000.kv")" "12345 23456"
    check "so do its object and the folders of that" \
        equal "$(find "$store/m/objects" -printf '%u:%g\n' | sort -u)" 12345:23456
    chmod 600 "$store/m/contexts/open/L1/00000.kv"
    check "blocks that are reserved for root are not for others (CAP_SYS_RESOURCE)" \
        bash -c '! (( 0x$(sed -n "s/^CapEff:\t//p" "/proc/$1/status") >> 24 & 1 ))' bash "$daemon"
    as_group=(setpriv --reuid 54321 --regid 23456 --clear-groups)
    for changes in ': > "$1"' 'truncate -s 0 "$1"' 'echo more >> "$1"'; do
        touch "$mnt/m/open/program"
        chmod 6777 "$mnt/m/open/program"
        check "another changes a program: $changes" "${as_group[@]}" sh -c "$changes" sh "$mnt/m/open/program"
        check "it runs no more as its owner" equal "$(stat -c %a "$store/m/open/program")" 777
    done
    # A list whose mask the mode shows as rights of the group, which it does not have.
    mkdir -p "$mnt/m/open/a/b"
    : > "$mnt/m/open/a/b/file"
    : > "$store/m/open/a/b/unseen"
    chmod -R 770 "$store/m/open/a"
    chown -R 12345:23456 "$store/m/open/a"
    check "without a list the group may" "${as_group[@]}" touch "$mnt/m/open/a/b/first"
    if python3 -c "$set_list" "$store/m/open/a/b" 2> /dev/null; then
        for action in 'touch "$1/new"' 'mkdir "$1/new"' 'rm "$1/file"' 'mv "$1/file" "$1/../file"' 'cat "$1/unseen"' 'ls "$1"'; do
            check "with one it may not: $action" fails "${as_group[@]}" sh -c "$action" sh "$mnt/m/open/a/b"
        done
        check "nothing changed" equal "$(ls "$store/m/open/a/b" | tr '\n' ' ')" "file first unseen "
    fi
    rm -r "$store/m/open/a"
    check "modes are obeyed" fails setpriv --reuid 54321 --regid 54321 --clear-groups cat "$contexts/open/L1/00000.kv"
}

options=(-o allow_other)
[ "$(id -u)" = 0 ] || options=()
for passthrough in auto off; do
    mount_store -o "passthrough=$passthrough" "${options[@]}"
    ways_in
    damaged_chunks
    immutability
    mapped_writers
    appending
    removed_folders
    reading_while_writing
    published_while_read
    backing_files
    programs_of_others
    others_work
    if [ "$passthrough" = off ]; then
        check "no passthrough" equal "$(metric 'opens_total{way="passthrough"}')" 0
    elif has_passthrough; then
        check "passthrough" equal "$(metric passthrough_in_use)" 1
        check "for most" test "$(metric 'opens_total{way="passthrough"}')" -gt 50
    else
        echo "passthrough is not checked: it takes root, Linux 6.9 and libfuse 3.17"
    fi
    kill -TERM "$daemon"
    wait "$daemon"
    check "SIGTERM is a good end" equal $? 0
    daemon=
    check "and unmounts" fails mountpoint -q "$mnt"
    check "and leaves nothing behind" equal "$(ls -A "$mnt" "$store/.cachegenfs-tmp" | grep -v : | grep -c .)" 0
    find "$store" -mindepth 1 -delete
done

mount_store -o ro
check "ro: no writing" fails touch "$mnt/x"
unmount
mount_store -o scrub=1M
nices() { cut -d' ' -f19 /proc/"$daemon"/task/*/stat | sort -n; }
own=$(cut -d' ' -f19 "/proc/$$/stat")
behind=$((own < 9 ? own + 10 : 19))
stands_back() { [ "$(nices | grep -cx -- "$behind")" -ge 2 ]; } # the scrub, and what looks for new contexts
check "what nobody waits for comes after requests" wait_for 20 stands_back
check "which do not" equal "$(nices | head -n 1)" "$own"
unmount
"$chunk_files" make "$store/m/contexts/put" 1 100 3 # behind the daemon's back
[ "$(id -u)" != 0 ] || chown -R 12345:23456 "$store/m"
touch -d '2 days ago' "$store/m/contexts/put/.tokens.0123456789abcdef.tmp" "$store/m/contexts/put/.a" \
    "$store/.cachegenfs-swept"
mount_store -o attr_timeout=0,entry_timeout=0
check "what a killed connector left goes" wait_for 20 [ ! -e "$store/m/contexts/put/.tokens.0123456789abcdef.tmp" ]
check "and nothing else" [ -e "$store/m/contexts/put/.a" ]
check "contexts that came past the daemon are adopted" wait_for 20 sh -c '[ "$(find "$1/m/objects" -name "*.kv" | wc -l)" = 2 ]' sh "$store"
unmount
[ "$(id -u)" != 0 ] || check "and what that made belongs to their owner" \
    equal "$(find "$store/m/objects" -printf '%u:%g\n' | sort -u)" 12345:23456

mount_store -o attr_timeout=60,entry_timeout=60
echo x > "$mnt/gone"
cat "$mnt/gone" > /dev/null
rm "$store/gone"
check "what went past the mount, and the kernel knows, is missing" \
    sh -c '! LC_ALL=C cat "$1" 2> "$2" && grep -q "No such file" "$2"' sh "$mnt/gone" "$tmp/gone"
unmount

# With timeouts, so that nothing is watched: reading of changes would count.
n_reads() { sed -n 's/^syscr: //p' "/proc/$daemon/io"; }
if [ -r "/proc/$$/io" ] && grep -q '^syscr: ' "/proc/$$/io"; then
    mount_store -o attr_timeout=0,entry_timeout=0
    before=$(n_reads)
    seq -f "$mnt/no-%.0f" 2000 | xargs stat > /dev/null 2>&1
    after=$(n_reads)
    check "a request is a read" [ $((after - before)) -ge 2000 ]
    check "and not more" [ $((after - before)) -lt 6000 ] # each asks for the root's attributes, too
    unmount
fi

check "unknown options are named" sh -c '"$1" "$2" "$3" -o nonsense 2>&1 | grep nonsense' sh "$cachegenfs" "$store" "$mnt"
check "and refused" fails "$cachegenfs" "$store" "$mnt" -o nonsense
check "no store" fails "$cachegenfs" "$tmp/none" "$mnt"
check "no mount over the store" fails "$cachegenfs" "$store" "$store"
check "no mount inside the store" fails "$cachegenfs" "$store" "$store/m"
mount_store
check "no mount over a mount that is served" sh -c '! timeout 20 "$1" "$2" "$3" 2> "$4" && grep -q "a daemon serves it already" "$4"' \
    sh "$cachegenfs" "$store" "$mnt" "$tmp/served"
check "which still works" test -e "$mnt/.cachegenfs/version"
watches() { [ "$(metric watched)" = 1 ]; }
wait_for 5 watches # where it can
stat --cached=never "$mnt" > /dev/null 2>&1 # the kernel has the root's attributes, and trusts them
kill -KILL "$daemon"
wait "$daemon" 2> /dev/null
"$cachegenfs" "$store" "$mnt" -f 2>> "$tmp/log" &
daemon=$!
# Read, not looked up: the kernel may still know the name from the daemon that was killed.
check "a mount whose daemon was killed makes room" wait_for 20 cat "$mnt/.cachegenfs/version"
unmount
check "and nothing is left below" fails mountpoint -q "$mnt"

# A store that has no room, and then some.
mkdir "$tmp/small"
if [ "$(id -u)" = 0 ] && mount -t tmpfs -o size=1m none "$tmp/small" 2> /dev/null; then
    full_store() {
        local large=$store
        store=$tmp/small
        mount_store
        mkdir -p "$contexts/full/L1"
        fails dd if=/dev/zero of="$mnt/filler" bs=64k 2> /dev/null
        check "no room for a chunk" sh -c '! cp "$1" "$2" 2> "$3" && grep -q "No space" "$3"' \
            sh "$good" "$contexts/full/L1/00000.kv" "$tmp/full"
        check "and nothing of it is there" nothing_at "$contexts/full/L1/00000.kv"
        check "nor staged" wait_for 20 staged_are 0
        rm "$mnt/filler"
        check "with room" cp "$good" "$contexts/full/L1/00000.kv"
        check "it is there" cmp "$good" "$contexts/full/L1/00000.kv"
        unmount
        store=$large
    }
    full_store
    umount "$tmp/small"
fi

# A store that nobody can write to, which was made before stores had a number of their layout.
if [ "$(id -u)" = 0 ] && mount --bind "$store" "$store" 2> /dev/null; then
    mkdir -p "$store/m/contexts"
    cp -r "$source" "$store/m/contexts/kept"
    rm -f "$store/.cachegenfs-layout"
    mount -o remount,bind,ro "$store"
    mount_store
    check "a store that cannot be written is served" same_tree "$source" "$contexts/kept"
    check "and says so" sh -c '! touch "$1" 2> "$2" && grep -q "Read-only" "$2"' sh "$mnt/x" "$tmp/why"
    check "in the log, too" grep -q "the store cannot be written (.cachegenfs-tmp: Read-only file system): read-only" "$tmp/log"
    check "nothing has changed in it" [ ! -e "$store/.cachegenfs-layout" ]
    unmount
    umount "$store"
    rm -r "$store/m/contexts/kept"
fi

# Without descriptors (ulimit -n): some files don't open, and then all do.
echo x > "$store/x"
many_open='
import errno, os, sys
held = []
try:
    for _ in range(100):
        held.append(os.open(sys.argv[1], os.O_RDONLY))
except OSError as error:
    assert error.errno in (errno.EMFILE, errno.ENFILE), error
else:
    sys.exit("all could be opened")
assert len(held) > 10
for fd in held:
    os.close(fd)'
printf '#!/bin/sh\nulimit -n 64\nexec "%s" "$@"\n' "$(realpath "$cachegenfs")" > "$tmp/limited"
chmod 755 "$tmp/limited"
unlimited=$cachegenfs
cachegenfs=$tmp/limited
mount_store
cachegenfs=$unlimited
check "a daemon without descriptors says so" python3 -c "$many_open" "$mnt/x"
check "and goes on" wait_for 20 cat "$mnt/x"
check "also with chunks" cp -r "$source" "$contexts/limited"
unmount

# Without CAP_SYS_ADMIN in the host's user namespace, as in a container: no passthrough and no watch.
if unshare --user --map-root-user --mount true 2> /dev/null && [ "$(id -u)" = 0 ]; then
    : > "$tmp/unprivileged"
    mkdir "$tmp/own"
    unshare --user --map-root-user --mount setpriv --bounding-set=-dac_override,-dac_read_search \
        "$cachegenfs" "$tmp/own" "$mnt" -f 2> "$tmp/unprivileged" &
    daemon=$!
    inside() { nsenter --target "$daemon" --user --mount --preserve-credentials "$@"; }
    check "a daemon without privileges mounts" wait_for 20 inside test -e "$mnt/.cachegenfs/version"
    check "a context comes" inside cp -r "$source" "$mnt/m"
    inside mkdir -p "$contexts/good"
    check "as chunks, too" inside cp -r "$source/." "$contexts/good/"
    check "it is what it was" inside diff -r "$source" "$contexts/good"
    check "and in the store" same_tree "$source" "$tmp/own/m/contexts/good"
    check "a damaged one does not" fails inside cp "$flipped" "$contexts/good/L1/00009.kv"
    check "who made a read-only file may set its size" inside python3 -c '
import os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o444)
os.write(fd, b"four")
os.ftruncate(fd, 10)
os.close(fd)
assert open(sys.argv[2], "rb").read() == b"four" + bytes(6)' "$mnt/read_only" "$tmp/own/read_only"
    check "nothing is read past the daemon" equal "$(inside cat "$mnt/.cachegenfs/metrics" | sed -n \
        's/^cachegenfs_\(passthrough_in_use\|watched\|opens_total{way="passthrough"}\) //p' | sort -u)" 0
    check "the log says what is lost" grep -q "changes past the mount cannot be watched" "$tmp/unprivileged"
    kill -TERM "$daemon"
    wait "$daemon"
    check "and it ends well" equal $? 0
    daemon=
    check "no sanitizer found anything there" fails grep -E 'Sanitizer|runtime error' "$tmp/unprivileged"
else
    echo "not root, or no user namespaces: a daemon without privileges is not checked"
fi

check "--help" "$cachegenfs" --help
check "--version" "$cachegenfs" --version
if "$cachegenfs" "$store" "$mnt"; then
    check "in the background: mounted when the command returns" test -e "$mnt/.cachegenfs/version"
    unmount
else
    check "in the background" false
fi
report
