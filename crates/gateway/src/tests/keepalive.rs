use bifrost_wire::protocol::GRE;

use super::build::*;
use crate::*;

const S: u64 = 1_000_000_000;
const KEY: u32 = 77;

/// The remote and the gateway's address of the GRE tunnel, by address family.
const ENDS: [(&str, &str); 2] = [("10.0.0.9", GATEWAY), ("fd00::9", GATEWAY_6)];

/// Tables with a GRE tunnel to `remote`, on the gateway's link, and the tunnel's index.
fn with_tunnel(remote: &str) -> (Tables, u32) {
    let mut tables = tables();
    let index = tables.add_tunnel(Tunnel { vni: VPC, remote: ip(remote), kind: TunnelKind::Gre { key: KEY } });
    let vpc = tables.vpcs.get_mut(&VPC).unwrap();
    vpc.routes = bifrost_tables::Lpm::new([("10.70.0.0/16".parse().unwrap(), Route::Idc(index))]).unwrap();
    (tables, index)
}

fn ethertype(address: &str) -> [u8; 2] {
    if ip(address).is_ipv4() { [8, 0] } else { [0x86, 0xdd] }
}

fn gre(ethertype: [u8; 2], inner: &[u8]) -> Vec<u8> {
    [&[0x20, 0][..], &ethertype, &KEY.to_be_bytes(), inner].concat()
}

/// A keepalive of the other end: a packet back to itself, in the tunnel.
fn asked(remote: &str, own: &str, ttl: u8) -> Vec<u8> {
    let back = packet(own, remote, GRE, ttl, &gre([0, 0], &[]));
    link(&packet(remote, own, GRE, 255, &gre(ethertype(own), &back)))
}

#[test]
fn the_keepalive_of_the_other_end_goes_back() {
    for (remote, own) in ENDS {
        let mut pod = Pod::of(with_tunnel(remote).0);
        pod.learn(ip(remote));
        let (verdict, frame) = pod.process(&asked(remote, own, 255));
        assert_eq!(verdict, Verdict::Answer, "{remote}");
        let expected = packet(own, remote, GRE, 254, &gre([0, 0], &[]));
        assert_eq!((&frame[..6], &frame[14..]), (&mac_of(ip(remote)).0[..], &expected[..]), "{remote}");
        assert_eq!(pod.dropped(&asked(remote, own, 1)), DropReason::HopLimit);
        // A keepalive is only returned to its sender, which must be the other end of the tunnel.
        let elsewhere = packet(own, if ip(own).is_ipv4() { HOST_A } else { HOST_6 }, GRE, 255, &gre([0, 0], &[]));
        let frame = link(&packet(remote, own, GRE, 255, &gre(ethertype(own), &elsewhere)));
        assert_eq!(pod.dropped(&frame), DropReason::NoRoute);
        let answered = (0..1000).filter(|_| pod.process(&asked(remote, own, 255)).0 == Verdict::Answer).count();
        assert!((190..=200).contains(&answered), "{answered}: a hundred per core at once");
    }
}

#[test]
fn a_tunnel_is_down_while_its_keepalives_do_not_come_back() {
    for (remote, own) in ENDS {
        let (mut tables, index) = with_tunnel(remote);
        tables.set_keepalive(index, Keepalive { interval_ns: 10 * S, retries: 3 });
        let mut pod = Pod::of(tables.clone());
        pod.learn(ip(remote));
        let mut keepalives = Keepalives::new(tables.into());
        let data = tunnelled(HOST_A, VPC, &udp_packet(("192.168.0.1", 1), ("10.70.0.5", 2), b"x"));
        assert_eq!(pod.process(&data).0, Verdict::Forward(Service::Idc), "up before the first keepalive");
        let frames = keepalives.frames(pod.now, |address| Some(mac_of(address)));
        let [sent] = &frames[..] else { panic!("{frames:?}") };
        // The other end removes the outer headers, decrements the hop limit, and forwards the rest.
        assert_eq!(sent[..6], mac_of(ip(remote)).0);
        let headers = if ip(own).is_ipv4() { 20 } else { 40 };
        let mut back = sent[14 + headers + 8..].to_vec();
        if headers == 20 {
            back[8] -= 1;
            bifrost_wire::ipv4::fill_checksum(&mut back[..20]);
        } else {
            back[7] -= 1;
        }
        assert_eq!(keepalives.frames(pod.now + 10 * S - 1, |a| Some(mac_of(a))).len(), 0);
        assert_eq!(keepalives.deadline(), Some(pod.now + 10 * S));
        pod.now += 30 * S;
        assert_eq!(pod.process(&data).0, Verdict::Forward(Service::Idc));
        pod.now += 1;
        assert_eq!(pod.dropped(&data), DropReason::TunnelDown);
        assert!(!pod.tables().tunnel_state(index, pod.now).up);
        assert_eq!(keepalives.frames(pod.now, |a| Some(mac_of(a))).len(), 1, "it is still tried");
        // A trace of the keepalive changes nothing. Then the keepalive itself comes back.
        assert_eq!(pod.trace(&link(&back)).0, Verdict::Drop(DropReason::TunnelKeepalive));
        assert_eq!(pod.dropped(&data), DropReason::TunnelDown);
        assert_eq!(pod.dropped(&link(&back)), DropReason::TunnelKeepalive);
        assert_eq!(pod.process(&data).0, Verdict::Forward(Service::Idc));
        let state = pod.tables().tunnel_state(index, pod.now + 5);
        assert_eq!(state, TunnelState { up: true, silence_ns: Some(5) });
        // Nobody else can forge a keepalive.
        pod.now += 31 * S;
        let forged = packet(if headers == 20 { HOST_A } else { HOST_6 }, own, GRE, 64, &gre([0, 0], &[]));
        assert_eq!(pod.dropped(&link(&forged)), DropReason::UnknownSender);
        assert_eq!(pod.dropped(&data), DropReason::TunnelDown);
        // Without a next hop nothing is sent.
        assert_eq!(keepalives.frames(pod.now, |_| None).len(), 0);
    }
}

#[test]
fn tunnels_without_keepalives_are_up() {
    let (tables, index) = with_tunnel("10.0.0.9");
    assert_eq!(tables.tunnel_state(index, u64::MAX), TunnelState { up: true, silence_ns: None });
    assert_eq!(Keepalives::new(tables.into()).deadline(), None);
}
