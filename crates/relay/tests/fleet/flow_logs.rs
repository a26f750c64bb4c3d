//! Flow logs of projects: hosts begin and end to log while they run, and only what they are to.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Instant;

use crate::netns::Net;
use crate::world::World;

/// A connection is logged a second after its end, by a thread that scans all of them within a second.
const SOON_S: f64 = 15.0;
const BYTES: usize = 100_000;

/// A record about a connection, as IPFIX has it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Logged {
    vni: u32,
    port: String,
    source: Ipv4Addr,
    destination: SocketAddr,
    bytes: u64,
}

/// The IPv4 records in a message (RFC 7011) with the fields of `bifrostd`'s template.
fn records(message: &[u8]) -> Vec<Logged> {
    let half = |at: usize| u16::from_be_bytes([message[at], message[at + 1]]);
    assert_eq!((half(0), usize::from(half(2))), (10, message.len()), "a message of version 10");
    let mut all = Vec::new();
    if half(16) != 256 {
        return all;
    }
    let mut set = &message[20..16 + usize::from(half(18))];
    while !set.is_empty() {
        let address = |at: usize| Ipv4Addr::new(set[at], set[at + 1], set[at + 2], set[at + 3]);
        let port = u16::from_be_bytes([set[26], set[27]]);
        // Two times, two addresses, two ports, the protocol; packets and bytes both ways; three flags; the network.
        let (bytes, vni) = (u64::from_be_bytes(set[37..45].try_into().unwrap()), &set[73..76]);
        let name = 77 + usize::from(set[76]);
        all.push(Logged {
            vni: u32::from_be_bytes([0, vni[0], vni[1], vni[2]]),
            port: String::from_utf8(set[77..name].to_vec()).unwrap(),
            source: address(16),
            destination: SocketAddr::from((address(20), port)),
            bytes,
        });
        // The duration of the handshake, and the reason of a drop.
        set = &set[name + 5 + usize::from(set[name + 4])..];
    }
    all
}

/// What comes within some seconds, or until something has come.
fn collect(collector: &UdpSocket, seconds: f64, until: impl Fn(&BTreeSet<Logged>) -> bool) -> BTreeSet<Logged> {
    let (mut all, begin, mut buffer) = (BTreeSet::new(), Instant::now(), vec![0; 65_536]);
    while begin.elapsed().as_secs_f64() < seconds && !until(&all) {
        if let Ok(len) = collector.recv(&mut buffer) {
            all.extend(records(&buffer[..len]));
        }
    }
    all
}

/// A connection with some bytes in one direction, from its beginning to its end.
fn talk(client: &Net, server: &Net, at: &str) {
    let (listening, to) = (at.to_owned(), at.to_owned());
    let listener = server.enter(move || TcpListener::bind(listening).unwrap());
    let serving = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_to_end(&mut Vec::new()).unwrap()
    });
    let mut stream = client.enter(move || TcpStream::connect(to).unwrap());
    stream.write_all(&vec![7; BYTES]).unwrap();
    drop(stream);
    assert_eq!(serving.join().unwrap(), BYTES);
}

/// Two networks with the same addresses on the same hosts: one is logged, by one command, until another takes the log
/// away. A log of one guest is on its host only.
#[test]
fn a_flow_log_has_the_connections_of_its_network() {
    let mut world = World::new(2);
    world.run_all();
    let [red1, red2, blue1, blue2] = ["red1", "red2", "blue1", "blue2"].map(|role| world.guest(role));
    let mut yaml = "- {key: host/h1, addresses: [192.0.2.1]}\n- {key: host/h2, addresses: [192.0.2.2]}\n".to_owned();
    for (vpc, guests) in [("red", [&red1, &red2]), ("blue", [&blue1, &blue2])] {
        yaml += &format!("- key: vpc/demo/{vpc}\n- {{key: subnet/demo/{vpc}, vpc: {vpc}, prefix: 10.0.0.0/24}}\n");
        for (n, guest) in (1..).zip(guests) {
            yaml += &format!("- {{key: port/demo/{vpc}{n}, subnets: [{vpc}], host: h{n}, netns: {}}}\n", guest.name());
        }
    }
    world.apply(&yaml);
    let collector = world.collector(4739);
    let to = collector.local_addr().unwrap();
    let on_host = |host: usize| world.hosts()[host].client().flow_log().unwrap();
    let both = |port: u16| {
        talk(&red1, &red2, &format!("10.0.0.3:{port}"));
        talk(&blue1, &blue2, &format!("10.0.0.3:{port}"));
    };
    // Before there is a log.
    both(8080);
    world.fleet(&format!("add flow_log/demo/red vpc=red collector={to} record=accepted --wait 20"));
    let red = world.fleet_json("get vpc/demo/red")[0]["spec"]["vni"].as_u64().unwrap() as u32;
    both(8081);
    let ports = |all: &BTreeSet<Logged>| all.iter().map(|record| record.port.clone()).collect::<BTreeSet<_>>();
    let of_red = BTreeSet::from(["demo.red1".to_owned(), "demo.red2".to_owned()]);
    let all = collect(&collector, SOON_S, |all| ports(all) == of_red);
    assert_eq!((ports(&all), all.len()), (of_red, 2), "one record at each end: {all:?}\n{}", world.logs());
    for record in &all {
        assert_eq!((record.vni, record.source.to_string().as_str()), (red, "10.0.0.2"), "{all:?}");
        assert_eq!(record.destination.to_string(), "10.0.0.3:8081");
        assert!(record.bytes > BYTES as u64, "with headers: {all:?}");
    }
    let why = world.fleet_json("why flow_log/demo/red");
    assert_eq!(why["hosts"].as_array().unwrap().len(), 2, "{why}");

    // An open connection stays in its record while other logs come, change and go.
    let server = red2.enter(|| TcpListener::bind("10.0.0.3:8082").unwrap());
    let mut open = red1.enter(|| TcpStream::connect("10.0.0.3:8082").unwrap());
    let (mut other_end, _) = server.accept().unwrap();
    let mut say = || {
        open.write_all(&[7; 1000]).unwrap();
        other_end.read_exact(&mut [0; 1000]).unwrap();
    };
    say();
    world.fleet(&format!("add flow_log/demo/one guests=blue2 collector={to} idle_timeout_s=1 --wait 20"));
    say();
    world.fleet("set flow_log/demo/one active_timeout_s=30 --wait 20");
    assert_eq!([0, 1].map(|host| on_host(host).logs.len()), [1, 2], "blue2 is on h2");
    assert_eq!(on_host(1).logs[0].ports, ["demo.blue2"]);
    talk(&blue1, &blue2, "10.0.0.3:8083");
    let all = collect(&collector, SOON_S, |all| !all.is_empty());
    assert!(all.iter().all(|record| record.port == "demo.blue2" && record.destination.port() == 8083), "{all:?}");
    world.fleet("delete flow_log/demo/one --wait 20");
    say();
    drop((open, other_end));
    let all = collect(&collector, SOON_S, |all| all.len() == 2);
    let is_whole = |record: &Logged| record.destination.port() == 8082 && record.bytes > 3000;
    assert!(all.len() == 2 && all.iter().all(is_whole), "{all:?}\n{}", world.logs());

    // A tenant's log may not have a file of its choice, and its collector is an address.
    let tool = world.tool(0);
    for bad in ["json=/etc/crontab", "collector=here", "collector=192.0.2.9:4739 flows=1000000"] {
        let refused = tool.run(&format!("add flow_log/demo/bad vpc=red {bad}")).unwrap_err();
        assert!(refused.contains("flow_log/demo/bad: "), "{refused}");
    }
    world.fleet("delete flow_log/demo/red --wait 20");
    both(8084);
    let late = collect(&collector, 3.5, |_| false);
    assert!(late.is_empty(), "nothing is logged any more: {late:?}");
    // Of a sample both hosts log the same connections.
    world.fleet(&format!("add flow_log/demo/some vpc=red collector={to} one_in=3 --wait 20"));
    (9000..9030).for_each(|port| talk(&red1, &red2, &format!("10.0.0.3:{port}")));
    let of = |all: &BTreeSet<Logged>, port: &str| {
        let of_port = all.iter().filter(|record| record.port == port);
        of_port.map(|record| record.destination.port()).collect::<BTreeSet<u16>>()
    };
    // What is not logged within some seconds is not logged.
    let all = collect(&collector, 5.0, |_| false);
    let [sent, received] = ["demo.red1", "demo.red2"].map(|port| of(&all, port));
    assert!(sent == received && (1..30).contains(&sent.len()), "{sent:?} {received:?}\n{}", world.logs());
    for host in [0, 1] {
        let status = on_host(host);
        assert!(status.unsampled_packets > 0 && status.logs[0].one_in == 3, "{status:?}");
    }
    world.fleet("delete flow_log/demo/some --wait 20");
    assert!(world.hosts().iter().all(|host| !host.objects().iter().any(|object| object.contains("flow_log"))));
}
