//! IPv6 autoconfiguration of guests: a kernel learns its router from advertisements, and a real client (`dhclient -6`)
//! gets its address.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Stdio};

use crate::common::host::vpc;
use crate::common::traffic::ping;
use crate::common::{Guest, Lab, Net, Options, eventually};

const ROUTER: &str = "fe80::bf:ff:fe00:1";

/// Script that the client runs on events: it applies the lease, and writes it to a file atomically. (BusyBox's shell
/// has a built-in `ip`, which does not know `nodad`.)
const SCRIPT: &str = "#!/bin/sh -e\n\
    [ \"$reason\" = BOUND6 ] || exit 0\n\
    ip -6 addr add \"$new_ip6_address/$new_ip6_prefixlen\" dev \"$interface\" nodad\n\
    env >\"$OUT.new\"\n\
    mv \"$OUT.new\" \"$OUT\"\n";

/// A client that runs until it is dropped.
struct Client(Child);

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn shell(net: &Net, script: &str) -> String {
    let output = net.run("sh", &["-ec", script], "");
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Makes a guest forget what the daemon has configured, and solicit its router as soon as it has a link-local address.
fn restart_ipv6(net: &Net) {
    let set = "cd /proc/sys/net/ipv6/conf/eth0\necho 1 >accept_ra\necho 0 >router_solicitation_delay\n";
    shell(net, &format!("ip link set eth0 down\n{set}ip link set eth0 mtu 1500\nip link set eth0 up\n"));
    eventually(10.0, "duplicate address detection ends", || {
        let addresses = shell(net, "ip -6 addr show dev eth0 scope link");
        addresses.contains("fe80::") && !addresses.contains("tentative")
    });
}

fn has_router(net: &Net) -> bool {
    shell(net, "ip -6 route show default").contains(&format!("via {ROUTER} dev eth0 proto ra"))
}

/// A client with its files in `directory`, and more arguments.
fn dhclient(net: &Net, directory: &Path, more: &[&str]) -> std::process::Command {
    let script = directory.join("dhclient.sh");
    std::fs::write(&script, SCRIPT).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let out = format!("OUT={}", directory.join("dhclient.lease").display());
    let mut command = net.command("dhclient");
    command.args(["-6", "-v", "-cf", "/dev/null", "-e", &out, "-sf"]).arg(script);
    command.arg("-lf").arg(directory.join("dhclient.leases")).arg("-pf").arg(directory.join("dhclient.pid"));
    command.args(more).arg("eth0");
    command
}

/// One lab for all checks, because building one takes a second. `names`: DNS settings; then the name servers and the
/// domain that the client reports.
fn guests_find_their_router_and_addresses(workers: usize, (names, servers, domain): (&str, &str, &str)) {
    let more = format!("gateway = [\"fd00::fe\"]\ndhcp = true\ndhcp_lease_s = 600\nra_interval_s = 4\n{names}\n");
    let vpcs = format!("{}{more}{}", vpc(100, "tcp", "flow"), vpc(200, "tcp", "flow"));
    let mut lab = Lab::new(Options { workers, vpcs, ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["fd00::1/64"]).mtu(1400));
    // In other subnets, only reachable through the router.
    lab.add(0, Guest::new("c", 3, &["fd00:9::3/64"]));
    lab.add(1, Guest::new("b", 2, &["fd00:8::2/64"]));
    // In a VPC without a router.
    lab.add(0, Guest::new("d", 4, &["fd00::4/64"]).vni(200));
    lab.start();
    let (host, a) = (&lab.hosts[0], lab.net("a"));

    // These keep their addresses, and get unsolicited advertisements.
    for guest in ["b", "c"] {
        shell(lab.net(guest), "echo 1 >/proc/sys/net/ipv6/conf/eth0/accept_ra");
        eventually(20.0, "a router is learned", || has_router(lab.net(guest)));
    }
    // The router may have been learned from an answer to an earlier solicitation.
    eventually(10.0, "unsolicited advertisements are sent", || host.sample("avs.advertised_packets") > 0);

    let answered = host.sample("avs.answered_packets");
    restart_ipv6(a);
    eventually(5.0, "a solicitation is answered", || has_router(a));
    assert!(host.sample("avs.answered_packets") > answered);
    eventually(1.0, "its subnet is on the link", || shell(a, "ip -6 route show fd00::/64").contains(" expires "));
    assert_eq!(shell(a, "cat /proc/sys/net/ipv6/conf/eth0/mtu").trim(), "1400");
    assert_eq!(shell(a, "ip -6 addr show dev eth0 scope global"), "", "it does not autoconfigure an address");

    let directory = host.directory.clone();
    let quiet = Stdio::null;
    let client = Client(dhclient(a, &directory, &["-d"]).stdout(quiet()).stderr(quiet()).spawn().unwrap());
    let lease = directory.join("dhclient.lease");
    eventually(20.0, "it gets its address", || lease.exists());
    let text = std::fs::read_to_string(&lease).unwrap();
    let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(&format!("{name}="))).unwrap_or_default();
    assert_eq!(value("new_ip6_address"), "fd00::1", "{text}");
    assert_eq!((value("new_dhcp6_name_servers"), value("new_dhcp6_domain_search")), (servers, domain), "{text}");
    assert_eq!((value("new_max_life"), value("new_preferred_life")), ("600", "600"), "{text}");
    // The configuration works: to guests of this and of the other host, both behind the router.
    assert_eq!(ping(a, "fd00:9::3", 2, 100), 2);
    assert_eq!(ping(a, "fd00:8::2", 2, 100), 2);
    drop(client);
    // It releases its address, and gets an answer.
    let answered = host.sample("avs.answered_packets");
    let output = dhclient(a, &directory, &["-r"]).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{errors}");
    assert!(host.sample("avs.answered_packets") > answered, "{errors}");
    for reason in ["dhcp_malformed", "dhcp_rate", "dhcp_unanswered", "solicitation_rate", "malformed_neighbour"] {
        assert_eq!(host.drops("a", reason), 0, "{reason}");
    }

    // Server messages of a guest are dropped.
    let sent = lab.net("c").enter(|| {
        let socket = std::net::UdpSocket::bind(("fd00:9::3", 547)).unwrap();
        socket.send_to(&[7, 1, 2, 3], ("fd00::1", 546))
    });
    sent.unwrap();
    eventually(5.0, "a server's message is dropped", || host.drops("c", "dhcp_server") == 1);
    // In a VPC without a router, solicitations get no answer.
    let before = host.drops("d", "multicast");
    restart_ipv6(lab.net("d"));
    eventually(5.0, "the solicitation is dropped", || host.drops("d", "multicast") > before);
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert!(!has_router(lab.net("d")));
}

#[test]
fn guests_find_their_router() {
    guests_find_their_router_and_addresses(1, ("dns = [\"fd00::53\", \"fd00::54\"]", "fd00::53 fd00::54", ""));
}

#[test]
fn guests_find_their_router_with_two_workers() {
    // The gateway is the DNS server of a VPC that has a domain and no configured servers.
    guests_find_their_router_and_addresses(2, ("domain = \"vpc1.internal\"", "fd00::fe", "vpc1.internal."));
}
