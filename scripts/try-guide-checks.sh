# Sourced by try-guide.sh: tests statements of the operator's guide after its section's blocks have run.
# shellcheck shell=sh
# shellcheck disable=SC2154 # variables of try-guide.sh

after() {
    checks=0
    case $1 in
    "Install") after_install ;;
    "A first network") after_first_network ;;
    "Attach containers") after_containers ;;
    "Attach virtual machines") after_virtual_machines ;;
    "Who may talk to whom") after_groups ;;
    "MTU") after_mtu ;;
    "Firewall") after_firewall ;;
    "Trace" | "Capture") after_trace ;;
    "Faults") after_faults ;;
    "one host") after_one_host ;;
    "Certificates") after_certificates ;;
    "Create a network") after_fleet ;;
    "many hosts") after_many_hosts ;;
    "Install the gateway") after_install_gateway ;;
    "The proxy") after_proxy ;;
    "A host behind the gateway") after_host_behind_gateway ;;
    "Replace a pod") after_replaced_pod ;;
    "Upgrade a gateway") after_upgraded_gateway ;;
    "Remove a gateway") after_removed_gateway ;;
    *) return ;;
    esac
    total=$((total + checks))
    say "after $1: $checks checks"
}

after_install() {
    for host in host-a host-b; do
        check $host "^disabled inactive 640 root " <<'END'
systemctl is-enabled bifrostd || true
systemctl is-active bifrostd || true
stat -c '%a %U' /etc/bifrost/bifrostd.toml
bifrostd --check
ls /usr/share/man/man1/bifrostctl.1.gz /usr/share/man/man8/bifrostd.8.gz /usr/share/doc/bifrost/OPERATIONS.md /usr/share/doc/bifrost/operations/install.md
END
    done
}

after_first_network() {
    # Full packets, in both directions; a TCP connection for the whole trial, in a unit that restarts.
    check host-b "" <<'END'
for port in 5201 6379; do systemd-run -q --unit server-$port -p Restart=always -p NetworkNamespacePath=/run/netns/web1 iperf3 -s -p $port; done
END
    check host-a "1 received.*receiver" <<'END'
ip netns exec web1 ping -c 1 -M do -s 1472 10.0.0.2
ip netns exec web1 iperf3 -c 10.0.0.2 -t 3
systemd-run -q --unit traffic -p Restart=always -p RestartSec=1 -p StartLimitIntervalSec=0 -p NetworkNamespacePath=/run/netns/web1 \
    iperf3 -c 10.0.0.2 -p 6379 -b 1M -t 3600
END
}

after_containers() {
    # A namespace is deleted, and recreated with the same name.
    check host-a "no guest.*1 received" <<'END'
ip netns del web2
for i in $(seq 50); do bifrostctl ports | grep "no guest" && break; sleep 0.1; done
ip netns add web2
for i in $(seq 50); do ip -n web2 link show eth0 >/dev/null 2>&1 && break; sleep 0.1; done
ip netns exec web2 ping -c 1 10.0.0.1
END
}

after_virtual_machines() {
    # It starts while the rest is tested: after_one_host checks it.
    "$vm/package/usr/bin/bifrostctl" --socket "$vm/bifrostd.sock" ports >"$vm/ports" || fail "no daemon: $(cat "$vm/log")"
}

# The machine's own TCP statistics of its port.
virtual_machine() {
    until echo true | on vm1 >"$vm/ssh" 2>&1; do
        [ $(($(date +%s) - began)) -lt $((limit - 60)) ] || fail "vm1 does not answer: $out/vm1.console"
        sleep 2
    done
    "$vm/package/usr/bin/bifrostctl" --socket "$vm/bifrostd.sock" ports >"$vm/ports"
    grep vm1 "$vm/ports" | grep -qv "no guest" || fail "$(cat "$vm/ports")"
    check vm1 "mtu 1500.*virtio_net.*1 received" <<'END'
ip link show dev eth0
ls -l /sys/class/net/eth0/device/driver
ping -c 1 10.0.0.9
END
}

after_groups() {
    check host-a "" <<'END'
systemd-run -q --unit server-80 -p Restart=always -p NetworkNamespacePath=/run/netns/web1 iperf3 -s -p 80
END
    check host-b "receiver.*1 received.*refused: 124" <<'END'
ip netns exec web1 iperf3 -c 10.0.0.1 -p 80 -t 1
ip netns exec web1 ping -c 1 10.0.0.1
ip netns exec web1 timeout 3 bash -c '</dev/tcp/10.0.0.1/22' || echo "refused: $?"
END
    check host-a "group_ingress.*ingress_dropped_group_ingress_packets" <<'END'
bifrostctl ports
bifrostctl drops
END
}

after_mtu() {
    check host-a "10.0.0.2/32 .* 1434 " <<'END'
bifrostctl reload
bifrostctl routes
END
}

after_firewall() {
    nft -f "$out/bifrost.nft" || fail "nft -f"
}

after_trace() {
    check host-a "sent.*dropped.*group_ingress" <<'END'
bifrostctl trace --port web1 --to 10.0.0.2 --tcp 40000:6379
bifrostctl trace --from-peer 192.0.2.2 --vni 100 --from 10.0.0.2 --to 10.0.0.1 --tcp 40000:22
END
}

after_prometheus() {
    # A change that requires a restart is refused as a whole.
    check host-a "restart.*bifrost_path_usable_paths" <<'END'
printf '[control]\nmetrics = "127.0.0.1:9795"\n' >>/etc/bifrost/bifrostd.toml
bifrostctl reload 2>&1 && exit 1
systemctl restart bifrostd
curl -sS http://127.0.0.1:9795/metrics | grep -v '^#'
END
    says_hello
}

says_hello() {
    check host-a "10.0.0.2: icmp_seq" <<'END'
ip netns exec web1 ping -c 1 -w 30 10.0.0.2
END
}

after_faults() {
    check host-a "receiver.*rte.retransmitted_packets +[1-9].*removed 2" <<'END'
bifrostctl fault add --peer host-b --loss 5
bifrostctl fault add --peer host-b --path 1 --down
ip netns exec web1 iperf3 -c 10.0.0.2 -t 5 -R
ip netns exec web1 iperf3 -c 10.0.0.2 -t 5
bifrostctl stats --nonzero rte.retransmitted_packets
bifrostctl fault list
bifrostctl fault clear
END
}

# The sections about reload and restart, and about removal, have no blocks.
after_one_host() {
    virtual_machine
    after_prometheus
    # An error in the file: nothing changes, and the tool names the error.
    check host-a "bifrostd.toml:[0-9]+: .*unknown key.*web1" <<'END'
cp /etc/bifrost/bifrostd.toml /root/good
printf '[host]\nnonsense = 1\n' | cat - /root/good | sed '3d' >/etc/bifrost/bifrostd.toml
bifrostctl reload 2>&1 && exit 1
bifrostctl ports
cp /root/good /etc/bifrost/bifrostd.toml
systemctl reload bifrostd
systemctl is-active bifrostd
END
    # The daemon is killed, and restarts; state that machines need in /run/bifrost is kept.
    check host-a "^active record " <<'END'
echo record >/run/bifrost/vm1.sock.inflight
before=$(systemctl show -P MainPID bifrostd)
kill -9 "$before"
for try in 1 2 3 4 5 6 7 8 9 10; do
    sleep 1
    bifrostctl status >/dev/null 2>&1 && [ "$(systemctl show -P MainPID bifrostd)" != "$before" ] && break
done
systemctl is-active bifrostd
cat /run/bifrost/vm1.sock.inflight
bifrostctl status
END
    says_hello
    scp -q -F "$out/ssh" "$out"/next/bifrost_*.deb host-a:next.deb
    check host-a "next.*replaced.*active" <<'END'
before=$(systemctl show -P MainPID bifrostd)
apt-get install -y ./next.deb
dpkg-query -W bifrost
[ "$(systemctl show -P MainPID bifrostd)" != "$before" ] && echo replaced
systemctl is-active bifrostd
cmp /etc/bifrost/bifrostd.toml /root/good
END
    says_hello
    check host-a "enabled no daemon no configuration $" <<'END'
systemctl is-enabled bifrostd
apt-get remove -y bifrost >/dev/null
pidof bifrostd || echo no daemon
ls /etc/bifrost/bifrostd.toml >/dev/null
apt-get purge -y bifrost >/dev/null
ls /etc/bifrost /usr/share/doc/bifrost /lib/systemd/system/bifrostd.service 2>/dev/null || echo no configuration
systemctl list-unit-files bifrostd.service --no-legend || true
END
}

# The copy that the guide describes in its text.
after_certificates() {
    for file in ca.pem host-b.pem host-b.key; do
        ssh -F "$out/ssh" host-a cat "/etc/bifrost/$file" >"$out/file" || fail "host-a has no $file"
        ssh -F "$out/ssh" host-b "umask 077; cat >/etc/bifrost/$file" <"$out/file" || fail "$file cannot be copied to host-b"
    done
    rm "$out/file"
}

after_fleet() {
    check host-b "3 received" <<'END'
systemctl stop bifrost-agent
ip netns exec db ping -c 3 10.0.0.2
systemctl start bifrost-agent
END
    check host-a "3 received.*0 received" <<'END'
systemctl stop bifrost-relay
ip netns exec web ping -c 3 10.0.0.3
systemctl start bifrost-relay
bifrostctl fleet add security_group/demo/closed
bifrostctl fleet set port/demo/db security_groups=closed --wait 30
ip netns exec web ping -c 1 -W 1 10.0.0.3 || true
END
}

# The page about the gateway begins on machines without Bifrost, and has a router.
after_many_hosts() {
    for host in host-a host-b; do
        check $host "^no daemon $" <<'END'
systemctl stop traffic server-80 server-5201 server-6379 2>/dev/null || true
for name in $(ip netns list | cut -d ' ' -f 1); do ip netns del "$name"; done
dpkg-query -W -f '${Package} ' 'bifrost*' 2>/dev/null | xargs -r apt-get purge -y >/dev/null
pidof bifrostd bifrost-agent bifrost-relay || echo no daemon
END
    done
    boot 3 router
    await 3 router
    # What is behind the router: the Internet.
    check router "" <<'END'
ip address add 198.51.100.7/32 dev lo
systemd-run -q --unit internet -p Restart=always iperf3 -s -B 198.51.100.7
END
}

# The gateway takes frames with their checksums only: this end of its device computes them. User-mode Linux opens the
# device when eth2 comes up, which turns its offloads on.
after_install_gateway() {
    ethtool -K g2 tx off >/dev/null || fail "the checksums of g2 cannot be computed here"
}

# The copy that the guide describes in its text.
after_proxy() {
    ssh -F "$out/ssh" host-b cat switch.conf >"$out/switch.conf" || fail "host-b has no switch.conf"
    ssh -F "$out/ssh" router "cat >/etc/frr/frr.conf" <"$out/switch.conf" || fail "switch.conf cannot be copied"
}

# A TCP connection through the translation, until the gateway is removed.
after_host_behind_gateway() {
    check host-a "^active $" <<'END'
systemd-run -q --unit stream -p NetworkNamespacePath=/run/netns/web1 iperf3 -c 198.51.100.7 -b 200K -t 3600
sleep 2
systemctl is-active stream
END
    check router "198\.51\.100\.7:5201 +203\.0\.113\.8:" <<'END'
ss -Htn state established sport = :5201
END
    stream_goes_on
}

stream_goes_on() {
    check router "goes on" <<'END'
received() {
    ss -Htin state established sport = :5201 | grep -o 'bytes_received:[0-9]*' | cut -d : -f 2 | sort -n | tail -n 1
}
before=$(received)
for try in $(seq 20); do
    sleep 1
    [ "$(received)" -gt $((before + 20000)) ] && echo "goes on" && break
done
END
}

after_replaced_pod() {
    stream_goes_on
    # From now on it is the newer package that the operator has.
    ssh -F "$out/ssh" host-b "rm bifrost-gateway_*.deb" || fail "host-b has no package"
    scp -q -F "$out/ssh" "$out"/next/bifrost-gateway_*.deb host-b: || fail "host-b: no newer package"
}

after_upgraded_gateway() {
    check host-b "next.*localhost/bifrost-gw:2.*vpc-1 +running +1 of 1 up" <<'END'
dpkg-query -W bifrost-gateway
podman inspect --format '{{.ImageName}}' bifrost-gw-vpc-1
for try in $(seq 50); do bifrostctl gw pod list | grep "1 of 1 up" && break; sleep 0.2; done
END
    stream_goes_on
}

after_removed_gateway() {
    check host-b "^no pipeline no pods no state $" <<'END'
pidof bifrost-nicd bifrost-gw || echo no pipeline
[ -n "$(podman ps --all --quiet)" ] || echo no pods
ls -d /etc/bifrost/nicd.toml /var/lib/bifrost/nicd /var/lib/bifrost/gw 2>/dev/null || echo no state
END
    check router "^no routes $" <<'END'
for try in $(seq 50); do ip route | grep bgp >/dev/null || break; sleep 0.2; done
ip route | grep bgp || echo no routes
END
}
