//! Builds the frame of a packet that is only described.

use std::net::IpAddr;

use bifrost_wire::ethernet::{self, ethertype};
use bifrost_wire::icmp::v6;
use bifrost_wire::protocol::{ICMP, ICMPV6, TCP, UDP};
use bifrost_wire::tcp::Flags;
use bifrost_wire::{Mac, arp, ipv4, ipv6, tcp, udp};

use crate::api::{ApiError, TraceSpec};

/// ICMP types of an echo request (RFC 792, RFC 4443).
const V4_ECHO: u8 = 8;
const V6_ECHO: u8 = 128;
const ECHO_LEN: usize = 8;

/// The frame of a packet whose description was checked, from one vNIC to another.
///
/// # Errors
/// The size is below that of the headers, a flag is unknown, or the addresses are of different families.
pub fn frame(spec: &TraceSpec, source: IpAddr, destination: IpAddr, macs: (Mac, Mac)) -> Result<Vec<u8>, ApiError> {
    let (protocol, mut body) = transport(spec, destination.is_ipv6())?;
    let header = if destination.is_ipv4() { ipv4::HEADER_LEN } else { ipv6::HEADER_LEN };
    let least = header + body.len();
    let size = spec.size_bytes.map_or(least, |size| size as usize);
    if size < least {
        return Err(ApiError::bad_request(format!("the headers alone are {least} bytes")).at("size_bytes"));
    }
    body.resize(size - header, 0);
    if protocol == UDP {
        udp::set_len(
            body.first_chunk_mut().ok_or_else(|| ApiError::internal("a short header"))?,
            (size - header) as u16,
        );
    }
    let mut frame = Vec::with_capacity(ethernet::HEADER_LEN + size);
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            frame.extend_from_slice(&ethernet::Header::new(macs.1, macs.0, ethertype::IPV4).emit());
            let ip = ipv4::Header {
                total_len: size as u16,
                dont_fragment: spec.dont_fragment,
                ttl: spec.ttl,
                ..ipv4::Header::new(source, destination, protocol, 0)
            };
            frame.extend_from_slice(&ip.emit());
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            frame.extend_from_slice(&ethernet::Header::new(macs.1, macs.0, ethertype::IPV6).emit());
            let ip = ipv6::Header::new(source, destination, protocol, body.len() as u16);
            let ip = ipv6::Header { hop_limit: spec.ttl, ..ip };
            frame.extend_from_slice(&ip.emit());
        }
        _ => return Err(ApiError::bad_request("source and destination are of different families").at("from")),
    }
    frame.extend_from_slice(&body);
    Ok(frame)
}

/// An ARP request or neighbor solicitation for an address, which a guest sends before the packet if the address is
/// unresolved.
pub fn question(source: IpAddr, target: IpAddr, mac: Mac) -> Vec<u8> {
    match (source, target) {
        (IpAddr::V6(source), IpAddr::V6(target)) => {
            let group = v6::solicited_node(target);
            let [.., a, b, c, d] = group.octets();
            let (body, len) = v6::Solicitation { target, source_mac: Some(mac) }.emit(source, group);
            let ip = ipv6::Header { hop_limit: 255, ..ipv6::Header::new(source, group, ICMPV6, len as u16) };
            let link = ethernet::Header::new(Mac([0x33, 0x33, a, b, c, d]), mac, ethertype::IPV6);
            [&link.emit()[..], &ip.emit(), &body[..len]].concat()
        }
        (source, target) => {
            let v4 = |address| if let IpAddr::V4(v4) = address { v4 } else { std::net::Ipv4Addr::UNSPECIFIED };
            let request = arp::Packet {
                operation: arp::Operation::Request,
                sender_mac: mac,
                sender_ip: v4(source),
                target_mac: Mac::ZERO,
                target_ip: v4(target),
            };
            let link = ethernet::Header::new(Mac::BROADCAST, mac, ethertype::ARP);
            [&link.emit()[..], &request.emit()].concat()
        }
    }
}

fn transport(spec: &TraceSpec, is_v6: bool) -> Result<(u8, Vec<u8>), ApiError> {
    if let Some((source_port, destination_port)) = spec.tcp {
        let header = tcp::Header {
            source_port,
            destination_port,
            sequence: 0,
            acknowledgment: 0,
            header_len: tcp::HEADER_LEN as u8,
            flags: flags(&spec.flags)?,
            window: u16::MAX,
            checksum: 0,
            urgent: 0,
        };
        return Ok((TCP, header.emit().to_vec()));
    }
    if let Some((source_port, destination_port)) = spec.udp {
        let header = udp::Header { source_port, destination_port, len: 0, checksum: 0 };
        return Ok((UDP, header.emit().to_vec()));
    }
    let mut echo = vec![0; ECHO_LEN];
    echo[0] = if is_v6 { V6_ECHO } else { V4_ECHO };
    Ok((if is_v6 { ICMPV6 } else { ICMP }, echo))
}

fn flags(names: &[String]) -> Result<Flags, ApiError> {
    if names.is_empty() {
        return Ok(Flags::SYN);
    }
    let known =
        [("fin", Flags::FIN), ("syn", Flags::SYN), ("rst", Flags::RST), ("psh", Flags::PSH), ("ack", Flags::ACK)];
    names.iter().try_fold(Flags(0), |flags, name| {
        let found = known.iter().find(|(known, _)| known == name).map(|(_, flag)| flags.with(*flag));
        found.ok_or_else(|| {
            ApiError::bad_request(format!("unknown flag {name:?}")).at("flags").hint("fin, syn, rst, psh, ack")
        })
    })
}
