//! The other end of a pipeline's device, which carries a VLAN for each link: a switch that connects each VLAN to a port
//! and removes the tag. It needs no VLAN devices or filters in the kernel.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use bifrost_port::raw::{RawConfig, RawDevice, RawMode};

use crate::site::{FLOWS, Site};

/// The VLAN of the first link.
pub(super) const VLAN: u16 = 100;
const TAG_AT: usize = 12;
const VXLAN_PORT: [u8; 2] = 4789u16.to_be_bytes();

/// The link by which packets of each flow of probes reach the gateway.
pub(super) struct Flows([AtomicUsize; FLOWS]);

impl Flows {
    pub(super) fn new() -> Arc<Flows> {
        Arc::new(Flows(std::array::from_fn(|_| AtomicUsize::new(usize::MAX))))
    }

    /// The link of each flow of which packets have arrived.
    pub(super) fn get(&self) -> [usize; FLOWS] {
        std::array::from_fn(|flow| self.0[flow].load(Ordering::Relaxed))
    }

    fn see(&self, link: usize, frame: &[u8]) {
        // The frame has no tag and no options. The number of the probe follows all headers.
        if frame.get(36..38) == Some(&VXLAN_PORT[..])
            && let Some(number) = frame.last_chunk()
        {
            self.0[u32::from_be_bytes(*number) as usize % FLOWS].store(link, Ordering::Relaxed);
        }
    }
}

/// A running trunk. It stops when this is dropped.
pub(super) struct Trunk {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Trunk {
    /// Connects a device of a namespace with ports, each of which has the number of its link.
    pub(super) fn start(site: &Site, space: &str, trunk: &str, ports: &[(usize, String)], flows: Arc<Flows>) -> Trunk {
        let open = |device: &str| {
            let device = device.to_owned();
            site.open(space, move || {
                let config = RawConfig { device, mode: RawMode::Packet, longest: 1700, frames: 4096 };
                RawDevice::open(&config).unwrap()
            })
        };
        let mut trunk = open(trunk);
        let mut ports: Vec<_> = ports.iter().map(|(link, device)| (*link, open(device))).collect();
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = Arc::clone(&stop);
        let run = move || {
            while !stopping.load(Ordering::Relaxed) {
                let count = trunk.receive().unwrap();
                for index in 0..count {
                    let frame = trunk.frame(index);
                    let [0x81, 0, a, b] = frame[TAG_AT..TAG_AT + 4] else { continue };
                    let link = (u16::from_be_bytes([a, b]) & 0xfff).wrapping_sub(VLAN);
                    if let Some((_, port)) = ports.iter_mut().find(|(number, _)| *number == usize::from(link)) {
                        port.send(&[&frame[..TAG_AT], &frame[TAG_AT + 4..]]);
                    }
                }
                let mut all = count;
                for (link, port) in &mut ports {
                    let [a, b] = (VLAN + *link as u16).to_be_bytes();
                    let count = port.receive().unwrap();
                    for index in 0..count {
                        let frame = port.frame(index);
                        flows.see(*link, frame);
                        trunk.send(&[&frame[..TAG_AT], &[0x81, 0, a, b], &frame[TAG_AT..]]);
                    }
                    port.flush();
                    all += count;
                }
                trunk.flush();
                if all == 0 {
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
        };
        Trunk { stop, thread: Some(std::thread::spawn(run)) }
    }
}

impl Drop for Trunk {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
