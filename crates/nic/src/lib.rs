//! Pre-Processor and Post-Processor (Triton): parse and validate, segment, merge, checksum.
//!
//! A frame is parsed once when it enters ([`parse`]), and the guest's virtio header is checked against it
//! ([`Offload::from_virtio`]). It crosses the switch whole, however large. Segmentation, fragmentation to the path MTU
//! and checksums are the last steps before it leaves ([`Segments`]). Received TCP segments are merged before they are
//! written to a guest that accepts large packets ([`Merger`]).
//!
//! One module handles congestion marks in the two IP headers of a tunnelled packet ([`ecn`]). One rule selects the
//! worker of a packet ([`steer`]).
//!
//! Nothing here does I/O, keeps a clock or allocates per packet.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod capture;
mod checksum;
pub mod dscp;
pub mod ecn;
mod flow;
pub mod icmp_error;
mod malformed;
mod merge;
mod offload;
mod parse;
mod segment;
pub mod steer;
mod stretches;

pub use checksum::{
    Checksum, open_checksum_is_right, transport_checksum, transport_checksum_of_parts, verify_transport_checksum,
};
pub use flow::FlowKey;
pub use malformed::Malformed;
pub use merge::{Merged, Merger, Part};
pub use offload::{Offload, Segment, SegmentKind};
pub use parse::{Fragment, HEAD_LEN, L3, MAX_FRAME_LEN, Parsed, Tcp, Whole, parse, parse_packet};
pub use segment::{Segments, TooLarge, copy_of};
pub use stretches::Stretches;
