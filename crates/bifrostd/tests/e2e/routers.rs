//! A guest that routes: real kernels in a subnet behind it, and others that reach them through the gateway.

use std::net::UdpSocket;

use crate::common::host::{routes, vpc};
use crate::common::netns::Net;
use crate::common::traffic::{exchange, ping, ping_with};
use crate::common::{Guest, Lab, Options, eventually};

const MEGABYTES: u64 = 1 << 20;

/// `r`, on the first host, routes; `inner` is behind it. `a` is on the same host and `b` on the other one.
#[test]
fn a_subnet_behind_a_guest_is_reachable() {
    let vpcs = format!("{}gateway = [\"10.0.0.254\", \"fd00::fe\"]\n", vpc(100, "tcp", "flow"));
    let mut lab = Lab::new(Options { vpcs, ..Options::default() });
    let router = Guest::new("r", 9, &["10.0.0.9/24", "fd00::9/64"]).gateway("10.0.0.254");
    lab.add(0, router.clone());
    let routed = "name = \"r\"\nrouted = [\"10.5.0.0/24\", \"fd05::/64\"]\n";
    lab.hosts[0].config = lab.hosts[0].config.replacen("name = \"r\"\n", routed, 1);
    let behind =
        routes(&router, lab.hosts[0].name).replace("10.0.0.9/32", "10.5.0.0/24").replace("fd00::9/128", "fd05::/64");
    lab.hosts[1].config.push_str(&behind);
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24", "fd00::1/64"]).gateway("10.0.0.254"));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24", "fd00::2/64"]).gateway("10.0.0.254"));
    lab.start();
    let inner = Net::new(lab.tag(), "inner");
    let r = lab.net("r");
    r.ip(&format!("link add lan netns {} type veth peer name lan netns {}\n", r.name(), inner.name()));
    r.ip("addr add 10.5.0.1/24 dev lan\naddr add fd05::1/64 dev lan nodad\nlink set lan up\n");
    inner.ip("addr add 10.5.0.2/24 dev lan\naddr add fd05::2/64 dev lan nodad\nlink set lan up\n");
    inner.ip("route add default via 10.5.0.1\nroute add default via fd05::1\n");
    for key in ["net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"] {
        assert!(r.run("sysctl", &["-qw", key], "").status.success(), "{key}");
    }
    for guest in ["a", "b", "r"] {
        lab.net(guest).ip("route add default via fd00::fe\n");
    }
    eventually(5.0, "the subnet behind the guest works", || ping(&inner, "fd05::1", 1, 8) == 1);

    for (guest, address) in [("a", "10.0.0.1"), ("b", "10.0.0.2")] {
        let net = lab.net(guest);
        // Answers pass only the guest's router, which is on-link for them.
        assert_eq!(ping_with(net, "10.5.0.2", 3, 56, 64), [63; 3], "from {guest}");
        assert_eq!(ping(&inner, address, 3, 56), 3, "to {guest}");
        exchange(net, &inner, "10.5.0.2", 5001, 2 * MEGABYTES);
        exchange(net, &inner, "fd05::2", 5002, 2 * MEGABYTES);
    }
    // The guest may not send from addresses that are not behind it.
    inner.ip("addr add fd06::2/128 dev lan nodad\n");
    let before = lab.hosts[0].drops("r", "spoofed_ip");
    inner.enter(|| UdpSocket::bind("[fd06::2]:0").unwrap().send_to(b"spoofed", "[fd00::2]:9").unwrap());
    eventually(5.0, "packets with another source are dropped", || lab.hosts[0].drops("r", "spoofed_ip") > before);

    // After a reload it no longer routes, and the guest's device stays.
    lab.hosts[0].config = lab.hosts[0].config.replacen(routed, "name = \"r\"\n", 1);
    lab.hosts[0].write_config();
    assert_eq!(lab.hosts[0].client.reload().unwrap().ports.changed, ["r"]);
    assert_eq!(ping(lab.net("b"), "10.5.0.2", 1, 56), 0);
    assert_eq!(ping(lab.net("b"), "10.0.0.9", 2, 56), 2);
    lab.hosts[0].assert_balanced();
}
