//! The NAT decision about a packet.

use std::net::IpAddr;

use bifrost_nic::{L3, Parsed};
use bifrost_wire::ipv6;
use bifrost_wire::protocol::{ICMP, ICMPV6, TCP, UDP};
use bifrost_wire::tcp::Flags;

use super::uplink::{Address, Uplink};
use crate::drop_reason::DropReason;
use crate::frame::Frame;
use crate::groups::event_of;
use crate::ids::{Direction, PortId};
use crate::location::VpcId;
use crate::mapping::{Inside, Outside, Pair};
use crate::rewrite::{Endpoint, Translation};
use crate::service::{Connection, Mapped, Memory, Step, Translator};
use crate::session::{self, Event, Key, Quote};

/// Looks up the guests of this host.
pub(crate) trait Guests {
    /// The network of a port.
    fn network(&self, port: PortId) -> Option<VpcId>;
    /// The port of this host that has an address in a network.
    fn at(&self, vpc: VpcId, address: IpAddr) -> Option<PortId>;
}

/// The decision about a packet to the outside.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Departure {
    pub(crate) translation: Translation,
    /// What the packet does to its connection, if it has one.
    pub(crate) step: Option<Step>,
}

/// The decision about a packet from the outside.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    /// The port of the receiving guest.
    pub(crate) guest: PortId,
    pub(crate) translation: Translation,
    /// What the packet does to its connection, if it has one.
    pub(crate) step: Option<Step>,
    /// The packet that it quotes, if it is an ICMP error.
    quote: Option<Quote>,
}

impl Arrival {
    /// The packet's headers after the translation.
    pub(crate) fn view(&self, parsed: &Parsed) -> Parsed {
        let seen = self.translation.view(parsed);
        match self.quote {
            // A router between the ends may have sent the error.
            Some(quote) if quote.destination != parsed.src_ip => Parsed { src_ip: parsed.src_ip, ..seen },
            _ => seen,
        }
    }
}

/// The two ends of a packet whose ports may be translated.
#[derive(Clone, Copy, Debug)]
struct Flow {
    protocol: u8,
    source: Endpoint,
    destination: Endpoint,
    event: Event,
    /// Whether it may begin a conversation from inside, and from outside.
    opens: bool,
    opens_inwards: bool,
}

impl Flow {
    /// # Errors
    /// It has no ports, or they are not visible.
    fn of(frame: Frame<'_>) -> Result<Flow, DropReason> {
        let p = frame.parsed;
        if p.is_fragment() {
            return Err(DropReason::NatFragment);
        }
        if !Translation::is_behind_header(p) {
            return Err(DropReason::NatProtocol);
        }
        let end = |address, port| Endpoint { address, port };
        let flow = |ports: (u16, u16), event, opens, opens_inwards| {
            let (source, destination) = (end(p.src_ip, ports.0), end(p.dst_ip, ports.1));
            Ok(Flow { protocol: p.protocol, source, destination, event, opens, opens_inwards })
        };
        match p.protocol {
            TCP | UDP => {
                let is_first =
                    |flags: Flags| flags.contains(Flags::SYN) && !flags.intersects(Flags::ACK.with(Flags::RST));
                let first = p.tcp.is_none_or(|tcp| is_first(tcp.flags));
                // A connection that continues after a restart of the daemon gets another outside port, and its other
                // end resets it.
                let opens = p.tcp.is_none_or(|tcp| !tcp.flags.contains(Flags::RST));
                flow((p.src_port, p.dst_port), event_of(p), opens, first)
            }
            ICMP | ICMPV6 => {
                let (is_request, identifier) = session::echo(frame.head, p).ok_or(DropReason::NatProtocol)?;
                flow((identifier, identifier), Event::Icmp, is_request, false)
            }
            _ => Err(DropReason::NatProtocol),
        }
    }

    /// The destination. An echo has the same identifier at both ends, so its destination uses `port`.
    fn towards(&self, port: u16) -> Endpoint {
        let is_echo = matches!(self.protocol, ICMP | ICMPV6);
        Endpoint { port: if is_echo { port } else { self.destination.port }, ..self.destination }
    }
}

/// A packet to the outside from the guest behind a port.
///
/// # Errors
/// The reason to drop the packet.
pub(crate) fn depart(
    uplink: &Uplink,
    guests: &impl Guests,
    guest: PortId,
    memory: Memory<'_>,
    frame: Frame<'_>,
) -> Result<Departure, DropReason> {
    let p = frame.parsed;
    let vpc = guests.network(guest).ok_or(DropReason::UnknownPort)?;
    let error = session::error(guest, Direction::Egress, frame.head, p);
    let quote = sensible(error, p, |quote| quote.destination == p.src_ip && quote.source == p.dst_ip)?;
    if let Some(outside) = uplink.floating(vpc, p.src_ip) {
        may_change_addresses(p)?;
        let translation = Translation::of_addresses(outside, p.dst_ip);
        return Ok(Departure { translation, step: None });
    }
    let Memory { connections, mappings, after, epoch } = memory;
    if let Some(quote) = quote {
        let index = connections.find_after(&quote.key, after).ok_or(DropReason::NatNoMapping)?;
        let connection = connections.payload(index);
        is_valid(uplink, guests, connection).then_some(()).ok_or(DropReason::NatNoMapping)?;
        let step = connection.complains(quote);
        return Ok(Departure { translation: step.translation, step: Some(step) });
    }
    let flow = Flow::of(frame)?;
    let Flow { protocol, source, destination, event, .. } = flow;
    let with = |step: Step| Departure { translation: step.translation, step: Some(step) };
    let key = Key::between(guest, source, destination, protocol);
    let mut ends = None;
    if let Some(index) = connections.find_after(&key, after) {
        let connection = *connections.payload(index);
        let stays = connections.is_of(index, epoch) || is_valid(uplink, guests, &connection);
        if stays && !connections.begins_anew(index, event) {
            return Ok(with(connection.sends(index, event)));
        }
        ends = Some(index);
    }
    if !flow.opens {
        return Err(DropReason::NatNoMapping);
    }
    let inside = Inside { guest, protocol, end: source };
    let known = mappings.of_inside(&inside);
    let is_usable = |&mapping: &u32| {
        let Outside { uplink: port, end, .. } = mappings.pair(mapping).outside;
        port == uplink.port && (mappings.is_of(mapping, epoch) || uplink.lends(vpc, protocol, end))
    };
    let (end, mapped) = if let Some(end) = uplink.forwarded(vpc, protocol, source) {
        (end, Mapped::No)
    } else if let Some(mapping) = known.filter(is_usable) {
        (mappings.pair(mapping).outside.end, Mapped::Joins(mapping))
    } else {
        let lent = uplink.source(vpc).ok_or(DropReason::NoRoute)?;
        let address = mappings.address(&inside, lent.addresses(source.address.is_ipv6())).ok_or(DropReason::NoRoute)?;
        if mappings.of_guest(guest) >= lent.per_guest {
            return Err(DropReason::NatPortsFull);
        }
        let is_reserved = |port| uplink.forward(protocol, Endpoint { address, port }).is_some();
        let port = mappings.free_port(&inside, uplink.port, address, &lent.block, is_reserved);
        let end = Endpoint { address, port: port.ok_or(DropReason::NatPortsFull)? };
        let outside = Outside { uplink: uplink.port, protocol, end };
        (end, Mapped::Begins(Pair { inside, outside }))
    };
    let ends = free_for(uplink, memory, (end, flow.towards(end.port)), protocol, ends)?;
    let known = Translation::of_ends(source, destination);
    let sent = Translation::of_ends(end, flow.towards(end.port));
    Ok(with(connection(uplink, guest, known, sent, protocol).begins(key, Direction::Egress, event, ends, mapped)))
}

/// A packet from the outside. `after` [`depart`]: a packet from a guest of this host, after its translation.
///
/// # Errors
/// The reason to drop the packet.
pub(crate) fn arrive(
    uplink: &Uplink,
    guests: &impl Guests,
    memory: Memory<'_>,
    frame: Frame<'_>,
    after: Option<&Departure>,
) -> Result<Arrival, DropReason> {
    let p = frame.parsed;
    let error = session::error(uplink.port, Direction::Ingress, frame.head, p);
    if error.is_some() && after.is_some() {
        return Err(DropReason::NatProtocol);
    }
    let quote = sensible(error, p, |quote| quote.source == p.dst_ip)?;
    let source = after.map_or(p.src_ip, |departure| departure.translation.source.address);
    match uplink.address(p.dst_ip).ok_or(DropReason::NatNoMapping)? {
        Address::Floating(vpc, inside) => {
            may_change_addresses(p)?;
            let guest = guests.at(vpc, inside).ok_or(DropReason::NatNoMapping)?;
            let remote = quote.map_or(source, |quote| quote.destination);
            Ok(Arrival { guest, translation: Translation::of_addresses(remote, inside), step: None, quote })
        }
        Address::Shared => arrive_at_port(uplink, guests, memory, frame, (quote, after)),
    }
}

fn arrive_at_port(
    uplink: &Uplink,
    guests: &impl Guests,
    memory: Memory<'_>,
    frame: Frame<'_>,
    (quote, departure): (Option<Quote>, Option<&Departure>),
) -> Result<Arrival, DropReason> {
    let Memory { connections, mappings, after, epoch } = memory;
    let none = DropReason::NatNoMapping;
    let with = |connection: &Connection, step: Step| {
        let guest = guest_of(connection).ok_or(none)?;
        Ok(Arrival { guest, translation: step.translation, step: Some(step), quote })
    };
    if let Some(quote) = quote {
        let index = connections.find_second_after(&quote.key, after).ok_or(none)?;
        let connection = connections.payload(index);
        is_valid(uplink, guests, connection).then_some(()).ok_or(none)?;
        return with(connection, connection.fails(quote));
    }
    let mut flow = Flow::of(frame)?;
    if let Some(Departure { translation, .. }) = departure {
        flow.source.address = translation.source.address;
        if translation.is_with_ports() {
            flow.source.port = translation.source.port;
            flow.destination = flow.towards(translation.source.port);
        }
    }
    let Flow { protocol, source, destination, event, .. } = flow;
    let mut ends = None;
    if let Some(index) = connections.find_second_after(&Key::between(uplink.port, destination, source, protocol), after)
    {
        let connection = *connections.payload(index);
        let stays = connections.is_of(index, epoch) || is_valid(uplink, guests, &connection);
        if stays && !connections.begins_anew(index, event) {
            return with(&connection, connection.answers(index, event));
        }
        ends = Some(index);
    }
    if !flow.opens_inwards {
        return Err(none);
    }
    let (guest, inside, mapped) = if let Some((vpc, inside)) = uplink.forward(protocol, destination) {
        (guests.at(vpc, inside.address).ok_or(none)?, inside, Mapped::No)
    } else {
        let outside = Outside { uplink: uplink.port, protocol, end: destination };
        let mapping = mappings.of_outside(&outside).ok_or(none)?;
        let Inside { guest, end, .. } = mappings.pair(mapping).inside;
        let vpc = guests.network(guest).filter(|vpc| guests.at(*vpc, end.address) == Some(guest)).ok_or(none)?;
        let is_usable = mappings.is_of(mapping, epoch) || uplink.lends(vpc, protocol, destination);
        is_usable.then_some(()).ok_or(none)?;
        (guest, end, Mapped::Joins(mapping))
    };
    let known = Translation::of_ends(inside, source);
    let key = Key::between(guest, inside, source, protocol);
    // A connection with the same key but another outside end is from an earlier configuration.
    let other = connections.find_after(&key, after);
    let ends = if ends.is_some() && other.is_some() && ends != other { return Err(none) } else { ends.or(other) };
    let sent = Translation::of_ends(destination, source);
    let connection = connection(uplink, guest, known, sent, protocol);
    with(&connection, connection.begins(key, Direction::Ingress, event, ends, mapped))
}

/// The combined translation of a packet that goes from one guest to another through the outside addresses of both.
pub(crate) fn turn_round(parsed: &Parsed, departure: &Departure, arrival: &Arrival) -> Translation {
    let (out, back) = (departure.translation, arrival.translation);
    match (out.is_with_ports(), back.is_with_ports()) {
        (_, true) => back,
        (false, false) => Translation::of_addresses(out.source.address, back.destination.address),
        (true, false) => {
            let port = if matches!(parsed.protocol, TCP | UDP) { parsed.dst_port } else { out.source.port };
            Translation::of_ends(out.source, Endpoint { address: back.destination.address, port })
        }
    }
}

fn connection(uplink: &Uplink, guest: PortId, known: Translation, sent: Translation, protocol: u8) -> Connection {
    let by = Translator::Nat { guest, uplink: uplink.port, mapping: None };
    let reply = Key::between(uplink.port, sent.source, sent.destination, protocol);
    Connection::with_outside(by, known, sent, reply)
}

/// Whether an uplink has the port forward of a connection that a guest of `vpc` had on another host. `key`: its key.
pub(crate) fn forwards(uplink: &Uplink, vpc: VpcId, key: Key, of_other: &Connection) -> bool {
    let ((inside, _), (_, outside)) = (key.ends(), of_other.guest_ends());
    uplink.forward(key.protocol(), outside) == Some((vpc, inside))
}

/// A connection through a port forward that a guest had on another host, as one of its port here. `key`: its key here.
/// `None`: its ends do not fit together.
pub(crate) fn moved(uplink: &Uplink, guest: PortId, key: Key, of_other: Connection) -> Option<Connection> {
    let (inside, remote) = key.ends();
    let (_, outside) = of_other.guest_ends();
    if [inside, outside].into_iter().any(|end| end.address.is_ipv4() != remote.address.is_ipv4()) {
        return None;
    }
    let (known, sent) = (Translation::of_ends(inside, remote), Translation::of_ends(outside, remote));
    Some(connection(uplink, guest, known, sent, key.protocol()))
}

fn guest_of(connection: &Connection) -> Option<PortId> {
    match connection.by {
        Translator::Nat { guest, .. } => Some(guest),
        Translator::Balancer(_) => None,
    }
}

/// Whether the current configuration allows a connection that began under an earlier one.
fn is_valid(uplink: &Uplink, guests: &impl Guests, connection: &Connection) -> bool {
    let Translator::Nat { guest, uplink: port, mapping } = connection.by else { return false };
    let (inside, outside) = connection.guest_ends();
    let Some(vpc) = guests.network(guest) else { return false };
    let protocol = connection.protocol();
    let is_theirs = match mapping {
        Some(_) => uplink.lends(vpc, protocol, outside),
        None => uplink.forward(protocol, outside) == Some((vpc, inside)),
    };
    port == uplink.port
        && is_theirs
        && uplink.floating(vpc, inside.address).is_none()
        && guests.at(vpc, inside.address) == Some(guest)
}

/// The connection that a new one between these outside ends replaces: `ends`, which has the same key, or one from an
/// earlier configuration with the same outside ends.
fn free_for(
    uplink: &Uplink,
    Memory { connections, after, .. }: Memory<'_>,
    (local, remote): (Endpoint, Endpoint),
    protocol: u8,
    ends: Option<u32>,
) -> Result<Option<u32>, DropReason> {
    let other = connections.find_second_after(&Key::between(uplink.port, local, remote, protocol), after);
    match (ends, other) {
        (Some(ends), Some(other)) if ends != other => Err(DropReason::NatPortsFull),
        _ => Ok(ends.or(other)),
    }
}

/// The packet that an ICMP error quotes; `None`: not an ICMP error. The receiver of the error must have sent the
/// quoted packet.
fn sensible(
    error: Option<Option<Quote>>,
    parsed: &Parsed,
    is_right: impl Fn(&Quote) -> bool,
) -> Result<Option<Quote>, DropReason> {
    let Some(quote) = error else { return Ok(None) };
    let quote = quote.filter(|quote| is_right(quote) && Translation::is_behind_header(parsed));
    quote.map(Some).ok_or(DropReason::NatProtocol)
}

/// Whether the addresses of a packet can be changed: all checksums that cover them must be at the expected offsets.
fn may_change_addresses(parsed: &Parsed) -> Result<(), DropReason> {
    /// Length of the fragment header, bytes.
    const FRAGMENT_LEN: usize = 8;
    let len = usize::from(parsed.l4 - parsed.l3);
    let most = ipv6::HEADER_LEN + if parsed.is_fragment() { FRAGMENT_LEN } else { 0 };
    if parsed.kind == L3::V6 && len != most { Err(DropReason::NatProtocol) } else { Ok(()) }
}
