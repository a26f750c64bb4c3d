#!/bin/sh
# Messages over RoCEv2 in software, between two network namespaces, without losses and with one packet in 256 lost in each
# direction; beside it TCP: iperf3, and the same calls. About two minutes. Results go to $OUT/demo-rdma; needs root.
#
# Both have the same MTU, 4200: what RoCEv2 needs for its largest packets, of 4096 bytes. Offloads of the link are off, so
# that nftables sees and drops packets, and not what the kernel would cut into packets later.
set -eu
cd "$(dirname "$0")/.."
perf=${PERF:-${CARGO_TARGET_DIR:-target}/release/bifrost-perf}
# What runs in the namespaces goes before the machine's other work, TCP's programs as well: hosts do not lend theirs.
first="nice -n -10"
out=${OUT:-out}/demo-rdma
seconds=${SECONDS_EACH:-5}
calls=${CALLS:-20000}
tcp_calls=${TCP_CALLS:-2000}
mtu=4096
mkdir -p "$out"

a=rdma-$$-a
b=rdma-$$-b
pids=""
clean() {
    for pid in $pids; do kill "$pid" 2>/dev/null || true; done
    ip netns del "$a" 2>/dev/null || true
    ip netns del "$b" 2>/dev/null || true
}
trap clean EXIT
trap 'exit 1' INT TERM

# What earlier runs left that were killed: their process is gone.
for left in $(ip netns list | sed -n 's/^\(rdma-[0-9]*-[ab]\).*/\1/p'); do
    owner=${left#rdma-}
    kill -0 "${owner%-*}" 2>/dev/null || ip netns del "$left"
done

ip netns add "$a"
ip netns add "$b"
ip link add e0 netns "$a" type veth peer name e0 netns "$b"
for end in "$a" "$b"; do
    n=1
    [ "$end" = "$b" ] && n=2
    ip -n "$end" addr add "fd00:d::$n/64" dev e0 nodad
    ip -n "$end" link set lo up
    ip -n "$end" link set e0 mtu 4200 up
    ip netns exec "$end" ethtool -K e0 tso off gso off gro off tx-udp-segmentation off
done

lose() {
    for end in "$a" "$b"; do
        ip netns exec "$end" nft flush ruleset
        [ "$1" = 0 ] && continue
        ip netns exec "$end" nft "table inet demo { chain arriving { type filter hook input priority 0; }; }"
        ip netns exec "$end" nft "add rule inet demo arriving iifname e0 meta l4proto { tcp, udp } numgen random mod $1 0 counter drop"
    done
}

ip netns exec "$b" $first "$perf" server -b fd00:d::2 -m "$mtu" 2>"$out/server.log" &
pids="$pids $!"
ip netns exec "$b" $first iperf3 -s >"$out/iperf3.log" 2>&1 &
pids="$pids $!"
tries=0
until ip netns exec "$b" ss -Htln | grep -q :18516 && ip netns exec "$b" ss -Htln | grep -q :5201; do
    tries=$((tries + 1))
    [ "$tries" -lt 100 ] || { echo "demo-rdma.sh: the servers do not listen; see $out" >&2; exit 1; }
    sleep 0.1
done

client() { ip netns exec "$a" $first "$perf" "$@" -b fd00:d::1 -m "$mtu" --json; }
for loss in 0 256; do
    lose "$loss"
    echo "== $([ "$loss" = 0 ] && echo "without losses" || echo "one packet in $loss lost")"
    echo "   bulk, messages of 1 MiB, $seconds s"
    client bw fd00:d::2 -s 1048576 -D "$seconds" >"$out/bw-rdm-$loss.json"
    echo "   bulk, TCP (iperf3), $seconds s"
    ip netns exec "$a" $first iperf3 -6 -c fd00:d::2 -t "$seconds" --json >"$out/bw-tcp-$loss.json"
    echo "   $calls calls of 32 KiB, messages"
    client lat fd00:d::2 -s 32768 -n "$calls" >"$out/lat-rdm-$loss.json"
    echo "   $tcp_calls calls of 32 KiB, TCP"
    client lat fd00:d::2 --tcp -s 32768 -n "$tcp_calls" >"$out/lat-tcp-$loss.json"
done
"$perf" compare "$out"
