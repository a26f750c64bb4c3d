//! DPDK's unmodified `dpdk-testpmd` as a pod: it attaches with `net_memif`, and returns the packets that it receives,
//! with their trailers.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bifrost_control::Client;
use bifrost_port::raw::RawDevice;

use crate::reordered;
use crate::world::{in_namespace, packet, run, wire};

/// Installed by `scripts/install-debian-packages.sh`.
const TESTPMD: &str = "/var/cache/bifrost-lab/dpdk/usr/bin/dpdk-testpmd";
const PATIENCE: Duration = Duration::from_secs(30);
const PACKETS: u32 = 10_000;
const BATCH: u32 = 32;
const FLOWS: u16 = 50;
/// Bytes of a packet up to its number: Ethernet, IPv4 and UDP twice, and VXLAN.
const HEADERS: usize = 92;

/// A process. It is killed when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts it as a pod with two cores: three queues in each direction, of which the first carries control packets.
fn start(directory: &Path) -> Running {
    let log = std::fs::File::create(directory.join("testpmd.log")).unwrap();
    let device = format!("net_memif0,role=client,id=0,socket={}/vpc.sock,socket-abstract=no", directory.display());
    let mut command = Command::new("setpriv");
    // It never sleeps, so it has a lower priority than the pipeline.
    command.args(["--pdeathsig", "KILL", "nice", "-n", "19", TESTPMD, "--no-huge", "--no-shconf", "--no-pci"]);
    command.args(["--no-telemetry", "-m", "128", "--lcores", "0@(0-1),1@(0-1)", "--vdev", &device, "--"]);
    command.args(["--forward-mode=io", "--auto-start", "--rxq=3", "--txq=3", "--total-num-mbufs=8192"]);
    // It ends when its input ends.
    command.stdin(Stdio::piped()).stdout(log.try_clone().unwrap()).stderr(log);
    let missing = "dpdk-testpmd is missing: scripts/install-debian-packages.sh";
    Running(command.spawn().unwrap_or_else(|error| panic!("{missing}: {error}")))
}

fn state(directory: &Path) -> Option<bifrost_control::api::Pipeline> {
    Client::new(directory.join("nicd.sock")).ok()?.pipeline().ok()
}

fn until(what: &str, log: &Path, mut is: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is() {
        let printed = || std::fs::read_to_string(log).unwrap_or_default();
        assert!(Instant::now() < until, "{what}: not within {PATIENCE:?}: {}", printed());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Receives what has arrived. Each packet must be unchanged. Returns the number of packets so far.
fn collect(wire: &mut RawDevice, received: &mut Vec<(u16, u32)>) -> usize {
    for index in 0..wire.receive().unwrap() {
        let frame = wire.frame(index);
        // Other frames come from the kernel.
        if frame.len() == HEADERS + 200 {
            let number = u32::from_be_bytes(frame[HEADERS..HEADERS + 4].try_into().unwrap());
            let flow = (number % u32::from(FLOWS)) as u16;
            assert_eq!(frame, packet(100, flow, number, 200));
            received.push((flow, number));
        }
    }
    received.len()
}

#[test]
fn testpmd_attaches_unmodified_and_its_packets_leave_in_order() {
    in_namespace(|| {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        let settings = format!(
            r#"control = {{ socket = "{0}/nicd.sock" }}
device = {{ name = "gw0", mtu = 1600, frames = 4096 }}
[[pods]]
name = "vpc"
number = 1
cores = 2
order_queues = 2
timeout_us = 1000000
interfaces = [{{ socket = "{0}/vpc.sock" }}]
"#,
            at.display()
        );
        std::fs::write(at.join("nicd.toml"), settings).unwrap();
        let mut wire = wire(1700);
        let _nicd = Running(run(env!("CARGO_BIN_EXE_bifrost-nicd"), at, "nicd"));
        until("the pipeline runs", &at.join("nicd.log"), || state(at).is_some());
        let _testpmd = start(at);
        let is_up = || state(at).is_some_and(|state| state.pods[0].interfaces_up == [true]);
        until("dpdk-testpmd attaches", &at.join("testpmd.log"), is_up);
        let order = |name: &str| state(at).unwrap().pods[0].order.get(name).copied().unwrap();
        // It puts no buffers into its rings before it starts its queues. It drops packets that arrive between then and
        // the start of forwarding. The order queue waits for such a packet until it times out, and then sends later
        // ones of the same flow.
        until("dpdk-testpmd forwards", &at.join("testpmd.log"), || {
            wire.send(&[&packet(100, 0, 0, 100)]);
            wire.flush();
            std::thread::sleep(Duration::from_millis(50));
            order("sent_in_order_packets") > 0
        });
        // The last of these packets may still be in flight.
        std::thread::sleep(Duration::from_secs(1));
        let before = state(at).unwrap().pods[0].order.clone();
        let counted = |name: &str| order(name) - before[name];
        let mut received: Vec<(u16, u32)> = Vec::new();
        for number in 0..PACKETS {
            let flow = (number % u32::from(FLOWS)) as u16;
            wire.send(&[&packet(100, flow, number, 200)]);
            if number % BATCH != BATCH - 1 && number + 1 != PACKETS {
                continue;
            }
            wire.flush();
            // Keeps no more packets in flight than a veth device has room for.
            let most = (number as usize + 1).saturating_sub(128);
            until("packets come back", &at.join("testpmd.log"), || collect(&mut wire, &mut received) >= most);
        }
        let all = || collect(&mut wire, &mut received) == PACKETS as usize;
        until("all packets come back", &at.join("testpmd.log"), all);
        assert_eq!(reordered(&received), 0);
        let in_order = || counted("sent_in_order_packets");
        until("the pipeline has counted them", &at.join("nicd.log"), || in_order() == u64::from(PACKETS));
        let late = ["timed_out_packets", "sent_late_packets"].map(counted);
        assert_eq!(late, [0, 0], "sprayed over both queues, and put in order");
    });
}
