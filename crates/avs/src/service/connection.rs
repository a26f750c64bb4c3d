//! Connections through load balancers and NAT, and the backend of each.

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

/// Number of source ports tried for a connection whose own source port is taken. It is taken if another connection of
/// the guest with the same source port would look the same to the backend.
const TRIES: u64 = 32;
/// First ephemeral port (RFC 6335, section 6).
const FIRST_PORT: u16 = 49_152;

/// A translated connection of a guest: with a backend of a load balancer, or with the outside. The key of its session
/// is that of the guest's packets; replies have a second key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Connection {
    pub(crate) by: Translator,
    /// The ends as the guest sees them: its own, and the load balancer's or the outside one.
    known: Translation,
    /// The ends as the other side sees them: the guest's, and its own.
    sent: Translation,
    reply: Key,
    /// The guest is itself the backend of its connection.
    is_hairpin: bool,
}

/// What translates a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Translator {
    Balancer(LoadBalancerId),
    /// NAT at an uplink, for the guest behind a port.
    Nat {
        guest: PortId,
        uplink: PortId,
        /// `None`: the outside end belongs to the guest permanently (a port forward).
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
    /// A connection of a guest with the outside. `known`: the ends as the guest sees them; `sent`: the ends as the
    /// other side sees them.
    pub(crate) fn with_outside(by: Translator, known: Translation, sent: Translation, reply: Key) -> Self {
        Connection { by, known, sent, reply, is_hairpin: false }
    }

    /// The state that another switch needs to continue the connection: the ends as the guest and as the other side
    /// see them, the key of replies, and whether the guest is its own backend.
    pub(crate) fn parts(&self) -> (Translation, Translation, Key, bool) {
        (self.known, self.sent, self.reply, self.is_hairpin)
    }

    /// Restores a connection of another switch from its [`parts`](Self::parts).
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

    /// The guest's end as the guest sees it, and as the other side sees it.
    pub(crate) fn guest_ends(&self) -> (Endpoint, Endpoint) {
        (self.known.source, self.sent.source)
    }
}

/// The translated connections of a switch, as a decision sees them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory<'a> {
    pub(crate) mappings: &'a Mappings,
    pub(crate) connections: &'a Sessions<Connection>,
    /// Changes that earlier steps of a trace have planned.
    pub(crate) after: &'a Planned,
    /// The epoch of the configuration.
    pub(crate) epoch: u32,
}

/// What a packet does to its connection, and how the packet is translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// The packet's new ends; for an ICMP error, those of other packets in its direction.
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
    /// The packet belongs to an existing connection.
    Continues { index: u32, direction: Direction, event: Event },
    /// The packet begins a connection. `ends`: the connection with the same key that it replaces.
    Begins { key: Key, origin: Direction, event: Event, ends: Option<u32>, mapped: Mapped },
    /// The packet is an ICMP error about a connection; it neither keeps it alive nor ends it.
    Relates,
}

/// The NAT mapping of a new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mapped {
    /// It uses none.
    No,
    /// It joins an existing one.
    Joins(u32),
    /// It creates one.
    Begins(Pair),
}

/// A packet from a guest to the address of a load balancer: finds its connection, or begins one.
///
/// # Errors
/// The reason to drop the packet.
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
        // The reply of a backend that is its own client.
        return Ok(connections.payload(index).answers(index, event));
    }
    let balancer = balancers.of(p).ok_or(DropReason::NoService)?;
    let backend = balancer.choose(p).ok_or(DropReason::NoBackend)?;
    let known = ends_of(p);
    let is_hairpin = port.addresses.contains(&backend.address);
    let address = if is_hairpin { known.destination.address } else { known.source.address };
    // The reply comes from the backend to the guest or, if they are the same, goes from it to the load balancer's
    // address.
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

/// A connection that a guest had on another host, as one of its `port` here. `key`: its key here. Everything else follows
/// from the backend and from the guest's port as the backend sees it. `None`: there is no such load balancer, or the
/// ends do not fit together.
pub(crate) fn moved(balancers: &Balancers, port: &Port, key: Key, of_other: Connection) -> Option<Connection> {
    let (local, remote) = key.ends();
    let balancer = balancers.at(key.protocol(), remote)?;
    let (source, backend) = (of_other.sent.source.port, of_other.sent.destination);
    let is_hairpin = port.addresses.contains(&backend.address);
    let guest = Endpoint { address: if is_hairpin { remote.address } else { local.address }, port: source };
    if [local, backend].into_iter().any(|end| end.address.is_ipv4() != remote.address.is_ipv4()) {
        return None;
    }
    let (near, far) = if is_hairpin { (backend, guest) } else { (guest, backend) };
    Some(Connection {
        by: Translator::Balancer(balancer.id),
        known: Translation::of_ends(local, remote),
        sent: Translation::of_ends(guest, backend),
        reply: Key::between(port.id, near, far, key.protocol()),
        is_hairpin,
    })
}

/// An ICMP error that a guest sends to the address of a load balancer about a packet from there. It goes to the
/// backend.
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

/// The packet that an ICMP error quotes, if the error goes to the sender of that packet, and has no extension headers
/// before the message.
fn quoted(port: &Port, direction: Direction, frame: Frame<'_>) -> Option<Quote> {
    let p = frame.parsed;
    let quote = session::error(port.id, direction, frame.head, p)??;
    (quote.source == p.dst_ip && Translation::is_behind_header(p)).then_some(quote)
}

/// A packet to a guest that belongs to a translated connection of the guest, or is an ICMP error about one. It comes
/// from the backend, or from a router on the way.
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

/// The connection through a load balancer whose addresses and ports have been reused, as this packet to a guest
/// shows: the connection is closed, and the packet is a SYN from the backend. The guest has connected to the backend
/// directly, or the backend to the guest.
pub(crate) fn superseded(memory: Memory<'_>, port: &Port, frame: Frame<'_>) -> Option<u32> {
    frame.parsed.tcp.filter(|tcp| tcp.flags.contains(Flags::SYN))?;
    let Memory { connections, after, .. } = memory;
    let index =
        connections.find_second_after(&Key::of(port.id, Direction::Ingress, frame.head, frame.parsed), after)?;
    let is_balanced = matches!(connections.payload(index).by, Translator::Balancer(_));
    (is_balanced && connections.standing(index).0 == State::Closed).then_some(index)
}

impl Connection {
    /// A packet that the connection's guest sends.
    pub(crate) fn sends(self, index: u32, event: Event) -> Step {
        let change = Change::Continues { index, direction: Direction::Egress, event };
        Step { translation: self.sent, quote: None, is_hairpin: self.is_hairpin, connection: self, change }
    }

    /// A packet to the connection's guest.
    pub(crate) fn answers(self, index: u32, event: Event) -> Step {
        let change = Change::Continues { index, direction: Direction::Ingress, event };
        let translation = self.known.reversed();
        Step { translation, quote: None, is_hairpin: self.is_hairpin, connection: self, change }
    }

    /// An ICMP error from the connection's guest, about a packet that it received.
    pub(crate) fn complains(self, quote: Quote) -> Step {
        self.relates(self.sent, quote)
    }

    /// An ICMP error to the connection's guest, about a packet that it sent.
    pub(crate) fn fails(self, quote: Quote) -> Step {
        self.relates(self.known.reversed(), quote)
    }

    fn relates(self, translation: Translation, quote: Quote) -> Step {
        let (quote, change) = (Some(quote), Change::Relates);
        Step { translation, quote, is_hairpin: self.is_hairpin, connection: self, change }
    }

    /// The connection begins with a packet of direction `origin`, as seen from its guest. `key`: its key; `ends`: a
    /// connection that it replaces.
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

    /// The existing connection to which the packet belongs, and the packet's direction in it; `None` if it begins one
    /// or is an ICMP error.
    pub(crate) fn continues(&self) -> Option<(u32, Direction)> {
        match self.change {
            Change::Continues { index, direction, .. } => Some((index, direction)),
            Change::Begins { .. } | Change::Relates => None,
        }
    }

    /// The packet's headers after the translation. The flow hash does not change: packets stay in order within the
    /// flow as the sender knows it.
    pub(crate) fn view(&self, parsed: &Parsed) -> Parsed {
        let seen = self.translation.view(parsed);
        match &self.quote {
            // A router between the ends may have sent the error.
            Some(quote) if quote.destination != parsed.src_ip => Parsed { src_ip: parsed.src_ip, ..seen },
            _ => seen,
        }
    }

    /// Carries out the step.
    ///
    /// # Errors
    /// There is no room for another connection or mapping.
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

    /// Returns what [`apply`](Self::apply) would return, and adds what it would do to the plan.
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

/// Releases the mappings of connections that have ended.
pub(crate) fn leave_mappings(connections: &mut Sessions<Connection>, mappings: &mut Mappings) {
    connections.released().drain(..).for_each(|mapping| mappings.leave(mapping));
}

/// Updates a connection for a packet that was checked under the configuration of `epoch`.
#[inline(always)]
pub(crate) fn touch(
    connections: &mut Sessions<Connection>,
    index: u32,
    direction: Direction,
    event: Event,
    epoch: u32,
) {
    // Whether its backend still exists is checked when the client sends.
    let epoch = if direction == Direction::Egress { epoch } else { connections.epoch(index) };
    connections.touch(index, direction, event, epoch);
}

fn has_backend(balancers: &Balancers, parsed: &Parsed, connection: &Connection) -> bool {
    balancers.of(parsed).is_some_and(|balancer| balancer.has(&connection.backend()))
}

/// Whether a packet may begin a connection. A TCP connection that has lost its backend cannot continue at another
/// one.
fn may_begin(parsed: &Parsed) -> bool {
    parsed.tcp.is_none_or(|tcp| tcp.flags.contains(Flags::SYN) && !tcp.flags.contains(Flags::ACK))
}

fn ends_of(parsed: &Parsed) -> Translation {
    let source = Endpoint { address: parsed.src_ip, port: parsed.src_port };
    Translation::of_ends(source, Endpoint { address: parsed.dst_ip, port: parsed.dst_port })
}
