//! Tests of the program itself, in network namespaces. They need root and the Debian packages, but not `bifrostd`:
//! `scripts/test.sh` tests that end to end with release binaries.

#![allow(clippy::unwrap_used)]

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Serializes runs that measure.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn lab() -> Command {
    assert!(rustix::process::geteuid().is_root(), "end-to-end tests make network namespaces: run them as root");
    Command::new(env!("CARGO_BIN_EXE_bifrost-lab"))
}

fn output(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

/// Namespaces of the run with process `pid`.
fn namespaces_of(pid: u32) -> Vec<String> {
    let list = Command::new("ip").args(["netns", "list"]).output().unwrap();
    let text = String::from_utf8(list.stdout).unwrap();
    text.lines().filter(|line| line.starts_with(&format!("bl{pid}x"))).map(str::to_owned).collect()
}

/// A long run that has built its namespaces and is measuring.
fn long_run(out: &Path) -> Child {
    let mut command = lab();
    command.args(["run", "redis-loss", "--modes", "kernel_vxlan", "--seconds", "20", "--out"]).arg(out);
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).process_group(0).spawn().unwrap();
    let log = out.join("logs/kernel_vxlan-0/redis-benchmark-wire-0-get.txt");
    let deadline = Instant::now() + Duration::from_secs(30);
    while !log.exists() {
        assert!(Instant::now() < deadline, "{} does not appear", log.display());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(namespaces_of(child.id()).len(), 4);
    child
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap(), signal).unwrap();
}

#[test]
fn a_kernel_vxlan_run_shows_tcp_stalling_under_loss() {
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let out = tempfile::tempdir().unwrap();
    let arguments =
        ["run", "redis-loss", "--quick", "--modes", "kernel_vxlan", "--losses", "0,1", "--ops", "get", "--out"];
    let child = lab().args(arguments).arg(out.path()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pid = child.id();
    let finished = child.wait_with_output().unwrap();
    assert!(finished.status.success(), "{}", String::from_utf8_lossy(&finished.stderr));
    assert_eq!(namespaces_of(pid), [] as [String; 0]);

    let stdout = String::from_utf8(finished.stdout).unwrap();
    assert!(stdout.contains("P99.9 ms") && stdout.contains("latency-p99.9.svg"), "{stdout}");
    for file in ["results.json", "report.md", "latency-p99.9.svg", "rps.svg"] {
        assert!(out.path().join(file).is_file(), "{file}");
    }
    let results: Value = serde_json::from_slice(&std::fs::read(out.path().join("results.json")).unwrap()).unwrap();
    let schema = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results.schema.json");
    let schema: Value = serde_json::from_slice(&std::fs::read(schema).unwrap()).unwrap();
    assert!(jsonschema::validator_for(&schema).unwrap().is_valid(&results));
    let rows = results["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    for row in rows {
        let lossy = row["loss_percent"].as_f64().unwrap() > 0.0;
        // TCP's minimum retransmission timeout is 200 ms; only a loss makes it wait that long.
        assert_eq!(row["latency_ms_p99_9"].as_f64().unwrap() > 200.0, lossy, "{row}");
        if let Some(drops) = row["wire_drops_packets"].as_u64() {
            let expected = row["requests"].as_f64().unwrap() * 2.0 * row["loss_percent"].as_f64().unwrap() / 100.0;
            let drops = drops as f64;
            assert!(drops >= expected * 0.7 && drops <= expected * 3.0 + 10.0, "{drops} packets dropped: {row}");
        }
    }

    // Two modes are missing, so the bars cannot be cleared.
    let check = lab().args(["check", "redis-loss", "--out"]).arg(out.path()).output().unwrap();
    assert_eq!(check.status.code(), Some(1));
    assert!(String::from_utf8(check.stdout).unwrap().contains("not measured"));
}

#[test]
fn multipath_tcp_has_a_subflow_for_each_path_and_reports_a_fallback() {
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let out = tempfile::tempdir().unwrap();
    let mut command = lab();
    command.args(["run", "redis-loss", "--quick", "--modes", "mptcp", "--losses", "0", "--injectors", "wire"]);
    let run = command.args(["--clients", "40", "--ops", "get", "--out"]).arg(out.path()).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let file = out.path().join("logs/mptcp-0/mptcp.json");
    let usage: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let count = |name: &str| usage[name].as_u64().unwrap();
    // Warm-up, trials and measurement, each with 40 clients and a connection that reads the server's settings; four
    // paths, and each connection begins on one of them. The kernel opens the other subflows in the background.
    // Warm-up and trials take only tens of milliseconds, so connections may close before they have them; in the
    // measurement, which takes a second and more, all 40 clients get them.
    let (connections, subflows) = (count("connections"), count("subflows"));
    assert!(connections >= 3 * 41 && connections % 41 == 0 && count("plain_connections") == 0, "{usage}");
    assert!((3 * 40..=3 * connections).contains(&subflows), "{usage}");
    assert!(usage["fallbacks"].as_object().unwrap().is_empty(), "{usage}");
    let carried = usage["carried_bytes"].as_array().unwrap();
    assert!(carried.len() == 4 && carried.iter().all(|bytes| bytes.as_u64().unwrap() > 100_000), "{usage}");

    // A middlebox removes the option for Multipath TCP (RFC 8684, 3.1: number 30).
    let mut command = lab();
    command.args(["run", "iperf", "--modes", "mptcp", "--losses", "0,0.01", "--seconds", "2", "--repetitions", "1"]);
    command.arg("--out").arg(out.path()).stdout(Stdio::null()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let log = out.path().join("logs/mptcp-0/iperf3-0-server.json");
    let deadline = Instant::now() + Duration::from_secs(30);
    while !log.exists() {
        assert!(Instant::now() < deadline, "{} does not appear", log.display());
        std::thread::sleep(Duration::from_millis(5));
    }
    let guest = namespaces_of(child.id()).into_iter().find(|name| name.contains("guest-b")).unwrap();
    let guest = guest.split(' ').next().unwrap();
    let rules = "table netdev middlebox {\n chain options {\n type filter hook ingress device eth0 priority 0\n \
                 reset tcp option 30\n }\n}\n";
    let file = out.path().join("middlebox.nft");
    std::fs::write(&file, rules).unwrap();
    output(Command::new("ip").args(["netns", "exec", guest, "nft", "-f"]).arg(&file));
    let run = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(run.stderr).unwrap();
    assert!(!run.status.success() && stderr.contains("have fallen back to TCP"), "{stderr}");
}

#[test]
fn an_interrupted_run_cleans_up() {
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let out = tempfile::tempdir().unwrap();
    let mut child = long_run(out.path());
    signal(&child, Signal::INT);
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(1));
    assert_eq!(namespaces_of(child.id()), [] as [String; 0]);
}

#[test]
fn the_next_run_removes_what_a_killed_run_left_behind() {
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let out = tempfile::tempdir().unwrap();
    let mut killed = long_run(out.path());
    signal(&killed, Signal::KILL);
    killed.wait().unwrap();
    assert_eq!(namespaces_of(killed.id()).len(), 4);
    // A living run is not touched.
    let living_out = tempfile::tempdir().unwrap();
    let mut living = long_run(living_out.path());
    assert_eq!(namespaces_of(killed.id()), [] as [String; 0]);
    let clean = output(lab().arg("clean"));
    assert_eq!(namespaces_of(living.id()).len(), 4, "{}", String::from_utf8_lossy(&clean.stdout));
    signal(&living, Signal::TERM);
    living.wait().unwrap();
    assert_eq!(namespaces_of(living.id()), [] as [String; 0]);
}

#[test]
fn the_command_line_explains_errors() {
    let list: Value = serde_json::from_slice(&output(lab().args(["list", "--json"])).stdout).unwrap();
    let names: Vec<_> = list.as_array().unwrap().iter().map(|e| e["name"].as_str().unwrap()).collect();
    let with_machines = ["granularity", "coverage", "delayed-release", "slicing", "vhost-rate", "migrate"];
    let of_the_switch = [
        "switch-overall",
        "switch-rate",
        "switch-latency",
        "flow-records",
        "vectors",
        "route-refresh",
        "nat",
        "load-balancer",
        "mirror",
        "flow-log",
        "apply",
        "learn",
        "upgrade",
        "cni",
        "nginx",
        "applications",
        "isolation",
    ];
    let more = ["elephants", "capacity", "ecn", "stable", "congestion-control", "sockperf"];
    let of_the_gateway =
        ["gw-services", "gw-order", "gw-overload", "gw-hosts", "gw-elastic", "gw-bgp", "gw-kill", "gw-links"];
    assert_eq!(
        names,
        [
            &["redis-loss", "path-failure", "outage", "iperf", "lossless", "soak"][..],
            &with_machines,
            &of_the_switch,
            &more,
            &of_the_gateway,
            &["rdm-loss", "rdm-upgrade", "rdm-sort", "rdm-block"]
        ]
        .concat()
    );
    let out = tempfile::tempdir().unwrap();
    let wrong = [
        (vec!["run", "redis-los"], "there are: redis-loss"),
        (vec!["run", "redis-loss", "--losses", "101"], "from 0 to 100"),
        (vec!["run", "redis-loss", "--modes", "magic"], "kernel_vxlan"),
        (vec!["run", "redis-loss", "--modes", "open_vswitch"], "redis-loss does not run with --modes open_vswitch"),
        (vec!["run", "redis-loss", "--paths", "9"], "1..=8"),
        (vec!["run", "applications", "--apps", "oracle"], "postgresql"),
        (vec!["run", "redis-loss", "--bin-dir", "/nonexistent"], "--modes kernel_vxlan"),
        (
            vec!["run", "learn", "--bin-dir", "/nonexistent", "--out", out.path().to_str().unwrap()],
            "/nonexistent/bifrost-fleet is missing: build the workspace",
        ),
        (vec!["run", "learn", "--used", "1001"], "16..=1000"),
        (vec!["check", "redis-loss", "--out", "/nonexistent"], "bifrost-lab run redis-loss"),
    ];
    for (arguments, hint) in wrong {
        let output = lab().args(&arguments).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && stderr.contains(hint), "{arguments:?}: {stderr}");
    }
}
