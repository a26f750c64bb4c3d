//! A service manager keeps the queues of containers' devices while the daemon is not running. Without one:
//! `persistent.rs`.

use std::fs::File;
use std::time::{Duration, Instant};

use crate::common::manager::Manager;
use crate::common::traffic::{Echo, Requests, exchange, ping};
use crate::common::{Guest, Lab, Net, Options, eventually};

/// How much longer than the daemon's restart TCP may stall, in half of the cases: in a single case the machine itself
/// may have stood still.
const SLACK: Duration = Duration::from_millis(50);
/// Number of kills, and its maximum. A kill may lose the request in flight, so three slow requests in six kills do not
/// show a fault; more kills decide then.
const KILLS: [usize; 2] = [6, 18];

/// Two hosts whose daemons have service managers.
fn kept(workers: usize) -> Lab {
    let mut lab = Lab::new(Options { workers, ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24", "fd00::1/64"]).gateway("10.0.0.254"));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24", "fd00::2/64"]));
    for host in &mut lab.hosts {
        host.manager = Some(Manager::start(&host.directory.join(format!("{}.notify", host.name))));
    }
    lab.start();
    lab
}

/// The index of a guest's device.
pub fn index(net: &Net) -> String {
    let text = net.run("ip", &["-o", "link", "show", "eth0"], "").stdout;
    String::from_utf8_lossy(&text).split(':').next().unwrap().to_owned()
}

/// The names of the descriptors in a host's service manager, once there are `count`.
fn names(lab: &Lab, host: usize, count: usize) -> Vec<String> {
    let names = || lab.hosts[host].manager.as_ref().unwrap().names();
    eventually(5.0, "the service manager has all descriptors", || names().len() == count);
    names()
}

/// Echoes data while the stream is open.
pub fn serve_echo(net: &Net, address: &str, port: u16) {
    let to = std::net::SocketAddr::new(address.parse().unwrap(), port);
    let listener = net.enter(move || std::net::TcpListener::bind(to).unwrap());
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let _ = std::io::copy(&mut &stream, &mut &stream);
    });
}

fn middle(times: &[Duration]) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort();
    sorted[sorted.len() / 2]
}

fn survive_kills(workers: usize) {
    let mut lab = kept(workers);
    names(&lab, 0, workers);
    let before = index(lab.net("a"));
    lab.net("a").ip("route add 10.7.0.0/16 via 10.0.0.9\n");
    serve_echo(lab.net("b"), "10.0.0.2", 5001);
    serve_echo(lab.net("a"), "fd00::1", 5001);
    let echoes = [Echo::start(lab.net("a"), "10.0.0.2", 5001), Echo::start(lab.net("b"), "fd00::1", 5001)];
    serve_echo(lab.net("b"), "10.0.0.2", 5003);
    let requests = Requests::start(lab.net("a"), "10.0.0.2", 5003);
    let (mut beyond, mut requests_beyond) = (Vec::new(), Vec::new());
    for kill in 0..KILLS[1] {
        // TCP would retransmit a lost request after 200 ms.
        if kill == KILLS[0] && [&beyond, &requests_beyond].iter().all(|beyond| middle(beyond) <= SLACK) {
            break;
        }
        let host = kill % 2;
        echoes.iter().for_each(|echo| echo.wait_for_progress(1 << 20, Duration::from_secs(20)));
        requests.wait_for(20);
        for echo in &echoes {
            echo.take_longest_silence();
        }
        requests.take_longest();
        let began = Instant::now();
        lab.hosts[host].crash();
        lab.hosts[host].start();
        let restart = began.elapsed();
        echoes.iter().for_each(|echo| echo.wait_for_progress(1 << 20, Duration::from_secs(20)));
        requests.wait_for(20);
        let [to, from] = echoes.each_ref().map(Echo::take_longest_silence);
        let silences = [to, from, requests.take_longest()];
        println!("{workers} workers, kill {kill}: silences {silences:?}, including {restart:?} of the restart");
        let [to, from, request] = silences.map(|silence| silence.saturating_sub(restart));
        beyond.extend([to, from]);
        requests_beyond.push(request);
        assert!(lab.hosts[host].log().contains("takes over its device"), "{}", lab.hosts[host].log());
        names(&lab, host, workers);
    }
    for beyond in [beyond, requests_beyond] {
        assert!(middle(&beyond) <= SLACK, "silences beyond restarts: {beyond:?}");
    }
    assert_eq!(index(lab.net("a")), before, "another device");
    let routes = lab.net("a").run("ip", &["route"], "").stdout;
    let routes = String::from_utf8_lossy(&routes);
    assert!(routes.contains("10.7.0.0/16 via 10.0.0.9") && routes.contains("default via 10.0.0.254"), "{routes}");
    for echo in echoes {
        assert!(echo.finish() > 8 << 20);
    }
    requests.finish();
    exchange(lab.net("b"), lab.net("a"), "10.0.0.1", 5002, 1 << 20);
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
}

#[test]
fn a_container_keeps_its_device_and_its_streams_when_the_daemon_is_killed() {
    survive_kills(1);
}

#[test]
fn a_container_with_two_queues_keeps_its_device_and_its_streams_when_the_daemon_is_killed() {
    survive_kills(2);
}

#[test]
fn a_device_follows_the_configuration() {
    let mut lab = kept(2);
    let first = (index(lab.net("a")), names(&lab, 0, 2));
    let mtu = |lab: &Lab| {
        let link = lab.net("a").run("ip", &["-o", "link", "show", "eth0"], "").stdout;
        String::from_utf8_lossy(&link).split(' ').skip_while(|word| *word != "mtu").nth(1).unwrap().to_owned()
    };
    for next in ["1400", "1300"] {
        lab.hosts[0].crash();
        let before = format!("mtu = {}", mtu(&lab));
        lab.hosts[0].config = lab.hosts[0].config.replacen(&before, &format!("mtu = {next}"), 1);
        lab.hosts[0].start();
        assert_eq!(
            (index(lab.net("a")), names(&lab, 0, 2), mtu(&lab)),
            (first.0.clone(), first.1.clone(), next.into())
        );
        assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
    }
    // More workers, and fewer.
    for (before, workers, same) in [(2, 3, true), (3, 2, true), (2, 1, true), (1, 2, true)] {
        lab.hosts[0].crash();
        let device = index(lab.net("a"));
        let of = |workers: usize| format!("count = {workers}\n");
        lab.hosts[0].config = lab.hosts[0].config.replacen(&of(before), &of(workers), 1);
        lab.hosts[0].start();
        names(&lab, 0, workers);
        assert_eq!(index(lab.net("a")) == device, same, "{workers} workers");
        assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
        exchange(lab.net("b"), lab.net("a"), "10.0.0.1", 5002, 1 << 20);
    }
}

/// The service manager holds the queues that are in use after an upgrade to another number of workers, and no others:
/// packets would wait in them. A failed upgrade changes nothing.
#[test]
fn queues_are_those_of_the_workers_after_an_upgrade() {
    let mut lab = kept(2);
    let (device, mut held) = (index(lab.net("a")), names(&lab, 0, 2));
    for count in [3, 1, 2] {
        let now = lab.hosts[0].client.status().unwrap().workers.len();
        crate::upgrade_workers::set_workers(&mut lab.hosts[0], count);
        let program = crate::upgrade::faulty(&lab.hosts[0], "exit working");
        lab.hosts[0].upgrade(Some(&program)).unwrap_err();
        assert_eq!(names(&lab, 0, now), held);
        lab.hosts[0].upgrade(None).unwrap();
        held = names(&lab, 0, count);
        assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
        lab.hosts[0].crash();
        lab.hosts[0].start();
        assert_eq!((index(lab.net("a")), names(&lab, 0, count)), (device.clone(), held.clone()), "{count} workers");
        exchange(lab.net("b"), lab.net("a"), "10.0.0.1", 5002, 1 << 20);
    }
}

#[test]
fn a_device_is_removed_with_its_port() {
    let mut lab = kept(1);
    names(&lab, 0, 1);
    let whole = lab.hosts[0].config.clone();
    let without = whole.split("[[port]]").next().unwrap().to_owned();
    // While the daemon runs, and while it does not.
    for runs in [true, false] {
        if !runs {
            lab.hosts[0].crash();
        }
        lab.hosts[0].config.clone_from(&without);
        lab.hosts[0].write_config();
        if runs {
            assert_eq!(lab.hosts[0].client.reload().unwrap().ports.removed, ["a"]);
        } else {
            assert!(lab.net("a").has_device("eth0"));
            lab.hosts[0].start();
        }
        assert!(!lab.net("a").has_device("eth0"));
        names(&lab, 0, 0);
        lab.hosts[0].config.clone_from(&whole);
        lab.hosts[0].write_config();
        lab.hosts[0].client.reload().unwrap();
        names(&lab, 0, 1);
        eventually(5.0, "it is reachable", || ping(lab.net("b"), "10.0.0.1", 1, 56) == 1);
    }
}

#[test]
fn a_device_is_removed_with_its_namespace() {
    let mut lab = kept(1);
    let first = names(&lab, 0, 1);
    // While the daemon runs, and while it does not.
    for runs in [true, false] {
        let former = File::open(format!("/run/netns/{}", lab.net("a").name())).unwrap();
        if !runs {
            lab.hosts[0].crash();
        }
        lab.delete_net("a");
        if runs {
            names(&lab, 0, 0);
        } else {
            lab.hosts[0].start();
            assert!(lab.hosts[0].port("a").waiting);
        }
        eventually(5.0, "the old device is gone", || !crate::containers::devices(&former).contains("eth0"));
        lab.make_net("a");
        eventually(5.0, "the port has its device", || !lab.hosts[0].port("a").waiting);
        assert_eq!(names(&lab, 0, 1), first);
        assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
    }
    // The namespace is recreated while the daemon is not running.
    lab.hosts[0].crash();
    lab.delete_net("a");
    lab.make_net("a");
    lab.hosts[0].start();
    assert_eq!(names(&lab, 0, 1), first);
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
}

#[test]
fn unknown_descriptors_are_released() {
    let mut lab = kept(1);
    let name = names(&lab, 0, 1).remove(0);
    lab.hosts[0].crash();
    let manager = lab.hosts[0].manager.as_ref().unwrap();
    manager.keep(&name, File::open("/dev/null").unwrap().into());
    for name in ["tap", "tap.0.00000000.nobody", "socket"] {
        manager.keep(name, File::open("/dev/zero").unwrap().into());
    }
    lab.hosts[0].start();
    assert_eq!(names(&lab, 0, 1), [name]);
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
    let log = lab.hosts[0].log();
    assert!(log.contains("cannot take over its queues") && log.contains("takes over its device"), "{log}");
}

#[test]
fn kept_devices_survive_the_end_of_the_service() {
    let mut lab = kept(1);
    names(&lab, 0, 1);
    let before = index(lab.net("a"));
    assert!(lab.hosts[0].stop().success());
    lab.hosts[0].manager = None;
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(index(lab.net("a")), before);
    // Without `keep_devices` it ends with the daemon, with or without a service manager.
    lab.hosts[0].config = lab.hosts[0].config.replacen("[host]\n", "[host]\nkeep_devices = false\n", 1);
    lab.hosts[0].manager = Some(Manager::start(&lab.hosts[0].directory.join("again.notify")));
    lab.hosts[0].start();
    assert_eq!(index(lab.net("a")), before);
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
    names(&lab, 0, 0);
    lab.hosts[0].crash();
    eventually(5.0, "the device is gone", || !lab.net("a").has_device("eth0"));
}

/// The same with systemd and the packaged unit, including its sandbox.
#[test]
fn the_packaged_unit_keeps_devices_over_a_crash_and_a_restart() {
    let directory = std::env::temp_dir().join(format!("bifrost-e2e-systemd-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let config = "[host]\nname = \"host\"\n[control]\nsocket = \"/run/bifrost/bifrostd.sock\"\n[underlay]\naddresses = [\"127.0.0.1\"]\n\
                  [[vpc]]\nvni = 100\n[[port]]\nname = \"a\"\nvni = 100\nmac = \"02:00:00:00:00:01\"\n\
                  addresses = [\"10.0.0.1/24\"]\nmtu = 1400\nnetns = \"guest\"\ndevice = \"eth0\"\n";
    std::fs::write(directory.join("bifrostd.toml"), config).unwrap();
    let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/e2e/systemd.sh");
    let unit = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/bifrostd.service");
    let output = std::process::Command::new("timeout")
        .args(["--kill-after=5", "60", "unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "sh", sources])
        .args([directory.as_os_str(), unit.as_ref(), env!("CARGO_BIN_EXE_bifrostd").as_ref()])
        .output()
        .unwrap();
    let cleaned =
        std::process::Command::new("unshare").args(["--mount", "sh", sources, "clean"]).arg(&directory).status();
    let steps = std::fs::read_to_string(directory.join("steps")).unwrap_or_default();
    let log = std::fs::read_to_string(directory.join("daemon.log")).unwrap_or_default();
    let all = format!("{steps}\n{log}\n{}", String::from_utf8_lossy(&output.stdout));
    println!("{all}");
    let step = |name: &str| {
        let line = steps.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": device "));
        line.unwrap_or_else(|| panic!("no line `{name}`")).split_once(", ").unwrap()
    };
    let (device, state) = step("started");
    assert_eq!(state.trim(), "ActiveState=active NFileDescriptorStore=1 NRestarts=0");
    assert_eq!(step("killed"), (device, "ActiveState=active NFileDescriptorStore=1 NRestarts=1 "));
    assert_eq!(step("restarted"), (device, "ActiveState=active NFileDescriptorStore=1 NRestarts=0 "));
    assert_eq!(step("upgraded"), (device, "ActiveState=active NFileDescriptorStore=1 NRestarts=0 "));
    let pids = steps.lines().find_map(|line| line.strip_prefix("main process: ")).unwrap();
    let [former, pid, _, _, answered, alive] = pids.split([' ', ',']).filter(|w| !w.is_empty()).collect::<Vec<_>>()[..]
    else {
        panic!("{pids}")
    };
    assert!(former != pid && pid == answered && alive == "alive", "{pids}");
    assert_eq!(step("killed again").0, device, "the service manager restarts the new daemon");
    assert_eq!(step("stopped"), (device, "ActiveState=inactive NFileDescriptorStore=0 NRestarts=0 "));
    assert_eq!(step("started again"), (device, "ActiveState=active NFileDescriptorStore=1 NRestarts=0 "));
    assert_eq!(step("removed"), ("none", "ActiveState=inactive NFileDescriptorStore=0 NRestarts=0 "));
    assert_eq!(log.matches("takes over its device").count(), 5);
    assert!(cleaned.unwrap().success(), "its control groups still exist");
    std::fs::remove_dir_all(directory).unwrap();
}
