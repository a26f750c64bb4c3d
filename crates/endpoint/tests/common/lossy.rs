//! Two network namespaces and a link between them that drops packets; needs root. Used by tests of several crates.

#![allow(clippy::unwrap_used, dead_code)]

use std::path::Path;
use std::process::{Command, Stdio};

/// The namespaces, removed at the end. Their names contain the process id, so that concurrent runs do not conflict.
/// What a crash leaves behind is removed by the next run with the same id, or by a reboot. The ends are `fd00:9::1` and
/// `10.9.0.1`, and the same with 2.
pub(crate) struct Lossy([String; 2]);

impl Lossy {
    /// In each direction one of `one_in` UDP packets is lost; 0: none.
    pub(crate) fn new(test: &str, mtu: u32, one_in: u32) -> Self {
        let names = ["a", "b"].map(|end| format!("{test}-{}-{end}", std::process::id()));
        for name in &names {
            let _ = Command::new("ip").args(["netns", "del", name]).stderr(Stdio::null()).status();
            run(Command::new("ip").args(["netns", "add", name]));
        }
        let lossy = Self(names);
        let [a, b] = &lossy.0;
        run(Command::new("ip")
            .args(["link", "add", "e0", "netns", a, "type", "veth", "peer", "name", "e0", "netns", b]));
        for (n, name) in lossy.0.iter().enumerate() {
            let ip = |arguments: &[&str]| run(Command::new("ip").args(["-n", name]).args(arguments));
            ip(&["addr", "add", &format!("fd00:9::{}/64", n + 1), "dev", "e0", "nodad"]);
            ip(&["addr", "add", &format!("10.9.0.{}/24", n + 1), "dev", "e0"]);
            ip(&["link", "set", "e0", "mtu", &mtu.to_string(), "up"]);
            // Without offloads, so that each packet is dropped individually.
            let off = ["-K", "e0", "gso", "off", "tso", "off", "gro", "off", "tx-udp-segmentation", "off"];
            run(lossy.command(n, "ethtool").args(off));
            if one_in > 0 {
                run(lossy.command(n, "nft").arg("table inet t { chain c { type filter hook input priority 0; }; }"));
                let rule = format!("add rule inet t c meta l4proto udp numgen random mod {one_in} 0 counter drop");
                run(lossy.command(n, "nft").arg(rule));
            }
        }
        lossy
    }

    /// A command that runs `program` at end 0 or 1.
    pub(crate) fn command(&self, end: usize, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0[end]]).arg(program.as_ref());
        command
    }

    /// Packets dropped at an end.
    pub(crate) fn dropped(&self, end: usize) -> u64 {
        let text = run(self.command(end, "nft").args(["list", "table", "inet", "t"]));
        let (_, after) = text.split_once("counter packets ").unwrap();
        after.split(' ').next().unwrap().parse().unwrap()
    }
}

impl Drop for Lossy {
    fn drop(&mut self) {
        for name in &self.0 {
            let _ = Command::new("ip").args(["netns", "del", name]).status();
        }
    }
}

/// Runs a command, which must succeed. Returns its standard output.
pub(crate) fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}
