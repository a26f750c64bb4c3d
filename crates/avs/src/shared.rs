//! Announcements of shared addresses: those of vNICs, and those that one host sends to others.

use std::net::IpAddr;

use bifrost_nic::L3;
use bifrost_wire::ethernet::ethertype;
use bifrost_wire::icmp::v6::Advertisement;
use bifrost_wire::protocol::ICMPV6;
use bifrost_wire::{Mac, Vni, arp};

use crate::answer::{ALL_NODES, ALL_NODES_MAC, start, start_v6};
use crate::frame::Frame;
use crate::resolution::{self, Message};

/// Maximum number of claims that wait to be taken. The tables also bound them.
const MOST: usize = 4096;

/// A vNIC's claim to an address that it shares with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The network.
    pub vni: Vni,
    /// The address.
    pub address: IpAddr,
    /// The vNIC; it is one of those that share the address.
    pub mac: Mac,
    /// Kind of the claim.
    pub statement: Statement,
    /// When it was made, ns of the switch's time.
    pub at_ns: u64,
}

/// Kind of a claim to a shared address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Statement {
    /// The vNIC uses the address. This counts only while no other holder is known.
    Has,
    /// The vNIC takes the address over.
    Takes,
}

/// Claims that have not been taken yet.
#[derive(Debug, Default)]
pub(crate) struct Claims(Vec<Claim>);

impl Claims {
    /// Stores a claim. It replaces an earlier one of the same vNIC for the same address.
    pub(crate) fn note(&mut self, claim: Claim) {
        let of = |claim: &Claim| (claim.vni, claim.address, claim.mac);
        if let Some(known) = self.0.iter_mut().find(|known| of(known) == of(&claim)) {
            let statement = known.statement.max(claim.statement);
            *known = Claim { statement, ..claim };
        } else if self.0.len() < MOST {
            self.0.push(claim);
        }
    }

    pub(crate) fn take(&mut self, out: &mut Vec<Claim>) {
        out.append(&mut self.0);
    }
}

/// The address that the vNIC `mac` announces by unsolicited ARP or neighbor discovery, and the kind of claim.
///
/// An ARP request (RFC 5227, section 3) or an advertisement with the override flag (RFC 4861, section 7.2.6) takes an
/// address. Hosts with this switch repeat who holds an address by an ARP reply, or by an advertisement without the
/// flag.
pub(crate) fn announced(frame: Frame<'_>, mac: Mac) -> Option<(IpAddr, Statement)> {
    let statement = |takes| if takes { Statement::Takes } else { Statement::Has };
    if frame.parsed.kind == L3::Arp {
        let message = resolution::arp(frame.head, frame.parsed).ok()?;
        let takes = message.operation == arp::Operation::Request;
        let is_right = message.is_gratuitous() && message.sender_mac == mac && !message.sender_ip.is_unspecified();
        return is_right.then_some((IpAddr::V4(message.sender_ip), statement(takes)));
    }
    match resolution::message(frame.head, frame.parsed).ok()?? {
        Message::Advertisement(a)
            if !a.solicited && a.target_mac == Some(mac) && frame.parsed.dst_mac.is_multicast() =>
        {
            Some((IpAddr::V6(a.target), statement(a.overrides)))
        }
        _ => None,
    }
}

/// The frame that announces to another host's switch which vNIC has a shared address.
/// [`Switch::from_underlay`](crate::Switch::from_underlay) understands it, and so do devices that know only ARP and
/// neighbor discovery.
pub fn announcement(mac: Mac, address: IpAddr, statement: Statement) -> Vec<u8> {
    let mut frame = Vec::new();
    let takes = statement == Statement::Takes;
    match address {
        IpAddr::V4(address) => {
            let operation = if takes { arp::Operation::Request } else { arp::Operation::Reply };
            start(&mut frame, Mac::BROADCAST, mac, ethertype::ARP);
            let packet =
                arp::Packet { operation, sender_mac: mac, sender_ip: address, target_mac: mac, target_ip: address };
            frame.extend_from_slice(&packet.emit());
        }
        IpAddr::V6(address) => {
            let message = Advertisement {
                router: false,
                solicited: false,
                overrides: takes,
                target: address,
                target_mac: Some(mac),
            };
            let (body, len) = message.emit(address, ALL_NODES);
            start_v6(&mut frame, (ALL_NODES_MAC, mac), (address, ALL_NODES), ICMPV6, len, 255);
            frame.extend_from_slice(&body[..len]);
        }
    }
    frame
}
