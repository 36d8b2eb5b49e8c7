#!/bin/bash
# A mount against the directory below it: the same files, one after the other, in turns.
# usage: fs_bench.sh BUILD_DIR OUT.json [MOUNT_OPTIONS]     as root; CG_BENCH_ROUNDS (7), CG_BENCH_ROWS (a pattern of rows)
#
# Rows of OUT.json: what, unit, native, mount (medians of the rounds), ratio (median of the rounds' mount / native) and
# its range. Of MB/s and files/s more is better, of s less. Chunks are nested, of random bytes, 3 MiB with 2 MiB of
# them L2: only their sizes matter here. Caches: "hot": the store's pages are cached; "cold": they are not, nor the
# mount's. Pages of single files are dropped (posix_fadvise), so that other work of the machine goes on.
set -eu
[ $# -ge 2 ] || {
    echo "usage: fs_bench.sh BUILD_DIR OUT.json [MOUNT_OPTIONS]" >&2
    exit 2
}
build=$1
out=$2
options=${3:-}
rounds=${CG_BENCH_ROUNDS:-7}
pattern=${CG_BENCH_ROWS:-.}
tests=$(cd "$(dirname "$0")/.." && pwd)
times=$build/tests/bench/file_times
# shellcheck source=tests/fusefs/mount.sh
. "$tests/fusefs/mount.sh" "$build/fusefs/cachegenfs" "$build/tests/fusefs/cg_chunk_files"
rows=$tmp/rows

median() { sort -g | awk '{v[NR] = $1} END {print (v[int((NR + 1) / 2)] + v[int(NR / 2) + 1]) / 2}'; }

# row WHAT UNIT PREPARE MEASURE: MEASURE DIR prints a figure of that unit; PREPARE DIR comes before it.
row() {
    local what=$1 unit=$2 prepare=$3 measure=$4 round
    [[ $what =~ $pattern ]] || return 0
    : > "$tmp/figures"
    for round in $(seq "$rounds"); do
        $prepare
        if [ $((round % 2)) = 0 ]; then
            native=$($measure "$store")
            $prepare
            mount=$($measure "$mnt")
        else
            mount=$($measure "$mnt")
            $prepare
            native=$($measure "$store")
        fi
        echo "$native $mount" | awk '{print $1, $2, $2 / $1}' >> "$tmp/figures"
    done
    awk -v what="$what" -v unit="$unit" -v native="$(cut -d' ' -f1 "$tmp/figures" | median)" \
        -v mount="$(cut -d' ' -f2 "$tmp/figures" | median)" -v ratio="$(cut -d' ' -f3 "$tmp/figures" | median)" \
        'NR == 1 || $3 < min {min = $3} NR == 1 || $3 > max {max = $3}
         END {printf "  {\"what\": \"%s\", \"unit\": \"%s\", \"native\": %.4g, \"mount\": %.4g, \"ratio\": %.3f, " \
                     "\"ratio_min\": %.3f, \"ratio_max\": %.3f}\n", what, unit, native, mount, ratio, min, max}' \
        "$tmp/figures" | tee -a "$rows"
}

under() { sed "s|^|$1/|" "$2"; }
drop_mount() { under "$mnt" "$tmp/$1" | "$times" drop; }
drop_all() { drop_mount "$1"; under "$store" "$tmp/$1" | "$times" drop; }
# rate LIST BYTES DIR: MB/s
rate() { under "$3" "$tmp/$1" | "$times" read "$2" | awk '{print $2 / $1 / 1e6}'; }
seconds() {
    local start=$EPOCHREALTIME
    "$@" > /dev/null || kill $$ # no figure of what failed
    awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN {print b - a}'
}

# ---- files of 3 MiB ----
l2_bytes=0
large_files() {
    "$chunk_files" nest "$store/m/contexts/large" 64 1048576 1
    mount_store ${options:+-o "$options"}
    (cd "$store" && ls m/contexts/large/L1/*.kv) > "$tmp/l1"
    (cd "$store" && ls m/contexts/large/L2/*.kv) > "$tmp/l2"
    l2_bytes=$(stat -c %s "$mnt/$(head -n 1 "$tmp/l2")")
    sync -f "$store"
    rate l1 0 "$store" > /dev/null
}
nothing() { :; }
drop_l1() { drop_all l1; }
drop_l2() { drop_all l2; }
drop_l2_mount() { drop_mount l2; }
finest() { rate l1 0 "$1"; }
coarse() { rate l2 "$l2_bytes" "$1"; }
prefix() { rate l1 "$l2_bytes" "$1"; }

# ---- small files ----
small_files() {
    mkdir -p "$store/small"
    for i in $(seq 2000); do head -c 4096 /dev/urandom > "$store/small/$i"; done
    (cd "$store" && ls -d small/*) > "$tmp/small"
}
small() { under "$1" "$tmp/small" | "$times" read 0 | awk '{print 2000 / $1}'; }

# ---- copying in ----
copy_source() {
    "$chunk_files" nest "$tmp/source" "$((${CG_BENCH_COPY_MIB:-1024} / 3))" 1048576 2
    rm -rf "$tmp/source/L2" "$tmp/source/L3"
}
remove_copies() { rm -rf "$mnt/m/contexts/copy" "$mnt/m/objects"; } # so that the mount knows
# Below the mount cp syncs nothing; close on the mount does. So the copies there are synced: one by one, or together.
copy_each() { mkdir -p "$2/L1" && for f in "$1"/L1/*; do dd if="$f" of="$2/L1/${f##*/}" bs=1M conv=fsync status=none; done; }
copy_all() { cp -r "$1" "$2" && find "$2" -type f -exec sync {} +; }
copy() {
    local way=$1
    [ "$2" = "$store" ] || way="cp -r"
    seconds $way "$tmp/source" "$2/m/contexts/copy" | awk -v mib="${CG_BENCH_COPY_MIB:-1024}" '{print mib * 1.048576 / $1}'
}
copy_by_file() { copy copy_each "$1"; }
copy_together() { copy copy_all "$1"; }

# ---- 100,000 names: as many in contexts as among the objects; read-only, so that nothing is adopted ----
many_names() {
    for i in $(seq 66); do
        "$chunk_files" nest "$store/many/contexts/c$i" 256 300 "$i"
        "$chunk_files" objects "$store/many" 256 300 "$i"
    done
    mount_store -o "ro${options:+,$options}"
}
list() { seconds ls -lR "$1/many"; }
find_all() { seconds find "$1/many"; }
disk_use() { seconds du -s "$1/many"; }

large_files
row "finest level, 3 MiB files, hot" MB/s nothing finest
row "finest level, 3 MiB files, cold" MB/s drop_l1 finest
row "L2 by its own name, hot" MB/s drop_l2_mount coarse
row "L2 by its own name, hot, read before" MB/s nothing coarse
row "L2 by its own name, cold" MB/s drop_l2 coarse
row "L2 as the first bytes of the finest name, hot" MB/s nothing prefix
[[ "open, read and close of 4 KiB files" =~ $pattern ]] && small_files
row "open, read and close of 4 KiB files" files/s nothing small
unmount
if [[ "cp -r of chunks" =~ $pattern ]]; then
    copy_source
    mount_store ${options:+-o "$options"}
    row "cp -r of chunks; below the mount with fsync of each file" MB/s remove_copies copy_by_file
    row "cp -r of chunks; below the mount with fsync of all at the end" MB/s remove_copies copy_together
    unmount
    rm -rf "$tmp/source"
fi
rm -rf "$store/m"
if [[ "100,000 names" =~ $pattern ]]; then
    many_names
    row "ls -lR of 100,000 names" s nothing list
    row "find over 100,000 names" s nothing find_all
    row "du of 100,000 names" s nothing disk_use
fi
{
    echo '{"commit": "'"$(git -C "$tests" describe --always --dirty --exclude '*')"'",'
    echo ' "options": "'"$options"'", "rounds": '"$rounds"', "kernel": "'"$(uname -r)"'", "store": "'"$(stat -f -c %T "$store")"'",'
    echo ' "processor": "'"$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)"', '"$(nproc)"' cores", "load": "'"$(cut -d" " -f1-3 /proc/loadavg)"'",'
    echo ' "rows": ['
    sed '$!s/$/,/' "$rows"
    echo ' ]}'
} > "$out"
