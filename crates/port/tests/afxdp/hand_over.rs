//! AF_XDP underlays that are handed over under load, to others in the same process.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use bifrost_port::afxdp::{HandedDevice, WaitingSockets};

use super::*;

/// Datagrams on their way at most: fewer than the kernel has room for.
const UNDER_WAY: u32 = 100;

/// The receiving side, and which datagrams of each number it has received.
struct Receiver<'a> {
    pair: &'a Pair,
    config: AfxdpConfig,
    workers: Vec<AfxdpUnderlay>,
    seen: Vec<u32>,
    received: &'a AtomicU32,
}

type Next = (Vec<AfxdpUnderlay>, WaitingSockets);

impl Receiver<'_> {
    fn receive(&mut self, workers: &mut [AfxdpUnderlay]) {
        for (index, worker) in (0u16..).zip(workers) {
            for i in 0..worker.recv().expect("recv") {
                let payload = worker.datagram(i).payload;
                assert_eq!(steer::worker_of_bifrost(payload, self.config.udp.workers), index);
                let number = u32::from_be_bytes(payload[20..24].try_into().expect("four bytes"));
                assert_eq!(*payload, data(index as u8, number, 300), "damaged");
                let number = number as usize;
                self.seen.resize(self.seen.len().max(number + 1), 0);
                self.seen[number] += 1;
                self.received.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Receives until enough datagrams have come in frames, or through the kernel.
    fn receive_until(&mut self, in_frames: bool) {
        let count = |workers: &[AfxdpUnderlay]| -> u64 {
            let counters = workers.iter().map(AfxdpUnderlay::counters);
            counters.map(|c| if in_frames { c.rx_datagrams } else { c.rx_fallback_datagrams }).sum()
        };
        let mut workers = std::mem::take(&mut self.workers);
        let (before, began) = (count(&workers), Instant::now());
        while count(&workers) < before + 300 {
            assert!(began.elapsed() < Duration::from_secs(20), "nothing arrives (in frames: {in_frames})");
            self.receive(&mut workers);
        }
        self.workers = workers;
    }

    fn prepare(&self) -> Next {
        let sockets = self.workers.iter().map(|worker| worker.sockets().expect("descriptors")).collect();
        let devices = self.workers[0].devices().expect("descriptors");
        let config = &self.config;
        within(&self.pair.b, || AfxdpUnderlay::adopt_all(config, sockets, devices)).expect("adopted")
    }

    /// Directs frames past the sockets, empties the rings, and stops for a while.
    fn stop(&mut self) {
        self.workers.iter().for_each(|worker| worker.steer(false).expect("no sockets in the map"));
        self.receive_until(false);
        let mut workers = std::mem::take(&mut self.workers);
        while workers.iter().any(AfxdpUnderlay::has_frames) {
            self.receive(&mut workers);
        }
        self.workers = workers;
        thread::sleep(Duration::from_millis(20));
    }

    fn take_over(&mut self, (next, mut waiting): Next) {
        next.iter().for_each(AfxdpUnderlay::own);
        let mut former = std::mem::replace(&mut self.workers, next);
        self.receive_until(false);
        assert!(waiting.bind().0.is_empty(), "the queues are not free yet");
        drop(former.iter_mut().map(AfxdpUnderlay::leave).collect::<Vec<_>>());
        drop(former);
        let began = Instant::now();
        while !waiting.is_done() {
            assert!(began.elapsed() < Duration::from_secs(20), "the queues are never free");
            let (entering, failed) = waiting.bind();
            assert!(failed.is_none(), "{failed:?}");
            for sockets in entering {
                let worker = usize::from(sockets.worker());
                self.workers[worker].enter(sockets).expect("entered");
            }
            waiting.steer().expect("another program");
            let mut workers = std::mem::take(&mut self.workers);
            self.receive(&mut workers);
            self.workers = workers;
        }
    }

    fn assert_attached(&self) {
        let link = self.pair.b.ip("link show x");
        assert!(link.contains("xdp"), "{link}");
    }
}

/// No datagram is lost or received twice, in hand-overs and in those that fail.
fn survive(workers: u16, mode: XdpMode) {
    let pair = Pair::new();
    let config = AfxdpConfig { frames: 1024, ..config(1, workers, mode) };
    let opened = within(&pair.b, || AfxdpUnderlay::open_all(&config)).expect("open");
    let (stop, sent, received) = (AtomicBool::new(false), AtomicU32::new(0), AtomicU32::new(0));
    let mut receiver = Receiver { pair: &pair, config, workers: opened, seen: Vec::new(), received: &received };
    thread::scope(|scope| {
        let send = || {
            pair.a.enter();
            let sockets: Vec<_> = (0..4)
                .map(|port| {
                    let (local, remote) = ends(false, 0, 4794);
                    let socket = UdpSocket::bind((local.ip(), 50_000 + port)).expect("bind");
                    socket.connect(remote).expect("connect");
                    socket
                })
                .collect();
            while !stop.load(Ordering::Relaxed) {
                let number = sent.load(Ordering::Relaxed);
                if number - received.load(Ordering::Relaxed) >= UNDER_WAY {
                    thread::sleep(Duration::from_micros(100));
                    continue;
                }
                let payload = data((number % u32::from(workers)) as u8, number, 300);
                sockets[number as usize % sockets.len()].send(&payload).expect("send");
                sent.store(number + 1, Ordering::Relaxed);
            }
        };
        let sender = scope.spawn(send);
        // Also after a failed assertion, so that the sender ends.
        let _stop = Stop(&stop);
        receiver.receive_until(true);
        for round in 0..4 {
            let next = receiver.prepare();
            receiver.assert_attached();
            receiver.receive_until(true);
            receiver.stop();
            if round % 2 == 0 {
                // The other process has failed.
                drop(next);
                receiver.workers.iter().for_each(|worker| worker.steer(true).expect("sockets in the map"));
            } else {
                receiver.take_over(next);
            }
            receiver.assert_attached();
            receiver.receive_until(true);
        }
        stop.store(true, Ordering::Relaxed);
        sender.join().expect("it sends");
        let mut workers = std::mem::take(&mut receiver.workers);
        let began = Instant::now();
        while received.load(Ordering::Relaxed) < sent.load(Ordering::Relaxed) && began.elapsed().as_secs() < 3 {
            receiver.receive(&mut workers);
        }
        receiver.workers = workers;
    });
    for counters in receiver.workers.iter().map(AfxdpUnderlay::counters) {
        assert_eq!((counters.rx_dropped_frames, counters.rx_malformed_frames), (0, 0), "{counters:?}");
    }
    let sent = sent.into_inner() as usize;
    let wrong: Vec<_> = receiver.seen.iter().enumerate().filter(|(_, times)| **times != 1).collect();
    assert!(receiver.seen.len() == sent && wrong.is_empty(), "{sent} sent, {}: {wrong:?}", receiver.seen.len());
    drop(receiver.workers);
    assert!(!pair.b.ip("link show x").contains("xdp"), "still attached");
}

struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn no_datagram_is_lost_in_hand_overs() {
    survive(1, XdpMode::Native);
}

#[test]
fn no_datagram_is_lost_in_hand_overs_behind_the_driver_with_three_workers() {
    survive(3, XdpMode::Generic);
}

#[test]
fn what_does_not_fit_is_refused() {
    let pair = Pair::new();
    let config = config(1, 1, XdpMode::Auto);
    let former = within(&pair.b, || AfxdpUnderlay::open_all(&config)).expect("open").remove(0);
    let refused = |change: &dyn Fn(&mut Vec<HandedDevice>)| {
        let (sockets, mut devices) = (former.sockets().expect("descriptors"), former.devices().expect("descriptors"));
        change(&mut devices);
        let adopted = within(&pair.b, || AfxdpUnderlay::adopt_all(&config, vec![sockets], devices));
        matches!(adopted.map(drop), Err(AfxdpError::HandedOver(_)))
    };
    assert!(!refused(&|_| {}));
    assert!(refused(&|devices| devices[0].queues = 0));
    assert!(refused(&|devices| devices[0].queues = 3));
    assert!(refused(&|devices| devices[0].queues = u32::MAX));
    assert!(refused(&|devices| devices[0].link = std::fs::File::open("/dev/null").expect("it exists").into()));
    // A program cannot move to another place.
    let is_native = former.devices().expect("descriptors")[0].native;
    let other = AfxdpConfig { mode: if is_native { XdpMode::Generic } else { XdpMode::Native }, ..config.clone() };
    let (sockets, devices) = (former.sockets().expect("descriptors"), former.devices().expect("descriptors"));
    let adopted = within(&pair.b, || AfxdpUnderlay::adopt_all(&other, vec![sockets], devices));
    let error = adopted.map(drop).expect_err("refused").to_string();
    assert!(error.contains("cannot change underlay.xdp_mode"), "{error}");
    let link = pair.b.ip("link show x");
    assert!(link.contains("xdp"), "{link}");
}
