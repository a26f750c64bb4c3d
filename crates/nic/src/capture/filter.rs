//! Capture filters: a subset of the language of pcap-filter(7), on the guests' frames.
//!
//! ```text
//! expression = term { "or" term }            term = factor { "and" factor }
//! factor     = [ "not" ] ( "(" expression ")" | primitive )
//! primitive  = "ip" | "ip6" | "arp" | "tcp" | "udp" | "icmp" | "icmp6" | "vni" NUMBER
//!            | [ "src" | "dst" ] ( "host" ADDRESS | "net" PREFIX | ADDRESS | PREFIX )
//!            | [ "tcp" | "udp" ] [ "src" | "dst" ] ( "port" NUMBER | "portrange" NUMBER "-" NUMBER )
//!            | "ether" [ "src" | "dst" ] "host" MAC
//! ```
//!
//! `&&`, `||` and `!` are synonyms of `and`, `or` and `not`; `and` binds tighter than `or`.

use std::fmt;
use std::net::IpAddr;

use bifrost_wire::Mac;
use bifrost_wire::protocol::{ICMP, ICMPV6, TCP, UDP};

use crate::{L3, Parsed};

/// Maximum length of a filter, bytes.
pub const MAX_LEN: usize = 1024;
/// Maximum nesting of parentheses and negations.
const MAX_DEPTH: u32 = 32;

/// A parsed filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter(Node);

/// Matches all packets.
impl Default for Filter {
    fn default() -> Self {
        Filter(Node::Any)
    }
}

/// A syntax error in a filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilterError {
    /// Position of the first wrong byte, from 0; the length of the text if it ends too early.
    pub at: usize,
    /// The error.
    pub what: String,
}

impl fmt::Display for FilterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "column {}: {}", self.at + 1, self.what)
    }
}

impl std::error::Error for FilterError {}

/// The input of a filter.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// The guest's frame; `None` if there is none, or it cannot be parsed.
    pub frame: Option<&'a Parsed>,
    /// The virtual network, if it is known.
    pub vni: Option<u32>,
}

impl Filter {
    /// A filter that every packet passes.
    pub const ALL: Self = Self(Node::Any);

    /// Parses a filter. Every packet passes the empty one.
    ///
    /// # Errors
    /// The first syntax error and its position.
    pub fn parse(text: &str) -> Result<Self, FilterError> {
        if text.len() > MAX_LEN {
            return Err(FilterError { at: MAX_LEN, what: format!("filter is longer than {MAX_LEN} bytes") });
        }
        let mut parser = Parser { words: words(text), next: 0, end: text.len() };
        if parser.words.is_empty() {
            return Ok(Self::ALL);
        }
        let node = parser.expression(0)?;
        match parser.peek() {
            None => Ok(Self(node)),
            Some(")") => Err(parser.error("unmatched \")\"")),
            Some(word) => Err(parser.error(format!("expected \"and\", \"or\" or the end, found {word:?}"))),
        }
    }

    /// Whether a packet passes.
    pub fn passes(&self, subject: Subject<'_>) -> bool {
        self.0.passes(subject)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Either,
    Src,
    Dst,
}

impl Side {
    fn any<T>(self, src: T, dst: T, test: impl Fn(T) -> bool) -> bool {
        (self != Side::Dst && test(src)) || (self != Side::Src && test(dst))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    Any,
    Not(Box<Node>),
    And(Vec<Node>),
    Or(Vec<Node>),
    Kind(L3),
    Protocol(u8),
    Net(Side, IpAddr, u8),
    Ports(Option<u8>, Side, u16, u16),
    Ether(Side, Mac),
    Vni(u32),
}

impl Node {
    fn passes(&self, subject: Subject<'_>) -> bool {
        match self {
            Node::Any => return true,
            Node::Not(node) => return !node.passes(subject),
            Node::And(nodes) => return nodes.iter().all(|node| node.passes(subject)),
            Node::Or(nodes) => return nodes.iter().any(|node| node.passes(subject)),
            Node::Vni(vni) => return subject.vni == Some(*vni),
            _ => {}
        }
        let Some(frame) = subject.frame else { return false };
        match self {
            Node::Kind(kind) => frame.kind == *kind,
            Node::Protocol(protocol) => frame.is_ip() && frame.protocol == *protocol,
            Node::Net(side, net, len) => {
                frame.kind != L3::Other && side.any(frame.src_ip, frame.dst_ip, |ip| contains(*net, *len, ip))
            }
            Node::Ports(protocol, side, low, high) => {
                let of_protocol = protocol.map_or(matches!(frame.protocol, TCP | UDP), |p| frame.protocol == p);
                let range = *low..=*high;
                frame.is_ip()
                    && of_protocol
                    && !frame.is_fragment()
                    && side.any(frame.src_port, frame.dst_port, |port| range.contains(&port))
            }
            Node::Ether(side, mac) => side.any(frame.src_mac, frame.dst_mac, |other| other == *mac),
            Node::Any | Node::Not(_) | Node::And(_) | Node::Or(_) | Node::Vni(_) => false,
        }
    }
}

/// Whether the addresses are of one family and their first `len` bits are equal.
fn contains(net: IpAddr, len: u8, ip: IpAddr) -> bool {
    match (net, ip) {
        (IpAddr::V4(net), IpAddr::V4(ip)) => {
            let differ = u32::from(net) ^ u32::from(ip);
            differ.checked_shr(32 - u32::from(len)).unwrap_or(0) == 0
        }
        (IpAddr::V6(net), IpAddr::V6(ip)) => {
            let differ = u128::from(net) ^ u128::from(ip);
            differ.checked_shr(128 - u32::from(len)).unwrap_or(0) == 0
        }
        _ => false,
    }
}

/// The words of a filter, each with its position. Parentheses and symbolic operators are separate words.
fn words(text: &str) -> Vec<(usize, &str)> {
    let mut words = Vec::new();
    let mut rest = text;
    loop {
        rest = rest.trim_start();
        let at = text.len() - rest.len();
        let Some(first) = rest.chars().next() else { return words };
        let len = match first {
            '(' | ')' | '!' => 1,
            '&' | '|' => rest.find(|c| c != first).unwrap_or(rest.len()).min(2),
            _ => rest.find(|c: char| c.is_whitespace() || "()!&|".contains(c)).unwrap_or(rest.len()),
        };
        words.push((at, &rest[..len]));
        rest = &rest[len..];
    }
}

struct Parser<'a> {
    words: Vec<(usize, &'a str)>,
    next: usize,
    end: usize,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<&'a str> {
        self.words.get(self.next).map(|(_, word)| *word)
    }

    fn take(&mut self, any_of: &[&str]) -> Option<&'a str> {
        let word = self.peek().filter(|word| any_of.contains(word))?;
        self.next += 1;
        Some(word)
    }

    /// An error at the next word.
    fn error(&self, what: impl Into<String>) -> FilterError {
        FilterError { at: self.words.get(self.next).map_or(self.end, |(at, _)| *at), what: what.into() }
    }

    fn expression(&mut self, depth: u32) -> Result<Node, FilterError> {
        let mut terms = vec![self.term(depth)?];
        while self.take(&["or", "||"]).is_some() {
            terms.push(self.term(depth)?);
        }
        Ok(if terms.len() > 1 { Node::Or(terms) } else { terms.remove(0) })
    }

    fn term(&mut self, depth: u32) -> Result<Node, FilterError> {
        let mut factors = vec![self.factor(depth)?];
        while self.take(&["and", "&&"]).is_some() {
            factors.push(self.factor(depth)?);
        }
        Ok(if factors.len() > 1 { Node::And(factors) } else { factors.remove(0) })
    }

    fn factor(&mut self, depth: u32) -> Result<Node, FilterError> {
        if depth >= MAX_DEPTH {
            return Err(self.error(format!("nested more than {MAX_DEPTH} levels deep")));
        }
        if self.take(&["not", "!"]).is_some() {
            return Ok(Node::Not(Box::new(self.factor(depth + 1)?)));
        }
        if self.take(&["("]).is_some() {
            let node = self.expression(depth + 1)?;
            return match self.take(&[")"]) {
                Some(_) => Ok(node),
                None => Err(self.error("\")\" is missing")),
            };
        }
        self.primitive()
    }

    fn side(&mut self) -> Side {
        match self.take(&["src", "dst"]) {
            Some("src") => Side::Src,
            Some(_) => Side::Dst,
            None => Side::Either,
        }
    }

    fn primitive(&mut self) -> Result<Node, FilterError> {
        let kind = self.take(&["ip", "ip6", "arp", "icmp", "icmp6", "tcp", "udp", "vni", "ether"]);
        match kind {
            Some("ip") => return Ok(Node::Kind(L3::V4)),
            Some("ip6") => return Ok(Node::Kind(L3::V6)),
            Some("arp") => return Ok(Node::Kind(L3::Arp)),
            Some("icmp") => return Ok(Node::Protocol(ICMP)),
            Some("icmp6") => return Ok(Node::Protocol(ICMPV6)),
            Some("vni") => return self.number(0, (1 << 24) - 1, "a VNI, 0 to 16777215").map(Node::Vni),
            Some("ether") => return self.ether(),
            _ => {}
        }
        let protocol = match kind {
            Some("tcp") => Some(TCP),
            Some(_) => Some(UDP),
            None => None,
        };
        if let Some(protocol) = protocol {
            // Alone, or before ports.
            let after_side = self.words.get(self.next + usize::from(matches!(self.peek(), Some("src" | "dst"))));
            if !matches!(after_side, Some((_, "port" | "portrange"))) {
                return Ok(Node::Protocol(protocol));
            }
        }
        let side = self.side();
        match self.peek() {
            Some("port" | "portrange") => self.ports(protocol, side),
            Some("host") => {
                self.next += 1;
                let node = self.net(side)?;
                Ok(node)
            }
            Some("net") => {
                self.next += 1;
                self.net(side)
            }
            Some(word) if word.parse::<IpAddr>().is_ok() || word.contains('/') => self.net(side),
            Some(word) => {
                let known = "ip, ip6, arp, tcp, udp, icmp, icmp6, vni, host, net, port, portrange, src, dst, ether, not or \"(\"";
                Err(self.error(format!("expected {known}, found {word:?}")))
            }
            None => Err(self.error("incomplete expression")),
        }
    }

    fn ports(&mut self, protocol: Option<u8>, side: Side) -> Result<Node, FilterError> {
        const WHAT: &str = "a port, 0 to 65535";
        if self.take(&["port"]).is_some() {
            let port = self.number(0, 65_535, WHAT)? as u16;
            return Ok(Node::Ports(protocol, side, port, port));
        }
        self.next += 1;
        let bounds = self.peek().and_then(|word| word.split_once('-'));
        let bounds = bounds.and_then(|(low, high)| Some((low.parse::<u16>().ok()?, high.parse::<u16>().ok()?)));
        match bounds.filter(|(low, high)| low <= high) {
            Some((low, high)) => {
                self.next += 1;
                Ok(Node::Ports(protocol, side, low, high))
            }
            None => Err(self.error("expected a range of ports, such as 8000-8080")),
        }
    }

    fn net(&mut self, side: Side) -> Result<Node, FilterError> {
        let Some(word) = self.peek() else { return Err(self.error("expected an address, found the end")) };
        let (address, len) = word.split_once('/').map_or((word, None), |(address, len)| (address, Some(len)));
        let Ok(address) = address.parse::<IpAddr>() else {
            return Err(self.error(format!("expected an IPv4 or IPv6 address, found {word:?}")));
        };
        let bits = if address.is_ipv4() { 32 } else { 128 };
        let len = match len.map(str::parse::<u8>) {
            None => bits,
            Some(Ok(len)) if len <= bits => len,
            Some(_) => return Err(self.error(format!("prefix length of {word:?} is not within 0 to {bits}"))),
        };
        self.next += 1;
        Ok(Node::Net(side, address, len))
    }

    fn ether(&mut self) -> Result<Node, FilterError> {
        let side = self.side();
        if self.take(&["host"]).is_none() && side == Side::Either {
            return Err(self.error("expected \"host\", \"src\" or \"dst\" after \"ether\""));
        }
        match self.peek().map(str::parse::<Mac>) {
            Some(Ok(mac)) => {
                self.next += 1;
                Ok(Node::Ether(side, mac))
            }
            _ => Err(self.error("expected a MAC address, such as 02:00:00:00:00:01")),
        }
    }

    fn number(&mut self, low: u32, high: u32, what: &str) -> Result<u32, FilterError> {
        match self.peek().map(str::parse::<u32>) {
            Some(Ok(number)) if (low..=high).contains(&number) => {
                self.next += 1;
                Ok(number)
            }
            Some(_) => Err(self.error(format!("expected {what}"))),
            None => Err(self.error(format!("expected {what}, found the end"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse;

    /// TCP 10.0.0.1:40000 to 10.0.0.2:6379.
    fn tcp() -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];
        frame.extend_from_slice(&[0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend_from_slice(&[0x9c, 0x40, 0x18, 0xeb, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
        frame
    }

    fn udp6() -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x86, 0xdd, 0x60, 0, 0, 0, 0, 8, 17, 64];
        for last in [1, 2] {
            frame.extend_from_slice(&[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
        }
        frame.extend_from_slice(&[0, 53, 0x1f, 0x90, 0, 8, 0, 0]);
        frame
    }

    fn passes(filter: &str, frame: &[u8]) -> bool {
        let parsed = parse(frame, frame.len()).unwrap();
        Filter::parse(filter).unwrap().passes(Subject { frame: Some(&parsed), vni: Some(100) })
    }

    #[test]
    fn primitives() {
        let cases = [
            ("", true),
            ("  ", true),
            ("tcp", true),
            ("udp", false),
            ("ip", true),
            ("ip6", false),
            ("arp", false),
            ("icmp", false),
            ("tcp port 6379", true),
            ("udp port 6379", false),
            ("port 6379", true),
            ("port 40000", true),
            ("src port 6379", false),
            ("tcp src port 40000", true),
            ("tcp dst port 40000", false),
            ("dst port 6379", true),
            ("portrange 6000-7000", true),
            ("tcp src portrange 6000-7000", false),
            ("host 10.0.0.1", true),
            ("host 10.0.0.2", true),
            ("host 10.0.0.3", false),
            ("src host 10.0.0.2", false),
            ("dst 10.0.0.2", true),
            ("src 10.0.0.2", false),
            ("10.0.0.1", true),
            ("net 10.0.0.0/8", true),
            ("src net 10.0.0.0/31", true),
            ("dst net 10.0.0.0/31", false),
            ("net 0.0.0.0/0", true),
            ("net ::/0", false),
            ("10.0.0.0/24", true),
            ("ether host 02:00:00:00:00:01", true),
            ("ether src 02:00:00:00:00:01", true),
            ("ether dst host 02:00:00:00:00:01", false),
            ("vni 100", true),
            ("vni 101", false),
        ];
        for (filter, expected) in cases {
            assert_eq!(passes(filter, &tcp()), expected, "{filter}");
        }
        for (filter, expected) in [
            ("udp and ip6", true),
            ("host fd00::1", true),
            ("src net fd00::/64", true),
            ("net fd01::/16", false),
            ("udp dst port 8080", true),
            ("tcp dst port 8080", false),
            ("icmp6", false),
        ] {
            assert_eq!(passes(filter, &udp6()), expected, "{filter}");
        }
    }

    #[test]
    fn operators_bind_as_in_pcap_filters() {
        let cases = [
            ("tcp and port 6379", true),
            ("tcp and port 1", false),
            ("udp or tcp", true),
            ("not udp", true),
            ("!udp&&tcp", true),
            ("! tcp || udp", false),
            ("not (udp or tcp)", false),
            // `and` first.
            ("tcp or tcp and udp", true),
            ("(tcp or tcp) and udp", false),
            ("not udp and tcp", true),
            ("not tcp or tcp", true),
            ("not not tcp", true),
            ("((tcp)and(port 6379))", true),
            // The protocol is a separate primitive here, not part of the port primitive.
            ("tcp and not port 22", true),
        ];
        for (filter, expected) in cases {
            assert_eq!(passes(filter, &tcp()), expected, "{filter}");
        }
    }

    #[test]
    fn packets_without_a_guest_frame_match_by_network_only() {
        let control = Subject { frame: None, vni: Some(7) };
        for (filter, expected) in [("", true), ("vni 7", true), ("tcp", false), ("not tcp", true), ("host ::1", false)]
        {
            assert_eq!(Filter::parse(filter).unwrap().passes(control), expected, "{filter}");
        }
    }

    #[test]
    fn errors_have_the_position() {
        let cases = [
            ("tcp prot 6379", 4, "expected \"and\", \"or\" or the end, found \"prot\""),
            ("port", 4, "expected a port, 0 to 65535, found the end"),
            ("port 65536", 5, "expected a port, 0 to 65535"),
            ("tcp port x and udp", 9, "expected a port, 0 to 65535"),
            ("host web1", 5, "expected an IPv4 or IPv6 address, found \"web1\""),
            ("net 10.0.0.0/33", 4, "prefix length of \"10.0.0.0/33\" is not within 0 to 32"),
            ("(tcp", 4, "\")\" is missing"),
            ("tcp)", 3, "unmatched \")\""),
            ("tcp and", 7, "incomplete expression"),
            ("tcp & udp", 4, "expected \"and\", \"or\" or the end, found \"&\""),
            ("vni 16777216", 4, "expected a VNI, 0 to 16777215"),
            ("ether 02:00:00:00:00:01", 6, "expected \"host\", \"src\" or \"dst\" after \"ether\""),
            ("ether host 02:00", 11, "expected a MAC address, such as 02:00:00:00:00:01"),
            ("portrange 9-8", 10, "expected a range of ports, such as 8000-8080"),
        ];
        for (filter, at, what) in cases {
            assert_eq!(Filter::parse(filter), Err(FilterError { at, what: what.into() }), "{filter}");
        }
        let error = Filter::parse("tcp port x").unwrap_err();
        assert_eq!(error.to_string(), "column 10: expected a port, 0 to 65535");
        assert!(Filter::parse("frag").unwrap_err().what.contains(", found \"frag\""));
    }

    #[test]
    fn hostile_text_is_refused() {
        assert!(Filter::parse(&"(".repeat(MAX_LEN)).unwrap_err().what.contains("nested"));
        assert!(Filter::parse(&"!".repeat(MAX_LEN)).unwrap_err().what.contains("nested"));
        assert!(Filter::parse(&"x".repeat(MAX_LEN + 1)).is_err());
        let random = fastrand::Rng::with_seed(7);
        let mut random = random;
        let alphabet =
            ["tcp", "port", "host", "(", ")", "and", "or", "not", "1", "10.0.0.1/8", "é", " ", "&&", "|", "src", "-"];
        for _ in 0..20_000 {
            let text: String = (0..random.usize(..12)).map(|_| alphabet[random.usize(..alphabet.len())]).collect();
            if let Err(error) = Filter::parse(&text) {
                assert!(error.at <= text.len() && text.is_char_boundary(error.at), "{text:?}: {error}");
            }
        }
    }
}
