#!/bin/bash
# cachegenfs fsck finds what is damaged, and --repair takes its name away. usage: fsck_test.sh CACHEGENFS CHUNK_FILES
# shellcheck source=tests/fusefs/mount.sh
. "$(dirname "$0")/mount.sh" "$@"

# ends_with STATUS COMMAND...
ends_with() {
    local wanted=$1 status=0
    shift
    "$@" || status=$?
    [ "$status" = "$wanted" ] || { echo "status $status"; return 1; }
}
fsck() { "$cachegenfs" fsck "$store" "$@"; }
# flip FILE OFFSET: another byte there, long ago.
flip() {
    local byte
    byte=$(od -An -tu1 -j "$2" -N 1 "$1")
    printf "\\$(printf %o $((byte ^ 255)))" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none
    touch -m -d '1 hour ago' "$1" # nobody is writing it
}
objects() { find "$store/m/objects" -name "$1" | sort; }

gc() { "$cachegenfs" gc "$store" "$@"; }
check "wrong usage" ends_with 2 "$cachegenfs" gc "$store" --all
check "wrong usage" ends_with 2 "$cachegenfs" fsck
check "no such store" ends_with 2 "$cachegenfs" fsck "$tmp/nothing"
# A path that is mistyped, or whose disk is not mounted, is not whole.
says_no_store() { "$cachegenfs" "$@" | grep -q ': no store: '; }
mkdir -p "$tmp/other/m/contexts/c/L1" "$tmp/other/m/profiles"
touch "$tmp/other/m/model.json" "$tmp/other/m/contexts/c/model.json" "$tmp/other/m/contexts/c/context.json"
for path in "$store" "$tmp" "$tmp/other/m" "$tmp/other/m/contexts"; do
    for command in fsck gc; do
        check "$command: $path is none" ends_with 2 "$cachegenfs" "$command" "$path"
        check "and is said to be" says_no_store "$command" "$path"
    done
done
check "nothing comes into it" equal "$(ls -A "$store")" ""
check "one that connectors have made" ends_with 0 "$cachegenfs" fsck "$tmp/other"
check "has no garbage" ends_with 0 "$cachegenfs" gc "$tmp/other"

mount_store
"$chunk_files" nest "$tmp/source" 4 100000 1
mkdir -p "$mnt/m/contexts/c"
cp -a "$tmp/source/"* "$mnt/m/contexts/c/"
unmount
check "a good store" ends_with 0 fsck
check "of so many names" sh -c '"$1" fsck "$2" | grep -q "^24 names whole, 0 damaged"' sh "$cachegenfs" "$store"

# The names of chunk 0 are one file, in the context and as objects: three levels each.
file=$store/m/contexts/c/L1/00000.kv
check "one file" equal "$(stat -c %h "$file")" 6
flip "$file" $(($(stat -c %s "$file") - 50))      # in what only L1 has
flip "$store/m/contexts/c/L1/00001.kv" 5000       # in what all levels have
truncate -s -1 "$store/m/contexts/c/L1/00002.kv"
touch -m -d '1 hour ago' "$store/m/contexts/c/L1/00002.kv"
touch -d '2 days ago' "$store/m/contexts/c/L1/.00007.kv.0123456789abcdef.tmp"
touch "$store/m/contexts/c/L1/.00008.kv.0123456789abcdef.tmp"
# Of a connector that hangs: it has the file open.
exec 9> "$store/m/contexts/c/L1/.00009.kv.0123456789abcdef.tmp"
touch -d '2 hours ago' "$store/m/contexts/c/L1/.00009.kv.0123456789abcdef.tmp"
check "damage is found" ends_with 1 fsck
check "of so many names" sh -c '"$1" fsck "$2" | grep -q "^6 names whole, 18 damaged, 1 files left"' sh "$cachegenfs" "$store"
check "and nothing changed" equal "$(stat -c %h "$file")" 6
check "it is repaired" ends_with 1 fsck --repair
check "then all is whole" ends_with 0 fsck
check "every chunk too" sh -c 'find "$2/m" -name "*.kv" -print0 | xargs -0 "$1" verify' sh "$chunk_files" "$store"
check "L1 of chunk 0 is gone" [ ! -e "$file" ]
"$chunk_files" cut "$tmp/source/L1/00000.kv" 2 > "$tmp/l2"
check "L2 of chunk 0 is there" cmp "$tmp/l2" "$store/m/contexts/c/L2/00000.kv"
check "chunk 1 is gone" equal "$(ls "$store"/m/contexts/c/L?/00001.kv 2> /dev/null)" ""
check "chunk 2 has its coarser levels" equal "$(ls "$store"/m/contexts/c/L?/00002.kv | wc -l)" 2
check "chunk 3 is as it was" cmp "$tmp/source/L1/00003.kv" "$store/m/contexts/c/L1/00003.kv"
check "objects are as the context" equal "$(objects '*.kv' | wc -l)" 7
check "what was damaged is in quarantine" equal "$(find "$store/quarantine" -type f ! -name list | wc -l)" 10
check "and the list says what it was" grep -q 'm/contexts/c/L1/00001.kv' "$store/quarantine/list"
check "what was left is removed" [ ! -e "$store/m/contexts/c/L1/.00007.kv.0123456789abcdef.tmp" ]
check "what is being written is not" [ -e "$store/m/contexts/c/L1/.00008.kv.0123456789abcdef.tmp" ]
check "nor what somebody has open for that" [ -e "$store/m/contexts/c/L1/.00009.kv.0123456789abcdef.tmp" ]
exec 9>&-
rm "$store/m/contexts/c/L1/.00009.kv.0123456789abcdef.tmp"
check "nothing is staged" equal "$(ls -A "$store/.cachegenfs-tmp")" ""

echo bad > "$store/m/contexts/c/L2/00009.kv"
check "what was written just now may become whole" ends_with 2 fsck --repair
check "and stays" [ -e "$store/m/contexts/c/L2/00009.kv" ]
touch -d '1 hour ago' "$store/m/contexts/c/L2/00009.kv"
exec 9>> "$store/m/contexts/c/L2/00009.kv"
check "so may what somebody has open" ends_with 2 fsck --repair
exec 9>&-
check "and stays, too" [ -e "$store/m/contexts/c/L2/00009.kv" ]
# A FIFO in the place of the list would hold the scrubber for ever.
mv "$store/quarantine/list" "$tmp/list"
mkfifo "$store/quarantine/list"
check "a FIFO holds nobody" ends_with 2 timeout 60 "$cachegenfs" fsck "$store" --repair
check "what cannot be listed stays" [ -e "$store/m/contexts/c/L2/00009.kv" ]
mv "$tmp/list" "$store/quarantine/list"
check "then it goes" ends_with 1 fsck --repair

# On a store that is mounted, and through links that lead out of it.
mkdir "$tmp/outside"
cp "$store/m/contexts/c/L2/00000.kv" "$tmp/outside/00000.kv"
flip "$tmp/outside/00000.kv" 5000
mkdir -p "$store/m/contexts/d"
ln -s "$tmp/outside" "$store/m/contexts/d/L2"
mount_store
check "a mounted store" ends_with 0 fsck --repair
check "links are not followed" [ -e "$tmp/outside/00000.kv" ]
check "the mount goes on" cmp "$tmp/l2" "$mnt/m/contexts/c/L2/00000.kv"
unmount

# Garbage: the context c has objects, which it names; other objects lost their context, or their profile.
rm -rf "$store/m" "$store/quarantine"
mount_store
for i in 1 2; do
    "$chunk_files" nest "$tmp/source$i" 4 1000 "$i"
    mkdir -p "$mnt/m/contexts/c$i"
    cp -a "$tmp/source$i/"* "$mnt/m/contexts/c$i/" # the finest level first
done
rm -r "$mnt/m/contexts/c1"
check "the layout is hidden" [ ! -e "$mnt/.cachegenfs-layout" ]
check "and cannot be made" fails touch "$mnt/.cachegenfs-layout"
unmount
check "objects of two contexts" equal "$(objects '*.kv' | wc -l)" 24
check "of a profile that is gone" ends_with 1 gc
touch -d '2 days ago' "$store/m/.model.json.0123456789abcdef.tmp"
# Users' own, whatever they are called: no connector writes such a name, or not there.
key=$(basename "$(dirname "$(objects '*.kv' | head -n 1)")")
mkdir -p "$store/m/data" "$store/data"
own=("$store/.settings.tmp" "$store/.model.json.0123456789abcdef.tmp" "$store/data/.notes.0123456789abcdef.tmp"
    "$store/m/data/.settings.tmp" "$store/m/data/.00000.kv.0123456789abcdef.tmp" "$store/m/.settings.0123456789abcdef.tmp"
    "$store/m/contexts/.tokens.0123456789abcdef.tmp" "$store/m/contexts/c2/.tokens.tmp" "$store/m/contexts/c2/.tokens.123.tmp"
    "$store/m/contexts/c2/.tokens.0123456789ABCDEF.tmp" "$store/m/contexts/c2/L1/.0.kv.0123456789abcdef.tmp"
    "$store/m/contexts/c2/L1/.00000.kv.Xa8f2.tmp" "$store/m/objects/${key:0:2}/.L0.kv.0123456789abcdef.tmp")
left=("$store/m/contexts/c2/.tokens.0123456789abcdef.tmp" "$store/m/contexts/c2/.context.json.0123456789abcdef.tmp"
    "$store/m/contexts/c2/L1/.00000.kv.0123456789abcdef.tmp" "$store/m/objects/${key:0:2}/$key/.L0.kv.0123456789abcdef.tmp"
    "$store/m/profiles/.default.0123456789abcdef.tmp" "$store/m/profiles/.$key.cgp.0123456789abcdef.tmp"
    "$store/..cachegenfs-adopted.0123456789abcdef.tmp")
mkdir -p "$store/m/profiles"
touch -d '2 days ago' "${own[@]}" "${left[@]}"
all_there() { ls -d "$@" > /dev/null; }
none_there() { ! ls -d "$@" 2> /dev/null | grep .; }
check "nothing is removed unasked" equal "$(objects '*.kv' | wc -l)" 24
check "what no context names goes" ends_with 0 gc --remove
check "what one names stays" equal "$(objects '*.kv' | wc -l)" 12
check "folders are removed, too" equal "$(find "$store/m/objects" -mindepth 2 -type d | wc -l)" 4
check "and what was left" none_there "$store/m/.model.json.0123456789abcdef.tmp" "${left[@]}"
check "not what users call so" all_there "${own[@]}"
check "fsck leaves that, too" ends_with 0 fsck --repair
check "it is there" all_there "${own[@]}"
check "then there is no garbage" ends_with 0 gc --orphans
check "the context is whole" "$chunk_files" verify "$store"/m/contexts/c2/L1/*.kv

# Links do not tell everywhere what a context names: c2 gets files of its own, and then names its chunks in its JSON alone.
names=$(for file in "$tmp"/source2/L1/*.kv; do printf '{"key":"%s","levels":["L2"]}\n' "$("$chunk_files" key "$file")"; done)
for file in "$store"/m/contexts/c2/L?/*.kv; do cp "$file" "$tmp/copy" && mv "$tmp/copy" "$file"; done
check "objects have no links elsewhere" equal "$(find "$store/m/objects" -name '*.kv' -links +3)" ""
check "what files of a context name stays" ends_with 0 gc --orphans --remove
check "all of it" equal "$(objects '*.kv' | wc -l)" 12
rm "$store"/m/contexts/c2/L?/*.kv
printf '{"chunks":[%s]}' "$(echo "$names" | paste -sd,)" > "$store/m/contexts/c2/context.json"
check "what a context.json names stays" ends_with 0 gc --orphans --remove
check "all of it" equal "$(objects '*.kv' | wc -l)" 12
rm "$store/m/contexts/c2/context.json"

# A profile that is damaged goes to the quarantine, and may come back: what it decodes is no garbage until then.
fp8=$(objects '*-L1.kv' | head -n 1 | sed 's/.*\/\(.*\)-L1.kv/\1/')
profile=$("$chunk_files" profile "$(objects '*-L1.kv' | head -n 1)")
check "the profile's name" equal "${profile:0:8}" "$fp8"
check "nobody knows the profile" ends_with 1 gc
mkdir -p "$store/m/profiles"
echo "$profile" > "$store/m/profiles/default"
check "the model's default one is known" ends_with 0 gc --remove
rm "$store/m/profiles/default"
echo no profile > "$store/m/profiles/$profile.cgp"
touch -d '1 hour ago' "$store/m/profiles/$profile.cgp"
says_unserved() { gc | grep -q '^m: 4 files of chunks are not served: profiles/default'; }
check "without a default nothing is served" says_unserved
echo 0123456789abcdef0123456789abcdef > "$store/m/profiles/default"
check "nor with another one" says_unserved
check "which is no garbage" ends_with 0 gc
echo "$profile" > "$store/m/profiles/default"
check "with its own it is" fails says_unserved
rm "$store/m/profiles/default"
check "a damaged one is repaired" ends_with 1 fsck --repair
check "into the quarantine" [ ! -e "$store/m/profiles/$profile.cgp" ]
check "what it decodes stays" ends_with 0 gc --remove
check "all of it" equal "$(objects '*.kv' | wc -l)" 12
rm "$store"/quarantine/*.cgp
check "until nobody has it any more" ends_with 0 gc --remove
check "then it goes" equal "$(objects '*.kv' | wc -l)" 0

# What root makes in a user's store is the user's, whose daemon could not write to it else.
if [ "$(id -u)" = 0 ]; then
    rm -rf "$store/.cachegenfs-tmp" "$store/quarantine"
    chown 12345:23456 "$store"
    echo no profile > "$store/m/profiles/$profile.cgp"
    touch -d '1 hour ago' "$store/m/profiles/$profile.cgp"
    check "root repairs a user's store" ends_with 1 fsck --repair
    check "which stays the user's" equal \
        "$(stat -c '%u %g' "$store"/{.cachegenfs-tmp,quarantine,quarantine/list} | sort -u)" "12345 23456"
    check "root adds to the user's list" grep -q "$profile.cgp" "$store/quarantine/list"
    chown 0:0 "$store"
fi

# A daemon removes what was left, too.
touch -d '2 hours ago' "$store/m/.model.json.0123456789abcdef.tmp"
touch "$store/m/.model.json.0000000000000000.tmp"
touch -d '2 days ago' "$store/.cachegenfs-swept"
mount_store
check "a daemon removes what was left" wait_for 20 [ ! -e "$store/m/.model.json.0123456789abcdef.tmp" ]
check "not what is being written" [ -e "$store/m/.model.json.0000000000000000.tmp" ]
check "nor what users call so" all_there "${own[@]}"
unmount

# Stores of another layout.
check "the layout is noted" equal "$(cat "$store/.cachegenfs-layout")" 1
for layout in 2 0 '' one 18446744073709551617; do
    echo "$layout" > "$store/.cachegenfs-layout"
    check "layout '$layout' is not mounted" fails "$cachegenfs" "$store" "$mnt" -f
    check "nor checked" ends_with 2 fsck
    check "nor swept" ends_with 2 gc
done
rm "$store/.cachegenfs-layout"

# The scrubber does the same, and other files of the store are served meanwhile.
rm -rf "$store/quarantine" "$store/m" "$tmp/source"
mount_store
"$chunk_files" nest "$tmp/source" 6 100000 2
mkdir -p "$mnt/m/contexts/c"
cp -a "$tmp/source/"* "$mnt/m/contexts/c/"
unmount
flip "$store/m/contexts/c/L1/00002.kv" $(($(stat -c %s "$store/m/contexts/c/L1/00002.kv") - 50))
flip "$store/m/contexts/c/L1/00004.kv" 5000
mount_store -o scrub=1G
scrubbed() { [ "$(metric scrub_passes_total)" -ge 1 ]; }
check "a pass ends" wait_for 60 scrubbed
check "names that were whole" equal "$(metric 'scrubbed_total{result="whole"}')" 24
check "names that were cut" equal "$(metric 'scrubbed_total{result="cut"}')" 4
check "names that went" equal "$(metric 'scrubbed_total{result="quarantined"}')" 8
check "whole files are read once" [ "$(metric scrubbed_bytes_total)" -lt 5400000 ] # four; two by six names each
check "it is in the log" grep -q 'scrub: m/contexts/c/L1/00004.kv: moved to quarantine' "$tmp/log"
check "coarser levels stay" "$chunk_files" verify "$mnt/m/contexts/c/L2/00002.kv"
check "the rest is as it was" cmp "$tmp/source/L1/00005.kv" "$mnt/m/contexts/c/L1/00005.kv"
unmount
check "then all is whole" ends_with 0 fsck
report
