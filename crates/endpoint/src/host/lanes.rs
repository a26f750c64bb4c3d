//! Connections and their lanes: creation, description for the peer, connection.

use std::net::IpAddr;

use bifrost_rdm::{Chunking, CloseReason, Congestion, ConnectionConfig, ConnectionId};
use bifrost_verbs::{Connect, Provider, QpInit, Qpn, Sequence, Transport};
use bifrost_wire::rdm::{LaneAddress, MAX_LANES, SendHeader, Setup, SetupKind, Tag, UNIT};
use bifrost_wire::udp::ephemeral_port;

use super::{Host, HostError, Limits};
use crate::buffers::domain;
use crate::control::ControlPeer;
use crate::slots::Slots;

/// State of a connection outside the engine.
#[derive(Debug)]
pub(super) struct Bound {
    pub(super) id: ConnectionId,
    pub(super) limits: Limits,
    pub(super) tag: Tag,
    pub(super) lanes: Box<[Lane]>,
    pub(super) peer: Option<Remote>,
    #[cfg(test)]
    pub(super) peer_tag: Option<Tag>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Lane {
    pub(super) queue_pair: Qpn,
    pub(super) slots: Slots,
    pub(super) sequence: u32,
}

/// The other end of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Remote {
    pub(super) address: IpAddr,
    pub(super) port: u16,
    pub(super) lanes: [Qpn; MAX_LANES],
    pub(super) control: ControlPeer,
}

/// Receive requests beyond the credits: for requests that were considered lost, and arrive late.
const SPARE_SLOTS: u16 = 32;
/// Send requests beyond the credits: for completions that are not yet polled.
const SPARE_SENDS: u16 = 128;
/// Length of a slot: a header and one unit.
const SLOT: u32 = SendHeader::LEN as u32 + UNIT;

impl<P: Provider> Host<P> {
    /// Reserves a connection, and returns the setup message for the peer.
    ///
    /// # Errors
    /// When resources are exhausted.
    pub fn prepare(&mut self, kind: SetupKind, limits: Limits) -> Result<(ConnectionId, Setup), HostError> {
        let (id, tag) = self.engine.reserve()?;
        let lanes = match self.make_lanes(id, &limits) {
            Ok(lanes) => lanes,
            Err(error) => {
                self.engine.close(id, CloseReason::Done, &mut self.out, |_| {});
                return Err(error);
            }
        };
        if self.bound.len() <= id.index() {
            self.bound.resize_with(id.index() + 1, || None);
        }
        self.bound[id.index()] = Some(Box::new(Bound {
            id,
            limits,
            tag,
            lanes,
            peer: None,
            #[cfg(test)]
            peer_tag: None,
        }));
        Ok((id, self.describe(kind, id).ok_or(HostError::Unknown)?))
    }

    /// The setup message that describes a connection.
    fn describe(&self, kind: SetupKind, id: ConnectionId) -> Option<Setup> {
        let bound = self.bound(id)?;
        let address = match self.provider.address() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        let mut lanes = [LaneAddress::default(); MAX_LANES];
        for (address, lane) in lanes.iter_mut().zip(&bound.lanes) {
            *address = LaneAddress { queue_pair: lane.queue_pair.get(), sequence: lane.sequence };
        }
        Some(Setup {
            kind,
            service: bound.limits.service,
            address,
            port: self.provider.port(),
            mtu: bound.limits.mtu,
            control: self.control.queue_pair.get(),
            queue_key: self.control.queue_key,
            tag: bound.tag,
            credits: bound.limits.credits,
            window: bound.limits.window,
            longest: bound.limits.longest,
            lanes,
        })
    }

    fn make_lanes(&mut self, id: ConnectionId, limits: &Limits) -> Result<Box<[Lane]>, HostError> {
        let count = limits.service.lanes();
        let mut made = Vec::with_capacity(count);
        for lane in 0..count as u8 {
            match self.make_lane(id, limits, lane) {
                Ok(lane) => made.push(lane),
                Err(error) => {
                    for lane in made {
                        self.drop_lane(&lane);
                    }
                    return Err(error);
                }
            }
        }
        Ok(made.into_boxed_slice())
    }

    fn make_lane(&mut self, id: ConnectionId, limits: &Limits, lane: u8) -> Result<Lane, HostError> {
        let count = limits.credits.saturating_add(SPARE_SLOTS);
        let transport = if limits.service.is_reliable(lane) { Transport::Rc } else { Transport::Uc };
        let init = QpInit {
            transport,
            send_queue: self.queue,
            receive_queue: self.queue,
            send_depth: limits.credits.saturating_add(SPARE_SENDS),
            receive_depth: count,
            domain: domain(id),
            queue_key: 0,
            urgent: false,
        };
        let queue_pair = self.provider.create_queue_pair(init)?;
        match Slots::new(&mut self.provider, domain(id), SLOT, u32::from(count)) {
            Ok(slots) => Ok(Lane { queue_pair, slots, sequence: self.random.u32(..1 << 24) }),
            Err(error) => {
                let _ = self.provider.destroy(queue_pair);
                Err(error.into())
            }
        }
    }

    pub(super) fn drop_lane(&mut self, lane: &Lane) {
        let _ = self.provider.destroy(lane.queue_pair);
        lane.slots.release(&mut self.provider);
    }

    /// Completes a connection with the peer's setup message.
    ///
    /// # Errors
    /// When the settings are incompatible, or the provider fails. The caller must then close the connection.
    pub fn complete(
        &mut self,
        now_ns: u64,
        id: ConnectionId,
        peer: &Setup,
        mut config: ConnectionConfig,
        chunking: Box<dyn Chunking>,
        congestion: Box<dyn Congestion>,
    ) -> Result<(), HostError> {
        let bound = self.bound(id).ok_or(HostError::Unknown)?;
        let limits = bound.limits;
        if peer.service != limits.service {
            return Err(HostError::Mismatch("transport service"));
        }
        if peer.mtu != limits.mtu {
            return Err(HostError::Mismatch("path MTU"));
        }
        let address = match (self.provider.address(), peer.address.to_ipv4_mapped()) {
            (IpAddr::V4(_), Some(v4)) => IpAddr::V4(v4),
            (IpAddr::V6(_), None) => IpAddr::V6(peer.address),
            _ => return Err(HostError::Mismatch("address family")),
        };
        config.service = limits.service;
        config.mtu = limits.mtu;
        config.window = limits.window;
        config.longest = limits.longest;
        config.credits = peer.credits.min(limits.credits);
        config.peer_window = peer.window;
        config.peer_longest = peer.longest;
        let control = ControlPeer {
            address,
            port: peer.port,
            source_port: ephemeral_port(self.random.u16(..0x4000)),
            queue_pair: Qpn::new(peer.control),
            queue_key: peer.queue_key,
        };
        let lanes = peer.lanes.map(|lane| Qpn::new(lane.queue_pair));
        let remote = Remote { address, port: peer.port, lanes, control };
        if let Some(bound) = self.bound_mut(id) {
            bound.peer = Some(remote);
            #[cfg(test)]
            {
                bound.peer_tag = Some(peer.tag);
            }
        }
        for lane in 0..limits.service.lanes() as u8 {
            let send_sequence = self.bound(id).map_or(0, |bound| bound.lanes[usize::from(lane)].sequence);
            let source_port = ephemeral_port(self.random.u16(..0x4000));
            self.connect_lane(id, lane, send_sequence, peer.lanes[usize::from(lane)].sequence, source_port)?;
        }
        self.engine.open(now_ns, id, (address, peer.control), peer.tag, config, chunking, congestion)?;
        Ok(())
    }

    pub(super) fn connect_lane(
        &mut self,
        id: ConnectionId,
        lane: u8,
        send_sequence: u32,
        receive_sequence: u32,
        source_port: u16,
    ) -> Result<(), HostError> {
        let bound = self.bound(id).ok_or(HostError::Unknown)?;
        let (limits, local) = (bound.limits, bound.lanes[usize::from(lane)]);
        let peer = bound.peer.ok_or(HostError::Unknown)?;
        let connect = Connect {
            address: peer.address,
            port: peer.port,
            queue_pair: peer.lanes[usize::from(lane)],
            source_port,
            send_sequence: Sequence::new(send_sequence),
            receive_sequence: Sequence::new(receive_sequence),
            mtu: limits.mtu,
            retries: limits.retries,
            timeout_ns: limits.timeout_ns,
        };
        self.provider.connect(local.queue_pair, connect)?;
        local.slots.post_all(&mut self.provider, local.queue_pair, lane_token(id, lane))?;
        Ok(())
    }
}

/// Token of a lane's receive requests, without the slot.
pub(super) fn lane_token(id: ConnectionId, lane: u8) -> u64 {
    id.token() | u64::from(lane) << 16
}
