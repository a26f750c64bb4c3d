//! The class of a packet (DSCP, RFC 2474) between the inner and the outer IP header (RFC 2983).
//!
//! The inner DSCP never changes. After decapsulation the outer one is ignored (RFC 2983, section 3.1: the pipe model).

use bifrost_wire::ethernet::ethertype;

use crate::parse::{L3, Parsed};

/// DSCPs from here on are for network control (RFC 4594, section 3.1: CS6, CS7).
const NETWORK_CONTROL: u8 = 48;

/// How the outer DSCP of a packet is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marking {
    /// This one, 0 to 63.
    Fixed(u8),
    /// That of the inner packet, with two exceptions, which get 0. CS6, CS7 and other DSCPs of network control are for
    /// hosts and switches. Packets that are carried reliably must stay in order on their path (PROTOCOL section 10),
    /// and networks let classes overtake each other (RFC 2983, section 5.1).
    Copied,
}

impl Default for Marking {
    fn default() -> Self {
        Marking::Fixed(0)
    }
}

impl Marking {
    /// The outer traffic class of a packet whose own class is `inner`. The ECN codepoint is the inner one. `reliable`:
    /// the transport carries the packet.
    #[inline]
    pub fn outer(self, inner: u8, reliable: bool) -> u8 {
        match self {
            Marking::Fixed(dscp) => dscp << 2 | inner & 3,
            Marking::Copied if reliable || inner >> 2 >= NETWORK_CONTROL => inner & 3,
            Marking::Copied => inner,
        }
    }
}

/// DSCP and ECN codepoint of a frame that was parsed as `parsed`; 0 if it is not IP. `head`: the parsed bytes.
#[inline]
pub fn class_of(head: &[u8], parsed: &Parsed) -> u8 {
    match (parsed.kind, head.get(usize::from(parsed.l3)..)) {
        (L3::V4, Some([_, class, ..])) => *class,
        (L3::V6, Some([first, second, ..])) => first << 4 | second >> 4,
        _ => 0,
    }
}

/// The priority of a packet among those of the same port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Band {
    /// DSCPs from CS5 on: telephony (EF, VOICE-ADMIT), signalling (CS5), network control (CS6, CS7).
    Priority,
    /// All others.
    Normal,
    /// Less than best effort: LE (RFC 8622) and CS1 (RFC 4594, section 4.10).
    Background,
}

impl Band {
    /// All bands, the first one to be served first.
    pub const ALL: [Band; 3] = [Band::Priority, Band::Normal, Band::Background];

    /// The band of a traffic class: DSCP and ECN codepoint.
    #[inline]
    pub const fn of_class(class: u8) -> Band {
        match class >> 2 {
            40.. => Band::Priority,
            1 | 8 => Band::Background,
            _ => Band::Normal,
        }
    }

    /// The band of an Ethernet frame, with or without VLAN tag. `head`: at least its headers up to the first 2 bytes of
    /// the IP header.
    pub fn of_frame(head: &[u8]) -> Band {
        const VLAN: u16 = 0x8100;
        let kind = |at: usize| head.get(at..at + 2).map(|kind| u16::from_be_bytes([kind[0], kind[1]]));
        let at = if kind(12) == Some(VLAN) { 16 } else { 12 };
        let class = match (kind(at), head.get(at + 2..)) {
            (Some(ethertype::IPV4), Some([_, class, ..])) => *class,
            (Some(ethertype::IPV6), Some([first, second, ..])) => first << 4 | second >> 4,
            _ => 0,
        };
        Band::of_class(class)
    }

    /// Its place in [`ALL`](Self::ALL).
    #[inline]
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Its name in counters, traces and documents.
    pub const fn name(self) -> &'static str {
        match self {
            Band::Priority => "priority",
            Band::Normal => "normal",
            Band::Background => "background",
        }
    }
}

#[cfg(test)]
mod tests {
    use bifrost_wire::{Mac, ethernet, ipv4, ipv6, protocol};

    use super::*;
    use crate::parse;

    fn frame(v6: bool, class: u8) -> Vec<u8> {
        let kind = if v6 { ethernet::ethertype::IPV6 } else { ethernet::ethertype::IPV4 };
        let mut frame = ethernet::Header::new(Mac([2; 6]), Mac([4; 6]), kind).emit().to_vec();
        if v6 {
            let [from, to] = [1, 2].map(|n| [0xfd00, 0, 0, 0, 0, 0, 0, n].into());
            let header = ipv6::Header::new(from, to, protocol::UDP, 8);
            frame.extend_from_slice(&ipv6::Header { traffic_class: class, ..header }.emit());
        } else {
            let header = ipv4::Header::new([10, 0, 0, 1].into(), [10, 0, 0, 2].into(), protocol::UDP, 8);
            frame.extend_from_slice(&ipv4::Header { traffic_class: class, ..header }.emit());
        }
        frame.extend_from_slice(&[0, 1, 0, 2, 0, 8, 0, 0]);
        frame
    }

    #[test]
    fn every_class_is_read() {
        for (v6, class) in [false, true].into_iter().flat_map(|v6| (0..=255).map(move |class| (v6, class))) {
            let frame = frame(v6, class);
            let parsed = parse(&frame, frame.len()).expect("a whole packet");
            assert_eq!(class_of(&frame, &parsed), class);
            assert_eq!(class_of(&frame[..15], &parsed), 0, "what is not there");
        }
    }

    #[test]
    fn the_band_follows_the_class() {
        for (v6, class) in [false, true].into_iter().flat_map(|v6| (0..=255).map(move |class| (v6, class))) {
            let band = match class >> 2 {
                46 | 44 | 40 | 48 | 56 => Band::Priority,
                1 | 8 => Band::Background,
                0 | 10 | 18 | 26 | 34 | 16 | 24 | 32 => Band::Normal,
                _ => Band::of_class(class),
            };
            assert_eq!(Band::of_class(class), band);
            let mut frame = frame(v6, class);
            assert_eq!(Band::of_frame(&frame), band, "{class}");
            assert_eq!(Band::of_frame(&frame[..15]), Band::Normal, "what is not there");
            frame.splice(12..12, [0x81, 0, 0, 7]);
            assert_eq!(Band::of_frame(&frame), band, "{class} in a VLAN");
        }
        assert!(Band::ALL.iter().enumerate().all(|(i, band)| band.index() == i));
        assert!(Band::ALL.is_sorted());
        assert_eq!(Band::of_frame(&[0xff; 60]), Band::Normal, "not IP");
    }

    #[test]
    fn the_outer_class_follows_the_marking() {
        const EF: u8 = 46;
        const CS6: u8 = 48;
        for ecn in 0..4 {
            let class = |dscp: u8| dscp << 2 | ecn;
            for reliable in [false, true] {
                assert_eq!(Marking::default().outer(class(EF), reliable), ecn);
                assert_eq!(Marking::Fixed(10).outer(class(EF), reliable), class(10));
                assert_eq!(Marking::Fixed(63).outer(ecn, reliable), class(63));
            }
            assert_eq!(Marking::Copied.outer(class(EF), false), class(EF));
            assert_eq!(Marking::Copied.outer(class(CS6 - 1), false), class(CS6 - 1));
            assert_eq!(Marking::Copied.outer(class(CS6), false), ecn, "only hosts and switches use it");
            assert_eq!(Marking::Copied.outer(class(63), false), ecn);
            assert_eq!(Marking::Copied.outer(class(EF), true), ecn, "one connection, one class");
        }
    }
}
