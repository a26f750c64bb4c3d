//! Traffic of guests.

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::flows::{HEADERS_BYTES, RECORD_BYTES};
use crate::units::{Bytes, Ns};

/// Hosts or guests by number: "all", or a list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Members {
    /// All.
    #[default]
    All,
    /// The listed ones.
    List(Vec<u32>),
}

/// Hosts by number.
pub type Hosts = Members;

impl Members {
    /// The numbers, out of `count`.
    pub fn iter(&self, count: u32) -> impl Iterator<Item = u32> + '_ {
        let (all, list) = match self {
            Members::All => (0..count, &[][..]),
            Members::List(list) => (0..0, &list[..]),
        };
        all.chain(list.iter().copied())
    }
}

impl Serialize for Members {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Members::All => s.serialize_str("all"),
            Members::List(list) => list.serialize(s),
        }
    }
}

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Members;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("\"all\" or a list of numbers like [0, 1]")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Members, E> {
                if text == "all" {
                    Ok(Members::All)
                } else {
                    Err(E::custom(format!("{text:?} is not \"all\" or a list")))
                }
            }
            fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Members, A::Error> {
                let mut list = Vec::new();
                while let Some(n) = seq.next_element()? {
                    list.push(n);
                }
                Ok(Members::List(list))
            }
        }
        d.deserialize_any(Reader)
    }
}

/// Distribution of the time between two packets or requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gap {
    /// Constant.
    #[default]
    Fixed,
    /// Exponential with the given mean.
    Poisson,
}

/// Traffic of some guests. `from` and `to` are guests by number. Each guest of `from` sends to each other guest of `to`
/// in the same network.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Workload {
    /// TCP-shaped packets without TCP: each contains its flow and number, so loss, duplication and order are checked
    /// exactly.
    Packets {
        /// Its name in reports.
        #[serde(default)]
        name: String,
        /// Senders.
        from: Members,
        /// Receivers.
        to: Members,
        /// Packets per pair, all flows together.
        packets: u64,
        /// Flows per pair. The sender sends runs of random length on each.
        #[serde(default = "one")]
        flows: u32,
        /// Payload of a packet, bytes.
        #[serde(default = "kilobyte")]
        size: Bytes,
        /// Minimum payload, if lengths are uniform between the two.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        size_min: Option<Bytes>,
        /// Packets in one large frame that the host must segment, 1..=44.
        #[serde(default = "one")]
        segments: u32,
        /// Time between two frames of a pair; 0: as fast as the ring accepts them.
        #[serde(default)]
        gap: Ns,
        /// Its distribution.
        #[serde(default)]
        gap_kind: Gap,
        /// Frames sent together.
        #[serde(default = "one")]
        burst: u32,
        /// When the first frame is sent.
        #[serde(default)]
        start: Ns,
        /// Additional delay of each pair, uniform in 0..=this.
        #[serde(default)]
        start_jitter: Ns,
    },
    /// A real TCP: each connection sends `count` requests and gets a response to each.
    Request {
        /// Its name in reports.
        #[serde(default)]
        name: String,
        /// Clients.
        from: Members,
        /// Servers.
        to: Members,
        /// Connections per pair.
        #[serde(default = "one")]
        connections: u32,
        /// Requests per connection.
        #[serde(default = "one")]
        count: u32,
        /// Size of a request.
        #[serde(default = "hundred")]
        request: Bytes,
        /// Size of a response.
        #[serde(default = "hundred")]
        response: Bytes,
        /// Time between a response and the next request.
        #[serde(default)]
        think: Ns,
        /// All connections of a client send their requests at the same time, once all have received their responses
        /// (incast).
        #[serde(default)]
        together: bool,
        /// Socket buffer of each end and direction.
        #[serde(default = "buffer")]
        buffer: Bytes,
        /// When connections are opened.
        #[serde(default)]
        start: Ns,
    },
    /// A real TCP: each connection carries an amount of data in one direction.
    Bulk {
        /// Its name in reports.
        #[serde(default)]
        name: String,
        /// Senders.
        from: Members,
        /// Receivers.
        to: Members,
        /// Connections per pair.
        #[serde(default = "one")]
        connections: u32,
        /// Amount of data per connection.
        bytes: Bytes,
        /// Socket buffer of each end and direction.
        #[serde(default = "big_buffer")]
        buffer: Bytes,
        /// When connections are opened.
        #[serde(default)]
        start: Ns,
    },
}

fn one() -> u32 {
    1
}

fn hundred() -> Bytes {
    Bytes(100)
}

fn kilobyte() -> Bytes {
    Bytes(1000)
}

fn buffer() -> Bytes {
    Bytes(64 << 10)
}

fn big_buffer() -> Bytes {
    Bytes(1 << 20)
}

impl Workload {
    /// Its name in reports.
    pub fn name(&self) -> &str {
        match self {
            Workload::Packets { name, .. } | Workload::Request { name, .. } | Workload::Bulk { name, .. } => name,
        }
    }

    /// Senders or clients.
    pub fn from(&self) -> &Members {
        match self {
            Workload::Packets { from, .. } | Workload::Request { from, .. } | Workload::Bulk { from, .. } => from,
        }
    }

    /// Receivers or servers.
    pub fn to(&self) -> &Members {
        match self {
            Workload::Packets { to, .. } | Workload::Request { to, .. } | Workload::Bulk { to, .. } => to,
        }
    }

    /// Whether its guests run a TCP.
    pub fn is_tcp(&self) -> bool {
        !matches!(self, Workload::Packets { .. })
    }

    /// The first invalid field, and the reason.
    pub(crate) fn check(&self, guests: u32, mtu: u16) -> Result<(), (&'static str, String)> {
        for (field, members) in [("from", self.from()), ("to", self.to())] {
            if let Some(guest) = members.iter(guests).find(|g| *g >= guests) {
                return Err((field, format!("there is no guest {guest}; there are {guests}")));
            }
        }
        if let Workload::Packets { size, size_min, segments, flows, burst, .. } = self {
            let (low, high) = (RECORD_BYTES as u64, u64::from(mtu) - (HEADERS_BYTES as u64 - 14));
            for (field, size) in [("size", Some(size)), ("size_min", size_min.as_ref())] {
                if let Some(size) = size.filter(|s| !(low..=high).contains(&s.0)) {
                    return Err((field, format!("{size}; with this MTU it can be {low}B to {high}B")));
                }
            }
            if size_min.is_some_and(|min| min > *size) {
                return Err(("size_min", "it is larger than size".into()));
            }
            if !(1..=44).contains(segments) || u64::from(*segments) * size.0 > 65_000 {
                return Err(("segments", "1 to 44, and at most 65000 bytes together".into()));
            }
            if *flows == 0 || *burst == 0 {
                return Err(("flows", "use at least one flow, and one frame per burst".into()));
            }
        }
        Ok(())
    }
}
