//! Upgrades to a configuration with another `[underlay]`, `[transport]` or `[workers]`: guests' streams continue.

use std::time::Duration;

use crate::common::host::Host;
use crate::common::traffic::{Echo, Requests, exchange, ping};
use crate::common::{Guest, Lab, Options, eventually};
use crate::kept::{index, serve_echo};
use crate::upgrade::faulty;

const PATIENCE: Duration = Duration::from_secs(20);

fn running(options: Options) -> Lab {
    let mut lab = Lab::new(options);
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24", "fd00::1/64"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24", "fd00::2/64"]));
    lab.start();
    lab
}

/// Replaces text of a host's configuration, in the file as well.
fn change(host: &mut Host, from: &str, to: &str) {
    assert!(host.config.contains(from), "{from:?} in {}", host.config);
    host.config = host.config.replacen(from, to, 1);
    host.write_config();
}

/// Streams in both directions, and requests.
struct Load {
    echoes: [Echo; 2],
    requests: Requests,
}

impl Load {
    fn start(lab: &Lab) -> Load {
        for port in [5001, 5003] {
            serve_echo(lab.net("b"), "10.0.0.2", port);
        }
        serve_echo(lab.net("a"), "fd00::1", 5001);
        let echoes = [Echo::start(lab.net("a"), "10.0.0.2", 5001), Echo::start(lab.net("b"), "fd00::1", 5001)];
        Load { echoes, requests: Requests::start(lab.net("a"), "10.0.0.2", 5003) }
    }

    fn goes_on(&self) {
        self.echoes.iter().for_each(|echo| echo.wait_for_progress(1 << 20, PATIENCE));
        self.requests.wait_for(20);
    }

    fn finish(self) {
        self.echoes.into_iter().for_each(|echo| assert!(echo.finish() > 1 << 20));
        self.requests.finish();
    }
}

/// Upgrades the first host to its changed configuration. Before that, new daemons fail after several steps, and the old
/// one continues.
fn upgrade(lab: &mut Lab, load: &Load, what: &str) {
    load.goes_on();
    let (pid, device) = (lab.hosts[0].pid(), index(lab.net("a")));
    for fault in ["exit prepared", "kill stopped", "exit taken", "kill begun", "exit working"] {
        let program = faulty(&lab.hosts[0], fault);
        let error = lab.hosts[0].upgrade(Some(&program)).unwrap_err().to_string();
        assert!(error.contains("the running daemon continues"), "{what}, {fault}: {error}");
        assert_eq!(lab.hosts[0].client.status().unwrap().pid, pid);
        load.goes_on();
    }
    let report = lab.hosts[0].upgrade(None).unwrap_or_else(|e| panic!("{what}: {e}\n{}", lab.hosts[0].log()));
    println!("{what}: {report}");
    load.goes_on();
    lab.hosts[0].assert_balanced();
    assert_eq!(index(lab.net("a")), device);
}

/// Source ports of the datagrams that a host sends.
fn source_ports(host: &Host) -> Vec<u16> {
    let output = host.net.run("ss", &["-Hnaup"], "").stdout;
    let text = String::from_utf8_lossy(&output).into_owned();
    let local = text.lines().filter_map(|line| line.split_whitespace().nth(3)?.rsplit_once(':')?.1.parse().ok());
    let mut ports: Vec<u16> = local.collect();
    ports.sort_unstable();
    ports.dedup();
    ports
}

#[test]
fn paths_mtu_and_ports_change_in_an_upgrade() {
    let mut lab = running(Options::default());
    let load = Load::start(&lab);
    load.goes_on();
    let paths = |host: &Host| host.client.paths().unwrap().len();
    assert_eq!(paths(&lab.hosts[0]), 4);
    let before = source_ports(&lab.hosts[0]);
    change(&mut lab.hosts[0], "paths = 4\nmtu = 1700\n", "paths = 8\nmtu = 1600\nsource_port_base = 52000\n");
    upgrade(&mut lab, &load, "more paths");
    assert_eq!(paths(&lab.hosts[0]), 8);
    eventually(5.0, "the former source ports are closed", || {
        let now = source_ports(&lab.hosts[0]);
        now.iter().filter(|port| (52000..52008).contains(*port)).count() == 8
            && before.iter().all(|port| [4789, 4794].contains(port) || !now.contains(port))
    });
    change(&mut lab.hosts[0], "paths = 8\nmtu = 1600\nsource_port_base = 52000\n", "paths = 2\nmtu = 1700\n");
    upgrade(&mut lab, &load, "fewer paths");
    assert_eq!(paths(&lab.hosts[0]), 2);
    // Settings of workers and of the transport.
    change(&mut lab.hosts[0], "[workers]\n", "[workers]\nanswer_us = 400\n");
    change(&mut lab.hosts[0], "[transport]\n", "[transport]\nack_threshold = 8\n");
    upgrade(&mut lab, &load, "workers and transport");
    load.finish();
    exchange(lab.net("b"), lab.net("a"), "10.0.0.1", 5002, 1 << 20);
}

/// One address and several: the kernel has another socket for them, on the same port. `next`: the number of workers with
/// one address; `workers`: with several.
fn change_addresses(workers: usize, next: usize, v6: bool) {
    let mut lab = running(Options { workers, v6, ..Options::default() });
    let load = Load::start(&lab);
    load.goes_on();
    let own = format!("addresses = [\"{}\", \"{}\"]", lab.hosts[0].addresses[0], lab.hosts[0].addresses[1]);
    let first = format!("addresses = [\"{}\"]", lab.hosts[0].addresses[0]);
    // The other host must use no more than that: its datagrams to the other address are not accepted afterwards.
    for (from, to) in [(&own, &first), (&first, &own)] {
        if to == &first {
            lab.hosts[1].config = lab.hosts[1].config.replacen(&own, &first, 1);
            lab.hosts[1].write_config();
            lab.hosts[1].client.reload().unwrap();
        }
        let (before, after) = if to == &first { (workers, next) } else { (next, workers) };
        change(&mut lab.hosts[0], from, to);
        if before != after {
            change(&mut lab.hosts[0], &format!("count = {before}\n"), &format!("count = {after}\n"));
        }
        upgrade(&mut lab, &load, to);
        let wildcard = |host: &Host| {
            let output = host.net.run("ss", &["-Hnaup"], "").stdout;
            let text = String::from_utf8_lossy(&output).into_owned();
            let count = |address: &str| text.lines().filter(|line| line.contains(&format!("{address}:4794 "))).count();
            let own = if v6 { format!("[{}]", host.addresses[0]) } else { host.addresses[0].to_string() };
            (count(if v6 { "[::]" } else { "0.0.0.0" }), count(&own))
        };
        let expected = if to == &first { (0, next) } else { (workers, 0) };
        eventually(15.0, "sockets that are not needed are closed", || wildcard(&lab.hosts[0]) == expected);
        load.goes_on();
    }
    load.finish();
    assert_eq!(ping(lab.net("b"), "10.0.0.1", 3, 56), 3);
}

#[test]
fn addresses_change_in_an_upgrade() {
    change_addresses(1, 1, false);
}

#[test]
fn addresses_change_in_an_upgrade_with_two_workers() {
    change_addresses(2, 2, false);
}

#[test]
fn ipv6_addresses_change_in_an_upgrade() {
    change_addresses(1, 1, true);
}

#[test]
fn addresses_and_the_number_of_workers_change_together() {
    change_addresses(2, 1, false);
}

#[test]
fn ipv6_addresses_and_the_number_of_workers_change_together() {
    change_addresses(2, 3, true);
}

/// From UDP sockets to AF_XDP sockets and back.
#[test]
fn af_xdp_is_switched_on_and_off_by_upgrades() {
    let mut lab = running(Options::default());
    let load = Load::start(&lab);
    let is_attached = |host: &Host| {
        let output = host.net.run("ip", &["link", "show", "l0"], "").stdout;
        String::from_utf8_lossy(&output).contains("prog/xdp")
    };
    assert!(!is_attached(&lab.hosts[0]));
    for round in 0..2 {
        change(&mut lab.hosts[0], "[underlay]\n", "[underlay]\nport = \"afxdp\"\n");
        upgrade(&mut lab, &load, "AF_XDP on");
        assert!(is_attached(&lab.hosts[0]));
        eventually(20.0, "packets bypass the kernel", || {
            let count = || lab.hosts[0].counters()["afxdp.rx_datagrams"];
            let before = count();
            load.goes_on();
            count() > before + 100
        });
        if round == 0 {
            // Where the program runs cannot change.
            let whole = lab.hosts[0].config.clone();
            change(&mut lab.hosts[0], "port = \"afxdp\"\n", "port = \"afxdp\"\nxdp_mode = \"generic\"\n");
            let error = lab.hosts[0].upgrade(None).unwrap_err().to_string();
            assert!(error.contains("cannot change underlay.xdp_mode"), "{error}");
            lab.hosts[0].config = whole;
            lab.hosts[0].write_config();
        }
        change(&mut lab.hosts[0], "[underlay]\nport = \"afxdp\"\n", "[underlay]\n");
        upgrade(&mut lab, &load, "AF_XDP off");
        eventually(10.0, "the program is detached", || !is_attached(&lab.hosts[0]));
        load.goes_on();
    }
    load.finish();
}

/// A port that another program uses, or an address that no device has: the old daemon continues.
#[test]
fn an_underlay_that_does_not_work_is_refused() {
    let mut lab = running(Options::default());
    let load = Load::start(&lab);
    let whole = lab.hosts[0].config.clone();
    let blocker = lab.hosts[0].net.enter(|| std::net::UdpSocket::bind("0.0.0.0:4800").unwrap());
    for (from, to, expected) in [
        ("[underlay]\n".to_owned(), "[underlay]\nbifrost_port = 4800\n", "uses this port"),
        (format!("addresses = [\"{}\", ", lab.hosts[0].addresses[0]), "addresses = [\"192.0.2.77\", ", "192.0.2.77"),
    ] {
        change(&mut lab.hosts[0], &from, to);
        let error = lab.hosts[0].upgrade(None).unwrap_err().to_string();
        assert!(error.contains("the running daemon continues") && error.contains(expected), "{to}: {error}");
        lab.hosts[0].config.clone_from(&whole);
        lab.hosts[0].write_config();
        load.goes_on();
    }
    drop(blocker);
    upgrade(&mut lab, &load, "the same");
    load.finish();
}
