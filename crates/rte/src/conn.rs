//! A connection: all flows between one pair of vNICs (NSDI'26, 4.4).
//!
//! [`Conn`] holds what an idle connection needs, [`Active`] what only traffic needs. `Active` comes from a pool.

use std::collections::VecDeque;
use std::hash::{Hash, Hasher};

use bifrost_wire::Mac;
use bifrost_wire::bifrost::{Bitmap, Cid, DataHeader, PathId, Psn, Tick, Version};

use crate::config::Ordering;
use crate::engine::{Arrival, Destination};
use crate::flow_table::FlowTable;
use crate::output::PeerId;
use crate::peer::Spray;
use crate::recv_window::{RECEIVE_WINDOW, RecvWindow};
use crate::send_window::SendWindow;
use bifrost_transport::time::{MS, Time, US};

/// The two vNICs of a connection.
#[derive(Clone, Copy, Debug, Eq)]
pub struct Pair {
    /// Network identifier.
    pub vni: u32,
    /// The local vNIC.
    pub local: Mac,
    /// The remote vNIC.
    pub remote: Mac,
}

impl Pair {
    /// The two addresses as two words, which compare in fewer instructions than bytes.
    #[inline(always)]
    fn words(local: &Mac, remote: &Mac) -> (u32, u64) {
        let ([a, b, c, d, e, f], [g, h, i, j, k, l]) = (local.0, remote.0);
        (u32::from_le_bytes([a, b, c, d]), u64::from_le_bytes([e, f, g, h, i, j, k, l]))
    }
}

impl PartialEq for Pair {
    #[inline(always)]
    fn eq(&self, other: &Self) -> bool {
        self.vni == other.vni && Self::words(&self.local, &self.remote) == Self::words(&other.local, &other.remote)
    }
}

impl Hash for Pair {
    /// All 120 bits as one word, which hashes faster than three fields.
    #[inline]
    fn hash<H: Hasher>(&self, state: &mut H) {
        let macs = u128::from(self.local.as_u64()) << 48 | u128::from(self.remote.as_u64());
        state.write_u128(u128::from(self.vni) << 96 | macs);
    }
}

/// State of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// A REQUEST was sent. `background`: meanwhile traffic is sent as plain VXLAN instead of waiting.
    Opening {
        /// REQUESTs sent.
        tries: u8,
        /// Selects the path of the first REQUEST.
        turn: u8,
        /// When the next one is due.
        next: Time,
        /// Whether traffic is sent as plain VXLAN meanwhile.
        background: bool,
    },
    /// Both CIDs are known.
    Open,
    /// All paths failed: traffic is sent as plain VXLAN until a probe returns (NSDI'26, 7.2).
    BestEffort,
    /// The peer does not speak BIFROST for this pair; tried again later.
    Plain {
        /// When to try again.
        until: Time,
        /// When this state began, s. Until then, REQUESTs told the peer this side's CID.
        since_s: u32,
    },
}

/// The part of a connection that is kept while it is idle.
#[derive(Debug)]
pub(crate) struct Conn {
    pub(crate) pair: Pair,
    pub(crate) owner: u32,
    pub(crate) peer: PeerId,
    pub(crate) peer_worker: Option<u8>,
    pub(crate) state: State,
    pub(crate) version: Version,
    pub(crate) responder: bool,
    pub(crate) ordering: Ordering,
    pub(crate) local_cid: Cid,
    /// A packet for `local_cid` arrived while the connection was not open, so an instance of the peer has accepted that
    /// CID.
    pub(crate) heard: bool,
    pub(crate) peer_cid: Cid,
    /// Number of this side's connection attempt, as told to the peer.
    pub(crate) generation: u32,
    /// (instance, generation) of the peer's side.
    pub(crate) peer_epoch: Option<(u64, u32)>,
    pub(crate) window: u16,
    pub(crate) peer_window: u16,
    /// PSNs while there is no [`Active`].
    pub(crate) send_next: Psn,
    pub(crate) recv_base: Psn,
    pub(crate) active: Option<Box<Active>>,
    pub(crate) last_activity: Time,
    /// The armed deadline; [`Time::NEVER`] if none.
    pub(crate) armed: Time,
    /// The deadline armed before `armed`, if it is later and still pending.
    pub(crate) superseded: Time,
    /// The idle deadline. It is separate so that traffic need not renew it, and is never moved earlier.
    pub(crate) idle_armed: Time,
    /// The next connection of the same pair, with another worker of the peer.
    pub(crate) twin: Option<u32>,
    pub(crate) tx_packets: u64,
    pub(crate) rx_packets: u64,
    pub(crate) retransmitted_packets: u64,
    pub(crate) duplicate_packets: u64,
    pub(crate) given_up_packets: u64,
}

impl Conn {
    /// Whether data can be sent reliably.
    pub(crate) fn is_open(&self) -> bool {
        self.state == State::Open
    }

    /// Whether the connection is open, and a packet with this header belongs to it and is neither a probe nor requests
    /// an immediate ACK.
    #[inline(always)]
    pub(crate) fn expects(&self, arrival: &Arrival, header: &DataHeader) -> bool {
        self.local_cid == header.cid
            && self.peer == arrival.peer
            && self.pair.vni == arrival.vni
            && self.is_open()
            && self.version == header.version
            && !header.probe
            && !header.ack_now
    }

    /// Whether this is the open connection for packets to a destination.
    #[inline(always)]
    pub(crate) fn leads_to(&self, to: &Destination) -> bool {
        let Pair { vni, local, remote } = &self.pair;
        *vni == to.vni
            && Pair::words(local, remote) == Pair::words(&to.local, &to.remote)
            && self.peer == to.peer
            && self.is_open()
    }
}

/// The part of a connection that only traffic needs.
#[derive(Debug)]
pub(crate) struct Active {
    pub(crate) send: SendWindow,
    pub(crate) recv: RecvWindow,
    /// The receiver's base according to its cumulative ACKs: everything below is published. Packets that it
    /// acknowledged beyond a gap may not be.
    pub(crate) published: Psn,
    pub(crate) flows: FlowTable,
    pub(crate) spray: Spray,
    pub(crate) pending: VecDeque<Pending>,
    pub(crate) ack: AckState,
    pub(crate) loss: LossState,
    pub(crate) skip: Option<Skip>,
    /// The last attempt to send found a window closed.
    pub(crate) blocked: bool,
    /// Waits with other connections for room on the peer's paths ([`Peer::waiting`](crate::peer::Peer::waiting)).
    pub(crate) queued: bool,
    /// Packets, counted from the oldest outstanding one, for which the peer seems to have room.
    pub(crate) room: u16,
    /// When `room` was last reduced.
    pub(crate) refused_at: Time,
}

impl Active {
    pub(crate) fn new(send_next: Psn, recv_base: Psn) -> Self {
        Active {
            send: SendWindow::new(send_next),
            recv: RecvWindow::new(recv_base),
            published: send_next,
            flows: FlowTable::new(send_next),
            spray: Spray::default(),
            pending: VecDeque::new(),
            ack: AckState::default(),
            loss: LossState::default(),
            skip: None,
            blocked: false,
            queued: false,
            room: u16::MAX,
            refused_at: Time(0),
        }
    }

    /// Like new, but keeps allocated memory. The windows have been emptied.
    pub(crate) fn reset(&mut self, send_next: Psn, recv_base: Psn) {
        self.send = SendWindow::new(send_next);
        self.recv = RecvWindow::new(recv_base);
        self.published = send_next;
        self.flows.reset(send_next);
        self.spray = Spray::default();
        self.pending.clear();
        self.ack = AckState::default();
        self.loss = LossState::default();
        self.skip = None;
        self.blocked = false;
        self.queued = false;
        self.room = u16::MAX;
        self.refused_at = Time(0);
    }

    /// Segments that wait to be sent.
    pub(crate) fn waiting(&self) -> usize {
        self.pending.iter().map(|p| usize::from(p.count)).sum()
    }

    /// Whether no packet is held, in flight or waiting, and no ACK or SKIP is owed.
    pub(crate) fn is_quiet(&self) -> bool {
        self.send.outstanding() == 0
            && self.recv.held() == 0
            && !self.recv.has_gap()
            && self.pending.is_empty()
            && self.ack.deadline == Time::NEVER
            && self.skip.is_none()
    }
}

/// Segments that wait for the connection to open or for room, or that are to be sent again after a restart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    pub(crate) handle: u32,
    pub(crate) first: u8,
    pub(crate) count: u8,
    /// `None`: unknown, so the packet waits for everything before it.
    pub(crate) flow: Option<u32>,
}

impl Pending {
    /// Removes the first `segments` segments, at most all.
    pub(crate) fn advance(&mut self, segments: u16) {
        let segments = segments.min(u16::from(self.count)) as u8;
        self.first = self.first.wrapping_add(segments);
        self.count -= segments;
    }
}

/// Acknowledgements that the receiver owes the sender.
#[derive(Clone, Debug)]
pub(crate) struct AckState {
    pub(crate) packets: u16,
    pub(crate) marked: u16,
    pub(crate) deadline: Time,
    pub(crate) queued: bool,
    pub(crate) echo: Option<Echo>,
    /// Something has arrived that an ACK from base on covers: below base + 256.
    pub(crate) near: bool,
    /// Something has arrived farther ahead: one bit for each block of 256 PSNs, the bit PSN / 256 modulo 16.
    pub(crate) far: u16,
    /// Arrived, but dropped by a rate limit.
    pub(crate) rate_limited: Vec<Psn>,
    /// Arrived, but not taken for another reason.
    pub(crate) not_taken: Vec<Psn>,
}

/// PSNs that one ACK covers.
const BLOCK: u32 = Bitmap::MAX_BITS as u32;
const BLOCKS: u32 = RECEIVE_WINDOW / BLOCK;

impl AckState {
    /// Whether one cumulative ACK covers everything.
    #[inline]
    pub(crate) fn fits_one(&self) -> bool {
        self.far == 0 && self.rate_limited.is_empty() && self.not_taken.is_empty()
    }

    /// Packets that have arrived, and how many of them had a congestion mark.
    pub(crate) fn counts(&self) -> (u16, u16) {
        (self.packets, self.marked)
    }

    /// Everything that [`fits_one`](Self::fits_one) ACK has been acknowledged.
    #[inline]
    pub(crate) fn clear(&mut self) {
        (self.packets, self.marked, self.queued, self.near) = (0, 0, false, false);
        (self.deadline, self.echo) = (Time::NEVER, None);
    }

    /// Packet `psn` is present, now or since earlier, and must be acknowledged.
    #[inline]
    pub(crate) fn note(&mut self, psn: Psn, base: Psn) {
        if psn.distance_from(base) < BLOCK as i32 {
            self.near = true;
        } else {
            self.far |= 1 << (psn.0 / BLOCK % BLOCKS);
        }
    }

    /// The first PSNs of those blocks, beyond the 256 PSNs from `base` on, in which something has arrived, for the
    /// window `base..end`. Sets [`near`](Self::near) if `base` has moved into such a block.
    pub(crate) fn far_blocks(&mut self, base: Psn, end: Psn) -> impl Iterator<Item = Psn> + use<> {
        let first = base.0 / BLOCK;
        let begin = move |block: u32| {
            // The first block has the same bit as the one after the last. The ACK from base on covers the first block.
            let ahead = (block + BLOCKS - first % BLOCKS) % BLOCKS;
            Psn(first * BLOCK).add(BLOCK * if ahead == 0 { BLOCKS } else { ahead })
        };
        let mut bits = self.far;
        let begins = std::iter::from_fn(move || {
            let block = (bits != 0).then(|| bits.trailing_zeros())?;
            bits &= bits - 1;
            Some(begin(block))
        });
        self.near |= begins.clone().any(|begin| !begin.is_before(end));
        begins.filter(move |begin| begin.is_before(end))
    }
}

impl Default for AckState {
    fn default() -> Self {
        AckState {
            packets: 0,
            marked: 0,
            deadline: Time::NEVER,
            queued: false,
            echo: None,
            near: false,
            far: 0,
            rate_limited: Vec::new(),
            not_taken: Vec::new(),
        }
    }
}

/// The data packet that an ACK answers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Echo {
    pub(crate) psn: Psn,
    pub(crate) path: PathId,
    pub(crate) timestamp: Tick,
    pub(crate) nic_rx: Tick,
    pub(crate) hops: u8,
}

/// State of the sender's loss timers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LossState {
    /// When the latest-sent packet among the acknowledged ones left, over all paths (RFC 8985: RACK.xmit_ts).
    pub(crate) newest_acked: Option<Tick>,
    /// When anything was last acknowledged, or sent while nothing was in flight.
    pub(crate) last_progress: Time,
    /// When the peer was last heard, or last given a reason to answer. Silence is counted from here.
    pub(crate) heard: Time,
    /// Tail probes since the last acknowledgement.
    pub(crate) probes: u8,
    /// When the last tail probe left.
    pub(crate) probed_at: Time,
    /// When the next loss can be detected by time.
    pub(crate) deadline: Time,
    /// Extra wait on top of what RTT and variance require, because a shorter wait proved wrong (RFC 8985, 6.2 step 4:
    /// the reordering window adapts to observed reordering).
    patience_ns: u64,
    patience_at: Time,
}

/// Patience halves in this time without spurious retransmissions.
const PATIENCE_HALF_LIFE_NS: u64 = 200 * MS;
/// Maximum patience.
const PATIENCE_MAX_NS: u64 = 2 * MS;

impl LossState {
    /// A packet sent at `sent` was acknowledged.
    #[inline(always)]
    pub(crate) fn note_acked(&mut self, sent: Tick) {
        if self.newest_acked.is_none_or(|newest| sent.since(newest) > 0) {
            self.newest_acked = Some(sent);
        }
    }

    /// A retransmission was spurious: wait longer from now on. At most one step per round trip.
    pub(crate) fn be_patient(&mut self, now: Time, rtt_ns: u64) {
        if now.since(self.patience_at) >= rtt_ns {
            self.patience_ns = (self.patience_ns(now) + (rtt_ns / 4).max(20 * US)).min(PATIENCE_MAX_NS);
            self.patience_at = now;
        }
    }

    /// The current patience, ns.
    #[inline]
    pub(crate) fn patience_ns(&self, now: Time) -> u64 {
        if self.patience_ns == 0 {
            return 0;
        }
        let halvings = now.since(self.patience_at) / PATIENCE_HALF_LIFE_NS;
        self.patience_ns >> halvings.min(63)
    }
}

impl Default for LossState {
    fn default() -> Self {
        LossState {
            newest_acked: None,
            last_progress: Time(0),
            heard: Time(0),
            probes: 0,
            probed_at: Time(0),
            deadline: Time::NEVER,
            patience_ns: 0,
            patience_at: Time(0),
        }
    }
}

/// Packets were given up; the receiver must be told where to continue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Skip {
    /// One past the highest PSN given up.
    pub(crate) past: Psn,
    pub(crate) next: Time,
    pub(crate) tries: u32,
}
