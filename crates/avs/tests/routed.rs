//! Guests that are routers: networks behind a port of this host.
#![allow(clippy::unwrap_used)]

mod common;

use bifrost_avs::{Action, BuildError, DropReason, GATEWAY_MAC, PortId, Switch, Tables};
use bifrost_wire::Mac;
use bifrost_wire::arp::Operation::{Reply, Request};
use common::*;

/// Behind guest 1 are networks of both families and a default route; guest 2 is in one of these networks.
fn routing() -> Tables {
    let mut tables = tables();
    let nets = ["10.5.0.0/16", "10.0.0.0/30", "fd05::/32", "0.0.0.0/0"];
    tables.ports[0].routed = nets.map(|net| net.parse().unwrap()).to_vec();
    tables
}

fn from_guest_1(switch: &mut Switch, src: &str, dst: &str) -> Action {
    guest(switch, 0, &udp((mac(1), GATEWAY_MAC), src, dst, (1, 2))).action
}

#[test]
fn a_router_guest_sends_only_from_networks_behind_it() {
    let mut s = Switch::build(&routing(), 0).unwrap();
    let spoofed = Action::Drop(DropReason::SpoofedIp);
    for (src, dst, passes) in [
        ("10.5.1.2", "10.0.0.3", true),
        ("10.0.0.1", "10.0.0.3", true),
        ("fd05::9", "fd00::3", true),
        ("192.0.2.1", "10.0.0.3", true),
        ("10.0.0.2", "10.0.0.3", false),
        ("10.0.0.3", "10.0.0.2", false),
        ("10.1.2.3", "10.0.0.3", false),
        ("10.0.0.254", "10.0.0.3", false),
        ("fd06::9", "fd00::3", false),
        ("127.0.0.1", "10.0.0.3", false),
        ("169.254.1.1", "10.0.0.3", false),
        ("255.255.255.255", "10.0.0.3", false),
        ("224.0.0.5", "10.0.0.3", false),
    ] {
        assert_eq!(from_guest_1(&mut s, src, dst) != spoofed, passes, "from {src}");
    }
    assert_eq!(guest(&mut s, 1, &udp((mac(2), GATEWAY_MAC), "10.5.1.2", "10.0.0.3", (1, 2))).action, spoofed);
    // The other tenant's guest with the same addresses is not a router.
    assert_eq!(guest(&mut s, 5, &udp((mac(1), mac(3)), "10.5.1.2", "10.0.0.3", (1, 2))).action, spoofed);
    let mut s = switch();
    assert_eq!(from_guest_1(&mut s, "10.5.1.2", "10.0.0.3"), spoofed, "nothing is behind it");
}

#[test]
fn a_router_guest_receives_packets_to_networks_behind_it() {
    let mut s = Switch::build(&routing(), 0).unwrap();
    for dst in ["10.5.1.2", "198.51.100.7"] {
        let verdict = guest(&mut s, 1, &udp((mac(2), GATEWAY_MAC), "10.0.0.2", dst, (1, 2)));
        assert!(matches!(verdict.action, Action::Deliver { port: PortId(0), .. }), "{dst}: {verdict:?}");
    }
    // A longer prefix belongs to another vNIC, and packets never go back to their sender.
    let verdict = guest(&mut s, 1, &udp((mac(2), GATEWAY_MAC), "10.0.0.2", "10.1.2.3", (1, 2)));
    assert!(matches!(verdict.action, Action::Forward { .. }), "{verdict:?}");
    assert_eq!(from_guest_1(&mut s, "10.5.1.2", "10.5.9.9"), Action::Drop(DropReason::Loop));
    // From another host to its MAC address.
    let frame = udp((GATEWAY_MAC, mac(1)), "10.0.0.3", "10.5.1.2", (1, 2));
    assert_eq!(underlay(&mut s, 100, 1, &frame), Ok(PortId(0)));
}

#[test]
fn a_router_guest_is_not_its_own_neighbour() {
    let mut s = Switch::build(&routing(), 0).unwrap();
    let ask = |of: u8, sender: &str, target| {
        arp((mac(of), Mac::BROADCAST), Request, (mac(of), sender), (Mac([0; 6]), target))
    };
    assert_eq!(guest(&mut s, 0, &ask(1, "0.0.0.0", "10.5.0.1")).action, Action::Drop(DropReason::UnknownNeighbour));
    let solicitation =
        solicit((mac(1), Mac([0x33, 0x33, 0xff, 0, 0, 9])), "::", "ff02::1:ff00:9", 255, None, "fd05::9");
    assert_eq!(guest(&mut s, 0, &solicitation).action, Action::Drop(DropReason::UnknownNeighbour));
    // Another guest gets the reply. Addresses behind a guest are not its own: it cannot claim them.
    assert_eq!(guest(&mut s, 1, &ask(2, "10.0.0.2", "10.5.0.1")), answered());
    let claim = arp((mac(1), mac(2)), Reply, (mac(1), "10.5.0.1"), (mac(2), "10.0.0.2"));
    assert_eq!(guest(&mut s, 0, &claim).action, Action::Drop(DropReason::SpoofedArp));
}

#[test]
fn a_network_is_behind_one_guest() {
    let mut tables = routing();
    tables.ports[1].routed = vec!["10.5.0.0/16".parse().unwrap()];
    assert!(matches!(Switch::build(&tables, 0), Err(BuildError::DuplicatePrefix { .. })));
    tables.ports[1].routed = vec!["10.0.0.254/32".parse().unwrap()];
    assert!(matches!(Switch::build(&tables, 0), Err(BuildError::DuplicatePrefix { .. })));
    // A longer prefix may be another guest's.
    tables.ports[1].routed = vec!["10.5.7.0/24".parse().unwrap()];
    let mut s = Switch::build(&tables, 0).unwrap();
    assert_eq!(from_guest_1(&mut s, "10.5.7.1", "10.0.0.3"), Action::Drop(DropReason::SpoofedIp));
}
