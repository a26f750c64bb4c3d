//! A host's underlay, of either kind.

use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

use crate::afxdp::{AfxdpCounters, AfxdpUnderlay};
use crate::udp::{Sockets, UdpCounters, UdpError, UdpUnderlay};
use crate::underlay::{Datagram, LaneId, PolledUnderlay, TxBatch, Underlay};

/// UDP sockets, or AF_XDP sockets.
pub enum HostUnderlay {
    /// UDP sockets.
    Udp(Box<UdpUnderlay>),
    /// AF_XDP sockets with UDP sockets beside them.
    Afxdp(Box<AfxdpUnderlay>),
}

impl HostUnderlay {
    /// Counters of the UDP sockets.
    pub fn udp_counters(&self) -> &UdpCounters {
        match self {
            Self::Udp(udp) => udp.counters(),
            Self::Afxdp(afxdp) => afxdp.udp_counters(),
        }
    }

    /// Duplicates of the descriptors of its UDP sockets.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn sockets(&self) -> io::Result<Sockets> {
        match self {
            Self::Udp(udp) => udp.sockets(),
            Self::Afxdp(afxdp) => afxdp.sockets(),
        }
    }

    /// [`UdpUnderlay::begin`] of its UDP sockets.
    ///
    /// # Errors
    /// The same.
    pub fn begin(&mut self, readdressed: bool) -> Result<(), UdpError> {
        self.udp_mut().begin(readdressed)
    }

    /// [`UdpUnderlay::resume`] of its UDP sockets.
    ///
    /// # Errors
    /// The same.
    pub fn resume(&mut self, readdressed: bool, recounted: bool) -> io::Result<()> {
        self.udp_mut().resume(readdressed, recounted)
    }

    /// [`UdpUnderlay::close_retired`] of its UDP sockets.
    pub fn close_retired(&mut self, all: bool) -> bool {
        self.udp_mut().close_retired(all)
    }

    fn udp_mut(&mut self) -> &mut UdpUnderlay {
        match self {
            Self::Udp(udp) => udp,
            Self::Afxdp(afxdp) => afxdp.fallback_mut(),
        }
    }

    /// The AF_XDP underlay, if it is one.
    pub fn afxdp(&self) -> Option<&AfxdpUnderlay> {
        match self {
            Self::Udp(_) => None,
            Self::Afxdp(afxdp) => Some(afxdp),
        }
    }

    /// The AF_XDP underlay, if it is one.
    pub fn afxdp_mut(&mut self) -> Option<&mut AfxdpUnderlay> {
        match self {
            Self::Udp(_) => None,
            Self::Afxdp(afxdp) => Some(afxdp),
        }
    }

    /// Counters of the AF_XDP sockets, if it has any.
    pub fn afxdp_counters(&self) -> Option<AfxdpCounters> {
        match self {
            Self::Udp(_) => None,
            Self::Afxdp(afxdp) => Some(afxdp.counters()),
        }
    }
}

impl Underlay for HostUnderlay {
    fn lane(&mut self, local: SocketAddr, remote: SocketAddr) -> io::Result<LaneId> {
        match self {
            Self::Udp(udp) => udp.lane(local, remote),
            Self::Afxdp(afxdp) => afxdp.lane(local, remote),
        }
    }

    fn recv(&mut self) -> io::Result<usize> {
        match self {
            Self::Udp(udp) => udp.recv(),
            Self::Afxdp(afxdp) => afxdp.recv(),
        }
    }

    fn received_at_ns(&self) -> u64 {
        match self {
            Self::Udp(udp) => udp.received_at_ns(),
            Self::Afxdp(afxdp) => afxdp.received_at_ns(),
        }
    }

    fn datagram(&self, index: usize) -> Datagram<'_> {
        match self {
            Self::Udp(udp) => udp.datagram(index),
            Self::Afxdp(afxdp) => afxdp.datagram(index),
        }
    }

    fn send(&mut self, batch: &mut TxBatch) {
        match self {
            Self::Udp(udp) => udp.send(batch),
            Self::Afxdp(afxdp) => afxdp.send(batch),
        }
    }
}

impl PolledUnderlay for HostUnderlay {
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        match self {
            Self::Udp(udp) => udp.fds(),
            Self::Afxdp(afxdp) => afxdp.fds(),
        }
    }
}
