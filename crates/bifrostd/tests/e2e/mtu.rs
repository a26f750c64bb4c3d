//! Guests with different MTUs: real kernels discover the path MTU, or their packets are fragmented on the path.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use rustix::net::sockopt;

use crate::common::host::{Host, vpc};
use crate::common::traffic::{exchange, ping};
use crate::common::{Guest, Lab, Net, Options, eventually};

const MEGABYTES: u64 = 1 << 20;

/// Whether others may fragment a sender's IPv4 packets.
#[derive(Clone, Copy, PartialEq)]
enum Fragmentation {
    /// DF: no.
    Never,
    /// No DF: yes. The sender's kernel itself only fragments to its own MTU.
    OnPath,
}

/// A UDP socket on each of two guests.
struct Datagrams {
    from: UdpSocket,
    to: UdpSocket,
}

impl Datagrams {
    fn new(from: &Net, to: &Net, address: &str, port: u16, fragmentation: Fragmentation) -> Datagrams {
        let to_address = SocketAddr::new(address.parse().unwrap(), port);
        let receiver = to.enter(move || UdpSocket::bind(to_address).unwrap());
        receiver.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let sender = from.enter(move || {
            let any: IpAddr = if to_address.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
            let socket = UdpSocket::bind((any, 0)).unwrap();
            match (to_address, fragmentation) {
                (SocketAddr::V4(_), Fragmentation::Never) => {
                    sockopt::set_ip_mtu_discover(&socket, sockopt::Ipv4PathMtuDiscovery::DO).unwrap();
                }
                (SocketAddr::V4(_), Fragmentation::OnPath) => {
                    sockopt::set_ip_mtu_discover(&socket, sockopt::Ipv4PathMtuDiscovery::OMIT).unwrap();
                }
                (SocketAddr::V6(_), _) => {
                    sockopt::set_ipv6_mtu_discover(&socket, sockopt::Ipv6PathMtuDiscovery::DO).unwrap();
                }
            }
            socket.connect(to_address).unwrap();
            socket
        });
        Datagrams { from: sender, to: receiver }
    }

    /// The sender's kernel's path MTU.
    fn path_mtu(&self) -> u32 {
        if self.from.peer_addr().unwrap().is_ipv4() {
            sockopt::ip_mtu(&self.from).unwrap()
        } else {
            sockopt::ipv6_mtu(&self.from).unwrap()
        }
    }

    /// Sends datagrams of `size` bytes until one arrives intact.
    fn arrives(&self, size: usize) {
        let sent: Vec<u8> = (0..size).map(|i| (i * 7 + size) as u8).collect();
        let mut got = vec![0; 65_536];
        eventually(10.0, &format!("{size} bytes arrive"), || {
            // May return an error about an earlier datagram.
            let _ = self.from.send(&sent);
            self.to.recv(&mut got).is_ok_and(|len| got[..len] == sent)
        });
    }

    /// Sends datagrams of `size` bytes, which are too large, until the kernel knows the path MTU. None arrives.
    fn learns(&self, size: usize, mtu: u32) {
        eventually(10.0, &format!("the path MTU is {mtu}"), || {
            let _ = self.from.send(&vec![0; size]);
            std::thread::sleep(Duration::from_millis(5));
            self.path_mtu() == mtu
        });
        let error = self.from.send(&vec![0; size]).and_then(|_| self.from.send(&vec![0; size])).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EMSGSIZE), "{error}");
        assert!(self.to.recv(&mut [0; 10]).is_err(), "a datagram above the path MTU arrived");
    }
}

/// The sum of a counter over a host's ports.
fn ports_counted(host: &Host, counter: &str) -> u64 {
    host.client.samples().unwrap().iter().filter(|s| s.counter == counter).map(|s| s.value).sum()
}

/// `a`, with an MTU of 8500 bytes, is on one host; `b`, with 1500, and `c`, with 8500, are on the other.
fn lab(options: Options) -> Lab {
    let mut lab = Lab::new(Options { mtu: 9000, ..options });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24", "fd01::1/64"]).mtu(8500));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24", "fd01::2/64"]).mtu(1500));
    lab.add(1, Guest::new("c", 3, &["10.0.0.3/24", "fd01::3/64"]).mtu(8500));
    lab.start();
    lab
}

#[test]
fn routes_have_the_guests_mtu() {
    let lab = lab(Options { path_mtu: true, ..Options::default() });
    let (a, b) = (lab.net("a"), lab.net("b"));
    let fragments = Datagrams::new(a, b, "10.0.0.2", 6001, Fragmentation::OnPath);
    // The last datagram leaves the guest in fragments already.
    for size in [1472, 1473, 4000, 6000, 20_000] {
        fragments.arrives(size);
    }
    let sender = &lab.hosts[0];
    let fragmented = ports_counted(sender, "avs.fragmented_packets");
    assert!(fragmented >= 6, "{fragmented} packets fragmented");
    assert_eq!(ports_counted(sender, "avs.too_big_packets"), 0);
    Datagrams::new(a, b, "10.0.0.2", 6002, Fragmentation::Never).learns(4000, 1500);
    Datagrams::new(a, b, "fd01::2", 6003, Fragmentation::Never).learns(4000, 1500);
    assert!(ports_counted(sender, "avs.too_big_packets") >= 2);
    Datagrams::new(a, b, "10.0.0.2", 6004, Fragmentation::Never).arrives(1472);
    Datagrams::new(a, b, "fd01::2", 6005, Fragmentation::Never).arrives(1452);
    assert_eq!(ping(a, "10.0.0.2", 5, 4000), 5, "a kernel that knows the path MTU fragments by itself");
    exchange(a, b, "10.0.0.2", 5001, 4 * MEGABYTES);
    exchange(b, a, "fd01::1", 5002, 4 * MEGABYTES);
    let receiver = &lab.hosts[1];
    assert_eq!(
        (ports_counted(receiver, "avs.fragmented_packets"), ports_counted(receiver, "avs.too_big_packets")),
        (0, 0)
    );
    assert_eq!(receiver.counter("drop.too_large_packets"), 0);
    lab.assert_nothing_given_up();
}

#[test]
fn jumbo_frames_pass_whole() {
    let lab = lab(Options { path_mtu: true, vpcs: vpc(100, "all", "flow"), ..Options::default() });
    let (a, c) = (lab.net("a"), lab.net("c"));
    Datagrams::new(a, c, "10.0.0.3", 6001, Fragmentation::Never).arrives(8472);
    Datagrams::new(c, a, "fd01::1", 6002, Fragmentation::Never).arrives(8452);
    let before = lab.hosts[0].counter("rte.sent_packets");
    exchange(a, c, "10.0.0.3", 5001, 8 * MEGABYTES);
    let sent = lab.hosts[0].counter("rte.sent_packets") - before;
    // 993 segments of 8448 bytes, their acknowledgements, and some shorter packets.
    assert!(sent > 900 && sent < 3000, "{sent} packets");
    for host in &lab.hosts {
        for counter in ["drop.too_large_packets", "drop.no_buffer_packets"] {
            assert_eq!(host.counter(counter), 0, "{counter} of {}", host.name);
        }
        for counter in ["avs.fragmented_packets", "avs.too_big_packets"] {
            assert_eq!(ports_counted(host, counter), 0, "{counter} of {}", host.name);
        }
    }
    lab.assert_nothing_given_up();
}

/// Routes without MTU: the host of the guest with the smaller MTU reacts.
fn the_receiving_host(reliability: &str) {
    let lab = lab(Options { vpcs: vpc(100, reliability, "flow"), ..Options::default() });
    let (a, b) = (lab.net("a"), lab.net("b"));
    Datagrams::new(a, b, "10.0.0.2", 6001, Fragmentation::OnPath).arrives(6000);
    let receiver = &lab.hosts[1];
    assert!(ports_counted(receiver, "avs.fragmented_packets") >= 1);
    Datagrams::new(a, b, "10.0.0.2", 6002, Fragmentation::Never).learns(4000, 1500);
    Datagrams::new(a, b, "fd01::2", 6003, Fragmentation::Never).learns(4000, 1500);
    assert!(ports_counted(receiver, "avs.too_big_packets") >= 2);
    // Nothing is retransmitted forever: packets that are too large are acknowledged.
    lab.assert_nothing_given_up();
    exchange(a, b, "10.0.0.2", 5001, MEGABYTES);
    assert_eq!(
        ports_counted(&lab.hosts[0], "avs.fragmented_packets") + ports_counted(&lab.hosts[0], "avs.too_big_packets"),
        0
    );
}

#[test]
fn the_receiving_host_reports_reliable_packets() {
    the_receiving_host("all");
}

#[test]
fn the_receiving_host_reports_plain_packets() {
    the_receiving_host("off");
}

#[test]
fn tcp_is_fragmented_on_a_path_with_a_smaller_mtu_than_both_ends() {
    let mut lab = Lab::new(Options::default());
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
    lab.hosts[0].config = lab.hosts[0].config.replace("[[route]]", "[[route]]\nmtu = 1000");
    lab.start();
    let (a, b) = (lab.net("a"), lab.net("b"));
    exchange(a, b, "10.0.0.2", 5001, 2 * MEGABYTES);
    let fragments = ports_counted(&lab.hosts[0], "avs.fragmented_packets");
    assert!(fragments > 0, "nothing was fragmented");
    assert_eq!(ports_counted(&lab.hosts[1], "avs.fragmented_packets"), 0);
    lab.assert_nothing_given_up();
}
