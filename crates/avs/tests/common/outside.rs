//! A world with an uplink, and what guests and hosts outside send through it.

use bifrost_avs::{
    Action, DropReason, FloatingIp, GATEWAY_MAC, Nat, Ordering, Port, PortForward, PortId, Reliability, SourceNat,
    Switch, Tables, Transport, Verdict, Vpc,
};
use bifrost_wire::Mac;

use super::any::SECOND;
use super::ends::*;
use super::*;

pub(crate) const OUTSIDE: u32 = 900;
pub(crate) const UPLINK: u32 = 7;
pub(crate) const KERNEL: Mac = mac(9);
pub(crate) const SHARED: &str = "203.0.113.10";
pub(crate) const SHARED6: &str = "2001:db8::10";
pub(crate) const FLOATING: &str = "203.0.113.20";
pub(crate) const FLOATING6: &str = "2001:db8::20";
pub(crate) const REMOTE: &str = "198.51.100.7";
pub(crate) const REMOTE6: &str = "2001:db8:7::7";

/// The small world with an uplink. Guest 1 of VNI 100 and the guest of VNI 200, which has the same address, share
/// outside addresses with their networks. Guest 2 of VNI 100 has floating addresses. Outside port 8080 is forwarded
/// to port 80 of guest 1.
pub(crate) fn world() -> Tables {
    let mut tables = tables();
    tables.vpcs[1].gateways = vec![ip("10.0.0.254")];
    tables.vpcs.push(Vpc {
        vni: vni(OUTSIDE),
        reliability: Reliability::Off,
        ordering: Ordering::Off,
        gateways: vec![],
        acl: vec![],
    });
    tables.ports.push(Port {
        id: PortId(UPLINK),
        vni: vni(OUTSIDE),
        mac: KERNEL,
        addresses: vec![ip("203.0.113.1")],
        routed: vec![],
        mtu: 1500,
        groups: vec![],
        home: None,
    });
    let uplink = PortId(UPLINK);
    let source = |n| SourceNat {
        vni: vni(n),
        uplink,
        addresses: vec![ip(SHARED), ip(SHARED6)],
        ports: (2000, 2999),
        per_guest: 500,
    };
    let floating =
        |outside: &str, inside: &str| FloatingIp { vni: vni(100), uplink, outside: ip(outside), inside: ip(inside) };
    let forward = |outside: &str, inside: &str| PortForward {
        vni: vni(100),
        uplink,
        protocol: Transport::Tcp,
        outside: (ip(outside), 8080),
        inside: (ip(inside), 80),
    };
    tables.nat = Nat {
        uplinks: vec![uplink],
        sources: vec![source(100), source(200)],
        floating: vec![floating(FLOATING, "10.0.0.2"), floating(FLOATING6, "fd00::2")],
        forwards: vec![forward(SHARED, "10.0.0.1"), forward(SHARED6, "fd00::1")],
    };
    tables
}

pub(crate) fn build(tables: &Tables) -> Switch {
    let mut switch = Switch::build(tables, 1).unwrap();
    switch.advance(1000 * SECOND);
    switch
}

pub(crate) fn outside() -> (Mac, Mac) {
    (KERNEL, GATEWAY_MAC)
}

/// Sends a frame from a guest to the outside; returns what leaves.
pub(crate) fn leaves(switch: &mut Switch, port: u32, frame: &[u8]) -> Result<Vec<u8>, DropReason> {
    let verdict = guest(switch, port, frame);
    match verdict.action {
        Action::Deliver { port: PortId(UPLINK), worker: None } => {
            let out = checked(frame, &verdict);
            let p = read(&out);
            assert_eq!((p.src_mac, p.dst_mac), (GATEWAY_MAC, KERNEL));
            Ok(out)
        }
        Action::Drop(reason) => Err(reason),
        other => panic!("{other:?}"),
    }
}

/// Sends a frame from outside; returns the receiving port and the delivered frame.
pub(crate) fn comes(switch: &mut Switch, frame: &[u8]) -> Result<(u32, Vec<u8>), DropReason> {
    let verdict = guest(switch, UPLINK, frame);
    match verdict.action {
        Action::Deliver { port, worker: None } => Ok((port.0, checked(frame, &verdict))),
        Action::Drop(reason) => Err(reason),
        other => panic!("{other:?}"),
    }
}

/// The frame after its header changes. Checks the checksums of TCP and UDP.
pub(crate) fn checked(frame: &[u8], verdict: &Verdict) -> Vec<u8> {
    let p = read(frame);
    if matches!(p.protocol, 6 | 17) && !p.is_fragment() {
        return rewritten(frame, verdict);
    }
    let mut out = frame.to_vec();
    verdict.rewrite.unwrap().apply(&mut out);
    out
}

pub(crate) fn from_guest(from: (&str, u16), to: (&str, u16), tcp: Option<u8>) -> Vec<u8> {
    frame((mac(1), GATEWAY_MAC), from, to, tcp)
}

/// The reply to `frame`.
pub(crate) fn answer_to(frame: &[u8], macs: (Mac, Mac), tcp: Option<u8>) -> Vec<u8> {
    let ((from, from_port), (to, to_port)) = ends(frame);
    super::ends::frame(macs, (&to.to_string(), to_port), (&from.to_string(), from_port), tcp)
}
