//! Makes the frame of a packet that exists only as a description, as a gateway receives it.

use std::net::IpAddr;

use bifrost_control::api::{ApiError, GatewayTraceSpec, TraceStep};
use bifrost_control::described;
use bifrost_wire::protocol::UDP;
use bifrost_wire::{Mac, Vni, ethernet, ip, udp, vxlan};

/// Maximum size of an inner IP packet, bytes. Gateways' networks carry no larger packets.
const LARGEST: u32 = 9000;
/// MAC address of the sender on the link.
const SENDER: Mac = Mac([2, 0, 0, 0, 0, 1]);
const SOURCE_PORT: u16 = 50_000;

/// Returns the frame for a gateway with these addresses, which uses `mac` outside and inside of tunnels.
///
/// # Errors
/// The description is not of a packet, or of one that cannot reach the gateway.
pub(crate) fn frame(spec: &GatewayTraceSpec, gateway: &[IpAddr], mac: Mac) -> Result<Vec<u8>, ApiError> {
    let packet = &spec.packet;
    packet.check_packet()?;
    let missing = |what: &str, at: &str| ApiError::bad_request(what).at(at);
    let to = packet.to.ok_or_else(|| missing("say where it goes", "to"))?;
    let from = packet.from.ok_or_else(|| missing("say who sends it", "from"))?;
    if packet.size_bytes.is_some_and(|size| size > LARGEST) {
        return Err(missing("a gateway's packets have at most 9000 bytes", "size_bytes"));
    }
    let inner = described::frame(packet, from, to, (SENDER, mac))?;
    let (host, vni) = match (packet.from_peer, packet.vni) {
        (None, None) => return Ok(inner),
        (Some(host), Some(vni)) => (host, vni),
        (None, Some(_)) => return Err(missing("say which host sends it in that VNI", "from_peer")),
        (Some(_), None) => return Err(missing("say in which VNI the host sends it", "vni")),
    };
    let vni = Vni::new(vni).ok_or_else(|| missing("a VNI has 24 bits", "vni"))?;
    let own = gateway.iter().find(|own| own.is_ipv4() == host.is_ipv4());
    let own = *own.ok_or_else(|| missing("the gateway has no address of the host's family", "from_peer"))?;
    let len = (udp::HEADER_LEN + vxlan::HEADER_LEN + inner.len()) as u16;
    let header = udp::Header { source_port: SOURCE_PORT, destination_port: vxlan::UDP_PORT, len, checksum: 0 };
    let datagram = [&header.emit()[..], &vxlan::emit(vni), &inner].concat();
    let link = ethernet::Header::new(mac, SENDER, ip::ethertype_of(own)).emit();
    match ip::Header::new(host, own, UDP, datagram.len()) {
        Some(ip::Header::V4(header)) => Ok([&link[..], &header.emit(), &datagram].concat()),
        Some(ip::Header::V6(header)) => Ok([&link[..], &header.emit(), &datagram].concat()),
        None => Err(missing("it is too long for a tunnel", "size_bytes")),
    }
}

/// The decision of a stage, for the API.
pub(crate) fn step(stage: &str, passes: bool, what: String) -> TraceStep {
    TraceStep { stage: stage.to_owned(), passes, what, ..TraceStep::default() }
}

#[cfg(test)]
mod tests {
    use bifrost_control::api::TraceSpec;
    use bifrost_nic::parse;

    use super::*;

    fn spec(host: Option<&str>, ends: [&str; 2]) -> GatewayTraceSpec {
        let [from, to] = ends.map(|text| Some(text.parse().unwrap()));
        let from_peer = host.map(|host| host.parse().unwrap());
        let packet = TraceSpec { from_peer, vni: host.map(|_| 7), from, to, udp: Some((1, 2)), ..TraceSpec::default() };
        GatewayTraceSpec { pod: None, packet }
    }

    #[test]
    fn packets_of_hosts_are_in_vxlan() {
        let own = ["10.0.0.1", "fd00::1"].map(|text| text.parse().unwrap());
        for (host, ends) in [
            (Some("10.0.0.11"), ["192.168.0.1", "192.168.0.2"]),
            (Some("fd00::11"), ["fd10::1", "fd10::2"]),
            (None, ["198.51.100.1", "203.0.113.1"]),
        ] {
            let frame = frame(&spec(host, ends), &own, Mac([2; 6])).unwrap();
            let outer = parse(&frame, frame.len()).unwrap();
            assert_eq!(outer.end as usize, frame.len());
            let inner = match host {
                None => outer,
                Some(host) => {
                    assert_eq!((outer.src_ip.to_string(), outer.dst_port), (host.to_owned(), vxlan::UDP_PORT));
                    let (vni, inner) = vxlan::parse(&frame[usize::from(outer.payload)..]).unwrap();
                    assert_eq!(vni.get(), 7);
                    parse(inner, inner.len()).unwrap()
                }
            };
            assert_eq!([inner.src_ip, inner.dst_ip].map(|ip| ip.to_string()), ends);
        }
        for (change, at) in [
            (GatewayTraceSpec::default(), "tcp"),
            (spec(Some("fd00::11"), ["192.168.0.1", "192.168.0.2"]), "from_peer"),
        ] {
            assert_eq!(frame(&change, &own[..1], Mac([2; 6])).unwrap_err().location, at);
        }
        let mut large = spec(None, ["198.51.100.1", "203.0.113.1"]);
        large.packet.size_bytes = Some(9001);
        assert_eq!(frame(&large, &own, Mac([2; 6])).unwrap_err().location, "size_bytes");
    }
}
