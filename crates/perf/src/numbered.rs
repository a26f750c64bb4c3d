//! Calls that carry numbers, by which both ends notice what was lost, repeated, reordered or changed.

use anyhow::{Result, ensure};

/// Bytes of the shortest call: mark, number, and room for the server's count.
pub(crate) const SHORTEST: usize = 24;
/// What a numbered call begins with.
const MARK: [u8; 8] = *b"numbered";

/// Writes call `number`, which counts from 0.
pub(crate) fn write(call: &mut [u8], number: u64) {
    fill(call, number);
    call[..8].copy_from_slice(&MARK);
    call[8..16].copy_from_slice(&number.to_be_bytes());
}

/// The server's part: makes a response of a call, if it is numbered, and counts it.
pub(crate) fn answer(call: &mut [u8], counted: &mut u64) {
    if call.len() >= SHORTEST && call[..8] == MARK {
        call[16..24].copy_from_slice(&counted.to_be_bytes());
        *counted += 1;
    }
}

/// Whether a response is that to call `number`; how many numbered calls of this connection the server had had before.
/// If none is lost, repeated or reordered on the way, that is `number`.
pub(crate) fn check(response: &[u8], number: u64, scratch: &mut Vec<u8>) -> Result<u64> {
    ensure!(response.len() >= SHORTEST, "the response to call {number} is too short");
    scratch.resize(response.len(), 0);
    write(scratch, number);
    let same = response[..16] == scratch[..16] && response[24..] == scratch[24..];
    ensure!(same, "the response to call {number} has other bytes than were sent");
    Ok(u64::from_be_bytes(response[16..24].try_into()?))
}

/// Bytes that differ from call to call and from place to place.
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
    fn each_mistake_is_noticed() {
        let (mut scratch, mut counted) = (vec![], 0);
        let mut calls: Vec<Vec<u8>> = vec![vec![0; 100]; 3];
        calls.iter_mut().enumerate().for_each(|(number, call)| write(call, number as u64));
        // The third comes before the second, and the first twice.
        for number in [0, 2, 1, 0] {
            answer(&mut calls[number], &mut counted);
        }
        let positions = [0, 1, 2].map(|number| check(&calls[number as usize], number, &mut scratch).unwrap());
        assert_eq!((positions, counted), ([3, 2, 1], 4));
        assert!(check(&calls[0], 1, &mut scratch).is_err(), "another call's");
        for at in [0, 10, 24, 99] {
            let mut changed = calls[1].clone();
            changed[at] ^= 1;
            assert!(check(&changed, 1, &mut scratch).is_err(), "byte {at}");
        }
        assert!(check(&calls[1][..20], 1, &mut scratch).is_err() && check(&[], 1, &mut scratch).is_err());
        // What is not numbered is sent back as it came.
        let mut other = [7; 40];
        answer(&mut other, &mut counted);
        assert_eq!((other, counted), ([7; 40], 4));
    }
}
