//! A network namespace with a veth pair: `gw0` is the gateway's device, and the test plays everything at the other end,
//! `wire0`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bifrost_control::Client;
use bifrost_control::api::CaptureSpec;
use bifrost_port::raw::{RawConfig, RawDevice, RawMode};
use bifrost_wire::ethernet::{self, ethertype};
use bifrost_wire::protocol::UDP;
use bifrost_wire::{Mac, Vni, arp, ipv4, udp, vxlan};

const PATIENCE: Duration = Duration::from_secs(20);
const GATEWAY: [u8; 4] = [10, 0, 0, 1];
const GATEWAY_MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);
const SENDER: [u8; 4] = [10, 0, 0, 11];
const RECEIVER: [u8; 4] = [10, 0, 0, 12];
const RECEIVER_MAC: Mac = Mac([2, 0, 0, 0, 0, 12]);
/// Maximum number of packets in flight before a batch is sent. With the batch, they are at most 256, for which a veth
/// device has room. If the kernel's thread that empties the device does not run for a while, the device drops further
/// packets, and counts them nowhere that the gateway knows of.
const WINDOW: usize = 224;
/// Length of a packet's headers, bytes: Ethernet, IPv4 and UDP twice, and VXLAN.
const HEADERS: usize = 92;
/// Packets in a batch, and the delay between two batches.
const BATCH: u32 = 32;
const PAUSE: Duration = Duration::from_micros(2500);
const VNIS: std::ops::RangeInclusive<u32> = 100..=103;

/// Runs `test` in a thread with a separate network namespace, which ends with the thread and its children.
pub(crate) fn in_namespace(test: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(|| {
        // SAFETY: no pointers are involved. Only this thread changes its network namespace.
        assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0, "needs root");
        for command in [
            "ip link add wire0 mtu 9100 type veth peer name gw0 mtu 9100",
            "ip link set wire0 up addrgenmode none",
            "ip link set gw0 up addrgenmode none",
        ] {
            let mut words = command.split(' ');
            let program = words.next().unwrap();
            assert!(Command::new(program).args(words).status().unwrap().success(), "{command}");
        }
        test();
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

#[derive(Debug, Default)]
pub(crate) struct Options {
    pub(crate) header_only: bool,
    /// Length of the frames that the test sends, including headers, bytes; 0: 292, of which 200 are payload.
    pub(crate) frame_len: usize,
    pub(crate) jitter_us: u64,
    /// Timeout of a place in an order queue, us; 0: 100,000.
    pub(crate) timeout_us: u64,
    /// A worker that stalls, the number of packets before that, and the length of the stall, ms.
    pub(crate) stall: Option<(usize, u64, u64)>,
    /// Rates of both stages of the limiter, packets per second.
    pub(crate) limiter: Option<(u64, u64)>,
}

pub(crate) struct World {
    dir: tempfile::TempDir,
    wire: RawDevice,
    nicd: Child,
    pod: Child,
    received: BTreeMap<u32, u64>,
    window: usize,
    /// Length of each packet's payload, bytes.
    payload: usize,
}

/// The process of a second pod. It is killed when this is dropped.
pub(crate) struct Another(Child);

impl Another {
    /// Stops its execution.
    pub(crate) fn hang(&self) {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.0), rustix::process::Signal::STOP)
            .unwrap();
    }
}

impl Drop for Another {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for child in [&mut self.pod, &mut self.nicd] {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            for name in ["nicd.log", "gw.log"] {
                eprintln!("{name}: {}", std::fs::read_to_string(self.dir.path().join(name)).unwrap_or_default());
            }
        }
    }
}

impl World {
    pub(crate) fn start(options: &Options) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        let header_only = if options.header_only { "header_only_from = 100\n" } else { "" };
        let payload = options.frame_len.max(HEADERS + 200) - HEADERS;
        let mtu = (payload + HEADERS).max(1600);
        let timeout_us = if options.timeout_us > 0 { options.timeout_us } else { 100_000 };
        let (first, second) = options.limiter.unwrap_or((1_000_000, 1_000_000));
        let nicd = format!(
            r#"pods_directory = "{}"
control = {{ socket = "{}" }}
device = {{ name = "gw0", mtu = {mtu}, frames = 4096 }}
[[pods]]
name = "vpc"
number = 1
cores = 2
order_queues = 2
queue_entries = 8192
timeout_us = {timeout_us}
{header_only}own = ["10.0.0.1"]
interfaces = [{{ socket = "{}" }}]
limiter = {{ first_packets_per_second = {first}, second_packets_per_second = {second}, burst_packets = {} }}
"#,
            at("pods"),
            at("nicd.sock"),
            at("vpc.sock"),
            first.min(1000),
        );
        let stall = options.stall.map_or(String::new(), |(worker, after, ms)| {
            format!("stall = {{ worker = {worker}, after_packets = {after}, ms = {ms} }}\n")
        });
        let mut pod = format!(
            r#"control = {{ socket = "{}" }}
[tests]
jitter_us = {}
{stall}[gateway]
pod = 1
cores = 2
interfaces = ["{}"]
addresses = ["10.0.0.1"]
mac = "02:00:00:00:00:01"
mtu = {mtu}
on_link = ["10.0.0.0/24"]
"#,
            at("gw.sock"),
            options.jitter_us,
            at("vpc.sock"),
        );
        for vni in VNIS {
            let _ = write!(
                pod,
                r#"[[vpcs]]
vni = {vni}
routes = [{{ prefix = "192.168.0.0/24", to = "local" }}]
hosts = [
  {{ address = "192.168.0.1", mac = "02:00:00:00:01:01", vtep = "10.0.0.11" }},
  {{ address = "192.168.0.2", mac = "02:00:00:00:01:02", vtep = "10.0.0.12" }},
]
"#
            );
        }
        std::fs::write(dir.path().join("nicd.toml"), nicd).unwrap();
        std::fs::write(dir.path().join("gw.toml"), pod).unwrap();
        let wire = wire(mtu + 100);
        let nicd = run(env!("CARGO_BIN_EXE_bifrost-nicd"), dir.path(), "nicd");
        let pod = run(env!("CARGO_BIN_EXE_bifrost-gw"), dir.path(), "gw");
        // On a busy machine, the window slows the exchange down. It must not do that when a worker stalls.
        let window = if options.stall.is_some() { usize::MAX } else { WINDOW };
        let mut world = World { dir, wire, nicd, pod, received: BTreeMap::new(), window, payload };
        world.wait_until_it_forwards();
        world
    }

    pub(crate) fn kill_pod(&mut self) {
        self.pod.kill().unwrap();
        self.pod.wait().unwrap();
        self.until("the pipeline sees that the pod is gone", |world| {
            world.status("nicd")["pods"][0]["interfaces_up"][0] == false
        });
    }

    pub(crate) fn start_pod(&mut self) {
        self.pod = run(env!("CARGO_BIN_EXE_bifrost-gw"), self.dir.path(), "gw");
        self.wait_until_it_forwards();
    }

    /// Kills the pipeline while packets arrive, and restarts it after `away`. Returns how long it took from the restart
    /// until packets passed, and how many arrived from then on until `after` more had been sent. These must be in
    /// order.
    pub(crate) fn replace_pipeline(&mut self, away: Duration, after: u32) -> (Duration, u32) {
        const EACH: Duration = Duration::from_micros(500);
        let (mut number, mut next) = (0, Instant::now());
        let mut step = |world: &mut World| {
            let frame = packet(100, 7, number, world.payload);
            world.wire.send(&[&frame]);
            world.wire.flush();
            number += 1;
            next += EACH;
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            world.drain()
        };
        (0..200).for_each(|_| drop(step(self)));
        self.nicd.kill().unwrap();
        self.nicd.wait().unwrap();
        // Packets that it had sent are still in flight.
        let gone = Instant::now();
        while gone.elapsed() < away {
            step(self);
        }
        let started = Instant::now();
        self.nicd = run(env!("CARGO_BIN_EXE_bifrost-nicd"), self.dir.path(), "nicd");
        let mut came = Vec::new();
        while came.is_empty() {
            assert!(started.elapsed() < PATIENCE, "nothing passes any more");
            came = step(self);
        }
        let took = started.elapsed();
        (0..after).for_each(|_| came.extend(step(self)));
        let last = Instant::now();
        while last.elapsed() < Duration::from_millis(500) {
            came.extend(self.drain());
        }
        assert!(came.is_sorted_by(|a, b| a.1 < b.1), "each once, and in order");
        (took, came.len() as u32)
    }

    /// The PID of the pod.
    pub(crate) fn pod_pid(&mut self) -> u32 {
        assert!(self.pod.try_wait().unwrap().is_none(), "the pod has ended");
        self.pod.id()
    }

    /// The pipeline's settings for a second pod, `name`, whose frames have VLAN 9.
    pub(crate) fn settings_of(&self, name: &str, number: u16) -> String {
        let socket = self.dir.path().join(format!("{name}.sock"));
        format!(
            "name = \"{name}\"\nnumber = {number}\ncores = 1\nmac = \"02:00:00:00:00:0{number}\"\nown = [\"10.9.0.{number}\"]\n\
             interfaces = [{{ vlan = 9, socket = {socket:?} }}]\n"
        )
    }

    /// Starts a second pod, for a pipeline that has [added](Self::settings_of) it.
    pub(crate) fn start_another(&self, name: &str, number: u16) -> Another {
        let at = |name: &str| self.dir.path().join(name);
        let text = format!(
            "control = {{ socket = {:?} }}\n[gateway]\npod = {number}\ncores = 1\ninterfaces = [{:?}]\n\
             addresses = [\"10.9.0.{number}\"]\nmac = \"02:00:00:00:00:0{number}\"\non_link = [\"10.9.0.0/24\"]\n",
            at(&format!("{name}-control.sock")),
            at(&format!("{name}.sock")),
        );
        std::fs::write(at(&format!("{name}.toml")), text).unwrap();
        Another(run(env!("CARGO_BIN_EXE_bifrost-gw"), self.dir.path(), name))
    }

    /// Sends a packet to a second pod, with the next batch.
    pub(crate) fn send_to_another(&mut self, number: u16) {
        let mut frame = packet(100, 0, 0, self.payload);
        frame[..6].copy_from_slice(&[2, 0, 0, 0, 0, number as u8]);
        frame.splice(12..12, [0x81, 0, 0, 9]);
        self.wire.send(&[&frame]);
    }

    /// The pipeline's counter for a second pod.
    pub(crate) fn counter_of(&self, name: &str, counter: &str) -> u64 {
        let status = self.status("nicd");
        let pod = status["pods"].as_array().unwrap().iter().find(|pod| pod["name"] == name).unwrap();
        pod["counters"][counter].as_u64().unwrap()
    }

    /// Whether each interface of a pod is connected; `None` if the pipeline has no such pod.
    pub(crate) fn up(&self, pod: &str) -> Option<Vec<bool>> {
        let status = self.status("nicd");
        let found = status["pods"].as_array().unwrap().iter().find(|found| found["name"] == pod)?;
        Some(found["interfaces_up"].as_array().unwrap().iter().map(|up| up == true).collect())
    }

    pub(crate) fn until_up(&mut self, pod: &str, up: Option<&[bool]>) {
        self.until("the pod comes or goes", |world| world.up(pod).as_deref() == up);
    }

    /// Sends a command to the pipeline. Returns the HTTP status and the text of the answer.
    pub(crate) fn command(&self, command: &serde_json::Value) -> (u16, String) {
        let mut stream = UnixStream::connect(self.dir.path().join("nicd.sock")).unwrap();
        let body = command.to_string();
        write!(
            stream,
            "POST /v1/command HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
        (status, answer.split_once("\r\n\r\n").unwrap().1.to_owned())
    }

    /// Kills the pipeline, and starts it again.
    pub(crate) fn restart_pipeline(&mut self) {
        self.nicd.kill().unwrap();
        self.nicd.wait().unwrap();
        self.nicd = run(env!("CARGO_BIN_EXE_bifrost-nicd"), self.dir.path(), "nicd");
        self.until("the pipeline answers", |world| UnixStream::connect(world.dir.path().join("nicd.sock")).is_ok());
    }

    /// The path of a file or socket with this name.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Whether a file or socket with this name exists.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.path(name).exists()
    }

    /// Ends both programs. Returns whether each ended successfully.
    pub(crate) fn stop(mut self) -> (bool, bool) {
        let end = |child: &mut Child| {
            rustix::process::kill_process(rustix::process::Pid::from_child(child), rustix::process::Signal::TERM)
                .unwrap();
            child.wait().unwrap().success()
        };
        let pod = end(&mut self.pod);
        let nicd = end(&mut self.nicd);
        assert!(!self.dir.path().join("vpc.sock").exists() && !self.dir.path().join("nicd.sock").exists());
        (nicd, pod)
    }

    /// Next hops are resolved by ARP, which the test answers.
    fn wait_until_it_forwards(&mut self) {
        self.until("the gateway forwards", |world| {
            world.drain();
            // The pod must listen first.
            if UnixStream::connect(world.dir.path().join("gw.sock")).is_err() {
                return false;
            }
            world.status("gw")["neighbours"]["10.0.0.12"].is_string()
        });
        self.received.clear();
    }

    fn until(&mut self, what: &str, mut is: impl FnMut(&mut World) -> bool) {
        let until = Instant::now() + PATIENCE;
        while !is(self) {
            assert!(Instant::now() < until, "{what}: not within {PATIENCE:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends packets of flows in turn, and receives. Returns the flow and number of each received packet.
    pub(crate) fn exchange(
        &mut self,
        packets: u32,
        flows: u16,
        mut meanwhile: impl FnMut(&mut World, u32),
    ) -> Vec<(u16, u32)> {
        let mut all = Vec::new();
        let mut next = Instant::now();
        for number in 0..packets {
            meanwhile(self, number);
            let flow = (number % u32::from(flows)) as u16;
            let frame = packet(100 + u32::from(flow % 4), flow, number, self.payload);
            self.wire.send(&[&frame]);
            if number % BATCH == BATCH - 1 {
                self.wire.flush();
                next = (next + PAUSE).max(Instant::now());
                let on_the_way = |all: &Vec<_>| number as usize + 1 - all.len();
                while Instant::now() < next || on_the_way(&all) > self.window && next.elapsed() < PATIENCE {
                    all.extend(self.drain());
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
        }
        self.wire.flush();
        // Until nothing has arrived for a while, which is longer than a worker may stall.
        let mut last = Instant::now();
        while all.len() < packets as usize && last.elapsed() < Duration::from_secs(2) {
            let before = all.len();
            all.extend(self.drain());
            if all.len() > before {
                last = Instant::now();
            }
        }
        self.await_counters();
        all
    }

    /// Waits until counters have not changed for a while and the order queues are empty. Threads report counters every
    /// few milliseconds, but a busy machine can delay them.
    fn await_counters(&mut self) {
        let mut before = None;
        self.until("counters stand still", |world| {
            std::thread::sleep(Duration::from_millis(100));
            let status = world.status("nicd");
            let pod = &status["pods"][0];
            let now = Some((pod["counters"].clone(), pod["order"].clone(), world.worker_packets()));
            let stand_still =
                now == before && pod["queues"].as_array().unwrap().iter().all(|queue| queue["in_use"] == 0);
            before = now;
            stand_still
        });
    }

    /// Three tenants send 500 packets per second, and the fourth 20 times as many. Returns what each sent.
    pub(crate) fn burst(&mut self, time: Duration) -> BTreeMap<u32, u64> {
        let mut sent = BTreeMap::new();
        let began = Instant::now();
        let mut steps = 0u32;
        while began.elapsed() < time {
            for (vni, count) in [(100, 1), (101, 1), (102, 1), (103, 20)] {
                for n in 0..count {
                    let frame = packet(vni, vni as u16, steps * 32 + n, self.payload);
                    self.wire.send(&[&frame]);
                    *sent.entry(vni).or_insert(0) += 1;
                }
            }
            self.wire.flush();
            steps += 1;
            while began.elapsed() < Duration::from_millis(2) * steps {
                self.drain();
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        let last = Instant::now();
        while last.elapsed() < Duration::from_millis(500) {
            self.drain();
        }
        sent
    }

    pub(crate) fn received_of(&self, vni: u32) -> u64 {
        self.received.get(&vni).copied().unwrap_or(0)
    }

    /// Receives what has arrived: checks each packet, and answers ARP.
    fn drain(&mut self) -> Vec<(u16, u32)> {
        let mut all = Vec::new();
        let mut answers = Vec::new();
        loop {
            let count = self.wire.receive().unwrap();
            for index in 0..count {
                let frame = self.wire.frame(index);
                if frame[12..14] == ethertype::ARP.to_be_bytes() {
                    answers.extend(answer(frame));
                } else if let Some((vni, flow, number)) = read(frame, self.payload) {
                    *self.received.entry(vni).or_insert(0) += 1;
                    all.push((flow, number));
                }
            }
            if count == 0 {
                break;
            }
        }
        if !answers.is_empty() {
            answers.iter().for_each(|answer| self.wire.send(&[answer]));
            self.wire.flush();
        }
        all
    }

    fn request(&self, name: &str, request: &str) -> serde_json::Value {
        let mut stream = UnixStream::connect(self.dir.path().join(format!("{name}.sock"))).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
        serde_json::from_str(body).unwrap()
    }

    pub(crate) fn status(&self, name: &str) -> serde_json::Value {
        self.request(name, "GET /v1/status HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    }

    pub(crate) fn set_mode(&mut self, mode: &str) {
        self.post("nicd", "command", &format!(r#"{{"command":"set_mode","pod":"vpc","mode":"{mode}"}}"#));
    }

    /// A program's answer to a request with a body.
    pub(crate) fn post(&self, name: &str, what: &str, body: &str) -> serde_json::Value {
        let head =
            format!("POST /v1/{what} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json");
        self.request(name, &format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()))
    }

    /// Starts a capture on the pod. The thread returns the file.
    pub(crate) fn capture(&self, spec: CaptureSpec) -> JoinHandle<Vec<u8>> {
        let socket = self.dir.path().join("gw.sock");
        std::thread::spawn(move || {
            let mut file = Vec::new();
            Client::new(socket).unwrap().capture(&spec, &mut file).unwrap();
            file
        })
    }

    /// Counters of the order queues.
    pub(crate) fn order(&self) -> impl Fn(&str) -> u64 {
        let status = self.status("nicd");
        move |name| status["pods"][0]["order"][name].as_u64().unwrap()
    }

    /// The pipeline's counter for the pod.
    pub(crate) fn counter(&self, name: &str) -> u64 {
        self.status("nicd")["pods"][0]["counters"][name].as_u64().unwrap()
    }

    /// Tenants with a separate meter.
    pub(crate) fn limited(&self) -> Vec<u64> {
        let status = self.status("nicd");
        status["pods"][0]["limited_vnis"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap()).collect()
    }

    /// Number of packets of each worker.
    pub(crate) fn worker_packets(&self) -> Vec<u64> {
        let status = self.status("gw");
        status["workers"].as_array().unwrap().iter().map(|w| w["packets"].as_u64().unwrap()).collect()
    }
}

/// The test's end of the link.
pub(crate) fn wire(longest: usize) -> RawDevice {
    let frames = if longest > 2048 { 2048 } else { 8192 };
    RawDevice::open(&RawConfig { device: "wire0".to_owned(), mode: RawMode::Packet, longest, frames }).unwrap()
}

pub(crate) fn run(program: &str, dir: &Path, name: &str) -> Child {
    let log = std::fs::File::options().create(true).append(true).open(dir.join(format!("{name}.log"))).unwrap();
    let config: PathBuf = dir.join(format!("{name}.toml"));
    let mut command = Command::new(program);
    command.arg("--config").arg(config).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    command.spawn().unwrap()
}

pub(crate) fn ip_udp(source: [u8; 4], destination: [u8; 4], ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    let len = (8 + payload.len()) as u16;
    let datagram = udp::Header { source_port: ports.0, destination_port: ports.1, len, checksum: 0 }.emit();
    let header = ipv4::Header {
        header_len: 20,
        traffic_class: 0,
        total_len: 20 + len,
        identification: 0,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset: 0,
        ttl: 64,
        protocol: UDP,
        checksum: 0,
        source: source.into(),
        destination: destination.into(),
    };
    [&header.emit()[..], &datagram, payload].concat()
}

/// A packet of a tenant's flow with its number. Its payload has `len` bytes, which depend on the number.
pub(crate) fn packet(vni: u32, flow: u16, number: u32, len: usize) -> Vec<u8> {
    let mut payload = number.to_be_bytes().to_vec();
    payload.resize(len, number as u8);
    let inner = ip_udp([192, 168, 0, 1], [192, 168, 0, 2], (flow, 9), &payload);
    let link = |to: Mac, from: Mac| ethernet::Header::new(to, from, ethertype::IPV4).emit();
    let guest = Mac([2, 0, 0, 0, 1, 1]);
    let payload = [&vxlan::emit(Vni::new(vni).unwrap())[..], &link(GATEWAY_MAC, guest), &inner].concat();
    let outer = ip_udp(SENDER, GATEWAY, (50_000 + flow, 4789), &payload);
    [&link(GATEWAY_MAC, Mac([2, 0, 0, 0, 0, 11]))[..], &outer].concat()
}

/// VNI, flow and number of a packet that the gateway has forwarded. Checks the packet's content.
fn read(frame: &[u8], len: usize) -> Option<(u32, u16, u32)> {
    let outer = bifrost_nic::parse(frame, frame.len()).ok()?;
    if outer.dst_port != vxlan::UDP_PORT {
        return None;
    }
    assert_eq!((outer.dst_mac, outer.src_mac), (RECEIVER_MAC, GATEWAY_MAC));
    assert_eq!((outer.src_ip, outer.dst_ip), (GATEWAY.into(), RECEIVER.into()));
    let (vni, inner) = vxlan::parse(&frame[usize::from(outer.payload)..]).unwrap();
    let parsed = bifrost_nic::parse(inner, inner.len()).unwrap();
    assert_eq!((parsed.dst_mac, inner[22]), (Mac([2, 0, 0, 0, 1, 2]), 63), "the vNIC's address, one hop less");
    let payload = &inner[usize::from(parsed.payload)..];
    let number = u32::from_be_bytes(*payload.first_chunk().unwrap());
    assert!(payload.len() == len && payload[4..].iter().all(|b| *b == number as u8), "the payload is its own");
    Some((vni.get(), parsed.src_port, number))
}

/// The answer to ARP for one of the hosts.
fn answer(frame: &[u8]) -> Option<Vec<u8>> {
    let request = arp::Packet::parse(&frame[14..]).ok()?;
    let last = request.target_ip.octets()[3];
    if request.operation != arp::Operation::Request || ![SENDER[3], RECEIVER[3]].contains(&last) {
        return None;
    }
    let mac = Mac([2, 0, 0, 0, 0, last]);
    let header = ethernet::Header::new(request.sender_mac, mac, ethertype::ARP);
    Some([&header.emit()[..], &request.reply(mac).emit()].concat())
}
