//! The fields of a packet that rules match.

use bifrost_nic::Parsed;
use bifrost_tables::Fields;
use bifrost_wire::protocol::{TCP, UDP};

/// The fields of a packet. Only unfragmented TCP and UDP packets have ports.
pub(crate) fn fields(parsed: &Parsed) -> Fields {
    let has_ports = matches!(parsed.protocol, TCP | UDP);
    Fields {
        src: parsed.src_ip,
        dst: parsed.dst_ip,
        protocol: parsed.protocol,
        ports: (has_ports && !parsed.is_fragment()).then_some((parsed.src_port, parsed.dst_port)),
    }
}

/// The fields of the conversation's packets in the other direction.
pub(crate) fn reversed(fields: Fields) -> Fields {
    let Fields { src, dst, protocol, ports } = fields;
    Fields { src: dst, dst: src, protocol, ports: ports.map(|(s, d)| (d, s)) }
}
