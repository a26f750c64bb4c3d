//! Sessions of security groups: lists of them, and a port's for the host to which its guest moves.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::ApiError;

/// The largest body of `POST /v1/sessions/import`, bytes: a hundred thousand sessions have 10 MB.
pub const MAX_SESSIONS_BYTES: usize = 16 << 20;

/// Which sessions to list: the query of `GET /v1/sessions`. What is absent does not restrict.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SessionFilter {
    /// Of this port.
    pub port: Option<String>,
    /// Of this IP protocol: one of [`PROTOCOLS`], or a number.
    pub protocol: Option<String>,
    /// With this address at either end.
    pub address: Option<IpAddr>,
    /// With this TCP or UDP port at either end.
    pub number: Option<u16>,
    /// In this state.
    pub state: Option<SessionState>,
    /// Those behind the one with this [`Session::id`].
    pub after: Option<u64>,
    /// How many to list at most, 1 and more.
    pub limit: Option<u64>,
}

/// Names of IP protocols.
pub const PROTOCOLS: [(&str, u8); 4] = [("tcp", 6), ("udp", 17), ("icmp", 1), ("icmpv6", 58)];

impl SessionFilter {
    /// The protocol's number, if one is asked for.
    ///
    /// # Errors
    /// There is no such protocol or state, or the limit is 0.
    pub fn check(&self) -> Result<Option<u8>, ApiError> {
        if self.limit == Some(0) {
            return Err(ApiError::bad_request("0 sessions are no list").at("limit").hint("give 1 or more"));
        }
        if self.state == Some(SessionState::Unknown) {
            let hint = "give unanswered, answered, closing, assured or established";
            return Err(ApiError::bad_request("there is no such state").at("state").hint(hint));
        }
        let number = |name: &str| match PROTOCOLS.iter().find(|(known, _)| *known == name) {
            Some((_, number)) => Ok(*number),
            None => name.parse().map_err(|_| {
                let what = format!("there is no IP protocol named {name:?}");
                ApiError::bad_request(what).at("protocol").hint("give tcp, udp, icmp, icmpv6, or 0 to 255")
            }),
        };
        self.protocol.as_deref().map(number).transpose()
    }

    /// As the query of a request.
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
    /// Where it is in the list: the `after` with which a list goes on behind it. A later session may get the same one.
    pub id: u64,
    /// The port whose group it is.
    pub port: String,
    /// The IP protocol: one of [`PROTOCOLS`], or a number.
    pub protocol: String,
    /// The guest's address.
    pub local_address: IpAddr,
    /// The guest's port; instead of one, echo requests have their identifier, and other ICMP messages their type.
    pub local_port: u16,
    /// The other end's address.
    pub remote_address: IpAddr,
    /// The other end's port, likewise.
    pub remote_port: u16,
    /// Whether the guest began, and not the other end.
    pub is_outbound: bool,
    /// What has been seen of it.
    pub state: SessionState,
    /// Time since its last packet, s.
    pub idle_s: u32,
    /// Time until it ends if no packet comes, s.
    pub expires_s: u32,
}

/// What has been seen of a session. At a bound, those of the first ones make room for others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SessionState {
    /// Nobody has answered, or the conversation is over.
    Unanswered,
    /// A datagram or a SYN was answered.
    Answered,
    /// A TCP connection of which one side has sent its FIN.
    Closing,
    /// Datagrams both ways for a while.
    Assured,
    /// An established TCP connection.
    Established,
    /// One of a newer release.
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

/// Whose: the body of `POST /v1/sessions/export`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionsQuery {
    /// The port's name.
    pub port: String,
}

/// A port's sessions: the answer to that, and the body of `POST /v1/sessions/import`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortSessions {
    /// The port's name; on another host it may have another one.
    pub port: String,
    /// The sessions in the format of an upgrade, hexadecimal.
    pub sessions: String,
}

/// What became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SessionsReport {
    /// Sessions that go on here.
    pub sessions: u64,
    /// Those that do not: there is no room, the port has not their address, or they were there already.
    pub left_out: u64,
}

impl PortSessions {
    /// With these bytes.
    pub fn new(port: String, bytes: &[u8]) -> PortSessions {
        PortSessions { port, sessions: hexadecimal(bytes) }
    }

    /// The bytes.
    ///
    /// # Errors
    /// The text is not hexadecimal.
    pub fn bytes(&self) -> Result<Vec<u8>, ApiError> {
        from_hexadecimal(&self.sessions, "give it as POST /v1/sessions/export has answered")
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
    let refused = || ApiError::bad_request("that is not hexadecimal").at("sessions").hint(hint);
    bytes.filter(|_| rest.is_empty()).ok_or_else(refused)
}

impl fmt::Display for SessionsReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} sessions go on here, {} left out", self.sessions, self.left_out)
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
    fn bytes_are_what_they_were_and_other_text_is_refused() {
        let bytes: Vec<u8> = (0..=255).collect();
        let sessions = PortSessions::new("a".to_owned(), &bytes);
        assert_eq!(sessions.bytes(), Ok(bytes));
        for text in ["0", "0g", "+1", "é", "000"] {
            let sessions = PortSessions { sessions: text.to_owned(), ..sessions.clone() };
            assert!(sessions.bytes().is_err(), "{text}");
        }
    }
}
