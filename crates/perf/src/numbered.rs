//! Numbered calls, which show both ends what was lost, duplicated, reordered or corrupted.

use anyhow::{Result, ensure};

/// Length of the shortest call, bytes: mark, number, and the server's count.
pub(crate) const SHORTEST: usize = 24;
/// The first bytes of a numbered call.
const MARK: [u8; 8] = *b"numbered";

/// Writes call `number`, counted from 0.
pub(crate) fn write(call: &mut [u8], number: u64) {
    fill(call, number);
    call[..8].copy_from_slice(&MARK);
    call[8..16].copy_from_slice(&number.to_be_bytes());
}

/// Server side: converts a numbered call to its response, and counts it.
pub(crate) fn answer(call: &mut [u8], counted: &mut u64) {
    if call.len() >= SHORTEST && call[..8] == MARK {
        call[16..24].copy_from_slice(&counted.to_be_bytes());
        *counted += 1;
    }
}

/// Checks the response to call `number`. Returns how many numbered calls of this connection the server had received
/// before, which equals `number` if none was lost, duplicated or reordered.
pub(crate) fn check(response: &[u8], number: u64, scratch: &mut Vec<u8>) -> Result<u64> {
    ensure!(response.len() >= SHORTEST, "the response to call {number} is too short");
    scratch.resize(response.len(), 0);
    write(scratch, number);
    let same = response[..16] == scratch[..16] && response[24..] == scratch[24..];
    ensure!(same, "the response to call {number} differs from the request");
    Ok(u64::from_be_bytes(response[16..24].try_into()?))
}

/// Fills with bytes that depend on call and position.
fn fill(call: &mut [u8], number: u64) {
    let mut word = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for bytes in call.chunks_mut(8) {
        word = word.wrapping_add(0xd1b5_4a32_d192_ed03);
        bytes.copy_from_slice(&word.to_be_bytes()[..bytes.len()]);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn each_error_is_detected() {
        let (mut scratch, mut counted) = (vec![], 0);
        let mut calls: Vec<Vec<u8>> = vec![vec![0; 100]; 3];
        calls.iter_mut().enumerate().for_each(|(number, call)| write(call, number as u64));
        // The third arrives before the second, and the first twice.
        for number in [0, 2, 1, 0] {
            answer(&mut calls[number], &mut counted);
        }
        let positions = [0, 1, 2].map(|number| check(&calls[number as usize], number, &mut scratch).unwrap());
        assert_eq!((positions, counted), ([3, 2, 1], 4));
        assert!(check(&calls[0], 1, &mut scratch).is_err(), "the response to another call");
        for at in [0, 10, 24, 99] {
            let mut changed = calls[1].clone();
            changed[at] ^= 1;
            assert!(check(&changed, 1, &mut scratch).is_err(), "byte {at}");
        }
        assert!(check(&calls[1][..20], 1, &mut scratch).is_err() && check(&[], 1, &mut scratch).is_err());
        // Other calls are returned unchanged.
        let mut other = [7; 40];
        answer(&mut other, &mut counted);
        assert_eq!((other, counted), ([7; 40], 4));
    }
}
