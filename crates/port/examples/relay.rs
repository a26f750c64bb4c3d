//! The two ports back to back, without a switch or a transport: the throughput of the ports alone.
//!
//! `relay GUEST_NETNS HOST_NETNS NUMBER LOCAL REMOTE` gives the guest `eth0` with 10.77.0.NUMBER/24, and forwards its
//! frames in UDP between LOCAL and REMOTE, over four source ports. Start one per host; stop with Ctrl-C.

use std::error::Error;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

use bifrost_nic::Segments;
use bifrost_port::tap::{self, TapConfig};
use bifrost_port::udp::{UdpConfig, UdpUnderlay};
use bifrost_port::{GuestPort, PolledPort, PolledUnderlay, TxBatch, Underlay};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Empty VXLAN and BIFROST headers.
const HEADERS: usize = 24;
/// Packets per path before switching to the next one.
const GROUP: usize = 50;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [guest, host, number, local, remote] = arguments.as_slice() else {
        return Err("usage: relay GUEST_NETNS HOST_NETNS NUMBER LOCAL REMOTE".into());
    };
    let number: u8 = number.parse()?;
    let (local, remote): (IpAddr, IpAddr) = (local.parse()?, remote.parse()?);
    let mut tap = tap::create(&TapConfig {
        device: "eth0".into(),
        netns: Some(guest.clone()),
        mac: [2, 0, 0, 0, 0, number],
        addresses: vec![(IpAddr::from([10, 77, 0, number]), 24)],
        ..TapConfig::default()
    })?
    .remove(0);
    let namespace = std::fs::File::open(format!("/run/netns/{host}"))?;
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
    let mut udp = UdpUnderlay::open(UdpConfig { local: vec![local], ..UdpConfig::default() })?;
    let lanes = (0..4)
        .map(|i| udp.lane(SocketAddr::new(local, 49_152 + i), SocketAddr::new(remote, 4794)))
        .collect::<Result<Vec<_>, _>>()?;

    let (mut batch, mut frames, mut sent, mut idle) = (TxBatch::default(), Vec::new(), 0usize, 0u32);
    loop {
        tap.fetch(64, &mut frames)?;
        let mut moved = !frames.is_empty();
        for frame in frames.drain(..) {
            let segments = Segments::plan(tap.bytes(frame.handle).0, frame.len as usize, frame.offload)?;
            for i in 0..segments.count() {
                batch.push(lanes[sent / GROUP % lanes.len()], 0, |out| {
                    out.extend([0; HEADERS]);
                    segments.write(i, |from, to, out| tap.copy(frame.handle, from, to, out), out);
                });
                sent += 1;
            }
            tap.complete(frame.handle);
        }
        udp.send(&mut batch);
        let count = udp.recv()?;
        moved |= count > 0;
        for i in 0..count {
            let Some(frame) = udp.datagram(i).payload.get(HEADERS..) else { continue };
            if let Ok(placed) = tap.place(frame, true) {
                tap.publish(placed);
            }
        }
        tap.notify()?;
        idle = if moved { 0 } else { idle + 1 };
        if idle > 20 {
            let fds = udp.fds();
            let mut waiting: Vec<_> =
                fds.iter().copied().chain([tap.fd()]).map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            if poll(&mut waiting, Some(&rustix::event::Timespec { tv_sec: 1, tv_nsec: 0 }))? == 0 {
                eprintln!("{:?}\n{:?}", udp.counters(), tap.counters());
            }
        }
    }
}
