//! A queue pair: its posted requests, and the batches in which they are passed to the NIC.

use std::ffi::{c_int, c_uint};
use std::ptr;

use bifrost_rnic::{
    Access, Connect, INLINE_MAX, Key, Operation, PostError, QpInit, ReceiveRequest, SendRequest, Transport, VerbsError,
};

use super::address::{Handles, flow_label};
use super::device::{Port, gid};
use super::library::{Functions, check, errno};
use super::memory::{Regions, Registered};
use super::sys;
use super::sys::{
    AhAttr, ContextOps, Cq, GlobalRoute, Pd, Qp, QpAttr, QpCap, QpInitAttr, RecvWr, Remote, RemoteMemory, RemoteQueue,
    SendWr, Sge,
};

/// Requests passed to the NIC per call.
const BATCH: usize = 32;
/// Length of the IP header area before a received datagram, bytes (IBTA 11.4.2.1).
pub(super) const GRH_LEN: u32 = 40;
/// RNR retries: the same as in the software NIC.
const NOT_READY_MAX: u8 = 6;
/// RC: the requester then waits 0.12 ms (IBTA table 46).
const NOT_READY_TIMER: u8 = 7;
/// Requested inline size, bytes: a header, and a short message.
const INLINE_WANTED: u32 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Reset,
    Ready,
    Error,
}

/// A send request that is posted and not polled.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub(super) token: u64,
    pub(super) key: Option<Key>,
}

/// A request whose work request has not been passed to the NIC.
struct Waiting<T> {
    request: T,
    pieces: [Sge; 2],
}

pub(super) struct QueuePair {
    pub(super) qp: *mut Qp,
    pub(super) number: u32,
    pub(super) init: QpInit,
    pub(super) state: State,
    /// Part of work request ids: the slot and its generation.
    name: u64,
    sends: Box<[Option<Sent>]>,
    next_send: usize,
    receives: Box<[Option<u64>]>,
    next_receive: usize,
    /// Headers of sends, and of received datagrams.
    scratch: Option<Registered>,
    inline_max: u32,
    waiting_sends: Vec<Waiting<SendWr>>,
    waiting_receives: Vec<Waiting<RecvWr>>,
    /// In the list of those with waiting requests.
    pub(super) dirty: bool,
    /// UD: address handles of destinations.
    handles: Option<Handles>,
}

/// A work request id: direction, queue pair with its generation, and position in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name {
    pub(super) receive: bool,
    pub(super) slot: u16,
    pub(super) life: u32,
    pub(super) at: u16,
}

/// Number of generation bits.
const LIFE_BITS: u32 = 31;

impl Name {
    pub(super) fn word(self) -> u64 {
        u64::from(self.receive) << 63
            | u64::from(self.slot) << 47
            | u64::from(self.life & ((1 << LIFE_BITS) - 1)) << 16
            | u64::from(self.at)
    }

    pub(super) fn of(word: u64) -> Self {
        Self {
            receive: word >> 63 == 1,
            slot: (word >> 47) as u16,
            life: (word >> 16) as u32 & ((1 << LIFE_BITS) - 1),
            at: word as u16,
        }
    }
}

/// What a queue pair needs of its device.
#[derive(Clone, Copy)]
pub(super) struct Around<'a> {
    pub(super) functions: &'a Functions,
    pub(super) port: &'a Port,
    pub(super) pd: *mut Pd,
}

impl Around<'_> {
    fn ops(&self) -> *const ContextOps {
        // SAFETY: the context is open as long as the port exists; only the field's address is computed.
        unsafe { &raw const (*self.port.context).ops }
    }
}

impl QueuePair {
    pub(super) fn new(
        around: Around<'_>,
        init: QpInit,
        queues: [*mut Cq; 2],
        slot: u16,
        life: u32,
    ) -> Result<Self, VerbsError> {
        let datagram = init.transport == Transport::Ud;
        let mut attributes = QpInitAttr {
            qp_context: ptr::null_mut(),
            send_cq: queues[0],
            recv_cq: queues[1],
            srq: ptr::null_mut(),
            cap: QpCap {
                max_send_wr: init.send_depth.into(),
                max_recv_wr: init.receive_depth.into(),
                max_send_sge: 2,
                max_recv_sge: 2,
                max_inline_data: INLINE_WANTED,
            },
            qp_type: match init.transport {
                Transport::Rc => sys::QPT_RC,
                Transport::Uc => sys::QPT_UC,
                Transport::Ud => sys::QPT_UD,
            },
            sq_sig_all: 1,
        };
        // SAFETY: domain and queues exist; the attributes live as long as the call.
        let mut qp = unsafe { (around.functions.create_qp)(around.pd, &raw mut attributes) };
        if qp.is_null() && errno() == libc::EINVAL {
            // Some devices support less inline data, or none.
            attributes.cap.max_inline_data = 0;
            // SAFETY: as above.
            qp = unsafe { (around.functions.create_qp)(around.pd, &raw mut attributes) };
        }
        if qp.is_null() {
            return Err(VerbsError::System("creating a queue pair", errno()));
        }
        let (sends, receives) = (usize::from(init.send_depth), usize::from(init.receive_depth));
        let grh = if datagram { receives * GRH_LEN as usize } else { 0 };
        let scratch = vec![0; sends * INLINE_MAX + grh];
        let mut made = Self {
            qp,
            // SAFETY: the library has just created it.
            number: unsafe { (*qp).qp_num },
            init,
            state: State::Reset,
            name: 0,
            sends: vec![None; sends].into(),
            next_send: 0,
            receives: vec![None; receives].into(),
            next_receive: 0,
            scratch: None,
            inline_max: attributes.cap.max_inline_data,
            waiting_sends: Vec::with_capacity(BATCH),
            waiting_receives: Vec::with_capacity(BATCH),
            dirty: false,
            handles: datagram.then(Handles::default),
        };
        made.begin(slot, life);
        let registered = Registered::new(around.functions, around.pd, Access::Local, u32::from(slot) << 1, scratch);
        let ready = registered.map_err(|(error, _)| error).and_then(|scratch| {
            made.scratch = Some(scratch);
            if datagram { made.make_ready(around, None) } else { Ok(()) }
        });
        match ready {
            Ok(()) => Ok(made),
            Err(error) => {
                made.destroy(around.functions);
                Err(error)
            }
        }
    }

    /// Ids of requests must differ from those before, whose completions may still arrive.
    fn begin(&mut self, slot: u16, life: u32) {
        self.name = Name { receive: false, slot, life, at: 0 }.word();
    }

    /// Connects a queue pair in the reset state.
    pub(super) fn connect(&mut self, around: Around<'_>, peer: &Connect) -> Result<(), VerbsError> {
        if self.state != State::Reset {
            return Err(VerbsError::Value("state"));
        }
        if peer.mtu > around.port.mtu {
            return Err(VerbsError::Value("path MTU: larger than the port's"));
        }
        if peer.port != bifrost_wire::roce::UDP_PORT {
            return Err(VerbsError::Value("the peer's UDP port: a NIC sends only to 4791"));
        }
        self.make_ready(around, Some(peer))
    }

    /// INIT, ready to receive, ready to send (IBTA 10.3.1). `peer`: none for UD.
    fn make_ready(&mut self, around: Around<'_>, peer: Option<&Connect>) -> Result<(), VerbsError> {
        let port = around.port;
        let mut init = QpAttr { qp_state: sys::QPS_INIT, port_num: port.port, ..QpAttr::default() };
        let mut mask = sys::QP_STATE | sys::QP_PKEY_INDEX | sys::QP_PORT;
        if peer.is_some() {
            init.qp_access_flags = sys::ACCESS_REMOTE_WRITE;
            mask |= sys::QP_ACCESS_FLAGS;
        } else {
            init.qkey = self.init.queue_key;
            mask |= sys::QP_QKEY;
        }
        self.modify(around, "queue pair to INIT", init, mask)?;
        let mut receive = QpAttr { qp_state: sys::QPS_RTR, ..QpAttr::default() };
        let mut send = QpAttr { qp_state: sys::QPS_RTS, ..QpAttr::default() };
        let (mut receive_mask, mut send_mask) = (sys::QP_STATE, sys::QP_STATE | sys::QP_SQ_PSN);
        if let Some(peer) = peer {
            receive.path_mtu = path_mtu(peer.mtu);
            receive.dest_qp_num = peer.queue_pair.get();
            receive.rq_psn = peer.receive_sequence.get();
            receive.ah_attr = way(port, gid(peer.address), peer.source_port);
            receive_mask |= sys::QP_AV | sys::QP_PATH_MTU | sys::QP_DEST_QPN | sys::QP_RQ_PSN;
            send.sq_psn = peer.send_sequence.get();
            if self.init.transport == Transport::Rc {
                receive.min_rnr_timer = NOT_READY_TIMER;
                receive_mask |= sys::QP_MAX_DEST_RD_ATOMIC | sys::QP_MIN_RNR_TIMER;
                send.timeout = timeout(peer.timeout_ns);
                send.retry_cnt = peer.retries.min(7);
                send.rnr_retry = NOT_READY_MAX;
                send_mask |= sys::QP_TIMEOUT | sys::QP_RETRY_CNT | sys::QP_RNR_RETRY | sys::QP_MAX_QP_RD_ATOMIC;
            }
        }
        self.modify(around, "queue pair to RTR (does the peer's address answer ARP or NDP?)", receive, receive_mask)?;
        self.modify(around, "queue pair to RTS", send, send_mask)?;
        self.state = State::Ready;
        Ok(())
    }

    fn modify(
        &mut self,
        around: Around<'_>,
        what: &'static str,
        mut attributes: QpAttr,
        mask: c_int,
    ) -> Result<(), VerbsError> {
        // SAFETY: the queue pair exists; the attributes live as long as the call.
        let result = unsafe { (around.functions.modify_qp)(self.qp, &raw mut attributes, mask) };
        check(what, result).map_err(|(what, number)| VerbsError::System(what, number))
    }

    /// Resets it, with a new generation. Posted requests are discarded; `let_go` gets their regions.
    pub(super) fn reset(
        &mut self,
        around: Around<'_>,
        slot: u16,
        life: u32,
        let_go: impl FnMut(Key),
    ) -> Result<(), VerbsError> {
        let reset = QpAttr { qp_state: sys::QPS_RESET, ..QpAttr::default() };
        let result = self.modify(around, "queue pair to RESET", reset, sys::QP_STATE);
        self.forget(let_go);
        self.begin(slot, life);
        if let Err(error) = result {
            self.state = State::Error;
            return Err(error);
        }
        self.state = State::Reset;
        if self.init.transport == Transport::Ud { self.make_ready(around, None) } else { Ok(()) }
    }

    /// Puts it into error, as a hardware fault does.
    pub(super) fn put_into_error(&mut self, around: Around<'_>) -> Result<(), VerbsError> {
        let error = QpAttr { qp_state: sys::QPS_ERR, ..QpAttr::default() };
        self.modify(around, "queue pair to ERR", error, sys::QP_STATE)
    }

    /// Discards posted requests.
    pub(super) fn forget(&mut self, mut let_go: impl FnMut(Key)) {
        self.waiting_sends.clear();
        self.waiting_receives.clear();
        self.sends.iter_mut().filter_map(Option::take).filter_map(|sent| sent.key).for_each(&mut let_go);
        self.receives.fill(None);
        (self.next_send, self.next_receive) = (0, 0);
        if let Some(handles) = &mut self.handles {
            handles.forget();
        }
    }

    /// Regions of posted sends, before the queue pair is removed; the requests are discarded.
    pub(super) fn take_keys(&mut self) -> Vec<Key> {
        let mut keys = Vec::new();
        self.forget(|key| keys.push(key));
        keys
    }

    /// Removes it. Posted requests must have been discarded.
    pub(super) fn destroy(mut self, functions: &Functions) {
        // SAFETY: it exists, and is not used after this.
        let destroyed = unsafe { (functions.destroy_qp)(self.qp) } == 0;
        if let Some(handles) = &mut self.handles {
            handles.clear(functions);
        }
        match self.scratch.take() {
            Some(scratch) if destroyed => drop(scratch.release(functions)),
            // The NIC may still use it.
            scratch => std::mem::forget(scratch),
        }
    }

    /// Takes a send request, which [`QueuePair::flush`] passes to the NIC. The caller must hold the region `key` of its
    /// slice.
    pub(super) fn post_send(
        &mut self,
        around: Around<'_>,
        regions: &Regions,
        now_ns: u64,
        request: &SendRequest,
    ) -> Result<(), PostError> {
        match self.state {
            State::Ready => {}
            State::Reset => return Err(PostError::NotConnected),
            State::Error => return Err(PostError::InError),
        }
        let datagram = self.init.transport == Transport::Ud;
        let inline_len = usize::from(request.inline_len);
        let suits = match request.operation {
            Operation::SendTo(to) => {
                datagram && request.len() <= around.port.mtu.into() && to.port == bifrost_wire::roce::UDP_PORT
            }
            _ => !datagram && request.len() <= 1 << 31,
        };
        if !suits || inline_len > INLINE_MAX {
            return Err(PostError::Operation);
        }
        let at = self.next_send;
        if self.sends[at].is_some() {
            return Err(PostError::Full);
        }
        let slice = request.slice.filter(|slice| slice.len > 0);
        let outline = match slice {
            Some(slice) => Some(regions.sge(slice, self.init.domain).ok_or(PostError::Memory)?),
            None => None,
        };
        let Some(scratch) = &mut self.scratch else { return Err(PostError::UnknownQueuePair) };
        let inline = request.len() <= self.inline_max && !request.is_empty();
        let mut pieces = [Sge::default(); 2];
        let mut count = 0;
        if inline_len > 0 {
            let place = at * INLINE_MAX;
            scratch.bytes_mut()[place..place + inline_len].copy_from_slice(&request.inline[..inline_len]);
            let len = inline_len as u32;
            pieces[0] = if inline { scratch.inline_sge(place, len) } else { scratch.sge(place, len) };
            count = 1;
        }
        if let Some((registered, direct)) = outline {
            pieces[count] = if inline { direct } else { registered };
            count += 1;
        }
        let (opcode, wr) = match request.operation {
            Operation::Send => (sys::WR_SEND, Remote { atomic: [0; 4] }),
            Operation::Write { address, key } => {
                (sys::WR_RDMA_WRITE, Remote { rdma: RemoteMemory { remote_addr: address, rkey: key } })
            }
            Operation::SendTo(to) => {
                let handles = self.handles.as_mut().ok_or(PostError::Operation)?;
                let way = way(around.port, gid(to.address), to.source_port);
                let ah = handles.get(around.functions, around.pd, now_ns, way)?;
                let (remote_qpn, remote_qkey) = (to.queue_pair.get(), to.queue_key);
                (sys::WR_SEND, Remote { ud: RemoteQueue { ah, remote_qpn, remote_qkey } })
            }
        };
        // WR_*_WITH_IMM is the one after.
        let opcode = opcode + c_uint::from(request.immediate.is_some());
        let work = SendWr {
            wr_id: self.name | at as u64,
            next: ptr::null_mut(),
            sg_list: ptr::null_mut(),
            num_sge: count as c_int,
            opcode,
            send_flags: sys::SEND_SIGNALED | if inline { sys::SEND_INLINE } else { 0 },
            imm_data: request.immediate.unwrap_or_default().to_be(),
            wr,
            xrc_remote_srqn: 0,
            rest: [0; 6],
        };
        self.sends[at] = Some(Sent { token: request.token, key: slice.map(|slice| slice.key) });
        self.next_send = (at + 1) % self.sends.len();
        self.waiting_sends.push(Waiting { request: work, pieces });
        Ok(())
    }

    /// Takes a receive request, which [`QueuePair::flush`] passes to the NIC.
    pub(super) fn post_receive(&mut self, regions: &Regions, request: &ReceiveRequest) -> Result<(), PostError> {
        if self.state == State::Error {
            return Err(PostError::InError);
        }
        if self.state == State::Reset {
            // The NIC accepts none before INIT.
            return Err(PostError::NotConnected);
        }
        let at = self.next_receive;
        if self.receives[at].is_some() {
            return Err(PostError::Full);
        }
        let (slice, _) = regions.sge(request.slice, self.init.domain).ok_or(PostError::Memory)?;
        let mut pieces = [slice, Sge::default()];
        let mut count = 1;
        if let (Transport::Ud, Some(scratch)) = (self.init.transport, &self.scratch) {
            pieces = [scratch.sge(self.grh(at), GRH_LEN), slice];
            count = 2;
        }
        let wr_id = self.name | 1 << 63 | at as u64;
        let work = RecvWr { wr_id, next: ptr::null_mut(), sg_list: ptr::null_mut(), num_sge: count };
        self.receives[at] = Some(request.token);
        self.next_receive = (at + 1) % self.receives.len();
        self.waiting_receives.push(Waiting { request: work, pieces });
        Ok(())
    }

    /// Whether enough requests wait to be passed to the NIC.
    pub(super) fn is_batch(&self) -> bool {
        self.waiting_sends.len() >= BATCH || self.waiting_receives.len() >= BATCH
    }

    /// Passes all requests to the NIC. If it refuses some, `refused` gets their ids, and the queue pair is in error.
    /// Returns the number of requests.
    pub(super) fn flush(&mut self, around: Around<'_>, mut refused: impl FnMut(Name)) -> u64 {
        let ops = around.ops();
        let count = self.waiting_receives.len() + self.waiting_sends.len();
        if let Some(first) = link(&mut self.waiting_receives, |work, pieces, next| {
            (work.sg_list, work.next) = (pieces, next);
        }) {
            let mut bad = ptr::null_mut();
            // SAFETY: the list and its pieces live until it is cleared below; the NIC reads neither after the call.
            let result = unsafe { (*ops).post_recv.map(|post| post(self.qp, first, &raw mut bad)) };
            if result != Some(0) {
                self.state = State::Error;
                let from = self.waiting_receives.iter().position(|w| ptr::eq(&raw const w.request, bad));
                let left = &self.waiting_receives[from.unwrap_or(0)..];
                left.iter().for_each(|waiting| refused(Name::of(waiting.request.wr_id)));
            }
            self.waiting_receives.clear();
        }
        if let Some(first) = link(&mut self.waiting_sends, |work, pieces, next| {
            (work.sg_list, work.next) = (pieces, next);
        }) {
            let mut bad = ptr::null_mut();
            // SAFETY: as above; inline data, too, is read in the call, and its memory is owned by this queue pair or
            // held.
            let result = unsafe { (*ops).post_send.map(|post| post(self.qp, first, &raw mut bad)) };
            if result != Some(0) {
                self.state = State::Error;
                let from = self.waiting_sends.iter().position(|w| ptr::eq(&raw const w.request, bad));
                let left = &self.waiting_sends[from.unwrap_or(0)..];
                left.iter().for_each(|waiting| refused(Name::of(waiting.request.wr_id)));
            }
            self.waiting_sends.clear();
        }
        count as u64
    }

    /// Whether an id is of this generation.
    pub(super) fn is_named(&self, name: Name) -> bool {
        Name { receive: false, at: 0, ..name }.word() == self.name
    }

    /// A send request has completed.
    pub(super) fn take_sent(&mut self, at: u16) -> Option<Sent> {
        let sent = self.sends.get_mut(usize::from(at))?.take();
        if let (Some(handles), true) = (&mut self.handles, sent.is_some()) {
            handles.completed();
        }
        sent
    }

    /// A receive request has completed: its token.
    pub(super) fn take_received(&mut self, at: u16) -> Option<u64> {
        self.receives.get_mut(usize::from(at))?.take()
    }

    /// UD: the headers that the NIC has written before a datagram.
    pub(super) fn header_of(&self, at: u16) -> Option<&[u8]> {
        let place = self.grh(usize::from(at));
        self.scratch.as_ref()?.bytes().get(place..place + GRH_LEN as usize)
    }

    fn grh(&self, at: usize) -> usize {
        self.sends.len() * INLINE_MAX + at * GRH_LEN as usize
    }
}

impl std::fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QueuePair").field("number", &self.number).field("state", &self.state).finish_non_exhaustive()
    }
}

/// Links requests to a list; returns the first, if there is one.
fn link<T>(waiting: &mut [Waiting<T>], mut join: impl FnMut(&mut T, *mut Sge, *mut T)) -> Option<*mut T> {
    let mut next = ptr::null_mut();
    for waiting in waiting.iter_mut().rev() {
        join(&mut waiting.request, waiting.pieces.as_mut_ptr(), next);
        next = &raw mut waiting.request;
    }
    (!next.is_null()).then_some(next)
}

/// The address vector to an address, on the path of a UDP source port.
fn way(port: &Port, dgid: sys::Gid, source_port: u16) -> AhAttr {
    AhAttr {
        grh: GlobalRoute {
            dgid,
            flow_label: flow_label(source_port),
            sgid_index: port.gid_index,
            hop_limit: 64,
            traffic_class: 0,
        },
        is_global: 1,
        port_num: port.port,
        ..AhAttr::default()
    }
}

/// A path MTU in the encoding of verbs.
fn path_mtu(mtu: u16) -> c_uint {
    u32::from(mtu).max(256).ilog2() - 7
}

/// RC: the shortest time 4.096 us x 2^n that is not shorter (IBTA 9.7.6.1.3), n from 1 to 31.
fn timeout(timeout_ns: u64) -> u8 {
    (1..31).find(|n| 4096u64 << n >= timeout_ns).unwrap_or(31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_requests_survive_encoding() {
        for name in [
            Name { receive: false, slot: 0, life: 0, at: 0 },
            Name { receive: true, slot: u16::MAX, life: (1 << 31) - 1, at: u16::MAX },
            Name { receive: false, slot: 7, life: 12_345_678, at: 90 },
        ] {
            assert_eq!(Name::of(name.word()), name);
        }
    }

    #[test]
    fn units_of_verbs() {
        let cases = [(256, 1), (512, 2), (1024, 3), (2048, 4), (4096, 5)];
        for (mtu, code) in cases {
            assert_eq!(path_mtu(mtu), code, "{mtu}");
        }
        let cases = [(1, 1), (8192, 1), (8193, 2), (4_000_000, 10), (20_000_000, 13), (u64::MAX, 31)];
        for (ns, code) in cases {
            assert_eq!(timeout(ns), code, "{ns}");
        }
    }

    #[test]
    fn requests_become_a_list() {
        let empty = RecvWr { wr_id: 0, next: ptr::null_mut(), sg_list: ptr::null_mut(), num_sge: 0 };
        let mut waiting: Vec<_> =
            (0..3).map(|n| Waiting { request: RecvWr { wr_id: n, ..empty }, pieces: [Sge::default(); 2] }).collect();
        let mut at = link(&mut waiting, |work, pieces, next| (work.sg_list, work.next) = (pieces, next)).unwrap();
        for n in 0..3u64 {
            // SAFETY: an element of the list.
            let work = unsafe { &*at };
            assert_eq!(work.wr_id, n);
            assert!(ptr::eq(work.sg_list, waiting[n as usize].pieces.as_ptr()));
            at = work.next;
        }
        assert!(at.is_null());
        assert!(link::<RecvWr>(&mut [], |_, _, _| {}).is_none());
    }
}
