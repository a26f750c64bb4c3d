//! RoCEv2: the InfiniBand transport over UDP (IBTA Architecture Specification volume 1, release 1.4, "IBTA" below;
//! RoCEv2 is its annex A17).
//!
//! The UDP payload is a base transport header ([`Bth`]), extended headers that the opcode names, the payload, 0 to 3
//! pad bytes, and the invariant CRC ([`Icrc`]), 4 bytes. Supported are SEND and RDMA WRITE of RC and UC, their
//! acknowledgements, and UD; READ, atomics and congestion notification are refused by their opcode.

mod bth;
mod extended;
mod icrc;
mod opcode;
mod packet;

pub use bth::{Bth, Qpn, Sequence};
pub use extended::{Acknowledgement, Aeth, Deth, Nak, Reth};
pub use icrc::{Icrc, IcrcStarts, Route};
pub use opcode::{Opcode, Operation, Transport};
pub use packet::{Header, Packet, Refusal};

/// The UDP destination port of RoCEv2 (IANA).
pub const UDP_PORT: u16 = 4791;

/// Length of the invariant CRC behind each packet, bytes.
pub const ICRC_LEN: usize = 4;

/// Valid path MTUs: payload bytes of a packet (IBTA 9.2, PMTU).
pub const PATH_MTUS: [u16; 5] = [256, 512, 1024, 2048, 4096];

/// The default partition (IBTA 10.9.1.2), the one that RoCE uses.
pub const DEFAULT_PARTITION: u16 = 0xffff;
