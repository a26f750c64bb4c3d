//! Operator's view of connections and paths.

use bifrost_wire::bifrost::{Cid, PathId};

use crate::conn::{Pair, State};
use crate::engine::Engine;
use crate::output::PeerId;
use crate::path::PathState;
use bifrost_transport::time::{S, Time};

/// One connection.
#[derive(Clone, Copy, Debug)]
pub struct ConnSnapshot {
    /// The two vNICs.
    pub pair: Pair,
    /// The local port.
    pub owner: u32,
    /// The peer host.
    pub peer: PeerId,
    /// CID by which the peer addresses it.
    pub local_cid: Cid,
    /// CID by which the peer is addressed.
    pub peer_cid: Cid,
    /// Its state.
    pub state: State,
    /// Protocol version.
    pub version: u8,
    /// Packets sent and not acknowledged.
    pub in_flight_packets: u32,
    /// Of these: in flight on no path, because the peer received but did not take them, or has no room for them yet.
    pub landed_packets: u32,
    /// Send window.
    pub window_packets: u32,
    /// How much of it the peer seems to have room for: less than all after it did not take packets that it received.
    pub room_packets: u32,
    /// Packets waiting for the connection to open.
    pub pending_packets: u32,
    /// Received packets held back from the guest.
    pub held_packets: u32,
    /// Packets sent for the first time.
    pub tx_packets: u64,
    /// Data packets received, duplicates included.
    pub rx_packets: u64,
    /// Packets retransmitted.
    pub retransmitted_packets: u64,
    /// Packets received more than once.
    pub duplicate_packets: u64,
    /// Packets given up after repeated timeouts.
    pub given_up_packets: u64,
    /// Time since the last packet in either direction, ns.
    pub idle_ns: u64,
    /// It has shrunk to its minimum memory.
    pub is_idle: bool,
    /// Retransmission timeout, ns; 0 while it is idle.
    pub rto_ns: u64,
}

/// One path to a peer.
#[derive(Clone, Copy, Debug)]
pub struct PathSnapshot {
    /// The peer host.
    pub peer: PeerId,
    /// The path's ID.
    pub path: PathId,
    /// Whether it may carry data.
    pub state: PathState,
    /// Whether it is among the paths sprayed over.
    pub selected: bool,
    /// Whether the operator has drained it.
    pub drained: bool,
    /// Smoothed delay of the network, ns.
    pub srtt_ns: u64,
    /// Smoothed deviation of it, ns.
    pub rttvar_ns: u64,
    /// Smallest recent delay, ns.
    pub min_rtt_ns: u64,
    /// Smoothed RTT with both endpoints, ns.
    pub total_rtt_ns: u64,
    /// Loss rate, 0..=1.
    pub loss: f32,
    /// Congestion window, packets.
    pub window_packets: f32,
    /// Packets in flight.
    pub in_flight_packets: u32,
    /// Nothing has arrived on it for a second although packets or probes were sent.
    pub is_silent: bool,
    /// Packets sent.
    pub tx_packets: u64,
    /// Recently sent packets: an average over about a second.
    pub recent_packets: f64,
    /// Packets found lost.
    pub lost_packets: u64,
    /// Probes sent.
    pub probes_sent: u64,
    /// Probes that did not return.
    pub probes_lost: u64,
}

impl PathSnapshot {
    /// For a path to a host unknown to the transport.
    pub fn unmeasured(path: PathId) -> Self {
        PathSnapshot {
            peer: PeerId(u32::MAX),
            path,
            state: PathState::Usable,
            selected: false,
            drained: false,
            srtt_ns: 0,
            rttvar_ns: 0,
            min_rtt_ns: 0,
            total_rtt_ns: 0,
            loss: 0.0,
            window_packets: 0.0,
            in_flight_packets: 0,
            is_silent: false,
            tx_packets: 0,
            recent_packets: 0.0,
            lost_packets: 0,
            probes_sent: 0,
            probes_lost: 0,
        }
    }
}

impl Engine {
    /// All connections, as of `now`.
    pub fn connection_snapshots(&self, now: Time) -> impl Iterator<Item = ConnSnapshot> {
        (0..self.places()).filter_map(move |place| self.connection_snapshot(now, place))
    }

    /// The connection at one of [`places`](Self::places), as of `now`. It stays at its place while it exists.
    pub fn connection_snapshot(&self, now: Time, place: u32) -> Option<ConnSnapshot> {
        let c = self.conn(place)?;
        let active = c.active.as_ref();
        Some(ConnSnapshot {
            pair: c.pair,
            owner: c.owner,
            peer: c.peer,
            local_cid: c.local_cid,
            peer_cid: c.peer_cid,
            state: c.state,
            version: c.version.number(),
            in_flight_packets: active.map_or(0, |a| u32::from(a.send.outstanding())),
            landed_packets: active.map_or(0, |a| u32::from(a.send.landed())),
            window_packets: u32::from(c.window.min(c.peer_window)),
            room_packets: u32::from(active.map_or(u16::MAX, |a| a.room).min(c.window).min(c.peer_window)),
            pending_packets: active.map_or(0, |a| a.pending.iter().map(|p| u32::from(p.count)).sum()),
            held_packets: active.map_or(0, |a| u32::from(a.recv.held())),
            tx_packets: c.tx_packets,
            rx_packets: c.rx_packets,
            retransmitted_packets: c.retransmitted_packets,
            duplicate_packets: c.duplicate_packets,
            given_up_packets: c.given_up_packets,
            idle_ns: now.since(c.last_activity),
            is_idle: active.is_none(),
            rto_ns: self.rto_ns(now, place),
        })
    }

    /// All paths of all peers, as of `now`.
    pub fn path_snapshots(&self, now: Time) -> impl Iterator<Item = PathSnapshot> {
        self.peer_slots().flat_map(move |(id, _)| self.path_snapshots_to(now, id))
    }

    /// The paths to one peer, as of `now`; none if the peer is unknown.
    pub fn path_snapshots_to(&self, now: Time, id: PeerId) -> impl Iterator<Item = PathSnapshot> {
        self.peer(id).into_iter().flat_map(move |peer| {
            peer.paths.iter().enumerate().map(move |(i, p)| {
                let path = PathId::masked(i as u8);
                PathSnapshot {
                    peer: id,
                    path,
                    state: p.state,
                    selected: peer.selected().contains(&path),
                    drained: peer.is_drained(path),
                    srtt_ns: p.fabric.smoothed_ns(),
                    rttvar_ns: p.fabric.variance_ns(),
                    min_rtt_ns: p.fabric.min_ns(),
                    total_rtt_ns: p.total.smoothed_ns(),
                    loss: p.loss,
                    window_packets: p.window(),
                    in_flight_packets: p.in_flight,
                    is_silent: p.state == PathState::Suspect && now.since(p.last_arrival) >= S,
                    tx_packets: p.tx_packets,
                    recent_packets: p.recent_packets(now),
                    lost_packets: p.lost_packets,
                    probes_sent: p.probes_sent,
                    probes_lost: p.probes_lost,
                }
            })
        })
    }
}
