//! Guests' packets, built byte by byte, and the frames that arrive at a guest.

use std::io::Read as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use super::Net;
use super::raw::{checksum, ethernet};

pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
pub const ICMP: u8 = 1;
pub const ICMPV6: u8 = 58;
/// More fragments follow (RFC 791), in the field with the offset.
pub const MORE: u16 = 0x2000;

/// The addresses of a vNIC.
#[derive(Clone, Copy, Debug)]
pub struct End {
    pub mac: [u8; 6],
    pub v4: [u8; 4],
    pub v6: [u8; 16],
}

impl End {
    /// Guest `n` of the attacking tenant; see [`super::tenants`].
    pub fn attacker(n: u8) -> End {
        let v6 = [0xfd, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, n];
        End { mac: [2, 0, 0, 0, 0, 0x20 + n], v4: [10, 9, 0, n], v6 }
    }

    pub fn gateway() -> End {
        use super::tenants::{GATEWAY, GATEWAY_MAC, GATEWAY_V6};
        End { mac: GATEWAY_MAC, v4: GATEWAY, v6: GATEWAY_V6 }
    }
}

/// A frame with an IPv4 packet. `fragment`: flags, and the offset in units of 8 bytes.
pub fn ipv4(from: End, to: End, protocol: u8, id: u16, fragment: u16, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, protocol, 0, 0];
    packet[2..4].copy_from_slice(&(20 + payload.len() as u16).to_be_bytes());
    packet[4..6].copy_from_slice(&id.to_be_bytes());
    packet[6..8].copy_from_slice(&fragment.to_be_bytes());
    packet.extend([from.v4, to.v4].concat());
    let sum = checksum(&packet);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend_from_slice(payload);
    ethernet(to.mac, from.mac, 0x0800, &packet)
}

/// A frame with an IPv6 packet.
pub fn ipv6(from: End, to: End, next: u8, hop_limit: u8, payload: &[u8]) -> Vec<u8> {
    let [high, low] = (payload.len() as u16).to_be_bytes();
    let head = [0x60, 0, 0, 0, high, low, next, hop_limit];
    ethernet(to.mac, from.mac, 0x86dd, &[&head[..], &from.v6, &to.v6, payload].concat())
}

/// An IPv6 fragment header (RFC 8200, 4.5). `offset`: in units of 8 bytes.
pub fn fragment_header(next: u8, offset: u16, more: bool, id: u32) -> Vec<u8> {
    let [high, low] = (offset << 3 | u16::from(more)).to_be_bytes();
    [&[next, 0, high, low][..], &id.to_be_bytes()].concat()
}

/// A TCP segment without payload, with its checksum. `v6`: over IPv6.
pub fn tcp(from: End, to: End, v6: bool, ports: (u16, u16), flags: u8) -> Vec<u8> {
    let mut segment = [ports.0, ports.1].iter().flat_map(|port| port.to_be_bytes()).collect::<Vec<u8>>();
    segment.extend([0, 0, 0, 1, 0, 0, 0, 0, 0x60, flags, 0xff, 0xff, 0, 0, 0, 0]);
    // MSS 1400.
    segment.extend([2, 4, 5, 0x78]);
    with_checksum(from, to, v6, TCP, segment, 16)
}

/// A UDP datagram with its checksum.
pub fn udp(from: End, to: End, v6: bool, ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    let head = [ports.0, ports.1, 8 + payload.len() as u16, 0];
    let datagram = [head.iter().flat_map(|word| word.to_be_bytes()).collect(), payload.to_vec()].concat();
    with_checksum(from, to, v6, UDP, datagram, 6)
}

/// An ICMP or ICMPv6 message with its checksum; `rest` follows type, code and checksum.
pub fn icmp(from: End, to: End, v6: bool, kind: u8, rest: &[u8]) -> Vec<u8> {
    let mut message = [&[kind, 0, 0, 0][..], rest].concat();
    if v6 {
        return with_checksum(from, to, true, ICMPV6, message, 2);
    }
    let sum = checksum(&message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    message
}

/// A ping to the gateway from the attacking guest, with this payload.
pub fn ping_gateway(from: End, payload: &[u8]) -> Vec<u8> {
    let gateway = End::gateway();
    ipv4(from, gateway, ICMP, 1, 0, &icmp(from, gateway, false, 8, &[&[0, 7, 0, 1][..], payload].concat()))
}

fn with_checksum(from: End, to: End, v6: bool, protocol: u8, mut segment: Vec<u8>, at: usize) -> Vec<u8> {
    let length = segment.len() as u16;
    let addresses = if v6 { [&from.v6[..], &to.v6].concat() } else { [&from.v4[..], &to.v4].concat() };
    let pseudo = [&addresses[..], &[0, protocol], &length.to_be_bytes(), &segment].concat();
    let sum = checksum(&pseudo);
    segment[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    segment
}

/// Records the frames that arrive in a namespace.
pub struct Listener {
    seen: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Listener {
    /// Records only frames from `from` and the gateway.
    pub fn start(net: &Net, from: End) -> Listener {
        let seen: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
        let (theirs, ready) = (Arc::downgrade(&seen), Arc::new(std::sync::Barrier::new(2)));
        let is_ready = Arc::clone(&ready);
        net.spawn(move || {
            super::tenants::give_way();
            // ETH_P_ALL, in network byte order.
            let mut socket = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(3 << 8))).unwrap();
            socket.set_recv_buffer_size(4 << 20).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
            is_ready.wait();
            let mut buffer = vec![0; 65_536];
            while let Some(seen) = theirs.upgrade() {
                let Ok(length) = socket.read(&mut buffer) else { continue };
                // Frames from the namespace itself have another source.
                if length >= 14 && (buffer[6..12] == from.mac || buffer[6..12] == super::tenants::GATEWAY_MAC) {
                    seen.lock().unwrap_or_else(PoisonError::into_inner).push(buffer[..length].to_vec());
                }
            }
        });
        ready.wait();
        Listener { seen }
    }

    /// Takes the frames that have arrived so far.
    pub fn take(&self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits for a frame that matches `is_it`; returns whether one arrived.
    pub fn sees(&self, seconds: f64, is_it: impl Fn(&[u8]) -> bool) -> bool {
        let deadline = Instant::now() + Duration::from_secs_f64(seconds);
        while Instant::now() < deadline {
            if self.take().iter().any(|frame| is_it(frame)) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }
}
