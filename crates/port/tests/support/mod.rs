//! Shared by the tests.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// A network namespace that is removed when dropped.
pub(crate) struct Namespace(pub(crate) String);

impl Namespace {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        assert!(rustix::process::geteuid().is_root(), "these tests create network namespaces: run them as root");
        let name = format!("bft{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        ip(&["netns", "add", &name]);
        ip(&["-n", &name, "link", "set", "lo", "up"]);
        Self(name)
    }

    /// Removes it, and creates another one with its name.
    #[allow(dead_code, reason = "not every test needs it")]
    pub(crate) fn again(&self) {
        ip(&["netns", "del", &self.0]);
        ip(&["netns", "add", &self.0]);
    }

    /// Moves the calling thread into the namespace permanently.
    pub(crate) fn enter(&self) {
        let file = std::fs::File::open(format!("/run/netns/{}", self.0)).expect("namespace file");
        move_into_link_name_space(std::os::fd::AsFd::as_fd(&file), Some(LinkNameSpaceType::Network)).expect("setns");
    }

    pub(crate) fn ip(&self, arguments: &str) -> String {
        let all: Vec<&str> = ["-n", &self.0].into_iter().chain(arguments.split(' ')).collect();
        ip(&all)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

fn ip(arguments: &[&str]) -> String {
    let output = Command::new("ip").args(arguments).output().expect("the ip command (iproute2)");
    assert!(output.status.success(), "ip {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}
