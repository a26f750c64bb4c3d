#!/bin/sh
# Packets of four tenants through a gateway pod, while one of them bursts. About a minute; results go to
# $OUT/demo-gateway; needs root.
#
# Two hosts and the gateway are network namespaces on a bridge. Each tenant has a kernel VXLAN interface on either
# host and sends UDP (iperf3) from one to the other, through the gateway, because the two are in different subnets.
# The pod has two workers with a service time of 200 us on average: about 10,000 packets a second. The last tenant
# alone sends 20,000 for a third of the time.
# Three runs: spread by flow as with receive-side scaling; sprayed; and sprayed with the limiter.
set -eu
cd "$(dirname "$0")/.."
bin=${BIN:-${CARGO_TARGET_DIR:-target}/release}
out=${OUT:-out}/demo-gateway
seconds=${SECONDS_EACH:-9}
pps=500
burst=20000
size=200
mkdir -p "$out"
work=$(mktemp -d /tmp/demo-gateway.XXXXXX)

n=gwdemo-$$
pids=""
clean() {
    for pid in $pids; do kill "$pid" 2>/dev/null || true; done
    for pid in $pids; do wait "$pid" 2>/dev/null || true; done
    for end in sw gw a b; do ip netns del "$n-$end" 2>/dev/null || true; done
    rm -rf "$work"
}
trap clean EXIT
trap 'exit 1' INT TERM

# Remove what earlier, killed runs left behind: their process is gone.
for left in $(ip netns list | sed -n 's/^\(gwdemo-[0-9]*-[a-z]*\).*/\1/p'); do
    owner=${left#gwdemo-}
    kill -0 "${owner%-*}" 2>/dev/null && continue
    # Their programs may still be running. A pod ends with its pipeline.
    for pid in $(ip netns pids "$left"); do kill "$pid" 2>/dev/null || true; done
    ip netns del "$left"
done

for end in sw gw a b; do
    ip netns add "$n-$end"
    ip -n "$n-$end" link set lo up
done
ip -n "$n-sw" link add br0 mtu 1600 type bridge
ip -n "$n-sw" link set br0 up
for end in gw a b; do
    ip link add up0 mtu 1600 netns "$n-$end" type veth peer name "to-$end" mtu 1600 netns "$n-sw"
    ip -n "$n-sw" link set "to-$end" master br0 up
    ip -n "$n-$end" link set up0 up
    # The sender completes checksums: no device behind it would.
    ip netns exec "$n-$end" ethtool -K up0 tx off tso off gso off gro off >/dev/null
done
ip -n "$n-a" addr add 10.0.0.11/24 dev up0
ip -n "$n-b" addr add 10.0.0.12/24 dev up0

# Tenant t has VNI 100 + t, 10.t.1.1 on host a and 10.t.2.1 on host b; the gateway is .254 of both subnets.
for t in 1 2 3 4; do
    for end in a b; do
        [ "$end" = a ] && side=1 || side=2
        [ "$end" = a ] && other=2 || other=1
        ip -n "$n-$end" link add "vx$t" address "02:00:00:0$t:00:0$side" mtu 1500 type vxlan id $((100 + t)) \
            local "10.0.0.1$side" remote 10.0.0.1 dstport 4789 nolearning
        ip -n "$n-$end" addr add "10.$t.$side.1/24" dev "vx$t"
        ip -n "$n-$end" link set "vx$t" up
        ip -n "$n-$end" route add "10.$t.$other.0/24" via "10.$t.$side.254"
    done
done

configure() {
    cat >"$work/nicd.toml" <<EOF
control = { socket = "$work/nicd.sock" }
device = { name = "up0", mtu = 1600, frames = 4096 }
[[pods]]
name = "vpc"
number = 1
cores = 2
order_queues = 2
timeout_us = 50000
mode = "$1"
own = ["10.0.0.1"]
interfaces = [{ socket = "$work/vpc.sock" }]
limiter = { first_packets_per_second = $2, second_packets_per_second = $(($2 / 4)), burst_packets = 64 }
EOF
    cat >"$work/gw.toml" <<EOF
control = { socket = "$work/gw.sock" }
[gateway]
pod = 1
cores = 2
interfaces = ["$work/vpc.sock"]
addresses = ["10.0.0.1"]
mac = "02:00:00:00:00:fe"
on_link = ["10.0.0.0/24"]
[tests]
jitter_us = 300
EOF
    for t in 1 2 3 4; do
        cat >>"$work/gw.toml" <<EOF
[[vpcs]]
vni = $((100 + t))
routers = ["10.$t.1.254", "10.$t.2.254"]
routes = [{ prefix = "10.$t.0.0/16", to = "local" }]
hosts = [
  { address = "10.$t.1.1", mac = "02:00:00:0$t:00:01", vtep = "10.0.0.11" },
  { address = "10.$t.2.1", mac = "02:00:00:0$t:00:02", vtep = "10.0.0.12" },
]
EOF
    done
}

wait_for() {
    tries=0
    until "$@" >/dev/null 2>&1; do
        tries=$((tries + 1))
        [ "$tries" -lt 100 ] || { echo "demo-gateway.sh: timeout: $*" >&2; cat "$work"/*.log >&2; exit 1; }
        sleep 0.1
    done
}

send() {
    # Packets a second, seconds, tenant.
    ip netns exec "$n-a" iperf3 -u -c "10.$3.2.1" -l "$size" -b "$(($1 * size * 8))" -t "$2" --json --get-server-output \
        >"$out/$run-$3.json" 2>&1
}

for t in 1 2 3 4; do
    ip netns exec "$n-b" iperf3 -s -J -B "10.$t.2.1" >"$work/iperf-$t.log" 2>&1 &
    pids="$pids $!"
done
for run in flows sprayed limited; do
    case $run in
        flows) configure rss 1000000000; text="by flow, no limiter" ;;
        sprayed) configure plb 1000000000; text="sprayed and put in order, no limiter" ;;
        limited) configure plb 3000; text="sprayed and put in order, the limiter in front" ;;
    esac
    echo "== $text: $seconds s"
    ip netns exec "$n-gw" nice -n -10 "$bin/bifrost-nicd" -c "$work/nicd.toml" 2>"$work/nicd.log" &
    nicd=$!
    nice -n -10 "$bin/bifrost-gw" -c "$work/gw.toml" 2>"$work/gw.log" &
    gw=$!
    pids="$pids $nicd $gw"
    for t in 1 2 3 4; do wait_for ip netns exec "$n-a" timeout 3 iperf3 -u -c "10.$t.2.1" -n 200 --connect-timeout 500; done
    senders=""
    for t in 1 2 3; do
        send "$pps" "$seconds" "$t" &
        senders="$senders $!"
    done
    sleep $((seconds / 3))
    send "$burst" $((seconds / 3)) 4 &
    senders="$senders $!"
    pids="$pids $senders"
    for pid in $senders; do wait "$pid" || true; done
    "$bin/bifrost-nicd" -c "$work/nicd.toml" --json >"$out/$run-nicd.json"
    "$bin/bifrost-gw" -c "$work/gw.toml" --json >"$out/$run-gw.json"
    kill "$gw" && wait "$gw"
    kill "$nicd" && wait "$nicd"
done
"$bin/examples/gateway-report" "$out"
