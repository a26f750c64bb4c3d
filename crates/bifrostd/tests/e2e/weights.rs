//! Weights of VPCs and ports: their shares of full links.

use std::io::{Write as _, copy, sink};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common::host::vpc;
use crate::common::{Guest, Lab, Net, Options};

/// TCP connections of a pair of guests, and what each transfers.
const CONNECTIONS: u16 = 4;
const BYTES: u64 = 2 << 20;
/// Rate of each of the two links from the first host to the second one.
const LINK: &str = "tbf rate 20mbit burst 4000 limit 100000";
/// Weight of the second VPC.
const WEIGHT: f64 = 3.0;

/// `a` sends to `b` in one VPC, `c` to `d` in another one, from the first host to the second one.
fn lab() -> Lab {
    let vpcs = vpc(100, "tcp", "flow") + &vpc(200, "tcp", "flow");
    let mut lab = Lab::new(Options { vpcs, ..Options::default() });
    for (host, name, n, address, vni) in [
        (0, "a", 1, "10.0.0.1/24", 100),
        (1, "b", 2, "10.0.0.2/24", 100),
        (0, "c", 3, "10.0.0.3/24", 200),
        (1, "d", 4, "10.0.0.4/24", 200),
    ] {
        lab.add(host, Guest::new(name, n, &[address]).vni(vni));
    }
    for link in ["l0", "l1"] {
        let arguments = format!("qdisc add dev {link} root {LINK}");
        let done = lab.hosts[0].net.command("tc").args(arguments.split(' ')).status().unwrap();
        assert!(done.success(), "tc {arguments}");
    }
    lab
}

/// Sends data over a connection. The thread ends when all of it has arrived.
fn send(from: &Net, to: &Net, address: [u8; 4], port: u16) -> JoinHandle<()> {
    let server = SocketAddr::from((address, port));
    let listener = to.enter(move || TcpListener::bind(server).unwrap());
    let client = from.enter(move || TcpStream::connect_timeout(&server, Duration::from_secs(10)).unwrap());
    let (mut received, _) = listener.accept().unwrap();
    std::thread::spawn(move || {
        let sender = std::thread::spawn(move || (&client).write_all(&vec![7; BYTES as usize]).unwrap());
        assert_eq!(copy(&mut received, &mut sink()).unwrap(), BYTES);
        sender.join().unwrap();
    })
}

/// Both pairs send data, on several connections each, and only in one direction: a share counts packets, so ACKs of data
/// in the other direction would count like full packets. How much more `d` receives than `b` from the time when it has a
/// quarter, so that TCP has opened its windows, until the first connection is done.
fn ratio(lab: &Lab, port: u16) -> f64 {
    let received = || ["b", "d"].map(|name| lab.hosts[1].port(name).rx_bytes);
    let start = received();
    let streams: Vec<JoinHandle<()>> = [("a", "b", [10, 0, 0, 2]), ("c", "d", [10, 0, 0, 4])]
        .iter()
        .flat_map(|pair| (port..port + CONNECTIONS).map(move |port| (pair, port)))
        .map(|(&(from, to, address), port)| send(lab.net(from), lab.net(to), address, port))
        .collect();
    let deadline = Instant::now() + Duration::from_secs(60);
    let wait = |what: &str, is_so: &dyn Fn() -> bool| {
        while !is_so() {
            assert!(Instant::now() < deadline, "{what}: not within a minute");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    wait("a quarter has arrived", &|| received()[1] - start[1] > BYTES * u64::from(CONNECTIONS) / 4);
    let before = received();
    wait("a connection is done", &|| streams.iter().any(JoinHandle::is_finished));
    let after = received();
    streams.into_iter().for_each(|stream| stream.join().unwrap());
    let [b, d] = [0, 1].map(|at| (after[at] - before[at]) as f64);
    d / b
}

#[test]
fn vpcs_share_full_links_by_weight_and_a_reload_changes_the_weight() {
    let mut lab = lab();
    lab.start();
    let equal = ratio(&lab, 5001);
    let config = lab.hosts[0].config.replacen("vni = 200\n", &format!("vni = 200\nweight = {WEIGHT}\n"), 1);
    lab.hosts[0].config = config;
    lab.hosts[0].write_config();
    assert_eq!(lab.hosts[0].client.reload().unwrap().vpcs.changed, ["200"]);
    // The median: a share is that of the weight only while both always have something to send.
    let mut weighted = [6001, 7001, 8001].map(|port| ratio(&lab, port));
    weighted.sort_by(f64::total_cmp);
    println!("{equal:.2} times as much with equal weights, {weighted:.2?} with weight {WEIGHT}");
    assert!((0.75..1.33).contains(&equal), "{equal} times as much with equal weights");
    assert!((0.75 * WEIGHT..1.33 * WEIGHT).contains(&weighted[1]), "{weighted:?} times as much with weight {WEIGHT}");
}
