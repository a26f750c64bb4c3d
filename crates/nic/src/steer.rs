//! Which worker owns a packet: one rule, shared by the underlay's socket filter, the TAP's steering program and all
//! code that assigns connections to workers.
//!
//! A vNIC pair belongs to the worker that [`worker_of_pair`] returns, in both directions. A connection's CID carries
//! its owner's worker in the top byte, so an established connection needs no table.

/// Multiplier of [`fold`]: the 32-bit golden-ratio constant of multiplicative hashing.
pub const FOLD_MULTIPLIER: u32 = 0x9E37_79B1;
/// Right shifts of [`fold`], before and after the multiplication, bits.
pub const FOLD_SHIFT: u32 = 16;

/// Pkt Type of a connection request.
const REQUEST: u8 = 3;
/// Pkt Type of a reset.
const RESET: u8 = 6;
/// Length of the VXLAN header, bytes (RFC 7348).
const VXLAN: usize = 8;

/// Mixes 32 bits into 16 whose low bits depend on all of them. The result is taken modulo the number of workers.
pub const fn fold(value: u32) -> u32 {
    (value ^ (value >> FOLD_SHIFT)).wrapping_mul(FOLD_MULTIPLIER) >> FOLD_SHIFT
}

/// Worker that owns the pair of two vNICs, independent of direction. Below `workers`, or 0 when `workers` is 0.
pub const fn worker_of_pair(a: [u8; 6], b: [u8; 6], workers: u16) -> u16 {
    let low = u32::from_be_bytes([a[2], a[3], a[4], a[5]]) ^ u32::from_be_bytes([b[2], b[3], b[4], b[5]]);
    match workers {
        0 => 0,
        n => (fold(low) % n as u32) as u16,
    }
}

/// Worker that owns a connection, from its CID's top byte; 0 when there is no such worker.
pub const fn worker_of_cid(cid: u32, workers: u16) -> u16 {
    let worker = (cid >> 24) as u16;
    if worker < workers { worker } else { 0 }
}

/// Worker for a datagram (UDP payload) on the BIFROST port. Truncated datagrams go to worker 0, and so do resets,
/// because only a lookup finds their owner.
pub fn worker_of_bifrost(payload: &[u8], workers: u16) -> u16 {
    let (Some(&kind), Some(cid)) = (payload.get(VXLAN), word(payload, VXLAN + 8)) else { return 0 };
    match kind {
        RESET => 0,
        REQUEST if cid == 0 => pair_at(payload, VXLAN + 12, workers),
        _ => worker_of_cid(cid, workers),
    }
}

/// Whether a datagram (UDP payload) on the BIFROST port requests a connection without naming an existing one: its vNIC
/// pair selects the worker.
pub fn is_first_request(payload: &[u8]) -> bool {
    payload.get(VXLAN) == Some(&REQUEST) && word(payload, VXLAN + 8) == Some(0)
}

/// Whether a datagram (UDP payload) on the BIFROST port is a reset.
pub fn is_reset(payload: &[u8]) -> bool {
    payload.get(VXLAN) == Some(&RESET)
}

/// Worker for a datagram (UDP payload) on the plain VXLAN port; truncated ones go to worker 0.
pub fn worker_of_vxlan(payload: &[u8], workers: u16) -> u16 {
    pair_at(payload, VXLAN, workers)
}

/// The pair of MAC addresses at `offset`.
fn pair_at(payload: &[u8], offset: usize, workers: u16) -> u16 {
    match (word(payload, offset + 2), word(payload, offset + 8)) {
        (Some(a), Some(b)) if workers > 0 => (fold(a ^ b) % u32::from(workers)) as u16,
        _ => 0,
    }
}

fn word(payload: &[u8], offset: usize) -> Option<u32> {
    payload.get(offset..)?.first_chunk().copied().map(u32::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mac(low: u32) -> [u8; 6] {
        let b = low.to_be_bytes();
        [2, 0, b[0], b[1], b[2], b[3]]
    }

    #[test]
    fn a_pair_has_one_worker_in_both_directions() {
        for n in 1..=32 {
            for i in 0..200u32 {
                let (a, b) = (mac(i * 7919), mac(i ^ 0x55));
                assert_eq!(worker_of_pair(a, b, n), worker_of_pair(b, a, n));
                assert!(worker_of_pair(a, b, n) < n);
            }
        }
    }

    #[test]
    fn numbered_vnics_spread_over_workers() {
        // Addresses that differ in any one byte must not all land on one worker.
        for shift in [0, 8, 16, 24] {
            let mut hits = [0; 2];
            for i in 0..=255u32 {
                hits[usize::from(worker_of_pair(mac(i << shift), mac(0), 2))] += 1;
            }
            assert!(hits[0] > 80 && hits[1] > 80, "byte at bit {shift}: {hits:?}");
        }
    }

    #[test]
    fn datagrams_go_to_their_owner() {
        let with = |kind: u8, cid: u32, len: usize| {
            let mut p = vec![0u8; len];
            p[8] = kind;
            p[16..20].copy_from_slice(&cid.to_be_bytes());
            if len >= 32 {
                p[20..26].copy_from_slice(&mac(0x1234));
                p[26..32].copy_from_slice(&mac(0x9999_0001));
            }
            p
        };
        let pair = worker_of_pair(mac(0x1234), mac(0x9999_0001), 5);
        let cases: &[(&str, Vec<u8>, u16)] = &[
            ("data", with(1, 0x0300_0007, 40), 3),
            ("ack of the last worker", with(2, 0x0400_0000, 60), 4),
            ("no such worker", with(1, 0x0500_0000, 40), 0),
            ("request without CID: by vNIC pair", with(REQUEST, 0, 48), pair),
            ("request with CID", with(REQUEST, 0x0200_0001, 48), 2),
            ("reset", with(RESET, 0x0200_0001, 20), 0),
            ("request without body", with(REQUEST, 0, 20), 0),
        ];
        for (name, payload, worker) in cases {
            assert_eq!(worker_of_bifrost(payload, 5), *worker, "{name}");
        }
        for len in 0..20 {
            assert_eq!(worker_of_bifrost(&with(1, 0x0300_0000, 40)[..len], 5), 0, "{len} bytes");
        }
        assert_eq!(worker_of_vxlan(&[0; 10], 5), 0);
    }
}
