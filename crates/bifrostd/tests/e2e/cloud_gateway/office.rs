//! A customer's office: a kernel whose device `tunnel` leads to the gateway through GRE.
//!
//! It is a TUN device, because not every kernel has GRE devices: the kernel fragments and reassembles packets as for a
//! GRE device, and a thread adds and removes the GRE header.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use bifrost_wire::ethernet::ethertype;
use bifrost_wire::gre;
use socket2::{Domain, Protocol, Socket, Type};

use super::world::Underlay;
use crate::common::Net;

/// The tunnel's key in the gateway's configuration.
const KEY: u32 = 7;
const IPV4_HEADER: usize = 20;
const LONGEST: usize = 2000;

pub(super) struct Office {
    pub(super) net: Net,
    seen: Arc<Seen>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// Fragments that crossed the tunnel, of IPv4 and IPv6.
#[derive(Debug, Default)]
struct Seen {
    to_gateway: [AtomicU64; 2],
    from_gateway: [AtomicU64; 2],
}

impl Office {
    pub(super) fn start(net: Net, underlay: Underlay) -> Office {
        let own = underlay.address(20);
        let gateway: IpAddr = underlay.address(3).parse().unwrap();
        let (bits, nodad) = if underlay.v6 { (64, "nodad") } else { (24, "") };
        net.ip(&format!("addr add {own}/{bits} dev l0 {nodad}\n"));
        let device = net.enter(tun);
        net.ip(
            "link set tunnel mtu 1400 up\naddr add 10.50.0.1/32 dev lo\naddr add fd50::1/128 dev lo nodad\nlink set lo up\n\
             route add 10.1.0.0/24 dev tunnel src 10.50.0.1\nroute add fd01::/64 dev tunnel src fd50::1\n",
        );
        let seen = Arc::new(Seen::default());
        let socket = net.enter(move || {
            let domain = if gateway.is_ipv4() { Domain::IPV4 } else { Domain::IPV6 };
            Socket::new(domain, Type::RAW, Some(Protocol::from(i32::from(bifrost_wire::protocol::GRE)))).unwrap()
        });
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let (mut reader, mut writer) = (device.try_clone().unwrap(), device);
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let (sender, mut receiver) = (socket.try_clone().unwrap(), socket);
        let (out, back) = (Arc::clone(&seen), Arc::clone(&seen));
        let to_gateway = std::thread::spawn(move || {
            let mut packet = [0; LONGEST];
            while let Ok(len) = reader.read(&mut packet) {
                let packet = &packet[..len];
                let kind = ethertype_of(packet);
                out.to_gateway[usize::from(kind == ethertype::IPV6)]
                    .fetch_add(is_fragment(packet).into(), Ordering::Relaxed);
                let header = gre::Header { key: KEY, ethertype: kind }.emit();
                let _ = sender.send_to(&[&header[..], packet].concat(), &SocketAddr::new(gateway, 0).into());
            }
        });
        let from_gateway = std::thread::spawn(move || {
            let mut bytes = [0; LONGEST];
            while !stopped.load(Ordering::Relaxed) {
                let Ok(len) = receiver.read(&mut bytes) else { continue };
                // A raw IPv4 socket includes the IP header.
                let payload = &bytes[if gateway.is_ipv4() { IPV4_HEADER } else { 0 }..len];
                let (header, packet) = gre::Header::parse(payload).unwrap();
                assert_eq!((header.key, header.ethertype), (KEY, ethertype_of(packet)));
                let seen = &back.from_gateway[usize::from(header.ethertype == ethertype::IPV6)];
                seen.fetch_add(is_fragment(packet).into(), Ordering::Relaxed);
                let _ = writer.write_all(packet);
            }
        });
        Office { net, seen, stop, threads: vec![to_gateway, from_gateway] }
    }

    /// Fragments to the gateway and from it, of IPv4 and IPv6 each.
    pub(super) fn fragments(&self) -> [u64; 4] {
        let Seen { to_gateway: [a, b], from_gateway: [c, d] } = &*self.seen;
        [a, b, c, d].map(|count| count.load(Ordering::Relaxed))
    }
}

impl Drop for Office {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // This ends its reader.
        self.net.ip("link del tunnel\n");
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn ethertype_of(packet: &[u8]) -> u16 {
    if packet[0] >> 4 == 4 { ethertype::IPV4 } else { ethertype::IPV6 }
}

fn is_fragment(packet: &[u8]) -> bool {
    bifrost_nic::parse_packet(ethertype_of(packet), packet).is_ok_and(|parsed| parsed.is_fragment())
}

/// A TUN device in the thread's namespace. It is removed with its descriptor.
fn tun() -> File {
    const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
    let file = File::options().read(true).write(true).open("/dev/net/tun").unwrap();
    // SAFETY: a C struct of bytes and integers, for which all zeros is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"tunnel") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes one ifreq.
    assert_eq!(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF as _, &mut request) }, 0);
    file
}
