#!/bin/sh
# All C and C++ is laid out by .clang-format. The frozen header of an older ABI is left as it was.
# usage: format.sh REPOSITORY
set -eu
cd "$1"
if ! command -v clang-format-14 > /dev/null; then
    echo "skipped: no clang-format-14, so the sources' layout is not checked"
    exit 77
fi
find codec iouring cuda fusefs connector tests -path tests/connector/abi1 -prune -o \
    -name '*.[ch]' -print -o -name '*.cc' -print -o -name '*.cu' -print -o -name '*.cuh' -print |
    xargs clang-format-14 --dry-run -Werror
