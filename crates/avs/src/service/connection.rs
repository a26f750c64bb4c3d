//! Connections through load balancers: which backend each has.

use bifrost_nic::Parsed;
use bifrost_tables::mix;
use bifrost_wire::protocol::{ICMP, ICMPV6};
use bifrost_wire::tcp::Flags;

use super::balancer::Balancers;
use crate::drop_reason::DropReason;
use crate::frame::Frame;
use crate::groups::event_of;
use crate::ids::{Direction, LoadBalancerId};
use crate::rewrite::{Endpoint, Translation};
use crate::session::{self, Event, Key, Payload, Planned, Quote, Sessions};
use crate::tables::Port;

/// Source ports that are tried for a connection whose own one is taken. It is if the guest has the same one for two connections that
/// would look the same to the backend.
const TRIES: u64 = 32;
/// Ephemeral ports (RFC 6335, section 6).
const FIRST_PORT: u16 = 49_152;

/// A connection of a guest with a backend of a load balancer. Its session has the name under which the guest sends; answers have
/// another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Connection {
    pub(crate) balancer: LoadBalancerId,
    /// The ends that the guest knows: its own, and the load balancer's.
    known: Translation,
    /// The ends that the backend knows: the guest's, and its own.
    sent: Translation,
    reply: Key,
    /// The guest is a backend itself, and has itself for its backend.
    is_hairpin: bool,
}

impl Payload for Connection {
    fn second_key(&self) -> Option<Key> {
        Some(self.reply)
    }
}

impl Connection {
    /// The backend.
    pub(crate) fn backend(&self) -> Endpoint {
        self.sent.destination
    }
}

/// What is known of connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory<'a> {
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
    Begins { key: Key, event: Event, ends: Option<u32> },
    /// It is an ICMP error about one, which it neither keeps alive nor ends.
    Relates,
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
    let Memory { connections, after, epoch } = memory;
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
        balancer: balancer.id,
        known,
        sent: Translation { source: Endpoint { address, port: source }, destination: backend },
        reply: reply(source),
        is_hairpin,
    };
    let change = Change::Begins { key, event, ends };
    Ok(Step { translation: connection.sent, quote: None, is_hairpin, connection, change })
}

/// What a guest sends to the address of a load balancer about what it was sent from there: an ICMP error, which goes to the backend.
pub(crate) fn about_answer(memory: Memory<'_>, port: &Port, frame: Frame<'_>) -> Option<Step> {
    let quote = quoted(port, Direction::Egress, frame)?;
    let Memory { connections, after, .. } = memory;
    if let Some(index) = connections.find_after(&quote.key, after) {
        let connection = connections.payload(index);
        return Some(connection.relates(connection.sent, quote));
    }
    // A backend that is its own client.
    let connection = connections.payload(connections.find_second_after(&quote.key, after)?);
    Some(connection.relates(connection.known.reversed(), quote))
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
        return Some(connection.relates(connection.known.reversed(), quote));
    }
    if !Translation::is_possible(frame.parsed) {
        return None;
    }
    let key = Key::of(port.id, Direction::Ingress, frame.head, frame.parsed);
    let index = memory.connections.find_second_after(&key, memory.after)?;
    Some(memory.connections.payload(index).answers(index, event_of(frame.parsed)))
}

impl Connection {
    fn sends(self, index: u32, event: Event) -> Step {
        let change = Change::Continues { index, direction: Direction::Egress, event };
        Step { translation: self.sent, quote: None, is_hairpin: self.is_hairpin, connection: self, change }
    }

    fn answers(self, index: u32, event: Event) -> Step {
        let change = Change::Continues { index, direction: Direction::Ingress, event };
        let translation = self.known.reversed();
        Step { translation, quote: None, is_hairpin: self.is_hairpin, connection: self, change }
    }

    fn relates(self, translation: Translation, quote: Quote) -> Step {
        let (quote, change) = (Some(quote), Change::Relates);
        Step { translation, quote, is_hairpin: self.is_hairpin, connection: self, change }
    }
}

impl Step {
    /// Whether the packet begins its connection.
    pub(crate) fn is_new(&self) -> bool {
        matches!(self.change, Change::Begins { .. })
    }

    /// Whether the packet is an ICMP error.
    pub(crate) fn is_error(&self) -> bool {
        self.quote.is_some()
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
        let Translation { source, destination } = self.translation;
        let seen = Parsed { dst_ip: destination.address, ..*parsed };
        match &self.quote {
            None => Parsed { src_ip: source.address, src_port: source.port, dst_port: destination.port, ..seen },
            Some(quote) if quote.destination == parsed.src_ip => Parsed { src_ip: source.address, ..seen },
            Some(_) => seen,
        }
    }

    /// Does it.
    ///
    /// # Errors
    /// There is no room for another connection.
    pub(crate) fn apply(&self, connections: &mut Sessions<Connection>, epoch: u32) -> Result<(), DropReason> {
        match self.change {
            Change::Continues { index, direction, event } => touch(connections, index, direction, event, epoch),
            Change::Relates => {}
            Change::Begins { key, event, ends } => {
                if let Some(index) = ends {
                    connections.remove(index);
                }
                connections
                    .insert_with(key, Direction::Egress, event, epoch, ends.is_some(), self.connection)
                    .map_err(|_| DropReason::ConnectionsFull)?;
            }
        }
        Ok(())
    }

    /// What [`apply`](Self::apply) would say; what it would do is added to the plan.
    pub(crate) fn foresee(&self, connections: &Sessions<Connection>, plan: &mut Planned) -> Result<(), DropReason> {
        let Change::Begins { key, ends, .. } = self.change else { return Ok(()) };
        match ends {
            Some(index) => {
                plan.end(index);
                Ok(())
            }
            None => connections.plan_insert(&key, Direction::Egress, plan).map_err(|_| DropReason::ConnectionsFull),
        }
    }
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
    Translation {
        source: Endpoint { address: parsed.src_ip, port: parsed.src_port },
        destination: Endpoint { address: parsed.dst_ip, port: parsed.dst_port },
    }
}
