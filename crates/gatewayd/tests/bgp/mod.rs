//! Pods that announce themselves: FRR as their proxy, FRR as a switch whose kernel forwards, and probes through whichever pod the switch chooses.
//! Where there is no FRR, this is skipped, and says so.
//!
//! ```text
//!  host 10.2.0.11 ---+            +--- pods 10.1.0.11, .12, which announce 10.0.0.1 and fd00::1 (behind bifrost-nicd)
//!                    +-- switch --+
//!  host 10.3.0.12 ---+            +--- proxy 10.1.0.2
//! ```
//!
//! On the link pods have fd01::11 and fd01::12, too.

use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use bifrost_wire::ethernet::{self, ethertype};
use bifrost_wire::{Mac, Vni, vxlan};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::podman::{ctl, output};
use crate::world::ip_udp;

const PATIENCE: Duration = Duration::from_secs(20);
const FRR: &str = "/usr/lib/frr";
const VIP: &str = "10.0.0.1";
const VIP6: &str = "fd00::1";
const PROBES_PER_SECOND: u32 = 1000;
/// Of BFD, ms, which gives a pod up after three of them. That is slow: where other tests run, a program may be away for a fifth of a second.
const BFD_MS: &str = "300";
/// Before the hold time, of 3 s, is over.
const DETECTION: Duration = Duration::from_millis(2500);
/// Of the receiver, which may be away, too.
const BUFFER: usize = 8 << 20;

/// A process that ends with this.
struct Process(Child);

impl Process {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Network namespaces, which go with this.
struct Site {
    directory: tempfile::TempDir,
    tag: String,
    processes: Vec<Process>,
}

const SPACES: [&str; 5] = ["sw", "proxy", "gw", "a", "b"];

impl Drop for Site {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for name in ["nicd", "one", "two", "proxy-bgpd", "sw-bgpd"] {
                let log = std::fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default();
                eprintln!("{name}: {log}");
            }
        }
        self.processes.clear();
        for space in SPACES {
            let _ = Command::new("ip").args(["netns", "del", &self.space(space)]).status();
        }
    }
}

impl Site {
    fn start() -> Site {
        let directory = tempfile::tempdir().unwrap();
        let site = Site { directory, tag: format!("bg{}", std::process::id()), processes: Vec::new() };
        for space in SPACES {
            site.run(&format!("ip netns add {}", site.space(space)));
            site.within(space, "ip link set lo up");
        }
        site.within("sw", "ip link add br0 type bridge mcast_snooping 0");
        site.within("sw", "ip link set br0 up");
        site.within("sw", "ip addr add 10.1.0.254/24 dev br0");
        site.within(
            "sw",
            "sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0 net.ipv4.fib_multipath_hash_policy=1",
        );
        let switch = site.space("sw");
        for (space, device, port) in [("proxy", "u0", "p0"), ("gw", "gw0", "p1"), ("a", "u0", "p2"), ("b", "u0", "p3")]
        {
            let link = format!("ip link add {device} mtu 1600 type veth peer name {port} mtu 1600 netns {switch}");
            site.within(space, &link);
            site.within(space, &format!("ip link set {device} up addrgenmode none"));
            // What leaves for the gateway has its checksums.
            site.within(space, &format!("ethtool -K {device} tx off"));
            site.within("sw", &format!("ethtool -K {port} tx off"));
            site.within("sw", &format!("ip link set {port} up"));
        }
        for (port, address) in [("p2", "10.2.0.254/24"), ("p3", "10.3.0.254/24")] {
            site.within("sw", &format!("ip addr add {address} dev {port}"));
        }
        for port in ["p0", "p1"] {
            site.within("sw", &format!("ip link set {port} master br0"));
        }
        site.within("proxy", "ip addr add 10.1.0.2/24 dev u0");
        for (space, address) in
            [("sw", "fd01::fe/64 dev br0"), ("proxy", "fd01::2/64 dev u0"), ("proxy", "fe80::2/64 dev u0")]
        {
            site.within(space, &format!("ip addr add {address} nodad"));
        }
        for (space, address) in [("a", "10.2.0"), ("b", "10.3.0")] {
            let last = if space == "a" { 11 } else { 12 };
            site.within(space, &format!("ip addr add {address}.{last}/24 dev u0"));
            site.within(space, &format!("ip route add default via {address}.254"));
        }
        site
    }

    fn space(&self, name: &str) -> String {
        format!("{}-{name}", self.tag)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn run(&self, command: &str) -> String {
        let mut words = command.split(' ');
        let result = output(Command::new(words.next().unwrap()).args(words));
        result.unwrap_or_else(|error| panic!("{command}: {error}"))
    }

    fn within(&self, space: &str, command: &str) -> String {
        self.run(&format!("ip netns exec {} {command}", self.space(space)))
    }

    fn spawn(&self, space: &str, name: &str, program: &str, arguments: &[&str]) -> Process {
        let log = std::fs::File::create(self.path(&format!("{name}.log"))).unwrap();
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.space(space), program]).args(arguments);
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).env("NO_COLOR", "1");
        Process(command.spawn().unwrap())
    }

    /// Starts FRR in a namespace with what `bifrostctl gw bgp config` says for it.
    fn start_frr(&mut self, space: &str, end: &str) {
        let directory = self.path(space);
        std::fs::create_dir(&directory).unwrap();
        std::fs::set_permissions(&directory, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        std::fs::set_permissions(self.directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
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
        let text = output(Command::new(ctl()).args([
            "gw",
            "bgp",
            "config",
            end,
            "--asn",
            "64512",
            "--proxy",
            "10.1.0.2",
            "--pods",
            "10.1.0.0/24",
            "--switch-asn",
            "65000",
            "--switch",
            "10.1.0.254",
            "--vips",
            "10.0.0.0/24,fd00::/64",
            "--bfd-ms",
            BFD_MS,
        ]));
        std::fs::write(at("frr.conf"), text.unwrap()).unwrap();
        self.run(&format!("vtysh --vty_socket {} -f {}", directory.display(), at("frr.conf")));
    }

    fn start_nicd(&mut self) {
        let text = format!(
            "pods_directory = {:?}\ncontrol = {{ socket = {:?} }}\n\
             device = {{ name = \"gw0\", mtu = 1600, mode = \"packet\", frames = 4096 }}\n",
            self.path("nicd-pods"),
            self.path("nicd.sock")
        );
        std::fs::write(self.path("nicd.toml"), text).unwrap();
        let config = self.path("nicd.toml").display().to_string();
        let nicd = self.spawn("gw", "nicd", env!("CARGO_BIN_EXE_bifrost-nicd"), &["--config", &config]);
        self.processes.push(nicd);
        until("the pipeline answers", || std::os::unix::net::UnixStream::connect(self.path("nicd.sock")).ok());
    }

    fn add(&self, name: &str, number: u8) {
        let settings = format!(
            "name = \"{name}\"\nnumber = {number}\ncores = 1\nmac = \"02:00:00:00:01:{number:02x}\"\ntimeout_us = 1000000\n\
             own = [\"10.1.0.{number}\", \"fd01::{number}\", \"{VIP}\", \"{VIP6}\"]\ninterfaces = [{{ socket = {:?} }}]\n",
            self.path(&format!("{name}.sock"))
        );
        let added = post(&self.path("nicd.sock"), &json!({ "command": "add_pod", "settings": settings }));
        assert_eq!(added, json!({}));
    }

    fn start_pod(&self, name: &str, number: u8) -> Process {
        let text = format!(
            "control = {{ socket = {:?} }}\n[gateway]\npod = {number}\ncores = 1\ninterfaces = [{:?}]\n\
             mac = \"02:00:00:00:01:{number:02x}\"\naddresses = [\"{VIP}\", \"{VIP6}\"]\n\
             link_addresses = [\"10.1.0.{number}\", \"fd01::{number}\"]\n\
             on_link = [\"10.1.0.0/24\"]\nrouter = \"10.1.0.254\"\nsessions = 1024\n\
             [bgp]\nasn = 64512\npeers = [\"10.1.0.2\"]\nbfd = {{ interval_ms = {BFD_MS}, multiplier = 3 }}\n\
             [[vpcs]]\nvni = 100\nroutes = [{{ prefix = \"192.168.0.0/24\", to = \"local\" }}]\nhosts = [\
             {{ address = \"192.168.0.1\", mac = \"02:00:00:00:02:01\", vtep = \"10.2.0.11\" }}, \
             {{ address = \"192.168.0.2\", mac = \"02:00:00:00:02:02\", vtep = \"10.3.0.12\" }}]\n",
            self.path(&format!("{name}-control.sock")),
            self.path(&format!("{name}.sock")),
        );
        let config = self.path(&format!("{name}.toml"));
        std::fs::write(&config, text).unwrap();
        let config = config.display().to_string();
        self.spawn("gw", name, env!("CARGO_BIN_EXE_bifrost-gw"), &["--config", &config])
    }

    /// Next hops of the pods' address in the switch's kernel.
    fn next_hops(&self, address: &str) -> Vec<String> {
        let family = if address == VIP { "-4" } else { "-6" };
        let routes = self.run(&format!("ip -n {} -j {family} route", self.space("sw")));
        let routes: Value = serde_json::from_str(&routes).unwrap();
        let Some(route) = routes.as_array().unwrap().iter().find(|route| route["dst"] == address) else {
            return vec![];
        };
        let several = route["nexthops"].as_array().cloned().unwrap_or_else(|| vec![route.clone()]);
        let mut all: Vec<_> = several.iter().map(|hop| hop["gateway"].as_str().unwrap().to_owned()).collect();
        all.sort();
        all
    }

    /// Waits until the switch has these next hops, by their last bytes, for both addresses; how long it took.
    fn until_next_hops(&self, last: &[u8]) -> Duration {
        let began = Instant::now();
        for (address, link) in [(VIP, "10.1.0."), (VIP6, "fd01::")] {
            let wanted: Vec<_> = last.iter().map(|last| format!("{link}{last}")).collect();
            until("the switch has the routes", || (self.next_hops(address) == wanted).then_some(()));
        }
        began.elapsed()
    }

    /// What a pod says of its sessions.
    fn sessions(&self, name: &str) -> Value {
        let config = self.path(&format!("{name}.toml"));
        let told = output(Command::new(env!("CARGO_BIN_EXE_bifrost-gw")).arg("--config").arg(config).arg("--json"));
        let told: Value = serde_json::from_str(&told.unwrap_or_default()).unwrap_or_default();
        told["bgp"].clone()
    }

    /// Starts a pod, and waits until the switch has it and BFD watches it; what else there is are `others`.
    fn start_watched(&self, name: &str, number: u8, others: &[u8]) -> Process {
        let pod = self.start_pod(name, number);
        let mut all = [others, &[number]].concat();
        all.sort_unstable();
        self.until_next_hops(&all);
        // At both ends: the proxy waits for seconds for a pod that ends before it has heard that the session is up there.
        let (peer, directory) = (format!("10.1.0.{number}"), self.path("proxy"));
        until("BFD is up", || {
            let show = ["--vty_socket", &directory.display().to_string(), "-c", "show bfd peers json"];
            let peers: Value = serde_json::from_str(&output(Command::new("vtysh").args(show)).unwrap()).unwrap();
            let is_up = peers.as_array().unwrap().iter().any(|known| known["peer"] == *peer && known["status"] == "up");
            (is_up && self.sessions(name)[0]["bfd"] == "up").then_some(())
        });
        pod
    }

    fn socket(&self, space: &str, address: &str) -> UdpSocket {
        let (space, address) = (format!("/run/netns/{}", self.space(space)), address.to_owned());
        let open = move || {
            let file = std::fs::File::open(space).unwrap();
            rustix::thread::move_into_link_name_space(
                std::os::fd::AsFd::as_fd(&file),
                Some(rustix::thread::LinkNameSpaceType::Network),
            )
            .unwrap();
            UdpSocket::bind(address).unwrap()
        };
        std::thread::spawn(open).join().unwrap()
    }
}

fn until<T>(what: &str, mut is: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = is() {
            return found;
        }
        assert!(Instant::now() < until, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn post(socket: &Path, command: &Value) -> Value {
    use std::io::{Read as _, Write as _};
    let mut stream = std::os::unix::net::UnixStream::connect(socket).unwrap();
    let (body, what) = (command.to_string(), "content-type: application/json\r\nconnection: close");
    write!(stream, "POST /v1/command HTTP/1.1\r\nhost: x\r\n{what}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
}

/// The VXLAN packet of a probe, in a flow of its own.
fn probe(number: u32) -> Vec<u8> {
    let inner = ip_udp([192, 168, 0, 1], [192, 168, 0, 2], (number as u16 | 1, 9), &number.to_be_bytes());
    let link = ethernet::Header::new(Mac([2, 0, 0, 0, 0, 0xfe]), Mac([2, 0, 0, 0, 2, 1]), ethertype::IPV4).emit();
    [&vxlan::emit(Vni::new(100).unwrap())[..], &link, &inner].concat()
}

/// Probes from one host through the gateway to the other one, until they are stopped.
struct Probes {
    stop: std::sync::Arc<AtomicBool>,
    sent: std::sync::Arc<AtomicU32>,
    sender: std::thread::JoinHandle<()>,
    receiver: std::thread::JoinHandle<Vec<bool>>,
}

impl Probes {
    fn start(site: &Site) -> Probes {
        let stop = std::sync::Arc::new(AtomicBool::new(false));
        let sent = std::sync::Arc::new(AtomicU32::new(0));
        let sockets: Vec<_> = (0..64).map(|_| site.socket("a", "10.2.0.11:0")).collect();
        let receiver = site.socket("b", "10.3.0.12:4789");
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
                // While there is no route there is nowhere to send to: it is a probe that is lost.
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

    /// How many were sent, and how many of them did not come.
    fn stop(self) -> (u32, usize) {
        self.stop.store(true, Ordering::Relaxed);
        self.sender.join().unwrap();
        let (sent, seen) = (self.sent.load(Ordering::Relaxed), self.receiver.join().unwrap());
        (sent, sent as usize - seen.iter().filter(|seen| **seen).count())
    }
}

#[test]
fn pods_announce_themselves_and_an_address_moves_without_loss() {
    if !Path::new(FRR).join("bgpd").exists() {
        return println!("SKIPPED: there is no FRR on this machine");
    }
    let mut site = Site::start();
    site.start_nicd();
    site.start_frr("sw", "switch");
    site.start_frr("proxy", "proxy");
    site.add("one", 11);
    let one = site.start_pod("one", 11);
    println!("in the switch's FIB {:?} after the pod's start", site.until_next_hops(&[11]));
    // The switch finds the IPv6 next hop by neighbour discovery.
    let socket = site.socket("sw", "[fd01::fe]:0");
    until("the pod answers neighbour discovery", || {
        socket.send_to(&[0], (VIP6, 4789)).unwrap();
        let known = site.run(&format!("ip -n {} -6 neigh show fd01::11", site.space("sw")));
        known.contains("lladdr 02:00:00:00:01:0b").then_some(())
    });

    // Make before break: the new pod announces, then the old one withdraws, and goes.
    let probes = Probes::start(&site);
    std::thread::sleep(Duration::from_millis(500));
    site.add("two", 12);
    let two = site.start_pod("two", 12);
    site.until_next_hops(&[11, 12]);
    std::thread::sleep(Duration::from_millis(500));
    post(&site.path("one-control.sock"), &json!({ "command": "drain", "drain": true }));
    site.until_next_hops(&[12]);
    std::thread::sleep(Duration::from_millis(200));
    one.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(500));
    drop(one);
    let (sent, lost) = probes.stop();
    println!("{sent} probes, {lost} lost");
    assert!(sent > 1000 && lost == 0, "{lost} of {sent} probes are lost");
    let sessions = site.sessions("two");
    let expected = json!({ "address": "10.1.0.2", "state": "established", "bfd": "up", "announced": ["10.0.0.1/32", "fd00::1/128"] });
    assert_eq!(sessions.as_array().unwrap().len(), 1, "{sessions}");
    for (field, value) in expected.as_object().unwrap() {
        assert_eq!(&sessions[0][field], value, "{field}");
    }

    // A pod that ends says so; one that hangs, or is killed, is missed by BFD.
    let one = site.start_watched("one", 11, &[12]);
    two.signal(Signal::TERM);
    site.until_next_hops(&[11]);
    drop(two);
    let two = site.start_watched("two", 12, &[11]);
    // `ip netns exec` becomes the program: the signal is for the pod.
    two.signal(Signal::STOP);
    let hung = site.until_next_hops(&[11]);
    drop(two);
    let two = site.start_watched("two", 12, &[11]);
    one.signal(Signal::KILL);
    let killed = site.until_next_hops(&[12]);
    println!("the switch's route is gone {hung:?} after a pod hangs, {killed:?} after it is killed");
    assert!(hung < DETECTION && killed < DETECTION, "{hung:?} {killed:?}");
    drop((one, two));
}
