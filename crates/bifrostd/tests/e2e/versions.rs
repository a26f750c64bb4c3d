//! Hosts whose protocol versions differ, as while a fleet is upgraded.

use crate::common::traffic::exchange;
use crate::common::{Guest, Lab, Options};

fn set_version(lab: &mut Lab, host: usize, version: u8) {
    let config = &mut lab.hosts[host].config;
    let start = config.find("[transport]\n").unwrap() + "[transport]\n".len();
    if config[start..].starts_with("version_max") {
        let end = start + config[start..].find('\n').unwrap() + 1;
        config.replace_range(start..end, "");
    }
    config.insert_str(start, &format!("version_max = {version}\n"));
}

/// The version of the connection between the guests, on both hosts.
fn versions(lab: &Lab) -> [u8; 2] {
    [(0, "b"), (1, "a")].map(|(host, remote)| lab.hosts[host].conns_with(lab.guest(remote))[0].version)
}

fn lab(versions: [u8; 2]) -> Lab {
    let mut lab = Lab::new(Options::default());
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
    (0..2).for_each(|host| set_version(&mut lab, host, versions[host]));
    lab.start();
    lab
}

#[test]
fn hosts_use_the_highest_version_that_both_allow() {
    for (one, other) in [(4, 1), (2, 4), (4, 3), (1, 2), (4, 4)] {
        let lab = lab([one, other]);
        lab.hosts[0].path_fault("host-b", None, |fault| fault.loss_percent = 1.0);
        exchange(lab.net("a"), lab.net("b"), "10.0.0.2", 5001, 4 << 20);
        exchange(lab.net("b"), lab.net("a"), "10.0.0.1", 5002, 4 << 20);
        assert_eq!(versions(&lab), [one.min(other); 2], "{one} and {other}");
        for host in &lab.hosts {
            assert_eq!(host.counter("datapath.plain_tx_packets"), 0, "{one} and {other}: the transport was not used");
            host.assert_balanced();
        }
    }
}

/// A reload accepts another version, and the next daemon uses it: connections continue, first of the older version and
/// then of the newer one.
#[test]
fn an_upgrade_raises_the_version() {
    let mut lab = lab([3, 3]);
    exchange(lab.net("a"), lab.net("b"), "10.0.0.2", 5001, 1 << 20);
    assert_eq!(versions(&lab), [3; 2]);
    for (host, expected) in [(0, 3), (1, 4)] {
        set_version(&mut lab, host, 4);
        lab.hosts[host].write_config();
        lab.hosts[host].client.reload().unwrap();
        lab.hosts[host].upgrade(None).unwrap();
        exchange(lab.net("b"), lab.net("a"), "10.0.0.1", 5002 + host as u16, 1 << 20);
        assert_eq!(versions(&lab), [expected; 2], "host {host}");
    }
    // And back.
    set_version(&mut lab, 0, 2);
    lab.hosts[0].write_config();
    lab.hosts[0].client.reload().unwrap();
    lab.hosts[0].upgrade(None).unwrap();
    exchange(lab.net("a"), lab.net("b"), "10.0.0.2", 5005, 1 << 20);
    assert_eq!(versions(&lab), [2; 2]);
}
