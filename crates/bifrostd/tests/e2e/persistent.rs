//! Containers' devices outlive the daemon without a service manager, too.

use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::common::host::Host;
use crate::common::traffic::{Echo, Requests, Talk, exchange, ping};
use crate::common::{Guest, Lab, Options, eventually};
use crate::kept::{index, serve_echo};

/// How much longer than the daemon's restart TCP may stall. The guest's packets are lost meanwhile, and its TCP
/// retransmits after 200 ms, 400 ms, and so on; the other host's transport detects within milliseconds that the daemon
/// is back.
const SLACK: Duration = Duration::from_millis(900);

fn running(workers: usize) -> Lab {
    let mut lab = Lab::new(Options { workers, ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24", "fd00::1/64"]).gateway("10.0.0.254"));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24", "fd00::2/64"]));
    lab.start();
    lab
}

/// The directory of the daemon's device records.
fn records(host: &Host) -> PathBuf {
    host.directory.join(format!("{}.sock.devices", host.name))
}

/// The record files, without the lock.
fn files(host: &Host) -> Vec<String> {
    let entries = std::fs::read_dir(records(host)).into_iter().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name != "lock");
    names.sort();
    names
}

/// Runs the daemon with `--remove-devices`; returns its success and its errors.
fn remove_devices(host: &Host) -> (bool, String) {
    let config = host.config_file();
    let output =
        host.net.run(env!("CARGO_BIN_EXE_bifrostd"), &["--remove-devices", "--config", config.to_str().unwrap()], "");
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn survive_kills(workers: usize) {
    let mut lab = running(workers);
    let before = index(lab.net("a"));
    lab.net("a").ip("route add 10.7.0.0/16 via 10.0.0.9\naddr add 10.8.0.1/24 dev eth0\n");
    for port in [5001, 5003] {
        serve_echo(lab.net("b"), "10.0.0.2", port);
    }
    let echo = Echo::start(lab.net("a"), "10.0.0.2", 5001);
    let requests = Requests::start(lab.net("a"), "10.0.0.2", 5003);
    let mut beyond = Vec::new();
    for kill in 0..5 {
        echo.wait_for_progress(1 << 20, Duration::from_secs(20));
        requests.wait_for(20);
        echo.take_longest_silence();
        requests.take_longest();
        let began = Instant::now();
        lab.hosts[0].crash();
        lab.hosts[0].start();
        let restart = began.elapsed();
        echo.wait_for_progress(1 << 20, Duration::from_secs(20));
        requests.wait_for(20);
        let silences = [echo.take_longest_silence(), requests.take_longest()];
        println!("{workers} workers, kill {kill}: silences {silences:?}, including {restart:?} of the restart");
        beyond.extend(silences.map(|silence| silence.saturating_sub(restart)));
        assert_eq!(index(lab.net("a")), before, "another device");
        assert!(lab.hosts[0].log().contains("takes over its device"), "{}", lab.hosts[0].log());
    }
    beyond.sort();
    assert!(beyond[beyond.len() / 2] <= SLACK, "silences beyond restarts: {beyond:?}");
    let routes = lab.net("a").run("ip", &["route"], "").stdout;
    let routes = String::from_utf8_lossy(&routes);
    let all = ["10.7.0.0/16 via 10.0.0.9", "default via 10.0.0.254", "10.8.0.0/24"];
    assert!(all.iter().all(|route| routes.contains(route)), "{routes}");
    assert!(echo.finish() > 5 << 20);
    requests.finish();
    exchange(lab.net("b"), lab.net("a"), "fd00::1", 5002, 1 << 20);
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
}

#[test]
fn a_container_keeps_its_device_and_its_streams_without_a_service_manager() {
    survive_kills(1);
}

#[test]
fn a_container_with_two_queues_keeps_its_device_and_its_streams_without_a_service_manager() {
    survive_kills(2);
}

#[test]
fn the_device_of_a_removed_port_is_removed() {
    let mut lab = running(1);
    assert_eq!(files(&lab.hosts[0]), ["a.json"]);
    let whole = lab.hosts[0].config.clone();
    let without = whole.split("[[port]]").next().unwrap().to_owned();
    for runs in [true, false] {
        if !runs {
            assert!(lab.hosts[0].stop().success());
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
        assert!(files(&lab.hosts[0]).is_empty());
        lab.hosts[0].config.clone_from(&whole);
        lab.hosts[0].write_config();
        lab.hosts[0].client.reload().unwrap();
        assert_eq!(files(&lab.hosts[0]), ["a.json"]);
        eventually(5.0, "it is reachable", || ping(lab.net("b"), "10.0.0.1", 1, 56) == 1);
    }
}

/// A reload changes the existing device; so does the next daemon.
#[test]
fn a_port_that_changes_keeps_its_device() {
    for workers in [1, 2] {
        let mut lab = running(workers);
        let (before, good) = (index(lab.net("a")), lab.hosts[0].config.clone());
        lab.net("a").ip("route add 10.7.0.0/16 via 10.0.0.9\n");
        let mut talk = Talk::start(lab.net("a"), lab.net("b"), "10.0.0.2", 5001);
        for (from, to) in [("mtu = 1500", "mtu = 1400"), ("\"10.0.0.1/24\", ", "\"10.0.0.1/24\", \"10.6.0.1/16\", ")] {
            talk.say(1000);
            lab.hosts[0].config = lab.hosts[0].config.replacen(from, to, 1);
            lab.hosts[0].write_config();
            assert_eq!(lab.hosts[0].client.reload().unwrap().ports.changed, ["a"]);
            assert_eq!(index(lab.net("a")), before, "{to}");
        }
        talk.say(100_000);
        let shown = lab.net("a").run("sh", &["-c", "ip link show eth0; ip addr show eth0; ip route"], "").stdout;
        let shown = String::from_utf8_lossy(&shown);
        let all = ["mtu 1400", "10.0.0.1/24", "10.6.0.1/16", "fd00::1/64", "10.7.0.0/16 via 10.0.0.9", "default via"];
        assert!(all.iter().all(|part| shown.contains(part)), "{shown}");
        // The next daemon changes it back.
        lab.hosts[0].crash();
        lab.hosts[0].config = good;
        lab.hosts[0].start();
        let shown = lab.net("a").run("ip", &["addr", "show", "eth0"], "").stdout;
        let shown = String::from_utf8_lossy(&shown);
        assert!(shown.contains("mtu 1500") && !shown.contains("10.6.0.1"), "{shown}");
        assert_eq!(index(lab.net("a")), before);
        talk.say(100_000);
    }
}

#[test]
fn a_command_removes_the_devices_of_a_daemon_that_ended() {
    let mut lab = running(1);
    let (done, errors) = remove_devices(&lab.hosts[0]);
    assert!(!done && errors.contains("another bifrostd"), "{errors}");
    assert!(lab.net("a").has_device("eth0"));
    lab.hosts[0].crash();
    for _ in 0..2 {
        let (done, errors) = remove_devices(&lab.hosts[0]);
        assert!(done, "{errors}");
        assert!(!lab.net("a").has_device("eth0") && !records(&lab.hosts[0]).exists());
    }
    lab.hosts[0].start();
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
}

/// In the host's own namespace, like an uplink.
#[test]
fn a_device_in_the_hosts_namespace_is_kept() {
    let mut lab = Lab::new(Options::default());
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    let netns = format!("netns = \"{}\"\n", lab.net("a").name());
    lab.hosts[0].config = lab.hosts[0].config.replacen(&netns, "", 1);
    lab.hosts[0].start();
    let before = index(&lab.hosts[0].net);
    lab.hosts[0].net.ip("route add 10.7.0.0/16 via 10.0.0.9\n");
    lab.hosts[0].crash();
    lab.hosts[0].start();
    assert_eq!(index(&lab.hosts[0].net), before);
    let routes = lab.hosts[0].net.run("ip", &["route"], "").stdout;
    assert!(String::from_utf8_lossy(&routes).contains("10.7.0.0/16 via 10.0.0.9"));
    lab.hosts[0].stop();
    assert!(remove_devices(&lab.hosts[0]).0);
    assert!(!lab.hosts[0].net.has_device("eth0"));
}

#[test]
fn only_own_devices_are_taken_over() {
    let mut lab = running(1);
    let own = index(lab.net("a"));
    // The guest renames the device.
    lab.hosts[0].crash();
    lab.net("a").ip("link set eth0 down\nlink set eth0 name mine\nlink set mine up\n");
    lab.hosts[0].start();
    assert!(lab.net("a").has_device("mine") && !lab.net("a").has_device("eth0"));
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
    lab.hosts[0].crash();
    lab.net("a").ip("link set mine down\nlink set mine name eth0\nlink set eth0 up\n");
    // The guest holds a queue of the device: it loses the device, and the daemon is not affected.
    let held = lab.net("a").enter(|| attach("eth0").unwrap());
    lab.hosts[0].start();
    let log = lab.hosts[0].log();
    assert!(log.contains("another process has them open") && index(lab.net("a")) != own, "{log}");
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
    drop(held);
    // The guest replaces the device with its own of the same name: the daemon fails, and leaves that device.
    lab.hosts[0].crash();
    lab.net("a").ip("link del eth0\ntuntap add eth0 mode tap\n");
    let theirs = index(lab.net("a"));
    lab.hosts[0].spawn();
    assert_eq!(lab.hosts[0].wait(10.0).code(), Some(1));
    assert!(lab.hosts[0].log().contains("an interface of this name exists"), "{}", lab.hosts[0].log());
    assert_eq!(index(lab.net("a")), theirs);
    lab.net("a").ip("link del eth0\n");
    lab.hosts[0].start();
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
    // The guest moves the device to another namespace.
    lab.hosts[0].crash();
    let elsewhere = lab.net("b").name().to_owned();
    lab.net("a").ip(&format!("link set eth0 name moved netns {elsewhere}\n"));
    lab.hosts[0].start();
    assert!(lab.net("a").has_device("eth0") && lab.net("b").has_device("moved"));
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
}

#[test]
fn a_recreated_namespace_gets_a_device() {
    let mut lab = running(1);
    lab.hosts[0].crash();
    lab.delete_net("a");
    lab.make_net("a");
    lab.hosts[0].start();
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
    // The namespace does not exist when the daemon starts.
    lab.hosts[0].crash();
    lab.delete_net("a");
    lab.hosts[0].start();
    assert!(lab.hosts[0].port("a").waiting);
    lab.make_net("a");
    eventually(5.0, "the port has its device", || !lab.hosts[0].port("a").waiting);
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
    lab.hosts[0].crash();
    let device = index(lab.net("a"));
    lab.hosts[0].start();
    assert_eq!(index(lab.net("a")), device);
}

/// Whenever the daemon is killed, the next one works, and no device remains without a record.
#[test]
fn a_daemon_killed_during_its_start_leaves_a_consistent_state() {
    let mut lab = running(1);
    let mut random = fastrand::Rng::with_seed(7);
    for round in 0..30 {
        if round % 3 == 0 {
            assert!(remove_devices(&lab.hosts[0]).0 || round == 0);
        }
        lab.hosts[0].crash();
        lab.hosts[0].spawn();
        std::thread::sleep(Duration::from_micros(random.u64(0..120_000)));
        lab.hosts[0].crash();
        let recorded = files(&lab.hosts[0]).contains(&"a.json".to_owned());
        assert!(recorded || !lab.net("a").has_device("eth0"), "a device without a record");
    }
    lab.hosts[0].start();
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
    assert_eq!(files(&lab.hosts[0]), ["a.json"]);
}

/// Opens a queue of a device in the calling thread's namespace.
fn attach(name: &str) -> std::io::Result<File> {
    use std::os::fd::AsRawFd as _;
    let file = File::options().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: a C struct of bytes and integers, for which all zeros is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes one ifreq.
    match unsafe { libc::ioctl(file.as_raw_fd(), 0x4004_54ca, &mut request) } {
        0 => Ok(file),
        _ => Err(std::io::Error::last_os_error()),
    }
}
