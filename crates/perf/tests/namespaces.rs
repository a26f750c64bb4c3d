//! Real programs in two network namespaces (root): messages and calls over RoCEv2 in software, while nftables drops packets.

#![allow(clippy::unwrap_used)]

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Two namespaces and a pair of veth devices between them, removed at the end. The names have the process in them, so that
/// two runs do not meet; what a crash leaves is removed by the next run of a process with the same id, or by a reboot.
struct Network {
    names: [String; 2],
}

impl Network {
    /// Packets of both directions are lost one in `one_in`; 0: none.
    fn new(test: &str, mtu: u32, one_in: u32) -> Self {
        let names = ["a", "b"].map(|end| format!("perf-{test}-{}-{end}", std::process::id()));
        for name in &names {
            // What is left of a process with the same id.
            let _ = Command::new("ip").args(["netns", "del", name]).stderr(Stdio::null()).status();
            run("ip", &["netns", "add", name]);
        }
        let network = Self { names };
        let [a, b] = &network.names;
        run("ip", &["link", "add", "e0", "netns", a, "type", "veth", "peer", "name", "e0", "netns", b]);
        for (n, name) in network.names.iter().enumerate() {
            for (family, bits) in [("fd00:9::", 64), ("10.9.0.", 24)] {
                let address = format!("{family}{}/{bits}", n + 1);
                let flags: &[&str] = if bits == 64 { &["nodad"] } else { &[] };
                run("ip", &[&["-n", name, "addr", "add", &address, "dev", "e0"], flags].concat());
            }
            run("ip", &["-n", name, "link", "set", "e0", "mtu", &mtu.to_string(), "up"]);
            // One packet, one decision: without offloads.
            run("ip", &["netns", "exec", name, "ethtool", "-K", "e0", "gso", "off", "tso", "off", "gro", "off"]);
            run("ip", &["netns", "exec", name, "ethtool", "-K", "e0", "tx-udp-segmentation", "off"]);
            if one_in > 0 {
                let rules = "table inet t { chain c { type filter hook input priority 0; }; }";
                run("ip", &["netns", "exec", name, "nft", rules]);
                let rule = format!("add rule inet t c meta l4proto udp numgen random mod {one_in} 0 counter drop");
                run("ip", &["netns", "exec", name, "nft", &rule]);
            }
        }
        network
    }

    fn command(&self, end: usize, args: &[&str]) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[end], env!("CARGO_BIN_EXE_bifrost-perf")]).args(args);
        command
    }

    fn serve(&self, args: &[&str]) -> Server {
        let mut command = self.command(1, args);
        let child = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let server = Server(child);
        // Until it listens for both.
        let listening = || {
            let output = Command::new("ip").args(["netns", "exec", &self.names[1], "ss", "-Htln"]).output().unwrap();
            String::from_utf8_lossy(&output.stdout).contains(":18516")
        };
        let until = Instant::now() + Duration::from_secs(10);
        while !listening() {
            assert!(Instant::now() < until, "the server does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        server
    }

    fn measure(&self, args: &[&str]) -> Value {
        let output = self.command(0, args).arg("--json").output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "del", name]).status();
        }
    }
}

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn run(program: &str, args: &[&str]) {
    let output = Command::new(program).args(args).output().unwrap();
    assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn messages_and_calls_survive_losses() {
    let network = Network::new("loss", 1500, 100);
    for connection in ["uc", "rc", "both"] {
        let directory = std::env::temp_dir().join(format!("perf-stats-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let [served, asked] =
            ["server", "client"].map(|end| directory.join(end).into_os_string().into_string().unwrap());
        let server = network.serve(&["server", "-b", "fd00:9::2", "-c", connection, "--stats", &served]);
        let common = ["fd00:9::2", "-b", "fd00:9::1", "-c", connection, "--stats", &asked];
        let switch: &[&str] = if connection == "both" { &["--switch-every", "2"] } else { &[] };
        for (test, size, iters) in [("bw", "1000000", "60"), ("bw", "100", "3000"), ("lat", "32768", "300")] {
            let report = network.measure(&[&[test], &common[..], switch, &["-s", size, "-n", iters]].concat());
            let name = format!("{connection} {test} {size}: {report}");
            assert_eq!(report["messages"].as_u64().unwrap().to_string(), iters, "{name}");
            let switches = report["engine"]["switches"].as_u64().unwrap();
            assert!((switches > 0) == (connection == "both"), "{name}");
            if test == "lat" {
                let latency = &report["latency_us"];
                let at = |key: &str| latency[key].as_f64().unwrap();
                assert!(at("min") > 0.0 && at("min") <= at("p50") && at("p50") <= at("max"), "{name}");
            }
            if (size, connection) == ("1000000", "uc") {
                // 58,800 packets of data, of which one in 100 is lost.
                let lost = report["engine"]["lost"].as_u64().unwrap();
                assert!(lost > 100, "{name}");
                let packets = report["engine"]["packets_per_call"].as_f64().unwrap();
                assert!(packets > 1.5, "segmentation by the kernel: {name}");
                // The same for Prometheus.
                assert_eq!(statistic(&asked, "lost_requests"), Some(lost), "{name}");
                assert!(statistic(&asked, "socket_send_calls") > Some(0), "{name}");
            }
        }
        // The server writes when it has seen that a client has gone.
        let until = Instant::now() + Duration::from_secs(10);
        while statistic(&served, "delivered_messages") < Some(3360) {
            assert!(Instant::now() < until, "{connection}: {:?}", std::fs::read_to_string(&served));
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(server);
        std::fs::remove_dir_all(&directory).unwrap();
    }
}

/// A counter in a file for Prometheus.
fn statistic(file: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("bifrost_rdm_{name}_total ")))?;
    line.parse().ok()
}

#[test]
fn ipv4_and_other_ports_work_too() {
    let network = Network::new("v4", 1500, 0);
    let server = network.serve(&["server", "-b", "10.9.0.2", "--roce-port", "5000"]);
    let common = ["bw", "10.9.0.2", "-b", "10.9.0.1", "--roce-port", "0", "-s", "200000", "-n", "50"];
    let report = network.measure(&common);
    assert_eq!(report["messages"], 50, "{report}");
    assert_eq!(network.measure(&[&common[..], &["--tcp"]].concat())["messages"], 50);
    // Ends that do not fit are told apart, and why.
    let output = network.command(0, &[&common[..], &["-m", "512"]].concat()).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("another transport service or path MTU"), "{error}");
    drop(server);
    let output = network.command(0, &common).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("cannot set up a connection with 10.9.0.2"), "{error}");
}
