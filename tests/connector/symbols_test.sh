#!/bin/sh
# symbols_test.sh LIBRARY MAP: the library exports what its version script lists, all of it and nothing else.
set -eu
library=$1 map=$2
listed=$(sed -n 's/^ *\(cachegen_[a-z_]*\);$/\1/p' "$map" | sort)
exported=$(nm -D --defined-only "$library" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | sort)
[ -n "$listed" ] || { echo "no names in $map"; exit 1; }
if [ "$listed" != "$exported" ]; then
    echo "listed in $map:"; echo "$listed"
    echo "exported by $library:"; echo "$exported"
    exit 1
fi
