//! Interoperability with another implementation of RoCEv2: the kernel's soft-RoCE (rxe), used through verbs in
//! user-mode Linux. scripts/build-rxe-kernel.sh builds the kernel; these tests are ignored by default
//! (docs/VERIFICATION.md).
//!
//! Tests whose names begin with `inside` run in the virtual machine, where `machine` starts them.

#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use bifrost_endpoint::{
    Adaptive, Choice, ConnectionConfig, Endpoint, Host, HostConfig, HostEvent, Limits, Order, Service, Swift,
    SwiftConfig, Worker, WorkerConfig,
};
use bifrost_verbs::{RdmaCore, RdmaCoreConfig};
use bifrost_wire::rdm::SetupKind;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Generous, because slowness is not a failure.
const LONG: Duration = Duration::from_secs(100);
/// The kernel's soft-RoCE receives only WRITEs of one packet with UC (RDM §11.6).
const ONE_PACKET: u32 = 4096;

/// One end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct End {
    address: &'static str,
    provider: Choice,
    /// In the network namespace `peer`.
    in_peer_namespace: bool,
}

const fn verbs(address: &'static str) -> End {
    End { address, provider: Choice::Verbs, in_peer_namespace: false }
}

const fn soft(address: &'static str) -> End {
    End { address, provider: Choice::Soft, in_peer_namespace: true }
}

const RXE_4: End = verbs("10.9.0.1");
const RXE_6: End = verbs("fd00:9::1");
const SOFT_4: End = soft("10.9.0.2");
const SOFT_6: End = soft("fd00:9::2");

/// Client and server.
const PAIRS: [[End; 2]; 5] =
    [[verbs("10.9.1.1"), verbs("10.9.1.2")], [RXE_6, SOFT_6], [SOFT_6, RXE_6], [RXE_4, SOFT_4], [SOFT_4, RXE_4]];

impl End {
    fn worker(self, service: Service) -> Worker {
        if self.in_peer_namespace {
            let namespace = File::open("/run/netns/peer").unwrap();
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        }
        let address: IpAddr = self.address.parse().unwrap();
        let worker = Worker::new(WorkerConfig {
            provider: self.provider,
            service,
            mtu: 4096,
            chunk: ONE_PACKET,
            order: Order::Sent,
            ..WorkerConfig::new(address)
        });
        let worker = worker.unwrap();
        let begin = if self.provider == Choice::Verbs { "verbs: rxe" } else { "soft: " };
        assert!(worker.provider().starts_with(begin), "{}", worker.provider());
        worker
    }
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// The lengths of messages, in sending order.
const SIZES: [usize; 10] = [0, 1, 100, 4096, 4097, 12_288, 32_768, 32_769, 65_536, 500_001];

/// The next message, received as in an event loop. Counts how often the descriptor was readable.
fn recv_by_descriptor(worker: &Worker, endpoint: &Endpoint, readable: &mut u32) -> Vec<u8> {
    let descriptor = worker.descriptor().unwrap();
    loop {
        while worker.poll().unwrap() {}
        if let Some(message) = endpoint.try_recv().unwrap() {
            return message.into_vec();
        }
        let due = Timespec { tv_sec: 0, tv_nsec: worker.due().as_nanos() as i64 };
        let mut descriptors = [PollFd::new(&descriptor, PollFlags::IN)];
        *readable += poll(&mut descriptors, Some(&due)).unwrap() as u32;
    }
}

/// Exchanges calls and responses with known data, then messages back to back. Returns the client's counters.
fn talk(pair: [End; 2], service: Service, rounds: u64) -> bifrost_endpoint::Counters {
    let (sender, receiver) = mpsc::channel();
    let [client, server] = pair;
    let serving = std::thread::spawn(move || {
        let worker = server.worker(service);
        let mut listener = worker.listen(SocketAddr::new(server.address.parse().unwrap(), 0)).unwrap();
        sender.send(listener.local_addr().unwrap()).unwrap();
        let endpoint = worker.accept(&mut listener, LONG).unwrap();
        let mut readable = 0;
        for round in 0..rounds {
            for size in SIZES {
                let request = endpoint.next_request(LONG).unwrap();
                assert!(*request.message == *pattern(size, round), "request of {size} bytes");
                endpoint.respond(&request, pattern(size, !round)).unwrap();
            }
        }
        for round in 0..rounds {
            for size in SIZES {
                let message = recv_by_descriptor(&worker, &endpoint, &mut readable);
                assert!(message == pattern(size, round ^ 0xff), "message of {size} bytes");
            }
        }
        assert!(readable > 0, "the descriptor was never readable");
        endpoint.send(b"all".to_vec()).unwrap();
        // The peer ends once it has the response.
        let _ = endpoint.recv(LONG);
    });
    let calling = std::thread::spawn(move || {
        let worker = client.worker(service);
        let endpoint = worker.connect(receiver.recv().unwrap(), LONG).unwrap();
        for round in 0..rounds {
            for size in SIZES {
                let response = endpoint.call(pattern(size, round), LONG).unwrap();
                assert!(*response == *pattern(size, !round), "response of {size} bytes");
            }
        }
        for round in 0..rounds {
            for size in SIZES {
                endpoint.send(pattern(size, round ^ 0xff)).unwrap();
                if endpoint.open_messages() > 16 {
                    endpoint.flush(LONG).unwrap();
                }
            }
        }
        assert_eq!(*endpoint.recv(LONG).unwrap(), *b"all");
        worker.counters()
    });
    let counters = calling.join().unwrap();
    serving.join().unwrap();
    counters
}

/// Packets dropped by the queues of this end's devices.
fn dropped_packets() -> u64 {
    let output = Command::new("tc").args(["-s", "qdisc"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let counts = text.split("(dropped ").skip(1).filter_map(|rest| rest.split(',').next()?.trim().parse::<u64>().ok());
    counts.sum()
}

fn is_inside() -> bool {
    let inside = std::env::var_os("BIFROST_RXE").is_some();
    if !inside {
        eprintln!("SKIPPED: this runs in the machine, which `machine` starts");
    }
    inside
}

#[test]
#[ignore = "runs in a machine with soft-RoCE"]
fn inside_all_pairs_and_services() {
    if !is_inside() {
        return;
    }
    let rounds = std::env::var("ROUNDS").map_or(3, |rounds| rounds.parse().unwrap());
    let mut lost = 0;
    for service in [Service::Uc, Service::Rc, Service::Both] {
        for pair in PAIRS {
            let begin = Instant::now();
            let counters = talk(pair, service, rounds);
            lost += counters.lost_requests;
            let [client, server] = pair.map(|end| format!("{:?} {}", end.provider, end.address));
            println!(
                "{service:?}: {client} -> {server}: {:.1} s, {} lost, {} timeouts, {} flips",
                begin.elapsed().as_secs_f64(),
                counters.lost_requests,
                counters.timeouts,
                counters.lane_flips
            );
        }
    }
    let dropped = dropped_packets();
    println!("netem has dropped {dropped} packets; {lost} requests of clients were considered lost");
    let losses = std::env::var("LOSSES").is_ok();
    assert!(losses == (dropped > 20) && (lost > 0 || !losses), "{dropped} {lost}");
}

/// Hosts with two rxe devices. Queue pairs that carry data are put into error repeatedly.
#[test]
#[ignore = "runs in a machine with soft-RoCE"]
fn inside_killed_queue_pairs() {
    if !is_inside() {
        return;
    }
    for service in [Service::Uc, Service::Rc] {
        let mut hosts = ["10.9.1.1", "10.9.1.2"].map(|address| {
            let address = address.parse().unwrap();
            let nic = RdmaCore::new(RdmaCoreConfig { address, queue_pairs: 16, regions: 4096, seed: 7 }).unwrap();
            Host::new(nic, HostConfig::new(4, 7)).unwrap()
        });
        let limits = Limits { timeout_ns: 20_000_000, ..Limits::new(service, 4096) };
        let (a, hello) = hosts[0].prepare(SetupKind::Hello, limits).unwrap();
        let (b, welcome) = hosts[1].prepare(SetupKind::Welcome, limits).unwrap();
        for (host, id, peer, initiator) in [(0, a, &welcome, true), (1, b, &hello, false)] {
            let mut config = ConnectionConfig::new(service, 4096);
            config.initiator = initiator;
            config.patience_ns = 500_000;
            let chunking = Box::new(Adaptive { longest: ONE_PACKET, ..Adaptive::default() });
            let swift = Box::new(Swift::new(SwiftConfig::new(500_000)));
            let now = hosts[host].provider().now_ns();
            hosts[host].complete(now, id, peer, config, chunking, swift).unwrap();
        }
        let (mut sent, mut received, mut kills) = (0u64, 0u64, 0u64);
        let (messages, begin) = (600, Instant::now());
        while received < messages {
            assert!(begin.elapsed() < LONG, "{service:?}: {received} of {messages} after {kills} kills");
            if sent < messages && hosts[0].open_messages(a) < 8 {
                let now = hosts[0].provider().now_ns();
                let data = pattern(SIZES[sent as usize % SIZES.len()], sent);
                hosts[0].send(now, a, bifrost_endpoint::Class::Message, 0, data).map_err(|(error, _)| error).unwrap();
                sent += 1;
            }
            for host in &mut hosts {
                host.provider_mut().disarm();
                let now = host.provider().now_ns();
                host.turn(now);
                host.provider_mut().transmit();
            }
            while let Some(event) = hosts[0].next_event() {
                assert!(!matches!(event, HostEvent::Closed { .. }), "{service:?}: {event:?}");
            }
            while let Some(event) = hosts[1].next_event() {
                let HostEvent::Message { connection, data, .. } = event else { panic!("{event:?}") };
                let size = SIZES[received as usize % SIZES.len()];
                assert!(data == pattern(size, received), "{service:?}: message {received} of {size} bytes");
                received += 1;
                let now = hosts[1].provider().now_ns();
                hosts[1].consumed(now, connection, data);
            }
            // All active queue pairs in turn, at either end.
            if received >= 20 * (kills + 1) {
                let end = kills as usize / 3 % 2;
                let ready: Vec<_> = hosts[end].provider().connected().collect();
                if let Some(queue_pair) = ready.get(kills as usize % ready.len().max(1)) {
                    hosts[end].provider_mut().put_into_error(*queue_pair).unwrap();
                    kills += 1;
                }
            }
            std::thread::yield_now();
        }
        let counters = *hosts[0].counters();
        let in_error = hosts.each_ref().map(|host| host.provider().counters().queue_pairs_in_error);
        println!(
            "{service:?}: {messages} messages, {kills} queue pairs killed ({in_error:?} seen in error), {} flips, {:.1} s",
            counters.lane_flips,
            begin.elapsed().as_secs_f64()
        );
        assert!(kills > 3 && in_error.iter().sum::<u64>() > 0 && counters.lane_flips > 0, "{kills} {counters:?}");
    }
}

/// Runs a test of this program in the virtual machine. Returns its output. `None`: there is no such machine here.
fn machine(test: &str, variables: &[(&str, &str)], capture: Option<&Path>) -> Option<String> {
    // One at a time: connections end when a machine stops for seconds.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new(root.join("scripts/rxe-run.sh"));
    command.args(["-t", "280"]).envs(variables.iter().copied());
    let capturing = match capture {
        Some(directory) => {
            command.env("SHARE", directory);
            "dumpcap -q -i e0 -i e1 -f 'udp port 4791' -w /mnt/rxe.pcapng 2>/dev/null & sleep 2; "
        }
        None => "",
    };
    let variables: String = variables.iter().map(|(name, value)| format!("{name}={value} ")).collect();
    let program = program.display();
    let script = format!(
        "{capturing}BIFROST_RXE=1 {variables}'{program}' --exact {test} --ignored --nocapture 2>&1; s=$?; sync; sleep 1; exit $s"
    );
    let output = command.args(["sh", "-c", &script]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{text}");
    if output.status.code() == Some(77) {
        eprintln!("{}", String::from_utf8_lossy(&output.stderr));
        return None;
    }
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("1 passed"), "the test did not run");
    Some(text)
}

#[test]
#[ignore = "boots a machine with soft-RoCE: scripts/build-rxe-kernel.sh"]
fn rxe_and_this_library_interoperate() {
    let directory = std::env::temp_dir().join(format!("bifrost-rxe-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let Some(_) = machine("inside_all_pairs_and_services", &[], Some(&directory)) else { return };
    // A third implementation finds no malformed packets among those that the other two exchanged.
    let count = |filter: &str| {
        let mut command = Command::new("tshark");
        command.arg("-r").arg(directory.join("rxe.pcapng")).args(["-Y", filter]);
        // Disable its heuristics for payloads: random bytes resemble many protocols.
        command.args(["-o", "infiniband.identify_payload:FALSE"]);
        command.args(["--disable-protocol", "rpcordma", "--disable-protocol", "smb_direct"]);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).lines().count()
    };
    let (all, malformed) = (count("infiniband"), count("_ws.malformed"));
    println!("{all} RoCEv2 packets, {malformed} malformed");
    assert!(all > 1000 && malformed == 0, "{all} packets, {malformed} malformed");
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
#[ignore = "boots a machine with soft-RoCE: scripts/build-rxe-kernel.sh"]
fn losses_are_repaired_between_rxe_and_this_library() {
    machine("inside_all_pairs_and_services", &[("LOSS", "1"), ("LOSSES", "1"), ("ROUNDS", "2")], None);
}

#[test]
#[ignore = "boots a machine with soft-RoCE: scripts/build-rxe-kernel.sh"]
fn killed_queue_pairs_are_replaced_and_repaired() {
    machine("inside_killed_queue_pairs", &[], None);
}
