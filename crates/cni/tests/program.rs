//! The program as a runtime runs it, without `bifrostd`.

#![allow(clippy::unwrap_used)]

use std::io::Write as _;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

fn run(variables: &[(&str, &str)], input: &str) -> (bool, Value) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_bifrost-cni"))
        .env_clear()
        .envs(variables.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that fails before it reads has reported why.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    (output.status.success(), serde_json::from_slice(&output.stdout).unwrap())
}

#[test]
fn version_is_answered_in_any_version() {
    for version in ["1.1.0", "9.0.0"] {
        let (is_fine, answer) = run(&[("CNI_COMMAND", "VERSION")], &json!({"cniVersion": version}).to_string());
        assert!(is_fine);
        assert_eq!(answer, json!({"cniVersion": version, "supportedVersions": ["0.4.0", "1.0.0", "1.1.0"]}));
    }
}

#[test]
fn errors_have_the_version_of_the_configuration() {
    let add = [("CNI_COMMAND", "ADD"), ("CNI_CONTAINERID", "c"), ("CNI_IFNAME", "eth0"), ("CNI_NETNS", "/run/netns/c")];
    let large = format!("{{\"x\": \"{}\"}}", "x".repeat(5 << 20));
    for (variables, input, version, code) in [
        (&add[..], "", "1.1.0", 6),
        (&add[..], "{}", "1.1.0", 1),
        (&add[..], r#"{"cniVersion": "0.4.0", "name": "n", "type": "t"}"#, "0.4.0", 7),
        (&add[..], large.as_str(), "1.1.0", 6),
        (&add[..3], r#"{"cniVersion": "1.0.0"}"#, "1.1.0", 4),
        (&[], "", "1.1.0", 4),
    ] {
        let (is_fine, answer) = run(variables, input);
        assert!(!is_fine);
        assert_eq!((&answer["cniVersion"], &answer["code"]), (&json!(version), &json!(code)), "{answer}");
        assert!(!answer["msg"].as_str().unwrap().is_empty());
    }
}
