//! Real programs in two network namespaces (needs root): messages and calls over RoCEv2 in software, while nftables
//! drops packets.

#![allow(clippy::unwrap_used)]

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

#[path = "../../endpoint/tests/common/lossy.rs"]
mod lossy;

use lossy::Lossy;

/// Two ends of a link: one serves, the other one measures.
struct Network(Lossy);

impl Network {
    fn new(test: &str, mtu: u32, one_in: u32) -> Self {
        Self(Lossy::new(&format!("perf-{test}"), mtu, one_in))
    }

    fn command(&self, end: usize, args: &[&str]) -> Command {
        let mut command = self.0.command(end, env!("CARGO_BIN_EXE_bifrost-perf"));
        command.args(args);
        command
    }

    fn serve(&self, args: &[&str]) -> Server {
        let mut command = self.command(1, args);
        let child = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let server = Server(child);
        // Until it listens on both ports.
        let listening = || lossy::run(self.0.command(1, "ss").arg("-Htln")).contains(":18516");
        let until = Instant::now() + Duration::from_secs(10);
        while !listening() {
            assert!(Instant::now() < until, "the server is not listening");
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

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
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
                // 58,800 packets of data, of which 1 % are lost.
                let lost = report["engine"]["lost"].as_u64().unwrap();
                assert!(lost > 100, "{name}");
                let packets = report["engine"]["packets_per_call"].as_f64().unwrap();
                assert!(packets > 1.5, "segmentation by the kernel: {name}");
                // The Prometheus counters agree.
                assert_eq!(statistic(&asked, "lost_requests"), Some(lost), "{name}");
                assert!(statistic(&asked, "socket_send_calls") > Some(0), "{name}");
            }
        }
        // The server writes its counters when it detects the end of a client.
        let until = Instant::now() + Duration::from_secs(10);
        while statistic(&served, "delivered_messages") < Some(3360) {
            assert!(Instant::now() < until, "{connection}: {:?}", std::fs::read_to_string(&served));
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(server);
        std::fs::remove_dir_all(&directory).unwrap();
    }
}

/// A counter in a Prometheus file.
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
    // Incompatible ends refuse the connection, and report why.
    let output = network.command(0, &[&common[..], &["-m", "512"]].concat()).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("another transport service or path MTU"), "{error}");
    drop(server);
    let output = network.command(0, &common).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("cannot set up a connection with 10.9.0.2"), "{error}");
}

#[test]
fn running_processes_change_their_service_by_a_file() {
    let network = Network::new("up", 4200, 256);
    let directory = std::env::temp_dir().join(format!("perf-upgrade-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let path = directory.join("service").into_os_string().into_string().unwrap();
    let say = |text: &str| {
        // Like `mv`, so that readers never see a partial file.
        std::fs::write(directory.join("new"), text).unwrap();
        std::fs::rename(directory.join("new"), &path).unwrap();
    };
    say("rc");
    let both = ["-c", "both", "--follow", &path, "-m", "4096"];
    let served = directory.join("served").into_os_string().into_string().unwrap();
    let server = network.serve(&[&["server", "-b", "fd00:9::2", "--in-order", "--stats", &served], &both[..]].concat());
    let load = ["upgrade", "fd00:9::2", "-b", "fd00:9::1", "-D", "4", "--rate", "500", "--window-ms", "500", "--json"];
    let client = network.command(0, &[&load[..], &both].concat()).stdout(Stdio::piped()).spawn().unwrap();
    for text in ["uc", "rc", "uc"] {
        std::thread::sleep(Duration::from_millis(1200));
        say(text);
    }
    let output = client.wait_with_output().unwrap();
    assert!(output.status.success());
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["lost"], &report["out_of_order"]), (&0.into(), &0.into()), "{report}");
    assert!(report["calls"].as_u64() > Some(1000) && report["windows"].as_array().unwrap().len() == 8, "{report}");
    let changes: Vec<_> = report["changes"].as_array().unwrap().iter().map(|change| &change["service"]).collect();
    assert_eq!(changes, ["uc", "rc", "uc"], "{report}");
    assert!(report["engine"]["lost"].as_u64() > Some(0), "{report}");
    // The server has followed the file, too.
    let until = Instant::now() + Duration::from_secs(10);
    while statistic(&served, "switches") < Some(4) {
        assert!(Instant::now() < until, "{:?}", std::fs::read_to_string(&served));
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(server);
    std::fs::remove_dir_all(&directory).unwrap();
    let output = network.command(0, &["upgrade", "fd00:9::2"]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("needs --follow"));
}

#[test]
fn a_sort_over_lossy_links_gives_all_records_in_order() {
    let network = Network::new("sort", 4200, 256);
    for tcp in [&[][..], &["--tcp"]] {
        let spawn = |end: usize, what: &str, args: &[&str]| {
            let bind = ["fd00:9::1", "fd00:9::2"][end];
            let all = [&["sort", what, "-b", bind, "--roce-port", "0", "-m", "4096", "--json"], args, tcp].concat();
            network.command(end, &all).stdout(Stdio::piped()).spawn().unwrap()
        };
        let reduce = |number: &str, port: &str| {
            spawn(1, "reduce", &["-p", port, "--mappers", "2", "--reducers", "2", "--number", number])
        };
        let reducers = [reduce("0", "7000"), reduce("1", "7001")];
        let to = "[fd00:9::2]:7000,[fd00:9::2]:7001";
        let map = |seed: &str| spawn(0, "map", &["--reducers", to, "--records", "30000", "--seed", seed]);
        let mappers = [map("1"), map("2")];
        let report = |child: Child| -> Value {
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{tcp:?}");
            serde_json::from_slice(&output.stdout).unwrap()
        };
        let (mapped, reduced) = (mappers.map(report), reducers.map(report));
        let sum = |reports: &[Value], field: &str| {
            reports.iter().map(|report| report[field].as_u64().unwrap()).fold(0, u64::wrapping_add)
        };
        assert!(reduced.iter().all(|report| report["sorted"] == true), "{reduced:?}");
        assert_eq!(sum(&reduced, "records"), 60_000);
        assert_eq!(sum(&reduced, "checksum"), sum(&mapped, "checksum"), "{tcp:?}: the records changed");
        assert!(mapped.iter().all(|report| report["run_s"].as_f64() >= report["block_s"].as_f64()), "{mapped:?}");
    }
}

#[test]
fn block_storage_over_lossy_links_reads_what_was_written() {
    let network = Network::new("block", 4200, 256);
    for tcp in [&[][..], &["--tcp"]] {
        let backends = ["7000", "7001", "7002"].map(|port| {
            let all =
                ["block", "serve", "-b", "fd00:9::2", "--roce-port", "0", "-m", "4096", "-p", port, "--disk-mib", "2"];
            Server(network.command(1, &[&all, tcp].concat()).stderr(Stdio::null()).spawn().unwrap())
        });
        let to = "[fd00:9::2]:7000,[fd00:9::2]:7001,[fd00:9::2]:7002";
        let all = ["block", "run", "-b", "fd00:9::1", "-m", "4096", "--backends", to, "--disk-mib", "2", "-D", "1"];
        // It fails if it reads anything other than what it wrote.
        let report = network.measure(&[&all, tcp].concat());
        assert!(report["reads"].as_u64() > Some(100) && report["writes"].as_u64() > Some(50), "{report}");
        let at = |of: &str, key: &str| report[of][key].as_f64().unwrap();
        assert!(at("read_latency_us", "p50") <= at("read_latency_us", "p99_9"), "{report}");
        drop(backends);
    }
}
