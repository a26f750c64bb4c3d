//! Conversations through a load balancer and a port forward go with a port to another host.

use std::net::{IpAddr, UdpSocket};
use std::time::Duration;

use crate::common::host::{routes, section, vpc};
use crate::common::netns::Net;
use crate::common::{Guest, Lab, Options};

const VIP: &str = "10.0.0.100";
const REMOTE: &str = "198.51.100.7";
const SHARED: &str = "203.0.113.10";

/// A load balancer for datagrams, whose new conversations go to the backend with weight 1.
fn balancer(weights: [u8; 2]) -> String {
    let [b, d] = weights;
    format!(
        "[[load_balancer]]\nname = \"dns\"\nvni = 100\naddress = \"{VIP}\"\nport = 53\nprotocol = \"udp\"\n\
         [[load_balancer.backend]]\naddress = \"10.0.0.2\"\nport = 5353\nweight = {b}\n\
         [[load_balancer.backend]]\naddress = \"10.0.0.4\"\nport = 5353\nweight = {d}\n"
    )
}

fn forward(uplink: &str) -> String {
    format!(
        "[[uplink]]\nport = \"{uplink}\"\n[[port_forward]]\nvni = 100\nuplink = \"{uplink}\"\nprotocol = \"udp\"\n\
         address = \"{SHARED}\"\nport = 8080\ninside = \"10.0.0.1\"\ninside_port = 7001\n"
    )
}

fn bound(net: &Net, address: &'static str) -> UdpSocket {
    let socket = net.enter(move || UdpSocket::bind(address).unwrap());
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    socket
}

/// The backend that answers the client, which accepts answers from the load balancer alone.
fn ask(client: &UdpSocket, backends: [&UdpSocket; 2]) -> usize {
    client.connect((VIP, 53)).unwrap();
    client.send(b"question").unwrap();
    let mut buffer = [0; 100];
    for _ in 0..500 {
        for (number, backend) in backends.into_iter().enumerate() {
            if let Ok((len, from)) = backend.recv_from(&mut buffer) {
                assert_eq!(from.ip(), IpAddr::from([10, 0, 0, 1]));
                backend.send_to(&buffer[..len], from).unwrap();
                assert_eq!(client.recv(&mut buffer).unwrap(), len);
                return number;
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("no backend was asked");
}

/// A datagram from outside reaches the guest, and its answer comes back from the external address.
fn call(outside: &UdpSocket, guest: &UdpSocket) {
    let mut buffer = [0; 100];
    outside.send_to(b"call", (SHARED, 8080)).unwrap();
    let (len, from) = guest.recv_from(&mut buffer).unwrap();
    assert_eq!(from.ip(), REMOTE.parse::<IpAddr>().unwrap());
    guest.send_to(&buffer[..len], from).unwrap();
    let (_, from) = outside.recv_from(&mut buffer).unwrap();
    assert_eq!(from.ip(), SHARED.parse::<IpAddr>().unwrap());
}

#[test]
fn connections_move_with_a_port() {
    let outside = vpc(900, "off", "off") + &vpc(901, "off", "off");
    let vpcs = format!("{}gateway = [\"10.0.0.254\"]\n{outside}", vpc(100, "tcp", "flow"));
    let mut lab = Lab::new(Options { vpcs, ..Options::default() });
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]).gateway("10.0.0.254"));
    lab.add(1, Guest::new("d", 4, &["10.0.0.4/24"]).gateway("10.0.0.254"));
    lab.add(0, Guest::new("wan", 9, &["203.0.113.1/24"]).vni(900));
    lab.add(1, Guest::new("wan2", 10, &["203.0.113.2/24"]).vni(901));
    lab.hosts[0].config.push_str(&(balancer([1, 0]) + &forward("wan")));
    lab.hosts[1].config.push_str(&(balancer([0, 1]) + &forward("wan2")));
    let without: Vec<String> = lab.hosts.iter().map(|host| host.config.clone()).collect();
    let guest = Guest::new("a", 1, &["10.0.0.1/24"]).gateway("10.0.0.254");
    lab.add(0, guest.clone());
    lab.start();
    for wan in ["wan", "wan2"] {
        lab.net(wan).ip(&format!("addr add {REMOTE}/32 dev lo\n"));
    }
    let backends = [bound(lab.net("b"), "10.0.0.2:5353"), bound(lab.net("d"), "10.0.0.4:5353")];
    backends.iter().for_each(|backend| backend.set_nonblocking(true).unwrap());
    let backends = [&backends[0], &backends[1]];
    let (client, called) = (bound(lab.net("a"), "10.0.0.1:7000"), bound(lab.net("a"), "10.0.0.1:7001"));
    assert_eq!(ask(&client, backends), 0);
    call(&bound(lab.net("wan"), "198.51.100.7:9000"), &called);

    // The guest is on the other host, as a container with the same addresses.
    let moved = lab.hosts[0].client.export_sessions("a").unwrap();
    drop((client, called));
    lab.hosts[0].config = format!("{}{}", without[0], routes(&guest, "host-b"));
    lab.hosts[0].write_config();
    lab.hosts[0].client.reload().unwrap();
    lab.delete_net("a");
    lab.make_net("a");
    lab.hosts[1].config = format!("{}{}", without[1], section(&guest, lab.net("a").name()));
    lab.hosts[1].write_config();
    lab.hosts[1].client.reload().unwrap();
    let taken = lab.hosts[1].client.import_sessions(&moved).unwrap();
    assert_eq!((taken.sessions, taken.left_out), (2, 0));

    // New conversations go to the other backend, the old one stays.
    assert_eq!(ask(&bound(lab.net("a"), "10.0.0.1:7002"), backends), 1);
    assert_eq!(ask(&bound(lab.net("a"), "10.0.0.1:7000"), backends), 0);
    let called = bound(lab.net("a"), "10.0.0.1:7001");
    call(&bound(lab.net("wan2"), "198.51.100.7:9000"), &called);
}
