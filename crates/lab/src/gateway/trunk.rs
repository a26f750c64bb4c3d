//! The other end of a pipeline's device, which carries a VLAN for each link: a switch that connects each VLAN to a port
//! and removes the tag. It needs no VLAN devices or filters in the kernel.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result};
use bifrost_port::raw::{RawConfig, RawDevice, RawMode};

use super::probes::FLOWS;
use crate::netns::Namespace;

/// The VLAN of link 0. That of link n is this plus n.
pub const VLAN: u16 = 100;
const TAG_AT: usize = 12;
const TAG_LEN: usize = 4;
const VXLAN_PORT: [u8; 2] = 4789u16.to_be_bytes();
/// Interval at which devices are polled while nothing arrives.
const PAUSE: Duration = Duration::from_micros(100);

/// The link by which the probes of each flow reach the gateway.
#[derive(Debug)]
pub struct FlowLinks(Vec<AtomicUsize>);

impl Default for FlowLinks {
    fn default() -> Self {
        FlowLinks((0..FLOWS).map(|_| AtomicUsize::new(usize::MAX)).collect())
    }
}

impl FlowLinks {
    /// The link of each flow; `usize::MAX`: none of its packets has arrived.
    pub fn get(&self) -> Vec<usize> {
        self.0.iter().map(|link| link.load(Ordering::Relaxed)).collect()
    }

    fn see(&self, link: usize, frame: &[u8]) {
        // The frame has no tag and no IP options. The number of the probe follows all headers.
        if frame.get(36..38) == Some(&VXLAN_PORT[..])
            && let Some(number) = frame.last_chunk()
        {
            self.0[u32::from_be_bytes(*number) as usize % FLOWS].store(link, Ordering::Relaxed);
        }
    }
}

/// A running trunk. Dropping it stops it.
#[derive(Debug)]
pub struct Trunk {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Trunk {
    /// Connects a device of a namespace with ports, each of which has the number of its link.
    ///
    /// # Errors
    /// A device cannot be opened.
    pub fn start(
        namespace: &Namespace,
        trunk: String,
        ports: Vec<(usize, String)>,
        flows: Arc<FlowLinks>,
    ) -> Result<Self> {
        let open = |device: String| {
            namespace.enter(move || {
                let config = RawConfig { device, mode: RawMode::Packet, longest: 1700, frames: 8192 };
                RawDevice::open(&config).context("opening a port of a trunk")
            })
        };
        let trunk = open(trunk)?;
        let ports = ports.into_iter().map(|(link, device)| Ok((link, open(device)?))).collect::<Result<Vec<_>>>()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = Arc::clone(&stop);
        let thread = namespace.spawn(move || carry(trunk, ports, &flows, &stopping))?;
        Ok(Trunk { stop, thread: Some(thread) })
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

fn carry(mut trunk: RawDevice, mut ports: Vec<(usize, RawDevice)>, flows: &FlowLinks, stop: &AtomicBool) -> Result<()> {
    while !stop.load(Ordering::Relaxed) {
        let mut all = trunk.receive()?;
        for index in 0..all {
            let frame = trunk.frame(index);
            let Some([0x81, 0, a, b]) = frame.get(TAG_AT..TAG_AT + TAG_LEN) else { continue };
            let link = usize::from((u16::from_be_bytes([*a, *b]) & 0xfff).wrapping_sub(VLAN));
            if let Some((_, port)) = ports.iter_mut().find(|(number, _)| *number == link) {
                port.send(&[&frame[..TAG_AT], &frame[TAG_AT + TAG_LEN..]]);
            }
        }
        for (link, port) in &mut ports {
            let [a, b] = (VLAN + *link as u16).to_be_bytes();
            let count = port.receive()?;
            for index in 0..count {
                let frame = port.frame(index);
                flows.see(*link, frame);
                if let Some((macs, rest)) = frame.split_at_checked(TAG_AT) {
                    trunk.send(&[macs, &[0x81, 0, a, b], rest]);
                }
            }
            port.flush();
            all += count;
        }
        trunk.flush();
        if all == 0 {
            std::thread::sleep(PAUSE);
        }
    }
    Ok(())
}
