//! Two connected devices in a network namespace of this thread.

use std::process::Command;
use std::time::{Duration, Instant};

use super::*;
use crate::clock::monotonic_ns;

/// Runs in a thread with its own network namespace, which ends with it.
fn in_namespace(test: impl FnOnce() + Send + 'static) {
    std::thread::spawn(|| {
        // SAFETY: no pointers; this thread alone changes its network namespace, and opens no other descriptor before.
        assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0, "needs root");
        for command in [
            "ip link add left0 mtu 1500 type veth peer name right0 mtu 1500",
            "ip link set left0 up",
            "ip link set right0 up",
            "ip link set left0 addrgenmode none",
        ] {
            let mut words = command.split(' ');
            let program = words.next().unwrap();
            assert!(Command::new(program).args(words).status().unwrap().success(), "{command}");
        }
        test();
    })
    .join()
    .unwrap();
}

fn open(device: &str, mode: RawMode) -> RawDevice {
    RawDevice::open(&RawConfig { device: device.to_owned(), mode, longest: 1522, frames: 256 }).unwrap()
}

fn frame(number: u32, tagged: bool, len: usize) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];
    if tagged {
        frame.extend_from_slice(&[0x81, 0, 0x20, 7]);
    }
    frame.extend_from_slice(&[0x88, 0xb5]);
    frame.extend_from_slice(&number.to_be_bytes());
    frame.resize(len, 0x5a);
    frame
}

/// Receives our own frames; the kernel sends frames, too.
fn receive(device: &mut RawDevice, count: usize) -> Vec<Vec<u8>> {
    let until = Instant::now() + Duration::from_secs(5);
    let mut all = Vec::new();
    while all.len() < count && Instant::now() < until {
        let n = device.receive().unwrap();
        let frames = (0..n).map(|i| device.frame(i).to_vec());
        all.extend(frames.filter(|f| f[6..12] == [2, 0, 0, 0, 0, 1]));
    }
    all
}

/// The kernel enables timestamps some time after the machine's first socket requests them. Until then it reports when a
/// frame was read.
fn wait_for_stamps(from: &mut RawDevice, to: &mut RawDevice) {
    let until = Instant::now() + Duration::from_secs(5);
    loop {
        from.send(&[&frame(0, false, 60)]);
        from.flush();
        std::thread::sleep(Duration::from_millis(5));
        let count = to.receive().unwrap();
        let now = monotonic_ns();
        if count > 0 && to.arrived_at(count - 1, now) + 2_000_000 <= now {
            return;
        }
        assert!(Instant::now() < until, "no frame has an arrival time");
    }
}

#[test]
fn frames_arrive_in_order_with_their_tags() {
    for (left, right) in [
        (RawMode::Packet, RawMode::Packet),
        (RawMode::Packet, RawMode::XdpGeneric),
        (RawMode::XdpGeneric, RawMode::Packet),
        (RawMode::Auto, RawMode::Auto),
    ] {
        in_namespace(move || {
            let (mut a, mut b) = (open("left0", left), open("right0", right));
            for round in 0..20 {
                let sent: Vec<Vec<u8>> =
                    (0..64).map(|n| frame(round * 64 + n, n % 3 == 0, 60 + (n as usize * 23) % 1400)).collect();
                for frame in &sent {
                    a.send(&[&frame[..20], &frame[20..]]);
                }
                a.flush();
                assert_eq!(receive(&mut b, 64), sent, "{left:?} {right:?}");
            }
            let (sent, received) = (a.counters(), b.counters());
            assert_eq!((sent.tx_frames, sent.tx_dropped_frames), (20 * 64, 0));
            assert!(received.rx_frames >= 20 * 64);
            assert_eq!(received.rx_dropped_frames, 0);
        });
    }
}

#[test]
fn arrival_times_include_the_wait() {
    for mode in [RawMode::Packet, RawMode::XdpGeneric, RawMode::Auto] {
        in_namespace(move || {
            let (mut a, mut b) = (open("left0", mode), open("right0", mode));
            wait_for_stamps(&mut a, &mut b);
            let began = monotonic_ns();
            for number in 0..3 {
                a.send(&[&frame(number, false, 60)]);
                a.flush();
                std::thread::sleep(Duration::from_millis(30));
            }
            let count = b.receive().unwrap();
            let now = monotonic_ns();
            let ours = (0..count).filter(|&index| b.frame(index)[6..12] == [2, 0, 0, 0, 0, 1]);
            let times: Vec<u64> = ours.map(|index| b.arrived_at(index, now)).collect();
            assert_eq!(times.len(), 3, "{mode:?}");
            assert!(began <= times[0] && times[2] <= now - 20_000_000, "{mode:?}: {began} {times:?} {now}");
            assert!(times[1] - times[0] >= 20_000_000 && times[2] - times[1] >= 20_000_000, "{mode:?}: {times:?}");
            // A stepped clock, and a frame that does not exist.
            assert_eq!(b.arrived_at(0, times[0] + OLDEST_NS + 1), times[0] + OLDEST_NS + 1);
            assert_eq!((b.arrived_at(0, 7), b.arrived_at(RAW_BATCH, now)), (7, now));
        });
    }
}

#[test]
fn long_frames_are_counted() {
    in_namespace(|| {
        let mut a = open("left0", RawMode::Packet);
        a.send(&[&[0; 1523]]);
        assert_eq!(a.counters().tx_too_long_frames, 1);
        let short = RawConfig { device: "right0".to_owned(), mode: RawMode::Packet, longest: 100, frames: 64 };
        let mut b = RawDevice::open(&short).unwrap();
        a.send(&[&frame(1, true, 101)]);
        a.send(&[&frame(2, false, 101)]);
        a.send(&[&frame(3, true, 100)]);
        a.flush();
        assert_eq!(receive(&mut b, 1), [frame(3, true, 100)]);
        assert!(b.counters().rx_too_long_frames >= 2);
    });
}

#[test]
fn settings_are_checked() {
    let config = RawConfig { device: "none-such".to_owned(), mode: RawMode::Auto, longest: 1522, frames: 64 };
    for (config, text) in [
        (config.clone(), "no network device"),
        (RawConfig { longest: 10_000, ..config.clone() }, "64 to 9216"),
        (RawConfig { frames: 100, ..config.clone() }, "power of two"),
        (RawConfig { device: "lo".to_owned(), mode: RawMode::XdpGeneric, longest: 9000, ..config }, "at most 3840"),
    ] {
        let error = RawDevice::open(&config).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
}
