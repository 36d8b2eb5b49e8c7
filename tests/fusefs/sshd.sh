# tests/fusefs/sshd.sh - a server for sshfs that lets this user in by a key of its own. Sourced after mount.sh.

command -v sshd > /dev/null || [ -x /usr/sbin/sshd ] || skip sshfs "no sshd: nothing is checked through sshfs"
command -v sshfs > /dev/null || skip sshfs "no sshfs: nothing is checked through it"
sftp_server=$(ls /usr/lib/openssh/sftp-server /usr/libexec/sftp-server /usr/libexec/openssh/sftp-server 2> /dev/null | head -n 1)
[ "$(id -u)" = 0 ] || skip sshfs "not root: sshd lets in nobody"

# start_sshd ADDRESS [COMMAND...]: run by COMMAND, as in a network namespace. Sets $server (a job), $port, $ssh_options.
start_sshd() {
    local address=$1
    shift
    mkdir -m 700 "$tmp/ssh"
    ssh-keygen -q -t ed25519 -N '' -f "$tmp/ssh/host"
    ssh-keygen -q -t ed25519 -N '' -f "$tmp/ssh/user"
    cp "$tmp/ssh/user.pub" "$tmp/ssh/authorized"
    mkdir -p /run/sshd
    port=$("$@" python3 -c 'import socket, sys; s = socket.socket(); s.bind((sys.argv[1], 0)); print(s.getsockname()[1])' "$address")
    "$@" "$(command -v sshd || echo /usr/sbin/sshd)" -D -e -f /dev/null -p "$port" -h "$tmp/ssh/host" \
        -o ListenAddress="$address" -o UsePAM=no -o StrictModes=no -o AuthorizedKeysFile="$tmp/ssh/authorized" \
        -o PermitRootLogin=prohibit-password -o PidFile=none -o Subsystem="sftp $sftp_server" > "$tmp/ssh/log" 2>&1 &
    server=$!
    ssh_options=(-p "$port" -o IdentityFile="$tmp/ssh/user" -o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no
        -o LogLevel=ERROR -o BatchMode=yes)
}
