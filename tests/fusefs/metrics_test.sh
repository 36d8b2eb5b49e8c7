#!/bin/bash
# .cachegenfs/metrics: histograms add up; the dashboard and SEMANTICS.md name what there is. usage: metrics_test.sh CACHEGENFS CHUNK_FILES
# shellcheck source=tests/fusefs/mount.sh
. "$(dirname "$0")/mount.sh" "$@"
dashboard=$(dirname "$0")/../../configs/grafana.json
semantics=$(dirname "$0")/../../fusefs/SEMANTICS.md

mount_store
mkdir -p "$mnt/m/contexts/c"
"$chunk_files" make "$tmp/source" 2 10000 1
check "a context is copied in" cp -r "$tmp/source/." "$mnt/m/contexts/c/"
check "and read" same_tree "$tmp/source" "$mnt/m/contexts/c"
cp "$mnt/.cachegenfs/metrics" "$tmp/metrics"
opens_of() { sed -n "s/^cachegenfs_chunk_opens_total{level=\"$1\"} //p" "$tmp/metrics"; }
level=$(basename "$(dirname "$(find "$tmp/source" -name 00000.kv | head -n 1)")")
check "chunks that were read count by their level" equal "$(opens_of "$level")" "$(find "$tmp/source/$level" -name '*.kv' | wc -l)"
check "of all levels" equal "$(grep -c '^cachegenfs_chunk_opens_total' "$tmp/metrics")" 4
names() { sed -n 's/^\(cachegenfs_[a-z_]*\).*/\1/p' "$1" | sort -u; }
check "the dashboard is JSON with panels" python3 -c \
    'import json, sys; sys.exit(len(json.load(open(sys.argv[1]))["panels"]) < 10)' "$dashboard"
grep -o 'cachegenfs_[a-z_]*' "$dashboard" | sort -u > "$tmp/shown"
names "$tmp/metrics" > "$tmp/there"
check "the dashboard shows only metrics that are there" equal "$(comm -23 "$tmp/shown" "$tmp/there")" ""
check "and all of them" equal "$(comm -13 "$tmp/shown" "$tmp/there" | grep -v 'request_seconds_\(sum\|count\)')" ""
# A line for each metric: its name, its label and the values that the label may have.
awk -F '[ {="]+' '
    function tell() { if (line != "") print line }
    /^# TYPE/ { tell(); line = $3 }
    /^[^#]/ && NF > 2 { for (i = 2; i <= 3; i++) if (index(line " ", " " $i " ") == 0) line = line " " $i }
    END { tell() }' "$tmp/metrics" | sort > "$tmp/exported"
sed -n '/^## What is counted$/,/^## /s/^| `\([^|]*|[^|]*\)|.*/cachegenfs_\1/p' "$semantics" | tr -d '`|:,' |
    awk '{ $1 = $1; print }' | sort > "$tmp/told"
check "SEMANTICS.md's table has only metrics that are there" equal "$(comm -13 "$tmp/exported" "$tmp/told")" ""
check "and all of them, with their labels" equal "$(comm -23 "$tmp/exported" "$tmp/told")" ""
check "it names no other elsewhere" equal "$(grep -o '`cachegenfs_[a-z_]*`' "$semantics" | tr -d '`' | sort -u |
    grep -vx -e cachegenfs_ -f <(cut -d ' ' -f 1 "$tmp/exported"))" ""
check "each family has a type" equal "$(grep -c '^# TYPE' "$tmp/metrics")" "$(grep -c '^# HELP' "$tmp/metrics")"
# Buckets count upwards, the last one all; and what was done just now is in them.
check "histograms add up" awk -F'[{}" ]+' '
    /^cachegenfs_request_seconds_bucket/ { if ($3 == last && $NF < before) bad = 1; last = $3; before = $NF; all[$3] = $NF }
    /^cachegenfs_request_seconds_count/ { if ($NF != all[$3]) bad = 1; n[$3] = $NF }
    END { exit bad || !(n["name"] > 0 && n["open"] > 0 && n["write"] > 0 && n["close"] > 0 && n["change"] > 0) }' "$tmp/metrics"
unmount
report
