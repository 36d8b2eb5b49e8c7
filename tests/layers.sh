#!/bin/sh
# Includes point only down the layers: fusefs and connector use iouring and codec, iouring uses codec,
# cuda uses codec; connector and fusefs know nothing of each other. Only fusefs knows libfuse, only
# iouring liburing. In the connector no modules include one another in a circle.
# usage: layers.sh REPOSITORY
set -eu
cd "$1"
found=0

# check LAYER ALLOWED FORBIDDEN: the own folders that LAYER may include from, and the system headers
# that it may not.
check() {
    sources=$(find "$1" -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh')
    [ -n "$sources" ] || return 0
    # shellcheck disable=SC2086
    if grep -nE '^[[:space:]]*#[[:space:]]*include[[:space:]]*"' /dev/null $sources |
        grep -vE "\"($2)/[^\"]*\""; then
        echo "error: $1 may include only from $2, rooted at the repository" >&2
        found=1
    fi
    # shellcheck disable=SC2086
    if grep -nE "^[[:space:]]*#[[:space:]]*include[[:space:]]*<($3)" /dev/null $sources; then
        echo "error: $1 may not include these system headers" >&2
        found=1
    fi
}

# no_circle LAYER: its modules, each a header with its source, know one another in one direction only.
no_circle() {
    for source in "$1"/*.[ch]; do
        module=$(basename "${source%.*}")
        sed -n "s|^[[:space:]]*#[[:space:]]*include[[:space:]]*\"$1/\(.*\)\.h\".*|$module \1|p" "$source"
    done | awk '$1 != $2' | tsort > /dev/null || {
        echo "error: these modules of $1 include one another in a circle" >&2
        found=1
    }
}

check codec 'codec' 'fuse|liburing|cuda|linux/'
check iouring 'iouring|codec' 'fuse|cuda'
check cuda 'cuda|codec' 'fuse|liburing'
check fusefs 'fusefs|iouring|codec' 'liburing|cuda'
check connector 'connector|iouring|codec' 'fuse|liburing|cuda'
no_circle connector
exit $found
