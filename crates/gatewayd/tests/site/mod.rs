//! Network namespaces with programs: switches and proxies of FRR, pipelines and pods, and probes between hosts.

use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use bifrost_wire::ethernet::{self, ethertype};
use bifrost_wire::{Mac, Vni, vxlan};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::podman::{ctl, output};
use crate::world::ip_udp;

const PATIENCE: Duration = Duration::from_secs(20);
const FRR: &str = "/usr/lib/frr";
/// The address that pods announce.
pub(crate) const VIP: &str = "10.0.0.1";
pub(crate) const PROBES_PER_SECOND: u32 = 1000;
/// Number of flows of probes. Probe n belongs to flow n modulo this.
pub(crate) const FLOWS: usize = 64;
/// Interval of BFD, ms. A session goes down after three intervals. This is slow, because a program may not run for 200
/// ms while other tests run.
pub(crate) const BFD_MS: &str = "300";
/// Maximum detection time: below the hold time of 3 s.
pub(crate) const DETECTION: Duration = Duration::from_millis(2500);
/// Size of the receiver's socket buffer, bytes: the receiver may also not run for a while.
const BUFFER: usize = 8 << 20;

/// Whether this machine has FRR.
pub(crate) fn has_frr() -> bool {
    Path::new(FRR).join("bgpd").exists()
}

/// A process. It is killed when this is dropped.
pub(crate) struct Process(Child);

impl Process {
    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Network namespaces. They are removed when this is dropped.
pub(crate) struct Site {
    directory: tempfile::TempDir,
    tag: String,
    spaces: Vec<&'static str>,
    pub(crate) processes: Vec<Process>,
}

impl Drop for Site {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let files = std::fs::read_dir(self.directory.path()).unwrap().flatten().map(|entry| entry.path());
            for log in files.filter(|path| path.extension().is_some_and(|extension| extension == "log")) {
                eprintln!("{}: {}", log.display(), std::fs::read_to_string(&log).unwrap_or_default());
            }
        }
        self.processes.clear();
        for space in &self.spaces {
            let _ = Command::new("ip").args(["netns", "del", &self.space(space)]).status();
        }
    }
}

impl Site {
    /// Creates empty namespaces, with `tag` in their names.
    pub(crate) fn empty(tag: &str, spaces: &[&'static str]) -> Site {
        let directory = tempfile::tempdir().unwrap();
        std::fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let tag = format!("{tag}{}", std::process::id());
        let site = Site { directory, tag, spaces: spaces.to_vec(), processes: Vec::new() };
        for space in spaces {
            site.run(&format!("ip netns add {}", site.space(space)));
            site.within(space, "ip link set lo up");
        }
        site
    }

    /// A veth pair between two namespaces, without checksum offload.
    pub(crate) fn link(&self, (space, device): (&str, &str), (peer, port): (&str, &str)) {
        let of_peer = self.space(peer);
        self.within(
            space,
            &format!("ip link add {device} mtu 1600 type veth peer name {port} mtu 1600 netns {of_peer}"),
        );
        for (space, device) in [(space, device), (peer, port)] {
            self.within(space, &format!("ip link set {device} up addrgenmode none"));
            self.within(space, &format!("ethtool -K {device} tx off"));
        }
    }

    pub(crate) fn space(&self, name: &str) -> String {
        format!("{}-{name}", self.tag)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn run(&self, command: &str) -> String {
        let mut words = command.split(' ');
        let result = output(Command::new(words.next().unwrap()).args(words));
        result.unwrap_or_else(|error| panic!("{command}: {error}"))
    }

    pub(crate) fn within(&self, space: &str, command: &str) -> String {
        self.run(&format!("ip netns exec {} {command}", self.space(space)))
    }

    pub(crate) fn spawn(&self, space: &str, name: &str, program: &str, arguments: &[&str]) -> Process {
        let log = std::fs::File::create(self.path(&format!("{name}.log"))).unwrap();
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.space(space), program]).args(arguments);
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).env("NO_COLOR", "1");
        Process(command.spawn().unwrap())
    }

    /// Starts FRR in a namespace with a configuration.
    pub(crate) fn start_frr(&mut self, space: &str, configuration: &str) {
        let directory = self.path(space);
        std::fs::create_dir(&directory).unwrap();
        std::fs::set_permissions(&directory, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        let at = |name: &str| directory.join(name).display().to_string();
        std::fs::write(at("empty"), "").unwrap();
        for daemon in ["zebra", "bfdd", "bgpd"] {
            let pid = at(&format!("{daemon}.pid"));
            let (empty, zebra, vty, bfd) = (at("empty"), at("zserv.api"), at(""), at("bfdd.sock"));
            let mut arguments = vec!["-f", &empty, "-z", &zebra, "-i", &pid, "--vty_socket", &vty, "-P", "0"];
            if daemon == "bfdd" {
                arguments.extend(["--bfdctl", &bfd]);
            }
            let process = self.spawn(space, &format!("{space}-{daemon}"), &format!("{FRR}/{daemon}"), &arguments);
            self.processes.push(process);
            let socket = directory.join(format!("{daemon}.vty"));
            until("FRR starts", || socket.exists().then_some(()));
        }
        std::fs::write(at("frr.conf"), configuration).unwrap();
        self.run(&format!("vtysh --vty_socket {} -f {}", directory.display(), at("frr.conf")));
    }

    /// The output of FRR in a namespace for `show WHAT json`.
    pub(crate) fn show(&self, space: &str, what: &str) -> Value {
        let directory = self.path(space).display().to_string();
        let show = ["--vty_socket", &directory, "-c", &format!("show {what} json")];
        serde_json::from_str(&output(Command::new("vtysh").args(show)).unwrap()).unwrap()
    }

    /// Next hops of an address in a switch's kernel, sorted.
    pub(crate) fn next_hops(&self, space: &str, address: &str) -> Vec<String> {
        let family = if address.contains(':') { "-6" } else { "-4" };
        let routes = self.run(&format!("ip -n {} -j {family} route", self.space(space)));
        let routes: Value = serde_json::from_str(&routes).unwrap();
        let Some(route) = routes.as_array().unwrap().iter().find(|route| route["dst"] == address) else {
            return vec![];
        };
        let several = route["nexthops"].as_array().cloned().unwrap_or_else(|| vec![route.clone()]);
        let mut all: Vec<_> = several.iter().map(|hop| hop["gateway"].as_str().unwrap().to_owned()).collect();
        all.sort();
        all
    }

    /// Starts `bifrost-nicd` with a configuration, and waits until it answers on NAME.sock.
    pub(crate) fn start_nicd(&self, space: &str, name: &str, text: &str) -> Process {
        let config = self.path(&format!("{name}.toml"));
        std::fs::write(&config, text).unwrap();
        let config = config.display().to_string();
        let nicd = self.spawn(space, name, env!("CARGO_BIN_EXE_bifrost-nicd"), &["--config", &config]);
        let socket = self.path(&format!("{name}.sock"));
        until("the pipeline answers", || std::os::unix::net::UnixStream::connect(&socket).ok());
        nicd
    }

    /// Starts `bifrost-gw` with a configuration.
    pub(crate) fn start_gw(&self, space: &str, name: &str, text: &str) -> Process {
        let config = self.path(&format!("{name}.toml"));
        std::fs::write(&config, text).unwrap();
        let config = config.display().to_string();
        self.spawn(space, name, env!("CARGO_BIN_EXE_bifrost-gw"), &["--config", &config])
    }

    /// A pod's state; null if it does not answer.
    pub(crate) fn pod(&self, name: &str) -> Value {
        let config = self.path(&format!("{name}.toml"));
        let told = output(Command::new(env!("CARGO_BIN_EXE_bifrost-gw")).arg("--config").arg(config).arg("--json"));
        serde_json::from_str(&told.unwrap_or_default()).unwrap_or_default()
    }

    /// Runs `open` in a namespace.
    pub(crate) fn open<T: Send + 'static>(&self, space: &str, open: impl FnOnce() -> T + Send + 'static) -> T {
        let space = format!("/run/netns/{}", self.space(space));
        let open = move || {
            let file = std::fs::File::open(space).unwrap();
            rustix::thread::move_into_link_name_space(
                std::os::fd::AsFd::as_fd(&file),
                Some(rustix::thread::LinkNameSpaceType::Network),
            )
            .unwrap();
            open()
        };
        std::thread::spawn(open).join().unwrap()
    }
}

/// The output of `bifrostctl gw bgp config` for an end of the session between proxy and switch. `more` are further
/// options.
pub(crate) fn configuration(end: &str, more: &[&str]) -> String {
    let common = ["gw", "bgp", "config", end, "--asn", "64512", "--switch-asn", "65000"];
    output(Command::new(ctl()).args(common).args(more)).unwrap()
}

pub(crate) fn until<T>(what: &str, mut is: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = is() {
            return found;
        }
        assert!(Instant::now() < until, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The answer to a command from the program behind a control socket.
pub(crate) fn post(socket: &Path, command: &Value) -> Value {
    let body = command.to_string();
    let what = format!("content-type: application/json\r\ncontent-length: {}", body.len());
    request(socket, &format!("POST /v1/command HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{what}\r\n\r\n{body}"))
}

/// The state of the program behind a control socket.
pub(crate) fn state(socket: &Path) -> Value {
    request(socket, "GET /v1/status HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
}

fn request(socket: &Path, request: &str) -> Value {
    use std::io::{Read as _, Write as _};
    let mut stream = std::os::unix::net::UnixStream::connect(socket).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
}

/// The VXLAN packet of a probe. Its inner flow depends on its number.
fn probe(number: u32) -> Vec<u8> {
    let inner = ip_udp([192, 168, 0, 1], [192, 168, 0, 2], (number as u16 | 1, 9), &number.to_be_bytes());
    let link = ethernet::Header::new(Mac([2, 0, 0, 0, 0, 0xfe]), Mac([2, 0, 0, 0, 2, 1]), ethertype::IPV4).emit();
    [&vxlan::emit(Vni::new(100).unwrap())[..], &link, &inner].concat()
}

/// Probes from one host through the gateway to another one, until they are stopped.
pub(crate) struct Probes {
    stop: std::sync::Arc<AtomicBool>,
    sent: std::sync::Arc<AtomicU32>,
    sender: std::thread::JoinHandle<()>,
    receiver: std::thread::JoinHandle<Vec<bool>>,
}

impl Probes {
    pub(crate) fn start(site: &Site) -> Probes {
        let stop = std::sync::Arc::new(AtomicBool::new(false));
        let sent = std::sync::Arc::new(AtomicU32::new(0));
        let sockets: Vec<_> = (0..FLOWS).map(|_| site.open("a", || UdpSocket::bind("10.2.0.11:0").unwrap())).collect();
        let receiver = site.open("b", || UdpSocket::bind("10.3.0.12:4789").unwrap());
        rustix::net::sockopt::set_socket_recv_buffer_size_force(&receiver, BUFFER).unwrap();
        receiver.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        let (stopping, count) = (stop.clone(), sent.clone());
        let sender = std::thread::spawn(move || {
            let began = Instant::now();
            for number in 0.. {
                if stopping.load(Ordering::Relaxed) {
                    return;
                }
                // Many source ports: the switch spreads flows over its next hops.
                let socket = &sockets[number as usize % sockets.len()];
                // Without a route, sending fails and the probe is lost.
                let _ = socket.send_to(&probe(number), (VIP, 4789));
                count.store(number + 1, Ordering::Relaxed);
                let due = began + Duration::from_secs(1) * (number + 1) / PROBES_PER_SECOND;
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
            }
        });
        let receiver = std::thread::spawn(move || {
            let (mut seen, mut buffer) = (Vec::new(), [0; 2048]);
            while let Ok(len) = receiver.recv(&mut buffer) {
                let number = u32::from_be_bytes(*buffer[..len].last_chunk().unwrap()) as usize;
                if seen.len() <= number {
                    seen.resize(number + 1, false);
                }
                assert!(!std::mem::replace(&mut seen[number], true), "twice");
            }
            seen
        });
        Probes { stop, sent, sender, receiver }
    }

    /// Number of probes sent so far.
    pub(crate) fn sent(&self) -> u32 {
        self.sent.load(Ordering::Relaxed)
    }

    /// The number of probes sent, and the numbers of those that did not arrive.
    pub(crate) fn stop(self) -> (u32, Vec<u32>) {
        self.stop.store(true, Ordering::Relaxed);
        self.sender.join().unwrap();
        let (sent, seen) = (self.sent.load(Ordering::Relaxed), self.receiver.join().unwrap());
        let came = |number: &u32| seen.get(*number as usize).copied().unwrap_or(false);
        (sent, (0..sent).filter(|number| !came(number)).collect())
    }
}
