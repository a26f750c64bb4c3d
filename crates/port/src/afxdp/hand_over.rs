//! Hand-over to another process, without a frame lost and with an XDP program attached throughout.
//!
//! AF_XDP sockets themselves stay behind. Another process cannot map the rings of a bound socket before Linux 6.4, and
//! a queue accepts other memory only when all its sockets are closed. But a frame without a socket passes to the
//! kernel, and so to the UDP sockets, which are handed over with what they hold. Therefore frames take this detour
//! during a hand-over:
//!
//! ```text
//!  former process                                   next process
//!   | steer(false): removes its sockets from the     | adopt_all: takes links and UDP sockets; loads its program, and
//!   | program's map; empties their rings             | makes sockets with memory, all but bound
//!   | stops                                          | works with UDP sockets
//!   | leave: closes its sockets                      | own; WaitingSockets::bind, once the kernel has freed the queues
//!   |                                                | enter: workers use the sockets, which are in a new map
//!   |                                                | WaitingSockets::steer: its program replaces the former one
//! ```
//!
//! Until `leave`, `steer(true)` makes the former process continue as before.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use super::open::{self, ETHERNET, MAX_QUEUES};
use super::program::Steering;
use super::socket::{QueueConfig, XdpSocket};
use super::{AfxdpConfig, AfxdpError, AfxdpUnderlay, BATCH, Exit, XdpMode};
use crate::bpf;
use crate::device::Device;
use crate::udp::{Sockets, UdpUnderlay};

/// A device whose frames another process takes over.
#[derive(Debug)]
pub struct HandedDevice {
    /// Its interface index.
    pub device: u32,
    /// Number of its queues that have sockets.
    pub queues: u32,
    /// Whether the XDP program runs in the driver; for the log.
    pub native: bool,
    /// The link that attaches the program.
    pub link: OwnedFd,
}

/// Sockets that wait until the former process's are closed. Belongs to no worker.
#[derive(Debug)]
pub struct WaitingSockets {
    devices: Vec<WaitingDevice>,
    /// By device, shared with the workers.
    steering: Arc<Vec<Steering>>,
}

#[derive(Debug)]
struct WaitingDevice {
    number: usize,
    device: Device,
    /// Taken when all are bound.
    queues: Vec<WaitingQueue>,
    /// Takes the place of the former process's program. `None`: its program was attached when it was loaded.
    program: Option<OwnedFd>,
}

#[derive(Debug)]
struct WaitingQueue {
    config: QueueConfig,
    sockets: Vec<XdpSocket>,
    bound: usize,
}

/// Bound sockets of one device and worker, for [`AfxdpUnderlay::enter`].
#[derive(Debug)]
pub struct EnteringSockets {
    worker: u16,
    number: usize,
    device: String,
    mac: [u8; 6],
    mtu: u32,
    /// With their indexes in the program's map.
    sockets: Vec<(u32, XdpSocket)>,
}

/// Sockets that a worker has left. Dropping this closes them, which takes the kernel milliseconds for each.
#[derive(Debug)]
pub struct ClosingSockets {
    _sockets: Vec<XdpSocket>,
}

impl AfxdpUnderlay {
    /// Takes over from another process: `sockets` by worker, of which it may have had another number, and the `handed`
    /// devices. The workers use the UDP sockets until they [`enter`](Self::enter) the sockets that wait. Devices that the
    /// other process did not use get a program at once, which passes all frames until then; those that are not used any
    /// more are left to it.
    ///
    /// # Errors
    /// What was handed over is invalid, a program would have to run elsewhere than that of the other process, or the
    /// kernel refuses the program or the sockets.
    pub fn adopt_all(
        config: &AfxdpConfig,
        sockets: Vec<Sockets>,
        handed: Vec<HandedDevice>,
    ) -> Result<(Vec<Self>, WaitingSockets), AfxdpError> {
        open::check(config)?;
        let fallbacks = UdpUnderlay::adopt_all(&open::udp(config), sockets)?;
        let devices = open::find(config)?;
        let mut handed = handed;
        let (mut steering, mut waiting) = (Vec::new(), Vec::new());
        for (number, device) in devices.iter().enumerate() {
            let of_device = |what: String| AfxdpError::HandedOver(format!("{}: {what}", device.name));
            let most = device.queues.min(MAX_QUEUES);
            let known = handed.iter().position(|handed| handed.device == device.index).map(|at| handed.remove(at));
            let Some(handed) = known else {
                // Nobody else uses its queues.
                let mut attached = open::attach(config, device)?;
                let opened = open::open_queues(config, device)?;
                attached.queues = opened.len() as u32;
                let bound = (0..).zip(opened).map(|(queue, sockets)| {
                    let (config, _) = open::queue(config, device, queue, attached.queues);
                    WaitingQueue { config, bound: sockets.len(), sockets }
                });
                waiting.push(WaitingDevice { number, device: device.clone(), queues: bound.collect(), program: None });
                steering.push(attached);
                continue;
            };
            if !(1..=most).contains(&handed.queues) {
                return Err(of_device(format!("{} queues; it has {most}", handed.queues)));
            }
            let (mode, other) = if handed.native { ("native", XdpMode::Generic) } else { ("generic", XdpMode::Native) };
            if config.mode == other {
                let hint = "an upgrade cannot change underlay.xdp_mode of a device";
                return Err(of_device(format!("its XDP program runs in mode {mode}; {hint}")));
            }
            let count = handed.queues;
            let adopted = Steering::adopt(&open::wanted(config), handed);
            let (adopted, program) = adopted.map_err(|error| of_device(error.to_string()))?;
            let mut queues = Vec::new();
            for queue in 0..count {
                let (of_queue, senders) = open::queue(config, device, queue, count);
                let sockets = XdpSocket::prepare_all(of_queue, config.udp.workers, &senders)
                    .map_err(|source| AfxdpError::Socket { device: device.name.clone(), queue, source })?;
                queues.push(WaitingQueue { config: of_queue, sockets, bound: 0 });
            }
            steering.push(adopted);
            waiting.push(WaitingDevice { number, device: device.clone(), queues, program: Some(program) });
        }
        let underlays = open::assemble(config, fallbacks, &devices, steering)?;
        let steering = underlays.first().map(|underlay| Arc::clone(&underlay.steering)).unwrap_or_default();
        Ok((underlays, WaitingSockets { devices: waiting, steering }))
    }

    /// Duplicates of the descriptors of the UDP sockets.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn sockets(&self) -> io::Result<Sockets> {
        self.fallback.sockets()
    }

    /// Its UDP sockets.
    pub(crate) fn fallback_mut(&mut self) -> &mut UdpUnderlay {
        &mut self.fallback
    }

    /// The devices of all workers, for [`adopt_all`](Self::adopt_all) in another process.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn devices(&self) -> io::Result<Vec<HandedDevice>> {
        let of_device = |steering: &Steering| {
            let Steering { link, native, device, queues, .. } = steering;
            Ok(HandedDevice { device: *device, queues: *queues, native: *native, link: link.duplicate()? })
        };
        self.steering.iter().map(of_device).collect()
    }

    /// Directs frames to this worker's AF_XDP sockets, or past them to its UDP sockets. Frames that have arrived stay
    /// in the rings.
    ///
    /// # Errors
    /// The kernel refuses; some sockets may get frames and others not.
    pub fn steer(&self, to_frames: bool) -> io::Result<()> {
        for (socket, (device, index)) in self.sockets.iter().zip(&self.places) {
            let map = self.steering[*device].sockets.as_fd();
            if to_frames {
                bpf::set_socket(map, *index, socket.as_fd())?;
            } else {
                bpf::remove_socket(map, *index)?;
            }
        }
        Ok(())
    }

    /// Whether frames have arrived that were not received yet.
    pub fn has_frames(&self) -> bool {
        self.sockets.iter().any(XdpSocket::has_received)
    }

    /// Makes the kernel send queued frames. Returns whether it has taken all of them.
    pub fn flush(&mut self) -> bool {
        let exits = self.exits.iter().flatten().map(|exit| exit.socket);
        let mut is_done = true;
        for socket in exits {
            self.counters.tx_system_calls += self.sockets[socket].flush();
            is_done &= !self.sockets[socket].has_unsent();
        }
        is_done
    }

    /// The devices now belong to this process: their programs are detached when its workers end.
    pub fn own(&self) {
        self.steering.iter().for_each(|steering| steering.link.own());
    }

    /// Leaves the devices to another process. This worker keeps only its UDP sockets.
    pub fn leave(&mut self) -> ClosingSockets {
        self.steering.iter().for_each(|steering| steering.link.leave());
        self.counters = self.counters();
        self.exits.fill_with(|| None);
        self.arrived.clear();
        self.spent.clear();
        self.places.clear();
        ClosingSockets { _sockets: std::mem::take(&mut self.sockets) }
    }

    /// Uses further sockets, and lets the XDP program redirect to them. [`fds`](crate::PolledUnderlay::fds) has
    /// changed afterwards.
    ///
    /// # Errors
    /// The kernel refuses; then some of the sockets are not used.
    pub fn enter(&mut self, entering: EnteringSockets) -> Result<(), AfxdpError> {
        let EnteringSockets { number, device, mac, mtu, sockets, .. } = entering;
        let Some(steering) = self.steering.get(number) else { return Ok(()) };
        for (index, socket) in sockets {
            if socket.sends() {
                let longest = socket.queue.umem.chunk_bytes().min(ETHERNET + mtu as usize);
                self.exits[number] = Some(Exit { socket: self.sockets.len(), mac, longest });
            }
            let result = bpf::set_socket(steering.sockets.as_fd(), index, socket.as_fd());
            self.sockets.push(socket);
            self.places.push((number, index));
            self.spent.push(Vec::with_capacity(BATCH));
            let queue = index / u32::from(self.workers);
            result.map_err(|source| AfxdpError::Socket { device: device.clone(), queue, source })?;
        }
        Ok(())
    }
}

impl EnteringSockets {
    /// The worker that uses them.
    pub fn worker(&self) -> u16 {
        self.worker
    }

    /// The sockets of device `number`, given by queue and worker.
    pub(super) fn of(number: usize, device: &Device, queues: Vec<Vec<XdpSocket>>) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for (queue, of_queue) in (0u32..).zip(queues) {
            let workers = of_queue.len() as u32;
            for (worker, socket) in (0u16..).zip(of_queue) {
                if queue == 0 {
                    let (name, mac, mtu) = (device.name.clone(), device.mac, device.mtu);
                    all.push(Self { worker, number, device: name, mac, mtu, sockets: Vec::new() });
                }
                all[usize::from(worker)].sockets.push((queue * workers + u32::from(worker), socket));
            }
        }
        all
    }
}

impl WaitingSockets {
    /// Binds what can be bound now. Returns the sockets of devices that are complete, and an error of another device,
    /// except that the former process still uses it. Call [`steer`](Self::steer) after the workers have entered them.
    pub fn bind(&mut self) -> (Vec<EnteringSockets>, Option<AfxdpError>) {
        let (mut entering, mut failed) = (Vec::new(), None);
        for WaitingDevice { number, device, queues, .. } in &mut self.devices {
            let mut bind = |WaitingQueue { config, sockets, bound }: &mut WaitingQueue| {
                let result = XdpSocket::bind_all(sockets, *config, bound);
                result.map_err(|source| (config.queue, source))
            };
            match queues.iter_mut().try_for_each(&mut bind) {
                Ok(()) => {
                    let sockets = queues.drain(..).map(|queue| queue.sockets).collect();
                    entering.extend(EnteringSockets::of(*number, device, sockets));
                }
                Err((_, source)) if source.raw_os_error() == Some(libc::EBUSY) => {}
                Err((queue, source)) => {
                    failed = Some(AfxdpError::Socket { device: device.name.clone(), queue, source });
                }
            }
        }
        (entering, failed)
    }

    /// Lets the programs of devices whose sockets have been entered replace those of the former process.
    ///
    /// # Errors
    /// The kernel refuses one of them. Try again later.
    pub fn steer(&mut self) -> Result<(), AfxdpError> {
        let mut result = Ok(());
        let steering = &self.steering;
        self.devices.retain(|waiting| {
            if !waiting.queues.is_empty() {
                return true;
            }
            let steering = &steering[waiting.number];
            let device = waiting.device.name.clone();
            let replaced = waiting.program.as_ref().map_or(Ok(()), |program| steering.link.replace(program.as_fd()));
            match replaced {
                Ok(()) => {
                    tracing::info!(device, queues = steering.queues, mode = steering.mode(), "AF_XDP");
                    false
                }
                Err(source) => {
                    result = Err(AfxdpError::Attach { device, source });
                    true
                }
            }
        });
        result
    }

    /// Whether all devices have been taken over.
    pub fn is_done(&self) -> bool {
        self.devices.is_empty()
    }
}
