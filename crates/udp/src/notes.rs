//! Metadata that the kernel attaches to a message, and the position of its datagrams.

/// Metadata from control messages. What the socket's options do not enable is 0, or `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Notes {
    /// ECN codepoint.
    pub ecn: u8,
    /// Time to live, or hop limit.
    pub ttl: u8,
    /// When the kernel received it, CLOCK_REALTIME, ns.
    pub rx_time_ns: u64,
    /// Length of each merged datagram, bytes; only the last may be shorter.
    pub segment: Option<u32>,
    /// Datagrams that this socket dropped for lack of room since it was created, modulo 2^32.
    pub dropped: Option<u32>,
}

impl Notes {
    #[inline]
    pub(crate) fn read<'a>(control: impl Iterator<Item = (i32, i32, &'a [u8])>) -> Self {
        let mut notes = Self::default();
        for (level, kind, value) in control {
            match (level, kind) {
                (libc::IPPROTO_IP, libc::IP_TOS) => notes.ecn = value.first().map_or(0, |v| v & 3),
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => notes.ecn = int(value).map_or(0, |v| v as u8 & 3),
                (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
                    notes.ttl = int(value).map_or(0, |v| v as u8);
                }
                (libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS) => notes.rx_time_ns = timespec(value).unwrap_or(0),
                (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => notes.dropped = int(value).map(|v| v as u32),
                (libc::SOL_UDP, libc::UDP_GRO) => notes.segment = int(value).and_then(|v| u32::try_from(v).ok()),
                _ => {}
            }
        }
        notes
    }
}

/// Start and length of each datagram in a message of `len` bytes. Without a segment size, or with an invalid one, the
/// message is one datagram.
#[inline]
pub fn datagrams(len: u32, segment: Option<u32>) -> impl Iterator<Item = (u32, u32)> {
    let step = segment.filter(|&s| s > 0).unwrap_or(len).clamp(1, len.max(1));
    (0..len.max(1)).step_by(step as usize).map(move |start| (start, step.min(len - start)))
}

fn int(value: &[u8]) -> Option<i32> {
    value.first_chunk().copied().map(i32::from_ne_bytes)
}

fn timespec(value: &[u8]) -> Option<u64> {
    let seconds = i64::from_ne_bytes(*value.first_chunk()?);
    let nanoseconds = i64::from_ne_bytes(*value.get(8..)?.first_chunk()?);
    u64::try_from(seconds).ok()?.checked_mul(1_000_000_000)?.checked_add(u64::try_from(nanoseconds).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_datagrams_are_split_at_their_boundaries() {
        type Parts = &'static [(u32, u32)];
        let cases: &[(u32, Option<u32>, Parts)] = &[
            (100, None, &[(0, 100)]),
            (100, Some(0), &[(0, 100)]),
            (100, Some(100), &[(0, 100)]),
            (100, Some(5000), &[(0, 100)]),
            (100, Some(40), &[(0, 40), (40, 40), (80, 20)]),
            (80, Some(40), &[(0, 40), (40, 40)]),
            (0, None, &[(0, 0)]),
            (0, Some(10), &[(0, 0)]),
        ];
        for (len, segment, want) in cases {
            assert_eq!(datagrams(*len, *segment).collect::<Vec<_>>(), *want, "{len} {segment:?}");
        }
    }

    #[test]
    fn notes_ignore_short_and_unknown_control_messages() {
        let short: &[u8] = &[1, 2];
        let all = [
            (libc::IPPROTO_IP, libc::IP_TTL, short),
            (libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS, short),
            (libc::SOL_UDP, libc::UDP_GRO, short),
            (77, 77, short),
            (libc::IPPROTO_IP, libc::IP_TOS, &[0xff][..]),
        ];
        assert_eq!(Notes::read(all.into_iter()), Notes { ecn: 3, ..Notes::default() });
    }
}
