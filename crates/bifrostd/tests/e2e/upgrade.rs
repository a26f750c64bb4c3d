//! Upgrades: a new daemon takes over from a running one, and guests' connections continue.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::common::host::{Host, vpc};
use crate::common::traffic::{Echo, Requests, exchange, ping};
use crate::common::{Guest, Lab, Options, eventually};
use crate::kept::{index, serve_echo};

/// How long guests may wait in half of the upgrades. These are debug builds on a machine with other work; `bifrost-lab
/// run upgrade` measures the real times.
const SILENCE: Duration = Duration::from_millis(100);

fn running(workers: usize) -> Lab {
    let mut lab = Lab::new(Options { workers, ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24", "fd00::1/64"]).gateway("10.0.0.254"));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24", "fd00::2/64"]));
    lab.start();
    lab
}

/// A program that becomes the daemon, and fails at a step of the upgrade.
pub(crate) fn faulty(host: &Host, fault: &str) -> PathBuf {
    let daemon = env!("CARGO_BIN_EXE_bifrostd");
    script(host, &format!("BIFROST_UPGRADE_FAULT='{fault}' exec {daemon} \"$@\""))
}

pub(crate) fn script(host: &Host, text: &str) -> PathBuf {
    let file = host.directory.join("successor.sh");
    std::fs::write(&file, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    file
}

/// Some counters that grow constantly.
fn counters(host: &Host) -> [u64; 5] {
    let (counters, port) = (host.counters(), &host.client.ports().unwrap()[0]);
    let of = |name: &str| counters.get(name).copied().unwrap_or(0);
    [of("port.tx_packets"), of("rte.sent_packets"), of("udp.rx_datagrams"), port.rx_packets, port.tx_bytes]
}

fn survive_upgrades(workers: usize) {
    let mut lab = running(workers);
    let before = [index(lab.net("a")), index(lab.net("b"))];
    lab.net("a").ip("route add 10.7.0.0/16 via 10.0.0.9\n");
    for port in [5001, 5003] {
        serve_echo(lab.net("b"), "10.0.0.2", port);
    }
    serve_echo(lab.net("a"), "fd00::1", 5001);
    let echoes = [Echo::start(lab.net("a"), "10.0.0.2", 5001), Echo::start(lab.net("b"), "fd00::1", 5001)];
    let requests = Requests::start(lab.net("a"), "10.0.0.2", 5003);
    let mut silences = Vec::new();
    for upgrade in 0..3 {
        let host = usize::from(upgrade % 3 == 2);
        echoes.iter().for_each(|echo| echo.wait_for_progress(1 << 20, Duration::from_secs(20)));
        requests.wait_for(20);
        for echo in &echoes {
            echo.take_longest_silence();
        }
        requests.take_longest();
        let pid = lab.hosts[host].pid();
        let counted = counters(&lab.hosts[host]);
        let report = lab.hosts[host].upgrade(None).unwrap_or_else(|e| panic!("{e}\n{}", lab.hosts[host].log()));
        assert!(report.pid != pid && lab.hosts[host].client.status().unwrap().pid == report.pid);
        let again = counters(&lab.hosts[host]);
        assert!(counted.iter().zip(&again).all(|(before, after)| before <= after), "{counted:?}, then {again:?}");
        lab.hosts[host].assert_balanced();
        echoes.iter().for_each(|echo| echo.wait_for_progress(1 << 20, Duration::from_secs(20)));
        requests.wait_for(20);
        let [to, from] = echoes.each_ref().map(Echo::take_longest_silence);
        let request = requests.take_longest();
        println!("{workers} workers, upgrade {upgrade}: silences {to:?} {from:?}, request {request:?}; {report}");
        silences.push(to.max(from).max(request));
        assert_eq!([index(lab.net("a")), index(lab.net("b"))], before, "another device");
    }
    silences.sort();
    // Only half of them: the machine may have other work.
    assert!(silences[silences.len() / 2] <= SILENCE || lab.stood_still(), "silences: {silences:?}");
    for echo in echoes {
        assert!(echo.finish() > 8 << 20);
    }
    requests.finish();
    let routes = lab.net("a").run("ip", &["route"], "").stdout;
    let routes = String::from_utf8_lossy(&routes);
    assert!(routes.contains("10.7.0.0/16 via 10.0.0.9") && routes.contains("default via 10.0.0.254"), "{routes}");
    exchange(lab.net("b"), lab.net("a"), "10.0.0.1", 5002, 1 << 20);
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
    // The next daemon starts as after any other crash.
    lab.hosts[0].crash();
    lab.hosts[0].start();
    assert!(lab.hosts[0].log().contains("takes over its device"));
    assert_eq!(index(lab.net("a")), before[0]);
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
}

#[test]
fn streams_survive_upgrades() {
    survive_upgrades(1);
}

#[test]
fn streams_survive_upgrades_with_two_workers() {
    survive_upgrades(2);
}

/// If the new daemon fails at any step, the old one continues, and the next upgrade works.
#[test]
fn a_new_daemon_that_fails_leaves_the_old_one_working() {
    let mut lab = running(1);
    let (pid, device) = (lab.hosts[0].pid(), index(lab.net("a")));
    serve_echo(lab.net("b"), "10.0.0.2", 5001);
    let echo = Echo::start(lab.net("a"), "10.0.0.2", 5001);
    let mut faults: Vec<(String, &str)> = Vec::new();
    for (number, step) in
        ["begin", "offered", "prepared", "stopped", "taken", "working", "copied"].into_iter().enumerate()
    {
        let (how, expected) = if number % 2 == 0 { ("exit", "exit status: 7") } else { ("kill", "signal: 6") };
        faults.push((format!("{how} {step}"), expected));
    }
    faults.push(("hang stopped".to_owned(), "does not answer"));
    for (fault, expected) in faults {
        echo.wait_for_progress(1 << 20, Duration::from_secs(20));
        let program = faulty(&lab.hosts[0], &fault);
        let began = Instant::now();
        let error = lab.hosts[0].upgrade(Some(&program)).unwrap_err().to_string();
        println!("{fault}: {:?}: {error}", began.elapsed());
        assert!(error.contains("the running daemon continues") && error.contains(expected), "{fault}: {error}");
        echo.wait_for_progress(1 << 20, Duration::from_secs(20));
        assert_eq!((lab.hosts[0].client.status().unwrap().pid, index(lab.net("a"))), (pid, device.clone()));
    }
    // Programs that are not daemons.
    for (text, expected) in [
        ("exit 3", "exit status: 3"),
        ("echo nonsense that is longer than the header of a message >&0; sleep 1", "not a message"),
        ("exec sleep 100 <&-", "other bifrostd"),
    ] {
        let program = script(&lab.hosts[0], text);
        let error = lab.hosts[0].upgrade(Some(&program)).unwrap_err().to_string();
        assert!(error.contains("the running daemon continues") && error.contains(expected), "{text}: {error}");
        echo.wait_for_progress(1 << 20, Duration::from_secs(20));
    }
    let error = lab.hosts[0].upgrade(Some(std::path::Path::new("/nowhere/bifrostd"))).unwrap_err().to_string();
    assert!(error.contains("starting"), "{error}");
    lab.hosts[0].upgrade(None).unwrap();
    echo.wait_for_progress(1 << 20, Duration::from_secs(20));
    echo.finish();
    assert_eq!(index(lab.net("a")), device);
}

/// `kill -9` of the new daemon at any time.
#[test]
fn a_new_daemon_that_is_killed_at_any_time_leaves_the_old_one_working() {
    let mut lab = running(1);
    serve_echo(lab.net("b"), "10.0.0.2", 5001);
    let echo = Echo::start(lab.net("a"), "10.0.0.2", 5001);
    let mut random = fastrand::Rng::with_seed(7);
    let (mut failed, mut done, mut crashed) = (0, 0, 0);
    for round in 0..10 {
        echo.wait_for_progress(1 << 18, Duration::from_secs(20));
        let pid = lab.hosts[0].pid();
        let killer = std::thread::spawn({
            // In half of the rounds certainly before it has taken over.
            let after = Duration::from_micros(random.u64(0..if round % 2 == 0 { 10_000 } else { 60_000 }));
            move || {
                let deadline = Instant::now() + Duration::from_secs(5);
                loop {
                    let children = children(pid);
                    if let Some(child) = children.first() {
                        std::thread::sleep(after);
                        // Only while it is a child: later it has taken over.
                        if self::children(pid).contains(child) {
                            let _ = rustix::process::kill_process(
                                rustix::process::Pid::from_raw(*child as i32).unwrap(),
                                rustix::process::Signal::KILL,
                            );
                        }
                        return;
                    }
                    if Instant::now() > deadline {
                        return;
                    }
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
        });
        let client = bifrost_control::Client::new(lab.hosts[0].socket()).unwrap();
        match client.upgrade(&Default::default()) {
            Err(_) if client.status().is_ok_and(|status| status.pid == pid) => failed += 1,
            // It was killed just after it had taken over: an ordinary crash, which is not tested here.
            Err(error) => {
                let log = lab.hosts[0].log();
                assert!(log.matches("has replaced").count() > done + crashed, "{error}\n{log}");
                crashed += 1;
                lab.hosts[0].crash();
                lab.hosts[0].start();
            }
            Ok(report) if client.status().is_ok_and(|status| status.pid == report.pid) => {
                lab.hosts[0].set_successor(report.pid);
                done += 1;
            }
            Ok(_) => {
                crashed += 1;
                lab.hosts[0].crash();
                lab.hosts[0].start();
            }
        }
        killer.join().unwrap();
        if lab.hosts[0].client.status().is_err() {
            lab.hosts[0].crash();
            lab.hosts[0].start();
        }
    }
    println!("{failed} failed, {done} done, {crashed} crashed afterwards");
    assert!(failed > 0);
    echo.wait_for_progress(1 << 20, Duration::from_secs(20));
    echo.finish();
}

/// The child processes of a process.
fn children(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(|n| n.parse().ok()).collect::<Vec<u32>>()).collect()
}

#[test]
fn what_cannot_be_handed_over_is_refused() {
    let mut lab = running(1);
    let whole = lab.hosts[0].config.clone();
    // The file differs from the configuration in force.
    lab.hosts[0].config = whole.replacen("mtu = 1500", "mtu = 1400", 1);
    lab.hosts[0].write_config();
    let error = lab.hosts[0].upgrade(None).unwrap_err().to_string();
    assert!(error.contains("differs from the configuration in force"), "{error}");
    lab.hosts[0].config = whole.replacen("name = \"host-a\"", "name = \"other\"", 1);
    lab.hosts[0].write_config();
    let error = lab.hosts[0].upgrade(None).unwrap_err().to_string();
    assert!(error.contains("restart") && error.contains("host.name"), "{error}");
    lab.hosts[0].config = format!("{whole}\n[[port]]\n");
    lab.hosts[0].write_config();
    lab.hosts[0].upgrade(None).unwrap_err();
    lab.hosts[0].config = whole;
    lab.hosts[0].write_config();
    lab.hosts[0].client.reload().unwrap();
    lab.hosts[0].upgrade(None).unwrap();
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
}

/// Settings of the operator in the old daemon stay in force in the new one.
#[test]
fn faults_drained_paths_and_objects_of_other_owners_are_kept() {
    let mut lab = Lab::new(Options::default());
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    let metrics = "[control]\nmetrics = \"127.0.0.1:9795\"\n";
    lab.hosts[0].config = lab.hosts[0].config.replacen("[control]\n", metrics, 1);
    lab.start();
    let host = &mut lab.hosts[0];
    let fault = host.port_fault("a", |fault| fault.loss_percent = 0.5);
    let drain = bifrost_control::api::DrainSpec { peer: "host-b".to_owned(), path: 1 };
    host.client.drain_path(&drain, true).unwrap();
    let batch = "{\"items\": [{\"op\": \"set\", \"kind\": \"route\", \"key\": \"100/10.9.0.0/16\", \"owner\": \"agent\", \
                 \"spec\": {\"vni\": 100, \"prefix\": \"10.9.0.0/16\", \"peer\": \"host-b\", \"mac\": \"02:00:00:00:00:02\"}}]}";
    host.client.apply(&serde_json::from_str(batch).unwrap()).unwrap();
    let routes = host.client.routes().unwrap();
    host.upgrade(None).unwrap();
    assert_eq!(host.client.faults().unwrap()[0].id, fault);
    assert!(host.client.paths().unwrap().iter().any(|path| path.drained && path.path == 1));
    assert_eq!(host.client.routes().unwrap(), routes);
    host.net.ip("link set lo up\n");
    let shown = host.net.enter(|| {
        let mut stream = std::net::TcpStream::connect("127.0.0.1:9795").unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").unwrap();
        let mut shown = Vec::new();
        stream.read_to_end(&mut shown).unwrap();
        shown
    });
    assert!(String::from_utf8_lossy(&shown).contains("bifrost_port_tx_packets"), "{}", host.log());
    assert!(host.port_fault("a", |fault| fault.loss_percent = 0.1) > fault);
    host.client.clear_faults().unwrap();
}

/// Sessions survive: packets of a guest's connections pass its security groups, even if the other side sends first.
#[test]
fn sessions_survive_upgrades() {
    let mut lab = Lab::new(Options { vpcs: vpc(100, "tcp", "flow"), ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
    // No ingress is allowed.
    let closed = "security_groups = [\"closed\"]\n[[security_group]]\nname = \"closed\"\n";
    lab.hosts[0].config =
        lab.hosts[0].config.replacen("device = \"eth0\"\n", &format!("device = \"eth0\"\n{closed}"), 1);
    lab.start();
    let mut talk = crate::common::traffic::Talk::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001);
    talk.say(1000);
    for _ in 0..3 {
        let report = lab.hosts[0].upgrade(None).unwrap();
        assert!(report.sessions >= 1, "{report}");
        // The other side sends first.
        std::mem::swap(&mut talk.client, &mut talk.server);
        talk.say(1000);
        std::mem::swap(&mut talk.client, &mut talk.server);
        talk.say(100_000);
    }
    assert!(lab.hosts[0].drops("a", "group_ingress") == 0);
    eventually(5.0, "sessions are counted", || lab.hosts[0].counter("avs.current_sessions") >= 1);
}

/// The longest stalls of requests and of a stream in each of many upgrades, compared with the same time without one.
/// Run it on an idle machine; `BIFROST_UPGRADES` is the number for each load.
#[test]
#[ignore = "a measurement, which takes a minute"]
fn stalls_of_many_upgrades() {
    let count = std::env::var("BIFROST_UPGRADES").ok().and_then(|n| n.parse().ok()).unwrap_or(25);
    for (loss, bulk) in [(0.0, false), (1.0, false), (0.0, true), (1.0, true)] {
        let mut lab = running(1);
        if loss > 0.0 {
            lab.hosts[0].path_fault("host-b", None, |fault| fault.loss_percent = loss);
            lab.hosts[1].path_fault("host-a", None, |fault| fault.loss_percent = loss);
        }
        for port in [5001, 5003] {
            serve_echo(lab.net("b"), "10.0.0.2", port);
        }
        let echo = bulk.then(|| Echo::start(lab.net("a"), "10.0.0.2", 5001));
        let requests = Requests::start(lab.net("a"), "10.0.0.2", 5003);
        requests.wait_for(100);
        let (mut without, mut with, mut stream, mut held, mut stopped) = (vec![], vec![], vec![], vec![], vec![]);
        for upgrade in 0..count {
            let take = || (requests.take_longest(), echo.as_ref().map(Echo::take_longest_silence).unwrap_or_default());
            take();
            std::thread::sleep(Duration::from_millis(150));
            without.push(take().0);
            let began = Instant::now();
            let report = lab.hosts[upgrade % 2].upgrade(None).unwrap();
            std::thread::sleep(Duration::from_millis(150).saturating_sub(began.elapsed()));
            requests.wait_for(5);
            let (request, silence) = take();
            with.push(request);
            stream.push(silence);
            held.push(Duration::from_micros(report.held_us));
            stopped.push(Duration::from_micros(report.stopped_us));
        }
        requests.finish();
        if let Some(echo) = echo {
            echo.finish();
        }
        println!("{count} upgrades, {loss} % loss, {}:", if bulk { "beside a stream" } else { "requests alone" });
        for (name, times) in [
            ("longest request without an upgrade", &mut without),
            ("longest request with one", &mut with),
            ("longest silence of the stream", &mut stream),
            ("guests held", &mut held),
            ("nothing carried", &mut stopped),
        ] {
            times.sort();
            let [p50, p90, max] = [times[times.len() / 2], times[times.len() * 9 / 10], times[times.len() - 1]];
            println!("  {name}: median {p50:.1?}, P90 {p90:.1?}, worst {max:.1?}");
        }
    }
}
