//! `bifrost-fleet run outage`, in short: real etcd, relay, agents, daemons and guests.
//! `BIFROST_ETCD=$(scripts/install-etcd.sh) cargo test -p bifrost-fleet --test outage -- --ignored`, as root, after
//! `cargo build --workspace --bins`.

#![allow(clippy::unwrap_used, missing_docs)]

use std::process::Command;

use serde_json::Value;

#[test]
#[ignore = "needs BIFROST_ETCD"]
fn guests_lose_nothing_while_all_members_of_etcd_are_down() {
    let mut program = Command::new(env!("CARGO_BIN_EXE_bifrost-fleet"));
    let output = program.args(["--json", "run", "outage", "--etcd", "12"]).output().unwrap();
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{error}");
    let report: Value = serde_json::from_str(&out).unwrap();
    let value = |what: &str| {
        let rows = report["rows"].as_array().unwrap();
        let row = rows.iter().find(|row| row["what"] == what).unwrap_or_else(|| panic!("no {what:?} in {report}"));
        row["value"].as_f64().unwrap()
    };
    // The bars are met; and something was measured.
    assert!(value("datagrams between guests") > 1000.0, "{report}");
    assert!(value("questions over TCP") > 100.0, "{report}");
    assert!(value("changes refused while etcd was down") >= 1.0, "{report}");
    assert!(value("changes pending when etcd was back") >= 2.0, "{report}");
}
