//! Opcodes (IBTA 9.2.1, table 38): the transport service in the upper three bits, the operation in the lower five.

/// A transport service.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Reliable connection: the NIC acknowledges and retransmits.
    Rc = 0,
    /// Unreliable connection: a message that lost a packet is dropped.
    Uc = 1,
    /// Unreliable datagram: one packet, to any queue pair.
    Ud = 3,
}

/// Operation of a packet, and the part of its message that it carries.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// First packet of a SEND.
    SendFirst = 0x00,
    /// Middle packet of a SEND.
    SendMiddle = 0x01,
    /// Last packet of a SEND.
    SendLast = 0x02,
    /// Last packet of a SEND with immediate data.
    SendLastImm = 0x03,
    /// The only packet of a SEND.
    SendOnly = 0x04,
    /// The only packet of a SEND with immediate data.
    SendOnlyImm = 0x05,
    /// First packet of an RDMA WRITE.
    WriteFirst = 0x06,
    /// Middle packet of an RDMA WRITE.
    WriteMiddle = 0x07,
    /// Last packet of an RDMA WRITE.
    WriteLast = 0x08,
    /// Last packet of an RDMA WRITE with immediate data.
    WriteLastImm = 0x09,
    /// The only packet of an RDMA WRITE.
    WriteOnly = 0x0a,
    /// The only packet of an RDMA WRITE with immediate data.
    WriteOnlyImm = 0x0b,
    /// An acknowledgement, positive or negative. RC only.
    Acknowledge = 0x11,
}

impl Operation {
    const ALL: [Self; 13] = [
        Self::SendFirst,
        Self::SendMiddle,
        Self::SendLast,
        Self::SendLastImm,
        Self::SendOnly,
        Self::SendOnlyImm,
        Self::WriteFirst,
        Self::WriteMiddle,
        Self::WriteLast,
        Self::WriteLastImm,
        Self::WriteOnly,
        Self::WriteOnlyImm,
        Self::Acknowledge,
    ];

    /// The operation of a request packet, by the kind of request and the packet's position in its message.
    #[must_use]
    pub const fn of(write: bool, first: bool, last: bool, immediate: bool) -> Self {
        match (write, first, last, immediate) {
            (false, true, false, _) => Self::SendFirst,
            (false, false, false, _) => Self::SendMiddle,
            (false, false, true, false) => Self::SendLast,
            (false, false, true, true) => Self::SendLastImm,
            (false, true, true, false) => Self::SendOnly,
            (false, true, true, true) => Self::SendOnlyImm,
            (true, true, false, _) => Self::WriteFirst,
            (true, false, false, _) => Self::WriteMiddle,
            (true, false, true, false) => Self::WriteLast,
            (true, false, true, true) => Self::WriteLastImm,
            (true, true, true, false) => Self::WriteOnly,
            (true, true, true, true) => Self::WriteOnlyImm,
        }
    }

    /// Begins a message.
    #[must_use]
    pub const fn is_first(self) -> bool {
        use Operation::*;
        matches!(self, SendFirst | SendOnly | SendOnlyImm | WriteFirst | WriteOnly | WriteOnlyImm)
    }

    /// Ends a message.
    #[must_use]
    pub const fn is_last(self) -> bool {
        use Operation::*;
        !matches!(self, SendFirst | SendMiddle | WriteFirst | WriteMiddle | Acknowledge)
    }

    /// Part of an RDMA WRITE.
    #[must_use]
    pub const fn is_write(self) -> bool {
        self as u8 >= Self::WriteFirst as u8 && self as u8 <= Self::WriteOnlyImm as u8
    }

    /// Carries immediate data.
    #[must_use]
    pub const fn has_immediate(self) -> bool {
        use Operation::*;
        matches!(self, SendLastImm | SendOnlyImm | WriteLastImm | WriteOnlyImm)
    }

    /// Carries a RETH: the first packet of an RDMA WRITE.
    #[must_use]
    pub const fn has_reth(self) -> bool {
        self.is_write() && self.is_first()
    }
}

/// A transport service with one of its operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Opcode {
    /// The service.
    pub transport: Transport,
    /// The operation, one that the service supports.
    pub operation: Operation,
}

impl Opcode {
    /// The opcode as the first byte of a packet.
    #[must_use]
    pub const fn byte(self) -> u8 {
        (self.transport as u8) << 5 | self.operation as u8
    }

    /// Decodes an opcode byte; `None` if it is not supported.
    #[must_use]
    pub fn from_byte(byte: u8) -> Option<Self> {
        let transport = match byte >> 5 {
            0 => Transport::Rc,
            1 => Transport::Uc,
            3 => Transport::Ud,
            _ => return None,
        };
        let operation = *Operation::ALL.iter().find(|operation| **operation as u8 == byte & 0x1f)?;
        let exists = match transport {
            Transport::Rc => true,
            Transport::Uc => operation != Operation::Acknowledge,
            Transport::Ud => matches!(operation, Operation::SendOnly | Operation::SendOnlyImm),
        };
        exists.then_some(Self { transport, operation })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_an_opcode_or_refused() {
        let known: alloc::vec::Vec<u8> = (0..=255).filter(|byte| Opcode::from_byte(*byte).is_some()).collect();
        // IBTA table 38: RC 0x00..=0x0b and 0x11, UC 0x20..=0x2b, UD 0x64 and 0x65.
        let expected: alloc::vec::Vec<u8> = (0..=0x0b).chain([0x11]).chain(0x20..=0x2b).chain([0x64, 0x65]).collect();
        assert_eq!(known, expected);
        for byte in known {
            assert_eq!(Opcode::from_byte(byte).unwrap().byte(), byte);
        }
    }

    #[test]
    fn parts_of_a_message() {
        for write in [false, true] {
            for (first, last, immediate) in [(true, true, true), (true, false, false), (false, true, false)] {
                let operation = Operation::of(write, first, last, immediate);
                let seen = (operation.is_write(), operation.is_first(), operation.is_last(), operation.has_immediate());
                assert_eq!(seen, (write, first, last, immediate && last), "{operation:?}");
                assert_eq!(operation.has_reth(), write && first);
            }
            assert!(!Operation::of(write, true, false, true).has_immediate(), "the last packet carries it");
        }
    }
}
