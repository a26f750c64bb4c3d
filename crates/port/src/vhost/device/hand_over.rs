//! A connection continues in another process: its state is a list of messages from which the other process sets up the
//! same device, as if the front-end had sent them. So whatever a front-end has sent is checked there again.
//!
//! Memory, features and notifications are handed over while the rings run here. The rings follow when they have
//! stopped: their positions, and their kicks, without which no ring starts. Packets that the guest has sent and that
//! are not completed stay in its transmit rings, and the other process fetches them again.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use super::super::dirty_log::DirtyLog;
use super::super::features::Features;
use super::super::helper::Foreign;
use super::super::memory::Memory;
use super::super::messages::{Fields, Message};
use super::{
    ADD_MEM_REG, NO_FILE, Outcome, RING_LOGS, SET_BACKEND_REQ_FD, SET_FEATURES, SET_INFLIGHT_FD, SET_LOG_BASE,
    SET_LOG_FD, SET_PROTOCOL_FEATURES, SET_VRING_ADDR, SET_VRING_CALL, SET_VRING_ENABLE, SET_VRING_KICK, SET_VRING_NUM,
    VhostDevice,
};

/// A message of a front-end that another process received.
#[derive(Debug)]
pub struct HandedMessage {
    /// The request (vhost-user, "Front-end message types").
    pub request: u32,
    /// Its payload.
    pub payload: Vec<u8>,
    /// Its descriptors.
    pub files: Vec<OwnedFd>,
}

impl VhostDevice {
    /// The state of the connection except the rings' positions.
    ///
    /// # Errors
    /// No file descriptor was available.
    pub(in super::super) fn messages(&self) -> io::Result<Vec<HandedMessage>> {
        let mut all = Vec::new();
        let mut add = |request, fields: &[u64], files: Vec<OwnedFd>| {
            let payload = fields.iter().flat_map(|field| field.to_le_bytes()).collect();
            all.push(HandedMessage { request, payload, files });
        };
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        if self.features != Features::default() {
            add(SET_FEATURES, &[self.features.0], Vec::new());
        }
        add(SET_PROTOCOL_FEATURES, &[self.protocol], Vec::new());
        if let Some(requests) = &self.requests {
            add(SET_BACKEND_REQ_FD, &[], vec![again(requests)?]);
        }
        for (spec, times, file) in self.memory.specs() {
            for _ in 0..times {
                add(ADD_MEM_REG, &[0, spec.guest, spec.size, spec.user, spec.offset], vec![again(file)?]);
            }
        }
        // After the memory, which it must cover. This process marks what it writes until its rings have stopped.
        if let Some((spec, file)) = self.log.as_ref().and_then(DirtyLog::place) {
            if let Some(call) = self.log_call.descriptor()? {
                add(SET_LOG_FD, &[], vec![call]);
            }
            add(SET_LOG_BASE, &[spec.size, spec.offset], vec![again(file)?]);
        }
        if let Some((spec, _, file)) = self.inflight.iter().flat_map(|record| record.specs()).next() {
            add(SET_INFLIGHT_FD, &[spec.size, spec.offset], vec![again(file)?]);
        }
        for (index, ring) in (0u32..).zip(&self.rings) {
            if ring.size > 0 {
                add(SET_VRING_NUM, &[pair(index, ring.size.into())], Vec::new());
            }
            if let Some([descriptors, used, available]) = ring.tables {
                let flags = if ring.used_in_log.is_some() { RING_LOGS } else { 0 };
                let in_log = ring.used_in_log.unwrap_or(0);
                add(SET_VRING_ADDR, &[pair(index, flags), descriptors, used, available, in_log], Vec::new());
            }
            match ring.call.descriptor()? {
                Some(call) => add(SET_VRING_CALL, &[index.into()], vec![call]),
                None => add(SET_VRING_CALL, &[u64::from(index) | NO_FILE], Vec::new()),
            }
            add(SET_VRING_ENABLE, &[pair(index, ring.enabled.into())], Vec::new());
            if let Some(kick) = &ring.kick {
                add(SET_VRING_KICK, &[index.into()], vec![again(kick)?]);
            }
        }
        Ok(all)
    }

    /// Stops the rings, so that another process can continue them: the guest's unfinished packets stay in them. Returns
    /// the position of each ring.
    pub(in super::super) fn leave(&mut self) -> Vec<u16> {
        self.running.iter().for_each(|ends| ends.leave());
        self.stop();
        self.left = (0..self.rings.len()).map(|ring| self.used_index(ring)).collect();
        self.rings.iter().map(|ring| ring.base).collect()
    }

    /// Continues after [`leave`](Self::leave), because the other process did not, or no longer does.
    pub(in super::super) fn go_on(&mut self) -> Outcome {
        for (ring, before) in std::mem::take(&mut self.left).into_iter().enumerate() {
            // It may have run, and returned buffers. Positions in packed rings are in their records.
            if let (Some(before), Some(now)) = (before, self.used_index(ring)) {
                let base = &mut self.rings[ring].base;
                *base = base.wrapping_add(now.wrapping_sub(before));
            }
        }
        self.start()
    }

    /// The index of a split ring's next used entry.
    fn used_index(&self, ring: usize) -> Option<u16> {
        let [_, used, _] = self.rings[ring].tables.filter(|_| !self.features.packed())?;
        Some(u16::from_le(Memory::area(&self.memory, used, 4, 4)?.load(2, Ordering::Acquire)))
    }

    /// Sets up the device of another process. The rings do not run before [`begin`](Self::begin).
    pub(in super::super) fn adopt(&mut self, messages: Vec<HandedMessage>) -> Outcome {
        for HandedMessage { request, payload, files } in messages {
            let files = files.into_iter().map(|file| Foreign::new(file, &self.helper)).collect();
            let mut message = Message { request, needs_reply: false, payload, files };
            if request == SET_VRING_KICK {
                let index = Fields(&message.payload).u64()? as u32;
                self.ring_mut(index)?;
                let kick = message.file()?.ok_or("a ring without a kick descriptor is not supported")?;
                self.kicks.push((index, kick));
            } else {
                self.handle(message)?;
            }
        }
        Ok(())
    }

    /// Runs the adopted rings from these positions on.
    pub(in super::super) fn begin(&mut self, bases: &[u16]) -> Outcome {
        for (ring, base) in self.rings.iter_mut().zip(bases) {
            ring.base = *base;
        }
        for (index, kick) in std::mem::take(&mut self.kicks) {
            let kick = kick.into_counter().ok_or("its descriptor is not an eventfd")?;
            self.ring_mut(index)?.kick = Some(kick.into());
        }
        self.start()
    }
}

fn again(file: &impl AsFd) -> io::Result<OwnedFd> {
    file.as_fd().try_clone_to_owned()
}
