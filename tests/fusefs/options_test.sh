#!/bin/sh
# The options of --help stand in the manual page and in SEMANTICS.md's table, too, and systemd takes the unit.
# usage: options_test.sh CACHEGENFS REPOSITORY
set -u
n_failed=0
semantics=$(sed -n '/^## Options/,/^## Names/p' "$2/fusefs/SEMANTICS.md" | grep '^|')
manual=$(sed -n '/^\.SH OPTIONS/,/^\.SH EXIT/p' "$2/fusefs/cachegenfs.8" | grep '^\.B' | sed 's/\\//g')
options=$("$1" --help | sed -n 's/^    \(-o [a-z_]*\).*/\1/p; s/^    \(-[a-zA-Z]\).*/\1/p' | grep -v -- '-o OPT' | tr ' ' _)
[ "$(echo "$options" | wc -l)" -gt 8 ] || { echo "--help names no options"; exit 1; }

# named_in WHERE TEXT OPTION
named_in() {
    echo "$2" | grep -q -e "[ \`\"]$3\b" || {
        echo "$1 says nothing of $3"
        n_failed=$((n_failed + 1))
    }
}
for option in $options; do
    option=$(echo "$option" | sed 's/^-o_/-o /')
    named_in cachegenfs.8 "$manual" "$option"
    case $option in
    -[Vh] | *default_permissions | "-o ") ;;
    *) named_in SEMANTICS.md "$semantics" "$option" ;;
    esac
done
if command -v groff > /dev/null && ! groff -man -z -ww "$2/fusefs/cachegenfs.8" 2> /dev/null; then
    echo "cachegenfs.8 is no manual page"
    n_failed=$((n_failed + 1))
fi
# It exits with 0 also after a key that it does not know; so what it says counts.
if command -v systemd-analyze > /dev/null; then
    said=$(systemd-analyze verify "$2/configs/mnt-kv.mount" 2>&1) || said="it fails: $said"
    said=$(echo "$said" | grep -e mnt-kv -e 'it fails')
    [ -z "$said" ] || {
        echo "configs/mnt-kv.mount: $said"
        n_failed=$((n_failed + 1))
    }
else
    echo "SKIPPED: no systemd-analyze: configs/mnt-kv.mount is not checked"
fi
exit $n_failed
