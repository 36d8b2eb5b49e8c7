#!/bin/bash
# Test suites of others, and load, on a mount. By hand, as root: it takes from minutes to an hour.
# usage: suites.sh CACHEGENFS CHUNK_FILES PART...
#   pjdfstest TARBALL   POSIX conformance in an ordinary directory (needs autoconf, automake, prove): every case passes
#   stress SECONDS      stress-ng's file system stressors beside readers that verify, and eviction (needs stress-ng)
# shellcheck source=tests/fusefs/mount.sh
. "$(dirname "$0")/mount.sh" "$1" "$2"
[ $# -ge 3 ] || { echo "usage: suites.sh CACHEGENFS CHUNK_FILES pjdfstest TARBALL | stress SECONDS"; exit 2; }
part=$3
value=${4:-}

pjdfstest() {
    tar -C "$tmp" -xf "$1"
    local source
    source=$(find "$tmp" -maxdepth 1 -name 'pjdfstest*' -type d)
    (cd "$source" && autoreconf -ifs && ./configure && make pjdfstest) > "$tmp/build" 2>&1 || {
        tail -n 5 "$tmp/build"
        skip pjdfstest "pjdfstest cannot be built"
    }
    mount_store -o allow_other
    mkdir "$mnt/ordinary"
    (cd "$mnt/ordinary" && prove -r "$source/tests") > "$tmp/prove" 2>&1
    tail -n 3 "$tmp/prove"
    check "every case passes" grep -q '^Result: PASS' "$tmp/prove"
}

rss_kib() { awk '/^VmRSS/ {print $2}' "/proc/$daemon/status"; }
stress() {
    command -v stress-ng > /dev/null || skip stress-ng "no stress-ng"
    "$chunk_files" nest "$tmp/source" 20 100000 1
    mount_store -o allow_other,quota=16M,scrub=50M
    mkdir -p "$mnt/m/contexts/kept" "$mnt/ordinary"
    check "a context" cp -r "$tmp/source/." "$mnt/m/contexts/kept/"
    local before end=$((SECONDS + $1)) n=0
    before=$(rss_kib)
    stress-ng --temp-path "$mnt/ordinary" --timeout "$1" --verify --hdd 1 --hdd-bytes 8m --dentry 1 --dir 1 --rename 1 \
        --link 1 --symlink 1 --utime 1 --fallocate 1 --fallocate-bytes 8m --seek 1 > "$tmp/stress" 2>&1 &
    local load=$!
    while [ $SECONDS -lt $end ]; do
        n=$((n + 1))
        "$chunk_files" nest "$tmp/more" 4 100000 "$((n + 1))"
        mkdir -p "$mnt/m/contexts/more"
        cp -r "$tmp/more/." "$mnt/m/contexts/more/" 2> "$tmp/copy" || grep -q 'No space' "$tmp/copy" ||
            check "round $n: a context is copied" cat "$tmp/copy"
        rm -rf "$mnt/m/contexts/more" "$tmp/more"
        check "round $n: what a context keeps is as it was" same_tree "$tmp/source/L1" "$mnt/m/contexts/kept/L1"
    done
    wait "$load"
    check "stress-ng finds no fault" grep -q 'successful run completed' "$tmp/stress"
    echo "$n rounds; the daemon's memory: $before KiB before, $(rss_kib) KiB after"
    check "memory stays" [ "$(rss_kib)" -lt $((2 * before + 65536)) ]
    unmount
    check "every chunk is whole" "$cachegenfs" fsck "$store"
}

case $part in
pjdfstest | stress) $part "$value" ;;
*) echo "no such part: $part"; exit 2 ;;
esac
report
