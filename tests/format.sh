#!/bin/sh
# All C and C++ is laid out by .clang-format, in lines of 100 columns. The frozen header of an older ABI is left as it was.
# usage: format.sh REPOSITORY
set -eu
cd "$1"
if ! command -v clang-format-14 > /dev/null; then
    echo "skipped: no clang-format-14, so the sources' layout is not checked"
    exit 77
fi
sources=$(find codec iouring cuda fusefs connector tests -path tests/connector/abi1 -prune -o \
    -name '*.[ch]' -print -o -name '*.cc' -print -o -name '*.cu' -print -o -name '*.cuh' -print)
# It breaks no string, so a line with one can be longer.
if grep -nE '^.{101}' $sources; then
    echo "error: these lines have more than 100 columns" >&2
    exit 1
fi
clang-format-14 --dry-run -Werror $sources
