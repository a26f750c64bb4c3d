//! Changes of a frame before its guest sees it: congestion marks of the underlay (PROTOCOL §13.2), and what a service
//! of the switch rewrites.

use bifrost_avs::Rewrite;
use bifrost_nic::ecn::{self, CE, ECT_1};
use bifrost_nic::{L3, Parsed};

/// How congestion in the underlay changes a frame (RFC 6040): not at all, or its ECN codepoint. `None`: the frame must
/// be dropped.
#[inline(always)]
pub(crate) fn marks(frame: &[u8], parsed: &Parsed, outer: u8) -> Option<Option<u8>> {
    // Other codepoints change nothing.
    if outer != CE && outer != ECT_1 || !matches!(parsed.kind, L3::V4 | L3::V6) {
        return Some(None);
    }
    let inner = ecn::of(frame, parsed);
    let merged = ecn::decapsulate(inner, outer)?;
    Some((merged != inner).then_some(merged))
}

/// Changes of a frame before its guest sees it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Changes {
    /// The new ECN codepoint.
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
