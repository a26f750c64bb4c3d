//! DHCP: a real client (BusyBox's) in a guest's namespace configures its interface from the switch's answers.

use std::os::unix::fs::PermissionsExt;

use crate::common::host::vpc;
use crate::common::traffic::ping;
use crate::common::{Guest, Lab, Options};

/// Script that the client runs when it has a lease: it writes the lease to a file and applies it.
const SCRIPT: &str = "#!/bin/busybox sh\n\
    [ \"$1\" = bound ] || exit 0\n\
    env >\"$OUT\"\n\
    ip addr add \"$ip/$mask\" dev \"$interface\"\n\
    [ -z \"$router\" ] || ip route add default via \"$router\" dev \"$interface\" onlink\n";

/// Runs the client once, with more options; returns the lease, by name.
fn lease<'a>(lab: &Lab, guest: &str, more: &[&str], text: &'a mut String) -> Vec<(&'a str, &'a str)> {
    let directory = &lab.hosts[0].directory;
    let (script, out) = (directory.join("udhcpc.sh"), directory.join(format!("{guest}.lease")));
    std::fs::write(&script, SCRIPT).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let _ = std::fs::remove_file(&out);
    lab.net(guest).ip("addr flush dev eth0\n");
    let mut command = lab.net(guest).command("busybox");
    command.env("OUT", &out).args(["udhcpc", "-i", "eth0", "-f", "-n", "-q", "-t", "5", "-T", "1", "-s"]).arg(&script);
    let output = command.args(more).output().unwrap();
    assert!(output.status.success(), "{guest}: {}", String::from_utf8_lossy(&output.stderr));
    *text = std::fs::read_to_string(&out).unwrap();
    text.lines().filter_map(|line| line.split_once('=')).collect()
}

fn value<'a>(lease: &[(&str, &'a str)], name: &str) -> &'a str {
    lease.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no {name} in {lease:?}")).1
}

/// One lab for all checks, because building one takes a second.
fn guests_get_their_addresses(workers: usize) {
    let more = "gateway = [\"10.0.0.254\", \"10.9.0.254\"]\ndhcp = true\ndomain = \"vpc1.internal\"\ndns = [\"10.0.0.53\", \"9.9.9.9\"]\ndhcp_lease_s = 600\n";
    let vpcs = format!("{}{more}{}", vpc(100, "tcp", "flow"), vpc(200, "tcp", "flow"));
    let mut lab = Lab::new(Options { workers, vpcs, ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]).mtu(1400));
    // Its gateway is not in its subnet.
    lab.add(0, Guest::new("c", 3, &["10.9.1.3/32"]));
    lab.add(0, Guest::new("d", 4, &["10.0.0.4/24"]).vni(200));
    lab.start();
    let text = &mut String::new();

    let a = lease(&lab, "a", &["-O", "mtu"], text);
    let expected = [
        ("ip", "10.0.0.1"),
        ("mask", "24"),
        ("router", "10.0.0.254"),
        ("dns", "10.0.0.53 9.9.9.9"),
        ("domain", "vpc1.internal"),
        ("mtu", "1400"),
        ("lease", "600"),
        ("serverid", "10.0.0.254"),
    ];
    for (name, expected) in expected {
        assert_eq!(value(&a, name), expected, "{name}");
    }
    let c = lease(&lab, "c", &["-O", "staticroutes"], text);
    assert_eq!([value(&c, "ip"), value(&c, "mask")], ["10.9.1.3", "32"]);
    assert_eq!(value(&c, "staticroutes"), "10.0.0.254/32 0.0.0.0 0.0.0.0/0 10.0.0.254");
    // The configuration works.
    assert_eq!(ping(lab.net("a"), "10.9.1.3", 2, 100), 2);

    let host = &lab.hosts[0];
    assert_eq!(host.drops("a", "dhcp_malformed") + host.drops("a", "dhcp_rate"), 0);
    // A client that releases its address gets no answer.
    let mut command = lab.net("a").command("timeout");
    command.args(["2", "busybox", "udhcpc", "-i", "eth0", "-f", "-R", "-t", "5", "-T", "1", "-s", "/bin/true"]);
    let _ = command.output().unwrap();
    assert!(host.drops("a", "dhcp_unanswered") > 0, "a release is counted");
    // In a VPC without DHCP there is no answer.
    let mut command = lab.net("d").command("busybox");
    let output = command.args(["udhcpc", "-i", "eth0", "-n", "-q", "-t", "1", "-T", "1", "-s", "/bin/true"]).output();
    assert!(!output.unwrap().status.success());
    assert!(host.drops("d", "broadcast") > 0);
    // A request for another address is refused, and the right address assigned.
    let text = &mut String::new();
    let a = lease(&lab, "a", &["-r", "10.0.0.77"], text);
    assert_eq!(value(&a, "ip"), "10.0.0.1");
}

#[test]
fn a_client_configures_its_interface() {
    guests_get_their_addresses(1);
}

#[test]
fn a_client_configures_its_interface_with_two_workers() {
    guests_get_their_addresses(2);
}
