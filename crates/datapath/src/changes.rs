//! What a guest sees of a frame that is not as it came: congestion marks of the underlay (PROTOCOL §13.2), and what a service of the
//! switch has rewritten.

use bifrost_avs::Rewrite;
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

/// Changes of a frame on its way to its guest.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Changes {
    /// Another ECN codepoint.
    pub(crate) ecn: Option<u8>,
    pub(crate) rewrite: Option<Rewrite>,
}

impl Changes {
    #[inline(always)]
    pub(crate) fn is_none(&self) -> bool {
        self.ecn.is_none() && self.rewrite.is_none()
    }

    /// The changed frame, in `room`.
    #[cold]
    pub(crate) fn apply<'a>(&self, room: &'a mut Vec<u8>, frame: &[u8], parsed: &Parsed) -> &'a [u8] {
        room.clear();
        room.extend_from_slice(frame);
        if let Some(ecn) = self.ecn {
            ecn::set(room, parsed, ecn);
        }
        if let Some(rewrite) = &self.rewrite {
            rewrite.apply(room);
        }
        room
    }
}

impl<P: GuestPort> Core<P> {
    /// Goes on with a frame as its guest is to see it.
    #[inline(always)]
    pub(crate) fn with_changes(
        &mut self,
        frame: &[u8],
        parsed: &Parsed,
        changes: Changes,
        go_on: impl FnOnce(&mut Self, &[u8]),
    ) {
        if changes.is_none() {
            return go_on(self, frame);
        }
        let mut changed = std::mem::take(&mut self.changed);
        go_on(self, changes.apply(&mut changed, frame, parsed));
        self.changed = changed;
    }
}
