//! DHCPv6 for the guests of this host (RFC 8415): a guest gets only the addresses of its port.
//!
//! As in `dhcp.rs`, the configuration determines what each guest gets, so there is no state, and all hosts and
//! workers answer alike. The server's DUID is derived from the gateway's MAC address, which is the same everywhere: a
//! guest that moves to another host can renew its addresses.

use std::net::Ipv6Addr;

use crate::dns;
use crate::drop_reason::DropReason;
use crate::tables::{GATEWAY_MAC, Ipv6Lease, Lease};

/// UDP port of servers (RFC 8415, section 7.2). The switch must be given the complete packet to this port.
pub const SERVER_PORT: u16 = 547;
/// UDP port of clients.
pub(crate) const CLIENT_PORT: u16 = 546;
/// All servers and relays on a link (RFC 8415, section 7.1).
pub(crate) const SERVERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2);

/// Maximum length of a reply, bytes: with its headers it fits the smallest MTU of IPv6.
#[cfg(test)]
const MOST_LEN: usize = 1280 - 48;
/// Maximum number of identity associations of a message, and of addresses in each. Clients use one or two.
const MOST_ASSOCIATIONS: usize = 8;
const MOST_NAMED: usize = 8;
/// Valid lengths of a client's DUID, bytes (RFC 8415, section 11.1).
const DUID_LENGTHS: std::ops::RangeInclusive<usize> = 3..=130;
/// Minimum information refresh time, s (RFC 8415, section 7.6).
const LEAST_REFRESH_S: u32 = 600;

/// Message types (RFC 8415, section 7.3).
mod kind {
    pub(super) const SOLICIT: u8 = 1;
    pub(super) const ADVERTISE: u8 = 2;
    pub(super) const REQUEST: u8 = 3;
    pub(super) const CONFIRM: u8 = 4;
    pub(super) const RENEW: u8 = 5;
    pub(super) const REBIND: u8 = 6;
    pub(super) const REPLY: u8 = 7;
    pub(super) const RELEASE: u8 = 8;
    pub(super) const DECLINE: u8 = 9;
    pub(super) const RECONFIGURE: u8 = 10;
    pub(super) const INFORMATION_REQUEST: u8 = 11;
    pub(super) const RELAY_REPLY: u8 = 13;
}

/// Options (RFC 8415, section 21; RFC 3646).
mod option {
    pub(super) const CLIENT: u16 = 1;
    pub(super) const SERVER: u16 = 2;
    /// Non-temporary addresses, temporary addresses, delegated prefixes: an identity association each.
    pub(super) const IA_NA: u16 = 3;
    pub(super) const IA_TA: u16 = 4;
    pub(super) const IA_PD: u16 = 25;
    pub(super) const ADDRESS: u16 = 5;
    pub(super) const REQUEST_LIST: u16 = 6;
    pub(super) const PREFERENCE: u16 = 7;
    pub(super) const STATUS: u16 = 13;
    pub(super) const RAPID_COMMIT: u16 = 14;
    pub(super) const DNS: u16 = 23;
    pub(super) const SEARCH: u16 = 24;
    pub(super) const REFRESH_TIME: u16 = 32;
}

/// Status codes of a message or of an association (RFC 8415, section 21.13).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
enum Status {
    Success = 0,
    NoAddresses = 2,
    NoBinding = 3,
    NotOnLink = 4,
    UseMulticast = 5,
    NoPrefixes = 6,
}

/// The server's DUID, based on a link-layer address (DUID-LL; RFC 8415, section 11.4).
fn server() -> [u8; 10] {
    let [a, b, c, d, e, f] = GATEWAY_MAC.0;
    [0, 3, 0, 1, a, b, c, d, e, f]
}

/// The options of a message that are used.
#[derive(Debug, Default)]
struct Request<'a> {
    client: Option<&'a [u8]>,
    server: Option<&'a [u8]>,
    associations: Vec<Association>,
    wants_rapid_commit: bool,
    wants_dns: bool,
    wants_search: bool,
    wants_refresh_time: bool,
}

/// An identity association: a client's set of addresses or prefixes.
#[derive(Debug)]
struct Association {
    kind: u16,
    id: [u8; 4],
    /// Addresses that the client names.
    named: Vec<Ipv6Addr>,
}

/// Answers a guest. `message`: the UDP payload that the guest sent to a server; `to_group`: whether it was sent to
/// the multicast group of all servers, and not to the gateway's address. Returns the payload of the reply.
///
/// # Errors
/// [`DropReason::DhcpMalformed`]: it is not a valid client message; [`DropReason::DhcpUnanswered`]: servers do not
/// answer such messages, or it is for another server.
pub(crate) fn answer(lease: &Ipv6Lease, message: &[u8], to_group: bool) -> Result<Vec<u8>, DropReason> {
    use kind::{CONFIRM, DECLINE, INFORMATION_REQUEST, REBIND, RELEASE, RENEW, REQUEST, SOLICIT};
    let (&[kind, a, b, c], options) = message.split_first_chunk::<4>().ok_or(DropReason::DhcpMalformed)?;
    match kind {
        kind::ADVERTISE | kind::REPLY | kind::RECONFIGURE | kind::RELAY_REPLY => return Err(DropReason::DhcpMalformed),
        SOLICIT..=INFORMATION_REQUEST => {}
        // A relay's message, or an unknown one.
        _ => return Err(DropReason::DhcpUnanswered),
    }
    let request = Request::parse(options)?;
    // Options that a message must or must not contain (RFC 8415, section 16).
    let is_anonymous = request.client.is_none() && kind != INFORMATION_REQUEST;
    let asks_one = matches!(kind, REQUEST | RENEW | RELEASE | DECLINE);
    let asks_all = matches!(kind, SOLICIT | CONFIRM | REBIND);
    let has_more = kind == INFORMATION_REQUEST && !request.associations.is_empty();
    if is_anonymous || (asks_one && request.server.is_none()) || (asks_all && request.server.is_some()) || has_more {
        return Err(DropReason::DhcpMalformed);
    }
    if request.server.is_some_and(|other| other != server()) {
        return Err(DropReason::DhcpUnanswered);
    }
    let is_committed = kind == SOLICIT && request.wants_rapid_commit;
    let reply = if kind == SOLICIT && !is_committed { kind::ADVERTISE } else { kind::REPLY };
    let mut out = vec![reply, a, b, c];
    put(&mut out, option::SERVER, |out| out.extend(server()));
    if let Some(client) = request.client {
        put(&mut out, option::CLIENT, |out| out.extend(client));
    }
    if !to_group {
        // RFC 8415, section 18.4: these clients are told to use multicast; other messages are not answered.
        return if asks_one { Ok(with_status(out, Status::UseMulticast)) } else { Err(DropReason::DhcpUnanswered) };
    }
    match kind {
        CONFIRM => {
            let mut named = request.associations.iter().flat_map(|of| of.named.iter().copied()).peekable();
            named.peek().ok_or(DropReason::DhcpUnanswered)?;
            let all = named.all(|address| lease.addresses().any(|own| own == address));
            return Ok(with_status(out, if all { Status::Success } else { Status::NotOnLink }));
        }
        RELEASE | DECLINE => {
            out = with_status(out, Status::Success);
            let chosen = request.chosen(lease);
            for (_, of) in request.associations.iter().enumerate().filter(|(at, _)| Some(*at) != chosen) {
                of.refuse(&mut out, Status::NoBinding);
            }
            return Ok(out);
        }
        INFORMATION_REQUEST if request.wants_refresh_time => {
            put(&mut out, option::REFRESH_TIME, |out| out.extend(lease.seconds.max(LEAST_REFRESH_S).to_be_bytes()));
        }
        SOLICIT if is_committed => put(&mut out, option::RAPID_COMMIT, |_| {}),
        // There is no better server, so the client need not wait for another one.
        SOLICIT => put(&mut out, option::PREFERENCE, |out| out.push(255)),
        _ => {}
    }
    let chosen = request.chosen(lease);
    let is_known = matches!(kind, RENEW | REBIND);
    for (at, of) in request.associations.iter().enumerate() {
        match of.kind {
            option::IA_NA if Some(at) == chosen => of.give(&mut out, lease, kind),
            _ if is_known => of.refuse(&mut out, Status::NoBinding),
            option::IA_PD => of.refuse(&mut out, Status::NoPrefixes),
            _ => of.refuse(&mut out, Status::NoAddresses),
        }
    }
    if request.wants_dns && !lease.dns.is_empty() {
        let servers = lease.dns.iter().take(Lease::MAX_DNS).flat_map(|server| server.octets());
        put(&mut out, option::DNS, |out| out.extend(servers));
    }
    if let Some(domain) = lease.domain.as_deref().filter(|_| request.wants_search).and_then(dns::wire) {
        put(&mut out, option::SEARCH, |out| out.extend(domain));
    }
    Ok(out)
}

impl<'a> Request<'a> {
    fn parse(options: &'a [u8]) -> Result<Self, DropReason> {
        let mut request = Request::default();
        for option in Options(options) {
            let (kind, data) = option?;
            match kind {
                option::CLIENT if request.client.is_none() && DUID_LENGTHS.contains(&data.len()) => {
                    request.client = Some(data);
                }
                option::SERVER if request.server.is_none() => request.server = Some(data),
                option::CLIENT | option::SERVER => return Err(DropReason::DhcpMalformed),
                option::IA_NA | option::IA_TA | option::IA_PD => {
                    if request.associations.len() == MOST_ASSOCIATIONS {
                        return Err(DropReason::DhcpMalformed);
                    }
                    request.associations.push(Association::parse(kind, data)?);
                }
                option::REQUEST_LIST => {
                    let (wanted, []) = data.as_chunks::<2>() else { return Err(DropReason::DhcpMalformed) };
                    let wants = |kind: u16| wanted.contains(&kind.to_be_bytes());
                    request.wants_dns |= wants(option::DNS);
                    request.wants_search |= wants(option::SEARCH);
                    request.wants_refresh_time |= wants(option::REFRESH_TIME);
                }
                option::RAPID_COMMIT => request.wants_rapid_commit = true,
                _ => {}
            }
        }
        Ok(request)
    }

    /// The association that gets the guest's addresses: the first one that names any of them, or else the first one.
    fn chosen(&self, lease: &Ipv6Lease) -> Option<usize> {
        let has_own = |of: &Association| of.named.iter().any(|named| lease.addresses().any(|own| own == *named));
        let mut all = self.associations.iter().enumerate().filter(|(_, of)| of.kind == option::IA_NA);
        all.clone().find(|(_, of)| has_own(of)).or_else(|| all.next()).map(|(at, _)| at)
    }
}

impl Association {
    fn parse(kind: u16, data: &[u8]) -> Result<Self, DropReason> {
        let (&id, mut rest) = data.split_first_chunk::<4>().ok_or(DropReason::DhcpMalformed)?;
        if kind != option::IA_TA {
            // Skip the client's preferred T1 and T2.
            rest = rest.get(8..).ok_or(DropReason::DhcpMalformed)?;
        }
        let mut named = Vec::new();
        for option in Options(rest) {
            let (inner, data) = option?;
            if inner == option::ADDRESS {
                let (address, lifetimes) = data.split_first_chunk::<16>().ok_or(DropReason::DhcpMalformed)?;
                if lifetimes.len() < 8 || named.len() == MOST_NAMED {
                    return Err(DropReason::DhcpMalformed);
                }
                named.push(Ipv6Addr::from_octets(*address));
            }
        }
        Ok(Association { kind, id, named })
    }

    /// Grants the guest's addresses. Addresses that the client names but may not have get lifetime 0 (RFC 8415,
    /// sections 18.3.2, 18.3.4 and 18.3.5).
    fn give(&self, out: &mut Vec<u8>, lease: &Ipv6Lease, kind: u8) {
        if kind == kind::REQUEST && !self.named.iter().all(|named| lease.is_on_link(*named)) {
            return self.refuse(out, Status::NotOnLink);
        }
        if lease.addresses.is_empty() {
            return self.refuse(out, Status::NoAddresses);
        }
        put(out, self.kind, |out| {
            out.extend(self.id);
            for part in [lease.seconds / 2, lease.seconds / 5 * 4] {
                out.extend(part.to_be_bytes());
            }
            let address = |out: &mut Vec<u8>, address: Ipv6Addr, seconds: u32| {
                put(out, option::ADDRESS, |out| {
                    out.extend(address.octets());
                    out.extend([seconds; 2].map(u32::to_be_bytes).as_flattened());
                });
            };
            lease.addresses().for_each(|own| address(out, own, lease.seconds));
            if matches!(kind, kind::RENEW | kind::REBIND) {
                let foreign = |named: &Ipv6Addr| !lease.addresses().any(|own| own == *named);
                self.named.iter().copied().filter(foreign).for_each(|named| address(out, named, 0));
            }
        });
    }

    fn refuse(&self, out: &mut Vec<u8>, status: Status) {
        put(out, self.kind, |out| {
            out.extend(self.id);
            if self.kind != option::IA_TA {
                out.extend([0; 8]);
            }
            put(out, option::STATUS, |out| out.extend((status as u16).to_be_bytes()));
        });
    }
}

fn with_status(mut out: Vec<u8>, status: Status) -> Vec<u8> {
    put(&mut out, option::STATUS, |out| out.extend((status as u16).to_be_bytes()));
    out
}

/// Appends an option of this kind; `write` appends its data.
fn put(out: &mut Vec<u8>, kind: u16, write: impl FnOnce(&mut Vec<u8>)) {
    out.extend(kind.to_be_bytes());
    let at = out.len();
    out.extend([0, 0]);
    write(out);
    let len = (out.len() - at - 2) as u16;
    out[at..at + 2].copy_from_slice(&len.to_be_bytes());
}

/// Iterates over options; ends after an error.
struct Options<'a>(&'a [u8]);

impl<'a> Iterator for Options<'a> {
    type Item = Result<(u16, &'a [u8]), DropReason>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let all = std::mem::take(&mut self.0);
        let found = all.split_first_chunk::<4>().and_then(|(&[a, b, c, d], rest)| {
            let (data, behind) = rest.split_at_checked(usize::from(u16::from_be_bytes([c, d])))?;
            self.0 = behind;
            Some((u16::from_be_bytes([a, b]), data))
        });
        Some(found.ok_or(DropReason::DhcpMalformed))
    }
}

#[cfg(test)]
mod tests;
