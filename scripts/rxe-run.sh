#!/bin/sh
# Runs a command in a virtual machine whose kernel has soft-RoCE (rxe), built by scripts/build-rxe-kernel.sh. Its root
# is this machine's root file system, read-only, so programs have the same paths. Prints the command's output, and
# exits with its status; 77 if the kernel is missing.
#
#     scripts/rxe-run.sh [-t SECONDS] COMMAND [ARGUMENT]...
#
# In the machine, MTU 9000 on all interfaces:
#   rxe0 at 10.9.0.1 and fd00:9::1, on a veth to the network namespace `peer`, 10.9.0.2 and fd00:9::2, without RDMA
#   rxe1 at 10.9.1.1 and rxe2 at 10.9.1.2, on the two ends of a veth
# $LOSS, percent: packet loss by netem in each direction on both; 0, the default: none.
# $SHARE: a directory of this machine that is mounted at /mnt, writable.
set -eu

timeout=300
if [ "${1:-}" = -t ]; then
    timeout=$2
    shift 2
fi
[ $# -gt 0 ] || {
    echo "rxe-run.sh: which command?" >&2
    exit 2
}
kernel=${RXE_KERNEL:-/var/cache/bifrost-lab/rxe-kernel/linux}
xstate=/var/cache/bifrost-lab/uml-xstate.so
[ -x "$kernel" ] || {
    echo "rxe-run.sh: SKIPPED: no $kernel; scripts/build-rxe-kernel.sh builds it in about 12 minutes" >&2
    exit 77
}
[ -e "$xstate" ] || {
    echo "rxe-run.sh: SKIPPED: no $xstate; scripts/install-debian-packages.sh builds it" >&2
    exit 77
}

run=$(mktemp -d "${TMPDIR:-/tmp}/bifrost-rxe.XXXXXX")
trap 'rm -rf "$run"' EXIT
trap 'exit 1' INT TERM
share=${SHARE:-$run/share}
mkdir -p "$run/uml" "$run/share"
# The command, quoted so that a shell parses the same words.
quoted=
for word in "$@"; do
    quoted="$quoted '$(printf %s "$word" | sed "s/'/'\\\\''/g")'"
done
cat >"$run/init" <<END
#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/run TMPDIR=/run
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /run
mount -t hostfs -o $share none /mnt
mkdir -p /run/netns /run/status
mount -t hostfs -o $run none /run/status
set -e
ip link set lo up
ip netns add peer
ip link add e0 mtu 9000 type veth peer name e0 mtu 9000 netns peer
ip link add e1 mtu 9000 type veth peer name e2 mtu 9000
for e in 0 1 2; do
    # Packets between addresses of one host leave it and return.
    for setting in rp_filter=0 accept_local=1; do
        echo "\${setting#*=}" >/proc/sys/net/ipv4/conf/e\$e/"\${setting%=*}"
    done
done
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
ip addr add 10.9.0.1/24 dev e0
ip addr add fd00:9::1/64 dev e0 nodad
ip addr add 10.9.1.1/24 dev e1
ip addr add 10.9.1.2/24 dev e2
ip -n peer addr add 10.9.0.2/24 dev e0
ip -n peer addr add fd00:9::2/64 dev e0 nodad
ip -n peer link set lo up
ip -n peer link set e0 up
for e in 0 1 2; do
    ip link set e\$e up
    rdma link add rxe\$e type rxe netdev e\$e
done
if [ "${LOSS:-0}" != 0 ]; then
    for e in 0 1 2; do tc qdisc add dev e\$e root netem limit 10000 loss ${LOSS:-0}%; done
    tc -n peer qdisc add dev e0 root netem limit 10000 loss ${LOSS:-0}%
fi
set +e
cd /run
$quoted </dev/null
echo \$? >/run/status/status
busybox poweroff -f
END
chmod 755 "$run/init"
# The kernel's own messages go to a file; the console goes to this program's output.
timeout -k 5 "$timeout" setpriv --pdeathsig KILL env LD_PRELOAD="$xstate" "$kernel" mem=768M quiet con=null con0=fd:0,fd:1 \
    root=/dev/root rootfstype=hostfs rootflags=/ ro umid=rxe uml_dir="$run/uml" init="$run/init" \
    </dev/null 2>"$run/messages" || true
if [ -s "$run/status" ]; then
    exit "$(cat "$run/status")"
fi
echo "rxe-run.sh: the command did not end within $timeout s, or the machine did not boot" >&2
tail -n 20 "$run/messages" >&2
exit 1
