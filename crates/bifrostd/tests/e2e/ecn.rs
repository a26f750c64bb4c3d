//! Congestion marks of the underlay reach the guests that negotiate ECN (RFC 6040).

use crate::common::host::vpc;
use crate::common::traffic::exchange;
use crate::common::{Guest, Lab, Options};

const MEGABYTES: u64 = 1 << 20;

/// Hosts whose underlay marks packets for `port` by the rule `marks`, and guests that use ECN or not.
fn lab(reliability: &str, port: u16, marks: &str, guests_use_ecn: bool) -> Lab {
    let mut lab = Lab::new(Options { vpcs: vpc(100, reliability, "flow"), ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24", "fd00:a::1/64"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24", "fd00:a::2/64"]));
    lab.start();
    for host in &lab.hosts {
        let rules = format!(
            "table ip marks {{\n chain in {{\n  type filter hook prerouting priority 0;\n  udp dport {port} {marks}\n }}\n}}\n"
        );
        let output = host.net.run("nft", &["-f", "-"], &rules);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    for guest in ["a", "b"] {
        let value = if guests_use_ecn { "1" } else { "0" };
        lab.net(guest).enter(move || std::fs::write("/proc/sys/net/ipv4/tcp_ecn", value).unwrap());
    }
    lab
}

/// Segments that met congestion according to the guest's TCP.
fn marked(lab: &Lab, guest: &str) -> u64 {
    lab.net(guest).tcp_counter("TCPDeliveredCE")
}

/// Marks one in ten ECN-capable packets.
const MARK_CAPABLE: &str = "ip ecn != not-ect numgen random mod 10 < 1 ip ecn set ce";

#[test]
fn guests_with_ecn_see_congestion_marks() {
    for (reliability, port) in [("tcp", 4794), ("off", 4789)] {
        let lab = lab(reliability, port, MARK_CAPABLE, true);
        exchange(lab.net("a"), lab.net("b"), "10.0.0.2", 5001, 4 * MEGABYTES);
        exchange(lab.net("a"), lab.net("b"), "fd00:a::2", 5001, 4 * MEGABYTES);
        for guest in ["a", "b"] {
            assert!(marked(&lab, guest) > 10, "{reliability}: {guest} counts {}", marked(&lab, guest));
            assert_eq!(lab.net(guest).needed_retransmits(), 0, "nothing was lost");
        }
        for host in &lab.hosts {
            assert_eq!(host.counter("drop.marked_not_ect_packets"), 0);
        }
    }
}

#[test]
fn guests_without_ecn_lose_no_packets() {
    for (reliability, port) in [("tcp", 4794), ("off", 4789)] {
        let lab = lab(reliability, port, MARK_CAPABLE, false);
        exchange(lab.net("a"), lab.net("b"), "10.0.0.2", 5001, 4 * MEGABYTES);
        for guest in ["a", "b"] {
            assert_eq!((marked(&lab, guest), lab.net(guest).needed_retransmits()), (0, 0), "{reliability}: {guest}");
        }
        for host in &lab.hosts {
            assert_eq!(host.counter("drop.marked_not_ect_packets"), 0);
        }
    }
}

/// A device marks packets that are not ECN-capable: RFC 6040 requires that they are dropped, and TCP retransmits them.
#[test]
fn marked_packets_without_ecn_are_dropped_without_a_reliable_transport() {
    let lab = lab("off", 4789, "numgen random mod 50 < 1 ip ecn set ce", false);
    exchange(lab.net("a"), lab.net("b"), "10.0.0.2", 5001, 4 * MEGABYTES);
    for host in &lab.hosts {
        assert!(host.counter("drop.marked_not_ect_packets") > 0);
        host.assert_balanced();
    }
    assert!(["a", "b"].iter().all(|guest| marked(&lab, guest) == 0));
}
