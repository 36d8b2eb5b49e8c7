#!/bin/bash
# Changes past the mount are seen by it long before names and attributes would be looked up again by themselves, and its
# own changes cost nothing. usage: watch_test.sh CACHEGENFS CHUNK_FILES
# shellcheck source=tests/fusefs/mount.sh
. "$(dirname "$0")/mount.sh" "$@"

is_watched() { equal "$(metric watched)" 1; }
# By timeouts alone a change would be seen after a minute or an hour, and none of the waits is as long.
seen() { wait_for 20 "$@"; }
absent() { [ ! -e "$1" ] && [ ! -L "$1" ]; }
stat_is() { equal "$(stat -c "$1" "$2")" "$3"; }
listed() { equal "$(ls "$1" | tr '\n' ' ')" "$2"; }
# What the kernel has from now on.
remember() { find "$mnt" -ls > /dev/null; }

files() {
    mkdir -p "$store/m/d/e" "$store/m/other"
    echo one > "$store/m/d/file"
    echo two > "$store/m/d/second"
    ln "$store/m/d/file" "$store/m/d/link"
    remember
    remember
    echo "one and more" > "$store/m/d/file"
    check "a change of the content" seen stat_is %s "$mnt/m/d/file" 13
    check "by the other name, too" seen stat_is %s "$mnt/m/d/link" 13
    check "and it can be read" equal "$(cat "$mnt/m/d/file")" "one and more"
    chmod 600 "$store/m/d/link"
    check "chmod by another name" seen stat_is %a "$mnt/m/d/file" 600
    check "the number of links" seen stat_is %h "$mnt/m/d/file" 2
    rm "$store/m/d/link"
    check "one of them goes" seen stat_is %h "$mnt/m/d/file" 1
    check "and its name" seen absent "$mnt/m/d/link"
    touch "$store/m/d/new"
    check "a new file" seen test -e "$mnt/m/d/new"
    check "is listed" seen listed "$mnt/m/d" "e file new second "
    rm "$store/m/d/new"
    check "and goes" seen absent "$mnt/m/d/new"
    mv "$store/m/d/second" "$store/m/other/third"
    check "a file moves away" seen absent "$mnt/m/d/second"
    check "to where it is" equal "$(cat "$mnt/m/other/third")" two
    remember
    echo three > "$store/m/other/fourth"
    mv "$store/m/other/fourth" "$store/m/other/third"
    check "another takes its name" seen grep -q three "$mnt/m/other/third"
    remember
    mv "$store/m/d" "$store/m/f"
    check "a folder moves" seen absent "$mnt/m/d"
    check "with what is in it" seen stat_is %s "$mnt/m/f/file" 13
    remember
    rm -r "$store/m/f"
    check "a folder goes" seen absent "$mnt/m/f"
    check "its folder knows" seen listed "$mnt/m" "other "
}

n_questions() { sed -n 's/^cachegenfs_request_seconds_count{.*="name"} //p' "$mnt/.cachegenfs/metrics"; }
keeps_names() { kernel_is 6 16 && "$cachegenfs" --version | grep -qE 'built with libfuse 3\.(1[89]|[2-9][0-9])'; }

# What the kernel has it does not ask for: names, listings, and that a level of a chunk is missing.
known() {
    local before i
    keeps_names || { echo "SKIPPED: kernel or libfuse keep no names: that they are kept"; return; }
    mkdir -p "$store/m/known/a" "$store/m/known/b"
    touch -d @1000000000 "$store/m/known"
    remember
    check "a level is missing" absent "$mnt/m/known/a/L0.kv"
    before=$(n_questions)
    for i in $(seq 20); do
        find "$mnt/m/known" > "$tmp/found"
        absent "$mnt/m/known/a/L0.kv"
    done
    check "all was found" equal "$(wc -l < "$tmp/found")" 3
    # A few are the metrics', and of what another change made doubtful.
    check "known names need no question" test $(($(n_questions) - before)) -lt 20
    touch "$store/m/known/a/L0.kv"
    check "the level comes" seen test -e "$mnt/m/known/a/L0.kv"
    mkdir "$store/m/known/c"
    touch -d @1000000000 "$store/m/known" # as rsync and tar do
    check "a listing is new although the folder's time is not" seen listed "$mnt/m/known" "a b c "
    rm -r "$store/m/known"
    check "all goes" seen absent "$mnt/m/known"
}

# Of a folder in which somebody is: it stays what it is.
inside() {
    mkdir -p "$store/m/in/side"
    remember
    cd "$mnt/m/in" || exit 1
    touch "$store/m/x"
    remember
    rm "$store/m/x"
    check "another name goes" seen absent "$mnt/m/x"
    check "a folder in use has its name" equal "$(python3 -c 'import os; print(os.getcwd())')" "$mnt/m/in"
    check "and what is in it" test -d side
    cd "$tmp" || exit 1
}

# Nobody tells of what is written by a mapping until that is closed. But opening the file compares its time of change.
mapped() {
    local writer
    mkdir "$store/m/mapped"
    printf 'old bytes' > "$store/m/mapped/file"
    mkfifo "$tmp/written" "$tmp/go"
    check "what the kernel has of a file it keeps" seen keeps_pages "$mnt/m/mapped/file"
    python3 -c '
import mmap, sys
path, written, go = sys.argv[1:]
with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
    mapping[:3] = b"new"
    mapping.flush()
    open(written, "w").close()
    open(go).close()' "$store/m/mapped/file" "$tmp/written" "$tmp/go" &
    writer=$!
    cat "$tmp/written"
    check "of what has just changed it keeps nothing, of this it would" seen is_settled "$store/m/mapped/file"
    check "but not when it has changed" equal "$(cat "$mnt/m/mapped/file")" "new bytes"
    : > "$tmp/go"
    wait "$writer"
    rm -r "$store/m/mapped" "$tmp/written" "$tmp/go"
}
is_settled() { [ $(($(date +%s) - $(stat -c %Z "$1"))) -gt 2 ]; }
keeps_pages() {
    local before
    is_settled "$store/${1#"$mnt"}" || return 1
    before=$(metric read_bytes_total)
    cat "$1"
    equal "$(metric read_bytes_total)" "$before"
}

# Listings of a folder while files come and go in it: what is there all the time is always there, and what has gone is.
load() {
    local round stop=$tmp/stop
    mkdir "$store/m/busy"
    for i in $(seq 100); do echo "$i" > "$store/m/busy/keep$i"; done
    (
        while [ ! -e "$stop" ]; do
            for i in $(seq 50); do echo > "$store/m/busy/go$i"; done
            rm "$store/m/busy"/go*
        done
    ) &
    local writer=$!
    for round in $(seq 30); do
        check "what stays is listed" equal "$(ls "$mnt/m/busy" | grep -c keep)" 100
        check "and found" equal "$(cat "$mnt"/m/busy/keep* | wc -l)" 100
        ls -l "$mnt/m/busy" > /dev/null 2>&1
    done
    touch "$stop"
    wait "$writer"
    check "what went is gone" seen equal_counts "$store/m/busy" "$mnt/m/busy"
    rm "$store/m/busy/keep7"
    check "the last one, too" seen absent "$mnt/m/busy/keep7"
}
equal_counts() { equal "$(ls "$1" | wc -l)" "$(cat "$2"/* | wc -l)" && equal "$(ls "$1")" "$(ls "$2")"; }

# The watch does not reach there, so that nothing there is trusted for long.
elsewhere() {
    mkdir "$store/m/elsewhere"
    mount -t tmpfs none "$store/m/elsewhere" || { echo "SKIPPED: nothing can be mounted in a store"; return; }
    mkdir "$store/m/elsewhere/d"
    remember
    check "a folder from elsewhere is empty" listed "$mnt/m/elsewhere" "d "
    touch "$store/m/elsewhere/new"
    chmod 700 "$store/m/elsewhere/d"
    check "a new file is found" seen test -e "$mnt/m/elsewhere/new"
    check "and listed" seen listed "$mnt/m/elsewhere" "d new "
    check "a mode has changed" seen stat_is %a "$mnt/m/elsewhere/d" 700
    umount -l "$store/m/elsewhere"
    rmdir "$store/m/elsewhere"
}
at_end() { umount -l "$store/m/elsewhere" 2> /dev/null; }

# What is done through the mount makes no names doubtful.
own() {
    local before
    "$chunk_files" make "$tmp/source" 8 10000 1
    before=$(metric watch_doubts_total)
    mkdir -p "$mnt/n/contexts"
    for i in 1 2 3; do
        cp -r "$tmp/source" "$mnt/n/contexts/c$i"
        ls -lR "$mnt" > /dev/null
        mv "$mnt/n/contexts/c$i" "$mnt/n/contexts/d$i"
        echo x > "$mnt/n/contexts/d$i/x"
        mv "$mnt/n/contexts/d$i/x" "$mnt/n/contexts/d$i/context.json"
        rm -r "$mnt/n/contexts/d$i"
    done
    touch "$store/n/end" # the watch has come to here when it tells of this
    remember
    echo xx > "$store/n/end"
    check "the end" seen stat_is %s "$mnt/n/end" 3
    # A name that is replaced while the daemon notes it may cause one.
    check "own changes cause next to no doubt" [ "$(metric watch_doubts_total)" -le $((before + 3)) ]
}

mount_store
wait_for 10 is_watched || skip watch "the store's changes cannot be watched: $(grep -o 'changes past.*' "$tmp/log")"
own # first: the watch lags behind what others change
files
known
inside
mapped
elsewhere
load
check "nothing went lost, or it was noticed" test "$(metric watch_overflows_total)" -ge 0
unmount
# As before Linux 6.16: the kernel is told of attributes only, and keeps names for as long as this says.
rm -r "$store"/[!.]*
mount_store -o entry_timeout=1
wait_for 10 is_watched
check "attributes are watched without names" equal "$(metric watched)" 1
files
inside
load
unmount
mount_store -o attr_timeout=1,entry_timeout=1
check "who says how long does not watch" equal "$(metric watched)" 0
unmount
report
