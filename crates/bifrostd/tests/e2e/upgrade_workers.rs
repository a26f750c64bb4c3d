//! Upgrades to another `[workers] count`: guests' streams continue, also when the new daemon fails.

use std::collections::BTreeSet;
use std::time::Duration;

use bifrost_control::api::{ObjectsQuery, UpgradeReport};
use bifrost_port::steer;

use crate::balancing::{Conversation, Service};
use crate::common::host::{Host, vpc};
use crate::common::traffic::{Echo, Requests, Talk, exchange, ping};
use crate::common::{Guest, Lab, Options, eventually};
use crate::kept::{index, serve_echo};
use crate::upgrade::faulty;

const PATIENCE: Duration = Duration::from_secs(20);
const A: [&str; 4] = ["a1", "a2", "a3", "a4"];
const A_NET: [&str; 4] = ["10.0.0.11", "10.0.0.12", "10.0.0.13", "10.0.0.14"];
const B: [&str; 3] = ["b1", "b2", "b3"];
const B_NET: [&str; 3] = ["10.0.0.21", "10.0.0.22", "10.0.0.23"];
/// Steps at which a new daemon fails.
const FAULTS: [&str; 7] =
    ["exit offered", "kill prepared", "exit copied", "kill stopped", "exit taken", "kill begun", "exit working"];

/// Four guests on the first host that nobody may connect to, and three on the second.
fn running(workers: usize) -> Lab {
    let mut lab = Lab::new(Options { workers, ..Options::default() });
    let nets = [11, 12, 13, 14].map(|n| format!("10.0.0.{n}/24"));
    for (i, net) in nets.iter().enumerate() {
        lab.add(0, Guest::new(A[i], 11 + i as u8, &[Box::leak(net.clone().into_boxed_str())]));
    }
    for (i, name) in B.iter().enumerate() {
        lab.add(1, Guest::new(name, 21 + i as u8, &[["10.0.0.21/24", "10.0.0.22/24", "10.0.0.23/24"][i]]));
    }
    let host = &mut lab.hosts[0];
    host.config = host.config.replace("device = \"eth0\"\n", "device = \"eth0\"\nsecurity_groups = [\"closed\"]\n");
    host.config += "[[security_group]]\nname = \"closed\"\n";
    lab.start();
    lab
}

/// Changes `[workers] count` in the configuration file.
pub(crate) fn set_workers(host: &mut Host, count: usize) {
    let now = host.client.status().unwrap().workers.len();
    let (from, to) = (format!("count = {now}\n"), format!("count = {count}\n"));
    assert!(host.config.contains(&from), "{}", host.config);
    host.config = host.config.replacen(&from, &to, 1);
    host.write_config();
}

/// Streams between all pairs of guests: some always busy, others idle.
struct Load {
    echoes: Vec<Echo>,
    requests: Requests,
    talks: Vec<Talk>,
}

impl Load {
    fn start(lab: &Lab) -> Load {
        let mut echoes = Vec::new();
        for (i, a) in A.iter().enumerate() {
            let (b, port) = (i % B.len(), 5001 + i as u16);
            serve_echo(lab.net(B[b]), B_NET[b], port);
            echoes.push(Echo::start(lab.net(a), B_NET[b], port));
        }
        serve_echo(lab.net("b1"), B_NET[0], 5100);
        let requests = Requests::start(lab.net("a2"), B_NET[0], 5100);
        let mut talks = Vec::new();
        for (i, a) in A.iter().enumerate() {
            for (j, b) in B.iter().enumerate() {
                talks.push(Talk::start(lab.net(a), lab.net(b), B_NET[j], 6000 + (10 * i + j) as u16));
            }
        }
        Load { echoes, requests, talks }
    }

    fn goes_on(&mut self) {
        self.echoes.iter().for_each(|echo| echo.wait_for_progress(1 << 18, PATIENCE));
        self.requests.wait_for(20);
    }

    /// The other side sends first: without its session, this does not reach the guest.
    fn talk(&mut self) {
        for talk in &mut self.talks {
            std::mem::swap(&mut talk.client, &mut talk.server);
            talk.say(1000);
            std::mem::swap(&mut talk.client, &mut talk.server);
        }
    }

    fn finish(self) {
        self.echoes.into_iter().for_each(|echo| assert!(echo.finish() > 1 << 18));
        self.requests.finish();
    }
}

/// Upgrades the first host to `count` workers. Before that, new daemons fail at the steps of `faults`.
fn upgrade(lab: &mut Lab, load: &mut Load, count: usize, faults: &[&str]) -> UpgradeReport {
    load.goes_on();
    load.talk();
    let (pid, before) = (lab.hosts[0].pid(), lab.hosts[0].client.status().unwrap().workers.len());
    let devices = A.map(|a| index(lab.net(a)));
    set_workers(&mut lab.hosts[0], count);
    for fault in faults {
        let program = faulty(&lab.hosts[0], fault);
        let error = lab.hosts[0].upgrade(Some(&program)).unwrap_err().to_string();
        assert!(error.contains("the running daemon continues"), "{before} -> {count}, {fault}: {error}");
        let status = lab.hosts[0].client.status().unwrap();
        assert_eq!((status.pid, status.workers.len()), (pid, before));
        load.goes_on();
        load.talk();
    }
    let sessions = lab.hosts[0].counter("avs.current_sessions");
    let report = lab.hosts[0].upgrade(None);
    let report = report.unwrap_or_else(|e| panic!("{before} -> {count}: {e}\n{}", lab.hosts[0].log()));
    println!("{before} -> {count}: {report}");
    load.talk();
    load.goes_on();
    let host = &lab.hosts[0];
    assert_eq!(host.client.status().unwrap().workers.len(), count);
    assert_eq!((report.left_out, report.sessions >= sessions), (0, true), "{sessions}: {report}\n{}", host.log());
    assert!(host.counter("avs.current_sessions") >= sessions);
    for a in A {
        assert_eq!(host.drops(a, "group_ingress"), 0, "{a}");
    }
    host.assert_balanced();
    assert_eq!(A.map(|a| index(lab.net(a))), devices);
    // The sockets of workers that no longer exist are closed.
    eventually(15.0, "there is a socket of each worker", || {
        let output = lab.hosts[0].net.run("ss", &["-Hnaup"], "").stdout;
        String::from_utf8_lossy(&output).lines().filter(|line| line.contains("0.0.0.0:4794 ")).count() == count
    });
    report
}

/// The workers that have connections.
fn owners(host: &Host) -> BTreeSet<u32> {
    host.client.conns().unwrap().iter().map(|c| c.cid >> 24).collect()
}

/// Devices that were made for one worker have a single queue, so one worker serves each of their ports.
#[test]
fn one_worker_becomes_two_and_one_again() {
    let mut lab = running(1);
    lab.hosts[0].path_fault("host-b", None, |fault| fault.loss_percent = 0.5);
    let mut load = Load::start(&lab);
    upgrade(&mut lab, &mut load, 2, &FAULTS);
    eventually(15.0, "both workers have connections", || {
        load.goes_on();
        owners(&lab.hosts[0]) == BTreeSet::from([0, 1])
    });
    // The configuration file has two queues for each port, but nothing changes.
    let devices = A.map(|a| index(lab.net(a)));
    let report = lab.hosts[0].client.reload().unwrap();
    assert!(report.ports.is_empty(), "{report}");
    lab.hosts[0].upgrade(None).unwrap();
    load.talk();
    load.goes_on();
    assert_eq!(A.map(|a| index(lab.net(a))), devices);
    upgrade(&mut lab, &mut load, 1, &FAULTS);
    assert_eq!(owners(&lab.hosts[0]), BTreeSet::from([0]));
    load.finish();
    exchange(lab.net("a1"), lab.net("b3"), B_NET[2], 5200, 1 << 20);
}

/// Devices with several queues get more and fewer.
#[test]
fn two_workers_become_three_one_and_four() {
    let mut lab = running(2);
    lab.hosts[0].path_fault("host-b", None, |fault| fault.loss_percent = 0.5);
    let mut load = Load::start(&lab);
    for (count, faults) in [(3, &FAULTS[..]), (1, &FAULTS[..]), (4, &[]), (2, &[])] {
        upgrade(&mut lab, &mut load, count, faults);
        let pairs = A.iter().flat_map(|a| B.iter().map(move |b| (a, b)));
        let macs = |name: &str| lab.guest(name).mac_bytes();
        let wanted = pairs.map(|(a, b)| u32::from(steer::worker_of_pair(macs(a), macs(b), count as u16)));
        let wanted: BTreeSet<u32> = wanted.collect();
        load.talk();
        assert_eq!(owners(&lab.hosts[0]), wanted, "{count} workers");
    }
    load.finish();
    assert_eq!(ping(lab.net("a1"), B_NET[1], 3, 56), 3);
}

/// Ports of other owners have a queue for each worker, too, in the next daemon and after a restart.
#[test]
fn ports_of_other_owners_follow_the_number_of_workers() {
    let mut lab = running(2);
    // With a journal.
    std::fs::create_dir_all(lab.hosts[0].state_directory()).unwrap();
    lab.hosts[0].crash();
    lab.hosts[0].start();
    let netns = lab.net("a4").name().to_owned();
    let port = crate::common::host::section(lab.guest("a4"), &netns);
    let (from, to) = (format!("{port}security_groups = [\"closed\"]\n"), "");
    let host = &mut lab.hosts[0];
    let reordered = port.replace("device = \"eth0\"\n", "device = \"eth0\"\nsecurity_groups = [\"closed\"]\n");
    assert!(host.config.contains(&from) || host.config.contains(&reordered), "{}", host.config);
    host.config = host.config.replace(&from, to).replace(&reordered, to);
    host.write_config();
    host.client.reload().unwrap();
    let batch = format!(
        "{{\"items\": [{{\"op\": \"set\", \"kind\": \"port\", \"owner\": \"agent\", \"spec\": {{\"name\": \"a4\", \
         \"vni\": 100, \"mac\": \"{}\", \"addresses\": [\"{}/24\"], \"netns\": \"{netns}\", \"device\": \"eth0\"}}}}]}}",
        lab.guest("a4").mac,
        A_NET[3]
    );
    let host = &mut lab.hosts[0];
    host.client.apply(&serde_json::from_str(&batch).unwrap()).unwrap();
    let queues = |host: &Host| {
        let query = ObjectsQuery { owner: Some("agent".to_owned()), ..ObjectsQuery::default() };
        host.client.objects(&query).unwrap().objects[0].spec["queues"].clone()
    };
    assert_eq!(queues(host), 2);
    let device = index(lab.net("a4"));
    for count in [3, 2] {
        set_workers(&mut lab.hosts[0], count);
        lab.hosts[0].upgrade(None).unwrap();
        assert_eq!(queues(&lab.hosts[0]), count);
        assert_eq!(index(lab.net("a4")), device);
        assert_eq!(ping(lab.net("a4"), B_NET[0], 3, 56), 3);
    }
    set_workers(&mut lab.hosts[0], 4);
    lab.hosts[0].upgrade(None).unwrap();
    lab.hosts[0].crash();
    lab.hosts[0].start();
    assert_eq!(queues(&lab.hosts[0]), 4, "{}", lab.hosts[0].log());
    assert_eq!(index(lab.net("a4")), device);
    eventually(10.0, "it works after a restart", || ping(lab.net("a4"), B_NET[0], 1, 56) == 1);
}

/// Translated connections are where their uplink's packets are.
#[test]
fn connections_through_nat_survive() {
    const REMOTE: &str = "198.51.100.7";
    let vpcs = format!("{}gateway = [\"10.0.0.254\"]\n{}", vpc(100, "tcp", "flow"), vpc(900, "off", "off"));
    let mut lab = Lab::new(Options { vpcs, ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]).gateway("10.0.0.254"));
    lab.add(0, Guest::new("wan", 9, &["203.0.113.1/24"]).vni(900));
    lab.add(0, Guest::new("c", 3, &["10.0.0.3/24"]).gateway("10.0.0.254"));
    lab.hosts[0].config.push_str(
        "[[uplink]]\nport = \"wan\"\n[[nat]]\nvni = 100\nuplink = \"wan\"\naddresses = [\"203.0.113.10\"]\n\
         ports = [20000, 29999]\n",
    );
    lab.start();
    lab.net("wan").ip(&format!("addr add {REMOTE}/32 dev lo\n"));
    let _remote = Service::start(lab.net("wan"), REMOTE, 80, "remote", "200 OK");
    let mut open: Vec<Conversation> = Vec::new();
    for guest in ["a", "c", "a", "c", "a"] {
        let started = Conversation::start(lab.net(guest), REMOTE, 80);
        open.push(started.unwrap_or_else(|| panic!("{}", lab.hosts[0].log())));
    }
    for count in [2, 3, 1] {
        open.iter_mut().for_each(|conversation| conversation.exchange().unwrap());
        let before = lab.hosts[0].counter("avs.nat_current_mappings");
        assert!(before >= 5, "{before}");
        set_workers(&mut lab.hosts[0], count);
        let report = lab.hosts[0].upgrade(None).unwrap();
        println!("{count} workers: {report}");
        assert_eq!(report.left_out, 0, "{report}");
        open.iter_mut().for_each(|conversation| conversation.exchange().unwrap());
        assert_eq!(lab.hosts[0].counter("avs.nat_current_mappings"), before);
    }
}

/// AF_XDP sockets are opened for another number of workers.
#[test]
fn af_xdp_follows_the_number_of_workers() {
    let mut lab = Lab::new(Options { workers: 1, ..Options::default() });
    lab.hosts[0].config = lab.hosts[0].config.replacen("[underlay]\n", "[underlay]\nport = \"afxdp\"\n", 1);
    for (i, name) in ["a1", "a2"].into_iter().enumerate() {
        lab.add(0, Guest::new(name, 11 + i as u8, &[["10.0.0.11/24", "10.0.0.12/24"][i]]));
    }
    lab.add(1, Guest::new("b1", 21, &["10.0.0.21/24"]));
    lab.start();
    let echoes: Vec<Echo> = ["a1", "a2"]
        .into_iter()
        .zip(5001..)
        .map(|(a, port)| {
            serve_echo(lab.net("b1"), "10.0.0.21", port);
            Echo::start(lab.net(a), "10.0.0.21", port)
        })
        .collect();
    let go_on = || echoes.iter().for_each(|echo| echo.wait_for_progress(1 << 20, PATIENCE));
    for count in [2, 3, 1] {
        go_on();
        set_workers(&mut lab.hosts[0], count);
        let program = faulty(&lab.hosts[0], "exit begun");
        lab.hosts[0].upgrade(Some(&program)).unwrap_err();
        go_on();
        let report = lab.hosts[0].upgrade(None).unwrap();
        println!("{count} workers: {report}");
        eventually(20.0, "packets bypass the kernel", || {
            let received = || lab.hosts[0].counters()["afxdp.rx_datagrams"];
            let before = received();
            go_on();
            received() > before + 100
        });
    }
    echoes.into_iter().for_each(|echo| assert!(echo.finish() > 1 << 20));
}

/// How long guests wait if there are many sessions. Run it on an idle machine; `BIFROST_SESSIONS` is their number.
#[test]
#[ignore = "a measurement"]
fn stalls_with_many_sessions() {
    let sessions: usize = std::env::var("BIFROST_SESSIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(100_000);
    let mut lab = running(2);
    serve_echo(lab.net("b1"), B_NET[0], 5100);
    let requests = Requests::start(lab.net("a2"), B_NET[0], 5100);
    std::thread::scope(|scope| {
        for (i, a) in A.iter().enumerate() {
            let net = lab.net(a);
            scope.spawn(move || {
                net.enter(move || {
                    let sockets: Vec<_> =
                        (0..4u16).map(|n| std::net::UdpSocket::bind((A_NET[i], 20_000 + n)).unwrap()).collect();
                    for n in 0..sessions / 4 {
                        let to = (B_NET[n % 3], 10_000 + (n / 3 % 50_000) as u16);
                        // The other side rejects it, which is reported here.
                        let _ = sockets[n / 150_000].send_to(&[0; 10], to);
                        if n % 64 == 0 {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                    }
                });
            });
        }
    });
    for count in [3, 2, 1, 2] {
        std::thread::sleep(Duration::from_secs(1));
        let before = lab.hosts[0].counter("avs.current_sessions");
        requests.take_longest();
        std::thread::sleep(Duration::from_millis(500));
        let without = requests.take_longest();
        set_workers(&mut lab.hosts[0], count);
        let report = lab.hosts[0].upgrade(None).unwrap();
        requests.wait_for(20);
        println!("{before} sessions, {count} workers: {:?} (without: {without:?}): {report}", requests.take_longest());
    }
    requests.finish();
}
