//! What a user of verbs needs of a NIC.

use std::net::IpAddr;

use bifrost_rnic::{
    Access, Completion, Connect, CqId, Domain, Key, Nic, PostError, QpInit, Qpn, ReceiveRequest, Region, SendRequest,
    Slice, VerbsError,
};

/// A NIC with verbs. Its memory regions own the memory, so that nobody else reads or writes it meanwhile.
pub trait Provider {
    /// The address of its packets.
    fn address(&self) -> IpAddr;
    /// The UDP port on which it receives.
    fn port(&self) -> u16;
    /// What its clock shows, ns, when the caller's shows `now_ns`.
    fn clock_ns(&mut self, now_ns: u64) -> u64;
    /// A new completion queue.
    ///
    /// # Errors
    /// When there is none left.
    fn create_queue(&mut self) -> Result<CqId, VerbsError>;
    /// A new queue pair.
    ///
    /// # Errors
    /// When there is none left, or a value is out of range.
    fn create_queue_pair(&mut self, init: QpInit) -> Result<Qpn, VerbsError>;
    /// Connects a queue pair.
    ///
    /// # Errors
    /// When it is not reset, or a value is out of range.
    fn connect(&mut self, queue_pair: Qpn, peer: Connect) -> Result<(), VerbsError>;
    /// Resets a queue pair and forgets what was posted.
    ///
    /// # Errors
    /// When there is no such queue pair.
    fn reset(&mut self, queue_pair: Qpn) -> Result<(), VerbsError>;
    /// Removes a queue pair.
    ///
    /// # Errors
    /// When there is no such queue pair.
    fn destroy(&mut self, queue_pair: Qpn) -> Result<(), VerbsError>;
    /// Registers memory.
    ///
    /// # Errors
    /// When there is no key left; the memory comes back.
    fn register(&mut self, domain: Domain, access: Access, memory: Vec<u8>) -> Result<Region, (VerbsError, Vec<u8>)>;
    /// Gives memory back; nobody writes there any more.
    fn deregister(&mut self, key: Key) -> Option<Vec<u8>>;
    /// Bytes of registered memory.
    fn bytes(&self, slice: Slice) -> Option<&[u8]>;
    /// Bytes of registered memory, to be written.
    fn bytes_mut(&mut self, slice: Slice) -> Option<&mut [u8]>;
    /// Copies between two regions; whether both slices are inside and of one length.
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
    /// The NIC, to be changed.
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
    /// The software NIC is told the time by its caller.
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
