#!/bin/sh
# Three hosts managed centrally: a relay, and an agent and a daemon on each host, in network namespaces on a bridge.
# Commands create a network; then its relay is killed while a stream runs. Half a minute; results go to
# $OUT/demo-fleet; needs root.
# With --etcd the relay keeps objects in etcd, which is built with Go, instead of in a directory.
set -eu
cd "$(dirname "$0")/.."
case "${1:-}" in
"") etcd="" ;;
--etcd) etcd=$(scripts/install-etcd.sh) ;;
*) echo "usage: demo-fleet.sh [--etcd]" >&2 && exit 2 ;;
esac
bin=$(cd "${BIN:-${CARGO_TARGET_DIR:-target}/release}" && pwd)
out=${OUT:-out}/demo-fleet
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d /tmp/demo-fleet.XXXXXX)
n=fldemo-$$
pids=""
namespaces="sw h1 h2 h3 web db cache"
clean() {
    for pid in $pids; do kill -9 "$pid" 2>/dev/null || true; done
    for pid in $pids; do wait "$pid" 2>/dev/null || true; done
    for end in $namespaces; do ip netns del "$n-$end" 2>/dev/null || true; done
    rm -rf "$work"
}
trap clean EXIT
trap 'exit 1' INT TERM

# Remove what earlier, killed runs left behind: their process is gone.
for left in $(ip netns list | sed -n 's/^\(fldemo-[0-9]*-[a-z0-9]*\).*/\1/p'); do
    owner=${left#fldemo-}
    kill -0 "${owner%-*}" 2>/dev/null && continue
    for pid in $(ip netns pids "$left"); do kill "$pid" 2>/dev/null || true; done
    ip netns del "$left"
done

# Runs a program in a namespace, in the background: NAMESPACE LOG PROGRAM ARGUMENTS...
start() {
    namespace=$n-$1 log=$out/$2.log
    shift 2
    nsenter --net="/run/netns/$namespace" "$@" >"$log" 2>&1 &
    last=$!
    pids="$pids $last"
}
# Waits until a command succeeds: SECONDS WHAT COMMAND...
await() {
    tries=$(($1 * 10)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || { echo "demo-fleet: $what: not in time; the logs are in $out" >&2; exit 1; }
        sleep 0.1
    done
}
fleet() {
    echo "  \$ bifrostctl fleet $*"
    "$bin/bifrostctl" fleet --relay "$work/relay.sock" "$@" >"$work/said" || exit 1
    sed 's/^/      /' "$work/said"
}

echo "== Three hosts on a bridge: each a network namespace with bifrostd and bifrost-agent. A relay stores the configuration."
for end in $namespaces; do
    ip netns add "$n-$end"
    ip -n "$n-$end" link set lo up
done
ip -n "$n-sw" link add br0 mtu 1700 type bridge
ip -n "$n-sw" link set br0 up
ip -n "$n-sw" addr add 192.0.2.254/24 dev br0
store=file:$work/store
if [ -n "$etcd" ]; then
    echo "   It stores it in etcd."
    client=http://192.0.2.254:2379 peer=http://192.0.2.254:2380
    start sw etcd "$etcd" --name m --data-dir "$work/etcd" --listen-client-urls $client --advertise-client-urls $client \
        --listen-peer-urls $peer --initial-advertise-peer-urls $peer --initial-cluster m=$peer \
        --max-txn-ops=1025 --max-request-bytes=6291456 --log-level=warn
    store=etcd:$client
fi
relay() {
    start sw relay "$bin/bifrost-relay" --store "$store" --listen 192.0.2.254:4790 --insecure --socket "$work/relay.sock"
    relay=$last
    await 20 "the relay" "$bin/bifrostctl" fleet --relay "$work/relay.sock" status
}
relay
for h in 1 2 3; do
    ip link add up0 mtu 1700 netns "$n-h$h" type veth peer name "to-h$h" mtu 1700 netns "$n-sw"
    ip -n "$n-sw" link set "to-h$h" master br0 up
    ip -n "$n-h$h" addr add "192.0.2.$h/24" dev up0
    ip -n "$n-h$h" link set up0 up
    printf '[host]\nname = "h%s"\n[control]\nsocket = "%s"\n[underlay]\naddresses = ["192.0.2.%s"]\nmtu = 1700\n' \
        "$h" "$work/h$h.sock" "$h" >"$work/h$h.toml"
    mkdir "$work/h$h"
    start "h$h" "h$h-daemon" "$bin/bifrostd" --config "$work/h$h.toml" --state "$work/h$h"
    await 10 "bifrostd of h$h" "$bin/bifrostctl" --socket "$work/h$h.sock" status
    start "h$h" "h$h-agent" "$bin/bifrost-agent" --relay http://192.0.2.254:4790 --insecure --host "h$h" --socket "$work/h$h.sock"
done

echo
echo "== The three hosts, and a new network."
for h in 1 2 3; do fleet add "host/h$h" "addresses=192.0.2.$h"; done
fleet add vpc/demo/net
fleet add subnet/demo/a vpc=net prefix=10.0.0.0/24
echo
echo "== A container on each host: web, db, cache. Addresses are assigned. The last command waits until every host has them."
fleet add port/demo/web subnets=a host=h1 netns="$n-web"
fleet add port/demo/db subnets=a host=h2 netns="$n-db"
fleet add port/demo/cache subnets=a host=h3 netns="$n-cache" --wait 20
fleet hosts

echo
# Sends for a second: NAMESPACE NAME ADDRESS
reach() {
    if ip netns exec "$n-$1" iperf3 --client "$3" --port 5432 --time 1 --connect-timeout 2000 >"$work/iperf" 2>&1; then
        echo "      $1 to $2, $3: $(sed -n 's/.* \([0-9.]* [MG]bits\/sec\).*receiver/\1/p' "$work/iperf")"
    else
        echo "      $1 to $2, $3: no connection"
    fi
}
echo "== web sends to db and to cache, a second each."
start db db iperf3 --server --port 5432
start cache cache iperf3 --server --port 5432
sleep 0.5
reach web db 10.0.0.3
reach web cache 10.0.0.4

echo
echo "== db accepts port 5432 only from web's group."
cat >"$work/groups.yaml" <<'YAML'
- key: security_group/demo/web
- key: security_group/demo/db
  ingress: [{protocol: tcp, ports: [5432], from: ["group:web"]}]
YAML
sed 's/^/      /' "$work/groups.yaml"
fleet apply -f "$work/groups.yaml"
fleet set port/demo/web security_groups=web
fleet set port/demo/db security_groups=db --wait 20
reach web db 10.0.0.3
reach cache db 10.0.0.3
fleet why port/demo/db

echo
echo "== The relay is killed while web sends to db for six seconds; traffic needs no relay. Then db moves to h3, with its address."
ip netns exec "$n-web" iperf3 --client 10.0.0.3 --port 5432 --time 6 --interval 1 >"$out/stream.log" 2>&1 &
stream=$!
pids="$pids $stream"
sleep 2
kill -9 "$relay"
wait "$stream" || { echo "demo-fleet: the stream has ended; see $out/stream.log" >&2; exit 1; }
sed -n 's/^.* \([0-9]*\.00-[0-9]*\.00\) *sec.* \([0-9.]* [MG]bits\/sec\) *[0-9]* .*/      second \1: \2/p' "$out/stream.log" | head -n 6
relay
ip netns add "$n-db2"
namespaces="$namespaces db2"
fleet set port/demo/db host=h3 netns="$n-db2" --wait 20
start db2 db2 iperf3 --server --port 5432
sleep 0.5
reach web "db on h3" 10.0.0.3
fleet delete port/demo/web port/demo/db port/demo/cache --wait 20
fleet hosts
echo
echo "The logs are in $out. docs/operations/fleet.md explains how to run it on hosts."
