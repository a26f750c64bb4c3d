//! DHCP for the guests of this host (RFC 2131): a guest gets only the address of its port.
//!
//! The configuration determines what each guest gets, so there is no state, and all hosts and workers answer alike. A
//! guest that moves to another host keeps its lease. Messages are parsed and built with smoltcp.

use std::net::Ipv4Addr;

use bifrost_wire::Mac;
use smoltcp::wire::{
    ArpHardware, DhcpFlags, DhcpMessageType, DhcpOpCode, DhcpOption, DhcpPacket, DhcpRepr, EthernetAddress,
};

use crate::drop_reason::DropReason;
use crate::tables::Lease;

/// UDP port of servers (RFC 2131, section 4.1). The switch must be given the complete packet to this port.
pub const SERVER_PORT: u16 = 67;
/// UDP port of clients.
pub(crate) const CLIENT_PORT: u16 = 68;
/// Magic cookie that distinguishes DHCP from other BOOTP messages (RFC 2131, section 3).
const MAGIC: u32 = 0x6382_5363;
/// Minimum and maximum payload that every client accepts, bytes (RFC 1542, section 2.1; RFC 2131, section 2).
const LEAST_LEN: usize = 300;
const MOST_LEN: usize = 548;

/// Options (RFC 2132; RFC 3442).
mod option {
    pub(super) const SUBNET_MASK: u8 = 1;
    pub(super) const ROUTER: u8 = 3;
    pub(super) const DNS: u8 = 6;
    pub(super) const DOMAIN: u8 = 15;
    pub(super) const MTU: u8 = 26;
    pub(super) const REQUESTED_ADDRESS: u8 = 50;
    pub(super) const LEASE_TIME: u8 = 51;
    pub(super) const MESSAGE_TYPE: u8 = 53;
    pub(super) const SERVER: u8 = 54;
    pub(super) const REQUEST_LIST: u8 = 55;
    pub(super) const CLIENT: u8 = 61;
    pub(super) const CLASSLESS_ROUTES: u8 = 121;
}

/// A server's reply.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    /// The UDP payload.
    pub(crate) payload: Vec<u8>,
    /// Its destination address: the client's, or broadcast.
    pub(crate) to: Ipv4Addr,
}

/// The options of a request that are used.
#[derive(Debug, Default)]
struct Request<'a> {
    kind: Option<DhcpMessageType>,
    requested: Option<Ipv4Addr>,
    server: Option<Ipv4Addr>,
    client: Option<&'a [u8]>,
    wants_routes: bool,
}

/// Answers the guest with the MAC address `mac`. `message`: the UDP payload that the guest sent to a server.
///
/// # Errors
/// [`DropReason::DhcpMalformed`]: it is not a valid client message; [`DropReason::DhcpSpoofed`]: it is on behalf of
/// another node; [`DropReason::DhcpUnanswered`]: servers do not answer such messages, or it is for another server.
pub(crate) fn answer(lease: &Lease, mac: Mac, message: &[u8]) -> Result<Reply, DropReason> {
    let packet = DhcpPacket::new_checked(message).map_err(|_| DropReason::DhcpMalformed)?;
    let is_request = packet.opcode() == DhcpOpCode::Request
        && packet.hardware_type() == ArpHardware::Ethernet
        && packet.hardware_len() == 6
        && packet.magic_number() == MAGIC;
    let request = Request::of(&packet);
    let kind = request.kind.filter(|_| is_request).ok_or(DropReason::DhcpMalformed)?;
    if packet.client_hardware_address() != EthernetAddress(mac.0) {
        return Err(DropReason::DhcpSpoofed);
    }
    let current = Some(packet.client_ip()).filter(|address| !address.is_unspecified());
    let is_relayed = !packet.relay_agent_ip().is_unspecified();
    let is_for_another = request.server.is_some_and(|server| server != lease.gateway);
    if is_relayed || is_for_another {
        return Err(DropReason::DhcpUnanswered);
    }
    let reply = match kind {
        DhcpMessageType::Discover => DhcpMessageType::Offer,
        DhcpMessageType::Request => {
            let wanted = request.requested.or(current).ok_or(DropReason::DhcpMalformed)?;
            if wanted == lease.address { DhcpMessageType::Ack } else { DhcpMessageType::Nak }
        }
        DhcpMessageType::Inform if current == Some(lease.address) => DhcpMessageType::Ack,
        _ => return Err(DropReason::DhcpUnanswered),
    };
    let is_inform = kind == DhcpMessageType::Inform;
    let is_refused = reply == DhcpMessageType::Nak;
    let is_broadcast = packet.flags().contains(DhcpFlags::BROADCAST);
    let options = if is_refused { refusal(lease) } else { options(lease, &request, is_inform) };
    let none = Ipv4Addr::UNSPECIFIED;
    let mut repr = DhcpRepr {
        message_type: reply,
        transaction_id: packet.transaction_id(),
        secs: 0,
        client_hardware_address: packet.client_hardware_address(),
        client_ip: if is_refused { none } else { packet.client_ip() },
        your_ip: if is_refused || is_inform { none } else { lease.address },
        server_ip: none,
        router: None,
        subnet_mask: None,
        relay_agent_ip: none,
        broadcast: is_broadcast,
        requested_ip: None,
        client_identifier: None,
        server_identifier: None,
        parameter_request_list: None,
        dns_servers: None,
        max_size: None,
        lease_duration: None,
        renew_duration: None,
        rebind_duration: None,
        additional_options: &[],
    };
    let mut all: Vec<DhcpOption<'_>> = options.iter().map(|(kind, data)| DhcpOption { kind: *kind, data }).collect();
    // Client identifiers in use are much shorter than those that do not fit (RFC 6842).
    let client = request.client.map(|data| DhcpOption { kind: option::CLIENT, data });
    let used = repr.buffer_len() + all.iter().map(|option| 2 + option.data.len()).sum::<usize>();
    all.extend(client.filter(|option| used + 2 + option.data.len() <= MOST_LEN));
    repr.additional_options = &all;
    let mut payload = vec![0; repr.buffer_len().max(LEAST_LEN)];
    // Cannot fail: the buffer has the length that the message says it needs.
    repr.emit(&mut DhcpPacket::new_unchecked(&mut payload[..])).map_err(|_| DropReason::DhcpUnanswered)?;
    let to = match current {
        _ if is_refused => Ipv4Addr::BROADCAST,
        Some(current) => current,
        None if is_broadcast => Ipv4Addr::BROADCAST,
        None => lease.address,
    };
    Ok(Reply { payload, to })
}

impl<'a> Request<'a> {
    fn of(packet: &'a DhcpPacket<&'a [u8]>) -> Self {
        let address = |data: &[u8]| data.first_chunk::<4>().map(|octets| Ipv4Addr::from(*octets));
        let mut request = Request::default();
        for DhcpOption { kind, data } in packet.options() {
            match kind {
                option::MESSAGE_TYPE => request.kind = data.first().map(|&kind| kind.into()),
                option::REQUESTED_ADDRESS => request.requested = address(data),
                option::SERVER => request.server = address(data),
                option::CLIENT => request.client = Some(data),
                option::REQUEST_LIST => request.wants_routes |= data.contains(&option::CLASSLESS_ROUTES),
                _ => {}
            }
        }
        request
    }
}

fn refusal(lease: &Lease) -> Vec<(u8, Vec<u8>)> {
    vec![(option::SERVER, lease.gateway.octets().to_vec())]
}

/// The options of an OFFER or ACK. The mask comes before the router (RFC 2132, section 3.3).
fn options(lease: &Lease, request: &Request<'_>, is_inform: bool) -> Vec<(u8, Vec<u8>)> {
    let gateway = lease.gateway.octets();
    let mut all = refusal(lease);
    if !is_inform {
        all.push((option::LEASE_TIME, lease.seconds.to_be_bytes().to_vec()));
    }
    all.push((option::SUBNET_MASK, lease.mask().octets().to_vec()));
    all.push((option::ROUTER, gateway.to_vec()));
    if !lease.dns.is_empty() {
        all.push((option::DNS, lease.dns.iter().take(Lease::MAX_DNS).flat_map(|server| server.octets()).collect()));
    }
    if let Some(domain) = lease.domain.as_ref().filter(|domain| domain.len() <= usize::from(u8::MAX)) {
        all.push((option::DOMAIN, domain.as_bytes().to_vec()));
    }
    all.push((option::MTU, lease.mtu.to_be_bytes().to_vec()));
    if request.wants_routes {
        let mut routes = Vec::new();
        if !lease.is_on_link(lease.gateway) {
            // The gateway itself is on the link; everything else is behind it.
            routes.push(32);
            routes.extend(gateway);
            routes.extend(Ipv4Addr::UNSPECIFIED.octets());
        }
        routes.push(0);
        routes.extend(gateway);
        all.push((option::CLASSLESS_ROUTES, routes));
    }
    all
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ids::PortId;

    const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);
    const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
    const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 254);

    fn lease() -> Lease {
        let dns = vec![Ipv4Addr::new(10, 0, 0, 53), Ipv4Addr::new(10, 0, 1, 53)];
        Lease {
            port: PortId(0),
            address: ADDRESS,
            prefix_len: 24,
            gateway: GATEWAY,
            dns,
            domain: Some("vpc.internal".into()),
            mtu: 1400,
            seconds: 3600,
        }
    }

    /// A client's message; `options` follow the message type.
    fn message(kind: u8, current: Ipv4Addr, options: &[(u8, &[u8])]) -> Vec<u8> {
        let mut message = vec![0; 240];
        message[..3].copy_from_slice(&[1, 1, 6]);
        message[4..8].copy_from_slice(&[1, 2, 3, 4]);
        message[12..16].copy_from_slice(&current.octets());
        message[28..34].copy_from_slice(&MAC.0);
        message[236..240].copy_from_slice(&MAGIC.to_be_bytes());
        message.extend([53, 1, kind]);
        for (kind, data) in options {
            message.extend([*kind, data.len() as u8]);
            message.extend_from_slice(data);
        }
        message.push(255);
        message
    }

    /// Message type, address, other options, and destination.
    fn read(reply: &Reply) -> (u8, Ipv4Addr, Vec<(u8, Vec<u8>)>, Ipv4Addr) {
        let packet = DhcpPacket::new_checked(&reply.payload[..]).unwrap();
        assert_eq!((packet.opcode(), packet.transaction_id()), (DhcpOpCode::Reply, 0x0102_0304));
        assert!((LEAST_LEN..=MOST_LEN).contains(&reply.payload.len()));
        let mut options: Vec<(u8, Vec<u8>)> = packet.options().map(|o| (o.kind, o.data.to_vec())).collect();
        let kind = options.remove(0).1[0];
        (kind, packet.your_ip(), options, reply.to)
    }

    const NOBODY: Ipv4Addr = Ipv4Addr::UNSPECIFIED;
    const OFFER: u8 = 2;
    const ACK: u8 = 5;
    const NAK: u8 = 6;

    #[test]
    fn a_guest_gets_the_address_of_its_port() {
        let reply = answer(&lease(), MAC, &message(1, NOBODY, &[(61, &[1, 9, 9]), (55, &[1, 3, 121])])).unwrap();
        let (kind, address, options, to) = read(&reply);
        assert_eq!((kind, address, to), (OFFER, ADDRESS, ADDRESS));
        let expected: &[(u8, &[u8])] = &[
            (54, &[10, 0, 0, 254]),
            (51, &[0, 0, 0x0e, 0x10]),
            (1, &[255, 255, 255, 0]),
            (3, &[10, 0, 0, 254]),
            (6, &[10, 0, 0, 53, 10, 0, 1, 53]),
            (15, b"vpc.internal"),
            (26, &[0x05, 0x78]),
            (121, &[0, 10, 0, 0, 254]),
            (61, &[1, 9, 9]),
        ];
        assert_eq!(options, expected.iter().map(|(kind, data)| (*kind, data.to_vec())).collect::<Vec<_>>());
        // Accept the offer; renew a lease; ask for other settings with an existing address (INFORM).
        let taken = message(3, NOBODY, &[(50, &ADDRESS.octets()), (54, &GATEWAY.octets())]);
        let (kind, address, _, to) = read(&answer(&lease(), MAC, &taken).unwrap());
        assert_eq!((kind, address, to), (ACK, ADDRESS, ADDRESS));
        let (kind, address, _, to) = read(&answer(&lease(), MAC, &message(3, ADDRESS, &[])).unwrap());
        assert_eq!((kind, address, to), (ACK, ADDRESS, ADDRESS));
        let (kind, address, options, to) = read(&answer(&lease(), MAC, &message(8, ADDRESS, &[])).unwrap());
        assert_eq!((kind, address, to), (ACK, NOBODY, ADDRESS));
        assert!(options.iter().all(|(kind, _)| *kind != 51), "no lease for what is configured");
    }

    #[test]
    fn a_gateway_outside_the_subnet_is_on_link() {
        let lease = Lease { prefix_len: 32, ..lease() };
        let (_, _, options, _) = read(&answer(&lease, MAC, &message(1, NOBODY, &[(55, &[121])])).unwrap());
        let routes = options.into_iter().find(|(kind, _)| *kind == 121).unwrap().1;
        assert_eq!(routes, [32, 10, 0, 0, 254, 0, 0, 0, 0, 0, 10, 0, 0, 254]);
    }

    #[test]
    fn clients_that_cannot_receive_unicast_get_a_broadcast() {
        let mut asked = message(1, NOBODY, &[]);
        asked[10] = 0x80;
        assert_eq!(read(&answer(&lease(), MAC, &asked).unwrap()).3, Ipv4Addr::BROADCAST);
        // An address of another network.
        let (kind, address, options, to) =
            read(&answer(&lease(), MAC, &message(3, NOBODY, &[(50, &[10, 9, 9, 9])])).unwrap());
        assert_eq!((kind, address, to), (NAK, NOBODY, Ipv4Addr::BROADCAST));
        assert_eq!(options, [(54, GATEWAY.octets().to_vec())]);
    }

    #[test]
    fn what_is_not_answered_has_a_reason() {
        let with = |change: fn(&mut Vec<u8>)| {
            let mut asked = message(1, NOBODY, &[]);
            change(&mut asked);
            asked
        };
        use DropReason::{DhcpMalformed, DhcpSpoofed, DhcpUnanswered};
        for (name, asked, reason) in [
            ("nothing", vec![], DhcpMalformed),
            ("cut short", with(|m| m.truncate(239)), DhcpMalformed),
            ("no options", with(|m| m.truncate(240)), DhcpMalformed),
            ("half an option", with(|m| m.truncate(242)), DhcpMalformed),
            ("a server's", with(|m| m[0] = 2), DhcpMalformed),
            ("not Ethernet", with(|m| m[1] = 6), DhcpMalformed),
            ("BOOTP", with(|m| m[236] = 0), DhcpMalformed),
            ("no address", message(3, NOBODY, &[]), DhcpMalformed),
            ("of somebody else", with(|m| m[33] = 7), DhcpSpoofed),
            ("relayed", with(|m| m[24] = 10), DhcpUnanswered),
            ("to another server", message(3, NOBODY, &[(50, &[10, 0, 0, 1]), (54, &[10, 0, 0, 9])]), DhcpUnanswered),
            ("declined", message(4, NOBODY, &[(50, &[10, 0, 0, 1])]), DhcpUnanswered),
            ("released", message(7, ADDRESS, &[]), DhcpUnanswered),
            ("of another address", message(8, Ipv4Addr::new(10, 0, 0, 9), &[]), DhcpUnanswered),
            ("unheard of", message(99, NOBODY, &[]), DhcpUnanswered),
        ] {
            assert_eq!(answer(&lease(), MAC, &asked), Err(reason), "{name}");
        }
    }

    #[test]
    fn an_identifier_that_does_not_fit_is_left_out() {
        let lease = Lease { dns: vec![GATEWAY; Lease::MAX_DNS], ..lease() };
        for (len, is_there) in [(200, true), (255, false)] {
            let reply = answer(&lease, MAC, &message(1, NOBODY, &[(61, &vec![7; len]), (55, &[121])])).unwrap();
            assert_eq!(read(&reply).2.iter().any(|(kind, _)| *kind == 61), is_there, "{len}");
        }
    }

    proptest! {
        /// For any message: no panic, and no address but the guest's own.
        #[test]
        fn nobody_gets_another_address(
            kind in any::<u8>(),
            current in any::<[u8; 4]>(),
            options in proptest::collection::vec((any::<u8>(), proptest::collection::vec(any::<u8>(), 0..20)), 0..8),
            cut in 200usize..400,
            at in any::<(usize, u8)>(),
        ) {
            let options: Vec<(u8, &[u8])> = options.iter().map(|(kind, data)| (*kind, &data[..])).collect();
            let mut asked = message(kind % 10, current.into(), &options);
            let len = asked.len();
            asked[at.0 % len] ^= at.1;
            asked.truncate(cut);
            if let Ok(reply) = answer(&lease(), MAC, &asked) {
                let packet = DhcpPacket::new_checked(&reply.payload[..]).unwrap();
                prop_assert!([NOBODY, ADDRESS].contains(&packet.your_ip()));
                prop_assert!(packet.client_hardware_address() == EthernetAddress(MAC.0));
                prop_assert!(reply.payload.len() <= MOST_LEN);
            }
        }
    }
}
