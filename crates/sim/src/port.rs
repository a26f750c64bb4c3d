//! The guest side of a simulated vNIC: bounded rings, and checks of every handle.
//!
//! The data path uses one side ([`GuestPort`]), the guest the other ([`SimPort::send`], [`SimPort::receive`]).
//! Forbidden uses of a handle are recorded as a [`Misuse`].

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;

use bifrost_nic::Offload;
use bifrost_port::{GuestPort, PlaceError, RxHandle, TxFrame, TxHandle};

/// Longer frames are handed over in two pieces, as by a TAP device.
const HEAD_BYTES: usize = 2048;
/// Maximum number of recorded misuses; even one is a bug.
const MAX_MISUSES: usize = 16;

/// A forbidden use of a handle by the data path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misuse {
    /// It read a transmit buffer that belongs to the guest.
    TouchedAfterComplete(u32),
    /// It completed a transmit buffer that it does not hold.
    CompletedTwice(u32),
    /// It published a receive buffer in which nothing is placed.
    PublishedTwice(u32),
    /// It discarded a receive buffer in which nothing is placed.
    DiscardedAfterPublish(u32),
    /// It used a handle that does not exist.
    NoSuchHandle(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TxState {
    /// Owned by the guest.
    Free,
    /// Offered by the guest.
    Offered,
    /// Fetched by the data path.
    Held,
    /// Released; the world has not checked it yet.
    Completed,
}

#[derive(Debug)]
struct TxSlot {
    state: TxState,
    offload: Offload,
    bytes: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RxState {
    Free,
    Placed,
    Published,
    Visible,
}

#[derive(Debug)]
struct RxSlot {
    state: RxState,
    checksum_valid: bool,
    bytes: Vec<u8>,
}

/// A simulated vNIC.
#[derive(Debug)]
pub struct SimPort {
    /// Maximum number of buffers per direction; unused ones are not allocated.
    capacity: (u32, u32),
    tx: Vec<TxSlot>,
    tx_free: Vec<u32>,
    tx_offered: VecDeque<u32>,
    tx_held: u32,
    rx: Vec<RxSlot>,
    rx_free: Vec<u32>,
    published: Vec<u32>,
    visible: VecDeque<u32>,
    max_frame: usize,
    misuses: RefCell<Vec<Misuse>>,
    /// Transmit buffers completed since the world last checked.
    completed: Vec<u32>,
    /// Completed transmit buffers whose frames were dropped before they left.
    refused: Vec<u32>,
    /// Receive buffers filled since the world last checked.
    placed: Vec<u32>,
    /// Frames for which there was no free receive buffer.
    no_buffer: u64,
    /// Transmit buffers fetched since the world last checked.
    fetched: Vec<u32>,
    /// Receive buffers published since the world last checked.
    shown: Vec<u32>,
    /// Hook of a test, called with the number of packets fetched or placed.
    #[cfg(test)]
    pub(crate) on_packets: Option<fn(usize)>,
}

impl SimPort {
    /// A vNIC with this many buffers per direction, for frames of at most `max_frame` bytes to the guest.
    pub fn new(tx: u32, rx: u32, max_frame: usize) -> Self {
        SimPort {
            capacity: (tx, rx),
            tx: Vec::new(),
            tx_free: Vec::new(),
            tx_offered: VecDeque::new(),
            tx_held: 0,
            rx: Vec::new(),
            rx_free: Vec::new(),
            published: Vec::new(),
            visible: VecDeque::new(),
            max_frame,
            misuses: RefCell::default(),
            completed: Vec::new(),
            refused: Vec::new(),
            placed: Vec::new(),
            no_buffer: 0,
            fetched: Vec::new(),
            shown: Vec::new(),
            #[cfg(test)]
            on_packets: None,
        }
    }

    /// Free transmit buffers.
    pub fn room(&self) -> usize {
        self.tx_free.len() + self.capacity.0 as usize - self.tx.len()
    }

    fn free_tx_slot(&mut self) -> Option<u32> {
        if self.tx_free.is_empty() && self.tx.len() < self.capacity.0 as usize {
            self.tx.push(TxSlot { state: TxState::Free, offload: Offload::default(), bytes: Vec::new() });
            return Some(self.tx.len() as u32 - 1);
        }
        self.tx_free.pop()
    }

    fn free_rx_slot(&mut self) -> Option<u32> {
        if self.rx_free.is_empty() && self.rx.len() < self.capacity.1 as usize {
            self.rx.push(RxSlot { state: RxState::Free, checksum_valid: false, bytes: Vec::new() });
            return Some(self.rx.len() as u32 - 1);
        }
        self.rx_free.pop()
    }

    /// The guest sends a frame; `write` fills the empty buffer that it gets. False if the ring is full.
    pub fn send(&mut self, offload: Offload, write: impl FnOnce(&mut Vec<u8>)) -> bool {
        let Some(slot) = self.free_tx_slot() else { return false };
        let s = &mut self.tx[slot as usize];
        s.bytes.clear();
        write(&mut s.bytes);
        (s.state, s.offload) = (TxState::Offered, offload);
        self.tx_offered.push_back(slot);
        true
    }

    /// Whether the guest has sent a frame that is not fetched yet.
    pub fn is_readable(&self) -> bool {
        !self.tx_offered.is_empty()
    }

    /// Whether the guest can receive something.
    pub fn has_visible(&self) -> bool {
        !self.visible.is_empty()
    }

    /// The guest receives the next published frame. `read` gets its bytes and whether its checksum is known to be
    /// valid.
    pub fn receive<T>(&mut self, read: impl FnOnce(&[u8], bool) -> T) -> Option<T> {
        let slot = self.visible.pop_front()?;
        let s = &mut self.rx[slot as usize];
        let result = read(&s.bytes, s.checksum_valid);
        s.state = RxState::Free;
        self.rx_free.push(slot);
        Some(result)
    }

    /// Frames that were dropped before they left, since [`settle`](Self::settle) was last called.
    pub(crate) fn refused(&self) -> impl Iterator<Item = &[u8]> {
        self.refused.iter().map(|slot| &self.tx[*slot as usize].bytes[..])
    }

    /// Returns the number of frames completed since the last call; their buffers now belong to the guest.
    pub(crate) fn settle(&mut self, mut completed: impl FnMut(&[u8])) -> usize {
        let count = self.completed.len();
        self.refused.clear();
        for slot in self.completed.drain(..) {
            let s = &mut self.tx[slot as usize];
            completed(&s.bytes);
            s.state = TxState::Free;
            self.tx_free.push(slot);
        }
        count
    }

    /// Frames placed since the last call, in order.
    pub(crate) fn take_placed(&mut self, mut placed: impl FnMut(&[u8])) {
        for slot in self.placed.drain(..) {
            placed(&self.rx[slot as usize].bytes);
        }
    }

    /// Returns the number of frames fetched since the last call.
    pub(crate) fn take_fetched(&mut self, mut fetched: impl FnMut(&[u8])) -> usize {
        let count = self.fetched.len();
        for slot in self.fetched.drain(..) {
            fetched(&self.tx[slot as usize].bytes);
        }
        count
    }

    /// Frames published since the last call, in order, before the guest receives them.
    pub(crate) fn take_shown(&mut self, mut shown: impl FnMut(&[u8])) {
        for slot in self.shown.drain(..) {
            shown(&self.rx[slot as usize].bytes);
        }
    }

    /// The recorded misuses.
    pub(crate) fn take_misuses(&mut self) -> Vec<Misuse> {
        std::mem::take(self.misuses.get_mut())
    }

    pub(crate) fn has_misuses(&self) -> bool {
        !self.misuses.borrow().is_empty()
    }

    /// Frames that the data path holds, in the order of their buffers.
    pub(crate) fn held(&self) -> impl Iterator<Item = &[u8]> {
        self.tx.iter().filter(|s| s.state == TxState::Held).map(|s| &s.bytes[..])
    }

    /// Frames that are placed and not visible.
    pub(crate) fn hidden(&self) -> impl Iterator<Item = &[u8]> {
        self.rx.iter().filter(|s| matches!(s.state, RxState::Placed | RxState::Published)).map(|s| &s.bytes[..])
    }

    /// The data path has crashed. Buffers that it held belong to the guest again; placed frames are lost.
    pub(crate) fn detach(&mut self) {
        for (slot, s) in (0..).zip(&mut self.tx) {
            if matches!(s.state, TxState::Held | TxState::Completed) {
                s.state = TxState::Free;
                self.tx_free.push(slot);
            }
        }
        for (slot, s) in (0..).zip(&mut self.rx) {
            if matches!(s.state, RxState::Placed | RxState::Published) {
                s.state = RxState::Free;
                self.rx_free.push(slot);
            }
        }
        self.tx_held = 0;
        self.published.clear();
        self.completed.clear();
        self.refused.clear();
        self.placed.clear();
        self.fetched.clear();
        self.shown.clear();
    }

    /// Transmit buffers that the data path holds, and receive buffers that it has placed but not published.
    pub fn outstanding(&self) -> (usize, usize) {
        let hidden = self.rx.len() - self.rx_free.len() - self.visible.len();
        (self.tx_held as usize, hidden)
    }

    /// Whether a frame was ever placed.
    #[cfg(test)]
    pub(crate) fn rx_was_used(&self) -> bool {
        !self.rx.is_empty()
    }

    fn misuse(&self, misuse: Misuse) {
        let mut all = self.misuses.borrow_mut();
        if all.len() < MAX_MISUSES {
            all.push(misuse);
        }
    }
}

impl GuestPort for SimPort {
    fn fetch(&mut self, max: usize, out: &mut Vec<TxFrame>) -> io::Result<bool> {
        #[cfg(test)]
        self.on_packets.inspect(|happens| happens(max.min(self.tx_offered.len())));
        for _ in 0..max {
            let Some(slot) = self.tx_offered.pop_front() else { return Ok(false) };
            let s = &mut self.tx[slot as usize];
            s.state = TxState::Held;
            self.tx_held += 1;
            self.fetched.push(slot);
            out.push(TxFrame { handle: TxHandle(slot), len: s.bytes.len() as u32, offload: s.offload });
        }
        Ok(!self.tx_offered.is_empty())
    }

    fn bytes(&self, handle: TxHandle) -> (&[u8], &[u8]) {
        match self.tx.get(handle.0 as usize) {
            Some(s) if s.state == TxState::Held => s.bytes.split_at(s.bytes.len().min(HEAD_BYTES)),
            Some(_) => {
                self.misuse(Misuse::TouchedAfterComplete(handle.0));
                (&[], &[])
            }
            None => {
                self.misuse(Misuse::NoSuchHandle(handle.0));
                (&[], &[])
            }
        }
    }

    fn refuse(&mut self, handle: TxHandle) {
        self.refused.push(handle.0);
        self.complete(handle);
    }

    fn complete(&mut self, handle: TxHandle) {
        match self.tx.get_mut(handle.0 as usize) {
            Some(s) if s.state == TxState::Held => {
                s.state = TxState::Completed;
                self.tx_held -= 1;
                self.completed.push(handle.0);
            }
            Some(_) => self.misuse(Misuse::CompletedTwice(handle.0)),
            None => self.misuse(Misuse::NoSuchHandle(handle.0)),
        }
    }

    fn place(&mut self, frame: &[u8], checksum_valid: bool) -> Result<RxHandle, PlaceError> {
        if frame.len() > self.max_frame {
            return Err(PlaceError::TooLarge);
        }
        #[cfg(test)]
        self.on_packets.inspect(|happens| happens(1));
        let Some(slot) = self.free_rx_slot() else {
            self.no_buffer += 1;
            return Err(PlaceError::NoBuffer);
        };
        let s = &mut self.rx[slot as usize];
        s.bytes.clear();
        s.bytes.extend_from_slice(frame);
        (s.state, s.checksum_valid) = (RxState::Placed, checksum_valid);
        self.placed.push(slot);
        Ok(RxHandle(slot))
    }

    fn publish(&mut self, handle: RxHandle) {
        match self.rx.get_mut(handle.0 as usize) {
            Some(s) if s.state == RxState::Placed => {
                s.state = RxState::Published;
                self.published.push(handle.0);
            }
            Some(_) => self.misuse(Misuse::PublishedTwice(handle.0)),
            None => self.misuse(Misuse::NoSuchHandle(handle.0)),
        }
    }

    fn discard(&mut self, handle: RxHandle) {
        match self.rx.get_mut(handle.0 as usize) {
            Some(s) if s.state == RxState::Placed => {
                s.state = RxState::Free;
                self.rx_free.push(handle.0);
                self.placed.retain(|&slot| slot != handle.0);
            }
            Some(_) => self.misuse(Misuse::DiscardedAfterPublish(handle.0)),
            None => self.misuse(Misuse::NoSuchHandle(handle.0)),
        }
    }

    fn notify(&mut self) -> io::Result<()> {
        for slot in self.published.drain(..) {
            self.rx[slot as usize].state = RxState::Visible;
            self.visible.push_back(slot);
            self.shown.push(slot);
        }
        Ok(())
    }

    fn tx_capacity(&self) -> u32 {
        self.capacity.0
    }

    fn rx_capacity(&self) -> u32 {
        self.capacity.1
    }

    fn tx_free(&self) -> u32 {
        self.tx_capacity() - self.tx_held
    }

    fn counters(&self) -> Vec<(String, u64)> {
        vec![("rx_no_buffer_frames".to_string(), self.no_buffer)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_misuse_is_detected() {
        let mut port = SimPort::new(2, 2, 100);
        let send = |port: &mut SimPort| port.send(Offload::default(), |b| b.extend([1; 60]));
        assert!(send(&mut port) && send(&mut port) && !send(&mut port), "the ring has two buffers");
        let mut frames = Vec::new();
        assert!(!port.fetch(10, &mut frames).expect("fetch"));
        assert_eq!((frames.len(), port.tx_free()), (2, 0));
        let first = frames[0].handle;
        assert_eq!(port.bytes(first).0, [1; 60]);
        port.complete(first);
        port.bytes(first);
        port.complete(first);
        assert_eq!(port.room(), 0, "the world has not checked yet");
        assert_eq!(port.settle(|frame| assert_eq!(frame, [1; 60])), 1);
        assert_eq!(port.room(), 1);
        assert_eq!(port.place(&[0; 101], true), Err(PlaceError::TooLarge));
        let placed = port.place(&[2; 60], true).expect("a buffer");
        let other = port.place(&[3; 60], true).expect("a buffer");
        assert_eq!(port.place(&[2; 60], true), Err(PlaceError::NoBuffer));
        port.publish(placed);
        port.publish(placed);
        port.discard(placed);
        port.discard(other);
        port.complete(TxHandle(9));
        assert!(!port.has_visible(), "not before the notification");
        port.notify().expect("notify");
        assert_eq!(port.receive(|frame, _| frame.to_vec()), Some(vec![2; 60]));
        assert_eq!(
            port.take_misuses(),
            [
                Misuse::TouchedAfterComplete(first.0),
                Misuse::CompletedTwice(first.0),
                Misuse::PublishedTwice(placed.0),
                Misuse::DiscardedAfterPublish(placed.0),
                Misuse::NoSuchHandle(9),
            ]
        );
        assert_eq!(port.outstanding(), (1, 0));
        port.detach();
        assert_eq!((port.outstanding(), port.room()), ((0, 0), 2));
    }
}
