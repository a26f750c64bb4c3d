//! Sessions of security groups: lists, and the export of a port's sessions to the host to which its guest moves.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::ApiError;

/// Largest body of `POST /v1/sessions/import`, bytes: a hundred thousand sessions take 10 MB.
pub const MAX_SESSIONS_BYTES: usize = 16 << 20;

/// Which sessions to list: the query of `GET /v1/sessions`. Absent fields match everything.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SessionFilter {
    /// Sessions of this port.
    pub port: Option<String>,
    /// Of this IP protocol: one of [`PROTOCOLS`], or a number.
    pub protocol: Option<String>,
    /// With this address at either end.
    pub address: Option<IpAddr>,
    /// With this TCP or UDP port at either end.
    pub number: Option<u16>,
    /// In this state.
    pub state: Option<SessionState>,
    /// Only sessions after the one with this [`Session::id`].
    pub after: Option<u64>,
    /// Maximum number of sessions, from 1.
    pub limit: Option<u64>,
}

/// Names of IP protocols.
pub const PROTOCOLS: [(&str, u8); 4] = [("tcp", 6), ("udp", 17), ("icmp", 1), ("icmpv6", 58)];

impl SessionFilter {
    /// Checks the filter; returns the protocol's number, if it names one.
    ///
    /// # Errors
    /// The protocol or state is unknown, or the limit is 0.
    pub fn check(&self) -> Result<Option<u8>, ApiError> {
        if self.limit == Some(0) {
            return Err(ApiError::bad_request("0 is not allowed").at("limit").hint("use 1 or more"));
        }
        if self.state == Some(SessionState::Unknown) {
            let hint = "use unanswered, answered, closing, assured or established";
            return Err(ApiError::bad_request("unknown state").at("state").hint(hint));
        }
        let number = |name: &str| match PROTOCOLS.iter().find(|(known, _)| *known == name) {
            Some((_, number)) => Ok(*number),
            None => name.parse().map_err(|_| {
                let what = format!("unknown IP protocol {name:?}");
                ApiError::bad_request(what).at("protocol").hint("use tcp, udp, icmp, icmpv6, or 0 to 255")
            }),
        };
        self.protocol.as_deref().map(number).transpose()
    }

    /// The pairs of a request's query.
    pub(crate) fn pairs(&self) -> [(&'static str, Option<String>); 7] {
        [
            ("port", self.port.clone()),
            ("protocol", self.protocol.clone()),
            ("address", self.address.map(|address| address.to_string())),
            ("number", self.number.map(|number| number.to_string())),
            ("state", self.state.map(|state| state.to_string())),
            ("after", self.after.map(|after| after.to_string())),
            ("limit", self.limit.map(|limit| limit.to_string())),
        ]
    }
}

/// One session of a security group: an element of `GET /v1/sessions`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    /// Its position in the list: pass it as `after` to continue a list. A later session may get the same id.
    pub id: u64,
    /// The port to which it belongs.
    pub port: String,
    /// The IP protocol: one of [`PROTOCOLS`], or a number.
    pub protocol: String,
    /// The guest's address.
    pub local_address: IpAddr,
    /// The guest's port; for echo requests the identifier, for other ICMP messages the type.
    pub local_port: u16,
    /// The remote address.
    pub remote_address: IpAddr,
    /// The remote port, likewise.
    pub remote_port: u16,
    /// Whether the guest initiated it.
    pub is_outbound: bool,
    /// Its state.
    pub state: SessionState,
    /// Time since its last packet, s.
    pub idle_s: u32,
    /// Time until it expires without further packets, s.
    pub expires_s: u32,
}

/// The state of a session. At a bound, sessions of the first states are evicted first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SessionState {
    /// Not answered, or closed.
    Unanswered,
    /// A datagram or a SYN was answered.
    Answered,
    /// A TCP connection with a FIN from one side.
    Closing,
    /// A longer exchange of datagrams in both directions.
    Assured,
    /// An established TCP connection.
    Established,
    /// A state of a newer release.
    #[default]
    #[serde(other)]
    Unknown,
}

impl fmt::Display for SessionState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SessionState::Unanswered => "unanswered",
            SessionState::Answered => "answered",
            SessionState::Closing => "closing",
            SessionState::Assured => "assured",
            SessionState::Established => "established",
            SessionState::Unknown => "unknown",
        })
    }
}

/// A port: the body of `POST /v1/sessions/export`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionsQuery {
    /// The port's name.
    pub port: String,
}

/// A port's sessions: the response of `POST /v1/sessions/export`, and the body of `POST /v1/sessions/import`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortSessions {
    /// The port's name, which may differ on the other host.
    pub port: String,
    /// The sessions in the format of an upgrade, hexadecimal.
    pub sessions: String,
}

/// The outcome of an import.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SessionsReport {
    /// Sessions that were imported.
    pub sessions: u64,
    /// Sessions that were not: the table is full, the port does not have their address, or they already existed.
    pub left_out: u64,
}

impl PortSessions {
    /// Encodes the bytes of the sessions.
    pub fn new(port: String, bytes: &[u8]) -> PortSessions {
        PortSessions { port, sessions: hexadecimal(bytes) }
    }

    /// The decoded bytes of the sessions.
    ///
    /// # Errors
    /// The text is not hexadecimal.
    pub fn bytes(&self) -> Result<Vec<u8>, ApiError> {
        from_hexadecimal(&self.sessions, "send the response of POST /v1/sessions/export unchanged")
    }
}

/// Bytes as text.
pub(super) fn hexadecimal(bytes: &[u8]) -> String {
    let digit = |n: u8| char::from(b"0123456789abcdef"[usize::from(n & 15)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(*byte)]).collect()
}

/// The bytes of such a text of the field `sessions`, or an error with a hint.
pub(super) fn from_hexadecimal(text: &str, hint: &str) -> Result<Vec<u8>, ApiError> {
    let digit = |c: u8| char::from(c).to_digit(16).map(|n| n as u8);
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let bytes = pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect::<Option<_>>();
    let refused = || ApiError::bad_request("not hexadecimal").at("sessions").hint(hint);
    bytes.filter(|_| rest.is_empty()).ok_or_else(refused)
}

impl fmt::Display for SessionsReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} sessions imported, {} left out", self.sessions, self.left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_names_protocols_and_states() {
        let of = |protocol: &str| SessionFilter { protocol: Some(protocol.to_owned()), ..SessionFilter::default() };
        assert_eq!(["tcp", "icmpv6", "47"].map(|name| of(name).check()), [Ok(Some(6)), Ok(Some(58)), Ok(Some(47))]);
        assert_eq!(SessionFilter::default().check(), Ok(None));
        assert!(of("tpc").check().is_err() && of("256").check().is_err());
        assert!(SessionFilter { limit: Some(0), ..SessionFilter::default() }.check().is_err());
        assert!(SessionFilter { state: Some(SessionState::Unknown), ..SessionFilter::default() }.check().is_err());
        for state in [SessionState::Unanswered, SessionState::Closing, SessionState::Established] {
            assert_eq!(serde_json::to_value(state).unwrap(), state.to_string());
        }
    }

    #[test]
    fn bytes_survive_encoding_and_other_text_is_refused() {
        let bytes: Vec<u8> = (0..=255).collect();
        let sessions = PortSessions::new("a".to_owned(), &bytes);
        assert_eq!(sessions.bytes(), Ok(bytes));
        for text in ["0", "0g", "+1", "é", "000"] {
            let sessions = PortSessions { sessions: text.to_owned(), ..sessions.clone() };
            assert!(sessions.bytes().is_err(), "{text}");
        }
    }
}
