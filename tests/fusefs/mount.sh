# tests/fusefs/mount.sh - for the mount tests: a store, a mount, and checks. Sourced; $1 is cachegenfs, $2 cg_chunk_files.
set -u
cachegenfs=$1
chunk_files=$2
n_checks=0
n_failed=0
daemon=

skip() {
    case ",${CG_TEST_REQUIRE:-}," in
    *",$1,"*)
        echo "FAILED: required: $1: $2"
        exit 1
        ;;
    esac
    echo "SKIPPED: $2"
    exit 77
}

[ -c /dev/fuse ] && [ -w /dev/fuse ] || skip fuse "no /dev/fuse: nothing of the mount is checked"

tmp=$(mktemp -d "${TMPDIR:-/tmp}/cg_fusefs_XXXXXX")
store=$tmp/store
mnt=$tmp/mnt
mkdir "$store" "$mnt"

unmount() {
    if mountpoint -q "$mnt"; then
        umount "$mnt" 2> /dev/null || fusermount3 -u "$mnt" 2> /dev/null || umount -l "$mnt"
    fi
    if [ -n "$daemon" ]; then
        wait "$daemon" 2> /dev/null
        daemon=
    fi
}

# Leaves the mount without its daemon, and then takes it away.
kill_daemon() {
    kill -KILL "$daemon"
    wait "$daemon" 2> /dev/null
    daemon=
    umount -l "$mnt"
}
# The moment of a fault: not a wait for something.
some_time() { sleep "$((RANDOM % 2)).$((RANDOM % 900 + 100))"; }

# What a test adds with `at_end` runs first.
at_end() { :; }
finish() {
    at_end
    unmount
    rm -rf "$tmp"
}
trap finish EXIT

# wait_for SECONDS COMMAND...: until the command succeeds.
wait_for() {
    local deadline=$((SECONDS + $1))
    shift
    until "$@" > /dev/null 2>&1; do
        [ $SECONDS -lt $deadline ] || return 1
        read -r -t 0.05 < /dev/zero 2> /dev/null || :
    done
}

# mount_store [OPTIONS]: in the foreground of this shell's job $daemon, so that it can be ended by its id.
mount_store() {
    "$cachegenfs" "$store" "$mnt" -f "$@" 2>> "$tmp/log" &
    daemon=$!
    wait_for 20 test -e "$mnt/.cachegenfs/version" || {
        cat "$tmp/log"
        echo "FAILED: the mount does not come up"
        exit 1
    }
}

# check WHAT COMMAND...: the command must succeed.
check() {
    local what=$1
    shift
    n_checks=$((n_checks + 1))
    if ! "$@" > "$tmp/out" 2>&1; then
        n_failed=$((n_failed + 1))
        echo "FAILED: $what: $*"
        sed 's/^/    /' "$tmp/out"
    fi
}
fails() { ! "$@"; }
equal() { [ "$1" = "$2" ] || { echo "'$1' is not '$2'"; return 1; }; }
same_tree() { diff -r "$1" "$2"; }
nothing_at() { [ ! -e "$1" ] && [ -z "$(ls -A "$(dirname "$1")" | grep -F "$(basename "$1")")" ]; }
n_objects() { find "$store/m/objects" -name '*.kv' 2> /dev/null | wc -l; }
metric() { sed -n "s/^cachegenfs_$1 //p" "$mnt/.cachegenfs/metrics"; }

kernel_is() {
    local major minor
    IFS=.- read -r major minor _ <<< "$(uname -r)"
    [ "$major" -gt "$1" ] || { [ "$major" = "$1" ] && [ "$minor" -ge "$2" ]; }
}

has_passthrough() {
    [ "$(id -u)" = 0 ] && "$cachegenfs" --version | grep -q 'passthrough: yes' && kernel_is 6 9
}

# In the daemons' log, where they are builds with a sanitizer.
no_finding() { ! grep -E -A 20 'Sanitizer|runtime error' "$tmp/log"; }

# staged_are N [STORE...]: how many files the daemons of the stores (of $store) are writing. To be waited for: when a daemon
# takes a lease it has one more there for a moment.
staged_are() {
    local n=$1 stores
    shift
    stores=("${@:-$store}")
    [ "$(find "${stores[@]/%//.cachegenfs-tmp}" -mindepth 2 ! -name lock ! -name name | wc -l)" = "$n" ]
}

# Copies the chunks of $tmp/source to the contexts a and b at once, in the background. $tmp/confirmed names those that cp
# has copied without an error.
begin_imports() {
    : > "$tmp/confirmed"
    for to in a b; do
        for from in "$tmp"/source/L1/*.kv; do
            cp "$from" "$mnt/m/contexts/$to/L1/" && echo "$to/L1/${from##*/}" >> "$tmp/confirmed"
        done 2> /dev/null &
    done
}

# check_imports WHEN FILE: the store has the chunks that FILE names.
check_imports() {
    local name
    while read -r name; do
        check "$1: $name was confirmed" cmp "$tmp/source/${name#*/}" "$store/m/contexts/$name"
    done < "$2"
}

report() {
    [ ! -e "$tmp/log" ] || check "no sanitizer found anything" no_finding
    if [ $n_failed -gt 0 ]; then
        echo "$n_failed of $n_checks checks failed; the daemon's log:"
        tail -n 20 "$tmp/log"
        exit 1
    fi
    echo "$n_checks checks passed"
    exit 0
}
