//! Errors at start are reported, and nothing is left behind.

use std::os::unix::net::UnixDatagram;
use std::process::Stdio;
use std::time::Duration;

use crate::common::{Guest, Lab, Options};

/// Starts the first host's daemon, which must fail and log these texts.
fn fails(lab: &mut Lab, says: &[&str]) {
    let had_socket = lab.hosts[0].socket().exists();
    let host = &mut lab.hosts[0];
    host.spawn();
    let status = host.wait(10.0);
    let log = host.log();
    assert_eq!(status.code(), Some(1), "{log}");
    for part in says {
        assert!(log.contains(part), "{part:?} is not in:\n{log}");
    }
    assert!(!log.contains("panicked"), "{log}");
    assert_eq!(host.socket().exists(), had_socket);
}

fn lab() -> Lab {
    let mut lab = Lab::new(Options::default());
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(0, Guest::new("b", 2, &["10.0.0.2/24"]));
    lab
}

#[test]
fn a_malformed_configuration_names_every_line() {
    let mut lab = lab();
    let config = lab.hosts[0].config.clone();
    lab.hosts[0].config = config.replace("vni = 100\nmac", "vni = 101\nmac").replace("paths = 4", "pahts = 4");
    fails(&mut lab, &["host-a.toml:9: underlay.pahts", "did you mean", "port[0].vni", "port[1].vni"]);
    lab.hosts[0].config = config.replace("[host]", "[host");
    fails(&mut lab, &["host-a.toml:1"]);
    assert!(!lab.net("a").has_device("eth0"));
}

#[test]
fn a_device_that_exists_is_not_taken_over() {
    let mut lab = lab();
    lab.net("b").ip("link add eth0 type veth peer name other\n");
    fails(&mut lab, &["port b", "eth0", "exists"]);
    assert!(!lab.net("a").has_device("eth0"), "the first port's device was left behind");
    assert!(lab.net("b").has_device("eth0"));
}

#[test]
fn a_file_that_is_not_a_namespace_is_reported() {
    let mut lab = lab();
    let name = lab.net("b").name().to_string();
    lab.hosts[0].config = lab.hosts[0].config.replace(&name, "/etc/hostname");
    fails(&mut lab, &["port b", "/etc/hostname", "the file of a namespace"]);
    assert!(!lab.net("a").has_device("eth0"), "the first port's device was left behind");
}

#[test]
fn an_unknown_underlay_address_is_reported() {
    let mut lab = lab();
    lab.hosts[0].config = lab.hosts[0].config.replace("\"172.31.1.1\"", "\"172.31.9.1\"");
    fails(&mut lab, &["172.31.9.1", "underlay.addresses"]);
}

#[test]
fn a_second_daemon_does_not_disturb_the_first() {
    for workers in [1, 2] {
        let mut lab = Lab::new(Options { workers, ..Options::default() });
        lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
        lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
        lab.start();
        let (first, config) = (lab.hosts[0].pid(), lab.hosts[0].config_file());
        let second = |config: &std::path::Path, says: &[&str]| {
            let mut command = lab.hosts[0].net.command(env!("CARGO_BIN_EXE_bifrostd"));
            let output = command.arg("--config").arg(config).output().unwrap();
            let log = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(1), "{log}");
            assert!(says.iter().all(|s| log.contains(s)), "{says:?} not in:\n{log}");
        };
        second(&config, &["another", "bifrostd"]);
        // With its own socket and guest, the second daemon conflicts on the UDP ports.
        let other = lab.hosts[0].directory.join("other.toml");
        let text = std::fs::read_to_string(&config).unwrap();
        std::fs::write(&other, text.replace("host-a.sock", "other.sock").replace("eth0", "eth1")).unwrap();
        second(&other, &["4794", "a second bifrostd"]);
        assert!(!lab.net("a").has_device("eth1"));
        assert!(!lab.hosts[0].directory.join("other.sock").exists());
        assert_eq!(lab.hosts[0].client.status().unwrap().pid, first);
        crate::common::traffic::exchange(lab.net("a"), lab.net("b"), "10.0.0.2", 5001, 1 << 20);
        let (retransmits, device) = (lab.net("a").retransmits(), lab.net("a").has_device("eth0"));
        assert_eq!((retransmits, device), (0, true));
    }
}

#[test]
fn a_clean_exit_removes_the_socket_and_devices_that_are_not_kept() {
    let mut lab = Lab::new(Options::default());
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
    lab.hosts[0].config = lab.hosts[0].config.replacen("[host]\n", "[host]\nkeep_devices = false\n", 1);
    lab.start();
    assert!(lab.net("a").has_device("eth0"));
    assert!(lab.hosts[0].stop().success());
    assert!(!lab.hosts[0].socket().exists());
    assert!(!lab.net("a").has_device("eth0"));
    // After a crash the socket's file is left, and does not prevent the next start.
    lab.hosts[1].crash();
    assert!(lab.hosts[1].socket().exists());
    lab.hosts[0].start();
    lab.hosts[1].start();
    assert_eq!(crate::common::traffic::ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
}

#[test]
fn a_link_with_a_smaller_mtu_than_the_underlay_is_reported() {
    let mut lab = lab();
    lab.hosts[0].net.ip("link set l1 mtu 1500\n");
    lab.hosts[0].start();
    let log = lab.hosts[0].log();
    let warnings: Vec<_> = log.lines().filter(|line| line.contains("underlay.mtu 1700")).collect();
    assert!(matches!(warnings[..], [line] if line.contains("MTU 1500") && line.contains("dev l1")), "{log}");
}

#[test]
fn the_service_manager_is_notified_when_guests_have_their_devices() {
    let lab = lab();
    let host = &lab.hosts[0];
    host.write_config();
    let path = host.directory.join("notify.sock");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // Skip messages that store descriptors.
    let message = || loop {
        let mut buffer = [0; 256];
        let length = socket.recv(&mut buffer).unwrap();
        let text = String::from_utf8(buffer[..length].to_vec()).unwrap();
        if !text.starts_with("FDSTORE=1") {
            break text;
        }
    };
    let mut command = host.net.command(env!("CARGO_BIN_EXE_bifrostd"));
    let mut child = command
        .env("NOTIFY_SOCKET", &path)
        .arg("--config")
        .arg(host.config_file())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    assert_eq!(message().trim(), "READY=1");
    assert!(lab.net("a").has_device("eth0") && lab.net("b").has_device("eth0"));
    host.client.status().unwrap();
    let pid = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(message().trim(), "STOPPING=1");
    assert!(child.wait().unwrap().success());
}
