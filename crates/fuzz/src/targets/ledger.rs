//! Ownership of buffers: a ledger that checks the engine's contract about handles.

use std::collections::BTreeMap;

use bifrost_rte::{Control, DataOut, Output};
use bifrost_wire::bifrost::{Packet, parse};

/// A port and one of its buffers.
pub(super) type Handle = (u32, u32);

/// Buffers of one host. `T`: content of a received one.
#[derive(Debug, Default)]
pub(super) struct Ledger<T> {
    /// Sent by guests and held by the engine: number of segments not released yet.
    sent: BTreeMap<Handle, u32>,
    /// Placed for guests and not published yet.
    placed: BTreeMap<Handle, T>,
    next: u32,
}

impl<T> Ledger<T> {
    /// A new handle.
    pub(super) fn fresh(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    /// The engine accepted a guest's buffer.
    pub(super) fn accepted(&mut self, handle: Handle, segments: u8) {
        let before = self.sent.insert(handle, u32::from(segments));
        assert!(before.is_none(), "{handle:?} is in use");
    }

    /// The engine accepted a received packet.
    pub(super) fn placed(&mut self, handle: Handle, content: T) {
        assert!(self.placed.insert(handle, content).is_none(), "{handle:?} is in use");
    }

    /// Everything placed and not published.
    pub(super) fn waiting(&self) -> impl Iterator<Item = &T> {
        self.placed.values()
    }

    /// A port is removed with its buffers.
    pub(super) fn forget(&mut self, owner: u32) {
        self.sent.retain(|h, _| h.0 != owner);
        self.placed.retain(|h, _| h.0 != owner);
    }

    /// The buffer of a data packet being sent is still held.
    pub(super) fn check_sent(&self, data: &DataOut) {
        assert!(self.sent.contains_key(&(data.owner, data.handle)), "sends a buffer that it has released: {data:?}");
    }

    /// The next packet for the guest.
    pub(super) fn publish(&mut self, handle: Handle) -> T {
        self.placed.remove(&handle).unwrap_or_else(|| panic!("publishes {handle:?}, which is not placed"))
    }

    /// A segment of a buffer is released.
    pub(super) fn give_back(&mut self, handle: Handle) {
        let Some(left) = self.sent.get_mut(&handle) else { panic!("releases {handle:?}, which it does not hold") };
        *left -= 1;
        if *left == 0 {
            self.sent.remove(&handle);
        }
    }

    /// Applies outputs about buffers, in the order of the contract, for callers that need no more.
    pub(super) fn settle(&mut self, out: &Output) {
        for handle in &out.publish {
            self.publish(*handle);
        }
        for data in &out.data {
            self.check_sent(data);
        }
        for plain in &out.plain {
            self.give_back((plain.owner, plain.handle));
        }
        for handle in &out.release {
            self.give_back(*handle);
        }
    }

    /// Checks that nothing is held any more.
    pub(super) fn assert_empty(&self) {
        assert!(self.sent.is_empty(), "never released: {:?}", self.sent);
        assert!(self.placed.is_empty(), "never shown: {:?}", self.placed.keys());
    }
}

/// The parser accepts every packet sent, with the same meaning.
pub(super) fn check_wire(out: &Output) {
    for data in &out.data {
        let bytes = [&data.header.emit()[..], &[0; 14]].concat();
        assert_eq!(parse(&bytes), Ok(Packet::Data(data.header, &[0; 14])));
    }
    for control in &out.control {
        assert!(parse(&emit(&control.packet)).is_ok(), "malformed: {:?}", control.packet);
    }
}

/// The bytes of a control packet.
pub(super) fn emit(packet: &Control) -> Vec<u8> {
    match packet {
        Control::Ack(ack) => {
            let mut out = Vec::new();
            ack.emit(&mut out);
            out
        }
        Control::Probe(header) => header.emit().to_vec(),
        Control::Skip(header) => header.emit_skip().to_vec(),
        Control::Setup(setup) => setup.emit().to_vec(),
        Control::Reset(reset) => reset.emit().to_vec(),
    }
}
