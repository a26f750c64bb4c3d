//! The verbs that users need of a NIC.

use std::net::IpAddr;

use bifrost_rnic::{
    Access, Completion, Connect, CqId, Domain, Key, Nic, PostError, QpInit, Qpn, ReceiveRequest, Region, SendRequest,
    Slice, VerbsError,
};

/// A NIC with verbs. It owns the memory of its regions, so nothing else reads or writes it meanwhile.
pub trait Provider {
    /// The address of its packets.
    fn address(&self) -> IpAddr;
    /// The UDP port on which it receives.
    fn port(&self) -> u16;
    /// The NIC's time, ns, when the caller's clock shows `now_ns`.
    fn clock_ns(&mut self, now_ns: u64) -> u64;
    /// Creates a completion queue.
    ///
    /// # Errors
    /// If none is left.
    fn create_queue(&mut self) -> Result<CqId, VerbsError>;
    /// Creates a queue pair.
    ///
    /// # Errors
    /// If none is left, or a value is out of range.
    fn create_queue_pair(&mut self, init: QpInit) -> Result<Qpn, VerbsError>;
    /// Connects a queue pair.
    ///
    /// # Errors
    /// If it is not in the reset state, or a value is out of range.
    fn connect(&mut self, queue_pair: Qpn, peer: Connect) -> Result<(), VerbsError>;
    /// Resets a queue pair and discards posted requests.
    ///
    /// # Errors
    /// If there is no such queue pair.
    fn reset(&mut self, queue_pair: Qpn) -> Result<(), VerbsError>;
    /// Removes a queue pair.
    ///
    /// # Errors
    /// If there is no such queue pair.
    fn destroy(&mut self, queue_pair: Qpn) -> Result<(), VerbsError>;
    /// Registers memory.
    ///
    /// # Errors
    /// If no key is left; the memory is returned.
    fn register(&mut self, domain: Domain, access: Access, memory: Vec<u8>) -> Result<Region, (VerbsError, Vec<u8>)>;
    /// Deregisters memory and returns it; nothing writes to it any more.
    fn deregister(&mut self, key: Key) -> Option<Vec<u8>>;
    /// Bytes of registered memory.
    fn bytes(&self, slice: Slice) -> Option<&[u8]>;
    /// Bytes of registered memory, mutable.
    fn bytes_mut(&mut self, slice: Slice) -> Option<&mut [u8]>;
    /// Copies between two regions; returns whether both slices are inside their regions and have the same length.
    fn copy(&mut self, from: Slice, to: Slice) -> bool;
    /// Posts a send request.
    ///
    /// # Errors
    /// A [`PostError`].
    fn post_send(&mut self, queue_pair: Qpn, request: SendRequest) -> Result<(), PostError>;
    /// Posts a receive request.
    ///
    /// # Errors
    /// A [`PostError`].
    fn post_receive(&mut self, queue_pair: Qpn, request: ReceiveRequest) -> Result<(), PostError>;
    /// Moves up to `max` completions to the end of `out`.
    fn poll(&mut self, queue: CqId, max: usize, out: &mut Vec<Completion>) -> usize;
}

/// A provider around the software NIC.
pub trait Software {
    /// The NIC.
    fn nic(&self) -> &Nic;
    /// The NIC, mutable.
    fn nic_mut(&mut self) -> &mut Nic;
}

impl Software for Nic {
    fn nic(&self) -> &Nic {
        self
    }
    fn nic_mut(&mut self) -> &mut Nic {
        self
    }
}

impl<T: Software> Provider for T {
    fn address(&self) -> IpAddr {
        self.nic().address()
    }
    fn port(&self) -> u16 {
        self.nic().port()
    }
    /// The caller passes the time to the software NIC.
    fn clock_ns(&mut self, now_ns: u64) -> u64 {
        now_ns
    }
    fn create_queue(&mut self) -> Result<CqId, VerbsError> {
        self.nic_mut().create_queue()
    }
    fn create_queue_pair(&mut self, init: QpInit) -> Result<Qpn, VerbsError> {
        self.nic_mut().create_queue_pair(init)
    }
    fn connect(&mut self, queue_pair: Qpn, peer: Connect) -> Result<(), VerbsError> {
        self.nic_mut().connect(queue_pair, peer)
    }
    fn reset(&mut self, queue_pair: Qpn) -> Result<(), VerbsError> {
        self.nic_mut().reset(queue_pair)
    }
    fn destroy(&mut self, queue_pair: Qpn) -> Result<(), VerbsError> {
        self.nic_mut().destroy(queue_pair)
    }
    fn register(&mut self, domain: Domain, access: Access, memory: Vec<u8>) -> Result<Region, (VerbsError, Vec<u8>)> {
        self.nic_mut().register(domain, access, memory)
    }
    fn deregister(&mut self, key: Key) -> Option<Vec<u8>> {
        self.nic_mut().deregister(key)
    }
    fn bytes(&self, slice: Slice) -> Option<&[u8]> {
        self.nic().bytes(slice)
    }
    fn bytes_mut(&mut self, slice: Slice) -> Option<&mut [u8]> {
        self.nic_mut().bytes_mut(slice)
    }
    fn copy(&mut self, from: Slice, to: Slice) -> bool {
        self.nic_mut().copy(from, to)
    }
    fn post_send(&mut self, queue_pair: Qpn, request: SendRequest) -> Result<(), PostError> {
        self.nic_mut().post_send(queue_pair, request)
    }
    fn post_receive(&mut self, queue_pair: Qpn, request: ReceiveRequest) -> Result<(), PostError> {
        self.nic_mut().post_receive(queue_pair, request)
    }
    fn poll(&mut self, queue: CqId, max: usize, out: &mut Vec<Completion>) -> usize {
        self.nic_mut().poll(queue, max, out)
    }
}
