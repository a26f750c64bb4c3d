//! A worker that cannot keep up with the packets for one guest: only that guest loses packets.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common::host::vpc;
use crate::common::netns::Net;
use crate::common::traffic::{Exchange, ping};
use crate::common::{Guest, Lab, Options, eventually, raw};

/// Datagrams per system call.
const RUN: usize = 60;
/// Most calls per millisecond: more than any worker can process.
const MOST: u32 = 100;

/// Sends the same datagram repeatedly.
struct Flood {
    runs_per_ms: Arc<AtomicU32>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    fn start(net: &Net, from: SocketAddr, to: SocketAddr, datagram: &[u8]) -> Flood {
        let (runs_per_ms, stop) = (Arc::new(AtomicU32::new(1)), Arc::new(AtomicBool::new(false)));
        let (rate, ended, len, run) = (runs_per_ms.clone(), stop.clone(), datagram.len() as i32, datagram.repeat(RUN));
        let thread = net.spawn(move || {
            let socket = UdpSocket::bind(from).unwrap();
            // SAFETY: the kernel reads an `int`, which lives through the call.
            let set = unsafe {
                let value = std::ptr::from_ref(&len).cast();
                libc::setsockopt(socket.as_raw_fd(), libc::SOL_UDP, libc::UDP_SEGMENT, value, 4)
            };
            assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
            let mut due = Instant::now();
            while !ended.load(Ordering::Relaxed) {
                for _ in 0..rate.load(Ordering::Relaxed) {
                    let _ = socket.send_to(&run, to);
                }
                due = (due + Duration::from_millis(1)).max(Instant::now());
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
            }
        });
        Flood { runs_per_ms, stop, thread: Some(thread) }
    }

    /// Increases the rate by at least a quarter; `false` at the maximum.
    fn increase(&self) -> bool {
        let rate = self.runs_per_ms.load(Ordering::Relaxed);
        self.runs_per_ms.store(rate + rate.div_ceil(4), Ordering::Relaxed);
        rate < MOST
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Two tenants on both hosts: `a` and `b`, `x` and `y`. `underlay`: keys for the second host's underlay.
fn lab(underlay: &str) -> Lab {
    let vpcs = vpc(100, "tcp", "flow") + &vpc(200, "tcp", "flow");
    let mut lab = Lab::new(Options { vpcs, ..Options::default() });
    lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
    lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
    lab.add(0, Guest::new("x", 0x21, &["10.9.0.1/24"]).vni(200));
    lab.add(1, Guest::new("y", 0x22, &["10.9.0.2/24"]).vni(200));
    let keys = format!("[underlay]\n{underlay}\n");
    lab.hosts[1].config = lab.hosts[1].config.replace("[underlay]\n", &keys);
    lab.start();
    assert_eq!(ping(lab.net("a"), "10.0.0.2", 3, 56), 3);
    lab
}

/// Sends packets for `y`, which its IP stack drops, slightly faster than the worker can process them.
fn flood(lab: &Lab) -> Flood {
    let [x, y] = ["x", "y"].map(|guest| lab.guest(guest).mac_bytes());
    let packet = raw::udp_in_ipv4([10, 9, 0, 1], [10, 9, 0, 99], &[0; 64]);
    let datagram = raw::vxlan(200, &raw::ethernet(y, x, 0x0800, &packet));
    let [from, to] = [0, 1].map(|host: usize| lab.hosts[host].addresses[0]);
    let flood = Flood::start(&lab.hosts[0].net, SocketAddr::new(from, 0), SocketAddr::new(to, 4789), &datagram);
    let overload = || lab.hosts[1].drops("y", "overload");
    let drops_more_than = |before| {
        std::thread::sleep(Duration::from_millis(100));
        overload() > before
    };
    // Two intervals at one rate: a single pause of the worker also causes drops, but only once.
    while !(drops_more_than(overload()) && drops_more_than(overload())) {
        assert!(flood.increase(), "the worker keeps up with everything");
    }
    flood.increase();
    flood
}

#[test]
fn only_the_overloading_guest_loses_packets() {
    check_overload("", 100);
}

/// With AF_XDP, the worker knows from the XDP program how long a packet has waited, if there are frames for waiting
/// packets. A `veth` device queues 256 packets in front of that; when its queue is full, packets of any guest are lost.
#[test]
fn only_the_overloading_guest_loses_packets_with_afxdp() {
    check_overload("port = \"afxdp\"\nxdp_frames = 8192", 80);
}

/// With the default number of frames: a burst of the flood, which is half as long, may use all of them.
#[test]
fn other_guests_lose_few_packets_with_afxdp_and_few_frames() {
    check_overload("port = \"afxdp\"", 60);
}

/// `least`: minimum number of answers to 100 pings of the other guest.
fn check_overload(underlay: &str, least: u32) {
    let lab = lab(underlay);
    let flood = flood(&lab);
    let overload = |guest| lab.hosts[1].drops(guest, "overload");
    let before = overload("y");
    // Plain VXLAN: lost packets are not retransmitted.
    let answered = ping(lab.net("a"), "10.0.0.2", 100, 56);
    let refused = overload("y") - before;
    drop(flood);
    assert!(answered >= least || (answered > least - 10 && lab.stood_still()), "{answered} of 100 pings were answered");
    assert!(refused > 1000, "{refused} packets were refused");
    assert_eq!(overload("b"), 0);
    assert!(lab.hosts[1].port("y").rx_packets > 1000, "packets within the worker's capacity arrive");
    lab.hosts[1].assert_balanced();
}

#[test]
fn overload_drops_are_retransmitted_and_slow_the_sender() {
    let lab = lab("");
    let stream = Exchange::start(lab.net("x"), lab.net("y"), "10.9.0.2", 5001, 256 << 20);
    let limited = || lab.hosts[1].counter("rte.rate_limited_packets");
    // The window, and the packets sent for the first time.
    let sender = || {
        let conns = lab.hosts[0].client.conns().unwrap();
        conns.iter().find(|conn| conn.vni == 200).map_or((0, 0), |conn| (conn.window_packets, conn.tx_packets))
    };
    let packets_in_a_second = || {
        let (began, before) = (Instant::now(), sender().1);
        std::thread::sleep(Duration::from_millis(200));
        (sender().1 - before) as f64 / began.elapsed().as_secs_f64()
    };
    eventually(5.0, "the stream has its windows", || lab.hosts[1].port("y").rx_packets > 1000);
    let (rate, window) = (packets_in_a_second(), sender().0);
    let flood = flood(&lab);
    let (mut least, mut slowest) = (window, rate);
    eventually(10.0, "data packets are dropped early, and their sender slows down", || {
        (least, slowest) = (least.min(sender().0), slowest.min(packets_in_a_second()));
        limited() > 100 && least < window / 8 && slowest < rate / 2.0
    });
    drop(flood);
    // Every byte is checked.
    stream.finish();
    lab.hosts.iter().for_each(|host| host.assert_balanced());
    lab.assert_nothing_given_up();
}
