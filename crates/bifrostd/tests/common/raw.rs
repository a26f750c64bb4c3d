//! Malformed and forged frames and datagrams.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use bifrost_lab::programs::packet_socket::{OFFLOAD_LEN, PacketSocket};

use super::Net;

/// Sends Ethernet frames from a namespace, bypassing its IP stack. Returns how many the kernel accepted.
pub fn send_frames(net: &Net, device: &'static str, frames: Vec<Vec<u8>>) -> usize {
    net.enter(move || {
        let socket = PacketSocket::open(device).unwrap();
        frames.iter().filter(|frame| socket.send(&[0; OFFLOAD_LEN], frame).is_ok()).count()
    })
}

/// Sends datagrams from an address of a host, each in its own packet.
pub fn send_datagrams(net: &Net, from: IpAddr, to: SocketAddr, datagrams: Vec<Vec<u8>>) {
    net.enter(move || {
        let socket = UdpSocket::bind(SocketAddr::new(from, 0)).unwrap();
        for datagram in &datagrams {
            socket.send_to(datagram, to).unwrap();
        }
    });
}

/// An Ethernet frame.
pub fn ethernet(to: [u8; 6], from: [u8; 6], ethertype: u16, payload: &[u8]) -> Vec<u8> {
    [&to[..], &from, &ethertype.to_be_bytes(), payload].concat()
}

/// An IPv4 packet with a UDP datagram without checksum.
pub fn udp_in_ipv4(from: [u8; 4], to: [u8; 4], payload: &[u8]) -> Vec<u8> {
    let length = (28 + payload.len()) as u16;
    let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0];
    packet[2..4].copy_from_slice(&length.to_be_bytes());
    packet.extend_from_slice(&from);
    packet.extend_from_slice(&to);
    let sum = checksum(&packet);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend_from_slice(&[0x13, 0x88, 0x13, 0x89]);
    packet.extend_from_slice(&(length - 20).to_be_bytes());
    packet.extend_from_slice(&[0, 0]);
    packet.extend_from_slice(payload);
    packet
}

/// An ARP packet for IPv4 over Ethernet. Operation 1 is a request, 2 a reply.
pub fn arp(operation: u16, sender: ([u8; 6], [u8; 4]), target: ([u8; 6], [u8; 4])) -> Vec<u8> {
    let mut packet = vec![0, 1, 8, 0, 6, 4];
    packet.extend_from_slice(&operation.to_be_bytes());
    packet.extend_from_slice(&sender.0);
    packet.extend_from_slice(&sender.1);
    packet.extend_from_slice(&target.0);
    packet.extend_from_slice(&target.1);
    packet
}

/// A VXLAN header before a payload.
pub fn vxlan(vni: u32, payload: &[u8]) -> Vec<u8> {
    let mut datagram = vec![8, 0, 0, 0];
    datagram.extend_from_slice(&(vni << 8).to_be_bytes());
    datagram.extend_from_slice(payload);
    datagram
}

/// The Internet checksum (RFC 1071).
pub fn checksum(bytes: &[u8]) -> u16 {
    let word = |w: &[u8]| u32::from(w[0]) << 8 | u32::from(w.get(1).copied().unwrap_or(0));
    let mut sum: u32 = bytes.chunks(2).map(word).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}
