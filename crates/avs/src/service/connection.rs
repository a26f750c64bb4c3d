//! Connections through load balancers: which backend each has.

use bifrost_nic::Parsed;
use bifrost_tables::mix;
use bifrost_wire::protocol::{ICMP, ICMPV6};
use bifrost_wire::tcp::Flags;

use super::balancer::Balancers;
use crate::drop_reason::DropReason;
use crate::frame::Frame;
use crate::groups::event_of;
use crate::ids::{Direction, LoadBalancerId, PortId};
use crate::mapping::{Mappings, Pair};
use crate::rewrite::{Endpoint, Translation};
use crate::session::{self, Event, Key, Payload, Planned, Quote, Sessions, State};
use crate::tables::Port;

/// Source ports that are tried for a connection whose own one is taken. It is if the guest has the same one for two connections that
/// would look the same to the backend.
const TRIES: u64 = 32;
/// Ephemeral ports (RFC 6335, section 6).
const FIRST_PORT: u16 = 49_152;

/// A connection of a guest that is translated: with a backend of a load balancer, or with the outside. Its session has the name under which
/// the guest sends; answers have another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Connection {
    pub(crate) by: Translator,
    /// The ends that the guest knows: its own, and the load balancer's, or that outside.
    known: Translation,
    /// The ends that the other side knows: the guest's, and its own.
    sent: Translation,
    reply: Key,
    /// The guest is a backend itself, and has itself for its backend.
    is_hairpin: bool,
}

/// Who translates a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Translator {
    Balancer(LoadBalancerId),
    /// NAT, for the guest behind a port, at an uplink.
    Nat {
        guest: PortId,
        uplink: PortId,
        /// `None`: the outside end is the guest's for good.
        mapping: Option<u32>,
    },
}

impl Payload for Connection {
    fn second_key(&self) -> Option<Key> {
        Some(self.reply)
    }

    fn mapping(&self) -> Option<u32> {
        match self.by {
            Translator::Balancer(_) => None,
            Translator::Nat { mapping, .. } => mapping,
        }
    }
}

impl Connection {
    /// A connection of a guest with the outside. `known`: the ends that the guest knows; `sent`: those that the other side knows.
    pub(crate) fn with_outside(by: Translator, known: Translation, sent: Translation, reply: Key) -> Self {
        Connection { by, known, sent, reply, is_hairpin: false }
    }

    /// What another switch needs to go on with it: the ends that the guest knows, those that the other side knows, the name of answers, and
    /// whether the guest is its own backend.
    pub(crate) fn parts(&self) -> (Translation, Translation, Key, bool) {
        (self.known, self.sent, self.reply, self.is_hairpin)
    }

    /// A connection of another switch, of its [`parts`](Self::parts).
    pub(crate) fn of_parts(by: Translator, parts: (Translation, Translation, Key, bool)) -> Self {
        let (known, sent, reply, is_hairpin) = parts;
        Connection { by, known, sent, reply, is_hairpin }
    }

    /// The backend.
    pub(crate) fn backend(&self) -> Endpoint {
        self.sent.destination
    }

    /// The IP protocol.
    pub(crate) fn protocol(&self) -> u8 {
        self.reply.protocol()
    }

    /// The guest's end, as the guest knows it, and as the other side does.
    pub(crate) fn guest_ends(&self) -> (Endpoint, Endpoint) {
        (self.known.source, self.sent.source)
    }
}

/// What is known of connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory<'a> {
    pub(crate) mappings: &'a Mappings,
    pub(crate) connections: &'a Sessions<Connection>,
    /// What would have been done to them before.
    pub(crate) after: &'a Planned,
    /// Which configuration it is.
    pub(crate) epoch: u32,
}

/// What a packet does to its connection, and what is done with the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// The packet's ends, or, if it is an ICMP error, those of the packets that go in its direction.
    pub(crate) translation: Translation,
    /// The packet that it quotes, if it is an ICMP error.
    quote: Option<Quote>,
    /// The packet goes back to the guest that sent it.
    pub(crate) is_hairpin: bool,
    pub(crate) connection: Connection,
    change: Change,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// It belongs to one that there is.
    Continues { index: u32, direction: Direction, event: Event },
    /// It begins one, in the place of another of its name.
    Begins { key: Key, origin: Direction, event: Event, ends: Option<u32>, mapped: Mapped },
    /// It is an ICMP error about one, which it neither keeps alive nor ends.
    Relates,
}

/// The mapping of a connection that begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mapped {
    /// It has none.
    No,
    /// It has one that there is.
    Joins(u32),
    /// It has a new one.
    Begins(Pair),
}

/// What a guest sends to the address of a load balancer: its connection, or another one.
///
/// # Errors
/// Why it goes nowhere.
pub(crate) fn begin_or_continue(
    balancers: &Balancers,
    memory: Memory<'_>,
    port: &Port,
    frame: Frame<'_>,
) -> Result<Step, DropReason> {
    let p = frame.parsed;
    let Memory { connections, after, epoch, .. } = memory;
    let key = Key::of(port.id, Direction::Egress, frame.head, p);
    let event = event_of(p);
    let mut ends = None;
    if let Some(index) = connections.find_after(&key, after) {
        let connection = *connections.payload(index);
        let stays = connections.is_of(index, epoch) || has_backend(balancers, p, &connection);
        if stays && !connections.begins_anew(index, event) {
            return Ok(connection.sends(index, event));
        }
        if !stays && !may_begin(p) {
            return Err(DropReason::BackendGone);
        }
        ends = Some(index);
    } else if let Some(index) = connections.find_second_after(&key, after) {
        // What a backend that is its own client answers itself.
        return Ok(connections.payload(index).answers(index, event));
    }
    let balancer = balancers.of(p).ok_or(DropReason::NoService)?;
    let backend = balancer.choose(p).ok_or(DropReason::NoBackend)?;
    let known = ends_of(p);
    let is_hairpin = port.addresses.contains(&backend.address);
    let address = if is_hairpin { known.destination.address } else { known.source.address };
    // The answer comes from the backend to the guest, or, if that is the same, goes from there to the load balancer's address.
    let reply = |source: u16| {
        let (guest, remote) = (Endpoint { address, port: source }, backend);
        let (local, remote) = if is_hairpin { (remote, guest) } else { (guest, remote) };
        Key::between(port.id, local, remote, p.protocol)
    };
    let is_free = |source: &u16| {
        let other = connections.find_second_after(&reply(*source), after);
        other.is_none_or(|other| Some(other) == ends)
    };
    let tried = (0..TRIES).map(|n| FIRST_PORT + (mix(u64::from(p.flow_hash) << 8 | n) % 16_384) as u16);
    let source = std::iter::once(p.src_port).chain(tried).find(is_free).ok_or(DropReason::ServicePorts)?;
    let connection = Connection {
        by: Translator::Balancer(balancer.id),
        known,
        sent: Translation::of_ends(Endpoint { address, port: source }, backend),
        reply: reply(source),
        is_hairpin,
    };
    let change = Change::Begins { key, origin: Direction::Egress, event, ends, mapped: Mapped::No };
    Ok(Step { translation: connection.sent, quote: None, is_hairpin, connection, change })
}

/// What a guest sends to the address of a load balancer about what it was sent from there: an ICMP error, which goes to the backend.
pub(crate) fn about_answer(memory: Memory<'_>, port: &Port, frame: Frame<'_>) -> Option<Step> {
    let quote = quoted(port, Direction::Egress, frame)?;
    let Memory { connections, after, .. } = memory;
    if let Some(index) = connections.find_after(&quote.key, after) {
        let connection = connections.payload(index);
        return Some(connection.complains(quote));
    }
    // A backend that is its own client.
    let connection = connections.payload(connections.find_second_after(&quote.key, after)?);
    Some(connection.fails(quote))
}

/// The packet that an ICMP error quotes, if it goes to whom that came from, and no extension headers are before the message.
fn quoted(port: &Port, direction: Direction, frame: Frame<'_>) -> Option<Quote> {
    let p = frame.parsed;
    let quote = session::error(port.id, direction, frame.head, p)??;
    (quote.source == p.dst_ip && Translation::is_behind_header(p)).then_some(quote)
}

/// What a guest is sent, if it belongs to a connection of that guest, or is an ICMP error about one: it comes from the backend, or
/// from between.
pub(crate) fn back(memory: Memory<'_>, port: &Port, frame: Frame<'_>) -> Option<Step> {
    if matches!(frame.parsed.protocol, ICMP | ICMPV6) {
        let quote = quoted(port, Direction::Ingress, frame)?;
        let connection = memory.connections.payload(memory.connections.find_second_after(&quote.key, memory.after)?);
        return Some(connection.fails(quote));
    }
    if !Translation::is_possible(frame.parsed) {
        return None;
    }
    let key = Key::of(port.id, Direction::Ingress, frame.head, frame.parsed);
    let index = memory.connections.find_second_after(&key, memory.after)?;
    Some(memory.connections.payload(index).answers(index, event_of(frame.parsed)))
}

/// The connection through a load balancer whose addresses and ports belong to another conversation, as what a guest is sent shows: a SYN
/// from the backend after the connection is over. The guest has connected to the backend itself, or the other way round.
pub(crate) fn superseded(memory: Memory<'_>, port: &Port, frame: Frame<'_>) -> Option<u32> {
    frame.parsed.tcp.filter(|tcp| tcp.flags.contains(Flags::SYN))?;
    let Memory { connections, after, .. } = memory;
    let index =
        connections.find_second_after(&Key::of(port.id, Direction::Ingress, frame.head, frame.parsed), after)?;
    let is_balanced = matches!(connections.payload(index).by, Translator::Balancer(_));
    (is_balanced && connections.standing(index).0 == State::Closed).then_some(index)
}

impl Connection {
    /// What its guest sends.
    pub(crate) fn sends(self, index: u32, event: Event) -> Step {
        let change = Change::Continues { index, direction: Direction::Egress, event };
        Step { translation: self.sent, quote: None, is_hairpin: self.is_hairpin, connection: self, change }
    }

    /// What its guest is sent.
    pub(crate) fn answers(self, index: u32, event: Event) -> Step {
        let change = Change::Continues { index, direction: Direction::Ingress, event };
        let translation = self.known.reversed();
        Step { translation, quote: None, is_hairpin: self.is_hairpin, connection: self, change }
    }

    /// An ICMP error that its guest sends about what it was sent.
    pub(crate) fn complains(self, quote: Quote) -> Step {
        self.relates(self.sent, quote)
    }

    /// An ICMP error about what its guest has sent.
    pub(crate) fn fails(self, quote: Quote) -> Step {
        self.relates(self.known.reversed(), quote)
    }

    fn relates(self, translation: Translation, quote: Quote) -> Step {
        let (quote, change) = (Some(quote), Change::Relates);
        Step { translation, quote, is_hairpin: self.is_hairpin, connection: self, change }
    }

    /// It begins with a packet of `origin`, seen from its guest, in the place of another one. Its name is `key`.
    pub(crate) fn begins(self, key: Key, origin: Direction, event: Event, ends: Option<u32>, mapped: Mapped) -> Step {
        let translation = if origin == Direction::Egress { self.sent } else { self.known.reversed() };
        let change = Change::Begins { key, origin, event, ends, mapped };
        Step { translation, quote: None, is_hairpin: false, connection: self, change }
    }
}

impl Step {
    /// Whether the packet begins its connection.
    pub(crate) fn is_new(&self) -> bool {
        matches!(self.change, Change::Begins { .. })
    }

    /// The connection to which the packet belongs, if it neither begins one nor is about one; and in which direction it goes.
    pub(crate) fn continues(&self) -> Option<(u32, Direction)> {
        match self.change {
            Change::Continues { index, direction, .. } => Some((index, direction)),
            Change::Begins { .. } | Change::Relates => None,
        }
    }

    /// What a packet's headers say after the change. The hash of its flow stays: order is kept within the flow as the sender knows it.
    pub(crate) fn view(&self, parsed: &Parsed) -> Parsed {
        let seen = self.translation.view(parsed);
        match &self.quote {
            // It may come from between the ends.
            Some(quote) if quote.destination != parsed.src_ip => Parsed { src_ip: parsed.src_ip, ..seen },
            _ => seen,
        }
    }

    /// Does it.
    ///
    /// # Errors
    /// There is no room for another connection.
    pub(crate) fn apply(
        &self,
        connections: &mut Sessions<Connection>,
        mappings: &mut Mappings,
        epoch: u32,
    ) -> Result<(), DropReason> {
        let Change::Begins { key, origin, event, ends, mapped } = self.change else {
            if let Change::Continues { index, direction, event } = self.change {
                touch(connections, index, direction, event, epoch);
            }
            return Ok(());
        };
        let mut connection = self.connection;
        let joined = match mapped {
            Mapped::No => None,
            Mapped::Joins(index) => {
                mappings.join(index, epoch);
                Some(index)
            }
            Mapped::Begins(pair) => Some(mappings.begin(pair, epoch).ok_or(DropReason::NatPortsFull)?),
        };
        if let Translator::Nat { mapping, .. } = &mut connection.by {
            *mapping = joined;
        }
        if let Some(index) = ends {
            connections.remove(index);
        }
        let inserted = connections.insert_with(key, origin, event, epoch, ends.is_some(), connection);
        if inserted.is_err()
            && let Some(index) = joined
        {
            mappings.leave(index);
        }
        leave_mappings(connections, mappings);
        inserted.map_err(|_| DropReason::ConnectionsFull)
    }

    /// What [`apply`](Self::apply) would say; what it would do is added to the plan.
    pub(crate) fn foresee(&self, connections: &Sessions<Connection>, plan: &mut Planned) -> Result<(), DropReason> {
        let Change::Begins { key, origin, ends, .. } = self.change else { return Ok(()) };
        match ends {
            Some(index) => {
                plan.end(index);
                Ok(())
            }
            None => connections.plan_insert(&key, origin, plan).map_err(|_| DropReason::ConnectionsFull),
        }
    }
}

/// Connections that have ended no longer hold their mappings.
pub(crate) fn leave_mappings(connections: &mut Sessions<Connection>, mappings: &mut Mappings) {
    connections.released().drain(..).for_each(|mapping| mappings.leave(mapping));
}

/// A packet of a connection, which has been looked at under the configuration of `epoch`.
#[inline(always)]
pub(crate) fn touch(
    connections: &mut Sessions<Connection>,
    index: u32,
    direction: Direction,
    event: Event,
    epoch: u32,
) {
    // Whether there still is its backend is asked when its client sends.
    let epoch = if direction == Direction::Egress { epoch } else { connections.epoch(index) };
    connections.touch(index, direction, event, epoch);
}

fn has_backend(balancers: &Balancers, parsed: &Parsed, connection: &Connection) -> bool {
    balancers.of(parsed).is_some_and(|balancer| balancer.has(&connection.backend()))
}

/// Whether a connection can begin with a packet. One of TCP that has lost its backend can not begin at another one in its middle.
fn may_begin(parsed: &Parsed) -> bool {
    parsed.tcp.is_none_or(|tcp| tcp.flags.contains(Flags::SYN) && !tcp.flags.contains(Flags::ACK))
}

fn ends_of(parsed: &Parsed) -> Translation {
    let source = Endpoint { address: parsed.src_ip, port: parsed.src_port };
    Translation::of_ends(source, Endpoint { address: parsed.dst_ip, port: parsed.dst_port })
}
