//! Weights of VPCs and ports: their shares of full links.

use std::time::{Duration, Instant};

use crate::common::host::vpc;
use crate::common::traffic::Exchange;
use crate::common::{Guest, Lab, Options};

/// TCP connections of a pair of guests, and what each transfers.
const CONNECTIONS: u16 = 4;
const BYTES: u64 = 3 << 20;
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

/// Both pairs transfer data, on several connections each. How much more `d` receives than `b` from the time when it has
/// a quarter, so that TCP has opened its windows, until the first connection is done.
fn ratio(lab: &Lab, port: u16) -> f64 {
    let received = || ["b", "d"].map(|name| lab.hosts[1].port(name).rx_bytes);
    let start = received();
    let streams: Vec<Exchange> = [("a", "b", "10.0.0.2"), ("c", "d", "10.0.0.4")]
        .iter()
        .flat_map(|pair| (port..port + CONNECTIONS).map(move |port| (pair, port)))
        .map(|(&(from, to, address), port)| Exchange::start(lab.net(from), lab.net(to), address, port, BYTES))
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
    wait("a connection is done", &|| streams.iter().any(Exchange::is_finished));
    let after = received();
    streams.into_iter().for_each(Exchange::finish);
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
    let weighted = ratio(&lab, 6001);
    println!("{equal:.2} times as much with equal weights, {weighted:.2} with weight {WEIGHT}");
    // A VPC's share is that of its weight only while its guests always have something to send, which depends on their
    // TCP's windows, too.
    assert!((0.6..1.5).contains(&equal), "{equal} times as much with equal weights");
    assert!((1.6..1.5 * WEIGHT).contains(&weighted), "{weighted} times as much with weight {WEIGHT}");
}
