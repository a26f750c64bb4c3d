//! DNS for the guests of this host: the gateway resolves names of a network's guests.
//!
//! The configuration contains all names, so there is no state, and no query leaves the host. Queries in the domain
//! get authoritative answers; all others are refused, because there is no server to ask. Responses follow RFC 1035
//! and RFC 2308, with EDNS (RFC 6891).

mod message;

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bifrost_tables::IpNet;

use self::message::{Code, LEAST_LIMIT, LONGEST_LABEL, LONGEST_NAME, MOST_LIMIT, Query, Record, Unreadable, kind};
use crate::drop_reason::DropReason;
use crate::tables::Zone;

/// UDP port of name servers. The switch must be given the complete packet to this port.
pub const SERVER_PORT: u16 = 53;

/// The names of a network, in wire format.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    domain: Vec<u8>,
    /// By full name, including the domain. Names without addresses are ancestors of other names.
    addresses: HashMap<Vec<u8>, Vec<IpAddr>>,
    names: HashMap<IpAddr, Vec<u8>>,
    subnets: Vec<IpNet>,
}

impl Names {
    /// Builds the table. Invalid names are skipped.
    pub(crate) fn new(zone: &Zone) -> Self {
        let domain = wire(&zone.domain).unwrap_or_else(|| vec![0]);
        let mut names = Names {
            addresses: HashMap::from([(domain.clone(), Vec::new())]),
            domain,
            names: HashMap::new(),
            subnets: zone.subnets.clone(),
        };
        for (name, address) in &zone.names {
            let Some(name) = wire(&format!("{name}.{}", zone.domain)) else { continue };
            // The name "a.b" in a domain implies that "b" exists.
            let mut part = &name[..];
            while part.len() > names.domain.len() {
                let of = names.addresses.entry(part.to_vec()).or_default();
                if part.len() == name.len() && !of.contains(address) {
                    of.push(*address);
                }
                part = &part[1 + usize::from(part[0])..];
            }
            names.names.entry(*address).or_insert(name);
        }
        names
    }

    /// Whether a name is the domain or inside it.
    fn is_inside(&self, name: &[u8]) -> bool {
        let mut part = name;
        while part.len() > self.domain.len() {
            part = &part[1 + usize::from(part[0])..];
        }
        part == self.domain
    }

    fn records(&self, query: &Query<'_>) -> (Code, Vec<Record<'_>>) {
        let wanted = |record: &Record<'_>| query.kind == kind::ANY || query.kind == record.kind();
        if self.is_inside(&query.name) {
            let Some(of) = self.addresses.get(&query.name) else { return (Code::NoSuchName, Vec::new()) };
            return (Code::NoError, of.iter().map(|address| Record::Address(*address)).filter(wanted).collect());
        }
        let Some(address) = reverse(&query.name) else { return (Code::Refused, Vec::new()) };
        match self.names.get(&address) {
            Some(name) => (Code::NoError, [Record::Pointer(name)].into_iter().filter(wanted).collect()),
            None if self.subnets.iter().any(|net| net.contains(&address)) => (Code::NoSuchName, Vec::new()),
            None => (Code::Refused, Vec::new()),
        }
    }
}

/// Answers a guest's query. `message`: the UDP payload that the guest sent to its gateway; `limit`: maximum size of
/// the response, bytes (at least 512 are always allowed).
///
/// # Errors
/// [`DropReason::DnsMalformed`]: it is not a query.
pub(crate) fn answer(names: &Names, message: &[u8], limit: usize) -> Result<Vec<u8>, DropReason> {
    let limit = limit.clamp(LEAST_LIMIT, MOST_LIMIT);
    let query = match Query::parse(message) {
        Ok(query) => query,
        Err(Unreadable::NoQuestion) => return Err(DropReason::DnsMalformed),
        Err(Unreadable::Told(begin, code)) => return Ok(message::error(begin, code)),
    };
    if !query.is_known_version() {
        return Ok(query.answer(Code::BadVersion, &[], None, limit));
    }
    if !query.is_internet {
        return Ok(query.answer(Code::Refused, &[], None, limit));
    }
    let (code, records) = names.records(&query);
    let zone = names.is_inside(&query.name).then_some(names.domain.len());
    Ok(query.answer(code, &records, zone, limit))
}

/// A name in wire format, in lower case; `None`: it is too long, or has an empty label.
pub(crate) fn wire(name: &str) -> Option<Vec<u8>> {
    let mut wire = Vec::with_capacity(name.len() + 2);
    for label in name.split('.') {
        let len = u8::try_from(label.len()).ok().filter(|len| (1..=LONGEST_LABEL).contains(&usize::from(*len)))?;
        wire.push(len);
        wire.extend(label.bytes().map(|byte| byte.to_ascii_lowercase()));
    }
    wire.push(0);
    (wire.len() <= LONGEST_NAME).then_some(wire)
}

/// The address in the name of a reverse query (RFC 1035, section 3.5; RFC 3596, section 2.5).
fn reverse(name: &[u8]) -> Option<IpAddr> {
    const V4: &[u8] = b"\x07in-addr\x04arpa\x00";
    const V6: &[u8] = b"\x03ip6\x04arpa\x00";
    if let Some(mut rest) = name.strip_suffix(V4) {
        let mut octets = [0; 4];
        for octet in octets.iter_mut().rev() {
            let (len, after) = rest.split_first()?;
            let (label, after) = after.split_at_checked(usize::from(*len))?;
            // Accept only the canonical spelling of each number.
            let text = std::str::from_utf8(label).ok().filter(|text| *text == "0" || !text.starts_with(['0', '+']))?;
            (*octet, rest) = (text.parse().ok()?, after);
        }
        return rest.is_empty().then_some(IpAddr::V4(Ipv4Addr::from(octets)));
    }
    let rest = name.strip_suffix(V6).filter(|rest| rest.len() == 64)?;
    let mut bits = 0u128;
    for label in rest.chunks(2).rev() {
        let digit = char::from(label[1]).to_digit(16).filter(|_| label[0] == 1)?;
        bits = bits << 4 | u128::from(digit);
    }
    Some(IpAddr::V6(Ipv6Addr::from_bits(bits)))
}

#[cfg(test)]
mod tests;
