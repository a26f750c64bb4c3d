//! Congestion marks of the underlay, in what arrives (PROTOCOL §13.2).

use bifrost_nic::ecn::{self, CE, ECT_1};
use bifrost_nic::{L3, Parsed};
use bifrost_port::GuestPort;

use crate::core::Core;

/// What congestion in the underlay changes in a frame (RFC 6040): nothing, or its ECN codepoint. `None`: the frame is to be dropped.
#[inline(always)]
pub(crate) fn marks(frame: &[u8], parsed: &Parsed, outer: u8) -> Option<Option<u8>> {
    // Neither of the others changes anything.
    if outer != CE && outer != ECT_1 || !matches!(parsed.kind, L3::V4 | L3::V6) {
        return Some(None);
    }
    let inner = ecn::of(frame, parsed);
    let merged = ecn::decapsulate(inner, outer)?;
    Some((merged != inner).then_some(merged))
}

/// The frame with another codepoint, in `room`.
#[cold]
pub(crate) fn remark<'a>(room: &'a mut Vec<u8>, frame: &[u8], parsed: &Parsed, ecn: u8) -> &'a [u8] {
    room.clear();
    room.extend_from_slice(frame);
    ecn::set(room, parsed, ecn);
    room
}

impl<P: GuestPort> Core<P> {
    /// Goes on with a frame as the underlay's congestion has marked it.
    #[inline(always)]
    pub(crate) fn with_marks(
        &mut self,
        frame: &[u8],
        parsed: &Parsed,
        ecn: Option<u8>,
        go_on: impl FnOnce(&mut Self, &[u8]),
    ) {
        let Some(ecn) = ecn else { return go_on(self, frame) };
        let mut remarked = std::mem::take(&mut self.remarked);
        go_on(self, remark(&mut remarked, frame, parsed, ecn));
        self.remarked = remarked;
    }
}
