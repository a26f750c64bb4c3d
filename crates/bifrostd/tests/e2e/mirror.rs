//! Guests' packets are mirrored to a target in VXLAN; the copies are read back with tshark.

use std::net::UdpSocket;
use std::process::Command;
use std::time::Duration;

use bifrost_wire::pcapng::{self, Notes};

use crate::common::traffic::{Talk, ping};
use crate::common::{Lab, Options, eventually, netns};

/// The target is the second host's address.
fn mirror(name: &str, more: &str) -> String {
    let target = "target = \"172.31.0.2:4790\"\n";
    format!("[[mirror]]\nname = \"{name}\"\nports = [\"a\"]\n{target}{more}")
}

/// A copy's fields from tshark.
#[derive(Debug, PartialEq, Eq)]
struct Copied {
    vni: u32,
    source: String,
    /// The ICMP type.
    kind: Option<u8>,
    tcp_port: Option<u16>,
    /// Length of the copy, bytes.
    captured: usize,
    /// Length of the original packet from its IP header, bytes.
    ip_len: usize,
}

/// All copies that have arrived at a socket.
fn copies(lab: &Lab, socket: &UdpSocket) -> Vec<Copied> {
    let mut file = Vec::new();
    pcapng::section(&mut file, "test");
    pcapng::interface(&mut file, "mirror", "copies", 65_535);
    let mut datagram = [0; 65_536];
    while let Ok(len) = socket.recv(&mut datagram) {
        // Outer headers, as far as tshark needs them.
        let udp_len = (8 + len as u16).to_be_bytes();
        let total = (28 + len as u16).to_be_bytes();
        let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];
        frame.extend([0x45, 0, total[0], total[1], 0, 0, 0x40, 0, 64, 17, 0, 0, 172, 31, 0, 1, 172, 31, 0, 2]);
        frame.extend([0xc0, 0, 0x12, 0xb6, udp_len[0], udp_len[1], 0, 0]);
        frame.extend(&datagram[..len]);
        pcapng::packet(&mut file, 0, 0, frame.len() as u32, &frame, Notes::default());
    }
    let path = netns::directory(lab.tag()).join("mirror.pcapng");
    std::fs::write(&path, file).unwrap();
    let fields = ["vxlan.vni", "ip.src", "icmp.type", "tcp.dstport", "frame.len", "ip.len"];
    let output = Command::new("tshark")
        .args(["-n", "-d", "udp.port==4790,vxlan", "-T", "fields", "-E", "occurrence=l"])
        .args(fields.iter().flat_map(|field| ["-e", field]))
        .arg("-r")
        .arg(&path)
        .output()
        .expect("tshark is there: scripts/install-debian-packages.sh installs it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let row = |row: &str| {
        let [vni, source, kind, port, len, ip_len] = row.split('\t').collect::<Vec<_>>()[..] else { panic!("{row:?}") };
        Copied {
            vni: vni.parse().unwrap(),
            source: source.to_owned(),
            kind: kind.parse().ok(),
            tcp_port: port.parse().ok(),
            captured: len.parse::<usize>().unwrap() - 50,
            ip_len: ip_len.parse().unwrap_or(0),
        }
    };
    String::from_utf8(output.stdout).unwrap().lines().map(row).collect()
}

#[test]
fn copies_arrive_at_the_target() {
    let pings = mirror("pings", "target_vni = 4242\nprotocol = \"icmp\"\nprefixes = [\"10.0.0.2/32\"]\n");
    let few =
        mirror("few", "target_vni = 4243\nprotocol = \"icmp\"\ndirection = \"egress\"\none_in = 5\ntruncate = 60\n");
    let web = mirror("web", "target_vni = 4244\nl4_ports = [\"80-89\"]\ndirection = \"ingress\"\n");
    let mut lab = Lab::new(Options::default());
    lab.hosts[0].config.push_str(&format!("{pings}{few}{web}"));
    lab.add(0, crate::common::Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(1, crate::common::Guest::new("b", 2, &["10.0.0.2/24"]));
    lab.start();
    let target = lab.hosts[1].net.enter(|| UdpSocket::bind("172.31.0.2:4790").unwrap());
    target.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 10, 1000), 10);
    let host = &lab.hosts[0];
    let sent = |name: &str| {
        let mirrors = host.client.mirrors().unwrap();
        mirrors.iter().find(|mirror| mirror.name == name).unwrap().sent_packets
    };
    eventually(5.0, "all copies are sent", || (sent("pings"), sent("few")) == (20, 2));
    let seen = copies(&lab, &target);
    let of = |vni: u32| seen.iter().filter(move |copy| copy.vni == vni).collect::<Vec<_>>();
    let asked: Vec<_> = of(4242).into_iter().filter(|c| c.source == "10.0.0.1" && c.kind == Some(8)).collect();
    let answered: Vec<_> = of(4242).into_iter().filter(|c| c.source == "10.0.0.2" && c.kind == Some(0)).collect();
    assert_eq!((asked.len(), answered.len()), (10, 10), "{seen:#?}");
    // Copies are truncated to 256 bytes; the packets are longer.
    assert!(asked.iter().chain(&answered).all(|copy| copy.captured == 256 && copy.ip_len == 1028), "{seen:#?}");
    assert!(of(4243).iter().all(|copy| copy.source == "10.0.0.1" && copy.captured == 60));
    assert_eq!((of(4243).len(), of(4244).len()), (2, 0));

    // A connection: only one direction, only the selected ports; the mirrored guest's traffic is not affected.
    Talk::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001).say(1000);
    assert_eq!(sent("web"), 0);
    let host = &mut lab.hosts[0];
    host.config = host.config.replace("l4_ports = [\"80-89\"]", "l4_ports = [5001]").replace(&few, "");
    host.write_config();
    let report = host.client.reload().unwrap();
    assert_eq!((report.mirrors.changed, report.mirrors.removed), (vec!["web".to_owned()], vec!["few".to_owned()]));
    Talk::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001).say(1000);
    let host = &lab.hosts[0];
    let sent = || host.client.mirrors().unwrap().iter().map(|mirror| mirror.sent_packets).collect::<Vec<_>>();
    eventually(5.0, "the connection is copied", || sent()[1] > 0);
    let seen = copies(&lab, &target);
    assert!(!seen.is_empty() && seen.iter().all(|copy| copy.vni == 4244 && copy.source == "10.0.0.2"), "{seen:#?}");
    assert!(host.client.mirrors().unwrap().iter().all(|mirror| mirror.missed_packets + mirror.unsent_packets == 0));
}
