//! Upgrades of hosts whose underlay is AF_XDP sockets: frames take a detour through the UDP sockets.

use std::time::Duration;

use crate::common::host::Host;
use crate::common::traffic::{Echo, Requests, exchange, ping};
use crate::common::{Guest, Lab, Options, eventually};
use crate::kept::{index, serve_echo};
use crate::upgrade::{faulty, script};

/// How long guests may wait in half of the upgrades. These are debug builds on a machine with other work.
const SILENCE: Duration = Duration::from_millis(150);
const PATIENCE: Duration = Duration::from_secs(20);

/// Two hosts with a guest each. Both use AF_XDP.
fn running(options: Options, mode: &str) -> Lab {
    let mut lab = Lab::new(options);
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24", "fd00::1/64"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24", "fd00::2/64"]));
    for host in &mut lab.hosts {
        let keys = format!("[underlay]\nport = \"afxdp\"\nxdp_mode = \"{mode}\"\n");
        host.config = host.config.replace("[underlay]\n", &keys);
    }
    lab.start();
    lab
}

/// What `ip` says about the XDP program on a device; nothing without one.
fn program(host: &Host, device: &str) -> Option<String> {
    let output = host.net.run("ip", &["link", "show", device], "").stdout;
    let text = String::from_utf8_lossy(&output);
    text.lines().find(|line| line.contains("prog/xdp")).map(|line| line.trim().to_owned())
}

/// Waits until a host's packets pass through its AF_XDP sockets, in both directions.
fn wait_for_frames(lab: &Lab, host: usize, echo: &Echo) {
    let names = ["rx_datagrams", "tx_datagrams", "rx_fallback_datagrams", "tx_fallback_datagrams"];
    let count = || {
        let counters = lab.hosts[host].counters();
        names.map(|name| counters[&format!("afxdp.{name}")])
    };
    eventually(20.0, "packets bypass the kernel", || {
        let before = count();
        echo.wait_for_progress(1 << 20, PATIENCE);
        let after = count();
        let [rx, tx, rx_aside, tx_aside] = std::array::from_fn(|n| after[n] - before[n]);
        rx > 400 && tx > 400 && rx_aside + tx_aside < 20
    });
}

fn assert_nothing_lost(lab: &Lab) {
    for host in &lab.hosts {
        let counters = host.counters();
        for drop in ["rx_malformed_frames", "rx_bad_checksum_frames", "rx_dropped_frames", "tx_no_frame_datagrams"] {
            let dropped = counters[&format!("afxdp.{drop}")];
            assert!(dropped == 0 || lab.stood_still(), "{}: {dropped} {drop}", host.name);
        }
        host.assert_balanced();
    }
}

fn survive_upgrades(options: Options, mode: &str) {
    let mut lab = running(options, mode);
    let before = [index(lab.net("a")), index(lab.net("b"))];
    for port in [5001, 5003] {
        serve_echo(lab.net("b"), "10.0.0.2", port);
    }
    serve_echo(lab.net("a"), "fd00::1", 5001);
    let echoes = [Echo::start(lab.net("a"), "10.0.0.2", 5001), Echo::start(lab.net("b"), "fd00::1", 5001)];
    let requests = Requests::start(lab.net("a"), "10.0.0.2", 5003);
    let mut silences = Vec::new();
    for upgrade in 0..4 {
        let host = usize::from(upgrade % 3 == 2);
        wait_for_frames(&lab, host, &echoes[0]);
        requests.wait_for(20);
        for echo in &echoes {
            echo.take_longest_silence();
        }
        requests.take_longest();
        let former = program(&lab.hosts[host], "l0").expect("a program");
        let report = lab.hosts[host].upgrade(None).unwrap_or_else(|e| panic!("{e}\n{}", lab.hosts[host].log()));
        assert!(program(&lab.hosts[host], "l0").is_some(), "detached");
        echoes.iter().for_each(|echo| echo.wait_for_progress(1 << 20, PATIENCE));
        requests.wait_for(20);
        let [to, from] = echoes.each_ref().map(Echo::take_longest_silence);
        let request = requests.take_longest();
        println!("{mode}, upgrade {upgrade}: silences {to:?} {from:?}, request {request:?}; {report}");
        silences.push(to.max(from).max(request));
        wait_for_frames(&lab, host, &echoes[0]);
        let next = program(&lab.hosts[host], "l0").expect("a program");
        assert_ne!(next, former, "the new daemon's own program");
        assert_eq!([index(lab.net("a")), index(lab.net("b"))], before, "another device");
    }
    silences.sort();
    // Only half of them: the machine may have other work.
    assert!(silences[silences.len() / 2] <= SILENCE || lab.stood_still(), "silences: {silences:?}");
    for echo in echoes {
        assert!(echo.finish() > 8 << 20);
    }
    requests.finish();
    assert_nothing_lost(&lab);
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
    // Nothing stays attached after a daemon that has taken over, and the next one starts as after any other crash.
    lab.hosts[0].crash();
    eventually(5.0, "nothing is attached", || program(&lab.hosts[0], "l0").is_none());
    lab.hosts[0].start();
    assert!(program(&lab.hosts[0], "l0").is_some());
    exchange(lab.net("b"), lab.net("a"), "10.0.0.1", 5002, 1 << 20);
}

#[test]
fn streams_survive_upgrades() {
    survive_upgrades(Options::default(), "auto");
}

#[test]
fn streams_survive_upgrades_with_two_workers_on_two_queues_behind_the_driver() {
    survive_upgrades(Options { workers: 2, queues: 2, links: 1, ..Options::default() }, "generic");
}

/// If the new daemon fails at any step, the old one continues, with its XDP program and its AF_XDP sockets.
#[test]
fn a_new_daemon_that_fails_leaves_the_old_one_working() {
    let mut lab = running(Options::default(), "auto");
    let (pid, attached) = (lab.hosts[0].pid(), program(&lab.hosts[0], "l0"));
    serve_echo(lab.net("b"), "10.0.0.2", 5001);
    let echo = Echo::start(lab.net("a"), "10.0.0.2", 5001);
    let mut programs: Vec<(String, &str)> = Vec::new();
    for (number, step) in
        ["begin", "offered", "prepared", "copied", "stopped", "taken", "working"].into_iter().enumerate()
    {
        let (how, expected) = if number % 2 == 0 { ("kill", "signal: 6") } else { ("exit", "exit status: 7") };
        programs.push((format!("{how} {step}"), expected));
    }
    programs.push(("hang taken".to_owned(), "does not answer"));
    programs.push((String::new(), "LimitMEMLOCK"));
    for (fault, expected) in programs {
        let program = match &*fault {
            // Not enough memory for the new daemon's sockets.
            "" => {
                let daemon = env!("CARGO_BIN_EXE_bifrostd");
                let limited = "prlimit --memlock=65536 setpriv --bounding-set=-ipc_lock";
                script(&lab.hosts[0], &format!("exec {limited} {daemon} \"$@\""))
            }
            fault => faulty(&lab.hosts[0], fault),
        };
        wait_for_frames(&lab, 0, &echo);
        let error = lab.hosts[0].upgrade(Some(&program)).unwrap_err().to_string();
        println!("{fault}: {error}");
        assert!(error.contains("the running daemon continues") && error.contains(expected), "{fault}: {error}");
        assert_eq!(lab.hosts[0].client.status().unwrap().pid, pid);
        assert_eq!(self::program(&lab.hosts[0], "l0"), attached);
        wait_for_frames(&lab, 0, &echo);
    }
    lab.hosts[0].upgrade(None).unwrap();
    wait_for_frames(&lab, 0, &echo);
    echo.finish();
    assert_nothing_lost(&lab);
}

/// The next upgrade may begin before the last one's sockets are bound.
#[test]
fn upgrades_may_follow_each_other_at_once() {
    let mut lab = running(Options { queues: 2, workers: 2, ..Options::default() }, "auto");
    serve_echo(lab.net("b"), "10.0.0.2", 5001);
    let echo = Echo::start(lab.net("a"), "10.0.0.2", 5001);
    echo.wait_for_progress(1 << 20, PATIENCE);
    for _ in 0..4 {
        let client = bifrost_control::Client::new(lab.hosts[0].socket()).unwrap();
        let report = client.upgrade(&Default::default()).unwrap_or_else(|e| panic!("{e}\n{}", lab.hosts[0].log()));
        lab.hosts[0].set_successor(report.pid);
        assert!(program(&lab.hosts[0], "l0").is_some(), "detached");
    }
    echo.wait_for_progress(1 << 20, PATIENCE);
    wait_for_frames(&lab, 0, &echo);
    echo.finish();
    assert_nothing_lost(&lab);
}
