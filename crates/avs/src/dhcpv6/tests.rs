//! Client messages and the server's replies.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;
use crate::ids::PortId;

const OWN: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1);
const SECOND: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 1, 0, 0, 0, 1);
const NEIGHBOUR: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2);
const ELSEWHERE: Ipv6Addr = Ipv6Addr::new(0xfd99, 0, 0, 0, 0, 0, 0, 1);
const DUID: [u8; 10] = [0, 3, 0, 1, 2, 0, 0, 0, 0, 1];
const SERVER: [u8; 10] = [0, 3, 0, 1, 2, 0xbf, 0, 0, 0, 1];
const OTHER_SERVER: [u8; 10] = [0, 3, 0, 1, 2, 0xbf, 0, 0, 0, 2];

fn lease() -> Ipv6Lease {
    let dns = vec![Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0x53)];
    let addresses = vec![(OWN, 64), (SECOND, 128)];
    let domain = Some("vpc.internal".into());
    Ipv6Lease { port: PortId(0), addresses, dns, domain, mtu: 1400, seconds: 3600, interval_s: 600 }
}

fn message(kind: u8, options: &[(u16, Vec<u8>)]) -> Vec<u8> {
    let mut message = vec![kind, 1, 2, 3];
    options.iter().for_each(|(kind, data)| put(&mut message, *kind, |out| out.extend(data)));
    message
}

fn client() -> (u16, Vec<u8>) {
    (option::CLIENT, DUID.to_vec())
}

fn server() -> (u16, Vec<u8>) {
    (option::SERVER, SERVER.to_vec())
}

fn ia(kind: u16, id: u8, named: &[Ipv6Addr]) -> (u16, Vec<u8>) {
    let mut data = vec![0, 0, 0, id];
    data.extend(&[0; 8][..if kind == option::IA_TA { 0 } else { 8 }]);
    for address in named {
        put(&mut data, option::ADDRESS, |out| {
            out.extend(address.octets());
            out.extend([0; 8]);
        });
    }
    (kind, data)
}

fn wants(kinds: &[u16]) -> (u16, Vec<u8>) {
    (option::REQUEST_LIST, kinds.iter().flat_map(|kind| kind.to_be_bytes()).collect())
}

/// An association: kind, identifier, addresses with their lifetimes in s, and status.
type Told = (u16, u8, Vec<(Ipv6Addr, u32)>, Option<u16>);

/// A reply: its associations, and the status of the whole message.
#[derive(Debug, Default, PartialEq, Eq)]
struct Said {
    kind: u8,
    associations: Vec<Told>,
    status: Option<u16>,
    /// Other options, except the two DUIDs.
    more: Vec<(u16, Vec<u8>)>,
}

fn options_of(bytes: &[u8]) -> Vec<(u16, Vec<u8>)> {
    Options(bytes).map(|option| option.map(|(kind, data)| (kind, data.to_vec())).unwrap()).collect()
}

fn read(reply: &[u8]) -> Said {
    assert!(reply.len() <= MOST_LEN);
    assert_eq!(reply[1..4], [1, 2, 3]);
    let mut said = Said { kind: reply[0], ..Said::default() };
    let number = |data: &[u8]| u16::from_be_bytes([data[0], data[1]]);
    for (kind, data) in options_of(&reply[4..]) {
        match kind {
            option::SERVER => assert_eq!(data, SERVER),
            option::CLIENT => assert_eq!(data, DUID),
            option::STATUS => said.status = Some(number(&data)),
            option::IA_NA | option::IA_TA | option::IA_PD => {
                let (mut addresses, mut status) = (vec![], None);
                for (inner, data) in options_of(&data[if kind == option::IA_TA { 4 } else { 12 }..]) {
                    match inner {
                        option::STATUS => status = Some(number(&data)),
                        option::ADDRESS => {
                            let address = Ipv6Addr::from_octets(data[..16].try_into().unwrap());
                            let [preferred, valid] =
                                [16, 20].map(|at| u32::from_be_bytes(data[at..at + 4].try_into().unwrap()));
                            assert_eq!(preferred, valid);
                            addresses.push((address, valid));
                        }
                        _ => panic!("option {inner} in an association"),
                    }
                }
                if addresses.iter().any(|(_, seconds)| *seconds > 0) {
                    assert_eq!(data[4..12], [0, 0, 0x07, 0x08, 0, 0, 0x0b, 0x40], "T1 and T2");
                }
                said.associations.push((kind, data[3], addresses, status));
            }
            _ => said.more.push((kind, data)),
        }
    }
    said
}

fn ask(kind: u8, options: &[(u16, Vec<u8>)]) -> Result<Said, DropReason> {
    answer(&lease(), &message(kind, options), true).map(|reply| read(&reply))
}

fn given() -> Vec<(Ipv6Addr, u32)> {
    vec![(OWN, 3600), (SECOND, 3600)]
}

#[test]
fn a_guest_gets_the_addresses_of_its_port() {
    use option::{DNS, IA_NA, PREFERENCE, RAPID_COMMIT};
    let dns = (DNS, lease().dns[0].octets().to_vec());
    let search = (option::SEARCH, b"\x03vpc\x08internal\0".to_vec());
    // A client's first message requests other options as well (RFC 8415, section 21).
    let solicit = [client(), ia(IA_NA, 7, &[]), (8, vec![0, 0]), wants(&[24, 23, 39])];
    let said = ask(1, &solicit).unwrap();
    let associations = || vec![(IA_NA, 7, given(), None)];
    let more = vec![(PREFERENCE, vec![255]), dns.clone(), search];
    assert_eq!(said, Said { kind: 2, associations: associations(), status: None, more });
    let rapid = [client(), ia(IA_NA, 7, &[]), (RAPID_COMMIT, vec![])];
    let more = vec![(RAPID_COMMIT, vec![])];
    assert_eq!(ask(1, &rapid).unwrap(), Said { kind: 7, associations: associations(), status: None, more });
    // Request the offered addresses; renew them; rebind after the server did not answer.
    let committed = || Said { kind: 7, associations: associations(), status: None, more: vec![] };
    assert_eq!(ask(3, &[client(), server(), ia(IA_NA, 7, &[OWN, SECOND])]).unwrap(), committed());
    assert_eq!(ask(5, &[client(), server(), ia(IA_NA, 7, &[OWN])]).unwrap(), committed());
    assert_eq!(ask(6, &[client(), ia(IA_NA, 7, &[OWN])]).unwrap(), committed());
    // A client without leased addresses requests other settings only.
    let said = ask(11, &[wants(&[23, 32])]).unwrap();
    let more = vec![(option::REFRESH_TIME, 3600u32.to_be_bytes().to_vec()), dns];
    assert_eq!(said, Said { kind: 7, associations: vec![], status: None, more });
    // No options are requested, and none are returned.
    assert_eq!(ask(11, &[client(), server()]).unwrap(), Said { kind: 7, ..Said::default() });
}

/// Messages of ISC dhclient 4.4.3-P1 with `-D LL`, in order, captured on its interface. Its server had this switch's
/// DUID and gave it only the first address.
const DHCLIENT: [(&str, &str); 7] = [
    ("solicit", "014588c50001000a0003000102000000000100060004001700180008000200000003000c0000000100000e1000001518"),
    (
        "request",
        "031cc4480001000a000300010200000000010002000a0003000102bf0000000100060004001700180008000200000003002800000001\
         00000e100000151800050018fd00000000000000000000000000000100001c2000001d4c",
    ),
    (
        "confirm",
        "0457f9800001000a00030001020000000001000600040017001800080002000000030028000000010000000000000000\
         00050018fd0000000000000000000000000000010000000000000000",
    ),
    (
        "renew",
        "05b3e41a0001000a000300010200000000010002000a0003000102bf0000000100060004001700180008000200000003002800000001\
         00000e100000151800050018fd00000000000000000000000000000100001c2000001d4c",
    ),
    (
        "rebind",
        "06fdc6680001000a00030001020000000001000600040017001800080002000000030028000000010000\
         0e100000151800050018fd00000000000000000000000000000100001c2000001d4c",
    ),
    (
        "release",
        "08d4fbe60001000a000300010200000000010002000a0003000102bf0000000100060004001700180008000200000003002800000001\
         000000000000000000050018fd0000000000000000000000000000010000000000000000",
    ),
    ("information request", "0b7b23c60001000a000300010200000000010006000400170018000800020000"),
];

#[test]
fn a_real_client_is_answered() {
    use option::{DNS, IA_NA, PREFERENCE, SEARCH};
    let more = || vec![(DNS, lease().dns[0].octets().to_vec()), (SEARCH, b"\x03vpc\x08internal\0".to_vec())];
    let given = || vec![(IA_NA, 1, given(), None)];
    let preferred = [vec![(PREFERENCE, vec![255])], more()].concat();
    let expected = [
        Said { kind: 2, associations: given(), status: None, more: preferred },
        Said { kind: 7, associations: given(), status: None, more: more() },
        Said { kind: 7, status: Some(0), ..Said::default() },
        Said { kind: 7, associations: given(), status: None, more: more() },
        Said { kind: 7, associations: given(), status: None, more: more() },
        Said { kind: 7, status: Some(0), ..Said::default() },
        Said { kind: 7, more: more(), ..Said::default() },
    ];
    for ((name, hex), expected) in DHCLIENT.into_iter().zip(expected) {
        let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        let mut sent: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
        let mut reply = answer(&lease(), &sent, true).unwrap();
        assert_eq!(reply[1..4], sent[1..4], "{name}: which message is answered");
        reply[1..4].copy_from_slice(&[1, 2, 3]);
        assert_eq!(read(&reply), expected, "{name}");
        // Truncated at any length: an error, or a reply to what is left.
        while sent.pop().is_some() {
            let _ = answer(&lease(), &sent, true);
        }
    }
}

#[test]
fn addresses_of_other_nodes_are_withdrawn() {
    use option::IA_NA;
    let taken = |named| [given(), vec![(named, 0)]].concat();
    for (kind, options, expected) in [
        (5, vec![client(), server(), ia(IA_NA, 1, &[NEIGHBOUR])], (taken(NEIGHBOUR), None)),
        (6, vec![client(), ia(IA_NA, 1, &[ELSEWHERE, OWN])], (taken(ELSEWHERE), None)),
        // The client requests an address that it may not have: it gets its own, or must start again.
        (3, vec![client(), server(), ia(IA_NA, 1, &[NEIGHBOUR])], (given(), None)),
        (3, vec![client(), server(), ia(IA_NA, 1, &[ELSEWHERE])], (vec![], Some(4))),
        (1, vec![client(), ia(IA_NA, 1, &[ELSEWHERE])], (given(), None)),
    ] {
        let associations = ask(kind, &options).unwrap().associations;
        assert_eq!(associations, [(IA_NA, 1, expected.0, expected.1)], "{kind} {options:?}");
    }
    for (named, status) in [(vec![OWN], 0), (vec![SECOND, OWN], 0), (vec![OWN, NEIGHBOUR], 4), (vec![ELSEWHERE], 4)] {
        let said = ask(4, &[client(), ia(IA_NA, 1, &named)]).unwrap();
        assert_eq!(said, Said { kind: 7, status: Some(status), ..Said::default() }, "{named:?}");
    }
}

#[test]
fn one_association_gets_all_addresses_and_the_others_get_a_status() {
    use option::{IA_NA, IA_PD, IA_TA};
    let wanted = [ia(IA_PD, 1, &[]), ia(IA_NA, 2, &[]), ia(IA_NA, 3, &[OWN]), ia(IA_TA, 4, &[])];
    let with = |more: &[(u16, Vec<u8>)]| [more, &wanted[..]].concat();
    let refused = |codes: [u16; 3]| {
        let [prefix, second, temporary] = codes;
        vec![
            (IA_PD, 1, vec![], Some(prefix)),
            (IA_NA, 2, vec![], Some(second)),
            (IA_NA, 3, given(), None),
            (IA_TA, 4, vec![], Some(temporary)),
        ]
    };
    assert_eq!(ask(1, &with(&[client()])).unwrap().associations, refused([6, 2, 2]));
    assert_eq!(ask(3, &with(&[client(), server()])).unwrap().associations, refused([6, 2, 2]));
    assert_eq!(ask(5, &with(&[client(), server()])).unwrap().associations, refused([3, 3, 3]));
    assert_eq!(ask(6, &with(&[client()])).unwrap().associations, refused([3, 3, 3]));
    // Release or decline own addresses, or those of another node: no action, and the client gets a status.
    for kind in [8, 9] {
        let said = ask(kind, &with(&[client(), server()])).unwrap();
        let mut associations = refused([3, 3, 3]);
        associations.remove(2);
        assert_eq!(said, Said { kind: 7, associations, status: Some(0), more: vec![] });
    }
}

#[test]
fn unicast_requests_are_told_to_use_multicast() {
    let options = [client(), server(), ia(option::IA_NA, 1, &[OWN])];
    for kind in [3, 5, 8, 9] {
        let said = read(&answer(&lease(), &message(kind, &options), false).unwrap());
        assert_eq!(said, Said { kind: 7, status: Some(5), ..Said::default() }, "{kind}");
    }
    for kind in [1, 4, 6, 11] {
        let options = [client(), ia(option::IA_NA, 1, &[OWN])];
        let message = message(kind, if kind == 11 { &options[..1] } else { &options });
        assert_eq!(answer(&lease(), &message, false), Err(DropReason::DhcpUnanswered), "{kind}");
    }
}

#[test]
fn what_is_not_answered_has_a_reason() {
    use DropReason::{DhcpMalformed, DhcpUnanswered};
    use option::{ADDRESS, IA_NA};
    let cut = |by: usize| {
        let whole = message(1, &[client(), ia(IA_NA, 1, &[OWN])]);
        whole[..whole.len() - by].to_vec()
    };
    let inside = |mut data: Vec<u8>, kind: u16, more: &[u8]| {
        put(&mut data, kind, |out| out.extend(more));
        (IA_NA, data)
    };
    let many = |n: usize| (0..n).map(|id| ia(IA_NA, id as u8, &[])).chain([client()]).collect::<Vec<_>>();
    for (name, asked, reason) in [
        ("nothing", vec![], DhcpMalformed),
        ("half a header", vec![1, 2, 3], DhcpMalformed),
        ("cut short", cut(1), DhcpMalformed),
        ("cut in an address", cut(8), DhcpMalformed),
        ("half an option", [&message(1, &[client()])[..], &[0, 8, 0]].concat(), DhcpMalformed),
        ("half an address", message(1, &[client(), inside(vec![0; 12], ADDRESS, &[0; 23])]), DhcpMalformed),
        ("half an association", message(1, &[client(), (IA_NA, vec![0; 11])]), DhcpMalformed),
        ("half a request", message(1, &[client(), (6, vec![0, 23, 0])]), DhcpMalformed),
        ("of nobody", message(1, &[ia(IA_NA, 1, &[])]), DhcpMalformed),
        ("of two", message(1, &[client(), client()]), DhcpMalformed),
        ("a short name", message(1, &[(1, vec![0, 3])]), DhcpMalformed),
        ("a long name", message(1, &[(1, vec![0; 131])]), DhcpMalformed),
        ("a server's offer", message(2, &[client(), server()]), DhcpMalformed),
        ("a server's reply", message(7, &[client(), server()]), DhcpMalformed),
        ("a server's call", message(10, &[client(), server()]), DhcpMalformed),
        ("a relay's reply", message(13, &[]), DhcpMalformed),
        ("a relay's question", message(12, &[]), DhcpUnanswered),
        ("unheard of", message(0, &[client()]), DhcpUnanswered),
        ("unheard of as well", message(99, &[client()]), DhcpUnanswered),
        ("a solicit to a server", message(1, &[client(), server()]), DhcpMalformed),
        ("a rebind to a server", message(6, &[client(), server()]), DhcpMalformed),
        ("a confirm to a server", message(4, &[client(), server()]), DhcpMalformed),
        ("a request to nobody", message(3, &[client()]), DhcpMalformed),
        ("to another server", message(3, &[client(), (2, OTHER_SERVER.to_vec())]), DhcpUnanswered),
        ("the rest, of another server", message(11, &[(2, OTHER_SERVER.to_vec())]), DhcpUnanswered),
        ("the rest, and addresses", message(11, &[ia(IA_NA, 1, &[])]), DhcpMalformed),
        ("nothing to confirm", message(4, &[client(), ia(IA_NA, 1, &[])]), DhcpUnanswered),
        ("too many associations", message(1, &many(9)), DhcpMalformed),
        ("too many addresses", message(1, &[client(), ia(IA_NA, 1, &[OWN; 9])]), DhcpMalformed),
    ] {
        assert_eq!(answer(&lease(), &asked, true), Err(reason), "{name}");
    }
    assert!(answer(&lease(), &message(1, &many(8)), true).is_ok());
}

#[test]
fn the_longest_reply_fits_the_smallest_mtu() {
    let own = (0..20).map(|n| (Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, n), 64)).collect();
    let domain = Some(["d"; 127].join("."));
    let lease = Ipv6Lease { addresses: own, dns: vec![OWN; 20], domain, ..lease() };
    let mut options = vec![(1, vec![7; 130]), wants(&[23, 24]), ia(option::IA_NA, 0, &[ELSEWHERE; MOST_NAMED])];
    options.extend((1..8).map(|id| ia(option::IA_NA, id, &[])));
    let reply = answer(&lease, &message(6, &options), true).unwrap();
    assert!((900..=MOST_LEN).contains(&reply.len()), "{}", reply.len());
}

proptest! {
    /// For any message: no panic, a reply of bounded length, and no address but the guest's own.
    #[test]
    fn nobody_gets_another_address(
        kind in 0u8..16,
        options in proptest::collection::vec(
            (0u16..40, proptest::collection::vec(any::<u8>(), 0..60), any::<[bool; 3]>()), 0..12),
        to_group in any::<bool>(),
        cut in 0usize..600,
        at in any::<(usize, u8)>(),
    ) {
        let options: Vec<(u16, Vec<u8>)> = options.into_iter().map(|(kind, data, [named, own, plain])| match kind {
            1 if plain => client(),
            2 if plain => server(),
            3 | 4 | 25 if named => ia(kind, 1, &[if own { OWN } else { NEIGHBOUR }]),
            _ => (kind, data),
        }).collect();
        let mut asked = message(kind, &options);
        let len = asked.len();
        asked[at.0 % len] ^= at.1;
        asked.truncate(cut);
        if let Ok(reply) = answer(&lease(), &asked, to_group) {
            prop_assert!(reply.len() <= MOST_LEN);
            for (kind, data) in options_of(&reply[4..]) {
                let header = match kind {
                    option::IA_NA | option::IA_PD => 12,
                    option::IA_TA => 4,
                    _ => continue,
                };
                for (_, data) in options_of(&data[header..]).into_iter().filter(|(kind, _)| *kind == 5) {
                    let named = Ipv6Addr::from_octets(data[..16].try_into().unwrap());
                    prop_assert!([OWN, SECOND].contains(&named) || data[16..24] == [0; 8]);
                }
            }
        }
    }
}
