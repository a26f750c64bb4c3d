//! Each service with IPv6 inside, over IPv4 and IPv6 underlays. All checksums of sent packets are verified.

use bifrost_wire::{Mac, tcp};

use super::build::*;
use crate::*;

const NAT_6: &str = "2001:db8:aa::1";
const SERVICE_6: &str = "fd10::fd";
const BACKEND_6: &str = "fd64::80";
const CLIENTS_6: &str = "fd64::1:1";
const REMOTE: &str = "2001:db8::1";

fn pod() -> Pod {
    let mut t = tables();
    t.nat_addresses.insert((INTERNET, ip(NAT_6)), ());
    t.nat_addresses.insert((SERVICE, ip(CLIENTS_6)), ());
    t.add_host(SERVICE, ip(BACKEND_6), Host { vtep: ip(HOST_6), mac: mac_of(ip(BACKEND_6)) });
    let backends = Backends { vni: SERVICE, pool: 1, list: vec![(ip(BACKEND_6), 8080)] };
    t.services.insert((VPC, ip(SERVICE_6), 6, 80), backends);
    let (vxlan, gre) = (t.add_tunnel(vxlan_tunnel()), t.add_tunnel(gre_tunnel()));
    t.vpcs.get_mut(&VPC).unwrap().routes = bifrost_tables::Lpm::new([
        ("fd10::/64".parse().unwrap(), Route::Local),
        ("fd11::/64".parse().unwrap(), Route::Peer(PEER)),
        ("fd50::/64".parse().unwrap(), Route::Idc(vxlan)),
        ("fd61::/64".parse().unwrap(), Route::Idc(gre)),
        ("::/0".parse().unwrap(), Route::Internet),
    ])
    .unwrap();
    let pools = vec![(INTERNET, vec![ip(NAT_ADDRESS), ip(NAT_6)]), (SERVICE, vec![ip("100.64.1.1"), ip(CLIENTS_6)])];
    let mut pod = Pod::with(t, Nat::new(NatConfig { pools, ..nat_config() }));
    pod.learn(ip("10.0.0.8"));
    pod.learn(ip("fd00::8"));
    pod
}

fn vxlan_tunnel() -> Tunnel {
    let kind = TunnelKind::Vxlan { vni: 8, mac: Mac([2, 8, 8, 8, 8, 8]) };
    Tunnel { vni: VPC, remote: ip("10.0.0.8"), kind }
}

fn gre_tunnel() -> Tunnel {
    Tunnel { vni: VPC, remote: ip("fd00::8"), kind: TunnelKind::Gre { key: 8 } }
}

fn datagram(from: &str, to: &str) -> Vec<u8> {
    udp_packet((from, 4000), (to, 5000), b"payload")
}

#[test]
fn vpc_to_vpc() {
    for (to, vni) in [("fd10::2", VPC), ("fd11::1", PEER)] {
        let out = pod().forward(&tunnelled(HOST_A, VPC, &datagram("fd10::1", to)));
        assert_eq!((out.vxlan, out.inner.dst_ip), (Some((vni, mac_of(ip(to)))), ip(to)));
    }
}

#[test]
fn to_the_internet_from_its_own_address() {
    let mut pod = pod();
    let out = pod.forward(&tunnelled(HOST_B, VPC, &datagram("fd10::2", REMOTE)));
    assert_eq!((out.vxlan, out.inner.src_ip, out.inner.src_port), (None, ip("fd10::2"), 4000));
    let back = pod.forward(&link(&udp_packet((REMOTE, 5000), ("fd10::2", 4000), b"answer")));
    assert_eq!((back.vxlan.map(|v| v.0), back.inner.dst_ip, back.inner.dst_port), (Some(VPC), ip("fd10::2"), 4000));
}

#[test]
fn to_the_internet_from_a_shared_address() {
    let mut pod = pod();
    let out = pod.forward(&tunnelled(HOST_A, VPC, &datagram("fd10::1", REMOTE)));
    assert_eq!((out.vxlan, out.inner.src_ip, out.inner.dst_ip), (None, ip(NAT_6), ip(REMOTE)));
    let port = out.inner.src_port;
    let back = pod.forward(&link(&udp_packet((REMOTE, 5000), (NAT_6, port), b"answer")));
    assert_eq!(back.vxlan, Some((VPC, mac_of(ip("fd10::1")))));
    assert_eq!((back.inner.dst_ip, back.inner.dst_port), (ip("fd10::1"), 4000));
    let stranger = link(&udp_packet(("2001:db8::2", 5000), (NAT_6, port), b"x"));
    assert_eq!(pod.dropped(&stranger), DropReason::NatNoSession);
}

#[test]
fn to_a_customers_network() {
    let mut pod = pod();
    let out = pod.forward(&tunnelled(HOST_A, VPC, &datagram("fd10::1", "fd50::5")));
    assert_eq!((out.vxlan, out.outer.dst_ip), (Some((8, Mac([2, 8, 8, 8, 8, 8]))), ip("10.0.0.8")));
    let back = pod.forward(&tunnelled("10.0.0.8", 8, &datagram("fd50::5", "fd10::1")));
    assert_eq!((back.vxlan, back.outer.dst_ip), (Some((VPC, mac_of(ip("fd10::1")))), ip(HOST_A)));
    let out = pod.forward(&tunnelled(HOST_A, VPC, &datagram("fd10::1", "fd61::5")));
    assert_eq!((out.gre, out.outer.dst_ip, out.inner.dst_ip), (Some(8), ip("fd00::8"), ip("fd61::5")));
    let gre = [&[0x20, 0, 0x86, 0xdd, 0, 0, 0, 8][..], &datagram("fd61::5", "fd10::1")].concat();
    let back = pod.forward(&link(&packet("fd00::8", GATEWAY_6, 47, 60, &gre)));
    assert_eq!((back.vxlan.map(|v| v.0), back.inner.dst_ip), (Some(VPC), ip("fd10::1")));
}

#[test]
fn to_a_cloud_service() {
    let mut pod = pod();
    let syn = tcp_packet(("fd10::1", 3000), (SERVICE_6, 80), tcp::Flags::SYN);
    let out = pod.forward(&tunnelled(HOST_A, VPC, &syn));
    assert_eq!((out.vxlan, out.outer.dst_ip), (Some((SERVICE, mac_of(ip(BACKEND_6)))), ip(HOST_6)));
    assert_eq!((out.inner.src_ip, out.inner.dst_ip, out.inner.dst_port), (ip(CLIENTS_6), ip(BACKEND_6), 8080));
    let flags = tcp::Flags::SYN.with(tcp::Flags::ACK);
    let reply = tcp_packet((BACKEND_6, 8080), (CLIENTS_6, out.inner.src_port), flags);
    let back = pod.forward(&tunnelled(HOST_6, SERVICE, &reply));
    assert_eq!(back.vxlan, Some((VPC, mac_of(ip("fd10::1")))));
    assert_eq!((back.inner.src_ip, back.inner.src_port), (ip(SERVICE_6), 80));
    assert_eq!((back.inner.dst_ip, back.inner.dst_port), (ip("fd10::1"), 3000));
}
