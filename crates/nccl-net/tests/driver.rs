//! Two ranks that use the plugin like NCCL does: C programs that load it (`c/driver.c`).

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

#[path = "../../endpoint/tests/common/lossy.rs"]
mod lossy;

use lossy::{Lossy, run};

const CRATE: &str = env!("CARGO_MANIFEST_DIR");

/// The compiled driver, and the plugin, which cargo puts beside this test.
fn driver(directory: &Path) -> (PathBuf, PathBuf) {
    let program = directory.join("driver");
    run(Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-pedantic", "-Werror", "-O1"])
        .args([&format!("{CRATE}/tests/c/driver.c"), "-o"])
        .arg(&program)
        .arg("-ldl"));
    let plugin = std::env::current_exe().unwrap().parent().unwrap().join("libnccl_net_bifrost.so");
    assert!(plugin.exists(), "{plugin:?}");
    (program, plugin)
}

/// Starts both ranks; `command` returns a rank's command for the driver's path.
fn start(directory: &Path, version: u32, groups: u32, command: impl Fn(usize, &Path) -> Command) -> Vec<Child> {
    let (program, plugin) = driver(directory);
    let start = |rank| {
        let mut command = command(rank, &program);
        command.arg(&plugin).args([version.to_string(), rank.to_string()]).arg(directory).arg(groups.to_string());
        command.stderr(Stdio::piped()).spawn().unwrap()
    };
    (0..2).map(start).collect()
}

/// Runs both ranks to completion.
fn both(directory: &Path, version: u32, groups: u32, command: impl Fn(usize, &Path) -> Command) {
    let ranks = start(directory, version, groups, command);
    let outputs: Vec<_> = ranks.into_iter().map(|rank| rank.wait_with_output().unwrap()).collect();
    let errors: Vec<_> = outputs.iter().map(|output| String::from_utf8_lossy(&output.stderr)).collect();
    assert!(outputs.iter().all(|output| output.status.success()), "{errors:?}");
}

fn local(address: &'static str) -> impl Fn(usize, &Path) -> Command {
    move |_, program| {
        let mut command = Command::new(program);
        command.env("BIFROST_NCCL_ADDRESSES", address);
        command
    }
}

#[test]
fn every_version_carries_what_nccl_sends() {
    for version in 8..=12 {
        let directory = tempfile::tempdir().unwrap();
        let address = if version == 9 { "127.0.0.1" } else { "::1" };
        both(directory.path(), version, if version == 11 { 40 } else { 15 }, local(address));
    }
}

#[test]
fn connections_stay_while_nccl_computes() {
    let directory = tempfile::tempdir().unwrap();
    both(directory.path(), 11, 12, |rank, program| {
        let mut command = local("::1")(rank, program);
        command.env("DRIVER_PAUSE", "1").env("BIFROST_NCCL_WORKERS", "3");
        command
    });
}

#[test]
fn a_rank_that_dies_is_reported() {
    let directory = tempfile::tempdir().unwrap();
    let mut ranks = start(directory.path(), 12, 1_000_000, local("::1"));
    let until = Instant::now() + Duration::from_secs(60);
    while (0..2).any(|rank| !directory.path().join(format!("connected-{rank}")).exists()) {
        assert!(Instant::now() < until, "the ranks are not connected");
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut dead = ranks.remove(1);
    dead.kill().unwrap();
    dead.wait().unwrap();
    // The other rank detects it within seconds, not by the driver's own timeout of two minutes.
    let killed = Instant::now();
    let output = ranks.remove(0).wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("has ended"), "{error}");
    assert!(killed.elapsed() < Duration::from_secs(30), "{:?}", killed.elapsed());
}

#[test]
fn one_packet_in_256_may_be_lost() {
    let directory = tempfile::tempdir().unwrap();
    let lossy = Lossy::new("nccl", 1500, 256);
    // Without a list of addresses, the plugin finds the device.
    both(directory.path(), 11, 40, |rank, program| lossy.command(rank, program));
    assert!(lossy.dropped(0) > 50 && lossy.dropped(1) > 50, "{} {}", lossy.dropped(0), lossy.dropped(1));
}
