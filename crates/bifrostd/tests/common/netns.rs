//! Network namespaces: created by `ip netns`, entered by threads and programs.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::process::{Command, Output, Stdio};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Prefix of all names; the process ID follows.
const PREFIX: &str = "be";
/// Prefix of all directories; the process ID follows.
const DIRECTORY: &str = "bifrost-e2e-";

static NUMBER: AtomicU32 = AtomicU32::new(0);
static TIDY: Once = Once::new();

/// A tag for the names of one test, unique on this machine.
pub fn tag() -> String {
    assert!(
        rustix::process::geteuid().is_root(),
        "these tests create network namespaces and devices: run them as root"
    );
    TIDY.call_once(remove_leftovers);
    format!("{}x{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// The directory of a tag.
pub fn directory(tag: &str) -> std::path::PathBuf {
    std::env::temp_dir().join(format!("{DIRECTORY}{tag}"))
}

/// A network namespace; deleted on drop.
#[derive(Debug)]
pub struct Net {
    name: String,
}

impl Net {
    pub fn new(tag: &str, role: &str) -> Net {
        let name = format!("{PREFIX}{tag}-{role}");
        run("ip", &["netns", "add", &name], "");
        let net = Net { name };
        net.ip("link set lo up\n");
        net
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs lines of `ip` commands.
    pub fn ip(&self, lines: &str) {
        run("ip", &["-n", &self.name, "-batch", "-"], lines);
    }

    /// A command in the namespace. The process ID is the program's own, and it is killed with the calling thread.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "nsenter", &format!("--net=/run/netns/{}", self.name), program]);
        command
    }

    /// Runs a program to its end.
    pub fn run(&self, program: &str, arguments: &[&str], input: &str) -> Output {
        feed(self.command(program).args(arguments), input)
    }

    /// Runs `work` on a thread in the namespace; its sockets stay there.
    pub fn enter<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        match self.spawn(work).join() {
            Ok(value) => value,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    pub fn spawn<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        let file = File::open(format!("/run/netns/{}", self.name)).unwrap();
        std::thread::spawn(move || {
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            work()
        })
    }

    /// A TCP counter of this namespace's kernel, as in `/proc/net/snmp` and `/proc/net/netstat`.
    pub fn tcp_counter(&self, name: &'static str) -> u64 {
        let text = self.enter(|| {
            ["snmp", "netstat"].map(|file| std::fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap())
        });
        let lines: Vec<_> = text.iter().flat_map(|text| text.lines()).filter(|l| l.starts_with("Tcp")).collect();
        let value = lines.chunks(2).find_map(|lines| {
            let at = lines[0].split(' ').position(|n| n == name)?;
            lines[1].split(' ').nth(at)?.parse().ok()
        });
        value.unwrap_or_else(|| panic!("the kernel has no {name}"))
    }

    /// Segments that this namespace's TCP has retransmitted.
    pub fn retransmits(&self) -> u64 {
        self.tcp_counter("RetransSegs")
    }

    /// Retransmitted segments that the receiver did not report as duplicates (DSACK, RFC 2883): the original was lost,
    /// not late.
    pub fn needed_retransmits(&self) -> u64 {
        self.retransmits().saturating_sub(self.tcp_counter("TCPDSACKRecvSegs"))
    }

    /// Whether a device exists.
    pub fn has_device(&self, device: &'static str) -> bool {
        self.enter(move || {
            let text = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
            text.lines().any(|l| l.trim_start().starts_with(&format!("{device}:")))
        })
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.name]).stderr(Stdio::null()).status();
    }
}

/// Runs a program that must succeed.
pub fn run(program: &str, arguments: &[&str], input: &str) -> String {
    let output = feed(Command::new(program).args(arguments), input);
    assert!(output.status.success(), "{program} {arguments:?} {input}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn feed(command: &mut Command, input: &str) -> Output {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap_or_else(|e| {
            panic!("cannot run {command:?}: {e}");
        });
    // A program that does not read its input is no reason to fail.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

/// Removes leftovers of runs whose process has ended. Their daemons ended with them.
fn remove_leftovers() {
    let dead = |name: &str, prefix: &str| {
        let pid = name.strip_prefix(prefix).and_then(|rest| rest.split('x').next()).and_then(|p| p.parse::<u32>().ok());
        pid.is_some_and(|pid| !std::path::Path::new(&format!("/proc/{pid}")).exists())
    };
    let names = |directory: &std::path::Path| -> Vec<String> {
        let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
        entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect()
    };
    for name in names("/run/netns".as_ref()).iter().filter(|n| dead(n, PREFIX)) {
        let _ = Command::new("ip").args(["netns", "del", name]).status();
    }
    let temporary = std::env::temp_dir();
    for name in names(&temporary).iter().filter(|n| dead(n, DIRECTORY)) {
        let _ = std::fs::remove_dir_all(temporary.join(name));
    }
}
