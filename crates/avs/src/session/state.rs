//! How far a conversation has come, as somebody in the middle sees it.

use bifrost_wire::tcp::Flags;

/// Seconds without a packet after which a session ends.
///
/// Established TCP: 2 h 4 min (RFC 5382, REQ-5). TCP that is being opened, was closed or reset: 4 min (RFC 5382, REQ-5; RFC
/// 7857, 2). UDP: 5 min (RFC 4787, REQ-5). ICMP: 60 s (RFC 5508, REQ-2).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timeouts;

impl Timeouts {
    pub(crate) const ESTABLISHED_S: u32 = 7440;
    const TRANSITORY_S: u32 = 240;
    const DATAGRAMS_S: u32 = 300;
    const ICMP_S: u32 = 60;
}

/// What a packet does to its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A TCP segment with these flags.
    Tcp(Flags),
    /// An echo request or reply, or another ICMP message.
    Icmp,
    /// Anything else.
    Datagram,
}

/// State of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// SYN was seen, or the first packet seen was none; nothing from the other side yet.
    Opening,
    /// SYN was answered.
    Answered,
    /// Both sides have spoken.
    Established,
    /// The side that began has sent its FIN, or the other one has.
    Closing { by_originator: bool },
    /// Both have, or RST was seen.
    Closed,
    /// Datagrams one way.
    Asked,
    /// Datagrams both ways.
    Conversation,
    /// ICMP.
    Icmp,
}

impl State {
    /// Of a session that begins with this packet.
    pub(crate) fn first(event: Event) -> State {
        match event {
            Event::Tcp(flags) if flags.contains(Flags::RST) => State::Closed,
            Event::Tcp(_) => State::Opening,
            Event::Icmp => State::Icmp,
            Event::Datagram => State::Asked,
        }
    }

    /// After a packet; `originator`: from the side whose packet was the first.
    #[must_use]
    pub(crate) fn after(self, event: Event, originator: bool) -> State {
        let Event::Tcp(flags) = event else {
            return if self == State::Asked && !originator { State::Conversation } else { self };
        };
        if flags.contains(Flags::RST) {
            return State::Closed;
        }
        let fin = flags.contains(Flags::FIN);
        match self {
            State::Opening if originator => State::Opening,
            State::Opening if flags.contains(Flags::SYN) => State::Answered,
            // Nobody heard how it began: a switch that was restarted.
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

    /// Whether this packet begins a new conversation under the old one's name, which must be allowed anew.
    pub(crate) fn begins_anew(self, event: Event) -> bool {
        match event {
            Event::Tcp(flags) => self == State::Closed && flags.contains(Flags::SYN) && !flags.contains(Flags::ACK),
            _ => false,
        }
    }

    /// What it is called.
    pub(crate) fn name(self) -> &'static str {
        match self {
            State::Opening => "opening",
            State::Answered => "answered",
            State::Established => "established",
            State::Closing { .. } => "closing",
            State::Closed => "closed",
            State::Asked => "one way",
            State::Conversation => "both ways",
            State::Icmp => "icmp",
        }
    }

    /// Whether it may go when there is no room for another.
    pub(crate) fn may_be_evicted(self) -> bool {
        !matches!(self, State::Established | State::Closing { .. } | State::Conversation)
    }

    /// Without a packet for so long it ends, s.
    pub(crate) fn timeout_s(self) -> u32 {
        match self {
            State::Opening | State::Answered | State::Closed => Timeouts::TRANSITORY_S,
            State::Established | State::Closing { .. } => Timeouts::ESTABLISHED_S,
            State::Asked | State::Conversation => Timeouts::DATAGRAMS_S,
            State::Icmp => Timeouts::ICMP_S,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYN: Flags = Flags::SYN;
    const ACK: Flags = Flags::ACK;

    /// Packets of a connection: who sends what, and the state after it.
    fn follow(packets: &[(bool, Flags, State)]) {
        let mut state = None;
        for (number, &(originator, flags, expected)) in packets.iter().enumerate() {
            let event = Event::Tcp(flags);
            let next = state.map_or_else(|| State::first(event), |state: State| state.after(event, originator));
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
        // Alone nobody gets it established, whatever he sends.
        follow(&[(true, SYN, State::Opening), (true, ACK, State::Opening), (true, fin, State::Opening)]);
    }

    #[test]
    fn only_a_syn_to_what_was_closed_begins_anew() {
        let syn = Event::Tcp(SYN);
        assert!(State::Closed.begins_anew(syn));
        assert!(!State::Established.begins_anew(syn));
        assert!(!State::Closed.begins_anew(Event::Tcp(SYN.with(ACK))));
        assert!(!State::Asked.begins_anew(Event::Datagram));
    }

    #[test]
    fn datagrams_converse_once_both_have_spoken() {
        let asked = State::first(Event::Datagram);
        assert_eq!(asked.after(Event::Datagram, true), State::Asked);
        assert_eq!(asked.after(Event::Datagram, false), State::Conversation);
        assert!(asked.may_be_evicted() && !State::Conversation.may_be_evicted());
    }
}
