//! Many changes, in messages of bounded size.

use crate::Change;
use crate::limits::{MAX_CHANGES, PIECE_BYTES};

/// The changes in pieces of at most [`MAX_CHANGES`] that end at [`PIECE_BYTES`], in their order.
pub fn pieces(changes: impl IntoIterator<Item = Change>) -> impl Iterator<Item = Vec<Change>> {
    let mut rest = changes.into_iter().peekable();
    std::iter::from_fn(move || {
        let mut piece = Vec::new();
        let mut bytes = 0;
        while piece.len() < MAX_CHANGES {
            let fits = |change: &Change| piece.is_empty() || bytes + change.bytes() <= PIECE_BYTES;
            let Some(change) = rest.next_if(fits) else { break };
            bytes += change.bytes();
            piece.push(change);
        }
        (!piece.is_empty()).then_some(piece)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{ToAgent, pb};

    fn change(n: usize, bytes: usize) -> Change {
        let spec = Some(vec![b'x'; bytes].into());
        Change { kind: "route".into(), key: n.to_string(), spec, committed_ms: 0 }
    }

    #[test]
    fn pieces_are_bounded_by_number_and_by_size() {
        let lengths = |bytes, count| {
            let all = (0..count).map(|n| change(n, bytes));
            pieces(all).map(|piece| piece.len()).collect::<Vec<_>>()
        };
        assert_eq!(lengths(10, 2500), [1000, 1000, 500]);
        assert_eq!(lengths(1 << 20, 3), [1, 1, 1]);
        assert_eq!(lengths(400_000, 5), [2, 2, 1]);
        assert!(lengths(10, 0).is_empty());
    }

    proptest! {
        #[test]
        fn all_arrive_in_order_and_every_piece_is_a_good_message(
            sizes in prop::collection::vec(0usize..600_000, 0..40),
        ) {
            let all: Vec<Change> = sizes.iter().enumerate().map(|(n, size)| change(n, *size)).collect();
            let mut arrived = Vec::new();
            for piece in pieces(all.clone()) {
                let message = pb::ToAgent::from(ToAgent::Changes(piece));
                prop_assert!(prost::Message::encoded_len(&message) <= crate::limits::MAX_MESSAGE);
                let ToAgent::Changes(changes) = ToAgent::try_from(message).unwrap() else { unreachable!() };
                arrived.extend(changes);
            }
            prop_assert_eq!(arrived, all);
        }
    }
}
