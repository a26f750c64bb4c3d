//! The position of a key among a few sorted ones.
#![allow(unsafe_code)]

/// How many of these keys, in ascending order, are not above `key`. All are compared, so that there is no branch to
/// predict.
#[inline(always)]
pub(crate) fn rank<const N: usize>(keys: &[u32; N], key: u32) -> usize {
    match keys.first_chunk::<16>() {
        #[cfg(target_arch = "x86_64")]
        Some(keys) if N == 16 => {
            // SAFETY: SSE2, which the function needs, is part of x86-64.
            unsafe { rank_of_16(keys, key) }
        }
        _ => keys.iter().fold(0, |count, &k| count + usize::from(k <= key)),
    }
}

/// [`rank`] in half as many instructions as the compiler finds: because the keys are sorted, the first one above `key`
/// is the answer, and nothing is counted.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse2")]
#[inline]
unsafe fn rank_of_16(keys: &[u32; 16], key: u32) -> usize {
    use std::arch::x86_64::{
        __m128i, _mm_cmpgt_epi32, _mm_loadu_si128, _mm_movemask_epi8, _mm_packs_epi16, _mm_packs_epi32, _mm_set1_epi32,
        _mm_xor_si128,
    };
    // Only signed comparisons exist.
    let sign = _mm_set1_epi32(i32::MIN);
    let key = _mm_xor_si128(_mm_set1_epi32(key.cast_signed()), sign);
    let (four, []) = keys.as_chunks::<4>() else { return 0 };
    let above = |at: usize| {
        // SAFETY: 16 bytes of initialized memory; the load needs no alignment.
        let keys = unsafe { _mm_loadu_si128(four[at].as_ptr().cast::<__m128i>()) };
        _mm_cmpgt_epi32(_mm_xor_si128(keys, sign), key)
    };
    let half = |at| _mm_packs_epi32(above(at), above(at + 1));
    let mask = _mm_movemask_epi8(_mm_packs_epi16(half(0), half(2)));
    (mask.cast_unsigned() | 1 << 16).trailing_zeros() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_are_not_above_are_counted() {
        let sets = [
            std::array::from_fn(|n| n as u32 * 3),
            std::array::from_fn(|n| u32::MAX - (15 - n as u32) * 7),
            std::array::from_fn(|n| (i32::MAX as u32) - 8 + n as u32),
            std::array::from_fn(|n| if n < 5 { n as u32 } else { u32::MAX }),
            [7; 16],
        ];
        for keys in sets {
            let around = keys.iter().flat_map(|&k| [k.wrapping_sub(1), k, k.wrapping_add(1)]);
            for key in around.chain([0, i32::MAX as u32, 1 << 31, u32::MAX]) {
                let expected = keys.iter().filter(|&&k| k <= key).count();
                assert_eq!(rank::<16>(&keys, key), expected, "{key} in {keys:?}");
                assert_eq!(
                    rank::<4>(keys.first_chunk().expect("four keys"), key),
                    expected.min(4),
                    "{key} in {keys:?}"
                );
            }
        }
    }
}
