//! The limits of messages (docs/FLEET.md 3.8).

/// The versions of the protocol that are spoken, lowest and highest.
pub const VERSIONS: (u32, u32) = (1, LEARNING);
/// The first version in which hosts learn routes.
pub const LEARNING: u32 = 2;
/// The port that relays listen on, TCP.
pub const PORT: u16 = 4790;
/// The port on which relays give first certificates, TCP.
pub const ENROLL_PORT: u16 = 4792;
/// The port on which relays serve operators with certificates, TCP.
pub const API_PORT: u16 = 4793;
/// The longest name of a host, bytes: one label of DNS, or several.
pub const MAX_HOST: usize = 63;
/// The longest text about a program or its start, bytes.
pub const MAX_TEXT: usize = 200;
/// The longest name of a kind, bytes.
pub const MAX_KIND: usize = 32;
/// The longest key, bytes.
pub const MAX_KEY: usize = 512;
/// The largest spec, bytes.
pub const MAX_SPEC: usize = 1 << 20;
/// The most changes of a piece.
pub const MAX_CHANGES: usize = 1000;
/// At how many bytes of keys and specs a piece ends; one change alone may be more.
pub const PIECE_BYTES: usize = 1 << 20;
/// The largest message, bytes: a full piece and the largest change behind it, with room for the names of fields.
pub const MAX_MESSAGE: usize = 4 << 20;
/// The most problems of a report.
pub const MAX_PROBLEMS: usize = 100;
/// The longest text of a problem, bytes.
pub const MAX_PROBLEM_TEXT: usize = 1000;
/// The most questions or answers about routes of a message.
pub const MAX_ANSWERS: usize = 1000;
/// The most impaired peers of a report.
pub const MAX_IMPAIRED: usize = 100;
/// How often an end that hears nothing asks whether the other is still there, seconds (HTTP/2 PING).
pub const KEEP_ALIVE_S: u64 = 10;
/// How long the answer to that may take, seconds.
pub const KEEP_ALIVE_TIMEOUT_S: u64 = 10;
/// The largest request for a certificate, bytes.
pub const MAX_REQUEST: usize = 4096;
/// The most bytes of certificates, PEM.
pub const MAX_CERTIFICATES: usize = 256 << 10;
/// The largest message that asks for a first certificate, bytes: a request with the host's name and a secret.
pub const MAX_ENROLLING: usize = 8 << 10;
/// The largest message about certificates, bytes.
pub const MAX_CERTIFICATE_MESSAGE: usize = 1 << 20;
