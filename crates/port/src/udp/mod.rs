//! The underlay over ordinary UDP sockets, with segmentation and coalescing done by the kernel.
//!
//! Each local address has two receive sockets (BIFROST port and VXLAN port), and each path source port one transmit
//! socket. A batch costs one system call per ready receive socket and one per source port that sends.
//!
//! With several workers, the receive sockets of a port form a reuseport group whose BPF program computes
//! [`crate::steer`]; the group's order is the order of binding, so workers are opened in order, worker 0 first
//! ([`UdpUnderlay::open_all`] does).

mod counters;
mod group;
mod program;
mod receive;
mod socket;
mod transmit;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd};

pub(crate) use bifrost_udp::set_int;
pub use counters::UdpCounters;

use crate::underlay::{Datagram, LaneId, PolledUnderlay, Service, TxBatch, Underlay};
use receive::Receiver;
use transmit::Transmitter;

/// How to open a [`UdpUnderlay`].
#[derive(Clone, Debug)]
pub struct UdpConfig {
    /// Local underlay addresses, 1..=8.
    pub local: Vec<IpAddr>,
    /// Port for incoming BIFROST packets; default 4794.
    pub bifrost_port: u16,
    /// Port for incoming plain VXLAN packets; default 4789.
    pub vxlan_port: u16,
    /// This worker's number, below `workers`.
    pub worker: u16,
    /// How many workers share the ports, 1..=32.
    pub workers: u16,
    /// Use UDP segmentation offload where the kernel supports it.
    pub gso: bool,
    /// Let the kernel coalesce incoming datagrams, where it supports that.
    pub gro: bool,
    /// Size of each receive socket's buffer, bytes; default 8 MiB. Above `net.core.rmem_max` it needs CAP_NET_ADMIN.
    pub receive_buffer_bytes: usize,
    /// Size of each transmit socket's buffer, bytes; default 4 MiB. Above `net.core.wmem_max` it needs CAP_NET_ADMIN.
    pub send_buffer_bytes: usize,
    /// Messages per receive batch, 1..=1024; default 16. Each has a 64 KiB buffer, which uses memory once touched.
    pub receive_messages: usize,
}

/// Why an underlay or a lane cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum UdpError {
    /// The configuration is invalid.
    #[error("underlay: {0}")]
    Config(String),
    /// The local address and port cannot be bound.
    #[error("cannot bind UDP {address}: {source}; {hint}")]
    Bind {
        /// The address and port.
        address: SocketAddr,
        /// The kernel's error.
        source: io::Error,
        /// What to do.
        hint: &'static str,
    },
    /// A socket was created but could not be set up.
    #[error("cannot set up the UDP socket on {address}: {source}; Linux 5.0 or later is needed")]
    Option {
        /// The socket's address.
        address: SocketAddr,
        /// The kernel's error.
        source: io::Error,
    },
    /// Any other error.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The sockets of one worker.
#[derive(Debug, Default)]
pub struct Sockets {
    /// Receive sockets, in the order of opening.
    pub receive: Vec<OwnedFd>,
    /// Transmit sockets.
    pub transmit: Vec<OwnedFd>,
}

/// The underlay of one worker, over UDP sockets.
pub struct UdpUnderlay {
    config: UdpConfig,
    receiver: Receiver,
    transmitter: Transmitter,
    counters: UdpCounters,
    /// Receive sockets that are bound when it begins: index, address and service.
    unbound: Vec<(usize, IpAddr, Service)>,
    /// The process from which it adopts sockets has another number of workers.
    recounted: bool,
}

impl UdpUnderlay {
    /// Opens the receive sockets of one worker. With several workers, open worker 0 first and the others in order.
    pub fn open(config: UdpConfig) -> Result<Self, UdpError> {
        config.check()?;
        let open = |(address, service)| {
            let socket = socket::receive(&config, address, service)?;
            socket::bind_receive(&config, &socket, address, service, false)?;
            Ok((socket, service))
        };
        let sockets = config.bindings().map(open).collect::<Result<_, UdpError>>()?;
        let receiver = Receiver::new(sockets, Vec::new(), config.receive_messages, Some(0))?;
        let (transmitter, counters) = (Transmitter::default(), UdpCounters::default());
        Ok(Self { config, receiver, transmitter, counters, unbound: Vec::new(), recounted: false })
    }

    /// [Adopts](Self::adopt) the sockets of all workers of another process, in order. This process may have another
    /// number of workers, `config.workers`; `config.worker` is ignored. New workers open sockets, and what the sockets of
    /// workers hold that no longer exist is received until [`close_retired`](Self::close_retired).
    ///
    /// # Errors
    /// The same as of [`adopt`](Self::adopt).
    pub fn adopt_all(config: &UdpConfig, mut handed: Vec<Sockets>) -> Result<Vec<Self>, UdpError> {
        let workers = usize::from(config.workers.max(1));
        let recounted = handed.len() != workers;
        let without_worker = handed.split_off(workers.min(handed.len()));
        handed.resize_with(workers, Sockets::default);
        for (at, sockets) in without_worker.into_iter().enumerate() {
            handed[at % workers].receive.extend(sockets.receive);
        }
        let of_worker = |(worker, sockets)| {
            let adopted = Self::adopt(UdpConfig { worker, ..config.clone() }, sockets)?;
            Ok(Self { recounted, ..adopted })
        };
        (0..).zip(handed).map(of_worker).collect()
    }

    /// Takes over the [sockets](Self::sockets) of another process's worker with the same number, and number of workers.
    /// Queued datagrams stay; while both processes receive, each gets some. With other addresses or ports, sockets that
    /// fit are used, and others opened; those that do not fit are read until [`close_retired`](Self::close_retired).
    /// Before it receives, [`begin`](Self::begin) is necessary, in the order of the workers.
    ///
    /// # Errors
    /// Something else than UDP sockets was handed over.
    pub fn adopt(config: UdpConfig, Sockets { receive, transmit }: Sockets) -> Result<Self, UdpError> {
        config.check()?;
        let mut handed = Vec::with_capacity(receive.len());
        for (fd, service) in receive.into_iter().zip([Service::Bifrost, Service::Vxlan].into_iter().cycle()) {
            let (socket, bound) = socket::adopt(fd)?;
            handed.push((socket, bound, service));
        }
        let (mut sockets, mut unbound) = (Vec::new(), Vec::new());
        for (index, (address, service)) in config.bindings().enumerate() {
            let wanted = SocketAddr::new(address, config.port(service));
            match handed.iter().position(|(_, bound, of)| (*bound, *of) == (wanted, service)) {
                Some(at) => sockets.push((handed.remove(at).0, service)),
                None => {
                    sockets.push((socket::receive(&config, address, service)?, service));
                    unbound.push((index, address, service));
                }
            }
        }
        let transmit = transmit.into_iter().map(socket::adopt).collect::<Result<Vec<_>, _>>()?;
        if config.workers > 1 {
            // Workers share the source ports. A single worker's former sockets did not allow that.
            transmit.iter().try_for_each(|(socket, _)| socket.set_reuse_port(true))?;
        }
        let retired = handed.into_iter().map(|(socket, _, service)| (socket, service)).collect();
        let receiver = Receiver::new(sockets, retired, config.receive_messages, None)?;
        let transmitter = Transmitter::of_handed(transmit);
        Ok(Self { config, receiver, transmitter, counters: UdpCounters::default(), unbound, recounted: false })
    }

    /// Makes the sockets receive what the configuration says, after the other process has stopped to receive.
    /// `readdressed`: the local addresses may differ from that process's. Guests wait for this, and the kernel may need
    /// milliseconds to replace a filter.
    ///
    /// # Errors
    /// A port is in use, or the kernel refuses. The other process can [`resume`](Self::resume).
    pub fn begin(&mut self, readdressed: bool) -> Result<(), UdpError> {
        self.receiver.own().for_each(|socket| socket::coalesce(&self.config, socket));
        if readdressed {
            self.accept()?;
        }
        let shared = self.config.workers > 1;
        let mut ungrouped = Vec::new();
        if self.recounted {
            for socket in self.receiver.own() {
                socket.set_reuse_port(shared)?;
            }
        }
        for (index, address, service) in std::mem::take(&mut self.unbound) {
            if !shared {
                ungrouped.push(index);
            }
            let port = self.config.port(service);
            // The kernel prefers the socket with the more specific address; until it is closed, both receive.
            let mut beside = false;
            for retired in self.receiver.retired() {
                let bound = retired.local_addr()?.as_socket();
                if bound.is_some_and(|bound| bound.port() == port && bound.is_ipv4() == address.is_ipv4()) {
                    retired.set_reuse_port(true)?;
                    beside = true;
                }
            }
            let Some(socket) = self.receiver.own().nth(index) else { continue };
            socket::bind_receive(&self.config, socket, address, service, beside)?;
        }
        // All sockets of the group exist now.
        if self.recounted && self.config.worker + 1 == self.config.workers {
            for (index, (socket, (_, service))) in self.receiver.own().zip(self.config.bindings()).enumerate() {
                if !ungrouped.contains(&index) {
                    socket::steer(&self.config, socket, service)?;
                }
            }
        }
        Ok(())
    }

    /// Receives again after another process has begun in an attempt to take over: with other local addresses
    /// (`readdressed`), or with another number of workers (`recounted`). That process's sockets may not be closed yet.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn resume(&self, readdressed: bool, recounted: bool) -> io::Result<()> {
        if readdressed {
            self.accept()?;
        }
        let shared = self.config.workers > 1;
        if recounted && self.config.worker + 1 == self.config.workers {
            for (socket, (_, service)) in self.receiver.own().zip(self.config.bindings()) {
                match socket::steer(&self.config, socket, service) {
                    // No other socket has joined this one's, so it has no group.
                    Err(error) if error.raw_os_error() == Some(libc::EINVAL) && !shared => {}
                    result => result?,
                }
            }
        }
        if recounted {
            for socket in self.receiver.own() {
                socket.set_reuse_port(shared)?;
            }
        }
        Ok(())
    }

    fn accept(&self) -> io::Result<()> {
        for (socket, (address, _)) in self.receiver.own().zip(self.config.bindings()) {
            socket::accept(&self.config, socket, address.is_ipv4())?;
        }
        Ok(())
    }

    /// Closes the other process's sockets that do not fit and hold nothing more; all of them if `all`. Call it once that
    /// process has closed its own: datagrams now arrive at the others. Returns whether none is left.
    pub fn close_retired(&mut self, all: bool) -> bool {
        self.transmitter.close_unused();
        self.receiver.close_retired(all)
    }

    /// Duplicates of its socket descriptors, for [`adopt`](Self::adopt) in another process.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn sockets(&self) -> io::Result<Sockets> {
        Ok(Sockets { receive: self.receiver.sockets()?, transmit: self.transmitter.sockets()? })
    }

    /// Opens the underlays of all `config.workers` workers, in the order that steering needs; `config.worker` is
    /// ignored.
    pub fn open_all(config: &UdpConfig) -> Result<Vec<Self>, UdpError> {
        (0..config.workers.max(1)).map(|worker| Self::open(UdpConfig { worker, ..config.clone() })).collect()
    }

    /// Counters since it was opened.
    pub fn counters(&self) -> &UdpCounters {
        &self.counters
    }

    /// [`Underlay::lane`] with its full error: registers a lane, or returns the existing one.
    pub fn open_lane(&mut self, local: SocketAddr, remote: SocketAddr) -> Result<LaneId, UdpError> {
        if local.is_ipv4() != remote.is_ipv4() {
            return Err(UdpError::Config(format!("no path from {local} to {remote}: one is IPv4, the other IPv6")));
        }
        if local.port() == self.config.bifrost_port || local.port() == self.config.vxlan_port {
            return Err(UdpError::Config(format!(
                "source port {} of a path is also a receive port; choose another source_port_base",
                local.port()
            )));
        }
        let Self { config, transmitter, .. } = self;
        transmitter.lane(local, remote, |handed| match handed {
            Some(socket) => Ok(socket::segments(config, socket)),
            None => socket::transmit(config, local),
        })
    }
}

impl Underlay for UdpUnderlay {
    fn lane(&mut self, local: SocketAddr, remote: SocketAddr) -> io::Result<LaneId> {
        self.open_lane(local, remote).map_err(|e| match e {
            UdpError::Io(e) => e,
            UdpError::Bind { ref source, .. } | UdpError::Option { ref source, .. } => io::Error::new(source.kind(), e),
            UdpError::Config(_) => io::Error::new(io::ErrorKind::InvalidInput, e),
        })
    }

    fn recv(&mut self) -> io::Result<usize> {
        self.receiver.receive(&mut self.counters)
    }

    fn received_at_ns(&self) -> u64 {
        self.receiver.received_at_ns()
    }

    fn datagram(&self, index: usize) -> Datagram<'_> {
        self.receiver.datagram(index)
    }

    fn send(&mut self, batch: &mut TxBatch) {
        self.transmitter.send(batch, &mut self.counters);
    }
}

impl PolledUnderlay for UdpUnderlay {
    /// One descriptor, an epoll instance over all receive sockets.
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.receiver.fd()]
    }
}

impl Default for UdpConfig {
    fn default() -> Self {
        Self {
            local: Vec::new(),
            bifrost_port: 4794,
            vxlan_port: 4789,
            worker: 0,
            workers: 1,
            gso: true,
            gro: true,
            receive_buffer_bytes: 8 << 20,
            send_buffer_bytes: 4 << 20,
            receive_messages: 16,
        }
    }
}

impl UdpConfig {
    /// The bind addresses of the receive sockets, in order. One socket for all addresses of a family: its queue
    /// preserves the arrival order across paths, which sockets per address would not, and the transport would see delay
    /// or loss on a path.
    fn bindings(&self) -> impl Iterator<Item = (IpAddr, Service)> + use<> {
        let of_family = |any: IpAddr| {
            let mut family = self.local.iter().copied().filter(|a| a.is_ipv4() == any.is_ipv4());
            let first = family.next()?;
            Some(family.next().map_or(first, |_| any))
        };
        let families = [IpAddr::from(Ipv4Addr::UNSPECIFIED), IpAddr::from(Ipv6Addr::UNSPECIFIED)].map(of_family);
        let services = |address| [Service::Bifrost, Service::Vxlan].map(|service| (address, service));
        families.into_iter().flatten().flat_map(services)
    }

    fn port(&self, service: Service) -> u16 {
        match service {
            Service::Bifrost => self.bifrost_port,
            Service::Vxlan => self.vxlan_port,
        }
    }

    fn check(&self) -> Result<(), UdpError> {
        let problem = if self.local.is_empty() || self.local.len() > 8 {
            format!("{} local addresses; give 1 to 8", self.local.len())
        } else if self.workers == 0 || self.workers > 32 || self.worker >= self.workers {
            format!("worker {} of {}; give 1 to 32 workers, numbered from 0", self.worker, self.workers)
        } else if self.bifrost_port == self.vxlan_port {
            format!("BIFROST and plain VXLAN cannot share port {}; give them two ports", self.vxlan_port)
        } else if !(1..=1024).contains(&self.receive_messages) {
            format!("{} messages per receive batch; give 1 to 1024", self.receive_messages)
        } else {
            return Ok(());
        };
        Err(UdpError::Config(problem))
    }
}

impl UdpError {
    fn bind(address: SocketAddr, source: &io::Error) -> Self {
        let hint = match source.raw_os_error() {
            Some(libc::EADDRINUSE) => "another program (a second bifrostd, or a kernel VXLAN device) uses this port",
            Some(libc::EADDRNOTAVAIL) => "no interface has this address; add it or correct underlay.addresses",
            Some(libc::EACCES) => "ports below 1024 need CAP_NET_BIND_SERVICE",
            Some(libc::EMFILE | libc::ENFILE) => "too many open files; raise the limit (LimitNOFILE)",
            _ => "check underlay.addresses and the ports",
        };
        let source = source.raw_os_error().map_or_else(|| source.kind().into(), io::Error::from_raw_os_error);
        Self::Bind { address, source, hint }
    }

    fn option(address: SocketAddr, source: &io::Error) -> Self {
        let source = source.raw_os_error().map_or_else(|| source.kind().into(), io::Error::from_raw_os_error);
        Self::Option { address, source }
    }
}
