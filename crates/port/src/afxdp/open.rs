//! Opens devices, programs and sockets.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::hand_over::EnteringSockets;
use super::next_hop::Resolver;
use super::parse::Ports;
use super::program::{Steering, Wanted};
use super::socket::{QueueConfig, XdpSocket};
use super::{AfxdpConfig, AfxdpCounters, AfxdpError, AfxdpUnderlay, BATCH, MAX_MTU, XdpMode};
use crate::bpf;
use crate::device::{self, Device};
use crate::udp::{UdpConfig, UdpUnderlay};
use crate::underlay::TxBatch;

/// Maximum queues of a device that get AF_XDP sockets; the kernel serves the others, through the UDP sockets.
pub(super) const MAX_QUEUES: u32 = 64;
/// Headroom that the kernel keeps in front of a received frame, bytes (`XDP_PACKET_HEADROOM`).
const KERNEL_HEADROOM: usize = 256;
/// Length of an Ethernet header, bytes.
pub(super) const ETHERNET: usize = 14;
/// How long to wait for a device held by a process that has just ended: the kernel cleans up asynchronously.
const PATIENCE: Duration = Duration::from_secs(2);

pub(super) fn open_all(config: &AfxdpConfig) -> Result<Vec<AfxdpUnderlay>, AfxdpError> {
    check(config)?;
    let fallbacks = UdpUnderlay::open_all(&udp(config))?;
    let devices = find(config)?;
    let mut steering = Vec::new();
    let mut entering = Vec::new();
    for (number, device) in devices.iter().enumerate() {
        let mut attached = attach(config, device)?;
        let queues = open_queues(config, device)?;
        attached.queues = queues.len() as u32;
        tracing::info!(device = device.name, queues = queues.len(), mode = attached.mode(), "AF_XDP");
        entering.extend(EnteringSockets::of(number, device, queues));
        steering.push(attached);
    }
    let mut underlays = assemble(config, fallbacks, &devices, steering)?;
    for sockets in entering {
        if let Some(underlay) = underlays.get_mut(usize::from(sockets.worker())) {
            underlay.enter(sockets)?;
        }
    }
    Ok(underlays)
}

/// The configuration of the UDP sockets.
pub(super) fn udp(config: &AfxdpConfig) -> UdpConfig {
    UdpConfig { gso: false, gro: false, ..config.udp.clone() }
}

/// The devices of the underlay's addresses.
pub(super) fn find(config: &AfxdpConfig) -> Result<Vec<Device>, AfxdpError> {
    device::find(&config.udp.local).map_err(AfxdpError::Netlink)?.map_err(AfxdpError::NoDevice)
}

/// The underlays of all workers, with UDP sockets only.
pub(super) fn assemble(
    config: &AfxdpConfig,
    fallbacks: Vec<UdpUnderlay>,
    devices: &[Device],
    steering: Vec<Steering>,
) -> Result<Vec<AfxdpUnderlay>, AfxdpError> {
    let steering = Arc::new(steering);
    let indexes = devices.iter().map(|d| d.index).collect();
    let resolver = Arc::new(Resolver::start(indexes).map_err(AfxdpError::Netlink)?);
    let ports = Ports { bifrost: config.udp.bifrost_port, vxlan: config.udp.vxlan_port };
    let of_worker = |fallback| AfxdpUnderlay {
        spent: Vec::new(),
        sockets: Vec::new(),
        places: Vec::new(),
        exits: devices.iter().map(|_| None).collect(),
        lanes: Vec::new(),
        fallback,
        aside: TxBatch::default(),
        arrived: Vec::with_capacity(BATCH),
        fell_back: false,
        turn: 0,
        received_at_ns: 0,
        ports,
        workers: config.udp.workers,
        counters: AfxdpCounters::default(),
        resolver: Arc::clone(&resolver),
        steering: Arc::clone(&steering),
    };
    Ok(fallbacks.into_iter().map(of_worker).collect())
}

pub(super) fn check(config: &AfxdpConfig) -> Result<(), AfxdpError> {
    let problem = if config.mtu > MAX_MTU {
        format!("an MTU of {} does not fit AF_XDP frames; at most {MAX_MTU} do", config.mtu)
    } else if !config.frames.is_power_of_two() || !(64..=32768).contains(&config.frames) {
        format!("{} frames; give a power of two, 64 to 32768", config.frames)
    } else {
        return Ok(());
    };
    Err(AfxdpError::Config(problem))
}

/// Bytes of a frame's chunk: the kernel's headroom and a whole frame.
fn chunk_bytes(config: &AfxdpConfig) -> usize {
    if KERNEL_HEADROOM + ETHERNET + usize::from(config.mtu) <= 2048 { 2048 } else { 4096 }
}

/// What the XDP program redirects.
pub(super) fn wanted(config: &AfxdpConfig) -> Wanted {
    Wanted {
        local: config.udp.local.clone(),
        bifrost_port: config.udp.bifrost_port,
        vxlan_port: config.udp.vxlan_port,
        workers: config.udp.workers,
        longest_frame: (chunk_bytes(config) - KERNEL_HEADROOM) as u32,
    }
}

/// Queue `queue` of a device of which `queues` queues are used, and the workers that send through it: worker n sends
/// through queue n modulo the number of queues.
pub(super) fn queue(config: &AfxdpConfig, device: &Device, queue: u32, queues: u32) -> (QueueConfig, Vec<u16>) {
    let (chunk_bytes, frames) = (chunk_bytes(config), config.frames);
    let senders = (0..config.udp.workers).filter(|w| u32::from(*w) % queues == queue).collect();
    (QueueConfig { device: device.index, queue, chunk_bytes, frames }, senders)
}

/// Attaches a program to a device.
pub(super) fn attach(config: &AfxdpConfig, device: &Device) -> Result<Steering, AfxdpError> {
    let modes: &[bpf::XdpMode] = match config.mode {
        XdpMode::Auto => &[bpf::XdpMode::Native, bpf::XdpMode::Generic],
        XdpMode::Native => &[bpf::XdpMode::Native],
        XdpMode::Generic => &[bpf::XdpMode::Generic],
    };
    let queues = device.queues.min(MAX_QUEUES);
    retry(|| Steering::attach(&wanted(config), device.index, queues, modes))
        .map_err(|source| AfxdpError::Attach { device: device.name.clone(), source })
}

/// The sockets of a device, by queue and worker.
///
/// Finds the number of queues in use from the last one down: unused queues cannot be bound.
pub(super) fn open_queues(config: &AfxdpConfig, device: &Device) -> Result<Vec<Vec<XdpSocket>>, AfxdpError> {
    let workers = config.udp.workers;
    let (mut found, mut queues) = (Vec::new(), device.queues.min(MAX_QUEUES));
    for queue in (0..queues).rev() {
        let (of_queue, senders) = self::queue(config, device, queue, queues);
        match retry(|| XdpSocket::open_all(of_queue, workers, &senders)) {
            Ok(sockets) => found.push(sockets),
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) && found.is_empty() && queue > 0 => queues = queue,
            Err(source) => return Err(AfxdpError::Socket { device: device.name.clone(), queue, source }),
        }
    }
    found.reverse();
    Ok(found)
}

/// Retries for a while if the resource is busy.
fn retry<T>(mut open: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let until = Instant::now() + PATIENCE;
    loop {
        match open() {
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(20));
            }
            result => return result,
        }
    }
}
