//! A port's sessions, for the host to which its guest moves.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::ApiError;

/// The largest body of `POST /v1/sessions/import`, bytes: a hundred thousand sessions have 10 MB. They are taken over in one turn of
/// their worker.
pub const MAX_SESSIONS_BYTES: usize = 16 << 20;

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
        let digit = |n: u8| char::from(b"0123456789abcdef"[usize::from(n & 15)]);
        PortSessions { port, sessions: bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(*byte)]).collect() }
    }

    /// The bytes.
    ///
    /// # Errors
    /// The text is not hexadecimal.
    pub fn bytes(&self) -> Result<Vec<u8>, ApiError> {
        let digit = |c: u8| char::from(c).to_digit(16).map(|n| n as u8);
        let (pairs, rest) = self.sessions.as_bytes().as_chunks::<2>();
        let bytes = pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect::<Option<_>>();
        let hint = "give it as POST /v1/sessions/export has answered";
        let refused = || ApiError::bad_request("that is not hexadecimal").at("sessions").hint(hint);
        bytes.filter(|_| rest.is_empty()).ok_or_else(refused)
    }
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
