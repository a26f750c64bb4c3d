//! Opens devices, programs and sockets.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::next_hop::Resolver;
use super::parse::Ports;
use super::program::{Steering, Wanted};
use super::socket::{QueueConfig, XdpSocket};
use super::{AfxdpConfig, AfxdpCounters, AfxdpError, AfxdpUnderlay, BATCH, Exit, MAX_MTU, XdpMode};
use crate::bpf;
use crate::device::{self, Device};
use crate::udp::{UdpConfig, UdpUnderlay};
use crate::underlay::TxBatch;

/// Maximum queues of a device that get AF_XDP sockets; the kernel serves the others, through the UDP sockets.
const MAX_QUEUES: u32 = 64;
/// Headroom that the kernel keeps in front of a received frame, bytes (`XDP_PACKET_HEADROOM`).
const KERNEL_HEADROOM: usize = 256;
/// Length of an Ethernet header, bytes.
const ETHERNET: usize = 14;
/// How long to wait for a device held by a process that has just ended: the kernel cleans up asynchronously.
const PATIENCE: Duration = Duration::from_secs(2);

pub(super) fn open_all(config: &AfxdpConfig) -> Result<Vec<AfxdpUnderlay>, AfxdpError> {
    check(config)?;
    let udp = UdpConfig { gso: false, gro: false, ..config.udp.clone() };
    let fallbacks = UdpUnderlay::open_all(&udp)?;
    let workers = udp.workers;
    let devices = device::find(&udp.local).map_err(AfxdpError::Netlink)?.map_err(AfxdpError::NoDevice)?;
    let chunk_bytes = if KERNEL_HEADROOM + ETHERNET + usize::from(config.mtu) <= 2048 { 2048 } else { 4096 };
    let mut steering = Vec::new();
    // By worker: sockets, and by device the index of the TX socket.
    let mut sockets: Vec<Vec<XdpSocket>> = (0..workers).map(|_| Vec::new()).collect();
    let mut exits: Vec<Vec<Exit>> = (0..workers).map(|_| Vec::new()).collect();
    for device in &devices {
        let attached = attach(config, device, chunk_bytes)?;
        let queues = open_queues(config, device, chunk_bytes)?;
        tracing::info!(
            device = device.name,
            queues = queues.len(),
            mode = if attached.native { "native" } else { "generic" },
            "AF_XDP"
        );
        for (queue, of_queue) in (0u32..).zip(queues) {
            for (worker, socket) in of_queue.into_iter().enumerate() {
                let index = queue * u32::from(workers) + worker as u32;
                bpf::set_socket(attached.sockets.as_fd(), index, socket.as_fd())
                    .map_err(|source| AfxdpError::Socket { device: device.name.clone(), queue, source })?;
                if socket.sends() {
                    let room = socket.queue.umem.chunk_bytes();
                    let longest = room.min(ETHERNET + device.mtu as usize);
                    exits[worker].push(Exit { socket: sockets[worker].len(), mac: device.mac, longest });
                }
                sockets[worker].push(socket);
            }
        }
        steering.push(attached);
    }
    let steering = Arc::new(steering);
    let indexes = devices.iter().map(|d| d.index).collect();
    let resolver = Arc::new(Resolver::start(indexes).map_err(AfxdpError::Netlink)?);
    let ports = Ports { bifrost: udp.bifrost_port, vxlan: udp.vxlan_port };
    let parts = fallbacks.into_iter().zip(sockets).zip(exits);
    Ok(parts
        .map(|((fallback, sockets), exits)| AfxdpUnderlay {
            spent: sockets.iter().map(|_| Vec::with_capacity(BATCH)).collect(),
            sockets,
            exits,
            lanes: Vec::new(),
            fallback,
            aside: TxBatch::default(),
            arrived: Vec::with_capacity(BATCH),
            fell_back: false,
            turn: 0,
            received_at_ns: 0,
            ports,
            counters: AfxdpCounters::default(),
            resolver: Arc::clone(&resolver),
            _steering: Arc::clone(&steering),
        })
        .collect())
}

fn check(config: &AfxdpConfig) -> Result<(), AfxdpError> {
    let problem = if config.mtu > MAX_MTU {
        format!("an MTU of {} does not fit AF_XDP frames; at most {MAX_MTU} do", config.mtu)
    } else if !config.frames.is_power_of_two() || !(64..=32768).contains(&config.frames) {
        format!("{} frames; give a power of two, 64 to 32768", config.frames)
    } else {
        return Ok(());
    };
    Err(AfxdpError::Config(problem))
}

fn attach(config: &AfxdpConfig, device: &Device, chunk_bytes: usize) -> Result<Steering, AfxdpError> {
    let wanted = Wanted {
        local: config.udp.local.clone(),
        bifrost_port: config.udp.bifrost_port,
        vxlan_port: config.udp.vxlan_port,
        workers: config.udp.workers,
        longest_frame: (chunk_bytes - KERNEL_HEADROOM) as u32,
    };
    let modes: &[bpf::XdpMode] = match config.mode {
        XdpMode::Auto => &[bpf::XdpMode::Native, bpf::XdpMode::Generic],
        XdpMode::Native => &[bpf::XdpMode::Native],
        XdpMode::Generic => &[bpf::XdpMode::Generic],
    };
    let queues = device.queues.min(MAX_QUEUES);
    retry(|| Steering::attach(&wanted, device.index, queues, modes))
        .map_err(|source| AfxdpError::Attach { device: device.name.clone(), source })
}

/// The sockets of a device, by queue and worker.
///
/// Finds the number of queues in use from the last one down: unused queues cannot be bound.
fn open_queues(config: &AfxdpConfig, device: &Device, chunk_bytes: usize) -> Result<Vec<Vec<XdpSocket>>, AfxdpError> {
    let workers = config.udp.workers;
    let (mut found, mut queues) = (Vec::new(), device.queues.min(MAX_QUEUES));
    for queue in (0..queues).rev() {
        let of_queue = QueueConfig { device: device.index, queue, chunk_bytes, frames: config.frames };
        // Worker n sends through queue n modulo the number of queues.
        let senders: Vec<u16> = (0..workers).filter(|w| u32::from(*w) % queues == queue).collect();
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
