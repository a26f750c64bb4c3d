//! Why a header is refused (RDM §9).

/// Why a receiver refuses a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refusal {
    /// The bytes end before the header does, or do not end with it.
    #[error("length does not fit the kind")]
    Length,
    /// The version is not 1.
    #[error("version is not supported")]
    Version,
    /// The kind is reserved.
    #[error("kind is reserved")]
    Kind,
    /// The message's class is reserved.
    #[error("class is reserved")]
    Class,
    /// The message is longer than its kind allows, or an announcement's is short enough to be sent at once.
    #[error("message length is out of range")]
    MessageLength,
    /// The offset is not that of a unit inside the message.
    #[error("offset is not that of a unit of the message")]
    Offset,
    /// The payload is not the unit's length.
    #[error("payload is not the length of the unit")]
    Payload,
    /// More numbers than 32, or more fresh ones than there are.
    #[error("count of acknowledged numbers is out of range")]
    Count,
    /// The lane's index, phase or generation is out of range.
    #[error("lane is out of range")]
    Lane,
    /// A reason or a service is reserved, or a size out of range.
    #[error("value is out of range")]
    Value,
    /// Not the mark that set-up messages begin with.
    #[error("set-up message does not begin with its mark")]
    Mark,
}

impl Refusal {
    /// The name in `docs/RDM.md` and the test vectors.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::Version => "version",
            Self::Kind => "kind",
            Self::Class => "class",
            Self::MessageLength => "message_length",
            Self::Offset => "offset",
            Self::Payload => "payload",
            Self::Count => "count",
            Self::Lane => "lane",
            Self::Value => "value",
            Self::Mark => "mark",
        }
    }
}
