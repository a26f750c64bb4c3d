//! Connection state, as a switch between the two ends sees it.

use bifrost_wire::tcp::Flags;

/// Seconds without a packet after which a session ends.
///
/// - Established TCP: 2 h 4 min (RFC 5382, REQ-5).
/// - TCP that one or both sides have closed, or that was reset: 4 min (RFC 5382, REQ-5; RFC 7857, section 2). RFC 5382
///   counts a half-closed connection as established. Here it is not, as in Linux, because a peer that vanishes in this
///   state would hold its session for two hours.
/// - TCP that is being opened: 2 min after SYN, 1 min after SYN-ACK (Linux, `nf_conntrack_tcp_timeout_syn_sent`,
///   `_syn_recv`).
/// - Datagrams: 30 s, and 3 min once the exchange is assured (Linux, `nf_conntrack_udp_timeout`, and its `_stream`
///   until 4.20).
/// - ICMP: 60 s (RFC 5508, REQ-2).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timeouts;

impl Timeouts {
    pub(crate) const ESTABLISHED_S: u32 = 7440;
    const CLOSING_S: u32 = 240;
    const OPENING_S: u32 = 120;
    const ANSWERED_S: u32 = 60;
    const DATAGRAMS_S: u32 = 30;
    const ASSURED_S: u32 = 180;
    const ICMP_S: u32 = 60;
}

/// An exchange of datagrams that continues this long after the first reply is assured, s (Linux,
/// `nf_conntrack_proto_udp.c`).
const ASSURED_AFTER_S: u16 = 2;

/// What a packet means for its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A TCP segment with these flags.
    Tcp(Flags),
    /// An echo request or reply, or another ICMP message.
    Icmp,
    /// Anything else.
    Datagram,
}

/// Value of a session at a limit: sessions of the lowest class are evicted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// There was no reply, or the conversation is over.
    Unanswered = 0,
    /// A datagram or a SYN has had a reply.
    Answered = 1,
    /// A TCP connection of which one side has sent its FIN.
    Closing = 2,
    /// Datagrams have gone both ways for a while.
    Assured = 3,
    /// An established TCP connection.
    Established = 4,
}

impl Class {
    /// All classes, the lowest first.
    pub const ALL: [Class; 5] =
        [Class::Unanswered, Class::Answered, Class::Closing, Class::Assured, Class::Established];
}

/// State of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// TCP: the first packet was seen, which may be other than a SYN; nothing from the other side yet.
    Opening,
    /// The SYN has been answered by a SYN.
    Answered,
    /// Both sides have sent, and the handshake is complete or was not seen.
    Established,
    /// One side has sent its FIN: the originator or the other one.
    Closing { by_originator: bool },
    /// Both sides have sent their FIN, or RST was seen.
    Closed,
    /// Datagrams in one direction only.
    Asked,
    /// Datagrams in both directions, so far like a query and its reply.
    Exchange,
    /// Datagrams in both directions for a while.
    Assured,
    /// ICMP.
    Icmp,
}

impl State {
    /// State of a session that begins with this packet.
    pub(crate) fn first(event: Event) -> State {
        match event {
            Event::Tcp(flags) if flags.contains(Flags::RST) => State::Closed,
            Event::Tcp(_) => State::Opening,
            Event::Icmp => State::Icmp,
            Event::Datagram => State::Asked,
        }
    }

    /// State after a packet. `originator`: the packet is from the side that sent the first one. `answered_s`: seconds
    /// since an [`Exchange`](State::Exchange) was answered.
    #[must_use]
    #[inline(always)]
    pub(crate) fn after(self, event: Event, originator: bool, answered_s: u16) -> State {
        let Event::Tcp(flags) = event else {
            return match self {
                State::Asked if !originator => State::Exchange,
                State::Exchange if answered_s >= ASSURED_AFTER_S => State::Assured,
                state => state,
            };
        };
        if flags.contains(Flags::RST) {
            return State::Closed;
        }
        let fin = flags.contains(Flags::FIN);
        match self {
            State::Opening if originator => State::Opening,
            State::Opening if flags.contains(Flags::SYN) => State::Answered,
            // The switch has not seen how it began: it was restarted.
            State::Opening if fin => State::Closing { by_originator: false },
            State::Opening => State::Established,
            State::Answered if originator && !flags.contains(Flags::SYN) && flags.contains(Flags::ACK) => {
                if fin {
                    State::Closing { by_originator: true }
                } else {
                    State::Established
                }
            }
            State::Established if fin => State::Closing { by_originator: originator },
            State::Closing { by_originator } if fin && by_originator != originator => State::Closed,
            state => state,
        }
    }

    /// Whether a packet of either side certainly leaves the state unchanged. `false`: it may change.
    #[inline(always)]
    pub(crate) fn stays_at(self, event: Event) -> bool {
        const ENDS: Flags = Flags::FIN.with(Flags::RST);
        match event {
            Event::Tcp(flags) => self == State::Established && flags.0 & ENDS.0 == 0,
            Event::Datagram => self == State::Assured,
            Event::Icmp => false,
        }
    }

    /// Whether this packet begins a new conversation with the key of a closed one. The rules must allow it again.
    pub(crate) fn begins_anew(self, event: Event) -> bool {
        match event {
            Event::Tcp(flags) => self == State::Closed && flags.contains(Flags::SYN) && !flags.contains(Flags::ACK),
            _ => false,
        }
    }

    /// Name of the state, for traces.
    pub(crate) fn name(self) -> &'static str {
        match self {
            State::Opening => "opening",
            State::Answered => "answered",
            State::Established => "established",
            State::Closing { .. } => "closing",
            State::Closed => "closed",
            State::Asked => "one way",
            State::Exchange => "both ways",
            State::Assured => "assured",
            State::Icmp => "icmp",
        }
    }

    /// Class that decides when the session is evicted.
    #[inline(always)]
    pub(crate) fn class(self) -> Class {
        match self {
            State::Opening | State::Asked | State::Icmp | State::Closed => Class::Unanswered,
            State::Answered | State::Exchange => Class::Answered,
            State::Closing { .. } => Class::Closing,
            State::Assured => Class::Assured,
            State::Established => Class::Established,
        }
    }

    /// Whether both sides have sent, and the conversation is not over. A SYN and its answer are not enough.
    pub(crate) fn is_established(self) -> bool {
        self.class() > Class::Unanswered && self != State::Answered
    }

    /// Time without packets after which a session in this state expires, s.
    pub(crate) fn timeout_s(self) -> u32 {
        match self {
            State::Opening => Timeouts::OPENING_S,
            State::Answered => Timeouts::ANSWERED_S,
            State::Established => Timeouts::ESTABLISHED_S,
            State::Closing { .. } | State::Closed => Timeouts::CLOSING_S,
            State::Asked | State::Exchange => Timeouts::DATAGRAMS_S,
            State::Assured => Timeouts::ASSURED_S,
            State::Icmp => Timeouts::ICMP_S,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYN: Flags = Flags::SYN;
    const ACK: Flags = Flags::ACK;

    /// Checks a connection's packets: whether the originator sends, the flags, and the expected state after the packet.
    fn follow(packets: &[(bool, Flags, State)]) {
        let mut state = None;
        for (number, &(originator, flags, expected)) in packets.iter().enumerate() {
            let event = Event::Tcp(flags);
            let next = state.map_or_else(|| State::first(event), |state: State| state.after(event, originator, 0));
            assert_eq!(next, expected, "packet {number} of {packets:?}");
            state = Some(next);
        }
    }

    #[test]
    fn connections_open_and_close() {
        let (fin, rst, syn_ack) = (Flags::FIN.with(ACK), Flags::RST, SYN.with(ACK));
        let closing = |by_originator| State::Closing { by_originator };
        follow(&[
            (true, SYN, State::Opening),
            (true, SYN, State::Opening),
            (false, syn_ack, State::Answered),
            (false, syn_ack, State::Answered),
            (true, ACK, State::Established),
            (false, ACK, State::Established),
            (true, fin, closing(true)),
            (true, fin, closing(true)),
            (false, ACK, closing(true)),
            (false, fin, State::Closed),
            (true, ACK, State::Closed),
        ]);
        follow(&[(true, SYN, State::Opening), (false, rst, State::Closed)]);
        follow(&[(true, ACK, State::Opening), (false, ACK, State::Established), (false, rst, State::Closed)]);
        follow(&[(true, ACK, State::Opening), (false, fin, closing(false)), (true, fin, State::Closed)]);
        // One side alone cannot establish a connection, whatever it sends.
        follow(&[(true, SYN, State::Opening), (true, ACK, State::Opening), (true, fin, State::Opening)]);
    }

    #[test]
    fn stays_at_agrees_with_after() {
        let closing = [false, true].map(|by_originator| State::Closing { by_originator });
        let open = [State::Opening, State::Answered, State::Established, State::Closed];
        let others = [State::Asked, State::Exchange, State::Assured, State::Icmp];
        let events = (0..=u8::MAX).map(|flags| Event::Tcp(Flags(flags))).chain([Event::Icmp, Event::Datagram]);
        let mut stay = 0;
        for event in events {
            for state in open.into_iter().chain(closing).chain(others).filter(|state| state.stays_at(event)) {
                stay += 1;
                for originator in [false, true] {
                    for answered_s in [0, ASSURED_AFTER_S, u16::MAX] {
                        assert_eq!(state.after(event, originator, answered_s), state, "{event:?}");
                    }
                }
            }
        }
        assert_eq!(stay, 64 + 1);
    }

    #[test]
    fn only_a_syn_reopens_a_closed_connection() {
        let syn = Event::Tcp(SYN);
        assert!(State::Closed.begins_anew(syn));
        assert!(!State::Established.begins_anew(syn));
        assert!(!State::Closed.begins_anew(Event::Tcp(SYN.with(ACK))));
        assert!(!State::Asked.begins_anew(Event::Datagram));
    }

    #[test]
    fn datagrams_are_assured_if_they_continue_after_the_reply() {
        let asked = State::first(Event::Datagram);
        let after = |state: State, originator, answered_s| state.after(Event::Datagram, originator, answered_s);
        assert_eq!(after(asked, true, 9), State::Asked, "one side alone");
        let answered = after(asked, false, 9);
        assert_eq!(answered, State::Exchange, "however late the answer is");
        for (originator, answered_s, expected) in [
            (true, 0, State::Exchange),
            (false, 1, State::Exchange),
            (true, 2, State::Assured),
            (false, 30, State::Assured),
        ] {
            assert_eq!(after(answered, originator, answered_s), expected, "{answered_s} s after the answer");
        }
        assert_eq!(after(State::Assured, true, 0), State::Assured);
        assert_eq!([asked, answered, State::Assured].map(State::timeout_s), [30, 30, 180]);
    }

    #[test]
    fn only_established_connections_have_the_highest_class_and_a_long_timeout() {
        let states = [
            State::Opening,
            State::Answered,
            State::Closing { by_originator: true },
            State::Closed,
            State::Asked,
            State::Exchange,
            State::Assured,
            State::Icmp,
        ];
        for state in states {
            assert!(state.class() < State::Established.class() && state.timeout_s() <= 240, "{state:?}");
        }
        assert_eq!(State::Established.timeout_s(), 7440);
    }
}
