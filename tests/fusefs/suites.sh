#!/bin/bash
# Test suites of others, and load, on a mount. By hand, as root: it takes from minutes to an hour.
# usage: suites.sh CACHEGENFS CHUNK_FILES PART...
#   pjdfstest TARBALL   POSIX conformance in an ordinary directory (needs autoconf, automake, prove): every case passes
#   stress SECONDS      stress-ng's file system stressors, beside readers that verify, and eviction
#   fsx PROGRAM         xfstests' ltp/fsx, as it was built: ten seeds of CG_SUITE_OPERATIONS (10,000) on a file
#   fsstress PROGRAM    its ltp/fsstress: four processes, the same; the store then has what the mount shows
#   fio SECONDS         fio's verifying jobs (written, mapped, past the cache), beside the same
# Of a build with a sanitizer, its findings fail. stress-ng and fio are installed where apt-get can.
# shellcheck source=tests/fusefs/mount.sh
. "$(dirname "$0")/mount.sh" "$1" "$2"
[ $# -ge 3 ] || { echo "usage: suites.sh CACHEGENFS CHUNK_FILES pjdfstest TARBALL | fsx PROGRAM | fsstress PROGRAM | stress SECONDS | fio SECONDS"; exit 2; }
part=$3
value=${4:-}
# What it keeps of freed memory is no leak; by default each thread has 1 MiB of it, and takes minutes to fill that.
export ASAN_OPTIONS="quarantine_size_mb=4:thread_local_quarantine_size_kb=64:${ASAN_OPTIONS:-}"

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

fsx() {
    local seed
    mount_store
    mkdir "$mnt/ordinary"
    for seed in 1 2 3 4 5 6 7 8 9 10; do
        check "seed $seed" "$1" -q -N "${CG_SUITE_OPERATIONS:-10000}" -l 262144 -S "$seed" "$mnt/ordinary/file"
    done
    unmount
}
listing() { (cd "$1" && find . -printf '%y %s %m %n %l %P\n' | sort); }
fsstress() {
    mount_store
    mkdir "$mnt/ordinary"
    check "no operation fails" "$1" -d "$mnt/ordinary" -n "${CG_SUITE_OPERATIONS:-10000}" -p 4 -s 14
    listing "$mnt/ordinary" > "$tmp/shown"
    unmount
    listing "$store/ordinary" > "$tmp/stored"
    check "there are files" [ "$(wc -l < "$tmp/shown")" -gt 100 ]
    check "the store has what the mount showed" cmp "$tmp/shown" "$tmp/stored"
}

rss_kib() { awk '/^VmRSS/ {print $2}' "/proc/$daemon/status"; }
n_threads() { awk '/^Threads/ {print $2}' "/proc/$daemon/status"; }
need() { type -P "$1" > /dev/null || apt-get install -y "$1" > /dev/null 2>&1 || skip "$1" "no $1"; }
n_requests() { awk '/^cachegenfs_request_seconds_count/ {n += $2} END {print n}' "$mnt/.cachegenfs/metrics"; }
# A thread's buffer is of 1 MiB, and takes as much as its largest request had: until all threads have had a large one,
# memory grows without a leak. So large ones are written until that adds nothing.
warm_up() {
    local n=0 before i writers
    until before=$(rss_kib) && [ $n -gt 20 ]; do
        n=$((n + 1))
        writers=()
        for i in 1 2 3 4 5 6 7 8 9 10 11 12; do
            dd if=/dev/zero of="$mnt/ordinary/warm$i" bs=1M count=16 2>> "$tmp/warm" &
            writers+=($!)
        done
        wait "${writers[@]}"
        [ $n -le 2 ] || [ $(($(rss_kib) - before)) -gt 512 ] || break
    done
    rm "$mnt"/ordinary/warm*
}
# beside SECONDS COMMAND...: the command works in $mnt/ordinary; meanwhile contexts come and go, what one keeps is read
# again and again, and room is made. Memory is what the first fifth of the time left, and what there is at the end; a thread
# more takes a request's buffer of 1 MiB, and what malloc() and a sanitizer keep for it.
beside() {
    local seconds=$1 first='' first_threads=0 first_requests=0 n=0 load
    shift
    "$chunk_files" nest "$tmp/source" 20 100000 1
    mkdir -p "$store/m/contexts/kept" "$store/ordinary"
    cp -a "$tmp/source/." "$store/m/contexts/kept/" # there is something to scrub from the start
    mount_store -o allow_other,model_quota=m:12M,scrub=1M
    warm_up
    "$@" > "$tmp/load" 2>&1 &
    load=$!
    local fifth=$((SECONDS + seconds / 5))
    while [ -n "$(jobs -rp | grep -x "$load")" ]; do
        n=$((n + 1))
        "$chunk_files" nest "$tmp/more" 4 100000 "$((n + 1))"
        mkdir -p "$mnt/m/contexts/more"
        cp -r "$tmp/more/." "$mnt/m/contexts/more/" 2> "$tmp/copy" || grep -q 'No space' "$tmp/copy" ||
            check "round $n: a context is copied" fails cat "$tmp/copy"
        rm -rf "$mnt/m/contexts/more" "$tmp/more"
        check "round $n: what a context keeps is as it was" same_tree "$tmp/source/L1" "$mnt/m/contexts/kept/L1"
        [ -n "$first" ] || [ $SECONDS -lt $fifth ] || {
            first=$(rss_kib) && first_threads=$(n_threads) && first_requests=$(n_requests)
        }
    done
    wait "$load"
    check "the load finds no fault" equal $? 0
    [ $n_failed = 0 ] || head -n 40 "$tmp/load"
    echo "$n rounds; the daemon's memory: $first KiB with $first_threads threads, $(rss_kib) KiB with $(n_threads) at the end," \
        "$(($(n_requests) - first_requests)) requests later;" \
        "bytes published: $(metric published_bytes_total), evicted: $(metric evicted_bytes_total)," \
        "scrubbed: $(metric scrubbed_bytes_total); in doubt: $(metric watch_overflows_total)"
    check "memory stays" [ "$(rss_kib)" -lt $((first * 5 / 4 + 8192 + 2048 * ($(n_threads) - first_threads))) ]
    unmount
    check "every chunk is whole" "$cachegenfs" fsck "$store"
}
stress() {
    need stress-ng
    # One of each: what makes, names, links, locks, maps, punches and lists files. Not io: it syncs all file systems of
    # the machine, and fails by the faults of others.
    local all=() stressor
    for stressor in access chmod chown copy-file dentry dir dirdeep dirmany fallocate fcntl filename flock fpunch fsize fstat \
        getdent hdd iomix link locka lockf lockofd mknod mmap open readahead rename seek symlink sync-file touch utime; do
        all+=("--$stressor" 1)
    done
    beside "$1" stress-ng --temp-path "$mnt/ordinary" --timeout "$1" --verify "${all[@]}" --mmap-file --mmap-bytes 8m \
        --hdd-bytes 8m --iomix-bytes 8m --fallocate-bytes 8m --copy-file-bytes 128m --sync-file-bytes 8m --readahead-bytes 8m
}
fio() {
    need fio
    local engine jobs=()
    for engine in psync mmap libaio io_uring; do
        jobs+=(--name="$engine" --ioengine="$engine" --rw=randrw)
        [ "$engine" != libaio ] || jobs+=(--direct=1)
    done
    beside "$1" command fio --directory="$mnt/ordinary" --size=16m --bsrange=4k-128k --iodepth=8 --fsync=64 --verify=crc32c \
        --verify_fatal=1 --verify_state_save=0 --verify_backlog=256 --time_based --runtime="$1" --fallocate=none "${jobs[@]}"
}

case $part in
pjdfstest | fsx | fsstress | stress | fio) $part "$value" ;;
*) echo "no such part: $part"; exit 2 ;;
esac
report
