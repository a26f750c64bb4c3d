//! Outer DSCPs, as the other host receives them.

use std::net::UdpSocket;

use socket2::SockRef;

use crate::common::traffic::exchange;
use crate::common::{Guest, Lab, Net, Options, eventually};

/// DSCPs that rules count, by their names in nftables.
const CLASSES: [&str; 4] = ["cs0", "af41", "ef", "cs6"];

/// Counts packets that arrive in `net` (a large packet with its segments once) by UDP port (0: any protocol) and DSCP.
fn count(net: &Net, ports: &[u16]) {
    let mut rules = String::from("table ip classes {\n");
    let all = || ports.iter().flat_map(|port| CLASSES.map(|class| (port, class)));
    for (port, class) in all() {
        rules += &format!(" counter p{port}_{class} {{}}\n");
    }
    rules += " chain in {\n  type filter hook prerouting priority 0;\n";
    for (port, class) in all() {
        let port_is = if *port == 0 { String::new() } else { format!("udp dport {port} ") };
        rules += &format!("  {port_is}ip dscp {class} counter name p{port}_{class}\n");
    }
    let output = net.run("nft", &["-f", "-"], &(rules + " }\n}\n"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Packets that were counted.
fn counted(net: &Net, port: u16, class: &str) -> u64 {
    let output = net.run("nft", &["list", "counter", "ip", "classes", &format!("p{port}_{class}")], "");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let packets = text.split_whitespace().skip_while(|word| *word != "packets").nth(1);
    packets.and_then(|packets| packets.parse().ok()).unwrap_or_else(|| panic!("{text}"))
}

/// Sends 20 packets with a DSCP, not carried by the transport.
fn send(net: &Net, dscp: u32) {
    net.enter(move || {
        let socket = UdpSocket::bind(("0.0.0.0", 0)).unwrap();
        SockRef::from(&socket).set_tos_v4(dscp << 2).unwrap();
        (0..20).for_each(|_| assert_eq!(socket.send_to(b"marked", ("10.0.0.2", 9)).unwrap(), 6));
    });
}

#[test]
fn the_outer_header_has_the_configured_class() {
    let mut lab = Lab::new(Options::default());
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
    lab.add(0, Guest::new("c", 3, &["10.0.0.3/24"]));
    let config = &mut lab.hosts[0].config;
    *config = config.replacen("[underlay]\n", "[underlay]\ncontrol_dscp = 48\n", 1);
    let unmarked = config.clone();
    for (n, dscp) in [(1, "46"), (3, "\"copy\"")] {
        let mac = format!("mac = \"02:00:00:00:00:{n:02x}\"\n");
        assert!(config.contains(&mac));
        *config = config.replacen(&mac, &format!("{mac}dscp = {dscp}\n"), 1);
    }
    lab.start();
    let (host, b) = (&lab.hosts[1].net, lab.net("b"));
    count(host, &[4789, 4794]);
    count(b, &[0]);
    // A fixed DSCP marks all packets of a port; acknowledgements have their own. The other host marks nothing.
    exchange(lab.net("a"), b, "10.0.0.2", 5001, 4 << 20);
    assert!(counted(host, 4794, "ef") > 10 && counted(host, 4794, "cs6") > 10);
    count(&lab.hosts[0].net, &[4794]);
    exchange(b, lab.net("a"), "10.0.0.1", 5002, 4 << 20);
    assert!(counted(&lab.hosts[0].net, 4794, "cs0") > 10);
    assert_eq!(counted(&lab.hosts[0].net, 4794, "cs6") + counted(&lab.hosts[0].net, 4794, "ef"), 0);
    // The DSCP of packets that are not carried reliably is copied, except network control. The inner DSCP stays.
    let plain = ["cs0", "af41", "cs6"].map(|class| counted(host, 4789, class));
    send(lab.net("c"), 34);
    send(lab.net("c"), 48);
    eventually(5.0, "all arrive", || counted(b, 0, "af41") == 20 && counted(b, 0, "cs6") == 20);
    assert!(counted(host, 4789, "af41") > plain[1]);
    assert_eq!(counted(host, 4789, "cs6"), plain[2]);
    assert!(counted(host, 4789, "cs0") > plain[0]);
    let reliable = counted(host, 4794, "cs0");
    exchange(lab.net("c"), b, "10.0.0.2", 5003, 4 << 20);
    assert!(counted(host, 4794, "cs0") > reliable + 10, "one connection, one class");
    // A reload changes the class of a running port.
    lab.hosts[0].config = unmarked;
    lab.hosts[0].write_config();
    lab.hosts[0].client.reload().unwrap();
    let [unmarked, marked] = ["cs0", "ef"].map(|class| counted(&lab.hosts[1].net, 4789, class));
    send(lab.net("a"), 46);
    eventually(5.0, "all arrive", || counted(lab.net("b"), 0, "ef") == 20);
    assert!(counted(&lab.hosts[1].net, 4789, "cs0") > unmarked);
    assert_eq!(counted(&lab.hosts[1].net, 4789, "ef"), marked);
    lab.hosts.iter().for_each(|host| host.assert_balanced());
}
