//! A switch port with a VLAN: frames to the gateway get the tag, and frames from it must have the tag, which is
//! removed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use bifrost_port::raw::{RawConfig, RawDevice, RawMode};

use crate::common::Net;

/// Offset of the tag in a frame: after both MAC addresses.
const AT: usize = 12;

/// Runs until dropped.
pub(super) struct Trunk {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Trunk {
    /// Between the bridge and the third host's device.
    pub(super) fn start(bridges: &Net, vlan: u16) -> Trunk {
        bridges.ip("link set l0h2 nomaster\nlink add trunk mtu 1700 type veth peer name untagged mtu 1700\n\
             link set untagged master b0 up\nlink set trunk up addrgenmode none\nlink set l0h2 addrgenmode none\n");
        let [a, b] = vlan.to_be_bytes();
        let tag = [0x81, 0, a, b];
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = bridges.spawn(move || {
            let open = |device: &str| {
                let config =
                    RawConfig { device: device.to_owned(), mode: RawMode::Packet, longest: 1722, frames: 4096 };
                RawDevice::open(&config).unwrap()
            };
            let (mut inside, mut outside) = (open("trunk"), open("l0h2"));
            while !stopped.load(Ordering::Relaxed) {
                let to_gateway = inside.receive().unwrap();
                for index in 0..to_gateway {
                    let (macs, rest) = inside.frame(index).split_at(AT);
                    outside.send(&[macs, &tag, rest]);
                }
                outside.flush();
                let from_gateway = outside.receive().unwrap();
                for index in 0..from_gateway {
                    let (macs, rest) = outside.frame(index).split_at(AT);
                    // The port only has this VLAN: other frames are dropped.
                    if let Some(rest) = rest.strip_prefix(&tag) {
                        inside.send(&[macs, rest]);
                    }
                }
                inside.flush();
                if to_gateway + from_gateway == 0 {
                    std::thread::sleep(Duration::from_micros(50));
                }
            }
        });
        Trunk { stop, thread: Some(thread) }
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
