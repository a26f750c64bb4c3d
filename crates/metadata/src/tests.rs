//! Clients in virtual time: several guests, and hostile ones.
#![allow(clippy::unwrap_used)]

use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::socket::tcp;
use smoltcp::time::Instant;
use smoltcp::wire::{HardwareAddress, IpAddress, IpCidr};

use super::*;
use crate::link::Link;

const V4: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
const V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);

fn server() -> Server {
    Server::new((V4, V6), 7)
}

fn about(name: &str) -> Arc<Documents> {
    Arc::new(Documents {
        instance_id: format!("i-{name}"),
        hostname: format!("{name}.vpc1.internal"),
        mac: "02:00:00:00:00:01".into(),
        addresses: vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
        mtu: 1500,
        public_keys: vec!["ssh-ed25519 AAAA a".into(), "ssh-ed25519 BBBB b".into()],
        user_data: Some((0..MAX_USER_DATA).map(|n| n as u8).collect()),
    })
}

/// A guest's kernel.
struct Client {
    number: u32,
    about: Arc<Documents>,
    link: Link,
    iface: Interface,
    sockets: SocketSet<'static>,
    next_port: u16,
}

impl Client {
    fn new(number: u32, about: Arc<Documents>) -> Client {
        let mut link = Link::new(1500);
        let mut iface = Interface::new(Config::new(HardwareAddress::Ip), &mut link, Instant::ZERO);
        iface.update_ip_addrs(|addresses| {
            addresses.push(IpCidr::new(IpAddress::v4(10, 0, 0, 1), 0)).unwrap();
            addresses.push(IpCidr::new(IpAddress::v6(0xfd00, 0, 0, 0, 0, 0, 0, 1), 0)).unwrap();
        });
        Client { number, about, link, iface, sockets: SocketSet::new(Vec::new()), next_port: 40_000 }
    }

    fn connect(&mut self, to: impl Into<IpAddress>) -> SocketHandle {
        let buffer = || tcp::SocketBuffer::new(vec![0; 32 << 10]);
        let handle = self.sockets.add(tcp::Socket::new(buffer(), buffer()));
        self.next_port += 1;
        let socket = self.sockets.get_mut::<tcp::Socket<'_>>(handle);
        socket.connect(self.iface.context(), (to.into(), 80), self.next_port).unwrap();
        handle
    }

    fn socket(&mut self, handle: SocketHandle) -> &mut tcp::Socket<'static> {
        self.sockets.get_mut(handle)
    }

    /// Passes packets in both directions until none is left.
    fn exchange(&mut self, server: &mut Server, now_ms: u64) {
        let now = Instant::from_millis(now_ms as i64);
        for _ in 0..100 {
            self.iface.poll(now, &mut self.link, &mut self.sockets);
            let sent: Vec<Vec<u8>> = self.link.sent.drain(..).collect();
            let mut is_idle = sent.is_empty();
            sent.into_iter().for_each(|packet| server.receive(now_ms, self.number, &self.about, packet));
            let mut out = Vec::new();
            server.poll(now_ms, &mut out);
            for (number, packet) in out {
                assert_eq!(number, self.number, "another guest's packet");
                assert!(packet.len() <= 1500);
                self.link.receive(packet);
                is_idle = false;
            }
            if is_idle {
                break;
            }
        }
    }

    /// Sends a request; returns the whole response.
    fn ask(&mut self, server: &mut Server, now_ms: u64, to: impl Into<IpAddress>, request: &[u8]) -> Vec<u8> {
        let handle = self.connect(to);
        self.exchange(server, now_ms);
        self.socket(handle).send_slice(request).unwrap();
        let mut all = Vec::new();
        for _ in 0..100 {
            self.exchange(server, now_ms);
            let socket = self.socket(handle);
            while socket.can_recv() {
                socket
                    .recv(|bytes| {
                        all.extend_from_slice(bytes);
                        (bytes.len(), ())
                    })
                    .unwrap();
            }
            if !socket.may_recv() {
                break;
            }
        }
        self.socket(handle).close();
        self.exchange(server, now_ms);
        self.sockets.remove(handle);
        all
    }

    fn get(&mut self, server: &mut Server, path: &str) -> (String, Vec<u8>) {
        let reply = self.ask(server, 0, V4, format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes());
        let end = reply.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
        let head = String::from_utf8(reply[..end].to_vec()).unwrap();
        (head.split(' ').nth(1).unwrap().to_owned(), reply[end + 4..].to_vec())
    }
}

#[test]
fn documents_have_the_paths_of_ec2() {
    let (mut server, mut client) = (server(), Client::new(3, about("a")));
    let at = |path: &str, client: &mut Client, server: &mut Server| {
        let (status, body) = client.get(server, path);
        assert_eq!(status, "200", "{path}");
        String::from_utf8_lossy(&body).into_owned()
    };
    for (path, expected) in [
        ("/", "2009-04-04\nlatest"),
        ("/latest", "meta-data/\nuser-data"),
        ("/latest/meta-data/", "hostname\ninstance-id\nipv6\nlocal-hostname\nlocal-ipv4\nmac\nnetwork/\npublic-keys/"),
        ("/latest/meta-data/instance-id", "i-a"),
        ("/2009-04-04/meta-data/local-hostname", "a.vpc1.internal"),
        ("//latest//meta-data/local-ipv4/?x=y", "10.0.0.1"),
        ("/latest/meta-data/public-keys/", "0=key-0\n1=key-1"),
        ("/latest/meta-data/public-keys/1/", "openssh-key"),
        ("/latest/meta-data/public-keys/1/openssh-key", "ssh-ed25519 BBBB b"),
        ("/latest/meta-data/network/interfaces/macs", "02:00:00:00:00:01/"),
        ("/latest/meta-data/network/interfaces/macs/02:00:00:00:00:01/ipv6s", "fd00::1"),
    ] {
        assert_eq!(at(path, &mut client, &mut server), expected, "{path}");
    }
    for path in ["/latest/meta-data/none", "/newest/meta-data", "/latest/user-data/x", "/latest/meta-data/hostname/x"] {
        assert_eq!(client.get(&mut server, path).0, "404", "{path}");
    }
    let (status, data) = client.get(&mut server, "/latest/user-data");
    assert_eq!((status.as_str(), Some(data)), ("200", about("a").user_data.clone()));
    let v6 = client.ask(&mut server, 0, V6, b"GET /latest/meta-data/ipv6 HTTP/1.0\r\n\r\n");
    assert!(v6.ends_with(b"\r\n\r\nfd00::1"));
    // Without user data the document does not exist.
    let none = Arc::new(Documents { user_data: None, public_keys: vec![], ..(*about("a")).clone() });
    let mut client = Client::new(4, none);
    assert_eq!(client.get(&mut server, "/latest/").1, b"meta-data/");
    assert_eq!(client.get(&mut server, "/latest/user-data").0, "404");
    assert_eq!(client.get(&mut server, "/latest/meta-data/public-keys").0, "404");
}

#[test]
fn guests_with_the_same_addresses_get_their_own_documents() {
    let mut server = server();
    let mut clients = [Client::new(1, about("a")), Client::new(2, about("b"))];
    let handles = clients.each_mut().map(|client| client.connect(V4));
    clients.iter_mut().for_each(|client| client.exchange(&mut server, 0));
    for (client, handle) in clients.iter_mut().zip(handles) {
        client.socket(handle).send_slice(b"GET /latest/meta-data/instance-id HTTP/1.1\r\n\r\n").unwrap();
    }
    for (client, expected) in clients.iter_mut().zip(["i-a", "i-b"]) {
        assert_eq!(client.get(&mut server, "/latest/meta-data/instance-id").1, expected.as_bytes());
    }
}

#[test]
fn invalid_requests_are_refused() {
    let (mut server, mut client) = (server(), Client::new(3, about("a")));
    let long = [b"GET /latest HTTP/1.1\r\nX: ", &[b'x'; MAX_REQUEST][..]].concat();
    for (request, status) in [
        (&b"\x00\xff\r\n\r\n"[..], "400"),
        (b"GET latest HTTP/1.1\r\n\r\n", "400"),
        (b"GET /latest HTTP/2\r\n\r\n", "400"),
        (b"GET /latest HTTP/1.1 x\r\n\r\n", "400"),
        (b"GET /latest HTTP/1.1\r\nno header\r\n\r\n", "400"),
        (b"GET /latest HTTP/1.1\r\nX-Forwarded-For: 10.0.0.9\r\n\r\n", "403"),
        (b"PUT /latest/api/token HTTP/1.1\r\n\r\n", "405"),
        (&long, "431"),
    ] {
        let reply = client.ask(&mut server, 0, V4, request);
        let expected = format!("HTTP/1.1 {status} ");
        assert!(reply.starts_with(expected.as_bytes()), "{status}: {}", String::from_utf8_lossy(&reply));
    }
    assert_eq!((server.counters().answered_requests, server.counters().refused_requests), (0, 8));
    let head = client.ask(&mut server, 0, V4, b"HEAD /latest HTTP/1.1\r\n\r\n");
    assert!(head.starts_with(b"HTTP/1.1 200 ") && head.ends_with(b"\r\n\r\n"));
}

/// More connections in a row than a guest may have at a time, without a delay: closed connections are reused.
#[test]
fn closed_connections_are_reused() {
    let (mut server, mut client) = (server(), Client::new(3, about("a")));
    for n in 0..50 {
        assert_eq!(client.get(&mut server, "/latest/meta-data/instance-id").1, b"i-a", "request {n}");
    }
    assert_eq!(server.counters().answered_requests, 50);
}

#[test]
fn silent_connections_are_limited_and_expire() {
    let (mut server, mut client) = (server(), Client::new(3, about("a")));
    let silent: Vec<SocketHandle> = (0..CONNECTIONS + 2).map(|_| client.connect(V4)).collect();
    client.exchange(&mut server, 0);
    let open = silent.iter().filter(|handle| client.sockets.get::<tcp::Socket<'_>>(**handle).may_send()).count();
    assert_eq!(open, CONNECTIONS);
    // Another guest is not affected.
    assert_eq!(Client::new(4, about("b")).get(&mut server, "/latest/meta-data/instance-id").1, b"i-b");
    client.exchange(&mut server, LONGEST_MS - 1);
    assert_eq!(server.counters().expired_connections, 0);
    client.exchange(&mut server, LONGEST_MS);
    assert_eq!(server.counters().expired_connections, CONNECTIONS as u64);
    let reply = client.ask(&mut server, LONGEST_MS + 1, V4, b"GET /latest HTTP/1.1\r\n\r\n");
    assert!(reply.starts_with(b"HTTP/1.1 200 "));
    // Idle guests are removed.
    let mut out = Vec::new();
    assert_eq!(server.poll(10 * LONGEST_MS, &mut out), None);
    assert!(server.guests.is_empty());
}

#[test]
fn the_number_of_guests_is_limited() {
    let mut server = server();
    for number in 0..GUESTS as u32 + 5 {
        server.receive(0, number, &about("a"), vec![0; 20]);
    }
    assert_eq!((server.guests.len(), server.counters().refused_packets), (GUESTS, 5));
    server.forget(0);
    assert_eq!(Client::new(1000, about("b")).get(&mut server, "/latest/meta-data/instance-id").1, b"i-b");
}

/// Packets that are damaged at random positions, and random packets: no panic, and another client is served afterwards.
#[test]
fn hostile_packets_do_no_harm() {
    let (mut server, mut client) = (server(), Client::new(3, about("a")));
    let mut state = 1_u64;
    let mut random = move || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 33) as usize
    };
    for round in 0..500_u64 {
        client.connect(if round % 2 == 0 { IpAddress::from(V4) } else { IpAddress::from(V6) });
        client.iface.poll(Instant::from_millis(round as i64), &mut client.link, &mut client.sockets);
        for mut packet in client.link.sent.drain(..).collect::<Vec<_>>() {
            for _ in 0..random() % 4 {
                let at = random() % packet.len();
                packet[at] = random() as u8;
            }
            packet.truncate(1 + random() % packet.len());
            server.receive(round, 3, &client.about, packet);
        }
        server.receive(round, 3, &client.about, (0..random() % 100).map(|_| random() as u8).collect());
        let mut out = Vec::new();
        server.poll(round, &mut out);
        client.sockets = SocketSet::new(Vec::new());
    }
    let mut other = Client::new(9, about("b"));
    assert_eq!(other.get(&mut server, "/latest/meta-data/instance-id").1, b"i-b");
}
