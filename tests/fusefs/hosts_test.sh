#!/bin/bash
# One store, three hosts, each with a daemon in a network namespace of its own: who is killed or cut off loses only what it
# had not published, the others go on. usage: hosts_test.sh CACHEGENFS CHUNK_FILES [gluster | ceph]
# The store is reached over sshfs; or, by hand, over Gluster: each host has a third of it (glusterfs-server); or over
# CephFS: one monitor, OSD (in memory, without a copy) and MDS on the storage host (ceph-mon, -mgr, -osd, -mds, -fuse).
# shellcheck source=tests/fusefs/mount.sh
. "$(dirname "$0")/mount.sh" "$1" "$2"
kind=${3:-sshfs}
# shellcheck source=tests/fusefs/sshd.sh
[ "$kind" != sshfs ] || . "$(dirname "$0")/sshd.sh"

hosts="1 2 3"
net=cgh$$
daemons=()
servers=()
none_left() { [ -z "$(jobs -rp)" ]; }
ended() { ! grep -qx "$1" <<< "$(jobs -rp)"; }
# Bounded, whatever hangs: who serves a store goes with all that it started, which ends what waits for it.
at_end() {
    kill -KILL $(jobs -rp)
    for host in $hosts s; do
        ip netns pids "$net-$host" | xargs -r kill -KILL
    done
    for host in $hosts; do
        umount -l "$tmp/mnt$host"
        umount -l "$tmp/store$host"
    done
    umount -l "$store"
    wait_for 10 none_left
    for host in $hosts s; do
        ip netns del "$net-$host"
    done
} 2> /dev/null
# Namespaces without `ip netns exec`, which would hide the mounts from us.
at() { nsenter --net="/run/netns/$net-$1" "${@:2}"; }
make_network() {
    ip netns add "$net-s" && at s ip link set lo up && at s ip link add hub type bridge &&
        at s ip addr add 10.77.0.254/24 dev hub && at s ip link set hub up || return 1
    for host in $hosts; do
        ip netns add "$net-$host" &&
            ip link add "v$host" netns "$net-s" type veth peer name v netns "$net-$host" &&
            at s ip link set "v$host" master hub up && at "$host" ip link set lo up &&
            at "$host" ip addr add "10.77.0.$host/24" dev v && at "$host" ip link set v up || return 1
    done
}
make_network 2> "$tmp/network" || skip netns "no network namespaces: hosts are not checked ($(tail -n 1 "$tmp/network"))"

# serve: a server for $store; reach HOST: the host's way to it.
serve_sshfs() {
    start_sshd 10.77.0.254 nsenter --net="/run/netns/$net-s" # not by a function: it would run in a shell that waits for it
}
reach_sshfs() { # ssh gives up what does not answer for 6 s
    at "$1" sshfs "${ssh_options[@]}" -o reconnect,ServerAliveInterval=2,ServerAliveCountMax=3,ConnectTimeout=4 \
        "$(id -un)@10.77.0.254:$store" "$tmp/store$1" > "$tmp/sshfs$1" 2>&1
}
# shellcheck disable=SC2016
serve_gluster() {
    command -v glusterd > /dev/null || skip gluster "no glusterd: hosts are not checked over Gluster"
    # All of a daemon's places are its own; of mounts of others no copy stays, which would keep them busy.
    local run='awk "\$2 ~ /^\/tmp/ {print \$2}" /proc/mounts | xargs -r umount -l 2> /dev/null
        for at in /run /var/lib/glusterd /var/log/glusterfs; do mount -t tmpfs none $at; done
        mkdir /run/gluster; exec glusterd -N -l "$1"'
    for host in $hosts; do
        mkdir "$tmp/brick$host"
        nsenter --net="/run/netns/$net-$host" unshare -m sh -c "$run" sh "$tmp/glusterd$host" > "$tmp/glusterd$host.out" 2>&1 &
        servers+=($!) # itself, and not a shell that waits for it
    done
    peers() { [ "$(gluster1 pool list | grep -c Connected)" = 3 ]; }
    gluster1() { nsenter -m -n -t "${servers[0]}" gluster --mode=script "$@"; }
    { wait_for 60 gluster1 pool list && wait_for 60 gluster1 peer probe 10.77.0.2 &&
        wait_for 60 gluster1 peer probe 10.77.0.3 && wait_for 60 peers &&
        gluster1 volume create v replica 3 10.77.0.1:"$tmp/brick1" 10.77.0.2:"$tmp/brick2" 10.77.0.3:"$tmp/brick3" force &&
        gluster1 volume set v network.ping-timeout 5 && gluster1 volume start v &&
        wait_for 60 mount_gluster s "$store"; } > "$tmp/gluster" 2>&1 || { cat "$tmp/gluster"; skip gluster "no volume"; }
}
mount_gluster() {
    at "$1" glusterfs --volfile-server=10.77.0.1 --volfile-server=10.77.0.2 --volfile-id=v -l "$tmp/client$1" "$2" &&
        mountpoint -q "$2" && touch "$2"
}
reach_gluster() { mount_gluster "$1" "$tmp/store$1"; }
serve_ceph() {
    local program at=10.77.0.254 fsid osd
    for program in ceph-mon ceph-mgr ceph-osd ceph-mds ceph-fuse; do
        command -v $program > /dev/null || skip ceph "no $program: hosts are not checked over CephFS"
    done
    fsid=$(cat /proc/sys/kernel/random/uuid)
    osd=$(cat /proc/sys/kernel/random/uuid)
    mkdir -p "$tmp"/ceph/{mon,mgr,osd,mds,run}
    # A host that was cut off comes back as it was: with the defaults Ceph would shut it out until it is mounted again.
    # Whoever waits for what it holds waits for session_timeout (below).
    cat > "$tmp/ceph/conf" << END
[global]
fsid = $fsid
mon host = v2:$at:3300
public addr = $at
auth cluster required = none
auth service required = none
auth client required = none
mon data = $tmp/ceph/mon
mgr data = $tmp/ceph/mgr
osd data = $tmp/ceph/osd
mds data = $tmp/ceph/mds
run dir = $tmp/ceph/run
admin socket = $tmp/ceph/run/\$name.\$pid.asok
log file = $tmp/ceph/\$name.log
crash dir = $tmp/ceph/run
osd objectstore = memstore
memstore device bytes = 2147483648
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data avail crit = 1
mds session blocklist on timeout = false
mds session blocklist on evict = false
client reconnect stale = true
client mount timeout = 20
[client]
public addr =
END
    ceph_s() { at s timeout 60 ceph -c "$tmp/ceph/conf" --connect-timeout 20 "$@"; }
    ceph_daemon() { at s "ceph-$1" -c "$tmp/ceph/conf" -i "$2" -f > "$tmp/ceph/$1.out" 2>&1 & }
    is_active() { ceph_s mds stat | grep -q active; }
    { monmaptool --create --addv a "[v2:$at:3300]" --fsid "$fsid" "$tmp/ceph/map" &&
        ceph-mon -c "$tmp/ceph/conf" --mkfs -i a --monmap "$tmp/ceph/map" && ceph_daemon mon a &&
        wait_for 60 ceph_s status && ceph_daemon mgr a && ceph_s osd new "$osd" &&
        at s ceph-osd -c "$tmp/ceph/conf" -i 0 --mkfs --osd-uuid "$osd" && ceph_daemon osd 0 &&
        ceph_s osd pool create names 8 && ceph_s osd pool create bytes 8 && ceph_s fs new store names bytes &&
        ceph_s fs set store session_timeout 30 && ceph_daemon mds a && wait_for 120 is_active &&
        wait_for 60 mount_ceph s "$store"; } > "$tmp/ceph.out" 2>&1 || { tail -n 20 "$tmp/ceph.out"; skip ceph "no CephFS"; }
}
mount_ceph() {
    at "$1" ceph-fuse -c "$tmp/ceph/conf" "$2" > "$tmp/client$1" 2>&1 && mountpoint -q "$2" && touch "$2"
}
reach_ceph() { mount_ceph "$1" "$tmp/store$1"; }

"serve_$kind"
silent=20 # seconds; beats come every 3
reach() { mountpoint -q "$tmp/store$1" || "reach_$kind" "$1"; }
start() {
    local host=$1
    shift
    mkdir -p "$tmp/store$host" "$tmp/mnt$host"
    wait_for 30 reach "$host" || skip "$kind" "the store cannot be reached in a network namespace"
    "$cachegenfs" "$tmp/store$host" "$tmp/mnt$host" -f -o "dead_after=${silent}s" "$@" >> "$tmp/log" 2>&1 &
    daemons[host]=$!
    check "host $host is up" wait_for 30 test -e "$tmp/mnt$host/.cachegenfs/version"
}
end() { # HOST SIGNAL
    kill "-$2" "${daemons[$1]}"
    check "host $1 ends" wait_for 60 ended "${daemons[$1]}"
    ended "${daemons[$1]}" && wait "${daemons[$1]}" 2> /dev/null
    umount -l "$tmp/mnt$1" 2> /dev/null
    return 0
}
n_folders() { find "$store/.cachegenfs-tmp" -mindepth 1 -maxdepth 1 -type d | wc -l; }
folders_are() { [ "$(n_folders)" = "$1" ]; }
whole() { "$cachegenfs" fsck "$store"; }

for host in $hosts; do start $host; done
check "each has a folder" wait_for 10 folders_are 3
"$chunk_files" nest "$tmp/source" 6 60000 1
mkdir -p "$tmp"/mnt1/m/contexts/{a,b}/L1
check "a context comes by one host" cp -r "$tmp/source/." "$tmp/mnt1/m/contexts/a/"
for host in 2 3; do
    check "host $host has it by name at once" cmp "$tmp/source/L1/00003.kv" "$tmp/mnt$host/m/contexts/a/L1/00003.kv"
    check "and in listings" wait_for 60 same_tree "$tmp/mnt1/m/contexts/a" "$tmp/mnt$host/m/contexts/a"
done

# write_slowly HOST NAME: half of a file now, the rest after write_rest HOST, which returns the status of the close.
writers=()
write_slowly() {
    rm -f "$tmp/half$1" "$tmp/go$1"
    python3 - "$tmp/source/L1/$2" "$tmp/mnt$1/m/contexts/b/L1/$2" "$tmp/half$1" "$tmp/go$1" << 'END' > /dev/null 2>&1 &
import os, sys, time
data = open(sys.argv[1], "rb").read()
fd = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
os.write(fd, data[:len(data) // 2])
os.close(os.open(sys.argv[3], os.O_CREAT))
while not os.path.exists(sys.argv[4]):
    time.sleep(0.05)
os.write(fd, data[len(data) // 2:])
os.close(fd)
END
    writers[$1]=$!
    check "host $1 has a file under way" wait_for 30 test -e "$tmp/half$1"
}
write_rest() {
    : > "$tmp/go$1"
    wait "${writers[$1]}"
}

# Two files under way: host 1 lives, host 2 is killed.
write_slowly 1 00000.kv
write_slowly 2 00001.kv
end 2 KILL
check "what a killed daemon of another host left goes" wait_for 120 folders_are 2
check "what a living one writes stays" wait_for 60 staged_are 1
check "and is published" write_rest 1
check "as it was written" cmp "$tmp/source/L1/00000.kv" "$store/m/contexts/b/L1/00000.kv"
check "the other one fails" fails write_rest 2
check "and is not there" [ ! -e "$store/m/contexts/b/L1/00001.kv" ]
start 2
check "a killed host comes back" wait_for 20 folders_are 3
check "and publishes" cp "$tmp/source/L1/00001.kv" "$tmp/mnt2/m/contexts/b/L1/"

# Where locks reach other hosts, nobody publishes what is written to there.
if [ "$kind" = ceph ]; then
    exec 7> "$tmp/mnt1/m/file"
    cat "$tmp/source/L1/00005.kv" >&7
    check "host 2 has the file" wait_for 30 cmp "$tmp/source/L1/00005.kv" "$tmp/mnt2/m/file"
    is_busy() { LC_ALL=C mv "$tmp/mnt2/m/file" "$tmp/mnt2/m/contexts/b/L1/00005.kv" 2>&1 | grep 'busy'; }
    check "and cannot publish it" is_busy
    exec 7>&-
    check "until it is closed" wait_for 30 mv "$tmp/mnt2/m/file" "$tmp/mnt2/m/contexts/b/L1/00005.kv"
fi

# Host 3 is cut off with a file under way.
write_slowly 3 00002.kv
at s ip link set v3 down
check "the others clean up after who was cut off" wait_for 120 folders_are 2
check "and go on" cp "$tmp/source/L1/00003.kv" "$tmp/mnt1/m/contexts/b/L1/"
at s ip link set v3 up
check "it comes back, under another name" wait_for 120 folders_are 3
check "what it had under way is lost, with an error" fails write_rest 3
check "and is not there" [ ! -e "$store/m/contexts/b/L1/00002.kv" ]
publishes_again() { cp "$tmp/source/L1/00004.kv" "$tmp/mnt3/m/contexts/b/L1/"; }
check "it publishes again" wait_for 60 publishes_again
check "the others have it" wait_for 60 cmp "$tmp/source/L1/00004.kv" "$tmp/mnt1/m/contexts/b/L1/00004.kv"
check "it says what happened" grep -q 'files that are being written was gone' "$tmp/log"
# (Over Gluster the storage host may come to host 3's third of the store a while after host 3 does.)
check "every name is whole" wait_for 60 whole

# An evictor that is killed with the lease, and two at once.
used_kib() { du -sk "$store/m" | cut -f1; }
fill() {
    rm -rf "$store/m"
    for i in 0 1 2 3 4 5 6 7 8 9; do "$chunk_files" objects "$store/m" 8 40000 "$i"; done
    find "$store/m/objects" -name '*.kv' -exec touch -d "9 days ago" {} +
}
lease=$store/.cachegenfs-tmp/evicting
in_quota() { [ "$(used_kib)" -le 4864 ] && [ ! -e "$lease" ]; }
for host in $hosts; do end $host TERM; done
check "who ends takes its folder along" equal "$(n_folders)" 0
fill
start 1 -o quota=5M
check "one makes room" wait_for 30 test -e "$lease"
end 1 KILL
check "every name is whole" whole
start 2 -o quota=5M
start 3 -o quota=5M
check "the others make room, when the first is dead" wait_for 120 in_quota
check "no more than is wanted" [ "$(used_kib)" -gt 2000 ]
check "every name is whole" whole
end 2 TERM
end 3 TERM
fill
start 2 -o quota=5M
start 3 -o quota=5M
for _ in $(seq 300); do rm -f "$lease"; done
check "two make room at once" wait_for 120 in_quota
check "every name is whole" whole
check "some is left" [ "$(used_kib)" -gt 1000 ]
report
