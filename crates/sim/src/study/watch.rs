//! Records what guests see during a run, for studies.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use crate::flows::HEADERS_BYTES;
use crate::{Checker, Record, Violations};

/// Statistics of guests' TCP.
#[derive(Debug, Default)]
pub(super) struct TcpSeen {
    /// New bytes that reached guest `to` in each bin.
    pub(super) bins: Vec<u64>,
    /// Segments that guests retransmitted.
    pub(super) repeated: u64,
    /// Segments that arrived after a later one.
    pub(super) reordered: u64,
    sent: HashMap<(u32, u64), u32>,
    seen: HashMap<(u32, u64), u32>,
}

/// Watches TCP segments to one guest.
pub(super) struct TcpWatch {
    to: u32,
    bin_ns: u64,
    state: Rc<RefCell<TcpSeen>>,
}

impl TcpWatch {
    /// A watch of the traffic to guest `to`, in bins of `bin_ns`.
    pub(super) fn new(to: u32, bin_ns: u64) -> (Box<Self>, Rc<RefCell<TcpSeen>>) {
        let state = Rc::new(RefCell::new(TcpSeen::default()));
        (Box::new(TcpWatch { to, bin_ns, state: state.clone() }), state)
    }
}

/// Flow, end of the segment and its length, of a frame with TCP data.
fn segment(frame: &[u8]) -> Option<(u64, u32, u32)> {
    let ip = frame.get(14..)?;
    if ip.first()? >> 4 != 4 || *ip.get(9)? != 6 {
        return None;
    }
    let header = usize::from(ip[0] & 15) * 4;
    let total = usize::from(u16::from_be_bytes(ip.get(2..4)?.try_into().ok()?));
    let tcp = ip.get(header..)?;
    let offset = usize::from(tcp.get(12)? >> 4) * 4;
    let length = total.checked_sub(header + offset)? as u32;
    let sequence = u32::from_be_bytes(tcp.get(4..8)?.try_into().ok()?);
    let ports = u64::from(u32::from_be_bytes(tcp.get(0..4)?.try_into().ok()?));
    let source = u64::from(u32::from_be_bytes(ip.get(12..16)?.try_into().ok()?));
    (length > 0).then_some((source << 32 | ports, sequence.wrapping_add(length), length))
}

/// How far `end` is beyond the highest end of its flow, which it becomes; `None` if it is not beyond.
fn advance(ends: &mut HashMap<(u32, u64), u32>, key: (u32, u64), end: u32, length: u32) -> Option<u32> {
    let highest = ends.entry(key).or_insert(end.wrapping_sub(length));
    let ahead = end.wrapping_sub(*highest);
    let new = ahead > 0 && ahead < 1 << 31;
    if new {
        *highest = end;
    }
    new.then_some(ahead)
}

impl Checker for TcpWatch {
    fn fetched(&mut self, _: u64, guest: u32, frame: &[u8], _: &mut Violations) {
        let state = &mut *self.state.borrow_mut();
        if let Some((flow, end, length)) = segment(frame) {
            state.repeated += u64::from(advance(&mut state.sent, (guest, flow), end, length).is_none());
        }
    }

    fn shown(&mut self, at: u64, guest: u32, frame: &[u8], _: &mut Violations) {
        if guest != self.to {
            return;
        }
        let state = &mut *self.state.borrow_mut();
        let Some((flow, end, length)) = segment(frame) else { return };
        match advance(&mut state.seen, (guest, flow), end, length) {
            Some(new) => {
                let bin = (at / self.bin_ns) as usize;
                if state.bins.len() <= bin {
                    state.bins.resize(bin + 1, 0);
                }
                state.bins[bin] += u64::from(new);
            }
            None => state.reordered += 1,
        }
    }
}

/// For each flow of light guests: the maximum delay of a packet, ns.
pub(super) struct Longest {
    longest: Rc<RefCell<HashMap<u32, u64>>>,
}

impl Longest {
    /// A watch of all flows.
    pub(super) fn new() -> (Box<Self>, Rc<RefCell<HashMap<u32, u64>>>) {
        let longest = Rc::new(RefCell::new(HashMap::new()));
        (Box::new(Longest { longest: longest.clone() }), longest)
    }
}

impl Checker for Longest {
    fn shown(&mut self, at: u64, _: u32, frame: &[u8], _: &mut Violations) {
        if let Some(record) = frame.get(HEADERS_BYTES..).and_then(Record::read) {
            let took = at.saturating_sub(record.sent_at);
            let mut all = self.longest.borrow_mut();
            let longest = all.entry(record.flow).or_default();
            *longest = took.max(*longest);
        }
    }
}
