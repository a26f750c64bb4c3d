//! Completion queues of the NIC, with hardware timestamps if available.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::mem::offset_of;
use std::ptr;

use bifrost_rnic::{Completion, Status, VerbsError};

use super::clock::{Ticks, read, ticks};
use super::device::Port;
use super::library::{Functions, check, errno};
use super::sys;
use super::sys::{CompChannel, Cq, CqEx, CqInitAttrEx, PollCqAttr, VerbsContext, Wc, extended};

/// Completions taken from the NIC per call.
pub(super) const BATCH: usize = 32;
/// Initial capacity of a queue; it grows with its queue pairs.
const ROOM: u32 = 4096;

/// A completion queue.
pub(super) struct Queue {
    cq: *mut Cq,
    /// The same, if completions have hardware timestamps.
    timed: Option<*mut CqEx>,
    /// Its capacity, and the number of requests that its queue pairs may post.
    room: u32,
    depths: u32,
    /// Completions that the NIC did not create, or that were fetched early.
    pub(super) ready: VecDeque<Completion>,
    scratch: Box<[Wc; BATCH]>,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("room", &self.room).field("depths", &self.depths).finish_non_exhaustive()
    }
}

/// A completion, as reported by the NIC.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Raw {
    pub(super) wc: Wc,
    /// Timestamp of the NIC's clock, ticks.
    pub(super) ticks: Option<u64>,
}

/// The NIC's clock, or that of the caller.
#[derive(Debug)]
pub(super) enum Clock {
    /// Not known yet whether the NIC has one.
    Unknown,
    Nic(Ticks),
    Software,
}

impl Clock {
    /// Its time when the caller's clock shows `now_ns`.
    pub(super) fn now_ns(&mut self, port: &Port, now_ns: u64) -> u64 {
        // SAFETY: the port's device is open.
        let ticks = if let Self::Nic(_) = self { unsafe { read(port.context) } } else { None };
        self.ns(ticks, now_ns)
    }

    /// The time of a completion that is polled at `now_ns`.
    pub(super) fn ns(&mut self, at: Option<u64>, now_ns: u64) -> u64 {
        match (self, at) {
            (Self::Nic(ticks), Some(at)) => ticks.ns(at),
            _ => now_ns,
        }
    }
}

impl Queue {
    pub(super) fn new(
        functions: &Functions,
        port: &Port,
        channel: *mut CompChannel,
        clock: &mut Clock,
    ) -> Result<Self, VerbsError> {
        let room = ROOM.min(port.completions_max);
        if let Clock::Unknown = clock {
            // SAFETY: the port's device is open.
            *clock = unsafe { ticks(port.context) }.map_or(Clock::Software, Clock::Nic);
            if let Clock::Nic(_) = clock
                && let Some(cq) = timed(port, channel, room)
            {
                return Ok(Self::of(cq.cast(), Some(cq), room));
            }
            *clock = Clock::Software;
        } else if let Clock::Nic(_) = clock {
            let cq = timed(port, channel, room).ok_or(VerbsError::System("creating a completion queue", errno()))?;
            return Ok(Self::of(cq.cast(), Some(cq), room));
        }
        // SAFETY: the device is open; the channel is there or null.
        let cq = unsafe { (functions.create_cq)(port.context, room as c_int, ptr::null_mut(), channel, 0) };
        if cq.is_null() {
            return Err(VerbsError::System("creating a completion queue", errno()));
        }
        Ok(Self::of(cq, None, room))
    }

    fn of(cq: *mut Cq, timed: Option<*mut CqEx>, room: u32) -> Self {
        Self { cq, timed, room, depths: 0, ready: VecDeque::new(), scratch: Box::new([Wc::default(); BATCH]) }
    }

    pub(super) fn cq(&self) -> *mut Cq {
        self.cq
    }

    /// Makes room for the requests of another queue pair: a queue that overflows is in error.
    pub(super) fn grow(&mut self, functions: &Functions, max: u32, by: u32) -> Result<(), VerbsError> {
        let wanted = self.depths + by;
        if wanted > max {
            return Err(VerbsError::Value("connections: their requests exceed a completion queue of this NIC"));
        }
        if wanted > self.room {
            let room = wanted.max(2 * self.room).min(max);
            // SAFETY: the queue exists.
            let result = unsafe { (functions.resize_cq)(self.cq, room as c_int) };
            check("enlarging a completion queue", result).map_err(|(what, n)| VerbsError::System(what, n))?;
            self.room = room;
        }
        self.depths = wanted;
        Ok(())
    }

    pub(super) fn shrink(&mut self, by: u32) {
        self.depths = self.depths.saturating_sub(by);
    }

    /// Takes completions from the NIC and returns their number.
    pub(super) fn poll(&mut self, into: &mut [Raw; BATCH]) -> usize {
        if let Some(cq) = self.timed {
            // SAFETY: the queue exists.
            return unsafe { poll_timed(cq, into) };
        }
        // SAFETY: the queue and its device exist, and the function writes at most as many completions as there is room
        // for.
        let count = unsafe {
            let poll = (*(*self.cq).context).ops.poll_cq;
            poll.map_or(0, |poll| poll(self.cq, BATCH as c_int, self.scratch.as_mut_ptr()))
        };
        let count = usize::try_from(count).unwrap_or(0).min(BATCH);
        for (raw, wc) in into.iter_mut().zip(&self.scratch[..count]) {
            *raw = Raw { wc: *wc, ticks: None };
        }
        count
    }

    /// Requests an event for the next completion.
    pub(super) fn arm(&self) {
        // SAFETY: the queue and its device exist.
        unsafe {
            if let Some(notify) = (*(*self.cq).context).ops.req_notify_cq {
                notify(self.cq, 0);
            }
        }
    }

    /// Removes it.
    pub(super) fn destroy(&self, functions: &Functions) {
        // SAFETY: it exists, no queue pair uses it, and events are acknowledged.
        let _ = unsafe { (functions.destroy_cq)(self.cq) };
    }
}

/// A queue with hardware timestamps, if the NIC supports them.
fn timed(port: &Port, channel: *mut CompChannel, room: u32) -> Option<*mut CqEx> {
    // SAFETY: the port's device is open.
    let functions = unsafe { extended(port.context, offset_of!(VerbsContext, create_cq_ex)) }?;
    // SAFETY: `extended` says that the structure has this field.
    let create = unsafe { (&raw const (*functions).create_cq_ex).read() }?;
    let mut attributes = CqInitAttrEx {
        cqe: room,
        cq_context: ptr::null_mut(),
        channel,
        comp_vector: 0,
        wc_flags: sys::WC_EX_WITH_BYTE_LEN
            | sys::WC_EX_WITH_IMM
            | sys::WC_EX_WITH_SRC_QP
            | sys::WC_EX_WITH_COMPLETION_TIMESTAMP,
        comp_mask: 0,
        flags: 0,
        parent_domain: ptr::null_mut(),
    };
    // SAFETY: the device is open, the channel is there or null, and the attributes live as long as the call.
    let cq = unsafe { create(port.context, &raw mut attributes) };
    (!cq.is_null()).then_some(cq)
}

/// # Safety
/// The queue exists.
unsafe fn poll_timed(cq: *mut CqEx, into: &mut [Raw; BATCH]) -> usize {
    let mut attributes = PollCqAttr { comp_mask: 0 };
    // SAFETY: the queue exists; the functions of its driver are called as verbs.h says: start, then next, then end, and
    // values are read between.
    unsafe {
        let (Some(start), Some(next), Some(end)) = ((*cq).start_poll, (*cq).next_poll, (*cq).end_poll) else {
            return 0;
        };
        // An error, or ENOENT if there is nothing: then `end` must not be called.
        if start(cq, &raw mut attributes) != 0 {
            return 0;
        }
        let value = |read: sys::Read32| read.map_or(0, |read| read(cq));
        let mut count = 0;
        loop {
            let status = (*cq).status;
            let mut wc = Wc { wr_id: (*cq).wr_id, status, ..Wc::default() };
            let mut ticks = None;
            if status == sys::WC_SUCCESS {
                wc.opcode = value((*cq).read_opcode);
                wc.wc_flags = value((*cq).read_wc_flags);
                wc.byte_len = value((*cq).read_byte_len);
                wc.src_qp = value((*cq).read_src_qp);
                if wc.wc_flags & sys::WC_WITH_IMM != 0 {
                    wc.imm_data = value((*cq).read_imm_data);
                }
                ticks = (*cq).read_completion_ts.map(|read| read(cq));
            }
            into[count] = Raw { wc, ticks };
            count += 1;
            if count == BATCH || next(cq) != 0 {
                break;
            }
        }
        end(cq);
        count
    }
}

/// Status of a request.
pub(super) fn status(code: u32) -> Status {
    match code {
        sys::WC_SUCCESS => Status::Success,
        sys::WC_RETRY_EXC_ERR => Status::RetryExceeded,
        sys::WC_RNR_RETRY_EXC_ERR => Status::ReceiverNotReady,
        sys::WC_REM_ACCESS_ERR => Status::RemoteAccess,
        sys::WC_LOC_LEN_ERR | sys::WC_LOC_QP_OP_ERR | sys::WC_LOC_PROT_ERR | sys::WC_LOC_ACCESS_ERR => {
            Status::LocalProtection
        }
        sys::WC_WR_FLUSH_ERR => Status::Flushed,
        // Errors that the peer causes, for the most part.
        _ => Status::RemoteInvalid,
    }
}
