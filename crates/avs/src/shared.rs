//! What vNICs say about addresses that they share, and how one host says it to others.

use std::net::IpAddr;

use bifrost_nic::L3;
use bifrost_wire::ethernet::ethertype;
use bifrost_wire::icmp::v6::Advertisement;
use bifrost_wire::protocol::ICMPV6;
use bifrost_wire::{Mac, Vni, arp};

use crate::answer::{ALL_NODES, ALL_NODES_MAC, start, start_v6};
use crate::frame::Frame;
use crate::resolution::{self, Message};

/// Claims that are kept until they are taken, at most. The tables bound them, too.
const MOST: usize = 4096;

/// What a vNIC says about an address that it shares with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The network.
    pub vni: Vni,
    /// The address.
    pub address: IpAddr,
    /// The vNIC, which is one of those that share the address.
    pub mac: Mac,
    /// What it says.
    pub statement: Statement,
    /// When, in ns of the switch's time.
    pub at_ns: u64,
}

/// What is said about a shared address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Statement {
    /// The vNIC has it. This counts only while no other holder is known.
    Has,
    /// The vNIC has it from now on.
    Takes,
}

/// Claims that have not been taken yet.
#[derive(Debug, Default)]
pub(crate) struct Claims(Vec<Claim>);

impl Claims {
    /// Keeps a claim, in place of an earlier one of the same vNIC about the same address.
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

/// The address that the vNIC `mac` says it has without being asked, by ARP or neighbor discovery, and how.
///
/// A request is how addresses are usually taken (RFC 5227, section 3), and an advertisement that overrides (RFC 4861,
/// section 7.2.6). Hosts that run this switch repeat who has an address by a reply, and by one that does not.
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

/// The frame that tells another host's switch which vNIC has a shared address: as
/// [`Switch::from_underlay`](crate::Switch::from_underlay) understands it, and devices that know only ARP and neighbor
/// discovery.
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
