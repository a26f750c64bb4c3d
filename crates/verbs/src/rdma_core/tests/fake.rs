//! A fake libibverbs with a device: sent messages arrive at once, at a queue pair of the same thread. It checks keys,
//! bounds and states as a NIC does, counts calls, and optionally has a clock.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::os::fd::IntoRawFd as _;
use std::ptr;

use crate::rdma_core::library::Functions;
use crate::rdma_core::sys::*;

/// The address of the device.
pub(super) const ADDRESS: [u8; 4] = [192, 0, 2, 9];
/// Maximum length of inline data.
pub(super) const INLINE: u32 = 48;

#[derive(Clone, Copy, Debug)]
struct Region {
    at: u64,
    len: u64,
    base: u64,
    pd: usize,
    remote: bool,
}

#[derive(Debug, Default)]
struct Pair {
    pd: usize,
    kind: c_uint,
    state: c_uint,
    peer: u32,
    queues: [usize; 2],
    receives: VecDeque<(u64, Vec<Sge>)>,
}

/// A send request, and its inline bytes.
#[derive(Debug)]
struct Sent {
    from: u32,
    work: Work,
    bytes: Option<Vec<u8>>,
    pieces: Vec<Sge>,
}

#[derive(Clone, Copy, Debug)]
struct Work {
    wr_id: u64,
    opcode: c_uint,
    imm_data: u32,
    remote: (u64, u32),
    to: (u32, u32),
}

/// The state of the device, and values for the tests.
#[derive(Debug, Default)]
pub(super) struct Fake {
    next: u32,
    regions: BTreeMap<u32, Region>,
    pairs: BTreeMap<u32, Pair>,
    completions: BTreeMap<usize, VecDeque<(Wc, u64)>>,
    waiting: VecDeque<Sent>,
    /// Requests are held, and nothing is sent.
    pub(super) hold: bool,
    /// The number of requests to accept; later ones are refused.
    pub(super) refuse_after: Option<usize>,
    pub(super) has_clock: bool,
    pub(super) ticks: u64,
    pub(super) posts: usize,
    pub(super) inline: usize,
    pub(super) resized: Vec<c_int>,
    pub(super) labels: Vec<u32>,
    /// Existing objects: domains, address handles, queues, channels, devices.
    pub(super) objects: i64,
}

thread_local! {
    static FAKE: RefCell<Fake> = RefCell::default();
}

/// Inspects or changes the device.
pub(super) fn fake<T>(what: impl FnOnce(&mut Fake) -> T) -> T {
    FAKE.with(|fake| what(&mut fake.borrow_mut()))
}

impl Fake {
    /// Number of existing regions and queue pairs.
    pub(super) fn registered(&self) -> (usize, usize) {
        (self.regions.len(), self.pairs.len())
    }

    /// Sends the held requests.
    pub(super) fn release(&mut self) {
        self.hold = false;
        while let Some(sent) = self.waiting.pop_front() {
            self.send(sent);
        }
    }

    fn place(&self, sge: &Sge, pd: usize) -> Option<u64> {
        let region = self.regions.get(&sge.lkey).filter(|region| region.pd == pd)?;
        let offset = sge.addr.checked_sub(region.base)?;
        (offset + u64::from(sge.length) <= region.len).then_some(region.at + offset)
    }

    fn complete(&mut self, queue: usize, wc: Wc) {
        self.ticks += 1000;
        let ticks = self.ticks;
        self.completions.entry(queue).or_default().push_back((wc, ticks));
    }

    fn send(&mut self, sent: Sent) {
        let Some(pair) = self.pairs.get(&sent.from) else { return };
        let (kind, pd, queue, peer) = (pair.kind, pair.pd, pair.queues[0], pair.peer);
        let mut wc = Wc { wr_id: sent.work.wr_id, ..Wc::default() };
        if pair.state != QPS_RTS {
            wc.status = WC_WR_FLUSH_ERR;
            return self.complete(queue, wc);
        }
        let mut bytes = sent.bytes.clone().unwrap_or_default();
        for piece in &sent.pieces {
            let Some(at) = self.place(piece, pd) else {
                wc.status = WC_LOC_PROT_ERR;
                self.pairs.get_mut(&sent.from).unwrap().state = QPS_ERR;
                return self.complete(queue, wc);
            };
            // SAFETY: inside of registered memory.
            bytes.extend(unsafe { std::slice::from_raw_parts(at as *const u8, piece.length as usize) });
        }
        self.complete(queue, wc);
        let to = if kind == QPT_UD { sent.work.to.0 } else { peer };
        self.deliver(sent.from, to, &sent.work, &bytes, kind == QPT_UD);
    }

    fn deliver(&mut self, from: u32, to: u32, work: &Work, bytes: &[u8], datagram: bool) {
        let Some(pair) = self.pairs.get_mut(&to) else { return };
        let (pd, queue) = (pair.pd, pair.queues[1]);
        let write = work.opcode < WR_SEND;
        let immediate = work.opcode % 2 == 1;
        let mut wc = Wc { byte_len: bytes.len() as u32, src_qp: from, ..Wc::default() };
        if immediate {
            (wc.wc_flags, wc.imm_data) = (WC_WITH_IMM, work.imm_data);
        }
        if write {
            let (address, key) = work.remote;
            let Some(region) = self.regions.get(&key).filter(|region| region.remote && region.pd == pd) else { return };
            let offset = address - region.base;
            assert!(offset + bytes.len() as u64 <= region.len);
            // SAFETY: inside of registered memory.
            unsafe { ptr::copy(bytes.as_ptr(), (region.at + offset) as *mut u8, bytes.len()) };
            if !immediate {
                return;
            }
            wc.opcode = WC_RECV_RDMA_WITH_IMM;
        } else {
            wc.opcode = 128;
        }
        let Some((wr_id, pieces)) = self.pairs.get_mut(&to).unwrap().receives.pop_front() else { return };
        wc.wr_id = wr_id;
        if !write {
            let mut header = vec![0; if datagram { 40 } else { 0 }];
            if datagram {
                wc.wc_flags |= WC_GRH;
                wc.byte_len += 40;
                header[20] = 0x45;
                header[32..36].copy_from_slice(&ADDRESS);
            }
            let mut left = &[&header, bytes].concat()[..];
            for piece in pieces {
                let at = self.place(&piece, pd).unwrap();
                let (now, rest) = left.split_at(left.len().min(piece.length as usize));
                // SAFETY: inside of registered memory.
                unsafe { ptr::copy(now.as_ptr(), at as *mut u8, now.len()) };
                left = rest;
            }
            assert!(left.is_empty(), "longer than the receive request");
        }
        self.complete(queue, wc);
    }

    fn number(&mut self) -> u32 {
        self.next += 1;
        self.next + 16
    }
}

unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut Device {
    // SAFETY: the caller's.
    unsafe { *count = 1 };
    fake(|fake| fake.objects += 1);
    Box::into_raw(Box::new([ptr::null_mut::<Device>(); 2])).cast()
}

unsafe extern "C" fn free_device_list(list: *mut *mut Device) {
    fake(|fake| fake.objects -= 1);
    // SAFETY: of `get_device_list`.
    drop(unsafe { Box::from_raw(list.cast::<[*mut Device; 2]>()) });
}

unsafe extern "C" fn get_device_name(_: *mut Device) -> *const c_char {
    c"fake0".as_ptr()
}

unsafe extern "C" fn open_device(_: *mut Device) -> *mut Context {
    let null = || File::open("/dev/null").unwrap().into_raw_fd();
    // SAFETY: null pointers and numbers.
    let mut device: Box<VerbsContext> = Box::new(unsafe { std::mem::zeroed() });
    device.size = size_of::<VerbsContext>();
    let context = &mut device.context;
    context.async_fd = null();
    context.ops.poll_cq = Some(poll_cq);
    context.ops.post_send = Some(post_send);
    context.ops.post_recv = Some(post_recv);
    context.ops.req_notify_cq = Some(req_notify_cq);
    context.abi_compat = ptr::without_provenance_mut(usize::MAX);
    let has_clock = fake(|fake| {
        fake.objects += 1;
        fake.has_clock
    });
    if has_clock {
        device.query_rt_values = Some(query_rt_values);
        device.query_device_ex = Some(query_device_ex);
        device.create_cq_ex = Some(create_cq_ex);
    }
    // SAFETY: the field of a device that is not freed.
    unsafe { &raw mut (*Box::into_raw(device)).context }
}

unsafe extern "C" fn close_device(_: *mut Context) -> c_int {
    fake(|fake| fake.objects -= 1);
    0
}

unsafe extern "C" fn query_device(_: *mut Context, attributes: *mut DeviceAttr) -> c_int {
    // SAFETY: the caller's.
    unsafe { (*attributes).max_cqe = 20_000 };
    0
}

unsafe extern "C" fn query_port(_: *mut Context, _: u8, port: *mut PortAttr) -> c_int {
    // SAFETY: the caller's.
    unsafe { (*port).state = PORT_ACTIVE };
    // SAFETY: the caller's.
    unsafe { (*port).active_mtu = 5 };
    0
}

unsafe extern "C" fn query_gid_table(_: *mut Context, at: *mut GidEntry, _: usize, _: u32, size: usize) -> isize {
    assert_eq!(size, size_of::<GidEntry>());
    let mut gid = [0; 16];
    gid[10..12].fill(0xff);
    gid[12..].copy_from_slice(&ADDRESS);
    let entry = GidEntry { gid: Gid(gid), gid_index: 3, port_num: 1, gid_type: GID_TYPE_ROCE_V2, ndev_ifindex: 0 };
    // SAFETY: the caller has room; the first is of another type.
    unsafe {
        *at = GidEntry { gid_type: 1, ..entry };
        *at.add(1) = entry;
    }
    2
}

unsafe extern "C" fn get_async_event(_: *mut Context, _: *mut AsyncEvent) -> c_int {
    -1
}

unsafe extern "C" fn ack_async_event(_: *mut AsyncEvent) {}

unsafe extern "C" fn alloc_pd(context: *mut Context) -> *mut Pd {
    fake(|fake| fake.objects += 1);
    Box::into_raw(Box::new(Pd { context, handle: 0 }))
}

unsafe extern "C" fn dealloc_pd(_: *mut Pd) -> c_int {
    fake(|fake| fake.objects -= 1);
    0
}

unsafe extern "C" fn reg_mr(pd: *mut Pd, addr: *mut c_void, length: usize, base: u64, access: c_int) -> *mut Mr {
    let remote = access as c_uint & ACCESS_REMOTE_WRITE != 0;
    let region = Region { at: addr as u64, len: length as u64, base, pd: pd as usize, remote };
    let key = fake(|fake| {
        let key = fake.number();
        fake.regions.insert(key, region);
        key
    });
    let context = ptr::null_mut();
    Box::into_raw(Box::new(Mr { context, pd, addr, length, handle: 0, lkey: key, rkey: if remote { key } else { 0 } }))
}

unsafe extern "C" fn dereg_mr(mr: *mut Mr) -> c_int {
    // SAFETY: of `reg_mr`.
    let mr = unsafe { Box::from_raw(mr) };
    assert!(fake(|fake| fake.regions.remove(&mr.lkey)).is_some());
    0
}

unsafe extern "C" fn create_comp_channel(context: *mut Context) -> *mut CompChannel {
    fake(|fake| fake.objects += 1);
    let fd = File::open("/dev/null").unwrap().into_raw_fd();
    Box::into_raw(Box::new(CompChannel { context, fd, refcnt: 0 }))
}

unsafe extern "C" fn destroy_comp_channel(_: *mut CompChannel) -> c_int {
    fake(|fake| fake.objects -= 1);
    0
}

unsafe extern "C" fn get_cq_event(_: *mut CompChannel, _: *mut *mut Cq, _: *mut *mut c_void) -> c_int {
    -1
}

unsafe extern "C" fn ack_cq_events(_: *mut Cq, _: c_uint) {}

unsafe extern "C" fn req_notify_cq(_: *mut Cq, _: c_int) -> c_int {
    0
}

unsafe extern "C" fn create_cq(
    context: *mut Context,
    cqe: c_int,
    _: *mut c_void,
    channel: *mut CompChannel,
    _: c_int,
) -> *mut Cq {
    fake(|fake| fake.objects += 1);
    // SAFETY: null pointers and numbers.
    let mut cq: Box<CqEx> = Box::new(unsafe { std::mem::zeroed() });
    (cq.base.context, cq.base.channel, cq.base.cqe) = (context, channel, cqe);
    Box::into_raw(cq).cast()
}

unsafe extern "C" fn create_cq_ex(context: *mut Context, attributes: *mut CqInitAttrEx) -> *mut CqEx {
    // SAFETY: the caller's.
    let (channel, flags) = unsafe { ((*attributes).channel, (*attributes).wc_flags) };
    assert!(flags & WC_EX_WITH_COMPLETION_TIMESTAMP != 0);
    // SAFETY: as above.
    let cq: *mut CqEx = unsafe { create_cq(context, 1, ptr::null_mut(), channel, 0) }.cast();
    // SAFETY: just made.
    let fields = unsafe { &mut *cq };
    fields.start_poll = Some(start_poll);
    fields.next_poll = Some(next_poll);
    fields.end_poll = Some(end_poll);
    fields.read_opcode = Some(read_opcode);
    fields.read_byte_len = Some(read_byte_len);
    fields.read_imm_data = Some(read_imm_data);
    fields.read_src_qp = Some(read_src_qp);
    fields.read_wc_flags = Some(read_wc_flags);
    fields.read_completion_ts = Some(read_completion_ts);
    cq
}

/// Shows the first completion.
fn show(cq: *mut CqEx) -> c_int {
    let Some((wc, _)) = fake(|fake| fake.completions.entry(cq as usize).or_default().front().copied()) else {
        return libc::ENOENT;
    };
    // SAFETY: of `create_cq`.
    unsafe { ((*cq).wr_id, (*cq).status) = (wc.wr_id, wc.status) };
    0
}

fn first(cq: *mut CqEx) -> (Wc, u64) {
    fake(|fake| fake.completions[&(cq as usize)][0])
}

unsafe extern "C" fn start_poll(cq: *mut CqEx, _: *mut PollCqAttr) -> c_int {
    show(cq)
}

unsafe extern "C" fn next_poll(cq: *mut CqEx) -> c_int {
    fake(|fake| fake.completions.get_mut(&(cq as usize)).and_then(VecDeque::pop_front));
    show(cq)
}

unsafe extern "C" fn end_poll(cq: *mut CqEx) {
    // A poll that ended because there was nothing more has taken the last one.
    fake(|fake| fake.completions.get_mut(&(cq as usize)).and_then(VecDeque::pop_front));
}

unsafe extern "C" fn read_opcode(cq: *mut CqEx) -> u32 {
    first(cq).0.opcode
}

unsafe extern "C" fn read_byte_len(cq: *mut CqEx) -> u32 {
    first(cq).0.byte_len
}

unsafe extern "C" fn read_imm_data(cq: *mut CqEx) -> u32 {
    first(cq).0.imm_data
}

unsafe extern "C" fn read_src_qp(cq: *mut CqEx) -> u32 {
    first(cq).0.src_qp
}

unsafe extern "C" fn read_wc_flags(cq: *mut CqEx) -> u32 {
    first(cq).0.wc_flags
}

unsafe extern "C" fn read_completion_ts(cq: *mut CqEx) -> u64 {
    first(cq).1
}

unsafe extern "C" fn query_rt_values(_: *mut Context, values: *mut ValuesEx) -> c_int {
    // SAFETY: the caller's.
    unsafe { (*values).raw_clock = libc::timespec { tv_sec: 0, tv_nsec: fake(|fake| fake.ticks) as i64 } };
    0
}

unsafe extern "C" fn query_device_ex(
    _: *mut Context,
    _: *const c_void,
    attributes: *mut DeviceAttrEx,
    size: usize,
) -> c_int {
    assert_eq!(size, size_of::<DeviceAttrEx>());
    // SAFETY: the caller's.
    unsafe { ((*attributes).completion_timestamp_mask, (*attributes).hca_core_clock) = (u64::MAX, 500_000) };
    0
}

unsafe extern "C" fn resize_cq(_: *mut Cq, cqe: c_int) -> c_int {
    fake(|fake| fake.resized.push(cqe));
    0
}

unsafe extern "C" fn destroy_cq(_: *mut Cq) -> c_int {
    fake(|fake| fake.objects -= 1);
    0
}

unsafe extern "C" fn create_qp(pd: *mut Pd, attributes: *mut QpInitAttr) -> *mut Qp {
    // SAFETY: the caller's.
    let attributes = unsafe { &mut *attributes };
    attributes.cap.max_inline_data = INLINE;
    // SAFETY: null pointers and numbers.
    let mut qp: Box<Qp> = Box::new(unsafe { std::mem::zeroed() });
    let number = fake(|fake| fake.number());
    qp.qp_num = number;
    // SAFETY: a domain of `alloc_pd`.
    qp.context = unsafe { (*pd).context };
    let qp = Box::into_raw(qp);
    let queues = [attributes.send_cq as usize, attributes.recv_cq as usize];
    let pair = Pair { pd: pd as usize, kind: attributes.qp_type, queues, ..Pair::default() };
    fake(|fake| fake.pairs.insert(number, pair));
    qp
}

unsafe extern "C" fn modify_qp(qp: *mut Qp, attributes: *mut QpAttr, mask: c_int) -> c_int {
    // SAFETY: of `create_qp`, and the caller's.
    let (number, attributes) = unsafe { ((*qp).qp_num, &*attributes) };
    fake(|fake| {
        let pair = fake.pairs.get_mut(&number).unwrap();
        // IBTA 10.3.1: one state after the other.
        let may = match attributes.qp_state {
            QPS_RESET | QPS_ERR => true,
            next => pair.state + 1 == next,
        };
        if !may {
            return libc::EINVAL;
        }
        pair.state = attributes.qp_state;
        if mask & QP_DEST_QPN != 0 {
            pair.peer = attributes.dest_qp_num;
            assert_eq!((attributes.ah_attr.grh.sgid_index, attributes.ah_attr.is_global), (3, 1));
            fake.labels.push(attributes.ah_attr.grh.flow_label);
        }
        let (receives, queue) = match attributes.qp_state {
            QPS_RESET | QPS_ERR => (std::mem::take(&mut pair.receives), pair.queues[1]),
            _ => return 0,
        };
        if attributes.qp_state == QPS_ERR {
            for (wr_id, _) in receives {
                fake.complete(queue, Wc { wr_id, status: WC_WR_FLUSH_ERR, ..Wc::default() });
            }
        }
        0
    })
}

unsafe extern "C" fn destroy_qp(qp: *mut Qp) -> c_int {
    // SAFETY: of `create_qp`.
    let qp = unsafe { Box::from_raw(qp) };
    assert!(fake(|fake| fake.pairs.remove(&qp.qp_num)).is_some());
    0
}

unsafe extern "C" fn create_ah(_: *mut Pd, attributes: *mut AhAttr) -> *mut Ah {
    // SAFETY: the caller's.
    let label = unsafe { (*attributes).grh.flow_label };
    fake(|fake| {
        fake.objects += 1;
        fake.labels.push(label);
        ptr::without_provenance_mut(fake.number() as usize)
    })
}

unsafe extern "C" fn destroy_ah(_: *mut Ah) -> c_int {
    fake(|fake| fake.objects -= 1);
    0
}

unsafe extern "C" fn post_send(qp: *mut Qp, mut next: *mut SendWr, bad: *mut *mut SendWr) -> c_int {
    // SAFETY: of `create_qp`.
    let from = unsafe { (*qp).qp_num };
    fake(|fake| fake.posts += 1);
    // SAFETY: a list of requests, as verbs.h has it.
    while let Some(work) = unsafe { next.as_ref() } {
        if fake(|fake| {
            fake.refuse_after.as_mut().is_some_and(|left| std::mem::replace(left, left.saturating_sub(1)) == 0)
        }) {
            // SAFETY: the caller's.
            unsafe { *bad = next };
            return libc::ENOMEM;
        }
        let pieces = match work.num_sge {
            0 => vec![],
            // SAFETY: as many pieces as the request says.
            count => unsafe { std::slice::from_raw_parts(work.sg_list, count as usize) }.to_vec(),
        };
        let inline = work.send_flags & SEND_INLINE != 0;
        // SAFETY: inline pieces are addresses of this process.
        let read = |p: &Sge| unsafe { std::slice::from_raw_parts(p.addr as *const u8, p.length as usize) }.to_vec();
        let bytes = inline.then(|| pieces.iter().flat_map(read).collect::<Vec<u8>>());
        assert!(bytes.as_ref().is_none_or(|bytes| bytes.len() <= INLINE as usize));
        // SAFETY: all of it is numbers.
        let (rdma, ud) = unsafe { (work.wr.rdma, work.wr.ud) };
        let sent = Sent {
            from,
            work: Work {
                wr_id: work.wr_id,
                opcode: work.opcode,
                imm_data: work.imm_data,
                remote: (rdma.remote_addr, rdma.rkey),
                to: (ud.remote_qpn, ud.remote_qkey),
            },
            bytes,
            pieces: if inline { vec![] } else { pieces },
        };
        fake(|fake| {
            fake.inline += usize::from(inline);
            if fake.hold { fake.waiting.push_back(sent) } else { fake.send(sent) }
        });
        next = work.next;
    }
    0
}

unsafe extern "C" fn post_recv(qp: *mut Qp, mut next: *mut RecvWr, _: *mut *mut RecvWr) -> c_int {
    // SAFETY: of `create_qp`.
    let number = unsafe { (*qp).qp_num };
    // SAFETY: a list of requests, as verbs.h has it.
    while let Some(work) = unsafe { next.as_ref() } {
        // SAFETY: as many pieces as the request says.
        let pieces = unsafe { std::slice::from_raw_parts(work.sg_list, work.num_sge as usize) }.to_vec();
        fake(|fake| fake.pairs.get_mut(&number).unwrap().receives.push_back((work.wr_id, pieces)));
        next = work.next;
    }
    0
}

unsafe extern "C" fn poll_cq(cq: *mut Cq, max: c_int, out: *mut Wc) -> c_int {
    fake(|fake| {
        let queue = fake.completions.entry(cq as usize).or_default();
        let count = queue.len().min(max as usize);
        for (at, (wc, _)) in queue.drain(..count).enumerate() {
            // SAFETY: the caller has room for `max`.
            unsafe { *out.add(at) = wc };
        }
        count as c_int
    })
}

/// The library.
pub(super) static FUNCTIONS: Functions = Functions {
    get_device_list,
    free_device_list,
    get_device_name,
    open_device,
    close_device,
    query_device,
    query_port,
    query_gid_table,
    get_async_event,
    ack_async_event,
    alloc_pd,
    dealloc_pd,
    reg_mr,
    dereg_mr,
    create_comp_channel,
    destroy_comp_channel,
    get_cq_event,
    ack_cq_events,
    create_cq,
    resize_cq,
    destroy_cq,
    create_qp,
    modify_qp,
    destroy_qp,
    create_ah,
    destroy_ah,
};
